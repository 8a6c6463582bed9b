//! Completion cases: callbacks that run once, on sound and failed streams; and submitters that must
//! not hang.

use crate::case::{Case, Need, Outcome, check, check_eq, skipped};
use crate::env::Env;
use crate::factory::Injected;
use leasehold::backend::sync::Mutex;
use leasehold::ops::Pattern;
use leasehold::{Error, Result, Stream, View};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) const CASES: &[Case] = &[
    Case::runtime(
        154,
        "a completion is told once: of success, of each kind of failure, and by streams that are gone",
        &[Need::HostTimelines, Need::HostCalls],
        told_once,
    ),
    Case::runtime(
        155,
        "a completion is told of the loss of its device",
        &[Need::HostCalls],
        told_of_loss,
    )
    .faulty(),
    Case::runtime(
        156,
        "a thread that submits without end behind its own host timeline gets an error",
        &[Need::HostTimelines],
        endless_submission,
    ),
];

/// The results that a completion received.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<Result<()>>>>);

impl Told {
    fn by(stream: &Stream) -> Told {
        let told = Told::default();
        let list = told.0.clone();
        stream.on_complete(move |result| list.lock().push(result));
        told
    }

    fn count(&self) -> usize {
        self.0.lock().len()
    }

    /// Waits until the completion was called, and returns the kind of its error.
    fn kind(&self, env: &Env, what: &str) -> Outcome<&'static str> {
        env.until(what, || self.count() != 0)?;
        env.linger(Duration::from_millis(1));
        let told = self.0.lock();
        check_eq!(told.len(), 1, "how often {what} was told");
        Ok(told[0].as_ref().map_or_else(Error::kind, |()| "ok"))
    }
}

fn told_once(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let x = runtime.alloc(4096)?;
    // Success, after all submitted work.
    let hold = env.hold_runtime(runtime.stream())?;
    runtime.stream().fill(x.view(), 1u8)?;
    let told = Told::by(runtime.stream());
    env.linger(Duration::from_millis(2));
    check_eq!(told.count(), 0, "how often a completion was told while its stream was held back");
    hold.release()?;
    check_eq!(told.kind(env, "a completion")?, "ok", "what it was told");
    // A host timeline that fails. The completion may submit to another stream and signal another
    // host timeline.
    let (failing, other) = (runtime.create_host_timeline()?, runtime.create_host_timeline()?);
    let go = other.next();
    let stream = runtime.create_stream()?;
    stream.wait(failing.next())?;
    let first = Told::by(&stream);
    stream.fill(x.view(), 2u8)?;
    let second = Told::default();
    stream.on_complete({
        let (list, runtime, signalled) = (second.0.clone(), runtime.clone(), other.clone());
        move |result| {
            let y = runtime.alloc(64).and_then(|y| runtime.stream().fill(y.view(), 3u8));
            list.lock().push(result.and(y).and(signalled.signal(go.value())));
        }
    });
    check_eq!(
        first.count() + second.count(),
        0,
        "how often completions behind a host timeline were told"
    );
    failing.fail(Error::NotFound("the producer".into()));
    check_eq!(
        first.kind(env, "a completion behind a failed host timeline")?,
        "NotFound",
        "what it was told"
    );
    check_eq!(second.kind(env, "a completion behind that")?, "NotFound", "what it was told");
    // A failed stream: the completion is called at once.
    check!(
        stream.synchronize_timeout(env.timeout()).is_err(),
        "a stream behind a failed host timeline is sound"
    );
    check_eq!(Told::by(&stream).count(), 1, "how often a failed stream tells at once");
    // A host call that fails, and one that is dropped before its completion.
    let stream = runtime.create_stream()?;
    let hold = env.hold_runtime(&stream)?;
    stream.host_call_once("fails", || Err(Error::NotFound("on purpose".into())))?;
    let told = Told::by(&stream);
    hold.release()?;
    check!(told.kind(env, "a completion behind a failed call")? != "ok", "it was told of success");
    // A dropped host timeline.
    let stream = runtime.create_stream()?;
    let host_timeline = runtime.create_host_timeline()?;
    stream.wait(host_timeline.next())?;
    let told = Told::by(&stream);
    drop(host_timeline);
    check!(
        told.kind(env, "a completion behind a dropped host timeline")? != "ok",
        "it was told of success"
    );
    // A stream and a runtime that are dropped before the completion.
    let host_timeline = runtime.create_host_timeline()?;
    let stream = runtime.create_stream()?;
    stream.wait(host_timeline.next())?;
    let told = Told::by(&stream);
    drop(stream);
    env.linger(Duration::from_millis(1));
    check_eq!(
        told.count(),
        0,
        "how often a dropped stream told before its host timeline was signalled"
    );
    host_timeline.signal(host_timeline.next().value())?;
    check_eq!(told.kind(env, "a completion of a dropped stream")?, "ok", "what it was told");
    let hold = env.hold_runtime(runtime.stream())?;
    let told = Told::by(runtime.stream());
    // While recording: the completion is called at once, and nothing is recorded.
    if env.device().caps().graphs {
        let recorded = Told::default();
        let graph = runtime.record_graph(|r| {
            let list = recorded.0.clone();
            r.stream().on_complete(move |result| list.lock().push(result));
            Ok(())
        })?;
        check_eq!(
            recorded.kind(env, "a completion in a recording")?,
            "Recording",
            "what it was told"
        );
        check_eq!(graph.recorded(), 0, "the operations recorded of it");
    }
    drop((x, host_timeline, other, failing));
    drop(runtime);
    hold.release()?;
    check_eq!(told.kind(env, "a completion of a dropped runtime")?, "ok", "what it was told");
    Ok(())
}

fn told_of_loss(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let (x, stream) = (runtime.alloc(4096)?, runtime.create_stream()?);
    runtime.synchronize()?;
    let faults = env.faults()?.clone();
    let hold =
        if env.device().caps().host_timelines { Some(env.hold_runtime(&stream)?) } else { None };
    let pending = hold.is_some().then(|| Told::by(&stream));
    if !faults.next(Injected::DeviceLost) {
        return skipped("the device of this driver cannot be lost");
    }
    let taken = runtime.stream().fill(x.view(), 1u8).and_then(|()| {
        let told = Told::by(runtime.stream());
        runtime.stream().synchronize_timeout(env.timeout())?;
        drop(told);
        Ok(())
    });
    check!(
        taken.is_err_and(|e| e.kind() == "DeviceLost"),
        "work on a lost device is not DeviceLost"
    );
    let after = Told::by(runtime.stream());
    check_eq!(after.kind(env, "a completion on a lost device")?, "DeviceLost", "what it was told");
    if let Some(pending) = pending {
        check_eq!(
            pending.kind(env, "a completion that was pending")?,
            "DeviceLost",
            "what it was told"
        );
    }
    drop(hold);
    Ok(())
}

fn endless_submission(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let (stream, x) = (runtime.create_stream()?, runtime.upload(&[0u32; 64])?);
    stream.set_submit_timeout(Duration::from_millis(100));
    let host_timeline = runtime.create_host_timeline()?;
    stream.wait(host_timeline.next())?;
    let start = Instant::now();
    let mut submitted = 0u32;
    let error = loop {
        match stream.fill(x.view(), Pattern::U32(submitted)) {
            Ok(()) if submitted > 100_000 => {
                return crate::case::failed("100,000 operations are pending");
            }
            Ok(()) => submitted += 1,
            Err(e) => break e,
        }
    };
    check_eq!(error.kind(), "Timeout", "a submission without room, after {submitted}");
    check!(error.to_string().contains("a host timeline"), "the error does not say why: {error}");
    check!(submitted >= 4096, "no room after {submitted} operations");
    check!(start.elapsed() >= Duration::from_millis(100), "it did not wait for room");
    check!(stream.failure().is_none(), "a submission without room poisoned the stream");
    // The call may be repeated, and the host timeline signalled.
    check!(stream.fill(x.view(), 0u32).is_err(), "there is room again, and nothing was over");
    stream.set_submit_timeout(env.timeout());
    host_timeline.signal(host_timeline.next().value())?;
    stream.fill(x.view(), Pattern::U32(submitted))?;
    stream.synchronize_timeout(env.timeout())?;
    check_eq!(runtime.to_vec::<u32>(&x)?, [submitted; 64], "the buffer at the end");
    Ok(())
}
