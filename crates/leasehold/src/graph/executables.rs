//! The executables of a device's graphs: made when they are needed, counted, and taken back within
//! a budget.
//!
//! A graph keeps its plan and its leases. Its executable is the driver's form of the plan, and
//! takes memory of the driver. An executable can be made again at any time, so the manager takes
//! those of idle graphs back when others need room, the least recently launched first.
//!
//! # Protocol
//! * Room comes before the executable. A maker reserves as many bytes as it expects. If they are
//!   not there, the manager drops executables of idle graphs first. The charge of an executable is
//!   what it says of itself once it is made.
//! * A charge ends after its executable. If a launch still runs then, the backend holds the
//!   executable, and the charge stays until the launch has passed.
//! * A graph gives its executables up under the lock of its own state, after its last launch has
//!   passed. A launch holds that lock from the look at its executable to the mark of its
//!   submission. So nothing is taken between the two, nor while it runs.
//! * A graph whose launch has asked for room keeps its executable until that launch is submitted.
//!   Two graphs that share the room of one take turns.
//!
//! # Recency
//! A launch notes nothing for the manager: it counts itself, and notes its timepoint. Whenever room
//! is short, the manager compares the counts with those of the round before. Graphs that were
//! launched since then are the most recent, and the timepoint orders those of one stream.
//!
//! # Locks
//! The manager's lock is below the state of a graph. Under it nothing is dropped and no driver is
//! called, and another graph's state is only tried.
//!
//! This module must not know plans, streams, or what else a graph holds.

use leasehold_alloc::Allocator;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Budgeted, Error, Lease, PackedTimepoint, Result, Timepoint};
use leasehold_hal::GraphExec;
use std::sync::Weak;

/// An executable that is taken back after fewer launches than this has not paid for itself.
const WORTHWHILE: u64 = 8;

/// A graph, as the manager sees it.
pub(crate) trait Holder: Send + Sync {
    /// Its state; `None` while it is in use, or has no executable.
    fn look(&self) -> Option<Look>;

    /// Gives up all executables, if its last launch has passed.
    fn give_up(&self) -> Option<GivenUp>;
}

/// The state of a graph with an executable.
pub(crate) struct Look {
    /// The number of its launches.
    pub(crate) launches: u64,
    /// The last launch.
    pub(crate) last: PackedTimepoint,
    /// Its executables stay: they cannot be made again without others.
    pub(crate) stays: bool,
    /// Bytes of its executables.
    pub(crate) bytes: u64,
}

/// Executables that a graph has given up.
pub(crate) struct GivenUp {
    /// They go when this value goes.
    pub(crate) executables: Vec<Executable>,
    /// Launches since the executable was made again; `None` if it was made with the graph.
    pub(crate) served: Option<u64>,
}

/// The occasion on which an executable is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Occasion {
    /// A new graph, or an update.
    New,
    /// A launch, after the executable was taken back.
    Launch,
}

/// A plan's demand for room.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Demand {
    pub(crate) nodes: usize,
    /// Bytes of the plan's last executable, if there was one.
    pub(crate) known: Option<u64>,
    pub(crate) occasion: Occasion,
}

/// Graphs that the manager looked at. One of them may be held by nobody else any more, and what it
/// holds may be anybody's closure. So the caller drops this value without the state of its own.
#[derive(Default)]
#[must_use]
pub(crate) struct Seen(Vec<Arc<dyn Holder>>);

/// The outcome of a request for an executable.
#[must_use]
pub(crate) enum Made {
    /// It is there.
    Now(Executable),
    /// The room is in use. The caller asks again after this launch, or a moment later.
    After(Option<Timepoint>),
}

/// The outcome of a request for room.
enum Room {
    /// So many bytes are reserved.
    Reserved(u64),
    /// There may be room after this launch, or a moment later.
    After(Option<Timepoint>),
}

/// An executable with its charge. The order of the fields is that of their end.
pub(crate) struct Executable {
    exec: Lease<dyn GraphExec>,
    charge: Charge,
}

impl Executable {
    /// The backend's object.
    #[inline]
    pub(crate) fn exec(&self) -> &Lease<dyn GraphExec> {
        &self.exec
    }

    /// Notes a launch.
    #[inline]
    pub(crate) fn launched(&mut self, at: Timepoint) {
        self.charge.last = at.into();
    }

    /// The last launch.
    pub(crate) fn last(&self) -> PackedTimepoint {
        self.charge.last
    }

    /// The bytes that it is charged with.
    pub(crate) fn bytes(&self) -> u64 {
        self.charge.bytes
    }
}

/// Bytes that count as taken until the last launch has passed.
struct Charge {
    of: Arc<Executables>,
    bytes: u64,
    last: PackedTimepoint,
    /// The executable is there.
    made: bool,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.of.release(self);
    }
}

/// The executables of a runtime's graphs in numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GraphStats {
    /// Bytes of executables, and room that is reserved for those being made.
    pub bytes: u64,
    /// The most that `bytes` was.
    pub peak: u64,
    /// The budget; `u64::MAX` when there is none.
    pub limit: u64,
    /// Executables that are there (count).
    pub executables: u64,
    /// Executables that were made, ever (count).
    pub made: u64,
    /// Those that a launch made again after they had been taken back (count).
    pub made_again: u64,
    /// Graphs whose executables were taken back, ever (count).
    pub taken_back: u64,
    /// The graphs in use do not fit the budget: a launch took an executable back that had come back
    /// for fewer than eight launches itself. A warning has said so, once.
    pub thrashing: bool,
}

/// A graph that may have executables.
struct Entry {
    graph: Weak<dyn Holder>,
    launches: u64,
    /// The round in which it was last seen to have been launched.
    round: u64,
}

#[derive(Default)]
struct State {
    stats: GraphStats,
    /// Charges without an executable, whose launches may still run.
    leaving: Vec<(Timepoint, u64)>,
    graphs: Vec<Entry>,
    round: u64,
    /// Bytes and nodes of all executables that were made, to foretell the size of others.
    measured: (u64, u64),
}

/// An idle graph, and when it was launched.
struct Candidate {
    recency: (u64, u64),
    look: Look,
    graph: Arc<dyn Holder>,
}

/// Owns the budget of a runtime's executables.
pub(crate) struct Executables {
    state: Mutex<State>,
    /// Shows the bytes in its reports.
    memory: Allocator,
}

impl State {
    /// Gives up the charges whose launches have passed.
    fn settle(&mut self) {
        let bytes = &mut self.stats.bytes;
        self.leaving.retain(|(last, charge)| {
            let over = last.has_passed();
            *bytes -= if over { *charge } else { 0 };
            !over
        });
    }

    /// The bytes that an executable will probably take: as before, or else as others of as many
    /// nodes. Those are a guess, for which no graph is refused.
    fn foretold(&self, demand: &Demand) -> u64 {
        let (bytes, nodes) = self.measured;
        let by_nodes = || (demand.nodes as u64).saturating_mul(bytes).div_ceil(nodes.max(1));
        demand.known.unwrap_or_else(|| by_nodes().min(self.stats.limit))
    }

    /// The graphs, by the time of their last launch. One whose state is in use is left alone. (The
    /// value may be its last lease, so it goes without the manager's lock.)
    fn by_recency(&mut self) -> Vec<Candidate> {
        self.round += 1;
        let round = self.round;
        let mut all = Vec::with_capacity(self.graphs.len());
        self.graphs.retain_mut(|entry| {
            let Some(graph) = entry.graph.upgrade() else { return false };
            let look = graph.look().unwrap_or(Look::IN_USE);
            if look.launches > entry.launches {
                (entry.launches, entry.round) = (look.launches, round);
            }
            all.push(Candidate { recency: (entry.round, look.last.to_bits()), look, graph });
            true
        });
        all.sort_by_key(|c| c.recency);
        all
    }
}

impl Look {
    const IN_USE: Look = Look { launches: 0, last: PackedTimepoint::NEVER, stays: true, bytes: 0 };
}

impl Executables {
    pub(crate) fn new(memory: Allocator) -> Arc<Self> {
        let stats = GraphStats { limit: u64::MAX, ..GraphStats::default() };
        let state = State { stats, ..State::default() };
        Arc::new(Self { state: Mutex::new(state), memory })
    }

    /// Makes a graph known, whose executables may be taken back from now on.
    pub(crate) fn register(&self, graph: Weak<dyn Holder>) {
        let mut state = self.state.lock();
        let graphs = &mut state.graphs;
        if graphs.len() == graphs.capacity() {
            graphs.retain(|entry| entry.graph.strong_count() > 0);
        }
        let round = state.round + 1;
        state.graphs.push(Entry { graph, launches: 0, round });
    }

    /// Has an executable made within the budget. Takes those of idle graphs back first if it must.
    /// Waits for nothing but the driver. The demand knows the bytes afterwards.
    ///
    /// # Errors
    /// `OverBudget` for an executable that the budget does not hold; the error of `make`.
    pub(crate) fn make(
        self: &Arc<Self>,
        demand: &mut Demand,
        seen: &mut Seen,
        make: impl FnOnce() -> Result<Lease<dyn GraphExec>>,
    ) -> Result<Made> {
        let bytes = match self.reserve(demand, 0, seen)? {
            Room::Reserved(bytes) => bytes,
            Room::After(after) => return Ok(Made::After(after)),
        };
        let mut charge =
            Charge { of: self.clone(), bytes, last: PackedTimepoint::NEVER, made: false };
        let exec = make()?;
        let bytes = exec.bytes();
        demand.known = Some(bytes);
        let mut state = self.state.lock();
        let stats = &mut state.stats;
        stats.bytes = stats.bytes - charge.bytes + bytes;
        stats.executables += 1;
        stats.made += 1;
        stats.made_again += u64::from(demand.occasion == Occasion::Launch);
        state.measured.0 += bytes;
        state.measured.1 += demand.nodes as u64;
        drop(state);
        (charge.bytes, charge.made) = (bytes, true);
        let made = Executable { exec, charge };
        // Less was reserved than it takes, perhaps: then others make room now, or it goes again.
        let nothing = Demand { known: Some(0), ..*demand };
        Ok(match self.reserve(&nothing, bytes, seen)? {
            Room::Reserved(_) => Made::Now(made),
            Room::After(after) => Made::After(after),
        })
    }

    /// Takes room, for a maker that has so many bytes already. Without it: the launch after which
    /// there may be some.
    ///
    /// # Errors
    /// `OverBudget`.
    fn reserve(&self, demand: &Demand, has: u64, seen: &mut Seen) -> Result<Room> {
        loop {
            let mut state = self.state.lock();
            state.settle();
            let (bytes, limit) = (state.foretold(demand), state.stats.limit);
            let wanted = bytes.saturating_add(state.stats.bytes);
            if wanted <= limit {
                state.stats.bytes = wanted;
                self.note(&mut state);
                return Ok(Room::Reserved(bytes));
            }
            let graphs = state.by_recency();
            seen.0.extend(graphs.iter().map(|c| c.graph.clone()));
            let leaving = state.leaving.first().map(|(last, _)| *last);
            drop(state);
            let stays = graphs.iter().filter(|c| c.look.stays).map(|c| c.look.bytes).sum::<u64>();
            let requested = has.saturating_add(bytes);
            if stays.saturating_add(requested) > limit {
                return Err(Error::OverBudget {
                    unit: Budgeted::Executables,
                    requested,
                    used: stays,
                    limit,
                });
            }
            if self.take(&graphs, wanted - limit, demand.occasion) == 0 {
                let mut running = graphs.iter().filter(|c| !c.look.stays);
                return Ok(Room::After(
                    leaving.or_else(|| running.find_map(|c| c.look.last.timepoint())),
                ));
            }
        }
    }

    /// Takes executables back, of the least recent idle graphs first, until they make up the bytes.
    /// Returns the bytes.
    fn take(&self, graphs: &[Candidate], bytes: u64, occasion: Occasion) -> u64 {
        let mut taken = 0;
        for candidate in graphs.iter().filter(|c| !c.look.stays) {
            if taken >= bytes {
                break;
            }
            let Some(given_up) = candidate.graph.give_up() else { continue };
            taken += given_up.executables.iter().map(Executable::bytes).sum::<u64>();
            let mut state = self.state.lock();
            let stats = &mut state.stats;
            stats.taken_back += 1;
            let thrashes = occasion == Occasion::Launch
                && given_up.served.is_some_and(|launches| launches < WORTHWHILE);
            let warn = thrashes && !stats.thrashing;
            stats.thrashing |= thrashes;
            let (limit, bytes, graphs) = (stats.limit, stats.bytes, state.graphs.len());
            drop(state);
            // The executables go before the caller makes its own.
            drop(given_up);
            if warn {
                tracing::warn!(
                    graphs,
                    limit,
                    bytes,
                    "more graphs are launched in turn than the graph budget holds, so that launches instantiate them again; raise the budget \
                     (GraphBudget::set_limit), or launch fewer graphs in turn"
                );
            }
        }
        taken
    }

    /// Takes all idle executables back. Returns the bytes.
    pub(crate) fn take_idle(&self) -> u64 {
        let graphs = self.state.lock().by_recency();
        self.take(&graphs, u64::MAX, Occasion::New)
    }

    /// Sets the budget, and takes idle executables back that it does not hold.
    pub(crate) fn set_limit(&self, limit: u64) {
        let mut state = self.state.lock();
        state.stats.limit = limit;
        state.settle();
        let excess = state.stats.bytes.saturating_sub(limit);
        let graphs = if excess > 0 { state.by_recency() } else { Vec::new() };
        drop(state);
        self.take(&graphs, excess, Occasion::New);
    }

    /// The numbers.
    pub(crate) fn stats(&self) -> GraphStats {
        let mut state = self.state.lock();
        state.settle();
        self.note(&mut state);
        state.stats
    }

    /// Ends a charge.
    fn release(&self, charge: &Charge) {
        let mut state = self.state.lock();
        state.stats.executables -= u64::from(charge.made);
        match charge.last.timepoint() {
            Some(last) if !last.has_passed() => {
                state.leaving.push((last, charge.bytes));
            }
            _ => state.stats.bytes -= charge.bytes,
        }
        self.note(&mut state);
    }

    /// Notes a peak, and shows the bytes in the reports of the device's memory.
    fn note(&self, state: &mut State) {
        state.stats.peak = state.stats.peak.max(state.stats.bytes);
        self.memory.note_executables(state.stats.bytes);
    }
}
