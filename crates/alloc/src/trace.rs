//! The trace of an allocator: a ring of its newest events, written without a lock by any thread.
//!
//! # Protocol
//! A writer takes the next number with one `fetch_add`; the number says the slot. It claims the
//! slot by a CAS that makes the slot's `seq` odd, writes the words, and makes `seq` even again,
//! `2 * number + 2`. A writer that finds the slot claimed, or used by a later number (it was
//! overtaken by a whole round), gives its event up. A reader takes `seq`, the words, and `seq`
//! again, and uses the words only if both are the same even value. Nobody waits for anybody.
//!
//! Numbers are a total order in which the event of a free comes before that of the next allocation
//! of the same memory: the first is recorded before the memory goes back, the second after it was
//! taken.

use crate::buffer::Row;
use crate::host;
use crate::residency::{End, Source, Step};
use leasehold_core::sync::CachePadded;
use leasehold_core::sync::atomic::{AtomicU64, Ordering, fence};
use leasehold_core::{Error, Result, TimelineId};
use std::time::Instant;

const WORDS: usize = 5;

#[derive(Default)]
struct Slot {
    seq: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// The trace ring.
pub(crate) struct Ring {
    head: CachePadded<AtomicU64>,
    slots: Box<[Slot]>,
    begin: Instant,
}

/// The most events that a ring remembers.
pub(crate) const MOST_EVENTS: usize = 1 << 24;

impl Ring {
    /// A ring of the newest `n` events; of 0 events it records nothing.
    ///
    /// # Errors
    /// `InvalidArgument` for more than [`MOST_EVENTS`], `OutOfMemory` for host memory.
    pub(crate) fn new(n: usize) -> Result<Self> {
        if n > MOST_EVENTS {
            let text = format!("{n} events of a trace: at most {MOST_EVENTS} are remembered");
            return Err(Error::invalid(text));
        }
        let mut slots = Vec::new();
        slots.try_reserve_exact(n).map_err(|_| host::none(n * size_of::<Slot>()))?;
        slots.resize_with(n, Slot::default);
        Ok(Self {
            head: CachePadded::new(AtomicU64::new(0)),
            slots: slots.into_boxed_slice(),
            begin: Instant::now(),
        })
    }

    /// Records an event; its time is now. Never waits.
    pub(crate) fn record(
        &self,
        kind: EventKind,
        id: u64,
        addr: u64,
        size: u64,
        stream: u16,
        tag: u32,
    ) {
        if !self.is_on() {
            return;
        }
        let t_us =
            u64::try_from(self.begin.elapsed().as_micros()).unwrap_or(u64::MAX) & (u64::MAX >> 8);
        let number = self.head.fetch_add(1, Ordering::Relaxed);
        let slot = &self.slots[(number % self.slots.len() as u64) as usize];
        let (odd, even) = (number * 2 + 1, number * 2 + 2);
        let seen = slot.seq.load(Ordering::Relaxed);
        let free = seen & 1 == 0 && seen < odd;
        if !free
            || slot.seq.compare_exchange(seen, odd, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return;
        }
        fence(Ordering::Release);
        let words =
            [t_us << 8 | kind as u64, id, addr, size, u64::from(stream) << 32 | u64::from(tag)];
        for (word, value) in slot.words.iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        slot.seq.store(even, Ordering::Release);
    }

    /// The events there are, oldest first, and how many were lost: overwritten, or given up to an
    /// overtaking writer.
    pub(crate) fn read(&self) -> (Vec<TraceEvent>, u64) {
        let head = self.head.load(Ordering::Acquire);
        let first = head.saturating_sub(self.slots.len() as u64);
        let mut events = Vec::with_capacity((head - first) as usize);
        for number in first..head {
            let slot = &self.slots[(number % self.slots.len() as u64) as usize];
            if slot.seq.load(Ordering::Acquire) != number * 2 + 2 {
                continue;
            }
            let words: [u64; WORDS] =
                std::array::from_fn(|i| slot.words[i].load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            if slot.seq.load(Ordering::Relaxed) == number * 2 + 2
                && let Some(event) = decode(words)
            {
                events.push(event);
            }
        }
        let lost = head - events.len() as u64;
        (events, lost)
    }

    /// Returns whether anything is recorded.
    fn is_on(&self) -> bool {
        !self.slots.is_empty()
    }

    /// Records what became of memory of the driver's.
    pub(crate) fn memory(&self, kind: EventKind, addr: u64, bytes: u64) {
        self.record(kind, 0, addr, bytes, 0, 0);
    }

    /// Records what steps mapped and unmapped, and what they took, moved and gave back in all.
    /// Before anybody else may have the addresses.
    pub(crate) fn steps(&self, steps: &[Step]) {
        if !self.is_on() {
            return;
        }
        let (mut taken, mut moved, mut given) = (0, 0, 0);
        for s in steps {
            match (s.source, s.end) {
                (Source::New, End::Untouched | End::Destroyed) => {}
                (Source::New, _) => taken += s.bytes,
                (_, End::Destroyed) => given += s.bytes,
                (Source::Reclaimed { .. } | Source::Aliased { .. }, End::Mapped) => {
                    moved += s.bytes
                }
                _ => {}
            }
            if let (Some(from), true) =
                (s.source_addr(), !matches!(s.end, End::Untouched | End::LostAtSource))
            {
                self.memory(EventKind::Unmap, from, s.bytes);
            }
            if s.end == End::Mapped {
                self.memory(EventKind::Map, s.addr, s.bytes);
            }
        }
        let sums =
            [(EventKind::Growth, taken), (EventKind::Remap, moved), (EventKind::Trim, given)];
        for (kind, bytes) in sums.into_iter().filter(|&(_, bytes)| bytes > 0) {
            self.memory(kind, 0, bytes);
        }
    }

    /// Records a wait for a stream.
    pub(crate) fn wait(&self, kind: EventKind, stream: TimelineId, us: u64) {
        self.record(kind, 0, 0, us, stream.get(), 0);
    }

    /// Records an allocation.
    pub(crate) fn alloc(&self, row: &Row, stream: TimelineId, tag: u32) {
        let b = &row.buffer;
        self.record(EventKind::Alloc, id_of(row), b.addr(), b.len(), stream.get(), tag);
    }

    /// Records an allocation of `bytes` that failed.
    pub(crate) fn failed(&self, bytes: u64, stream: TimelineId, tag: u32) {
        self.record(EventKind::OutOfMemory, 0, 0, bytes, stream.get(), tag);
    }

    /// Records a free.
    pub(crate) fn free(&self, row: &Row) {
        let b = &row.buffer;
        let home = b.home_timeline();
        // The stream that used it last, where that is another one.
        let mut stream = home;
        b.for_each_use(|s| {
            if stream == home && !s.has_passed() {
                stream = s.timeline_id();
            }
        });
        self.record(EventKind::Free, id_of(row), b.addr(), b.len(), stream.get(), b.tag());
    }
}

/// A name of the allocation that holds the row, never used again.
pub(crate) fn id_of(row: &Row) -> u64 {
    u64::from(row.header.generation()) << 32 | u64::from(row.header.index())
}

/// The kind of an event of the trace ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[repr(u8)]
#[non_exhaustive]
pub enum EventKind {
    /// A buffer was allocated.
    Alloc = 1,
    /// The last lease of a buffer was dropped.
    Free = 2,
    /// The backing gave a segment.
    SegmentAlloc = 3,
    /// A segment went back.
    SegmentFree = 4,
    /// Memory was mapped at reserved addresses.
    Map = 5,
    /// It was unmapped.
    Unmap = 6,
    /// An allocation failed; the address is 0.
    OutOfMemory = 7,
    /// Physical memory was taken from the driver, in pieces; each is then mapped. (A segment says
    /// it itself.)
    Growth = 8,
    /// Pieces went back to the driver.
    Trim = 9,
    /// Memory under free blocks was moved; each piece is unmapped and mapped.
    Remap = 10,
    /// The host waited for a stream, for an allocation.
    HostWait = 11,
    /// The stream that asked was made to wait for another one's memory.
    StreamWait = 12,
}

/// An event of the trace ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct TraceEvent {
    /// The kind of event.
    pub kind: EventKind,
    /// Microseconds since the allocator was made.
    pub t_us: u64,
    /// The buffer, for an allocation and its free: never used again. Otherwise 0.
    pub id: u64,
    /// The address.
    pub addr: u64,
    /// Bytes: of buffers, as asked for. Microseconds of a host's wait; 0 of a stream's.
    pub size: u64,
    /// The number of a stream's timeline: that asked, that used the buffer last, or that was waited
    /// for.
    pub stream: u16,
    /// The release tag at that time.
    pub tag: u32,
}

fn decode(w: [u64; WORDS]) -> Option<TraceEvent> {
    let kind = match w[0] as u8 {
        1 => EventKind::Alloc,
        2 => EventKind::Free,
        3 => EventKind::SegmentAlloc,
        4 => EventKind::SegmentFree,
        5 => EventKind::Map,
        6 => EventKind::Unmap,
        7 => EventKind::OutOfMemory,
        8 => EventKind::Growth,
        9 => EventKind::Trim,
        10 => EventKind::Remap,
        11 => EventKind::HostWait,
        12 => EventKind::StreamWait,
        _ => return None,
    };
    Some(TraceEvent {
        kind,
        t_us: w[0] >> 8,
        id: w[1],
        addr: w[2],
        size: w[3],
        stream: (w[4] >> 32) as u16,
        tag: w[4] as u32,
    })
}

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/ring.rs"]
mod tests;

#[cfg(all(test, loom))]
#[path = "../tests/unit/ring_models.rs"]
mod models;
