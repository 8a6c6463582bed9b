// Matrix products `y = x · Wᵀ (+ bias)` with `W` stored [out, in], and the operations fused with
// them. Sums are f32.
//
// The host selects one of two methods by the shape of the block:
// - 32 × 8 threads: few rows of x (8 at most). The weights stream through once, with a warp for
//   each output. A panel of columns of x is in shared memory at a time, in f32, normalised on
//   request. For one long row, a thread keeps its columns of x in registers, and the block streams
//   through consecutive rows of weights. For one short row, each warp keeps all of x in registers;
// - 16 × 16 threads: a block computes 64 rows by 64 outputs, each thread 4 by 4, from panels of 16
//   columns in shared memory.

static constexpr u32 NORM = 1;
static constexpr u32 BIAS = 2;

// The maximum number of rows of x for which the weights are streamed.
static constexpr u32 FEW = 8;
// Elements of x that a block keeps in this case.
static constexpr u32 PANEL = 8192;
// Threads of a block, and its warps.
static constexpr u32 THREADS = 256;
static constexpr u32 WARPS = THREADS / WARP;
// Rows and outputs of a tile, and the columns of one panel.
static constexpr u32 TILE = 64;
static constexpr u32 DEPTH = 16;
// Elements from one column of a tile to the next: a multiple of four, but not of the number of
// banks.
static constexpr u32 PITCH = TILE + 4;

// The size of a block's shared memory, which serves both methods.
static constexpr u32 SHARED = PANEL > 3 * DEPTH * PITCH ? PANEL : 3 * DEPTH * PITCH;

// Finishes output `n` of a row that begins at `y`. Not inlined, because a thread has sixteen of
// them. The arguments are values, so that no variable needs an address.
static __device__ __noinline__ void finish(Finish how, u32 dtype, void* y, u64 row, u32 n, float sum, float up, u32 vector,
                                           const void* bias, const void* up_bias) {
    if (bias != nullptr) sum += load_one(vector, bias, n);
    if (how == GATE) {
        if (up_bias != nullptr) up += load_one(vector, up_bias, n);
        sum = silu(sum) * up;
    }
    if (how == ADD_TO) sum += load_one(dtype, y, row + n);
    store_one(dtype, y, row + n, sum);
}

template <int G, Finish HOW>
INLINE void finish(const LinearParams& p, const Output<G>& o, float sum, float up, u32 m, u32 n) {
    const bool bias = p.flags & BIAS;
    finish(HOW, p.y, o.y, (u64)m * o.ldy, n, sum, up, p.vector, bias ? o.bias[0] : nullptr,
           bias ? o.bias[G - 1] : nullptr);
}

// ---- Few rows

// The factor of a row, one over the root mean square, from the sum of its squares.
INLINE float factor_of(const LinearParams& p, float squares) { return 1.0f / sqrtf(squares / (float)p.k + p.eps); }

// Each row's factor: one over the root mean square if x is normalised.
INLINE void scales(const LinearParams& p, const void* x, float* scratch, float* scale) {
    const bool wide = by_four(p.x, x, p.ldx);
    for (u32 m = 0; m < p.m; ++m) {
        float factor = 1.0f;
        if (p.flags & NORM) {
            float squares = 0.0f;
            along(p.k, wide, [&](u32 i, auto step) {
                float v[step.n];
                load(p.x, x, (u64)m * p.ldx + i, v);
#pragma unroll
                for (int e = 0; e < step.n; ++e) squares = fmaf(v[e], v[e], squares);
            });
            factor = factor_of(p, block_sum(squares, scratch));
        }
        if (thread_index() == 0) scale[m] = factor;
    }
}

// One row of x, which fits the panel, to `panel`: read once, 16 bytes at a time, and normalised there.
template <class X> INLINE void stage_row(const LinearParams& p, const void* x, const void* norm, float* scratch, float* panel) {
    constexpr int N = 16 / (int)sizeof(typename X::raw);
    const u32 from = thread_index() * N, step = thread_count() * N;
    float squares = 0.0f;
#pragma unroll 4
    for (u32 i = from; i < p.k; i += step) {
        float v[N];
        load<X, N>(x, i, v);
#pragma unroll
        for (int e = 0; e < N; ++e) {
            panel[i + e] = v[e];
            squares = fmaf(v[e], v[e], squares);
        }
    }
    if (p.flags & NORM) {
        const float factor = factor_of(p, block_sum(squares, scratch));
        const bool wide = by_four(p.vector, norm, 0);
        for (u32 i = from; i < p.k; i += step) {
#pragma unroll
            for (int e = 0; e < N; e += 4) {
                float g[4];
                if (wide) {
                    load(p.vector, norm, i + e, g);
                } else {
#pragma unroll
                    for (int o = 0; o < 4; ++o) g[o] = load_one(p.vector, norm, i + e + o);
                }
#pragma unroll
                for (int o = 0; o < 4; ++o) panel[i + e + o] = panel[i + e + o] * factor * g[o];
            }
        }
    }
}

INLINE void stage_row(const LinearParams& p, const void* x, const void* norm, float* scratch, float* panel) {
    if (p.x == 0) stage_row<F32>(p, x, norm, scratch, panel);
    else if (p.x == 1) stage_row<Bf16>(p, x, norm, scratch, panel);
    else stage_row<F16>(p, x, norm, scratch, panel);
}

// Columns `from` to `from + n` of the rows of x to `panel`, rows `pitch` apart; rows from p.m to `rows` are zero.
INLINE void stage(const LinearParams& p, const void* x, const void* norm, const float* scale, u32 from, u32 n, u32 rows,
                  u32 pitch, float* panel) {
    const bool wide = by_four(p.x, x, p.ldx) && by_four(p.vector, norm, 0);
    for (u32 m = 0; m < rows; ++m) {
        along(n, wide, [&](u32 i, auto step) {
            float v[step.n], g[step.n];
#pragma unroll
            for (int e = 0; e < step.n; ++e) v[e] = 0.0f;
            if (m < p.m) {
                load(p.x, x, (u64)m * p.ldx + from + i, v);
                if (p.flags & NORM) {
                    load(p.vector, norm, from + i, g);
#pragma unroll
                    for (int e = 0; e < step.n; ++e) v[e] = v[e] * scale[m] * g[e];
                }
            }
#pragma unroll
            for (int e = 0; e < step.n; ++e) panel[m * pitch + i + e] = v[e];
        });
    }
}

// 16 bytes of weights, past the L1 cache. The read is volatile, so it stays behind `wait_for_previous`.
// It is coherent, because a kernel in front may write weights while this one waits already.
INLINE uint4 weights_at(const void* p) {
#ifndef LEASEHOLD_EMULATED
    uint4 q;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w)
                 : "l"(p));
    return q;
#else
    return *(const uint4*)p;
#endif
}

template <class W, int N> INLINE void unpack(uint4 q, float (&v)[N]) {
    constexpr int each = N / 4;
    W::unpack(q.x, v);
    W::unpack(q.y, v + each);
    W::unpack(q.z, v + 2 * each);
    W::unpack(q.w, v + 3 * each);
}

// The sum of the squares of a thread's values.
template <int J, int N> INLINE float squares_of(const float (&value)[J][N]) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < J; ++j) {
#pragma unroll
        for (int e = 0; e < N; ++e) squares = fmaf(value[j][e], value[j][e], squares);
    }
    return squares;
}

// A lane's part of the products of `n` columns of `G` rows of weights with the row in
// `panel`. Several reads of 16 bytes are under way at a time: the reads of shared memory, whose order is
// fixed, would keep the compiler from starting them early.
template <class W, int G>
INLINE void products_of_one(const void* const (&w)[G], u64 at, u32 n, const float* panel, float (&sums)[G][FEW]) {
    constexpr int N = 16 / (int)sizeof(typename W::raw), BATCH = 4;
    typedef typename W::raw raw;
    auto add = [&](const uint4 (&q)[G], u32 i) {
        float v[G][N];
#pragma unroll
        for (int g = 0; g < G; ++g) unpack<W, N>(q[g], v[g]);
#pragma unroll
        for (int e = 0; e < N; e += 4) {
            const float4 x = shared_four(panel + i + e);
#pragma unroll
            for (int g = 0; g < G; ++g) {
                sums[g][0] = fmaf(v[g][e], x.x, sums[g][0]);
                sums[g][0] = fmaf(v[g][e + 1], x.y, sums[g][0]);
                sums[g][0] = fmaf(v[g][e + 2], x.z, sums[g][0]);
                sums[g][0] = fmaf(v[g][e + 3], x.w, sums[g][0]);
            }
        }
    };
    u32 i = threadIdx.x * N;
    for (; i + (BATCH - 1) * WARP * N < n; i += BATCH * WARP * N) {
        uint4 q[BATCH][G];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
#pragma unroll
            for (int g = 0; g < G; ++g) q[b][g] = weights_at((const raw*)w[g] + at + i + b * WARP * N);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) add(q[b], i + b * WARP * N);
    }
    for (; i < n; i += WARP * N) {
        uint4 q[G];
#pragma unroll
        for (int g = 0; g < G; ++g) q[g] = weights_at((const raw*)w[g] + at + i);
        add(q, i);
    }
}

// The same with `M` rows in a panel of f32.
template <class W, int M, int G>
INLINE void products(const void* const (&w)[G], u64 at, u32 n, bool wide, const float* panel, float (&sums)[G][FEW]) {
    constexpr u32 pitch = PANEL / M;
    if (wide && M == 1) return products_of_one<W, G>(w, at, n, panel, sums);
#pragma unroll
    for (int g = 0; g < G; ++g) {
        if (wide) {
            constexpr int N = 4;
#pragma unroll 1
            for (u32 i = threadIdx.x * N; i < n; i += WARP * N) {
                float v[N];
                load<W, N>(w[g], at + i, v);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    const float4 x = shared_four(panel + m * pitch + i);
                    sums[g][m] = fmaf(v[0], x.x, sums[g][m]);
                    sums[g][m] = fmaf(v[1], x.y, sums[g][m]);
                    sums[g][m] = fmaf(v[2], x.z, sums[g][m]);
                    sums[g][m] = fmaf(v[3], x.w, sums[g][m]);
                }
            }
        } else {
#pragma unroll 1
            for (u32 i = threadIdx.x; i < n; i += WARP) {
                float v[1];
                load<W, 1>(w[g], at + i, v);
#pragma unroll
                for (int m = 0; m < M; ++m) sums[g][m] = fmaf(v[0], panel[m * pitch + i], sums[g][m]);
            }
        }
    }
}

template <int M, int G>
INLINE void products(u32 dtype, const void* const (&w)[G], u64 at, u32 n, u32 k, const float* panel, float (&sums)[G][FEW]) {
    bool wide = k * size_of(dtype) % 16 == 0;
#pragma unroll
    for (int g = 0; g < G; ++g) wide = wide && address(w[g]) % 16 == 0;
    if (dtype == 0) products<F32, M, G>(w, at, n, wide, panel, sums);
    else if (dtype == 1) products<Bf16, M, G>(w, at, n, wide, panel, sums);
    else products<F16, M, G>(w, at, n, wide, panel, sums);
}

// The matrix of output `index` of all, and the output's number in it.
template <int G, int MATRICES> INLINE Output<G> find(const Output<G> (&outputs)[MATRICES], u64& index) {
    Output<G> o = outputs[0];
    u64 behind = outputs[0].n;
#pragma unroll
    for (int i = 1; i < MATRICES; ++i) {
        if (index >= behind) {
            o = outputs[i];
            index -= behind;
            behind = outputs[i].n;
        } else {
            behind = ~0ull;
        }
    }
    return o;
}

// Whether there is one row of x, the norm and the weights have one type of 16 bits, and all can be read
// 16 bytes at a time.
template <int G, int MATRICES>
INLINE bool is_wide(const LinearParams& p, const void* x, const void* norm, const Output<G> (&outputs)[MATRICES]) {
    const bool normal = p.flags & NORM;
    u64 all = address(x) | (p.k * 2) | (normal ? address(norm) : 0);
#pragma unroll
    for (int i = 0; i < MATRICES; ++i) {
#pragma unroll
        for (int g = 0; g < G; ++g) all |= address(outputs[i].w[g]);
    }
    return p.m == 1 && p.w != 0 && all % 16 == 0 && (!normal || p.vector == p.w);
}

// ---- One long row: x stays in registers. A thread has the same columns of every row of weights, so a
// warp has sums of its columns alone, and the block adds those of its warps. A block has consecutive
// rows of weights. Of a very long row it does some columns for all its rows before the next ones.

// Reads of 16 bytes of weights that a thread has under way.
static constexpr int READS = 8;
// The most of them for one row.
static constexpr int ACROSS = 4;
// Bytes of its weights that a block prefetches.
static constexpr u32 AHEAD = 16384;
// Bytes of a line of the L2 cache.
static constexpr u32 LINE = 128;

// Whether there is one row of x, which is long enough for all threads and can be read so, and the sums
// of a block's rows have room.
template <int G, int MATRICES>
INLINE bool is_long(const LinearParams& p, const void* x, const void* norm, const Output<G> (&outputs)[MATRICES], u64 total) {
    if ((total - 1) / gridDim.x + 1 > SHARED / (WARPS * G)) return false;
    return is_wide(p, x, norm, outputs) && p.x == p.w && p.k >= 8 * THREADS && (!(p.flags & NORM) || p.k <= 8 * ACROSS * THREADS);
}

// The rows of weights of output `index` of all, in all `G` matrices.
template <int G, int MATRICES>
INLINE void rows_of(const LinearParams& p, const Output<G> (&outputs)[MATRICES], u32 index, const void* (&rows)[G]) {
    u64 i = index;
    const Output<G> o = find(outputs, i);
#pragma unroll
    for (int g = 0; g < G; ++g) rows[g] = (const u8*)o.w[g] + i * ((u64)p.k * size_of(p.w));
}

// Sums of `V` values over the lanes of a warp: a lane gets that of value `value_of<V>()`.
template <int V> INLINE float warp_sums(float (&v)[V]) {
    u32 step = 16;
#pragma unroll
    for (int half = V / 2; half > 0; half /= 2, step /= 2) {
        const bool upper = threadIdx.x & step;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float other = __shfl_xor_sync(ALL, upper ? v[i] : v[i + half], step);
            v[i] = (upper ? v[i + half] : v[i]) + other;
        }
    }
#pragma unroll
    for (; step > 0; step /= 2) v[0] += __shfl_xor_sync(ALL, v[0], step);
    return v[0];
}
template <int V> INLINE u32 value_of() { return threadIdx.x / (WARP / V); }

// The weights of `R` rows that a thread reads at a time.
template <int R, int G, int J> struct Batch {
    uint4 word[R][G][J];
};

// Some columns of all rows of weights from `begin` to `end`, `J` reads of a thread for each row. The
// sums go to `shared`: for each row and matrix one of each warp. A norm multiplies x by its weight here.
// The squares of x go to `scratch`, one sum of each warp: their factor multiplies the finished sums, so
// no product waits for all of x.
template <class W, int J, int G, int MATRICES>
INLINE void long_columns(const LinearParams& p, const void* x, const void* norm, const Output<G> (&outputs)[MATRICES],
                         u32 begin, u32 end, u32 from, float* scratch, float* shared) {
    constexpr int N = 8, R = READS / (J * G), V = R * G;
    const u32 warp = threadIdx.y;
    auto column = [&](int j) { return from + (j * THREADS + thread_index()) * N; };
    Batch<R, G, J> batch;
    auto read = [&](u32 n) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const void* rows[G];
            // Behind the last row it is read again.
            rows_of(p, outputs, smaller(n + r, end - 1), rows);
#pragma unroll
            for (int g = 0; g < G; ++g) {
#pragma unroll
                for (int j = 0; j < J; ++j) {
                    batch.word[r][g][j] = make_uint4(0, 0, 0, 0);
                    if (column(j) < p.k) batch.word[r][g][j] = weights_at((const typename W::raw*)rows[g] + column(j));
                }
            }
        }
    };
    // The reads of x go first, because it would wait behind the weights.
    uint4 word[J], weight[J];
#pragma unroll
    for (int j = 0; j < J; ++j) {
        word[j] = weight[j] = make_uint4(0, 0, 0, 0);
        if (column(j) >= p.k) continue;
        word[j] = *(const uint4*)((const typename W::raw*)x + column(j));
        if (p.flags & NORM) weight[j] = *(const uint4*)((const typename W::raw*)norm + column(j));
    }
    read(begin);
    float value[J][N];
#pragma unroll
    for (int j = 0; j < J; ++j) unpack<W, N>(word[j], value[j]);
    if (p.flags & NORM) {
        const float squares = warp_sum(squares_of(value));
        if (threadIdx.x == 0) scratch[warp] = squares;
#pragma unroll
        for (int j = 0; j < J; ++j) {
            float g[N];
            unpack<W, N>(weight[j], g);
#pragma unroll
            for (int e = 0; e < N; ++e) value[j][e] = value[j][e] * g[e];
        }
    }
#pragma unroll 1
    for (u32 n = begin; n < end; n += R) {
        float sums[V];
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
            for (int g = 0; g < G; ++g) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < J; ++j) {
                    float v[N];
                    unpack<W, N>(batch.word[r][g][j], v);
#pragma unroll
                    for (int e = 0; e < N; ++e) sum = fmaf(v[e], value[j][e], sum);
                }
                sums[r * G + g] = sum;
            }
        }
        if (n + R < end) read(n + R);
        const float sum = warp_sums<V>(sums);
        const u32 of = value_of<V>();
        if (threadIdx.x % (WARP / V) == 0 && n + of / G < end) {
            float& to = shared[((n - begin) * G + of) * WARPS + warp];
            to = from == 0 ? sum : to + sum;
        }
    }
}

template <class W, int J, int G, int MATRICES, Finish HOW>
INLINE void long_row(const LinearParams& p, const void* x, const void* norm, const Output<G> (&outputs)[MATRICES], u32 begin,
                     u32 end, float* scratch, float* shared) {
    if (begin == end) return;
    for (u32 from = 0; from < p.k; from += smaller(J * THREADS * 8, p.k - from)) {
        long_columns<W, J>(p, x, norm, outputs, begin, end, from, scratch, shared);
    }
    __syncthreads();
    float factor = 1.0f;
    if (p.flags & NORM) {
        float squares = 0.0f;
#pragma unroll
        for (u32 w = 0; w < WARPS; ++w) squares += scratch[w];
        factor = factor_of(p, squares);
    }
    for (u32 n = begin + thread_index(); n < end; n += THREADS) {
        float sum[G];
#pragma unroll
        for (int g = 0; g < G; ++g) {
            sum[g] = 0.0f;
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) sum[g] += shared[((n - begin) * G + g) * WARPS + w];
            sum[g] *= factor;
        }
        u64 index = n;
        const Output<G> o = find(outputs, index);
        finish<G, HOW>(p, o, sum[0], sum[G - 1], 0, (u32)index);
    }
}

template <class W, int G, int MATRICES, Finish HOW>
INLINE void long_row(const LinearParams& p, const void* x, const void* norm, const Output<G> (&outputs)[MATRICES], u32 begin,
                     u32 end, float* scratch, float* shared) {
    const u32 reads = (p.k - 1) / (8 * THREADS) + 1;
    if (reads == 1) long_row<W, 1, G, MATRICES, HOW>(p, x, norm, outputs, begin, end, scratch, shared);
    else if (reads == 2) long_row<W, 2, G, MATRICES, HOW>(p, x, norm, outputs, begin, end, scratch, shared);
    else long_row<W, ACROSS, G, MATRICES, HOW>(p, x, norm, outputs, begin, end, scratch, shared);
}

template <int G, int MATRICES, Finish HOW>
INLINE void long_row(const LinearParams& p, const void* x, const void* norm, const Output<G> (&outputs)[MATRICES], u64 total,
                     float* scratch, float* shared) {
    const u64 begin = blockIdx.x * total / gridDim.x, end = (blockIdx.x + 1) * total / gridDim.x;
    u64 index = begin;
    const Output<G> o = find(outputs, index);
    const u64 row = (u64)p.k * size_of(p.w), bytes = smaller((u64)AHEAD / G, smaller(end - begin, o.n - index) * row);
#pragma unroll
    for (int g = 0; g < G; ++g) {
        for (u32 i = thread_index() * LINE; i < bytes; i += THREADS * LINE) prefetch((const u8*)o.w[g] + index * row + i);
    }
    if (p.flags & NORM) {
        const u32 weights = p.k * size_of(p.vector);
        for (u32 i = thread_index() * LINE; i < weights; i += THREADS * LINE) prefetch((const u8*)norm + i);
    }
    wait_for_previous();
    if (p.w == 1) long_row<Bf16, G, MATRICES, HOW>(p, x, norm, outputs, (u32)begin, (u32)end, scratch, shared);
    else long_row<F16, G, MATRICES, HOW>(p, x, norm, outputs, (u32)begin, (u32)end, scratch, shared);
}

// ---- One short row: x stays in registers, and a warp has all of it, so warps do not wait for each other.

// The most reads of 16 bytes that a lane has of a row.
static constexpr int SHORT = 4;

template <class X, class W, int J, int G, int MATRICES, Finish HOW>
INLINE void short_row(const LinearParams& p, const void* x, const void* norm, const Output<G> (&outputs)[MATRICES], u64 total) {
    constexpr int N = 8;
    auto column = [&](int j) { return (j * WARP + threadIdx.x) * N; };
    auto read = [&](uint4 (&to)[J], const void* row) {
#pragma unroll
        for (int j = 0; j < J; ++j) {
            to[j] = make_uint4(0, 0, 0, 0);
            if (column(j) < p.k) to[j] = *(const uint4*)((const typename W::raw*)row + column(j));
        }
    };
    const u64 stride = (u64)gridDim.x * WARPS;
    u64 index = (u64)blockIdx.x * WARPS + threadIdx.y;
    if (index >= total) return;
    // All reads for the first output are under way together.
    float value[J][N];
#pragma unroll
    for (int j = 0; j < J; ++j) {
#pragma unroll
        for (int e = 0; e < N; ++e) value[j][e] = 0.0f;
        if (column(j) < p.k) load<X, N>(x, column(j), value[j]);
    }
    uint4 weight[J], batch[G][J];
    if (p.flags & NORM) read(weight, norm);
    for (bool first = true; index < total; index += stride, first = false) {
        u64 n = index;
        const Output<G> o = find(outputs, n);
#pragma unroll
        for (int g = 0; g < G; ++g) read(batch[g], (const typename W::raw*)o.w[g] + n * p.k);
        const float before = HOW == ADD_TO ? load_one(p.y, o.y, n) : 0.0f;
        if (first && (p.flags & NORM)) {
            const float squares = squares_of(value);
            const float factor = factor_of(p, warp_sum(squares));
#pragma unroll
            for (int j = 0; j < J; ++j) {
                float g[N];
                unpack<W, N>(weight[j], g);
#pragma unroll
                for (int e = 0; e < N; ++e) value[j][e] = value[j][e] * factor * g[e];
            }
        }
        float sum[G];
#pragma unroll
        for (int g = 0; g < G; ++g) {
            sum[g] = 0.0f;
#pragma unroll
            for (int j = 0; j < J; ++j) {
                float v[N];
                unpack<W, N>(batch[g][j], v);
#pragma unroll
                for (int e = 0; e < N; ++e) sum[g] = fmaf(v[e], value[j][e], sum[g]);
            }
            sum[g] = warp_sum(sum[g]);
        }
        if (threadIdx.x != 0) continue;
        if (p.flags & BIAS) finish<G, HOW>(p, o, sum[0], sum[G - 1], 0, (u32)n);
        else store_one(p.y, o.y, n, HOW == GATE ? silu(sum[0]) * sum[G - 1] : HOW == ADD_TO ? before + sum[0] : sum[0]);
    }
}

template <int G, int MATRICES, Finish HOW>
INLINE void short_row(const LinearParams& p, const void* x, const void* norm, const Output<G> (&outputs)[MATRICES], u64 total) {
    wait_for_previous();
    if (p.w == 1) {
        if (p.x == 1) short_row<Bf16, Bf16, SHORT, G, MATRICES, HOW>(p, x, norm, outputs, total);
        else if (p.k <= 8 * WARP) short_row<F32, Bf16, 1, G, MATRICES, HOW>(p, x, norm, outputs, total);
        else short_row<F32, Bf16, SHORT, G, MATRICES, HOW>(p, x, norm, outputs, total);
    } else {
        if (p.x == 2) short_row<F16, F16, SHORT, G, MATRICES, HOW>(p, x, norm, outputs, total);
        else short_row<F32, F16, SHORT, G, MATRICES, HOW>(p, x, norm, outputs, total);
    }
}

// Whether there is one row of x, short enough for the lanes of a warp, and of a type that goes with that
// of the weights.
template <int G, int MATRICES>
INLINE bool is_short(const LinearParams& p, const void* x, const void* norm, const Output<G> (&outputs)[MATRICES]) {
    return p.k <= 8 * SHORT * WARP && is_wide(p, x, norm, outputs) && (p.x == p.w || p.x == 0);
}

template <int G, int MATRICES, Finish HOW>
INLINE void stream(const LinearParams& p, const void* x, const void* norm, const Output<G> (&outputs)[MATRICES],
                   float* shared) {
    __shared__ float scale[FEW];
    __shared__ float scratch[32];
    const u32 rows = p.m == 1 ? 1 : FEW, pitch = PANEL / rows;
    u64 total = 0;
#pragma unroll
    for (int i = 0; i < MATRICES; ++i) total += outputs[i].n;
    const u64 stride = (u64)gridDim.x * blockDim.y;
    if (is_short(p, x, norm, outputs)) return short_row<G, MATRICES, HOW>(p, x, norm, outputs, total);
    if (is_long(p, x, norm, outputs, total)) return long_row<G, MATRICES, HOW>(p, x, norm, outputs, total, scratch, shared);
    wait_for_previous();
    bool staged = false;
    if (p.m == 1 && p.k <= pitch && p.k % 8 == 0 && address(x) % 16 == 0) {
        stage_row(p, x, norm, scratch, shared);
        __syncthreads();
        staged = true;
    } else {
        scales(p, x, scratch, scale);
    }
    for (u64 base = (u64)blockIdx.x * blockDim.y; base < total; base += stride) {
        u64 index = base + threadIdx.y;
        const bool active = index < total;
        const Output<G> o = find(outputs, index);
        float sums[G][FEW];
#pragma unroll
        for (int g = 0; g < G; ++g) {
#pragma unroll
            for (u32 m = 0; m < FEW; ++m) sums[g][m] = 0.0f;
        }
        for (u32 from = 0; from < p.k;) {
            const u32 n = smaller(pitch, p.k - from);
            // A single panel serves all outputs.
            if (!staged) {
                __syncthreads();
                stage(p, x, norm, scale, from, n, rows, pitch, shared);
                __syncthreads();
                staged = p.k <= pitch;
            }
            if (active) {
                const u64 at = index * p.k + from;
                if (rows == 1) products<1, G>(p.w, o.w, at, n, p.k, shared, sums);
                else products<(int)FEW, G>(p.w, o.w, at, n, p.k, shared, sums);
            }
            from += n;
        }
#pragma unroll
        for (u32 m = 0; m < FEW; ++m) {
            if (m < p.m) {
                const float first = warp_sum(sums[0][m]), second = G == 2 ? warp_sum(sums[G - 1][m]) : 0.0f;
                if (active && threadIdx.x == m) finish<G, HOW>(p, o, first, second, m, (u32)index);
            }
        }
    }
}

// ---- Many rows

// Rows `first` to `first + TILE` of a matrix of `rows` rows of `k` columns, `ld` apart: DEPTH
// columns from `from` on. Column c of the tile begins at `c * PITCH`. Elements outside the matrix
// are zero.
INLINE void take(u32 dtype, const void* matrix, u32 rows, u32 ld, u32 k, u32 first, u32 from, bool wide, float* tile) {
    const u32 t = thread_index(), row = t / 4, column = t % 4 * 4;
    const u64 at = (u64)(first + row) * ld + from + column;
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (first + row < rows) {
        if (wide && from + column + 4 <= k) {
            load(dtype, matrix, at, v);
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (from + column + e < k) v[e] = load_one(dtype, matrix, at + e);
            }
        }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) tile[(column + e) * PITCH + row] = v[e];
}

template <int G, int MATRICES, Finish HOW>
INLINE void tiles(const LinearParams& p, const void* x, const Output<G> (&outputs)[MATRICES], float* shared) {
    wait_for_previous();
    u32 index = blockIdx.x;
    Output<G> o = outputs[0];
    u32 behind = (o.n - 1) / TILE + 1;
#pragma unroll
    for (int i = 1; i < MATRICES; ++i) {
        if (index >= behind) {
            o = outputs[i];
            index -= behind;
            behind = (o.n - 1) / TILE + 1;
        } else {
            behind = ~0u;
        }
    }
    const u32 first_m = blockIdx.y * TILE, first_n = index * TILE;
    float* const rows = shared;
    bool wide[G];
    float sums[G][4][4];
#pragma unroll
    for (int g = 0; g < G; ++g) {
        wide[g] = by_four(p.w, o.w[g], p.k);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[g][i][j] = 0.0f;
        }
    }
    const bool wide_x = by_four(p.x, x, p.ldx);
    for (u32 from = 0; from < p.k;) {
        take(p.x, x, p.m, p.ldx, p.k, first_m, from, wide_x, rows);
#pragma unroll
        for (int g = 0; g < G; ++g) {
            take(p.w, o.w[g], o.n, p.k, p.k, first_n, from, wide[g], shared + (1 + g) * DEPTH * PITCH);
        }
        __syncthreads();
#pragma unroll 4
        for (u32 c = 0; c < DEPTH; ++c) {
            const float4 a4 = shared_four(rows + c * PITCH + 4 * threadIdx.y);
            const float a[4] = {a4.x, a4.y, a4.z, a4.w};
#pragma unroll
            for (int g = 0; g < G; ++g) {
                const float4 b4 = shared_four(shared + ((1 + g) * DEPTH + c) * PITCH + 4 * threadIdx.x);
                const float b[4] = {b4.x, b4.y, b4.z, b4.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) sums[g][i][j] = fmaf(a[i], b[j], sums[g][i][j]);
                }
            }
        }
        __syncthreads();
        from += smaller(DEPTH, p.k - from);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 m = first_m + 4 * threadIdx.y + i;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 n = first_n + 4 * threadIdx.x + j;
            if (m < p.m && n < o.n) finish<G, HOW>(p, o, sums[0][i][j], sums[G - 1][i][j], m, n);
        }
    }
}

template <int G, int MATRICES, Finish HOW>
INLINE void product(const LinearParams& p, const void* x, const void* norm, const Output<G> (&outputs)[MATRICES]) {
    __shared__ __align__(16) float shared[SHARED];
    let_next_start();
    if (blockDim.x != WARP) tiles<G, MATRICES, HOW>(p, x, outputs, shared);
    else stream<G, MATRICES, HOW>(p, x, norm, outputs, shared);
}

DENSE_KERNEL(256, 2) linear(const void* x, const void* norm, const void* w, const void* bias, void* y, LinearParams p) {
    const Output<1> outputs[1] = {{{w}, {bias}, y, p.n[0], p.ldy[0]}};
    product<1, 1, STORE>(p, x, norm, outputs);
}

DENSE_KERNEL(256, 2) linear_add(const void* x, const void* norm, const void* w, const void* bias, void* y, LinearParams p) {
    const Output<1> outputs[1] = {{{w}, {bias}, y, p.n[0], p.ldy[0]}};
    product<1, 1, ADD_TO>(p, x, norm, outputs);
}

DENSE_KERNEL(256, 2) linear3(const void* x, const void* norm, const void* w0, const void* bias0, void* y0, const void* w1,
                    const void* bias1, void* y1, const void* w2, const void* bias2, void* y2, LinearParams p) {
    const Output<1> outputs[3] = {
        {{w0}, {bias0}, y0, p.n[0], p.ldy[0]},
        {{w1}, {bias1}, y1, p.n[1], p.ldy[1]},
        {{w2}, {bias2}, y2, p.n[2], p.ldy[2]},
    };
    product<1, 3, STORE>(p, x, norm, outputs);
}

DENSE_KERNEL(256, 2) linear_gated(const void* x, const void* norm, const void* gate, const void* gate_bias, const void* up,
                         const void* up_bias, void* y, LinearParams p) {
    const Output<2> outputs[1] = {{{gate, up}, {gate_bias, up_bias}, y, p.n[0], p.ldy[0]}};
    product<2, 1, GATE>(p, x, norm, outputs);
}
