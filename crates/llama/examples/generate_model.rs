//! Writes a random Llama model of any size into a directory, for benchmarks: `config.json` and `model.safetensors` in bf16.
//!
//! ```sh
//! cargo run --release -p leasehold-llama --example generate_model -- DIR [KEY=VALUE …]
//! ```
//!
//! Keys, with the default of each (a model of 203 million parameters, the decode benchmark's large one): `vocab=32000
//! hidden=1024 intermediate=2816 layers=14 heads=16 kv_heads=8 head_dim=64 positions=2048 tied=true seed=1`.
//!
//! Weights are uniform with the deviation that training begins with, 0.02, from a generator of this file, so the same
//! arguments make the same bytes on every machine. The text that such a model writes means nothing; the work per token is
//! that of a trained model of its shape. Needs no Python, and memory for one tensor only.

use std::env;
use std::error::Error;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use leasehold_llama::{Config, TensorSpec};
use serde_json::{Map, Value, json};

const USAGE: &str = "usage: generate_model DIR [vocab=N hidden=N intermediate=N layers=N heads=N kv_heads=N head_dim=N \
                     positions=N tied=true|false seed=N]";

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let dir = args.next().filter(|dir| !dir.starts_with('-')).ok_or(USAGE)?;
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 14,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "attention_bias": false, "mlp_bias": false,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "bos_token_id": null, "eos_token_id": null,
    });
    let mut seed = 1;
    for arg in args {
        let (key, value) = arg.split_once('=').ok_or_else(|| format!("{arg}: KEY=VALUE is expected\n{USAGE}"))?;
        let name = match key {
            "vocab" => "vocab_size",
            "hidden" => "hidden_size",
            "intermediate" => "intermediate_size",
            "layers" => "num_hidden_layers",
            "heads" => "num_attention_heads",
            "kv_heads" => "num_key_value_heads",
            "head_dim" => "head_dim",
            "positions" => "max_position_embeddings",
            "tied" => "tie_word_embeddings",
            "seed" => {
                seed = value.parse()?;
                continue;
            }
            _ => return Err(format!("{key}: no such key\n{USAGE}").into()),
        };
        config[name] = serde_json::from_str(value)?;
    }
    write_model(Path::new(&dir), &config, seed)
}

fn write_model(dir: &Path, json: &Value, seed: u64) -> Result<(), Box<dyn Error>> {
    let text = serde_json::to_string_pretty(json)? + "\n";
    let config = Config::from_slice(text.as_bytes(), "config.json")?;
    let specs = TensorSpec::all(&config);
    fs::create_dir_all(dir)?;
    fs::write(dir.join("config.json"), text)?;

    let mut out = BufWriter::new(File::create(dir.join("model.safetensors"))?);
    let header = header(&specs)?;
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    let mut random = SplitMix64(seed);
    for spec in &specs {
        let count = spec.shape.iter().product();
        let mut bytes = Vec::with_capacity(count * 2);
        for _ in 0..count {
            // Norms begin at one; the rest is uniform with a deviation of 0.02.
            let value = if spec.name.contains("norm") { 1.0 } else { random.symmetric() * 0.02 * 3_f32.sqrt() };
            bytes.extend(half::bf16::from_f32(value).to_le_bytes());
        }
        out.write_all(&bytes)?;
    }
    out.into_inner()?.sync_all()?;
    println!("{}: {} parameters, {} bytes", dir.display(), config.parameter_count(), config.parameter_count() * 2);
    Ok(())
}

/// The safetensors header, padded so that the data begins at a multiple of 64 bytes.
fn header(specs: &[TensorSpec]) -> Result<Vec<u8>, serde_json::Error> {
    let (mut map, mut end) = (Map::new(), 0);
    for spec in specs {
        let start = end;
        end += spec.shape.iter().product::<usize>() * 2;
        map.insert(spec.name.clone(), json!({"dtype": "BF16", "shape": spec.shape, "data_offsets": [start, end]}));
    }
    let mut header = serde_json::to_vec(&map)?;
    let padded = (8 + header.len()).next_multiple_of(64) - 8;
    header.resize(padded, b' ');
    Ok(header)
}

/// Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014).
struct SplitMix64(u64);

impl SplitMix64 {
    /// Uniform in [-1, 1).
    fn symmetric(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }
}
