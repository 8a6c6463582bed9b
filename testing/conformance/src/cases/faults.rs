//! Fault cases: kernels and host calls that fail, and the state that survives them.

use crate::case::{Case, Need, Outcome, check, check_eq, expect_error, failed};
use crate::cases::streams::fill;
use crate::env::{Env, bind, direct};
use crate::factory::{Injected, TestKernel};
use leasehold::backend::sync::atomic::{AtomicU32, Ordering};
use leasehold::backend::{Access, Dispatch, HostCall, Op, Stream};
use leasehold::{Error, Lease};
use std::sync::Arc;

const TRAP: Need = Need::Kernel(TestKernel::Trap);

pub(crate) const CASES: &[Case] = &[
    Case::hal(45, "a host call runs exactly once, in its turn", &[Need::HostCalls], host_call_once)
        .sanitizer(),
    Case::hal(
        46,
        "a host call that fails poisons; one that submits does not dead-lock",
        &[Need::HostCalls],
        host_call_fails,
    ),
    Case::hal(
        108,
        "the first fault's cause is everybody's",
        &[Need::Kernel(TestKernel::OutOfBounds)],
        out_of_bounds,
    )
    .fatal(),
    Case::hal(109, "everything drops after a fault", &[TRAP], drops_after_fault).fatal(),
    Case::hal(111, "a call that the driver refuses poisons or was never made", &[], refused_calls)
        .faulty(),
    Case::hal(112, "a wait for a poisoned stream gives the cause", &[TRAP], wait_poisoned).fatal(),
    Case::hal(113, "a fault names operation, stream and submission", &[TRAP], fault_names).fatal(),
    Case::hal(
        114,
        "a host call that panics poisons and nothing more",
        &[Need::HostCalls],
        host_panic,
    ),
    Case::hal(
        117,
        "a kernel that fails poisons its stream and no other",
        &[TRAP, Need::Kernel(TestKernel::Fill)],
        kernel_fails,
    )
    .fatal(),
];

fn host_call_once(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let order = Arc::new(AtomicU32::new(0));
    let calls: Vec<HostCall> = (0..10)
        .map(|i| {
            let order = order.clone();
            HostCall::new("in turn", move || {
                let was = order.fetch_add(1, Ordering::AcqRel);
                if was == i {
                    Ok(())
                } else {
                    Err(Error::state(format!("call {i} came as number {was}")))
                }
            })
        })
        .collect();
    let mut last = 0;
    for call in &calls {
        last = direct(&stream, &[Op::Host(call)])?;
    }
    env.wait(&stream, last)?;
    check_eq!(order.load(Ordering::Acquire), 10, "calls that ran");
    drop(stream);
    check_eq!(order.load(Ordering::Acquire), 10, "calls that ran in all");
    Ok(())
}

fn host_call_fails(env: &Env) -> Outcome {
    let (stream, other) = (env.stream()?, env.stream()?);
    let buffer = env.buffer(&other, 64)?;
    env.write(&other, &buffer, &[1; 64])?;
    let call = HostCall::new("fails", || Err(Error::state("the call's own reason")));
    let submitted = direct(&stream, &[Op::Host(&call), fill(&buffer, 2, 1)]);
    let result = submitted.and_then(|v| env.try_wait(&stream, v));
    let Err(e) = result else {
        return Err(crate::case::Stop::Failed("a failed host call went unnoticed".into()));
    };
    check!(e.to_string().contains("the call's own reason"), "the cause is lost: {e}");
    env.until("the poisoned stream is over", || stream.timeline().is_idle())?;
    check_eq!(env.read(&other, &buffer)?, [1; 64], "what came after the failed call");
    // A cause outside the call is no fault of it.
    let lost = env.stream()?;
    let call = HostCall::new("loses a rank", || {
        Err(Error::PeerLost { rank: 3, why: "the call's own reason".into() })
    });
    let result = direct(&lost, &[Op::Host(&call)]).and_then(|v| env.try_wait(&lost, v));
    check!(matches!(result, Err(Error::PeerLost { rank: 3, .. })), "not the cause: {result:?}");
    // A call that submits to its own stream.
    let again = env.stream()?;
    let own = again.clone();
    let target = env.buffer(&again, 64)?;
    let (addr, native) = (target.addr(), target.native());
    let call = HostCall::new("submits", move || {
        let fill = leasehold::backend::Fill { dst: addr, native, bytes: 64, pattern: 5, width: 1 };
        direct(&own, &[Op::Fill(fill)]).map(drop)
    });
    let first = direct(&again, &[Op::Host(&call)])?;
    env.wait(&again, first)?;
    env.drain(&again)?;
    check_eq!(env.read(&again, &target)?, [5; 64], "what the host call submitted");
    // The call holds a lease on its own stream.
    drop(call);
    Ok(())
}

fn trap(env: &Env, stream: &Lease<dyn Stream>) -> Outcome<(u64, Error)> {
    let kernel = env.kernel(TestKernel::Trap)?;
    let op = Dispatch {
        pipeline: &kernel,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        bindings: &[],
        params: &[],
    };
    let value = direct(stream, &[Op::Dispatch(op)])?;
    match env.try_wait(stream, value) {
        Err(e @ (Error::Fault(_) | Error::DeviceLost { .. })) => Ok((value, e)),
        Err(e) => Err(crate::case::Stop::Failed(format!("a trap is {}: {e}", e.kind()))),
        Ok(()) => Err(crate::case::Stop::Failed("a trap went unnoticed".into())),
    }
}

fn out_of_bounds(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 64)?;
    let kernel = env.kernel(TestKernel::OutOfBounds)?;
    let op = Dispatch {
        pipeline: &kernel,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        bindings: &[bind(&buffer, Access::Write)],
        params: &[],
    };
    let value = direct(&stream, &[Op::Dispatch(op)])?;
    let Err(first) = env.try_wait(&stream, value) else {
        return Err(crate::case::Stop::Failed("a write out of bounds went unnoticed".into()));
    };
    for _ in 0..5 {
        let Err(later) = direct(&stream, &[]).and_then(|v| env.try_wait(&stream, v)) else {
            return Err(crate::case::Stop::Failed("a poisoned stream works".into()));
        };
        check_eq!(later.to_string(), first.to_string(), "a later error");
    }
    env.until("the poisoned stream is over", || stream.timeline().is_idle())
}

fn drops_after_fault(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffers: Vec<_> = (0..4).map(|_| env.buffer(&stream, 1 << 20)).collect::<Outcome<_>>()?;
    let (value, cause) = trap(env, &stream)?;
    for buffer in &buffers {
        // SAFETY: the timepoint is that of a submission to this stream that uses the buffer, made
        // in order.
        unsafe { buffer.mark_write(stream.timeline().at(value)) };
    }
    env.until("the poisoned stream is over", || stream.timeline().is_idle())?;
    drop(buffers);
    drop(stream);
    let again = || -> Outcome {
        let again = env.stream()?;
        let buffer = env.buffer(&again, 1 << 20)?;
        direct(&again, &[fill(&buffer, 1, 1)])?;
        env.drain(&again)
    };
    if let Error::DeviceLost { .. } = cause {
        return lost(env, &cause);
    }
    again()
}

/// A lost device stays lost: every call that asks the driver gets the first cause.
fn lost(env: &Env, cause: &Error) -> Outcome {
    for _ in 0..3 {
        let used = || -> leasehold::Result<()> {
            let stream = env.device().stream(&leasehold::backend::StreamDesc::default())?;
            let value = direct(&stream, &[])?;
            stream.wait_host(value, Some(env.timeout()))
        };
        let later = expect_error(used(), "DeviceLost", "work on a lost device")?;
        check_eq!(later.to_string(), cause.to_string(), "a later error of a lost device");
    }
    Ok(())
}

fn refused_calls(env: &Env) -> Outcome {
    let faults = env.faults()?.clone();
    let (stream, waiter, reader) = (env.stream()?, env.stream()?, env.stream()?);
    let (x, y) = (env.buffer(&stream, 4096)?, env.buffer(&stream, 4096)?);
    for buffer in [&x, &y] {
        env.write(&reader, buffer, &[1; 4096])?;
    }
    let mut tried = false;
    if faults.next(Injected::Submission) {
        tried = true;
        let before = stream.timeline().submitted();
        let taken = direct(&stream, &[fill(&x, 2, 1)]);
        let point = taken.as_ref().ok().map(|v| stream.timeline().at(*v));
        let Err(cause) = taken.and_then(|v| env.try_wait(&stream, v)) else {
            return failed("a call that the driver refused went unnoticed");
        };
        if stream.timeline().failure().is_none() {
            // Refused as a whole, as if the call had not been made.
            check_eq!(stream.timeline().submitted(), before, "values after a refused submission");
            check_eq!(env.read(&reader, &x)?, [1; 4096], "the buffer after a refused submission");
            direct(&stream, &[fill(&x, 3, 1)])?;
            check_eq!(env.read(&stream, &x)?, [3; 4096], "the stream after a refused submission");
        } else {
            // Poisoned: this submission, later ones, and waiting streams.
            let later = direct(&stream, &[]).and_then(|v| env.try_wait(&stream, v));
            check!(
                later.is_err_and(|e| e.to_string() == cause.to_string()),
                "later work has not the cause {cause}"
            );
            if let Some(point) = point {
                let waits = direct(&waiter, &[Op::Wait(point), fill(&y, 2, 1)]);
                let waits = waits.and_then(|v| env.try_wait(&waiter, v));
                check!(
                    waits.is_err_and(|e| e.to_string() == cause.to_string()),
                    "the waiter has not the cause {cause}"
                );
            }
            env.until("the poisoned streams are over", || {
                stream.timeline().is_idle() && waiter.timeline().is_idle()
            })?;
            check_eq!(
                env.read(&reader, &x)?,
                [1; 4096],
                "what the refused call would have written"
            );
            check_eq!(env.read(&reader, &y)?, [1; 4096], "what waited for the refused call");
        }
    }
    if faults.next(Injected::OutOfMemory) {
        tried = true;
        let again = env.stream()?;
        match env
            .device()
            .memory(leasehold::MemoryKind::Device)?
            .alloc(leasehold::Layout::new(64 << 20), crate::env::leasehold_on(&again))
        {
            // The allocator may have recovered by itself.
            Ok(_) | Err(Error::OutOfMemory(_)) => {}
            Err(e) => {
                return failed(format!("memory that the driver has not got is {}: {e}", e.kind()));
            }
        }
        let buffer = env.buffer(&again, 64 << 20)?;
        direct(&again, &[fill(&buffer, 4, 1)])?;
        env.drain(&again)?;
    }
    if faults.next(Injected::DeviceLost) {
        tried = true;
        let again = env.stream()?;
        let taken = direct(&again, &[fill(&x, 5, 1)]).and_then(|v| env.try_wait(&again, v));
        let cause = expect_error(taken, "DeviceLost", "work on a device that is lost")?;
        lost(env, &cause)?;
        let old = direct(&reader, &[fill(&y, 5, 1)]).and_then(|v| env.try_wait(&reader, v));
        expect_error(old, "DeviceLost", "work of a stream that was there before")?;
    }
    if tried {
        Ok(())
    } else {
        crate::case::skipped("the driver cannot be made to fail in any of these ways")
    }
}

fn wait_poisoned(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let (value, cause) = trap(env, &stream)?;
    for at in [value, value + 1, value + 1000] {
        let start = std::time::Instant::now();
        let Err(e) = env.try_wait(&stream, at) else {
            return Err(crate::case::Stop::Failed(format!(
                "value {at} of a stream that failed at {value} is fine"
            )));
        };
        check_eq!(e.to_string(), cause.to_string(), "the error for value {at}");
        check!(
            start.elapsed() < env.timeout() / 2,
            "the error for value {at} took {:?}",
            start.elapsed()
        );
    }
    check!(
        stream.timeline().check(value).is_err(),
        "the timeline of a poisoned stream says nothing"
    );
    check!(!stream.timeline().at(value).is_settled(), "a failed value is settled");
    Ok(())
}

fn fault_names(env: &Env) -> Outcome {
    let stream = env.stream()?;
    direct(&stream, &[])?;
    let (value, cause) = trap(env, &stream)?;
    let text = cause.to_string();
    check!(text.contains(TestKernel::Trap.name()), "the operation is not in: {text}");
    check!(text.contains(&format!("{:?}", stream.timeline().id())), "the stream is not in: {text}");
    check!(text.contains(&value.to_string()), "the submission {value} is not in: {text}");
    Ok(())
}

/// A text that panics or fails when it is written.
#[derive(Clone, Copy, PartialEq)]
struct Hostile {
    fails: bool,
}

impl Hostile {
    fn show(self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("to be caught")?;
        if self.fails { Err(std::fmt::Error) } else { panic!("a text of the case's") }
    }
}

/// [`Hostile`] as an error.
struct HostileError(Hostile);

impl std::fmt::Display for HostileError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.show(f)
    }
}

impl std::fmt::Debug for HostileError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.show(f)
    }
}

impl std::error::Error for HostileError {}

impl Drop for HostileError {
    fn drop(&mut self) {
        std::panic::panic_any(Payload);
    }
}

/// A payload of a panic whose drop throws another one, whose drop panics too.
struct Payload;

struct SecondPayload;

impl Drop for Payload {
    fn drop(&mut self) {
        std::panic::panic_any(SecondPayload);
    }
}

impl Drop for SecondPayload {
    fn drop(&mut self) {
        panic!("a drop of the case's");
    }
}

fn host_panic(env: &Env) -> Outcome {
    let (stream, other) = (env.stream()?, env.stream()?);
    let call = HostCall::new("panics", || panic!("a panic of the case's, to be caught"));
    let result = direct(&stream, &[Op::Host(&call)]).and_then(|v| env.try_wait(&stream, v));
    let Err(e) = result else {
        return Err(crate::case::Stop::Failed("a panic went unnoticed".into()));
    };
    check!(e.to_string().contains("to be caught"), "the panic's message is lost: {e}");
    check!(direct(&stream, &[]).is_err(), "the poisoned stream takes work");
    let fails = |fails| {
        move || -> leasehold::Result<()> { Err(Error::other(HostileError(Hostile { fails }))) }
    };
    let held = SecondPayload;
    for (what, text, call) in [
        ("a text that panics", "to be caught", HostCall::new("text", fails(false))),
        ("a text that fails", "to be caught", HostCall::new("text", fails(true))),
        ("a hostile payload", "", HostCall::new("thrown", || std::panic::panic_any(Payload))),
        (
            "hostile captures",
            "on purpose",
            HostCall::new("captured", move || {
                let _ = &held;
                Err(Error::state("on purpose"))
            }),
        ),
    ] {
        let stream = env.stream()?;
        let submitted = direct(&stream, &[Op::Host(&call), Op::Host(&call)]);
        drop(call);
        let Err(e) = submitted.and_then(|v| env.try_wait(&stream, v)) else {
            return failed(format!("{what}: a failed host call went unnoticed"));
        };
        check!(e.to_string().contains(text), "{what}: the cause is lost: {e}");
        env.until(what, || stream.timeline().is_idle())?;
    }
    let value = direct(&other, &[])?;
    env.wait(&other, value)
}

fn kernel_fails(env: &Env) -> Outcome {
    let (stream, other) = (env.stream()?, env.stream()?);
    let (set, buffer) = (env.kernel(TestKernel::Fill)?, env.buffer(&other, 4096)?);
    for round in 0..3u32 {
        let victim = if round == 0 { stream.clone() } else { env.stream()? };
        if let (_, Error::DeviceLost { .. }) = trap(env, &victim)? {
            return crate::case::skipped("a kernel that fails takes the whole device with it");
        }
        expect_error(
            direct(&victim, &[]).and_then(|v| env.try_wait(&victim, v)),
            trap_kind(env, &victim),
            "later work of the stream",
        )?;
        env.kernel_fill(&other, &set, &buffer, round)?;
        check!(
            env.read_u32(&other, &buffer)?.iter().all(|&v| v == round),
            "round {round}: another stream after the fault"
        );
    }
    Ok(())
}

/// The kind of the cause by which a stream was poisoned.
fn trap_kind(_: &Env, stream: &Lease<dyn Stream>) -> &'static str {
    stream.timeline().failure().map_or("Fault", |(_, e)| e.kind())
}
