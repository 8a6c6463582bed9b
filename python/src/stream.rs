//! Streams, and recordings, which are streams too.
//!
//! A call that gives a stream work leaves the interpreter's lock: it may pause for room, or wait
//! for another thread's call. What such a thread waits for may need the interpreter.

use crate::arguments;
use crate::buffer::Base;
use crate::callbacks;
use crate::copies::{self, End};
use crate::device::{Device, State, state};
use crate::download::Download;
use crate::errors::{Class, invalid, raise};
use crate::event::EventObject;
use crate::fork::Own;
use crate::graph::GraphObject;
use crate::kernel::{self, KernelObject, Signature};
use crate::memory::{self, Block, Giving};
use crate::recorded::Recorded;
use crate::waits::within;
use leasehold::graph::GraphRecording;
use leasehold::{Access, Error, Operand, Result, Runtime, Stream, StreamDesc};
use leasehold_core::sync::{Arc, Mutex};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::collections::BTreeMap;

/// The iterator that `await` runs of an object with `_on_complete`, and `_result` if it has one.
pub(crate) fn awaited<'py>(
    of: &Bound<'py, PyAny>,
    has_result: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let begin = of.getattr("_on_complete")?;
    let result = if has_result { Some(of.getattr("_result")?) } else { None };
    of.py().import("leasehold._async")?.call_method1("wait", (begin, result))
}

/// The kernels of a recording's launches, by node.
pub(crate) type Launches = BTreeMap<u32, Arc<Signature>>;

/// A recording, and what it was given.
struct Recording {
    phase: Mutex<Phase>,
    recorded: Arc<Recorded>,
    launches: Mutex<Launches>,
}

enum Phase {
    /// It goes on. A thread that ends it shares it meanwhile, so others find it as it is.
    Open(Arc<GraphRecording>),
    Ended(Py<GraphObject>),
    /// It was given up.
    Gone,
}

/// A queue of work of a device.
///
/// Work of a stream runs in the order of the calls. Between streams the runtime derives the order
/// from the buffers: an operation begins after the earlier uses of its buffers, whatever stream
/// they were on. No call waits for the device but `synchronize`, `query`, and the end of a `with`
/// block. Any thread may use a stream.
///
/// Work that fails ends the stream: from then on each call raises that failure. Take a new stream
/// to go on. A buffer that the work was to write hands the failure on until it is overwritten as a
/// whole.
///
/// The end of a `with` block waits for the stream's work. `await stream` waits without blocking
/// the event loop. What is pending when the program ends is lost.
///
/// Parameters
/// ----------
/// device
///     The device, or its name.
/// priority
///     A greater number is more urgent. The device's range bounds it.
/// name
///     The name in reports and messages.
///
/// Examples
/// --------
/// >>> import leasehold
/// >>> device = leasehold.Device("cpu:0")
/// >>> x = device.empty(4, "int32")
/// >>> with leasehold.Stream(device) as stream:
/// ...     stream.fill(x, 7)
/// >>> memoryview(x).tolist()
/// [7, 7, 7, 7]
#[pyclass(frozen, weakref, name = "Stream", module = "leasehold")]
pub(crate) struct StreamObject {
    device: Arc<State>,
    /// The device's runtime, with this stream as its own.
    runtime: Own<Runtime>,
    recording: Option<Own<Recording>>,
}

/// The stream that an argument is.
pub(crate) fn argument<'a>(of: &'a Bound<'_, PyAny>) -> PyResult<&'a StreamObject> {
    of.cast::<StreamObject>().map(Bound::get).map_err(|_| {
        Class::ArgumentType.error(format!("a stream is a leasehold.Stream, not {}", of.get_type()))
    })
}

impl StreamObject {
    fn make(device: &Arc<State>, priority: i32, name: Option<String>) -> Result<Self> {
        device.use_streams()?;
        let stream = device.runtime.create_stream_with(&StreamDesc::priority(priority))?;
        if let Some(name) = name {
            device.name_stream(&stream, name)?;
        }
        let runtime = Own::new(stream.runtime());
        Ok(Self { device: device.clone(), runtime, recording: None })
    }

    /// A stream of a new recording.
    pub(crate) fn begin(device: &Arc<State>) -> Result<Self> {
        device.use_streams()?;
        let begun = GraphRecording::begin(&device.runtime)?;
        let runtime = Own::new(begun.runtime().clone());
        let (phase, recorded) = (Mutex::new(Phase::Open(Arc::new(begun))), Recorded::begin());
        let recording = Some(Own::new(Recording { phase, recorded, launches: Mutex::default() }));
        Ok(Self { device: device.clone(), runtime, recording })
    }

    /// The runtime, for an allocator of memory for the stream.
    ///
    /// # Errors
    /// `InvalidArgument` for a recording, and for a stream of another device.
    pub(crate) fn lent(&self, device: &Arc<State>) -> PyResult<Runtime> {
        if self.recording.is_some() || !Arc::ptr_eq(&self.device, device) {
            let of = if self.recording.is_some() { "a recording" } else { &self.device.name };
            return Err(invalid(format!(
                "memory of {} is for a stream of that device, not for one of {of}",
                device.name
            )));
        }
        Ok(self.runtime.clone())
    }

    /// The runtime's stream.
    ///
    /// # Errors
    /// `InvalidState` in a child of the process that made it.
    pub(crate) fn stream(&self) -> Result<&Stream> {
        self.device.check_process()?;
        Ok(self.runtime.stream())
    }

    /// Gives the stream an operation on blocks, without the interpreter's lock. `note` says what a
    /// recording keeps besides, by the node.
    pub(crate) fn submit(
        &self,
        py: Python<'_>,
        blocks: &[Arc<Block>],
        note: Option<&Arc<Signature>>,
        run: impl FnOnce(&Stream) -> Result<()> + Send,
    ) -> PyResult<()> {
        let submit = || {
            let stream = self.stream()?;
            let Some(recording) = &self.recording else {
                return Block::ordered(blocks, &self.device, stream, || run(stream));
            };
            let node = stream.next_node();
            run(stream)?;
            // Only now: an operation that is refused leaves nothing behind.
            recording.recorded.add(blocks);
            if let (Some(node), Some(signature)) = (node, note) {
                recording.launches.lock().insert(node.index(), signature.clone());
            }
            Ok(())
        };
        let giving = Giving::begin(py, blocks);
        let given = py.detach(submit);
        drop(giving);
        given.map_err(raise)
    }

    /// Ends the recording, and keeps its graph.
    fn end(&self, py: Python<'_>, recording: &Recording) -> PyResult<()> {
        let open = match &*recording.phase.lock() {
            Phase::Open(open) => open.clone(),
            _ => return Err(raise(ended())),
        };
        let made = py.detach(|| {
            let made = open.stop();
            drop(open);
            made
        });
        // On another thread than its own it goes on.
        let graph = match made {
            Err(error) if self.runtime.is_graph_recording() => return Err(raise(error)),
            made => made,
        };
        let blocks = recording.recorded.take();
        let launches = std::mem::take(&mut *recording.launches.lock());
        let graph = graph
            .map_err(raise)
            .and_then(|graph| Py::new(py, GraphObject::new(&self.device, graph, blocks, launches)));
        let (phase, result) = match graph {
            Ok(graph) => (Phase::Ended(graph), Ok(())),
            Err(error) => (Phase::Gone, Err(error)),
        };
        Self::go_on(py, recording, phase);
        result
    }

    /// Gives a recording another phase. The former one ends without the interpreter's lock: what
    /// was recorded may be anybody's.
    fn go_on(py: Python<'_>, recording: &Recording, phase: Phase) {
        let former = std::mem::replace(&mut *recording.phase.lock(), phase);
        py.detach(|| drop(former));
    }

    /// The bytes of a buffer as an operand.
    fn buffer(of: &Bound<'_, PyAny>, what: &str) -> PyResult<(Arc<Block>, (u64, u64))> {
        let refuse = |_| {
            let kind = of.get_type();
            Class::ArgumentType.error(format!("{what} of a stream is a Buffer, not {kind}"))
        };
        of.cast::<Base>().map_err(refuse)?.get().range()
    }
}

#[pymethods]
impl StreamObject {
    #[new]
    #[pyo3(
        signature = (device, *, priority=None, name=None),
        text_signature = "(device, *, priority=0, name=None)"
    )]
    fn new(
        device: &Bound<'_, PyAny>,
        priority: Option<&Bound<'_, PyAny>>,
        name: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let priority = arguments::optional(priority, "a priority is a number")?.unwrap_or(0);
        let name = arguments::optional(name, "a name is a text")?;
        let state = state(device)?;
        device.py().detach(|| Self::make(&state, priority, name)).map_err(raise)
    }

    /// The device.
    #[getter]
    fn device(&self) -> Device {
        Device(self.device.clone())
    }

    /// The name in reports and messages.
    #[getter]
    fn name(&self) -> PyResult<Option<String>> {
        let name = self.stream().map_err(raise)?.name();
        Ok(name.map(|name| name.as_str().to_owned()))
    }

    #[setter]
    fn set_name(&self, name: &Bound<'_, PyAny>) -> PyResult<()> {
        let name: String = arguments::value(name, "a name is a text")?;
        self.device.name_stream(self.stream().map_err(raise)?, name).map_err(raise)
    }

    /// The handle of the driver's stream (`CUstream`); 0 where there is none.
    #[getter]
    fn native(&self) -> PyResult<u64> {
        Ok(self.stream().map_err(raise)?.native())
    }

    /// Whether the stream is of a recording.
    #[getter]
    fn is_recording(&self) -> bool {
        self.recording.is_some()
    }

    /// The number that the next operation of a recording has in `Graph.update`.
    #[getter]
    fn next_node(&self) -> PyResult<u32> {
        let node = self.stream().map_err(raise)?.next_node();
        let node = node.ok_or_else(|| {
            raise(Error::recording("only a recording numbers operations, on its own thread"))
        })?;
        Ok(node.index())
    }

    /// The graph of a recording that has ended.
    #[getter]
    fn graph(&self, py: Python<'_>) -> PyResult<Py<GraphObject>> {
        if let Some(recording) = &self.recording
            && let Phase::Ended(graph) = &*recording.phase.lock()
        {
            return Ok(graph.clone_ref(py));
        }
        let cure = "the end of a block `with device.record() as stream:` makes it";
        Err(Class::InvalidState.error(format!("the stream has no graph; {cure}")))
    }

    /// Launches a kernel.
    ///
    /// Parameters
    /// ----------
    /// kernel
    ///     A `Kernel`.
    /// args
    ///     The kernel's buffers and numbers, in its order: a list or a tuple.
    /// grid
    ///     The number of blocks, or a tuple of up to three for as many directions. On the CPU: of
    ///     tiles. With a zero in it the launch does nothing.
    /// block
    ///     The threads of a block, likewise. Means nothing to a CPU.
    /// shared_bytes
    ///     Shared memory of a block beside what the kernel declares itself.
    #[pyo3(
        signature = (kernel, args, *, grid, block=None, shared_bytes=None),
        text_signature = "($self, kernel, args, *, grid, block=1, shared_bytes=0)"
    )]
    fn launch(
        &self,
        kernel: &Bound<'_, PyAny>,
        args: &Bound<'_, PyAny>,
        grid: &Bound<'_, PyAny>,
        block: Option<&Bound<'_, PyAny>>,
        shared_bytes: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let py = kernel.py();
        let refuse = |_| {
            let kind = kernel.get_type();
            Class::ArgumentType.error(format!("a kernel is a leasehold.Kernel, not {kind}"))
        };
        let kernel = kernel.cast::<KernelObject>().map_err(refuse)?.get();
        let grid = kernel::grid(grid, block, shared_bytes)?;
        let given = kernel.signature.arguments(args)?;
        self.submit(py, &given.blocks, Some(&kernel.signature), |stream| {
            let access = kernel.signature.access();
            let mut operands: Vec<Operand<'_>> = Vec::with_capacity(access.len());
            for ((block, &range), &access) in given.blocks.iter().zip(&given.ranges).zip(access) {
                operands.push(block.operand(range, access)?);
            }
            stream.launch(&kernel.base, &operands, &*given.params, grid)
        })
    }

    /// Copies a buffer to another one with as many bytes, of any device.
    fn copy(&self, to: &Bound<'_, PyAny>, source: &Bound<'_, PyAny>) -> PyResult<()> {
        let (to_block, to_range) = Self::buffer(to, "the target")?;
        let (from_block, from_range) = Self::buffer(source, "the source")?;
        let blocks = [to_block, from_block];
        self.submit(to.py(), &blocks, None, |stream| {
            let to = blocks[0].operand(to_range, Access::Write)?.view();
            stream.copy(to, blocks[1].operand(from_range, Access::Read)?.view())
        })
    }

    /// Sets every element of a buffer to a number.
    fn fill(&self, buffer: &Bound<'_, PyAny>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let (block, range) = Self::buffer(buffer, "the target")?;
        let element = buffer.cast::<Base>()?.get().layout().dtype.pack(value)?;
        let blocks = [block];
        self.submit(value.py(), &blocks, None, |stream| {
            memory::fill(stream, blocks[0].operand(range, Access::Write)?.view(), &element)
        })
    }

    /// Copies an array of the host to a buffer. The bytes are taken during the call; in a recording
    /// the graph keeps them.
    fn upload(&self, to: &Bound<'_, PyAny>, array: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = to.py();
        let (block, range) = Self::buffer(to, "the target")?;
        let layout = to.cast::<Base>()?.get().parts()?;
        let bytes = copies::taken(py, &End::new(layout.0, layout.1)?, &End::of(array, false)?)?;
        let blocks = [block];
        self.submit(py, &blocks, None, |stream| {
            stream.upload_owned(blocks[0].operand(range, Access::Write)?.view(), bytes)
        })
    }

    /// Begins a copy of a buffer's bytes to the host: `await` gives them, and so does `result`.
    fn download(&self, buffer: &Bound<'_, PyAny>) -> PyResult<Download> {
        if self.recording.is_some() {
            return Err(raise(Error::recording(
                "a buffer is read back after a launch of the graph, by a stream that does not record",
            )));
        }
        let (block, range) = Self::buffer(buffer, "the source")?;
        Download::begin(buffer.py(), &self.device, self.stream().map_err(raise)?, block, range)
    }

    /// Calls `function(*args)` on a thread of the runtime when the stream comes to it; in a
    /// recording at each launch. An exception fails the stream, with its text. The function must
    /// not wait for its own stream.
    #[pyo3(signature = (function, *args))]
    fn host_call(&self, function: &Bound<'_, PyAny>, args: &Bound<'_, PyTuple>) -> PyResult<()> {
        let py = function.py();
        if !function.is_callable() {
            return Err(Class::ArgumentType.error("a host call is a function"));
        }
        self.stream().map_err(raise)?;
        callbacks::note(py);
        let (function, args) = (function.clone().unbind(), args.clone().unbind());
        self.submit(py, &[], None, |stream| {
            stream.host_call("a function of Python", move || callbacks::call(&function, &args))
        })
    }

    /// Records an event at the stream's present end, and returns it: `event`, or a new one.
    #[pyo3(signature = (event=None))]
    fn record<'py>(
        &self,
        py: Python<'py>,
        event: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, EventObject>> {
        let event = match event {
            Some(event) => event
                .cast::<EventObject>()
                .map_err(|_| Class::ArgumentType.error("an event is a leasehold.Event"))?
                .clone(),
            None => {
                let made = py.detach(|| EventObject::make(&self.device, false)).map_err(raise)?;
                Bound::new(py, made)?
            }
        };
        let recorded = event.get();
        self.submit(py, &[], None, |stream| stream.record(&recorded.event))?;
        Ok(event)
    }

    /// Lets later work begin after the last record of an event, or after all work so far of
    /// another stream. Returns at once. Only for what the buffers do not say.
    fn wait(&self, other: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = other.py();
        if let Ok(event) = other.cast::<EventObject>() {
            let event = event.get();
            return self.submit(py, &[], None, |stream| stream.wait_event(&event.event));
        }
        let Ok(other) = other.cast::<StreamObject>() else {
            return Err(Class::ArgumentType.error(format!(
                "a stream waits for an Event or a Stream, not {}",
                other.get_type()
            )));
        };
        let other = other.get();
        if other.recording.is_some() {
            return Err(raise(Error::recording(
                "a recording runs nothing that could be waited for",
            )));
        }
        self.submit(py, &[], None, |stream| stream.wait(other.stream()?.now()))
    }

    /// Returns whether all work so far is over. Raises the stream's failure.
    fn query(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| self.stream()?.query()).map_err(raise)
    }

    /// Waits until all work so far is over, for `timeout` seconds if that is given. Raises the
    /// stream's failure.
    #[pyo3(signature = (timeout=None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let timeout = arguments::timeout(timeout)?;
        within(py, timeout, |limit| self.stream()?.synchronize_timeout(limit))
    }

    /// Makes sure that all work so far is on its way to the device.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.stream()?.flush()).map_err(raise)
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        if let Some(recording) = &slf.get().recording
            && !matches!(*recording.phase.lock(), Phase::Open(_))
        {
            return Err(raise(ended()));
        }
        Ok(slf)
    }

    #[pyo3(signature = (exception_type=None, *_exception))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exception_type: Option<&Bound<'_, PyAny>>,
        _exception: &Bound<'_, PyTuple>,
    ) -> PyResult<()> {
        match (&self.recording, exception_type) {
            (Some(recording), None) => self.end(py, recording),
            (Some(recording), Some(_)) => {
                Self::go_on(py, recording, Phase::Gone);
                let blocks = recording.recorded.take();
                py.detach(|| drop(blocks));
                Ok(())
            }
            (None, None) => self.synchronize(py, None),
            (None, Some(_)) => Ok(()),
        }
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        if slf.get().recording.is_some() {
            return Err(raise(Error::recording("a recording runs nothing that could be awaited")));
        }
        awaited(slf.as_any(), false)
    }

    /// Calls a function with `None` once all work so far is over, or with the failure.
    fn _on_complete(&self, py: Python<'_>, function: Py<PyAny>) -> PyResult<()> {
        on_complete(py, self.stream().map_err(raise)?, function);
        Ok(())
    }

    fn __repr__(&self) -> String {
        let kind = if self.recording.is_some() { ", recording" } else { "" };
        format!("Stream('{}'{kind})", self.device.name)
    }
}

fn ended() -> Error {
    Error::recording("the recording has ended; begin another one")
}

/// Calls a function with `None` once all work of a stream so far is over, or with the failure.
pub(crate) fn on_complete(py: Python<'_>, stream: &Stream, function: Py<PyAny>) {
    callbacks::note(py);
    py.detach(|| stream.on_complete(move |result| callbacks::tell(&function, result)));
}

/// A numbered launch of a graph.
pub(crate) fn node(of: &Bound<'_, PyAny>) -> PyResult<u32> {
    arguments::value(of, "a node is a number, from Stream.next_node")
}
