//! Candidates in Algorithm 1's order: descending survival, ties by position, then row.
//!
//! Rows are non-increasing, so this order is the merge of the rows by their heads: what comes next is decided by the
//! first position of each row that is not admitted yet. The buckets below are how it is computed, not what it depends
//! on. They are sorted when the walk reaches them, so a walk that stops early never pays for the rest.

use crate::batch::{index, rows_of};

/// A draft token that may be admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// Bits of `a > 0`; they compare as the number does.
    bits: u64,
    /// Position (high half) and row (low half).
    tie: u64,
}

impl Candidate {
    pub(crate) fn new(a: f64, position: usize, row: usize) -> Self {
        Self {
            bits: a.to_bits(),
            tie: (position as u64) << 32 | row as u64,
        }
    }

    pub(crate) fn a(self) -> f64 {
        f64::from_bits(self.bits)
    }

    pub(crate) fn row(self) -> usize {
        (self.tie & 0xffff_ffff) as usize
    }

    #[inline]
    fn comes_before(self, other: Self) -> bool {
        self.bits > other.bits || (self.bits == other.bits && self.tie < other.tie)
    }

    /// From 0.
    pub(crate) fn position(self) -> usize {
        (self.tie >> 32) as usize
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// What is admitted earlier is *greater*, as a max-heap wants it.
impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.bits.cmp(&other.bits).then(other.tie.cmp(&self.tie))
    }
}

const MAX_BUCKETS: usize = 1 << 16;
/// Candidates that are sorted at a time.
const CHUNK: usize = 32;

/// Scratch memory of the order, kept between rounds.
#[derive(Debug, Clone, Default)]
pub(crate) struct Order {
    candidates: Vec<Candidate>,
    /// End of each bucket in `candidates`; buckets hold descending ranges of `a`.
    ends: Vec<u32>,
    top: f64,
    scale: f64,
    bucket: usize,
    at: usize,
    end: usize,
}

impl Order {
    /// Take the candidates `j < max_lens[r]`, `a > 0`, of a validated row-major matrix (rows fall).
    pub(crate) fn fill(&mut self, survival: &[f64], max_lens: &[i64], gamma: usize) {
        self.rewind();
        self.ends.clear();
        let total = self.measure(survival, max_lens, gamma);
        self.candidates.resize(total, Candidate { bits: 0, tie: 0 });
        if total == 0 {
            return;
        }
        self.count(survival, max_lens, gamma);
        for (row, draft) in live(survival, max_lens, gamma).enumerate() {
            for (position, &a) in draft.iter().enumerate() {
                let bucket = self.bucket_of(a);
                if let Some(end) = self.ends.get_mut(bucket) {
                    if let Some(place) = self.candidates.get_mut(*end as usize) {
                        *place = Candidate::new(a, position, row);
                    }
                    *end += 1;
                }
            }
        }
    }

    /// Number of candidates.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.candidates.len()
    }

    /// Begin again with the first candidate.
    pub(crate) fn rewind(&mut self) {
        (self.bucket, self.at, self.end) = (0, 0, 0);
    }

    /// The next candidate.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<Candidate> {
        if self.at == self.end {
            self.sort_more()?;
        }
        let next = self.candidates.get(self.at).copied();
        self.at += 1;
        next
    }

    /// Sort the buckets that hold the next `CHUNK` candidates. Whole buckets: what follows belongs behind them.
    fn sort_more(&mut self) -> Option<()> {
        while self.end - self.at < CHUNK {
            let Some(&end) = self.ends.get(self.bucket) else {
                break;
            };
            (self.end, self.bucket) = (end as usize, self.bucket + 1);
        }
        let slice = self
            .candidates
            .get_mut(self.at..self.end)
            .filter(|slice| !slice.is_empty())?;
        if slice.len() > 4 * CHUNK {
            slice.sort_unstable_by(|x, y| y.cmp(x));
        } else {
            insertion_sort(slice);
        }
        Some(())
    }

    /// Number of candidates, and the map from survival to bucket for their range.
    fn measure(&mut self, survival: &[f64], max_lens: &[i64], gamma: usize) -> usize {
        let (mut total, mut top, mut bottom) = (0, 0.0_f64, 1.0_f64);
        for draft in live(survival, max_lens, gamma) {
            if let (Some(&first), Some(&last)) = (draft.first(), draft.last()) {
                total += draft.len();
                top = top.max(first);
                bottom = bottom.min(last);
            }
        }
        let buckets = total.next_power_of_two().min(MAX_BUCKETS);
        self.top = top;
        let scale = (buckets - 1) as f64 / (top - bottom);
        self.scale = if scale.is_finite() { scale } else { 0.0 };
        self.ends.resize(if total == 0 { 0 } else { buckets }, 0);
        total
    }

    /// Where each bucket begins.
    fn count(&mut self, survival: &[f64], max_lens: &[i64], gamma: usize) {
        for &a in live(survival, max_lens, gamma).flatten() {
            let bucket = self.bucket_of(a);
            if let Some(n) = self.ends.get_mut(bucket) {
                *n += 1;
            }
        }
        let mut begin = 0;
        for n in &mut self.ends {
            (*n, begin) = (begin, begin + *n);
        }
    }

    /// Weakly falling in `a`, whatever the rounding, so buckets never disagree with the order.
    #[inline]
    #[allow(clippy::cast_possible_truncation)]
    fn bucket_of(&self, a: f64) -> usize {
        // At 2^52 the spacing of f64 is 1: the low half of the sum's bits is the product, rounded.
        const TO_INTEGER: f64 = 4_503_599_627_370_496.0;
        let rounded = ((self.top - a) * self.scale + TO_INTEGER).to_bits() as u32;
        (rounded as usize).min(self.ends.len().saturating_sub(1))
    }
}

/// The candidates of each row: what may be verified and survives at all. Rows fall, so that is a prefix.
fn live<'a>(survival: &'a [f64], max_lens: &'a [i64], gamma: usize) -> impl Iterator<Item = &'a [f64]> {
    rows_of(survival, gamma).zip(max_lens).map(|(row, &len)| {
        let row = row.get(..index(len)).unwrap_or(row);
        match row.last() {
            Some(&last) if last <= 0.0 => row.get(..row.partition_point(|&a| a > 0.0)).unwrap_or(row),
            _ => row,
        }
    })
}

/// Buckets come in order, so little is left to do.
#[allow(clippy::indexing_slicing)] // `hole` is at most `next`, which is below the length
fn insertion_sort(slice: &mut [Candidate]) {
    for next in 1..slice.len() {
        let candidate = slice[next];
        let mut hole = next;
        while hole > 0 && candidate.comes_before(slice[hole - 1]) {
            slice[hole] = slice[hole - 1];
            hole -= 1;
        }
        slice[hole] = candidate;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn survival_rows() -> impl Strategy<Value = (Vec<f64>, Vec<i64>, usize)> {
        (0_usize..40, 1_usize..9).prop_flat_map(|(rows, gamma)| {
            let value = prop_oneof![
                Just(0.0),
                Just(1.0),
                Just(0.5),
                0.0..1.0_f64,
                0.0..1e-300_f64,
                0.999..1.0_f64
            ];
            (
                prop::collection::vec(value, rows * gamma),
                prop::collection::vec(0..=(gamma as i64), rows),
                Just(gamma),
            )
                .prop_map(|(c, lens, gamma)| {
                    let mut a = c;
                    for row in a.chunks_exact_mut(gamma) {
                        let mut p = 1.0;
                        for x in row {
                            p *= *x;
                            *x = p;
                        }
                    }
                    (a, lens, gamma)
                })
        })
    }

    proptest! {
        #[test]
        fn is_the_sorted_order((a, lens, gamma) in survival_rows()) {
            let mut expected: Vec<(f64, usize, usize)> = Vec::new();
            for (r, &len) in lens.iter().enumerate() {
                for j in 0..len as usize {
                    if a[r * gamma + j] > 0.0 {
                        expected.push((a[r * gamma + j], j, r));
                    }
                }
            }
            expected.sort_by(|x, y| y.0.total_cmp(&x.0).then(x.1.cmp(&y.1)).then(x.2.cmp(&y.2)));
            let mut order = Order::default();
            order.fill(&a, &lens, gamma);
            prop_assert_eq!(order.len(), expected.len());
            let mut got = Vec::new();
            while let Some(c) = order.next() {
                got.push((c.a(), c.position(), c.row()));
            }
            prop_assert_eq!(got, expected);
        }
    }
}
