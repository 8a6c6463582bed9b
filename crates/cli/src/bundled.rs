//! The bundled model, which is part of the program, so that the binary works without files.

use leasehold::Result;
use leasehold_llama::{Config, Tokenizer, Weights};

/// Bytes with an alignment that allows the use of weights in place.
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

static WEIGHTS: &Aligned<[u8]> =
    &Aligned(*include_bytes!("../../../models/tiny-python/model.safetensors"));
static CONFIG: &[u8] = include_bytes!("../../../models/tiny-python/config.json");
static TOKENIZER: &[u8] = include_bytes!("../../../models/tiny-python/tokenizer.json");

/// The name in reports.
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
