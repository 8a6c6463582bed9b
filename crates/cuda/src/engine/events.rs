//! The pool of native events: marks on streams, and time stamps.
//!
//! A wait binds to the event's last record before the wait. So a mark's event may be recorded again
//! once the driver has got every wait for it. The event is free when its last lease is dropped. A
//! time stamp's event keeps its time until it is recorded again.
//!
//! This module must not know what events mark.

use super::door::Door;
use crate::driver::ops::{EventFlags, NativeEvent};
use leasehold_core::sync::Arc;
use leasehold_core::{Fate, Handle, Resource, Result, SlotPool, Tagged, tags};
use leasehold_hal::Timestamp;
use std::marker::PhantomPinned;

/// A native event.
#[derive(Debug)]
pub struct EventState {
    pub(crate) native: NativeEvent,
    flags: EventFlags,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl EventState {
    /// The flags that the event was made with.
    #[must_use]
    pub fn flags(&self) -> EventFlags {
        self.flags
    }
}

impl Tagged for EventState {
    type Tag = tags::Event;
}

/// The resource type of events.
#[derive(Debug)]
pub struct Events(pub Arc<Door>);

/// The pool of events for the engine's marks.
pub type Marks = SlotPool<Events>;

impl Resource for Events {
    type Payload = EventState;
    type Request<'a> = EventFlags;
    const NAME: &'static str = "event";

    fn create(&self, _: Handle<tags::Event>, flags: &EventFlags) -> Result<EventState> {
        let native = self.0.within(|ops| ops.event_create(*flags))?;
        Ok(EventState { native, flags: *flags, _place: PhantomPinned })
    }

    fn fits(&self, idle: &mut EventState, flags: &EventFlags) -> bool {
        idle.flags == *flags
    }

    fn recycle(&self, _: &mut EventState) -> Fate {
        if self.0.loss().is_some() { Fate::Destroy } else { Fate::Keep }
    }

    fn destroy(&self, event: EventState) {
        // SAFETY: the event was made for this payload, whose last lease is gone.
        self.0.leave_behind(|ops| unsafe { ops.event_destroy(event.native) });
    }
}

/// The resource type of time stamps: events with timing.
#[derive(Debug)]
pub struct Timestamps(pub Arc<Door>);

impl Resource for Timestamps {
    type Payload = Timestamp;
    type Request<'a> = ();
    const NAME: &'static str = "timestamp";

    fn create(&self, _: Handle<tags::Timestamp>, (): &()) -> Result<Timestamp> {
        let flags = EventFlags { timing: true, blocking: false };
        let native = self.0.within(|ops| ops.event_create(flags))?;
        Ok(Timestamp::new(native.0))
    }

    fn recycle(&self, stamp: &mut Timestamp) -> Fate {
        stamp.clear();
        if self.0.loss().is_some() { Fate::Destroy } else { Fate::Keep }
    }

    fn destroy(&self, stamp: Timestamp) {
        // SAFETY: the event was made for this payload, whose last lease is gone.
        self.0.leave_behind(|ops| unsafe { ops.event_destroy(NativeEvent(stamp.native())) });
    }
}
