//! Decoders of the Llama family (Llama, Mistral, Qwen2, Qwen3) from Hugging Face directories, eager
//! or as replayed graphs.
//!
//! A model is a Hugging Face directory: [`Config`] reads its `config.json`, [`Weights`] maps or
//! reads its safetensors and checks them against the config, [`Tokenizer`] reads its
//! `tokenizer.json`. All three can also be made from bytes that are part of the program.
//! [`GenerationConfig`] reads the tokens that end a text, the sampling, and
//! [`TokenRules`].
//!
//! - Rotary scaling: default, linear, dynamic, yarn, longrope and llama3. Other types and a
//!   `partial_rotary_factor` are refused by name.
//! - Attention: all positions before; no text goes beyond a sliding window.
//! - Weights: BF16, F16, F32, and F64, which is rounded to F32. Quantised weights are refused.
//! - Names: with `model.` or without, and a tied table under either name.
//!
//! [`Model`] loads the weights to a device of the runtime. [`Decoder`] holds a sequence (KV caches,
//! the loop from token to token) and runs its steps launch by launch or as a graph. [`generate()`]
//! does all of this. [`Batch`] decodes several sequences at once, for a server. [`TextStream`] and
//! [`StopStrings`] turn their tokens into text that ends where it should.
//!
//! A model may be divided over several ranks, each with a [`Part`] of its weights and of its heads
//! ([`Model::load_part`]).
//!
//! Three types to know: [`Config`], [`Weights`] and [`Model`].
//!
//! ```
//! use leasehold_llama::Config;
//! let dir = std::path::Path::new("no-such-model");
//! let why = Config::from_dir(dir).unwrap_err().to_string();
//! assert!(why.contains("no-such-model"), "{why}");
//! ```
//!
//! All errors of the files are found when these three are made. Each is a `leasehold::Error`
//! that names the file and the key or tensor.

mod batch;
mod caches;
mod config;
mod count;
mod decoder;
#[cfg(feature = "demo-model")]
pub mod demo_model;
mod fields;
mod files;
mod generate;
mod generation_config;
mod guess;
mod model;
mod network;
mod parallel;
mod random;
mod rules;
mod stop;
mod tokenizer;
mod weights;

pub use batch::{Batch, Drawn, SequenceId};
pub use caches::CacheBytes;
pub use config::{Config, Rope, RopeScaling};
pub use count::OperatorCount;
pub use decoder::Decoder;
pub use generate::{
    Footprint, Generation, Mode, Request, Traffic, footprint, generate, generate_with_rules,
    operations, traffic,
};
pub use generation_config::GenerationConfig;
pub use leasehold_operators::{DType, ops::Sampling};
pub use model::{Model, Progress};
pub use parallel::Part;
pub use rules::TokenRules;
pub use stop::StopStrings;
pub use tokenizer::{TextStream, Tokenizer};
pub use weights::{Source, Tensor, TensorSpec, Weights};
