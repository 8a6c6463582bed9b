//! Random parameters: those of a valid launch, with one or two words changed.

use leasehold_operators::kernels::cpu::attention::AttentionParams;
use leasehold_operators::kernels::cpu::cache::CacheLayout;
use leasehold_operators::kernels::cpu::check::NotFiniteParams;
use leasehold_operators::kernels::cpu::elementwise::{CopyParams, ElementwiseParams, FillParams};
use leasehold_operators::kernels::cpu::embedding::EmbeddingParams;
use leasehold_operators::kernels::cpu::linear::{BIAS, FEW, LinearParams, NORM};
use leasehold_operators::kernels::cpu::norm::NormParams;
use leasehold_operators::kernels::cpu::rope::RopeParams;
use leasehold_operators::kernels::cpu::sampling::{AdvanceParams, NextTokenParams, RowParams};
use leasehold_operators::kernels::cpu::tile::Params;

/// Random words, equal for equal seeds.
pub struct Words(u64);

impl Words {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 24) as u32
    }

    pub fn below(&mut self, n: u32) -> u32 {
        self.next() % n
    }

    pub fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    fn size(&mut self, most: u32) -> u32 {
        1 + if self.coin() { self.below(most.min(8)) } else { self.below(most) }
    }

    fn pad(&mut self, width: u32) -> u32 {
        width + [0, 0, 1, 4][self.below(4) as usize]
    }

    fn dtype(&mut self) -> u32 {
        self.below(3)
    }

    /// Random bytes, or with equal probability words that are valid positions and ids.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        let small = self.coin();
        for chunk in bytes.chunks_mut(4) {
            let word = if small { self.below(40).wrapping_sub(3) } else { self.next() };
            chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
        }
    }
}

/// Parameters of a kernel, in the form of a launch.
pub fn params(kernel: &str, w: &mut Words) -> Vec<u8> {
    let mut bytes = sensible(kernel, w);
    let changes = [0, 0, 1, 1, 2][w.below(5) as usize];
    for _ in 0..changes {
        let at = w.below(bytes.len() as u32 / 4) as usize * 4;
        let word = u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let new = match w.below(10) {
            0 => 0,
            1 => word.wrapping_add(1),
            2 => word.wrapping_sub(1),
            3 => word.wrapping_mul(2),
            4 => u32::MAX,
            5 => 1 << 31,
            6 => 1 << 16,
            7 => w.next(),
            8 => u32::MAX - w.below(300),
            _ => w.below(64),
        };
        bytes[at..at + 4].copy_from_slice(&new.to_le_bytes());
    }
    bytes
}

/// Contiguous caches, or parts that grow by positions.
fn layout(w: &mut Words, kernel: &str, m: u32, kv_heads: u32, positions: u32) -> CacheLayout {
    if w.coin() || !["rope_append", "attention", "decode_attention"].contains(&kernel) {
        return CacheLayout::contiguous(kv_heads, positions);
    }
    let (layers, next) = (w.size(3), 2 * w.size(2));
    let layer = w.below(layers);
    CacheLayout {
        position: layers * kv_heads,
        head: 1,
        part: layers * kv_heads * positions + w.below(9),
        offset: layer * kv_heads,
        keys: 0,
        values: 1,
        next,
        limits: m * next,
    }
}

fn sensible(kernel: &str, w: &mut Words) -> Vec<u8> {
    match kernel {
        "linear" | "linear_add" | "linear_gated" | "linear3" => {
            let matrices = if kernel == "linear3" { 3 } else { 1 };
            let (m, k) = (w.size(40), w.size(90));
            let n = [0, 1, 2].map(|i| if i < matrices { w.size(70) } else { 0 });
            let norm = if m <= FEW as u32 && w.coin() { NORM } else { 0 };
            let flags = norm | if w.coin() { BIAS } else { 0 };
            let (ldx, ldy) = (w.pad(k), n.map(|n| w.pad(n)));
            let (x, weights, y, vector) = (w.dtype(), w.dtype(), w.dtype(), w.dtype());
            LinearParams { m, k, n, ldx, ldy, eps: 1e-5, x, w: weights, y, vector, flags }
                .as_bytes()
                .to_vec()
        }
        "rms_norm" | "add_rms_norm" => {
            let (rows, k) = (w.size(20), w.size(150));
            let (ldx, ldy, x, weight) = (w.pad(k), w.pad(k), w.dtype(), w.dtype());
            NormParams { rows, k, ldx, ldy, eps: 1e-5, x, weight }.as_bytes().to_vec()
        }
        "rope" | "cache_append" | "rope_append" => {
            let (m, heads, kv_heads, half) = (w.size(10), w.size(6), w.size(4), w.size(20));
            let head_dim = 2 * half;
            let rotary = 2 * w.size(half);
            let first = if kernel == "cache_append" { kv_heads } else { heads };
            let ld =
                [w.pad(first * head_dim), w.pad(kv_heads * head_dim), w.pad(kv_heads * head_dim)];
            let (positions, x, cache) = (w.size(40), w.dtype(), w.dtype());
            RopeParams {
                m,
                heads,
                kv_heads,
                head_dim,
                rotary: rotary.min(head_dim),
                positions,
                ld,
                x,
                cache,
                layout: layout(w, kernel, m.min(1), kv_heads, positions),
            }
            .as_bytes()
            .to_vec()
        }
        "attention" | "decode_attention" => {
            let decode = kernel == "decode_attention";
            let (kv_heads, group, half) = (w.size(4), w.size(5), w.size(20));
            let (heads, head_dim, m) =
                (kv_heads * group, 2 * half, w.size(if decode { 4 } else { 9 }));
            let (ldq, ldo) = (w.pad(heads * head_dim), w.pad(heads * head_dim));
            let (positions, x, cache, rotary) =
                (w.size(300), w.dtype(), w.dtype(), (2 * w.size(half)).min(head_dim));
            let scale = 0.3;
            AttentionParams {
                m,
                heads,
                kv_heads,
                head_dim,
                positions,
                ldq,
                ldo,
                scale,
                x,
                cache,
                rotary,
                layout: layout(w, kernel, if decode { m } else { 1 }, kv_heads, positions),
            }
            .as_bytes()
            .to_vec()
        }
        "embedding" => {
            let (m, vocabulary, k) = (w.size(20), w.size(40), w.size(90));
            let (ldy, table, y) = (w.pad(k), w.dtype(), w.dtype());
            EmbeddingParams { m, vocabulary, k, ldy, table, y }.as_bytes().to_vec()
        }
        "add" | "mul" | "silu_mul" | "cast" => {
            let (rows, k) = (w.size(20), w.size(150));
            let (ld, x, y) = ([w.pad(k), w.pad(k), w.pad(k)], w.dtype(), w.dtype());
            ElementwiseParams { rows, k, ld, x, y }.as_bytes().to_vec()
        }
        "fill" => {
            let width = 1 << w.below(3);
            FillParams { bytes: [w.size(900) * width, 0], width, pattern: w.next() }
                .as_bytes()
                .to_vec()
        }
        "copy_2d" => {
            let (rows, bytes) = (w.size(20), w.size(200));
            CopyParams { rows, bytes, from_pitch: w.pad(bytes), to_pitch: w.pad(bytes) }
                .as_bytes()
                .to_vec()
        }
        "softmax" | "argmax" | "penalise" => {
            let (rows, n) = (w.size(20), w.size(150));
            RowParams { rows, n, ldx: w.pad(n), ldy: w.pad(n), x: w.dtype(), y: w.dtype() }
                .as_bytes()
                .to_vec()
        }
        "not_finite" => {
            let (width, exponent) =
                [(2, 0x7f80), (2, 0x7c00), (4, 0x7f80_0000), (8, 0x7ff0_0000)][w.below(4) as usize];
            let count = [w.size(900), w.size(20_000)][w.below(2) as usize];
            NotFiniteParams::new(count.into(), width, exponent).as_bytes().to_vec()
        }
        "next_token" => {
            let (rows, n, ring, log_ring) = (w.size(5), w.size(400), w.below(9), w.below(4));
            NextTokenParams { rows, n, ld: w.pad(n), ring, log_ring }.as_bytes().to_vec()
        }
        "advance" => {
            let (rows, step, ring) = (w.size(5), w.next(), w.below(9));
            AdvanceParams { rows, step, ring }.as_bytes().to_vec()
        }
        other => panic!("no parameters for kernel {other}"),
    }
}
