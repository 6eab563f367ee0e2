//! The schedulers. Each `plan` writes verify lengths to `out` and returns (expected, throughput, stop reason).

use dspark_sched_core as core;
use pyo3::prelude::*;

use crate::arrays::{Count, Input, Output, count, value_error};
use crate::cost::CostTable;

type Plan = (f64, f64, &'static str);
type Any<'a, 'py> = &'a Bound<'py, PyAny>;

fn plan(outcome: Result<core::Outcome, core::Error>) -> PyResult<Plan> {
    outcome
        .map(|o| (o.expected, o.throughput, o.stop.as_str()))
        .map_err(value_error)
}

/// The arrays that a batch borrows.
struct Arrays<'py> {
    survival: Input<'py, f64>,
    max_lens: Input<'py, i64>,
    groups: Option<Input<'py, i64>>,
}

impl<'py> Arrays<'py> {
    fn new(survival: Any<'_, 'py>, max_lens: Any<'_, 'py>, groups: Option<Any<'_, 'py>>) -> PyResult<Self> {
        let max_lens = Input::new("max_lens", max_lens, 1)?;
        let survival = Input::with_rows("survival", survival, max_lens.rows())?;
        let groups = groups.map(|g| Input::new("groups", g, 1)).transpose()?;
        Ok(Self {
            survival,
            max_lens,
            groups,
        })
    }

    fn batch(&self, base_tokens: Count, context: u64) -> PyResult<core::Batch<'_>> {
        let (survival, max_lens) = (self.survival.slice()?, self.max_lens.slice()?);
        let gamma = self.survival.columns();
        let batch = core::Batch::new(survival, max_lens, gamma, base_tokens.0, context);
        match &self.groups {
            None => batch.map_err(value_error),
            Some(groups) => {
                let groups = groups.slice()?;
                batch.and_then(|b| b.with_groups(groups)).map_err(value_error)
            }
        }
    }
}

/// What `lookahead` and `lagged` need of the running averages.
fn averages(prior: f64) -> PyResult<core::Averages> {
    core::Averages::new(prior).map_err(value_error)
}

fn seed(averages: &mut core::Averages, rates: Any<'_, '_>, group: i64, weight: f64) -> PyResult<()> {
    averages
        .seed(Input::new("rates", rates, 1)?.slice()?, group, weight)
        .map_err(value_error)
}

#[derive(Default)]
#[pyclass(module = "dspark._sched")]
pub(crate) struct Causal {
    inner: core::Causal,
}

#[pymethods]
impl Causal {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    #[pyo3(signature = (survival, max_lens, out, cost, base_tokens, context = 0))]
    fn plan(
        &mut self,
        survival: Any<'_, '_>,
        max_lens: Any<'_, '_>,
        out: Any<'_, '_>,
        cost: &CostTable,
        base_tokens: Count,
        #[pyo3(from_py_with = count)] context: u64,
    ) -> PyResult<Plan> {
        let arrays = Arrays::new(survival, max_lens, None)?;
        let mut out = Output::vector("out", out)?;
        plan(
            self.inner
                .plan(&arrays.batch(base_tokens, context)?, &cost.inner, out.slice()?),
        )
    }
}

#[derive(Default)]
#[pyclass(module = "dspark._sched")]
pub(crate) struct Global {
    inner: core::Global,
}

#[pymethods]
impl Global {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    #[pyo3(signature = (survival, max_lens, out, cost, base_tokens, context = 0))]
    fn plan(
        &mut self,
        survival: Any<'_, '_>,
        max_lens: Any<'_, '_>,
        out: Any<'_, '_>,
        cost: &CostTable,
        base_tokens: Count,
        #[pyo3(from_py_with = count)] context: u64,
    ) -> PyResult<Plan> {
        let arrays = Arrays::new(survival, max_lens, None)?;
        let mut out = Output::vector("out", out)?;
        plan(
            self.inner
                .plan(&arrays.batch(base_tokens, context)?, &cost.inner, out.slice()?),
        )
    }
}

#[pyclass(module = "dspark._sched")]
pub(crate) struct Lookahead {
    inner: core::Lookahead,
}

#[pymethods]
impl Lookahead {
    #[new]
    #[pyo3(signature = (prior = 0.8))]
    fn new(prior: f64) -> PyResult<Self> {
        Ok(Self {
            inner: core::Lookahead::new(averages(prior)?),
        })
    }

    #[pyo3(signature = (survival, max_lens, out, cost, base_tokens, context = 0, groups = None))]
    #[allow(clippy::too_many_arguments)]
    fn plan(
        &mut self,
        survival: Any<'_, '_>,
        max_lens: Any<'_, '_>,
        out: Any<'_, '_>,
        cost: &CostTable,
        base_tokens: Count,
        #[pyo3(from_py_with = count)] context: u64,
        groups: Option<Any<'_, '_>>,
    ) -> PyResult<Plan> {
        let arrays = Arrays::new(survival, max_lens, groups)?;
        let mut out = Output::vector("out", out)?;
        plan(
            self.inner
                .plan(&arrays.batch(base_tokens, context)?, &cost.inner, out.slice()?),
        )
    }

    #[pyo3(signature = (survival, max_lens, groups = None))]
    fn observe(
        &mut self,
        survival: Any<'_, '_>,
        max_lens: Any<'_, '_>,
        groups: Option<Any<'_, '_>>,
    ) -> PyResult<()> {
        let arrays = Arrays::new(survival, max_lens, groups)?;
        let base = Count(arrays.max_lens.rows() as u64);
        self.inner.averages.observe(&arrays.batch(base, 0)?);
        Ok(())
    }

    #[pyo3(signature = (gamma, group = 0))]
    fn averages(&self, gamma: u16, group: i64) -> Vec<f64> {
        self.inner.averages.rates(usize::from(gamma), group)
    }

    #[pyo3(signature = (rates, group = 0, weight = 1.0))]
    fn seed_averages(&mut self, rates: Any<'_, '_>, group: i64, weight: f64) -> PyResult<()> {
        seed(&mut self.inner.averages, rates, group, weight)
    }
}

#[pyclass(module = "dspark._sched")]
pub(crate) struct Lagged {
    inner: core::Lagged,
}

#[pymethods]
impl Lagged {
    #[new]
    #[pyo3(signature = (prior = 0.8))]
    fn new(prior: f64) -> PyResult<Self> {
        Ok(Self {
            inner: core::Lagged::new(averages(prior)?),
        })
    }

    #[pyo3(signature = (survival, max_lens, slots, generations, out, cost, base_tokens, context = 0, groups = None))]
    #[allow(clippy::too_many_arguments)]
    fn plan(
        &mut self,
        survival: Any<'_, '_>,
        max_lens: Any<'_, '_>,
        slots: Any<'_, '_>,
        generations: Any<'_, '_>,
        out: Any<'_, '_>,
        cost: &CostTable,
        base_tokens: Count,
        #[pyo3(from_py_with = count)] context: u64,
        groups: Option<Any<'_, '_>>,
    ) -> PyResult<Plan> {
        let arrays = Arrays::new(survival, max_lens, groups)?;
        let (slots, generations) = (
            Input::new("slots", slots, 1)?,
            Input::new("generations", generations, 1)?,
        );
        let mut out = Output::vector("out", out)?;
        let batch = arrays.batch(base_tokens, context)?;
        plan(self.inner.plan(
            &batch,
            slots.slice()?,
            generations.slice()?,
            &cost.inner,
            out.slice()?,
        ))
    }

    #[pyo3(signature = (survival, max_lens, slots, generations, groups = None))]
    fn observe(
        &mut self,
        survival: Any<'_, '_>,
        max_lens: Any<'_, '_>,
        slots: Any<'_, '_>,
        generations: Any<'_, '_>,
        groups: Option<Any<'_, '_>>,
    ) -> PyResult<()> {
        let arrays = Arrays::new(survival, max_lens, groups)?;
        let (slots, generations) = (
            Input::new("slots", slots, 1)?,
            Input::new("generations", generations, 1)?,
        );
        let base = Count(arrays.max_lens.rows() as u64);
        let batch = arrays.batch(base, 0)?;
        self.inner
            .observe(&batch, slots.slice()?, generations.slice()?)
            .map_err(value_error)
    }

    fn release(&mut self, slot: i64, generation: i64) {
        self.inner.release(slot, generation);
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }

    fn seed_history(&mut self, slot: i64, generation: i64, survival: Any<'_, '_>) -> PyResult<()> {
        let survival = Input::new("survival", survival, 1)?;
        self.inner
            .seed(slot, generation, survival.slice()?)
            .map_err(value_error)
    }

    #[pyo3(signature = (gamma, group = 0))]
    fn averages(&self, gamma: u16, group: i64) -> Vec<f64> {
        self.inner.averages.rates(usize::from(gamma), group)
    }

    #[pyo3(signature = (rates, group = 0, weight = 1.0))]
    fn seed_averages(&mut self, rates: Any<'_, '_>, group: i64, weight: f64) -> PyResult<()> {
        seed(&mut self.inner.averages, rates, group, weight)
    }
}

#[pyfunction]
#[pyo3(signature = (survival, max_lens, out, base_tokens, cost = None, context = 0))]
pub(crate) fn plan_off(
    survival: Any<'_, '_>,
    max_lens: Any<'_, '_>,
    out: Any<'_, '_>,
    base_tokens: Count,
    cost: Option<&CostTable>,
    #[pyo3(from_py_with = count)] context: u64,
) -> PyResult<Plan> {
    let arrays = Arrays::new(survival, max_lens, None)?;
    let mut out = Output::vector("out", out)?;
    plan(core::plan_off(
        &arrays.batch(base_tokens, context)?,
        cost.map(|c| &c.inner),
        out.slice()?,
    ))
}

#[pyfunction]
#[pyo3(signature = (survival, max_lens, out, base_tokens, length = None, cost = None, context = 0))]
pub(crate) fn plan_fixed(
    survival: Any<'_, '_>,
    max_lens: Any<'_, '_>,
    out: Any<'_, '_>,
    base_tokens: Count,
    length: Option<i64>,
    cost: Option<&CostTable>,
    #[pyo3(from_py_with = count)] context: u64,
) -> PyResult<Plan> {
    let arrays = Arrays::new(survival, max_lens, None)?;
    let mut out = Output::vector("out", out)?;
    let batch = arrays.batch(base_tokens, context)?;
    plan(core::plan_fixed(
        &batch,
        length,
        cost.map(|c| &c.inner),
        out.slice()?,
    ))
}

#[pyfunction]
#[pyo3(signature = (probs, survival, max_lens, out, threshold, base_tokens, cost = None, context = 0))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn plan_threshold(
    probs: Any<'_, '_>,
    survival: Any<'_, '_>,
    max_lens: Any<'_, '_>,
    out: Any<'_, '_>,
    threshold: f64,
    base_tokens: Count,
    cost: Option<&CostTable>,
    #[pyo3(from_py_with = count)] context: u64,
) -> PyResult<Plan> {
    let arrays = Arrays::new(survival, max_lens, None)?;
    let probs = Input::with_shape("probs", probs, arrays.max_lens.rows(), arrays.survival.columns())?;
    let mut out = Output::vector("out", out)?;
    let batch = arrays.batch(base_tokens, context)?;
    plan(core::plan_threshold(
        &batch,
        probs.slice()?,
        threshold,
        cost.map(|c| &c.inner),
        out.slice()?,
    ))
}
