"""``bias_sample`` in Triton against its reference: the same tokens under the same noise, and the right law."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.errors import ConfigError
from dspark.ops import noise
from dspark.ops.bias_sample import biased_logits, reference
from dspark.ops.triton.bias_sample import bias_sample
from dspark.ops.triton.launch import Tile
from dspark.types import Purpose
from tests.kernels_interp.cases import BIAS_CASES, BiasCase, eighths, keys_of

SMALL = Tile(block_v=32, most_d=32)


@pytest.mark.parametrize("case", BIAS_CASES, ids=str)
@pytest.mark.parametrize("tile", [SMALL, None], ids=["small", "tuned"])
def test_draws_the_references_tokens(case: BiasCase, tile: Tile | None) -> None:
    arguments = case.arguments()
    want = reference(**arguments)
    got = bias_sample(**arguments, tile=tile)
    assert torch.equal(got.token, want.token)
    torch.testing.assert_close(got.log_q, want.log_q, atol=3e-6, rtol=1e-6)
    torch.testing.assert_close(got.lse, want.lse, atol=3e-6, rtol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_draws_them_on_logits_that_are_not_exact(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    base, latent, w2 = (torch.randn(*s, generator=g) for s in ((7, 411), (7, 48), (411, 48)))
    temperature = torch.rand(7, generator=g) + 0.3
    keys = keys_of(7, 1, Purpose.DRAFT, seed=seed)[:, 0]
    want = reference(base, temperature, keys, latent, w2)
    got = bias_sample(base, temperature, keys, latent, w2, tile=SMALL)
    assert torch.equal(got.token, want.token)
    torch.testing.assert_close(got.log_q, want.log_q, atol=2e-5, rtol=1e-5)


def test_greedy_rows_take_the_lowest_of_equal_scores_without_noise() -> None:
    base = torch.zeros(2, 100)
    base[0, [70, 41, 99]] = 1.0
    got = bias_sample(base, torch.zeros(2), keys_of(2, 1, Purpose.DRAFT)[:, 0], tile=SMALL)
    assert got.token.tolist() == [41, 0]
    assert got.log_q.tolist() == [0.0, 0.0]


def test_noise_goes_by_target_id() -> None:
    """A pruned drafter with all tokens, renamed, draws what an unpruned one draws."""
    g = torch.Generator().manual_seed(3)
    base = eighths(g, 5, 90)
    order = torch.randperm(90, generator=g)
    keys, warm = keys_of(5, 1, Purpose.DRAFT)[:, 0], torch.ones(5)
    plain = bias_sample(base, warm, keys, tile=SMALL)
    renamed = bias_sample(base[:, order], warm, keys, token_map=order, tile=SMALL)
    cut = bias_sample(base[:, order], warm, keys, candidates=order.expand(5, -1), tile=SMALL)
    assert torch.equal(plain.token, renamed.token)
    assert torch.equal(plain.token, cut.token)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    case = BiasCase(20, 77, 40)
    arguments = case.arguments()
    whole = bias_sample(**arguments, tile=SMALL)
    for r in (0, 7, 19):
        alone = {k: v[r : r + 1] if k in ("base", "temperature", "keys", "latent") else v for k, v in arguments.items()}
        one = bias_sample(**alone, tile=SMALL)
        assert (one.token[0], one.log_q[0], one.lse[0]) == (whole.token[r], whole.log_q[r], whole.lse[r])


def test_given_noise_replaces_that_of_the_keys() -> None:
    arguments = BiasCase(4, 70, 8).arguments()
    forced = torch.full((4, 70), -1e30)
    forced[:, 33] = 0.0
    got = bias_sample(**arguments, gumbel=forced, tile=SMALL)
    scores = biased_logits(arguments["base"], arguments["latent"], arguments["w2"])
    warm = arguments["temperature"]
    law = torch.log_softmax(scores / torch.where(warm == 0, 1.0, warm)[:, None], dim=-1)
    assert got.token[1:].tolist() == [33, 33, 33]
    torch.testing.assert_close(got.log_q[1:], law[1:, 33], atol=3e-6, rtol=1e-6)


def test_a_row_without_a_finite_score_says_nan_and_harms_no_other() -> None:
    arguments = BiasCase(6, 129, 8).arguments()
    want = reference(**arguments)
    arguments["base"][2] = -torch.inf
    arguments["base"][4, 100] = torch.nan
    got = bias_sample(**arguments, tile=SMALL)
    others = torch.tensor([0, 1, 3, 5])
    assert torch.isnan(got.log_q[[2, 4]]).all()
    assert torch.equal(got.token[others], want.token[others])
    assert ((got.token >= 0) & (got.token < 129)).all()


def test_strides_are_respected() -> None:
    arguments = BiasCase(5, 70, 16).arguments()
    want = reference(**arguments)
    for name in ("base", "latent", "w2"):
        wide = torch.full((arguments[name].shape[0], 3 * arguments[name].shape[1]), torch.nan)
        wide[:, : arguments[name].shape[1]] = arguments[name]
        arguments[name] = wide[:, : arguments[name].shape[1]]
    got = bias_sample(**arguments, tile=SMALL)
    assert torch.equal(got.token, want.token)


def test_misfits_are_refused() -> None:
    arguments = BiasCase(5, 70, 16).arguments()
    for name, wrong in (("temperature", torch.ones(4)), ("w2", torch.ones(69, 16)), ("latent", torch.ones(5, 15))):
        with pytest.raises(ConfigError, match=name):
            bias_sample(**{**arguments, name: wrong})


def test_a_head_of_two_dtypes_is_refused() -> None:
    """A matrix product takes one dtype, and rounding either to the other's would change the law."""
    arguments = BiasCase(5, 70, 16, torch.bfloat16).arguments()
    mixed = {**arguments, "latent": arguments["latent"].float()}
    for op in (reference, bias_sample):
        with pytest.raises(ConfigError, match="latent is float32 and w2 bfloat16"):
            op(**mixed)


def test_keys_that_are_no_halves_are_refused() -> None:
    arguments = BiasCase(5, 70, 16).arguments()
    with pytest.raises(ConfigError, match="keys must be int32"):
        bias_sample(**{**arguments, "keys": arguments["keys"].long()})


def test_no_rows_are_no_launch() -> None:
    arguments = BiasCase(5, 70, 0).arguments()
    none = {name: arguments[name][:0] for name in ("base", "temperature", "keys")}
    assert [len(x) for x in bias_sample(**none)] == [0, 0, 0]


DRAWS = 1000


def test_the_law_is_that_of_the_biased_logits() -> None:
    """Chi-square over V = 64 of 1,000 requests of one law; 63 degrees of freedom, p within 1e-5 .. 1 - 1e-5."""
    g = torch.Generator().manual_seed(5)
    base, latent, w2 = eighths(g, 1, 64, most=8), eighths(g, 1, 8, most=6), eighths(g, 64, 8, most=3)
    keys = keys_of(DRAWS, 1, Purpose.DRAFT, seed=11)[:, 0]
    warm = torch.full((DRAWS,), 0.8)
    got = bias_sample(base.expand(DRAWS, -1), warm, keys, latent.expand(DRAWS, -1), w2, tile=Tile(256, 64, 16))
    law = torch.softmax(biased_logits(base, latent, w2)[0].double() / 0.8, dim=0).numpy()
    counts = np.bincount(got.token.numpy(), minlength=64)
    statistic = float(((counts - DRAWS * law) ** 2 / (DRAWS * law)).sum())
    assert 23 < statistic < 124, statistic
    torch.testing.assert_close(got.log_q.double().exp(), torch.from_numpy(law)[got.token], atol=1e-6, rtol=1e-5)


def test_keys_by_purpose_and_offset_draw_apart() -> None:
    base, warm = torch.zeros(60, 64), torch.ones(60)
    by_purpose = [keys_of(60, 2, purpose) for purpose in (Purpose.DRAFT, Purpose.RESIDUAL)]
    drawn = [bias_sample(base, warm, keys[:, k], tile=SMALL).token for keys in by_purpose for k in (0, 1)]
    for i in range(4):
        for j in range(i):
            assert int((drawn[i] == drawn[j]).sum()) < 10  # 1 by chance


def test_coupled_keys_give_the_noise_of_the_engine() -> None:
    """Under (seed, position) keys a row takes argmax(logits + the engine's Gumbel noise)."""
    g = torch.Generator().manual_seed(8)
    base = eighths(g, 9, 111)
    seeds, places = np.arange(9, dtype=np.uint64), np.arange(9) + 40
    keys = noise.key_halves(noise.row_keys(noise.NOISE, seeds, places))
    got = bias_sample(base, torch.ones(9), keys, tile=SMALL)
    assert torch.equal(got.token, (base + noise.gumbel(seeds, places, 111)).argmax(-1))
