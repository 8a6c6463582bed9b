//! Timeline cases: host timelines, waits, and the propagation of failures.

use crate::case::{Case, Need, Outcome, Stop, check, check_eq, expect_error};
use crate::cases::streams::{copy, fill};
use crate::env::{Env, direct};
use crate::factory::TestKernel;
use leasehold::Error;
use leasehold::backend::Op;
use leasehold::backend::VALUE_LIMIT;
use std::time::Duration;

const GATES: &[Need] = &[Need::Gates];
const ADD: &[Need] = &[Need::Kernel(TestKernel::Fill), Need::Kernel(TestKernel::Add), Need::Hold];

pub(crate) const CASES: &[Case] = &[
    Case::hal(23, "a fresh gate has its value and a signal raises it", GATES, fresh_gate),
    Case::hal(24, "a signal must raise the value", GATES, monotone),
    Case::hal(25, "a reached value is waited for at once", GATES, reached),
    Case::hal(26, "timeouts of zero and of 50 ms are kept", GATES, timeouts),
    Case::hal(27, "a stream waits for a value that is signalled later", GATES, wait_before_signal),
    Case::hal(28, "waits in the wrong order hold up nobody else", GATES, wrong_order),
    Case::runtime(29, "waits for all, for any and for none of several values", GATES, wait_lists),
    Case::hal(30, "eight threads that wait for one value all wake", GATES, eight_waiters),
    Case::hal(31, "a wait for 5 ends when the value jumps from 3 to 7", GATES, jump),
    Case::hal(32, "two threads play ping-pong on two gates", GATES, ping_pong),
    Case::hal(33, "one signal releases many and one waits for many", GATES, fan),
    Case::hal(34, "a diamond of streams computes in order", ADD, diamond).sanitizer(),
    Case::hal(35, "a failed gate gives its first cause to all", GATES, gate_fails),
    Case::hal(36, "work that waits for a failure does not run", GATES, failed_wait_does_not_run),
    Case::hal(37, "a failure travels over two hops", GATES, two_hops),
    Case::hal(44, "values end at 2^48", GATES, limit),
];

fn fresh_gate(env: &Env) -> Outcome {
    let (gate, next) = env.gate()?;
    check!(gate.line().completed() < next, "a fresh gate has reached {next} already");
    check_eq!(gate.line().check(next)?, false, "the query before the signal");
    gate.signal_host(next)?;
    check_eq!(gate.line().completed(), next, "the value after the signal");
    check_eq!(gate.refresh()?, next, "the value asked of the gate");
    check_eq!(gate.line().check(next)?, true, "the query after the signal");
    Ok(())
}

fn monotone(env: &Env) -> Outcome {
    let (gate, next) = env.gate()?;
    gate.signal_host(next + 4)?;
    for lower in [next + 4, next + 3, next] {
        expect_error(gate.signal_host(lower), "InvalidArgument", "a signal that does not raise the value")?;
    }
    check_eq!(gate.line().completed(), next + 4, "the value after refused signals");
    gate.signal_host(next + 5)?;
    Ok(())
}

fn reached(env: &Env) -> Outcome {
    let (gate, next) = env.gate()?;
    gate.signal_host(next)?;
    let took = env.best_of(3, || Ok((0..100).try_for_each(|_| gate.wait_host(next, None))?))?;
    check!(took < Duration::from_secs(1), "100 waits for a reached value took {took:?}");
    let stream = env.stream()?;
    let value = direct(&stream, &[Op::Wait(gate.line().at(next))])?;
    env.wait(&stream, value)
}

fn timeouts(env: &Env) -> Outcome {
    let (gate, next) = env.gate()?;
    let wait = |ms, what: &str| expect_error(gate.wait_host(next, Some(Duration::from_millis(ms))), "Timeout", what);
    let took = env.best_of(25, || wait(0, "a poll of a value that is not there").map(drop))?;
    check!(took < Duration::from_millis(40), "the fastest of 25 polls took {took:?}");
    // Never too short. The excess depends on the machine's load, but not in every try.
    let took = env.best_of(3, || wait(50, "a wait of 50 ms").map(drop))?;
    check!(took >= Duration::from_millis(49), "a wait of 50 ms took {took:?}");
    check!(took < env.patience() / 2, "the fastest of three waits of 50 ms took {took:?}");
    gate.signal_host(next)?;
    gate.wait_host(next, Some(Duration::ZERO))?;
    Ok(())
}

fn wait_before_signal(env: &Env) -> Outcome {
    let (stream, reader) = (env.stream()?, env.stream()?);
    let buffer = env.buffer(&stream, 64)?;
    env.write(&stream, &buffer, &[1; 64])?;
    let (gate, next) = env.gate()?;
    let value = direct(&stream, &[Op::Wait(gate.line().at(next)), fill(&buffer, 2, 1)])?;
    stream.flush()?;
    // Long enough for non-waiting work to become visible.
    env.linger(Duration::from_millis(20));
    check_eq!(stream.line().check(value)?, false, "work behind a gate that nobody signalled");
    check_eq!(env.read(&reader, &buffer)?, [1; 64], "the buffer before the signal");
    gate.signal_host(next)?;
    env.wait(&stream, value)?;
    check_eq!(env.read(&reader, &buffer)?, [2; 64], "the buffer after the signal");
    Ok(())
}

fn wrong_order(env: &Env) -> Outcome {
    let (a, b, c) = (env.stream()?, env.stream()?, env.stream()?);
    let (x, y) = (env.buffer(&a, 64)?, env.buffer(&b, 64)?);
    let (gate, next) = env.gate()?;
    let late = direct(&a, &[Op::Wait(gate.line().at(next + 1)), fill(&x, 2, 1)])?;
    a.flush()?;
    let early = direct(&b, &[Op::Wait(gate.line().at(next)), fill(&y, 1, 1)])?;
    b.flush()?;
    let z = env.buffer(&c, 64)?;
    direct(&c, &[fill(&z, 3, 1)])?;
    check_eq!(env.read(&c, &z)?, [3; 64], "unrelated work behind two waits");
    env.linger(Duration::from_millis(20));
    check_eq!(b.line().check(early)?, false, "the earlier value's work before its signal");
    gate.signal_host(next)?;
    env.wait(&b, early)?;
    check_eq!(a.line().check(late)?, false, "the later value's work");
    gate.signal_host(next + 1)?;
    env.wait(&a, late)
}

fn wait_lists(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let gates: Vec<_> = (0..3).map(|_| runtime.create_gate()).collect::<leasehold::Result<_>>()?;
    let points: Vec<_> = gates.iter().map(leasehold::Gate::next).collect();
    let (short, long) = (Some(Duration::from_millis(10)), Some(env.patience()));
    runtime.wait_for_all(&[], short)?;
    expect_error(runtime.wait_for_any(&[], short), "InvalidArgument", "waiting for one of nothing")?;
    expect_error(runtime.wait_for_any(&points, short), "Timeout", "waiting for one of three that are not there")?;
    gates[1].raise(points[1].value())?;
    check_eq!(runtime.wait_for_any(&points, long)?, 1, "which of three is there");
    expect_error(runtime.wait_for_all(&points, short), "Timeout", "waiting for three of which one is there")?;
    gates[0].raise(points[0].value())?;
    expect_error(runtime.wait_for_all(&points, short), "Timeout", "waiting for three of which two are there")?;
    std::thread::scope(|scope| {
        let all = scope.spawn(|| runtime.wait_for_all(&points, long));
        let any = scope.spawn(|| runtime.wait_for_any(&points[2..], long));
        std::thread::sleep(Duration::from_millis(5));
        check!(!all.is_finished() && !any.is_finished(), "a wait ended without the value that it waits for");
        gates[2].raise(points[2].value())?;
        all.join().map_err(|_| Stop::Failed("a waiter panicked".into()))??;
        check_eq!(any.join().map_err(|_| Stop::Failed("a waiter panicked".into()))??, 0, "which of one is there");
        Ok::<_, Stop>(())
    })?;
    // A failed one determines the result for all, without a wait for the others.
    let (broken, silent) = (runtime.create_gate()?, runtime.create_gate()?);
    broken.fail(Error::state("the cause"));
    let list = [points[0], broken.next(), silent.next()];
    let e = expect_error(runtime.wait_for_all(&list, long), "InvalidState", "waiting for all with a failure")?;
    check!(e.to_string().contains("the cause"), "the waiter got {e}");
    let e = expect_error(runtime.wait_for_any(&list[1..], long), "InvalidState", "waiting for any with a failure")?;
    check!(e.to_string().contains("the cause"), "the waiter got {e}");
    Ok(())
}

fn eight_waiters(env: &Env) -> Outcome {
    let (gate, next) = env.gate()?;
    std::thread::scope(|scope| {
        let wait = || gate.wait_host(next, Some(env.patience()));
        let waiters: Vec<_> = (0..8).map(|_| scope.spawn(wait)).collect();
        std::thread::sleep(Duration::from_millis(5));
        gate.signal_host(next)?;
        for waiter in waiters {
            waiter.join().map_err(|_| Stop::Failed("a waiter panicked".into()))??;
        }
        Ok(())
    })
}

fn jump(env: &Env) -> Outcome {
    let (gate, next) = env.gate()?;
    let (three, five, seven) = (next + 3, next + 5, next + 7);
    gate.signal_host(three)?;
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| gate.wait_host(five, Some(env.patience())));
        std::thread::sleep(Duration::from_millis(5));
        gate.signal_host(seven)?;
        waiter.join().map_err(|_| Stop::Failed("the waiter panicked".into()))??;
        Ok(())
    })
}

fn ping_pong(env: &Env) -> Outcome {
    let ((ping, p), (pong, q)) = (env.gate()?, env.gate()?);
    let rounds = env.rounds(10_000);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            (0..rounds).try_for_each(|i| {
                ping.wait_host(p + i, Some(env.patience()))?;
                pong.signal_host(q + i)
            })
        });
        for i in 0..rounds {
            ping.signal_host(p + i)?;
            pong.wait_host(q + i, Some(env.patience()))?;
        }
        other.join().map_err(|_| Stop::Failed("the other thread panicked".into()))??;
        Ok(())
    })
}

fn fan(env: &Env) -> Outcome {
    const N: usize = 8;
    let (gate, next) = env.gate()?;
    let sink = env.stream()?;
    let mut streams = Vec::new();
    for i in 0..N {
        let stream = env.stream()?;
        let buffer = env.buffer(&stream, 64)?;
        let value = direct(&stream, &[Op::Wait(gate.line().at(next)), fill(&buffer, i as u32 + 1, 1)])?;
        streams.push((stream, buffer, value));
    }
    let all = env.buffer(&sink, 64)?;
    let mut ops: Vec<Op<'_>> = streams.iter().map(|(s, _, v)| Op::Wait(s.line().at(*v))).collect();
    ops.push(fill(&all, 99, 1));
    for (stream, _, _) in &streams {
        stream.flush()?;
    }
    let last = direct(&sink, &ops)?;
    sink.flush()?;
    // Long enough for non-waiting work to become visible.
    env.linger(Duration::from_millis(20));
    check_eq!(sink.line().check(last)?, false, "the fan-in before the signal");
    gate.signal_host(next)?;
    env.wait(&sink, last)?;
    for (i, (stream, buffer, value)) in streams.iter().enumerate() {
        check_eq!(stream.line().check(*value)?, true, "stream {i} after the one that waits for it");
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
        let first = a.line().at(env.kernel_fill(a, &set, x, round)?);
        let left = b.line().at(direct(b, &[Op::Wait(first), copy(x, y)])?);
        let right = c.line().at(direct(c, &[Op::Wait(first), copy(x, z)])?);
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
        check!(env.read_u32(d, sum)?.iter().all(|&v| v == 2 * round), "round {round}: the sum is not {}", 2 * round);
    }
    Ok(())
}

fn gate_fails(env: &Env) -> Outcome {
    let (gate, next) = env.gate()?;
    let outcome = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| gate.wait_host(next, Some(env.patience())));
        std::thread::sleep(Duration::from_millis(5));
        gate.fail(Error::state("first cause"));
        gate.fail(Error::state("second cause"));
        waiter.join().map_err(|_| Stop::Failed("the waiter panicked".into()))
    })?;
    let says = |e: &Error| e.to_string().contains("first cause");
    let e = expect_error(outcome, "InvalidState", "a wait for a gate that fails")?;
    check!(says(&e), "the waiter got {e}");
    let later = expect_error(gate.wait_host(next + 9, Some(Duration::ZERO)), "InvalidState", "a later wait")?;
    check!(says(&later), "a later waiter got {later}");
    let signal = expect_error(gate.signal_host(next), "InvalidState", "a signal of a failed gate")?;
    check!(says(&signal), "the signaller got {signal}");
    Ok(())
}

fn failed_wait_does_not_run(env: &Env) -> Outcome {
    let reader = env.stream()?;
    for fails_first in [true, false] {
        let stream = env.stream()?;
        let buffer = env.buffer(&reader, 64)?;
        env.write(&reader, &buffer, &[1; 64])?;
        let (gate, next) = env.gate()?;
        let on = gate.line().at(next);
        if fails_first {
            gate.fail(Error::state("the cause"));
        }
        // A backend may refuse the submission at once, or accept it and let it fail.
        let taken = direct(&stream, &[Op::Wait(on), fill(&buffer, 2, 1)]);
        if !fails_first {
            stream.flush()?;
            gate.fail(Error::state("the cause"));
        }
        let result = taken.and_then(|value| env.try_wait(&stream, value));
        let e = expect_error(result, "InvalidState", "work that waits for a failed gate")?;
        check!(e.to_string().contains("the cause"), "the waiter got {e}");
        env.until("the poisoned stream is over", || stream.line().is_idle())?;
        check_eq!(env.read(&reader, &buffer)?, [1; 64], "what the failed work would have written");
        check!(direct(&stream, &[]).is_err(), "a poisoned stream took work");
    }
    Ok(())
}

fn two_hops(env: &Env) -> Outcome {
    let (a, b, bystander) = (env.stream()?, env.stream()?, env.stream()?);
    let buffer = env.buffer(&bystander, 64)?;
    env.write(&bystander, &buffer, &[1; 64])?;
    let (gate, next) = env.gate()?;
    let first = a.line().at(direct(&a, &[Op::Wait(gate.line().at(next))])?);
    let second = direct(&b, &[Op::Wait(first), fill(&buffer, 2, 1)])?;
    a.flush()?;
    b.flush()?;
    gate.fail(Error::state("the cause"));
    let e = expect_error(env.try_wait(&b, second), "InvalidState", "work two hops behind a failure")?;
    check!(e.to_string().contains("the cause"), "two hops away it is {e}");
    env.until("both streams are over", || a.line().is_idle() && b.line().is_idle())?;
    check_eq!(env.read(&bystander, &buffer)?, [1; 64], "what the failed work would have written");
    Ok(())
}

fn limit(env: &Env) -> Outcome {
    let (gate, next) = env.gate()?;
    gate.signal_host(next)?;
    gate.signal_host(1 << 31)?;
    gate.signal_host((1 << 31) + 1)?;
    gate.signal_host(VALUE_LIMIT - 1)?;
    check_eq!(gate.line().completed(), VALUE_LIMIT - 1, "the greatest value");
    gate.wait_host(VALUE_LIMIT - 1, Some(Duration::ZERO))?;
    expect_error(gate.signal_host(VALUE_LIMIT), "InvalidState", "a value of 2^48")?;
    Ok(())
}
