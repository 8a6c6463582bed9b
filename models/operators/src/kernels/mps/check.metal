// The check of values: where an element is NaN or infinite.

constant constexpr u64 NOWHERE = ~u64(0);

// The first of a thread's elements whose bits have all of `mask`.
template <class T>
inline u64 first_of(device const u8* x, u64 from, u64 to, T mask, u32 index, u32 threads) {
    device const T* elements = (device const T*)x;
    for (u64 i = from + index; i < to; i += threads) {
        if ((elements[i] & mask) == mask) return i;
    }
    return NOWHERE;
}

// A threadgroup has a part of the elements.
[[max_total_threads_per_threadgroup(256)]]
kernel void not_finite(device const u8* x [[buffer(0)]], device u8* found [[buffer(1)]],
                       constant NotFiniteParams& p [[buffer(2)]], uint3 group [[threadgroup_position_in_grid]],
                       uint3 groups [[threadgroups_per_grid]], uint3 threads [[threads_per_threadgroup]],
                       uint index [[thread_index_in_threadgroup]]) {
    threadgroup u64 firsts[256];
    const u64 count = u64(p.count[0]) | (u64(p.count[1]) << 32), length = (count - 1) / groups.x + 1;
    const u64 from = min(group.x * length, count), to = min(from + length, count);
    u64 first;
    if (p.width == 2) first = first_of<u16>(x, from, to, u16(p.exponent), index, threads.x);
    else if (p.width == 4) first = first_of<u32>(x, from, to, p.exponent, index, threads.x);
    else first = first_of<u64>(x, from, to, u64(p.exponent) << 32, index, threads.x);
    firsts[index] = first;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (u32 half_way = threads.x / 2; half_way > 0; half_way /= 2) {
        if (index < half_way) firsts[index] = min(firsts[index], firsts[index + half_way]);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (index != 0) return;
    first = firsts[0];
    u64 bits = 0;
    if (first != NOWHERE) {
        if (p.width == 2) bits = ((device const u16*)x)[first];
        else if (p.width == 4) bits = ((device const u32*)x)[first];
        else bits = ((device const u64*)x)[first];
    }
    device u32* words = (device u32*)found + 4 * group.x;
    words[0] = u32(first);
    words[1] = u32(first >> 32);
    words[2] = u32(bits);
    words[3] = u32(bits >> 32);
}
