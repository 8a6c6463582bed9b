// Element-wise kernels: sums, products, SiLU·mul, casts; also fills and strided copies of bytes.

// Elements, or units, of a row that a threadgroup processes at once.
constant constexpr u32 PIECE = 1024;

// A part of a row.
struct Part {
    u32 row;
    u32 first;
    u32 length;
};

// The number of parts of rows of `width` elements.
inline u32 parts_across(u32 width) { return (width - 1) / PIECE + 1; }

inline Part part_of(u64 number, u32 across, u32 width) {
    const u32 first = u32(number % across) * PIECE;
    const Part part = {u32(number / across), first, min(PIECE, width - first)};
    return part;
}

struct Sum {
    static float4 of(float4 a, float4 b) { return a + b; }
};

struct Product {
    static float4 of(float4 a, float4 b) { return a * b; }
};

struct Gate {
    static float4 of(float4 a, float4 b) {
        float4 y;
        for (u32 e = 0; e < 4; ++e) y[e] = silu(a[e]) * b[e];
        return y;
    }
};

// y = F(a, b). y may be one of the inputs, because one thread reads and writes an element.
template <class F>
inline void binary(constant ElementwiseParams& p, device const u8* a, device const u8* b, device u8* y, u32 group,
                   u32 groups, Place at) {
    const bool wide = by_four(p.x, a, p.ld[0]) && by_four(p.x, b, p.ld[1]) && by_four(p.y, y, p.ld[2]);
    const u32 across = parts_across(p.k);
    for (u64 number = group; number < u64(p.rows) * across; number += groups) {
        const Part part = part_of(number, across, p.k);
        for (u32 i = 4 * at.index; i < part.length; i += 4 * at.count) {
            const u32 column = part.first + i, left = part.length - i;
            const float4 va = load4(p.x, a, u64(part.row) * p.ld[0] + column, left, wide);
            const float4 vb = load4(p.x, b, u64(part.row) * p.ld[1] + column, left, wide);
            store4(p.y, y, u64(part.row) * p.ld[2] + column, left, wide, F::of(va, vb));
        }
    }
}

[[max_total_threads_per_threadgroup(256)]]
kernel void add(device const u8* a [[buffer(0)]], device const u8* b [[buffer(1)]], device u8* y [[buffer(2)]],
                constant ElementwiseParams& p [[buffer(3)]], uint3 group [[threadgroup_position_in_grid]],
                uint3 groups [[threadgroups_per_grid]], uint3 threads [[threads_per_threadgroup]],
                uint index [[thread_index_in_threadgroup]]) {
    const Place at = {index, threads.x, 0, 0};
    binary<Sum>(p, a, b, y, group.x, groups.x, at);
}

[[max_total_threads_per_threadgroup(256)]]
kernel void mul(device const u8* a [[buffer(0)]], device const u8* b [[buffer(1)]], device u8* y [[buffer(2)]],
                constant ElementwiseParams& p [[buffer(3)]], uint3 group [[threadgroup_position_in_grid]],
                uint3 groups [[threadgroups_per_grid]], uint3 threads [[threads_per_threadgroup]],
                uint index [[thread_index_in_threadgroup]]) {
    const Place at = {index, threads.x, 0, 0};
    binary<Product>(p, a, b, y, group.x, groups.x, at);
}

[[max_total_threads_per_threadgroup(256)]]
kernel void silu_mul(device const u8* a [[buffer(0)]], device const u8* b [[buffer(1)]], device u8* y [[buffer(2)]],
                     constant ElementwiseParams& p [[buffer(3)]], uint3 group [[threadgroup_position_in_grid]],
                     uint3 groups [[threadgroups_per_grid]], uint3 threads [[threads_per_threadgroup]],
                     uint index [[thread_index_in_threadgroup]]) {
    const Place at = {index, threads.x, 0, 0};
    binary<Gate>(p, a, b, y, group.x, groups.x, at);
}

[[max_total_threads_per_threadgroup(256)]]
kernel void cast(device const u8* x [[buffer(0)]], device u8* y [[buffer(1)]],
                 constant ElementwiseParams& p [[buffer(2)]], uint3 group [[threadgroup_position_in_grid]],
                 uint3 groups [[threadgroups_per_grid]], uint3 threads [[threads_per_threadgroup]],
                 uint index [[thread_index_in_threadgroup]]) {
    const bool wide = by_four(p.x, x, p.ld[0]) && by_four(p.y, y, p.ld[1]);
    const u32 across = parts_across(p.k);
    for (u64 number = group.x; number < u64(p.rows) * across; number += groups.x) {
        const Part part = part_of(number, across, p.k);
        for (u32 i = 4 * index; i < part.length; i += 4 * threads.x) {
            const u32 column = part.first + i, left = part.length - i;
            const float4 v = load4(p.x, x, u64(part.row) * p.ld[0] + column, left, wide);
            store4(p.y, y, u64(part.row) * p.ld[1] + column, left, wide, v);
        }
    }
}

// The range may begin at any address: bytes before the first and after the last multiple of 16 are
// written one by one.
[[max_total_threads_per_threadgroup(256)]]
kernel void fill(device u8* y [[buffer(0)]], constant FillParams& p [[buffer(1)]],
                 uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],
                 uint3 threads [[threads_per_threadgroup]], uint index [[thread_index_in_threadgroup]]) {
    const u64 bytes = u64(p.bytes[0]) | (u64(p.bytes[1]) << 32);
    const u64 first = u64(group.x) * threads.x + index, stride = u64(groups.x) * threads.x;
    u32 word = p.pattern;
    if (p.width == 1) word = (word & 0xffu) * 0x01010101u;
    if (p.width == 2) word = (word & 0xffffu) * 0x00010001u;
    const u64 head = min((16 - address_of(y) % 16) % 16, bytes), whole = (bytes - head) / 16, tail = head + 16 * whole;
    // The pattern from the first multiple of 16 on.
    const u32 turn = 8 * u32(head % 4);
    const u32 turned = turn == 0 ? word : (word >> turn) | (word << (32 - turn));
    device uint4* body = (device uint4*)(y + head);
    for (u64 i = first; i < whole; i += stride) body[i] = uint4(turned);
    for (u64 i = first; i < head; i += stride) y[i] = u8(word >> (8 * (i % 4)));
    for (u64 i = tail + first; i < bytes; i += stride) y[i] = u8(word >> (8 * (i % 4)));
}

// The size of `T` (16, 4 or 1 bytes) divides all addresses, pitches and sizes.
template <class T>
inline void copy_units(constant CopyParams& p, device const u8* from, device u8* to, u32 group, u32 groups, u32 index,
                       u32 threads) {
    const u32 width = p.bytes / u32(sizeof(T)), across = parts_across(width);
    for (u64 number = group; number < u64(p.rows) * across; number += groups) {
        const Part part = part_of(number, across, width);
        device const T* f = (device const T*)(from + u64(part.row) * p.from_pitch) + part.first;
        device T* t = (device T*)(to + u64(part.row) * p.to_pitch) + part.first;
        for (u32 i = index; i < part.length; i += threads) t[i] = f[i];
    }
}

[[max_total_threads_per_threadgroup(256)]]
kernel void copy_2d(device const u8* from [[buffer(0)]], device u8* to [[buffer(1)]],
                    constant CopyParams& p [[buffer(2)]], uint3 group [[threadgroup_position_in_grid]],
                    uint3 groups [[threadgroups_per_grid]], uint3 threads [[threads_per_threadgroup]],
                    uint index [[thread_index_in_threadgroup]]) {
    const u64 all = address_of(from) | address_of(to) | p.from_pitch | p.to_pitch | p.bytes;
    if (all % 16 == 0) copy_units<uint4>(p, from, to, group.x, groups.x, index, threads.x);
    else if (all % 4 == 0) copy_units<u32>(p, from, to, group.x, groups.x, index, threads.x);
    else copy_units<u8>(p, from, to, group.x, groups.x, index, threads.x);
}
