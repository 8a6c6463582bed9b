//! Locks on buffers' records: the order of submissions that use the same buffers.

use super::suspended;
use crate::view::Operand;
use leasehold_alloc::Buffer;
use leasehold_core::{Error, Lease, PackedTimepoint, Result, Timeline, TimelineId, Timepoint};
use leasehold_hal::Op;
use std::cell::Cell;

thread_local! {
    /// How many submissions the thread is in the middle of, with records locked.
    static ORDERING: Cell<u32> = const { Cell::new(0) };
}

/// Returns whether the thread is in the middle of a submission, with records locked.
pub(crate) fn in_submission() -> bool {
    ORDERING.get() > 0
}

/// A use of a buffer by a submission.
pub(crate) trait Use {
    /// The buffer.
    fn lease(&self) -> &Lease<Buffer>;
    /// The buffer, or a part of it, with its role.
    fn operand(&self) -> Operand<'_>;
    /// The end of the bytes that must have memory, from the buffer's beginning.
    fn end(&self) -> u64;
    /// The beginning of the bytes that are written, from the buffer's beginning. `u64::MAX`: none
    /// are, or a kernel itself keeps to what the buffer has of its own.
    fn written(&self) -> u64;
}

impl Use for Operand<'_> {
    #[inline(always)]
    fn lease(&self) -> &Lease<Buffer> {
        self.view.lease
    }

    #[inline(always)]
    fn operand(&self) -> Operand<'_> {
        *self
    }

    #[inline(always)]
    fn end(&self) -> u64 {
        Operand::end(self)
    }

    #[inline(always)]
    fn written(&self) -> u64 {
        Operand::written(self)
    }
}

/// Refuses bytes beyond the end of a growing buffer. The record is [`Locked`], so that the buffer
/// does not shrink before the submission is marked.
///
/// # Errors
/// `InvalidArgument`.
#[inline(always)]
pub(crate) fn check_end(end: u64, buffer: &Buffer) -> Result<()> {
    if end <= buffer.len() { Ok(()) } else { Err(beyond_end(end, buffer.len())) }
}

/// Refuses a write of bytes that a growing buffer shares with others. The record is [`Locked`].
///
/// # Errors
/// `InvalidArgument`.
#[inline(always)]
pub(crate) fn check_own(written: u64, buffer: &Buffer) -> Result<()> {
    if buffer.is_growing() && written < buffer.shared() {
        return Err(not_own(written, buffer.shared()));
    }
    Ok(())
}

/// The bytes of a use have memory, and those that it writes are the buffer's own. Views of a buffer
/// that does not grow lie within it.
#[inline(always)]
fn check_place(one: &impl Use) -> Result<()> {
    if one.lease().is_growing() { check_growing(one) } else { Ok(()) }
}

#[cold]
fn check_growing(one: &impl Use) -> Result<()> {
    check_end(one.end(), one.lease())?;
    check_own(one.written(), one.lease())
}

#[cold]
fn not_own(written: u64, shared: u64) -> Error {
    Error::invalid(format!(
        "the work writes from byte {written} on, and the first {shared} bytes of the growing buffer are shared with its forks; write behind them, or a copy"
    ))
}

#[cold]
fn beyond_end(end: u64, len: u64) -> Error {
    Error::invalid(format!(
        "the work uses bytes up to {end} of a growing buffer that has {len} now; grow it first, or use the part that has memory"
    ))
}

/// A submission in the making: the records of its buffers are locked until this is dropped.
#[must_use = "records are unlocked when it is dropped"]
pub(crate) struct Locked<'u, U: Use> {
    timeline: &'static Timeline,
    uses: &'u [U],
    /// Says whether a buffer is used more than once.
    repeated: bool,
}

impl<'u, U: Use> Locked<'u, U> {
    /// A submission on `timeline` with these buffers, of which none is locked yet.
    #[inline(always)]
    pub(crate) fn new(timeline: &'static Timeline, uses: &'u [U]) -> Self {
        ORDERING.with(|n| n.set(n.get() + 1));
        Self { timeline, uses, repeated: false }
    }

    /// Locks the records of all the buffers, and adds what the submission must wait for. Blocks
    /// while other threads are in the middle of a submission with one of them.
    ///
    /// # Errors
    /// `Occupied` when this very thread is, and would wait for itself; `Suspended` for a buffer of
    /// a pool whose memory is away; `InvalidArgument` for bytes beyond a growing buffer's end.
    ///
    /// # Safety
    /// - The caller has the timeline's turn until this is dropped.
    #[inline(always)]
    pub(crate) unsafe fn gather(&mut self, waits: &mut Vec<Timepoint>) -> Result<()> {
        let id = self.timeline.id();
        for one in self.uses {
            // SAFETY: the caller has the timeline's turn, and the buffers are held until they are
            // unlocked.
            if !unsafe { one.lease().try_lock_record(id) } {
                self.repeated = true;
                if !one.lease().has_locked_record(id) {
                    // SAFETY: the caller has the timeline's turn.
                    return unsafe { gather_slow(self.timeline, self.uses, waits) };
                }
            }
            check_place(one)?;
            gather(self.timeline, &one.operand(), waits);
        }
        Ok(())
    }

    /// Marks what the submission did, at its timepoint, and unlocks the records.
    ///
    /// # Safety
    /// - `p` is the timepoint of a submission that waited for what was gathered. The caller has the
    ///   timeline's turn since then.
    #[inline(always)]
    pub(crate) unsafe fn mark(mut self, p: Timepoint) {
        if self.repeated {
            // SAFETY: by the caller's contract; the record is locked since it was gathered.
            return self.uses.iter().for_each(|one| unsafe { mark(one.operand(), p) });
        }
        for one in std::mem::take(&mut self.uses) {
            let operand = one.operand();
            // SAFETY: by the caller's contract; the record is locked since it was gathered, and no
            // other use needs the lock.
            unsafe {
                mark(operand, p);
                operand.view.lease.unlock_record();
            }
        }
        // The drop would do only this, because nothing is left to unlock.
        ORDERING.with(|n| n.set(n.get() - 1));
        std::mem::forget(self);
    }
}

impl<U: Use> Drop for Locked<'_, U> {
    #[inline(always)]
    fn drop(&mut self) {
        ORDERING.with(|n| n.set(n.get() - 1));
        if !self.uses.is_empty() {
            // SAFETY: by the contract of `gather` the timeline's turn is held; what was submitted
            // is marked.
            unsafe { unlock(self.timeline.id(), self.uses) };
        }
    }
}

/// Marks a use at a submission's timepoint.
///
/// # Safety
/// - As [`Locked::mark`]; the record is locked since it was gathered.
#[inline(always)]
unsafe fn mark(Operand { view, access, .. }: Operand<'_>, p: Timepoint) {
    // SAFETY: the caller's turn keeps marks in the timeline's order. The record's write was
    // gathered, and for a write its reads too.
    unsafe {
        if access.writes() {
            view.lease.mark_write(p);
        } else {
            view.lease.mark_read(p);
        }
    }
}

/// Unlocks those of the buffers that the timeline's submitter has locked.
///
/// # Safety
/// - The caller has the timeline's turn, and has marked what it submitted.
#[cold]
#[inline(never)]
unsafe fn unlock(timeline: TimelineId, uses: &[impl Use]) {
    for one in uses.iter().filter(|one| one.lease().has_locked_record(timeline)) {
        // SAFETY: locked for this timeline, whose turn the caller has.
        unsafe { one.lease().unlock_record() };
    }
}

/// Gives up the locks, and takes all of them in the order of addresses: whoever waits for one holds
/// only such as come before it.
///
/// # Safety
/// - As [`Locked::gather`].
#[cold]
#[inline(never)]
unsafe fn gather_slow(
    timeline: &Timeline,
    uses: &[impl Use],
    waits: &mut Vec<Timepoint>,
) -> Result<()> {
    // SAFETY: the caller has the timeline's turn, and has submitted nothing yet.
    unsafe { unlock(timeline.id(), uses) };
    if ORDERING.get() > 1 {
        uses.iter().try_for_each(|one| suspended::check(one.lease()))?;
        return Err(Error::Occupied {
            resource: "buffer (this very thread is in the middle of a submission with it, and would wait for itself)",
        });
    }
    let mut buffers: Vec<&Buffer> = uses.iter().map(|one| &**one.lease()).collect();
    buffers.sort_unstable_by_key(|buffer| std::ptr::from_ref(*buffer));
    buffers.dedup_by(|a, b| std::ptr::eq(*a, *b));
    for buffer in buffers {
        let mut rounds = 0u32;
        // SAFETY: the caller has the timeline's turn, and the buffers are held until they are
        // unlocked.
        while !unsafe { buffer.try_lock_record(timeline.id()) } {
            suspended::check(buffer)?;
            // The holder is in the middle of one submission, unless it has lost its processor.
            if rounds < 100 {
                std::hint::spin_loop()
            } else {
                std::thread::yield_now()
            }
            rounds = rounds.saturating_add(1);
        }
    }
    for one in uses {
        check_place(one)?;
        gather(timeline, &one.operand(), waits);
    }
    Ok(())
}

/// Adds the timepoints that an operand makes a submission on `timeline` wait for. The record is
/// [`Locked`].
///
/// A read of what a failed write wrote waits for that write, and has its failure: it is refused if
/// the failure is known by now ([`push_waits`]). A full overwrite, or a write after a read, needs
/// only that the failed work is over. So a buffer can be used again after a failure.
#[inline(always)]
fn gather(timeline: &Timeline, operand: &Operand<'_>, waits: &mut Vec<Timepoint>) {
    let buffer = operand.view.lease;
    let written = buffer.write_timepoint();
    if !timeline.knows(written) {
        add_unknown(written, operand.access.reads() || operand.is_part(), waits);
    }
    if operand.access.writes() {
        buffer.for_each_read(|read| need(timeline, read, false, waits));
    }
}

/// Adds a timepoint that `timeline` does not know unless it is over; where its data are read,
/// unless it is settled.
#[inline(always)]
pub(crate) fn need(
    timeline: &Timeline,
    timepoint: PackedTimepoint,
    data: bool,
    waits: &mut Vec<Timepoint>,
) {
    if !timeline.knows(timepoint) {
        add_unknown(timepoint, data, waits);
    }
}

#[inline(never)]
fn add_unknown(timepoint: PackedTimepoint, data: bool, waits: &mut Vec<Timepoint>) {
    if let Some(p) = timepoint.timepoint()
        && !(if data { p.is_settled() } else { p.has_passed() })
    {
        add_wait(waits, p);
    }
}

/// Adds waits to a submission's operations.
///
/// # Errors
/// The cause of a timepoint that is known to have failed: its wait would poison the stream.
#[inline]
pub(crate) fn push_waits(waits: &[Timepoint], ops: &mut Vec<Op<'_>>) -> Result<()> {
    if waits.is_empty() { Ok(()) } else { push_waits_slow(waits, ops) }
}

#[inline(never)]
fn push_waits_slow(waits: &[Timepoint], ops: &mut Vec<Op<'_>>) -> Result<()> {
    for p in waits {
        p.timeline().check(p.value())?;
        ops.push(Op::Wait(*p));
    }
    Ok(())
}

/// Keeps one point per timeline, the latest.
pub(crate) fn add_wait(waits: &mut Vec<Timepoint>, p: Timepoint) {
    match waits.iter_mut().find(|w| w.timeline_id() == p.timeline_id()) {
        Some(w) if w.value() < p.value() => *w = p,
        Some(_) => {}
        None => waits.push(p),
    }
}
