//! The timelines of a backend: who signals each, and which streams wait for it.
//!
//! | table | key | writers |
//! |---|---|---|
//! | signallers | a timeline | streams and host timelines, at their start and end |
//! | waits | a timeline | a stream that defers a submission adds, the signaller removes |
//!
//! The signaller of a timeline resumes the streams that it removes from the waits. All locks here
//! are leaves and are held for a few instructions.
//!
//! This module must not know what a stream is.

use leasehold_core::sync::{Arc, Mutex, RwLock};
use leasehold_core::{Timeline, TimelineId, Timepoint};
use std::fmt;
use std::sync::Weak;

/// The signaller of a timeline.
pub(crate) enum Origin<S> {
    /// A stream of this backend.
    Stream(Weak<S>),
    /// A host timeline of this backend.
    HostTimeline,
}

impl<S> Clone for Origin<S> {
    fn clone(&self) -> Self {
        match self {
            Origin::Stream(stream) => Origin::Stream(stream.clone()),
            Origin::HostTimeline => Origin::HostTimeline,
        }
    }
}

/// The timelines of a backend whose streams are of type `S`.
pub struct Timelines<S> {
    /// By the timelines' numbers.
    origins: RwLock<Vec<Option<Origin<S>>>>,
    /// The streams that wait for timepoints which the driver does not know yet.
    waits: Mutex<Vec<(Timepoint, Weak<S>)>>,
}

impl<S> Default for Timelines<S> {
    fn default() -> Self {
        Self { origins: RwLock::new(Vec::new()), waits: Mutex::new(Vec::new()) }
    }
}

impl<S> Timelines<S> {
    /// Records the signaller of a timeline.
    pub(crate) fn add_origin(&self, timeline: &Timeline, origin: Origin<S>) {
        let at = usize::from(timeline.id().get());
        let mut origins = self.origins.write();
        if origins.len() <= at {
            origins.resize_with(at + 1, || None);
        }
        origins[at] = Some(origin);
    }

    /// Removes the signaller of a timeline.
    pub(crate) fn remove_origin(&self, timeline: &Timeline) {
        if let Some(origin) = self.origins.write().get_mut(usize::from(timeline.id().get())) {
            *origin = None;
        }
    }

    /// The signaller of a timeline. `None` for a timeline of another backend.
    pub(crate) fn origin(&self, timeline: TimelineId) -> Option<Origin<S>> {
        self.origins.read().get(usize::from(timeline.get()))?.clone()
    }

    /// The streams of all devices of the backend.
    pub(crate) fn streams(&self) -> Vec<Arc<S>> {
        let stream = |origin: &Option<Origin<S>>| match origin {
            Some(Origin::Stream(stream)) => stream.upgrade(),
            Some(Origin::HostTimeline) | None => None,
        };
        self.origins.read().iter().filter_map(stream).collect()
    }

    /// Records that a stream waits for a timepoint. If the table is full, the call first removes
    /// the entries whose timepoints are over, and returns their streams. The thread that gave such
    /// a timepoint to the driver may not have come to the table yet, and would not find the entry.
    /// So the caller has these streams listed.
    #[must_use = "nobody else resumes these streams"]
    pub(crate) fn note_wait(&self, point: Timepoint, stream: &Weak<S>) -> Vec<Arc<S>> {
        let mut over = Vec::new();
        let mut waits = self.waits.lock();
        if waits.len() == waits.capacity() {
            waits.retain(|(p, s)| {
                let waiting = matches!(p.timeline().check(p.value()), Ok(false));
                if !waiting {
                    over.extend(s.upgrade());
                }
                waiting && s.strong_count() > 0
            });
        }
        waits.push((point, stream.clone()));
        over
    }

    /// Whether some stream waits for a timepoint.
    #[inline]
    pub(crate) fn has_waiting(&self) -> bool {
        !self.waits.lock().is_empty()
    }

    /// Takes some of the streams that wait for `timeline` up to `value`; none if no stream waits. A
    /// batch has a fixed size: the call allocates nothing, and a stream's last reference drops
    /// without the lock.
    pub(crate) fn take_waiting(&self, timeline: TimelineId, value: u64) -> [Option<Weak<S>>; 8] {
        let mut some: [Option<Weak<S>>; 8] = Default::default();
        let mut waits = self.waits.lock();
        let mut n = 0;
        let mut i = 0;
        while i < waits.len() && n < some.len() {
            if waits[i].0.timeline_id() == timeline && waits[i].0.value() <= value {
                some[n] = Some(waits.remove(i).1);
                n += 1;
            } else {
                i += 1;
            }
        }
        some
    }
}

impl<S> fmt::Debug for Timelines<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timelines")
            .field("origins", &self.origins.read().iter().flatten().count())
            .field("waits", &self.waits.lock().len())
            .finish()
    }
}
