// Rotary position embedding ("rotate half"), and the key-value cache that rotated keys go to: a block for each row.
//
// A layout says where a cache has its keys and values. The table has a row per position: `rotary / 2` cosines, then as many sines.

// Rotates elements `i` to `i + N` of a head, and those `half` behind.
template <int N> INLINE void rotate(float (&a)[N], float (&b)[N], const float* angles, u32 i, u32 half) {
    float c[N], d[N];
    load<F32>(angles, i, c);
    load<F32>(angles, half + i, d);
#pragma unroll
    for (int e = 0; e < N; ++e) {
        float first = a[e] * c[e] - b[e] * d[e];
        b[e] = fmaf(b[e], c[e], a[e] * d[e]);
        a[e] = first;
    }
}

// Rotates the heads of row `m` of `x` in place, `N` elements at a time, or fills the row with NaN if it is at none of
// `room` positions.
template <int N>
INLINE void rotate_row(const RopeParams& p, void* x, u32 m, const float* table, u32 at, u32 room) {
    u64 row = (u64)m * p.ld[0];
    if (at == room) return poison(p.x, x, row, p.heads * p.head_dim);
    const float* angles = table + (u64)at * p.rotary;
    u32 half = p.rotary / 2, steps = half / N;
    for (u32 t = threadIdx.x; t < p.heads * steps; t += blockDim.x) {
        u32 i = t % steps * N;
        u64 first = row + (u64)(t / steps) * p.head_dim + i;
        float a[N], b[N];
        load(p.x, x, first, a);
        load(p.x, x, first + half, b);
        rotate(a, b, angles, i, half);
        store(p.x, x, first, a);
        store(p.x, x, first + half, b);
    }
}

// Appends row `m` to a part of the cache at position `at`, `N` elements at a time; the first `rotary` elements of each
// head are rotated.
template <int N>
INLINE void append(const RopeParams& p, const void* x, u64 row, void* cache, u32 part, u32 at, const float* angles,
                   u32 rotary) {
    const u64 first = head_at(p.layout, part, 0, 0, p.head_dim) + (u64)at * p.layout.position * p.head_dim;
    u32 half = rotary / 2, steps = (p.head_dim - half) / N;
    for (u32 t = threadIdx.x; t < p.kv_heads * steps; t += blockDim.x) {
        u32 head = t / steps, i = t % steps * N;
        u64 from = row + (u64)head * p.head_dim, to = first + (u64)head * p.layout.head * p.head_dim;
        float a[N], b[N];
        load(p.x, x, from + i + half, b);
        if (i < half) {
            load(p.x, x, from + i, a);
            rotate(a, b, angles, i, half);
            store(p.cache, cache, to + i, a);
        }
        // Those behind `rotary` are not rotated.
        store(p.cache, cache, to + i + half, b);
    }
}

KERNEL(256) rope(void* x, const void* table, const void* position, RopeParams p) {
    begin();
    rotate_row<1>(p, x, blockIdx.x, (const float*)table, position_of(position, blockIdx.x, p.positions), p.positions);
}

KERNEL(256) cache_append(const void* x, void* cache, const void* position, RopeParams p) {
    begin();
    u32 at = position_of(position, blockIdx.x, p.positions);
    if (at == p.positions) return;
    append<1>(p, x, (u64)blockIdx.x * p.ld[0], cache, p.layout.keys, at, nullptr, 0);
}

// One row, `N` elements at a time.
template <int N>
INLINE void rotate_and_append(const RopeParams& p, void* queries, const void* keys, const void* values, const void* table,
                              void* key_cache, void* value_cache, u32 at, u32 room) {
    u32 m = blockIdx.x;
    rotate_row<N>(p, queries, m, (const float*)table, at, room);
    if (at == room) return;
    const float* angles = (const float*)table + (u64)at * p.rotary;
    append<N>(p, keys, (u64)m * p.ld[1], key_cache, p.layout.keys, at, angles, p.rotary);
    append<N>(p, values, (u64)m * p.ld[2], value_cache, p.layout.values, at, nullptr, 0);
}

KERNEL(256) rope_append(void* queries, const void* keys, const void* values, const void* table, void* key_cache,
                        void* value_cache, const void* position, const void* limits, RopeParams p) {
    begin();
    u32 m = blockIdx.x, room = room_of(p, limits, 0), at = position_of(position, m, room);
    if (at < own_of(p, limits, 0)) at = room;
    void* to = values_in(p.layout, key_cache, value_cache);
    const bool wide = p.head_dim % 4 == 0 && p.rotary % 8 == 0 && address(table) % 16 == 0 &&
                      by_four(p.x, queries, p.ld[0]) && by_four(p.x, keys, p.ld[1]) && by_four(p.x, values, p.ld[2]) &&
                      by_four(p.cache, key_cache, 0) && by_four(p.cache, to, 0);
    if (wide) rotate_and_append<4>(p, queries, keys, values, table, key_cache, to, at, room);
    else rotate_and_append<1>(p, queries, keys, values, table, key_cache, to, at, room);
}
