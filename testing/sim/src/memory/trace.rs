//! Allocation traces: text of `t_us,op,id,size,stream`, or a memory snapshot of PyTorch (the pickle
//! of `torch.cuda.memory._dump_snapshot`), each plain or compressed with gzip.
//!
//! `op` is `a` (allocate) or `f` (free); sizes are bytes as requested; an id names one allocation
//! and is never used again. A free may name another stream than the allocation did: that stream
//! used the memory last.
//!
//! Of a snapshot, the history of one device is the trace. Blocks from before the history are
//! allocated at its beginning. A block is free once its free is *requested*. Only plain data is
//! read, and nothing of the pickle is run.
//!
//! Limits: 65,536 streams, 67,108,864 lines or events, 256 bytes in a line, 4 GiB of a pickle. A
//! byte order mark before the first line is passed over.

use crate::memory::torch_snapshot;
use leasehold_alloc::Snapshot;
use leasehold_core::{Error, Result};
use leasehold_input::{Cause, LineError, Lines, open, shown};
use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

/// A recorded trace, compressed with gzip: some steps of training a ResNet-50 with PyTorch.
pub static RESNET50_TRAIN: &[u8] = include_bytes!("../../workloads/resnet50_train.csv.gz");

const HEADER: &str = "t_us,op,id,size,stream";
/// The forms of a file, for a message.
const FORMS: &str = "a trace is text of t_us,op,id,size,stream, or a pickle of \
                     torch.cuda.memory._dump_snapshot, each plain or compressed with gzip";
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
    /// Reads a trace from a regular file. As [`Recording::open`], of a snapshot's device with the
    /// most events.
    ///
    /// # Errors
    /// As [`Recording::open`].
    pub fn open(path: &Path) -> Result<Trace> {
        Ok(Recording::open(path, None)?.trace)
    }

    /// Reads a trace and checks it; `name` is for messages. As [`Recording::read`], of a snapshot's
    /// device with the most events.
    ///
    /// # Errors
    /// As [`Recording::read`].
    pub fn read(input: impl Read, name: &str) -> Result<Trace> {
        Ok(Recording::read(input, name, None)?.trace)
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
            let next = lines.next().map_err(|e| match e {
                LineError::NoText | LineError::TooLong(_) if number == 1 => {
                    bad(format!("{e}; {FORMS}"))
                }
                e => bad(e.to_string()),
            });
            let Some(text) = next? else { break };
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

    /// The events of a snapshot of this project's allocator, by way of the text that
    /// [`leasehold_report::trace`] makes of them.
    ///
    /// # Errors
    /// As [`Trace::read`]: a snapshot may have more streams than a trace.
    pub fn recorded(snapshot: &Snapshot) -> Result<Trace> {
        let mut text = Vec::new();
        leasehold_report::trace::write(snapshot, &mut text)?;
        Trace::read(&text[..], "a snapshot")
    }
}

/// A trace of a file, and what was left out of it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recording {
    /// The trace.
    pub trace: Trace,
    /// The part of the file that is not in the trace, in one line: events of other devices.
    pub left_out: Option<String>,
}

impl Recording {
    /// Reads a trace from a regular file. `device` is the number of a device of PyTorch's snapshot;
    /// `None` for the one with the most events.
    ///
    /// # Errors
    /// `NotFound` or `Unavailable` when the file cannot be read; `InvalidArgument` for what is no
    /// regular file; else as [`Recording::read`].
    pub fn open(path: &Path, device: Option<usize>) -> Result<Self> {
        let file = open(path).map_err(|refusal| {
            let text = refusal.to_string();
            match refusal.cause {
                Cause::Missing => Error::NotFound(text.into()),
                Cause::Unreadable => Error::Unavailable(text.into()),
                Cause::NotRegular | Cause::TooLong => Error::invalid(text),
            }
        })?;
        Self::read(file, &path.display().to_string(), device)
    }

    /// Reads a trace of any form and checks it; `name` is for messages. The content of the input
    /// decides on its form. `device` as for [`open`](Self::open).
    ///
    /// # Errors
    /// `InvalidArgument` with name and line number: a malformed line, a free of an unknown or freed
    /// id, an id used twice, input that ends in the middle of a compressed block, more than the
    /// limits of this module. For a pickle with the place instead: classes and other objects that
    /// are no plain data, damage, no snapshot, a snapshot without history. `InvalidArgument` for a
    /// `device` that is not there.
    pub fn read(input: impl Read, name: &str, device: Option<usize>) -> Result<Self> {
        let (first, input) = begin(input, name)?;
        if first != GZIP {
            return Self::decoded(first, input, name, device);
        }
        let (first, input) = begin(flate2::read::MultiGzDecoder::new(input), name)?;
        Self::decoded(first, input, name, device)
    }

    /// Reads what is not compressed.
    fn decoded(
        first: [u8; 2],
        input: impl Read,
        name: &str,
        device: Option<usize>,
    ) -> Result<Self> {
        if torch_snapshot::is_pickle(first[0]) {
            let read = torch_snapshot::read(input, device, LINES);
            let (trace, left_out) = read.map_err(|e| Error::invalid(format!("{name}: {e}")))?;
            return Ok(Self { trace, left_out });
        }
        if let Some(device) = device {
            return Err(Error::invalid(format!(
                "{name}: text, which has no device {device}; a snapshot of PyTorch has devices"
            )));
        }
        Ok(Self { trace: Trace::read_within(LINES, input, name)?, left_out: None })
    }
}

/// How compressed input begins.
const GZIP: [u8; 2] = [0x1F, 0x8B];

/// The first two bytes of an input, zeros where it has none, and the whole input.
fn begin(mut input: impl Read, name: &str) -> Result<([u8; 2], impl Read)> {
    let (mut first, mut there) = ([0; 2], 0);
    while there < first.len() {
        match input.read(&mut first[there..]) {
            Ok(0) => break,
            Ok(n) => there += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(Error::invalid(format!("{name}, line 1: cannot be read: {e}"))),
        }
    }
    Ok((first, std::io::Cursor::new(first).take(there as u64).chain(input)))
}

/// Builds a trace from events whose ids and streams are any numbers.
#[derive(Default)]
pub(crate) struct Recorder {
    trace: Trace,
    ids: HashMap<u64, (u32, u64)>,
    streams: HashMap<u64, u16>,
    live: u64,
}

impl Recorder {
    fn stream(&mut self, stream: u64) -> std::result::Result<u16, String> {
        if let Some(&known) = self.streams.get(&stream) {
            return Ok(known);
        }
        let new = u16::try_from(self.streams.len()).map_err(|_| "more than 65,536 streams")?;
        self.streams.insert(stream, new);
        Ok(new)
    }

    /// Adds an allocation, or nothing at all if that fails.
    pub(crate) fn alloc(
        &mut self,
        t_us: u64,
        id: u64,
        size: u64,
        stream: u64,
    ) -> std::result::Result<(), String> {
        let own = self.trace.allocations;
        let next = own.checked_add(1).ok_or("more than 4,294,967,295 allocations")?;
        let live = self.live.checked_add(size).ok_or("the live sizes overflow")?;
        let stream = self.stream(stream)?;
        self.ids.insert(id, (own, size));
        (self.trace.allocations, self.live) = (next, live);
        self.trace.peak = self.trace.peak.max(self.live);
        self.trace.events.push(Event { t_us, alloc: true, id: own, size, stream });
        Ok(())
    }

    /// Adds a free; nothing for an id that is not live.
    pub(crate) fn free(
        &mut self,
        t_us: u64,
        id: u64,
        stream: u64,
    ) -> std::result::Result<(), String> {
        let Some(&(own, size)) = self.ids.get(&id) else { return Ok(()) };
        let stream = self.stream(stream)?;
        self.ids.remove(&id);
        self.live -= size;
        self.trace.events.push(Event { t_us, alloc: false, id: own, size, stream });
        Ok(())
    }

    /// The number of events so far.
    pub(crate) fn events(&self) -> usize {
        self.trace.events.len()
    }

    pub(crate) fn finish(mut self) -> Trace {
        self.trace.streams = self.streams.len() as u32;
        self.trace
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn numbers_of_ids_and_streams_are_any() -> Result<()> {
        let text = "t_us,op,id,size,stream\n0,a,7,100,3\n5,a,9,50,0\n6,f,7,100,3\n";
        let trace = Trace::read(text.as_bytes(), "test")?;
        assert_eq!(
            (trace.events.len(), trace.allocations, trace.streams, trace.peak),
            (3, 2, 2, 150)
        );
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
            (b'1', "t, line 1: longer than 256 bytes; a trace is text"),
            (b'\n', "t, line 1001: a trace has at most 1000 lines"),
        ] {
            let read = Trace::read_within(1000, std::io::repeat(byte), "t");
            let err = read.map_or_else(|e| e.to_string(), |_| String::new());
            assert!(err.contains(want), "{err}");
        }
    }

    #[test]
    fn a_compressed_line_without_end_is_refused_early() -> Result<()> {
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        let zeros = vec![b'0'; 1 << 20];
        for _ in 0..64 {
            gz.write_all(&zeros).expect("to memory");
        }
        let gz = gz.finish().expect("to memory");
        let err = Trace::read(&gz[..], "t.gz").map_or_else(|e| e.to_string(), |_| String::new());
        assert!(err.contains("t.gz, line 1: longer than 256 bytes"), "{err}");
        Ok(())
    }

    #[test]
    fn a_truncated_archive_is_an_error_with_a_line() -> Result<()> {
        let mut text = String::from("t_us,op,id,size,stream\n");
        for i in 0..1000 {
            text += &format!("{i},a,{i},{},0\n", i * 77 % 1013);
        }
        let trace = Trace::read(text.as_bytes(), "t")?;
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(text.as_bytes()).expect("to memory");
        let mut gz = gz.finish().expect("to memory");
        assert_eq!(Trace::read(&gz[..], "t.gz")?, trace);
        gz.truncate(gz.len() / 2);
        let err = Trace::read(&gz[..], "t.gz").map_or_else(|e| e.to_string(), |_| String::new());
        assert!(err.starts_with("invalid argument: t.gz, line "), "{err}");
        Ok(())
    }
}
