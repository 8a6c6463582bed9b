//! The arguments of an example that measures a model: a device, a config, and numbers.
//!
//! Weights are random. Without a config the model is a small one; with one, all layers have the
//! first one's weights.
//!
//! This module must not know what is measured.

use leasehold::DeviceId;
use leasehold_llama::{Config, DType, Weights};
use std::error::Error;

const SMALL: &str = r#"{"model_type": "llama", "hidden_act": "silu", "vocab_size": 40, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
    "head_dim": 256, "max_position_embeddings": 1024, "tie_word_embeddings": false}"#;

pub struct Shape {
    pub device: DeviceId,
    pub config: Config,
    pub weights: Weights,
    pub dtype: DType,
    arguments: Vec<String>,
}

impl Shape {
    pub fn of_arguments() -> Result<Self, Box<dyn Error>> {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let device = arguments.first().map_or("cpu:0", |d| d.as_str()).parse()?;
        let text = arguments.get(1).map_or(Ok(SMALL.to_owned()), std::fs::read_to_string)?;
        let config = Config::from_slice(text.as_bytes(), "the config")?;
        let (dtype, weights) = match arguments.len() {
            0 | 1 => (DType::F32, Weights::random(&config, DType::F32, 1)?),
            _ => (DType::Bf16, Weights::random_of_one_layer(&config, DType::Bf16, 1)?),
        };
        Ok(Self { device, config, weights, dtype, arguments })
    }

    /// Argument `i`, or else this number.
    pub fn number(&self, i: usize, or: usize) -> Result<usize, Box<dyn Error>> {
        Ok(self.arguments.get(i).map_or(Ok(or), |n| n.parse())?)
    }
}
