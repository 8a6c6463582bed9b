//! `config.json` of a Llama-architecture model: shapes, rotary embedding, biases, end tokens.
//!
//! The module reads both generations of the file. Version 5 of transformers keeps the rotary
//! settings under `rope_parameters`; earlier versions spread them over `rope_theta` and
//! `rope_scaling`. All checks are here, so later code meets no zero dimension, no size that
//! overflows and no ignored setting. A setting that this crate does not compute is
//! [`Error::Unsupported`], by name.
//!
//! This module must not know weights, devices or the runtime.

use std::f64::consts::TAU;
use std::path::Path;

use leasehold_core::{Error, Result};
use serde_json::Map;

use crate::fields::{Fields, brief, object};
use crate::{DType, files};

/// The maximum plausible dimension. Accepted sizes fit in 32 bits, products of two in 64.
const MAX_DIM: u64 = 1 << 24;
/// The maximum plausible number of layers.
const MAX_LAYERS: u64 = 1 << 14;
/// The maximum plausible context.
const MAX_POSITIONS: u64 = 1 << 28;
/// The maximum size of a `config.json` in bytes; real files have a few thousand.
const MAX_BYTES: u64 = 16 << 20;
/// The keys that makers of quantised weights write: transformers, MLX, compressed-tensors.
const QUANTISED: [&str; 3] = ["quantization_config", "quantization", "compression_config"];
/// transformers' default if the file has none.
const DEFAULT_THETA: f64 = 10_000.0;
/// transformers' default if the file has none.
const DEFAULT_EPS: f64 = 1e-6;

/// The shape and the settings of a model, checked.
///
/// The fields have their names from `config.json`. All sizes are non-zero and counts of elements.
///
/// ```
/// let config = leasehold_llama::Config::from_slice(
///     br#"{"model_type": "llama", "vocab_size": 256, "hidden_size": 64,
///          "intermediate_size": 172, "num_hidden_layers": 2,
///          "num_attention_heads": 4, "num_key_value_heads": 2,
///          "max_position_embeddings": 128, "hidden_act": "silu",
///          "rope_theta": 500000.0}"#,
///     "config.json",
/// )?;
/// assert_eq!((config.head_dim, config.queries_per_kv_head()), (16, 2));
/// assert_eq!(config.rope.inverse_frequencies(config.head_dim)[0], 1.0);
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// Rows of the embedding and of the head; token ids are less than this.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of one head; even. Need not be `hidden_size / num_attention_heads`.
    pub head_dim: usize,
    /// The longest sequence, prompt and generated tokens together.
    pub max_position_embeddings: usize,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f32,
    /// The rotary embedding.
    pub rope: Rope,
    /// The head is the embedding.
    pub tie_word_embeddings: bool,
    /// The four attention projections have biases.
    pub attention_bias: bool,
    /// The three feed-forward projections have biases.
    pub mlp_bias: bool,
    /// The token that begins a sequence.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// The type of most stored weights, according to the file; the weights' own headers decide.
    pub dtype: Option<DType>,
}

/// The rotary position embedding: the angle by which a position rotates each pair of a head.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Rope {
    /// The base of the frequencies.
    pub theta: f64,
    /// The change of the frequencies for contexts longer than the trained one.
    pub scaling: RopeScaling,
}

/// Changes to the rotary frequencies.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// None: `rope_type` `default`.
    None,
    /// All frequencies divided by a factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Long wavelengths divided by a factor, short ones kept, those in between blended, as in Llama
    /// 3.1.
    Llama3 {
        /// The divisor.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context that the model was trained with.
        original_max_position_embeddings: usize,
    },
}

impl Rope {
    /// The `head_dim / 2` inverse frequencies, in radians per position: pair `i` of a head (its
    /// elements `i` and `i + head_dim / 2`) at position `p` turns by `p * inverse_frequencies[i]`.
    ///
    /// Computed in f64 and rounded once.
    #[must_use]
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        (0..head_dim / 2)
            .map(|pair| {
                let plain = self.theta.powf(-((2 * pair) as f64) / head_dim as f64);
                self.scaling.apply(plain) as f32
            })
            .collect()
    }
}

impl RopeScaling {
    fn apply(&self, frequency: f64) -> f64 {
        match *self {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let turns = original_max_position_embeddings as f64 * frequency / TAU;
                if turns > high_freq_factor {
                    frequency
                } else if turns < low_freq_factor {
                    frequency / factor
                } else {
                    let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - kept) * frequency / factor + kept * frequency
                }
            }
        }
    }
}

impl Config {
    /// Refuses ids outside the vocabulary.
    pub(crate) fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().find(|&&id| id as usize >= self.vocab_size) {
            None => Ok(()),
            Some(id) => Err(Error::invalid(format!(
                "token id {id} is not in the vocabulary (0 to {})",
                self.vocab_size - 1
            ))),
        }
    }

    /// Reads `DIR/config.json`. Blocks on the file.
    ///
    /// [`Error::NotFound`] without a readable file. [`Error::InvalidArgument`] for a file that is
    /// not regular or has more than 16 MiB. [`Error::Unsupported`] for a directory of quantised
    /// weights. Otherwise as [`from_slice`](Self::from_slice).
    pub fn from_dir(dir: &Path) -> Result<Self> {
        files::refuse_quantised(dir)?;
        Self::from_file(&dir.join("config.json"))
    }

    /// Reads a `config.json` of any name. As [`from_dir`](Self::from_dir).
    ///
    /// # Errors
    /// As [`from_dir`](Self::from_dir).
    pub fn from_file(path: &Path) -> Result<Self> {
        let bytes = files::read(path, MAX_BYTES)?;
        Self::from_slice(&bytes, &path.display().to_string())
    }

    /// Reads the text of a `config.json`; `origin` names the file in messages.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`]: not a JSON object; a key that is missing, of the wrong type or
    ///   out of range; sizes that do not match.
    /// - [`Error::Unsupported`]: another architecture, activation, rope type or quantisation.
    pub fn from_slice(json: &[u8], origin: &str) -> Result<Self> {
        let map = object(json, origin)?;
        let config = parse(&Fields { map: &map, origin, prefix: "" })?;
        tracing::debug!(origin, ?config, "config read");
        Ok(config)
    }

    /// Query heads that share one key-value head.
    #[must_use]
    pub fn queries_per_kv_head(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads
    }

    /// Elements in one position's queries: the width of `q_proj`'s output and of `o_proj`'s input.
    #[must_use]
    pub fn query_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Elements in one position's keys, or values: the width of `k_proj`'s and `v_proj`'s output.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// The number of weights, a tied head counted once.
    #[must_use]
    pub fn parameter_count(&self) -> u64 {
        // The number fits: `parse` has computed it with checks.
        self.checked_parameter_count().unwrap_or(u64::MAX)
    }

    fn checked_parameter_count(&self) -> Option<u64> {
        let (hidden, inter) = (self.hidden_size as u64, self.intermediate_size as u64);
        let (query, kv) = (self.query_width() as u64, self.kv_width() as u64);
        let attention =
            hidden.checked_mul(query)?.checked_add(hidden.checked_mul(kv)?)?.checked_mul(2)?;
        let attention_bias = if self.attention_bias { query + 2 * kv + hidden } else { 0 };
        let mlp_bias = if self.mlp_bias { 2 * inter + hidden } else { 0 };
        let layer = hidden.checked_mul(inter)?.checked_mul(3)?.checked_add(attention)?;
        let layer = layer.checked_add(attention_bias + mlp_bias + 2 * hidden)?;
        let tables = if self.tie_word_embeddings { 1 } else { 2 };
        let outside =
            hidden.checked_mul(self.vocab_size as u64)?.checked_mul(tables)?.checked_add(hidden)?;
        layer.checked_mul(self.num_hidden_layers as u64)?.checked_add(outside)
    }
}

fn parse(fields: &Fields<'_>) -> Result<Config> {
    check_architecture(fields)?;
    let hidden_size = fields.dim("hidden_size", MAX_DIM)?;
    let num_attention_heads = fields.dim("num_attention_heads", MAX_DIM)?;
    let num_key_value_heads =
        fields.optional_dim("num_key_value_heads", MAX_DIM)?.unwrap_or(num_attention_heads);
    if !num_attention_heads.is_multiple_of(num_key_value_heads) {
        return Err(fields.invalid(
            "num_key_value_heads",
            format!(
                "{num_key_value_heads} does not divide num_attention_heads, {num_attention_heads}"
            ),
        ));
    }
    let head_dim = match fields.optional_dim("head_dim", MAX_DIM)? {
        Some(dim) => dim,
        None if hidden_size.is_multiple_of(num_attention_heads) => {
            hidden_size / num_attention_heads
        }
        None => {
            return Err(fields.invalid(
                "num_attention_heads",
                format!("{num_attention_heads} does not divide hidden_size, {hidden_size}, and there is no head_dim"),
            ));
        }
    };
    if !head_dim.is_multiple_of(2) {
        return Err(fields
            .invalid("head_dim", format!("{head_dim} is odd; the rotary embedding turns pairs")));
    }
    if num_attention_heads as u64 * head_dim as u64 > MAX_DIM {
        return Err(fields.invalid(
            "head_dim",
            format!("{num_attention_heads} heads of {head_dim} are too wide"),
        ));
    }
    let max_position_embeddings = fields.dim("max_position_embeddings", MAX_POSITIONS)?;
    let rms_norm_eps = fields.optional_number("rms_norm_eps")?.unwrap_or(DEFAULT_EPS);
    if !(0.0..1.0).contains(&rms_norm_eps) {
        return Err(
            fields.invalid("rms_norm_eps", format!("{rms_norm_eps} is not between 0 and 1"))
        );
    }
    let config = Config {
        vocab_size: fields.dim("vocab_size", MAX_DIM)?,
        hidden_size,
        intermediate_size: fields.dim("intermediate_size", MAX_DIM)?,
        num_hidden_layers: fields.dim("num_hidden_layers", MAX_LAYERS)?,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        max_position_embeddings,
        rms_norm_eps: rms_norm_eps as f32,
        rope: rope(fields, max_position_embeddings)?,
        tie_word_embeddings: fields.flag("tie_word_embeddings")?,
        attention_bias: fields.flag("attention_bias")?,
        mlp_bias: fields.flag("mlp_bias")?,
        bos_token_id: fields.optional_id("bos_token_id")?,
        eos_token_ids: fields.ids("eos_token_id")?,
        dtype: dtype(fields)?,
    };
    let bytes =
        config.checked_parameter_count().and_then(|n| n.checked_mul(size_of::<f32>() as u64));
    if bytes.is_none_or(|bytes| bytes > isize::MAX as u64) {
        return Err(Error::invalid(format!(
            "{}: the sizes make a model larger than any memory",
            fields.origin
        )));
    }
    Ok(config)
}

/// Refuses architectures that this crate would compute wrongly.
fn check_architecture(fields: &Fields<'_>) -> Result<()> {
    const LLAMA: &str = "LlamaForCausalLM";
    if let Some(value) = fields.get("architectures") {
        let Some(names) = value.as_array() else {
            return Err(fields.wrong_type("architectures", "a list of names", value));
        };
        if !names.iter().any(|name| name == LLAMA) {
            return Err(fields.unsupported("architectures", brief(value), LLAMA));
        }
    }
    match fields.optional_text("model_type")? {
        Some("llama") => {}
        Some(other) => return Err(fields.unsupported("model_type", other, "llama")),
        None if fields.get("architectures").is_some() => {}
        None => return Err(fields.invalid("model_type", "is missing, and so is architectures")),
    }
    match fields.optional_text("hidden_act")? {
        // Two names of x * sigmoid(x).
        None | Some("silu" | "swish") => {}
        Some(other) => return Err(fields.unsupported("hidden_act", other, "silu")),
    }
    for key in QUANTISED {
        if fields.get(key).is_some() {
            return Err(files::quantised(&format!("{}: {key}", fields.origin)));
        }
    }
    if let Some(value) = fields.get("sliding_window") {
        return Err(fields.unsupported("sliding_window", brief(value), "null"));
    }
    if let Some(value) = fields.get("layer_types")
        && !value.as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind == "full_attention"))
    {
        return Err(fields.unsupported(
            "layer_types",
            brief(value),
            "full_attention in every layer",
        ));
    }
    Ok(())
}

fn dtype(fields: &Fields<'_>) -> Result<Option<DType>> {
    for key in ["dtype", "torch_dtype"] {
        if let Some(name) = fields.optional_text(key)? {
            return match name.trim_start_matches("torch.") {
                "bfloat16" => Ok(Some(DType::Bf16)),
                "float16" | "half" => Ok(Some(DType::F16)),
                // Weights in float64 are rounded when they are opened.
                "float32" | "float" | "float64" | "double" => Ok(Some(DType::F32)),
                other => {
                    Err(fields.unsupported(key, other, "bfloat16, float16, float32 or float64"))
                }
            };
        }
    }
    Ok(None)
}

/// The rotary settings in either form, with transformers' order of precedence. A non-empty
/// `rope_scaling` precedes `rope_parameters`; within it `rope_theta` precedes the outer one.
fn rope(fields: &Fields<'_>, max_position_embeddings: usize) -> Result<Rope> {
    let mut inner = fields.inside("rope_parameters", "rope_parameters.")?;
    if let Some(old) =
        fields.inside("rope_scaling", "rope_scaling.")?.filter(|old| !old.map.is_empty())
    {
        inner = Some(old);
    }
    let empty = Map::new();
    let inner =
        inner.unwrap_or(Fields { map: &empty, origin: fields.origin, prefix: "rope_parameters." });
    if let Some((key, _)) = inner.map.iter().find(|(_, value)| value.is_object()) {
        return Err(inner.unsupported(
            key,
            "settings by kind of layer",
            "one setting for all layers",
        ));
    }

    for holder in [fields, &inner] {
        if let Some(part) = holder.optional_number("partial_rotary_factor")?
            && part != 1.0
        {
            return Err(holder.unsupported("partial_rotary_factor", part, "1"));
        }
    }
    let theta = match inner.optional_number("rope_theta")? {
        Some(theta) => inner.positive("rope_theta", theta)?,
        None => fields.positive(
            "rope_theta",
            fields.optional_number("rope_theta")?.unwrap_or(DEFAULT_THETA),
        )?,
    };

    let (key, kind) = match inner.optional_text("rope_type")? {
        Some(kind) => ("rope_type", kind),
        None => ("type", inner.optional_text("type")?.unwrap_or("default")),
    };
    let scaling = match kind {
        "default" => RopeScaling::None,
        "linear" => {
            RopeScaling::Linear { factor: inner.positive("factor", inner.number("factor")?)? }
        }
        "llama3" => {
            let low_freq_factor =
                inner.positive("low_freq_factor", inner.number("low_freq_factor")?)?;
            let high_freq_factor =
                inner.positive("high_freq_factor", inner.number("high_freq_factor")?)?;
            if high_freq_factor <= low_freq_factor {
                return Err(inner.invalid(
                    "high_freq_factor",
                    format!("{high_freq_factor} is not above low_freq_factor, {low_freq_factor}"),
                ));
            }
            const ORIGINAL: &str = "original_max_position_embeddings";
            let original = match fields.optional_dim(ORIGINAL, MAX_POSITIONS)? {
                Some(outside) => Some(outside),
                None => inner.optional_dim(ORIGINAL, MAX_POSITIONS)?,
            };
            RopeScaling::Llama3 {
                factor: inner.positive("factor", inner.number("factor")?)?,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original.unwrap_or(max_position_embeddings),
            }
        }
        other => return Err(inner.unsupported(key, other, "default, linear or llama3")),
    };
    Ok(Rope { theta, scaling })
}

#[cfg(test)]
mod tests;
