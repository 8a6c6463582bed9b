//! Matrices in device memory, the operands of operators: a leased buffer, an element type, rows and
//! columns.

pub use crate::kernels::cpu::elem::DType;
use leasehold::{Buffer, Error, Lease, Result, Runtime};

/// `rows` rows of `cols` elements, `ld` elements from one row to the next. Clones share the memory.
///
/// ```
/// use leasehold::{DeviceId, Runtime};
/// use leasehold_operators::{DType, Tensor};
/// # fn main() -> leasehold::Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let x = Tensor::alloc(&runtime, DType::F32, 2, 3)?;
/// assert_eq!((x.rows(), x.cols(), x.bytes()), (2, 3, 24));
/// assert!(Tensor::new(x.buffer().clone(), 0, DType::F32, 3, 3).is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Tensor {
    buffer: Lease<Buffer>,
    offset: u64,
    dtype: DType,
    rows: u32,
    cols: u32,
    ld: u32,
}

impl Tensor {
    /// A matrix in `buffer` from byte `offset` on.
    ///
    /// # Errors
    /// `InvalidArgument` if the matrix does not lie in the buffer or is not aligned to its
    /// elements.
    pub fn new(
        buffer: Lease<Buffer>,
        offset: u64,
        dtype: DType,
        rows: u32,
        cols: u32,
    ) -> Result<Self> {
        let bytes = (u64::from(rows) * u64::from(cols)).checked_mul(dtype.bytes() as u64);
        if bytes.and_then(|bytes| offset.checked_add(bytes)).is_none_or(|end| end > buffer.len()) {
            return Err(Error::invalid(format!(
                "a {rows}×{cols} matrix of {} at byte {offset} does not lie in a buffer of {} bytes",
                dtype.name(),
                buffer.len()
            )));
        }
        if !offset.is_multiple_of(dtype.bytes() as u64) {
            return Err(Error::invalid(format!(
                "byte {offset} is not aligned to {}",
                dtype.name()
            )));
        }
        Ok(Self { buffer, offset, dtype, rows, cols, ld: cols })
    }

    /// A new matrix with unspecified contents.
    ///
    /// # Errors
    /// As [`Runtime::alloc`]; `InvalidArgument` for more than 2^64 bytes.
    pub fn alloc(runtime: &Runtime, dtype: DType, rows: u32, cols: u32) -> Result<Self> {
        let bytes = (u64::from(rows) * u64::from(cols)).checked_mul(dtype.bytes() as u64);
        let bytes = bytes
            .ok_or_else(|| Error::invalid(format!("a {rows}×{cols} matrix of {}", dtype.name())))?;
        Self::new(runtime.alloc(bytes)?, 0, dtype, rows, cols)
    }

    /// Rows `from..from + rows`, sharing the memory.
    ///
    /// # Errors
    /// `InvalidArgument` beyond the last row.
    pub fn slice_rows(&self, from: u32, rows: u32) -> Result<Self> {
        if from.checked_add(rows).is_none_or(|end| end > self.rows) {
            return Err(Error::invalid(format!(
                "rows {from}..{from}+{rows} of a matrix of {} rows",
                self.rows
            )));
        }
        let offset = self.offset + u64::from(from) * u64::from(self.ld) * self.dtype.bytes() as u64;
        Ok(Self { offset, rows, ..self.clone() })
    }

    /// The matrix's memory.
    pub fn buffer(&self) -> &Lease<Buffer> {
        &self.buffer
    }

    /// The byte offset in the buffer.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
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
