//! Recordings: operations that are noted instead of run.
//!
//! A recording is a value. The runtime that [`record_graph`](crate::Runtime::record_graph) lends
//! has it, and so have that runtime's streams; what they are given is noted here. The stream that
//! the recording was begun on is never touched: the recording has a submission lock of its own. It
//! leaves no points on buffers: each launch of the graph waits for and marks the outside buffers.
//! Buffers allocated in it are symbolic: they get their addresses when it stops.
//!
//! One thread begins a recording, and no other uses it. Its state goes when it stops or is given
//! up, and takes the arena along: nothing is left. Values that still have the recording are told
//! so. An operator that fails, or panics, in the middle is undone by a journal ([`Encoding`]).
//!
//! The state is locked for moments only: nothing that is called or dropped meanwhile is the user's.
//!
//! This module must not know streams, runtimes or graphs.

use crate::event::Event;
use crate::graph::stop::{Note, Noted, StopCheck};
use crate::kernel::rules::Rules;
use crate::stream::{SubmitGuard, SubmitLock, Use, check_end, check_own, this_thread};
use crate::view::{Operand, View};
use leasehold_alloc::{Buffer, GraphArena, Layout};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{BufferHandle, Error, Lease, Name, Result, Timepoint};
use leasehold_hal::{Access, Conditional, ConditionalKind, Op, OpList, Partition, TimestampQuery};
use std::collections::HashMap;
use std::mem;

/// The most bodies of loops and branches in each other: what follows walks them from the outermost.
const DEEPEST: usize = 64;

/// A recording, which its runtime and streams share.
///
/// The functions that streams call are marked cold: eager work goes past them.
pub(crate) struct Recording {
    /// The thread that began it.
    thread: usize,
    submit_lock: SubmitLock,
    /// `None` once it is over. Recordings of bodies share it.
    state: Arc<Mutex<Option<State>>>,
    /// The body of a loop or branch that it records; `None` for all of a graph.
    body: Option<u64>,
}

/// The rules of a launch.
pub(crate) struct Ruled {
    /// The node that the launch is, or is in the body of.
    pub(crate) node: u32,
    /// The nodes of bodies that lead from there to the launch.
    within: Box<[u32]>,
    pub(crate) rules: Arc<Rules>,
}

impl Ruled {
    /// The launch, in the operations of the recording.
    pub(crate) fn op<'a>(&self, recorded: &'a OpList) -> Option<Op<'a>> {
        let mut op = recorded.get(self.node as usize)?;
        for &node in &self.within {
            let Op::Conditional(conditional) = op else { return None };
            op = conditional.body().ops.get(node as usize)?;
        }
        Some(op)
    }
}

/// The body of a loop or branch that is being recorded.
struct Body {
    id: u64,
    /// The operations around it. The body's end appends a node to them.
    outer: OpList,
}

/// The notes of a recording.
pub(crate) struct State {
    pub(crate) ops: OpList,
    /// The rules of the launches among the operations, and in bodies.
    pub(crate) rules: Vec<Ruled>,
    /// The partitions of the streams that operations were given to, by node.
    pub(crate) partitions: Vec<(u32, Lease<Partition>)>,
    pub(crate) arena: GraphArena,
    /// The buffers allocated in it, by symbol.
    pub(crate) members: HashMap<u64, Member>,
    /// Buffers that were there before, by handle.
    pub(crate) outside: HashMap<BufferHandle, Outside>,
    pub(crate) events: Vec<Signal>,
    pub(crate) waits: Vec<Lease<Event>>,
    pub(crate) points: Vec<Timepoint>,
    pub(crate) noted: Vec<Noted>,
    /// The operators and bodies that are being encoded, the innermost last.
    encodings: Vec<Encoding>,
    /// The bodies that are being recorded, the innermost last; `ops` is what that one has.
    bodies: Vec<Body>,
    /// The number of bodies that were begun.
    begun: u64,
}

/// A record of an event, at each launch.
#[derive(Clone)]
pub(crate) struct Signal {
    pub(crate) event: Lease<Event>,
    /// The query that the launch writes for the event; `None` without timing.
    pub(crate) time: Option<Lease<TimestampQuery>>,
}

/// A buffer of the recording.
pub(crate) struct Member {
    pub(crate) handle: BufferHandle,
    pub(crate) usage: Usage,
}

/// The first and the last operation that use a member, and whether any writes it.
#[derive(Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) span: Option<(u32, u32)>,
    pub(crate) writes: bool,
}

/// A buffer that was there before the recording.
pub(crate) struct Outside {
    pub(crate) lease: Lease<Buffer>,
    /// Something of what was there before a launch is read.
    pub(crate) reads: bool,
    pub(crate) writes: bool,
    /// The end of the bytes that must have memory at a launch.
    pub(crate) end: u64,
    /// The beginning of those that are written; `u64::MAX` for none.
    pub(crate) written: u64,
}

impl Outside {
    /// As [`check_end`](crate::stream::check_end) and [`check_own`](crate::stream::check_own).
    pub(crate) fn check_place(&self) -> Result<()> {
        check_end(self.end, &self.lease)?;
        check_own(self.written, &self.lease)
    }
}

impl Use for Outside {
    #[inline(always)]
    fn lease(&self) -> &Lease<Buffer> {
        &self.lease
    }

    #[inline(always)]
    fn operand(&self) -> Operand<'_> {
        let access = match (self.reads, self.writes) {
            (true, true) => Access::ReadWrite,
            (false, true) => Access::Write,
            (_, false) => Access::Read,
        };
        self.lease.view().with(access)
    }

    /// A launch of a graph with growing buffers compares [`Outside::end`] itself.
    #[inline(always)]
    fn end(&self) -> u64 {
        0
    }

    /// The same of [`Outside::written`].
    #[inline(always)]
    fn written(&self) -> u64 {
        u64::MAX
    }
}

/// An operator that is being encoded: where the recording stood before, what it touched, and how to
/// undo it.
#[derive(Default)]
struct Encoding {
    ops: usize,
    rules: usize,
    noted: usize,
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

#[cold]
fn over() -> Error {
    Error::recording(
        "the recording is over: it was stopped or given up; begin another one, or use the runtime that it was begun on",
    )
}

#[cold]
fn body_over() -> Error {
    Error::recording(
        "the body of the loop or branch is over; use the runtime that it was recorded on, or record another body",
    )
}

#[cold]
fn inside() -> Error {
    Error::recording(
        "the body of a loop or branch of this recording is being recorded; use the runtime that the body is lent until it is over",
    )
}

#[cold]
fn elsewhere() -> Error {
    Error::recording(
        "the recording belongs to the thread that began it, and this is another one; record on that thread",
    )
}

impl Recording {
    /// A recording of the calling thread's.
    pub(crate) fn begin(arena: GraphArena) -> Self {
        let state = State {
            ops: OpList::new(),
            rules: Vec::new(),
            partitions: Vec::new(),
            arena,
            members: HashMap::new(),
            outside: HashMap::new(),
            events: Vec::new(),
            waits: Vec::new(),
            points: Vec::new(),
            noted: Vec::new(),
            encodings: Vec::new(),
            bodies: Vec::new(),
            begun: 0,
        };
        Self {
            thread: this_thread(),
            submit_lock: SubmitLock::new(),
            state: Arc::new(Mutex::new(Some(state))),
            body: None,
        }
    }

    /// Runs `f` on what was recorded.
    ///
    /// # Errors
    /// `Recording` on another thread, once the recording is over, and while another body is
    /// recorded.
    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> Result<T> {
        if self.thread != this_thread() {
            return Err(elsewhere());
        }
        let mut state = self.state.lock();
        let state = state.as_mut().ok_or_else(over)?;
        if state.bodies.last().map(|body| body.id) != self.body {
            return Err(if state.has(self.body) { inside() } else { body_over() });
        }
        Ok(f(state))
    }

    /// As [`with`](Self::with), for what a body cannot have.
    fn with_all<T>(&self, what: &str, f: impl FnOnce(&mut State) -> T) -> Result<T> {
        if self.body.is_some() {
            return Err(Error::Unsupported(
                format!(
                    "{what} in the body of a loop or branch; record it outside the body, by the runtime of the recording"
                )
                .into(),
            ));
        }
        self.with(f)
    }

    /// Returns whether it records a body.
    pub(crate) fn is_body(&self) -> bool {
        self.body.is_some()
    }

    /// Returns whether it goes on.
    pub(crate) fn is_open(&self) -> bool {
        self.state.lock().as_ref().is_some_and(|s| s.has(self.body))
    }

    /// Takes the recording's submission lock.
    ///
    /// # Errors
    /// `Occupied` while a session is open in it; `Recording` as for every call.
    #[cold]
    #[inline(never)]
    pub(crate) fn submit_guard(&self) -> Result<SubmitGuard<'_>> {
        self.with(|_| ())?;
        self.submit_lock.submit_guard()
    }

    /// Ends the recording and gives what was recorded.
    ///
    /// # Errors
    /// `Occupied` while a session is open in it, and `Recording` while an operator is being
    /// encoded: it goes on then. `Recording` as for every call.
    pub(crate) fn finish(&self) -> Result<State> {
        if self.body.is_some() {
            return Err(Error::recording(
                "the body of a loop or branch cannot stop the recording around it; stop it once the body is over",
            ));
        }
        if self.with(|s| !s.encodings.is_empty())? {
            return Err(Error::recording(
                "an operator cannot stop the recording that it is encoded into; stop it after add_graph_operator has returned",
            ));
        }
        if self.submit_lock.is_taken() {
            return Err(Error::Occupied { resource: "recording (a session is open on it)" });
        }
        self.state.lock().take().ok_or_else(over)
    }

    /// Ends the recording; what was recorded goes. Does nothing on another thread than its own, nor
    /// in a body.
    pub(crate) fn give_up(&self) {
        if self.body.is_none() && self.thread == this_thread() {
            self.discard();
        }
    }

    /// As [`give_up`](Self::give_up), on any thread.
    pub(crate) fn discard(&self) {
        let state = self.state.lock().take();
        // Without the lock: what is dropped may be anybody's closure.
        drop(state);
    }

    /// A buffer that gets its address when the recording stops.
    #[cold]
    #[inline(never)]
    pub(crate) fn alloc(&self, layout: Layout) -> Result<Lease<Buffer>> {
        self.with(|s| {
            let lease = s.arena.alloc(layout)?;
            let handle = lease.handle();
            s.members.insert(lease.addr(), Member { handle, usage: Usage::default() });
            s.own(handle);
            Ok(lease)
        })?
    }

    /// Lets the operator that is being encoded use a buffer of an operation's own, undeclared.
    pub(crate) fn own(&self, buffer: &Lease<Buffer>) -> Result<()> {
        self.with(|s| s.own(buffer.handle()))
    }

    /// Refuses buffers of another recording, which have no address here.
    #[cold]
    #[inline(never)]
    pub(crate) fn check(&self, operands: &[Operand<'_>]) -> Result<()> {
        self.with(|s| s.check(operands))?
    }

    /// Notes one operation.
    ///
    /// # Safety
    /// - As the submission that is recorded, for every launch of the graph.
    #[cold]
    #[inline(never)]
    pub(crate) unsafe fn record(
        &self,
        op: &Op<'_>,
        operands: &[Operand<'_>],
        partition: Option<&Lease<Partition>>,
    ) -> Result<()> {
        self.with(|s| {
            s.check(operands)?;
            if self.body.is_some() {
                Conditional::admit(op)?;
            }
            let node = s.push(op, partition)?;
            operands.iter().for_each(|o| s.note(o, node));
            Ok(())
        })?
    }

    /// Notes the launches of a session. All of them are taken to use all of the session's operands
    /// for the sake of liveness; the dependencies come from each launch's own bindings.
    ///
    /// # Safety
    /// - As [`record`](Self::record).
    #[cold]
    #[inline(never)]
    pub(crate) unsafe fn record_many(
        &self,
        ops: &[Op<'_>],
        rules: impl Iterator<Item = Arc<Rules>>,
        operands: &[Operand<'_>],
        partition: Option<&Lease<Partition>>,
    ) -> Result<()> {
        self.with(|s| {
            let first = s.ops.len() as u32;
            for (op, rules) in std::iter::zip(ops, rules) {
                let node = s.push(op, partition)?;
                let ruled = s.ruled(node, rules);
                s.rules.push(ruled);
            }
            let last = (s.ops.len() as u32).saturating_sub(1);
            for operand in operands {
                s.note(operand, first);
                s.note(operand, last);
            }
            Ok(())
        })?
    }

    /// The number of nodes recorded so far; `None` once it is over, and in a body.
    pub(crate) fn nodes(&self) -> Option<u32> {
        self.with_all("a node", |s| s.ops.len() as u32).ok()
    }

    /// Notes that each launch of the graph records the event at its end, with this time.
    #[cold]
    #[inline(never)]
    pub(crate) fn signal(
        &self,
        event: &Lease<Event>,
        time: Option<Lease<TimestampQuery>>,
    ) -> Result<()> {
        self.with_all("the record of an event", |s| {
            if let Some(time) = &time {
                s.ops.push(&Op::WriteTimestamp(time));
            }
            s.events.push(Signal { event: event.clone(), time });
        })
    }

    /// Notes that each launch of the graph waits for the event's last record before it.
    #[cold]
    #[inline(never)]
    pub(crate) fn wait_event(&self, event: &Lease<Event>) -> Result<()> {
        self.with_all("a wait for an event", |s| {
            // An event of this very recording: the list is in order already.
            if !s.events.iter().any(|signal| signal.event.same(event)) {
                s.waits.push(event.clone());
            }
        })
    }

    /// Notes that each launch of the graph comes after a timepoint.
    #[cold]
    #[inline(never)]
    pub(crate) fn wait_point(&self, point: Timepoint) -> Result<()> {
        self.with_all("a wait", |s| s.points.push(point))
    }

    /// Leaves a note for a check of the recording.
    #[cold]
    #[inline(never)]
    pub(crate) fn note(&self, check: &Arc<dyn StopCheck>, note: Note) -> Result<()> {
        self.with_all("a call of a collective", |s| {
            s.noted.push(Noted { check: check.clone(), note });
        })
    }

    /// Begins to encode an operator: its work is undone unless it is kept.
    pub(crate) fn encode(&self) -> Result<OpenEncoding<'_>> {
        self.with(|s| {
            let depth = s.encodings.len();
            s.encodings.push(Encoding {
                ops: s.ops.len(),
                rules: s.rules.len(),
                noted: s.noted.len(),
                events: s.events.len(),
                waits: s.waits.len(),
                points: s.points.len(),
                ..Encoding::default()
            });
            OpenEncoding { recording: self, depth }
        })
    }

    /// Begins the body of a loop or branch with this flag. All of it is taken back unless it is
    /// closed.
    ///
    /// # Errors
    /// `Occupied` while a session is open; `Recording` for a flag of another recording, and as for
    /// every call.
    pub(crate) fn begin_body(&self, flag: &Operand<'_>) -> Result<OpenBody<'_>> {
        if self.submit_lock.is_taken() {
            return Err(Error::Occupied { resource: "recording (a session is open on it)" });
        }
        let encoding = self.encode()?;
        let id = self.with(|s| {
            s.check(&[*flag])?;
            if s.bodies.len() == DEEPEST {
                return Err(Error::Unsupported(
                    format!(
                        "a loop or branch in {DEEPEST} others; record fewer in each other, or let the host decide"
                    )
                    .into(),
                ));
            }
            s.begun += 1;
            let outer = mem::take(&mut s.ops);
            s.bodies.push(Body { id: s.begun, outer });
            Ok::<_, Error>(s.begun)
        })??;
        let recording = Arc::new(Self {
            thread: self.thread,
            submit_lock: SubmitLock::new(),
            state: self.state.clone(),
            body: Some(id),
        });
        Ok(OpenBody { id, recording, encoding })
    }
}

/// The body of a loop or branch that is being recorded; taken back unless it is closed.
pub(crate) struct OpenBody<'a> {
    id: u64,
    recording: Arc<Recording>,
    /// Dropped last: what it takes back is the body's outer recording again by then.
    encoding: OpenEncoding<'a>,
}

impl OpenBody<'_> {
    /// The recording of the body.
    pub(crate) fn recording(&self) -> &Arc<Recording> {
        &self.recording
    }

    /// Ends the body, and appends it as a node.
    ///
    /// # Errors
    /// `Occupied` while a session is open in it; as [`Conditional::new`]. Nothing of the body stays
    /// then.
    pub(crate) fn close(
        self,
        kind: ConditionalKind,
        name: Option<Name>,
        flag: &Operand<'_>,
    ) -> Result<()> {
        if self.recording.submit_lock.is_taken() {
            return Err(Error::Occupied { resource: "body (a session is open on it)" });
        }
        // Without the lock: what an error drops may be anybody's closure.
        let body = self.recording.with(|s| s.end_body(self.id))?;
        let conditional = Conditional::new(kind, name, flag.binding(), body.unwrap_or_default())?;
        self.encoding.recording.with(|s| {
            let node = s.ops.push(&Op::Conditional(&conditional)) as u32;
            s.note(flag, node);
            s.keep(self.encoding.depth);
        })
    }
}

impl Drop for OpenBody<'_> {
    fn drop(&mut self) {
        let undone = self.recording.state.lock().as_mut().map(|s| s.end_body(self.id));
        // Without the lock: what is dropped may be anybody's closure.
        drop(undone);
    }
}

impl State {
    /// Adds an operation of a stream on this partition.
    fn push(&mut self, op: &Op<'_>, partition: Option<&Lease<Partition>>) -> Result<u32> {
        if partition.is_some() && !self.bodies.is_empty() {
            return Err(Error::Unsupported(
                "a stream on a partition in the body of a loop or a branch; use one of the whole \
                 device there"
                    .into(),
            ));
        }
        let node = self.ops.push(op) as u32;
        self.partitions.extend(partition.map(|partition| (node, partition.clone())));
        Ok(node)
    }

    /// Returns whether the body is being recorded; without one, whether the recording goes on.
    fn has(&self, body: Option<u64>) -> bool {
        body.is_none_or(|id| self.bodies.iter().any(|body| body.id == id))
    }

    /// Ends a body, if it is being recorded, and the bodies in it. Returns its operations.
    fn end_body(&mut self, id: u64) -> Option<OpList> {
        let at = self.bodies.iter().position(|body| body.id == id)?;
        let outer = self.bodies.drain(at..).next()?.outer;
        Some(mem::replace(&mut self.ops, outer))
    }

    /// The place of a node in the whole recording: the outermost node, and the nodes that lead from
    /// there to it.
    fn place(&self, node: u32) -> (u32, impl Iterator<Item = u32>) {
        let mut path = self.bodies.iter().map(|body| body.outer.len() as u32).chain([node]);
        (path.next().unwrap_or(node), path)
    }

    fn ruled(&self, node: u32, rules: Arc<Rules>) -> Ruled {
        let (node, within) = self.place(node);
        Ruled { node, within: within.collect(), rules }
    }

    /// Keeps what was encoded from `depth` on.
    fn keep(&mut self, depth: usize) {
        let done: Vec<_> = self.encodings.drain(depth..).collect();
        if let Some(outer) = self.encodings.last_mut() {
            for e in done {
                outer.touched.extend(e.touched);
                outer.own.extend(e.own);
                outer.journal.extend(e.journal);
            }
        }
    }

    /// The operator that is being encoded need not declare the buffer.
    fn own(&mut self, handle: BufferHandle) {
        if let Some(encoding) = self.encodings.last_mut() {
            encoding.own.push(handle);
        }
    }

    fn check(&self, operands: &[Operand<'_>]) -> Result<()> {
        let strange = |o: &Operand<'_>| {
            let lease = o.view.lease;
            lease.is_symbolic()
                && self.members.get(&lease.addr()).is_none_or(|m| m.handle != lease.handle())
        };
        if operands.iter().any(strange) {
            return Err(Error::recording(
                "a buffer that was allocated in another recording has no address in this one; allocate it in this one, or before both",
            ));
        }
        Ok(())
    }

    fn note(&mut self, operand: &Operand<'_>, node: u32) {
        let lease = operand.view.lease;
        if lease.is_empty() && !lease.is_growing() {
            return;
        }
        let (handle, writes) = (lease.handle(), operand.access.writes());
        // A member of a body lives as long as the outermost node.
        let node = self.place(node).0;
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
                // An operator that is undone leaves its end: the graph then asks for more memory
                // than it needs.
                outside.end = outside.end.max(operand.end());
                outside.written = outside.written.min(operand.written());
                if writes && !outside.writes {
                    if let Some(e) = encoding {
                        e.journal.push(Undo::Outside(handle, Some(false)));
                    }
                    outside.writes = true;
                }
            }
            None => {
                if let Some(e) = encoding {
                    e.journal.push(Undo::Outside(handle, None));
                }
                // A buffer that is written as a whole before it is read needs no former contents.
                // (A body may not run.)
                let may_stay = operand.is_part() || !self.bodies.is_empty();
                let reads = operand.access.reads() || may_stay;
                let (end, written) = (operand.end(), operand.written());
                let outside = Outside { lease: lease.clone(), reads, writes, end, written };
                self.outside.insert(handle, outside);
            }
        }
    }
}

/// An operator that is being encoded; undone unless it is kept.
pub(crate) struct OpenEncoding<'a> {
    recording: &'a Recording,
    /// How many operators it is encoded by.
    depth: usize,
}

/// Takes what belongs to nodes from `to` on.
fn split_off<T>(by_node: &mut Vec<(u32, T)>, to: usize) -> Vec<(u32, T)> {
    by_node.split_off(by_node.partition_point(|&(node, _)| (node as usize) < to))
}

impl OpenEncoding<'_> {
    /// Keeps what was encoded, unless it touched more than was declared.
    pub(crate) fn keep(self, name: &str, declared: &[(BufferHandle, bool)]) -> Result<()> {
        self.recording.with(|s| {
            let e = &s.encodings[self.depth];
            let allowed = |h: BufferHandle, w: bool| {
                e.own.contains(&h) || declared.iter().any(|&(d, dw)| d == h && (dw || !w))
            };
            if let Some(&(h, writes)) = e.touched.iter().find(|&&(h, w)| !allowed(h, w)) {
                return Err(Error::invalid(format!(
                    "operator {name} {} a buffer ({h:?}) that it does not declare; add it to GraphOperator::accesses",
                    if writes { "writes" } else { "reads" }
                )));
            }
            s.keep(self.depth);
            Ok(())
        })?
    }
}

impl Drop for OpenEncoding<'_> {
    fn drop(&mut self) {
        let undone = self.recording.with(|s| {
            if s.encodings.len() <= self.depth {
                return None; // It was kept.
            }
            let undo: Vec<_> = s.encodings.drain(self.depth..).collect();
            let mut leases = Vec::new();
            for change in undo.iter().rev().flat_map(|e| e.journal.iter().rev()) {
                match *change {
                    Undo::Member(symbol, usage) => {
                        if let Some(member) = s.members.get_mut(&symbol) {
                            member.usage = usage;
                        }
                    }
                    Undo::Outside(handle, None) => leases.extend(s.outside.remove(&handle)),
                    Undo::Outside(handle, Some(writes)) => {
                        if let Some(outside) = s.outside.get_mut(&handle) {
                            outside.writes = writes;
                        }
                    }
                }
            }
            let to = undo.first().map_or(s.ops.len(), |e| e.ops);
            let (events, waits) =
                undo.first().map_or((usize::MAX, usize::MAX), |e| (e.events, e.waits));
            s.points.truncate(undo.first().map_or(usize::MAX, |e| e.points));
            let events = s.events.split_off(events.min(s.events.len()));
            let waits = s.waits.split_off(waits.min(s.waits.len()));
            let rules = s.rules.split_off(undo.first().map_or(s.rules.len(), |e| e.rules));
            let partitions = split_off(&mut s.partitions, to);
            let noted = s.noted.split_off(undo.first().map_or(s.noted.len(), |e| e.noted));
            let ops = s.ops.clone();
            s.ops.truncate(to);
            Some((ops, leases, events, waits, rules, partitions, noted))
        });
        // Without the lock: what is dropped may be anybody's closure.
        drop(undone);
    }
}
