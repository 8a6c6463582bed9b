//! Worlds: the ranks that work together.

use super::convert::{answer, check_out, give, limit, owned};
use super::operand::room;
use crate::kinds::WORLDS;
use crate::status::{ffi_guard, ffi_guard_release};
use leasehold::Error;
use leasehold_collective::World;
use std::ffi::{c_char, c_int};
use std::time::Duration;

/// The longest limit that ranks are given: a year.
const MOST: Duration = Duration::from_secs(365 * 24 * 3600);

/// A rank and its world.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdWorldInfo {
    /// `sizeof` this struct.
    pub size: usize,
    /// This rank, counted from 0.
    pub rank: u32,
    /// The number of ranks.
    pub ranks: u32,
    /// This rank among those of its host.
    pub local_rank: u32,
    /// 0.
    pub reserved: u32,
}

/// A limit of time for what ranks wait for.
pub(crate) fn limit_of_ranks(nanoseconds: u64) -> Duration {
    limit(nanoseconds).unwrap_or(MOST).min(MOST)
}

/// Opens the world that the environment names.
///
/// # Safety
/// - `world` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_world_open(world: *mut u64) -> c_int {
    ffi_guard(|| {
        check_out(world, "the world's place")?;
        let made = WORLDS.add(World::from_env()?)?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(world, made, "the world's place") }
    })
}

/// Opens worlds for ranks that are threads of this process.
///
/// # Safety
/// - `worlds` has room for `count` handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_world_open_threads(count: u32, worlds: *mut u64) -> c_int {
    ffi_guard(|| {
        check_out(worlds, "the worlds' place")?;
        let mut made: Vec<u64> = room(count as usize)?;
        for world in World::threads(count)? {
            let added = WORLDS.add(world);
            if added.is_err() {
                made.drain(..).try_for_each(|world| WORLDS.release(world))?;
            }
            made.push(added?);
        }
        // SAFETY: the caller says that there is room for as many handles.
        unsafe { worlds.copy_from_nonoverlapping(made.as_ptr(), made.len()) };
        Ok(())
    })
}

/// Describes a rank and its world.
///
/// # Safety
/// - `info` is a struct that begins with its size and can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_world_describe(
    world: u64,
    info: *mut LeaseholdWorldInfo,
) -> c_int {
    ffi_guard(|| {
        let world = WORLDS.get(world)?;
        let found = LeaseholdWorldInfo {
            size: 0,
            rank: world.rank(),
            ranks: world.size(),
            local_rank: world.local_rank(),
            reserved: 0,
        };
        // SAFETY: the caller vouches for the struct.
        unsafe { answer(info, &found, "info") }
    })
}

/// The work of each rank, as a text.
///
/// # Safety
/// - `text` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_world_report(
    world: u64,
    timeout_ns: u64,
    text: *mut *mut c_char,
) -> c_int {
    ffi_guard(|| {
        check_out(text, "the text's place")?;
        let report = WORLDS.get(world)?.report(limit_of_ranks(timeout_ns))?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(text, owned(report)?, "the text's place") }
    })
}

/// Adds a holder of a world.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_world_retain(world: u64) -> c_int {
    ffi_guard(|| WORLDS.retain(world))
}

/// Lets go of a world. Without a close before it, the rank is lost to the others.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_world_release(world: u64) -> c_int {
    ffi_guard_release(|| WORLDS.release(world))
}

/// Ends a rank in order, and lets go of its world. After a time-out the world is still there.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_world_close(world: u64, timeout_ns: u64) -> c_int {
    ffi_guard_release(|| {
        let open = World::clone(&*WORLDS.get(world)?);
        let over = open.close(limit_of_ranks(timeout_ns));
        if let Err(Error::Timeout(_)) = over {
            return over;
        }
        WORLDS.release(world).and(over)
    })
}
