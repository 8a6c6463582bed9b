//! Several sequences decoded at once, each with its own KV caches, position and sampling.
//!
//! Each operator of a step serves all sequences in one launch, so the weights are read once. Every
//! position and every sampling is in device memory, so one recording serves all of them. A slot without a sequence has a position
//! outside its caches. Kernels write nothing to a cache there, and the slot's rows are NaN.

use crate::count::{self, OperatorCount};
use crate::decoder::{Lane, Lanes, Network, Scratch};
use crate::generate::Mode;
use crate::model::Model;
use leasehold::backend::sync::atomic::{AtomicU64, Ordering};
use leasehold::ops::Pattern;
use leasehold::{Error, Graph, Result, Runtime, View};
use leasehold_operators::{DType, Operator, Tensor, ops};

/// The position of a slot without a sequence, which a step leaves as it is.
const IDLE: Pattern = Pattern::U32(1 << 31);
/// The token of a slot without a sequence.
const NO_TOKEN: Pattern = Pattern::U32(u32::MAX);

/// The name of a sequence of one [`Batch`]. No other sequence of the process has it, and no other
/// batch takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId {
    batch: u64,
    number: u64,
}

/// The number of the next batch.
static BATCHES: AtomicU64 = AtomicU64::new(0);

/// A sequence in its slot.
struct Sequence {
    id: SequenceId,
    filled: usize,
    tokens: usize,
}

struct Slot {
    sequence: Option<Sequence>,
}

/// A fixed number of slots, in which sequences are decoded together.
///
/// A greedy sequence gives the tokens that it gives alone, unless two logits are nearly equal: for
/// nine slots and more, products may round differently than for one. Eager and replayed steps give
/// the same bits, and the other sequences of the batch do not change them. One thread uses a batch
/// at a time.
///
/// ```
/// use leasehold::{DeviceId, Runtime};
/// use leasehold_llama::{Batch, Config, DType, Mode, Model, Sampling, Weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let root = leasehold_tiny_python::FOLDER;
/// let config = Config::from_dir(root.as_ref())?;
/// // SAFETY: no program changes the file while the weights live.
/// let weights = unsafe { Weights::from_dir(root.as_ref(), &config) }?;
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let model = Model::load(&runtime, &config, &weights, DType::F32, &mut |_, _| {})?;
/// let mut batch = Batch::new(&model, 4, 64, Mode::Graph)?;
/// let (first, _token) = batch.add(&[316, 221], Sampling::default())?;
/// batch.step()?;
/// let (second, _token) = batch.add(&[221], Sampling::default())?;
/// let tokens = batch.step()?;
/// assert_eq!((tokens[0].0, tokens[1].0), (first, second));
/// batch.remove(first)?;
/// assert_eq!(batch.step()?.len(), 1);
/// # Ok(())
/// # }
/// ```
pub struct Batch<'m> {
    network: Network<'m>,
    lanes: Lanes,
    slots: Vec<Slot>,
    scratch: Scratch,
    logits: Tensor,
    step: Vec<Operator>,
    mode: Mode,
    graph: Option<Graph>,
    /// The name of the next sequence.
    next: SequenceId,
}

impl<'m> Batch<'m> {
    /// A batch of up to `sequences` sequences, each of at most `positions` tokens (prompt and new
    /// ones). All device memory of the steps is allocated here.
    ///
    /// # Errors
    /// `InvalidArgument` for zero sequences or positions, or more positions than the model's
    /// context; `OutOfMemory`.
    pub fn new(model: &'m Model, sequences: usize, positions: usize, mode: Mode) -> Result<Self> {
        let rows = u32::try_from(sequences).unwrap_or(0);
        if rows == 0 {
            return Err(Error::invalid(format!(
                "a batch of {sequences} sequences; ask for one at least, and for fewer than 2^32"
            )));
        }
        let network = Network::new(model, positions)?;
        let lanes = Lanes::new(model, network.heads, rows, 1)?;
        let slots = lanes.each.iter().map(|_| Slot { sequence: None }).collect();
        let vocabulary = model.config().vocab_size as u32;
        let logits = Tensor::alloc(model.runtime(), DType::F32, rows, vocabulary)?;
        let scratch = Scratch::new(model, rows)?;
        let mut batch = Self {
            network,
            lanes,
            slots,
            scratch,
            logits,
            step: Vec::new(),
            mode,
            graph: None,
            next: SequenceId { batch: BATCHES.fetch_add(1, Ordering::Relaxed), number: 0 },
        };
        batch.idle(&batch.lanes.all)?;
        batch.step = batch.network.step(&batch.scratch, &batch.lanes, &batch.logits)?;
        Ok(batch)
    }

    /// The operators of a step, counted.
    #[must_use]
    pub fn step_operators(&self) -> Vec<OperatorCount> {
        let mut counts = Vec::new();
        count::add(&mut counts, &self.step, 1);
        counts
    }

    /// Makes the kernels skip the slots of a lane.
    fn idle(&self, lane: &Lane) -> Result<()> {
        let stream = self.network.model.runtime().stream();
        stream.fill(lane.state.position.view(), IDLE)?;
        stream.fill(lane.state.token.view(), NO_TOKEN)
    }

    fn idle_slot(&self, slot: usize) -> Result<()> {
        self.idle(&self.lanes.each[slot])
    }

    fn find(&self, id: SequenceId) -> Result<(usize, &Sequence)> {
        if id.batch != self.next.batch {
            return Err(Error::invalid(format!(
                "sequence {} belongs to another batch; use it there",
                id.number
            )));
        }
        let of = |s: &'_ Slot| s.sequence.as_ref().is_some_and(|s| s.id == id);
        let at = self.slots.iter().position(of);
        let found = at.and_then(|at| Some((at, self.slots[at].sequence.as_ref()?)));
        found.ok_or_else(|| {
            Error::invalid(format!(
                "sequence {} is not in the batch; was it removed? Add its prompt again",
                id.number
            ))
        })
    }

    /// Starts a sequence in a free slot: processes its prompt, waits, and returns its first new
    /// token. The other sequences keep their state. A recorded step serves every sampling.
    ///
    /// # Errors
    /// `InvalidArgument` for a batch without a free slot, an empty prompt, a prompt that does not
    /// fit, an id outside the vocabulary, a sampling beyond its limits, or logits that are all NaN; the
    /// stream's cause. The batch stays as it was.
    pub fn add(&mut self, prompt: &[u32], how: ops::Sampling) -> Result<(SequenceId, u32)> {
        let Some(at) = self.slots.iter().position(|s| s.sequence.is_none()) else {
            return Err(Error::invalid(format!(
                "all {} slots of the batch are in use; remove a sequence first",
                self.slots.len()
            )));
        };
        let first = self.start(at, prompt, how);
        let first = match first {
            Ok(first) => first,
            Err(why) => {
                self.idle_slot(at)?;
                return Err(why);
            }
        };
        let id = self.next;
        self.next.number += 1;
        self.slots[at].sequence = Some(Sequence { id, filled: prompt.len(), tokens: 1 });
        Ok((id, first))
    }

    fn start(&self, at: usize, prompt: &[u32], how: ops::Sampling) -> Result<u32> {
        let (lane, row) = (&self.lanes.each[at], self.logits.slice_rows(at as u32, 1)?);
        lane.sample(self.network.model.runtime().stream(), how)?;
        let point = self.network.prefill(lane, &row, prompt)?;
        self.network.model.runtime().stream().flush()?;
        self.lanes.token(self.network.model.runtime(), at, 0, point)
    }

    /// Computes the next token of every sequence, and waits for them. The result is in the order of
    /// the slots; it is empty for an empty batch.
    ///
    /// # Errors
    /// `InvalidArgument` if a sequence is [full](Self::has_room), before anything is computed, or
    /// if all logits of a sequence are NaN; the stream's cause.
    pub fn step(&mut self) -> Result<Vec<(SequenceId, u32)>> {
        let positions = self.network.heads.positions as usize;
        let mut sequences = self.slots.iter().filter_map(|s| s.sequence.as_ref()).peekable();
        if sequences.peek().is_none() {
            return Ok(Vec::new());
        }
        if let Some(full) = sequences.find(|s| s.filled >= positions) {
            return Err(Error::invalid(format!(
                "the {positions} positions of sequence {} are full; remove it first",
                full.id.number
            )));
        }
        let runtime = self.network.model.runtime();
        if self.mode == Mode::Graph && self.graph.is_none() {
            let record = |runtime: &Runtime| Network::run(&self.step, runtime.stream());
            self.graph = Some(runtime.record_graph(record)?);
        }
        let point = match &self.graph {
            Some(graph) => graph.launch()?,
            None => {
                Network::run(&self.step, runtime.stream())?;
                runtime.stream().now()
            }
        };
        runtime.stream().flush()?;
        for sequence in self.slots.iter_mut().filter_map(|s| s.sequence.as_mut()) {
            sequence.filled += 1;
            sequence.tokens += 1;
        }
        let of = |(at, slot): (usize, &Slot)| {
            let sequence = slot.sequence.as_ref()?;
            // The ring has one word.
            let token = self.lanes.token(runtime, at, sequence.tokens - 1, point);
            Some(token.map(|token| (sequence.id, token)))
        };
        self.slots.iter().enumerate().filter_map(of).collect()
    }

    /// Ends a sequence and frees its slot for another one. Does not wait.
    ///
    /// # Errors
    /// `InvalidArgument` for a sequence that is not in the batch; the stream's cause.
    pub fn remove(&mut self, id: SequenceId) -> Result<()> {
        let (at, _) = self.find(id)?;
        self.idle_slot(at)?;
        self.slots[at].sequence = None;
        Ok(())
    }

    /// Returns whether another step fits a sequence.
    ///
    /// # Errors
    /// `InvalidArgument` for a sequence that is not in the batch.
    pub fn has_room(&self, id: SequenceId) -> Result<bool> {
        Ok(self.find(id)?.1.filled < self.network.heads.positions as usize)
    }

    /// The logits of a sequence's last computed position: f32, one for each vocabulary entry. Waits
    /// for them.
    ///
    /// # Errors
    /// `InvalidArgument` for a sequence that is not in the batch; the stream's cause.
    pub fn logits(&self, id: SequenceId) -> Result<Vec<f32>> {
        let (at, _) = self.find(id)?;
        let all: Vec<f32> = self.network.model.runtime().to_vec(self.logits.view())?;
        let n = self.logits.cols() as usize;
        Ok(all[at * n..(at + 1) * n].to_vec())
    }

    /// The sequences that are being decoded.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.iter().filter(|s| s.sequence.is_some()).count()
    }

    /// Returns whether no sequence is being decoded.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests;
