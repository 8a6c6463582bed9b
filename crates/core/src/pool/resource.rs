//! What a pool is told: the traits type of its resources, its layout, and what it answers about itself.
//!
//! This module must not know how slots are kept.

use super::slots::SLOTS_MAX;
use crate::error::{Error, Result};
use crate::handle::{Handle, Tagged};

/// The tag of a payload's kind.
pub type TagOf<R> = <<R as Resource>::Payload as Tagged>::Tag;

/// How a pool makes, reuses and destroys its resources: the traits type. It owns the driver operations.
///
/// None of the methods runs under a lock of the pool or its manager. A panic in one of them loses no slot: the slot of a
/// panicking `create` is used again; after a panic in `fits`, `recycle` or `destroy` the slot is retired.
pub trait Resource: Send + Sync + 'static {
    /// The resource. A handle look-up may hand it to any thread.
    type Payload: Tagged + Send + Sync + 'static;
    /// What a caller asks for.
    type Request<'a>;
    /// The kind of resource, for errors and reports.
    const NAME: &'static str;

    /// Makes a resource. Runs without any lock; may block, fail or panic without losing a slot. `handle` is the new resource's
    /// own; it is alive once the caller has its lease.
    ///
    /// # Errors
    /// Whatever the driver says.
    fn create(&self, handle: Handle<TagOf<Self>>, request: &Self::Request<'_>) -> Result<Self::Payload>;

    /// Whether an idle resource may serve this request, and prepares it if so (an idle resource holds no parents' leases; they
    /// are taken again here). Must not block.
    fn fits(&self, idle: &mut Self::Payload, request: &Self::Request<'_>) -> bool {
        let _ = (idle, request);
        true
    }

    /// What becomes of a resource whose last lease was dropped. Gives up the parents' leases. Must neither block nor panic.
    fn recycle(&self, payload: &mut Self::Payload) -> Fate {
        let _ = payload;
        Fate::Keep
    }

    /// Ends a resource: the native object first, then the parents' leases. May run on any thread. Must not block; what may block
    /// goes on a [`RetireList`](crate::RetireList).
    fn destroy(&self, payload: Self::Payload) {
        drop(payload);
    }
}

/// What becomes of a resource that nobody holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Fate {
    /// It waits for the next request.
    Keep,
    /// It is destroyed now.
    Destroy,
}

/// How a pool is laid out.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Slots of the first chunk, rounded up to a power of two; later chunks double. Not zero.
    pub block: u32,
    /// Slots made at once; zero is fine.
    pub initial: u32,
    /// At most this many resources at a time, held or idle. Idle ones make room for a request that none of them fits.
    pub max_live: Option<u32>,
    /// Keeps one idle resource per thread cell, which makes acquire and release of cheap resources faster. Costly resources
    /// would be stranded there.
    pub thread_cells: bool,
    /// How many generations a slot lives through before it is retired; less than the 2^32 - 1 only in tests.
    pub generations: u32,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self { block: 32, initial: 0, max_live: None, thread_cells: false, generations: u32::MAX }
    }
}

impl PoolConfig {
    /// Checks the values.
    ///
    /// # Errors
    /// `InvalidArgument` for a block size of zero or beyond the pool's 2^24 slots, and for zero generations or resources.
    pub fn validate(&self) -> Result<()> {
        if self.block == 0 || self.block > SLOTS_MAX {
            return Err(Error::invalid("pool block size must be 1 to 2^24 - 1 slots"));
        }
        if self.initial > SLOTS_MAX {
            return Err(Error::invalid("pool initial capacity must be at most 2^24 - 1 slots"));
        }
        if self.generations == 0 {
            return Err(Error::invalid("a slot needs at least one generation"));
        }
        if self.max_live == Some(0) {
            return Err(Error::invalid("a pool with max_live 0 can never lend anything"));
        }
        Ok(())
    }
}

/// What a pool did so far. Hot paths count nothing: the numbers come from the slots' generations and from creation and destruction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Resources created.
    pub created: u64,
    /// Resources that somebody holds.
    pub live: u64,
    /// Requests that an idle resource served.
    pub recycled: u64,
    /// The most resources that existed at a time (held or idle).
    pub peak: u64,
    /// Resources that wait for a request.
    pub idle: u64,
    /// Slots given up: generations used up, or a panic while ending the resource.
    pub retired: u64,
    /// Weak leases.
    pub weak: u64,
}
