// Matrix products of one long row on Hopper devices: the same functions as `linear`, `linear_add`,
// `linear3` and `linear_gated`, for x, norm and weights of bf16, and rows of a multiple of eight
// elements. Sums are f32.
//
// The weights pass through shared memory. Two warps of a block copy pieces of them to a ring there, eight
// multiply what has arrived, and one finishes outputs. Flags in shared memory say which pieces are full,
// which are free again, and which sums are there. A launch that may read the weights early fills the ring
// before it waits for x. So the memory works while the kernel in front ends.
//
// The products are those of tensor cores. Their fragment of 16 rows has x in its first row. A norm
// multiplies x by its weight, in f32. The fragment's second row has what the first one loses by rounding.
// The norm's factor multiplies the finished sums.
//
// A block has consecutive rows of weights, a group of eight at a time. A warp that multiplies has an eighth
// of the columns of each piece. The order of all sums depends on the parameters alone.

static constexpr u32 NORM = 1;

// Warps of a block that multiply, and those that copy. One more finishes outputs.
static constexpr u32 WARPS = 8;
static constexpr u32 COPIERS = 2;
static constexpr u32 MULTIPLIERS = WARPS * WARP;
static constexpr u32 THREADS = (WARPS + 1 + COPIERS) * WARP;
// Rows of weights of a group, in each matrix of a gated product.
static constexpr u32 ROWS = 8;
// Columns of a piece of a group, and the pieces of the ring. A gated product has half as many columns. A warp
// pays for each copy, so a copy has kilobytes.
static constexpr u32 PIECE = 1024;
static constexpr u32 PIECES = 5;
// Elements behind a row of a piece, which keep rows in different banks.
static constexpr u32 PAD = 8;
// Columns that a warp multiplies at a time.
static constexpr u32 CHUNK = 32;
// Groups whose sums are in shared memory.
static constexpr u32 SETS = 4;
// Bytes of a line of the L2 cache.
static constexpr u32 LINE = 128;

// A block's shared memory. The rows of x are behind it.
//
// Two blocks fill a processor: the host asks for more than a third of its shared memory. So a launch of two
// blocks for each processor divides its rows evenly, and a block of the kernel behind begins when one of
// this ends. With room for a third block, a processor that is free early would take two of the next ones.
struct Shared {
    u16 ring[PIECES][ROWS * (PIECE + 2 * PAD)];
    u64 full[PIECES];
    u64 free[PIECES];
    u64 summed[SETS];
    u64 finished[SETS];
    u64 staged[2];
    float squares[WARPS];
    float sums[SETS][WARPS][2 * ROWS];
    // The rows of x, in the order of `word_of`.
    __device__ __forceinline__ u32* x() { return (u32*)(this + 1); }
};
static_assert(sizeof(Shared) % 16 == 0, "x is aligned");

// Words from one row of x to the next.
INLINE u32 width(const LinearParams& p) { return (p.k - 1) / CHUNK * (CHUNK / 2) + CHUNK / 2; }

// The place of a pair of columns: a lane's four pairs of a chunk are together.
INLINE u32 word_of(u32 pair) { return pair / 16 * 16 + pair % 4 * 4 + pair % 16 / 4; }

// Copies the pieces of rows `begin` to `end` of all: what the copying warps do, in turns.
template <int G, int MATRICES>
INLINE void copy(const LinearParams& p, const Output<G> (&outputs)[MATRICES], bool early, Shared& shared, u32 begin, u32 end) {
    constexpr u32 COLUMNS = PIECE / G, PITCH = COLUMNS + PAD;
    const u32 lane = threadIdx.x % WARP, g = lane / ROWS, of = lane % ROWS;
    u32 slot = 0, phase = 1, turn = threadIdx.x / WARP - WARPS - 1;
    if (!early) wait_for_previous();
#pragma unroll 1
    for (u32 first = begin; first < end; first += ROWS) {
        const u32 rows = smaller(end - first, ROWS);
        const bool copies = g < G && of < rows;
        u32 n = first + (copies ? of : 0);
        const Output<G> o = find<1>(outputs, n);
        const u16* const from = (const u16*)(g == 1 ? o.w[G - 1] : o.w[0]) + (u64)n * p.k;
#pragma unroll 1
        for (u32 column = 0; column < p.k; column += COLUMNS) {
            if (turn == 0) {
                const u32 bytes = smaller(p.k - column, COLUMNS) * (u32)sizeof(u16);
                wait_for(shared.free + slot, phase);
                if (lane == 0) begin_copies(shared.full + slot, G * rows * bytes);
                __syncwarp();
                if (copies) copy_bulk(shared.ring[slot] + lane * PITCH, from + column, bytes, shared.full + slot);
                __syncwarp();
            }
            turn = turn == 0 ? COPIERS - 1 : turn - 1;
            if (++slot == PIECES) {
                slot = 0;
                phase ^= 1;
            }
        }
    }
}

// The row x to shared memory, by the warps that multiply: in the first row, and what that loses in the
// second one if there is a norm.
INLINE void stage(const LinearParams& p, const void* x, const void* norm, Shared& shared) {
    constexpr u32 READS = 32 / WARPS, STEP = MULTIPLIERS * 8;
    const u32 thread = threadIdx.x;
    u32* const values = shared.x();
    const bool normal = p.flags & NORM;
    float squares = 0.0f;
#pragma unroll 1
    for (u32 first = thread * 8; first < p.k; first += READS * STEP) {
        uint4 words[READS], weights[READS];
#pragma unroll
        for (u32 r = 0; r < READS; ++r) {
            const u32 i = first + r * STEP;
            words[r] = weights[r] = make_uint4(0, 0, 0, 0);
            if (i < p.k) words[r] = *(const uint4*)((const u16*)x + i);
            if (i < p.k && normal) weights[r] = *(const uint4*)((const u16*)norm + i);
        }
#pragma unroll
        for (u32 r = 0; r < READS; ++r) {
            const u32 i = first + r * STEP;
            if (i >= p.k) break;
            const u32 word[4] = {words[r].x, words[r].y, words[r].z, words[r].w};
            const u32 weight[4] = {weights[r].x, weights[r].y, weights[r].z, weights[r].w};
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 at = word_of(i / 2 + j);
                if (!normal) {
                    values[at] = word[j];
                    continue;
                }
                float v[2], g[2], high[2];
                Bf16::unpack(word[j], v);
                Bf16::unpack(weight[j], g);
                squares = fmaf(v[0], v[0], squares);
                squares = fmaf(v[1], v[1], squares);
                v[0] *= g[0];
                v[1] *= g[1];
                values[at] = narrowed(Bf16(), v[0], v[1]);
                Bf16::unpack(values[at], high);
                values[at + width(p)] = narrowed(Bf16(), v[0] - high[0], v[1] - high[1]);
            }
        }
    }
    if (p.flags & NORM) {
        squares = warp_sum(squares);
        if (thread % WARP == 0) shared.squares[thread / WARP] = squares;
    }
}

#ifndef LEASEHOLD_EMULATED
// Four words of shared memory, or zeros if they are not `wanted`.
INLINE void words_at(u32 (&v)[4], const u32* p, bool wanted) {
    asm volatile("{ .reg .pred wanted; setp.ne.u32 wanted, %5, 0; "
                 "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0; "
                 "@wanted ld.shared.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "=&r"(v[0]), "=&r"(v[1]), "=&r"(v[2]), "=&r"(v[3])
                 : "r"((u32)__cvta_generic_to_shared(p)), "r"((u32)wanted)
                 : "memory");
}
#else
INLINE void words_at(u32 (&v)[4], const u32* p, bool wanted) {
    for (u32 i = 0; i < 4; ++i) v[i] = wanted ? p[i] : 0;
}
#endif

// The sums of a warp's columns of all pieces.
template <int G> INLINE void multiply_all(const LinearParams& p, Shared& shared, u32 begin, u32 end) {
    constexpr u32 COLUMNS = PIECE / G, PITCH = COLUMNS + PAD, OWN = COLUMNS / WARPS, CHUNKS = OWN / CHUNK;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, own = warp * OWN;
    // Lanes of the fragment's first rows have words of x. Those of a piece's rows name them.
    const bool has = lane < (p.flags & NORM ? 8 : 4);
    const u32* const row = shared.x() + (has ? lane / 4 * width(p) + lane % 4 * 4 : 0);
    const u32 place = lane % 8 * PITCH + lane / 8 * 8 + own;
    u32 slot = 0, phase = 0, set = 0, round = 1;
#pragma unroll 1
    for (u32 first = begin; first < end; first += ROWS) {
        // Two sums that alternate, because each product waits for the one before in its sum.
        float sum[G][2][4];
#pragma unroll
        for (int i = 0; i < G * 8; ++i) sum[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll 1
        for (u32 column = own; column < p.k + own; column += COLUMNS) {
            wait_for(shared.full + slot, phase);
            const u16* const piece = shared.ring[slot] + place;
            if (column + OWN <= p.k) {
                u32 v[CHUNKS][4], w[CHUNKS][G][4];
#pragma unroll
                for (u32 i = 0; i < CHUNKS; ++i) {
                    words_at(v[i], row + (column + i * CHUNK) / 2, has);
#pragma unroll
                    for (int g = 0; g < G; ++g) matrices(w[i][g], piece + g * ROWS * PITCH + i * CHUNK);
                }
#pragma unroll
                for (u32 i = 0; i < CHUNKS; ++i) {
                    const u32 a[4] = {v[i][0], 0, v[i][1], 0}, b[4] = {v[i][2], 0, v[i][3], 0};
#pragma unroll
                    for (int g = 0; g < G; ++g) {
                        multiply(Bf16(), sum[g][0], a, w[i][g][0], w[i][g][1]);
                        multiply(Bf16(), sum[g][1], b, w[i][g][2], w[i][g][3]);
                    }
                }
            } else {
#pragma unroll 1
                for (u32 i = 0; i < OWN && column + i < p.k; i += CHUNK) {
                    // Elements behind the row's end may be no numbers.
                    const u32 left = p.k - (column + i);
                    u32 v[4];
                    words_at(v, row + (column + i) / 2, has);
                    const u32 a[4] = {v[0], 0, left > 8 ? v[1] : 0, 0};
                    const u32 b[4] = {left > 16 ? v[2] : 0, 0, left > 24 ? v[3] : 0, 0};
#pragma unroll
                    for (int g = 0; g < G; ++g) {
                        u32 w[4];
                        matrices(w, piece + g * ROWS * PITCH + i);
                        multiply(Bf16(), sum[g][0], a, w[0], left > 8 ? w[1] : 0);
                        multiply(Bf16(), sum[g][1], b, left > 16 ? w[2] : 0, left > 24 ? w[3] : 0);
                    }
                }
            }
            arrive(shared.free + slot);
            if (++slot == PIECES) {
                slot = 0;
                phase ^= 1;
            }
        }
        // A lane of the first four has sums of two rows of weights; one of the next four has their rest.
        wait_for(shared.finished + set, round);
#pragma unroll
        for (int g = 0; g < G; ++g) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float part = sum[g][0][i] + sum[g][1][i];
                const float rest = __shfl_down_sync(ALL, part, 4);
                if (lane < 4) shared.sums[set][warp][g * ROWS + 2 * lane + i] = part + rest;
            }
        }
        arrive(shared.summed + set);
        if (++set == SETS) {
            set = 0;
            round ^= 1;
        }
    }
}

// The outputs from all warps' sums, by one warp: a lane has one of a group.
template <int G, int MATRICES, Finish HOW>
INLINE void finish(const LinearParams& p, const Output<G> (&outputs)[MATRICES], Shared& shared, u32 begin, u32 end) {
    const u32 lane = threadIdx.x % WARP;
    float factor = 1.0f;
    u32 set = 0, round = 0;
#pragma unroll 1
    for (u32 first = begin; first < end; first += ROWS) {
        const bool has = lane < smaller(end - first, ROWS);
        u32 n = first + (has ? lane : 0);
        const Output<G> o = find<1>(outputs, n);
        float before = 0.0f, bias[G];
#pragma unroll
        for (int g = 0; g < G; ++g) bias[g] = 0.0f;
        if (has && (p.flags & BIAS)) {
#pragma unroll
            for (int g = 0; g < G; ++g) bias[g] = load_one(p.vector, o.bias[g], n);
        }
        if (has && HOW == ADD_TO) before = load_one(p.y, o.y, n);
        wait_for(shared.summed + set, round);
        if (first == begin && (p.flags & NORM)) {
            float all = 0.0f;
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) all += shared.squares[w];
            factor = 1.0f / sqrtf(all / (float)p.k + p.eps);
        }
        float y[G];
#pragma unroll
        for (int g = 0; g < G; ++g) {
            y[g] = 0.0f;
#pragma unroll
            for (u32 w = 0; w < WARPS; ++w) y[g] += shared.sums[set][w][g * ROWS + lane % ROWS];
            y[g] = y[g] * factor + bias[g];
        }
        arrive(shared.finished + set);
        const float out = HOW == GATE ? silu(y[0]) * y[G - 1] : y[0];
        if (has) store_one(p.y, o.y, n, HOW == ADD_TO ? before + out : out);
        if (++set == SETS) {
            set = 0;
            round ^= 1;
        }
    }
}

template <int G, int MATRICES, Finish HOW>
INLINE void product(const LinearParams& p, const void* x, const void* norm, const Output<G> (&outputs)[MATRICES], bool early,
                    Shared& shared) {
    u32 total = 0;
#pragma unroll
    for (int i = 0; i < MATRICES; ++i) total += outputs[i].n;
    // The first blocks have one row more.
    const u32 each = total / gridDim.x, more = total % gridDim.x;
    const u32 begin = blockIdx.x * each + smaller(blockIdx.x, more), end = begin + each + (blockIdx.x < more);
    if (threadIdx.x == MULTIPLIERS) {
#pragma unroll
        for (u32 i = 0; i < PIECES; ++i) {
            make_flag(shared.full + i, 1);
            make_flag(shared.free + i, WARPS);
        }
#pragma unroll
        for (u32 i = 0; i < SETS; ++i) {
            make_flag(shared.summed + i, WARPS);
            make_flag(shared.finished + i, 1);
        }
        make_flag(shared.staged, WARPS);
        show_writes();
    }
    __syncthreads();
    if (threadIdx.x >= MULTIPLIERS + WARP) return copy(p, outputs, early, shared, begin, end);
    if (threadIdx.x < MULTIPLIERS && (p.flags & NORM)) {
        for (u32 i = threadIdx.x * LINE; i < p.k * 2; i += MULTIPLIERS * LINE) prefetch((const u8*)norm + i);
    }
    wait_for_previous();
    if (threadIdx.x >= MULTIPLIERS) return finish<G, MATRICES, HOW>(p, outputs, shared, begin, end);
    stage(p, x, norm, shared);
    arrive(shared.staged);
    wait_for(shared.staged, 0);
    multiply_all<G>(p, shared, begin, end);
}

// Operands that are not aligned to 16 bytes, element by element: a warp has a row of weights at a time.
template <int G, int MATRICES, Finish HOW>
INLINE void unaligned(const LinearParams& p, const void* x, const void* norm, const Output<G> (&outputs)[MATRICES]) {
    wait_for_previous();
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    u32 total = 0;
#pragma unroll
    for (int i = 0; i < MATRICES; ++i) total += outputs[i].n;
#pragma unroll 1
    for (u32 row = blockIdx.x * warps + warp; row < total; row += gridDim.x * warps) {
        u32 n = row;
        const Output<G> o = find<1>(outputs, n);
        float sum[G], squares = 0.0f;
#pragma unroll
        for (int g = 0; g < G; ++g) sum[g] = 0.0f;
#pragma unroll 1
        for (u32 i = lane; i < p.k; i += WARP) {
            float v[1], w[1];
            load<Bf16, 1>(x, i, v);
            if (p.flags & NORM) {
                squares = fmaf(v[0], v[0], squares);
                v[0] *= load_one(p.vector, norm, i);
            }
#pragma unroll
            for (int g = 0; g < G; ++g) {
                load<Bf16, 1>(o.w[g], (u64)n * p.k + i, w);
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
    if (all % 16 == 0 && (!normal || p.vector == p.w)) product<G, MATRICES, HOW>(p, x, norm, outputs, early, *(Shared*)memory);
    else unaligned<G, MATRICES, HOW>(p, x, norm, outputs);
}

DENSE_KERNEL(THREADS, 2) linear_row(const void* x, const void* norm, const void* w, const void* bias, void* y, LinearParams p,
                                u32 early) {
    const Output<1> outputs[1] = {{{w}, {bias}, y, p.n[0], p.ldy[0]}};
    product<1, 1, STORE>(p, x, norm, outputs, has<1 << 2>(early));
}

DENSE_KERNEL(THREADS, 2) linear_add_row(const void* x, const void* norm, const void* w, const void* bias, void* y, LinearParams p,
                                    u32 early) {
    const Output<1> outputs[1] = {{{w}, {bias}, y, p.n[0], p.ldy[0]}};
    product<1, 1, ADD_TO>(p, x, norm, outputs, has<1 << 2>(early));
}

DENSE_KERNEL(THREADS, 2) linear3_row(const void* x, const void* norm, const void* w0, const void* bias0, void* y0, const void* w1,
                                 const void* bias1, void* y1, const void* w2, const void* bias2, void* y2, LinearParams p,
                                 u32 early) {
    const Output<1> outputs[3] = {
        {{w0}, {bias0}, y0, p.n[0], p.ldy[0]},
        {{w1}, {bias1}, y1, p.n[1], p.ldy[1]},
        {{w2}, {bias2}, y2, p.n[2], p.ldy[2]},
    };
    product<1, 3, STORE>(p, x, norm, outputs, has<1 << 2 | 1 << 5 | 1 << 8>(early));
}

DENSE_KERNEL(THREADS, 2) linear_gated_row(const void* x, const void* norm, const void* gate, const void* gate_bias, const void* up,
                                      const void* up_bias, void* y, LinearParams p, u32 early) {
    const Output<2> outputs[1] = {{{gate, up}, {gate_bias, up_bias}, y, p.n[0], p.ldy[0]}};
    product<2, 1, GATE>(p, x, norm, outputs, has<1 << 2 | 1 << 4>(early));
}
