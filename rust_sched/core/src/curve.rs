//! Seconds of one target forward against executed tokens.

use crate::batch::MAX_TOKENS;
use crate::error::Error;

/// How a curve runs between measured points.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CurveMode {
    /// A forward of B tokens costs what the smallest measured point of at least B costs: it is padded up to it.
    Staircase,
    /// Straight lines between points; below the first one, its cost.
    Interpolated,
}

/// `T(b) = base + slope * (b - origin)` from `start` to the next segment.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Segment {
    start: u64,
    origin: u64,
    base: f64,
    slope: f64,
}

impl Segment {
    fn at(&self, tokens: u64) -> f64 {
        // A staircase's flat steps and every measured point come out bit for bit as measured.
        if self.slope == 0.0 {
            self.base
        } else {
            self.base + self.slope * (tokens - self.origin) as f64
        }
    }
}

/// A measured cost curve; beyond its last point the last two points' line goes on, but never falls.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    points: Vec<(u64, f64)>,
    first: Segment,
    rest: Vec<Segment>,
}

impl Curve {
    /// Curve through `(executed tokens, seconds)`.
    ///
    /// # Errors
    /// Without points, for token counts that do not rise or are out of range, and for seconds that are not positive and finite.
    pub fn new(points: &[(u64, f64)], mode: CurveMode) -> Result<Self, Error> {
        let (Some(&(_, first)), Some(&(end, last))) = (points.first(), points.last()) else {
            return Err(Error::Cost(
                "a cost curve needs at least one (tokens, seconds) point".into(),
            ));
        };
        for &(tokens, seconds) in points {
            if !(seconds > 0.0 && seconds.is_finite()) || tokens == 0 || tokens > MAX_TOKENS {
                return Err(Error::Cost(format!(
                    "cost point ({tokens}, {seconds}): expected tokens of 1 to {MAX_TOKENS} and positive, finite seconds"
                )));
            }
        }
        let first = Segment {
            start: 0,
            origin: 0,
            base: first,
            slope: 0.0,
        };
        let mut rest = Vec::with_capacity(points.len());
        let mut slope = 0.0;
        for (&(x0, t0), &(x1, t1)) in points.iter().zip(points.iter().skip(1)) {
            if x1 <= x0 {
                return Err(Error::Cost(format!(
                    "cost points must rise in tokens, got {x0} then {x1}"
                )));
            }
            slope = (t1 - t0) / (x1 - x0) as f64;
            rest.push(match mode {
                CurveMode::Staircase => Segment {
                    start: x0 + 1,
                    origin: x0,
                    base: t1,
                    slope: 0.0,
                },
                CurveMode::Interpolated => Segment {
                    start: x0,
                    origin: x0,
                    base: t0,
                    slope,
                },
            });
        }
        let start = if mode == CurveMode::Staircase {
            end + 1
        } else {
            end
        };
        rest.push(Segment {
            start,
            origin: end,
            base: last,
            slope: slope.max(0.0),
        });
        Ok(Self {
            points: points.to_vec(),
            first,
            rest,
        })
    }

    /// The measured points.
    #[must_use]
    pub fn points(&self) -> &[(u64, f64)] {
        &self.points
    }

    /// Seconds of a forward of so many tokens.
    #[must_use]
    pub fn at(&self, tokens: u64) -> f64 {
        self.cursor(tokens).at(tokens)
    }

    /// Smallest and largest seconds over `low..=high` tokens.
    #[must_use]
    pub fn range(&self, low: u64, high: u64) -> (f64, f64) {
        let mut cursor = self.cursor(low);
        let mut range = (f64::INFINITY, 0.0_f64);
        cursor.ends(low, high, |_, seconds| {
            range = (range.0.min(seconds), range.1.max(seconds))
        });
        range
    }

    pub(crate) fn cursor(&self, tokens: u64) -> Cursor<'_> {
        let (passed, rest) = self
            .rest
            .split_at(self.rest.partition_point(|s| s.start <= tokens));
        Cursor {
            segment: *passed.last().unwrap_or(&self.first),
            rest,
        }
    }
}

/// A place on a curve that moves to larger token counts only.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cursor<'a> {
    segment: Segment,
    rest: &'a [Segment],
}

impl Cursor<'_> {
    /// Seconds at `tokens`, which must not fall from call to call.
    pub(crate) fn at(&mut self, tokens: u64) -> f64 {
        while let Some((next, rest)) = self.rest.split_first()
            && next.start <= tokens
        {
            (self.segment, self.rest) = (*next, rest);
        }
        self.segment.at(tokens)
    }

    /// First token count of the next segment.
    pub(crate) fn next_break(&self) -> u64 {
        self.rest.first().map_or(u64::MAX, |s| s.start)
    }

    /// Visit both ends of every segment within `low..=high`: where a ratio of linear functions has its extremes.
    pub(crate) fn ends(&mut self, low: u64, high: u64, mut visit: impl FnMut(u64, f64)) {
        let mut tokens = low;
        while tokens <= high {
            visit(tokens, self.at(tokens));
            let last = high.min(self.next_break() - 1);
            if last > tokens {
                visit(last, self.at(last));
            }
            tokens = last + 1;
        }
    }
}
