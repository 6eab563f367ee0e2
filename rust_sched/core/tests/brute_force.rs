//! Every scheduler against itself written plainly, and the optimum against all lengths.

// Small counts and lengths, and a test that panics fails.
#![allow(clippy::indexing_slicing, clippy::unwrap_used)]

mod common;

use common::*;
use dspark_sched_core::{
    Causal, CostTable, CurveMode, Global, StopReason, plan_fixed, plan_off, plan_threshold,
};
use proptest::prelude::*;

/// Theta of the best of all verify lengths that hold no draft of survival 0, whatever their order.
fn best_of_all(instance: &Instance, cost: &CostTable) -> f64 {
    let most = first(instance, usize::MAX);
    let mut lens = vec![0; instance.rows()];
    let mut best = theta_of(instance, cost, &lens);
    loop {
        let Some(r) = (0..lens.len()).find(|&r| lens[r] < most[r]) else {
            return best;
        };
        lens[..r].fill(0);
        lens[r] += 1;
        best = best.max(theta_of(instance, cost, &lens));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn causal_is_algorithm_1(instance in instances(4, 5), cost in tables()) {
        let mut lens = vec![9; instance.rows()];
        let outcome = instance.with(|b| Causal::default().plan(b, &cost, &mut lens)).unwrap();
        prop_assert_eq!(&lens, &plain_causal(&instance, &cost));
        prop_assert!((outcome.throughput - theta_of(&instance, &cost, &lens)).abs() <= 1e-12 * outcome.throughput);
        let all = lens.iter().sum::<i64>() as usize == order(&instance).len();
        if !cost.flat() {
            prop_assert_eq!(outcome.stop, if all { StopReason::AllAdmitted } else { StopReason::NoImprovement });
        }
    }

    #[test]
    fn causal_is_algorithm_1_when_large(instance in instances(24, 8), cost in tables()) {
        let mut lens = vec![9; instance.rows()];
        instance.with(|b| Causal::default().plan(b, &cost, &mut lens)).unwrap();
        prop_assert_eq!(&lens, &plain_causal(&instance, &cost));
    }

    #[test]
    fn global_is_the_optimum(instance in instances(4, 5), cost in tables()) {
        let mut lens = vec![9; instance.rows()];
        let outcome = instance.with(|b| Global::default().plan(b, &cost, &mut lens)).unwrap();
        let best = best_of_all(&instance, &cost);
        prop_assert!((outcome.throughput - best).abs() <= 1e-12 * best);
        prop_assert_eq!(&lens, &first(&instance, plain_best(&instance, &cost)));
    }

    #[test]
    fn lookahead_is_the_plain_walk(
        seen in prop::collection::vec(instances(4, 5), 0..4),
        instance in instances(4, 5),
        cost in tables(),
        prior in 0.0..=1.0_f64,
    ) {
        let mut scheduler = seasoned_lookahead(&seen, prior);
        let rates = plain_averages(&seen, instance.gamma, prior);
        for (x, y) in scheduler.averages.rates(instance.gamma, 0).iter().zip(&rates) {
            prop_assert!((x - y).abs() < 1e-12);
        }
        let rates = scheduler.averages.rates(instance.gamma, 0);
        let mut lens = vec![9; instance.rows()];
        let outcome = instance.with(|b| scheduler.plan(b, &cost, &mut lens)).unwrap();
        let walk = plain_lookahead(&instance, &cost, &rates);
        prop_assert_eq!(Some(&lens), walk.last());
        prop_assert!((outcome.throughput - theta_of(&instance, &cost, &lens)).abs() <= 1e-12 * outcome.throughput);
        let mut again = seen.clone();
        again.push(instance.clone());
        let after = scheduler.averages.rates(instance.gamma, 0);
        for (x, y) in after.iter().zip(plain_averages(&again, instance.gamma, prior)) {
            prop_assert!((x - y).abs() < 1e-12);
        }
    }

    #[test]
    fn lagged_takes_its_number_from_two_rounds_ago(
        seen in prop::collection::vec(instances(4, 5), 2..5),
        instance in instances(4, 5),
        cost in tables(),
    ) {
        let mut past = instance.clone();
        let rates = plain_averages(&seen, instance.gamma, 0.7);
        for r in 0..instance.rows() {
            // The rounds in which slot r drafted, of which the last but one counts.
            let own: Vec<_> = seen.iter().filter(|i| r < i.rows()).collect();
            let old = own.len().checked_sub(2).map(|i| own[i]).filter(|i| i.gamma == instance.gamma);
            for (j, &rate) in rates.iter().enumerate() {
                let known = old.filter(|i| j < i.max_lens[r] as usize);
                past.c[r * instance.gamma + j] = known.map_or(rate, |i| i.c[r * instance.gamma + j]);
            }
        }
        let budget = plain_best(&past, &cost);
        let mut scheduler = seasoned_lagged(&seen, 0.7);
        let slots: Vec<i64> = (0..instance.rows() as i64).collect();
        let mut lens = vec![9; instance.rows()];
        instance.with(|b| scheduler.plan(b, &slots, &vec![1; slots.len()], &cost, &mut lens)).unwrap();
        prop_assert_eq!(lens, first(&instance, budget));
    }

    #[test]
    fn baselines(instance in instances(4, 5), length in 0_i64..7, threshold in 0.0..=1.0_f64) {
        let mut lens = vec![9; instance.rows()];
        let outcome = instance.with(|b| plan_fixed(b, Some(length), None, &mut lens)).unwrap();
        prop_assert!(outcome.throughput.is_nan());
        for (l, max) in lens.iter().zip(&instance.max_lens) {
            prop_assert_eq!(*l, length.min(*max));
        }
        instance.with(|b| plan_threshold(b, &instance.c, threshold, None, &mut lens)).unwrap();
        for (r, &l) in lens.iter().enumerate() {
            let row = &instance.c[r * instance.gamma..][..instance.gamma];
            prop_assert!(row[..l as usize].iter().all(|c| *c >= threshold));
            prop_assert!(l == instance.max_lens[r] || row[l as usize] < threshold);
        }
        let outcome = instance.with(|b| plan_off(b, None, &mut lens)).unwrap();
        prop_assert!(lens.iter().all(|l| *l == 0));
        prop_assert_eq!(outcome.expected, instance.rows() as f64);
    }
}

#[test]
fn ties_go_by_position_then_row() {
    // Two rows of equal survivals: with room for three, both first positions come before any second one.
    let instance = Instance {
        c: vec![0.5, 1.0, 0.5, 1.0],
        max_lens: vec![2, 2],
        gamma: 2,
        base: 2,
    };
    let cost = CostTable::new(&[(5, 1.0), (6, 100.0)], CurveMode::Staircase).unwrap();
    let mut lens = [0; 2];
    instance
        .with(|b| Causal::default().plan(b, &cost, &mut lens))
        .unwrap();
    assert_eq!(lens, [2, 1]);
    let two = CostTable::new(&[(4, 1.0), (5, 100.0)], CurveMode::Staircase).unwrap();
    instance
        .with(|b| Causal::default().plan(b, &two, &mut lens))
        .unwrap();
    assert_eq!(lens, [1, 1]);
}

#[test]
fn an_empty_batch_is_planned() {
    let instance = Instance {
        c: vec![],
        max_lens: vec![],
        gamma: 3,
        base: 5,
    };
    let cost = CostTable::new(&[(1, 1.0)], CurveMode::Staircase).unwrap();
    let outcome = instance
        .with(|b| Causal::default().plan(b, &cost, &mut []))
        .unwrap();
    assert_eq!((outcome.expected, outcome.throughput), (0.0, 0.0));
    let none = Instance {
        c: vec![],
        max_lens: vec![0, 0],
        gamma: 0,
        base: 2,
    };
    let outcome = none
        .with(|b| Global::default().plan(b, &cost, &mut [7, 7]))
        .unwrap();
    assert_eq!(outcome.expected, 2.0);
}
