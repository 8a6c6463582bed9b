// Causal grouped-query attention over a key-value cache. A layout says where it has its keys and values.
//
// A block of the general kernel computes some rows of one head. It iterates over the positions in tiles
// with two threads for each position. For each tile it computes the scores, the running maximum and sum of the
// online softmax, and the weighted sum of the values. In the last step a thread computes some columns
// for one of several groups of positions. No buffer of the context's length is needed. Positions
// that a row does not see are never multiplied, so a NaN there has no effect.
//
// A block of the decode kernel computes some heads of a group for one row. Each row has its own
// position, caches and scratch memory. The block's warps share nothing while they go over the
// positions: some lanes hold a row of keys and values, and have a softmax of their own. The block
// combines them in the end. A long context is split over blocks. Each leaves its maximum, sum and
// weighted sum in the scratch memory, and the last block to do so combines them in the order of the
// positions.

static constexpr u32 THREADS = 256;
static constexpr u32 WARPS = THREADS / WARP;
static constexpr u32 MAX_DIM = 256;
// Positions of a tile.
static constexpr u32 TILE = THREADS / 2;
// Rows of a block.
static constexpr int ROWS = 4;
// Query heads of a block of the decode kernel.
static constexpr int HEADS = 4;
// The fewest positions of a part of the context, those for small heads, and the most parts.
static constexpr u32 PART = 128;
static constexpr u32 SMALL_PART = 512;
// The largest of the small heads.
static constexpr u32 SMALL_DIM = 32;
static constexpr u32 PARTS = 64;

// Elements of a key or value in one read of a thread.
static constexpr int STEP = 8;
// Reads of a thread that are under way at a time.
static constexpr u32 BATCH = 4;

// Shared memory of a block of the general kernel.
struct Place {
    float weights[ROWS * TILE];
    float scratch[ROWS * WARPS];
    float parts[ROWS * THREADS * STEP];
};

// Attends with `Q` queries (rows of MAX_DIM, scaled, in shared memory); query `q` sees the positions
// from `begin` to `len[q]`. Calls `out(q, d, sum, top, total)` for each column: the weighted sum, and
// the maximum of the scores and the sum of the weights, relative to which it is. Positions are `pitch`
// elements apart. All threads of the block take part. The caller's writes to shared memory are visible afterwards.
template <class T, int Q, class Out>
INLINE void attend(const float* queries, const void* keys, const void* values, u32 dim, u32 pitch, u32 begin,
                   const u32 (&len)[Q], Place& place, Out out) {
    static_assert(Q <= ROWS, "the queries have their places");
    float *weights = place.weights, *scratch = place.scratch, *parts = place.parts;
    const u32 t = threadIdx.x, lane = t % WARP, warp = t / WARP, half = t % 2;
    const bool wide = dim % STEP == 0 && (address(keys) | address(values)) % 16 == 0;
    // Threads for a row of values, and the rows at a time.
    const u32 across = wide ? dim / STEP : dim, groups = THREADS / across, group = t / across;
    const u32 column = t % across * (wide ? STEP : 1);
    u32 longest = 0;
    float top[Q], total[Q], sum[Q][STEP];
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        longest = larger(longest, len[q]);
        top[q] = -infinity();
        total[q] = 0.0f;
#pragma unroll
        for (int e = 0; e < STEP; ++e) sum[q][e] = 0.0f;
    }
    __syncthreads();
    for (u32 base = begin; base < longest; base += TILE) {
        const u32 at = base + t / 2;
        float score[Q];
#pragma unroll
        for (int q = 0; q < Q; ++q) score[q] = 0.0f;
        if (at < longest) {
            const u64 row = (u64)at * pitch;
            if (wide) {
                // Several reads are under way at a time: the reads of shared memory, whose order is
                // fixed, would keep the compiler from starting them early.
                for (u32 d = half * STEP; d < dim; d += BATCH * 2 * STEP) {
                    float key[BATCH][STEP];
#pragma unroll
                    for (u32 b = 0; b < BATCH; ++b) {
                        if (d + b * 2 * STEP < dim) load<T>(keys, row + d + b * 2 * STEP, key[b]);
                    }
#pragma unroll
                    for (u32 b = 0; b < BATCH; ++b) {
                        if (d + b * 2 * STEP >= dim) continue;
#pragma unroll
                        for (int q = 0; q < Q; ++q) {
#pragma unroll
                            for (int e = 0; e < STEP; e += 4) {
                                const float4 query = shared_four(queries + q * MAX_DIM + d + b * 2 * STEP + e);
                                score[q] = fmaf(key[b][e], query.x, score[q]);
                                score[q] = fmaf(key[b][e + 1], query.y, score[q]);
                                score[q] = fmaf(key[b][e + 2], query.z, score[q]);
                                score[q] = fmaf(key[b][e + 3], query.w, score[q]);
                            }
                        }
                    }
                }
            } else {
                for (u32 d = half; d < dim; d += 2) {
                    float key[1];
                    load<T>(keys, row + d, key);
#pragma unroll
                    for (int q = 0; q < Q; ++q) score[q] = fmaf(key[0], queries[q * MAX_DIM + d], score[q]);
                }
            }
        }
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            score[q] += __shfl_xor_sync(ALL, score[q], 1);
            float max = warp_max(at < len[q] ? score[q] : -infinity());
            if (lane == 0) scratch[q * WARPS + warp] = max;
        }
        __syncthreads();
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            float max = top[q];
            for (u32 w = 0; w < WARPS; ++w) max = fmaxf(max, scratch[q * WARPS + w]);
            // While all scores so far are -infinity, the exponentials must be zero.
            const float from = max == -infinity() ? 0.0f : max;
            const float factor = max == top[q] ? 1.0f : exponential(top[q] - from);
            const float weight = at < len[q] ? exponential(score[q] - from) : 0.0f;
            if (half == 0) weights[q * TILE + t / 2] = weight;
            total[q] = total[q] * factor + (half == 0 ? weight : 0.0f);
#pragma unroll
            for (int e = 0; e < STEP; ++e) sum[q][e] *= factor;
            top[q] = max;
        }
        __syncthreads();
        const u32 count = smaller(TILE, longest - base);
        if (group < groups && wide) {
#pragma unroll (Q == 1 ? 4 : 2)
            for (u32 j = group; j < count; j += groups) {
                float value[STEP];
                load<T>(values, (u64)(base + j) * pitch + column, value);
#pragma unroll
                for (int q = 0; q < Q; ++q) {
                    if (base + j >= len[q]) continue;
                    const float weight = weights[q * TILE + j];
#pragma unroll
                    for (int e = 0; e < STEP; ++e) sum[q][e] = fmaf(weight, value[e], sum[q][e]);
                }
            }
        } else if (group < groups) {
            for (u32 j = group; j < count; j += groups) {
                float value[1];
                load<T>(values, (u64)(base + j) * pitch + column, value);
#pragma unroll
                for (int q = 0; q < Q; ++q) {
                    if (base + j < len[q]) sum[q][0] = fmaf(weights[q * TILE + j], value[0], sum[q][0]);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        total[q] = warp_sum(total[q]);
        if (lane == 0) scratch[q * WARPS + warp] = total[q];
        if (group < groups) {
#pragma unroll
            for (int e = 0; e < STEP; ++e) {
                if (e == 0 || wide) parts[(q * groups + group) * dim + column + e] = sum[q][e];
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        total[q] = 0.0f;
#pragma unroll
        for (u32 w = 0; w < WARPS; ++w) total[q] += scratch[q * WARPS + w];
    }
    for (u32 i = t; i < Q * dim; i += THREADS) {
        const u32 q = i / dim, d = i % dim;
        float value = 0.0f;
#pragma unroll 8
        for (u32 g = 0; g < groups; ++g) value += parts[(q * groups + g) * dim + d];
        // No array is indexed by a variable.
        float of_top = top[0], of_total = total[0];
#pragma unroll
        for (u32 o = 1; o < Q; ++o) {
            of_top = q == o ? top[o] : of_top;
            of_total = q == o ? total[o] : of_total;
        }
        out(q, d, value, of_top, of_total);
    }
    __syncthreads();
}

// The keys or values of one head.
template <class T> INLINE const void* head_of(const void* cache, u64 at) { return (const typename T::raw*)cache + at; }

// Rows `first` to `first + Q` of head `head`.
template <class T, int Q>
INLINE void attend_rows(const AttentionParams& p, const void* queries, const void* keys, const void* values,
                        const void* position, void* output, const void* limits, float* scaled, Place& place) {
    const u32 dim = p.head_dim, head = blockIdx.y, first = blockIdx.x * Q, room = room_of(p, limits, 0);
    u32 len[Q];
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        const u32 m = first + q;
        const u32 at = m < p.m ? position_of(position, m, room) : room;
        len[q] = at == room ? 0 : at + 1;
        if (threadIdx.x < dim) {
            const u64 from = (u64)m * p.ldq + (u64)head * dim + threadIdx.x;
            scaled[q * MAX_DIM + threadIdx.x] = m < p.m ? load_one(p.x, queries, from) * p.scale : 0.0f;
        }
    }
    const CacheLayout& l = p.layout;
    const u32 kv = head / (p.heads / p.kv_heads);
    const void* k = head_of<T>(keys, head_at(l, l.keys, 0, kv, dim));
    const void* v = head_of<T>(values_in(l, keys, values), head_at(l, l.values, 0, kv, dim));
    attend<T, Q>(scaled, k, v, dim, l.position * dim, 0, len, place, [&](int q, u32 d, float sum, float, float total) {
        const u32 m = first + q;
        if (m < p.m) store_one(p.x, output, (u64)m * p.ldo + (u64)head * dim + d, sum * (1.0f / total));
    });
}

// Calls `f` with the element type that a parameter names.
template <class F> INLINE void with_type(u32 dtype, F f) {
    if (dtype == 0) f(F32());
    else if (dtype == 1) f(Bf16());
    else f(F16());
}

KERNEL(256) attention(const void* queries, const void* keys, const void* values, const void* position, void* output,
                      const void* limits, AttentionParams p) {
    begin();
    __shared__ __align__(16) float scaled[ROWS * MAX_DIM];
    __shared__ Place place;
    with_type(p.cache, [&](auto type) {
        using T = decltype(type);
        attend_rows<T, ROWS>(p, queries, keys, values, position, output, limits, scaled, place);
    });
}

// Element `i` of a head after the rotation of the first `rotary`, times `scale`; each thread computes its own.
INLINE float rotated(u32 dtype, const void* x, u64 head, const float* angles, u32 rotary, u32 i, float scale) {
    const u32 half = rotary / 2;
    const float self = load_one(dtype, x, head + i) * scale;
    if (i >= rotary) return self;
    const float other = load_one(dtype, x, head + (i < half ? i + half : i - half)) * scale;
    const float c = angles[i < half ? i : i - half], d = angles[i < half ? i + half : i];
    return i < half ? self * c - other * d : fmaf(self, c, other * d);
}

// ---- Decode

// Rows of keys and of values that a lane has under way at a time.
static constexpr int DEEP = 2;
// The most rows that a warp has at a time, with 4 lanes each.
static constexpr u32 SIDES = 8;

// The lanes that hold a row of the cache: a power of two.
INLINE u32 lanes_of(u32 dim) { return dim <= SMALL_DIM ? 4 : dim <= 64 ? 8 : dim <= 128 ? 16 : 32; }

// The heads of a block: some of a group, which share the keys and values of a row of the batch.
struct Share {
    u32 row;
    // The first head in the group, and their number.
    u32 own;
    u32 heads;
    // The block's place among those of its group, and their number.
    u32 block;
    u32 blocks;
};

// One row, as most launches have, needs no division.
INLINE Share share_of(const AttentionParams& p) {
    Share s;
    const u32 group = p.heads / p.kv_heads;
    s.heads = group == 1 ? 1 : HEADS;
    s.blocks = (group + s.heads - 1) / s.heads;
    s.row = p.m == 1 ? 0 : s.blocks == 1 ? blockIdx.z : blockIdx.z / s.blocks;
    s.block = blockIdx.z - s.row * s.blocks;
    s.own = s.block * s.heads;
    return s;
}

// Positions of a part of the context.
INLINE u32 part_of(const AttentionParams& p) {
    return larger(p.head_dim <= SMALL_DIM ? SMALL_PART : PART, (p.positions + PARTS - 1) / PARTS);
}

// Where a block leaves its part of a row.
struct Split {
    // Parts that the scratch memory has room for.
    u32 parts;
    // Parts that see positions.
    u32 active;
    // Counters of finished parts: one for each block of a part.
    u32* counter;
    // Maximum, sum of the weights and weighted sum for each head and part.
    float* partial;
};

INLINE Split split_of(const AttentionParams& p, const Share& share, void* scratch, u32 active) {
    Split s;
    const u32 part = part_of(p);
    s.parts = (p.positions + part - 1) / part;
    s.active = active;
    const u64 counters = (u64)p.kv_heads * share.blocks;
    u32* own = (u32*)scratch + share.row * (counters + (u64)p.heads * s.parts * (p.head_dim + 2));
    s.counter = own + blockIdx.y * share.blocks + share.block;
    s.partial = (float*)(own + counters);
    return s;
}

// Shared memory of a block of the decode kernel.
struct DecodePlace {
    // Rotated and scaled queries.
    __align__(16) float query[HEADS * MAX_DIM];
    // The new key and value as the cache holds them: other blocks must not read them there yet.
    __align__(16) u32 key[MAX_DIM];
    __align__(16) u32 value[MAX_DIM];
    // Weighted sums of the lanes' softmaxes, the elements of a row of lanes apart.
    __align__(16) float sums[HEADS * THREADS * STEP];
    // The maximum of each, and the sum of its weights.
    float tops[HEADS * WARPS * SIDES];
    float totals[HEADS * WARPS * SIDES];
    // The factor of each, or of each part, relative to the maximum of all.
    float factors[HEADS * PARTS];
    // The maximum of all, and the sum of the weights relative to it.
    float top[HEADS];
    float total[HEADS];
    u32 last;
    // What the block needs after its positions; in registers it would cost places of the loop.
    Share share;
    Split split;
};

// `STEP` elements of a row of the cache, as they are there.
template <class T> struct Words {
    static constexpr int COUNT = STEP * (int)sizeof(typename T::raw) / 16;
    uint4 word[COUNT];
};

// Elements `column` to `column + STEP` of a row; those from `dim` on are zero.
template <class T> INLINE Words<T> words_of(const typename T::raw* row, u32 column, u32 dim, bool wide) {
    Words<T> w;
    if (wide) {
#pragma unroll
        for (int i = 0; i < Words<T>::COUNT; ++i) w.word[i] = ((const uint4*)(row + column))[i];
    } else {
        float v[STEP];
#pragma unroll
        for (int e = 0; e < STEP; ++e) v[e] = column + e < dim ? T::widen(row[column + e]) : 0.0f;
        constexpr int each = 4 / (int)sizeof(typename T::raw);
#pragma unroll
        for (int i = 0; i < Words<T>::COUNT; ++i) {
            const float* from = v + 4 * i * each;
            w.word[i] =
                make_uint4(T::pack(from), T::pack(from + each), T::pack(from + 2 * each), T::pack(from + 3 * each));
        }
    }
    return w;
}

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

// A part of the context, from position `begin` to `end`, for up to `Q` heads of a group.
template <class T, int Q>
INLINE void decode_part(const AttentionParams& p, u32 begin, u32 end, u32 at, const typename T::raw* keys,
                        const typename T::raw* values, void* output, DecodePlace& place) {
    typedef typename T::raw raw;
    const u32 dim = p.head_dim, pitch = p.layout.position * dim, t = threadIdx.x, warp = t / WARP, lane = t % WARP;
    // The lanes of a row, and the rows of a warp at a time.
    const u32 lanes = lanes_of(dim), sides = WARP / lanes, side = lane / lanes;
    const u32 column = lane % lanes * STEP;
    const bool wide = dim % STEP == 0 && (address(keys) | address(values)) % 16 == 0, held = column < dim;
    float query[Q][STEP], sum[Q][STEP], top[Q], total[Q];
#pragma unroll
    for (int q = 0; q < Q; ++q) {
#pragma unroll
        for (int e = 0; e < STEP; e += 4) {
            const float4 four = shared_four(place.query + q * MAX_DIM + column + e);
            query[q][e] = four.x;
            query[q][e + 1] = four.y;
            query[q][e + 2] = four.z;
            query[q][e + 3] = four.w;
        }
#pragma unroll
        for (int e = 0; e < STEP; ++e) sum[q][e] = 0.0f;
        top[q] = -infinity();
        total[q] = 0.0f;
    }
#pragma unroll 1
    for (u32 base = begin + warp * sides + side; base - side < end; base += DEEP * WARPS * sides) {
        Words<T> key[DEEP], value[DEEP];
        bool seen[DEEP];
#pragma unroll
        for (int i = 0; i < DEEP; ++i) {
            const u32 position = base + i * WARPS * sides;
            seen[i] = position < end;
            key[i] = value[i] = Words<T>();
            if (!seen[i] || !held) continue;
            const bool fresh = position == at;
            key[i] = words_of<T>(fresh ? (const raw*)place.key : keys + (u64)position * pitch, column, dim, wide);
            value[i] = words_of<T>(fresh ? (const raw*)place.value : values + (u64)position * pitch, column, dim, wide);
        }
        float score[DEEP][Q];
#pragma unroll
        for (int i = 0; i < DEEP; ++i) {
            float v[STEP];
            unpack(key[i], v);
#pragma unroll
            for (int q = 0; q < Q; ++q) {
                score[i][q] = 0.0f;
#pragma unroll
                for (int e = 0; e < STEP; ++e) score[i][q] = fmaf(v[e], query[q][e], score[i][q]);
            }
        }
        for (u32 step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
            for (int i = 0; i < DEEP; ++i) {
#pragma unroll
                for (int q = 0; q < Q; ++q) score[i][q] += __shfl_xor_sync(ALL, score[i][q], step);
            }
        }
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            float max = top[q];
#pragma unroll
            for (int i = 0; i < DEEP; ++i) {
                score[i][q] = seen[i] ? score[i][q] : -infinity();
                max = fmaxf(max, score[i][q]);
            }
            // While all scores so far are -infinity, the weights must be zero.
            const float from = max == -infinity() ? 0.0f : max;
            const float factor = power_of_two(top[q] - from);
            top[q] = max;
            total[q] *= factor;
#pragma unroll
            for (int e = 0; e < STEP; ++e) sum[q][e] *= factor;
#pragma unroll
            for (int i = 0; i < DEEP; ++i) {
                score[i][q] = power_of_two(score[i][q] - from);
                total[q] += score[i][q];
            }
        }
#pragma unroll
        for (int i = 0; i < DEEP; ++i) {
            float v[STEP];
            unpack(value[i], v);
#pragma unroll
            for (int q = 0; q < Q; ++q) {
#pragma unroll
                for (int e = 0; e < STEP; ++e) sum[q][e] = fmaf(score[i][q], v[e], sum[q][e]);
            }
        }
    }
    // The softmaxes of the block, in the order of the warps.
    const Share share = place.share;
    const Split s = place.split;
    const u32 group = p.heads / p.kv_heads, count = smaller((u32)Q, group - share.own);
    const u32 first = blockIdx.y * group + share.own;
    const u32 all = WARPS * sides, mine = warp * sides + side, width = lanes * STEP;
#pragma unroll
    for (int q = 0; q < Q; ++q) {
#pragma unroll
        for (int e = 0; e < STEP; e += 4) {
            *(float4*)(place.sums + (q * all + mine) * width + column + e) =
                make_float4(sum[q][e], sum[q][e + 1], sum[q][e + 2], sum[q][e + 3]);
        }
        if (lane % lanes == 0) {
            place.tops[q * all + mine] = top[q];
            place.totals[q * all + mine] = total[q];
        }
    }
    __syncthreads();
    if (warp < count) {
        combine(all, [&](u32 i) { return place.tops[warp * all + i]; }, [&](u32 i) { return place.totals[warp * all + i]; },
                place.factors + warp * PARTS, place.top[warp], place.total[warp]);
    }
    __syncthreads();
    for (u32 i = t; i < count * dim; i += THREADS) {
        const u32 q = i / dim, d = i % dim;
        float value = 0.0f;
#pragma unroll 8
        for (u32 o = 0; o < all; ++o) value = fmaf(place.factors[q * PARTS + o], place.sums[(q * all + o) * width + d], value);
        if (s.active == 1) {
            store_one(p.x, output, (u64)share.row * p.ldo + (u64)(first + q) * dim + d, value * (1.0f / place.total[q]));
        } else {
            float* to = s.partial + ((u64)(first + q) * s.parts + blockIdx.x) * (dim + 2);
            if (d == 0) {
                to[0] = place.top[q];
                to[1] = place.total[q];
            }
            to[2 + d] = value;
        }
    }
    if (s.active == 1) return;
    // The block that counts last sees what all others have written.
    __syncthreads();
    if (t == 0) {
        __threadfence();
        place.last = atomicAdd(s.counter, 1) == s.active - 1;
        __threadfence();
    }
    __syncthreads();
    if (!place.last) return;
    const float* partial = s.partial + (u64)first * s.parts * (dim + 2);
    if (warp < count) {
        const float* from = partial + (u64)warp * s.parts * (dim + 2);
        combine(s.active, [&](u32 i) { return written(from + i * (dim + 2)); },
                [&](u32 i) { return written(from + i * (dim + 2) + 1); }, place.factors + warp * PARTS, place.top[warp],
                place.total[warp]);
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
        for (u32 j = 0; j < s.active; j += TOGETHER) {
            float v[TOGETHER][2];
#pragma unroll
            for (u32 b = 0; b < TOGETHER; ++b) {
                v[b][0] = in && j + b < s.active ? written(from + (j + b) * (dim + 2)) : 0.0f;
                v[b][1] = in && two && j + b < s.active ? written(from + (j + b) * (dim + 2) + 1) : 0.0f;
            }
            if (i == t && j == 0) __syncthreads();
#pragma unroll
            for (u32 b = 0; b < TOGETHER; ++b) {
                if (j + b >= s.active) continue;
                sum[0] = fmaf(place.factors[q * PARTS + j + b], v[b][0], sum[0]);
                sum[1] = fmaf(place.factors[q * PARTS + j + b], v[b][1], sum[1]);
            }
        }
        if (!in) continue;
        const float factor = 1.0f / place.total[q];
        const u64 to = (u64)share.row * p.ldo + (u64)(first + q) * dim + d;
        store_one(p.x, output, to, sum[0] * factor);
        if (two) store_one(p.x, output, to + 1, sum[1] * factor);
    }
    if (t == 0) *s.counter = 0;
}

// A block computes a part of the context for some heads of a group. All blocks of the newest part
// compute the new key and value; the first block of each group writes them to the cache.
template <class T>
INLINE void decode(const AttentionParams& p, const Share& share, const void* queries, const void* keys, const void* values,
                   const void* table, void* key_cache, void* value_cache, void* output, void* scratch, u32 at,
                   DecodePlace& place) {
    typedef typename T::raw raw;
    const u32 dim = p.head_dim, kv = blockIdx.y, group = p.heads / p.kv_heads, heads = share.heads, t = threadIdx.x;
    const u32 part = part_of(p), active = at / part + 1;
    if (blockIdx.x >= active) return;
    if (t == 0) {
        place.share = share;
        place.split = split_of(p, share, scratch, active);
    }
    const u32 begin = blockIdx.x * part, end = smaller(at + 1, begin + part);
    // The row's new key and value, and its caches.
    const u64 fresh = ((u64)share.row * p.kv_heads + kv) * dim;
    const CacheLayout& l = p.layout;
    const u32 pitch = l.position * dim;
    raw* to_keys = (raw*)key_cache + head_at(l, l.keys, share.row, kv, dim);
    raw* to_values = (raw*)values_in(l, key_cache, value_cache) + head_at(l, l.values, share.row, kv, dim);
    // The rows of the part are on their way while the queries are rotated. Rows that follow each other are one.
    const u32 of_row = dim * (u32)sizeof(raw);
    auto ask = [&](u64 byte) {
        prefetch((const u8*)to_keys + byte);
        prefetch((const u8*)to_values + byte);
    };
    if (pitch == dim) {
        const u32 lines = ((end - begin) * of_row + 127) / 128;
        for (u32 i = t; i < lines; i += THREADS) ask((u64)begin * of_row + i * 128);
    } else {
        for (u32 row = begin + t; row < end; row += THREADS) {
            for (u32 byte = 0; byte < of_row; byte += 128) ask((u64)row * pitch * sizeof(raw) + byte);
        }
    }
    const float* angles = (const float*)table + (u64)at * p.rotary;
    // The query heads, then the new key and value: a thread for each element. The lanes behind the head's
    // end read zeros.
    const u32 rows = heads + (end == at + 1 ? 2 : 0), padded = lanes_of(dim) * STEP;
    for (u32 i = t; i < rows * padded; i += THREADS) {
        const u32 row = i / padded, d = i % padded;
        if (d >= dim) {
            if (row < heads) place.query[row * MAX_DIM + d] = 0.0f;
        } else if (row < heads) {
            const u64 head = (u64)share.row * p.ldq + (u64)(kv * group + share.own + row) * dim;
            // 2^x in place of e^x.
            const float scale = p.scale * 1.44269504088896340736f;
            const bool own_head = share.own + row < group;
            place.query[row * MAX_DIM + d] = own_head ? rotated(p.x, queries, head, angles, p.rotary, d, scale) : 0.0f;
        } else {
            const bool is_key = row == heads;
            const float x = is_key ? rotated(p.x, keys, fresh, angles, p.rotary, d, 1.0f)
                                   : load_one(p.x, values, fresh + d);
            const raw kept = T::narrow(x);
            ((raw*)(is_key ? place.key : place.value))[d] = kept;
            if (share.block == 0) (is_key ? to_keys : to_values)[(u64)at * pitch + d] = kept;
        }
    }
    __syncthreads();
    if (heads == 1) decode_part<T, 1>(p, begin, end, at, to_keys, to_values, output, place);
    else decode_part<T, HEADS>(p, begin, end, at, to_keys, to_values, output, place);
}

DENSE_KERNEL(256, 2) decode_attention(const void* queries, const void* keys, const void* values, const void* table, void* key_cache,
                             void* value_cache, const void* position, void* output, void* scratch, const void* limits,
                             AttentionParams p) {
    begin();
    __shared__ DecodePlace place;
    const Share share = share_of(p);
    // The position and the limits are on their way at a time.
    const i32 word = ((const i32*)position)[share.row];
    const Memory memory = memory_of(p, limits, share.row);
    const u32 at = position_of(&word, 0, p.positions);
    // A short text leaves most blocks nothing to do. They do not wait for the limits.
    if (blockIdx.x > 0 && (at == p.positions || blockIdx.x * part_of(p) > at)) return;
    if (at == p.positions || !memory.has(end_of(p, at)) || !memory.owns(begin_of(p, at))) {
        const u32 group = p.heads / p.kv_heads, own = share.own;
        const u64 first = (u64)share.row * p.ldo + (u64)(blockIdx.y * group + own) * p.head_dim;
        if (blockIdx.x == 0) poison(p.x, output, first, smaller(share.heads, group - own) * p.head_dim);
        return;
    }
    with_type(p.cache, [&](auto type) {
        decode<decltype(type)>(p, share, queries, keys, values, table, key_cache, value_cache, output, scratch, at, place);
    });
}
