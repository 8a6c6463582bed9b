//! An HTTP server over [`leasehold_llama::Batch`], with the endpoints of OpenAI's API: an example
//! of failure, cancellation and memory, and no product.
#![forbid(unsafe_code)]

mod api;
mod engine;
mod http;
mod json;
mod template;
#[cfg(test)]
mod tests;

use clap::Parser;
use leasehold::{Context, DeviceId};
use leasehold_llama::{Batch, Config, DType, GenerationConfig, Mode, Model, Tokenizer, Weights};
use std::{net::SocketAddr, path::PathBuf, time::Duration};
use template::Template;
use tokio::signal::unix::{SignalKind, signal};

type Done<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Serves a model with the endpoints of OpenAI's API.
#[derive(Parser)]
struct Arguments {
    /// A Hugging Face directory; without it, the bundled model
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// The name of the model in requests, if it is not that of the directory
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// A config.json: its shape with random weights takes the place of the model's
    #[arg(long, value_name = "CONFIG")]
    random_weights: Option<PathBuf>,
    #[arg(long, default_value = "cpu:0")]
    device: DeviceId,
    /// Activations and KV caches in bf16 instead of f32
    #[arg(long)]
    bf16: bool,
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// Sequences that are decoded together; as many requests may wait
    #[arg(long, default_value_t = 8)]
    slots: u16,
    /// Tokens of a sequence, prompt and new ones
    #[arg(long, default_value_t = 1024)]
    positions: usize,
    /// Seconds without a request after which the weights leave the device
    #[arg(long, value_name = "SECONDS")]
    idle: Option<u64>,
    /// The origin whose pages may call the server, * for all
    #[arg(long, value_name = "ORIGIN", default_value = "*")]
    allowed_origin: hyper::header::HeaderValue,
    /// The process of a chat template
    #[arg(long, hide = true)]
    render_chat: bool,
}

fn main() -> Done<()> {
    let a = Arguments::parse();
    if a.render_chat {
        return template::render_task();
    }
    let (folder, name) = match a.model {
        None => (leasehold_llama::demo_model::FOLDER.into(), "demo-model".to_owned()),
        Some(dir) => {
            let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            (dir, name)
        }
    };
    let random = a.random_weights.as_deref();
    let config = random.map_or_else(|| Config::from_dir(&folder), Config::from_file)?;
    let generation = GenerationConfig::from_dir(&folder)?;
    let named = generation.as_ref().and_then(GenerationConfig::eos_token_ids);
    let end_tokens = named.unwrap_or(&config.eos_token_ids).to_vec();
    let model = http::Model {
        name: a.served_model_name.unwrap_or(name),
        tokenizer: Tokenizer::from_dir(&folder)?,
        template: Template::from_dir(&folder)?,
        positions: a.positions,
        origin: a.allowed_origin,
    };
    let load = move || {
        let runtime = Context::new().runtime(a.device)?;
        let weights = match &a.random_weights {
            Some(_) => Weights::random(&config, config.dtype.unwrap_or(DType::Bf16), 1)?,
            // Reads the files, so another program may change them later.
            None => Weights::read_dir(&folder, &config)?,
        };
        let dtype = if a.bf16 { DType::Bf16 } else { DType::F32 };
        let model = Model::load_suspendable(&runtime, &config, &weights, dtype, &mut |_, _| {})?;
        Batch::new(&model, a.slots.into(), a.positions, Mode::Graph)
    };
    let idle = a.idle.map_or(Duration::MAX, Duration::from_secs);
    let engine = engine::Engine::new(Box::new(load), end_tokens, idle)?;
    let ready = |address| println!("listening on {address}");
    let stop = async { signal(SignalKind::terminate()).ok()?.recv().await };
    http::serve(engine, model, a.listen, ready, stop)
}
