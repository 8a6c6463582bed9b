//! Llama-family decoders.
//!
//! A model is a Hugging Face directory: [`Config`] reads its `config.json`, [`Weights`] maps its safetensors and checks them
//! against the config, [`Tokenizer`] reads its `tokenizer.json`. The same can be had from bytes that are part of the program.
//!
//! Everything that a file may have wrong is found while these three are made and comes back as a `leasehold_core::Error` that
//! names the file and the key or tensor.

mod config;
mod tokenizer;
mod weights;

pub use config::{Config, Rope, RopeScaling};
pub use tokenizer::{TextStream, Tokenizer};
pub use weights::{Dtype, Source, Tensor, TensorSpec, Weights};
