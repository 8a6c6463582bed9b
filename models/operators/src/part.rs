//! Parts of buffers that an operator holds.

use leasehold::{Access, Array, Buffer, BufferView, Error, Growing, Lease, Operand, Result, View};

/// A part of a buffer, with a lease on the buffer. Clones share the memory.
///
/// Made from whatever is a [`View`]: a buffer, an array, a [`Tensor`](crate::Tensor), a part of one
/// of them. It begins and ends where the view does. Or all of [`Growing<u8>`], which kernels that
/// keep to their limits bind as one.
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
    memory: Memory,
    offset: u64,
    len: u64,
}

#[derive(Debug, Clone)]
enum Memory {
    Buffer(Lease<Buffer>),
    /// All of them, or no byte.
    Growing(Growing<u8>),
}

impl BufferPart {
    /// Bytes from the buffer's beginning.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes, with those that have no memory yet.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    #[inline]
    pub(crate) fn operand(&self, access: Access) -> Operand<'_> {
        match &self.memory {
            Memory::Growing(parts) if self.len > 0 => parts.reservation(access),
            _ => self.view().with(access),
        }
    }

    /// `len` bytes of this part from its byte `offset` on.
    ///
    /// # Errors
    /// `InvalidArgument` if the range does not lie in this part, or if it is a part of memory that
    /// grows.
    pub fn slice(&self, offset: u64, len: u64) -> Result<Self> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::invalid(format!(
                "{len} bytes from byte {offset} on do not lie in a part of {0} bytes; end at byte {0} at most",
                self.len
            )));
        }
        if len != 0 && len != self.len && matches!(self.memory, Memory::Growing(_)) {
            return Err(Error::invalid(format!(
                "{len} bytes from byte {offset} on of growing parts; a kernel binds all of them"
            )));
        }
        Ok(Self { memory: self.memory.clone(), offset: self.offset + offset, len })
    }
}

impl View for BufferPart {
    /// Of growing parts there is a view of no byte.
    #[inline]
    fn view(&self) -> BufferView<'_> {
        match &self.memory {
            // Checked when the part was made; a buffer's length does not change.
            Memory::Buffer(lease) => lease.view().narrowed(self.offset, self.len),
            Memory::Growing(parts) => parts.reservation(Access::Read).view().narrowed(0, 0),
        }
    }
}

impl From<BufferView<'_>> for BufferPart {
    fn from(view: BufferView<'_>) -> Self {
        let memory = Memory::Buffer(view.buffer().clone());
        Self { memory, offset: view.offset(), len: view.len() }
    }
}

impl From<Growing<u8>> for BufferPart {
    fn from(parts: Growing<u8>) -> Self {
        let len = (parts.most() * parts.count()) as u64;
        Self { memory: Memory::Growing(parts), offset: 0, len }
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
        Self { memory: Memory::Buffer(lease), offset: 0, len }
    }
}

impl<T> From<Array<T>> for BufferPart {
    fn from(array: Array<T>) -> Self {
        array.into_buffer().into()
    }
}
