//! The candle peer of Leasehold's decode benchmark.
//!
//! Loads a Hugging Face directory of Llama architecture with candle, decodes greedily from prompt
//! ids with a KV cache, on the CPU, in f32 (candle 0.11 rejects bf16 matrix products there), and
//! prints one JSON object. Threads are rayon's: `RAYON_NUM_THREADS`. It must not know Leasehold:
//! nothing of it is linked, so that neither disturbs the other's figures.
//!
//! The clock: `prefill_ms` is the forward pass over the prompt up to the first new id; each further
//! id is one decode step, timed from the call to the id on the host; `decode_tokens_per_s` is their
//! number over their sum. A short generation with a cache of its own runs before, so that
//! first-touch costs are in neither side's figures.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use candle_core::{D, DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config, Llama, Llama3RopeConfig, Llama3RopeType};
use serde_json::{Map, Value, json};

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

const USAGE: &str = "usage: leasehold-peer-candle --model DIR --prompt-ids 1,2,3 [--tokens 64] [--warmup 8]";
/// The version that `Cargo.toml` pins.
const VERSION: &str = "0.11.1";

struct Args {
    model: PathBuf,
    prompt: Vec<u32>,
    tokens: usize,
    warmup: usize,
}

impl Args {
    fn parse() -> Result<Self> {
        let (mut model, mut prompt, mut tokens, mut warmup) = (None, None, 64, 8);
        let mut args = std::env::args().skip(1);
        while let Some(flag) = args.next() {
            let value = args.next().ok_or_else(|| format!("{flag} needs a value\n{USAGE}"))?;
            match flag.as_str() {
                "--model" => model = Some(PathBuf::from(value)),
                "--prompt-ids" => {
                    prompt = Some(value.split(',').map(|id| id.trim().parse()).collect::<Result<Vec<u32>, _>>()?)
                }
                "--tokens" => tokens = value.parse()?,
                "--warmup" => warmup = value.parse()?,
                _ => return Err(format!("unknown option {flag}\n{USAGE}").into()),
            }
        }
        let args = Args { model: model.ok_or(USAGE)?, prompt: prompt.ok_or(USAGE)?, tokens, warmup };
        if args.prompt.is_empty() || args.tokens < 2 {
            return Err("the prompt needs one id at least, and --tokens 2 at least".into());
        }
        Ok(args)
    }
}

fn main() -> Result<()> {
    let args = Args::parse()?;
    let config = config(&args.model)?;
    let device = Device::Cpu;
    let files = safetensors(&args.model)?;
    // SAFETY: the files are not written while this process runs.
    let vb = unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::F32, &device)? };
    let llama = Llama::load(vb, &config)?;

    if args.warmup > 0 {
        generate(&llama, &config, &args.prompt, args.warmup)?;
    }
    let run = generate(&llama, &config, &args.prompt, args.tokens)?;

    let total: Duration = run.steps.iter().sum();
    let mut sorted = run.steps.clone();
    sorted.sort();
    println!(
        "{}",
        json!({
            "peer": "candle",
            "version": VERSION,
            "model": args.model.display().to_string(),
            "dtype": "f32",
            "threads": candle_core::utils::get_num_threads(),
            "prompt_tokens": args.prompt.len(),
            "tokens": args.tokens,
            "prefill_ms": run.prefill.as_secs_f64() * 1e3,
            "decode_tokens_per_s": run.steps.len() as f64 / total.as_secs_f64(),
            "token_ms_p50": quantile(&sorted, 0.50),
            "token_ms_p99": quantile(&sorted, 0.99),
            "output_ids": run.ids,
        })
    );
    Ok(())
}

struct Run {
    prefill: Duration,
    steps: Vec<Duration>,
    ids: Vec<u32>,
}

fn generate(llama: &Llama, config: &Config, prompt: &[u32], tokens: usize) -> Result<Run> {
    let mut cache = Cache::new(true, DType::F32, config, &Device::Cpu)?;
    let mut next = |ids: &[u32], position: usize| -> Result<u32> {
        let input = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        let logits = llama.forward(&input, position, &mut cache)?;
        Ok(logits.squeeze(0)?.argmax(D::Minus1)?.to_scalar::<u32>()?)
    };
    let start = Instant::now();
    let mut id = next(prompt, 0)?;
    let prefill = start.elapsed();
    let (mut ids, mut steps) = (vec![id], Vec::with_capacity(tokens));
    while ids.len() < tokens {
        let start = Instant::now();
        id = next(&[id], prompt.len() + ids.len() - 1)?;
        steps.push(start.elapsed());
        ids.push(id);
    }
    Ok(Run { prefill, steps, ids })
}

fn quantile(sorted: &[Duration], q: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    Some(sorted[(last as f64 * q).round() as usize].as_secs_f64() * 1e3)
}

fn safetensors(dir: &Path) -> Result<Vec<PathBuf>> {
    let index = dir.join("model.safetensors.index.json");
    if !index.exists() {
        return Ok(vec![dir.join("model.safetensors")]);
    }
    let index: Value = serde_json::from_slice(&std::fs::read(index)?)?;
    let map = index["weight_map"].as_object().ok_or("the index has no weight_map")?;
    let mut names: Vec<&str> = map.values().filter_map(Value::as_str).collect();
    names.sort_unstable();
    names.dedup();
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}

/// Reads `config.json` by hand: candle's own reader knows neither `rope_parameters` nor a
/// `head_dim`, and would silently fall back to other values.
fn config(dir: &Path) -> Result<Config> {
    let file = std::fs::read(dir.join("config.json"))?;
    let json: Map<String, Value> = serde_json::from_slice(&file)?;
    let number = |key: &str| json.get(key).and_then(Value::as_u64).map(|n| n as usize);
    let need = |key: &str| number(key).ok_or_else(|| format!("config.json: {key} is missing"));
    let flag = |key: &str| json.get(key).and_then(Value::as_bool).unwrap_or(false);

    let (hidden_size, heads) = (need("hidden_size")?, need("num_attention_heads")?);
    if flag("attention_bias") || flag("mlp_bias") {
        return Err("candle's Llama has no biases".into());
    }
    if number("head_dim").is_some_and(|dim| dim * heads != hidden_size) {
        return Err("candle's Llama derives head_dim from hidden_size".into());
    }

    let rope = ["rope_parameters", "rope_scaling"].iter().find_map(|key| json.get(*key)?.as_object());
    let in_rope = |key: &str| rope.and_then(|r| r.get(key)).and_then(Value::as_f64);
    let theta = in_rope("rope_theta").or_else(|| json.get("rope_theta")?.as_f64()).unwrap_or(10_000.0);
    let kind = rope.and_then(|r| r.get("rope_type").or_else(|| r.get("type"))).and_then(Value::as_str);
    let rope_scaling = match kind.unwrap_or("default") {
        "default" => None,
        "llama3" => {
            let need = |key: &str| in_rope(key).ok_or_else(|| format!("config.json: {key} is missing"));
            Some(Llama3RopeConfig {
                factor: need("factor")? as f32,
                low_freq_factor: need("low_freq_factor")? as f32,
                high_freq_factor: need("high_freq_factor")? as f32,
                original_max_position_embeddings: need("original_max_position_embeddings")? as usize,
                rope_type: Llama3RopeType::Llama3,
            })
        }
        other => return Err(format!("candle's Llama has no rope type {other}").into()),
    };
    Ok(Config {
        hidden_size,
        intermediate_size: need("intermediate_size")?,
        vocab_size: need("vocab_size")?,
        num_hidden_layers: need("num_hidden_layers")?,
        num_attention_heads: heads,
        num_key_value_heads: number("num_key_value_heads").unwrap_or(heads),
        use_flash_attn: false,
        rms_norm_eps: json.get("rms_norm_eps").and_then(Value::as_f64).unwrap_or(1e-6),
        rope_theta: theta as f32,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling,
        max_position_embeddings: need("max_position_embeddings")?,
        tie_word_embeddings: flag("tie_word_embeddings"),
    })
}
