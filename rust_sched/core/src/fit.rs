//! Sequential Temperature Scaling, fitted: one grid search a position, in order.

use crate::batch::{check_len, check_lens_of, index};
use crate::error::Error;
use crate::sts::{check_temperatures, sigmoid};

/// Rounds to fit on. Borrowed: nothing is copied.
#[derive(Debug, Clone, Copy)]
pub struct Outcomes<'a> {
    logits: &'a [f64],
    offered: &'a [i64],
    accepted: &'a [i64],
    gamma: usize,
}

impl<'a> Outcomes<'a> {
    /// Check and wrap N rounds.
    ///
    /// * `logits`: confidence logits, `[N, gamma]` row-major; infinite ones are certainties.
    /// * `offered`: drafts that were verified, `[N]`, in `0..=gamma`. Positions beyond do not count.
    /// * `accepted`: drafts that were accepted, `[N]`, in `0..=offered`.
    ///
    /// # Errors
    /// For a wrong length, a NaN logit, a count out of range, or a position that no round was offered.
    pub fn new(
        logits: &'a [f64],
        offered: &'a [i64],
        accepted: &'a [i64],
        gamma: usize,
    ) -> Result<Self, Error> {
        check_len("logits", logits.len(), offered.len() * gamma)?;
        check_len("accepted", accepted.len(), offered.len())?;
        check_lens_of("offered", offered, gamma)?;
        if let Some(row) = offered
            .iter()
            .zip(accepted)
            .position(|(o, a)| !(0..=*o).contains(a))
        {
            return Err(Error::Argument(format!(
                "accepted[{row}]: expected 0 to the {} that were offered, got {}",
                offered.get(row).copied().unwrap_or_default(),
                accepted.get(row).copied().unwrap_or_default()
            )));
        }
        if let Some(at) = logits.iter().position(|x| x.is_nan()) {
            return Err(Error::Value {
                what: "logits",
                row: at / gamma.max(1),
                position: at % gamma.max(1),
                value: f64::NAN,
                allowed: "a number",
            });
        }
        let longest = offered.iter().copied().max().map_or(0, index);
        if longest < gamma {
            return Err(Error::Argument(format!(
                "offered: no round was offered position {}; fit on rounds verified at full length",
                longest + 1
            )));
        }
        Ok(Self {
            logits,
            offered,
            accepted,
            gamma,
        })
    }

    /// Block size.
    #[must_use]
    pub fn gamma(&self) -> usize {
        self.gamma
    }

    /// (logit of position k, whether the prefix up to k survived) of each round; None where k was not offered.
    fn column(&self, k: usize) -> impl Iterator<Item = Option<(f64, bool)>> + use<'a> {
        let logits = self.logits.iter().skip(k).step_by(self.gamma.max(1));
        logits
            .zip(self.offered)
            .zip(self.accepted)
            .map(move |((logit, &offered), &accepted)| {
                (index(offered) > k).then(|| (*logit, index(accepted) > k))
            })
    }
}

/// Temperatures from a tenth to ten in steps of 2 %, 1 among them.
#[must_use]
pub fn default_grid() -> Vec<f64> {
    (-116..=116)
        .map(|step| 10_f64.powf(f64::from(step) / 116.0))
        .collect()
}

/// For k = 1..gamma in order, with the earlier temperatures fixed, the temperature of the grid that minimises the ECE of
/// `prod_{i<=k} sigmoid(logit_i / T_i)` against "prefix k survived", over `bins` equal-width bins. Of temperatures that
/// do equally well, the one nearest to 1.
///
/// * `grid`: temperatures to try.
/// * `temperatures`, `ece`: outputs, `[gamma]`; the ECE is that of the fitted products on these rounds.
///
/// # Errors
/// For an empty grid, a temperature that is not positive and finite, no bins, or a wrong length.
///
/// ```
/// use dspark_sched_core::{Outcomes, fit_sts};
/// // A logit of 2 that holds three times out of four: sigmoid(2 / T) = 3/4 at T = 2 / ln 3 = 1.82.
/// let rounds = Outcomes::new(&[2.0; 4], &[1; 4], &[1, 1, 1, 0], 1)?;
/// let (mut t, mut ece) = ([0.0], [0.0]);
/// fit_sts(&rounds, &[0.5, 1.0, 1.8, 3.0], 20, &mut t, &mut ece)?;
/// assert_eq!(t, [1.8]);
/// # Ok::<(), dspark_sched_core::Error>(())
/// ```
pub fn fit_sts(
    rounds: &Outcomes<'_>,
    grid: &[f64],
    bins: usize,
    temperatures: &mut [f64],
    ece: &mut [f64],
) -> Result<(), Error> {
    check_temperatures(grid)?;
    if grid.is_empty() || bins == 0 {
        return Err(Error::Argument(
            "grid and bins: expected at least one of each".into(),
        ));
    }
    check_len("temperatures", temperatures.len(), rounds.gamma)?;
    check_len("ece", ece.len(), rounds.gamma)?;
    let mut before = vec![1.0; rounds.offered.len()];
    for (k, (temperature, error)) in temperatures.iter_mut().zip(ece).enumerate() {
        let seen: Vec<(f64, f64, bool)> = rounds
            .column(k)
            .zip(&before)
            .filter_map(|(entry, &a)| entry.map(|(logit, survived)| (a, logit, survived)))
            .collect();
        (*temperature, *error) = search(&seen, grid, bins);
        for (a, entry) in before.iter_mut().zip(rounds.column(k)) {
            *a *= entry.map_or(1.0, |(logit, _)| sigmoid(logit / *temperature));
        }
    }
    Ok(())
}

/// The best temperature of one position, and its ECE. `seen`: (survival before it, logit, survived) of each round.
fn search(seen: &[(f64, f64, bool)], grid: &[f64], bins: usize) -> (f64, f64) {
    let mut gaps = vec![0.0; bins];
    let mut best = (1.0_f64, f64::INFINITY);
    for &temperature in grid {
        let error = calibration_error(seen, temperature, &mut gaps);
        let nearer = error == best.1 && temperature.ln().abs() < best.0.ln().abs();
        if error < best.1 || nearer {
            best = (temperature, error);
        }
    }
    best
}

/// Sum over bins of |sum of predictions - sum of outcomes|, over the number of rounds.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss
)]
fn calibration_error(seen: &[(f64, f64, bool)], temperature: f64, gaps: &mut [f64]) -> f64 {
    gaps.fill(0.0);
    let (count, last) = (gaps.len() as f64, gaps.len() - 1);
    for &(before, logit, survived) in seen {
        let predicted = before * sigmoid(logit / temperature);
        let bin = ((predicted * count) as usize).min(last);
        if let Some(gap) = gaps.get_mut(bin) {
            *gap += predicted - f64::from(u8::from(survived));
        }
    }
    gaps.iter().map(|gap| gap.abs()).sum::<f64>() / seen.len() as f64
}
