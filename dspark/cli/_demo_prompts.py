"""What the demo and the control run ask: edits and quotes, where the prompt can be copied from, and plain chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dspark.api import SpeculativeDecoder


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A title for tables, and what the user says."""

    title: str
    text: str


PROMPTS = (
    DemoPrompt(
        "edit code",
        """Add a docstring to this function and return the whole function.

```python
def total_price(items, tax_rate):
    subtotal = 0.0
    for item in items:
        subtotal += item.price * item.quantity
    tax = subtotal * tax_rate
    return round(subtotal + tax, 2)
```""",
    ),
    DemoPrompt(
        "correct text",
        """Copy this text and correct its spelling mistakes.

The lighthouse stands on a narow cliff above the harbour. Each evening the keeper climbs one hundred and twelve steps, \
lights the lamp and writes the weather in a heavy book. In winter the storms are so loud that he can not here his own \
steps. In summer children from the village come to count the ships with him.""",
    ),
    DemoPrompt(
        "quote",
        """Here are the minutes of a meeting. Quote the sentences that say who does what.

The garden committee met on Tuesday. It rained. Amira will order forty tulip bulbs before the end of October. The shed \
needs a new door. Jonas will ask the carpenter for an offer and report at the next meeting. The committee thanked the \
school for its help. Priya will write to the families about the planting day in November.""",
    ),
    DemoPrompt("explain", "Why does the moon look larger near the horizon? Explain it to a curious ten-year-old."),
    DemoPrompt("invent", "Write the opening of a story about a clockmaker who finds a letter inside an old clock."),
)


def encoded_prompts(decoder: SpeculativeDecoder, tokens: int) -> list[tuple[str, list[int]]]:
    """(title, ids) of the prompts: chats where there is a template, cut on the left where a slot is short.

    Without a tokenizer they are numbers: a motif, repeated, so that there is something to look up.
    """
    from dspark.prompts import encode

    tokenizer, vocab = decoder.tokenizer, decoder.engine.parts.target.vocab_size
    room = max(1, decoder.engine.max_len - tokens)
    found = []
    for i, prompt in enumerate(PROMPTS):
        if tokenizer is None:
            ids = [(11 + 7 * i + 5 * j * j) % vocab for j in range(8 + i)] * 3
        elif getattr(tokenizer, "chat_template", None):
            ids = encode([{"role": "user", "content": prompt.text}], tokenizer)
        else:
            ids = encode(prompt.text, tokenizer)
        found.append((prompt.title, ids[-room:]))
    return found
