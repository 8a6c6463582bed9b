//! The recorder: what a thread's calls on a device go to while it records.
//!
//! A recording belongs to its thread and device. It has a seat of its own, so the real stream is never touched; it leaves no points on
//! buffers: each launch of the graph waits for and marks the outside buffers. Buffers allocated while recording are symbolic: they get
//! their addresses when it stops.
//!
//! A recording that is dropped (its thread ends, its closure panics) takes its arena with it: nothing is left.

use crate::event::Event;
use crate::graph::exec::{Graph, Outside};
use crate::graph::{Encoder, GraphOperator};
use crate::runtime::{Runtime, RuntimeInner};
use crate::stream::{Seat, Turn};
use crate::view::Operand;
use leasehold_alloc::{Buffer, GraphArena, Layout, Lifetime, On};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Lease, Point, Result};
use leasehold_hal::{Op, OpList};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

/// A recording in progress.
pub(crate) struct Recording {
    pub(crate) runtime: Arc<RuntimeInner>,
    pub(crate) ops: OpList,
    pub(crate) arena: GraphArena,
    /// First and last use of each symbolic buffer, by its symbol.
    pub(crate) uses: HashMap<u64, (u32, u32)>,
    /// Buffers that were there before, by handle.
    pub(crate) outside: HashMap<u64, Outside>,
    pub(crate) events: Vec<Lease<Event>>,
    pub(crate) waits: Vec<Lease<Event>>,
    pub(crate) points: Vec<Point>,
    /// Everything that the operator being encoded touched, to be compared with what it declared.
    touched: Option<Vec<(u64, bool)>>,
}

thread_local! {
    /// How many recordings this thread has: the glance that every eager call makes.
    static ACTIVE: Cell<u32> = const { Cell::new(0) };
    static RECORDINGS: RefCell<Vec<Recording>> = const { RefCell::new(Vec::new()) };
    static SEAT: OwnSeat = const { OwnSeat(Cell::new(None)) };
}

/// Seats outlive their threads: a session may have been forgotten on one. They go back to a pool.
struct OwnSeat(Cell<Option<&'static Seat>>);

static SEATS: Mutex<Vec<&'static Seat>> = Mutex::new(Vec::new());

impl Drop for OwnSeat {
    fn drop(&mut self) {
        if let Some(seat) = self.0.take()
            && !seat.is_taken()
        {
            SEATS.lock().push(seat);
        }
    }
}

fn seat() -> &'static Seat {
    SEAT.with(|own| {
        let seat = own.0.get().unwrap_or_else(|| {
            let pooled = SEATS.lock().pop();
            pooled.unwrap_or_else(|| Box::leak(Box::new(Seat::new())))
        });
        own.0.set(Some(seat));
        seat
    })
}

/// Whether this thread records on any device.
#[inline]
pub(crate) fn is_active() -> bool {
    ACTIVE.try_with(Cell::get).unwrap_or(0) != 0
}

/// Runs `f` on this thread's recording of the runtime, if there is one.
fn with<T>(runtime: &Arc<RuntimeInner>, f: impl FnOnce(&mut Recording) -> T) -> Option<T> {
    if !is_active() {
        return None;
    }
    RECORDINGS.with(|r| r.borrow_mut().iter_mut().find(|r| Arc::ptr_eq(&r.runtime, runtime)).map(f))
}

pub(crate) fn is_recording(runtime: &Arc<RuntimeInner>) -> bool {
    with(runtime, |_| ()).is_some()
}

/// Refuses a call that has no meaning while recording.
#[inline]
pub(crate) fn refuse(runtime: &Arc<RuntimeInner>, rule: &'static str) -> Result<()> {
    if is_active() && is_recording(runtime) { Err(Error::recording(rule)) } else { Ok(()) }
}

/// The turn of this thread's recordings.
pub(crate) fn session_turn() -> Result<Turn<'static>> {
    seat().session_turn()
}

pub(crate) fn start(runtime: &Runtime) -> Result<()> {
    let inner = &runtime.inner;
    if !inner.device.caps().graphs {
        return Err(Error::Unsupported(format!("{} has no graphs", inner.id()).into()));
    }
    if is_recording(inner) {
        return Err(Error::recording(
            "this thread records on this device already; stop or abandon that recording first",
        ));
    }
    if seat().is_taken() && !is_active() {
        // A session was forgotten on it: this thread takes another.
        SEAT.with(|own| own.0.set(None));
    }
    let recording = Recording {
        runtime: inner.clone(),
        ops: OpList::new(),
        arena: inner.memory.arena()?,
        uses: HashMap::new(),
        outside: HashMap::new(),
        events: Vec::new(),
        waits: Vec::new(),
        points: Vec::new(),
        touched: None,
    };
    RECORDINGS.with(|r| r.borrow_mut().push(recording));
    ACTIVE.with(|a| a.set(a.get() + 1));
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
    ACTIVE.with(|a| a.set(a.get() - 1));
    Some(taken)
}

pub(crate) fn abandon(runtime: &Arc<RuntimeInner>) {
    drop(take(runtime));
}

pub(crate) fn stop(runtime: &Runtime) -> Result<Graph> {
    if is_recording(&runtime.inner) && seat().is_taken() {
        return Err(Error::Occupied { resource: "recording (a session is open on it)" });
    }
    let Some(mut recording) = take(&runtime.inner) else {
        return Err(Error::recording("this thread does not record on this device"));
    };
    let lifetimes: Vec<Lifetime> = recording
        .uses
        .iter()
        .map(|(&symbol, &(first, last))| Lifetime { symbol, first, last, live_at_end: false })
        .collect();
    let core = &runtime.inner.default;
    let bindings = recording.arena.seal(&lifetimes, On { line: core.line, timeline: core.raw_timeline() })?;
    recording.ops.rebind(|addr| {
        (addr & leasehold_alloc::SYMBOLIC != 0)
            .then(|| bindings.resolve(addr).map(|real| (real, bindings.native)))
            .flatten()
    });
    Graph::build(runtime, recording)
}

pub(crate) fn alloc(runtime: &Arc<RuntimeInner>, layout: Layout) -> Option<Result<Lease<Buffer>>> {
    with(runtime, |r| r.arena.alloc(layout))
}

impl Recording {
    fn note(&mut self, operand: &Operand<'_>, node: u32) {
        let lease = operand.slice.lease;
        let writes = operand.access.writes();
        if let Some(touched) = &mut self.touched {
            touched.push((lease.handle().to_bits().get(), writes));
        }
        if lease.is_symbolic() {
            let uses = self.uses.entry(lease.addr()).or_insert((node, node));
            uses.1 = node;
        } else if !lease.is_empty() {
            self.outside
                .entry(lease.handle().to_bits().get())
                .and_modify(|o| o.writes |= writes)
                .or_insert_with(|| Outside { lease: lease.clone(), writes });
        }
    }
}

/// Records one operation when this thread records on the runtime.
///
/// # Safety
/// - As the submission that is recorded, for every launch of the graph.
pub(crate) unsafe fn record(runtime: &Arc<RuntimeInner>, op: &Op<'_>, operands: &[Operand<'_>]) -> Option<Result<()>> {
    with(runtime, |r| {
        let node = r.ops.push(op) as u32;
        operands.iter().for_each(|o| r.note(o, node));
        Ok(())
    })
}

/// Records the launches of a session. All of them are taken to use all of the session's operands for the sake of liveness; the
/// dependencies come from each launch's own bindings.
pub(crate) fn record_many(runtime: &Arc<RuntimeInner>, ops: &[Op<'_>], operands: &[Operand<'_>]) -> Result<()> {
    with(runtime, |r| {
        let first = r.ops.len() as u32;
        for op in ops {
            r.ops.push(op);
        }
        let last = (r.ops.len() as u32).saturating_sub(1);
        for operand in operands {
            r.note(operand, first);
            r.note(operand, last);
        }
    })
    .ok_or_else(|| Error::recording("the recording ended while a session was open on it"))
}

/// The number of nodes recorded so far.
pub(crate) fn nodes(runtime: &Arc<RuntimeInner>) -> Option<u32> {
    with(runtime, |r| r.ops.len() as u32)
}

/// Notes that each launch of the graph records the event at its end. `None` when this thread does not record.
pub(crate) fn signal(runtime: &Arc<RuntimeInner>, event: &Lease<Event>) -> Option<Result<()>> {
    with(runtime, |r| {
        if let Some(time) = &event.time {
            r.ops.push(&Op::Stamp(time));
        }
        if r.events.iter().all(|e| !e.same(event)) {
            r.events.push(event.clone());
        }
        Ok(())
    })
}

/// Notes that each launch of the graph waits for the event's last record before it.
pub(crate) fn wait_event(runtime: &Arc<RuntimeInner>, event: &Lease<Event>) -> Option<Result<()>> {
    with(runtime, |r| {
        // An event of this very recording: the list is in order already.
        if r.events.iter().any(|e| e.same(event)) {
            return Ok(());
        }
        event.point()?;
        r.waits.push(event.clone());
        Ok(())
    })
}

/// Notes that each launch of the graph comes after a point.
pub(crate) fn wait_point(runtime: &Arc<RuntimeInner>, point: Point) -> Option<Result<()>> {
    with(runtime, |r| {
        r.points.push(point);
        Ok(())
    })
}

/// Encodes an operator; in a recording its work is rolled back when it fails, and checked against what it declared.
pub(crate) fn add_operator(runtime: &Runtime, operator: &dyn GraphOperator) -> Result<()> {
    let inner = &runtime.inner;
    let mut encoder = Encoder::new(runtime, runtime.stream());
    let Some(before) = with(inner, |r| {
        r.touched = Some(Vec::new());
        (r.ops.len(), r.uses.clone(), r.outside.keys().copied().collect::<Vec<_>>())
    }) else {
        return operator.encode(&mut encoder);
    };
    let mut result = operator.encode(&mut encoder);
    let (len, uses, outside) = before;
    let undo = with(inner, |r| {
        let touched = r.touched.take().unwrap_or_default();
        if result.is_ok() {
            let declared: Vec<_> = operator
                .accesses()
                .iter()
                .map(|o| (o.slice.lease.handle().to_bits().get(), o.access.writes()))
                .collect();
            // What it allocated itself is its own affair.
            let own = |h: u64| !outside.contains(&h) && !r.outside.contains_key(&h);
            if let Some((h, writes)) =
                touched.into_iter().find(|&(h, w)| !own(h) && !declared.iter().any(|&(d, dw)| d == h && (dw || !w)))
            {
                result = Err(Error::invalid(format!(
                    "operator {} {} a buffer (handle {h:#x}) that it does not declare",
                    operator.name(),
                    if writes { "writes" } else { "reads" }
                )));
            }
        }
        if result.is_err() {
            r.ops.truncate(len);
            r.uses = uses;
            let known = outside;
            let dropped: Vec<Outside> = r.outside.extract_if(|h, _| !known.contains(h)).map(|(_, o)| o).collect();
            return dropped;
        }
        Vec::new()
    });
    // Outside the recording's borrow: dropping a lease may run anything.
    drop(undo);
    result
}
