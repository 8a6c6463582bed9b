// Metal kernels of the conformance suite, with the names and arguments of `TestKernel`: the
// bindings in order, then the parameters.
//
// A threadgroup computes 64 elements whatever its size; the number of threadgroups determines the
// number of elements.
#include <metal_stdlib>
using namespace metal;

#define BLOCK 64u

kernel void conformance_fill(device uint* out [[buffer(0)]],
                             constant uint& value [[buffer(1)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             uint own [[thread_index_in_threadgroup]],
                             uint3 size [[threads_per_threadgroup]]) {
    ulong from = ulong(group.x) * BLOCK;
    for (uint i = own; i < BLOCK; i += size.x) {
        out[from + i] = value;
    }
}

kernel void conformance_add(device const uint* a [[buffer(0)]],
                            device const uint* b [[buffer(1)]],
                            device uint* out [[buffer(2)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            uint own [[thread_index_in_threadgroup]],
                            uint3 size [[threads_per_threadgroup]]) {
    ulong from = ulong(group.x) * BLOCK;
    for (uint i = own; i < BLOCK; i += size.x) {
        out[from + i] = a[from + i] + b[from + i];
    }
}

// Metal has no early reads.
kernel void conformance_early_add(device const uint* a [[buffer(0)]],
                                  device const uint* b [[buffer(1)]],
                                  device uint* out [[buffer(2)]],
                                  uint3 group [[threadgroup_position_in_grid]],
                                  uint own [[thread_index_in_threadgroup]],
                                  uint3 size [[threads_per_threadgroup]]) {
    ulong from = ulong(group.x) * BLOCK;
    for (uint i = own; i < BLOCK; i += size.x) {
        out[from + i] = a[from + i] + b[from + i];
    }
}

// `limit` is a number of bytes, and `a` has memory only below it.
kernel void conformance_limited(device const uint* a [[buffer(0)]],
                                device const ulong* limit [[buffer(1)]],
                                device uint* out [[buffer(2)]],
                                uint3 group [[threadgroup_position_in_grid]],
                                uint own [[thread_index_in_threadgroup]],
                                uint3 size [[threads_per_threadgroup]]) {
    ulong from = ulong(group.x) * BLOCK;
    ulong end = limit[0] / 4;
    for (uint i = own; i < BLOCK; i += size.x) {
        out[from + i] = from + i < end ? a[from + i] : 0xffffffffu;
    }
}

// Each part has memory only below its limit, a number of bytes. (No parts grow on Metal.)
kernel void conformance_parts(device uint* a [[buffer(0)]],
                              device const ulong* limits [[buffer(1)]],
                              device uint* out [[buffer(2)]],
                              constant uint* params [[buffer(3)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint own [[thread_index_in_threadgroup]],
                              uint3 size [[threads_per_threadgroup]]) {
    uint each = params[0], step = params[1], value = params[2];
    for (uint k = own; k < BLOCK; k += size.x) {
        ulong i = ulong(group.x) * BLOCK + k, at = i * step;
        uint found = 0xffffffffu;
        if (at % each < limits[at / each] / 4) {
            if (value != 0) {
                a[at] = value + uint(i);
            }
            found = a[at];
        }
        out[i] = found;
    }
}

// The description of a tensor of two dimensions: sizes, the row's stride and the box in words.
struct BoxAt {
    uint map[32];
    int at[2];
    uint size[2];
};

// Copies the box at a column and a row, if it is there. Elements out of bounds are zero.
inline void copy_box(device const uint* tensor, device uint* out, constant BoxAt& box, bool is_there, uint own, uint threads) {
    ulong columns = ulong(box.map[0]) | ulong(box.map[1]) << 32;
    ulong rows = ulong(box.map[2]) | ulong(box.map[3]) << 32;
    ulong stride = ulong(box.map[10]) | ulong(box.map[11]) << 32;
    for (uint i = own; i < box.size[0] * box.size[1]; i += threads) {
        long column = long(box.at[0]) + i % box.size[0], row = long(box.at[1]) + i / box.size[0];
        bool inside = is_there && column >= 0 && ulong(column) < columns && row >= 0 && ulong(row) < rows;
        out[i] = inside ? tensor[ulong(row) * (stride / 4) + ulong(column)] : 0;
    }
}

kernel void conformance_box(device const uint* tensor [[buffer(0)]],
                            device uint* out [[buffer(1)]],
                            constant BoxAt& box [[buffer(2)]],
                            uint own [[thread_index_in_threadgroup]],
                            uint3 size [[threads_per_threadgroup]]) {
    copy_box(tensor, out, box, true, own, size.x);
}

// The tensor has memory only below its limit, a number of bytes. Its rows are as long as the box's.
kernel void conformance_limited_box(device const uint* tensor [[buffer(0)]],
                                    device const ulong* limit [[buffer(1)]],
                                    device uint* out [[buffer(2)]],
                                    constant BoxAt& box [[buffer(3)]],
                                    uint own [[thread_index_in_threadgroup]],
                                    uint3 size [[threads_per_threadgroup]]) {
    long end = (long(box.at[1]) + box.size[1]) * box.size[0] * 4;
    copy_box(tensor, out, box, box.at[1] >= 0 && ulong(end) <= *limit, own, size.x);
}

// Metal has no clock in a kernel. The limit in milliseconds becomes a number of loads.
kernel void conformance_spin(device const atomic_uint* flag [[buffer(0)]],
                             device uint* out [[buffer(1)]],
                             constant uint& limit_ms [[buffer(2)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             uint own [[thread_index_in_threadgroup]]) {
    if (own != 0 || group.x != 0) {
        return;
    }
    ulong loads = ulong(limit_ms) * 1000;
    uint seen = 2;
    for (ulong i = 0; i < loads; ++i) {
        if (atomic_load_explicit(flag, memory_order_relaxed) != 0) {
            seen = 1;
            break;
        }
    }
    out[0] = seen;
}

// Metal has no trap. The kernel writes where no memory is mapped.
kernel void conformance_trap() {
    *(volatile device uint*)(1ul << 46) = 1;
}

// The element after the end may belong to the same heap, so this kernel writes 16 TiB further,
// where no memory is mapped.
kernel void conformance_out_of_bounds(device uint* out [[buffer(0)]]) {
    *(volatile device uint*)(out + (1ul << 42)) = 1;
}
