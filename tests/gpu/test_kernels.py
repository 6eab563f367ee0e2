"""The kernels on a GPU: the interpreter's cases, replay in a CUDA graph, ``torch.compile``, laws, and time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dspark.ops import bias_sample, library, noise, reject_sample
from dspark.ops.device import admit_top, lagged_budget, pack_lengths, survival
from dspark.ops.flex import BLOCK, block_mask, ragged_attention
from dspark.ops.triton.launch import Tile, tile_for
from dspark.types import Purpose
from tests.kernels_interp.cases import BIAS_CASES, REJECT_CASES, BiasCase, RejectCase, eighths, keys_of

LARGE = (
    BiasCase(64, 151_936, 256, torch.bfloat16),
    BiasCase(1, 151_936, 256, torch.bfloat16),
    BiasCase(512, 32_003, 512, torch.bfloat16),
    BiasCase(8, 262_144, 256, torch.bfloat16, pruned=True),
)


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


@pytest.mark.parametrize("case", REJECT_CASES, ids=str)
def test_reject_sample_decides_as_the_reference(case: RejectCase, gpu: torch.device) -> None:
    arguments = case.arguments(gpu)
    want, got = reject_sample.reference(**arguments), library.reject_sample(**arguments)
    assert torch.equal(got.accepted, want.accepted)
    agree(got.token, want.token)
    torch.testing.assert_close(got.chance, want.chance, atol=1e-5, rtol=1e-4)


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


@pytest.mark.parametrize("rows", [1, 64])
def test_one_step_is_not_slower_than_eager(rows: int, gpu: torch.device) -> None:
    case = BiasCase(rows, 151_936, 256, torch.bfloat16)
    arguments = case.arguments(gpu)
    assert isinstance(tile_for("bias_sample", arguments["w2"], rows=rows, rank=256), Tile)
    ours = _milliseconds(lambda: library.bias_sample(**arguments))
    eager = _milliseconds(lambda: bias_sample.reference(**arguments))
    assert ours < eager, (ours, eager)


def _milliseconds(call: Any, repeats: int = 20) -> float:
    from triton.testing import do_bench

    return float(do_bench(call, warmup=25, rep=5 * repeats, return_mode="median"))
