//! Tables that all devices of a backend share.
//!
//! | table | key | writers |
//! |---|---|---|
//! | origins | a timeline | streams and host timelines, at their start and end |
//! | waits | a timeline | a stream that defers a submission adds, the signaller removes |
//!
//! The signaller of a timeline resumes the streams that it removes from the waits.
//!
//! All locks here are leaves and are held for a few instructions.
//!
//! This module must not know how streams run.

use crate::driver::DriverStream;
use crate::host_timeline::HostSignals;
use crate::stream::StreamCore;
use leasehold_core::sync::{Mutex, RwLock};
use leasehold_core::{Result, Timeline, TimelineId, Timepoint};
use std::collections::HashMap;
use std::fmt;
use std::sync::Weak;

/// The signaller of a timeline.
pub(crate) enum Origin<N: DriverStream> {
    /// A stream of this backend.
    Stream(Weak<StreamCore<N>>),
    /// A host timeline of this backend.
    HostTimeline,
}

impl<N: DriverStream> Clone for Origin<N> {
    fn clone(&self) -> Self {
        match self {
            Origin::Stream(stream) => Origin::Stream(stream.clone()),
            Origin::HostTimeline => Origin::HostTimeline,
        }
    }
}

/// A stream that waits for a timepoint which the driver does not know yet.
type Waiting<N> = (Timepoint, Weak<StreamCore<N>>);

/// The timelines of a backend: their signallers, and the streams that wait for them.
pub struct Tables<N: DriverStream> {
    origins: RwLock<HashMap<TimelineId, Origin<N>>>,
    waits: Mutex<Vec<Waiting<N>>>,
}

impl<N: DriverStream> Default for Tables<N> {
    fn default() -> Self {
        Self { origins: RwLock::new(HashMap::new()), waits: Mutex::new(Vec::new()) }
    }
}

impl<N: DriverStream> Tables<N> {
    /// Records the signaller of a timeline.
    pub(crate) fn add_origin(&self, timeline: &Timeline, origin: Origin<N>) {
        self.origins.write().insert(timeline.id(), origin);
    }

    /// Removes the signaller of a timeline.
    pub(crate) fn remove_origin(&self, timeline: &Timeline) {
        self.origins.write().remove(&timeline.id());
    }

    /// The signaller of a timeline. `None` for a timeline of another backend.
    pub(crate) fn origin(&self, timeline: TimelineId) -> Option<Origin<N>> {
        self.origins.read().get(&timeline).cloned()
    }

    /// A mark behind all work of a timepoint, for a wait by a stream that the engine does not know.
    /// `None` for a timeline of another backend, and for work that the host holds back.
    ///
    /// # Errors
    /// Those of recording the mark.
    pub fn mark(&self, point: Timepoint) -> Result<Option<N::Mark>> {
        let Some(Origin::Stream(source)) = self.origin(point.timeline_id()) else {
            return Ok(None);
        };
        let Some(source) = source.upgrade() else { return Ok(None) };
        Ok(source.mark_for(point.value())?.map(|(mark, _)| mark))
    }

    /// Records that a stream waits for a timepoint. If the table is full, the call first removes
    /// the entries whose timepoints are over.
    pub(crate) fn note_wait(&self, point: Timepoint, stream: &Weak<StreamCore<N>>) {
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
        drop(waits);
        // The thread that gave such a timepoint to the driver may not have called `wake` yet, and
        // would not find the entry.
        over.iter().for_each(|stream| stream.attend());
    }

    /// The largest value of a timeline that some stream waits for.
    pub(crate) fn most_waited(&self, timeline: TimelineId) -> Option<u64> {
        self.waits
            .lock()
            .iter()
            .filter(|(p, _)| p.timeline_id() == timeline)
            .map(|(p, _)| p.value())
            .max()
    }

    /// Resumes the streams that wait for `timeline` up to `value`. The caller holds no stream's
    /// lock.
    pub(crate) fn wake(&self, timeline: TimelineId, value: u64) {
        loop {
            // A batch has a fixed size: the loop allocates nothing, and a stream's last reference
            // drops without the lock.
            let mut some: [Option<Waiting<N>>; 8] = Default::default();
            {
                let mut waits = self.waits.lock();
                let mut n = 0;
                let mut i = 0;
                while i < waits.len() && n < some.len() {
                    if waits[i].0.timeline_id() == timeline && waits[i].0.value() <= value {
                        some[n] = Some(waits.remove(i));
                        n += 1;
                    } else {
                        i += 1;
                    }
                }
            }
            if some[0].is_none() {
                return;
            }
            for (_, stream) in some.into_iter().flatten() {
                if let Some(stream) = stream.upgrade() {
                    stream.pump();
                }
            }
        }
    }
}

impl<N: DriverStream> HostSignals for Tables<N> {
    /// A host timeline uses no object of the driver: streams that wait for one hold their work
    /// back, and a signal resumes them at once.
    type Native = ();

    fn create(&self, timeline: &'static Timeline) -> Result<()> {
        self.add_origin(timeline, Origin::HostTimeline);
        Ok(())
    }

    fn destroy(&self, timeline: &'static Timeline, (): &()) {
        self.remove_origin(timeline);
    }

    fn is_awaited(&self, timeline: &'static Timeline, (): &()) -> bool {
        self.most_waited(timeline.id()).is_some_and(|value| value > timeline.completed())
    }

    fn resume(&self, timeline: &'static Timeline, value: u64) {
        self.wake(timeline.id(), value);
    }
}

impl<N: DriverStream> fmt::Debug for Tables<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tables")
            .field("origins", &self.origins.read().len())
            .field("waits", &self.waits.lock().len())
            .finish()
    }
}
