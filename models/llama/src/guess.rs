//! Guesses for error messages: what a file seems to be in place of the one that is wanted, by its
//! first bytes or by its neighbours, and the cure.

use leasehold_input::shown;
use std::borrow::Cow;
use std::io::Read;
use std::path::{Component, Path};

/// Bytes of a file that [`seems`] looks at.
pub(crate) const LOOKED: u64 = 512;
/// The longest text that a message quotes as the whole contents of a file.
const SHORT: usize = 200;

/// Beginnings of files, and what a file is that has one of them.
const BEGINNINGS: [(&[u8], &str); 12] = [
    (
        b"version https://git-lfs.github.com/spec/",
        "a pointer of Git LFS in its place; run 'git lfs pull' in the directory",
    ),
    (b"GGUF", GGUF),
    (b"PK\x03\x04", "a ZIP archive, or a checkpoint of PyTorch; unpack or convert it"),
    (b"\x80\x02", PICKLE),
    (b"\x80\x03", PICKLE),
    (b"\x80\x04", PICKLE),
    (b"\x1f\x8b", "compressed by gzip; unpack it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it with unzstd"),
    (b"\xfd7zXZ", "compressed by xz; unpack it with unxz"),
    (b"\xff\xfe", "a text in UTF-16; write it in UTF-8"),
    (b"\xef\xbb\xbf", "a text with a byte order mark; write it without"),
    (b"\0\0\0\0\0\0\0\0", "empty where it should begin; download it again"),
];
const GGUF: &str = "a GGUF file for llama.cpp; get the model's safetensors";
const PICKLE: &str = "a pickle of Python's; convert it to safetensors";

/// The kind of a file with these first bytes, and the cure; `None` if they tell nothing.
fn content(bytes: &[u8]) -> Option<Cow<'static, str>> {
    if let Some((_, kind)) = BEGINNINGS.iter().find(|(begin, _)| bytes.starts_with(begin)) {
        return Some((*kind).into());
    }
    let text = bytes.trim_ascii_start();
    if text.first() == Some(&b'<') {
        return Some("a page of the web, as a failed download leaves; download it again".into());
    }
    let text = std::str::from_utf8(text).ok().filter(|_| (8..=SHORT).contains(&bytes.len()))?;
    let text = text.trim_end();
    let plain = !text.is_empty() && !text.contains(|c: char| c.is_control() && !c.is_whitespace());
    plain.then(|| format!("a text, \"{}\"; download it again", shown(text)).into())
}

/// The kind of a file with these first bytes, as the end of a message.
pub(crate) fn seems(bytes: &[u8]) -> Option<String> {
    content(&bytes[..bytes.len().min(LOOKED as usize)]).map(|kind| format!("the file is {kind}"))
}

/// As [`seems`], for a file that should be JSON: its text is quoted if it does not begin as JSON.
pub(crate) fn seems_no_json(bytes: &[u8]) -> Option<String> {
    match bytes.trim_ascii_start().first() {
        None => Some("the file is empty".into()),
        Some(b'{' | b'[' | b'"') => None,
        Some(_) => seems(bytes),
    }
}

/// Names of files in a directory and what each tells. A name that begins with `*` is an end.
pub(crate) type Telling = [(&'static str, &'static str)];

const TRANSFORMERS: &str = "the model's makers' own format; get its version for transformers";
const ADAPTER: &str = "an adapter (LoRA), no model; merge it into its base model by PEFT's \
                       merge_and_unload, and save the result by save_pretrained";
const CONVERT: &str = "weights as a pickle, which is not read; convert them by transformers: \
                       AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)";
const TOKENIZER: &str = "a tokenizer in another form; convert it by transformers: \
                         AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)";

/// In a directory without `config.json`.
pub(crate) const NO_CONFIG: &Telling = &[
    ("adapter_config.json", ADAPTER),
    ("params.json", TRANSFORMERS),
    ("consolidated.safetensors", TRANSFORMERS),
    ("*.gguf", GGUF),
    ("snapshots", "the hub's cache; give one of the directories in it"),
];
/// In a directory without `model.safetensors` and its index.
pub(crate) const NO_WEIGHTS: &Telling = &[
    ("adapter_model.safetensors", ADAPTER),
    ("adapter_config.json", ADAPTER),
    ("consolidated.safetensors", TRANSFORMERS),
    ("*-of-00001.safetensors", "weights under another name; call them model.safetensors"),
    ("model-00001-of-*", "a part of the weights; download model.safetensors.index.json too"),
    ("*.safetensors", "weights under another name; call them model.safetensors"),
    ("*.bin", CONVERT),
    ("*.pth", CONVERT),
    ("*.pt", CONVERT),
    ("*.gguf", GGUF),
    ("*.h5", "weights of TensorFlow; get the model's safetensors"),
    ("*.msgpack", "weights of Flax; get the model's safetensors"),
];
/// In a directory without `tokenizer.json`.
pub(crate) const NO_TOKENIZER: &Telling = &[
    ("tekken.json", TOKENIZER),
    ("tokenizer.model", TOKENIZER),
    ("*.model", TOKENIZER),
    ("vocab.json", TOKENIZER),
];

/// The reason why a file may be missing from a directory, as the end of a message; empty without
/// a guess.
pub(crate) fn missing(dir: &Path, telling: &Telling) -> String {
    if dir.is_file() {
        let mut begin = Vec::new();
        let file = leasehold_input::open(dir).ok();
        let read = file.and_then(|file| file.take(LOOKED).read_to_end(&mut begin).ok());
        let kind =
            read.and_then(|_| seems(&begin)).map_or(String::new(), |kind| format!("; {kind}"));
        return format!("; a directory is expected, and {} is a file{kind}", dir.display());
    }
    let Ok(entries) = dir.read_dir() else { return absent(dir) };
    let mut names: Vec<String> =
        entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    let is = |name: &str, pattern: &str| match pattern.split_once('*') {
        Some((begin, end)) => name.starts_with(begin) && name.ends_with(end),
        None => name == pattern,
    };
    let found = telling
        .iter()
        .find_map(|(pattern, kind)| Some((names.iter().find(|name| is(name, pattern))?, kind)));
    found.map_or(String::new(), |(name, kind)| format!("; {} is there: {kind}", shown(name)))
}

/// The reason why there is no such directory: it may be a name of the hub.
fn absent(dir: &Path) -> String {
    let parts: Vec<_> = dir.components().collect();
    let plain = parts.iter().all(|part| matches!(part, Component::Normal(_)));
    if dir.exists() || !plain || parts.len() > 2 {
        return String::new();
    }
    let name = shown(&dir.to_string_lossy()).to_string();
    format!(
        "; a directory is expected, and nothing is downloaded: 'hf download {name} --local-dir \
         DIR' gets the model of this name, and DIR is its directory then"
    )
}
