//! Inline PTX beside the functions that say the same, and what it is refused for.

use super::cuda::{On, compile, compile_with, operand};

const SOURCE: &str = r#"
extern "C" __global__ void registers(unsigned* x) {
    unsigned tid, block, blocks, threads, lane, warp, below;
    asm("mov.u32 %0, %%tid.x;\n\tmov.u32 %1, %%ctaid.y;\n\tmov.u32 %2, %%nctaid.y;\n\tmov.u32 %3, %%ntid.x;"
        : "=r"(tid), "=r"(block), "=r"(blocks), "=r"(threads));
    asm volatile("mov.u32 %0, %%laneid; mov.u32 %1, %%warpid; mov.u32 %2, %%lanemask_lt;" : "=r"(lane), "=r"(warp), "=r"(below));
    const bool right = tid == threadIdx.x && block == blockIdx.y && blocks == gridDim.y && threads == blockDim.x;
    x[blockIdx.y * blockDim.x + threadIdx.x] = right && lane == threadIdx.x % 32 && warp == threadIdx.x / 32 && below == (1u << lane) - 1;
}
extern "C" __global__ void atoms(unsigned* u, unsigned long long* wide, float* f) {
    __shared__ int in_block;
    if (threadIdx.x == 0) in_block = 100;
    __syncthreads();
    const unsigned at = (unsigned)__cvta_generic_to_shared(&in_block);
    unsigned old;
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(f), "f"(0.5f) : "memory");
    asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(u), "r"(2));
    asm volatile("red.relaxed.gpu.global.or.b32 [%0 + 4], %1;" ::"l"(u), "r"(1 << threadIdx.x % 32));
    asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "l"(u + 2), "r"(0), "r"(1));
    if (old == 0) atomicAdd(u, 1000);
    asm volatile("red.release.sys.global.max.u64 [%0], %1;" ::"l"(wide), "l"((1ull << 40) + threadIdx.x));
    asm volatile("red.shared::cta.min.s32 [%0], %1;" ::"r"(at), "r"(5 - (int)threadIdx.x));
    __syncthreads();
    if (threadIdx.x == 0) u[3] = in_block;
}
extern "C" __global__ void matrices(unsigned* x) {
    __shared__ __align__(16) unsigned short rows[32][8];
    for (unsigned i = threadIdx.x; i < 256; i += 32) rows[i / 8][i % 8] = i;
    __syncthreads();
    const unsigned at = (unsigned)__cvta_generic_to_shared(rows[threadIdx.x]);
    unsigned* own = x + 7 * threadIdx.x;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(own[0]), "=r"(own[1]), "=r"(own[2]), "=r"(own[3]) : "r"(at));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 {%0, %1}, [%2];" : "=r"(own[4]), "=r"(own[5]) : "r"(at));
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(own[6]) : "r"(at));
}
extern "C" __global__ void copies(unsigned* x, const unsigned* y) {
    __shared__ __align__(16) unsigned box[256];
    const unsigned at = (unsigned)__cvta_generic_to_shared(box + 4 * threadIdx.x);
    if (threadIdx.x % 2) asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(at), "l"(y + 4 * threadIdx.x));
    else asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(y + 4 * threadIdx.x), "r"(8));
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
    BARRIER;
    for (unsigned i = 0; i < 4; ++i) x[4 * threadIdx.x + i] = box[(4 * threadIdx.x + i + 4) % 256];
}
extern "C" __global__ void pairs(unsigned* x) {
    unsigned short small;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x[0]) : "f"(1.0f), "f"(-2.0f));
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(x[1]) : "f"(1.0f), "f"(-2.0f));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x[2]) : "f"(1.0f), "f"(-2.0f));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(small) : "f"(1.0f), "f"(-1e9f));
    x[3] = small;
    asm("cvt.rn.satfinite.relu.e5m2x2.f32 %0, %1, %2;" : "=h"(small) : "f"(1.0f), "f"(-2.0f));
    x[4] = small;
}
"#;

fn compiled(barrier: &str) -> Option<leasehold_emulator::Emulator> {
    compile(&SOURCE.replace("BARRIER", barrier))
}

#[test]
fn instructions_give_what_a_device_gives() {
    let Some(emulator) = compiled("__syncthreads()") else { return };
    for reverse in [false, true] {
        let mut x = vec![0_u32; 192];
        On(&emulator, "registers", [1, 3, 1], [64, 1, 1])
            .run(&[operand(&mut x)], &[], reverse)
            .unwrap();
        assert_eq!(x, [1; 192]);

        let (mut u, mut wide, mut f) = ([0_u32; 4], [0_u64], [0.0_f32]);
        let operands = [operand(&mut u), operand(&mut wide), operand(&mut f)];
        On(&emulator, "atoms", [1; 3], [64, 1, 1]).run(&operands, &[], reverse).unwrap();
        // One thread's comparison succeeds.
        assert_eq!(u, [1128, u32::MAX, 1, (-58_i32) as u32]);
        assert_eq!((wide, f), ([(1 << 40) + 63], [32.0]));

        let mut x = vec![0_u32; 7 * 32];
        On(&emulator, "matrices", [1; 3], [32, 1, 1])
            .run(&[operand(&mut x)], &[], reverse)
            .unwrap();
        for (lane, own) in x.chunks(7).enumerate() {
            let lane = lane as u32;
            let row = |matrix: u32| {
                let first = 64 * matrix + 8 * (lane / 4) + 2 * (lane % 4);
                first | (first + 1) << 16
            };
            let column = |matrix: u32| {
                let first = 64 * matrix + 16 * (lane % 4) + lane / 4;
                first | (first + 8) << 16
            };
            assert_eq!(
                own,
                [row(0), row(1), row(2), row(3), column(0), column(1), row(0)],
                "{lane}"
            );
        }

        let (mut x, mut y) = (vec![0_u32; 256], (1..=256).collect::<Vec<u32>>());
        On(&emulator, "copies", [1; 3], [64, 1, 1])
            .run(&[operand(&mut x), operand(&mut y)], &[], reverse)
            .unwrap();
        for (i, x) in x.into_iter().enumerate() {
            let i = (i as u32 + 4) % 256;
            let absent = (i / 4).is_multiple_of(2) && i % 4 >= 2;
            assert_eq!(x, if absent { 0 } else { i + 1 });
        }

        let mut x = [0_u32; 5];
        On(&emulator, "pairs", [1; 3], [1; 3]).run(&[operand(&mut x)], &[], reverse).unwrap();
        assert_eq!(x, [0x3c00_c000, 0x3c00_0000, 0x3f80_c000, 0x38fe, 0x3c00]);
    }
}

#[test]
fn a_copy_that_another_thread_reads_without_a_barrier_is_a_race() {
    let Some(emulator) = compiled("") else { return };
    let (mut x, mut y) = (vec![0_u32; 256], vec![1_u32; 256]);
    let why = On(&emulator, "copies", [1; 3], [64, 1, 1])
        .run(&[operand(&mut x), operand(&mut y)], &[], false)
        .unwrap_err();
    assert!(why.contains("race: it ") && why.contains("shared memory"), "{why}");
}

#[test]
fn what_is_unknown_is_refused_with_its_line() {
    for text in [
        "atom.global.add.noftz.f16x2 %0, [%1], %0;",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b8 {%0}, [%1];",
        "mov.u32 %0, %%smid;",
    ] {
        let text = format!(
            "extern \"C\" __global__ void k(unsigned* x) {{\n  unsigned u = 0;\n  asm volatile(\"{text}\" : \"+r\"(u) : \"l\"(x));\n}}"
        );
        match compile_with(&text, &[]) {
            Ok(None) => return,
            Ok(Some(_)) => panic!("compiled: {text}"),
            Err(why) => assert!(why.contains("k.cu:3: error: not emulated: inline PTX"), "{why}"),
        }
    }
}
