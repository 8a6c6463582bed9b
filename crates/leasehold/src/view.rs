//! Views of buffers, and views with a role: what an operation is given.
//!
//! A view is a borrow: it keeps nothing alive and shares the buffer's record of uses.

use leasehold_alloc::Buffer;
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::{Access, Binding};
use std::ops::{Bound, RangeBounds};

/// A buffer, or a part of it: a borrow. It counts bytes; [`values`](Self::values) counts values.
#[derive(Debug, Clone, Copy)]
pub struct BufferView<'a> {
    pub(crate) lease: &'a Lease<Buffer>,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl<'a> BufferView<'a> {
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

    /// Returns whether it has none.
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

impl<'a> BufferView<'a> {
    /// `len` bytes from `offset` on; what lies beyond the end is cut off.
    #[inline]
    #[must_use]
    pub fn narrowed(self, offset: u64, len: u64) -> BufferView<'a> {
        let offset = offset.min(self.len);
        BufferView {
            lease: self.lease,
            offset: self.offset + offset,
            len: len.min(self.len - offset),
        }
    }

    /// The part with a role; lives as long as the buffer's borrow.
    #[inline]
    #[must_use]
    pub fn with(self, access: Access) -> Operand<'a> {
        Operand { view: self, access, limit: None }
    }

    // As the methods of `View`, but bound to the buffer's borrow, not to that of this value.

    /// The bytes of a range, counted from this view's beginning.
    ///
    /// # Errors
    /// `InvalidArgument` when the range does not lie in the view.
    pub fn part(self, range: impl RangeBounds<usize>) -> Result<BufferView<'a>> {
        let (from, to) = bounds(range, self.len as usize, "bytes")?;
        Ok(BufferView {
            lease: self.lease,
            offset: self.offset + from as u64,
            len: (to - from) as u64,
        })
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
    pub(crate) view: BufferView<'a>,
    pub(crate) access: Access,
    /// The limit of a growing buffer whose whole reservation this is.
    pub(crate) limit: Option<&'a Lease<Buffer>>,
}

impl<'a> Operand<'a> {
    /// The part.
    #[must_use]
    pub fn view(&self) -> BufferView<'a> {
        self.view
    }

    /// The role.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns whether it leaves something of its buffer out.
    #[inline]
    pub(crate) fn is_part(&self) -> bool {
        self.view.len < self.view.lease.len() || self.view.lease.is_growing()
    }

    /// The end of the bytes that must have memory, from the buffer's beginning.
    #[inline(always)]
    pub(crate) fn end(&self) -> u64 {
        self.view.offset + self.view.len
    }

    /// The beginning of the bytes that are written, from the buffer's beginning. `u64::MAX`: none
    /// are, or a kernel itself keeps to what the buffer has of its own.
    #[inline(always)]
    pub(crate) fn written(&self) -> u64 {
        let none = !self.access.writes() || self.view.len == 0 || self.limit.is_some();
        if none { u64::MAX } else { self.view.offset }
    }

    /// The operand of a kernel that keeps to the buffer's limit: of a reservation no byte must have
    /// memory.
    #[inline]
    pub(crate) fn limited(self) -> Self {
        if self.limit.is_none() { self } else { Self { view: self.view.narrowed(0, 0), ..self } }
    }

    #[inline]
    pub(crate) fn binding(&self) -> Binding {
        Binding {
            addr: self.view.addr(),
            len: self.view.len,
            native: self.view.lease.native(),
            access: self.access,
        }
    }
}

/// Ways to look at a buffer: whole or in part, with a role. A type of your own that wraps a buffer
/// needs [`view`](Self::view) alone.
///
/// ```
/// # use leasehold::{DeviceId, Runtime, View};
/// # fn main() -> leasehold::Result<()> {
/// # let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let buffer = runtime.alloc(1024)?;
/// let head = buffer.part(..256)?;
/// assert_eq!(head.len(), 256);
/// assert!(buffer.part(1000..1100).is_err());
/// let operand = head.write();
/// # let _ = operand; Ok(())
/// # }
/// ```
pub trait View {
    /// All of it.
    fn view(&self) -> BufferView<'_>;

    /// The bytes of a range, counted from the beginning.
    ///
    /// # Errors
    /// `InvalidArgument` when the range does not lie in it.
    fn part(&self, range: impl RangeBounds<usize>) -> Result<BufferView<'_>>
    where
        Self: Sized,
    {
        self.view().part(range)
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
    fn view(&self) -> BufferView<'_> {
        BufferView { lease: self, offset: 0, len: self.len() }
    }
}

impl View for BufferView<'_> {
    #[inline]
    fn view(&self) -> BufferView<'_> {
        *self
    }
}

/// The beginning and the end of a range within `len` of something.
///
/// # Errors
/// `InvalidArgument` when it does not lie there, or ends before it begins.
pub(crate) fn bounds(
    range: impl RangeBounds<usize>,
    len: usize,
    of: &'static str,
) -> Result<(usize, usize)> {
    let from = match range.start_bound() {
        Bound::Included(&at) => Some(at),
        Bound::Excluded(&at) => at.checked_add(1),
        Bound::Unbounded => Some(0),
    };
    let to = match range.end_bound() {
        Bound::Included(&at) => at.checked_add(1),
        Bound::Excluded(&at) => Some(at),
        Bound::Unbounded => Some(len),
    };
    match (from, to) {
        (Some(from), Some(to)) if from <= to && to <= len => Ok((from, to)),
        _ => Err(beyond((range.start_bound().cloned(), range.end_bound().cloned()), len, of)),
    }
}

#[cold]
fn beyond((from, to): (Bound<usize>, Bound<usize>), len: usize, of: &'static str) -> Error {
    let from = match from {
        Bound::Included(at) => at.to_string(),
        Bound::Excluded(at) => format!("after {at}"),
        Bound::Unbounded => String::new(),
    };
    let to = match to {
        Bound::Included(at) => format!("={at}"),
        Bound::Excluded(at) => at.to_string(),
        Bound::Unbounded => String::new(),
    };
    Error::invalid(format!(
        "{of} {from}..{to} do not lie in {len} {of}; end at {len} at most, and begin no later"
    ))
}
