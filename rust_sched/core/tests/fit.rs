//! The fit of Sequential Temperature Scaling against the same written plainly.

// Small counts and lengths, and a test that panics fails.
#![allow(clippy::indexing_slicing, clippy::unwrap_used)]

use dspark_sched_core::{Outcomes, default_grid, fit_sts, sts_into};
use proptest::prelude::*;

const GRID: [f64; 6] = [0.25, 0.5, 1.0, 1.5, 2.0, 4.0];

#[derive(Debug, Clone)]
struct Rounds {
    logits: Vec<f64>,
    offered: Vec<i64>,
    accepted: Vec<i64>,
    gamma: usize,
}

impl Rounds {
    fn fit(&self, grid: &[f64], bins: usize) -> (Vec<f64>, Vec<f64>) {
        let rounds = Outcomes::new(&self.logits, &self.offered, &self.accepted, self.gamma).unwrap();
        let (mut t, mut ece) = (vec![9.0; self.gamma], vec![9.0; self.gamma]);
        fit_sts(&rounds, grid, bins, &mut t, &mut ece).unwrap();
        (t, ece)
    }

    /// ECE of every position under these temperatures, through the function that applies them.
    fn ece(&self, temperatures: &[f64], bins: usize) -> Vec<f64> {
        let (mut c, mut a) = (vec![0.0; self.logits.len()], vec![0.0; self.logits.len()]);
        sts_into(&self.logits, temperatures, &self.offered, &mut c, &mut a).unwrap();
        (0..self.gamma)
            .map(|k| {
                let (mut gaps, mut seen) = (vec![0.0; bins], 0.0);
                for row in (0..self.offered.len()).filter(|row| self.offered[*row] > k as i64) {
                    let p = a[row * self.gamma + k];
                    gaps[((p * bins as f64) as usize).min(bins - 1)] +=
                        p - if self.accepted[row] > k as i64 { 1.0 } else { 0.0 };
                    seen += 1.0;
                }
                gaps.iter().map(|g: &f64| g.abs()).sum::<f64>() / seen
            })
            .collect()
    }
}

fn rounds() -> impl Strategy<Value = Rounds> {
    (1..=4_usize, 1..=40_usize).prop_flat_map(|(gamma, rows)| {
        let logit = prop_oneof![8 => -6.0..6.0_f64, 1 => Just(f64::INFINITY), 1 => Just(f64::NEG_INFINITY)];
        let counts = prop::collection::vec((0..=gamma as i64, 0..=gamma as i64), rows);
        (prop::collection::vec(logit, rows * gamma), counts).prop_map(move |(logits, counts)| {
            let mut offered: Vec<i64> = counts.iter().map(|(a, b)| *a.max(b)).collect();
            offered[0] = gamma as i64;
            let accepted = counts.iter().map(|(a, b)| *a.min(b)).collect();
            Rounds {
                logits,
                offered,
                accepted,
                gamma,
            }
        })
    })
}

proptest! {
    /// Each temperature is the grid's best for its position, given those before it; the ECE is that of the application.
    #[test]
    fn each_position_takes_the_best_temperature(r in rounds(), bins in 1..30_usize) {
        let (t, ece) = r.fit(&GRID, bins);
        for (x, y) in ece.iter().zip(r.ece(&t, bins)) {
            prop_assert!((x - y).abs() < 1e-12, "{x} {y}");
        }
        for k in 0..r.gamma {
            for other in GRID {
                let mut changed = t.clone();
                changed[k] = other;
                let error = r.ece(&changed, bins)[k];
                prop_assert!(ece[k] <= error + 1e-12, "position {k}: {} at {}, {error} at {other}", ece[k], t[k]);
                let tied = ece[k] == error && other.ln().abs() < t[k].ln().abs() - 1e-12;
                prop_assert!(!tied, "position {k}: {other} does as well as {} and is nearer to 1", t[k]);
            }
        }
    }

    /// Later positions have no say in earlier temperatures, and what was not offered has none at all.
    #[test]
    fn earlier_temperatures_stand(r in rounds(), fill in -3.0..3.0_f64) {
        let (t, _) = r.fit(&GRID, 20);
        let mut other = r.clone();
        for (at, logit) in other.logits.iter_mut().enumerate() {
            if (at % r.gamma) as i64 >= r.offered[at / r.gamma] {
                *logit = fill;
            }
        }
        prop_assert_eq!(&other.fit(&GRID, 20).0, &t);
        for logit in other.logits.iter_mut().skip(r.gamma - 1).step_by(r.gamma) {
            *logit = fill;
        }
        prop_assert_eq!(&other.fit(&GRID, 20).0[..r.gamma - 1], &t[..r.gamma - 1]);
    }
}

#[test]
fn the_grid_spans_two_decades_around_one() {
    let grid = default_grid();
    assert_eq!(grid.len(), 233);
    assert!((grid[0] - 0.1).abs() < 1e-12 && (grid[232] - 10.0).abs() < 1e-12 && grid[116] == 1.0);
    assert!(grid.windows(2).all(|w| w[1] / w[0] < 1.0201 && w[1] > w[0]));
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let new = |logits: &[f64], offered: &[i64], accepted: &[i64]| {
        Outcomes::new(logits, offered, accepted, 2)
            .map(|_| ())
            .unwrap_err()
            .to_string()
    };
    assert_eq!(new(&[0.0; 3], &[2], &[1]), "logits: expected 2 entries, got 3");
    assert_eq!(
        new(&[0.0; 2], &[2], &[1, 1]),
        "accepted: expected 1 entries, got 2"
    );
    assert!(new(&[0.0; 2], &[3], &[1]).starts_with("offered[0]: expected 0 to 2"));
    assert_eq!(
        new(&[0.0; 2], &[1], &[2]),
        "accepted[0]: expected 0 to the 1 that were offered, got 2"
    );
    assert!(new(&[0.0; 2], &[2], &[-1]).contains("got -1"));
    assert!(new(&[0.0, f64::NAN], &[2], &[1]).starts_with("logits[0, 1]"));
    assert!(new(&[0.0; 2], &[1], &[1]).contains("no round was offered position 2"));
    assert!(new(&[], &[], &[]).contains("no round was offered position 1"));
    let rounds = Outcomes::new(&[0.0; 2], &[2], &[1], 2).unwrap();
    let fit = |grid: &[f64], bins, t: &mut [f64]| fit_sts(&rounds, grid, bins, t, &mut [0.0; 2]);
    assert!(fit(&[], 20, &mut [0.0; 2]).is_err());
    assert!(fit(&[1.0], 0, &mut [0.0; 2]).is_err());
    assert!(fit(&[0.0], 20, &mut [0.0; 2]).is_err());
    assert!(fit(&[1.0], 20, &mut [0.0; 3]).is_err());
}
