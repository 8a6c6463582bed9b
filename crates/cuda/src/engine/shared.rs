//! Tables that all devices of a backend share.
//!
//! | table | key | writers |
//! |---|---|---|
//! | ranges | an address | the allocators' backings |
//! | externals | a timeline | external streams, at their start |
//! | grants | a device | a device that gets access to another's memory |
//!
//! The timelines have tables of their own, which belong to `leasehold_hal::engine`.
//!
//! All locks here are leaves and are held for a few instructions. A thread remembers the last
//! ranges that it found, because every copy asks where its memory is.
//!
//! This module must not know how streams run.

use super::core::Core;
use super::driver_context::DriverContext;
use super::external::Externals;
use super::stream::CudaStream;
use crate::config::CudaConfig;
use crate::driver::ops::CudaSlowOps;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex, RwLock};
use leasehold_core::{Error, Result};
use leasehold_hal::engine::tables::Tables;
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Weak;

/// The place of memory at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The device with this number.
    Device(u32),
    /// Pinned host memory.
    Pinned,
}

/// A range that a thread found, and the state of the table in which it did.
#[derive(Clone, Copy)]
struct Found {
    state: u64,
    start: u64,
    end: u64,
    place: Place,
}

/// Ranges that a thread remembers, by address.
const FOUND: usize = 4;
/// Ranges are multiples of this many bytes, as a rule.
const SPAN: u64 = 2 << 20;
/// The last state of any table of ranges: no two tables are ever in the same state.
static STATES: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static LAST: [Cell<Found>; FOUND] = const {
        [const { Cell::new(Found { state: 0, start: 0, end: 0, place: Place::Pinned }) }; FOUND]
    };
}

fn new_state() -> u64 {
    STATES.fetch_add(1, Ordering::Relaxed) + 1
}

/// The devices that may use a device's memory beside itself, and the mapped pieces of that memory.
#[derive(Default)]
struct Grant {
    peers: Vec<u32>,
    mapped: BTreeMap<u64, u64>,
}

/// The tables that all devices of a backend share.
pub struct Shared {
    /// The driver.
    pub ops: Arc<dyn CudaSlowOps>,
    /// The settings.
    pub config: CudaConfig,
    /// The timelines of all streams and host timelines.
    pub tables: Arc<Tables<CudaStream>>,
    /// The streams of other libraries.
    pub(crate) externals: Externals,
    ranges: RwLock<BTreeMap<u64, (u64, Place)>>,
    /// The state of `ranges`. Written in its lock.
    state: AtomicU64,
    grants: Mutex<HashMap<u32, Grant>>,
    /// The kernels' names by function, for reports.
    functions: RwLock<HashMap<u64, Box<str>>>,
    /// The primary contexts that are open.
    primaries: Mutex<HashMap<u32, Weak<Core>>>,
}

impl Shared {
    /// Makes empty tables.
    #[must_use]
    pub fn new(ops: Arc<dyn CudaSlowOps>, config: CudaConfig) -> Self {
        Self {
            ops,
            config,
            tables: Arc::default(),
            externals: Externals::default(),
            ranges: RwLock::new(BTreeMap::new()),
            state: AtomicU64::new(new_state()),
            grants: Mutex::new(HashMap::new()),
            functions: RwLock::new(HashMap::new()),
            primaries: Mutex::new(HashMap::new()),
        }
    }

    /// Records the place of a range.
    pub fn add_range(&self, addr: u64, bytes: u64, place: Place) {
        let mut ranges = self.ranges.write();
        ranges.insert(addr, (addr + bytes, place));
        self.state.store(new_state(), Ordering::Release);
    }

    /// Removes a range.
    pub fn remove_range(&self, addr: u64) {
        let mut ranges = self.ranges.write();
        ranges.remove(&addr);
        self.state.store(new_state(), Ordering::Release);
    }

    /// The place of a range. `None` for memory that this backend does not know, and for a range
    /// that exceeds the recorded range at its start.
    #[inline]
    #[must_use]
    pub fn place(&self, addr: u64, bytes: u64) -> Option<Place> {
        // A thread that was told of an address after the range changed sees the new state.
        let state = self.state.load(Ordering::Acquire);
        let found = LAST.with(|last| last[(addr / SPAN) as usize % FOUND].get());
        let found = if found.state == state && found.start <= addr && addr < found.end {
            found
        } else {
            self.find(state, addr)?
        };
        (bytes <= found.end - addr).then_some(found.place)
    }

    /// Finds the range with an address and remembers it for `state`, which was read before.
    #[cold]
    fn find(&self, state: u64, addr: u64) -> Option<Found> {
        let (&start, &(end, place)) = self.ranges.read().range(..=addr).next_back()?;
        let found = Found { state, start, end, place };
        (addr < end).then(|| {
            LAST.with(|last| last[(addr / SPAN) as usize % FOUND].set(found));
            found
        })
    }

    /// Records a mapped piece, and returns the devices that may use the piece beside its owner.
    pub fn mapped(&self, owner: u32, addr: u64, bytes: u64) -> Vec<u32> {
        let mut grants = self.grants.lock();
        let grant = grants.entry(owner).or_default();
        grant.mapped.insert(addr, bytes);
        grant.peers.clone()
    }

    /// The devices that may use the memory of `owner` beside itself.
    pub fn peers(&self, owner: u32) -> Vec<u32> {
        self.grants.lock().get(&owner).map(|g| g.peers.clone()).unwrap_or_default()
    }

    /// Removes a mapped piece.
    pub fn unmapped(&self, owner: u32, addr: u64) {
        if let Some(grant) = self.grants.lock().get_mut(&owner) {
            grant.mapped.remove(&addr);
        }
    }

    /// Whether a piece is mapped.
    pub fn has_piece(&self, owner: u32, addr: u64) -> bool {
        self.grants.lock().get(&owner).is_some_and(|g| g.mapped.contains_key(&addr))
    }

    /// Grants `peer` access to the memory of `owner` from now on, and returns the pieces that are
    /// already mapped. `None` if `peer` had access before.
    pub fn grant_access(&self, owner: u32, peer: u32) -> Option<Vec<(u64, u64)>> {
        let mut grants = self.grants.lock();
        let grant = grants.entry(owner).or_default();
        if grant.peers.contains(&peer) {
            return None;
        }
        grant.peers.push(peer);
        Some(grant.mapped.iter().map(|(&a, &b)| (a, b)).collect())
    }

    /// Revokes the access of `peer` to the memory of `owner`.
    pub fn revoke_access(&self, owner: u32, peer: u32) {
        if let Some(grant) = self.grants.lock().get_mut(&owner) {
            grant.peers.retain(|&g| g != peer);
        }
    }

    /// Whether `peer` has access to the memory of `owner`.
    pub fn has_access(&self, owner: u32, peer: u32) -> bool {
        self.grants.lock().get(&owner).is_some_and(|g| g.peers.contains(&peer))
    }

    /// Lets the owner of a piece and its peers use the piece. The calls have the context of
    /// `context` current. A peer whose device is lost loses its access: the owner needs its memory.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// - The range is a mapped piece of the owner's, or was one. The driver refuses a range that is
    ///   not mapped.
    pub(crate) unsafe fn open_to_peers(
        &self,
        context: &DriverContext,
        owner: u32,
        addr: u64,
        bytes: u64,
    ) -> Result<()> {
        let open = || {
            let mut who = self.peers(owner);
            who.insert(0, owner);
            // SAFETY: the caller vouches for the range.
            context.relaxed(|ops| unsafe { ops.set_access(addr, bytes, &who) })
        };
        match open() {
            Err(Error::Driver { .. }) if self.revoke_lost(owner) => open(),
            other => other,
        }
    }

    /// Revokes the access of peers whose devices are lost. Returns whether there were any.
    fn revoke_lost(&self, owner: u32) -> bool {
        let is_lost = |&peer: &u32| {
            let Some(core) = self.primary(peer) else { return false };
            // The peer's driver context may not know of the loss yet.
            core.context.within(|ops| ops.memory_info()).is_err() && core.context.loss().is_some()
        };
        let lost: Vec<u32> = self.peers(owner).into_iter().filter(is_lost).collect();
        lost.iter().for_each(|&peer| self.revoke_access(owner, peer));
        !lost.is_empty()
    }

    /// Records a function's name.
    pub fn name_function(&self, function: u64, name: &str) {
        self.functions.write().insert(function, name.into());
    }

    /// A function's name.
    pub fn function_name(&self, function: u64) -> Option<String> {
        self.functions.read().get(&function).map(|n| n.to_string())
    }

    /// Removes a function's name.
    pub fn forget_function(&self, function: u64) {
        self.functions.write().remove(&function);
    }

    /// Records a device's open primary context.
    pub fn add_primary(&self, core: &Arc<Core>) {
        self.primaries.lock().insert(core.context.ordinal(), Arc::downgrade(core));
    }

    /// A device's primary context, if the context is open.
    pub fn primary(&self, ordinal: u32) -> Option<Arc<Core>> {
        self.primaries.lock().get(&ordinal)?.upgrade()
    }

    /// Removes every access that a closed device granted or had.
    pub fn close(&self, ordinal: u32) {
        let mut grants = self.grants.lock();
        grants.remove(&ordinal);
        grants.values_mut().for_each(|g| g.peers.retain(|&x| x != ordinal));
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("config", &self.config).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "../../tests/unit/shared.rs"]
mod tests;
