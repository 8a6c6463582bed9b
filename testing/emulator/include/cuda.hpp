// CUDA C++ on the host: what the operator library's sources use of the language, nothing else.

#pragma once

#include "fibers.hpp"

#define LEASEHOLD_EMULATED
#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static EMULATED_SHARED

struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline unsigned __float_as_uint(float f) { return emulator::bits_of(f); }
inline float __uint_as_float(unsigned u) { return emulator::float_of(u); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz((unsigned)v); }


namespace emulator {

// Takes the arguments of a kernel out of a buffer with the layout of a launch's, and runs all blocks.
template <class... A>
void launch(void (*kernel)(A...), const unsigned char* arguments, size_t size, const unsigned* grid, const unsigned* dim,
            bool reverse) {
    size_t at = 0;
    auto take = [&](auto* to) {
        using T = std::remove_pointer_t<decltype(to)>;
        at = (at + alignof(T) - 1) / alignof(T) * alignof(T);
        if (at + sizeof(T) > size) fail("fewer arguments than parameters");
        memcpy(static_cast<void*>(to), arguments + at, sizeof(T));
        at += sizeof(T);
    };
    std::tuple<A...> values;
    std::apply([&](auto&... each) { (take(&each), ...); }, values);
    if (at != size) fail("more arguments than parameters");
    auto body = [&] { std::apply(kernel, values); };
    run_grid(body, grid, dim, reverse);
}

}  // namespace emulator

#define threadIdx (emulator::block.running->index)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_dim)
#define gridDim (emulator::grid_dim)

// Blocks follow each other, so every write is seen and every operation is atomic.
inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* to, unsigned by) {
    const unsigned before = *to;
    *to += by;
    return before;
}

inline void __syncthreads() { emulator::meet(emulator::block.barrier); }

template <class T> inline T __shfl_xor_sync(unsigned, T v, int mask) {
    const unsigned lane = emulator::block.running->number % 32;
    return emulator::exchange(v)[lane ^ (unsigned)mask];
}
template <class T> inline T __shfl_up_sync(unsigned, T v, unsigned by) {
    const unsigned lane = emulator::block.running->number % 32;
    return emulator::exchange(v)[lane >= by ? lane - by : lane];
}
template <class T> inline T __shfl_sync(unsigned, T v, int from) { return emulator::exchange(v)[from % 32]; }
inline unsigned __ballot_sync(unsigned, bool v) {
    const unsigned* votes = emulator::exchange<unsigned>(v);
    unsigned all = 0;
    for (unsigned lane = 0; lane < 32; ++lane) all |= (votes[lane] & 1u) << lane;
    return all;
}
