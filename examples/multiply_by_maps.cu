// y = x w^T for Hopper: rows of bf16 by tensor maps, products by `wgmma`, sums of f32, and y in bf16.
//
// A block computes tiles of 128 rows and 256 columns of y, one after the other. Its first warpgroup copies boxes of x and w into a ring of
// stages in shared memory, and each of the other two multiplies 64 rows. Two flags of a stage say that its boxes are there, and that both
// warpgroups have read them. The copies of the next tile begin while the last one is stored.

typedef unsigned int u32;
typedef unsigned long long u64;

// The driver's form of a tensor map.
struct __align__(64) Map {
    u64 words[16];
};

// Elements of a tile, and stages.
constexpr u32 ROWS = 128, COLUMNS = 256, DEPTH = 64, STAGES = 4;
constexpr u32 X_BYTES = ROWS * DEPTH * 2, W_BYTES = COLUMNS * DEPTH * 2, STAGE = X_BYTES + W_BYTES;
constexpr u32 WARPGROUP = 128;

__device__ u32 shared(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// ---- Flags: a phase ends when all have arrived and all bytes are there

__device__ void init(u64& flag, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(&flag)), "r"(count) : "memory"); }
__device__ void arrive(u64& flag) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(&flag)) : "memory"); }
__device__ void arrive_for(u64& flag, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(&flag)), "r"(bytes) : "memory");
}
__device__ void wait(u64& flag, u32 parity) {
    asm volatile(
        "{ .reg .pred over;\n"
        "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
        "@over bra DONE;\n"
        "bra AGAIN;\n"
        "DONE: }" ::"r"(shared(&flag)), "r"(parity) : "memory");
}

// ---- Copies and products

__device__ void copy_box(void* to, const Map& map, u32 column, u32 row, u64& flag) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(shared(to)), "l"(&map), "r"(column), "r"(row), "r"(shared(&flag)) : "memory");
}

// Rows of 128 bytes, whose pieces of 16 bytes change places (the map's swizzle): 1,024 bytes from eight rows to the next eight.
__device__ u64 matrix(const void* at) { return (shared(at) & 0x3ffff) >> 4 | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62; }

#define SUMS_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS_32(i) SUMS_8(i), SUMS_8(i + 8), SUMS_8(i + 16), SUMS_8(i + 24)

// Begins d (+)= x w^T: 64 rows of x, 256 rows of w, 16 columns of both.
__device__ void multiply(float (&d)[128], u64 x, u64 w, u32 adds) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.b32 adds, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "
        "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "
        "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "
        "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "
        "%126, %127}, %128, %129, adds, 1, 1, 0, 0; }"
        : SUMS_32(0), SUMS_32(32), SUMS_32(64), SUMS_32(96) : "l"(x), "l"(w), "r"(adds));
}
template <int N> __device__ void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Two neighbours, rounded to bf16.
__device__ u32 pair(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// ---- The kernel

struct Size {
    u32 rows, columns, depth;
};

extern "C" __global__ void __launch_bounds__(3 * WARPGROUP, 1)
multiply_by_maps(const void*, const void*, u32* y, const __grid_constant__ Map x_map, const __grid_constant__ Map w_map, Size size) {
    extern __shared__ __align__(1024) unsigned char ring[];
    u64* const full = (u64*)(ring + STAGES * STAGE);
    u64* const empty = full + STAGES;
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < STAGES; ++s) {
            init(full[s], 1);
            init(empty[s], 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    const u32 down = (size.rows + ROWS - 1) / ROWS, tiles = down * ((size.columns + COLUMNS - 1) / COLUMNS);
    const u32 steps = (size.depth + DEPTH - 1) / DEPTH, warpgroup = threadIdx.x / WARPGROUP;
    u32 stage = 0, parity = 0;
    const auto next = [&] {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    };

    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x != 0) return;
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            for (u32 step = 0; step < steps; ++step, next()) {
                unsigned char* const at = ring + stage * STAGE;
                wait(empty[stage], parity ^ 1);
                arrive_for(full[stage], STAGE);
                copy_box(at, x_map, step * DEPTH, tile % down * ROWS, full[stage]);
                copy_box(at + X_BYTES, w_map, step * DEPTH, tile / down * COLUMNS, full[stage]);
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const u32 thread = threadIdx.x % WARPGROUP, part = (warpgroup - 1) * 64;
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float d[128];
        u32 read = 0;
        for (u32 step = 0; step < steps; ++step, next()) {
            const unsigned char *x = ring + stage * STAGE + part * DEPTH * 2, *w = ring + stage * STAGE + X_BYTES;
            wait(full[stage], parity);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (u32 k = 0; k < DEPTH; k += 16) multiply(d, matrix(x + k * 2), matrix(w + k * 2), step + k != 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            // The products of the stage before are over, so it may be filled again.
            wait_for_products<1>();
            if (step > 0 && thread == 0) arrive(empty[read]);
            read = stage;
        }
        wait_for_products<0>();
        if (thread == 0) arrive(empty[read]);
        // A thread has two neighbours of every eight columns, in two rows.
        const u32 row = tile % down * ROWS + part + thread / 32 * 16 + thread % 32 / 4, column = tile / down * COLUMNS + thread % 4 * 2;
#pragma unroll
        for (u32 i = 0; i < 128; i += 4) {
            const u32 at = column + i * 2;
            if (at >= size.columns) continue;
            if (row < size.rows) y[((size_t)row * size.columns + at) / 2] = pair(d[i], d[i + 1]);
            if (row + 8 < size.rows) y[((size_t)(row + 8) * size.columns + at) / 2] = pair(d[i + 2], d[i + 3]);
        }
    }
}
