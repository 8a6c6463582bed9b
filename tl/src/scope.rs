//! Scopes: entering, leaving, and unwinding to a mark.
//!
//! This module must not know what the end of a scope releases.

use leasehold_core::sync::atomic::Ordering::Relaxed;

use crate::local::{HOOKED, Local, Mark};
use crate::misuse::Misuse;
use crate::table::NIL;

impl Local {
    #[inline(always)]
    pub(crate) fn enter_scope(&self) {
        if self.shared.flags.load(Relaxed) == 0 {
            if !self.marks.push(Mark { head: NIL, flags: 0 }) {
                self.misuse(Misuse::OutOfMemory, 0, 0);
            }
        } else {
            self.enter_scope_slow();
        }
    }

    #[cold]
    fn enter_scope_slow(&self) {
        self.destroy_orphans();
        let mut flags = 0;
        if let Some((enter, exit)) = self.shared.scope_hooks() {
            let mut value = 0;
            self.callback(|| value = enter());
            if self.hooks.push((exit, value)) {
                flags = HOOKED;
            } else {
                self.misuse(Misuse::OutOfMemory, 0, 0);
            }
        }
        if !self.marks.push(Mark { head: NIL, flags }) {
            self.misuse(Misuse::OutOfMemory, 0, 0);
        }
        if self.logs() {
            self.log("enter_scope", 0, 0);
        }
    }

    /// Closes the current scope. `sp` is the caller's stack pointer, 0 if unknown; see
    /// `forgotten.rs`.
    #[inline(always)]
    pub(crate) fn exit_scope(&self, sp: usize) {
        let depth = self.depth();
        if self.marks.read(depth.wrapping_sub(1), |mark| mark.head == NIL && mark.flags == 0)
            == Some(true)
            && depth > self.floor.get()
            && !self.logs()
        {
            self.marks.truncate(depth - 1);
        } else {
            self.exit_scope_slow(sp);
        }
    }

    #[cold]
    #[inline(never)]
    fn exit_scope_slow(&self, sp: usize) {
        if self.depth() <= self.floor.get() {
            self.uncover_scope(sp);
        }
        if self.depth() <= self.floor.get() {
            self.misuse(Misuse::ExitScope, 0, i64::from(self.depth()));
            return;
        }
        if self.logs() {
            self.log("exit_scope", 0, 0);
        }
        self.close_scope();
    }

    /// The present position, for [`unwind`](Self::unwind).
    pub(crate) fn mark(&self) -> i64 {
        i64::from(self.frames.len()) << 32 | i64::from(self.depth())
    }

    /// Closes every frame and scope opened since `mark`.
    pub(crate) fn unwind(&self, mark: i64) {
        let (frames, depth) = ((mark >> 32) as u32, mark as u32);
        let innermost = frames.checked_sub(1).and_then(|i| self.frames.get(i));
        let fits = mark > 0
            && (self.base_frames.get()..=self.frames.len()).contains(&frames)
            && (self.base_depth.get()..=self.depth()).contains(&depth)
            // Remaining frames have their scopes below the mark; closed ones have theirs above.
            && innermost.is_none_or(|f| f.depth < depth)
            && self.frames.get(frames).is_none_or(|f| f.depth >= depth);
        if !fits {
            self.misuse(Misuse::Mark, 0, mark);
            return;
        }
        if self.logs() {
            self.log("unwind", 0, mark);
        }
        while self.frames.len() > frames {
            self.close_frame();
        }
        self.close_to(depth);
    }
}
