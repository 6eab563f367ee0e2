//! One engine: continuous batching with chunked prefill, step by step, as `dspark.engine` runs.

mod drafting;

use std::collections::{BTreeSet, VecDeque};

use dspark_sched_core::{CostTable, Error};

use crate::confidence::Learned;
use crate::gamma::Chooser;
use crate::ledger::Report;
use crate::machine::{Load, Machine};
use crate::planner::Planner;
use crate::run::Settings;
use crate::trace::Trace;

use drafting::Scratch;

/// A request that was given to a replica.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    /// Number in the order of arrival; also its record.
    pub(crate) number: usize,
    pub(crate) request: usize,
    pub(crate) prompt: u64,
    pub(crate) output: u64,
    pub(crate) most: u64,
}

impl Job {
    /// Cache tokens that it may come to need.
    pub(crate) fn reserved(&self) -> u64 {
        self.prompt + self.most
    }
}

#[derive(Debug, Clone, Copy)]
struct Live {
    job: Job,
    slot: i64,
    generation: i64,
    /// Tokens that the target has read.
    read: u64,
    emitted: u64,
}

impl Live {
    fn ids(&self) -> u64 {
        self.job.prompt + self.emitted
    }

    fn pending(&self) -> u64 {
        self.ids() - self.read
    }

    /// Most drafts that can still be committed beside the token after them.
    fn room(&self) -> u64 {
        self.job.most.saturating_sub(self.emitted + 1)
    }
}

/// What a step will do to one live request.
#[derive(Debug, Clone, Copy)]
enum Effect {
    /// Reads so many prompt tokens.
    Read { at: usize, tokens: u64 },
    /// Decodes a round.
    Decode {
        at: usize,
        verified: usize,
        accepted: usize,
    },
}

/// What the replicas of a run share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct World<'a> {
    pub(crate) trace: &'a Trace,
    pub(crate) cost: &'a CostTable,
    pub(crate) machine: &'a Machine,
    pub(crate) settings: &'a Settings,
}

#[derive(Debug)]
pub(crate) struct Replica<'a> {
    world: World<'a>,
    /// When the step in hand ends.
    pub(crate) until: Option<f64>,
    waiting: VecDeque<Job>,
    live: Vec<Live>,
    free: BTreeSet<i64>,
    generations: Vec<i64>,
    reserved: u64,
    effects: Vec<Effect>,
    planner: Planner,
    chooser: Chooser,
    learned: Learned,
    scratch: Scratch,
}

impl<'a> Replica<'a> {
    pub(crate) fn new(world: World<'a>) -> Self {
        let slots = world.settings.max_slots;
        Self {
            world,
            until: None,
            waiting: VecDeque::new(),
            live: Vec::new(),
            free: (0..i64::try_from(slots).unwrap_or(i64::MAX)).collect(),
            generations: vec![0; slots],
            reserved: 0,
            effects: Vec::new(),
            planner: Planner::new(world.settings.scheduler),
            chooser: Chooser::default(),
            learned: Learned::default(),
            scratch: Scratch::default(),
        }
    }

    /// Requests that wait or run.
    pub(crate) fn load(&self) -> usize {
        self.waiting.len() + self.live.len()
    }

    pub(crate) fn submit(&mut self, job: Job) {
        self.waiting.push_back(job);
    }

    /// Begin a step, if there is anything to do.
    pub(crate) fn begin(&mut self, now: f64, report: &mut Report) -> Result<(), Error> {
        self.admit(report);
        if self.live.is_empty() {
            return Ok(());
        }
        let mut load = self.collect(report);
        let (drafting, probe) = self.draft(&load, report);
        if drafting > 0 {
            load.gamma = drafting as u64;
            load.drafting = self.scratch.at.len() as u64;
            self.schedule(&mut load, drafting, probe)?;
            report.drafting_steps += 1;
        }
        let (draft, verify) = self.world.machine.seconds(self.world.cost, &load);
        let seconds = draft + verify + self.world.machine.glue(self.world.cost);
        report.steps += 1;
        report.executed += load.tokens;
        report.busy_seconds += seconds;
        report.draft_seconds += draft;
        if let Some(count) = report.gammas.get_mut(drafting) {
            *count += 1;
        }
        self.until = Some(now + seconds);
        Ok(())
    }

    /// Give free slots and cache to waiting requests, in order.
    fn admit(&mut self, report: &mut Report) {
        let limit = self.world.settings.kv_tokens.unwrap_or(u64::MAX);
        while let Some(job) = self.waiting.front().copied() {
            if self.reserved.saturating_add(job.reserved()) > limit {
                break;
            }
            let Some(slot) = self.free.pop_first() else { break };
            self.waiting.pop_front();
            self.reserved += job.reserved();
            let generation = usize::try_from(slot)
                .ok()
                .and_then(|s| self.generations.get_mut(s));
            let generation = generation.map_or(0, |g| {
                *g += 1;
                *g
            });
            self.live.push(Live {
                job,
                slot,
                generation,
                read: 0,
                emitted: 0,
            });
        }
        report.peak_live = report.peak_live.max(self.live.len());
        report.peak_reserved = report.peak_reserved.max(self.reserved);
    }

    /// The step's work without drafts: decoding rows read what is pending, prompts share what the budget leaves.
    fn collect(&mut self, report: &mut Report) -> Load {
        let mut budget = self.world.settings.step_tokens;
        let mut load = Load::default();
        self.effects.clear();
        for (at, live) in self.live.iter().enumerate() {
            let pending = live.pending();
            let mut take = pending;
            if pending > 1 {
                take = pending.min(budget);
                budget -= take;
                report.prompt_tokens += take;
            }
            if take == 0 {
                continue;
            }
            load.tokens += take;
            load.cached += live.read + take;
            load.pairs += take * (live.read + take);
            if take < pending {
                self.effects.push(Effect::Read { at, tokens: take });
            } else {
                load.context = load.context.max(live.ids());
                self.effects.push(Effect::Decode {
                    at,
                    verified: 0,
                    accepted: 0,
                });
            }
        }
        load
    }

    /// End the step in hand; numbers of the requests that ended go to `done`.
    pub(crate) fn finish(&mut self, now: f64, report: &mut Report, done: &mut Vec<usize>) {
        self.until = None;
        let effects = std::mem::take(&mut self.effects);
        for effect in &effects {
            match *effect {
                Effect::Read { at, tokens } => {
                    if let Some(live) = self.live.get_mut(at) {
                        live.read += tokens;
                    }
                }
                Effect::Decode {
                    at,
                    verified,
                    accepted,
                } => self.commit(at, verified, accepted, now, report),
            }
        }
        self.effects = effects;
        let planner = &mut self.planner;
        let (free, learned, reserved) = (&mut self.free, &mut self.learned, &mut self.reserved);
        self.live.retain(|live| {
            let over = live.emitted >= live.job.output;
            if over {
                done.push(live.job.number);
                free.insert(live.slot);
                *reserved -= live.job.reserved();
                planner.release(live.slot, live.generation);
                learned.release(live.job.number as u64);
            }
            !over
        });
    }

    fn commit(&mut self, at: usize, verified: usize, accepted: usize, now: f64, report: &mut Report) {
        let Some(live) = self.live.get_mut(at) else { return };
        live.read = live.ids() + accepted as u64;
        let left = live.job.output - live.emitted;
        let made = (accepted as u64 + 1).min(left);
        live.emitted += made;
        // As the engine counts: what lies beyond the end was neither offered nor accepted.
        let cut = usize::try_from(made).unwrap_or(usize::MAX);
        let (offered, won) = (
            if made == left { verified.min(cut) } else { verified },
            accepted.min(cut),
        );
        report.rounds += 1;
        report.tokens += made;
        report.verified += offered as u64;
        report.accepted += won as u64;
        self.learned.observe(live.job.number as u64, offered, won);
        if let Some(record) = report.records.get_mut(live.job.number) {
            if record.rounds == 0 {
                record.first = now;
            }
            record.rounds += 1;
            record.tokens += made;
            record.finish = now;
        }
    }
}
