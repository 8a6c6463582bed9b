//! The words on the device that say how long growing parts are, and how much of them is shared.

use crate::runtime::{Runtime, RuntimeInner};
use crate::stream::{Locked, Scratch, Stream, StreamInner, push_waits};
use crate::view::{Operand, View};
use leasehold_alloc::{Buffer, Layout, MIN_ALIGN, On};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Result, Timepoint};
use leasehold_hal::{Fill, KeepAlive, Op, Upload};

/// Bytes of a limit, and of the number of bytes that are shared.
const WORD: u64 = 8;

#[cold]
pub(super) fn in_recording() -> &'static str {
    "memory cannot grow or shrink in a recording; do it before, or between launches of the graph"
}

/// The stream itself, if it is of the buffer's device.
pub(super) fn core_of<'s>(
    stream: &'s Stream,
    runtime: &Arc<RuntimeInner>,
) -> Result<&'s StreamInner> {
    let core = stream.live(in_recording())?;
    if !Arc::ptr_eq(&stream.runtime, runtime) {
        return Err(Error::invalid(format!(
            "{stream:?} is not a stream of {}; use one of the runtime that has the buffer",
            runtime.id()
        )));
    }
    Ok(core)
}

/// Device memory for so many limits, and as many numbers of shared bytes behind them. Users only
/// read it.
pub(super) fn limits(runtime: &Runtime, core: &StreamInner, count: u64) -> Result<Lease<Buffer>> {
    let on = On { timeline: core.timeline, source: core.source() };
    runtime.allocator().alloc_read_only(Layout::aligned(2 * WORD * count, MIN_ALIGN), on)
}

/// Words to write.
#[derive(Clone, Copy)]
pub(super) struct Words<'a> {
    pub(super) buffer: &'a Lease<Buffer>,
    /// The number of a word, and its value. None: all words become 0.
    pub(super) values: &'a [(u64, u64)],
}

/// Writes words on a stream: all of them or none. `also`: operands that the write is ordered with.
pub(super) fn write_words(
    core: &StreamInner,
    words: &[Words<'_>],
    also: &[Operand<'_>],
) -> Result<()> {
    let mut submit_guard = core.submit_guard()?;
    let scratch = submit_guard.scratch();
    scratch.waits.clear();
    let written = words.iter().map(|words| words.buffer.write());
    let operands: Vec<_> = written.chain(also.iter().copied()).collect();
    let mut locked = Locked::new(core.timeline, &operands);
    // SAFETY: the submission lock is held until the end.
    unsafe { locked.gather(&mut scratch.waits) }?;
    let point = submit_words(core, scratch, words)?;
    // SAFETY: the submission waited for what was gathered, and the submission lock is held.
    unsafe { locked.mark(point) };
    Ok(())
}

/// Has `shrink` take memory from a buffer while its record is locked, so that no submission comes
/// between. `words.values`, if there are any, are written first.
pub(super) fn shorten(
    core: &StreamInner,
    words: Words<'_>,
    buffer: &Lease<Buffer>,
    shrink: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let mut submit_guard = core.submit_guard()?;
    let scratch = submit_guard.scratch();
    scratch.waits.clear();
    // The limits come after the launches that read the former ones. The buffer is named to lock its
    // record: its uses so far are what the memory waits for.
    let operands = [words.buffer.write(), buffer.view().narrowed(0, 0).read()];
    let mut locked = Locked::new(core.timeline, &operands);
    // SAFETY: the submission lock is held until the end.
    unsafe { locked.gather(&mut scratch.waits) }?;
    let limit = !words.values.is_empty();
    let point = limit.then(|| submit_words(core, scratch, &[words])).transpose()?;
    let shrunk = shrink();
    if let Some(point) = point {
        // SAFETY: the submission waited for what was gathered, and the submission lock is held.
        unsafe { locked.mark(point) };
    }
    shrunk
}

/// Submits writes of words, after the scratch's waits: one for those side by side. Their records
/// are locked.
fn submit_words(core: &StreamInner, scratch: &Scratch, words: &[Words<'_>]) -> Result<Timepoint> {
    let (mut ops, mut runs) = (Vec::new(), Vec::new());
    push_waits(&scratch.waits, &mut ops)?;
    for Words { buffer, values } in words {
        let (dst, native, bytes) = (buffer.addr(), buffer.native(), buffer.len());
        if values.is_empty() {
            ops.push(Op::Fill(Fill { dst, native, bytes, pattern: 0, width: 4 }));
        }
        for run in values.chunk_by(|a, b| a.0 + 1 == b.0) {
            let values: Vec<u64> = run.iter().map(|(_, value)| value.to_le()).collect();
            let (src, bytes) = (values.as_ptr().cast(), WORD * values.len() as u64);
            let keep: KeepAlive = Arc::new(values);
            runs.push((
                keep,
                Upload { src, dst: dst + run[0].0 * WORD, native, bytes, keep: None },
            ));
        }
    }
    ops.extend(runs.iter().map(|(keep, run)| Op::Upload(Upload { keep: Some(keep), ..*run })));
    // SAFETY: the words are buffers of this device, the stream's turn is held, and the records are
    // locked. The submission keeps the values.
    let value = unsafe { core.raw.submit(&ops) }?;
    core.count(ops.len());
    Ok(core.timeline.at(value))
}
