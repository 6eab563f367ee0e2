//! The first half of a round: which rows draft, what they propose, and how much of it is verified.

use dspark_sched_core::{Batch, Error, survival_into};

use super::{Effect, Live, Replica, World};
use crate::confidence::Confidence;
use crate::gamma::Outlook;
use crate::ledger::Report;
use crate::machine::Load;
use crate::planner::Rows;
use crate::rng::unit;

/// Rows of the round in hand; buffers are kept.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Which effect of the step each row is.
    pub(super) at: Vec<usize>,
    probs: Vec<f64>,
    survival: Vec<f64>,
    accepted: Vec<i64>,
    max_lens: Vec<i64>,
    slots: Vec<i64>,
    generations: Vec<i64>,
    lens: Vec<i64>,
}

impl Scratch {
    fn clear(&mut self) {
        self.at.clear();
        self.probs.clear();
        for list in [
            &mut self.accepted,
            &mut self.max_lens,
            &mut self.slots,
            &mut self.generations,
        ] {
            list.clear();
        }
    }
}

impl Replica<'_> {
    /// Draft rows into the scratch; the length of the block, and whether all of it is verified.
    pub(super) fn draft(&mut self, load: &Load, report: &mut Report) -> (usize, bool) {
        self.scratch.clear();
        let rows = self.could_draft();
        if rows.is_empty() {
            return (0, false);
        }
        let World {
            trace,
            cost,
            settings,
            ..
        } = self.world;
        let outlook = Outlook {
            cost,
            rows: rows.len(),
            context: load.context,
        };
        let choice = self.chooser.choose(settings.gamma, &outlook, &self.learned);
        let gamma = choice.gamma.min(trace.gamma());
        if gamma == 0 {
            return (0, false);
        }
        let count = choice.rows.min(rows.len());
        let turn = if count < rows.len() {
            report.steps as usize % rows.len()
        } else {
            0
        };
        let mut longest = 0;
        for &(effect, at) in rows.iter().cycle().skip(turn).take(count) {
            if let Some(row) = self.live.get(at).copied() {
                let len = self.propose(effect, &row, gamma);
                report.drafted += len as u64;
                longest = longest.max(len);
            }
        }
        (if longest > 0 { gamma } else { 0 }, choice.probe)
    }

    /// (effect, place among the live) of the rows that have room for a draft and what their drafter needs.
    fn could_draft(&self) -> Vec<(usize, usize)> {
        let taps = self.world.trace.taps();
        let could = |at: usize| {
            self.live
                .get(at)
                .is_some_and(|row| row.room() > 0 && !(taps && row.pending() > 1))
        };
        let effects = self.effects.iter().enumerate();
        effects
            .filter_map(|(i, effect)| match effect {
                Effect::Decode { at, .. } if could(*at) => Some((i, *at)),
                _ => None,
            })
            .collect()
    }

    /// Append one row; its drafted tokens.
    fn propose(&mut self, effect: usize, row: &Live, gamma: usize) -> usize {
        let World { trace, settings, .. } = self.world;
        let scratch = &mut self.scratch;
        let from = scratch.probs.len();
        scratch.probs.resize(from + gamma, 0.0);
        let Some(c) = scratch.probs.get_mut(from..) else {
            return 0;
        };
        let coin = unit(settings.seed, row.job.request as u64, row.emitted);
        let draft = trace.draft(row.job.request, row.emitted, coin, c);
        match settings.confidence {
            Confidence::Recorded => {}
            Confidence::Learned => self.learned.fill(row.job.number as u64, c),
            Confidence::Oracle => {
                for (k, c) in c.iter_mut().enumerate() {
                    *c = f64::from(u8::from(k < draft.accepted));
                }
            }
        }
        let room = usize::try_from(row.room()).unwrap_or(usize::MAX);
        scratch.at.push(effect);
        scratch.accepted.push(signed(draft.accepted));
        scratch.max_lens.push(signed(draft.len.min(room)));
        scratch.slots.push(row.slot);
        scratch.generations.push(row.generation);
        draft.len
    }

    /// Verify lengths of the drafted rows, by the real scheduler.
    pub(super) fn schedule(&mut self, load: &mut Load, gamma: usize, probe: bool) -> Result<(), Error> {
        let scratch = &mut self.scratch;
        let rows = scratch.at.len();
        scratch.survival.clear();
        scratch.survival.resize(rows * gamma, 0.0);
        scratch.lens.clear();
        scratch.lens.resize(rows, 0);
        survival_into(&scratch.probs, &scratch.max_lens, gamma, &mut scratch.survival)?;
        let batch = Batch::new(
            &scratch.survival,
            &scratch.max_lens,
            gamma,
            load.tokens,
            load.context,
        )?;
        let about = Rows {
            probs: &scratch.probs,
            accepted: &scratch.accepted,
            slots: &scratch.slots,
            generations: &scratch.generations,
        };
        self.planner
            .plan(&batch, &about, self.world.cost, probe, &mut scratch.lens)?;
        let planned = scratch.at.iter().zip(&scratch.lens).zip(&scratch.accepted);
        for ((&i, &len), &accepts) in planned {
            let Some(Effect::Decode {
                at,
                verified,
                accepted,
            }) = self.effects.get_mut(i)
            else {
                continue;
            };
            *verified = usize::try_from(len).unwrap_or(0);
            *accepted = usize::try_from(accepts.min(len)).unwrap_or(0);
            let context = self.live.get(*at).map_or(0, Live::ids);
            load.tokens += *verified as u64;
            load.cached += *verified as u64;
            load.pairs += *verified as u64 * context;
        }
        Ok(())
    }
}

fn signed(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}
