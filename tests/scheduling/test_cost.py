"""Cost tables, profiles and their measurement."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark._sched import CostTable
from dspark.errors import CostTableError
from dspark.scheduling.cache import cached_profile, cost_folder, profile_path
from dspark.scheduling.cost import ContextBucket, CostProfile, measure, smooth
from dspark.testing.toys import TableTarget, random_table
from dspark.types import TargetOutput, VerifyLayout

POINTS = ((1, 0.010), (8, 0.012), (16, 0.030))


class Padded(TableTarget):
    """Runs the next power of two of what it is asked, on a clock of its own: 1 ms a token, 4 ms a forward."""

    def __init__(self, *, pad: bool = True, per_token: float = 1e-3, max_len: int = 512) -> None:
        super().__init__(random_table(4, 4), max_len=max_len)
        self.pad, self.per_token, self.now = pad, per_token, 0.0

    def executed_tokens(self, layout: VerifyLayout) -> int:
        return 1 << (layout.num_tokens - 1).bit_length() if self.pad else layout.num_tokens

    def forward(self, layout: VerifyLayout, taps: Sequence[int] = ()) -> TargetOutput:
        output = super().forward(layout, taps)
        self.now += 4e-3 + self.per_token * self.executed_tokens(layout)
        return output

    def fingerprint(self) -> Mapping[str, str]:
        return {"model": "padded", "device": "toy", "dtype": "float64"}


def timed(target: Padded, **settings: Any) -> CostProfile:
    target.allocate(8, target.max_len)
    return measure(target, clock=lambda: target.now, **settings)


# Tables


def test_interpolated_and_extrapolated() -> None:
    table = CostTable(POINTS)
    assert table.verify_seconds(1) == 0.010
    assert table.verify_seconds(8) == 0.012
    assert table.verify_seconds(12) == pytest.approx(0.021)
    assert table.verify_seconds(24) == pytest.approx(0.048)
    assert CostTable([(4, 2.0), (8, 1.0)]).verify_seconds(800) == 1.0  # a fall does not go on
    assert CostTable([(4, 2.0), (8, 3.0)]).verify_seconds(1) == 2.0


def test_staircase() -> None:
    table = CostTable(POINTS, mode="staircase")
    steps = [table.verify_seconds(n) for n in (1, 2, 8, 9, 16)]
    assert steps == [0.010, 0.012, 0.012, 0.030, 0.030]
    assert table.verify_seconds(24) == pytest.approx(0.048)


def test_steps_per_second() -> None:
    table = CostTable.from_sps([(1, 100.0), (4, 50.0)])
    assert table.verify_seconds(4) == 0.02
    assert table.plain_throughput(4) == pytest.approx(200.0)
    assert table.throughput(6.0, 4, 1, 3) == pytest.approx(300.0)


def test_draft_glue_and_context() -> None:
    table = CostTable.from_buckets(
        [(128, [(1, 1.0)]), (None, [(1, 3.0)])],
        draft=[(1, 4, 0.1), (3, 4, 0.3), (1, 8, 0.2), (3, 8, 0.6)],
        glue=0.5,
    )
    assert [table.verify_seconds(1, context) for context in (0, 128, 129, 10**9)] == [1.0, 1.0, 3.0, 3.0]
    seconds = [table.draft_seconds(r, g) for r, g in ((1, 4), (2, 4), (2, 6), (2, 2), (2, 12), (4, 4), (2, 0))]
    assert seconds == pytest.approx([0.1, 0.2, 0.3, 0.2, 0.6, 0.4, 0.0])
    assert table.step_seconds(1, 2, 4, context=200) == pytest.approx(3.7)
    assert table.plain_throughput(2) == pytest.approx(2 / 1.5)


def test_flatness() -> None:
    assert CostTable([(1, 1.0), (64, 1.015)]).state == "flat-cost"
    assert CostTable([(1, 1.0), (64, 1.015)], noise=0.01).state == "measured"
    late = CostTable([(1, 1.0), (16, 1.01), (64, 3.0)])
    assert not late.flat
    assert late.flat_over(1, 16)
    assert not late.flat_over(1, 17)
    with pytest.raises(ValueError, match="low <= high"):
        late.flat_over(5, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CostTable([]), "at least one"),
        (lambda: CostTable([(1, 1.0), (1, 2.0)]), "rise"),
        (lambda: CostTable([(2, 1.0), (1, 2.0)]), "rise"),
        (lambda: CostTable([(0, 1.0)]), "tokens of 1"),
        (lambda: CostTable([(-1, 1.0)]), "expected an integer from 0"),
        (lambda: CostTable([(1, 0.0)]), "positive"),
        (lambda: CostTable([(1, math.nan)]), "positive"),
        (lambda: CostTable([(1, math.inf)]), "finite"),
        (lambda: CostTable.from_sps([(1, 0.0)]), "finite"),
        (lambda: CostTable([(1, 1.0)], mode="cubic"), "cubic"),
        (lambda: CostTable([(1, 1.0)], glue=-1.0), "glue"),
        (lambda: CostTable([(1, 1.0)], noise=math.nan), "noise"),
        (lambda: CostTable([(1, 1.0)], draft=[(1, 0, 0.1)]), "gamma 0"),
        (lambda: CostTable([(1, 1.0)], draft=[(1, 2, 0.1), (1, 2, 0.2)]), "gamma 2"),
        (lambda: CostTable.from_buckets([]), "at least one context"),
        (lambda: CostTable.from_buckets([(8, POINTS), (8, POINTS)]), "rise"),
    ],
)
def test_malformed_tables_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# Profiles


def test_profile_round_trip(tmp_path: Path) -> None:
    profile = CostProfile(
        buckets=(ContextBucket(POINTS, 64), ContextBucket(((1, 0.02),))),
        fingerprint={"device": "cpu", "dtype": "float32"},
        mode="staircase",
        draft=((1, 7, 0.004),),
        glue_seconds=0.001,
        noise=0.03,
    )
    profile.save(tmp_path / "deep" / "cost.json")
    assert CostProfile.load(tmp_path / "deep" / "cost.json") == profile
    table = profile.table()
    assert (table.mode, table.glue, table.noise) == ("staircase", 0.001, 0.03)
    assert table.verify_seconds(9, 64) == 0.030
    assert table.verify_seconds(9, 65) == 0.02
    assert table.draft_seconds(1, 7) == 0.004


def test_another_machine_is_refused_naming_what_differs() -> None:
    profile = CostProfile((ContextBucket(POINTS),), {"device": "cpu A", "dtype": "float32", "threads": "2"})
    profile.check({"device": "cpu A", "dtype": "float32", "threads": "2"})
    with pytest.raises(CostTableError) as caught:
        profile.check({"device": "cpu B", "dtype": "bfloat16", "model": "m", "threads": "2"})
    message = str(caught.value)
    for part in ("'cpu A'", "'cpu B'", "'float32'", "'bfloat16'", "model", "'nothing'"):
        assert part in message
    assert "threads" not in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "no dspark-cost"),
        ({"version": 1}, "version 1"),
        ({"extra": 1}, "extra"),
        ({"buckets": [{"max_context": None, "points": [[1, -1.0]]}]}, "positive"),
        ({"buckets": [{"max_context": None, "points": [[1.5, 1.0]]}]}, "integer"),
        ({"buckets": [{"points": [[1, 1.0]]}]}, "max_context"),
        ({"buckets": []}, "at least one"),
        ({"buckets": 3}, "malformed"),
        ({"glue_seconds": "0"}, "finite number"),
        ({"mode": "cubic"}, "cubic"),
        ({"mode": 3}, "cost profile"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(CostProfile((ContextBucket(POINTS),)).to_json() | change))
    with pytest.raises(CostTableError, match=message) as caught:
        CostProfile.load(path)
    assert str(path) in str(caught.value)


def test_absent_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(CostTableError, match="can't read"):
        CostProfile.load(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"format": ')
    with pytest.raises(CostTableError, match="can't read"):
        CostProfile.load(tmp_path / "half.json")
    (tmp_path / "nan.json").write_text(
        json.dumps(CostProfile((ContextBucket(POINTS),)).to_json() | {"noise": math.nan})
    )
    with pytest.raises(CostTableError, match="finite number"):
        CostProfile.load(tmp_path / "nan.json")


# Measurement


def test_a_table_is_keyed_by_what_was_executed() -> None:
    target = Padded()
    profile = timed(target, token_counts=(1, 5, 37, 60), slots=1)
    assert [n for n, _ in profile.buckets[0].points] == [1, 8, 64]
    assert profile.mode == "staircase"
    assert profile.table().verify_seconds(37) == pytest.approx(4e-3 + 64e-3)
    assert profile.fingerprint == target.fingerprint()


def test_tokens_are_spread_over_slots_and_what_does_not_fit_is_left_out() -> None:
    target = Padded(pad=False, max_len=48)
    profile = timed(target, token_counts=(1, 8, 40, 160, 10_000), slots=8, contexts=(64,))
    assert [n for n, _ in profile.buckets[0].points] == [1, 8, 40, 160]
    assert {len(lens) for lens in target.forwards} == {1, 2, 8}
    assert profile.mode == "interpolated"
    assert profile.state == "measured"
    assert profile.table().verify_seconds(40) == pytest.approx(44e-3)


def test_context_buckets_are_measured_where_they_are() -> None:
    starts: list[int] = []

    class Watched(Padded):
        def forward(self, layout: VerifyLayout, taps: Sequence[int] = ()) -> TargetOutput:
            starts.append(int(layout.positions[0]))
            return super().forward(layout, taps)

    profile = timed(Watched(max_len=256), token_counts=(1, 2), contexts=(16, 100, 9_999))
    assert [b.max_context for b in profile.buckets] == [16, 100, None]
    assert sorted(set(starts)) == [16, 100, 128]


def test_the_budget_ends_a_measurement() -> None:
    target = Padded(pad=False, per_token=1.0)
    profile = timed(target, token_counts=(1, 2, 4, 8, 16, 32), budget_seconds=10.0)
    assert 2 <= len(profile.buckets[0].points) < 6
    assert target.now < 60.0


def test_a_flat_target_is_flat_cost() -> None:
    profile = timed(Padded(pad=False, per_token=0.0), token_counts=(1, 2, 4))
    assert profile.state == "flat-cost"
    assert profile.table().flat


def test_nothing_to_time() -> None:
    with pytest.raises(CostTableError, match="do not fit"):
        timed(Padded(max_len=8), token_counts=(100,))
    with pytest.raises(CostTableError, match="at least 1"):
        timed(Padded(), token_counts=(0,))


def test_dips_within_noise_are_pooled_and_real_ones_kept() -> None:
    seconds = [t for _, t in smooth(((1, 1.00), (2, 0.99), (3, 1.5), (4, 1.2)), 0.02)]
    assert seconds == pytest.approx([0.995, 0.995, 1.5, 1.2])


def test_a_measured_table_plans() -> None:
    from .support import batch, make

    table = timed(Padded(), token_counts=(1, 2, 4, 8, 16)).table()
    plan = make("lookahead").plan(batch(np.full((2, 3), 0.95)), table)
    assert plan.verify_lens.tolist() == [3, 3]
    assert plan.stop_reason == "all-admitted"


def test_profiles_are_kept_and_measured_anew_where_they_do_not_hold(tmp_path: Path, caplog: Any) -> None:
    target = Padded(pad=False)
    target.allocate(1, 64)
    settings = {"folder": tmp_path, "clock": lambda: target.now, "token_counts": (1, 2)}
    first = cached_profile(target, **settings)
    forwards = len(target.forwards)
    assert cached_profile(target, **settings) == first
    assert len(target.forwards) == forwards
    profile_path(target.fingerprint(), tmp_path).write_text("{}")
    assert [n for n, _ in cached_profile(target, **settings).buckets[0].points] == [1, 2]
    assert len(target.forwards) > forwards
    assert "measuring a new cost table" in caplog.text


def test_a_folder_that_cannot_be_written_costs_only_the_next_measurement(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    target = Padded(pad=False)
    target.allocate(1, 64)
    profile = cached_profile(target, folder=tmp_path / "file" / "cost", clock=lambda: target.now, token_counts=(1, 2))
    assert profile.buckets[0].points
    assert "not kept" in caplog.text


def test_cache_folder(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    assert cost_folder() == tmp_path / "cost"
    assert profile_path({"a": "1"}).parent == tmp_path / "cost"
    assert profile_path({"a": "1"}) != profile_path({"a": "2"})


torch.set_num_threads(1)
