//! Traces: what a runtime did and when, for ui.perfetto.dev.
//!
//! A trace notes each submission of the runtime's streams, the times of its operations on the
//! device, the host's allocations and waits, and samples of the memory. While no trace is on, a
//! submission looks at one word for it.
//!
//! This module must not know the facade.

mod json;
pub(crate) mod recorder;
pub(crate) mod track;
pub(crate) mod tracks;

use crate::runtime::RuntimeInner;
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Error, Result};
use leasehold_hal::{Device, Op, StreamDesc};
use recorder::{Anchor, Recorder};
use std::fmt;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tracks::Tracks;

/// The longest wait of [`Trace::stop`] for traced work.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The longest wait of the start for a moment of the device's clock.
const ANCHOR: Duration = Duration::from_secs(1);
/// The number of moments that are looked at, of which the one that took the least time is kept.
const LOOKS: usize = 5;

/// The environment variable that asks for a trace of a program, and names its file.
const VARIABLE: &str = "LEASEHOLD_TRACE";
/// The number of traces that the environment asked for in this process.
static ASKED: AtomicU64 = AtomicU64::new(0);

/// A trace that goes on. Made by [`Trace::start`].
///
/// Dropping it ends the trace, and its events are lost; [`stop`](Self::stop) gives them.
#[must_use = "the trace ends when it is dropped, and its events are lost"]
pub struct Trace {
    runtime: Arc<RuntimeInner>,
    tracks: Arc<Tracks>,
}

impl Trace {
    /// The most events that a trace keeps: submissions, operations, allocations, waits and samples.
    /// The file counts later ones, as `dropped_events`. An event takes about 250 bytes.
    pub const MOST_EVENTS: usize = recorder::MOST_EVENTS;

    pub(crate) fn begin(runtime: &Arc<RuntimeInner>) -> Result<Self> {
        let tracks = begin(runtime, None)?;
        Ok(Self { runtime: runtime.clone(), tracks })
    }

    /// Ends the trace and gives its events.
    ///
    /// Waits up to 10 seconds for the traced work, so that its times are known. Work that is not
    /// over by then, or failed, has no times. Work that other threads submit meanwhile may be
    /// missing.
    #[must_use = "the events are lost when they are dropped"]
    pub fn stop(self) -> TraceEvents {
        self.stop_within(TIMEOUT)
    }

    /// As [`stop`](Self::stop), and waits no longer than this.
    #[must_use = "the events are lost when they are dropped"]
    pub fn stop_within(self, timeout: Duration) -> TraceEvents {
        finish(&self.runtime, &self.tracks, timeout)
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.runtime.end_trace(&self.tracks);
        self.tracks.recorder.let_go();
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trace({})", self.runtime.id())
    }
}

/// Starts a trace of a runtime that was just opened, if the environment asks for one.
///
/// # Errors
/// The driver's own.
pub(crate) fn begin_if_asked(runtime: &Arc<RuntimeInner>) -> Result<()> {
    let Some(file) = std::env::var_os(VARIABLE).filter(|file| !file.is_empty()) else {
        return Ok(());
    };
    let mut file = PathBuf::from(file);
    // The program may have several devices.
    let number = ASKED.fetch_add(1, Ordering::Relaxed);
    if number > 0 {
        file.as_mut_os_string().push(format!(".{number}"));
    }
    begin(runtime, Some(file)).map(drop)
}

/// Writes the trace that the environment asked for, if one is on. It ends then.
///
/// # Errors
/// As [`TraceEvents::save`].
pub(crate) fn save_if_asked(runtime: &RuntimeInner) -> Result<()> {
    let Some(tracks) = runtime.tracks() else { return Ok(()) };
    let Some(file) = tracks.recorder.file() else { return Ok(()) };
    finish(runtime, &tracks, TIMEOUT).save(file)
}

fn begin(runtime: &Arc<RuntimeInner>, file: Option<PathBuf>) -> Result<Arc<Tracks>> {
    let recorder = Recorder::new(runtime.device.clone(), runtime.memory.clone(), file);
    look_at_clock(&recorder)?;
    let tracks = Arc::new(Tracks::new(recorder));
    runtime.begin_trace(&tracks)?;
    tracks.recorder.sample_now();
    Ok(tracks)
}

fn finish(runtime: &RuntimeInner, tracks: &Arc<Tracks>, timeout: Duration) -> TraceEvents {
    let recorder = &tracks.recorder;
    recorder.sample_now();
    let deadline = Instant::now().checked_add(timeout);
    for track in tracks.all() {
        if let Some(value) = track.last() {
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            // A failure is no reason to lose the rest.
            let _ = runtime.wait_unseen(track.timeline.at(value), left);
        }
    }
    runtime.end_trace(tracks);
    let mut lanes = Vec::new();
    for track in tracks.take() {
        let id = track.timeline.id();
        let name = match track.timeline.name() {
            Some(name) => name.as_str().to_owned(),
            None if id == runtime.default().timeline.id() => "default stream".to_owned(),
            None => format!("stream {}", id.get()),
        };
        let track::Notes { submissions, operations, .. } = track.take_notes();
        if !submissions.is_empty() {
            lanes.push(json::Lane { name, submissions, operations });
        }
    }
    recorder.let_go();
    let (calls, samples) = recorder.take_notes();
    TraceEvents(json::Page {
        device: runtime.id().to_string(),
        product: runtime.device.info().name.clone(),
        lanes,
        threads: recorder.threads(),
        calls,
        samples,
        dropped: recorder.dropped(),
        clock_error: recorder.clock_error(),
    })
}

/// Notes a moment of the device's clock, and how far off it may be. A device without timestamps has
/// none, nor has one that does not answer in time.
fn look_at_clock(recorder: &Recorder) -> Result<()> {
    let device: &dyn Device = &*recorder.device;
    if !device.caps().timestamps {
        return Ok(());
    }
    let stream = device.stream(&StreamDesc::default())?;
    let mut best: Option<(u64, Anchor)> = None;
    for _ in 0..LOOKS {
        let query = device.timestamp()?;
        let before = recorder.now();
        // SAFETY: the timestamp is of the stream's device; it is leased by the submission.
        let value = unsafe { stream.submit(&[Op::WriteTimestamp(&query)]) }?;
        stream.flush()?;
        match stream.wait_host(value, Some(ANCHOR)) {
            Err(Error::Timeout(_)) => break,
            over => over?,
        }
        let took = recorder.now() - before;
        if best.as_ref().is_none_or(|(least, _)| took < *least) {
            best = Some((took, Anchor { query, at: before + took / 2 }));
        }
    }
    if let Some((took, anchor)) = best {
        recorder.set_anchor(anchor, took / 2);
    }
    Ok(())
}

/// The events of a trace that has ended. They hold nothing of the device.
///
/// ```
/// use leasehold::Trace;
/// use leasehold::prelude::*;
/// # fn main() -> Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let trace = Trace::start(&runtime)?;
/// let x = runtime.zeros::<f32>(1 << 20)?;
/// runtime.stream().fill(x.view(), 1.0f32)?;
/// let events = trace.stop();
/// let mut json = Vec::new();
/// events.write(&mut json)?; // or events.save("trace.json")
/// assert!(json.starts_with(b"{"));
/// # Ok(())
/// # }
/// ```
pub struct TraceEvents(json::Page);

impl TraceEvents {
    /// Writes the events as JSON, in Chrome's format of trace events. May be called again.
    ///
    /// # Errors
    /// `Unavailable` with the writer's error.
    pub fn write(&self, to: impl Write) -> Result<()> {
        let mut to = BufWriter::new(to);
        let result = self.0.write(&mut to).and_then(|()| to.flush());
        result.map_err(|e| Error::Unavailable(format!("the trace was not written: {e}").into()))
    }

    /// Writes the events to a file, which is replaced.
    ///
    /// # Errors
    /// `Unavailable` with the path and the system's error. The events are still there, for another
    /// path.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let cannot = |e: &dyn fmt::Display| {
            let path = path.display();
            Error::Unavailable(format!("{path}: {e}; save the trace at another path").into())
        };
        self.write(File::create(path).map_err(|e| cannot(&e))?).map_err(|e| cannot(&e))
    }
}

impl fmt::Debug for TraceEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TraceEvents({}, {} dropped)", self.0.events(), self.0.dropped)
    }
}

const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Trace>();
    shared::<TraceEvents>();
};
