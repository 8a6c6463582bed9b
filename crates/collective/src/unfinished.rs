//! The submissions with a communicator's calls that are not over.
//!
//! This module must not know communicators.

use crate::log::Entered;
use crate::signature::List;
use leasehold::Timepoint;
use leasehold::backend::sync::{Arc, Mutex};
use smallvec::SmallVec;
use std::time::Duration;

/// The length from which on submissions that are over are forgotten.
const FULL: usize = 32;

/// Submissions, of which some may be over.
#[derive(Default)]
pub(crate) struct Unfinished(Mutex<Points>);

/// The calls of a submission.
pub(crate) type Calls = SmallVec<[Entered; 2]>;

/// A submission with calls.
#[derive(Clone)]
pub(crate) struct Submission {
    pub(crate) at: Timepoint,
    pub(crate) calls: Calls,
    /// The communicator's calls of a launch of a graph that has several communicators' calls.
    pub(crate) graph: Option<Arc<List>>,
}

#[derive(Default)]
struct Points {
    all: Vec<Submission>,
    /// At this length those that have passed are removed.
    full: usize,
}

impl Unfinished {
    pub(crate) fn add(&self, submission: Submission) {
        let mut points = self.0.lock();
        if points.all.len() >= points.full {
            points.all.retain(|s| !s.at.has_passed());
            points.full = (2 * points.all.len()).max(FULL);
        }
        points.all.push(submission);
    }

    /// The first one of each timeline.
    pub(crate) fn first(&self) -> Vec<Timepoint> {
        first_of(self.all())
    }

    /// Returns whether all have passed. The device is asked.
    pub(crate) fn have_passed(&self) -> bool {
        // Not in the lock: what completes may drop a communicator.
        let all: Vec<Timepoint> = self.0.lock().all.iter().map(|s| s.at).collect();
        all.iter().all(|p| {
            // The answer of a failed one is its failure.
            let _ = p.timeline().wait(p.value(), Some(Duration::ZERO));
            p.has_passed()
        })
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<Timepoint> {
        self.with_calls().into_iter().map(|s| s.at).collect()
    }

    /// All of them, with their calls.
    pub(crate) fn with_calls(&self) -> Vec<Submission> {
        self.0.lock().all.iter().filter(|s| !is_over(s.at)).cloned().collect()
    }
}

/// The first timepoint of each timeline.
pub(crate) fn first_of(points: impl IntoIterator<Item = Timepoint>) -> Vec<Timepoint> {
    let mut first: Vec<Timepoint> = Vec::new();
    for point in points {
        match first.iter_mut().find(|p| p.timeline_id() == point.timeline_id()) {
            Some(known) if known.value() <= point.value() => {}
            Some(known) => *known = point,
            None => first.push(point),
        }
    }
    first
}

/// Over, as far as it was published; a failure is an end too.
fn is_over(point: Timepoint) -> bool {
    !matches!(point.timeline().check(point.value()), Ok(false))
}
