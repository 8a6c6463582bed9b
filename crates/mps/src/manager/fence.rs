//! Fences: the order of encoders of one queue on untracked memory.
//!
//! A holder keeps its lease until the command buffers that use the fence are over. So a reissued
//! fence never has a pending update.
//!
//! This module must not know which encoders use a fence.

use super::opened::{OpenedDevice, Owned};
use super::pool::{DeviceResource, PoolOf};
use crate::config::MpsConfig;
use crate::driver::ops::NativeFence;
use leasehold_core::sync::Arc;
use leasehold_core::{FenceHandle, Handle, Lease, PoolConfig, Resource, Result, Tagged, tags};
use std::marker::PhantomPinned;

/// A fence.
#[derive(Debug)]
pub struct FenceState {
    owned: Owned<NativeFence>,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl FenceState {
    /// The driver's fence.
    pub fn native(&self) -> NativeFence {
        self.owned.native
    }
}

impl Tagged for FenceState {
    type Tag = tags::Fence;
}

/// The fences of a device, as their pool makes them.
#[derive(Debug)]
pub struct Fences {
    device: Arc<OpenedDevice>,
}

impl Resource for Fences {
    type Payload = FenceState;
    type Request<'a> = ();
    const NAME: &'static str = "fence";

    fn create(&self, _: Handle<tags::Fence>, (): &()) -> Result<FenceState> {
        // SAFETY: the device is open as long as this value holds it.
        let native = unsafe { self.device.ops.fence_create(self.device.native)? };
        Ok(FenceState { owned: Owned::new(&self.device, native), _place: PhantomPinned })
    }
}

impl DeviceResource for Fences {
    fn on(device: &Arc<OpenedDevice>, _: &MpsConfig) -> (Self, PoolConfig) {
        (Self { device: device.clone() }, PoolConfig::default())
    }
}

/// Owns the fences of a device.
#[doc(alias = "MpsFenceManager")]
pub type FenceManager = PoolOf<Fences>;

impl FenceManager {
    /// Acquires a fence: an idle one, or a new one. Does not block.
    ///
    /// # Errors
    /// A driver error.
    pub fn acquire(&self) -> Result<Lease<FenceState>> {
        self.manager.acquire(&())
    }

    /// The manager's own fence. The call makes the fence unless it is alive. The manager keeps the
    /// fence until its [release](Self::release).
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    #[doc(alias = "ensureAlive")]
    pub fn ensure_alive(&self) -> Result<FenceHandle> {
        self.manager.get_or_create(&(), &()).map(|fence| fence.handle())
    }
}
