// Causal grouped-query attention over a key-value cache. A layout says where it has its keys and
// values.
//
// A threadgroup computes one head and some rows of queries, which share the keys and values that it
// reads. The threadgroup iterates over the positions in tiles with one position for each thread.
// For each tile it computes the scores (a thread for each position), the running maximum and sum of
// the online softmax, and the weighted sum of the values. In the last step a thread computes a
// column for one of several groups of positions. No buffer of the context's length is needed.
// Positions that a row does not see are never multiplied, so a NaN there has no effect.

constant constexpr u32 THREADS = 256;
constant constexpr u32 SIMDS = THREADS / SIMD;
constant constexpr u32 MAX_DIM = 256;
// Rows of a threadgroup if the launch has several rows.
constant constexpr int ROWS = 4;

// A position that no row has.
constant constexpr u32 NOWHERE = 0xffffffffu;

// The key and value at position `at` of a launch with one row: the threadgroup has computed them,
// and other threadgroups must not read them from the cache yet.
struct Fresh {
    threadgroup const float* key;
    threadgroup const float* value;
    u32 at;
};

// The caches of one head.
struct Head {
    device const u8* keys;
    device const u8* values;
    u32 dtype;
    u32 dim;
    // Elements from one position to the next.
    u32 pitch;
};

// The destination: row `q` of `rows` begins at element `from + q * ld`.
struct Rows {
    device u8* y;
    u64 from;
    u32 ld;
    u32 rows;
    u32 dtype;
};

// Threadgroup memory: for each query a weight of each thread, and a place for each SIMD-group.
struct Room {
    threadgroup float* weights;
    threadgroup float* scratch;
};

// Adds the products of a key with `Q` queries (rows of MAX_DIM, scaled).
template <int Q>
inline void add_scores(Head head, u32 position, threadgroup const float* queries, thread float (&score)[Q]) {
    const u64 row = u64(position) * head.pitch;
    const bool wide = head.dim % 4 == 0 && by_four(head.dtype, head.keys, 0);
    for (u32 d = 0; d < head.dim; d += 4) {
        const float4 key = load4(head.dtype, head.keys, row + d, head.dim - d, wide);
#pragma unroll
        for (int q = 0; q < Q; ++q) score[q] += dot(key, *(threadgroup const float4*)(queries + q * MAX_DIM + d));
    }
}

// Attends with `Q` queries (rows of MAX_DIM, scaled; zero from `dim` to a multiple of four); query
// `q` sees the first `len[q]` positions. All threads of the threadgroup take part. The caller's
// writes to threadgroup memory are visible afterwards.
template <int Q>
inline void attend(Head head, threadgroup const float* queries, thread const u32 (&len)[Q], Fresh fresh,
                   Room room, Rows to, Place at) {
    const u32 t = at.index, dim = head.dim;
    const u32 groups = THREADS / dim, group = t / dim, column = t % dim;
    u32 longest = 0;
    float top[Q], total[Q], sum[Q];
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        longest = max(longest, len[q]);
        top[q] = -infinity();
        total[q] = 0.0f;
        sum[q] = 0.0f;
    }
    group_barrier();
    for (u32 base = 0; base < longest; base += THREADS) {
        const u32 position = base + t;
        float score[Q];
#pragma unroll
        for (int q = 0; q < Q; ++q) score[q] = 0.0f;
        if (position == fresh.at) {
            for (u32 d = 0; d < dim; ++d) {
#pragma unroll
                for (int q = 0; q < Q; ++q) score[q] = fma(fresh.key[d], queries[q * MAX_DIM + d], score[q]);
            }
        } else if (position < longest) {
            add_scores<Q>(head, position, queries, score);
        }
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            const float largest = simd_max(position < len[q] ? score[q] : -infinity());
            if (at.lane == 0) room.scratch[q * SIMDS + at.simd] = largest;
        }
        group_barrier();
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            float largest = top[q];
            for (u32 s = 0; s < SIMDS; ++s) largest = fmax(largest, room.scratch[q * SIMDS + s]);
            // While all scores so far are -infinity, the exponentials must be zero.
            const float from = largest == -infinity() ? 0.0f : largest;
            const float factor = largest == top[q] ? 1.0f : exponential(top[q] - from);
            const float weight = position < len[q] ? exponential(score[q] - from) : 0.0f;
            room.weights[q * THREADS + t] = weight;
            total[q] = total[q] * factor + weight;
            sum[q] *= factor;
            top[q] = largest;
        }
        group_barrier();
        const u32 count = min(THREADS, longest - base);
        for (u32 j = group; group < groups && j < count; j += groups) {
            const float value = base + j == fresh.at
                                    ? fresh.value[column]
                                    : load(head.dtype, head.values, u64(base + j) * head.pitch + column);
#pragma unroll
            for (int q = 0; q < Q; ++q) {
                if (base + j < len[q]) sum[q] = fma(room.weights[q * THREADS + j], value, sum[q]);
            }
        }
        group_barrier();
    }
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        room.weights[q * THREADS + t] = sum[q];
        total[q] = group_sum(total[q], room.scratch, at);
    }
    // The barriers of group_sum separate the writes of the sums from their reads.
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        if (t >= dim || u32(q) >= to.rows) continue;
        float all = 0.0f;
        for (u32 g = 0; g < groups; ++g) all += room.weights[q * THREADS + g * dim + t];
        store(to.dtype, to.y, to.from + u64(q) * to.ld + t, all * (1.0f / total[q]));
    }
}

// The caches of a key-value head of a sequence. Keys and values are in one memory where it has
// limits.
inline Head head_of(constant AttentionParams& p, device const u8* keys, device const u8* values, u32 sequence, u32 kv) {
    constant CacheLayout& l = p.layout;
    const u64 size = size_of(p.cache), key = head_at(l, l.keys, sequence, kv, p.head_dim) * size;
    const u64 value = head_at(l, l.values, sequence, kv, p.head_dim) * size;
    device const u8* with_values = l.limits == 0 ? values : keys;
    const Head head = {keys + key, with_values + value, p.cache, p.head_dim, l.position * p.head_dim};
    return head;
}

// Rows `first` to `first + Q` of a head.
template <int Q>
inline void attend_rows(constant AttentionParams& p, device const u8* queries, device const u8* keys,
                        device const u8* values, device const u8* position, device u8* y, device const u8* limits,
                        u32 first, u32 head, threadgroup float* scaled, Room room, Place at) {
    const u32 dim = p.head_dim, t = at.index, positions = room_of(p, limits, 0);
    u32 len[Q];
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        const u32 m = first + q;
        const u32 own = m < p.m ? position_of(position, m, positions) : positions;
        len[q] = own == positions ? 0 : own + 1;
        const u64 from = u64(m) * p.ldq + u64(head) * dim + t;
        scaled[q * MAX_DIM + t] = m < p.m && t < dim ? load(p.x, queries, from) * p.scale : 0.0f;
    }
    const Fresh none = {nullptr, nullptr, NOWHERE};
    const Rows to = {y, u64(first) * p.ldo + u64(head) * dim, p.ldo, p.m - first, p.x};
    attend<Q>(head_of(p, keys, values, 0, head / (p.heads / p.kv_heads)), scaled, len, none, room, to, at);
}

[[max_total_threads_per_threadgroup(256)]]
kernel void attention(device const u8* queries [[buffer(0)]], device const u8* keys [[buffer(1)]],
                      device const u8* values [[buffer(2)]], device const u8* position [[buffer(3)]],
                      device u8* y [[buffer(4)]], device const u8* limits [[buffer(5)]],
                      constant AttentionParams& p [[buffer(6)]],
                      uint3 group [[threadgroup_position_in_grid]], uint3 threads [[threads_per_threadgroup]],
                      uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                      uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float4 scaled[ROWS * MAX_DIM / 4];
    threadgroup float weights[ROWS * THREADS];
    threadgroup float scratch[ROWS * SIMDS];
    const Place at = {index, threads.x, lane, simd};
    const Room room = {weights, scratch};
    threadgroup float* floats = (threadgroup float*)scaled;
    if (p.m == 1) attend_rows<1>(p, queries, keys, values, position, y, limits, group.x, group.y, floats, room, at);
    else attend_rows<ROWS>(p, queries, keys, values, position, y, limits, group.x * ROWS, group.y, floats, room, at);
}

// Element `i` of a head after the rotation of the first `rotary`, times `scale`; each thread
// computes its own.
inline float rotated(u32 dtype, device const u8* x, u64 head, device const float* angles, u32 rotary, u32 i,
                     float scale) {
    const u32 half_dim = rotary / 2;
    const float self = load(dtype, x, head + i) * scale;
    if (i >= rotary) return self;
    const bool low = i < half_dim;
    const float other = load(dtype, x, head + (low ? i + half_dim : i - half_dim)) * scale;
    const float c = angles[low ? i : i - half_dim], s = angles[low ? i + half_dim : i];
    return low ? self * c - other * s : fma(self, c, other * s);
}

// The value as the cache holds it: narrowed and widened again. With `put` it is also stored.
inline float kept(u32 dtype, device u8* cache, u64 at, float x, bool put) {
    if (put) store(dtype, cache, at, x);
    if (dtype == 0) return x;
    return dtype == 1 ? Bf16::widen(Bf16::narrow(x)) : F16::widen(F16::narrow(x));
}

// A threadgroup computes one query head of a row, which has its own position and caches. All
// threadgroups of a group compute the new key and value; the first threadgroup writes them to the
// cache. The context is not split, so the scratch memory stays unused.
[[max_total_threads_per_threadgroup(256)]]
kernel void decode_attention(device const u8* queries [[buffer(0)]], device const u8* keys [[buffer(1)]],
                             device const u8* values [[buffer(2)]], device const u8* table [[buffer(3)]],
                             device u8* key_cache [[buffer(4)]], device u8* value_cache [[buffer(5)]],
                             device const u8* position [[buffer(6)]], device u8* y [[buffer(7)]],
                             device u8* [[buffer(8)]], device const u8* limits [[buffer(9)]],
                             constant AttentionParams& p [[buffer(10)]],
                             uint3 place [[threadgroup_position_in_grid]],
                             uint3 threads [[threads_per_threadgroup]], uint t [[thread_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float4 query[MAX_DIM / 4];
    threadgroup float key[MAX_DIM];
    threadgroup float value[MAX_DIM];
    threadgroup float weights[THREADS];
    threadgroup float scratch[SIMDS];
    const Place at = {t, threads.x, lane, simd};
    const Room room = {weights, scratch};
    const u32 dim = p.head_dim, row = place.y, head = place.x, group = p.heads / p.kv_heads;
    const u64 query_at = u64(row) * p.ldq + u64(head) * dim, to_at = u64(row) * p.ldo + u64(head) * dim;
    // The row's new key and value, and its caches.
    const u32 kv = head / group, positions = room_of(p, limits, row);
    const u64 new_at = (u64(row) * p.kv_heads + kv) * dim;
    const u32 own = position_of(position + 4 * u64(row), 0, positions);
    if (own == positions || own < own_of(p, limits, row)) return poison(p.x, y, to_at, dim, at);
    constant CacheLayout& l = p.layout;
    const u64 slot = u64(own) * l.position * dim + t;
    const u64 key_slot = head_at(l, l.keys, row, kv, dim) + slot;
    const u64 value_slot = head_at(l, l.values, row, kv, dim) + slot;
    device u8* with_values = l.limits == 0 ? value_cache : key_cache;
    device const float* angles = (device const float*)table + u64(own) * p.rotary;
    threadgroup float* floats = (threadgroup float*)query;
    floats[t] = t < dim ? rotated(p.x, queries, query_at, angles, p.rotary, t, p.scale) : 0.0f;
    if (t < dim) {
        const bool put = head % group == 0;
        key[t] = kept(p.cache, key_cache, key_slot, rotated(p.x, keys, new_at, angles, p.rotary, t, 1.0f), put);
        value[t] = kept(p.cache, with_values, value_slot, load(p.x, values, new_at + t), put);
    }
    const u32 len[1] = {own + 1};
    const Fresh fresh = {key, value, own};
    const Rows to = {y, to_at, p.ldo, 1, p.x};
    attend<1>(head_of(p, key_cache, value_cache, row, kv), floats, len, fresh, room, to, at);
}
