"""Device-side planning and packing against the schedulers and layouts that the engine uses on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark._sched import CostTable, Lagged
from dspark.ops.device import admit_top, lagged_budget, pack_lengths, survival


def drawn(seed: int, rows: int, gamma: int, *, coarse: bool) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    probs = rng.uniform(0.2, 1.0, size=(rows, gamma))
    if coarse:  # many ties
        probs = np.round(probs * 2) / 2
    return probs, rng.integers(0, gamma + 1, size=rows)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("coarse", [False, True], ids=["apart", "tied"])
def test_plans_as_the_lagged_scheduler(seed: int, coarse: bool) -> None:
    rows, gamma, base = 1 + seed % 6, 1 + seed % 5, 7 + seed % 4
    past, most = drawn(seed, rows, gamma, coarse=coarse)
    now, _ = drawn(seed + 100, rows, gamma, coarse=coarse)
    points = [(n, 20.0 + 0.6 * 2 ** int(np.ceil(np.log2(n)))) for n in range(1, base + rows * gamma + 1)]
    table = CostTable(points)
    lens, slots, generations = torch.from_numpy(most), np.arange(rows), np.ones(rows, dtype=np.int64)
    old = survival(torch.from_numpy(past), torch.full((rows,), gamma))
    new = survival(torch.from_numpy(now), lens)
    scheduler = Lagged(0.8)
    for row in range(rows):
        scheduler.seed_history(row, 1, old[row].numpy().copy())
    want = np.zeros(rows, dtype=np.int64)
    scheduler.plan(new.numpy(), most, slots, generations, want, table, base, 0, None)
    seconds = torch.tensor([1.0, *(table.verify_seconds(n) for n, _ in points)], dtype=torch.float64)
    budget = lagged_budget(old, lens, seconds, base)
    assert admit_top(new, lens, budget).tolist() == want.tolist()


def test_the_budget_is_spent_on_prefixes_and_ties_go_by_place() -> None:
    a = torch.full((3, 4), 0.5, dtype=torch.float64)
    most = torch.tensor([4, 4, 2])
    assert admit_top(a, most, 4).tolist() == [2, 1, 1]
    assert admit_top(a, most, 5).tolist() == [2, 2, 1]
    assert admit_top(a, most, 100).tolist() == [4, 4, 2]
    assert admit_top(a, most, torch.tensor(0)).tolist() == [0, 0, 0]
    a[1] = 0.0
    assert admit_top(a, most, 100).tolist() == [4, 0, 2]


def test_survival_ends_where_nothing_may_be_verified() -> None:
    got = survival(torch.tensor([[0.5, 0.5, 0.5], [1.0, 0.2, 1.0]]), torch.tensor([2, 0]))
    assert got.tolist() == [[0.5, 0.25, 0.0], [0.0, 0.0, 0.0]]


def test_packing_lays_rows_one_after_the_other() -> None:
    packed = pack_lengths(
        torch.tensor([7, 8, 9]), torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([10, 20, 30]),
        torch.tensor([2, 0, 1]), 8,
    )  # fmt: skip
    assert packed.token_ids.tolist() == [7, 1, 2, 8, 9, 5, 0, 0]
    assert packed.positions.tolist() == [10, 11, 12, 20, 30, 31, 0, 0]
    assert packed.owners.tolist() == [0, 0, 0, 1, 2, 2, -1, -1]
    assert packed.offsets.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
    assert packed.cu_query_lens.tolist() == [0, 3, 4, 6]


def test_nothing_is_read_back() -> None:
    """Everything runs on tensors without data, so no value decides a shape or a branch."""
    with torch.device("meta"):
        probs, most = torch.empty(5, 3), torch.empty(5, dtype=torch.int64)
        a = survival(probs, most)
        k = lagged_budget(a, most, torch.empty(40, dtype=torch.float64), torch.empty((), dtype=torch.int64))
        lens = admit_top(a, most, k)
        packed = pack_lengths(most, torch.empty(5, 3, dtype=torch.int64), most, lens, 20)
    assert packed.token_ids.shape == (20,)
