"""Appendix A (case 4), exactly: (.7, .3) for what ships, (.85, .15) for a schedule that looks back (METHOD 4)."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from dspark.config import SamplingParams
from dspark.errors import ConfigError, DSparkWarning, RequestError
from dspark.testing import ScriptedDraws, TableDrafter, TableEstimator, TableTarget, law
from dspark.testing.cheats import RetreatingLookahead, Retrospective, sps
from dspark.testing.toys import law_table
from dspark.types import Mode

from .harness import build, decode, engine, make_parts, make_scheduler, seed_history, sps_table

RATES = (1.0, 0.5, 0.45)
HONEST = ("causal", "lookahead", "lagged", "fixed", "threshold", "off")


def lookahead_with_average(average: float) -> Any:
    """A lookahead whose running average of c_2 is ``average``, from the drafts of other requests."""
    from dspark.testing.cheats import schedule_input

    made = build("scheduling", "lookahead", vocab_size=2)
    for _ in range(400):
        made.plan(schedule_input([[0.8, average]], generation=99), sps_table(RATES))
    return made


def appendix(scheduler: Any, draws: Any, *, tokens: int = 3, **settings: Any) -> Any:
    parts = make_parts(
        draws,
        drafter=TableDrafter(law_table((0.5, 0.5))),
        estimator=TableEstimator([[0.8, 0.8], [0.9, 0.0]]),
        scheduler=scheduler,
        target=TableTarget(law_table((0.7, 0.3))),
        cost=sps_table(RATES),
    )
    made = engine(parts, **settings)
    request = ([0], SamplingParams(temperature=1.0, max_tokens=tokens, request_key=1))
    return parts.target, made, request


def first_token(scheduler: Any, **settings: Any) -> dict[int, float]:
    """Law of the first token, of the scheduler that ``scheduler()`` makes."""

    def program(draws: Any) -> int:
        _, made, request = appendix(scheduler(), draws, **settings)
        return decode(made, [request])[0][0]

    return law(program)


@pytest.mark.parametrize("name", HONEST)
def test_what_ships_keeps_the_law(name: str) -> None:
    def scheduler() -> Any:
        made = build("scheduling", name, vocab_size=2, **({"threshold": 0.5} if name == "threshold" else {}))
        return seed_history(made, sps_table(RATES), rows=1, gamma=2)

    assert first_token(scheduler) == pytest.approx({0: 0.7, 1: 0.3}, abs=1e-12)


def test_a_retrospective_schedule_is_caught() -> None:
    assert first_token(lambda: Retrospective(sps(*RATES))) == pytest.approx({0: 0.85, 1: 0.15}, abs=1e-12)


def test_global_is_refused_with_rejection_and_biased_where_the_user_insists() -> None:
    def scheduler() -> Any:
        return build("scheduling", "global", vocab_size=2)

    with pytest.raises(ConfigError, match="coupled"):
        appendix(scheduler(), ScriptedDraws(), verifier="rejection")
    with pytest.warns(DSparkWarning, match="biased"):
        appendix(scheduler(), ScriptedDraws(), lossless="off")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DSparkWarning)
        assert first_token(scheduler, lossless="off") == pytest.approx({0: 0.85, 1: 0.15}, abs=1e-12)


def test_global_without_a_seed_decodes_coupled() -> None:
    from dspark.sampling.draws import CounterDraws

    _, made, (prompt, _) = appendix(build("scheduling", "global", vocab_size=2), CounterDraws())
    assert Mode.REJECTION not in made.modes
    name = made.submit(prompt, SamplingParams(temperature=1.0, max_tokens=3))
    assert [r.mode for r in made.live() if r.request_id == name] == [Mode.COUPLED]
    with pytest.raises(RequestError, match="request_key"):
        made.submit(prompt, SamplingParams(temperature=1.0, max_tokens=3, request_key=5))


def first_lengths(scheduler: Any) -> dict[tuple[int, int], float]:
    """Law of (x_1, verify length of the first round)."""

    def program(draws: Any) -> tuple[int, int]:
        target, made, (prompt, params) = appendix(scheduler(), draws)
        made.submit(prompt, params)
        made.step()
        return made.parts.drafter.last_block.token_ids[0, 0].item(), target.forwards[0][0] - 1

    return law(program)


def test_causal_verifies_nothing_in_both_cases() -> None:
    assert set(first_lengths(lambda: make_scheduler("causal"))) == {(0, 0), (1, 0)}


def test_lookahead_crosses_the_dip_in_both_cases() -> None:
    """With a running average of .9 at position 2 it verifies x_1 whatever x_1 is, and stays exact."""
    lens = first_lengths(lambda: lookahead_with_average(0.9))
    assert {token for token, _ in lens} == {0, 1}
    assert all(length >= 1 for _, length in lens)
    assert first_token(lambda: lookahead_with_average(0.9)) == pytest.approx({0: 0.7, 1: 0.3}, abs=1e-12)


def test_a_lookahead_that_retreats_is_caught() -> None:
    biased = first_token(lambda: RetreatingLookahead(sps(*RATES), averages=(0.8, 0.9)))
    assert biased == pytest.approx({0: 0.85, 1: 0.15}, abs=1e-12)
