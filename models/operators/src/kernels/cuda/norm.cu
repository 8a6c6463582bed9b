// Root-mean-square normalisation: a block for each row.

// Normalises row `x` into row `y`. No other block changes `x`; each thread reads back only its own
// writes.
INLINE void normalise(const NormParams& p, const void* x, u64 from, const void* weight, void* y, u64 to, bool wide) {
    __shared__ float scratch[32];
    float squares = 0.0f;
    along(p.k, wide, [&](u32 i, auto step) {
        float v[step.n];
        load(p.x, x, from + i, v);
#pragma unroll
        for (int e = 0; e < step.n; ++e) squares = fmaf(v[e], v[e], squares);
    });
    float scale = 1.0f / sqrtf(block_sum(squares, scratch) / (float)p.k + p.eps);
    along(p.k, wide, [&](u32 i, auto step) {
        float v[step.n], g[step.n];
        load(p.x, x, from + i, v);
        load(p.weight, weight, i, g);
#pragma unroll
        for (int e = 0; e < step.n; ++e) v[e] = v[e] * scale * g[e];
        store(p.x, y, to + i, v);
    });
}

KERNEL(256) rms_norm(const void* x, const void* weight, void* y, NormParams p) {
    begin();
    bool wide = by_four(p.x, x, p.ldx) && by_four(p.x, y, p.ldy) && by_four(p.weight, weight, 0);
    u64 row = blockIdx.x;
    normalise(p, x, row * p.ldx, weight, y, row * p.ldy, wide);
}

KERNEL(256) add_rms_norm(void* h, const void* delta, const void* weight, void* y, NormParams p) {
    begin();
    bool wide = by_four(p.x, h, p.ldx) && by_four(p.x, delta, p.ldx) && by_four(p.x, y, p.ldy) &&
                by_four(p.weight, weight, 0);
    u64 row = blockIdx.x, from = row * p.ldx;
    along(p.k, wide, [&](u32 i, auto step) {
        float a[step.n], b[step.n];
        load(p.x, h, from + i, a);
        load(p.x, delta, from + i, b);
#pragma unroll
        for (int e = 0; e < step.n; ++e) a[e] += b[e];
        store(p.x, h, from + i, a);
    });
    normalise(p, h, from, weight, y, row * p.ldy, wide);
}
