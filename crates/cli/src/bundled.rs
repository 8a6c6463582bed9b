//! The model that is part of the program, so that the binary works wherever it is copied.

use leasehold::Result;
use leasehold_llama::{Config, Tokenizer, Weights};

/// Bytes at an address at which weights can be used in place.
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

static WEIGHTS: &Aligned<[u8]> = &Aligned(*include_bytes!("../../../models/tiny-python/model.safetensors"));
static CONFIG: &[u8] = include_bytes!("../../../models/tiny-python/config.json");
static TOKENIZER: &[u8] = include_bytes!("../../../models/tiny-python/tokenizer.json");

/// The name that reports use.
pub(crate) const NAME: &str = "tiny-python (bundled)";

pub(crate) fn config() -> Result<Config> {
    Config::from_slice(CONFIG, NAME)
}

pub(crate) fn weights(config: &Config) -> Result<Weights> {
    Weights::from_embedded(NAME, &WEIGHTS.0, config)
}

pub(crate) fn tokenizer() -> Result<Tokenizer> {
    Tokenizer::from_slice(TOKENIZER, NAME)
}
