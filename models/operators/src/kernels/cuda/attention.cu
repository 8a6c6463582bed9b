// Causal grouped-query attention over a key-value cache. A layout says where it has its keys and values.
//
// A block of the general kernel computes some rows of one head. It iterates over the positions in tiles
// with two threads for each position. For each tile it computes the scores, the running maximum and sum of the
// online softmax, and the weighted sum of the values. In the last step a thread computes some columns
// for one of several groups of positions. No buffer of the context's length is needed. Positions
// that a row does not see are never multiplied, so a NaN there has no effect.
//
// A block of the decode kernel computes some heads of a group for one row. Each row has its own
// position, caches and scratch memory. Each head has some warps, which share nothing while they go
// over the positions: some lanes hold a row of keys and values, and have a softmax of their own. The
// block combines them in the end. A long context is split over blocks. Each leaves its maximum, sum and
// weighted sum in the scratch memory, and the last block to do so combines them in the order of the
// positions.
//
// A short context is a matter of latency, not of bytes. So all that is known without the position is
// computed and read first, and a warp has one head: its code is short.

static constexpr u32 THREADS = 256;
static constexpr u32 WARPS = THREADS / WARP;
static constexpr u32 MAX_DIM = 256;
// Positions of a tile.
static constexpr u32 TILE = THREADS / 2;
// Rows of a block.
static constexpr int ROWS = 4;
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

// ---- Decode

// Query heads of a block of the decode kernel.
static constexpr int HEADS = 4;

// Rows of keys and of values that a lane computes with at a time. As many are under way.
template <class T> static constexpr int DEEP = sizeof(typename T::raw) == 2 ? 4 : 2;
// The most rows that a warp has at a time, with 4 lanes each.
static constexpr u32 SIDES = 8;

// The lanes that hold a row of the cache: a power of two.
INLINE u32 lanes_of(u32 dim) { return dim <= SMALL_DIM ? 4 : dim <= 64 ? 8 : dim <= 128 ? 16 : 32; }

// One row, as most launches have, needs no division.
INLINE Share share_of(const AttentionParams& p) {
    Share s;
    const u32 group = p.heads / p.kv_heads;
    s.heads = group <= 2 ? group : HEADS;
    s.blocks = (group + s.heads - 1) / s.heads;
    s.row = p.m == 1 ? 0 : s.blocks == 1 ? blockIdx.z : blockIdx.z / s.blocks;
    s.block = blockIdx.z - s.row * s.blocks;
    s.own = s.block * s.heads;
    return s;
}

// Rows of keys and values of a lane.
template <class T> struct Batch {
    Words<T> key[DEEP<T>];
    Words<T> value[DEEP<T>];
};

// The first `count` rows, `apart` elements from each other.
template <class T>
static __device__ __noinline__ Batch<T> single_batch_of(const void* keys, const void* values, u64 apart, u32 count,
                                                        u32 column, u32 dim) {
    typedef typename T::raw raw;
    Batch<T> b;
#pragma unroll
    for (u32 i = 0; i < DEEP<T>; ++i) {
        b.key[i] = b.value[i] = Words<T>();
        if (i >= count) continue;
        b.key[i] = single_words_of<T>((const raw*)keys + i * apart, column, dim);
        b.value[i] = single_words_of<T>((const raw*)values + i * apart, column, dim);
    }
    return b;
}

// The compiler computes an address here, not behind the wait that follows.
template <class P> INLINE void settle(P& p) {
#ifndef LEASEHOLD_EMULATED
    asm volatile("" : "+l"(p));
#endif
}

// A word, by a volatile read: the compiler leaves it where it is, long before its use.
INLINE i32 read_word_now(const i32* p) {
#ifndef LEASEHOLD_EMULATED
    i32 word;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(word) : "l"(p));
    return word;
#else
    return *p;
#endif
}

// Shared memory of a block.
typedef DecodePlace<THREADS * STEP, WARPS * SIDES, HEADS> Shared;

// The parts of a row that a block needs.
struct DecodeRow {
    Share share;
    // The lane's elements.
    u32 column;
    // The rows of all warps of a head at a time. The head of the warp, and the place of the lane's
    // row among its rows.
    u32 all;
    u32 own;
    u32 mine;
    // Whether units and angles can be read at once.
    bool whole;
    Unit query;
    Unit key;
    Unit value;
    // Position 0 of the keys and of the values in the caches.
    u8* keys;
    u8* values;
};

// A block computes a part of the context for some heads of a group. All blocks of the newest part
// compute the new key and value; the first block of each group writes them to the cache.
template <class T>
INLINE void decode(const AttentionParams& p, const DecodeRow& row, const float* angles, void* output, u32 at, Shared& place) {
    typedef typename T::raw raw;
    constexpr int deep = DEEP<T>;
    const u32 dim = p.head_dim, pitch = p.layout.position * dim, column = row.column;
    const u32 t = threadIdx.x, warp = t / WARP, lane = t % WARP;
    const u32 begin = blockIdx.x * part_of(p), part_end = smaller(at, begin + part_of(p));
    // A warp without a head has nothing to read.
    const u32 end = row.query.row != nullptr ? part_end : begin;
    const raw* keys = (const raw*)row.keys;
    const raw* values = (const raw*)row.values;
    const u32 lanes = lanes_of(dim), side = lane / lanes, all = row.all, own = row.own, mine = row.mine;
    const bool wide = dim % STEP == 0 && (address(keys) | address(values)) % 16 == 0, held = column < dim;
    Lane cosine = {}, sine = {};
    if (row.whole && column < p.rotary) {
        const u32 half = p.rotary / 2, i = column < half ? column : column - half;
#pragma unroll
        for (int e = 0; e < STEP; e += 4) {
            floats_of(read_now(angles + i + e), cosine.v + e);
            floats_of(read_now(angles + half + i + e), sine.v + e);
        }
    }
    // The first rows are on their way while the query is rotated.
    const u32 turn = deep * all;
    u32 base = begin + mine;
    Batch<T> next;
    auto fetch = [&]() {
#pragma unroll
        for (int i = 0; i < deep; ++i) {
            const u32 position = base + i * all;
            next.key[i] = next.value[i] = Words<T>();
            if (!wide || !held || position >= end) continue;
            const raw* to_key = keys + (u64)position * pitch + column;
            const raw* to_value = values + (u64)position * pitch + column;
#pragma unroll
            for (int w = 0; w < Words<T>::COUNT; ++w) {
                next.key[i].word[w] = read_now((const uint4*)to_key + w);
                next.value[i].word[w] = read_now((const uint4*)to_value + w);
            }
        }
    };
    fetch();
    // So are the others. Rows that follow each other are one.
    if (begin + turn < part_end) {
        const u32 of_row = dim * (u32)sizeof(raw), first = begin + turn;
        auto ask = [&](u64 byte) {
            prefetch((const u8*)keys + byte);
            prefetch((const u8*)values + byte);
        };
        if (pitch == dim) {
            const u32 lines = ((part_end - first) * of_row + 127) / 128;
#pragma unroll 1
            for (u32 i = t; i < lines; i += THREADS) ask((u64)first * of_row + i * 128);
        } else {
#pragma unroll 1
            for (u32 r = first + t; r < part_end; r += THREADS) {
#pragma unroll 1
                for (u32 byte = 0; byte < of_row; byte += 128) ask((u64)r * pitch * sizeof(raw) + byte);
            }
        }
    }
    // 2^x in place of e^x.
    const float scale = p.scale * 1.44269504088896340736f;
    const Lane query = rotated(p, row.query, column, row.whole, p.rotary, angles, cosine, sine, scale);
    // The new position comes first, in the last softmax of a head, which has the fewest rows.
    float top = -infinity(), total = 0.0f, sum[STEP];
#pragma unroll
    for (int e = 0; e < STEP; ++e) sum[e] = 0.0f;
    if (at < begin + part_of(p)) {
        const Words<T> new_key = words_of<T>(rotated(p, row.key, column, row.whole, p.rotary, angles, cosine, sine, 1.0f));
        const Words<T> new_value = words_of<T>(rotated(p, row.value, column, row.whole, 0, angles, cosine, sine, 1.0f));
        float x[STEP], score = 0.0f;
        unpack(new_key, x);
#pragma unroll
        for (int e = 0; e < STEP; ++e) score = fmaf(x[e], query.v[e], score);
        for (u32 step = lanes / 2; step > 0; step /= 2) score += __shfl_xor_sync(ALL, score, step);
        if (mine == all - 1) {
            top = fmaxf(top, score);
            total = power_of_two(score - (top == -infinity() ? 0.0f : top));
            unpack(new_value, x);
#pragma unroll
            for (int e = 0; e < STEP; ++e) sum[e] = x[e] * total;
            if (row.share.block == 0 && warp == WARPS - 1) {
                put<T>((raw*)row.keys + (u64)at * pitch, column, dim, wide, new_key);
                put<T>((raw*)row.values + (u64)at * pitch, column, dim, wide, new_value);
            }
        }
    }
#pragma unroll 1
    while (base - side < end) {
        Batch<T> now = next;
        bool seen[deep];
#pragma unroll
        for (int i = 0; i < deep; ++i) seen[i] = base + i * all < end;
        if (!wide && base < end) {
            const u64 first = (u64)base * pitch;
            now = single_batch_of<T>(keys + first, values + first, (u64)all * pitch, (end - base - 1) / all + 1, column, dim);
        }
        base += turn;
        if (base - side < end) fetch();
        float score[deep];
#pragma unroll
        for (int i = 0; i < deep; ++i) {
            float x[STEP];
            unpack(now.key[i], x);
            score[i] = 0.0f;
#pragma unroll
            for (int e = 0; e < STEP; ++e) score[i] = fmaf(x[e], query.v[e], score[i]);
        }
        for (u32 step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
            for (int i = 0; i < deep; ++i) score[i] += __shfl_xor_sync(ALL, score[i], step);
        }
        float max = top;
#pragma unroll
        for (int i = 0; i < deep; ++i) {
            score[i] = seen[i] ? score[i] : -infinity();
            max = fmaxf(max, score[i]);
        }
        // While all scores so far are -infinity, the weights must be zero.
        const float from = max == -infinity() ? 0.0f : max;
        const float factor = power_of_two(top - from);
        top = max;
        total *= factor;
#pragma unroll
        for (int e = 0; e < STEP; ++e) sum[e] *= factor;
#pragma unroll
        for (int i = 0; i < deep; ++i) {
            const float weight = power_of_two(score[i] - from);
            total += weight;
            float x[STEP];
            unpack(now.value[i], x);
#pragma unroll
            for (int e = 0; e < STEP; ++e) sum[e] = fmaf(weight, x[e], sum[e]);
        }
    }
    // The softmaxes of a head, in the order of its warps. The width is a power of two.
    const u32 width = lanes * STEP, shift = (u32)__ffs((int)width) - 1;
#pragma unroll
    for (int e = 0; e < STEP; e += 4) {
        *(float4*)(place.sums + (own * all + mine) * width + column + e) = make_float4(sum[e], sum[e + 1], sum[e + 2], sum[e + 3]);
    }
    if (lane % lanes == 0) {
        place.tops[own * all + mine] = top;
        place.totals[own * all + mine] = total;
    }
    __syncthreads();
    finish<THREADS>(p, place, all, shift, part_of(p), output, blockIdx.x);
}

INLINE void decode_rows(const void* queries, const void* keys, const void* values, const void* table, void* key_cache,
                        void* value_cache, const void* position, void* output, void* scratch, const void* limits,
                        const AttentionParams& p) {
    let_next_start();
    __shared__ Shared place;
    const Share share = share_of(p);
    const u32 part = part_of(p);
    const i32* own_position = (const i32*)position + share.row;
    if (threadIdx.x == 0) {
        prefetch(own_position);
        place.split = split_of(p, share, scratch);
    }
    const u32 dim = p.head_dim, kv = blockIdx.y, lane = threadIdx.x % WARP, size = size_of(p.x);
    // The warps of a head, as a power of two.
    const u32 warp = threadIdx.x / WARP, shift = share.heads == 1 ? 3 : share.heads == 2 ? 2 : 1, lanes = lanes_of(dim);
    const u32 head = share.own + (warp >> shift), group = p.heads / p.kv_heads;
    const u64 fresh = ((u64)share.row * p.kv_heads + kv) * dim * size;
    const CacheLayout& l = p.layout;
    DecodeRow row;
    row.share = share;
    row.column = lane % lanes * STEP;
    const u32 sides = WARP / lanes;
    row.all = sides << shift;
    row.own = warp >> shift;
    row.mine = (warp & ((1u << shift) - 1)) * sides + lane / lanes;
    u8* query = (u8*)queries + ((u64)share.row * p.ldq + (u64)(kv * group + head) * dim) * size;
    u8 *key = (u8*)keys + fresh, *value = (u8*)values + fresh;
    row.keys = (u8*)key_cache + head_at(l, l.keys, share.row, kv, dim) * size_of(p.cache);
    row.values = (u8*)values_in(l, key_cache, value_cache) + head_at(l, l.values, share.row, kv, dim) * size_of(p.cache);
    const u64 bits = address(query) | address(key) | address(value) | address(table);
    row.whole = dim % STEP == 0 && p.rotary / 2 % STEP == 0 && bits % 16 == 0;
    settle(own_position);
    settle(row.keys);
    settle(row.values);
    settle(query);
    settle(key);
    settle(value);
    wait_for_previous();
    // The position, the limits and the rows to rotate are on their way at a time.
    const i32 word = read_word_now(own_position);
    row.query = unit_of(p, head < group ? query : nullptr, row.column, row.whole, p.rotary);
    row.key = unit_of(p, key, row.column, row.whole, p.rotary);
    row.value = unit_of(p, value, row.column, row.whole, 0);
    const Memory memory = memory_of(p, limits, share.row);
    const u32 at = position_of(&word, 0, p.positions);
    // A short text leaves most blocks nothing to do. They do not wait for the limits.
    if (blockIdx.x > 0 && (at == p.positions || blockIdx.x * part > at)) return;
    if (outside(p, share, memory, at, blockIdx.x, output)) return;
    if (threadIdx.x == 0) place.split.at = at;
    const float* angles = (const float*)table + (u64)at * p.rotary;
    with_type(p.cache, [&](auto type) { decode<decltype(type)>(p, row, angles, output, at, place); });
}

DENSE_KERNEL(256, 2) decode_attention(const void* queries, const void* keys, const void* values, const void* table, void* key_cache,
                             void* value_cache, const void* position, void* output, void* scratch, const void* limits,
                             AttentionParams p) {
    decode_rows(queries, keys, values, table, key_cache, value_cache, position, output, scratch, limits, p);
}

// The same for bf16 alone. A step is short, and waits for the instructions of other types that it
// jumps over.
DENSE_KERNEL(256, 2) decode_attention_bf16(const void* queries, const void* keys, const void* values, const void* table,
                                  void* key_cache, void* value_cache, const void* position, void* output, void* scratch,
                                  const void* limits, AttentionParams p) {
    p.x = p.cache = BF16;
    decode_rows(queries, keys, values, table, key_cache, value_cache, position, output, scratch, limits, p);
}
