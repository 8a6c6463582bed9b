// Kernels of the driver traces and of the first figures. Compiled to kernels.ptx by NVRTC 13.0, as the operators' kernels are.

typedef unsigned int u32;
typedef unsigned long long u64;

// out[i] = a[i] + b[i] for i < n.
extern "C" __global__ void trace_add(const u32* a, const u32* b, u32* out, u32 n) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        out[i] = a[i] + b[i];
    }
}

struct Params {
    u64 value;
    u32 count;
    u32 step;
};

// at[i] = value + i * step for i < count, by one thread: a struct as parameter.
extern "C" __global__ void trace_store(u64* at, Params p) {
    for (u32 i = 0; i < p.count; ++i) {
        at[i] = p.value + (u64)i * p.step;
    }
}

// Blocks of at most 64 threads.
extern "C" __global__ void __launch_bounds__(64) trace_small(u32* out) {
    out[threadIdx.x] = threadIdx.x;
}

// Uses dynamic shared memory: out[0] = the sum of what all threads of the block put there.
extern "C" __global__ void trace_shared(u32* out, u32 words) {
    extern __shared__ u32 scratch[];
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) {
        scratch[i] = i;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 sum = 0;
        for (u32 i = 0; i < words; ++i) {
            sum += scratch[i];
        }
        out[0] = sum;
    }
}

// Does nothing with three buffers: what a launch costs.
extern "C" __global__ void trace_nothing(u32* a, u32* b, u32* c) {}

// Writes where nothing is mapped.
extern "C" __global__ void trace_illegal(u32* unused) {
    *(volatile u32*)0x100000000000ull = 1;
}

// Runs a trap.
extern "C" __global__ void trace_trap(u32* unused) {
    asm volatile("trap;");
}

// Writes a word at an odd address.
extern "C" __global__ void trace_misaligned(u32* at) {
    *(volatile u32*)((char*)at + 1) = 1;
}

// Counts a word down.
extern "C" __global__ void trace_down(u32* left) {
    *left -= 1;
}
