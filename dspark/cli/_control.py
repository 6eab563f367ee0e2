"""The control run of ``dspark doctor``: plain, speculative, plain again, and who differs.

The first plain run decodes prompt by prompt, the second all prompts together: they differ where the target's
arithmetic depends on the shape of the batch. The speculative run decodes all together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dspark.cli._compare import Comparison, Judge, Rule

if TYPE_CHECKING:
    from dspark.api import Generation, SpeculativeDecoder

RULES = {"greedy": Rule(), "seeded": Rule(temperature=0.8, seed=2026)}

NOBODY = "nobody"
BATCH = "the batch's shape"
NEAR_TIE = "speculation, within rounding"
SPECULATION = "SPECULATION"
PLAIN = "PLAIN DECODING"
REFERENCE = "THE PACKED FORWARD"


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt under one rule.

    Attributes:
        title, sampling: which.
        plain: the two plain runs against each other.
        speculative: the speculative run against the plain one that it is closer to.
        reference: worst margin of any token of the runs against the target's own logits (no cache, one sequence).
        tokens: of the speculative output.
        bound: largest margin that rounding explains.
    """

    title: str
    sampling: str
    plain: Comparison
    speculative: Comparison
    reference: float
    tokens: int
    bound: float

    @property
    def who(self) -> str:
        """Who differs; in capitals where rounding does not explain it."""
        if not self.speculative.ok:
            return SPECULATION
        if not self.plain.ok:
            return PLAIN
        if not self.reference <= self.bound:
            return REFERENCE
        if self.plain.position is not None:
            return BATCH
        return NOBODY if self.speculative.position is None else NEAR_TIE

    @property
    def ok(self) -> bool:
        """True where nothing but rounding differs."""
        return self.who in (NOBODY, BATCH, NEAR_TIE)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "prompt": self.title,
            "sampling": self.sampling,
            "ok": self.ok,
            "who": self.who,
            "plain_plain": self.plain.as_dict(),
            "plain_speculative": self.speculative.as_dict(),
            "reference_margin": self.reference,
            "tokens": self.tokens,
        }


def run_control(
    plain: SpeculativeDecoder,
    fast: SpeculativeDecoder,
    prompts: Sequence[tuple[str, list[int]]],
    tokens: int,
    judge: Judge,
) -> list[Case]:
    """Decode (title, ids) prompts three times under each rule and compare.

    Raises:
        DSparkError: what ended a request.
    """
    from dspark.config import SamplingParams

    cases = []
    ids = [prompt for _, prompt in prompts]
    for sampling, rule in RULES.items():
        params = SamplingParams(
            max_tokens=tokens, temperature=rule.temperature, seed=rule.seed if rule.temperature else None
        )
        alone = [finished(plain.generate([prompt], params))[0] for prompt in ids]
        drafted = finished(fast.generate(ids, params))
        together = finished(plain.generate(ids, params))
        for (title, prompt), first, second, third in zip(prompts, alone, drafted, together, strict=True):
            cases.append(judge_case(judge, title, sampling, prompt, (first.ids, second.ids, third.ids)))
    return cases


def judge_case(
    judge: Judge, title: str, sampling: str, prompt: Sequence[int], outputs: tuple[list[int], list[int], list[int]]
) -> Case:
    """Compare plain, speculative and plain output of one prompt."""
    rule = RULES[sampling]
    alone, drafted, together = outputs
    plain = judge.compare(prompt, alone, together, rule)
    found = [judge.compare(prompt, other, drafted, rule) for other in (alone, together)]
    order = ("identical", "tie", "different")
    closest = min(found, key=lambda c: (order.index(c.verdict), -(c.position or 0)))
    distinct = {tuple(output) for output in outputs}
    reference = max(float(judge.regrets(prompt, output, rule).max()) for output in distinct)
    return Case(title, sampling, plain, closest, reference, len(drafted), judge.bound)


def finished(results: Sequence[Generation]) -> Sequence[Generation]:
    """The results.

    Raises:
        DSparkError: what ended one of them.
    """
    for result in results:
        if result.error is not None:
            raise result.error
    return results
