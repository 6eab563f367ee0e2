//! numpy arrays as slices: shapes, layout and dtype are checked here, and nothing is ever copied.

use dspark_sched_core::Error;
use numpy::{
    Element, PyArrayDescrMethods, PyReadonlyArrayDyn, PyReadwriteArrayDyn, PyUntypedArray,
    PyUntypedArrayMethods,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

pub(crate) fn value_error(error: Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// A Python integer of at least 0.
pub(crate) struct Count(pub(crate) u64);

impl FromPyObject<'_, '_> for Count {
    type Error = PyErr;

    fn extract(obj: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let index = obj
            .call_method0("__index__")
            .map_err(|_| PyTypeError::new_err(format!("expected an integer, got {}", type_name(&obj))))?;
        index.extract::<u64>().map(Count).map_err(|_| {
            PyValueError::new_err(format!("expected an integer from 0 to {}, got {index}", u64::MAX))
        })
    }
}

/// The same for a parameter with a default.
pub(crate) fn count(obj: &Bound<'_, PyAny>) -> PyResult<u64> {
    obj.extract::<Count>().map(|count| count.0)
}

fn type_name(obj: &Bound<'_, PyAny>) -> String {
    obj.get_type()
        .name()
        .map_or_else(|_| "an object".to_string(), |n| n.to_string())
}

/// Check that `obj` is a C-contiguous array of T with so many dimensions; returns its shape.
fn check<T: Element>(what: &str, obj: &Bound<'_, PyAny>, ndim: usize) -> PyResult<Vec<usize>> {
    let array = obj.cast::<PyUntypedArray>().map_err(|_| {
        PyTypeError::new_err(format!("{what}: expected a numpy array, got {}", type_name(obj)))
    })?;
    if array.ndim() != ndim {
        return Err(PyValueError::new_err(format!(
            "{what}: expected {ndim} dimensions, got shape {:?}",
            array.shape()
        )));
    }
    let wanted = T::get_dtype(obj.py());
    if !array.dtype().is_equiv_to(&wanted) {
        return Err(PyTypeError::new_err(format!(
            "{what}: expected dtype {wanted}, got {}",
            array.dtype()
        )));
    }
    if !array.is_c_contiguous() {
        return Err(PyValueError::new_err(format!(
            "{what}: expected a C-contiguous array (numpy.ascontiguousarray makes one)"
        )));
    }
    Ok(array.shape().to_vec())
}

/// A borrowed array of any shape.
pub(crate) struct Input<'py, T: Element> {
    array: PyReadonlyArrayDyn<'py, T>,
    shape: Vec<usize>,
}

impl<'py, T: Element> Input<'py, T> {
    pub(crate) fn new(what: &str, obj: &Bound<'py, PyAny>, ndim: usize) -> PyResult<Self> {
        let shape = check::<T>(what, obj, ndim)?;
        Ok(Self {
            array: obj.extract()?,
            shape,
        })
    }

    /// A matrix of so many rows.
    pub(crate) fn with_rows(what: &str, obj: &Bound<'py, PyAny>, rows: usize) -> PyResult<Self> {
        let input = Self::new(what, obj, 2)?;
        same_shape(what, &input.shape, rows, input.columns())?;
        Ok(input)
    }

    /// A matrix of so many columns.
    pub(crate) fn with_columns(what: &str, obj: &Bound<'py, PyAny>, columns: usize) -> PyResult<Self> {
        let input = Self::new(what, obj, 2)?;
        same_shape(what, &input.shape, input.rows(), columns)?;
        Ok(input)
    }

    /// A matrix of just this shape.
    pub(crate) fn with_shape(
        what: &str,
        obj: &Bound<'py, PyAny>,
        rows: usize,
        columns: usize,
    ) -> PyResult<Self> {
        let input = Self::new(what, obj, 2)?;
        same_shape(what, &input.shape, rows, columns)?;
        Ok(input)
    }

    /// Rows of a matrix, or entries of a vector.
    pub(crate) fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or_default()
    }

    /// Columns of a matrix.
    pub(crate) fn columns(&self) -> usize {
        self.shape.get(1).copied().unwrap_or_default()
    }

    pub(crate) fn slice(&self) -> PyResult<&[T]> {
        Ok(self.array.as_slice()?)
    }
}

fn same_shape(what: &str, shape: &[usize], rows: usize, columns: usize) -> PyResult<()> {
    if shape == [rows, columns] {
        return Ok(());
    }
    Err(PyValueError::new_err(format!(
        "{what}: expected shape [{rows}, {columns}], got {shape:?}"
    )))
}

/// An array that results are written to.
pub(crate) struct Output<'py, T: Element> {
    array: PyReadwriteArrayDyn<'py, T>,
}

impl<'py, T: Element> Output<'py, T> {
    pub(crate) fn vector(what: &str, obj: &Bound<'py, PyAny>) -> PyResult<Self> {
        check::<T>(what, obj, 1)?;
        Self::borrow(what, obj)
    }

    pub(crate) fn matrix(what: &str, obj: &Bound<'py, PyAny>, rows: usize, columns: usize) -> PyResult<Self> {
        same_shape(what, &check::<T>(what, obj, 2)?, rows, columns)?;
        Self::borrow(what, obj)
    }

    fn borrow(what: &str, obj: &Bound<'py, PyAny>) -> PyResult<Self> {
        let array = obj.extract().map_err(|e| {
            PyValueError::new_err(format!(
                "{what}: expected a writeable array that is no input ({e})"
            ))
        })?;
        Ok(Self { array })
    }

    pub(crate) fn slice(&mut self) -> PyResult<&mut [T]> {
        Ok(self.array.as_slice_mut()?)
    }
}
