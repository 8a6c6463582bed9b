//! The submissions with a communicator's calls that are not over.
//!
//! This module must not know communicators.

use leasehold::Timepoint;
use leasehold::backend::sync::Mutex;

/// The length from which on submissions that are over are forgotten.
const FULL: usize = 32;

/// Submissions, of which some may be over.
#[derive(Default)]
pub(crate) struct Unfinished(Mutex<Points>);

#[derive(Default)]
struct Points {
    all: Vec<Timepoint>,
    /// At this length those that are over are removed.
    full: usize,
}

impl Unfinished {
    pub(crate) fn add(&self, point: Timepoint) {
        let mut points = self.0.lock();
        if points.all.len() >= points.full {
            points.all.retain(|p| !is_over(*p));
            points.full = (2 * points.all.len()).max(FULL);
        }
        points.all.push(point);
    }

    /// The first one of each timeline.
    pub(crate) fn first(&self) -> Vec<Timepoint> {
        let mut first: Vec<Timepoint> = Vec::new();
        for &point in self.0.lock().all.iter().filter(|p| !is_over(**p)) {
            match first.iter_mut().find(|p| p.timeline_id() == point.timeline_id()) {
                Some(known) if known.value() <= point.value() => {}
                Some(known) => *known = point,
                None => first.push(point),
            }
        }
        first
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<Timepoint> {
        self.0.lock().all.iter().copied().filter(|p| !is_over(*p)).collect()
    }
}

/// Over, as far as it was published; a failure is an end too.
fn is_over(point: Timepoint) -> bool {
    !matches!(point.timeline().check(point.value()), Ok(false))
}
