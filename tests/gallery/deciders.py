"""Verifiers, kernels and targets that break a promise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.capabilities import KernelCapabilities, TargetCapabilities, VerifierCapabilities
from dspark.ops import reference
from dspark.plugins import Kind
from dspark.testing.faults import FaultyVerifier, Trip
from dspark.testing.pipeline import shipped
from dspark.testing.toys import TableTarget, random_table
from dspark.types import DrawKeys, Purpose, TargetOutput, VerifyResult

from .base import Broken


class Verifier:
    """Sound: rejection sampling written row by row."""

    capabilities = VerifierCapabilities()

    def __init__(self, config: Any, context: Any) -> None: ...

    def law(self, batch: Any, row: int, k: int) -> Tensor:
        scores = batch.scores[int(batch.row_starts[row]) + k]
        if not bool(torch.isfinite(scores.max())):
            return self.hopeless(row, scores)
        return torch.softmax(scores.double(), dim=-1)

    def hopeless(self, row: int, scores: Tensor) -> Tensor:
        from dspark.errors import RowFault

        raise RowFault("no token has a finite score", [row])

    def accept_prob(self, p: float, q: float) -> float:
        return min(1.0, p / q)

    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        rest = (p - q).clamp(min=0)
        return rest / rest.sum()

    def bonus(self, batch: Any, row: int, k: int) -> Tensor:
        return self.law(batch, row, k)

    def key(self, batch: Any, row: int, offset: int, purpose: Purpose) -> DrawKeys:
        keys, anchors = batch.keys[row : row + 1], batch.anchors[row : row + 1]
        return DrawKeys(keys, anchors, np.array([offset]), purpose)

    def draw(self, batch: Any, row: int, k: int, law: Tensor) -> int:
        return int(batch.draws.categorical(self.key(batch, row, k, Purpose.RESIDUAL), law[None])[0])

    def verify(self, batch: Any) -> VerifyResult:
        done = [self.row(batch, r) for r in range(len(batch.row_starts))]
        accepted, tokens = (np.array(x, dtype=np.int64) for x in zip(*done, strict=True))
        return VerifyResult(accepted, tokens)

    def row(self, batch: Any, row: int) -> tuple[int, int]:
        length = int(batch.verify_lens[row])
        for k in range(length):
            p, token = self.law(batch, row, k), int(batch.draft_ids[row, k])
            q = batch.q.probs(batch.draft_rows[row : row + 1], np.array([k]))[0].double()
            share = torch.tensor([self.accept_prob(float(p[token]), float(q[token]))], dtype=torch.float64)
            if not bool(batch.draws.accept(self.key(batch, row, k, Purpose.ACCEPT), share)[0]):
                return k, self.draw(batch, row, k, self.residual(p, q))
        return length, self.draw(batch, row, length, self.bonus(batch, row, length))


class ClampsLate(Verifier):
    """Normalises p - q before it cuts what is negative, so the residual's mass is wrong."""

    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        rest = torch.softmax(p - q, dim=-1)
        return rest.clamp(min=0)


class NoResidual(Verifier):
    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        return p


class AbsoluteResidual(Verifier):
    def residual(self, p: Tensor, q: Tensor) -> Tensor:
        rest = (p - q).abs()
        return rest / rest.sum()


class DraftBonus(Verifier):
    """The bonus token from the row before the last draft."""

    def bonus(self, batch: Any, row: int, k: int) -> Tensor:
        return self.law(batch, row, max(k - 1, 0))


class ReusesKey(Verifier):
    """Draws the residual with the key that the draft was drawn with."""

    def draw(self, batch: Any, row: int, k: int, law: Tensor) -> int:
        return int(batch.draws.categorical(self.key(batch, row, k, Purpose.DRAFT), law[None])[0])


class OffsetKey(Verifier):
    """Keys by the offset in the draft alone, so every round draws alike."""

    def key(self, batch: Any, row: int, offset: int, purpose: Purpose) -> DrawKeys:
        return DrawKeys(batch.keys[row : row + 1], np.array([0]), np.array([offset]), purpose)


class SharedKey(Verifier):
    """One key for every acceptance of a round."""

    def key(self, batch: Any, row: int, offset: int, purpose: Purpose) -> DrawKeys:
        return super().key(batch, row, 0 if purpose is Purpose.ACCEPT else offset, purpose)


class Lenient(Verifier):
    """Typical acceptance: a draft may pass with a little more than its due."""

    def accept_prob(self, p: float, q: float) -> float:
        return min(1.0, 1.2 * p / q)


class AcceptsMasked(Verifier):
    def accept_prob(self, p: float, q: float) -> float:
        return max(min(1.0, p / q), 0.05)


class IgnoresLength(Verifier):
    """Verifies the whole draft, scheduled or not."""

    def row(self, batch: Any, row: int) -> tuple[int, int]:
        k, length = 0, batch.draft_ids.shape[1]
        while k < length and int(batch.row_starts[row]) + k + 1 < len(batch.scores):
            if float(self.law(batch, row, k)[int(batch.draft_ids[row, k])]) < 0.3:
                break
            k += 1
        return k, self.draw(batch, row, k, self.law(batch, row, k))


class TakesAnything(Verifier):
    def hopeless(self, row: int, scores: Tensor) -> Tensor:
        return torch.full_like(scores, 1.0 / len(scores)).double()


class BlamesAll(Verifier):
    def hopeless(self, row: int, scores: Tensor) -> Tensor:
        raise ValueError("no finite score")


class InPlace(Verifier):
    def law(self, batch: Any, row: int, k: int) -> Tensor:
        scores = batch.scores[int(batch.row_starts[row]) + k]
        if not bool(torch.isfinite(scores.max())):
            return self.hopeless(row, scores)
        scores -= scores.max()
        return torch.softmax(scores.double(), dim=-1)


class OneLaw(Verifier):
    """The first row's law for every row, where a batch has several."""

    def law(self, batch: Any, row: int, k: int) -> Tensor:
        return super().law(batch, 0 if k == 0 else row, k)


class OwnNoise:
    """Pathwise by declaration, with noise that it draws itself."""

    capabilities = VerifierCapabilities(exact_under="any", pathwise=True)

    def __init__(self, config: Any, context: Any) -> None: ...

    def verify(self, batch: Any) -> VerifyResult:
        scores = batch.scores[torch.from_numpy(batch.row_starts)].double()
        noise = -torch.log(-torch.log(torch.rand_like(scores)))
        tokens = (scores + noise).argmax(dim=-1).numpy()
        return VerifyResult(np.zeros_like(tokens), tokens)


class KeepsTheDraft(OwnNoise):
    """Coupled, but emits a draft that disagrees, if it is close."""

    def verify(self, batch: Any) -> VerifyResult:
        result = shipped(Kind.VERIFIER, "coupled").verify(batch)
        drafts = batch.draft_ids.numpy()
        inside = (result.num_accepted == 0) & (batch.verify_lens > 0) & (drafts[:, 0] == 0)
        return VerifyResult(result.num_accepted, np.where(inside, drafts[:, 0], result.next_ids))


def verifier(name: str, factory: Any, check: str = "", *words: str, **more: Any) -> Broken:
    return Broken(name, Kind.VERIFIER, factory, check, words, **more)


PATHWISE = VerifierCapabilities(exact_under="any", pathwise=True)
VERIFIERS = [
    verifier("sound", Verifier),
    verifier("clamps late", ClampsLate, "test_exact_round", "the law is off by", "p = ", "q = "),
    verifier("has no residual", NoResidual, "test_exact_round", "the law is off by"),
    verifier("takes the absolute residual", AbsoluteResidual, "test_exact_round", "instead of"),
    verifier("takes the bonus from the wrong row", DraftBonus, "test_exact_round", "verify_len = 1"),
    verifier("uses a draft's key again", ReusesKey, "test_exact_round", "draw key used twice"),
    verifier("keys by offset alone", OffsetKey, "test_exact_law", "draw key used twice"),
    verifier("one key for all acceptances", SharedKey, "test_exact_round", "draw key used twice"),
    verifier("accepts a little more", Lenient, "test_exact_round", "the law is off by"),
    verifier("accepts masked tokens", AcceptsMasked, "test_masked_tokens", "token 1 was emitted"),
    verifier("ignores the schedule", IgnoresLength, "test_results", "num_accepted is"),
    verifier("decides without scores", TakesAnything, "test_rows_without_scores", "it decided on a token"),
    verifier("blames everybody", BlamesAll, "test_rows_without_scores", "ValueError: no finite score"),
    verifier("writes to scores", InPlace, "test_inputs_stay", "wrote to scores"),
    verifier("mixes rows", OneLaw, "test_rows_and_padding", "alone"),
    verifier("draws its own noise", OwnNoise, "test_paths", "instead of", capabilities=PATHWISE),
    verifier("keeps a draft that disagrees", KeepsTheDraft, "test_paths", "it emitted", capabilities=PATHWISE),
    verifier(
        "raises on a drafted token",
        lambda config, context: FaultyVerifier(shipped(Kind.VERIFIER, "rejection"), Trip(1, attributed=False)),
        "test_exact_round",
        "RuntimeError: x_1 is 1",
    ),
    verifier(
        "is registered as exact under any schedule",
        Verifier,
        "test_it_builds",
        "exact under non-anticipating schedules alone",
        capabilities=VerifierCapabilities(exact_under="any"),
    ),
]


def softmax(config: Any, context: Any) -> Any:
    return reference.softmax_rows


def tiles(scores: Tensor) -> Tensor:
    """Tiles of 16, and the last tile only if it is full."""
    width = max(scores.shape[1] // 16 * 16, min(scores.shape[1], 16))
    out = torch.zeros_like(scores, dtype=reference.working_dtype(scores))
    out[:, :width] = reference.softmax_rows(scores[:, :width])
    return out


def narrow(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1).to(reference.working_dtype(scores))


def unshifted(scores: Tensor) -> Tensor:
    """No maximum is subtracted from, and -inf is replaced by a number that is small enough for most."""
    weights = scores.to(reference.working_dtype(scores)).clamp(min=-5.0).exp()
    return weights / weights.sum(-1, keepdim=True)


def overwrites(scores: Tensor) -> Tensor:
    if scores.dtype in (torch.float32, torch.float64):
        return scores.sub_(scores.amax(-1, keepdim=True)).exp_().div_(scores.sum(-1, keepdim=True))
    return reference.softmax_rows(scores)


def flat(scores: Tensor) -> Tensor:
    """Reads memory as if rows followed one another."""
    plain = torch.as_strided(scores, scores.shape, (scores.shape[1], 1))
    return reference.softmax_rows(plain)


def jitters(scores: Tensor) -> Tensor:
    made = reference.softmax_rows(scores)
    return made * (1 + 1e-7 * torch.rand_like(made))


def kernel(name: str, function: Any, check: str = "", *words: str, **more: Any) -> Broken:
    suite = {"reference": staticmethod(reference.softmax_rows), **more.pop("suite", {})}
    return Broken(name, Kind.KERNEL, lambda config, context: make(function), check, words, suite=suite, **more)


def make(function: Any) -> Any:
    """A new callable each time."""
    return lambda *args: function(*args)


KERNELS = [
    kernel("sound", reference.softmax_rows),
    kernel("breaks at odd sizes", tiles, "test_reference", "width = 17"),
    kernel("computes in the input's precision", narrow, "test_reference", "bfloat16"),
    kernel("knows no -inf", unshifted, "test_reference", "differs from the reference"),
    kernel("writes to its input", overwrites, "test_inputs_stay", "argument 0 was changed"),
    kernel("takes every tensor for contiguous", flat, "test_views", "view = "),
    kernel("is not deterministic", jitters, "test_determinism", "other bits"),
    kernel(
        "does not run in a dtype that it declares",
        lambda scores: torch.from_numpy(scores.numpy()).softmax(-1),
        "test_reference",
        "bfloat16",
        capabilities=KernelCapabilities(dtypes=("bfloat16",)),
    ),
]


@dataclass(frozen=True)
class TargetConfig:
    """No settings."""


def table() -> Tensor:
    return random_table(6, 5, 5, seed=2)


class Toy(TableTarget):
    """Sound."""

    def __init__(self) -> None:
        super().__init__(table(), mix=0.4)


class ReadsStale(Toy):
    """Attends to all of a slot, what rejected tokens left included."""

    def _logits(self, prefix: Tensor, positions: Tensor) -> Tensor:
        return super()._logits(prefix, positions) + 0.1 * (prefix >= 0).sum(1, keepdim=True)


class Appends(Toy):
    """Keeps a length of its own and appends, whatever the layout says."""

    def forward(self, layout: Any, taps: Any = ()) -> TargetOutput:
        from dataclasses import replace

        self.lengths = getattr(self, "lengths", {})
        positions = layout.positions.clone()
        for i, slot in enumerate(layout.slots.tolist()):
            a, b = int(layout.cu_query_lens[i]), int(layout.cu_query_lens[i + 1])
            start = self.lengths.get(slot, 0)
            positions[a:b] = torch.arange(start, start + b - a)
            self.lengths[slot] = start + b - a
        return super().forward(replace(layout, positions=positions.clamp(max=self.max_len - 1)), taps)


class CopiesShort(Toy):
    """Leaves out the last position, as an end that is taken for included."""

    def copy_prefix(self, source: int, slot: int, length: int) -> bool:
        return super().copy_prefix(source, slot, length - 1)


class Unnoticed(Toy):
    """Counts no writes."""

    def forward(self, layout: Any, taps: Any = ()) -> TargetOutput:
        self.cache_version -= 1
        return super().forward(layout, taps)


class AllRows(Toy):
    def forward(self, layout: Any, taps: Any = ()) -> TargetOutput:
        from dataclasses import replace

        return super().forward(replace(layout, logit_rows=np.arange(layout.num_tokens)), taps)


class FewTaps(Toy):
    def forward(self, layout: Any, taps: Any = ()) -> TargetOutput:
        output = super().forward(layout, taps)
        rows = torch.from_numpy(np.asarray(layout.cu_query_lens[1:]) - 1)
        return output if output.taps is None else TargetOutput(output.logits, output.taps[rows])


class Boundless(Toy):
    def allocate(self, slots: int, max_len: int | None, budget_bytes: int | None = None) -> int:
        return super().allocate(slots, max_len)


class PadsSecretly(Toy):
    def executed_tokens(self, layout: Any) -> int:
        return len(layout.slots)


class Numbered(Toy):
    def fingerprint(self) -> Any:
        return {"model": "toy", "threads": 2}


class Drifts(Toy):
    steps = 0

    def forward(self, layout: Any, taps: Any = ()) -> TargetOutput:
        self.steps += 1
        output = super().forward(layout, taps)
        return TargetOutput(output.logits + 1e-9 * self.steps * torch.arange(5), output.taps)


class SeesNeighbours(Toy):
    """One attention over all that is packed: no bound between sequences."""

    def forward(self, layout: Any, taps: Any = ()) -> TargetOutput:
        output = super().forward(layout, taps)
        return TargetOutput(output.logits + 0.1 * len(layout.slots) * torch.arange(5), output.taps)


class OneAtATime(Toy):
    """Never tried with two sequences."""

    def forward(self, layout: Any, taps: Any = ()) -> TargetOutput:
        (_,) = layout.slots.tolist()
        return super().forward(layout, taps)


class CountsFromZero(Toy):
    """Takes positions from the forward in hand instead of the layout: right while prompts are read at once."""

    def forward(self, layout: Any, taps: Any = ()) -> TargetOutput:
        from dataclasses import replace

        starts = np.repeat(np.asarray(layout.cu_query_lens[:-1]), layout.query_lens)
        return super().forward(replace(layout, positions=torch.from_numpy(np.arange(layout.num_tokens) - starts)), taps)


def target(name: str, cls: Any, check: str = "", *words: str) -> Broken:
    return Broken(
        name, Kind.TARGET, lambda config, context: cls(), check, words, TargetConfig, TargetCapabilities(ragged=True)
    )


TARGETS = [
    target("sound", Toy),
    target("reads stale entries", ReadsStale, "test_rollback", "after rejected tokens"),
    target("shows the request before", ReadsStale, "test_slots_are_reused", "slot used before"),
    target("appends to its cache", Appends, "test_rollback", "differ by"),
    target("copies a position too few", CopiesShort, "test_prefixes", "slot 1 after the first 5 tokens"),
    target("does not tell of its writes", Unnoticed, "test_prefixes", "cache_version went"),
    target("gives all rows", AllRows, "test_logit_rows", "logits are (8, 5)"),
    target("taps of last rows alone", FewTaps, "test_taps", "taps are"),
    target("takes any budget", Boundless, "test_allocation", "one byte was accepted"),
    target("does not count padding", PadsSecretly, "test_executed_tokens", "3 for a layout of 14"),
    target("a fingerprint with numbers", Numbered, "test_attributes", "fingerprint"),
    target("sees its neighbours", SeesNeighbours, "test_packed_is_alone", "sequence 0 packed as [0, 1]"),
    target("raises for two sequences", OneAtATime, "test_packed_is_alone", "ValueError"),
    target("counts positions from zero", CountsFromZero, "test_parts", "read in parts of 1"),
    target("drifts", Drifts, "test_determinism", "other logits"),
]
