//! An emulation of the structure of PyTorch's native caching allocator.
//!
//! One mutex for the device. Two pools, for requests up to 1 MiB and above, each an ordered set of
//! free blocks by stream, size and address, of which the smallest that fits is taken, of the same
//! stream only. Requests are rounded to 512 bytes; segments are 2 MiB for small requests, 20 MiB
//! for those below 10 MiB, else multiples of 2 MiB; a rest is split off if it is at least 512 bytes
//! (small) or more than 1 MiB (large). Lent blocks lie in a hash set. A block that another stream
//! used is put into that stream's queue with an event, and freed by a later allocation that finds
//! the event done. Without memory, whole free segments go back, then the queues are waited for.

use super::{Figures, Source, over};
use crate::virtual_stream::VirtualStream;
use crate::workload::Subject;
use leasehold_alloc::{Backing, Chunk};
use leasehold_core::sync::Mutex;
use leasehold_core::{Result, TimelineSource, Timepoint};
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

const ROUND: u64 = 512;
const SMALL: u64 = 1 << 20;
const SMALL_SEGMENT: u64 = 2 << 20;
const LARGE_SEGMENT: u64 = 20 << 20;
const LARGE: u64 = 10 << 20;
const ROUND_LARGE: u64 = 2 << 20;
const NIL: u32 = u32::MAX;

/// The emulation.
pub struct TorchLike {
    source: Source,
    state: Mutex<State>,
}

/// A block of [`TorchLike`].
#[derive(Debug)]
#[must_use]
pub struct Block {
    id: u32,
    addr: u64,
    bytes: u64,
}

impl Block {
    /// Its address.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A part of a segment.
#[derive(Clone, Copy)]
struct Part {
    addr: u64,
    bytes: u64,
    stream: u16,
    small: bool,
    lent: bool,
    prev: u32,
    next: u32,
}

#[derive(Default)]
struct State {
    parts: Vec<Part>,
    vacant: Vec<u32>,
    /// By stream, size, address.
    pools: [BTreeSet<(u16, u64, u64, u32)>; 2],
    lent: HashSet<u32>,
    events: HashMap<u16, VecDeque<(Timepoint, u32)>>,
}

impl TorchLike {
    /// The emulation over `backing`, with at most `budget` bytes of it.
    #[must_use]
    pub fn new(backing: Box<dyn Backing>, budget: u64) -> Self {
        Self { source: Source::new(backing, budget), state: Mutex::new(State::default()) }
    }

    /// The memory and the driver calls that the peer took so far.
    #[must_use]
    pub fn figures(&self) -> Figures {
        self.source.figures()
    }

    fn grow(&self, s: &mut State, stream: u16, bytes: u64) -> Option<u32> {
        let small = bytes <= SMALL;
        let segment = match bytes {
            _ if small => SMALL_SEGMENT,
            _ if bytes < LARGE => LARGE_SEGMENT,
            _ => bytes.checked_next_multiple_of(ROUND_LARGE)?,
        };
        let mut chunk = self.source.segment(segment);
        if chunk.is_none() {
            // The allocator waits for all uses by other streams. Then every whole free segment goes
            // back.
            for (_, queue) in std::mem::take(&mut s.events) {
                for (point, id) in queue {
                    self.source.wait(point);
                    s.release(id);
                }
            }
            self.give_back(s);
            chunk = self.source.segment(segment);
        }
        let Chunk { addr, bytes, .. } = chunk?;
        Some(s.part(Part { addr, bytes, stream, small, lent: false, prev: NIL, next: NIL }))
    }

    fn give_back(&self, s: &mut State) {
        for pool in 0..2 {
            let parts = &s.parts;
            let whole = |e: &(u16, u64, u64, u32)| {
                parts[e.3 as usize].prev == NIL && parts[e.3 as usize].next == NIL
            };
            let gone: Vec<_> = s.pools[pool].iter().copied().filter(whole).collect();
            for e in gone {
                // SAFETY: a whole segment that is cached, so no block lies in it; it leaves the
                // cache here.
                if unsafe { self.source.give_back(Chunk { addr: e.2, bytes: e.1, native: 0 }) }
                    .is_ok()
                {
                    s.pools[pool].remove(&e);
                    s.vacant.push(e.3);
                }
            }
        }
    }
}

impl State {
    fn part(&mut self, part: Part) -> u32 {
        match self.vacant.pop() {
            Some(id) => {
                self.parts[id as usize] = part;
                id
            }
            None => {
                self.parts.push(part);
                self.parts.len() as u32 - 1
            }
        }
    }

    fn key(&self, id: u32) -> (u16, u64, u64, u32) {
        let p = &self.parts[id as usize];
        (p.stream, p.bytes, p.addr, id)
    }

    /// Events that are done free their blocks; each stream's queue is looked at up to the first
    /// that is not.
    fn process_events(&mut self) {
        let mut done = Vec::new();
        for queue in self.events.values_mut() {
            while let Some(&(point, id)) = queue.front() {
                if !over(point) {
                    break;
                }
                queue.pop_front();
                done.push(id);
            }
        }
        done.into_iter().for_each(|id| self.release(id));
    }

    /// Puts a block into its pool, merged with its free neighbours.
    fn release(&mut self, id: u32) {
        let mut part = self.parts[id as usize];
        part.lent = false;
        let pool = usize::from(!part.small);
        for (neighbour, lower) in [(part.prev, true), (part.next, false)] {
            if neighbour == NIL || self.parts[neighbour as usize].lent {
                continue;
            }
            let key = self.key(neighbour);
            self.pools[pool].remove(&key);
            let n = self.parts[neighbour as usize];
            part.bytes += n.bytes;
            if lower {
                part.addr = n.addr;
                part.prev = n.prev;
                if n.prev != NIL {
                    self.parts[n.prev as usize].next = id;
                }
            } else {
                part.next = n.next;
                if n.next != NIL {
                    self.parts[n.next as usize].prev = id;
                }
            }
            self.vacant.push(neighbour);
        }
        self.parts[id as usize] = part;
        let key = self.key(id);
        self.pools[pool].insert(key);
    }
}

impl Subject for TorchLike {
    type Block = Block;
    type Stream = VirtualStream;

    fn stream(&self) -> Result<VirtualStream> {
        VirtualStream::new()
    }

    fn alloc(&self, on: &VirtualStream, size: u64) -> Option<Block> {
        let bytes = size.max(1).checked_next_multiple_of(ROUND)?;
        let stream = on.timeline().id().get();
        let mut s = self.state.lock();
        s.process_events();
        let small = bytes <= SMALL;
        let pool = usize::from(!small);
        let found =
            s.pools[pool].range((stream, bytes, 0, 0)..).next().filter(|e| e.0 == stream).copied();
        let id = match found {
            Some(e) => {
                s.pools[pool].remove(&e);
                e.3
            }
            None => self.grow(&mut s, stream, bytes)?,
        };
        let part = s.parts[id as usize];
        let rest = part.bytes - bytes;
        if if small { rest >= ROUND } else { rest > SMALL } {
            let upper = Part { addr: part.addr + bytes, bytes: rest, prev: id, ..part };
            let upper_id = s.part(Part { lent: false, ..upper });
            if part.next != NIL {
                s.parts[part.next as usize].prev = upper_id;
            }
            let p = &mut s.parts[id as usize];
            (p.bytes, p.next) = (bytes, upper_id);
            let key = s.key(upper_id);
            s.pools[pool].insert(key);
        }
        s.parts[id as usize].lent = true;
        s.lent.insert(id);
        let p = s.parts[id as usize];
        Some(Block { id, addr: p.addr, bytes: p.bytes })
    }

    fn free(&self, on: &VirtualStream, block: Block) {
        let mut s = self.state.lock();
        let part = s.parts.get(block.id as usize).map(|p| (p.addr, p.bytes));
        let own = part == Some((block.addr, block.bytes)) && s.lent.remove(&block.id);
        assert!(own, "a block of another allocator");
        let stream = on.timeline().id().get();
        if stream == s.parts[block.id as usize].stream {
            s.release(block.id);
        } else {
            let point = on.timeline().now();
            s.events.entry(stream).or_default().push_back((point, block.id));
        }
    }
}

impl Drop for TorchLike {
    fn drop(&mut self) {
        let mut s = std::mem::take(self.state.get_mut());
        for (_, queue) in std::mem::take(&mut s.events) {
            queue.into_iter().for_each(|(_, id)| s.release(id));
        }
        self.give_back(&mut s);
    }
}
