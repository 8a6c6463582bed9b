//! Function frames and their slot buffers.
//!
//! A frame opens its own scope, which only the frame's end closes. Slot buffers grow geometrically
//! without copying. Outgrown buffers stay readable until the frame ends.
//!
//! This module must not know what a scope holds.

use std::ffi::c_void;
use std::ptr;

use leasehold_core::sync::atomic::Ordering::Relaxed;

use crate::local::{Caller, Deferred, Frame, Local, Mark, Slot};
use crate::misuse::Misuse;
use crate::shared::bump;
use crate::table::NIL;

/// The maximum number of slots; a greater number is a misuse.
pub(crate) const MAX_SLOTS: i64 = 1 << 16;
/// Larger requests are refused without a call of the C allocator.
const MAX_BYTES: u64 = 1 << 40;
const FIRST_BYTES: u64 = 32;

impl Local {
    /// Opens a frame with `slots` slots, and its scope.
    pub(crate) fn function_enter(&self, slots: i64, caller: Caller) {
        if self.logs() {
            self.log("function_enter", 0, slots);
        }
        self.reenter(caller);
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
        let deferred_base = self.deferred.len();
        let frame = Frame {
            caller,
            slot_base,
            slots: count,
            deferred_base,
            depth,
            floor,
            used: false,
            instead: 0,
        };
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
        if self.frames.len() <= self.base_frames.get() {
            self.misuse(Misuse::FunctionExit, 0, i64::from(self.depth()));
            return;
        }
        if self.logs() {
            self.log("function_exit", 0, 0);
        }
        if let Some(own) = self.own_frame(sp) {
            self.close_own(own);
            return;
        }
        self.exit_newest();
    }

    /// Closes the newest frame for its function.
    fn exit_newest(&self) {
        if let Some(frame) = self.frames.last() {
            for depth in frame.depth + 1..self.depth() {
                self.misuse(Misuse::ScopeRepaired, 0, i64::from(depth));
            }
        }
        self.close_frame();
    }

    // ---- frames whose function has returned: see `forgotten.rs`

    /// Closes the newest frames that are forgotten, and the next one, for the function with frame
    /// `own`.
    #[cold]
    fn close_own(&self, own: u32) {
        let kept = (own + 1..self.frames.len()).rev().find(|&at| !self.forgotten(at));
        self.close_forgotten(kept.unwrap_or(own));
        if let Some(at) = kept {
            self.take_for(own, at);
        }
        self.exit_newest();
    }

    /// Notes that the function with frame `own` takes frame `at` as its own.
    fn take_for(&self, own: u32, at: u32) {
        let Some(taken) = self.frames.get(at) else { return };
        self.frames.update(own, |frame| {
            if frame.instead == 0 {
                self.frames_taken.update(|count| count + 1);
            }
            frame.instead = taken.caller.pc;
        });
    }

    /// Handles a function that opens a frame. If an earlier call of this function has taken another
    /// frame in place of its own, and its own is still open, then the earlier call is over.
    #[inline(always)]
    fn reenter(&self, caller: Caller) {
        let over = |frame: &Frame| {
            frame.caller.sp <= caller.sp && (frame.caller.sp != caller.sp || frame.instead != 0)
        };
        let newest = self.frames.len().wrapping_sub(1);
        if self.frames_taken.get() != 0 && self.frames.read(newest, over) == Some(true) {
            self.reenter_slow(caller, newest);
        }
    }

    #[cold]
    #[inline(never)]
    fn reenter_slow(&self, caller: Caller, newest: u32) {
        let Some((at, frame)) = (self.base_frames.get()..self.frames.len())
            .rev()
            .filter_map(|at| Some((at, self.frames.get(at)?)))
            .take_while(|(_, frame)| frame.caller.sp <= caller.sp)
            .find(|(_, frame)| frame.instead != 0 && frame.caller == caller)
        else {
            return;
        };
        // This notes the place that leaks.
        self.forgotten(at);
        // Newer frames may be a coroutine's. Objects that were registered since then must stay
        // alive.
        let empty =
            |i| self.marks.read(i, |mark| mark.head == NIL && mark.flags == 0) == Some(true);
        if at == newest && (frame.depth..self.depth()).all(empty) {
            self.misuse(Misuse::FrameRepaired, 0, i64::from(newest));
            self.close_frame();
        }
    }

    /// The frame to which a request for a slot refers.
    fn meant(&self, slot: i64, sp: usize) -> Option<u32> {
        let newest = self.frames.len().checked_sub(1).filter(|&at| at >= self.base_frames.get())?;
        let Some(own) = self.own_frame(sp) else { return Some(newest) };
        let has = |at| self.frames.get(at).is_some_and(|f| (slot as u64) < u64::from(f.slots));
        let at = (own + 1..=newest).rev().find(|&at| has(at) && !self.forgotten(at)).unwrap_or(own);
        if at == newest {
            // A helper opened the frame for this function, which owns it from now on.
            self.take_for(own, at);
            self.frames.update(at, |frame| frame.caller.sp = sp);
        }
        Some(at)
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
        if self.logs() {
            self.log("get_buffer", slot as usize, min);
        }
        let Some((meant, frame)) =
            self.meant(slot, sp).and_then(|at| Some((at, self.frames.get(at)?)))
        else {
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
        if sp <= frame.caller.sp && sp != 0 {
            self.frames.update(meant, |frame| frame.used = true);
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
            // SAFETY: `malloc` has no conditions.
            buffer = unsafe { libc::malloc(capacity as usize) };
        }
        if buffer.is_null()
            || (!old.buffer.is_null()
                && !self.deferred.push(Deferred { buffer: old.buffer, capacity: old.capacity }))
        {
            // SAFETY: no other code knows the new buffer, if one exists.
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
        let bytes = bump(&p.slot_bytes, capacity as i64 - old.capacity as i64)
            + p.deferred_bytes.load(Relaxed);
        if bytes > p.peak_slot_bytes.load(Relaxed) {
            p.peak_slot_bytes.store(bytes, Relaxed);
        }
        buffer
    }
}

const _: () = assert!(NIL == u32::MAX && size_of::<Mark>() == 8);
