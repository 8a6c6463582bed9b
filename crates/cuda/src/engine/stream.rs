//! Streams of the driver, as the engine uses them.
//!
//! The device signals completion by words in pinned memory. Without words it does so by events, of
//! which a bounded number is pending.
//!
//! This module must not know what holds work back.

use super::core::Core;
use super::driver_context::ScopedContext;
use super::events::EventState;
use super::host::HostAction;
use super::program::Program;
use super::words::Word;
use crate::driver::ops::{NativeStream, Progress};
use crate::encoder::{self, Encoder};
use leasehold_alloc::Buffer;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Lease, Result, Timeline, Timepoint, UniqueLease};
use leasehold_hal::engine::driver::{DriverStream, Sink};
use leasehold_hal::engine::partitions::StreamKey;
use leasehold_hal::{ForeignCall, GraphExec, Op};
use std::collections::VecDeque;
use std::fmt;

/// Without words: once this many events are pending, submissions record no more events of their own
/// accord.
const SIGNALS: usize = 16;

/// A stream of the driver.
pub struct CudaStream {
    core: Arc<Core>,
    native: NativeStream,
    word: Option<Word>,
    /// Without words: events by value. A leaf, under which events are queried.
    signals: Mutex<VecDeque<(u64, Lease<EventState>)>>,
    /// Without words: the value that the events reported.
    seen: AtomicU64,
}

impl CudaStream {
    /// Records an event behind all work given so far.
    fn record_event(&self, event: &Lease<EventState>) -> Result<()> {
        // SAFETY: the event is leased, and the stream is this one's own.
        self.core.context.within(|ops| unsafe { ops.event_record(event.native, self.native) })
    }

    /// Queries the events in order, as far as they are over.
    #[cold]
    fn reached_by_events(&self) -> u64 {
        let mut signals = self.signals.lock();
        while let Some((value, event)) = signals.front() {
            // SAFETY: the event is leased.
            match self.core.context.within(|ops| unsafe { ops.event_query(event.native) }) {
                Ok(Progress::Complete) => {
                    self.seen.fetch_max(*value, Ordering::AcqRel);
                    signals.pop_front();
                }
                _ => break,
            }
        }
        self.seen.load(Ordering::Acquire)
    }
}

// SAFETY: the driver runs a stream's work in order. The word is written, and an event is recorded,
// behind the work. The native word of an exec of this backend is the address of its program.
unsafe impl DriverStream for CudaStream {
    type Device = Core;
    type Mark = Lease<EventState>;
    type Preparation = UniqueLease<Buffer>;
    type Action = HostAction;
    type Graph = Program;
    type Entry<'a> = ScopedContext<'a>;

    fn create(core: &Arc<Core>, key: &StreamKey, start: u64) -> Result<Self> {
        let word = if core.has_words() { Some(core.words.take(start)?) } else { None };
        let native = core.native_stream(key)?;
        Ok(Self {
            core: core.clone(),
            native,
            word,
            signals: Mutex::new(VecDeque::new()),
            seen: AtomicU64::new(start),
        })
    }

    fn handle(&self) -> u64 {
        self.native.0
    }

    /// The driver's numbers fall as the priority rises.
    fn priority_of(priority: i32) -> i32 {
        priority.saturating_neg()
    }

    #[inline]
    fn check(&self, op: &Op<'_>, timeline: &Timeline) -> Result<()> {
        let device = self.core.properties();
        op.check(timeline, device.shared_optin.max(device.shared))
    }

    #[inline(always)]
    fn is_plain(&self, op: &Op<'_>) -> bool {
        match op {
            Op::Dispatch(_)
            | Op::Copy(_)
            | Op::Copies(_)
            | Op::Fill(_)
            | Op::Upload(_)
            | Op::WriteTimestamp(_) => true,
            Op::Download(d) => encoder::copies_directly(&self.core, d),
            _ => false,
        }
    }

    fn prepare(&self, op: &Op<'_>) -> Result<Option<UniqueLease<Buffer>>> {
        match op {
            Op::Download(d) => self.core.staging.take(d.bytes).map(Some),
            _ => Ok(None),
        }
    }

    #[inline(always)]
    fn enter(&self) -> Result<ScopedContext<'_>> {
        self.core.context.enter()
    }

    #[inline]
    unsafe fn encode(
        &self,
        entry: &mut ScopedContext<'_>,
        op: &Op<'_>,
        staging: Option<UniqueLease<Buffer>>,
        sink: &mut Sink<'_, Self>,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the operation.
        unsafe { Encoder::new(&self.core, &**entry, self.native, sink).encode(op, staging) }
    }

    fn encode_wait(&self, entry: &mut ScopedContext<'_>, mark: &Lease<EventState>) -> Result<()> {
        // SAFETY: the recorded event is leased, and the stream is this one's own.
        unsafe { entry.stream_wait_event(self.native, mark.native) }
    }

    unsafe fn launch(
        &self,
        entry: &mut ScopedContext<'_>,
        exec: &Lease<dyn GraphExec>,
        segment: u32,
        sink: &mut Sink<'_, Self>,
    ) -> Result<()> {
        // SAFETY: the graph is of this device, and its memory may be used (the contract of this
        // function). The action below keeps the graph.
        let launched = unsafe { Program::of(exec).launch(segment, &**entry, self.native) };
        sink.took(launched)?;
        sink.leave(HostAction::Graph { exec: exec.clone(), segment });
        Ok(())
    }

    fn run_foreign(&self, call: &ForeignCall, _: u64) -> Result<()> {
        let _current = self.core.context.enter()?;
        call.run(self.native.0)
    }

    unsafe fn graph(exec: &Lease<dyn GraphExec>) -> &Program {
        // SAFETY: the exec is of this backend (the contract of this function).
        unsafe { Program::of(exec) }
    }

    fn signal(&self, value: u64) -> Result<()> {
        match &self.word {
            // SAFETY: the stream and its word are this one's own. The engine waits for the last
            // write before it drops the stream.
            Some(word) => self
                .core
                .context
                .within(|ops| unsafe { ops.stream_write_word(self.native, word.addr(), value) }),
            None => {
                let event = self.core.event()?;
                self.record_event(&event)?;
                self.signals.lock().push_back((value, event));
                Ok(())
            }
        }
    }

    #[inline]
    fn may_signal(&self) -> bool {
        self.word.is_some() || self.signals.lock().len() < SIGNALS
    }

    /// With words, no driver call.
    #[inline]
    fn reached(&self) -> u64 {
        match &self.word {
            Some(word) => word.load(),
            None => self.reached_by_events(),
        }
    }

    fn query(&self) -> Result<bool> {
        // SAFETY: the stream is this one's own and lives until the drop.
        let progress = self.core.context.within(|ops| unsafe { ops.stream_query(self.native) });
        Ok(progress? == Progress::Complete)
    }

    fn mark(&self) -> Result<Lease<EventState>> {
        self.core.event()
    }

    fn record(&self, event: &mut Lease<EventState>, _: u64) -> Result<()> {
        self.record_event(event)
    }

    fn mark_outside(&self, point: Timepoint) -> Result<Option<(Lease<EventState>, u64)>> {
        match self.core.shared.externals.get(point.timeline_id()) {
            // This stream waits for the other one alone.
            Some(source) => Ok(source
                .events_for(point.value())?
                .and_then(|(events, value)| events.into_iter().next().map(|event| (event, value)))),
            None => Ok(None),
        }
    }

    fn rest(&self) {
        let signals = std::mem::take(&mut *self.signals.lock());
        drop(signals);
    }

    fn host_function(&self, call: Box<dyn FnOnce() + Send>) -> Result<()> {
        // SAFETY: the stream is this one's own and lives until the drop.
        self.core.context.within(|ops| unsafe { ops.host_function(self.native, call) })
    }

    fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is this one's own and lives until the drop.
        self.core.context.release(|ops| unsafe { ops.stream_synchronize(self.native) })
    }

    fn abandon(&mut self) {
        std::mem::forget(self.word.take());
    }

    fn run_action(core: &Core, action: HostAction, sound: bool) {
        action.run(sound, core.context.ops());
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // SAFETY: `stream_create` made the native stream for this stream, and only this drop
        // destroys it.
        self.core.context.release_or_log(|ops| unsafe { ops.stream_destroy(self.native) });
    }
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaStream({:#x})", self.native.0)
    }
}
