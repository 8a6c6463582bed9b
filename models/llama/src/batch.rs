//! Several sequences decoded at once, each with its own KV caches, position and sampling.
//!
//! Each operator of a step serves all sequences in one launch, so the weights are read once. Every
//! position and every sampling is in device memory, so one recording serves all of them. A slot
//! without a sequence has a position outside its caches. Kernels write nothing to a cache there,
//! and the slot's rows are NaN.
//!
//! Prompts go in between: [`prompts`] submits a part of one after each step, and [`pace`] says how
//! much.

use crate::caches::{CacheBytes, Growth};
use crate::count::{self, OperatorCount};
use crate::generate::Mode;
use crate::model::Model;
use crate::network::{Draws, Lanes, NO_TOKEN, Network, Scratch, Task, no_number, operations};
use crate::rules::TokenRules;
use leasehold::backend::sync::Arc;
use leasehold::backend::sync::atomic::{AtomicU64, Ordering};
use leasehold::ops::Pattern;
use leasehold::{Error, Graph, OutOfMemory, Result, Runtime, Timepoint, View};
use leasehold_operators::ops;
use prompts::{Prompts, Submitted};

mod pace;
mod prompts;

/// The position of a slot without a sequence, which a step leaves as it is.
const IDLE: Pattern = Pattern::U32(1 << 31);

/// The name of a sequence of one [`Batch`]. No other sequence of the process has it, and no other
/// batch takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId {
    batch: u64,
    number: u64,
}

/// The number of the next batch.
static BATCHES: AtomicU64 = AtomicU64::new(0);

/// A token that a step drew for a sequence.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Drawn {
    /// The token.
    pub token: u32,
    /// Its log-probability, if the sequence's sampling asks for log-probabilities. They are those
    /// of the logits as they are, without temperature and cuts.
    pub log_probability: Option<f32>,
    /// The tokens with the largest logits, as many as the sampling asks for, with their
    /// log-probabilities, in falling order.
    pub largest: Vec<(u32, f32)>,
}

/// How far a sequence is.
enum Stage {
    /// Its prompt waits, or is computed.
    Prompt,
    /// Its first token is drawn at this point.
    Drawing(Timepoint),
    /// Its first token is known, and is the input of the next step.
    First(u32),
    /// The steps compute it.
    Decoding,
}

/// A sequence in its slot.
struct Sequence {
    id: SequenceId,
    sampling: ops::SamplingRecord,
    rules: Arc<TokenRules>,
    stage: Stage,
    prompt: Arc<[u32]>,
    /// The tokens of the pieces of its prompt; `None` if they have changed meanwhile.
    piece: Option<usize>,
    /// Positions whose keys and values are in the caches, or will be when the prompt is done.
    filled: usize,
    /// Tokens that were drawn.
    tokens: usize,
}

struct Slot {
    sequence: Option<Sequence>,
    /// The positions that the last sequence here had memory for, which may still lie ready.
    ready: usize,
}

impl Slot {
    fn stage(&self) -> Option<&Stage> {
        self.sequence.as_ref().map(|s| &s.stage)
    }

    fn is_decoding(&self) -> bool {
        matches!(self.stage(), Some(Stage::Decoding))
    }
}

/// A fixed number of slots, in which sequences are decoded together.
///
/// [`add`](Self::add) puts a prompt into a free slot. [`step`](Self::step) computes the next token
/// of every sequence, and a part of the prompts that wait. It returns what it drew.
///
/// A greedy sequence gives the tokens that it gives alone, unless two logits are nearly equal:
/// products of several slots may round differently than those of one. On CUDA, with activations and
/// weights of bf16, the bits are the same in all batches of 2 to 16 slots.
/// Eager and replayed steps give the same bits, and the other sequences of the batch do not change
/// them. A batch may move to another thread. One thread uses it at a time.
///
/// # Prompts
/// A prompt is computed in [pieces](Self::piece), in the order of arrival. While sequences are
/// decoded, a step submits only a part of a piece, behind its own work. The part takes three
/// quarters of the step's time at most. So the time between two steps is less than two steps. The
/// batch measures both, and begins with a bound that needs no measurement. An operator is never
/// divided: if the attention of a piece in a very long prompt alone takes longer than a step,
/// smaller pieces shorten it.
///
/// The size of a piece depends on the batch and on the length of the prompt, and not on time. So
/// the bits of a prompt are always the same. Products of another number of rows may round
/// differently, so other pieces may give other bits.
///
/// # Memory
/// On a device with memory that grows ([`Caps::growing`](leasehold::backend::Caps::growing)), a
/// sequence has memory for its text so far, and takes more as it grows. The caches' addresses stay,
/// and so does the recorded step. [`cache_bytes`](Self::cache_bytes) says how much there is. A
/// thread of the batch takes memory ahead. A step that lacks memory says so before it computes
/// anything: [`grow`](Self::grow) names the sequences. After a [`remove`](Self::remove) the others
/// go on.
///
/// If memory can have two addresses ([`Caps::forks`](leasehold::backend::Caps::forks)),
/// sequences that begin with the same tokens have those keys and values once, and the later ones
/// compute the rest of their prompts only. That is true of whole granules (128 tokens for a model
/// of 8 B parameters) and of whole [pieces](Self::piece), which must have the same size. So the
/// bits are those that the prompt has alone. [`set_piece`](Self::set_piece) makes pieces smaller,
/// and shorter beginnings are shared. The first sequence must be in the batch, and its prompt must
/// have come so far.
///
/// Memory of the longest texts is taken at once on other devices, with a part of a model, and for
/// caches so small that they would not grow.
///
/// # Several ranks
/// Ranks that have a [`Part`](crate::Part) of the model each have a batch each. All make the same
/// calls in the same order, and draw the same tokens. There the bound is the one that needs no
/// measurement, since times differ between ranks.
///
/// ```
/// use leasehold::{DeviceId, Runtime};
/// use leasehold_llama::{Batch, Config, DType, Mode, Model, Sampling, Weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let root = leasehold_llama::demo_model::FOLDER;
/// let config = Config::from_dir(root.as_ref())?;
/// // SAFETY: no program changes the file while the weights live.
/// let weights = unsafe { Weights::from_dir(root.as_ref(), &config) }?;
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let model = Model::load(&runtime, &config, &weights, DType::F32, &mut |_, _| {})?;
/// let mut batch = Batch::new(&model, 4, 64, Mode::Graph)?;
/// let first = batch.add(&[316, 221], Sampling::default())?;
/// let second = batch.add(&[221], Sampling::default())?;
/// let mut texts = std::collections::BTreeMap::from([(first, vec![]), (second, vec![])]);
/// while texts.values().any(|text| text.len() < 8) {
///     for (sequence, drawn) in batch.step()? {
///         texts.entry(sequence).or_default().push(drawn?.token);
///     }
/// }
/// batch.remove(first)?;
/// assert_eq!(batch.step()?.len(), 1);
/// # Ok(())
/// # }
/// ```
pub struct Batch {
    network: Network,
    draws: Draws,
    growth: Option<Growth>,
    slots: Vec<Slot>,
    prompts: Prompts,
    step: Vec<Task>,
    mode: Mode,
    graph: Option<Graph>,
    #[cfg(test)]
    recordings: usize,
    /// The name of the next sequence.
    next: SequenceId,
}

impl Batch {
    /// A batch of up to `sequences` sequences, each of at most `positions` tokens (prompt and new
    /// ones). All device memory of the steps is allocated here, but for caches that grow. That of
    /// prompts is allocated for the first prompt and kept, and is made larger for a longer one.
    ///
    /// # Errors
    /// `InvalidArgument` for zero sequences or positions, or more positions than the model's
    /// context; `OutOfMemory`.
    pub fn new(model: &Model, sequences: usize, positions: usize, mode: Mode) -> Result<Self> {
        Self::with(model, sequences, positions, mode, true)
    }

    /// As [`new`](Self::new), with memory for the longest text of each sequence: for texts whose
    /// length is known. So no step and no prompt lacks memory for its keys and values. A step of
    /// 8 to 32 sequences of 1,000 tokens takes 1 to 2 % less time, on an H100.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn preallocated(
        model: &Model,
        sequences: usize,
        positions: usize,
        mode: Mode,
    ) -> Result<Self> {
        Self::with(model, sequences, positions, mode, false)
    }

    /// As [`new`](Self::new). If it `grows`, its caches do so where they can.
    fn with(
        model: &Model,
        sequences: usize,
        positions: usize,
        mode: Mode,
        grows: bool,
    ) -> Result<Self> {
        let rows = u32::try_from(sequences).unwrap_or(0);
        if rows == 0 {
            return Err(Error::invalid(format!(
                "a batch of {sequences} sequences; ask for one at least, and for fewer than 2^32"
            )));
        }
        let network = Network::new(model, positions)?;
        let draws = Draws::new(model, rows, 1, true)?;
        let mut lanes = Lanes::new(model, network.heads, &draws, grows)?;
        let step = network.step(&Scratch::new(model, rows)?, &lanes, &draws)?;
        let prompts = Prompts::new(&network, &lanes.each, &step)?;
        let slots = lanes.each.iter().map(|_| Slot { sequence: None, ready: 0 }).collect();
        let growth = lanes.growth.take();
        let batch = Self {
            network,
            draws,
            growth,
            slots,
            prompts,
            step,
            mode,
            graph: None,
            #[cfg(test)]
            recordings: 0,
            next: SequenceId { batch: BATCHES.fetch_add(1, Ordering::Relaxed), number: 0 },
        };
        batch.idle(&batch.draws.all.state)?;
        Ok(batch)
    }

    /// The model whose sequences these are.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.network.model
    }

    fn runtime(&self) -> &Runtime {
        self.model().runtime()
    }

    /// The operators of a step, counted.
    #[must_use]
    pub fn step_operators(&self) -> Vec<OperatorCount> {
        let mut counts = Vec::new();
        count::add(&mut counts, operations(&self.step), 1);
        counts
    }

    /// The tokens of a prompt with `prompt` tokens that are computed together. The last ones may be
    /// fewer.
    #[must_use]
    pub fn piece(&self, prompt: usize) -> usize {
        self.prompts.piece_of(&self.network, prompt)
    }

    /// Sets the most tokens of a prompt that are computed together, from the next piece on. Smaller
    /// pieces make the largest operator shorter, and prompts slower. A device has a largest piece,
    /// which larger numbers mean as well.
    ///
    /// # Errors
    /// `InvalidArgument` for 0.
    pub fn set_piece(&mut self, tokens: usize) -> Result<()> {
        if tokens == 0 {
            return Err(Error::invalid("pieces of 0 tokens; ask for 1 at least"));
        }
        self.prompts.piece = Some(tokens);
        let all = self.slots.iter_mut().filter_map(|slot| slot.sequence.as_mut());
        for sequence in all.filter(|s| matches!(s.stage, Stage::Prompt)) {
            sequence.piece = None;
        }
        Ok(())
    }

    /// The bytes of the caches: those that have memory, and the most that they can have.
    #[must_use]
    pub fn cache_bytes(&self) -> CacheBytes {
        match &self.growth {
            Some(growth) => growth.cache_bytes(),
            None => {
                let (heads, own) = (self.network.heads, self.model().own());
                let row = own.kv_width() * self.model().activations().bytes();
                let positions = heads.positions as usize * self.slots.len();
                let most = (2 * own.num_hidden_layers * row * positions) as u64;
                CacheBytes { committed: most, shared: 0, most }
            }
        }
    }

    /// Makes the kernels of a step skip the rows of a loop.
    fn idle(&self, state: &ops::Loop) -> Result<()> {
        let stream = self.runtime().stream();
        stream.fill(state.position.view(), IDLE)?;
        stream.fill(state.token.view(), NO_TOKEN)
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

    /// Starts a sequence in a free slot. Computes nothing and waits for nothing: the next steps
    /// compute the prompt, and one of them returns the first new token. A recorded step serves
    /// every sampling. Sequences of one prompt and one seed draw the same tokens:
    /// [`Sampling::of_sequence`](ops::Sampling::of_sequence) gives each a seed of its own. Takes
    /// memory for the prompt's keys and values, and may block on the driver
    /// for it. A [beginning](Self#memory) that another sequence has is neither stored nor computed
    /// again.
    ///
    /// # Errors
    /// `InvalidArgument` for a batch without a free slot, an empty prompt, a prompt that does not
    /// fit, an id outside the vocabulary, or a sampling beyond its limits; `OutOfMemory` or
    /// `OverBudget` without memory for the prompt; the stream's cause. The batch stays as it was.
    pub fn add(&mut self, prompt: &[u32], how: ops::Sampling) -> Result<SequenceId> {
        self.add_with_rules(prompt, how, &TokenRules::default())
    }

    /// As [`add`](Self::add), by rules that keep tokens back. The first sequence with a rule takes
    /// memory for two bits for each token of the vocabulary and each slot, and the step is recorded
    /// again, once.
    ///
    /// # Errors
    /// As [`add`](Self::add); `InvalidArgument` for a penalty beyond its limits.
    pub fn add_with_rules(
        &mut self,
        prompt: &[u32],
        how: ops::Sampling,
        rules: &TokenRules,
    ) -> Result<SequenceId> {
        if self.slots.iter().all(|slot| slot.sequence.is_some()) {
            return Err(Error::invalid(format!(
                "all {} slots of the batch are in use; remove a sequence first",
                self.slots.len()
            )));
        }
        self.network.check_prompt(prompt.len())?;
        self.network.model.config().check_ids(prompt)?;
        let sampling = how.record()?;
        if !rules.is_nothing()? {
            let model = self.network.model.clone();
            self.prompts.draws.use_rules(&model, None)?;
            if self.draws.use_rules(&model, Some(&mut self.step))? {
                self.graph = None;
            }
        }
        let (prompt, rules): (Arc<[u32]>, _) = (prompt.into(), Arc::new(rules.clone()));
        let piece = self.piece(prompt.len());
        let (at, done) = self.take_place(&prompt, piece)?;
        let id = self.next;
        self.next.number += 1;
        self.prompts.push(at, prompt.clone(), (sampling, rules.clone()), done);
        let (stage, filled) = (Stage::Prompt, prompt.len());
        let piece = Some(piece);
        let sequence = Sequence { id, sampling, rules, stage, prompt, piece, filled, tokens: 0 };
        self.slots[at].sequence = Some(sequence);
        Ok(id)
    }

    /// A free slot with memory for a prompt. A beginning that another sequence has is shared.
    /// Returns how many tokens of the prompt need not be computed. After an error all is as it was.
    fn take_place(&mut self, prompt: &[u32], piece: usize) -> Result<(usize, usize)> {
        let model = self.network.model.clone();
        let stream = model.runtime().stream();
        let (from, common) = self.common_beginning(prompt, piece);
        let shares = self.growth.as_ref().is_some_and(|growth| growth.shares(common, piece));
        // A place that shares needs no memory that lies ready, and others need as much as there is.
        let ready = |at: &usize| self.slots[*at].ready as isize * if shares { -1 } else { 1 };
        let free = (0..self.slots.len()).rev().filter(|at| self.slots[*at].sequence.is_none());
        let at = free.max_by_key(ready).unwrap_or_default();
        let Some(growth) = &mut self.growth else { return Ok((at, 0)) };
        let done = match shares {
            true => growth.share(stream, (from, at), common, piece)?,
            false => 0,
        };
        growth.grow(stream, at, prompt.len()).or_else(|why| {
            growth.end(stream, at)?;
            Err(why)
        })?;
        Ok((at, done))
    }

    /// The slot of the sequence that has the most tokens in common with the beginning of a prompt,
    /// and how many, of those that are computed or submitted in pieces of the same size. The last
    /// token of a prompt is always computed: its logits are wanted.
    fn common_beginning(&self, prompt: &[u32], piece: usize) -> (usize, usize) {
        let before_last = &prompt[..prompt.len().saturating_sub(1)];
        let common = |(at, slot): (usize, &Slot)| {
            let sequence = slot.sequence.as_ref().filter(|s| s.piece == Some(piece))?;
            let submitted = match sequence.stage {
                Stage::Prompt => self.prompts.submitted(at),
                _ => sequence.prompt.len(),
            };
            let pairs = std::iter::zip(&sequence.prompt[..submitted], before_last);
            Some((at, pairs.take_while(|(a, b)| a == b).count()))
        };
        let all = self.slots.iter().enumerate().filter_map(common);
        all.max_by_key(|(_, tokens)| *tokens).unwrap_or_default()
    }

    /// Computes the next token of every sequence that has one, and waits for them. Then submits a
    /// part of the first prompt that waits, which runs while the caller handles the tokens. Returns
    /// the tokens in the order of the slots.
    ///
    /// The first token of a prompt comes with those of the step after its last part. If no sequence
    /// has a token yet, this computes a whole piece, and returns nothing or a first token. The
    /// result of an empty batch is empty.
    ///
    /// A sequence with an error has ended, and is not in the batch any more: its prompt could not
    /// be computed, or none of its logits is a number. The others go on.
    ///
    /// # Errors
    /// `InvalidArgument` if a sequence is [full](Self::has_room), and `Suspended` while the model
    /// is suspended, both before anything is computed; `OutOfMemory`, also before that, if a
    /// sequence cannot [grow](Self::grow); the stream's cause.
    pub fn step(&mut self) -> Result<Vec<(SequenceId, Result<Drawn>)>> {
        let model = self.network.model.clone();
        let _present = model.present()?;
        self.check_room()?;
        if let Some((id, why)) = self.grow().into_iter().next() {
            return Err(self.starved(id, why));
        }
        self.begin_decoding()?;
        let runtime = self.runtime().clone();
        let before = self.prompts.end();
        let beside = self.slots.iter().any(Slot::is_decoding);
        // Times differ between ranks, which all submit the same.
        let timed = !model.parts.part.has_others() && runtime.raw_device().caps().timestamps;
        let marked = beside && timed && self.prompts.wants_time();
        let mut points: Vec<_> = self
            .slots
            .iter()
            .map(|slot| match slot.stage() {
                Some(Stage::Drawing(point)) => Some(*point),
                _ => None,
            })
            .collect();
        if beside {
            if marked {
                self.prompts.mark(&runtime, 0);
            }
            let point = self.launch()?;
            if marked {
                self.prompts.mark(&runtime, 1);
            }
            // A wait for the step must not wait for the prompt.
            runtime.stream().flush()?;
            for (slot, at) in self.slots.iter_mut().zip(&mut points) {
                if let Some(Sequence { stage: Stage::Decoding, filled, .. }) = &mut slot.sequence {
                    (*at, *filled) = (Some(point), *filled + 1);
                }
            }
            self.grow_ahead();
        }
        let mut failed = None;
        match self.prompts.submit(&self.network, beside) {
            None => {}
            Some(Ok(Submitted { slot, drawn })) => {
                runtime.stream().flush()?;
                if let (Some(point), Some(sequence)) = (drawn, &mut self.slots[slot].sequence) {
                    sequence.stage = Stage::Drawing(point);
                    // Nobody waits for anything else.
                    if points.iter().all(Option::is_none) {
                        points[slot] = Some(point);
                    }
                }
            }
            Some(Err((slot, why))) => match runtime.stream().failure() {
                // The others have ended with it.
                Some(cause) => return Err(cause),
                None => failed = Some((slot, why)),
            },
        }
        if marked {
            self.prompts.mark(&runtime, 2);
        }
        // Without a token to wait for, the host is one piece ahead at most.
        if let (true, Some(before)) = (points.iter().all(Option::is_none), before) {
            runtime.wait_for(before)?;
        }
        let drawn = self.read(&points, failed)?;
        if beside {
            self.prompts.learn(marked);
        }
        Ok(drawn)
    }

    /// Refuses a sequence without a position for the next step.
    fn check_room(&self) -> Result<()> {
        let positions = self.network.heads.positions as usize;
        let mut sequences = self.slots.iter().filter_map(|slot| slot.sequence.as_ref());
        let decoded = |s: &&Sequence| matches!(s.stage, Stage::First(_) | Stage::Decoding);
        match sequences.find(|s| decoded(s) && s.filled >= positions) {
            None => Ok(()),
            Some(full) => Err(Error::invalid(format!(
                "the {positions} positions of sequence {} are full; remove it first",
                full.id.number
            ))),
        }
    }

    /// Takes memory for the next step of every sequence that has a token, as [`step`](Self::step)
    /// does first. Returns the sequences that cannot have it, each with the reason, and none as a
    /// rule. A caller ends one of all sequences, by [`remove`](Self::remove), and steps again.
    /// May block on the driver. Does not wait for the device.
    ///
    /// The reason is `OutOfMemory` or `OverBudget`; or the stream's cause, or the driver's.
    pub fn grow(&mut self) -> Vec<(SequenceId, Error)> {
        let model = self.network.model.clone();
        let (stream, positions) = (model.runtime().stream(), self.network.heads.positions as usize);
        let Some(growth) = &mut self.growth else { return Vec::new() };
        let mut failed = Vec::new();
        for (at, slot) in self.slots.iter().enumerate() {
            let Some(sequence) = &slot.sequence else { continue };
            let next = (sequence.filled + 1).min(positions);
            let decoded = matches!(sequence.stage, Stage::First(_) | Stage::Decoding);
            if decoded && growth.room(at) < next {
                let grown = growth.grow(stream, at, next);
                failed.extend(grown.err().map(|why| (sequence.id, why)));
            }
        }
        failed
    }

    /// The error of a step without memory for a sequence.
    #[cold]
    fn starved(&self, id: SequenceId, why: Error) -> Error {
        let found = self.find(id).ok().zip(self.growth.as_ref());
        let Some(((at, sequence), growth)) = found.filter(|_| why.is_out_of_memory()) else {
            return why;
        };
        let bytes = growth.missing(at, sequence.filled + 1);
        let site = format!("memory for the next positions of sequence {}", id.number);
        OutOfMemory::new(site, bytes)
            .note(format!("{why}"))
            .note("nothing was computed; remove a sequence, and step again")
            .into()
    }

    /// Gives the sequences with a first token to the steps.
    fn begin_decoding(&mut self) -> Result<()> {
        for at in 0..self.slots.len() {
            let Some(Sequence {
                sampling,
                ref rules,
                stage: Stage::First(token),
                ref prompt,
                filled,
                ..
            }) = self.slots[at].sequence
            else {
                continue;
            };
            let (stream, draw) = (self.runtime().stream(), &self.draws.each[at]);
            stream.upload(draw.sampling.view(), &[sampling])?;
            draw.set_rules(stream, rules, prompt, false)?;
            stream.fill(draw.state.token.view(), Pattern::U32(token))?;
            stream.fill(draw.state.position.view(), Pattern::U32(filled as u32))?;
            if let Some(sequence) = &mut self.slots[at].sequence {
                sequence.stage = Stage::Decoding;
            }
        }
        Ok(())
    }

    /// Submits a step.
    fn launch(&mut self) -> Result<Timepoint> {
        let runtime = self.runtime().clone();
        if self.mode == Mode::Graph && self.graph.is_none() {
            let record = |runtime: &Runtime| Network::run(&self.step, runtime.stream());
            self.graph = Some(runtime.record_graph(record)?);
            #[cfg(test)]
            {
                self.recordings += 1;
            }
        }
        match &self.graph {
            Some(graph) => graph.launch_on(runtime.stream()),
            None => {
                Network::run(&self.step, runtime.stream())?;
                Ok(runtime.stream().now())
            }
        }
    }

    /// Waits for the tokens of the slots with a point, and ends the sequences that have none.
    fn read(
        &mut self,
        points: &[Option<Timepoint>],
        failed: Option<(usize, Error)>,
    ) -> Result<Vec<(SequenceId, Result<Drawn>)>> {
        let runtime = self.runtime().clone();
        let mut all = Vec::with_capacity(points.len());
        let mut failed = failed;
        for (at, point) in points.iter().enumerate() {
            let Some(sequence) = &mut self.slots[at].sequence else { continue };
            let id = sequence.id;
            let why = match (*point, failed.take_if(|(slot, _)| *slot == at)) {
                (_, Some((_, why))) => why,
                (None, None) => continue,
                (Some(point), None) => {
                    let first = matches!(sequence.stage, Stage::Drawing(_));
                    let draws = if first { &self.prompts.draws } else { &self.draws };
                    // The rings have one word.
                    let token = draws.token(&runtime, at, 0, point)?;
                    sequence.tokens += 1;
                    match token {
                        Some(token) => {
                            if first {
                                sequence.stage = Stage::First(token);
                            }
                            let (log_probability, largest) = match sequence.sampling {
                                ops::SamplingRecord { log_probabilities: 0, .. } => None,
                                _ => draws.log_probabilities(&runtime, at, 0, point)?,
                            }
                            .unzip();
                            let largest = largest.unwrap_or_default();
                            all.push((id, Ok(Drawn { token, log_probability, largest })));
                            continue;
                        }
                        None => no_number(sequence.tokens),
                    }
                }
            };
            self.end(at)?;
            all.push((id, Err(why)));
        }
        Ok(all)
    }

    /// Frees a slot.
    fn end(&mut self, at: usize) -> Result<()> {
        match self.slots[at].stage() {
            Some(Stage::Decoding) => self.idle(&self.draws.each[at].state)?,
            Some(Stage::Prompt) => self.prompts.remove(at),
            _ => {}
        }
        self.slots[at].sequence = None;
        if let Some(growth) = &mut self.growth {
            self.slots[at].ready = growth.room(at);
            growth.end(self.network.model.runtime().stream(), at)?;
        }
        Ok(())
    }

    /// Has the batch's thread take memory for the steps after the next one.
    fn grow_ahead(&mut self) {
        let positions = self.network.heads.positions as usize;
        let Some(growth) = &mut self.growth else { return };
        for (at, slot) in self.slots.iter().enumerate() {
            if let Some(Sequence { stage: Stage::Decoding, filled, .. }) = slot.sequence {
                growth.ahead(at, filled, positions);
            }
        }
    }

    /// Ends a sequence and frees its slot for another one, also while its prompt waits or is
    /// computed. Does not wait.
    ///
    /// # Errors
    /// `InvalidArgument` for a sequence that is not in the batch; the stream's cause.
    pub fn remove(&mut self, id: SequenceId) -> Result<()> {
        let (at, _) = self.find(id)?;
        self.end(at)
    }

    /// Returns whether another step fits a sequence.
    ///
    /// # Errors
    /// `InvalidArgument` for a sequence that is not in the batch.
    pub fn has_room(&self, id: SequenceId) -> Result<bool> {
        Ok(self.find(id)?.1.filled < self.network.heads.positions as usize)
    }

    fn find_drawn(&self, id: SequenceId) -> Result<(usize, &Sequence)> {
        let found = self.find(id)?;
        match found.1.stage {
            Stage::First(_) | Stage::Decoding => Ok(found),
            _ => Err(Error::invalid(format!(
                "sequence {} has no token yet; step until it has one",
                id.number
            ))),
        }
    }

    /// The logits that the newest token of a sequence was drawn from: f32, one for each vocabulary
    /// entry. Waits for them, and for the part of a prompt that the last step submitted.
    ///
    /// # Errors
    /// `InvalidArgument` for a sequence that is not in the batch, or has no token yet; the stream's
    /// cause.
    pub fn logits(&self, id: SequenceId) -> Result<Vec<f32>> {
        let (at, sequence) = self.find_drawn(id)?;
        let first = matches!(sequence.stage, Stage::First(_));
        let draws = if first { &self.prompts.draws } else { &self.draws };
        draws.logits(self.runtime(), at)
    }

    /// Gives a sequence another token in the place of the newest one: a grammar may allow only some
    /// tokens, and the host then chooses one by the [`logits`](Self::logits). The next step
    /// continues with it. Does not wait.
    ///
    /// # Errors
    /// `InvalidArgument` for a sequence that is not in the batch, or has no token yet, or for a
    /// token outside the vocabulary; the stream's cause.
    pub fn replace(&mut self, id: SequenceId, token: u32) -> Result<()> {
        let (at, sequence) = self.find_drawn(id)?;
        self.network.model.config().check_ids(&[token])?;
        if matches!(sequence.stage, Stage::Decoding) {
            let state = &self.draws.each[at].state;
            return self.runtime().stream().fill(state.token.view(), Pattern::U32(token));
        }
        if let Some(sequence) = &mut self.slots[at].sequence {
            sequence.stage = Stage::First(token);
        }
        Ok(())
    }

    /// The most sequences that the batch has room for.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// The sequences in the batch, also those whose prompts wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.iter().filter(|s| s.sequence.is_some()).count()
    }

    /// Returns whether there is no sequence in the batch.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The sequences whose prompts are not computed yet, or not as a whole.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.prompts.len()
    }
}

#[cfg(test)]
mod tests;
