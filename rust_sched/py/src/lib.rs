//! Python binding of `dspark-sched-core`. Thin: it checks arrays, calls the core and names errors.
//!
//! Documentation of what Python sees is in `dspark/_sched.pyi`.

// What is seen from Python is documented in the stub.
#![allow(missing_docs)]

mod arrays;
mod cost;
mod schedulers;
mod sim;
mod sts;

/// Verify-length schedulers, cost tables and temperature scaling.
#[pyo3::pymodule]
mod _sched {
    #[pymodule_export]
    use crate::cost::CostTable;
    #[pymodule_export]
    use crate::schedulers::{Causal, Global, Lagged, Lookahead, plan_fixed, plan_off, plan_threshold};
    #[pymodule_export]
    use crate::sim::{Roofline, Trace, simulate};
    #[pymodule_export]
    use crate::sts::{fit_sts, scale, sts, survival};
}
