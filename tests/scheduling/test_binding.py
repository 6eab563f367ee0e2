"""What the binding refuses: ValueError or TypeError, never a panic, and nothing is copied behind the caller's back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dspark import _sched
from dspark._sched import CostTable

COST = CostTable([(1, 1.0), (64, 2.0)])
A = np.array([[0.9, 0.5], [0.8, 0.4]])
LENS = np.array([2, 2])


def causal(a: Any = A, lens: Any = LENS, out: Any = None, base: Any = 2, context: Any = 0) -> Any:
    out = np.zeros(2, dtype=np.int64) if out is None else out
    return _sched.Causal().plan(a, lens, out, COST, base, context)


BAD_VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "nan": (lambda: causal(np.array([[np.nan, 0.0], [0.0, 0.0]])), r"survival\[0, 0\].*NaN"),
    "above 1": (lambda: causal(np.array([[0.9, 0.5], [1.5, 0.0]])), r"survival\[1, 0\]"),
    "negative": (lambda: causal(np.array([[0.9, -0.5], [0.5, 0.0]])), r"survival\[0, 1\]"),
    "rising": (lambda: causal(np.array([[0.9, 0.5], [0.4, 0.5]])), r"survival\[1, 1\].*non-increasing"),
    "max_lens above gamma": (lambda: causal(lens=np.array([2, 3])), r"max_lens\[1\]"),
    "max_lens negative": (lambda: causal(lens=np.array([-1, 2])), r"max_lens\[0\]"),
    "rows": (lambda: causal(lens=np.array([2])), r"survival: expected shape \[1, 2\]"),
    "dimensions": (lambda: causal(np.zeros(4)), "survival: expected 2 dimensions"),
    "layout": (lambda: causal(np.asfortranarray(np.ones((2, 2)))), "survival: expected a C-contiguous"),
    "stride": (lambda: causal(np.ones((2, 4))[:, ::2]), "survival: expected a C-contiguous"),
    "out": (lambda: causal(out=np.zeros(3, dtype=np.int64)), "verify_lens: expected 2 entries, got 3"),
    "base": (lambda: causal(base=1), "base_tokens"),
    "negative base": (lambda: causal(base=-5), "expected an integer from 0"),
    "huge base": (lambda: causal(base=2**70), "expected an integer from 0"),
    "negative context": (lambda: causal(context=-1), "expected an integer from 0"),
    "groups": (
        lambda: _sched.Lookahead().plan(A, LENS, np.zeros(2, dtype=np.int64), COST, 2, 0, np.array([1])),
        "groups: expected 2 entries",
    ),
    "slot twice": (
        lambda: _sched.Lagged().plan(A, LENS, LENS, LENS, np.zeros(2, dtype=np.int64), COST, 2),
        "2 appears twice",
    ),
    "slots": (
        lambda: _sched.Lagged().plan(A, LENS, LENS[:1], LENS, np.zeros(2, dtype=np.int64), COST, 2),
        "slots: expected 2 entries",
    ),
    "prior": (lambda: _sched.Lookahead(float("nan")), "prior"),
    "weight": (lambda: _sched.Lookahead().seed_averages(np.array([0.5]), 0, 0.0), "weight"),
    "rates": (lambda: _sched.Lookahead().seed_averages(np.array([0.5, 1.5])), r"rates\[0, 1\]"),
    "history": (lambda: _sched.Lagged().seed_history(0, 1, np.array([0.5, 0.6])), "non-increasing"),
    "length": (lambda: _sched.plan_fixed(A, LENS, np.zeros(2, dtype=np.int64), 2, -1), "length"),
    "threshold": (lambda: _sched.plan_threshold(A, A, LENS, np.zeros(2, dtype=np.int64), np.nan, 2), "threshold"),
    "temperature": (lambda: _sched.scale(A, np.array([1.0, 0.0]), np.empty_like(A)), "temperatures"),
    "logits": (
        lambda: _sched.sts(A * np.nan, np.ones(2), LENS, np.empty_like(A), np.empty_like(A)),
        r"logits\[0, 0\]",
    ),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_bad_values(case: str) -> None:
    call, message = BAD_VALUES[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_bad_types() -> None:
    for call in (
        lambda: causal(A.tolist()),
        lambda: causal(A.astype(np.float32)),
        lambda: causal(lens=LENS.astype(np.int32)),
        lambda: causal(base=2.0),
        lambda: causal(out=np.zeros(2)),
    ):
        with pytest.raises(TypeError):
            call()


def test_output_must_be_writeable_and_no_input() -> None:
    frozen = np.zeros(2, dtype=np.int64)
    frozen.flags.writeable = False
    for out in (frozen, LENS):
        with pytest.raises(ValueError, match="writeable"):
            causal(out=out)


def test_inputs_are_read_in_place_and_left_alone() -> None:
    a, lens, out = A.copy(), LENS.copy(), np.zeros(2, dtype=np.int64)
    causal(a, lens, out)
    assert (a == A).all()
    assert (lens == LENS).all()
    assert out.tolist() == [2, 2]


@settings(max_examples=200, deadline=None)
@given(
    a=hnp.arrays(
        st.sampled_from([np.float64, np.float32, np.int64]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    lens=hnp.arrays(np.int64, hnp.array_shapes(min_dims=1, max_dims=1, min_side=0, max_side=4)),
    base=st.integers(-(2**70), 2**70),
)
def test_anything_is_planned_or_refused(a: Any, lens: Any, base: int) -> None:
    out = np.zeros(len(lens), dtype=np.int64)
    planned = (
        lambda: _sched.Causal().plan(a, lens, out, COST, base),
        lambda: _sched.Lookahead().plan(a, lens, out, COST, base),
        lambda: _sched.Global().plan(a, lens, out, COST, base),
        lambda: _sched.plan_threshold(a, a, lens, out, 0.5, base),
    )
    others = (
        lambda: _sched.survival(a, lens, np.zeros_like(a)),
        lambda: _sched.scale(a, np.ones(2), np.zeros_like(a)),
    )
    for call in (*planned, *others):
        try:
            call()
        except (ValueError, TypeError):
            continue
        assert call not in planned or ((out >= 0) & (out <= lens)).all()


def test_sts_is_a_sigmoid_of_scaled_logits_in_both_precisions() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, size=(5, 4)).astype(np.float32)
    temperatures, lens = np.array([0.5, 1.0, 2.0, 3.0]), np.array([4, 3, 0, 1, 4])
    expected = 1 / (1 + np.exp(-logits.astype(np.float64) / temperatures))
    products = np.cumprod(expected, axis=1) * (np.arange(4) < lens[:, None])
    for given_logits in (logits, logits.astype(np.float64)):
        probs, survival = np.empty((5, 4)), np.empty((5, 4))
        _sched.sts(given_logits, temperatures, lens, probs, survival)
        np.testing.assert_allclose(probs, expected, rtol=1e-12)
        np.testing.assert_allclose(survival, products, rtol=1e-12)
    scaled, plain = np.empty((5, 4)), 1 / (1 + np.exp(-logits.astype(np.float64)))
    _sched.scale(plain, temperatures, scaled)
    np.testing.assert_allclose(scaled, expected, rtol=1e-9)
    _sched.scale(plain, np.ones(4), scaled)
    assert (scaled == plain).all()
