//! The roof under a decode benchmark: how many bytes a second this machine's memory gives.
//!
//! Decoding one token reads every weight once, so its tokens per second times the weights' bytes
//! can be held against these two loops, which run over blocks far larger than any cache on the
//! given number of threads:
//!
//! - `read_gb_per_s`: a sum over 64-bit words, bytes read;
//! - `copy_gb_per_s`: a copy, bytes read plus bytes written (the write's own fetch of the line, if
//!   any, is not counted).
//!
//! A prompt is bound by products instead. `fma_gflop_per_s` is the rate of a loop of fused products
//! and sums in registers alone, on vectors of 256 bits: what processors with AVX2 can do at most;
//! `null` without AVX2 and FMA.
//!
//! Each is the median of nine passes, in GB (10^9 bytes) or 10^9 products and sums per second.
//! Prints one JSON object.

use std::error::Error;
use std::hint::black_box;
use std::thread;
use std::time::Instant;

const USAGE: &str = "usage: leasehold-peer-memory [--threads 1] [--mib 512]";
const PASSES: usize = 9;

fn main() -> Result<(), Box<dyn Error>> {
    let (mut threads, mut mib) = (1_usize, 512_usize);
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or_else(|| format!("{flag} needs a value\n{USAGE}"))?.parse()?;
        match flag.as_str() {
            "--threads" => threads = value,
            "--mib" => mib = value,
            _ => return Err(format!("unknown option {flag}\n{USAGE}").into()),
        }
    }
    if !(1..=1024).contains(&threads) || !(1..=1 << 20).contains(&mib) {
        return Err(USAGE.into());
    }
    let words = mib * (1 << 20) / size_of::<u64>();
    let source: Vec<u64> = (0..words as u64).collect();
    let mut target = vec![1_u64; words];
    let part = words.div_ceil(threads);

    let read = rate(words * 8, || {
        thread::scope(|scope| {
            for block in source.chunks(part) {
                scope.spawn(move || black_box(block.iter().fold(0_u64, |sum, word| sum.wrapping_add(*word))));
            }
        });
    });
    let copy = rate(words * 16, || {
        thread::scope(|scope| {
            for (to, from) in target.chunks_mut(part).zip(source.chunks(part)) {
                scope.spawn(move || black_box(to).copy_from_slice(black_box(from)));
            }
        });
    });
    let fma = fma(threads).map_or_else(|| "null".to_owned(), |rate| format!("{rate:.1}"));
    println!(
        r#"{{"peer":"memory","threads":{threads},"mib":{mib},"read_gb_per_s":{read:.2},"copy_gb_per_s":{copy:.2},"fma_gflop_per_s":{fma}}}"#
    );
    Ok(())
}

#[cfg(target_arch = "x86_64")]
fn fma(threads: usize) -> Option<f64> {
    use std::arch::x86_64::{
        __m256, _mm256_add_ps, _mm256_cvtss_f32, _mm256_fmadd_ps, _mm256_set1_ps,
    };
    const STEPS: usize = 1 << 23;
    /// Enough chains to hide the latency on two units.
    const CHAINS: usize = 12;

    #[target_feature(enable = "avx2,fma")]
    fn chains(factor: f32) -> f32 {
        let (x, y) = (_mm256_set1_ps(factor), _mm256_set1_ps(1.0 - factor));
        let mut sums: [__m256; CHAINS] = [y; CHAINS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, x, y);
            }
        }
        let mut all = sums[0];
        for sum in sums {
            all = _mm256_add_ps(all, sum);
        }
        _mm256_cvtss_f32(all)
    }

    if !(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")) {
        return None;
    }
    Some(rate(threads * STEPS * CHAINS * 16, || {
        thread::scope(|scope| {
            for _ in 0..threads {
                // SAFETY: the processor has the features.
                scope.spawn(|| black_box(unsafe { chains(black_box(0.999)) }));
            }
        });
    }))
}

#[cfg(not(target_arch = "x86_64"))]
fn fma(_: usize) -> Option<f64> {
    None
}

/// The median rate of a pass over so much, in 10^9 per second, after one pass that is not counted.
fn rate(much: usize, mut pass: impl FnMut()) -> f64 {
    pass();
    let mut seconds: Vec<f64> = (0..PASSES)
        .map(|_| {
            let start = Instant::now();
            pass();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    much as f64 / seconds[PASSES / 2] / 1e9
}
