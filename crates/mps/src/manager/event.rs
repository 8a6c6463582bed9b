//! Events: values that queues wait for and signal; the host too, with a shared event.
//!
//! An event's value only rises, so a reissued event continues from its last value:
//! [`EventState::next_value`] gives each holder values that no holder had before.
//!
//! This module must not know which work signals.

use super::opened::{OpenedDevice, Owned};
use super::pool::{DeviceResource, PoolOf};
use crate::config::MpsConfig;
use crate::driver::ops::{AnyEvent, NativeEvent, NativeSharedEvent};
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{EventHandle, Handle, Lease, PoolConfig, Resource, Result, Tagged, tags};
use std::marker::PhantomPinned;

/// The kind of an event.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EventKind {
    /// For queues of one device: `MTLEvent`.
    #[default]
    Device,
    /// For queues of all devices, and for the host: `MTLSharedEvent`.
    Shared,
}

#[derive(Debug)]
enum Native {
    Device(Owned<NativeEvent>),
    Shared(Owned<NativeSharedEvent>),
}

/// An event.
#[derive(Debug)]
pub struct EventState {
    native: Native,
    /// The largest value that a holder has.
    issued: AtomicU64,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl EventState {
    /// The driver's event.
    pub fn native(&self) -> AnyEvent {
        match &self.native {
            Native::Device(event) => event.native.into(),
            Native::Shared(event) => event.native.into(),
        }
    }

    /// The kind.
    pub fn kind(&self) -> EventKind {
        match self.native {
            Native::Device(_) => EventKind::Device,
            Native::Shared(_) => EventKind::Shared,
        }
    }

    /// A value that no holder has had before, and that is larger than all earlier ones.
    pub fn next_value(&self) -> u64 {
        self.issued.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The largest value that a holder has had, 0 at first.
    pub fn issued(&self) -> u64 {
        self.issued.load(Ordering::Relaxed)
    }
}

impl Tagged for EventState {
    type Tag = tags::Event;
}

/// The events of a device, as their pool makes them.
#[derive(Debug)]
pub struct Events {
    device: Arc<OpenedDevice>,
}

impl Resource for Events {
    type Payload = EventState;
    type Request<'a> = EventKind;
    const NAME: &'static str = "event";

    fn create(&self, _: Handle<tags::Event>, kind: &EventKind) -> Result<EventState> {
        let (ops, device) = (&self.device.ops, self.device.native);
        let native = match kind {
            EventKind::Device => {
                // SAFETY: the device is open as long as this value holds it.
                let event = unsafe { ops.event_create(device)? };
                Native::Device(Owned::new(&self.device, event))
            }
            EventKind::Shared => {
                // SAFETY: the device is open as long as this value holds it.
                let event = unsafe { ops.shared_event_create(device)? };
                Native::Shared(Owned::new(&self.device, event))
            }
        };
        Ok(EventState { native, issued: AtomicU64::new(0), _place: PhantomPinned })
    }

    fn fits(&self, idle: &mut EventState, kind: &EventKind) -> bool {
        idle.kind() == *kind
    }
}

impl DeviceResource for Events {
    fn on(device: &Arc<OpenedDevice>, _: &MpsConfig) -> (Self, PoolConfig) {
        (Self { device: device.clone() }, PoolConfig::default())
    }
}

/// Owns the events of a device.
#[doc(alias = "MpsEventManager")]
pub type EventManager = PoolOf<Events, EventKind>;

impl EventManager {
    /// Acquires an event of this kind: an idle one, or a new one. Does not block.
    ///
    /// # Errors
    /// A driver error.
    pub fn acquire(&self, kind: EventKind) -> Result<Lease<EventState>> {
        self.manager.acquire(&kind)
    }

    /// The manager's own event of this kind. The call makes the event unless it is alive. The
    /// manager keeps the event until its [release](Self::release).
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    #[doc(alias = "ensureAlive")]
    pub fn ensure_alive(&self, kind: EventKind) -> Result<EventHandle> {
        self.manager.get_or_create(&kind, &kind).map(|event| event.handle())
    }
}
