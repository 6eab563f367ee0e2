"""Rows of many tiles: what is decided must not depend on where one ends, in any pass of either operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.ops import bias_sample as bias
from dspark.ops import noise
from dspark.ops.reject_sample import COUPLED, GREEDY, REJECTION, Law, Settings, masked_scores, reference
from dspark.ops.triton import bias_sample as drawing
from dspark.ops.triton import reject_sample as deciding
from dspark.ops.triton.bias_sample import bias_sample
from dspark.ops.triton.launch import Tile
from dspark.ops.triton.reject_sample import reject_sample
from dspark.types import Purpose
from tests.kernels_interp.cases import BIAS_CASES, REJECT_CASES, BiasCase, RejectCase, eighths, keys_of
from tests.kernels_interp.test_reject_sample import same

NARROW = Tile(block_v=16, most_d=16)
CUT = 16
"""Columns of a tile."""


@pytest.fixture(autouse=True)
def many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 columns in every pass, folded two at a time."""
    for name, size in (("ROW_BLOCK", CUT), ("MASK_BLOCK", CUT), ("FOLD_BLOCK", 2), ("FOLD_TILES", 2)):
        monkeypatch.setattr(deciding, name, size)
    monkeypatch.setattr(drawing, "FOLD_TILES", 2)


@pytest.mark.parametrize("case", BIAS_CASES[1:5:2] + BIAS_CASES[9:10] + BIAS_CASES[11:14], ids=str)
def test_a_draw_from_many_tiles(case: BiasCase) -> None:
    arguments = case.arguments()
    got, want = bias_sample(**arguments, tile=NARROW), bias.reference(**arguments)
    assert torch.equal(got.token, want.token)
    torch.testing.assert_close(got.log_q, want.log_q, atol=3e-6, rtol=1e-6)


@pytest.mark.parametrize("case", [c for c in REJECT_CASES if c.vocab > 2 * CUT], ids=str)
def test_a_decision_from_many_tiles(case: RejectCase) -> None:
    arguments = case.arguments()
    same(reject_sample(**arguments, tile=NARROW), reference(**arguments))


@pytest.mark.parametrize("mode", [GREEDY, REJECTION, COUPLED], ids=["greedy", "rejection", "coupled"])
@pytest.mark.parametrize("settings", ["top_k", "top_p", "min_p", "all"])
def test_masks_of_every_mode_across_tiles(mode: int, settings: str) -> None:
    arguments = RejectCase(3, 1, 50, settings=settings, seed=5, modes=(mode,)).arguments()
    same(reject_sample(**arguments, tile=NARROW), reference(**arguments))


def deciding_once(logits: torch.Tensor, mode: int, settings: Settings | None, keys: torch.Tensor) -> dict[str, Any]:
    rows = len(logits)
    return {
        "logits": logits,
        "starts": torch.arange(rows, dtype=torch.int32),
        "lens": torch.zeros(rows, dtype=torch.int32),
        "drafts": torch.zeros(rows, 0, dtype=torch.int64),
        "mode": torch.full((rows,), mode, dtype=torch.int32),
        "uniforms": torch.zeros(rows, 0, dtype=torch.float64),
        "keys": keys,
        "settings": settings,
    }


def test_ties_at_a_masks_edge_that_lie_on_both_sides_of_a_tiles() -> None:
    """Equal scores at 15, 16, 31 and 32: top-k keeps all of them, top-p the highest ids that its mass needs."""
    logits = torch.full((6, 40), -4.0)
    logits[:, [15, 16, 31, 32]] = 1.0
    share = torch.softmax(logits[0].double(), 0)
    each, rest = float(share[15]), float(share[logits[0] < 0].sum())
    p = torch.tensor([1.0, 1.0, *(1.0 - rest - (gone + 0.5) * each for gone in range(4))])
    k = torch.tensor([2, 4, 0, 0, 0, 0], dtype=torch.int32)
    settings = Settings(torch.ones(6), k, p, torch.zeros(6))
    left = torch.isfinite(masked_scores(logits, settings, torch.arange(6), torch.zeros(6, dtype=torch.bool)))
    assert left.sum(1).tolist() == [4, 4, 4, 3, 2, 1]
    given = deciding_once(logits, REJECTION, settings, keys_of(6, 1, Purpose.RESIDUAL))
    given["mode"][::2] = COUPLED
    same(reject_sample(**given, tile=NARROW), reference(**given))  # each row's log-probability is that of 4, .., 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_thresholds_are_found_in_every_dtype_and_of_either_sign(dtype: torch.dtype) -> None:
    """Some lie below 0, where the bits of floats fall as they rise; of 16-bit logits the last bits are all 0."""
    g = torch.Generator().manual_seed(3)
    logits = (3 * torch.randn(8, 50, generator=g)).to(dtype)
    logits[2, :20] = 0.0
    logits[3, 20:] = -torch.inf
    k = torch.tensor([1, 49, 25, 30, 0, 0, 45, 0], dtype=torch.int32)
    p = torch.tensor([1.0, 1.0, 1.0, 0.9, 0.999999, 1e-6, 0.9999, 0.5])
    settings = Settings(torch.tensor([0.7, 1.0, 1.5, 0.3] * 2), k, p, torch.zeros(8))
    given = deciding_once(logits, REJECTION, settings, keys_of(8, 1, Purpose.RESIDUAL))
    same(reject_sample(**given, tile=NARROW), reference(**given))


def test_logits_that_a_temperature_makes_equal_are_ties() -> None:
    """Four neighbours among float32's numbers, of which some are the same over 1.5: top-k keeps what is equal to the
    k-th, and of top-p's edge lower ids go first, as if the logits had been equal."""
    row = torch.full((40,), -4.0)
    step = torch.tensor(1.9)
    for place in (31, 5, 17, 16):
        row[place] = step
        step = torch.nextafter(step, torch.tensor(2.0))
    assert len((row / 1.5).unique()) < len(row.unique())
    logits = row.expand(8, -1).contiguous()
    k, p = torch.tensor([1, 2, 3, 4, 0, 0, 0, 0], dtype=torch.int32), torch.tensor([1.0] * 4 + [0.1, 0.3, 0.55, 0.8])
    settings = Settings(torch.full((8,), 1.5), k, p, torch.zeros(8))
    given = deciding_once(logits, REJECTION, settings, keys_of(8, 1, Purpose.RESIDUAL))
    same(reject_sample(**given, tile=NARROW), reference(**given))


@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000], ids=["NaN", "-NaN"])
def test_a_nan_of_either_sign_ends_its_row_under_every_mask(bits: int) -> None:
    """Masked away, it would leave a row that looks whole."""
    logits = eighths(torch.Generator().manual_seed(2), 7, 40)
    logits.view(torch.int32)[1:, 37] = bits
    k = torch.tensor([3, 3, 3, 3, 0, 0, 0], dtype=torch.int32)
    p, m = torch.tensor([1.0] * 4 + [0.6] + [1.0] * 2), torch.tensor([0.0] * 5 + [0.2, 0.0])
    given = deciding_once(logits, REJECTION, Settings(torch.full((7,), 0.7), k, p, m), keys_of(7, 1, Purpose.RESIDUAL))
    given["mode"][2:4] = torch.tensor([COUPLED, GREEDY])
    got, want = reject_sample(**given, tile=NARROW), reference(**given)
    assert torch.isnan(want.log_prob).tolist() == [False] + [True] * 6
    assert torch.isnan(got.log_prob).tolist() == [False] + [True] * 6
    assert got.token[0] == want.token[0]
    assert ((got.token >= 0) & (got.token < 40)).all()


@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000], ids=["NaN", "-NaN"])
def test_a_nan_of_either_sign_in_the_base_logits_says_nan(bits: int) -> None:
    arguments = BiasCase(3, 50, 8).arguments()
    arguments["base"].view(torch.int32)[1, 37] = bits
    got = bias_sample(**arguments, tile=NARROW)
    assert torch.isnan(got.log_q).tolist() == [False, True, False]


def test_q_is_recomputed_by_other_tiles_to_a_few_units_in_the_last_place() -> None:
    """Drawing takes 48 features in one product, deciding 16 at a time, of other columns: sums in another order. By the
    residual of each token, forced in turn, q differs by less than 2e-6 of what it was drawn from."""
    g = torch.Generator().manual_seed(4)
    rows, vocab, rank = 2, 37, 48
    base, latent, w2 = (torch.randn(*s, generator=g) for s in ((rows, vocab), (rows, rank), (vocab, rank)))
    latent = latent / 4
    warm = torch.tensor([1.0, 0.6])
    drawn = bias_sample(base, warm, keys_of(rows, 1, Purpose.DRAFT)[:, 0], latent, w2, tile=Tile(block_v=32, most_d=64))
    exact = torch.softmax((base.double() + latent.double() @ w2.double().T) / warm.double()[:, None], -1)
    target = torch.log(torch.full((vocab,), 1.0 / vocab)).expand(2 * rows, -1).contiguous()
    given = {
        **deciding_once(target, REJECTION, None, keys_of(rows, 2, Purpose.RESIDUAL)),
        "starts": torch.arange(rows, dtype=torch.int32) * 2,
        "lens": torch.ones(rows, dtype=torch.int32),
        "mode": torch.full((rows,), REJECTION, dtype=torch.int32),
        "drafts": drawn.token[:, None],
        "uniforms": torch.ones(rows, 1, dtype=torch.float64),
        "log_q": drawn.log_q[:, None],
        "law": Law(base[None], drawn.lse[None], warm, latent[None], w2),
    }
    rest = (1.0 / vocab - exact).clamp(min=0)
    residual = rest / rest.sum(1, keepdim=True)
    for token in range(0, vocab, 5):
        table = torch.full((2 * rows, vocab), -1e30)
        table[:, token] = 0.0
        got = reject_sample(**given, gumbel=table, tile=NARROW)
        assert got.accepted.tolist() == [0, 0]
        for r in range(rows):
            if residual[r, token] > 0:
                assert int(got.token[r]) == token
                assert float(got.log_prob[r].double().exp()) == pytest.approx(float(residual[r, token]), abs=2e-6)


def test_the_noise_of_a_token_does_not_depend_on_its_tile() -> None:
    logits = torch.zeros(4, 50)
    keys = keys_of(4, 1, Purpose.RESIDUAL)
    got = reject_sample(**deciding_once(logits, COUPLED, None, keys), tile=NARROW)
    drawn = noise.gumbel_of_bits(noise.bits_of_halves(keys[:, 0], torch.arange(50, dtype=torch.int32)))
    assert torch.equal(got.token, drawn.argmax(-1))
