//! Tests that the sources for devices and the Rust declarations agree.

use super::blocks::*;
use super::cpu::attention::{AttentionParams, PART, PART_HEADS, PARTS, SMALL_DIM, SMALL_PART};
use super::cpu::cache::CacheLayout;
use super::cpu::check::NotFiniteParams;
use super::cpu::elementwise::{CopyParams, ElementwiseParams, FillParams};
use super::cpu::embedding::EmbeddingParams;
use super::cpu::linear::{FEW, LinearParams};
use super::cpu::norm::NormParams;
use super::cpu::rope::RopeParams;
use super::cpu::sampling::{
    AdvanceParams, LogProbabilities, MAX_LOG_PROBABILITIES, NextTokenParams, RowParams,
    SamplingRecord,
};
use super::cpu::tile::Params;
use super::mps::MpsSpec;
use super::{cpu, cuda, mps};
use leasehold::kernel::Grid;

/// The words of a declaration, without comments: names and array lengths in order.
fn words(text: &str) -> Vec<String> {
    let bare: String = text.lines().map(|l| l.split("//").next().unwrap_or_default()).collect();
    bare.split([';', ','])
        .map(|f| f.split_whitespace().collect::<Vec<_>>().join(" "))
        .filter(|f| !f.is_empty())
        .collect()
}

/// `u32 n[3]` for `n: [u32; 3]`, as C declares it.
fn declared(rust: &str) -> String {
    let (name, ty) = rust.split_once(':').expect("a field");
    let (name, ty) = (name.trim(), ty.trim());
    match ty.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
        None => format!("{} {name}", c_type(ty)),
        Some(array) => {
            let (ty, n) = array.split_once(';').expect("an array");
            format!("{} {name}[{}]", c_type(ty.trim()), n.trim())
        }
    }
}

fn c_type(rust: &str) -> &str {
    if rust == "f32" { "float" } else { rust }
}

#[track_caller]
fn same_words<P: Params>() {
    let open = format!("struct {} {{", P::NAME);
    for common in [cuda::COMMON, mps::NORM.source] {
        let (_, rest) =
            common.split_once(&open).unwrap_or_else(|| panic!("{} is not declared", P::NAME));
        let (body, _) = rest.split_once("};").expect("the end of a structure");
        // A field's type contains no comma, but an array's contains a semicolon.
        let rust: Vec<String> = P::FIELDS.iter().map(|f| declared(f)).collect();
        assert_eq!(words(body), rust, "{}", P::NAME);
    }
}

#[test]
fn parameters_and_records_are_the_same_words_in_all_languages() {
    same_words::<LinearParams>();
    same_words::<NormParams>();
    same_words::<CacheLayout>();
    same_words::<RopeParams>();
    same_words::<AttentionParams>();
    same_words::<EmbeddingParams>();
    same_words::<ElementwiseParams>();
    same_words::<FillParams>();
    same_words::<CopyParams>();
    same_words::<RowParams>();
    same_words::<NotFiniteParams>();
    same_words::<NextTokenParams>();
    same_words::<AdvanceParams>();
    same_words::<SamplingRecord>();
    same_words::<LogProbabilities>();
}

#[test]
fn constants_are_the_same_in_all_languages() {
    let cuda = |module: &cuda::Module, line: String| {
        assert!(module.source.contains(&line), "{}: {line}", module.name);
    };
    let mps = |module: &mps::Module, line: String| {
        assert!(module.source.contains(&line), "{}: {line}", module.name);
    };
    for line in [
        format!("constexpr u32 FEW = {FEW};"),
        format!("constexpr u32 TILE = {TILE};"),
        format!("constexpr u32 NORM = {};", cpu::linear::NORM),
        format!("constexpr u32 BIAS = {};", cpu::linear::BIAS),
    ] {
        cuda(&cuda::LINEAR, line.clone());
        mps(&mps::LINEAR, line);
    }
    for line in [
        format!("constexpr int ROWS = {QUERY_ROWS};"),
        format!("constexpr u32 MAX_DIM = {};", cpu::rope::MAX_HEAD_DIM),
        format!("constexpr u32 THREADS = {THREADS};"),
    ] {
        cuda(&cuda::ATTENTION, line.clone());
        mps(&mps::ATTENTION, line);
    }
    for (name, value) in
        [("PART", PART), ("SMALL_PART", SMALL_PART), ("SMALL_DIM", SMALL_DIM), ("PARTS", PARTS)]
    {
        let line = format!("constexpr u32 {name} = {value};");
        assert!(cuda::DECODE.contains(&line), "decode.cuh: {line}");
    }
    cuda(&cuda::ATTENTION, format!("constexpr int HEADS = {PART_HEADS};"));
    let (heads, rows) = (cuda::DECODE_HEADS, cuda::DECODE_ROWS);
    assert_eq!(heads, 2 * PART_HEADS);
    cuda(&cuda::ATTENTION_DECODE, format!("constexpr u32 HEADS = {heads};"));
    cuda(&cuda::ATTENTION_DECODE, format!("constexpr u32 ROWS = {rows};"));
    let tile_threads = cuda::TILE_THREADS;
    for module in [&cuda::ATTENTION_TILES, &cuda::ATTENTION_DECODE] {
        cuda(module, format!("constexpr u32 THREADS = {tile_threads};"));
    }
    for (name, value) in [
        ("GROUP_QUERIES", cuda::WARPGROUP_QUERIES),
        ("ROWS", cuda::WARPGROUP_ROWS),
        ("STAGES", cuda::WARPGROUP_STAGES),
    ] {
        cuda(&cuda::ATTENTION_WARPGROUPS, format!("constexpr u32 {name} = {value};"));
    }
    for module in [&cuda::LINEAR, &cuda::LINEAR_TILES] {
        cuda(module, format!("constexpr u32 THREADS = {THREADS};"));
    }
    let bias = format!("constexpr u32 BIAS = {};", cpu::linear::BIAS);
    cuda(&cuda::LINEAR, bias.clone());
    assert!(cuda::TENSOR.contains(&bias), "tensor.cuh: {bias}");
    let fragments = cuda::STREAMED / cuda::FRAGMENT;
    cuda(&cuda::LINEAR_TILES, format!("constexpr u32 STREAMED = {fragments} * FRAGMENT;"));
    cuda(&cuda::LINEAR_TILES, format!("constexpr u32 FRAGMENT = {};", cuda::FRAGMENT));
    cuda(&cuda::LINEAR_TILES, format!("constexpr u32 STREAM = {};", cuda::STREAM));
    cuda(&cuda::ELEMENTWISE, format!("constexpr u32 THREADS = {THREADS};"));
    mps(&mps::ELEMENTWISE, format!("constexpr u32 PIECE = {PIECE};"));
    mps(&mps::NORM, format!("constexpr u32 SIMD = {WARP};"));
    mps(&mps::NORM, format!("constexpr u32 SIMDS = {};", THREADS / WARP));
    cuda(&cuda::SAMPLING, format!("constexpr u32 MAX_WARPS = {};", DRAW_THREADS / WARP));
    mps(&mps::SAMPLING, format!("constexpr u32 MAX_SIMDS = {};", DRAW_THREADS / WARP));
    let logs = format!("constexpr u32 MAX_LOGS = {MAX_LOG_PROBABILITIES};");
    cuda(&cuda::SAMPLING, logs.clone());
    mps(&mps::SAMPLING, logs);
}

#[test]
fn few_rows_stream_and_many_are_tiled() {
    let p = LinearParams { m: 8, k: 4096, n: [100, 20, 1], ..Default::default() };
    assert_eq!(product(&p), Ok(Grid::new([16, 1, 1]).threads([32, 8, 1])));
    let most = product(&LinearParams { n: [1 << 20, 0, 0], ..p }).unwrap().blocks;
    assert_eq!(most, [STREAM_BLOCKS as u32, 1, 1]);
    assert_eq!(product(&LinearParams { m: 9, ..p }), Ok(Grid::new([4, 1, 1]).threads([16, 16, 1])));
    assert_eq!(product(&LinearParams { m: 65, ..p }).unwrap().blocks, [4, 2, 1]);
    assert!(product(&LinearParams { m: u32::MAX, ..p }).unwrap_err().contains("rows"));
}

#[test]
fn geometry_covers_the_work_and_is_never_empty() {
    for (cuda, mps) in cuda::KERNELS.iter().zip(mps::KERNELS) {
        assert_eq!(cuda.name, mps.name);
    }
    let blocks = |name: &str, params: &[u8]| MpsSpec::find(name).unwrap().geometry(params).unwrap();
    let fill = |bytes: u64| FillParams {
        bytes: [bytes as u32, (bytes >> 32) as u32],
        width: 1,
        pattern: 0,
    };
    assert_eq!(blocks("fill", fill(0).as_bytes()).blocks, [1, 1, 1]);
    assert_eq!(blocks("fill", fill(16 * 1024 + 1).as_bytes()).blocks, [2, 1, 1]);
    assert_eq!(blocks("fill", fill(1 << 40).as_bytes()).blocks, [4096, 1, 1]);
    let add = ElementwiseParams { rows: 3, k: 1025, ..Default::default() };
    assert_eq!(blocks("add", add.as_bytes()), Grid::new([6, 1, 1]).threads([256, 1, 1]));
    let attention = AttentionParams { m: 9, heads: 6, ..Default::default() };
    assert_eq!(blocks("attention", attention.as_bytes()).blocks, [3, 6, 1]);
    assert_eq!(
        blocks("attention", AttentionParams { m: 1, ..attention }.as_bytes()).blocks,
        [1, 6, 1]
    );
    assert_eq!(blocks("decode_attention", attention.as_bytes()).blocks, [6, 9, 1]);
    let many = AttentionParams { m: 1 << 16, ..attention };
    let refusal = MpsSpec::find("decode_attention").unwrap().geometry(many.as_bytes()).unwrap_err();
    assert!(refusal.contains("65536 rows"), "{refusal}");
    let next = |rows, n| NextTokenParams { rows, n, ld: n, ..Default::default() };
    let grid = |rows, threads| Grid::new([rows, 1, 1]).threads([threads, 1, 1]);
    assert_eq!(blocks("next_token", next(1, 7).as_bytes()), grid(1, 256));
    assert_eq!(blocks("next_token", next(8, 128_000).as_bytes()), grid(8, 1024));
    let next_token = MpsSpec::find("next_token").unwrap();
    let refusal = next_token.geometry(next(1, u32::MAX).as_bytes()).unwrap_err();
    assert!(
        refusal.contains("kernel next_token on Metal") && refusal.contains("logits"),
        "{refusal}"
    );
}
