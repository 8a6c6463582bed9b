//! The blocks that the caller holds, by address. A pointer that is not here was never given, or was
//! freed already.
//!
//! This module must not know how blocks are made.

use crate::pool::Pool;
use crate::source::Source;
use leasehold::{Buffer, Error, Lease, Result};
use leasehold_core::sync::{Arc, Mutex};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

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

/// Hashes addresses, which the allocator chooses: no caller can make them collide.
#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(self.0 ^ u64::from(byte)));
    }

    fn write_u64(&mut self, addr: u64) {
        // Addresses end in zeros: both halves of the product count.
        let product = u128::from(addr) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Blocks by address.
type Shard = HashMap<u64, Block, BuildHasherDefault<AddressHasher>>;

/// The blocks of a device. Each lock is a leaf.
pub(crate) struct Blocks([Mutex<Shard>; SHARDS]);

impl Blocks {
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| Mutex::default()))
    }

    fn shard(&self, addr: u64) -> &Mutex<Shard> {
        // Addresses are multiples of 256, and large ones of 2 MiB.
        &self.0[((addr >> 8) ^ (addr >> 21)) as usize % SHARDS]
    }

    pub(crate) fn insert(&self, block: Block) {
        let addr = block.lease.addr();
        let former = self.shard(addr).lock().insert(addr, block);
        debug_assert!(former.is_none(), "two live blocks at one address");
    }

    fn unknown(addr: u64) -> Error {
        Error::invalid(format!(
            "{addr:#x} is no block of this device: it was freed already, or is somebody else's"
        ))
    }

    pub(crate) fn remove(&self, addr: u64) -> Result<Block> {
        self.shard(addr).lock().remove(&addr).ok_or_else(|| Self::unknown(addr))
    }

    /// Calls `f` with a block, under its lock.
    pub(crate) fn with<R>(&self, addr: u64, f: impl FnOnce(&mut Block) -> R) -> Result<R> {
        self.shard(addr).lock().get_mut(&addr).map(f).ok_or_else(|| Self::unknown(addr))
    }

    /// The block that holds an address: its first address and its bytes.
    pub(crate) fn around(&self, addr: u64) -> Option<(u64, u64)> {
        let holds = |b: &Block| addr.wrapping_sub(b.lease.addr()) < b.lease.len();
        self.0.iter().find_map(|shard| {
            let blocks = shard.lock();
            blocks.values().find(|b| holds(b)).map(|b| (b.lease.addr(), b.lease.len()))
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(|shard| shard.lock().len()).sum()
    }
}
