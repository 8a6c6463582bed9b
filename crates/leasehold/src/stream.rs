//! Streams: ordered queues of work, and the one door through which all work goes.
//!
//! # The door
//! Every copy, fill, session, event and graph launch passes [`Stream::pass`]: take the stream's turn; find the points that the operands must
//! wait for; one submission to the backend; mark the operands with the new point. Waits are inserted only for uses on other
//! lines that this line does not know of: on a single stream nothing is waited for and no driver is called.
//!
//! The turn is a word: free, held for one short call (others spin), or held by a session or a graph (others get `Occupied`).
//! It is a leaf: nothing else is locked while it is held but the backend's own submission lock.
//!
//! While a thread records, its calls on any stream of that device go to the recorder instead, and the stream is not touched.

use crate::graph::recorder;
use crate::runtime::{Runtime, RuntimeInner};
use crate::view::Operand;
use leasehold_core::sync::atomic::{AtomicU8, Ordering};
use leasehold_core::sync::{Arc, UnsafeCell, spin_loop, thread};
use leasehold_core::{Error, Lease, Line, Point, Result, Stamp, StreamHandle, Timeline};
use leasehold_hal::Op;
use std::fmt;
use std::time::Duration;

const FREE: u8 = 0;
const CALL: u8 = 1;
const SESSION: u8 = 2;

/// What a stream keeps between calls so that a launch allocates nothing.
pub(crate) struct Frame {
    pub(crate) session: crate::kernel::session::Staged,
    pub(crate) waits: Vec<Point>,
    /// Scratch for building a submission; empty between calls.
    pub(crate) ops: Vec<Op<'static>>,
}

/// A turn and the frame that it guards: of a stream, or of a thread that records.
pub(crate) struct Seat {
    turn: AtomicU8,
    frame: UnsafeCell<Frame>,
}

// SAFETY: the frame is touched only by whoever holds the turn. Its raw pointers are only used between a session's begin and
// end, while what they point to is borrowed.
unsafe impl Send for Seat {}
// SAFETY: as above.
unsafe impl Sync for Seat {}

impl Seat {
    pub(crate) fn new() -> Self {
        Self {
            turn: AtomicU8::new(FREE),
            frame: UnsafeCell::new(Frame {
                session: crate::kernel::session::Staged::default(),
                waits: Vec::with_capacity(8),
                ops: Vec::with_capacity(16),
            }),
        }
    }

    /// Whether somebody holds the turn.
    pub(crate) fn is_taken(&self) -> bool {
        self.turn.load(Ordering::Acquire) != FREE
    }

    /// Takes the turn for one short call.
    #[inline]
    pub(crate) fn turn(&self) -> Result<Turn<'_>> {
        if self.turn.compare_exchange(FREE, CALL, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.turn_slow(CALL)?;
        }
        Ok(Turn { seat: self })
    }

    /// Takes the turn for a session.
    #[inline]
    pub(crate) fn session_turn(&self) -> Result<Turn<'_>> {
        if self.turn.compare_exchange(FREE, SESSION, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.turn_slow(SESSION)?;
        }
        Ok(Turn { seat: self })
    }

    #[cold]
    fn turn_slow(&self, want: u8) -> Result<()> {
        let mut spins = 0;
        loop {
            match self.turn.compare_exchange_weak(FREE, want, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(SESSION) => return Err(Error::Occupied { resource: "stream (a session is open on it)" }),
                Err(_) => {}
            }
            spins += 1;
            if spins < 100 { spin_loop() } else { thread::yield_now() }
        }
    }
}

/// The part of a stream that the runtime and its handles share.
pub(crate) struct StreamCore {
    pub(crate) raw: Lease<dyn leasehold_hal::Stream>,
    pub(crate) line: &'static Line,
    pub(crate) seat: Seat,
}

impl StreamCore {
    pub(crate) fn new(raw: Lease<dyn leasehold_hal::Stream>) -> Self {
        let line = raw.line();
        Self { raw, line, seat: Seat::new() }
    }

    /// The cold half of the stream's timeline.
    #[inline]
    pub(crate) fn raw_timeline(&self) -> &dyn Timeline {
        &*self.raw
    }
}

/// The right to submit to a stream and to use its frame.
pub(crate) struct Turn<'s> {
    seat: &'s Seat,
}

impl<'s> Turn<'s> {
    /// The frame.
    #[inline]
    pub(crate) fn frame(&self) -> &'s mut Frame {
        // SAFETY: the holder of the turn is alone with the frame, and each caller drops the reference before the next one is made.
        unsafe { &mut *self.seat.frame.get() }
    }
}

impl Drop for Turn<'_> {
    #[inline]
    fn drop(&mut self) {
        self.seat.turn.store(FREE, Ordering::Release);
    }
}

/// Adds the points that an operand makes a submission on `line` wait for.
#[inline]
pub(crate) fn gather(line: &Line, operand: &Operand<'_>, waits: &mut Vec<Point>) {
    let buffer = operand.slice.lease;
    let mut need = |stamp: Stamp| {
        // What failed is waited for too: the failure must reach this stream.
        if !line.knows(stamp)
            && !stamp.is_settled()
            && let Some(p) = stamp.point()
        {
            add_wait(waits, p);
        }
    };
    need(buffer.write_stamp());
    if operand.access.writes() {
        buffer.for_each_read(need);
    }
}

/// Keeps one point per line, the latest.
pub(crate) fn add_wait(waits: &mut Vec<Point>, p: Point) {
    match waits.iter_mut().find(|w| w.line_id() == p.line_id()) {
        Some(w) if w.value() < p.value() => *w = p,
        Some(_) => {}
        None => waits.push(p),
    }
}

/// Marks what an operand did, at the submission's point.
#[inline]
pub(crate) fn mark(operand: &Operand<'_>, p: Point) {
    if operand.access.writes() {
        operand.slice.lease.mark_write(p);
    } else {
        operand.slice.lease.mark_read(p);
    }
}

/// An ordered queue of work on a device. Clones are the same stream.
///
/// Within a stream operations behave in order. Any thread may use it, one call at a time; while a session is open on it, other
/// calls get `Occupied`. Dropping a stream with work pending loses nothing: the work completes.
#[derive(Clone)]
pub struct Stream {
    pub(crate) core: Arc<StreamCore>,
    pub(crate) runtime: Arc<RuntimeInner>,
}

impl Stream {
    /// The stream's handle.
    #[must_use]
    pub fn handle(&self) -> StreamHandle {
        self.core.raw.handle()
    }

    /// The point of everything submitted so far.
    #[must_use]
    pub fn now(&self) -> Point {
        self.core.line.now()
    }

    /// Whether all that was submitted is complete. Asks the driver; never blocks.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; `Recording` on a thread that records on this device.
    pub fn query(&self) -> Result<bool> {
        recorder::refuse(&self.runtime, "a stream cannot be queried while recording")?;
        self.core.raw.refresh()?;
        self.core.line.check(self.core.line.submitted())
    }

    /// Blocks until all that was submitted is over.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; `Recording` on a thread that records on this device.
    pub fn synchronize(&self) -> Result<()> {
        self.synchronize_timeout(None)
    }

    /// As [`synchronize`](Self::synchronize), with a deadline. Zero polls.
    ///
    /// # Errors
    /// `Timeout` as well.
    pub fn synchronize_timeout(&self, timeout: Option<Duration>) -> Result<()> {
        recorder::refuse(&self.runtime, "a stream cannot be synchronised while recording")?;
        self.core.raw.wait_host(self.core.line.submitted(), timeout)
    }

    /// Makes sure that everything submitted is on its way to the device. Does not block.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's own.
    pub fn flush(&self) -> Result<()> {
        self.core.raw.flush()
    }

    /// The driver's stream, for libraries that take one; 0 where there is none.
    #[must_use]
    pub fn native(&self) -> u64 {
        self.core.raw.native()
    }

    /// The priority that the stream got, after clamping.
    #[must_use]
    pub fn priority(&self) -> i32 {
        self.core.raw.priority()
    }

    /// Whether both are the same stream.
    #[must_use]
    pub fn same(&self, other: &Stream) -> bool {
        Arc::ptr_eq(&self.core, &other.core)
    }

    /// The failure that poisoned the stream, if one did.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        self.core.line.failure().map(|(_, e)| e)
    }

    /// The stream under it, for backends' own extensions.
    pub fn raw(&self) -> &Lease<dyn leasehold_hal::Stream> {
        &self.core.raw
    }

    /// The runtime that the stream belongs to.
    #[must_use]
    pub fn runtime(&self) -> Runtime {
        Runtime::from_inner(self.runtime.clone())
    }

    /// The door: hands one operation over, ordered after everything that its operands wait for.
    ///
    /// # Safety
    /// - As [`leasehold_hal::Stream::submit`], except that `operands` (checked here) cover all device memory that `op` touches.
    pub(crate) unsafe fn pass(&self, op: &Op<'_>, operands: &[Operand<'_>]) -> Result<Option<Point>> {
        self.runtime.check_operands(operands)?;
        if recorder::is_active() {
            // SAFETY: by the caller's contract; the recorder runs nothing.
            if let Some(result) = unsafe { recorder::record(&self.runtime, op, operands) } {
                return result.map(|()| None);
            }
        }
        self.runtime.refuse_symbolic(operands)?;
        let turn = self.core.seat.turn()?;
        // SAFETY: by the caller's contract.
        unsafe { self.pass_in_turn(&turn, op, operands) }.map(Some)
    }

    /// # Safety
    /// - As [`pass`](Self::pass).
    pub(crate) unsafe fn pass_in_turn(&self, turn: &Turn<'_>, op: &Op<'_>, operands: &[Operand<'_>]) -> Result<Point> {
        let line = self.core.line;
        let waits = &mut turn.frame().waits;
        waits.clear();
        for operand in operands {
            gather(line, operand, waits);
        }
        let value = if waits.is_empty() {
            // SAFETY: by the caller's contract.
            unsafe { self.core.raw.submit(std::slice::from_ref(op)) }?
        } else {
            // SAFETY: as above.
            unsafe { self.submit_after(waits, op) }?
        };
        let point = line.at(value);
        operands.iter().for_each(|o| mark(o, point));
        Ok(point)
    }

    /// # Safety
    /// - As [`pass`](Self::pass).
    #[cold]
    pub(crate) unsafe fn submit_after(&self, waits: &[Point], op: &Op<'_>) -> Result<u64> {
        let mut ops: Vec<Op<'_>> = Vec::with_capacity(waits.len() + 1);
        ops.extend(waits.iter().map(|&p| Op::Wait(p)));
        ops.push(*op);
        // SAFETY: by the caller's contract.
        let value = unsafe { self.core.raw.submit(&ops) }?;
        waits.iter().for_each(|&p| self.core.line.learn(p));
        Ok(value)
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({}, {:?})", self.runtime.id(), self.core.line)
    }
}
