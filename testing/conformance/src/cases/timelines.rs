//! Timelines: host timelines, waits, and the propagation of failures.

use crate::case::{Case, Need, Outcome, Stop, check, check_eq, expect_error};
use crate::cases::streams::{copy, fill};
use crate::env::{Env, direct};
use crate::factory::TestKernel;
use leasehold::backend::Op;
use leasehold::backend::VALUE_LIMIT;
use leasehold::{Error, View};
use std::time::Duration;

const HOST_TIMELINES: &[Need] = &[Need::HostTimelines];
const ADD: &[Need] = &[Need::Kernel(TestKernel::Fill), Need::Kernel(TestKernel::Add), Need::Hold];

pub(crate) const CASES: &[Case] = &[
    Case::hal(
        23,
        "a fresh host timeline has its value and a signal signals it",
        HOST_TIMELINES,
        fresh_host_timeline,
    ),
    Case::hal(24, "a signal must raise the value", HOST_TIMELINES, monotone),
    Case::hal(25, "a reached value is waited for at once", HOST_TIMELINES, reached),
    Case::hal(26, "timeouts of zero and of 50 ms are kept", HOST_TIMELINES, timeouts),
    Case::hal(
        27,
        "a stream waits for a value that is signalled later",
        HOST_TIMELINES,
        wait_before_signal,
    ),
    Case::hal(28, "waits in the wrong order hold up nobody else", HOST_TIMELINES, wrong_order),
    Case::runtime(
        29,
        "waits for all, for any and for none of several values",
        HOST_TIMELINES,
        wait_lists,
    ),
    Case::hal(30, "eight threads that wait for one value all wake", HOST_TIMELINES, eight_waiters),
    Case::hal(31, "a wait for 5 ends when the value jumps from 3 to 7", HOST_TIMELINES, jump),
    Case::hal(32, "two threads play ping-pong on two host timelines", HOST_TIMELINES, ping_pong),
    Case::hal(33, "one signal releases many and one waits for many", HOST_TIMELINES, fan),
    Case::hal(34, "a diamond of streams computes in order", ADD, diamond).sanitizer(),
    Case::hal(
        35,
        "a failed host timeline gives its first cause to all",
        HOST_TIMELINES,
        host_timeline_fails,
    ),
    Case::hal(
        36,
        "work that waits for a failure does not run",
        HOST_TIMELINES,
        failed_wait_does_not_run,
    ),
    Case::hal(37, "a failure travels over two hops", HOST_TIMELINES, two_hops),
    Case::hal(44, "values end at 2^48", HOST_TIMELINES, limit),
    Case::runtime(
        251,
        "a host timeline that has ended fails its values, for eager waits, the host and graphs",
        HOST_TIMELINES,
        ended,
    ),
    Case::runtime(
        252,
        "work that reads what failed is refused, and its stream goes on",
        HOST_TIMELINES,
        refused_reads,
    ),
];

fn fresh_host_timeline(env: &Env) -> Outcome {
    let (host_timeline, next) = env.host_timeline()?;
    check!(
        host_timeline.timeline().completed() < next,
        "a fresh host timeline has reached {next} already"
    );
    check_eq!(host_timeline.timeline().check(next)?, false, "the query before the signal");
    host_timeline.signal_host(next)?;
    check_eq!(host_timeline.timeline().completed(), next, "the value after the signal");
    check_eq!(host_timeline.refresh()?, next, "the value asked of the host timeline");
    check_eq!(host_timeline.timeline().check(next)?, true, "the query after the signal");
    Ok(())
}

fn monotone(env: &Env) -> Outcome {
    let (host_timeline, next) = env.host_timeline()?;
    host_timeline.signal_host(next + 4)?;
    for lower in [next + 4, next + 3, next] {
        expect_error(
            host_timeline.signal_host(lower),
            "InvalidArgument",
            "a signal that does not raise the value",
        )?;
    }
    check_eq!(host_timeline.timeline().completed(), next + 4, "the value after refused signals");
    host_timeline.signal_host(next + 5)?;
    Ok(())
}

fn reached(env: &Env) -> Outcome {
    let (host_timeline, next) = env.host_timeline()?;
    host_timeline.signal_host(next)?;
    let took =
        env.best_of(3, || Ok((0..100).try_for_each(|_| host_timeline.wait_host(next, None))?))?;
    check!(took < Duration::from_secs(1), "100 waits for a reached value took {took:?}");
    let stream = env.stream()?;
    let value = direct(&stream, &[Op::Wait(host_timeline.timeline().at(next))])?;
    env.wait(&stream, value)
}

fn timeouts(env: &Env) -> Outcome {
    let (host_timeline, next) = env.host_timeline()?;
    let wait = |ms, what: &str| {
        expect_error(
            host_timeline.wait_host(next, Some(Duration::from_millis(ms))),
            "Timeout",
            what,
        )
    };
    let took = env.best_of(25, || wait(0, "a poll of a value that is not there").map(drop))?;
    check!(took < Duration::from_millis(40), "the fastest of 25 polls took {took:?}");
    // Never too short. The excess depends on the machine's load, but not in every try.
    let took = env.best_of(3, || wait(50, "a wait of 50 ms").map(drop))?;
    check!(took >= Duration::from_millis(49), "a wait of 50 ms took {took:?}");
    check!(took < env.timeout() / 2, "the fastest of three waits of 50 ms took {took:?}");
    host_timeline.signal_host(next)?;
    host_timeline.wait_host(next, Some(Duration::ZERO))?;
    Ok(())
}

fn wait_before_signal(env: &Env) -> Outcome {
    let (stream, reader) = (env.stream()?, env.stream()?);
    let buffer = env.buffer(&stream, 64)?;
    env.write(&stream, &buffer, &[1; 64])?;
    let (host_timeline, next) = env.host_timeline()?;
    let value =
        direct(&stream, &[Op::Wait(host_timeline.timeline().at(next)), fill(&buffer, 2, 1)])?;
    stream.flush()?;
    // Long enough for non-waiting work to become visible.
    env.linger(Duration::from_millis(20));
    check_eq!(
        stream.timeline().check(value)?,
        false,
        "work behind a host timeline that nobody signalled"
    );
    check_eq!(env.read(&reader, &buffer)?, [1; 64], "the buffer before the signal");
    host_timeline.signal_host(next)?;
    env.wait(&stream, value)?;
    check_eq!(env.read(&reader, &buffer)?, [2; 64], "the buffer after the signal");
    Ok(())
}

fn wrong_order(env: &Env) -> Outcome {
    let (a, b, c) = (env.stream()?, env.stream()?, env.stream()?);
    let (x, y) = (env.buffer(&a, 64)?, env.buffer(&b, 64)?);
    let (host_timeline, next) = env.host_timeline()?;
    let late = direct(&a, &[Op::Wait(host_timeline.timeline().at(next + 1)), fill(&x, 2, 1)])?;
    a.flush()?;
    let early = direct(&b, &[Op::Wait(host_timeline.timeline().at(next)), fill(&y, 1, 1)])?;
    b.flush()?;
    let z = env.buffer(&c, 64)?;
    direct(&c, &[fill(&z, 3, 1)])?;
    check_eq!(env.read(&c, &z)?, [3; 64], "unrelated work behind two waits");
    env.linger(Duration::from_millis(20));
    check_eq!(b.timeline().check(early)?, false, "the earlier value's work before its signal");
    host_timeline.signal_host(next)?;
    env.wait(&b, early)?;
    check_eq!(a.timeline().check(late)?, false, "the later value's work");
    host_timeline.signal_host(next + 1)?;
    env.wait(&a, late)
}

fn wait_lists(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let host_timelines: Vec<_> =
        (0..3).map(|_| runtime.create_host_timeline()).collect::<leasehold::Result<_>>()?;
    let points: Vec<_> = host_timelines.iter().map(leasehold::HostTimeline::next).collect();
    let (short, long) = (Duration::from_millis(10), env.timeout());
    runtime.wait_for_timeout([], short)?;
    expect_error(
        runtime.wait_for_any(&[], short),
        "InvalidArgument",
        "waiting for one of nothing",
    )?;
    expect_error(
        runtime.wait_for_any(&points, short),
        "Timeout",
        "waiting for one of three that are not there",
    )?;
    host_timelines[1].signal(points[1].value())?;
    check_eq!(runtime.wait_for_any(&points, long)?, 1, "which of three is there");
    expect_error(
        runtime.wait_for_timeout(&points, short),
        "Timeout",
        "waiting for three of which one is there",
    )?;
    host_timelines[0].signal(points[0].value())?;
    expect_error(
        runtime.wait_for_timeout(&points, short),
        "Timeout",
        "waiting for three of which two are there",
    )?;
    std::thread::scope(|scope| {
        let all = scope.spawn(|| runtime.wait_for_timeout(&points, long));
        let any = scope.spawn(|| runtime.wait_for_any(&points[2..], long));
        std::thread::sleep(Duration::from_millis(5));
        check!(
            !all.is_finished() && !any.is_finished(),
            "a wait ended without the value that it waits for"
        );
        host_timelines[2].signal(points[2].value())?;
        all.join().map_err(|_| Stop::Failed("a waiter panicked".into()))??;
        check_eq!(
            any.join().map_err(|_| Stop::Failed("a waiter panicked".into()))??,
            0,
            "which of one is there"
        );
        Ok::<_, Stop>(())
    })?;
    // A failed one determines the result for all, without a wait for the others.
    let (broken, silent) = (runtime.create_host_timeline()?, runtime.create_host_timeline()?);
    broken.fail(Error::state("the cause"));
    let list = [points[0], broken.next(), silent.next()];
    let e = expect_error(
        runtime.wait_for_timeout(list, long),
        "InvalidState",
        "waiting for all with a failure",
    )?;
    check!(e.to_string().contains("the cause"), "the waiter got {e}");
    let e = expect_error(
        runtime.wait_for_any(&list[1..], long),
        "InvalidState",
        "waiting for any with a failure",
    )?;
    check!(e.to_string().contains("the cause"), "the waiter got {e}");
    Ok(())
}

fn eight_waiters(env: &Env) -> Outcome {
    let (host_timeline, next) = env.host_timeline()?;
    std::thread::scope(|scope| {
        let wait = || host_timeline.wait_host(next, Some(env.timeout()));
        let waiters: Vec<_> = (0..8).map(|_| scope.spawn(wait)).collect();
        std::thread::sleep(Duration::from_millis(5));
        host_timeline.signal_host(next)?;
        for waiter in waiters {
            waiter.join().map_err(|_| Stop::Failed("a waiter panicked".into()))??;
        }
        Ok(())
    })
}

fn jump(env: &Env) -> Outcome {
    let (host_timeline, next) = env.host_timeline()?;
    let (three, five, seven) = (next + 3, next + 5, next + 7);
    host_timeline.signal_host(three)?;
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| host_timeline.wait_host(five, Some(env.timeout())));
        std::thread::sleep(Duration::from_millis(5));
        host_timeline.signal_host(seven)?;
        waiter.join().map_err(|_| Stop::Failed("the waiter panicked".into()))??;
        Ok(())
    })
}

fn ping_pong(env: &Env) -> Outcome {
    let ((ping, p), (pong, q)) = (env.host_timeline()?, env.host_timeline()?);
    let rounds = env.rounds(10_000);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            (0..rounds).try_for_each(|i| {
                ping.wait_host(p + i, Some(env.timeout()))?;
                pong.signal_host(q + i)
            })
        });
        for i in 0..rounds {
            ping.signal_host(p + i)?;
            pong.wait_host(q + i, Some(env.timeout()))?;
        }
        other.join().map_err(|_| Stop::Failed("the other thread panicked".into()))??;
        Ok(())
    })
}

fn fan(env: &Env) -> Outcome {
    const N: usize = 8;
    let (host_timeline, next) = env.host_timeline()?;
    let sink = env.stream()?;
    let mut streams = Vec::new();
    for i in 0..N {
        let stream = env.stream()?;
        let buffer = env.buffer(&stream, 64)?;
        let value = direct(
            &stream,
            &[Op::Wait(host_timeline.timeline().at(next)), fill(&buffer, i as u32 + 1, 1)],
        )?;
        streams.push((stream, buffer, value));
    }
    let all = env.buffer(&sink, 64)?;
    let mut ops: Vec<Op<'_>> =
        streams.iter().map(|(s, _, v)| Op::Wait(s.timeline().at(*v))).collect();
    ops.push(fill(&all, 99, 1));
    for (stream, _, _) in &streams {
        stream.flush()?;
    }
    let last = direct(&sink, &ops)?;
    sink.flush()?;
    // Long enough for non-waiting work to become visible.
    env.linger(Duration::from_millis(20));
    check_eq!(sink.timeline().check(last)?, false, "the fan-in before the signal");
    host_timeline.signal_host(next)?;
    env.wait(&sink, last)?;
    for (i, (stream, buffer, value)) in streams.iter().enumerate() {
        check_eq!(
            stream.timeline().check(*value)?,
            true,
            "stream {i} after the one that waits for it"
        );
        check_eq!(env.read(stream, buffer)?, [i as u8 + 1; 64], "stream {i}");
    }
    check_eq!(env.read(&sink, &all)?, [99; 64], "the fan-in");
    Ok(())
}

fn diamond(env: &Env) -> Outcome {
    let streams: Vec<_> = (0..4).map(|_| env.stream()).collect::<Outcome<_>>()?;
    let [a, b, c, d] = [&streams[0], &streams[1], &streams[2], &streams[3]];
    let n = 4096;
    let buffers: Vec<_> = (0..4).map(|_| env.buffer(a, n)).collect::<Outcome<_>>()?;
    let [x, y, z, sum] = [&buffers[0], &buffers[1], &buffers[2], &buffers[3]];
    let (set, add) = (env.kernel(TestKernel::Fill)?, env.kernel(TestKernel::Add)?);
    for round in 0..10u32 {
        let hold = env.hold_running(a)?;
        let first = a.timeline().at(env.kernel_fill(a, &set, x, round)?);
        let left = b.timeline().at(direct(b, &[Op::Wait(first), copy(x, y)])?);
        let right = c.timeline().at(direct(c, &[Op::Wait(first), copy(x, z)])?);
        direct(d, &[Op::Wait(left), Op::Wait(right)])?;
        let bindings = [
            crate::env::bind(y, leasehold::Access::Read),
            crate::env::bind(z, leasehold::Access::Read),
            crate::env::bind(sum, leasehold::Access::Write),
        ];
        let last = env.dispatch(d, &add, (n / 256) as u32, &bindings, &[])?;
        for s in &streams {
            s.flush()?;
        }
        hold.release_late(env)?;
        env.wait(d, last)?;
        check!(
            env.read_u32(d, sum)?.iter().all(|&v| v == 2 * round),
            "round {round}: the sum is not {}",
            2 * round
        );
    }
    Ok(())
}

fn host_timeline_fails(env: &Env) -> Outcome {
    let (host_timeline, next) = env.host_timeline()?;
    let outcome = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| host_timeline.wait_host(next, Some(env.timeout())));
        std::thread::sleep(Duration::from_millis(5));
        host_timeline.fail(Error::state("first cause"));
        host_timeline.fail(Error::state("second cause"));
        waiter.join().map_err(|_| Stop::Failed("the waiter panicked".into()))
    })?;
    let says = |e: &Error| e.to_string().contains("first cause");
    let e = expect_error(outcome, "InvalidState", "a wait for a host timeline that fails")?;
    check!(says(&e), "the waiter got {e}");
    let later = expect_error(
        host_timeline.wait_host(next + 9, Some(Duration::ZERO)),
        "InvalidState",
        "a later wait",
    )?;
    check!(says(&later), "a later waiter got {later}");
    let signal = expect_error(
        host_timeline.signal_host(next),
        "InvalidState",
        "a signal of a failed host timeline",
    )?;
    check!(says(&signal), "the signaller got {signal}");
    Ok(())
}

fn failed_wait_does_not_run(env: &Env) -> Outcome {
    let reader = env.stream()?;
    for fails_first in [true, false] {
        let stream = env.stream()?;
        let buffer = env.buffer(&reader, 64)?;
        env.write(&reader, &buffer, &[1; 64])?;
        let (host_timeline, next) = env.host_timeline()?;
        let on = host_timeline.timeline().at(next);
        if fails_first {
            host_timeline.fail(Error::state("the cause"));
        }
        // A backend may refuse the submission at once, or accept it and let it fail.
        let taken = direct(&stream, &[Op::Wait(on), fill(&buffer, 2, 1)]);
        if !fails_first {
            stream.flush()?;
            host_timeline.fail(Error::state("the cause"));
        }
        let result = taken.and_then(|value| env.try_wait(&stream, value));
        let e = expect_error(result, "InvalidState", "work that waits for a failed host timeline")?;
        check!(e.to_string().contains("the cause"), "the waiter got {e}");
        env.until("the poisoned stream is over", || stream.timeline().is_idle())?;
        check_eq!(env.read(&reader, &buffer)?, [1; 64], "what the failed work would have written");
        check!(direct(&stream, &[]).is_err(), "a poisoned stream took work");
    }
    Ok(())
}

fn two_hops(env: &Env) -> Outcome {
    let (a, b, bystander) = (env.stream()?, env.stream()?, env.stream()?);
    let buffer = env.buffer(&bystander, 64)?;
    env.write(&bystander, &buffer, &[1; 64])?;
    let (host_timeline, next) = env.host_timeline()?;
    let first = a.timeline().at(direct(&a, &[Op::Wait(host_timeline.timeline().at(next))])?);
    let second = direct(&b, &[Op::Wait(first), fill(&buffer, 2, 1)])?;
    a.flush()?;
    b.flush()?;
    host_timeline.fail(Error::state("the cause"));
    let e =
        expect_error(env.try_wait(&b, second), "InvalidState", "work two hops behind a failure")?;
    check!(e.to_string().contains("the cause"), "two hops away it is {e}");
    env.until("both streams are over", || a.timeline().is_idle() && b.timeline().is_idle())?;
    check_eq!(env.read(&bystander, &buffer)?, [1; 64], "what the failed work would have written");
    Ok(())
}

fn limit(env: &Env) -> Outcome {
    let (host_timeline, next) = env.host_timeline()?;
    host_timeline.signal_host(next)?;
    host_timeline.signal_host(1 << 31)?;
    host_timeline.signal_host((1 << 31) + 1)?;
    host_timeline.signal_host(VALUE_LIMIT - 1)?;
    check_eq!(host_timeline.timeline().completed(), VALUE_LIMIT - 1, "the greatest value");
    host_timeline.wait_host(VALUE_LIMIT - 1, Some(Duration::ZERO))?;
    expect_error(host_timeline.signal_host(VALUE_LIMIT), "InvalidState", "a value of 2^48")?;
    Ok(())
}

fn ended(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let (x, y) = (runtime.upload(&[1u32; 16])?, runtime.zeros::<u32>(16)?);
    runtime.stream().synchronize_timeout(env.timeout())?;
    let gate = runtime.create_host_timeline()?;
    let (signalled, point) = (gate.next(), gate.at(gate.value() + 2));
    gate.signal(signalled.value())?;
    let graphs = runtime.raw_device().caps().graphs;
    let graph = graphs
        .then(|| {
            runtime.record_graph(|r| {
                r.stream().wait(point)?;
                r.stream().fill(x.view(), 2u32)
            })
        })
        .transpose()?;
    drop(gate);
    let end = |stream: &leasehold::Stream| stream.synchronize_timeout(env.timeout());
    let stream = runtime.create_stream()?;
    let eager = stream.wait(point).and_then(|()| stream.fill(y.view(), 3u32));
    expect_error(eager.and_then(|()| end(&stream)), "InvalidState", "an eager wait")?;
    let host = runtime.wait_for_timeout(point, env.timeout());
    expect_error(host, "InvalidState", "a wait of the host")?;
    if let Some(graph) = &graph {
        let stream = runtime.create_stream()?;
        let launched = graph.launch_on(&stream).and_then(|_| end(&stream));
        expect_error(launched, "InvalidState", "a launch that waits")?;
    }
    // Those of others stand for none of its values.
    for _ in 0..64 {
        let other = runtime.create_host_timeline()?;
        other.signal(other.value() + 10)?;
    }
    check!(point.timeline().check(point.value()).is_err(), "another one's signal is taken for it");
    runtime.wait_for_timeout(signalled, env.timeout())?;
    check_eq!(runtime.to_vec(&x)?, [1; 16], "what nothing should have written");
    Ok(())
}

fn refused_reads(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let (bad, good) = (runtime.create_stream()?, runtime.create_stream()?);
    let (b, c) = (runtime.upload(&[1u32; 16])?, runtime.upload(&[2u32; 16])?);
    let graphs = runtime.raw_device().caps().graphs;
    let copied = |r: &leasehold::Runtime| r.stream().copy(c.view(), b.view());
    let graph = graphs.then(|| runtime.record_graph(copied)).transpose()?;
    let gate = runtime.create_host_timeline()?;
    bad.wait(gate.next())?;
    bad.fill(b.view(), 3u32)?;
    gate.fail(Error::NotFound("the producer".into()));
    expect_error(bad.synchronize_timeout(env.timeout()), "NotFound", "the stream that failed")?;
    env.until("the failed stream is over", || bad.now().has_passed())?;
    expect_error(good.copy(c.view(), b.view()), "NotFound", "a copy of what failed")?;
    expect_error(good.runtime().to_vec(&b), "NotFound", "a download of what failed")?;
    expect_error(good.fill(b.slice(..4).view(), 4u32), "NotFound", "a part of what failed")?;
    if let Some(graph) = &graph {
        expect_error(graph.launch_on(&good), "NotFound", "a launch that reads what failed")?;
    }
    check!(good.failure().is_none(), "the reader's stream has failed: {:?}", good.failure());
    good.fill(c.view(), 5u32)?;
    check_eq!(good.runtime().to_vec(&c)?, [5; 16], "later work of the reader's stream");
    good.fill(b.view(), 6u32)?;
    if let Some(graph) = &graph {
        graph.launch_on(&good)?;
        check_eq!(good.runtime().to_vec(&c)?, [6; 16], "a launch after an overwrite");
    }
    Ok(good.synchronize_timeout(env.timeout())?)
}
