#![forbid(unsafe_code)]
//! A simulator of dspark's engine: recorded drafts, a cost curve, arrivals, and the real schedulers.
//!
//! A [`Trace`] says of each request what was drafted at which place of its output, how confidently, and how much of it
//! the target would accept. [`simulate`] replays it step by step as the engine runs: continuous batching, chunked
//! prefill, one forward a step. Nothing is random but what the seed decides, so a run is a function of its arguments.

mod confidence;
mod gamma;
mod ledger;
mod machine;
mod planner;
mod replica;
mod rng;
mod run;
mod trace;

pub use confidence::Confidence;
pub use gamma::Gamma;
pub use ledger::{Record, Report};
pub use machine::{Load, Machine, Roofline};
pub use planner::Scheduler;
pub use run::{Arrivals, Settings, simulate};
pub use trace::{Draft, Trace, TraceArrays};
