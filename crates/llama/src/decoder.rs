//! Decoding of a sequence: KV caches, the closed loop from token to token, and its steps, eager or
//! as a graph.
//!
//! A decode step reads its token and position from device memory, and writes the next token, the
//! next position and the ring of tokens. So one recording serves every token.

use crate::count::{self, OperatorCount};
use crate::model::{Dense, Layer, Model};
use leasehold::backend::sync::atomic::{AtomicU32, Ordering};
use leasehold::ops::Pattern;
use leasehold::{
    Buffer, Error, Graph, GraphOperator, HostKind, Lease, Name, Result, Runtime, Stream, Timepoint,
    View,
};
use leasehold_operators::{BufferPart, DType, Operator, Tensor, ops};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Rows of a prompt in one computation by the kernels of the operator library.
const CHUNK: usize = 256;
/// Rows of a prompt in one computation by a vendor's library.
const VENDOR_CHUNK: usize = 2048;

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
    pub(crate) fn new(model: &Model, rows: u32) -> Result<Self> {
        let c = model.config();
        let _named = Name::new("activations").scope();
        let t =
            |cols: usize| Tensor::alloc(model.runtime(), model.activations(), rows, cols as u32);
        // `gate` and `up` of different element types cannot share a launch, and a vendor's library
        // computes products alone.
        let apart = has_vendor_products(model, rows)
            || model.layers.iter().any(|l| !alike(&[&l.gate, &l.up]));
        // Products on tensor cores do not normalise their input.
        let tensor =
            rows > 1 && model.activations() != DType::F32 && model.library.has_tensor_products();
        let normed = tensor || rows > ops::NORM_ROWS;
        Ok(Self {
            h: t(c.hidden_size)?,
            q: t(c.query_width())?,
            k: t(c.kv_width())?,
            v: t(c.kv_width())?,
            attended: t(c.query_width())?,
            inner: t(c.intermediate_size)?,
            up: if apart { Some(t(c.intermediate_size)?) } else { None },
            normed: if normed { Some(t(c.hidden_size)?) } else { None },
            raw: if c.qk_norm { Some([t(c.query_width())?, t(c.kv_width())?]) } else { None },
        })
    }
}

/// Returns whether a vendor's library computes products of `rows` rows.
fn has_vendor_products(model: &Model, rows: u32) -> bool {
    model.activations() != DType::F32 && model.library.has_vendor_products(rows)
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
    let words = words.map_or_else(|| runtime.alloc(bytes), Ok)?;
    let words = words.try_unique().map_err(|_| Error::Occupied { resource: "buffer" })?;
    let words = words.share_unlisted();
    runtime.stream().fill(words.view(), 0u32)?;
    Ok(words)
}

/// The times of an operator of a [timed step](Decoder::timed_step).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperatorTime {
    /// The kernel's name.
    pub name: &'static str,
    /// Its tiles, or blocks.
    pub tiles: u64,
    /// When the host submitted it, since the host began with the step.
    pub submitted: Range<Duration>,
    /// When the device ran it, since the device began with the first operator. The host's clock is
    /// another one.
    pub ran: Range<Duration>,
}

/// The KV caches of a sequence, a pair for each layer, the rule that chooses its tokens, and the
/// state of its loop from token to token. Or the same of several sequences, one behind the other in
/// each buffer.
pub(crate) struct Lane {
    pub(crate) caches: Vec<ops::Cache>,
    /// An [`ops::SamplingRecord`].
    sampling: BufferPart,
    pub(crate) state: ops::Loop,
}

impl Lane {
    /// Sequence `at` of the `of` sequences of this lane.
    fn one(&self, at: usize, of: usize) -> Result<Self> {
        let share = |part: &BufferPart| {
            let bytes = part.view().len() / of as u64;
            part.slice(at as u64 * bytes, bytes)
        };
        let cache = |c: &ops::Cache| -> Result<ops::Cache> {
            Ok(ops::Cache { keys: share(&c.keys)?, values: share(&c.values)?, dtype: c.dtype })
        };
        let ops::Loop { token, position, ring, count } = &self.state;
        Ok(Self {
            caches: self.caches.iter().map(cache).collect::<Result<_>>()?,
            sampling: share(&self.sampling)?,
            state: ops::Loop {
                token: share(token)?,
                position: share(position)?,
                ring: share(ring)?,
                count: share(count)?,
            },
        })
    }

    /// Sets the rule that chooses the tokens of this sequence, for the operators that follow. Does
    /// not wait.
    pub(crate) fn sample(&self, stream: &Stream, how: ops::Sampling) -> Result<()> {
        if how.log_probabilities > 0 {
            return Err(Error::invalid(format!(
                "{} log-probabilities are asked for, and a sequence keeps none; ask for 0",
                how.log_probabilities
            )));
        }
        stream.upload(self.sampling.view(), &[how.record()?])
    }
}

/// The device memory of sequences that are decoded together.
pub(crate) struct Lanes {
    /// All sequences as one.
    pub(crate) all: Lane,
    /// Each sequence; parts of the same memory.
    pub(crate) each: Vec<Lane>,
    /// The scratch memory of the decode step's attention.
    scratch: BufferPart,
    /// The timepoint of the initial fills.
    born: Timepoint,
}

impl Lanes {
    /// Memory for `rows` sequences, each with a ring of `ring` new tokens.
    pub(crate) fn new(model: &Model, heads: ops::Heads, rows: u32, ring: usize) -> Result<Self> {
        let (c, runtime) = (model.config(), model.runtime());
        let row = (c.kv_width() * heads.positions as usize * model.activations().bytes()) as u64;
        let bytes = row.checked_mul(rows.into()).ok_or_else(|| {
            Error::invalid(format!("{rows} sequences of {} positions have larger caches than there are addresses; make them fewer or shorter", heads.positions))
        })?;
        // Kernels count the words of the ring in 32 bits.
        let words = u128::from(rows) * ring as u128;
        let ring_words = u32::try_from(words).map_err(|_| {
            Error::invalid(format!(
                "{rows} sequences with rings of {ring} tokens; make them smaller"
            ))
        })?;
        let zeroed = |bytes: u64| -> Result<BufferPart> {
            let buffer = runtime.alloc(bytes)?;
            runtime.stream().fill(buffer.view(), 0u8)?;
            Ok(buffer.into())
        };
        let named = Name::new("kv cache").scope();
        let caches = (0..c.num_hidden_layers)
            .map(|_| {
                // An operator that appends declares the whole cache, so it must be initialised.
                let (keys, values) = (zeroed(bytes)?, zeroed(bytes)?);
                Ok(ops::Cache { keys, values, dtype: model.activations() })
            })
            .collect::<Result<Vec<_>>>()?;
        drop(named);
        let _named = Name::new("sequence").scope();
        let words = || zeroed(4 * u64::from(rows));
        let state = ops::Loop {
            token: words()?,
            position: words()?,
            ring: shared_words(runtime, ring_words)?.into(),
            count: words()?,
        };
        let scratch = ops::decode_scratch(runtime, heads, rows)?;
        // Zeros are a greedy choice.
        let sampling = zeroed(size_of::<ops::SamplingRecord>() as u64 * u64::from(rows))?;
        let all = Lane { caches, sampling, state };
        let each =
            (0..rows as usize).map(|at| all.one(at, rows as usize)).collect::<Result<_>>()?;
        Ok(Self { all, each, scratch, born: runtime.stream().now() })
    }

    /// New token `index` of a lane, which the step of `point` computed. Waits for the step.
    pub(crate) fn token(
        &self,
        runtime: &Runtime,
        lane: usize,
        index: usize,
        point: Timepoint,
    ) -> Result<u32> {
        let ring = self.each[lane].state.ring.view();
        let host_kind = ring.buffer().host_kind();
        let ring = ring.values::<u32>()?;
        let at = index % ring.len();
        let slot = ring.slice(at..at + 1).view();
        let mut word = [0u8; 4];
        if runtime.raw_device().caps().host_visible || host_kind == HostKind::Pinned {
            runtime.wait_for(self.born)?;
            runtime.wait_for(point)?;
            // SAFETY: an aligned word of a live buffer in host memory, which was filled before
            // `born`. Only the steps use the buffer, to which no handle leads. Any step that is not
            // over writes the word as one atomic access.
            let slot = unsafe {
                AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(slot.addr() as usize))
            };
            word = slot.load(Ordering::Acquire).to_ne_bytes();
        } else {
            runtime.stream().download(&mut word, slot)?;
        }
        let id = i32::from_le_bytes(word);
        u32::try_from(id).map_err(|_| {
            let step = index.saturating_add(1);
            Error::invalid(format!(
                "new token {step}: no logit is a number; weights or activations are NaN or overflow: compute with another type of activations, or look at the weights"
            ))
        })
    }
}

/// The parts of a model's computation that all its sequences share.
pub(crate) struct Network<'m> {
    pub(crate) model: &'m Model,
    pub(crate) heads: ops::Heads,
    table: BufferPart,
}

impl<'m> Network<'m> {
    /// For sequences of at most `positions` tokens.
    pub(crate) fn new(model: &'m Model, positions: usize) -> Result<Self> {
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
        let heads = ops::Heads {
            heads: c.num_attention_heads as u32,
            kv_heads: c.num_key_value_heads as u32,
            head_dim: c.head_dim as u32,
            positions: positions as u32,
        };
        let _named = Name::new("sequence").scope();
        Ok(Self { model, heads, table: model.rope_table(positions, 0)? })
    }

    /// The operators of a decode step of all `lanes`, a row of `s` and of `logits` for each.
    pub(crate) fn step(
        &self,
        s: &Scratch,
        lanes: &Lanes,
        logits: &Tensor,
    ) -> Result<Vec<Operator>> {
        let (ids, mut to) = (&lanes.all.state.token, Vec::new());
        // The fused kernel supports groups of limited width; wider groups use the general kernel,
        // whose rows are consecutive positions of one sequence.
        if self.model.config().queries_per_kv_head() <= ops::DECODE_GROUP as usize {
            self.rows(s, ids, &[&lanes.all], Some(&lanes.scratch), &self.table, &mut to)?;
        } else {
            let each: Vec<_> = lanes.each.iter().collect();
            self.rows(s, ids, &each, None, &self.table, &mut to)?;
        }
        self.finish(&s.h, s.normed.as_ref(), &lanes.all, logits, &mut to)?;
        Ok(to)
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
        to: &mut Vec<Operator>,
    ) -> Result<()> {
        let library = &*self.model.library;
        let rows = s.h.rows() / lanes.len() as u32;
        let part = |t: &Tensor, lane: usize| t.slice_rows(lane as u32 * rows, rows);
        to.push(ops::embedding(library, ids, &self.model.embedding, &s.h)?);
        for (at, layer) in self.model.layers.iter().enumerate() {
            let Layer { input_norm, qkv, qk_norm, out, post_norm, gate, up, down } = layer;
            let [q, k, v] = qkv;
            let [q_out, k_out] = s.raw.as_ref().map_or([&s.q, &s.k], |[q, k]| [q, k]);
            let (x, norm) = self.normalised(s, input_norm, to)?;
            if alike(&[q, k, v]) {
                to.push(ops::linear3(library, x, norm, [q.to(q_out), k.to(k_out), v.to(&s.v)])?);
            } else {
                for (dense, y) in [(q, q_out), (k, k_out), (v, &s.v)] {
                    to.push(ops::linear(library, x, norm, dense.to(y))?);
                }
            }
            if let Some([q_norm, k_norm]) = qk_norm {
                let (eps, dim) = (self.model.config().rms_norm_eps, self.heads.head_dim);
                for (x, norm, y) in [(q_out, q_norm, &s.q), (k_out, k_norm, &s.k)] {
                    let (x, y) = (heads_of(x, dim)?, heads_of(y, dim)?);
                    to.push(ops::rms_norm(library, &x, norm, eps, &y)?);
                }
            }
            for (i, lane) in lanes.iter().enumerate() {
                let (cache, position) = (&lane.caches[at], &lane.state.position);
                let place = ops::RowPositions { table, position };
                let (q, k, v) = (part(&s.q, i)?, part(&s.k, i)?, part(&s.v, i)?);
                let (qkv, y) = ([&q, &k, &v], part(&s.attended, i)?);
                if let Some(scratch) = scratch {
                    to.push(ops::decode_attention(
                        library, qkv, self.heads, cache, place, scratch, &y,
                    )?);
                } else {
                    to.push(ops::rope_append(library, qkv, self.heads, cache, place)?);
                    to.push(ops::attention(library, &q, self.heads, cache, position, &y)?);
                }
            }
            to.push(ops::linear_add(library, &s.attended, None, out.to(&s.h))?);
            let (x, norm) = self.normalised(s, post_norm, to)?;
            match &s.up {
                None => to.push(ops::linear_gated(
                    library,
                    x,
                    norm,
                    gate.to(&s.inner),
                    up.to(&s.inner),
                )?),
                Some(other) => {
                    to.push(ops::linear(library, x, norm, gate.to(&s.inner))?);
                    to.push(ops::linear(library, x, norm, up.to(other))?);
                    to.push(ops::silu_mul(library, &s.inner, other, &s.inner)?);
                }
            }
            to.push(ops::linear_add(library, &s.inner, None, down.to(&s.h))?);
        }
        Ok(())
    }

    /// The residual stream as the input of a product: few rows are normalised by the product, many
    /// rows and those for tensor cores beforehand.
    fn normalised<'a>(
        &self,
        s: &'a Scratch,
        weight: &'a Tensor,
        to: &mut Vec<Operator>,
    ) -> Result<(&'a Tensor, Option<ops::Norm<'a>>)> {
        let eps = self.model.config().rms_norm_eps;
        match &s.normed {
            None => Ok((&s.h, Some(ops::Norm { weight, eps }))),
            Some(normed) => {
                to.push(ops::rms_norm(&self.model.library, &s.h, weight, eps, normed)?);
                Ok((normed, None))
            }
        }
    }

    /// The operators of the head on the rows of `h`, one for each sequence of the lane, and of the
    /// next tokens.
    fn finish(
        &self,
        h: &Tensor,
        normed: Option<&Tensor>,
        lane: &Lane,
        logits: &Tensor,
        to: &mut Vec<Operator>,
    ) -> Result<()> {
        let (library, model) = (&*self.model.library, self.model);
        let eps = model.config().rms_norm_eps;
        let head = ops::Projection { weight: &model.head, bias: None, y: logits };
        if let Some(normed) = normed {
            to.push(ops::rms_norm(library, h, &model.norm, eps, normed)?);
            to.push(ops::linear(library, normed, None, head)?);
        } else {
            let norm = ops::Norm { weight: &model.norm, eps };
            to.push(ops::linear(library, h, Some(norm), head)?);
        }
        to.push(ops::next_token(library, logits, &lane.sampling, &lane.state, None)?);
        Ok(())
    }

    pub(crate) fn run(operators: &[Operator], stream: &Stream) -> Result<()> {
        operators.iter().try_for_each(|o| o.encode(stream))
    }

    /// Refuses a prompt of no tokens, or of more than a sequence has positions.
    fn check_prompt(&self, tokens: usize) -> Result<()> {
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

    /// Rows of a prompt of so many tokens that are computed together.
    fn prompt_rows(&self, tokens: usize) -> usize {
        let long = tokens > CHUNK && has_vendor_products(self.model, CHUNK as u32);
        if long { VENDOR_CHUNK } else { CHUNK }
    }

    /// The operators of the layers for `rows` tokens of a prompt, and the last row of their result.
    fn chunk(
        &self,
        lane: &Lane,
        ids: &Lease<Buffer>,
        rows: u32,
        table: &BufferPart,
    ) -> Result<(Vec<Operator>, Tensor)> {
        let scratch = Scratch::new(self.model, rows)?;
        let mut operators = Vec::new();
        self.rows(&scratch, &ids.into(), &[lane], None, table, &mut operators)?;
        Ok((operators, scratch.h.slice_rows(rows - 1, 1)?))
    }

    /// The operators of [`prefill`](Self::prefill) for a prompt of so many tokens, counted.
    /// Computes nothing.
    fn prompt_operators(
        &self,
        lane: &Lane,
        logits: &Tensor,
        tokens: usize,
    ) -> Result<Vec<OperatorCount>> {
        self.check_prompt(tokens)?;
        let (rows, mut counts) = (self.prompt_rows(tokens), Vec::new());
        for (rows, times) in [(rows, tokens / rows), (tokens % rows, 1)] {
            if rows > 0 && times > 0 {
                let ids = self.model.runtime().alloc(4 * rows as u64)?;
                let (operators, _) = self.chunk(lane, &ids, rows as u32, &self.table)?;
                count::add(&mut counts, &operators, times);
            }
        }
        let h = Scratch::new(self.model, 1)?.h;
        let mut operators = Vec::new();
        self.finish(&h, None, lane, logits, &mut operators)?;
        count::add(&mut counts, &operators, 1);
        Ok(counts)
    }

    /// Processes a prompt in a lane and draws the first new token. Leaves one row of logits. Does
    /// not wait.
    pub(crate) fn prefill(
        &self,
        lane: &Lane,
        logits: &Tensor,
        prompt: &[u32],
    ) -> Result<Timepoint> {
        self.check_prompt(prompt.len())?;
        self.model.config().check_ids(prompt)?;
        let (runtime, stream) = (self.model.runtime(), self.model.runtime().stream());
        let _named = Name::new("prompt").scope();
        stream.fill(lane.state.count.view(), 0u32)?;
        let trained = self.model.config().rope.trained_length().unwrap_or(usize::MAX);
        let table = match prompt.len() > trained {
            true => self.model.rope_table(self.heads.positions as usize, prompt.len())?,
            false => self.table.clone(),
        };
        let mut last = None;
        let rows = self.prompt_rows(prompt.len());
        for (i, chunk) in prompt.chunks(rows).enumerate() {
            let ids: Vec<i32> = chunk.iter().map(|&id| id as i32).collect();
            let ids = runtime.upload(&ids)?.into_buffer();
            stream.fill(lane.state.position.view(), Pattern::U32((i * rows) as u32))?;
            let (operators, h) = self.chunk(lane, &ids, chunk.len() as u32, &table)?;
            Self::run(&operators, stream)?;
            last = Some(h);
        }
        if let Some(h) = last {
            stream.fill(lane.state.position.view(), Pattern::U32(prompt.len() as u32 - 1))?;
            let mut operators = Vec::new();
            self.finish(&h, None, lane, logits, &mut operators)?;
            Self::run(&operators, stream)?;
        }
        Ok(stream.now())
    }
}

/// A sequence being decoded.
pub struct Decoder<'m> {
    network: Network<'m>,
    lanes: Lanes,
    logits: Tensor,
    step: Vec<Operator>,
    filled: usize,
    /// New tokens since the prompt; their number in the ring.
    drawn: usize,
    ring: usize,
}

impl<'m> Decoder<'m> {
    /// A sequence of at most `positions` tokens (prompt and new ones), with a ring of `ring` new
    /// tokens.
    ///
    /// # Errors
    /// `InvalidArgument` for zero positions, more positions than the model's context, a ring that is
    /// empty or has 2^32 tokens and more, or a sampling beyond its limits; `OutOfMemory`.
    pub fn new(
        model: &'m Model,
        positions: usize,
        ring: usize,
        sampling: ops::Sampling,
    ) -> Result<Self> {
        if ring == 0 {
            return Err(Error::invalid(
                "a sequence needs room for one new token; ask for one at least",
            ));
        }
        let network = Network::new(model, positions)?;
        let lanes = Lanes::new(model, network.heads, 1, ring)?;
        lanes.each[0].sample(model.runtime().stream(), sampling)?;
        let vocabulary = model.config().vocab_size as u32;
        let logits = Tensor::alloc(model.runtime(), DType::F32, 1, vocabulary)?;
        let step = network.step(&Scratch::new(model, 1)?, &lanes, &logits)?;
        Ok(Self { network, lanes, logits, step, filled: 0, drawn: 0, ring })
    }

    /// Processes a prompt and draws the first new token. Does not wait for it. A second prompt
    /// starts a new sequence.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty prompt, a prompt that does not fit, or an id outside the
    /// vocabulary; the stream's cause.
    pub fn prefill(&mut self, prompt: &[u32]) -> Result<Timepoint> {
        let lane = &self.lanes.each[0];
        let point = self.network.prefill(lane, &self.logits, prompt)?;
        (self.filled, self.drawn) = (prompt.len(), 1);
        Ok(point)
    }

    /// The operators of a prompt of so many tokens, counted. Computes nothing, but allocates the
    /// memory of the prompt's activations for a moment.
    ///
    /// # Errors
    /// `InvalidArgument` for a prompt without tokens or one that does not fit; `OutOfMemory`.
    pub fn prompt_operators(&self, tokens: usize) -> Result<Vec<OperatorCount>> {
        let lane = &self.lanes.each[0];
        self.network.prompt_operators(lane, &self.logits, tokens)
    }

    /// The operators of a step, counted.
    ///
    /// ```
    /// use leasehold::{DeviceId, Runtime};
    /// use leasehold_llama::{Config, DType, Decoder, Model, Sampling, Weights};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let root = leasehold_tiny_python::FOLDER;
    /// let config = Config::from_dir(root.as_ref())?;
    /// let weights = Weights::random(&config, DType::Bf16, 1)?;
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let model = Model::load(&runtime, &config, &weights, DType::Bf16, &mut |_, _| {})?;
    /// let decoder = Decoder::new(&model, 64, 1, Sampling::default())?;
    /// let layers = config.num_hidden_layers;
    /// for counts in [decoder.prompt_operators(32)?, decoder.step_operators()] {
    ///     let qkv = counts.iter().find(|c| c.name == "linear3").unwrap();
    ///     assert_eq!((qkv.computed_by, qkv.count), ("linear3", layers));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn step_operators(&self) -> Vec<OperatorCount> {
        let mut counts = Vec::new();
        count::add(&mut counts, &self.step, 1);
        counts
    }

    /// The logits of the last computed position: f32, one for each vocabulary entry. Waits for
    /// them.
    ///
    /// # Errors
    /// The stream's cause.
    pub fn logits(&self) -> Result<Vec<f32>> {
        self.network.model.runtime().to_vec(self.logits.view())
    }

    /// Returns whether another step fits the sequence.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.filled < self.network.heads.positions as usize
    }

    fn claim_position(&mut self) -> Result<()> {
        if !self.has_room() {
            return Err(Error::invalid(format!(
                "the sequence's {} positions are full; begin one with more positions",
                self.network.heads.positions
            )));
        }
        self.filled += 1;
        self.drawn += 1;
        Ok(())
    }

    /// Computes the next token, launch by launch. Does not wait for it.
    ///
    /// # Errors
    /// `InvalidArgument` if the sequence is full; the stream's cause.
    pub fn step(&mut self) -> Result<Timepoint> {
        self.claim_position()?;
        Network::run(&self.step, self.network.model.runtime().stream())?;
        let stream = self.network.model.runtime().stream();
        let point = stream.now();
        stream.flush()?;
        Ok(point)
    }

    /// As [`step`](Self::step), with the time of each operator: a timestamp on the stream before it
    /// and after it. Waits for the step. The timestamps take some time themselves, so a step takes
    /// longer than without them.
    ///
    /// # Errors
    /// As [`step`](Self::step); `Unsupported` on a device without timestamps.
    pub fn timed_step(&mut self) -> Result<Vec<OperatorTime>> {
        let (runtime, stream) =
            (self.network.model.runtime(), self.network.model.runtime().stream());
        let pair = |_| Ok([runtime.create_event()?, runtime.create_event()?]);
        let events = self.step.iter().map(pair).collect::<Result<Vec<_>>>()?;
        stream.synchronize()?;
        self.claim_position()?;
        let mut submitted = Vec::with_capacity(events.len());
        let start = Instant::now();
        for (operator, [begin, end]) in self.step.iter().zip(&events) {
            let from = start.elapsed();
            stream.record(begin)?;
            operator.encode(stream)?;
            stream.record(end)?;
            submitted.push(from..start.elapsed());
        }
        stream.synchronize()?;
        let Some([first, _]) = events.first() else { return Ok(Vec::new()) };
        let times = self.step.iter().zip(&events).zip(submitted);
        times
            .map(|((operator, [begin, end]), submitted)| {
                let begun = begin.elapsed_since(first)?;
                let ran = begun..begun + end.elapsed_since(begin)?;
                let (name, tiles) = (operator.kernel_name(), operator.tiles());
                Ok(OperatorTime { name, tiles, submitted, ran })
            })
            .collect()
    }

    /// Records one step. The graph serves every token of this sequence.
    ///
    /// # Errors
    /// As [`Runtime::record_graph`](leasehold::Runtime::record_graph).
    pub fn record(&self) -> Result<Graph> {
        let record = |runtime: &Runtime| Network::run(&self.step, runtime.stream());
        self.network.model.runtime().record_graph(record)
    }

    /// Computes the next token by launching the graph of [`record`](Self::record). Does not wait
    /// for it.
    ///
    /// # Errors
    /// `InvalidArgument` if the sequence is full; the stream's cause.
    pub fn launch(&mut self, graph: &Graph) -> Result<Timepoint> {
        self.claim_position()?;
        let point = graph.launch()?;
        // A wait for this token must not wait for the next one, which is launched before the wait.
        self.network.model.runtime().stream().flush()?;
        Ok(point)
    }

    /// New token `index` of this sequence, counted from 0 at the prompt. Waits for `point`, the
    /// timepoint of the step that computed it. If the host can read the device's output in place,
    /// the call neither allocates nor copies.
    ///
    /// # Errors
    /// `InvalidArgument` for a token that no step of this decoder was submitted for, or whose place
    /// in the ring a later one has taken, or if all logits of that step are NaN. The stream's
    /// cause.
    pub fn token(&self, index: usize, point: Timepoint) -> Result<u32> {
        let Self { drawn, ring, .. } = *self;
        if index >= drawn {
            return Err(Error::invalid(format!(
                "new token {index}, counted from 0: the sequence has {drawn} new tokens; step first"
            )));
        }
        if drawn - index > ring {
            return Err(Error::invalid(format!(
                "new token {index}, counted from 0: {drawn} were drawn, and the ring keeps the \
                 newest {ring}; read tokens earlier, or make the ring larger"
            )));
        }
        self.lanes.token(self.network.model.runtime(), 0, index, point)
    }
}
