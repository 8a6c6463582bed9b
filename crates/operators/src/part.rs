//! Parts of buffers that an operator holds.

use leasehold::{Array, Buffer, BufferView, Error, Lease, Result, View};

/// A part of a buffer, with a lease on the buffer. Clones share the memory.
///
/// Made from whatever is a [`View`]: a buffer, an array, a [`Tensor`](crate::Tensor), a part of one
/// of them. It begins and ends where the view does.
///
/// ```
/// use leasehold::{DeviceId, Runtime, View};
/// use leasehold_operators::BufferPart;
/// # fn main() -> leasehold::Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let ids = runtime.upload(&[1i32, 2, 3, 4])?;
/// let part = BufferPart::from(ids.slice(2..).view());
/// assert_eq!(runtime.to_vec::<i32>(part.view())?, [3, 4]);
/// assert_eq!(runtime.to_vec::<i32>(part.slice(4, 4)?.view())?, [4]);
/// assert_eq!(BufferPart::from(&ids).view().len(), 16);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct BufferPart {
    lease: Lease<Buffer>,
    offset: u64,
    len: u64,
}

impl BufferPart {
    /// `len` bytes of this part from its byte `offset` on.
    ///
    /// # Errors
    /// `InvalidArgument` if the range does not lie in this part.
    pub fn slice(&self, offset: u64, len: u64) -> Result<Self> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::invalid(format!(
                "{len} bytes from byte {offset} on do not lie in a part of {0} bytes; end at byte {0} at most",
                self.len
            )));
        }
        Ok(Self { lease: self.lease.clone(), offset: self.offset + offset, len })
    }
}

impl View for BufferPart {
    #[inline]
    fn view(&self) -> BufferView<'_> {
        // Checked when the part was made; a buffer's length does not change.
        self.lease.view().narrowed(self.offset, self.len)
    }
}

impl From<BufferView<'_>> for BufferPart {
    fn from(view: BufferView<'_>) -> Self {
        Self { lease: view.buffer().clone(), offset: view.offset(), len: view.len() }
    }
}

impl<V: View> From<&V> for BufferPart {
    fn from(view: &V) -> Self {
        view.view().into()
    }
}

impl From<Lease<Buffer>> for BufferPart {
    fn from(lease: Lease<Buffer>) -> Self {
        let len = lease.len();
        Self { lease, offset: 0, len }
    }
}

impl<T> From<Array<T>> for BufferPart {
    fn from(array: Array<T>) -> Self {
        array.into_buffer().into()
    }
}
