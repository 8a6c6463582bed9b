// Common part of the operator library's Metal kernels, which goes before each file's text.
//
// The host compiles with MTLMathModeSafe, because NaN and infinity have a meaning. The language is
// Metal 3.1, for `bfloat`. A kernel takes its operands as buffers 0, 1, … in the order of the CPU
// kernel's signature, and then the CPU kernel's parameters. The host checks shapes, sizes and
// alignment before a launch; the kernels check values from device memory. No kernel needs more than
// families Metal3 or Apple7 have: 32 threads of a SIMD-group, their sums and shuffles, and 32 KiB
// of threadgroup memory.

#include <metal_stdlib>

using namespace metal;

typedef uchar u8;
typedef ushort u16;
typedef uint u32;
typedef ulong u64;
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

// ---- Threads. A threadgroup has a multiple of 32 threads.

constant constexpr u32 SIMD = 32;

// The place of a thread: its index in the threadgroup, the number of threads there, its lane, and
// the index of its SIMD-group.
struct Place {
    u32 index;
    u32 count;
    u32 lane;
    u32 simd;
};

inline void group_barrier() { threadgroup_barrier(mem_flags::mem_threadgroup); }

// `scratch` has a place for each SIMD-group. All threads of the threadgroup take part and get the
// same bits.
inline float group_sum(float v, threadgroup float* scratch, Place at) {
    v = simd_sum(v);
    if (at.lane == 0) scratch[at.simd] = v;
    group_barrier();
    float sum = 0.0f;
    for (u32 s = 0; s < at.count / SIMD; ++s) sum += scratch[s];
    group_barrier();
    return sum;
}

// The largest value of the threadgroup. With a NaN the result is any of the values: the caller's
// sums show the NaN.
inline float group_largest(float v, threadgroup float* scratch, Place at) {
    v = simd_max(v);
    if (at.lane == 0) scratch[at.simd] = v;
    group_barrier();
    float largest = scratch[0];
    for (u32 s = 1; s < at.count / SIMD; ++s) largest = fmax(largest, scratch[s]);
    group_barrier();
    return largest;
}

// ---- Elements: f32, bf16 and f16, computed with in f32.

inline float not_a_number() { return as_type<float>(0x7fc00000u); }
inline float infinity() { return as_type<float>(0x7f800000u); }

struct F32 {
    typedef float raw;
    typedef float4 raw4;
    static float widen(float r) { return r; }
    static float4 widen(float4 r) { return r; }
    static float narrow(float f) { return f; }
    static float4 narrow(float4 f) { return f; }
};

struct Bf16 {
    typedef u16 raw;
    typedef ushort4 raw4;
    static float widen(u16 r) { return float(as_type<bfloat>(r)); }
    static float4 widen(ushort4 r) { return float4(as_type<bfloat4>(r)); }
    static u16 narrow(float f) { return as_type<u16>(bfloat(f)); }
    static ushort4 narrow(float4 f) { return as_type<ushort4>(bfloat4(f)); }
};

struct F16 {
    typedef u16 raw;
    typedef ushort4 raw4;
    static float widen(u16 r) { return float(as_type<half>(r)); }
    static float4 widen(ushort4 r) { return float4(as_type<half4>(r)); }
    static u16 narrow(float f) { return as_type<u16>(half(f)); }
    static ushort4 narrow(float4 f) { return as_type<ushort4>(half4(f)); }
};

// Element `at`, and elements `at` to `at + 4`, which are aligned to the size of all four.
template <class T> inline float load(device const u8* base, u64 at) {
    return T::widen(((device const typename T::raw*)base)[at]);
}

template <class T> inline float4 load4(device const u8* base, u64 at) {
    return T::widen(*(device const typename T::raw4*)((device const typename T::raw*)base + at));
}

template <class T> inline void store(device u8* base, u64 at, float v) {
    ((device typename T::raw*)base)[at] = T::narrow(v);
}

template <class T> inline void store4(device u8* base, u64 at, float4 v) {
    *(device typename T::raw4*)((device typename T::raw*)base + at) = T::narrow(v);
}

// Like the above, for a type that a parameter names: 0 for f32, 1 for bf16, 2 for f16. All threads
// take the same branch.
inline float load(u32 dtype, device const u8* base, u64 at) {
    if (dtype == 0) return load<F32>(base, at);
    if (dtype == 1) return load<Bf16>(base, at);
    return load<F16>(base, at);
}

inline void store(u32 dtype, device u8* base, u64 at, float v) {
    if (dtype == 0) store<F32>(base, at, v);
    else if (dtype == 1) store<Bf16>(base, at, v);
    else store<F16>(base, at, v);
}

// The first `count` of four elements; the others are zero. `wide` says that four can be read at
// once.
inline float4 load4(u32 dtype, device const u8* base, u64 at, u32 count, bool wide) {
    if (wide && count >= 4) {
        if (dtype == 0) return load4<F32>(base, at);
        if (dtype == 1) return load4<Bf16>(base, at);
        return load4<F16>(base, at);
    }
    float4 v = float4(0.0f);
    for (u32 e = 0; e < min(count, 4u); ++e) v[e] = load(dtype, base, at + e);
    return v;
}

inline void store4(u32 dtype, device u8* base, u64 at, u32 count, bool wide, float4 v) {
    if (wide && count >= 4) {
        if (dtype == 0) store4<F32>(base, at, v);
        else if (dtype == 1) store4<Bf16>(base, at, v);
        else store4<F16>(base, at, v);
        return;
    }
    for (u32 e = 0; e < min(count, 4u); ++e) store(dtype, base, at + e, v[e]);
}

inline float sum_of(float4 v) { return (v.x + v.y) + (v.z + v.w); }

inline u32 size_of(u32 dtype) { return dtype == 0 ? 4 : 2; }

inline u64 address_of(device const u8* p) { return reinterpret_cast<u64>(p); }

// True if rows, `ld` elements apart, can be read four elements at a time.
inline bool by_four(u32 dtype, device const u8* base, u32 ld) {
    return address_of(base) % (4 * size_of(dtype)) == 0 && ld % 4 == 0;
}

// Fills a row with NaN, the result for an invalid position or id.
inline void poison(u32 dtype, device u8* base, u64 from, u32 n, Place at) {
    for (u32 i = at.index; i < n; i += at.count) store(dtype, base, from + i, not_a_number());
}

// ---- Functions

// e^x with the steps of the CPU: within 2 units in the last place, 0 below 2^-125, infinite above
// the range.
inline float exponential(float x) {
    x = -87.33f > x ? -87.33f : x;
    x = 89.0f < x ? 89.0f : x;
    const float n = fma(x, 1.44269504088896340736f, 12582912.0f) - 12582912.0f;
    float r = fma(n, -355.0f / 512.0f, x);
    r = fma(n, 2.1219444e-4f, r);
    float p = 1.0f / 5040.0f;
    p = fma(p, r, 1.0f / 720.0f);
    p = fma(p, r, 1.0f / 120.0f);
    p = fma(p, r, 1.0f / 24.0f);
    p = fma(p, r, 1.0f / 6.0f);
    p = fma(p, r, 0.5f);
    p = fma(p, r, 1.0f);
    p = fma(p, r, 1.0f);
    // 2^n in two factors. A NaN has passed through p, and its conversion is not defined.
    const i32 exponent = x == x ? i32(n - 1.0f) : 0;
    return (p + p) * as_type<float>(u32(exponent + 127) << 23);
}

inline float silu(float x) { return x / (1.0f + exponential(0.0f - x)); }

// The position of row `row` of a launch, or `limit` if the device word holds no position below it.
inline u32 position_of(device const u8* word, u32 row, u32 limit) {
    const i32 first = *(device const i32*)word;
    if (first < 0) return limit;
    const u64 at = u64(first) + row;
    return at < limit ? u32(at) : limit;
}

// ---- Caches

// The first element of a head, at position 0, where the first sequence's part is `first`.
inline u64 head_at(constant CacheLayout& l, u32 first, u32 sequence, u32 head, u32 dim) {
    return ((u64(first) + u64(sequence) * l.next) * l.part + l.offset + u64(head) * l.head) * dim;
}

// The positions of a sequence that have memory.
template <class P> inline u32 room_of(constant P& p, device const u8* limits, u32 sequence) {
    constant CacheLayout& l = p.layout;
    if (l.limits == 0) return p.positions;
    device const u64* words = (device const u64*)limits + u64(sequence) * l.next;
    const u64 heads = min(words[l.keys], words[l.values]) / (p.head_dim * size_of(p.cache));
    const u64 first = u64(l.offset) + u64(p.kv_heads - 1) * l.head + 1;
    if (heads < first) return 0;
    return u32(min((heads - first) / max(l.position, 1u) + 1, u64(p.positions)));
}

// The first position of a sequence that may be written: those before share memory with other sequences.
template <class P> inline u32 own_of(constant P& p, device const u8* limits, u32 sequence) {
    constant CacheLayout& l = p.layout;
    if (l.limits == 0) return 0;
    device const u64* words = (device const u64*)limits + l.limits + u64(sequence) * l.next;
    const u64 head = p.head_dim * size_of(p.cache), position = max(l.position, 1u);
    const u64 heads = (max(words[l.keys], words[l.values]) + head - 1) / head;
    return heads <= l.offset ? 0 : u32(min((heads - l.offset + position - 1) / position, u64(p.positions)));
}
