//! The memory of KV caches: that of their longest texts, or what the texts need so far.
//!
//! Memory that grows does so by positions. So all heads of a position lie together, those of
//! several layers too: a *band*. A sequence has two growing parts for each band, of keys and of
//! values. Eight layers to a band cost the reads little, and leave little memory unused.
//!
//! This file must not know what a sequence is, nor when its text gets longer.

use crate::model::Model;
use leasehold::{Error, Growing, Name, Result, Runtime, Stream, View};
use leasehold_operators::kernels::cpu::cache::CacheLayout;
use leasehold_operators::{BufferPart, ops};
use std::ops::Range;
use std::sync::mpsc::{Sender, channel};
use std::thread;

/// The most layers of a band.
const BAND: usize = 8;
/// Positions before the end of the memory at which more is taken ahead.
const AHEAD: usize = 16;

/// The memory of the caches of some sequences, if it grows.
pub(crate) struct Growth {
    parts: Growing<u8>,
    /// Parts of a sequence.
    each: usize,
    /// Bytes of a position in a part.
    position: u64,
    /// Bytes that the device maps at once.
    granule: u64,
    /// The device can share memory between parts.
    forks: bool,
    /// Of each sequence: the bytes of a part that were asked for ahead.
    asked: Vec<u64>,
    ahead: Ahead,
}

/// The bytes of caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheBytes {
    /// The bytes with memory. Memory that sequences share counts for each of them.
    pub committed: u64,
    /// Of these, the bytes of beginnings that sequences have in common, or had.
    pub shared: u64,
    /// The bytes with addresses: all positions of all sequences.
    pub most: u64,
}

/// The caches of each layer of `rows` sequences, one behind the other, and their growth. Memory
/// grows where the device can do so, and where a sequence could do with less than its maximum.
pub(crate) fn caches(
    model: &Model,
    heads: ops::Heads,
    rows: usize,
    grows: bool,
) -> Result<(Vec<ops::Cache>, Option<Growth>)> {
    let _named = Name::new("kv cache").scope();
    let growth = if grows { Growth::new(model, heads, rows)? } else { None };
    let layers = model.own().num_hidden_layers;
    if let Some((growth, layout)) = growth {
        let layer = |at| ops::Cache::growing(heads, &growth.parts, layout(at), model.activations());
        let caches = (0..layers).map(layer).collect::<Result<_>>()?;
        return Ok((caches, Some(growth)));
    }
    let row =
        (model.own().kv_width() * heads.positions as usize * model.activations().bytes()) as u64;
    let bytes = row.checked_mul(rows as u64).ok_or_else(|| too_large(rows, heads))?;
    let caches = (0..layers).map(|_| {
        // An operator that appends declares the whole cache, so it must be initialised.
        let [keys, values] = [zeroed(model.runtime(), bytes)?, zeroed(model.runtime(), bytes)?];
        Ok(ops::Cache::contiguous(heads, keys, values, model.activations()))
    });
    Ok((caches.collect::<Result<_>>()?, None))
}

/// Zeroed device memory.
pub(crate) fn zeroed(runtime: &Runtime, bytes: u64) -> Result<BufferPart> {
    let buffer = runtime.alloc(bytes)?;
    runtime.stream().fill(buffer.view(), 0u8)?;
    Ok(buffer.into())
}

fn too_large(rows: usize, heads: ops::Heads) -> Error {
    Error::invalid(format!(
        "{rows} sequences of {} positions have larger caches than there are addresses; make them fewer or shorter",
        heads.positions
    ))
}

fn multiple(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

impl Growth {
    /// Memory for `rows` sequences, and the layout of each layer. `None` if it would not grow.
    fn new(
        model: &Model,
        heads: ops::Heads,
        rows: usize,
    ) -> Result<Option<(Self, impl Fn(usize) -> CacheLayout + use<>)>> {
        let (runtime, layers) = (model.runtime(), model.own().num_hidden_layers);
        let granule = runtime.allocator().caps().granule;
        let forks = runtime.raw_device().caps().forks;
        // Ranks take the same steps, and memory may lack on one of them alone.
        if !runtime.raw_device().caps().growing || model.parts.part.has_others() {
            return Ok(None);
        }
        let bands = layers.div_ceil(BAND);
        let band = layers.div_ceil(bands) as u32;
        let head = u64::from(heads.head_dim) * model.activations().bytes() as u64;
        let of_position = band * heads.kv_heads;
        let position = u64::from(of_position) * head;
        let bytes = position.checked_mul(heads.positions.into());
        let bytes = bytes.ok_or_else(|| too_large(rows, heads))?;
        let most = bytes.checked_next_multiple_of(multiple(granule, head));
        let most = most.ok_or_else(|| too_large(rows, heads))?;
        let (Ok(part), true) = (u32::try_from(most / head), bytes > granule) else {
            return Ok(None);
        };
        let each = 2 * bands;
        let parts = Growing::<u8>::with_parts(runtime, rows * each, most as usize)?;
        let ahead = Ahead::new(parts.clone())?;
        let asked = vec![0; rows];
        let layout = move |layer: usize| CacheLayout {
            position: of_position,
            head: 1,
            part,
            offset: layer as u32 % band * heads.kv_heads,
            keys: layer as u32 / band * 2,
            values: layer as u32 / band * 2 + 1,
            next: each as u32,
            limits: 0,
        };
        Ok(Some((Self { parts, each, position, granule, forks, asked, ahead }, layout)))
    }

    fn parts(&self, row: usize) -> Range<usize> {
        row * self.each..(row + 1) * self.each
    }

    /// The first part of a sequence.
    fn first(&self, row: usize) -> Growing<u8> {
        self.parts.parts(row * self.each..row * self.each + 1)
    }

    /// The bytes of a part with so many positions, in whole granules.
    fn bytes(&self, positions: usize) -> u64 {
        let bytes = self.position * positions as u64;
        bytes.next_multiple_of(self.granule).min(self.parts.most() as u64)
    }

    /// The positions of a sequence that have memory.
    pub(crate) fn room(&self, row: usize) -> usize {
        self.first(row).len() / self.position as usize
    }

    /// Takes memory for so many positions of a sequence. After an error all is as it was.
    pub(crate) fn grow(&mut self, stream: &Stream, row: usize, positions: usize) -> Result<()> {
        let (parts, bytes) = (self.parts.parts(self.parts(row)), self.bytes(positions) as usize);
        if parts.try_grow(stream, bytes)? {
            return Ok(());
        }
        // One thread at a time maps memory for a part.
        self.ahead.finish();
        parts.grow(stream, bytes)
    }

    /// The bytes of a part, within so many positions, that parts can share. A granule and a piece
    /// of so many positions end there.
    fn sharable(&self, positions: usize, piece: usize) -> u64 {
        let whole = multiple(self.granule, self.position * piece.max(1) as u64);
        self.position * positions as u64 / whole * whole
    }

    /// Returns whether sequences share memory if they have so many positions in common.
    pub(crate) fn shares(&self, positions: usize, piece: usize) -> bool {
        self.forks && self.sharable(positions, piece) > 0
    }

    /// Gives a sequence without memory the beginning of another one's: as much as lies in whole
    /// granules and pieces, of so many positions. Returns the positions, 0 if the device cannot do
    /// it now. May block on the driver.
    pub(crate) fn share(
        &mut self,
        stream: &Stream,
        (from, to): (usize, usize),
        positions: usize,
        piece: usize,
    ) -> Result<usize> {
        let bytes = self.sharable(positions, piece);
        // One thread at a time maps memory for a part.
        self.ahead.finish();
        let mut least = bytes;
        for (from, to) in self.parts(from).zip(self.parts(to)) {
            match self.parts.fork_part(stream, from, to, bytes as usize) {
                Ok(len) => {
                    least = least.min(self.sharable(len / self.position as usize, piece));
                }
                // Work may still use what the place had before. Then the prompt is computed.
                Err(_) => least = 0,
            }
        }
        self.parts.parts(self.parts(to)).shrink(stream, least as usize)?;
        Ok((least / self.position) as usize)
    }

    /// The bytes that [`grow`](Self::grow) would take, if nothing lies ready.
    pub(crate) fn missing(&self, row: usize, positions: usize) -> u64 {
        let parts = self.parts(row).map(|part| self.parts.parts(part..part + 1).len() as u64);
        parts.map(|len| self.bytes(positions).saturating_sub(len)).sum()
    }

    /// Has memory for the positions after those that a sequence has taken ahead, once it is near
    /// its end. Does not wait.
    pub(crate) fn ahead(&mut self, row: usize, filled: usize, positions: usize) {
        let bytes = self.bytes((filled + AHEAD).min(positions));
        if bytes > self.first(row).len() as u64 && bytes > self.asked[row] {
            self.asked[row] = bytes;
            self.ahead.ask(self.parts(row), bytes);
        }
    }

    /// A sequence has ended. Its memory stays mapped until somebody needs it, and the next sequence
    /// in its place finds it.
    pub(crate) fn end(&mut self, stream: &Stream, row: usize) -> Result<()> {
        self.asked[row] = 0;
        self.parts.parts(self.parts(row)).shrink(stream, 0)
    }

    /// Waits for what is taken ahead.
    #[cfg(test)]
    pub(crate) fn settle(&self) {
        self.ahead.finish();
    }

    pub(crate) fn cache_bytes(&self) -> CacheBytes {
        let most = (self.parts.most() * self.parts.count()) as u64;
        let shared = |part| self.parts.parts(part..part + 1).shared() as u64;
        let shared = (0..self.parts.count()).map(shared).sum();
        CacheBytes { committed: self.parts.committed(), shared, most }
    }
}

/// A thread that takes memory ahead.
struct Ahead {
    jobs: Option<Sender<Job>>,
    thread: Option<thread::JoinHandle<()>>,
}

enum Job {
    Prepare(Range<usize>, u64),
    /// All jobs so far are done.
    Finished(Sender<()>),
}

impl Ahead {
    fn new(parts: Growing<u8>) -> Result<Self> {
        let (jobs, todo) = channel();
        let run = move || {
            for job in todo {
                match job {
                    // Without memory the step itself says so, if it still needs it.
                    Job::Prepare(range, bytes) => drop(parts.parts(range).prepare(bytes as usize)),
                    Job::Finished(to) => drop(to.send(())),
                }
            }
        };
        let thread = thread::Builder::new().name("lh-caches".to_owned()).spawn(run);
        let thread = thread.map_err(|e| Error::state(format!("no thread for caches: {e}")))?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread) })
    }

    fn ask(&self, parts: Range<usize>, bytes: u64) {
        if let Some(jobs) = &self.jobs {
            drop(jobs.send(Job::Prepare(parts, bytes)));
        }
    }

    /// Waits for what was asked.
    fn finish(&self) {
        let (to, done) = channel();
        if let Some(jobs) = &self.jobs
            && jobs.send(Job::Finished(to)).is_ok()
        {
            let _ = done.recv();
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}
