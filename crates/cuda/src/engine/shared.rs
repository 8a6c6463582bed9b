//! What all devices of a backend share.
//!
//! | table | key | who writes |
//! |---|---|---|
//! | origins | a line | streams and gates, when they are made and when they end |
//! | waits | a line | who defers a submission that waits for it; whoever advances the line takes them out and goes on with the streams |
//! | ranges | an address | the allocators' backings |
//! | grants | a device | who is let into whose memory |
//!
//! All locks here are leaves and held for a few instructions.
//!
//! This module must not know how streams run.

use super::core::Core;
use super::stream::StreamCore;
use crate::config::CudaConfig;
use crate::driver::ops::CudaSlowOps;
use leasehold_core::sync::{Arc, Mutex, RwLock};
use leasehold_core::{Line, LineId, Point};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Weak;

/// Who advances a line.
#[derive(Clone)]
pub enum Origin {
    /// A stream of this backend.
    Stream(Weak<StreamCore>),
    /// A gate of this backend.
    Gate,
}

/// Whose memory an address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The device with this number.
    Device(u32),
    /// Pinned host memory.
    Pinned,
}

/// A stream that waits for a point which the driver does not know yet.
type Waiting = (Point, Weak<StreamCore>);

/// Who is let into a device's memory, and what is mapped of it.
#[derive(Default)]
struct Grant {
    guests: Vec<u32>,
    mapped: BTreeMap<u64, u64>,
}

/// The tables.
pub struct Shared {
    /// The driver.
    pub ops: Arc<dyn CudaSlowOps>,
    /// The settings.
    pub config: CudaConfig,
    origins: RwLock<HashMap<LineId, Origin>>,
    waits: Mutex<Vec<Waiting>>,
    ranges: RwLock<BTreeMap<u64, (u64, Place)>>,
    grants: Mutex<HashMap<u32, Grant>>,
    /// The kernels' names by function, for reports.
    functions: RwLock<HashMap<u64, Box<str>>>,
    /// The primary contexts that are open.
    primaries: Mutex<HashMap<u32, Weak<Core>>>,
}

impl Shared {
    /// Empty tables.
    #[must_use]
    pub fn new(ops: Arc<dyn CudaSlowOps>, config: CudaConfig) -> Self {
        Self {
            ops,
            config,
            origins: RwLock::new(HashMap::new()),
            waits: Mutex::new(Vec::new()),
            ranges: RwLock::new(BTreeMap::new()),
            grants: Mutex::new(HashMap::new()),
            functions: RwLock::new(HashMap::new()),
            primaries: Mutex::new(HashMap::new()),
        }
    }

    /// Notes who advances a line.
    pub fn add_origin(&self, line: &Line, origin: Origin) {
        self.origins.write().insert(line.id(), origin);
    }

    /// Nobody of ours advances the line any more.
    pub fn remove_origin(&self, line: &Line) {
        self.origins.write().remove(&line.id());
    }

    /// Who advances a line; `None` for another backend's.
    pub fn origin(&self, line: LineId) -> Option<Origin> {
        self.origins.read().get(&line).cloned()
    }

    /// Notes that a stream waits for a point. Where there are many, those go whose point is over.
    pub fn note_wait(&self, point: Point, stream: &Weak<StreamCore>) {
        let mut over = Vec::new();
        let mut waits = self.waits.lock();
        if waits.len() == waits.capacity() {
            waits.retain(|(p, s)| {
                let waiting = matches!(p.line().check(p.value()), Ok(false));
                if !waiting {
                    over.extend(s.upgrade());
                }
                waiting && s.strong_count() > 0
            });
        }
        waits.push((point, stream.clone()));
        drop(waits);
        // The thread that gave such a point to the driver may not have come to `wake`, and will not find the note.
        over.iter().for_each(|stream| stream.attend());
    }

    /// The largest value of a line that is waited for.
    pub fn most_waited(&self, line: LineId) -> Option<u64> {
        self.waits.lock().iter().filter(|(p, _)| p.line_id() == line).map(|(p, _)| p.value()).max()
    }

    /// Goes on with the streams that wait for `line` up to `value`. Called without a lock of a stream.
    pub fn wake(&self, line: LineId, value: u64) {
        loop {
            // A few at a time, so that nothing is allocated and a stream that ends drops without the lock.
            let mut some: [Option<Waiting>; 8] = Default::default();
            {
                let mut waits = self.waits.lock();
                let mut n = 0;
                let mut i = 0;
                while i < waits.len() && n < some.len() {
                    if waits[i].0.line_id() == line && waits[i].0.value() <= value {
                        some[n] = Some(waits.remove(i));
                        n += 1;
                    } else {
                        i += 1;
                    }
                }
            }
            if some[0].is_none() {
                return;
            }
            for (_, stream) in some.into_iter().flatten() {
                if let Some(stream) = stream.upgrade() {
                    stream.pump();
                }
            }
        }
    }

    /// Notes whose memory a range is.
    pub fn add_range(&self, addr: u64, bytes: u64, place: Place) {
        self.ranges.write().insert(addr, (addr + bytes, place));
    }

    /// Forgets a range.
    pub fn remove_range(&self, addr: u64) {
        self.ranges.write().remove(&addr);
    }

    /// Whose memory a range is; `None` for memory of nobody here, and for a range that goes beyond what it begins in.
    #[must_use]
    pub fn place(&self, addr: u64, bytes: u64) -> Option<Place> {
        let ranges = self.ranges.read();
        let (_, &(end, place)) = ranges.range(..=addr).next_back()?;
        (addr < end && bytes <= end - addr).then_some(place)
    }

    /// Notes that a piece was mapped; gives who may use it beside its device.
    pub fn mapped(&self, owner: u32, addr: u64, bytes: u64) -> Vec<u32> {
        let mut grants = self.grants.lock();
        let grant = grants.entry(owner).or_default();
        grant.mapped.insert(addr, bytes);
        grant.guests.clone()
    }

    /// Who may use the memory of `owner` beside itself.
    pub fn guests(&self, owner: u32) -> Vec<u32> {
        self.grants.lock().get(&owner).map(|g| g.guests.clone()).unwrap_or_default()
    }

    /// Forgets a piece.
    pub fn unmapped(&self, owner: u32, addr: u64) {
        if let Some(grant) = self.grants.lock().get_mut(&owner) {
            grant.mapped.remove(&addr);
        }
    }

    /// Whether a piece is mapped.
    pub fn has_piece(&self, owner: u32, addr: u64) -> bool {
        self.grants.lock().get(&owner).is_some_and(|g| g.mapped.contains_key(&addr))
    }

    /// Lets `guest` into the memory of `owner` from now on; gives the pieces that are mapped already. `None` when it was let in before.
    pub fn invite(&self, owner: u32, guest: u32) -> Option<Vec<(u64, u64)>> {
        let mut grants = self.grants.lock();
        let grant = grants.entry(owner).or_default();
        if grant.guests.contains(&guest) {
            return None;
        }
        grant.guests.push(guest);
        Some(grant.mapped.iter().map(|(&a, &b)| (a, b)).collect())
    }

    /// Takes an invitation back that could not be carried out.
    pub fn uninvite(&self, owner: u32, guest: u32) {
        if let Some(grant) = self.grants.lock().get_mut(&owner) {
            grant.guests.retain(|&g| g != guest);
        }
    }

    /// Whether `guest` was let into the memory of `owner`.
    pub fn is_guest(&self, owner: u32, guest: u32) -> bool {
        self.grants.lock().get(&owner).is_some_and(|g| g.guests.contains(&guest))
    }

    /// Notes how a function is called.
    pub fn name_function(&self, function: u64, name: &str) {
        self.functions.write().insert(function, name.into());
    }

    /// How a function is called.
    pub fn function_name(&self, function: u64) -> Option<String> {
        self.functions.read().get(&function).map(|n| n.to_string())
    }

    /// Forgets a function.
    pub fn forget_function(&self, function: u64) {
        self.functions.write().remove(&function);
    }

    /// Notes a device's open primary context.
    pub fn add_primary(&self, core: &Arc<Core>) {
        self.primaries.lock().insert(core.door.ordinal(), Arc::downgrade(core));
    }

    /// A device's primary context, if it is open.
    pub fn primary(&self, ordinal: u32) -> Option<Arc<Core>> {
        self.primaries.lock().get(&ordinal)?.upgrade()
    }

    /// A device that is closed lets nobody in, and is let in nowhere.
    pub fn close(&self, ordinal: u32) {
        let mut grants = self.grants.lock();
        grants.remove(&ordinal);
        grants.values_mut().for_each(|g| g.guests.retain(|&x| x != ordinal));
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("config", &self.config).finish_non_exhaustive()
    }
}
