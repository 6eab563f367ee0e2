//! Temperature scaling, its fit, and prefix products.

use dspark_sched_core as core;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::{Input, Output, count, value_error};

/// More bins than this are a mistake.
const MOST_BINS: usize = 1 << 16;

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

#[pyfunction]
#[pyo3(signature = (logits, offered, accepted, temperatures, ece, grid = None, bins = 20))]
pub(crate) fn fit_sts(
    logits: &Bound<'_, PyAny>,
    offered: &Bound<'_, PyAny>,
    accepted: &Bound<'_, PyAny>,
    temperatures: &Bound<'_, PyAny>,
    ece: &Bound<'_, PyAny>,
    grid: Option<&Bound<'_, PyAny>>,
    #[pyo3(from_py_with = count)] bins: u64,
) -> PyResult<()> {
    let py = logits.py();
    let offered: Input<'_, i64> = Input::new("offered", offered, 1)?;
    let accepted: Input<'_, i64> = Input::new("accepted", accepted, 1)?;
    let logits: Input<'_, f64> = Input::with_rows("logits", logits, offered.rows())?;
    let grid: Option<Input<'_, f64>> = grid.map(|g| Input::new("grid", g, 1)).transpose()?;
    let mut temperatures = Output::vector("temperatures", temperatures)?;
    let mut ece = Output::vector("ece", ece)?;
    let bins = usize::try_from(bins)
        .ok()
        .filter(|b| *b <= MOST_BINS)
        .ok_or_else(|| PyValueError::new_err(format!("bins: expected 1 to {MOST_BINS}, got {bins}")))?;
    let rounds = core::Outcomes::new(
        logits.slice()?,
        offered.slice()?,
        accepted.slice()?,
        logits.columns(),
    )
    .map_err(value_error)?;
    let fallback;
    let grid = match &grid {
        Some(grid) => grid.slice()?,
        None => {
            fallback = core::default_grid();
            &fallback
        }
    };
    let (t, e) = (temperatures.slice()?, ece.slice()?);
    py.detach(|| core::fit_sts(&rounds, grid, bins, t, e))
        .map_err(value_error)
}
