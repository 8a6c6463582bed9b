//! The interface between a pool and its resources: the trait of a resource type, the pool's
//! configuration, and its statistics.
//!
//! This module must not know how slots are kept.

use super::slots::SLOTS_MAX;
use crate::error::{Error, Result};
use crate::handle::{Handle, Tagged};

/// The tag of a payload's kind.
pub type TagOf<R> = <<R as Resource>::Payload as Tagged>::Tag;

/// The operations by which a pool makes, reuses and destroys its resources. The implementer owns
/// the driver operations.
///
/// No method runs under a lock of the pool or its manager. A panic in a method loses no slot. After
/// a panic of `create` the slot is used again; after a panic of `fits`, `recycle` or `destroy` the
/// slot is retired.
pub trait Resource: Send + Sync + 'static {
    /// The resource. A look-up by handle may give it to any thread.
    type Payload: Tagged + Send + Sync + 'static;
    /// The caller's request.
    type Request<'a>;
    /// The kind of resource, for errors and reports.
    const NAME: &'static str;

    /// Makes a resource. Runs without any lock; may block, fail or panic without losing a slot.
    /// `handle` is the new resource's own handle, valid once the caller has its lease.
    ///
    /// # Errors
    /// The errors of the driver.
    fn create(
        &self,
        handle: Handle<TagOf<Self>>,
        request: &Self::Request<'_>,
    ) -> Result<Self::Payload>;

    /// Returns whether an idle resource can serve this request; if so, prepares it. An idle
    /// resource holds no leases on parents; they are taken again here. Must not block.
    fn fits(&self, idle: &mut Self::Payload, request: &Self::Request<'_>) -> bool {
        let _ = (idle, request);
        true
    }

    /// Decides what happens to a resource after its last lease was dropped, and drops the leases on
    /// parents. Must neither block nor panic.
    fn recycle(&self, payload: &mut Self::Payload) -> Recycle {
        let _ = payload;
        Recycle::Keep
    }

    /// Destroys a resource: the native object first, then the leases on parents. May run on any
    /// thread. Must not block; an operation that may block goes onto a
    /// [`RetireList`](crate::RetireList).
    fn destroy(&self, payload: Self::Payload) {
        drop(payload);
    }
}

/// The pool's treatment of a resource without holders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Recycle {
    /// The resource waits for the next request.
    Keep,
    /// The resource is destroyed now.
    Destroy,
}

/// The configuration of a pool.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Slots of the first chunk, rounded up to a power of two; later chunks double. Not zero.
    /// Default: 32.
    pub block: u32,
    /// Slots made at construction; zero is allowed.
    /// Default: 0.
    pub initial: u32,
    /// The maximum number of resources, held or idle. If no idle resource fits a request, idle ones
    /// are destroyed to make room.
    /// Default: `None`, no limit.
    pub max_live: Option<u32>,
    /// Keeps one idle resource in each thread cell, which makes acquire and release of cheap
    /// resources faster. Costly resources should not be stranded there.
    /// Default: `false`.
    pub thread_cells: bool,
    /// The number of generations of a slot before it is retired. Less than 2^32 - 1 only in tests.
    /// Default: `u32::MAX`.
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
    /// `InvalidArgument` for a block size of zero or beyond the limit of 2^24 slots, and for zero
    /// generations or resources.
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

/// The statistics of a pool. Hot paths count nothing: the numbers derive from the slots'
/// generations and from creation and destruction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Resources created.
    pub created: u64,
    /// Resources with a holder.
    pub live: u64,
    /// Requests that an idle resource served.
    pub recycled: u64,
    /// The maximum number of resources (held or idle) at a time.
    pub peak: u64,
    /// Idle resources.
    pub idle: u64,
    /// Retired slots: generations used up, or a panic during destruction.
    pub retired: u64,
    /// Weak leases.
    pub weak: u64,
}
