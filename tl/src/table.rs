//! The object table: a sharded hash table from addresses to entries.
//!
//! The table knows addresses, counts and back-links as numbers. It must not know scopes, pools or
//! destructors. It must not dereference an object, or call the program while a shard is locked.
//!
//! # Protocol
//! Every access to an entry happens under its shard's lock. Entries move within their
//! shard, so other code keeps no reference to an entry. It keeps the address and the entry's
//! generation, and looks the entry up again. A generation is never used twice within a shard, and
//! an address always maps to the same shard. So (address, generation) names one life of one object.
//! The figures of reports (`live`, `tensors`, `bytes`) are written under the lock and may be read
//! without it.
//!
//! All addresses of one KiB map to one shard. So objects from one thread's arena are mostly in
//! shards that no other thread uses, and threads seldom meet at a lock.

use std::alloc::{self, Layout};
use std::ptr;

use leasehold_core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::heap::{self, NoMemory};
use crate::lock::{SpinGuard, SpinLock};

/// No record.
pub(crate) const NIL: u32 = u32::MAX;
/// The count from which an object is pinned: a leak is better than a free that comes too early
/// after a wrap.
pub(crate) const PINNED: u32 = 1 << 31;

const SHARD_BITS: u32 = 10;
const REGION_BITS: u32 = 10;
/// Slots of a shard's first table.
const FIRST_SLOTS: u32 = 8;
/// An empty shard with more slots than this frees its table.
const KEPT_SLOTS: u32 = 64;
/// 2^64 divided by the golden ratio: multiplicative hashing after Knuth, The Art of Computer
/// Programming, 6.4.
const FIBONACCI: u64 = 0x9E37_79B9_7F4A_7C15;

/// The kind of an object, which decides the effect of its last release.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Only acquired so far: the last release removes the entry and frees nothing.
    Untyped = 0,
    /// Memory from the C allocator: the last release is `free`.
    Struct = 1,
    /// A tensor: the last release gives it to the tensor pool, else to its destructor.
    Tensor = 2,
    /// A [`VecPtr`](crate::VecPtr): the last release releases every element, then frees the buffer
    /// and the container.
    VecPtr = 3,
    /// An object with its own destructor.
    Custom = 4,
}

/// The state of an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum EntryState {
    /// Counted.
    Live,
    /// A tensor without counts that waits on the work list of the thread that released it.
    Dying,
    /// A dying tensor that its thread is describing. Nothing revives it, so no code destroys it
    /// meanwhile.
    Described,
    /// A tensor that died in a scope that is still open.
    Quarantined,
    /// A tensor in the tensor pool.
    Pooled,
}

/// A thread other than `owner` keeps its newest record of this object in its own map.
pub(crate) const FOREIGN: u8 = 1;

/// An entry: one object. A cache line, to avoid false sharing.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Entry {
    /// The object's address; 0 marks a free slot.
    pub(crate) addr: usize,
    /// Names this life of the object.
    pub(crate) generation: u64,
    /// Bytes, 0 when unknown.
    pub(crate) size: u64,
    /// The destructor of a [`Kind::Custom`] object, as a number.
    pub(crate) destructor: usize,
    pub(crate) count: u32,
    /// The newest record of thread `owner` for this object, or [`NIL`]. For a pooled tensor: its
    /// shard.
    pub(crate) newest: u32,
    /// The thread that `newest` belongs to, 0 for none.
    pub(crate) owner: u32,
    /// Interned name, 0 for none.
    pub(crate) name: u32,
    pub(crate) kind: Kind,
    pub(crate) state: EntryState,
    pub(crate) flags: u8,
}

const _: () = assert!(size_of::<Entry>() == 64);

impl Entry {
    /// Makes this slot a live entry with one count.
    #[inline(always)]
    fn start(&mut self, addr: usize, kind: Kind, generation: u64) {
        self.addr = addr;
        self.generation = generation;
        self.size = 0;
        self.count = 1;
        self.newest = NIL;
        self.owner = 0;
        self.name = 0;
        self.kind = kind;
        self.state = EntryState::Live;
        self.flags = 0;
    }

    const FREE: Self = Self {
        addr: 0,
        generation: 0,
        size: 0,
        destructor: 0,
        count: 0,
        newest: NIL,
        owner: 0,
        name: 0,
        kind: Kind::Untyped,
        state: EntryState::Live,
        flags: 0,
    };
}

/// A shard's hash table: open addressing with linear probing, deletion by shifting back.
#[derive(Debug)]
struct Slots {
    base: *mut Entry,
    /// Slots, 0 or a power of two.
    capacity: u32,
    len: u32,
    next_generation: u64,
}

#[derive(Debug)]
#[repr(align(128))]
struct Shard {
    live: AtomicU32,
    tensors: AtomicU32,
    bytes: AtomicU64,
    slots: SpinLock<Slots>,
}

/// All objects of one manager.
#[derive(Debug)]
pub(crate) struct Table {
    shards: Box<[Shard]>,
}

// SAFETY: the slots own what their pointer leads to.
unsafe impl Send for Slots {}

/// Totals over all shards; exact if no other thread uses the manager.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Totals {
    pub(crate) live: u64,
    pub(crate) tensors: u64,
    pub(crate) bytes: u64,
}

impl Table {
    /// An empty table.
    pub(crate) fn new() -> Result<Self, NoMemory> {
        let shards = heap::slice(1 << SHARD_BITS, || Shard {
            live: AtomicU32::new(0),
            tensors: AtomicU32::new(0),
            bytes: AtomicU64::new(0),
            slots: SpinLock::new(Slots {
                base: ptr::null_mut(),
                capacity: 0,
                len: 0,
                next_generation: 1,
            }),
        })?;
        Ok(Self { shards })
    }

    /// Takes all locks before a fork, until [`let_go`](Self::let_go).
    #[cfg(not(loom))]
    pub(crate) fn hold(&self) {
        self.shards.iter().for_each(|shard| shard.slots.hold());
    }

    /// Releases all locks after the fork, in both processes.
    #[cfg(not(loom))]
    pub(crate) fn let_go(&self) {
        self.shards.iter().for_each(|shard| shard.slots.let_go());
    }

    /// Locks the shard of `addr`.
    #[inline(always)]
    pub(crate) fn lock(&self, addr: usize) -> Guard<'_> {
        let region = (addr as u64) >> REGION_BITS;
        let index = (region.wrapping_mul(FIBONACCI) >> (u64::BITS - SHARD_BITS)) as usize;
        // SAFETY: SHARD_BITS bits cannot exceed the number of shards.
        let shard = unsafe { self.shards.get_unchecked(index) };
        Guard { slots: shard.slots.lock(), shard }
    }

    pub(crate) fn totals(&self) -> Totals {
        self.shards.iter().fold(Totals::default(), |t, s| Totals {
            live: t.live + u64::from(s.live.load(Relaxed)),
            tensors: t.tensors + u64::from(s.tensors.load(Relaxed)),
            bytes: t.bytes.wrapping_add(s.bytes.load(Relaxed)),
        })
    }

    /// Calls `f` with every entry, one shard at a time. No lock is held during a call (each shard
    /// is copied first).
    pub(crate) fn for_each(
        &self,
        mut f: impl FnMut(&Entry) -> Result<(), NoMemory>,
    ) -> Result<(), NoMemory> {
        let mut copy = Vec::new();
        for shard in &self.shards {
            let mut guard = Guard { slots: shard.slots.lock(), shard };
            let slots = guard.slots();
            copy.try_reserve(slots.len as usize).map_err(|_| NoMemory)?;
            for i in 0..slots.capacity {
                // SAFETY: the shard's lock is held, base points to `capacity` initialised slots,
                // and i < capacity.
                let entry = unsafe { *slots.base.add(i as usize) };
                if entry.addr != 0 {
                    copy.push(entry);
                }
            }
            drop(guard);
            copy.drain(..).try_for_each(|entry| f(&entry))?;
        }
        Ok(())
    }
}

/// A locked shard.
pub(crate) struct Guard<'a> {
    shard: &'a Shard,
    slots: SpinGuard<'a, Slots>,
}

#[inline(always)]
fn home(addr: usize, capacity: u32) -> u32 {
    ((((addr as u64) >> 3).wrapping_mul(FIBONACCI) >> 32) as u32) & (capacity - 1)
}

impl Guard<'_> {
    #[inline(always)]
    fn slots(&mut self) -> &mut Slots {
        &mut self.slots
    }

    /// The position of the entry of `addr` (not 0), alive or dead; valid until the next insertion
    /// or removal.
    #[inline(always)]
    pub(crate) fn position(&mut self, addr: usize) -> Option<u32> {
        let slots = self.slots();
        if slots.capacity == 0 {
            return None;
        }
        let mut i = home(addr, slots.capacity);
        loop {
            // SAFETY: i < capacity; at least one slot is free, so the loop ends.
            match unsafe { (*slots.base.add(i as usize)).addr } {
                a if a == addr => return Some(i),
                0 => return None,
                _ => i = (i + 1) & (slots.capacity - 1),
            }
        }
    }

    /// The entry at a position that [`position`](Self::position) returned.
    #[inline(always)]
    pub(crate) fn at(&mut self, position: u32) -> &mut Entry {
        let slots = self.slots();
        debug_assert!(position < slots.capacity);
        // SAFETY: `position` returned an index below the capacity, and tables shrink only when they
        // become empty.
        unsafe { &mut *slots.base.add(position as usize) }
    }

    /// The entry of `addr` (not 0), alive or not.
    #[inline(always)]
    pub(crate) fn find(&mut self, addr: usize) -> Option<&mut Entry> {
        let i = self.position(addr)?;
        Some(self.at(i))
    }

    /// Adds a live entry with one count for `addr`, which has none yet, and returns its generation.
    /// `fill` completes the entry in place. (A copy of a whole entry costs twice the time, because
    /// its parts are still in the store buffer.)
    #[inline(always)]
    pub(crate) fn insert(
        &mut self,
        addr: usize,
        kind: Kind,
        fill: impl FnOnce(&mut Entry),
    ) -> Result<u64, NoMemory> {
        debug_assert!(self.find(addr).is_none());
        let slots = self.slots();
        if (slots.len + 1) * 4 > slots.capacity * 3 {
            slots.resize((slots.capacity * 2).max(FIRST_SLOTS))?;
        }
        let generation = slots.next_generation;
        slots.next_generation += 1;
        slots.len += 1;
        let slot = slots.vacancy(addr);
        // SAFETY: `vacancy` returns a slot of the table, and the shard is locked.
        let entry = unsafe { &mut *slot };
        entry.start(addr, kind, generation);
        fill(entry);
        let (kind, size) = (entry.kind, entry.size);
        self.account(kind, size, true);
        Ok(generation)
    }

    /// Moves the tensor of this life from one dead state to the next and returns its entry. `None`
    /// if that life is not in the state `from` any more.
    pub(crate) fn advance(
        &mut self,
        addr: usize,
        generation: u64,
        from: EntryState,
        to: EntryState,
    ) -> Option<&mut Entry> {
        let entry = self.find(addr).filter(|e| e.generation == generation && e.state == from)?;
        entry.state = to;
        Some(entry)
    }

    /// Makes a dead tensor's entry live again, as a new life with one count.
    pub(crate) fn revive(&mut self, addr: usize) -> Option<u64> {
        let generation = self.slots().next_generation;
        let entry = self.find(addr)?;
        entry.generation = generation;
        entry.state = EntryState::Live;
        (entry.count, entry.newest, entry.owner) = (1, NIL, 0);
        let (kind, size) = (entry.kind, entry.size);
        self.slots().next_generation += 1;
        self.account(kind, size, true);
        Some(generation)
    }

    /// Marks the live object at `position` as dead and keeps its entry.
    pub(crate) fn retire_at(&mut self, position: u32, state: EntryState) {
        let entry = self.at(position);
        entry.state = state;
        entry.count = 0;
        let (kind, size) = (entry.kind, entry.size);
        self.account(kind, size, false);
    }

    /// Removes the entry at `position`.
    #[inline(always)]
    pub(crate) fn remove_at(&mut self, position: u32) {
        let entry = self.at(position);
        let (kind, size) = (entry.kind, entry.size);
        if entry.state == EntryState::Live {
            self.account(kind, size, false);
        }
        let mut hole = position;
        let slots = self.slots();
        let mask = slots.capacity - 1;
        // SAFETY: all indices below are masked to the capacity; the lock is held.
        unsafe {
            let mut next = (hole + 1) & mask;
            while (*slots.base.add(next as usize)).addr != 0 {
                // An entry may fill the hole if the hole lies between the entry's home and its
                // position.
                let from_home = next
                    .wrapping_sub(home((*slots.base.add(next as usize)).addr, slots.capacity))
                    & mask;
                if from_home >= (next.wrapping_sub(hole) & mask) {
                    *slots.base.add(hole as usize) = *slots.base.add(next as usize);
                    hole = next;
                }
                next = (next + 1) & mask;
            }
            (*slots.base.add(hole as usize)).addr = 0;
        }
        slots.len -= 1;
        if slots.len == 0 && slots.capacity > KEPT_SLOTS {
            slots.free();
        }
    }

    /// Updates the totals after an entry's kind or size has changed from `before` to `after`.
    pub(crate) fn reclassify(&self, before: &Entry, after: &Entry) {
        self.account(before.kind, before.size, false);
        self.account(after.kind, after.size, true);
    }

    #[inline(always)]
    fn account(&self, kind: Kind, size: u64, arrives: bool) {
        let shard = self.shard;
        let step = |n: u32| if arrives { n.wrapping_add(1) } else { n.wrapping_sub(1) };
        shard.live.store(step(shard.live.load(Relaxed)), Relaxed);
        if kind == Kind::Tensor {
            shard.tensors.store(step(shard.tensors.load(Relaxed)), Relaxed);
        }
        if size != 0 {
            let bytes = shard.bytes.load(Relaxed);
            let bytes = if arrives { bytes.wrapping_add(size) } else { bytes.wrapping_sub(size) };
            shard.bytes.store(bytes, Relaxed);
        }
    }
}

impl Slots {
    /// The first free slot in the probe sequence of `addr`; one exists.
    #[inline(always)]
    fn vacancy(&mut self, addr: usize) -> *mut Entry {
        let mut i = home(addr, self.capacity);
        // SAFETY: i stays below capacity, and one slot is free.
        unsafe {
            while (*self.base.add(i as usize)).addr != 0 {
                i = (i + 1) & (self.capacity - 1);
            }
            self.base.add(i as usize)
        }
    }

    #[cold]
    fn resize(&mut self, capacity: u32) -> Result<(), NoMemory> {
        if capacity > 1 << 28 {
            return Err(NoMemory);
        }
        let layout = Layout::array::<Entry>(capacity as usize).map_err(|_| NoMemory)?;
        // SAFETY: capacity > 0, so the layout has a size.
        let base: *mut Entry = unsafe { alloc::alloc(layout) }.cast();
        if base.is_null() {
            return Err(NoMemory);
        }
        for i in 0..capacity as usize {
            // SAFETY: i < capacity.
            unsafe { base.add(i).write(Entry::FREE) };
        }
        let (old, before) = (self.base, self.capacity);
        self.base = base;
        self.capacity = capacity;
        for i in 0..before as usize {
            // SAFETY: the old table held `before` initialised slots.
            let entry = unsafe { *old.add(i) };
            if entry.addr != 0 {
                // SAFETY: `vacancy` returns a slot of the new table.
                unsafe { self.vacancy(entry.addr).write(entry) };
            }
        }
        Self { base: old, capacity: before, len: 0, next_generation: 0 }.free();
        Ok(())
    }

    fn free(&mut self) {
        if self.capacity > 0
            && let Ok(layout) = Layout::array::<Entry>(self.capacity as usize)
        {
            // SAFETY: the block was allocated by `resize` with this layout.
            unsafe { alloc::dealloc(self.base.cast(), layout) };
        }
        (self.base, self.capacity) = (ptr::null_mut(), 0);
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.shards.iter_mut().for_each(|shard| shard.slots.get_mut().free());
    }
}
