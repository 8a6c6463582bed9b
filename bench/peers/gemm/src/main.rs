//! Times the matrix product on one thread: few rows beside the machine's memory, many rows beside
//! the `gemm` crate.
//!
//! ```text
//! cargo run --release --manifest-path bench/peers/gemm/Cargo.toml -- [--isa NAME]
//! ```
//! A line of JSON for each shape. `copy_gb_per_s` is a copy of the same bytes, reads and
//! writes counted; `gemm_gflop_per_s` is `gemm` 0.19 without
//! threads over f32 weights (it has no bf16). The three are run in turns; each figure is a median.

use std::time::Instant;

use half::bf16;
use leasehold_operators::kernels::cpu::elem::DType;
use leasehold_operators::kernels::cpu::isa::Isa;
use leasehold_operators::kernels::cpu::linear::LinearParams;
use leasehold_operators::kernels::cpu::tile::{KernelSpec, NONE, Params, bind, bind_read};

fn seconds(f: &mut dyn FnMut()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

fn main() {
    let isa = std::env::args().skip_while(|a| a != "--isa").nth(1);
    let isa = isa.map_or(Isa::best(), |name| name.parse().expect("the name of a level"));
    let linear = KernelSpec::find("linear").expect("the product");
    let shapes = [(256, 256), (256, 688), (688, 256), (2048, 2048), (2048, 5632), (5632, 2048), (8192, 8192)];
    for (k, n) in shapes {
        let single: Vec<f32> = (0..n * k).map(|i| ((i * 7919) % 1013) as f32 / 1013.0 - 0.5).collect();
        let narrow: Vec<bf16> = single.iter().map(|&v| bf16::from_f32(v)).collect();
        for m in [1usize, 2, 4, 8, 9, 16, 32, 64, 192, 512] {
            if n * k * m > 1 << 31 {
                continue;
            }
            let x: Vec<f32> = (0..m * k).map(|i| ((i * 31) % 97) as f32 / 97.0).collect();
            let (mut y, mut z) = (vec![0f32; m * n], vec![0f32; m * n]);
            let flops = 2.0 * (m * n * k) as f64;
            let runs = ((2e9 / flops) as usize).clamp(3, 400);
            let mut times: [Vec<f64>; 4] = Default::default();
            let p = LinearParams {
                m: m as u32,
                k: k as u32,
                n: [n as u32, 0, 0],
                ldx: k as u32,
                ldy: [n as u32, 0, 0],
                ..Default::default()
            };
            let p16 = LinearParams { w: DType::Bf16 as u32, ..p };
            let y_b = bind(&mut y);
            // SAFETY: the slices live to the end of the loop, and only this thread uses them.
            let run = |p: &LinearParams, w| unsafe {
                linear.run(Some(isa), p.as_bytes(), &[bind_read(&x), NONE, w, NONE, y_b]).expect("a launch");
            };
            // SAFETY: the view covers the same bytes.
            let bytes = unsafe { std::slice::from_raw_parts(narrow.as_ptr().cast::<u8>(), 2 * n * k) };
            let mut copy = vec![0u8; bytes.len()];
            for _ in 0..runs {
                times[0].push(seconds(&mut || run(&p16, bind_read(&narrow))));
                times[1].push(seconds(&mut || run(&p, bind_read(&single))));
                times[2].push(seconds(&mut || copy.copy_from_slice(std::hint::black_box(bytes))));
                std::hint::black_box(&mut copy);
                // SAFETY: z is m by n, the operands m by k and n by k, with the strides given.
                times[3].push(seconds(&mut || unsafe {
                    gemm::gemm(
                        m,
                        n,
                        k,
                        z.as_mut_ptr(),
                        1,
                        n as isize,
                        false,
                        x.as_ptr(),
                        1,
                        k as isize,
                        single.as_ptr(),
                        k as isize,
                        1,
                        0.0f32,
                        1.0f32,
                        false,
                        false,
                        false,
                        gemm::Parallelism::None,
                    );
                }));
            }
            let [narrow_s, single_s, copy_s, gemm_s] = times.map(median);
            println!(
                "{{\"isa\": \"{isa}\", \"m\": {m}, \"k\": {k}, \"n\": {n}, \"bf16_us\": {:.1}, \"f32_us\": {:.1}, \"gemm_us\": {:.1}, \
                 \"bf16_gb_per_s\": {:.1}, \"copy_gb_per_s\": {:.1}, \"bf16_gflop_per_s\": {:.1}, \"f32_gflop_per_s\": {:.1}, \
                 \"gemm_gflop_per_s\": {:.1}}}",
                narrow_s * 1e6,
                single_s * 1e6,
                gemm_s * 1e6,
                2.0 * (n * k) as f64 / narrow_s / 1e9,
                4.0 * (n * k) as f64 / copy_s / 1e9,
                flops / narrow_s / 1e9,
                flops / single_s / 1e9,
                flops / gemm_s / 1e9
            );
        }
    }
}
