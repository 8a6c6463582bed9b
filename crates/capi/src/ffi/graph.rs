//! Recordings and graphs.

use super::convert::{answer, check_out, give, list, owned};
use super::operand::room;
use super::point::LeaseholdPoint;
use crate::kinds::{BUFFERS, GRAPHS, HeldStream, RUNTIMES, STREAMS};
use crate::status::{ffi_guard, ffi_guard_release};
use leasehold::graph::{GraphRecording, NodeId, UpdateOutcome};
use leasehold::{Error, GraphUpdate};
use std::ffi::{c_char, c_int, c_void};

/// The change gives a launch other parameters.
pub const LEASEHOLD_CHANGE_PARAMS: u32 = 1;
/// The change gives a launch another grid.
pub const LEASEHOLD_CHANGE_GRID: u32 = 2;
/// The change puts a buffer in the place of another one, wherever the graph uses it.
pub const LEASEHOLD_CHANGE_BUFFER: u32 = 3;

/// A change of a graph.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdGraphChange {
    /// `LEASEHOLD_CHANGE_*`.
    pub kind: u32,
    /// The node of a launch, from [`leasehold_record_next`].
    pub node: u32,
    /// The new parameters.
    pub params: *const c_void,
    /// Bytes of the new parameters.
    pub params_bytes: usize,
    /// The new blocks in each direction.
    pub grid: [u32; 3],
    /// 0.
    pub reserved: u32,
    /// The buffer that was recorded.
    pub from: u64,
    /// The buffer in its place.
    pub to: u64,
}

/// A graph.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdGraphInfo {
    /// `sizeof` this struct.
    pub size: usize,
    /// Operations that were recorded.
    pub recorded: u64,
    /// Operations that a launch runs.
    pub nodes: u64,
    /// Launches so far.
    pub launches: u64,
    /// Bytes of the graph's temporaries.
    pub arena_bytes: u64,
    /// Bytes that the instantiated graph holds beside its memory, as far as is known.
    pub exec_bytes: u64,
}

#[cold]
fn no_recording() -> Error {
    Error::recording(
        "the stream is of no recording that goes on; begin one (leasehold_record_begin)",
    )
}

/// Begins a recording, and gives its stream.
///
/// # Safety
/// - `stream` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_record_begin(runtime: u64, stream: *mut u64) -> c_int {
    ffi_guard(|| {
        check_out(stream, "the stream's place")?;
        let recording = GraphRecording::begin(&RUNTIMES.get(runtime)?.runtime)?;
        let handle = STREAMS.add(HeldStream::recorded(recording))?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(stream, handle, "the stream's place") }
    })
}

/// Ends the recording of a stream, and makes a graph of it.
///
/// # Safety
/// - `graph` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_record_end(stream: u64, graph: *mut u64) -> c_int {
    ffi_guard(|| {
        check_out(graph, "the graph's place")?;
        let held = STREAMS.get(stream)?;
        let recording = held.recording.lock().take().ok_or_else(no_recording)?;
        let made = match recording.stop() {
            Ok(made) => made,
            Err(error) => {
                // On another thread than its own it goes on.
                if held.runtime.is_graph_recording() {
                    *held.recording.lock() = Some(recording);
                }
                return Err(error);
            }
        };
        // SAFETY: the caller says that it can be written.
        unsafe { give(graph, GRAPHS.add(made)?, "the graph's place") }
    })
}

/// Gives the recording of a stream up.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_record_cancel(stream: u64) -> c_int {
    ffi_guard_release(|| {
        let held = STREAMS.get(stream)?;
        let recording = held.recording.lock().take().ok_or_else(no_recording)?;
        // Without the lock: what was recorded may be anybody's.
        drop(recording);
        Ok(())
    })
}

/// The number of the operation that is recorded next.
///
/// # Safety
/// - `node` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_record_next(stream: u64, node: *mut u32) -> c_int {
    ffi_guard(|| {
        let next = STREAMS.get(stream)?.stream().next_node().ok_or_else(no_recording)?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(node, next.index(), "the node's place") }
    })
}

/// Adds a holder of a graph.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_graph_retain(graph: u64) -> c_int {
    ffi_guard(|| GRAPHS.retain(graph))
}

/// Lets go of a graph.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_graph_release(graph: u64) -> c_int {
    ffi_guard_release(|| GRAPHS.release(graph))
}

/// Launches a graph on a stream.
///
/// # Safety
/// - `point` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_graph_launch(
    graph: u64,
    stream: u64,
    point: *mut LeaseholdPoint,
) -> c_int {
    ffi_guard(|| {
        let (graph, held) = (GRAPHS.get(graph)?, STREAMS.get(stream)?);
        let launched = graph.launch_on(held.stream())?;
        if !point.is_null() {
            // SAFETY: the caller says that it can be written.
            unsafe { point.write(launched.into()) }
        }
        Ok(())
    })
}

/// Changes a graph for later launches, all or nothing.
///
/// # Safety
/// - `changes` is null, or points to `count` changes, whose parameters have the bytes that they
///   say; `again` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_graph_update(
    graph: u64,
    changes: *const LeaseholdGraphChange,
    count: usize,
    again: *mut c_int,
) -> c_int {
    ffi_guard(|| {
        let graph = GRAPHS.get(graph)?;
        // SAFETY: the caller vouches for the list.
        let changes = unsafe { list(changes, count, "changes")? };
        let mut buffers = room(count)?;
        for change in changes.iter().filter(|change| change.kind == LEASEHOLD_CHANGE_BUFFER) {
            buffers.push((BUFFERS.get(change.from)?, BUFFERS.get(change.to)?));
        }
        let mut swaps = buffers.iter();
        let mut update = GraphUpdate::new();
        for change in changes {
            let node = NodeId::new(change.node);
            update = match change.kind {
                LEASEHOLD_CHANGE_PARAMS => {
                    let params = change.params.cast::<u8>();
                    // SAFETY: the caller vouches for the parameters.
                    update
                        .params_bytes(node, unsafe { list(params, change.params_bytes, "params")? })
                }
                LEASEHOLD_CHANGE_GRID => update.grid(node, change.grid),
                LEASEHOLD_CHANGE_BUFFER => match swaps.next() {
                    Some((from, to)) => update.buffer(&from.0, &to.0),
                    None => update,
                },
                other => return Err(Error::invalid(format!("{other} is no kind of change"))),
            };
        }
        let anew = graph.update(&update)? == UpdateOutcome::Reinstantiated;
        if !again.is_null() {
            // SAFETY: the caller says that it can be written.
            unsafe { again.write(c_int::from(anew)) }
        }
        Ok(())
    })
}

/// Describes a graph.
///
/// # Safety
/// - `info` is a struct that begins with its size and can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_graph_describe(
    graph: u64,
    info: *mut LeaseholdGraphInfo,
) -> c_int {
    ffi_guard(|| {
        let graph = GRAPHS.get(graph)?;
        let found = LeaseholdGraphInfo {
            size: 0,
            recorded: graph.recorded() as u64,
            nodes: graph.nodes() as u64,
            launches: graph.launches(),
            arena_bytes: graph.arena_bytes(),
            exec_bytes: graph.exec_bytes(),
        };
        // SAFETY: the caller vouches for the struct.
        unsafe { answer(info, &found, "info") }
    })
}

/// The operations that a launch runs, as JSON.
///
/// # Safety
/// - `json` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_graph_nodes(graph: u64, json: *mut *mut c_char) -> c_int {
    ffi_guard(|| {
        check_out(json, "the text's place")?;
        let node =
            |(name, after): (String, Vec<u32>)| serde_json::json!({ "name": name, "after": after });
        let nodes = GRAPHS.get(graph)?.describe().into_iter().map(node);
        let text = owned(serde_json::Value::Array(nodes.collect()).to_string())?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(json, text, "the text's place") }
    })
}
