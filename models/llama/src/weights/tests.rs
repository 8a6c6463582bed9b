//! Valid files, in one piece, in shards and embedded; and each possible error.

use std::collections::BTreeMap;

use proptest::prelude::*;
use safetensors::serialize;
use safetensors::tensor::TensorView;
use serde_json::json;

use std::fs;

use super::*;

/// The contents of a file: the tensor's type, shape and bytes.
type Stored = BTreeMap<String, (StoredDtype, Vec<usize>, Vec<u8>)>;

fn config(changes: serde_json::Value) -> Config {
    let mut json = json!({
        "model_type": "llama", "vocab_size": 11, "hidden_size": 6, "intermediate_size": 5, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 16,
        "tie_word_embeddings": true,
    });
    json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    Config::from_slice(json.to_string().as_bytes(), "config.json").unwrap()
}

fn tied() -> Config {
    config(json!({}))
}

/// A model of this config, with bytes that count up from the length of the tensor's name.
fn model(config: &Config, dtype: StoredDtype) -> Stored {
    TensorSpec::all(config)
        .into_iter()
        .map(|TensorSpec { name, shape }| {
            let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            let bytes = (0..len).map(|i| (i + name.len()) as u8).collect();
            (name, (dtype, shape, bytes))
        })
        .collect()
}

fn file(stored: &Stored) -> Vec<u8> {
    let views = stored.iter().map(|(name, (dtype, shape, bytes))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    serialize(views, None).unwrap()
}

/// A file with any header, valid or not.
fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

fn open(bytes: &[u8], config: &Config) -> Result<Weights> {
    Weights::from_sources(vec![Source::copied("w.safetensors", bytes)], None, config)
}

fn from_dir(dir: &Path, config: &Config) -> Result<Weights> {
    // SAFETY: a directory of the test, which no program changes while the weights live.
    unsafe { Weights::from_dir(dir, config) }
}

fn assert_holds(weights: &Weights, stored: &Stored, dtype: DType) {
    assert_eq!(weights.iter().len(), stored.len());
    for (name, (_, shape, bytes)) in stored {
        let tensor = weights.tensor(name).unwrap();
        assert_eq!(
            (tensor.dtype(), tensor.shape(), tensor.bytes()),
            (dtype, &shape[..], &bytes[..]),
            "{name}"
        );
        assert!(tensor.bytes().as_ptr().addr().is_multiple_of(dtype.bytes()), "{name}");
    }
}

fn write_shards(dir: &Path, shards: &[(&str, Stored)]) {
    let mut map = BTreeMap::new();
    for (name, stored) in shards {
        fs::write(dir.join(name), file(stored)).unwrap();
        map.extend(stored.keys().map(|tensor| (tensor.clone(), *name)));
    }
    fs::write(
        dir.join(INDEX),
        json!({"metadata": {"total_size": 0}, "weight_map": map}).to_string(),
    )
    .unwrap();
}

fn split(stored: Stored) -> (Stored, Stored) {
    stored.into_iter().partition(|(name, _)| name.contains(".0."))
}

#[test]
fn expected_tensors_follow_the_config() {
    let names = |config: &Config| {
        TensorSpec::all(config).into_iter().map(|spec| spec.name).collect::<Vec<_>>()
    };
    assert_eq!(names(&tied()).len(), 2 + 2 * 9);
    assert!(!names(&tied()).contains(&"lm_head.weight".to_owned()));
    let full =
        config(json!({"tie_word_embeddings": false, "attention_bias": true, "mlp_bias": true}));
    let specs = TensorSpec::all(&full);
    assert_eq!(specs.len(), 3 + 2 * (9 + 7));
    let shape = |name: &str| specs.iter().find(|spec| spec.name == name).unwrap().shape.clone();
    assert_eq!(shape("lm_head.weight"), [11, 6]);
    assert_eq!(shape("model.layers.1.self_attn.q_proj.weight"), [12, 6]);
    assert_eq!(shape("model.layers.1.self_attn.v_proj.bias"), [4]);
    assert_eq!(shape("model.layers.1.self_attn.o_proj.weight"), [6, 12]);
    assert_eq!(shape("model.layers.0.mlp.down_proj.weight"), [6, 5]);
    let count: usize = specs.iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
    assert_eq!(full.parameter_count(), count as u64);
    let tied_count: usize =
        TensorSpec::all(&tied()).iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
    assert_eq!(tied().parameter_count(), tied_count as u64);
}

#[test]
fn one_file_in_each_type() {
    for (stored, dtype) in [
        (StoredDtype::BF16, DType::Bf16),
        (StoredDtype::F16, DType::F16),
        (StoredDtype::F32, DType::F32),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let model = model(&tied(), stored);
        fs::write(dir.path().join(SINGLE), file(&model)).unwrap();
        let weights = from_dir(dir.path(), &tied()).unwrap();
        assert_holds(&weights, &model, dtype);
        assert_eq!(weights.total_bytes(), tied().parameter_count() * dtype.bytes() as u64);
    }
}

#[test]
fn a_view_says_where_it_lies_and_keeps_its_mapping() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(&tied(), StoredDtype::BF16);
    let path = dir.path().join(SINGLE);
    fs::write(&path, file(&model)).unwrap();
    let weights = from_dir(dir.path(), &tied()).unwrap();
    let tensor = weights.tensor("model.norm.weight").unwrap().clone();
    assert_eq!(&tensor.source().bytes()[tensor.data_offset()..][..12], tensor.bytes());
    assert_eq!(tensor.source().name(), path.display().to_string());
    let (address, keep) = (tensor.bytes().as_ptr().addr(), tensor.keep_alive());
    drop((weights, tensor));
    // The first mapping must still exist: a second one has another address.
    let again = from_dir(dir.path(), &tied()).unwrap();
    assert_ne!(again.tensor("model.norm.weight").unwrap().bytes().as_ptr().addr(), address);
    drop(keep);
}

#[test]
fn types_may_differ_from_tensor_to_tensor_and_extra_tensors_are_ignored() {
    let mut stored = model(&tied(), StoredDtype::BF16);
    let norm = model(&tied(), StoredDtype::F32).remove("model.norm.weight").unwrap();
    stored.insert("model.norm.weight".into(), norm);
    stored.insert(
        "model.layers.0.self_attn.rotary_emb.inv_freq".into(),
        (StoredDtype::I64, vec![2], vec![0; 16]),
    );
    let weights = open(&file(&stored), &tied()).unwrap();
    assert_eq!(weights.tensor("model.norm.weight").unwrap().dtype(), DType::F32);
    assert_eq!(weights.tensor("model.embed_tokens.weight").unwrap().dtype(), DType::Bf16);
    assert!(matches!(
        weights.tensor("model.layers.0.self_attn.rotary_emb.inv_freq"),
        Err(Error::NotFound(_))
    ));
}

#[test]
fn shards() {
    let dir = tempfile::tempdir().unwrap();
    let whole = model(&tied(), StoredDtype::F16);
    let (first, second) = split(whole.clone());
    write_shards(dir.path(), &[("a.safetensors", first), ("b.safetensors", second)]);
    assert_holds(&from_dir(dir.path(), &tied()).unwrap(), &whole, DType::F16);
    // As in transformers, the single file takes precedence.
    fs::write(dir.path().join(SINGLE), file(&model(&tied(), StoredDtype::F32))).unwrap();
    let weights = from_dir(dir.path(), &tied()).unwrap();
    assert_eq!(weights.tensor("model.norm.weight").unwrap().dtype(), DType::F32);
}

#[test]
fn embedded_bytes_are_used_in_place_where_aligned_and_copied_where_not() {
    let model = model(&tied(), StoredDtype::F32);
    let bytes = file(&model);
    // An embedded file is 'static: eight small blocks stay allocated, in a place where a leak
    // checker can see them.
    static KEPT: leasehold::backend::sync::Mutex<Vec<&'static [u64]>> =
        leasehold::backend::sync::Mutex::new(Vec::new());
    for shift in 0..8 {
        let at = shift..shift + bytes.len();
        let mut padded = vec![0u8; (bytes.len() / 8 + 2) * 8];
        padded[at.clone()].copy_from_slice(&bytes);
        let words: Vec<u64> =
            padded.chunks_exact(8).map(|c| u64::from_ne_bytes(c.try_into().unwrap())).collect();
        let words: &'static [u64] = words.leak();
        KEPT.lock().push(words);
        let embedded = &as_bytes(words)[at];
        let weights = Weights::from_embedded("bundled", embedded, &tied()).unwrap();
        assert_holds(&weights, &model, DType::F32);
        let tensor = weights.tensor("model.norm.weight").unwrap();
        let in_place = embedded.as_ptr_range().contains(&tensor.bytes().as_ptr());
        assert_eq!(in_place, shift % 4 == 0, "shift {shift}");
        assert_eq!(tensor.source().name(), "bundled");
    }
}

/// A file with metadata, such as `save_model` of safetensors writes it.
fn aliased(stored: &Stored, alias: &str, of: &str) -> Vec<u8> {
    let views = stored.iter().map(|(name, (dtype, shape, bytes))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    serialize(views, Some([(alias.to_owned(), of.to_owned())].into())).unwrap()
}

fn untied() -> Config {
    config(json!({"tie_word_embeddings": false}))
}

/// The names of a base model.
fn base(stored: Stored) -> Stored {
    let short = |name: String| name.strip_prefix(PREFIX).map_or(name.clone(), str::to_owned);
    stored.into_iter().map(|(name, tensor)| (short(name), tensor)).collect()
}

fn renamed(mut stored: Stored, from: &str, to: &str) -> Stored {
    let tensor = stored.remove(from).unwrap();
    stored.insert(to.to_owned(), tensor);
    stored
}

#[test]
fn a_base_models_names_are_read_alike() {
    for config in [tied(), untied(), config(json!({"attention_bias": true, "mlp_bias": true}))] {
        let whole = model(&config, StoredDtype::BF16);
        let weights = open(&file(&base(whole.clone())), &config).unwrap();
        assert_holds(&weights, &whole, DType::Bf16);
        assert!(weights.notices().is_empty(), "{:?}", weights.notices());
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = split(base(whole.clone()));
        write_shards(dir.path(), &[("a.safetensors", first), ("b.safetensors", second)]);
        assert_holds(&from_dir(dir.path(), &config).unwrap(), &whole, DType::Bf16);
    }
}

#[test]
fn a_tied_table_is_found_under_either_name() {
    let whole = model(&tied(), StoredDtype::F32);
    let only_head = renamed(whole.clone(), EMBEDDING, HEAD);
    let files = [
        file(&only_head),
        file(&base(only_head.clone())),
        aliased(&only_head, EMBEDDING, HEAD),
        aliased(&whole, HEAD, EMBEDDING),
        aliased(&base(whole.clone()), HEAD, "embed_tokens.weight"),
    ];
    for bytes in files {
        let weights = open(&bytes, &tied()).unwrap();
        assert_holds(&weights, &whole, DType::F32);
        assert!(weights.is_tied() && weights.notices().is_empty());
        assert_eq!(weights.parameter_count(), tied().parameter_count());
    }
    // The alias ties what the config does not tie.
    for bytes in [aliased(&whole, HEAD, EMBEDDING), aliased(&only_head, EMBEDDING, HEAD)] {
        let weights = open(&bytes, &untied()).unwrap();
        assert_holds(&weights, &whole, DType::F32);
        assert!(weights.is_tied());
    }
    assert_error(open(&file(&only_head), &untied()), "NotFound", &[EMBEDDING]);
}

#[test]
fn a_stored_head_beside_a_tied_config_counts_if_it_differs() {
    let mut stored = model(&untied(), StoredDtype::BF16);
    let weights = open(&file(&stored), &tied()).unwrap();
    assert_holds(&weights, &stored, DType::Bf16);
    assert!(!weights.is_tied());
    assert_eq!(weights.parameter_count(), untied().parameter_count());
    let [notice] = weights.notices() else { panic!("{:?}", weights.notices()) };
    assert!(notice.contains(HEAD) && notice.contains("tie_word_embeddings"), "{notice}");
    stored.insert(HEAD.into(), stored[EMBEDDING].clone());
    let weights = open(&file(&stored), &tied()).unwrap();
    assert!(weights.is_tied() && weights.notices().is_empty());
    assert!(!open(&file(&stored), &untied()).unwrap().is_tied());
}

#[test]
fn float64_is_rounded_to_f32() {
    let numbers = [1.0, -0.1, 1e-300, 1e300, f64::MAX, f64::NAN, 0.1 + 0.2];
    let mut stored = model(&tied(), StoredDtype::F32);
    for (name, (dtype, shape, bytes)) in &mut stored {
        *dtype = StoredDtype::F64;
        let count = shape.iter().product::<usize>();
        let values = (0..count).map(|i| numbers[(i + name.len()) % numbers.len()]);
        *bytes = values.flat_map(f64::to_le_bytes).collect();
    }
    let weights = open(&file(&stored), &tied()).unwrap();
    assert_eq!(weights.total_bytes(), 4 * tied().parameter_count());
    for (name, (_, shape, bytes)) in &stored {
        let tensor = weights.tensor(name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (DType::F32, &shape[..]));
        let wanted: Vec<u8> = bytes
            .chunks(8)
            .flat_map(|b| (f64::from_le_bytes(b.try_into().unwrap()) as f32).to_le_bytes())
            .collect();
        assert_eq!(tensor.bytes(), wanted);
    }
}

#[test]
fn tensors_that_nobody_reads_are_named_once() {
    let mut stored = model(&tied(), StoredDtype::BF16);
    for i in 0..10 {
        stored.insert(format!("extra.{i}"), (StoredDtype::F32, vec![1], vec![0; 4]));
    }
    let weights = open(&file(&stored), &tied()).unwrap();
    let [notice] = weights.notices() else { panic!("{:?}", weights.notices()) };
    assert!(notice.ends_with("extra.6, extra.7 and 2 more"), "{notice}");
}

#[test]
fn quantised_weights_are_refused_by_the_tensor_that_tells_it() {
    let up = "model.layers.0.mlp.up_proj";
    for part in [
        "qweight",
        "scales",
        "q_weight",
        "weight_packed",
        "weight.absmax",
        "weight.quant_state.bitsandbytes__nf4",
        "weight_scale_inv",
        "weight._data",
    ] {
        let name = format!("{up}.{part}");
        let stored = renamed(model(&tied(), StoredDtype::BF16), &format!("{up}.weight"), &name);
        for stored in [stored.clone(), base(stored)] {
            let short = name.strip_prefix(PREFIX).unwrap();
            assert_error(open(&file(&stored), &tied()), "Unsupported", &["quantised", short]);
        }
    }
    let mut stored = model(&tied(), StoredDtype::BF16);
    let (dtype, _, bytes) = stored.get_mut(&format!("{up}.weight")).unwrap();
    *dtype = StoredDtype::F8_E4M3;
    bytes.truncate(bytes.len() / 2);
    assert_error(open(&file(&stored), &tied()), "Unsupported", &["quantised", up, "F8_E4M3"]);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(SINGLE), file(&model(&tied(), StoredDtype::BF16))).unwrap();
    fs::write(dir.path().join("quant_config.json"), "{}").unwrap();
    let told = ["quantised", "quant_config.json"];
    assert_error(from_dir(dir.path(), &tied()), "Unsupported", &told);
    assert_error(Weights::read_dir(dir.path(), &tied()), "Unsupported", &told);
}

/// The same weights, which a change of the files does not touch.
#[test]
fn a_directory_can_be_read_without_a_mapping() {
    let whole = model(&tied(), StoredDtype::F16);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(SINGLE), file(&whole)).unwrap();
    let weights = Weights::read_dir(dir.path(), &tied()).unwrap();
    fs::write(dir.path().join(SINGLE), b"").unwrap();
    assert_holds(&weights, &whole, DType::F16);
    assert_error(Weights::read_dir(dir.path(), &tied()), "InvalidArgument", &[SINGLE, "empty"]);
    fs::write(dir.path().join(SINGLE), &file(&whole)[..100]).unwrap();
    let truncated = Weights::read_dir(dir.path(), &tied());
    assert_error(truncated, "InvalidArgument", &[SINGLE, "truncated"]);
    fs::remove_file(dir.path().join(SINGLE)).unwrap();
    let (first, second) = split(whole.clone());
    write_shards(dir.path(), &[("a.safetensors", first), ("b.safetensors", second)]);
    assert_holds(&Weights::read_dir(dir.path(), &tied()).unwrap(), &whole, DType::F16);
    // Longer than one read.
    let long: Vec<u8> = (0..2 * READ + 5).map(|i| (i % 251) as u8).collect();
    let path = dir.path().join("long");
    fs::write(&path, &long).unwrap();
    assert_eq!(Source::read(&path).unwrap().bytes(), long);
}

#[track_caller]
fn assert_error(result: Result<Weights>, kind: &str, parts: &[&str]) {
    let error = result.expect_err("an error");
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

#[test]
fn a_wrong_tensor_is_named_with_its_file() {
    let name = "model.layers.1.mlp.up_proj.weight";
    let with = |change: &dyn Fn(&mut Stored)| {
        let mut stored = model(&tied(), StoredDtype::BF16);
        change(&mut stored);
        open(&file(&stored), &tied())
    };
    let missing = with(&|stored| drop(stored.remove(name)));
    assert_error(missing, "NotFound", &[name, "missing", "w.safetensors"]);
    let transposed = with(&|stored| stored.get_mut(name).unwrap().1.reverse());
    assert_error(transposed, "InvalidArgument", &[name, "w.safetensors", "[6, 5]", "[5, 6]"]);
    let other_type = with(&|stored| stored.get_mut(name).unwrap().0 = StoredDtype::I16);
    assert_error(
        other_type,
        "Unsupported",
        &[name, "w.safetensors", "I16", "BF16, F16, F32 or F64"],
    );
    let untied = open(
        &file(&model(&tied(), StoredDtype::BF16)),
        &config(json!({"tie_word_embeddings": false})),
    );
    assert_error(untied, "NotFound", &["lm_head.weight", "tie_word_embeddings"]);
}

#[test]
fn a_truncated_file_is_an_error_at_every_length() {
    let whole = file(&model(&tied(), StoredDtype::BF16));
    for len in 0..whole.len() {
        assert_error(
            open(&whole[..len], &tied()),
            "InvalidArgument",
            &["w.safetensors", "truncated"],
        );
    }
    let mut longer = whole;
    longer.push(0);
    assert_error(open(&longer, &tied()), "InvalidArgument", &["w.safetensors", "damaged"]);
}

#[test]
fn a_damaged_header_is_an_error() {
    let check = |bytes: Vec<u8>, part| {
        assert_error(open(&bytes, &tied()), "InvalidArgument", &["w.safetensors", part])
    };
    check(raw("{", b""), "damaged header");
    check(raw("[]", b""), "damaged header");
    check(raw("\u{0}\u{1}", b""), "damaged header");
    check(u64::MAX.to_le_bytes().to_vec(), "no safetensors file");
    check(200_000_000_u64.to_le_bytes().to_vec(), "no safetensors file");
    check(b"PK\x03\x04 some archive".to_vec(), "no safetensors file");
    let tensor = |shape: &str, at: &str| {
        raw(&format!(r#"{{"t":{{"dtype":"BF16","shape":{shape},"data_offsets":{at}}}}}"#), b"")
    };
    check(tensor("[2]", "[0,2]"), "damaged header");
    check(tensor("[2]", "[4,0]"), "damaged header");
    check(tensor("[1]", "[2,4]"), "damaged header");
    check(tensor("[18446744073709551615, 4]", "[0,8]"), "damaged header");
    check(tensor("[-1]", "[0,2]"), "damaged header");
}

/// Contents that are no weights, and what a message says of each.
const CONTENTS: [(&[u8], &str); 9] = [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:4f1d\nsize 4976698672\n", "Git LFS"),
    (b"GGUF\x03\0\0\0\x23\x01\0\0\0\0\0\0", "a GGUF file"),
    (b"PK\x03\x04\0\0\x08\x08\0\0 archive/data.pkl", "a ZIP archive, or a checkpoint"),
    (b"\x80\x02}q\0(X\x0b\0\0\0lm_head.weight", "a pickle of Python's"),
    (b"\x1f\x8b\x08\0\0\0\0\0\0\x03 compressed", "unpack it with gunzip"),
    (b"\n <!DOCTYPE html><html><head><title>404</title></head></html>", "a page of the web"),
    (b"Entry not found", "a text, \"Entry not found\""),
    (b"\xff\xfe{\0\"\0a\0\"\0:\0 \0}\0", "a text in UTF-16"),
    (&[0; 4096], "empty where it should begin"),
];

#[test]
fn contents_that_are_no_weights_are_named() {
    let dir = tempfile::tempdir().unwrap();
    for (bytes, kind) in CONTENTS {
        assert_error(open(bytes, &tied()), "InvalidArgument", &["w.safetensors", kind]);
        fs::write(dir.path().join(SINGLE), bytes).unwrap();
        let read = Weights::read_dir(dir.path(), &tied());
        assert_error(read, "InvalidArgument", &[SINGLE, kind]);
    }
    let error = br#"{"error": "Repository not found"}"#;
    assert_error(open(error, &tied()), "InvalidArgument", &["a text, \"{", "not found"]);
    fs::remove_file(dir.path().join(SINGLE)).unwrap();
    fs::write(dir.path().join(INDEX), CONTENTS[0].0).unwrap();
    assert_error(from_dir(dir.path(), &tied()), "InvalidArgument", &[INDEX, "Git LFS"]);
}

/// A header whose length begins as another kind of file does.
#[test]
fn damaged_weights_are_not_called_another_kind_of_file() {
    for length in [0x0280, 0x8b1f, 0xfeff] {
        let bytes = raw(&format!("{{{}", " ".repeat(length - 1)), b"");
        assert_error(open(&bytes, &tied()), "InvalidArgument", &["damaged header"]);
        assert_error(open(&bytes[..100], &tied()), "InvalidArgument", &["truncated"]);
    }
}

/// A file that takes no room on the disk, and more memory than a host has.
#[cfg(unix)]
#[test]
fn no_weights_are_read_before_all_headers_are_checked() {
    let sparse = |path: &Path, begin: &[u8]| {
        fs::write(path, begin).unwrap();
        fs::File::options().write(true).open(path).unwrap().set_len(1 << 43).unwrap();
    };
    let dir = tempfile::tempdir().unwrap();
    sparse(&dir.path().join(SINGLE), b"");
    let empty = Weights::read_dir(dir.path(), &tied());
    assert_error(empty, "InvalidArgument", &[SINGLE, "empty where it should begin"]);
    let whole = model(&tied(), StoredDtype::F16);
    sparse(&dir.path().join(SINGLE), &file(&whole));
    let longer = Weights::read_dir(dir.path(), &tied());
    assert_error(longer, "InvalidArgument", &[SINGLE, "damaged: the header describes"]);
    // The first shard is right, but not to be had; the second one is wrong.
    fs::remove_file(dir.path().join(SINGLE)).unwrap();
    let (first, second) = split(whole);
    write_shards(dir.path(), &[("a.safetensors", first), ("b.safetensors", second)]);
    let size = 1_u64 << 43;
    let header = format!(r#"{{"t":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}}}"#);
    let begin = raw(&header, b"");
    let path = dir.path().join("a.safetensors");
    fs::write(&path, &begin).unwrap();
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_len(size + begin.len() as u64).unwrap();
    fs::write(dir.path().join("b.safetensors"), "Not Found").unwrap();
    let shards = Weights::read_dir(dir.path(), &tied());
    assert_error(shards, "InvalidArgument", &["b.safetensors", "a text, \"Not Found\""]);
}

/// Offsets so large that the sum with the header's length overflows.
#[test]
fn overflowing_offsets_are_an_error() {
    let step = (1_u64 << 61) - 1;
    let tensor = |i: u64| {
        let (start, end) = (i * step, (i + 1) * step);
        format!(r#""{i}":{{"dtype":"U8","shape":[{step}],"data_offsets":[{start},{end}]}}"#)
    };
    let header = format!("{{{}}}", (0..8).map(tensor).collect::<Vec<_>>().join(","));
    assert_error(
        open(&raw(&header, &[0; 64]), &tied()),
        "InvalidArgument",
        &["w.safetensors", "truncated"],
    );
}

#[test]
fn missing_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    assert_error(from_dir(dir.path(), &tied()), "NotFound", &[SINGLE, INDEX]);
    assert_error(from_dir(&dir.path().join("nowhere"), &tied()), "NotFound", &["nowhere"]);
    let (first, second) = split(model(&tied(), StoredDtype::F16));
    write_shards(dir.path(), &[("a.safetensors", first), ("b.safetensors", second)]);
    fs::remove_file(dir.path().join("b.safetensors")).unwrap();
    assert_error(from_dir(dir.path(), &tied()), "NotFound", &["b.safetensors"]);
    fs::write(dir.path().join("b.safetensors"), b"").unwrap();
    assert_error(from_dir(dir.path(), &tied()), "InvalidArgument", &["b.safetensors", "empty"]);
    fs::create_dir(dir.path().join(SINGLE)).unwrap();
    assert_error(
        from_dir(dir.path(), &tied()),
        "InvalidArgument",
        &[SINGLE, "a folder; a regular file is expected"],
    );
}

#[test]
fn what_stands_in_the_place_of_weights_is_named() {
    for (file, words) in [
        ("pytorch_model.bin", "weights as a pickle, which is not read; convert them"),
        ("consolidated.00.pth", "weights as a pickle"),
        ("consolidated.safetensors", "the model's makers' own format"),
        ("adapter_model.safetensors", "an adapter (LoRA), no model"),
        ("model-00001-of-00002.safetensors", "download model.safetensors.index.json too"),
        ("weights.safetensors", "call them model.safetensors"),
        ("model-Q4_K_M.gguf", "a GGUF file"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("README.md"), "").unwrap();
        fs::write(dir.path().join(file), "").unwrap();
        let words = [SINGLE, INDEX, file, words];
        assert_error(from_dir(dir.path(), &tied()), "NotFound", &words);
        // It tells nothing of weights that are there.
        fs::write(dir.path().join(SINGLE), "").unwrap();
        assert_error(from_dir(dir.path(), &tied()), "InvalidArgument", &[SINGLE, "empty"]);
    }
}

#[test]
fn a_tensor_in_two_shards_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let whole = model(&tied(), StoredDtype::F16);
    let (first, mut second) = split(whole.clone());
    let name = "model.layers.0.mlp.up_proj.weight";
    second.insert(name.into(), whole[name].clone());
    write_shards(dir.path(), &[("a.safetensors", first), ("b.safetensors", second)]);
    let weights = from_dir(dir.path(), &tied());
    assert_error(weights, "InvalidArgument", &[name, "twice", "a.safetensors", "b.safetensors"]);
}

#[test]
fn a_tensor_that_its_shard_lacks_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let (first, mut second) = split(model(&tied(), StoredDtype::F16));
    write_shards(dir.path(), &[("a.safetensors", first), ("b.safetensors", second.clone())]);
    second.remove("model.norm.weight");
    fs::write(dir.path().join("b.safetensors"), file(&second)).unwrap();
    let weights = from_dir(dir.path(), &tied());
    assert_error(weights, "NotFound", &["model.norm.weight", "b.safetensors", INDEX]);
    // A tensor that the index does not know.
    write_shards(dir.path(), &[("b.safetensors", second)]);
    assert_error(from_dir(dir.path(), &tied()), "NotFound", &["missing", INDEX]);
}

#[test]
fn a_wrong_index_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let check = |text: &str, part: &str| {
        fs::write(dir.path().join(INDEX), text).unwrap();
        assert_error(from_dir(dir.path(), &tied()), "InvalidArgument", &[INDEX, part]);
    };
    check("", "no valid index");
    check("{}", "weight_map");
    check(r#"{"weight_map": {}}"#, "empty");
    check(r#"{"weight_map": {"t": 3}}"#, "no valid index");
    for file in ["../secret.safetensors", "/etc/passwd", "", "a/../../b"] {
        check(&json!({"weight_map": {"t": file}}).to_string(), "no file of this directory");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// For any bytes, opening returns a result.
    #[test]
    fn any_bytes_are_taken_or_refused(header in "[\\x20-\\x7e]{0,80}", data in prop::collection::vec(any::<u8>(), 0..80)) {
        let _ = open(&data, &tied());
        let _ = open(&raw(&header, &data), &tied());
    }

    /// A changed byte of the header gives an error, or a header that still describes the whole
    /// model.
    #[test]
    fn a_changed_byte_is_noticed_or_harmless(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let stored = model(&tied(), StoredDtype::BF16);
        let mut bytes = file(&stored);
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[at.index(header)] = byte;
        if let Ok(weights) = open(&bytes, &tied()) {
            prop_assert_eq!(weights.iter().len(), stored.len());
            for (name, (_, shape, _)) in &stored {
                prop_assert_eq!(weights.tensor(name).unwrap().shape(), &shape[..]);
            }
        }
    }
}
