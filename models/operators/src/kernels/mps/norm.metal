// Root-mean-square normalisation: a threadgroup for each row.

constant constexpr u32 SIMDS = 8;

// Normalises row `x` into row `y`. No other threadgroup changes `x`; each thread reads back only its
// own writes.
inline void normalise(constant NormParams& p, device const u8* x, u64 from, device const u8* weight, device u8* y,
                      u64 to, bool wide, threadgroup float* scratch, Place at) {
    float squares = 0.0f;
    for (u32 i = 4 * at.index; i < p.k; i += 4 * at.count) {
        const float4 v = load4(p.x, x, from + i, p.k - i, wide);
        squares += sum_of(v * v);
    }
    const float scale = 1.0f / sqrt(group_sum(squares, scratch, at) / float(p.k) + p.eps);
    for (u32 i = 4 * at.index; i < p.k; i += 4 * at.count) {
        const float4 v = load4(p.x, x, from + i, p.k - i, wide);
        const float4 g = load4(p.weight, weight, i, p.k - i, wide);
        store4(p.x, y, to + i, p.k - i, wide, v * scale * g);
    }
}

[[max_total_threads_per_threadgroup(256)]]
kernel void rms_norm(device const u8* x [[buffer(0)]], device const u8* weight [[buffer(1)]],
                     device u8* y [[buffer(2)]], constant NormParams& p [[buffer(3)]],
                     uint3 group [[threadgroup_position_in_grid]], uint3 threads [[threads_per_threadgroup]],
                     uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                     uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float scratch[SIMDS];
    const Place at = {index, threads.x, lane, simd};
    const bool wide = by_four(p.x, x, p.ldx) && by_four(p.x, y, p.ldy) && by_four(p.weight, weight, 0);
    normalise(p, x, u64(group.x) * p.ldx, weight, y, u64(group.x) * p.ldy, wide, scratch, at);
}

[[max_total_threads_per_threadgroup(256)]]
kernel void add_rms_norm(device u8* h [[buffer(0)]], device const u8* delta [[buffer(1)]],
                         device const u8* weight [[buffer(2)]], device u8* y [[buffer(3)]],
                         constant NormParams& p [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
                         uint3 threads [[threads_per_threadgroup]], uint index [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float scratch[SIMDS];
    const Place at = {index, threads.x, lane, simd};
    const bool wide = by_four(p.x, h, p.ldx) && by_four(p.x, delta, p.ldx) && by_four(p.x, y, p.ldy) &&
                      by_four(p.weight, weight, 0);
    const u64 from = u64(group.x) * p.ldx;
    for (u32 i = 4 * at.index; i < p.k; i += 4 * at.count) {
        const float4 a = load4(p.x, h, from + i, p.k - i, wide);
        const float4 b = load4(p.x, delta, from + i, p.k - i, wide);
        store4(p.x, h, from + i, p.k - i, wide, a + b);
    }
    normalise(p, h, from, weight, y, u64(group.x) * p.ldy, wide, scratch, at);
}
