//! Model weights: safetensors files, memory-mapped, read or embedded, checked against the config.
//!
//! [`Weights`] opens `model.safetensors`, or the shards that `model.safetensors.index.json` lists,
//! and returns views: type, shape and the bytes in the mapping. No tensor is copied or converted,
//! with two exceptions: one whose bytes are not aligned to its element, and one in float64. A view
//! keeps its mapping alive ([`Tensor::keep_alive`]). So a view can be imported as a host buffer
//! whose lease outlives these objects.
//!
//! All checks run when the files are opened: each tensor of the config exists once, with the shape
//! that the config implies, in a type that the kernels read. A base model's names lack the prefix
//! `model.`; both forms are read. Tensors outside the config are not read, and
//! [`Weights::notices`] names them.
//!
//! This module must not know the runtime, nor the meaning of the weights.

use std::any::Any;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::io::Read;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use leasehold::{Error, Result};
use leasehold_input::shown;
use leasehold_operators::DType;
use memmap2::Mmap;
use safetensors::tensor::{Dtype as StoredDtype, Metadata};

use crate::{Config, files, guess};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Bytes of the header's length, at the start of a safetensors file.
const LENGTH_BYTES: usize = 8;
/// The longest header that the format allows.
const MAX_HEADER: u64 = 100_000_000;
/// The maximum size of an index in bytes; those of models with thousands of tensors have a few
/// hundred thousand.
const MAX_INDEX: u64 = 64 << 20;

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
/// The prefix that a base model's names lack.
const PREFIX: &str = "model.";
/// Tensors that a notice names at most.
const NAMED: usize = 8;
/// Parts of names that only quantised weights have: GPTQ, AWQ, MLX, compressed-tensors,
/// bitsandbytes, quanto, AQLM, EXL2 and EXL3.
const QUANTISED: [&str; 29] = [
    "qweight",
    "qzeros",
    "g_idx",
    "scales",
    "zeros",
    "q_weight",
    "q_scale",
    "q_scale_max",
    "q_groups",
    "q_perm",
    "q_invperm",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_zero_point",
    "weight_shape",
    "input_scale",
    "absmax",
    "nested_absmax",
    "quant_map",
    "quant_state",
    "SCB",
    "_data",
    "_scale",
    "codes",
    "codebooks",
    "trellis",
    "Qidxs",
];

/// A tensor that a model of some [`Config`] must have.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorSpec {
    /// The tensor's name in the files.
    pub name: String,
    /// The tensor's shape; a projection is `[out, in]`.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// All tensors of a model with this config, in the order of their use.
    #[must_use]
    pub fn all(config: &Config) -> Vec<TensorSpec> {
        let mut all = Vec::new();
        let mut push =
            |name: String, shape: &[usize]| all.push(TensorSpec { name, shape: shape.to_vec() });
        let (hidden, inter) = (config.hidden_size, config.intermediate_size);
        let (query, kv) = (config.query_width(), config.kv_width());
        push(EMBEDDING.into(), &[config.vocab_size, hidden]);
        for layer in 0..config.num_hidden_layers {
            let mut linear = |name: &str, out: usize, input: usize, bias: bool| {
                push(format!("model.layers.{layer}.{name}.weight"), &[out, input]);
                if bias {
                    push(format!("model.layers.{layer}.{name}.bias"), &[out]);
                }
            };
            linear("self_attn.q_proj", query, hidden, config.attention_bias);
            linear("self_attn.k_proj", kv, hidden, config.attention_bias);
            linear("self_attn.v_proj", kv, hidden, config.attention_bias);
            linear("self_attn.o_proj", hidden, query, config.attention_output_bias);
            linear("mlp.gate_proj", inter, hidden, config.mlp_bias);
            linear("mlp.up_proj", inter, hidden, config.mlp_bias);
            linear("mlp.down_proj", hidden, inter, config.mlp_bias);
            for norm in ["q_norm", "k_norm"].iter().filter(|_| config.qk_norm) {
                push(format!("model.layers.{layer}.self_attn.{norm}.weight"), &[config.head_dim]);
            }
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                push(format!("model.layers.{layer}.{norm}.weight"), &[hidden]);
            }
        }
        push("model.norm.weight".into(), &[hidden]);
        if !config.tie_word_embeddings {
            push(HEAD.into(), &[config.vocab_size, hidden]);
        }
        all
    }

    /// The name of the first layer's tensor of this kind; `None` for a tensor of no layer.
    pub(crate) fn first_layers(&self) -> Option<String> {
        let (_, rest) = self.name.strip_prefix("model.layers.")?.split_once('.')?;
        Some(format!("model.layers.0.{rest}"))
    }
}

/// The bytes of one safetensors file, mapped or in memory. A clone shares them.
#[derive(Clone)]
pub struct Source(Arc<Inner>);

struct Inner {
    name: String,
    bytes: Bytes,
}

enum Bytes {
    Mapped(Mmap),
    Embedded(&'static [u8]),
    /// An aligned copy: the words, and the length in bytes.
    Copied(Box<[u64]>, usize),
}

impl Source {
    /// Maps a file. Blocks on opening it; pages are read at their first use.
    ///
    /// # Errors
    /// [`Error::NotFound`] if the file cannot be opened; [`Error::InvalidArgument`] if it is not
    /// regular, or is empty. Never waits for a pipe's writer.
    ///
    /// # Safety
    /// - While the mapping lives, no program changes or truncates the file. Otherwise the model's
    ///   contents would change, or the process would get `SIGBUS`. A rename of another file over
    ///   the file is allowed.
    pub unsafe fn map(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let cannot = |e: std::io::Error| Error::NotFound(format!("{name}: {e}").into());
        let file = files::open(path)?;
        if file.metadata().map_err(cannot)?.len() == 0 {
            return Err(Error::invalid(format!("{name}: truncated: the file is empty")));
        }
        // SAFETY: the mapping is read-only and private to this process. The caller vouches that no
        // program changes the file meanwhile, as every program that maps weights must.
        let map = unsafe { Mmap::map(&file) }.map_err(cannot)?;
        Ok(Self(Arc::new(Inner { name, bytes: Bytes::Mapped(map) })))
    }

    /// Reads a file into memory, so that no later change of the file matters. Blocks until it is
    /// read; the host needs memory for all of it.
    ///
    /// # Errors
    /// [`Error::NotFound`] if the file cannot be opened or read. [`Error::InvalidArgument`] if it
    /// is not regular, is empty, or is truncated meanwhile. [`Error::Unavailable`] if the host's
    /// memory has no room for it.
    pub fn read(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let cannot = |e: std::io::Error| Error::NotFound(format!("{name}: {e}").into());
        let mut file = files::open(path)?;
        let len = file.metadata().map_err(cannot)?.len();
        if len == 0 {
            return Err(Error::invalid(format!("{name}: truncated: the file is empty")));
        }
        let mut words = Vec::new();
        let count = usize::try_from(len.div_ceil(WORD as u64)).ok();
        let reserved = count.is_some_and(|count| words.try_reserve_exact(count).is_ok());
        if !reserved {
            let why = format!("{name}: the file's {len} bytes do not fit the host's memory");
            return Err(Error::Unavailable(why.into()));
        }
        let (mut part, mut left) = (vec![0; READ], len);
        while left > 0 {
            let part = &mut part[..left.min(READ as u64) as usize];
            file.read_exact(part).map_err(|e| match e.kind() {
                std::io::ErrorKind::UnexpectedEof => {
                    Error::invalid(format!("{name}: truncated: the file shrank while it was read"))
                }
                _ => cannot(e),
            })?;
            words.extend(part.chunks(WORD).map(word));
            left -= part.len() as u64;
        }
        let bytes = Bytes::Copied(words.into(), len as usize);
        Ok(Self(Arc::new(Inner { name, bytes })))
    }

    /// Bytes that are part of the program, from `include_bytes!`; `name` is the file's name in
    /// messages.
    #[must_use]
    pub fn embedded(name: impl Into<String>, bytes: &'static [u8]) -> Self {
        Self(Arc::new(Inner { name: name.into(), bytes: Bytes::Embedded(bytes) }))
    }

    /// The file's name, for messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The whole file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match &self.0.bytes {
            Bytes::Mapped(map) => map,
            Bytes::Embedded(bytes) => bytes,
            Bytes::Copied(words, len) => &as_bytes(words)[..*len],
        }
    }

    /// A copy of bytes, aligned to 8.
    fn copied(name: &str, bytes: &[u8]) -> Self {
        Self(Arc::new(Inner {
            name: name.to_owned(),
            bytes: Bytes::Copied(bytes.chunks(WORD).map(word).collect(), bytes.len()),
        }))
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source")
            .field("name", &self.name())
            .field("bytes", &self.bytes().len())
            .finish()
    }
}

/// Bytes of a word.
const WORD: usize = size_of::<u64>();
/// Bytes of a file in one read; a multiple of [`WORD`].
const READ: usize = 1 << 20;

/// At most eight bytes as a word in memory.
fn word(bytes: &[u8]) -> u64 {
    let mut padded = [0; WORD];
    padded[..bytes.len()].copy_from_slice(bytes);
    u64::from_ne_bytes(padded)
}

fn as_bytes(words: &[u64]) -> &[u8] {
    // SAFETY: the words are initialised, live as long as the result, and bytes have no alignment
    // and no invalid values.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}

/// One stored tensor: row-major, contiguous, aligned to its element. A clone shares the bytes.
#[derive(Debug, Clone)]
pub struct Tensor {
    source: Source,
    range: Range<usize>,
    dtype: DType,
    shape: Vec<usize>,
}

impl Tensor {
    /// The type of the elements.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape; the last dimension is contiguous.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The bytes in place; they begin at a multiple of [`DType::bytes`].
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.source.bytes()[self.range.clone()]
    }

    /// The offset of the bytes in [`source`](Self::source).
    #[must_use]
    pub fn data_offset(&self) -> usize {
        self.range.start
    }

    /// The file that contains the tensor, or a copy of the tensor if the file's bytes are
    /// misaligned or in float64.
    #[must_use]
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The owner of the [`bytes`](Self::bytes), which must outlive every use of their address: the
    /// mapping.
    #[must_use]
    pub fn keep_alive(&self) -> Arc<dyn Any + Send + Sync> {
        self.source.0.clone()
    }
}

/// All weights of a model, checked against its config.
///
/// ```no_run
/// use leasehold_llama::{Config, Weights};
///
/// let dir = std::path::Path::new("path/to/a/model");
/// let config = Config::from_dir(dir)?;
/// // SAFETY: no program changes the model's files while this program runs.
/// let weights = unsafe { Weights::from_dir(dir, &config) }?;
/// assert_eq!(weights.tensor("model.norm.weight")?.shape(), [config.hidden_size]);
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Weights {
    tensors: HashMap<String, Tensor>,
    notices: Vec<String>,
}

impl Weights {
    /// Opens `DIR/model.safetensors`, or else the shards that `DIR/model.safetensors.index.json`
    /// lists. Blocks on the files' headers, not on their contents.
    ///
    /// Two contents are read here. Tensors in float64 are rounded to f32, which takes time, and
    /// host memory for half of their bytes. A head that is stored although the config ties it is
    /// compared with the embedding. If they differ, the stored head counts, and a
    /// [notice](Self::notices) says so.
    ///
    /// # Errors
    /// Each error names the file and, if one is concerned, the tensor.
    /// - [`Error::NotFound`]: a missing file or tensor.
    /// - [`Error::InvalidArgument`]: a truncated or damaged file, a wrong shape, a tensor in two
    ///   shards, an index whose file names leave the directory.
    /// - [`Error::Unsupported`]: quantised weights; a tensor of a type that is neither one of
    ///   [`DType`] nor float64.
    ///
    /// # Safety
    /// - As [`Source::map`], for every file: while the weights, or a tensor of them, live, no
    ///   program changes or truncates the file.
    ///
    /// ```compile_fail,E0133
    /// # use leasehold_llama::{Config, Weights};
    /// fn open(dir: &std::path::Path, config: &Config) -> leasehold::Result<Weights> {
    ///     Weights::from_dir(dir, config)
    /// }
    /// ```
    pub unsafe fn from_dir(dir: &Path, config: &Config) -> Result<Self> {
        // SAFETY: the caller vouches for the directory's files; the index names no others.
        Self::from_files(Self::files(dir)?, config, |path| unsafe { Source::map(path) })
    }

    /// As [`from_dir`](Self::from_dir), but reads the files into memory. So no other program can
    /// disturb the weights, and the call blocks until all is read. The host needs memory for them.
    ///
    /// # Errors
    /// As [`from_dir`](Self::from_dir) and [`Source::read`].
    pub fn read_dir(dir: &Path, config: &Config) -> Result<Self> {
        // All headers first: a wrong file is refused before the memory of any is taken.
        let files = Self::files(dir)?;
        files.0.iter().try_for_each(|path| Header::check(path))?;
        Self::from_files(files, config, Source::read)
    }

    /// The files with a directory's weights, and their index if there is one.
    fn files(dir: &Path) -> Result<(Vec<PathBuf>, Option<Index>)> {
        files::refuse_quantised(dir)?;
        let (single, index) = (dir.join(SINGLE), dir.join(INDEX));
        if single.exists() {
            Ok((vec![single], None))
        } else if index.exists() {
            let index = Index::read(&index)?;
            Ok((index.files.iter().map(|file| dir.join(file)).collect(), Some(index)))
        } else {
            let why = guess::missing(dir, guess::NO_WEIGHTS);
            let what = format!("{}: neither {SINGLE} nor {INDEX}{why}", dir.display());
            Err(Error::NotFound(what.into()))
        }
    }

    fn from_files(
        (paths, index): (Vec<PathBuf>, Option<Index>),
        config: &Config,
        open: impl Fn(&Path) -> Result<Source>,
    ) -> Result<Self> {
        let sources = paths.iter().map(|path| open(path)).collect::<Result<Vec<_>>>()?;
        Self::from_sources(sources, index.as_ref(), config)
    }

    /// Reads one safetensors file that is part of the program; `name` is its name in messages.
    ///
    /// # Errors
    /// As [`from_dir`](Self::from_dir).
    pub fn from_embedded(name: &str, bytes: &'static [u8], config: &Config) -> Result<Self> {
        Self::from_sources(vec![Source::embedded(name, bytes)], None, config)
    }

    /// The tensor with this name, which has the prefix `model.` whether the files have it or not. A
    /// head that [is the embedding](Self::is_tied) has no name of its own.
    ///
    /// # Errors
    /// [`Error::NotFound`] if these weights do not have the tensor.
    pub fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.tensors
            .get(name)
            .ok_or_else(|| Error::NotFound(format!("tensor {name}: no part of this model").into()))
    }

    /// All tensors with their names, in no order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Bytes of all tensors together, without headers and without tensors outside the config.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|tensor| tensor.range.len() as u64).sum()
    }

    /// Returns whether the head is the embedding. The config's flag may say otherwise: the files
    /// decide.
    #[must_use]
    pub fn is_tied(&self) -> bool {
        !self.tensors.contains_key(HEAD)
    }

    /// The number of weights, a tied head counted once.
    #[must_use]
    pub fn parameter_count(&self) -> u64 {
        self.tensors.values().map(|t| (t.range.len() / t.dtype.bytes()) as u64).sum()
    }

    /// Facts of the files that a user may not expect, a line each: tensors that no one reads, a
    /// stored head beside a config that ties it.
    #[must_use]
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Weights in memory: words per tensor, of which the last may be longer than its elements.
    pub(crate) fn from_words(
        name: &str,
        tensors: Vec<(TensorSpec, Box<[u64]>)>,
        dtype: DType,
    ) -> Self {
        let tensor = |(spec, words): (TensorSpec, Box<[u64]>)| {
            let len = spec.shape.iter().product::<usize>() * dtype.bytes();
            let bytes = Bytes::Copied(words, len);
            let source = Source(Arc::new(Inner { name: name.to_owned(), bytes }));
            (spec.name, Tensor { source, range: 0..len, dtype, shape: spec.shape })
        };
        let tensors = tensors.into_iter().map(tensor).collect();
        Self { tensors, notices: Vec::new() }
    }

    /// Gives a tensor, if it is there, a second name. Both have the same bytes.
    pub(crate) fn share(&mut self, from: &str, name: String) {
        if let Some(tensor) = self.tensors.get(from).cloned() {
            self.tensors.insert(name, tensor);
        }
    }

    fn from_sources(sources: Vec<Source>, index: Option<&Index>, config: &Config) -> Result<Self> {
        let headers = sources.iter().map(Header::read).collect::<Result<Vec<_>>>()?;
        let mut holders: HashMap<&str, &Header> = HashMap::new();
        for header in &headers {
            for name in &header.names {
                if let Some(first) = holders.insert(name, header) {
                    let files = format!("{} and in {}", first.source.name(), header.source.name());
                    return Err(Error::invalid(format!(
                        "tensor {} is twice there: in {files}",
                        shown(name)
                    )));
                }
            }
        }
        let stored = Stored { holders, headers: &headers };
        stored.refuse_quantised()?;
        let (mut tensors, mut notices, mut read) = (HashMap::new(), Vec::new(), BTreeSet::new());
        for spec in TensorSpec::all(config) {
            let Some((name, header)) = stored.find(&spec.name, config.tie_word_embeddings) else {
                return Err(missing(&spec.name, &sources, index));
            };
            // A head that an alias calls the embedding has no tensor of its own.
            if read.insert(name) || spec.name != HEAD {
                tensors.insert(spec.name.clone(), header.tensor(name, &spec.shape)?);
            }
        }
        if config.tie_word_embeddings
            && let Some((name, header)) = stored.find(HEAD, false)
            && read.insert(name)
        {
            let head = header.tensor(name, &[config.vocab_size, config.hidden_size])?;
            let same = |embedding: &Tensor| {
                (embedding.dtype, embedding.bytes()) == (head.dtype, head.bytes())
            };
            if !tensors.get(EMBEDDING).is_some_and(same) {
                notices.push(format!(
                    "{}: {HEAD} is stored and differs from the embedding, although the config has \
                     tie_word_embeddings; the stored head is used",
                    header.source.name()
                ));
                tensors.insert(HEAD.to_owned(), head);
            }
        }
        notices.extend(stored.unread(&read));
        let weights = Self { tensors, notices };
        tracing::debug!(files = sources.len(), bytes = weights.total_bytes(), "weights opened");
        Ok(weights)
    }
}

/// The stored tensors of all files, by their names there.
struct Stored<'a> {
    holders: HashMap<&'a str, &'a Header>,
    headers: &'a [Header],
}

impl<'a> Stored<'a> {
    /// The stored name of a tensor and its file: the name itself, the name in a base model, what
    /// either is an alias of; the head for an embedding that is `tied` to it.
    fn find(&self, name: &str, tied: bool) -> Option<(&'a str, &'a Header)> {
        let tie = (tied && name == EMBEDDING).then_some(HEAD);
        let names = [Some(name), name.strip_prefix(PREFIX), tie];
        let names = || names.into_iter().flatten();
        let aliases = names().flat_map(|name| {
            self.headers.iter().filter_map(move |h| h.aliases()?.get(name).map(String::as_str))
        });
        names()
            .take(2)
            .chain(aliases)
            .chain(tie)
            .find_map(|name| self.holders.get_key_value(name))
            .map(|(name, header)| (*name, *header))
    }

    /// Refuses names that only quantised weights have.
    fn refuse_quantised(&self) -> Result<()> {
        let telling = |name: &&&str| name.split('.').any(|part| QUANTISED.contains(&part));
        match self.holders.keys().filter(telling).min() {
            Some(name) => {
                let file = self.holders[name].source.name();
                Err(files::quantised(&format!("{file}: tensor {}", shown(name))))
            }
            None => Ok(()),
        }
    }

    /// The notice of stored tensors that are not read.
    fn unread(&self, read: &BTreeSet<&str>) -> Option<String> {
        let mut names: Vec<&str> =
            self.holders.keys().copied().filter(|name| !read.contains(name)).collect();
        names.sort_unstable();
        let first: Vec<String> = names.iter().take(NAMED).map(|n| shown(n).to_string()).collect();
        let more = match names.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let first = first.join(", ");
        (!names.is_empty())
            .then(|| format!("the model does not use these stored tensors: {first}{more}"))
    }
}

#[cold]
fn missing(name: &str, sources: &[Source], index: Option<&Index>) -> Error {
    let at = match (index, sources) {
        (Some(index), _) => match index.file_of.get(name) {
            Some(file) => format!("{}, although {} places it there", shown(file), index.name),
            None => index.name.clone(),
        },
        (None, [only]) => only.name().to_owned(),
        (None, _) => "the files".to_owned(),
    };
    let hint =
        if name == HEAD { "; a head that is the embedding needs tie_word_embeddings" } else { "" };
    Error::NotFound(format!("tensor {name} is missing from {at}{hint}").into())
}

/// A file's checked header.
struct Header {
    source: Source,
    metadata: Metadata,
    names: Vec<String>,
    /// The base of the tensors' offsets.
    data_start: usize,
}

impl Header {
    /// Reads the header and compares the file's length with it. `safetensors` checks that the
    /// tensors cover the data without holes or overlaps, and that each tensor's bytes match its
    /// shape.
    fn read(source: &Source) -> Result<Self> {
        let bytes = source.bytes();
        let (metadata, data_start) = Self::parse(source.name(), &mut &*bytes, bytes.len() as u64)?;
        let names = metadata.offset_keys();
        Ok(Self { source: source.clone(), metadata, names, data_start })
    }

    /// As [`read`](Self::read), for a file on disk, of which nothing but the header is read.
    fn check(path: &Path) -> Result<()> {
        let name = path.display().to_string();
        let mut file = files::open(path)?;
        let len = file.metadata().map_err(|e| Error::NotFound(format!("{name}: {e}").into()))?;
        Self::parse(&name, &mut file, len.len()).map(|_| ())
    }

    /// The header at the beginning of a file with `len` bytes, and the bytes before the data.
    fn parse(name: &str, file: &mut impl Read, len: u64) -> Result<(Metadata, usize)> {
        let mut bytes = Vec::new();
        let mut read = |bytes: &mut Vec<u8>, most: u64| {
            let read = file.take(most).read_to_end(bytes);
            read.map_err(|e| Error::NotFound(format!("{name}: {e}").into()))
        };
        let parsed = Self::parse_with(name, len, &mut bytes, &mut read);
        parsed.or_else(|why| {
            read(&mut bytes, guess::LOOKED)?;
            // A header that begins as one belongs to a file that is damaged.
            let kind = match bytes.get(LENGTH_BYTES) {
                None | Some(b'{') => None,
                Some(_) => guess::seems(&bytes),
            };
            Err(kind
                .map_or(why, |kind| Error::invalid(format!("{name}: no safetensors file: {kind}"))))
        })
    }

    fn parse_with(
        name: &str,
        len: u64,
        bytes: &mut Vec<u8>,
        read: &mut dyn FnMut(&mut Vec<u8>, u64) -> Result<usize>,
    ) -> Result<(Metadata, usize)> {
        let truncated = |what: String| Error::invalid(format!("{name}: truncated: {what}"));
        read(bytes, LENGTH_BYTES as u64)?;
        let Some(length) = bytes.first_chunk::<LENGTH_BYTES>() else {
            return Err(truncated(match bytes.len() {
                0 => "the file is empty".to_owned(),
                read => format!("{read} bytes are too few for a safetensors header"),
            }));
        };
        let length = u64::from_le_bytes(*length);
        if length > MAX_HEADER {
            return Err(Error::invalid(format!(
                "{name}: no safetensors file: a header of {length} bytes"
            )));
        }
        read(bytes, length)?;
        let data_start = LENGTH_BYTES + length as usize;
        let Some(header) = bytes.get(LENGTH_BYTES..data_start) else {
            return Err(truncated(format!("a header of {length} bytes in a file of {len} bytes")));
        };
        let metadata: Metadata = serde_json::from_slice(header).map_err(|e| {
            Error::invalid(format!("{name}: damaged header: {}", shown(&e.to_string())))
        })?;
        let (known, there) = (metadata.data_len() as u64, len.saturating_sub(data_start as u64));
        match known.cmp(&there) {
            Ordering::Greater => {
                Err(truncated(format!("the header describes {known} bytes, {there} are there")))
            }
            Ordering::Less => Err(Error::invalid(format!(
                "{name}: damaged: the header describes {known} bytes of {there}"
            ))),
            Ordering::Equal => Ok((metadata, data_start)),
        }
    }

    /// The file's names for tensors that it stores once, such as `save_model` of safetensors writes
    /// them: the other name, and the stored one.
    fn aliases(&self) -> Option<&HashMap<String, String>> {
        self.metadata.metadata().as_ref()
    }

    fn tensor(&self, name: &str, wanted: &[usize]) -> Result<Tensor> {
        let file = self.source.name();
        let Some(info) = self.metadata.info(name) else {
            return Err(Error::NotFound(format!("tensor {name} is missing from {file}").into()));
        };
        if info.shape != wanted {
            let found = brief(&info.shape);
            return Err(Error::invalid(format!(
                "{file}: tensor {name}: shape {found}; the config implies {wanted:?}"
            )));
        }
        let dtype = match info.dtype {
            StoredDtype::BF16 => DType::Bf16,
            StoredDtype::F16 => DType::F16,
            StoredDtype::F32 => DType::F32,
            StoredDtype::F64 => {
                let range = info.data_offsets.0..info.data_offsets.1;
                let shape = info.shape.clone();
                return Ok(rounded(file, &self.source.bytes()[self.data_start..][range], shape));
            }
            other => return Err(not_read(file, name, other)),
        };
        // Both ends lie within the file: `read` compared the last offset with the file's length.
        let range = self.data_start + info.data_offsets.0..self.data_start + info.data_offsets.1;
        let tensor =
            Tensor { source: self.source.clone(), range, dtype, shape: info.shape.clone() };
        Ok(tensor.aligned())
    }
}

/// A tensor of f64 rounded to f32.
fn rounded(file: &str, bytes: &[u8], shape: Vec<usize>) -> Tensor {
    let round = |bytes: &[u8]| {
        (f64::from_bits(u64::from_le_bytes(word(bytes).to_ne_bytes())) as f32).to_le_bytes()
    };
    let pair = |pair: &[u8]| {
        let both: Vec<u8> = pair.chunks(WORD).flat_map(round).collect();
        word(&both)
    };
    let words: Box<[u64]> = bytes.chunks(2 * WORD).map(pair).collect();
    let range = 0..bytes.len() / 2;
    let bytes = Bytes::Copied(words, range.len());
    let source = Source(Arc::new(Inner { name: file.to_owned(), bytes }));
    Tensor { source, range, dtype: DType::F32, shape }
}

/// The error for a type that is not read: only complex numbers and truth values tell nothing of
/// quantised weights.
#[cold]
fn not_read(file: &str, name: &str, dtype: StoredDtype) -> Error {
    let what = format!("{file}: tensor {name}: stored as {dtype:?}");
    match dtype {
        StoredDtype::BOOL | StoredDtype::C64 => {
            Error::Unsupported(format!("{what}; supported: BF16, F16, F32 or F64").into())
        }
        _ => files::quantised(&what),
    }
}

/// A shape for a message: the dimensions if they are few.
fn brief(shape: &[usize]) -> String {
    match shape.get(..8) {
        Some(first) if shape.len() > 8 => {
            format!("{first:?} and {} dimensions more", shape.len() - 8)
        }
        _ => format!("{shape:?}"),
    }
}

impl Tensor {
    fn aligned(self) -> Self {
        if self.bytes().as_ptr().addr().is_multiple_of(self.dtype.bytes()) {
            return self;
        }
        let source = Source::copied(self.source.name(), self.bytes());
        Self { source, range: 0..self.range.len(), ..self }
    }
}

/// `model.safetensors.index.json`: the map from tensors to shards.
struct Index {
    name: String,
    file_of: BTreeMap<String, String>,
    files: BTreeSet<PathBuf>,
}

impl Index {
    fn read(path: &Path) -> Result<Self> {
        #[derive(serde::Deserialize)]
        struct Json {
            weight_map: BTreeMap<String, String>,
        }
        let name = path.display().to_string();
        let bytes = files::read(path, MAX_INDEX)?;
        let Json { weight_map: file_of } = serde_json::from_slice(&bytes).map_err(|e| {
            let why = guess::seems_no_json(&bytes);
            let why = why.unwrap_or_else(|| shown(&e.to_string()).to_string());
            Error::invalid(format!("{name}: no valid index: {why}"))
        })?;
        let mut files = BTreeSet::new();
        for (tensor, file) in &file_of {
            let relative = Path::new(file);
            if !relative.components().all(|part| matches!(part, Component::Normal(_)))
                || file.is_empty()
            {
                let (tensor, file) = (shown(tensor), shown(file));
                return Err(Error::invalid(format!(
                    "{name}: tensor {tensor}: \"{file}\" is no file of this directory"
                )));
            }
            files.insert(relative.to_owned());
        }
        if files.is_empty() {
            return Err(Error::invalid(format!("{name}: weight_map is empty")));
        }
        Ok(Self { name, file_of, files })
    }
}

#[cfg(test)]
mod tests;
