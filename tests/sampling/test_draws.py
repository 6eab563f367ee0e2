"""CounterDraws: keys, laws at a fixed seed, and derived seeds."""

import itertools

import numpy as np
import pytest
import torch

from dspark.errors import DSparkError
from dspark.ops import noise
from dspark.sampling.draws import CounterDraws, RequestKeys, choice_seed
from dspark.types import DrawKeys, Purpose


def keys(request, anchor, offset, purpose=Purpose.DRAFT):
    request, anchor, offset = np.broadcast_arrays(request, anchor, offset)
    return DrawKeys(request.astype(np.uint64), anchor.astype(np.int64), offset.astype(np.int64), purpose)


def test_each_part_of_a_key_changes_the_draw():
    draws = CounterDraws()
    seen = set()
    for request, anchor, offset, purpose in itertools.product(range(8), range(8), range(8), Purpose):
        seen.add(float(draws.uniforms(keys([request], [anchor], [offset], purpose))[0]))
    assert len(seen) == 8 * 8 * 8 * len(Purpose)


def test_a_draw_depends_on_its_key_alone():
    draws = CounterDraws()
    probs = torch.full((50, 7), 1 / 7, dtype=torch.float64)
    together = draws.categorical(keys(np.arange(50), 3, 1), probs)
    alone = [int(draws.categorical(keys([r], [3], [1]), probs[:1])) for r in range(50)]
    assert together.tolist() == alone
    other = CounterDraws()
    other.categorical(keys([99], [0], [0]), probs[:1])  # draws have no state
    assert other.categorical(keys(np.arange(50), 3, 1), probs).tolist() == alone


def test_accept_at_the_ends():
    draws = CounterDraws()
    many = keys(np.arange(10_000), 0, 0, Purpose.ACCEPT)
    assert draws.accept(many, torch.ones(10_000)).all()
    assert not draws.accept(many, torch.zeros(10_000)).any()


def test_accept_frequencies():
    draws = CounterDraws()
    n = 40_000
    for offset, p in enumerate((0.01, 0.3, 0.77)):
        accepted = draws.accept(keys(np.arange(n), 5, offset, Purpose.ACCEPT), torch.full((n,), p))
        assert abs(accepted.mean() - p) < 5 * (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize("vary", ["request", "anchor", "offset"])
def test_categorical_chi_square(vary):
    """The law at a fixed seed, with each part of the key as the counter (8 degrees of freedom)."""
    n = 50_000
    law = torch.tensor([0.3, 0.0, 0.2, 0.15, 0.1, 0.1, 0.05, 0.0, 0.05, 0.03, 0.02], dtype=torch.float64)
    parts = {"request": 7, "anchor": 11, "offset": 3}
    drawn = CounterDraws().categorical(keys(**(parts | {vary: np.arange(n)})), law.expand(n, -1))
    counts = np.bincount(drawn.numpy(), minlength=len(law))
    assert (counts[law.numpy() == 0] == 0).all()
    held = law.numpy() > 0
    expected = law.numpy()[held] * n
    chi2 = ((counts[held] - expected) ** 2 / expected).sum()
    assert chi2 < 37.3  # p = 1e-5


def test_gumbel_argmax_chi_square():
    """argmax(log p + g) has law p, over seeds and over positions."""
    law = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05])
    n = 40_000
    for seeds, places in ((np.arange(n), np.full(n, 9)), (np.full(n, 9), np.arange(n))):
        g = CounterDraws().gumbel(seeds.astype(np.uint64), places, 5)
        counts = np.bincount((law.log() + g).argmax(-1).numpy(), minlength=5)
        expected = law.numpy() * n
        assert ((counts - expected) ** 2 / expected).sum() < 28.5  # 4 degrees of freedom, p = 1e-5


def test_gumbel_is_the_one_noise_definition():
    seeds, places = np.array([3, 2**64 - 1], dtype=np.uint64), np.array([0, 4])
    subset = torch.tensor([4, 1])
    got = CounterDraws().gumbel(seeds, places, 6)
    assert torch.equal(got, noise.gumbel(seeds, places, 6))
    assert torch.equal(CounterDraws().gumbel(seeds, places, 6, subset), got[:, subset])


def test_mismatched_lengths_are_refused():
    with pytest.raises(DSparkError, match="2 keys for 3 rows"):
        CounterDraws().categorical(keys([1, 2], 0, 0), torch.ones(3, 2))
    with pytest.raises(DSparkError, match="2 keys for 3 rows"):
        CounterDraws().accept(keys([1, 2], 0, 0), torch.ones(3))


def test_request_keys():
    first, second = RequestKeys(5), RequestKeys(5)
    run = [first.fresh() for _ in range(1000)]
    assert run == [second.fresh() for _ in range(1000)]
    assert len(set(run)) == 1000
    assert run != [RequestKeys(6).fresh() for _ in range(1000)]
    fresh = {RequestKeys().fresh() for _ in range(100)}
    assert len(fresh) == 100
    assert all(0 <= key < 2**64 for key in fresh)
    assert max(fresh) > 2**60


def test_choice_seeds_differ_and_repeat():
    seeds = [choice_seed(7, i) for i in range(100)]
    assert len({*seeds, 7}) == 101
    assert seeds == [choice_seed(7, i) for i in range(100)]
    assert choice_seed(8, 0) not in seeds
