"""Whether two runs really agree, token by token; where they do not, by how much, and whether rounding explains it.

The margin comes from the target's own logits: one forward over the tokens up to the difference (teacher-forced), in
transformers' own attention and without any cache where the target offers it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dspark.engine.engine import Engine
    from dspark.types import FloatArray

BOUNDS = {"float64": 1e-4, "float32": 1e-4, "float16": 0.0625, "bfloat16": 0.5}
"""Largest margin, in logits, that counts as a numeric tie, by dtype.

bfloat16 logits of 32 to 64 lie 0.25 apart. Over 480 tokens of a model of 135 M parameters, the difference of the two
likeliest tokens' logits moved by 0.13 in the median and by 0.5 at most between forwards of different shape. float16
resolves eight times as much.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a run's tokens were decided: greedily at temperature 0, else by ``coupled`` with this seed."""

    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two outputs of one prompt.

    Attributes:
        verdict: ``identical``, ``tie`` (they part where rounding can decide, and what follows is the target's), or
            ``different``.
        position: index in the output of the first difference.
        tokens: what stands there in the two outputs; None where one has ended.
        margin: best score there less the lower of these two tokens' scores, in logits: for the two likeliest tokens,
            the difference of the top two.
        after: the same for the second output's tokens after that position, the worst of them.
        bound: margins up to here are ties.
    """

    verdict: str
    position: int | None = None
    tokens: tuple[int | None, int | None] = (None, None)
    margin: float = 0.0
    after: float = 0.0
    bound: float = 0.0

    @property
    def ok(self) -> bool:
        """Identical, or a tie."""
        return self.verdict != "different"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; margins that are no number are None."""
        if self.position is None:
            return {"verdict": self.verdict}
        return {
            "verdict": self.verdict,
            "position": self.position,
            "tokens": list(self.tokens),
            "margin": _finite(self.margin),
            "worst_after": _finite(self.after),
            "bound": self.bound,
        }

    def __str__(self) -> str:
        return self.in_words()

    def in_words(self, tokenizer: Any = None) -> str:
        """What differs and by how much; tokens by their text where there is a tokenizer."""
        if self.position is None:
            return self.verdict

        def name(token: int | None) -> str:
            if token is None:
                return "end"
            return str(token) if tokenizer is None else repr(tokenizer.decode([token]))

        left, right = (name(token) for token in self.tokens)
        text = f"{self.verdict} at token {self.position}: {left} or {right}, margin {self.margin:.3g}"
        if not self.margin <= self.bound:
            return f"{text}, above {self.bound:g}"
        if not self.after <= self.bound:
            return f"{text}, then a token {self.after:.3g} below the target's best, above {self.bound:g}"
        return f"{text}, within {self.bound:g}"


class Judge:
    """Compares outputs of one engine's target. No request may be live in any engine on that target.

    Args:
        engine: whose target and draws are asked.
        bound: see :data:`BOUNDS`; None for the one of the target's dtype.
    """

    def __init__(self, engine: Engine, bound: float | None = None) -> None:
        self._engine = engine
        self.dtype = str(engine.parts.target.dtype).removeprefix("torch.")
        self.bound = BOUNDS.get(self.dtype, BOUNDS["bfloat16"]) if bound is None else bound

    def compare(
        self, prompt: Sequence[int], left: Sequence[int], right: Sequence[int], rule: Rule | None = None
    ) -> Comparison:
        """Compare two outputs of ``prompt``."""
        rule = rule or Rule()
        if list(left) == list(right):
            return Comparison("identical", bound=self.bound)
        longest = max(len(left), len(right))
        where = next(i for i in range(longest) if list(left[i : i + 1]) != list(right[i : i + 1]))
        tokens = tuple(out[where] if where < len(out) else None for out in (left, right))
        margin = max(
            math.inf if t is None else float(self.regrets(prompt, [*left[:where], t], rule, where)[0]) for t in tokens
        )
        after = 0.0
        if margin <= self.bound and where + 1 < len(right):
            after = float(self.regrets(prompt, right, rule, where + 1).max())
        verdict = "tie" if margin <= self.bound and after <= self.bound else "different"
        return Comparison(verdict, where, (tokens[0], tokens[1]), margin, after, self.bound)

    def regrets(self, prompt: Sequence[int], output: Sequence[int], rule: Rule, first: int = 0) -> FloatArray:
        """How far below the best each token of ``output[first:]`` scored, in logits, [len(output) - first].

        Greedy scores are the logits; ``coupled`` ones are logits + T * Gumbel noise, whose argmax it emits.
        """
        import torch

        ids = [*prompt, *output]
        start = len(prompt) + first
        scores = self._logits(ids[:-1], start - 1).double().cpu()
        if rule.temperature > 0:
            positions = np.arange(start, len(ids), dtype=np.int64)
            seeds = np.full(len(positions), rule.seed, dtype=np.uint64)
            noise = self._engine.parts.draws.gumbel(seeds, positions, scores.shape[1])
            scores += rule.temperature * noise.double().cpu()
        chosen = scores.gather(1, torch.tensor(ids[start:], dtype=torch.int64)[:, None])[:, 0]
        regrets: FloatArray = (scores.amax(dim=1) - chosen).numpy()
        return np.where(np.isnan(regrets), np.inf, regrets)

    def _logits(self, ids: Sequence[int], first: int) -> Any:
        """The target's logits after each of ``ids[first:]``."""
        target: Any = self._engine.parts.target
        if hasattr(target, "plain_logits"):
            return target.plain_logits(ids)[first:]
        import torch

        from dspark.types import VerifyLayout

        count = len(ids)
        layout = VerifyLayout(
            token_ids=torch.tensor(ids, dtype=torch.int64, device=target.device),
            positions=torch.arange(count, dtype=torch.int64, device=target.device),
            slots=np.zeros(1, dtype=np.int64),
            starts=np.zeros(1, dtype=np.int64),
            cu_query_lens=np.array([0, count], dtype=np.int64),
            logit_rows=np.arange(first, count, dtype=np.int64),
        )
        return target.forward(layout).logits


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def summarise(found: Sequence[Comparison], tokens: int) -> str:
    """``5 of 5 outputs identical, 480 tokens``, with what differs."""
    count = {v: sum(c.verdict == v for c in found) for v in ("identical", "tie", "different")}
    text = f"{count['identical']} of {len(found)} outputs identical, {tokens} tokens"
    if count["tie"]:
        text += f"; {count['tie']} numeric {'tie' if count['tie'] == 1 else 'ties'}"
    if count["different"]:
        text += f"; {count['different']} DIFFERENT"
    return text
