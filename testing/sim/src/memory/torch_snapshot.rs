//! Traces from PyTorch's snapshots: the pickle of `torch.cuda.memory._dump_snapshot`.
//!
//! The history is in `device_traces`, a list of events for each device: `alloc`, `free_requested`
//! and `free_completed` with an address, the bytes as requested (PyTorch 2.1 and newer) and the
//! stream that the block belongs to. A block is free once its free is *requested*, as in PyTorch's
//! own number of allocated bytes: then the program is done with it. The completion comes later if
//! another stream still uses the block, and frees only what no request freed.
//!
//! The history may begin late, because recording began late or its ring was full. A block whose
//! free is in it and whose allocation is not was live before it; so was a block of `segments` that
//! is allocated at the end and does not occur in the history. If recording was off for a time, what
//! happened meanwhile is derived: a block that is allocated at the address of a live one was freed
//! before.

use crate::memory::pickle::{Node, Pickle};
use crate::memory::trace::{Recorder, Trace};
use std::collections::HashMap;
use std::io::Read;

/// The texts that matter.
const WORDS: &[&str] = &[
    "action",
    "active_allocated",
    "addr",
    "address",
    "alloc",
    "blocks",
    "device",
    "device_traces",
    "free_completed",
    "free_requested",
    "requested_size",
    "segments",
    "size",
    "state",
    "stream",
    "time_us",
];

/// Bytes that a pickle may begin with, and a trace as text does not: the mark of a protocol, or of
/// the first protocols a container that is empty or opened.
pub(crate) fn is_pickle(first: u8) -> bool {
    matches!(first, 0x80 | b'(' | b']' | b'}')
}

/// A block of the history.
struct Block {
    /// Its allocation in the trace. `None`: it is free.
    id: Option<u64>,
    stream: u64,
}

/// Builds a trace; an allocation of it is a number.
struct Builder {
    log: Recorder,
    next: u64,
    most: u64,
}

impl Builder {
    fn alloc(&mut self, t_us: u64, size: u64, stream: u64) -> Result<u64, String> {
        self.count()?;
        self.next += 1;
        self.log.alloc(t_us, self.next, size, stream)?;
        Ok(self.next)
    }

    fn free(&mut self, t_us: u64, id: u64, stream: u64) -> Result<(), String> {
        self.count()?;
        self.log.free(t_us, id, stream)
    }

    fn count(&self) -> Result<(), String> {
        if self.log.events() as u64 >= self.most {
            return Err(format!("a trace has at most {} events", self.most));
        }
        Ok(())
    }
}

/// The trace of a snapshot's device, the one with the most events if `device` is `None`; and what
/// was left out, in one line. At most `most` events, and as many blocks.
pub(crate) fn read(
    input: impl Read,
    device: Option<usize>,
    most: u64,
) -> Result<(Trace, Option<String>), String> {
    let pickle = Pickle::read(input, WORDS).map_err(|e| e.to_string())?;
    let root = pickle.root();
    let Some(devices) = root.get("device_traces").filter(|n| n.is_list()) else {
        return Err("a pickle, but no memory snapshot of PyTorch: it has no `device_traces`".into());
    };
    let lengths: Vec<usize> = devices.items().map(|d| d.items().len()).collect();
    let longest = (0..lengths.len()).rev().max_by_key(|&d| lengths[d]).unwrap_or(0);
    let chosen = device.unwrap_or(longest);
    let number = lengths.len();
    let Some(events) = devices.items().nth(chosen) else {
        return Err(format!("device {chosen}: the snapshot has {number} (from 0 on)"));
    };
    if events.items().len() == 0 {
        let cure = "call torch.cuda.memory._record_memory_history() before the work";
        let which =
            if number > 1 { format!("device {chosen} of {number} has") } else { "it has".into() };
        return Err(format!(
            "a snapshot without a history of allocations: {which} no events; {cure}"
        ));
    }
    let trace = trace(root, events, chosen as u64, most)?;
    let others: Vec<String> = lengths
        .iter()
        .enumerate()
        .filter(|&(d, &events)| d != chosen && events > 0)
        .map(|(d, events)| format!("{events} events of device {d}"))
        .take(8)
        .collect();
    let left = (!others.is_empty())
        .then(|| format!("device {chosen} of the snapshot; left out: {}", others.join(", ")));
    Ok((trace, left))
}

fn trace(root: Node<'_>, events: Node<'_>, device: u64, most: u64) -> Result<Trace, String> {
    let field = |n: usize, event: Node<'_>, key: &str| {
        let number = event.get(key).and_then(Node::number);
        number
            .ok_or_else(|| format!("event {n} of device {device}: `{key}` is no number from 0 on"))
    };
    let action = |event: Node<'_>| event.get("action").and_then(Node::word).unwrap_or_default();
    if events.items().len() as u64 > most {
        return Err(format!("a trace has at most {most} events"));
    }
    let mut all = Builder { log: Recorder::default(), next: 0, most };
    let mut blocks: HashMap<u64, Block> = HashMap::new();

    // First the blocks from before the history, in the order in which they leave it.
    for (n, event) in events.items().enumerate() {
        let kind = action(event);
        if !matches!(kind, "alloc" | "free_requested" | "free_completed") {
            continue;
        }
        let addr = field(n, event, "addr")?;
        if blocks.contains_key(&addr) {
            continue;
        }
        let stream = field(n, event, "stream")?;
        let id = match kind {
            "alloc" => None,
            _ => Some(all.alloc(0, field(n, event, "size")?, stream)?),
        };
        blocks.insert(addr, Block { id, stream });
    }
    let mut late = Vec::new();
    for (addr, size, stream) in held(root, device, most)? {
        match blocks.get(&addr) {
            None => drop(all.alloc(0, size, stream)?),
            Some(_) => late.push((addr, size, stream)),
        }
    }

    let mut begin = None;
    let mut now = 0;
    for (n, event) in events.items().enumerate() {
        if let Some(time) = event.get("time_us").and_then(Node::number) {
            // Clocks may step back.
            now = now.max(time.saturating_sub(*begin.get_or_insert(time)));
        }
        let kind = action(event);
        if !matches!(kind, "alloc" | "free_requested" | "free_completed") {
            continue;
        }
        let addr = field(n, event, "addr")?;
        let Some(block) = blocks.get_mut(&addr) else { continue };
        match (kind, block.id) {
            ("alloc", before) => {
                if let Some(before) = before {
                    all.free(now, before, block.stream)?;
                }
                block.stream = field(n, event, "stream")?;
                block.id = Some(all.alloc(now, field(n, event, "size")?, block.stream)?);
            }
            ("free_requested" | "free_completed", Some(id)) => {
                all.free(now, id, block.stream)?;
                block.id = None;
            }
            // A completion after its request, or a free of what is free: its allocation was not
            // recorded.
            _ => {}
        }
    }
    // Blocks that are allocated at the end, and that the history freed before: their allocation
    // was not recorded.
    for (addr, size, stream) in late {
        if blocks.get(&addr).is_some_and(|b| b.id.is_none()) {
            all.alloc(now, size, stream)?;
        }
    }
    let trace = all.log.finish();
    if trace.events.is_empty() {
        return Err(format!("a snapshot without allocations of device {device}"));
    }
    Ok(trace)
}

/// The blocks that are live at the end: address, bytes, stream.
fn held(root: Node<'_>, device: u64, most: u64) -> Result<Vec<(u64, u64, u64)>, String> {
    let mut all = Vec::new();
    let mut seen = 0;
    for segment in root.get("segments").into_iter().flat_map(Node::items) {
        seen += 1;
        let number = |n: Node<'_>, key: &str| n.get(key).and_then(Node::number);
        if number(segment, "device").unwrap_or(0) != device {
            continue;
        }
        let stream = number(segment, "stream").unwrap_or(0);
        let mut at = number(segment, "address").unwrap_or(0);
        for block in segment.get("blocks").into_iter().flat_map(Node::items) {
            seen += 1;
            if seen > most {
                return Err(format!("a snapshot has at most {most} blocks"));
            }
            let size = number(block, "size").unwrap_or(0);
            // Blocks lie one behind the other; those of old versions have no address.
            let addr = number(block, "address").unwrap_or(at);
            at = addr.saturating_add(size);
            let state = block.get("state").and_then(Node::word).unwrap_or_default();
            // The program asked for the free of those that are only active.
            if state == "active_allocated" {
                let requested = number(block, "requested_size").filter(|&n| n > 0);
                all.push((addr, requested.unwrap_or(size), stream));
            }
        }
        if seen > most {
            return Err(format!("a snapshot has at most {most} blocks"));
        }
    }
    Ok(all)
}
