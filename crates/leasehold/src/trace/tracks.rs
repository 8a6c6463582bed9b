//! The tracks of a trace, one for each stream.
//!
//! This module must not know streams or runtimes.

use crate::trace::recorder::Recorder;
use crate::trace::track::Track;
use leasehold_core::Timeline;
use leasehold_core::sync::{Arc, Mutex};

/// A trace that is on: its recorder and its tracks.
pub(crate) struct Tracks {
    pub(crate) recorder: Arc<Recorder>,
    tracks: Mutex<Vec<Arc<Track>>>,
}

impl Tracks {
    pub(crate) fn new(recorder: Recorder) -> Self {
        Self { recorder: Arc::new(recorder), tracks: Mutex::default() }
    }

    /// The track of a stream's timeline, while the trace goes on.
    pub(crate) fn track(&self, timeline: &'static Timeline) -> Option<Arc<Track>> {
        let mut tracks = self.tracks.lock();
        // Under the lock: the end takes the tracks, and none may come after that.
        if !self.recorder.is_on() {
            return None;
        }
        if let Some(known) = tracks.iter().find(|t| t.timeline.id() == timeline.id()) {
            return Some(known.clone());
        }
        let track = Arc::new(Track::new(self.recorder.clone(), timeline));
        tracks.push(track.clone());
        Some(track)
    }

    /// The tracks.
    pub(crate) fn all(&self) -> Vec<Arc<Track>> {
        self.tracks.lock().clone()
    }

    /// The tracks of a trace that has ended, which are given up.
    pub(crate) fn take(&self) -> Vec<Arc<Track>> {
        std::mem::take(&mut *self.tracks.lock())
    }
}
