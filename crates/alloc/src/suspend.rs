//! A backing whose memory can be suspended: all physical memory goes back to the driver, and comes
//! back at the same addresses.
//!
//! An allocator over a [`SuspendableBacking`] knows nothing of a suspension: its blocks stay where
//! they are, live ones too. This type keeps a table of the pieces of physical memory under its own
//! handles. A suspension unmaps and destroys each piece; a resumption creates pieces of the same
//! sizes and maps them at the same addresses. Graphs and views that hold the addresses stay valid.
//!
//! While the backing is suspended, the allocator may free blocks, and may take blocks of memory
//! that it already has. The caller refuses allocations, because such blocks have no memory behind
//! them.

use crate::backing::{Backing, BackingCaps, Chunk};
use crate::budget::Budget;
use leasehold_core::sync::{Arc, RwLock, RwLockReadGuard};
use leasehold_core::{Error, Result};
use std::collections::BTreeMap;
use std::fmt;

/// A resumption restores parts of at least this size, where memory has no gap.
const PART: u64 = 64 << 20;
/// A suspension saves parts of at least this size. Pinned memory for a part comes from several
/// threads, each of which needs tens of MiB to be worth its start.
const SAVED_PART: u64 = 256 << 20;

/// A piece of physical memory.
#[derive(Debug, Clone, Copy)]
struct Piece {
    bytes: u64,
    /// The handle of the backing below. `None` while the piece has no memory.
    handle: Option<u64>,
    /// Where it is mapped.
    at: Option<u64>,
}

#[derive(Debug, Default)]
struct State {
    /// By the handle that the allocator has.
    pieces: BTreeMap<u64, Piece>,
    /// Handles by address.
    mapped: BTreeMap<u64, u64>,
    next: u64,
    reservations: u32,
    suspended: bool,
}

impl State {
    /// The mapped ranges in parts of at least so many bytes, each with no gap inside.
    fn parts(&self, least: u64) -> Vec<(u64, u64)> {
        let mut parts: Vec<(u64, u64)> = Vec::new();
        for (&at, handle) in &self.mapped {
            let Some(piece) = self.pieces.get(handle) else { continue };
            match parts.last_mut() {
                Some((from, bytes)) if *from + *bytes == at && *bytes < least => {
                    *bytes += piece.bytes;
                }
                _ => parts.push((at, piece.bytes)),
            }
        }
        parts
    }
}

struct Shared {
    backing: Box<dyn Backing>,
    budget: Option<Arc<Budget>>,
    /// Calls of the allocator share it; a change of the table, a suspension and a resumption take
    /// it alone, across the driver's calls. No caller holds another lock of this crate.
    state: RwLock<State>,
}

impl Shared {
    /// The table, if so many bytes have memory.
    fn in_use(&self, bytes: u64) -> Result<RwLockReadGuard<'_, State>> {
        let state = self.state.read();
        let gone = || Error::Suspended("the memory is suspended; resume it first".into());
        if state.suspended && bytes > 0 { Err(gone()) } else { Ok(state) }
    }
}

/// A backing that can be suspended. Clones are one: an allocator gets one, the other suspends it.
///
/// ```
/// use leasehold_alloc::*;
/// use leasehold_sim::memory::{FakeBacking, VirtualStream};
/// # use leasehold_core::Error;
/// let driver = FakeBacking::new(1 << 30);
/// let backing = SuspendableBacking::new(Box::new(driver.clone()), None)?;
/// let allocator = Allocator::new(Box::new(backing.clone()), AllocatorConfig::default())?;
/// # let stream = VirtualStream::new()?;
/// let weights = allocator.alloc(Layout::new(100 << 20), On::new(&stream))?;
/// // SAFETY: no work uses the memory.
/// unsafe { backing.suspend(|_, _| Ok(()), Ok)? };
/// assert_eq!(driver.used(), 0);
/// backing.resume(|_, _| Ok(()), || Ok(()))?;
/// assert!(driver.is_backed(weights.addr(), weights.len()));
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
pub struct SuspendableBacking(Arc<Shared>);

impl SuspendableBacking {
    /// Makes a backing over another one. `budget`: the budget that the allocator shares, which a
    /// suspension gives memory back to.
    ///
    /// # Errors
    /// `Unsupported` for a backing whose addresses and memory are not separate.
    pub fn new(backing: Box<dyn Backing>, budget: Option<Arc<Budget>>) -> Result<Self> {
        let caps = backing.caps();
        if !caps.vmm || !caps.reserve {
            return Err(Error::Unsupported(
                "this backing cannot keep addresses without memory".into(),
            ));
        }
        Ok(Self(Arc::new(Shared { backing, budget, state: RwLock::default() })))
    }

    /// Whether the allocator over this backing has addresses. One that found none when it was made
    /// has no memory either, because segments cannot be suspended.
    #[must_use]
    pub fn has_addresses(&self) -> bool {
        self.0.state.read().reservations > 0
    }

    /// Whether the memory is suspended.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        self.0.state.read().suspended
    }

    /// The ranges that have memory, or had it when the backing was suspended: address and bytes.
    #[must_use]
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        self.0.state.read().parts(u64::MAX)
    }

    /// Gives all memory back to the driver, and keeps the addresses. `save` is called with each
    /// part, address and bytes, and may begin to copy the contents away. Then `finish` gets what
    /// `save` returned for a part, and waits for the copy; the part's memory goes next. So the
    /// driver takes one part while later ones are copied. Returns the bytes that went. A piece that
    /// the driver does not take keeps its memory. Blocks on the driver.
    ///
    /// # Errors
    /// - `InvalidState` if it is suspended already.
    /// - An error of `save`. Nothing has changed, and copies that began may still run.
    /// - An error of `finish`. The memory is suspended, but this part and later ones keep theirs
    ///   with the contents. A resumption takes the memory of the earlier ones again.
    ///
    /// # Safety
    /// - No work but these copies uses the memory until [`resume`](Self::resume) has returned `Ok`.
    pub unsafe fn suspend<T>(
        &self,
        mut save: impl FnMut(u64, u64) -> Result<T>,
        mut finish: impl FnMut(T) -> Result<()>,
    ) -> Result<u64> {
        let mut state = self.0.state.write();
        if state.suspended {
            return Err(Error::state("the memory is suspended already"));
        }
        let mut begun = Vec::new();
        for (at, bytes) in state.parts(SAVED_PART) {
            begun.push((at, bytes, save(at, bytes)?));
        }
        let State { pieces, mapped, .. } = &mut *state;
        // Pieces that are mapped nowhere have no contents.
        let bare = pieces.values_mut().filter(|p| p.at.is_none());
        let mut freed: u64 = bare.map(|piece| self.drop_memory(piece)).sum();
        let finished = begun.into_iter().try_for_each(|(at, bytes, copy)| {
            finish(copy)?;
            for (_, own) in mapped.range(at..at + bytes) {
                freed += pieces.get_mut(own).map_or(0, |piece| self.drop_memory(piece));
            }
            Ok(())
        });
        if let Some(budget) = &self.0.budget {
            budget.give_back(freed);
        }
        state.suspended = true;
        finished.map(|()| freed)
    }

    /// Takes the memory of a piece away. Returns the bytes that went.
    fn drop_memory(&self, piece: &mut Piece) -> u64 {
        let Some(handle) = piece.handle else { return 0 };
        if let Some(at) = piece.at {
            // SAFETY: the table says that the piece is mapped there. No work uses it, as the caller
            // of the suspension vouches; a piece of a failed resumption was never used.
            if unsafe { self.0.backing.unmap(at, piece.bytes) }.is_err() {
                // A driver may do it and tell of an earlier failure. The piece is mapped there
                // again then; if it was not unmapped, the driver refuses that.
                // SAFETY: the table says that the piece belongs there.
                let _ = unsafe { self.0.backing.map(at, handle, piece.bytes) };
                return 0;
            }
        }
        piece.handle = None;
        // SAFETY: the handle came from `create`, is mapped nowhere, and its place was just emptied.
        // A piece that the driver keeps is lost either way.
        let _ = unsafe { self.0.backing.destroy(handle, piece.bytes) };
        piece.bytes
    }

    /// Takes memory again at the same addresses. `restore` is called with each part once the part
    /// has memory, and may begin to copy into it while the next part is taken. `finish` is called
    /// once after the last part, also after an error, and waits for these copies. Blocks on the
    /// driver.
    ///
    /// # Errors
    /// `InvalidState` unless suspended; `OverBudget`, `OutOfMemory` and the driver's; an error of
    /// `restore` or `finish`. The backing is still suspended then, and the call may be repeated.
    pub fn resume(
        &self,
        mut restore: impl FnMut(u64, u64) -> Result<()>,
        finish: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut state = self.0.state.write();
        if !state.suspended {
            return Err(Error::state("the memory is not suspended"));
        }
        let lacks = |p: &&Piece| p.handle.is_none();
        let bytes = state.pieces.values().filter(lacks).map(|p| p.bytes).sum();
        if let Some(budget) = &self.0.budget {
            if !budget.take(bytes) {
                return Err(budget.refusal(bytes));
            }
            budget.keep(bytes);
        }
        let mut given = Vec::new();
        let restored = self.take_again(&mut state, &mut given, &mut restore);
        let resumed = restored.and(finish());
        match resumed {
            Ok(()) => state.suspended = false,
            Err(_) => {
                let mut kept = 0;
                for own in given {
                    if let Some(piece) = state.pieces.get_mut(&own)
                        && self.drop_memory(piece) == 0
                    {
                        kept += piece.bytes;
                    }
                }
                if let Some(budget) = &self.0.budget {
                    budget.give_back(bytes - kept);
                }
            }
        }
        resumed
    }

    /// Gives memory to each piece that has none, in order of the addresses, and restores part by
    /// part. Notes the pieces in `given`.
    fn take_again(
        &self,
        state: &mut State,
        given: &mut Vec<u64>,
        restore: &mut impl FnMut(u64, u64) -> Result<()>,
    ) -> Result<()> {
        let parts = state.parts(PART);
        let State { pieces, mapped, .. } = state;
        for (from, bytes) in parts {
            for (&at, own) in mapped.range(from..from + bytes) {
                let lacking = pieces.get_mut(own).filter(|piece| piece.handle.is_none());
                let Some(piece) = lacking else { continue };
                let handle = self.0.backing.create(piece.bytes)?;
                // SAFETY: the range was mapped by the allocator and was unmapped by the suspension;
                // the piece is new.
                if let Err(e) = unsafe { self.0.backing.map(at, handle, piece.bytes) } {
                    // SAFETY: the piece is new and is mapped nowhere.
                    let _ = unsafe { self.0.backing.destroy(handle, piece.bytes) };
                    return Err(e);
                }
                piece.handle = Some(handle);
                given.push(*own);
            }
            // SAFETY: every piece of the part has memory by now and is mapped at its address.
            unsafe { self.0.backing.enable(from, bytes) }?;
            restore(from, bytes)?;
        }
        // The allocator holds these for its next mapping.
        for (&own, piece) in pieces.iter_mut().filter(|(_, p)| p.handle.is_none()) {
            piece.handle = Some(self.0.backing.create(piece.bytes)?);
            given.push(own);
        }
        Ok(())
    }
}

// SAFETY: addresses and memory come from the backing below. A piece without memory exists only
// while the backing is suspended, when no work uses its addresses.
unsafe impl Backing for SuspendableBacking {
    fn caps(&self) -> BackingCaps {
        // A suspension destroys each piece and maps another one at the same address.
        BackingCaps { aliases: false, ..self.0.backing.caps() }
    }

    fn reserve(&self, bytes: u64) -> Result<u64> {
        let addr = self.0.backing.reserve(bytes)?;
        self.0.state.write().reservations += 1;
        Ok(addr)
    }

    unsafe fn commit(&self, at: Option<u64>, bytes: u64) -> Result<Chunk> {
        // Memory without a piece could not be suspended.
        let _ = (at, bytes);
        Err(Error::Unsupported("suspendable memory comes in pieces inside a reservation".into()))
    }

    unsafe fn decommit(&self, chunk: Chunk) -> Result<()> {
        // SAFETY: the caller vouches for the commitment; this type gives none.
        unsafe { self.0.backing.decommit(chunk) }
    }

    unsafe fn release(&self, addr: u64, bytes: u64) {
        // SAFETY: the caller vouches for the reservation, in which nothing is mapped.
        unsafe { self.0.backing.release(addr, bytes) };
        self.0.state.write().reservations -= 1;
    }

    fn create(&self, bytes: u64) -> Result<u64> {
        let mut state = self.0.state.write();
        if state.suspended {
            return Err(Error::Suspended("the memory is suspended; resume it first".into()));
        }
        let handle = self.0.backing.create(bytes)?;
        state.next += 1;
        let own = state.next;
        state.pieces.insert(own, Piece { bytes, handle: Some(handle), at: None });
        Ok(own)
    }

    unsafe fn destroy(&self, handle: u64, bytes: u64) -> Result<()> {
        let mut state = self.0.state.write();
        let Some(piece) = state.pieces.remove(&handle) else { return Ok(()) };
        match piece.handle {
            // SAFETY: the caller vouches for the piece, which is mapped nowhere.
            Some(handle) => unsafe { self.0.backing.destroy(handle, bytes) },
            None => {
                // The allocator gives the bytes back to the budget once more.
                if let Some(budget) = &self.0.budget {
                    budget.count(bytes);
                }
                Ok(())
            }
        }
    }

    unsafe fn map(&self, at: u64, handle: u64, bytes: u64) -> Result<()> {
        let mut state = self.0.state.write();
        let Some(piece) = state.pieces.get_mut(&handle) else {
            return Err(Error::invalid("a piece of another backing"));
        };
        if let Some(handle) = piece.handle {
            // SAFETY: the caller vouches for the range and the piece.
            unsafe { self.0.backing.map(at, handle, bytes) }?;
        }
        piece.at = Some(at);
        state.mapped.insert(at, handle);
        Ok(())
    }

    unsafe fn enable(&self, at: u64, bytes: u64) -> Result<()> {
        let state = self.0.state.read();
        if state.suspended {
            // A resumption enables every range.
            return Ok(());
        }
        // SAFETY: the caller vouches for the range.
        unsafe { self.0.backing.enable(at, bytes) }
    }

    unsafe fn unmap(&self, at: u64, bytes: u64) -> Result<()> {
        let mut state = self.0.state.write();
        let own = state.mapped.get(&at).copied();
        let Some(piece) = own.and_then(|own| state.pieces.get_mut(&own)) else {
            return Err(Error::invalid("a range that is not mapped"));
        };
        if piece.handle.is_some() {
            // SAFETY: the caller vouches for the range.
            unsafe { self.0.backing.unmap(at, bytes) }?;
        }
        piece.at = None;
        state.mapped.remove(&at);
        Ok(())
    }

    unsafe fn fill(&self, at: u64, bytes: u64, byte: u8) -> Result<()> {
        let _state = self.0.in_use(bytes)?;
        // SAFETY: the caller vouches for the range, which has memory.
        unsafe { self.0.backing.fill(at, bytes, byte) }
    }

    unsafe fn verify(&self, at: u64, bytes: u64, byte: u8) -> Result<Option<u64>> {
        let _state = self.0.in_use(bytes)?;
        // SAFETY: the caller vouches for the range, which has memory.
        unsafe { self.0.backing.verify(at, bytes, byte) }
    }

    fn driver_calls(&self) -> u64 {
        self.0.backing.driver_calls()
    }
}

impl fmt::Debug for SuspendableBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.0.state.read();
        f.debug_struct("SuspendableBacking")
            .field("pieces", &state.pieces.len())
            .field("suspended", &state.suspended)
            .finish_non_exhaustive()
    }
}
