//! A validation layer: a wrapper that checks every submission before the backend gets it. A mistake
//! becomes an error that names the operation, not a fault of the device.
//!
//! # What is checked
//! - dispatch: the kernel is this device's; number, roles and alignment of bindings; size of
//!   parameters; grid, block and shared memory within the limits.
//! - every device range: not null, not symbolic, does not wrap, lies in one live buffer of this
//!   device's allocators (copies: or of a peer's), with that buffer's native object. Of a binding
//!   with a limit ([`KernelDesc::limits`]) nothing: only the device knows how far it has memory.
//! - copy: rows do not overlap, neither one another nor what is read.
//! - fill: a pattern of 1, 2 or 4 bytes that fits, aligned.
//! - upload, download: the host address is not null.
//! - wait: the value was submitted, unless it is a host timeline's; this device can wait for the
//!   timeline.
//! - timestamp, graph: this device's; a graph's memory is still live.
//! - host, foreign call: the device can do it.
//! - loop, branch: the device can do it, and only in a plan; its flag, and each operation of its
//!   body.
//! - plan: well-formed, and each operation as above.
//!
//! An error names the operation, the submission and the stream; nothing was submitted then. Two
//! conditions remain the caller's promise: memory stays live until the value completes, and the
//! declared accesses are those of the kernel.
//!
//! # Cost
//! A submission takes shared locks and allocates nothing. A table of hints finds a range. The first
//! use of an address costs a walk over the allocator's rows.
//!
//! This module must not know how a backend runs operations.

use crate::backend::{Backend, Device, Stream};
use crate::check::{self, Range};
use crate::graph::NodePatch;
use crate::id::{BackendKind, DeviceId};
use crate::info::{DeviceInfo, MemoryKind};
use crate::kernel::{KernelDesc, Pipeline};
use crate::op::{Op, TimestampQuery};
use crate::plan::Plan;
use crate::wrapper::{Layer, Lent, Open, Wrapper};
use leasehold_alloc::{Holding, SYMBOLIC};
use leasehold_core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use leasehold_core::sync::{Arc, Mutex, RwLock};
use leasehold_core::{Error, Lease, PoolStats, Result, Timeline, Timepoint};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Weak;

/// A backend whose submissions are checked.
///
/// ```
/// use leasehold_hal::{Backend, NullBackend, Validated};
/// let backend = Validated::new(NullBackend)?;
/// assert!(backend.devices()?.is_empty());
/// # Ok::<(), leasehold_core::Error>(())
/// ```
pub struct Validated<B>(Wrapper<B, Checks>);

impl<B: Backend> Validated<B> {
    /// Wraps a backend, which may be an `Arc<dyn Backend>`.
    ///
    /// # Errors
    /// `OutOfMemory` for the wrapper's pools.
    pub fn new(inner: B) -> Result<Self> {
        let timelines = (0..=u16::MAX).map(|_| AtomicU8::new(UNKNOWN)).collect();
        let registry = Arc::new(Registry { timelines, devices: RwLock::new(Vec::new()) });
        Ok(Self(Wrapper::new(inner, Checks { registry, known: Mutex::new(Vec::new()) })?))
    }

    /// The inner backend.
    pub fn inner(&self) -> &B {
        &self.0.inner
    }
}

impl<B: Backend> fmt::Debug for Validated<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Validated({})", self.0.inner.kind())
    }
}

// SAFETY: every method calls the inner backend's, or refuses.
unsafe impl<B: Backend> Backend for Validated<B> {
    fn kind(&self) -> BackendKind {
        self.0.kind()
    }
    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        self.0.devices()
    }
    fn open(&self, device: DeviceId) -> Result<Lease<dyn Device>> {
        self.0.open(device)
    }
    fn shutdown(&self) -> Result<()> {
        self.0.shutdown()
    }
    fn pools(&self, report: &mut dyn FnMut(&'static str, PoolStats)) {
        self.0.pools(report);
    }
}

/// A timeline that this wrapper did not lend: another backend's, or without an owner.
const UNKNOWN: u8 = 0;
/// A timeline of a stream that this wrapper lent.
const STREAM: u8 = 1;
/// A host timeline: waits may come before the signal of their value.
const HOST: u8 = 2;
/// A timeline of a destroyed stream. Waits for its values are still allowed; the timeline may have
/// another owner by now.
const FORMER: u8 = 3;

/// The state that the devices of one wrapper share.
pub(crate) struct Registry {
    timelines: Box<[AtomicU8]>,
    /// Weak, because each device holds the registry.
    devices: RwLock<Vec<Weak<Known>>>,
}

impl Registry {
    fn mark(&self, timeline: &Timeline, what: u8) {
        self.timelines[usize::from(timeline.id().get())].store(what, Ordering::Release);
    }

    /// The records of all devices but one.
    fn others(&self, id: DeviceId) -> Vec<Arc<Known>> {
        self.devices.read().iter().filter_map(Weak::upgrade).filter(|k| k.id != id).collect()
    }
}

/// The record of a device.
pub(crate) struct Known {
    id: DeviceId,
    registry: Arc<Registry>,
    /// Addresses of the pipelines and timestamps that this device lent.
    objects: RwLock<HashSet<usize>>,
    /// Graphs by their native word.
    graphs: RwLock<HashMap<u64, Arc<CheckedGraph>>>,
    /// The kinds of memory that were requested. Other kinds have no buffers, and a request would
    /// make their allocators.
    kinds: [AtomicBool; KINDS.len()],
    /// Rows of the block tables by a hash of the address.
    hints: Box<[[AtomicU32; HINTS]; KINDS.len()]>,
    /// The opened device, for ranges in a peer's memory. Weak, because this record must not keep a
    /// device open.
    open: Mutex<Weak<Open<Checks>>>,
}

const KINDS: [MemoryKind; 2] = [MemoryKind::Device, MemoryKind::Pinned];
const HINTS: usize = 256;

/// The record of a graph.
pub(crate) struct CheckedGraph {
    nodes: Box<[CheckedNode]>,
    /// The ranges of all nodes, one after the other; bindings change by updates.
    ranges: Mutex<Vec<Range>>,
}

struct CheckedNode {
    /// The pipeline of a dispatch.
    pipeline: Option<Lease<Pipeline>>,
    at: usize,
    len: usize,
}

/// The layer that checks.
pub(crate) struct Checks {
    registry: Arc<Registry>,
    /// Keeps the records, so that a device finds its record when it is opened again.
    known: Mutex<Vec<Arc<Known>>>,
}

impl Layer for Checks {
    type Device = Known;
    type Graph = Arc<CheckedGraph>;
    const POOLS: [&'static str; 3] = ["validated devices", "validated streams", "validated graphs"];

    fn opened(&self, inner: &Lease<dyn Device>) -> Arc<Known> {
        let id = inner.info().id;
        let mut all = self.known.lock();
        if let Some(known) = all.iter().find(|k| k.id == id) {
            return known.clone();
        }
        let known = Arc::new(Known {
            id,
            registry: self.registry.clone(),
            objects: RwLock::new(HashSet::new()),
            graphs: RwLock::new(HashMap::new()),
            kinds: std::array::from_fn(|_| AtomicBool::new(false)),
            hints: Box::new(std::array::from_fn(|_| {
                std::array::from_fn(|_| AtomicU32::new(u32::MAX))
            })),
            open: Mutex::new(Weak::new()),
        });
        self.registry.devices.write().push(Arc::downgrade(&known));
        all.push(known.clone());
        known
    }

    fn ready(open: &Arc<Open<Self>>) {
        *open.known.open.lock() = Arc::downgrade(open);
    }

    unsafe fn submit(open: &Open<Self>, inner: &dyn Stream, ops: &[Op<'_>]) -> Result<u64> {
        let timeline = inner.timeline();
        for (i, op) in ops.iter().enumerate() {
            if let Err(e) = check_op(open, Some(timeline), op) {
                return Err(located(
                    e,
                    op,
                    format_args!("operation {i} of submission {} of {timeline:?}", next(timeline)),
                ));
            }
        }
        // SAFETY: the caller keeps the contract of `Stream::submit`.
        unsafe { inner.submit(ops) }
    }

    fn check_wait(open: &Open<Self>, timeline: &'static Timeline, on: Timepoint) -> Result<()> {
        check_wait(open, Some(timeline), on)
            .map_err(|e| prefixed(e, format_args!("wait of {timeline:?}")))
    }

    fn check_kernel(open: &Open<Self>, desc: &KernelDesc<'_>) -> Result<()> {
        desc.validate()?;
        let limits = open.inner.limits();
        if desc.bindings.len() > limits.bindings as usize || desc.params > limits.params {
            return Err(Error::invalid(format!(
                "kernel {}: {} bindings and {} bytes of parameters; the limits of {} are {} and {}",
                desc.name,
                desc.bindings.len(),
                desc.params,
                open.known.id,
                limits.bindings,
                limits.params
            )));
        }
        Ok(())
    }

    fn check_elapsed(
        open: &Open<Self>,
        start: &TimestampQuery,
        end: &TimestampQuery,
    ) -> Result<()> {
        for timestamp in [start, end] {
            owned(open, timestamp, "timestamp")?;
        }
        Ok(())
    }

    fn check_plan(open: &Open<Self>, plan: &Plan) -> Result<Arc<CheckedGraph>> {
        if plan.pred_at.len() != plan.len() + 1
            || plan.pred_at.first() != Some(&0)
            || plan.pred_at.last().is_some_and(|&end| end as usize != plan.pred.len())
            || plan.pred_at.is_sorted_by(|a, b| a <= b).eq(&false)
        {
            return Err(Error::invalid(
                "the plan's table of predecessors does not fit its operations",
            ));
        }
        let mut ranges = Vec::new();
        let mut nodes = Vec::with_capacity(plan.len());
        for (i, op) in plan.ops.iter().enumerate() {
            if plan.predecessors(i).iter().any(|&p| p as usize >= i) {
                return Err(Error::invalid(format!(
                    "node {i} of the plan waits for itself or a later node"
                )));
            }
            check_op(open, None, &op)
                .map_err(|e| located(e, &op, format_args!("node {i} of a plan")))?;
            let at = ranges.len();
            for_each_range(&op, |range| ranges.push(range));
            let pipeline = if let Op::Dispatch(d) = op { Some(d.pipeline.clone()) } else { None };
            nodes.push(CheckedNode { pipeline, at, len: ranges.len() - at });
        }
        Ok(Arc::new(CheckedGraph { nodes: nodes.into(), ranges: Mutex::new(ranges) }))
    }

    fn check_update(
        open: &Open<Self>,
        graph: &Arc<CheckedGraph>,
        patches: &[NodePatch<'_>],
    ) -> Result<()> {
        for patch in patches {
            check_patch(open, graph, patch).map_err(|e| {
                prefixed(e, format_args!("update of node {} of a graph", patch.node))
            })?;
        }
        Ok(())
    }

    fn graph_made(open: &Open<Self>, native: u64, graph: &Arc<CheckedGraph>) {
        open.known.graphs.write().insert(native, graph.clone());
    }

    fn graph_ended(open: &Open<Self>, native: u64) {
        // The graph's leases are dropped after the lock is released.
        let ended = open.known.graphs.write().remove(&native);
        drop(ended);
    }

    fn updated(graph: &Arc<CheckedGraph>, patches: &[NodePatch<'_>]) {
        let mut ranges = graph.ranges.lock();
        for patch in patches {
            if let (Some(bindings), Some(node)) =
                (patch.bindings, graph.nodes.get(patch.node as usize))
                && let Some(pipeline) = &node.pipeline
            {
                let now = check::ranges(pipeline, bindings);
                ranges[node.at..node.at + node.len].iter_mut().zip(now).for_each(|(r, b)| *r = b);
            }
        }
    }

    fn lent(open: &Open<Self>, what: Lent<'_>) {
        let known = &open.known;
        match what {
            Lent::Memory(kind) => {
                if let Some(i) = KINDS.iter().position(|&k| k == kind) {
                    known.kinds[i].store(true, Ordering::Release);
                }
            }
            Lent::Stream(timeline) => known.registry.mark(timeline, STREAM),
            Lent::HostTimeline(timeline) => known.registry.mark(timeline, HOST),
            Lent::Pipeline(lease) => known.own(address(&**lease)),
            Lent::TimestampQuery(lease) => known.own(address(&**lease)),
        }
    }

    fn stream_ended(open: &Open<Self>, timeline: &'static Timeline) {
        open.known.registry.mark(timeline, FORMER);
    }
}

impl Known {
    /// Records that an object belongs to this device, and no longer to the device that had the slot
    /// before.
    fn own(&self, address: usize) {
        if self.objects.read().contains(&address) {
            return;
        }
        for other in self.registry.others(self.id) {
            other.objects.write().remove(&address);
        }
        self.objects.write().insert(address);
    }

    /// The live buffer of `device` that contains a range. This record is `device`'s.
    fn find(&self, device: &dyn Device, addr: u64, len: u64) -> Option<Holding> {
        KINDS.iter().enumerate().find_map(|(i, &kind)| {
            if !self.kinds[i].load(Ordering::Acquire) {
                return None;
            }
            let hint = &self.hints[i][(addr >> 8) as usize % HINTS];
            let found =
                device.memory(kind).ok()?.holding(addr, len, hint.load(Ordering::Relaxed))?;
            hint.store(found.row, Ordering::Relaxed);
            Some(found)
        })
    }
}

fn address<T>(object: &T) -> usize {
    std::ptr::from_ref(object).addr()
}

fn owned<T>(open: &Open<Checks>, object: &T, what: &str) -> Result<()> {
    if open.known.objects.read().contains(&address(object)) {
        return Ok(());
    }
    Err(Error::invalid(format!("the {what} was not made by {}", open.known.id)))
}

/// The value that the next submission would take.
fn next(timeline: &Timeline) -> u64 {
    timeline.submitted() + 1
}

#[cold]
fn located(e: Error, op: &Op<'_>, place: fmt::Arguments<'_>) -> Error {
    prefixed(e, format_args!("{} ({place})", op.name()))
}

/// Adds the place to the message, and keeps the error's kind.
#[cold]
fn prefixed(e: Error, place: fmt::Arguments<'_>) -> Error {
    match e {
        Error::InvalidArgument(what) => Error::InvalidArgument(format!("{place}: {what}").into()),
        Error::Unsupported(what) => Error::Unsupported(format!("{place}: {what}").into()),
        other => other,
    }
}

/// Checks one operation of a submission to `timeline`, or of a plan.
fn check_op(open: &Open<Checks>, timeline: Option<&'static Timeline>, op: &Op<'_>) -> Result<()> {
    let limits = open.inner.limits();
    match op {
        Op::Wait(on) => check_wait(open, timeline, *on)?,
        Op::Dispatch(d) => {
            owned(open, &**d.pipeline, "kernel")?;
            check::bindings(limits, d.pipeline, d.bindings)?;
            check::params(d.pipeline, d.params)?;
            check::shape(limits, d.pipeline, d.grid, d.block, d.shared)?;
        }
        Op::Copy(c) => check::copy(c)?,
        Op::Fill(f) => check::fill(f)?,
        Op::Upload(u) if u.bytes > 0 && u.src.is_null() => {
            return Err(Error::invalid("the host address is null"));
        }
        Op::Download(d) if d.bytes > 0 && d.dst.is_null() => {
            return Err(Error::invalid("the host address is null"));
        }
        Op::Copies(_) | Op::Upload(_) | Op::Download(_) => {}
        Op::WriteTimestamp(timestamp) => {
            can(open.inner.caps().timestamps, "timestamps")?;
            owned(open, &***timestamp, "timestamp")?;
        }
        Op::Foreign(_) => can(open.inner.caps().foreign_calls, "library calls on its stream")?,
        Op::Host(_) => can(open.inner.caps().host_calls, "host calls")?,
        Op::Graph(graph) => {
            can(open.inner.caps().graphs, "graphs")?;
            check_launch(open, graph.native())?;
        }
        Op::Conditional(c) => {
            can(open.inner.caps().conditionals, "loops and branches in graphs")?;
            if let Some(timeline) = timeline {
                op.check(timeline, limits.shared)?;
            }
            c.check()?;
            for (i, inner) in c.body().ops.iter().enumerate() {
                check_op(open, None, &inner)
                    .map_err(|e| located(e, &inner, format_args!("node {i} of the body")))?;
            }
        }
    }
    let mut result = Ok(());
    for_each_range(op, |range| {
        if result.is_ok() {
            result = check_range(open, range);
        }
    });
    result
}

fn can(able: bool, what: &str) -> Result<()> {
    if able { Ok(()) } else { Err(Error::Unsupported(format!("this device has no {what}").into())) }
}

fn check_wait(
    open: &Open<Checks>,
    timeline: Option<&'static Timeline>,
    on: Timepoint,
) -> Result<()> {
    let source = on.timeline();
    let submitted = on.value() <= source.submitted();
    if timeline.is_some_and(|l| l.id() == on.timeline_id()) {
        return if submitted { Ok(()) } else { Err(check::waits_for_itself(on)) };
    }
    let any = open.inner.caps().waits_for_any_timeline;
    match open.known.registry.timelines[usize::from(on.timeline_id().get())].load(Ordering::Acquire)
    {
        HOST => Ok(()),
        STREAM | FORMER if submitted => Ok(()),
        STREAM => Err(Error::invalid(format!(
            "{on:?} was never submitted (the last is {}); only a host timeline can be waited for before its signal",
            source.submitted()
        ))),
        _ if any || on.is_settled() => Ok(()),
        _ => Err(Error::Unsupported(
            format!("{on:?} is not a timeline of a stream or host timeline of this backend").into(),
        )),
    }
}

fn check_launch(open: &Open<Checks>, native: u64) -> Result<()> {
    let graphs = open.known.graphs.read();
    let Some(graph) = graphs.get(&native) else {
        return Err(Error::invalid(format!("the graph was not instantiated on {}", open.known.id)));
    };
    let ranges = graph.ranges.lock();
    for (i, node) in graph.nodes.iter().enumerate() {
        for range in &ranges[node.at..node.at + node.len] {
            check_range(open, *range).map_err(|e| prefixed(e, format_args!("node {i}")))?;
        }
    }
    Ok(())
}

fn check_patch(open: &Open<Checks>, graph: &CheckedGraph, patch: &NodePatch<'_>) -> Result<()> {
    let Some(pipeline) = graph.nodes.get(patch.node as usize).and_then(|n| n.pipeline.as_ref())
    else {
        return Err(Error::invalid("no such node, or no dispatch"));
    };
    let limits = open.inner.limits();
    if let Some(bindings) = patch.bindings {
        check::bindings(limits, pipeline, bindings)?;
        check::ranges(pipeline, bindings).try_for_each(|range| check_range(open, range))?;
    }
    if let Some(params) = patch.params {
        check::params(pipeline, params)?;
    }
    patch.grid.map_or(Ok(()), |grid| check::grid_fits(limits, grid))
}

/// Calls `f` with each device range of an operation; for a dispatch, in the order of its bindings.
fn for_each_range(op: &Op<'_>, mut f: impl FnMut(Range)) {
    match op {
        Op::Dispatch(d) => check::ranges(d.pipeline, d.bindings).for_each(f),
        Op::Foreign(call) => call.accesses.iter().for_each(|b| f(b.into())),
        Op::Copy(c) => {
            f(Range { addr: c.src, len: c.extent(c.src_pitch), native: c.src_native, peer: true });
            f(Range { addr: c.dst, len: c.extent(c.dst_pitch), native: c.dst_native, peer: true });
        }
        Op::Copies(copies) => {
            for c in copies.pieces() {
                f(Range { addr: c.src, len: c.bytes, native: c.src_native, peer: true });
                f(Range { addr: c.dst, len: c.bytes, native: c.dst_native, peer: true });
            }
        }
        Op::Fill(x) => f(Range { addr: x.dst, len: x.bytes, native: x.native, peer: false }),
        Op::Upload(u) => f(Range { addr: u.dst, len: u.bytes, native: u.native, peer: false }),
        Op::Download(d) => f(Range { addr: d.src, len: d.bytes, native: d.native, peer: false }),
        Op::Conditional(c) => {
            f(c.flag().into());
            let f: &mut dyn FnMut(Range) = &mut f;
            c.body().ops.iter().for_each(|op| for_each_range(&op, &mut *f));
        }
        Op::Wait(_) | Op::WriteTimestamp(_) | Op::Host(_) | Op::Graph(_) => {}
    }
}

fn check_range(open: &Open<Checks>, range: Range) -> Result<()> {
    let Range { addr, len, native, peer } = range;
    if len == 0 {
        return Ok(());
    }
    if addr == 0 {
        return Err(Error::invalid(format!("{len} bytes at a null address")));
    }
    if addr & SYMBOLIC != 0 {
        return Err(Error::invalid(format!(
            "{addr:#x} is a name in a recording; it has no memory before the recording stops"
        )));
    }
    let look = |bytes: u64| {
        open.known.find(&*open.inner, addr, bytes).or_else(|| in_peer(open, peer, addr, bytes))
    };
    match look(len) {
        Some(found) if found.native == native => Ok(()),
        Some(found) => Err(Error::invalid(format!(
            "{addr:#x} lies in native object {:#x}, not in {native:#x}",
            found.native
        ))),
        None => Err(match look(1) {
            Some(b) => Error::invalid(format!(
                "{len} bytes at {addr:#x} go beyond their buffer, which is {} bytes at {:#x}",
                b.len, b.addr
            )),
            None => Error::invalid(format!(
                "{len} bytes at {addr:#x} lie in no live buffer of {}; was the buffer dropped?",
                open.known.id
            )),
        }),
    }
}

#[cold]
fn in_peer(open: &Open<Checks>, peer: bool, addr: u64, len: u64) -> Option<Holding> {
    if !peer {
        return None;
    }
    open.known.registry.others(open.known.id).into_iter().find_map(|known| {
        let other = known.open.lock().upgrade()?;
        known.find(&*other.inner, addr, len)
    })
}
