//! Python binding: `dspark_drafter_suffix._suffix.Automaton`. Strings are passed as (class, length) pairs.

mod automaton;

use automaton::{Automaton as Core, Cursor};
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;

type Place = (u32, u32);

/// Where the match ends, its continuations with their counts, and the sum of these.
type Options = (Place, Vec<(u32, u32)>, u32);

/// A suffix automaton over one text, with counts.
#[pyclass]
struct Automaton {
    core: Core,
}

impl Automaton {
    fn checked(&self, place: Place) -> PyResult<Cursor> {
        let at = Cursor {
            state: place.0,
            length: place.1,
        };
        if self.core.holds(at) {
            return Ok(at);
        }
        Err(PyValueError::new_err(format!(
            "{place:?} is no place in this automaton"
        )))
    }
}

#[pymethods]
impl Automaton {
    #[new]
    fn new(context: u32) -> PyResult<Self> {
        if !(1..=1 << 16).contains(&context) {
            return Err(PyValueError::new_err(format!(
                "context: expected 1 to 65536 tokens, got {context}"
            )));
        }
        Ok(Self {
            core: Core::new(context),
        })
    }

    fn __len__(&self) -> usize {
        self.core.size() as usize
    }

    fn extend(&mut self, ids: Vec<u32>) -> PyResult<()> {
        // a text of n tokens has at most 2 n classes, which are numbered in 32 bits
        if ids.len() as u64 + u64::from(self.core.size()) > 1 << 30 {
            return Err(PyOverflowError::new_err(
                "a text may have 2^30 tokens at most",
            ));
        }
        ids.into_iter().for_each(|token| self.core.push(token));
        Ok(())
    }

    fn matched(&self) -> Place {
        let at = self.core.matched();
        (at.state, at.length)
    }

    fn options(&self, place: Place, most: usize) -> PyResult<Options> {
        let found = self.core.options(self.checked(place)?, most);
        Ok(((found.at.state, found.at.length), found.tokens, found.total))
    }

    fn step(&self, place: Place, token: u32) -> PyResult<Place> {
        let at = self.core.step(self.checked(place)?, token);
        Ok((at.state, at.length))
    }

    fn copy(&self, count: usize) -> (Vec<u32>, Vec<f64>) {
        let (mut tokens, mut shares) = (Vec::with_capacity(count), Vec::with_capacity(count));
        let mut at = self.core.matched();
        for _ in 0..count {
            let found = self.core.options(at, 1);
            let Some(&(token, seen)) = found.tokens.first() else {
                break;
            };
            tokens.push(token);
            shares.push(f64::from(seen) / f64::from(found.total.max(1)));
            at = self.core.step(found.at, token);
        }
        (tokens, shares)
    }
}

#[pymodule]
fn _suffix(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Automaton>()
}
