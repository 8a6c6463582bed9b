//! The beginning and the end of recordings.
//!
//! Only the names of the second document (`start_graph_recording` and its like) look at a
//! thread-local: a thread keeps there what it has started. Everything else takes the recording from
//! the value at hand.

use crate::graph::exec::{Graph, Held, NodeId};
use crate::graph::operator::GraphOperator;
use crate::graph::recording::{Recording, State};
use crate::graph::stop::{self, Note, StopCheck};
use crate::runtime::{Runtime, RuntimeInner};
use crate::stream::Stream;
use leasehold_alloc::{Lifetime, On, SYMBOLIC};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Result};
use std::cell::RefCell;
use std::fmt;

/// A recording that goes on, a value of its own. Its drop gives it up, on any
/// thread: what was recorded goes, and whatever still has its runtime is told so.
#[must_use = "a recording that is dropped is given up"]
pub struct GraphRecording {
    runtime: Runtime,
    recording: Arc<Recording>,
}

impl GraphRecording {
    /// Begins a recording of the calling thread's: for code that cannot record in one call, and
    /// that keeps the recording itself. A thread may have several. The runtime that is given goes
    /// on with eager work.
    ///
    /// ```
    /// use leasehold::graph::GraphRecording;
    /// use leasehold::{DeviceId, Runtime, View};
    /// # fn main() -> leasehold::Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let x = runtime.alloc(16)?;
    /// let recording = GraphRecording::begin(&runtime)?;
    /// recording.runtime().stream().fill(x.view(), 7u32)?;
    /// let graph = recording.stop()?;
    /// graph.launch()?;
    /// assert_eq!(runtime.to_vec::<u32>(&x)?, [7; 4]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Recording` for a runtime that records itself; `Unsupported`.
    pub fn begin(runtime: &Runtime) -> Result<Self> {
        let inner = &runtime.inner;
        let core = runtime
            .stream()
            .live("a recording cannot be begun in another one; stop or abandon that one first")?;
        if !inner.device.caps().graphs {
            return Err(Error::Unsupported(
                format!("{} has no graphs; submit the work eagerly", inner.id()).into(),
            ));
        }
        let recording = Arc::new(Recording::begin(inner.memory.arena()?));
        let stream = Stream::new(core.clone(), Some(recording.clone()), inner.clone());
        Ok(Self { runtime: Runtime::of_stream(stream), recording })
    }

    /// The runtime that records: what it, its streams and their clones are given is noted. Only on
    /// the thread that began the recording.
    #[must_use]
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Ends the recording and makes a graph of it.
    ///
    /// # Errors
    /// As [`Runtime::stop_graph_recording`], which also says after which errors it goes on.
    pub fn stop(&self) -> Result<Graph> {
        let state = self.recording.finish()?;
        graph_of(&self.runtime, state)
    }
}

impl fmt::Debug for GraphRecording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GraphRecording({})", self.runtime.device())
    }
}

impl Drop for GraphRecording {
    fn drop(&mut self) {
        self.recording.discard();
    }
}

thread_local! {
    /// Recordings that the thread has started and neither stopped nor abandoned, one a device at
    /// the most.
    static STARTED: RefCell<Vec<GraphRecording>> = const { RefCell::new(Vec::new()) };
}

/// The runtime of the recording that this thread has started on a device. There is none any more
/// while the thread's end drops them.
fn started(inner: &Arc<RuntimeInner>) -> Option<Runtime> {
    let find = |all: &RefCell<Vec<GraphRecording>>| {
        let all = all.borrow();
        all.iter().find(|s| Arc::ptr_eq(&s.runtime.inner, inner)).map(|s| s.runtime.clone())
    };
    STARTED.try_with(find).unwrap_or(None)
}

/// Forgets that this thread has started a recording, if it has, and gives it up.
fn forget(recording: &Arc<Recording>) {
    let take = |all: &RefCell<Vec<GraphRecording>>| {
        let mut all = all.borrow_mut();
        let at = all.iter().position(|s| Arc::ptr_eq(&s.recording, recording))?;
        Some(all.swap_remove(at))
    };
    // Without the borrow: what was recorded may be anybody's closure.
    drop(STARTED.try_with(take));
}

/// A graph of what was recorded.
fn graph_of(runtime: &Runtime, mut state: State) -> Result<Graph> {
    let checks = stop::check(std::mem::take(&mut state.noted))?;
    // A holder of a buffer of the recording may use the buffer beside the graph. These leases keep
    // the buffer until it has its address.
    let memory = &runtime.inner.memory;
    let mut held = Vec::new();
    for m in state.members.values() {
        match memory.lease(m.handle) {
            Ok(lease) => held.push((lease, m.usage.writes)),
            Err(Error::StaleHandle { .. }) => {}
            // A launch could not be ordered with what its holder does later.
            Err(_) => return Err(Error::Occupied { resource: "temporary of a recording" }),
        }
    }
    let lifetimes: Vec<Lifetime> = state
        .members
        .iter()
        .filter_map(|(&symbol, m)| {
            m.usage.span.map(|(first, last)| Lifetime { symbol, first, last, live_at_end: false })
        })
        .collect();
    let core = runtime.stream().under();
    let on = On { timeline: core.timeline, source: core.source() };
    // SAFETY: the recording noted every operation that uses a symbol; from the first to the last is
    // its lifetime.
    let bindings = unsafe { state.arena.seal(&lifetimes, on) }?;
    // The arena's memory may have been another's, whose last use on the runtime's stream goes on.
    let born = core.timeline.now();
    state.ops.rebind(|addr| {
        (addr & SYMBOLIC != 0)
            .then(|| bindings.resolve(addr).map(|real| (real, bindings.native)))
            .flatten()
    });
    let held = held.into_iter().map(|(lease, writes)| Held::new(&lease, writes)).collect();
    Graph::build(runtime.inner.clone(), state, held, born, checks)
}

/// Recordings.
///
/// A recording is a value: the runtime that [`record_graph`](Runtime::record_graph) lends, or that
/// [`start_graph_recording`](Runtime::start_graph_recording) gives. What that runtime, its streams
/// and their clones are given is noted and not run. All others work eagerly, on every thread.
/// Only the thread that began a recording may use it.
impl Runtime {
    /// Makes a graph of what `record` does with the runtime that it is lent; what it does with any
    /// other runtime or stream runs at once. If it fails or panics, the recording is given up.
    ///
    /// The lent runtime is this one, but its streams record. Its allocations are temporaries of the
    /// graph and have no address before the recording stops. What would wait or ask for results is
    /// refused. A clone of it that outlives the recording gets [`Error::Recording`]. So a host call
    /// that is recorded keeps a clone of this runtime instead. A recording of nothing is logged as
    /// a warning: `record` may have used another runtime.
    ///
    /// Code that takes its stream from [`Current`](crate::Current) is recorded while the lent
    /// runtime is the current one ([`enter`](Self::enter)).
    ///
    /// ```
    /// use leasehold::{DeviceId, Runtime, View};
    /// # fn main() -> leasehold::Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let (x, y) = (runtime.upload(&[1u32; 4])?, runtime.zeros::<u32>(4)?);
    /// let graph = runtime.record_graph(|recorded| {
    ///     recorded.stream().copy(y.view(), x.view())?; // at each launch
    ///     runtime.stream().fill(x.view(), 7u32) // at once, because it is the other runtime's
    /// })?;
    /// assert_eq!(runtime.to_vec(&y)?, [0; 4]);
    /// graph.launch()?;
    /// assert_eq!(runtime.to_vec(&y)?, [7; 4]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The error of `record`; `Recording` for a runtime that records itself; `Unsupported`; as
    /// [`stop_graph_recording`](Self::stop_graph_recording).
    pub fn record_graph(&self, record: impl FnOnce(&Self) -> Result<()>) -> Result<Graph> {
        // Also when it cannot be stopped, the drop gives it up.
        let lent = GraphRecording::begin(self)?;
        record(lent.runtime())?;
        if lent.recording.is_empty() {
            tracing::warn!(
                device = %self.device(),
                "a graph of no operations was recorded: only work of the lent runtime is recorded"
            );
        }
        lent.stop()
    }

    /// Begins a recording and gives the runtime that records: for code that cannot record in one
    /// call, as [`record_graph`](Self::record_graph) does. This runtime goes on with eager work.
    ///
    /// The calling thread keeps the recording until it is stopped or abandoned, at the latest until
    /// the thread ends.
    ///
    /// # Errors
    /// `Recording` while the thread has started one on this device already, and for a runtime that
    /// records itself; `Unsupported`.
    #[doc(alias = "startGraphRecording")]
    pub fn start_graph_recording(&self) -> Result<Runtime> {
        if started(&self.inner).is_some() {
            return Err(Error::recording(
                "this thread records on this device already; stop or abandon that recording first",
            ));
        }
        let new = GraphRecording::begin(self)?;
        let runtime = new.runtime.clone();
        STARTED
            .try_with(|all| all.borrow_mut().push(new))
            .map_err(|_| Error::state("this thread is ending; it cannot record"))?;
        Ok(runtime)
    }

    /// Returns whether this runtime records; of one that does not, whether the calling thread has
    /// [started](Self::start_graph_recording) a recording on its device.
    #[doc(alias = "isGraphRecording")]
    #[must_use]
    pub fn is_graph_recording(&self) -> bool {
        match self.stream().recording() {
            Some(recording) => recording.is_open(),
            None => started(&self.inner).is_some(),
        }
    }

    /// Encodes an operator: into the recording if this runtime records; else into the one that the
    /// calling thread has [started](Self::start_graph_recording) on this device; else it runs at
    /// once.
    ///
    /// # Errors
    /// The error of the operator. In a recording its half-encoded work is rolled back, and the
    /// recording goes on.
    #[doc(alias = "addGraphOperator")]
    pub fn add_graph_operator(&self, operator: &dyn GraphOperator) -> Result<()> {
        let recorder = self.recorder();
        let stream = recorder.as_ref().map_or(self.stream(), Runtime::stream);
        let Some(recording) = stream.recording() else { return operator.encode(stream) };
        let open = recording.encode()?;
        operator.encode(stream)?;
        let declared: Vec<_> = operator
            .accesses()
            .iter()
            .map(|o| (o.view.lease.handle(), o.access.writes()))
            .collect();
        open.keep(operator.name(), &declared)
    }

    /// Ends the recording of this runtime and makes a graph of it; of a runtime that does not
    /// record, the one that the calling thread has [started](Self::start_graph_recording) on its
    /// device.
    ///
    /// # Errors
    /// `Recording` without a recording, on another thread than the recording's, and by an operator
    /// that is being encoded; `Occupied` while a session is open in it. The recording goes on then.
    /// `OutOfMemory` for the temporaries; `Suspended` for a buffer of a suspended pool; `Occupied`
    /// while a temporary is held exclusively ([`Lease::try_unique`](crate::Lease::try_unique)); the
    /// driver's own. The recording is over then.
    #[doc(alias = "stopGraphRecording")]
    pub fn stop_graph_recording(&self) -> Result<Graph> {
        let recorder = self.recorder();
        let Some(recording) = recorder.as_ref().and_then(|r| r.stream().recording()) else {
            return Err(Error::recording(
                "this thread has started no recording on this device; start one (start_graph_recording), or call the runtime that records",
            ));
        };
        let state = recording.finish()?;
        forget(recording);
        graph_of(self, state)
    }

    /// Gives the recording up that [`stop_graph_recording`](Self::stop_graph_recording) would make
    /// a graph of. Without one, in the body of a loop or branch, and on another thread than the
    /// recording's, it does nothing: a body that fails is taken back.
    pub fn abandon_graph_recording(&self) {
        if let Some(recorder) = self.recorder()
            && let Some(recording) = recorder.stream().recording()
        {
            recording.give_up();
            forget(recording);
        }
    }

    /// The runtime that records: this one, or the one that the thread has started.
    fn recorder(&self) -> Option<Runtime> {
        match self.stream().recording() {
            Some(_) => Some(self.clone()),
            None => started(&self.inner),
        }
    }
}

impl Stream {
    /// Leaves a note about what was recorded last for a check, which the recording must pass when
    /// it stops. The note goes with what it is about: an operator that fails takes it back.
    ///
    /// # Errors
    /// `Recording` for a stream that does not record, on another thread than the recording's, and
    /// once the recording is over.
    pub fn note(&self, check: &Arc<dyn StopCheck>, note: Note) -> Result<()> {
        match self.recording() {
            Some(recording) => recording.note(check, note),
            None => Err(Error::recording(
                "only a recording takes notes, and this stream works eagerly; ask Stream::is_recording first",
            )),
        }
    }

    /// The id in [`Graph::update`](crate::Graph::update) of the operation that is recorded next;
    /// its [index](NodeId::index) is how many have been recorded. `None` for a stream that does not
    /// record, in the body of a loop or branch, and on another thread than the recording's.
    #[must_use]
    pub fn next_node(&self) -> Option<NodeId> {
        self.recording()?.nodes().map(NodeId::new)
    }
}
