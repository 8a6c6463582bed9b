//! The bundled model, which is part of the program, so that the binary works without files.

use leasehold::Result;
use leasehold_llama::demo_model::{CONFIG, TOKENIZER, WEIGHTS};
use leasehold_llama::{Config, Tokenizer, Weights};

/// The name in reports.
pub(crate) const NAME: &str = "demo-model (bundled)";

pub(crate) fn config() -> Result<Config> {
    Config::from_slice(CONFIG, NAME)
}

pub(crate) fn weights(config: &Config) -> Result<Weights> {
    Weights::from_embedded(NAME, WEIGHTS, config)
}

pub(crate) fn tokenizer() -> Result<Tokenizer> {
    Tokenizer::from_slice(TOKENIZER, NAME)
}
