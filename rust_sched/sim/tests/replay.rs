//! Runs of small traces: what must hold of every run, and figures that can be worked out by hand.

// Small counts and lengths, and a test that panics fails.
#![allow(clippy::indexing_slicing, clippy::unwrap_used)]

use dspark_sched_core::{CostTable, CurveMode, DraftPoint};
use dspark_sched_sim::{
    Arrivals, Confidence, Gamma, Load, Machine, Report, Roofline, Scheduler, Settings, Trace, TraceArrays,
    simulate,
};
use proptest::prelude::*;

/// A trace with a draft at every place, as an engine records it that verifies nothing.
#[derive(Debug, Clone)]
struct Made {
    outputs: Vec<i64>,
    gamma: usize,
    accepted: Vec<i64>,
    probs: Vec<f64>,
    taps: bool,
}

impl Made {
    fn trace(&self) -> Trace {
        let mut offsets = vec![0];
        let mut at = Vec::new();
        for &output in &self.outputs {
            at.extend(0..output);
            offsets.push(at.len() as i64);
        }
        let drafted = vec![self.gamma as i64; at.len()];
        Trace::new(&TraceArrays {
            prompt: &vec![6; self.outputs.len()],
            output: &self.outputs,
            most: &self.outputs,
            offsets: &offsets,
            at: &at,
            drafted: &drafted,
            accepted: &self.accepted,
            probs: &self.probs,
            gamma: self.gamma,
            taps: self.taps,
        })
        .unwrap()
    }

    /// Every draft of every request accepts so many, with one confidence.
    fn even(requests: usize, output: i64, gamma: usize, accepted: i64, c: f64) -> Self {
        let places = requests * output as usize;
        Self {
            outputs: vec![output; requests],
            gamma,
            accepted: vec![accepted; places],
            probs: vec![c; places * gamma],
            taps: false,
        }
    }
}

fn settings(scheduler: Scheduler, gamma: usize, arrivals: Arrivals, requests: usize) -> Settings {
    Settings {
        scheduler,
        gamma: Gamma::Fixed(gamma),
        confidence: Confidence::Recorded,
        arrivals,
        requests,
        shuffle: false,
        replicas: 1,
        max_slots: 64,
        step_tokens: 512,
        kv_tokens: None,
        extra_prompt: 0,
        seed: 1,
    }
}

fn flat() -> CostTable {
    CostTable::new(&[(1, 1.0), (1000, 1.0)], CurveMode::Interpolated).unwrap()
}

fn rising() -> CostTable {
    CostTable::new(&[(1, 1.0), (2, 1.1), (201, 21.0)], CurveMode::Interpolated).unwrap()
}

fn run(made: &Made, cost: &CostTable, settings: &Settings) -> Report {
    simulate(&made.trace(), cost, &Machine::Table, settings).unwrap()
}

#[test]
fn plain_decoding_takes_a_step_a_token() {
    let made = Made::even(4, 10, 3, 3, 0.9);
    let report = run(
        &made,
        &flat(),
        &settings(Scheduler::Off, 0, Arrivals::Closed(2), 4),
    );
    assert_eq!((report.steps, report.tokens, report.rounds), (20, 40, 40));
    assert_eq!(report.seconds, 20.0);
    assert_eq!(report.executed, 4 * (6 + 9));
    assert_eq!(report.prompt_tokens, 24);
    assert_eq!(report.throughput(), 2.0);
    assert_eq!(report.records[3].arrival, 10.0);
    assert_eq!(report.records[3].first, 11.0);
}

#[test]
fn accepted_drafts_save_steps_and_what_they_cost_is_charged() {
    let made = Made::even(1, 12, 3, 2, 0.9);
    let cost = rising()
        .with_draft(&[DraftPoint {
            requests: 1,
            gamma: 3,
            seconds: 0.25,
        }])
        .unwrap()
        .with_glue(0.125)
        .unwrap();
    let report = run(
        &made,
        &cost,
        &settings(Scheduler::Fixed(None), 3, Arrivals::Closed(1), 1),
    );
    // Rounds of 3 tokens; the last has room for 2 drafts, of which 2 are accepted.
    assert_eq!((report.rounds, report.accepted, report.drafted), (4, 8, 12));
    assert_eq!(report.verified, 3 * 3 + 2);
    let forwards = [6 + 3, 4, 4, 3].map(|n| cost.verify_seconds(n, 0));
    assert!((report.seconds - (forwards.iter().sum::<f64>() + 4.0 * 0.375)).abs() < 1e-9);
    assert!((report.draft_seconds - 1.0).abs() < 1e-12);
    assert_eq!(report.accepted_length(), 3.0);
}

#[test]
fn a_drafter_that_reads_features_waits_for_the_prompt() {
    let mut made = Made::even(1, 9, 3, 3, 0.9);
    made.taps = true;
    let report = run(
        &made,
        &flat(),
        &settings(Scheduler::Fixed(None), 3, Arrivals::Closed(1), 1),
    );
    assert_eq!(
        (report.rounds, report.drafting_steps, report.gammas[0]),
        (3, 2, 1)
    );
}

#[test]
fn long_prompts_are_read_in_parts_and_slots_and_cache_hold_requests_back() {
    let made = Made::even(3, 4, 2, 0, 0.5);
    let mut chosen = settings(Scheduler::Off, 0, Arrivals::Closed(3), 3);
    chosen.extra_prompt = 10;
    chosen.step_tokens = 8;
    chosen.max_slots = 2;
    let report = run(&made, &flat(), &chosen);
    assert_eq!(report.peak_live, 2);
    assert_eq!(report.prompt_tokens, 48);
    // The first prompt of 16 takes the budget of two steps, then the second one.
    assert_eq!([report.records[0].first, report.records[1].first], [2.0, 4.0]);
    chosen.kv_tokens = Some(25);
    let report = run(&made, &flat(), &chosen);
    assert_eq!((report.peak_live, report.peak_reserved), (1, 20));
    chosen.kv_tokens = Some(19);
    let refused = simulate(&made.trace(), &flat(), &Machine::Table, &chosen).unwrap_err();
    assert!(
        refused.to_string().contains("needs 20 tokens of cache"),
        "{refused}"
    );
}

#[test]
fn under_constant_confidences_the_lag_costs_nothing_but_its_beginning() {
    let made = Made::even(2, 200, 4, 3, 0.8);
    let throughput =
        |scheduler| run(&made, &rising(), &settings(scheduler, 4, Arrivals::Closed(2), 2)).seconds;
    let (lagged, global) = (throughput(Scheduler::Lagged), throughput(Scheduler::Global));
    assert!((lagged / global - 1.0).abs() < 0.02, "{lagged} {global}");
}

#[test]
fn replicas_share_the_load() {
    let made = Made::even(4, 20, 2, 1, 0.7);
    let one = run(
        &made,
        &rising(),
        &settings(Scheduler::Causal, 2, Arrivals::Closed(4), 12),
    );
    let mut chosen = settings(Scheduler::Causal, 2, Arrivals::Closed(12), 36);
    chosen.replicas = 3;
    let three = run(&made, &rising(), &chosen);
    assert!((three.throughput() / one.throughput() - 3.0).abs() < 1e-9);
    for replica in 0..3 {
        assert_eq!(three.records.iter().filter(|r| r.replica == replica).count(), 12);
    }
}

#[test]
fn poisson_arrivals_come_at_their_rate_and_queue_when_it_is_too_high() {
    let made = Made::even(5, 10, 2, 1, 0.7);
    let open = |rate, seed| {
        let mut chosen = settings(Scheduler::Off, 0, Arrivals::Poisson(rate), 2000);
        chosen.seed = seed;
        chosen.max_slots = 1;
        run(&made, &flat(), &chosen)
    };
    let slow = open(0.02, 1);
    let last = slow.records.last().unwrap().arrival;
    assert!((last * 0.02 / 2000.0 - 1.0).abs() < 0.1, "{last}");
    assert_eq!(slow, open(0.02, 1));
    assert_ne!(slow.records, open(0.02, 2).records);
    let waits = |report: &Report| report.records.iter().map(|r| r.first - r.arrival).sum::<f64>() / 2000.0;
    assert!(waits(&slow) < 3.0);
    let overloaded = open(0.2, 1);
    assert!(waits(&overloaded) > 100.0);
    assert!(
        (overloaded.seconds / 20_000.0 - 1.0).abs() < 0.01,
        "a step a token, one at a time"
    );
}

#[test]
fn adaptive_gamma_drafts_where_it_pays_and_stays_near_plain_where_it_does_not() {
    let adaptive = Gamma::Adaptive {
        most: 4,
        threshold: 0.04,
    };
    let at = |accepted, gamma| {
        let made = Made::even(2, 400, 4, accepted, 0.5);
        let mut chosen = settings(Scheduler::Causal, 0, Arrivals::Closed(2), 4);
        (chosen.gamma, chosen.confidence) = (gamma, Confidence::Learned);
        run(&made, &rising(), &chosen).throughput()
    };
    assert!(at(4, adaptive) > 1.4 * at(4, Gamma::Fixed(0)));
    assert!(at(0, adaptive) > 0.97 * at(0, Gamma::Fixed(0)));
}

#[test]
fn a_roofline_charges_every_cached_token_and_the_table_only_the_longest() {
    let machine = Roofline {
        parameters: 1e6,
        draft_parameters: 0.0,
        parameter_bytes: 2.0,
        cache_bytes: 1e3,
        pair_flops: 0.0,
        bandwidth: 1e6,
        flops: 1e12,
        glue: 0.0,
    };
    let table = machine.table(&[64, 2048], 256, 8, 2).unwrap();
    let made = Made::even(8, 16, 2, 1, 0.6);
    let mut chosen = settings(Scheduler::Causal, 2, Arrivals::Closed(8), 8);
    let seconds =
        |chosen: &Settings, machine| simulate(&made.trace(), &table, &machine, chosen).unwrap().seconds;
    let short = seconds(&chosen, Machine::Roofline(machine));
    chosen.extra_prompt = 2000;
    let long = seconds(&chosen, Machine::Roofline(machine));
    // 8 requests of 2,000 more tokens: 16 more seconds of reading the cache a step, over 2 of reading the weights.
    assert!(long > 6.0 * short, "{short} {long}");
    // A plain step of all 8: the table was measured with one sequence in four tokens.
    let plain = Load {
        tokens: 8,
        cached: 8 * 2020,
        ..Load::default()
    };
    assert!(machine.verify_seconds(&plain) > 2.0 * table.verify_seconds(8, 2020));
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let made = Made::even(1, 4, 2, 1, 0.5);
    let refused = |change: fn(&mut Settings)| {
        let mut chosen = settings(Scheduler::Causal, 2, Arrivals::Closed(1), 1);
        change(&mut chosen);
        simulate(&made.trace(), &flat(), &Machine::Table, &chosen)
            .unwrap_err()
            .to_string()
    };
    assert!(refused(|s| s.gamma = Gamma::Fixed(3)).contains("recorded with 2"));
    assert!(refused(|s| s.arrivals = Arrivals::Closed(0)).contains("concurrency"));
    assert!(refused(|s| s.arrivals = Arrivals::Poisson(f64::NAN)).contains("rate"));
    assert!(refused(|s| s.replicas = 0).contains("replicas"));
    assert!(refused(|s| s.step_tokens = 0).contains("step_tokens"));
    assert!(refused(|s| s.scheduler = Scheduler::Threshold(2.0)).contains("threshold"));
}

fn made() -> impl Strategy<Value = Made> {
    (1..5_usize, 1..5_usize, any::<bool>()).prop_flat_map(|(requests, gamma, taps)| {
        prop::collection::vec(1..20_i64, requests).prop_flat_map(move |outputs| {
            let places: i64 = outputs.iter().sum();
            let places = places as usize;
            (
                prop::collection::vec(0..=gamma as i64, places),
                prop::collection::vec(prop_oneof![0.0..1.0_f64, Just(0.0), Just(1.0)], places * gamma),
            )
                .prop_map(move |(accepted, probs)| Made {
                    outputs: outputs.clone(),
                    gamma,
                    accepted,
                    probs,
                    taps,
                })
        })
    })
}

fn schedulers() -> impl Strategy<Value = Scheduler> {
    prop_oneof![
        Just(Scheduler::Off),
        Just(Scheduler::Fixed(None)),
        Just(Scheduler::Fixed(Some(1))),
        Just(Scheduler::Threshold(0.4)),
        Just(Scheduler::Causal),
        Just(Scheduler::Lookahead),
        Just(Scheduler::Lagged),
        Just(Scheduler::Global),
        Just(Scheduler::Clairvoyant),
    ]
}

fn confidences() -> impl Strategy<Value = Confidence> {
    prop_oneof![
        Just(Confidence::Recorded),
        Just(Confidence::Learned),
        Just(Confidence::Oracle)
    ]
}

fn any_settings(gamma: usize) -> impl Strategy<Value = Settings> {
    let arrivals = prop_oneof![
        (1..9_usize).prop_map(Arrivals::Closed),
        (0.01..2.0_f64).prop_map(Arrivals::Poisson)
    ];
    let gammas = prop_oneof![
        (0..=gamma).prop_map(Gamma::Fixed),
        Just(Gamma::Adaptive {
            most: gamma,
            threshold: 0.04
        })
    ];
    (
        (
            schedulers(),
            gammas,
            confidences(),
            arrivals,
            1..20_usize,
            any::<bool>(),
        ),
        (
            1..4_usize,
            1..5_usize,
            1..20_u64,
            prop::option::of(60..200_u64),
            0..30_u64,
            any::<u64>(),
        ),
    )
        .prop_map(|(a, b)| Settings {
            scheduler: a.0,
            gamma: a.1,
            confidence: a.2,
            arrivals: a.3,
            requests: a.4,
            shuffle: a.5,
            replicas: b.0,
            max_slots: b.1,
            step_tokens: b.2,
            kv_tokens: b.3,
            extra_prompt: b.4,
            seed: b.5,
        })
}

fn cases() -> impl Strategy<Value = (Made, Settings)> {
    made().prop_flat_map(|made| {
        let gamma = made.gamma;
        (Just(made), any_settings(gamma))
    })
}

proptest! {
    #[test]
    fn every_run_gives_every_request_its_tokens_within_its_limits((made, chosen) in cases()) {
        let report = run(&made, &rising(), &chosen);
        prop_assert_eq!(report.records.len(), chosen.requests);
        for record in &report.records {
            prop_assert_eq!(record.tokens as i64, made.outputs[record.request]);
            prop_assert!(record.arrival < record.first && record.first <= record.finish);
            prop_assert!(record.rounds <= record.tokens);
            prop_assert!(record.finish <= report.seconds);
        }
        prop_assert_eq!(report.tokens, report.records.iter().map(|r| r.tokens).sum::<u64>());
        prop_assert_eq!(report.rounds, report.records.iter().map(|r| r.rounds).sum::<u64>());
        prop_assert!(report.accepted <= report.verified && report.verified <= report.drafted);
        prop_assert!(report.peak_live <= chosen.max_slots);
        prop_assert!(report.peak_reserved <= chosen.kv_tokens.unwrap_or(u64::MAX));
        prop_assert!(report.window_seconds <= report.seconds && report.window_tokens <= report.tokens);
        if matches!(chosen.arrivals, Arrivals::Closed(users) if users <= chosen.requests && chosen.requests < 2 * users) {
            prop_assert_eq!((report.window_seconds, report.window_tokens), (report.seconds, report.tokens));
        }
        prop_assert!(report.busy_seconds <= report.seconds * chosen.replicas as f64 * (1.0 + 1e-12));
        prop_assert_eq!(report.gammas.iter().sum::<u64>(), report.steps);
        let prompts = (6 + chosen.extra_prompt) * chosen.requests as u64;
        let anchors = report.rounds - chosen.requests as u64;
        prop_assert!(report.executed >= prompts + anchors + report.verified);
        prop_assert_eq!(report.clone(), run(&made, &rising(), &chosen), "a run is a function of its arguments");
    }

    #[test]
    fn verifying_what_will_be_accepted_gives_the_rounds_of_full_length_for_no_more_time((made, chosen) in cases()) {
        let with = |scheduler| {
            let mut chosen = chosen.clone();
            (chosen.scheduler, chosen.arrivals, chosen.gamma) = (scheduler, Arrivals::Closed(1), Gamma::Fixed(made.gamma));
            run(&made, &rising(), &chosen)
        };
        let (full, bound) = (with(Scheduler::Fixed(None)), with(Scheduler::Clairvoyant));
        prop_assert_eq!(bound.rounds, full.rounds);
        prop_assert_eq!(bound.accepted, full.accepted);
        prop_assert_eq!(bound.verified, bound.accepted);
        prop_assert!(bound.seconds <= full.seconds * (1.0 + 1e-12));
        // With certainties for confidences, thresholds see what will be accepted too.
        let mut sure = chosen.clone();
        (sure.scheduler, sure.arrivals) = (Scheduler::Threshold(0.5), Arrivals::Closed(1));
        (sure.confidence, sure.gamma) = (Confidence::Oracle, Gamma::Fixed(made.gamma));
        prop_assert_eq!(run(&made, &rising(), &sure).seconds, bound.seconds);
    }
}
