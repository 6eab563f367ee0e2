//! `lagged`: the paper's production variant. The number of drafts to verify comes from survivals of two rounds ago.

use std::collections::HashMap;

use crate::averages::{Averages, Rates};
use crate::batch::{Batch, check_len, check_matrix};
use crate::causal::{admit, best_prefix};
use crate::cost::CostTable;
use crate::error::Error;
use crate::order::Order;
use crate::plan::{Outcome, StopReason};

/// One round's survivals of one request, as far as its draft could be verified.
#[derive(Debug, Clone, Default, PartialEq)]
struct Past {
    gamma: usize,
    survival: Vec<f64>,
}

impl Past {
    fn take(&mut self, gamma: usize, draft: &[f64]) {
        self.gamma = gamma;
        self.survival.clear();
        self.survival.extend_from_slice(draft);
    }
}

/// The last two rounds of the request that holds a slot.
#[derive(Debug, Clone, Default, PartialEq)]
struct Entry {
    generation: i64,
    older: Past,
    newer: Past,
    /// Plan that saw it last.
    seen: u64,
}

/// `K = argmax_k Theta(k)` over the survivals that the requests alive now had two of their rounds ago; then the K best
/// current candidates are admitted. K can't depend on a current token, and a request's later position never outranks
/// its earlier one. A request without such a round (or with another gamma in it) uses running averages.
#[derive(Debug, Clone, Default)]
pub struct Lagged {
    /// What stands for requests without history. Frozen while a plan is made, updated after it.
    pub averages: Averages,
    history: HashMap<i64, Entry>,
    plans: u64,
    order: Order,
    rates: Rates,
    recalled: Vec<f64>,
}

impl Lagged {
    /// A scheduler that starts from these averages.
    #[must_use]
    pub fn new(averages: Averages) -> Self {
        Self {
            averages,
            ..Self::default()
        }
    }

    /// Plan one round, then learn its survivals. `slots` and `generations`, `[R]`, identify the rows; lengths go to
    /// `lens`, `[R]`.
    ///
    /// # Errors
    /// For an array that does not have R entries, or a slot that appears twice.
    pub fn plan(
        &mut self,
        batch: &Batch<'_>,
        slots: &[i64],
        generations: &[i64],
        cost: &CostTable,
        lens: &mut [i64],
    ) -> Result<Outcome, Error> {
        batch.check_lens(lens)?;
        self.enter(batch, slots, generations)?;
        lens.fill(0);
        self.rates.load(&self.averages, batch);
        self.recall(batch, slots);
        let budget = best_prefix(&mut self.order, batch, &self.recalled, cost).count;

        self.order.fill(batch.survival(), batch.max_lens(), batch.gamma());
        let mut meter = cost.meter(batch.rows(), batch.gamma(), batch.base_tokens(), batch.context());
        let mut stop = StopReason::LaggedBudget;
        for _ in 0..budget {
            match self.order.next() {
                Some(candidate) => {
                    let next = meter.next(candidate.a());
                    meter.admit(next);
                    admit(lens, candidate.row());
                }
                None => stop = StopReason::AllAdmitted,
            }
        }
        self.learn(batch, slots);
        Ok(Outcome::weighed(meter.tau, meter.theta, stop, cost))
    }

    /// Learn a round that was planned without this scheduler.
    ///
    /// # Errors
    /// As [`Lagged::plan`].
    pub fn observe(&mut self, batch: &Batch<'_>, slots: &[i64], generations: &[i64]) -> Result<(), Error> {
        self.enter(batch, slots, generations)?;
        self.learn(batch, slots);
        Ok(())
    }

    /// Take `survival`, `[gamma]`, as what a request had in its last two rounds.
    ///
    /// # Errors
    /// For survivals that are no non-increasing numbers from 0 to 1.
    pub fn seed(&mut self, slot: i64, generation: i64, survival: &[f64]) -> Result<(), Error> {
        check_matrix("survival", survival, 1, survival.len())?;
        if let Some(at) = survival
            .windows(2)
            .position(|pair| matches!(pair, [a, b] if b > a))
        {
            return Err(Error::Rising {
                row: 0,
                position: at + 1,
            });
        }
        let mut entry = Entry {
            generation,
            ..Entry::default()
        };
        entry.older.take(survival.len(), survival);
        entry.newer.take(survival.len(), survival);
        self.history.insert(slot, entry);
        Ok(())
    }

    /// Forget a request. Another one that has its slot by now is kept.
    pub fn release(&mut self, slot: i64, generation: i64) {
        if self
            .history
            .get(&slot)
            .is_some_and(|e| e.generation == generation)
        {
            self.history.remove(&slot);
        }
    }

    /// Requests with history.
    #[must_use]
    pub fn len(&self) -> usize {
        self.history.len()
    }

    /// True before the first round and after every request is released.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.history.is_empty()
    }

    /// Check the rows' identities and give each an entry; a slot's new generation begins without history.
    fn enter(&mut self, batch: &Batch<'_>, slots: &[i64], generations: &[i64]) -> Result<(), Error> {
        check_len("slots", slots.len(), batch.rows())?;
        check_len("generations", generations.len(), batch.rows())?;
        self.plans += 1;
        for (&slot, &generation) in slots.iter().zip(generations) {
            let entry = self.history.entry(slot).or_default();
            if entry.seen == self.plans {
                return Err(Error::Argument(format!("slots: {slot} appears twice")));
            }
            if entry.generation != generation {
                *entry = Entry {
                    generation,
                    ..Entry::default()
                };
            }
            entry.seen = self.plans;
        }
        Ok(())
    }

    /// Survivals of two rounds ago, `[R, gamma]`; averages where there are none and beyond where they end.
    fn recall(&mut self, batch: &Batch<'_>, slots: &[i64]) {
        self.recalled.clear();
        for (row, slot) in slots.iter().enumerate() {
            let past = self
                .history
                .get(slot)
                .map(|e| &e.older)
                .filter(|p| p.gamma == batch.gamma());
            let known = past.map_or(&[][..], |p| p.survival.as_slice());
            self.recalled.extend_from_slice(known);
            let mut a = known.last().copied().unwrap_or(1.0);
            self.recalled
                .extend(self.rates.row(row).iter().skip(known.len()).map(|rate| {
                    a *= rate;
                    a
                }));
        }
    }

    fn learn(&mut self, batch: &Batch<'_>, slots: &[i64]) {
        for (draft, slot) in batch.drafts().zip(slots) {
            if let Some(entry) = self.history.get_mut(slot) {
                std::mem::swap(&mut entry.older, &mut entry.newer);
                entry.newer.take(batch.gamma(), draft);
            }
        }
        self.averages.observe(batch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve::CurveMode;

    fn table() -> CostTable {
        CostTable::new(&[(1, 1.0), (101, 21.0)], CurveMode::Interpolated).unwrap()
    }

    #[test]
    fn budget_comes_from_two_rounds_ago() {
        let cost = table();
        let mut scheduler = Lagged::new(Averages::new(0.0).unwrap());
        let rounds = [
            [0.9, 0.8, 0.7],
            [0.0, 0.0, 0.0],
            [0.9, 0.8, 0.7],
            [0.9, 0.8, 0.7],
            [0.9, 0.8, 0.7],
        ];
        let mut got = Vec::new();
        for a in &rounds {
            let mut lens = [0];
            scheduler
                .plan(
                    &Batch::new(a, &[3], 3, 1, 0).unwrap(),
                    &[4],
                    &[1],
                    &cost,
                    &mut lens,
                )
                .unwrap();
            got.push(lens[0]);
        }
        // No history: prior 0; then averages of round 1, its survivals, round 2's zeros, round 3's.
        assert_eq!(got, [0, 0, 3, 0, 3]);
    }

    #[test]
    fn a_new_generation_has_no_history_and_release_keeps_it() {
        let mut scheduler = Lagged::default();
        scheduler.seed(2, 7, &[0.5, 0.25]).unwrap();
        scheduler.release(2, 6);
        assert_eq!(scheduler.len(), 1);
        let batch = Batch::new(&[0.9, 0.9], &[2], 2, 1, 0).unwrap();
        scheduler.observe(&batch, &[2], &[8]).unwrap();
        assert_eq!(scheduler.history[&2].older, Past::default());
        scheduler.release(2, 7);
        assert_eq!(scheduler.len(), 1);
        scheduler.release(2, 8);
        assert!(scheduler.is_empty());
    }

    #[test]
    fn a_slot_twice_is_refused() {
        let batch = Batch::new(&[0.9, 0.8], &[1, 1], 1, 2, 0).unwrap();
        let error = Lagged::default()
            .plan(&batch, &[3, 3], &[1, 2], &table(), &mut [0, 0])
            .unwrap_err();
        assert!(error.to_string().contains("3 appears twice"));
    }
}
