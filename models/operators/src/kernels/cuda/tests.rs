//! Tests that the PTX and the Rust declarations agree.

use super::super::blocks::{DRAW_THREADS, THREADS, WARP};
use super::super::cpu;
use super::super::cpu::sampling::{NextTokenParams, RowParams};
use super::*;

/// The entry's parameters: the operands' pointers, then one parameter structure and the word of
/// early reads, as the backend packs them.
#[test]
fn every_cpu_kernel_has_an_entry_with_its_signature() {
    assert_eq!(KERNELS.len(), cpu::KERNELS.len());
    for cuda in CudaSpec::all().filter(|cuda| cuda.archs != HOPPER) {
        let find = |k: &&cpu::tile::KernelSpec| k.name == cuda.name;
        let spec = cpu::KERNELS.iter().find(find).unwrap_or_else(|| panic!("no {}", cuda.name));
        let (entry, word) = (cuda.entry, usize::from(cuda.early_reads(spec) != 0));
        let open = format!(".entry {entry}(");
        let (_, rest) =
            cuda.module.ptx.split_once(&open).unwrap_or_else(|| panic!("no entry {entry}"));
        let (signature, body) = rest.split_once(')').expect("the end of a signature");
        let signature: Vec<&str> = signature.split(',').map(str::trim).collect();
        let pointers = signature.iter().filter(|p| p.starts_with(".param .u64 ")).count();
        assert_eq!(
            (signature.len(), pointers),
            (spec.operands.len() + 1 + word, spec.operands.len()),
            "{entry}"
        );
        let params = format!(".param .align 4 .b8 {entry}_param_{pointers}[{}]", spec.params_bytes);
        assert_eq!(signature[pointers], params);
        let early = format!(".param .u32 {entry}_param_{}", pointers + 1);
        assert_eq!(signature.get(pointers + 1), (word == 1).then_some(&&*early));
        let most: u32 = body
            .split(".maxntid ")
            .nth(1)
            .and_then(|t| t.split(',').next()?.parse().ok())
            .expect("a bound");
        assert!([WARP, TILE_THREADS, THREADS, DRAW_THREADS].contains(&most));
    }
}

/// A cubin has a section `.text.ENTRY` for each kernel, and its architecture in the second byte of
/// its flags.
#[test]
fn every_kernel_has_machine_code_for_each_architecture() {
    for cuda in KERNELS.iter().chain(TENSOR_KERNELS) {
        let section = format!("\0.text.{}\0", cuda.entry);
        let has = |cubin: &&Cubin<'_>| {
            let (major, minor) = cubin.compute_capability();
            assert!(cubin.image().starts_with(b"\x7fELF"));
            assert_eq!(u32::from(cubin.image()[49]), major * 10 + minor, "{cubin:?}");
            cubin.image().windows(section.len()).any(|bytes| bytes == section.as_bytes())
        };
        let of: Vec<_> =
            cuda.module.cubins.iter().filter(has).map(Cubin::compute_capability).collect();
        let all = [(8, 0), (9, 0), (10, 0), (12, 0)];
        let wanted = if cuda.archs == HOPPER { &all[1..2] } else { &all[..] };
        assert_eq!(of, wanted, "{}", cuda.entry);
    }
}

#[test]
fn a_long_context_has_parts() {
    let p = AttentionParams { m: 1, heads: 6, kv_heads: 1, positions: 100, ..Default::default() };
    let long = AttentionParams { positions: 1 << 20, kv_heads: 3, ..p };
    let decode = CudaSpec::find("decode_attention").unwrap();
    let grid = |p: &AttentionParams| decode.geometry(p.as_bytes()).map(|g| g.blocks);
    assert_eq!((grid(&p), grid(&long)), (Ok([1, 1, 2]), Ok([64, 3, 1])));
    assert_eq!((p.scratch_bytes(), long.scratch_bytes()), (0, 4 * (3 + 6 * 64 * 2)));
    let rows = AttentionParams { m: 5, ..p };
    let long_rows = AttentionParams { m: 5, ..long };
    assert_eq!((grid(&rows), grid(&long_rows)), (Ok([1, 1, 10]), Ok([64, 3, 5])));
    assert_eq!(long_rows.scratch_bytes(), 5 * long.scratch_bytes());
    let refusal = grid(&AttentionParams { m: 1 << 15, ..p }).unwrap_err();
    assert!(refusal.contains("65536 rows, times blocks"), "{refusal}");
}

#[test]
fn blocks_take_the_parts_of_all_rows_in_turns() {
    let p = AttentionParams {
        m: 8,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        positions: 1024,
        x: 1,
        cache: 1,
        ..Default::default()
    };
    let decode = tensor_kernel("decode_attention_64");
    let grid = |p: &AttentionParams| decode.geometry(p.as_bytes()).map(|grid| grid.blocks);
    assert_eq!(grid(&p), Ok([64, 8, 1]));
    assert_eq!(grid(&AttentionParams { m: 2, positions: 99, ..p }), Ok([2, 8, 1]));
    assert_eq!(grid(&AttentionParams { m: 513, heads: 128, ..p }), Ok([16, 8, 4]));
    assert_eq!(grid(&AttentionParams { m: 1 << 16, kv_heads: 32, ..p }), Ok([1, 32, 128]));
    let refusal = grid(&AttentionParams { m: 1 << 25, ..p }).unwrap_err();
    assert!(refusal.contains("65536 lists"), "{refusal}");
    assert!(decode.takes(p.as_bytes()));
    assert!(decode.takes(AttentionParams { m: 17, positions: 9, ..p }.as_bytes()));
    for other in [
        AttentionParams { m: 1, ..p },
        AttentionParams { m: 16, positions: 512, ..p },
        AttentionParams { x: 0, cache: 0, ..p },
        AttentionParams { cache: 2, ..p },
        AttentionParams { head_dim: 80, ..p },
    ] {
        assert!(!decode.takes(other.as_bytes()), "{other:?}");
    }
}

fn tensor_kernel(entry: &str) -> &'static CudaSpec {
    TENSOR_KERNELS.iter().find(|cuda| cuda.entry == entry).expect("an entry")
}

#[test]
fn tensor_cores_take_products_of_several_rows() {
    let p = LinearParams {
        m: 2,
        k: 40,
        n: [70, 0, 0],
        ldx: 48,
        ldy: [70, 0, 0],
        x: 1,
        w: 1,
        y: 1,
        flags: cpu::linear::BIAS,
        ..Default::default()
    };
    let (linear, gated) = (tensor_kernel("linear_tiles"), tensor_kernel("linear_gated_tiles"));
    let shape = |cuda: &CudaSpec, p: &LinearParams| {
        let grid = cuda.geometry(p.as_bytes()).unwrap();
        (grid.blocks, grid.threads)
    };
    assert_eq!(shape(linear, &p), ([5, 1, 1], [16, 16, 1]));
    assert_eq!(shape(gated, &p), ([9, 1, 1], [16, 16, 1]));
    let most = LinearParams { n: [127 * 32, 0, 0], ..p };
    assert_eq!(shape(linear, &most), ([254, 1, 1], [16, 16, 1]));
    assert_eq!(shape(gated, &most), ([254, 1, 1], [32, 8, 1]));
    let beyond = LinearParams { n: [127 * 32 + 1, 0, 0], ..p };
    assert_eq!(shape(linear, &beyond), ([128, 1, 1], [32, 8, 1]));
    let three = LinearParams { m: 32, n: [70, 33, 1 << 20], ..p };
    assert_eq!(shape(tensor_kernel("linear3_tiles"), &three), ([264, 1, 1], [32, 8, 1]));
    let more = LinearParams { m: 33, ..p };
    assert_eq!(shape(linear, &more), ([1, 2, 1], [64, 4, 1]));
    assert_eq!(shape(gated, &more), ([1, 3, 1], [64, 4, 1]));
    let many = LinearParams { m: 129, n: [64 * 128, 0, 0], ..p };
    assert_eq!(shape(linear, &many), ([2, 64, 1], [128, 2, 1]));
    assert_eq!(shape(linear, &LinearParams { m: 128, ..many }), ([2, 128, 1], [64, 4, 1]));
    let wide = LinearParams { m: 64, n: [128 * 128, 0, 0], ..p };
    assert_eq!(shape(linear, &wide), ([1, 256, 1], [64, 4, 1]));
    let refusal = linear.geometry(LinearParams { n: [1 << 23, 0, 0], ..more }.as_bytes());
    assert!(refusal.unwrap_err().contains("131072 blocks of outputs"));
    for taken in [p, LinearParams { y: 0, vector: 2, ..p }, LinearParams { x: 2, w: 2, y: 2, ..p }]
    {
        assert!(linear.takes(taken.as_bytes()), "{taken:?}");
    }
    for other in [
        LinearParams { m: 1, ..p },
        LinearParams { flags: cpu::linear::NORM, ..p },
        LinearParams { k: 36, ..p },
        LinearParams { ldx: 44, ..p },
        LinearParams { x: 0, w: 0, ..p },
        LinearParams { x: 2, ..p },
        LinearParams { y: 2, ..p },
    ] {
        assert!(!linear.takes(other.as_bytes()), "{other:?}");
    }
}

/// Bytes of shared memory that a processor has, and those that a block takes beside its own.
const PROCESSOR: u32 = 228 << 10;
const BESIDE: u32 = 1 << 10;

#[test]
fn two_blocks_of_a_long_row_fill_a_processor() {
    let p = LinearParams { m: 1, k: 2048, n: [2048, 0, 0], x: 1, w: 1, ..Default::default() };
    let normed = LinearParams { flags: cpu::linear::NORM, ..p };
    let row = tensor_kernel("linear_row");
    let most = LinearParams { k: 14_336, ..p };
    let most_normed = LinearParams { k: 7_168, ..normed };
    for taken in [p, normed, most, most_normed, LinearParams { n: [5, 0, 0], ..p }] {
        assert!(row.takes(taken.as_bytes()), "{taken:?}");
        let grid = row.geometry(taken.as_bytes()).unwrap();
        assert_eq!(grid.blocks, [taken.n[0].min(264), 1, 1]);
        assert_eq!(grid.threads, [352, 1, 1]);
        assert!(2 * (grid.shared + BESIDE) <= PROCESSOR, "{taken:?}");
        assert!(3 * (grid.shared + BESIDE) > PROCESSOR, "{taken:?}");
    }
    let large = LinearParams { n: [(1 << 15) + 1, 0, 0], ..p };
    for other in [
        LinearParams { m: 2, ..p },
        LinearParams { k: 2040, ..p },
        LinearParams { k: 2052, ..p },
        LinearParams { k: 16_384, ..p },
        LinearParams { k: 14_336, ..normed },
        LinearParams { x: 2, w: 2, ..p },
        LinearParams { x: 0, ..p },
        large,
    ] {
        assert!(!row.takes(other.as_bytes()), "{other:?}");
    }
    let gated = tensor_kernel("linear_gated_row");
    let half = LinearParams { n: [1 << 14, 0, 0], ..p };
    assert!(gated.takes(half.as_bytes()));
    assert!(!gated.takes(LinearParams { n: [(1 << 14) + 1, 0, 0], ..p }.as_bytes()));
    let three = LinearParams { n: [2048, 512, 512], ..p };
    assert!(tensor_kernel("linear3_row").takes(three.as_bytes()));
}

#[test]
fn boxes_take_up_to_64_rows_of_whole_boxes() {
    let p = LinearParams {
        m: 9,
        k: 320,
        n: [33, 0, 0],
        ldx: 328,
        ldy: [33, 0, 0],
        x: 1,
        w: 1,
        y: 1,
        ..Default::default()
    };
    let (linear, gated) = (tensor_kernel("linear_boxes"), tensor_kernel("linear_gated_boxes"));
    let shape = |cuda: &CudaSpec, p: &LinearParams| {
        let grid = cuda.geometry(p.as_bytes()).unwrap();
        assert_eq!(grid.threads, [288, 1, 1]);
        (grid.blocks[0], grid.shared >> 10)
    };
    assert_eq!(shape(linear, &p), (3, 217));
    assert_eq!(shape(gated, &p), (2, 217));
    assert_eq!(shape(linear, &LinearParams { n: [132 * 16, 0, 0], ..p }), (132, 217));
    assert_eq!(shape(linear, &LinearParams { n: [132 * 16 + 1, 0, 0], ..p }), (133, 109));
    assert_eq!(shape(linear, &LinearParams { n: [1 << 14, 0, 0], ..p }), (1024, 109));
    assert_eq!(shape(linear, &LinearParams { n: [(1 << 14) + 1, 0, 0], ..p }), (257, 109));
    assert!(2 * (BOX_SHARED[1] + 2 * BESIDE) <= PROCESSOR && 2 * BOX_SHARED[0] > PROCESSOR);

    // x in boxes of as many rows as its fragments have, then the weights.
    let maps = |cuda: &CudaSpec, p: &LinearParams| -> Vec<TensorMap> {
        let bytes = cuda.launched(p.as_bytes());
        assert_eq!(cuda.params_in(&bytes), Ok(p.as_bytes()));
        (0..cuda.mapped().len() as u32).map(|i| TensorMap::from_params(&bytes, 128 * i)).collect()
    };
    let boxes = |map: &TensorMap| {
        map.validate().expect("a tensor map");
        (map.size(1), map.stride(1), [0, 1, 2].map(|i| map.box_of(i)))
    };
    let all: Vec<_> = maps(gated, &p).iter().map(boxes).collect();
    assert_eq!(all, [(9, 656, [64, 16, 2]), (33, 640, [64, 32, 2]), (33, 640, [64, 32, 2])]);
    let three = LinearParams { m: 33, n: [70, 5, 3], ..p };
    let all: Vec<_> = maps(tensor_kernel("linear3_boxes"), &three).iter().map(boxes).collect();
    let weights = [70, 5, 3].map(|n| (n, 640, [64, 16, 4]));
    assert_eq!((all[0], &all[1..]), ((33, 656, [64, 64, 4]), &weights[..]));
    assert!(linear.params_in(&[0; 255]).is_err());

    // Each block reads all rows of x. So the blocks of many rows are few, or x is short.
    let long = LinearParams { k: 1 << 13, ldx: 1 << 13, ..p };
    let short = LinearParams { m: 64, k: 2048, ldx: 2048, ..p };
    let most = [132 * 16, 0, 0];
    let beyond = [132 * 16 + 1, 0, 0];
    for taken in [
        p,
        LinearParams { m: 2, y: 0, ..p },
        LinearParams { m: 64, ..p },
        LinearParams { m: 32, n: beyond, ..long },
        LinearParams { m: 64, n: most, ..long },
        LinearParams { n: [1 << 14, 0, 0], ..short },
    ] {
        assert!(linear.takes(taken.as_bytes()), "{taken:?}");
    }
    for other in [
        LinearParams { m: 33, n: beyond, ..long },
        LinearParams { n: [(1 << 14) + 1, 0, 0], ..short },
        LinearParams { m: 1, ..p },
        LinearParams { m: 65, ..p },
        LinearParams { k: 312, ..p },
        LinearParams { ldx: 324, ..p },
        LinearParams { x: 2, w: 2, y: 2, ..p },
        LinearParams { flags: cpu::linear::NORM, ..p },
    ] {
        assert!(!linear.takes(other.as_bytes()), "{other:?}");
    }
}

#[test]
fn tensor_cores_take_some_attention() {
    let attention = AttentionParams { m: 9, heads: 6, ..Default::default() };
    let many = AttentionParams { m: 129, head_dim: 80, x: 1, cache: 1, scale: 0.1, ..attention };
    let groups = tensor_kernel("attention_warpgroups");
    let tiles = tensor_kernel("attention_tiles");
    assert_eq!(tiles.geometry(many.as_bytes()).unwrap().blocks, [2, 6, 1]);
    assert!(!groups.takes(many.as_bytes()));
    let wide = AttentionParams { head_dim: 128, ..many };
    assert!(groups.takes(wide.as_bytes()) && tiles.takes(wide.as_bytes()));
    let grid = Grid::new([2, 6, 1]).threads([384, 1, 1]).shared((160 << 10) + 64);
    assert_eq!(groups.geometry(wide.as_bytes()), Ok(grid));
    let narrow = AttentionParams { head_dim: 64, ..many };
    assert!(!groups.takes(narrow.as_bytes()) && tiles.takes(narrow.as_bytes()));
    let groups = tensor_kernel("attention_warpgroups_64");
    assert!(groups.takes(narrow.as_bytes()) && !groups.takes(wide.as_bytes()));
    let grid = Grid::new([1, 6, 1]).threads([512, 1, 1]).shared((88 << 10) + 64);
    assert_eq!(groups.geometry(narrow.as_bytes()), Ok(grid));
    assert!(tiles.takes(many.as_bytes()));
    for other in [
        AttentionParams { m: 15, ..many },
        AttentionParams { head_dim: 72, ..many },
        AttentionParams { cache: 2, ..many },
        AttentionParams { x: 0, cache: 0, ..many },
        AttentionParams { scale: 0.0, ..many },
        AttentionParams { scale: -1.0, ..many },
        AttentionParams { scale: f32::NAN, ..many },
    ] {
        assert!(!tiles.takes(other.as_bytes()), "{other:?}");
    }
    let next = NextTokenParams { rows: 1, n: u32::MAX, ..Default::default() };
    let refusal = CudaSpec::find("next_token").unwrap().geometry(next.as_bytes()).unwrap_err();
    assert!(
        refusal.contains("kernel next_token on CUDA") && refusal.contains("logits"),
        "{refusal}"
    );
}

#[test]
fn clusters_take_a_few_long_rows() {
    let next = tensor_kernel("next_token_cluster");
    let p = NextTokenParams { rows: 3, n: 16_384, ..Default::default() };
    let grid = Grid::new([24, 1, 1]).threads([512, 1, 1]);
    assert!(next.takes(p.as_bytes()));
    assert_eq!(next.geometry(p.as_bytes()), Ok(grid));
    for other in [NextTokenParams { n: 16_383, ..p }, NextTokenParams { rows: 17, ..p }] {
        assert!(!next.takes(other.as_bytes()), "{other:?}");
    }
    let refusal = next.geometry(NextTokenParams { n: u32::MAX, ..p }.as_bytes()).unwrap_err();
    assert!(refusal.contains("kernel next_token_cluster on CUDA"), "{refusal}");
    let argmax = tensor_kernel("argmax_cluster");
    let p = RowParams { rows: 3, n: 16_384, ..Default::default() };
    assert!(argmax.takes(p.as_bytes()));
    assert_eq!(argmax.geometry(p.as_bytes()), Ok(grid));
    assert!(!argmax.takes(RowParams { n: 16_383, ..p }.as_bytes()));
}

#[test]
fn boxes_have_the_sources_numbers() {
    let ring = |bytes: u32| format!("{} << 10", (bytes >> 10) - 1);
    let [whole, half] = BOX_SHARED;
    for (name, value) in [
        ("BOX", BOX.to_string()),
        ("WARPS", (BOX_WARPS - 1).to_string()),
        ("PROCESSORS", BOX_PROCESSORS.to_string()),
        ("MANY", BOX_MANY.to_string()),
        ("RING", ring(whole)),
        ("HALF_RING", ring(half)),
    ] {
        let line = format!("constexpr u32 {name} = {value};");
        assert!(LINEAR_BOXES.source.contains(&line), "{line}");
    }
}
