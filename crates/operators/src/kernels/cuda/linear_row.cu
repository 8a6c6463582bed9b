// Matrix products of one long row on Hopper devices: the same functions as `linear`, `linear_add`,
// `linear3` and `linear_gated`, for x and weights of one of the types bf16 and f16, and rows of a
// multiple of eight elements. Sums are f32.
//
// A warp has rows of weights of its own, and a ring of pieces of them in shared memory. It copies the
// next pieces there while it multiplies those that have arrived. A launch that may read the weights
// early fills the rings before it waits for x, so the memory works while the kernels in front end.
// All of x is in shared memory, in f32. A norm multiplies x by its weight there, and its factor
// multiplies the finished sums.
//
// A block with few rows divides each row's pieces among its warps. Sums have one order in both cases.

static constexpr u32 NORM = 1;
static constexpr u32 BIAS = 2;

// Threads of a block, and its warps.
static constexpr u32 THREADS = 256;
static constexpr u32 WARPS = THREADS / WARP;
// Columns of a piece of one row, and the pieces of a warp's ring. A gated product has pieces of half as
// many columns, of two rows.
static constexpr u32 PIECE = 1024;
static constexpr u32 PIECES = 6;
// The most rows of weights of a block whose pieces are divided among its warps.
static constexpr u32 DIVIDED = 64;
// The most sums of a block.
static constexpr u32 SUMS = 1024;
// Bytes of a line of the L2 cache.
static constexpr u32 LINE = 128;

// A block's shared memory. x is behind it: the first four of each eight columns, then the others.
struct Shared {
    u16 ring[WARPS][PIECES][PIECE];
    u64 flags[WARPS][PIECES];
    float squares[WARPS];
    float sums[SUMS];
};
static_assert(sizeof(Shared) % 16 == 0, "x is aligned");

// The matrix of row `index` of all, and the row's number in it.
template <int G, int MATRICES> INLINE Output<G> find(const Output<G> (&outputs)[MATRICES], u32& index) {
    Output<G> o = outputs[0];
    u32 behind = o.n;
#pragma unroll
    for (int i = 1; i < MATRICES; ++i) {
        if (index >= behind) {
            o = outputs[i];
            index -= behind;
            behind = o.n;
        } else {
            behind = ~0u;
        }
    }
    return o;
}

// A warp's place among the pieces of a block's rows.
struct Place {
    u32 row;
    u32 piece;
};

template <class W, int G, int MATRICES, Finish HOW>
INLINE void product(const LinearParams& p, const void* x, const void* norm, const Output<G> (&outputs)[MATRICES], bool early,
                    u8* memory) {
    constexpr u32 COLUMNS = PIECE / G;
    Shared& shared = *(Shared*)memory;
    float* const x_values = (float*)(memory + sizeof(Shared));
    const u32 thread = thread_index(), lane = thread % WARP, warp = thread / WARP;
    u32 total = 0;
#pragma unroll
    for (int i = 0; i < MATRICES; ++i) total += outputs[i].n;
    const u32 begin = (u32)((u64)blockIdx.x * total / gridDim.x), end = (u32)((u64)(blockIdx.x + 1) * total / gridDim.x);
    const u32 rows = end - begin, pieces = (p.k - 1) / COLUMNS + 1;
    const u32 most = (total - 1) / gridDim.x + 1;
    const bool divided = most <= DIVIDED && most * pieces * G <= SUMS;
    // From a place to the warp's next one.
    const u32 rows_on = divided ? WARPS / pieces : 0, pieces_on = divided ? WARPS % pieces : 1, wrap = divided ? 1 : WARPS;
    auto go_on = [&](Place& at) {
        at.row += rows_on;
        at.piece += pieces_on;
        if (at.piece >= pieces) {
            at.piece -= pieces;
            at.row += wrap;
        }
    };
    const Place first = divided ? Place{warp / pieces, warp % pieces} : Place{warp, 0};

    // The first lane copies.
    Place later = first;
    u32 slot = 0;
    auto copy = [&] {
        if (lane == 0 && later.row < rows) {
            u32 n = begin + later.row;
            const Output<G> o = find(outputs, n);
            const u32 from = later.piece * COLUMNS, bytes = smaller(p.k - from, COLUMNS) * (u32)sizeof(u16);
            u64* const flag = &shared.flags[warp][slot];
            begin_copies(flag, G * bytes);
#pragma unroll
            for (int g = 0; g < G; ++g) {
                copy_bulk(shared.ring[warp][slot] + g * COLUMNS, (const u16*)o.w[g] + (u64)n * p.k + from, bytes, flag);
            }
            end_copies(flag);
        }
        go_on(later);
        slot = slot == PIECES - 1 ? 0 : slot + 1;
    };
    if (lane == 0) {
#pragma unroll
        for (u32 i = 0; i < PIECES; ++i) make_flag(&shared.flags[warp][i], 1);
        show_writes();
    }
    __syncwarp();
    auto fill = [&] {
#pragma unroll 1
        for (u32 i = 0; i < PIECES; ++i) copy();
    };
    if (early) fill();
    if (p.flags & NORM) {
        for (u32 i = thread * LINE; i < p.k * size_of(p.vector); i += THREADS * LINE) prefetch((const u8*)norm + i);
    }
    wait_for_previous();
    if (!early) fill();

    float squares = 0.0f;
    for (u32 i = thread * 8; i < p.k; i += THREADS * 8) {
        float v[8];
        load<W, 8>(x, i, v);
        if (p.flags & NORM) {
            float g[8];
            load<W, 8>(norm, i, g);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                squares = fmaf(v[e], v[e], squares);
                v[e] *= g[e];
            }
        }
        float4* const to = (float4*)x_values + i / 8;
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[p.k / 8] = make_float4(v[4], v[5], v[6], v[7]);
    }
    if (p.flags & NORM) {
        squares = warp_sum(squares);
        if (lane == 0) shared.squares[warp] = squares;
    }
    __syncthreads();

    float sum[G];
#pragma unroll
    for (int g = 0; g < G; ++g) sum[g] = 0.0f;
    u32 now = 0, phase = 0;
#pragma unroll 1
    for (Place at = first; at.row < rows; go_on(at)) {
        wait_for(&shared.flags[warp][now], phase);
        const u16* const from = shared.ring[warp][now];
        const u32 column = at.piece * COLUMNS;
#pragma unroll
        for (u32 j = 0; j < COLUMNS / (8 * WARP); ++j) {
            const u32 i = (j * WARP + lane) * 8;
            if (column + i >= p.k) break;
            const float* const values = x_values + (column + i) / 2;
            const float4 low = shared_four(values), high = shared_four(values + p.k / 2);
#pragma unroll
            for (int g = 0; g < G; ++g) {
                float w[8];
                const float4 four = shared_four((const float*)(from + g * COLUMNS + i));
                W::unpack(__float_as_uint(four.x), w);
                W::unpack(__float_as_uint(four.y), w + 2);
                W::unpack(__float_as_uint(four.z), w + 4);
                W::unpack(__float_as_uint(four.w), w + 6);
                sum[g] = fmaf(w[0], low.x, sum[g]);
                sum[g] = fmaf(w[1], low.y, sum[g]);
                sum[g] = fmaf(w[2], low.z, sum[g]);
                sum[g] = fmaf(w[3], low.w, sum[g]);
                sum[g] = fmaf(w[4], high.x, sum[g]);
                sum[g] = fmaf(w[5], high.y, sum[g]);
                sum[g] = fmaf(w[6], high.z, sum[g]);
                sum[g] = fmaf(w[7], high.w, sum[g]);
            }
        }
        __syncwarp();
        copy();
        if (++now == PIECES) {
            now = 0;
            phase ^= 1;
        }
        if (!divided && at.piece < pieces - 1) continue;
#pragma unroll
        for (int g = 0; g < G; ++g) {
            const float all = warp_sum(sum[g]);
            if (lane == 0) shared.sums[(divided ? at.row * pieces + at.piece : at.row) * G + g] = all;
            sum[g] = 0.0f;
        }
    }
    __syncthreads();
    float factor = 1.0f;
    if (p.flags & NORM) {
        float all = 0.0f;
#pragma unroll
        for (u32 w = 0; w < WARPS; ++w) all += shared.squares[w];
        factor = 1.0f / sqrtf(all / (float)p.k + p.eps);
    }
    const u32 parts = divided ? pieces : 1;
    for (u32 row = thread; row < rows; row += THREADS) {
        u32 n = begin + row;
        const Output<G> o = find(outputs, n);
        float y[G];
#pragma unroll
        for (int g = 0; g < G; ++g) {
            y[g] = 0.0f;
            for (u32 i = 0; i < parts; ++i) y[g] += shared.sums[(row * parts + i) * G + g];
            y[g] *= factor;
            if (p.flags & BIAS) y[g] += load_one(p.vector, o.bias[g], n);
        }
        float out = HOW == GATE ? silu(y[0]) * y[G - 1] : y[0];
        if (HOW == ADD_TO) out += load_one(p.y, o.y, n);
        store_one(p.y, o.y, n, out);
    }
}

// What is not aligned to 16 bytes is computed element by element: a warp has a row of weights at a time.
template <class W, int G, int MATRICES, Finish HOW>
INLINE void unaligned(const LinearParams& p, const void* x, const void* norm, const Output<G> (&outputs)[MATRICES]) {
    wait_for_previous();
    const u32 thread = thread_index(), lane = thread % WARP, warp = thread / WARP;
    u32 total = 0;
#pragma unroll
    for (int i = 0; i < MATRICES; ++i) total += outputs[i].n;
    for (u32 row = blockIdx.x * WARPS + warp; row < total; row += gridDim.x * WARPS) {
        u32 n = row;
        const Output<G> o = find(outputs, n);
        float sum[G], squares = 0.0f;
#pragma unroll
        for (int g = 0; g < G; ++g) sum[g] = 0.0f;
        for (u32 i = lane; i < p.k; i += WARP) {
            float v[1], w[1];
            load<W, 1>(x, i, v);
            if (p.flags & NORM) {
                squares = fmaf(v[0], v[0], squares);
                v[0] *= load_one(p.vector, norm, i);
            }
#pragma unroll
            for (int g = 0; g < G; ++g) {
                load<W, 1>(o.w[g], (u64)n * p.k + i, w);
                sum[g] = fmaf(w[0], v[0], sum[g]);
            }
        }
        const float factor = p.flags & NORM ? 1.0f / sqrtf(warp_sum(squares) / (float)p.k + p.eps) : 1.0f;
#pragma unroll
        for (int g = 0; g < G; ++g) {
            sum[g] = warp_sum(sum[g]) * factor;
            if (p.flags & BIAS) sum[g] += load_one(p.vector, o.bias[g], n);
        }
        float out = HOW == GATE ? silu(sum[0]) * sum[G - 1] : sum[0];
        if (lane != 0) continue;
        if (HOW == ADD_TO) out += load_one(p.y, o.y, n);
        store_one(p.y, o.y, n, out);
    }
}

template <int G, int MATRICES, Finish HOW>
INLINE void product(const LinearParams& p, const void* x, const void* norm, const Output<G> (&outputs)[MATRICES], bool early) {
    extern __shared__ __align__(16) u8 memory[];
    let_next_start();
    const bool normal = p.flags & NORM;
    u64 all = address(x) | (normal ? address(norm) : 0);
#pragma unroll
    for (int i = 0; i < MATRICES; ++i) {
#pragma unroll
        for (int g = 0; g < G; ++g) all |= address(outputs[i].w[g]);
    }
    if (all % 16 == 0 && (!normal || p.vector == p.w)) {
        if (p.w == 1) product<Bf16, G, MATRICES, HOW>(p, x, norm, outputs, early, memory);
        else product<F16, G, MATRICES, HOW>(p, x, norm, outputs, early, memory);
    } else {
        if (p.w == 1) unaligned<Bf16, G, MATRICES, HOW>(p, x, norm, outputs);
        else unaligned<F16, G, MATRICES, HOW>(p, x, norm, outputs);
    }
}

// Whether the launch's word, bit i for operand i, lets the kernel read all matrices of weights before
// `wait_for_previous`. `WEIGHTS` are their bits.
template <u32 WEIGHTS> INLINE bool has(u32 early) { return (early & WEIGHTS) == WEIGHTS; }

DENSE_KERNEL(256, 2) linear_row(const void* x, const void* norm, const void* w, const void* bias, void* y, LinearParams p,
                                u32 early) {
    const Output<1> outputs[1] = {{{w}, {bias}, y, p.n[0], p.ldy[0]}};
    product<1, 1, STORE>(p, x, norm, outputs, has<1 << 2>(early));
}

DENSE_KERNEL(256, 2) linear_add_row(const void* x, const void* norm, const void* w, const void* bias, void* y, LinearParams p,
                                    u32 early) {
    const Output<1> outputs[1] = {{{w}, {bias}, y, p.n[0], p.ldy[0]}};
    product<1, 1, ADD_TO>(p, x, norm, outputs, has<1 << 2>(early));
}

DENSE_KERNEL(256, 2) linear3_row(const void* x, const void* norm, const void* w0, const void* bias0, void* y0, const void* w1,
                                 const void* bias1, void* y1, const void* w2, const void* bias2, void* y2, LinearParams p,
                                 u32 early) {
    const Output<1> outputs[3] = {
        {{w0}, {bias0}, y0, p.n[0], p.ldy[0]},
        {{w1}, {bias1}, y1, p.n[1], p.ldy[1]},
        {{w2}, {bias2}, y2, p.n[2], p.ldy[2]},
    };
    product<1, 3, STORE>(p, x, norm, outputs, has<1 << 2 | 1 << 5 | 1 << 8>(early));
}

DENSE_KERNEL(256, 2) linear_gated_row(const void* x, const void* norm, const void* gate, const void* gate_bias, const void* up,
                                      const void* up_bias, void* y, LinearParams p, u32 early) {
    const Output<2> outputs[1] = {{{gate, up}, {gate_bias, up_bias}, y, p.n[0], p.ldy[0]}};
    product<2, 1, GATE>(p, x, norm, outputs, has<1 << 2 | 1 << 4>(early));
}
