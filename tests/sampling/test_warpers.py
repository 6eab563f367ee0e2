"""Warpers against transformers' own, row by row with mixed settings."""

import math

import pytest
import torch
from transformers.generation import logits_process as hf

from dspark.config import SamplingParams
from dspark.sampling import warpers
from dspark.sampling.warpers import Warpers, needs_warpers, warp

SETTINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.9, "top_k": 3},
    {"top_k": 1},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"temperature": 0.3, "top_p": 0.999},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 3.0, "top_k": 40, "min_p": 0.2},
]


def theirs(scores, params):
    scores = scores[None]
    if params.temperature != 1.0:
        scores = hf.TemperatureLogitsWarper(params.temperature)(None, scores)
    if params.top_k:
        scores = hf.TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1.0:
        scores = hf.TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p > 0.0:
        scores = hf.MinPLogitsWarper(params.min_p)(None, scores)
    return scores[0]


def params_of(setting):
    return SamplingParams(**({"temperature": 1.0} | setting))


@pytest.mark.parametrize("vocab", [5, 64, 1000, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
def test_every_row_equals_transformers(vocab, dtype, scale):
    torch.manual_seed(vocab)
    rows = [params_of(s) for s in SETTINGS] * 2
    scores = torch.randn(len(rows), vocab, dtype=dtype) * scale
    scores[::3, : vocab // 2] = -math.inf  # masked by an earlier processor
    before = scores.clone()
    got = warp(scores, Warpers.of(rows))
    assert torch.equal(scores, before)
    for row, params in enumerate(rows):
        assert torch.equal(got[row], theirs(scores[row], params)), params
    assert torch.equal(warp(scores.clone(), Warpers.of(rows), inplace=True), got)


@pytest.mark.parametrize("vocab", [48, 9000])
def test_ties_are_cut_as_transformers_cuts_them(vocab):
    """bf16 logits tie often. top_k keeps all ties; which part of a tie top_p cuts is the sort's choice."""
    torch.manual_seed(3)
    rows = [params_of(s) for s in SETTINGS]
    scores = (torch.randn(len(rows), vocab) * 2).to(torch.bfloat16)
    got = warp(scores, Warpers.of(rows))
    assert got.dtype == torch.float32
    for row, params in enumerate(rows):
        wanted = theirs(scores[row].float(), params)
        if params.top_p < 1.0 and vocab > warpers._FULL_SORT:
            assert torch.equal(got[row].sort().values, wanted.sort().values), params
        else:
            assert torch.equal(got[row], wanted), params


def test_large_vocabulary_falls_back_to_a_full_sort_where_the_cut_is_deep():
    """A flat law has its cut beyond the head, and inside one big tie."""
    flat = torch.zeros(1, 9000)
    nearly = torch.linspace(0.0, 1e-3, 9000)[None]
    peaked = torch.linspace(0.0, 300.0, 9000)[None]
    scores = torch.cat([flat, nearly, peaked])
    rows = [params_of({"top_p": 0.5})] * 3
    got = warp(scores, Warpers.of(rows))
    kept = torch.isfinite(got).sum(-1).tolist()
    assert abs(kept[0] - 4500) <= 2
    assert 4400 < kept[1] < 4600
    assert kept[2] < warpers._HEAD
    for row in (1, 2):
        assert torch.equal(got[row], theirs(scores[row], rows[row]))


def test_a_row_does_not_depend_on_its_neighbours():
    torch.manual_seed(0)
    rows = [params_of(s) for s in SETTINGS]
    scores = torch.randn(len(rows), 9000) * 3
    together = warp(scores, Warpers.of(rows))
    for row, params in enumerate(rows):
        assert torch.equal(warp(scores[row : row + 1], Warpers.of([params]))[0], together[row])


def test_rows_without_warpers_pass_untouched():
    scores = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    idle = Warpers.of([None, params_of({}), None])
    assert idle.idle
    assert warp(scores, idle) is scores
    mixed = warp(scores, Warpers.of([None, params_of({"temperature": 0.5, "top_k": 2}), None]))
    assert torch.equal(mixed[0], scores[0])
    assert torch.equal(mixed[2], scores[2])
    assert torch.isinf(mixed[1]).sum() == 8


def test_needs_warpers():
    assert not needs_warpers(params_of({}))
    assert all(needs_warpers(params_of(s)) for s in SETTINGS[1:])
