//! `CostTable`.

use dspark_sched_core as core;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::{Count, count, value_error};

fn curve_mode(name: &str) -> PyResult<core::CurveMode> {
    match name {
        "staircase" => Ok(core::CurveMode::Staircase),
        "interpolated" => Ok(core::CurveMode::Interpolated),
        _ => Err(PyValueError::new_err(format!(
            "mode: expected 'staircase' or 'interpolated', got {name:?}"
        ))),
    }
}

fn pairs(points: Vec<(Count, f64)>) -> Vec<(u64, f64)> {
    points.into_iter().map(|(n, t)| (n.0, t)).collect()
}

/// `(tokens, seconds)` points and the context bound of each bucket; `None`: no bound.
type Buckets = Vec<(Option<Count>, Vec<(Count, f64)>)>;

/// One of them as Python reads it.
type Bucket = (Option<u64>, Vec<(u64, f64)>);

#[derive(Clone)]
#[pyclass(module = "dspark._sched", frozen, eq)]
#[derive(PartialEq)]
pub(crate) struct CostTable {
    pub(crate) inner: core::CostTable,
}

impl CostTable {
    fn finish(
        table: Result<core::CostTable, core::Error>,
        draft: Vec<(Count, Count, f64)>,
        glue: f64,
        noise: f64,
    ) -> PyResult<Self> {
        let draft: Vec<_> = draft
            .into_iter()
            .map(|(requests, gamma, seconds)| core::DraftPoint {
                requests: requests.0,
                gamma: gamma.0,
                seconds,
            })
            .collect();
        table
            .and_then(|t| t.with_draft(&draft))
            .and_then(|t| t.with_glue(glue))
            .and_then(|t| t.with_noise(noise))
            .map(|inner| Self { inner })
            .map_err(value_error)
    }
}

#[pymethods]
impl CostTable {
    #[new]
    #[pyo3(signature = (points, *, mode = "interpolated", draft = Vec::new(), glue = 0.0, noise = 0.02))]
    fn new(
        points: Vec<(Count, f64)>,
        mode: &str,
        draft: Vec<(Count, Count, f64)>,
        glue: f64,
        noise: f64,
    ) -> PyResult<Self> {
        Self::finish(
            core::CostTable::new(&pairs(points), curve_mode(mode)?),
            draft,
            glue,
            noise,
        )
    }

    #[staticmethod]
    #[pyo3(signature = (buckets, *, mode = "interpolated", draft = Vec::new(), glue = 0.0, noise = 0.02))]
    fn from_buckets(
        buckets: Buckets,
        mode: &str,
        draft: Vec<(Count, Count, f64)>,
        glue: f64,
        noise: f64,
    ) -> PyResult<Self> {
        let buckets: Vec<_> = buckets
            .into_iter()
            .map(|(bound, points)| (bound.map_or(u64::MAX, |b| b.0), pairs(points)))
            .collect();
        Self::finish(
            core::CostTable::with_buckets(&buckets, curve_mode(mode)?),
            draft,
            glue,
            noise,
        )
    }

    #[staticmethod]
    #[pyo3(signature = (points, *, mode = "interpolated", draft = Vec::new(), glue = 0.0, noise = 0.02))]
    fn from_sps(
        points: Vec<(Count, f64)>,
        mode: &str,
        draft: Vec<(Count, Count, f64)>,
        glue: f64,
        noise: f64,
    ) -> PyResult<Self> {
        Self::finish(
            core::CostTable::from_sps(&pairs(points), curve_mode(mode)?),
            draft,
            glue,
            noise,
        )
    }

    #[pyo3(signature = (tokens, context = 0))]
    fn verify_seconds(&self, tokens: Count, #[pyo3(from_py_with = count)] context: u64) -> f64 {
        self.inner.verify_seconds(tokens.0, context)
    }

    fn draft_seconds(&self, requests: Count, gamma: Count) -> f64 {
        self.inner.draft_seconds(requests.0, gamma.0)
    }

    #[pyo3(signature = (tokens, requests, gamma, context = 0))]
    fn step_seconds(
        &self,
        tokens: Count,
        requests: Count,
        gamma: Count,
        #[pyo3(from_py_with = count)] context: u64,
    ) -> f64 {
        self.inner.step_seconds(tokens.0, requests.0, gamma.0, context)
    }

    #[pyo3(signature = (tau, tokens, requests, gamma, context = 0))]
    fn throughput(
        &self,
        tau: f64,
        tokens: Count,
        requests: Count,
        gamma: Count,
        #[pyo3(from_py_with = count)] context: u64,
    ) -> f64 {
        self.inner.throughput(tau, tokens.0, requests.0, gamma.0, context)
    }

    #[pyo3(signature = (requests, tokens = None, context = 0))]
    fn plain_throughput(
        &self,
        requests: Count,
        tokens: Option<Count>,
        #[pyo3(from_py_with = count)] context: u64,
    ) -> f64 {
        let tokens = tokens.map_or(requests.0, |t| t.0);
        self.inner
            .throughput(requests.0 as f64, tokens, requests.0, 0, context)
    }

    #[pyo3(signature = (low, high, context = 0))]
    fn flat_over(
        &self,
        low: Count,
        high: Count,
        #[pyo3(from_py_with = count)] context: u64,
    ) -> PyResult<bool> {
        if low.0 > high.0 || high.0 > core::MAX_TOKENS {
            return Err(PyValueError::new_err(format!(
                "expected low <= high <= {}, got {} and {}",
                core::MAX_TOKENS,
                low.0,
                high.0
            )));
        }
        Ok(self.inner.flat_over(low.0, high.0, context))
    }

    #[getter]
    fn flat(&self) -> bool {
        self.inner.flat()
    }

    #[getter]
    fn state(&self) -> &'static str {
        if self.inner.flat() {
            core::StopReason::FlatCost.as_str()
        } else {
            "measured"
        }
    }

    #[getter]
    fn mode(&self) -> &'static str {
        match self.inner.mode() {
            core::CurveMode::Staircase => "staircase",
            core::CurveMode::Interpolated => "interpolated",
        }
    }

    #[getter]
    fn glue(&self) -> f64 {
        self.inner.glue()
    }

    #[getter]
    fn noise(&self) -> f64 {
        self.inner.noise()
    }

    #[getter]
    fn buckets(&self) -> Vec<Bucket> {
        let bound = |b: u64| (b != u64::MAX).then_some(b);
        self.inner
            .buckets()
            .iter()
            .map(|(b, curve)| (bound(*b), curve.points().to_vec()))
            .collect()
    }

    fn __repr__(&self) -> String {
        let points: usize = self.inner.buckets().iter().map(|(_, c)| c.points().len()).sum();
        let buckets = self.inner.buckets().len();
        format!(
            "CostTable({points} points in {buckets} context buckets, {}, {})",
            self.mode(),
            self.state()
        )
    }
}
