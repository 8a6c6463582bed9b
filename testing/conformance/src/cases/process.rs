//! Process cases: forks, idle threads, and progress with fewer threads than pending work.

use crate::case::{Case, Need, Outcome, check, check_eq, failed, skipped};
use crate::cases::streams::fill;
use crate::env::{Env, bind, direct};
use crate::factory::TestKernel;
use leasehold::Error;
use leasehold::backend::{Access, Dispatch, HostCall, Op, OpList, Plan};
use std::time::Duration;

const FILL: Need = Need::Kernel(TestKernel::Fill);

pub(crate) const CASES: &[Case] = &[
    Case::hal(10, "a forked child is told so and does not hang", &[], fork).alone(),
    Case::hal(
        118,
        "a host call that does work of its own does not dead-lock",
        &[Need::HostCalls, FILL],
        nested,
    )
    .one_worker(),
    Case::hal(
        119,
        "more waiting graphs than workers all complete",
        &[Need::HostTimelines, Need::Graphs, FILL],
        many_waiting,
    )
    .one_worker(),
    Case::hal(121, "an idle device uses no processor", &[], idle).alone(),
];

/// The child's result, as its exit status.
#[cfg(unix)]
mod found {
    pub(super) const WORKED: i32 = 0;
    pub(super) const TOLD: i32 = 10;
    pub(super) const UNCLEAR: i32 = 11;
}

#[cfg(unix)]
fn fork(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 64)?;
    direct(&stream, &[fill(&buffer, 1, 1)])?;
    env.drain(&stream)?;
    // The backend's threads sleep then.
    std::thread::sleep(Duration::from_millis(20));
    let timeout = env.timeout();
    // SAFETY: the child calls the backend, which is the subject of the case, and leaves by `_exit`,
    // so none of the parent's objects are destroyed in it. The alarm ends the child in any case.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the argument is a number of seconds.
        unsafe {
            libc::alarm(u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX).saturating_add(2))
        };
        let result = direct(&stream, &[fill(&buffer, 2, 1)])
            .and_then(|v| stream.wait_host(v, Some(timeout / 4)));
        let status = match result {
            Ok(()) => found::WORKED,
            Err(Error::Timeout(_)) => found::UNCLEAR,
            Err(e) if e.to_string().contains("fork") => found::TOLD,
            Err(_) => found::UNCLEAR,
        };
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(status) };
    }
    check!(child > 0, "the process cannot be forked");
    let mut status = 0;
    // SAFETY: the child was made above; the status outlives the call.
    let ended = env.until(
        "the child ends",
        || unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == child,
    );
    if ended.is_err() {
        // SAFETY: the child was made above, and no call has waited for it yet.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, &raw mut status, 0);
        }
        return failed("a call in the forked child hangs");
    }
    check!(
        libc::WIFEXITED(status),
        "the forked child was ended by signal {}",
        libc::WTERMSIG(status)
    );
    match libc::WEXITSTATUS(status) {
        // A device without state in the driver or in threads may continue.
        found::WORKED | found::TOLD => {}
        found::UNCLEAR => {
            return failed("the error in the forked child does not say that it is a fork");
        }
        other => return failed(format!("the forked child ended with status {other}")),
    }
    direct(&stream, &[fill(&buffer, 3, 1)])?;
    check_eq!(env.read(&stream, &buffer)?, [3; 64], "the parent's work after the fork");
    Ok(())
}

#[cfg(not(unix))]
fn fork(_: &Env) -> Outcome {
    skipped("this system does not fork")
}

fn nested(env: &Env) -> Outcome {
    let (outer, inner) = (env.stream()?, env.stream()?);
    let (kernel, buffer) = (env.kernel(TestKernel::Fill)?, env.buffer(&inner, 4096)?);
    for round in 0..5u32 {
        let (own, kernel) = (inner.clone(), kernel.clone());
        let (bindings, timeout) = ([bind(&buffer, Access::Write)], env.timeout());
        let call = HostCall::new("works", move || {
            let block = [TestKernel::BLOCK.min(kernel.block_threads), 1, 1];
            let params = round.to_le_bytes();
            let op = Dispatch {
                pipeline: &kernel,
                grid: [16, 1, 1],
                block,
                shared: 0,
                bindings: &bindings,
                params: &params,
            };
            let value = direct(&own, &[Op::Dispatch(op)])?;
            own.wait_host(value, Some(timeout))
        });
        let value = direct(&outer, &[Op::Host(&call)])?;
        env.wait(&outer, value)?;
        let values = env.read_u32(&inner, &buffer)?;
        check!(
            values.iter().all(|&v| v == round),
            "round {round}: the host call's own work left {}",
            values[0]
        );
    }
    Ok(())
}

fn many_waiting(env: &Env) -> Outcome {
    let n = u64::from(env.device().info().units.min(14)) + 2;
    let kernel = env.kernel(TestKernel::Fill)?;
    let (host_timeline, next) = env.host_timeline()?;
    let mut waiting = Vec::new();
    for i in 0..n {
        let stream = env.stream()?;
        let buffer = env.buffer(&stream, 256)?;
        env.write(&stream, &buffer, &[0; 256])?;
        let mut ops = OpList::new();
        let block = [TestKernel::BLOCK.min(kernel.block_threads), 1, 1];
        ops.push(&Op::Dispatch(Dispatch {
            pipeline: &kernel,
            grid: [1; 3],
            block,
            shared: 0,
            bindings: &[bind(&buffer, Access::Write)],
            params: &(i as u32 + 1).to_le_bytes(),
        }));
        // SAFETY: the plan's pipelines, timepoints and graphs are this device's, and its memory
        // outlives the launches.
        let graph = unsafe { env.device().instantiate(Plan::new(ops)) }?;
        // The first stream waits for the last signal.
        let value = direct(
            &stream,
            &[Op::Wait(host_timeline.timeline().at(next + n - 1 - i)), Op::Graph(&graph)],
        )?;
        stream.flush()?;
        waiting.push((stream, buffer, graph, value));
    }
    for i in (0..n).rev() {
        env.linger(Duration::from_millis(1));
        for (j, (stream, _, _, value)) in waiting.iter().enumerate().take(i as usize + 1) {
            check_eq!(stream.timeline().check(*value)?, false, "graph {j} before signal {}", n - i);
        }
        host_timeline.signal_host(next + n - 1 - i)?;
        let (stream, buffer, _, value) = &waiting[i as usize];
        env.wait(stream, *value)?;
        check_eq!(env.read_u32(stream, buffer)?, [i as u32 + 1; 64], "what graph {i} filled");
    }
    Ok(())
}

/// The processor time of this process so far.
#[cfg(unix)]
fn used() -> Outcome<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock writes to a variable that outlives the call.
    if unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) } != 0 {
        return skipped("this system does not say how much processor time a process has used");
    }
    Ok(Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0)))
}

#[cfg(not(unix))]
fn used() -> Outcome<Duration> {
    skipped("this system does not say how much processor time a process has used")
}

fn idle(env: &Env) -> Outcome {
    let streams: Vec<_> = (0..4).map(|_| env.stream()).collect::<Outcome<_>>()?;
    for stream in &streams {
        let buffer = env.buffer(stream, 1 << 20)?;
        direct(stream, &[fill(&buffer, 1, 1)])?;
        env.drain(stream)?;
    }
    // Threads may stay awake for a short time after their last work.
    std::thread::sleep(Duration::from_millis(300));
    let window = Duration::from_millis(250);
    let mut least = Duration::MAX;
    for _ in 0..4 {
        let before = used()?;
        std::thread::sleep(window);
        least = least.min(used()?.saturating_sub(before));
        if least * 100 < window {
            return Ok(());
        }
    }
    failed(format!("with nothing to do the process used {least:?} of {window:?}"))
}
