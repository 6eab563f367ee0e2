//! The real schedulers behind one call, and the clairvoyant bound beside them.

use dspark_sched_core::{
    Batch, Causal, CostTable, Error, Global, Lagged, Lookahead, plan_fixed, plan_off, plan_threshold,
};

/// Which scheduler decides verify lengths.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scheduler {
    /// l = 0.
    Off,
    /// l = gamma, or so many.
    Fixed(Option<i64>),
    /// Up to the first confidence below.
    Threshold(f64),
    /// Algorithm 1.
    Causal,
    /// Algorithm 1 across dips.
    Lookahead,
    /// K from the survivals of two rounds ago.
    Lagged,
    /// The retrospective optimum of predicted Theta.
    Global,
    /// Only what will be accepted is verified: a bound for schedulers at the same draft cost.
    Clairvoyant,
}

/// Rows of a round beside their survivals.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub(crate) probs: &'a [f64],
    pub(crate) accepted: &'a [i64],
    pub(crate) slots: &'a [i64],
    pub(crate) generations: &'a [i64],
}

/// A scheduler with its state.
#[derive(Debug)]
pub(crate) struct Planner {
    kind: Scheduler,
    causal: Causal,
    lookahead: Lookahead,
    lagged: Lagged,
    global: Global,
}

impl Planner {
    pub(crate) fn new(kind: Scheduler) -> Self {
        Self {
            kind,
            causal: Causal::default(),
            lookahead: Lookahead::default(),
            lagged: Lagged::default(),
            global: Global::default(),
        }
    }

    /// Write verify lengths to `lens`, `[R]`; everything that may be verified where `all` says so.
    pub(crate) fn plan(
        &mut self,
        batch: &Batch<'_>,
        rows: &Rows<'_>,
        cost: &CostTable,
        all: bool,
        lens: &mut [i64],
    ) -> Result<(), Error> {
        if all {
            return plan_fixed(batch, None, None, lens).map(drop);
        }
        match self.kind {
            Scheduler::Off => plan_off(batch, None, lens).map(drop),
            Scheduler::Fixed(length) => plan_fixed(batch, length, None, lens).map(drop),
            Scheduler::Threshold(bar) => plan_threshold(batch, rows.probs, bar, None, lens).map(drop),
            Scheduler::Causal => self.causal.plan(batch, cost, lens).map(drop),
            Scheduler::Lookahead => self.lookahead.plan(batch, cost, lens).map(drop),
            Scheduler::Lagged => self
                .lagged
                .plan(batch, rows.slots, rows.generations, cost, lens)
                .map(drop),
            Scheduler::Global => self.global.plan(batch, cost, lens).map(drop),
            Scheduler::Clairvoyant => {
                plan_fixed(batch, None, None, lens)?;
                for (len, &accepted) in lens.iter_mut().zip(rows.accepted) {
                    *len = (*len).min(accepted);
                }
                Ok(())
            }
        }
    }

    pub(crate) fn release(&mut self, slot: i64, generation: i64) {
        self.lagged.release(slot, generation);
    }
}
