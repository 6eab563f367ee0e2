//! A run: requests arrive, replicas decode them, and time is what their steps take.

use dspark_sched_core::{CostTable, Error};

use crate::confidence::Confidence;
use crate::gamma::Gamma;
use crate::ledger::{Record, Report};
use crate::machine::Machine;
use crate::planner::Scheduler;
use crate::replica::{Job, Replica, World};
use crate::rng::{shuffled, unit};
use crate::trace::Trace;

/// When requests come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// So many are in the system at any time: one comes as another ends.
    Closed(usize),
    /// So many a second on average, independently of one another.
    Poisson(f64),
}

/// What is simulated.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Decides verify lengths.
    pub scheduler: Scheduler,
    /// Decides how much is drafted.
    pub gamma: Gamma,
    /// What the scheduler is shown.
    pub confidence: Confidence,
    /// When requests come.
    pub arrivals: Arrivals,
    /// How many come in all; the trace is gone through again and again.
    pub requests: usize,
    /// In a new random order each time, instead of the trace's.
    pub shuffle: bool,
    /// Engines; a request goes to the one with the fewest.
    pub replicas: usize,
    /// Most requests that an engine decodes at once.
    pub max_slots: usize,
    /// Most prompt tokens that a step reads.
    pub step_tokens: u64,
    /// Cache tokens of an engine: a request is admitted when its prompt and `max_tokens` fit.
    pub kv_tokens: Option<u64>,
    /// Tokens that every prompt is longer than recorded: long contexts.
    pub extra_prompt: u64,
    /// Decides all that is random.
    pub seed: u64,
}

impl Settings {
    fn check(&self, trace: &Trace) -> Result<(), Error> {
        let refuse = |what: String| Err(Error::Argument(what));
        let counts = [
            ("requests", self.requests),
            ("replicas", self.replicas),
            ("max_slots", self.max_slots),
        ];
        for (name, count) in counts {
            if count == 0 || count > MOST {
                return refuse(format!("{name}: expected 1 to {MOST}, got {count}"));
            }
        }
        if self.step_tokens == 0 {
            return refuse("step_tokens: expected at least 1, got 0".into());
        }
        if self.gamma.most() > trace.gamma() {
            return refuse(format!(
                "gamma {}: the trace was recorded with {}",
                self.gamma.most(),
                trace.gamma()
            ));
        }
        if let Gamma::Adaptive { threshold, .. } = self.gamma
            && !(0.0..=1.0).contains(&threshold)
        {
            return refuse(format!(
                "threshold of the guard: expected 0 to 1, got {threshold}"
            ));
        }
        match self.arrivals {
            Arrivals::Closed(0) => return refuse("concurrency: expected at least 1, got 0".into()),
            Arrivals::Poisson(rate) if !(rate > 0.0 && rate.is_finite()) => {
                return refuse(format!(
                    "rate: expected a positive number of requests a second, got {rate}"
                ));
            }
            _ => {}
        }
        if self.extra_prompt > 1 << 32 {
            return refuse(format!("extra_prompt: {} tokens are too many", self.extra_prompt));
        }
        let limit = self.kv_tokens.unwrap_or(u64::MAX);
        for request in 0..trace.len() {
            let (prompt, _, most) = trace.lengths(request);
            if prompt + self.extra_prompt + most > limit {
                return refuse(format!(
                    "kv_tokens: request {request} needs {} tokens of cache, and there are {limit}",
                    prompt + self.extra_prompt + most
                ));
            }
        }
        Ok(())
    }
}

/// More of anything is a mistake.
const MOST: usize = 1 << 24;

/// The requests of a run in the order in which they come.
#[derive(Debug)]
struct Source<'a> {
    trace: &'a Trace,
    settings: &'a Settings,
    order: Vec<usize>,
    made: usize,
    clock: f64,
}

impl<'a> Source<'a> {
    fn new(trace: &'a Trace, settings: &'a Settings) -> Self {
        Self {
            trace,
            settings,
            order: Vec::new(),
            made: 0,
            clock: 0.0,
        }
    }

    fn left(&self) -> bool {
        self.made < self.settings.requests
    }

    /// The next arrival of an open loop, which has been drawn when the one before was taken.
    fn next_time(&self) -> Option<f64> {
        matches!(self.settings.arrivals, Arrivals::Poisson(_))
            .then_some(self.clock)
            .filter(|_| self.left())
    }

    fn take(&mut self) -> Job {
        let (place, round) = (self.made % self.trace.len(), self.made / self.trace.len());
        if place == 0 {
            self.order = if self.settings.shuffle {
                shuffled(self.trace.len(), self.settings.seed, round as u64)
            } else {
                (0..self.trace.len()).collect()
            };
        }
        let request = self.order.get(place).copied().unwrap_or(0);
        let (prompt, output, most) = self.trace.lengths(request);
        let job = Job {
            number: self.made,
            request,
            prompt: prompt + self.settings.extra_prompt,
            output,
            most,
        };
        self.made += 1;
        if let Arrivals::Poisson(rate) = self.settings.arrivals {
            self.clock -= unit(self.settings.seed, ARRIVALS, self.made as u64).ln() / rate;
        }
        job
    }
}

/// Key of the draws of arrival times, apart from those of drafts.
const ARRIVALS: u64 = u64::MAX;

/// Run the simulation.
///
/// `cost` is what schedulers plan with; `machine` says what steps take.
///
/// # Errors
/// For settings that are out of range or do not fit the trace.
pub fn simulate(
    trace: &Trace,
    cost: &CostTable,
    machine: &Machine,
    settings: &Settings,
) -> Result<Report, Error> {
    settings.check(trace)?;
    let world = World {
        trace,
        cost,
        machine,
        settings,
    };
    let mut run = Run {
        replicas: (0..settings.replicas).map(|_| Replica::new(world)).collect(),
        source: Source::new(trace, settings),
        report: Report {
            gammas: vec![0; settings.gamma.most() + 1],
            ..Report::default()
        },
        ended: None,
    };
    if let Arrivals::Closed(concurrency) = settings.arrivals {
        for _ in 0..concurrency.min(settings.requests) {
            run.arrive(0.0);
        }
        if concurrency > settings.requests {
            run.note_end(0.0);
        }
    } else {
        run.source.clock = -unit(settings.seed, ARRIVALS, 0).ln() / settings_rate(settings);
    }
    run.go()?;
    Ok(run.report)
}

fn settings_rate(settings: &Settings) -> f64 {
    match settings.arrivals {
        Arrivals::Poisson(rate) => rate,
        Arrivals::Closed(_) => 1.0,
    }
}

struct Run<'a> {
    replicas: Vec<Replica<'a>>,
    source: Source<'a>,
    report: Report,
    /// When load fell below what was asked, and the tokens that were out by then.
    ended: Option<(f64, u64)>,
}

impl Run<'_> {
    fn arrive(&mut self, now: f64) {
        let job = self.source.take();
        let loads = self.replicas.iter().map(Replica::load).enumerate();
        let replica = loads.min_by_key(|(i, load)| (*load, *i)).map_or(0, |(i, _)| i);
        self.report.records.push(Record {
            request: job.request,
            arrival: now,
            first: now,
            finish: now,
            tokens: 0,
            rounds: 0,
            replica,
        });
        if let Some(chosen) = self.replicas.get_mut(replica) {
            chosen.submit(job);
        }
    }

    fn note_end(&mut self, now: f64) {
        self.ended.get_or_insert((now, self.report.tokens));
    }

    /// Go from event to event: an arrival or the end of a step, whichever is first.
    fn go(&mut self) -> Result<(), Error> {
        let mut now = 0.0;
        let mut done = Vec::new();
        loop {
            for replica in self.replicas.iter_mut().filter(|r| r.until.is_none()) {
                replica.begin(now, &mut self.report)?;
            }
            let steps = self.replicas.iter().filter_map(|r| r.until);
            let Some(next) = steps.chain(self.source.next_time()).reduce(f64::min) else {
                break;
            };
            now = next;
            done.clear();
            for replica in self
                .replicas
                .iter_mut()
                .filter(|r| r.until.is_some_and(|t| t <= now))
            {
                replica.finish(now, &mut self.report, &mut done);
            }
            while self.source.next_time().is_some_and(|t| t <= now) {
                self.arrive(now);
                if !self.source.left() {
                    self.note_end(now);
                }
            }
            if let Arrivals::Closed(users) = self.source.settings.arrivals {
                // With fewer requests the window would be the reading of prompts and little else.
                let steady = self.source.settings.requests >= 2 * users;
                for _ in &done {
                    if self.source.left() {
                        self.arrive(now);
                    } else if steady {
                        self.note_end(now);
                    }
                }
            }
        }
        self.report.seconds = now;
        (self.report.window_seconds, self.report.window_tokens) =
            self.ended.unwrap_or((now, self.report.tokens));
        Ok(())
    }
}
