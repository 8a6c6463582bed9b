//! Arguments that several benchmarks have.

use crate::commands::run::{Activations, Files, parse_device};
use crate::failure::Failure;
use crate::host;
use crate::ranks::RankArguments;
use crate::system::{Devices, Request, System};
use leasehold::DeviceId;
use leasehold_llama::{Config, DType, Weights};
use leasehold_operators::kernels::cpu::isa::Isa;
use serde::Serialize;
use std::num::NonZeroU32;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct Common {
    /// Threads
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Prints one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, clap::Args)]
struct FilesArguments {
    /// A Hugging Face directory; the bundled model when left out
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// The config.json of a model without weights, for `--random-weights`
    #[arg(long, value_name = "FILE", requires = "random_weights", conflicts_with = "model")]
    config: Option<PathBuf>,
    /// Random weights of the shape of `--config`, in the type that it names, or else bf16
    #[arg(long, requires = "config")]
    random_weights: bool,
    /// All layers have the first one's random weights: for a model that the host's memory does not
    /// hold
    #[arg(long, requires = "random_weights")]
    equal_layers: bool,
    /// The seed of the random weights
    #[arg(long, requires = "random_weights", default_value_t = 1)]
    seed: u64,
}

impl FilesArguments {
    /// The files of the model, or random weights.
    fn read(&self) -> Result<Files, Failure> {
        let Some(path) = &self.config else { return Files::read(self.model.as_deref(), false) };
        let config = Config::from_file(path)?;
        let dtype = config.dtype.unwrap_or(DType::Bf16);
        let name = format!("{} with random weights", path.display());
        let needs = |config: &Config, cure: &str| {
            let need = config.parameter_count().saturating_mul(dtype.bytes() as u64);
            host::needs(&name, need, cure)
        };
        let weights = if self.equal_layers {
            let mut one = config.clone();
            one.num_hidden_layers = one.num_hidden_layers.min(1);
            needs(&one, "take a smaller shape")?;
            Weights::random_of_one_layer(&config, dtype, self.seed)?
        } else {
            needs(
                &config,
                "take a smaller shape, or --equal-layers on a device with memory of its own",
            )?;
            Weights::random(&config, dtype, self.seed)?
        };
        Ok(Files::without_text(name, config, weights))
    }

    /// The seed of the random weights.
    fn seed(&self) -> Option<u64> {
        self.random_weights.then_some(self.seed)
    }
}

/// A model on a device, which is measured.
#[derive(Debug, clap::Args)]
pub struct ModelArguments {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    files: FilesArguments,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) prompt: u32,
    /// The device
    #[arg(long, default_value = "cpu:0", value_parser = parse_device)]
    device: DeviceId,
    /// The level of the kernels' instructions on the CPU, to see what another processor would give;
    /// the best one when left out
    #[arg(long, value_name = "LEVEL")]
    level: Option<Isa>,
    /// The element type of activations and KV cache
    #[arg(long, value_enum, default_value_t = Activations::F32)]
    dtype: Activations,
}

impl ModelArguments {
    pub(crate) fn json(&self) -> bool {
        self.common.json
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype.into()
    }

    pub(crate) fn read(&self) -> Result<Files, Failure> {
        self.files.read()
    }

    /// The device's runtime, and what belongs to it.
    pub(crate) fn open(&self, devices: &dyn Devices) -> Result<System, Failure> {
        self.open_from(devices, self.device, 1)
    }

    /// As [`open`](Self::open), so many devices from this one on.
    pub(crate) fn open_from(
        &self,
        devices: &dyn Devices,
        device: DeviceId,
        number: u32,
    ) -> Result<System, Failure> {
        let threads = self.common.threads.map(usize::from);
        let request = Request::new(device, threads);
        devices.open(&Request { devices: number, level: self.level, ..request })
    }

    pub(crate) fn device(&self) -> DeviceId {
        self.device
    }

    /// The prompt of a sequence, for a vocabulary of `ids` entries. Every model has the first ids.
    pub(crate) fn prompt_of(&self, sequence: u32, ids: u32) -> Vec<u32> {
        prompt_of(self.prompt, sequence, ids)
    }

    /// The first part of a report about the model that has this name.
    pub(crate) fn subject(&self, model: String, system: &System) -> Subject {
        Subject {
            model,
            device: self.device.to_string(),
            simulated: system.is_simulated(),
            threads: self.common.threads,
            level: self.level.map(Isa::name),
            prompt: self.prompt,
            seed: self.files.seed(),
        }
    }
}

#[derive(Debug, clap::Args)]
pub struct DecodeArguments {
    #[command(flatten)]
    pub(crate) on: ModelArguments,
    /// Sequences that are decoded together, each with a prompt of its own; one sequence through the
    /// decoder of a single one when left out. Several numbers are measured one after the other,
    /// with one load of the weights: a line for each, or a JSON object
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub(crate) batch: Vec<NonZeroU32>,
    /// Measures how long the sequences of `--batch` wait while a prompt of so many tokens joins
    /// them, and nothing else
    #[arg(long, value_name = "N", requires = "batch")]
    pub(crate) join: Option<NonZeroU32>,
    #[command(flatten)]
    pub(crate) ranks: RankArguments,
    /// Also prints, to standard error, the operators of the prompt and of a step, and what computes
    /// each: the kernel, or the vendor's library
    #[arg(long)]
    pub(crate) verbose: bool,
    /// New tokens of a run
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) tokens: u32,
    /// Runs of each mode
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeat: u32,
}

impl DecodeArguments {
    /// The sequences of `--batch`, beside an option that takes one number of them.
    pub(crate) fn one_batch(&self, beside: &str) -> Result<Option<NonZeroU32>, Failure> {
        match self.batch[..] {
            [] => Ok(None),
            [sequences] => Ok(Some(sequences)),
            _ => Err(Failure::misuse(format!(
                "--batch: several numbers, and {beside} takes one; give one"
            ))),
        }
    }
}

/// A prompt of so many tokens, for a vocabulary of `ids` entries.
pub(crate) fn prompt_of(tokens: u32, sequence: u32, ids: u32) -> Vec<u32> {
    let from = sequence.wrapping_mul(31).wrapping_add(221);
    (0..tokens).map(|i| i.wrapping_mul(97).wrapping_add(from) % ids).collect()
}

/// The first part of a report: the model on a device.
#[derive(Debug, Serialize)]
pub(crate) struct Subject {
    model: String,
    device: String,
    /// The figures say nothing of a device.
    simulated: bool,
    threads: Option<u16>,
    /// The level that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    level: Option<&'static str>,
    /// Tokens of the prompt of each sequence.
    pub(crate) prompt: u32,
    /// Of the random weights.
    seed: Option<u64>,
}
