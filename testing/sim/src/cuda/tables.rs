//! The tables of the simulated driver: handles, their owners, and the objects behind them.
//!
//! This module must not know what calls do.

use super::Cause;
use super::capture::Capture;
use crate::{EventId, ExecId, GraphId, Kernel, Machine, NodeId, PartitionId, PieceId, QueueId};
use leasehold_core::sync::atomic::AtomicU32;
use leasehold_core::sync::thread::ThreadId;
use leasehold_cuda::driver::ops::{CaptureMode, CopyKind};
use leasehold_emulator::{Emulator, Param};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// A context.
#[derive(Debug)]
pub(super) struct Context {
    pub device: u32,
    /// The enabled peer contexts, with their devices.
    pub peers: BTreeMap<u64, u32>,
}

/// A stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stream {
    pub context: u64,
    pub queue: QueueId,
    /// The partition, or 0.
    pub partition: u64,
}

/// A partition, of a device's primary context.
#[derive(Debug, Clone, Copy)]
pub(super) struct Partition {
    pub context: u64,
    pub id: PartitionId,
}

/// An event.
#[derive(Debug, Clone)]
pub(super) struct Event {
    pub context: u64,
    pub id: EventId,
    pub timing: bool,
    /// The capture with the event's last record, active or not, and the nodes that the record
    /// covers.
    pub captured: Option<(u64, Vec<NodeId>)>,
}

/// A module.
#[derive(Debug)]
pub(super) struct Module {
    pub context: u64,
    /// The entry points that the module declares.
    pub entries: BTreeSet<String>,
    /// The module's own emulator, if the simulated compiler made the image of a source.
    pub emulator: Option<Arc<Emulator>>,
}

/// A function of a module.
#[derive(Debug, Clone)]
pub(super) struct Function {
    pub module: u64,
    pub context: u64,
    pub kernel: Arc<Kernel>,
    /// The parameters of an emulated kernel. `None` for a registered function.
    pub params: Option<Vec<Param>>,
    /// The most bytes of dynamic shared memory of a launch.
    pub shared: u32,
    /// The limits that it was found with.
    pub limits: Vec<(u32, u32)>,
    /// The most blocks of a cluster.
    pub cluster: u32,
}

/// The kind of a node, with the properties that updates may not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NodeKind {
    Kernel { context: u64 },
    Copy { kind: CopyKind, rows: u64 },
    Fill,
    Other,
}

/// A node of a graph.
#[derive(Debug, Clone, Copy)]
pub(super) struct GraphNode {
    pub id: NodeId,
    pub kind: NodeKind,
}

/// A condition of a graph.
#[derive(Debug)]
pub(super) struct Condition {
    pub context: u64,
    pub word: Arc<AtomicU32>,
    /// A node is under the condition.
    pub used: bool,
}

/// A graph.
#[derive(Debug)]
pub(super) struct Graph {
    pub id: GraphId,
    /// The nodes by handle.
    pub nodes: BTreeMap<u64, GraphNode>,
    /// The handles by the machine's node number.
    pub handles: BTreeMap<NodeId, u64>,
    /// The conditions by handle.
    pub conditions: BTreeMap<u64, Condition>,
    /// The bodies of its nodes, which end with it.
    pub bodies: Vec<u64>,
    /// The graph is a body.
    pub is_body: bool,
    /// It, or a child of it, has nodes that no body can have.
    pub calls: bool,
}

impl Graph {
    /// A graph of no nodes.
    pub(super) fn new(id: GraphId) -> Self {
        Self {
            id,
            nodes: BTreeMap::new(),
            handles: BTreeMap::new(),
            conditions: BTreeMap::new(),
            bodies: Vec::new(),
            is_body: false,
            calls: false,
        }
    }

    /// Whether the graph has conditional nodes, or is below one.
    pub(super) fn is_conditional(&self) -> bool {
        self.is_body || !self.bodies.is_empty()
    }
}

/// An executable graph.
#[derive(Debug)]
pub(super) struct Exec {
    /// The graph that it was made of.
    pub graph: u64,
    pub context: u64,
    pub device: u32,
    pub id: ExecId,
    pub nodes: BTreeMap<u64, GraphNode>,
    /// The event of its last launch: launches run one after another.
    pub last: EventId,
}

/// Device memory with an address of its own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Allocation {
    pub context: u64,
    pub device: u32,
}

/// Pinned host memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pinned {
    pub context: u64,
    pub bytes: u64,
    /// The memory was registered, not allocated by the driver.
    pub registered: bool,
}

/// Physical memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub id: PieceId,
    pub bytes: u64,
}

/// Physical memory at an address.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mapping {
    pub bytes: u64,
    /// Whether a device has access.
    pub reachable: bool,
}

/// All tables.
#[derive(Debug, Default)]
pub(super) struct Tables {
    next: u64,
    pub contexts: BTreeMap<u64, Context>,
    /// For each device the primary context, if it exists, and its number of retains.
    pub primaries: Vec<(Option<u64>, u32)>,
    /// The current context of each thread.
    pub current: HashMap<ThreadId, u64>,
    pub streams: BTreeMap<u64, Stream>,
    pub captures: BTreeMap<u64, Capture>,
    /// The capture modes of threads that set one other than the global one.
    pub capture_modes: HashMap<ThreadId, CaptureMode>,
    /// The streams that special handles mean, by context; a per-thread stream by thread too.
    pub special: HashMap<(u64, Option<ThreadId>), u64>,
    pub events: BTreeMap<u64, Event>,
    pub modules: BTreeMap<u64, Module>,
    pub functions: BTreeMap<u64, Function>,
    pub graphs: BTreeMap<u64, Graph>,
    pub execs: BTreeMap<u64, Exec>,
    pub allocations: BTreeMap<u64, Allocation>,
    pub pinned: BTreeMap<u64, Pinned>,
    pub partitions: BTreeMap<u64, Partition>,
    pub pieces: BTreeMap<u64, Piece>,
    /// Bytes by address.
    pub reservations: BTreeMap<u64, u64>,
    /// Mappings by address.
    pub mappings: BTreeMap<u64, Mapping>,
    /// The first causes of lost devices.
    pub causes: BTreeMap<u32, Cause>,
    pub leaks: Vec<String>,
}

impl Tables {
    pub(super) fn new(devices: u32) -> Self {
        Self { primaries: vec![(None, 0); devices as usize], ..Self::default() }
    }

    /// Makes a new handle. Handles are neither small, nor addresses of memory, nor multiples of a
    /// page.
    pub(super) fn handle(&mut self) -> u64 {
        self.next += 1;
        0x5151_0000_0000_0000 | self.next << 4 | 8
    }

    pub(super) fn new_context(&mut self, device: u32) -> u64 {
        let handle = self.handle();
        self.contexts.insert(handle, Context { device, peers: BTreeMap::new() });
        handle
    }

    /// Disables peer access. The machine knows devices only: if another context still has access,
    /// the devices stay connected.
    pub(super) fn disable_peer(&mut self, machine: &Machine, context: u64, peer: u64) {
        let Some(from) = self.contexts.get_mut(&context) else { return };
        let device = from.device;
        let Some(to) = from.peers.remove(&peer) else { return };
        let kept = self
            .contexts
            .values()
            .any(|c| c.device == device && c.peers.values().any(|&d| d == to));
        if !kept {
            // A lost device has no peer access.
            let _ = machine.disable_peer(device, to);
        }
    }

    /// Removes a graph with its bodies, and returns the machine's graph.
    pub(super) fn remove_graph(&mut self, graph: u64) -> Option<GraphId> {
        let gone = self.graphs.remove(&graph)?;
        for body in gone.bodies {
            self.remove_graph(body);
        }
        Some(gone.id)
    }

    pub(super) fn census(&self) -> super::Census {
        super::Census {
            contexts: self.contexts.len(),
            retained: self.primaries.iter().map(|p| p.1 as usize).sum(),
            streams: self.streams.len(),
            events: self.events.len(),
            modules: self.modules.len(),
            graphs: self.graphs.len(),
            execs: self.execs.len(),
            partitions: self.partitions.len(),
            allocations: self.allocations.len(),
            pieces: self.pieces.len(),
            reservations: self.reservations.len(),
            pinned: self.pinned.values().filter(|p| !p.registered).count(),
            registered: self.pinned.values().filter(|p| p.registered).count(),
        }
    }

    /// Removes a context with all objects in it. Pieces, reservations and graphs belong to no
    /// context.
    pub(super) fn end_context(&mut self, machine: &Machine, context: u64) {
        let peers: Vec<u64> = self
            .contexts
            .get(&context)
            .map(|c| c.peers.keys().copied().collect())
            .unwrap_or_default();
        peers.into_iter().for_each(|peer| self.disable_peer(machine, context, peer));
        if self.contexts.remove(&context).is_none() {
            return;
        }
        let mut leaks = Vec::new();
        let mut leaked = |what: &str, count: usize| {
            if count > 0 {
                leaks.push(format!("{count} {what}"));
            }
        };
        // The driver's own streams are no leaks.
        let special: Vec<_> = self.special.keys().filter(|k| k.0 == context).copied().collect();
        for stream in special.iter().filter_map(|key| self.special.remove(key)) {
            if let Some(stream) = self.streams.remove(&stream) {
                drop(machine.queue_destroy(stream.queue));
            }
        }
        // The machine refuses calls for objects that were lost with the device.
        let streams = take(&mut self.streams, |s| s.context == context);
        leaked("streams", streams.len());
        streams.into_iter().for_each(|(_, s)| drop(machine.queue_destroy(s.queue)));
        let events = take(&mut self.events, |e| e.context == context);
        leaked("events", events.len());
        events.into_iter().for_each(|(_, e)| drop(machine.event_destroy(e.id)));
        let execs = take(&mut self.execs, |e| e.context == context);
        leaked("executable graphs", execs.len());
        for (_, exec) in execs {
            drop(machine.exec_destroy(exec.id));
            drop(machine.event_destroy(exec.last));
        }
        let partitions = take(&mut self.partitions, |p| p.context == context);
        leaked("partitions", partitions.len());
        partitions.into_iter().for_each(|(_, p)| drop(machine.partition_destroy(p.id)));
        leaked("modules", take(&mut self.modules, |m| m.context == context).len());
        take(&mut self.functions, |f| f.context == context);
        let allocations = take(&mut self.allocations, |a| a.context == context);
        leaked("allocations", allocations.len());
        allocations.into_iter().for_each(|(addr, _)| drop(machine.free(addr)));
        let pinned = take(&mut self.pinned, |p| p.context == context);
        leaked("pinned ranges", pinned.len());
        for (addr, range) in pinned {
            drop(if range.registered {
                machine.host_unregister(addr)
            } else {
                machine.host_free(addr)
            });
        }
        self.leaks.append(&mut leaks);
    }
}

/// Removes and returns all entries that match.
fn take<V>(map: &mut BTreeMap<u64, V>, gone: impl Fn(&V) -> bool) -> Vec<(u64, V)> {
    let keys: Vec<u64> = map.iter().filter(|(_, value)| gone(value)).map(|(&key, _)| key).collect();
    keys.into_iter().filter_map(|key| map.remove_entry(&key)).collect()
}
