// Causal grouped-query attention over a key-value cache [kv_head][position][head_dim].
//
// A block computes some queries that share the keys and values that it reads: one head and some rows,
// or one row and some heads of a group. The block iterates over the positions in tiles with two
// threads for each position. For each tile it computes the scores, the running maximum and sum of the
// online softmax, and the weighted sum of the values. In the last step a thread computes some columns
// for one of several groups of positions. No buffer of the context's length is needed. Positions
// that a row does not see are never multiplied, so a NaN there has no effect.
//
// The decode kernel splits a long context over blocks. Each leaves its maximum, sum and weighted sum
// in the scratch memory, and the last block to do so combines them in the order of the positions.

static constexpr u32 THREADS = 256;
static constexpr u32 WARPS = THREADS / WARP;
static constexpr u32 MAX_DIM = 256;
// Positions of a tile.
static constexpr u32 TILE = THREADS / 2;
// Rows of a block.
static constexpr int ROWS = 4;
// Query heads of a block of the decode kernel.
static constexpr int HEADS = 4;
// The fewest positions of a part of the context, and the most parts.
static constexpr u32 PART = 128;
static constexpr u32 PARTS = 64;

// Elements of a key or value in one read of a thread.
static constexpr int STEP = 8;
// Reads of a key that are under way at a time.
static constexpr u32 BATCH = 4;

// The key and value of a launch with one row: the block has computed them, and other blocks must
// not read them from the cache yet.
struct Fresh {
    const float* key;
    const float* value;
    u32 at;
};

// Shared memory of a block.
struct Place {
    float weights[HEADS * TILE];
    float scratch[HEADS * WARPS];
    float parts[HEADS * THREADS * STEP];
};

// Attends with `Q` queries (rows of MAX_DIM, scaled, in shared memory); query `q` sees the positions
// from `begin` to `len[q]`. Calls `out(q, d, sum, top, total)` for each column: the weighted sum, and
// the maximum of the scores and the sum of the weights, relative to which it is. All threads of the
// block take part. The caller's writes to shared memory are visible afterwards.
template <class T, int Q, class Out>
INLINE void attend(const float* queries, const void* keys, const void* values, u32 dim, u32 begin, const u32 (&len)[Q],
                   Fresh fresh, Place& place, Out out) {
    static_assert(Q <= HEADS, "the queries have their places");
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
        if (fresh.key != nullptr && at == fresh.at) {
            for (u32 d = half; d < dim; d += 2) {
#pragma unroll
                for (int q = 0; q < Q; ++q) score[q] = fmaf(fresh.key[d], queries[q * MAX_DIM + d], score[q]);
            }
        } else if (at < longest) {
            const u64 row = (u64)at * dim;
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
                load<T>(values, (u64)(base + j) * dim + column, value);
                if (fresh.value != nullptr && base + j == fresh.at) {
#pragma unroll
                    for (int e = 0; e < STEP; ++e) value[e] = fresh.value[column + e];
                }
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
                load<T>(values, (u64)(base + j) * dim + column, value);
                if (fresh.value != nullptr && base + j == fresh.at) value[0] = fresh.value[column];
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
                        const void* position, void* output, float* scaled, Place& place) {
    const u32 dim = p.head_dim, head = blockIdx.y, first = blockIdx.x * Q;
    u32 len[Q];
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        const u32 m = first + q;
        const u32 at = m < p.m ? position_of(position, m, p.positions) : p.positions;
        len[q] = at == p.positions ? 0 : at + 1;
        if (threadIdx.x < dim) {
            const u64 from = (u64)m * p.ldq + (u64)head * dim + threadIdx.x;
            scaled[q * MAX_DIM + threadIdx.x] = m < p.m ? load_one(p.x, queries, from) * p.scale : 0.0f;
        }
    }
    const u64 cache = (u64)(head / (p.heads / p.kv_heads)) * p.positions * dim;
    const void* k = head_of<T>(keys, cache);
    const void* v = head_of<T>(values, cache);
    const Fresh none = {nullptr, nullptr, 0};
    attend<T, Q>(scaled, k, v, dim, 0, len, none, place, [&](int q, u32 d, float sum, float, float total) {
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
                      AttentionParams p) {
    __shared__ __align__(16) float scaled[ROWS * MAX_DIM];
    __shared__ Place place;
    with_type(p.cache, [&](auto type) {
        using T = decltype(type);
        attend_rows<T, ROWS>(p, queries, keys, values, position, output, scaled, place);
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

// The value as the cache holds it: narrowed and widened again. With `put` it is also stored.
INLINE float kept(u32 dtype, void* cache, u64 at, float x, bool put) {
    if (dtype == 0) {
        if (put) ((float*)cache)[at] = x;
        return x;
    }
    const u16 word = dtype == 1 ? Bf16::narrow(x) : F16::narrow(x);
    if (put) ((u16*)cache)[at] = word;
    return dtype == 1 ? Bf16::widen(word) : F16::widen(word);
}

// The launch's parts of the context. Some heads of a group share the key and value heads of a block.
struct Split {
    // Positions of a part.
    u32 part;
    // Parts that the scratch memory has room for.
    u32 parts;
    // Parts that see positions.
    u32 active;
    // Counters of finished parts: one for each block of a part.
    u32* counter;
    // Maximum, sum of the weights and weighted sum for each head and part.
    float* partial;
};

INLINE Split split_of(const AttentionParams& p, void* scratch, u32 at) {
    Split s;
    s.part = larger(PART, (p.positions + PARTS - 1) / PARTS);
    s.parts = (p.positions + s.part - 1) / s.part;
    s.active = at / s.part + 1;
    s.counter = (u32*)scratch + blockIdx.y * gridDim.z + blockIdx.z;
    s.partial = (float*)scratch + (u64)p.kv_heads * gridDim.z;
    return s;
}

// A part of the context for up to `Q` heads of a group.
template <class T, int Q>
INLINE void decode_part(const AttentionParams& p, const Split& s, const float* query, Fresh fresh, u32 at,
                        const void* key_cache, const void* value_cache, void* output, Place& place) {
    const u32 dim = p.head_dim, group = p.heads / p.kv_heads, kv = blockIdx.y, own = blockIdx.z * Q, t = threadIdx.x;
    const u32 begin = blockIdx.x * s.part, count = smaller((u32)Q, group - own), first = kv * group + own;
    const u64 cache = (u64)kv * p.positions * dim;
    u32 len[Q];
#pragma unroll
    for (u32 q = 0; q < Q; ++q) len[q] = q < count ? smaller(at + 1, begin + s.part) : 0;
    const void* k = head_of<T>(key_cache, cache);
    const void* v = head_of<T>(value_cache, cache);
    attend<T, Q>(query, k, v, dim, begin, len, fresh, place, [&](u32 q, u32 d, float sum, float top, float total) {
        if (q >= count) return;
        if (s.active == 1) return store_one(p.x, output, (u64)(first + q) * dim + d, sum * (1.0f / total));
        float* to = s.partial + ((u64)(first + q) * s.parts + blockIdx.x) * (dim + 2);
        if (d == 0) {
            to[0] = top;
            to[1] = total;
        }
        to[2 + d] = sum;
    });
    if (s.active == 1) return;
    // The block that counts last sees what all others have written.
    __threadfence();
    __syncthreads();
    u32* last = (u32*)place.scratch;
    if (t == 0) {
        *last = atomicAdd(s.counter, 1) == s.active - 1;
        if (*last) *s.counter = 0;
        __threadfence();
    }
    __syncthreads();
    if (!*last) return;
    for (u32 i = t; i < count * dim; i += THREADS) {
        const u32 q = i / dim, d = i % dim;
        const volatile float* from = s.partial + (u64)(first + q) * s.parts * (dim + 2);
        float top = -infinity();
        for (u32 j = 0; j < s.active; ++j) top = fmaxf(top, from[j * (dim + 2)]);
        const float base = top == -infinity() ? 0.0f : top;
        float sum = 0.0f, total = 0.0f;
#pragma unroll 4
        for (u32 j = 0; j < s.active; ++j) {
            const volatile float* part = from + j * (dim + 2);
            const float factor = exponential(part[0] - base);
            total = fmaf(part[1], factor, total);
            sum = fmaf(part[2 + d], factor, sum);
        }
        store_one(p.x, output, (u64)(first + q) * dim + d, sum * (1.0f / total));
    }
}

// A block computes a part of the context for some heads of a group. All blocks of the newest part
// compute the new key and value; the first block of each group writes them to the cache.
DENSE_KERNEL(256, 2) decode_attention(const void* queries, const void* keys, const void* values, const void* table, void* key_cache,
                             void* value_cache, const void* position, void* output, void* scratch, AttentionParams p) {
    __shared__ __align__(16) float query[HEADS * MAX_DIM];
    __shared__ float key[MAX_DIM];
    __shared__ float value[MAX_DIM];
    __shared__ Place place;
    const u32 dim = p.head_dim, kv = blockIdx.y, group = p.heads / p.kv_heads, t = threadIdx.x;
    const u32 heads = group == 1 ? 1 : HEADS, own = blockIdx.z * heads;
    const u32 at = position_of(position, 0, p.positions);
    if (at == p.positions) {
        if (blockIdx.x == 0) poison(p.x, output, (u64)(kv * group + own) * dim, smaller(heads, group - own) * dim);
        return;
    }
    const Split s = split_of(p, scratch, at);
    if (blockIdx.x >= s.active) return;
    const bool newest = blockIdx.x == s.active - 1;
    const float* angles = (const float*)table + (u64)at * p.rotary;
    // The query heads, then the new key and value: a thread for each element.
    const u32 rows = heads + (newest ? 2 : 0);
    for (u32 i = t; i < rows * dim; i += THREADS) {
        const u32 row = i / dim, d = i % dim;
        const bool put = blockIdx.z == 0;
        const u64 slot = ((u64)kv * p.positions + at) * dim + d;
        if (row < heads) {
            const u64 head = (u64)(kv * group + own + row) * dim;
            query[row * MAX_DIM + d] = own + row < group ? rotated(p.x, queries, head, angles, p.rotary, d, p.scale) : 0.0f;
        } else if (row == heads) {
            key[d] = kept(p.cache, key_cache, slot, rotated(p.x, keys, (u64)kv * dim, angles, p.rotary, d, 1.0f), put);
        } else {
            value[d] = kept(p.cache, value_cache, slot, load_one(p.x, values, (u64)kv * dim + d), put);
        }
    }
    const Fresh fresh = {newest ? key : nullptr, newest ? value : nullptr, at};
    with_type(p.cache, [&](auto type) {
        using T = decltype(type);
        if (heads == 1) decode_part<T, 1>(p, s, query, fresh, at, key_cache, value_cache, output, place);
        else decode_part<T, HEADS>(p, s, query, fresh, at, key_cache, value_cache, output, place);
    });
}
