//! Frames whose function has returned without closing them.
//!
//! C callers pass their position implicitly: the stack pointer at the call and its return address.
//! A jump in the place of a call passes the position of the caller's caller. So a function's exit
//! passes none, unless the caller vouches for a call (`tl_mem_function_exit_notail`).
//! A frame that was opened further down the stack than the present caller belongs to a function
//! that has returned. Two reasons are possible.
//! - A helper function opened the frame for its caller, who uses and closes it.
//! - A function forgot `function_exit`. If this frame stayed, it would shift the frames of all
//!   callers: their slots would be its slots.
//!
//! These frames matter only if the caller has a frame of its own further out. The caller's own
//! frame was opened from exactly the present stack pointer and from a different place in the code.
//! (A program that opens all frames through one helper has one return address for all; then the
//! newest frame is used.) Then a frame is *forgotten* if its function used one of its slots, or if
//! another frame from the same place was found forgotten. For `get_buffer` a frame without the
//! requested slot is forgotten too.
//! - `get_buffer` uses the newest frame that is not forgotten. By this a helper's frame becomes the
//!   caller's own.
//! - `function_exit` with a position closes the newest frames that are forgotten, and the next one.
//! - `exit_scope` closes forgotten frames above a scope of the caller.
//!
//! If a forgotten frame shows no such evidence, the caller takes it as its own. Its requests for
//! slots use this frame, and `function_exit` closes it in place of the caller's own frame. The own
//! frame keeps a note of it. A later call by a function further out, or a new call of the same
//! function, shows that the own frame is over too. Then the call site is noted as a leaking one.
//!
//! A frame is closed only by a function that closes a frame or scope further out. So objects that
//! were registered meanwhile live as long as in any other interpretation. The same holds for the
//! frame of a coroutine on another stack.
//!
//! This module must not know slots' buffers.

use crate::local::{Caller, Frame, Local};
use crate::misuse::Misuse;

/// The maximum number of noted call sites.
const LEAKING_SITES_MAX: u32 = 64;

impl Local {
    /// The own frame of the function at `sp`, if newer frames are open whose functions have
    /// returned.
    pub(crate) fn own_frame(&self, sp: usize) -> Option<u32> {
        let newest = self.frames.last()?.caller.sp;
        if newest >= sp || newest == 0 {
            return None;
        }
        let mut at = self.frames.len();
        let own = loop {
            at = at.checked_sub(1).filter(|&at| at >= self.base_frames.get())?;
            match self.frames.get(at)?.caller {
                caller if caller.sp == sp => break caller,
                caller if caller.sp != 0 && caller.sp < sp => {}
                _ => return None,
            }
        };
        let elsewhere = |i| self.frames.get(i).is_some_and(|f| f.caller.pc != own.pc);
        (at + 1..self.frames.len()).all(elsewhere).then_some(at)
    }

    /// Returns whether the function of a frame that has returned forgot to close it.
    pub(crate) fn forgotten(&self, at: u32) -> bool {
        let Some(frame) = self.frames.get(at) else { return false };
        let taken = Caller { sp: frame.caller.sp, pc: frame.instead };
        // A frame that the function took and that is still open proves nothing about its place.
        let open = |i| self.frames.read(i, |f| f.caller == taken) == Some(true);
        if frame.instead != 0 && !(at + 1..self.frames.len()).any(open) {
            self.note_leaking_site(frame.instead);
        }
        frame.used
            || frame.instead != 0
            || (0..self.leaking_sites.len())
                .any(|i| self.leaking_sites.get(i) == Some(frame.caller.pc))
    }

    /// Notes the call site `pc` as one that leaks its frame.
    fn note_leaking_site(&self, pc: usize) {
        let known = (0..self.leaking_sites.len()).any(|i| self.leaking_sites.get(i) == Some(pc));
        if !known && self.leaking_sites.len() < LEAKING_SITES_MAX {
            // Without memory the place will be detected again.
            let _ = self.leaking_sites.push(pc);
        }
    }

    /// Closes the frames above frame `last`, all of them forgotten.
    pub(crate) fn close_forgotten(&self, last: u32) {
        while self.frames.len() > last + 1 {
            self.misuse(Misuse::FrameRepaired, 0, i64::from(self.frames.len()));
            self.close_frame();
        }
    }

    /// Closes forgotten frames above a scope that the function at `sp` has opened, before the scope
    /// ends.
    pub(crate) fn uncover_scope(&self, sp: usize) {
        let Some(own) = self.own_frame(sp) else { return };
        let depth = |at| self.frames.get(at).map_or(0, |f: Frame| f.depth);
        // The newest scope without a frame of its own lies below the first of these.
        let first = (own + 1..self.frames.len()).rev().find(|&at| depth(at) > depth(at - 1) + 1);
        if let Some(first) = first
            && (first..self.frames.len()).all(|at| self.forgotten(at))
        {
            self.close_forgotten(first - 1);
        }
    }
}
