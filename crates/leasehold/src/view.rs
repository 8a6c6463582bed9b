//! Views of buffers, and views with a role: what an operation is given.
//!
//! A view is a borrow: it keeps nothing alive and shares the buffer's record of uses.

use leasehold_alloc::Buffer;
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::{Access, Binding};

/// A part of a buffer.
#[derive(Debug, Clone, Copy)]
pub struct Slice<'a> {
    pub(crate) lease: &'a Lease<Buffer>,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl<'a> Slice<'a> {
    /// The buffer.
    pub fn buffer(&self) -> &'a Lease<Buffer> {
        self.lease
    }

    /// Bytes from the buffer's beginning.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of its first byte: symbolic while the buffer is, 0 for an empty buffer.
    #[inline]
    #[must_use]
    pub fn addr(&self) -> u64 {
        match self.lease.addr() {
            0 => 0,
            a => a + self.offset,
        }
    }
}

impl<'a> Slice<'a> {
    /// `len` bytes from `offset` on; what lies beyond the end is cut off.
    #[inline]
    #[must_use]
    pub fn narrowed(self, offset: u64, len: u64) -> Slice<'a> {
        let offset = offset.min(self.len);
        Slice { lease: self.lease, offset: self.offset + offset, len: len.min(self.len - offset) }
    }

    /// The part with a role; lives as long as the buffer's borrow.
    #[inline]
    #[must_use]
    pub fn with(self, access: Access) -> Operand<'a> {
        Operand { slice: self, access }
    }

    // As the methods of `View`, but bound to the buffer's borrow, not to that of this value.

    /// `len` bytes from `offset` on.
    ///
    /// # Errors
    /// `InvalidArgument` beyond the end.
    pub fn part(self, offset: u64, len: u64) -> Result<Slice<'a>> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(Slice { lease: self.lease, offset: self.offset + offset, len }),
            _ => Err(Error::invalid(format!(
                "bytes {offset}..{offset}+{len} do not lie in a buffer of {} bytes",
                self.len
            ))),
        }
    }

    /// The operation reads it.
    #[inline]
    #[must_use]
    pub fn read(self) -> Operand<'a> {
        self.with(Access::Read)
    }

    /// The operation writes all of it and reads none of it.
    #[inline]
    #[must_use]
    pub fn write(self) -> Operand<'a> {
        self.with(Access::Write)
    }

    /// The operation reads and writes it.
    #[inline]
    #[must_use]
    pub fn read_write(self) -> Operand<'a> {
        self.with(Access::ReadWrite)
    }
}

/// A part of a buffer, and what an operation does with it.
#[derive(Debug, Clone, Copy)]
pub struct Operand<'a> {
    pub(crate) slice: Slice<'a>,
    pub(crate) access: Access,
}

impl<'a> Operand<'a> {
    /// The part.
    #[must_use]
    pub fn slice(&self) -> Slice<'a> {
        self.slice
    }

    /// The role.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Whether it leaves something of its buffer out.
    #[inline]
    pub(crate) fn is_part(&self) -> bool {
        self.slice.len < self.slice.lease.len()
    }

    #[inline]
    pub(crate) fn binding(&self) -> Binding {
        Binding { addr: self.slice.addr(), len: self.slice.len, native: self.slice.lease.native(), access: self.access }
    }
}

/// Ways to look at a buffer: whole or in part, with a role. A type of your own that wraps a buffer needs [`view`](Self::view) alone.
///
/// ```
/// # use leasehold::{Context, DeviceId, View};
/// # fn main() -> leasehold::Result<()> {
/// # let runtime = Context::new().runtime(DeviceId::cpu(0))?;
/// let buffer = runtime.alloc(1024)?;
/// let head = buffer.part(0, 256)?;
/// assert_eq!(head.len(), 256);
/// assert!(buffer.part(1000, 100).is_err());
/// let operand = head.write();
/// # let _ = operand; Ok(())
/// # }
/// ```
pub trait View {
    /// All of it.
    fn view(&self) -> Slice<'_>;

    /// `len` bytes from `offset` on.
    ///
    /// # Errors
    /// `InvalidArgument` beyond the end.
    fn part(&self, offset: u64, len: u64) -> Result<Slice<'_>> {
        self.view().part(offset, len)
    }

    /// The operation reads it.
    #[inline]
    fn read(&self) -> Operand<'_> {
        self.view().read()
    }

    /// The operation writes all of it and reads none of it.
    #[inline]
    fn write(&self) -> Operand<'_> {
        self.view().write()
    }

    /// The operation reads and writes it.
    #[inline]
    fn read_write(&self) -> Operand<'_> {
        self.view().read_write()
    }
}

impl View for Lease<Buffer> {
    #[inline]
    fn view(&self) -> Slice<'_> {
        Slice { lease: self, offset: 0, len: self.len() }
    }
}

impl View for Slice<'_> {
    #[inline]
    fn view(&self) -> Slice<'_> {
        *self
    }
}
