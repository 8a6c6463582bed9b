//! The public API over whole model directories: the bundled one and those under `tests/models`,
//! which `tests/generate_models.py` makes.

mod batch;
mod directories;
mod golden;
mod operators;
mod ranks;
mod suspend;

use leasehold_llama::{Batch, Config, Decoder, Model, TextStream, Tokenizer, Weights};
use std::fs;
use std::path::{Path, PathBuf};

/// One prompt of a `golden.json`, with transformers' results in float64.
struct Golden {
    /// The prompt.
    prompt_ids: Vec<u32>,
    /// One number for each vocabulary entry, after the prompt's last position.
    last_logits: Vec<f64>,
    /// The greedy choice after each prompt position.
    argmax_per_position: Vec<u32>,
    /// Greedily chosen new tokens.
    greedy: Vec<u32>,
    /// The logits that chose the last of them.
    final_logits: Option<Vec<f64>>,
}

/// The weights of a directory.
fn weights_of(dir: &Path, config: &Config) -> leasehold::Result<Weights> {
    // SAFETY: a model of the repository, or of the test itself. No program changes it while the
    // weights live.
    unsafe { Weights::from_dir(dir, config) }
}

/// Every golden model's directory.
fn model_dirs() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut dirs: Vec<PathBuf> = fs::read_dir(root.join("tests/models"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    dirs.push(leasehold_llama::demo_model::FOLDER.into());
    dirs.sort();
    dirs
}

/// The golden model of this name.
fn model_dir(name: &str) -> PathBuf {
    if name == "demo-model" {
        return leasehold_llama::demo_model::FOLDER.into();
    }
    model_dirs().into_iter().find(|dir| dir.ends_with(name)).unwrap()
}

fn golden(dir: &Path) -> Vec<Golden> {
    let json: serde_json::Value =
        serde_json::from_slice(&fs::read(dir.join("golden.json")).unwrap()).unwrap();
    let ids =
        |value: &serde_json::Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    let cases = json["cases"].as_array().unwrap().iter().map(|case| {
        let greedy =
            case.as_object().unwrap().iter().find(|(key, _)| key.starts_with("greedy_")).unwrap().1;
        Golden {
            prompt_ids: ids(&case["prompt_ids"]),
            last_logits: serde_json::from_value(case["last_logits"].clone()).unwrap(),
            argmax_per_position: ids(&case["argmax_per_position"]),
            greedy: ids(greedy),
            final_logits: case
                .get("final_logits")
                .map(|logits| serde_json::from_value(logits.clone()).unwrap()),
        }
    });
    cases.collect()
}

/// A server keeps all of these in its own threads, without scopes.
#[test]
fn handles_and_what_is_made_from_them_move_between_threads() {
    fn shared<T: Clone + Send + Sync + 'static>() {}
    fn moved<T: Send + 'static>() {}
    shared::<Model>();
    shared::<Tokenizer>();
    moved::<Batch>();
    moved::<Decoder>();
    moved::<TextStream>();
}
