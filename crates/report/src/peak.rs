//! The holders of live memory: at the peak of the recorded events, or now.

use crate::model::{Kind, Memory, State};
use crate::series::Series;
use std::collections::HashMap;

/// A buffer that was live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) bytes: u64,
    pub(crate) tag: u32,
    pub(crate) stream: u16,
    /// When it was allocated; `None`: before the first event.
    pub(crate) since: Option<u64>,
    /// When it was freed; `None`: it is live.
    pub(crate) until: Option<u64>,
}

/// The buffers that were live at the peak, largest first. Without events, those that are live now.
pub(crate) fn holders(memory: &Memory, series: &Series) -> Vec<Holder> {
    let end = series.live_peak.event.map_or(0, |i| i + 1);
    let blocks = || {
        let all = memory.segments.iter().flat_map(|s| &s.blocks);
        all.filter(|b| b.state == State::Live)
    };
    // A buffer's tag may be set after its allocation: the free and the block know it.
    let mut tags: HashMap<u64, u32> = blocks().map(|b| (b.id, b.tag)).collect();
    let mut freed: HashMap<u64, u64> = HashMap::new();
    let mut allocated: HashMap<u64, usize> = HashMap::new();
    for (i, e) in memory.events.iter().enumerate() {
        match e.kind {
            Kind::Alloc => {
                allocated.insert(e.id, i);
            }
            Kind::Free => {
                freed.insert(e.id, e.t_us);
                tags.insert(e.id, e.tag);
            }
            _ => {}
        }
    }
    let mut live: HashMap<u64, Holder> = HashMap::new();
    // A block from before the first event has a free without an allocation, or is still live.
    for b in blocks().filter(|b| !allocated.contains_key(&b.id)) {
        let bytes = b.requested;
        live.insert(b.id, Holder { bytes, tag: b.tag, stream: b.stream, since: None, until: None });
    }
    for e in memory.events.iter().filter(|e| e.kind == Kind::Free) {
        if !allocated.contains_key(&e.id) {
            let holder = Holder {
                bytes: e.size,
                tag: e.tag,
                stream: e.stream,
                since: None,
                until: Some(e.t_us),
            };
            live.insert(e.id, holder);
        }
    }
    for e in &memory.events[..end] {
        match e.kind {
            Kind::Alloc => {
                let holder = Holder {
                    bytes: e.size,
                    tag: tags.get(&e.id).copied().unwrap_or(e.tag),
                    stream: e.stream,
                    since: Some(e.t_us),
                    until: freed.get(&e.id).copied(),
                };
                live.insert(e.id, holder);
            }
            Kind::Free => {
                live.remove(&e.id);
            }
            _ => {}
        }
    }
    let mut all: Vec<Holder> = live.into_values().collect();
    all.sort_by_key(|h| (std::cmp::Reverse(h.bytes), h.since, h.tag, h.stream, h.until));
    all
}

/// Equal buffers: of one name, length and stream, and all live or all freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Equal {
    pub(crate) count: u64,
    /// The first of them; freed when the last of them is.
    pub(crate) first: Holder,
}

/// The holders by equal ones, those with the most bytes first.
pub(crate) fn equal(holders: &[Holder]) -> Vec<Equal> {
    let mut places = HashMap::new();
    let mut all: Vec<Equal> = Vec::new();
    for h in holders {
        let place =
            places.entry((h.tag, h.bytes, h.stream, h.until.is_none())).or_insert(all.len());
        match all.get_mut(*place) {
            Some(same) => {
                same.count += 1;
                same.first.until = same.first.until.max(h.until);
            }
            None => all.push(Equal { count: 1, first: *h }),
        }
    }
    all.sort_by_key(|e| std::cmp::Reverse(e.first.bytes.saturating_mul(e.count)));
    all
}

/// The sums of the holders with one tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Total {
    pub(crate) tag: u32,
    pub(crate) count: u64,
    pub(crate) bytes: u64,
}

/// The sums by tag, largest first.
pub(crate) fn by_tag(holders: &[Holder]) -> Vec<Total> {
    let mut sums: HashMap<u32, Total> = HashMap::new();
    for h in holders {
        let sum = sums.entry(h.tag).or_insert(Total { tag: h.tag, count: 0, bytes: 0 });
        sum.count += 1;
        sum.bytes = sum.bytes.saturating_add(h.bytes);
    }
    let mut all: Vec<Total> = sums.into_values().collect();
    all.sort_by_key(|t| (std::cmp::Reverse(t.bytes), t.tag));
    all
}
