"""What a data run is to write, how much that will be, and how much it may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.config import SamplingParams, build_config
from dspark.errors import ConfigError, DataError
from dspark.sampling.draws import choice_seed
from dspark.training.chat_format import ChatFormat
from dspark.training.prompts_in import Dialogue, Skipped

FRAME_BYTES = 260
"""Of a record, beside ids and texts: names, brackets, sampling settings."""
SAMPLED_PROMPTS = 1000
"""So many prompts are tokenised for an estimate; of more, this many at even distances."""


@dataclass(frozen=True, slots=True)
class DataConfig:
    """How responses are regenerated.

    Attributes:
        temperatures: every prompt is answered at each of them.
        samples: answers at each temperature above 0.
        max_tokens: longest answer.
        max_prompt: longest prompt, history included, in tokens; conversations that exceed it end there.
        min_response: shorter answers, in tokens, are not kept, and end their conversation.
        top_k, top_p, min_p, repetition_penalty: see ``SamplingParams``.
        seed: prompt i uses hash(seed, i) (METHOD section 4), and its variant v, where it has several, hash of that and
            v; None draws afresh.
        chat: prompts go through the chat template.
        system: a system message for chats that have none.
        template_args: variables of the chat template, such as ``enable_thinking``.
    """

    temperatures: Sequence[float] = (1.0,)
    samples: int = 1
    max_tokens: int = 1024
    max_prompt: int = 1024
    min_response: int = 2
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    chat: bool = True
    system: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("samples", "max_prompt", "min_response"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"DataConfig.{name}: expected an integer of at least 1, got {value!r}")
        if self.min_response > self.max_tokens:
            raise ConfigError(f"DataConfig.min_response: {self.min_response} exceeds max_tokens {self.max_tokens}")
        temperatures = tuple(float(t) for t in self.temperatures)
        if not temperatures or len(set(temperatures)) != len(temperatures):
            raise ConfigError(f"DataConfig.temperatures: expected different numbers, got {list(self.temperatures)}")
        object.__setattr__(self, "temperatures", temperatures)
        for variant in range(len(self.variants)):
            self.params(0, variant)  # refuses what is out of range

    @property
    def variants(self) -> list[tuple[float, int]]:
        """(temperature, sample) of every answer to a prompt; at temperature 0 one is enough."""
        return [(t, sample) for t in self.temperatures for sample in range(self.samples if t > 0 else 1)]

    @property
    def max_len(self) -> int:
        """Positions that a slot of the engine needs."""
        return self.max_prompt + self.max_tokens

    def params(self, index: int, variant: int, turn: int = 0) -> SamplingParams:
        """How one answer to prompt ``index`` is decoded.

        A later turn has a seed of its own: where a template drops parts of earlier answers, its positions overlap with
        theirs, and one noise would serve two tokens of one conversation.
        """
        temperature, _ = self.variants[variant]
        seed = None
        if self.seed is not None and temperature > 0:
            seed = choice_seed(self.seed, index)
            seed = choice_seed(seed, variant) if len(self.variants) > 1 else seed
            seed = choice_seed(seed, turn) if turn else seed
        same = ("max_tokens", "top_k", "top_p", "min_p", "repetition_penalty")
        return build_config(
            SamplingParams, {"temperature": temperature, "seed": seed, **{name: getattr(self, name) for name in same}}
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a data set may hold, what earlier runs wrote included; None: no bound.

    Attributes:
        tokens: generated, kept or not.
        bytes: of all its files but the header.
    """

    tokens: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"Budget.{name}: expected at least 1, got {value}")


@dataclass(slots=True)
class Estimate:
    """Size of a data set when it is finished.

    Attributes:
        prompts: that can be asked.
        responses: still to be written; ``there`` are.
        tokens: generated, at most, those that are there included.
        bytes: of the files, if every answer takes ``max_tokens``; about.
        prompt_tokens: of all prompts, about.
        too_long: prompts of more than ``max_prompt`` tokens, about.
        skipped: lines that can't be asked, by reason.
    """

    prompts: int = 0
    responses: int = 0
    there: int = 0
    tokens: int = 0
    bytes: int = 0
    prompt_tokens: int = 0
    too_long: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def check(self, budget: Budget) -> None:
        """Refuse what would exceed a budget.

        Raises:
            DataError: with the numbers.
        """
        over = [
            f"{getattr(self, name):,} {name} against {allowed:,} allowed"
            for name in ("tokens", "bytes")
            if (allowed := getattr(budget, name)) is not None and getattr(self, name) > allowed
        ]
        if over:
            raise DataError(
                f"the data may take up to {' and '.join(over)}: allow more, ask for less, or fill the budget"
            )


def estimate(
    dialogues: Iterable[Dialogue | Skipped | None],
    lines: int,
    config: DataConfig,
    chat: ChatFormat,
    tokenizer: Any,
    remaining: Callable[[Dialogue], int],
) -> Estimate:
    """What is still to be written of a data set.

    Args:
        dialogues: of every line.
        lines: how many there are.
        remaining: dialogue -> answers still to be written.
    """
    found = Estimate()
    step = max(1, lines // SAMPLED_PROMPTS)
    per_turn: list[tuple[int, int]] = []
    sampled = 0
    for number, dialogue in enumerate(dialogues):
        if isinstance(dialogue, Skipped):
            found.skipped[dialogue.reason] += 1
        elif dialogue is not None:
            found.prompts += 1
            found.responses += remaining(dialogue)
            if number % step == 0:
                sampled += 1
                sizes = _sizes(dialogue, config, chat, tokenizer)
                found.too_long += not sizes
                per_turn += sizes
    turns = max(1, len(per_turn))
    found.tokens = found.responses * config.max_tokens
    found.bytes = found.responses * sum(size for _, size in per_turn) // turns
    share = found.prompts / max(1, sampled)
    found.prompt_tokens = round(share * len(config.variants) * sum(tokens for tokens, _ in per_turn))
    found.too_long = round(share * found.too_long)
    return found


def _sizes(dialogue: Dialogue, config: DataConfig, chat: ChatFormat, tokenizer: Any) -> list[tuple[int, int]]:
    """(prompt tokens, bytes of the record) of each answer, if it takes ``max_tokens``; empty if the prompt is too long.

    The text of an answer is taken to have as many bytes a token as the prompt.
    """
    sizes = []
    history = 0
    asked: list[dict[str, Any]] = []
    for question in dialogue.questions or ((),):
        asked += question
        ids = prompt_ids(dialogue, asked, chat, tokenizer)
        if isinstance(ids, Skipped) or not ids:
            break
        text = sum(len(str(m["content"]).encode()) + 32 for m in asked)
        prompt = len(ids) + history
        if prompt > config.max_prompt:
            break
        history += config.max_tokens
        id_bytes = 1 + sum(len(str(i)) for i in ids) / len(ids)
        text_bytes = (text / len(ids)) * history if dialogue.questions else 0
        size = FRAME_BYTES + id_bytes * (prompt + config.max_tokens) + text + text_bytes
        sizes.append((prompt, round(size)))
    return sizes


def prompt_ids(
    dialogue: Dialogue, messages: Sequence[Mapping[str, Any]], chat: ChatFormat, tokenizer: Any
) -> list[int] | Skipped:
    """Token ids of what is asked next, given the messages so far."""
    if dialogue.ids is not None:
        return list(dialogue.ids)
    if dialogue.text is not None:
        if tokenizer is None:
            return Skipped("no tokenizer", "a text needs one")
        return [int(i) for i in tokenizer(dialogue.text)["input_ids"]]
    try:
        return chat.encode(messages)
    except Exception as err:  # a chat template raises whatever its author chose, for roles that it does not take
        return Skipped("refused by the chat template", f"{type(err).__name__}: {err}")
