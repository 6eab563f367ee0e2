"""Placement of a profile's points, its parts, and what it says of padding."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dspark.errors import CostTableError
from dspark.scheduling.cache import cached_profile, keep, profile_path
from dspark.scheduling.cost import CostProfile, profile
from dspark.scheduling.placement import place

from .test_cost import Padded


def test_steps_are_found_to_the_token_and_straight_lines_take_one_look() -> None:
    asked: list[int] = []

    def seconds(tokens: int) -> float:  # two steps, at 24 and at 90, on a slope
        return 1.0 + 0.002 * tokens + 0.5 * (tokens > 24) + 0.7 * (tokens > 90)

    def ask(tokens: int) -> tuple[int, float]:
        asked.append(tokens)
        return tokens, seconds(tokens)

    found = place(ask, 256, tolerance=0.02)
    for edge in (24, 90):
        assert {edge, edge + 1} <= set(found), "both sides of a step"
    assert len(asked) == len(set(asked)) == len(found) <= 26
    points = sorted(found)
    worst = 0.0
    for n in range(1, 257):
        after = next(i for i, p in enumerate(points) if p >= n)
        low, high = points[max(after - 1, 0)], points[after]
        line = (
            seconds(high) if low == high else seconds(low) + (n - low) / (high - low) * (seconds(high) - seconds(low))
        )
        worst = max(worst, abs(line / seconds(n) - 1.0))
    assert worst <= 0.03


def test_a_straight_line_takes_the_powers_of_two_and_little_more() -> None:
    found = place(lambda n: (n, 1.0 + 0.1 * n), 256, tolerance=0.02)
    assert set(found) >= {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert len(found) <= 9 + 8


def test_placement_ends_with_the_points_and_with_the_time() -> None:
    def jagged(n: int) -> tuple[int, float]:
        return n, 1.0 + (n * 7919 % 13)

    assert len(place(jagged, 200, tolerance=0.01, points=20)) == 20
    left = iter(range(12))
    cut = place(lambda n: jagged(n) if next(left, None) is not None else None, 200, tolerance=0.01)
    assert len(cut) == 12


def padded(target: Padded, **settings: object) -> CostProfile:
    target.allocate(8, target.max_len)
    settings = {"slots": 8, "most_tokens": 64, "contexts": (16, 64), "budget_seconds": 60.0, **settings}
    return profile(target, clock=lambda: target.now, **settings)


def test_a_target_that_pads_has_a_staircase_by_what_it_executed() -> None:
    found = padded(Padded())
    assert found.mode == "staircase"
    assert [n for n, _ in found.buckets[0].points] == [1, 2, 4, 8, 16, 32, 64]
    assert found.table().verify_seconds(37) == pytest.approx(4e-3 + 64e-3)
    assert [b.max_context for b in found.buckets] == [16, None]
    assert found.fingerprint == Padded().fingerprint()


def test_batches_of_several_shapes_are_timed() -> None:
    found = padded(Padded(pad=False))
    assert found.mode == "interpolated"
    shapes = {(r, n // r) for _, r, n, _ in found.batches}
    assert shapes == {(r, q) for r in (1, 2, 4, 8) for q in (1, 4, 8)}
    assert all(t == pytest.approx(4e-3 + 1e-3 * n) for _, _, n, t in found.batches)


def test_the_budget_is_kept_but_for_the_powers_of_two() -> None:
    target = Padded(pad=False, per_token=0.05)
    found = padded(target, budget_seconds=2.0, contexts=(16,))
    assert [n for n, _ in found.buckets[0].points][-1] == 64
    assert {1, 2, 4, 8, 16, 32, 64} <= {n for n, _ in found.buckets[0].points}
    assert target.now < 60.0


def test_what_is_asked_is_checked() -> None:
    for settings in ({"slots": 0}, {"most_tokens": 0}, {"contexts": ()}, {"repeats": 0}):
        with pytest.raises(CostTableError, match="profile: needs"):
            padded(Padded(), **settings)


def test_every_timing_is_told() -> None:
    told: list[int] = []
    target = Padded(pad=False)
    padded(target, tell=lambda: told.append(1))
    assert len(told) > 60


DRAFTER = {"drafter": "dspark/ngram", "checkpoint": "a"}


def test_drafting_times_are_kept_for_their_drafter_alone(tmp_path: Path) -> None:
    target = Padded(pad=False)
    target.allocate(1, 64)
    settings = {"folder": tmp_path, "clock": lambda: target.now, "token_counts": (1, 2)}
    plain = cached_profile(target, drafter=DRAFTER, **settings)
    assert plain.draft == ()
    timed = CostProfile(plain.buckets, plain.fingerprint, draft=((1, 7, 0.004),), drafter=DRAFTER)
    assert keep(timed, tmp_path) == profile_path({**plain.fingerprint, **DRAFTER}, tmp_path)
    assert cached_profile(target, drafter=DRAFTER, **settings).draft == ((1, 7, 0.004),)
    assert cached_profile(target, drafter={**DRAFTER, "checkpoint": "b"}, **settings).draft == ()
    assert cached_profile(target, **settings).draft == ()
    assert timed.of_drafter(DRAFTER) is timed
    assert timed.of_drafter({"drafter": "other"}).draft == ()


def test_a_profile_keeps_all_of_it(tmp_path: Path) -> None:
    found = padded(Padded(pad=False))
    found.save(tmp_path / "p.json")
    assert CostProfile.load(tmp_path / "p.json") == found
    assert math.isfinite(found.noise)
