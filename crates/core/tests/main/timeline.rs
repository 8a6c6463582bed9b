//! Timelines, timepoints and timepoints.

use crate::support::kind;
use leasehold_core::*;
use std::time::{Duration, Instant};

fn fault() -> Error {
    Fault::new("dispatch x", "stream 1", 3, "told to").into()
}

#[test]
fn points_and_stamps_are_words() {
    let owner = TimelineOwner::take().unwrap();
    let timeline = owner.timeline();
    assert_eq!(size_of::<PackedTimepoint>(), 8);
    assert_eq!(size_of::<Option<TimelineId>>(), 4);
    let point = timeline.at(5);
    let timepoint = PackedTimepoint::from(point);
    assert_eq!(
        (timepoint.timeline_id(), timepoint.value(), timepoint.timepoint()),
        (timeline.id(), 5, Some(point))
    );
    assert_eq!(PackedTimepoint::from_bits(timepoint.to_bits()), timepoint);
    assert!(
        PackedTimepoint::NEVER.is_never()
            && PackedTimepoint::NEVER.is_settled()
            && PackedTimepoint::NEVER.timepoint().is_none()
    );
    assert!(std::ptr::eq(point.timeline(), timeline));
    assert_eq!(
        format!("{point:?} {:?}", PackedTimepoint::NEVER),
        format!("timeline{}@5 never", timeline.id().get())
    );
    assert_eq!(PackedTimepoint::from(timeline.at(VALUE_LIMIT - 1)).value(), VALUE_LIMIT - 1);
}

#[test]
fn a_line_of_the_hosts_has_one_signal_or_failure_at_a_time() {
    let host_timeline = HostTimelineOwner::take().unwrap();
    let start = host_timeline.timeline().submitted();
    host_timeline.signal(start + 3).unwrap();
    assert_eq!(
        (host_timeline.timeline().submitted(), host_timeline.timeline().completed()),
        (start + 3, start + 3)
    );
    assert_eq!(kind(host_timeline.signal(start + 3)), "InvalidArgument");
    assert_eq!(kind(host_timeline.signal(VALUE_LIMIT)), "InvalidState");
    // A device's counter is signalled in between; its failure leaves the value pending.
    let seen = host_timeline.signal_with(start + 4, || {
        assert_eq!(
            (host_timeline.timeline().submitted(), host_timeline.timeline().completed()),
            (start + 4, start + 3)
        );
        Err(fault())
    });
    assert_eq!((kind(seen), host_timeline.timeline().completed()), ("Fault", start + 3));
    host_timeline.signal(start + 5).unwrap();
    // Of many failures one is the first, and all waits get its cause.
    let first: Vec<bool> = std::thread::scope(|scope| {
        let fail = |i| host_timeline.fail(Error::state(format!("cause {i}")));
        let all: Vec<_> = (0..8).map(|i| scope.spawn(move || fail(i))).collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(first.iter().filter(|f| **f).count(), 1);
    let cause = format!("cause {}", first.iter().position(|f| *f).unwrap());
    assert!(host_timeline.signal(start + 6).unwrap_err().to_string().contains(&cause));
    assert!(
        host_timeline.timeline().is_settled(start + 5)
            && host_timeline.timeline().failed(start + 6)
    );
}

#[test]
fn values_grow_and_end_at_2_to_the_48() {
    let owner = TimelineOwner::take().unwrap();
    let timeline = owner.timeline();
    let start = timeline.submitted();
    assert_eq!(owner.advance().unwrap(), start + 1);
    assert_eq!(timeline.now(), timeline.at(start + 1));
    assert_eq!(kind(owner.advance_to(start + 1)), "InvalidArgument");
    assert_eq!(owner.advance_to(VALUE_LIMIT - 1).unwrap(), VALUE_LIMIT - 1);
    assert_eq!(kind(owner.advance()), "InvalidState");
    assert_eq!(kind(owner.advance_to(VALUE_LIMIT)), "InvalidState");
    assert_eq!(timeline.submitted(), VALUE_LIMIT - 1, "a refused value changes nothing");
    owner.complete(VALUE_LIMIT - 1);
    let id = timeline.id();
    drop(owner);
    let others: Vec<_> = (0..64).map(|_| TimelineOwner::take().unwrap()).collect();
    assert!(
        others.iter().all(|o| o.timeline().id() != id),
        "beyond the limit a timeline is retired"
    );
}

#[test]
fn completion_is_monotone() {
    let owner = TimelineOwner::take().unwrap();
    let timeline = owner.timeline();
    let a = owner.advance().unwrap();
    let b = owner.advance().unwrap();
    assert!(!timeline.is_idle() && !timeline.is_settled(a) && !timeline.at(a).is_settled());
    owner.complete(b);
    owner.complete(a);
    assert_eq!(timeline.completed(), b);
    assert!(
        timeline.is_idle()
            && timeline.is_settled(a)
            && PackedTimepoint::from(timeline.at(b)).is_settled()
    );
    assert!(timeline.check(b).unwrap() && !timeline.check(b + 1).unwrap());
}

#[test]
fn a_fault_keeps_the_first_value_and_its_cause() {
    let owner = TimelineOwner::take().unwrap();
    let timeline = owner.timeline();
    let [a, b, c] = [(); 3].map(|()| owner.advance().unwrap());
    owner.poison(b, fault());
    owner.poison(c, Error::DeviceLost { cause: "second".into() });
    assert!(timeline.failed(b) && timeline.failed(c) && !timeline.failed(a));
    let (first, cause) = timeline.failure().unwrap();
    assert_eq!((first, cause.kind()), (b, "Fault"));
    assert_eq!(kind(timeline.check(b)), "Fault", "the cause at once, before completion");
    assert!(!timeline.check(a).unwrap());
    // Values still advance, so that no thread hangs. A failed value never looks settled.
    owner.complete(c);
    assert!(timeline.is_settled(a) && !timeline.is_settled(b) && !timeline.at(c).is_settled());
    assert!(timeline.is_idle());
    assert_eq!(kind(timeline.wait(c, None)), "Fault");
    timeline.wait(a, None).unwrap();
    // An earlier failure that becomes known later moves the mark down.
    owner.poison(a, Error::DeviceLost { cause: "third".into() });
    assert_eq!(timeline.failure().map(|(v, e)| (v, e.kind())), Some((a, "Fault")));
    assert!(format!("{timeline:?}").contains("failed from"));
}

#[test]
fn a_wait_ends_with_completion_failure_or_its_time() {
    let owner = TimelineOwner::take().unwrap();
    let timeline = owner.timeline();
    let value = owner.advance().unwrap();
    let begin = Instant::now();
    assert_eq!(kind(timeline.wait(value, Some(Duration::ZERO))), "Timeout");
    assert!(begin.elapsed() < Duration::from_secs(5));
    let begin = Instant::now();
    let error = timeline.wait(value, Some(Duration::from_millis(20))).unwrap_err();
    assert!(begin.elapsed() >= Duration::from_millis(20));
    let text = error.to_string();
    let id = format!("{:?}", timeline.id());
    assert!(text.contains(&id) && text.contains("to 1 within 20ms; wait longer"), "{text}");
    std::thread::scope(|s| {
        let waiters: Vec<_> = [None, Some(Duration::from_secs(60)), Some(Duration::MAX)]
            .map(|timeout| s.spawn(move || timeline.wait(value, timeout)))
            .into();
        std::thread::sleep(Duration::from_millis(10));
        owner.complete(value);
        waiters.into_iter().for_each(|w| w.join().unwrap().unwrap());
    });
    let value = owner.advance().unwrap();
    std::thread::scope(|s| {
        let waiter = s.spawn(move || timeline.wait(value, None));
        std::thread::sleep(Duration::from_millis(10));
        owner.poison(value, fault());
        assert_eq!(kind(waiter.join().unwrap()), "Fault");
    });
    owner.complete(value);
}

#[test]
fn no_wake_up_is_lost() {
    let owner = TimelineOwner::take().unwrap();
    let timeline = owner.timeline();
    let first = timeline.submitted();
    const VALUES: u64 = 3000;
    owner.advance_to(first + VALUES).unwrap();
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(move || {
                for value in first + 1..=first + VALUES {
                    timeline.wait(value, Some(Duration::from_secs(60))).unwrap();
                }
            });
        }
        for value in first + 1..=first + VALUES {
            owner.complete(value);
            if value % 16 == 0 {
                std::thread::yield_now();
            }
        }
    });
}

#[test]
fn what_a_line_waited_for_it_knows() {
    let owners = (TimelineOwner::take().unwrap(), TimelineOwner::take().unwrap());
    let (a, b) = (owners.0.timeline(), owners.1.timeline());
    let (early, late) = (owners.1.advance().unwrap(), owners.1.advance().unwrap());
    assert!(a.knows(PackedTimepoint::NEVER) && a.knows(a.at(9).into()), "its own order is known");
    assert!(!a.knows(b.at(early).into()));
    owners.0.learn(b.at(late));
    assert!(
        a.knows(b.at(early).into())
            && a.knows(b.at(late).into())
            && !a.knows(b.at(late + 1).into())
    );
    owners.0.learn(b.at(early));
    assert!(a.knows(b.at(late).into()), "nothing is unlearnt");
    owners.1.complete(late);
}

#[test]
fn more_lines_than_places_only_forget() {
    let a = TimelineOwner::take().unwrap();
    let others: Vec<_> = (0..50).map(|_| TimelineOwner::take().unwrap()).collect();
    for other in &others {
        let timeline = other.timeline();
        let point = timeline.at(timeline.submitted() + 1);
        a.learn(point);
        assert!(a.timeline().knows(point.into()));
        assert!(!a.timeline().knows(timeline.at(point.value() + 1).into()));
    }
}

/// Owners of timelines. The test is independent of the others, because it checks only its own ids.
#[test]
fn a_line_is_lent_again_only_when_idle_whole_and_without_memory() {
    // The test keeps all owners that it takes, so that ids identify timelines.
    let mut kept = Vec::new();
    let find = |kept: &mut Vec<TimelineOwner>, id: TimelineId, tries: usize| {
        for _ in 0..tries {
            let owner = TimelineOwner::take().unwrap();
            if owner.timeline().id() == id {
                return Some(owner);
            }
            kept.push(owner);
        }
        None
    };
    // Idle: the timeline returns, and its counter continues, so that old timepoints stay settled.
    let owner = TimelineOwner::take().unwrap();
    let timeline = owner.timeline();
    let value = owner.advance().unwrap();
    owner.complete(value);
    let foreign = TimelineOwner::take().unwrap();
    let point = foreign.timeline().at(foreign.timeline().submitted() + 1);
    owner.learn(point);
    drop(owner);
    let owner = find(&mut kept, timeline.id(), 200).expect("an idle timeline is lent again");
    assert!(timeline.submitted() >= value && timeline.is_settled(value));
    // Regression: the next owner inherited the dependencies of the last one.
    assert!(!timeline.knows(point.into()));

    // Pending: the end of its work stays unknown. So the work fails and stays pending, and no other
    // owner gets the timeline.
    let value = owner.advance().unwrap();
    drop(owner);
    assert!(find(&mut kept, timeline.id(), 300).is_none(), "work is pending");
    assert_eq!(kind(timeline.wait(value, None)), "InvalidState");
    assert!(timeline.completed() < value && !timeline.at(value).is_settled());

    let failed = TimelineOwner::take().unwrap();
    let id = failed.timeline().id();
    failed.poison(1 << 40, fault());
    drop(failed);
    assert!(find(&mut kept, id, 100).is_none(), "there are others, which never failed");
}

#[test]
fn points_of_timelines_that_changed_hands_stay_valid() {
    let timepoints: Vec<_> = (0..300)
        .map(|_| {
            let owner = TimelineOwner::take().unwrap();
            let value = owner.advance().unwrap();
            owner.complete(value);
            PackedTimepoint::from(owner.timeline().now())
        })
        .collect();
    assert!(timepoints.iter().all(|s| s.is_settled()));
}

#[test]
fn a_sleeper_asks_the_publisher_first_and_a_given_up_line_has_none() {
    use leasehold_core::sync::Arc;
    use leasehold_core::sync::atomic::{AtomicU64, Ordering};
    let owner = Arc::new(TimelineOwner::take().unwrap());
    let timeline = owner.timeline();
    let asked = Arc::new(AtomicU64::new(0));
    let (seen, publishing) = (asked.clone(), std::sync::Arc::downgrade(&owner));
    owner.set_publisher(Some(Arc::new(move |value, _| {
        seen.fetch_add(1, Ordering::Relaxed);
        publishing.upgrade().expect("it is asked while it lives").complete(value);
        Ok(())
    })));
    let value = owner.advance().unwrap();
    timeline.wait(value, None).unwrap();
    timeline.wait(value, None).unwrap();
    assert_eq!(asked.load(Ordering::Relaxed), 1, "a value that is over is nobody's business");
    let pending = owner.advance().unwrap();
    timeline.run_call(pending, || {
        assert_eq!(
            kind(timeline.wait(pending, None)),
            "InvalidState",
            "the call would wait for its own end"
        );
        timeline.wait(value, None).unwrap();
    });
    assert_eq!(kind(timeline.wait_published(pending, Some(Duration::ZERO))), "Timeout");
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    owner.complete(pending);
    drop(owner);
    assert_eq!(Arc::strong_count(&asked), 1, "a timeline that is given up forgets its publisher");
}

#[test]
fn a_point_that_was_made_up_never_comes_and_does_nothing() {
    let owner = TimelineOwner::take().unwrap();
    let timeline = owner.timeline();
    let value = owner.advance().unwrap();
    for made_up in [
        timeline.at(u64::MAX),
        timeline.at(VALUE_LIMIT | 1),
        PackedTimepoint::from_bits(u64::MAX).timepoint().unwrap(),
    ] {
        assert!(!made_up.is_settled() && made_up.value() == VALUE_LIMIT - 1);
        assert_eq!(kind(made_up.timeline().wait(made_up.value(), Some(Duration::ZERO))), "Timeout");
    }
    // Timeline 0 does not exist; learning a timepoint of it says nothing about other timelines.
    let nobodys = PackedTimepoint::from_bits(7).timepoint().unwrap();
    assert!(!nobodys.is_settled() && nobodys.timeline().submitted() == 0);
    owner.complete(value);
}

#[test]
fn an_owner_fails_and_completes_only_its_own_values() {
    let owner = TimelineOwner::take().unwrap();
    let timeline = owner.timeline();
    let value = owner.advance().unwrap();
    owner.complete(value);
    drop(owner);
    let mut others = Vec::new();
    let next = loop {
        let next = TimelineOwner::take().unwrap();
        if next.timeline().id() == timeline.id() {
            break next;
        }
        others.push(next);
        assert!(others.len() < 1_000, "an idle timeline is lent again");
    };
    next.poison(0, fault());
    assert!(timeline.is_settled(value), "what the former owner completed did not fail");
    assert!(timeline.failed(value + 1));
}

/// A failure may be known before the failed work is over; a wait for its end takes at most one
/// second.
#[test]
fn a_failed_line_is_seen_off_for_so_long_as_it_takes() {
    let owner = TimelineOwner::take().expect("a timeline");
    let timeline = owner.timeline();
    let value = owner.advance().expect("a value");
    owner.poison(value, Error::state("broken"));
    let there = || Ok(timeline.completed());
    // No thread publishes: one second.
    let begin = Instant::now();
    timeline.drain(value, None, there);
    assert!(begin.elapsed() >= Duration::from_secs(1));
    // The wait also ends at a deadline, and after an error of the driver: one request.
    let asked = std::cell::Cell::new(0);
    let count = |answer: Result<u64>| {
        asked.set(asked.get() + 1);
        answer
    };
    timeline.drain(value, Some(Instant::now()), || count(there()));
    timeline.drain(value, None, || count(Err(Error::state("lost"))));
    assert_eq!(asked.get(), 2);
    // Another thread publishes.
    std::thread::scope(|s| {
        s.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            owner.complete(value);
        });
        timeline.drain(value, None, there);
        assert!(timeline.completed() >= value);
    });
}

/// Failed work is over before its dependencies. The work has passed after them, over any number of
/// timelines.
#[test]
fn what_failed_passes_after_all_that_it_was_to_wait_for() {
    let take = || TimelineOwner::take().expect("a timeline");
    let [first, second, third] = [take(), take(), take()];
    let at_work = first.timeline().at(first.advance().expect("a value"));
    second.learn(at_work);
    let cut_short = second.timeline().at(second.advance().expect("a value"));
    third.learn(cut_short);
    let last = third.timeline().at(third.advance().expect("a value"));
    for (owner, point) in [(&second, cut_short), (&third, last)] {
        owner.poison(point.value(), fault());
        owner.complete(point.value());
        assert!(!point.has_passed() && point.timeline().passed() == point.value() - 1);
        assert_eq!(point.timeline().obstacle(point.value()), Some(at_work));
    }
    // A timeline fails after it has waited for another one, which later waited for it: neither
    // waits for the other.
    second.learn(last);
    first.complete(at_work.value());
    assert!(
        cut_short.has_passed() && last.has_passed() && third.timeline().passed() == last.value()
    );
}

/// Dependencies that a timeline got after a value do not affect that value.
#[test]
fn what_failed_passes_whatever_its_line_came_to_wait_for_later() {
    let take = || TimelineOwner::take().expect("a timeline");
    let (owner, other) = (take(), take());
    let early = owner.advance().expect("a value");
    let [one, two] = [(); 2].map(|()| other.timeline().at(other.advance().expect("a value")));
    let middle = owner.advance().expect("a value");
    owner.learn(one);
    let late = owner.advance().expect("a value");
    owner.learn(two);
    owner.poison(early, fault());
    owner.complete(late);
    let timeline = owner.timeline();
    assert_eq!([early, middle, late].map(|v| timeline.has_passed(v)), [true, false, false]);
    other.complete(one.value());
    assert_eq!([early, middle, late].map(|v| timeline.has_passed(v)), [true, true, false]);
    other.complete(two.value());
    assert!(timeline.has_passed(late));
}

/// A timeline knows a limited number of timepoints, but keeps every dependency of failed work.
#[test]
fn what_a_line_came_to_know_no_more_still_keeps_a_failure_from_passing() {
    let owner = TimelineOwner::take().expect("a timeline");
    let others: Vec<TimelineOwner> =
        (0..100).map(|_| TimelineOwner::take().expect("a timeline")).collect();
    for other in &others {
        owner.learn(other.timeline().at(other.advance().expect("a value")));
    }
    let value = owner.advance().expect("a value");
    owner.poison(value, fault());
    owner.complete(value);
    for other in &others {
        assert!(!owner.timeline().has_passed(value));
        other.complete(other.timeline().submitted());
    }
    assert!(owner.timeline().has_passed(value));
}

/// An unreached value of a host timeline is no pending work: a failed waiter of it has passed.
#[test]
fn a_value_that_nobody_has_submitted_is_in_nobodys_way() {
    let (host_timeline, owner) = (
        HostTimelineOwner::take().expect("a timeline"),
        TimelineOwner::take().expect("a timeline"),
    );
    owner.learn(host_timeline.timeline().at(host_timeline.timeline().submitted() + 3));
    let value = owner.advance().expect("a value");
    owner.poison(value, fault());
    owner.complete(value);
    assert!(owner.timeline().has_passed(value));
}

#[test]
fn a_host_timeline_that_ends_fails_what_was_expected_of_it() {
    let host_timeline = HostTimelineOwner::take().unwrap();
    let timeline = host_timeline.timeline();
    let start = timeline.submitted();
    assert!(timeline.expect(start + 5) && timeline.expect(start + 2));
    host_timeline.signal(start + 3).unwrap();
    assert!(host_timeline.end(Error::state("it has ended")), "the first failure");
    assert!(!host_timeline.end(Error::state("again")), "one end");
    assert!(!timeline.expect(start + 6), "nobody signals it any more");
    drop(host_timeline);
    assert!(timeline.is_settled(start + 3));
    for value in [start + 4, start + 5] {
        assert!(timeline.check(value).unwrap_err().to_string().contains("it has ended"));
    }
    // Without values that somebody may wait for there is no failure, and another one gets it.
    let host_timeline = HostTimelineOwner::take().unwrap();
    let (timeline, value) = (host_timeline.timeline(), host_timeline.timeline().submitted() + 1);
    assert!(timeline.expect(value));
    host_timeline.signal(value).unwrap();
    drop(host_timeline);
    assert!(timeline.failure().is_none() && timeline.is_settled(value));
    // Its whole range is kept from it.
    let host_timeline = HostTimelineOwner::take().unwrap();
    let timeline = host_timeline.timeline();
    assert!(timeline.expect(u64::MAX));
    drop(host_timeline);
    assert!(timeline.check(VALUE_LIMIT - 1).is_err());
}
