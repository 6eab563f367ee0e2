//! Temperature scaling and prefix products.

use dspark_sched_core as core;
use pyo3::prelude::*;

use crate::arrays::{Input, Output, value_error};

#[pyfunction]
pub(crate) fn sts(
    logits: &Bound<'_, PyAny>,
    temperatures: &Bound<'_, PyAny>,
    max_lens: &Bound<'_, PyAny>,
    probs: &Bound<'_, PyAny>,
    survival: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let temperatures: Input<'_, f64> = Input::new("temperatures", temperatures, 1)?;
    let max_lens: Input<'_, i64> = Input::new("max_lens", max_lens, 1)?;
    let (rows, gamma) = (max_lens.rows(), temperatures.rows());
    let mut probs = Output::matrix("probs", probs, rows, gamma)?;
    let mut survival = Output::matrix("survival", survival, rows, gamma)?;
    let (t, m, c, a) = (
        temperatures.slice()?,
        max_lens.slice()?,
        probs.slice()?,
        survival.slice()?,
    );
    if let Ok(logits) = logits.cast::<numpy::PyArrayDyn<f32>>() {
        let logits: Input<'_, f32> = Input::with_shape("logits", logits, rows, gamma)?;
        core::sts_into(logits.slice()?, t, m, c, a).map_err(value_error)
    } else {
        let logits: Input<'_, f64> = Input::with_shape("logits", logits, rows, gamma)?;
        core::sts_into(logits.slice()?, t, m, c, a).map_err(value_error)
    }
}

#[pyfunction]
pub(crate) fn scale(
    probs: &Bound<'_, PyAny>,
    temperatures: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let temperatures: Input<'_, f64> = Input::new("temperatures", temperatures, 1)?;
    let probs: Input<'_, f64> = Input::with_columns("probs", probs, temperatures.rows())?;
    let mut out = Output::matrix("out", out, probs.rows(), probs.columns())?;
    core::scale_into(probs.slice()?, temperatures.slice()?, out.slice()?).map_err(value_error)
}

#[pyfunction]
pub(crate) fn survival(
    probs: &Bound<'_, PyAny>,
    max_lens: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let max_lens: Input<'_, i64> = Input::new("max_lens", max_lens, 1)?;
    let probs: Input<'_, f64> = Input::with_rows("probs", probs, max_lens.rows())?;
    let mut out = Output::matrix("out", out, probs.rows(), probs.columns())?;
    core::survival_into(probs.slice()?, max_lens.slice()?, probs.columns(), out.slice()?).map_err(value_error)
}
