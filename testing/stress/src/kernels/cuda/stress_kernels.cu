// The stress's kernels for CUDA, under the names and with the arguments of `Kernel`: the addresses of the bindings in order, then the
// parameters: the number of elements, two words.
//
// A block serves 64 elements whatever its size.

typedef unsigned int u32;
typedef unsigned long long u64;

#define BLOCK 64u
#define EACH(i, n) \
    u64 from = (u64)blockIdx.x * BLOCK; \
    for (u64 i = from + threadIdx.x; i < from + BLOCK && i < n; i += blockDim.x)

extern "C" __global__ void stress_add(const u32* a, const u32* b, u32* out, u32 n, u32, u32) {
    EACH(i, n) out[i] = a[i] + b[i];
}

extern "C" __global__ void stress_mask(u32* x, u32 n, u32 mask, u32 step) {
    EACH(i, n) x[i] ^= mask + (u32)i * step;
}

// The last word says which bindings the launch lets it read early. It reads none early, and the race
// detector takes all that it may for what it does.
extern "C" __global__ void stress_scale(const u32* from_, u32* out, u32 n, u32 factor, u32 term, u32) {
    EACH(i, n) out[i] = from_[i] * factor + term;
}

extern "C" __global__ void stress_gather(const u32* values, const u32* places, u32* out, u32 n, u32 count, u32) {
    EACH(i, n) out[i] = values[places[i] % count];
}
