#![doc = include_str!("../README.md")]
#![no_std]

/// Bytes with an alignment that allows the use of weights in place.
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

static ALIGNED: &Aligned<[u8]> = &Aligned(*include_bytes!("../model/model.safetensors"));

/// The weights: a safetensors file, aligned to 64 bytes.
pub static WEIGHTS: &[u8] = &ALIGNED.0;
/// The configuration: `config.json`.
pub static CONFIG: &[u8] = include_bytes!("../model/config.json");
/// The tokenizer: `tokenizer.json`.
pub static TOKENIZER: &[u8] = include_bytes!("../model/tokenizer.json");
/// The folder with the model's files on the machine that built this crate, for tests.
pub const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/model");
