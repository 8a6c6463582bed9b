//! Inputs of operations: rows, patterns, host memory, and the operands made of them.

use crate::view::{BufferView, Operand};
use bytemuck::NoUninit;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Result};
use leasehold_hal::Access;

/// Rows of bytes that lie apart, for [`Stream::copy_2d`](crate::Stream::copy_2d).
///
/// ```
/// use leasehold::ops::Rows;
/// // 8 rows of 12 bytes, from a matrix whose rows are 16 bytes apart, to one without gaps.
/// let rows = Rows::new(12, 8).src_pitch(16);
/// assert_eq!((rows.src_pitch, rows.dst_pitch), (16, 12));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Rows {
    /// Bytes of a row.
    pub width: u64,
    /// How many.
    pub rows: u64,
    /// Bytes from one row of the source to the next; the width by default.
    pub src_pitch: u64,
    /// Bytes from one row of the destination to the next; the width by default.
    pub dst_pitch: u64,
}

impl Rows {
    /// `rows` rows of `width` bytes without gaps.
    pub const fn new(width: u64, rows: u64) -> Self {
        Self { width, rows, src_pitch: width, dst_pitch: width }
    }

    /// The source's rows begin as many bytes apart.
    pub const fn src_pitch(mut self, bytes: u64) -> Self {
        self.src_pitch = bytes;
        self
    }

    /// The destination's rows begin as many bytes apart.
    pub const fn dst_pitch(mut self, bytes: u64) -> Self {
        self.dst_pitch = bytes;
        self
    }
}

/// The value that a fill writes, again and again. Numbers of 1, 2 and 4 bytes are patterns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// One byte.
    U8(u8),
    /// Two bytes, little-endian.
    U16(u16),
    /// Four bytes, little-endian.
    U32(u32),
}

impl Pattern {
    /// The smallest pattern that gives the same bytes. `None` when the bytes are not those of 1, 2
    /// or 4 again and again. No bytes are a pattern of whatever is filled with them: nothing.
    pub(super) fn of(bytes: &[u8]) -> Option<Self> {
        let repeats =
            |n: usize| bytes.len().is_multiple_of(n) && bytes.chunks(n).all(|c| *c == bytes[..n]);
        match bytes {
            [] => Some(Self::U8(0)),
            &[a, ..] if repeats(1) => Some(Self::U8(a)),
            &[a, b, ..] if repeats(2) => Some(Self::U16(u16::from_le_bytes([a, b]))),
            &[a, b, c, d, ..] if repeats(4) => Some(Self::U32(u32::from_le_bytes([a, b, c, d]))),
            _ => None,
        }
    }

    pub(super) fn parts(self) -> (u32, u8) {
        match self {
            Pattern::U8(b) => (u32::from(b), 1),
            Pattern::U16(h) => (u32::from(h), 2),
            Pattern::U32(w) => (w, 4),
        }
    }
}

/// Host memory that an asynchronous copy keeps alive by itself: vectors, boxed, shared and
/// `'static` slices of plain data.
///
/// # Safety
/// - While the value lives, [`bytes`](Self::bytes) is always the same memory, wherever the value is
///   moved. The memory is valid for reads on any thread.
/// - All of its bytes are initialised, and nobody writes them while the value is shared.
pub unsafe trait HostBytes: Send + Sync + 'static {
    /// The bytes; the same address for the life of the value.
    fn bytes(&self) -> &[u8];
}

// SAFETY: the elements lie on the heap. Code that writes them, or makes them move, needs the
// vector's `&mut`. They have no padding and no interior mutability.
unsafe impl<T: NoUninit + Send + Sync> HostBytes for Vec<T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

// SAFETY: the elements lie on the heap. Code that writes them needs the box's `&mut`. They have no
// padding and no interior mutability.
unsafe impl<T: NoUninit + Send + Sync> HostBytes for Box<[T]> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

// SAFETY: the count, which the value is one of, keeps the elements where they are, and nobody has
// `&mut` to them while it is shared. They have no padding and no interior mutability.
unsafe impl<T: NoUninit + Send + Sync> HostBytes for Arc<[T]> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

// SAFETY: the count, which the value is one of, keeps what it shares where it is; that vouches for
// its bytes.
unsafe impl<H: HostBytes> HostBytes for Arc<H> {
    fn bytes(&self) -> &[u8] {
        (**self).bytes()
    }
}

// SAFETY: a shared borrow for the rest of the process: the elements neither move nor change. They
// have no padding and no interior mutability.
unsafe impl<T: NoUninit + Send + Sync> HostBytes for &'static [T] {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

macro_rules! pattern_from {
    ($($number:ty => $variant:ident),*) => {$(
        impl From<$number> for Pattern {
            #[inline]
            fn from(value: $number) -> Self {
                Self::$variant(value as _)
            }
        }
    )*};
}

pattern_from!(u8 => U8, i8 => U8, u16 => U16, i16 => U16, u32 => U32, i32 => U32);

#[cfg(feature = "half")]
impl From<half::f16> for Pattern {
    fn from(value: half::f16) -> Self {
        Self::U16(value.to_bits())
    }
}

#[cfg(feature = "half")]
impl From<half::bf16> for Pattern {
    fn from(value: half::bf16) -> Self {
        Self::U16(value.to_bits())
    }
}

impl From<f32> for Pattern {
    #[inline]
    fn from(value: f32) -> Self {
        Self::U32(value.to_bits())
    }
}

pub(super) fn same_length(dst: u64, src: u64) -> Result<()> {
    if dst == src {
        Ok(())
    } else {
        Err(Error::invalid(format!(
            "a copy from {src} to {dst} bytes; they must be equal: take a part of the larger one"
        )))
    }
}

pub(super) fn writing(slice: BufferView<'_>) -> Operand<'_> {
    let bytes = slice.len();
    writing_some(slice, bytes)
}

/// A slice of which `bytes` bytes are written. The rest of the buffer stays, with the failure of
/// the work that was to write it. The record is the buffer's, so a write of less than all of it
/// counts as a read too.
pub(super) fn writing_some(slice: BufferView<'_>, bytes: u64) -> Operand<'_> {
    let whole = bytes == slice.buffer().len();
    slice.with(if whole { Access::Write } else { Access::ReadWrite })
}
