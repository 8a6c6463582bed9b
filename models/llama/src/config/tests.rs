//! `config.json` in all its forms, and each possible error.

use serde_json::{Value, json};

use super::*;

/// A valid config with some keys changed; `null` removes one.
fn parse_with(changes: Value) -> Result<Config> {
    let mut base = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 200,
        "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    });
    base.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    Config::from_slice(base.to_string().as_bytes(), "config.json")
}

fn rope_with(changes: Value) -> Rope {
    parse_with(changes).unwrap().rope
}

const LLAMA3: RopeScaling = RopeScaling::Llama3 {
    factor: 8.0,
    low_freq_factor: 1.0,
    high_freq_factor: 4.0,
    original_max_position_embeddings: 64,
};

#[test]
fn the_bundled_config() {
    let config = Config::from_slice(crate::demo_model::CONFIG, "demo-model").unwrap();
    assert_eq!(
        config,
        Config {
            vocab_size: 4096,
            hidden_size: 256,
            intermediate_size: 688,
            num_hidden_layers: 6,
            num_attention_heads: 8,
            num_key_value_heads: 4,
            head_dim: 32,
            max_position_embeddings: 1024,
            rms_norm_eps: 1e-5,
            rope: Rope { theta: 10_000.0, scaling: RopeScaling::None },
            tie_word_embeddings: true,
            attention_bias: false,
            attention_output_bias: false,
            qk_norm: false,
            sliding_window: None,
            mlp_bias: false,
            bos_token_id: Some(0),
            eos_token_ids: vec![0],
            dtype: Some(DType::Bf16),
        }
    );
    assert_eq!(
        (config.query_width(), config.kv_width(), config.queries_per_kv_head()),
        (256, 128, 2)
    );
    assert_eq!(config.parameter_count(), 5_401_856);
}

#[test]
fn what_is_left_out_has_transformers_defaults() {
    let config = parse_with(
        json!({"num_key_value_heads": null, "rms_norm_eps": null, "architectures": null}),
    )
    .unwrap();
    assert_eq!((config.num_key_value_heads, config.head_dim), (6, 8));
    assert_eq!(config.rms_norm_eps, 1e-6);
    assert_eq!(config.rope, Rope { theta: 10_000.0, scaling: RopeScaling::None });
    assert!(!config.tie_word_embeddings && !config.attention_bias && !config.mlp_bias);
    assert_eq!((config.bos_token_id, config.eos_token_ids, config.dtype), (None, vec![], None));
}

#[test]
fn head_dim_may_differ_from_the_quotient() {
    let config =
        parse_with(json!({"head_dim": 14, "num_attention_heads": 5, "num_key_value_heads": 1}))
            .unwrap();
    assert_eq!((config.query_width(), config.kv_width()), (70, 14));
}

#[test]
fn end_tokens_as_one_or_a_list() {
    assert_eq!(parse_with(json!({"eos_token_id": 7})).unwrap().eos_token_ids, [7]);
    assert_eq!(parse_with(json!({"eos_token_id": [7, 9]})).unwrap().eos_token_ids, [7, 9]);
}

#[test]
fn whole_numbers_may_be_written_as_floats_and_floats_as_whole_numbers() {
    let config = parse_with(json!({"hidden_size": 48.0, "vocab_size": 2e2, "head_dim": 8.0,
        "eos_token_id": [7.0, 9], "bos_token_id": 1.0, "rope_theta": 500_000,
        "max_position_embeddings": 128.0}))
    .unwrap();
    assert_eq!((config.hidden_size, config.vocab_size, config.head_dim), (48, 200, 8));
    assert_eq!((config.bos_token_id, config.eos_token_ids), (Some(1), vec![7, 9]));
    assert_eq!(config.rope.theta, 5e5);
    for (changes, words) in [
        (json!({"head_dim": 8.5}), "head_dim: a whole number is expected, not 8.5"),
        (json!({"vocab_size": 1e300}), "vocab_size: "),
        (json!({"bos_token_id": 1.5}), "bos_token_id: a token id is expected, not 1.5"),
        (json!({"eos_token_id": -2.0}), "eos_token_id: a token id or a list"),
    ] {
        let error = parse_with(changes).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn numbers_that_are_not_finite_are_refused_only_in_keys_that_count() {
    let read = |key: &str, word: &str| {
        let text = format!(
            r#"{{"model_type": "llama", "vocab_size": 200, "hidden_size": 48,
                "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 6,
                "max_position_embeddings": 128, "{key}": {word}}}"#
        );
        Config::from_slice(text.as_bytes(), "config.json")
    };
    for word in ["NaN", "Infinity", "-Infinity", "[0.0, Infinity]"] {
        read("router_aux_loss_coef", word).unwrap();
        for key in ["rms_norm_eps", "rope_theta", "head_dim", "eos_token_id"] {
            let error = read(key, word).expect_err(key).to_string();
            assert!(error.contains(&format!("config.json: {key}: ")), "{error}");
            let name = word.trim_start_matches("[0.0, ").trim_end_matches(']');
            assert!(error.contains(name), "{error}");
        }
    }
}

#[test]
fn a_directory_of_quantised_weights_is_refused_by_what_tells_it() {
    for (file, refused) in [
        ("quantize_config.json", true),
        ("quant_config.json", true),
        ("hf_quant_config.json", true),
        ("quanto_qmap.json", true),
        ("README.md", false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(file), "{}").unwrap();
        let error = Config::from_dir(dir.path()).unwrap_err();
        let text = error.to_string();
        assert_eq!(matches!(error, Error::Unsupported(_)), refused, "{text}");
        assert!(!refused || text.contains(file) && text.contains("quantised"), "{text}");
        assert!(!text.contains('\n'));
    }
}

#[test]
fn dtype_in_both_spellings() {
    for (key, name, dtype) in [
        ("dtype", "bfloat16", DType::Bf16),
        ("torch_dtype", "float16", DType::F16),
        ("torch_dtype", "torch.float32", DType::F32),
        ("dtype", "float", DType::F32),
        ("dtype", "double", DType::F32),
        ("torch_dtype", "torch.float64", DType::F32),
        ("torch_dtype", "half", DType::F16),
    ] {
        assert_eq!(parse_with(json!({key: name})).unwrap().dtype, Some(dtype));
    }
}

#[test]
fn rope_in_both_spellings() {
    let plain = |theta| Rope { theta, scaling: RopeScaling::None };
    assert_eq!(rope_with(json!({"rope_theta": 500_000})), plain(5e5));
    assert_eq!(rope_with(json!({"rope_theta": 5e5, "rope_scaling": null})), plain(5e5));
    assert_eq!(
        rope_with(json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}})),
        plain(5e5)
    );
    // transformers' precedence: inner before outer, a non-empty rope_scaling before
    // rope_parameters.
    assert_eq!(
        rope_with(json!({"rope_theta": 1e3, "rope_parameters": {"rope_theta": 5e5}})),
        plain(5e5)
    );
    assert_eq!(
        rope_with(json!({"rope_theta": 1e3, "rope_parameters": {"rope_type": "default"}})),
        plain(1e3)
    );
    let linear = |theta| Rope { theta, scaling: RopeScaling::Linear { factor: 4.0 } };
    assert_eq!(
        rope_with(json!({"rope_theta": 1e3, "rope_scaling": {"type": "linear", "factor": 4}})),
        linear(1e3)
    );
    assert_eq!(
        rope_with(json!({"rope_parameters": {"rope_type": "linear", "factor": 4.0}})),
        linear(1e4)
    );
    assert_eq!(
        rope_with(
            json!({"rope_scaling": {"type": "linear", "factor": 4}, "rope_parameters": {"rope_theta": 7.0}})
        ),
        linear(1e4)
    );
    assert_eq!(
        rope_with(json!({"rope_scaling": {}, "rope_parameters": {"rope_theta": 7.0}})),
        plain(7.0)
    );
}

#[test]
fn llama3_rope_in_both_spellings() {
    let settings = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64});
    let wanted = Rope { theta: 5e5, scaling: LLAMA3 };
    assert_eq!(rope_with(json!({"rope_theta": 5e5, "rope_scaling": settings})), wanted);
    let mut new = settings.clone();
    new["rope_theta"] = json!(5e5);
    assert_eq!(rope_with(json!({"rope_parameters": new})), wanted);
    new["original_max_position_embeddings"] = Value::Null;
    let RopeScaling::Llama3 { original_max_position_embeddings: original, .. } =
        rope_with(json!({"rope_parameters": new})).scaling
    else {
        panic!("not llama3")
    };
    assert_eq!(original, 128, "the model's own context stands in");
}

/// Values printed by transformers 5.17 (`ROPE_INIT_FUNCTIONS`, in f32) for head_dim 16.
#[test]
fn inverse_frequencies_are_those_of_transformers() {
    let check = |theta, scaling: RopeScaling, wanted: [f32; 8]| {
        let found = Rope { theta, scaling: scaling.clone() }.inverse_frequencies(16, 1);
        for (found, wanted) in found.iter().zip(wanted) {
            assert!((found / wanted - 1.0).abs() < 1e-6, "{scaling:?}: {found} {wanted}");
        }
        assert_eq!(found.len(), 8);
    };
    check(
        1e4,
        RopeScaling::None,
        [1.0, 0.31622776, 0.1, 0.03162278, 0.01, 0.0031622779, 0.001, 0.0003162278],
    );
    check(
        5e5,
        RopeScaling::Linear { factor: 4.0 },
        [
            0.25,
            0.04848069,
            0.009401508,
            0.0018231663,
            0.00035355336,
            6.856205e-05,
            1.3295739e-05,
            2.5783463e-06,
        ],
    );
    check(
        5e5,
        LLAMA3,
        [
            1.0,
            0.07940301,
            0.004700754,
            0.00091158313,
            0.00017677668,
            3.4281024e-05,
            6.6478697e-06,
            1.2891732e-06,
        ],
    );
}

/// A config of another family, without the base's architectures.
fn of_family(model_type: &str, changes: Value) -> Config {
    let mut all = json!({"model_type": model_type, "architectures": null});
    all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    parse_with(all).unwrap()
}

#[test]
fn each_family_has_transformers_defaults() {
    let parsed = |model_type: &str| {
        let text = format!(
            r#"{{"model_type": "{model_type}", "vocab_size": 200, "hidden_size": 4096,
                "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 32}}"#
        );
        Config::from_slice(text.as_bytes(), "config.json").unwrap()
    };
    let shape = |c: &Config| {
        (c.num_key_value_heads, c.head_dim, c.max_position_embeddings, c.sliding_window)
    };
    assert_eq!(shape(&parsed("llama")), (32, 128, 2048, None));
    assert_eq!(shape(&parsed("mistral")), (8, 128, 131_072, Some(4096)));
    assert_eq!(shape(&parsed("qwen2")), (32, 128, 32_768, None));
    assert_eq!(shape(&parsed("qwen3")), (32, 128, 32_768, None));
    assert_eq!(of_family("mistral", json!({"num_key_value_heads": null})).num_key_value_heads, 6);
    assert_eq!(of_family("qwen3", json!({})).head_dim, 128, "not the quotient");
    for (model_type, biased) in [
        ("llama", [true, true, true]),
        ("mistral", [false; 3]),
        ("qwen2", [true, false, false]),
        ("qwen3", [true, true, false]),
    ] {
        let c = of_family(model_type, json!({"attention_bias": true, "mlp_bias": true}));
        assert_eq!([c.attention_bias, c.attention_output_bias, c.mlp_bias], biased);
        assert_eq!(c.qk_norm, model_type == "qwen3");
        let specs: usize = crate::TensorSpec::all(&c)
            .iter()
            .map(|spec| spec.shape.iter().product::<usize>())
            .sum();
        assert_eq!(c.parameter_count(), specs as u64, "{model_type}");
    }
    let base = parse_with(json!({"architectures": ["LlamaModel"]})).unwrap();
    assert_eq!(base, parse_with(json!({})).unwrap());
}

#[test]
fn a_sliding_window_bounds_the_context_if_it_is_shorter() {
    for (model_type, changes, context) in [
        ("llama", json!({"sliding_window": 4096}), 128),
        ("llama", json!({"sliding_window": 100}), 100),
        ("mistral", json!({"sliding_window": null}), 128),
        ("mistral", json!({"sliding_window": 128}), 128),
        ("mistral", json!({"sliding_window": 127}), 127),
        ("mistral", json!({}), 128),
        ("mistral", json!({"max_position_embeddings": 8192}), 4096),
        ("qwen2", json!({"sliding_window": 100}), 128),
        ("qwen2", json!({"sliding_window": 100, "use_sliding_window": false}), 128),
        ("qwen2", json!({"sliding_window": 100, "use_sliding_window": true}), 128),
        (
            "qwen2",
            json!({"sliding_window": 100, "use_sliding_window": true, "max_window_layers": 1}),
            100,
        ),
        (
            "qwen3",
            json!({"sliding_window": 100, "use_sliding_window": true,
                "layer_types": ["full_attention", "sliding_attention"]}),
            100,
        ),
    ] {
        let config = of_family(model_type, changes.clone());
        assert_eq!(config.context(), context, "{model_type} {changes}");
        let named = config.context_shown().contains("sliding_window");
        assert_eq!(named, context < config.max_position_embeddings);
    }
}

const DYNAMIC_64: [f32; 8] =
    [1.0, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 0.0003162278];
const DYNAMIC_100: [f32; 8] =
    [1.0, 0.267223, 0.07140812, 0.01908189, 0.00509912, 0.001362602, 0.0003641186, 9.730085e-5];
const YARN: [f32; 8] =
    [1.0, 0.1976424, 0.025, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-5];
const SHORT: [f32; 8] =
    [1.0, 0.1581139, 0.03333333, 0.007905695, 0.002, 0.0005270463, 0.0001428571, 3.952847e-5];
const LONG: [f32; 8] =
    [0.5, 0.1054092, 0.025, 0.006324556, 0.001666667, 0.000451754, 0.000125, 3.513642e-5];

/// Values printed by transformers 5.24 (`ROPE_INIT_FUNCTIONS`, in f32) for head_dim 16.
#[test]
fn frequencies_that_depend_on_the_length_are_those_of_transformers() {
    let rope = |settings: Value| {
        of_family(
            "llama",
            json!({"head_dim": 16, "max_position_embeddings": 64,
            "rope_parameters": settings}),
        )
    };
    let close = |found: Vec<f32>, wanted: &[f32]| {
        assert_eq!(found.len(), wanted.len());
        for (found, wanted) in found.iter().zip(wanted) {
            assert!((found / wanted - 1.0).abs() < 2e-6, "{found} {wanted}");
        }
    };
    let dynamic = rope(json!({"rope_type": "dynamic", "factor": 4.0}));
    assert_eq!((dynamic.context(), dynamic.rope.trained_length()), (256, Some(64)));
    close(dynamic.rope.inverse_frequencies(16, 64), &DYNAMIC_64);
    close(dynamic.rope.inverse_frequencies(16, 1), &DYNAMIC_64);
    close(dynamic.rope.inverse_frequencies(16, 100), &DYNAMIC_100);
    let yarn = rope(json!({"rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 32}));
    assert_eq!((yarn.context(), yarn.rope.trained_length()), (128, None));
    close(yarn.rope.inverse_frequencies(16, 1), &YARN);
    assert!((yarn.rope.attention_factor() - 1.138_629_436_111_989).abs() < 1e-12);
    let divisors = |first: f64| (0..8).map(|i| first + f64::from(i)).collect::<Vec<_>>();
    let long = rope(json!({"rope_type": "longrope", "original_max_position_embeddings": 32,
        "short_factor": divisors(1.0), "long_factor": divisors(2.0)}));
    assert_eq!((long.context(), long.rope.trained_length()), (64, Some(32)));
    close(long.rope.inverse_frequencies(16, 32), &SHORT);
    close(long.rope.inverse_frequencies(16, 33), &LONG);
    assert!((long.rope.attention_factor() - 1.095_445_115_010_332_1).abs() < 1e-12);
    for (settings, words) in [
        (json!({"rope_type": "dynamic"}), "rope_parameters.factor: is missing"),
        (json!({"rope_type": "dynamic", "factor": 0.5}), "factor: 0.5 is less than 1"),
        (json!({"rope_type": "longrope", "short_factor": [1.0]}), "short_factor: 1 numbers; 4"),
        (json!({"rope_type": "longrope", "short_factor": [1, 1, 1, 0]}), "short_factor: 0 is not"),
        (json!({"rope_type": "yarn", "factor": "x"}), "factor: a number is expected"),
    ] {
        let error = parse_with(json!({"rope_parameters": settings})).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn every_error_names_file_and_key() {
    let invalid = [
        (json!({"hidden_size": null}), "hidden_size: is missing"),
        (json!({"hidden_size": 0}), "hidden_size: 0 is not between 1 and 16777216"),
        (json!({"hidden_size": -48}), "hidden_size: -48 is not between"),
        (json!({"hidden_size": 48.5}), "hidden_size: a whole number is expected, not 48.5"),
        (json!({"hidden_size": "48"}), "hidden_size: a whole number is expected, not \"48\""),
        (json!({"hidden_size": u64::MAX}), "hidden_size: 18446744073709551615 is not between"),
        (json!({"vocab_size": 0}), "vocab_size: 0"),
        (
            json!({"num_hidden_layers": 1_000_000}),
            "num_hidden_layers: 1000000 is not between 1 and 16384",
        ),
        (json!({"num_attention_heads": 0}), "num_attention_heads: 0"),
        (
            json!({"num_attention_heads": 7, "num_key_value_heads": 7}),
            "7 does not divide hidden_size, 48",
        ),
        (
            json!({"num_key_value_heads": 4}),
            "num_key_value_heads: 4 does not divide num_attention_heads, 6",
        ),
        (json!({"num_key_value_heads": 12}), "num_key_value_heads: 12 does not divide"),
        (json!({"head_dim": 7}), "head_dim: 7 is odd"),
        (json!({"head_dim": 1 << 24}), "heads of 16777216 are too wide"),
        (json!({"max_position_embeddings": null}), "max_position_embeddings: is missing"),
        (json!({"rms_norm_eps": -1e-5}), "rms_norm_eps: -0.00001 is not between 0 and 1"),
        (json!({"rms_norm_eps": "tiny"}), "rms_norm_eps: a number is expected, not \"tiny\""),
        (json!({"rope_theta": 0}), "rope_theta: 0 is not above zero"),
        (json!({"rope_scaling": {"type": "linear"}}), "rope_scaling.factor: is missing"),
        (
            json!({"rope_scaling": {"type": "linear", "factor": -2.0}}),
            "rope_scaling.factor: -2 is not above zero",
        ),
        (json!({"rope_parameters": [1]}), "rope_parameters: an object is expected, not [1]"),
        (
            json!({"rope_parameters": {"rope_type": 3}}),
            "rope_parameters.rope_type: a string is expected, not 3",
        ),
        (
            json!({"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}),
            "rope_parameters.high_freq_factor: 4 is not above low_freq_factor, 4",
        ),
        (
            json!({"eos_token_id": -1}),
            "eos_token_id: a token id or a list of them is expected, not -1",
        ),
        (
            json!({"eos_token_id": [1, "x"]}),
            "eos_token_id: a token id or a list of them is expected",
        ),
        (json!({"attention_bias": 1}), "attention_bias: true or false is expected, not 1"),
        (json!({"model_type": null, "architectures": null}), "model_type: is missing"),
        (
            json!({"architectures": "LlamaForCausalLM"}),
            "architectures: a list of names is expected",
        ),
        (
            json!({"hidden_size": 1 << 24, "intermediate_size": 1 << 24, "num_hidden_layers": 16384, "head_dim": 2}),
            "larger than any memory",
        ),
    ];
    for (changes, message) in invalid {
        let error = parse_with(changes.clone()).expect_err(&changes.to_string());
        assert!(matches!(error, Error::InvalidArgument(_)), "{changes}: {error}");
        let text = error.to_string();
        assert!(text.contains("config.json: ") && text.contains(message), "{changes}: {text}");
    }
}

#[test]
fn what_is_not_supported_is_named() {
    let unsupported = [
        (
            json!({"architectures": ["MistralForCausalLM"]}),
            "architectures: [\"MistralForCausalLM\"]",
        ),
        (
            json!({"model_type": "gemma"}),
            "model_type: gemma; supported: llama, mistral, qwen2, qwen3",
        ),
        (
            json!({"model_type": "qwen2"}),
            "architectures: [\"LlamaForCausalLM\"]; supported: Qwen2ForCausalLM",
        ),
        (
            json!({"model_type": null, "architectures": ["X"]}),
            "architectures: [\"X\"]; supported: Llama",
        ),
        (json!({"hidden_act": "gelu"}), "hidden_act: gelu; supported: silu"),
        (
            json!({"rope_scaling": {"type": "su", "factor": 4.0}}),
            "rope_scaling.type: su; supported: default",
        ),
        (
            json!({"rope_parameters": {"rope_type": "proportional"}}),
            "rope_parameters.rope_type: proportional",
        ),
        (
            json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
            "rope_parameters.full_attention: settings",
        ),
        (
            json!({"rope_parameters": {"partial_rotary_factor": 0.5}}),
            "rope_parameters.partial_rotary_factor: 0.5",
        ),
        (
            json!({"partial_rotary_factor": 0.5}),
            "config.json: partial_rotary_factor: 0.5; supported: 1",
        ),
        (
            json!({"quantization_config": {"quant_method": "gptq"}}),
            "quantization_config: the weights are quantised",
        ),
        (json!({"quantization": {"bits": 4}}), "config.json: quantization: the weights are quant"),
        (json!({"compression_config": {}}), "compression_config: the weights are quantised"),
        (json!({"layer_types": ["full_attention", "sliding_attention"]}), "layer_types: "),
        (json!({"layer_types": ["full_attention", "chunked_attention"]}), "layer_types: "),
        (json!({"dtype": "float8_e4m3fn"}), "dtype: float8_e4m3fn; supported: bfloat16, float16"),
    ];
    for (changes, message) in unsupported {
        let error = parse_with(changes.clone()).expect_err(&changes.to_string());
        assert!(matches!(error, Error::Unsupported(_)), "{changes}: {error}");
        let text = error.to_string();
        assert!(text.contains("config.json: ") && text.contains(message), "{changes}: {text}");
    }
}

#[test]
fn what_is_no_object_is_refused() {
    for (text, message) in [
        ("", "no valid JSON"),
        ("{", "no valid JSON"),
        ("[1]", "a JSON object is expected"),
        ("{\"a\": nan}", "line 1"),
    ] {
        let error = Config::from_slice(text.as_bytes(), "config.json").expect_err(text).to_string();
        assert!(error.contains("config.json") && error.contains(message), "{text:?}: {error}");
    }
    assert!(matches!(Config::from_slice(b"\xff", "x"), Err(Error::InvalidArgument(_))));
    let dir = tempfile::tempdir().unwrap();
    let error = Config::from_dir(dir.path()).unwrap_err();
    assert!(
        matches!(error, Error::NotFound(_)) && error.to_string().contains("config.json"),
        "{error}"
    );
}
