//! Writes a model directory for benchmarks: a random Llama of any size, or another model's weights
//! in another type.
//!
//! ```sh
//! cargo run --release -p leasehold-llama --example generate_model -- DIR [KEY=VALUE …]
//! cargo run --release -p leasehold-llama --example generate_model -- DIR from=OTHER_DIR dtype=f32
//! ```
//!
//! Keys of a random model, with the default of each (210 million parameters, the decode benchmark's
//! large one): `vocab=32000 hidden=1024 intermediate=2816 layers=15 heads=16 kv_heads=8 head_dim=64
//! positions=2048 tied=true seed=1 dtype=bf16`.
//!
//! Random weights are those of `Weights::random`, so equal arguments give equal bytes on every
//! machine. The text of such a model has no meaning; the work for each token is that of a trained
//! model of its shape. The program needs no Python.

use std::env;
use std::error::Error;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;

use half::{bf16, f16};
use leasehold_llama::{Config, DType, Tensor, TensorSpec, Weights};
use serde_json::{Map, Value, json};

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

const USAGE: &str = "usage: generate_model DIR [vocab=N hidden=N intermediate=N layers=N heads=N kv_heads=N head_dim=N \
                     positions=N tied=true|false seed=N dtype=bf16|f16|f32]\n       generate_model DIR from=OTHER_DIR \
                     dtype=bf16|f16|f32";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("generate_model: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let mut args = env::args().skip(1);
    let dir = args.next().filter(|dir| !dir.starts_with('-') && !dir.contains('=')).ok_or(USAGE)?;
    let dir = Path::new(&dir);
    let (mut shape, mut seed, mut dtype, mut from) = (Map::new(), 1, DType::Bf16, None);
    for arg in args {
        let (key, value) =
            arg.split_once('=').ok_or_else(|| format!("{arg}: KEY=VALUE is expected\n{USAGE}"))?;
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
                seed = value.parse().map_err(|_| format!("{arg}: a whole number is expected"))?;
                continue;
            }
            "dtype" => {
                let known = [DType::Bf16, DType::F16, DType::F32]
                    .into_iter()
                    .find(|dtype| dtype.to_string() == value);
                dtype = known.ok_or_else(|| format!("{arg}: bf16, f16 or f32 is expected"))?;
                continue;
            }
            "from" => {
                from = Some(value.to_owned());
                continue;
            }
            _ => return Err(format!("{key}: no such key\n{USAGE}").into()),
        };
        let value = serde_json::from_str(value)
            .map_err(|_| format!("{arg}: a number, true or false is expected"))?;
        shape.insert(name.into(), value);
    }
    match from {
        None => random(dir, shape, dtype, seed),
        Some(from) if shape.is_empty() => convert(dir, Path::new(&from), dtype),
        Some(_) => Err(format!("from= takes the other model's shape\n{USAGE}").into()),
    }
}

/// A model with random weights; `shape` replaces defaults.
fn random(dir: &Path, shape: Map<String, Value>, dtype: DType, seed: u64) -> Result<()> {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 32_000,
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 15, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": true, "attention_bias": false, "mlp_bias": false,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "bos_token_id": null, "eos_token_id": null,
    });
    for (key, value) in shape {
        config[key] = value;
    }
    let text = config.to_string();
    let weights =
        Weights::random(&Config::from_slice(text.as_bytes(), "config.json")?, dtype, seed)?;
    write_model(dir, config, dtype, |spec, put| {
        elements(weights.tensor(&spec.name)?, put);
        Ok(())
    })
}

/// Converts the model in `from` to weights in `dtype`; copies its tokenizer if it has one.
fn convert(dir: &Path, from: &Path, dtype: DType) -> Result<()> {
    if fs::canonicalize(dir).is_ok_and(|dir| fs::canonicalize(from).is_ok_and(|from| from == dir)) {
        return Err(format!(
            "from={}: the same directory would be overwritten while it is read",
            from.display()
        )
        .into());
    }
    // SAFETY: the program writes only the other directory. The user must ensure that no other
    // program changes this one meanwhile.
    let weights = unsafe { Weights::from_dir(from, &Config::from_dir(from)?) }?;
    let config =
        serde_json::from_slice(&leasehold_input::read(&from.join("config.json"), 16 << 20)?)?;
    write_model(dir, config, dtype, |spec, put| {
        elements(weights.tensor(&spec.name)?, put);
        Ok(())
    })?;
    for file in ["tokenizer.json", "golden.json"] {
        if from.join(file).exists() {
            fs::copy(from.join(file), dir.join(file))?;
        }
    }
    Ok(())
}

/// A tensor's elements in order.
fn elements(tensor: &Tensor, put: &mut dyn FnMut(f32)) {
    let half = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
    for bytes in tensor.bytes().chunks_exact(tensor.dtype().bytes()) {
        put(match tensor.dtype() {
            DType::Bf16 => bf16::from_bits(half(bytes)).to_f32(),
            DType::F16 => f16::from_bits(half(bytes)).to_f32(),
            DType::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        });
    }
}

/// Writes both files; `fill` supplies the elements of one tensor after the other.
fn write_model(
    dir: &Path,
    mut json: Value,
    dtype: DType,
    mut fill: impl FnMut(&TensorSpec, &mut dyn FnMut(f32)) -> Result<()>,
) -> Result<()> {
    let name = match dtype {
        DType::Bf16 => "bfloat16",
        DType::F16 => "float16",
        DType::F32 => "float32",
    };
    json["dtype"] = name.into();
    let text = serde_json::to_string_pretty(&json)? + "\n";
    let config = Config::from_slice(text.as_bytes(), "config.json")?;
    let specs = TensorSpec::all(&config);
    fs::create_dir_all(dir)?;
    fs::write(dir.join("config.json"), text)?;

    let mut out = BufWriter::new(File::create(dir.join("model.safetensors"))?);
    let header = header(&specs, dtype)?;
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    for spec in &specs {
        let mut bytes = Vec::with_capacity(spec.shape.iter().product::<usize>() * dtype.bytes());
        fill(spec, &mut |value| match dtype {
            DType::Bf16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
            DType::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
            DType::F32 => bytes.extend(value.to_le_bytes()),
        })?;
        out.write_all(&bytes)?;
    }
    out.into_inner()?.sync_all()?;
    println!("{}: {} parameters in {dtype}", dir.display(), config.parameter_count());
    Ok(())
}

/// The safetensors header, padded so that the data begins at a multiple of 64 bytes.
fn header(specs: &[TensorSpec], dtype: DType) -> Result<Vec<u8>> {
    let (mut map, mut end) = (Map::new(), 0);
    for spec in specs {
        let start = end;
        end += spec.shape.iter().product::<usize>() * dtype.bytes();
        let entry = json!({"dtype": dtype.to_string().to_uppercase(), "shape": spec.shape, "data_offsets": [start, end]});
        map.insert(spec.name.clone(), entry);
    }
    let mut header = serde_json::to_vec(&map)?;
    let padded = (8 + header.len()).next_multiple_of(64) - 8;
    header.resize(padded, b' ');
    Ok(header)
}
