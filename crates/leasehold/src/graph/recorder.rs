//! The recorder: what a thread's calls on a device go to while it records.
//!
//! A recording belongs to its thread and device. It has a submission lock of its own, so the real
//! stream is never touched; it leaves no points on buffers: each launch of the graph waits for and
//! marks the outside buffers. Buffers allocated while recording are symbolic: they get their
//! addresses when it stops.
//!
//! A recording that is dropped (its thread ends, its closure panics) takes its arena with it:
//! nothing is left. An operator that fails, or panics, in the middle is undone by a journal
//! ([`Encoding`]).
//!
//! The thread's recordings lie in a cell that is borrowed for moments only: nothing that is called
//! or dropped meanwhile is the user's.

use crate::event::Event;
use crate::graph::GraphOperator;
use crate::graph::exec::{Graph, Held, NodeId, Outside};
use crate::kernel::rules::Rules;
use crate::runtime::{Runtime, RuntimeInner};
use crate::stream::{SubmitGuard, SubmitLock};
use crate::view::Operand;
use leasehold_alloc::{Buffer, GraphArena, Layout, Lifetime, On};
use leasehold_core::defects::{Defect, planted};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{BufferHandle, Error, Lease, Result, Timepoint};
use leasehold_hal::{Op, OpList, TimestampQuery};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

/// A recording in progress.
pub(crate) struct Recording {
    /// Tells it from every other; never 0.
    id: u64,
    pub(crate) runtime: Arc<RuntimeInner>,
    pub(crate) ops: OpList,
    /// The rules of the launches among the operations, by node.
    pub(crate) rules: Vec<(u32, Arc<Rules>)>,
    pub(crate) arena: GraphArena,
    submit_lock: OwnSubmitLock,
    /// The buffers allocated in it, by symbol.
    members: HashMap<u64, Member>,
    /// Buffers that were there before, by handle.
    pub(crate) outside: HashMap<BufferHandle, Outside>,
    pub(crate) events: Vec<Signal>,
    pub(crate) waits: Vec<Lease<Event>>,
    pub(crate) points: Vec<Timepoint>,
    /// The operators that are being encoded, the innermost last.
    encodings: Vec<Encoding>,
}

/// A record of an event, at each launch.
#[derive(Clone)]
pub(crate) struct Signal {
    pub(crate) event: Lease<Event>,
    /// The query that the launch writes for the event; `None` without timing.
    pub(crate) time: Option<Lease<TimestampQuery>>,
}

/// A buffer of the recording.
struct Member {
    handle: BufferHandle,
    usage: Usage,
}

/// The first and the last operation that use a member, and whether any writes it.
#[derive(Clone, Copy, Default)]
struct Usage {
    span: Option<(u32, u32)>,
    writes: bool,
}

/// An operator that is being encoded: where the recording stood before, what it touched, and how to
/// undo it.
#[derive(Default)]
struct Encoding {
    ops: usize,
    events: usize,
    waits: usize,
    points: usize,
    /// The buffers that the operator touched, and whether it wrote them; to be compared with the
    /// accesses that it declares.
    touched: Vec<(BufferHandle, bool)>,
    /// The buffers that the operator allocated, which it need not declare.
    own: Vec<BufferHandle>,
    journal: Vec<Undo>,
}

enum Undo {
    Member(u64, Usage),
    /// The buffer was new, or whether it was written before.
    Outside(BufferHandle, Option<bool>),
}

/// A submission lock that outlives its recording: a session may have been forgotten on it, or still
/// be open. It goes back to a pool.
struct OwnSubmitLock(&'static SubmitLock);

static SUBMIT_LOCKS: Mutex<Vec<&'static SubmitLock>> = Mutex::new(Vec::new());

impl OwnSubmitLock {
    fn take() -> Self {
        let mut locks = SUBMIT_LOCKS.lock();
        match locks.iter().position(|s| !s.is_taken()) {
            Some(free) => Self(locks.swap_remove(free)),
            None => Self(Box::leak(Box::new(SubmitLock::new()))),
        }
    }
}

impl Drop for OwnSubmitLock {
    fn drop(&mut self) {
        SUBMIT_LOCKS.lock().push(self.0);
    }
}

thread_local! {
    /// How many recordings this thread has: the glance that every eager call makes.
    static ACTIVE: Cell<u32> = const { Cell::new(0) };
    static RECORDINGS: RefCell<Vec<Recording>> = const { RefCell::new(Vec::new()) };
}

/// Returns whether this thread records on any device.
#[inline]
pub(crate) fn is_active() -> bool {
    ACTIVE.get() != 0
}

/// Runs `f` on this thread's recording of the runtime, if there is one. There is none any more
/// while the thread's end drops them.
fn with<T>(runtime: &Arc<RuntimeInner>, f: impl FnOnce(&mut Recording) -> T) -> Option<T> {
    if !is_active() {
        return None;
    }
    RECORDINGS
        .try_with(|r| r.borrow_mut().iter_mut().find(|r| Arc::ptr_eq(&r.runtime, runtime)).map(f))
        .unwrap_or(None)
}

pub(crate) fn is_recording(runtime: &Arc<RuntimeInner>) -> bool {
    with(runtime, |_| ()).is_some()
}

/// Refuses a call that has no meaning while recording.
#[inline]
pub(crate) fn refuse(runtime: &Arc<RuntimeInner>, rule: &'static str) -> Result<()> {
    if is_active() && is_recording(runtime) { Err(Error::recording(rule)) } else { Ok(()) }
}

/// The turn of this thread's recording of the runtime, and the recording's number; `None` when it
/// does not record there.
#[inline]
pub(crate) fn session_guard(
    runtime: &Arc<RuntimeInner>,
) -> Result<Option<(SubmitGuard<'static>, u64)>> {
    if !is_active() {
        return Ok(None);
    }
    with(runtime, |r| (r.submit_lock.0, r.id))
        .map(|(submit_lock, id)| Ok((submit_lock.submit_guard()?, id)))
        .transpose()
}

pub(crate) fn start(runtime: &Runtime) -> Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let inner = &runtime.inner;
    if !inner.device.caps().graphs {
        return Err(Error::Unsupported(format!("{} has no graphs", inner.id()).into()));
    }
    if is_recording(inner) {
        return Err(Error::recording(
            "this thread records on this device already; stop or abandon that recording first",
        ));
    }
    let recording = Recording {
        id: NEXT.fetch_add(1, Ordering::Relaxed),
        runtime: inner.clone(),
        ops: OpList::new(),
        rules: Vec::new(),
        arena: inner.memory.arena()?,
        submit_lock: OwnSubmitLock::take(),
        members: HashMap::new(),
        outside: HashMap::new(),
        events: Vec::new(),
        waits: Vec::new(),
        points: Vec::new(),
        encodings: Vec::new(),
    };
    RECORDINGS
        .try_with(|r| r.borrow_mut().push(recording))
        .map_err(|_| Error::state("this thread is ending; it cannot record"))?;
    ACTIVE.set(ACTIVE.get() + 1);
    Ok(())
}

fn take(runtime: &Arc<RuntimeInner>) -> Option<Recording> {
    if !is_active() {
        return None;
    }
    let taken = RECORDINGS
        .try_with(|r| {
            let mut all = r.borrow_mut();
            let at = all.iter().position(|r| Arc::ptr_eq(&r.runtime, runtime))?;
            Some(all.swap_remove(at))
        })
        .ok()
        .flatten()?;
    ACTIVE.set(ACTIVE.get() - 1);
    Some(taken)
}

pub(crate) fn abandon(runtime: &Arc<RuntimeInner>) {
    drop(take(runtime));
}

pub(crate) fn stop(runtime: &Runtime) -> Result<Graph> {
    match with(&runtime.inner, |r| (r.submit_lock.0.is_taken(), !r.encodings.is_empty())) {
        Some((true, _)) => {
            return Err(Error::Occupied { resource: "recording (a session is open on it)" });
        }
        Some((_, true)) => {
            return Err(Error::recording(
                "an operator cannot stop the recording that it is encoded into",
            ));
        }
        _ => {}
    }
    let Some(mut recording) = take(&runtime.inner) else {
        return Err(Error::recording("this thread does not record on this device"));
    };
    // A holder of a buffer of the recording may use the buffer beside the graph. These leases keep
    // the buffer until it has its address.
    let memory = &runtime.inner.memory;
    let mut held = Vec::new();
    for m in recording.members.values() {
        match memory.lease(m.handle) {
            Ok(lease) => held.push((lease, m.usage.writes)),
            Err(Error::StaleHandle { .. }) => {}
            // A launch could not be ordered with what its holder does later.
            Err(_) => return Err(Error::Occupied { resource: "temporary of a recording" }),
        }
    }
    let lifetimes: Vec<Lifetime> = recording
        .members
        .iter()
        .filter_map(|(&symbol, m)| {
            m.usage.span.map(|(first, last)| Lifetime { symbol, first, last, live_at_end: false })
        })
        .collect();
    let core = &runtime.stream().core;
    let on = On { timeline: core.timeline, source: core.raw_source() };
    // SAFETY: the recorder noted every operation that uses a symbol; from the first to the last is
    // its lifetime.
    let bindings = unsafe { recording.arena.seal(&lifetimes, on) }?;
    // The arena's memory may have been another's, whose last use on the default stream goes on.
    let born = core.timeline.now();
    recording.ops.rebind(|addr| {
        (addr & leasehold_alloc::SYMBOLIC != 0)
            .then(|| bindings.resolve(addr).map(|real| (real, bindings.native)))
            .flatten()
    });
    let held = held.into_iter().map(|(lease, writes)| Held::new(&lease, writes)).collect();
    Graph::build(recording, held, born)
}

pub(crate) fn alloc(runtime: &Arc<RuntimeInner>, layout: Layout) -> Option<Result<Lease<Buffer>>> {
    with(runtime, |r| {
        // Here already: when the recording stops, nobody knows any more who asked for it.
        if let Some(e) = runtime.too_large(layout.size) {
            return Err(e);
        }
        let lease = r.arena.alloc(layout)?;
        let handle = lease.handle();
        r.members.insert(lease.addr(), Member { handle, usage: Usage::default() });
        if let Some(encoding) = r.encodings.last_mut() {
            encoding.own.push(handle);
        }
        Ok(lease)
    })
}

impl Recording {
    /// Refuses buffers of another recording, which have no address here.
    fn check(&self, operands: &[Operand<'_>]) -> Result<()> {
        let strange = |o: &Operand<'_>| {
            let lease = o.view.lease;
            lease.is_symbolic()
                && self.members.get(&lease.addr()).is_none_or(|m| m.handle != lease.handle())
        };
        if operands.iter().any(strange) {
            return Err(Error::recording(
                "a buffer that was allocated in another recording has no address in this one",
            ));
        }
        Ok(())
    }

    fn note(&mut self, operand: &Operand<'_>, node: u32) {
        let lease = operand.view.lease;
        if lease.is_empty() {
            return;
        }
        let (handle, writes) = (lease.handle(), operand.access.writes());
        let mut encoding = self.encodings.last_mut();
        if let Some(e) = &mut encoding {
            e.touched.push((handle, writes));
        }
        if lease.is_symbolic() {
            let symbol = lease.addr();
            let Some(member) = self.members.get_mut(&symbol) else { return };
            if let Some(e) = encoding {
                e.journal.push(Undo::Member(symbol, member.usage));
            }
            let first = member.usage.span.map_or(node, |s| s.0);
            member.usage =
                Usage { span: Some((first, node)), writes: member.usage.writes || writes };
            return;
        }
        match self.outside.get_mut(&handle) {
            Some(outside) => {
                if writes && !outside.writes {
                    if let Some(e) = encoding {
                        e.journal.push(Undo::Outside(handle, Some(false)));
                    }
                    outside.writes = !planted(Defect::WriteUnrecorded);
                }
            }
            None => {
                if let Some(e) = encoding {
                    e.journal.push(Undo::Outside(handle, None));
                }
                // A buffer that is written as a whole before it is read needs no former contents.
                let reads = operand.access.reads() || operand.is_part();
                self.outside.insert(handle, Outside { lease: lease.clone(), reads, writes });
            }
        }
    }
}

/// Records one operation when this thread records on the runtime.
///
/// # Safety
/// - As the submission that is recorded, for every launch of the graph.
pub(crate) unsafe fn record(
    runtime: &Arc<RuntimeInner>,
    op: &Op<'_>,
    operands: &[Operand<'_>],
) -> Option<Result<()>> {
    with(runtime, |r| {
        r.check(operands)?;
        let node = r.ops.push(op) as u32;
        operands.iter().for_each(|o| r.note(o, node));
        Ok(())
    })
}

/// Returns whether the operands may be used in recording `id`.
pub(crate) fn check(runtime: &Arc<RuntimeInner>, id: u64, operands: &[Operand<'_>]) -> Result<()> {
    with(runtime, |r| if r.id == id { r.check(operands) } else { Err(over()) })
        .unwrap_or_else(|| Err(over()))
}

#[cold]
fn over() -> Error {
    Error::recording("the recording ended while a session was open on it")
}

/// Records the launches of a session that was begun in recording `id`. All of them are taken to use
/// all of the session's operands for the sake of liveness; the dependencies come from each launch's
/// own bindings.
pub(crate) fn record_many(
    runtime: &Arc<RuntimeInner>,
    id: u64,
    ops: &[Op<'_>],
    rules: impl Iterator<Item = Arc<Rules>>,
    operands: &[Operand<'_>],
) -> Result<()> {
    with(runtime, |r| {
        if r.id != id {
            return Err(over());
        }
        let first = r.ops.len() as u32;
        for (op, rules) in std::iter::zip(ops, rules) {
            let node = r.ops.push(op) as u32;
            r.rules.push((node, rules));
        }
        let last = (r.ops.len() as u32).saturating_sub(1);
        for operand in operands {
            r.note(operand, first);
            r.note(operand, last);
        }
        Ok(())
    })
    .unwrap_or_else(|| Err(over()))
}

/// The number of nodes recorded so far.
pub(crate) fn nodes(runtime: &Arc<RuntimeInner>) -> Option<u32> {
    with(runtime, |r| r.ops.len() as u32)
}

/// Notes that each launch of the graph records the event at its end. `None` when this thread does
/// not record.
pub(crate) fn signal(runtime: &Arc<RuntimeInner>, event: &Lease<Event>) -> Option<Result<()>> {
    if !is_recording(runtime) {
        return None;
    }
    // Outside the borrow: it may call the driver.
    let time = match event.fresh_time(&*runtime.device) {
        Ok(time) => time,
        Err(e) => return Some(Err(e)),
    };
    with(runtime, |r| {
        if let Some(time) = &time {
            r.ops.push(&Op::WriteTimestamp(time));
        }
        r.events.push(Signal { event: event.clone(), time });
        Ok(())
    })
}

/// Notes that each launch of the graph waits for the event's last record before it.
pub(crate) fn wait_event(runtime: &Arc<RuntimeInner>, event: &Lease<Event>) -> Option<Result<()>> {
    with(runtime, |r| {
        // An event of this very recording: the list is in order already.
        if r.events.iter().any(|s| s.event.same(event)) {
            return Ok(());
        }
        r.waits.push(event.clone());
        Ok(())
    })
}

/// Notes that each launch of the graph comes after a timepoint.
pub(crate) fn wait_point(runtime: &Arc<RuntimeInner>, point: Timepoint) -> Option<Result<()>> {
    with(runtime, |r| {
        r.points.push(point);
        Ok(())
    })
}

/// Encodes an operator; in a recording its work is undone when it fails or panics, and checked
/// against what it declared.
pub(crate) fn add_operator(runtime: &Runtime, operator: &dyn GraphOperator) -> Result<()> {
    let Some(open) = OpenEncoding::begin(&runtime.inner) else {
        return operator.encode(runtime.stream());
    };
    operator.encode(runtime.stream())?;
    let declared: Vec<_> =
        operator.accesses().iter().map(|o| (o.view.lease.handle(), o.access.writes())).collect();
    open.keep(operator.name(), &declared)
}

/// An operator that is being encoded; undone unless it is kept.
struct OpenEncoding<'a> {
    runtime: &'a Arc<RuntimeInner>,
    recording: u64,
    /// How many operators it is encoded by.
    depth: usize,
}

impl<'a> OpenEncoding<'a> {
    fn begin(runtime: &'a Arc<RuntimeInner>) -> Option<Self> {
        with(runtime, |r| {
            let depth = r.encodings.len();
            r.encodings.push(Encoding {
                ops: r.ops.len(),
                events: r.events.len(),
                waits: r.waits.len(),
                points: r.points.len(),
                ..Encoding::default()
            });
            Self { runtime, recording: r.id, depth }
        })
    }

    /// Runs `f` on the recording if it is still the same.
    fn with<T>(&self, f: impl FnOnce(&mut Recording) -> T) -> Option<T> {
        with(self.runtime, |r| {
            (r.id == self.recording && r.encodings.len() > self.depth).then(|| f(r))
        })
        .flatten()
    }

    /// Keeps what was encoded, unless it touched more than was declared.
    fn keep(self, name: &str, declared: &[(BufferHandle, bool)]) -> Result<()> {
        let checked = self.with(|r| {
            let e = &r.encodings[self.depth];
            let allowed = |h: BufferHandle, w: bool| {
                e.own.contains(&h) || declared.iter().any(|&(d, dw)| d == h && (dw || !w))
            };
            if let Some(&(h, writes)) = e.touched.iter().find(|&&(h, w)| !allowed(h, w)) {
                return Err(Error::invalid(format!(
                    "operator {name} {} a buffer ({h:?}) that it does not declare",
                    if writes { "writes" } else { "reads" }
                )));
            }
            let done: Vec<_> = r.encodings.drain(self.depth..).collect();
            if let Some(outer) = r.encodings.last_mut() {
                for e in done {
                    outer.touched.extend(e.touched);
                    outer.own.extend(e.own);
                    outer.journal.extend(e.journal);
                }
            }
            Ok(())
        });
        checked.unwrap_or_else(|| {
            Err(Error::recording("the recording ended while an operator was being encoded"))
        })
    }
}

impl Drop for OpenEncoding<'_> {
    fn drop(&mut self) {
        let undone = self.with(|r| {
            let undo: Vec<_> = r.encodings.drain(self.depth..).collect();
            let mut leases = Vec::new();
            for change in undo.iter().rev().flat_map(|e| e.journal.iter().rev()) {
                match *change {
                    Undo::Member(symbol, usage) => {
                        if let Some(member) = r.members.get_mut(&symbol) {
                            member.usage = usage;
                        }
                    }
                    Undo::Outside(handle, None) => leases.extend(r.outside.remove(&handle)),
                    Undo::Outside(handle, Some(writes)) => {
                        if let Some(outside) = r.outside.get_mut(&handle) {
                            outside.writes = writes;
                        }
                    }
                }
            }
            let to = undo.first().map_or(r.ops.len(), |e| e.ops);
            let (events, waits) =
                undo.first().map_or((usize::MAX, usize::MAX), |e| (e.events, e.waits));
            r.points.truncate(undo.first().map_or(usize::MAX, |e| e.points));
            let events = r.events.split_off(events.min(r.events.len()));
            let waits = r.waits.split_off(waits.min(r.waits.len()));
            let rules =
                r.rules.split_off(r.rules.partition_point(|&(node, _)| (node as usize) < to));
            (std::mem::take(&mut r.ops), to, (leases, events, waits, rules))
        });
        // Outside the borrow: what is dropped may be anybody's closure.
        if let Some((mut ops, to, gone)) = undone {
            ops.truncate(to);
            drop(gone);
            let meanwhile = with(self.runtime, |r| std::mem::replace(&mut r.ops, ops));
            drop(meanwhile);
        }
    }
}

impl Runtime {
    /// The number of operations that the calling thread has recorded on the runtime's device so
    /// far. `None` when it does not record.
    #[must_use]
    pub fn recorded_nodes(&self) -> Option<u32> {
        nodes(&self.inner)
    }

    /// The id in [`Graph::update`](crate::Graph::update) of the next operation that the calling
    /// thread records. `None` when the thread does not record.
    #[must_use]
    pub fn next_node(&self) -> Option<NodeId> {
        self.recorded_nodes().map(NodeId::new)
    }
}
