//! The pool of native events: recorded events on streams, and timestamps.
//!
//! A wait binds to the event's last record before the wait. So a recorded event's event may be
//! recorded again once the driver has got every wait for it. The event is free when its last lease
//! is dropped. A timestamp's event keeps its time until it is recorded again.
//!
//! This module must not know what events mark.

use super::driver_context::DriverContext;
use crate::driver::ops::{EventFlags, NativeEvent};
use leasehold_core::sync::Arc;
use leasehold_core::{Handle, Recycle, Resource, Result, SlotPool, Tagged, tags};
use leasehold_hal::TimestampQuery;
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
pub struct Events(pub Arc<DriverContext>);

/// The pool of events for the engine's recorded events.
pub type EventPool = SlotPool<Events>;

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

    fn recycle(&self, _: &mut EventState) -> Recycle {
        if self.0.loss().is_some() { Recycle::Destroy } else { Recycle::Keep }
    }

    fn destroy(&self, event: EventState) {
        // SAFETY: the event was made for this payload, whose last lease is gone.
        self.0.release_or_log(|ops| unsafe { ops.event_destroy(event.native) });
    }
}

/// The resource type of timestamps: events with timing.
#[derive(Debug)]
pub struct Timestamps(pub Arc<DriverContext>);

impl Resource for Timestamps {
    type Payload = TimestampQuery;
    type Request<'a> = ();
    const NAME: &'static str = "timestamp";

    fn create(&self, _: Handle<tags::TimestampQuery>, (): &()) -> Result<TimestampQuery> {
        let flags = EventFlags { timing: true, blocking: false };
        let native = self.0.within(|ops| ops.event_create(flags))?;
        Ok(TimestampQuery::new(native.0))
    }

    fn recycle(&self, timestamp: &mut TimestampQuery) -> Recycle {
        timestamp.clear();
        if self.0.loss().is_some() { Recycle::Destroy } else { Recycle::Keep }
    }

    fn destroy(&self, timestamp: TimestampQuery) {
        // SAFETY: the event was made for this payload, whose last lease is gone.
        self.0.release_or_log(|ops| unsafe { ops.event_destroy(NativeEvent(timestamp.native())) });
    }
}
