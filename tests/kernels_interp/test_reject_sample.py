"""``reject_sample`` in Triton against its reference, and the law of drafting and verifying together."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from dspark.errors import ConfigError
from dspark.ops import noise
from dspark.ops.reject_sample import COUPLED, GREEDY, REJECTION, Law, Settings, masked_scores, reference
from dspark.ops.triton import reject_sample as kernels
from dspark.ops.triton.bias_sample import bias_sample
from dspark.ops.triton.launch import Tile
from dspark.ops.triton.reject_sample import reject_sample
from dspark.sampling.warpers import Warpers, warp
from dspark.types import Purpose
from tests.kernels_interp.cases import REJECT_CASES, RejectCase, eighths, keys_of

SMALL = Tile(block_v=32, most_d=32)


def same(got: Any, want: Any) -> None:
    assert torch.equal(got.accepted, want.accepted)
    assert torch.equal(got.token, want.token)
    torch.testing.assert_close(got.log_prob, want.log_prob, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.chance, want.chance, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("case", REJECT_CASES, ids=str)
def test_decides_as_the_reference(case: RejectCase) -> None:
    arguments = case.arguments()
    same(reject_sample(**arguments, tile=SMALL), reference(**arguments))


def gapped(value: Any) -> Any:
    """The same numbers as a view with gaps in its last dimension."""
    if isinstance(value, (Law, Settings)):
        return dataclasses.replace(value, **{f.name: gapped(getattr(value, f.name)) for f in dataclasses.fields(value)})
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    wide = torch.zeros(*value.shape[:-1], 2 * value.shape[-1] + 1, dtype=value.dtype)
    view = wide[..., 1::2]
    view.copy_(value)
    return view


@pytest.mark.parametrize("case", REJECT_CASES[::3], ids=str)
def test_views_are_read_by_their_strides(case: RejectCase) -> None:
    """The engine hands over columns of larger tensors: log q of the drafts that were scheduled, say."""
    arguments = case.arguments()
    same(reject_sample(**{name: gapped(x) for name, x in arguments.items()}, tile=SMALL), reference(**arguments))


def test_outputs_share_no_memory() -> None:
    """What ``torch.library`` asks of an operator."""
    found = reject_sample(**REJECT_CASES[0].arguments(), tile=SMALL)
    assert not torch._C._any_output_is_alias_to_input_or_output((), {}, tuple(found))


def test_the_cases_accept_and_reject() -> None:
    """Without both, the comparisons above would say little."""
    ended: set[tuple[int, str]] = set()
    for case in REJECT_CASES:
        arguments = case.arguments()
        found = reference(**arguments)
        for mode, taken, length in zip(arguments["mode"], found.accepted, arguments["lens"], strict=True):
            kind = "bonus" if taken == length else "middle" if taken else "first"
            ended.add((int(mode), kind))
    assert ended >= {(m, k) for m in (REJECTION, COUPLED) for k in ("bonus", "middle", "first")}


def test_every_tile_gives_the_same() -> None:
    arguments = REJECT_CASES[2].arguments()
    want = reference(**arguments)
    for tile in (None, Tile(block_v=64, most_d=16), Tile(32, 128, 64)):
        same(reject_sample(**arguments, tile=tile), want)


def test_a_row_without_a_finite_score_ends_its_request_alone() -> None:
    arguments = RejectCase(8, 2, 65, modes=(REJECTION, COUPLED)).arguments()
    broken = int(arguments["starts"][3])
    arguments["logits"][broken] = -torch.inf
    other = int(arguments["starts"][4])
    arguments["logits"][other] = -torch.inf
    want = reference(**arguments)
    got = reject_sample(**arguments, tile=SMALL)
    assert torch.isnan(got.log_prob).nonzero().flatten().tolist() == [3, 4]
    assert got.accepted[3] == got.accepted[4] == 0
    ok = torch.tensor([0, 1, 2, 5, 6, 7])
    assert torch.equal(got.token[ok], want.token[ok])
    assert torch.equal(got.accepted[ok], want.accepted[ok])


def test_equal_laws_leave_no_residual_and_p_stands_in() -> None:
    """Drafts of p itself, rejected by force: the residual is empty, or rounding, and the token is one of p's."""
    arguments = RejectCase(4, 1, 65, modes=(REJECTION,)).arguments()
    law: Law = arguments["law"]
    arguments["lens"][:] = 1
    arguments["starts"] = torch.arange(4, dtype=torch.int32) * 2
    arguments["logits"] = torch.full((8, 65), -torch.inf)
    arguments["logits"][:, 7] = 0.0
    base = torch.full_like(law.base, -torch.inf)
    base[:, :, 7] = 0.0
    arguments["law"] = Law(base, torch.zeros_like(law.lse), torch.ones(4))
    arguments["drafts"] = torch.full((4, 1), 7)
    arguments["log_q"] = torch.zeros(4, 1)
    arguments["uniforms"] = torch.ones(4, 1, dtype=torch.float64)
    got = reject_sample(**arguments, tile=SMALL)
    same(got, reference(**arguments))
    assert got.accepted.tolist() == [0] * 4
    assert got.token.tolist() == [7] * 4
    assert got.log_prob.tolist() == [0.0] * 4


def test_nothing_to_verify_is_a_plain_draw() -> None:
    arguments = RejectCase(5, 2, 65, law=False, modes=(REJECTION, GREEDY, COUPLED)).arguments()
    arguments["lens"][:] = 0
    arguments["starts"] = torch.arange(5, dtype=torch.int32)
    same(reject_sample(**arguments, tile=SMALL), reference(**arguments))
    empty = {k: v[:, :0] for k, v in arguments.items() if k in ("drafts", "uniforms")}
    narrow = {**arguments, **empty, "keys": arguments["keys"][:, :1]}
    same(reject_sample(**narrow, tile=SMALL), reference(**narrow))


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_masks_are_those_of_the_engines_warpers(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threshold search against sorting, on a vocabulary that the engine's warpers break ties by id on (above 4,096)."""
    monkeypatch.setattr(kernels, "MASK_BLOCK", 4096)  # two steps a pass
    g = torch.Generator().manual_seed(9)
    logits = eighths(g, 4, 4200, most=96) if tied else 3 * torch.randn(4, 4200, generator=g)
    warm = (0.7, 1.0, 1.5, 1.0)
    k, p, m = (300, 0, 50, 0), (0.8, 0.6, 1.0, 0.95), (0.0, 0.0, 0.02, 0.01)
    want = warp(logits, Warpers(warm, k, p, m))
    settings = Settings(torch.tensor(warm), torch.tensor(k, dtype=torch.int32), torch.tensor(p), torch.tensor(m))
    everyone = torch.arange(4)
    mine = masked_scores(logits, settings, everyone, torch.zeros(4, dtype=torch.bool))
    assert torch.equal(torch.isinf(mine), torch.isinf(want))
    arguments = {
        "logits": logits,
        "starts": everyone.to(torch.int32),
        "lens": torch.zeros(4, dtype=torch.int32),
        "drafts": torch.zeros(4, 0, dtype=torch.int64),
        "mode": torch.full((4,), REJECTION, dtype=torch.int32),
        "uniforms": torch.zeros(4, 0, dtype=torch.float64),
        "keys": keys_of(4, 1, Purpose.RESIDUAL),
    }
    got = reject_sample(**arguments, settings=settings, tile=Tile(block_v=1024))
    noisy = noise.gumbel_of_bits(noise.bits_of_halves(arguments["keys"][:, 0], torch.arange(4200, dtype=torch.int32)))
    assert torch.equal(got.token, (want + noisy).argmax(-1))
    law = torch.log_softmax(want, dim=-1).gather(1, got.token[:, None])[:, 0]
    torch.testing.assert_close(got.log_prob, law, atol=1e-5, rtol=1e-5)


DRAWS = 400


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mode", [REJECTION, COUPLED], ids=["rejection", "coupled"])
def test_drafting_and_verifying_gives_the_targets_law(mode: int) -> None:
    """The first token out of 400 requests, V = 64: chi-square against p, and drafts are accepted as often as 1 - TV
    says (rejection)."""
    g = torch.Generator().manual_seed(6)
    target = eighths(g, 1, 64, most=10)
    base, latent, w2 = target + eighths(g, 1, 64, most=6), eighths(g, 1, 8, most=4), eighths(g, 64, 8, most=2)
    warm = torch.ones(DRAWS)
    seeds = np.arange(DRAWS, dtype=np.uint64)
    if mode == COUPLED:
        words = noise.row_keys(noise.NOISE, np.repeat(seeds, 2), np.tile([4, 5], DRAWS)).reshape(DRAWS, 2)
        keys, first = noise.key_halves(words), noise.key_halves(words[:, 0])
    else:
        keys = keys_of(DRAWS, 2, Purpose.RESIDUAL)
        first = keys_of(DRAWS, 1, Purpose.DRAFT)[:, 0]
    wide = Tile(256, 64, 16)
    drawn = bias_sample(base.expand(DRAWS, -1), warm, first, latent.expand(DRAWS, -1), w2, tile=wide)
    law = Law(base.expand(1, DRAWS, -1), drawn.lse[None], warm, latent.expand(1, DRAWS, -1), w2)
    uniforms = torch.from_numpy(noise.uniforms(noise.row_keys(noise.UNIFORM, seeds, 5, 0, int(Purpose.ACCEPT))))
    done = reject_sample(
        target.expand(2 * DRAWS, -1), torch.arange(DRAWS, dtype=torch.int32) * 2, torch.ones(DRAWS, dtype=torch.int32),
        drawn.token[:, None], torch.full((DRAWS,), mode, dtype=torch.int32), uniforms[:, None], keys,
        drawn.log_q[:, None], law, tile=wide,
    )  # fmt: skip
    out = torch.where(done.accepted > 0, drawn.token, done.token).numpy()
    p = torch.softmax(target[0].double(), 0).numpy()
    counts = np.bincount(out, minlength=64)
    statistic = float(((counts - DRAWS * p) ** 2 / (DRAWS * p)).sum())
    assert 23 < statistic < 124, statistic
    share = float(done.accepted.double().mean())
    q = law.probs(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 64)[0].double().numpy()
    overlap = float(np.minimum(p, q).sum())
    spread = 4 * (0.25 / DRAWS) ** 0.5
    assert overlap / (2 - overlap) - spread < share < overlap + spread
    if mode == REJECTION:
        assert abs(share - overlap) < spread


def test_misfits_are_refused() -> None:
    arguments = RejectCase(5, 2, 65).arguments()
    with pytest.raises(ConfigError, match="keys"):
        reject_sample(**{**arguments, "keys": arguments["keys"][:, :2]})
    with pytest.raises(ConfigError, match="law"):
        reject_sample(**{**arguments, "log_q": None})


def test_a_law_whose_parts_do_not_fit_is_refused() -> None:
    arguments = RejectCase(5, 2, 65, dtype=torch.bfloat16).arguments()
    law: Law = arguments["law"]
    assert law.latent is not None
    assert law.w2 is not None
    for name, wrong in (
        ("latent is float32", {"latent": law.latent.float()}),
        ("law.latent must be", {"latent": law.latent[:, :4]}),
        ("law.w2 must be", {"w2": law.w2[:60]}),
        ("law.temperature must be", {"temperature": law.temperature[:4]}),
        ("belong together", {"w2": None}),
        ("law.base must be", {"base": law.base[0]}),
    ):
        for op in (reference, reject_sample):
            with pytest.raises(ConfigError, match=name):
                op(**{**arguments, "law": dataclasses.replace(law, **wrong)})
