//! The table of extents: the blocks, free or used, that tile the address spans.
//!
//! An extent is a row of plain words; extents name each other by 32-bit index, never by pointer.
//! The first row is no extent ([`DUMMY`]). Nothing here touches the memory that the extents
//! describe.

use crate::host;
use leasehold_core::{PackedTimepoint, Result};
use std::hint::select_unpredictable;

/// No extent.
pub(crate) const NIL: u32 = u32::MAX;

/// A row that is no extent. Writes to a missing neighbour go to it, which saves a branch. In an
/// index's lists whether a neighbour exists is not predictable.
pub(crate) const DUMMY: u32 = 0;

/// An extent, or the dummy if it is none.
#[inline]
pub(crate) fn or_dummy(id: u32) -> u32 {
    select_unpredictable(id == NIL, DUMMY, id)
}

/// The state of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// A table entry that describes nothing.
    Vacant,
    /// Free; in the index of its list. Some of its granules may be backed by nothing.
    Free,
    /// Lent, or a slab run.
    Used,
    /// Taken out for a driver call that runs outside the lock.
    Moving,
    /// Free, but the streams that used it last are several; in no index.
    Waiting,
    /// Lost to a driver call that failed; never used again.
    Quarantined,
}

/// A block. Two to a cache line; what only some blocks need is in [`Cold`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C, align(32))]
pub(crate) struct Extent {
    /// First unit, in the heap's own space of units.
    pub(crate) start: u32,
    /// Length in units.
    pub(crate) units: u32,
    /// The neighbour below, `NIL` at a span's beginning.
    pub(crate) prev: u32,
    /// The neighbour above, `NIL` at a span's end.
    pub(crate) next: u32,
    /// While free: links within the index's leaf. While used: the slab run, or `NIL`.
    pub(crate) link: [u32; 2],
    /// Granules that lie wholly in it and are backed by nothing. Such a granule lies in one free
    /// extent, never across two.
    pub(crate) holes: u32,
    pub(crate) span: u16,
    pub(crate) state: State,
    /// While free: the list it lies in. While used: the list it was taken from.
    pub(crate) list: u8,
}

/// The further fields of a block in a timeline's list.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cold {
    /// When the memory's last use is over. Meaningful unless the list is list 0.
    pub(crate) timepoint: PackedTimepoint,
    /// Links in the order of release.
    pub(crate) age_prev: u32,
    pub(crate) age_next: u32,
}

const _: () = assert!(size_of::<Extent>() == 32 && size_of::<Cold>() == 16);

impl Cold {
    const VACANT: Cold = Cold { timepoint: PackedTimepoint::NEVER, age_prev: NIL, age_next: NIL };
}

impl Extent {
    pub(crate) const VACANT: Extent = Extent {
        start: 0,
        units: 0,
        prev: NIL,
        next: NIL,
        link: [NIL; 2],
        holes: 0,
        span: 0,
        state: State::Vacant,
        list: 0,
    };

    #[inline]
    pub(crate) fn end(&self) -> u32 {
        self.start + self.units
    }

    /// Whether `units` aligned to `align` units fit.
    #[inline]
    pub(crate) fn holds(&self, units: u32, align: u32) -> bool {
        if align <= 1 {
            return self.units >= units;
        }
        let from = u64::from(self.start).next_multiple_of(u64::from(align));
        from + u64::from(units) <= u64::from(self.start) + u64::from(self.units)
    }
}

/// Where a block lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placement {
    /// An extent of its own.
    Extent(u32),
    /// A slot of a slab run.
    Slot(u32, u16),
}

/// A block that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) placement: Placement,
    pub(crate) addr: u64,
    pub(crate) native: u64,
    /// The slab class, or [`NO_CLASS`](crate::layout::NO_CLASS).
    pub(crate) class: u16,
    /// The last pending use, a point of the asking timeline. `NEVER`: the memory is ready.
    pub(crate) timepoint: PackedTimepoint,
}

/// The table.
pub(crate) struct Extents {
    pub(crate) rows: Vec<Extent>,
    pub(crate) cold: Vec<Cold>,
    vacant: u32,
    spare: u32,
    /// Spare entries that plans in flight will need.
    held: u32,
}

impl Extents {
    pub(crate) fn new() -> Self {
        Self { rows: Vec::new(), cold: Vec::new(), vacant: NIL, spare: 0, held: 0 }
    }

    /// Makes sure that `n` more extents can be made without host memory, so that freeing never
    /// allocates.
    #[inline]
    pub(crate) fn ensure(&mut self, n: u32) -> Result<()> {
        if self.spare >= n + self.held { Ok(()) } else { self.ensure_slow(n + self.held) }
    }

    #[cold]
    fn ensure_slow(&mut self, n: u32) -> Result<()> {
        // (One may be the dummy.)
        let more = self.rows.len().clamp(256, 1 << 16).max(n as usize + 1);
        if self.rows.len() + more >= NIL as usize {
            return Err(host::none(more * size_of::<Extent>()));
        }
        host::room(&mut self.rows, more)?;
        host::room(&mut self.cold, more)?;
        for _ in 0..more {
            let id = self.rows.len() as u32;
            self.rows.push(Extent { next: self.vacant, ..Extent::VACANT });
            if id != DUMMY {
                self.vacant = id;
                self.spare += 1;
            }
        }
        self.cold.resize(self.rows.len(), Cold::VACANT);
        Ok(())
    }

    /// Sets `n` entries aside until [`unhold`](Self::unhold): a plan that comes back must not fail
    /// for want of host memory.
    pub(crate) fn hold(&mut self, n: u32) -> Result<()> {
        self.ensure(n)?;
        self.held += n;
        Ok(())
    }

    /// Ends a [`hold`](Self::hold).
    pub(crate) fn unhold(&mut self, n: u32) {
        self.held -= n;
    }

    /// The extent's last use. Known only for extents that a stream's list holds or held.
    #[inline]
    pub(crate) fn timepoint(&self, id: u32) -> PackedTimepoint {
        if self[id].list == 0 { PackedTimepoint::NEVER } else { self.cold[id as usize].timepoint }
    }

    /// A vacant entry. The caller has made sure of it with [`ensure`](Self::ensure).
    #[inline]
    pub(crate) fn take(&mut self) -> u32 {
        let id = self.vacant;
        self.vacant = self.rows[id as usize].next;
        self.spare -= 1;
        id
    }

    /// Gives an entry back.
    #[inline]
    pub(crate) fn put(&mut self, id: u32) {
        self.rows[id as usize].state = State::Vacant;
        self.rows[id as usize].next = self.vacant;
        self.vacant = id;
        self.spare += 1;
    }

    /// Bytes of host memory that the table takes.
    pub(crate) fn host_bytes(&self) -> u64 {
        (self.rows.capacity() * size_of::<Extent>() + self.cold.capacity() * size_of::<Cold>())
            as u64
    }
}

impl std::ops::Index<u32> for Extents {
    type Output = Extent;
    #[inline]
    fn index(&self, id: u32) -> &Extent {
        &self.rows[id as usize]
    }
}

impl std::ops::IndexMut<u32> for Extents {
    #[inline]
    fn index_mut(&mut self, id: u32) -> &mut Extent {
        &mut self.rows[id as usize]
    }
}
