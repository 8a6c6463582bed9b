//! The command: a model from a directory, of random weights, or the bundled one, served on a
//! loopback address.
#![forbid(unsafe_code)]

use clap::Parser;
use leasehold::{Context, DeviceId};
use leasehold_llama::{Config, DType, GenerationConfig, Model, Tokenizer, Weights};
use leasehold_serve::engine::{Engine, Settings};
use leasehold_serve::http::{Limits, Server};
use leasehold_serve::template::Template;
use std::error::Error;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;

/// Serves a model with the endpoints of OpenAI's API.
#[derive(Parser)]
struct Arguments {
    /// A Hugging Face directory; the bundled model when left out
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// The config.json of a model without weights, for `--random-weights`
    #[arg(long, value_name = "FILE", requires = "random_weights", conflicts_with = "model")]
    config: Option<PathBuf>,
    /// Random weights of the shape of `--config`
    #[arg(long, requires = "config")]
    random_weights: bool,
    /// The directory of the tokenizer, if it is another one; the bundled one for random weights
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// The device
    #[arg(long, default_value = "cpu:0")]
    device: DeviceId,
    /// The element type of activations and KV caches
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16"])]
    dtype: String,
    /// Where it listens
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// Sequences that are decoded together
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    slots: u16,
    /// Requests that may wait for a slot
    #[arg(long, default_value_t = 32)]
    queue: u16,
    /// Tokens of a sequence, prompt and new ones; the model's context, or 4096 if that is less
    #[arg(long)]
    positions: Option<usize>,
    /// Seconds for an answer
    #[arg(long, default_value_t = 300)]
    answer: u32,
    /// Seconds for the requests that are there when the server is told to end
    #[arg(long, default_value_t = 30)]
    drain: u32,
}

fn main() -> Result<(), Box<dyn Error>> {
    let a = Arguments::parse();
    let dir = a.model.clone();
    let config = match (&dir, &a.config) {
        (Some(dir), _) => Config::from_dir(dir)?,
        (None, Some(file)) => Config::from_file(file)?,
        (None, None) => Config::from_slice(leasehold_tiny_python::CONFIG, "the bundled model")?,
    };
    let texts = a.tokenizer.as_ref().or(dir.as_ref());
    let tokenizer = match texts {
        Some(dir) => Tokenizer::from_dir(dir)?,
        None => Tokenizer::from_slice(leasehold_tiny_python::TOKENIZER, "the bundled tokenizer")?,
    };
    let template = texts.map(|dir| Template::from_dir(dir)).transpose()?.flatten();
    let generation = dir.as_deref().map(GenerationConfig::from_dir).transpose()?.flatten();
    let named = generation.as_ref().and_then(GenerationConfig::eos_token_ids);
    let settings = Settings {
        slots: a.slots.into(),
        positions: a.positions.unwrap_or(config.context().min(4096)),
        end_tokens: named.unwrap_or(&config.eos_token_ids).to_vec(),
    };
    let positions = settings.positions;
    let name = dir.as_ref().or(a.config.as_ref()).and_then(|path| path.file_stem());
    let name = name.map_or("tiny-python".into(), |name| name.to_string_lossy().into_owned());
    let dtype = if a.dtype == "bf16" { DType::Bf16 } else { DType::F32 };
    let random = a.random_weights;
    let load = move || {
        let runtime = Context::new().runtime(a.device)?;
        let weights = match &dir {
            // Reads the files, so another program may change them later.
            Some(dir) => Weights::read_dir(dir, &config)?,
            None if random => Weights::random(&config, config.dtype.unwrap_or(DType::Bf16), 1)?,
            None => Weights::from_embedded("tiny-python", leasehold_tiny_python::WEIGHTS, &config)?,
        };
        Model::load(&runtime, &config, &weights, dtype, &mut |_, _| {})
    };
    let Engine { jobs, status, thread } = Engine::start(Box::new(load), settings)?;
    let limits = Limits {
        connections: 4 * (usize::from(a.slots) + usize::from(a.queue)),
        body: 1 << 20,
        read: Duration::from_secs(10),
        answer: Duration::from_secs(a.answer.into()),
        drain: Duration::from_secs(a.drain.into()),
    };
    let places = Arc::new(Semaphore::new(usize::from(a.slots) + usize::from(a.queue)));
    let server =
        Server { model: name, tokenizer, template, positions, places, jobs, status, limits };
    let mut threads = tokio::runtime::Builder::new_multi_thread();
    threads.worker_threads(2).enable_all().build()?.block_on(async {
        let listener = TcpListener::bind(a.listen).await?;
        println!("listening on {}", listener.local_addr()?);
        Arc::new(server).serve(listener, told_to_end()?).await;
        Ok::<_, std::io::Error>(())
    })?;
    // The server and its sender are gone: the engine ends after the jobs whose clients are there.
    thread.join().map_err(|_| "the engine panicked".into())
}

/// Ready at the first SIGTERM or SIGINT.
fn told_to_end() -> std::io::Result<impl Future<Output = ()>> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
    })
}
