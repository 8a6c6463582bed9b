//! Scenes with objects of their own, and calls that must be refused.

use crate::kernels::{BLOCK, Kernel, Params};
use leasehold::core::sync::Arc;
use leasehold::kernel::{session_ops, session_sync_ops};
use leasehold::{
    Buffer, Context, DeviceId, Error, KernelBase, KernelSession, Lease, Result, Runtime, Stream, View, ops,
};
use std::time::Duration;

/// What a host call of a scene says when it panics.
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
    /// A stream waits for a gate that fails.
    FailedGate,
    /// A stream waits for a gate that is dropped unraised, and is dropped itself.
    DroppedGate,
    /// A host call fails, or panics, and poisons its stream.
    FailedCall {
        /// Whether it panics.
        panics: bool,
    },
    /// A recording that is given up, with temporaries.
    Abandoned,
    /// A session that is dropped before it finishes.
    DroppedSession,
    /// A second context opens the CPU, works and ends.
    OtherContext,
}

impl Scene {
    /// All of them.
    pub const ALL: [Scene; 7] = [
        Scene::FailedGate,
        Scene::DroppedGate,
        Scene::FailedCall { panics: false },
        Scene::FailedCall { panics: true },
        Scene::Abandoned,
        Scene::DroppedSession,
        Scene::OtherContext,
    ];
}

/// Makes a call that is refused.
///
/// # Errors
/// It was not refused.
pub fn refused(
    runtime: &Runtime,
    stream: &Stream,
    buffer: &Lease<Buffer>,
    wrong: Wrong,
) -> std::result::Result<(), String> {
    let len = buffer.len();
    let result = match wrong {
        Wrong::Part => buffer.part(len - 4, 8).map(drop),
        Wrong::Overlap => buffer.part(0, len - 1).and_then(|to| ops::copy(stream, to, buffer.part(1, len - 1)?)),
        Wrong::Lengths => ops::upload(stream, buffer.view(), &[0u8; 3], true),
        Wrong::Pattern => buffer.part(1, 4).and_then(|to| ops::fill(stream, to, ops::Pattern::U32(0))),
        Wrong::Stop => runtime.stop_graph_recording().map(drop),
        Wrong::Future => {
            let now = stream.now();
            ops::wait(stream, now.line().at(now.value() + (1 << 32)))
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
/// What went otherwise than it must, or the runtime's error.
pub fn play(runtime: &Runtime, kernels: &[KernelBase], scene: Scene) -> std::result::Result<(), String> {
    match scene {
        Scene::FailedGate => {
            let (stream, buffer) = held(runtime, |gate| {
                ops::fail(&gate, Error::state("on purpose"));
            })
            .map_err(said)?;
            failed(&stream)?;
            used_again(runtime, &buffer)
        }
        Scene::DroppedGate => {
            let (stream, buffer) = held(runtime, drop).map_err(said)?;
            failed(&stream)?;
            drop(stream);
            used_again(runtime, &buffer)
        }
        Scene::FailedCall { panics } => {
            let stream = runtime.create_stream().map_err(said)?;
            let buffer = runtime.alloc_on(&stream, leasehold::Layout::new(64)).map_err(said)?;
            ops::host_call(&stream, "fails", move || {
                assert!(!panics, "{ON_PURPOSE}");
                Err(Error::state("on purpose"))
            })
            .map_err(said)?;
            // Refused already, if the call has run.
            let _ = ops::fill(&stream, buffer.view(), ops::Pattern::U8(1));
            failed(&stream)?;
            used_again(runtime, &buffer)
        }
        Scene::Abandoned => {
            runtime.start_graph_recording().map_err(said)?;
            let recorded = (|| -> Result<()> {
                let (a, b) = (runtime.alloc(256)?, runtime.alloc(256)?);
                ops::fill(runtime.stream(), a.view(), ops::Pattern::U8(1))?;
                ops::copy(runtime.stream(), b.view(), a.view())
            })();
            runtime.abandon_graph_recording();
            recorded.map_err(said)
        }
        Scene::DroppedSession => dropped_session(runtime, kernels).map_err(said),
        Scene::OtherContext => other_context().map_err(said),
    }
}

/// A stream with a fill behind a gate, once the gate was given away.
fn held(runtime: &Runtime, end: impl FnOnce(leasehold::Gate)) -> Result<(Stream, Lease<Buffer>)> {
    let (stream, gate) = (runtime.create_stream()?, runtime.create_gate()?);
    let buffer = runtime.alloc_on(&stream, leasehold::Layout::new(64))?;
    ops::wait(&stream, gate.next())?;
    ops::fill(&stream, buffer.view(), ops::Pattern::U8(7))?;
    end(gate);
    Ok((stream, buffer))
}

fn failed(stream: &Stream) -> std::result::Result<(), String> {
    match stream.synchronize_timeout(Some(Duration::from_secs(20))) {
        Ok(()) => Err("a stream that was to fail did not".into()),
        Err(Error::Timeout(_)) => Err("a stream that was to fail hangs".into()),
        Err(_) => Ok(()),
    }
}

/// What a failed stream wrote is overwritten and read on another one.
fn used_again(runtime: &Runtime, buffer: &Lease<Buffer>) -> std::result::Result<(), String> {
    let stream = runtime.create_stream().map_err(said)?;
    ops::upload_owned(&stream, buffer.view(), Arc::new(vec![9u8; 64])).map_err(said)?;
    let mut got = [0u8; 64];
    ops::download(&stream, &mut got, buffer.view()).map_err(said)?;
    if got == [9; 64] {
        Ok(())
    } else {
        Err("a buffer that was overwritten after a failure holds something else".into())
    }
}

fn dropped_session(runtime: &Runtime, kernels: &[KernelBase]) -> Result<()> {
    let stream = runtime.create_stream()?;
    let buffer = runtime.alloc_on(&stream, leasehold::Layout::new(256))?;
    ops::fill(&stream, buffer.view(), ops::Pattern::U8(3))?;
    let operands = [buffer.read_write()];
    let begun = KernelSession::begin(&kernels[Kernel::Mask as usize], &stream)?;
    let bound = session_ops::bind(session_sync_ops::wait(begun, &operands)?, &operands)?;
    let params: Params = [64, u32::MAX, 0];
    drop(session_ops::dispatch_1d(session_ops::params(bound, &params)?, 1, BLOCK)?);
    let mut got = [0u8; 256];
    ops::download(&stream, &mut got, buffer.view())?;
    if got == [3; 256] { Ok(()) } else { Err(Error::state("a session that was dropped was launched")) }
}

fn other_context() -> Result<()> {
    let runtime = Context::new().runtime(DeviceId::cpu(0))?;
    let buffer = runtime.upload(&[5u32; 64])?;
    let other = runtime.alloc(256)?;
    runtime.memcpy_d2d(other.view(), buffer.view(), true)?;
    drop(buffer);
    if runtime.download::<u32>(&other)? != [5; 64] {
        return Err(Error::state("a second context holds something else"));
    }
    drop(other);
    runtime.close(Duration::from_secs(20))
}
