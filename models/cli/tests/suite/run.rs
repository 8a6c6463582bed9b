//! The output of `devices`, `run` and `bench`.

use super::*;
use leasehold_operators::kernels::cpu::isa::Isa;

fn golden() -> serde_json::Value {
    let text = std::fs::read_to_string(repository("models/llama/demo-model/golden.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn ids(value: &serde_json::Value) -> String {
    value.as_array().unwrap().iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

#[test]
fn the_bundled_model_gives_the_golden_ids_and_logits() {
    for case in golden()["cases"].as_array().unwrap() {
        let prompt = ids(&case["prompt_ids"]);
        let report =
            json(&["run", "--json", "--logits", "--prompt-ids", &prompt, "--tokens", "48"]);
        assert_eq!(report["output_ids"], case["greedy_48"]);
        assert_eq!(report["modes_agree"], true);
        assert_eq!(report["memory"]["driver_allocations_in_decode"], 0);
        let (mut worst, mut error, mut norm) = (0f64, 0f64, 0f64);
        let pairs = report["last_logits"]
            .as_array()
            .unwrap()
            .iter()
            .zip(case["last_logits"].as_array().unwrap());
        for (ours, theirs) in pairs {
            let (ours, theirs) = (ours.as_f64().unwrap(), theirs.as_f64().unwrap());
            worst = worst.max((ours - theirs).abs());
            error += (ours - theirs).powi(2);
            norm += theirs.powi(2);
        }
        assert!(worst < 2e-2 && (error / norm).sqrt() < 1e-3, "{worst} {}", (error / norm).sqrt());
    }
}

#[test]
fn every_thread_count_gives_the_same_bits() {
    let all: Vec<_> = ["1", "2", "3", "4"]
        .iter()
        .map(|t| {
            json(&[
                "run",
                "--json",
                "--logits",
                "--prompt-ids",
                "316,221",
                "--tokens",
                "24",
                "--threads",
                t,
            ])
        })
        .collect();
    for report in &all {
        assert_eq!(report["modes_agree"], true);
        assert_eq!(report["output_ids"], all[0]["output_ids"]);
        assert_eq!(report["last_logits"], all[0]["last_logits"]);
    }
}

/// A prompt of more rows than stream, at the lowest level, and at the one for processors without
/// AVX-512.
#[test]
fn a_level_gives_the_same_bits_with_every_thread_count() {
    let prompt: Vec<String> = (5..145).map(|id| id.to_string()).collect();
    for level in [Isa::Generic, Isa::Neon, Isa::Avx2] {
        if !level.available() {
            continue;
        }
        let level = level.name();
        let all = ["1", "2", "3"].map(|threads| {
            json(&[
                "run",
                "--json",
                "--logits",
                "--prompt-ids",
                &prompt.join(","),
                "--tokens",
                "3",
                "--dtype",
                "bf16",
                "--level",
                level,
                "--threads",
                threads,
            ])
        });
        for report in &all {
            assert_eq!(report["level"], level);
            assert_eq!(report["modes_agree"], true);
            assert_eq!(report["output_ids"], all[0]["output_ids"]);
            assert_eq!(report["last_logits"], all[0]["last_logits"]);
        }
    }
}

#[test]
fn the_report_has_every_field() {
    let report = json(&["run", "--json", "--tokens", "4", "--prompt", "import os"]);
    for field in ["device", "model", "prompt_ids", "output_ids", "text", "modes_agree"] {
        assert!(report.get(field).is_some(), "{field}");
    }
    for mode in ["eager", "graph"] {
        for field in ["prefill_ms", "decode_tokens_per_s", "token_ms_p50", "token_ms_p99"] {
            assert!(report["modes"][mode][field].as_f64().is_some(), "{mode}.{field}");
        }
    }
    for field in ["live_peak_bytes", "reserved_peak_bytes", "driver_allocations_in_decode"] {
        assert!(report["memory"][field].as_u64().is_some(), "{field}");
    }
    assert_eq!(report["output_ids"].as_array().unwrap().len(), 4);
    assert!(report.get("last_logits").is_none());
}

#[test]
fn one_mode_has_nothing_to_agree_with() {
    let report = json(&["run", "--json", "--tokens", "2", "--mode", "graph"]);
    assert!(report["modes"].get("eager").is_none());
    assert!(report["modes_agree"].is_null());
}

#[test]
fn sampling_is_a_function_of_its_seed() {
    let draw = |seed: &str| {
        json(&[
            "run",
            "--json",
            "--tokens",
            "24",
            "--temperature",
            "1.2",
            "--top-k",
            "50",
            "--seed",
            seed,
        ])["output_ids"]
            .clone()
    };
    assert_eq!(draw("7"), draw("7"));
    assert_ne!(draw("7"), draw("8"));
}

#[test]
fn a_check_of_the_logits_changes_no_token() {
    let run = ["run", "--json", "--logits", "--tokens", "6", "--prompt-ids", "316,221"];
    let (plain, checked) = (json(&run), json(&[&run[..], &["--check"]].concat()));
    assert_eq!(checked["modes_agree"], true);
    for field in ["output_ids", "last_logits"] {
        assert_eq!(plain[field], checked[field], "{field}");
    }
}

#[test]
fn bf16_activations_agree_between_modes() {
    let report =
        json(&["run", "--json", "--tokens", "16", "--dtype", "bf16", "--prompt-ids", "316,221"]);
    assert_eq!(report["modes_agree"], true);
}

#[test]
fn text_streams_to_standard_output_and_a_table_follows() {
    let output = call(&["run", "--tokens", "8", "--prompt", "import os"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.starts_with("import os"), "{text}");
    assert!(text.contains("tokens/s") && text.contains("agree to the bit"), "{text}");
}

/// A folder with a small model whose config has changes; `null` removes a key.
fn changed_model(name: &str, changes: serde_json::Value) -> tempfile::TempDir {
    let from = repository("models/llama/tests/models").join(name);
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        if from.join(file).exists() {
            std::fs::copy(from.join(file), dir.path().join(file)).unwrap();
        }
    }
    let path = dir.path().join("config.json");
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    std::fs::write(&path, config.to_string()).unwrap();
    dir
}

/// The decoder strips the space at the beginning of a text. The one after the prompt stays.
#[test]
fn the_text_is_what_the_new_ids_add_to_the_prompts() {
    let dir = changed_model("untied-head", serde_json::json!({}));
    let path = dir.path().join("tokenizer.json");
    let mut tokenizer: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    // Each id is a word, and the prompt is two of them.
    let words: serde_json::Map<String, serde_json::Value> =
        (0..256).map(|i| (format!("\u{2581}w{i}"), i.into())).collect();
    tokenizer["model"] = serde_json::json!({"type": "BPE", "vocab": words, "merges": []});
    tokenizer["decoder"] = serde_json::json!({"type": "Metaspace", "replacement": "\u{2581}",
        "prepend_scheme": "always", "split": true});
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    let model = dir.path().to_str().unwrap();
    let run = ["run", "--model", model, "--prompt-ids", "5,9", "--tokens", "4"];
    let report = json(&[&run[..], &["--json"]].concat());
    let words: Vec<String> = report["output_ids"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|id| id.as_u64().filter(|&id| id < 256).map(|id| format!(" w{id}")))
        .collect();
    assert!(!words.is_empty(), "{report}");
    assert_eq!(report["text"], words.concat());
    let shown = String::from_utf8(call(&run).stdout).unwrap();
    assert!(shown.starts_with(&format!("w5 w9{}\n", words.concat())), "{shown}");
}

#[test]
fn generation_config_names_the_end_and_the_sampling() {
    let dir = changed_model("grouped-heads", serde_json::json!({"eos_token_id": null}));
    let model = dir.path().to_str().unwrap();
    let run = ["run", "--model", model, "--prompt-ids", "3,1,4", "--tokens", "6", "--json"];
    let with = |more: &[&str]| call(&[&run[..], more].concat());
    let ids = |output: &std::process::Output| -> Vec<u64> {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{text}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        serde_json::from_value(report["output_ids"].clone()).unwrap()
    };
    let stderr =
        |output: &std::process::Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let all = ids(&with(&[]));
    let without = with(&["--stop-at-eos"]);
    assert_eq!(ids(&without), all);
    assert!(stderr(&without).contains("note: --stop-at-eos: "), "{}", stderr(&without));
    let without = with(&["--defaults"]);
    assert_eq!(without.status.code(), Some(2));
    assert!(stderr(&without).contains("no generation_config.json"), "{}", stderr(&without));

    let path = dir.path().join("generation_config.json");
    let write = |text: &str| std::fs::write(&path, text).unwrap();
    write(&format!(
        r#"{{"eos_token_id": [{}], "do_sample": true, "temperature": 1.5, "top_k": 0}}"#,
        all[2]
    ));
    assert_eq!(ids(&with(&["--stop-at-eos"])), all[..3]);
    assert_eq!(ids(&with(&[])), all, "greedy unless the defaults are asked for");
    let explicit = ids(&with(&["--temperature", "1.5", "--seed", "5"]));
    assert_ne!(explicit, all);
    assert_eq!(ids(&with(&["--defaults", "--seed", "5"])), explicit);
    assert_eq!(ids(&with(&["--defaults", "--temperature", "0"])), all);
    write(r#"{"do_sample": false, "temperature": 1.5}"#);
    assert_eq!(ids(&with(&["--defaults", "--seed", "5"])), all);
    write(r#"{"do_sample": true, "temperature": 1.5, "top_k": 0, "top_p": 0.9, "min_p": 0.05}"#);
    let named = ids(&with(&["--defaults", "--seed", "5"]));
    let cuts = ["--top-p", "0.9", "--min-p", "0.05"];
    let explicit = [&["--temperature", "1.5", "--seed", "5"][..], &cuts].concat();
    assert_eq!(ids(&with(&explicit)), named);
    // The most probable token alone.
    assert_eq!(ids(&with(&["--defaults", "--seed", "5", "--top-p", "1e-9"])), all);
    assert_eq!(ids(&with(&["--defaults", "--seed", "5", "--min-p", "1"])), all);
    for (flag, value) in [("--top-p", "0"), ("--top-p", "1.1"), ("--min-p", "-0.1")] {
        let refused = with(&[flag, value]);
        assert_eq!(refused.status.code(), Some(2));
        assert!(stderr(&refused).contains("give a number"), "{}", stderr(&refused));
    }
    // Rules count for greedy choices too, and not without --defaults.
    write(&format!(r#"{{"suppress_tokens": [{}], "begin_suppress_tokens": []}}"#, all[0]));
    let ruled = ids(&with(&["--defaults"]));
    assert!(!ruled.contains(&all[0]), "{ruled:?}");
    assert_eq!(ids(&with(&[])), all);
    write(&format!(r#"{{"begin_suppress_tokens": [{}]}}"#, all[0]));
    assert_ne!(ids(&with(&["--defaults"]))[0], all[0]);
    write(r#"{"repetition_penalty": 1000}"#);
    let ruled = ids(&with(&["--defaults", "--check"]));
    let seen = [&[3, 1, 4][..], &ruled].concat();
    let different: std::collections::BTreeSet<_> = seen.iter().collect();
    assert_eq!(different.len(), seen.len(), "{seen:?}");
    for (key, value) in [("typical_p", "0.9"), ("bad_words_ids", "[[12]]")] {
        write(&format!(r#"{{"do_sample": true, "{key}": {value}}}"#));
        let refused = with(&["--defaults"]);
        let (code, why) = (refused.status.code(), stderr(&refused));
        let words = format!("generation_config.json: {key}: {value}");
        assert!(code == Some(1) && why.contains(&words), "{why}");
    }
    write(r#"{"eos_token_id": "#);
    let damaged = with(&[]);
    assert_eq!(damaged.status.code(), Some(1));
    assert!(stderr(&damaged).contains("generation_config.json: no valid JSON"));
}

#[test]
fn a_stored_head_that_the_config_ties_is_used_with_a_note() {
    let dir = changed_model("untied-head", serde_json::json!({"tie_word_embeddings": true}));
    let from = repository("models/llama/tests/models/untied-head");
    let run = |model: &std::path::Path| {
        let model = model.to_str().unwrap();
        let run = ["run", "--model", model, "--prompt-ids", "3,1,4", "--tokens", "6", "--json"];
        call(&run)
    };
    let (tied, untied) = (run(dir.path()), run(&from));
    let ids = |output: &std::process::Output| {
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["output_ids"].clone()
    };
    assert_eq!(ids(&tied), ids(&untied));
    let notes = String::from_utf8(tied.stderr).unwrap();
    assert!(notes.starts_with("note: ") && notes.contains("lm_head.weight"), "{notes}");
    assert!(untied.stderr.is_empty());
}

#[test]
fn the_command_works_from_any_folder() {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("copied");
    std::fs::copy(env!("CARGO_BIN_EXE_leasehold"), &copy).unwrap();
    let output = std::process::Command::new(&copy)
        .args(["run", "--tokens", "1", "--json"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert!(output.status.success());
}

#[test]
fn devices_lists_every_backend_with_its_reason() {
    let report = json(&["devices", "--json"]);
    let backends = report["backends"].as_array().unwrap();
    let find = |name: &str| backends.iter().find(|b| b["backend"] == name).unwrap();
    let cpu = find("cpu");
    assert_eq!(cpu["available"], true);
    assert_eq!(cpu["devices"][0]["id"], "cpu:0");
    assert!(cpu["devices"][0]["memory_total_bytes"].as_u64().unwrap() > 0);
    for name in ["cuda", "mps"] {
        assert_eq!(find(name)["available"], false);
        assert!(!find(name)["reason"].as_str().unwrap().is_empty());
    }
    assert!(call(&["devices"]).status.success());
}

#[test]
fn other_models_run_from_their_folders() {
    for name in ["odd-sizes", "sharded", "llama3-rope"] {
        let dir = repository("models/llama/tests/models").join(name);
        let output = command()
            .args(["run", "--json", "--prompt-ids", "3,1,4", "--tokens", "6", "--model"])
            .arg(&dir)
            .output()
            .unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn verbose_says_what_computes_each_operator() {
    let run = operators(&["run", "--prompt-ids", "316,221", "--tokens", "3"]);
    assert_eq!(run[0], ["operator", "shape", "computed by", "times"]);
    let product = |of: &str, m: u32, entry: &str| -> Vec<String> {
        let shape = format!("m {m}, k 256, n 256 + 128 + 128");
        [of, "linear3", &shape, entry, "6"].map(str::to_owned).into()
    };
    for (of, m) in [("prompt", 2), ("step", 1)] {
        assert!(run.contains(&product(of, m, "linear3")), "{run:?}");
    }
    let decode = ["bench", "decode", "--prompt", "20", "--tokens", "3", "--repeat", "1"];
    let alone = operators(&decode);
    assert!(alone.contains(&product("prompt", 20, "linear3")), "{alone:?}");
    let batch = operators(&[&decode[..], &["--batch", "2"]].concat());
    assert!(batch.contains(&product("step", 2, "linear3")), "{batch:?}");
}
