//! Steps by calls of the C ABI: a second player beside the one of the safe API.
//!
//! The program's objects are those of the Rust player. A step lends the objects that it uses to C,
//! makes the call with their handles, and takes the handles back. What a call makes comes back as
//! an object. So both players have the same model, the same checks and the same devices.
//!
//! Rust keeps what C has no function for: current contexts, sessions that do not wait, the other
//! device's end, trims, and the scenes.
//!
//! This module must not know programs or the model.

use crate::kernels::BLOCK;
use crate::prelude::Call;
use crate::step::{Op, Work};
use crate::target::Kernels;
use crate::work;
use leasehold::graph::NodeId;
use leasehold::{
    Access, Buffer, BufferView, Error, Event, Graph, HostTimeline, Lease, Operand, OutOfMemory,
    Result, Runtime, Stream, Timepoint, View,
};
use leasehold_capi::extend::{self, INVALID_ARGUMENT, INVALID_STATE, Lent, OUT_OF_MEMORY, TIMEOUT};
use leasehold_capi::ffi::*;
use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};

/// The error of a status, with the library's text.
fn check(status: c_int) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: the text is this thread's until its next call.
    let text = unsafe { CStr::from_ptr(leasehold_last_error()) }.to_string_lossy().into_owned();
    Err(match status {
        INVALID_ARGUMENT => Error::invalid(text),
        OUT_OF_MEMORY => OutOfMemory::new(text, 0).into(),
        INVALID_STATE => Error::state(text),
        TIMEOUT => Error::Timeout(text.into()),
        _ => Error::other(text),
    })
}

/// A handle that a call makes, for the time that its object is taken out.
struct Made {
    handle: u64,
    release: extern "C" fn(u64) -> c_int,
}

impl Made {
    fn by(
        release: extern "C" fn(u64) -> c_int,
        call: impl FnOnce(*mut u64) -> c_int,
    ) -> Result<Self> {
        let mut handle = 0;
        check(call(&mut handle))?;
        Ok(Self { handle, release })
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        (self.release)(self.handle);
    }
}

/// A part of a lent buffer.
fn part(buffer: &Lent, view: BufferView<'_>, access: Access) -> LeaseholdOperand {
    let access = match access {
        Access::Read => LEASEHOLD_READ,
        Access::Write => LEASEHOLD_WRITE,
        Access::ReadWrite => LEASEHOLD_READ_WRITE,
    };
    let (offset, bytes) = (view.offset(), view.len());
    LeaseholdOperand { buffer: buffer.handle(), offset, bytes, access, reserved: 0 }
}

pub(crate) fn create_stream(runtime: &Runtime, priority: i32) -> Result<Stream> {
    let lent = Lent::runtime(runtime)?;
    let size = size_of::<LeaseholdStreamOptions>();
    let options = LeaseholdStreamOptions { size, name: null(), priority, reserved: 0 };
    let made = Made::by(leasehold_stream_release, |to| {
        // SAFETY: both point to locals.
        unsafe { leasehold_stream_create(lent.handle(), &options, to) }
    })?;
    extend::stream(made.handle)
}

/// Memory of the stream's device, or pinned memory.
pub(crate) fn alloc(stream: &Stream, bytes: u64, pinned: bool) -> Result<Lease<Buffer>> {
    let lent = Lent::stream(stream)?;
    let take = if pinned { leasehold_buffer_alloc_pinned } else { leasehold_buffer_alloc };
    let made = Made::by(leasehold_buffer_release, |to| {
        // SAFETY: the place is a local.
        unsafe { take(lent.handle(), bytes, to) }
    })?;
    extend::buffer(made.handle)
}

/// The same buffer, by a handle that is retained and released once more.
pub(crate) fn kept(buffer: &Lease<Buffer>) -> Result<Lease<Buffer>> {
    let lent = Lent::buffer(buffer)?;
    check(leasehold_buffer_retain(lent.handle()))?;
    check(leasehold_buffer_release(lent.handle()))?;
    extend::buffer(lent.handle())
}

pub(crate) fn upload(stream: &Stream, to: BufferView<'_>, bytes: &[u8], waits: bool) -> Result<()> {
    let (lent, buffer) = (Lent::stream(stream)?, Lent::buffer(to.buffer())?);
    let (to, from) = (part(&buffer, to, Access::Write), bytes.as_ptr().cast::<c_void>());
    // SAFETY: the bytes are borrowed for this call, which takes them.
    check(unsafe {
        if waits {
            leasehold_stream_upload_blocking(lent.handle(), to, from, bytes.len())
        } else {
            leasehold_stream_upload(lent.handle(), to, from, bytes.len(), null_mut())
        }
    })
}

pub(crate) fn download(stream: &Stream, to: &mut [u8], from: BufferView<'_>) -> Result<()> {
    let (lent, buffer) = (Lent::stream(stream)?, Lent::buffer(from.buffer())?);
    let (from, place) = (part(&buffer, from, Access::Read), to.as_mut_ptr().cast::<c_void>());
    // SAFETY: the bytes are borrowed for this call, which waits for them.
    check(unsafe { leasehold_stream_download_blocking(lent.handle(), place, to.len(), from) })
}

/// Does work on a stream, as [`work::run`] does.
pub(crate) fn run(
    stream: &Stream,
    kernels: &Kernels,
    work: &Work,
    to: &Lease<Buffer>,
    from: &[Lease<Buffer>],
) -> Result<()> {
    let into = to.part(work.to.range())?;
    let copy = |rows: Option<LeaseholdRows>| {
        let source = from[0].part(work.from[0].range())?;
        let (lent, target) = (Lent::stream(stream)?, Lent::buffer(to)?);
        let origin = Lent::buffer(&from[0])?;
        let (to, from) = (part(&target, into, Access::Write), part(&origin, source, Access::Read));
        // SAFETY: the rows are a local.
        check(unsafe {
            match &rows {
                Some(rows) => leasehold_stream_copy_rows(lent.handle(), to, from, rows, null_mut()),
                None => leasehold_stream_copy(lent.handle(), to, from, null_mut()),
            }
        })
    };
    match work.op {
        Op::Fill { pattern, width } => {
            let (lent, buffer) = (Lent::stream(stream)?, Lent::buffer(to)?);
            let to = part(&buffer, into, Access::Write);
            // C takes a number that fits.
            let value = if width < 4 { pattern & ((1 << (8 * width)) - 1) } else { pattern };
            // SAFETY: nobody wants the point.
            check(unsafe {
                leasehold_stream_fill(lent.handle(), to, value, width.into(), null_mut())
            })
        }
        Op::Upload { seed, hand } => {
            let bytes = crate::prelude::bytes(seed, work.to.len as usize);
            upload(stream, into, &bytes, hand == crate::step::Hand::Synchronous)
        }
        Op::Copy | Op::Pinned => copy(None),
        // The C interface has single copies.
        Op::Copies => stream.copy_batch(&work::pieces(work, to, from)?),
        Op::Copy2d { width, rows, from_pitch, to_pitch } => copy(Some(LeaseholdRows {
            width: width.into(),
            rows: rows.into(),
            to_pitch: to_pitch.into(),
            from_pitch: from_pitch.into(),
        })),
        Op::Launch { .. } => {
            let operands = work::operands(work, to, from)?;
            launch(stream, &[work::call(kernels, work, &operands)])
        }
    }
}

/// Launches kernels as one submission.
pub(crate) fn launch(stream: &Stream, calls: &[Call<'_>]) -> Result<()> {
    let lent = Lent::stream(stream)?;
    let mut held = Vec::with_capacity(calls.len());
    for call in calls {
        let buffers: Vec<Lent> = call
            .operands
            .iter()
            .map(|operand| Lent::buffer(operand.view().buffer()))
            .collect::<Result<_>>()?;
        let given =
            |(operand, lent): (&Operand<'_>, &Lent)| part(lent, operand.view(), operand.access());
        let operands: Vec<_> = std::iter::zip(call.operands, &buffers).map(given).collect();
        held.push((Lent::kernel(call.kernel)?, buffers, operands));
    }
    let launches: Vec<_> = std::iter::zip(calls, &held)
        .map(|(call, (kernel, _, operands))| LeaseholdLaunch {
            kernel: kernel.handle(),
            grid: LeaseholdGrid {
                blocks: [call.params[0].div_ceil(BLOCK), 1, 1],
                threads: [BLOCK, 1, 1],
                shared_bytes: 0,
                reserved: 0,
            },
            operands: operands.as_ptr(),
            operand_count: operands.len(),
            params: call.params.as_ptr().cast(),
            params_bytes: size_of_val(&call.params),
        })
        .collect();
    // SAFETY: the lists, the operands and the parameters are borrowed for the call.
    check(unsafe {
        match &launches[..] {
            [one] => leasehold_stream_launch(
                lent.handle(),
                one.kernel,
                &one.grid,
                one.operands,
                one.operand_count,
                one.params,
                one.params_bytes,
                null_mut(),
            ),
            all => leasehold_stream_launch_many(lent.handle(), all.as_ptr(), all.len(), null_mut()),
        }
    })
}

pub(crate) fn synchronize(stream: &Stream) -> Result<()> {
    check(leasehold_stream_synchronize(Lent::stream(stream)?.handle(), LEASEHOLD_FOREVER))
}

pub(crate) fn query(stream: &Stream) -> Result<bool> {
    let (lent, mut over) = (Lent::stream(stream)?, 0);
    // SAFETY: the place is a local.
    check(unsafe { leasehold_stream_query(lent.handle(), &mut over) })?;
    Ok(over != 0)
}

pub(crate) fn flush(stream: &Stream) -> Result<()> {
    check(leasehold_stream_flush(Lent::stream(stream)?.handle()))
}

pub(crate) fn synchronize_device(runtime: &Runtime) -> Result<()> {
    check(leasehold_runtime_synchronize(Lent::runtime(runtime)?.handle(), LEASEHOLD_FOREVER))
}

/// The point of a stream's work so far, for another stream to wait for.
pub(crate) fn wait_stream(stream: &Stream, on: &Stream) -> Result<()> {
    let (lent, other) = (Lent::stream(stream)?, Lent::stream(on)?);
    let mut point = LeaseholdPoint::default();
    // SAFETY: the place is a local.
    check(unsafe { leasehold_stream_now(other.handle(), &mut point) })?;
    check(leasehold_stream_wait_point(lent.handle(), point))
}

/// A function of Rust's as C's function and context.
type Function = Box<dyn Fn() -> Result<()> + Send + Sync>;

unsafe extern "C" fn call(context: *mut c_void) -> c_int {
    // SAFETY: the context is the function's until it is released.
    let function = unsafe { &*context.cast::<Function>() };
    c_int::from(function().is_err())
}

unsafe extern "C" fn release(context: *mut c_void) {
    // SAFETY: C releases a context once, after its last call.
    drop(unsafe { Box::from_raw(context.cast::<Function>()) });
}

pub(crate) fn host_call(
    stream: &Stream,
    function: impl Fn() -> Result<()> + Send + Sync + 'static,
) -> Result<()> {
    let lent = Lent::stream(stream)?;
    let context = Box::into_raw(Box::new(Box::new(function) as Function)).cast();
    // SAFETY: any thread may call the function, and C releases the context once.
    let status = unsafe {
        leasehold_stream_host_call(lent.handle(), Some(call), Some(release), context, null_mut())
    };
    if status != 0 {
        // SAFETY: C keeps the context of a call that went well alone.
        unsafe { release(context) };
    }
    check(status)
}

type Told = Box<dyn FnOnce(Result<()>) + Send>;

pub(crate) fn on_complete(stream: &Stream, told: impl FnOnce(Result<()>) + Send + 'static) {
    unsafe extern "C" fn tell(context: *mut c_void, status: c_int) {
        // SAFETY: C calls it once, with the context of `on_complete`.
        let told = unsafe { Box::from_raw(context.cast::<Told>()) };
        told(check(status));
    }
    match Lent::stream(stream) {
        Ok(lent) => {
            let context = Box::into_raw(Box::new(Box::new(told) as Told)).cast::<c_void>();
            // SAFETY: any thread may call the function once.
            let status =
                unsafe { leasehold_stream_on_complete(lent.handle(), Some(tell), context) };
            if status != 0 {
                // SAFETY: C did not take the context.
                let told = unsafe { Box::from_raw(context.cast::<Told>()) };
                told(check(status));
            }
        }
        Err(e) => told(Err(e)),
    }
}

pub(crate) fn create_event(runtime: &Runtime, timing: bool) -> Result<Lease<Event>> {
    let lent = Lent::runtime(runtime)?;
    let flags = if timing { LEASEHOLD_EVENT_TIMING } else { 0 };
    let made = Made::by(leasehold_event_release, |to| {
        // SAFETY: the place is a local.
        unsafe { leasehold_event_create(lent.handle(), flags, to) }
    })?;
    extend::event(made.handle)
}

pub(crate) fn record(stream: &Stream, event: &Lease<Event>) -> Result<()> {
    let (lent, event) = (Lent::stream(stream)?, Lent::event(event, &stream.runtime())?);
    // SAFETY: nobody wants the point.
    check(unsafe { leasehold_event_record(event.handle(), lent.handle(), null_mut()) })
}

pub(crate) fn wait_event(stream: &Stream, event: &Lease<Event>) -> Result<()> {
    let (lent, event) = (Lent::stream(stream)?, Lent::event(event, &stream.runtime())?);
    check(leasehold_stream_wait_event(lent.handle(), event.handle()))
}

pub(crate) fn query_event(runtime: &Runtime, event: &Lease<Event>) -> Result<bool> {
    let (lent, mut over) = (Lent::event(event, runtime)?, 0);
    // SAFETY: the place is a local.
    check(unsafe { leasehold_event_query(lent.handle(), &mut over) })?;
    Ok(over != 0)
}

pub(crate) fn synchronize_event(runtime: &Runtime, event: &Lease<Event>) -> Result<()> {
    check(leasehold_event_synchronize(Lent::event(event, runtime)?.handle(), LEASEHOLD_FOREVER))
}

pub(crate) fn elapsed(runtime: &Runtime, from: &Lease<Event>, to: &Lease<Event>) -> Result<()> {
    let (from, to) = (Lent::event(from, runtime)?, Lent::event(to, runtime)?);
    let mut nanoseconds = 0;
    // SAFETY: the place is a local.
    check(unsafe { leasehold_event_elapsed_blocking(from.handle(), to.handle(), &mut nanoseconds) })
}

pub(crate) fn create_host_timeline(runtime: &Runtime) -> Result<HostTimeline> {
    let lent = Lent::runtime(runtime)?;
    let made = Made::by(leasehold_host_timeline_release, |to| {
        // SAFETY: the place is a local.
        unsafe { leasehold_host_timeline_create(lent.handle(), to) }
    })?;
    extend::host_timeline(made.handle)
}

/// A stream waits for a value of a host timeline.
pub(crate) fn wait_for(stream: &Stream, timeline: &HostTimeline, point: Timepoint) -> Result<()> {
    let (lent, timeline) = (Lent::stream(stream)?, Lent::host_timeline(timeline)?);
    let point = LeaseholdPoint { timeline: timeline.handle(), value: point.value() };
    check(leasehold_stream_wait_point(lent.handle(), point))
}

pub(crate) fn signal(timeline: &HostTimeline, value: u64) -> Result<()> {
    check(leasehold_host_timeline_signal(Lent::host_timeline(timeline)?.handle(), value))
}

/// A recording that C began.
pub(crate) struct Recording {
    handle: u64,
    pub(crate) stream: Stream,
}

impl Recording {
    /// Begins a recording, after one that is cancelled.
    pub(crate) fn begin(runtime: &Runtime) -> Result<Self> {
        let lent = Lent::runtime(runtime)?;
        let begin = || {
            let mut handle = 0;
            // SAFETY: the place is a local.
            check(unsafe { leasehold_record_begin(lent.handle(), &mut handle) })?;
            Ok::<u64, Error>(handle)
        };
        let cancelled = begin()?;
        let temporary = extend::stream(cancelled).and_then(|stream| alloc(&stream, 64, false));
        check(leasehold_record_cancel(cancelled))?;
        check(leasehold_stream_release(cancelled))?;
        drop(temporary?);
        let handle = begin()?;
        Ok(Self { handle, stream: extend::stream(handle)? })
    }

    /// The node that is recorded next.
    pub(crate) fn next_node(&self) -> Result<NodeId> {
        let mut node = 0;
        // SAFETY: the place is a local.
        check(unsafe { leasehold_record_next(self.handle, &mut node) })?;
        Ok(NodeId::new(node))
    }

    /// Ends the recording.
    pub(crate) fn end(self) -> Result<Graph> {
        let made = Made::by(leasehold_graph_release, |to| {
            // SAFETY: the place is a local.
            unsafe { leasehold_record_end(self.handle, to) }
        })?;
        extend::graph(made.handle)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // Without effect on a recording that has ended.
        leasehold_record_cancel(self.handle);
        leasehold_stream_release(self.handle);
    }
}

pub(crate) fn launch_graph(graph: &Graph, stream: &Stream) -> Result<()> {
    let (graph, lent) = (Lent::graph(graph)?, Lent::stream(stream)?);
    // SAFETY: nobody wants the point.
    check(unsafe { leasehold_graph_launch(graph.handle(), lent.handle(), null_mut()) })
}

/// A change without any effect yet.
const NO_CHANGE: LeaseholdGraphChange = LeaseholdGraphChange {
    kind: 0,
    node: 0,
    params: null(),
    params_bytes: 0,
    grid: [1, 1, 1],
    reserved: 0,
    from: 0,
    to: 0,
};

fn update(graph: &Graph, change: &LeaseholdGraphChange) -> Result<()> {
    let lent = Lent::graph(graph)?;
    // SAFETY: the change is borrowed for the call, and nobody wants the answer.
    check(unsafe { leasehold_graph_update(lent.handle(), change, 1, null_mut()) })
}

pub(crate) fn update_params(graph: &Graph, node: NodeId, params: &[u32; 3]) -> Result<()> {
    let (node, params_bytes) = (node.index(), size_of_val(params));
    let params = params.as_ptr().cast();
    let kind = LEASEHOLD_CHANGE_PARAMS;
    update(graph, &LeaseholdGraphChange { kind, node, params, params_bytes, ..NO_CHANGE })
}

pub(crate) fn update_grid(graph: &Graph, node: NodeId, blocks: u32) -> Result<()> {
    let (kind, grid) = (LEASEHOLD_CHANGE_GRID, [blocks, 1, 1]);
    update(graph, &LeaseholdGraphChange { kind, node: node.index(), grid, ..NO_CHANGE })
}

pub(crate) fn swap(graph: &Graph, old: &Lease<Buffer>, new: &Lease<Buffer>) -> Result<()> {
    let (old, new) = (Lent::buffer(old)?, Lent::buffer(new)?);
    let (from, to) = (old.handle(), new.handle());
    update(graph, &LeaseholdGraphChange { kind: LEASEHOLD_CHANGE_BUFFER, from, to, ..NO_CHANGE })
}
