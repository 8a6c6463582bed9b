//! Buffers: the rows of an allocator's block table, which are the control blocks of
//! `Lease<Buffer>`.
//!
//! # Protocol of the record
//! A buffer remembers when it was last written and read, so that later users can be ordered after
//! and its memory is not reused too early. Each timeline has one submitter at a time. The submitter
//! of the buffer's *home* timeline (the stream it was allocated on) owns two words, which it writes
//! with plain stores; everybody else uses the other words, with compare-and-swap.
//!
//! - `own_write`, `own_read`. Written by: the home timeline's submitter, plain stores. Means: last
//!   write and read on the home timeline.
//! - `other_write`. Written by: any other timeline (CAS); the home timeline's submitter clears it.
//!   Means: the last write, if it was not the home timeline's.
//! - `other_read`, `overflow`. Written by: any other timeline (CAS, a lock). Means: reads by other
//!   timelines, and displaced timepoints.
//! - `lock`. Written by: the submitter that orders work by the record, or who keeps it from work.
//!   Means: its timeline's number, 0 for nobody.
//!
//! The record is locked from when a submitter reads it until it has marked it. So of two timelines
//! that use a buffer, one sees the other's mark, and waits for it.
//!
//! A write is ordered after every use that was known when it was submitted, so it may displace
//! timepoints that its timeline knows or that are over. A timepoint that it does not know
//! ([`Buffer::used_on`] from another thread) is kept until the memory is reused.

use crate::extent::Placement;
use crate::layout::{NO_CLASS, UNIT_SHIFT};
use leasehold_core::sync::Mutex;
use leasehold_core::sync::atomic::{
    AtomicPtr, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering,
};
use leasehold_core::{
    Header, HeaderView, Lease, Name, NameCell, PackedTimepoint, Tagged, Timeline, TimelineId,
    Timepoint, tags,
};
use std::fmt;
use std::marker::PhantomPinned;
use std::ptr::NonNull;

/// The kind of host memory under a buffer, if any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HostKind {
    /// None: device memory.
    None,
    /// Pinned: the device reads and writes it directly.
    Pinned,
    /// Ordinary pageable memory: of a CPU device, or where the backend cannot pin.
    Pageable,
}

/// The address of symbolic buffers has this bit set.
pub const SYMBOLIC: u64 = 1 << 63;

pub(crate) const KIND_MASK: u32 = 3;
const PINNED: u32 = HostKind::Pinned as u32;
const PAGEABLE: u32 = HostKind::Pageable as u32;
pub(crate) const IMPORTED: u32 = 1 << 4;
pub(crate) const ARENA: u32 = 1 << 5;
pub(crate) const EMPTY: u32 = 1 << 6;
/// Of an allocator with debug checks or a trace ring.
pub(crate) const CHECKED: u32 = 1 << 7;
/// Memory of a graph's arena.
pub(crate) const REGION: u32 = 1 << 8;
/// Other timelines than its home may have used it: the record is to be asked. Set with the first
/// such mark, for good.
pub(crate) const FOREIGN: u32 = 1 << 9;
/// Of no slab class, or of an allocator without thread caches.
pub(crate) const CLASSLESS: u32 = 1 << 10;
/// Memory that users must not write.
pub(crate) const READ_ONLY: u32 = 1 << 11;
/// A growing block: its length changes while it is held.
pub(crate) const GROWING: u32 = 1 << 12;
/// The home timeline's number lies above the flags.
const HOME_SHIFT: u32 = 16;

/// A block of memory: an address, a length, and the record of its last uses.
///
/// A buffer is held by [`Lease<Buffer>`](leasehold_core::Lease); the last drop frees it at once,
/// without a driver call, on any thread. Views share the record of their buffer. Everything here is
/// callable from any thread, except the marks: see there.
#[doc(alias("Memory", "DeviceMemory"))]
#[repr(C)]
pub struct Buffer {
    // With the header, what a hit in a thread cache touches: one cache line.
    addr: AtomicU64,
    len: AtomicU64,
    flags: AtomicU32,
    tag: NameCell,
    /// The extent, or the slab run. Written by the owner while nobody holds the row.
    place: AtomicU32,
    /// The slot in the run, or [`NO_SLOT`].
    slot: AtomicU16,
    /// The slab class, or [`NO_CLASS`].
    pub(crate) class: AtomicU16,
    // The rest.
    native: AtomicU64,
    own_write: AtomicU64,
    own_read: AtomicU64,
    other_write: AtomicU64,
    other_read: AtomicU64,
    overflow: AtomicPtr<Overflow>,
    /// The timeline whose submitter has locked the record, or 0.
    lock: AtomicU16,
    /// The beginning of a growing block that is shared, in units.
    shared: AtomicU32,
    /// A row's buffer stays in its row: never swap two, even with both unique leases.
    _place: PhantomPinned,
}

type Overflow = Mutex<Vec<PackedTimepoint>>;

/// The home timeline in a word of flags.
#[inline]
pub(crate) fn home_timeline(flags: u32) -> TimelineId {
    PackedTimepoint::from_bits(u64::from(flags >> HOME_SHIFT) << 48).timeline_id()
}

const LOAD: Ordering = Ordering::Acquire;
const STORE: Ordering = Ordering::Release;

impl Buffer {
    /// The address in the device's (or host's) address space; 0 for an empty buffer. While the
    /// buffer is symbolic: a name with [`SYMBOLIC`] set, unique among live symbolic ranges, so that
    /// address + offset stays identifiable.
    #[doc(alias = "data")]
    #[inline]
    pub fn addr(&self) -> u64 {
        self.addr.load(Ordering::Acquire)
    }

    /// The native object that spans the memory (Metal's buffer), else 0.
    #[inline]
    pub fn native(&self) -> u64 {
        self.native.load(Ordering::Relaxed)
    }

    /// Length in bytes, as asked for.
    #[inline]
    pub fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// Whether it has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The timeline of the stream that it was allocated on.
    #[inline]
    pub fn home_timeline(&self) -> TimelineId {
        home_timeline(self.flags())
    }

    /// The kind of host memory under the buffer.
    #[inline]
    pub fn host_kind(&self) -> HostKind {
        match self.flags() & KIND_MASK {
            PINNED => HostKind::Pinned,
            PAGEABLE => HostKind::Pageable,
            _ => HostKind::None,
        }
    }

    /// Whether it is memory that somebody else owns.
    #[inline]
    pub fn is_imported(&self) -> bool {
        self.flags() & IMPORTED != 0
    }

    /// Whether users must not write it: memory imported as
    /// [`Protection::ReadOnly`](crate::Protection), or
    /// [`Allocator::alloc_read_only`](crate::Allocator::alloc_read_only).
    #[inline]
    pub fn is_read_only(&self) -> bool {
        self.flags() & READ_ONLY != 0
    }

    /// Whether it is a growing block ([`Allocator::growing`](crate::Allocator::growing)): its
    /// length changes while it is held.
    #[inline]
    pub fn is_growing(&self) -> bool {
        self.flags() & GROWING != 0
    }

    /// The bytes at the beginning of a growing block that other blocks have too, or had
    /// ([`Allocator::fork`](crate::Allocator::fork)). Nobody writes them. They may be more than the
    /// length. Not for other buffers.
    #[inline]
    pub fn shared(&self) -> u64 {
        u64::from(self.shared.load(Ordering::Acquire)) << UNIT_SHIFT
    }

    /// Whether it was allocated while recording and has no memory yet.
    #[inline]
    pub fn is_symbolic(&self) -> bool {
        self.addr() & SYMBOLIC != 0
    }

    /// The release tag: a word of the caller's, shown in reports and snapshots.
    #[inline]
    pub fn tag(&self) -> u32 {
        self.tag.get()
    }

    /// Sets the release tag.
    pub fn set_tag(&self, tag: u32) {
        self.tag.set(tag);
    }

    /// The buffer's name, if its release tag is one.
    #[must_use]
    pub fn name(&self) -> Option<Name> {
        self.tag.name()
    }

    /// Names the buffer in reports and snapshots until its last lease is dropped. The name takes
    /// the place of the release tag.
    pub fn set_name(&self, name: impl Into<Name>) {
        self.tag.set_name(Some(name.into()));
    }

    /// The last write. A reader must be ordered after it.
    #[inline]
    pub fn write_timepoint(&self) -> PackedTimepoint {
        let other = self.other_write.load(LOAD);
        PackedTimepoint::from_bits(if other == 0 { self.own_write.load(LOAD) } else { other })
    }

    /// The reads since the last write, and any use that the record could not fold into one of the
    /// two. A writer must be ordered after them and after
    /// [`write_timepoint`](Self::write_timepoint).
    #[inline(always)]
    pub fn for_each_read(&self, mut f: impl FnMut(PackedTimepoint)) {
        let own = self.own_read.load(LOAD);
        if own > self.own_write.load(LOAD) {
            f(PackedTimepoint::from_bits(own));
        }
        let other = self.other_read.load(LOAD);
        if other != 0 {
            f(PackedTimepoint::from_bits(other));
        }
        if !self.overflow.load(LOAD).is_null() {
            self.overflowed(|s| s.iter().for_each(|&s| f(s)));
        }
    }

    /// Whether the buffer was used by its home timeline at most.
    #[inline]
    pub(crate) fn is_private(&self) -> bool {
        self.other_write.load(LOAD) == 0
            && self.other_read.load(LOAD) == 0
            && self.overflow.load(LOAD).is_null()
    }

    /// The latest use by the home timeline.
    #[inline]
    pub(crate) fn own_timepoint(&self) -> PackedTimepoint {
        PackedTimepoint::from_bits(self.own_write.load(LOAD).max(self.own_read.load(LOAD)))
    }

    /// Every use that may still go on.
    pub(crate) fn for_each_use(&self, mut f: impl FnMut(PackedTimepoint)) {
        for word in [&self.own_write, &self.own_read, &self.other_write, &self.other_read] {
            let bits = word.load(LOAD);
            if bits != 0 {
                f(PackedTimepoint::from_bits(bits));
            }
        }
        if !self.overflow.load(LOAD).is_null() {
            self.overflowed(|s| s.iter().for_each(|&s| f(s)));
        }
    }

    /// Every use that goes on.
    pub(crate) fn uses(&self) -> Vec<PackedTimepoint> {
        let mut timepoints = Vec::new();
        self.for_each_use(|s| {
            if !s.has_passed() {
                timepoints.push(s);
            }
        });
        timepoints
    }

    /// Until when it may still be in use, if one timeline at most uses it: never, if none does.
    /// `None`: several do. Takes no host memory.
    pub(crate) fn used_until(&self) -> Option<PackedTimepoint> {
        let mut until = Some(PackedTimepoint::NEVER);
        self.for_each_use(|s| {
            if !s.has_passed() {
                until = match until {
                    Some(t) if t.is_never() => Some(s),
                    Some(t) if t.timeline_id() == s.timeline_id() => {
                        Some(if t.value() < s.value() { s } else { t })
                    }
                    _ => None,
                };
            }
        });
        until
    }

    /// Locks the record for the submitter of a timeline. Returns whether that was done: not while a
    /// submitter has locked it. Never blocks.
    ///
    /// # Safety
    /// - The caller has the timeline's turn until [`unlock_record`](Self::unlock_record), and holds
    ///   the buffer so long.
    #[inline]
    #[must_use]
    pub unsafe fn try_lock_record(&self, timeline: TimelineId) -> bool {
        self.lock.compare_exchange(0, timeline.get(), Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Whether the timeline's submitter has locked the record.
    #[inline]
    #[must_use]
    pub fn has_locked_record(&self, timeline: TimelineId) -> bool {
        self.lock.load(Ordering::Relaxed) == timeline.get()
    }

    /// Unlocks the record.
    ///
    /// # Safety
    /// - The caller has locked it, and has marked every submission that was ordered by it since
    ///   then.
    #[inline]
    pub unsafe fn unlock_record(&self) {
        self.lock.store(0, Ordering::Release);
    }

    /// Records a write submitted at `p`. Never blocks. It takes the place of what it comes after in
    /// the record, by which memory is lent again.
    ///
    /// # Safety
    /// - `p` was submitted to its timeline just now; the caller has that timeline's turn, so that
    ///   marks come in the timeline's order.
    /// - The submission was ordered after [`write_timepoint`](Self::write_timepoint) and all
    ///   recorded reads, and the record was locked since they were read, or nobody else could
    ///   submit work with the buffer.
    #[inline]
    pub unsafe fn mark_write(&self, p: Timepoint) {
        if p.timeline_id() == self.home_timeline() {
            self.own_write.store(PackedTimepoint::from(p).to_bits(), STORE);
            if !self.is_private() {
                self.displace(p);
            }
        } else {
            self.mark_write_slow(p);
        }
    }

    /// Records a read submitted at `p`. Never blocks.
    ///
    /// # Safety
    /// - `p` was submitted to its timeline just now; the caller has that timeline's turn, so that
    ///   marks come in the timeline's order.
    /// - The submission was ordered after [`write_timepoint`](Self::write_timepoint), and the
    ///   record was locked since that was read, or nobody else could submit work with the buffer.
    #[inline]
    pub unsafe fn mark_read(&self, p: Timepoint) {
        if p.timeline_id() == self.home_timeline() {
            self.own_read.store(PackedTimepoint::from(p).to_bits(), STORE);
        } else {
            self.used_on(p);
        }
    }

    /// Adds a use by hand: the memory is not reused before `p`. Any thread, any timeline. It only
    /// adds to the record, so no point can do harm.
    #[doc(alias = "record_stream")]
    pub fn used_on(&self, p: Timepoint) {
        self.set_foreign();
        let new = PackedTimepoint::from(p);
        let mut old = self.other_read.load(LOAD);
        loop {
            let timepoint = PackedTimepoint::from_bits(old);
            if timepoint.timeline_id() == new.timeline_id() && timepoint.value() >= new.value() {
                return;
            }
            if old != 0 && timepoint.timeline_id() != new.timeline_id() && !timepoint.has_passed() {
                return self.overflow(new);
            }
            match self.other_read.compare_exchange_weak(old, new.to_bits(), Ordering::AcqRel, LOAD)
            {
                Ok(_) => return,
                Err(now) => old = now,
            }
        }
    }

    /// The last lease's drop is ordered after this, so whoever frees the buffer sees it.
    #[inline]
    fn set_foreign(&self) {
        if self.flags() & FOREIGN == 0 {
            self.flags.fetch_or(FOREIGN, Ordering::Relaxed);
        }
    }

    /// A write by the home timeline is later than every foreign use that its timeline knows.
    #[cold]
    fn displace(&self, p: Timepoint) {
        let over = |s: PackedTimepoint| p.timeline().knows(s) || s.has_passed();
        for word in [&self.other_write, &self.other_read] {
            let bits = word.load(LOAD);
            if bits != 0 {
                let timepoint = PackedTimepoint::from_bits(bits);
                let cleared = word.compare_exchange(bits, 0, Ordering::AcqRel, LOAD).is_ok();
                if cleared && !over(timepoint) {
                    self.overflow(timepoint);
                }
            }
        }
        self.overflowed(|s| s.retain(|&s| !over(s)));
    }

    #[cold]
    fn mark_write_slow(&self, p: Timepoint) {
        self.set_foreign();
        let new = PackedTimepoint::from(p);
        let over = |s: PackedTimepoint| p.timeline().knows(s) || s.has_passed();
        let old =
            PackedTimepoint::from_bits(self.other_write.swap(new.to_bits(), Ordering::AcqRel));
        if !old.is_never() && !over(old) {
            self.overflow(old);
        }
        let read = self.other_read.load(LOAD);
        if read != 0 && over(PackedTimepoint::from_bits(read)) {
            // Lost to a newer read: that one stays.
            let _ = self.other_read.compare_exchange(read, 0, Ordering::AcqRel, LOAD);
        }
        self.overflowed(|s| s.retain(|&s| !over(s)));
    }

    #[cold]
    fn overflow(&self, timepoint: PackedTimepoint) {
        if self.overflow.load(LOAD).is_null() {
            let fresh = Box::into_raw(Box::new(Overflow::new(Vec::new())));
            if self
                .overflow
                .compare_exchange(std::ptr::null_mut(), fresh, Ordering::AcqRel, LOAD)
                .is_err()
            {
                // SAFETY: just made, and published to nobody.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
        self.overflowed(|s| {
            let mut latest = timepoint;
            s.retain(|&s| {
                let same = s.timeline_id() == timepoint.timeline_id();
                if same && s.value() > latest.value() {
                    latest = s;
                }
                !same && !s.has_passed()
            });
            s.push(latest);
        });
    }

    fn overflowed(&self, f: impl FnOnce(&mut Vec<PackedTimepoint>)) {
        // SAFETY: once set, the pointer stays until `reset`, which runs when nobody holds the
        // buffer.
        if let Some(overflow) = unsafe { self.overflow.load(LOAD).as_ref() } {
            f(&mut overflow.lock());
        }
    }

    fn vacant() -> Self {
        Self {
            addr: AtomicU64::new(0),
            len: AtomicU64::new(0),
            flags: AtomicU32::new(0),
            tag: NameCell::default(),
            place: AtomicU32::new(u32::MAX),
            slot: AtomicU16::new(NO_SLOT),
            class: AtomicU16::new(NO_CLASS),
            native: AtomicU64::new(0),
            own_write: AtomicU64::new(0),
            own_read: AtomicU64::new(0),
            other_write: AtomicU64::new(0),
            other_read: AtomicU64::new(0),
            overflow: AtomicPtr::new(std::ptr::null_mut()),
            lock: AtomicU16::new(0),
            shared: AtomicU32::new(0),
            _place: PhantomPinned,
        }
    }

    /// Describes a fresh block: address and native object, length, home, and until when the
    /// memory's former use goes on. Only the owner, while nobody holds the row.
    #[inline(always)]
    pub(crate) fn describe(
        &self,
        (addr, native): (u64, u64),
        len: u64,
        home: Option<&'static Timeline>,
        flags: u32,
        timepoint: PackedTimepoint,
    ) {
        self.addr.store(addr, Ordering::Relaxed);
        self.native.store(native, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        let timeline = home.map_or(0, |l| u32::from(l.id().get()));
        self.flags.store(timeline << HOME_SHIFT | flags, Ordering::Relaxed);
        self.untag();
        self.inherit(timepoint);
    }

    /// The memory's former use goes on until `timepoint`. Only the owner, while nobody holds the
    /// row.
    #[inline(always)]
    pub(crate) fn inherit(&self, timepoint: PackedTimepoint) {
        if timepoint.is_never() {
            self.own_write.store(0, Ordering::Relaxed);
            self.own_read.store(0, Ordering::Relaxed);
        } else {
            self.inherit_some(timepoint);
        }
    }

    #[inline(never)]
    fn inherit_some(&self, timepoint: PackedTimepoint) {
        let home = timepoint.timeline_id() == self.home_timeline();
        self.own_write.store(if home { timepoint.to_bits() } else { 0 }, Ordering::Relaxed);
        self.own_read.store(0, Ordering::Relaxed);
        if !home {
            self.other_write.store(timepoint.to_bits(), Ordering::Relaxed);
            self.flags.store(self.flags() | FOREIGN, Ordering::Relaxed);
        }
    }

    /// Takes the release tag off. Only the owner, while nobody holds the row.
    #[inline]
    pub(crate) fn untag(&self) {
        if self.tag() != 0 {
            self.tag.set(0);
        }
    }

    /// The shared beginning of a growing block from now on.
    pub(crate) fn set_shared(&self, bytes: u64) {
        self.shared.store((bytes >> UNIT_SHIFT) as u32, Ordering::Release);
    }

    /// Sets or clears a flag.
    pub(crate) fn set_flag(&self, flag: u32, yes: bool) {
        if yes {
            self.flags.fetch_or(flag, Ordering::Relaxed);
        } else {
            self.flags.fetch_and(!flag, Ordering::Relaxed);
        }
    }

    /// The length from now on: of a growing block, or of one that nobody holds.
    #[inline]
    pub(crate) fn set_len(&self, len: u64) {
        self.len.store(len, Ordering::Relaxed);
    }

    /// Empties the record. Only the owner, while nobody holds the row.
    pub(crate) fn reset(&self) {
        for word in [&self.own_write, &self.own_read, &self.other_write, &self.other_read] {
            word.store(0, Ordering::Relaxed);
        }
        self.lock.store(0, Ordering::Relaxed);
        let overflow = self.overflow.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !overflow.is_null() {
            // SAFETY: made by `overflow` from a box; nobody holds the buffer, so nobody reads it.
            drop(unsafe { Box::from_raw(overflow) });
        }
    }

    /// Gives a symbolic buffer its memory.
    pub(crate) fn bind(&self, addr: u64, native: u64) {
        self.native.store(native, Ordering::Relaxed);
        self.addr.store(addr, Ordering::Release);
    }

    #[inline]
    pub(crate) fn flags(&self) -> u32 {
        self.flags.load(Ordering::Relaxed)
    }
}

impl Tagged for Buffer {
    type Tag = tags::Buffer;
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (addr, len, written) = (self.addr(), self.len(), self.write_timepoint());
        write!(f, "Buffer({addr:#x}+{len}, written {written:?}")?;
        match self.name() {
            Some(name) => write!(f, ", {name})"),
            None => f.write_str(")"),
        }
    }
}

/// A row of the block table: the control block, the buffer, and where its memory lies.
#[repr(C, align(128))]
pub(crate) struct Row {
    pub(crate) header: Header,
    pub(crate) buffer: Buffer,
    /// Which of the block table's lists it belongs to.
    pub(crate) list: AtomicU8,
}

/// The row's block is an extent.
pub(crate) const NO_SLOT: u16 = u16::MAX;

impl Row {
    /// Where in the core the row's block lies.
    #[inline]
    pub(crate) fn placement(&self) -> Placement {
        let place = self.buffer.place.load(Ordering::Relaxed);
        match self.buffer.slot.load(Ordering::Relaxed) {
            NO_SLOT => Placement::Extent(place),
            slot => Placement::Slot(place, slot),
        }
    }

    /// Says where in the core the row's block lies.
    #[inline(always)]
    pub(crate) fn set_placement(&self, placement: Placement, class: u16) {
        let (place, slot) = match placement {
            Placement::Extent(extent) => (extent, NO_SLOT),
            Placement::Slot(run, slot) => (run, slot),
        };
        self.buffer.place.store(place, Ordering::Relaxed);
        self.buffer.slot.store(slot, Ordering::Relaxed);
        self.buffer.class.store(class, Ordering::Relaxed);
    }

    /// Where the buffer of a row's header lies.
    #[inline]
    pub(crate) fn buffer_of(header: HeaderView<'_>) -> *const Buffer {
        header.address().cast::<u8>().wrapping_add(std::mem::offset_of!(Row, buffer)).cast()
    }

    /// The first lease of a row that nobody holds.
    #[inline]
    pub(crate) fn first_lease(&self) -> Lease<Buffer> {
        self.header.set_live_quietly(false);
        // SAFETY: the count that was just set is the lease's.
        unsafe { self.counted_lease() }
    }

    /// As [`first_lease`](Self::first_lease), but no handle ever leads to the row's buffer.
    pub(crate) fn unlisted_lease(&self) -> Lease<Buffer> {
        self.header.set_live_quietly(true);
        // SAFETY: the count that was just set is the lease's.
        unsafe { self.counted_lease() }
    }

    /// The lease of a count.
    ///
    /// # Safety
    /// - The header counts a lease that nobody has.
    #[inline]
    pub(crate) unsafe fn counted_lease(&self) -> Lease<Buffer> {
        // The whole row: the drop reaches the buffer through the header.
        let header = NonNull::from(self).cast();
        // SAFETY: the caller vouches for the count; the value lies in the header's row.
        unsafe { Lease::from_raw(header, NonNull::from(&self.buffer)) }
    }

    pub(crate) fn new(header: Header) -> Self {
        Self { header, buffer: Buffer::vacant(), list: AtomicU8::new(0) }
    }
}

#[cfg(not(loom))]
const _: () = assert!(
    size_of::<Row>() == 128 && size_of::<Header>() + std::mem::offset_of!(Buffer, native) == 64
);
