//! A thread's attachment to a manager: its scopes, their records, and its frames.
//!
//! This file holds the state, scopes and marks. `record.rs` registers and counts, `death.rs`
//! destroys, `frame.rs` has frames and slots. Only one thread uses a `Local`, so nothing here is
//! locked. Shared state lies behind [`Shared`](crate::shared::Shared).
//!
//! # Protocol
//! Destructors and hooks may call back into the same `Local`. So every method takes `&self`, state
//! is copied in and out of cells, and no borrow lasts across a call. A callback runs inside
//! [`Local::callback`], which raises the floor. The callback can neither close scopes and frames
//! that were open before it, nor leave its own open.
//!
//! A scope is a [`Mark`] with a list of records, newest first. A record is (address, generation).
//! If the table no longer knows that life of the object, the record is void. All records of one
//! object in one thread form a chain from the newest to the oldest. The table's entry (or, for a
//! second thread, `foreign`) points to the newest record.

use std::cell::{Cell, RefCell};
use std::ffi::c_char;

use leasehold_core::sync::atomic::Ordering::Relaxed;

use crate::death::{Dead, Waiting};
use crate::frame::{Deferred, Frame, Slot};
use crate::heap::{NoMemory, Owned};
use crate::misuse::{LastError, Misuse};
use crate::names::NameCache;
use crate::pool::IntMap;
use crate::record::Record;
use crate::shared::{HOOKS, LOG, ORPHANS, Published, ScopeExitHook, SharedRef, bump};
use crate::stack::Stack;
use crate::table::NIL;

/// A scope.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    /// The newest record.
    pub(crate) head: u32,
    /// [`HOOKED`] and [`MOURNING`].
    pub(crate) flags: u32,
}

/// A scope hook waits for the end of this scope.
pub(crate) const HOOKED: u32 = 1;
/// Tensors that died in this scope wait for its end.
pub(crate) const MOURNING: u32 = 2;

/// The batch size in which births and deaths are added to the shared total.
const BATCH: i32 = 64;

/// A thread's attachment; see the module's documentation.
#[repr(C)]
pub(crate) struct Local {
    // The fields of an empty enter and exit come first, so that they share a cache line.
    pub(crate) marks: Stack<Mark>,
    /// `exit_scope` closes only scopes above this depth.
    pub(crate) floor: Cell<u32>,
    /// This attachment's id.
    pub(crate) me: u32,
    pub(crate) shared: SharedRef,
    pub(crate) frames: Stack<Frame>,
    pub(crate) slots: Stack<Slot>,
    /// The places of frames that were never closed; see `frame.rs`.
    pub(crate) forgetful: Stack<usize>,
    pub(crate) records: Stack<Record>,
    pub(crate) free_record: Cell<u32>,
    pub(crate) site: Cell<u32>,
    net: Cell<i32>,
    highest: Cell<i32>,
    /// Depth and number of frames at the start of the running callback. The callback must not close
    /// anything below.
    pub(crate) base_depth: Cell<u32>,
    pub(crate) base_frames: Cell<u32>,
    pub(crate) deferred: Stack<Deferred>,
    hooks: Stack<(ScopeExitHook, u64)>,
    /// Newest records of objects whose entry points to another thread's.
    pub(crate) foreign: RefCell<IntMap<usize, u32>>,
    pub(crate) dying: Stack<Dead>,
    pub(crate) burying: Cell<bool>,
    pub(crate) waiting: Stack<Waiting>,
    /// The waiting tensors before this index have left the quarantine.
    pub(crate) waiting_from: Cell<u32>,
    /// A hook or destructor of the program is running.
    calling: Cell<bool>,
    /// The thread is ending: no function of the program is called any more.
    pub(crate) quiet: Cell<bool>,
    pub(crate) published: Owned<Published>,
    pub(crate) names: NameCache,
    last_error: Cell<Option<LastError>>,
}

impl Local {
    /// Attaches to `shared`, at depth 1.
    pub(crate) fn new(shared: SharedRef) -> Result<Self, NoMemory> {
        let (me, published) = shared.join()?;
        let local = Self {
            marks: Stack::new(),
            floor: Cell::new(1),
            me,
            shared,
            frames: Stack::new(),
            slots: Stack::new(),
            forgetful: Stack::new(),
            records: Stack::new(),
            free_record: Cell::new(NIL),
            site: Cell::new(0),
            net: Cell::new(0),
            highest: Cell::new(0),
            base_depth: Cell::new(1),
            base_frames: Cell::new(0),
            deferred: Stack::new(),
            hooks: Stack::new(),
            foreign: RefCell::new(IntMap::default()),
            dying: Stack::new(),
            burying: Cell::new(false),
            waiting: Stack::new(),
            waiting_from: Cell::new(0),
            calling: Cell::new(false),
            quiet: Cell::new(false),
            published,
            names: NameCache::new(),
            last_error: Cell::new(None),
        };
        // Without memory for this first scope, registrations are refused one by one, as out of
        // memory.
        let _ = local.marks.push(Mark { head: NIL, flags: 0 });
        Ok(local)
    }

    /// The current depth; 1 at rest.
    #[inline(always)]
    pub(crate) fn depth(&self) -> u32 {
        self.marks.len()
    }

    #[inline(always)]
    pub(crate) fn logs(&self) -> bool {
        self.shared.flags.load(Relaxed) & LOG != 0
    }

    #[cold]
    pub(crate) fn log(&self, op: &str, address: usize, value: i64) {
        if let Some(log) = &self.shared.log {
            log.line(self.me, self.depth(), format_args!("op={op} ptr={address:#x} value={value}"));
        }
    }

    /// Counts a misuse and keeps it as the last error. A misuse has no other effect.
    #[cold]
    pub(crate) fn misuse(&self, misuse: Misuse, address: usize, value: i64) {
        bump(&self.published.misuses[misuse as usize], 1);
        self.last_error.set(Some(LastError { misuse, address, value }));
        if self.logs() {
            self.log(misuse.name(), address, value);
        }
    }

    /// The id of a name. Without memory for a new name: no id, and a counted misuse.
    ///
    /// # Safety
    /// - As for [`NameCache::intern`].
    pub(crate) unsafe fn intern(&self, name: *const c_char) -> u32 {
        // SAFETY: by the caller's promise.
        unsafe { self.names.intern(name) }.unwrap_or_else(|_| {
            self.misuse(Misuse::OutOfMemory, name.addr(), 0);
            crate::names::NONE
        })
    }

    pub(crate) fn last_error(&self) -> Option<LastError> {
        self.last_error.get()
    }

    /// The number of this thread's misuses of a kind.
    pub(crate) fn misuses(&self, misuse: Misuse) -> u64 {
        self.published.misuses[misuse as usize].load(Relaxed)
    }

    // ---- scopes

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
        self.adopt();
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

    /// Closes the current scope. `sp` is the caller's stack pointer, 0 if unknown (see `frame.rs`).
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

    /// Closes the newest scope, without regard to the floor: releases its records, releases the
    /// tensors that died in it, and runs its hook.
    pub(crate) fn close_scope(&self) {
        let depth = self.depth();
        self.empty_scope(depth);
        if let Some(mark) = self.marks.last()
            && mark.flags & HOOKED != 0
            && let Some((exit, value)) = self.hooks.pop()
            && !self.quiet.get()
        {
            self.callback(|| exit(value));
            // Objects that the hook registered belong to the closing scope.
            self.empty_scope(depth);
        }
        self.marks.truncate(depth - 1);
    }

    /// Releases the records and dead tensors of scope `depth`, the newest one, until none are left
    /// (destructors may add some).
    fn empty_scope(&self, depth: u32) {
        loop {
            while let Some(head) = self.marks.read(depth - 1, |mark| mark.head)
                && head != NIL
            {
                self.release_record(head);
            }
            if !self.end_mourning(depth) {
                break;
            }
        }
    }

    /// Closes scopes until `depth` are left.
    pub(crate) fn close_to(&self, depth: u32) {
        while self.depth() > depth.max(1) {
            self.close_scope();
        }
    }

    /// Runs a hook or destructor of the caller, which may call back. See the module's
    /// documentation.
    pub(crate) fn callback(&self, f: impl FnOnce()) {
        let (depth, frames) = (self.depth(), self.frames.len());
        let floor = self.floor.replace(depth);
        let base_depth = self.base_depth.replace(depth);
        let base_frames = self.base_frames.replace(frames);
        let calling = self.calling.replace(true);
        f();
        while self.frames.len() > frames {
            self.misuse(Misuse::FrameRepaired, 0, i64::from(self.frames.len()));
            self.close_frame();
        }
        while self.depth() > depth {
            self.misuse(Misuse::ScopeRepaired, 0, i64::from(self.depth()));
            self.close_scope();
        }
        self.floor.set(floor);
        self.base_depth.set(base_depth);
        self.base_frames.set(base_frames);
        self.calling.set(calling);
    }

    // ---- marks

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

    // ---- peaks

    #[inline(always)]
    pub(crate) fn count_birth(&self) {
        let net = self.net.get() + 1;
        self.net.set(net);
        if net > self.highest.get() {
            self.highest.set(net);
            if net >= BATCH {
                self.report_live();
            }
        }
    }

    #[inline(always)]
    pub(crate) fn count_death(&self) {
        let net = self.net.get() - 1;
        self.net.set(net);
        if net <= -BATCH {
            self.report_live();
        }
    }

    #[cold]
    pub(crate) fn report_live(&self) {
        self.shared.add_live(self.net.replace(0).into(), self.highest.replace(0).into());
    }

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
        self.adopt();
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
        self.burying.set(false);
        self.floor.set(1);
        self.base_depth.set(1);
        self.base_frames.set(0);
        while self.frames.len() > 0 {
            self.close_frame();
        }
        self.close_to(1);
        self.empty_scope(1);
        self.work_off();
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

    /// Destroys objects that ended threads have left.
    pub(crate) fn adopt(&self) {
        while self.shared.flags.load(Relaxed) & ORPHANS != 0
            && let Some(dead) = self.shared.take_orphan()
        {
            self.bury_slow(dead);
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.detach();
        self.shared.table.renounce(self.me);
        self.shared.pools.renounce(self.me);
        self.shared.leave(&self.published);
    }
}

const _: () = assert!(LOG | HOOKS | ORPHANS == 7);
