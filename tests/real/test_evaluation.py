"""An evaluation on the real model: drafters write the same greedy tokens, and 1 - TV is that of plain softmaxes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.checks import Job
from benchmarks.draft import shipped
from dspark import SamplingParams, SpeculativeDecoder
from dspark.evaluation.acceptance import Bootstrap
from dspark.evaluation.collect import Item, Sampling
from dspark.evaluation.compare import Run, prefixes_of, run_forced, run_prompts, summarise
from dspark.evaluation.rounds import RoundLog
from tests.evaluation.conftest import Talk
from tests.real.conftest import TOKENS

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

GAMMA = 4


@pytest.fixture(scope="module")
def runs(check: Any, greedy_jobs: list[Job], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Run, Any]]:
    folder: Path = tmp_path_factory.mktemp("evaluation")
    wanted = {token for job in greedy_jobs for token in job.expected or ()}
    pruned = shipped("markov", check.target, sorted(wanted | set(range(100, 140))), gamma=GAMMA)
    items = [Item("own", str(i), "x", lambda job=job: Talk([list(job.prompt)])) for i, job in enumerate(greedy_jobs)]
    sampling = Sampling(SamplingParams(max_tokens=TOKENS))
    found = []
    for name, config in (("dspark", {"checkpoint": pruned}), ("ngram", {})):
        log = RoundLog()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            decoder = SpeculativeDecoder.from_pretrained(
                check.target, name, drafter_config=config, cost=None, observers=[log], scheduler="fixed", max_slots=4,
                max_len=512,
            )  # fmt: skip
            run = run_prompts(decoder, log, items, sampling, folder / f"{name}.jsonl", label=name)
        prefixes = prefixes_of(found[0][0] if found else run)
        run_forced(run, decoder, prefixes, sampling, folder / f"{name}-f.jsonl", span=GAMMA, anchors=3)
        found.append((run, decoder))
    return found


def test_drafters_write_the_same_tokens(runs: list[tuple[Run, Any]], greedy_jobs: list[Job]) -> None:
    for run, _ in runs:
        answers = [record.samples[0]["response_ids"] for record in run.records.values()]
        assert answers == [job.expected for job in greedy_jobs]
    result = summarise([run for run, _ in runs], Bootstrap(100), {})
    first, second = result["drafters"]
    assert first["tokens"] <= second["tokens"]
    assert second["teacher_forced"] is None
    offered = first["positions"]["offered"][0]
    assert first["rounds"] - len(greedy_jobs) <= offered <= first["rounds"], "a last token leaves no room for drafts"


def test_overlap_is_that_of_plain_softmaxes(runs: list[tuple[Run, Any]], check: Any) -> None:
    """One response, from the model's plain logits and the drafter's own block."""
    run, decoder = runs[0]
    drafter = decoder.engine.parts.drafter
    prefix = prefixes_of(run)[0]
    ids = [*prefix.prompt_ids, *prefix.response_ids]
    anchors = prefix.anchors(3, GAMMA)
    target = torch.softmax(check.target.plain_logits(ids).double(), -1)
    from dspark.evaluation.forced import read_along

    _, taps = read_along(check.target, ids, np.array([len(ids) - 1]), drafter.tap_layers)
    want = np.zeros(GAMMA)
    for a in anchors.tolist():
        logits, token_map = drafter.forced_logits(torch.tensor(ids), taps, np.array([a]), GAMMA)
        for k in range(GAMMA):
            q = torch.zeros(target.shape[1], dtype=torch.float64)
            q[token_map] = torch.softmax(logits[0, k].double(), -1)
            want[k] += 1 - 0.5 * float((target[a + k] - q).abs().sum())
    assert run.forced is not None
    np.testing.assert_allclose(run.forced[prefix.key][1].overlap, want, atol=1e-4)
    assert (want > 0).all()
