//! Snapshots for PyTorch's `memory_viz`: a pickle, written here, in the shape of
//! `torch.cuda.memory._snapshot()`.
//!
//! Both readers are served: Python's `pickle.load`, and the viewer's own, which knows fewer opcodes
//! and replays the trace backwards from the snapshot. For the latter every free is a pair
//! `free_requested`, `free_completed`, all segments bear stream 0, so that neighbours may be joined
//! and cut, and the blocks of a segment tile it. A release tag shows as a stack frame named
//! `tag N`.

use leasehold_alloc::{BlockInfo, BlockState, EventKind, Segment, Snapshot, TraceEvent};
use leasehold_core::{Error, Result, ShownTag};
use std::collections::HashMap;
use std::io::{self, Write};

/// Items of a list that travel together: the viewer's reader puts them on its stack as arguments of
/// one call.
const BATCH: usize = 512;

/// Writes the snapshot as a pickle that PyTorch's `memory_viz` page and `torch/cuda/_memory_viz.py`
/// read. The memory is device 0.
///
/// # Errors
/// `Unavailable` when writing fails.
pub fn write(snapshot: &Snapshot, out: impl Write) -> Result<()> {
    let mut p = Pickler { out: io::BufWriter::new(out), memo: HashMap::new() };
    pickle(snapshot, &mut p)
        .and_then(|()| p.out.flush())
        .map_err(|e| Error::Unavailable(format!("the snapshot cannot be written: {e}").into()))
}

fn pickle<W: Write>(snapshot: &Snapshot, p: &mut Pickler<W>) -> io::Result<()> {
    // The tag is set after the allocation: events learn it from the free, or from the block.
    let mut tags: HashMap<u64, u32> = HashMap::new();
    for b in
        snapshot.segments.iter().flat_map(|s| &s.blocks).filter(|b| b.state == BlockState::Live)
    {
        tags.insert(b.id, b.tag);
    }
    for e in snapshot.events.iter().filter(|e| e.kind == EventKind::Free) {
        tags.insert(e.id, e.tag);
    }
    let stats = &snapshot.stats;
    let room = if stats.limit == u64::MAX { 0 } else { stats.limit.saturating_sub(stats.reserved) };
    p.op(&[0x80, 2])?;
    p.dict(|p| {
        p.key("segments")?;
        p.list(snapshot.segments.iter(), segment)?;
        p.key("device_traces")?;
        p.list(std::iter::once(()), |p, ()| {
            let entries =
                snapshot.events.iter().flat_map(|e| actions(e).iter().map(move |a| (e, *a)));
            p.list(entries, |p, (e, action)| {
                entry(p, e, action, tags.get(&e.id).copied().unwrap_or(0), room)
            })
        })?;
        p.key("allocator_settings")?;
        p.dict(|p| {
            p.key("allocator")?;
            p.text("leasehold")?;
            p.key("name")?;
            p.text(&snapshot.name)?;
            p.key("events_lost")?;
            p.int(snapshot.events_lost)
        })?;
        p.key("external_annotations")?;
        p.list(std::iter::empty::<()>(), |_, ()| Ok(()))
    })?;
    p.op(b".")
}

fn actions(e: &TraceEvent) -> &'static [&'static str] {
    match e.kind {
        EventKind::Alloc => &["alloc"],
        EventKind::Free => &["free_requested", "free_completed"],
        EventKind::SegmentAlloc => &["segment_alloc"],
        EventKind::SegmentFree => &["segment_free"],
        EventKind::Map => &["segment_map"],
        EventKind::Unmap => &["segment_unmap"],
        EventKind::OutOfMemory => &["oom"],
        // The viewer knows no more.
        _ => &[],
    }
}

fn entry<W: Write>(
    p: &mut Pickler<W>,
    e: &TraceEvent,
    action: &'static str,
    tag: u32,
    room: u64,
) -> io::Result<()> {
    p.dict(|p| {
        p.key("action")?;
        p.key(action)?;
        if e.kind == EventKind::OutOfMemory {
            p.entry("device_free", room)?;
        } else {
            p.entry("addr", e.addr)?;
        }
        p.entry("size", e.size)?;
        p.entry("stream", e.stream.into())?;
        p.entry("time_us", e.t_us)?;
        frames(p, tag)
    })
}

fn segment<W: Write>(p: &mut Pickler<W>, s: &Segment) -> io::Result<()> {
    let live = |f: fn(&BlockInfo) -> u64| {
        s.blocks.iter().filter(|b| b.state == BlockState::Live).map(f).sum::<u64>()
    };
    p.dict(|p| {
        p.entry("device", 0)?;
        p.entry("address", s.addr)?;
        p.entry("total_size", s.bytes)?;
        p.entry("allocated_size", live(|b| b.bytes))?;
        p.entry("active_size", live(|b| b.bytes))?;
        p.entry("requested_size", live(|b| b.requested))?;
        p.entry("stream", 0)?;
        p.key("segment_type")?;
        p.key("large")?;
        p.key("segment_pool_id")?;
        p.op(b"K\0K\0\x86")?;
        p.key("is_expandable")?;
        p.op(if s.paged { &[0x88] } else { &[0x89] })?;
        frames(p, 0)?;
        p.key("blocks")?;
        p.list(s.blocks.iter(), |p, b| {
            p.dict(|p| {
                p.entry("address", b.addr)?;
                p.entry("size", b.bytes)?;
                p.entry("requested_size", b.requested)?;
                p.key("state")?;
                // Freed memory that a stream still uses is no hindrance to that stream: the
                // viewer's "pending" means another thing.
                p.key(if b.state == BlockState::Live { "active_allocated" } else { "inactive" })?;
                frames(p, b.tag)
            })
        })
    })
}

fn frames<W: Write>(p: &mut Pickler<W>, tag: u32) -> io::Result<()> {
    p.key("frames")?;
    p.list((tag != 0).then_some(tag).into_iter(), |p, tag| {
        p.dict(|p| {
            p.key("name")?;
            p.text(&ShownTag(tag).to_string())?;
            p.key("filename")?;
            p.key("leasehold")?;
            p.entry("line", 0)
        })
    })
}

/// Writes protocol 2, with the opcodes that both readers know.
struct Pickler<W: Write> {
    out: io::BufWriter<W>,
    memo: HashMap<&'static str, u8>,
}

impl<W: Write> Pickler<W> {
    fn op(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)
    }

    fn dict(&mut self, fill: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        self.op(b"}(")?;
        fill(self)?;
        self.op(b"u")
    }

    fn list<T>(
        &mut self,
        mut items: impl Iterator<Item = T>,
        mut item: impl FnMut(&mut Self, T) -> io::Result<()>,
    ) -> io::Result<()> {
        self.op(b"]")?;
        while let Some(first) = items.next() {
            self.op(b"(")?;
            item(self, first)?;
            items.by_ref().take(BATCH - 1).try_for_each(|i| item(self, i))?;
            self.op(b"e")?;
        }
        Ok(())
    }

    fn entry(&mut self, key: &'static str, value: u64) -> io::Result<()> {
        self.key(key)?;
        self.int(value)
    }

    /// A word that comes often: written once, then referred to.
    fn key(&mut self, word: &'static str) -> io::Result<()> {
        if let Some(&at) = self.memo.get(word) {
            return self.op(&[b'h', at]);
        }
        self.text(word)?;
        let Ok(at) = u8::try_from(self.memo.len()) else { return Ok(()) };
        self.memo.insert(word, at);
        self.op(&[b'q', at])
    }

    fn text(&mut self, text: &str) -> io::Result<()> {
        self.op(b"X")?;
        self.op(&(text.len() as u32).to_le_bytes())?;
        self.op(text.as_bytes())
    }

    fn int(&mut self, n: u64) -> io::Result<()> {
        match n {
            0..=0xFF => self.op(&[b'K', n as u8]),
            0x100..=0xFFFF => {
                self.op(b"M")?;
                self.op(&(n as u16).to_le_bytes())
            }
            0x1_0000..=0x7FFF_FFFF => {
                self.op(b"J")?;
                self.op(&(n as u32).to_le_bytes())
            }
            _ => {
                // Nine bytes where the eighth would read as a sign.
                let mut bytes = [0; 9];
                bytes[..8].copy_from_slice(&n.to_le_bytes());
                let len = if n >> 63 == 1 { 9 } else { 8 };
                self.op(&[0x8A, len as u8])?;
                self.op(&bytes[..len])
            }
        }
    }
}
