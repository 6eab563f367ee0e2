//! The simulator: traces and runs.

use dspark_sched_sim as sim;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::{Count, Input, count, value_error};
use crate::cost::CostTable;

#[pyclass(module = "dspark._sched", frozen)]
pub(crate) struct Trace {
    inner: sim::Trace,
}

#[pymethods]
impl Trace {
    #[new]
    #[pyo3(signature = (prompt, output, most, offsets, at, drafted, accepted, probs, *, taps = false))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        prompt: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        most: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        at: &Bound<'_, PyAny>,
        drafted: &Bound<'_, PyAny>,
        accepted: &Bound<'_, PyAny>,
        probs: &Bound<'_, PyAny>,
        taps: bool,
    ) -> PyResult<Self> {
        let column = |name, array| Input::<'_, i64>::new(name, array, 1);
        let (prompt, output) = (column("prompt", prompt)?, column("output", output)?);
        let (most, offsets) = (column("most", most)?, column("offsets", offsets)?);
        let (at, drafted) = (column("at", at)?, column("drafted", drafted)?);
        let accepted = column("accepted", accepted)?;
        let probs: Input<'_, f64> = Input::with_rows("probs", probs, at.rows())?;
        sim::Trace::new(&sim::TraceArrays {
            prompt: prompt.slice()?,
            output: output.slice()?,
            most: most.slice()?,
            offsets: offsets.slice()?,
            at: at.slice()?,
            drafted: drafted.slice()?,
            accepted: accepted.slice()?,
            probs: probs.slice()?,
            gamma: probs.columns(),
            taps,
        })
        .map(|inner| Self { inner })
        .map_err(value_error)
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }

    #[getter]
    fn rounds(&self) -> usize {
        self.inner.rounds()
    }

    #[getter]
    fn gamma(&self) -> usize {
        self.inner.gamma()
    }

    #[getter]
    fn taps(&self) -> bool {
        self.inner.taps()
    }

    #[getter]
    fn rates(&self) -> Vec<f64> {
        self.inner.rates().to_vec()
    }
}

#[pyclass(module = "dspark._sched", frozen)]
pub(crate) struct Roofline {
    inner: sim::Roofline,
}

#[pymethods]
impl Roofline {
    #[new]
    #[pyo3(signature = (parameters, bandwidth, flops, *, draft_parameters = 0.0, parameter_bytes = 2.0, cache_bytes = 0.0, pair_flops = 0.0, glue = 0.0))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        parameters: f64,
        bandwidth: f64,
        flops: f64,
        draft_parameters: f64,
        parameter_bytes: f64,
        cache_bytes: f64,
        pair_flops: f64,
        glue: f64,
    ) -> PyResult<Self> {
        let inner = sim::Roofline {
            parameters,
            draft_parameters,
            parameter_bytes,
            cache_bytes,
            pair_flops,
            bandwidth,
            flops,
            glue,
        };
        inner.check().map(|inner| Self { inner }).map_err(value_error)
    }

    #[pyo3(signature = (contexts, most_tokens, requests, gamma))]
    fn table(
        &self,
        contexts: Vec<Count>,
        most_tokens: Count,
        requests: Count,
        gamma: Count,
    ) -> PyResult<CostTable> {
        if gamma.0 > MOST_GAMMA {
            return Err(PyValueError::new_err(format!(
                "gamma: expected 0 to {MOST_GAMMA}, got {}",
                gamma.0
            )));
        }
        let contexts: Vec<_> = contexts.into_iter().map(|c| c.0).collect();
        self.inner
            .table(&contexts, most_tokens.0, requests.0, gamma.0)
            .map(|inner| CostTable { inner })
            .map_err(value_error)
    }

    #[pyo3(signature = (tokens, cached = Count(0), pairs = Count(0)))]
    fn verify_seconds(&self, tokens: Count, cached: Count, pairs: Count) -> f64 {
        self.inner.verify_seconds(&sim::Load {
            tokens: tokens.0,
            cached: cached.0,
            pairs: pairs.0,
            ..sim::Load::default()
        })
    }

    fn draft_seconds(&self, requests: Count, gamma: Count) -> f64 {
        self.inner.draft_seconds(requests.0, gamma.0)
    }
}

/// Longer blocks are a mistake.
const MOST_GAMMA: u64 = 4096;

fn scheduler(name: &str, length: Option<i64>, threshold: f64) -> PyResult<sim::Scheduler> {
    Ok(match name {
        "off" => sim::Scheduler::Off,
        "fixed" => sim::Scheduler::Fixed(length),
        "threshold" => sim::Scheduler::Threshold(threshold),
        "causal" => sim::Scheduler::Causal,
        "lookahead" => sim::Scheduler::Lookahead,
        "lagged" => sim::Scheduler::Lagged,
        "global" => sim::Scheduler::Global,
        "clairvoyant" => sim::Scheduler::Clairvoyant,
        _ => {
            return Err(PyValueError::new_err(format!(
                "scheduler: expected off, fixed, threshold, causal, lookahead, lagged, global or clairvoyant, got {name:?}"
            )));
        }
    })
}

fn confidence(name: &str) -> PyResult<sim::Confidence> {
    match name {
        "recorded" => Ok(sim::Confidence::Recorded),
        "learned" => Ok(sim::Confidence::Learned),
        "oracle" => Ok(sim::Confidence::Oracle),
        _ => Err(PyValueError::new_err(format!(
            "confidence: expected recorded, learned or oracle, got {name:?}"
        ))),
    }
}

fn size(name: &str, value: u64) -> PyResult<usize> {
    usize::try_from(value).map_err(|_| PyValueError::new_err(format!("{name}: {value} is too large")))
}

#[pyfunction]
#[pyo3(signature = (
    trace, cost, *, requests, concurrency = None, rate = None, scheduler = "causal", gamma = None, adaptive = None,
    length = None, threshold = 0.5, confidence = "recorded", roofline = None, shuffle = false, replicas = 1,
    max_slots = 32, step_tokens = 512, kv_tokens = None, extra_prompt = 0, seed = 0
))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn simulate<'py>(
    py: Python<'py>,
    trace: &Trace,
    cost: &CostTable,
    requests: Count,
    concurrency: Option<Count>,
    rate: Option<f64>,
    scheduler: &str,
    gamma: Option<Count>,
    adaptive: Option<f64>,
    length: Option<i64>,
    threshold: f64,
    confidence: &str,
    roofline: Option<&Roofline>,
    shuffle: bool,
    #[pyo3(from_py_with = count)] replicas: u64,
    #[pyo3(from_py_with = count)] max_slots: u64,
    #[pyo3(from_py_with = count)] step_tokens: u64,
    kv_tokens: Option<Count>,
    #[pyo3(from_py_with = count)] extra_prompt: u64,
    #[pyo3(from_py_with = count)] seed: u64,
) -> PyResult<Bound<'py, PyDict>> {
    let arrivals = match (concurrency, rate) {
        (Some(concurrency), None) => sim::Arrivals::Closed(size("concurrency", concurrency.0)?),
        (None, Some(rate)) => sim::Arrivals::Poisson(rate),
        _ => {
            return Err(PyValueError::new_err(
                "arrivals: expected one of concurrency (closed loop) and rate (requests a second)",
            ));
        }
    };
    let most = gamma.map_or(Ok(trace.inner.gamma()), |g| size("gamma", g.0))?;
    let settings = sim::Settings {
        scheduler: self::scheduler(scheduler, length, threshold)?,
        gamma: adaptive.map_or(sim::Gamma::Fixed(most), |threshold| sim::Gamma::Adaptive {
            most,
            threshold,
        }),
        confidence: self::confidence(confidence)?,
        arrivals,
        requests: size("requests", requests.0)?,
        shuffle,
        replicas: size("replicas", replicas)?,
        max_slots: size("max_slots", max_slots)?,
        step_tokens,
        kv_tokens: kv_tokens.map(|n| n.0),
        extra_prompt,
        seed,
    };
    let machine = roofline.map_or(sim::Machine::Table, |r| sim::Machine::Roofline(r.inner));
    let (trace, cost) = (&trace.inner, &cost.inner);
    let report = py
        .detach(|| sim::simulate(trace, cost, &machine, &settings))
        .map_err(value_error)?;
    as_dict(py, &report)
}

fn as_dict<'py>(py: Python<'py>, report: &sim::Report) -> PyResult<Bound<'py, PyDict>> {
    let made = PyDict::new(py);
    made.set_item("throughput", report.throughput())?;
    made.set_item("accepted_length", report.accepted_length())?;
    made.set_item("verify_budget", report.verify_budget())?;
    made.set_item("seconds", report.seconds)?;
    made.set_item("window_seconds", report.window_seconds)?;
    made.set_item("busy_seconds", report.busy_seconds)?;
    made.set_item("draft_seconds", report.draft_seconds)?;
    for (name, value) in [
        ("tokens", report.tokens),
        ("window_tokens", report.window_tokens),
        ("steps", report.steps),
        ("drafting_steps", report.drafting_steps),
        ("executed_tokens", report.executed),
        ("prompt_tokens", report.prompt_tokens),
        ("rounds", report.rounds),
        ("drafted", report.drafted),
        ("verified", report.verified),
        ("accepted", report.accepted),
        ("peak_live", report.peak_live as u64),
        ("peak_reserved", report.peak_reserved),
    ] {
        made.set_item(name, value)?;
    }
    made.set_item("gammas", &report.gammas)?;
    let records = PyDict::new(py);
    records.set_item("request", column(report, |r| r.request))?;
    records.set_item("arrival", column(report, |r| r.arrival))?;
    records.set_item("first", column(report, |r| r.first))?;
    records.set_item("finish", column(report, |r| r.finish))?;
    records.set_item("tokens", column(report, |r| r.tokens))?;
    records.set_item("rounds", column(report, |r| r.rounds))?;
    records.set_item("replica", column(report, |r| r.replica))?;
    made.set_item("records", records)?;
    Ok(made)
}

fn column<T>(report: &sim::Report, value: impl Fn(&sim::Record) -> T) -> Vec<T> {
    report.records.iter().map(value).collect()
}
