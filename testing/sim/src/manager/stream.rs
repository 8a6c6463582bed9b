//! Streams: a queue of the machine, a semaphore that each submission raises, and a timeline.
//!
//! # Protocol
//! A submission becomes commands in the submitter's turn on the stream: its operations, a signal of
//! the semaphore (for waiting streams), and a host function. The host function drops the
//! submission's leases and then publishes its value. It runs even if the queue has failed. A lost
//! device runs no function; then each thread that notices the loss publishes all values.
//!
//! An idle stream without failures and holders keeps its queue for the next request. A stream with
//! pending work goes to the retire list.
//!
//! This module must not know which work streams run.

use super::device::Common;
use crate::machine::{
    Command, EventId, ExecId, FillCall, PartitionId, QueueId, SemaphoreId, Transfer,
};
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    Error, Lease, Name, Result, Tagged, Timeline, TimelineOwner, Timepoint, VALUE_LIMIT, tags,
};
use leasehold_hal::engine::partitions::StreamKey;
use leasehold_hal::engine::stream_pool::{PooledStream, StreamPool, is_sound};
use leasehold_hal::{Copy2d, Fill, Op, OpList, Partition};
use std::fmt;
use std::marker::PhantomPinned;

/// A stream.
pub struct StreamState {
    common: Arc<Common>,
    owner: Arc<TimelineOwner>,
    pub(crate) queue: QueueId,
    semaphore: SemaphoreId,
    /// Ends after the queue, which the drop destroys.
    partition: Option<Lease<Partition>>,
    /// The pool may lend the stream again. Not so on a partition, which would never end.
    pooled: bool,
    /// The submitter's turn, with the number and the name under which reports know the stream.
    turn: Mutex<(u64, Option<Name>)>,
    /// The state must not be moved out of its manager's pool.
    _place: PhantomPinned,
}

impl StreamState {
    fn new(common: Arc<Common>, key: &StreamKey) -> Result<Self> {
        let owner = Arc::new(TimelineOwner::take()?);
        let on = key.partition.as_ref().map(|partition| PartitionId(partition.native()));
        let queue = common.machine.queue_create_on(common.device, on)?;
        let semaphore = match common.semaphore(owner.timeline()) {
            Ok(semaphore) => semaphore,
            Err(e) => {
                common.machine.queue_destroy(queue)?;
                return Err(e);
            }
        };
        let timeline = owner.timeline();
        common.enter(queue, timeline);
        let number = common.made.fetch_add(1, Ordering::Relaxed);
        let name = format!("{} stream {number}", common.name);
        // A timeline's values continue from its last stream.
        common.machine.queue_set_name(queue, &format!("{} {:?}", common.name, timeline.id()))?;
        common.machine.queue_report_as(queue, &name, timeline.submitted())?;
        let publisher = common.clone();
        owner.set_publisher(Some(Arc::new(move |value, timeout| {
            publisher.await_timeline(timeline, value, timeout)
        })));
        common.timelines.lock().push((timeline, Arc::downgrade(&owner)));
        let turn = Mutex::new((number, None));
        Ok(Self {
            common,
            owner,
            queue,
            semaphore,
            partition: key.partition.clone(),
            pooled: key.partition.is_none(),
            turn,
            _place: PhantomPinned,
        })
    }

    /// The timeline.
    #[inline]
    pub fn timeline(&self) -> &'static Timeline {
        self.owner.timeline()
    }

    pub(crate) fn partition(&self) -> Option<&Lease<Partition>> {
        self.partition.as_ref()
    }

    pub(crate) fn common(&self) -> &Common {
        &self.common
    }

    /// Submits operations as one submission; see `hal::Stream::submit`.
    ///
    /// # Errors
    /// As `hal::Stream::submit`.
    ///
    /// # Safety
    /// - As `hal::Stream::submit`.
    pub(crate) unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        let timeline = self.timeline();
        let mut turn = self.turn.lock();
        self.show_name(&mut turn)?;
        self.common.notice_loss();
        if let Some((_, cause)) = timeline.failure() {
            return Err(cause);
        }
        let value = timeline.submitted() + 1;
        if value >= VALUE_LIMIT {
            return Err(Error::state("a timeline's 2^48 values are used up; replace the stream"));
        }
        let machine = &self.common.machine;
        let mut commands = Vec::with_capacity(ops.len() + 2);
        let mut held = OpList::new();
        // All operations are checked before the first one is enqueued.
        let mut calls = Vec::new();
        for op in ops {
            op.check(timeline, u32::MAX)?;
            match op {
                Op::Foreign(call) => calls.push((commands.len(), *call)),
                Op::Copies(copies) => {
                    let alone = copies.pieces().iter().map(|piece| plain(&piece.alone()));
                    commands.extend(alone.map(Command::Copy));
                }
                // SAFETY: the operation belongs to this submission, for which the caller vouches.
                _ => commands.extend(unsafe { self.command(op, value) }?),
            }
            held.push(op);
        }
        let mut given = 0;
        let mut rest = commands.into_iter();
        for (at, call) in calls {
            let before: Vec<Command> = rest.by_ref().take(at - given).collect();
            given = at;
            let taken =
                machine.submit_as(self.queue, value, before).and_then(|()| call.run(self.queue.0));
            if let Err(e) = taken {
                // A part was accepted: the stream is poisoned from here.
                let cause = self.common.fault(
                    &format!("foreign call {}", call.name),
                    self.queue,
                    value,
                    &e,
                );
                machine.queue_fail(self.queue, cause)?;
                self.owner.advance()?;
                self.common.publish(self.queue, &self.owner, value, held);
                return Ok(value);
            }
        }
        let mut last: Vec<Command> = rest.collect();
        let (queue, owner) = (self.queue, self.owner.clone());
        let mut held = Held { ops: held, common: self.common.clone(), published: false };
        last.push(Command::Signal(self.semaphore, value));
        last.push(Command::Host {
            name: "completion".into(),
            call: Box::new(move || {
                held.published = true;
                held.common.publish(queue, &owner, value, std::mem::take(&mut held.ops));
            }),
            always: true,
        });
        if let Err(e) = machine.submit_as(self.queue, value, last) {
            self.common.notice_loss();
            return Err(e);
        }
        for op in ops {
            if let Op::Wait(p) = op {
                self.owner.learn(*p);
            }
        }
        self.owner.advance()
    }

    /// Tells the machine the name that the stream has now.
    fn show_name(&self, (number, shown): &mut (u64, Option<Name>)) -> Result<()> {
        let name = self.timeline().name();
        if name != *shown {
            let text = name.as_ref().map_or(String::new(), |name| format!(" {name}"));
            let text = format!("{} stream {number}{text}", self.common.name);
            self.common.machine.queue_rename(self.queue, &text)?;
            *shown = name;
        }
        Ok(())
    }

    /// An operation as commands.
    ///
    /// # Safety
    /// - The host memory that it names may be used until the submission is over.
    unsafe fn command(&self, op: &Op<'_>, value: u64) -> Result<Option<Command>> {
        Ok(Some(match *op {
            Op::Wait(point) => return self.wait(point),
            Op::Dispatch(d) => Command::Kernel(self.common.call(&d)?),
            Op::Copy(_) | Op::Upload(_) | Op::Download(_) => {
                // SAFETY: the caller vouches for the operation's host memory.
                Command::Copy(unsafe { transfer(op) }?)
            }
            Op::Fill(f) => Command::Fill(fill(&f)),
            Op::WriteTimestamp(t) => Command::Record(EventId(t.native())),
            Op::Host(call) => {
                let (common, call, name, queue) =
                    (self.common.clone(), call.clone(), op.name(), self.queue);
                let what = name.clone();
                let run = Box::new(move || common.host_call(&call, &what, queue, value));
                Command::Host { name: name.into(), call: run, always: false }
            }
            Op::Graph(graph) => Command::Launch(ExecId(graph.native())),
            ref other => {
                return Err(Error::Unsupported(
                    format!("a {} is not known here", other.kind()).into(),
                ));
            }
        }))
    }

    fn wait(&self, point: Timepoint) -> Result<Option<Command>> {
        let timeline = point.timeline();
        if timeline.id() == self.timeline().id() {
            if timeline.knows(point.into()) {
                return Ok(None);
            }
            // A failure under a former owner of the timeline fails this stream too.
        } else if let Some(semaphore) = self.common.semaphore_of(timeline.id()) {
            return Ok(Some(Command::WaitSemaphore(semaphore, point.value())));
        }
        self.common.note_foreign(point);
        let ready = Box::new(move || match timeline.check(point.value()) {
            Ok(false) => None,
            Ok(true) => Some(Ok(())),
            Err(e) => Some(Err(e)),
        });
        Ok(Some(Command::Until { name: "wait", ready }))
    }
}

/// A copy, upload or download as a transfer.
///
/// # Safety
/// - The host memory of an upload or download may be read or written until the transfer is over.
pub(crate) unsafe fn transfer(op: &Op<'_>) -> Result<Transfer> {
    let c = match *op {
        Op::Copy(c) => c,
        Op::Upload(u) => {
            let c = Copy2d::linear((u.src as u64, 0), (u.dst, 0), u.bytes);
            // SAFETY: the caller vouches for the source; the machine checks the destination.
            return Ok(unsafe { plain(&c).with_host() });
        }
        Op::Download(d) => {
            let c = Copy2d::linear((d.src, 0), (d.dst as u64, 0), d.bytes);
            // SAFETY: the caller vouches for the destination; the machine checks the source.
            return Ok(unsafe { plain(&c).with_host() });
        }
        _ => return Err(Error::invalid(format!("a {} is no copy", op.kind()))),
    };
    Ok(plain(&c))
}

/// A copy between memories of the machine.
fn plain(c: &Copy2d) -> Transfer {
    // The pitches of an empty copy, and those of one row, have no meaning.
    if c.rows <= 1 || c.width == 0 {
        return Transfer::linear(c.src, c.dst, c.width * c.rows.min(1));
    }
    Transfer::rows((c.src, c.src_pitch), (c.dst, c.dst_pitch), c.width, c.rows)
}

/// A fill as a fill of the machine.
pub(crate) fn fill(f: &Fill) -> FillCall {
    FillCall::linear(f.dst, f.bytes, f.pattern, f.width)
}

/// The leases of a submission until it is over.
struct Held {
    ops: OpList,
    common: Arc<Common>,
    published: bool,
}

impl Drop for Held {
    fn drop(&mut self) {
        // A lost device runs no function. The destructors below find the loss in the stream's
        // timeline.
        if !self.published {
            self.common.notice_loss();
        }
    }
}

impl Tagged for StreamState {
    type Tag = tags::Stream;
}

impl fmt::Debug for StreamState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamState({:?})", self.timeline())
    }
}

impl Drop for StreamState {
    fn drop(&mut self) {
        self.common.forget(self.owner.timeline(), self.semaphore);
        // The queue belongs to this stream alone; no other code names it.
        let _ = self.common.machine.queue_destroy(self.queue);
    }
}

impl PooledStream for StreamState {
    type Key = StreamKey;

    fn key(&self) -> StreamKey {
        StreamKey { priority: 0, partition: self.partition.clone() }
    }

    fn timeline(&self) -> &'static Timeline {
        Self::timeline(self)
    }

    fn is_sound(&self) -> bool {
        self.pooled && is_sound(self.timeline())
    }

    fn let_go(&self) -> bool {
        // No later query is certain, so all work that can run runs now.
        self.common.go_on();
        self.is_sound()
    }

    fn ends_at_once(&self) -> bool {
        self.timeline().is_idle()
    }
}

/// Owns the streams of a device.
pub type StreamManager = StreamPool<StreamState>;

/// A manager of at most `limit` streams.
pub(crate) fn manager(common: Arc<Common>, limit: u32) -> Result<StreamManager> {
    StreamPool::new(limit, Box::new(move |key| StreamState::new(common.clone(), key)))
}
