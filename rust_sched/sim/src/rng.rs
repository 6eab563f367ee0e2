//! Counter-based random numbers: a value is a function of its key alone, whatever else was drawn.

/// `splitmix64`'s finaliser.
pub(crate) fn mix(key: u64) -> u64 {
    let mut z = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A number in `(0, 1)` from a seed and two counters.
pub(crate) fn unit(seed: u64, a: u64, b: u64) -> f64 {
    let bits = mix(mix(mix(seed) ^ a) ^ b) >> 11;
    (bits as f64 + 0.5) / (1_u64 << 53) as f64
}

/// A random order of `0..n`.
pub(crate) fn shuffled(n: usize, seed: u64, round: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    for last in (1..n).rev() {
        let other = (unit(seed, round, last as u64) * (last + 1) as f64) as usize;
        order.swap(last, other.min(last));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_uniform_and_differ_by_every_part_of_the_key() {
        let values: Vec<f64> = (0..4000).map(|i| unit(7, i % 50, i / 50)).collect();
        let mean = values.iter().sum::<f64>() / 4000.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
        assert!(values.iter().all(|v| 0.0 < *v && *v < 1.0));
        assert_ne!(unit(7, 1, 2), unit(7, 2, 1));
        assert_ne!(unit(7, 1, 2), unit(8, 1, 2));
    }

    #[test]
    fn an_order_holds_everything_once() {
        let mut order = shuffled(100, 3, 0);
        assert_ne!(order, shuffled(100, 3, 1));
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
    }
}
