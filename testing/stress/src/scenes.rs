//! Scenes with objects of their own, and calls that must be refused.

use crate::kernels::{BLOCK, Kernel, Params};
use crate::prelude::{Call, launch};
use leasehold::kernel::{session_ops, session_sync_ops};
use leasehold::{
    Buffer, Context, DeviceId, Divide, Error, Growing, KernelBase, KernelSession, Lease,
    PartitionSize, Result, Runtime, Stream, StreamDesc, View, ops,
};
use std::time::Duration;

/// The message of a host call of a scene that panics.
pub const ON_PURPOSE: &str = "a stressed host call panics on purpose";

/// A call that must be refused and change nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrong {
    /// A part beyond the end.
    Part,
    /// A copy onto itself.
    Overlap,
    /// A copy of two lengths.
    Lengths,
    /// A fill of half a pattern.
    Pattern,
    /// A stop without a recording.
    Stop,
    /// A wait of a stream for what it has not got yet.
    Future,
}

impl Wrong {
    /// All of them.
    pub const ALL: [Wrong; 6] =
        [Wrong::Part, Wrong::Overlap, Wrong::Lengths, Wrong::Pattern, Wrong::Stop, Wrong::Future];
}

/// Something with objects of its own, from beginning to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scene {
    /// A stream waits for a host timeline that fails.
    FailedHostTimeline,
    /// A stream waits for a host timeline that is dropped unraised, and is dropped itself.
    DroppedHostTimeline,
    /// A host call fails, or panics, and poisons its stream.
    FailedCall {
        /// Says whether it panics.
        panics: bool,
    },
    /// A recording that is given up, with temporaries.
    Abandoned,
    /// A session that is dropped before it finishes.
    DroppedSession,
    /// A second context opens the CPU, works and ends.
    OtherContext,
    /// Threads write the same buffers on several streams at the same moment.
    Common,
    /// Each callback for a completion is called once, with the outcome of the work.
    Told {
        /// Says whether the stream fails.
        fails: bool,
    },
    /// Parts of growing memory grow and shrink together, and the device knows the end of each.
    Parts,
    /// Partitions whose last lease is dropped while their streams have work.
    Partitions,
}

impl Scene {
    /// All of them.
    pub const ALL: [Scene; 12] = [
        Scene::FailedHostTimeline,
        Scene::DroppedHostTimeline,
        Scene::FailedCall { panics: false },
        Scene::FailedCall { panics: true },
        Scene::Abandoned,
        Scene::DroppedSession,
        Scene::OtherContext,
        Scene::Common,
        Scene::Told { fails: false },
        Scene::Told { fails: true },
        Scene::Parts,
        Scene::Partitions,
    ];
}

/// Makes a call that is refused.
///
/// # Errors
/// The scene was not refused.
pub fn refused(
    runtime: &Runtime,
    stream: &Stream,
    buffer: &Lease<Buffer>,
    wrong: Wrong,
) -> std::result::Result<(), String> {
    let len = buffer.len() as usize;
    let result = match wrong {
        Wrong::Part => buffer.part(len - 4..len + 4).map(drop),
        Wrong::Overlap => buffer.part(..len - 1).and_then(|to| stream.copy(to, buffer.part(1..)?)),
        Wrong::Lengths => stream.upload(buffer.view(), &[0u8; 3]),
        Wrong::Pattern => buffer.part(1..5).and_then(|to| stream.fill(to, 0u32)),
        Wrong::Stop => runtime.stop_graph_recording().map(drop),
        Wrong::Future => {
            let now = stream.now();
            stream.wait(now.timeline().at(now.value() + (1 << 32)))
        }
    };
    match result {
        Ok(()) => Err(format!("{wrong:?} was not refused")),
        Err(_) => Ok(()),
    }
}

fn said(e: Error) -> String {
    e.to_string()
}

/// Plays a scene.
///
/// # Errors
/// A description of the wrong behaviour, or the runtime's error.
pub fn play(
    runtime: &Runtime,
    kernels: &[KernelBase],
    scene: Scene,
) -> std::result::Result<(), String> {
    match scene {
        Scene::FailedHostTimeline => {
            let (stream, buffer) = held(runtime, |host_timeline| {
                host_timeline.fail(Error::state("on purpose"));
            })
            .map_err(said)?;
            failed(&stream)?;
            used_again(runtime, &buffer)
        }
        Scene::DroppedHostTimeline => {
            let (stream, buffer) = held(runtime, drop).map_err(said)?;
            failed(&stream)?;
            drop(stream);
            used_again(runtime, &buffer)
        }
        Scene::FailedCall { panics } => {
            let stream = runtime.create_stream().map_err(said)?;
            let buffer = stream.runtime().alloc(64).map_err(said)?;
            stream
                .host_call("fails", move || {
                    assert!(!panics, "{ON_PURPOSE}");
                    Err(Error::state("on purpose"))
                })
                .map_err(said)?;
            // Refused already, if the call has run.
            let _ = stream.fill(buffer.view(), 1u8);
            failed(&stream)?;
            used_again(runtime, &buffer)
        }
        Scene::Abandoned => {
            let runtime = runtime.start_graph_recording().map_err(said)?;
            let recorded = (|| -> Result<()> {
                let (a, b) = (runtime.alloc(256)?, runtime.alloc(256)?);
                runtime.stream().fill(a.view(), 1u8)?;
                runtime.stream().copy(b.view(), a.view())
            })();
            runtime.abandon_graph_recording();
            recorded.map_err(said)
        }
        Scene::DroppedSession => dropped_session(runtime, kernels).map_err(said),
        Scene::OtherContext => other_context().map_err(said),
        Scene::Common => common(runtime, kernels),
        Scene::Told { fails } => told(runtime, fails),
        Scene::Parts => parts(runtime),
        Scene::Partitions => partitions(runtime, kernels),
    }
}

/// A stream with a fill behind a host timeline, once the host timeline was given away.
fn held(
    runtime: &Runtime,
    end: impl FnOnce(leasehold::HostTimeline),
) -> Result<(Stream, Lease<Buffer>)> {
    let (stream, host_timeline) = (runtime.create_stream()?, runtime.create_host_timeline()?);
    let buffer = stream.runtime().alloc(64)?;
    stream.wait(host_timeline.next())?;
    stream.fill(buffer.view(), 7u8)?;
    end(host_timeline);
    Ok((stream, buffer))
}

fn failed(stream: &Stream) -> std::result::Result<(), String> {
    match stream.synchronize_timeout(Duration::from_secs(20)) {
        Ok(()) => Err("a stream that was to fail did not".into()),
        Err(Error::Timeout(_)) => Err("a stream that was to fail hangs".into()),
        Err(_) => Ok(()),
    }
}

/// Overwrites and reads a buffer, which a failed stream wrote, on another stream.
fn used_again(runtime: &Runtime, buffer: &Lease<Buffer>) -> std::result::Result<(), String> {
    let stream = runtime.create_stream().map_err(said)?;
    stream.upload_owned(buffer.view(), vec![9u8; 64]).map_err(said)?;
    let mut got = [0u8; 64];
    stream.download(&mut got, buffer.view()).map_err(said)?;
    if got == [9; 64] {
        Ok(())
    } else {
        Err("a buffer that was overwritten after a failure holds something else".into())
    }
}

fn dropped_session(runtime: &Runtime, kernels: &[KernelBase]) -> Result<()> {
    let stream = runtime.create_stream()?;
    let buffer = stream.runtime().alloc(256)?;
    stream.fill(buffer.view(), 3u8)?;
    let operands = [buffer.read_write()];
    let begun = KernelSession::begin(&kernels[Kernel::Mask as usize], &stream)?;
    let bound = session_ops::bind(session_sync_ops::wait(begun, &operands)?)?;
    let params: Params = [64, u32::MAX, 0];
    drop(session_ops::dispatch_1d(session_ops::params(bound, &params)?, 1, BLOCK)?);
    let mut got = [0u8; 256];
    stream.download(&mut got, buffer.view())?;
    if got == [3; 256] {
        Ok(())
    } else {
        Err(Error::state("a session that was dropped was launched"))
    }
}

/// Words of the buffers that threads have in common.
const COMMON: u32 = 32 << 10;
const COMMON_THREADS: u32 = 3;
const COMMON_ROUNDS: u32 = 6;

/// Each thread changes all of one buffer and overwrites all of another one, again and again, on
/// every stream. No change may get lost, and what is read of the other buffer is what one of them
/// wrote.
fn common(runtime: &Runtime, kernels: &[KernelBase]) -> std::result::Result<(), String> {
    // Not the default stream, which may be held.
    let streams = (0..COMMON_THREADS)
        .map(|_| runtime.create_stream())
        .collect::<Result<Vec<Stream>>>()
        .map_err(said)?;
    let layout = leasehold::Layout::new(u64::from(COMMON) * 4);
    let zeros = || -> Result<Lease<Buffer>> {
        let buffer = streams[0].runtime().alloc_layout(layout)?;
        streams[0].fill(buffer.view(), 0u8)?;
        Ok(buffer)
    };
    let (changed, written) = (zeros().map_err(said)?, zeros().map_err(said)?);
    let read = |buffer: &Lease<Buffer>| -> Result<Vec<u32>> {
        let mut got = vec![0; COMMON as usize];
        streams[0].download(&mut got, buffer.view())?;
        Ok(got)
    };
    let word =
        |thread: u32, round: u32| (1 + thread * COMMON_ROUNDS + round).wrapping_mul(0x9E37_79B9);
    let work = |thread: u32| -> Result<Vec<(Lease<Buffer>, u32)>> {
        (0..COMMON_ROUNDS)
            .map(|round| {
                let stream = &streams[((thread + round) % COMMON_THREADS) as usize];
                let operands = [changed.read_write()];
                let params = [COMMON, word(thread, round), 0];
                launch(
                    stream,
                    &[Call {
                        kernel: &kernels[Kernel::Mask as usize],
                        operands: &operands,
                        params,
                    }],
                )?;
                stream.fill(written.view(), ops::Pattern::U32(word(thread, round)))?;
                let seen = stream.runtime().alloc_layout(layout)?;
                stream.copy(seen.view(), written.view())?;
                Ok((seen, round))
            })
            .collect()
    };
    let all = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..COMMON_THREADS).map(|t| scope.spawn(move || work(t))).collect();
        let joined =
            threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err(Error::state("a panic"))));
        joined.collect::<Result<Vec<_>>>()
    });
    let every: Vec<u32> = (0..COMMON_THREADS)
        .flat_map(|t| (0..COMMON_ROUNDS).map(move |r| (t, r)))
        .map(|(t, r)| word(t, r))
        .collect();
    for (seen, round) in all.map_err(said)?.into_iter().flatten() {
        let got = read(&seen).map_err(said)?;
        if got.iter().any(|w| *w != got[0]) || !every.contains(&got[0]) {
            return Err(format!("what was read in round {round} is not what one thread wrote"));
        }
    }
    let expect = every.iter().fold(0, |all, w| all ^ w);
    let got = read(&changed).map_err(said)?;
    match got.iter().filter(|w| **w != expect).count() {
        0 => Ok(()),
        n => Err(format!("changes of {n} of {COMMON} words got lost")),
    }
}

/// A completion behind a host timeline, of a stream that is kept and of one that is dropped before
/// the host timeline is signalled; one of a stream that has failed; one in a recording.
fn told(runtime: &Runtime, fails: bool) -> std::result::Result<(), String> {
    let (tell, hear) = std::sync::mpsc::channel();
    let ask = |stream: &Stream, name: &'static str| {
        let tell = tell.clone();
        stream.on_complete(move |result| tell.send((name, result)).unwrap_or_default());
    };
    let host_timeline = runtime.create_host_timeline().map_err(said)?;
    let (kept, dropped) =
        (runtime.create_stream().map_err(said)?, runtime.create_stream().map_err(said)?);
    for (stream, name) in [(&kept, "kept"), (&dropped, "dropped")] {
        stream.wait(host_timeline.next()).map_err(said)?;
        ask(stream, name);
    }
    // On some devices nothing happens unless somebody waits for it.
    let points = [kept.now(), dropped.now()];
    // One that fails after it was dropped is the device's to tell of for a while.
    let dropped = Some(dropped).filter(|_| fails);
    let recording = runtime.start_graph_recording().map_err(said)?;
    ask(recording.stream(), "recording");
    recording.abandon_graph_recording();
    let said_of = |expect: &mut Vec<(&'static str, bool)>| {
        while !expect.is_empty() {
            let (name, result) = hear
                .recv_timeout(Duration::from_secs(20))
                .map_err(|_| format!("{expect:?} never came"))?;
            let at = expect.iter().position(|e| *e == (name, result.is_ok()));
            expect.swap_remove(
                at.ok_or_else(|| format!("the completion {name} is told {result:?}"))?,
            );
        }
        Ok::<(), String>(())
    };
    said_of(&mut vec![("recording", false)])?;
    if fails {
        host_timeline.fail(Error::state("on purpose"));
    } else {
        host_timeline.signal(host_timeline.value() + 1).map_err(said)?;
    }
    for point in points {
        if runtime.wait_for(point).is_err() != fails {
            return Err(
                "a stream behind a host timeline ends otherwise than the host timeline".into()
            );
        }
    }
    said_of(&mut vec![("kept", !fails), ("dropped", !fails)])?;
    ask(&kept, "later");
    for stream in [Some(kept), dropped].into_iter().flatten() {
        let _ = stream.synchronize();
    }
    said_of(&mut vec![("later", !fails)])?;
    drop(tell);
    // Nobody may tell of one twice.
    match hear.recv_timeout(Duration::from_secs(20)) {
        Ok((name, result)) => Err(format!("the completion {name} comes again: {result:?}")),
        Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => Ok(()),
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
            Err("a completion is kept after it has come".into())
        }
    }
}

/// Parts that grow and shrink on two streams, with memory that other threads want too.
fn parts(runtime: &Runtime) -> std::result::Result<(), String> {
    const PARTS: usize = 4;
    if !runtime.raw_device().caps().growing {
        return Ok(());
    }
    let most = 2 * runtime.allocator().caps().granule as usize;
    let streams = [runtime.create_stream().map_err(said)?, runtime.create_stream().map_err(said)?];
    // Not the default stream of the program, which may be held.
    let runtime = streams[0].runtime();
    let parts = Growing::<u8>::with_parts(&runtime, PARTS, most).map_err(said)?;
    let mut lengths = [0; PARTS];
    for round in 0..12 {
        let (from, stream) = (round % PARTS, &streams[round % 2]);
        let (range, bytes) = (from..PARTS.min(from + 3), (most * (round * 7 % 11) / 10) & !3);
        if round % 3 == 2 {
            parts.parts(range.clone()).shrink(stream, bytes).map_err(said)?;
            lengths[range].iter_mut().for_each(|len| *len = bytes.min(*len));
        } else {
            let bytes = bytes.min(most);
            parts.parts(range.clone()).grow(stream, bytes).map_err(said)?;
            lengths[range].iter_mut().for_each(|len| *len = bytes.max(*len));
        }
        if round % 5 == 4 {
            runtime.allocator().trim(0).map_err(said)?;
        }
        let mut limits = vec![0u64; parts.limit().view().len() as usize / 8];
        streams[round / 2 % 2].download(&mut limits, parts.limit().view()).map_err(said)?;
        let found: [_; PARTS] = std::array::from_fn(|part| parts.parts(part..part + 1).len());
        if limits[..PARTS] != lengths.map(|len| len as u64) || found != lengths {
            return Err(format!(
                "round {round}: parts of {lengths:?} bytes have the limits {limits:?}, {parts:?}"
            ));
        }
    }
    Ok(())
}

/// Words that a kernel of the scene changes.
const CHANGED: u32 = 4096;

/// Streams on partitions work behind a host timeline, and everything else of them is dropped.
fn partitions(runtime: &Runtime, kernels: &[KernelBase]) -> std::result::Result<(), String> {
    let partitions = match runtime.partition(&[PartitionSize::Sms(1), PartitionSize::Rest]) {
        // Another thread has divided the device.
        Err(Error::Unsupported(_) | Error::InvalidState(_)) => return Ok(()),
        made => made.map_err(said)?,
    };
    let host_timeline = runtime.create_host_timeline().map_err(said)?;
    let mut expected = Vec::new();
    for (i, partition) in std::iter::zip(1.., &partitions) {
        let stream = runtime.create_stream_with(&StreamDesc::on(partition)).map_err(said)?;
        let layout = leasehold::Layout::new(u64::from(CHANGED) * 4);
        let buffer = stream.runtime().alloc_layout(layout).map_err(said)?;
        let work = || -> Result<()> {
            stream.fill(buffer.view(), 0u32)?;
            stream.wait(host_timeline.next())?;
            let (kernel, params) = (&kernels[Kernel::Mask as usize], [CHANGED, i, 1]);
            launch(&stream, &[Call { kernel, operands: &[buffer.read_write()], params }])
        };
        work().map_err(said)?;
        expected.push((stream.now(), buffer, i));
    }
    drop(partitions);
    // Streams that come are the occasion to end what has no holder.
    let other = runtime.create_stream().map_err(said)?;
    host_timeline.signal(host_timeline.value() + 1).map_err(said)?;
    for (point, buffer, first) in expected {
        runtime.wait_for(point).map_err(said)?;
        let mut got = vec![0u32; CHANGED as usize];
        other.download(&mut got, buffer.view()).map_err(said)?;
        if !std::iter::zip(first.., &got).all(|(word, got)| word == *got) {
            return Err(format!("a kernel on partition {first} has not written what it was to"));
        }
    }
    Ok(())
}

fn other_context() -> Result<()> {
    let runtime = Context::new().runtime(DeviceId::cpu(0))?;
    let buffer = runtime.upload(&[5u32; 64])?;
    let other = runtime.alloc(256)?;
    runtime.stream().copy(other.view(), buffer.view())?;
    drop(buffer);
    if runtime.to_vec::<u32>(&other)? != [5; 64] {
        return Err(Error::state("a second context holds something else"));
    }
    drop(other);
    runtime.close(Duration::from_secs(20))
}
