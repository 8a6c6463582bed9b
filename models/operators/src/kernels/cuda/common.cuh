// Common part of the operator library's CUDA kernels, which the compiling code prepends to each
// file.
//
// This file includes no header, because the run-time compiler needs none. The compiler option
// --fmad=false fuses a product with a sum only at an explicit `fmaf`, so every compiler gives equal
// results. A kernel takes the addresses of its operands in the order of the CPU kernel's signature,
// then the CPU kernel's parameters. The host checks shapes, sizes and alignment before a launch;
// the kernels check values from device memory.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;

// ---- Parameters: the same words as the Rust structures of these names. A test compares the two texts.

struct LinearParams {
    u32 m;
    u32 k;
    u32 n[3];
    u32 ldx;
    u32 ldy[3];
    float eps;
    u32 x;
    u32 w;
    u32 y;
    u32 vector;
    u32 flags;
};

struct NormParams {
    u32 rows;
    u32 k;
    u32 ldx;
    u32 ldy;
    float eps;
    u32 x;
    u32 weight;
};

struct CacheLayout {
    u32 position;
    u32 head;
    u32 part;
    u32 offset;
    u32 keys;
    u32 values;
    u32 next;
    u32 limits;
};

struct RopeParams {
    u32 m;
    u32 heads;
    u32 kv_heads;
    u32 head_dim;
    u32 rotary;
    u32 positions;
    u32 ld[3];
    u32 x;
    u32 cache;
    CacheLayout layout;
};

struct AttentionParams {
    u32 m;
    u32 heads;
    u32 kv_heads;
    u32 head_dim;
    u32 positions;
    u32 ldq;
    u32 ldo;
    float scale;
    u32 x;
    u32 cache;
    u32 rotary;
    CacheLayout layout;
};

struct EmbeddingParams {
    u32 m;
    u32 vocabulary;
    u32 k;
    u32 ldy;
    u32 table;
    u32 y;
};

struct ElementwiseParams {
    u32 rows;
    u32 k;
    u32 ld[3];
    u32 x;
    u32 y;
};

struct FillParams {
    u32 bytes[2];
    u32 width;
    u32 pattern;
};

struct CopyParams {
    u32 rows;
    u32 bytes;
    u32 from_pitch;
    u32 to_pitch;
};

struct NotFiniteParams {
    u32 count[2];
    u32 width;
    u32 exponent;
};

struct RowParams {
    u32 rows;
    u32 n;
    u32 ldx;
    u32 ldy;
    u32 x;
    u32 y;
};

struct NextTokenParams {
    u32 rows;
    u32 n;
    u32 ld;
    u32 ring;
    u32 log_ring;
};

struct AdvanceParams {
    u32 rows;
    u32 step;
    u32 ring;
};

struct SamplingRecord {
    float temperature;
    u32 top_k;
    float top_p;
    float min_p;
    u32 seed[2];
    u32 log_probabilities;
    u32 reserved;
};

struct LogProbabilities {
    float chosen;
    i32 ids[20];
    float values[20];
};

// ---- Threads. Blocks have a multiple of 32 threads; those of all kernels but the matrix products have one dimension.

#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
// At least `blocks` of which run on a processor at a time.
#define DENSE_KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
// In clusters of `blocks`, from compute capability 9.0 on.
#define CLUSTER_KERNEL(threads, blocks) KERNEL(threads) __cluster_dims__(blocks, 1, 1)
#define INLINE static __device__ __forceinline__

static constexpr u32 WARP = 32;
static constexpr u32 ALL = 0xffffffffu;

// Programmatic dependent launch, from compute capability 9.0 on: the next kernel of a graph may start
// while this one runs. Every kernel calls `begin`, or its two parts, before it returns. Before
// `wait_for_previous` a kernel writes no memory of its operands, and reads only what its launch lets it
// read early.
INLINE void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Returns when the kernels before this one are over and their writes are visible.
INLINE void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

INLINE void begin() {
    let_next_start();
    wait_for_previous();
}

// Asks the L2 cache for the line of an operand. The kernel gets no value, so this may go before
// `wait_for_previous`.
INLINE void prefetch(const void* p) {
#ifndef LEASEHOLD_EMULATED
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

INLINE u32 thread_index() { return threadIdx.y * blockDim.x + threadIdx.x; }
INLINE u32 thread_count() { return blockDim.x * blockDim.y; }

INLINE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
INLINE u64 smaller(u64 a, u64 b) { return a < b ? a : b; }
INLINE u32 larger(u32 a, u32 b) { return a > b ? a : b; }

// Every lane gets the same bits: each step adds the same two numbers on both sides.
template <class T> INLINE T warp_sum(T v) {
    for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(ALL, v, step);
    return v;
}

// The largest value without NaN; -infinity if no value is left.
INLINE float warp_max(float v) {
    for (int step = 16; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(ALL, v, step));
    return v;
}

// `scratch` has a place for each warp. All threads of the block take part and get the same bits.
INLINE float block_sum(float v, float* scratch) {
    u32 t = thread_index(), warps = thread_count() / WARP;
    v = warp_sum(v);
    if (t % WARP == 0) scratch[t / WARP] = v;
    __syncthreads();
    float sum = 0.0f;
    for (u32 w = 0; w < warps; ++w) sum += scratch[w];
    __syncthreads();
    return sum;
}

INLINE float block_max(float v, float* scratch) {
    u32 t = thread_index(), warps = thread_count() / WARP;
    v = warp_max(v);
    if (t % WARP == 0) scratch[t / WARP] = v;
    __syncthreads();
    float max = scratch[0];
    for (u32 w = 1; w < warps; ++w) max = fmaxf(max, scratch[w]);
    __syncthreads();
    return max;
}

// ---- Elements: f32, bf16 and f16, computed with in f32.

INLINE float not_a_number() { return __uint_as_float(0x7fc00000u); }
INLINE float infinity() { return __uint_as_float(0x7f800000u); }

#ifndef LEASEHOLD_EMULATED
INLINE float f16_to_f32(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

INLINE u16 f32_to_f16(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
#endif

// Four floats of shared memory, aligned to 16 bytes, in one instruction. The vector read is
// explicit, because the compiler's own detection of adjacent loads does not always give the same
// text.
INLINE float4 shared_four(const float* p) {
#ifndef LEASEHOLD_EMULATED
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(__cvta_generic_to_shared(p))
                 : "memory");
    return v;
#else
    return *(const float4*)p;
#endif
}

struct F32 {
    typedef float raw;
    static __device__ __forceinline__ float widen(raw r) { return r; }
    static __device__ __forceinline__ raw narrow(float f) { return f; }
    static __device__ __forceinline__ void unpack(u32 word, float* to) { to[0] = __uint_as_float(word); }
    static __device__ __forceinline__ u32 pack(const float* from) { return __float_as_uint(from[0]); }
};

struct Bf16 {
    typedef u16 raw;
    static __device__ __forceinline__ float widen(raw r) { return __uint_as_float((u32)r << 16); }
    // Rounds to nearest even; a NaN stays a NaN.
    static __device__ __forceinline__ raw narrow(float f) {
        u32 bits = __float_as_uint(f);
        if ((bits & 0x7fffffffu) > 0x7f800000u) return (raw)((bits >> 16) | 0x40u);
        return (raw)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
    static __device__ __forceinline__ void unpack(u32 word, float* to) {
        to[0] = __uint_as_float(word << 16);
        to[1] = __uint_as_float(word & 0xffff0000u);
    }
    static __device__ __forceinline__ u32 pack(const float* from) {
        return (u32)narrow(from[0]) | ((u32)narrow(from[1]) << 16);
    }
};

struct F16 {
    typedef u16 raw;
    static __device__ __forceinline__ float widen(raw r) { return f16_to_f32(r); }
    static __device__ __forceinline__ raw narrow(float f) { return f32_to_f16(f); }
    static __device__ __forceinline__ void unpack(u32 word, float* to) {
        to[0] = f16_to_f32((u16)word);
        to[1] = f16_to_f32((u16)(word >> 16));
    }
    static __device__ __forceinline__ u32 pack(const float* from) {
        return (u32)narrow(from[0]) | ((u32)narrow(from[1]) << 16);
    }
};

// Elements `at` to `at + N`. N is 1, or the number for 8, 16 or 32 bytes, which are aligned to
// their size, at most 16.
template <class T, int N> INLINE void load(const void* base, u64 at, float (&v)[N]) {
    const typename T::raw* p = (const typename T::raw*)base + at;
    const int bytes = N * (int)sizeof(typename T::raw), each = 4 / (int)sizeof(typename T::raw);
    if constexpr (N == 1) {
        v[0] = T::widen(p[0]);
    } else if constexpr (bytes % 16 == 0) {
#pragma unroll
        for (int i = 0; i < bytes / 16; ++i) {
            uint4 q = ((const uint4*)p)[i];
            T::unpack(q.x, v + 4 * i * each);
            T::unpack(q.y, v + (4 * i + 1) * each);
            T::unpack(q.z, v + (4 * i + 2) * each);
            T::unpack(q.w, v + (4 * i + 3) * each);
        }
    } else {
        static_assert(bytes == 8, "vectors have 8 bytes or a multiple of 16");
        uint2 q = *(const uint2*)p;
        T::unpack(q.x, v);
        T::unpack(q.y, v + each);
    }
}

template <class T, int N> INLINE void store(void* base, u64 at, const float (&v)[N]) {
    typename T::raw* p = (typename T::raw*)base + at;
    const int bytes = N * (int)sizeof(typename T::raw), each = 4 / (int)sizeof(typename T::raw);
    if constexpr (N == 1) {
        p[0] = T::narrow(v[0]);
    } else if constexpr (bytes % 16 == 0) {
#pragma unroll
        for (int i = 0; i < bytes / 16; ++i) {
            const float* from = v + 4 * i * each;
            ((uint4*)p)[i] =
                make_uint4(T::pack(from), T::pack(from + each), T::pack(from + 2 * each), T::pack(from + 3 * each));
        }
    } else {
        static_assert(bytes == 8, "vectors have 8 bytes or a multiple of 16");
        *(uint2*)p = make_uint2(T::pack(v), T::pack(v + each));
    }
}

// The number of a type in parameters: 0 for f32, this one for bf16, 2 for f16.
static constexpr u32 BF16 = 1;

// Like the above, for a type that a parameter names. All threads take the same branch.
template <int N> INLINE void load(u32 dtype, const void* base, u64 at, float (&v)[N]) {
    if (dtype == 0) load<F32, N>(base, at, v);
    else if (dtype == 1) load<Bf16, N>(base, at, v);
    else load<F16, N>(base, at, v);
}

template <int N> INLINE void store(u32 dtype, void* base, u64 at, const float (&v)[N]) {
    if (dtype == 0) store<F32, N>(base, at, v);
    else if (dtype == 1) store<Bf16, N>(base, at, v);
    else store<F16, N>(base, at, v);
}

INLINE float load_one(u32 dtype, const void* base, u64 at) {
    float v[1];
    load(dtype, base, at, v);
    return v[0];
}

INLINE void store_one(u32 dtype, void* base, u64 at, float x) {
    float v[1] = {x};
    store(dtype, base, at, v);
}

INLINE u32 size_of(u32 dtype) { return dtype == 0 ? 4 : 2; }

INLINE u64 address(const void* p) { return (u64)p; }

// True if rows, `ld` elements apart, can be read four elements at a time.
INLINE bool by_four(u32 dtype, const void* base, u32 ld) {
    return address(base) % (4 * size_of(dtype)) == 0 && ld % 4 == 0;
}

// The number of elements of a step of `along`.
template <int N> struct Step {
    enum { n = N };
};

// Calls `f(i, Step<4> or Step<1>)` so that the block's threads cover `n` elements. An element
// always belongs to the same thread.
template <class F> INLINE void along(u32 n, bool wide, F f) {
    u32 t = thread_index(), threads = thread_count();
    u32 whole = wide ? n / 4 : 0;
    for (u32 i = t; i < whole; i += threads) f(4 * i, Step<4>());
    for (u32 i = 4 * whole + t; i < n; i += threads) f(i, Step<1>());
}

// Fills a row with NaN, the result for an invalid position or id.
INLINE void poison(u32 dtype, void* base, u64 at, u32 n) {
    for (u32 i = thread_index(); i < n; i += thread_count()) store_one(dtype, base, at + i, not_a_number());
}

// ---- Functions

// e^x with the steps of the CPU: within 2 units in the last place, 0 below 2^-125, infinite above
// the range.
INLINE float exponential(float x) {
    x = -87.33f > x ? -87.33f : x;
    x = 89.0f < x ? 89.0f : x;
    float n = fmaf(x, 1.44269504088896340736f, 12582912.0f) - 12582912.0f;
    float r = fmaf(n, -355.0f / 512.0f, x);
    r = fmaf(n, 2.1219444e-4f, r);
    float p = 1.0f / 5040.0f;
    p = fmaf(p, r, 1.0f / 720.0f);
    p = fmaf(p, r, 1.0f / 120.0f);
    p = fmaf(p, r, 1.0f / 24.0f);
    p = fmaf(p, r, 1.0f / 6.0f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    // 2^n in two factors. A NaN has passed through p, and its conversion is defined as 0.
    i32 exponent = x == x ? (i32)(n - 1.0f) : 0;
    return (p + p) * __uint_as_float((u32)(exponent + 127) << 23);
}

// 2^x, with a relative error of 2^-22; 0 for -infinity.
INLINE float power_of_two(float x) {
#ifndef LEASEHOLD_EMULATED
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

INLINE float silu(float x) { return x / (1.0f + exponential(0.0f - x)); }

// The position of row `row` of a launch, or `limit` if the device word holds no position below it.
INLINE u32 position_of(const void* word, u32 row, u32 limit) {
    i32 first = *(const i32*)word;
    if (first < 0) return limit;
    u64 at = (u64)first + row;
    return at < limit ? (u32)at : limit;
}

// ---- Caches

// The first element of a head, at position 0, where the first sequence's part is `first`.
INLINE u64 head_at(const CacheLayout& l, u32 first, u32 sequence, u32 head, u32 dim) {
    return (((u64)first + (u64)sequence * l.next) * l.part + l.offset + (u64)head * l.head) * dim;
}

// The operand with the values: the key cache, where both are in one memory.
template <class P> INLINE P values_in(const CacheLayout& l, P keys, P values) { return l.limits == 0 ? values : keys; }

// The bytes of a sequence's parts that have memory, and those at their beginnings that other sequences share, which
// nobody writes. A reader waits for them when it needs them.
struct Memory {
    u64 keys;
    u64 values;
    u64 shared_keys;
    u64 shared_values;
    __device__ __forceinline__ bool has(u64 end) const { return end <= keys && end <= values; }
    __device__ __forceinline__ bool owns(u64 begin) const { return begin >= shared_keys && begin >= shared_values; }
};

template <class P> INLINE Memory memory_of(const P& p, const void* limits, u32 sequence) {
    const CacheLayout& l = p.layout;
    if (l.limits == 0) return {~0ull, ~0ull, 0, 0};
    const u64* words = (const u64*)limits + (u64)sequence * l.next;
    return {words[l.keys], words[l.values], words[l.limits + l.keys], words[l.limits + l.values]};
}

// The bytes of a part before the first head at position `at`.
template <class P> INLINE u64 begin_of(const P& p, u32 at) {
    return ((u64)p.layout.offset + (u64)at * p.layout.position) * p.head_dim * size_of(p.cache);
}

// The bytes of a part up to the end of the last head at position `at`.
template <class P> INLINE u64 end_of(const P& p, u32 at) {
    const CacheLayout& l = p.layout;
    const u64 heads = (u64)l.offset + (u64)(p.kv_heads - 1) * l.head + (u64)at * l.position + 1;
    return heads * p.head_dim * size_of(p.cache);
}

// The positions of a sequence that have memory.
template <class P> INLINE u32 room_of(const P& p, const void* limits, u32 sequence) {
    const CacheLayout& l = p.layout;
    if (l.limits == 0) return p.positions;
    const Memory memory = memory_of(p, limits, sequence);
    const u64 first = end_of(p, 0);
    if (!memory.has(first)) return 0;
    const u64 distance = (u64)larger(l.position, 1u) * p.head_dim * size_of(p.cache);
    return (u32)smaller((smaller(memory.keys, memory.values) - first) / distance + 1, (u64)p.positions);
}

// The first position of a sequence that may be written: those before share memory with other sequences.
template <class P> INLINE u32 own_of(const P& p, const void* limits, u32 sequence) {
    const CacheLayout& l = p.layout;
    if (l.limits == 0) return 0;
    const u64* words = (const u64*)limits + l.limits + (u64)sequence * l.next;
    const u64 head = p.head_dim * size_of(p.cache), position = larger(l.position, 1u);
    const u64 keys = words[l.keys], values = words[l.values], heads = ((keys > values ? keys : values) + head - 1) / head;
    return heads <= l.offset ? 0 : (u32)smaller((heads - l.offset + position - 1) / position, (u64)p.positions);
}

// ---- Matrix products

// One output matrix, of one product or of two (gate and up).
template <int G> struct Output {
    const void* w[G];
    const void* bias[G];
    void* y;
    u32 n;
    u32 ldy;
};

// The destination of a finished sum.
enum Finish { STORE, ADD_TO, GATE };
