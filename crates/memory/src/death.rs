//! What happens to an object whose count has reached zero.
//!
//! # Protocol
//! No lock is held here while anything is freed or called. The dead go on a work list; whoever finds nobody burying works it off,
//! so a destructor that releases others adds to the list instead of recursing, and 200,000 nested containers need no stack.
//! In the table a tensor is `Dying` from its last release until its turn on the list, and `Described` while its key is asked for. It is
//! `Quarantined` to the end of the scope in which it died (or until the budget is exceeded), then `Pooled`, or destroyed. The table keeps
//! its address until somebody else may own it, so that a second release of it is known as one, and registering it again can revive it.
//!
//! A revived tensor has a new generation, and what the list or the quarantine still says of its former life is void. Hence every step
//! first asks the table, under the shard's lock, for that life in the state before ([`Guard::advance`](crate::table::Guard::advance)).
//! A `Described` tensor is not revived: the hook that looks at it must find it whole.

use std::ffi::c_void;
use std::ptr;

use leasehold_core::sync::atomic::Ordering::Relaxed;

use crate::local::{Local, MOURNING};
use crate::misuse::Misuse;
use crate::pool::{OpaqueTensor, PoolOutcome, TensorKey};
use crate::shared::{CustomDestructor, TensorInfo};
use crate::table::{Entry, HOST, Kind, State};
use crate::vec_ptr::VecPtr;

/// Tensors that leave the quarantine in one turn of the pool's lock.
const BATCH: usize = 16;
/// Against the budget, a dead tensor of unknown size counts as this much.
const UNKNOWN_BYTES: u64 = 4096;

/// An object to be destroyed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dead {
    addr: usize,
    generation: u64,
    destructor: usize,
    kind: Kind,
    flags: u8,
    /// A tensor that has been through the quarantine.
    settled: bool,
}

impl Dead {
    #[inline(always)]
    pub(crate) fn new(entry: &Entry) -> Self {
        let Entry { addr, generation, destructor, kind, flags, .. } = *entry;
        Self { addr, generation, destructor, kind, flags, settled: false }
    }
}

/// A tensor in quarantine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    dead: Dead,
    key: Option<TensorKey>,
    bytes: u64,
    /// The scope in which it died.
    depth: u32,
}

fn pointer<T>(addr: usize) -> *mut T {
    ptr::with_exposed_provenance_mut(addr)
}

impl Local {
    /// Destroys `dead`, now or, inside a destructor, after it.
    #[inline(always)]
    pub(crate) fn bury(&self, dead: Dead) {
        match dead.kind {
            Kind::Untyped => {}
            // SAFETY: whoever registered the struct promised that it came from the C allocator and is ours to free.
            Kind::Struct => unsafe { libc::free(pointer(dead.addr)) },
            _ => self.bury_slow(dead),
        }
    }

    #[cold]
    #[inline(never)]
    fn bury_slow(&self, dead: Dead) {
        if !self.dying.push(dead) {
            // Better lost than destroyed in the wrong order.
            self.misuse(Misuse::OutOfMemory, dead.addr, 0);
        }
        self.work_off();
    }

    fn work_off(&self) {
        if self.burying.replace(true) {
            return;
        }
        while let Some(dead) = self.dying.pop() {
            match dead.kind {
                Kind::Untyped | Kind::Struct => self.bury(dead),
                Kind::VecPtr => self.destroy_vec(dead.addr),
                Kind::Custom => {
                    // SAFETY: a `Custom` entry's destructor is a function of this type, from `register_custom`.
                    let destroy =
                        unsafe { std::mem::transmute::<*mut c_void, CustomDestructor>(pointer(dead.destructor)) };
                    // SAFETY: whoever registered the object promised that this destroys it; it is called once.
                    self.callback(|| unsafe { destroy(pointer(dead.addr)) });
                }
                Kind::Tensor if dead.settled => self.destroy_tensor(dead),
                Kind::Tensor => self.mourn(dead),
            }
        }
        self.burying.set(false);
    }

    fn destroy_vec(&self, addr: usize) {
        // SAFETY: whoever registered the vector promised that it is one; its count is zero, so it is ours.
        let VecPtr { data, len, .. } = unsafe { pointer::<VecPtr>(addr).read() };
        if !data.is_null() {
            for i in 0..usize::try_from(len).unwrap_or(0) {
                // SAFETY: a vector has `len` elements at `data`.
                let element = unsafe { data.add(i).read() };
                // Its own destruction, if this was its last count, waits on the list: `burying` is set.
                self.release(element.expose_provenance());
            }
        }
        // SAFETY: both blocks come from the C allocator, by the same promise; null is allowed.
        unsafe {
            libc::free(data.cast());
            libc::free(pointer(addr));
        }
    }

    // ---- tensors

    /// The key under which the pool would keep a tensor.
    fn describe(&self, dead: Dead) -> Option<TensorKey> {
        if dead.flags & HOST != 0 {
            // SAFETY: the flag says that `lh_tensor_create` made it; it is `Described`, so nothing destroys it.
            return Some(unsafe { crate::tensor::key(pointer(dead.addr)) });
        }
        let describe = self.shared.tensor_describer()?;
        let mut info = TensorInfo::default();
        let mut answer = 0;
        // SAFETY: the tensor is `Described`, so nothing destroys it; the hook fills in the struct it is given.
        self.callback(|| answer = unsafe { describe(pointer(dead.addr), &raw mut info) });
        let key = (answer != 0).then(|| TensorKey::from_ids(info.num_elements, info.dtype_id, info.device_id))?;
        if key.is_none() {
            self.misuse(Misuse::TensorKey, dead.addr, i64::from(info.dtype_id));
        }
        key
    }

    /// Puts a tensor that has just died into quarantine.
    fn mourn(&self, dead: Dead) {
        let step = |from, to| {
            let mut shard = self.shared.table.lock(dead.addr, self.me);
            shard.advance(dead.addr, dead.generation, from, to).is_some()
        };
        if !step(State::Dying, State::Described) {
            return;
        }
        let key = self.describe(dead);
        let bytes = key.map_or(UNKNOWN_BYTES, TensorKey::bytes);
        let waiting = Waiting { dead, key, bytes, depth: self.depth() };
        let described = step(State::Described, State::Quarantined);
        debug_assert!(described, "nobody else touches a tensor that is being described");
        let budget = self.shared.quarantine_budget.load(Relaxed);
        if budget == 0 || bytes > budget || !self.waiting.push(waiting) {
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
        // Space before the oldest is given back once it is the greater part.
        if self.waiting_from.get() > 32 && self.waiting_from.get() > self.waiting.len() / 2 {
            self.waiting.drop_front(self.waiting_from.replace(0));
        }
    }

    /// Lets go of what died in scope `depth`, which is ending; false if that was nothing.
    pub(crate) fn end_mourning(&self, depth: u32) -> bool {
        if self.marks.read(depth.wrapping_sub(1), |mark| mark.flags & MOURNING != 0) != Some(true) {
            return false;
        }
        self.marks.update(depth - 1, |mark| mark.flags &= !MOURNING);
        let next = || {
            let last =
                self.waiting.last().filter(|w| self.waiting.len() > self.waiting_from.get() && w.depth >= depth)?;
            self.waiting.pop();
            self.shared.unquarantine(last.bytes);
            Some(last)
        };
        // Several at a time, for one turn of the pool's lock.
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

    /// Hands tensors whose quarantine is over (at most [`BATCH`]) to the pool, and what it refuses to the destructor.
    fn settle(&self, waiting: &[Waiting]) {
        // Of each: whether it is still ours, and then, whether the pool has refused it.
        let (mut ours, mut refused) = ([false; BATCH], [true; BATCH]);
        for (w, ours) in waiting.iter().zip(&mut ours) {
            let mut shard = self.shared.table.lock(w.dead.addr, self.me);
            // Not if it was revived meanwhile.
            *ours = shard.advance(w.dead.addr, w.dead.generation, State::Quarantined, State::Pooled).is_some();
        }
        let mut evicted = Vec::new();
        if waiting.iter().zip(ours).any(|(w, ours)| ours && w.key.is_some()) {
            self.shared.with_pool(|pool| {
                for ((w, ours), refused) in waiting.iter().zip(ours).zip(&mut refused) {
                    if let Some(key) = w.key.filter(|_| ours) {
                        *refused = pool.release_key(pointer(w.dead.addr), key, &mut evicted) == PoolOutcome::Full;
                    }
                }
            });
        }
        self.evict(evicted);
        for ((w, ours), refused) in waiting.iter().zip(ours).zip(refused) {
            if ours && refused {
                self.discard(w.dead.addr);
            }
        }
    }

    /// Destroys tensors that the pool has given up.
    pub(crate) fn evict(&self, evicted: Vec<*mut OpaqueTensor>) {
        for tensor in evicted {
            self.discard(tensor.expose_provenance());
        }
    }

    /// Forgets a tensor that is pooled by the table's account and puts it on the list for destruction.
    fn discard(&self, addr: usize) {
        let mut shard = self.shared.table.lock(addr, self.me);
        let dead = match shard.position(addr) {
            Some(at) if shard.at(at).state == State::Pooled => {
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
            // SAFETY: the flag says that `lh_tensor_create` made it; nobody knows it any more.
            unsafe { crate::tensor::destroy(pointer(dead.addr)) };
        } else if let Some(destroy) = self.shared.tensor_destructor() {
            // SAFETY: the hook is what the tensors' maker provided; it is called once per tensor.
            self.callback(|| unsafe { destroy(pointer(dead.addr)) });
        } else {
            self.misuse(Misuse::NoDestructor, dead.addr, 0);
        }
    }

    /// Destroys pooled tensors until at most `bytes` remain; returns the bytes freed.
    pub(crate) fn trim_pool(&self, bytes: u64) -> u64 {
        let mut evicted = Vec::new();
        let freed = self.shared.with_pool(|pool| pool.trim_into(bytes, &mut evicted));
        self.evict(evicted);
        freed
    }
}
