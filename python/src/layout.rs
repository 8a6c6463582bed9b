//! Where the elements of an array lie in its memory: type, shape, strides, offset.

use crate::dtype::DType;
use crate::errors::invalid;
use pyo3::prelude::*;

/// Dimensions of an array, at the most: NumPy's bound.
pub(crate) const MOST_DIMENSIONS: usize = 64;

/// Where elements lie.
#[derive(Clone)]
pub(crate) struct Layout {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<i64>,
    /// In elements.
    pub(crate) strides: Vec<i64>,
    /// Bytes from the memory's beginning to the first element.
    pub(crate) offset: u64,
}

/// The number of elements of a shape, if a number counts their bytes.
pub(crate) fn elements(shape: &[i64], dtype: DType) -> PyResult<i64> {
    // An empty dimension makes the others irrelevant.
    if shape.contains(&0) {
        return Ok(0);
    }
    let count = shape.iter().try_fold(1i64, |n, &d| n.checked_mul(d));
    let fits = count.filter(|n| n.checked_mul(dtype.size).is_some());
    fits.ok_or_else(|| invalid("the array has more bytes than there are addresses"))
}

/// The strides of elements without gaps, the last dimension fastest.
pub(crate) fn dense(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i].max(1);
    }
    strides
}

impl Layout {
    /// Elements without gaps.
    pub(crate) fn dense(dtype: DType, shape: Vec<i64>, offset: u64) -> PyResult<Self> {
        elements(&shape, dtype)?;
        // No product overflows: empty dimensions count as one, and so are bounded here.
        let bounded: Vec<i64> = shape.iter().map(|&d| d.max(1)).collect();
        elements(&bounded, dtype)?;
        Ok(Self { dtype, strides: dense(&shape), shape, offset })
    }

    pub(crate) fn count(&self) -> i64 {
        if self.shape.contains(&0) { 0 } else { self.shape.iter().product() }
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.count() * self.dtype.size) as u64
    }

    /// Whether the elements follow one another without gaps, the last dimension fastest.
    pub(crate) fn is_dense(&self) -> bool {
        self.follow((0..self.shape.len()).rev())
    }

    /// Whether they follow one another without gaps, the first dimension fastest.
    pub(crate) fn is_dense_by_columns(&self) -> bool {
        self.follow(0..self.shape.len())
    }

    fn follow(&self, mut dimensions: impl Iterator<Item = usize>) -> bool {
        let mut next = 1;
        self.count() == 0
            || dimensions.all(|i| {
                let follows = self.shape[i] == 1 || self.strides[i] == next;
                next *= self.shape[i];
                follows
            })
    }

    pub(crate) fn byte_strides(&self) -> Vec<i64> {
        self.strides.iter().map(|s| s * self.dtype.size).collect()
    }

    /// The bytes as one range, for an operation on all of them.
    pub(crate) fn range(&self) -> PyResult<(u64, u64)> {
        if self.is_dense() {
            Ok((self.offset, self.bytes()))
        } else {
            Err(invalid("the elements have gaps between them; let their library copy them first"))
        }
    }

    /// The shape as Python writes it, for messages.
    pub(crate) fn shown(shape: &[i64]) -> String {
        match shape {
            [one] => format!("({one},)"),
            _ => format!("({})", shape.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")),
        }
    }
}
