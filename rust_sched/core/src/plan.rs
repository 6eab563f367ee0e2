//! What a scheduler returns, and the schedulers that weigh nothing.

use crate::batch::{Batch, check_matrix, index, rows_of};
use crate::cost::CostTable;
use crate::error::Error;

/// Why a scheduler stopped where it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StopReason {
    /// The next candidate did not improve Theta (and, for `lookahead`, no better step was expected beyond it).
    NoImprovement,
    /// Every candidate is admitted.
    AllAdmitted,
    /// The number of candidates that the survivals of two rounds ago called for is admitted.
    LaggedBudget,
    /// The retrospective optimum.
    Optimum,
    /// A fixed length.
    FixedLength,
    /// Confidences fell below the threshold, or every draft ended.
    Threshold,
    /// Nothing is verified.
    Off,
    /// The cost table is flat within its measurement: extra tokens look free, so Theta decides little.
    FlatCost,
}

impl StopReason {
    /// Its name in plans and statistics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoImprovement => "no-improvement",
            Self::AllAdmitted => "all-admitted",
            Self::LaggedBudget => "lagged-budget",
            Self::Optimum => "optimum",
            Self::FixedLength => "fixed-length",
            Self::Threshold => "threshold",
            Self::Off => "off",
            Self::FlatCost => "flat-cost",
        }
    }
}

/// A plan beside its verify lengths.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// `sum_r (1 + sum_{j <= l_r} a_{r,j})`: expected tokens of the round.
    pub expected: f64,
    /// Theta of the plan in tokens per second; NaN without a cost table.
    pub throughput: f64,
    /// Why it stopped there.
    pub stop: StopReason,
}

impl Outcome {
    pub(crate) fn weighed(expected: f64, throughput: f64, stop: StopReason, cost: &CostTable) -> Self {
        Self {
            expected,
            throughput,
            stop: if cost.flat() { StopReason::FlatCost } else { stop },
        }
    }
}

/// Expected tokens and Theta of given lengths, whoever chose them.
fn judge(batch: &Batch<'_>, lens: &[i64], stop: StopReason, cost: Option<&CostTable>) -> Outcome {
    let mut expected = batch.rows() as f64;
    let mut tokens = batch.base_tokens();
    for (draft, &len) in batch.drafts().zip(lens) {
        expected += draft.iter().take(index(len)).sum::<f64>();
        tokens += index(len) as u64;
    }
    let throughput = cost.map_or(f64::NAN, |cost| {
        cost.throughput(
            expected,
            tokens,
            batch.rows() as u64,
            batch.gamma() as u64,
            batch.context(),
        )
    });
    Outcome {
        expected,
        throughput,
        stop,
    }
}

/// `off`: l = 0.
///
/// # Errors
/// If `lens` does not have R entries.
pub fn plan_off(batch: &Batch<'_>, cost: Option<&CostTable>, lens: &mut [i64]) -> Result<Outcome, Error> {
    batch.check_lens(lens)?;
    lens.fill(0);
    Ok(judge(batch, lens, StopReason::Off, cost))
}

/// `fixed`: the same length for all, or all of every draft; cut at `max_lens`.
///
/// # Errors
/// If `lens` does not have R entries, or for a negative length.
///
/// ```
/// use dspark_sched_core::{Batch, plan_fixed};
/// let batch = Batch::new(&[0.9, 0.8, 0.7, 0.0], &[2, 1], 2, 2, 0)?;
/// let mut lens = [0; 2];
/// plan_fixed(&batch, None, None, &mut lens)?;
/// assert_eq!(lens, [2, 1]);
/// # Ok::<(), dspark_sched_core::Error>(())
/// ```
pub fn plan_fixed(
    batch: &Batch<'_>,
    length: Option<i64>,
    cost: Option<&CostTable>,
    lens: &mut [i64],
) -> Result<Outcome, Error> {
    batch.check_lens(lens)?;
    let length = length.unwrap_or(i64::MAX);
    if length < 0 {
        return Err(Error::Argument(format!(
            "length: expected at least 0, got {length}"
        )));
    }
    for (len, &max) in lens.iter_mut().zip(batch.max_lens()) {
        *len = max.min(length);
    }
    Ok(judge(batch, lens, StopReason::FixedLength, cost))
}

/// `threshold`: each draft up to, and without, its first `c_k < threshold`. `probs`: c, `[R, gamma]`.
///
/// # Errors
/// For a wrong length, or a confidence or threshold that is no number from 0 to 1.
pub fn plan_threshold(
    batch: &Batch<'_>,
    probs: &[f64],
    threshold: f64,
    cost: Option<&CostTable>,
    lens: &mut [i64],
) -> Result<Outcome, Error> {
    batch.check_lens(lens)?;
    check_matrix("probs", probs, batch.rows(), batch.gamma())?;
    if !(0.0..=1.0).contains(&threshold) {
        return Err(Error::Argument(format!(
            "threshold: expected a number from 0 to 1, got {threshold}"
        )));
    }
    lens.fill(0);
    for ((len, &max), c) in lens
        .iter_mut()
        .zip(batch.max_lens())
        .zip(rows_of(probs, batch.gamma()))
    {
        let confident = c.iter().take_while(|&&c| c >= threshold).count();
        *len = max.min(i64::try_from(confident).unwrap_or(i64::MAX));
    }
    Ok(judge(batch, lens, StopReason::Threshold, cost))
}
