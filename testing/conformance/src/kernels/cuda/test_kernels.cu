// CUDA kernels of the conformance suite, with the names and arguments of `TestKernel`: the
// addresses of the bindings in order, then the parameters.
//
// A block computes 64 elements whatever its size; the number of blocks determines the number of
// elements.

typedef unsigned int u32;
typedef unsigned long long u64;

#define BLOCK 64u

extern "C" __global__ void conformance_fill(u32* out, u32 value) {
    u64 from = (u64)blockIdx.x * BLOCK;
    for (u32 i = threadIdx.x; i < BLOCK; i += blockDim.x) out[from + i] = value;
}

extern "C" __global__ void conformance_add(const u32* a, const u32* b, u32* out) {
    u64 from = (u64)blockIdx.x * BLOCK;
    for (u32 i = threadIdx.x; i < BLOCK; i += blockDim.x) out[from + i] = a[from + i] + b[from + i];
}

// `early` says which of `a` and `b` the launch lets it read before it waits for the kernel in front.
extern "C" __global__ void conformance_early_add(const u32* a, const u32* b, u32* out, u32 early) {
    u64 from = (u64)blockIdx.x * BLOCK;
    volatile const u32 *left = a + from + threadIdx.x, *right = b + from + threadIdx.x;
    bool first = threadIdx.x < BLOCK;
    u32 x = 0, y = 0;
    if (first && (early & 1)) x = *left;
    if (first && (early & 2)) y = *right;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");
#endif
    if (first && !(early & 1)) x = *left;
    if (first && !(early & 2)) y = *right;
    if (first) out[from + threadIdx.x] = x + y;
    for (u32 i = threadIdx.x + blockDim.x; i < BLOCK; i += blockDim.x) out[from + i] = a[from + i] + b[from + i];
}

// `limit` is a number of bytes, and `a` has memory only below it.
extern "C" __global__ void conformance_limited(const u32* a, const u64* limit, u32* out) {
    u64 from = (u64)blockIdx.x * BLOCK;
    u64 end = *limit / sizeof(u32);
    for (u32 i = threadIdx.x; i < BLOCK; i += blockDim.x)
        out[from + i] = from + i < end ? a[from + i] : 0xffffffffu;
}

// Counts the blocks of the launch, once all of them are there: they run at the same time.
extern "C" __global__ void conformance_together(u32* arrived, u32* out) {
    u32 blocks = gridDim.x * gridDim.y * gridDim.z, own = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    if (threadIdx.x == 0) {
        atomicAdd(arrived, 1u);
        while (*(volatile u32*)arrived < blocks) {
        }
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < BLOCK; i += blockDim.x) out[(u64)own * BLOCK + i] = *(volatile u32*)arrived;
}

// Each part has memory only below its limit, a number of bytes.
extern "C" __global__ void conformance_parts(u32* a, const u64* limits, u32* out, u32 each, u32 step, u32 value) {
    u64 from = (u64)blockIdx.x * BLOCK;
    for (u32 own = threadIdx.x; own < BLOCK; own += blockDim.x) {
        u64 i = from + own, at = i * step;
        u32 found = 0xffffffffu;
        if (at % each < limits[at / each] / sizeof(u32)) {
            if (value != 0) a[at] = value + (u32)i;
            found = a[at];
        }
        out[i] = found;
    }
}

static __device__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

extern "C" __global__ void conformance_spin(const u32* flag, u32* out, u32 limit_ms) {
    if (threadIdx.x != 0 || blockIdx.x != 0) return;
    u64 end = nanoseconds() + (u64)limit_ms * 1000000u;
    u32 seen = 0;
    while (seen == 0) {
        if (*(const volatile u32*)flag != 0) {
            seen = 1;
        } else if (nanoseconds() >= end) {
            seen = 2;
        }
    }
    // The host's writes before the flag are visible after it, and this write is visible to the
    // host.
    __threadfence_system();
    *(volatile u32*)out = seen;
    __threadfence_system();
}

extern "C" __global__ void conformance_trap() {
    asm volatile("trap;");
}

// The element after the end may belong to the same allocation, so this kernel writes 16 TiB
// further, where no memory is mapped.
extern "C" __global__ void conformance_out_of_bounds(u32* out) {
    *(volatile u32*)(out + (1ull << 42)) = 1;
}
