//! More failed timelines than a process has. The test has its own process, because it takes all
//! timelines.

use leasehold_core::{Error, PackedTimepoint, TimelineOwner, Timepoint};

const STREAMS: u64 = 200_000;

/// The timepoints of a timeline's former owner: the last good one, the failed one, and one that was
/// never reached.
struct Left {
    good: Timepoint,
    failed: Timepoint,
    ahead: Timepoint,
}

#[test]
fn failed_timelines_serve_again_and_old_points_keep_their_meaning() {
    let keep = TimelineOwner::take().expect("a timeline");
    let old = PackedTimepoint::from(keep.timeline().at(keep.advance().expect("a value")));
    let mut left = Vec::new();
    for n in 0..STREAMS {
        let owner =
            TimelineOwner::take().unwrap_or_else(|e| panic!("after {n} failed streams: {e}"));
        let timeline = owner.timeline();
        // The new owner's stream is like any other.
        assert!(timeline.is_idle() && timeline.failure().is_none(), "{n}: {timeline:?}");
        let good = timeline.at(owner.advance().expect("a value"));
        assert!(!good.is_settled() && !timeline.failed(good.value()), "{n}");
        owner.complete(good.value());
        assert!(good.is_settled() && timeline.check(good.value()).expect("no failure"), "{n}");
        let failed = timeline.at(owner.advance().expect("a value"));
        owner.poison(failed.value(), Error::invalid(format!("stream {n}")));
        owner.complete(failed.value());
        assert_eq!(timeline.failure().map(|f| f.0), Some(failed.value()));
        left.push(Left { good, failed, ahead: timeline.at(failed.value() + 1_000) });
    }
    for (n, Left { good, failed, ahead }) in left.iter().enumerate() {
        assert!(good.is_settled(), "{n}: what was over stays over");
        assert!(good.timeline().knows((*good).into()));
        for point in [failed, ahead] {
            assert!(!point.is_settled(), "{n}");
            let cause = point.timeline().check(point.value()).expect_err("it failed").to_string();
            assert_eq!(
                cause,
                format!("invalid argument: stream {n}"),
                "each failure keeps its own cause"
            );
            assert!(point.timeline().wait(point.value(), None).is_err());
        }
    }
    // The new owner of such a timeline does not know the former owners' failures.
    let heir = TimelineOwner::take().expect("a timeline");
    let theirs = left
        .iter()
        .rev()
        .find(|l| l.failed.timeline_id() == heir.timeline().id())
        .expect("all timelines failed");
    assert!(
        !heir.timeline().knows(theirs.failed.into()) && heir.timeline().knows(theirs.good.into())
    );
    assert!(heir.timeline().knows(heir.timeline().now().into()));
    // A timeline that stayed with its owner is unchanged.
    assert!(old.timepoint().is_some_and(|p| !p.is_settled() && !p.timeline().failed(p.value())));
    keep.complete(old.value());
    assert!(old.is_settled());
}
