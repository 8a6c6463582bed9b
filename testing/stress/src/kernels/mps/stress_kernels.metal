// The stress's kernels for Metal, under the names and with the arguments of `Kernel`: the bindings
// in order, then the parameters: the number of elements, two words.
//
// A threadgroup serves 64 elements whatever its size.
#include <metal_stdlib>
using namespace metal;

#define BLOCK 64u
#define EACH(i, n)                            \
    ulong from = ulong(group.x) * BLOCK;      \
    for (ulong i = from + own; i < from + BLOCK && i < n; i += size.x)

struct Params {
    uint n;
    uint first;
    uint second;
};

kernel void stress_add(device const uint* a [[buffer(0)]],
                       device const uint* b [[buffer(1)]],
                       device uint* out [[buffer(2)]],
                       constant Params& p [[buffer(3)]],
                       uint3 group [[threadgroup_position_in_grid]],
                       uint own [[thread_index_in_threadgroup]],
                       uint3 size [[threads_per_threadgroup]]) {
    EACH(i, p.n) out[i] = a[i] + b[i];
}

kernel void stress_mask(device uint* x [[buffer(0)]],
                        constant Params& p [[buffer(1)]],
                        uint3 group [[threadgroup_position_in_grid]],
                        uint own [[thread_index_in_threadgroup]],
                        uint3 size [[threads_per_threadgroup]]) {
    EACH(i, p.n) x[i] ^= p.first + uint(i) * p.second;
}

kernel void stress_scale(device const uint* in [[buffer(0)]],
                         device uint* out [[buffer(1)]],
                         constant Params& p [[buffer(2)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint own [[thread_index_in_threadgroup]],
                         uint3 size [[threads_per_threadgroup]]) {
    EACH(i, p.n) out[i] = in[i] * p.first + p.second;
}

kernel void stress_gather(device const uint* values [[buffer(0)]],
                          device const uint* places [[buffer(1)]],
                          device uint* out [[buffer(2)]],
                          constant Params& p [[buffer(3)]],
                          uint3 group [[threadgroup_position_in_grid]],
                          uint own [[thread_index_in_threadgroup]],
                          uint3 size [[threads_per_threadgroup]]) {
    EACH(i, p.n) out[i] = values[places[i] % p.first];
}
