"""The kernels on a GPU: the interpreter's cases and larger ones, replay in a CUDA graph, ``torch.compile``, and laws.

Times against the floors are printed, not judged: ``make test-gpu ARGS="-s -k report"`` shows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dspark.ops import bias_sample, library, noise, reject_sample
from dspark.ops.device import admit_top, lagged_budget, pack_lengths, survival
from dspark.ops.flex import BLOCK, block_mask, ragged_attention
from dspark.ops.triton.launch import architecture
from dspark.ops.triton.measure import OPS, Size, bandwidth, measure, product_rate
from dspark.types import Purpose
from tests.kernels_interp.cases import BIAS_CASES, REJECT_CASES, BiasCase, RejectCase, eighths, keys_of

LARGE = (
    BiasCase(64, 151_936, 256, torch.bfloat16),
    BiasCase(1, 151_936, 256, torch.bfloat16),
    BiasCase(512, 32_003, 512, torch.bfloat16),
    BiasCase(8, 262_144, 256, torch.bfloat16, pruned=True),
)

BF16 = torch.bfloat16
LARGE_REJECT = (
    RejectCase(8, 4, 151_936, rank=256, dtype=BF16),
    RejectCase(1, 4, 151_936, rank=256, dtype=BF16, modes=(reject_sample.REJECTION,)),
    RejectCase(20, 2, 151_936, rank=256, dtype=torch.float16, shuffled=True, settings="all"),
    RejectCase(8, 2, 151_936, rank=256, dtype=BF16, pruned=True, shuffled=True),
    RejectCase(8, 2, 151_936, rank=256, dtype=BF16, candidates=64, shuffled=True, settings="top_k"),
    RejectCase(8, 2, 32_003, rank=512, dtype=BF16, settings="top_p"),
    RejectCase(8, 3, 151_936, law=False, dtype=BF16, settings="min_p"),
    RejectCase(4, 2, 262_144, rank=256, dtype=BF16, settings="all"),
    RejectCase(512, 1, 2_049, rank=512, dtype=BF16, shuffled=True),
)
"""Qwen3's vocabulary, every kind of law, a width that nothing divides, and the largest sizes."""


def agree(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal tokens; a variate's last bit may decide between all but equal ones, once in a thousand."""
    assert int((got != want).sum()) <= len(got) // 1000, (got != want).nonzero().flatten().tolist()


@pytest.mark.parametrize("case", [*BIAS_CASES, *LARGE], ids=str)
def test_bias_sample_draws_the_references_tokens(case: BiasCase, gpu: torch.device) -> None:
    arguments = case.arguments(gpu)
    want, got = bias_sample.reference(**arguments), library.bias_sample(**arguments)
    agree(got.token, want.token)
    same = got.token == want.token
    torch.testing.assert_close(got.log_q[same], want.log_q[same], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(got.lse, want.lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("case", [*REJECT_CASES, *LARGE_REJECT], ids=str)
def test_reject_sample_decides_as_the_reference(case: RejectCase, gpu: torch.device) -> None:
    arguments = case.arguments(gpu)
    want, got = reject_sample.reference(**arguments), library.reject_sample(**arguments)
    assert torch.equal(got.accepted, want.accepted)
    agree(got.token, want.token)
    same = got.token == want.token
    torch.testing.assert_close(got.log_prob[same], want.log_prob[same], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(got.chance, want.chance, atol=1e-4, rtol=1e-3)


def test_offsets_beyond_two_to_the_31(gpu: torch.device) -> None:
    """The last row of logits with more than 2**31 elements is read where it lies."""
    width, rows = 151_936, 14_200
    if torch.cuda.mem_get_info(gpu)[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free memory")
    logits = torch.zeros(rows, width, dtype=BF16, device=gpu)
    peaks = torch.arange(rows, device=gpu) * 7 % width
    logits[torch.arange(rows, device=gpu), peaks] = 60.0
    keys = keys_of(rows, 1, Purpose.RESIDUAL).to(gpu)
    drawn = library.bias_sample(logits, torch.ones(rows, device=gpu), keys[:, 0])
    assert torch.equal(drawn.token, peaks)
    whole, none = torch.arange(rows, dtype=torch.int32, device=gpu), torch.zeros(rows, 0, device=gpu)
    for mode in (reject_sample.GREEDY, reject_sample.REJECTION, reject_sample.COUPLED):
        modes = torch.full_like(whole, mode)
        done = library.reject_sample(logits, whole, whole * 0, none.long(), modes, none.double(), keys)
        assert torch.equal(done.token, peaks)


@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000], ids=["NaN", "-NaN"])
def test_a_nan_of_either_sign_ends_its_row_under_masks(bits: int, gpu: torch.device) -> None:
    arguments = RejectCase(6, 1, 500, law=False, settings="all", modes=(reject_sample.REJECTION,)).arguments(gpu)
    arguments["lens"][:] = 0
    broken = int(arguments["starts"][2])
    arguments["logits"].view(torch.int32)[broken, 321] = bits
    assert torch.isnan(library.reject_sample(**arguments).log_prob).tolist() == [False, False, True] + [False] * 3


def test_noise_is_that_of_the_host(gpu: torch.device) -> None:
    words = noise.row_keys(noise.NOISE, np.arange(64, dtype=np.uint64), np.arange(64))
    counters = torch.arange(5000, dtype=torch.int32)
    here, there = noise.bits(words, counters), noise.bits(words, counters.to(gpu)).cpu()
    assert torch.equal(here, there)


@pytest.mark.parametrize("width", [64, 1000])
def test_a_graph_replays_the_kernels_with_new_keys(width: int, gpu: torch.device) -> None:
    case = BiasCase(8, width, 32, torch.bfloat16)
    arguments = case.arguments(gpu)
    library.bias_sample(**arguments)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = library.bias_sample(**arguments)
    for seed in range(3):
        arguments["keys"].copy_(keys_of(8, 1, Purpose.DRAFT, seed=50 + seed)[:, 0].to(gpu))
        graph.replay()
        agree(held.token, bias_sample.reference(**arguments).token)


def test_a_whole_round_fits_a_graph(gpu: torch.device) -> None:
    """Survival, budget, packing and verification without a word from the host."""
    case = RejectCase(8, 3, 500, rank=16, dtype=torch.bfloat16)
    arguments = case.arguments(gpu)
    probs, most = torch.rand(8, 3, device=gpu), torch.full((8,), 3, device=gpu)
    seconds = torch.linspace(1.0, 2.0, 60, dtype=torch.float64, device=gpu)

    def step() -> Any:
        a = survival(probs, most)
        lens = admit_top(a, most, lagged_budget(a, most, seconds, 8))
        packed = pack_lengths(arguments["drafts"][:, 0], arguments["drafts"], most, lens, 32)
        return packed, library.reject_sample(**arguments)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed, decided = step()
    graph.replay()
    want = reject_sample.reference(**arguments)
    assert torch.equal(decided.accepted, want.accepted)
    assert int(packed.cu_query_lens[-1]) >= 8


def test_compile_sees_the_operators(gpu: torch.device) -> None:
    arguments = BiasCase(4, 300, 16).arguments(gpu)

    def run(base: torch.Tensor) -> torch.Tensor:
        drawn = library.bias_sample(base + 0.0, *[v for k, v in arguments.items() if k != "base"])
        return drawn.token + 1

    got = torch.compile(run, fullgraph=True)(arguments["base"])
    agree(got - 1, bias_sample.reference(**arguments).token)


def test_the_law_by_chi_square(gpu: torch.device) -> None:
    draws, g = 200_000, torch.Generator().manual_seed(1)
    base = eighths(g, 1, 64, most=8).to(gpu)
    keys = keys_of(draws, 1, Purpose.DRAFT)[:, 0].to(gpu)
    got = library.bias_sample(base.expand(draws, -1).contiguous(), torch.ones(draws, device=gpu), keys)
    law = torch.softmax(base[0].double(), 0).cpu().numpy()
    counts = np.bincount(got.token.cpu().numpy(), minlength=64)
    assert 23 < float(((counts - draws * law) ** 2 / (draws * law)).sum()) < 124


@pytest.mark.parametrize("mode", [reject_sample.REJECTION, reject_sample.COUPLED], ids=["rejection", "coupled"])
def test_drafting_and_verifying_gives_the_targets_law_by_chi_square(mode: int, gpu: torch.device) -> None:
    """The first token out of 200,000 requests of one target and one drafter that differ: 63 degrees of freedom."""
    draws, g = 200_000, torch.Generator().manual_seed(6)
    target = eighths(g, 1, 64, most=10)
    base = (target + eighths(g, 1, 64, most=6)).to(gpu).expand(draws, -1).contiguous()
    latent, w2 = eighths(g, 1, 8, most=4).to(gpu).expand(draws, -1).contiguous(), eighths(g, 64, 8, most=2).to(gpu)
    seeds, warm = np.arange(draws, dtype=np.uint64), torch.ones(draws, device=gpu)
    if mode == reject_sample.COUPLED:
        words = noise.row_keys(noise.NOISE, np.repeat(seeds, 2), np.tile([4, 5], draws)).reshape(draws, 2)
        keys, first = noise.key_halves(words, gpu), noise.key_halves(words[:, 0], gpu)
    else:
        keys, first = keys_of(draws, 2, Purpose.RESIDUAL).to(gpu), keys_of(draws, 1, Purpose.DRAFT)[:, 0].to(gpu)
    drawn = library.bias_sample(base, warm, first, latent, w2)
    law = reject_sample.Law(base[None], drawn.lse[None], warm, latent[None], w2)
    uniforms = torch.from_numpy(noise.uniforms(noise.row_keys(noise.UNIFORM, seeds, 5, 0, int(Purpose.ACCEPT)))).to(gpu)
    whole = torch.arange(draws, dtype=torch.int32, device=gpu)
    done = library.reject_sample(
        target.to(gpu).expand(2 * draws, -1).contiguous(), whole * 2, torch.ones_like(whole), drawn.token[:, None],
        torch.full_like(whole, mode), uniforms[:, None], keys, drawn.log_q[:, None], law,
    )  # fmt: skip
    out = torch.where(done.accepted > 0, drawn.token, done.token).cpu().numpy()
    p = torch.softmax(target[0].double(), 0).numpy()
    assert 0 < int(done.accepted.sum()) < draws
    assert 23 < float(((np.bincount(out, minlength=64) - draws * p) ** 2 / (draws * p)).sum()) < 124


@pytest.mark.parametrize("window", [None, 100])
def test_ragged_attention_compiled_equals_torchs_slow_path(window: int | None, gpu: torch.device) -> None:
    slots = torch.tensor([1] * 8 + [0] * 200 + [3], device=gpu)
    positions = torch.cat((torch.arange(300, 308), torch.arange(5, 205), torch.tensor([0]))).to(gpu)
    keys, values = (torch.randn(4, 2, 4 * BLOCK, 64, device=gpu) for _ in range(2))
    query = torch.randn(len(slots), 8, 64, device=gpu)
    mask = block_mask(slots, positions, 4, 4 * BLOCK, window)
    got = ragged_attention(query, keys, values, mask, 0.125)
    want = ragged_attention(query, keys, values, mask, 0.125, compiled=False)
    torch.testing.assert_close(got, want, atol=5e-3, rtol=5e-3)


@pytest.fixture(scope="module")
def lines() -> Iterator[list[str]]:
    """Lines of a report, printed when all are there."""
    found: list[str] = []
    yield found
    print("", *found, sep="\n")


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
@pytest.mark.parametrize("op", OPS)
def test_report_times_against_the_floors(op: str, rows: int, gpu: torch.device, lines: list[str]) -> None:
    if not lines:
        lines.append(f"{architecture(gpu)}, {torch.cuda.get_device_name(gpu)}, ms a call at V=151,936, rank 256")
    found = measure(op, Size(rows), gpu, (bandwidth(gpu), product_rate(gpu, BF16)))
    times = found["milliseconds"]
    lines.append(
        f"{op} at {rows} rows: {times['ours']:.4f}, {found['over_floor']:.2f} times its floor, "
        f"{found['over_goal_read']:.2f} times one read of W2 or logits; eager {times['eager']:.4f}, "
        f"compiled {times['compiled']:.4f}"
    )
    assert all(value > 0 for value in times.values())
