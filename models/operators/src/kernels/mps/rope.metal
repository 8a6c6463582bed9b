// Rotary position embedding ("rotate half"), and the key-value cache that rotated keys go to: a
// threadgroup for each row.
//
// A layout says where a cache has its keys and values. The table has a row per position:
// `rotary / 2` cosines, then as many sines.

// Elements `i` and `i + half` of a head after the rotation.
inline float2 rotate(float2 v, device const float* angles, u32 i, u32 half_dim) {
    const float c = angles[i], s = angles[half_dim + i];
    float2 turned;
    turned.x = v.x * c - v.y * s;
    turned.y = fma(v.y, c, v.x * s);
    return turned;
}

inline float2 load_pair(u32 dtype, device const u8* x, u64 first, u32 distance) {
    float2 v;
    v.x = load(dtype, x, first);
    v.y = load(dtype, x, first + distance);
    return v;
}

inline void store_pair(u32 dtype, device u8* x, u64 first, u32 distance, float2 v) {
    store(dtype, x, first, v.x);
    store(dtype, x, first + distance, v.y);
}

// Rotates the heads of row `m` of `x` in place, or fills the row with NaN if it is at none of
// `room` positions.
inline void rotate_row(constant RopeParams& p, device u8* x, u32 m, device const float* table, u32 position, u32 room,
                       Place at) {
    const u64 row = u64(m) * p.ld[0];
    if (position == room) return poison(p.x, x, row, p.heads * p.head_dim, at);
    device const float* angles = table + u64(position) * p.rotary;
    const u32 half_dim = p.rotary / 2;
    for (u32 t = at.index; t < p.heads * half_dim; t += at.count) {
        const u32 i = t % half_dim;
        const u64 first = row + u64(t / half_dim) * p.head_dim + i;
        store_pair(p.x, x, first, half_dim, rotate(load_pair(p.x, x, first, half_dim), angles, i, half_dim));
    }
}

// Appends row `row` to a part of the cache at a position; the first `rotary` elements of each head
// are rotated.
inline void append(constant RopeParams& p, device const u8* x, u64 row, device u8* cache, u32 part, u32 position,
                   device const float* angles, u32 rotary, Place at) {
    const u64 begin = head_at(p.layout, part, 0, 0, p.head_dim) + u64(position) * p.layout.position * p.head_dim;
    const u32 half_dim = rotary / 2, steps = p.head_dim - half_dim;
    for (u32 t = at.index; t < p.kv_heads * steps; t += at.count) {
        const u32 head = t / steps, i = t % steps;
        const u64 from = row + u64(head) * p.head_dim, to = begin + u64(head) * p.layout.head * p.head_dim;
        if (i < half_dim) {
            const float2 turned = rotate(load_pair(p.x, x, from + i, half_dim), angles, i, half_dim);
            store_pair(p.cache, cache, to + i, half_dim, turned);
        } else {
            // The elements after the rotated ones.
            store(p.cache, cache, to + i + half_dim, load(p.x, x, from + i + half_dim));
        }
    }
}

[[max_total_threads_per_threadgroup(256)]]
kernel void rope(device u8* x [[buffer(0)]], device const u8* table [[buffer(1)]],
                 device const u8* position [[buffer(2)]], constant RopeParams& p [[buffer(3)]],
                 uint3 group [[threadgroup_position_in_grid]], uint3 threads [[threads_per_threadgroup]],
                 uint index [[thread_index_in_threadgroup]]) {
    const Place at = {index, threads.x, 0, 0};
    rotate_row(p, x, group.x, (device const float*)table, position_of(position, group.x, p.positions),
               p.positions, at);
}

[[max_total_threads_per_threadgroup(256)]]
kernel void cache_append(device const u8* x [[buffer(0)]], device u8* cache [[buffer(1)]],
                         device const u8* position [[buffer(2)]], constant RopeParams& p [[buffer(3)]],
                         uint3 group [[threadgroup_position_in_grid]], uint3 threads [[threads_per_threadgroup]],
                         uint index [[thread_index_in_threadgroup]]) {
    const Place at = {index, threads.x, 0, 0};
    const u32 row = position_of(position, group.x, p.positions);
    if (row == p.positions) return;
    append(p, x, u64(group.x) * p.ld[0], cache, p.layout.keys, row, nullptr, 0, at);
}

[[max_total_threads_per_threadgroup(256)]]
kernel void rope_append(device u8* queries [[buffer(0)]], device const u8* keys [[buffer(1)]],
                        device const u8* values [[buffer(2)]], device const u8* table [[buffer(3)]],
                        device u8* key_cache [[buffer(4)]], device u8* value_cache [[buffer(5)]],
                        device const u8* position [[buffer(6)]], device const u8* limits [[buffer(7)]],
                        constant RopeParams& p [[buffer(8)]],
                        uint3 group [[threadgroup_position_in_grid]], uint3 threads [[threads_per_threadgroup]],
                        uint index [[thread_index_in_threadgroup]]) {
    const Place at = {index, threads.x, 0, 0};
    const u32 m = group.x, room = room_of(p, limits, 0), place = position_of(position, m, room);
    const u32 row = place < own_of(p, limits, 0) ? room : place;
    rotate_row(p, queries, m, (device const float*)table, row, room, at);
    if (row == room) return;
    device const float* angles = (device const float*)table + u64(row) * p.rotary;
    append(p, keys, u64(m) * p.ld[1], key_cache, p.layout.keys, row, angles, p.rotary, at);
    // Keys and values are in one memory where it has limits.
    device u8* to = p.layout.limits == 0 ? value_cache : key_cache;
    append(p, values, u64(m) * p.ld[2], to, p.layout.values, row, nullptr, 0, at);
}
