//! Operands: parts of buffers, and what an operation does with them.

use super::convert::list;
use crate::kinds::{BUFFERS, HeldBuffer};
use crate::objects::Used;
use crate::status::no_memory;
use leasehold::{Access, BufferView, Error, Operand, Result, View};

/// The operation reads the operand.
pub const LEASEHOLD_READ: u32 = 1;
/// The operation writes all of the operand and reads none of it.
pub const LEASEHOLD_WRITE: u32 = 2;
/// The operation reads and writes the operand.
pub const LEASEHOLD_READ_WRITE: u32 = 3;
/// All bytes from the offset to the buffer's end.
pub const LEASEHOLD_WHOLE: u64 = u64::MAX;

/// A part of a buffer, and what an operation does with it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdOperand {
    /// The buffer.
    pub buffer: u64,
    /// Bytes from the buffer's beginning.
    pub offset: u64,
    /// Bytes, or [`LEASEHOLD_WHOLE`].
    pub bytes: u64,
    /// `LEASEHOLD_READ`, `_WRITE` or `_READ_WRITE`.
    pub access: u32,
    /// 0.
    pub reserved: u32,
}

/// The access of a number.
pub(crate) fn access(number: u32) -> Result<Access> {
    match number {
        LEASEHOLD_READ => Ok(Access::Read),
        LEASEHOLD_WRITE => Ok(Access::Write),
        LEASEHOLD_READ_WRITE => Ok(Access::ReadWrite),
        other => Err(Error::invalid(format!(
            "{other} is no access: LEASEHOLD_READ, LEASEHOLD_WRITE or LEASEHOLD_READ_WRITE"
        ))),
    }
}

#[cold]
fn outside(operand: &LeaseholdOperand, len: u64) -> Error {
    let LeaseholdOperand { offset, bytes, .. } = operand;
    if operand.reserved != 0 {
        return Error::invalid(format!("an operand whose reserved field is {}", operand.reserved));
    }
    Error::invalid(match *bytes {
        _ if *offset > len => format!("offset {offset} is beyond a buffer of {len} bytes"),
        bytes => format!("{bytes} bytes from {offset} on do not lie in a buffer of {len} bytes"),
    })
}

impl LeaseholdOperand {
    /// The buffer, for one call.
    #[inline]
    pub(crate) fn held(&self) -> Result<Used<HeldBuffer>> {
        BUFFERS.get(self.buffer)
    }

    /// The part of the buffer, which is this operand's.
    ///
    /// # Errors
    /// `InvalidArgument` for a part that does not lie in it.
    #[inline]
    pub(crate) fn view<'b>(&self, held: &'b HeldBuffer) -> Result<BufferView<'b>> {
        let len = held.0.len();
        let Some(room) = len.checked_sub(self.offset).filter(|_| self.reserved == 0) else {
            return Err(outside(self, len));
        };
        let bytes = if self.bytes == LEASEHOLD_WHOLE { room } else { self.bytes };
        if bytes > room {
            return Err(outside(self, len));
        }
        Ok(held.0.view().narrowed(self.offset, bytes))
    }

    /// As [`view`](Self::view), for an operation that can do one thing with it alone.
    ///
    /// # Errors
    /// `InvalidArgument` as well for another access than this one and 0.
    pub(crate) fn only<'b>(&self, held: &'b HeldBuffer, only: u32) -> Result<BufferView<'b>> {
        if self.access != 0 && self.access != only {
            return Err(Error::invalid(format!(
                "an operand of access {}, which the operation uses by {only}",
                self.access
            )));
        }
        self.view(held)
    }

    #[inline(always)]
    fn operand<'b>(&self, held: Option<&'b Used<HeldBuffer>>) -> Result<Operand<'b>> {
        let held = held.ok_or_else(|| Error::state("an operand without a buffer"))?;
        let access = access(self.access)?;
        Ok(self.view(held)?.with(access))
    }
}

/// Runs `call` with operands whose buffers are held meanwhile.
///
/// # Errors
/// `InvalidArgument` for an unknown buffer, a part outside of one, and an unknown access; the error
/// of `call`.
///
/// # Safety
/// - `operands` is null, or points to `count` operands.
#[inline]
pub(crate) unsafe fn with_operands<R>(
    operands: *const LeaseholdOperand,
    count: usize,
    call: impl FnOnce(&[Operand<'_>]) -> Result<R>,
) -> Result<R> {
    // SAFETY: by the contract.
    let given = unsafe { list(operands, count, "operands")? };
    match *given {
        [] => call(&[]),
        [a] => few(&[a], call),
        [a, b] => few(&[a, b], call),
        [a, b, c] => few(&[a, b, c], call),
        [a, b, c, d] => few(&[a, b, c, d], call),
        [a, b, c, d, e] => few(&[a, b, c, d, e], call),
        [a, b, c, d, e, f] => few(&[a, b, c, d, e, f], call),
        _ => {
            let held = held_all(given)?;
            call(&operands_of(given, &held)?)
        }
    }
}

/// As [`with_operands`], without the heap.
#[inline]
fn few<const N: usize, R>(
    given: &[LeaseholdOperand; N],
    call: impl FnOnce(&[Operand<'_>]) -> Result<R>,
) -> Result<R> {
    let mut held = [const { None }; N];
    for (held, operand) in std::iter::zip(&mut held, given) {
        *held = Some(operand.held()?);
    }
    let mut operands = [given[0].operand(held[0].as_ref())?; N];
    for i in 1..N {
        operands[i] = given[i].operand(held[i].as_ref())?;
    }
    call(&operands)
}

/// The buffers of operands.
pub(crate) fn held_all(given: &[LeaseholdOperand]) -> Result<Vec<Used<HeldBuffer>>> {
    let mut held = room(given.len())?;
    for operand in given {
        held.push(operand.held()?);
    }
    Ok(held)
}

/// The operands in their buffers.
pub(crate) fn operands_of<'b>(
    given: &[LeaseholdOperand],
    held: &'b [Used<HeldBuffer>],
) -> Result<Vec<Operand<'b>>> {
    let mut operands = room(given.len())?;
    for (operand, held) in std::iter::zip(given, held) {
        operands.push(operand.operand(Some(held))?);
    }
    Ok(operands)
}

/// A list with room.
///
/// # Errors
/// `OutOfMemory` for host memory.
pub(crate) fn room<T>(count: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    let bytes = count.saturating_mul(size_of::<T>());
    list.try_reserve_exact(count).map_err(|_| no_memory("a list", bytes))?;
    Ok(list)
}
