"""The exact matrix of block drafters, once with the Triton kernels: the same laws, to float32's precision."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from dspark.config import SamplingParams
from dspark.drafters.dspark import DSparkDraft
from dspark.ops import library
from dspark.sampling.draws import CounterDraws
from tests.drafters.exact import HEADS, Cell, one_round, toy_target
from tests.drafters.kernels import KernelCell, Remembered
from tests.drafters.toys import drafter_of_vocabulary
from tests.exactness.harness import decode

pytestmark = pytest.mark.filterwarnings("error::dspark.errors.DSparkWarning")


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """Within, ``torch.ops.dspark`` runs Triton's kernels on a CPU, as it does on a GPU."""
    own = {library._bias_sample: library._bias_sample_cuda, library._reject_sample: library._reject_sample_cuda}
    before = {op: op._backend_fns["cpu"] for op in own}
    for op, kernels in own.items():
        op.register_kernel("cpu")(kernels)
    yield
    for op, plain in before.items():
        op.register_kernel("cpu")(plain)


BIAS, REJECT = Remembered(library.bias_sample), Remembered(library.reject_sample)


def cell(head: str, sampling: str, *, anchor_first: bool = True, kept: int | None = None) -> KernelCell:
    return KernelCell(head, anchor_first, "token", "fixed", "dip", sampling, kept, BIAS, REJECT)


def test_the_operators_run_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the enumeration below would compare the references with themselves."""
    from dspark.ops.triton import launch
    from tests.kernels_interp.cases import BiasCase, RejectCase

    names: list[str] = []

    def note(made: launch.Launch) -> Any:
        names.append(made.kernel.fn.__name__)
        return made.run()

    with launch.intercepted(note):
        library.bias_sample(**BiasCase(2, 9, 0).arguments())
        library.reject_sample(**RejectCase(2, 1, 9, law=False).arguments())
    assert names == ["bias_partials", "fold_tiles", "row_partials", "decide", "final_partials", "fold_final"]


CELLS = (
    ("markov", "T=.7", True, None),
    ("rnn", "T=.7", False, None),
    ("gated", "T=1", True, None),
    ("gated", "top_k", True, None),
    ("markov", "top_p", True, None),
    ("markov", "min_p", False, None),
    ("markov", "T=1", True, 2),
    ("gated", "top_k", True, 2),
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("head", "sampling", "anchor_first", "kept"), CELLS)
def test_one_round_has_the_targets_law(head: str, sampling: str, anchor_first: bool, kept: int | None) -> None:
    before = BIAS.calls, REJECT.calls
    assert one_round(cell(head, sampling, anchor_first=anchor_first, kept=kept)) <= 1e-6
    assert BIAS.calls > before[0]
    assert REJECT.calls > before[1]


@cache
def pruned(head: str) -> DSparkDraft:
    """One for all runs of a cell."""
    return drafter_of_vocabulary(head, toy_target(), 3, 2)


class PrunedCell(KernelCell):
    """Drafts are of two of the target's three tokens, and q is 0 at the other."""

    @property
    def drafter(self) -> DSparkDraft:
        return pruned(self.head)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("head", "sampling"), [("markov", "T=.7"), ("gated", "top_k")])
def test_a_pruned_vocabulary_has_the_targets_law(head: str, sampling: str) -> None:
    made = PrunedCell(head, True, "token", "fixed", "dip", sampling, None, BIAS, REJECT)
    assert made.drafter.token_map is not None
    before = BIAS.calls, REJECT.calls
    assert one_round(made) <= 1e-6
    assert BIAS.calls > before[0]
    assert REJECT.calls > before[1]


@pytest.mark.parametrize("head", HEADS)
def test_seeded_requests_give_the_tokens_of_plain_torch(head: str) -> None:
    request = ((0, 1, 2, 0), SamplingParams(max_tokens=8, temperature=1.0, seed=5))
    plain = Cell(head, True, "token", "fixed", "dip", "T=1")
    made = cell(head, "T=1")
    assert decode(plain.engine(CounterDraws()), [request]) == decode(made.engine(CounterDraws()), [request])
