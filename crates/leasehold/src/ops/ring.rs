//! Large copies between the caller's memory and the device, by way of a ring of pinned memory.
//!
//! A driver stages a copy of pageable memory by one thread. Here several threads copy between the
//! caller's memory and the slots of a ring, while the device copies other slots. The ring is small,
//! so the first copy of many bytes does not pin as many bytes.
//!
//! # Protocol
//! The copy is cut into pieces, and piece `i` uses slot `i % SLOTS`. The call submits all pieces in
//! one turn, so the copy has one place in the stream's order, as any operation has. Pieces that may
//! not go to the driver yet wait for values of a host timeline, the *gate*. Then the threads copy
//! without any lock, and this thread signals the gate.
//!
//! | copy | piece `i` waits for | signalled once |
//! |---|---|---|
//! | up | value `i + 1` of the gate | the bytes of piece `i` are in its slot |
//! | down | value `i - SLOTS + 1`; the first `SLOTS` pieces for none | the slot is empty again |
//!
//! The host writes a slot of a copy up once the piece before in this slot is over. It reads a slot
//! of a copy down once the slot's own piece is over. A gate that is given up fails the pieces that
//! still wait, and so the stream: no piece uses a slot later than that.
//!
//! The device uses the ring alone, and never the caller's memory. So a call that ends early, with
//! an error, leaves nothing behind that touches the caller's memory.
//!
//! This module must not know how a driver stages.

use super::blocking_copy;
use super::shapes::writing;
use crate::stream::{Locked, Stream, add_wait, in_host_call};
use crate::view::{BufferView, Operand};
use leasehold_alloc::{Buffer, Layout, On};
use leasehold_core::host_copy::{self, CopyRequest};
use leasehold_core::{Error, Lease, Result, Timepoint, UniqueLease};
use leasehold_hal::{Download, HostTimeline, Op, Upload};

/// Copies of fewer bytes take the driver's own way.
const LEAST: u64 = 8 << 20;
/// Bytes of a piece, at the least and at the most. Both are multiples of a chunk.
const PIECE: (u64, u64) = (4 << 20, 16 << 20);
/// Pieces of a copy, until they are as large as they may be.
const PIECES: u64 = 64;
/// Slots of a ring: one at the device, one at the host, and two that keep both busy.
const SLOTS: usize = 4;

/// Whether a call may wait for earlier work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitFor {
    /// The call waits for all work before it.
    EarlierWork,
    /// The call waits for its own copy alone: it is made only if nothing is to be waited for.
    OwnCopy,
}

/// The direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Up,
    Down,
}

/// Bytes of a piece of a copy.
fn piece_bytes(bytes: u64) -> u64 {
    bytes.div_ceil(PIECES).next_multiple_of(host_copy::CHUNK as u64).clamp(PIECE.0, PIECE.1)
}

/// Whether a ring serves a copy of this length on the stream's device.
fn serves(stream: &Stream, bytes: u64) -> bool {
    let caps = stream.runtime.device.caps();
    bytes >= LEAST && caps.pinned && caps.host_timelines
}

/// Copies host bytes to the device. `false` if the copy is to be made in another way: nothing was
/// submitted then.
///
/// # Errors
/// As [`Stream::upload_blocking`].
pub(super) fn upload(
    stream: &Stream,
    dst: BufferView<'_>,
    src: &[u8],
    wait_for: WaitFor,
) -> Result<bool> {
    if !serves(stream, dst.len()) {
        return Ok(false);
    }
    if wait_for == WaitFor::OwnCopy {
        // The timeline learns of work that is over.
        stream.under().raw.refresh()?;
        if in_host_call() || !stream.under().timeline.is_idle() {
            return Ok(false);
        }
    }
    let Some(ring) = Ring::new(stream, dst.len())? else { return Ok(false) };
    if !ring.is_free(wait_for)? {
        return Ok(false);
    }
    let Some(pieces) = ring.submit(writing(dst), Way::Up, wait_for)? else { return Ok(false) };
    let request = CopyRequest {
        src: src.as_ptr(),
        src_ring: None,
        dst: ring.address(),
        dst_ring: Some(ring.length()),
        bytes: src.len(),
    };
    // SAFETY: the source is borrowed for this call. Nobody else has the ring, and its slots are
    // ready by the protocol.
    unsafe { ring.copy(&pieces, request, Way::Up) }?;
    blocking_copy::see_out(stream, pieces.last()).map(|()| true)
}

/// Copies device bytes to host memory, which need not be initialised. `false` if the copy is to be
/// made in another way: nothing was submitted then.
///
/// # Errors
/// As [`Stream::download`].
///
/// # Safety
/// - `dst` is valid for writes of as many bytes as `src` has, and nobody else touches them
///   meanwhile.
pub(super) unsafe fn download(stream: &Stream, dst: *mut u8, src: BufferView<'_>) -> Result<bool> {
    if !serves(stream, src.len()) {
        return Ok(false);
    }
    let Some(ring) = Ring::new(stream, src.len())? else { return Ok(false) };
    let submitted = ring.submit(src.read(), Way::Down, WaitFor::EarlierWork)?;
    let Some(pieces) = submitted else { return Ok(false) };
    let request = CopyRequest {
        src: ring.address(),
        src_ring: Some(ring.length()),
        dst,
        dst_ring: None,
        bytes: src.len() as usize,
    };
    // SAFETY: the caller vouches for the destination. Nobody else has the ring, and its slots are
    // ready by the protocol.
    unsafe { ring.copy(&pieces, request, Way::Down) }?;
    blocking_copy::see_out(stream, pieces.last()).map(|()| true)
}

/// The slots of a copy, and the gate of its pieces.
struct Ring<'a> {
    stream: &'a Stream,
    /// No handle leads to it.
    memory: Lease<Buffer>,
    gate: Lease<dyn HostTimeline>,
    /// The gate's value before its first signal.
    base: u64,
    piece: u64,
}

/// The pieces of a copy that were submitted: the timepoint of each.
struct Pieces(Vec<Timepoint>);

impl Pieces {
    fn last(&self) -> Timepoint {
        self.0[self.0.len() - 1]
    }

    /// The number of pieces, from the front, that the device is done with.
    ///
    /// # Errors
    /// The failure of the first piece that is not over.
    fn over(&self, from: usize) -> Result<usize> {
        for (i, piece) in self.0.iter().enumerate().skip(from) {
            if !piece.timeline().check(piece.value())? {
                return Ok(i);
            }
        }
        Ok(self.0.len())
    }
}

impl<'a> Ring<'a> {
    /// A ring for a copy. `None` without memory for it.
    fn new(stream: &'a Stream, bytes: u64) -> Result<Option<Self>> {
        let device = &stream.runtime.device;
        let piece = piece_bytes(bytes);
        let on = On { timeline: stream.under().timeline, source: stream.under().source() };
        let pinned = stream.runtime.pinned()?;
        let made = pinned.alloc_unique(Layout::new(SLOTS as u64 * piece), on);
        match made.and_then(|memory| Ok((memory, device.host_timeline()?))) {
            Ok((memory, gate)) => {
                let (memory, base) =
                    (UniqueLease::share_unlisted(memory), gate.timeline().submitted());
                Ok(Some(Self { stream, memory, gate, base, piece }))
            }
            // Then the driver's own way serves.
            Err(e) if e.is_out_of_memory() || matches!(e, Error::Occupied { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn address(&self) -> *mut u8 {
        self.memory.addr() as *mut u8
    }

    fn length(&self) -> usize {
        SLOTS * self.piece as usize
    }

    /// Whether the host may write the ring: memory that is free for the stream may be in use by
    /// earlier work. A patient caller waits for that work.
    fn is_free(&self, wait_for: WaitFor) -> Result<bool> {
        let mut uses = vec![self.memory.write_timepoint()];
        self.memory.for_each_read(|read| uses.push(read));
        for point in uses.iter().filter_map(|used| used.timepoint()) {
            if point.has_passed() {
                continue;
            }
            if wait_for == WaitFor::OwnCopy {
                return Ok(false);
            }
            blocking_copy::may_wait(self.stream)?;
            self.stream.runtime.wait_over(point)?;
        }
        Ok(true)
    }

    /// The value of the gate that piece `i` waits for.
    fn gate_of(&self, i: usize, way: Way) -> Option<Timepoint> {
        let turn = match way {
            Way::Up => i + 1,
            Way::Down => (i + 1).saturating_sub(SLOTS),
        };
        (turn > 0).then(|| self.gate.timeline().at(self.base + turn as u64))
    }

    /// Submits all pieces in one turn. `None` if an impatient caller would have to wait for other
    /// work.
    fn submit(&self, operand: Operand<'_>, way: Way, wait_for: WaitFor) -> Result<Option<Pieces>> {
        let core = self.stream.under();
        if wait_for == WaitFor::EarlierWork {
            blocking_copy::may_wait(self.stream)?;
        }
        let operands = [operand];
        self.stream.runtime.check_operands(&operands)?;
        self.stream.runtime.refuse_symbolic(&operands)?;
        let (view, bytes) = (operands[0].view(), operands[0].view().len());
        let mut submit_guard = core.submit_guard()?;
        let scratch = submit_guard.scratch();
        scratch.waits.clear();
        let mut locked = Locked::new(core.timeline, &operands);
        // SAFETY: the submission lock is held until the end.
        unsafe { locked.gather(&mut scratch.waits) }?;
        let idle = scratch.waits.is_empty() && core.timeline.is_idle();
        if wait_for == WaitFor::OwnCopy && !idle {
            return Ok(None);
        }
        let mut pieces = Vec::with_capacity(bytes.div_ceil(self.piece) as usize);
        let mut outcome = Ok(());
        for (i, at) in (0..bytes).step_by(self.piece as usize).enumerate() {
            let slot = self.memory.addr() + (i % SLOTS) as u64 * self.piece;
            let (device, native) = (view.addr() + at, view.buffer().native());
            let bytes = self.piece.min(bytes - at);
            let op = match way {
                Way::Up => {
                    let src = slot as *const u8;
                    Op::Upload(Upload { src, dst: device, native, bytes, keep: None })
                }
                Way::Down => {
                    let dst = slot as *mut u8;
                    Op::Download(Download { src: device, native, dst, bytes, keep: None })
                }
            };
            let gate = self.gate_of(i, way);
            if let Some(value) = gate {
                add_wait(&mut scratch.waits, value);
            }
            // SAFETY: the operand covers the device's side, and is marked below. The ring is marked
            // too, so its memory is not used again before the pieces are over.
            let submitted = unsafe { core.submit(scratch, &op, &operands) };
            scratch.waits.clear();
            // Each piece that goes to the driver at once is signalled by itself.
            let told = submitted.and_then(|value| {
                pieces.push(core.timeline.at(value));
                if gate.is_none() { core.raw.flush() } else { Ok(()) }
            });
            if told.is_err() {
                outcome = told;
                break;
            }
        }
        if let Some(&last) = pieces.last() {
            // SAFETY: the first piece waited for what was gathered, the others come after it, and
            // the submission lock is still held. Nobody else can submit work with the ring: up, the
            // pieces read it, and down, they write it.
            unsafe {
                locked.mark(last);
                match way {
                    Way::Up => self.memory.mark_read(last),
                    Way::Down => self.memory.mark_write(last),
                }
            }
        }
        drop(submit_guard);
        outcome.map_err(|e| self.give_up(e))?;
        Ok(Some(Pieces(pieces)))
    }

    /// Fails the pieces that still wait for the gate.
    fn give_up(&self, cause: Error) -> Error {
        self.gate.fail(cause.clone());
        cause
    }

    /// Makes the host's part of the copy. Blocks until it is made.
    ///
    /// # Errors
    /// The failure of the stream. The pieces that are not made fail then.
    ///
    /// # Safety
    /// - The pieces and the request are of this copy, and one of its sides is the ring.
    /// - The other side is valid for its length. Nobody writes it meanwhile, nor reads it if it is
    ///   the destination.
    unsafe fn copy(&self, pieces: &Pieces, request: CopyRequest, way: Way) -> Result<()> {
        let core = self.stream.under();
        let (piece, bytes, count) = (self.piece as usize, request.bytes, pieces.0.len());
        // The pieces that the device is done with, those that are ready, and the gate's signals.
        let (mut over, mut told, mut signals) = (0, 0, 0);
        let ahead = if way == Way::Up { SLOTS } else { 0 };
        let ready = |idle: bool| {
            // The pieces that were told are with the driver by the time that this thread is idle.
            if told < count && told == over + ahead {
                if idle {
                    core.raw.wait_host(pieces.0[over].value(), None)?;
                } else {
                    core.raw.refresh()?;
                }
                over = pieces.over(over)?;
            }
            told = over + ahead;
            Ok(told * piece)
        };
        let done = |now: usize| {
            let host = if now == bytes { count } else { now / piece };
            let due = if way == Way::Up { host } else { host.min(count.saturating_sub(SLOTS)) };
            while signals < due {
                signals += 1;
                self.gate.signal_host(self.base + signals as u64)?;
                // The piece is with the driver now. Its end is to be seen before that of the next.
                core.raw.flush()?;
            }
            Ok(())
        };
        // SAFETY: the caller vouches for its side. Up, a slot is ready once the device is done with
        // the piece before in it, and down, once the device is done with its own piece. The device
        // gets a slot back by the gate, after the host is done with it.
        unsafe { host_copy::copy_in_order(request, ready, done) }.map_err(|e| self.give_up(e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_fit_slots_of_whole_chunks() {
        let sizes = [LEAST, 64 << 20, (64 << 20) + 1, 256 << 20, (600 << 20) + 5, 1 << 37];
        let pieces = sizes.map(piece_bytes);
        assert!(pieces.iter().all(|p| p % host_copy::CHUNK as u64 == 0));
        let mib = pieces.map(|p| p as f64 / f64::from(1 << 20));
        assert_eq!(mib, [4.0, 4.0, 4.0, 4.0, 9.5, 16.0]);
    }
}
