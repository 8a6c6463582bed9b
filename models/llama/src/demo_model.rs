//! A 5.4-million-parameter Llama-architecture model (6 layers, width 256, 8 heads, 4 KV heads,
//! tied head, vocabulary 4,096, context 1,024), trained for this project from random weights, with
//! its byte-level BPE tokenizer, on the source of Python 3.11's standard library (PSF-2.0). It
//! continues Python code plausibly and has partly memorised its corpus; it is a workload, not a
//! product.
//!
//! The files are bytes of the program: weights, configuration and tokenizer. A test finds their
//! folder by [`FOLDER`].
//!
//! This module must not know how a model is computed.

/// Bytes with an alignment that allows the use of weights in place.
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

static ALIGNED: &Aligned<[u8]> = &Aligned(*include_bytes!("../demo-model/model.safetensors"));

/// The weights: a safetensors file, aligned to 64 bytes.
pub static WEIGHTS: &[u8] = &ALIGNED.0;
/// The configuration: `config.json`.
pub static CONFIG: &[u8] = include_bytes!("../demo-model/config.json");
/// The tokenizer: `tokenizer.json`.
pub static TOKENIZER: &[u8] = include_bytes!("../demo-model/tokenizer.json");
/// The folder with the model's files on the machine that built this crate, for tests.
pub const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/demo-model");
