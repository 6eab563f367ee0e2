"""Prompts through the engine: every token is of a round, and a prompt's record depends on that prompt alone."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dspark.config import SamplingParams
from dspark.errors import EvaluationError
from dspark.evaluation.collect import Collection, Item, Record, Sampling, finished
from dspark.evaluation.rounds import RoundLog, Rounds
from tests.evaluation.conftest import GOLDEN, ITEMS, Talk, item

DSPARK = str(GOLDEN / "deepspec_dspark_vanilla")
GREEDY = Sampling(SamplingParams(max_tokens=12))
SAMPLED = Sampling(SamplingParams(max_tokens=12, temperature=1.0), seed=3)


def collect(
    built: tuple[Any, RoundLog], sampling: Sampling, items: list[Item]
) -> tuple[dict[str, Record], dict[str, str]]:
    records: dict[str, Record] = {}
    failed: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Collection(
            *built, sampling, lambda i, r: records.update({i.key: r}), lambda i, why: failed.update({i.key: why})
        ).run(items)
    return records, failed


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "rejection"])
@pytest.mark.parametrize("name", [DSPARK, "ngram", "none"])
def test_rounds_add_up_to_the_output(decoder: Callable[..., Any], name: str, sampling: Sampling) -> None:
    built = decoder(name)
    records, failed = collect(built, sampling, ITEMS)
    assert failed == {}
    assert set(records) == {i.key for i in ITEMS}
    stats = built[0].stats.acceptance
    rounds = Rounds.concat([r.rounds for r in records.values()], built[0].engine.parts.gamma)
    assert rounds.offered.sum() == sum(stats.offered)
    assert rounds.accepted.sum() == sum(stats.accepted)
    turns = sum(len(r.samples) for r in records.values())
    assert turns == sum(1 + int(i.name) % 2 for i in ITEMS)
    assert stats.committed - turns <= rounds.committed.sum() <= stats.committed
    for record in records.values():
        out = sum(len(s["response_ids"]) for s in record.samples)
        assert out - len(record.samples) <= record.rounds.committed.sum() <= out
        assert all(s["finish_reason"] in ("stop", "length") for s in record.samples)
        assert (record.rounds.committed >= record.rounds.accepted).all()
    if name == DSPARK:
        assert rounds.committed.sum() == stats.committed - turns, "the prefill's token is of no round"
        assert rounds.gamma == 4
        assert ((rounds.probs > 0) & (rounds.probs < 1))[rounds.weight].all()


def test_the_second_turn_sees_the_first_answer(decoder: Callable[..., Any]) -> None:
    records, _ = collect(decoder("none"), GREEDY, [item("alpha", 1, 2)])
    first, second = records["alpha:1"].samples
    assert second["prompt_ids"][: len(first["prompt_ids"]) + len(first["response_ids"])] == [
        *first["prompt_ids"], *first["response_ids"],
    ]  # fmt: skip


def test_a_record_depends_on_its_prompt_alone(decoder: Callable[..., Any]) -> None:
    """Other neighbours, slots and order: the same draws, hence the same rounds."""
    records, _ = collect(decoder(DSPARK), SAMPLED, ITEMS)
    again, _ = collect(decoder(DSPARK, max_slots=1), SAMPLED, ITEMS[:2:-1])
    assert len(again) == 5
    for key, record in again.items():
        assert record.samples == records[key].samples
        assert record.rounds.accepted.tolist() == records[key].rounds.accepted.tolist()
        np.testing.assert_allclose(record.rounds.probs, records[key].rounds.probs, atol=1e-5)
    other, _ = collect(decoder(DSPARK), dataclasses.replace(SAMPLED, seed=4), ITEMS[:2])
    assert other["alpha:0"].samples != records["alpha:0"].samples
    samples, _ = collect(decoder(DSPARK), SAMPLED, [ITEMS[0], ITEMS[0].again(1)])
    assert samples["alpha:0"].samples == records["alpha:0"].samples
    assert samples["alpha:0#1"].samples != records["alpha:0"].samples


def test_coupled_drafters_see_the_same_prefixes(decoder: Callable[..., Any]) -> None:
    coupled = dataclasses.replace(SAMPLED, coupled=True)
    assert coupled.as_dict()["mode"] == "coupled"
    one, two = (collect(decoder(name), coupled, ITEMS)[0] for name in (DSPARK, "ngram"))
    assert all(one[key].samples == two[key].samples for key in one)


def test_what_is_refused_ends_alone(decoder: Callable[..., Any]) -> None:
    too_long = Item("alpha", "long", "x", lambda: Talk([[1] * 200]))
    untold = Item("alpha", "text", "x", lambda: Talk(["not ids"]))  # type: ignore[list-item]
    records, failed = collect(decoder(), GREEDY, [too_long, ITEMS[0], untold])
    assert set(records) == {ITEMS[0].key}
    assert "200 tokens" in failed["alpha:long"]
    assert "alpha:text" in failed


def test_an_interrupt_leaves_no_record_and_no_request(decoder: Callable[..., Any]) -> None:
    built = decoder()
    seen: list[str] = []

    def stop(i: Item, record: Record) -> None:
        seen.append(i.key)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Collection(*built, GREEDY, stop, lambda i, why: None).run(ITEMS)
    assert len(seen) == 3
    assert built[0].engine.live() == ()
    assert not built[0].engine.has_work
    assert set(collect(built, GREEDY, ITEMS)[0]) == {i.key for i in ITEMS}, "and the engine goes on"


def test_a_log_that_saw_nothing_is_noticed(decoder: Callable[..., Any]) -> None:
    with pytest.raises(EvaluationError, match="12 of 12 tokens are of no round"):
        Collection(decoder()[0], RoundLog(), GREEDY, lambda i, r: None, lambda i, why: None).run(ITEMS[:1])


def test_records_survive_json(decoder: Callable[..., Any]) -> None:
    records, _ = collect(decoder(DSPARK), SAMPLED, ITEMS[:2])
    for record in records.values():
        again = Record.from_dict(json.loads(json.dumps(record.as_dict())))
        assert (again.dataset, again.digest, again.samples) == (record.dataset, record.digest, record.samples)
        for name in ("offered", "accepted", "committed"):
            assert np.array_equal(getattr(again.rounds, name), getattr(record.rounds, name))
        offered = record.rounds.weight
        assert np.array_equal(again.rounds.probs[offered], record.rounds.probs[offered])
        assert not again.rounds.probs[~offered].any()
    raw = records["alpha:0"].as_dict()
    for broken in (
        {k: v for k, v in raw.items() if k != "samples"},
        raw | {"rounds": raw["rounds"] | {"accepted": [9] * len(raw["rounds"]["accepted"])}},
        raw | {"rounds": raw["rounds"] | {"offered": raw["rounds"]["offered"][1:]}},
        raw | {"rounds": raw["rounds"] | {"probs": [[2.0]] * len(raw["rounds"]["probs"])}},
    ):
        with pytest.raises(EvaluationError):
            Record.from_dict(broken)


def test_finished_refuses_results_of_another_prompt() -> None:
    records = {"alpha:0": {"digest": ITEMS[0].digest}, "alpha:7": {"digest": "unknown prompts are ignored"}}
    assert finished(ITEMS, records, "here") == {"alpha:0"}
    with pytest.raises(EvaluationError, match="here: the result of alpha:0 is of another prompt"):
        finished(ITEMS, {"alpha:0": {"digest": "y"}}, "here")
