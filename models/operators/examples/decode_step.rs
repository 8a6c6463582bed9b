//! Measures the kernels of one decode step of a small Llama model, called directly on one thread:
//! no runtime, no pool, no queue.
//!
//! ```text
//! cargo run --release -p leasehold-operators --example decode_step -- \
//!     [--weights bf16|f16|f32] [--isa NAME] [--position N]
//! ```
//! The shape is that of the bundled model: 6 layers, width 256, 8 heads over 4, inner width 688,
//! 4,096 tokens.

use std::time::Instant;

use half::{bf16, f16};
use leasehold::kernel::{Binding, CpuArgs, CpuFn};
use leasehold_operators::kernels::cpu::attention::AttentionParams;
use leasehold_operators::kernels::cpu::cache::CacheLayout;
use leasehold_operators::kernels::cpu::elem::DType;
use leasehold_operators::kernels::cpu::embedding::EmbeddingParams;
use leasehold_operators::kernels::cpu::isa::Isa;
use leasehold_operators::kernels::cpu::linear::{LinearParams, NORM};
use leasehold_operators::kernels::cpu::rope;
use leasehold_operators::kernels::cpu::sampling::{NextTokenParams, SamplingRecord};
use leasehold_operators::kernels::cpu::tile::{KernelSpec, NONE, Params, bind, bind_read};

const LAYERS: usize = 6;
const WIDTH: usize = 256;
const HEADS: usize = 8;
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 32;
const INNER: usize = 688;
const VOCABULARY: usize = 4096;
const POSITIONS: usize = 1024;

/// A prepared launch, as in a recorded graph.
struct Step {
    name: &'static str,
    tile: CpuFn,
    grid: [u32; 3],
    params: Vec<u8>,
    bindings: Vec<Binding>,
}

impl Step {
    fn new(name: &'static str, isa: Isa, params: &impl Params, bindings: &[Binding]) -> Self {
        let spec = KernelSpec::find(name).expect("a kernel of that name");
        let launch = spec.plan(params.as_bytes()).expect("parameters that the kernel takes");
        spec.check(&launch, bindings).expect("operands that the kernel takes");
        let (_, tile) = spec.resolve(Some(isa)).expect("a level that this machine runs");
        Self {
            name,
            tile,
            grid: launch.grid,
            params: params.as_bytes().to_vec(),
            bindings: bindings.to_vec(),
        }
    }

    fn run(&self) {
        for x in 0..self.grid[0] {
            let (shape, no_scratch) = ((self.grid, [1; 3]), (std::ptr::null_mut(), 0));
            // SAFETY: the buffers outlive the steps, and no other code uses them.
            let mut tile = unsafe { CpuArgs::new(shape, &self.bindings, &self.params, no_scratch) };
            tile.set_tile([x, 0, 0]);
            // SAFETY: `new` has checked the launch.
            unsafe { (self.tile)(&tile) }
        }
    }
}

/// Deterministic numbers around zero.
fn noise(n: usize, scale: f32, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..n).map(|_| next() * scale).collect()
}

/// All weights in one allocation, as in a mapped file.
struct Weights {
    bytes: Vec<u8>,
    dtype: DType,
    used: usize,
}

impl Weights {
    fn push(&mut self, values: &[f32]) -> Binding {
        let at = self.used;
        for &v in values {
            let size = self.dtype.bytes();
            let to = &mut self.bytes[self.used..self.used + size];
            match self.dtype {
                DType::F32 => to.copy_from_slice(&v.to_le_bytes()),
                DType::Bf16 => to.copy_from_slice(&bf16::from_f32(v).to_le_bytes()),
                DType::F16 => to.copy_from_slice(&f16::from_f32(v).to_le_bytes()),
            }
            self.used += size;
        }
        bind_read(&self.bytes[at..self.used])
    }
}

fn argument(name: &str) -> Option<String> {
    let mut arguments = std::env::args().skip_while(|a| a != name);
    arguments.next().and_then(|_| arguments.next())
}

fn main() {
    let dtype = match argument("--weights").as_deref() {
        Some("f32") => DType::F32,
        Some("f16") => DType::F16,
        _ => DType::Bf16,
    };
    let isa =
        argument("--isa").map_or(Isa::best(), |name| name.parse().expect("the name of a level"));
    let position: usize = argument("--position").map_or(250, |p| p.parse().expect("a position"));
    let per_layer =
        2 * WIDTH * WIDTH + 2 * WIDTH * KV_HEADS * HEAD_DIM + 3 * WIDTH * INNER + 2 * WIDTH;
    let elements = LAYERS * per_layer + VOCABULARY * WIDTH + WIDTH;
    let mut weights = Weights { bytes: vec![0; elements * dtype.bytes() + 64], dtype, used: 0 };
    weights.used = weights.bytes.as_ptr().align_offset(64);

    let table = rope::table(
        &(0..HEAD_DIM / 2)
            .map(|i| 1e4_f64.powf(-2.0 * i as f64 / HEAD_DIM as f64))
            .collect::<Vec<_>>(),
        POSITIONS,
    );
    let kv = KV_HEADS * HEAD_DIM;
    let cache_len = KV_HEADS * POSITIONS * HEAD_DIM;
    let mut caches: Vec<Vec<f32>> =
        (0..2 * LAYERS).map(|i| noise(cache_len, 1.0, i as u32)).collect();
    let (mut h, mut q, mut k, mut v) =
        (vec![0f32; WIDTH], vec![0f32; WIDTH], vec![0f32; kv], vec![0f32; kv]);
    let (mut a, mut inner, mut logits) =
        (vec![0f32; WIDTH], vec![0f32; INNER], vec![0f32; VOCABULARY]);
    let (mut token, mut at, mut ring, mut count) = ([1i32], [0i32], vec![0i32; 64], [0u32]);
    let [h, q, k, v, a, inner, logits] =
        [&mut h, &mut q, &mut k, &mut v, &mut a, &mut inner, &mut logits].map(|b| bind(b));
    let (table, token_b, at_b, ring, count) =
        (bind_read(&table), bind(&mut token), bind(&mut at), bind(&mut ring), bind(&mut count));

    let none = NONE;
    let w = dtype as u32;
    let linear = LinearParams {
        m: 1,
        k: WIDTH as u32,
        ldx: WIDTH as u32,
        eps: 1e-5,
        w,
        vector: w,
        ..Default::default()
    };
    let embedding = weights.push(&noise(VOCABULARY * WIDTH, 0.2, 99));
    let mut steps = vec![Step::new(
        "embedding",
        isa,
        &EmbeddingParams {
            m: 1,
            vocabulary: VOCABULARY as u32,
            k: WIDTH as u32,
            ldy: WIDTH as u32,
            table: w,
            y: 0,
        },
        &[token_b, embedding, h],
    )];
    // The context has one part on the CPU, which takes no scratch memory.
    let scratch = none;
    for layer in 0..LAYERS {
        let mut matrix = |n: usize, k: usize| weights.push(&noise(n * k, 0.2, layer as u32));
        let (wq, wk, wv, wo) =
            (matrix(WIDTH, WIDTH), matrix(kv, WIDTH), matrix(kv, WIDTH), matrix(WIDTH, WIDTH));
        let (gate, up, down) = (matrix(INNER, WIDTH), matrix(INNER, WIDTH), matrix(WIDTH, INNER));
        let (norm1, norm2) = (matrix(1, WIDTH), matrix(1, WIDTH));
        let [keys, values] = [0, 1].map(|i| bind(&mut caches[2 * layer + i]));
        let heads = [WIDTH as u32, kv as u32, kv as u32];
        steps.push(Step::new(
            "linear3",
            isa,
            &LinearParams { n: heads, ldy: heads, flags: NORM, ..linear },
            &[h, norm1, wq, none, q, wk, none, k, wv, none, v],
        ));
        let attention = AttentionParams {
            m: 1,
            heads: HEADS as u32,
            kv_heads: KV_HEADS as u32,
            head_dim: HEAD_DIM as u32,
            positions: POSITIONS as u32,
            ldq: WIDTH as u32,
            ldo: WIDTH as u32,
            scale: (HEAD_DIM as f32).sqrt().recip(),
            rotary: HEAD_DIM as u32,
            layout: CacheLayout::contiguous(KV_HEADS as u32, POSITIONS as u32),
            ..Default::default()
        };
        steps.push(Step::new(
            "decode_attention",
            isa,
            &attention,
            &[q, k, v, table, keys, values, at_b, a, scratch, none],
        ));
        let back = LinearParams { n: [WIDTH as u32, 0, 0], ldy: [WIDTH as u32, 0, 0], ..linear };
        steps.push(Step::new("linear_add", isa, &back, &[a, none, wo, none, h]));
        let wide = [INNER as u32, 0, 0];
        let gated = LinearParams { n: wide, ldy: wide, flags: NORM, ..linear };
        steps.push(Step::new(
            "linear_gated",
            isa,
            &gated,
            &[h, norm2, gate, none, up, none, inner],
        ));
        let down_params = LinearParams { k: INNER as u32, ldx: INNER as u32, ..back };
        steps.push(Step::new("linear_add", isa, &down_params, &[inner, none, down, none, h]));
    }
    let norm = weights.push(&noise(WIDTH, 1.0, 7));
    let head = [VOCABULARY as u32, 0, 0];
    let head = LinearParams { n: head, ldy: head, flags: NORM, ..linear };
    steps.push(Step::new("linear", isa, &head, &[h, norm, embedding, none, logits]));
    let n = VOCABULARY as u32;
    let next = NextTokenParams { rows: 1, n, ld: n, ring: 64, log_ring: 0 };
    // Zeros are a greedy choice.
    let greedy = [SamplingRecord::default()];
    let operands = [logits, bind_read(&greedy), token_b, at_b, ring, count, none];
    steps.push(Step::new("next_token", isa, &next, &operands));

    // The position is reset after each token, so that the step does equal work each time.
    let reset = |at_b: Binding| {
        let at = std::ptr::with_exposed_provenance_mut::<i32>(at_b.addr as usize);
        // SAFETY: this is the word of `at`, which lives to the end of `main`.
        unsafe { at.write(position as i32) }
    };
    let mut whole = Vec::new();
    for _ in 0..1000 {
        reset(at_b);
        let start = Instant::now();
        steps.iter().for_each(Step::run);
        whole.push(start.elapsed().as_nanos() as f64 / 1e3);
    }
    let mut parts: Vec<(&str, Vec<f64>)> = Vec::new();
    for _ in 0..300 {
        reset(at_b);
        let mut sums: Vec<(&str, f64)> = Vec::new();
        for step in &steps {
            let start = Instant::now();
            step.run();
            let spent = start.elapsed().as_nanos() as f64 / 1e3;
            match sums.iter_mut().find(|(name, _)| *name == step.name) {
                Some((_, sum)) => *sum += spent,
                None => sums.push((step.name, spent)),
            }
        }
        for (name, sum) in sums {
            match parts.iter_mut().find(|(n, _)| *n == name) {
                Some((_, all)) => all.push(sum),
                None => parts.push((name, vec![sum])),
            }
        }
    }
    let median = |v: &mut Vec<f64>| {
        v.sort_by(f64::total_cmp);
        v[v.len() / 2]
    };
    let mebibytes = weights.used as f64 / 1e6;
    let fastest = whole.iter().copied().fold(f64::INFINITY, f64::min);
    let step = median(&mut whole);
    println!(
        "{{\"isa\": \"{isa}\", \"weights\": \"{}\", \"position\": {position}, \"step_us_p50\": {step:.1}, \"step_us_min\": {fastest:.1}, \"weights_mb\": {mebibytes:.2}, \"gb_per_s\": {:.1}, \"kernels_us\": {{{}}}}}",
        dtype.name(),
        mebibytes * 1e3 / step,
        parts
            .iter_mut()
            .map(|(n, v)| format!("\"{n}\": {:.1}", median(v)))
            .collect::<Vec<_>>()
            .join(", ")
    );
}
