//! Copies between two devices of a context.
//!
//! | the devices | the way |
//! |---|---|
//! | of one backend | one operation of the stream, by peer access or by the driver's own way |
//! | a CPU's, and host memory of another backend | one operation of the stream |
//! | of two backends | staged: down from the source, up to the destination, by pinned memory |
//!
//! # A staged copy
//! The caller's stream works on its own device, a [companion](StreamInner::companion) on the other
//! one. The companion begins after all that the stream was given before, and the stream goes on
//! after the companion, so all of the copy has its place in the stream's order. It is cut into
//! pieces. They go by two staging buffers in turns, so that one goes down while the one before goes
//! up. Every piece is submitted by the call; streams wait for each other, and the host for neither.
//!
//! A failure on either side reaches the caller's stream through its waits.
//!
//! # Recorded
//! A graph is of one device, so the other device's part is a host call of the graph: it submits a
//! piece to a stream of its own there and waits for it. Pieces follow one another.

use crate::runtime::RuntimeInner;
use crate::stream::{Locked, Stream, StreamInner, add_wait, push_waits};
use crate::view::{Operand, View};
use leasehold_alloc::{Buffer, HostKind, Layout, On};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Result, Timepoint, UniqueLease};
use leasehold_hal::{Copy2d, Download, HostCall, Op, StreamDesc, Upload};

/// Bytes of a staging buffer, at the least (for a copy that is longer) and at the most.
const PIECE: (u64, u64) = (1 << 20, 32 << 20);
/// Pieces of a copy, until they are as large as they may be.
const PIECES: u64 = 64;
/// Runs of bytes in a piece, at the most: each is an operation.
const RUNS: usize = 256;
/// Staging buffers of a copy.
const SLOTS: usize = 2;

/// Bytes without a gap: offsets in the source's and the destination's memory, and how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    src: u64,
    dst: u64,
    bytes: u64,
}

/// The runs of a copy in pieces: none has more than `bytes` bytes or [`RUNS`] runs.
fn pieces(c: &Copy2d, bytes: u64) -> Vec<Vec<Run>> {
    let (width, rows) = match c.rows > 1 && c.src_pitch == c.width && c.dst_pitch == c.width {
        true => (c.width * c.rows, 1),
        false => (c.width, c.rows),
    };
    let (mut all, mut piece, mut room) = (Vec::new(), Vec::new(), bytes);
    for row in 0..rows {
        let mut at = 0;
        while at < width {
            let run = room.min(width - at);
            piece.push(Run {
                src: row * c.src_pitch + at,
                dst: row * c.dst_pitch + at,
                bytes: run,
            });
            (at, room) = (at + run, room - run);
            if room == 0 || piece.len() == RUNS {
                all.push(std::mem::take(&mut piece));
                room = bytes;
            }
        }
    }
    if !piece.is_empty() {
        all.push(piece);
    }
    all
}

/// Bytes of a staging buffer for a copy of `bytes`.
fn piece_bytes(bytes: u64) -> u64 {
    bytes.div_ceil(PIECES).next_multiple_of(4096).clamp(PIECE.0, PIECE.1).min(bytes)
}

/// A copy between the stream's device and another one.
struct Way<'a> {
    stream: &'a Stream,
    other: Arc<RuntimeInner>,
    copy: &'a Copy2d,
    from: Operand<'a>,
    to: Operand<'a>,
    /// Says whether the stream's device has the source.
    down: bool,
    /// Says whether the stream's side, and the other one, is host memory of its device.
    host: (bool, bool),
}

/// A copy, of which one side at least is not the stream's device's. Not empty; its rows lie in
/// their parts.
pub(super) fn copy(
    stream: &Stream,
    copy: &Copy2d,
    to: Operand<'_>,
    from: Operand<'_>,
) -> Result<()> {
    let ours = &stream.runtime;
    let (src, dst) = (from.view().buffer(), to.view().buffer());
    let down = ours.owns(src);
    if !down && !ours.owns(dst) {
        return Err(Error::invalid(format!(
            "neither side of the copy is of {}; copy on a stream of one of the two",
            ours.id()
        )));
    }
    if stream.recording().is_some_and(|recording| recording.is_body()) {
        return Err(Error::Unsupported(
            "a copy between devices in the body of a loop or branch; record it outside the body"
                .into(),
        ));
    }
    let (mine, theirs) = if down { (src, dst) } else { (dst, src) };
    let other = ours.owner_of(theirs)?;
    if other.id().backend == ours.id().backend && ours.is_peer(&other)? {
        // SAFETY: both sides were checked to hold what is copied; the driver knows the memory of
        // both devices.
        return unsafe { stream.pass_checked(&Op::Copy(*copy), &[from, to]) }.map(drop);
    }
    let host = (!ours.memory.owns(mine), !other.memory.owns(theirs));
    let by_address =
        ours.device.caps().pageable_memory_access && theirs.host_kind() != HostKind::None;
    let way = Way { stream, other, copy, from, to, down, host };
    if by_address {
        way.by_address()
    } else if host == (true, true) {
        Err(Error::Unsupported(
            format!(
                "{} has no way to host memory of {}; the host can copy it",
                ours.id(),
                way.other.id()
            )
            .into(),
        ))
    } else if stream.is_recording() {
        way.recorded()
    } else {
        way.staged()
    }
}

/// The runs of a piece between one side's memory and a staging buffer: down from the copy's source,
/// or up to its destination.
fn transfers<'a>(
    c: &'a Copy2d,
    piece: &'a [Run],
    staging: &Lease<Buffer>,
    down: bool,
    host: bool,
) -> impl Iterator<Item = Op<'static>> + 'a {
    let (mut at, native) = (staging.addr(), staging.native());
    piece.iter().map(move |&Run { src, dst, bytes }| {
        let place = at;
        at += bytes;
        let (src, dst) = (c.src + src, c.dst + dst);
        match (host, down) {
            // Uploads and downloads are for device memory.
            (true, true) => Op::Copy(Copy2d::linear((src, c.src_native), (place, native), bytes)),
            (true, false) => Op::Copy(Copy2d::linear((place, native), (dst, c.dst_native), bytes)),
            (false, true) => Op::Download(Download {
                src,
                native: c.src_native,
                dst: place as *mut u8,
                bytes,
                keep: None,
            }),
            (false, false) => Op::Upload(Upload {
                src: place as *const u8,
                dst,
                native: c.dst_native,
                bytes,
                keep: None,
            }),
        }
    })
}

impl Way<'_> {
    fn ours(&self) -> &Arc<RuntimeInner> {
        &self.stream.runtime
    }

    /// Copies from or to the other device's host memory as if it were this device's, which sees all
    /// of the host's.
    fn by_address(&self) -> Result<()> {
        // SAFETY: both sides were checked to hold what is copied and are the operands; host memory
        // has the host's addresses.
        unsafe { self.stream.pass_checked(&Op::Copy(*self.copy), &[self.from, self.to]) }.map(drop)
    }

    /// Host memory that `first` writes first, and to which no handle leads. Where one side is host
    /// memory its driver must know the staging memory too; else it is of the device that has pinned
    /// memory, if one has.
    fn staging(&self, first: &StreamInner, bytes: u64) -> Result<Lease<Buffer>> {
        let pinned = |r: &RuntimeInner| r.device.caps().pinned;
        let of_other = self.host.1 || !self.host.0 && !pinned(self.ours()) && pinned(&self.other);
        let runtime = if of_other { &self.other } else { self.ours() };
        let on = On { timeline: first.timeline, source: first.source() };
        let memory = runtime.pinned()?;
        memory.alloc_unique(Layout::new(bytes), on).map(UniqueLease::share_unlisted)
    }

    fn staged(&self) -> Result<()> {
        let Way { stream, other, copy, from, to, down, host } = self;
        for runtime in [self.ours(), other] {
            runtime.refuse_symbolic(&[*from, *to])?;
            if !runtime.device.caps().waits_for_any_timeline {
                return Err(Error::Unsupported(
                    format!(
                        "{} cannot wait for another backend's device; download and upload",
                        runtime.id()
                    )
                    .into(),
                ));
            }
        }
        let own: &StreamInner = stream.under();
        let companion =
            &*own.companion(other.clone(), || other.create_core(&StreamDesc::default()))?;
        let (lower, upper) = if *down { (own, companion) } else { (companion, own) };
        let (host_below, host_above) = if *down { *host } else { (host.1, host.0) };
        companion.wait_for_room()?;
        let (mut own_turn, mut companion_turn) =
            (own.submit_guard()?, companion.submit_guard_now()?);
        let (own_trace, companion_trace) =
            (&mut own_turn.scratch().trace, &mut companion_turn.scratch().trace);
        stream.healthy()?;

        // All that the stream was given comes before either side.
        let (mut lower_waits, mut upper_waits) = (Vec::new(), Vec::new());
        if !own.timeline.is_idle() && !companion.timeline.knows(own.timeline.now().into()) {
            add_wait(if *down { &mut upper_waits } else { &mut lower_waits }, own.timeline.now());
        }

        let size = piece_bytes(copy.width * copy.rows);
        let pieces = pieces(copy, size);
        let slots: Vec<Lease<Buffer>> = (0..SLOTS.min(pieces.len()))
            .map(|_| self.staging(lower, size))
            .collect::<Result<_>>()?;
        // When each slot was last read.
        let mut free: [Option<Timepoint>; SLOTS] = [None; SLOTS];
        let mut list: Vec<Op<'_>> = Vec::new();
        for (i, piece) in pieces.iter().enumerate() {
            let slot = i % SLOTS;
            let buffer = &slots[slot];
            lower_waits.extend(free[slot]);
            // Each time: other threads may use the buffers meanwhile.
            let mut read = Locked::new(lower.timeline, std::slice::from_ref(from));
            // SAFETY: the submission lock is held until the end.
            unsafe { read.gather(&mut lower_waits) }?;
            list.clear();
            push_waits(&lower_waits, &mut list)?;
            lower_waits.clear();
            list.extend(transfers(copy, piece, buffer, true, host_below));
            let trace = if *down { &mut *own_trace } else { &mut *companion_trace };
            // SAFETY: the source was checked to hold what is copied. The allocators keep it and the
            // staging memory until the timepoints that they are marked with are over; whoever read
            // the slot before is waited for.
            let here = lower.timeline.at(unsafe { lower.submit_list(trace, &list, &[*from]) }?);
            lower.count(list.len());
            // SAFETY: the submission waited for what was gathered above; of the staging buffer,
            // which is this call's, for its last read, and its writes are this timeline's own. Both
            // turns are held.
            unsafe {
                read.mark(here);
                buffer.mark_write(here);
            }

            let mut written = Locked::new(upper.timeline, std::slice::from_ref(to));
            // SAFETY: the submission lock is held until the end.
            unsafe { written.gather(&mut upper_waits) }?;
            list.clear();
            push_waits(&upper_waits, &mut list)?;
            upper_waits.clear();
            list.push(Op::Wait(here));
            list.extend(transfers(copy, piece, buffer, false, host_above));
            let trace = if *down { &mut *companion_trace } else { &mut *own_trace };
            // SAFETY: the destination was checked and is kept as the source is; whoever writes the
            // slot is waited for.
            let there = upper.timeline.at(unsafe { upper.submit_list(trace, &list, &[*to]) }?);
            upper.count(list.len());
            // SAFETY: it waited for the write of the staging buffer, which is this call's, and for
            // what was gathered of the destination. Both turns are held.
            unsafe {
                buffer.mark_read(there);
                written.mark(there);
            }
            free[slot] = Some(there);
        }
        if *down {
            // Later work of the stream comes after the copy, and the end of the wait says that the
            // copy is over.
            let wait = [Op::Wait(upper.timeline.now())];
            // SAFETY: a wait touches no memory.
            unsafe { own.submit_list::<Operand<'_>>(own_trace, &wait, &[]) }?;
            own.count(1);
        }
        // Each waits for the other, whose driver does not know that.
        lower.raw.flush()?;
        upper.raw.flush()
    }

    fn recorded(&self) -> Result<()> {
        let Way { stream, other, copy, from, to, down, host } = self;
        let theirs = if *down { to } else { from };
        if !self.ours().device.caps().host_calls {
            return Err(Error::Unsupported(
                format!(
                    "{} has no host calls, by which its graphs copy from and to {}",
                    self.ours().id(),
                    other.id()
                )
                .into(),
            ));
        }
        other.refuse_symbolic(&[*theirs])?;
        let size = piece_bytes(copy.width * copy.rows);
        let staging = self.staging(stream.under(), size)?;
        let (reads, writes) = ([staging.read(), *to], [*from, staging.read_write()]);
        for piece in pieces(copy, size) {
            let own: Vec<Op<'_>> = transfers(copy, &piece, &staging, *down, host.0).collect();
            let carrier = Carrier {
                runtime: other.clone(),
                copy: **copy,
                piece,
                down: !down,
                host: host.1,
                buffer: theirs.view().buffer().clone(),
                staging: staging.clone(),
            };
            let call = HostCall::new("copy between devices", move || carrier.carry());
            let host = [Op::Host(&call)];
            // The lower steps write the staging buffer, and the upper steps read it.
            let (lower, upper) = if *down { (&own[..], &host[..]) } else { (&host[..], &own[..]) };
            for (steps, operands) in [(lower, &writes), (upper, &reads)] {
                for step in steps {
                    // SAFETY: both sides were checked to hold what is copied. The graph keeps the
                    // operands and marks them at each launch; the carrier keeps what it uses.
                    unsafe { stream.pass_checked(step, operands) }?;
                }
            }
        }
        Ok(())
    }
}

/// The other device's part of a recorded copy: a piece between a staging buffer and its memory.
struct Carrier {
    runtime: Arc<RuntimeInner>,
    copy: Copy2d,
    piece: Vec<Run>,
    /// Says whether it is the source's device, from which the piece goes down.
    down: bool,
    /// Says whether its memory is host memory.
    host: bool,
    buffer: Lease<Buffer>,
    staging: Lease<Buffer>,
}

impl Carrier {
    /// Carries the piece and waits until it has arrived.
    fn carry(&self) -> Result<()> {
        // A stream of the launch's own: the failure of one is not that of the next.
        let core = self.runtime.create_core(&StreamDesc::default())?;
        let list: Vec<Op<'_>> =
            transfers(&self.copy, &self.piece, &self.staging, self.down, self.host).collect();
        let mut turn = core.submit_guard()?;
        let trace = &mut turn.scratch().trace;
        // SAFETY: both buffers are held here and marked below; the graph's launch has waited for
        // all that used them before, and what uses them next waits for the launch.
        let value = unsafe { core.submit_list(trace, &list, &[self.buffer.read()]) }?;
        drop(turn);
        let point = core.timeline.at(value);
        // Beside the launch's own marks: should the wait fail, that may be over first.
        self.buffer.used_on(point);
        self.staging.used_on(point);
        core.raw.flush()?;
        core.raw.wait_host(point.value(), None)
    }
}

#[cfg(test)]
#[path = "../../tests/unit/peer_copy.rs"]
mod tests;
