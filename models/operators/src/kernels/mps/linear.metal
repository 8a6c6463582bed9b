// Matrix products `y = x · Wᵀ (+ bias)` with `W` stored [out, in], and the operations fused with
// them. Sums are f32.
//
// The host selects one of two methods by the shape of the threadgroup:
// - 32 × 8 threads: few rows of x (8 at most). The weights stream through once, with a SIMD-group
//   for each output. A panel of columns of x is in threadgroup memory at a time, in f32, normalised
//   on request;
// - 16 × 16 threads: a threadgroup computes 64 rows by 64 outputs, each thread 4 by 4, from panels
//   of 16 columns in threadgroup memory. (`simdgroup_matrix` would be faster, but needs family
//   Apple7, which virtual devices lack.)

constant constexpr u32 NORM = 1;
constant constexpr u32 BIAS = 2;

// The maximum number of rows of x for which the weights are streamed.
constant constexpr u32 FEW = 8;
// Elements of x that a threadgroup keeps in this case: half of a device's threadgroup memory, so
// that two threadgroups can run at once.
constant constexpr u32 PANEL = 4096;
// Rows and outputs of a tile, and the columns of one panel.
constant constexpr u32 TILE = 64;
constant constexpr u32 DEPTH = 16;
// Elements from one column of a tile to the next: a multiple of four, but not of the number of
// banks.
constant constexpr u32 PITCH = TILE + 4;

// One output matrix, of one product or of two (gate and up).
template <int G> struct Output {
    device const u8* w[G];
    device const u8* bias[G];
    device u8* y;
    u32 n;
    u32 ldy;
};

// The destination of a finished sum.
enum Finish { STORE, ADD_TO, GATE };

// Finishes output `n` of row `m`.
template <int G, Finish HOW>
inline void finish(constant LinearParams& p, thread const Output<G>& o, float sum, float up, u32 m, u32 n) {
    const bool biased = (p.flags & BIAS) != 0;
    const u64 to = u64(m) * o.ldy + n;
    if (biased) sum += load(p.vector, o.bias[0], n);
    if (HOW == GATE) {
        if (biased) up += load(p.vector, o.bias[G - 1], n);
        sum = silu(sum) * up;
    }
    if (HOW == ADD_TO) sum += load(p.y, o.y, to);
    store(p.y, o.y, to, sum);
}

// ---- Few rows

// Each row's factor: one over the root mean square if x is normalised.
inline void scales(constant LinearParams& p, device const u8* x, threadgroup float* scratch, threadgroup float* scale,
                   Place at) {
    const bool wide = by_four(p.x, x, p.ldx);
    for (u32 m = 0; m < p.m; ++m) {
        float factor = 1.0f;
        if (p.flags & NORM) {
            float squares = 0.0f;
            for (u32 i = 4 * at.index; i < p.k; i += 4 * at.count) {
                const float4 v = load4(p.x, x, u64(m) * p.ldx + i, p.k - i, wide);
                squares += sum_of(v * v);
            }
            factor = 1.0f / sqrt(group_sum(squares, scratch, at) / float(p.k) + p.eps);
        }
        if (at.index == 0) scale[m] = factor;
    }
}

// Columns `from` to `from + n` of the rows of x to `panel`, rows `pitch` apart, in steps of four:
// the last step is filled up with zeros. Rows from p.m to `rows` are zero.
inline void stage(constant LinearParams& p, device const u8* x, device const u8* norm, threadgroup const float* scale,
                  u32 from, u32 n, u32 rows, u32 pitch, threadgroup float* panel, Place at) {
    const bool normed = (p.flags & NORM) != 0;
    const bool wide = by_four(p.x, x, p.ldx), wide_norm = normed && by_four(p.vector, norm, 0);
    for (u32 m = 0; m < rows; ++m) {
        for (u32 i = 4 * at.index; i < n; i += 4 * at.count) {
            float4 v = float4(0.0f);
            if (m < p.m) v = load4(p.x, x, u64(m) * p.ldx + from + i, n - i, wide);
            if (m < p.m && normed) v = v * scale[m] * load4(p.vector, norm, from + i, n - i, wide_norm);
            *(threadgroup float4*)(panel + m * pitch + i) = v;
        }
    }
}

// A lane's part of the product of `n` columns of a row of weights with `M` rows in `panel`.
template <class W, int M>
inline void products(device const u8* w, u64 from, u32 n, bool wide, threadgroup const float* panel,
                     thread float4 (&sums)[FEW], u32 lane) {
    constexpr u32 pitch = PANEL / M;
    for (u32 i = 4 * lane; i < n; i += 4 * SIMD) {
        float4 v = float4(0.0f);
        if (wide && n - i >= 4) {
            v = load4<W>(w, from + i);
        } else {
            for (u32 e = 0; e < min(n - i, 4u); ++e) v[e] = load<W>(w, from + i + e);
        }
#pragma unroll
        for (u32 m = 0; m < u32(M); ++m) {
            sums[m] = fma(v, *(threadgroup const float4*)(panel + m * pitch + i), sums[m]);
        }
    }
}

template <int M>
inline void products(u32 dtype, device const u8* w, u64 from, u32 n, bool wide, threadgroup const float* panel,
                     thread float4 (&sums)[FEW], u32 lane) {
    if (dtype == 0) products<F32, M>(w, from, n, wide, panel, sums, lane);
    else if (dtype == 1) products<Bf16, M>(w, from, n, wide, panel, sums, lane);
    else products<F16, M>(w, from, n, wide, panel, sums, lane);
}

template <int G, int MATRICES, Finish HOW>
inline void stream(constant LinearParams& p, device const u8* x, device const u8* norm,
                   thread const Output<G> (&outputs)[MATRICES], threadgroup float* panel, threadgroup float* scale,
                   u32 group, u32 groups, Place at) {
    const u32 rows = p.m == 1 ? 1 : FEW, pitch = PANEL / rows, simds = at.count / SIMD;
    scales(p, x, panel, scale, at);
    u64 total = 0;
    for (int i = 0; i < MATRICES; ++i) total += outputs[i].n;
    bool staged = false;
    for (u64 base = u64(group) * simds; base < total; base += u64(groups) * simds) {
        u64 index = base + at.simd;
        const bool active = index < total;
        Output<G> o = outputs[0];
        for (int i = 1; i < MATRICES && index >= o.n; ++i) {
            index -= o.n;
            o = outputs[i];
        }
        float4 sums[G][FEW];
#pragma unroll
        for (int g = 0; g < G; ++g) {
#pragma unroll
            for (u32 m = 0; m < FEW; ++m) sums[g][m] = float4(0.0f);
        }
        for (u32 from = 0; from < p.k;) {
            const u32 n = min(pitch, p.k - from);
            // A single panel serves all outputs.
            if (!staged) {
                group_barrier();
                stage(p, x, norm, scale, from, n, rows, pitch, panel, at);
                group_barrier();
                staged = p.k <= pitch;
            }
#pragma unroll
            for (int g = 0; g < G; ++g) {
                if (!active) continue;
                const u64 first = index * p.k + from;
                const bool wide = by_four(p.w, o.w[g], p.k);
                if (rows == 1) products<1>(p.w, o.w[g], first, n, wide, panel, sums[g], at.lane);
                else products<int(FEW)>(p.w, o.w[g], first, n, wide, panel, sums[g], at.lane);
            }
            from += n;
        }
#pragma unroll
        for (u32 m = 0; m < FEW; ++m) {
            if (m >= p.m) continue;
            const float first = simd_sum(sum_of(sums[0][m]));
            const float second = G == 2 ? simd_sum(sum_of(sums[G - 1][m])) : 0.0f;
            if (active && at.lane == m) finish<G, HOW>(p, o, first, second, m, u32(index));
        }
    }
}

// ---- Many rows

// Rows `first` to `first + TILE` of a matrix of `rows` rows of `k` columns, `ld` apart: DEPTH
// columns from `from` on. Column c of the tile begins at `c * PITCH`. Elements outside the matrix
// are zero.
inline void take(u32 dtype, device const u8* matrix, u32 rows, u32 ld, u32 k, u32 first, u32 from, bool wide,
                 threadgroup float* tile, u32 index) {
    const u32 row = index / 4, column = index % 4 * 4;
    float4 v = float4(0.0f);
    if (first + row < rows && from + column < k) {
        v = load4(dtype, matrix, u64(first + row) * ld + from + column, k - from - column, wide);
    }
    for (u32 e = 0; e < 4; ++e) tile[(column + e) * PITCH + row] = v[e];
}

template <int G, int MATRICES, Finish HOW>
inline void tiles(constant LinearParams& p, device const u8* x, thread const Output<G> (&outputs)[MATRICES],
                  threadgroup float* rows, uint3 group, Place at) {
    u32 number = group.x;
    Output<G> o = outputs[0];
    for (int i = 1; i < MATRICES && number > (o.n - 1) / TILE; ++i) {
        number -= (o.n - 1) / TILE + 1;
        o = outputs[i];
    }
    const u32 first_m = group.y * TILE, first_n = number * TILE, across = at.index % 16, down = at.index / 16;
    const bool wide_x = by_four(p.x, x, p.ldx);
    bool wide[G];
    float4 sums[G][4];
#pragma unroll
    for (int g = 0; g < G; ++g) {
        wide[g] = by_four(p.w, o.w[g], p.k);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) sums[g][i] = float4(0.0f);
    }
    for (u32 from = 0; from < p.k;) {
        take(p.x, x, p.m, p.ldx, p.k, first_m, from, wide_x, rows, at.index);
#pragma unroll
        for (int g = 0; g < G; ++g) {
            take(p.w, o.w[g], o.n, p.k, p.k, first_n, from, wide[g], rows + (1 + g) * DEPTH * PITCH, at.index);
        }
        group_barrier();
        for (u32 c = 0; c < DEPTH; ++c) {
            const float4 a = *(threadgroup const float4*)(rows + c * PITCH + 4 * down);
#pragma unroll
            for (int g = 0; g < G; ++g) {
                const float4 b = *(threadgroup const float4*)(rows + ((1 + g) * DEPTH + c) * PITCH + 4 * across);
#pragma unroll
                for (u32 i = 0; i < 4; ++i) sums[g][i] = fma(float4(a[i]), b, sums[g][i]);
            }
        }
        group_barrier();
        from += min(DEPTH, p.k - from);
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 m = first_m + 4 * down + i;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32 n = first_n + 4 * across + j;
            if (m < p.m && n < o.n) finish<G, HOW>(p, o, sums[0][i][j], sums[G - 1][i][j], m, n);
        }
    }
}

template <int G, int MATRICES, Finish HOW>
inline void product(constant LinearParams& p, device const u8* x, device const u8* norm,
                    thread const Output<G> (&outputs)[MATRICES], threadgroup float4* panel, threadgroup float* scale,
                    uint3 group, uint3 groups, uint3 threads, Place at) {
    threadgroup float* floats = (threadgroup float*)panel;
    if (threads.x != SIMD) tiles<G, MATRICES, HOW>(p, x, outputs, floats, group, at);
    else stream<G, MATRICES, HOW>(p, x, norm, outputs, floats, scale, group.x, groups.x, at);
}

[[max_total_threads_per_threadgroup(256)]]
kernel void linear(device const u8* x [[buffer(0)]], device const u8* norm [[buffer(1)]],
                   device const u8* w [[buffer(2)]], device const u8* bias [[buffer(3)]], device u8* y [[buffer(4)]],
                   constant LinearParams& p [[buffer(5)]], uint3 group [[threadgroup_position_in_grid]],
                   uint3 groups [[threadgroups_per_grid]], uint3 threads [[threads_per_threadgroup]],
                   uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                   uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float4 panel[PANEL / 4];
    threadgroup float scale[FEW];
    const Place at = {index, threads.x * threads.y, lane, simd};
    const Output<1> outputs[1] = {{{w}, {bias}, y, p.n[0], p.ldy[0]}};
    product<1, 1, STORE>(p, x, norm, outputs, panel, scale, group, groups, threads, at);
}

[[max_total_threads_per_threadgroup(256)]]
kernel void linear_add(device const u8* x [[buffer(0)]], device const u8* norm [[buffer(1)]],
                       device const u8* w [[buffer(2)]], device const u8* bias [[buffer(3)]],
                       device u8* y [[buffer(4)]], constant LinearParams& p [[buffer(5)]],
                       uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],
                       uint3 threads [[threads_per_threadgroup]], uint index [[thread_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float4 panel[PANEL / 4];
    threadgroup float scale[FEW];
    const Place at = {index, threads.x * threads.y, lane, simd};
    const Output<1> outputs[1] = {{{w}, {bias}, y, p.n[0], p.ldy[0]}};
    product<1, 1, ADD_TO>(p, x, norm, outputs, panel, scale, group, groups, threads, at);
}

[[max_total_threads_per_threadgroup(256)]]
kernel void linear3(device const u8* x [[buffer(0)]], device const u8* norm [[buffer(1)]],
                    device const u8* w0 [[buffer(2)]], device const u8* bias0 [[buffer(3)]],
                    device u8* y0 [[buffer(4)]], device const u8* w1 [[buffer(5)]],
                    device const u8* bias1 [[buffer(6)]], device u8* y1 [[buffer(7)]],
                    device const u8* w2 [[buffer(8)]], device const u8* bias2 [[buffer(9)]],
                    device u8* y2 [[buffer(10)]], constant LinearParams& p [[buffer(11)]],
                    uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],
                    uint3 threads [[threads_per_threadgroup]], uint index [[thread_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float4 panel[PANEL / 4];
    threadgroup float scale[FEW];
    const Place at = {index, threads.x * threads.y, lane, simd};
    const Output<1> outputs[3] = {
        {{w0}, {bias0}, y0, p.n[0], p.ldy[0]},
        {{w1}, {bias1}, y1, p.n[1], p.ldy[1]},
        {{w2}, {bias2}, y2, p.n[2], p.ldy[2]},
    };
    product<1, 3, STORE>(p, x, norm, outputs, panel, scale, group, groups, threads, at);
}

[[max_total_threads_per_threadgroup(256)]]
kernel void linear_gated(device const u8* x [[buffer(0)]], device const u8* norm [[buffer(1)]],
                         device const u8* gate [[buffer(2)]], device const u8* gate_bias [[buffer(3)]],
                         device const u8* up [[buffer(4)]], device const u8* up_bias [[buffer(5)]],
                         device u8* y [[buffer(6)]], constant LinearParams& p [[buffer(7)]],
                         uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],
                         uint3 threads [[threads_per_threadgroup]], uint index [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float4 panel[PANEL / 4];
    threadgroup float scale[FEW];
    const Place at = {index, threads.x * threads.y, lane, simd};
    const Output<2> outputs[1] = {{{gate, up}, {gate_bias, up_bias}, y, p.n[0], p.ldy[0]}};
    product<2, 1, GATE>(p, x, norm, outputs, panel, scale, group, groups, threads, at);
}
