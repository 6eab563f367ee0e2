//! `lookahead`: Algorithm 1 that may cross a dip of Theta when the expected path beyond it is better.

use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use crate::averages::{Averages, Rates};
use crate::batch::{Batch, index};
use crate::causal::admit;
use crate::cost::{CostTable, Meter};
use crate::error::Error;
use crate::order::{Candidate, Order};
use crate::plan::{Outcome, StopReason};

/// Room for rounding where a bound is compared with a sum that was rounded in another order.
const SLACK: f64 = 1.0 + 1e-12;

/// An irrevocable walk in Algorithm 1's order.
///
/// A candidate that improves Theta is admitted. One that does not is admitted only if the *expected path* reaches a
/// Theta above the present one: the first unadmitted position of every row is known, deeper ones are replaced by
/// running averages. All of that is a function of history and of tokens before the positions being decided, and what
/// was crossed stays admitted even if Theta ends lower: going back to the best point passed would let a token decide
/// its own admission.
#[derive(Debug, Clone, Default)]
pub struct Lookahead {
    /// What deeper positions are replaced by. Frozen while a plan is made, updated after it.
    pub averages: Averages,
    order: Order,
    rates: Rates,
    heads: BinaryHeap<Candidate>,
}

impl Lookahead {
    /// A scheduler that starts from these averages.
    #[must_use]
    pub fn new(averages: Averages) -> Self {
        Self {
            averages,
            ..Self::default()
        }
    }

    /// Plan one round, then learn its survivals; lengths go to `lens`, `[R]`.
    ///
    /// # Errors
    /// If `lens` does not have R entries.
    pub fn plan(&mut self, batch: &Batch<'_>, cost: &CostTable, lens: &mut [i64]) -> Result<Outcome, Error> {
        batch.check_lens(lens)?;
        lens.fill(0);
        self.rates.load(&self.averages, batch);
        self.order.fill(batch.survival(), batch.max_lens(), batch.gamma());
        let mut left: u64 = batch.max_lens().iter().map(|&l| index(l) as u64).sum();
        let mut meter = cost.meter(batch.rows(), batch.gamma(), batch.base_tokens(), batch.context());
        let mut stop = StopReason::AllAdmitted;
        while let Some(candidate) = self.order.next() {
            let next = meter.next(candidate.a());
            if next.1 > meter.theta || self.crosses(batch, &meter, candidate.a(), left, lens) {
                meter.admit(next);
                left -= 1;
                admit(lens, candidate.row());
            } else {
                stop = StopReason::NoImprovement;
                break;
            }
        }
        self.averages.observe(batch);
        Ok(Outcome::weighed(meter.tau, meter.theta, stop, cost))
    }

    /// Does the expected path from here reach a higher Theta? `head` is the largest survival on it, `left` the most
    /// candidates that it can have.
    fn crosses(&mut self, batch: &Batch<'_>, here: &Meter<'_>, head: f64, left: u64, lens: &[i64]) -> bool {
        if here.ceiling(head, left) * SLACK <= here.theta {
            return false;
        }
        let mut heads = std::mem::take(&mut self.heads).into_vec();
        heads.clear();
        heads.extend(
            batch
                .drafts()
                .zip(lens)
                .enumerate()
                .filter_map(|(row, (draft, &len))| {
                    let position = index(len);
                    draft
                        .get(position)
                        .filter(|a| **a > 0.0)
                        .map(|&a| Candidate::new(a, position, row))
                }),
        );
        self.heads = BinaryHeap::from(heads);
        let mut path = *here;
        let mut left = left;
        let mut recheck = path.next_break();
        while let Some(mut top) = self.heads.peek_mut() {
            let candidate = *top;
            if path.tokens() >= recheck {
                if path.ceiling(candidate.a(), left) * SLACK <= here.theta {
                    return false;
                }
                recheck = path.next_break();
            }
            let next = path.next(candidate.a());
            path.admit(next);
            if path.theta > here.theta {
                return true;
            }
            left = left.saturating_sub(1);
            match self.rates.deeper(batch, candidate) {
                Some(deeper) => *top = deeper,
                None => {
                    PeekMut::pop(top);
                }
            }
        }
        false
    }
}

impl Rates {
    /// What follows a candidate in its row, in expectation.
    fn deeper(&self, batch: &Batch<'_>, after: Candidate) -> Option<Candidate> {
        let (row, position) = (after.row(), after.position() + 1);
        let within = batch
            .max_lens()
            .get(row)
            .is_some_and(|&max| position < index(max));
        let rate = self.row(row).get(position).filter(|_| within)?;
        let a = after.a() * rate;
        (a > 0.0).then(|| Candidate::new(a, position, row))
    }
}
