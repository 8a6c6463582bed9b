// Matrix products of 2 to 64 rows on Hopper devices: the same functions as `linear`, `linear_add`, `linear3` and
// `linear_gated`, without a norm, for x and weights of bf16, and rows of a multiple of 64 elements. Sums are f32.
//
// Boxes of weights and of x pass through a ring in shared memory, by tensor maps. One warp of a block copies them,
// eight multiply what has arrived. Flags in shared memory say which stages are full, and which are free again.
// A launch that may read the weights early has those of all stages under way before it waits for x.
//
// The products are those of tensor cores. Weights are the 16 rows of a fragment, and rows of x its 8 columns. So few
// rows of x waste nothing. The pieces of a box's rows change places, so a fragment is read without conflicts of banks.
//
// A block has consecutive rows of weights and all columns. A warp has 32 columns of each stage, and the warps' sums
// meet once. The number of rows of x changes no order of sums.

// Warps that multiply. One more copies.
static constexpr u32 WARPS = 8;
static constexpr u32 THREADS = (WARPS + 1) * WARP;
// Columns of a box, bytes of its rows, and columns of a warp in a stage.
static constexpr u32 BOX = 64;
static constexpr u32 LINE = 2 * BOX;
static constexpr u32 SLICE = 32;
// Blocks that have a processor each, and bytes of the ring of such a block and of one of two blocks on a processor.
static constexpr u32 PROCESSORS = 132;
static constexpr u32 RING = 216 << 10;
static constexpr u32 HALF_RING = 108 << 10;
// The most stages: those of a block of 16 rows of weights and 8 of x.
static constexpr u32 MOST = 18;
// Outputs beyond which a block of one matrix has 64 rows of weights, not 16.
static constexpr u32 MANY = 16384;
// Bytes to which a box is aligned, because the places of its pieces depend on its address.
static constexpr u32 ALIGN = 1024;

struct __align__(64) Map {
    u32 words[32];
};

// Starts a copy of the box from this row and this group of columns on. Elements out of bounds are zero.
INLINE void copy_box(u8* to, const Map* map, u32 row, u32 group, u64* flag) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
                     (u32)__cvta_generic_to_shared(to)),
                 "l"(map), "r"(0), "r"(row), "r"(group), "r"((u32)__cvta_generic_to_shared(flag))
                 : "memory");
}

// A block of `ROWS` rows of weights and `X` rows of x. A stage has `DEPTH` boxes of each.
template <u32 ROWS, u32 X, u32 DEPTH, int G> struct Shape {
    // Rows of each matrix, which are the block's outputs, and those of a warp.
    static constexpr u32 OUTPUTS = ROWS / G;
    static constexpr u32 SLICES = DEPTH * BOX / SLICE;
    static constexpr u32 OWN = ROWS / (WARPS / SLICES);
    static constexpr u32 M = OWN / 16;
    static constexpr u32 N = X / 8;
    static constexpr u32 PAIRS = N / 2 + N % 2;
    // Bytes of a stage: its weights, and all.
    static constexpr u32 WEIGHTS = ROWS * DEPTH * LINE;
    static constexpr u32 STAGE = WEIGHTS + X * DEPTH * LINE;
    // Elements from the sums of one row of x to the next, which keep rows in different banks, and of a slice.
    static constexpr u32 PITCH = ROWS + 4;
    static constexpr u32 SET = X * PITCH;
    static_assert(WARPS % SLICES == 0 && OWN % 16 == 0 && OUTPUTS % OWN == 0, "a warp has whole fragments of one matrix");
    static_assert(STAGE % ALIGN == 0 && WEIGHTS / G % ALIGN == 0 && WEIGHTS % ALIGN == 0, "boxes are aligned");
    static_assert(SLICES * SET * sizeof(float) <= HALF_RING && RING / STAGE <= MOST, "the host's limits");
};

// The sums of a warp's columns of all stages.
template <class S, int G>
INLINE void multiply_all(float (&sum)[S::M][S::N][4], const u8* ring, u32 stages, u32 steps, u64* full, u64* free) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, slice = warp % S::SLICES, first = warp / S::SLICES * S::OWN;
    // The line of this lane in the stage's first box of weights, and in that of x.
    const u32 box = slice * SLICE / BOX, chunk = slice * SLICE % BOX / 8, swap = lane % 8;
    const u32 matrix = first / S::OUTPUTS * (S::WEIGHTS / G);
    const u32 weights = matrix + (box * S::OUTPUTS + first % S::OUTPUTS + lane % 16) * LINE;
    const u32 x = S::WEIGHTS + (box * S::N * 8 + (S::N == 1 ? lane % 8 : lane / 16 * 8 + lane % 8)) * LINE;
    u32 slot = 0, phase = 0;
#pragma unroll 1
    for (u32 step = 0; step < steps; ++step) {
        wait_for(full + slot, phase);
        const u8* const stage = ring + slot * S::STAGE;
        u32 w[2][S::M][4], v[2][S::PAIRS][4];
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
#pragma unroll
            for (u32 m = 0; m < S::M; ++m) {
                matrices(w[i][m], (const u16*)(stage + weights + m * 16 * LINE + ((chunk + 2 * i + lane / 16) ^ swap) * 16));
            }
#pragma unroll
            for (u32 n = 0; n < S::PAIRS && (S::N > 1 || i == 0); ++n) {
                // One matrix of rows has all columns of the slice, of two the columns of a fragment.
                const u32 piece = S::N > 1 ? 2 * i + lane / 8 % 2 : lane / 8;
                matrices(v[i][n], (const u16*)(stage + x + n * 16 * LINE + ((chunk + piece) ^ swap) * 16));
            }
        }
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
#pragma unroll
            for (u32 m = 0; m < S::M; ++m) {
#pragma unroll
                for (u32 n = 0; n < S::N; ++n) {
                    if (S::N == 1) multiply(Bf16(), sum[m][n], w[i][m], v[0][0][2 * i], v[0][0][2 * i + 1]);
                    else multiply(Bf16(), sum[m][n], w[i][m], v[i][n / 2][n % 2 * 2], v[i][n / 2][n % 2 * 2 + 1]);
                }
            }
        }
        arrive(free + slot);
        if (++slot == stages) {
            slot = 0;
            phase ^= 1;
        }
    }
}

template <u32 ROWS, u32 X, u32 DEPTH, int G, int MATRICES, Finish HOW>
INLINE void product(const LinearParams& p, const Map* rows, const Output<G> (&outputs)[MATRICES], const Map* const (&maps)[MATRICES][G],
                    bool early) {
    typedef Shape<ROWS, X, DEPTH, G> S;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ u64 full[MOST], free[MOST];
    u8* const ring = memory + (0u - (u32)__cvta_generic_to_shared(memory)) % ALIGN;
    const u32 stages = (gridDim.x > PROCESSORS ? HALF_RING : RING) / S::STAGE;
    const u32 steps = (p.k - 1) / (DEPTH * BOX) + 1;
    const bool copies = threadIdx.x == WARPS * WARP;

    // The block's matrix, its maps, and the block's number in it.
    u32 index = blockIdx.x, behind = (outputs[0].n - 1) / S::OUTPUTS + 1;
    Output<G> o = outputs[0];
    const Map* weights[G];
#pragma unroll
    for (int g = 0; g < G; ++g) weights[g] = maps[0][g];
#pragma unroll
    for (int i = 1; i < MATRICES; ++i) {
        if (index >= behind) {
            o = outputs[i];
            weights[0] = maps[i][0];
            index -= behind;
            behind = (o.n - 1) / S::OUTPUTS + 1;
        } else {
            behind = ~0u;
        }
    }
    auto copy_weights = [&](u32 step, u32 slot) {
        begin_copies(full + slot, S::STAGE);
#pragma unroll
        for (int g = 0; g < G; ++g) {
            u8* const to = ring + slot * S::STAGE + g * (S::WEIGHTS / G);
            copy_box(to, weights[g], index * S::OUTPUTS, step * DEPTH, full + slot);
        }
    };
    auto copy_x = [&](u32 step, u32 slot) { copy_box(ring + slot * S::STAGE + S::WEIGHTS, rows, 0, step * DEPTH, full + slot); };

    if (copies) {
        for (u32 i = 0; i < stages; ++i) {
            make_flag(full + i, 1);
            make_flag(free + i, WARPS);
        }
        show_writes();
    }
    __syncthreads();
    if (!early) wait_for_previous();
    if (copies) {
        for (u32 i = 0; i < smaller(steps, stages); ++i) copy_weights(i, i);
    }
    wait_for_previous();
    float sum[S::M][S::N][4];
#pragma unroll
    for (u32 i = 0; i < S::M * S::N * 4; ++i) sum[i / (4 * S::N)][i / 4 % S::N][i % 4] = 0.0f;
    if (copies) {
        u32 slot = 0, phase = 0;
#pragma unroll 1
        for (u32 i = 0; i < steps; ++i) {
            if (i >= stages) {
                wait_for(free + slot, phase);
                copy_weights(i, slot);
            }
            copy_x(i, slot);
            if (++slot == stages) {
                slot = 0;
                phase ^= i >= stages;
            }
        }
    } else if (threadIdx.x < WARPS * WARP) {
        multiply_all<S, G>(sum, ring, stages, steps, full, free);
    }
    __syncthreads();

    // The sums take the ring's place.
    float* const sums = (float*)ring;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (warp < WARPS) {
        float* const to = sums + warp % S::SLICES * S::SET + 2 * (lane % 4) * S::PITCH + warp / S::SLICES * S::OWN + lane / 4;
#pragma unroll
        for (u32 m = 0; m < S::M; ++m) {
#pragma unroll
            for (u32 n = 0; n < S::N; ++n) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i) to[(n * 8 + i % 2) * S::PITCH + m * 16 + i / 2 * 8] = sum[m][n][i];
            }
        }
    }
    __syncthreads();
    finish<Bf16, THREADS, S::SLICES, G, HOW>(p, o, sums, S::SET, S::PITCH, S::OUTPUTS, 0, X, index * S::OUTPUTS, S::OUTPUTS);
}

// By the rows of x.
template <u32 ROWS, u32 DEPTH, int G, int MATRICES, Finish HOW>
INLINE void product(const LinearParams& p, const Map* rows, const Output<G> (&outputs)[MATRICES], const Map* const (&maps)[MATRICES][G],
                    bool early) {
    if (p.m <= 8) product<ROWS, 8, DEPTH, G, MATRICES, HOW>(p, rows, outputs, maps, early);
    else if (p.m <= 16) product<ROWS, 16, DEPTH, G, MATRICES, HOW>(p, rows, outputs, maps, early);
    else if (p.m <= 32) product<ROWS, 32, DEPTH, G, MATRICES, HOW>(p, rows, outputs, maps, early);
    else product<ROWS, 64, DEPTH, G, MATRICES, HOW>(p, rows, outputs, maps, early);
}

DENSE_KERNEL(THREADS, 2) linear_boxes(const void* x, const void* norm, const void* w, const void* bias, void* y,
                                      const __grid_constant__ Map rows, const __grid_constant__ Map weights, LinearParams p, u32 early) {
    const Output<1> outputs[1] = {{{w}, {bias}, y, p.n[0], p.ldy[0]}};
    const Map* const maps[1][1] = {{&weights}};
    let_next_start();
    if (p.n[0] > MANY) product<64, 2, 1, 1, STORE>(p, &rows, outputs, maps, has<1 << 2>(early));
    else product<16, 4, 1, 1, STORE>(p, &rows, outputs, maps, has<1 << 2>(early));
}

DENSE_KERNEL(THREADS, 2) linear_add_boxes(const void* x, const void* norm, const void* w, const void* bias, void* y,
                                          const __grid_constant__ Map rows, const __grid_constant__ Map weights, LinearParams p,
                                          u32 early) {
    const Output<1> outputs[1] = {{{w}, {bias}, y, p.n[0], p.ldy[0]}};
    const Map* const maps[1][1] = {{&weights}};
    let_next_start();
    product<16, 4, 1, 1, ADD_TO>(p, &rows, outputs, maps, has<1 << 2>(early));
}

DENSE_KERNEL(THREADS, 2) linear3_boxes(const void* x, const void* norm, const void* w0, const void* bias0, void* y0, const void* w1,
                                       const void* bias1, void* y1, const void* w2, const void* bias2, void* y2,
                                       const __grid_constant__ Map rows, const __grid_constant__ Map weights0,
                                       const __grid_constant__ Map weights1, const __grid_constant__ Map weights2, LinearParams p,
                                       u32 early) {
    const Output<1> outputs[3] = {
        {{w0}, {bias0}, y0, p.n[0], p.ldy[0]},
        {{w1}, {bias1}, y1, p.n[1], p.ldy[1]},
        {{w2}, {bias2}, y2, p.n[2], p.ldy[2]},
    };
    const Map* const maps[3][1] = {{&weights0}, {&weights1}, {&weights2}};
    let_next_start();
    product<16, 4, 1, 3, STORE>(p, &rows, outputs, maps, has<1 << 2 | 1 << 5 | 1 << 8>(early));
}

DENSE_KERNEL(THREADS, 2) linear_gated_boxes(const void* x, const void* norm, const void* gate, const void* gate_bias, const void* up,
                                            const void* up_bias, void* y, const __grid_constant__ Map rows,
                                            const __grid_constant__ Map gates, const __grid_constant__ Map ups, LinearParams p,
                                            u32 early) {
    const Output<2> outputs[1] = {{{gate, up}, {gate_bias, up_bias}, y, p.n[0], p.ldy[0]}};
    const Map* const maps[1][2] = {{&gates, &ups}};
    let_next_start();
    product<64, 2, 2, 1, GATE>(p, &rows, outputs, maps, has<1 << 2 | 1 << 4>(early));
}
