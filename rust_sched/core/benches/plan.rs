//! Planning times. `cargo bench -p dspark-sched-core`.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use dspark_sched_core::{Batch, Causal, CostTable, CurveMode, Global, Lagged, Lookahead, survival_into};

const SIZES: [(usize, usize); 4] = [(8, 7), (32, 7), (256, 7), (4096, 16)];

/// Survivals of drafts of mixed difficulty, `[rows, gamma]`.
fn survivals(rows: usize, gamma: usize) -> (Vec<f64>, Vec<i64>) {
    let mut state = 7_u64;
    let c: Vec<f64> = (0..rows * gamma)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            0.5 + 0.49 * (state >> 11) as f64 / 2f64.powi(53)
        })
        .collect();
    let lens = vec![gamma as i64; rows];
    let mut a = vec![0.0; c.len()];
    let made = survival_into(&c, &lens, gamma, &mut a);
    assert!(made.is_ok());
    (a, lens)
}

fn table(points: &[(u64, f64)], mode: CurveMode) -> Option<CostTable> {
    CostTable::new(points, mode).ok()
}

fn plans(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan");
    group
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    // Nearly free tokens: everything is admitted. And a doubling staircase, on which lookahead has to look ahead.
    let free = table(&[(1, 1.0), (1_000_000, 1.0001)], CurveMode::Interpolated);
    let steps: Vec<_> = (0..18)
        .map(|i| (1 << i, 20.0 + 0.6 * f64::from(1 << i)))
        .collect();
    let jagged = table(&steps, CurveMode::Staircase);
    for (name, cost) in [("all", free), ("staircase", jagged)] {
        let Some(cost) = cost else { continue };
        for (rows, gamma) in SIZES {
            let (a, max_lens) = survivals(rows, gamma);
            let Ok(batch) = Batch::new(&a, &max_lens, gamma, rows as u64, 0) else {
                continue;
            };
            let slots: Vec<i64> = (0..rows as i64).collect();
            let size = format!("{name}/{rows}x{gamma}");
            let mut lens = vec![0; rows];
            let (mut causal, mut global) = (Causal::default(), Global::default());
            let (mut lookahead, mut lagged) = (Lookahead::default(), Lagged::default());
            group.bench_function(BenchmarkId::new("causal", &size), |b| {
                b.iter(|| {
                    // Validation is part of a plan.
                    let batch = Batch::new(black_box(&a), &max_lens, gamma, rows as u64, 0);
                    batch.and_then(|batch| causal.plan(&batch, &cost, &mut lens))
                });
            });
            group.bench_function(BenchmarkId::new("lookahead", &size), |b| {
                b.iter(|| lookahead.plan(black_box(&batch), &cost, &mut lens));
            });
            group.bench_function(BenchmarkId::new("lagged", &size), |b| {
                b.iter(|| lagged.plan(black_box(&batch), &slots, &slots, &cost, &mut lens));
            });
            group.bench_function(BenchmarkId::new("global", &size), |b| {
                b.iter(|| global.plan(black_box(&batch), &cost, &mut lens));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, plans);
criterion_main!(benches);
