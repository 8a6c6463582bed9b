//! Best fit over one growing range, blind to streams: what is free is free for everybody at once.
//! No real device could use it so; it is the textbook's line that a stream-aware allocator is held
//! against.

use super::{Figures, Source};
use crate::virtual_stream::VirtualStream;
use crate::workload::Subject;
use leasehold_alloc::{Backing, Chunk};
use leasehold_core::sync::Mutex;
use leasehold_core::{Result, TimelineSource};
use std::collections::{BTreeMap, BTreeSet};

const UNIT: u64 = 512;

/// Best fit with immediate coalescing, under a mutex.
pub struct BestFit {
    source: Source,
    base: u64,
    span: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    end: u64,
    /// The commitments, which go back one by one.
    chunks: Vec<Chunk>,
    by_addr: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
}

/// A block of [`BestFit`].
#[derive(Debug)]
#[must_use]
pub struct Block {
    /// Its address.
    pub addr: u64,
    /// Its bytes.
    pub bytes: u64,
}

impl BestFit {
    /// A range of `backing`, of which at most `budget` bytes are taken.
    ///
    /// # Errors
    /// `Unsupported` for a backing that cannot reserve addresses; what reserving says.
    pub fn new(backing: Box<dyn Backing>, budget: u64) -> Result<Self> {
        if !backing.caps().reserve {
            return Err(leasehold_core::Error::Unsupported(
                "best fit needs a backing that reserves addresses".into(),
            ));
        }
        let span = backing
            .caps()
            .physical
            .saturating_mul(2)
            .min(1 << 40)
            .next_multiple_of(backing.caps().granule);
        let base = backing.reserve(span)?;
        let state = Mutex::new(State { end: base, ..State::default() });
        Ok(Self { source: Source::new(backing, budget), base, span, state })
    }

    /// The memory and the driver calls that the peer took so far.
    #[must_use]
    pub fn figures(&self) -> Figures {
        self.source.figures()
    }
}

impl State {
    fn insert(&mut self, mut addr: u64, mut bytes: u64) {
        if let Some((&at, &len)) = self.by_addr.range(..addr).next_back()
            && at + len == addr
        {
            self.remove(at, len);
            (addr, bytes) = (at, len + bytes);
        }
        if let Some((&at, &len)) = self.by_addr.range(addr..).next()
            && addr + bytes == at
        {
            self.remove(at, len);
            bytes += len;
        }
        self.by_addr.insert(addr, bytes);
        self.by_size.insert((bytes, addr));
    }

    fn remove(&mut self, addr: u64, bytes: u64) {
        self.by_addr.remove(&addr);
        self.by_size.remove(&(bytes, addr));
    }
}

impl Subject for BestFit {
    type Block = Block;
    type Stream = VirtualStream;

    fn stream(&self) -> Result<VirtualStream> {
        VirtualStream::new()
    }

    fn alloc(&self, _: &VirtualStream, size: u64) -> Option<Block> {
        let bytes = size.max(1).checked_next_multiple_of(UNIT)?;
        let mut s = self.state.lock();
        let mut found = s.by_size.range((bytes, 0)..).next().copied();
        if found.is_none() {
            // The range grows by what the last free block lacks.
            let tail =
                s.by_addr.last_key_value().filter(|(a, n)| *a + *n == s.end).map_or(0, |(_, &n)| n);
            let more =
                (bytes - tail).checked_next_multiple_of(self.source.backing.caps().granule)?;
            let end = s.end;
            let room = self.base + self.span - end;
            if more > room || !self.source.take(more) {
                return None;
            }
            // SAFETY: the range lies in this peer's reservation, behind all that was committed so
            // far.
            let Ok(chunk) = (unsafe { self.source.backing.commit(Some(end), more) }) else {
                self.source.undo(more);
                return None;
            };
            s.chunks.push(chunk);
            s.end += more;
            s.insert(end, more);
            found = s.by_size.range((bytes, 0)..).next().copied();
        }
        let (len, addr) = found?;
        s.remove(addr, len);
        if len > bytes {
            s.by_addr.insert(addr + bytes, len - bytes);
            s.by_size.insert((len - bytes, addr + bytes));
        }
        Some(Block { addr, bytes })
    }

    fn free(&self, on: &VirtualStream, block: Block) {
        debug_assert!(on.timeline().submitted() >= on.timeline().completed());
        self.state.lock().insert(block.addr, block.bytes);
    }
}

impl Drop for BestFit {
    fn drop(&mut self) {
        for chunk in std::mem::take(&mut self.state.get_mut().chunks) {
            // A range that the driver does not take back is its own fault.
            // SAFETY: the peer goes, and with it every block of what it committed.
            let _ = unsafe { self.source.backing.decommit(chunk) };
        }
        // SAFETY: reserved when the peer was made; what was committed in it was just given back.
        unsafe { self.source.backing.release(self.base, self.span) };
    }
}
