// The kernels of the conformance suite with a tensor map (`TestKernel::Box`, `TestKernel::LimitedBox`).

typedef unsigned int u32;

struct __align__(64) Map {
    u32 words[32];
};

#define ELEMENTS 4096u

// Copies the box at a column and a row. Elements out of bounds are zero.
__device__ void copy_box(u32* out, const Map& map, int column, int row, u32 columns, u32 rows) {
    __shared__ __align__(128) u32 box[ELEMENTS];
    __shared__ __align__(8) unsigned long long filled;
    u32 to = (u32)__cvta_generic_to_shared(box), barrier = (u32)__cvta_generic_to_shared(&filled);
    u32 elements = columns * rows;
    if (elements > ELEMENTS) return;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(elements * 4) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                     ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
    }
    __syncthreads();
    u32 done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier) : "memory");
    for (u32 i = threadIdx.x; i < elements; i += blockDim.x) out[i] = box[i];
}

extern "C" __global__ void conformance_box(const u32*, u32* out, const __grid_constant__ Map map, int column, int row, u32 columns, u32 rows) {
    copy_box(out, map, column, row, columns, rows);
}

// `limit` is a number of bytes, below which the tensor has memory. Its rows are as long as the box's. A box that ends beyond is zero.
extern "C" __global__ void conformance_limited_box(const u32*, const unsigned long long* limit, u32* out, const __grid_constant__ Map map, int column, int row,
                                                   u32 columns, u32 rows) {
    if (row >= 0 && (row + (unsigned long long)rows) * columns * 4 <= *limit) {
        copy_box(out, map, column, row, columns, rows);
    } else {
        for (u32 i = threadIdx.x; i < columns * rows; i += blockDim.x) out[i] = 0;
    }
}
