//! Text generation: a prompt in, tokens out, with the duration of each step.

use crate::config::Config;
use crate::decoder::Decoder;
use crate::model::Model;
use crate::rules::TokenRules;
use crate::weights::Weights;
use leasehold::Result;
use leasehold_operators::DType;
use leasehold_operators::ops::Sampling;
use std::time::{Duration, Instant};

/// The execution of the steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Launch by launch.
    Eager,
    /// Recorded once, replayed for every token.
    Graph,
}

/// A request to generate text.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    /// The prompt's ids.
    pub prompt: &'a [u32],
    /// The number of new tokens.
    pub tokens: usize,
    /// The execution of the steps.
    pub mode: Mode,
    /// The selection of tokens.
    pub sampling: Sampling,
    /// Ids that end the text early; the output includes them.
    pub stop_at: &'a [u32],
    /// Whether the logits of each token are checked, on the device, to be finite.
    pub check: bool,
}

impl Request<'_> {
    /// Checks the request against a model's config: what [`generate()`] refuses for it. Returns the
    /// number of positions that the sequence has.
    ///
    /// # Errors
    /// `InvalidArgument` for a prompt that is empty, too long or outside the vocabulary, or for
    /// zero tokens, or more than the model's context has room for.
    pub fn check(&self, config: &Config) -> Result<usize> {
        let invalid = |what: String| Err(leasehold::Error::invalid(what));
        if self.tokens == 0 {
            return invalid("no tokens are asked for; ask for at least one".to_owned());
        }
        if self.prompt.is_empty() {
            return invalid("the prompt is empty; give at least one token".to_owned());
        }
        let (context, prompt) = (config.context(), self.prompt.len());
        if prompt > context {
            return invalid(format!(
                "the prompt has {prompt} tokens; the model's context is {}: shorten the prompt",
                config.context_shown()
            ));
        }
        config.check_ids(self.prompt)?;
        // The last token is computed from the one before it, so it needs no position.
        match prompt.checked_add(self.tokens - 1) {
            Some(positions) if positions <= context => Ok(positions),
            _ => invalid(format!(
                "a prompt of {prompt} tokens and {} new ones do not fit the model's context of \
                 {}: ask for fewer",
                self.tokens,
                config.context_shown()
            )),
        }
    }
}

/// The result of a generation.
#[derive(Debug, Clone)]
pub struct Generation {
    /// The new ids.
    pub ids: Vec<u32>,
    /// The logits after the prompt's last position.
    pub last_logits: Vec<f32>,
    /// The time from the prompt to the first token.
    pub prefill: Duration,
    /// The time of each token after the first.
    pub steps: Vec<Duration>,
    /// The time of all steps together.
    pub decode: Duration,
    /// Driver calls of the allocator during the steps.
    pub driver_calls: u64,
    /// Blocks that the allocator returned during the steps.
    pub allocations: u64,
}

/// Bytes of memory that [`generate()`] needs beside the weights; from [`footprint`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// On the host: the rotary table before it is uploaded, lists of ids and times.
    pub host: u64,
    /// On the device: KV caches, the rotary table, the ring of tokens. Activations are omitted,
    /// because they do not grow with the text.
    pub device: u64,
}

/// The memory of a generation with this number of tokens, as far as it grows with the text.
/// Saturates.
#[must_use]
pub fn footprint(config: &Config, prompt: usize, tokens: usize, activations: DType) -> Footprint {
    let (prompt, tokens) = (prompt as u64, tokens as u64);
    let positions = prompt.saturating_add(tokens).saturating_sub(1);
    // A sine and a cosine for each pair of a head.
    let table = positions.saturating_mul(config.head_dim as u64).saturating_mul(4);
    let position = cached(config, activations);
    // An id, a time, and a similar amount for the text.
    let token = (size_of::<u32>() + size_of::<Duration>() + 8) as u64;
    Footprint {
        host: table
            .saturating_add(tokens.saturating_mul(token))
            .saturating_add(prompt.saturating_mul(4)),
        device: table
            .saturating_add(positions.saturating_mul(position))
            .saturating_add(tokens.saturating_mul(4)),
    }
}

/// Bytes of a position in the KV caches of all layers. Saturates.
fn cached(config: &Config, activations: DType) -> u64 {
    let heads = (config.num_key_value_heads as u64).saturating_mul(config.head_dim as u64);
    let layers = (config.num_hidden_layers as u64).saturating_mul(2 * activations.bytes() as u64);
    heads.saturating_mul(layers)
}

/// Bytes that the device reads for one new token; from [`traffic`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Of the weights: all but the embedding, of which one row; all of it if it is the head too.
    pub weights: u64,
    /// Of the KV caches.
    pub cache: u64,
}

/// The bytes that a token at this number of positions reads at least, each weight and each cached
/// position once. Activations are omitted: they stay in the device's caches. Saturates.
#[must_use]
pub fn traffic(
    config: &Config,
    weights: &Weights,
    positions: usize,
    activations: DType,
) -> Traffic {
    let mut bytes = weights.total_bytes();
    if !weights.is_tied()
        && let Ok(embedding) = weights.tensor("model.embed_tokens.weight")
    {
        let table = embedding.bytes().len() as u64;
        bytes = bytes.saturating_sub(table) + table / config.vocab_size.max(1) as u64;
    }
    let cache = cached(config, activations).saturating_mul(positions as u64);
    Traffic { weights: bytes, cache }
}

/// Products and sums that a prompt of so many tokens takes, up to its first new token: those of its
/// matrices, and of each position with the ones before it.
///
/// ```
/// let config = leasehold_llama::Config::from_slice(
///     br#"{"model_type": "llama", "vocab_size": 256, "hidden_size": 64,
///          "intermediate_size": 172, "num_hidden_layers": 2,
///          "num_attention_heads": 4, "num_key_value_heads": 2,
///          "max_position_embeddings": 128, "hidden_act": "silu"}"#,
///     "config.json",
/// )?;
/// let layer = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 172) + 4 * 64;
/// let head = 2 * 64 * 256;
/// assert_eq!(leasehold_llama::operations(&config, 1), f64::from(2 * layer + head));
/// # Ok::<(), leasehold::Error>(())
/// ```
#[must_use]
pub fn operations(config: &Config, tokens: usize) -> f64 {
    let number = |n: usize| n as f64;
    let (hidden, query, tokens) =
        (number(config.hidden_size), number(config.query_width()), number(tokens));
    let projections = hidden * (2.0 * query + 2.0 * number(config.kv_width()));
    let network = 3.0 * hidden * number(config.intermediate_size);
    let attention = 2.0 * query * tokens * (tokens + 1.0);
    let layer = 2.0 * tokens * (projections + network) + attention;
    number(config.num_hidden_layers) * layer + 2.0 * hidden * number(config.vocab_size)
}

/// Generates text. `on_token` is called with each new id as soon as it is available; its error ends
/// the generation.
///
/// One step is in flight while the previous token is read, unless the text may end early.
///
/// # Errors
/// `InvalidArgument` for a prompt that is empty, too long or outside the vocabulary, or for zero
/// tokens; `Check` for checked logits that are not finite; the stream's cause.
pub fn generate(
    model: &Model,
    request: &Request<'_>,
    on_token: &mut dyn FnMut(u32) -> Result<()>,
) -> Result<Generation> {
    generate_with_rules(model, request, &TokenRules::default(), on_token)
}

/// As [`generate()`], by rules that keep tokens back. The last logits are those that the rules have
/// changed.
///
/// # Errors
/// As [`generate()`], and as [`Decoder::set_rules`].
pub fn generate_with_rules(
    model: &Model,
    request: &Request<'_>,
    rules: &TokenRules,
    on_token: &mut dyn FnMut(u32) -> Result<()>,
) -> Result<Generation> {
    let positions = request.check(model.config())?;
    let mut decoder = Decoder::new(model, positions, request.tokens, request.sampling)?;
    decoder.set_rules(rules)?;
    if request.check {
        decoder.check();
    }
    let graph = match request.mode {
        Mode::Eager => None,
        Mode::Graph => Some(decoder.record()?),
    };
    model.runtime().stream().synchronize()?;

    let start = Instant::now();
    let mut point = decoder.prefill(request.prompt)?;
    let mut ids = Vec::with_capacity(request.tokens);
    ids.push(decoder.token(0, point)?);
    let prefill = start.elapsed();
    let last_logits = decoder.logits()?;
    on_token(ids[0])?;

    let mut steps = Vec::with_capacity(request.tokens);
    let before = model.runtime().allocator().stats();
    let next = |decoder: &mut Decoder| match &graph {
        Some(graph) => decoder.launch(graph),
        None => decoder.step(),
    };
    let ends = |id: u32| request.stop_at.contains(&id);
    let start = Instant::now();
    let mut mark = start;
    let may_end = !request.stop_at.is_empty();
    let mut in_flight = None;
    while ids.len() < request.tokens && !ids.last().is_some_and(|&id| ends(id)) {
        point = match in_flight.take() {
            Some(point) => point,
            None => next(&mut decoder)?,
        };
        if !may_end && ids.len() + 1 < request.tokens {
            in_flight = Some(next(&mut decoder)?);
        }
        let id = decoder.token(ids.len(), point)?;
        ids.push(id);
        let now = Instant::now();
        steps.push(now - mark);
        mark = now;
        on_token(id)?;
    }
    let decode = start.elapsed();
    let after = model.runtime().allocator().stats();
    Ok(Generation {
        ids,
        last_logits,
        prefill,
        steps,
        decode,
        driver_calls: after.driver_calls - before.driver_calls,
        allocations: after.allocations - before.allocations,
    })
}
