//! The snapshot, as read from its JSON. Every field may be missing.

use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// A device: its pools, or one allocator.
#[derive(Debug, Default)]
pub(crate) struct Device {
    pub(crate) name: String,
    /// The command that made the page.
    pub(crate) command: Option<String>,
    /// When it did: seconds since the beginning of 1970.
    pub(crate) made: Option<u64>,
    /// The most bytes that all pools together take.
    pub(crate) budget: Option<u64>,
    pub(crate) pools: Vec<Pool>,
    /// The caller's stream of a timeline's number.
    pub(crate) handles: BTreeMap<String, u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Pool {
    pub(crate) name: String,
    pub(crate) suspended: bool,
    pub(crate) memory: Memory,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Memory {
    pub(crate) stats: BTreeMap<String, Value>,
    pub(crate) segments: Vec<Segment>,
    pub(crate) events: Vec<Event>,
    pub(crate) events_lost: u64,
    /// The names of tags.
    pub(crate) names: BTreeMap<u32, String>,
    /// The names of streams.
    pub(crate) streams: BTreeMap<u16, String>,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(crate) struct Segment {
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    pub(crate) paged: bool,
    pub(crate) blocks: Vec<Block>,
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(default)]
pub(crate) struct Block {
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    pub(crate) requested: u64,
    pub(crate) state: State,
    pub(crate) stream: u16,
    pub(crate) tag: u32,
    pub(crate) id: u64,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum State {
    Live,
    Ready,
    Pending,
    Cached,
    /// Held back, moving, or lost.
    #[default]
    #[serde(other)]
    Other,
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(default)]
pub(crate) struct Event {
    pub(crate) kind: Kind,
    pub(crate) t_us: u64,
    pub(crate) id: u64,
    pub(crate) size: u64,
    pub(crate) stream: u16,
    pub(crate) tag: u32,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    Alloc,
    Free,
    SegmentAlloc,
    SegmentFree,
    OutOfMemory,
    Growth,
    Trim,
    Remap,
    HostWait,
    StreamWait,
    /// A part of another event, or one that this version does not know.
    #[default]
    #[serde(other)]
    Other,
}

/// The fields at the top of both forms of a snapshot.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Top {
    device: Option<String>,
    command: Option<String>,
    made: Option<u64>,
    budget: Option<u64>,
    pools: Option<Vec<Pool>>,
    name: Option<String>,
    stats: Option<BTreeMap<String, Value>>,
    segments: Vec<Segment>,
    events: Vec<Event>,
    events_lost: u64,
    names: BTreeMap<u32, String>,
    streams: BTreeMap<String, Value>,
}

/// Reads a device's snapshot, or an allocator's.
pub(crate) fn read(text: &str) -> Result<Device, String> {
    let top: Top = serde_json::from_str(text).map_err(|e| e.to_string())?;
    if let Some(pools) = top.pools {
        let handles = top.streams.iter().filter_map(|(k, v)| Some((k.clone(), v.as_u64()?)));
        let handles = handles.collect();
        let budget = top.budget.filter(|&b| b != u64::MAX);
        let (name, command, made) = (top.device.unwrap_or_default(), top.command, top.made);
        return Ok(Device { name, command, made, budget, pools, handles });
    }
    let stats = top.stats.unwrap_or_default();
    let streams = top.streams.iter().filter_map(|(k, v)| Some((k.parse().ok()?, v.as_str()?)));
    let streams = streams.map(|(k, v)| (k, v.to_owned())).collect();
    let budget = stats.get("limit").and_then(Value::as_u64).filter(|&b| b != u64::MAX);
    let memory = Memory {
        stats,
        segments: top.segments,
        events: top.events,
        events_lost: top.events_lost,
        names: top.names,
        streams,
    };
    let pool = Pool { memory, ..Pool::default() };
    Ok(Device {
        name: top.name.or(top.device).unwrap_or_default(),
        command: top.command,
        made: top.made,
        budget,
        pools: if pool.memory.is_empty() { Vec::new() } else { vec![pool] },
        handles: BTreeMap::new(),
    })
}

impl Memory {
    /// Whether nothing is known.
    pub(crate) fn is_empty(&self) -> bool {
        self.stats.is_empty() && self.segments.is_empty() && self.events.is_empty()
    }

    /// A number of the statistics.
    pub(crate) fn stat(&self, key: &str) -> Option<u64> {
        self.stats.get(key).and_then(Value::as_u64)
    }
}
