// Causal grouped-query attention over a key-value cache [kv_head][position][head_dim].
//
// A block computes one head and some rows of queries, which share the keys and values that it
// reads. The block iterates over the positions in tiles with one position for each thread. For each
// tile it computes the scores (a thread for each position), the running maximum and sum of the
// online softmax, and the weighted sum of the values. In the last step a thread computes a column
// for one of several groups of positions. No buffer of the context's length is needed. Positions
// that a row does not see are never multiplied, so a NaN there has no effect.

static constexpr u32 THREADS = 256;
static constexpr u32 WARPS = THREADS / WARP;
static constexpr u32 MAX_DIM = 256;
// Rows of a block if the launch has several rows.
static constexpr int ROWS = 4;

// Elements of a key in one read of a thread.
static constexpr int STEP = 8;

// The key and value of a launch with one row: the block has computed them, and other blocks must
// not read them from the cache yet.
struct Fresh {
    const float* key;
    const float* value;
    u32 at;
};

// Attends with `Q` queries (rows of MAX_DIM, scaled, in shared memory); query `q` sees the first
// `len[q]` positions. Calls `out(q, d, value)` for each result. All threads of the block take part.
// The caller's writes to shared memory are visible afterwards.
template <int Q, class Out>
INLINE void attend(const float* queries, u32 dtype, const void* keys, const void* values, u32 dim, const u32 (&len)[Q],
                   Fresh fresh, Out out) {
    __shared__ float weights[Q * THREADS];
    __shared__ float scratch[Q * WARPS];
    const u32 t = threadIdx.x, lane = t % WARP, warp = t / WARP;
    const u32 groups = THREADS / dim, group = t / dim, column = t % dim;
    const bool wide = dim % STEP == 0 && address(keys) % 16 == 0;
    u32 longest = 0;
    float top[Q], total[Q], sum[Q];
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        longest = larger(longest, len[q]);
        top[q] = -infinity();
        total[q] = 0.0f;
        sum[q] = 0.0f;
    }
    __syncthreads();
    for (u32 base = 0; base < longest; base += THREADS) {
        const u32 at = base + t;
        float score[Q];
#pragma unroll
        for (int q = 0; q < Q; ++q) score[q] = 0.0f;
        if (fresh.key != nullptr && at == fresh.at) {
            for (u32 d = 0; d < dim; ++d) {
#pragma unroll
                for (int q = 0; q < Q; ++q) score[q] = fmaf(fresh.key[d], queries[q * MAX_DIM + d], score[q]);
            }
        } else if (at < longest) {
            const u64 row = (u64)at * dim;
            if (wide) {
                for (u32 d = 0; d < dim; d += STEP) {
                    float key[STEP];
                    load(dtype, keys, row + d, key);
#pragma unroll
                    for (int q = 0; q < Q; ++q) {
#pragma unroll
                        for (int e = 0; e < STEP; e += 4) {
                            const float4 query = shared_four(queries + q * MAX_DIM + d + e);
                            score[q] = fmaf(key[e], query.x, score[q]);
                            score[q] = fmaf(key[e + 1], query.y, score[q]);
                            score[q] = fmaf(key[e + 2], query.z, score[q]);
                            score[q] = fmaf(key[e + 3], query.w, score[q]);
                        }
                    }
                }
            } else {
                for (u32 d = 0; d < dim; ++d) {
                    const float key = load_one(dtype, keys, row + d);
#pragma unroll
                    for (int q = 0; q < Q; ++q) score[q] = fmaf(key, queries[q * MAX_DIM + d], score[q]);
                }
            }
        }
#pragma unroll
        for (int q = 0; q < Q; ++q) {
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
            weights[q * THREADS + t] = weight;
            total[q] = total[q] * factor + weight;
            sum[q] *= factor;
            top[q] = max;
        }
        __syncthreads();
        const u32 count = smaller(THREADS, longest - base);
        if (group < groups) {
#pragma unroll 4
            for (u32 j = group; j < count; j += groups) {
                const bool own = fresh.value != nullptr && base + j == fresh.at;
                const float value =
                    own ? fresh.value[column] : load_one(dtype, values, (u64)(base + j) * dim + column);
#pragma unroll
                for (int q = 0; q < Q; ++q) {
                    if (base + j < len[q]) sum[q] = fmaf(weights[q * THREADS + j], value, sum[q]);
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        weights[q * THREADS + t] = sum[q];
        total[q] = block_sum(total[q], scratch);
    }
    // The barriers of block_sum separate the writes of the sums from their reads.
    if (t < dim) {
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            float all = 0.0f;
            for (u32 g = 0; g < groups; ++g) all += weights[q * THREADS + g * dim + t];
            out(q, t, all * (1.0f / total[q]));
        }
    }
}

// The keys or values of one head.
INLINE const void* head_of(u32 dtype, const void* cache, u64 at) { return (const u8*)cache + at * size_of(dtype); }

// Rows `first` to `first + Q` of head `head`.
template <int Q>
INLINE void attend_rows(const AttentionParams& p, const void* queries, const void* keys, const void* values,
                        const void* position, void* output) {
    __shared__ __align__(16) float scaled[Q * MAX_DIM];
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
    const void* k = head_of(p.cache, keys, cache);
    const void* v = head_of(p.cache, values, cache);
    const Fresh none = {nullptr, nullptr, 0};
    attend<Q>(scaled, p.cache, k, v, dim, len, none, [&](int q, u32 d, float value) {
        const u32 m = first + q;
        if (m < p.m) store_one(p.x, output, (u64)m * p.ldo + (u64)head * dim + d, value);
    });
}

KERNEL(256) attention(const void* queries, const void* keys, const void* values, const void* position, void* output,
                      AttentionParams p) {
    if (p.m == 1) attend_rows<1>(p, queries, keys, values, position, output);
    else attend_rows<ROWS>(p, queries, keys, values, position, output);
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

// A block computes one query head. All blocks of a group compute the new key and value; the first
// block writes them to the cache.
KERNEL(256) decode_attention(const void* queries, const void* keys, const void* values, const void* table, void* key_cache,
                             void* value_cache, const void* position, void* output, AttentionParams p) {
    __shared__ __align__(16) float query[MAX_DIM];
    __shared__ float key[MAX_DIM];
    __shared__ float value[MAX_DIM];
    const u32 dim = p.head_dim, head = blockIdx.x, group = p.heads / p.kv_heads, kv = head / group, t = threadIdx.x;
    const u32 at = position_of(position, 0, p.positions);
    if (at == p.positions) return poison(p.x, output, (u64)head * dim, dim);
    const u64 cache = (u64)kv * p.positions * dim, slot = cache + (u64)at * dim;
    const float* angles = (const float*)table + (u64)at * p.rotary;
    if (t < dim) {
        const bool put = head % group == 0;
        query[t] = rotated(p.x, queries, (u64)head * dim, angles, p.rotary, t, p.scale);
        key[t] = kept(p.cache, key_cache, slot + t, rotated(p.x, keys, (u64)kv * dim, angles, p.rotary, t, 1.0f), put);
        value[t] = kept(p.cache, value_cache, slot + t, load_one(p.x, values, (u64)kv * dim + t), put);
    }
    const u32 len[1] = {at + 1};
    const Fresh fresh = {key, value, at};
    const void* k = head_of(p.cache, key_cache, cache);
    const void* v = head_of(p.cache, value_cache, cache);
    attend<1>(query, p.cache, k, v, dim, len, fresh,
              [&](int, u32 d, float x) { store_one(p.x, output, (u64)head * dim + d, x); });
}
