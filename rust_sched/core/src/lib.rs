#![forbid(unsafe_code)]
//! Verify-length schedulers of dspark, their cost tables, and temperature scaling. No Python here.
//!
//! Notation: R requests, gamma drafted tokens a request, `a_{r,j}` survival of the first j drafts of request r (rows
//! non-increasing), `l_r` the verify length (without the anchor), B = sum of executed tokens,
//! tau = `sum_r (1 + sum_{j <= l_r} a_{r,j})`, Theta = tau / (T_draft + T_verify(B) + T_glue). All sums are f64.
//!
//! Every scheduler but [`Global`] keeps this property, which is what makes rejection sampling exact: for any
//! confidences c' that agree with c on `j <= l_r(c) + 1` for every r, `l(c') = l(c)`.

mod averages;
mod batch;
mod causal;
mod cost;
mod curve;
mod error;
mod fit;
mod lagged;
mod lookahead;
mod order;
mod plan;
mod sts;

pub use averages::{Averages, DEFAULT_PRIOR};
pub use batch::{Batch, MAX_TOKENS};
pub use causal::{Causal, Global};
pub use cost::{CostTable, DEFAULT_NOISE, DraftPoint};
pub use curve::{Curve, CurveMode};
pub use error::Error;
pub use fit::{Outcomes, default_grid, fit_sts};
pub use lagged::Lagged;
pub use lookahead::Lookahead;
pub use plan::{Outcome, StopReason, plan_fixed, plan_off, plan_threshold};
pub use sts::{scale_into, sts_into, survival_into};
