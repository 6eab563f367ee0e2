//! Which confidences the schedulers are shown.

use std::collections::HashMap;

/// Where c comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confidence {
    /// As recorded.
    Recorded,
    /// Learned from the outcomes of the replay itself, by position and request, as the estimator `online` does.
    Learned,
    /// 1 for what will be accepted and 0 for what will not: what better confidences could bring at most.
    Oracle,
}

const PRIOR_MEAN: f64 = 0.7;
const PRIOR_STRENGTH: f64 = 4.0;
const MEMORY: f64 = 500.0;
const REQUEST_MEMORY: f64 = 50.0;
const REQUEST_STRENGTH: f64 = 16.0;

#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    weight: f64,
    won: f64,
}

impl Sums {
    fn add(&mut self, weight: f64, won: bool, memory: f64) {
        let keep = (-1.0 / memory).exp();
        self.weight = keep * self.weight + weight;
        self.won = keep * self.won + f64::from(u8::from(won));
    }
}

/// Averages by position with a Beta prior, times how a request does against them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Learned {
    positions: Vec<Sums>,
    requests: HashMap<u64, Sums>,
}

impl Learned {
    fn rate(&self, position: usize) -> f64 {
        let sums = self.positions.get(position).copied().unwrap_or_default();
        (sums.won + PRIOR_STRENGTH * PRIOR_MEAN) / (sums.weight + PRIOR_STRENGTH)
    }

    /// Average acceptance of positions 1 to gamma over all requests.
    pub(crate) fn rates(&self, gamma: usize) -> impl Iterator<Item = f64> + '_ {
        (0..gamma).map(|k| self.rate(k))
    }

    /// c of a request's next draft.
    pub(crate) fn fill(&self, request: u64, c: &mut [f64]) {
        let own = self.requests.get(&request).copied().unwrap_or_default();
        let factor = (own.won + REQUEST_STRENGTH) / (own.weight + REQUEST_STRENGTH);
        for (k, c) in c.iter_mut().enumerate() {
            *c = (self.rate(k) * factor).clamp(0.0, 1.0);
        }
    }

    /// Learn a round: each verified position up to the first rejection.
    pub(crate) fn observe(&mut self, request: u64, verified: usize, accepted: usize) {
        for k in 0..verified.min(accepted + 1) {
            let expected = self.rate(k);
            self.requests
                .entry(request)
                .or_default()
                .add(expected, k < accepted, REQUEST_MEMORY);
            if self.positions.len() <= k {
                self.positions.resize(k + 1, Sums::default());
            }
            if let Some(sums) = self.positions.get_mut(k) {
                sums.add(1.0, k < accepted, MEMORY);
            }
        }
    }

    pub(crate) fn release(&mut self, request: u64) {
        self.requests.remove(&request);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_follow_outcomes_and_requests_differ() {
        let mut learned = Learned::default();
        let mut c = [0.0; 2];
        learned.fill(1, &mut c);
        assert_eq!(c, [PRIOR_MEAN; 2]);
        for _ in 0..200 {
            learned.observe(1, 2, 2);
            learned.observe(2, 2, 0);
        }
        let rates: Vec<f64> = learned.rates(2).collect();
        assert!((rates[0] - 0.5).abs() < 0.05, "{rates:?}");
        assert!(
            rates[1] > 0.95,
            "position 2 was reached by request 1 alone: {rates:?}"
        );
        let mut other = [0.0; 2];
        learned.fill(1, &mut c);
        learned.fill(2, &mut other);
        assert!(c[0] > 0.55 && other[0] < 0.3, "{c:?} {other:?}");
        learned.release(2);
        learned.fill(2, &mut other);
        assert!((other[0] - rates[0]).abs() < 1e-12);
    }
}
