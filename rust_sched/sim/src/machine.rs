//! What a step really takes: the table that schedulers plan with, or a roofline that knows more than it.

use dspark_sched_core::{CostTable, CurveMode, DraftPoint, Error};

/// What a step asks of the machine.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    /// B: tokens that the forward executes.
    pub tokens: u64,
    /// Requests that draft.
    pub drafting: u64,
    /// Length of the drafted block; 0 in a plain step.
    pub gamma: u64,
    /// Longest context, in tokens.
    pub context: u64,
    /// Contexts of all sequences together: cache entries that attention reads.
    pub cached: u64,
    /// Sum over sequences of query tokens times context: pairs that attention computes.
    pub pairs: u64,
}

/// A machine by its limits: a forward takes what reading its bytes takes, or what its arithmetic takes, whichever is
/// more.
///
/// `T = max((P w + k C) / bandwidth, (2 P B + f A) / flops)`, P parameters of w bytes, C cached tokens of k bytes, B
/// executed tokens, A attended pairs of f operations; a draft likewise with its own parameters over `R gamma` tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Roofline {
    /// P: parameters that a token passes through.
    pub parameters: f64,
    /// Parameters of the drafter; 0 for one that costs nothing.
    pub draft_parameters: f64,
    /// w: bytes of a parameter.
    pub parameter_bytes: f64,
    /// k: bytes of keys and values of a token, over all layers.
    pub cache_bytes: f64,
    /// f: operations of a (query, key) pair, over all layers.
    pub pair_flops: f64,
    /// Bytes a second.
    pub bandwidth: f64,
    /// Operations a second.
    pub flops: f64,
    /// Constant seconds a step.
    pub glue: f64,
}

/// Tokens of a sequence in a timed forward: an anchor and three drafts, as `dspark profile` spreads them.
const TOKENS_PER_SEQUENCE: u64 = 4;

impl Roofline {
    /// Check the limits.
    ///
    /// # Errors
    /// For rates and parameters that are not positive, and others that are negative; infinities and NaN.
    pub fn check(self) -> Result<Self, Error> {
        let positive = [
            ("parameters", self.parameters),
            ("parameter_bytes", self.parameter_bytes),
            ("bandwidth", self.bandwidth),
            ("flops", self.flops),
        ];
        let others = [
            ("draft_parameters", self.draft_parameters),
            ("cache_bytes", self.cache_bytes),
            ("pair_flops", self.pair_flops),
            ("glue", self.glue),
        ];
        let bad = |(name, value): (&'static str, f64), least: bool| {
            (!value.is_finite() || value < 0.0 || (least && value == 0.0)).then_some((name, value))
        };
        let found = positive
            .into_iter()
            .find_map(|p| bad(p, true))
            .or_else(|| others.into_iter().find_map(|p| bad(p, false)));
        match found {
            None => Ok(self),
            Some((name, value)) => Err(Error::Argument(format!(
                "roofline: {name} can't be {value}: expected a finite number above 0 (draft_parameters, cache_bytes, pair_flops and glue may be 0)"
            ))),
        }
    }

    /// Seconds of a forward.
    #[must_use]
    pub fn verify_seconds(&self, load: &Load) -> f64 {
        let bytes = self.parameters * self.parameter_bytes + self.cache_bytes * load.cached as f64;
        let operations = 2.0 * self.parameters * load.tokens as f64 + self.pair_flops * load.pairs as f64;
        (bytes / self.bandwidth).max(operations / self.flops)
    }

    /// Seconds of drafting `gamma` tokens for `requests` requests.
    #[must_use]
    pub fn draft_seconds(&self, requests: u64, gamma: u64) -> f64 {
        if requests == 0 || gamma == 0 {
            return 0.0;
        }
        let bytes = self.draft_parameters * self.parameter_bytes;
        let operations = 2.0 * self.draft_parameters * (requests * gamma) as f64;
        (bytes / self.bandwidth).max(operations / self.flops)
    }

    /// The table that a profile of this machine would be: forwards of up to `most` tokens, spread over sequences of
    /// each context, and drafts of up to `requests` requests.
    ///
    /// # Errors
    /// For contexts that do not rise, or limits out of range.
    pub fn table(&self, contexts: &[u64], most: u64, requests: u64, gamma: u64) -> Result<CostTable, Error> {
        let roofline = self.check()?;
        let contexts = if contexts.is_empty() { &[0][..] } else { contexts };
        let last = contexts.len() - 1;
        let buckets: Vec<_> = contexts
            .iter()
            .enumerate()
            .map(|(i, &context)| {
                let points = spread(most).map(|tokens| {
                    let rows = (tokens / TOKENS_PER_SEQUENCE).max(1);
                    let load = Load {
                        tokens,
                        cached: rows.saturating_mul(context),
                        pairs: tokens.saturating_mul(context),
                        ..Load::default()
                    };
                    (tokens, roofline.verify_seconds(&load))
                });
                (if i == last { u64::MAX } else { context }, points.collect())
            })
            .collect();
        let table = CostTable::with_buckets(&buckets, CurveMode::Interpolated)?.with_glue(self.glue)?;
        if self.draft_parameters == 0.0 || gamma == 0 {
            return Ok(table);
        }
        let drafts: Vec<_> = (1..=gamma)
            .flat_map(|gamma| spread(requests).map(move |requests| (requests, gamma)))
            .map(|(requests, gamma)| DraftPoint {
                requests,
                gamma,
                seconds: roofline.draft_seconds(requests, gamma),
            })
            .collect();
        table.with_draft(&drafts)
    }
}

/// 1, 2, 3, 4, 6, 8, 12, 16, .. up to and with `most`.
fn spread(most: u64) -> impl Iterator<Item = u64> {
    let most = most.clamp(1, 1 << 30);
    (0..=30_u32)
        .flat_map(|i| {
            [1_u64 << i, 3 << i.saturating_sub(1)]
                .into_iter()
                .take(if i == 0 { 1 } else { 2 })
        })
        .take_while(move |&n| n < most)
        .chain(std::iter::once(most))
}

/// Who says what a step takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Machine {
    /// The table that is planned with.
    Table,
    /// A roofline, of which the table knows a part: it counts all cached tokens, not the longest context alone.
    Roofline(Roofline),
}

impl Machine {
    /// Seconds of drafting and of the forward; glue is apart.
    pub(crate) fn seconds(&self, table: &CostTable, load: &Load) -> (f64, f64) {
        match self {
            Self::Table => (
                table.draft_seconds(load.drafting, load.gamma),
                table.verify_seconds(load.tokens, load.context),
            ),
            Self::Roofline(roofline) => (
                roofline.draft_seconds(load.drafting, load.gamma),
                roofline.verify_seconds(load),
            ),
        }
    }

    pub(crate) fn glue(&self, table: &CostTable) -> f64 {
        match self {
            Self::Table => table.glue(),
            Self::Roofline(roofline) => roofline.glue,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Roofline {
        Roofline {
            parameters: 1e9,
            draft_parameters: 1e8,
            parameter_bytes: 2.0,
            cache_bytes: 1e5,
            pair_flops: 1e5,
            bandwidth: 1e11,
            flops: 1e13,
            glue: 1e-3,
        }
    }

    #[test]
    fn a_forward_is_bound_by_bytes_then_by_arithmetic() {
        let seconds = |tokens, cached| {
            machine().verify_seconds(&Load {
                tokens,
                cached,
                ..Load::default()
            })
        };
        assert!((seconds(1, 0) - 0.02).abs() < 1e-12);
        assert_eq!(seconds(1, 0), seconds(100, 0));
        assert!((seconds(200, 0) - 0.04).abs() < 1e-12);
        assert!((seconds(1, 20_000) - 0.04).abs() < 1e-12);
    }

    #[test]
    fn its_table_says_the_same_of_what_was_timed() {
        let table = machine().table(&[64, 4096], 512, 64, 7).unwrap();
        let load = Load {
            tokens: 48,
            cached: 12 * 4096,
            pairs: 48 * 4096,
            ..Load::default()
        };
        assert_eq!(table.verify_seconds(48, 4096), machine().verify_seconds(&load));
        assert_eq!(table.verify_seconds(48, 1 << 20), table.verify_seconds(48, 4096));
        assert!(table.verify_seconds(48, 64) < table.verify_seconds(48, 65));
        assert_eq!(table.draft_seconds(16, 7), machine().draft_seconds(16, 7));
        assert_eq!(table.glue(), 1e-3);
    }

    #[test]
    fn points_rise_to_the_last_one() {
        assert_eq!(spread(1).collect::<Vec<_>>(), [1]);
        assert_eq!(spread(20).collect::<Vec<_>>(), [1, 2, 3, 4, 6, 8, 12, 16, 20]);
        assert_eq!(spread(24).collect::<Vec<_>>(), [1, 2, 3, 4, 6, 8, 12, 16, 24]);
    }

    #[test]
    fn impossible_machines_are_refused() {
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let broken = Roofline {
                bandwidth: bad,
                ..machine()
            };
            assert!(broken.check().unwrap_err().to_string().contains("bandwidth"));
        }
        let broken = Roofline {
            glue: -1.0,
            ..machine()
        };
        assert!(broken.check().unwrap_err().to_string().contains("glue"));
    }
}
