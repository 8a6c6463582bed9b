//! Tests of the last uses of granules.

use super::*;
use leasehold_core::TimelineOwner;

/// A granule named the timeline that released a part of it last, so a release of another
/// timeline in between made an older timepoint of the first timeline displace a newer one, and
/// the granule could be moved under work that still ran.
#[test]
fn a_granule_between_two_timelines_keeps_the_latest_use_of_each() {
    let timelines = [(); 3].map(|()| TimelineOwner::take().expect("a timeline"));
    // Only what was submitted may be completed: the timelines go to other streams afterwards.
    for timeline in &timelines {
        for _ in 0..100 {
            timeline.advance().expect("a value");
        }
    }
    let first = timelines.each_ref().map(|l| l.timeline().submitted() - 100);
    let at =
        |i: usize, ahead: u64| PackedTimepoint::from(timelines[i].timeline().at(first[i] + ahead));
    let mut g = Granule::VACANT;
    g.note(at(0, 100));
    g.note(at(1, 5));
    g.note(at(0, 50));
    let id = |i: usize| timelines[i].timeline().id();
    assert_eq!((g.last_of(id(0)), g.last_of(id(1))), (None, None), "both may still use it");
    let done = |i: usize, ahead: u64| timelines[i].complete(first[i] + ahead);
    done(1, 5);
    assert_eq!(g.last_of(id(0)), Some(at(0, 100)));
    done(0, 50);
    assert_eq!(g.last_of(id(0)), Some(at(0, 100)));
    g.note(at(1, 9));
    g.note(at(2, 9));
    done(0, 100);
    done(1, 9);
    assert_eq!(g.last_of(id(2)), None, "more timelines than are kept apart: nothing is known");
    done(2, 9);
    assert_eq!(g.last_of(id(2)), None);
}
