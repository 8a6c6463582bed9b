//! Tables that all devices of a backend share.
//!
//! | table | key | writers |
//! |---|---|---|
//! | origins | a timeline | streams and host timelines, at their start and end |
//! | waits | a timeline | a stream that defers a submission adds, the signaller removes |
//! | ranges | an address | the allocators' backings |
//! | grants | a device | a device that gets access to another's memory |
//!
//! The signaller of a timeline resumes the streams that it removes from the waits.
//!
//! All locks here are leaves and are held for a few instructions.
//!
//! This module must not know how streams run.

use super::core::Core;
use super::driver_context::DriverContext;
use super::stream::StreamCore;
use crate::config::CudaConfig;
use crate::driver::ops::CudaSlowOps;
use leasehold_core::sync::{Arc, Mutex, RwLock};
use leasehold_core::{Error, Result, Timeline, TimelineId, Timepoint};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Weak;

/// The signaller of a timeline.
#[derive(Clone)]
pub enum Origin {
    /// A stream of this backend.
    Stream(Weak<StreamCore>),
    /// A host timeline of this backend.
    HostTimeline,
}

/// The place of memory at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The device with this number.
    Device(u32),
    /// Pinned host memory.
    Pinned,
}

/// A stream that waits for a timepoint which the driver does not know yet.
type Waiting = (Timepoint, Weak<StreamCore>);

/// The devices that are admitted to a device's memory, and the mapped pieces of that memory.
#[derive(Default)]
struct Grant {
    guests: Vec<u32>,
    mapped: BTreeMap<u64, u64>,
}

/// The tables that all devices of a backend share.
pub struct Shared {
    /// The driver.
    pub ops: Arc<dyn CudaSlowOps>,
    /// The settings.
    pub config: CudaConfig,
    origins: RwLock<HashMap<TimelineId, Origin>>,
    waits: Mutex<Vec<Waiting>>,
    ranges: RwLock<BTreeMap<u64, (u64, Place)>>,
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
            origins: RwLock::new(HashMap::new()),
            waits: Mutex::new(Vec::new()),
            ranges: RwLock::new(BTreeMap::new()),
            grants: Mutex::new(HashMap::new()),
            functions: RwLock::new(HashMap::new()),
            primaries: Mutex::new(HashMap::new()),
        }
    }

    /// Records the signaller of a timeline.
    pub fn add_origin(&self, timeline: &Timeline, origin: Origin) {
        self.origins.write().insert(timeline.id(), origin);
    }

    /// Removes the signaller of a timeline.
    pub fn remove_origin(&self, timeline: &Timeline) {
        self.origins.write().remove(&timeline.id());
    }

    /// The signaller of a timeline. `None` for a timeline of another backend.
    pub fn origin(&self, timeline: TimelineId) -> Option<Origin> {
        self.origins.read().get(&timeline).cloned()
    }

    /// Records that a stream waits for a timepoint. If the table is full, the call first removes
    /// the entries whose timepoints are over.
    pub fn note_wait(&self, point: Timepoint, stream: &Weak<StreamCore>) {
        let mut over = Vec::new();
        let mut waits = self.waits.lock();
        if waits.len() == waits.capacity() {
            waits.retain(|(p, s)| {
                let waiting = matches!(p.timeline().check(p.value()), Ok(false));
                if !waiting {
                    over.extend(s.upgrade());
                }
                waiting && s.strong_count() > 0
            });
        }
        waits.push((point, stream.clone()));
        drop(waits);
        // The thread that gave such a timepoint to the driver may not have called `wake` yet, and
        // would not find the entry.
        over.iter().for_each(|stream| stream.attend());
    }

    /// The largest value of a timeline that some stream waits for.
    pub fn most_waited(&self, timeline: TimelineId) -> Option<u64> {
        self.waits
            .lock()
            .iter()
            .filter(|(p, _)| p.timeline_id() == timeline)
            .map(|(p, _)| p.value())
            .max()
    }

    /// Resumes the streams that wait for `timeline` up to `value`. The caller holds no stream's
    /// lock.
    pub fn wake(&self, timeline: TimelineId, value: u64) {
        loop {
            // A batch has a fixed size: the loop allocates nothing, and a stream's last reference
            // drops without the lock.
            let mut some: [Option<Waiting>; 8] = Default::default();
            {
                let mut waits = self.waits.lock();
                let mut n = 0;
                let mut i = 0;
                while i < waits.len() && n < some.len() {
                    if waits[i].0.timeline_id() == timeline && waits[i].0.value() <= value {
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

    /// Records the place of a range.
    pub fn add_range(&self, addr: u64, bytes: u64, place: Place) {
        self.ranges.write().insert(addr, (addr + bytes, place));
    }

    /// Removes a range.
    pub fn remove_range(&self, addr: u64) {
        self.ranges.write().remove(&addr);
    }

    /// The place of a range. `None` for memory that this backend does not know, and for a range
    /// that exceeds the recorded range at its start.
    #[must_use]
    pub fn place(&self, addr: u64, bytes: u64) -> Option<Place> {
        let ranges = self.ranges.read();
        let (_, &(end, place)) = ranges.range(..=addr).next_back()?;
        (addr < end && bytes <= end - addr).then_some(place)
    }

    /// Records a mapped piece, and returns the devices that may use the piece beside its owner.
    pub fn mapped(&self, owner: u32, addr: u64, bytes: u64) -> Vec<u32> {
        let mut grants = self.grants.lock();
        let grant = grants.entry(owner).or_default();
        grant.mapped.insert(addr, bytes);
        grant.guests.clone()
    }

    /// The devices that may use the memory of `owner` beside itself.
    pub fn guests(&self, owner: u32) -> Vec<u32> {
        self.grants.lock().get(&owner).map(|g| g.guests.clone()).unwrap_or_default()
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

    /// Admits `guest` to the memory of `owner` from now on, and returns the pieces that are already
    /// mapped. `None` if `guest` was admitted before.
    pub fn admit_peer(&self, owner: u32, guest: u32) -> Option<Vec<(u64, u64)>> {
        let mut grants = self.grants.lock();
        let grant = grants.entry(owner).or_default();
        if grant.guests.contains(&guest) {
            return None;
        }
        grant.guests.push(guest);
        Some(grant.mapped.iter().map(|(&a, &b)| (a, b)).collect())
    }

    /// Revokes an admission.
    pub fn uninvite(&self, owner: u32, guest: u32) {
        if let Some(grant) = self.grants.lock().get_mut(&owner) {
            grant.guests.retain(|&g| g != guest);
        }
    }

    /// Whether `guest` was admitted to the memory of `owner`.
    pub fn is_guest(&self, owner: u32, guest: u32) -> bool {
        self.grants.lock().get(&owner).is_some_and(|g| g.guests.contains(&guest))
    }

    /// Lets the owner of a piece and its guests use the piece. The calls have the context of
    /// `context` current. A guest whose device is lost is admitted no more: the owner needs its
    /// memory.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// - The range is a mapped piece of the owner's, or was one. The driver refuses a range that is
    ///   not mapped.
    pub(crate) unsafe fn admit(
        &self,
        context: &DriverContext,
        owner: u32,
        addr: u64,
        bytes: u64,
    ) -> Result<()> {
        let admitted = || {
            let mut who = self.guests(owner);
            who.insert(0, owner);
            // SAFETY: the caller vouches for the range.
            context.within(|ops| unsafe { ops.set_access(addr, bytes, &who) })
        };
        match admitted() {
            Err(Error::Driver { .. }) if self.dismiss_lost(owner) => admitted(),
            other => other,
        }
    }

    /// Revokes the admissions of guests whose devices are lost. Returns whether there were any.
    fn dismiss_lost(&self, owner: u32) -> bool {
        let is_lost = |&guest: &u32| {
            let Some(core) = self.primary(guest) else { return false };
            // The guest's driver context may not know of the loss yet.
            core.context.within(|ops| ops.memory_info()).is_err() && core.context.loss().is_some()
        };
        let lost: Vec<u32> = self.guests(owner).into_iter().filter(is_lost).collect();
        lost.iter().for_each(|&guest| self.uninvite(owner, guest));
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

    /// Removes every admission that a closed device gave or got.
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
