//! Peer cases with two devices: copies between them, faults of one, and calls that must not confuse
//! them.

use crate::case::{Case, Need, Outcome, Stop, check, check_eq, failed, skipped};
use crate::cases::streams::fill;
use crate::env::{Env, Other, direct};
use crate::factory::TestKernel;
use leasehold::backend::PoolStats;
use leasehold::backend::{Copy2d, Device, Dispatch, MemoryKind, Op, OpList, Plan, Stream};
use leasehold::ops::Pattern;
use leasehold::{Buffer, Context, Current, Error, Lease, Runtime, View};

pub(crate) const CASES: &[Case] = &[
    Case::hal(75, "copies between two devices arrive, both ways, on either's stream", &[], between)
        .replayed()
        .sanitizer(),
    Case::hal(76, "peer access can be asked for twice and from both sides", &[], access_twice),
    Case::hal(77, "two threads play ping-pong between two devices", &[], ping_pong),
    Case::hal(
        110,
        "a fault of one device leaves another usable",
        &[Need::Kernel(TestKernel::Trap)],
        bystander,
    )
    .fatal(),
    Case::hal(
        141,
        "what one device made is destroyed while another is current and on another thread",
        &[],
        elsewhere,
    ),
    Case::runtime(
        142,
        "memory of another device is copied or refused, and never mistaken",
        &[],
        mistaken,
    ),
    Case::runtime(
        158,
        "copies between two devices of a context arrive in order, eager and replayed",
        &[],
        carried,
    )
    .sanitizer(),
    Case::runtime(
        146,
        "nothing but a choice of device changes the current one",
        &[],
        current_stays,
    ),
];

/// A device, a stream of it, and memory.
struct Side {
    device: Lease<dyn Device>,
    stream: Lease<dyn Stream>,
    buffer: Lease<Buffer>,
}

const BYTES: u64 = 100_000;

fn side(env: &Env, device: &Lease<dyn Device>) -> Outcome<Side> {
    let stream = env.stream_of(device)?;
    let buffer = env.buffer_of(device, &stream, BYTES)?;
    Ok(Side { device: device.clone(), stream, buffer })
}

fn sides(env: &Env) -> Outcome<[Side; 2]> {
    Ok([side(env, env.device())?, side(env, &env.second()?)?])
}

fn carry(from: &Side, to: &Side) -> Op<'static> {
    let (src, dst) =
        ((from.buffer.addr(), from.buffer.native()), (to.buffer.addr(), to.buffer.native()));
    Op::Copy(Copy2d::linear(src, dst, BYTES))
}

fn between(env: &Env) -> Outcome {
    let s = sides(env)?;
    let pattern = |seed: u32| -> Vec<u8> {
        (0..BYTES as u32).map(|i| (i.wrapping_mul(seed) % 251) as u8).collect()
    };
    // Before and after the request for peer access. Without peer access the copies go through the
    // host.
    for round in 0..2u32 {
        for (from, to) in [(0, 1), (1, 0)] {
            for on in [0, 1] {
                let bytes = pattern(7 + round * 4 + from as u32 * 2 + on as u32);
                env.write(&s[from].stream, &s[from].buffer, &bytes)?;
                env.write(&s[to].stream, &s[to].buffer, &[0xee; BYTES as usize])?;
                // A replayed copy is a graph of the device under test.
                let value = match on {
                    0 => env.submit(&s[0].stream, &[carry(&s[from], &s[to])])?,
                    _ => direct(&s[1].stream, &[carry(&s[from], &s[to])])?,
                };
                env.wait(&s[on].stream, value)?;
                check!(
                    env.read(&s[to].stream, &s[to].buffer)? == bytes,
                    "round {round}: from device {from} to {to} on the stream of {on}: other bytes arrived"
                );
            }
        }
        s[0].device.peer_access(s[1].device.info().id)?;
        s[1].device.peer_access(s[0].device.info().id)?;
    }
    // In stream order with the work before and after.
    let value = direct(
        &s[0].stream,
        &[
            fill(&s[0].buffer, 1, 1),
            carry(&s[0], &s[1]),
            fill(&s[0].buffer, 2, 1),
            carry(&s[1], &s[0]),
        ],
    )?;
    env.wait(&s[0].stream, value)?;
    check!(
        env.read(&s[0].stream, &s[0].buffer)?.iter().all(|&b| b == 1),
        "there and back: out of order"
    );
    Ok(())
}

fn access_twice(env: &Env) -> Outcome {
    let s = sides(env)?;
    let (a, b) = (s[0].device.info().id, s[1].device.info().id);
    check!(s[0].device.peer_access(a)?, "{a} does not reach itself");
    let (there, back) = (s[0].device.peer_access(b)?, s[1].device.peer_access(a)?);
    let same = std::thread::scope(|scope| {
        let ask = || {
            (0..20).all(|_| {
                let (x, y) = (s[0].device.peer_access(b), s[1].device.peer_access(a));
                matches!((x, y), (Ok(x), Ok(y)) if (x, y) == (there, back))
            })
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().all(|t| t.join().unwrap_or(false))
    });
    check!(
        same,
        "peer access of {a} and {b} is {there} and {back} once and something else, or an error, later"
    );
    // Memory that was allocated before and after peer access was enabled.
    let late = [side(env, &s[0].device)?, side(env, &s[1].device)?];
    for (from, to) in [(&s[0], &late[1]), (&late[0], &s[1]), (&late[1], &late[0])] {
        env.write(&from.stream, &from.buffer, &[9; BYTES as usize])?;
        env.write(&to.stream, &to.buffer, &[0; BYTES as usize])?;
        let value = direct(&to.stream, &[carry(from, to)])?;
        env.wait(&to.stream, value)?;
        check!(
            env.read(&to.stream, &to.buffer)?.iter().all(|&x| x == 9),
            "a copy after peer access was asked for often"
        );
    }
    match s[0].device.peer_access(leasehold::DeviceId::new(a.backend, 4_000_000_000)) {
        Err(Error::NotFound(_)) => Ok(()),
        other => failed(format!("peer access to a device that does not exist is {other:?}")),
    }
}

fn ping_pong(env: &Env) -> Outcome {
    let second = env.second()?;
    let rounds = env.rounds(1_000) as u32;
    let play = |first: bool| -> Outcome {
        let (here, there) = if first { (env.device(), &second) } else { (&second, env.device()) };
        let (mine, theirs) = (side(env, here)?, side(env, there)?);
        for round in 0..rounds {
            let value = direct(
                &mine.stream,
                &[
                    fill(&mine.buffer, round % 251, 1),
                    carry(&mine, &theirs),
                    fill(&mine.buffer, 0xff, 1),
                ],
            )?;
            let over = mine.stream.timeline().at(value);
            mine.stream.flush()?;
            // The other device's stream copies the data from there and back.
            let value = direct(
                &theirs.stream,
                &[Op::Wait(over), carry_part(&theirs.buffer, 0, BYTES / 2), carry(&theirs, &mine)],
            )?;
            env.wait(&theirs.stream, value)?;
        }
        let last = (rounds - 1) % 251;
        let bytes = env.read(&mine.stream, &mine.buffer)?;
        check!(
            bytes.iter().all(|&b| u32::from(b) == last),
            "after {rounds} rounds: {} and not {last}",
            bytes[0]
        );
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads = [scope.spawn(|| play(true)), scope.spawn(|| play(false))];
        threads
            .into_iter()
            .try_for_each(|t| t.join().map_err(|_| Stop::Failed("a thread panicked".into()))?)
    })
}

/// A copy of the first half of a buffer to its second half.
fn carry_part(buffer: &Lease<Buffer>, from: u64, bytes: u64) -> Op<'static> {
    let at = |offset| (buffer.addr() + offset, buffer.native());
    Op::Copy(Copy2d::linear(at(from), at(from + bytes), bytes))
}

fn bystander(env: &Env) -> Outcome {
    let other = env.other()?;
    let there = side(env, &other.device)?;
    env.write(&there.stream, &there.buffer, &[1; BYTES as usize])?;
    let stream = env.stream()?;
    let kernel = env.kernel(TestKernel::Trap)?;
    let op = Dispatch {
        pipeline: &kernel,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        bindings: &[],
        params: &[],
    };
    let trapped = direct(&stream, &[Op::Dispatch(op)]).and_then(|v| env.try_wait(&stream, v));
    check!(trapped.is_err(), "a trap went unnoticed");
    let name = other.device.info().id;
    for round in 0..3 {
        direct(&there.stream, &[fill(&there.buffer, 5 + round, 1)])?;
        let bytes = env.read(&there.stream, &there.buffer)?;
        check!(
            bytes.iter().all(|&b| u32::from(b) == 5 + round),
            "after a fault of {} a fill on {name} is wrong",
            env.id()
        );
        let again = side(env, &other.device)?;
        direct(&again.stream, &[fill(&again.buffer, 3, 1)])?;
        check!(
            env.read(&again.stream, &again.buffer)?[0] == 3,
            "after a fault of {} a new stream on {name}",
            env.id()
        );
    }
    Ok(())
}

fn live(env: &Env) -> Vec<(&'static str, u64)> {
    let mut all = Vec::new();
    env.device().pools(&mut |name, s: PoolStats| all.push((name, s.live)));
    all
}

fn elsewhere(env: &Env) -> Outcome {
    // With a single device, the other thread has no current device.
    let other = match env.other() {
        Ok(other) => Some(other),
        Err(Stop::Skipped(_)) => None,
        Err(failed) => return Err(failed),
    };
    let caps = env.device().caps();
    // Each pool has been used once.
    let make = || -> Outcome<_> {
        let stream = env.stream()?;
        let buffers: Vec<_> = [64, 100_000, 8 << 20]
            .iter()
            .map(|&n| env.buffer(&stream, n))
            .collect::<Outcome<_>>()?;
        let pinned = env
            .device()
            .memory(MemoryKind::Pinned)?
            .alloc(leasehold::Layout::new(4096), crate::env::leasehold_on(&stream))?;
        let timestamp = caps.timestamps.then(|| env.device().timestamp()).transpose()?;
        let host_timeline = caps.host_timelines.then(|| env.host_timeline()).transpose()?;
        let graph = if caps.graphs {
            let mut list = OpList::new();
            list.push(&fill(&buffers[0], 1, 1));
            // SAFETY: the plan's pipelines, timepoints and graphs are this device's, and its memory
            // outlives the launches.
            Some(unsafe { env.device().instantiate(Plan::new(list)) }?)
        } else {
            None
        };
        let value = direct(&stream, &[fill(&buffers[1], 7, 1)])?;
        env.wait(&stream, value)?;
        Ok((stream, buffers, pinned, timestamp, host_timeline, graph))
    };
    drop(make()?);
    let before = live(env);
    env.device().make_current()?;
    for round in 0..4 {
        let things = make()?;
        let there = other.as_ref().map(|o| &o.device);
        std::thread::scope(|scope| {
            let end = move || -> leasehold::Result<()> {
                if let Some(there) = there {
                    there.make_current()?;
                }
                drop(things);
                Ok(())
            };
            scope
                .spawn(end)
                .join()
                .map_err(|_| Stop::Failed("a thread that drops leases panicked".into()))
        })??;
        env.until(
            &format!("round {round}: everything that another thread dropped is gone"),
            || {
                let now = live(env);
                before.iter().all(|(name, was)| now.iter().any(|(n, is)| n == name && is <= was))
            },
        )?;
        // On this thread, with the other device current.
        let things = make()?;
        if let Some(there) = there {
            there.make_current()?;
        }
        drop(things);
        let again = side(env, env.device())?;
        direct(&again.stream, &[fill(&again.buffer, round + 1, 1)])?;
        let bytes = env.read(&again.stream, &again.buffer)?;
        check!(
            bytes.iter().all(|&b| u32::from(b) == round + 1),
            "round {round}: the device after the drops"
        );
        env.device().make_current()?;
    }
    Ok(())
}

/// Runtimes on the device under test and on another; in one context where they are of one backend.
fn runtimes(env: &Env) -> Outcome<(Runtime, Runtime, Other)> {
    let other = env.other()?;
    let here = env.runtime()?;
    let id = other.device.info().id;
    let there = if other.same_backend {
        // The other device's own backend: the context of `here`.
        Context::with_backends(vec![env.backend().clone()]).runtime(id)?
    } else {
        Context::with_backends(vec![other.backend.clone()]).runtime(id)?
    };
    Ok((here, there, other))
}

fn mistaken(env: &Env) -> Outcome {
    let (here, there, other) = runtimes(env)?;
    let (a, b) = (here.upload(&[1u8; 4096])?, there.upload(&[2u8; 4096])?);
    // Each of these calls either succeeds or returns an error with the reason.
    let refused = |result: leasehold::Result<()>, what: &str| match result {
        Ok(()) => Ok(false),
        Err(Error::InvalidArgument(_) | Error::Unsupported(_)) => Ok(true),
        Err(e) => failed(format!("{what} is {}: {e}", e.kind())),
    };
    if !refused(here.stream().copy(a.view(), b.view()), "a copy from another device")? {
        check_eq!(here.to_vec::<u8>(&a)?, [2; 4096], "what was copied from another device");
    }
    let sent = [7u8; 4096];
    here.stream().upload_blocking(a.view(), &sent)?;
    if !refused(here.stream().copy(b.view(), a.view()), "a copy to another device")? {
        here.stream().synchronize()?;
        check_eq!(there.to_vec::<u8>(&b)?, [7; 4096], "what was copied to another device");
    } else {
        check_eq!(
            there.to_vec::<u8>(&b)?,
            [2; 4096],
            "the other device's memory after refused copies"
        );
    }
    // The memory is never mistaken for the device's own.
    let mut bytes = vec![0u8; 4096];
    if !refused(here.stream().fill(b.view(), 9u8), "a fill of another device's memory")? {
        here.stream().synchronize()?;
        check_eq!(there.to_vec::<u8>(&b)?, [9; 4096], "what was filled on another device");
    }
    if !refused(
        here.stream().download(&mut bytes, b.view()),
        "a download of another device's memory",
    )? {
        check_eq!(bytes, there.to_vec::<u8>(&b)?, "what was downloaded from another device");
    }
    // A copy through the host always works.
    let carried = here.to_vec::<u8>(&a)?;
    let back = there.upload(&carried)?;
    check_eq!(there.to_vec::<u8>(&back)?, [7; 4096], "what went over the host");
    waits_across(env, &here, &there, &other, [&a, &b])
}

/// A stream waits for the other device's stream, or returns `Unsupported`.
fn waits_across(
    env: &Env,
    here: &Runtime,
    there: &Runtime,
    other: &Other,
    [a, b]: [&Lease<Buffer>; 2],
) -> Outcome {
    if !there.raw_device().caps().host_timelines {
        return Ok(());
    }
    let host_timeline = there.create_host_timeline()?;
    let next = host_timeline.next();
    there.stream().wait(next)?;
    there.stream().fill(b.view(), 3u8)?;
    let point = there.stream().now();
    there.stream().flush()?;
    match here.stream().raw().wait(point) {
        Ok(()) => {
            here.stream().fill(a.view(), 4u8)?;
            let after = here.stream().now();
            here.stream().flush()?;
            env.linger(std::time::Duration::from_millis(5));
            check!(
                !here.stream().query()? && !after.is_settled(),
                "a stream did not wait for another device's"
            );
            host_timeline.signal(next.value())?;
            env.reached(after)?;
            check!(point.is_settled(), "a stream ran before the other device's that it waits for");
            check_eq!(here.to_vec::<u8>(a)?, [4; 4096], "work after a wait for another device");
        }
        Err(Error::Unsupported(_)) => {
            let promised = other.same_backend || env.device().caps().waits_for_any_timeline;
            check!(
                !promised,
                "a wait for another device is not supported, against the capabilities"
            );
            host_timeline.signal(next.value())?;
        }
        Err(e) => return failed(format!("a wait for another device is {}: {e}", e.kind())),
    }
    check_eq!(there.to_vec::<u8>(b)?, [3; 4096], "the other device's memory at the end");
    Ok(())
}

/// Runtimes on the device under test and on another, in one context.
fn neighbours(env: &Env) -> Outcome<([Runtime; 2], bool)> {
    let other = env.other()?;
    let mut backends = vec![env.backend().clone()];
    if !other.same_backend {
        backends.push(other.backend.clone());
    }
    let context = Context::with_backends(backends);
    Ok(([context.runtime(env.id())?, context.runtime(other.device.info().id)?], other.same_backend))
}

fn carried(env: &Env) -> Outcome {
    let ([here, there], same) = neighbours(env)?;
    let waits = |r: &Runtime| r.raw_device().caps().waits_for_any_timeline;
    if !(same || waits(&here) && waits(&there)) {
        let (x, y) = (here.alloc(64)?, there.alloc(64)?);
        return match here.stream().copy(y.view(), x.view()) {
            Err(Error::Unsupported(_)) => Ok(()),
            other => failed(format!("a copy to a device that cannot be waited for is {other:?}")),
        };
    }
    for (from, to) in [(&here, &there), (&there, &here)] {
        for on in [from, to] {
            carried_on(env, from, to, on)?;
        }
    }
    Ok(())
}

/// Copies from one device to the other on a stream of either, in several pieces, between work of
/// both devices before and after.
fn carried_on(env: &Env, from: &Runtime, to: &Runtime, on: &Runtime) -> Outcome {
    const LEN: u64 = 2_500_001;
    let what = format!("{} to {} on {}", from.device(), to.device(), on.device());
    let bytes: Vec<u8> = (0..LEN).map(|i| (i % 251) as u8).collect();
    let (x, y) = (from.upload(&bytes)?, to.alloc(LEN)?);
    to.stream().fill(y.view(), 1u8)?;
    let stream = on.create_stream()?;
    stream.copy(y.view(), x.view())?;
    // These come after the copy, because they write its source and read its destination.
    from.stream().fill(x.view(), 2u8)?;
    check!(to.to_vec::<u8>(&y)? == bytes, "{what}: other bytes arrived");
    // Copies a part up to the middle and no further.
    stream.copy(y.part(7..1007)?, x.part(500..1500)?)?;
    stream.synchronize_timeout(env.timeout())?;
    let got = to.to_vec::<u8>(&y)?;
    check!(
        got[7..1007].iter().all(|&b| b == 2),
        "{what}: a part did not arrive once the stream was over"
    );
    check!(got[..7] == bytes[..7] && got[1007..] == bytes[1007..], "{what}: beside the part");
    if !on.raw_device().caps().graphs {
        return Ok(());
    }
    let graph = on.record_graph(|r| r.stream().copy(y.view(), x.view()))?;
    for value in [3, 4] {
        from.stream().fill(x.view(), Pattern::U8(value))?;
        graph.launch_on(&stream)?;
        let got = to.to_vec::<u8>(&y)?;
        check!(
            got.iter().all(|&b| b == value),
            "{what}: a replay brought {} and not {value}",
            got[0]
        );
    }
    Ok(())
}

fn current_stays(env: &Env) -> Outcome {
    let (here, there, other) = runtimes(env)?;
    let guard = here.enter()?;
    let driver = || env.factory().current_device();
    let before = driver();
    let stays = |what: &str| -> Outcome {
        check!(Current::get()?.runtime().same(&here), "{what} switched the current context");
        check_eq!(driver(), before, "the driver's current device after {what}");
        Ok(())
    };
    let memory = there.alloc(1 << 20)?;
    stays("an allocation on another device")?;
    let pinned = match there.alloc_pinned(4096) {
        Ok(pinned) => Some(pinned),
        Err(Error::Unsupported(_)) => None,
        Err(e) => return Err(e.into()),
    };
    stays("an allocation of host memory")?;
    let values = there.upload(&[1u8; 4096])?;
    stays("an upload")?;
    check_eq!(there.to_vec::<u8>(&values)?, [1; 4096], "an upload to a device that is not current");
    stays("a download")?;
    let (stream, event) = (there.create_stream()?, there.create_event()?);
    stays("the creation of a stream and an event")?;
    stream.record(&event)?;
    event.synchronize_timeout(env.timeout())?;
    stays("a record and a wait")?;
    stream.fill(memory.view(), 1u8)?;
    there.synchronize()?;
    stays("a fill and a synchronisation")?;
    if there.raw_device().caps().graphs {
        let graph = there.record_graph(|rt| rt.stream().fill(memory.view(), 2u8))?;
        stays("a recording")?;
        graph.launch()?;
        there.stream().synchronize()?;
        stays("a launch of a graph")?;
    }
    if env.device().caps().host_timelines && there.raw_device().caps().host_timelines {
        drop(there.create_host_timeline()?);
        stays("a host timeline")?;
    }
    let _ = there.raw_device().memory_info()?;
    let _ = other.device.peer_access(other.device.info().id)?;
    stays("questions")?;
    drop((memory, pinned, values, stream, event));
    stays("the end of everything")?;
    drop(there);
    stays("the end of the other runtime")?;
    drop(guard);
    if Current::get().is_ok() {
        return skipped("the process has a default context");
    }
    Ok(())
}
