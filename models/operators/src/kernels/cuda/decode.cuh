// What kernels of attention for a row of each of several sequences share: how a context is split, the
// rotation of a row, and how the parts of a context become one. The compiling code prepends it to their
// files, behind the common part.

// The fewest positions of a part of the context, those for small heads, and the most parts.
static constexpr u32 PART = 128;
static constexpr u32 SMALL_PART = 512;
// The largest of the small heads.
static constexpr u32 SMALL_DIM = 32;
static constexpr u32 PARTS = 64;

// Elements of a key or value in one read of a thread.
static constexpr int STEP = 8;

// Calls `f` with the element type that a parameter names.
template <class F> INLINE void with_type(u32 dtype, F f) {
    if (dtype == 0) f(F32());
    else if (dtype == 1) f(Bf16());
    else f(F16());
}

// The heads of a block: some of a group, which share the keys and values of a row of the batch.
struct Share {
    u32 row;
    // The first head in the group, and the places of heads: a power of two.
    u32 own;
    u32 heads;
    // The block's place among those of its group, and their number.
    u32 block;
    u32 blocks;
};

// Positions of a part of the context.
INLINE u32 part_of(const AttentionParams& p) {
    return larger(p.head_dim <= SMALL_DIM ? SMALL_PART : PART, (p.positions + PARTS - 1) / PARTS);
}

// Where a block leaves its part of a row.
struct Split {
    u32 row;
    // The first head of the block, and their number.
    u32 first;
    u32 count;
    // Parts that the scratch memory has room for.
    u32 parts;
    // The position.
    u32 at;
    // Counters of finished parts: one for each block of a part.
    u32* counter;
    // Maximum, sum of the weights and weighted sum for each head and part.
    float* partial;
};

// All but the position.
INLINE Split split_of(const AttentionParams& p, const Share& share, void* scratch) {
    Split s;
    const u32 part = part_of(p), group = p.heads / p.kv_heads;
    s.row = share.row;
    s.first = blockIdx.y * group + share.own;
    s.count = smaller(share.heads, group - share.own);
    s.parts = (p.positions + part - 1) / part;
    s.at = 0;
    const u64 counters = (u64)p.kv_heads * share.blocks;
    u32* own = (u32*)scratch + share.row * (counters + (u64)p.heads * s.parts * (p.head_dim + 2));
    s.counter = own + blockIdx.y * share.blocks + share.block;
    s.partial = (float*)(own + counters);
    return s;
}

// 16 bytes. The read is volatile, so the compiler leaves it where it is: long before its use.
INLINE uint4 read_now(const void* p) {
#ifndef LEASEHOLD_EMULATED
    uint4 q;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "l"(p));
    return q;
#else
    return *(const uint4*)p;
#endif
}

INLINE void floats_of(uint4 from, float* to) {
    to[0] = __uint_as_float(from.x);
    to[1] = __uint_as_float(from.y);
    to[2] = __uint_as_float(from.z);
    to[3] = __uint_as_float(from.w);
}

// `STEP` elements of a row of the cache, as they are there.
template <class T> struct Words {
    static constexpr int COUNT = STEP * (int)sizeof(typename T::raw) / 16;
    uint4 word[COUNT];
};

template <class T> INLINE void unpack(const Words<T>& w, float (&v)[STEP]) {
    constexpr int each = 4 / (int)sizeof(typename T::raw);
#pragma unroll
    for (int i = 0; i < Words<T>::COUNT; ++i) {
        T::unpack(w.word[i].x, v + 4 * i * each);
        T::unpack(w.word[i].y, v + (4 * i + 1) * each);
        T::unpack(w.word[i].z, v + (4 * i + 2) * each);
        T::unpack(w.word[i].w, v + (4 * i + 3) * each);
    }
}

// A lane's `STEP` elements of a query, a new key or a new value, and those that the rotation pairs them
// with, as they are.
struct Unit {
    const u8* row;
    uint4 own[2];
    uint4 other[2];
};

// Reads a lane's unit. The position is not needed for that. Without a row it is zero. The first
// `rotary` elements of the row turn. A unit that is not `whole` is read when it is rotated.
INLINE Unit unit_of(const AttentionParams& p, const u8* row, u32 column, bool whole, u32 rotary) {
    const u32 size = size_of(p.x), half = rotary / 2;
    const u8* own = row + column * size;
    const u8* other = column < half ? own + half * size : own - half * size;
    Unit u;
    u.row = row;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        u.own[i] = u.other[i] = make_uint4(0, 0, 0, 0);
        if (!whole || row == nullptr || column >= p.head_dim || i * 16 >= STEP * size) continue;
        u.own[i] = read_now(own + i * 16);
        if (column < rotary) u.other[i] = read_now(other + i * 16);
    }
    return u;
}

// `STEP` floats of a lane.
struct Lane {
    float v[STEP];
};

// The elements of a row after the rotation of those before `rotary`, times `scale`, element by
// element. Such functions are calls, so that their code does not lie between that which mostly runs.
static __device__ __noinline__ Lane single_rotated(u32 dtype, const void* row, u32 column, u32 dim, u32 rotary,
                                                   const float* angles, float scale) {
    const u32 half = rotary / 2;
    Lane to;
#pragma unroll
    for (int e = 0; e < STEP; ++e) {
        const u32 i = column + e, pair = i < half ? i + half : i - half;
        to.v[e] = row != nullptr && i < dim ? load_one(dtype, row, i) * scale : 0.0f;
        if (row == nullptr || i >= rotary) continue;
        const float other = load_one(dtype, row, pair) * scale, c = angles[smaller(i, pair)], d = angles[larger(i, pair)];
        to.v[e] = i < half ? to.v[e] * c - other * d : fmaf(to.v[e], c, other * d);
    }
    return to;
}

// The first elements of `Words` from where they are kept.
template <class T> INLINE void unpack(const uint4 (&from)[2], float (&v)[STEP]) {
    Words<T> w;
#pragma unroll
    for (int i = 0; i < Words<T>::COUNT; ++i) w.word[i] = from[i];
    unpack<T>(w, v);
}

// The same of a unit, whose angles are `cosine` and `sine` if it is `whole`.
INLINE Lane rotated(const AttentionParams& p, const Unit& u, u32 column, bool whole, u32 rotary, const float* angles,
                    const Lane& cosine, const Lane& sine, float scale) {
    if (!whole) return single_rotated(p.x, u.row, column, p.head_dim, rotary, angles, scale);
    float own[STEP], other[STEP];
    with_type(p.x, [&](auto type) {
        unpack<decltype(type)>(u.own, own);
        unpack<decltype(type)>(u.other, other);
    });
    Lane to;
#pragma unroll
    for (int e = 0; e < STEP; ++e) {
        const float self = own[e] * scale, pair = other[e] * scale, c = cosine.v[e], d = sine.v[e];
        const float turned = column < rotary / 2 ? self * c - pair * d : fmaf(self, c, pair * d);
        to.v[e] = column < rotary ? turned : self;
    }
    return to;
}

// A lane's floats as the cache has them.
template <class T> INLINE Words<T> words_of(const Lane& from) {
    constexpr int each = 4 / (int)sizeof(typename T::raw);
    Words<T> w;
#pragma unroll
    for (int i = 0; i < Words<T>::COUNT; ++i) {
        const float* v = from.v + 4 * i * each;
        w.word[i] = make_uint4(T::pack(v), T::pack(v + each), T::pack(v + 2 * each), T::pack(v + 3 * each));
    }
    return w;
}

template <class T> static __device__ __noinline__ void put_single(void* row, u32 column, u32 dim, Words<T> from) {
    float v[STEP];
    unpack(from, v);
#pragma unroll
    for (int e = 0; e < STEP; ++e) {
        if (column + e < dim) ((typename T::raw*)row)[column + e] = T::narrow(v[e]);
    }
}

// Writes elements `column` to `column + STEP` of a row, but those from `dim` on.
template <class T> INLINE void put(typename T::raw* row, u32 column, u32 dim, bool wide, const Words<T>& from) {
    if (!wide) return put_single<T>(row, column, dim, from);
    if (column >= dim) return;
#pragma unroll
    for (int i = 0; i < Words<T>::COUNT; ++i) ((uint4*)(row + column))[i] = from.word[i];
}

// Elements `column` to `column + STEP` of a row; those from `dim` on are zero.
template <class T> static __device__ __noinline__ Words<T> single_words_of(const void* row, u32 column, u32 dim) {
    Lane v;
#pragma unroll
    for (int e = 0; e < STEP; ++e) v.v[e] = column + e < dim ? T::widen(((const typename T::raw*)row)[column + e]) : 0.0f;
    return words_of<T>(v);
}

// A float that another block has written: it is not in this processor's cache.
INLINE float written(const float* p) {
#ifndef LEASEHOLD_EMULATED
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
#else
    return *p;
#endif
}

// The factors, maximum and sum of one head over `n` softmaxes with the maxima `top(i)` and sums
// `total(i)`: a warp for the head. All lanes take part.
template <class Top, class Total>
INLINE void combine(u32 n, Top top, Total total, float* factors, float& of_top, float& of_total) {
    const u32 lane = threadIdx.x % WARP;
    float max = -infinity();
    for (u32 i = lane; i < n; i += WARP) max = fmaxf(max, top(i));
    max = warp_max(max);
    const float base = max == -infinity() ? 0.0f : max;
    float sum = 0.0f;
    for (u32 i = lane; i < n; i += WARP) {
        const float factor = power_of_two(top(i) - base);
        factors[i] = factor;
        sum = fmaf(total(i), factor, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        of_top = max;
        of_total = sum;
    }
}

// Shared memory of a block: `SUMS` numbers of `SOFTMAXES` softmaxes, of at most `HEADS` heads.
template <u32 SUMS, u32 SOFTMAXES, u32 HEADS> struct DecodePlace {
    // Weighted sums of the softmaxes, the elements of a row of lanes apart.
    __align__(16) float sums[SUMS];
    // The maximum of each, and the sum of its weights.
    float tops[SOFTMAXES];
    float totals[SOFTMAXES];
    // The factor of each part, relative to the maximum of all.
    float factors[HEADS * PARTS];
    // The maximum of all, and the sum of the weights relative to it.
    float top[HEADS];
    float total[HEADS];
    u32 last;
    // What the block needs after its positions; in registers it would cost places of the loop.
    Split split;
};

// The softmaxes of each head in shared memory become the output, or part `index` of the context in scratch memory, whose
// parts have `part` positions. A
// head has `all` of them, whose weighted sums are 2^`shift` numbers apart. The block of `THREADS` threads that is the
// last one of a row combines its parts.
template <u32 THREADS, class Place>
INLINE void finish(const AttentionParams& p, Place& place, u32 all, u32 shift, u32 part, void* output, u32 index) {
    const u32 dim = p.head_dim, t = threadIdx.x, warp = t / WARP, width = 1u << shift;
    const Split s = place.split;
    const u32 count = s.count, first = s.first, active = s.at < part ? 1 : s.at / part + 1;
    for (u32 i = t; i < count << shift; i += THREADS) {
        const u32 q = i >> shift, d = i & (width - 1);
        if (d >= dim) continue;
        const float *tops = place.tops + q * all, *totals = place.totals + q * all, *sums = place.sums + q * all * width + d;
        float max = -infinity(), total = 0.0f, value = 0.0f;
#pragma unroll 2
        for (u32 o = 0; o < all; ++o) max = fmaxf(max, tops[o]);
        const float from = max == -infinity() ? 0.0f : max;
#pragma unroll 2
        for (u32 o = 0; o < all; ++o) {
            const float factor = power_of_two(tops[o] - from);
            total = fmaf(totals[o], factor, total);
            value = fmaf(factor, sums[o * width], value);
        }
        if (active == 1) {
            store_one(p.x, output, (u64)s.row * p.ldo + (u64)(first + q) * dim + d, value * (1.0f / total));
        } else {
            float* to = s.partial + ((u64)(first + q) * s.parts + index) * (dim + 2);
            if (d == 0) {
                to[0] = max;
                to[1] = total;
            }
            to[2 + d] = value;
        }
    }
    if (active == 1) return;
    // The block that counts last sees what all others have written.
    __syncthreads();
    if (t == 0) {
        __threadfence();
        place.last = atomicAdd(s.counter, 1) == active - 1;
        __threadfence();
    }
    __syncthreads();
    if (!place.last) return;
    const float* partial = s.partial + (u64)first * s.parts * (dim + 2);
    for (u32 q = warp; q < count; q += THREADS / WARP) {
        const float* from = partial + (u64)q * s.parts * (dim + 2);
        combine(active, [&](u32 i) { return written(from + i * (dim + 2)); },
                [&](u32 i) { return written(from + i * (dim + 2) + 1); }, place.factors + q * PARTS, place.top[q],
                place.total[q]);
    }
    // Two elements of a head for each thread; the first parts come while the factors are computed.
    constexpr u32 TOGETHER = 8;
    const u32 pairs = (dim + 1) / 2;
    for (u32 i = t; i - t < count * pairs; i += THREADS) {
        const bool in = i < count * pairs;
        const u32 q = in ? i / pairs : 0, d = in ? i % pairs * 2 : 0;
        const bool two = d + 1 < dim;
        const float* from = partial + (u64)q * s.parts * (dim + 2) + 2 + d;
        float sum[2] = {0.0f, 0.0f};
        for (u32 j = 0; j < active; j += TOGETHER) {
            float v[TOGETHER][2];
#pragma unroll
            for (u32 b = 0; b < TOGETHER; ++b) {
                v[b][0] = in && j + b < active ? written(from + (j + b) * (dim + 2)) : 0.0f;
                v[b][1] = in && two && j + b < active ? written(from + (j + b) * (dim + 2) + 1) : 0.0f;
            }
            if (i == t && j == 0) __syncthreads();
#pragma unroll
            for (u32 b = 0; b < TOGETHER; ++b) {
                if (j + b >= active) continue;
                sum[0] = fmaf(place.factors[q * PARTS + j + b], v[b][0], sum[0]);
                sum[1] = fmaf(place.factors[q * PARTS + j + b], v[b][1], sum[1]);
            }
        }
        if (!in) continue;
        const float factor = 1.0f / place.total[q];
        const u64 to = (u64)s.row * p.ldo + (u64)(first + q) * dim + d;
        store_one(p.x, output, to, sum[0] * factor);
        if (two) store_one(p.x, output, to + 1, sum[1] * factor);
    }
    if (t == 0) *s.counter = 0;
}

// Whether a row at position `at` lies outside its memory. It gives NaN then, which the block of the first part writes.
INLINE bool outside(const AttentionParams& p, const Share& share, const Memory& memory, u32 at, u32 index, void* output) {
    const bool limited = p.layout.limits != 0;
    if (at != p.positions && !(limited && !(memory.has(end_of(p, at)) && memory.owns(begin_of(p, at))))) return false;
    const u32 group = p.heads / p.kv_heads;
    const u64 first = (u64)share.row * p.ldo + (u64)(blockIdx.y * group + share.own) * p.head_dim;
    if (index == 0) poison(p.x, output, first, smaller(share.heads, group - share.own) * p.head_dim);
    return true;
}
