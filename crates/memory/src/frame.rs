//! Function frames and their slot buffers.
//!
//! A frame opens a scope of its own, which only the frame's end closes. Its slots grow geometrically without copying;
//! outgrown buffers stay readable until the frame ends.
//!
//! # A function that forgets `function_exit`
//! Left alone, its frame would shift those of all its callers: their slots would be its slots. C callers therefore
//! pass, unseen, where they stand: the stack pointer at the call and its return address. A frame is taken for abandoned if its stack
//! pointer lies below the present caller's (its function has returned), and another frame further out was opened by a call from
//! exactly the present stack pointer and from a different place in the code. Generated functions call the manager from their own
//! bodies, where the stack pointer is always the same; a program that opens frames through one helper function has one
//! return address for all of them, and nothing is ever concluded from it.

use std::ffi::c_void;
use std::ptr;

use leasehold_core::sync::atomic::Ordering::Relaxed;

use crate::local::{Local, Mark};
use crate::misuse::Misuse;
use crate::shared::bump;
use crate::table::NIL;

/// More slots than any function has; asked for by mistake.
pub(crate) const MAX_SLOTS: i64 = 1 << 16;
/// Larger requests are refused without asking the C allocator.
const MAX_BYTES: u64 = 1 << 40;
const FIRST_BYTES: u64 = 32;

/// Where a C caller stands.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Caller {
    /// Stack pointer at the call, 0 if unknown.
    pub(crate) sp: usize,
    /// Return address.
    pub(crate) pc: usize,
}

/// A function's frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    caller: Caller,
    /// First of its slots.
    slot_base: u32,
    slots: u32,
    /// First of its deferred buffers.
    deferred_base: u32,
    /// The depth before it was opened.
    pub(crate) depth: u32,
    /// The floor before it was opened.
    floor: u32,
}

/// A slot's buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    buffer: *mut c_void,
    capacity: u64,
}

/// An outgrown buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deferred {
    buffer: *mut c_void,
    capacity: u64,
}

impl Local {
    /// Opens a frame with `slots` slots, and its scope.
    pub(crate) fn function_enter(&self, slots: i64, caller: Caller) {
        if self.logs() {
            self.log("function_enter", 0, slots);
        }
        let mut count = 0;
        if (0..=MAX_SLOTS).contains(&slots) {
            count = slots as u32;
        } else {
            self.misuse(Misuse::SlotCount, 0, slots);
        }
        let slot_base = self.slots.len();
        for _ in 0..count {
            if !self.slots.push(Slot { buffer: ptr::null_mut(), capacity: 0 }) {
                self.misuse(Misuse::OutOfMemory, 0, slots);
                self.slots.truncate(slot_base);
                count = 0;
                break;
            }
        }
        let depth = self.depth();
        let floor = self.floor.get();
        self.enter_scope();
        let frame = Frame { caller, slot_base, slots: count, deferred_base: self.deferred.len(), depth, floor };
        if self.depth() > depth && self.frames.push(frame) {
            self.floor.set(depth + 1);
        } else {
            self.misuse(Misuse::OutOfMemory, 0, slots);
            self.slots.truncate(slot_base);
            self.close_to(depth);
        }
    }

    /// Closes the frame of the calling function with every scope left open in it.
    pub(crate) fn function_exit(&self, sp: usize) {
        self.repair_frames(sp);
        if self.frames.len() <= self.base_frames.get() {
            self.misuse(Misuse::FunctionExit, 0, i64::from(self.depth()));
            return;
        }
        if self.logs() {
            self.log("function_exit", 0, 0);
        }
        if let Some(frame) = self.frames.last() {
            for depth in frame.depth + 1..self.depth() {
                self.misuse(Misuse::ScopeRepaired, 0, i64::from(depth));
            }
        }
        self.close_frame();
    }

    /// Closes the newest frame and every scope opened since, then frees its buffers.
    pub(crate) fn close_frame(&self) {
        let Some(frame) = self.frames.last() else { return };
        // While its scopes close, destructors still find the frame in place.
        self.close_to(frame.depth);
        self.frames.truncate(self.frames.len() - 1);
        self.floor.set(frame.floor);
        let p = &self.published;
        while self.slots.len() > frame.slot_base
            && let Some(slot) = self.slots.pop()
        {
            if !slot.buffer.is_null() {
                bump(&p.slot_buffers, -1);
                bump(&p.slot_bytes, -(slot.capacity as i64));
                // SAFETY: the buffer came from `malloc` and its frame is over.
                unsafe { libc::free(slot.buffer) };
            }
        }
        while self.deferred.len() > frame.deferred_base
            && let Some(old) = self.deferred.pop()
        {
            bump(&p.deferred_buffers, -1);
            bump(&p.deferred_bytes, -(old.capacity as i64));
            // SAFETY: as above.
            unsafe { libc::free(old.buffer) };
        }
    }

    /// Closes frames whose functions have returned, going by where the caller stands. See the module's documentation.
    #[inline(always)]
    pub(crate) fn repair_frames(&self, sp: usize) {
        if let Some(newest) = self.frames.last()
            && newest.caller.sp < sp
            && newest.caller.sp != 0
        {
            self.repair_frames_slow(sp);
        }
    }

    #[cold]
    fn repair_frames_slow(&self, sp: usize) {
        let base = self.base_frames.get();
        let mut own = self.frames.len();
        let own_frame = loop {
            if own <= base {
                return;
            }
            own -= 1;
            match self.frames.get(own) {
                Some(frame) if frame.caller.sp == sp => break frame,
                Some(frame) if frame.caller.sp != 0 && frame.caller.sp < sp => {}
                _ => return,
            }
        };
        let abandoned = own + 1..self.frames.len();
        let elsewhere = |i| self.frames.get(i).is_some_and(|f| f.caller.pc != own_frame.caller.pc);
        if !abandoned.clone().all(elsewhere) {
            return;
        }
        for _ in abandoned {
            self.misuse(Misuse::FrameRepaired, 0, i64::from(self.frames.len()));
            self.close_frame();
        }
    }

    /// A buffer of at least `min` bytes in a slot of the newest frame.
    #[inline(always)]
    pub(crate) fn get_buffer(&self, slot: i64, min: i64, sp: usize) -> *mut c_void {
        if let Some(frame) = self.frames.last()
            && self.frames.len() > self.base_frames.get()
            && frame.caller.sp >= sp
            && (slot as u64) < u64::from(frame.slots)
            && let Some(Slot { buffer, capacity }) = self.slots.get(frame.slot_base + slot as u32)
            && !buffer.is_null()
            && min >= 0
            && min as u64 <= capacity
        {
            return buffer;
        }
        self.get_buffer_slow(slot, min, sp)
    }

    #[cold]
    #[inline(never)]
    fn get_buffer_slow(&self, slot: i64, min: i64, sp: usize) -> *mut c_void {
        self.repair_frames(sp);
        if self.logs() {
            self.log("get_buffer", slot as usize, min);
        }
        let Some(frame) = self.frames.last().filter(|_| self.frames.len() > self.base_frames.get()) else {
            self.misuse(Misuse::NoFrame, 0, slot);
            return ptr::null_mut();
        };
        if slot as u64 >= u64::from(frame.slots) {
            self.misuse(Misuse::SlotIndex, 0, slot);
            return ptr::null_mut();
        }
        if !(0..=MAX_BYTES as i64).contains(&min) {
            self.misuse(Misuse::Size, 0, min);
            return ptr::null_mut();
        }
        let at = frame.slot_base + slot as u32;
        let Some(old) = self.slots.get(at) else { return ptr::null_mut() };
        let min = min as u64;
        if !old.buffer.is_null() && old.capacity >= min {
            return old.buffer;
        }
        let exact = min.max(FIRST_BYTES);
        let mut capacity = exact.max(old.capacity.saturating_mul(2)).min(MAX_BYTES);
        // SAFETY: `malloc` has no conditions.
        let mut buffer = unsafe { libc::malloc(capacity as usize) };
        if buffer.is_null() {
            capacity = exact;
            // SAFETY: as above.
            buffer = unsafe { libc::malloc(capacity as usize) };
        }
        if buffer.is_null()
            || (!old.buffer.is_null() && !self.deferred.push(Deferred { buffer: old.buffer, capacity: old.capacity }))
        {
            // SAFETY: the new buffer, if any, is nobody's yet.
            unsafe { libc::free(buffer) };
            self.misuse(Misuse::OutOfMemory, 0, min as i64);
            return ptr::null_mut();
        }
        self.slots.set(at, Slot { buffer, capacity });
        let p = &self.published;
        if old.buffer.is_null() {
            bump(&p.slot_buffers, 1);
        } else {
            bump(&p.deferred_buffers, 1);
            bump(&p.deferred_bytes, old.capacity as i64);
        }
        let bytes = bump(&p.slot_bytes, capacity as i64 - old.capacity as i64) + p.deferred_bytes.load(Relaxed);
        if bytes > p.peak_slot_bytes.load(Relaxed) {
            p.peak_slot_bytes.store(bytes, Relaxed);
        }
        buffer
    }
}

const _: () = assert!(NIL == u32::MAX && size_of::<Mark>() == 8);
