"""Estimators that look on see the engine's own rounds, and better confidences give a faster replay."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.estimators import LOGISTIC, OWN, committed_cost, compare, interval, parse, record, report
from dspark import SamplingParams, SpeculativeDecoder, _sched
from dspark.bench.trace import AcceptanceTrace, TracedRequest
from dspark.testing import TableTarget

COST = _sched.CostTable([(1, 1.0), (201, 101.0)])


def decoder(scheduler: str) -> SpeculativeDecoder:
    logits = torch.full((8, 8), 0.0, dtype=torch.float64)
    logits[torch.arange(8), (torch.arange(8) + 1) % 8] = 3.0
    return SpeculativeDecoder.from_pretrained(
        TableTarget(logits), "ngram", cost=None, gamma=3, max_slots=2, max_len=64, scheduler=scheduler,
        gamma_policy="static", prefix_cache=False, seed=1,
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_who_looks_on_sees_what_the_engine_sees(temperature: float) -> None:
    """`online` beside an engine that uses `online` says the same of every draft; `constant` sees the same drafts."""
    prompts = [[0, 1, 2, 3, 0, 1, 2], [4, 5, 6, 4, 5], [1, 1, 2, 1, 1]]
    params = SamplingParams(max_tokens=24, temperature=temperature, ignore_eos=True)
    with decoder("fixed") as made:
        traces = record(made, [OWN, "online", "constant"], prompts, params)
    own, online, constant = (traces[name].requests for name in (OWN, "online", "constant"))
    assert own == online
    assert [r.prompt_tokens for r in own] == [len(p) for p in prompts]
    assert sum(map(sum, (r.drafted for r in own))) > 20
    assert [dataclasses.replace(r, probs=()) for r in own] == [dataclasses.replace(r, probs=()) for r in constant]
    assert own != constant


def test_an_engine_that_verifies_less_is_refused() -> None:
    with decoder("off") as made, pytest.raises(ValueError, match="dspark/off"):
        record(made, [OWN], [[0, 1]], SamplingParams(max_tokens=2))


def trace(known: bool) -> AcceptanceTrace:
    """Drafts of 3 of which all or none are accepted; c says which, or says nothing."""
    requests = []
    for i in range(6):
        at = tuple(range(i % 2, 30, 2))
        accepted = tuple(3 * (n % 3 == 0) for n in range(len(at)))
        probs = tuple(((0.95 if won else 0.05) if known else 0.35,) * 3 for won in accepted)
        requests.append(TracedRequest(4, 32, 32, at, (3,) * len(at), accepted, probs))
    return AcceptanceTrace(tuple(requests), 3, dense=False)


def test_better_confidences_are_faster() -> None:
    rows = compare({OWN: trace(False), LOGISTIC: trace(True)}, COST, [1, 4], resamples=5)
    assert [(r["concurrency"], r["scheduler"]) for r in rows] == [
        (users, name) for users in (1, 4) for name in ("causal", "lookahead")
    ]
    for row in rows:
        assert row["ratios"]["own over fixed"][0] > 1
        assert min(row["ratios"]["logistic over own"]) > 1
        assert row["throughput"][LOGISTIC] <= row["bounds"]["clairvoyant"] * 1.001
    options = parse(["--concurrency", "1,4"])
    labelled = [{"drafter": "ngram", "temperature": 1.0, "own": "online", **row} for row in rows]
    about = dict.fromkeys(("date", "cpu", "cores", "torch_threads", "memory_gib", "system", "python", "torch"), "")
    text = report(labelled, about | {"transformers": "", "dspark": ""}, options)
    assert text.count("| `ngram` | 1 |") == 2


def test_an_interval_holds_the_middle_of_the_resamples() -> None:
    assert interval([2.0, *range(1, 42)]) == [2.0, 2.0, 40.0]


def test_the_cost_is_of_committed_figures() -> None:
    for mode in ("greedy", "rejection"):
        own, copying = committed_cost("auto", mode), committed_cost("ngram", mode)
        steps = [copying.step_seconds(n, 1, 0) for n in (1, 8, 32, 256)]
        assert steps == sorted(steps)
        assert 0.005 < steps[0] < steps[-1] < 1.0
        assert own.draft_seconds(1, 7) > copying.draft_seconds(1, 7) == 0.0
