//! `run` and `bench decode`, on the CPU and on simulated devices.

use super::*;

#[test]
fn a_timeline_has_every_kernel_of_a_token_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.json");
    let path = path.to_str().unwrap();
    let mut names: Vec<Vec<String>> = Vec::new();
    for device in
        [&["--device", "cpu:0"][..], &["--device", "cuda:0", "--sim"], &["--device", "sim:0"]]
    {
        let run = ["run", "--json", "--tokens", "2", "--mode", "eager", "--trace", path];
        let report = json(&[&run[..], device].concat());
        assert_eq!(report["output_ids"].as_array().unwrap().len(), 2);
        let trace: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let of = |category: &str| -> Vec<&serde_json::Value> {
            events.iter().filter(|e| e["cat"] == category).collect()
        };
        let (kernels, submissions) = (of("kernel"), of("submission"));
        let other = &trace["otherData"];
        let known = |e: &serde_json::Value| match e["ph"].as_str() {
            Some("X") => e["dur"].is_f64(),
            phase => matches!(phase, Some("M" | "C" | "s" | "f")),
        };
        assert!(events.iter().all(known));
        // A launch is one submission; the host's others give the device an order or are waits.
        let launches = submissions.iter().filter(|e| e["name"] != "order").count();
        assert_eq!(kernels.len(), launches);
        let stream = &other["streams"][0];
        assert_eq!(stream["operations"].as_u64(), Some(kernels.len() as u64), "{other}");
        assert_eq!(other["streams"].as_array().unwrap().len(), 1);
        // One after the other, with the gaps that are told, and sums that fit.
        let number = |e: &serde_json::Value, key: &str| e[key].as_f64().unwrap();
        let (mut end, mut busy, mut gaps) = (number(kernels[0], "ts"), 0.0, 0.0);
        for (i, kernel) in kernels.iter().enumerate() {
            // Nothing is in front of the first one.
            let gap = kernel["args"]["gap_before_us"].as_f64();
            assert_eq!(gap.is_none(), i == 0, "{kernel}");
            let gap = gap.unwrap_or(0.0);
            assert!((number(kernel, "ts") - end - gap).abs() < 0.01, "{kernel}: {end}");
            end = number(kernel, "ts") + number(kernel, "dur");
            (busy, gaps) = (busy + number(kernel, "dur"), gaps + gap);
        }
        assert!(busy > 0.0 && (busy - number(stream, "busy_us")).abs() < 0.01, "{other}");
        assert!((gaps - number(stream, "gaps_us")).abs() < 0.01, "{other}");
        names.push(kernels.iter().map(|k| k["name"].as_str().unwrap().to_owned()).collect());
    }
    assert!(names.iter().all(|n| n.len() > 10 && *n == names[0]), "{names:?}");
    assert_eq!(names[0].last().map(String::as_str), Some("next_token"));
    let output = call(&["run", "--tokens", "2", "--trace", "/nowhere/t.json"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
}

/// The config.json of a small model.
fn small_shape() -> serde_json::Value {
    serde_json::json!({"model_type": "llama", "hidden_act": "silu", "vocab_size": 300,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16"})
}

#[test]
fn decode_measures_random_weights_of_a_shape() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shape.json");
    std::fs::write(&path, small_shape().to_string()).unwrap();
    let path = path.to_str().unwrap();
    let bench =
        ["bench", "decode", "--random-weights", "--seed", "7", "--prompt", "9", "--tokens", "5"];
    for device in [&["--device", "cpu:0"][..], &["--device", "cuda:0", "--sim"]] {
        let all = [&bench[..], &["--repeat", "1", "--json", "--config", path], device].concat();
        let report = json(&all);
        assert_eq!((&report["prompt"], &report["seed"]), (&9.into(), &7.into()));
        // By hand: layers of 64 x (64 + 32 + 32 + 64) and 3 x 64 x 96 weights and two norms, the
        // last norm, the head, and one row of the embedding; two caches of 32 at 11 positions.
        let layers = 2 * (64 * 192 + 3 * 64 * 96 + 128);
        let weights = 2 * (layers + 64 + 300 * 64 + 64);
        let cache = 2 * 2 * 32 * 4 * 11;
        assert_eq!(report["weight_bytes"], 2 * (layers + 64 + 2 * 300 * 64));
        let read = &report["bytes_per_token"];
        assert_eq!((&read["weights"], &read["kv_cache"]), (&weights.into(), &cache.into()));
        assert_eq!(read["total"], weights + cache);
        let number = |key: &str| report[key].as_f64().unwrap();
        let rate = report["graph"]["decode_tokens_per_s"].as_f64().unwrap();
        let speed = f64::from(weights + cache) * rate / 1e9;
        assert!((number("gigabytes_per_s") / speed - 1.0).abs() < 1e-9, "{report}");
        let share = number("gigabytes_per_s") / number("copy_gigabytes_per_s");
        assert!(share > 0.0 && (number("share_of_bandwidth") / share - 1.0).abs() < 1e-9);
        assert!(number("prompt_tokens_per_s") > 0.0);
    }
    let table = call(&[&bench[..], &["--repeat", "1", "--config", path]].concat());
    let text = String::from_utf8(table.stdout).unwrap();
    for words in ["prompt of 9 tokens: ", "a token reads ", "% of a device copy's "] {
        assert!(text.contains(words), "{text}");
    }
    for wrong in [&["--random-weights"][..], &["--config", path], &["--seed", "3"]] {
        let output = call(&[&["bench", "decode"][..], wrong].concat());
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn decode_measures_several_sequences_together() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shape.json");
    std::fs::write(&path, small_shape().to_string()).unwrap();
    let path = path.to_str().unwrap();
    let bench = ["bench", "decode", "--random-weights", "--prompt", "9", "--tokens", "5"];
    let bench = [&bench[..], &["--repeat", "1", "--batch", "3", "--config", path]].concat();
    let devices =
        [&["cpu:0"][..], &["cpu:0", "--dtype", "bf16"], &["cuda:0", "--sim"], &["mps:0", "--sim"]];
    for device in devices {
        let report = json(&[&bench[..], &["--json", "--device"], device].concat());
        assert_eq!((&report["batch"], &report["prompt"]), (&3.into(), &9.into()));
        // The timed steps are at 11 to 13 for the last sequence, and later for those before.
        let positions = report["graph"]["positions"].as_f64().unwrap();
        assert!((12.0..40.0).contains(&positions), "{positions}");
        // The weights of `decode_measures_random_weights_of_a_shape`; for each sequence two caches
        // of 32 in two layers.
        let weights = 2 * (2 * (64 * 192 + 3 * 64 * 96 + 128) + 64 + 300 * 64 + 64);
        let element = if device.contains(&"bf16") { 2 } else { 4 };
        let caches = 3 * 2 * 2 * 32 * element * positions as u32;
        let read = &report["bytes_per_step"];
        assert_eq!((&read["weights"], &read["kv_cache"]), (&weights.into(), &caches.into()));
        assert_eq!(read["total"], weights + caches);
        let number = |value: &serde_json::Value| value.as_f64().unwrap();
        for mode in ["eager", "graph"] {
            let rates = &report[mode];
            let (all, each) = (number(&rates["tokens_per_s"]), number(&rates["tokens_per_s_each"]));
            assert!(each > 0.0 && (all / each - 3.0).abs() < 1e-9, "{report}");
        }
        let speed =
            f64::from(weights + caches) * number(&report["graph"]["tokens_per_s_each"]) / 1e9;
        assert!((number(&report["gigabytes_per_s"]) / speed - 1.0).abs() < 1e-9, "{report}");
        let share = number(&report["gigabytes_per_s"]) / number(&report["copy_gigabytes_per_s"]);
        assert!(share > 0.0 && (number(&report["share_of_bandwidth"]) / share - 1.0).abs() < 1e-9);
        let limit = if element == 4 { 1e-3 } else { 8e-2 };
        assert!(number(&report["logits_differ_from_alone"]) <= limit, "{report}");
        if element == 4 {
            assert_eq!(report["texts_as_alone"], 3, "{report}");
        }
    }
    let text = String::from_utf8(call(&bench).stdout).unwrap();
    for words in
        ["3 sequences with prompts of 9 tokens, of ", "a step reads ", "equal to the bit; logits"]
    {
        assert!(text.contains(words), "{text}");
    }
    let output = call(&["bench", "decode", "--batch", "4000000000"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && text.contains("4000000000 sequences"), "{text}");
    let several = ["--batch", "2,3"];
    for wrong in [
        &["--batch", "0"][..],
        &["--batch", "2,0"],
        &["--batch", "2", "--tokens", "2"],
        &[&several[..], &["--join", "9"]].concat(),
        &[&several[..], &["--ranks", "2"]].concat(),
    ] {
        let output = call(&[&["bench", "decode"][..], wrong].concat());
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && text.contains("--batch"), "{text}");
    }
}

#[test]
fn decode_measures_several_numbers_of_sequences_with_one_load() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shape.json");
    std::fs::write(&path, small_shape().to_string()).unwrap();
    let bench = ["bench", "decode", "--random-weights", "--prompt", "4", "--tokens", "4"];
    let path = ["--repeat", "1", "--batch", "3,1,5", "--config", path.to_str().unwrap()];
    for device in [&["--device", "cpu:0"][..], &["--device", "cuda:0", "--sim"]] {
        let bench = [&bench[..], &path, device].concat();
        let text = |bench: &[&str]| String::from_utf8(call(bench).stdout).unwrap();
        let reports = text(&[&bench[..], &["--json"]].concat());
        let reports: Vec<serde_json::Value> =
            reports.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let sizes: Vec<_> = reports.iter().map(|report| report["batch"].as_u64()).collect();
        assert_eq!(sizes, [3, 1, 5].map(Some));
        // A rate that all have is one measurement, as the weights are one load.
        let copies: Vec<_> = reports.iter().map(|r| r["copy_gigabytes_per_s"].as_f64()).collect();
        assert!(copies.iter().all(|copy| *copy == copies[0]), "{copies:?}");
        for report in &reports {
            assert!(report["graph"]["step_ms_p50"].as_f64().unwrap() > 0.0, "{report}");
            assert_eq!(report["texts_as_alone"], report["batch"]);
        }
        let table = text(&bench);
        let firsts: Vec<_> =
            table.lines().map(|line| line.split_whitespace().next().unwrap()).collect();
        assert_eq!(firsts, ["sequences", "3", "1", "5"], "{table}");
    }
}

#[cfg(feature = "cuda")]
#[test]
fn verbose_shows_tensor_cores_by_their_kernels() {
    let device = ["--device", "cuda:0", "--sim", "--dtype", "bf16"];
    let run = ["run", "--prompt-ids", "316,221,3", "--tokens", "2", "--mode", "eager"];
    let table = operators(&[&run[..], &device].concat());
    let entry = |of: &str, name: &str| {
        let row = table.iter().find(|row| row[0] == of && row[1] == name).unwrap();
        row[3].clone()
    };
    assert_eq!(entry("prompt", "linear_gated"), "linear_gated_boxes");
    assert_eq!(entry("step", "linear_gated"), "linear_gated");
}
