//! Invalid input: one line on standard error that names the problem and its place, and the right
//! exit status.

use super::*;
use std::path::Path;

#[test]
fn command_lines_that_make_no_sense() {
    fails(&["run", "--tokens", "0"], 2, &["--tokens"]);
    fails(&["run", "--tokens", "-3"], 2, &["-3"]);
    fails(&["run", "--threads", "0"], 2, &["--threads"]);
    fails(&["run", "--threads", "100000"], 2, &["--threads"]);
    fails(&["run", "--level", "v3"], 2, &["'v3'", "x86-64-v3, aarch64-neon, generic\n"]);
    let foreign = if cfg!(target_arch = "aarch64") { "x86-64-v3" } else { "aarch64-neon" };
    let message = format!("leasehold: --level {foreign}: ");
    fails(&["run", "--level", foreign], 2, &[&message, "leave the level out"]);
    let names = "write one of cpu:0, cuda:0, mps:0, sim:0";
    fails(&["run", "--device", "gpu:0"], 2, &["gpu", &format!("{names}\n")]);
    let message = "leasehold: invalid value 'gpu' for '--device <DEVICE>': unknown backend; write";
    fails(&["run", "--device", "gpu"], 2, &[message]);
    fails(&["run", "--device", "cpu:x"], 2, &["cpu:x"]);
    fails(&["run", "--modle", "x"], 2, &["'--model'", "; try 'leasehold run --help'\n"]);
    fails(&["run", "--moed", "x"], 2, &["'--mode'"]);
    fails(&["run", "--prompt-ids", "1,two"], 2, &["two"]);
    fails(&["run", "--temperature", "-1"], 2, &["temperature"]);
    fails(&["run", "--temperature", "nan"], 2, &["temperature"]);
    fails(&["run", "--nonsense"], 2, &["--nonsense"]);
    fails(&["run", "--logits"], 2, &["--json"]);
    fails(&["walk"], 2, &["walk", "; try 'leasehold --help'\n"]);
    fails(&["device"], 2, &["'devices'", "; try 'leasehold --help'\n"]);
    fails(&["run", "--token", "3"], 2, &["'--tokens'", "; try 'leasehold run --help'\n"]);
    fails(&["bench", "decode", "--random-weights"], 2, &["try 'leasehold bench decode --help'\n"]);
}

#[test]
fn what_is_in_the_workbench_is_said_in_one_line() {
    for name in ["conformance", "replay", "stress"] {
        let there = format!("leasehold-workbench {name}\n");
        fails(&[name], 2, &[&there]);
        fails(&[name, "--help"], 2, &[&there]);
    }
    for name in ["alloc", "collective", "copy", "cuda", "graph", "lease", "memory", "stream"] {
        fails(&["bench", name, "--json"], 2, &[&format!("leasehold-workbench bench {name}\n")]);
    }
    for command in [&["run"][..], &["bench", "decode"], &["bench", "suspend"]] {
        let with = |more: &[&'static str]| [command, more].concat();
        let words = ["leasehold-workbench", "--sim"];
        fails(&with(&["--device", "cuda:0", "--sim"]), 2, &words);
        fails(&with(&["--device", "sim:0"]), 2, &["sim:0", "leasehold-workbench"]);
    }
    fails(&["run", "--sim-seed", "3"], 2, &["leasehold-workbench", "--sim-seed"]);
}

#[test]
fn a_command_that_wants_another_word_shows_its_help() {
    for (arguments, word) in [(&[][..], "devices"), (&["bench"], "decode")] {
        let output = call(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("Usage: leasehold") && text.contains(word), "{text}");
    }
}

#[test]
fn devices_that_are_not_there() {
    fails(&["run", "--device", "cuda:0"], 1, &["cuda:0"]);
    fails(&["run", "--device", "mps:0"], 1, &["mps:0"]);
    fails(&["run", "--device", "cpu:7"], 1, &["cpu:7"]);
    let devices = String::from_utf8(call(&["devices"]).stdout).unwrap();
    assert!(!devices.contains("unavailable"), "the line says it once: {devices}");
}

#[test]
fn prompts_that_do_not_fit() {
    fails(&["run", "--json", "--prompt-ids", "4096"], 1, &["4096", "vocabulary"]);
    fails(&["run", "--json", "--prompt-ids", "1", "--tokens", "2000"], 1, &["context", "1024"]);
    let long = vec!["1"; 1100].join(",");
    fails(&["run", "--json", "--prompt-ids", &long, "--tokens", "1"], 1, &["1100", "1024"]);
    fails(&["run", "--json", "--prompt", ""], 1, &["empty"]);
}

/// Copies a golden model's folder and changes one of its files.
fn spoiled(change: impl FnOnce(&Path)) -> tempfile::TempDir {
    let from = repository("models/llama/tests/models/grouped-heads");
    let to = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.path().join(entry.file_name())).unwrap();
    }
    change(to.path());
    to
}

fn model_fails(dir: &Path, words: &[&str]) {
    let path = dir.to_str().unwrap();
    fails(&["run", "--json", "--prompt-ids", "1,2", "--tokens", "2", "--model", path], 1, words);
}

#[test]
fn models_that_are_broken() {
    model_fails(Path::new("/nonexistent"), &["/nonexistent"]);
    let dir = spoiled(|d| std::fs::remove_file(d.join("model.safetensors")).unwrap());
    model_fails(dir.path(), &["model.safetensors"]);
    let dir = spoiled(|d| {
        let file = d.join("model.safetensors");
        let bytes = std::fs::read(&file).unwrap();
        std::fs::write(&file, &bytes[..bytes.len() - 100]).unwrap();
    });
    model_fails(dir.path(), &["model.safetensors"]);
    let config = |d: &Path, from: &str, to: &str| {
        let file = d.join("config.json");
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(&file, text.replace(from, to)).unwrap();
    };
    let dir = spoiled(|d| config(d, "\"LlamaForCausalLM\"", "\"GPT2LMHeadModel\""));
    model_fails(dir.path(), &["config.json"]);
    let dir = spoiled(|d| config(d, "\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\""));
    model_fails(dir.path(), &["gelu"]);
    let dir = spoiled(|d| config(d, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3"));
    model_fails(dir.path(), &["model.layers.2"]);
    let dir = spoiled(|d| std::fs::write(d.join("config.json"), "{").unwrap());
    model_fails(dir.path(), &["config.json"]);
}

#[test]
fn a_closed_pipe_is_no_panic() {
    use std::process::Stdio;
    let mut child = command()
        .args(["run", "--tokens", "8"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!text.contains("panicked"), "{text}");
    assert_eq!(output.status.code(), Some(1), "{text}");
}
