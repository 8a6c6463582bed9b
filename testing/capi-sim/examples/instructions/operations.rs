//! Operations on handles and leases. `leasehold-workbench bench lease` measures their times.

use leasehold_core::{
    EventHandle, Handle, Lease, PoolConfig, Recycle, Resource, Result, SlotPool, Tagged, tags,
};
use std::hint::black_box;

/// The payload: as large as a small native object with its bookkeeping.
struct Thing([u64; 4]);

impl Tagged for Thing {
    type Tag = tags::Event;
}

struct Things;

impl Resource for Things {
    type Payload = Thing;
    type Request<'a> = u64;
    const NAME: &'static str = "thing";

    fn create(&self, handle: EventHandle, request: &u64) -> Result<Thing> {
        Ok(Thing([*request, u64::from(handle.index()), 0, 0]))
    }

    #[inline]
    fn fits(&self, idle: &mut Thing, request: &u64) -> bool {
        idle.0[0] = *request;
        true
    }

    #[inline]
    fn recycle(&self, _: &mut Thing) -> Recycle {
        Recycle::Keep
    }
}

/// The pools and resources that the operations use.
pub struct Bench {
    list: SlotPool<Things>,
    cells: SlotPool<Things>,
    lease: Lease<Thing>,
    handle: Handle<tags::Event>,
}

/// An operation, which runs so many times.
pub type Body = fn(&Bench, u64);

impl Bench {
    /// Makes pools with one idle resource each, and one held resource.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new() -> Result<Self> {
        let list = SlotPool::new(Things, PoolConfig::default())?;
        let cells =
            SlotPool::new(Things, PoolConfig { thread_cells: true, ..PoolConfig::default() })?;
        let lease = list.acquire(&1)?;
        let handle = lease.handle();
        Ok(Self { list, cells, lease, handle })
    }

    /// Takes a recycled slot and gives it back.
    #[inline(never)]
    pub fn acquire_release(&self, n: u64) {
        for i in 0..n {
            let Ok(lease) = self.list.acquire(black_box(&i)) else { return };
            drop(black_box(lease));
        }
    }

    /// The same, and asks for the handle.
    #[inline(never)]
    pub fn acquire_handle_release(&self, n: u64) {
        for i in 0..n {
            let Ok(lease) = self.list.acquire(black_box(&i)) else { return };
            black_box(lease.handle());
            drop(black_box(lease));
        }
    }

    /// The same through a thread cell.
    #[inline(never)]
    pub fn acquire_release_cells(&self, n: u64) {
        for i in 0..n {
            let Ok(lease) = self.cells.acquire(black_box(&i)) else { return };
            drop(black_box(lease));
        }
    }

    /// Clones a lease and drops the clone.
    #[inline(never)]
    pub fn clone_drop(&self, n: u64) {
        for _ in 0..n {
            drop(black_box(black_box(&self.lease).clone()));
        }
    }

    /// Leases by a handle.
    #[inline(never)]
    pub fn lease_handle_drop(&self, n: u64) {
        for _ in 0..n {
            let Ok(lease) = self.list.lease(black_box(self.handle)) else { return };
            drop(black_box(lease));
        }
    }

    /// Asks whether a handle is alive.
    #[inline(never)]
    pub fn is_alive(&self, n: u64) {
        for _ in 0..n {
            black_box(self.list.is_alive(black_box(self.handle)));
        }
    }
}
