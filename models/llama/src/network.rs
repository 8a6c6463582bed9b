//! The computation of a model that sequences share: caches, activations, the operators of prompts
//! and of steps, and the ends of loops from token to token.
//!
//! This file must not know who runs the operators, nor when.

use crate::caches::{Growth, caches, zeroed};
use crate::count::{self, OperatorCount};
use crate::model::{Dense, Layer, Model};
use crate::parallel::{Exchange, Operation};
use crate::rules::TokenRules;
use leasehold::backend::sync::atomic::{AtomicU32, Ordering};
use leasehold::ops::Pattern;
use leasehold::{Buffer, Error, HostKind, Lease, Name, Result, Runtime, Stream, Timepoint, View};
use leasehold_operators::{BufferPart, DType, Operator, Tensor, ops};

/// Rows of a prompt in one computation by the kernels of the operator library.
const CHUNK: usize = 256;
/// Rows of a prompt in one computation by a vendor's library. Batches share beginnings of prompts
/// in such pieces, so they stay with this number.
const VENDOR_CHUNK: usize = 2048;
/// The same for a prompt that nothing waits for, if its activations have at most [`LONE_BYTES`].
/// Products of more rows fill the processors better, and less so the wider the model is.
const LONE_CHUNK: usize = 4096;
/// The most memory of the activations of [`LONE_CHUNK`] rows.
const LONE_BYTES: usize = 256 << 20;

/// The token of a row without one.
pub(crate) const NO_TOKEN: Pattern = Pattern::U32(u32::MAX);

/// The log-probability of a token, and those of the largest logits with their tokens.
pub(crate) type Logarithms = (f32, Vec<(u32, f32)>);

/// Activations of `rows` rows.
pub(crate) struct Scratch {
    pub(crate) h: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Tensor,
    inner: Tensor,
    up: Option<Tensor>,
    normed: Option<Tensor>,
    /// Queries and keys before the norms of their heads.
    raw: Option<[Tensor; 2]>,
}

impl Scratch {
    /// The most bytes of a row of all activations.
    pub(crate) fn row_bytes(model: &Model) -> usize {
        let c = model.own();
        let heads = c.query_width() + c.kv_width();
        let norms = if c.qk_norm { heads } else { 0 };
        let elements = 2 * (c.hidden_size + heads + c.intermediate_size) + norms;
        elements * model.activations().bytes()
    }

    pub(crate) fn new(model: &Model, rows: u32) -> Result<Self> {
        Self::within(None, model, rows)
    }

    /// Activations of the first rows of these, in the same memory.
    pub(crate) fn first(&self, model: &Model, rows: u32) -> Result<Self> {
        Self::within(Some(self), model, rows)
    }

    fn within(memory: Option<&Self>, model: &Model, rows: u32) -> Result<Self> {
        type Of = fn(&Scratch) -> Option<&Tensor>;
        let c = model.own();
        let _named = Name::new("activations").scope();
        let new = |rows, cols: usize| {
            Tensor::alloc(model.runtime(), model.activations(), rows, cols as u32)
        };
        let t = |there: Of, cols: usize| match memory.and_then(there) {
            Some(memory) => memory.slice_rows(0, rows),
            None => new(rows, cols),
        };
        let vendor = has_vendor_products(model, rows);
        // A vendor's library computes two products as one if the second `y` lies behind the first.
        // That may change bits, so it must not depend on what memory there is.
        let pair = |there: [Of; 2], cols: usize| -> Result<[Tensor; 2]> {
            if !vendor || memory.is_some() {
                return Ok([t(there[0], cols)?, t(there[1], cols)?]);
            }
            let both = new(rows.saturating_mul(2), cols)?;
            Ok([both.slice_rows(0, rows)?, both.slice_rows(rows, rows)?])
        };
        // `gate` and `up` of different element types cannot share a launch, and a vendor's library
        // does not multiply what its products give.
        let apart = vendor || model.parts.layers.iter().any(|l| !alike(&[&l.gate, &l.up]));
        // Products on tensor cores do not normalise their input.
        let tensor = rows > 1 && has_tensor_products(model);
        let normed = tensor || rows > ops::NORM_ROWS;
        let (query, kv, inner) = (c.query_width(), c.kv_width(), c.intermediate_size);
        let h = match (memory, &model.parts.registered) {
            (None, Some(registered)) => registered.matrix(rows, c.hidden_size as u32)?,
            _ => t(|s| Some(&s.h), c.hidden_size)?,
        };
        let q = t(|s| Some(&s.q), query)?;
        let (k, v, raw) = match c.qk_norm {
            true => {
                let raw_k: Of = |s| s.raw.as_ref().map(|[_, k]| k);
                let [raw_k, v] = pair([raw_k, |s| Some(&s.v)], kv)?;
                let raw_q = t(|s| s.raw.as_ref().map(|[q, _]| q), query)?;
                (t(|s| Some(&s.k), kv)?, v, Some([raw_q, raw_k]))
            }
            false => {
                let [k, v] = pair([|s| Some(&s.k), |s| Some(&s.v)], kv)?;
                (k, v, None)
            }
        };
        let attended = t(|s| Some(&s.attended), query)?;
        let (inner, up) = match apart {
            true => {
                let [inner, up] = pair([|s| Some(&s.inner), |s| s.up.as_ref()], inner)?;
                (inner, Some(up))
            }
            false => (t(|s| Some(&s.inner), inner)?, None),
        };
        let normed = normed.then(|| t(|s| s.normed.as_ref(), c.hidden_size)).transpose()?;
        Ok(Self { h, q, k, v, attended, inner, up, normed, raw })
    }
}

/// Returns whether tensor cores compute products of two rows and more.
pub(crate) fn has_tensor_products(model: &Model) -> bool {
    model.activations() != DType::F32 && model.parts.library.has_tensor_products()
}

/// Returns whether a vendor's library computes the products of `rows` rows with `gate` and `up`.
fn has_vendor_products(model: &Model, rows: u32) -> bool {
    let (c, library) = (model.own(), &model.parts.library);
    let elements = c.hidden_size as u64 * c.intermediate_size as u64;
    model.activations() != DType::F32 && library.has_vendor_products(rows, elements)
}

/// An operator of a computation, with what it multiplies. Operators beside products and attention
/// cost little.
pub(crate) struct Task {
    pub(crate) operation: Operation,
    pub(crate) rows: u32,
    /// Weights that each row is multiplied with.
    pub(crate) weights: u64,
    /// Elements of a cache that each row is multiplied with, for each position of the sequence.
    pub(crate) attended: u64,
}

impl Task {
    /// A product of each row with these weights.
    fn product<'a>(
        operator: Operator,
        rows: u32,
        weights: impl IntoIterator<Item = &'a Tensor>,
    ) -> Self {
        let of = |w: &Tensor| u64::from(w.rows()) * u64::from(w.cols());
        let weights = weights.into_iter().map(of).sum();
        Self { operation: Operation::Kernel(operator), rows, weights, attended: 0 }
    }

    /// The attention of each row of these queries: to keys and to values.
    fn attention(operator: Operator, q: &Tensor) -> Self {
        let (operation, rows) = (Operation::Kernel(operator), q.rows());
        Self { operation, rows, weights: 0, attended: 2 * u64::from(q.cols()) }
    }
}

impl From<Operator> for Task {
    fn from(operator: Operator) -> Self {
        Self { operation: Operation::Kernel(operator), rows: 0, weights: 0, attended: 0 }
    }
}

impl From<Exchange> for Task {
    fn from(exchange: Exchange) -> Self {
        Self { operation: Operation::Exchange(exchange), rows: 0, weights: 0, attended: 0 }
    }
}

/// The receiver of a computation's tasks, in their order: it keeps them, or submits each at once.
pub(crate) type Sink<'a> = &'a mut dyn FnMut(Task) -> Result<()>;

/// The tasks that `make` gives, in their order.
pub(crate) fn collected(make: impl FnOnce(Sink<'_>) -> Result<()>) -> Result<Vec<Task>> {
    let mut tasks = Vec::new();
    make(&mut |task| {
        tasks.push(task);
        Ok(())
    })?;
    Ok(tasks)
}

/// The operations of tasks.
pub(crate) fn operations(tasks: &[Task]) -> impl Iterator<Item = &Operation> {
    tasks.iter().map(|task| &task.operation)
}

fn alike(all: &[&Dense]) -> bool {
    all.iter().all(|d| d.weight.dtype() == all[0].weight.dtype())
}

/// The heads of all rows, a row for each.
fn heads_of(rows: &Tensor, head_dim: u32) -> Result<Tensor> {
    let heads = rows.rows() * (rows.cols() / head_dim);
    Tensor::new(rows, rows.dtype(), heads, head_dim)
}

/// Zeroed words that the device writes and the host reads, in place if possible: in pinned memory
/// if the host has no access to device memory. No handle leads to them: the host reads them beside
/// the device.
fn shared_words(runtime: &Runtime, count: u32) -> Result<Lease<Buffer>> {
    let bytes = 4 * u64::from(count);
    let mut words = None;
    if !runtime.raw_device().caps().host_visible {
        words = Some(runtime.alloc_pinned(bytes)?).filter(|w| w.host_kind() == HostKind::Pinned);
    }
    let words = words.map_or_else(|| runtime.alloc(bytes), Ok)?.unlisted()?;
    runtime.stream().fill(words.view(), 0u32)?;
    Ok(words)
}

/// The KV caches of a sequence, a pair for each layer. Or the same of several sequences, one behind
/// the other in each buffer.
pub(crate) struct Lane {
    pub(crate) caches: Vec<ops::Cache>,
    /// The position of its next row; or of each sequence's.
    pub(crate) position: BufferPart,
}

/// Part `at` of `of` equal ones.
fn share(part: &BufferPart, at: usize, of: usize) -> Result<BufferPart> {
    let bytes = part.view().len() / of as u64;
    part.slice(at as u64 * bytes, bytes)
}

impl Lane {
    /// Sequence `at` of the `of` sequences of this lane.
    fn one(&self, at: usize, of: usize) -> Result<Self> {
        let cache = |c: &ops::Cache| c.sequence(at as u32, of as u32);
        let caches = self.caches.iter().map(cache).collect::<Result<_>>()?;
        Ok(Self { caches, position: share(&self.position, at, of)? })
    }
}

/// The caches of sequences that are decoded together.
pub(crate) struct Lanes {
    /// All sequences as one.
    pub(crate) all: Lane,
    /// Each sequence; parts of the same memory.
    pub(crate) each: Vec<Lane>,
    /// The scratch memory of the decode step's attention.
    scratch: BufferPart,
    /// The growth of the caches' memory, if it grows.
    pub(crate) growth: Option<Growth>,
}

impl Lanes {
    /// Memory for a sequence of each row of `draws`, at its position; if it `grows`, where that
    /// pays.
    pub(crate) fn new(
        model: &Model,
        heads: ops::Heads,
        draws: &Draws,
        grows: bool,
    ) -> Result<Self> {
        let (runtime, rows) = (model.runtime(), draws.each.len());
        let (caches, growth) = caches(model, heads, rows, grows)?;
        let _named = Name::new("sequence").scope();
        let scratch = ops::decode_scratch(runtime, heads, rows as u32)?;
        let all = Lane { caches, position: draws.all.state.position.clone() };
        let each = (0..rows).map(|at| all.one(at, rows)).collect::<Result<_>>()?;
        Ok(Self { all, each, scratch, growth })
    }
}

/// The end of a loop from token to token: logits, how a token is drawn from them, and what was
/// drawn. Or the same of several sequences, a row for each.
pub(crate) struct Draw {
    pub(crate) logits: Tensor,
    /// This rank's part of the logits, if the ranks divide the head.
    part: Option<Tensor>,
    /// An [`ops::SamplingRecord`]; zeros are a greedy choice.
    pub(crate) sampling: BufferPart,
    pub(crate) state: ops::Loop,
    /// A ring of [`ops::LogProbabilities`], as large as that of tokens.
    log_probabilities: Option<BufferPart>,
    /// The sets and the factor that change the logits beforehand, if there are any.
    penalties: Option<ops::Penalties>,
}

impl Draw {
    /// Row `at` of the `of` rows.
    fn one(&self, at: usize, of: usize) -> Result<Self> {
        let share = |part: &BufferPart| share(part, at, of);
        let ops::Loop { token, position, ring, count } = &self.state;
        Ok(Self {
            logits: self.logits.slice_rows(at as u32, 1)?,
            part: self.part.as_ref().map(|part| part.slice_rows(at as u32, 1)).transpose()?,
            sampling: share(&self.sampling)?,
            state: ops::Loop {
                token: share(token)?,
                position: share(position)?,
                ring: share(ring)?,
                count: share(count)?,
            },
            log_probabilities: self.log_probabilities.as_ref().map(share).transpose()?,
            penalties: self.penalties.as_ref().map(|all| part_of(all, at, of)).transpose()?,
        })
    }

    /// Gives a row its rules, for the `first` token after a prompt or for the later ones. Changes
    /// nothing unless the draws [have rules](Draws::use_rules). Does not wait.
    pub(crate) fn set_rules(
        &self,
        stream: &Stream,
        rules: &TokenRules,
        prompt: &[u32],
        first: bool,
    ) -> Result<()> {
        let Some(ops::Penalties { factor, seen, banned }) = &self.penalties else { return Ok(()) };
        let vocabulary = self.logits.cols();
        stream.upload(factor.view(), &[rules.repetition_penalty])?;
        stream.upload(seen.view(), &rules.seen(prompt, vocabulary))?;
        stream.upload(banned.view(), &rules.banned(first, vocabulary))?;
        if first {
            // The prompt has all tokens that were seen.
            stream.fill(self.state.token.view(), NO_TOKEN)?;
        }
        Ok(())
    }
}

/// The penalties of row `at` of `of` rows.
fn part_of(all: &ops::Penalties, at: usize, of: usize) -> Result<ops::Penalties> {
    let share = |part| share(part, at, of);
    let ops::Penalties { factor, seen, banned } = all;
    Ok(ops::Penalties { factor: share(factor)?, seen: share(seen)?, banned: share(banned)? })
}

/// The ends of the loops of sequences.
pub(crate) struct Draws {
    /// All sequences as one.
    pub(crate) all: Draw,
    /// Each sequence; parts of the same memory.
    pub(crate) each: Vec<Draw>,
    /// The timepoint of the initial fills.
    born: Timepoint,
}

/// Words of [`ops::LogProbabilities`].
const LOG_WORDS: usize = size_of::<ops::LogProbabilities>() / 4;

impl Draws {
    /// Memory for `rows` rows, each with a ring of `ring` new tokens, and with `log_probabilities`
    /// of their log-probabilities.
    pub(crate) fn new(
        model: &Model,
        rows: u32,
        ring: usize,
        log_probabilities: bool,
    ) -> Result<Self> {
        let runtime = model.runtime();
        // Kernels count the words of the ring in 32 bits.
        let words = u128::from(rows) * ring as u128;
        let too_large = || {
            Error::invalid(format!(
                "{rows} sequences with rings of {ring} tokens; make them smaller"
            ))
        };
        let ring_words = u32::try_from(words).map_err(|_| too_large())?;
        let vocabulary = model.config().vocab_size as u32;
        let logits = Tensor::alloc(runtime, DType::F32, rows, vocabulary)?;
        let own = model.parts.head.rows();
        let part = (own < vocabulary)
            .then(|| Tensor::alloc(runtime, DType::F32, rows, own))
            .transpose()?;
        let _named = Name::new("sequence").scope();
        let words = || zeroed(runtime, 4 * u64::from(rows));
        let state = ops::Loop {
            token: words()?,
            position: words()?,
            ring: shared_words(runtime, ring_words)?.into(),
            count: words()?,
        };
        let sampling = zeroed(runtime, u64::from(rows) * size_of::<ops::SamplingRecord>() as u64)?;
        let log_probabilities = match log_probabilities {
            true => {
                let words = ring_words.checked_mul(LOG_WORDS as u32).ok_or_else(too_large)?;
                Some(shared_words(runtime, words)?.into())
            }
            false => None,
        };
        let all = Draw { logits, part, sampling, state, log_probabilities, penalties: None };
        let each =
            (0..rows as usize).map(|at| all.one(at, rows as usize)).collect::<Result<_>>()?;
        Ok(Self { all, each, born: runtime.stream().now() })
    }

    /// Takes memory for the rules of all rows, without a rule yet. `step` has the operators of a
    /// step of all rows; it gets one more. Returns whether this is new.
    pub(crate) fn use_rules(
        &mut self,
        model: &Model,
        step: Option<&mut Vec<Task>>,
    ) -> Result<bool> {
        if self.all.penalties.is_some() {
            return Ok(false);
        }
        let (runtime, rows) = (model.runtime(), self.each.len());
        let _named = Name::new("sequence").scope();
        let words = 4 * rows as u64;
        let set = || zeroed(runtime, words * u64::from(self.all.logits.cols().div_ceil(32)));
        let all = ops::Penalties { factor: zeroed(runtime, words)?, seen: set()?, banned: set()? };
        if let Some(step) = step {
            let Draw { logits, state, .. } = &self.all;
            let operator = ops::penalise(&model.parts.library, logits, state, &all)?;
            // The last one draws the tokens.
            step.insert(step.len().saturating_sub(1), operator.into());
        }
        for (at, draw) in self.each.iter_mut().enumerate() {
            draw.penalties = Some(part_of(&all, at, rows)?);
        }
        self.all.penalties = Some(all);
        Ok(true)
    }

    /// New token `index` of a row, which the step of `point` drew. `None` if no logit is a number.
    /// Waits for the step.
    pub(crate) fn token(
        &self,
        runtime: &Runtime,
        row: usize,
        index: usize,
        point: Timepoint,
    ) -> Result<Option<u32>> {
        let mut word = [0u32];
        self.read(runtime, &self.each[row].state.ring, index, &mut word, point)?;
        let [id] = word;
        Ok(u32::try_from(id.cast_signed()).ok())
    }

    /// The log-probabilities of new token `index` of a row whose record asks for them; the largest
    /// ones with their ids. Waits for the step of `point`.
    pub(crate) fn log_probabilities(
        &self,
        runtime: &Runtime,
        row: usize,
        index: usize,
        point: Timepoint,
    ) -> Result<Option<Logarithms>> {
        let Some(ring) = &self.each[row].log_probabilities else { return Ok(None) };
        let mut words = [0u32; LOG_WORDS];
        self.read(runtime, ring, index, &mut words, point)?;
        let [chosen, rest @ ..] = words;
        let (ids, values) = rest.split_at(rest.len() / 2);
        let largest = ids.iter().zip(values).filter_map(|(id, value)| {
            Some((u32::try_from(id.cast_signed()).ok()?, f32::from_bits(*value)))
        });
        Ok(Some((f32::from_bits(chosen), largest.collect())))
    }

    /// Reads entry `index` of a ring, whose entries have as many words as `to`. Waits for the step
    /// of `point`, which wrote it.
    fn read(
        &self,
        runtime: &Runtime,
        ring: &BufferPart,
        index: usize,
        to: &mut [u32],
        point: Timepoint,
    ) -> Result<()> {
        let bytes = size_of_val(to) as u64;
        let entries = ring.view().len() / bytes;
        let from = ring.view();
        let at = index as u64 % entries * bytes;
        let host_kind = from.buffer().host_kind();
        if !runtime.raw_device().caps().host_visible && host_kind != HostKind::Pinned {
            return runtime.stream().download(to, ring.slice(at, bytes)?.view());
        }
        runtime.wait_for(self.born)?;
        runtime.wait_for(point)?;
        for (i, word) in to.iter_mut().enumerate() {
            let addr = from.addr() + at + 4 * i as u64;
            // SAFETY: an aligned word of a live buffer in host memory, which was filled before
            // `born`. Only the steps use the buffer, to which no handle leads. Any step that is not
            // over writes another entry, or this word as one atomic access.
            let from = unsafe {
                AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(addr as usize))
            };
            *word = from.load(Ordering::Acquire);
        }
        Ok(())
    }

    /// The logits of a row. Waits for them.
    pub(crate) fn logits(&self, runtime: &Runtime, row: usize) -> Result<Vec<f32>> {
        runtime.to_vec(self.each[row].logits.view())
    }
}

/// The error of a token that was drawn from logits without a number, counted from 1.
#[cold]
pub(crate) fn no_number(token: usize) -> Error {
    Error::invalid(format!(
        "new token {token}: no logit is a number; weights or activations are NaN or overflow: compute with another type of activations, or look at the weights"
    ))
}

/// The parts of a model's computation that all its sequences share.
pub(crate) struct Network {
    pub(crate) model: Model,
    pub(crate) heads: ops::Heads,
    table: BufferPart,
}

impl Network {
    /// For sequences of at most `positions` tokens.
    pub(crate) fn new(model: &Model, positions: usize) -> Result<Self> {
        let c = model.config();
        if positions == 0 {
            return Err(Error::invalid("a sequence needs at least one position"));
        }
        if positions > c.context() {
            return Err(Error::invalid(format!(
                "{positions} positions; the model's context is {}: ask for fewer",
                c.context_shown()
            )));
        }
        let own = model.own();
        let heads = ops::Heads {
            heads: own.num_attention_heads as u32,
            kv_heads: own.num_key_value_heads as u32,
            head_dim: own.head_dim as u32,
            positions: positions as u32,
        };
        let _named = Name::new("sequence").scope();
        Ok(Self { model: model.clone(), heads, table: model.rope_table(positions, 0)? })
    }

    /// The operators of a decode step of all `lanes`, a row of `s` and of `draws` for each.
    pub(crate) fn step(&self, s: &Scratch, lanes: &Lanes, draws: &Draws) -> Result<Vec<Task>> {
        let ids = &draws.all.state.token;
        collected(|to| {
            // The fused kernel supports groups of limited width; wider groups use the general
            // kernel, whose rows are consecutive positions of one sequence.
            if self.model.own().queries_per_kv_head() <= ops::DECODE_GROUP as usize {
                self.rows(s, ids, &[&lanes.all], Some(&lanes.scratch), &self.table, to)?;
            } else {
                let each: Vec<_> = lanes.each.iter().collect();
                self.rows(s, ids, &each, None, &self.table, to)?;
            }
            self.finish(&s.h, s.normed.as_ref(), &draws.all, to)
        })
    }

    /// The operators of the layers for the rows of `s`, with an id for each. Each of the `lanes`
    /// has equally many rows, which are consecutive positions. With the scratch memory of the
    /// decode step's attention, each row is a sequence of its own.
    fn rows(
        &self,
        s: &Scratch,
        ids: &BufferPart,
        lanes: &[&Lane],
        scratch: Option<&BufferPart>,
        table: &BufferPart,
        to: Sink<'_>,
    ) -> Result<()> {
        let library = &*self.model.parts.library;
        let rows = s.h.rows() / lanes.len() as u32;
        let part = |t: &Tensor, lane: usize| t.slice_rows(lane as u32 * rows, rows);
        to(ops::embedding(library, ids, &self.model.parts.embedding, &s.h)?.into())?;
        for (at, layer) in self.model.parts.layers.iter().enumerate() {
            let Layer { input_norm, qkv, qk_norm, out, post_norm, gate, up, down } = layer;
            let [q, k, v] = qkv;
            let [q_out, k_out] = s.raw.as_ref().map_or([&s.q, &s.k], |[q, k]| [q, k]);
            let (x, norm) = self.normalised(s, input_norm, to)?;
            if alike(&[q, k, v]) {
                let all = [q.to(q_out), k.to(k_out), v.to(&s.v)];
                let operator = ops::linear3(library, x, norm, all)?;
                to(Task::product(operator, s.h.rows(), qkv.iter().map(|d| &d.weight)))?;
            } else {
                for (dense, y) in [(q, q_out), (k, k_out), (v, &s.v)] {
                    let operator = ops::linear(library, x, norm, dense.to(y))?;
                    to(Task::product(operator, s.h.rows(), [&dense.weight]))?;
                }
            }
            if let Some([q_norm, k_norm]) = qk_norm {
                let (eps, dim) = (self.model.config().rms_norm_eps, self.heads.head_dim);
                for (x, norm, y) in [(q_out, q_norm, &s.q), (k_out, k_norm, &s.k)] {
                    let (x, y) = (heads_of(x, dim)?, heads_of(y, dim)?);
                    to(ops::rms_norm(library, &x, norm, eps, &y)?.into())?;
                }
            }
            for (i, lane) in lanes.iter().enumerate() {
                let (cache, position) = (&lane.caches[at], &lane.position);
                let place = ops::RowPositions { table, position };
                let (q, k, v) = (part(&s.q, i)?, part(&s.k, i)?, part(&s.v, i)?);
                let (qkv, y) = ([&q, &k, &v], part(&s.attended, i)?);
                if let Some(scratch) = scratch {
                    let operator =
                        ops::decode_attention(library, qkv, self.heads, cache, place, scratch, &y)?;
                    to(Task::attention(operator, &q))?;
                } else {
                    to(ops::rope_append(library, qkv, self.heads, cache, place)?.into())?;
                    let operator = ops::attention(library, &q, self.heads, cache, position, &y)?;
                    to(Task::attention(operator, &q))?;
                }
            }
            self.residual(&s.attended, out, &s.h, &format!("layer {at}, o_proj"), to)?;
            let (x, norm) = self.normalised(s, post_norm, to)?;
            let other = s.up.as_ref().unwrap_or(&s.inner);
            if alike(&[gate, up]) {
                let (gated, other) = (gate.to(&s.inner), up.to(other));
                let operator = ops::linear_gated(library, x, norm, gated, other)?;
                to(Task::product(operator, s.h.rows(), [&gate.weight, &up.weight]))?;
            } else {
                for (dense, y) in [(gate, &s.inner), (up, other)] {
                    let operator = ops::linear(library, x, norm, dense.to(y))?;
                    to(Task::product(operator, s.h.rows(), [&dense.weight]))?;
                }
                to(ops::silu_mul(library, &s.inner, other, &s.inner)?.into())?;
            }
            self.residual(&s.inner, down, &s.h, &format!("layer {at}, down_proj"), to)?;
        }
        Ok(())
    }

    /// Adds a product to the residual stream `h`. Each of several ranks has a summand of the
    /// product: the first rank adds its own to the stream, the others put theirs in the place of
    /// the stream, and the sum of all is the new stream.
    fn residual(
        &self,
        x: &Tensor,
        dense: &Dense,
        h: &Tensor,
        place: &str,
        to: Sink<'_>,
    ) -> Result<()> {
        let (library, parts) = (&*self.model.parts.library, &self.model.parts);
        let operator = match parts.part.is_first() {
            true => ops::linear_add(library, x, None, dense.to(h))?,
            false => ops::linear(library, x, None, dense.to(h))?,
        };
        to(Task::product(operator, h.rows(), [&dense.weight]))?;
        if let Some(comm) = &parts.comm {
            to(Exchange::sum(comm, place, h).into())?;
        }
        Ok(())
    }

    /// The residual stream as the input of a product: few rows are normalised by the product, many
    /// rows and those for tensor cores beforehand.
    fn normalised<'a>(
        &self,
        s: &'a Scratch,
        weight: &'a Tensor,
        to: Sink<'_>,
    ) -> Result<(&'a Tensor, Option<ops::Norm<'a>>)> {
        let eps = self.model.config().rms_norm_eps;
        match &s.normed {
            None => Ok((&s.h, Some(ops::Norm { weight, eps }))),
            Some(normed) => {
                to(ops::rms_norm(&self.model.parts.library, &s.h, weight, eps, normed)?.into())?;
                Ok((normed, None))
            }
        }
    }

    /// The operators of the head on the rows of `h`, one for each row of `draw`, and of the next
    /// tokens.
    fn finish(&self, h: &Tensor, normed: Option<&Tensor>, draw: &Draw, to: Sink<'_>) -> Result<()> {
        let (library, model) = (&*self.model.parts.library, &self.model);
        let eps = model.config().rms_norm_eps;
        let Draw { logits, part, sampling, state, log_probabilities, penalties } = draw;
        let y = part.as_ref().unwrap_or(logits);
        let head = ops::Projection { weight: &model.parts.head, bias: None, y };
        let operator = if let Some(normed) = normed {
            to(ops::rms_norm(library, h, &model.parts.norm, eps, normed)?.into())?;
            ops::linear(library, normed, None, head)?
        } else {
            let norm = ops::Norm { weight: &model.parts.norm, eps };
            ops::linear(library, h, Some(norm), head)?
        };
        to(Task::product(operator, h.rows(), [&model.parts.head]))?;
        if let (Some(part), Some(comm)) = (part, &model.parts.comm) {
            to(Exchange::rows(comm, "lm_head", part, logits)?.into())?;
        }
        if let Some(penalties) = penalties {
            to(ops::penalise(library, logits, state, penalties)?.into())?;
        }
        let logs = log_probabilities.as_ref();
        to(ops::next_token(library, logits, sampling, state, logs)?.into())?;
        Ok(())
    }

    pub(crate) fn run(tasks: &[Task], stream: &Stream) -> Result<()> {
        tasks.iter().try_for_each(|task| task.operation.encode(stream))
    }

    /// Refuses a prompt of no tokens, or of more than a sequence has positions.
    pub(crate) fn check_prompt(&self, tokens: usize) -> Result<()> {
        if tokens == 0 {
            return Err(Error::invalid("the prompt is empty; give at least one token"));
        }
        if tokens > self.heads.positions as usize {
            return Err(Error::invalid(format!(
                "a prompt of {tokens} tokens does not fit a sequence of {} positions; make the sequence longer",
                self.heads.positions
            )));
        }
        Ok(())
    }

    /// Rows of a prompt of so many tokens that are computed together, if other prompts may share
    /// its beginning.
    pub(crate) fn prompt_rows(&self, tokens: usize) -> usize {
        let long = tokens > CHUNK && has_vendor_products(&self.model, CHUNK as u32);
        if long { VENDOR_CHUNK } else { CHUNK }
    }

    /// Rows of a prompt of so many tokens that are computed together, if nothing waits for it and
    /// no other prompt shares its beginning.
    pub(crate) fn lone_prompt_rows(&self, tokens: usize) -> usize {
        let (rows, row) = (self.prompt_rows(tokens), Scratch::row_bytes(&self.model));
        let large = rows == VENDOR_CHUNK && LONE_CHUNK * row <= LONE_BYTES;
        if large { LONE_CHUNK } else { rows }
    }

    /// The weights of the largest product of a layer, and the elements of a position that its
    /// attention multiplies each row with.
    pub(crate) fn largest(&self) -> (u64, u64) {
        let c = self.model.own();
        let (query, kv) = (c.query_width(), c.kv_width());
        let width = (query + 2 * kv).max(2 * c.intermediate_size);
        (c.hidden_size as u64 * width as u64, 2 * query as u64)
    }

    /// The rotary table for a prompt of so many tokens.
    pub(crate) fn prompt_table(&self, tokens: usize) -> Result<BufferPart> {
        let trained = self.model.config().rope.trained_length().unwrap_or(usize::MAX);
        match tokens > trained {
            true => self.model.rope_table(self.heads.positions as usize, tokens),
            false => Ok(self.table.clone()),
        }
    }

    /// The operators of the layers for the tokens of a prompt that `scratch` has rows for.
    pub(crate) fn piece(
        &self,
        scratch: &Scratch,
        lane: &Lane,
        ids: &BufferPart,
        table: &BufferPart,
        to: Sink<'_>,
    ) -> Result<()> {
        self.rows(scratch, ids, &[lane], None, table, to)
    }

    /// The operators of the end of a prompt: the head on the last row of `scratch`, and the first
    /// token.
    pub(crate) fn first_token(&self, scratch: &Scratch, draw: &Draw, to: Sink<'_>) -> Result<()> {
        let h = scratch.h.slice_rows(scratch.h.rows() - 1, 1)?;
        self.finish(&h, None, draw, to)
    }

    /// The operators of [`prefill`](Self::prefill) for a prompt of so many tokens, counted.
    /// Computes nothing.
    pub(crate) fn prompt_operators(
        &self,
        lane: &Lane,
        draw: &Draw,
        tokens: usize,
    ) -> Result<Vec<OperatorCount>> {
        self.check_prompt(tokens)?;
        let (rows, mut counts) = (self.lone_prompt_rows(tokens), Vec::new());
        for (rows, times) in [(rows, tokens / rows), (tokens % rows, 1)] {
            if rows > 0 && times > 0 {
                let ids = self.model.runtime().alloc(4 * rows as u64)?.into();
                let scratch = Scratch::new(&self.model, rows as u32)?;
                let tasks = collected(|to| self.piece(&scratch, lane, &ids, &self.table, to))?;
                count::add(&mut counts, operations(&tasks), times);
            }
        }
        let scratch = Scratch::new(&self.model, 1)?;
        let tasks = collected(|to| self.first_token(&scratch, draw, to))?;
        count::add(&mut counts, operations(&tasks), 1);
        Ok(counts)
    }

    /// Processes a prompt in a lane and draws the first new token. Leaves one row of logits. Does
    /// not wait.
    pub(crate) fn prefill(&self, lane: &Lane, draw: &Draw, prompt: &[u32]) -> Result<Timepoint> {
        self.check_prompt(prompt.len())?;
        self.model.config().check_ids(prompt)?;
        let (runtime, stream) = (self.model.runtime(), self.model.runtime().stream());
        let _named = Name::new("prompt").scope();
        stream.fill(draw.state.count.view(), 0u32)?;
        let table = self.prompt_table(prompt.len())?;
        let mut last = None;
        // The device computes the first layers while the host makes the operators of the others.
        let submit: Sink<'_> = &mut |task| task.operation.encode(stream);
        let rows = self.lone_prompt_rows(prompt.len());
        for (i, chunk) in prompt.chunks(rows).enumerate() {
            let ids = runtime.upload(chunk)?.into_buffer().into();
            stream.fill(lane.position.view(), Pattern::U32((i * rows) as u32))?;
            let scratch = Scratch::new(&self.model, chunk.len() as u32)?;
            self.piece(&scratch, lane, &ids, &table, submit)?;
            last = Some(scratch);
        }
        if let Some(scratch) = last {
            stream.fill(lane.position.view(), Pattern::U32(prompt.len() as u32 - 1))?;
            self.first_token(&scratch, draw, submit)?;
        }
        Ok(stream.now())
    }
}
