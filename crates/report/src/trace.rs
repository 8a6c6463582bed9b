//! Traces of allocations and frees, made of a snapshot's events: text of `t_us,op,id,size,stream`,
//! which `leasehold-workbench replay` plays.
//!
//! `op` is `a` (allocate) or `f` (free). Ids count from one, and an id names one allocation. A free
//! may name another stream than the allocation did: that stream used the memory last.

use leasehold_alloc::{BlockState, EventKind, Snapshot};
use leasehold_core::{Error, Result};
use std::collections::{HashMap, HashSet};
use std::io::{self, Write};

const HEADER: &str = "t_us,op,id,size,stream";

/// Writes the events of a snapshot.
///
/// Buffers that were allocated before the ring's oldest event, and freed later or still held, are
/// allocated at its beginning, as a workload's weights are. An allocation is left out if the live
/// bytes exceed 64 bits with it.
///
/// # Errors
/// `Unavailable` when writing fails.
pub fn write(snapshot: &Snapshot, out: impl Write) -> Result<()> {
    let mut log = Log { out: io::BufWriter::new(out), ids: HashMap::new(), next: 1, live: 0 };
    record(snapshot, &mut log).and_then(|()| log.out.flush()).map_err(unwritten)
}

/// Writes the same, compressed with gzip.
///
/// # Errors
/// As [`write()`].
#[cfg(feature = "gzip")]
pub fn write_gzip(snapshot: &Snapshot, out: impl Write) -> Result<()> {
    let mut gz = flate2::write::GzEncoder::new(out, flate2::Compression::default());
    write(snapshot, &mut gz)?;
    gz.finish().map(drop).map_err(unwritten)
}

fn unwritten(e: io::Error) -> Error {
    Error::Unavailable(format!("the trace cannot be written: {e}").into())
}

fn record<W: Write>(snapshot: &Snapshot, log: &mut Log<W>) -> io::Result<()> {
    writeln!(log.out, "{HEADER}")?;
    let begin = snapshot.events.first().map_or(0, |e| e.t_us);
    let known: HashSet<u64> =
        snapshot.events.iter().filter(|e| e.kind == EventKind::Alloc).map(|e| e.id).collect();
    for e in snapshot.events.iter().filter(|e| e.kind == EventKind::Free && !known.contains(&e.id))
    {
        log.alloc(begin, e.id, e.size, e.stream)?;
    }
    let blocks = snapshot.segments.iter().flat_map(|s| &s.blocks);
    for b in blocks.filter(|b| b.state == BlockState::Live && !known.contains(&b.id)) {
        log.alloc(begin, b.id, b.requested, b.stream)?;
    }
    for e in &snapshot.events {
        match e.kind {
            EventKind::Alloc => log.alloc(e.t_us, e.id, e.size, e.stream)?,
            EventKind::Free => log.free(e.t_us, e.id, e.stream)?,
            _ => {}
        }
    }
    Ok(())
}

/// The lines so far.
struct Log<W: Write> {
    out: io::BufWriter<W>,
    /// Of each live allocation its number in the trace, and its bytes.
    ids: HashMap<u64, (u64, u64)>,
    next: u64,
    live: u64,
}

impl<W: Write> Log<W> {
    /// Writes an allocation, unless the live bytes overflow.
    fn alloc(&mut self, t_us: u64, id: u64, size: u64, stream: u16) -> io::Result<()> {
        let Some(live) = self.live.checked_add(size) else { return Ok(()) };
        self.ids.insert(id, (self.next, size));
        writeln!(self.out, "{t_us},a,{},{size},{stream}", self.next)?;
        (self.live, self.next) = (live, self.next + 1);
        Ok(())
    }

    /// Writes a free; nothing for an id that is not live.
    fn free(&mut self, t_us: u64, id: u64, stream: u16) -> io::Result<()> {
        let Some((own, size)) = self.ids.remove(&id) else { return Ok(()) };
        self.live -= size;
        writeln!(self.out, "{t_us},f,{own},{size},{stream}")
    }
}
