//! Commands of queues, and the objects that a queue holds until they run.
//!
//! This module must not know how commands run.

use super::clock::Clock;
use super::comm::{BoundMeet, Meet};
use super::conditional::{Condition, Part, Round, Rounds};
use super::detect::{Ancestors, Operation};
use super::ids::{CommId, EventId, ExecId, PartitionId, QueueId, SemaphoreId};
use super::kernel::Kernel;
use super::space::AccessScope;
use leasehold_core::sync::{Arc, OnceLock};
use leasehold_core::{Error, Name, Result, Text};
use leasehold_hal::{Binding, ConditionalKind};
use std::fmt;
use std::ops::Range;

/// A kernel launch.
#[derive(Debug, Clone)]
pub struct KernelCall {
    /// The kernel.
    pub kernel: Arc<Kernel>,
    /// Blocks in each direction. If one is zero, nothing runs.
    pub grid: [u32; 3],
    /// Threads of a block in each direction.
    pub block: [u32; 3],
    /// Bytes of shared memory of a block.
    pub shared: u32,
    /// Blocks of a cluster in each direction.
    pub cluster: [u32; 3],
    /// All blocks run at the same time.
    pub cooperative: bool,
    /// Memory, in the order that the kernel declares.
    pub bindings: Vec<Binding>,
    /// Parameters, of the size that the kernel declares.
    pub params: Vec<u8>,
    /// Bindings that the kernel reads early, bit `i` for binding `i`.
    pub early: u32,
    /// Whether a graph begins the kernel while the one kernel in front of it runs. All that it does
    /// but for the early reads comes after that kernel all the same.
    pub dependent: bool,
    /// The partition whose units run the kernel; `None` for those of the whole device.
    pub partition: Option<PartitionId>,
}

impl KernelCall {
    /// A launch of one block of one thread.
    #[must_use]
    pub fn new(kernel: Arc<Kernel>, bindings: Vec<Binding>, params: Vec<u8>) -> Self {
        let (grid, block) = ([1; 3], [1; 3]);
        Self {
            kernel,
            grid,
            block,
            shared: 0,
            cluster: [1; 3],
            cooperative: false,
            bindings,
            params,
            early: 0,
            dependent: false,
            partition: None,
        }
    }

    /// Sets the grid.
    #[must_use]
    pub fn grid(mut self, grid: [u32; 3]) -> Self {
        self.grid = grid;
        self
    }

    /// The binding with the limits of binding `i`. Without limits, as with empty ones, all of the
    /// binding has memory.
    pub(crate) fn limits_of(&self, i: usize) -> Option<&Binding> {
        let limits = self.kernel.spec.limits.iter();
        let mut own = limits.filter(|(binding, _)| *binding as usize == i);
        let limits = own.next().and_then(|(_, limit)| self.bindings.get(*limit as usize));
        limits.filter(|limits| limits.len != 0)
    }

    /// Calls `f` with the range of each binding. A limited one has no range before the kernel
    /// begins.
    fn for_each_range(&self, mut f: impl FnMut(Range<u64>)) {
        for (i, b) in self.bindings.iter().enumerate() {
            if self.limits_of(i).is_none() {
                f(b.addr..b.addr.saturating_add(b.len));
            }
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let spec = &self.kernel.spec;
        if self.bindings.len() != spec.bindings.len() || self.params.len() != spec.params as usize {
            return Err(Error::invalid(format!(
                "kernel {}: {} bindings and {} bytes of parameters; it declares {} and {}",
                self.kernel.name,
                self.bindings.len(),
                self.params.len(),
                spec.bindings.len(),
                spec.params
            )));
        }
        let threads = self.block.iter().fold(1u64, |n, &b| n.saturating_mul(u64::from(b)));
        if threads == 0 || threads > u64::from(spec.block_threads) {
            return Err(Error::invalid(format!(
                "kernel {}: a block of {:?} threads; it takes 1 to {}",
                self.kernel.name, self.block, spec.block_threads
            )));
        }
        Ok(())
    }
}

/// A copy of `rows` rows of `width` bytes, each side with its pitch. Both sides may be memory of
/// any device, or host memory that the machine allocated or registered. Other host memory needs
/// [`with_host`](Self::with_host).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// The source address.
    pub src: u64,
    /// Bytes from one source row to the next.
    pub src_pitch: u64,
    /// The destination address.
    pub dst: u64,
    /// Bytes from one destination row to the next.
    pub dst_pitch: u64,
    /// Bytes of a row.
    pub width: u64,
    /// Rows.
    pub rows: u64,
    /// The caller vouches for host memory that the machine does not know.
    host: bool,
}

impl Transfer {
    /// A plain copy.
    #[must_use]
    pub fn linear(src: u64, dst: u64, bytes: u64) -> Self {
        Self::rows((src, bytes), (dst, bytes), bytes, 1)
    }

    /// A copy of rows. Each side is an address and the pitch of its rows.
    #[must_use]
    pub fn rows(src: (u64, u64), dst: (u64, u64), width: u64, rows: u64) -> Self {
        Self {
            src: src.0,
            src_pitch: src.1,
            dst: dst.0,
            dst_pitch: dst.1,
            width,
            rows,
            host: false,
        }
    }

    /// Allows pageable host memory on both sides. Without this call such an address is illegal,
    /// because the machine does not know the memory.
    ///
    /// # Safety
    /// - A range that is not the machine's memory is memory of this process that may be read (the
    ///   source) or written (the destination). No other code uses it otherwise until the copy is
    ///   over or its queue has failed.
    #[must_use]
    pub unsafe fn with_host(mut self) -> Self {
        self.host = true;
        self
    }

    /// The access rights of the copy.
    pub(crate) fn reach(&self) -> AccessScope {
        if self.host { AccessScope::Anywhere } else { AccessScope::Engine }
    }

    /// The number of copied bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.width.saturating_mul(self.rows)
    }

    /// The same copy, with contiguous rows joined into one row.
    pub(crate) fn normal(self) -> Self {
        if self.rows > 1 && self.src_pitch == self.width && self.dst_pitch == self.width {
            return Self { host: self.host, ..Self::linear(self.src, self.dst, self.bytes()) };
        }
        self
    }

    fn extent(&self, pitch: u64) -> Option<u64> {
        if self.rows == 0 || self.width == 0 {
            return Some(0);
        }
        (self.rows - 1).checked_mul(pitch)?.checked_add(self.width)
    }

    /// The ranges between the first and the last byte of source and destination.
    pub(crate) fn ranges(&self) -> [Range<u64>; 2] {
        [(self.src, self.src_pitch), (self.dst, self.dst_pitch)]
            .map(|(at, pitch)| at..at.saturating_add(self.extent(pitch).unwrap_or(u64::MAX)))
    }

    pub(crate) fn check(&self) -> Result<()> {
        for (at, pitch) in [(self.src, self.src_pitch), (self.dst, self.dst_pitch)] {
            if self.extent(pitch).and_then(|e| e.checked_add(at)).is_none() {
                return Err(Error::invalid("the copy wraps the address space"));
            }
            if self.rows > 1 && pitch < self.width {
                return Err(Error::invalid(format!(
                    "rows of {} bytes at a pitch of {pitch}",
                    self.width
                )));
            }
        }
        Ok(())
    }
}

/// A fill with a pattern of 1, 2 or 4 bytes, `rows` rows of `width` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FillCall {
    /// The destination address, aligned to the pattern.
    pub dst: u64,
    /// Bytes from one row to the next.
    pub pitch: u64,
    /// Bytes of a row; a multiple of the pattern's.
    pub width: u64,
    /// Rows.
    pub rows: u64,
    /// The pattern, little-endian.
    pub pattern: u32,
    /// Bytes of the pattern: 1, 2 or 4.
    pub unit: u8,
}

impl FillCall {
    /// A fill without gaps.
    #[must_use]
    pub fn linear(dst: u64, bytes: u64, pattern: u32, unit: u8) -> Self {
        Self { dst, pitch: bytes, width: bytes, rows: 1, pattern, unit }
    }

    pub(crate) fn range(&self) -> Range<u64> {
        let rows = self.rows.saturating_sub(1).saturating_mul(self.pitch);
        let end = if self.rows == 0 {
            self.dst
        } else {
            self.dst.saturating_add(rows).saturating_add(self.width)
        };
        self.dst..end
    }

    pub(crate) fn check(&self) -> Result<()> {
        let unit = u64::from(self.unit);
        if !matches!(self.unit, 1 | 2 | 4)
            || !self.width.is_multiple_of(unit)
            || !self.dst.is_multiple_of(unit)
        {
            return Err(Error::invalid(format!(
                "fill of {} bytes at {:#x} with a pattern of {}: want 1, 2 or 4, aligned, and whole patterns",
                self.width, self.dst, self.unit
            )));
        }
        if self.rows > 1 && (self.pitch < self.width || !self.pitch.is_multiple_of(unit)) {
            return Err(Error::invalid(format!(
                "rows of {} bytes at a pitch of {}",
                self.width, self.pitch
            )));
        }
        Ok(())
    }
}

/// A host function that a graph calls at each launch, with the queue of the launch.
pub type NodeFn = dyn Fn(QueueId) + Send + Sync;
/// A host function that runs once.
pub type HostFn = Box<dyn FnOnce() + Send>;
/// A condition that a queue waits for: `None` while it does not hold, an error if it can never
/// hold.
pub type ReadyFn = Box<dyn FnMut() -> Option<Result<()>> + Send>;

/// The commands of a queue. They run in order, each to its end.
pub enum Command {
    /// A kernel.
    Kernel(KernelCall),
    /// A copy.
    Copy(Transfer),
    /// A fill.
    Fill(FillCall),
    /// A host function. It runs without the machine's lock on any stepping thread, and may call the
    /// machine.
    Host {
        /// The name in reports.
        name: Text,
        /// The function.
        call: HostFn,
        /// Says whether the function is called even if the queue has failed. It is never called on
        /// a lost device.
        always: bool,
    },
    /// Records an event.
    Record(EventId),
    /// Waits for the event's last record before this call; nothing if the event was never recorded.
    WaitEvent(EventId),
    /// Waits like [`WaitEvent`](Self::WaitEvent). If a failed queue skipped the record, this queue
    /// fails too.
    RequireEvent(EventId),
    /// Writes a 64-bit word.
    WriteValue {
        /// The address: aligned to 8, in pinned or device memory.
        addr: u64,
        /// The value.
        value: u64,
    },
    /// Waits until a 64-bit word is at least a value.
    WaitValue {
        /// The address: aligned to 8, in pinned or device memory.
        addr: u64,
        /// The least value.
        value: u64,
    },
    /// Raises a semaphore. On a failed queue the command fails the semaphore instead.
    Signal(SemaphoreId, u64),
    /// Raises a semaphore. On a failed queue the command does nothing, as with Metal.
    SignalOnSuccess(SemaphoreId, u64),
    /// Waits until a semaphore is at least a value. If the semaphore fails first, so does the
    /// queue.
    WaitSemaphore(SemaphoreId, u64),
    /// Waits for a condition of the host. The machine evaluates it under its lock; it must not call
    /// the machine.
    Until {
        /// The name in reports.
        name: &'static str,
        /// The condition.
        ready: ReadyFn,
    },
    /// Meets the calls of other ranks of a communicator.
    Meet(Meet),
    /// Launches a graph in its present state.
    Launch(ExecId),
    /// Frees an allocation in the order of the queue.
    Free(u64),
    /// Does nothing.
    Empty,
}

impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Command::Kernel(k) => write!(f, "Kernel({})", k.kernel.name),
            Command::Copy(c) => c.fmt(f),
            Command::Fill(c) => c.fmt(f),
            Command::Host { name, .. } => write!(f, "Host({name})"),
            Command::Record(e) => write!(f, "Record({e:?})"),
            Command::WaitEvent(e) => write!(f, "WaitEvent({e:?})"),
            Command::RequireEvent(e) => write!(f, "RequireEvent({e:?})"),
            Command::WriteValue { addr, value } => write!(f, "WriteValue({addr:#x}, {value})"),
            Command::WaitValue { addr, value } => write!(f, "WaitValue({addr:#x}, {value})"),
            Command::Signal(s, value) => write!(f, "Signal({s:?}, {value})"),
            Command::SignalOnSuccess(s, value) => write!(f, "SignalOnSuccess({s:?}, {value})"),
            Command::WaitSemaphore(s, value) => write!(f, "WaitSemaphore({s:?}, {value})"),
            Command::Until { name, .. } => write!(f, "Until({name})"),
            Command::Meet(m) => m.fmt(f),
            Command::Launch(e) => write!(f, "Launch({e:?})"),
            Command::Free(addr) => write!(f, "Free({addr:#x})"),
            Command::Empty => f.write_str("Empty"),
        }
    }
}

/// A record of an event. It is over once it has a time.
#[derive(Debug, Default)]
pub(crate) struct Mark {
    pub(crate) done: OnceLock<Done>,
}

/// The time at which a mark was passed, and the clock at that time.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) nanos: u64,
    pub(crate) clock: Clock,
    /// Says whether the queue had failed.
    pub(crate) failed: bool,
}

/// The action of a queue or node: a command whose names are bound.
pub(crate) enum Action {
    Kernel(KernelCall),
    Copy(Transfer),
    Fill(FillCall),
    Host {
        name: Arc<str>,
        call: HostFn,
        always: bool,
    },
    Node {
        name: Arc<str>,
        call: Arc<NodeFn>,
    },
    Record(Arc<Mark>),
    WaitMark(Arc<Mark>),
    RequireMark(Arc<Mark>),
    WriteValue {
        addr: u64,
        value: u64,
    },
    WaitValue {
        addr: u64,
        value: u64,
    },
    Signal(SemaphoreId, u64),
    SignalOnSuccess(SemaphoreId, u64),
    WaitSemaphore(SemaphoreId, u64),
    Until {
        name: &'static str,
        ready: ReadyFn,
    },
    Meet(BoundMeet),
    /// Tests the word of a part of a graph, which has this name.
    Test(Arc<str>, Condition),
    Graph(Box<Running>),
    Free(u64),
    Allocated {
        addr: u64,
    },
    Empty,
}

impl Action {
    /// Whether the action runs this kernel.
    pub(crate) fn runs(&self, kernel: &Arc<Kernel>) -> bool {
        match self {
            Action::Kernel(call) => Arc::ptr_eq(&call.kernel, kernel),
            Action::Graph(running) => running.nodes.iter().any(|n| n.action.runs(kernel)),
            _ => false,
        }
    }

    /// Whether the action has calls of this rank.
    pub(super) fn meets(&self, comm: CommId) -> bool {
        match self {
            Action::Meet(meet) => meet.comm == comm,
            Action::Graph(running) => running.nodes.iter().any(|n| n.action.meets(comm)),
            _ => false,
        }
    }

    /// The name in reports.
    pub(crate) fn name(&self) -> Arc<str> {
        match self {
            Action::Kernel(k) => format!("dispatch {}", k.kernel.name).into(),
            Action::Copy(_) => "copy".into(),
            Action::Fill(_) => "fill".into(),
            Action::Host { name, .. } | Action::Node { name, .. } => name.clone(),
            Action::Record(_) => "record".into(),
            Action::WaitMark(_) | Action::RequireMark(_) => "wait for an event".into(),
            Action::WriteValue { .. } => "write value".into(),
            Action::WaitValue { .. } => "wait for a value".into(),
            Action::Signal(..) | Action::SignalOnSuccess(..) => "signal".into(),
            Action::WaitSemaphore(..) => "wait for a semaphore".into(),
            Action::Until { name, .. } => (*name).into(),
            Action::Meet(meet) => meet.shown().into(),
            Action::Test(name, _) => name.clone(),
            Action::Graph(_) => "graph".into(),
            Action::Free(_) => "free".into(),
            Action::Allocated { .. } => "alloc".into(),
            Action::Empty => "empty".into(),
        }
    }

    /// Calls `f` with each range that the action accesses, gaps between rows included.
    pub(crate) fn for_each_range(&self, mut f: impl FnMut(Range<u64>)) {
        match self {
            Action::Kernel(k) => k.for_each_range(f),
            Action::Copy(c) => c.ranges().into_iter().for_each(f),
            Action::Fill(c) => f(c.range()),
            Action::WriteValue { addr, .. } | Action::WaitValue { addr, .. } => {
                f(*addr..addr.saturating_add(8))
            }
            Action::Meet(meet) => meet.for_each_range(&mut f),
            Action::Graph(g) => {
                g.nodes.iter().for_each(|n| n.action.for_each_range(&mut f));
            }
            _ => {}
        }
    }
}

/// A node's own part of an action, which is equal at each launch.
#[derive(Clone)]
pub(crate) enum NodeAction {
    Kernel(KernelCall),
    Copy(Transfer),
    Fill(FillCall),
    Host {
        name: Arc<str>,
        call: Arc<NodeFn>,
    },
    Record(EventId),
    Wait(EventId),
    WriteValue {
        addr: u64,
        value: u64,
    },
    WaitValue {
        addr: u64,
        value: u64,
    },
    Meet(BoundMeet),
    /// The head of a part under a condition.
    Head(Arc<Part>),
    /// The end of that part.
    End(Arc<Part>),
    Empty,
}

impl NodeAction {
    /// Whether the action has calls of this rank.
    fn meets(&self, comm: CommId) -> bool {
        matches!(self, NodeAction::Meet(meet) if meet.comm == comm)
    }

    /// Whether the action runs this kernel.
    pub(crate) fn runs(&self, kernel: &Arc<Kernel>) -> bool {
        matches!(self, NodeAction::Kernel(call) if Arc::ptr_eq(&call.kernel, kernel))
    }

    fn for_each_range(&self, f: &mut dyn FnMut(Range<u64>)) {
        match self {
            NodeAction::Kernel(k) => k.for_each_range(f),
            NodeAction::Copy(c) => c.ranges().into_iter().for_each(f),
            NodeAction::Fill(c) => f(c.range()),
            NodeAction::WriteValue { addr, .. } | NodeAction::WaitValue { addr, .. } => {
                f(*addr..addr.saturating_add(8));
            }
            NodeAction::Meet(meet) => meet.for_each_range(f),
            NodeAction::Head(part) => {
                if let Condition::Flag(addr) = part.condition {
                    f(addr..addr.saturating_add(4));
                }
            }
            _ => {}
        }
    }
}

/// A node of an executable graph.
#[derive(Clone)]
pub(crate) struct ExecNode {
    pub(crate) action: NodeAction,
    /// Nodes that wait for this one.
    pub(crate) next: Arc<[u32]>,
    /// The node of the template, in its own graph.
    pub(crate) label: u32,
    /// The node with which this one begins: itself, or the first of a chain of kernels of which
    /// each begins while the one in front of it runs.
    pub(crate) begins: u32,
}

/// A launch of a graph, in the graph's state at the time of the enqueue.
pub(crate) struct Running {
    pub(crate) launch: u64,
    pub(crate) nodes: Arc<Vec<ExecNode>>,
    pub(crate) edges: Arc<Ancestors>,
    /// For each node, the number of its predecessors that are not over; `u32::MAX` once the node
    /// has begun.
    pub(crate) waits: Vec<u32>,
    pub(crate) ready: Vec<u32>,
    pub(crate) left: usize,
    /// The parts under conditions, inner ones first.
    pub(crate) parts: Vec<Round>,
    /// The number of rounds that have begun.
    pub(crate) tick: u64,
    /// Marks of nodes that record or wait for events, by node.
    pub(crate) marks: Vec<(u32, Arc<Mark>)>,
}

impl Running {
    /// The node's action for this launch.
    pub(crate) fn action(&self, node: u32) -> Action {
        let mark = || self.marks.iter().find(|m| m.0 == node).map(|m| m.1.clone());
        match &self.nodes[node as usize].action {
            NodeAction::Kernel(k) => Action::Kernel(k.clone()),
            NodeAction::Copy(c) => Action::Copy(*c),
            NodeAction::Fill(c) => Action::Fill(*c),
            NodeAction::Host { name, call } => {
                Action::Node { name: name.clone(), call: call.clone() }
            }
            NodeAction::Record(_) => mark().map_or(Action::Empty, Action::Record),
            NodeAction::Wait(_) => mark().map_or(Action::Empty, Action::WaitMark),
            NodeAction::WriteValue { addr, value } => {
                Action::WriteValue { addr: *addr, value: *value }
            }
            NodeAction::WaitValue { addr, value } => {
                Action::WaitValue { addr: *addr, value: *value }
            }
            NodeAction::Meet(meet) => Action::Meet(meet.clone()),
            NodeAction::End(part) if part.kind == ConditionalKind::If => Action::Empty,
            NodeAction::Head(part) | NodeAction::End(part) => {
                Action::Test(part.name.clone(), part.condition.clone())
            }
            NodeAction::Empty => Action::Empty,
        }
    }

    /// Ends a node: nodes that waited for this node only become ready.
    pub(crate) fn finish(&mut self, node: u32) {
        self.left -= 1;
        self.release(node);
    }

    /// Makes the nodes ready that waited for this node only.
    pub(crate) fn release(&mut self, node: u32) {
        for &next in self.nodes[node as usize].next.iter() {
            let waits = &mut self.waits[next as usize];
            *waits -= 1;
            if *waits == 0 {
                self.ready.push(next);
            }
        }
    }
}

impl Running {
    /// The rounds in which a node runs.
    pub(crate) fn rounds_of(&self, node: u32) -> Rounds {
        let of = self.parts.iter().filter(|r| r.contains(node)).copied().collect();
        Rounds { tick: self.tick, of }
    }

    /// Goes on after a head or the end of a loop, which has tested its word.
    ///
    /// # Errors
    /// The text of a fault if the loop has had `bound` rounds already.
    pub(crate) fn tested(&mut self, node: u32, go_on: bool, bound: u64) -> Result<(), String> {
        let Some(at) = self.parts.iter().position(|p| p.head == node || p.end == node) else {
            return Err("a test outside a conditional node".to_owned());
        };
        let Round { head, end, rounds, .. } = self.parts[at];
        if !go_on {
            if node == head {
                self.left -= (end - head) as usize;
            }
            self.finish(end);
            return Ok(());
        }
        let rounds = if node == head {
            self.left -= 1;
            0
        } else {
            rounds
        };
        if rounds == bound {
            return Err(format!(
                "it has run {bound} times, and its flag is still set: the loop has no end, or MachineConfig::loop_bound is too low"
            ));
        }
        self.tick += 1;
        (self.parts[at].began, self.parts[at].rounds) = (self.tick, rounds + 1);
        if node == end {
            self.left += (end - head - 1) as usize;
            for body in head + 1..=end {
                self.waits[body as usize] = self.edges.pred[body as usize].len() as u32;
            }
        }
        self.release(head);
        Ok(())
    }
}

/// An action in a queue.
pub(crate) struct Entry {
    pub(crate) action: Action,
    pub(crate) index: u64,
    /// The host's clock at the time of the enqueue.
    pub(crate) host: Arc<Clock>,
    /// The virtual time of the enqueue.
    pub(crate) at: u64,
    /// The regions that the addresses named at that time, each with the address.
    pub(crate) regions: Vec<(u64, u64)>,
    /// The scope of the enqueuing thread.
    pub(crate) scope: Option<Name>,
    /// The number of steps by which the entry is delayed.
    pub(crate) delay: u32,
    /// The entry runs only when nothing else can run.
    pub(crate) last: bool,
    /// The entry has begun: its clock and epoch are taken.
    pub(crate) begun: bool,
}

impl Entry {
    /// The entry as a whole, for reports.
    pub(super) fn operation(&self, queue: QueueId) -> Operation {
        Operation {
            name: self.action.name(),
            queue: Some(queue.0),
            stream: None,
            index: self.index,
            node: None,
            scope: self.scope.clone(),
        }
    }
}
