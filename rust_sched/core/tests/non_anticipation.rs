//! What keeps `rejection` exact (METHOD.md, section 4): for any c' that agrees with c on `j <= l_r(c) + 1` for every r,
//! the rest 0, 1 or random, `l(c') = l(c)`. And the schedulers that cheat fail it.

// Small counts and lengths, and a test that panics fails.
#![allow(clippy::indexing_slicing, clippy::unwrap_used)]

mod common;

use common::*;
use dspark_sched_core::{
    Averages, Causal, CostTable, CurveMode, Global, Lookahead, plan_fixed, plan_threshold,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

/// Lengths that `plan` gives c, and whether some c' that it may not tell from c changes them.
fn anticipates(instance: &Instance, noise: &[f64], mut plan: impl FnMut(&Instance) -> Vec<i64>) -> bool {
    let lens = plan(instance);
    assert!(
        lens.iter()
            .zip(&instance.max_lens)
            .all(|(l, max)| (0..=*max).contains(l))
    );
    let others = [
        instance.beyond(&lens, |_| 0.0),
        instance.beyond(&lens, |_| 1.0),
        instance.beyond(&lens, |at| noise[at % noise.len()]),
        instance.beyond(&lens, |at| f64::from(noise[at % noise.len()] > 0.5)),
    ];
    others.iter().any(|other| plan(other) != lens)
}

fn noise() -> impl Strategy<Value = Vec<f64>> {
    prop::collection::vec(0.0..=1.0_f64, 7..31)
}

fn plan_causal(instance: &Instance, cost: &CostTable) -> Vec<i64> {
    let mut lens = vec![9; instance.rows()];
    instance
        .with(|b| Causal::default().plan(b, cost, &mut lens))
        .unwrap();
    lens
}

fn plan_global(instance: &Instance, cost: &CostTable) -> Vec<i64> {
    let mut lens = vec![9; instance.rows()];
    instance
        .with(|b| Global::default().plan(b, cost, &mut lens))
        .unwrap();
    lens
}

fn plan_lookahead(instance: &Instance, cost: &CostTable, mut scheduler: Lookahead) -> Vec<i64> {
    let mut lens = vec![9; instance.rows()];
    instance.with(|b| scheduler.plan(b, cost, &mut lens)).unwrap();
    lens
}

/// The cheat: the walk of `lookahead`, then back to the best point passed.
fn plan_retreating(instance: &Instance, cost: &CostTable, rates: &[f64]) -> Vec<i64> {
    let walk = plain_lookahead(instance, cost, rates);
    let mut best = walk[0].clone();
    for lens in walk {
        if theta_of(instance, cost, &lens) > theta_of(instance, cost, &best) {
            best = lens;
        }
    }
    best
}

/// The cheat: a finished plan is dropped when it gains less than 4 %.
fn plan_vetoed(instance: &Instance, cost: &CostTable, rates: &[f64]) -> Vec<i64> {
    let plan = plain_lookahead(instance, cost, rates).pop().unwrap();
    let nothing = vec![0; plan.len()];
    let gain = theta_of(instance, cost, &plan) / theta_of(instance, cost, &nothing);
    if gain < 1.04 { nothing } else { plan }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8000))]

    #[test]
    fn causal(instance in instances(4, 5), cost in tables(), noise in noise()) {
        prop_assert!(!anticipates(&instance, &noise, |i| plan_causal(i, &cost)));
    }

    #[test]
    fn lookahead(
        seen in prop::collection::vec(instances(4, 5), 0..4),
        instance in instances(4, 5),
        cost in tables(),
        noise in noise(),
        prior in 0.0..=1.0_f64,
    ) {
        let scheduler = seasoned_lookahead(&seen, prior);
        prop_assert!(!anticipates(&instance, &noise, |i| plan_lookahead(i, &cost, scheduler.clone())));
    }

    #[test]
    fn lookahead_by_groups(
        groups in prop::collection::vec(-1_i64..2, 4),
        seen in instances(4, 5),
        instance in instances(4, 5),
        cost in tables(),
        noise in noise(),
    ) {
        let mut scheduler = Lookahead::new(Averages::new(0.7).unwrap());
        seen.with(|b| scheduler.averages.observe(&b.with_groups(&groups[..seen.rows()]).unwrap()));
        let cheats = anticipates(&instance, &noise, |i| {
            let mut lens = vec![9; i.rows()];
            i.with(|b| scheduler.clone().plan(&b.with_groups(&groups[..i.rows()]).unwrap(), &cost, &mut lens)).unwrap();
            lens
        });
        prop_assert!(!cheats);
    }

    #[test]
    fn lagged(
        seen in prop::collection::vec(instances(4, 5), 0..5),
        instance in instances(4, 5),
        cost in tables(),
        noise in noise(),
    ) {
        let scheduler = seasoned_lagged(&seen, 0.7);
        let slots: Vec<i64> = (0..instance.rows() as i64).collect();
        let cheats = anticipates(&instance, &noise, |i| {
            let mut lens = vec![9; i.rows()];
            i.with(|b| scheduler.clone().plan(b, &slots, &vec![1; slots.len()], &cost, &mut lens)).unwrap();
            lens
        });
        prop_assert!(!cheats);
    }

    #[test]
    fn fixed_and_threshold(instance in instances(4, 5), noise in noise(), length in 0_i64..6, threshold in 0.0..=1.0_f64) {
        let cheats = anticipates(&instance, &noise, |i| {
            let mut lens = vec![9; i.rows()];
            i.with(|b| plan_fixed(b, Some(length), None, &mut lens)).unwrap();
            lens
        });
        prop_assert!(!cheats);
        let cheats = anticipates(&instance, &noise, |i| {
            let mut lens = vec![9; i.rows()];
            i.with(|b| plan_threshold(b, &i.c, threshold, None, &mut lens)).unwrap();
            lens
        });
        prop_assert!(!cheats);
    }
}

/// Share of random instances on which the property catches a scheduler.
fn caught(plan: impl Fn(&Instance, &CostTable, &[f64]) -> Vec<i64>) -> usize {
    let mut runner = TestRunner::deterministic();
    let strategy = (
        instances(4, 5),
        tables(),
        noise(),
        prop::collection::vec(0.5..1.0_f64, 5),
    );
    (0..2000)
        .filter(|_| {
            let (instance, cost, noise, rates) = strategy.new_tree(&mut runner).unwrap().current();
            anticipates(&instance, &noise, |i| plan(i, &cost, &rates))
        })
        .count()
}

#[test]
fn the_property_catches_cheats_and_only_them() {
    assert_eq!(caught(|i, cost, _| plan_causal(i, cost)), 0);
    assert_eq!(
        caught(|i, cost, rates| plain_lookahead(i, cost, rates).pop().unwrap()),
        0
    );
    assert!(caught(|i, cost, _| plan_global(i, cost)) > 30);
    assert!(caught(plan_retreating) > 15);
    assert!(caught(plan_vetoed) > 5);
}

fn appendix_a(c2: f64) -> (Instance, CostTable) {
    let cost = CostTable::from_sps(&[(1, 1.0), (2, 0.5), (3, 0.45)], CurveMode::Interpolated).unwrap();
    (
        Instance {
            c: vec![0.8, c2],
            max_lens: vec![2],
            gamma: 2,
            base: 1,
        },
        cost,
    )
}

#[test]
fn appendix_a_separates_them() {
    let average = |rate| {
        let mut scheduler = Lookahead::default();
        scheduler.averages.seed(&[0.8, rate], 0, 1e6).unwrap();
        scheduler
    };
    let plans = |c2| {
        let (instance, cost) = appendix_a(c2);
        [
            plan_causal(&instance, &cost)[0],
            plan_lookahead(&instance, &cost, average(0.5))[0],
            plan_lookahead(&instance, &cost, average(0.9))[0],
            plan_global(&instance, &cost)[0],
            plan_retreating(&instance, &cost, &[0.8, 0.9])[0],
        ]
    };
    // The third crosses after both, and stays: l >= 1 either way. The last two let x_1 decide whether it is verified.
    assert_eq!(plans(0.9), [0, 0, 2, 2, 2]);
    assert_eq!(plans(0.0), [0, 0, 1, 0, 0]);
}

#[test]
fn a_veto_is_caught_on_a_finished_plan() {
    // Theta 1, 1.02, then 1.10 after A or 0.79 after B; the guard keeps 1.10 and drops what ends at 0.79.
    let cost = CostTable::from_sps(&[(1, 1.0), (2, 0.5667), (3, 0.4382)], CurveMode::Interpolated).unwrap();
    let lens = |c2: f64| {
        let instance = Instance {
            c: vec![0.8, c2],
            max_lens: vec![2],
            gamma: 2,
            base: 1,
        };
        plan_vetoed(&instance, &cost, &[0.8, 0.9])
    };
    assert_eq!((lens(0.889), lens(0.0)), (vec![2], vec![0]));
}
