"""Policies, loads and what is read off them, on traces made by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from dspark import _sched
from dspark.bench.advise import advise
from dspark.bench.load import Closed, Poisson
from dspark.bench.report import simulation_page
from dspark.bench.simulation import Point, Policy, World, frontier, lag_price, replay, sweep, tiers
from dspark.bench.trace import AcceptanceTrace, TracedRequest
from dspark.errors import ConfigError

GAMMA = 4


def trace(accepted: int, c: float, requests: int = 8, output: int = 40) -> AcceptanceTrace:
    """Every draft accepts so many, with one confidence."""
    one = TracedRequest(
        6, output, output, tuple(range(output)), (GAMMA,) * output, (accepted,) * output, ((c,) * GAMMA,) * output
    )
    return AcceptanceTrace((one,) * requests, GAMMA)


FLAT = _sched.CostTable([(1, 1.0), (4000, 1.2)], draft=[(1, 1, 0.02), (1, 4, 0.05)])
STEEP = _sched.CostTable([(1, 1.0), (2, 2.0), (100, 100.0)], draft=[(1, 1, 0.02), (1, 4, 0.05)])
KNEE = _sched.CostTable([(1, 1.0), (16, 1.0), (400, 25.0)], draft=[(1, 1, 0.02), (1, 4, 0.05)])


def test_drafting_pays_while_the_curve_is_flat() -> None:
    world = World(trace(3, 0.8), KNEE)
    loads = [Closed(1), Closed(4), Closed(32)]
    plain, fixed, causal, bound = (
        [replay(world, policy, load).throughput for load in loads]
        for policy in (Policy("off", 0), Policy("fixed"), Policy("causal"), Policy("clairvoyant"))
    )
    assert fixed[0] > 3.0 * plain[0], "four tokens a round for hardly more"
    assert all(b >= 0.999 * f for b, f in zip(bound, fixed, strict=True))
    assert fixed[2] < 1.05 * plain[2], "beyond the knee every token costs"
    assert causal[0] == pytest.approx(fixed[0], rel=0.02)


def test_budget_falls_as_load_grows() -> None:
    world = World(trace(2, 0.6), KNEE)
    budgets = [replay(world, Policy("causal"), Closed(n)).figures["verify_budget"] for n in (1, 8, 32)]
    assert budgets[0] > budgets[1] > budgets[2], budgets


def test_the_lag_has_a_price_where_confidences_move_and_none_where_they_do_not() -> None:
    assert abs(lag_price(World(trace(3, 0.8), KNEE), [Closed(4)])[0][1]) < 0.03
    output = 120
    accepted = tuple(4 if i % 2 else 0 for i in range(output))
    probs = tuple((0.97 if a else 0.03,) * GAMMA for a in accepted)
    one = TracedRequest(6, output, output, tuple(range(output)), (GAMMA,) * output, accepted, probs)
    moving = World(AcceptanceTrace((one,), GAMMA), STEEP)
    assert lag_price(moving, [Closed(1)])[0][1] < 0.0


def point(policy: str, speed: float, throughput: float) -> Point:
    return Point(Policy(policy), Closed(1), {"throughput": throughput}, (speed, speed, speed / 2), (1.0, 2.0, 3.0))


def test_a_frontier_keeps_what_nothing_beats() -> None:
    points = [
        point("causal", 10, 5),
        point("fixed", 8, 9),
        point("lagged", 8, 7),
        point("causal", 4, 8),
        point("fixed", 2, 20),
    ]
    assert [(p.user_speed, p.throughput) for p in frontier(points)] == [(10, 5), (8, 9), (2, 20)]
    assert frontier([dataclasses.replace(points[0], speeds=(math.nan,))]) == []


def test_tiers_take_the_most_throughput_at_which_users_get_their_speed() -> None:
    points = [point("causal", 10, 5), point("causal", 4, 8), point("fixed", 8, 9)]
    found = tiers(points, [4.0, 9.0], share=0.6)
    assert {label: p and p.throughput for label, p in found[4.0].items()} == {"causal": 8, "fixed": 9}
    assert {label: p and p.throughput for label, p in found[9.0].items()} == {"causal": 5, "fixed": None}
    assert tiers(points, [4.0], share=0.9)[4.0]["causal"] is points[0], "of a third, half the speed is enough"


def test_long_contexts_cost_what_the_roofline_says() -> None:
    roofline = _sched.Roofline(1e8, 1e10, 1e13, cache_bytes=2e4, glue=1e-4)
    cost = roofline.table([512, 8192], 4096, 64, GAMMA)
    short = World(trace(3, 0.8), cost, roofline)
    long = dataclasses.replace(short, extra_prompt=8000, _native=[])
    fast, slow = (replay(w, Policy("causal"), Closed(8)) for w in (short, long))
    assert fast.throughput > 1.3 * slow.throughput
    assert slow.figures["prompt_tokens"] == 64 * 8006


def test_arrivals_at_random_wait_when_there_are_too_many() -> None:
    world = World(trace(3, 0.8), KNEE, max_slots=2, requests_per_user=100)
    calm, busy = (replay(world, Policy("fixed"), Poisson(rate)) for rate in (0.01, 1.0))
    assert max(calm.waits) < 10.0
    assert sorted(busy.waits)[-20] > 100.0
    assert busy.throughput > 5 * calm.throughput


def test_impossible_settings_are_said() -> None:
    with pytest.raises(ConfigError, match="expected one of off, fixed"):
        Policy("best")
    with pytest.raises(ConfigError, match="recorded with 4"):
        replay(World(trace(1, 0.5), FLAT), Policy("causal", 5), Closed(1))
    with pytest.raises(ConfigError, match="needs 46 tokens of cache"):
        replay(World(trace(1, 0.5), FLAT, kv_tokens=45), Policy("causal"), Closed(1))


def test_case_28_a_steep_curve_and_one_request() -> None:
    """R = 1 and a cost curve so steep that no draft pays: said so, with numbers."""
    found = advise(World(trace(1, 0.5), STEEP), [1])[0]
    assert not found.worth()
    assert found.engine_settings() == {"drafter": "none"}
    said = found.sentence()
    assert said.startswith("1 request at once: do not draft")
    assert f"{found.plain.throughput:.1f}" in said
    assert "under the 4 % that it should gain" in said
    assert found.adaptive.throughput > 0.97 * found.plain.throughput


def test_advice_where_drafts_are_good_and_tokens_cheap() -> None:
    found = advise(World(trace(4, 0.95), FLAT), [1, 8])
    for one in found:
        assert one.worth()
        assert one.best.policy.gamma == GAMMA
        assert one.engine_settings() == {"scheduler": "fixed", "gamma": GAMMA, "gamma_policy": "static"}
        assert one.plain.throughput < one.adaptive.throughput <= 1.001 * one.bound.throughput
    found[0].measured.update(plain=10.0, advised=15.0)
    assert "measured 15.0 against 10.0, +50.0 %" in found[0].sentence()
    assert found[0].as_dict()["measured_gain"] == pytest.approx(0.5)
    assert found[1].as_dict()["measured_gain"] is None


def test_the_page_shows_every_part() -> None:
    world = World(trace(3, 0.8), KNEE, least_requests=8, requests_per_user=2)
    points = sweep(world, [Policy("off", 0), Policy("causal"), Policy("lagged")], [Closed(1), Closed(4), Poisson(0.5)])
    result: dict[str, Any] = {
        "points": [p.as_dict() for p in points],
        "frontier": [p.as_dict() for p in frontier(points)],
        "tiers": [{"speed": 0.5, "policies": {"causal": points[3].as_dict(), "lagged": None}}],
        "lag": [{"load": "4", "price": -0.01}],
        "settings": {"trace": "by hand"},
    }
    page = simulation_page(result)
    for text in (
        "throughput against speed of a user",
        "Service levels",
        "Price of the two-round lag",
        "-1.00 %",
        "0.5/s",
    ):
        assert text in page
    assert page.count("<svg") == 3
    assert "src=" not in page
    assert "href=" not in page
