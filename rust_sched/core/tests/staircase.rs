//! Jagged cost curves (case 22): which share of the retrospective optimum of Theta each scheduler attains. Run with
//! `--no-capture` to see the tables.

// Small counts and lengths, and a test that panics fails.
#![allow(clippy::indexing_slicing, clippy::unwrap_used)]

use dspark_sched_core::{
    Averages, Batch, Causal, CostTable, CurveMode, Global, Lagged, Lookahead, plan_fixed, plan_off,
    plan_threshold, survival_into,
};

/// A small generator (splitmix64), so that the figures are the same everywhere.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) as f64 / 2f64.powi(64)
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.next()
    }
}

#[derive(Clone, Copy)]
enum Difficulty {
    Easy,
    /// Requests of their own mean confidence, 0.4 to 0.97.
    Mixed,
    /// Every token is either nearly certain or nearly hopeless.
    Bimodal,
}

const NAMES: [&str; 7] = [
    "causal",
    "lookahead",
    "lagged",
    "global",
    "fixed",
    "threshold",
    "off",
];

/// Mean and least share of the optimum, per scheduler of `NAMES`.
fn shares(
    cost: &CostTable,
    rows: usize,
    gamma: usize,
    difficulty: Difficulty,
    wrong: bool,
) -> Vec<(f64, f64)> {
    let mut rng = Rng(rows as u64 * 1000 + gamma as u64);
    let mean: Vec<f64> = (0..rows)
        .map(|_| match difficulty {
            Difficulty::Easy => 0.92,
            _ => rng.between(0.4, 0.97),
        })
        .collect();
    let (mut lookahead, mut lagged) = (Lookahead::default(), Lagged::default());
    if wrong {
        let seed = |averages: &mut Averages| averages.seed(&vec![0.2; gamma], 0, 1e12).unwrap();
        seed(&mut lookahead.averages);
        seed(&mut lagged.averages);
    }
    let slots: Vec<i64> = (0..rows as i64).collect();
    let generations = vec![1; rows];
    let max_lens = vec![gamma as i64; rows];
    let (mut sums, mut least) = ([0.0; 7], [f64::INFINITY; 7]);
    let (rounds, warm) = (240, 40);
    for round in 0..rounds {
        let c: Vec<f64> = (0..rows * gamma)
            .map(|at| match difficulty {
                Difficulty::Bimodal => {
                    if rng.next() < 0.7 {
                        0.97
                    } else {
                        0.15
                    }
                }
                _ => (mean[at / gamma] + rng.between(-0.25, 0.25)).clamp(0.01, 0.995),
            })
            .collect();
        let mut a = vec![0.0; c.len()];
        survival_into(&c, &max_lens, gamma, &mut a).unwrap();
        let batch = Batch::new(&a, &max_lens, gamma, rows as u64, 0).unwrap();
        let mut lens = vec![0; rows];
        let best = Global::default()
            .plan(&batch, cost, &mut lens)
            .unwrap()
            .throughput;
        let got = [
            Causal::default().plan(&batch, cost, &mut lens).unwrap(),
            lookahead.plan(&batch, cost, &mut lens).unwrap(),
            lagged
                .plan(&batch, &slots, &generations, cost, &mut lens)
                .unwrap(),
            Global::default().plan(&batch, cost, &mut lens).unwrap(),
            plan_fixed(&batch, None, Some(cost), &mut lens).unwrap(),
            plan_threshold(&batch, &c, 0.5, Some(cost), &mut lens).unwrap(),
            plan_off(&batch, Some(cost), &mut lens).unwrap(),
        ];
        if round >= warm {
            for (i, outcome) in got.iter().enumerate() {
                let share = outcome.throughput / best;
                sums[i] += share / f64::from(rounds - warm);
                least[i] = least[i].min(share);
            }
        }
    }
    sums.into_iter().zip(least).collect()
}

fn report(title: &str, rows: usize, shares: &[(f64, f64)]) {
    let cells: Vec<_> = NAMES
        .iter()
        .zip(shares)
        .map(|(name, (mean, least))| format!("{name} {:.1} (least {:.1})", mean * 100.0, least * 100.0))
        .collect();
    println!("{title}, R = {rows}: {}", cells.join(", "));
}

/// Means over the mixes and batches of one curve, and the least share of any round.
#[derive(Default)]
struct Summary {
    mean: [f64; 3],
    least: [f64; 3],
    count: f64,
}

impl Summary {
    fn add(&mut self, shares: &[(f64, f64)]) {
        for (i, (mean, least)) in shares.iter().take(3).enumerate() {
            self.mean[i] += mean;
            self.least[i] = if self.count == 0.0 {
                *least
            } else {
                self.least[i].min(*least)
            };
        }
        self.count += 1.0;
    }

    fn report(&self, curve: &str, averages: &str) {
        let cells: Vec<_> = (0..3)
            .map(|i| {
                format!(
                    "{:.1} | {:.1}",
                    100.0 * self.mean[i] / self.count,
                    100.0 * self.least[i]
                )
            })
            .collect();
        println!("| {curve} | {averages} | {} |", cells.join(" | "));
    }
}

/// Cost 20 + 0.6 x bucket for the bucket that holds B tokens.
fn staircase(buckets: &[u64]) -> CostTable {
    let points: Vec<_> = buckets.iter().map(|&b| (b, 20.0 + 0.6 * b as f64)).collect();
    CostTable::new(&points, CurveMode::Staircase).unwrap()
}

fn doubling() -> CostTable {
    staircase(&[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
}

#[test]
fn lookahead_is_not_stuck_on_a_doubling_staircase() {
    let cost = doubling();
    // METHOD.md, section 4: early stopping is stuck at the foot of a step, near the optimum at some concurrency only.
    for (rows, causal) in [(1, 0.97), (4, 0.77), (8, 0.58), (32, 0.83), (64, 0.91)] {
        let shares = shares(&cost, rows, 7, Difficulty::Mixed, false);
        report("doubling staircase, mixed", rows, &shares);
        assert!(
            (shares[0].0 - causal).abs() < 0.1,
            "causal at R = {rows}: {}",
            shares[0].0
        );
        assert!(shares[1].0 >= 0.99, "lookahead at R = {rows}: {}", shares[1].0);
        assert!(shares[1].0 >= shares[0].0);
    }
}

#[test]
fn steps_at_6_12_24_to_384() {
    let cost = staircase(&[6, 12, 24, 48, 96, 192, 384]);
    for rows in [1, 2, 3, 4] {
        let shares = shares(&cost, rows, 5, Difficulty::Mixed, false);
        report("steps at 6, 12, 24 .. 384, mixed", rows, &shares);
        assert!(shares[1].0 >= 0.97, "lookahead at R = {rows}: {}", shares[1].0);
        assert_eq!(shares[3].1, 1.0);
    }
}

#[test]
fn other_curves_and_wrong_averages() {
    let ramp: Vec<_> = [(1, 25.0), (16, 26.0), (64, 60.0), (256, 190.0)].to_vec();
    // SmolLM2-135M in bfloat16 on two cores of a Xeon with matrix tiles, as `dspark profile` measured it, in ms.
    let measured = [
        (1, 34.7),
        (2, 49.4),
        (4, 42.7),
        (8, 48.9),
        (10, 48.9),
        (11, 53.7),
        (12, 53.7),
        (16, 58.4),
        (18, 68.2),
        (20, 70.5),
        (24, 73.4),
        (28, 76.3),
        (32, 87.8),
        (64, 97.1),
        (72, 105.1),
        (80, 112.8),
        (88, 114.3),
        (92, 126.4),
        (96, 145.6),
        (128, 166.6),
        (192, 239.2),
        (256, 316.3),
    ];
    let curves = [
        (
            "measured",
            CostTable::new(&measured, CurveMode::Interpolated).unwrap(),
        ),
        ("doubling", doubling()),
        (
            "cliffs at 16/32/64",
            CostTable::new(
                &[(16, 20.0), (32, 30.0), (64, 50.0), (512, 400.0)],
                CurveMode::Staircase,
            )
            .unwrap(),
        ),
        (
            "flat, then linear",
            CostTable::new(&ramp, CurveMode::Interpolated).unwrap(),
        ),
    ];
    for (name, cost) in &curves {
        let mut summary = [Summary::default(), Summary::default()];
        for (mix, difficulty) in [
            ("easy", Difficulty::Easy),
            ("mixed", Difficulty::Mixed),
            ("bimodal", Difficulty::Bimodal),
        ] {
            for rows in [1, 4, 8, 32, 64] {
                for wrong in [false, true] {
                    let shares = shares(cost, rows, 7, difficulty, wrong);
                    report(
                        &format!("{name}, {mix}{}", if wrong { ", averages of 0.2" } else { "" }),
                        rows,
                        &shares,
                    );
                    summary[usize::from(wrong)].add(&shares);
                    if wrong {
                        assert!(
                            shares[1].0 >= 0.99 * shares[0].0,
                            "{name} {mix} {rows}: worse than causal"
                        );
                    } else {
                        assert!(shares[1].0 >= 0.95, "{name} {mix} {rows}: {}", shares[1].0);
                    }
                }
            }
        }
        summary[0].report(name, "right");
        summary[1].report(name, "0.2 throughout");
    }
}
