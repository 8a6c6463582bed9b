//! Event cases: records, waits, elapsed time.

use crate::case::{Case, Need, Outcome, Stop, check, check_eq, expect_error};
use crate::env::Env;
use leasehold::ops::Pattern;
use leasehold::{EventFlags, View};
use std::time::Duration;

const TIME: Need = Need::Timestamps;

pub(crate) const CASES: &[Case] = &[
    Case::runtime(
        38,
        "a wait binds to the record before it",
        &[Need::Hold],
        binds_to_earlier_record,
    )
    .sanitizer(),
    Case::runtime(
        39,
        "an event never recorded is not waited for, and has no point",
        &[],
        never_recorded,
    ),
    Case::runtime(40, "elapsed time is not negative and grows with work", &[TIME], elapsed)
        .sanitizer(),
    Case::runtime(41, "elapsed time across streams", &[TIME], elapsed_across).sanitizer(),
    Case::runtime(
        42,
        "an event dropped before it completes still releases who waits",
        &[Need::Hold],
        dropped_event,
    )
    .sanitizer(),
    Case::runtime(43, "ten thousand events leave the pool small", &[], many_events),
    Case::runtime(
        157,
        "a thread that waits asleep for an event is woken",
        &[Need::Hold, Need::HostCalls],
        asleep,
    ),
    Case::runtime(
        159,
        "an event recorded again while a record of it is held back has the last one's time",
        &[Need::Hold, TIME],
        again,
    )
    .sanitizer(),
    Case::runtime(147, "elapsed time of an event without timing says so", &[], without_timing),
];

fn binds_to_earlier_record(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let (other, waiter) = (runtime.create_stream()?, runtime.create_stream()?);
    let event = runtime.create_event_with(EventFlags::DISABLE_TIMING)?;
    let buffer = runtime.upload(&[0u8; 4096])?;
    let hold = env.hold_runtime(runtime.stream())?;
    runtime.stream().fill(buffer.view(), 1u8)?;
    runtime.stream().record(&event)?;
    let first = event.timepoint()?;
    waiter.wait_event(&event)?;
    let bound = work_on(&runtime, &waiter)?;
    // Recorded again, on a free stream: the pending wait stays bound to the first record.
    other.record(&event)?;
    check!(event.timepoint()? != first, "the second record has the first one's point");
    check_eq!(event.serial(), 2, "the number of records");
    event.synchronize_timeout(env.timeout())?;
    env.linger(Duration::from_millis(10));
    waiter.query()?;
    check!(!bound.is_settled(), "the second record released a wait for the first");
    hold.release()?;
    env.reached(bound)?;
    check!(first.is_settled(), "the waiter ran before the first record");
    Ok(())
}

/// Two events have one delayed and one immediate record, in either order. Each event has the time
/// of its last record.
fn again(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let (other, waiter) = (runtime.create_stream()?, runtime.create_stream()?);
    let (start, event, last) =
        (runtime.create_event()?, runtime.create_event()?, runtime.create_event()?);
    let buffer = runtime.upload(&[0u8; 4096])?;
    other.record(&start)?;
    let hold = env.hold_runtime(runtime.stream())?;
    runtime.stream().fill(buffer.view(), 1u8)?;
    runtime.stream().record(&event)?;
    other.record(&last)?;
    let first = event.timepoint()?;
    waiter.wait_event(&event)?;
    let bound = work_on(&runtime, &waiter)?;
    other.record(&event)?;
    let time = event.elapsed_since(&start)?;
    check!(!first.is_settled(), "the second record released the first");
    // The reverse order: the delayed record is the last one.
    runtime.stream().record(&last)?;
    check!(!last.query()?, "the last record is held back, and over");
    env.linger(Duration::from_millis(10));
    check!(!bound.is_settled(), "the second record released a wait for the first");
    hold.release()?;
    env.reached(first)?;
    env.reached(bound)?;
    check_eq!(
        event.elapsed_since(&start)?,
        time,
        "the time of the second record, once the first is over"
    );
    check!(
        last.elapsed_since(&start)? >= time,
        "a record that was held back is earlier than one before it"
    );
    Ok(())
}

/// The timepoint of work that is submitted to the stream now.
fn work_on(
    runtime: &leasehold::Runtime,
    stream: &leasehold::Stream,
) -> Outcome<leasehold::Timepoint> {
    let small = stream.runtime().alloc(64)?;
    stream.fill(small.view(), 1u8)?;
    let marker = runtime.create_event_with(EventFlags::DISABLE_TIMING)?;
    stream.record(&marker)?;
    Ok(marker.timepoint()?)
}

fn asleep(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let flags = EventFlags { timing: false, blocking_sync: true };
    let (event, buffer) = (runtime.create_event_with(flags)?, runtime.upload(&[0u8; 4096])?);
    event.synchronize()?; // never recorded: there is nothing to wait for
    for round in 0..20 {
        let hold = env.hold_runtime(runtime.stream())?;
        runtime.stream().fill(buffer.view(), Pattern::U8(round))?;
        runtime.stream().record(&event)?;
        for timeout in [Duration::ZERO, Duration::from_millis(1)] {
            expect_error(event.synchronize_timeout(timeout), "Timeout", "waiting too briefly")?;
        }
        std::thread::scope(|s| -> Outcome {
            let waiter = s.spawn(|| event.synchronize_timeout(env.timeout()));
            std::thread::sleep(Duration::from_millis(1));
            hold.release()?;
            Ok(waiter.join().map_err(|_| Stop::Failed("the waiting thread panicked".into()))??)
        })?;
        check!(event.query()?, "an event that was waited for is not over");
    }
    // In a host call of the event's own stream the wait would wait for itself. A failure wakes the
    // sleeping thread.
    let hold = env.hold_runtime(runtime.stream())?;
    let late = runtime.create_event_with(flags)?;
    let to_wait_for = late.clone();
    runtime.stream().host_call_once("waits for itself", move || to_wait_for.synchronize())?;
    runtime.stream().record(&late)?;
    hold.release()?;
    check!(
        late.synchronize_timeout(env.timeout()).is_err(),
        "a call that waits for itself is fine"
    );
    check!(
        runtime.stream().failure().is_some(),
        "the stream of a call that waits for itself is sound"
    );
    Ok(())
}

fn never_recorded(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let event = runtime.create_event_with(EventFlags::DISABLE_TIMING)?;
    check!(event.query()?, "an event that was never recorded is outstanding");
    let before = runtime.stream().now();
    runtime.stream().wait_event(&event)?;
    event.synchronize()?;
    check_eq!(runtime.stream().now(), before, "the stream's end after a wait for nothing");
    expect_error(event.timepoint(), "InvalidState", "the point")?;
    runtime.stream().record(&event)?;
    event.synchronize_timeout(env.timeout())?;
    check_eq!(event.query()?, true, "the query after it was recorded and waited for");
    Ok(())
}

fn elapsed(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let buffer = runtime.alloc(8 << 20)?;
    let (start, end) = (runtime.create_event()?, runtime.create_event()?);
    runtime.stream().fill(buffer.view(), 0u8)?;
    let time = |fills: u32| -> Outcome<Duration> {
        runtime.stream().record(&start)?;
        for i in 0..fills {
            runtime.stream().fill(buffer.view(), Pattern::U8(i as u8))?;
        }
        runtime.stream().record(&end)?;
        Ok(end.elapsed_since(&start)?)
    };
    let best = |fills| {
        (0..5)
            .map(|_| time(fills))
            .collect::<Outcome<Vec<_>>>()
            .map(|t| t.into_iter().min().unwrap_or_default())
    };
    let (none, some, more) = (best(0)?, best(2)?, best(40)?);
    check!(none < more && some < more, "no work {none:?}, two fills {some:?}, forty {more:?}");
    check!(more > Duration::ZERO, "forty fills of 8 MiB took no time");
    let last = end.elapsed_since(&start)?;
    check!(last < Duration::from_secs(1000), "{last:?}");
    Ok(())
}

fn elapsed_across(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let other = runtime.create_stream()?;
    let (start, end) = (runtime.create_event()?, runtime.create_event()?);
    runtime.stream().record(&start)?;
    other.wait_event(&start)?;
    env.linger(Duration::from_millis(5));
    other.record(&end)?;
    let time = end.elapsed_since(&start)?;
    check!(time < env.timeout(), "{time:?} between two streams");
    Ok(())
}

fn dropped_event(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let waiter = runtime.create_stream()?;
    let buffer = runtime.upload(&[0u8; 4096])?;
    let hold = env.hold_runtime(runtime.stream())?;
    runtime.stream().fill(buffer.view(), 4u8)?;
    let event = runtime.create_event_with(EventFlags::DISABLE_TIMING)?;
    let handle = event.handle();
    runtime.stream().record(&event)?;
    waiter.wait_event(&event)?;
    drop(event);
    expect_error(
        runtime.event(handle).map(drop),
        "StaleHandle",
        "the handle of a destroyed event",
    )?;
    hold.release()?;
    let mut bytes = vec![0u8; 4096];
    waiter.download(&mut bytes, buffer.view())?;
    check!(bytes.iter().all(|&b| b == 4), "who waited for a dropped event ran too early");
    Ok(())
}

fn many_events(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    for _ in 0..env.rounds(10_000).max(2_000) {
        let event = runtime.create_event_with(EventFlags::DISABLE_TIMING)?;
        runtime.stream().record(&event)?;
    }
    runtime.stream().synchronize()?;
    let pools = runtime.pools();
    let Some((_, stats)) = pools.iter().find(|(name, _)| *name == "event") else {
        return Err(Stop::Failed("there is no pool of events in the report".into()));
    };
    check!(stats.peak <= 64, "one event at a time made a pool of {}", stats.peak);
    check_eq!(stats.live, 0, "events that live after all were dropped");
    Ok(())
}

fn without_timing(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let (a, b) = (
        runtime.create_event_with(EventFlags::DISABLE_TIMING)?,
        runtime.create_event_with(EventFlags::DISABLE_TIMING)?,
    );
    check!(!a.has_timing(), "an event made without timing has it");
    runtime.stream().record(&a)?;
    runtime.stream().record(&b)?;
    let e = expect_error(b.elapsed_since(&a), "InvalidState", "elapsed time without timing")?;
    check!(e.to_string().contains("timing"), "the error does not say why: {e}");
    Ok(())
}
