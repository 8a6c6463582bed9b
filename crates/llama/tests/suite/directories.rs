//! Config, weights and tokenizer of every golden model, and a corrupted copy of one.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use leasehold_llama::{Config, Dtype, RopeScaling, TensorSpec, Tokenizer, Weights};

use crate::{golden, model_dirs};

fn name(dir: &Path) -> &str {
    dir.file_name().unwrap().to_str().unwrap()
}

#[test]
fn every_model_opens_whole() {
    for dir in model_dirs() {
        let config = Config::from_dir(&dir).unwrap();
        let weights = Weights::from_dir(&dir, &config).unwrap();
        assert_eq!(weights.iter().len(), TensorSpec::all(&config).len());
        let elements: u64 =
            weights.iter().map(|(_, tensor)| (tensor.bytes().len() / tensor.dtype().size()) as u64).sum();
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
            assert!(case.prompt_ids.len() + case.greedy.len() <= config.max_position_embeddings);
            assert!(case.prompt_ids.iter().chain(&case.greedy).all(|&id| (id as usize) < config.vocab_size));
            let best = (0..config.vocab_size).max_by(|&a, &b| case.last_logits[a].total_cmp(&case.last_logits[b]));
            assert_eq!(best, Some(case.greedy[0] as usize));
        }
    }
}

/// The shapes and spellings that the generated models are there for.
#[test]
fn the_models_cover_what_they_are_named_after() {
    let configs: BTreeMap<String, Config> =
        model_dirs().iter().map(|dir| (name(dir).to_owned(), Config::from_dir(dir).unwrap())).collect();
    let of = |name: &str| &configs[name];
    let ratio = |name: &str| (of(name).num_attention_heads, of(name).num_key_value_heads);
    assert_eq!(configs.len(), 12);
    assert_eq!((ratio("full-heads"), ratio("grouped-heads"), ratio("one-kv-head")), ((6, 6), (6, 2), (5, 1)));
    assert!(!of("untied-head").tie_word_embeddings && of("full-heads").tie_word_embeddings);
    assert_eq!(of("one-kv-head").eos_token_ids, [2, 7, 199]);
    let odd = of("odd-sizes");
    assert_eq!((odd.hidden_size, odd.intermediate_size, odd.head_dim, odd.query_width()), (60, 97, 14, 84));
    assert_eq!(of("wide-theta").rope.theta, 5e5);
    assert_eq!(of("llama3-rope").rope, of("llama3-rope-old").rope);
    assert!(matches!(of("llama3-rope").rope.scaling, RopeScaling::Llama3 { .. }));
    assert_eq!(of("linear-rope-old").rope.scaling, RopeScaling::Linear { factor: 4.0 });
    assert!(of("biases").attention_bias && of("biases").mlp_bias);
    let stored: Vec<Option<Dtype>> =
        ["full-heads", "grouped-heads", "one-kv-head"].iter().map(|name| of(name).dtype).collect();
    assert_eq!(stored, [Some(Dtype::F32), Some(Dtype::Bf16), Some(Dtype::F16)]);
}

/// All three bands of frequencies: kept, blended, divided.
#[test]
fn the_llama3_model_has_all_three_bands() {
    let dir = model_dirs().into_iter().find(|dir| name(dir) == "llama3-rope").unwrap();
    let config = Config::from_dir(&dir).unwrap();
    let scaled = config.rope.inverse_frequencies(config.head_dim);
    let mut plain = config.rope;
    plain.scaling = RopeScaling::None;
    let ratios: Vec<f32> = plain.inverse_frequencies(config.head_dim).iter().zip(&scaled).map(|(p, s)| p / s).collect();
    let near = |wanted: f32| ratios.iter().any(|ratio| (ratio / wanted - 1.0).abs() < 1e-5);
    assert!(near(1.0) && near(8.0), "{ratios:?}");
    assert!(ratios.iter().any(|&ratio| ratio > 1.1 && ratio < 7.0), "{ratios:?}");
}

#[test]
fn a_tokenizer_stands_beside_some_models() {
    for (model, size) in [("tiny-python", 4096), ("untied-head", 259)] {
        let dir = model_dirs().into_iter().find(|dir| name(dir) == model).unwrap();
        let tokenizer = Tokenizer::from_dir(&dir).unwrap();
        assert_eq!(tokenizer.vocab_size(), size);
        assert_eq!(tokenizer.vocab_size(), Config::from_dir(&dir).unwrap().vocab_size);
    }
}

#[test]
fn a_config_that_does_not_fit_the_weights_is_noticed() {
    let from = model_dirs().into_iter().find(|dir| name(dir) == "grouped-heads").unwrap();
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(from.join(file), dir.path().join(file)).unwrap();
    }
    let text = fs::read_to_string(dir.path().join("config.json")).unwrap();
    for (key, value, wrong, message) in [
        ("num_key_value_heads", 2, 3, "tensor model.layers.0.self_attn.k_proj.weight: shape [16, 48]"),
        ("num_hidden_layers", 2, 3, "tensor model.layers.2.self_attn.q_proj.weight is missing from"),
        ("vocab_size", 200, 201, "tensor model.embed_tokens.weight: shape [200, 48]; the config implies [201, 48]"),
    ] {
        let changed = text.replace(&format!("\"{key}\": {value}"), &format!("\"{key}\": {wrong}"));
        assert_ne!(changed, text);
        fs::write(dir.path().join("config.json"), changed).unwrap();
        let config = Config::from_dir(dir.path()).unwrap();
        let error = Weights::from_dir(dir.path(), &config).unwrap_err().to_string();
        assert!(error.contains(message) && error.contains("model.safetensors"), "{error}");
    }
}
