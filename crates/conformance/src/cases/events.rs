//! Events: records, waits, elapsed time.

use crate::case::{Case, Need, Outcome, Stop, check, check_eq, expect_error};
use crate::env::Env;
use leasehold::ops::{self, Pattern};
use leasehold::{EventFlags, View};
use std::time::Duration;

const TIME: Need = Need::Timestamps;

pub(crate) const CASES: &[Case] = &[
    Case::runtime(38, "a wait binds to the record before it", &[Need::Hold], binds_to_earlier_record).sanitizer(),
    Case::runtime(39, "an event never recorded is an invalid state everywhere", &[], never_recorded),
    Case::runtime(40, "elapsed time is not negative and grows with work", &[TIME], elapsed).sanitizer(),
    Case::runtime(41, "elapsed time across streams", &[TIME], elapsed_across).sanitizer(),
    Case::runtime(42, "an event dropped before it completes still releases who waits", &[Need::Hold], dropped_event)
        .sanitizer(),
    Case::runtime(43, "ten thousand events leave the pool small", &[], many_events),
    Case::runtime(157, "a thread that waits asleep for an event is woken", &[Need::Hold, Need::HostCalls], asleep),
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
    let event = runtime.create_event_with_flags(EventFlags::DISABLE_TIMING)?;
    let buffer = runtime.upload(&[0u8; 4096])?;
    let hold = env.hold_runtime(runtime.stream())?;
    ops::fill(runtime.stream(), buffer.view(), Pattern::U8(1))?;
    runtime.record_event(&event, None)?;
    let first = event.point()?;
    ops::wait_event(&waiter, &event)?;
    let bound = work_on(&runtime, &waiter)?;
    // Recorded again, on a stream that is free: the wait that is pending stays bound to the first record.
    runtime.record_event(&event, Some(&other))?;
    check!(event.point()? != first, "the second record has the first one's point");
    check_eq!(event.serial(), 2, "the number of records");
    runtime.synchronize_event_timeout(&event, Some(env.patience()))?;
    env.linger(Duration::from_millis(10));
    waiter.query()?;
    check!(!bound.is_settled(), "the second record released a wait for the first");
    hold.release()?;
    env.reached(bound)?;
    check!(first.is_settled(), "the waiter ran before the first record");
    Ok(())
}

/// Two events have a record that is held back and one that is not, in either order: each has the time of its last.
fn again(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let (other, waiter) = (runtime.create_stream()?, runtime.create_stream()?);
    let (start, event, last) = (runtime.create_event()?, runtime.create_event()?, runtime.create_event()?);
    let buffer = runtime.upload(&[0u8; 4096])?;
    runtime.record_event(&start, Some(&other))?;
    let hold = env.hold_runtime(runtime.stream())?;
    ops::fill(runtime.stream(), buffer.view(), Pattern::U8(1))?;
    runtime.record_event(&event, None)?;
    runtime.record_event(&last, Some(&other))?;
    let first = event.point()?;
    ops::wait_event(&waiter, &event)?;
    let bound = work_on(&runtime, &waiter)?;
    runtime.record_event(&event, Some(&other))?;
    let time = runtime.elapsed(&start, &event)?;
    check!(!first.is_settled(), "the second record released the first");
    // The other way round: what is held back comes last.
    runtime.record_event(&last, None)?;
    check!(!runtime.query_event(&last)?, "the last record is held back, and over");
    env.linger(Duration::from_millis(10));
    check!(!bound.is_settled(), "the second record released a wait for the first");
    hold.release()?;
    env.reached(first)?;
    env.reached(bound)?;
    check_eq!(runtime.elapsed(&start, &event)?, time, "the time of the second record, once the first is over");
    check!(runtime.elapsed(&start, &last)? >= time, "a record that was held back is earlier than one before it");
    Ok(())
}

/// The point of something that the stream is given now.
fn work_on(runtime: &leasehold::Runtime, stream: &leasehold::Stream) -> Outcome<leasehold::core::Point> {
    let small = stream.alloc(64)?;
    ops::fill(stream, small.view(), Pattern::U8(1))?;
    let marker = runtime.create_event_with_flags(EventFlags::DISABLE_TIMING)?;
    ops::signal(stream, &marker)?;
    Ok(marker.point()?)
}

fn asleep(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let flags = EventFlags { timing: false, blocking_sync: true };
    let (event, buffer) = (runtime.create_event_with_flags(flags)?, runtime.upload(&[0u8; 4096])?);
    check!(event.is_blocking_sync(), "the flag is lost");
    expect_error(runtime.synchronize_event(&event), "InvalidState", "waiting for what was never recorded")?;
    for round in 0..20 {
        let hold = env.hold_runtime(runtime.stream())?;
        ops::fill(runtime.stream(), buffer.view(), Pattern::U8(round))?;
        runtime.record_event(&event, None)?;
        for timeout in [Duration::ZERO, Duration::from_millis(1)] {
            expect_error(runtime.synchronize_event_timeout(&event, Some(timeout)), "Timeout", "waiting too briefly")?;
        }
        std::thread::scope(|s| -> Outcome {
            let waiter = s.spawn(|| runtime.synchronize_event_timeout(&event, Some(env.patience())));
            std::thread::sleep(Duration::from_millis(1));
            hold.release()?;
            Ok(waiter.join().map_err(|_| Stop::Failed("the waiting thread panicked".into()))??)
        })?;
        check!(runtime.query_event(&event)?, "an event that was waited for is not over");
    }
    // In a host call of the event's own stream it would wait for itself; and a failure wakes the sleeper.
    let hold = env.hold_runtime(runtime.stream())?;
    let (inner, late) = (runtime.clone(), runtime.create_event_with_flags(flags)?);
    let to_wait_for = late.clone();
    ops::host_call_once(runtime.stream(), "waits for itself", move || inner.synchronize_event(&to_wait_for))?;
    runtime.record_event(&late, None)?;
    hold.release()?;
    check!(
        runtime.synchronize_event_timeout(&late, Some(env.patience())).is_err(),
        "a call that waits for itself is fine"
    );
    check!(runtime.stream().failure().is_some(), "the stream of a call that waits for itself is sound");
    // A pooled event that is created again has its own flags.
    drop((event, late));
    check!(!runtime.create_event()?.is_blocking_sync(), "a flag of an event before");
    Ok(())
}

fn never_recorded(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let event = runtime.create_event_with_flags(EventFlags::DISABLE_TIMING)?;
    expect_error(runtime.query_event(&event), "InvalidState", "querying")?;
    expect_error(runtime.stream_wait_event(None, &event), "InvalidState", "waiting on a stream")?;
    expect_error(runtime.synchronize_event(&event), "InvalidState", "waiting on the host")?;
    expect_error(event.point(), "InvalidState", "the point")?;
    runtime.record_event(&event, None)?;
    runtime.synchronize_event_timeout(&event, Some(env.patience()))?;
    check_eq!(runtime.query_event(&event)?, true, "the query after it was recorded and waited for");
    Ok(())
}

fn elapsed(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let buffer = runtime.alloc(8 << 20)?;
    let (start, end) = (runtime.create_event()?, runtime.create_event()?);
    ops::fill(runtime.stream(), buffer.view(), Pattern::U8(0))?;
    let time = |fills: u32| -> Outcome<Duration> {
        runtime.record_event(&start, None)?;
        for i in 0..fills {
            ops::fill(runtime.stream(), buffer.view(), Pattern::U8(i as u8))?;
        }
        runtime.record_event(&end, None)?;
        Ok(runtime.elapsed(&start, &end)?)
    };
    let best = |fills| {
        (0..5).map(|_| time(fills)).collect::<Outcome<Vec<_>>>().map(|t| t.into_iter().min().unwrap_or_default())
    };
    let (none, some, more) = (best(0)?, best(2)?, best(40)?);
    check!(none < more && some < more, "no work {none:?}, two fills {some:?}, forty {more:?}");
    check!(more > Duration::ZERO, "forty fills of 8 MiB took no time");
    let ms = runtime.elapsed_time(&start, &end)?;
    check!((0.0..1e6).contains(&ms), "{ms} ms");
    Ok(())
}

fn elapsed_across(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let other = runtime.create_stream()?;
    let (start, end) = (runtime.create_event()?, runtime.create_event()?);
    runtime.record_event(&start, None)?;
    ops::wait_event(&other, &start)?;
    env.linger(Duration::from_millis(5));
    runtime.record_event(&end, Some(&other))?;
    let time = runtime.elapsed(&start, &end)?;
    check!(time < env.patience(), "{time:?} between two streams");
    Ok(())
}

fn dropped_event(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let waiter = runtime.create_stream()?;
    let buffer = runtime.upload(&[0u8; 4096])?;
    let hold = env.hold_runtime(runtime.stream())?;
    ops::fill(runtime.stream(), buffer.view(), Pattern::U8(4))?;
    let event = runtime.create_event_with_flags(EventFlags::DISABLE_TIMING)?;
    let handle = event.handle();
    runtime.record_event(&event, None)?;
    ops::wait_event(&waiter, &event)?;
    runtime.destroy_event(event);
    expect_error(runtime.event(handle).map(drop), "StaleHandle", "the handle of a destroyed event")?;
    hold.release()?;
    let mut bytes = vec![0u8; 4096];
    ops::download(&waiter, &mut bytes, buffer.view())?;
    check!(bytes.iter().all(|&b| b == 4), "who waited for a dropped event ran too early");
    Ok(())
}

fn many_events(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    for _ in 0..env.rounds(10_000).max(2_000) {
        let event = runtime.create_event_with_flags(EventFlags::DISABLE_TIMING)?;
        runtime.record_event(&event, None)?;
    }
    runtime.sync_stream()?;
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
        runtime.create_event_with_flags(EventFlags::DISABLE_TIMING)?,
        runtime.create_event_with_flags(EventFlags::DISABLE_TIMING)?,
    );
    check!(!a.has_timing(), "an event made without timing has it");
    runtime.record_event(&a, None)?;
    runtime.record_event(&b, None)?;
    let e = expect_error(runtime.elapsed_time(&a, &b), "InvalidState", "elapsed time without timing")?;
    check!(e.to_string().contains("timing"), "the error does not say why: {e}");
    Ok(())
}
