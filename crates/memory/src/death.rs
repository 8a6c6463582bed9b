//! Destruction of objects whose count has reached zero.
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

use std::ffi::c_void;
use std::ptr;

use leasehold_core::sync::atomic::Ordering::Relaxed;

use crate::local::{Local, MOURNING};
use crate::misuse::Misuse;
use crate::pool::{PoolOutcome, TensorKey};
use crate::pools::Pools;
use crate::shared::{CustomDestructor, TensorInfo};
use crate::table::{Entry, EntryState, HOST, Kind};
use crate::vec_ptr::{VecOps, VecPtr};

/// The number of tensors that leave the quarantine in one turn of the lock of the thread's pool.
const BATCH: usize = 16;
/// The size of a dead tensor of unknown size, for the budget.
const UNKNOWN_BYTES: u64 = 4096;

/// An object to be destroyed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dead {
    addr: usize,
    generation: u64,
    destructor: usize,
    kind: Kind,
    flags: u8,
    /// A tensor that has left the quarantine.
    settled: bool,
    /// Left by a thread that has ended together with its scopes. So no scope remains whose end it
    /// could wait for.
    orphan: bool,
}

impl Dead {
    #[inline(always)]
    pub(crate) fn new(entry: &Entry) -> Self {
        let Entry { addr, generation, destructor, kind, flags, .. } = *entry;
        Self { addr, generation, destructor, kind, flags, settled: false, orphan: false }
    }
}

/// A tensor in quarantine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    dead: Dead,
    key: Option<TensorKey>,
    bytes: u64,
    /// The scope in which the tensor died.
    depth: u32,
}

fn pointer<T>(addr: usize) -> *mut T {
    ptr::with_exposed_provenance_mut(addr)
}

impl Local {
    /// Destroys `dead`: at once or, inside a destructor, after that destructor.
    #[inline(always)]
    pub(crate) fn defer_destroy(&self, dead: Dead) {
        match dead.kind {
            Kind::Untyped => {}
            // SAFETY: the registrant promised that the struct came from the C allocator and is the
            // manager's to free.
            Kind::Struct => unsafe { libc::free(pointer(dead.addr)) },
            _ => self.bury_slow(dead),
        }
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn bury_slow(&self, dead: Dead) {
        if !self.dying.push(dead) {
            // A lost object is better than a destruction in the wrong order.
            self.misuse(Misuse::OutOfMemory, dead.addr, 0);
        }
        self.work_off();
    }

    /// Returns whether the destruction calls a function of the program.
    fn wants_program(dead: Dead) -> bool {
        match dead.kind {
            Kind::Untyped | Kind::Struct => false,
            Kind::VecPtr => dead.destructor != 0,
            Kind::Tensor => dead.flags & HOST == 0,
            Kind::Custom => true,
        }
    }

    pub(crate) fn work_off(&self) {
        if self.burying.replace(true) {
            return;
        }
        while let Some(dead) = self.dying.pop() {
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
                Kind::Tensor if dead.settled => self.destroy_tensor(dead),
                Kind::Tensor => self.mourn(dead),
            }
        }
        self.burying.set(false);
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
            // `burying` is set.
            self.release(element.expose_provenance());
        }
    }

    // ---- tensors

    /// Takes a dying tensor into quarantine and returns its pool key; `Err` if that life is over.
    fn describe(&self, dead: Dead) -> Result<Option<TensorKey>, ()> {
        let step = |from, to| {
            let mut shard = self.shared.table.lock(dead.addr, self.me);
            let entry = shard.advance(dead.addr, dead.generation, from, to).ok_or(())?;
            // SAFETY: the flag says that `lh_tensor_create` made the tensor. The tensor is dying,
            // so no code destroys it while its shard is locked.
            Ok((entry.flags & HOST != 0).then(|| unsafe { crate::tensor::key(pointer(dead.addr)) }))
        };
        if dead.flags & HOST != 0 {
            return step(EntryState::Dying, EntryState::Quarantined);
        }
        let Some(describe) = self.shared.tensor_describer() else {
            return step(EntryState::Dying, EntryState::Quarantined);
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
    fn mourn(&self, dead: Dead) {
        let Ok(key) = self.describe(dead) else { return };
        let bytes = key.map_or(UNKNOWN_BYTES, TensorKey::bytes);
        let waiting = Waiting { dead, key, bytes, depth: self.depth() };
        let budget = self.shared.quarantine_budget.load(Relaxed);
        if dead.orphan || budget == 0 || bytes > budget || !self.waiting.push(waiting) {
            self.settle(&[waiting]);
            return;
        }
        self.marks.update(self.depth() - 1, |mark| mark.flags |= MOURNING);
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
            self.settle(&[oldest]);
        }
        // The space before the oldest entry is released once it is the greater part.
        if self.waiting_from.get() > 32 && self.waiting_from.get() > self.waiting.len() / 2 {
            self.waiting.drop_front(self.waiting_from.replace(0));
        }
    }

    /// Releases the tensors that died in scope `depth`, which is ending; `false` if none did.
    pub(crate) fn end_mourning(&self, depth: u32) -> bool {
        if self.marks.read(depth.wrapping_sub(1), |mark| mark.flags & MOURNING != 0) != Some(true) {
            return false;
        }
        self.marks.update(depth - 1, |mark| mark.flags &= !MOURNING);
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
            self.settle(&batch[..n]);
        }
        if self.waiting.len() == self.waiting_from.get() {
            self.waiting.truncate(0);
            self.waiting_from.set(0);
        }
        true
    }

    /// Gives tensors whose quarantine is over (at most [`BATCH`]) to the pool. The destructor gets
    /// those that the pool refuses.
    fn settle(&self, waiting: &[Waiting]) {
        // For each tensor: whether this life still exists, and whether the pool has refused the
        // tensor.
        let (mut ours, mut refused) = ([false; BATCH], [true; BATCH]);
        for (w, ours) in waiting.iter().zip(&mut ours) {
            let mut shard = self.shared.table.lock(w.dead.addr, self.me);
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
            let mut home = self.shared.pools.lock(Pools::home(self.me), self.me);
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
        let mut shard = self.shared.table.lock(addr, self.me);
        let dead = match shard.position(addr) {
            Some(at) if shard.at(at).state == EntryState::Pooled => {
                let dead = Dead { settled: true, ..Dead::new(shard.at(at)) };
                shard.remove_at(at);
                Some(dead)
            }
            _ => None,
        };
        drop(shard);
        if let Some(dead) = dead {
            self.bury_slow(dead);
        }
    }

    fn destroy_tensor(&self, dead: Dead) {
        if self.logs() {
            self.log("destroy_tensor", dead.addr, 0);
        }
        if dead.flags & HOST != 0 {
            // SAFETY: the flag says that `lh_tensor_create` made the tensor. No other code knows it
            // any more.
            unsafe { crate::tensor::destroy(pointer(dead.addr)) };
        } else if let Some(destroy) = self.shared.tensor_destructor() {
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
        self.adopt();
        freed
    }
}
