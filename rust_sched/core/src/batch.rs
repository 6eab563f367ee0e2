//! The validated input of a plan.

use crate::error::Error;

/// Largest token count that a batch or a cost table may name; sums of such counts stay exact in f64.
pub const MAX_TOKENS: u64 = 1 << 40;

/// Survivals of R drafts and what else a scheduler may read. Borrowed: nothing is copied.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    survival: &'a [f64],
    max_lens: &'a [i64],
    gamma: usize,
    base_tokens: u64,
    context: u64,
    groups: Option<&'a [i64]>,
}

impl<'a> Batch<'a> {
    /// Check and wrap the input of a plan.
    ///
    /// * `survival`: `a_{r,j}`, `[R, gamma]` row-major, in `[0, 1]`, non-increasing along a row.
    /// * `max_lens`: longest prefix of each row that may be verified, `[R]`, in `0..=gamma`.
    /// * `base_tokens`: tokens executed at `l = 0` (anchors, pending, prefill): at least R.
    /// * `context`: longest context of the batch in tokens.
    ///
    /// # Errors
    /// For a wrong length, NaN, a value out of range, or a rising row.
    ///
    /// ```
    /// use dspark_sched_core::Batch;
    /// assert!(Batch::new(&[0.8, 0.4], &[2], 2, 1, 0).is_ok());
    /// assert!(Batch::new(&[0.8, 0.9], &[2], 2, 1, 0).is_err());
    /// assert!(Batch::new(&[f64::NAN, 0.0], &[2], 2, 1, 0).is_err());
    /// ```
    pub fn new(
        survival: &'a [f64],
        max_lens: &'a [i64],
        gamma: usize,
        base_tokens: u64,
        context: u64,
    ) -> Result<Self, Error> {
        let rows = max_lens.len();
        check_size(rows, gamma)?;
        check_matrix("survival", survival, rows, gamma)?;
        for (row, values) in rows_of(survival, gamma).enumerate() {
            if let Some(position) = values.windows(2).position(|pair| matches!(pair, [a, b] if b > a)) {
                return Err(Error::Rising {
                    row,
                    position: position + 1,
                });
            }
        }
        check_max_lens(max_lens, gamma)?;
        if base_tokens < rows as u64 || base_tokens > MAX_TOKENS {
            return Err(Error::Argument(format!(
                "base_tokens: expected {rows} (an anchor a row) to {MAX_TOKENS}, got {base_tokens}"
            )));
        }
        Ok(Self {
            survival,
            max_lens,
            gamma,
            base_tokens,
            context,
            groups: None,
        })
    }

    /// The same batch, with rows of one `group` sharing their running averages (one verifier and temperature).
    ///
    /// # Errors
    /// If `groups` does not have R entries.
    pub fn with_groups(mut self, groups: &'a [i64]) -> Result<Self, Error> {
        check_len("groups", groups.len(), self.rows())?;
        self.groups = Some(groups);
        Ok(self)
    }

    /// R.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.max_lens.len()
    }

    /// Block size.
    #[must_use]
    pub fn gamma(&self) -> usize {
        self.gamma
    }

    /// Tokens executed at `l = 0`.
    #[must_use]
    pub fn base_tokens(&self) -> u64 {
        self.base_tokens
    }

    /// Longest context of the batch in tokens.
    #[must_use]
    pub fn context(&self) -> u64 {
        self.context
    }

    pub(crate) fn survival(&self) -> &'a [f64] {
        self.survival
    }

    pub(crate) fn max_lens(&self) -> &'a [i64] {
        self.max_lens
    }

    /// Rows with the part of them that may be verified.
    pub(crate) fn drafts(&self) -> impl Iterator<Item = &'a [f64]> + use<'a> {
        rows_of(self.survival, self.gamma)
            .chain(std::iter::repeat(&[][..]))
            .zip(self.max_lens)
            .map(|(row, &len)| row.get(..index(len)).unwrap_or(row))
    }

    pub(crate) fn group(&self, row: usize) -> i64 {
        self.groups.and_then(|g| g.get(row)).copied().unwrap_or(0)
    }

    pub(crate) fn check_lens(&self, lens: &[i64]) -> Result<(), Error> {
        check_len("verify_lens", lens.len(), self.rows())
    }
}

/// A length that validation has bounded to `0..=gamma`.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub(crate) fn index(len: i64) -> usize {
    len.max(0) as usize
}

/// Rows of a row-major matrix; none for `gamma == 0`.
pub(crate) fn rows_of(matrix: &[f64], gamma: usize) -> std::slice::ChunksExact<'_, f64> {
    matrix.chunks_exact(gamma.max(1))
}

pub(crate) fn check_len(what: &'static str, got: usize, expected: usize) -> Result<(), Error> {
    if got == expected {
        Ok(())
    } else {
        Err(Error::Shape { what, expected, got })
    }
}

fn check_size(rows: usize, gamma: usize) -> Result<(), Error> {
    match rows.checked_mul(gamma) {
        Some(n) if n <= u32::MAX as usize && rows <= u32::MAX as usize => Ok(()),
        _ => Err(Error::Argument(format!(
            "{rows} rows of {gamma} drafts are too many to plan"
        ))),
    }
}

/// Length and values in `[0, 1]` of a row-major `[rows, gamma]` matrix.
pub(crate) fn check_matrix(what: &'static str, m: &[f64], rows: usize, gamma: usize) -> Result<(), Error> {
    check_len(what, m.len(), rows * gamma)?;
    if let Some(at) = m.iter().position(|v| !(0.0..=1.0).contains(v)) {
        let value = m.get(at).copied().unwrap_or(f64::NAN);
        let (row, position) = (at / gamma.max(1), at % gamma.max(1));
        return Err(Error::Value {
            what,
            row,
            position,
            value,
            allowed: "a number from 0 to 1",
        });
    }
    Ok(())
}

pub(crate) fn check_max_lens(max_lens: &[i64], gamma: usize) -> Result<(), Error> {
    check_lens_of("max_lens", max_lens, gamma)
}

pub(crate) fn check_lens_of(what: &'static str, lens: &[i64], gamma: usize) -> Result<(), Error> {
    let top = i64::try_from(gamma).unwrap_or(i64::MAX);
    match lens.iter().position(|l| !(0..=top).contains(l)) {
        None => Ok(()),
        Some(row) => Err(Error::Argument(format!(
            "{what}[{row}]: expected 0 to {gamma}, got {}",
            lens.get(row).copied().unwrap_or_default()
        ))),
    }
}
