//! Host memory that is set aside for the case that the host has none. The standard library ends the
//! process when a box or a list finds no memory, and a function of the C ABI must return a status.
//!
//! A call that the host refuses memory gets it from here. While much of it is in use and the host
//! has none, [`is_low`] says so, and functions that take memory are refused before they begin.
//!
//! # Protocol
//! The memory is handed out in order. When its last part is given back, it begins anew. One word
//! has the number of parts and the bytes in use, so a part is never handed out twice.
//!
//! This module must not know who takes memory.

use leasehold_core::sync::UnsafeCell;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;

/// Bytes that are set aside. The system has no pages for them before they are used.
const SIZE: usize = 4 << 20;
/// More bytes in use than this are many: a call needs less than the rest.
const MANY: usize = SIZE / 4;
/// The largest part.
const LARGEST: usize = SIZE / 16;
const ALIGN: usize = 4096;

#[repr(C, align(4096))]
struct Pages(UnsafeCell<[u8; SIZE]>);

// SAFETY: `take` gives each part to one caller, and nothing else reads or writes the bytes.
unsafe impl Sync for Pages {}

static PAGES: Pages = Pages(UnsafeCell::new([0; SIZE]));
/// The parts that are out, above the bytes that are in use.
static STATE: AtomicU64 = AtomicU64::new(0);

fn bytes_of(state: u64) -> usize {
    (state & u64::from(u32::MAX)) as usize
}

/// A part; null if there is not enough left, or for a size that only a list has which can do
/// without.
#[cold]
fn take(layout: Layout) -> *mut u8 {
    let part = |state: u64| {
        let at = bytes_of(state).next_multiple_of(layout.align());
        let end = at.checked_add(layout.size()).filter(|&end| end <= SIZE)?;
        (layout.align() <= ALIGN && layout.size() <= LARGEST).then_some((at, end))
    };
    let taken = STATE.fetch_update(Ordering::Acquire, Ordering::Relaxed, |state| {
        part(state).map(|(_, end)| ((state >> 32) + 1) << 32 | end as u64)
    });
    match taken.ok().and_then(part) {
        Some((at, _)) => PAGES.0.get().cast::<u8>().wrapping_add(at),
        None => null_mut(),
    }
}

/// Takes a part back.
#[cold]
fn give() {
    let given = STATE.fetch_update(Ordering::Release, Ordering::Relaxed, |state| {
        let parts = (state >> 32) - 1;
        Some(if parts == 0 { 0 } else { state - (1 << 32) })
    });
    debug_assert!(given.is_ok());
}

fn is_part(at: *mut u8) -> bool {
    at.addr().wrapping_sub(PAGES.0.get().addr()) < SIZE
}

/// Whether much is in use, and the host has no memory either.
#[inline]
pub(crate) fn is_low() -> bool {
    bytes_of(STATE.load(Ordering::Relaxed)) > MANY && !host_has_memory()
}

#[cold]
fn host_has_memory() -> bool {
    let layout = const { Layout::new::<[u8; MANY]>() };
    // SAFETY: the layout has a size, and the block is given back at once.
    unsafe {
        let block = System.alloc(layout);
        if !block.is_null() {
            System.dealloc(block, layout);
        }
        !block.is_null()
    }
}

/// The system's memory, and what is set aside where it refuses.
struct WithReserve;

#[global_allocator]
static MEMORY: WithReserve = WithReserve;

// SAFETY: a block is the system's or a part, which nobody else has. Each goes back to where it came
// from, and none of these functions panics.
unsafe impl GlobalAlloc for WithReserve {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: by the caller's promise.
        let block = unsafe { System.alloc(layout) };
        if block.is_null() { take(layout) } else { block }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: by the caller's promise.
        let block = unsafe { System.alloc_zeroed(layout) };
        if !block.is_null() {
            return block;
        }
        let part = take(layout);
        if !part.is_null() {
            // SAFETY: the part has this size.
            unsafe { part.write_bytes(0, layout.size()) };
        }
        part
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if is_part(block) {
            return give();
        }
        // SAFETY: by the caller's promise; the block is the system's.
        unsafe { System.dealloc(block, layout) };
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !is_part(block) {
            // SAFETY: by the caller's promise; the block is the system's.
            let grown = unsafe { System.realloc(block, layout, size) };
            if !grown.is_null() {
                return grown;
            }
        }
        // SAFETY: by the caller's promise. After a refusal the block is as it was; both blocks have
        // the bytes that are copied.
        unsafe {
            let other = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !other.is_null() {
                other.copy_from_nonoverlapping(block, layout.size().min(size));
                self.dealloc(block, layout);
            }
            other
        }
    }
}

#[cfg(test)]
#[path = "../tests/unit/reserve.rs"]
mod tests;
