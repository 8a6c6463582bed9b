//! Matrices in device memory, the operands of operators: a part of a leased buffer, an element
//! type, rows and columns.

pub use crate::kernels::cpu::elem::DType;
use crate::part::BufferPart;
use leasehold::{BufferView, Error, Result, Runtime, View};

/// `rows` rows of `cols` elements, `ld` elements from one row to the next. Clones share the memory.
///
/// A tensor is a [`View`] of its elements: transfers take it as they take a buffer.
///
/// ```
/// use leasehold::{DeviceId, Runtime, View};
/// use leasehold_operators::{DType, Tensor};
/// # fn main() -> leasehold::Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let x = Tensor::alloc(&runtime, DType::F32, 2, 3)?;
/// assert_eq!((x.rows(), x.cols(), x.bytes()), (2, 3, 24));
/// runtime.stream().upload(x.view(), &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
/// let last = x.slice_rows(1, 1)?;
/// assert_eq!(runtime.to_vec::<f32>(last.view())?, [4.0, 5.0, 6.0]);
///
/// // The elements of an array, a buffer or a part of one; here from the fourth value on.
/// let values = runtime.upload(&[0.0f32; 10])?;
/// let y = Tensor::new(values.slice(4..).view(), DType::F32, 2, 3)?;
/// assert_eq!(y.view().offset(), 16);
/// assert!(Tensor::new(&values, DType::F32, 4, 3).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Tensor {
    /// From the first element to the last.
    part: BufferPart,
    dtype: DType,
    rows: u32,
    cols: u32,
    ld: u32,
}

impl Tensor {
    /// A matrix in `memory`, from its beginning on: in a buffer, an array or a part of one.
    ///
    /// # Errors
    /// `InvalidArgument` if the matrix does not lie in the memory or is not aligned to its
    /// elements.
    pub fn new(memory: impl Into<BufferPart>, dtype: DType, rows: u32, cols: u32) -> Result<Self> {
        let (memory, bytes) = (memory.into(), bytes_of(dtype, rows, cols)?);
        let (offset, len) = (memory.view().offset(), memory.view().len());
        let name = dtype.name();
        if bytes > len {
            return Err(Error::invalid(format!(
                "a {rows}×{cols} matrix of {name} has {bytes} bytes and does not lie in {len} bytes of memory; give fewer rows or more memory"
            )));
        }
        if !offset.is_multiple_of(dtype.bytes() as u64) {
            return Err(Error::invalid(format!(
                "memory at byte {offset} of its buffer is not aligned to {name}; begin at a multiple of {} bytes",
                dtype.bytes()
            )));
        }
        Ok(Self { part: memory.slice(0, bytes)?, dtype, rows, cols, ld: cols })
    }

    /// A new matrix with unspecified contents.
    ///
    /// # Errors
    /// As [`Runtime::alloc`]; `InvalidArgument` for more than 2^64 bytes.
    pub fn alloc(runtime: &Runtime, dtype: DType, rows: u32, cols: u32) -> Result<Self> {
        Self::new(runtime.alloc(bytes_of(dtype, rows, cols)?)?, dtype, rows, cols)
    }

    /// Rows `from..from + rows`, sharing the memory.
    ///
    /// # Errors
    /// `InvalidArgument` beyond the last row.
    pub fn slice_rows(&self, from: u32, rows: u32) -> Result<Self> {
        if from.checked_add(rows).is_none_or(|end| end > self.rows) {
            return Err(Error::invalid(format!(
                "rows {from}..{from}+{rows} do not lie in a matrix of {0} rows; end at row {0} at most",
                self.rows
            )));
        }
        let row = u64::from(self.ld) * self.dtype.bytes() as u64;
        let mut slice = Self { rows, ..self.clone() };
        // Rows without elements begin nowhere.
        let offset = if slice.bytes() == 0 { 0 } else { u64::from(from) * row };
        slice.part = self.part.slice(offset, slice.bytes())?;
        Ok(slice)
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Elements of a row.
    #[must_use]
    pub fn cols(&self) -> u32 {
        self.cols
    }

    /// Elements from one row to the next.
    #[must_use]
    pub fn ld(&self) -> u32 {
        self.ld
    }

    /// Bytes from the first element to the last.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        if self.rows == 0 || self.cols == 0 {
            return 0;
        }
        (u64::from(self.rows - 1) * u64::from(self.ld) + u64::from(self.cols))
            * self.dtype.bytes() as u64
    }
}

impl View for Tensor {
    /// From the first element to the last; between rows that lie apart, what lies there too.
    #[inline]
    fn view(&self) -> BufferView<'_> {
        self.part.view()
    }
}

/// The bytes of a matrix whose rows follow one another.
///
/// # Errors
/// `InvalidArgument` for more than 2^64.
fn bytes_of(dtype: DType, rows: u32, cols: u32) -> Result<u64> {
    (u64::from(rows) * u64::from(cols)).checked_mul(dtype.bytes() as u64).ok_or_else(|| {
        Error::invalid(format!(
            "a {rows}×{cols} matrix of {} has more bytes than there are addresses; make it smaller",
            dtype.name()
        ))
    })
}
