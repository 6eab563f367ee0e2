//! Running averages of conditional survival, which stand for the positions that may not be known yet.

use std::collections::HashMap;

use crate::batch::{Batch, rows_of};
use crate::error::Error;

/// Conditional survival of a position without any data.
pub const DEFAULT_PRIOR: f64 = 0.8;

/// Groups kept apart; later ones are pooled, so that memory stays bounded whatever temperatures callers use.
const MAX_GROUPS: usize = 4096;
const POOLED: i64 = i64::MIN;

/// Sum of `a_j` and of `a_{j-1}` over all past drafts that reached position j.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Sums {
    reached: f64,
    survived: f64,
}

/// `sum a_j / sum a_{j-1}` per position, over all past drafts of one gamma and one group of rows (verifier and
/// temperature): uncensored, since averages over verified positions alone are selected by high `a`.
#[derive(Debug, Clone)]
pub struct Averages {
    prior: f64,
    sums: HashMap<(usize, i64), Vec<Sums>>,
}

impl Averages {
    /// No data yet; `prior` stands in for positions without any.
    ///
    /// # Errors
    /// For a prior that is no number from 0 to 1.
    pub fn new(prior: f64) -> Result<Self, Error> {
        if !(0.0..=1.0).contains(&prior) {
            return Err(Error::Argument(format!(
                "prior: expected a number from 0 to 1, got {prior}"
            )));
        }
        Ok(Self {
            prior,
            sums: HashMap::new(),
        })
    }

    /// Conditional survival of positions 1 to gamma.
    #[must_use]
    pub fn rates(&self, gamma: usize, group: i64) -> Vec<f64> {
        let mut rates = Vec::with_capacity(gamma);
        self.append_rates(gamma, group, &mut rates);
        rates
    }

    /// Take `rates` as the averages of a gamma (their number) and group, as if over drafts of total survival `weight`.
    ///
    /// # Errors
    /// For a rate that is no number from 0 to 1, or a weight that is not positive and finite.
    pub fn seed(&mut self, rates: &[f64], group: i64, weight: f64) -> Result<(), Error> {
        crate::batch::check_matrix("rates", rates, 1, rates.len())?;
        if !(weight > 0.0 && weight.is_finite()) {
            return Err(Error::Argument(format!(
                "weight: expected a positive, finite number, got {weight}"
            )));
        }
        let key = self.key(rates.len(), group);
        let seeded = rates
            .iter()
            .map(|r| Sums {
                reached: weight,
                survived: r * weight,
            })
            .collect();
        self.sums.insert(key, seeded);
        Ok(())
    }

    /// Learn from a batch, after its plan is made. Positions beyond `max_lens` say nothing and are left out.
    pub fn observe(&mut self, batch: &Batch<'_>) {
        let gamma = batch.gamma();
        let mut group = batch.group(0);
        let mut drafts = batch.drafts().enumerate().peekable();
        while drafts.peek().is_some() {
            let key = self.key(gamma, group);
            let sums = self
                .sums
                .entry(key)
                .or_insert_with(|| vec![Sums::default(); gamma]);
            while let Some((_, draft)) = drafts.next_if(|(row, _)| batch.group(*row) == group) {
                let mut before = 1.0;
                for (sum, &a) in sums.iter_mut().zip(draft) {
                    sum.reached += before;
                    sum.survived += a;
                    before = a;
                }
            }
            if let Some((row, _)) = drafts.peek() {
                group = batch.group(*row);
            }
        }
    }

    fn key(&self, gamma: usize, group: i64) -> (usize, i64) {
        let known = self.sums.len() < MAX_GROUPS || self.sums.contains_key(&(gamma, group));
        (gamma, if known { group } else { POOLED })
    }

    fn append_rates(&self, gamma: usize, group: i64, rates: &mut Vec<f64>) {
        let sums = self
            .sums
            .get(&self.key(gamma, group))
            .map_or(&[][..], Vec::as_slice);
        let known = sums.iter().map(|s| {
            if s.reached > 0.0 {
                s.survived / s.reached
            } else {
                self.prior
            }
        });
        rates.extend(known.chain(std::iter::repeat(self.prior)).take(gamma));
    }
}

impl Default for Averages {
    fn default() -> Self {
        Self {
            prior: DEFAULT_PRIOR,
            sums: HashMap::new(),
        }
    }
}

/// The averages of each row of a batch, looked up once a round.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rates {
    groups: Vec<i64>,
    tables: Vec<f64>,
    gamma: usize,
    /// Table of each row.
    rows: Vec<usize>,
}

impl Rates {
    pub(crate) fn load(&mut self, averages: &Averages, batch: &Batch<'_>) {
        self.gamma = batch.gamma();
        self.groups.clear();
        self.tables.clear();
        self.rows.clear();
        for row in 0..batch.rows() {
            let group = batch.group(row);
            let table = match self.groups.iter().rposition(|&g| g == group) {
                Some(table) => table,
                None => {
                    self.groups.push(group);
                    averages.append_rates(self.gamma, group, &mut self.tables);
                    self.groups.len() - 1
                }
            };
            self.rows.push(table);
        }
    }

    /// Conditional survival of every position of a row.
    pub(crate) fn row(&self, row: usize) -> &[f64] {
        let table = self.rows.get(row).copied().unwrap_or_default();
        rows_of(&self.tables, self.gamma).nth(table).unwrap_or_default()
    }
}
