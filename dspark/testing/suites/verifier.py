"""What a verifier is held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from dspark.config import SamplingParams
from dspark.errors import RowFault
from dspark.plugins import Kind
from dspark.sampling.draws import CounterDraws
from dspark.testing.contracts import NotApplicable, Seen, contract
from dspark.testing.enumerate import EnumerationError, ScriptedDraws, TableNoise, law, total_variation
from dspark.testing.materials import GivenLaw
from dspark.testing.pipeline import check_law, make_parts, shipped
from dspark.testing.suite import ComponentSuite
from dspark.testing.toys import random_table
from dspark.types import DrawKeys, Mode, Purpose, VerifyInput, VerifyResult

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """Laws of R rows: the target's scores and the draft's q after each (k, x_{k-1}); the anchor is token 0.

    Attributes:
        scores: [R, gamma + 1, V, V] processed logits by row, position and token before.
        laws: [R, gamma, V, V].
    """

    scores: Tensor
    laws: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """(rows, gamma, V)."""
        rows, gamma, vocab, _ = self.laws.shape
        return rows, gamma, vocab

    def input(self, drafts: Sequence[Sequence[int]], lens: Sequence[int], draws: Any, **changes: Any) -> VerifyInput:
        """What the engine would hand over for these drafts."""
        rows, gamma, _ = self.shape
        ids = torch.tensor([list(d) for d in drafts], dtype=torch.int64).reshape(rows, gamma)
        before = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), ids], dim=1)
        packed: list[Tensor] = []
        starts: list[int] = []
        for r, length in enumerate(lens):
            starts.append(sum(int(p.shape[0]) for p in packed))
            packed.append(torch.stack([self.scores[r, k, before[r, k]] for k in range(length + 1)]))
        laws = torch.stack([torch.stack([self.laws[r, k, before[r, k]] for k in range(gamma)]) for r in range(rows)])
        values: dict[str, Any] = {
            "scores": torch.cat(packed),
            "row_starts": np.array(starts, dtype=np.int64),
            "verify_lens": np.array(lens, dtype=np.int64),
            "draft_ids": ids,
            "q": GivenLaw(laws, ids),
            "draft_rows": np.arange(rows, dtype=np.int64),
            "keys": np.arange(1, rows + 1, dtype=np.uint64),
            "anchors": np.arange(5, 5 + rows, dtype=np.int64),
            "draws": draws,
        }
        return VerifyInput(**{**values, **changes})


class VerifierSuite(ComponentSuite):
    """Holds a verifier to ``dspark.protocols.Verifier``.

    Attributes:
        mode: which requests it decides; None for ``coupled`` where it declares ``pathwise``, else ``rejection``.
        vocab_size, gamma: of the enumerated rounds.
        paths: noise tables for ``coupled``.
    """

    kind: ClassVar[Kind] = Kind.VERIFIER
    mode: Mode | None = None
    vocab_size: int = 4
    gamma: int = 2
    paths: int = 300

    def _mode(self, made: Any) -> Mode:
        return self.mode or (Mode.COUPLED if made.capabilities.pathwise else Mode.REJECTION)

    def problem(self, rows: int, gamma: int, vocab: int, purpose: str = "") -> Problem:
        """Random laws; some tokens have probability 0 in the target, others in the draft."""
        seed = int(self.random(f"{purpose}{rows}.{gamma}.{vocab}").integers(1, 2**31))
        scores = random_table(rows, gamma + 1, vocab, vocab, seed=seed)
        logits = random_table(rows, gamma, vocab, vocab, seed=seed + 1)
        if vocab > 2:
            scores[:, :, 0, 1] = -torch.inf  # p(1) = 0 after 0: a draft of 1 there can't be accepted
            logits[:, :, :, 2] = -torch.inf  # q(2) = 0 < p(2)
        return Problem(scores, torch.softmax(logits, dim=-1))

    def sizes(self) -> list[tuple[int, int]]:
        """(gamma, V), small ones first."""
        return [(g, v) for g in range(1, self.gamma + 1) for v in (2, 3, self.vocab_size)]

    @contract("num_accepted is 0..l_r and next_ids are ids of the vocabulary, both integers [R]")
    def test_results(self) -> None:
        made = self.build()
        for gamma, vocab in self.sizes():
            problem = self.problem(3, gamma, vocab, "results")
            lens = [r % (gamma + 1) for r in range(3)]
            drafts = self._drafts(made, problem, lens)
            got = made.verify(problem.input(drafts, lens, CounterDraws()))
            _check_result(got, lens, vocab, {"verify_lens": lens, "drafts": drafts})

    def _drafts(self, made: Any, problem: Problem, lens: Sequence[int]) -> list[list[int]]:
        """Drafts that q can have drawn."""
        rows, gamma, vocab = problem.shape
        rng = self.random("drafts")
        drafts = []
        for r in range(rows):
            row: list[int] = []
            for k in range(gamma):
                weights = problem.laws[r, k, row[-1] if row else 0].numpy()
                row.append(int(rng.choice(vocab, p=weights / weights.sum())))
            drafts.append(row)
        return drafts

    @contract("under `rejection`, drafts of q and its decisions together have the target's law, by enumeration")
    def test_exact_round(self) -> None:
        made = self.build()
        if self._mode(made) is not Mode.REJECTION:
            raise NotApplicable("it is pathwise; paths are compared instead")
        for gamma, vocab in self.sizes():
            problem = self.problem(1, gamma, vocab, "law")
            for length in range(gamma + 1):
                self._check_round(made, problem, length)

    def _check_round(self, made: Any, problem: Problem, length: int) -> None:
        _, gamma, vocab = problem.shape
        case = {"verify_len": length, "V": vocab, "gamma": gamma}

        def program(draws: ScriptedDraws) -> tuple[int, ...]:
            row: list[int] = []
            for k in range(gamma):
                probs = problem.laws[0, k, row[-1] if row else 0][None]
                row.append(int(draws.categorical(_key(5, k, Purpose.DRAFT), probs)[0]))
            got: VerifyResult = made.verify(problem.input([row], [length], draws))
            _check_result(got, [length], vocab, {**case, "drafts": row})
            return (*row[: int(got.num_accepted[0])], int(got.next_ids[0]))

        try:
            emitted = law(program)
        except EnumerationError as err:
            raise Seen(str(err), **case) from err
        got, wanted = _completed(emitted, problem, length + 1), _completed({(): 1.0}, problem, length + 1)
        distance = total_variation(got, wanted)
        if distance > 1e-9:
            short = {t: round(m, 6) for t, m in sorted(got.items())}
            right = {t: round(m, 6) for t, m in sorted(wanted.items())}
            p, q = torch.softmax(problem.scores[0, 0, 0], -1), problem.laws[0, 0, 0]
            raise Seen(f"the law is off by {distance:.3g}: {short} instead of {right}", **case, p=p, q=q)

    @contract("a pathwise verifier emits argmax(log p + g) one by one, whatever was drafted and scheduled")
    def test_paths(self) -> None:
        made = self.build()
        mode = self._mode(made)
        if mode is Mode.REJECTION:
            raise NotApplicable("it is not pathwise; laws are compared instead")
        for gamma, vocab in self.sizes():
            problem, rng = self.problem(1, gamma, vocab, "paths"), self.random("noise")
            for _ in range(self.paths // gamma):
                noise = rng.gumbel(size=(1, 8 + gamma, vocab)) * (mode is Mode.COUPLED)
                drafts = rng.integers(0, vocab, size=gamma).tolist()
                length = int(rng.integers(0, gamma + 1))
                source = TableNoise(torch.from_numpy(noise), first_seed=1)
                got = made.verify(problem.input([drafts], [length], source))
                path: list[int] = []
                while len(path) <= length:
                    k = len(path)
                    path.append(
                        int(
                            (problem.scores[0, k, path[-1] if path else 0] + torch.from_numpy(noise[0, 6 + k])).argmax()
                        )
                    )
                    if k == length or path[-1] != drafts[k]:
                        break
                emitted = [*drafts[: int(got.num_accepted[0])], int(got.next_ids[0])]
                if emitted != path:
                    raise Seen(
                        f"it emitted {emitted} instead of {path}",
                        drafts=drafts,
                        verify_len=length,
                        gamma=gamma,
                        noise=noise[0, 6:],
                    )

    @contract("a row's result does not depend on the other rows, nor on what lies beyond its l_r")
    def test_rows_and_padding(self) -> None:
        made = self.build()
        gamma, vocab = self.gamma, self.vocab_size
        problem = self.problem(3, gamma, vocab, "rows")
        for lens in ([gamma] * 3, [0, 1, gamma], [gamma, 0, 0]):
            drafts = self._drafts(made, problem, lens)
            whole = made.verify(problem.input(drafts, lens, CounterDraws()))
            for r in range(3):
                one = Problem(problem.scores[r : r + 1], problem.laws[r : r + 1])
                who = {"keys": np.array([r + 1], dtype=np.uint64), "anchors": np.array([5 + r])}
                padded = [*drafts[r][: lens[r]], *[0] * (gamma - lens[r])]
                got = made.verify(one.input([padded], [lens[r]], CounterDraws(), **who))
                pair = [(int(x.num_accepted[i]), int(x.next_ids[i])) for x, i in ((got, 0), (whole, r))]
                if pair[0] != pair[1]:
                    raise Seen(
                        f"row {r} alone, padded: (accepted, next) = {pair[0]}; in the batch {pair[1]}",
                        drafts=drafts,
                        verify_lens=lens,
                    )

    @contract("a token of probability 0 is never emitted, drafted or not")
    def test_masked_tokens(self) -> None:
        made = self.build()
        problem = self.problem(1, 1, 3, "masked")
        for key in range(1, 200):
            draws = CounterDraws()
            got = made.verify(problem.input([[1]], [1], draws, keys=np.array([key], dtype=np.uint64)))
            emitted = 1 if int(got.num_accepted[0]) else int(got.next_ids[0])
            if emitted == 1:
                raise Seen("token 1 was emitted", scores=problem.scores[0, 0, 0], draft=1, key=key)

    @contract("a row without any finite score is a RowFault that names it, and not a token")
    def test_rows_without_scores(self) -> None:
        made = self.build()
        for bad in (-torch.inf, torch.nan):
            problem = self.problem(2, 1, 3, "bad")
            problem.scores[1] = bad
            drafts = [[0], [0]]
            self.case = {"scores of row 1": bad, "drafts": drafts}
            try:
                made.verify(problem.input(drafts, [0, 0], CounterDraws()))
            except RowFault as fault:
                if fault.rows != (1,):
                    raise Seen(f"the RowFault names rows {fault.rows} instead of (1,)", **self.case) from fault
            else:
                raise Seen("it decided on a token", **self.case)

    @contract("scores in float32 and bfloat16 are taken as they are")
    def test_dtypes(self) -> None:
        made = self.build()
        for dtype in (torch.float32, torch.bfloat16):
            problem = self.problem(2, self.gamma, self.vocab_size, "dtypes")
            lens = [self.gamma, 0]
            drafts = self._drafts(made, problem, lens)
            self.case = {"dtype": str(dtype), "drafts": drafts}
            given = problem.input(drafts, lens, CounterDraws())
            changed = problem.input(drafts, lens, CounterDraws(), scores=given.scores.to(dtype))
            _check_result(made.verify(changed), lens, self.vocab_size, self.case)

    @contract("it changes none of its inputs")
    def test_inputs_stay(self) -> None:
        made = self.build()
        problem = self.problem(2, self.gamma, self.vocab_size, "inputs")
        lens = [self.gamma, 0]
        given = problem.input(self._drafts(made, problem, lens), lens, CounterDraws())
        kept = given.scores.clone(), given.draft_ids.clone(), given.verify_lens.copy()
        made.verify(given)
        same = torch.equal(given.scores, kept[0]) and torch.equal(given.draft_ids, kept[1])
        if not same or not np.array_equal(given.verify_lens, kept[2]):
            raise Seen("it wrote to scores, draft_ids or verify_lens", verify_lens=lens)

    @contract("a whole engine that decides by it emits the target's law, and never draws twice with one key")
    def test_exact_law(self) -> None:
        if self._mode(self.build()) is not Mode.REJECTION:
            raise NotApplicable("it is pathwise; paths are compared instead")

        def make(draws: Any) -> Any:
            verifiers = {mode: shipped(Kind.VERIFIER, mode.value) for mode in Mode}
            return make_parts(draws, verifiers={**verifiers, Mode.REJECTION: self.build()})

        for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=2)):
            check_law(make, params=params, top_k=params.top_k)


def _key(anchor: int, offset: int, purpose: Purpose) -> DrawKeys:
    return DrawKeys(np.array([1], dtype=np.uint64), np.array([anchor]), np.array([offset]), purpose)


def _check_result(got: VerifyResult, lens: Sequence[int], vocab: int, case: dict[str, Any]) -> None:
    accepted, tokens = np.asarray(got.num_accepted), np.asarray(got.next_ids)
    if (
        accepted.shape != (len(lens),)
        or tokens.shape != (len(lens),)
        or {accepted.dtype.kind, tokens.dtype.kind} != {"i"}
    ):
        raise Seen(f"num_accepted {accepted!r}, next_ids {tokens!r}", **case)
    if (accepted < 0).any() or (accepted > np.asarray(lens)).any():
        raise Seen(f"num_accepted is {accepted.tolist()}", **case)
    if (tokens < 0).any() or (tokens >= vocab).any():
        raise Seen(f"next_ids are {tokens.tolist()} of {vocab} tokens", **case)


def _completed(emitted: dict[tuple[int, ...], float], problem: Problem, length: int) -> dict[tuple[int, ...], float]:
    """The law of ``length`` tokens, what a round left open taken from the target."""
    done: dict[tuple[int, ...], float] = {}
    live = dict(emitted)
    while live:
        tokens, mass = live.popitem()
        if len(tokens) == length:
            done[tokens] = done.get(tokens, 0.0) + mass
            continue
        p = torch.softmax(problem.scores[0, len(tokens), tokens[-1] if tokens else 0], dim=-1)
        for token, share in enumerate(p.tolist()):
            if share > 0:
                longer = (*tokens, token)
                live[longer] = live.get(longer, 0.0) + mass * share
    return done
