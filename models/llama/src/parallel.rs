//! A model over several ranks: which part of it a rank has, and what the ranks exchange.
//!
//! Queries, keys, values, gate and up are divided by columns of their products: a rank computes its
//! heads, and its part of the feed-forward layer. Attention's output and down are divided by rows:
//! a rank's product is one summand, and an all-reduce adds them. The head is divided by the
//! vocabulary, and an all-gather puts the logits together. So every rank has all logits, equal to
//! the bit, and draws the same token by the kernel that draws it for one rank.
//!
//! This module must not know the network, nor when an exchange happens.

use crate::config::Config;
use crate::weights::{self, Weights};
use half::bf16;
use leasehold::{Buffer, Error, GraphOperator, Lease, Name, Pool, PoolKind, Result, Stream, View};
use leasehold_collective::{Comm, Reduce, Registration};
use leasehold_operators::{DType, Operator, Tensor};
use std::ops::Range;

/// The part of a model that one of several ranks has.
///
/// Each rank has some of the heads, its part of the feed-forward layers and of the head, and all of
/// the embedding and the norms. Key and value heads that are fewer than the ranks are repeated. A
/// vocabulary that the ranks do not divide leaves the whole head on each rank.
///
/// ```
/// use leasehold_llama::{Config, Part};
/// let config = Config::from_slice(
///     br#"{"model_type": "llama", "vocab_size": 100, "hidden_size": 64,
///          "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 8,
///          "num_key_value_heads": 2, "max_position_embeddings": 128, "hidden_act": "silu"}"#,
///     "config.json",
/// )?;
/// let part = Part::new(3, 4)?.config(&config)?;
/// assert_eq!((part.num_attention_heads, part.num_key_value_heads), (2, 1));
/// assert_eq!(part.intermediate_size, 44);
/// let why = Part::new(0, 3)?.config(&config).unwrap_err().to_string();
/// assert!(why.contains("take 1, 2, 4 or 8 ranks"), "{why}");
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    rank: u32,
    of: u32,
}

/// The part of a tensor that a rank reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cut {
    Whole,
    /// Rows, or elements of a vector.
    Rows(Range<usize>),
    /// Of each row.
    Columns(Range<usize>),
    Nothing,
}

impl Part {
    /// The only part of a model on one rank.
    pub const WHOLE: Self = Self { rank: 0, of: 1 };

    /// The part of rank `rank` of `of`.
    ///
    /// # Errors
    /// `InvalidArgument` for a rank that is not below the number of all.
    pub fn new(rank: u32, of: u32) -> Result<Self> {
        if rank >= of {
            return Err(Error::invalid(format!(
                "part {rank} of {of}: parts are counted from 0 and below the number of all"
            )));
        }
        Ok(Self { rank, of })
    }

    /// The part of this rank of a communicator.
    pub(crate) fn of(comm: &Comm) -> Self {
        Self { rank: comm.rank(), of: comm.size() }
    }

    /// Returns whether other ranks have other parts.
    pub(crate) fn has_others(self) -> bool {
        self.of > 1
    }

    /// Returns whether this is the first part.
    pub(crate) fn is_first(self) -> bool {
        self.rank == 0
    }

    /// The config of the part: that of the model, with the part's own heads and width of the
    /// feed-forward layers. The vocabulary stays whole.
    ///
    /// # Errors
    /// `InvalidArgument` if the ranks divide neither the heads nor the feed-forward layers evenly;
    /// it names the numbers of ranks that do.
    pub fn config(self, model: &Config) -> Result<Config> {
        let of = self.of as usize;
        if !divides(model, of) {
            let most = model.num_attention_heads.min(1 << 16);
            let fit: Vec<_> =
                (1..=most).filter(|&n| divides(model, n)).map(|n| n.to_string()).collect();
            let fit = match fit.split_last() {
                Some((last, rest)) if !rest.is_empty() => {
                    format!("{} or {last} ranks", rest.join(", "))
                }
                _ => "1 rank".to_owned(),
            };
            return Err(Error::invalid(format!(
                "{of} ranks do not divide a model of {} heads, {} heads of keys and values and feed-forward layers of {}; take {fit}",
                model.num_attention_heads, model.num_key_value_heads, model.intermediate_size
            )));
        }
        Ok(Config {
            num_attention_heads: model.num_attention_heads / of,
            num_key_value_heads: (model.num_key_value_heads / of).max(1),
            intermediate_size: model.intermediate_size / of,
            ..model.clone()
        })
    }

    /// The bytes of the part's weights.
    ///
    /// # Errors
    /// As [`config`](Self::config).
    pub fn bytes(self, model: &Config, weights: &Weights) -> Result<u64> {
        let own = self.config(model)?;
        Ok(weights.iter().map(|(name, t)| self.cut(model, &own, name).bytes(t)).sum())
    }

    /// Equal parts of `all`: the one of this rank.
    fn share(self, all: usize) -> Range<usize> {
        let (rank, each) = (self.rank as usize, all / self.of as usize);
        rank * each..(rank + 1) * each
    }

    /// The rows of the head that this rank multiplies; `None` for all of them.
    pub(crate) fn vocabulary(self, model: &Config) -> Option<Range<usize>> {
        let even = model.vocab_size.is_multiple_of(self.of as usize);
        (self.has_others() && even).then(|| self.share(model.vocab_size))
    }

    /// The cut of the tensor with this name. `own` is the part's config.
    pub(crate) fn cut(self, model: &Config, own: &Config, name: &str) -> Cut {
        if !self.has_others() {
            return Cut::Whole;
        }
        let mut words = name.rsplit('.');
        let (kind, of) = (words.next(), words.next());
        let query = self.share(model.query_width());
        match (of, kind) {
            (Some("q_proj"), _) => Cut::Rows(query),
            (Some("k_proj" | "v_proj"), _) => {
                // A head that several ranks have is that of their queries.
                let head = self.rank as usize * model.num_key_value_heads / self.of as usize;
                let from = head * model.head_dim;
                Cut::Rows(from..from + own.kv_width())
            }
            (Some("gate_proj" | "up_proj"), _) => Cut::Rows(self.share(model.intermediate_size)),
            (Some("o_proj" | "down_proj"), Some("bias")) => match self.is_first() {
                true => Cut::Whole,
                false => Cut::Nothing,
            },
            (Some("o_proj"), _) => Cut::Columns(query),
            (Some("down_proj"), _) => Cut::Columns(self.share(model.intermediate_size)),
            (Some("lm_head"), _) => self.vocabulary(model).map_or(Cut::Whole, Cut::Rows),
            _ => Cut::Whole,
        }
    }
}

impl Cut {
    /// The bytes that are read of a tensor.
    pub(crate) fn bytes(&self, tensor: &weights::Tensor) -> u64 {
        let all = tensor.bytes().len() as u64;
        let first = tensor.shape().first().copied().unwrap_or(1);
        let last = tensor.shape().last().copied().unwrap_or(1);
        let share = |part: &Range<usize>, of: usize| all / of.max(1) as u64 * part.len() as u64;
        match self {
            Self::Whole => all,
            Self::Rows(rows) => share(rows, first),
            Self::Columns(columns) => share(columns, last),
            Self::Nothing => 0,
        }
    }
}

/// Returns whether so many ranks can have equal parts.
fn divides(model: &Config, ranks: usize) -> bool {
    let kv = model.num_key_value_heads;
    model.num_attention_heads.is_multiple_of(ranks)
        && model.intermediate_size.is_multiple_of(ranks)
        && (kv.is_multiple_of(ranks) || ranks.is_multiple_of(kv))
}

/// The most bytes of activations in registered memory. More are those of a prompt, whose sums are
/// too large for windows.
const MOST_REGISTERED: u64 = 64 << 10;

/// Registered memory for the activations that two ranks add up, so that recorded steps of one row
/// use the library's windows. Sums of two ranks are the same to the bit in windows and elsewhere.
/// Those of more ranks are not, so they have no such memory.
pub(crate) struct Registered {
    pool: Pool,
    dtype: DType,
    /// A block that keeps the pool's segment.
    _keep: Lease<Buffer>,
    _registration: Registration,
}

impl Registered {
    /// `None` for a device or a library that cannot register memory. All ranks call it.
    pub(crate) fn new(comm: &Comm, dtype: DType) -> Result<Option<Self>> {
        if comm.size() != 2 {
            return Ok(None);
        }
        let made = Pool::new(comm.runtime(), "activations", PoolKind::Shareable).and_then(|pool| {
            let keep = pool.alloc(MOST_REGISTERED)?;
            let registration = comm.register(&pool)?;
            Ok(Self { pool, dtype, _keep: keep, _registration: registration })
        });
        match made {
            Err(Error::Unsupported(_)) => Ok(None),
            made => made.map(Some),
        }
    }

    /// A new matrix of activations: in the registered memory, unless it is too large for it.
    pub(crate) fn matrix(&self, rows: u32, cols: u32) -> Result<Tensor> {
        let bytes = u64::from(rows) * u64::from(cols) * self.dtype.bytes() as u64;
        match bytes <= MOST_REGISTERED {
            true => Tensor::new(self.pool.alloc(bytes)?, self.dtype, rows, cols),
            false => Tensor::alloc(&self.pool.runtime(), self.dtype, rows, cols),
        }
    }
}

/// A step of a computation.
pub(crate) enum Operation {
    Kernel(Operator),
    Exchange(Exchange),
}

impl Operation {
    /// The kernel's name, or that of the communicator's call.
    pub(crate) fn kernel_name(&self) -> &'static str {
        match self {
            Self::Kernel(operator) => operator.kernel_name(),
            Self::Exchange(exchange) => exchange.call(),
        }
    }

    /// As [`Operator::computed_by`].
    pub(crate) fn computed_by(&self) -> &'static str {
        match self {
            Self::Kernel(operator) => operator.computed_by(),
            Self::Exchange(_) => "communicator",
        }
    }

    /// As [`Operator::shape`].
    pub(crate) fn shape(&self) -> String {
        match self {
            Self::Kernel(operator) => operator.shape(),
            Self::Exchange(exchange) => exchange.shape(),
        }
    }

    pub(crate) fn encode(&self, stream: &Stream) -> Result<()> {
        match self {
            Self::Kernel(operator) => operator.encode(stream),
            Self::Exchange(exchange) => exchange.encode(stream),
        }
    }
}

/// A call of all ranks.
pub(crate) struct Exchange {
    comm: Comm,
    /// The place in the model, for messages about ranks that differ.
    place: Name,
    what: What,
}

enum What {
    /// The sum over the ranks, in place.
    Sum(Tensor),
    /// Rows from the ranks' parts of them: the parts, and the whole rows.
    Rows(Vec<[Tensor; 2]>),
}

impl Exchange {
    /// Adds the ranks' matrices, in place.
    pub(crate) fn sum(comm: &Comm, place: &str, x: &Tensor) -> Self {
        Self { comm: comm.clone(), place: Name::new(place), what: What::Sum(x.clone()) }
    }

    /// Puts rows of f32 together from the ranks' equal parts of them.
    pub(crate) fn rows(comm: &Comm, place: &str, part: &Tensor, whole: &Tensor) -> Result<Self> {
        let row = |at| Ok([part.slice_rows(at, 1)?, whole.slice_rows(at, 1)?]);
        let rows = (0..whole.rows()).map(row).collect::<Result<_>>()?;
        Ok(Self { comm: comm.clone(), place: Name::new(place), what: What::Rows(rows) })
    }

    fn call(&self) -> &'static str {
        match self.what {
            What::Sum(_) => "all_reduce",
            What::Rows(_) => "all_gather",
        }
    }

    fn shape(&self) -> String {
        let of = |rows: usize, x: &Tensor| {
            format!("rows {rows}, cols {}, ranks {}", x.cols(), self.comm.size())
        };
        match &self.what {
            What::Sum(x) => of(x.rows() as usize, x),
            What::Rows(rows) => rows.first().map_or_else(String::new, |[_, x]| of(rows.len(), x)),
        }
    }

    fn encode(&self, stream: &Stream) -> Result<()> {
        let _place = self.place.clone().scope();
        match &self.what {
            What::Sum(x) => match x.dtype() {
                DType::F32 => self.comm.all_reduce(stream, x.view().values::<f32>()?, Reduce::Sum),
                DType::Bf16 => {
                    self.comm.all_reduce(stream, x.view().values::<bf16>()?, Reduce::Sum)
                }
                other => Err(Error::Unsupported(
                    format!("sums of {} over ranks; compute in f32 or bf16", other.name()).into(),
                )),
            },
            What::Rows(rows) => self.comm.group(stream, |group| {
                rows.iter().try_for_each(|[part, whole]| {
                    group.all_gather(whole.view().values::<f32>()?, part.view().values::<f32>()?)
                })
            }),
        }
    }
}
