//! Allocation traces: `t_us,op,id,size,stream`, plain or compressed.
//!
//! `op` is `a` (allocate) or `f` (free); sizes are bytes as requested; an id names one allocation
//! and is never used again. A free may name another stream than the allocation did: that stream
//! used the memory last.
//!
//! Limits: 65,536 streams, 67,108,864 lines, 256 bytes in a line. A byte order mark before the
//! first line is passed over.

use leasehold_alloc::{BlockState, EventKind, Snapshot};
use leasehold_core::{Error, Result};
use leasehold_input::{Cause, Lines, open, shown};
use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::path::Path;

const HEADER: &str = "t_us,op,id,size,stream";
/// Bytes of a line: three times the longest that says something.
const LINE: usize = 256;
/// Lines of a trace, empty ones included.
const LINES: u64 = 1 << 26;

/// One event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Microseconds since the beginning.
    pub t_us: u64,
    /// An allocation; otherwise a free.
    pub alloc: bool,
    /// The allocation, counted from zero in the order of the trace.
    pub id: u32,
    /// Bytes.
    pub size: u64,
    /// The stream, counted from zero in the order of the trace.
    pub stream: u16,
}

/// A trace that was read and found consistent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    /// The events, in order.
    pub events: Vec<Event>,
    /// How many allocations there are; ids are below.
    pub allocations: u32,
    /// How many streams there are, at most 65,536.
    pub streams: u32,
    /// The most bytes that were requested and live at one time.
    pub peak: u64,
}

impl Trace {
    /// Reads a trace from a regular file; compressed if its name ends in `.gz`.
    ///
    /// # Errors
    /// `NotFound` or `Unavailable` when the file cannot be read; `Unsupported` for a compressed
    /// file without the feature `gzip`; `InvalidArgument` for what is no regular file; else as
    /// [`Trace::read`].
    pub fn open(path: &Path) -> Result<Trace> {
        let file = open(path).map_err(|refusal| {
            let text = refusal.to_string();
            match refusal.cause {
                Cause::Missing => Error::NotFound(text.into()),
                Cause::Unreadable => Error::Unavailable(text.into()),
                Cause::NotRegular | Cause::TooLong => Error::invalid(text),
            }
        })?;
        let name = path.display().to_string();
        if path.extension().is_some_and(|e| e == "gz") {
            Self::read_gzip(file, &name)
        } else {
            Self::read(file, &name)
        }
    }

    /// Reads a compressed trace; `name` is for messages.
    ///
    /// # Errors
    /// As [`Trace::read`]; `Unsupported` without the feature `gzip`.
    #[cfg(feature = "gzip")]
    pub fn read_gzip(input: impl Read, name: &str) -> Result<Trace> {
        Self::read(flate2::read::MultiGzDecoder::new(input), name)
    }

    /// Reads a compressed trace; `name` is for messages.
    ///
    /// # Errors
    /// Always `Unsupported`: the feature `gzip` is off.
    #[cfg(not(feature = "gzip"))]
    pub fn read_gzip(_: impl Read, name: &str) -> Result<Trace> {
        Err(Error::Unsupported(format!("{name}: built without the feature `gzip`").into()))
    }

    /// Reads a trace and checks it; `name` is for messages.
    ///
    /// # Errors
    /// `InvalidArgument` with name and line number: a malformed line, a free of an unknown or freed
    /// id, an id used twice, input that ends in the middle of a compressed block, more than the
    /// limits of this module.
    pub fn read(input: impl Read, name: &str) -> Result<Trace> {
        Self::read_within(LINES, input, name)
    }

    fn read_within(most: u64, input: impl Read, name: &str) -> Result<Trace> {
        let mut trace = Trace::default();
        let mut ids: HashMap<u64, (u32, u64)> = HashMap::new();
        let mut freed: Vec<bool> = Vec::new();
        let mut streams: HashMap<u64, u16> = HashMap::new();
        let (mut live, mut number) = (0u64, 0u64);
        let mut lines = Lines::new(input, LINE);
        loop {
            number += 1;
            let bad = |what: String| Error::invalid(format!("{name}, line {number}: {what}"));
            let Some(text) = lines.next().map_err(|e| bad(e.to_string()))? else { break };
            if number > most {
                return Err(bad(format!("a trace has at most {most} lines")));
            }
            if text.is_empty() || number == 1 && text == HEADER {
                continue;
            }
            let mut fields = text.split(',');
            let mut next =
                |what: &str| fields.next().ok_or_else(|| bad(format!("no {what} (want {HEADER})")));
            let (t, op, id, size, stream) =
                (next("time")?, next("op")?, next("id")?, next("size")?, next("stream")?);
            if fields.next().is_some() {
                return Err(bad(format!("too many fields (want {HEADER})")));
            }
            let int = |what: &str, s: &str| {
                s.parse::<u64>().map_err(|_| bad(format!("{what} `{}` is not a number", shown(s))))
            };
            let (t_us, id, size) = (int("time", t)?, int("id", id)?, int("size", size)?);
            let stream = int("stream", stream)?;
            let next_stream = streams.len();
            let stream = match streams.get(&stream) {
                Some(&s) => s,
                None => {
                    let s = u16::try_from(next_stream)
                        .map_err(|_| bad("more than 65,536 streams".into()))?;
                    streams.insert(stream, s);
                    s
                }
            };
            let alloc = match op {
                "a" => true,
                "f" => false,
                other => return Err(bad(format!("op `{}` is neither `a` nor `f`", shown(other)))),
            };
            let (id, size) = if alloc {
                let new = trace.allocations;
                if ids.insert(id, (new, size)).is_some() {
                    return Err(bad(format!("id {id} is allocated twice")));
                }
                trace.allocations = new
                    .checked_add(1)
                    .ok_or_else(|| bad("more than 4,294,967,295 allocations".into()))?;
                freed.push(false);
                live =
                    live.checked_add(size).ok_or_else(|| bad("the live sizes overflow".into()))?;
                trace.peak = trace.peak.max(live);
                (new, size)
            } else {
                let &(own, bytes) =
                    ids.get(&id).ok_or_else(|| bad(format!("free of id {id}, never allocated")))?;
                if std::mem::replace(&mut freed[own as usize], true) {
                    return Err(bad(format!("id {id} is freed twice")));
                }
                live -= bytes;
                (own, bytes)
            };
            trace.events.push(Event { t_us, alloc, id, size, stream });
        }
        trace.streams = streams.len() as u32;
        Ok(trace)
    }

    /// The events of a snapshot's ring, as a trace. Buffers that were allocated before the ring's
    /// oldest event, and freed later or still held, are allocated at its beginning, as a workload's
    /// weights are.
    #[must_use]
    pub fn recorded(snapshot: &Snapshot) -> Trace {
        let mut log = Recorder::default();
        let begin = snapshot.events.first().map_or(0, |e| e.t_us);
        let known: HashSet<u64> =
            snapshot.events.iter().filter(|e| e.kind == EventKind::Alloc).map(|e| e.id).collect();
        for e in
            snapshot.events.iter().filter(|e| e.kind == EventKind::Free && !known.contains(&e.id))
        {
            log.alloc(begin, e.id, e.size, e.stream);
        }
        let blocks = snapshot.segments.iter().flat_map(|s| &s.blocks);
        for b in blocks.filter(|b| b.state == BlockState::Live && !known.contains(&b.id)) {
            log.alloc(begin, b.id, b.requested, b.stream);
        }
        for e in &snapshot.events {
            match e.kind {
                EventKind::Alloc => log.alloc(e.t_us, e.id, e.size, e.stream),
                EventKind::Free => log.free(e.t_us, e.id, e.stream),
                _ => {}
            }
        }
        log.trace.streams = log.streams.len() as u32;
        log.trace
    }

    /// Writes the trace as CSV.
    ///
    /// # Errors
    /// `Unavailable` when writing fails.
    pub fn write(&self, mut out: impl Write) -> Result<()> {
        let mut go = || -> std::io::Result<()> {
            writeln!(out, "{HEADER}")?;
            for e in &self.events {
                let op = if e.alloc { 'a' } else { 'f' };
                writeln!(out, "{},{op},{},{},{}", e.t_us, u64::from(e.id) + 1, e.size, e.stream)?;
            }
            out.flush()
        };
        go().map_err(|e| Error::Unavailable(format!("the trace cannot be written: {e}").into()))
    }

    /// Writes the trace as compressed CSV.
    ///
    /// # Errors
    /// `Unavailable` when writing fails.
    #[cfg(feature = "gzip")]
    pub fn write_gzip(&self, out: impl Write) -> Result<()> {
        let mut gz = flate2::write::GzEncoder::new(out, flate2::Compression::default());
        self.write(&mut gz)?;
        gz.finish()
            .map(|_| ())
            .map_err(|e| Error::Unavailable(format!("the trace cannot be written: {e}").into()))
    }
}

/// Builds a trace from events whose ids and streams are any numbers.
#[derive(Default)]
struct Recorder {
    trace: Trace,
    ids: HashMap<u64, (u32, u64)>,
    streams: HashMap<u16, u16>,
    live: u64,
}

impl Recorder {
    fn stream(&mut self, stream: u16) -> u16 {
        let next = self.streams.len() as u16;
        *self.streams.entry(stream).or_insert(next)
    }

    fn alloc(&mut self, t_us: u64, id: u64, size: u64, stream: u16) {
        let own = self.trace.allocations;
        let stream = self.stream(stream);
        self.ids.insert(id, (own, size));
        self.trace.allocations += 1;
        self.live += size;
        self.trace.peak = self.trace.peak.max(self.live);
        self.trace.events.push(Event { t_us, alloc: true, id: own, size, stream });
    }

    fn free(&mut self, t_us: u64, id: u64, stream: u16) {
        let Some((own, size)) = self.ids.remove(&id) else { return };
        let stream = self.stream(stream);
        self.live -= size;
        self.trace.events.push(Event { t_us, alloc: false, id: own, size, stream });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() -> Result<()> {
        let text = "t_us,op,id,size,stream\n0,a,7,100,3\n5,a,9,50,0\n6,f,7,100,3\n";
        let trace = Trace::read(text.as_bytes(), "test")?;
        assert_eq!(
            (trace.events.len(), trace.allocations, trace.streams, trace.peak),
            (3, 2, 2, 150)
        );
        let mut out = Vec::new();
        trace.write(&mut out)?;
        assert_eq!(Trace::read(&out[..], "again")?, trace);
        Ok(())
    }

    #[test]
    fn malformed_traces_are_refused_with_their_line() {
        let cases = [
            ("0,a,1,100,0\n1,f,2,1,0\n", "line 2: free of id 2, never allocated"),
            ("0,a,1,100,0\n1,f,1,1,0\n2,f,1,1,0\n", "line 3: id 1 is freed twice"),
            ("0,a,1,100,0\n0,a,1,100,0\n", "line 2: id 1 is allocated twice"),
            ("0,a,1,100\n", "line 1: no stream"),
            ("0,a,1,-4,0\n", "line 1: size `-4`"),
            ("0,x,1,4,0\n", "line 1: op `x`"),
            ("0,a,1,4,0,9\n", "line 1: too many fields"),
            ("0,a,1,18446744073709551615,0\n0,a,2,1,0\n", "line 2: the live sizes overflow"),
            ("0,\u{1b}[2J\r,1,4,0\n", "line 1: op `\\u{1b}[2J\\r`"),
        ];
        for (text, want) in cases {
            let err = Trace::read(text.as_bytes(), "t.csv")
                .map_or_else(|e| e.to_string(), |_| String::new());
            assert!(err.contains(want), "{text:?}: {err}");
        }
    }

    #[test]
    fn every_number_of_streams_up_to_the_limit_is_counted() {
        let text = |n: u32| (0..n).map(|i| format!("{i},a,{i},8,{i}\n")).collect::<String>();
        for n in [65_535, 65_536] {
            assert_eq!(Trace::read(text(n).as_bytes(), "t").map(|t| t.streams).ok(), Some(n));
        }
        let err = Trace::read(text(65_537).as_bytes(), "t")
            .map_or_else(|e| e.to_string(), |_| String::new());
        assert!(err.ends_with("t, line 65537: more than 65,536 streams"), "{err}");
    }

    #[test]
    fn a_mark_is_passed_over_and_endless_lines_are_refused() {
        let text = "\u{feff}t_us,op,id,size,stream\r\n0,a,7,100,3\r\n";
        assert_eq!(Trace::read(text.as_bytes(), "t").map(|t| t.events.len()).ok(), Some(1));
        for (byte, want) in [
            (b'1', "t, line 1: longer than 256 bytes"),
            (b'\n', "t, line 1001: a trace has at most 1000 lines"),
        ] {
            let read = Trace::read_within(1000, std::io::repeat(byte), "t");
            let err = read.map_or_else(|e| e.to_string(), |_| String::new());
            assert!(err.ends_with(want), "{err}");
        }
    }

    #[cfg(feature = "gzip")]
    #[test]
    fn a_compressed_line_without_end_is_refused_early() -> Result<()> {
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        let zeros = vec![b'0'; 1 << 20];
        for _ in 0..64 {
            gz.write_all(&zeros).expect("to memory");
        }
        let gz = gz.finish().expect("to memory");
        let err =
            Trace::read_gzip(&gz[..], "t.gz").map_or_else(|e| e.to_string(), |_| String::new());
        assert!(err.ends_with("t.gz, line 1: longer than 256 bytes"), "{err}");
        Ok(())
    }

    #[cfg(feature = "gzip")]
    #[test]
    fn a_truncated_archive_is_an_error_with_a_line() -> Result<()> {
        let mut text = String::from("t_us,op,id,size,stream\n");
        for i in 0..1000 {
            text += &format!("{i},a,{i},{},0\n", i * 77 % 1013);
        }
        let trace = Trace::read(text.as_bytes(), "t")?;
        let mut gz = Vec::new();
        trace.write_gzip(&mut gz)?;
        assert_eq!(Trace::read_gzip(&gz[..], "t.gz")?, trace);
        gz.truncate(gz.len() / 2);
        let err =
            Trace::read_gzip(&gz[..], "t.gz").map_or_else(|e| e.to_string(), |_| String::new());
        assert!(err.starts_with("invalid argument: t.gz, line "), "{err}");
        Ok(())
    }
}
