//! The end of an attachment.
//!
//! This module must not know why the attachment ends.

use crate::local::Local;
use crate::misuse::Misuse;

impl Local {
    /// Closes every frame and scope, including the content of the outermost one, and releases
    /// everything that waits. Within a destructor or hook the call is a misuse, because interrupted
    /// operations are still in progress.
    pub(crate) fn close_all(&self) {
        if self.calling.get() {
            self.misuse(Misuse::ExitScope, 0, i64::from(self.depth()));
            return;
        }
        while self.frames.len() > 0 {
            self.close_frame();
        }
        self.close_to(1);
        self.empty_scope(1);
        self.destroy_orphans();
    }

    /// Ends this attachment and closes all frames and scopes. Later registrations are refused.
    pub(crate) fn detach(&self) {
        if self.depth() == 0 {
            return;
        }
        if self.logs() {
            self.log("thread_exit", 0, i64::from(self.depth()));
        }
        // A destructor that never returned may have left these values.
        self.destroying.set(false);
        self.floor.set(1);
        self.base_depth.set(1);
        self.base_frames.set(0);
        while self.frames.len() > 0 {
            self.close_frame();
        }
        self.close_to(1);
        self.empty_scope(1);
        self.destroy_pending();
        self.marks.truncate(0);
        self.report_live();
    }

    /// Ends the attachment of a thread that is ending. The program's thread-local objects may be
    /// destroyed already, so no hook or destructor of the program is called. Objects that need one
    /// are left to other threads.
    #[cfg(not(loom))]
    pub(crate) fn detach_quietly(&self) {
        self.quiet.set(true);
        self.detach();
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.detach();
        self.shared.leave(&self.published);
    }
}
