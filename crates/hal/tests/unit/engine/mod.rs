//! The engine over a driver that does nothing but keep its calls: what reaches the driver, when,
//! and what becomes of the rest.

use crate::engine::driver::{DriverDevice, DriverStream, GraphSteps, Sink};
use crate::engine::host_timeline::HostTimelineManager;
use crate::engine::partitions::StreamKey;
use crate::engine::state::Job;
use crate::engine::steps::Steps;
use crate::engine::tables::Tables;
use crate::engine::threads::Threads;
use crate::engine::{Engine, EngineConfig, StreamCore};
use crate::{DeviceId, Fill, ForeignCall, GraphExec, HostCall, Op};
use leasehold_core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex, thread};
use leasehold_core::{Error, Lease, Result, Timeline, TimelineOwner, Timepoint};
use std::time::Duration;

/// A device whose streams stand still while `busy` is set, and else are done at once.
#[derive(Default)]
struct Recorder {
    busy: AtomicBool,
    lost: AtomicBool,
    /// Makes the next fill fail.
    refuses: AtomicBool,
    /// No submission has room.
    full: AtomicBool,
    /// The first value of the first stream that fails on the device.
    fails: Mutex<Option<(u64, Error)>>,
    streams: AtomicU64,
    calls: Mutex<Vec<String>>,
    /// The next host part runs this function.
    during: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Recorder {
    fn called(&self, call: impl Into<String>) {
        self.calls.lock().push(call.into());
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock())
    }

    fn check(&self) -> Result<()> {
        self.loss().map_or(Ok(()), Err)
    }
}

impl DriverDevice for Recorder {
    fn id(&self) -> DeviceId {
        DeviceId::cuda(0)
    }

    fn loss(&self) -> Option<Error> {
        let lost = self.lost.load(Ordering::Acquire);
        lost.then(|| Error::DeviceLost { cause: "unplugged".into() })
    }

    fn poll_interval(&self) -> Duration {
        Duration::from_micros(1)
    }

    fn kernel_name(&self, _: u64) -> Option<String> {
        None
    }
}

/// Plans are no part of these tests.
enum NoGraph {}

impl GraphSteps for NoGraph {
    fn steps(&self) -> &Steps {
        match *self {}
    }
}

struct RecorderStream {
    device: Arc<Recorder>,
    number: u64,
    signalled: AtomicU64,
    reached: AtomicU64,
}

// SAFETY: the streams have no work that touches memory. A graph cannot exist.
unsafe impl DriverStream for RecorderStream {
    type Device = Recorder;
    type Mark = u64;
    type Preparation = ();
    type Action = &'static str;
    type Graph = NoGraph;
    type Entry<'a> = &'a Recorder;

    fn create(device: &Arc<Recorder>, _: &StreamKey, start: u64) -> Result<Self> {
        let (signalled, reached) = (AtomicU64::new(start), AtomicU64::new(start));
        let number = device.streams.fetch_add(1, Ordering::Relaxed);
        Ok(Self { device: device.clone(), number, signalled, reached })
    }

    fn handle(&self) -> u64 {
        self.number
    }

    fn check(&self, op: &Op<'_>, timeline: &Timeline) -> Result<()> {
        op.check(timeline, 0)
    }

    fn is_plain(&self, op: &Op<'_>) -> bool {
        matches!(op, Op::Fill(_))
    }

    fn prepare(&self, _: &Op<'_>) -> Result<Option<()>> {
        Ok(None)
    }

    fn reserve(&self) -> bool {
        !self.device.full.load(Ordering::Acquire)
    }

    fn wait_room(&self) -> Result<()> {
        self.device.called("wait for room");
        self.device.full.store(false, Ordering::Release);
        Ok(())
    }

    fn enter(&self) -> Result<&Recorder> {
        self.device.check().map(|()| &*self.device)
    }

    unsafe fn encode(
        &self,
        entry: &mut &Recorder,
        op: &Op<'_>,
        _: Option<()>,
        sink: &mut Sink<'_, Self>,
    ) -> Result<()> {
        let Op::Fill(fill) = op else { return Err(Error::state("an operation of no test")) };
        if entry.refuses.swap(false, Ordering::AcqRel) {
            return sink.took(Err(Error::state("refused")));
        }
        entry.called(format!("fill {}", fill.pattern));
        sink.leave("host part");
        sink.took(Ok(()))
    }

    fn encode_wait(&self, entry: &mut &Recorder, mark: &u64) -> Result<()> {
        entry.called(format!("wait {mark}"));
        Ok(())
    }

    unsafe fn launch(
        &self,
        _: &mut &Recorder,
        exec: &Lease<dyn GraphExec>,
        _: u32,
        _: &mut Sink<'_, Self>,
    ) -> Result<()> {
        Err(Error::state(format!("{exec:?} in a test without graphs")))
    }

    fn run_foreign(&self, call: &ForeignCall, _: u64) -> Result<()> {
        call.run(0)
    }

    unsafe fn graph(exec: &Lease<dyn GraphExec>) -> &NoGraph {
        unreachable!("{exec:?} in a test without graphs")
    }

    fn signal(&self, value: u64) -> Result<()> {
        self.device.check()?;
        self.signalled.store(value, Ordering::Release);
        Ok(())
    }

    fn reached(&self) -> u64 {
        if !self.device.busy.load(Ordering::Acquire) {
            self.reached.fetch_max(self.signalled.load(Ordering::Acquire), Ordering::AcqRel);
        }
        self.reached.load(Ordering::Acquire)
    }

    fn failure(&self) -> Option<(u64, Error)> {
        (self.number == 0).then(|| self.device.fails.lock().clone()).flatten()
    }

    fn query(&self) -> Result<bool> {
        self.device.check().map(|()| !self.device.busy.load(Ordering::Acquire))
    }

    fn mark(&self) -> Result<u64> {
        Ok(0)
    }

    fn record(&self, mark: &mut u64, value: u64) -> Result<()> {
        *mark = value;
        Ok(())
    }

    fn host_function(&self, call: Box<dyn FnOnce() + Send>) -> Result<()> {
        // The stream stands still, so its function is due when the test lets it go. The completion
        // thread and waiting threads query the stream as well.
        drop(call);
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn abandon(&mut self) {}

    fn run_action(device: &Recorder, action: &'static str, sound: bool) {
        let during = device.during.lock().take();
        during.into_iter().for_each(|call| call());
        device.called(if sound { action } else { "host part dropped" });
    }
}

struct Rig {
    device: Arc<Recorder>,
    tables: Arc<Tables<RecorderStream>>,
    engine: Arc<Engine<RecorderStream>>,
}

/// An engine without threads.
fn rig() -> Rig {
    rig_with(Arc::new(Tables::default()), true)
}

/// An engine over a device of its own, with these tables.
fn rig_with(tables: Arc<Tables<RecorderStream>>, inline: bool) -> Rig {
    let device = Arc::new(Recorder::default());
    let engine = Engine::new(device.clone(), tables.clone(), EngineConfig::new(inline, 64));
    Rig { device, tables, engine }
}

fn fill(pattern: u32) -> Fill {
    Fill { dst: 0, native: 0, pattern, width: 4, bytes: 4 }
}

fn submit(stream: &StreamCore<RecorderStream>, ops: &[Op<'_>]) -> Result<Timepoint> {
    // SAFETY: no operation of these tests touches memory.
    unsafe { stream.submit(ops) }.map(|value| stream.timeline().at(value))
}

#[test]
fn work_behind_a_host_timeline_reaches_the_driver_in_order_after_the_signal() -> Result<()> {
    let rig = rig();
    let host_timeline = HostTimelineManager::new(rig.tables.clone())?.acquire()?;
    let stream = rig.engine.stream(&StreamKey::default())?;
    let gate = host_timeline.timeline().at(host_timeline.timeline().submitted() + 1);
    submit(&stream, &[Op::Fill(fill(1)), Op::Wait(gate), Op::Fill(fill(2))])?;
    let last = submit(&stream, &[Op::Fill(fill(3))])?;
    assert_eq!(rig.device.take(), ["fill 1"], "what is before the wait is not held back");
    assert!(stream.wait_host(last.value(), Some(Duration::ZERO)).is_err());
    crate::HostTimeline::signal_host(&*host_timeline, gate.value())?;
    let given = rig.device.take();
    let fills: Vec<_> = given.iter().filter(|call| call.starts_with("fill")).collect();
    assert_eq!(fills, ["fill 2", "fill 3"]);
    stream.wait_host(last.value(), None)?;
    assert!(rig.device.take().iter().all(|call| call == "host part"));
    Ok(())
}

#[test]
fn a_host_timeline_that_is_dropped_fails_the_stream_that_waits() -> Result<()> {
    let rig = rig();
    let host_timelines = HostTimelineManager::new(rig.tables.clone())?;
    let host_timeline = host_timelines.acquire()?;
    let stream = rig.engine.stream(&StreamKey::default())?;
    let gate = host_timeline.timeline().at(host_timeline.timeline().submitted() + 1);
    let last = submit(&stream, &[Op::Wait(gate), Op::Fill(fill(1))])?;
    drop(host_timeline);
    let error = stream.wait_host(last.value(), None).unwrap_err();
    assert!(error.to_string().contains("dropped before"), "{error}");
    assert_eq!(rig.device.take(), [""; 0], "what waited for the failed value does not run");
    assert!(stream.timeline().is_idle(), "and its value is over");
    Ok(())
}

/// A host call that the device keeps among its calls.
fn noted(device: &Arc<Recorder>) -> HostCall {
    let device = device.clone();
    HostCall::new("note", move || {
        device.called("host call");
        Ok(())
    })
}

#[test]
fn a_host_call_starts_after_the_device_and_the_host_part_and_holds_later_work_back() -> Result<()> {
    let rig = rig();
    rig.device.busy.store(true, Ordering::Release);
    let stream = rig.engine.stream(&StreamKey::default())?;
    let call = noted(&rig.device);
    let last = submit(&stream, &[Op::Fill(fill(1)), Op::Host(&call), Op::Fill(fill(2))])?;
    assert!(stream.wait_host(last.value(), Some(Duration::ZERO)).is_err());
    assert_eq!(rig.device.take(), ["fill 1"]);
    rig.device.busy.store(false, Ordering::Release);
    stream.wait_host(last.value(), None)?;
    assert_eq!(rig.device.take(), ["host part", "host call", "fill 2", "host part"]);
    Ok(())
}

#[test]
fn a_host_call_that_fails_drops_the_work_behind_it() -> Result<()> {
    let rig = rig();
    let stream = rig.engine.stream(&StreamKey::default())?;
    let call = HostCall::new("fails", || Err(Error::state("of the test")));
    submit(&stream, &[Op::Host(&call), Op::Fill(fill(1))])?;
    let last = submit(&stream, &[Op::Fill(fill(2))])?;
    let error = stream.wait_host(last.value(), None).unwrap_err();
    assert!(error.to_string().contains("of the test"), "{error}");
    assert_eq!(rig.device.take(), [""; 0]);
    assert!(submit(&stream, &[Op::Fill(fill(3))]).is_err());
    assert!(stream.timeline().is_idle());
    Ok(())
}

/// An object that a host call holds. Its drop looks at the stream as another thread would.
struct Held {
    stream: Arc<StreamCore<RecorderStream>>,
    value: u64,
    found: Arc<Mutex<Vec<(u64, String)>>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.stream.refresh();
        let waited = self.stream.wait_host(self.value, None).map_err(|e| e.to_string());
        let text = waited.err().unwrap_or_else(|| "published".into());
        self.found.lock().push((self.stream.timeline().completed(), text));
    }
}

#[test]
fn what_a_submission_holds_is_dropped_before_its_value_is_published() -> Result<()> {
    for (result, text) in [(Ok(()), "waits for the stream"), (Err("of the test"), "of the test")] {
        let rig = rig();
        let stream = rig.engine.stream(&StreamKey::default())?;
        let before = stream.timeline().submitted();
        let found = Arc::new(Mutex::new(Vec::new()));
        // Behind the first call, the second is held back until the first fails.
        for value in [before + 1, before + 2] {
            let held = Held { stream: stream.clone(), value, found: found.clone() };
            let call = HostCall::new("holds", move || {
                let _held = &held;
                result.map_err(Error::state)
            });
            submit(&stream, &[Op::Host(&call)])?;
        }
        assert_eq!(stream.wait_host(before + 2, None).is_ok(), result.is_ok());
        stream.refresh()?;
        assert!(stream.timeline().is_idle());
        let found = std::mem::take(&mut *found.lock());
        assert_eq!(found.len(), 2);
        for (value, (completed, error)) in (before + 1..).zip(found) {
            assert!(completed < value, "{value} is published with its objects");
            assert!(error.contains(text), "{error}");
        }
    }
    Ok(())
}

#[test]
fn a_later_failure_leaves_the_sound_work_that_is_held_back() -> Result<()> {
    let rig = rig();
    rig.device.busy.store(true, Ordering::Release);
    let stream = rig.engine.stream(&StreamKey::default())?;
    let call = noted(&rig.device);
    let sound = submit(&stream, &[Op::Fill(fill(1)), Op::Host(&call)])?;
    let last = submit(&stream, &[Op::Fill(fill(2))])?;
    stream.fail(last.value(), Error::state("of the test"));
    assert!(stream.timeline().completed() < sound.value());
    rig.device.busy.store(false, Ordering::Release);
    stream.wait_host(sound.value(), None)?;
    assert!(stream.wait_host(last.value(), None).is_err());
    stream.refresh()?;
    assert!(stream.timeline().is_idle());
    assert_eq!(rig.device.take(), ["fill 1", "host part", "host call"]);
    Ok(())
}

#[test]
fn a_wait_for_another_stream_is_native_and_proves_that_the_other_is_done() -> Result<()> {
    let rig = rig();
    rig.device.busy.store(true, Ordering::Release);
    let (first, second) =
        (rig.engine.stream(&StreamKey::default())?, rig.engine.stream(&StreamKey::default())?);
    let point = submit(&first, &[Op::Fill(fill(1))])?;
    let last = submit(&second, &[Op::Wait(point), Op::Fill(fill(2))])?;
    let wait = format!("wait {}", point.value());
    assert_eq!(rig.device.take(), ["fill 1", wait.as_str(), "fill 2"], "nothing is held back");
    rig.device.busy.store(false, Ordering::Release);
    second.wait_host(last.value(), None)?;
    assert_eq!(first.timeline().completed(), point.value(), "published with the waiting one");
    Ok(())
}

/// Some of a submission may run, and a value must guard its memory.
#[test]
fn a_refusal_in_the_middle_of_a_submission_fails_its_value_and_one_at_its_start_takes_none()
-> Result<()> {
    let rig = rig();
    let stream = rig.engine.stream(&StreamKey::default())?;
    rig.device.refuses.store(true, Ordering::Release);
    let before = stream.timeline().submitted();
    assert!(submit(&stream, &[Op::Fill(fill(1))]).is_err());
    assert_eq!(stream.timeline().submitted(), before);
    let device = rig.device.clone();
    let arm = ForeignCall::new("arm", Vec::new(), move |_| {
        device.refuses.store(true, Ordering::Release);
        Ok(())
    });
    let last = submit(&stream, &[Op::Fill(fill(2)), Op::Foreign(&arm), Op::Fill(fill(3))])?;
    let error = stream.wait_host(last.value(), None).unwrap_err();
    assert!(error.to_string().contains("refused"), "{error}");
    stream.refresh()?;
    assert!(stream.timeline().is_idle());
    assert_eq!(rig.device.take(), ["fill 2", "host part dropped"]);
    Ok(())
}

/// A library may submit to its own stream, and another thread may wait for what it has not got yet.
#[test]
fn a_library_call_is_made_as_it_is_submitted_and_work_that_comes_meanwhile_follows_it() -> Result<()>
{
    let rig = rig();
    let (stream, other) =
        (rig.engine.stream(&StreamKey::default())?, rig.engine.stream(&StreamKey::default())?);
    let (own, waits, device) = (stream.clone(), other.clone(), rig.device.clone());
    let call = ForeignCall::new("library", Vec::new(), move |_| {
        device.called("library");
        let during = own.timeline().now();
        submit(&waits, &[Op::Wait(during), Op::Fill(fill(7))])?;
        submit(&own, &[Op::Fill(fill(2))])?;
        assert_eq!(device.take(), ["library"], "both are held back");
        Ok(())
    });
    let point = submit(&stream, &[Op::Foreign(&call)])?;
    assert_eq!(stream.timeline().submitted(), point.value() + 1, "the call's own submission");
    let wait = format!("wait {}", point.value());
    let mut given = rig.device.take();
    given.sort();
    assert_eq!(given, ["fill 2", "fill 7", wait.as_str()]);
    other.wait_host(other.timeline().submitted(), None)?;
    stream.wait_host(stream.timeline().submitted(), None)?;
    let waits_before = [Op::Wait(other.timeline().now()), Op::Foreign(&call)];
    assert!(rig.device.take().iter().all(|call| call == "host part"));
    submit(&stream, &waits_before)?;
    assert!(rig.device.take().contains(&"fill 2".to_owned()), "waits before it are no obstacle");
    Ok(())
}

#[test]
fn a_library_call_that_fails_fails_its_value_and_what_came_meanwhile() -> Result<()> {
    let rig = rig();
    let stream = rig.engine.stream(&StreamKey::default())?;
    let own = stream.clone();
    let call = ForeignCall::new("library", Vec::new(), move |_| {
        submit(&own, &[Op::Fill(fill(2))])?;
        Err(Error::state("of the test"))
    });
    let before = submit(&stream, &[Op::Fill(fill(1))])?;
    let point = submit(&stream, &[Op::Foreign(&call)])?;
    assert!(stream.timeline().check(before.value()).is_ok(), "what was before is sound");
    let error = stream.wait_host(point.value(), None).unwrap_err();
    assert!(error.to_string().contains("of the test"), "{error}");
    assert!(submit(&stream, &[Op::Foreign(&call)]).is_err());
    stream.refresh()?;
    assert!(stream.timeline().is_idle());
    assert_eq!(rig.device.take().iter().filter(|call| call.starts_with("fill")).count(), 1);
    Ok(())
}

/// A thread that asks for a value before the driver has it gets its signal afterwards.
#[test]
fn a_value_that_is_wanted_during_its_library_call_is_signalled() -> Result<()> {
    let rig = rig();
    let stream = rig.engine.stream(&StreamKey::default())?;
    let own = stream.clone();
    let call =
        ForeignCall::new("library", Vec::new(), move |_| own.want(own.timeline().submitted()));
    let point = submit(&stream, &[Op::Foreign(&call)])?;
    assert_eq!(stream.signalled.load(Ordering::Acquire), point.value());
    Ok(())
}

#[test]
fn a_value_that_is_failed_takes_those_along_that_wait_for_it_on_other_devices() -> Result<()> {
    let tables = Arc::new(Tables::default());
    let (here, there) = (rig_with(tables.clone(), true), rig_with(tables, true));
    [&here, &there].iter().for_each(|rig| rig.device.busy.store(true, Ordering::Release));
    let stream = here.engine.stream(&StreamKey::default())?;
    let (waits, free) =
        (there.engine.stream(&StreamKey::default())?, there.engine.stream(&StreamKey::default())?);
    let before = submit(&waits, &[Op::Fill(fill(1))])?;
    let point = submit(&stream, &[Op::Fill(fill(2))])?;
    let after = submit(&waits, &[Op::Wait(point), Op::Fill(fill(3))])?;
    let beside = submit(&free, &[Op::Fill(fill(4))])?;
    assert!(here.engine.fail(point, &Error::state("of the test")));
    let error = after.timeline().check(after.value()).unwrap_err();
    assert!(error.to_string().contains("of the test"), "{error}");
    for sound in [before, beside] {
        assert!(matches!(sound.timeline().check(sound.value()), Ok(false)), "{sound:?}");
    }
    assert!(!here.engine.fail(point, &Error::state("again")), "it has failed already");
    Ok(())
}

#[test]
fn the_loss_of_a_device_ends_all_its_streams() -> Result<()> {
    let rig = rig();
    rig.device.busy.store(true, Ordering::Release);
    let streams =
        [rig.engine.stream(&StreamKey::default())?, rig.engine.stream(&StreamKey::default())?];
    let points: Vec<_> =
        streams.iter().map(|s| submit(s, &[Op::Fill(fill(1))])).collect::<Result<_>>()?;
    assert_eq!(rig.engine.busy_streams(), 2);
    rig.device.lost.store(true, Ordering::Release);
    for (stream, point) in streams.iter().zip(points) {
        let error = stream.wait_host(point.value(), None).unwrap_err();
        assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
    }
    assert_eq!(rig.engine.busy_streams(), 0);
    Ok(())
}

/// Otherwise the list would keep the stream, and with it the device, for ever.
#[test]
fn a_stream_that_is_left_to_a_completion_thread_which_is_gone_is_let_go() -> Result<()> {
    let rig = rig();
    let stream = rig.engine.stream(&StreamKey::default())?;
    let threads = Threads::new(DeviceId::cuda(0), false, Duration::ZERO);
    threads.add(&stream);
    threads.close();
    let thread = threads.take_thread();
    assert!(thread.is_some_and(|t| t.join().is_ok()));
    let before = Arc::strong_count(&stream);
    threads.add(&stream);
    assert_eq!(Arc::strong_count(&stream), before + 1);
    threads.join();
    assert_eq!(Arc::strong_count(&stream), before);
    Ok(())
}

/// The thread that gave the timepoint to the driver comes to the table later, and finds no entry.
#[test]
fn a_stream_whose_note_is_cleared_away_is_gone_on_with() -> Result<()> {
    let rig = rig();
    let (waiting, other) =
        (rig.engine.stream(&StreamKey::default())?, rig.engine.stream(&StreamKey::default())?);
    let source = TimelineOwner::take()?;
    let value = source.advance()?;
    waiting.note_wait(source.timeline().at(value));
    source.complete(value);
    for _ in 0..100 {
        other.note_wait(source.timeline().at(value + 1));
    }
    assert!(
        waiting.listed.load(Ordering::Acquire),
        "the note is gone, and nobody goes on with the stream"
    );
    assert!(!other.listed.load(Ordering::Acquire), "its point is not over");
    Ok(())
}

/// A thread that resumes work never waits for room, because other streams depend on it.
#[test]
fn a_submission_waits_for_room_before_its_lock_and_held_back_work_is_tried_again() -> Result<()> {
    let rig = rig();
    let host_timeline = HostTimelineManager::new(rig.tables.clone())?.acquire()?;
    let stream = rig.engine.stream(&StreamKey::default())?;
    rig.device.full.store(true, Ordering::Release);
    let first = submit(&stream, &[Op::Fill(fill(1))])?;
    stream.wait_host(first.value(), None)?;
    assert_eq!(rig.device.take(), ["wait for room", "fill 1", "host part"]);
    let gate = host_timeline.timeline().at(host_timeline.timeline().submitted() + 1);
    let last = submit(&stream, &[Op::Wait(gate), Op::Fill(fill(2))])?;
    rig.device.full.store(true, Ordering::Release);
    crate::HostTimeline::signal_host(&*host_timeline, gate.value())?;
    assert_eq!(rig.device.take(), [""; 0]);
    assert!(stream.needs_attention(), "the completion thread tries again");
    assert!(stream.is_moving(), "a shutdown waits for the stream");
    rig.device.full.store(false, Ordering::Release);
    stream.wait_host(last.value(), None)?;
    assert_eq!(rig.device.take(), ["fill 2", "host part"]);
    Ok(())
}

#[test]
fn work_that_fails_on_the_device_fails_its_stream_and_the_streams_that_waited_for_it() -> Result<()>
{
    let rig = rig();
    rig.device.busy.store(true, Ordering::Release);
    let streams = [
        rig.engine.stream(&StreamKey::default())?,
        rig.engine.stream(&StreamKey::default())?,
        rig.engine.stream(&StreamKey::default())?,
    ];
    let sound = submit(&streams[0], &[Op::Fill(fill(1))])?;
    let failed = submit(&streams[0], &[Op::Fill(fill(2))])?;
    // The mark of both waits covers the value that fails.
    let waiting = submit(&streams[1], &[Op::Wait(failed), Op::Fill(fill(3))])?;
    let other = submit(&streams[2], &[Op::Wait(sound), Op::Fill(fill(4))])?;
    *rig.device.fails.lock() = Some((failed.value(), Error::state("a page fault")));
    rig.device.busy.store(false, Ordering::Release);
    rig.device.take();
    for (stream, point) in [(&streams[1], waiting), (&streams[0], failed)] {
        let error = stream.wait_host(point.value(), None).unwrap_err();
        assert!(error.to_string().contains("a page fault"), "{error}");
        assert!(stream.timeline().is_idle());
    }
    streams[2].wait_host(other.value(), None)?;
    assert!(sound.timeline().check(sound.value())?, "an earlier value is sound");
    assert!(submit(&streams[0], &[Op::Fill(fill(5))]).is_err());
    let parts = rig.device.take();
    assert_eq!(parts.iter().filter(|part| *part == "host part dropped").count(), 2);
    assert_eq!(parts.iter().filter(|part| *part == "host part").count(), 2);
    Ok(())
}

#[test]
fn a_failure_reaches_the_streams_that_waited_also_when_the_stream_that_failed_is_gone() -> Result<()>
{
    let rig = rig();
    rig.device.busy.store(true, Ordering::Release);
    let (first, second) =
        (rig.engine.stream(&StreamKey::default())?, rig.engine.stream(&StreamKey::default())?);
    let failed = submit(&first, &[Op::Fill(fill(1))])?;
    let last = submit(&second, &[Op::Wait(failed), Op::Fill(fill(2))])?;
    *rig.device.fails.lock() = Some((failed.value(), Error::state("a page fault")));
    rig.device.busy.store(false, Ordering::Release);
    first.refresh()?;
    let gone = Arc::downgrade(&first);
    drop(first);
    assert!(gone.upgrade().is_none());
    let error = second.wait_host(last.value(), None).unwrap_err();
    assert!(error.to_string().contains("a page fault"), "{error}");
    assert!(second.timeline().is_idle());
    Ok(())
}

/// The host part may still land a download or fail its stream.
#[test]
fn a_wait_has_not_passed_before_the_other_stream_s_host_part_is_over() -> Result<()> {
    let rig = rig();
    rig.device.busy.store(true, Ordering::Release);
    let (first, second) =
        (rig.engine.stream(&StreamKey::default())?, rig.engine.stream(&StreamKey::default())?);
    let before = second.timeline().completed();
    let point = submit(&first, &[Op::Fill(fill(1))])?;
    let last = submit(&second, &[Op::Wait(point), Op::Fill(fill(2))])?;
    rig.device.busy.store(false, Ordering::Release);
    rig.device.take();
    let (waiting, device) = (second.clone(), rig.device.clone());
    *rig.device.during.lock() = Some(Box::new(move || {
        let refreshed = waiting.refresh().map(|completed| completed - before);
        device.called(format!("completed {refreshed:?}"));
    }));
    first.refresh()?;
    assert_eq!(rig.device.take(), ["completed Ok(0)", "host part"]);
    second.wait_host(last.value(), None)?;
    assert_eq!(rig.device.take(), ["host part"]);
    assert!(second.timeline().is_idle());
    Ok(())
}

/// A destructor in the host part of a value may wait for work behind the values before.
#[test]
fn a_host_part_finds_the_values_before_its_own_published() -> Result<()> {
    let rig = rig();
    rig.device.busy.store(true, Ordering::Release);
    let (first, second) =
        (rig.engine.stream(&StreamKey::default())?, rig.engine.stream(&StreamKey::default())?);
    let point = submit(&first, &[Op::Fill(fill(1))])?;
    let waiting = submit(&second, &[Op::Wait(point), Op::Fill(fill(2))])?;
    submit(&first, &[Op::Fill(fill(3))])?;
    rig.device.busy.store(false, Ordering::Release);
    rig.device.take();
    let device = rig.device.clone();
    *rig.device.during.lock() = Some(Box::new(move || {
        let of_the_next = device.clone();
        *device.during.lock() = Some(Box::new(move || {
            let waited = second.wait_host(waiting.value(), Some(Duration::from_millis(100)));
            of_the_next.called(format!("waited {waited:?}"));
        }));
    }));
    first.refresh()?;
    assert_eq!(rig.device.take(), ["host part", "host part", "waited Ok(())", "host part"]);
    Ok(())
}

#[test]
fn a_wait_for_a_stream_of_a_lost_device_fails_although_the_loss_was_published_first() -> Result<()>
{
    let rig = rig();
    let other = rig_with(rig.tables.clone(), true);
    for device in [&rig.device, &other.device] {
        device.busy.store(true, Ordering::Release);
    }
    let (first, second) =
        (other.engine.stream(&StreamKey::default())?, rig.engine.stream(&StreamKey::default())?);
    let point = submit(&first, &[Op::Fill(fill(1))])?;
    let last = submit(&second, &[Op::Wait(point), Op::Fill(fill(2))])?;
    other.device.lost.store(true, Ordering::Release);
    assert!(first.wait_host(point.value(), None).is_err());
    assert!(first.timeline().is_idle(), "the loss is published");
    rig.device.busy.store(false, Ordering::Release);
    let error = second.wait_host(last.value(), None).unwrap_err();
    assert!(error.to_string().contains("unplugged"), "{error}");
    assert!(!matches!(error, Error::DeviceLost { .. }), "this device is not lost: {error}");
    assert!(second.timeline().is_idle());
    assert!(rig.engine.stream(&StreamKey::default())?.is_sound());
    Ok(())
}

#[test]
fn a_completion_thread_that_closes_goes_on_with_a_stream_whose_host_part_is_not_over() -> Result<()>
{
    let rig = rig_with(Arc::default(), false);
    rig.device.busy.store(true, Ordering::Release);
    let (first, second) =
        (rig.engine.stream(&StreamKey::default())?, rig.engine.stream(&StreamKey::default())?);
    let point = submit(&first, &[Op::Fill(fill(1))])?;
    let last = submit(&second, &[Op::Wait(point), Op::Fill(fill(2))])?;
    let [entered, over] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let until = |flag: &Arc<AtomicBool>| {
        let flag = flag.clone();
        move || {
            while !flag.load(Ordering::Acquire) {
                thread::sleep(Duration::from_millis(1));
            }
        }
    };
    let (enter, wait) = (entered.clone(), until(&over));
    *rig.device.during.lock() = Some(Box::new(move || {
        enter.store(true, Ordering::Release);
        wait();
    }));
    first.flush()?;
    rig.device.busy.store(false, Ordering::Release);
    let observer = thread::spawn(move || first.refresh().map(drop));
    until(&entered)();
    second.signal()?;
    rig.engine.close();
    // The completion thread makes some hundred rounds meanwhile.
    thread::sleep(Duration::from_millis(200));
    assert!(!last.timeline().check(last.value())?);
    over.store(true, Ordering::Release);
    rig.engine.join();
    assert!(observer.join().is_ok_and(|refreshed| refreshed.is_ok()));
    assert!(last.timeline().check(last.value())?, "no call on the stream was needed");
    Ok(())
}

/// A host call may end its backend, and then waits for the end of the completion thread.
#[test]
fn the_completion_thread_does_not_stay_for_a_host_call_behind_another_backend_s_timeline()
-> Result<()> {
    let rig = rig();
    let stream = rig.engine.stream(&StreamKey::default())?;
    let of_another_backend = TimelineOwner::take()?;
    let value = of_another_backend.advance()?;
    let call = HostCall::new("nothing", || Ok(()));
    submit(&stream, &[Op::Wait(of_another_backend.timeline().at(value)), Op::Host(&call)])?;
    let last = submit(&stream, &[Op::Fill(fill(1))])?;
    assert!(stream.needs_attention(), "the completion thread looks at the other timeline");
    of_another_backend.complete(value);
    stream.pump();
    assert!(!stream.needs_attention(), "the call resumes the stream");
    assert!(stream.is_moving(), "a shutdown waits for the call");
    stream.wait_host(last.value(), None)
}

/// The drop of a stream drops objects of the user, which may use another stream.
#[test]
fn a_stream_that_ends_with_its_completion_thread_may_bring_another_stream_to_it() -> Result<()> {
    struct Attend(
        Arc<Threads<StreamCore<RecorderStream>, Job<RecorderStream>>>,
        Arc<StreamCore<RecorderStream>>,
    );
    impl Drop for Attend {
        fn drop(&mut self) {
            self.0.add(&self.1);
        }
    }
    for inline in [false, true] {
        let Rig { engine, .. } = rig_with(Arc::default(), inline);
        let (ending, other) =
            (engine.stream(&StreamKey::default())?, engine.stream(&StreamKey::default())?);
        let of_another_backend = TimelineOwner::take()?;
        let gate = of_another_backend.timeline().now().value() + 1;
        let gate = of_another_backend.timeline().at(gate);
        let attend = Attend(engine.threads.clone(), other.clone());
        let call = HostCall::new("never", move || {
            let _ = &attend;
            Ok(())
        });
        let last = submit(&ending, &[Op::Wait(gate), Op::Host(&call)])?;
        drop((call, ending));
        engine.close();
        let joined = thread::spawn(move || engine.join());
        let mut looks = 0;
        while !joined.is_finished() {
            looks += 1;
            assert!(looks < 10_000, "the completion thread waits for itself");
            thread::sleep(Duration::from_millis(1));
        }
        let error = last.timeline().check(last.value()).unwrap_err();
        assert!(error.to_string().contains("backend ended"), "{error}");
        assert_eq!(Arc::strong_count(&other), 1, "the list keeps no stream");
    }
    Ok(())
}
