//! Model weights: safetensors files, memory-mapped or embedded, checked against the config.
//!
//! [`Weights`] opens `model.safetensors`, or the shards that `model.safetensors.index.json` lists,
//! and returns views: type, shape and the bytes in the mapping. No tensor is copied or converted,
//! except one whose bytes are not aligned to its element. A view keeps its mapping alive
//! ([`Tensor::keep_alive`]). So a view can be imported as a host buffer whose lease outlives these
//! objects.
//!
//! All checks run when the files are opened: each tensor of the config exists once, with the shape
//! that the config implies, in a type that the kernels read. Tensors outside the config are
//! ignored, as transformers does.
//!
//! This module must not know the runtime, nor the meaning of the weights.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use leasehold_core::{Error, Result};
use leasehold_input::shown;
use leasehold_operators::DType;
use memmap2::Mmap;
use safetensors::tensor::{Dtype as StoredDtype, Metadata};

use crate::{Config, files};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Bytes of the header's length, at the start of a safetensors file.
const LENGTH_BYTES: usize = 8;
/// The longest header that the format allows.
const MAX_HEADER: u64 = 100_000_000;
/// The maximum size of an index in bytes; those of models with thousands of tensors have a few
/// hundred thousand.
const MAX_INDEX: u64 = 64 << 20;

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
        push("model.embed_tokens.weight".into(), &[config.vocab_size, hidden]);
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
            linear("self_attn.o_proj", hidden, query, config.attention_bias);
            linear("mlp.gate_proj", inter, hidden, config.mlp_bias);
            linear("mlp.up_proj", inter, hidden, config.mlp_bias);
            linear("mlp.down_proj", hidden, inter, config.mlp_bias);
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                push(format!("model.layers.{layer}.{norm}.weight"), &[hidden]);
            }
        }
        push("model.norm.weight".into(), &[hidden]);
        if !config.tie_word_embeddings {
            push("lm_head.weight".into(), &[config.vocab_size, hidden]);
        }
        all
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
        const WORD: usize = size_of::<u64>();
        let mut words = vec![0_u64; bytes.len().div_ceil(WORD)];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks(WORD)) {
            let mut padded = [0; WORD];
            padded[..chunk.len()].copy_from_slice(chunk);
            *word = u64::from_ne_bytes(padded);
        }
        Self(Arc::new(Inner {
            name: name.to_owned(),
            bytes: Bytes::Copied(words.into(), bytes.len()),
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

    /// The file that contains the tensor, or an aligned copy of the tensor if the file's bytes are
    /// misaligned.
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
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Weights {
    tensors: HashMap<String, Tensor>,
}

impl Weights {
    /// Opens `DIR/model.safetensors`, or else the shards that `DIR/model.safetensors.index.json`
    /// lists. Blocks on the files' headers, not on their contents.
    ///
    /// # Errors
    /// Each error names the file and, if one is concerned, the tensor.
    /// - [`Error::NotFound`]: a missing file or tensor.
    /// - [`Error::InvalidArgument`]: a truncated or damaged file, a wrong shape, a tensor in two
    ///   shards, an index whose file names leave the directory.
    /// - [`Error::Unsupported`]: a tensor whose type [`DType`] does not have.
    ///
    /// # Safety
    /// - As [`Source::map`], for every file: while the weights, or a tensor of them, live, no
    ///   program changes or truncates the file.
    ///
    /// ```compile_fail,E0133
    /// # use leasehold_llama::{Config, Weights};
    /// fn open(dir: &std::path::Path, config: &Config) -> leasehold_core::Result<Weights> {
    ///     Weights::from_dir(dir, config)
    /// }
    /// ```
    pub unsafe fn from_dir(dir: &Path, config: &Config) -> Result<Self> {
        let single = dir.join(SINGLE);
        let index = dir.join(INDEX);
        if single.exists() {
            // SAFETY: the caller vouches for the directory's files.
            Self::from_sources(vec![unsafe { Source::map(&single) }?], None, config)
        } else if index.exists() {
            let index = Index::read(&index)?;
            // SAFETY: the caller vouches for the directory's files; the index names no others.
            let map = |file| unsafe { Source::map(&dir.join(file)) };
            let sources = index.files.iter().map(map).collect::<Result<Vec<_>>>()?;
            Self::from_sources(sources, Some(&index), config)
        } else {
            Err(Error::NotFound(format!("{}: neither {SINGLE} nor {INDEX}", dir.display()).into()))
        }
    }

    /// Reads one safetensors file that is part of the program; `name` is its name in messages.
    ///
    /// # Errors
    /// As [`from_dir`](Self::from_dir).
    pub fn from_embedded(name: &str, bytes: &'static [u8], config: &Config) -> Result<Self> {
        Self::from_sources(vec![Source::embedded(name, bytes)], None, config)
    }

    /// The tensor with this name.
    ///
    /// # Errors
    /// [`Error::NotFound`] if the config of these weights does not have the tensor.
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
        Self { tensors: tensors.into_iter().map(tensor).collect() }
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
        let mut tensors = HashMap::new();
        for spec in TensorSpec::all(config) {
            let header = match holders.get(spec.name.as_str()) {
                Some(header) => header,
                None => return Err(missing(&spec.name, &sources, index)),
            };
            tensors.insert(spec.name.clone(), header.tensor(&spec)?);
        }
        let weights = Self { tensors };
        tracing::debug!(files = sources.len(), bytes = weights.total_bytes(), "weights opened");
        Ok(weights)
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
    let hint = if name == "lm_head.weight" {
        "; a head that is the embedding needs tie_word_embeddings"
    } else {
        ""
    };
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
        let (name, file) = (source.name(), source.bytes());
        let truncated = |what: String| Error::invalid(format!("{name}: truncated: {what}"));
        let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
            return Err(truncated(format!(
                "{} bytes are too few for a safetensors header",
                file.len()
            )));
        };
        let length = u64::from_le_bytes(*length);
        if length > MAX_HEADER {
            return Err(Error::invalid(format!(
                "{name}: no safetensors file: a header of {length} bytes"
            )));
        }
        let Some((header, data)) = rest.split_at_checked(length as usize) else {
            return Err(truncated(format!(
                "a header of {length} bytes in a file of {} bytes",
                file.len()
            )));
        };
        let metadata: Metadata = serde_json::from_slice(header).map_err(|e| {
            Error::invalid(format!("{name}: damaged header: {}", shown(&e.to_string())))
        })?;
        if metadata.data_len() > data.len() {
            return Err(truncated(format!(
                "the header describes {} bytes, {} are there",
                metadata.data_len(),
                data.len()
            )));
        }
        if metadata.data_len() < data.len() {
            let (known, there) = (metadata.data_len(), data.len());
            return Err(Error::invalid(format!(
                "{name}: damaged: the header describes {known} bytes of {there}"
            )));
        }
        let names = metadata.offset_keys();
        Ok(Self {
            source: source.clone(),
            metadata,
            names,
            data_start: LENGTH_BYTES + length as usize,
        })
    }

    fn tensor(&self, spec: &TensorSpec) -> Result<Tensor> {
        let (file, name) = (self.source.name(), &spec.name);
        let Some(info) = self.metadata.info(name) else {
            return Err(Error::NotFound(format!("tensor {name} is missing from {file}").into()));
        };
        if info.shape != spec.shape {
            let (found, wanted) = (brief(&info.shape), &spec.shape);
            return Err(Error::invalid(format!(
                "{file}: tensor {name}: shape {found}; the config implies {wanted:?}"
            )));
        }
        let dtype = match info.dtype {
            StoredDtype::BF16 => DType::Bf16,
            StoredDtype::F16 => DType::F16,
            StoredDtype::F32 => DType::F32,
            other => {
                let message = format!(
                    "{file}: tensor {name}: stored as {other:?}; supported: BF16, F16 or F32"
                );
                return Err(Error::Unsupported(message.into()));
            }
        };
        // Both ends lie within the file: `read` compared the last offset with the file's length.
        let range = self.data_start + info.data_offsets.0..self.data_start + info.data_offsets.1;
        let tensor =
            Tensor { source: self.source.clone(), range, dtype, shape: info.shape.clone() };
        Ok(tensor.aligned())
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
            Error::invalid(format!("{name}: no valid index: {}", shown(&e.to_string())))
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
