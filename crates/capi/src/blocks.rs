//! The blocks that the caller holds, by address. A pointer that is not here was never given, or was
//! freed already.
//!
//! This module must not know how blocks are made.

use crate::pool::Pool;
use crate::source::Source;
use crate::status::no_memory;
use leasehold::{Buffer, Error, Lease, Result};
use leasehold_core::sync::{Arc, Mutex};
use rustc_hash::FxHashMap;
use std::collections::HashMap;

const SHARDS: usize = 64;

/// A block that the caller holds.
pub(crate) struct Block {
    pub(crate) lease: Lease<Buffer>,
    pub(crate) pool: Arc<Pool>,
    /// The stream of its allocation.
    pub(crate) home: Source,
    /// Other streams that use it.
    pub(crate) others: Vec<Source>,
}

impl Block {
    /// Frees the block: reuse waits for the work that its streams have now.
    pub(crate) fn free(self) {
        self.home.end_use(&self.lease);
        self.others.iter().for_each(|other| other.end_other_use(&self.lease));
    }
}

/// Blocks by address. The allocator chooses addresses, so no caller can make them collide.
type Shard = FxHashMap<u64, Block>;

/// The blocks of a device. `None` once the device is closed. Each lock is a leaf; only
/// [`close`](Blocks::close) holds several.
pub(crate) struct Blocks([Mutex<Option<Shard>>; SHARDS]);

impl Blocks {
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| Mutex::new(Some(Shard::default()))))
    }

    fn shard(&self, addr: u64) -> &Mutex<Option<Shard>> {
        // Addresses are multiples of 256, and large ones of 2 MiB.
        &self.0[((addr >> 8) ^ (addr >> 21)) as usize % SHARDS]
    }

    /// Adds a block.
    ///
    /// # Errors
    /// `InvalidArgument` if the device was closed, `OutOfMemory` for host memory. The block is free
    /// again then.
    pub(crate) fn insert(&self, block: Block) -> Result<()> {
        let addr = block.lease.addr();
        let mut shard = self.shard(addr).lock();
        let Some(blocks) = &mut *shard else { return Err(Self::closed()) };
        blocks.try_reserve(1).map_err(|_| no_memory("the table of blocks", size_of::<Block>()))?;
        let former = blocks.insert(addr, block);
        debug_assert!(former.is_none(), "two live blocks at one address");
        Ok(())
    }

    #[cold]
    fn closed() -> Error {
        Error::invalid("the device was closed meanwhile")
    }

    #[cold]
    fn unknown(addr: u64) -> Error {
        Error::invalid(format!(
            "{addr:#x} is no block of this device: it was freed already, or is somebody else's"
        ))
    }

    pub(crate) fn remove(&self, addr: u64) -> Result<Block> {
        let mut shard = self.shard(addr).lock();
        shard.as_mut().and_then(|b| b.remove(&addr)).ok_or_else(|| Self::unknown(addr))
    }

    /// Calls `f` with a block, under its lock.
    pub(crate) fn with<R>(&self, addr: u64, f: impl FnOnce(&mut Block) -> R) -> Result<R> {
        let mut shard = self.shard(addr).lock();
        let block = shard.as_mut().and_then(|b| b.get_mut(&addr));
        block.map(f).ok_or_else(|| Self::unknown(addr))
    }

    /// The block that holds an address: its first address and its bytes.
    pub(crate) fn around(&self, addr: u64) -> Option<(u64, u64)> {
        let holds = |b: &&Block| addr.wrapping_sub(b.lease.addr()) < b.lease.len();
        self.0.iter().find_map(|shard| {
            let shard = shard.lock();
            let found = shard.iter().flat_map(HashMap::values).find(holds);
            found.map(|b| (b.lease.addr(), b.lease.len()))
        })
    }

    /// Refuses further blocks from now on, if there are none. An allocation that another thread
    /// began gets an error.
    ///
    /// # Errors
    /// `LeasesOutstanding` while the caller holds blocks; then nothing has changed.
    pub(crate) fn close(&self) -> Result<()> {
        let mut shards: [_; SHARDS] = std::array::from_fn(|at| self.0[at].lock());
        let blocks: usize = shards.iter().map(|s| s.as_ref().map_or(0, HashMap::len)).sum();
        if blocks > 0 {
            return Err(Error::LeasesOutstanding {
                resource: "block",
                strong: blocks as u64,
                weak: 0,
            });
        }
        shards.iter_mut().for_each(|shard| **shard = None);
        Ok(())
    }
}
