//! Arguments of a call: numbers, texts and shapes. No Python object is trusted to be what it
//! says.

use crate::errors::{Class, invalid};
use crate::layout::MOST_DIMENSIONS;
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;
use std::time::Duration;

/// The package's own error in place of Python's for a value that is none. What the value's own code
/// raised passes as it is.
fn own(py: Python<'_>, what: &str, error: PyErr) -> PyErr {
    let class = if error.is_instance_of::<PyTypeError>(py) {
        Class::ArgumentType
    } else if error.is_instance_of::<PyOverflowError>(py)
        || error.is_instance_of::<PyValueError>(py)
    {
        Class::InvalidArgument
    } else {
        return error;
    };
    let text = error.value(py).str().map(|text| text.to_string_lossy().into_owned());
    because(py, class.error(format!("{what}: {}", text.unwrap_or_default())), error)
}

/// An error with its cause.
pub(crate) fn because(py: Python<'_>, error: PyErr, cause: PyErr) -> PyErr {
    error.set_cause(py, Some(cause));
    error
}

/// A value of a Rust type: a number, a text, a pair.
pub(crate) fn value<'py, T>(of: &Bound<'py, PyAny>, what: &str) -> PyResult<T>
where
    T: FromPyObjectOwned<'py>,
{
    of.extract::<T>().map_err(|error| own(of.py(), what, error.into()))
}

/// A number of 64 bits, with or without a sign.
pub(crate) fn wide(of: &Bound<'_, PyAny>, what: &str) -> PyResult<i128> {
    match of.extract::<i64>() {
        Ok(number) => Ok(number.into()),
        Err(_) => value::<u64>(of, what).map(i128::from),
    }
}

/// The same as [`value`], or nothing for `None`.
pub(crate) fn optional<'py, T>(of: Option<&Bound<'py, PyAny>>, what: &str) -> PyResult<Option<T>>
where
    T: FromPyObjectOwned<'py>,
{
    of.map(|of| value(of, what)).transpose()
}

/// The values of a sequence, of which there are so many at the most. A text is none.
pub(crate) fn list<'py, T>(
    of: &Bound<'py, PyAny>,
    what: &str,
    (most, unit): (usize, &str),
) -> PyResult<Vec<T>>
where
    T: FromPyObjectOwned<'py>,
{
    if of.is_instance_of::<PyString>() {
        return Err(Class::ArgumentType.error(format!("{what}, not a text")));
    }
    let items = of.try_iter().map_err(|error| own(of.py(), what, error))?;
    let mut list = Vec::new();
    // The sequence's own length says nothing.
    for item in items {
        if list.len() == most {
            return Err(invalid(format!("more than {most} {unit}")));
        }
        list.push(value(&item?, what)?);
    }
    Ok(list)
}

/// A number for each dimension.
pub(crate) fn numbers(of: &Bound<'_, PyAny>, what: &str) -> PyResult<Vec<i64>> {
    list(of, what, (MOST_DIMENSIONS, "dimensions"))
}

/// A shape: a number, or a sequence of numbers.
pub(crate) fn shape(of: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    const WHAT: &str = "a shape is a number or a sequence of numbers";
    let py = of.py();
    let shape = match of.extract::<i64>() {
        Ok(one) => vec![one],
        Err(error) if error.is_instance_of::<PyTypeError>(py) => numbers(of, WHAT)?,
        Err(error) => return Err(own(py, WHAT, error)),
    };
    if let Some(negative) = shape.iter().find(|&&n| n < 0) {
        return Err(invalid(format!("a dimension of {negative} elements")));
    }
    Ok(shape)
}

/// A number of bytes, or a text such as `20GiB`. `None` is no limit.
pub(crate) fn budget(of: &Bound<'_, PyAny>) -> PyResult<u64> {
    if of.is_none() {
        return Ok(u64::MAX);
    }
    match of.extract::<String>() {
        Ok(text) => bytes(&text),
        Err(_) => value(of, "a budget is bytes, or a text such as \"20GiB\""),
    }
}

/// The bytes of a text such as `20GiB`.
pub(crate) fn bytes(text: &str) -> PyResult<u64> {
    let wrong = || invalid(format!("a budget is bytes, or a text such as \"20GiB\": {text:?}"));
    let trimmed = text.trim();
    let end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(end);
    let unit: u64 = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(wrong()),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit).ok_or_else(wrong);
    }
    let bytes = number.parse::<f64>().map_err(|_| wrong())? * unit as f64;
    if bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(wrong()) }
}

/// A limit of time in seconds. `None` is no limit.
pub(crate) fn timeout(of: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Duration>> {
    let seconds: Option<f64> = optional(of, "a timeout is a number of seconds")?;
    let timeout = seconds.map(Duration::try_from_secs_f64).transpose();
    timeout.map_err(|error| invalid(error.to_string()))
}
