//! Several copies in one call: one operation, one timepoint.
//!
//! The pieces have no order among themselves. A call whose pieces meet is refused, because no order
//! would be the caller's. The call locks the records of all its buffers at once, so no other
//! submission comes between two pieces.
//!
//! # Early reads of sources
//! A driver may read sources before the stream comes to the copies, which spares it a wait. It may
//! do so only where nothing still writes them. The records say that, and only while they are
//! locked: another submission that writes a source comes before this one or after it.

use super::shapes::writing_some;
use crate::runtime::check_writable;
use crate::stream::Stream;
use crate::view::{BufferView, Operand, View};
use leasehold_alloc::HostKind;
use leasehold_core::{Error, Result, Timepoint};
use leasehold_hal::{Access, Copies, Copy1d, Op};

/// Several copies in one call.
impl Stream {
    /// Copies many pieces as one operation: each pair is a destination and its source. Small pieces
    /// cost a part of what a call of [`copy`](Self::copy) each would cost, as those of caches whose
    /// blocks move between host and device. Does not block, but for room
    /// ([`Stream`](Stream#room)), where a call counts as many operations as it has pieces.
    ///
    /// The operation has one place in the stream's order and one timepoint. All its pieces come
    /// after what the stream was given before and after the earlier uses of all buffers, as one
    /// copy does. Among themselves they have no order. Sides may be device memory, host memory from
    /// [`Runtime::alloc_pinned`](crate::Runtime::alloc_pinned), and memory of other devices of the
    /// same backend. Pieces of no bytes, and a call without pieces, do nothing.
    ///
    /// In a recording each piece is an operation of its own.
    ///
    /// ```
    /// use leasehold::{DeviceId, Runtime, View};
    /// # fn main() -> leasehold::Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let (blocks, host) = (runtime.upload(&[1u8, 2, 3, 4, 5, 6])?, runtime.alloc_pinned(4)?);
    /// runtime.stream().copy_batch(&[
    ///     (host.part(..2)?, blocks.part(4..)?),
    ///     (host.part(2..)?, blocks.part(..2)?),
    /// ])?;
    /// assert_eq!(runtime.to_vec::<u8>(&host)?, [5, 6, 1, 2]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument`, with the numbers of the pieces, when two sides of a piece have different
    /// lengths, when a piece reads or writes what another one writes or overlaps itself, and for a
    /// buffer of another context or one that is read-only; `Unsupported` for memory of another
    /// backend, from and to which [`copy`](Self::copy) copies; the stream's cause. After an error
    /// nothing was submitted.
    #[doc(alias("cudaMemcpyBatchAsync", "swap_blocks", "vkCmdCopyBuffer"))]
    pub fn copy_batch(&self, pieces: &[(BufferView<'_>, BufferView<'_>)]) -> Result<()> {
        let mut list = Vec::with_capacity(pieces.len());
        let mut before = None;
        for (i, &(dst, src)) in pieces.iter().enumerate() {
            list.push(piece(i, dst, src)?);
            // Most pieces have the buffers of the piece before them.
            if !before.is_some_and(|(to, from)| dst.lease.same(to) && src.lease.same(from)) {
                self.check_buffers(dst, src).map_err(|e| of_piece(i, e))?;
                before = Some((dst.lease, src.lease));
            }
        }
        let copies = Copies::new(&list)?;
        if copies.bytes() == 0 {
            return Ok(());
        }
        if self.is_recording() {
            return self.record_pieces(pieces, &list);
        }
        let operands = operands(pieces);
        // SAFETY: the sides of each piece are as long as the piece, and in buffers that are the
        // operands, of this device or a peer.
        unsafe { self.pass_copies(copies, &operands) }.map(drop)
    }

    /// Checks that one side may be written, and that the stream reaches both.
    fn check_buffers(&self, dst: BufferView<'_>, src: BufferView<'_>) -> Result<()> {
        check_writable(&dst.write())?;
        match self.runtime.owns(src.buffer()) && self.runtime.owns(dst.buffer()) {
            true => Ok(()),
            false => self.check_peers(dst, src),
        }
    }

    /// Checks that this device's backend copies between both sides, of which one is not this
    /// device's.
    #[cold]
    fn check_peers(&self, dst: BufferView<'_>, src: BufferView<'_>) -> Result<()> {
        let ours = &self.runtime;
        let (of_dst, of_src) = (ours.owns(dst.buffer()), ours.owns(src.buffer()));
        if !of_dst && !of_src {
            return Err(Error::invalid(format!(
                "neither side is of {}; copy on a stream of one of the two",
                ours.id()
            )));
        }
        let other = ours.owner_of(if of_dst { src.buffer() } else { dst.buffer() })?;
        if other.id().backend == ours.id().backend && ours.is_peer(&other)? {
            return Ok(());
        }
        Err(Error::Unsupported(
            format!(
                "copies of one call stay within a backend, and it goes between {} and {}; use Stream::copy",
                ours.id(),
                other.id()
            )
            .into(),
        ))
    }

    /// Notes each piece as a copy.
    #[cold]
    fn record_pieces(
        &self,
        pieces: &[(BufferView<'_>, BufferView<'_>)],
        list: &[Copy1d],
    ) -> Result<()> {
        for ((dst, src), piece) in std::iter::zip(pieces, list) {
            if piece.bytes != 0 {
                let operands = [src.read(), writing_some(*dst, dst.len())];
                // SAFETY: both sides are as long as the piece, and are the operands, of this device
                // or a peer.
                unsafe { self.pass_checked(&Op::Copy(piece.alone()), &operands) }?;
            }
        }
        Ok(())
    }

    /// The submit path of several copies.
    ///
    /// # Safety
    /// - As [`pass_checked`](Self::pass_checked).
    unsafe fn pass_copies(
        &self,
        copies: Copies<'_>,
        operands: &[Operand<'_>],
    ) -> Result<Timepoint> {
        // SAFETY: by the caller's contract.
        unsafe {
            self.submit_ordered(operands, |core, scratch| {
                let copies = match operands.iter().all(is_settled) {
                    // SAFETY: the sources are host memory, whose writes are over. The records are
                    // locked, so a later write comes after the copies.
                    true => copies.with_settled_sources(),
                    false => copies,
                };
                let value = core.submit(scratch, &Op::Copies(copies), operands)?;
                core.count(copies.pieces().len() - 1);
                Ok(value)
            })
        }
    }
}

/// A piece in the backend's form.
#[inline]
fn piece(i: usize, dst: BufferView<'_>, src: BufferView<'_>) -> Result<Copy1d> {
    if dst.len() != src.len() {
        return Err(unequal(i, dst.len(), src.len()));
    }
    Ok(Copy1d {
        src: src.addr(),
        src_native: src.buffer().native(),
        dst: dst.addr(),
        dst_native: dst.buffer().native(),
        bytes: dst.len(),
    })
}

#[cold]
fn unequal(i: usize, to: u64, from: u64) -> Error {
    Error::invalid(format!(
        "piece {i} copies from {from} to {to} bytes; they must be equal: take a part of the larger one"
    ))
}

/// Names the piece that an error is about.
#[cold]
fn of_piece(i: usize, error: Error) -> Error {
    match error {
        Error::InvalidArgument(what) => Error::InvalidArgument(format!("piece {i}: {what}").into()),
        Error::Unsupported(what) => Error::Unsupported(format!("piece {i}: {what}").into()),
        other => other,
    }
}

/// Returns whether an operand is no source, or a source that a driver may read at once: host memory
/// whose last write is over. The record is locked.
fn is_settled(operand: &Operand<'_>) -> bool {
    if operand.access != Access::Read {
        return true;
    }
    let buffer = operand.view.lease;
    let written = buffer.write_timepoint().timepoint();
    buffer.host_kind() != HostKind::None && written.is_none_or(Timepoint::has_passed)
}

/// The operands of the pieces. Neighbours in one buffer are one operand, from the first of their
/// bytes to the last.
fn operands<'a>(pieces: &[(BufferView<'a>, BufferView<'a>)]) -> Vec<Operand<'a>> {
    let mut operands = Vec::new();
    let (mut dsts, mut srcs) = (None, None);
    for &(dst, src) in pieces.iter().filter(|(dst, _)| !dst.is_empty()) {
        add(&mut operands, &mut srcs, src, Access::Read);
        add(&mut operands, &mut dsts, dst, Access::Write);
    }
    operands.extend(srcs.into_iter().chain(dsts).map(Span::operand));
    operands
}

/// Neighbouring pieces of one buffer, on one side.
struct Span<'a> {
    view: BufferView<'a>,
    /// Bytes of the pieces, which may leave gaps.
    bytes: u64,
    access: Access,
}

impl<'a> Span<'a> {
    fn operand(self) -> Operand<'a> {
        match self.access {
            Access::Read => self.view.read(),
            // Destinations share no byte. So they are the whole buffer if they have as many bytes.
            _ => writing_some(self.view, self.bytes),
        }
    }
}

/// Joins a side of a piece to the span, or begins another one.
fn add<'a>(
    operands: &mut Vec<Operand<'a>>,
    span: &mut Option<Span<'a>>,
    view: BufferView<'a>,
    access: Access,
) {
    match span {
        Some(span) if span.view.lease.same(view.lease) => {
            let from = span.view.offset.min(view.offset);
            let to = (span.view.offset + span.view.len).max(view.offset + view.len);
            span.view = BufferView { lease: span.view.lease, offset: from, len: to - from };
            span.bytes += view.len;
        }
        _ => {
            let begun = Span { view, bytes: view.len, access };
            operands.extend(span.replace(begun).map(Span::operand));
        }
    }
}
