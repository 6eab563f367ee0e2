"""Fitting STS: case 19, cross-fitting by prompt, and the drift of rounds that came later."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from dspark.confidence.metrics import resampled_ece
from dspark.errors import DSparkWarning, EvaluationError
from dspark.evaluation import calibration as fitting
from dspark.evaluation.rounds import Rounds
from tests.evaluation.synthetic import GAMMA, TEMPERATURES, by_prompt, rounds_of


@pytest.mark.parametrize("seed", [0, 1])
def test_case_19_known_temperatures_are_recovered(seed: int) -> None:
    """20,000 rounds: within 20 % at positions 1-3, and nowhere a larger ECE than the true probabilities show."""
    rounds, true = rounds_of(20_000, seed=seed)
    fit = fitting.fit(by_prompt(rounds))
    np.testing.assert_allclose(fit.temperatures[:3], TEMPERATURES[:3], rtol=0.2)
    limit = np.percentile(resampled_ece(true, draws=200, seed=seed), 95, axis=0)
    assert (fit.fitted.metrics.ece <= limit).all(), (fit.fitted.metrics.ece, limit)
    assert float(fit.after.metrics.ece.mean()) <= 0.015, "held out"
    assert (fit.before.metrics.ece[[0, 5, 6]] > 2 * fit.after.metrics.ece[[0, 5, 6]]).all()
    assert (fit.after.metrics.auc > 0.75).all()
    assert fit.rounds == 20_000
    assert len(fit.at_the_end) == 0


def test_held_out_rounds_are_judged_by_what_others_taught() -> None:
    """A prompt whose outcomes contradict all others is judged badly, and only because its own were kept out."""
    rounds, _ = rounds_of(4000, gamma=2)
    odd = Rounds(np.full((400, 2), 0.9), np.full(400, 2), np.zeros(400, dtype=np.int64), np.ones(400, dtype=np.int64))
    fit = fitting.fit([*by_prompt(rounds, 400), odd], folds=11)
    alone = fitting.temperatures_of(odd)
    assert fitting.scaled(odd.probs, alone)[0, 0] < 0.62, "by itself it would be taken down as far as the grid goes"
    without = fitting.temperatures_of(rounds)
    together = np.concatenate([rounds.probs, odd.probs])
    fold = np.repeat(fitting.deal(11, 11), 400)
    for i in range(10):
        rest = Rounds.concat([part for k, part in enumerate([*by_prompt(rounds, 400), odd]) if k != i], 2)
        part = np.arange(400 * i, 400 * (i + 1))
        together[part] = fitting.scaled(rounds.probs[part], fitting.temperatures_of(rest))
    together[4000:] = fitting.scaled(odd.probs, without)
    assert len(set(fold[::400].tolist())) == 11
    want = Rounds(
        together, *(np.concatenate([getattr(rounds, n), getattr(odd, n)]) for n in ("offered", "accepted", "committed"))
    )
    np.testing.assert_allclose(fit.after.metrics.ece, fitting.judge(want).metrics.ece, rtol=1e-12)


def test_positions_that_were_not_offered_do_not_count() -> None:
    """Rounds cut at EOS end early; what c said beyond is nobody's business."""
    rounds, _ = rounds_of(3000, gamma=3)
    cut = rounds.offered.copy()
    cut[::2] = np.maximum(1, np.minimum(2, rounds.accepted[::2]))
    accepted = np.minimum(rounds.accepted, cut)
    probs = rounds.probs.copy()
    probs[np.arange(3) >= cut[:, None]] = 0.123
    one = Rounds(rounds.probs, cut, accepted, accepted + 1)
    other = Rounds(probs, cut, accepted, accepted + 1)
    first, second = fitting.fit(by_prompt(one)), fitting.fit(by_prompt(other))
    assert first.temperatures.tolist() == second.temperatures.tolist()
    assert first.after.as_dict() == second.after.as_dict()
    assert first.before.metrics.count.tolist() == [(cut > k).sum() for k in range(3)]


def test_what_cannot_be_fitted_is_refused() -> None:
    rounds, _ = rounds_of(200, gamma=2)
    with pytest.raises(EvaluationError, match="1 prompts with drafts are too few"):
        fitting.fit(by_prompt(rounds, 200))
    assert fitting.fit(by_prompt(rounds, 100)).prompts == 2, "as many folds as prompts"
    short = Rounds(rounds.probs, np.ones(200, dtype=np.int64), np.minimum(rounds.accepted, 1), rounds.committed)
    with pytest.raises(EvaluationError, match="no round was offered position 2"):
        fitting.fit(by_prompt(short, 20))
    plain = Rounds(rounds.probs, rounds.offered * 0, rounds.accepted * 0, rounds.committed)
    with pytest.raises(EvaluationError, match="nothing to judge"):
        fitting.judge(plain)
    assert fitting.fit([*by_prompt(rounds, 20), plain]).rounds == 200, "rounds without drafts are left out"


def test_a_temperature_at_the_grids_end_is_named() -> None:
    """Scores without any order: nothing but certainty that all is 1/2 helps."""
    rng = np.random.default_rng(0)
    probs = np.where(rng.random((2000, 1)) < 0.5, 0.99, 0.01)
    accepted = (rng.random(2000) < 0.5).astype(np.int64)
    rounds = Rounds(probs, np.ones(2000, dtype=np.int64), accepted, accepted + 1)
    assert fitting.fit(by_prompt(rounds)).at_the_end.tolist() == [1]


def entry(fit: fitting.Fit) -> fitting.CalibrationEntry:
    return fit.entry(target="t", name="tiny", verifier="dspark/greedy", mode="greedy", bucket=(0.0, 0.0), about={})


def test_case_19_a_shifted_distribution_raises_the_drift_warning() -> None:
    fitted = entry(fitting.fit(by_prompt(rounds_of(20_000)[0])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet = fitting.check(rounds_of(20_000, seed=5)[0], fitted)
    assert quiet.drift.drifted.tolist() == []
    assert quiet.as_dict()["drift"]["positions"] == []
    with pytest.warns(DSparkWarning, match=r"drift: .*position \d survival is off by an ECE of") as caught:
        loud = fitting.check(rounds_of(6000, seed=6, shift=0.8)[0], fitted)
    assert len(caught) == 1, "said once"
    assert 1 in loud.drift.drifted
    assert loud.calibrated.metrics.ece[0] > 0.05
    with pytest.raises(EvaluationError, match="gamma 3 can't be judged by temperatures for 7"):
        fitting.check(rounds_of(100, gamma=3)[0], fitted)


def test_an_entry_says_what_it_was_fitted_on() -> None:
    fit = fitting.fit(by_prompt(rounds_of(2000)[0]))
    made = fit.entry(
        target="0f", name="tiny", verifier="acme/careful", mode="rejection", bucket=(0.6, 0.8), about={"x": 1}
    )
    assert made.key == ("0f", "acme/careful", "rejection", GAMMA, 0.6, 0.8)
    assert made.temperatures == tuple(fit.temperatures)
    assert made.fit["rounds"] == 2000
    assert made.fit["prompts"] == 50
    assert made.fit["x"] == 1
    assert made.fit["ece_held_out"] == fit.after.metrics.ece.tolist()
