//! A thread's attachment to a manager: its scopes, their records, and its frames.
//!
//! This file holds the state, and what needs nothing else: misuses, names, the log, totals.
//! `destroy.rs` has the ends of scopes, frames and objects. Above it `record.rs` registers and
//! counts, `scope.rs` and `frame.rs` open. Only one thread uses a `Local`, so nothing here is
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
//!
//! This module must not know when a scope, a frame or an object ends.

use rustc_hash::FxHashMap;
use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_void};

use leasehold_core::sync::atomic::Ordering::Relaxed;

use crate::dead::{Dead, Waiting};
use crate::heap::{NoMemory, Owned};
use crate::misuse::{LastError, Misuse};
use crate::names::NameCache;
use crate::shared::{HOOKS, LOG, ORPHANS, Published, ScopeExitHook, SharedRef, bump};
use crate::stack::Stack;
use crate::table::NIL;

/// A scope.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    /// The newest record.
    pub(crate) head: u32,
    /// [`HOOKED`] and [`HAS_QUARANTINE`].
    pub(crate) flags: u32,
}

/// A scope hook waits for the end of this scope.
pub(crate) const HOOKED: u32 = 1;
/// Tensors that died in this scope wait for its end.
pub(crate) const HAS_QUARANTINE: u32 = 2;

/// One registration of one object in one scope.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) addr: usize,
    pub(crate) generation: u64,
    /// The next older record of the same object in this thread.
    pub(crate) older: u32,
    /// Neighbours in the scope's list: `up` is newer. `down` also links the free records.
    pub(crate) up: u32,
    pub(crate) down: u32,
    /// The scope's depth.
    pub(crate) depth: u32,
}

/// The position of a C caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Caller {
    /// Stack pointer at the call, 0 if unknown.
    pub(crate) sp: usize,
    /// Return address.
    pub(crate) pc: usize,
}

/// A function's frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    pub(crate) caller: Caller,
    /// First of its slots.
    pub(crate) slot_base: u32,
    pub(crate) slots: u32,
    /// First of its deferred buffers.
    pub(crate) deferred_base: u32,
    /// The depth before the frame was opened.
    pub(crate) depth: u32,
    /// The floor before the frame was opened.
    pub(crate) floor: u32,
    /// The frame's function has used one of its slots.
    pub(crate) used: bool,
    /// The place of a frame that this frame's function took as its own or closed in place of this
    /// one, unless the function still closes this frame too; 0 for none.
    pub(crate) instead: usize,
}

/// A slot's buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub(crate) buffer: *mut c_void,
    pub(crate) capacity: u64,
}

/// An outgrown buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deferred {
    pub(crate) buffer: *mut c_void,
    pub(crate) capacity: u64,
}

/// The batch size in which new and destroyed objects are added to the shared total.
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
    /// The number of frames whose function has taken another frame: their `instead` is set.
    pub(crate) frames_taken: Cell<u32>,
    /// Call sites that open frames and never close them; see `forgotten.rs`.
    pub(crate) leaking_sites: Stack<usize>,
    pub(crate) records: Stack<Record>,
    pub(crate) free_record: Cell<u32>,
    net: Cell<i32>,
    highest: Cell<i32>,
    /// Depth and number of frames at the start of the running callback. The callback must not close
    /// anything below.
    pub(crate) base_depth: Cell<u32>,
    pub(crate) base_frames: Cell<u32>,
    pub(crate) deferred: Stack<Deferred>,
    pub(crate) hooks: Stack<(ScopeExitHook, u64)>,
    /// Newest records of objects whose entry points to another thread's.
    pub(crate) foreign: RefCell<FxHashMap<usize, u32>>,
    pub(crate) pending: Stack<Dead>,
    pub(crate) destroying: Cell<bool>,
    pub(crate) waiting: Stack<Waiting>,
    /// The waiting tensors before this index have left the quarantine.
    pub(crate) waiting_from: Cell<u32>,
    /// A hook or destructor of the program is running.
    pub(crate) calling: Cell<bool>,
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
            frames_taken: Cell::new(0),
            leaking_sites: Stack::new(),
            records: Stack::new(),
            free_record: Cell::new(NIL),
            net: Cell::new(0),
            highest: Cell::new(0),
            base_depth: Cell::new(1),
            base_frames: Cell::new(0),
            deferred: Stack::new(),
            hooks: Stack::new(),
            foreign: RefCell::new(FxHashMap::default()),
            pending: Stack::new(),
            destroying: Cell::new(false),
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

    // ---- marks

    // ---- peaks

    #[inline(always)]
    pub(crate) fn count_created(&self) {
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
    pub(crate) fn count_destroyed(&self) {
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
}

const _: () = assert!(LOG | HOOKS | ORPHANS == 7);
