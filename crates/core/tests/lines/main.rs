//! More failed timelines than a process has. The test has its own process, because it takes all
//! timelines.

use leasehold_core::{Error, LineOwner, Point, Stamp};

const STREAMS: u64 = 200_000;

/// The timepoints of a timeline's former owner: the last good one, the failed one, and one that was
/// never reached.
struct Left {
    good: Point,
    failed: Point,
    ahead: Point,
}

#[test]
fn failed_lines_serve_again_and_old_points_keep_their_meaning() {
    let keep = LineOwner::take().expect("a line");
    let old = Stamp::from(keep.line().at(keep.advance().expect("a value")));
    let mut left = Vec::new();
    for n in 0..STREAMS {
        let owner = LineOwner::take().unwrap_or_else(|e| panic!("after {n} failed streams: {e}"));
        let line = owner.line();
        // The new owner's stream is like any other.
        assert!(line.is_idle() && line.failure().is_none(), "{n}: {line:?}");
        let good = line.at(owner.advance().expect("a value"));
        assert!(!good.is_settled() && !line.failed(good.value()), "{n}");
        owner.complete(good.value());
        assert!(good.is_settled() && line.check(good.value()).expect("no failure"), "{n}");
        let failed = line.at(owner.advance().expect("a value"));
        owner.poison(failed.value(), Error::invalid(format!("stream {n}")));
        owner.complete(failed.value());
        assert_eq!(line.failure().map(|f| f.0), Some(failed.value()));
        left.push(Left { good, failed, ahead: line.at(failed.value() + 1_000) });
    }
    for (n, Left { good, failed, ahead }) in left.iter().enumerate() {
        assert!(good.is_settled(), "{n}: what was over stays over");
        assert!(good.line().knows((*good).into()));
        for point in [failed, ahead] {
            assert!(!point.is_settled(), "{n}");
            let cause = point.line().check(point.value()).expect_err("it failed").to_string();
            assert_eq!(cause, format!("invalid argument: stream {n}"), "each failure keeps its own cause");
            assert!(point.line().wait(point.value(), None).is_err());
        }
    }
    // The new owner of such a timeline does not know the former owners' failures.
    let heir = LineOwner::take().expect("a line");
    let theirs = left.iter().rev().find(|l| l.failed.line_id() == heir.line().id()).expect("all lines failed");
    assert!(!heir.line().knows(theirs.failed.into()) && heir.line().knows(theirs.good.into()));
    assert!(heir.line().knows(heir.line().now().into()));
    // A timeline that stayed with its owner is unchanged.
    assert!(old.point().is_some_and(|p| !p.is_settled() && !p.line().failed(p.value())));
    keep.complete(old.value());
    assert!(old.is_settled());
}
