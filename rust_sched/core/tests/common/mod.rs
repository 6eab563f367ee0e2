//! Instances small enough for brute force, and the schedulers written plainly.

// Each test binary uses a part of it.
#![allow(dead_code)]

use dspark_sched_core::{Averages, Batch, CostTable, CurveMode, Lagged, Lookahead};
use proptest::prelude::*;

/// A batch that owns its arrays.
#[derive(Debug, Clone)]
pub(crate) struct Instance {
    pub(crate) c: Vec<f64>,
    pub(crate) max_lens: Vec<i64>,
    pub(crate) gamma: usize,
    pub(crate) base: u64,
}

impl Instance {
    pub(crate) fn rows(&self) -> usize {
        self.max_lens.len()
    }

    pub(crate) fn survival(&self) -> Vec<f64> {
        let mut a = vec![0.0; self.c.len()];
        dspark_sched_core::survival_into(&self.c, &self.max_lens, self.gamma, &mut a).unwrap();
        a
    }

    pub(crate) fn with<T>(&self, plan: impl FnOnce(&Batch<'_>) -> T) -> T {
        let a = self.survival();
        plan(&Batch::new(&a, &self.max_lens, self.gamma, self.base, 0).unwrap())
    }

    /// The same up to `l_r + 1` in every row; `fill` replaces the rest.
    pub(crate) fn beyond(&self, lens: &[i64], mut fill: impl FnMut(usize) -> f64) -> Self {
        let mut other = self.clone();
        for (at, c) in other.c.iter_mut().enumerate() {
            if (at % self.gamma) as i64 > lens[at / self.gamma] {
                *c = fill(at);
            }
        }
        other
    }
}

/// Confidences with ties and certainties, jagged `max_lens`.
pub(crate) fn instances(rows: usize, gamma: usize) -> impl Strategy<Value = Instance> {
    (1..=rows, 1..=gamma).prop_flat_map(|(rows, gamma)| {
        let level =
            prop_oneof![2 => 0.0..1.0_f64, 5 => 0.6..1.0_f64, 1 => Just(0.5), 1 => Just(1.0), 1 => Just(0.0)];
        let max = prop_oneof![4 => Just(gamma as i64), 1 => 0..=(gamma as i64)];
        (
            prop::collection::vec(level, rows * gamma),
            prop::collection::vec(max, rows),
            0_u64..4,
        )
            .prop_map(move |(c, max_lens, extra)| Instance {
                c,
                gamma,
                base: max_lens.len() as u64 + extra,
                max_lens,
            })
    })
}

/// Jagged tables: steps, ramps, and costs that fall where they should not.
pub(crate) fn tables() -> impl Strategy<Value = CostTable> {
    let mode = prop_oneof![Just(CurveMode::Staircase), Just(CurveMode::Interpolated)];
    let point = (
        1_u64..7,
        prop_oneof![1 => Just(0.0), 6 => 0.02..0.9_f64, 1 => -0.4..0.0_f64],
    );
    (
        mode,
        1.0..3.0_f64,
        prop::collection::vec(point, 1..12),
        0.0..0.5_f64,
    )
        .prop_map(|(mode, first, steps, glue)| {
            let (mut tokens, mut seconds) = (0, first);
            let points: Vec<_> = steps
                .iter()
                .map(|&(step, rise)| {
                    tokens += step;
                    seconds *= 1.0 + rise;
                    (tokens, seconds)
                })
                .collect();
            CostTable::new(&points, mode).unwrap().with_glue(glue).unwrap()
        })
}

/// Candidates in Algorithm 1's order, by sorting.
pub(crate) fn order(instance: &Instance) -> Vec<(usize, usize, f64)> {
    let a = instance.survival();
    let mut all: Vec<_> = (0..instance.rows())
        .flat_map(|r| (0..instance.max_lens[r] as usize).map(move |j| (r, j)))
        .map(|(r, j)| (r, j, a[r * instance.gamma + j]))
        .filter(|x| x.2 > 0.0)
        .collect();
    all.sort_by(|x, y| y.2.total_cmp(&x.2).then(x.1.cmp(&y.1)).then(x.0.cmp(&y.0)));
    all
}

/// Theta of a walk that has admitted these candidates.
pub(crate) fn theta(instance: &Instance, cost: &CostTable, tau: f64, admitted: usize) -> f64 {
    let (rows, gamma) = (instance.rows() as u64, instance.gamma as u64);
    cost.throughput(tau, instance.base + admitted as u64, rows, gamma, 0)
}

/// Theta of given lengths.
pub(crate) fn theta_of(instance: &Instance, cost: &CostTable, lens: &[i64]) -> f64 {
    let a = instance.survival();
    let mut tau = instance.rows() as f64;
    for (r, &l) in lens.iter().enumerate() {
        tau += a[r * instance.gamma..][..l as usize].iter().sum::<f64>();
    }
    theta(instance, cost, tau, lens.iter().sum::<i64>() as usize)
}

/// Lengths after the first `count` candidates of the order.
pub(crate) fn first(instance: &Instance, count: usize) -> Vec<i64> {
    let mut lens = vec![0; instance.rows()];
    for (r, _, _) in order(instance).into_iter().take(count) {
        lens[r] += 1;
    }
    lens
}

/// Algorithm 1, as METHOD.md writes it.
pub(crate) fn plain_causal(instance: &Instance, cost: &CostTable) -> Vec<i64> {
    let mut lens = vec![0; instance.rows()];
    let mut tau = instance.rows() as f64;
    let mut best = theta(instance, cost, tau, 0);
    for (count, (r, _, a)) in order(instance).into_iter().enumerate() {
        tau += a;
        let next = theta(instance, cost, tau, count + 1);
        if next <= best {
            break;
        }
        best = next;
        lens[r] += 1;
    }
    lens
}

/// The number of candidates whose admission gives the highest Theta; the smallest of equals.
pub(crate) fn plain_best(instance: &Instance, cost: &CostTable) -> usize {
    let mut tau = instance.rows() as f64;
    let mut best = (0, theta(instance, cost, tau, 0));
    for (count, (_, _, a)) in order(instance).into_iter().enumerate() {
        tau += a;
        let next = theta(instance, cost, tau, count + 1);
        if next > best.1 {
            best = (count + 1, next);
        }
    }
    best.0
}

/// Does the path of known next candidates and averages beyond them reach a Theta above `goal`?
pub(crate) fn plain_crosses(
    instance: &Instance,
    cost: &CostTable,
    lens: &[i64],
    tau: f64,
    goal: f64,
    rates: &[f64],
) -> bool {
    let a = instance.survival();
    let mut path = Vec::new();
    for (r, &l) in lens.iter().enumerate() {
        let mut expected = 0.0;
        for j in l as usize..instance.max_lens[r] as usize {
            expected = if j == l as usize {
                a[r * instance.gamma + j]
            } else {
                expected * rates[j]
            };
            path.push((r, j, expected));
        }
    }
    path.retain(|x| x.2 > 0.0);
    path.sort_by(|x, y| y.2.total_cmp(&x.2).then(x.1.cmp(&y.1)).then(x.0.cmp(&y.0)));
    let done = lens.iter().sum::<i64>() as usize;
    let mut tau = tau;
    path.iter().enumerate().any(|(i, x)| {
        tau += x.2;
        theta(instance, cost, tau, done + i + 1) > goal
    })
}

/// The irrevocable walk; returns lengths after every step, so that a cheat can retreat along it.
pub(crate) fn plain_lookahead(instance: &Instance, cost: &CostTable, rates: &[f64]) -> Vec<Vec<i64>> {
    let mut lens = vec![0; instance.rows()];
    let mut tau = instance.rows() as f64;
    let mut here = theta(instance, cost, tau, 0);
    let mut walk = vec![lens.clone()];
    for (count, (r, _, a)) in order(instance).into_iter().enumerate() {
        let next = theta(instance, cost, tau + a, count + 1);
        if next <= here && !plain_crosses(instance, cost, &lens, tau, here, rates) {
            break;
        }
        (tau, here) = (tau + a, next);
        lens[r] += 1;
        walk.push(lens.clone());
    }
    walk
}

/// Running averages over rounds, written plainly: sum a_j / sum a_{j-1} over the drafts that reach j.
pub(crate) fn plain_averages(rounds: &[Instance], gamma: usize, prior: f64) -> Vec<f64> {
    (0..gamma)
        .map(|j| {
            let (mut survived, mut reached) = (0.0, 0.0);
            for round in rounds.iter().filter(|i| i.gamma == gamma) {
                let a = round.survival();
                for r in (0..round.rows()).filter(|&r| j < round.max_lens[r] as usize) {
                    survived += a[r * gamma + j];
                    reached += if j == 0 { 1.0 } else { a[r * gamma + j - 1] };
                }
            }
            if reached > 0.0 { survived / reached } else { prior }
        })
        .collect()
}

/// A lookahead that has seen these rounds.
pub(crate) fn seasoned_lookahead(rounds: &[Instance], prior: f64) -> Lookahead {
    let mut scheduler = Lookahead::new(Averages::new(prior).unwrap());
    for round in rounds {
        round.with(|batch| scheduler.averages.observe(batch));
    }
    scheduler
}

/// A lagged scheduler that has seen these rounds; row r is slot r.
pub(crate) fn seasoned_lagged(rounds: &[Instance], prior: f64) -> Lagged {
    let mut scheduler = Lagged::new(Averages::new(prior).unwrap());
    for round in rounds {
        let slots: Vec<i64> = (0..round.rows() as i64).collect();
        round.with(|batch| scheduler.observe(batch, &slots, &vec![1; slots.len()]).unwrap());
    }
    scheduler
}
