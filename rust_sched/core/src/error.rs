//! What a caller can get wrong.

use std::fmt;

/// Why an input was refused. Every variant is the caller's mistake, and `Display` says what and where.
#[derive(Debug, Clone, PartialEq)]
pub enum Error {
    /// An array has another length than its neighbours imply.
    Shape {
        /// Name of the array.
        what: &'static str,
        /// Length that the other arguments imply.
        expected: usize,
        /// Length that was given.
        got: usize,
    },
    /// An entry of a matrix is NaN or outside its range.
    Value {
        /// Name of the array.
        what: &'static str,
        /// Row of the entry.
        row: usize,
        /// Column of the entry, from 0.
        position: usize,
        /// The entry.
        value: f64,
        /// What is allowed, in words.
        allowed: &'static str,
    },
    /// Survival rises along a row, so it can't be a product of probabilities.
    Rising {
        /// Row of the entry.
        row: usize,
        /// Column of the entry that is above its left neighbour, from 0.
        position: usize,
    },
    /// A cost table is malformed.
    Cost(String),
    /// Another argument is out of range or contradicts its neighbours.
    Argument(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shape { what, expected, got } => {
                write!(f, "{what}: expected {expected} entries, got {got}")
            }
            Self::Value {
                what,
                row,
                position,
                value,
                allowed,
            } => {
                write!(f, "{what}[{row}, {position}]: expected {allowed}, got {value}")
            }
            Self::Rising { row, position } => write!(
                f,
                "survival[{row}, {position}] is above its left neighbour; survival must be non-increasing along a row"
            ),
            Self::Cost(message) | Self::Argument(message) => f.write_str(message),
        }
    }
}

impl std::error::Error for Error {}
