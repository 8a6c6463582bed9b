// Inline PTX of Hopper's bulk copies, as the functions that `asm.rs` calls. The runtime includes the first half.

#pragma once

namespace emulator {

// A register of 64 bits, which the smaller ones are a part of.
typedef unsigned long long Register;

// The first element of a box: coordinates in elements.
struct Place {
    unsigned dimensions;
    int at[5];
    template <class... C> explicit Place(C... c) : dimensions(sizeof...(C)), at{(int)c...} {}
};

#pragma GCC visibility push(hidden)

// Addresses of shared memory are numbers of 32 bits, with the block of the cluster in the upper ones.
Register shared_address(Register generic);
Register generic_address(Register shared);
Register mapa(Register shared, Register rank);

void mbarrier_init(Register at, Register count);
void mbarrier_inval(Register at);
Register mbarrier_arrive(Register at, Register count = 1);
Register mbarrier_arrive_expect(Register at, Register bytes);
void mbarrier_expect(Register at, Register bytes);
// A look at a phase: that of a state, or that of a parity. A limit of time has no meaning here.
Register mbarrier_wait(Register at, Register state, Register = 0);
Register mbarrier_wait_parity(Register at, Register parity, Register = 0);

// Loads to the block of the addresses, or to several blocks of the cluster.
void bulk_load(Register to, Register from, Register bytes, Register barrier, Register blocks = 0);
void bulk_store(Register to, Register from, Register bytes);
void tensor_load(Register to, Register map, const Place& first, Register barrier, Register blocks = 0);
void tensor_store(Register map, const Place& first, Register from);
void bulk_commit();
void bulk_wait(Register groups);
void bulk_wait_read(Register groups);
void fence_proxy();

// Products of a warpgroup: elements as PTX names them, in the order f16, bf16, tf32. The last list has the two matrices, whether the
// sum so far counts, both signs, and whether each matrix is transposed. Words are the first matrix in registers.
void products_fence();
void products_commit();
void products_wait(Register groups);
void start_product(unsigned element, unsigned columns, float* const* sums, const unsigned* words, const Register (&of)[7]);

#pragma GCC visibility pop

}  // namespace emulator

#ifdef LEASEHOLD_EMULATED

// The form of a tensor map that the driver encodes. NVRTC has none, so a source may have its own.
#ifndef LEASEHOLD_OWN_TENSOR_MAP
typedef struct CUtensorMap_st {
    alignas(64) unsigned long long opaque[16];
} CUtensorMap;
#endif

inline size_t __cvta_generic_to_shared(const void* at) { return emulator::shared_address((emulator::Register)at); }
inline void* __cvta_shared_to_generic(size_t at) { return (void*)emulator::generic_address(at); }
inline size_t __cvta_generic_to_global(const void* at) { return (size_t)at; }
inline void* __cvta_global_to_generic(size_t at) { return (void*)at; }

namespace emulator {

template <class T> inline Register bits(T v) {
    static_assert(sizeof(T) <= 8, "a register has 8 bytes at most");
    Register all = 0;
    __builtin_memcpy(&all, &v, sizeof(T));
    return all;
}
template <class T> inline void assign(T& to, Register v) {
    static_assert(sizeof(T) <= 8, "a register has 8 bytes at most");
    __builtin_memcpy(&to, &v, sizeof(T));
}

inline Register same(Register v) { return v; }
inline Register low(Register v) { return (unsigned)v; }
// Two floats, the upper one first.
inline Register pair_of_bf16(Register upper, Register lower) {
    return (Register)to_bf16(float_of((unsigned)upper)) << 16 | to_bf16(float_of((unsigned)lower));
}
inline Register pair_of_f16(Register upper, Register lower) {
    return (Register)f32_to_f16(float_of((unsigned)upper)) << 16 | f32_to_f16(float_of((unsigned)lower));
}
inline Register select(Register yes, Register no, Register predicate) { return predicate ? yes : no; }
inline Register equal(Register a, Register b) { return (unsigned)a == (unsigned)b; }
inline Register unequal(Register a, Register b) { return (unsigned)a != (unsigned)b; }
// The lowest lane leads.
inline void elect(Register& leader, Register& own, Register mask) {
    const char none = 0;
    leader = (Register)__builtin_ctz(met(join((unsigned)mask, &none, 1, "elect.sync")));
    own = leader == lane();
}
// A sum stays in its variable, which the compiler must keep in memory.
template <class S> inline float* sum_at(S& sum) {
    static_assert(sizeof(S) == 4, "a register has 4 bytes");
    return (float*)&sum;
}
inline void cluster_wait() { await("barrier.cluster.wait"); }
template <class... A> inline void nothing(A...) {}

// The number of a type that a register holds.
template <class T> inline T of(Register v) {
    T number;
    __builtin_memcpy(&number, &v, sizeof(T));
    return number;
}
inline Register fenced(Register v) { return __threadfence(), v; }
inline Register warp() { return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) / 32; }

// A copy of a thread's own. It is over at once here, so a missing wait is not found.
inline void copy_async(Register to, Register from, Register bytes, Register present = ~0ull) {
    const char* source = (const char*)from;
    char* place = (char*)generic_address(to);
    bytes = (unsigned)bytes;
    for (unsigned i = 0; i < bytes; i += 4) *(unsigned*)(place + i) = i < present ? *(const unsigned*)(source + i) : 0;
}

// Matrices of 8 rows of 8 halves. The rows of the matrix i are at the addresses of the lanes from 8 * i on; each lane gets two
// neighbours of a row, or of a column.
template <bool TRANSPOSED, class... To> inline void load_matrices(Register at, To&... to) {
    unsigned matrix = 0;
    const auto load = [&](Register& register_) {
        const unsigned own = lane();
        unsigned pair = 0;
        for (unsigned half = 0; half < 2; ++half) {
            const unsigned row = TRANSPOSED ? own % 4 * 2 + half : own / 4, column = TRANSPOSED ? own / 4 : own % 4 * 2 + half;
            const unsigned place = __shfl_sync(~0u, (unsigned)at, (int)(matrix * 8 + row));
            pair |= (unsigned)*(const unsigned short*)generic_address(place + 2 * column) << 16 * half;
        }
        register_ = pair;
        ++matrix;
    };
    (load(to), ...);
}

// Pairs of short numbers, the second operand's in the lower half.
template <bool RELU> inline float cut(Register v) {
    const float f = of<float>(v);
    return RELU && f < 0 ? 0 : f;
}
template <bool RELU> inline Register f16x2(Register high, Register low) {
    return (Register)f32_to_f16(cut<RELU>(high)) << 16 | f32_to_f16(cut<RELU>(low));
}
template <bool RELU> inline Register bf16x2(Register high, Register low) {
    return (Register)to_bf16(cut<RELU>(high)) << 16 | to_bf16(cut<RELU>(low));
}
template <bool RELU> inline Register e4m3x2(Register high, Register low) {
    return (Register)to_fp8<3, -9, 0x7e>(cut<RELU>(high)) << 8 | to_fp8<3, -9, 0x7e>(cut<RELU>(low));
}
template <bool RELU> inline Register e5m2x2(Register high, Register low) {
    return (Register)to_fp8<2, -16, 0x7b>(cut<RELU>(high)) << 8 | to_fp8<2, -16, 0x7b>(cut<RELU>(low));
}

}  // namespace emulator

#endif
