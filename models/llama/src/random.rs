//! Random weights for a config: a model for measurements, without files.

use crate::Config;
use crate::weights::{TensorSpec, Weights};
use half::{bf16, f16};
use leasehold::Result;
use leasehold::backend::threads;
use leasehold_operators::DType;

/// Words that one thread fills at least.
const PART: usize = 1 << 18;

impl Weights {
    /// Random weights in `dtype`: uniform with the usual initial deviation of 0.02, and norms of
    /// one. Equal arguments give equal bytes on every machine. A text from such weights has no
    /// meaning; the work for each token is that of a trained model of this shape.
    ///
    /// Takes host memory for all weights, and all processors while it fills them.
    ///
    /// ```
    /// use leasehold_llama::{Config, DType, Weights};
    /// let config = Config::from_slice(
    ///     br#"{"model_type": "llama", "vocab_size": 100, "hidden_size": 64,
    ///          "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4,
    ///          "max_position_embeddings": 128, "hidden_act": "silu"}"#,
    ///     "config.json",
    /// )?;
    /// let weights = Weights::random(&config, DType::Bf16, 1)?;
    /// assert_eq!(weights.total_bytes(), 2 * config.parameter_count());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Unavailable` if the system refuses a thread.
    pub fn random(config: &Config, dtype: DType, seed: u64) -> Result<Self> {
        Self::drawn(TensorSpec::all(config), dtype, seed)
    }

    /// Random weights as [`random`](Self::random), with one layer's memory for all layers: each has
    /// the values of the first. For shapes that the host's memory does not hold, on devices with
    /// memory of their own.
    ///
    /// Takes host memory for one layer, the embedding and the head.
    ///
    /// ```
    /// use leasehold_llama::{Config, DType, Weights};
    /// let config = Config::from_slice(
    ///     br#"{"model_type": "llama", "vocab_size": 100, "hidden_size": 64,
    ///          "intermediate_size": 172, "num_hidden_layers": 80, "num_attention_heads": 4,
    ///          "max_position_embeddings": 128, "hidden_act": "silu"}"#,
    ///     "config.json",
    /// )?;
    /// let weights = Weights::random_of_one_layer(&config, DType::Bf16, 1)?;
    /// assert_eq!(weights.total_bytes(), 2 * config.parameter_count());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// `Unavailable` if the system refuses a thread.
    pub fn random_of_one_layer(config: &Config, dtype: DType, seed: u64) -> Result<Self> {
        let first = |spec: &TensorSpec| spec.first_layers().is_none_or(|name| name == spec.name);
        let (own, others): (Vec<_>, Vec<_>) = TensorSpec::all(config).into_iter().partition(first);
        let mut weights = Self::drawn(own, dtype, seed)?;
        for spec in others {
            let from = spec.first_layers();
            weights.share(&from.unwrap_or_default(), spec.name);
        }
        Ok(weights)
    }

    fn drawn(specs: Vec<TensorSpec>, dtype: DType, seed: u64) -> Result<Self> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let (mut tensors, mut drawn) = (Vec::new(), 0);
        for spec in specs {
            let elements: usize = spec.shape.iter().product();
            let per_word = size_of::<u64>() / dtype.bytes();
            let mut words = vec![0_u64; elements.div_ceil(per_word)].into_boxed_slice();
            let part = words.len().div_ceil(threads).max(PART);
            let norm = spec.name.contains("norm");
            let parts = words.chunks_mut(part).enumerate().map(|(n, words)| {
                let first = drawn + (n * part * per_word) as u64;
                move || fill(words, dtype, norm, seed, first)
            });
            threads::run(parts)?;
            drawn += if norm { 0 } else { elements as u64 };
            tensors.push((spec, words));
        }
        Ok(Self::from_words("random weights", tensors, dtype))
    }
}

/// Fills words with elements, of which the first is draw number `first`.
fn fill(words: &mut [u64], dtype: DType, norm: bool, seed: u64, first: u64) {
    let per_word = (size_of::<u64>() / dtype.bytes()) as u64;
    for (n, word) in (0..).zip(words) {
        let mut bytes = [0; size_of::<u64>()];
        let elements = (0..).zip(bytes.chunks_exact_mut(dtype.bytes()));
        for (i, to) in elements {
            let draw = first + n * per_word + i;
            let value = if norm { 1.0 } else { symmetric(seed, draw) * 0.02 * 3_f32.sqrt() };
            match dtype {
                DType::Bf16 => to.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
                DType::F16 => to.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
                DType::F32 => to.copy_from_slice(&value.to_le_bytes()),
            }
        }
        *word = u64::from_ne_bytes(bytes);
    }
}

/// Draw number `draw` of a seed, uniform in [-1, 1). Steele, Lea, Flood: Fast splittable
/// pseudorandom number generators (2014).
fn symmetric(seed: u64, draw: u64) -> f32 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(draw.wrapping_add(1)));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    (z >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_layers_have_the_memory_of_one() {
        let config = Config::from_slice(
            br#"{"model_type": "llama", "vocab_size": 50, "hidden_size": 16,
                 "intermediate_size": 24, "num_hidden_layers": 12, "num_attention_heads": 2,
                 "max_position_embeddings": 32, "hidden_act": "silu"}"#,
            "config.json",
        )
        .unwrap();
        let all = Weights::random_of_one_layer(&config, DType::F32, 5).unwrap();
        let one = Config { num_hidden_layers: 1, ..config.clone() };
        let one = Weights::random(&one, DType::F32, 5).unwrap();
        for spec in TensorSpec::all(&config) {
            let name = spec.first_layers().unwrap_or_else(|| spec.name.clone());
            let (found, wanted) = (all.tensor(&spec.name).unwrap(), one.tensor(&name).unwrap());
            assert_eq!((found.shape(), found.bytes()), (wanted.shape(), wanted.bytes()), "{name}");
            assert_eq!(
                found.bytes().as_ptr(),
                all.tensor(&name).unwrap().bytes().as_ptr(),
                "{name}"
            );
        }
    }

    #[test]
    fn parts_of_any_size_give_the_elements_of_one_pass() {
        for dtype in [DType::Bf16, DType::F16, DType::F32] {
            let per_word = size_of::<u64>() / dtype.bytes();
            let (mut whole, mut parts) = ([0; 31], [0; 31]);
            fill(&mut whole, dtype, false, 9, 100);
            for (n, part) in parts.chunks_mut(7).enumerate() {
                fill(part, dtype, false, 9, 100 + (n * 7 * per_word) as u64);
            }
            assert_eq!(whole, parts, "{dtype}");
            fill(&mut parts, dtype, false, 10, 100);
            assert_ne!(whole, parts, "{dtype}: the seed counts");
        }
        let draws: Vec<f32> = (0..10_000).map(|i| symmetric(3, i)).collect();
        let mean = draws.iter().sum::<f32>() / 10_000.0;
        let square = draws.iter().map(|d| d * d).sum::<f32>() / 10_000.0;
        assert!(draws.iter().all(|d| (-1.0..1.0).contains(d)) && mean.abs() < 0.02, "{mean}");
        assert!((square - 1.0 / 3.0).abs() < 0.01, "{square}");
    }
}
