//! How much is drafted: a fixed block, or a choice by cost and history, as the gamma policy `adaptive` makes it.

use dspark_sched_core::CostTable;

use crate::confidence::Learned;

/// Tokens drafted a round.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gamma {
    /// The same in every round; 0 for plain decoding.
    Fixed(usize),
    /// Chosen each few rounds, up to so many; plain where the predicted gain is below the threshold.
    ///
    /// A model of `adaptive`: guard with hysteresis, gamma by averages over all requests, probes. It has no early exit
    /// by features, which a trace does not hold.
    Adaptive {
        /// Longest block.
        most: usize,
        /// Predicted gain over plain decoding under which rounds are plain.
        threshold: f64,
    },
}

impl Gamma {
    pub(crate) fn most(self) -> usize {
        match self {
            Self::Fixed(gamma) => gamma,
            Self::Adaptive { most, .. } => most,
        }
    }
}

const REVIEW: u64 = 4;
const HYSTERESIS: f64 = 0.02;
const PROBE_SHARE: f64 = 0.01;
const PROBE_GAMMA: usize = 2;
const PROBE_ROWS: usize = 4;
const LONGER: u64 = 32;

/// What a round drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) gamma: usize,
    /// Most rows that draft.
    pub(crate) rows: usize,
    /// Everything that is drafted is verified.
    pub(crate) probe: bool,
}

/// The rows and tokens of a coming round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outlook<'a> {
    pub(crate) cost: &'a CostTable,
    pub(crate) rows: usize,
    pub(crate) context: u64,
}

/// State of the choice, by the magnitude of the batch.
#[derive(Debug, Clone, Default)]
pub(crate) struct Chooser {
    rounds: u64,
    regimes: Vec<Regime>,
    plain_seconds: f64,
    probe_seconds: f64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Regime {
    known: bool,
    on: bool,
    gamma: usize,
    review: u64,
    drafts: u64,
}

impl Chooser {
    /// Decide a round before anything of it is drafted.
    pub(crate) fn choose(&mut self, gamma: Gamma, outlook: &Outlook<'_>, learned: &Learned) -> Choice {
        let all = |gamma| Choice {
            gamma,
            rows: usize::MAX,
            probe: false,
        };
        let (most, threshold) = match gamma {
            Gamma::Fixed(gamma) => return all(gamma),
            Gamma::Adaptive { most, threshold } => (most, threshold),
        };
        if outlook.rows == 0 || most == 0 {
            return all(0);
        }
        self.rounds += 1;
        let place = outlook.rows.ilog2() as usize;
        if self.regimes.len() <= place {
            self.regimes.resize(place + 1, Regime::default());
        }
        let rounds = self.rounds;
        let Some(regime) = self.regimes.get_mut(place) else {
            return all(0);
        };
        if !regime.known || rounds >= regime.review {
            let (best, gain) = best_gamma(most, outlook, learned);
            let bar = if regime.known && !regime.on {
                threshold + HYSTERESIS
            } else {
                threshold
            };
            (regime.known, regime.on, regime.gamma) = (true, gain > bar, best);
            regime.review = rounds + REVIEW;
        }
        if regime.on {
            regime.drafts += 1;
            let longer = usize::from(regime.drafts.is_multiple_of(LONGER));
            return all((regime.gamma + longer).min(most));
        }
        self.plain(most, outlook)
    }

    fn plain(&mut self, most: usize, outlook: &Outlook<'_>) -> Choice {
        let (gamma, rows) = (PROBE_GAMMA.min(most), PROBE_ROWS.min(outlook.rows));
        let base = outlook.rows as u64;
        let tokens = base + (gamma * rows) as u64;
        let plain = outlook.cost.step_seconds(base, 0, 0, outlook.context);
        let probe = outlook
            .cost
            .step_seconds(tokens, rows as u64, gamma as u64, outlook.context);
        let extra = (probe - plain).max(0.0);
        self.plain_seconds += plain;
        if self.probe_seconds + extra > PROBE_SHARE * self.plain_seconds {
            return Choice {
                gamma: 0,
                rows: 0,
                probe: false,
            };
        }
        self.probe_seconds += extra;
        Choice {
            gamma,
            rows,
            probe: true,
        }
    }
}

/// The gamma of most Theta, and its predicted gain over a plain round.
fn best_gamma(most: usize, outlook: &Outlook<'_>, learned: &Learned) -> (usize, f64) {
    let rows = outlook.rows as u64;
    let theta = |tau: f64, tokens: u64, gamma: u64| {
        let drafting = if gamma == 0 { 0 } else { rows };
        outlook
            .cost
            .throughput(tau, tokens, drafting, gamma, outlook.context)
    };
    let plain = theta(rows as f64, rows, 0);
    let (mut best, mut best_theta) = (1, 0.0);
    let rates: Vec<f64> = learned.rates(most).collect();
    for gamma in 1..=most {
        let (mut tau, mut a) = (1.0, 1.0);
        for (l, rate) in (1_u64..).zip(rates.iter().take(gamma)) {
            a *= rate;
            tau += a;
            let theta = theta(tau * rows as f64, rows * (1 + l), gamma as u64);
            if theta > best_theta {
                (best, best_theta) = (gamma, theta);
            }
        }
    }
    (best, best_theta / plain - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dspark_sched_core::{CurveMode, DraftPoint};

    fn table(slope: f64) -> CostTable {
        CostTable::new(&[(1, 1.0), (1001, 1.0 + 1000.0 * slope)], CurveMode::Interpolated)
            .unwrap()
            .with_draft(&[DraftPoint {
                requests: 1,
                gamma: 1,
                seconds: 0.05,
            }])
            .unwrap()
    }

    fn taught(accepted: usize) -> Learned {
        let mut learned = Learned::default();
        for _ in 0..500 {
            learned.observe(0, 4, accepted);
        }
        learned
    }

    #[test]
    fn cheap_tokens_and_good_drafts_are_drafted_and_dear_or_bad_ones_are_not() {
        let adaptive = Gamma::Adaptive {
            most: 4,
            threshold: 0.04,
        };
        let choose = |slope, accepted| {
            let cost = table(slope);
            let outlook = Outlook {
                cost: &cost,
                rows: 1,
                context: 0,
            };
            Chooser::default()
                .choose(adaptive, &outlook, &taught(accepted))
                .gamma
        };
        assert_eq!(choose(0.001, 4), 4);
        assert_eq!(choose(0.001, 0), 0);
        assert_eq!(choose(2.0, 4), 0);
    }

    #[test]
    fn probes_stay_within_their_share() {
        let cost = table(0.5);
        let outlook = Outlook {
            cost: &cost,
            rows: 8,
            context: 0,
        };
        let adaptive = Gamma::Adaptive {
            most: 4,
            threshold: 0.04,
        };
        let (mut chooser, learned) = (Chooser::default(), taught(0));
        let probes = (0..5000)
            .filter(|_| chooser.choose(adaptive, &outlook, &learned).probe)
            .count();
        assert!(probes > 10, "{probes}");
        assert!(chooser.probe_seconds <= PROBE_SHARE * chooser.plain_seconds);
    }
}
