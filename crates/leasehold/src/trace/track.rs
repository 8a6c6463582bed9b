//! The submissions of a stream, as a trace notes them.
//!
//! A traced submission has a timestamp before and after each of its operations. Times are read once
//! the submission is over: at a later one of the stream, or at the trace's end.
//!
//! # Locks
//! The notes are locked for moments, and nothing of the user's is called meanwhile. A submission
//! reads times under its stream's submission lock, which no driver call there blocks.
//!
//! This module must not know streams or runtimes.

use crate::trace::recorder::{Recorder, nanos};
use crate::view::Operand;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Lease, Name, Result, Timeline, Timepoint};
use leasehold_hal::{Access, Dispatch, Op, Stream, TimestampQuery};

/// The most operations whose times a submission reads.
const READ_PER_SUBMISSION: usize = 64;
/// The most characters that are kept of a kernel's or a call's name.
const LONGEST: usize = 128;
/// Times farther apart are counted from a nearer moment: drivers give them in 24 bits.
const FAR: u64 = 1_000_000_000;

/// A submission by the host.
pub(crate) struct Submission {
    pub(crate) thread: u32,
    pub(crate) begun: u64,
    pub(crate) ended: u64,
    /// The value of the stream's timeline, unless the submission was refused.
    pub(crate) value: Option<u64>,
    pub(crate) error: Option<String>,
    pub(crate) scope: Option<Name>,
    /// The timepoints that the submission waits for on the device.
    pub(crate) waits: Vec<Timepoint>,
}

/// An operation of a submission.
pub(crate) struct Operation {
    /// The place of its submission in the track.
    pub(crate) submission: usize,
    /// As [`Op::kind`].
    pub(crate) kind: &'static str,
    pub(crate) name: String,
    /// Blocks and threads of a launch.
    pub(crate) shape: Option<([u32; 3], [u32; 3])>,
    /// Bytes that a copy moves or a fill writes.
    pub(crate) bytes: Option<u64>,
    pub(crate) operands: Vec<NotedOperand>,
    /// The operations of a graph, in order.
    pub(crate) nodes: Option<Arc<[String]>>,
    pub(crate) time: Time,
}

/// An operand of an operation.
pub(crate) struct NotedOperand {
    pub(crate) name: Option<Name>,
    pub(crate) bytes: u64,
    pub(crate) access: Access,
}

impl NotedOperand {
    fn of(Operand { view, access, .. }: Operand<'_>) -> Self {
        Self { name: Name::from_tag(view.lease.tag()), bytes: view.len, access }
    }
}

/// The time of an operation.
pub(crate) enum Time {
    /// The timestamps before and after it, which are not read yet.
    Asked([Lease<TimestampQuery>; 2]),
    /// Nanoseconds from the trace's start.
    Known(u64, u64),
    /// Nobody knows: it did not run, it was not over in time, or the device has no timestamps.
    Unknown,
}

/// The record of a stream.
#[derive(Default)]
pub(crate) struct Notes {
    pub(crate) submissions: Vec<Submission>,
    pub(crate) operations: Vec<Operation>,
    /// The operations whose times were read, or were found to be unknown.
    read: usize,
    /// The operations of the graph that is about to be launched.
    nodes: Option<Arc<[String]>>,
    /// A moment from which times are counted, and its own.
    base: Option<(Lease<TimestampQuery>, u64)>,
}

/// A stream of a trace.
pub(crate) struct Track {
    recorder: Arc<Recorder>,
    pub(crate) timeline: &'static Timeline,
    notes: Mutex<Notes>,
}

impl Track {
    pub(crate) fn new(recorder: Arc<Recorder>, timeline: &'static Timeline) -> Self {
        let base = recorder.anchor();
        Self { recorder, timeline, notes: Mutex::new(Notes { base, ..Notes::default() }) }
    }

    /// Returns whether the trace goes on.
    pub(crate) fn is_on(&self) -> bool {
        self.recorder.is_on()
    }

    /// Says which operations the graph has that is launched next. The caller has the stream's
    /// turn.
    pub(crate) fn launches(&self, nodes: Arc<[String]>) {
        self.notes.lock().nodes = Some(nodes);
    }

    /// Submits operations with timestamps, and notes them with their operands. Returns also how
    /// many operations were added.
    ///
    /// # Errors
    /// As [`Stream::submit`].
    ///
    /// # Safety
    /// - As [`Stream::submit`]; the stream is the track's, of the recorder's device. The caller has
    ///   its turn.
    pub(crate) unsafe fn submit(
        &self,
        stream: &dyn Stream,
        ops: &[Op<'_>],
        operands: &mut dyn Iterator<Item = Operand<'_>>,
    ) -> Result<(u64, usize)> {
        self.read_some();
        let works = ops.iter().filter(|op| is_work(op)).count();
        if !self.recorder.take_room(1 + works) {
            // SAFETY: by the caller's contract.
            return unsafe { stream.submit(ops) }.map(|value| (value, 0));
        }
        let stamps: Vec<_> = ops.iter().map(|op| self.stamps(op)).collect();
        let mut list = Vec::with_capacity(ops.len() + 2 * works);
        for (op, stamps) in std::iter::zip(ops, &stamps) {
            list.extend(stamps.as_ref().map(|[before, _]| Op::WriteTimestamp(before)));
            list.push(*op);
            list.extend(stamps.as_ref().map(|[_, after]| Op::WriteTimestamp(after)));
        }
        let begun = self.recorder.now();
        // SAFETY: by the caller's contract; the timestamps are of the stream's device.
        let result = unsafe { stream.submit(&list) };
        let ended = self.recorder.now();
        let submission = Submission {
            thread: self.recorder.thread(),
            begun,
            ended,
            value: result.as_ref().ok().copied(),
            error: result.as_ref().err().map(ToString::to_string),
            scope: Name::current(),
            waits: ops.iter().filter_map(awaited).collect(),
        };
        let added = list.len() - ops.len();
        drop(list);
        self.note(submission, ops, stamps, operands);
        self.recorder.sample();
        result.map(|value| (value, added))
    }

    /// The timestamps around an operation that takes time, if the device has any.
    fn stamps(&self, op: &Op<'_>) -> Option<[Lease<TimestampQuery>; 2]> {
        let device = &self.recorder.device;
        if !is_work(op) || !device.caps().timestamps {
            return None;
        }
        Some([device.timestamp().ok()?, device.timestamp().ok()?])
    }

    fn note(
        &self,
        submission: Submission,
        ops: &[Op<'_>],
        stamps: Vec<Option<[Lease<TimestampQuery>; 2]>>,
        operands: &mut dyn Iterator<Item = Operand<'_>>,
    ) {
        // Without the lock: names have a lock of their own.
        let noted: Vec<_> = operands.map(NotedOperand::of).collect();
        let mut operands = noted.into_iter();
        let refused = submission.value.is_none();
        let mut notes = self.notes.lock();
        let mut nodes = notes.nodes.take();
        if !self.is_on() {
            return;
        }
        let at = notes.submissions.len();
        notes.submissions.push(submission);
        for (op, stamps) in std::iter::zip(ops, stamps).filter(|(op, _)| is_work(op)) {
            let (shape, own) = match op {
                Op::Dispatch(Dispatch { grid, block, bindings, .. }) => {
                    (Some((*grid, *block)), bindings.len())
                }
                _ => (None, usize::MAX),
            };
            let time = match stamps {
                Some(stamps) if !refused => Time::Asked(stamps),
                _ => Time::Unknown,
            };
            notes.operations.push(Operation {
                submission: at,
                kind: op.kind(),
                name: name_of(op),
                shape,
                bytes: bytes_of(op),
                operands: operands.by_ref().take(own).collect(),
                nodes: if matches!(op, Op::Graph(_)) { nodes.take() } else { None },
                time,
            });
        }
    }

    /// Reads some times of submissions that are over.
    fn read_some(&self) {
        self.notes.lock().read(&self.recorder, self.timeline, READ_PER_SUBMISSION);
    }

    /// The last value that the track has.
    pub(crate) fn last(&self) -> Option<u64> {
        self.notes.lock().submissions.iter().rev().find_map(|s| s.value)
    }

    /// Reads the times of all submissions that are over, and gives up the notes. The times of the
    /// others are unknown.
    pub(crate) fn take_notes(&self) -> Notes {
        let mut notes = std::mem::take(&mut *self.notes.lock());
        notes.read(&self.recorder, self.timeline, usize::MAX);
        for operation in notes.operations.iter_mut().skip(notes.read) {
            operation.time = Time::Unknown;
        }
        notes.base = None;
        notes
    }
}

impl Notes {
    /// Reads at most `most` times of submissions that are over, in their order.
    fn read(&mut self, recorder: &Recorder, timeline: &Timeline, most: usize) {
        let Self { submissions, operations, read, base, .. } = self;
        let completed = timeline.completed();
        for operation in operations.iter_mut().skip(*read).take(most) {
            if submissions[operation.submission].value.is_some_and(|value| value > completed) {
                return;
            }
            *read += 1;
            let Time::Asked(stamps) = std::mem::replace(&mut operation.time, Time::Unknown) else {
                continue;
            };
            if let Some((begun, ended)) = times(recorder, base, stamps) {
                operation.time = Time::Known(begun, ended);
            }
        }
    }
}

/// The times of two timestamps that are written; `None` for such as never will be.
fn times(
    recorder: &Recorder,
    base: &mut Option<(Lease<TimestampQuery>, u64)>,
    [before, after]: [Lease<TimestampQuery>; 2],
) -> Option<(u64, u64)> {
    let (from, at) = base.as_ref()?;
    // SAFETY: all timestamps are of the recorder's device.
    let (begun, took) = unsafe {
        let begun = at + nanos(recorder.device.elapsed(from, &before).ok()?);
        (begun, nanos(recorder.device.elapsed(&before, &after).ok()?))
    };
    if begun - at > FAR {
        *base = Some((before, begun));
    }
    Some((begun, begun + took))
}

/// Returns whether an operation takes time of its own.
fn is_work(op: &Op<'_>) -> bool {
    !matches!(op, Op::Wait(_) | Op::WriteTimestamp(_))
}

fn awaited(op: &Op<'_>) -> Option<Timepoint> {
    if let Op::Wait(point) = op { Some(*point) } else { None }
}

fn name_of(op: &Op<'_>) -> String {
    let name = match op {
        Op::Dispatch(d) => &*d.pipeline.name,
        Op::Host(h) => h.name,
        Op::Foreign(f) => f.name,
        other => other.kind(),
    };
    name.chars().take(LONGEST).collect()
}

fn bytes_of(op: &Op<'_>) -> Option<u64> {
    match op {
        Op::Copy(c) => Some(c.width.saturating_mul(c.rows)),
        Op::Copies(c) => Some(c.bytes()),
        Op::Fill(f) => Some(f.bytes),
        Op::Upload(u) => Some(u.bytes),
        Op::Download(d) => Some(d.bytes),
        _ => None,
    }
}
