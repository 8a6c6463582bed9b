//! CUDA C++ as its users write it, against results of the host.

use leasehold_core::sync::OnceLock;
use leasehold_emulator::{Cuda, Emulator, Launch, Operand, Program, Source};

/// Compiles a source. `None` without the compiler.
pub(crate) fn compile_as(
    text: &str,
    options: &[String],
    watched: bool,
) -> Result<Option<Emulator>, String> {
    let source = Source { name: "k.cu", text };
    match Program::cuda(&Cuda { source, options, watched }) {
        Ok(program) => Ok(Some(Emulator::new(program))),
        Err(why) if why.is_skip() => {
            eprintln!("skipped: {why}");
            Ok(None)
        }
        Err(why) => Err(why.to_string()),
    }
}

pub(crate) fn compile_with(text: &str, options: &[String]) -> Result<Option<Emulator>, String> {
    compile_as(text, options, true)
}

/// The kernels of `kinds.cu`, for the newest devices, with other options besides.
fn kinds_with(options: &[&str]) -> Option<Emulator> {
    let options: Vec<String> =
        ["-D__CUDA_ARCH__=900"].iter().chain(options).map(|o| (*o).to_owned()).collect();
    compile_with(include_str!("../kinds.cu"), &options).unwrap_or_else(|why| panic!("{why}"))
}

/// An emulator of its own of `kinds.cu`, which is compiled once.
fn kinds() -> Option<Emulator> {
    static MADE: OnceLock<Option<Program>> = OnceLock::new();
    let program = MADE.get_or_init(|| Some(kinds_with(&[])?.program().clone()));
    Some(Emulator::new(program.clone()?))
}

pub(crate) fn compile(text: &str) -> Option<Emulator> {
    compile_with(text, &[]).unwrap_or_else(|why| panic!("{why}"))
}

/// A list that a kernel reads and writes.
pub(crate) fn operand<T>(list: &mut [T]) -> Operand {
    let at = list.as_mut_ptr().expose_provenance() as u64;
    Operand { at, device: at, bytes: size_of_val(list) as u64, reads: true, writes: true }
}

pub(crate) fn read<T>(list: &[T]) -> Operand {
    let at = list.as_ptr().expose_provenance() as u64;
    Operand { at, device: at, bytes: size_of_val(list) as u64, reads: true, writes: false }
}

/// A launch of one kernel in one order.
pub(crate) struct On<'a>(
    pub(crate) &'a Emulator,
    pub(crate) &'a str,
    pub(crate) [u32; 3],
    pub(crate) [u32; 3],
);

impl On<'_> {
    pub(crate) fn shared(
        &self,
        shared: u32,
        operands: &[Operand],
        params: &[u8],
        reverse: bool,
    ) -> Result<(), String> {
        let On(emulator, kernel, grid, block) = *self;
        let launch = Launch {
            kernel,
            operands,
            params,
            grid,
            block,
            shared,
            cluster: [1; 3],
            cooperative: false,
            reverse,
        };
        // SAFETY: the operands are live lists of the test, and the emulator refuses other accesses.
        unsafe { emulator.run(&launch) }
    }

    pub(crate) fn run(
        &self,
        operands: &[Operand],
        params: &[u8],
        reverse: bool,
    ) -> Result<(), String> {
        self.shared(0, operands, params, reverse)
    }
}

#[test]
fn a_sum_of_two_vectors() {
    let Some(emulator) = kinds() else { return };
    let kernel = emulator.program().kernels().iter().find(|k| k.name == "add").unwrap();
    assert_eq!(kernel.threads, Some(128));
    let params: Vec<_> = kernel.params.iter().map(|p| (p.offset, p.size, p.pointer)).collect();
    assert_eq!(params, [(0, 8, true), (8, 8, true), (16, 8, true), (24, 4, false)]);
    let x: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let y: Vec<f32> = (0..1000).map(|i| 0.5 * i as f32).collect();
    for reverse in [false, true] {
        let mut z = vec![0.0_f32; 1000];
        // The last warp of a block of 72 threads has 8 lanes.
        On(&emulator, "add", [14, 1, 1], [72, 1, 1])
            .run(&[operand(&mut z), read(&x), read(&y)], &1000_i32.to_le_bytes(), reverse)
            .unwrap();
        assert!(z.iter().enumerate().all(|(i, z)| *z == 1.5 * i as f32));
    }
}

#[test]
fn a_reduction_with_shared_memory_and_shuffles_as_a_template() {
    let Some(emulator) = kinds() else { return };
    let names: Vec<_> = emulator.program().kernels().iter().map(|k| k.name.as_str()).collect();
    assert_eq!(names.len(), 10);
    let ints = names.iter().find(|n| n.starts_with("_Z6reduceIiLi256E")).unwrap();
    let doubles = names.iter().find(|n| n.starts_with("_Z6reduceIdLi128E")).unwrap();
    let x: Vec<i32> = (0..5000).collect();
    let y: Vec<f64> = (0..5000).map(f64::from).collect();
    for reverse in [false, true] {
        let (mut i, mut d) = ([0_i32], [0.0_f64]);
        On(&emulator, ints, [3, 1, 1], [256, 1, 1])
            .run(&[operand(&mut i), read(&x)], &5000_u32.to_le_bytes(), reverse)
            .unwrap();
        On(&emulator, doubles, [5, 1, 1], [128, 1, 1])
            .run(&[operand(&mut d), read(&y)], &5000_u32.to_le_bytes(), reverse)
            .unwrap();
        assert_eq!((i[0], d[0]), (4999 * 2500, 4999.0 * 2500.0));
    }
}

#[test]
fn a_missing_barrier_gives_other_results_in_one_of_the_orders() {
    let Some(emulator) = kinds_with(&["-D", "BARRIER="]) else { return };
    let names: Vec<_> = emulator.program().kernels().iter().map(|k| k.name.clone()).collect();
    let doubles = names.iter().find(|n| n.starts_with("_Z6reduceId")).unwrap();
    let y: Vec<f64> = (0..5000).map(f64::from).collect();
    let sums = [false, true].map(|reverse| {
        let mut d = [0.0_f64];
        On(&emulator, doubles, [5, 1, 1], [128, 1, 1])
            .run(&[operand(&mut d), read(&y)], &5000_u32.to_le_bytes(), reverse)
            .map(|()| d[0])
    });
    // The values of warps that have not written yet are NaN.
    assert!(sums.iter().any(|s| !matches!(s, Ok(s) if *s == 4999.0 * 2500.0)), "{sums:?}");
}

#[test]
fn a_transpose_with_blocks_of_two_dimensions_and_a_structure() {
    let Some(emulator) = kinds() else { return };
    let (rows, cols) = (37_i32, 50_i32);
    let x: Vec<f32> = (0..rows * cols).map(|i| i as f32).collect();
    let mut params = [rows.to_le_bytes(), cols.to_le_bytes()].concat();
    params.extend(2.0_f32.to_le_bytes());
    for reverse in [false, true] {
        let mut y = vec![0.0_f32; x.len()];
        On(&emulator, "transpose", [4, 3, 1], [16, 16, 1])
            .run(&[operand(&mut y), read(&x)], &params, reverse)
            .unwrap();
        for (i, v) in y.iter().enumerate() {
            let (r, c) = (i % rows as usize, i / rows as usize);
            assert_eq!(*v, 2.0 * x[r * cols as usize + c]);
        }
    }
}

#[test]
fn histograms_by_atomic_operations_in_dynamic_shared_memory() {
    let Some(emulator) = kinds() else { return };
    let x: Vec<u8> = (0..3000_u32).map(|i| (i * i % 251) as u8).collect();
    let mut want = [0_u32; 10];
    x.iter().for_each(|v| want[usize::from(*v) % 10] += 1);
    let params = [3000_i32.to_le_bytes(), 10_i32.to_le_bytes()].concat();
    for reverse in [false, true] {
        let mut bins = [0_u32; 10];
        let on = On(&emulator, "histogram", [4, 1, 1], [96, 1, 1]);
        on.shared(40, &[operand(&mut bins), read(&x)], &params, reverse).unwrap();
        assert_eq!(bins, want);
        let why = on.shared(36, &[operand(&mut bins), read(&x)], &params, reverse).unwrap_err();
        assert!(why.contains("byte 36 of the dynamic shared memory"), "{why}");
        let mut y: Vec<i32> = (0..100).collect();
        On(&emulator, "turn", [1; 3], [100, 1, 1])
            .shared(400, &[operand(&mut y)], &[], reverse)
            .unwrap();
        assert!(y.iter().enumerate().all(|(i, v)| *v == 99 - i as i32));
    }
}

#[test]
fn votes_shuffles_and_reductions_of_a_warp() {
    let Some(emulator) = kinds() else { return };
    for reverse in [false, true] {
        let mut out = vec![0_u32; 64 * 12];
        On(&emulator, "warp", [1; 3], [64, 1, 1]).run(&[operand(&mut out)], &[], reverse).unwrap();
        for (thread, own) in out.chunks_exact(12).enumerate() {
            let lane = thread as u32 % 32;
            let thirds = (0..32).filter(|l| l % 3 == 0).fold(0, |all, l| all | 1 << l);
            let want = [
                thirds,
                3,
                50,
                lane / 8 * 8 + 1,
                if lane < 3 { lane } else { lane - 3 },
                if lane % 16 < 13 { lane + 3 } else { lane },
                496,
                0xffff << (lane / 16 * 16),
                if lane < 16 { lane ^ 1 } else { 8 },
                20,
                1,
                4 * (31 - lane) + 1,
            ];
            assert_eq!(own, want, "thread {thread}");
        }
    }
}

#[test]
fn mathematics_vectors_constants_and_atomic_operations() {
    let Some(emulator) = kinds() else { return };
    for launch in 1..3 {
        let (mut v, mut f) = ([1.0_f32, 2.0, 3.0, 0.25], [0.0_f32; 3]);
        let (mut i, mut wide) = ([0_i32; 7], [5_u64, 0]);
        #[repr(align(16))]
        struct Aligned([f32; 4]);
        let mut aligned = Aligned(v);
        On(&emulator, "all", [1; 3], [1; 3])
            .run(
                &[operand(&mut aligned.0), operand(&mut f), operand(&mut i), operand(&mut wide)],
                &[],
                false,
            )
            .unwrap();
        v = aligned.0;
        assert_eq!(v, [2.0, 4.0, 10.0, 2.0]);
        assert_eq!(f, [15.5, 5.25, 7.0]);
        // A variable of the source lives as long as the emulator.
        assert_eq!(i, [53, 9, -9, -4, 14, launch, 6]);
        assert_eq!(wide, [5 + (1 << 40), 1]);
    }
}

#[test]
fn an_access_outside_names_its_line_its_binding_and_its_thread() {
    let text = "extern \"C\" __global__ void f(float* x, const float* y, int at) {
    float v = y[threadIdx.x];
    __syncthreads();
    x[(int)threadIdx.x + at] = v;
}";
    let Some(emulator) = compile(text) else { return };
    let (mut x, y) = (vec![0.0_f32; 80], vec![1.0_f32; 64]);
    let on = On(&emulator, "f", [1; 3], [64, 1, 1]);
    let part = |x: &mut [f32]| operand(&mut x[8..72]);
    let run = |x: &mut [f32], y: Operand, at: i32| on.run(&[part(x), y], &at.to_le_bytes(), false);
    run(&mut x, read(&y), 0).unwrap();
    let why = run(&mut x, read(&y), 1).unwrap_err();
    assert_eq!(
        why,
        "k.cu:4: illegal address: it writes 4 bytes outside of its bindings, 0 bytes behind the end of binding 0, \
         which has 256 bytes (thread 63,0,0 of block 0,0,0); binding 0 is x"
    );
    let why = run(&mut x, read(&y), -1).unwrap_err();
    assert!(why.contains("0 bytes in front of binding 0"), "{why}");
    let why = run(&mut x, read(&y[..63]), 0).unwrap_err();
    assert!(
        why.starts_with("k.cu:2: illegal address: it reads 4 bytes") && why.contains("binding 1"),
        "{why}"
    );
    let mut outputs = vec![0.0_f32; 64];
    let written = Operand { reads: false, ..operand(&mut outputs) };
    let why = run(&mut x, written, 0).unwrap_err();
    assert!(
        why.contains("reads binding 1 at byte 0, which the launch binds to be written only"),
        "{why}"
    );
    let why = on.run(&[read(&x), read(&y)], &0_i32.to_le_bytes(), true).unwrap_err();
    assert!(
        why.contains("writes binding 0 at byte 0, which the launch binds to be read only"),
        "{why}"
    );
    // A launch after a failed one begins anew.
    run(&mut x, read(&y), 0).unwrap();
}

#[test]
fn mistakes_fail_the_launch_and_not_the_process() {
    let text = "extern \"C\" __global__ void half_waits(int* x) { if (threadIdx.x < 32) __syncthreads(); else __shfl_sync(~0u, x[0], threadIdx.x == 40 ? 0 : 1), __ballot_sync(1, 1); }
extern \"C\" __global__ void index(int* x) { int a[4] = {}; x[0] = a[x[0]]; }
extern \"C\" __global__ void divide(int* x) { x[0] = 1 / x[1]; }
extern \"C\" __global__ void shift(int* x) { x[0] = 1 << x[0]; }
extern \"C\" __global__ void vector(char* x) { *(float4*)(x + 4) = make_float4(0, 0, 0, 0); }
extern \"C\" __global__ void asserts(int* x) {
    assert(x[0] == 1);
}
extern \"C\" __global__ void traps() { __trap(); }
extern \"C\" __global__ void early(int* x) { if (threadIdx.x >= 40) return; __syncthreads(); atomicAdd(x, 1); }";
    let Some(emulator) = compile(text) else { return };
    #[repr(align(16))]
    struct Aligned([i32; 8]);
    let mut x = Aligned([40, 0, 0, 0, 0, 0, 0, 0]);
    let mut run = |kernel, threads| {
        On(&emulator, kernel, [1; 3], [threads, 1, 1]).run(&[operand(&mut x.0)], &[], false)
    };
    for (kernel, want) in [
        ("half_waits", "the mask 0x00000001, which does not name its lane"),
        ("index", "k.cu:2: the index 40 is outside of its array"),
        ("divide", "k.cu:3: a division by zero"),
        ("shift", "k.cu:4: a shift by as many bits"),
        ("vector", "no multiple of 16"),
        ("asserts", "k.cu:7: the assertion x[0] == 1 fails"),
    ] {
        let why = run(kernel, 64).unwrap_err();
        assert!(why.contains(want), "{kernel}: {why}");
    }
    // Threads that have ended do not hold the others up.
    run("early", 64).unwrap();
    assert_eq!(x.0[0], 80);
    let why = On(&emulator, "traps", [1; 3], [1; 3]).run(&[], &[], false).unwrap_err();
    assert!(why.contains("__trap()"), "{why}");
}

#[test]
fn blocks_of_a_cluster_access_each_others_shared_memory() {
    let Some(emulator) = kinds() else { return };
    let x: Vec<i32> = (0..12 * 64).map(|i| i * i % 1009).collect();
    let run = |emulator: &Emulator, blocks: u32, reverse| {
        let (mut y, mut sums) = (vec![0; x.len()], [0; 3]);
        On(emulator, "cluster", [blocks, 1, 1], [64, 1, 1])
            .run(&[operand(&mut y), operand(&mut sums), read(&x)], &[], reverse)
            .map(|()| (y, sums.to_vec()))
    };
    let wanted = (0..12 * 64).map(|i| {
        let (block, thread) = (i / 64, i % 64);
        x[(block / 4 * 4 + (block + 1) % 4) * 64 + 63 - thread]
    });
    let sums = x.chunks(4 * 64).map(|of_cluster| of_cluster.iter().sum());
    let wanted = (wanted.collect::<Vec<i32>>(), sums.collect::<Vec<i32>>());
    for reverse in [false, true] {
        assert_eq!(run(&emulator, 12, reverse).unwrap(), wanted);
        let why = run(&emulator, 6, reverse).unwrap_err();
        assert!(why.contains("6 blocks in x, which is no multiple of the 4 of a cluster"), "{why}");
        let mut turns = [7];
        On(&emulator, "turns", [2, 1, 1], [40, 1, 1])
            .run(&[operand(&mut turns)], &[], reverse)
            .unwrap();
        assert_eq!(turns, [8]);
    }
    let without = kinds_with(&["-D", "CLUSTER_BARRIER=((void)0)"]).unwrap();
    for reverse in [false, true] {
        assert!(run(&without, 12, reverse).unwrap_err().contains("race: "));
        let turns = On(&without, "turns", [2, 1, 1], [40, 1, 1]);
        assert!(turns.run(&[operand(&mut [7])], &[], reverse).unwrap_err().contains("race: "));
    }
}

/// Each block has the place of the next one in its cluster from that block, its own rank, and the
/// cluster's size in each direction.
const CREW: &str = r#"extern "C" __global__ void DIMS crew(unsigned* out) {
    __shared__ unsigned number;
    unsigned own = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z), x, y, z, deep;
    asm volatile("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(x));
    asm volatile("mov.u32 %0, %%cluster_ctaid.y;" : "=r"(y));
    asm volatile("mov.u32 %0, %%cluster_ctaid.z;" : "=r"(z));
    asm volatile("mov.u32 %0, %%cluster_nctaid.z;" : "=r"(deep));
    number = own;
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
    unsigned next = (__clusterRelativeBlockRank() + 1) % __clusterSizeInBlocks();
    out[2 * own] = *(unsigned*)__cluster_map_shared_rank(&number, next);
    out[2 * own + 1] = x + 10 * y + 100 * z + 1000 * (__clusterDim().x + 10 * __clusterDim().y + 100 * deep);
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
}"#;

#[test]
fn a_launch_has_clusters_in_three_dimensions() {
    let grid = [4, 3, 4];
    for of in [[1; 3], [2, 1, 1], [1, 3, 2], [2, 1, 4], [4, 1, 4]] {
        for in_source in [false, true] {
            let [x, y, z] = of;
            let dims = format!("__cluster_dims__({x}, {y}, {z})");
            let text = CREW.replace("DIMS", if in_source { &dims } else { "" });
            let Some(emulator) = compile(&text) else { return };
            for reverse in [false, true] {
                let mut found = [0_u32; 2 * 48];
                let operands = [operand(&mut found)];
                let launch = Launch {
                    kernel: "crew",
                    operands: &operands,
                    params: &[],
                    grid,
                    block: [1; 3],
                    shared: 0,
                    cluster: if in_source { [1; 3] } else { of },
                    cooperative: false,
                    reverse,
                };
                // SAFETY: the operand is a live list of the test, and the emulator refuses other
                // accesses.
                unsafe { emulator.run(&launch) }.unwrap();
                let number = |[x, y, z]: [u32; 3]| x + grid[0] * (y + grid[1] * z);
                for own in 0..48 {
                    let at = [own % 4, own / 4 % 3, own / 12];
                    let [x, y, z] = [0, 1, 2].map(|i| at[i] % of[i]);
                    let next = (x + of[0] * (y + of[1] * z) + 1) % (of[0] * of[1] * of[2]);
                    let next = [next % of[0], next / of[0] % of[1], next / of[0] / of[1]];
                    let next = number([0, 1, 2].map(|i| at[i] / of[i] * of[i] + next[i]));
                    let place = x + 10 * y + 100 * z + 1000 * (of[0] + 10 * of[1] + 100 * of[2]);
                    assert_eq!(found[2 * own as usize..][..2], [next, place], "{own} of {of:?}");
                }
                let other = Launch { cluster: [1, 3, 1], ..launch };
                // SAFETY: as above.
                let refused = unsafe { emulator.run(&other) };
                assert_eq!(refused.is_err(), in_source && of != [1; 3], "{refused:?}");
                let odd = Launch { grid: [4, 3, 3], ..launch };
                // SAFETY: as above.
                let refused = unsafe { emulator.run(&odd) };
                assert_eq!(refused.is_err(), of[2] != 1, "{refused:?}");
            }
        }
    }
}

#[test]
fn blocks_of_a_cooperative_launch_wait_for_each_other() {
    let text = r#"
__device__ unsigned gates[4];
__device__ void meet(unsigned* gate) {
    __syncthreads();
    if (threadIdx.x == 0) {
        FENCE;
        atomicAdd(gate, 1u);
        while (*(volatile unsigned*)gate < gridDim.x) {
        }
        FENCE;
    }
    __syncthreads();
}
extern "C" __global__ void sums(unsigned* x, unsigned* y) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x, all = gridDim.x * blockDim.x;
    x[i] = i;
    meet(&gates[0]);
    y[i] = x[all - 1 - i] + x[(i + blockDim.x) % all];
    meet(&gates[1]);
    x[i] = y[(i + 7) % all];
}
extern "C" __global__ void stuck(unsigned* x, unsigned*) {
    while (atomicAdd(x, 0u) != 1u) {
    }
}"#;
    let run = |fence: &str, kernel: &str, blocks: u32, cooperative: bool, reverse: bool| {
        let emulator = compile(&text.replace("FENCE", fence))?;
        let (mut x, mut y) = (vec![0_u32; 32 * 70], vec![0_u32; 32 * 70]);
        let operands = [operand(&mut x), operand(&mut y)];
        let (grid, block, cluster) = ([blocks, 1, 1], [32, 1, 1], [1; 3]);
        let launch = Launch {
            kernel,
            operands: &operands,
            params: &[],
            grid,
            block,
            shared: 0,
            cluster,
            cooperative,
            reverse,
        };
        // SAFETY: the operands are live lists of the test, and the emulator refuses other accesses.
        Some(unsafe { emulator.run(&launch) }.map(|()| x))
    };
    for reverse in [false, true] {
        for blocks in [1, 2, 16, 64] {
            let Some(x) = run("__threadfence()", "sums", blocks, true, reverse) else { return };
            let all = 32 * blocks;
            let y = |i: u32| all - 1 - i + (i + 32) % all;
            let wanted = (0..all).map(|i| y((i + 7) % all));
            assert!(x.unwrap().into_iter().take(all as usize).eq(wanted), "{blocks} blocks");
        }
        let why = |fence, kernel, blocks, cooperative| {
            run(fence, kernel, blocks, cooperative, reverse).unwrap().unwrap_err()
        };
        let refused = why("__threadfence()", "sums", 65, true);
        assert!(refused.contains("a cooperative launch of 65 blocks, more than 64"), "{refused}");
        let race = why("", "sums", 4, true);
        assert!(race.contains("race: it reads binding 0"), "{race}");
        let stuck = why("", "stuck", 2, true);
        assert!(stuck.contains("a thread waits at a word that it looks at"), "{stuck}");
    }
}

#[test]
fn mistakes_with_a_clusters_barrier_are_told() {
    for (body, want) in [
        ("if (threadIdx.x < 32) BARRIER; else __syncthreads();", "waits at __"),
        ("__cluster_barrier_wait();", "a wait at the cluster's barrier without an arrival"),
        ("__cluster_barrier_arrive(); BARRIER;", "a second arrival at the cluster's barrier"),
        (
            "__shared__ int x; __cluster_map_shared_rank(&x, 2);",
            "the shared memory of block 2 of a cluster of 2",
        ),
        ("int x; __cluster_map_shared_rank(&x, 1);", "not in the block's shared memory"),
    ] {
        let text = format!(
            "#define BARRIER (__cluster_barrier_arrive(), __cluster_barrier_wait())
             extern \"C\" __global__ void __cluster_dims__(2) f() {{ {body} }}"
        );
        let Some(emulator) = compile(&text) else { return };
        for reverse in [false, true] {
            let why = On(&emulator, "f", [2, 1, 1], [64, 1, 1]).run(&[], &[], reverse).unwrap_err();
            assert!(why.contains(want), "{body}: {why}");
        }
    }
}

#[test]
fn a_barrier_that_some_threads_never_reach_is_told() {
    let text = "extern \"C\" __global__ void f() {
    if (threadIdx.x < 32) __syncthreads();
    else if (threadIdx.x < 48) __shfl_sync(~0u, 1, 0);
    else __syncthreads();
}";
    let Some(emulator) = compile(text) else { return };
    for reverse in [false, true] {
        let why = On(&emulator, "f", [1; 3], [64, 1, 1]).run(&[], &[], reverse).unwrap_err();
        assert!(why.contains("waits at __syncthreads for others"), "{why}");
    }
}

#[test]
fn errors_have_the_lines_of_the_source() {
    for (text, want) in [
        ("\n\n__global__ void f() { undeclared(); }", "k.cu:3: error: "),
        ("__global__ void f() {}\n#error stop\n", "k.cu:2:2: error: #error stop"),
        ("int x;", "no __global__ function is defined"),
        ("__global__ void f();", "no __global__ function is defined"),
        ("__global__ void f() { int x = 1; }\n\nint y = \"text\";", "k.cu:3: error: "),
        (
            "__global__ void f(float* x) {\n    asm volatile(\"membar.gl;\");\n}",
            "k.cu:2: error: not emulated: inline PTX (asm); put it between `#ifndef LEASEHOLD_EMULATED`",
        ),
        ("#include <mma.h>\n__global__ void f() {}", "not emulated: tensor cores (<mma.h>)"),
        ("#include <cooperative_groups.h>\n", "not emulated: cooperative groups"),
        ("#include <cuda/barrier>\n", "not emulated: asynchronous copies"),
        (
            "__global__ void f(cudaTextureObject_t t) {}",
            "k.cu:1: error: not emulated: textures and surfaces (cudaTextureObject_t)",
        ),
        (
            "__global__ void g();\n__global__ void f() { g<<<1, 1>>>(); }",
            "k.cu:2: error: not emulated: launches",
        ),
        ("__global__ void f() { free(malloc(1)); }", "not emulated: allocations"),
        ("#include <nothing.h>", "nothing.h: No such file"),
    ] {
        match compile_with(text, &[]) {
            Ok(None) => return,
            Ok(Some(_)) => panic!("compiled: {text}"),
            Err(why) => assert!(why.contains(want), "{text}: {why}"),
        }
    }
}

#[test]
fn macros_hide_no_kernel_and_declarations_are_none() {
    let text = "#define KERNEL(name) extern \"C\" __global__ void name
namespace { __device__ int free_ = 1; }
__global__ void declared(int*);
struct Own { int free, asm_; };
// __global__ void comment() {}
KERNEL(one)(int* x) { const char* s = \"__global__ void text() { asm\"; x[0] = s[0] + free_; }
#if __CUDA_ARCH__ >= 900
static __global__ void unnamed(int* x) { x[0] = 1'000; }
template <int N> __global__ void many(int* x) { x[0] = N; }
template <> __global__ void many<3>(int* x) { x[0] = 30; }
extern \"C\" { __global__ void two(int x, char y, double z) {} }
#endif
#include <cuda_runtime.h>
";
    let Some(emulator) =
        compile_with(text, &["--define-macro=__CUDA_ARCH__=900".into(), "--use_fast_math".into()])
            .unwrap()
    else {
        return;
    };
    let mut names: Vec<_> = emulator.program().kernels().iter().map(|k| k.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["", "_Z4manyILi3EEvPi", "one", "two"]);
    let two = emulator.program().kernels().iter().find(|k| k.name == "two").unwrap();
    let params: Vec<_> = two.params.iter().map(|p| (p.offset, p.size, p.pointer)).collect();
    assert_eq!(params, [(0, 4, false), (4, 1, false), (8, 8, false)]);
    let mut x = [0_i32];
    On(&emulator, "_Z4manyILi3EEvPi", [1; 3], [1; 3]).run(&[operand(&mut x)], &[], false).unwrap();
    assert_eq!(x, [30]);
    let why = On(&emulator, "two", [1; 3], [1; 3]).run(&[], &[0; 4], false).unwrap_err();
    assert!(why.contains("takes 16 bytes of arguments, not 4"), "{why}");
}

#[test]
fn accesses_without_an_order_are_told_with_both_threads() {
    let text = "extern \"C\" __global__ void shared(int* x) {
    __shared__ int all[64];
    all[threadIdx.x] = x[threadIdx.x];
#ifdef ORDER
    __syncthreads();
#endif
    x[threadIdx.x] = all[threadIdx.x ^ 1];
}
extern \"C\" __global__ void blocks(int* x) {
    if (threadIdx.x == 0) x[1] = blockIdx.x + 1;
}
extern \"C\" __global__ void flag(int* x) { x[0] = 1; }
extern \"C\" __global__ void last(unsigned* x) {
    if (threadIdx.x == 0) x[1 + blockIdx.x] = blockIdx.x + 1;
#ifdef ORDER
    __threadfence();
#endif
    __shared__ bool is_last;
    if (threadIdx.x == 0) is_last = atomicInc(x, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (!is_last || threadIdx.x != 0) return;
    unsigned sum = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) sum += x[1 + i];
    x[10] = sum;
}
extern \"C\" __global__ void lock(int* x) {
    while (atomicCAS(x, 0, 1) != 0) __nanosleep(10);
    ++x[1];
#ifdef ORDER
    __threadfence();
#endif
    atomicExch(x, 0);
}";
    for ordered in [true, false] {
        let options = [if ordered { "-DORDER" } else { "-DNONE" }.to_owned()];
        let Some(emulator) = compile_with(text, &options).unwrap() else { return };
        for reverse in [false, true] {
            let run = |kernel, grid: u32, threads: u32| {
                let mut x: Vec<i32> = (0..64).map(|i| if i < 12 { 0 } else { i }).collect();
                On(&emulator, kernel, [grid, 1, 1], [threads, 1, 1])
                    .run(&[operand(&mut x)], &[], reverse)
                    .map(|()| x)
            };
            // Every thread writes the same: nobody can tell who was first.
            assert_eq!(run("flag", 2, 64).unwrap()[0], 1);
            let why = run("blocks", 2, 32).unwrap_err();
            assert!(
                why.starts_with(
                    "k.cu:10: race: it writes binding 0 at byte 4, which thread 0,0,0 of block"
                ),
                "{why}"
            );
            if ordered {
                run("shared", 2, 64).unwrap_err();
                assert_eq!(run("shared", 1, 64).unwrap()[20..22], [21, 20]);
                assert_eq!(run("last", 4, 32).unwrap()[10], 10);
                assert_eq!(run("lock", 3, 40).unwrap()[1], 120);
                continue;
            }
            let why = run("shared", 1, 64).unwrap_err();
            assert!(
                why.contains("race: it ") && why.contains("without a barrier between the two"),
                "{why}"
            );
            let why = run("last", 4, 32).unwrap_err();
            assert!(
                why.contains("k.cu:23: race: it reads binding 0")
                    && why.contains("wrote, and nothing orders"),
                "{why}"
            );
            let why = run("lock", 3, 40).unwrap_err();
            assert!(why.contains("k.cu:28: race: "), "{why}");
        }
    }
}

#[test]
fn what_the_library_s_functions_access_is_looked_at() {
    let text = "extern \"C\" __global__ void fill(int* x, unsigned bytes) { memset(x, 7, bytes); }
extern \"C\" __global__ void copies(int* x, unsigned bytes) {
    __shared__ int all[64];
    memcpy(all + threadIdx.x * 2, x + threadIdx.x * 2, bytes / 8);
#ifdef ORDER
    __syncthreads();
#endif
    memmove(x + threadIdx.x * 2, all + (threadIdx.x ^ 1) * 2, bytes / 8);
}";
    for ordered in [true, false] {
        let options = if ordered { vec!["-DORDER".to_owned()] } else { Vec::new() };
        let Some(emulator) = compile_with(text, &options).unwrap() else { return };
        let run = |kernel, threads: u32, bytes: u32| {
            let mut x: Vec<i32> = (0..16).collect();
            On(&emulator, kernel, [1; 3], [threads, 1, 1])
                .run(&[operand(&mut x)], &bytes.to_le_bytes(), false)
                .map(|()| x)
        };
        assert_eq!(run("fill", 1, 64).unwrap()[15], 0x0707_0707);
        assert_eq!(run("fill", 1, 0).unwrap()[0], 0);
        let why = run("fill", 1, 65).unwrap_err();
        assert!(why.contains("it writes 65 bytes that are partly outside of binding 0"), "{why}");
        match run("copies", 8, 64) {
            Ok(x) if ordered => assert_eq!(x[..4], [2, 3, 0, 1]),
            Err(why) if !ordered => assert!(why.contains("race: it "), "{why}"),
            other => panic!("{ordered}: {other:?}"),
        }
    }
}

/// Each warp but the first fills a part of shared memory and raises its flag; the first warp reads.
#[test]
fn a_flag_orders_what_its_own_writers_did_before() {
    let text = "#define WARPS 4
__device__ void raise(unsigned* flag) {
#ifdef FENCE_FIRST
    __threadfence_block();
#endif
#ifndef NO_MEETING
    __syncwarp();
#endif
    if (threadIdx.x % 32 != 0) return;
#if !defined NO_FENCE && !defined FENCE_FIRST
    __threadfence();
#endif
    atomicAdd(flag, 1);
}
extern \"C\" __global__ void flags(int* x) {
    __shared__ int parts[WARPS][32];
    __shared__ unsigned flags[WARPS];
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) flags[warp] = 0;
    __syncthreads();
    if (warp > 0) {
        parts[warp][lane] = (int)threadIdx.x;
        raise(&flags[warp]);
        return;
    }
    int sum = 0;
    for (unsigned w = 1; w < WARPS; ++w) {
#ifdef ONE_WAITS
        if (lane == 0) while (*(volatile unsigned*)&flags[w] == 0) __nanosleep(10);
        __syncwarp();
#elif defined OTHER_FLAG
        while (atomicAdd(&flags[w == 1 ? 2 : 1], 0) == 0) __nanosleep(10);
#else
        while (atomicAdd(&flags[w], 0) == 0) __nanosleep(10);
#endif
        sum += parts[w][31 - lane];
    }
    x[lane] = sum;
}";
    for option in ["", "ONE_WAITS", "FENCE_FIRST", "OTHER_FLAG", "NO_MEETING", "NO_FENCE"] {
        let options = [format!("-DTRIED{option}"), format!("-D{option}")];
        let options = &options[..1 + usize::from(!option.is_empty())];
        let Some(emulator) = compile_with(text, options).unwrap() else { return };
        for reverse in [false, true] {
            let mut x = [0_i32; 32];
            let ran = On(&emulator, "flags", [2, 1, 1], [128, 1, 1]).run(
                &[operand(&mut x)],
                &[],
                reverse,
            );
            // Both blocks write the same.
            match option {
                "" | "ONE_WAITS" | "FENCE_FIRST" => {
                    ran.unwrap();
                    assert_eq!(x[..2], [63 + 95 + 127, 62 + 94 + 126]);
                }
                _ => {
                    let why = ran.unwrap_err();
                    assert!(why.contains("race: it reads shared memory"), "{option}: {why}");
                }
            }
        }
    }
}
