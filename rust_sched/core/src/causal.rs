//! `causal`, the paper's Algorithm 1, and `global`, the retrospective optimum that it must not be.

use crate::batch::Batch;
use crate::cost::CostTable;
use crate::error::Error;
use crate::order::Order;
use crate::plan::{Outcome, StopReason};

/// Algorithm 1: admit candidates in descending survival, stop at the first that does not improve Theta.
///
/// Whether position k of a row is admitted depends on first-unadmitted positions alone, so on tokens before k.
///
/// ```
/// use dspark_sched_core::{Batch, Causal, CostTable, CurveMode};
/// // Appendix A: whichever token was drawn first, nothing is verified.
/// let cost = CostTable::from_sps(&[(1, 1.0), (2, 0.5), (3, 0.45)], CurveMode::Interpolated)?;
/// for c2 in [0.9, 0.0] {
///     let mut lens = [9];
///     let survival = [0.8, 0.8 * c2];
///     Causal::default().plan(&Batch::new(&survival, &[2], 2, 1, 0)?, &cost, &mut lens)?;
///     assert_eq!(lens, [0]);
/// }
/// # Ok::<(), dspark_sched_core::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Causal {
    order: Order,
}

impl Causal {
    /// Plan one round; lengths go to `lens`, `[R]`.
    ///
    /// # Errors
    /// If `lens` does not have R entries.
    pub fn plan(&mut self, batch: &Batch<'_>, cost: &CostTable, lens: &mut [i64]) -> Result<Outcome, Error> {
        batch.check_lens(lens)?;
        lens.fill(0);
        self.order.fill(batch.survival(), batch.max_lens(), batch.gamma());
        let mut meter = cost.meter(batch.rows(), batch.gamma(), batch.base_tokens(), batch.context());
        let mut stop = StopReason::AllAdmitted;
        while let Some(candidate) = self.order.next() {
            let next = meter.next(candidate.a());
            if next.1 > meter.theta {
                meter.admit(next);
                admit(lens, candidate.row());
            } else {
                stop = StopReason::NoImprovement;
                break;
            }
        }
        Ok(Outcome::weighed(meter.tau, meter.theta, stop, cost))
    }
}

/// `global`: the best prefix of the whole order. It looks past (r, k) before it decides (r, k): exact only with the
/// `coupled` verifier and greedy.
#[derive(Debug, Clone, Default)]
pub struct Global {
    order: Order,
}

impl Global {
    /// Plan one round; lengths go to `lens`, `[R]`.
    ///
    /// # Errors
    /// If `lens` does not have R entries.
    pub fn plan(&mut self, batch: &Batch<'_>, cost: &CostTable, lens: &mut [i64]) -> Result<Outcome, Error> {
        batch.check_lens(lens)?;
        lens.fill(0);
        let best = best_prefix(&mut self.order, batch, batch.survival(), cost);
        self.order.rewind();
        for _ in 0..best.count {
            if let Some(candidate) = self.order.next() {
                admit(lens, candidate.row());
            }
        }
        Ok(Outcome::weighed(best.tau, best.theta, StopReason::Optimum, cost))
    }
}

/// The shortest prefix of the order with the highest Theta.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Best {
    pub(crate) count: usize,
    pub(crate) tau: f64,
    pub(crate) theta: f64,
}

/// Search the order of `survival`, which may be another than the batch's own.
pub(crate) fn best_prefix(order: &mut Order, batch: &Batch<'_>, survival: &[f64], cost: &CostTable) -> Best {
    order.fill(survival, batch.max_lens(), batch.gamma());
    let mut meter = cost.meter(batch.rows(), batch.gamma(), batch.base_tokens(), batch.context());
    let mut best = Best {
        count: 0,
        tau: meter.tau,
        theta: meter.theta,
    };
    let mut count = 0;
    while let Some(candidate) = order.next() {
        let next = meter.next(candidate.a());
        meter.admit(next);
        count += 1;
        if meter.theta > best.theta {
            best = Best {
                count,
                tau: meter.tau,
                theta: meter.theta,
            };
        }
    }
    best
}

pub(crate) fn admit(lens: &mut [i64], row: usize) {
    if let Some(len) = lens.get_mut(row) {
        *len += 1;
    }
}
