// Matrix products of several rows on tensor cores: the same functions as `linear`, `linear_add`,
// `linear3` and `linear_gated`, without a norm, for x and weights of one of the types bf16 and f16, and
// rows of a multiple of eight elements. Sums are f32.
//
// The host selects one of two methods by the shape of the block:
// - 32 × 8 or 16 × 16 threads: few rows of x (32 at most). The weights stream through once. A block takes
//   as many rows of weights at a time as it is wide, divided among its warps by columns. A lane reads 16
//   bytes of a row, several such reads ahead, and uses them as words of a fragment: a sum may take its
//   columns in any order, if it is the same for weights and x. So no operand goes through shared memory,
//   and the reads never pause. All these blocks add the columns of an output in one order;
// - 64 × 4 or 128 × 2 threads: a block computes as many rows as it is wide, by as many rows of weights.
//   It copies the columns of the next two stages to shared memory while it multiplies those of one.
//
// A gated product has half as many outputs of a block, with a row of weights of each matrix for each.

// Threads of a block, and its warps.
static constexpr u32 THREADS = 256;
static constexpr u32 WARPS = THREADS / WARP;
// Rows of x of a fragment, the most of them for which weights stream, and the most rows of weights of a block.
static constexpr u32 FRAGMENT = 16;
static constexpr u32 STREAMED = 2 * FRAGMENT;
static constexpr u32 STREAM = 32;
// Columns from one read of a lane to its next one.
static constexpr u32 APART = WARPS * 32;
// Bytes of a line of the L2 cache.
static constexpr u32 LINE = 128;
// Stages in shared memory, and the elements of one.
static constexpr u32 STAGES = 3;
static constexpr u32 STAGE = 8192;
// Elements of a block's shared memory, which serves both methods.
static constexpr u32 SHARED = STAGES * STAGE;

// ---- Few rows

// 16 bytes that may not be aligned; zeros if they are not `wanted`.
INLINE uint4 halves_at(const u16* p, bool wanted) {
    u32 word[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 4 && wanted; ++i) word[i] = (u32)p[2 * i] | ((u32)p[2 * i + 1] << 16);
    return make_uint4(word[0], word[1], word[2], word[3]);
}

// Reads 16 bytes at `p` of global memory to `q`, or zeros if they are not `wanted`; `cached` is the modifier of
// the instruction. The reads are volatile, so they keep their order and stay behind `wait_for_previous`. They
// are coherent, because a kernel in front may write the memory while this one waits already.
#ifndef LEASEHOLD_EMULATED
#define READ(q, p, wanted, cached)                                                                              \
    asm volatile("{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0; "                                             \
                 "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0; "                                 \
                 "@wanted ld.global" cached ".v4.u32 {%0, %1, %2, %3}, [%4]; }"                                 \
                 : "=&r"((q).x), "=&r"((q).y), "=&r"((q).z), "=&r"((q).w)                                       \
                 : "l"(p), "r"((u32)(wanted)))
#else
#define READ(q, p, wanted, cached) q = (wanted) ? *(const uint4*)(p) : make_uint4(0, 0, 0, 0)
#endif

// 16 bytes of weights, which pass the L1 cache.
INLINE uint4 weights_at(const u16* p, bool wanted) {
    uint4 q;
    READ(q, p, wanted, ".L1::no_allocate");
    return q;
}

// 16 bytes of x, which stay in the L1 cache.
INLINE uint4 x_at(const u16* p, bool wanted) {
    uint4 q;
    READ(q, p, wanted, "");
    return q;
}

// The same number, from which the compiler derives nothing in front of this place. Such results would
// take the registers of reads.
INLINE u32 here(u32 v) {
#ifndef LEASEHOLD_EMULATED
    asm volatile("mov.u32 %0, %1;" : "=r"(v) : "r"(v));
#endif
    return v;
}

// The row of weights `row` of the block's `ROWS` rows, of group `index` of matrix `o`. Behind the last
// row it is read again.
template <u32 ROWS, int G> INLINE const u16* weight_row(const LinearParams& p, const Output<G>& o, u32 index, u32 row) {
    constexpr u32 OUTPUTS = ROWS / G;
    const u32 n = smaller(index * OUTPUTS + row % OUTPUTS, o.n - 1);
    return (const u16*)(G == 2 && row >= OUTPUTS ? o.w[G - 1] : o.w[0]) + (u64)n * p.k;
}

// Asks for weights of the block, from this byte of each row on: a line by each thread.
template <u32 ROWS, int G, int MATRICES>
INLINE void prefetch_weights(const LinearParams& p, const Output<G> (&outputs)[MATRICES], u32 from) {
    constexpr u32 LINES = THREADS / ROWS;
    u32 index = blockIdx.x;
    const Output<G> o = find<ROWS / G>(outputs, index);
    const u32 thread = thread_index(), at = from + thread % LINES * LINE;
    if (at < p.k * sizeof(u16)) prefetch((const u8*)weight_row<ROWS>(p, o, index, thread / LINES) + at);
}

// `X` fragments of rows of x by groups of 8 `F` rows of weights. `WIDE`: all operands are aligned to
// 16 bytes.
template <class T, bool WIDE, u32 X, u32 F, int G, int MATRICES, Finish HOW>
INLINE void stream(const LinearParams& p, const void* x, const Output<G> (&outputs)[MATRICES], bool early, float* shared) {
    // Reads of each row of weights that a lane has under way: as many as it has registers for.
    constexpr u32 READS = WIDE ? (X == 2 ? 8 : 12) / F : 1;
    // Outputs of a group of rows of weights, and the columns of a step of a block.
    constexpr u32 ROWS = 8 * F, OUTPUTS = ROWS / G, STEP = READS * APART;
    // Elements from the sums of one row of x to the next, which keep rows in different banks, of all sums
    // of a warp, and of the sets of them that alternate.
    constexpr u32 PITCH = ROWS + 8, SET = X * FRAGMENT * PITCH;
    constexpr u32 TURNS = 2 * WARPS * SET * sizeof(float) <= SHARED * sizeof(u16) ? 2 : 1;
    static_assert(X * FRAGMENT <= STREAMED && ROWS <= STREAM, "the host's limits");
    static_assert(TURNS * WARPS * SET * sizeof(float) <= SHARED * sizeof(u16), "the sums fit");
    const u32 warp = thread_index() / WARP, row = thread_index() % WARP / 4, t = thread_index() % 4;
    const u32 column = warp * 32 + 8 * t;
    u32 groups = 0;
#pragma unroll
    for (int i = 0; i < MATRICES; ++i) groups += (outputs[i].n - 1) / OUTPUTS + 1;

    // A lane has a row of each fragment of weights, and every eighth row of x. These are the places of its
    // next reads.
    const u16 *weights[F], *rows = (const u16*)x + (u64)row * p.ldx + column;
    auto enter = [&](u32 group) {
        const Output<G> o = find<OUTPUTS>(outputs, group);
#pragma unroll
        for (u32 f = 0; f < F; ++f) weights[f] = weight_row<ROWS>(p, o, group, 8 * f + row) + column;
    };
    uint4 w[READS][F], v[2 * X];
    auto read_weights = [&](u32 i, u32 from, u32 end) {
#pragma unroll
        for (u32 f = 0; f < F; ++f) {
            const u16* at = weights[f] + i * APART;
            const bool wanted = from + i * APART < end;
            w[i][f] = WIDE ? weights_at(at, wanted) : halves_at(at, wanted);
        }
    };
    auto read_x = [&](u32 i, u32 from) {
#pragma unroll
        for (u32 h = 0; h < 2 * X; ++h) {
            const u16* at = rows + (u64)(8 * h) * p.ldx + i * APART;
            const bool wanted = 8 * h + row < p.m && from + i * APART < p.k;
            v[h] = WIDE ? x_at(at, wanted) : halves_at(at, wanted);
        }
    };

    u32 group = blockIdx.x;
    enter(group);
    auto read_first = [&] {
#pragma unroll
        for (u32 i = 0; i < READS; ++i) read_weights(i, column, p.k);
    };
    prefetch_weights<ROWS>(p, outputs, WIDE && early ? READS * APART * sizeof(u16) : 0);
    if (WIDE && early) read_first();
    wait_for_previous();
    read_x(0, column);
    if (!(WIDE && early)) read_first();
    for (u32 turn = 0; group < groups; group += gridDim.x, turn ^= 1) {
        float sum[X][F][4];
#pragma unroll
        for (u32 i = 0; i < X * F * 4; ++i) sum[i / (4 * F)][i / 4 % F][i % 4] = 0.0f;
        u32 from = column;
#pragma unroll 1
        do {
            // The next step is one of this group, or the first one of the next group.
            u32 next = from + STEP, end = p.k;
            if (next < p.k + column) {
#pragma unroll
                for (u32 f = 0; f < F; ++f) weights[f] += STEP;
            } else {
                next = column;
                if (groups - group > gridDim.x) enter(here(group + gridDim.x));
                else end = 0;
            }
            next = here(next);
#pragma unroll
            for (u32 i = 0; i < READS; ++i) {
#pragma unroll
                for (u32 h = 0; h < X; ++h) {
                    const uint4 above = v[2 * h], below = v[2 * h + 1];
                    const u32 first[4] = {above.x, below.x, above.y, below.y};
                    const u32 second[4] = {above.z, below.z, above.w, below.w};
#pragma unroll
                    for (u32 f = 0; f < F; ++f) {
                        multiply(T(), sum[h][f], first, w[i][f].x, w[i][f].y);
                        multiply(T(), sum[h][f], second, w[i][f].z, w[i][f].w);
                    }
                }
                if (i + 1 < READS) {
                    read_x(i + 1, from);
                } else {
                    rows += (i32)(next - from);
                    read_x(0, next);
                }
                read_weights(i, next, end);
            }
            from = next;
        } while (from != column);
        // Each warp has sums of its columns. If sets of them alternate, one barrier for a group is enough.
        if (TURNS == 1) __syncthreads();
        float* const sums = shared + (TURNS == 1 ? 0 : turn * (WARPS * SET));
        float* const to = sums + here(warp * SET + row * PITCH + 2 * t);
#pragma unroll
        for (u32 h = 0; h < X; ++h) {
#pragma unroll
            for (u32 f = 0; f < F; ++f) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    to[(h * FRAGMENT + i / 2 * 8) * PITCH + f * 8 + i % 2] = sum[h][f][i];
                }
            }
        }
        __syncthreads();
        u32 index = group;
        const Output<G> o = find<OUTPUTS>(outputs, index);
        finish<T, THREADS, WARPS, G, HOW>(p, o, sums, SET, PITCH, OUTPUTS, 0, p.m, index * OUTPUTS, OUTPUTS);
    }
}

// ---- Many rows

// The place in a stage of 8 elements of a row. The eight rows of a matrix lie in different banks.
template <u32 DEPTH> INLINE u32 place(u32 row, u32 chunk) {
    return row * DEPTH + (chunk ^ (DEPTH == 32 ? row / 2 % 4 : row % 8)) * 8;
}

// A tile of `SIDE` rows of x by as many rows of weights. Each warp has half of the rows and a quarter of
// the weights.
template <class T, u32 SIDE, int G, int MATRICES, Finish HOW>
INLINE void tile(const LinearParams& p, const void* x, const Output<G> (&outputs)[MATRICES], bool wide, u16* shared) {
    constexpr u32 DEPTH = STAGE / (2 * SIDE), CHUNKS = DEPTH / 8, COPIES = STAGE / 8 / THREADS;
    constexpr u32 ROWS = SIDE / 2, WEIGHTS = SIDE / 4, OUTPUTS = WEIGHTS / G, M = ROWS / 16, N = WEIGHTS / 8;
    const u32 thread = thread_index(), lane = thread % WARP, warp = thread / WARP, t = lane % 4;
    u32 index = blockIdx.y;
    const Output<G> o = find<SIDE / G>(outputs, index);
    const u32 first_m = blockIdx.x * SIDE, first_n = index * (SIDE / G);
    const u32 warp_m = warp / 4 * ROWS, warp_n = warp % 4;

    // The rows of x and then of weights from which this thread copies. Each warp's weights of one matrix
    // precede those of the other.
    const u16* from[COPIES];
    bool there[COPIES];
    const u32 chunk = thread % CHUNKS;
#pragma unroll
    for (u32 i = 0; i < COPIES; ++i) {
        const u32 row = (thread + i * THREADS) / CHUNKS;
        if (i < COPIES / 2) {
            there[i] = first_m + row < p.m;
            from[i] = (const u16*)x + (u64)(first_m + row) * p.ldx + chunk * 8;
        } else {
            const u32 of = row - SIDE, in = of % WEIGHTS, n = first_n + of / WEIGHTS * OUTPUTS + in % OUTPUTS;
            there[i] = n < o.n;
            from[i] = (const u16*)(in < OUTPUTS ? o.w[0] : o.w[G - 1]) + (u64)n * p.k + chunk * 8;
        }
    }
    auto copy = [&](u32 column, u16* stage) {
#pragma unroll
        for (u32 i = 0; i < COPIES; ++i) {
            u16* to = stage + place<DEPTH>((thread + i * THREADS) / CHUNKS, chunk);
            if (!there[i] || column + chunk * 8 >= p.k) *(uint4*)to = make_uint4(0, 0, 0, 0);
            else if (wide) start_copy(to, from[i] + column);
            else *(uint4*)to = halves_at(from[i] + column, true);
        }
    };

    float sum[M][N][4];
#pragma unroll
    for (u32 i = 0; i < M * N * 4; ++i) sum[i / (4 * N)][i / 4 % N][i % 4] = 0.0f;
    copy(0, shared);
    end_group();
    copy(DEPTH, shared + STAGE);
    end_group();
    u32 now = 0, later = 2;
#pragma unroll 1
    for (u32 column = 0; column < p.k; column += DEPTH) {
        wait_for_groups<1>();
        __syncthreads();
        copy(column + 2 * DEPTH, shared + later * STAGE);
        end_group();
        const u16 *rows = shared + now * STAGE, *weights = rows + SIDE * DEPTH;
#pragma unroll
        for (u32 k = 0; k < CHUNKS; k += 2) {
            u32 a[M][4];
#pragma unroll
            for (u32 i = 0; i < M; ++i) matrices(a[i], rows + place<DEPTH>(warp_m + i * 16 + lane % 16, k + lane / 16));
#pragma unroll
            for (u32 j = 0; j < N; j += 2) {
                u32 b[4];
                const u32 row = warp_n * WEIGHTS + j * 8 + lane / 16 * 8 + lane % 8;
                matrices(b, weights + place<DEPTH>(row, k + lane / 8 % 2));
#pragma unroll
                for (u32 i = 0; i < M; ++i) {
                    multiply(T(), sum[i][j], a[i], b[0], b[1]);
                    multiply(T(), sum[i][j + 1], a[i], b[2], b[3]);
                }
            }
        }
        now = now == STAGES - 1 ? 0 : now + 1;
        later = later == STAGES - 1 ? 0 : later + 1;
    }

    // The sums of the upper half of the rows and then those of the lower half go through shared memory.
    // Those of the second matrix lie behind those of the first.
    constexpr u32 PITCH = SIDE + 8;
    static_assert(ROWS * PITCH * sizeof(float) <= SHARED * sizeof(u16), "half of the sums fit");
    float* const sums = (float*)shared;
#pragma unroll 1
    for (u32 half = 0; half < 2; ++half) {
        __syncthreads();
        if (warp / 4 == half) {
#pragma unroll
            for (u32 i = 0; i < M; ++i) {
#pragma unroll
                for (u32 j = 0; j < N; ++j) {
                    const u32 at = (j * 8 / OUTPUTS * 4 + warp_n) * OUTPUTS + j * 8 % OUTPUTS + 2 * t;
#pragma unroll
                    for (u32 e = 0; e < 4; ++e) sums[(i * 16 + e / 2 * 8 + lane / 4) * PITCH + at + e % 2] = sum[i][j][e];
                }
            }
        }
        __syncthreads();
        finish<T, THREADS, 1, G, HOW>(p, o, sums, 0, PITCH, SIDE / G, first_m + half * ROWS, ROWS, first_n, SIDE / G);
    }
}

template <class T, u32 X, int G, int MATRICES, Finish HOW>
INLINE void stream(const LinearParams& p, const void* x, const Output<G> (&outputs)[MATRICES], bool early, float* shared) {
    if (blockDim.x == STREAM) stream<T, true, X, 4, G, MATRICES, HOW>(p, x, outputs, early, shared);
    else stream<T, true, X, 2, G, MATRICES, HOW>(p, x, outputs, early, shared);
}

// One method computes what is not aligned, and one f16: they are the slower ones, and rarely needed.
template <class T, bool BF16, int G, int MATRICES, Finish HOW>
INLINE void stream(const LinearParams& p, const void* x, const Output<G> (&outputs)[MATRICES], bool wide, bool early,
                   float* shared) {
    if (!wide) {
        stream<T, false, 2, 2, G, MATRICES, HOW>(p, x, outputs, early, shared);
    } else if constexpr (BF16) {
        if (p.m <= FRAGMENT) stream<T, 1, G, MATRICES, HOW>(p, x, outputs, early, shared);
        else stream<T, 2, G, MATRICES, HOW>(p, x, outputs, early, shared);
    } else {
        stream<T, true, 2, 2, G, MATRICES, HOW>(p, x, outputs, early, shared);
    }
}

template <class T, bool BF16, int G, int MATRICES, Finish HOW>
INLINE void product(const LinearParams& p, const void* x, const Output<G> (&outputs)[MATRICES], bool early, u16* shared) {
    u64 all = address(x);
#pragma unroll
    for (int i = 0; i < MATRICES; ++i) {
#pragma unroll
        for (int g = 0; g < G; ++g) all |= address(outputs[i].w[g]);
    }
    const bool wide = all % 16 == 0;
    if (blockDim.x > STREAM) wait_for_previous();
    if (blockDim.x == 128) tile<T, 128, G, MATRICES, HOW>(p, x, outputs, wide, shared);
    else if (blockDim.x == 64) tile<T, 64, G, MATRICES, HOW>(p, x, outputs, wide, shared);
    else stream<T, BF16, G, MATRICES, HOW>(p, x, outputs, wide, early, (float*)shared);
}

template <int G, int MATRICES, Finish HOW>
INLINE void product(const LinearParams& p, const void* x, const Output<G> (&outputs)[MATRICES], bool early) {
    __shared__ __align__(16) u16 shared[SHARED];
    let_next_start();
    if (p.x == 1) product<Bf16, true, G, MATRICES, HOW>(p, x, outputs, early, shared);
    else product<F16, false, G, MATRICES, HOW>(p, x, outputs, early, shared);
}

DENSE_KERNEL(256, 2) linear_tiles(const void* x, const void* norm, const void* w, const void* bias, void* y,
                                  LinearParams p, u32 early) {
    const Output<1> outputs[1] = {{{w}, {bias}, y, p.n[0], p.ldy[0]}};
    product<1, 1, STORE>(p, x, outputs, has<1 << 2>(early));
}

DENSE_KERNEL(256, 2) linear_add_tiles(const void* x, const void* norm, const void* w, const void* bias, void* y,
                                      LinearParams p, u32 early) {
    const Output<1> outputs[1] = {{{w}, {bias}, y, p.n[0], p.ldy[0]}};
    product<1, 1, ADD_TO>(p, x, outputs, has<1 << 2>(early));
}

DENSE_KERNEL(256, 2) linear3_tiles(const void* x, const void* norm, const void* w0, const void* bias0, void* y0,
                                   const void* w1, const void* bias1, void* y1, const void* w2, const void* bias2,
                                   void* y2, LinearParams p, u32 early) {
    const Output<1> outputs[3] = {
        {{w0}, {bias0}, y0, p.n[0], p.ldy[0]},
        {{w1}, {bias1}, y1, p.n[1], p.ldy[1]},
        {{w2}, {bias2}, y2, p.n[2], p.ldy[2]},
    };
    product<1, 3, STORE>(p, x, outputs, has<1 << 2 | 1 << 5 | 1 << 8>(early));
}

DENSE_KERNEL(256, 2) linear_gated_tiles(const void* x, const void* norm, const void* gate, const void* gate_bias,
                                        const void* up, const void* up_bias, void* y, LinearParams p, u32 early) {
    const Output<2> outputs[1] = {{{gate, up}, {gate_bias, up_bias}, y, p.n[0], p.ldy[0]}};
    product<2, 1, GATE>(p, x, outputs, has<1 << 2 | 1 << 4>(early));
}
