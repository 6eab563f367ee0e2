//! Candidates in Algorithm 1's order: descending survival, ties by position, then row.
//!
//! Rows are non-increasing, so this order is the merge of the rows by their heads: what comes next is decided by the
//! first position of each row that is not admitted yet. The buckets below are how it is computed, not what it depends
//! on. They are sorted when the walk reaches them, so a walk that stops early never pays for the rest.

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
    /// Take the candidates `j < max_lens[r]`, `a > 0`, of a validated row-major matrix.
    pub(crate) fn fill(&mut self, survival: &[f64], max_lens: &[i64], gamma: usize) {
        self.rewind();
        self.ends.clear();
        self.candidates.clear();
        if gamma == 0 {
            return;
        }
        let total = self.measure(survival, max_lens, gamma);
        if total == 0 {
            return;
        }
        self.count(survival, max_lens, gamma);
        self.candidates.resize(total, Candidate { bits: 0, tie: 0 });
        // Column by column: equal survivals then arrive in tie order, which sorts in linear time.
        for position in 0..gamma {
            let column = survival.iter().skip(position).step_by(gamma);
            for (row, (&a, &len)) in column.zip(max_lens).enumerate() {
                if a > 0.0 && (position as i64) < len {
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
    pub(crate) fn next(&mut self) -> Option<Candidate> {
        while self.at == self.end {
            self.end = *self.ends.get(self.bucket)? as usize;
            self.bucket += 1;
            if self.end - self.at > 1
                && let Some(slice) = self.candidates.get_mut(self.at..self.end)
            {
                slice.sort_unstable_by(|x, y| y.cmp(x));
            }
        }
        let next = self.candidates.get(self.at).copied();
        self.at += 1;
        next
    }

    /// Number of candidates, and the map from survival to bucket for their range.
    fn measure(&mut self, survival: &[f64], max_lens: &[i64], gamma: usize) -> usize {
        let (mut total, mut top, mut bottom) = (0, 0.0_f64, 1.0_f64);
        for (row, &len) in survival.chunks_exact(gamma).zip(max_lens) {
            let row = row.get(..crate::batch::index(len)).unwrap_or(row);
            let live = match row.last() {
                Some(&last) if last > 0.0 => row.len(),
                _ => row.partition_point(|&a| a > 0.0),
            };
            if let (Some(&first), Some(&last)) = (row.first(), row.get(..live).and_then(<[f64]>::last)) {
                total += live;
                top = top.max(first);
                bottom = bottom.min(last);
            }
        }
        let buckets = total.next_power_of_two().clamp(1, MAX_BUCKETS);
        self.top = top;
        self.scale = (buckets - 1) as f64 / (top - bottom).max(f64::MIN_POSITIVE);
        self.ends.resize(if total == 0 { 0 } else { buckets }, 0);
        total
    }

    /// Where each bucket begins.
    fn count(&mut self, survival: &[f64], max_lens: &[i64], gamma: usize) {
        for (row, &len) in survival.chunks_exact(gamma).zip(max_lens) {
            for &a in row.iter().take(crate::batch::index(len)) {
                if a > 0.0 {
                    let bucket = self.bucket_of(a);
                    if let Some(n) = self.ends.get_mut(bucket) {
                        *n += 1;
                    }
                }
            }
        }
        let mut begin = 0;
        for n in &mut self.ends {
            (*n, begin) = (begin, begin + *n);
        }
    }

    /// Weakly falling in `a`, whatever the rounding, so buckets never disagree with the order.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn bucket_of(&self, a: f64) -> usize {
        (((self.top - a) * self.scale) as usize).min(self.ends.len().saturating_sub(1))
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
