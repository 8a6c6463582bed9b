//! Command queues: a few for each device, which streams share.
//!
//! A queue is a keyed singleton: one index has one queue, which is never created twice. **Leases on
//! a queue are shared; its turn is exclusive.** A holder that wants to encode or commit takes the
//! queue's claim ([`Lease::claim`]), of which one exists at a time, and drops it afterwards. The
//! backend's streams do so for each submission and each commit. A stream waits for its turn up to a
//! second, and reports `Occupied` then. So another holder keeps the claim briefly, and waits for no
//! stream meanwhile.
//!
//! This module must not know what queues run.

use super::opened::{OpenedDevice, Owned};
use super::pool::{DeviceResource, PoolOf};
use crate::config::MpsConfig;
use crate::driver::ops::NativeQueue;
use leasehold_core::sync::Arc;
use leasehold_core::{
    CommandQueueHandle, Error, Handle, Index, Lease, PoolConfig, Recycle, Resource, Result, Tagged,
    tags,
};
use std::marker::PhantomPinned;

/// A command queue.
#[derive(Debug)]
pub struct CommandQueueState {
    owned: Owned<NativeQueue>,
    index: Index<tags::CommandQueue>,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl CommandQueueState {
    /// The driver's queue.
    pub fn native(&self) -> NativeQueue {
        self.owned.native
    }

    /// The queue's index on its device.
    pub fn index(&self) -> Index<tags::CommandQueue> {
        self.index
    }
}

impl Tagged for CommandQueueState {
    type Tag = tags::CommandQueue;
}

/// The command queues of a device, as their pool makes them.
#[derive(Debug)]
pub struct Queues {
    device: Arc<OpenedDevice>,
    count: u32,
    command_buffers: u32,
}

impl Resource for Queues {
    type Payload = CommandQueueState;
    type Request<'a> = Index<tags::CommandQueue>;
    const NAME: &'static str = "command queue";

    fn create(
        &self,
        _: Handle<tags::CommandQueue>,
        index: &Index<tags::CommandQueue>,
    ) -> Result<CommandQueueState> {
        let label = format!("{} queue {}", self.device.id, index.get());
        let (ops, device) = (&self.device.ops, self.device.native);
        // SAFETY: the device is open as long as this value holds it.
        let native = unsafe { ops.queue_create(device, self.command_buffers, &label)? };
        let owned = Owned::new(&self.device, native);
        // SAFETY: `owned` keeps the queue live, and holds the device beyond the queue's release.
        unsafe { self.device.attach(native)? };
        Ok(CommandQueueState { owned, index: *index, _place: PhantomPinned })
    }

    fn recycle(&self, _: &mut CommandQueueState) -> Recycle {
        Recycle::Destroy
    }
}

impl DeviceResource for Queues {
    fn on(device: &Arc<OpenedDevice>, config: &MpsConfig) -> (Self, PoolConfig) {
        let MpsConfig { queues: count, command_buffers, .. } = *config;
        let queues = Self { device: device.clone(), count, command_buffers };
        let (block, max_live) = (count, Some(count));
        (queues, PoolConfig { block, max_live, ..PoolConfig::default() })
    }
}

/// Owns the command queues of a device.
#[doc(alias("CommandQueue", "MpsCommandQueueManager"))]
pub type CommandQueueManager = PoolOf<Queues, Index<tags::CommandQueue>>;

impl CommandQueueManager {
    /// The number of queues.
    pub fn count(&self) -> u32 {
        self.resources().map_or(0, |queues| queues.count)
    }

    /// The queue of an index. The first call creates it; concurrent calls create it once. Does not
    /// wait for the device.
    ///
    /// # Errors
    /// `NotFound` for an index beyond [`count`](Self::count); a driver error.
    pub fn acquire(&self, index: Index<tags::CommandQueue>) -> Result<Lease<CommandQueueState>> {
        let count = self.count();
        if index.get() >= count {
            let text = format!("command queue {}: the device has {count}", index.get());
            return Err(Error::NotFound(text.into()));
        }
        self.manager.get_or_create(&index, &index)
    }

    /// Creates the queue of an index unless it is alive. The manager keeps the queue until its
    /// [release](Self::release).
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    #[doc(alias = "ensureAlive")]
    pub fn ensure_alive(&self, index: Index<tags::CommandQueue>) -> Result<CommandQueueHandle> {
        self.acquire(index).map(|queue| queue.handle())
    }
}
