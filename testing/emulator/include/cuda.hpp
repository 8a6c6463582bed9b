// CUDA C++ on the host: what a kernel's source finds declared, without any header of the system. `cuda_runtime.cpp` has what is not
// defined here.
//
// Clusters of blocks follow each other, and the threads of a cluster take turns at barriers, shuffles and votes. So every write is seen at
// once, and an atomic operation needs no help.

#pragma once

#include "conversions.hpp"

#define LEASEHOLD_EMULATED 1
#define __CUDACC__ 1
#define __CUDACC_RTC__ 1
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0

// Visible, so that the linker keeps the name.
#define __global__ __attribute__((visibility("default"))) __attribute__((emulated_kernel))
#define __launch_bounds__(threads, ...) __attribute__((emulated_threads(threads)))
#define __cluster_dims__(...) __attribute__((emulated_cluster(__VA_ARGS__)))
#define __device__
#define __host__
#define __constant__
// Each thread of the host has its own; the threads of a block are fibers of one.
#define __shared__ thread_local
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __maxnreg__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
#define __nv_pure__
#define EMULATOR_UNSEEN __attribute__((no_sanitize("thread")))

typedef decltype(sizeof(0)) size_t;
typedef decltype((char*)0 - (char*)0) ptrdiff_t;
typedef long clock_t;

// ---- Vectors

#define EMULATOR_VECTORS(T, NAME, TWO, FOUR)                                            \
    struct NAME##1 {                                                                    \
        T x;                                                                            \
    };                                                                                  \
    struct alignas(TWO) NAME##2 {                                                       \
        T x, y;                                                                         \
    };                                                                                  \
    struct NAME##3 {                                                                    \
        T x, y, z;                                                                      \
    };                                                                                  \
    struct alignas(FOUR) NAME##4 {                                                      \
        T x, y, z, w;                                                                   \
    };                                                                                  \
    inline NAME##1 make_##NAME##1(T x) { return {x}; }                                  \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                          \
    inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }                  \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATOR_VECTORS(signed char, char, 2, 4)
EMULATOR_VECTORS(unsigned char, uchar, 2, 4)
EMULATOR_VECTORS(short, short, 4, 8)
EMULATOR_VECTORS(unsigned short, ushort, 4, 8)
EMULATOR_VECTORS(int, int, 8, 16)
EMULATOR_VECTORS(unsigned, uint, 8, 16)
EMULATOR_VECTORS(long, long, 16, 16)
EMULATOR_VECTORS(unsigned long, ulong, 16, 16)
EMULATOR_VECTORS(long long, longlong, 16, 16)
EMULATOR_VECTORS(unsigned long long, ulonglong, 16, 16)
EMULATOR_VECTORS(float, float, 8, 16)
EMULATOR_VECTORS(double, double, 16, 16)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

// ---- What the runtime has

#pragma GCC visibility push(hidden)

// A thread never sees them change.
extern const uint3 threadIdx, blockIdx;
extern const dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace emulator {

struct Group;
[[noreturn]] void fail(const char* what, ...);
void meet(const char* what);
void arrive();
void await(const char* what);
void* of_block(const void* at, unsigned rank);
unsigned cluster_rank();
unsigned cluster_size();
struct Index {
    unsigned x, y, z;
};
Index cluster_shape();
Group* join(unsigned mask, const void* value, size_t size, const char* what);
// The value of a lane that has met the caller.
const void* of_lane(const Group* group, unsigned lane, size_t size);
void of_lanes(const Group* group, void* to, size_t size);
unsigned met(const Group* group);
unsigned lane();
unsigned active();
void pause();
void atomic(const volatile void* at, size_t size);
void fence();
void fence_of_block();
unsigned long long ticks();
template <class T> struct Same {
    typedef T type;
};

}  // namespace emulator

#pragma GCC visibility pop

extern "C" int printf(const char*, ...);

#ifdef NDEBUG
#define assert(condition) ((void)0)
#else
#define assert(condition) ((condition) ? (void)0 : emulator::fail("%s:%d: the assertion %s fails", __FILE__, __LINE__, #condition))
#endif
inline void __trap() { emulator::fail("__trap()"); }
inline void __brkpt() { emulator::fail("__brkpt()"); }
#define __builtin_assume(condition) ((void)0)
inline long long clock64() { return (long long)emulator::ticks(); }
inline clock_t clock() { return (clock_t)emulator::ticks(); }
inline unsigned long long globaltimer() { return emulator::ticks(); }
inline void __nanosleep(unsigned) { emulator::pause(); }

// ---- Barriers, fences, warps

inline void __syncthreads() { emulator::meet("__syncthreads"); }
inline void __cluster_barrier_arrive() { emulator::arrive(); }
inline void __cluster_barrier_wait() { emulator::await("__cluster_barrier_wait"); }
inline unsigned __clusterRelativeBlockRank() { return emulator::cluster_rank(); }
inline unsigned __clusterSizeInBlocks() { return emulator::cluster_size(); }
inline dim3 __clusterDim() {
    const emulator::Index of = emulator::cluster_shape();
    return {of.x, of.y, of.z};
}
inline dim3 __clusterRelativeBlockIdx() {
    const dim3 of = __clusterDim();
    return {blockIdx.x % of.x, blockIdx.y % of.y, blockIdx.z % of.z};
}
inline dim3 __clusterIdx() {
    const dim3 of = __clusterDim();
    return {blockIdx.x / of.x, blockIdx.y / of.y, blockIdx.z / of.z};
}
inline dim3 __clusterGridDimInClusters() {
    const dim3 of = __clusterDim();
    return {gridDim.x / of.x, gridDim.y / of.y, gridDim.z / of.z};
}
inline void* __cluster_map_shared_rank(const void* at, unsigned rank) { return emulator::of_block(at, rank); }
inline void __threadfence() { emulator::fence(); }
inline void __threadfence_block() { emulator::fence_of_block(); }
inline void __threadfence_system() { emulator::fence(); }
inline void __syncwarp(unsigned mask = ~0u) {
    char none = 0;
    emulator::join(mask, &none, 1, "__syncwarp");
}
inline unsigned __activemask() { return emulator::active(); }

namespace emulator {

// The number of threads of the block that say yes.
EMULATOR_UNSEEN inline unsigned count_block(bool v) {
    thread_local static unsigned count;
    count = 0;
    meet("__syncthreads_count");
    count += v;
    meet("__syncthreads_count");
    const unsigned all = count;
    meet("__syncthreads_count");
    return all;
}

template <class T> EMULATOR_UNSEEN inline T from_lane(Group* group, T own, unsigned lane) {
    if (!(met(group) >> lane & 1)) return own;
    T v;
    __builtin_memcpy(&v, of_lane(group, lane, sizeof(T)), sizeof(T));
    return v;
}
// Every lane of a whole warp gives a value, and gets all of them.
template <class T> inline void exchange(T value, T (&all)[32]) {
    static_assert(sizeof(T) <= 8, "a lane exchanges 8 bytes at most");
    of_lanes(join(~0u, &value, sizeof(T), "a shuffle"), all, sizeof(T));
}
template <class T> inline Group* shuffle(unsigned mask, const T& v, int width) {
    static_assert(sizeof(T) <= 8, "a shuffle moves 8 bytes at most");
    if (width < 1 || width > 32 || (width & (width - 1)) != 0) fail("a shuffle's width of %d; it is a power of two up to 32", width);
    return join(mask, &v, sizeof(T), "a shuffle");
}

}  // namespace emulator

inline int __syncthreads_count(int v) { return (int)emulator::count_block(v != 0); }
inline int __syncthreads_or(int v) { return emulator::count_block(v != 0) != 0; }
inline int __syncthreads_and(int v) { return emulator::count_block(v == 0) == 0; }

template <class T> inline T __shfl_sync(unsigned mask, T v, int from, int width = 32) {
    emulator::Group* group = emulator::shuffle(mask, v, width);
    const unsigned first = emulator::lane() & ~(unsigned)(width - 1);
    return emulator::from_lane(group, v, first + ((unsigned)from & (unsigned)(width - 1)));
}
template <class T> inline T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
    emulator::Group* group = emulator::shuffle(mask, v, width);
    const unsigned own = emulator::lane(), within = own & (unsigned)(width - 1);
    return within < by ? v : emulator::from_lane(group, v, own - by);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
    emulator::Group* group = emulator::shuffle(mask, v, width);
    const unsigned own = emulator::lane(), within = own & (unsigned)(width - 1);
    return by >= (unsigned)width - within ? v : emulator::from_lane(group, v, own + by);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T v, int with, int width = 32) {
    emulator::Group* group = emulator::shuffle(mask, v, width);
    const unsigned own = emulator::lane(), from = own ^ (unsigned)with;
    return from > (own | (unsigned)(width - 1)) ? v : emulator::from_lane(group, v, from);
}
inline unsigned __ballot_sync(unsigned mask, int v) {
    const unsigned char vote = v != 0;
    emulator::Group* group = emulator::join(mask, &vote, 1, "a vote");
    unsigned all = 0;
    for (unsigned lane = 0; lane < 32; ++lane) all |= (unsigned)emulator::from_lane<unsigned char>(group, 0, lane) << lane;
    return all;
}
inline int __any_sync(unsigned mask, int v) { return __ballot_sync(mask, v) != 0; }
inline int __all_sync(unsigned mask, int v) { return __ballot_sync(mask, v == 0) == 0; }
template <class T> inline unsigned __match_any_sync(unsigned mask, T v) {
    emulator::Group* group = emulator::shuffle(mask, v, 32);
    unsigned all = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (emulator::met(group) >> lane & 1) all |= (unsigned)(emulator::from_lane(group, v, lane) == v) << lane;
    }
    return all;
}
template <class T> inline unsigned __match_all_sync(unsigned mask, T v, int* same) {
    const unsigned all = __match_any_sync(mask, v);
    return (*same = __all_sync(mask, all == mask)) ? mask : 0;
}

namespace emulator {

template <class T, class F> inline T reduce(unsigned mask, T v, F f) {
    Group* group = join(mask, &v, sizeof(T), "a reduction");
    bool first = true;
    T all = v;
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (!(met(group) >> lane & 1)) continue;
        const T one = from_lane(group, v, lane);
        all = first ? one : f(all, one);
        first = false;
    }
    return all;
}

}  // namespace emulator

#define EMULATOR_REDUCTION(T, NAME, EXPRESSION) \
    inline T __reduce_##NAME##_sync(unsigned mask, T v) { return emulator::reduce(mask, v, [](T a, T b) -> T { return EXPRESSION; }); }
EMULATOR_REDUCTION(unsigned, add, a + b)
EMULATOR_REDUCTION(int, add, (int)((unsigned)a + (unsigned)b))
EMULATOR_REDUCTION(unsigned, min, b < a ? b : a)
EMULATOR_REDUCTION(int, min, b < a ? b : a)
EMULATOR_REDUCTION(unsigned, max, a < b ? b : a)
EMULATOR_REDUCTION(int, max, a < b ? b : a)
EMULATOR_REDUCTION(unsigned, and, a & b)
EMULATOR_REDUCTION(unsigned, or, a | b)
EMULATOR_REDUCTION(unsigned, xor, a ^ b)

// ---- Atomic operations

#define EMULATOR_ATOMIC(NAME, T, EXPRESSION)                                                        \
    EMULATOR_UNSEEN inline T NAME(T* at, T v) {                                                     \
        emulator::atomic(at, sizeof(T));                                                            \
        const T old = *at;                                                                          \
        *at = (EXPRESSION);                                                                         \
        return old;                                                                                 \
    }                                                                                               \
    inline T NAME##_block(T* at, T v) { return NAME(at, v); }                                       \
    inline T NAME##_system(T* at, T v) { return NAME(at, v); }
EMULATOR_ATOMIC(atomicAdd, int, (int)((unsigned)old + (unsigned)v))
EMULATOR_ATOMIC(atomicAdd, unsigned, old + v)
EMULATOR_ATOMIC(atomicAdd, unsigned long long, old + v)
EMULATOR_ATOMIC(atomicAdd, float, old + v)
EMULATOR_ATOMIC(atomicAdd, double, old + v)
EMULATOR_ATOMIC(atomicSub, int, (int)((unsigned)old - (unsigned)v))
EMULATOR_ATOMIC(atomicSub, unsigned, old - v)
EMULATOR_ATOMIC(atomicExch, int, v)
EMULATOR_ATOMIC(atomicExch, unsigned, v)
EMULATOR_ATOMIC(atomicExch, unsigned long long, v)
EMULATOR_ATOMIC(atomicExch, float, v)
EMULATOR_ATOMIC(atomicMin, int, v < old ? v : old)
EMULATOR_ATOMIC(atomicMin, unsigned, v < old ? v : old)
EMULATOR_ATOMIC(atomicMin, long long, v < old ? v : old)
EMULATOR_ATOMIC(atomicMin, unsigned long long, v < old ? v : old)
EMULATOR_ATOMIC(atomicMax, int, old < v ? v : old)
EMULATOR_ATOMIC(atomicMax, unsigned, old < v ? v : old)
EMULATOR_ATOMIC(atomicMax, long long, old < v ? v : old)
EMULATOR_ATOMIC(atomicMax, unsigned long long, old < v ? v : old)
EMULATOR_ATOMIC(atomicInc, unsigned, old >= v ? 0 : old + 1)
EMULATOR_ATOMIC(atomicDec, unsigned, old == 0 || old > v ? v : old - 1)
EMULATOR_ATOMIC(atomicAnd, int, old & v)
EMULATOR_ATOMIC(atomicAnd, unsigned, old & v)
EMULATOR_ATOMIC(atomicAnd, unsigned long long, old & v)
EMULATOR_ATOMIC(atomicOr, int, old | v)
EMULATOR_ATOMIC(atomicOr, unsigned, old | v)
EMULATOR_ATOMIC(atomicOr, unsigned long long, old | v)
EMULATOR_ATOMIC(atomicXor, int, old ^ v)
EMULATOR_ATOMIC(atomicXor, unsigned, old ^ v)
EMULATOR_ATOMIC(atomicXor, unsigned long long, old ^ v)

#define EMULATOR_CAS(T)                                                                                          \
    EMULATOR_UNSEEN inline T atomicCAS(T* at, T compare, T v) {                                                  \
        emulator::atomic(at, sizeof(T));                                                                         \
        const T old = *at;                                                                                       \
        if (old == compare) *at = v;                                                                             \
        return old;                                                                                              \
    }                                                                                                            \
    inline T atomicCAS_block(T* at, T compare, T v) { return atomicCAS(at, compare, v); }                        \
    inline T atomicCAS_system(T* at, T compare, T v) { return atomicCAS(at, compare, v); }
EMULATOR_CAS(int)
EMULATOR_CAS(unsigned)
EMULATOR_CAS(unsigned short)
EMULATOR_CAS(unsigned long long)

// ---- Memory

#define EMULATOR_LOAD(NAME) \
    template <class T> inline T NAME(const T* at) { return *at; }
EMULATOR_LOAD(__ldg)
EMULATOR_LOAD(__ldca)
EMULATOR_LOAD(__ldcg)
EMULATOR_LOAD(__ldcs)
EMULATOR_LOAD(__ldcv)
EMULATOR_LOAD(__ldlu)
#define EMULATOR_STORE(NAME) \
    template <class T> inline void NAME(T* at, typename emulator::Same<T>::type v) { *at = v; }
EMULATOR_STORE(__stwb)
EMULATOR_STORE(__stcg)
EMULATOR_STORE(__stcs)
EMULATOR_STORE(__stwt)
// The runtime looks at what they access.
extern "C" void* memcpy(void*, const void*, size_t) noexcept __asm__("emulator_memcpy");
extern "C" void* memset(void*, int, size_t) noexcept __asm__("emulator_memset");
extern "C" void* memmove(void*, const void*, size_t) noexcept __asm__("emulator_memmove");
extern "C" int memcmp(const void*, const void*, size_t) noexcept __asm__("emulator_memcmp");

// ---- Integers

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz((unsigned)v); }
inline int __clzll(long long v) { return v == 0 ? 64 : __builtin_clzll((unsigned long long)v); }
inline unsigned __brev(unsigned v) {
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) r |= (v >> i & 1u) << (31 - i);
    return r;
}
inline unsigned long long __brevll(unsigned long long v) {
    return (unsigned long long)__brev((unsigned)v) << 32 | __brev((unsigned)(v >> 32));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    const unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned pick = s >> (4 * i) & 15u, byte = (unsigned)(both >> (8 * (pick & 7u))) & 255u;
        r |= (pick & 8u ? (byte & 128u ? 255u : 0u) : byte) << (8 * i);
    }
    return r;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((unsigned long long)high << 32 | low) << (by & 31u) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (by & 31u));
}
inline int __mul24(int a, int b) { return (int)((unsigned)((int)((unsigned)a << 8) >> 8) * (unsigned)((int)((unsigned)b << 8) >> 8)); }
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffffu) * (b & 0xffffffu); }
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __sad(int a, int b, unsigned c) { return c + (a < b ? (unsigned)b - (unsigned)a : (unsigned)a - (unsigned)b); }
inline unsigned __usad(unsigned a, unsigned b, unsigned c) { return c + (a < b ? b - a : a - b); }
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += (int)(signed char)(a >> (8 * i)) * (int)(signed char)(b >> (8 * i));
    return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 4; ++i) c += (a >> (8 * i) & 255u) * (b >> (8 * i) & 255u);
    return c;
}
inline int __hadd(int a, int b) { return (int)(((long long)a + b) >> 1); }
inline unsigned __uhadd(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a + b) >> 1); }

#define EMULATOR_ORDER(T)                                  \
    inline T min(T a, T b) { return b < a ? b : a; }       \
    inline T max(T a, T b) { return a < b ? b : a; }
EMULATOR_ORDER(int)
EMULATOR_ORDER(unsigned)
EMULATOR_ORDER(long)
EMULATOR_ORDER(unsigned long)
EMULATOR_ORDER(long long)
EMULATOR_ORDER(unsigned long long)
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline double min(double a, double b) { return __builtin_fmin(a, b); }
inline double max(double a, double b) { return __builtin_fmax(a, b); }
extern "C" int abs(int) noexcept;
extern "C" long labs(long) noexcept;
extern "C" long long llabs(long long) noexcept;
inline long abs(long v) { return __builtin_labs(v); }
inline long long abs(long long v) { return __builtin_llabs(v); }

// ---- Bits and conversions

inline unsigned __float_as_uint(float f) { return emulator::bits_of(f); }
inline float __uint_as_float(unsigned u) { return emulator::float_of(u); }
inline int __float_as_int(float f) { return (int)emulator::bits_of(f); }
inline float __int_as_float(int i) { return emulator::float_of((unsigned)i); }
inline long long __double_as_longlong(double d) {
    long long v;
    __builtin_memcpy(&v, &d, 8);
    return v;
}
inline double __longlong_as_double(long long v) {
    double d;
    __builtin_memcpy(&d, &v, 8);
    return d;
}
inline int __double2hiint(double d) { return (int)(__double_as_longlong(d) >> 32); }
inline int __double2loint(double d) { return (int)__double_as_longlong(d); }

namespace emulator {

// A conversion of a device ends at the limits of the type, and gives 0 for what is no number.
template <class T> inline T within(double v, double least, double most, T low, T high) {
    if (v != v) return 0;
    if (v <= least) return low;
    if (v >= most) return high;
    return (T)v;
}
inline int to_int(double v) { return within<int>(v, -2147483648.0, 2147483647.0, -2147483647 - 1, 2147483647); }
inline unsigned to_uint(double v) { return within<unsigned>(v, 0.0, 4294967295.0, 0u, 4294967295u); }
inline long long to_longlong(double v) {
    return within<long long>(v, -9223372036854775808.0, 9223372036854775808.0, -9223372036854775807LL - 1, 9223372036854775807LL);
}
inline unsigned long long to_ulonglong(double v) { return within<unsigned long long>(v, 0.0, 18446744073709551616.0, 0, ~0ULL); }

}  // namespace emulator

#define EMULATOR_ROUNDINGS(FROM, T, NAME, TO)                                                       \
    inline TO FROM##2##NAME##_rn(T v) { return emulator::to_##NAME##_(__builtin_nearbyint(v)); }    \
    inline TO FROM##2##NAME##_rz(T v) { return emulator::to_##NAME##_(__builtin_trunc(v)); }        \
    inline TO FROM##2##NAME##_rd(T v) { return emulator::to_##NAME##_(__builtin_floor(v)); }        \
    inline TO FROM##2##NAME##_ru(T v) { return emulator::to_##NAME##_(__builtin_ceil(v)); }
namespace emulator {
inline int to_int_(double v) { return to_int(v); }
inline unsigned to_uint_(double v) { return to_uint(v); }
inline long long to_ll_(double v) { return to_longlong(v); }
inline unsigned long long to_ull_(double v) { return to_ulonglong(v); }
}  // namespace emulator
EMULATOR_ROUNDINGS(__float, float, int, int)
EMULATOR_ROUNDINGS(__float, float, uint, unsigned)
EMULATOR_ROUNDINGS(__float, float, ll, long long)
EMULATOR_ROUNDINGS(__float, float, ull, unsigned long long)
EMULATOR_ROUNDINGS(__double, double, int, int)
EMULATOR_ROUNDINGS(__double, double, uint, unsigned)
EMULATOR_ROUNDINGS(__double, double, ll, long long)
EMULATOR_ROUNDINGS(__double, double, ull, unsigned long long)
inline float __int2float_rn(int v) { return (float)v; }
inline float __uint2float_rn(unsigned v) { return (float)v; }
inline float __ll2float_rn(long long v) { return (float)v; }
inline float __ull2float_rn(unsigned long long v) { return (float)v; }
inline double __int2double_rn(int v) { return (double)v; }
inline float __double2float_rn(double v) { return (float)v; }

// ---- Mathematics: the host's functions, whose last bits may differ from a device's

#define EMULATOR_MATH_1(NAME)                                    \
    extern "C" double NAME(double) noexcept;                     \
    extern "C" float NAME##f(float) noexcept;                    \
    inline float NAME(float x) { return __builtin_##NAME##f(x); }
#define EMULATOR_MATH_2(NAME)                                                        \
    extern "C" double NAME(double, double) noexcept;                                 \
    extern "C" float NAME##f(float, float) noexcept;                                 \
    inline float NAME(float x, float y) { return __builtin_##NAME##f(x, y); }
EMULATOR_MATH_1(acos)
EMULATOR_MATH_1(acosh)
EMULATOR_MATH_1(asin)
EMULATOR_MATH_1(asinh)
EMULATOR_MATH_1(atan)
EMULATOR_MATH_1(atanh)
EMULATOR_MATH_1(cbrt)
EMULATOR_MATH_1(ceil)
EMULATOR_MATH_1(cos)
EMULATOR_MATH_1(cosh)
EMULATOR_MATH_1(erf)
EMULATOR_MATH_1(erfc)
EMULATOR_MATH_1(exp)
EMULATOR_MATH_1(exp2)
EMULATOR_MATH_1(expm1)
EMULATOR_MATH_1(fabs)
EMULATOR_MATH_1(floor)
EMULATOR_MATH_1(lgamma)
EMULATOR_MATH_1(log)
EMULATOR_MATH_1(log10)
EMULATOR_MATH_1(log1p)
EMULATOR_MATH_1(log2)
EMULATOR_MATH_1(logb)
EMULATOR_MATH_1(nearbyint)
EMULATOR_MATH_1(rint)
EMULATOR_MATH_1(round)
EMULATOR_MATH_1(sin)
EMULATOR_MATH_1(sinh)
EMULATOR_MATH_1(sqrt)
EMULATOR_MATH_1(tan)
EMULATOR_MATH_1(tanh)
EMULATOR_MATH_1(tgamma)
EMULATOR_MATH_1(trunc)
EMULATOR_MATH_2(atan2)
EMULATOR_MATH_2(copysign)
EMULATOR_MATH_2(fdim)
EMULATOR_MATH_2(fmax)
EMULATOR_MATH_2(fmin)
EMULATOR_MATH_2(fmod)
EMULATOR_MATH_2(hypot)
EMULATOR_MATH_2(nextafter)
EMULATOR_MATH_2(pow)
EMULATOR_MATH_2(remainder)
extern "C" double fma(double, double, double) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
extern "C" double ldexp(double, int) noexcept;
extern "C" float ldexpf(float, int) noexcept;
extern "C" double scalbn(double, int) noexcept;
extern "C" float scalbnf(float, int) noexcept;
extern "C" double frexp(double, int*) noexcept;
extern "C" float frexpf(float, int*) noexcept;
extern "C" double modf(double, double*) noexcept;
extern "C" float modff(float, float*) noexcept;
extern "C" int ilogb(double) noexcept;
extern "C" int ilogbf(float) noexcept;
extern "C" long lroundf(float) noexcept;
extern "C" long lrintf(float) noexcept;
extern "C" long long llroundf(float) noexcept;
extern "C" long long llrintf(float) noexcept;
extern "C" long lround(double) noexcept;
extern "C" long lrint(double) noexcept;
extern "C" double nan(const char*) noexcept;
extern "C" float nanf(const char*) noexcept;
inline float abs(float v) { return __builtin_fabsf(v); }
inline double abs(double v) { return __builtin_fabs(v); }
inline float pow(float x, int n) { return __builtin_powf(x, (float)n); }
inline double pow(double x, int n) { return __builtin_pow(x, (double)n); }
inline float powif(float x, int n) { return __builtin_powif(x, n); }
inline double powi(double x, int n) { return __builtin_powi(x, n); }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float rcbrtf(float x) { return 1.0f / __builtin_cbrtf(x); }
inline float rhypotf(float x, float y) { return 1.0f / __builtin_hypotf(x, y); }
inline float norm3df(float x, float y, float z) { return __builtin_sqrtf(x * x + y * y + z * z); }
inline float norm4df(float x, float y, float z, float w) { return __builtin_sqrtf(x * x + y * y + z * z + w * w); }
inline float exp10f(float x) { return (float)__builtin_pow(10.0, (double)x); }
inline double exp10(double x) { return __builtin_pow(10.0, x); }
inline float sinpif(float x) { return (float)__builtin_sin(3.14159265358979323846 * (double)x); }
inline float cospif(float x) { return (float)__builtin_cos(3.14159265358979323846 * (double)x); }
inline double sinpi(double x) { return __builtin_sin(3.14159265358979323846 * x); }
inline double cospi(double x) { return __builtin_cos(3.14159265358979323846 * x); }
inline void sincosf(float x, float* s, float* c) { *s = __builtin_sinf(x), *c = __builtin_cosf(x); }
inline void sincos(double x, double* s, double* c) { *s = __builtin_sin(x), *c = __builtin_cos(x); }
inline void sincospif(float x, float* s, float* c) { *s = sinpif(x), *c = cospif(x); }
inline float normcdff(float x) { return 0.5f * __builtin_erfcf(-x * 0.70710678118654752440f); }
inline double normcdf(double x) { return 0.5 * __builtin_erfc(-x * 0.70710678118654752440); }
#define EMULATOR_CLASS(NAME)                                        \
    inline bool NAME(float x) { return __builtin_##NAME(x); }       \
    inline bool NAME(double x) { return __builtin_##NAME(x); }
EMULATOR_CLASS(isnan)
EMULATOR_CLASS(isinf)
EMULATOR_CLASS(isfinite)
EMULATOR_CLASS(signbit)

inline float __expf(float x) { return __builtin_expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return __builtin_logf(x); }
inline float __log2f(float x) { return __builtin_log2f(x); }
inline float __log10f(float x) { return __builtin_log10f(x); }
inline float __powf(float x, float y) { return __builtin_powf(x, y); }
inline float __sinf(float x) { return __builtin_sinf(x); }
inline float __cosf(float x) { return __builtin_cosf(x); }
inline float __tanf(float x) { return __builtin_tanf(x); }
inline float __tanhf(float x) { return __builtin_tanhf(x); }
inline void __sincosf(float x, float* s, float* c) { sincosf(x, s, c); }
inline float __fdividef(float x, float y) { return x / y; }
inline float fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }

// ---- Products of matrices by a warp (`mma.sync`), which `asm.rs` calls

namespace emulator {

template <class T> inline unsigned word(const T& v) {
    static_assert(sizeof(T) == 4, "a register has 4 bytes");
    unsigned u;
    __builtin_memcpy(&u, &v, 4);
    return u;
}
template <class T> inline void put(T& to, unsigned u) {
    static_assert(sizeof(T) == 4, "a register has 4 bytes");
    __builtin_memcpy(&to, &u, 4);
}

// Types of elements: their bits, and their value.
#define EMULATOR_ELEMENT(NAME, BITS, VALUE)                     \
    struct NAME {                                               \
        static constexpr unsigned bits = BITS;                  \
        static float value(unsigned u) { return VALUE; }        \
    };
EMULATOR_ELEMENT(F16, 16, f16_to_f32((unsigned short)u))
EMULATOR_ELEMENT(Bf16, 16, from_bf16((unsigned short)u))
// The product looks at 19 of the bits.
EMULATOR_ELEMENT(Tf32, 32, float_of(u & 0xffffe000u))
EMULATOR_ELEMENT(F32, 32, float_of(u))
EMULATOR_ELEMENT(E4m3, 8, (from_fp8<3, -9, 0x7e>((unsigned char)u)))
EMULATOR_ELEMENT(E5m2, 8, (from_fp8<2, -16, 0x7b>((unsigned char)u)))

// d = a * b + c with 16 rows, 8 columns and K products an element. Lane 4 * n + i has parts of rows n and n + 8, and of column n. A word has
// neighbours of a row of `a`, or of a column of `b`; four lanes have the next words. The sum is one of doubles.
template <class T, class S, unsigned K, unsigned A, unsigned B, unsigned C>
EMULATOR_UNSEEN inline void product(const unsigned (&a)[A], const unsigned (&b)[B], const unsigned (&c)[C], unsigned (&d)[C]) {
    constexpr unsigned each = 32 / T::bits, groups = K / (4 * each), sums = 32 / S::bits;
    static_assert(A == 2 * groups && B == groups && C == 4 / sums, "a product with another number of registers");
    if (active() != ~0u) fail("a product of a warp (mma.sync) that not all of its 32 threads reach");
    unsigned all_a[A][32], all_b[B][32];
    for (unsigned w = 0; w < A; ++w) exchange(a[w], all_a[w]);
    for (unsigned w = 0; w < B; ++w) exchange(b[w], all_b[w]);
    const auto value = [](unsigned u, unsigned at) { return T::value(each == 1 ? u : u >> at * T::bits & ((1u << T::bits % 32) - 1u)); };
    const unsigned own = lane();
    unsigned out[4];
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned half = i / 2, row = own / 4, column = own % 4 * 2 + i % 2;
        const unsigned before = c[i / sums] >> i % sums * S::bits;
        double sum = S::value(sums == 1 ? before : before & 0xffffu);
        for (unsigned k = 0; k < K; ++k) {
            const unsigned group = k / (4 * each), from = k / each % 4, at = k % each;
            sum += (double)value(all_a[half + 2 * group][row * 4 + from], at) * value(all_b[group][column * 4 + from], at);
        }
        out[i] = sums == 1 ? bits_of((float)sum) : f32_to_f16(to_odd(sum));
    }
    for (unsigned i = 0; i < C; ++i) d[i] = sums == 1 ? out[i] : out[2 * i] | out[2 * i + 1] << 16;
}

}  // namespace emulator

#include "ptx.hpp"

// ---- The table of a source's kernels, which the emulator reads

namespace emulator {

struct Param {
    // Bit 31 of the size: it is a pointer.
    unsigned offset, size;
};
constexpr unsigned PARAMS = 64;
struct Params {
    unsigned count;
    Param of[PARAMS];
};
// As large as its alignment, so that nothing lies between two.
struct alignas(64) Kernel {
    void (*function)();
    void (*call)(const unsigned char*);
    unsigned threads;
    // The blocks of a cluster in each direction.
    unsigned cluster[3];
    Params params;
};

template <unsigned X = 1, unsigned Y = 1, unsigned Z = 1> struct Cluster {
    static constexpr unsigned x = X, y = Y, z = Z;
};

template <class T> constexpr bool is_pointer = false;
template <class T> constexpr bool is_pointer<T*> = true;
template <class T> constexpr bool is_pointer<T* const> = true;

template <class... A> constexpr Params params_of() {
    static_assert(sizeof...(A) <= PARAMS, "not emulated: a kernel with more than 64 parameters");
    Params all = {};
    unsigned end = 0;
    ((end = (end + alignof(A) - 1) / alignof(A) * alignof(A), all.of[all.count].offset = end,
      all.of[all.count].size = (unsigned)sizeof(A) | (is_pointer<A> ? 1u << 31 : 0u), ++all.count, end += sizeof(A)),
     ...);
    return all;
}

template <auto F> struct Of;
template <class... A, void (*F)(A...)> struct Of<F> {
    static constexpr Params params = params_of<A...>();
    template <unsigned... I> struct Places {};
    template <unsigned... I> EMULATOR_UNSEEN static void at(const unsigned char* words, Places<I...>) {
        F(*(const A*)(words + params.of[I].offset)...);
    }
    EMULATOR_UNSEEN static void call(const unsigned char* words) { at(words, Places<__integer_pack((unsigned)sizeof...(A))...>()); }
};

}  // namespace emulator
