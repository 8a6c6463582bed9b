//! Typed memory: arrays of values on a device, and views of a part of them.
//!
//! The bytes of an array may be anything, as the bytes of a buffer are: a kernel may have written
//! them, or nobody. So values come to the host by copies alone, into types for which every pattern
//! of bytes is a value ([`AnyBitPattern`](bytemuck::AnyBitPattern)), and go to the device from
//! types without padding ([`NoUninit`](bytemuck::NoUninit)).

use crate::view::{BufferView, Operand, View, bounds};
use leasehold_alloc::Buffer;
use leasehold_core::{Error, Lease, Result};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, RangeBounds};

/// Values of one type in the memory of a device: a typed lease. Clones are the same array.
///
/// An array is a [`Lease`] of its buffer with a length in values. It dereferences to the lease, so
/// every function that takes a buffer takes an array too. The bytes alone decide whether a type
/// fits. Only copies to the host, and the kernels that are given the array, read device memory as
/// `T`.
///
/// ```
/// use leasehold::{DeviceId, Runtime, View};
/// # fn main() -> leasehold::Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let x = runtime.upload(&[1.0f32, 2.0, 3.0, 4.0])?;
/// let y = runtime.zeros::<f32>(4)?;
/// runtime.stream().copy(y.slice(..2).view(), x.slice(2..).view())?;
/// assert_eq!(runtime.to_vec(&y)?, [3.0, 4.0, 0.0, 0.0]);
/// runtime.stream().fill_with(y.slice(1..3), 9.0)?;
/// assert_eq!(runtime.to_vec(y.slice(1..))?, [9.0, 9.0, 0.0]);
/// assert!(y.as_view().try_slice(3..5).is_err());
/// # Ok(())
/// # }
/// ```
#[doc(alias("TypedBuffer", "CudaSlice", "DeviceArray"))]
pub struct Array<T> {
    lease: Lease<Buffer>,
    _values: PhantomData<fn() -> T>,
}

impl<T> Array<T> {
    /// The bytes of `len` values.
    ///
    /// # Errors
    /// `InvalidArgument` for more bytes than a number counts.
    pub(crate) fn bytes_of(len: usize) -> Result<u64> {
        len.checked_mul(size_of::<T>()).map(|bytes| bytes as u64).ok_or_else(|| {
            Error::invalid(format!(
                "{len} values of {} bytes are more bytes than there are addresses; allocate fewer",
                size_of::<T>()
            ))
        })
    }

    /// The buffer as an array: all of its bytes are values.
    ///
    /// # Errors
    /// `InvalidArgument` when its length is no multiple of a value's.
    pub fn from_buffer(lease: Lease<Buffer>) -> Result<Self> {
        if !lease.len().is_multiple_of(size_of::<T>() as u64) {
            return Err(no_whole_number::<T>(lease.len()));
        }
        Ok(Self { lease, _values: PhantomData })
    }

    /// The array as bytes.
    pub fn into_buffer(self) -> Lease<Buffer> {
        self.lease
    }

    /// The array's buffer, which counts bytes.
    pub fn buffer(&self) -> &Lease<Buffer> {
        &self.lease
    }

    /// How many values.
    #[must_use]
    pub fn len(&self) -> usize {
        (self.lease.len() as usize).checked_div(size_of::<T>()).unwrap_or(0)
    }

    /// Returns whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of it.
    #[must_use]
    pub fn as_view(&self) -> ArrayView<'_, T> {
        ArrayView { view: self.lease.view(), _values: PhantomData }
    }

    /// Some of the values.
    ///
    /// # Panics
    /// When the range does not lie in the array, as a slice of the host's does.
    #[track_caller]
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> ArrayView<'_, T> {
        self.as_view().slice(range)
    }
}

impl<T> Deref for Array<T> {
    type Target = Lease<Buffer>;

    #[inline]
    fn deref(&self) -> &Lease<Buffer> {
        &self.lease
    }
}

impl<T> Clone for Array<T> {
    #[inline]
    fn clone(&self) -> Self {
        Self { lease: self.lease.clone(), _values: PhantomData }
    }
}

impl<T> View for Array<T> {
    #[inline]
    fn view(&self) -> BufferView<'_> {
        self.lease.view()
    }
}

impl<T> From<Array<T>> for Lease<Buffer> {
    fn from(array: Array<T>) -> Self {
        array.lease
    }
}

impl<T> fmt::Debug for Array<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Array<{}>({} values, {:?})",
            std::any::type_name::<T>(),
            self.len(),
            self.lease.handle()
        )
    }
}

/// Some values of an [`Array`]: a [`BufferView`] that counts values.
pub struct ArrayView<'a, T> {
    view: BufferView<'a>,
    _values: PhantomData<fn() -> T>,
}

impl<'a, T> ArrayView<'a, T> {
    pub(crate) fn from_view(view: BufferView<'a>) -> Result<Self> {
        if !view.len().is_multiple_of(size_of::<T>() as u64) {
            return Err(no_whole_number::<T>(view.len()));
        }
        Ok(Self { view, _values: PhantomData })
    }

    /// How many values.
    #[must_use]
    pub fn len(self) -> usize {
        (self.view.len() as usize).checked_div(size_of::<T>()).unwrap_or(0)
    }

    /// Returns whether there is none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Some of the values.
    ///
    /// # Panics
    /// When the range does not lie in the view.
    #[track_caller]
    #[must_use]
    pub fn slice(self, range: impl RangeBounds<usize>) -> Self {
        match self.try_slice(range) {
            Ok(part) => part,
            Err(e) => panic!("{e}"),
        }
    }

    /// As [`slice`](Self::slice), which says so when the range does not lie in the view.
    ///
    /// # Errors
    /// `InvalidArgument` then.
    pub fn try_slice(self, range: impl RangeBounds<usize>) -> Result<Self> {
        let (from, to) = bounds(range, self.len(), "values")?;
        let size = size_of::<T>() as u64;
        // Within the view: no product is larger than its bytes.
        let view = self.view.narrowed(from as u64 * size, (to - from) as u64 * size);
        Ok(Self { view, _values: PhantomData })
    }

    /// Its bytes.
    #[inline]
    #[must_use]
    pub fn view(self) -> BufferView<'a> {
        self.view
    }

    /// The operation reads it.
    #[inline]
    #[must_use]
    pub fn read(self) -> Operand<'a> {
        self.view.read()
    }

    /// The operation writes all of it and reads none of it.
    #[inline]
    #[must_use]
    pub fn write(self) -> Operand<'a> {
        self.view.write()
    }

    /// The operation reads and writes it.
    #[inline]
    #[must_use]
    pub fn read_write(self) -> Operand<'a> {
        self.view.read_write()
    }
}

impl<T> Clone for ArrayView<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for ArrayView<'_, T> {}

impl<T> View for ArrayView<'_, T> {
    #[inline]
    fn view(&self) -> BufferView<'_> {
        self.view
    }
}

impl<'a, T> From<&'a Array<T>> for ArrayView<'a, T> {
    fn from(array: &'a Array<T>) -> Self {
        array.as_view()
    }
}

impl<'a, T> TryFrom<BufferView<'a>> for ArrayView<'a, T> {
    type Error = Error;

    /// As [`BufferView::values`].
    fn try_from(view: BufferView<'a>) -> Result<Self> {
        ArrayView::from_view(view)
    }
}

impl<'a, T> TryFrom<&'a Lease<Buffer>> for ArrayView<'a, T> {
    type Error = Error;

    /// As [`BufferView::values`], of the whole buffer.
    fn try_from(buffer: &'a Lease<Buffer>) -> Result<Self> {
        ArrayView::from_view(buffer.view())
    }
}

impl<T> fmt::Debug for ArrayView<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ArrayView<{}>({} values, {:?})",
            std::any::type_name::<T>(),
            self.len(),
            self.view
        )
    }
}

impl<'a> BufferView<'a> {
    /// The bytes as values of one type.
    ///
    /// # Errors
    /// `InvalidArgument` when their number is no multiple of a value's.
    pub fn values<T>(self) -> Result<ArrayView<'a, T>> {
        ArrayView::from_view(self)
    }
}

#[cold]
fn no_whole_number<T>(bytes: u64) -> Error {
    Error::invalid(format!(
        "{bytes} bytes are no whole number of values of {} bytes; take a part that is, or another type",
        size_of::<T>()
    ))
}
