//! Many damaged models, from a seed. The command ends in time with status 0
//! or 1 and prints at most one line of errors.

use super::dice::{Dice, bytes_mutated};
use super::*;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

fn odd(dice: &mut Dice) -> Value {
    dice.of(&[
        Value::Null,
        json!(true),
        json!(0),
        json!(1),
        json!(-1),
        json!(1.5),
        json!(1e308),
        json!(16_777_217),
        json!(268_435_456),
        json!(u32::MAX),
        json!(i64::MAX),
        json!(u64::MAX),
        json!(""),
        json!("llama"),
        json!("\u{0}\u{1b}[2J"),
        json!("x".repeat(10_000)),
        json!([]),
        json!([[]]),
        json!(vec![0; 10_000]),
        json!({}),
        json!({"rope_type": "linear", "factor": 0}),
        json!({"rope_type": "llama3", "factor": 1e-300, "low_freq_factor": 1e-300, "high_freq_factor": 1e300}),
    ])
}

/// Replaces, removes or doubles a random part of a value.
fn mutated(dice: &mut Dice, value: &mut Value) {
    let deeper = dice.below(10) < 6;
    match value {
        Value::Object(map) if !map.is_empty() => {
            let keys: Vec<String> = map.keys().cloned().collect();
            let key = dice.of(&keys);
            match (deeper, dice.below(4)) {
                (true, _) => mutated(dice, &mut map[&key]),
                (_, 0) => drop(map.remove(&key)),
                (_, 1) => drop(map.insert(
                    dice.of(&["", "type", "model", "\u{7}"]).to_owned(),
                    map[&key].clone(),
                )),
                _ => map[&key] = odd(dice),
            }
        }
        Value::Array(list) if !list.is_empty() => {
            let at = dice.below(list.len());
            match (deeper, dice.below(3)) {
                (true, _) => mutated(dice, &mut list[at]),
                (_, 0) => drop(list.remove(at)),
                (_, 1) => list.insert(at, odd(dice)),
                _ => list[at] = odd(dice),
            }
        }
        other => *other = odd(dice),
    }
}

/// Changes a JSON file.
fn json_file(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

/// Changes the header of a safetensors file and updates its length.
fn header(path: &Path, change: impl FnOnce(&mut Value)) {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut value: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    change(&mut value);
    let text = value.to_string();
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text.bytes());
    out.extend(&bytes[8 + length..]);
    fs::write(path, out).unwrap();
}

/// A tokenizer of unusual parts, some of which make the library panic.
fn odd_tokenizer(dice: &mut Dice) -> Value {
    let vocab = json!({"a": 0, "b": 1, "c": 2, "Ġ": 3, " ": 4, "ab": 5});
    let models = [
        json!({"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], "unk_token": "zz", "byte_fallback": true}),
        json!({"type": "BPE", "vocab": vocab, "merges": []}),
        json!({"type": "WordLevel", "vocab": vocab, "unk_token": "a"}),
        json!({"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]], "unk_id": 7}),
        json!({"type": "WordPiece", "vocab": vocab, "unk_token": "a", "max_input_chars_per_word": 100, "continuing_subword_prefix": "##"}),
    ];
    let before = [
        Value::Null,
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        json!({"type": "Split", "pattern": {"Regex": "(?=a)"}, "behavior": "Isolated", "invert": false}),
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
    ];
    let normalizers = [
        Value::Null,
        json!({"type": "NFC"}),
        json!({"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
        json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        json!({"type": "Prepend", "prepend": "▁"}),
    ];
    let decoders = [
        Value::Null,
        json!({"type": "ByteFallback"}),
        json!({"type": "Strip", "content": " ", "start": 1u64 << 32, "stop": 1u64 << 40}),
        json!({"type": "Strip", "content": "a", "start": 0, "stop": 9}),
        json!({"type": "Replace", "pattern": {"String": ""}, "content": "y"}),
        json!({"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": true}),
    ];
    json!({
        "version": "1.0", "added_tokens": [], "model": dice.of(&models), "pre_tokenizer": dice.of(&before),
        "normalizer": dice.of(&normalizers), "decoder": dice.of(&decoders),
    })
}

/// Damages a model's directory; returns a description and the prompt arguments.
fn damage(dice: &mut Dice, dir: &Path) -> (String, [&'static str; 2]) {
    let (config, weights) = (dir.join("config.json"), dir.join("model.safetensors"));
    let (tokenizer, index) = (dir.join("tokenizer.json"), dir.join("model.safetensors.index.json"));
    let (ids, text) = (["--prompt-ids", "1,2"], ["--prompt", "ab c"]);
    let file = dice.of(&[config.clone(), weights.clone(), tokenizer.clone(), index.clone()]);
    let name = file.file_name().unwrap().to_str().unwrap().to_owned();
    match dice.below(9) {
        0 | 1 => {
            json_file(&config, |v| mutated(dice, v));
            ("config".to_owned(), ids)
        }
        2 | 3 => {
            header(&weights, |v| mutated(dice, v));
            ("header".to_owned(), ids)
        }
        4 => {
            let mut bytes = fs::read(&weights).unwrap();
            for _ in 0..100 {
                let at = bytes.len() / 2 + dice.below(bytes.len() / 2 - 4);
                let bits: [u8; 4] = dice.of(&[
                    [0xFF; 4],
                    [0, 0, 0x80, 0x7F],
                    [1, 0, 0, 0],
                    [0xFF, 0xFF, 0x7F, 0x7F],
                ]);
                bytes[at..at + 4].copy_from_slice(&bits);
            }
            fs::write(&weights, bytes).unwrap();
            ("values".to_owned(), ids)
        }
        5 => {
            fs::write(&tokenizer, odd_tokenizer(dice).to_string()).unwrap();
            if dice.below(2) == 0 {
                json_file(&tokenizer, |v| mutated(dice, v));
            }
            (fs::read_to_string(&tokenizer).unwrap(), text)
        }
        6 => {
            let file = if file == index { weights } else { file };
            let mut bytes = fs::read(&file).unwrap();
            bytes_mutated(dice, &mut bytes);
            fs::write(&file, bytes).unwrap();
            (format!("bytes of {name}"), text)
        }
        7 => {
            fs::remove_file(&weights).unwrap();
            let bad = dice.of(&[
                "../../etc/passwd",
                "/etc/passwd",
                "",
                ".",
                "a/../b",
                "nofile",
                "\u{0}",
                "\u{1b}[2J",
                "~",
            ]);
            fs::write(
                &index,
                json!({"weight_map": {"model.norm.weight": bad, "\u{7}": "x"}}).to_string(),
            )
            .unwrap();
            (format!("index of {bad:?}"), ids)
        }
        _ => {
            let _ = fs::remove_file(&file);
            if file == index {
                fs::remove_file(&weights).unwrap();
            }
            let kind = dice.of(&[
                "fifo",
                "folder",
                "/dev/zero",
                "/dev/full",
                "/proc/self/mem",
                "loop",
                "nowhere",
                "sparse",
                "empty",
            ]);
            match kind {
                "fifo" => assert!(Command::new("mkfifo").arg(&file).status().unwrap().success()),
                "folder" => fs::create_dir(&file).unwrap(),
                "loop" => symlink(&file, &file).unwrap(),
                "sparse" => fs::File::create(&file).unwrap().set_len(8 << 40).unwrap(),
                "empty" => fs::write(&file, "").unwrap(),
                other => symlink(other, &file).unwrap(),
            }
            (format!("{name} is {kind}"), text)
        }
    }
}

#[test]
fn damaged_models_end_in_a_line() {
    let from = repository("models/llama/tests/models/untied-head");
    let mut statuses = [0; 2];
    for seed in 0..180 {
        let mut dice = Dice::new(seed);
        let dir = tempfile::tempdir().unwrap();
        for file in ["config.json", "model.safetensors", "tokenizer.json"] {
            fs::copy(from.join(file), dir.path().join(file)).unwrap();
        }
        let (what, prompt) = damage(&mut dice, dir.path());
        let model = dir.path().to_str().unwrap();
        let run = ["run", "--tokens", "2", "--model", model, prompt[0], prompt[1]];
        statuses[judged(&format!("seed {seed}: {what}"), &run) as usize] += 1;
    }
    assert!(
        statuses.iter().all(|&n| n > 10),
        "statuses {statuses:?}: the damage is too little or too much"
    );
}
