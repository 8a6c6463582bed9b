//! The race detector: records the last accesses to memory, and reports accesses without an order.
//!
//! # Model
//! Each agent (the host, and every queue) has a vector clock. An access is an agent and an epoch of
//! this agent. It precedes another access if the other agent knew that epoch. Memory is a map of
//! ranges. Each range has its last write, the reads since then, and a flag for memory that was
//! never written. Nodes of one launch of a graph share an epoch; between them the graph's own edges
//! decide.
//!
//! # Order
//! These relations create an order:
//! * the sequence of a queue;
//! * an event's record and a wait for it; a written value and a wait for it; a semaphore;
//! * the host's enqueue before the enqueued command;
//! * the end of work before a host that waited, queried or was called back;
//! * the loss of a device before later actions of the host;
//! * the edges of a graph.
//!
//! The accidental sequence of two runs creates none.
//!
//! # Limits
//! All threads of the host are one agent. A kernel's read counts as a read of unwritten memory only
//! if no byte of the binding was written, because bindings are larger than the accessed parts. An
//! event that a graph records or waits for covers the whole launch. If memory is mapped twice, an
//! access through one mapping hides earlier ones through the other mapping, once the latter is
//! removed.
//!
//! This module must not know how commands run.

use super::clock::Clock;
use super::conditional::Rounds;
use leasehold_alloc::Allocator;
use leasehold_core::sync::{Arc, OnceLock};
use leasehold_core::{Name, ShownTag};
use leasehold_hal::Access;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The agent of the host.
pub(crate) const HOST: u32 = 0;
/// The maximum number of reports that are kept until they are taken.
const REPORTS: usize = 1024;

/// An operation, as reports name it.
#[derive(Clone, PartialEq, Eq)]
pub struct Operation {
    /// The operation: `dispatch add`, `copy`, `host read`.
    pub name: Arc<str>,
    /// The queue's number; `None` for the host.
    pub queue: Option<u64>,
    /// The queue's name, if it was given one
    /// ([`Machine::queue_set_name`](super::Machine::queue_set_name)).
    pub stream: Option<Arc<str>>,
    /// The operation's index on its queue. For a backend's stream: the submission, counted from 1
    /// since the stream was made. For the host: a count of its accesses.
    pub index: u64,
    /// The node of a launched graph.
    pub node: Option<u32>,
    /// The [scope](Name::scope) of the thread that submitted the operation.
    pub scope: Option<Name>,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (", self.name)?;
        self.place(f)?;
        write!(
            f,
            ", {} {}",
            if self.queue.is_some() { "submission" } else { "access" },
            self.index
        )?;
        if let Some(node) = self.node {
            write!(f, ", node {node}")?;
        }
        match &self.scope {
            Some(scope) => write!(f, ", in scope {scope})"),
            None => f.write_str(")"),
        }
    }
}

impl Operation {
    /// A call of the host.
    pub(crate) fn of_host(name: &str, scope: Option<Name>) -> Self {
        Self { name: name.into(), queue: None, stream: None, index: 0, node: None, scope }
    }

    /// Writes the place of execution, for human readers.
    fn place(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.stream, self.queue) {
            (Some(stream), _) => f.write_str(stream),
            (None, Some(queue)) => write!(f, "queue {queue}"),
            (None, None) => f.write_str("host"),
        }
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The kind of a defect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ReportKind {
    /// Two accesses without an order, of which at least one writes.
    Unordered,
    /// Memory that was freed, unmapped or reused before an operation that uses it had run. Also
    /// memory that was freed without an order after its last use.
    UseAfterFree,
    /// A read of memory that was never written.
    NeverWritten,
    /// Host memory that was freed or unregistered while a copy was pending.
    HostGone,
    /// A kernel wrote memory that it declares to read only.
    WroteReadOnly,
    /// A kernel wrote memory that several growing buffers share.
    WroteShared,
    /// Calls of ranks that do not fit each other met. The report names two of them.
    Mismatch,
    /// Meetings wait for each other's devices in a cycle. The report names the first and the last
    /// one; [`Monitor::waits`](super::Monitor::waits) has all of them.
    DeadLock,
    /// A rank of a communicator or its library was used against the rules.
    Misuse,
}

/// A defect in the code that uses the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The kind of the defect.
    pub kind: ReportKind,
    /// The earlier operation, if the defect involves two.
    pub first: Option<Operation>,
    /// The operation that revealed the defect.
    pub second: Operation,
    /// The address that the second operation used; 0 if the defect is none of memory.
    pub addr: u64,
    /// Bytes; 0 if the defect is none of memory.
    pub bytes: u64,
    /// The kernel's binding that contains the address, and the offset from its first byte, if the
    /// defect lies in a binding.
    pub binding: Option<(usize, u64)>,
}

impl Report {
    /// The report with the buffer of `memory` that now contains the address, if one does: its
    /// length, its name or tag, and the offset.
    #[must_use]
    pub fn describe(&self, memory: &Allocator) -> String {
        match memory.holding(self.addr, self.bytes.min(1), 0) {
            Some(at) => {
                format!(
                    "{self} (byte {} of a buffer of {} bytes with {})",
                    self.addr - at.addr,
                    at.len,
                    ShownTag(at.tag)
                )
            }
            None => self.to_string(),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { kind, first, second, addr, bytes, binding } = self;
        let what = match kind {
            ReportKind::Unordered => "unordered accesses",
            ReportKind::UseAfterFree => "use after free",
            ReportKind::NeverWritten => "read of memory that nobody wrote",
            ReportKind::HostGone => "host memory gone while a copy was pending",
            ReportKind::WroteReadOnly => "write to memory that is declared to be read",
            ReportKind::WroteShared => "write to memory that growing buffers share",
            ReportKind::Mismatch => "calls that do not fit each other",
            ReportKind::DeadLock => "meetings that wait for each other",
            ReportKind::Misuse => "misuse of a communicator",
        };
        write!(f, "{what}: ")?;
        if *addr != 0 {
            write!(f, "{bytes} bytes at {addr:#x}: ")?;
        }
        match first {
            Some(first) => write!(f, "{first} and {second}")?,
            None => write!(f, "{second}")?,
        }
        if let Some((binding, offset)) = binding {
            write!(f, ", binding {binding} at byte {offset}")?;
        }
        if let (ReportKind::Unordered, Some(first)) = (kind, first) {
            return match (first.node, second.node) {
                (Some(a), Some(b)) if first.queue == second.queue => {
                    write!(f, "; node {b} does not wait for node {a}")
                }
                _ => {
                    f.write_str("; no wait of ")?;
                    second.place(f)?;
                    f.write_str(" for ")?;
                    first.place(f)
                }
            };
        }
        Ok(())
    }
}

/// The maximum number of nodes of a graph for which all pairs are stored as bits (8 MiB at most).
/// In larger graphs each query follows the edges.
const CLOSED: usize = 8192;

/// The ancestor relation of a graph's nodes. A predecessor has a lower number than its successor.
pub(crate) struct Ancestors {
    /// Direct predecessors of each node.
    pub(crate) pred: Vec<Vec<u32>>,
    /// A row of bits for each node: its ancestors. Made at the first query.
    closed: OnceLock<Vec<u64>>,
}

impl Ancestors {
    pub(crate) fn new(pred: Vec<Vec<u32>>) -> Self {
        Self { pred, closed: OnceLock::new() }
    }

    /// Returns whether node `a` comes before node `b` (or is the same).
    pub(crate) fn before(&self, a: u32, b: u32) -> bool {
        if a >= b {
            return a == b;
        }
        if self.pred.len() > CLOSED {
            return self.search(a, b);
        }
        let row = self.pred.len().div_ceil(64);
        let closed = self.closed.get_or_init(|| self.close(row));
        closed[b as usize * row + a as usize / 64] >> (a % 64) & 1 != 0
    }

    fn close(&self, row: usize) -> Vec<u64> {
        let mut all = vec![0u64; self.pred.len() * row];
        for (node, pred) in self.pred.iter().enumerate() {
            let (before, mine) = all.split_at_mut(node * row);
            for &p in pred {
                let theirs = &before[p as usize * row..][..row];
                mine[..row].iter_mut().zip(theirs).for_each(|(m, t)| *m |= t);
                mine[p as usize / 64] |= 1 << (p % 64);
            }
        }
        all
    }

    fn search(&self, a: u32, b: u32) -> bool {
        let (mut stack, mut seen) = (vec![b], BTreeSet::new());
        while let Some(at) = stack.pop() {
            for &p in &self.pred[at as usize] {
                if p == a {
                    return true;
                }
                if p > a && seen.insert(p) {
                    stack.push(p);
                }
            }
        }
        false
    }
}

/// The agent of an access while it runs.
pub(crate) struct Actor<'a> {
    pub(crate) agent: u32,
    pub(crate) epoch: u64,
    pub(crate) clock: &'a Clock,
    pub(crate) name: &'a Arc<str>,
    pub(crate) queue: Option<u64>,
    pub(crate) index: u64,
    /// The launch's number, the node and the graph.
    pub(crate) node: Option<(u64, u32, &'a Ancestors)>,
    /// The rounds of loops in which the node runs.
    pub(crate) rounds: Option<&'a Rounds>,
    pub(crate) scope: Option<Name>,
}

impl Actor<'_> {
    fn operation(&self) -> Operation {
        Operation {
            name: self.name.clone(),
            queue: self.queue,
            stream: None,
            index: self.index,
            node: self.node.map(|(_, node, _)| node),
            scope: self.scope.clone(),
        }
    }
}

/// A former access.
#[derive(Clone)]
struct Past {
    agent: u32,
    epoch: u64,
    launch: u64,
    tick: u64,
    /// The mapping of the access: the distance between its addresses and the memory's keys.
    through: u64,
    operation: Operation,
}

impl Past {
    /// Whether the actor's own node made the access.
    fn is_of(&self, now: &Actor<'_>) -> bool {
        now.node.is_some_and(|(launch, node, _)| {
            self.launch == launch && self.operation.node == Some(node)
        })
    }

    fn before(&self, now: &Actor<'_>) -> bool {
        if let Some((launch, node, graph)) = now.node
            && self.launch == launch
            && let Some(earlier) = self.operation.node
        {
            return graph.before(earlier, node)
                || now.rounds.is_some_and(|rounds| rounds.follow(earlier, self.tick));
        }
        now.clock.knows(self.agent, self.epoch)
    }
}

#[derive(Clone)]
struct Segment {
    end: u64,
    written: bool,
    write: Option<Arc<Past>>,
    reads: Vec<Arc<Past>>,
}

/// The rule that decides when a read of unwritten memory is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unwritten {
    /// If any byte of the range is unwritten.
    Any,
    /// If the whole range is unwritten.
    All,
    /// Not at all.
    Never,
}

/// A reported defect: the kind, and queue and index of both operations.
type Told = (ReportKind, Option<(Option<u64>, u64)>, Option<u64>, u64);

/// The ranges and the reports.
#[derive(Default)]
pub(crate) struct Detector {
    pub(crate) on: bool,
    /// The byte that fills memory which a kernel is about to write.
    pub(crate) poison: u8,
    segments: BTreeMap<u64, Segment>,
    reports: Vec<Report>,
    told: BTreeSet<Told>,
    compact_at: usize,
    /// The names of queues, and the base of their indices.
    names: BTreeMap<u64, (Arc<str>, u64)>,
}

impl Detector {
    pub(crate) fn new(on: bool, poison: u8) -> Self {
        Self { on, poison, compact_at: 4096, ..Self::default() }
    }

    /// Takes the reports, with the names of the queues. Names of queues for which `lives` is
    /// `false` are removed.
    pub(crate) fn take_reports(&mut self, lives: impl Fn(u64) -> bool) -> Vec<Report> {
        self.told.clear();
        let mut reports = std::mem::take(&mut self.reports);
        let named = |o: &mut Operation| {
            if let Some((name, first)) = o.queue.and_then(|q| self.names.get(&q)) {
                o.stream = Some(name.clone());
                o.index = o.index.saturating_sub(*first);
            }
        };
        for report in &mut reports {
            report.first.as_mut().map(named);
            named(&mut report.second);
        }
        self.names.retain(|&queue, _| lives(queue));
        reports
    }

    /// Names a queue, whose indices begin after `first`.
    pub(crate) fn name(&mut self, queue: u64, name: Arc<str>, first: u64) {
        if self.on {
            self.names.insert(queue, (name, first));
        }
    }

    /// Names a queue again.
    pub(crate) fn rename(&mut self, queue: u64, name: Arc<str>) {
        if let Some((shown, _)) = self.names.get_mut(&queue) {
            *shown = name;
        }
    }

    /// Reports that a kernel wrote memory that it declares to read.
    pub(crate) fn wrote(
        &mut self,
        kind: ReportKind,
        second: Operation,
        binding: (usize, u64),
        addr: u64,
        bytes: u64,
    ) {
        let before = self.reports.len();
        self.report(kind, None, second, addr, bytes);
        if let Some(report) = self.reports.get_mut(before) {
            report.binding = Some(binding);
        }
    }

    /// Reports the use of a communicator's rank against the rules.
    pub(crate) fn misused(&mut self, why: String) {
        self.report(ReportKind::Misuse, None, Operation::of_host(&why, Name::current()), 0, 0);
    }

    pub(crate) fn report(
        &mut self,
        kind: ReportKind,
        first: Option<Operation>,
        second: Operation,
        addr: u64,
        bytes: u64,
    ) {
        if !self.on || self.reports.len() >= REPORTS {
            return;
        }
        let key = (kind, first.as_ref().map(|o| (o.queue, o.index)), second.queue, second.index);
        if self.told.insert(key) {
            self.reports.push(Report { kind, first, second, addr, bytes, binding: None });
        }
    }

    fn split(&mut self, at: u64) {
        if let Some((_, segment)) = self.segments.range_mut(..at).next_back()
            && segment.end > at
        {
            let tail = segment.clone();
            segment.end = at;
            self.segments.insert(at, tail);
        }
    }

    /// Records an access to `bytes` bytes of the memory `key` through the address `addr`, and
    /// reports conflicting accesses without an order.
    pub(crate) fn access(
        &mut self,
        who: &Actor<'_>,
        key: u64,
        addr: u64,
        bytes: u64,
        access: Access,
    ) {
        let end = key + bytes;
        if !self.on || bytes == 0 {
            return;
        }
        self.split(key);
        self.split(end);
        let past = Arc::new(Past {
            agent: who.agent,
            epoch: who.epoch,
            launch: who.node.map_or(0, |n| n.0),
            tick: who.rounds.map_or(0, |rounds| rounds.tick),
            through: addr.wrapping_sub(key),
            operation: who.operation(),
        });
        let mut found: Vec<(Arc<Past>, u64, u64)> = Vec::new();
        let mut gaps = Vec::new();
        let mut at = key;
        let writes = access.writes();
        for (&from, s) in self.segments.range_mut(key..end) {
            if from > at {
                gaps.push((at, from));
            }
            at = s.end;
            let racy = |p: &&Arc<Past>| !p.before(who);
            found.extend(s.write.iter().filter(racy).map(|p| (p.clone(), from, s.end)));
            if writes {
                found.extend(s.reads.iter().filter(racy).map(|p| (p.clone(), from, s.end)));
                s.written = true;
                s.write = Some(past.clone());
                s.reads.clear();
            } else {
                // An agent's later read covers its earlier ones. Nodes of one launch do not cover
                // each other.
                if s.reads.iter().any(|r| r.agent == past.agent && r.launch != past.launch) {
                    s.reads.retain(|r| r.agent != past.agent);
                }
                // Nor do they repeat, but in a loop.
                if past.tick != 0 {
                    s.reads.retain(|r| !r.is_of(who));
                }
                if past.launch != 0 || s.reads.iter().all(|r| r.agent != past.agent) {
                    s.reads.push(past.clone());
                } else if let Some(r) = s.reads.iter_mut().find(|r| r.agent == past.agent) {
                    *r = past.clone();
                }
            }
        }
        if at < end {
            gaps.push((at, end));
        }
        if writes {
            // A write leaves one segment, however many segments it covered.
            let inside: Vec<u64> = self.segments.range(key..end).map(|(&from, _)| from).collect();
            inside.into_iter().for_each(|from| drop(self.segments.remove(&from)));
            self.segments
                .insert(key, Segment { end, written: true, write: Some(past), reads: Vec::new() });
        } else {
            for (from, to) in gaps {
                let reads = vec![past.clone()];
                self.segments.insert(from, Segment { end: to, written: false, write: None, reads });
            }
        }
        for (first, from, to) in found {
            let (from, to) = (from.max(key), to.min(end));
            self.report(
                ReportKind::Unordered,
                Some(first.operation.clone()),
                who.operation(),
                addr + (from - key),
                to - from,
            );
        }
    }

    /// Reports the writes of a range that a kernel, `second`, may see only in part, because it
    /// reads the range when `who` begins, before it waits. The read itself is recorded as the
    /// kernel's access.
    pub(crate) fn early(
        &mut self,
        who: &Actor<'_>,
        second: Operation,
        key: u64,
        addr: u64,
        bytes: u64,
    ) {
        let end = key + bytes;
        let before = self.segments.range(..key).next_back().filter(|(_, s)| s.end > key);
        let racy = before
            .into_iter()
            .chain(self.segments.range(key..end))
            .filter_map(|(&from, s)| Some((s.write.as_ref()?, from.max(key), s.end.min(end))))
            .filter(|(past, ..)| past.is_of(who) || !past.before(who));
        let found: Vec<_> = racy.map(|(p, from, to)| (p.operation.clone(), from, to)).collect();
        for (first, from, to) in found {
            let at = addr + (from - key);
            self.report(ReportKind::Unordered, Some(first), second.clone(), at, to - from);
        }
    }

    /// Records the start of memory in the order of `who`: every access must come after it.
    pub(crate) fn allocate(&mut self, who: &Actor<'_>, key: u64, addr: u64, bytes: u64) {
        self.access(who, key, addr, bytes, Access::Write);
        if let Some(s) = self.segments.get_mut(&key) {
            s.written = false;
        }
    }

    /// The number of these bytes that were never written.
    pub(crate) fn unwritten(&self, key: u64, bytes: u64) -> u64 {
        let end = key + bytes;
        let before =
            self.segments.range(..key).next_back().filter(|(_, s)| s.end > key && s.written);
        let mut written = before.map_or(0, |(_, s)| s.end.min(end) - key);
        for (&from, s) in self.segments.range(key..end) {
            if s.written {
                written += s.end.min(end) - from;
            }
        }
        bytes - written
    }

    /// The accesses to a range through the addresses from `addr` on that `clock` does not know,
    /// each once.
    pub(crate) fn unknown(&self, clock: &Clock, key: u64, addr: u64, bytes: u64) -> Vec<Operation> {
        let (end, through) = (key + bytes, addr.wrapping_sub(key));
        let before = self.segments.range(..key).next_back().filter(|(_, s)| s.end > key);
        let mut found: Vec<Operation> = Vec::new();
        for (_, s) in before.into_iter().chain(self.segments.range(key..end)) {
            let past = s.write.iter().chain(&s.reads);
            for p in past.filter(|p| p.through == through && !clock.knows(p.agent, p.epoch)) {
                if !found.contains(&p.operation) {
                    found.push(p.operation.clone());
                }
            }
        }
        found
    }

    /// Removes a range, whose memory is about to be reused.
    pub(crate) fn forget(&mut self, key: u64, bytes: u64) {
        if !self.on || bytes == 0 {
            return;
        }
        self.split(key);
        self.split(key + bytes);
        let inside: Vec<u64> =
            self.segments.range(key..key + bytes).map(|(&from, _)| from).collect();
        inside.into_iter().for_each(|from| drop(self.segments.remove(&from)));
    }

    /// Removes accesses that every agent knows, once there are many. `known` returns the common
    /// clock of all agents.
    pub(crate) fn compact(&mut self, known: impl FnOnce() -> Clock) {
        if self.segments.len() < self.compact_at {
            return;
        }
        let known = known();
        let mut merged: BTreeMap<u64, Segment> = BTreeMap::new();
        for (from, mut s) in std::mem::take(&mut self.segments) {
            s.write = s.write.filter(|p| !known.knows(p.agent, p.epoch));
            s.reads.retain(|p| !known.knows(p.agent, p.epoch));
            let bare = s.write.is_none() && s.reads.is_empty();
            if bare && (!s.written || from < super::space::STORE) {
                continue;
            }
            if let Some((_, last)) = merged.range_mut(..from).next_back()
                && bare
                && last.end == from
                && last.write.is_none()
                && last.reads.is_empty()
            {
                last.end = s.end;
                continue;
            }
            merged.insert(from, s);
        }
        self.segments = merged;
        self.compact_at = (self.segments.len() * 2).max(4096);
    }
}

impl fmt::Debug for Detector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Detector")
            .field("segments", &self.segments.len())
            .field("reports", &self.reports)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_before_in_a_graph_is_found_over_several_edges() {
        let graph = Ancestors::new(vec![vec![], vec![0], vec![0], vec![1], vec![3, 2]]);
        for (a, b, before) in
            [(0, 4, true), (1, 4, true), (2, 3, false), (1, 2, false), (0, 0, true), (4, 0, false)]
        {
            assert_eq!(graph.before(a, b), before, "{a} before {b}");
            assert!(a >= b || graph.search(a, b) == before, "{a} before {b}, searched");
        }
    }
}
