// Root-mean-square normalisation: a block for each row.

static constexpr u32 THREADS = 256;
// Bytes of a line of the L2 cache.
static constexpr u32 LINE = 128;

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

// The same for a row of at most `4 * N * THREADS` elements of a multiple of 4, of the weight's type. A thread asks for all of its
// elements at once and keeps them. Sums have the same order.
template <class T, u32 N> INLINE void normalise_held(const NormParams& p, const void* x, u64 from, const void* weight, void* y, u64 to) {
    __shared__ float scratch[32];
    const uint2* const in = (const uint2*)((const typename T::raw*)x + from);
    uint2 held[N], gain[N];
#pragma unroll
    for (u32 s = 0; s < N; ++s) {
        const u32 i = threadIdx.x + s * THREADS;
        held[s] = gain[s] = make_uint2(0, 0);
        if (4 * i < p.k) {
            held[s] = in[i];
            gain[s] = ((const uint2*)weight)[i];
        }
    }
    float squares = 0.0f;
#pragma unroll
    for (u32 s = 0; s < N; ++s) {
        float v[4];
        T::unpack(held[s].x, v);
        T::unpack(held[s].y, v + 2);
#pragma unroll
        for (int e = 0; e < 4; ++e) squares = fmaf(v[e], v[e], squares);
    }
    const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / (float)p.k + p.eps);
#pragma unroll
    for (u32 s = 0; s < N; ++s) {
        const u32 i = threadIdx.x + s * THREADS;
        float v[4], g[4];
        T::unpack(held[s].x, v);
        T::unpack(held[s].y, v + 2);
        T::unpack(gain[s].x, g);
        T::unpack(gain[s].y, g + 2);
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = v[e] * scale * g[e];
        if (4 * i < p.k) store<T, 4>(y, to + 4 * i, v);
    }
}

// Keeps a row in registers if it fits. Returns whether it did.
template <class T> INLINE bool normalise_held(const NormParams& p, const void* x, u64 from, const void* weight, void* y, u64 to) {
    if (p.k <= 8 * THREADS) normalise_held<T, 2>(p, x, from, weight, y, to);
    else if (p.k <= 16 * THREADS) normalise_held<T, 4>(p, x, from, weight, y, to);
    else if (p.k <= 32 * THREADS) normalise_held<T, 8>(p, x, from, weight, y, to);
    else return false;
    return true;
}

KERNEL(256) rms_norm(const void* x, const void* weight, void* y, NormParams p) {
    let_next_start();
    // The weight lies in memory, while the kernel in front still writes x.
    for (u32 at = threadIdx.x * LINE; at < p.k * size_of(p.weight); at += THREADS * LINE) prefetch((const u8*)weight + at);
    wait_for_previous();
    bool wide = by_four(p.x, x, p.ldx) && by_four(p.x, y, p.ldy) && by_four(p.weight, weight, 0);
    u64 row = blockIdx.x, from = row * p.ldx, to = row * p.ldy;
    if (wide && p.k % 4 == 0 && p.x == p.weight) {
        if (p.x == BF16 && normalise_held<Bf16>(p, x, from, weight, y, to)) return;
        if (p.x == 2 && normalise_held<F16>(p, x, from, weight, y, to)) return;
    }
    normalise(p, x, from, weight, y, to, wide);
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
