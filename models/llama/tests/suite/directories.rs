//! Config, weights and tokenizer of every golden model, and a corrupted copy of one.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use leasehold_llama::{Config, DType, RopeScaling, TensorSpec, Tokenizer};

use crate::{golden, model_dir, model_dirs, weights_of};

fn name(dir: &Path) -> &str {
    dir.file_name().unwrap().to_str().unwrap()
}

#[test]
fn every_model_opens_whole() {
    for dir in model_dirs() {
        let config = Config::from_dir(&dir).unwrap();
        let weights = weights_of(&dir, &config).unwrap();
        assert_eq!(weights.iter().len(), TensorSpec::all(&config).len());
        let elements: u64 = weights
            .iter()
            .map(|(_, tensor)| (tensor.bytes().len() / tensor.dtype().bytes()) as u64)
            .sum();
        assert_eq!(elements, config.parameter_count(), "{}", dir.display());
        let dtype = weights.tensor("model.embed_tokens.weight").unwrap().dtype();
        assert_eq!(Some(dtype), config.dtype, "{}", dir.display());
    }
}

#[test]
fn golden_values_fit_their_models() {
    for dir in model_dirs() {
        let config = Config::from_dir(&dir).unwrap();
        for case in golden(&dir) {
            assert_eq!(case.last_logits.len(), config.vocab_size);
            assert_eq!(case.argmax_per_position.len(), case.prompt_ids.len());
            assert_eq!(case.argmax_per_position.last(), case.greedy.first());
            assert!(case.prompt_ids.len() + case.greedy.len() <= config.context());
            assert!(
                case.prompt_ids
                    .iter()
                    .chain(&case.greedy)
                    .all(|&id| (id as usize) < config.vocab_size)
            );
            let best = (0..config.vocab_size)
                .max_by(|&a, &b| case.last_logits[a].total_cmp(&case.last_logits[b]));
            assert_eq!(best, Some(case.greedy[0] as usize));
        }
    }
}

/// The shapes and forms that the generated models must cover.
#[test]
fn the_models_cover_what_they_are_named_after() {
    let configs: BTreeMap<String, Config> = model_dirs()
        .iter()
        .map(|dir| (name(dir).to_owned(), Config::from_dir(dir).unwrap()))
        .collect();
    let of = |name: &str| &configs[name];
    let ratio = |name: &str| (of(name).num_attention_heads, of(name).num_key_value_heads);
    assert_eq!(configs.len(), 19);
    assert_eq!(
        (ratio("full-heads"), ratio("grouped-heads"), ratio("one-kv-head")),
        ((6, 6), (6, 2), (5, 1))
    );
    assert!(!of("untied-head").tie_word_embeddings && of("full-heads").tie_word_embeddings);
    assert_eq!(of("one-kv-head").eos_token_ids, [2, 7, 199]);
    let odd = of("odd-sizes");
    assert_eq!(
        (odd.hidden_size, odd.intermediate_size, odd.head_dim, odd.query_width()),
        (60, 97, 14, 84)
    );
    assert_eq!(of("wide-theta").rope.theta, 5e5);
    assert_eq!(of("llama3-rope").rope, of("llama3-rope-old").rope);
    assert!(matches!(of("llama3-rope").rope.scaling, RopeScaling::Llama3 { .. }));
    assert_eq!(of("linear-rope-old").rope.scaling, RopeScaling::Linear { factor: 4.0 });
    assert!(of("biases").attention_bias && of("biases").mlp_bias);
    assert_eq!((of("mistral").sliding_window, of("mistral").context()), (Some(64), 64));
    let biases = (of("qwen2").attention_bias, of("qwen2").attention_output_bias);
    assert_eq!((biases, of("qwen2").qk_norm, of("qwen3").qk_norm), ((true, false), false, true));
    for (name, trained, context) in
        [("dynamic-rope-old", Some(64), 256), ("longrope", Some(64), 128), ("yarn-rope", None, 128)]
    {
        assert_eq!((of(name).rope.trained_length(), of(name).context()), (trained, context));
    }
    let RopeScaling::Yarn { truncate, attention_factor, .. } = of("qwen3-yarn").rope.scaling else {
        panic!("{:?}", of("qwen3-yarn").rope)
    };
    assert!(!truncate && attention_factor == 1.25);
    let stored: Vec<Option<DType>> =
        ["full-heads", "grouped-heads", "one-kv-head"].iter().map(|name| of(name).dtype).collect();
    assert_eq!(stored, [Some(DType::F32), Some(DType::Bf16), Some(DType::F16)]);
}

/// All three bands of frequencies: kept, blended, divided.
#[test]
fn the_llama3_model_has_all_three_bands() {
    let dir = model_dir("llama3-rope");
    let config = Config::from_dir(&dir).unwrap();
    let scaled = config.rope.inverse_frequencies(config.head_dim, 1);
    let mut plain = config.rope.clone();
    plain.scaling = RopeScaling::None;
    let ratios: Vec<f32> = plain
        .inverse_frequencies(config.head_dim, 1)
        .iter()
        .zip(&scaled)
        .map(|(p, s)| p / s)
        .collect();
    let near = |wanted: f32| ratios.iter().any(|ratio| (ratio / wanted - 1.0).abs() < 1e-5);
    assert!(near(1.0) && near(8.0), "{ratios:?}");
    assert!(ratios.iter().any(|&ratio| ratio > 1.1 && ratio < 7.0), "{ratios:?}");
}

#[test]
fn a_tokenizer_stands_beside_some_models() {
    for (model, size) in [("demo-model", 4096), ("untied-head", 259)] {
        let dir = model_dir(model);
        let tokenizer = Tokenizer::from_dir(&dir).unwrap();
        assert_eq!(tokenizer.vocab_size(), size);
        assert_eq!(tokenizer.vocab_size(), Config::from_dir(&dir).unwrap().vocab_size);
    }
}

#[test]
fn a_config_that_does_not_fit_the_weights_is_noticed() {
    let from = model_dir("grouped-heads");
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(from.join(file), dir.path().join(file)).unwrap();
    }
    let text = fs::read_to_string(dir.path().join("config.json")).unwrap();
    for (key, value, wrong, message) in [
        (
            "num_key_value_heads",
            2,
            3,
            "tensor model.layers.0.self_attn.k_proj.weight: shape [16, 48]",
        ),
        (
            "num_hidden_layers",
            2,
            3,
            "tensor model.layers.2.self_attn.q_proj.weight is missing from",
        ),
        (
            "vocab_size",
            200,
            201,
            "tensor model.embed_tokens.weight: shape [200, 48]; the config implies [201, 48]",
        ),
    ] {
        let changed = text.replace(&format!("\"{key}\": {value}"), &format!("\"{key}\": {wrong}"));
        assert_ne!(changed, text);
        fs::write(dir.path().join("config.json"), changed).unwrap();
        let config = Config::from_dir(dir.path()).unwrap();
        let error = weights_of(dir.path(), &config).unwrap_err().to_string();
        assert!(error.contains(message) && error.contains("model.safetensors"), "{error}");
    }
}

/// A separate copy of a small model's directory.
fn copied() -> tempfile::TempDir {
    let from = model_dir("untied-head");
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(from.join(file), dir.path().join(file)).unwrap();
    }
    dir
}

fn opened(dir: &Path) -> leasehold::Result<()> {
    let config = Config::from_dir(dir)?;
    weights_of(dir, &config)?;
    Tokenizer::from_dir(dir).map(|_| ())
}

/// No call waits for a pipe's writer, and no endless file is read.
#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    let files =
        ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"];
    for file in files {
        for (device, words) in [
            (None, "a pipe; a regular file is expected"),
            (Some("/dev/zero"), "a device; a regular"),
            (Some("/"), "a folder; a regular"),
        ] {
            let dir = copied();
            let path = dir.path().join(file);
            if file.ends_with("index.json") {
                fs::remove_file(dir.path().join("model.safetensors")).unwrap();
            } else {
                fs::remove_file(&path).unwrap();
            }
            match device {
                Some(device) => std::os::unix::fs::symlink(device, &path).unwrap(),
                None => assert!(
                    std::process::Command::new("mkfifo").arg(&path).status().unwrap().success()
                ),
            }
            let text = opened(dir.path()).unwrap_err().to_string();
            assert!(text.contains(file) && text.contains(words), "{text}");
        }
    }
}

#[test]
fn what_seems_to_be_another_file_is_named() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4f\nsize 11421896\n";
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        for (text, words) in [
            (pointer, "the file is a pointer of Git LFS in its place; run 'git lfs pull'"),
            ("<!doctype html><html lang=\"en\"></html>", "the file is a page of the web"),
            ("Entry not found", "the file is a text, \"Entry not found\"; download it again"),
            ("", "the file is empty"),
        ] {
            let dir = copied();
            fs::write(dir.path().join(file), text).unwrap();
            let error = opened(dir.path()).unwrap_err().to_string();
            assert!(error.contains(file) && error.contains(words), "{error}");
        }
    }
}

#[test]
fn what_is_no_directory_of_a_model_is_named() {
    let cure = "nothing is downloaded: 'hf download meta-llama/Llama-3.2-1B --local-dir DIR'";
    let none = opened(Path::new("meta-llama/Llama-3.2-1B")).unwrap_err().to_string();
    assert!(none.contains("Llama-3.2-1B/config.json") && none.contains(cure), "{none}");
    let absolute = opened(Path::new("/nowhere/model")).unwrap_err().to_string();
    assert!(absolute.contains("/nowhere/model") && !absolute.contains("hf download"), "{absolute}");
    for (removed, added, words) in [
        ("config.json", "adapter_config.json", "an adapter (LoRA), no model; merge it"),
        ("config.json", "params.json", "the model's makers' own format"),
        ("config.json", "model-Q4_K_M.gguf", "a GGUF file for llama.cpp"),
        ("tokenizer.json", "tokenizer.model", "a tokenizer in another form; convert it"),
        ("tokenizer.json", "tekken.json", "a tokenizer in another form; convert it"),
        ("model.safetensors", "pytorch_model.bin", "weights as a pickle"),
    ] {
        let dir = copied();
        fs::remove_file(dir.path().join(removed)).unwrap();
        fs::write(dir.path().join(added), "").unwrap();
        let error = opened(dir.path()).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, leasehold::Error::NotFound(_)), "{text}");
        let parts = [removed, &format!("{added} is there: "), words];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
    let dir = copied();
    let file = dir.path().join("model.gguf");
    fs::write(&file, b"GGUF\x03\0\0\0").unwrap();
    let text = opened(&file).unwrap_err().to_string();
    let words = ["a directory is expected, and ", "model.gguf is a file; the file is a GGUF file"];
    assert!(words.iter().all(|part| text.contains(part)), "{text}");
}

#[test]
fn files_longer_than_their_limits_are_refused() {
    for (file, limit) in [
        ("config.json", 16 << 20),
        ("tokenizer.json", 256 << 20),
        ("model.safetensors.index.json", 64 << 20),
    ] {
        let dir = copied();
        if file.ends_with("index.json") {
            fs::remove_file(dir.path().join("model.safetensors")).unwrap();
        }
        fs::File::create(dir.path().join(file)).unwrap().set_len(limit + 1).unwrap();
        let text = opened(dir.path()).unwrap_err().to_string();
        let words =
            format!("{file}: the file has {} bytes; at most {limit} bytes are read", limit + 1);
        assert!(text.ends_with(&words), "{text}");
    }
}

/// A message's quotation is short and contains no control characters.
#[test]
fn texts_of_files_are_quoted_without_their_control_characters() {
    let long = "x".repeat(3 << 20);
    for (key, value) in [
        ("model_type", "\u{1b}]0;owned\u{7}\u{1b}[2J"),
        ("model_type", long.as_str()),
        ("hidden_act", "\r\u{9b}31m\u{202e}"),
        ("dtype", "a\nb"),
    ] {
        let dir = copied();
        let path = dir.path().join("config.json");
        let mut json: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        json[key] = value.into();
        fs::write(&path, json.to_string()).unwrap();
        let text = opened(dir.path()).unwrap_err().to_string();
        assert!(
            text.contains(key) && text.len() < 1000 && !text.contains(char::is_control),
            "{text:?}"
        );
    }
    let dir = copied();
    let path = dir.path().join("config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json["rope_parameters"] = serde_json::json!({"rope_type": long});
    fs::write(&path, json.to_string()).unwrap();
    let text = opened(dir.path()).unwrap_err().to_string();
    assert!(text.contains("rope_type: xxx") && text.len() < 1000, "{}", text.len());
    // A header of a million dimensions, and an index that names a file with commands.
    let dir = copied();
    let path = dir.path().join("model.safetensors");
    let shape = "1,".repeat(1_000_000);
    let header = format!(
        "{{\"model.embed_tokens.weight\":{{\"dtype\":\"U8\",\"shape\":[{shape}1],\"data_offsets\":[0,1]}}}}"
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.push(0);
    fs::write(&path, bytes).unwrap();
    let text = opened(dir.path()).unwrap_err().to_string();
    assert!(text.contains("and 999993 dimensions more") && text.len() < 1000, "{}", text.len());
    fs::remove_file(&path).unwrap();
    let index = serde_json::json!({"weight_map": {"\u{7}a": "../\u{1b}[2J"}});
    fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let text = opened(dir.path()).unwrap_err().to_string();
    assert!(
        text.contains("is no file of this directory") && !text.contains(char::is_control),
        "{text:?}"
    );
}
