//! Idle memory of growing blocks on its way back: to the pieces in hand, and addresses to the
//! driver. [`ranges`](crate::ranges) says what is idle.
//!
//! The lock is not held across a call of the backing.

use crate::backing::Chunk;
use crate::core::Core;
use crate::lock::Lock;
use crate::ranges::{Busy, IDLE_SHARE, Leaving, busy};
use crate::residency::End;
use crate::supply::Supply;
use leasehold_core::{Error, Result};

/// Brings idle memory whose uses are over back to the pieces in hand, `wanted` bytes if there are
/// so many. Calls the driver. Returns the bytes. Called without the lock.
pub(crate) fn give_back_idle(core: &Lock<Core>, supply: &Supply, wanted: u64) -> u64 {
    let mut freed = 0;
    while freed < wanted {
        let leaving = {
            let Core { ranges, store, .. } = &mut *core.lock();
            ranges.take_idle(&mut store.heap, wanted - freed)
        };
        // Without host memory for the list the memory stays where it is.
        let Ok(Some(leaving)) = leaving else { break };
        let (bytes, moved) = send_away(core, supply, leaving);
        freed += bytes;
        if !moved {
            break;
        }
    }
    freed
}

/// Brings idle memory beyond its share back to the pieces in hand.
pub(crate) fn trim_idle(core: &Lock<Core>, supply: &Supply) {
    let idle = core.lock().ranges.idle_bytes();
    let most = supply.budget.limit().min(supply.caps.physical) / IDLE_SHARE;
    if idle > most {
        give_back_idle(core, supply, idle - most);
    }
}

/// Unmaps what leaves a range. Returns the bytes that are in hand now or with the driver, and
/// whether anything has left.
fn send_away(core: &Lock<Core>, supply: &Supply, mut leaving: Leaving) -> (u64, bool) {
    supply.unmap(&mut leaving.steps);
    let (mut bytes, gone, whole) = {
        let Core { ranges, store, .. } = &mut *core.lock();
        ranges.end_idle(&mut store.heap, &leaving)
    };
    if let (Some((base, size, chunk)), true) = (leaving.whole, whole) {
        // SAFETY: the range was taken out of the table, and nothing is mapped in it.
        bytes += unsafe { release_range(supply, base, size, chunk) };
    }
    (bytes, gone || leaving.steps.iter().any(|s| s.end == End::Loose))
}

/// Unmaps all pieces beyond the length of a block.
///
/// # Errors
/// `Occupied` while work may still use them, or another thread maps memory for the block;
/// `InvalidState` if the driver keeps one.
pub(crate) fn empty_tail(core: &Lock<Core>, supply: &Supply, at: usize) -> Result<()> {
    let leaving = {
        let Core { ranges, store, .. } = &mut *core.lock();
        match ranges.get(at) {
            Some(range) if range.mapped == range.committed => None,
            Some(range) if range.busy != Busy::No => return Err(busy()),
            Some(range) if !range.is_over() => {
                return Err(Error::Occupied {
                    resource: "memory that a growing block had (work may still use it)",
                });
            }
            _ => ranges.take_tail(&mut store.heap, at, u64::MAX)?,
        }
    };
    if let Some(leaving) = leaving {
        send_away(core, supply, leaving);
    }
    match core.lock().ranges.get(at) {
        Some(range) if range.broken => Err(Error::state(
            "the driver did not unmap a place of the growing block; make another block",
        )),
        _ => Ok(()),
    }
}

/// Gives addresses without memory back to the driver, or a chunk. Returns the chunk's bytes.
///
/// # Safety
/// - The range was reserved or committed for a growing block. No table has it, nothing is mapped
///   in a reservation, and nobody uses a chunk.
pub(crate) unsafe fn release_range(
    supply: &Supply,
    base: u64,
    bytes: u64,
    chunk: Option<Chunk>,
) -> u64 {
    let Some(chunk) = chunk else {
        // SAFETY: the caller vouches for the reservation.
        unsafe { supply.backing.release(base, bytes) };
        return 0;
    };
    // SAFETY: the caller vouches for the chunk.
    if unsafe { supply.give_segment(chunk) } { chunk.bytes } else { 0 }
}
