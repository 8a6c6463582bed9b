//! The manager's sharded tensor pool: one [`Pool`] for each group of threads, so that no call
//! waits for another thread's.
//!
//! # Protocol
//! A thread releases tensors to its own shard, chosen by its number, and tries this shard first.
//! On a miss the thread tries other shards, but only those that may have the key. Every shard
//! counts its tensors by a few bits of the key's hash. Any thread may read these counts without the
//! lock.
//! The limits of a key and of the number of keys hold for each shard; the limit of bytes holds for
//! all shards together.
//!
//! This module must not call the program: the code that removes tensors destroys them.

use leasehold_core::sync::atomic::{AtomicU16, AtomicU64, Ordering::Relaxed};

use crate::heap::{self, NoMemory};
use crate::lock::{SpinGuard, SpinLock};
use crate::pool::{OpaqueTensor, Pool, PoolLimits, PoolOutcome, TensorKey};

/// The number of shards, a power of two.
const SHARDS: usize = 16;
/// The number of a shard's counts by hash.
const HINTS: usize = 64;

#[repr(align(128))]
struct Shard {
    /// Written under the lock, read by any thread.
    tensors: AtomicU64,
    bytes: AtomicU64,
    hints: [AtomicU16; HINTS],
    pool: SpinLock<Pool>,
}

/// A sharded tensor pool; see the module's documentation.
pub(crate) struct Pools {
    shards: Box<[Shard]>,
    limits: PoolLimits,
}

/// A few bits of a key's hash (by multiplication, after Knuth).
fn hint(key: TensorKey) -> usize {
    let ids = u64::from(key.dtype) | u64::from(key.device) << 8;
    let mixed = (key.num_elements ^ ids << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> (u64::BITS - HINTS.ilog2())) as usize
}

/// A locked shard.
pub(crate) struct Guard<'a> {
    shard: &'a Shard,
    pool: SpinGuard<'a, Pool>,
}

impl Guard<'_> {
    fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    fn count(&self, key: TensorKey, step: u16) {
        let hint = &self.shard.hints[hint(key)];
        // Only the holder of the lock writes.
        hint.store(hint.load(Relaxed).wrapping_add(step), Relaxed);
    }

    /// Returns whether the shard exceeds its limit of keys.
    pub(crate) fn has_excess(&mut self) -> bool {
        let pool = self.pool();
        pool.key_count() > pool.limits().keys
    }

    /// Releases a tensor to the shard.
    pub(crate) fn put(&mut self, tensor: *mut OpaqueTensor, key: TensorKey) -> PoolOutcome {
        let outcome = self.pool().release_key(tensor, key);
        if outcome == PoolOutcome::Pooled {
            self.count(key, 1);
        }
        outcome
    }

    fn left(&self, key: Option<TensorKey>) {
        if let Some(key) = key {
            self.count(key, u16::MAX);
        }
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let pool = self.pool();
        let (tensors, bytes) = (pool.total_count() as u64, pool.total_bytes());
        self.shard.tensors.store(tensors, Relaxed);
        self.shard.bytes.store(bytes, Relaxed);
    }
}

impl Pools {
    pub(crate) fn new(limits: PoolLimits) -> Result<Self, NoMemory> {
        let shards = heap::slice(SHARDS, || Shard {
            tensors: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            hints: std::array::from_fn(|_| AtomicU16::new(0)),
            pool: SpinLock::new(Pool::new(limits)),
        })?;
        Ok(Self { shards, limits })
    }

    /// The shard of the thread `me`.
    pub(crate) fn home(me: u32) -> usize {
        me as usize % SHARDS
    }

    /// Locks a shard.
    pub(crate) fn lock(&self, shard: usize) -> Guard<'_> {
        let shard = &self.shards[shard % SHARDS];
        Guard { pool: shard.pool.lock(), shard }
    }

    /// All shards, the thread's own first.
    fn from_home(me: u32) -> impl Iterator<Item = usize> {
        (0..SHARDS).map(move |i| (Self::home(me) + i) % SHARDS)
    }

    /// Returns whether all shards together exceed the limit of bytes.
    pub(crate) fn has_excess(&self, bytes: u64) -> bool {
        bytes > self.limits.bytes
    }

    /// Removes and returns a tensor of this key: the last one of this thread's shard, else another
    /// shard's.
    pub(crate) fn acquire(&self, key: TensorKey, me: u32) -> Option<*mut OpaqueTensor> {
        let hint = hint(key);
        Self::from_home(me).filter(|&i| self.shards[i].hints[hint].load(Relaxed) != 0).find_map(
            |i| {
                let mut shard = self.lock(i);
                let tensor = shard.pool().acquire_key(key)?;
                shard.left(Some(key));
                Some(tensor)
            },
        )
    }

    /// Removes this tensor from the shard; `false` if the shard does not have it.
    pub(crate) fn take(&self, tensor: *mut OpaqueTensor, shard: usize) -> bool {
        let mut shard = self.lock(shard);
        let key = shard.pool().take(tensor);
        shard.left(key);
        key.is_some()
    }

    /// Removes and returns a tensor that exceeds the limits, of the least recently used key of this
    /// thread's shard. `None` if the pool is within its limits.
    pub(crate) fn excess(&self, me: u32) -> Option<*mut OpaqueTensor> {
        let mut home = self.lock(Self::home(me));
        let over = home.pool().excess();
        over.inspect(|over| home.left(Some(over.1))).map(|over| over.0).or_else(|| {
            drop(home);
            if self.bytes() > self.limits.bytes {
                self.shrink(self.limits.bytes, me).map(|(tensor, _)| tensor)
            } else {
                None
            }
        })
    }

    /// Removes and returns a tensor, with its bytes, while the pool has more than `bytes`. With 0:
    /// while it has any tensor.
    pub(crate) fn shrink(&self, bytes: u64, me: u32) -> Option<(*mut OpaqueTensor, u64)> {
        if self.bytes() <= bytes && bytes != 0 {
            return None;
        }
        Self::from_home(me).filter(|&i| self.shards[i].tensors.load(Relaxed) != 0).find_map(|i| {
            let mut shard = self.lock(i);
            // A shard gives up tensors until it is empty, then the next shard follows.
            let (tensor, key) = shard.pool().shrink(0)?;
            shard.left(Some(key));
            Some((tensor, key.bytes()))
        })
    }

    /// Tensors in all shards. Exact if no other thread uses the pool.
    pub(crate) fn tensors(&self) -> u64 {
        self.shards.iter().map(|s| s.tensors.load(Relaxed)).sum()
    }

    /// Bytes of the tensors in all shards. Exact if no other thread uses the pool.
    pub(crate) fn bytes(&self) -> u64 {
        self.shards.iter().map(|s| s.bytes.load(Relaxed)).sum()
    }

    /// Takes all locks before a fork, until [`let_go`](Self::let_go).
    #[cfg(not(loom))]
    pub(crate) fn hold(&self) {
        self.shards.iter().for_each(|shard| shard.pool.hold());
    }

    /// Releases all locks after the fork, in both processes.
    #[cfg(not(loom))]
    pub(crate) fn let_go(&self) {
        self.shards.iter().for_each(|shard| shard.pool.let_go());
    }
}

impl std::fmt::Debug for Pools {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pools")
            .field("tensors", &self.tensors())
            .field("bytes", &self.bytes())
            .finish()
    }
}
