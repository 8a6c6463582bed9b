//! Models on a device: the weights as leased buffers, ready for operators.
//!
//! If host and device share memory, the weights are imported in place (a mapping, or bytes of the
//! program) without a copy. Otherwise they are uploaded. Large weights are copied even then, if
//! the memory is there: device memory has huge pages, which a mapped file has not. A row of weights
//! then comes from memory about twice as fast. Weights that are to be suspended lie in a pool of
//! their own, on each device.
//!
//! A rank of several reads its part of the weights: rows as above, columns by a copy.

use crate::config::Config;
use crate::parallel::{Cut, Part, Registered};
use crate::weights::{self, Weights};
use leasehold::backend::sync::{RwLock, RwLockReadGuard};
use leasehold::pool::{Contents, Pool, PoolKind, PoolUsage};
use leasehold::{Buffer, Error, Lease, Name, Protection, Result, Runtime, View};
use leasehold_collective::Comm;
use leasehold_operators::kernels::cpu::rope;
use leasehold_operators::{BufferPart, DType, Library, Tensor, ops};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A projection: weights and, if the config has them, biases.
#[derive(Debug, Clone)]
pub(crate) struct Dense {
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
}

impl Dense {
    pub(crate) fn to<'a>(&'a self, y: &'a Tensor) -> ops::Projection<'a> {
        ops::Projection { weight: &self.weight, bias: self.bias.as_ref(), y }
    }
}

/// One layer's weights.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) input_norm: Tensor,
    pub(crate) qkv: [Dense; 3],
    /// The norms of the heads of queries and keys.
    pub(crate) qk_norm: Option<[Tensor; 2]>,
    pub(crate) out: Dense,
    pub(crate) post_norm: Tensor,
    pub(crate) gate: Dense,
    pub(crate) up: Dense,
    pub(crate) down: Dense,
}

/// A Llama-family model whose weights are on a device: a handle, whose clones are the same model.
///
/// The weights stay while a handle lives, or what was made from one: a [`Batch`](crate::Batch), a
/// [`Decoder`](crate::Decoder). Many threads may use a model at once.
#[derive(Clone)]
pub struct Model {
    pub(crate) parts: Arc<Parts>,
}

/// The state that the handles of a model share.
pub(crate) struct Parts {
    runtime: Runtime,
    pub(crate) library: Arc<Library>,
    config: Config,
    /// The config of this rank's part.
    own: Config,
    pub(crate) part: Part,
    /// The ranks that have the other parts.
    pub(crate) comm: Option<Comm>,
    /// Memory for activations that two ranks add up.
    pub(crate) registered: Option<Registered>,
    pub(crate) embedding: Tensor,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Tensor,
    /// All rows of the head, or this rank's.
    pub(crate) head: Tensor,
    activations: DType,
    /// The pool of the weights, if they can be suspended.
    pool: Option<Pool>,
    /// Steps share it; a suspension and a resumption take it alone. So none comes in the middle of
    /// a step.
    steps: RwLock<()>,
}

/// A callback for the progress of loading.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

fn dim(n: usize, what: &str) -> Result<u32> {
    u32::try_from(n).map_err(|_| Error::Unsupported(format!("{what} of {n} is beyond 2^32").into()))
}

/// Transfers weights to the device.
struct Loader<'a> {
    runtime: &'a Runtime,
    pool: Option<&'a Pool>,
    library: &'a Library,
    weights: &'a Weights,
    config: &'a Config,
    own: &'a Config,
    part: Part,
    /// The element type of norms and biases: the stored type if all have the same, else f32.
    vectors: DType,
    progress: Progress<'a>,
    done: u64,
    total: u64,
    /// Whether weights are copied, though the device can read them in place.
    copies: bool,
}

/// Bytes of a matrix's columns that are gathered on the host at once.
const PIECE: usize = 16 << 20;

/// The fewest bytes of weights that are copied to huge pages. Fewer may stay in a cache.
const LARGE: u64 = 64 << 20;

impl Loader<'_> {
    fn alloc(&self, bytes: u64) -> Result<Lease<Buffer>> {
        match self.pool {
            Some(pool) => pool.alloc(bytes),
            None => self.runtime.alloc(bytes),
        }
    }

    /// Whether the device reads weights where they are.
    fn in_place(&self) -> bool {
        let reads = self.runtime.raw_device().caps().pageable_memory_access;
        reads && self.pool.is_none() && !self.copies
    }

    /// The part of a tensor that this rank has.
    fn tensor(&mut self, name: &str) -> Result<Tensor> {
        let stored = self.weights.tensor(name)?;
        let (rows, cols) = match stored.shape() {
            [cols] => (1, *cols),
            [rows, cols] => (*rows, *cols),
            other => {
                return Err(Error::Unsupported(
                    format!("tensor {name} has {} dimensions", other.len()).into(),
                ));
            }
        };
        let element = stored.dtype().bytes();
        let (buffer, rows, cols) = match self.part.cut(self.config, self.own, name) {
            Cut::Rows(part) if stored.shape().len() == 1 => {
                let bytes = part.start * element..part.end * element;
                (self.adjacent(stored, bytes)?, 1, part.len())
            }
            Cut::Rows(part) => {
                let row = cols * element;
                (self.adjacent(stored, part.start * row..part.end * row)?, part.len(), cols)
            }
            Cut::Columns(part) => {
                let bytes = part.start * element..part.end * element;
                (self.columns(stored, cols * element, bytes)?, rows, part.len())
            }
            Cut::Whole | Cut::Nothing => {
                (self.adjacent(stored, 0..stored.bytes().len())?, rows, cols)
            }
        };
        self.done += buffer.len();
        (self.progress)(self.done, self.total);
        Tensor::new(buffer, stored.dtype(), dim(rows, name)?, dim(cols, name)?)
    }

    /// Bytes of a tensor that follow one another: in place, or copied.
    fn adjacent(&self, stored: &weights::Tensor, part: Range<usize>) -> Result<Lease<Buffer>> {
        let bytes = &stored.bytes()[part];
        if self.in_place() {
            // SAFETY: the bytes stay in place while the kept source lives, and the device reads
            // host memory in place. No code writes them: the import is read-only, and the source's
            // own bytes are shared.
            return unsafe {
                self.runtime.allocator().import(
                    bytes.as_ptr().expose_provenance() as u64,
                    bytes.len() as u64,
                    0,
                    Protection::ReadOnly,
                    Box::new(stored.keep_alive()),
                )
            };
        }
        let buffer = self.alloc(bytes.len() as u64)?;
        self.runtime.stream().upload_blocking(buffer.view(), bytes)?;
        Ok(buffer)
    }

    /// A copy of the bytes `part` of each row.
    fn columns(
        &self,
        stored: &weights::Tensor,
        row: usize,
        part: Range<usize>,
    ) -> Result<Lease<Buffer>> {
        let (bytes, width) = (stored.bytes(), part.len());
        let buffer = self.alloc((bytes.len() / row * width) as u64)?;
        let mut piece = Vec::new();
        let mut done = 0;
        for rows in bytes.chunks(row * (PIECE / width).max(1)) {
            piece.clear();
            rows.chunks(row).for_each(|row| piece.extend_from_slice(&row[part.clone()]));
            let to = buffer.view().part(done..done + piece.len())?;
            self.runtime.stream().upload_blocking(to, &piece)?;
            done += piece.len();
        }
        Ok(buffer)
    }

    /// A norm's weights or a bias, in the common element type.
    fn vector(&mut self, name: &str) -> Result<Tensor> {
        let stored = self.tensor(name)?;
        if stored.dtype() == self.vectors {
            return Ok(stored);
        }
        let bytes = u64::from(stored.cols()) * self.vectors.bytes() as u64;
        let cast = Tensor::new(self.alloc(bytes)?, self.vectors, 1, stored.cols())?;
        self.runtime.add_graph_operator(&ops::cast(self.library, &stored, &cast)?)?;
        Ok(cast)
    }

    fn dense(&mut self, name: &str, bias: bool) -> Result<Dense> {
        Ok(Dense {
            weight: self.tensor(&format!("{name}.weight"))?,
            bias: if bias { Some(self.vector(&format!("{name}.bias"))?) } else { None },
        })
    }
}

/// Where a model is loaded to.
struct Place<'a> {
    runtime: &'a Runtime,
    /// A pool for the weights.
    pool: Option<Pool>,
    /// The ranks among which the model is divided.
    comm: Option<&'a Comm>,
}

impl Model {
    /// Loads a model to a runtime's device. `activations` is the element type of activations and KV
    /// cache (f32 or bf16). `progress` is called with the bytes loaded and the total bytes.
    ///
    /// # Errors
    /// `Unsupported` for activations in f16; an error that names a missing tensor; `OutOfMemory`.
    pub fn load(
        runtime: &Runtime,
        config: &Config,
        weights: &Weights,
        activations: DType,
        progress: Progress<'_>,
    ) -> Result<Model> {
        Self::load_to(
            Place { runtime, pool: None, comm: None },
            config,
            weights,
            activations,
            progress,
        )
    }

    /// As [`load`](Self::load), with the weights in a pool of their own, so that an idle model can
    /// leave the device ([`suspend`](Self::suspend)). The weights are copied there on every device,
    /// also where they could be used in place.
    ///
    /// ```
    /// use leasehold::{DeviceId, Runtime};
    /// use leasehold_llama::{Config, DType, Decoder, Model, Sampling, Weights};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let root = leasehold_llama::demo_model::FOLDER;
    /// let config = Config::from_dir(root.as_ref())?;
    /// let weights = Weights::random(&config, DType::Bf16, 1)?;
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let model =
    ///     Model::load_suspendable(&runtime, &config, &weights, DType::Bf16, &mut |_, _| {})?;
    /// let mut decoder = Decoder::new(&model, 64, 16, Sampling::default())?;
    /// let graph = decoder.record()?;
    /// decoder.prefill(&[1, 2, 3])?;
    /// model.suspend()?;
    /// assert!(decoder.launch(&graph).is_err());
    /// model.resume()?;
    /// let point = decoder.launch(&graph)?;
    /// decoder.token(1, point)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`load`](Self::load); `Unsupported` on a device without virtual memory, as
    /// [`Pool::new`].
    pub fn load_suspendable(
        runtime: &Runtime,
        config: &Config,
        weights: &Weights,
        activations: DType,
        progress: Progress<'_>,
    ) -> Result<Model> {
        let pool = Pool::new(runtime, "weights", PoolKind::Suspendable)?;
        Self::load_to(
            Place { runtime, pool: Some(pool), comm: None },
            config,
            weights,
            activations,
            progress,
        )
    }

    /// Loads this rank's [`Part`] of a model, to the device of a communicator whose ranks have the
    /// other parts. Reads the rank's rows and columns of the weights only.
    ///
    /// All ranks load the same model, make the same decoders and batches of it, and make the same
    /// calls of them in the same order. Each step has calls of the communicator, so a rank that
    /// stays behind makes the others wait, within the communicator's limit. Every rank has all
    /// logits and draws the same tokens, by gathered logits, also when it samples.
    ///
    /// ```
    /// use leasehold::{DeviceId, Result, Runtime};
    /// use leasehold_collective::{CommConfig, World};
    /// use leasehold_llama::{Config, DType, Mode, Model, Request, Sampling, Weights, generate};
    ///
    /// fn rank(world: World, config: &Config, weights: &Weights) -> Result<Vec<u32>> {
    ///     let runtime = Runtime::open(DeviceId::cpu(0))?.create_stream()?.runtime();
    ///     let comm = world.comm(&runtime, &CommConfig::new("tp"))?;
    ///     let model = Model::load_part(&comm, config, weights, DType::F32, &mut |_, _| {})?;
    ///     let (mode, sampling) = (Mode::Graph, Sampling::default());
    ///     let prompt = &[316, 221];
    ///     let request =
    ///         Request { prompt, tokens: 4, mode, sampling, stop_at: &[], check: false };
    ///     Ok(generate(&model, &request, &mut |_| Ok(()))?.ids)
    /// }
    ///
    /// # fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    /// # let root = leasehold_llama::demo_model::FOLDER;
    /// let config = Config::from_dir(root.as_ref())?;
    /// let weights = Weights::read_dir(root.as_ref(), &config)?;
    /// let (config, weights) = (&config, &weights);
    /// let texts: Vec<_> = std::thread::scope(|scope| {
    ///     let ranks: Vec<_> = World::threads(2)?
    ///         .into_iter()
    ///         .map(|world| scope.spawn(move || rank(world, config, weights)))
    ///         .collect();
    ///     ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Result<_>>()
    /// })?;
    /// assert_eq!(texts[0], texts[1]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`load`](Self::load); `InvalidArgument` if the ranks do not divide the model
    /// ([`Part::config`]).
    pub fn load_part(
        comm: &Comm,
        config: &Config,
        weights: &Weights,
        activations: DType,
        progress: Progress<'_>,
    ) -> Result<Model> {
        let place = Place { runtime: comm.runtime(), pool: None, comm: Some(comm) };
        Self::load_to(place, config, weights, activations, progress)
    }

    fn load_to(
        place: Place<'_>,
        config: &Config,
        weights: &Weights,
        activations: DType,
        progress: Progress<'_>,
    ) -> Result<Model> {
        if activations == DType::F16 {
            return Err(Error::Unsupported("activations in f16; there are f32 and bf16".into()));
        }
        let Place { runtime, pool, comm } = place;
        let comm = comm.filter(|comm| comm.size() > 1);
        let part = comm.map_or(Part::WHOLE, Part::of);
        let own = part.config(config)?;
        let library = Library::of(runtime)?;
        let _named = Name::new("weights").scope();
        let mut types =
            weights.iter().filter(|(_, t)| t.shape().len() == 1).map(|(_, t)| t.dtype());
        let first = types.next();
        let vectors = match first {
            Some(d) if types.all(|t| t == d) => d,
            _ => DType::F32,
        };
        let total = part.bytes(config, weights)?;
        // The copy must not force other memory out: twice its size is free.
        let room = || runtime.raw_device().memory_info().is_ok_and(|m| m.free / 2 >= total);
        let copies = total >= LARGE && room();
        let mut loader = Loader {
            runtime,
            pool: pool.as_ref(),
            library: &library,
            weights,
            config,
            own: &own,
            part,
            vectors,
            progress,
            done: 0,
            total,
            copies,
        };
        let embedding = loader.tensor("model.embed_tokens.weight")?;
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for i in 0..config.num_hidden_layers {
            let at = |name: &str| format!("model.layers.{i}.{name}");
            let (a, m) = (config.attention_bias, config.mlp_bias);
            // A bias is added once.
            let (o, d) = (config.attention_output_bias && part.is_first(), m && part.is_first());
            layers.push(Layer {
                input_norm: loader.vector(&at("input_layernorm.weight"))?,
                qkv: [
                    loader.dense(&at("self_attn.q_proj"), a)?,
                    loader.dense(&at("self_attn.k_proj"), a)?,
                    loader.dense(&at("self_attn.v_proj"), a)?,
                ],
                qk_norm: match config.qk_norm {
                    true => Some([
                        loader.vector(&at("self_attn.q_norm.weight"))?,
                        loader.vector(&at("self_attn.k_norm.weight"))?,
                    ]),
                    false => None,
                },
                out: loader.dense(&at("self_attn.o_proj"), o)?,
                post_norm: loader.vector(&at("post_attention_layernorm.weight"))?,
                gate: loader.dense(&at("mlp.gate_proj"), m)?,
                up: loader.dense(&at("mlp.up_proj"), m)?,
                down: loader.dense(&at("mlp.down_proj"), d)?,
            });
        }
        let norm = loader.vector("model.norm.weight")?;
        let head = match (weights.is_tied(), part.vocabulary(config)) {
            (false, _) => loader.tensor("lm_head.weight")?,
            (true, None) => embedding.clone(),
            (true, Some(rows)) => embedding.slice_rows(rows.start as u32, rows.len() as u32)?,
        };
        runtime.stream().synchronize()?;
        let registered = match comm {
            Some(comm) => Registered::new(comm, activations)?,
            None => None,
        };
        let parts = Parts {
            runtime: runtime.clone(),
            library,
            config: config.clone(),
            own,
            part,
            comm: comm.cloned(),
            registered,
            embedding,
            layers,
            norm,
            head,
            activations,
            pool,
            steps: RwLock::new(()),
        };
        Ok(Model { parts: Arc::new(parts) })
    }

    /// The model's runtime.
    #[must_use]
    pub fn runtime(&self) -> &Runtime {
        &self.parts.runtime
    }

    /// The config.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.parts.config
    }

    /// The config of this rank's part.
    pub(crate) fn own(&self) -> &Config {
        &self.parts.own
    }

    /// The part of the model that is here: all of it, unless it was loaded by
    /// [`load_part`](Self::load_part).
    #[must_use]
    pub fn part(&self) -> Part {
        self.parts.part
    }

    /// The element type of activations and KV cache.
    #[must_use]
    pub fn activations(&self) -> DType {
        self.parts.activations
    }

    fn pool(&self) -> Result<&Pool> {
        self.parts.pool.as_ref().ok_or_else(|| {
            Error::Unsupported(
                "the model was not loaded to be suspended; load it by Model::load_suspendable"
                    .into(),
            )
        })
    }

    /// Gives the device memory of the weights back, and keeps their addresses and contents: the
    /// contents go to pinned host memory. Returns the bytes that went. Sequences, batches and
    /// graphs stay, with their own memory.
    ///
    /// Waits for steps that other threads are in the middle of, and for the device; blocks while
    /// the weights are copied. Until [`resume`](Self::resume) each step is refused with
    /// `Suspended`, before anything of it is computed.
    ///
    /// # Errors
    /// `Unsupported` for a model of [`load`](Self::load); as [`Pool::suspend`].
    pub fn suspend(&self) -> Result<u64> {
        let pool = self.pool()?;
        let _alone = self.parts.steps.write();
        pool.suspend(Contents::Keep)
    }

    /// Takes device memory for the weights again. Blocks until they are there.
    ///
    /// # Errors
    /// `Unsupported` for a model of [`load`](Self::load); as [`Pool::resume`]: without
    /// memory the model stays suspended, and the call may be repeated.
    pub fn resume(&self) -> Result<()> {
        let pool = self.pool()?;
        let _alone = self.parts.steps.write();
        pool.resume()
    }

    /// Returns whether the weights are away.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        self.parts.pool.as_ref().is_some_and(Pool::is_suspended)
    }

    /// The memory of the weights in numbers; `None` for a model of [`load`](Self::load).
    #[must_use]
    pub fn weights_stats(&self) -> Option<PoolUsage> {
        self.parts.pool.as_ref().map(Pool::stats)
    }

    /// Keeps the weights on the device for a step.
    ///
    /// # Errors
    /// `Suspended` while they are away.
    pub(crate) fn present(&self) -> Result<Option<RwLockReadGuard<'_, ()>>> {
        let Some(pool) = &self.parts.pool else { return Ok(None) };
        let step = self.parts.steps.read();
        if pool.is_suspended() {
            return Err(Error::Suspended(
                "the model's weights are suspended; call Model::resume first, and repeat the step"
                    .into(),
            ));
        }
        Ok(Some(step))
    }

    /// The rotary table for `positions` positions, in device memory.
    ///
    /// A position is turned as in a text that ends there, if it is not in a prompt of `prompt`
    /// tokens: all positions of a prompt are turned as in a text of its length.
    pub(crate) fn rope_table(&self, positions: usize, prompt: usize) -> Result<BufferPart> {
        let (rope, head_dim) = (&self.config().rope, self.config().head_dim);
        let trained = rope.trained_length().unwrap_or(usize::MAX);
        let of = |length: usize| -> Vec<f64> {
            rope.inverse_frequencies(head_dim, length).into_iter().map(f64::from).collect()
        };
        let mut table = Vec::with_capacity(head_dim * positions);
        let (mut length, mut frequencies) = (0, of(0));
        for position in 0..positions {
            let now = prompt.max(position + 1);
            if now > trained && now != length {
                (length, frequencies) = (now, of(now));
            }
            rope::push_position(&mut table, position, &frequencies, rope.attention_factor());
        }
        Ok(self.runtime().upload(&table)?.into_buffer().into())
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Model({} layers on {})", self.parts.layers.len(), self.runtime().device())
    }
}
