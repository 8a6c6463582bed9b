//! Halves, bfloat16 and floats of 8 bits in CUDA C++, and products of matrices by a warp, against
//! results of the host.

use half::{bf16, f16};
use leasehold_emulator::{Cuda, Emulator, Launch, Operand, Program, Source};

/// Compiles a watched source for the newest devices. `None` without the compiler.
fn compile(text: &str) -> Option<Emulator> {
    let options = ["-D__CUDA_ARCH__=900".to_owned()];
    let source = Source { name: "k.cu", text };
    match Program::cuda(&Cuda { source, options: &options, watched: true }) {
        Ok(program) => Some(Emulator::new(program)),
        Err(why) if why.is_skip() => {
            eprintln!("skipped: {why}");
            None
        }
        Err(why) => panic!("{why}"),
    }
}

fn operand<T>(list: &mut [T]) -> Operand {
    let at = list.as_mut_ptr().expose_provenance() as u64;
    Operand { at, device: at, bytes: size_of_val(list) as u64, reads: true, writes: true }
}

fn run(emulator: &Emulator, kernel: &str, blocks: u32, threads: u32, operands: &[Operand]) {
    let (grid, block) = ([blocks, 1, 1], [threads, 1, 1]);
    let launch = Launch {
        kernel,
        operands,
        params: &[],
        grid,
        block,
        shared: 0,
        cluster: [1; 3],
        cooperative: false,
        reverse: false,
    };
    // SAFETY: the operands are live lists of the test, and the emulator refuses other accesses.
    unsafe { emulator.run(&launch) }.unwrap();
}

/// Bits that are no pattern.
fn bits(n: u32) -> u32 {
    let x = (n ^ n >> 16).wrapping_mul(0x7feb_352d);
    let x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
    x ^ x >> 16
}

const CONVERSIONS: &str = r#"
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#define ALL(NAME, T, BITS)                                                                     \
    extern "C" __global__ void NAME##_floats(const T* x, float* y) {                           \
        unsigned i = blockIdx.x * blockDim.x + threadIdx.x;                                    \
        y[i] = (float)x[i];                                                                    \
    }                                                                                          \
    extern "C" __global__ void NAME##_of(const float* x, const double* d, const int* n, T* y) { \
        unsigned i = blockIdx.x * blockDim.x + threadIdx.x;                                    \
        y[3 * i] = (T)x[i], y[3 * i + 1] = (T)d[i], y[3 * i + 2] = (T)n[i];                    \
    }
ALL(half, half, unsigned short)
ALL(bf16, nv_bfloat16, unsigned short)
ALL(e4m3, __nv_fp8_e4m3, unsigned char)
ALL(e5m2, __nv_fp8_e5m2, unsigned char)
extern "C" __global__ void integers(const half* x, int* i, unsigned char* u, bool* b) {
    unsigned n = threadIdx.x;
    i[n] = (int)x[n], u[n] = (unsigned char)x[n], b[n] = (bool)x[n];
}
"#;

/// Runs `NAME_of` on floats, doubles and integers. Returns the three results of each.
fn rounded<T: Copy + Default>(emulator: &Emulator, name: &str, x: &[f32]) -> Vec<[T; 3]> {
    let mut x = x.to_vec();
    // Beside the float by less than its last bit.
    let mut d: Vec<f64> = x.iter().map(|&v| f64::from(v) * (1.0 + 1e-12)).collect();
    let mut n: Vec<i32> = (0..x.len() as i32).map(|i| (i - 2048) * 37).collect();
    let mut y = vec![[T::default(); 3]; x.len()];
    let operands = [operand(&mut x), operand(&mut d), operand(&mut n), operand(&mut y)];
    run(emulator, &format!("{name}_of"), x.len() as u32 / 256, 256, &operands);
    y
}

/// Floats of all exponents, and those between two neighbours of a short type.
fn floats(neighbours: impl Fn(u16) -> f32) -> Vec<f32> {
    (0..4096_u32)
        .map(|n| {
            let word = bits(n) as u16;
            let v = neighbours(word);
            match n % 4 {
                0 => f32::from_bits(bits(n + 7777)),
                1 => (v + neighbours(word.wrapping_add(1))) / 2.0,
                _ => v,
            }
        })
        .map(|v| if v.is_nan() { 0.1 } else { v })
        .collect()
}

/// The nearest of a short type; of two the even one. A library's own rounds to `f32` first.
fn nearest(v: f64, guess: u16, of: fn(u16) -> f32) -> u16 {
    if of(guess).is_infinite() {
        return guess;
    }
    let away = |w: u16| (f64::from(of(w)) - v).abs();
    let near = [guess, guess.wrapping_sub(1), guess.wrapping_add(1)];
    let near = near.into_iter().filter(|&w| of(w).is_sign_negative() == v.is_sign_negative());
    near.min_by(|&a, &b| away(a).total_cmp(&away(b)).then((a & 1).cmp(&(b & 1)))).unwrap()
}

#[test]
fn conversions_of_halves_and_bfloat16() {
    let Some(emulator) = compile(CONVERSIONS) else { return };
    let mut words: Vec<u16> = (0..=u16::MAX).collect();
    let mut y = vec![0.0_f32; words.len()];
    for (name, of) in [
        ("half", (|w| f16::from_bits(w).to_f32()) as fn(u16) -> f32),
        ("bf16", |w| bf16::from_bits(w).to_f32()),
    ] {
        let operands = [operand(&mut words), operand(&mut y)];
        run(&emulator, &format!("{name}_floats"), 256, 256, &operands);
        for (word, y) in words.iter().zip(&y) {
            let want = of(*word);
            assert!(
                want.to_bits() == y.to_bits() || (want.is_nan() && y.is_nan()),
                "{name} {word:#x}"
            );
        }
    }
    for (name, to, of) in [
        (
            "half",
            (|v| f16::from_f64(v).to_bits()) as fn(f64) -> u16,
            (|w| f16::from_bits(w).to_f32()) as fn(u16) -> f32,
        ),
        ("bf16", |v| bf16::from_f64(v).to_bits(), |w| bf16::from_bits(w).to_f32()),
    ] {
        let x = floats(of);
        for (i, (got, x)) in rounded::<u16>(&emulator, name, &x).iter().zip(&x).enumerate() {
            let x = f64::from(*x);
            let want = [x, x * (1.0 + 1e-12), f64::from((i as i32 - 2048) * 37)];
            let want = want.map(|v| nearest(v, to(v), of));
            assert_eq!(*got, want, "{name} {x:e}");
        }
    }
    let mut x =
        [1.9_f32, -1.9, 65504.0, -0.5, f32::NAN, f32::INFINITY, 300.0, 0.0].map(f16::from_f32);
    let (mut i, mut u, mut b) = ([0_i32; 8], [0_u8; 8], [0_u8; 8]);
    let operands = [operand(&mut x), operand(&mut i), operand(&mut u), operand(&mut b)];
    run(&emulator, "integers", 1, 8, &operands);
    assert_eq!(i, [1, -1, 65504, 0, 0, i32::MAX, 300, 0]);
    assert_eq!((u[0], u[7], b), (1, 0, [1, 1, 1, 1, 1, 1, 1, 0]));
}

/// The value of a float of 8 bits with some bits of a fraction.
fn value(word: u8, fraction: i32) -> f64 {
    let (exponent, rest) =
        (i32::from(word & 0x7f) >> fraction, i32::from(word & 0x7f) & ((1 << fraction) - 1));
    let bias = if fraction == 3 { 7 } else { 15 };
    let magnitude = match (exponent, fraction) {
        _ if word & 0x7f == 0x7f => f64::NAN,
        (31, 2) if rest == 0 => f64::INFINITY,
        (31, 2) => f64::NAN,
        (0, _) => f64::from(rest) * 2_f64.powi(1 - bias - fraction),
        _ => f64::from(rest + (1 << fraction)) * 2_f64.powi(exponent - bias - fraction),
    };
    if word & 0x80 == 0 { magnitude } else { -magnitude }
}

#[test]
fn conversions_of_floats_of_8_bits() {
    let Some(emulator) = compile(CONVERSIONS) else { return };
    for (name, fraction, largest) in [("e4m3", 3, 448.0), ("e5m2", 2, 57344.0)] {
        let mut words: Vec<u8> = (0..=u8::MAX).collect();
        let mut y = vec![0.0_f32; 256];
        let operands = [operand(&mut words), operand(&mut y)];
        run(&emulator, &format!("{name}_floats"), 1, 256, &operands);
        for (word, y) in words.iter().zip(&y) {
            let want = value(*word, fraction);
            assert!(
                want == f64::from(*y) || (want.is_nan() && y.is_nan()),
                "{name} {word:#x}: {y}"
            );
        }
        // The nearest by a search; of two the even one.
        let to = |v: f64| {
            let magnitude = v.abs().min(largest);
            let nearest =
                (0..0x7f_u8).filter(|&w| value(w, fraction) <= largest).min_by(|&a, &b| {
                    let away = |w| (value(w, fraction) - magnitude).abs();
                    away(a).total_cmp(&away(b)).then((a & 1).cmp(&(b & 1)))
                });
            nearest.unwrap() | if v.is_sign_negative() { 0x80 } else { 0 }
        };
        let x = floats(|w| value(w as u8, fraction) as f32);
        for (i, (got, x)) in rounded::<u8>(&emulator, name, &x).iter().zip(&x).enumerate() {
            let x = f64::from(*x);
            let want = [x, x * (1.0 + 1e-12), f64::from((i as i32 - 2048) * 37)].map(to);
            assert_eq!(*got, want, "{name} {x:e}");
        }
    }
}

const ARITHMETIC: &str = r#"
#include <cuda_bf16.h>
template <class T> __device__ void all(const T* x, T* y) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    T a = x[2 * i], b = x[2 * i + 1];
    y[8 * i] = a + b, y[8 * i + 1] = a - b, y[8 * i + 2] = a * b, y[8 * i + 3] = a / b;
    y[8 * i + 4] = -a, y[8 * i + 5] = a < b ? a : b, y[8 * i + 6] = __hadd(a, b) == a + b ? hsqrt(__habs(a)) : a;
    y[8 * i + 7] = htrunc(b);
}
extern "C" __global__ void halves(const __half* x, __half* y) { all(x, y); }
extern "C" __global__ void bfloats(const __nv_bfloat16* x, __nv_bfloat16* y) { all(x, y); }
extern "C" __global__ void pairs(half2* x, float2* y) {
    half2 v = __hfma2(x[threadIdx.x], __float2half2_rn(2.0f), __floats2half2_rn(1.0f, -1.0f));
    y[threadIdx.x] = __half22float2(__shfl_xor_sync(~0u, v, 1));
    atomicAdd(&x[32], make_half2((half)1.0f, __ushort_as_half(0x4000)));
}
"#;

#[test]
fn arithmetic_of_halves_and_bfloat16() {
    let Some(emulator) = compile(ARITHMETIC) else { return };
    for (kernel, of, to) in [
        (
            "halves",
            (|w| f16::from_bits(w).to_f32()) as fn(u16) -> f32,
            (|v| f16::from_f32(v).to_bits()) as fn(f32) -> u16,
        ),
        ("bfloats", |w| bf16::from_bits(w).to_f32(), |v| bf16::from_f32(v).to_bits()),
    ] {
        let mut x: Vec<u16> = (0..4096).map(|n| bits(n) as u16).collect();
        let mut y = vec![[0_u16; 8]; 2048];
        run(&emulator, kernel, 16, 128, &[operand(&mut x), operand(&mut y)]);
        for (x, y) in x.chunks(2).zip(&y) {
            let (a, b) = (of(x[0]), of(x[1]));
            let least = if a < b { a } else { b };
            let root = if (a + b).is_nan() { a } else { a.abs().sqrt() };
            let want = [a + b, a - b, a * b, a / b, -a, least, root, b.trunc()];
            for (got, want) in y.iter().zip(want) {
                let same = *got == to(want) || (want.is_nan() && of(*got).is_nan());
                assert!(same, "{kernel} {a} {b}: {} {want}", of(*got));
            }
        }
    }
    let mut x: Vec<[f16; 2]> =
        (0..33).map(|n| [n as f32, -0.5 * n as f32].map(|v| f16::from_f32(v % 32.0))).collect();
    x[32] = [f16::ZERO; 2];
    let mut y = vec![[0.0_f32; 2]; 32];
    run(&emulator, "pairs", 1, 32, &[operand(&mut x), operand(&mut y)]);
    for (n, y) in y.iter().enumerate() {
        let other = (n ^ 1) as f32;
        assert_eq!(*y, [2.0 * other + 1.0, -other - 1.0]);
    }
    assert_eq!(x[32], [32.0, 64.0].map(f16::from_f32));
}

/// A product with the fragments of the instruction's description: element `i` of a lane.
const PRODUCT: &str = r#"
#include <cuda_bf16.h>
#include <cuda_fp8.h>
template <class T> __device__ unsigned pack(const T* from, unsigned stride) {
    union { T part[4 / sizeof(T)]; unsigned word; } all;
    for (unsigned i = 0; i < 4 / sizeof(T); ++i) all.part[i] = from[i * stride];
    return all.word;
}
#define PRODUCT(NAME, T, TYPE, K, SUM)                                                                  \
    extern "C" __global__ void NAME(const T* a, const T* b, SUM* c) {                                   \
        const unsigned row = threadIdx.x / 4, part = threadIdx.x % 4, each = 4 / sizeof(T);             \
        unsigned x[4], y[2];                                                                            \
        for (unsigned w = 0; w < K / (2 * each); ++w)                                                   \
            x[w] = pack(a + (row + w % 2 * 8) * K + part * each + w / 2 * 4 * each, 1);                 \
        for (unsigned w = 0; w < K / (4 * each); ++w)                                                   \
            y[w] = pack(b + (part * each + w * 4 * each) * 8 + row, 8);                                 \
        NAME##_sum(x, y, c + row * 8 + part * 2);                                                       \
    }
#define LONG "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#define SHORT "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
#define FLOATS(NAME, T, TYPE, K)                                                                        \
    __device__ void NAME##_sum(const unsigned* x, const unsigned* y, float* c) {                        \
        float d[4] = {c[0], c[1], c[64], c[65]};                                                        \
        if (K * sizeof(T) == 32)                                                                        \
            asm volatile("mma.sync.aligned.m16n8k" #K ".row.col.f32." TYPE "." TYPE ".f32 " LONG        \
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                        \
                : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));                    \
        c[0] = d[0], c[1] = d[1], c[64] = d[2], c[65] = d[3];                                           \
    }                                                                                                   \
    PRODUCT(NAME, T, TYPE, K, float)
FLOATS(halves, half, "f16", 16)
FLOATS(bfloats, nv_bfloat16, "bf16", 16)
FLOATS(tf32, float, "tf32", 8)
FLOATS(e4m3, __nv_fp8_e4m3, "e4m3", 32)
FLOATS(e5m2, __nv_fp8_e5m2, "e5m2", 32)
__device__ void shallow_sum(const unsigned* x, const unsigned* y, float* c) {
    float d[4] = {c[0], c[1], c[64], c[65]};
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32" SHORT : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(x[0]), "r"(x[1]), "r"(y[0]));
    c[0] = d[0], c[1] = d[1], c[64] = d[2], c[65] = d[3];
}
PRODUCT(shallow, half, "f16", 8, float)
__device__ void narrow_sum(const unsigned* x, const unsigned* y, half* c) {
    int d[2] = {(int)pack(c, 1), (int)pack(c + 64, 1)};
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16\n\t{%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
        : "+r"(d[0]), "+r"(d[1]) : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
    memcpy(c, d, 4), memcpy(c + 64, d + 1, 4);
}
PRODUCT(narrow, half, "f16", 16, half)
"#;

/// Runs a product of whole numbers, whose sums are exact.
fn product<T: Copy, S: Copy>(
    emulator: &Emulator,
    kernel: &str,
    depth: usize,
    to: impl Fn(f32) -> T,
    sum: (impl Fn(f32) -> S, impl Fn(S) -> f32),
) {
    let number = |n: usize| (bits(n as u32) % 7) as f32 - 3.0;
    let a: Vec<f32> = (0..16 * depth).map(number).collect();
    let b: Vec<f32> = (0..8 * depth).map(|n| number(n + 1000)).collect();
    let c: Vec<f32> = (0..128).map(|n| number(n + 2000)).collect();
    let mut short_a: Vec<T> = a.iter().map(|&v| to(v)).collect();
    let mut short_b: Vec<T> = b.iter().map(|&v| to(v)).collect();
    let mut d: Vec<S> = c.iter().map(|&v| sum.0(v)).collect();
    run(emulator, kernel, 1, 32, &[operand(&mut short_a), operand(&mut short_b), operand(&mut d)]);
    for (n, d) in d.iter().enumerate() {
        let (row, column) = (n / 8, n % 8);
        let want: f32 = (0..depth).map(|k| a[row * depth + k] * b[k * 8 + column]).sum();
        assert_eq!(sum.1(*d), want + c[n], "{kernel}: row {row}, column {column}");
    }
}

#[test]
fn products_of_a_warp() {
    let Some(emulator) = compile(PRODUCT) else { return };
    let float = || (|v: f32| v, |v: f32| v);
    product(&emulator, "halves", 16, f16::from_f32, float());
    product(&emulator, "bfloats", 16, bf16::from_f32, float());
    // The last bits of a factor mean nothing.
    product(&emulator, "tf32", 8, |v| f32::from_bits(v.to_bits() | 0x1fff), float());
    let short = |fraction| {
        move |v: f32| (0..=u8::MAX).find(|&w| value(w, fraction) == f64::from(v)).unwrap()
    };
    product(&emulator, "e4m3", 32, short(3), float());
    product(&emulator, "e5m2", 32, short(2), float());
    product(&emulator, "shallow", 8, f16::from_f32, float());
    product(&emulator, "narrow", 16, f16::from_f32, (f16::from_f32, f16::to_f32));
}

#[test]
fn a_product_that_some_lanes_do_not_reach_is_told() {
    let Some(emulator) = compile(PRODUCT) else { return };
    let (mut a, mut b, mut c) = ([f16::ZERO; 256], [f16::ZERO; 128], [0.0_f32; 128]);
    let operands = [operand(&mut a), operand(&mut b), operand(&mut c)];
    let (grid, block) = ([1; 3], [24, 1, 1]);
    let launch = Launch {
        kernel: "halves",
        operands: &operands,
        params: &[],
        grid,
        block,
        shared: 0,
        cluster: [1; 3],
        cooperative: false,
        reverse: false,
    };
    // SAFETY: the operands are live lists of the test, and the emulator refuses other accesses.
    let why = unsafe { emulator.run(&launch) }.unwrap_err();
    assert!(why.contains("(mma.sync) that not all of its 32 threads reach"), "{why}");
}
