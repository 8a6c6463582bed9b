// Copies and fills between buffers of the Metal backend. A blit wants offsets and sizes that are
// multiples of 4, and fills with one byte only; these kernels take all.
//
// A threadgroup has 256 threads. A thread moves 16 bytes, or 1 where addresses or pitches are not
// aligned to 16. The grid's second dimension counts rows.
#include <metal_stdlib>
using namespace metal;

struct Copy {
    // Of a row.
    ulong bytes;
    ulong src_pitch;
    ulong dst_pitch;
};

struct Fill {
    ulong bytes;
    // The pattern, repeated to 4 bytes.
    uint pattern;
    uint unused;
};

static ulong thread_index(uint3 group, uint own) {
    return ulong(group.x) * 256 + own;
}

static void copy_16(device const uchar* src, device uchar* dst, ulong at, ulong bytes) {
    if (at + 16 <= bytes) {
        *(device uint4*)(dst + at) = *(device const uint4*)(src + at);
    } else {
        for (; at < bytes; ++at) {
            dst[at] = src[at];
        }
    }
}

kernel void leasehold_copy_16(device const uchar* src [[buffer(0)]],
                              device uchar* dst [[buffer(1)]],
                              constant Copy& c [[buffer(2)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint own [[thread_index_in_threadgroup]]) {
    copy_16(src, dst, thread_index(group, own) * 16, c.bytes);
}

kernel void leasehold_copy_1(device const uchar* src [[buffer(0)]],
                             device uchar* dst [[buffer(1)]],
                             constant Copy& c [[buffer(2)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             uint own [[thread_index_in_threadgroup]]) {
    ulong at = thread_index(group, own);
    if (at < c.bytes) {
        dst[at] = src[at];
    }
}

kernel void leasehold_rows_16(device const uchar* src [[buffer(0)]],
                              device uchar* dst [[buffer(1)]],
                              constant Copy& c [[buffer(2)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint own [[thread_index_in_threadgroup]]) {
    ulong row = group.y;
    copy_16(src + row * c.src_pitch, dst + row * c.dst_pitch, thread_index(group, own) * 16,
            c.bytes);
}

kernel void leasehold_rows_1(device const uchar* src [[buffer(0)]],
                             device uchar* dst [[buffer(1)]],
                             constant Copy& c [[buffer(2)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             uint own [[thread_index_in_threadgroup]]) {
    ulong row = group.y;
    ulong at = thread_index(group, own);
    if (at < c.bytes) {
        dst[row * c.dst_pitch + at] = src[row * c.src_pitch + at];
    }
}

kernel void leasehold_fill_16(device uchar* dst [[buffer(0)]],
                              constant Fill& f [[buffer(1)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint own [[thread_index_in_threadgroup]]) {
    ulong at = thread_index(group, own) * 16;
    if (at + 16 <= f.bytes) {
        *(device uint4*)(dst + at) = uint4(f.pattern);
    } else {
        for (; at < f.bytes; ++at) {
            dst[at] = uchar(f.pattern >> (8 * (at & 3)));
        }
    }
}

kernel void leasehold_fill_1(device uchar* dst [[buffer(0)]],
                             constant Fill& f [[buffer(1)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             uint own [[thread_index_in_threadgroup]]) {
    ulong at = thread_index(group, own);
    if (at < f.bytes) {
        dst[at] = uchar(f.pattern >> (8 * (at & 3)));
    }
}
