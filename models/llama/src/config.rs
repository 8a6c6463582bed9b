//! `config.json` of a model: shapes, rotary embedding, biases, end tokens.
//!
//! The families are Llama, Mistral, Qwen2 and Qwen3, each with transformers' defaults for absent
//! keys. The module reads both generations of the file. Version 5 of transformers keeps the rotary
//! settings under `rope_parameters`; earlier versions spread them over `rope_theta` and
//! `rope_scaling`. All checks are here, so later code meets no zero dimension, no size that
//! overflows and no ignored setting. A setting that this crate does not compute is
//! [`Error::Unsupported`], by name.
//!
//! This module must not know weights, devices or the runtime.

use std::f64::consts::TAU;
use std::path::Path;

use leasehold::{Error, Result};
use serde_json::{Map, Value};

use crate::fields::{Fields, brief, object};
use crate::{DType, files, guess};

const NAME: &str = "config.json";
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
/// assert_eq!(config.rope.inverse_frequencies(config.head_dim, 1)[0], 1.0);
/// # Ok::<(), leasehold::Error>(())
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
    /// The positions that the model was made for. [`context`](Self::context) has the longest
    /// sequence.
    pub max_position_embeddings: usize,
    /// The number of last positions that attention sees in some layers, if it is less than the
    /// context.
    pub sliding_window: Option<usize>,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f32,
    /// The rotary embedding.
    pub rope: Rope,
    /// The head is the embedding.
    pub tie_word_embeddings: bool,
    /// The projections of queries, keys and values have biases.
    pub attention_bias: bool,
    /// The projection of attention's output has a bias.
    pub attention_output_bias: bool,
    /// RMSNorm of each head of queries and keys before their rotation, as in Qwen3.
    pub qk_norm: bool,
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
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Rope {
    /// The base of the frequencies.
    pub theta: f64,
    /// The change of the frequencies for contexts longer than the trained one.
    pub scaling: RopeScaling,
}

/// Changes to the rotary frequencies.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// None: `rope_type` `default`.
    None,
    /// All frequencies divided by a factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// The base grows with a text that is longer than the trained context.
    Dynamic {
        /// The trained context times this is the longest text.
        factor: f64,
        /// The context that the model was trained with: `max_position_embeddings`.
        trained: usize,
    },
    /// Frequencies of few turns divided by a factor, those of many kept, those in between blended.
    /// Sines and cosines are multiplied by a factor.
    Yarn {
        /// The divisor.
        factor: f64,
        /// The factor of sines and cosines.
        attention_factor: f64,
        /// Frequencies of more turns in the trained context are kept.
        beta_fast: f64,
        /// Frequencies of fewer turns in the trained context are divided.
        beta_slow: f64,
        /// The bounds between the bands are whole numbers.
        truncate: bool,
        /// The context that the model was trained with.
        original_max_position_embeddings: usize,
    },
    /// Each frequency has a divisor for texts within the trained context, and one for longer texts.
    /// Sines and cosines are multiplied by a factor.
    LongRope {
        /// The divisors of short texts, one for each pair.
        short_factor: Vec<f64>,
        /// The divisors of long texts, one for each pair.
        long_factor: Vec<f64>,
        /// The factor of sines and cosines.
        attention_factor: f64,
        /// The context that the model was trained with.
        original_max_position_embeddings: usize,
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
    /// `length` is the number of positions of the text when the pair is turned. It counts where
    /// [`trained_length`](Self::trained_length) is less. Computed in f64 and rounded once.
    #[must_use]
    pub fn inverse_frequencies(&self, head_dim: usize, length: usize) -> Vec<f32> {
        let dim = head_dim as f64;
        let theta = match self.scaling {
            RopeScaling::Dynamic { factor, trained } if head_dim > 2 => {
                let grown = factor * length.max(trained) as f64 / trained as f64 - (factor - 1.0);
                self.theta * grown.powf(dim / (dim - 2.0))
            }
            _ => self.theta,
        };
        let scaled = |pair| {
            let plain = theta.powf(-((2 * pair) as f64) / dim);
            self.scaling.apply(plain, pair, length, (head_dim, theta)) as f32
        };
        (0..head_dim / 2).map(scaled).collect()
    }

    /// The length up to which the length of a text does not change the frequencies; `None` if it
    /// never does.
    #[must_use]
    pub fn trained_length(&self) -> Option<usize> {
        match self.scaling {
            RopeScaling::Dynamic { trained, .. } => Some(trained),
            RopeScaling::LongRope { original_max_position_embeddings: trained, .. } => {
                Some(trained)
            }
            _ => None,
        }
    }

    /// The factor of sines and cosines.
    #[must_use]
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. }
            | RopeScaling::LongRope { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }
}

impl RopeScaling {
    /// The frequency of a pair in a text of `length` positions.
    fn apply(
        &self,
        frequency: f64,
        pair: usize,
        length: usize,
        (head_dim, theta): (usize, f64),
    ) -> f64 {
        match *self {
            RopeScaling::None | RopeScaling::Dynamic { .. } => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                truncate,
                original_max_position_embeddings: trained,
                ..
            } => {
                // Where among the pairs a frequency makes so many turns in the trained context.
                let place = |turns: f64| {
                    let wavelength = trained as f64 / (turns * TAU);
                    head_dim as f64 * wavelength.ln() / (2.0 * theta.ln())
                };
                let (mut low, mut high) = (place(beta_fast), place(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                let divided = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                frequency / factor * divided + frequency * (1.0 - divided)
            }
            RopeScaling::LongRope {
                ref short_factor,
                ref long_factor,
                original_max_position_embeddings: trained,
                ..
            } => frequency / if length > trained { long_factor } else { short_factor }[pair],
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
        let bytes = files::read_in(dir, NAME, MAX_BYTES, guess::NO_CONFIG)?;
        Self::from_slice(&bytes, &dir.join(NAME).display().to_string())
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

    /// The longest sequence, prompt and generated tokens together: `max_position_embeddings`, or
    /// what dynamic or YaRN scaling makes of it, but not more than a sliding window.
    #[must_use]
    pub fn context(&self) -> usize {
        let trained = self.max_position_embeddings;
        let scaled = |trained: usize, factor: f64| (trained as f64 * factor) as usize;
        let scaled = match self.rope.scaling {
            RopeScaling::Dynamic { factor, trained } => scaled(trained, factor),
            RopeScaling::Yarn { factor, original_max_position_embeddings: original, .. } => {
                scaled(original, factor)
            }
            _ => trained,
        };
        let context = scaled.max(trained).min(MAX_POSITIONS as usize);
        self.sliding_window.map_or(context, |window| window.min(context))
    }

    /// The context for a message, with the reason if it is a sliding window.
    pub(crate) fn context_shown(&self) -> String {
        let context = self.context();
        if self.sliding_window == Some(context) {
            format!("{context}, its sliding_window, beyond which nothing is supported")
        } else {
            context.to_string()
        }
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
        let mut attention_bias = if self.attention_bias { query + 2 * kv } else { 0 };
        attention_bias += if self.attention_output_bias { hidden } else { 0 };
        attention_bias += if self.qk_norm { 2 * self.head_dim as u64 } else { 0 };
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
    let family = family(fields)?;
    check_architecture(fields)?;
    let hidden_size = fields.dim("hidden_size", MAX_DIM)?;
    let num_attention_heads = fields.dim("num_attention_heads", MAX_DIM)?;
    let absent =
        if fields.map.contains_key("num_key_value_heads") { None } else { family.kv_heads };
    let num_key_value_heads = fields
        .optional_dim("num_key_value_heads", MAX_DIM)?
        .unwrap_or(absent.unwrap_or(num_attention_heads));
    if !num_attention_heads.is_multiple_of(num_key_value_heads) {
        return Err(fields.invalid(
            "num_key_value_heads",
            format!(
                "{num_key_value_heads} does not divide num_attention_heads, {num_attention_heads}"
            ),
        ));
    }
    let absent = if fields.map.contains_key("head_dim") { None } else { family.head_dim };
    let head_dim = match fields.optional_dim("head_dim", MAX_DIM)?.or(absent) {
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
    const POSITIONS: &str = "max_position_embeddings";
    let max_position_embeddings = match fields.map.contains_key(POSITIONS) {
        true => fields.dim(POSITIONS, MAX_POSITIONS)?,
        false => family.positions,
    };
    let rms_norm_eps = fields.optional_number("rms_norm_eps")?.unwrap_or(DEFAULT_EPS);
    if !(0.0..1.0).contains(&rms_norm_eps) {
        return Err(
            fields.invalid("rms_norm_eps", format!("{rms_norm_eps} is not between 0 and 1"))
        );
    }
    let num_hidden_layers = fields.dim("num_hidden_layers", MAX_LAYERS)?;
    let output_bias = family.flagged_bias && fields.flag("attention_bias")?;
    let mut config = Config {
        vocab_size: fields.dim("vocab_size", MAX_DIM)?,
        hidden_size,
        intermediate_size: fields.dim("intermediate_size", MAX_DIM)?,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        max_position_embeddings,
        sliding_window: None,
        rms_norm_eps: rms_norm_eps as f32,
        rope: rope(fields, max_position_embeddings, head_dim)?,
        tie_word_embeddings: fields.flag("tie_word_embeddings")?,
        attention_bias: output_bias || family.input_bias,
        attention_output_bias: output_bias,
        qk_norm: family.qk_norm,
        mlp_bias: family.mlp_bias && fields.flag("mlp_bias")?,
        bos_token_id: fields.optional_id("bos_token_id")?,
        eos_token_ids: fields.ids("eos_token_id")?,
        dtype: dtype(fields)?,
    };
    let window = sliding_window(fields, family, num_hidden_layers)?;
    config.sliding_window = window.filter(|&window| window < config.context());
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

/// A family of models: its names, transformers' defaults for absent keys, and what sets it apart.
struct Family {
    model_type: &'static str,
    architecture: &'static str,
    base: &'static str,
    /// The number of key-value heads; `None` for as many as heads.
    kv_heads: Option<usize>,
    /// The width of a head; `None` for the quotient.
    head_dim: Option<usize>,
    positions: usize,
    /// The projections of queries, keys and values have biases.
    input_bias: bool,
    /// The config's `attention_bias` counts.
    flagged_bias: bool,
    /// The config's `mlp_bias` counts.
    mlp_bias: bool,
    qk_norm: bool,
    /// The sliding window without that key; `None` for none.
    window: Option<usize>,
    /// The window is that of some layers, and counts only with `use_sliding_window`.
    window_of_layers: bool,
}

static FAMILIES: [Family; 4] = [
    Family {
        model_type: "llama",
        architecture: "LlamaForCausalLM",
        base: "LlamaModel",
        kv_heads: None,
        head_dim: None,
        positions: 2048,
        input_bias: false,
        flagged_bias: true,
        mlp_bias: true,
        qk_norm: false,
        window: None,
        window_of_layers: false,
    },
    Family {
        model_type: "mistral",
        architecture: "MistralForCausalLM",
        base: "MistralModel",
        kv_heads: Some(8),
        head_dim: None,
        positions: 32 * 4096,
        input_bias: false,
        flagged_bias: false,
        mlp_bias: false,
        qk_norm: false,
        window: Some(4096),
        window_of_layers: false,
    },
    Family {
        model_type: "qwen2",
        architecture: "Qwen2ForCausalLM",
        base: "Qwen2Model",
        kv_heads: Some(32),
        head_dim: None,
        positions: 32768,
        input_bias: true,
        flagged_bias: false,
        mlp_bias: false,
        qk_norm: false,
        window: Some(4096),
        window_of_layers: true,
    },
    Family {
        model_type: "qwen3",
        architecture: "Qwen3ForCausalLM",
        base: "Qwen3Model",
        kv_heads: Some(32),
        head_dim: Some(128),
        positions: 32768,
        input_bias: false,
        flagged_bias: true,
        mlp_bias: false,
        qk_norm: true,
        window: Some(4096),
        window_of_layers: true,
    },
];

/// The family that `model_type` or else `architectures` names; refuses all others.
fn family(fields: &Fields<'_>) -> Result<&'static Family> {
    let names = |name: fn(&Family) -> &str| FAMILIES.each_ref().map(name).join(", ");
    let named = match fields.optional_text("model_type")? {
        None => None,
        Some(kind) => match FAMILIES.iter().find(|f| f.model_type == kind) {
            Some(family) => Some(family),
            None => {
                return Err(fields.unsupported("model_type", kind, &names(|f| f.model_type)));
            }
        },
    };
    let Some(value) = fields.get("architectures") else {
        let missing = || fields.invalid("model_type", "is missing, and so is architectures");
        return named.ok_or_else(missing);
    };
    let Some(list) = value.as_array() else {
        return Err(fields.wrong_type("architectures", "a list of names", value));
    };
    let fits = |f: &&Family| list.iter().any(|name| name == f.architecture || name == f.base);
    match named {
        Some(family) if fits(&family) => Ok(family),
        Some(family) => Err(fields.unsupported("architectures", brief(value), family.architecture)),
        None => FAMILIES.iter().find(fits).ok_or_else(|| {
            fields.unsupported("architectures", brief(value), &names(|f| f.architecture))
        }),
    }
}

/// The sliding window of any layer.
fn sliding_window(fields: &Fields<'_>, family: &Family, layers: usize) -> Result<Option<usize>> {
    let kinds = match fields.get("layer_types") {
        None => None,
        Some(value) => {
            let known = |kind: &Value| kind == "full_attention" || kind == "sliding_attention";
            match value.as_array().filter(|kinds| kinds.iter().all(known)) {
                Some(kinds) => Some(kinds),
                None => {
                    let known = "full_attention or sliding_attention in every layer";
                    return Err(fields.unsupported("layer_types", brief(value), known));
                }
            }
        }
    };
    let slides = kinds.map(|kinds| kinds.iter().any(|kind| kind == "sliding_attention"));
    let absent = if fields.map.contains_key("sliding_window") { None } else { family.window };
    let mut window = fields.optional_dim("sliding_window", MAX_POSITIONS)?.or(absent);
    if family.window_of_layers {
        let full = fields.optional_whole("max_window_layers")?.unwrap_or(28);
        let some = slides.unwrap_or(full < layers as i128);
        window = window.filter(|_| some);
        if !fields.flag("use_sliding_window")? {
            window = None;
        }
    }
    match (slides, window) {
        (Some(true), None) => {
            let found = "sliding_attention without a sliding_window";
            Err(fields.unsupported("layer_types", found, "full_attention in every layer"))
        }
        _ => Ok(window),
    }
}

/// Refuses settings that this crate would compute wrongly.
fn check_architecture(fields: &Fields<'_>) -> Result<()> {
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
fn rope(fields: &Fields<'_>, max_position_embeddings: usize, head_dim: usize) -> Result<Rope> {
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
    const ORIGINAL: &str = "original_max_position_embeddings";
    let original = || -> Result<usize> {
        let outside = fields.optional_dim(ORIGINAL, MAX_POSITIONS)?;
        let inside = inner.optional_dim(ORIGINAL, MAX_POSITIONS)?;
        Ok(outside.or(inside).unwrap_or(max_position_embeddings))
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
            RopeScaling::Llama3 {
                factor: inner.positive("factor", inner.number("factor")?)?,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original()?,
            }
        }
        "dynamic" => {
            let factor = inner.positive("factor", inner.number("factor")?)?;
            if factor < 1.0 {
                return Err(inner.invalid("factor", format!("{factor} is less than 1")));
            }
            RopeScaling::Dynamic { factor, trained: max_position_embeddings }
        }
        "yarn" => yarn(&inner, original()?, max_position_embeddings)?,
        "longrope" => longrope(&inner, original()?, max_position_embeddings, head_dim)?,
        other => {
            let known = "default, linear, dynamic, yarn, longrope or llama3";
            return Err(inner.unsupported(key, other, known));
        }
    };
    Ok(Rope { theta, scaling })
}

/// The factor of the settings. Without one it is what the positions imply.
fn implied(inner: &Fields<'_>, original: usize, positions: usize) -> Result<f64> {
    let implied = positions as f64 / original as f64;
    Ok(inner.optional_positive("factor")?.unwrap_or(implied))
}

fn yarn(inner: &Fields<'_>, original: usize, positions: usize) -> Result<RopeScaling> {
    let factor = implied(inner, original, positions)?;
    let scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
    let m = |key| -> Result<_> { Ok(inner.optional_number(key)?.filter(|&m| m != 0.0)) };
    let attention_factor =
        match (inner.optional_positive("attention_factor")?, m("mscale")?, m("mscale_all_dim")?) {
            (Some(given), _, _) => given,
            (None, Some(one), Some(all)) => scale(one) / scale(all),
            _ => scale(1.0),
        };
    Ok(RopeScaling::Yarn {
        factor,
        attention_factor,
        beta_fast: inner.optional_positive("beta_fast")?.unwrap_or(32.0),
        beta_slow: inner.optional_positive("beta_slow")?.unwrap_or(1.0),
        truncate: inner.get("truncate").is_none() || inner.flag("truncate")?,
        original_max_position_embeddings: original,
    })
}

fn longrope(
    inner: &Fields<'_>,
    original: usize,
    positions: usize,
    head_dim: usize,
) -> Result<RopeScaling> {
    let factor = implied(inner, original, positions)?;
    let usual =
        if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() };
    Ok(RopeScaling::LongRope {
        short_factor: inner.positives("short_factor", head_dim / 2)?,
        long_factor: inner.positives("long_factor", head_dim / 2)?,
        attention_factor: inner.optional_positive("attention_factor")?.unwrap_or(usual),
        original_max_position_embeddings: original,
    })
}

#[cfg(test)]
mod tests;
