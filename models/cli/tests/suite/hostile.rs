//! Hostile files, limits and streams: each gives one line that names the problem and its place, and
//! status 1, or 2 for the command line.

use super::*;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Stdio;

fn model() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(
            repository("models/llama/tests/models/untied-head").join(file),
            dir.path().join(file),
        )
        .unwrap();
    }
    dir
}

fn change(path: PathBuf, key: &str, value: serde_json::Value) {
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json[key] = value;
    fs::write(path, json.to_string()).unwrap();
}

#[test]
fn what_a_model_says_of_itself_reaches_no_terminal_as_it_is() {
    let dir = model();
    change(
        dir.path().join("config.json"),
        "model_type",
        "\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}".into(),
    );
    let output = bounded(&["run", "--model", dir.path().to_str().unwrap()]);
    has(
        &line(&output, 1),
        &["model_type: \\u{1b}]0;owned\\u{7}\\u{1b}[2J\\u{9b}; supported: llama"],
    );
    let dir = model();
    change(dir.path().join("config.json"), "hidden_act", "x".repeat(3 << 20).into());
    let text = line(&bounded(&["run", "--model", dir.path().to_str().unwrap()]), 1);
    assert!(text.len() < 1000, "{}", text.len());
}

#[test]
fn a_tokenizer_that_panics_is_a_line() {
    for (key, value, prompt) in [
        (
            "normalizer",
            serde_json::json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
            "a",
        ),
        (
            "decoder",
            serde_json::json!({"type": "Strip", "content": "a", "start": 0, "stop": 9}),
            "a",
        ),
        (
            "normalizer",
            serde_json::json!({"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
            "a",
        ),
    ] {
        let dir = model();
        let path = dir.path().join("tokenizer.json");
        let json = serde_json::json!({
            "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        });
        fs::write(&path, json.to_string()).unwrap();
        change(path, key, value);
        let output = bounded(&[
            "run",
            "--tokens",
            "2",
            "--prompt",
            prompt,
            "--model",
            dir.path().to_str().unwrap(),
        ]);
        has(&line(&output, 1), &["tokenizer.json: ", "its library failed: "]);
    }
}

#[test]
fn weights_that_are_no_numbers_give_no_token() {
    let dir = model();
    let path = dir.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[data..].fill(0xFF);
    fs::write(&path, bytes).unwrap();
    let at = dir.path().to_str().unwrap();
    let run = ["run", "--model", at, "--prompt-ids", "1,2", "--tokens", "3"];
    let text = line(&bounded(&[&run[..], &["--json"]].concat()), 1);
    has(&text, &[at, "new token 1: no logit is a number"]);
    // A check on the device names the logit, in both modes.
    for mode in ["eager", "graph"] {
        let text = line(&bounded(&[&run[..], &["--check", "--mode", mode]].concat()), 1);
        has(&text, &[at, "check logits: element 0 is NaN"]);
    }
}

#[test]
fn files_that_cannot_be_written_are_noticed_before_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let names =
        || fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect::<Vec<_>>();
    for flag in ["--memory-trace", "--memory-snapshot", "--report"] {
        for bad in [path("no/such/folder"), path("."), "/proc/t.csv".to_owned()] {
            let output = bounded(&["run", "--tokens", "2", flag, &bad]);
            line(&output, 1);
            assert!(output.stdout.is_empty(), "{flag} {bad}: noticed after the run");
        }
        // A full device, after the run.
        line(&bounded(&["run", "--tokens", "2", "--json", flag, "/dev/full"]), 1);
    }
    let both =
        ["run", "--tokens", "2", "--memory-trace", &path("x"), "--memory-snapshot", &path("./x")];
    has(&line(&bounded(&both), 2), &["--memory-trace and --memory-snapshot"]);
    let both = ["run", "--tokens", "2", "--report", &path("x"), "--memory-snapshot", &path("./x")];
    has(&line(&bounded(&both), 2), &["--memory-snapshot and --report"]);
    assert!(names().is_empty(), "{:?}", names());
    // An existing file is replaced completely, through a link too.
    fs::write(path("real"), "old").unwrap();
    symlink(path("real"), path("link")).unwrap();
    let output = bounded(&[
        "run",
        "--tokens",
        "2",
        "--memory-trace",
        &path("link"),
        "--memory-snapshot",
        "/dev/null",
    ]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(fs::read_to_string(path("real")).unwrap().starts_with("t_us,op,id,size,stream\n"));
    assert!(fs::symlink_metadata(path("link")).unwrap().is_symlink());
    assert_eq!(names().len(), 2, "{:?}", names());
}

#[test]
fn a_closed_standard_output_is_an_error() {
    for arguments in [&["devices"][..], &["run", "--tokens", "1"], &["--version"]] {
        let output = limited("exec 1>&-", arguments).stderr(Stdio::piped()).output().unwrap();
        has(&line(&output, 1), &["standard output is closed"]);
    }
    let output = command().arg("--version").stdout(Stdio::null()).output().unwrap();
    assert!(output.status.success());
}

#[test]
fn debug_aids_that_cannot_be_are_named_with_a_cure() {
    let raw = OsStr::from_bytes(b"poison\xff\x1b");
    let output = command()
        .args(["run", "--tokens", "1"])
        .env("LEASEHOLD_MEMORY_DEBUG", raw)
        .output()
        .unwrap();
    has(&line(&output, 2), &["LEASEHOLD_MEMORY_DEBUG", "no UTF-8"]);
}

#[test]
fn the_help_claims_what_is_there() {
    let text = String::from_utf8(call(&["--help"]).stdout).unwrap();
    assert!(text.contains("CPU, CUDA and Metal"), "{text}");
}

#[test]
fn memory_of_the_host_is_asked_before_it_is_taken() {
    let dir = model();
    change(dir.path().join("config.json"), "max_position_embeddings", (1 << 28).into());
    let at = dir.path().to_str().unwrap();
    let run = ["run", "--model", at, "--prompt-ids", "1", "--tokens", "90000000", "--json"];
    let output = limited("ulimit -v 4000000", &run).output().unwrap();
    has(&line(&output, 1), &[at, "90000000 tokens", "of host memory", "--tokens"]);
}
