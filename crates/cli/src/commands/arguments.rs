//! Arguments that several benchmarks have.

use crate::commands::run::Files;
use crate::failure::Failure;
use crate::host;
use leasehold_llama::{Config, DType, Weights};
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(super) struct Common {
    /// Threads
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(super) threads: Option<u16>,
    /// Prints one JSON object
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct FilesArguments {
    /// A Hugging Face directory; the bundled model when left out
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// The config.json of a model without weights, for `--random-weights`
    #[arg(long, value_name = "FILE", requires = "random_weights", conflicts_with = "model")]
    config: Option<PathBuf>,
    /// Random weights of the shape of `--config`, in the type that it names, or else bf16
    #[arg(long, requires = "config")]
    random_weights: bool,
    /// The seed of the random weights
    #[arg(long, requires = "random_weights", default_value_t = 1)]
    seed: u64,
}

impl FilesArguments {
    /// The files of the model, or random weights.
    pub(super) fn read(&self) -> Result<Files, Failure> {
        let Some(path) = &self.config else { return Files::read(self.model.as_deref(), false) };
        let config = Config::from_file(path)?;
        let dtype = config.dtype.unwrap_or(DType::Bf16);
        let name = format!("{} with random weights", path.display());
        let need = config.parameter_count().saturating_mul(dtype.bytes() as u64);
        host::needs(&name, need, "take a smaller shape")?;
        let weights = Weights::random(&config, dtype, self.seed)?;
        Ok(Files::without_text(name, config, weights))
    }

    /// The seed of the random weights.
    pub(super) fn seed(&self) -> Option<u64> {
        self.random_weights.then_some(self.seed)
    }
}
