//! The ends of things: of scopes with their records, frames with their buffers, counts, and
//! objects whose count has reached zero.
//!
//! These ends lead to each other, so they stand in one file. A scope's end releases objects. A
//! release may destroy an object, and a destructor may be a function of the program. Such a
//! function may leave scopes and frames open, which end after its call.
//!
//! # Protocol
//! No lock is held here while memory is freed or a function is called. Dead objects go onto a work
//! list. The outermost destruction on a thread works the list off. So a destructor that releases
//! other objects adds to the list instead of recursing, and 200,000 nested containers need no
//! stack.
//!
//! A tensor is `Dying` from its last release until its turn on the list, and `Described` while its
//! key is requested. Then it is `Quarantined` to the end of the scope in which it died (or until
//! the budget is exceeded). Afterwards it is `Pooled` or destroyed. The table keeps the address
//! until another owner may have it. So a second release is detected, and a new registration can
//! revive the tensor.
//!
//! A revived tensor has a new generation, and entries of its former life on the list or in
//! quarantine are void. So every step first checks the table for that life in the former state,
//! under the shard's lock ([`Guard::advance`](crate::table::Guard::advance)). A `Described` tensor
//! is not revived, because the describing hook must find it whole.
//!
//! This module must not know how objects are registered, nor how scopes and frames are opened.

use std::ffi::c_void;
use std::ptr;

use leasehold_core::sync::atomic::Ordering::Relaxed;

use crate::dead::{Dead, Waiting};
use crate::local::{HAS_QUARANTINE, HOOKED, Local};
use crate::misuse::Misuse;
use crate::pool::{PoolOutcome, TensorKey};
use crate::pools::Pools;
use crate::shared::{CustomDestructor, ORPHANS, TensorInfo, bump};
use crate::table::{EntryState, Guard, Kind, NIL, PINNED};
use crate::vec_ptr::{VecOps, VecPtr};

/// The number of tensors that leave the quarantine in one turn of the lock of the thread's pool.
const BATCH: usize = 16;
/// The size of a dead tensor of unknown size, for the budget.
const UNKNOWN_BYTES: u64 = 4096;

fn pointer<T>(addr: usize) -> *mut T {
    ptr::with_exposed_provenance_mut(addr)
}

/// The result of `release`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Released {
    /// A count was removed, and some are left.
    Counted,
    /// The last count was removed.
    Died,
    /// The address is unknown.
    Unknown,
    /// The count of the tensor was zero already.
    Dead,
}

impl Local {
    // ---- scopes and frames end

    /// Runs a hook or destructor of the caller, which may call back; see `local.rs`.
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
    pub(crate) fn empty_scope(&self, depth: u32) {
        loop {
            while let Some(head) = self.marks.read(depth - 1, |mark| mark.head)
                && head != NIL
            {
                self.release_record(head);
            }
            if !self.end_quarantine(depth) {
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

    /// Closes the newest frame and every scope opened since, then frees its buffers.
    pub(crate) fn close_frame(&self) {
        let Some(frame) = self.frames.last() else { return };
        // While its scopes close, destructors still find the frame.
        self.close_to(frame.depth);
        self.frames.truncate(self.frames.len() - 1);
        if frame.instead != 0 {
            self.frames_taken.update(|count| count - 1);
        }
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
            // SAFETY: outgrown buffers came from `malloc`, and their frame is over.
            unsafe { libc::free(old.buffer) };
        }
    }

    // ---- counts end

    /// Removes a count; the last one destroys the object.
    #[inline(always)]
    pub(crate) fn release(&self, addr: usize) -> Released {
        if addr == 0 {
            return Released::Unknown;
        }
        if self.logs() {
            self.log("release", addr, 0);
        }
        let mut shard = self.shared.table.lock(addr);
        let Some(at) = shard.position(addr) else {
            drop(shard);
            self.misuse(Misuse::ReleaseUnknown, addr, 0);
            return Released::Unknown;
        };
        if shard.at(at).state != EntryState::Live {
            drop(shard);
            self.misuse(Misuse::UseOfDead, addr, -1);
            return Released::Dead;
        }
        self.decrement(shard, at)
    }

    /// Removes a count of the live entry at `at`.
    #[inline(always)]
    pub(crate) fn decrement(&self, mut shard: Guard<'_>, at: u32) -> Released {
        let entry = shard.at(at);
        if entry.count > 1 {
            if entry.count < PINNED {
                entry.count -= 1;
            }
            return Released::Counted;
        }
        let (dead, size) = (Dead::new(entry), entry.size);
        if entry.kind == Kind::Tensor {
            // A dead tensor stays in the table until its memory has another owner.
            shard.retire_at(at, EntryState::Dying);
        } else {
            shard.remove_at(at);
        }
        drop(shard);
        self.count_destroyed();
        if size != 0 {
            self.shared.add_live_bytes(-(size as i64));
        }
        self.defer_destroy(dead);
        Released::Died
    }

    /// Releases the object of the newest record `r` of a closing scope, and frees the record.
    #[inline(always)]
    pub(crate) fn release_record(&self, r: u32) {
        self.unlink(r);
        let Some((addr, generation)) = self.records.read(r, |x| (x.addr, x.generation)) else {
            return;
        };
        let mut shard = self.shared.table.lock(addr);
        let at = shard.position(addr).filter(|&at| {
            let entry = shard.at(at);
            entry.generation == generation && entry.state == EntryState::Live
        });
        let Some(at) = at else {
            // That life of the object is over; the address has another owner now.
            drop(shard);
            let mut foreign = self.foreign.borrow_mut();
            if !foreign.is_empty() && foreign.get(&addr) == Some(&r) {
                foreign.remove(&addr);
            }
            drop(foreign);
            self.free_record(r);
            return;
        };
        self.unchain(shard.at(at), r);
        self.free_record(r);
        self.decrement(shard, at);
    }

    // ---- objects end

    /// Destroys `dead`: at once or, inside a destructor, after that destructor.
    #[inline(always)]
    pub(crate) fn defer_destroy(&self, dead: Dead) {
        match dead.kind {
            Kind::Untyped => {}
            // SAFETY: the registrant promised that the struct came from the C allocator and is the
            // manager's to free.
            Kind::Struct => unsafe { libc::free(pointer(dead.addr)) },
            _ => self.destroy_slow(dead),
        }
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn destroy_slow(&self, dead: Dead) {
        if !self.pending.push(dead) {
            // A lost object is better than a destruction in the wrong order.
            self.misuse(Misuse::OutOfMemory, dead.addr, 0);
        }
        self.destroy_pending();
    }

    /// Returns whether the destruction calls a function of the program.
    fn wants_program(dead: Dead) -> bool {
        match dead.kind {
            Kind::Untyped | Kind::Struct => false,
            Kind::VecPtr => dead.destructor != 0,
            Kind::Tensor | Kind::Custom => true,
        }
    }

    pub(crate) fn destroy_pending(&self) {
        if self.destroying.replace(true) {
            return;
        }
        while let Some(dead) = self.pending.pop() {
            if self.quiet.get() && Self::wants_program(dead) {
                if !self.shared.add_orphan(Dead { orphan: true, ..dead }) {
                    self.misuse(Misuse::OutOfMemory, dead.addr, 0);
                }
                continue;
            }
            match dead.kind {
                Kind::Untyped | Kind::Struct => self.defer_destroy(dead),
                Kind::VecPtr if dead.destructor != 0 => self.destroy_container(dead),
                Kind::VecPtr => self.destroy_vec(dead.addr),
                Kind::Custom => {
                    // SAFETY: a `Custom` entry's destructor is a function of this type, from
                    // `register_custom`.
                    let destroy = unsafe {
                        std::mem::transmute::<*mut c_void, CustomDestructor>(pointer(
                            dead.destructor,
                        ))
                    };
                    // SAFETY: the registrant promised that this function destroys the object; it is
                    // called once.
                    self.callback(|| unsafe { destroy(pointer(dead.addr)) });
                }
                Kind::Tensor if dead.left_quarantine => self.destroy_tensor(dead),
                Kind::Tensor => self.quarantine(dead),
            }
        }
        self.destroying.set(false);
    }

    fn destroy_vec(&self, addr: usize) {
        // SAFETY: the registrant promised that the object is a vector. Its count is zero, so no
        // other code uses it.
        let VecPtr { data, len, .. } = unsafe { pointer::<VecPtr>(addr).read() };
        // SAFETY: a vector has `len` elements at `data`.
        unsafe { self.release_elements(data, len) };
        // SAFETY: both blocks come from the C allocator, by the same promise; null is allowed.
        unsafe {
            libc::free(data.cast());
            libc::free(pointer(addr));
        }
    }

    /// Destroys a container of pointers with its registered functions.
    fn destroy_container(&self, dead: Dead) {
        // SAFETY: such an entry's destructor is the address of a permanent table of functions, from
        // `register_vec`.
        let VecOps { elements, destroy } = unsafe { *pointer::<VecOps>(dead.destructor) };
        let (mut data, mut len) = (ptr::null_mut(), 0);
        // SAFETY: the registrant promised that these functions fit the container. Its count is
        // zero, so no other code uses it.
        self.callback(|| len = unsafe { elements(pointer(dead.addr), &raw mut data) });
        // SAFETY: `elements` returns place and number of the elements. No other code has the
        // container.
        unsafe { self.release_elements(data, len) };
        // SAFETY: its elements are released, and it is destroyed once.
        self.callback(|| unsafe { destroy(pointer(dead.addr)) });
    }

    /// Releases each element once.
    ///
    /// # Safety
    /// - There are `len` elements at `data`, or `data` is null, or `len` is not positive.
    unsafe fn release_elements(&self, data: *mut *mut c_void, len: i64) {
        if data.is_null() {
            return;
        }
        for i in 0..usize::try_from(len).unwrap_or(0) {
            // SAFETY: i < len, by the caller's promise.
            let element = unsafe { data.add(i).read() };
            // If this was the element's last count, its destruction waits on the list, because
            // `destroying` is set.
            self.release(element.expose_provenance());
        }
    }

    // ---- tensors

    /// Takes a dying tensor into quarantine and returns its pool key; `Err` if that life is over.
    fn describe(&self, dead: Dead) -> Result<Option<TensorKey>, ()> {
        let step = |from, to| {
            let mut shard = self.shared.table.lock(dead.addr);
            shard.advance(dead.addr, dead.generation, from, to).map(|_| ()).ok_or(())
        };
        let Some(describe) = self.shared.tensor_describer() else {
            return step(EntryState::Dying, EntryState::Quarantined).map(|()| None);
        };
        step(EntryState::Dying, EntryState::Described)?;
        let mut info = TensorInfo::default();
        let mut answer = 0;
        // SAFETY: the tensor is `Described`, so no code destroys it. The hook fills in its struct
        // argument.
        self.callback(|| answer = unsafe { describe(pointer(dead.addr), &raw mut info) });
        let key = (answer != 0)
            .then(|| TensorKey::from_ids(info.num_elements, info.dtype_id, info.device_id));
        if key == Some(None) {
            self.misuse(Misuse::TensorKey, dead.addr, i64::from(info.dtype_id));
        }
        step(EntryState::Described, EntryState::Quarantined)?;
        Ok(key.flatten())
    }

    /// Puts a dying tensor into quarantine.
    fn quarantine(&self, dead: Dead) {
        let Ok(key) = self.describe(dead) else { return };
        let bytes = key.map_or(UNKNOWN_BYTES, TensorKey::bytes);
        let waiting = Waiting { dead, key, bytes, depth: self.depth() };
        let budget = self.shared.quarantine_budget;
        if dead.orphan || budget == 0 || bytes > budget || !self.waiting.push(waiting) {
            self.pool_or_destroy(&[waiting]);
            return;
        }
        self.marks.update(self.depth() - 1, |mark| mark.flags |= HAS_QUARANTINE);
        if self.logs() {
            self.log("quarantine", dead.addr, bytes as i64);
        }
        let mut total = self.shared.quarantine(bytes);
        while total > budget
            && let Some(oldest) = self.waiting.get(self.waiting_from.get())
        {
            self.waiting_from.set(self.waiting_from.get() + 1);
            self.shared.unquarantine(oldest.bytes);
            total = total.saturating_sub(oldest.bytes);
            self.pool_or_destroy(&[oldest]);
        }
        // The space before the oldest entry is released once it is the greater part.
        if self.waiting_from.get() > 32 && self.waiting_from.get() > self.waiting.len() / 2 {
            self.waiting.drop_front(self.waiting_from.replace(0));
        }
    }

    /// Releases the tensors that died in scope `depth`, which is ending; `false` if none did.
    pub(crate) fn end_quarantine(&self, depth: u32) -> bool {
        if self.marks.read(depth.wrapping_sub(1), |mark| mark.flags & HAS_QUARANTINE != 0)
            != Some(true)
        {
            return false;
        }
        self.marks.update(depth - 1, |mark| mark.flags &= !HAS_QUARANTINE);
        let next = || {
            let last = self
                .waiting
                .last()
                .filter(|w| self.waiting.len() > self.waiting_from.get() && w.depth >= depth)?;
            self.waiting.pop();
            self.shared.unquarantine(last.bytes);
            Some(last)
        };
        // Several at a time, for one turn of the lock of the thread's pool.
        while let Some(first) = next() {
            let mut batch = [first; BATCH];
            let mut n = 1;
            while n < BATCH
                && let Some(waiting) = next()
            {
                batch[n] = waiting;
                n += 1;
            }
            self.pool_or_destroy(&batch[..n]);
        }
        if self.waiting.len() == self.waiting_from.get() {
            self.waiting.truncate(0);
            self.waiting_from.set(0);
        }
        true
    }

    /// Gives tensors whose quarantine is over (at most [`BATCH`]) to the pool. The destructor gets
    /// those that the pool refuses.
    fn pool_or_destroy(&self, waiting: &[Waiting]) {
        // For each tensor: whether this life still exists, and whether the pool has refused the
        // tensor.
        let (mut ours, mut refused) = ([false; BATCH], [true; BATCH]);
        for (w, ours) in waiting.iter().zip(&mut ours) {
            let mut shard = self.shared.table.lock(w.dead.addr);
            // `None` if the tensor was revived meanwhile.
            let entry = shard.advance(
                w.dead.addr,
                w.dead.generation,
                EntryState::Quarantined,
                EntryState::Pooled,
            );
            *ours = entry.map(|e| e.newest = Pools::home(self.me) as u32).is_some();
        }
        if waiting.iter().zip(ours).any(|(w, ours)| ours && w.key.is_some()) {
            let mut home = self.shared.pools.lock(Pools::home(self.me));
            for ((w, ours), refused) in waiting.iter().zip(ours).zip(&mut refused) {
                if let Some(key) = w.key.filter(|_| ours) {
                    *refused = home.put(pointer(w.dead.addr), key) == PoolOutcome::Full;
                }
            }
            let excess = home.has_excess();
            drop(home);
            let mut bytes = self.shared.pools.bytes();
            if excess || self.shared.pools.has_excess(bytes) {
                while let Some(tensor) = self.shared.pools.excess(self.me) {
                    self.discard(tensor.expose_provenance());
                }
                bytes = self.shared.pools.bytes();
            }
            self.shared.note_pooled(bytes);
        }
        for ((w, ours), refused) in waiting.iter().zip(ours).zip(refused) {
            if ours && refused {
                self.discard(w.dead.addr);
            }
        }
    }

    /// Removes a pooled tensor from the table and puts it on the list for destruction.
    fn discard(&self, addr: usize) {
        let mut shard = self.shared.table.lock(addr);
        let dead = match shard.position(addr) {
            Some(at) if shard.at(at).state == EntryState::Pooled => {
                let dead = Dead { left_quarantine: true, ..Dead::new(shard.at(at)) };
                shard.remove_at(at);
                Some(dead)
            }
            _ => None,
        };
        drop(shard);
        if let Some(dead) = dead {
            self.destroy_slow(dead);
        }
    }

    fn destroy_tensor(&self, dead: Dead) {
        if self.logs() {
            self.log("destroy_tensor", dead.addr, 0);
        }
        if let Some(destroy) = self.shared.tensor_destructor() {
            // SAFETY: the tensors' maker provided the hook; it is called once for each tensor.
            self.callback(|| unsafe { destroy(pointer(dead.addr)) });
        } else {
            self.misuse(Misuse::NoDestructor, dead.addr, 0);
        }
    }

    /// Destroys pooled tensors until at most `bytes` remain; returns the bytes freed.
    pub(crate) fn trim_pool(&self, bytes: u64) -> u64 {
        let mut freed = 0;
        while let Some((tensor, bytes)) = self.shared.pools.shrink(bytes, self.me) {
            freed += bytes;
            self.discard(tensor.expose_provenance());
        }
        self.destroy_orphans();
        freed
    }

    /// Destroys objects that ended threads have left.
    pub(crate) fn destroy_orphans(&self) {
        while self.shared.flags.load(Relaxed) & ORPHANS != 0
            && let Some(dead) = self.shared.take_orphan()
        {
            self.destroy_slow(dead);
        }
    }
}
