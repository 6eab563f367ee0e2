//! Sequential Temperature Scaling, applied: a temperature a position divides the logit of each confidence.

use crate::batch::{check_len, check_matrix, check_max_lens, index, rows_of};
use crate::error::Error;

/// `c_k = sigmoid(logit_k / T_k)` and its prefix products, zero at and beyond `max_lens`.
///
/// * `logits`: confidence logits, `[R, gamma]`, f32 or f64; infinite ones are certainties.
/// * `temperatures`: `[gamma]`, positive.
/// * `probs`, `survival`: outputs, `[R, gamma]`.
///
/// # Errors
/// For a wrong length, a NaN logit, or a temperature that is not positive and finite.
///
/// ```
/// use dspark_sched_core::sts_into;
/// let (mut c, mut a) = ([0.0; 2], [0.0; 2]);
/// sts_into(&[0.0_f32, 0.0], &[1.0, 2.0], &[2], &mut c, &mut a)?;
/// assert_eq!((c, a), ([0.5, 0.5], [0.5, 0.25]));
/// # Ok::<(), dspark_sched_core::Error>(())
/// ```
pub fn sts_into<T: Copy + Into<f64>>(
    logits: &[T],
    temperatures: &[f64],
    max_lens: &[i64],
    probs: &mut [f64],
    survival: &mut [f64],
) -> Result<(), Error> {
    let gamma = temperatures.len();
    check_temperatures(temperatures)?;
    check_max_lens(max_lens, gamma)?;
    for (what, got) in [
        ("logits", logits.len()),
        ("probs", probs.len()),
        ("survival", survival.len()),
    ] {
        check_len(what, got, max_lens.len() * gamma)?;
    }
    for (at, (out, logit)) in probs.iter_mut().zip(logits).enumerate() {
        let logit: f64 = (*logit).into();
        if logit.is_nan() {
            let (row, position) = (at / gamma.max(1), at % gamma.max(1));
            return Err(Error::Value {
                what: "logits",
                row,
                position,
                value: logit,
                allowed: "a number",
            });
        }
        *out = logit;
    }
    for row in probs.chunks_exact_mut(gamma.max(1)) {
        for (c, temperature) in row.iter_mut().zip(temperatures) {
            *c = sigmoid(*c / temperature);
        }
    }
    for ((out, c), &max) in survival
        .chunks_exact_mut(gamma.max(1))
        .zip(rows_of(probs, gamma))
        .zip(max_lens)
    {
        prefix_products(c, index(max), out);
    }
    Ok(())
}

/// The same from probabilities: `c'_k = sigmoid(logit(c_k) / T_k)`, `[R, gamma]`; T = 1 leaves c as it is.
///
/// # Errors
/// For a wrong length, a value that is no number from 0 to 1, or a temperature that is not positive and finite.
pub fn scale_into(probs: &[f64], temperatures: &[f64], scaled: &mut [f64]) -> Result<(), Error> {
    let gamma = temperatures.len();
    check_temperatures(temperatures)?;
    let rows = probs.len() / gamma.max(1);
    check_matrix("probs", probs, rows, gamma)?;
    check_len("scaled", scaled.len(), probs.len())?;
    for (out, c) in scaled.chunks_exact_mut(gamma.max(1)).zip(rows_of(probs, gamma)) {
        for ((out, &c), &temperature) in out.iter_mut().zip(c).zip(temperatures) {
            *out = if temperature == 1.0 {
                c
            } else {
                sigmoid((c.ln() - (-c).ln_1p()) / temperature)
            };
        }
    }
    Ok(())
}

/// Prefix products a of confidences c, zero at and beyond `max_lens`, written to `survival`, `[R, gamma]`.
///
/// # Errors
/// For a wrong length or a value out of range.
pub fn survival_into(
    probs: &[f64],
    max_lens: &[i64],
    gamma: usize,
    survival: &mut [f64],
) -> Result<(), Error> {
    check_matrix("probs", probs, max_lens.len(), gamma)?;
    check_len("survival", survival.len(), probs.len())?;
    check_max_lens(max_lens, gamma)?;
    let rows = survival.chunks_exact_mut(gamma.max(1)).zip(rows_of(probs, gamma));
    for ((out, c), &max) in rows.zip(max_lens) {
        prefix_products(c, index(max), out);
    }
    Ok(())
}

fn prefix_products(c: &[f64], len: usize, out: &mut [f64]) {
    let mut a = 1.0;
    for (k, (out, c)) in out.iter_mut().zip(c).enumerate() {
        a *= c;
        *out = if k < len { a } else { 0.0 };
    }
}

pub(crate) fn check_temperatures(temperatures: &[f64]) -> Result<(), Error> {
    match temperatures.iter().find(|t| !(**t > 0.0 && t.is_finite())) {
        None => Ok(()),
        Some(t) => Err(Error::Argument(format!(
            "temperatures: expected positive, finite numbers, got {t}"
        ))),
    }
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 {
        1.0 / (1.0 + (-x).exp())
    } else {
        let e = x.exp();
        e / (1.0 + e)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extremes_are_certainties_and_nan_is_refused() {
        let (mut c, mut a) = ([9.0; 3], [9.0; 3]);
        sts_into(
            &[f64::INFINITY, 800.0, f64::NEG_INFINITY],
            &[2.0; 3],
            &[3],
            &mut c,
            &mut a,
        )
        .unwrap();
        assert_eq!((c, a), ([1.0, 1.0, 0.0], [1.0, 1.0, 0.0]));
        let error = sts_into(&[0.0, f64::NAN, 0.0], &[2.0; 3], &[3], &mut c, &mut a).unwrap_err();
        assert_eq!(error.to_string(), "logits[0, 1]: expected a number, got NaN");
        assert!(sts_into(&[0.0; 3], &[2.0, 0.0, 1.0], &[3], &mut c, &mut a).is_err());
        assert!(sts_into(&[0.0; 2], &[2.0; 3], &[3], &mut c, &mut a).is_err());
    }

    #[test]
    fn probabilities_and_logits_agree() {
        let c = [0.0_f64, 1e-12, 0.3, 0.97, 1.0, 0.5];
        let temperatures = [0.5, 2.0, 3.0];
        let logits: Vec<f64> = c.iter().map(|c| (c / (1.0 - c)).ln()).collect();
        let (mut scaled, mut probs, mut survival) = ([0.0; 6], [0.0; 6], [0.0; 6]);
        scale_into(&c, &temperatures, &mut scaled).unwrap();
        sts_into(&logits, &temperatures, &[3, 1], &mut probs, &mut survival).unwrap();
        for (x, y) in scaled.iter().zip(probs) {
            assert!((x - y).abs() < 1e-9, "{x} {y}");
        }
        assert_eq!(survival[4..], [0.0, 0.0]);
        scale_into(&c, &[1.0; 3], &mut scaled).unwrap();
        assert_eq!(scaled, c);
    }
}
