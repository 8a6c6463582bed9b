//! An emulation of the structure of RMM's pool memory resource.
//!
//! One mutex. Each stream has a free list, ordered by address, in which a freed block is merged
//! with its neighbours and the best fit is looked for from the beginning to the end. A stream that
//! finds nothing takes from another stream's list, which it merges with its own and first waits
//! for; then the pool grows, by as much as it has, or as much as is asked for. Requests are rounded
//! to 256 bytes. The event that a real pool records at each free costs nothing here.

use super::{Figures, Source};
use crate::virtual_stream::VirtualStream;
use crate::workload::Subject;
use leasehold_alloc::{Backing, Chunk};
use leasehold_core::sync::Mutex;
use leasehold_core::{Result, TimelineSource, Timepoint};
use std::collections::BTreeMap;

const ROUND: u64 = 256;
const FIRST: u64 = 32 << 20;
const NIL: u32 = u32::MAX;

/// The emulation.
pub struct RmmLike {
    source: Source,
    state: Mutex<State>,
}

/// A block of [`RmmLike`].
#[derive(Debug)]
#[must_use]
pub struct Block {
    /// Its address.
    pub addr: u64,
    /// Its bytes.
    pub bytes: u64,
    head: bool,
}

#[derive(Clone, Copy)]
struct Node {
    addr: u64,
    bytes: u64,
    /// The first block of a segment is never merged with what lies below it.
    head: bool,
    next: u32,
}

/// A list ordered by address.
struct List {
    first: u32,
    last_free: Timepoint,
}

#[derive(Default)]
struct State {
    nodes: Vec<Node>,
    vacant: Vec<u32>,
    lists: BTreeMap<u16, List>,
    segments: Vec<Chunk>,
    total: u64,
}

impl State {
    fn node(&mut self, node: Node) -> u32 {
        match self.vacant.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() as u32 - 1
            }
        }
    }

    /// Takes the best fit of a list: a walk over all of it.
    fn take(&mut self, stream: u16, bytes: u64) -> Option<Block> {
        let list = self.lists.get_mut(&stream)?;
        let (mut at, mut prev) = (list.first, NIL);
        let (mut best, mut before) = (NIL, NIL);
        while at != NIL {
            let n = &self.nodes[at as usize];
            if n.bytes >= bytes && (best == NIL || n.bytes < self.nodes[best as usize].bytes) {
                (best, before) = (at, prev);
                if n.bytes == bytes {
                    break;
                }
            }
            (prev, at) = (at, n.next);
        }
        if best == NIL {
            return None;
        }
        let n = self.nodes[best as usize];
        if n.bytes > bytes {
            self.nodes[best as usize] =
                Node { addr: n.addr + bytes, bytes: n.bytes - bytes, head: false, ..n };
        } else {
            if before == NIL {
                list.first = n.next;
            } else {
                self.nodes[before as usize].next = n.next;
            }
            self.vacant.push(best);
        }
        Some(Block { addr: n.addr, bytes, head: n.head })
    }

    /// Inserts a block, merged with its neighbours: a walk to its place.
    fn put(&mut self, stream: u16, at_point: Timepoint, Block { addr, bytes, head }: Block) {
        let list = self.lists.entry(stream).or_insert(List { first: NIL, last_free: at_point });
        list.last_free = at_point;
        let (mut at, mut prev) = (list.first, NIL);
        while at != NIL && self.nodes[at as usize].addr < addr {
            (prev, at) = (at, self.nodes[at as usize].next);
        }
        let mut node = Node { addr, bytes, head, next: at };
        if at != NIL {
            let n = self.nodes[at as usize];
            if addr + bytes == n.addr && !n.head {
                (node.bytes, node.next) = (bytes + n.bytes, n.next);
                self.vacant.push(at);
            }
        }
        if prev != NIL {
            let p = self.nodes[prev as usize];
            if p.addr + p.bytes == addr && !head {
                self.nodes[prev as usize] =
                    Node { bytes: p.bytes + node.bytes, next: node.next, ..p };
                return;
            }
        }
        let id = self.node(node);
        if prev == NIL {
            if let Some(list) = self.lists.get_mut(&stream) {
                list.first = id;
            }
        } else {
            self.nodes[prev as usize].next = id;
        }
    }
}

impl RmmLike {
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
}

impl Subject for RmmLike {
    type Block = Block;
    type Stream = VirtualStream;

    fn stream(&self) -> Result<VirtualStream> {
        VirtualStream::new()
    }

    fn alloc(&self, on: &VirtualStream, size: u64) -> Option<Block> {
        let bytes = size.max(1).checked_next_multiple_of(ROUND)?;
        let stream = on.timeline().id().get();
        let mut s = self.state.lock();
        if let Some(block) = s.take(stream, bytes) {
            return Some(block);
        }
        // From another stream: its whole list is merged into this one's.
        let others: Vec<u16> = s.lists.keys().copied().filter(|&o| o != stream).collect();
        for other in others {
            let Some(list) = s.lists.remove(&other) else { continue };
            self.source.wait(list.last_free);
            let mut at = list.first;
            while at != NIL {
                let Node { addr, bytes, head, next } = s.nodes[at as usize];
                s.vacant.push(at);
                s.put(stream, on.timeline().now(), Block { addr, bytes, head });
                at = next;
            }
            if let Some(block) = s.take(stream, bytes) {
                return Some(block);
            }
        }
        let mut want = s.total.max(FIRST).max(bytes);
        let chunk = loop {
            if let Some(chunk) = self.source.segment(want) {
                break chunk;
            }
            if want == bytes {
                return None;
            }
            want = (want / 2).max(bytes);
        };
        s.total += chunk.bytes;
        s.segments.push(chunk);
        s.put(
            stream,
            on.timeline().now(),
            Block { addr: chunk.addr, bytes: chunk.bytes, head: true },
        );
        s.take(stream, bytes)
    }

    fn free(&self, on: &VirtualStream, block: Block) {
        self.state.lock().put(on.timeline().id().get(), on.timeline().now(), block);
    }
}

impl Drop for RmmLike {
    fn drop(&mut self) {
        for chunk in std::mem::take(&mut self.state.get_mut().segments) {
            // A segment that the driver does not take back is its own fault.
            // SAFETY: the peer goes with its blocks; each of its segments is in the list once.
            let _ = unsafe { self.source.give_back(chunk) };
        }
    }
}
