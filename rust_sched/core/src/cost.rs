//! Cost tables: seconds of an engine step, from which every throughput Theta is computed.

use crate::batch::MAX_TOKENS;
use crate::curve::{Cursor, Curve, CurveMode};
use crate::error::Error;

/// Relative spread under which a curve counts as flat, where the measurement does not say.
pub const DEFAULT_NOISE: f64 = 0.02;

/// One measured time of drafting.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DraftPoint {
    /// R.
    pub requests: u64,
    /// Drafted tokens a request.
    pub gamma: u64,
    /// Time of the whole draft.
    pub seconds: f64,
}

/// `T_draft(R, gamma) + T_verify(B, context) + T_glue`, in seconds. Immutable, hence frozen within a round.
///
/// ```
/// use dspark_sched_core::{CostTable, CurveMode};
/// let table = CostTable::from_sps(&[(1, 1.0), (2, 0.5), (3, 0.45)], CurveMode::Interpolated)?;
/// assert_eq!(table.throughput(1.8, 2, 1, 2, 0), 0.9);
/// # Ok::<(), dspark_sched_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct CostTable {
    /// Bounds of context length and the curve up to each, rising.
    buckets: Vec<(u64, Curve)>,
    /// The last of them, for contexts beyond every bound.
    beyond: Curve,
    mode: CurveMode,
    /// `(gamma, T over R)`, rising in gamma.
    draft: Vec<(u64, Curve)>,
    glue: f64,
    noise: f64,
    flat: bool,
}

impl CostTable {
    /// A table of one curve, `(executed tokens, seconds)`, for every context length; drafting and glue are free.
    ///
    /// # Errors
    /// See [`Curve::new`].
    pub fn new(points: &[(u64, f64)], mode: CurveMode) -> Result<Self, Error> {
        Self::with_buckets(&[(u64::MAX, points.to_vec())], mode)
    }

    /// A table of a curve a context bucket: `(largest context of the bucket, points)`, rising. Longer contexts use the last.
    ///
    /// # Errors
    /// See [`Curve::new`]; and without buckets or where their bounds do not rise.
    pub fn with_buckets(buckets: &[(u64, Vec<(u64, f64)>)], mode: CurveMode) -> Result<Self, Error> {
        let mut curves: Vec<(u64, Curve)> = Vec::with_capacity(buckets.len());
        for (bound, points) in buckets {
            if curves.last().is_some_and(|(previous, _)| previous >= bound) {
                return Err(Error::Cost(format!(
                    "bounds of context buckets must rise, got {bound} again or after more"
                )));
            }
            curves.push((*bound, Curve::new(points, mode)?));
        }
        let Some((_, beyond)) = curves.last().cloned() else {
            return Err(Error::Cost(
                "a cost table needs at least one context bucket".into(),
            ));
        };
        let table = Self {
            buckets: curves,
            beyond,
            mode,
            draft: Vec::new(),
            glue: 0.0,
            noise: DEFAULT_NOISE,
            flat: false,
        };
        Ok(table.judge_flatness())
    }

    /// A table from `(executed tokens, engine steps per second)`.
    ///
    /// # Errors
    /// See [`Curve::new`].
    pub fn from_sps(points: &[(u64, f64)], mode: CurveMode) -> Result<Self, Error> {
        let seconds: Vec<_> = points.iter().map(|&(tokens, sps)| (tokens, 1.0 / sps)).collect();
        Self::new(&seconds, mode)
    }

    /// The same table with measured drafting times: straight lines over R and over gamma, nothing at gamma 0, the
    /// smallest measured gamma's time below it.
    ///
    /// # Errors
    /// For a point that is not positive and finite, or measured twice.
    pub fn with_draft(mut self, points: &[DraftPoint]) -> Result<Self, Error> {
        let mut sorted = points.to_vec();
        sorted.sort_by_key(|p| (p.gamma, p.requests));
        if let Some(zero) = sorted.iter().find(|p| p.gamma == 0 || p.gamma > MAX_TOKENS) {
            return Err(Error::Cost(format!(
                "draft cost: gamma {} is not 1 to {MAX_TOKENS}",
                zero.gamma
            )));
        }
        self.draft.clear();
        for of_gamma in sorted.chunk_by(|a, b| a.gamma == b.gamma) {
            let over_r: Vec<_> = of_gamma.iter().map(|p| (p.requests, p.seconds)).collect();
            let gamma = of_gamma.first().map_or(0, |p| p.gamma);
            let curve = Curve::new(&over_r, CurveMode::Interpolated)
                .map_err(|e| Error::Cost(format!("draft cost at gamma {gamma}: {e}")))?;
            self.draft.push((gamma, curve));
        }
        Ok(self)
    }

    /// The same table with a constant time a step.
    ///
    /// # Errors
    /// For seconds that are negative or not finite.
    pub fn with_glue(mut self, seconds: f64) -> Result<Self, Error> {
        if !(seconds >= 0.0 && seconds.is_finite()) {
            return Err(Error::Cost(format!(
                "glue seconds: expected a finite number of at least 0, got {seconds}"
            )));
        }
        self.glue = seconds;
        Ok(self)
    }

    /// The same table with the relative spread of its measurement.
    ///
    /// # Errors
    /// For a spread that is negative or not finite.
    pub fn with_noise(mut self, spread: f64) -> Result<Self, Error> {
        if !(spread >= 0.0 && spread.is_finite()) {
            return Err(Error::Cost(format!(
                "noise: expected a finite share of at least 0, got {spread}"
            )));
        }
        self.noise = spread;
        Ok(self.judge_flatness())
    }

    fn judge_flatness(mut self) -> Self {
        self.flat = self.buckets.iter().all(|(_, curve)| {
            let seconds = || curve.points().iter().map(|p| p.1);
            let (low, high) = (
                seconds().fold(f64::INFINITY, f64::min),
                seconds().fold(0.0, f64::max),
            );
            high <= low * (1.0 + self.noise)
        });
        self
    }

    /// True where no measured point costs more than another beyond noise: extra tokens look free (`flat-cost`).
    #[must_use]
    pub fn flat(&self) -> bool {
        self.flat
    }

    /// The same question about `low..=high` tokens alone.
    #[must_use]
    pub fn flat_over(&self, low: u64, high: u64, context: u64) -> bool {
        let (least, most) = self.curve(context).range(low, high);
        most <= least * (1.0 + self.noise)
    }

    /// Staircase or interpolated.
    #[must_use]
    pub fn mode(&self) -> CurveMode {
        self.mode
    }

    /// Constant seconds a step.
    #[must_use]
    pub fn glue(&self) -> f64 {
        self.glue
    }

    /// Relative spread of the measurement.
    #[must_use]
    pub fn noise(&self) -> f64 {
        self.noise
    }

    /// Bounds of context length and the curve up to each.
    #[must_use]
    pub fn buckets(&self) -> &[(u64, Curve)] {
        &self.buckets
    }

    fn curve(&self, context: u64) -> &Curve {
        let at = self.buckets.partition_point(|(bound, _)| *bound < context);
        self.buckets.get(at).map_or(&self.beyond, |(_, curve)| curve)
    }

    /// T_verify(B, context).
    #[must_use]
    pub fn verify_seconds(&self, tokens: u64, context: u64) -> f64 {
        self.curve(context).at(tokens)
    }

    /// T_draft(R, gamma).
    #[must_use]
    pub fn draft_seconds(&self, requests: u64, gamma: u64) -> f64 {
        if gamma == 0 || requests == 0 {
            return 0.0;
        }
        let after = self.draft.partition_point(|(g, _)| *g < gamma);
        let (low, high) = match (
            after.checked_sub(1).and_then(|i| self.draft.get(i)),
            self.draft.get(after),
        ) {
            (None, None) => return 0.0,
            (None, Some((_, only))) => return only.at(requests),
            (Some(low), Some(high)) => (low, high),
            (Some(low), None) => match after.checked_sub(2).and_then(|i| self.draft.get(i)) {
                None => return low.1.at(requests),
                Some(before) => (before, low),
            },
        };
        let (t0, t1) = (low.1.at(requests), high.1.at(requests));
        let line = t0 + (t1 - t0) * (gamma - low.0) as f64 / (high.0 - low.0) as f64;
        if gamma > high.0 { line.max(t1) } else { line }
    }

    /// Seconds of a step: drafting, one forward of B tokens, and glue.
    #[must_use]
    pub fn step_seconds(&self, tokens: u64, requests: u64, gamma: u64, context: u64) -> f64 {
        self.overhead(requests, gamma) + self.verify_seconds(tokens, context)
    }

    /// Theta = tau / (T_draft + T_verify + T_glue), in tokens per second.
    #[must_use]
    pub fn throughput(&self, tau: f64, tokens: u64, requests: u64, gamma: u64, context: u64) -> f64 {
        tau / self.step_seconds(tokens, requests, gamma, context)
    }

    fn overhead(&self, requests: u64, gamma: u64) -> f64 {
        self.draft_seconds(requests, gamma) + self.glue
    }

    pub(crate) fn meter(&self, rows: usize, gamma: usize, base_tokens: u64, context: u64) -> Meter<'_> {
        let mut cursor = self.curve(context).cursor(base_tokens);
        let overhead = self.overhead(rows as u64, gamma as u64);
        let tau = rows as f64;
        let theta = tau / (overhead + cursor.at(base_tokens));
        Meter {
            cursor,
            overhead,
            tokens: base_tokens,
            tau,
            theta,
        }
    }
}

/// Theta along a walk that admits one candidate at a time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Meter<'a> {
    cursor: Cursor<'a>,
    overhead: f64,
    tokens: u64,
    pub(crate) tau: f64,
    pub(crate) theta: f64,
}

impl Meter<'_> {
    /// tau and Theta after one more candidate of survival `a`.
    #[inline]
    pub(crate) fn next(&mut self, a: f64) -> (f64, f64) {
        let tau = self.tau + a;
        (tau, tau / (self.overhead + self.cursor.at(self.tokens + 1)))
    }

    /// Admit the candidate that `next` was asked about.
    #[inline]
    pub(crate) fn admit(&mut self, (tau, theta): (f64, f64)) {
        (self.tokens, self.tau, self.theta) = (self.tokens + 1, tau, theta);
    }

    /// Token count at which the curve next bends or steps.
    pub(crate) fn next_break(&self) -> u64 {
        self.cursor.next_break()
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// No path of at most `steps` candidates, each of survival `a` at most, reaches a higher Theta.
    pub(crate) fn ceiling(&self, a: f64, steps: u64) -> f64 {
        let mut best = 0.0_f64;
        let mut cursor = self.cursor;
        cursor.ends(self.tokens + 1, self.tokens + steps, |tokens, seconds| {
            let tau = self.tau + (tokens - self.tokens) as f64 * a;
            best = best.max(tau / (self.overhead + seconds));
        });
        best
    }
}
