// Rotary position embedding ("rotate half"), and the key-value cache that rotated keys go to: a block for each row.
//
// A layout says where a cache has its keys and values. The table has a row per position: `rotary / 2` cosines, then as many sines.

// Rotates elements `i` and `i + half` of a head.
INLINE void rotate(float& a, float& b, const float* angles, u32 i, u32 half) {
    float c = angles[i], d = angles[half + i];
    float first = a * c - b * d;
    b = fmaf(b, c, a * d);
    a = first;
}

// Rotates the heads of row `m` of `x` in place, or fills the row with NaN if it is at none of `room` positions.
INLINE void rotate_row(const RopeParams& p, void* x, u32 m, const float* table, u32 at, u32 room) {
    u64 row = (u64)m * p.ld[0];
    if (at == room) return poison(p.x, x, row, p.heads * p.head_dim);
    const float* angles = table + (u64)at * p.rotary;
    u32 half = p.rotary / 2;
    for (u32 t = threadIdx.x; t < p.heads * half; t += blockDim.x) {
        u32 i = t % half;
        u64 first = row + (u64)(t / half) * p.head_dim + i;
        float a = load_one(p.x, x, first), b = load_one(p.x, x, first + half);
        rotate(a, b, angles, i, half);
        store_one(p.x, x, first, a);
        store_one(p.x, x, first + half, b);
    }
}

// Appends row `m` to a part of the cache at position `at`; the first `rotary` elements of each head are rotated.
INLINE void append(const RopeParams& p, const void* x, u64 row, void* cache, u32 part, u32 at, const float* angles,
                   u32 rotary) {
    const u64 first = head_at(p.layout, part, 0, 0, p.head_dim) + (u64)at * p.layout.position * p.head_dim;
    u32 half = rotary / 2, steps = p.head_dim - half;
    for (u32 t = threadIdx.x; t < p.kv_heads * steps; t += blockDim.x) {
        u32 head = t / steps, i = t % steps;
        u64 from = row + (u64)head * p.head_dim, to = first + (u64)head * p.layout.head * p.head_dim;
        if (i < half) {
            float a = load_one(p.x, x, from + i), b = load_one(p.x, x, from + i + half);
            rotate(a, b, angles, i, half);
            store_one(p.cache, cache, to + i, a);
            store_one(p.cache, cache, to + i + half, b);
        } else {
            // The elements after the rotated ones.
            store_one(p.cache, cache, to + i + half, load_one(p.x, x, from + i + half));
        }
    }
}

KERNEL(256) rope(void* x, const void* table, const void* position, RopeParams p) {
    begin();
    rotate_row(p, x, blockIdx.x, (const float*)table, position_of(position, blockIdx.x, p.positions), p.positions);
}

KERNEL(256) cache_append(const void* x, void* cache, const void* position, RopeParams p) {
    begin();
    u32 at = position_of(position, blockIdx.x, p.positions);
    if (at == p.positions) return;
    append(p, x, (u64)blockIdx.x * p.ld[0], cache, p.layout.keys, at, nullptr, 0);
}

KERNEL(256) rope_append(void* queries, const void* keys, const void* values, const void* table, void* key_cache,
                        void* value_cache, const void* position, const void* limits, RopeParams p) {
    begin();
    u32 m = blockIdx.x, room = room_of(p, limits, 0), at = position_of(position, m, room);
    if (at < own_of(p, limits, 0)) at = room;
    rotate_row(p, queries, m, (const float*)table, at, room);
    if (at == room) return;
    const float* angles = (const float*)table + (u64)at * p.rotary;
    append(p, keys, (u64)m * p.ld[1], key_cache, p.layout.keys, at, angles, p.rotary);
    void* to = values_in(p.layout, key_cache, value_cache);
    append(p, values, (u64)m * p.ld[2], to, p.layout.values, at, nullptr, 0);
}
