// Causal grouped-query attention of many rows on tensor cores: the same function as `attention`, for
// queries and caches of one of the types bf16 and f16, and heads of 64, 80, 96 or 128 elements.
//
// A block computes one head and QUERIES rows, a warp 32 of them, in two fragments: each element of a key
// or value that a warp reads from shared memory serves both. The block iterates over the
// positions in tiles, and copies the next tile to shared memory while it computes with the present
// one. A warp multiplies its queries with the keys of a tile (scores), updates the running maximum
// and sum of the online softmax, and multiplies the weights, rounded to the type of the values, with
// the values. Sums are f32. The blocks with the most positions run first.
//
// A position that no row of a block sees is never multiplied. A position that a later row of the
// block sees has weight 0 for the earlier rows, so a NaN among its values reaches them too.

static constexpr u32 THREADS = 128;
// Fragments of 16 rows of queries of a warp.
static constexpr u32 FRAGMENTS = 2;
static constexpr u32 WARP_QUERIES = 16 * FRAGMENTS;
static constexpr u32 QUERIES = THREADS / WARP * WARP_QUERIES;
// Elements between a row of a tile and the next one that keep rows in different banks.
static constexpr u32 GAP = 8;
// Elements of shared memory: two tiles of keys and two of values, at most 64 rows of 64 elements or
// 32 rows of 128 each.
static constexpr u32 SHARED = 4 * 64 * (64 + GAP);

// Copies rows `base` to `base + ROWS` of the cache of a head, `pitch` elements apart, to shared memory; rows from
// `end` on are zero. `wide`: the cache is aligned to 16 bytes.
template <u32 DIM, u32 ROWS>
INLINE void copy_tile(u16* to, const u16* cache, u32 pitch, u32 base, u32 end, bool wide) {
    for (u32 i = threadIdx.x; i < ROWS * DIM / 8; i += THREADS) {
        const u32 row = i / (DIM / 8), column = i % (DIM / 8) * 8;
        u16* out = to + row * (DIM + GAP) + column;
        const u16* from = cache + (u64)(base + row) * pitch + column;
        if (base + row >= end) *(uint4*)out = make_uint4(0, 0, 0, 0);
        else if (wide) start_copy(out, from);
        else for (u32 e = 0; e < 8; ++e) out[e] = from[e];
    }
}

// One head and QUERIES rows, in tiles of `ROWS` positions.
template <class T, u32 DIM, u32 ROWS>
INLINE void attend(const AttentionParams& p, const void* queries, const void* keys, const void* values,
                   const void* position, void* output, const void* limits, u16* shared) {
    static_assert(4 * ROWS * (DIM + GAP) <= SHARED, "the tiles fit");
    constexpr u32 TILE = ROWS * (DIM + GAP);
    u16 *key_tiles = shared, *value_tiles = shared + 2 * TILE;
    const u32 head = blockIdx.y, block_row = (gridDim.x - 1 - blockIdx.x) * QUERIES;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, t = lane % 4;
    const CacheLayout& l = p.layout;
    const u32 kv = head / (p.heads / p.kv_heads), pitch = l.position * DIM, room = room_of(p, limits, 0);
    const u16* k = (const u16*)keys + head_at(l, l.keys, 0, kv, DIM);
    const u16* v = (const u16*)values_in(l, keys, values) + head_at(l, l.values, 0, kv, DIM);
    const bool wide = (address(k) | address(v)) % 16 == 0;
    // 2^x in place of e^x. The host takes another kernel for a scale that is not positive.
    const float scale = p.scale * 1.44269504088896340736f;

    // A lane holds parts of two rows of each fragment.
    u32 rows[FRAGMENTS][2], len[FRAGMENTS][2];
#pragma unroll
    for (u32 f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            rows[f][h] = block_row + warp * WARP_QUERIES + f * 16 + h * 8 + lane / 4;
            const u32 at = rows[f][h] < p.m ? position_of(position, rows[f][h], room) : room;
            len[f][h] = at == room ? 0 : at + 1;
        }
    }
    // The positions that the first rows of the block and of this warp see, and the most that a row of
    // them sees: positions grow with the row, and rows behind the cache's end see none.
    const i32 first = *(const i32*)position;
    const u32 warp_row = block_row + warp * WARP_QUERIES;
    auto most = [&](u32 row, u32 count) {
        if (first < 0 || row >= p.m || (u64)first + row >= room) return 0u;
        return (u32)smaller((u64)first + smaller(row + count, p.m), (u64)room);
    };
    const u32 longest = most(block_row, QUERIES), last = most(warp_row, WARP_QUERIES);
    // Tiles up to here need no mask: every row of the warp sees all of it.
    const bool full = first >= 0 && (u64)first + warp_row + WARP_QUERIES <= room && warp_row + WARP_QUERIES <= p.m;
    const u32 unmasked = full ? (u32)first + warp_row + 1 : 0;

    u32 query[FRAGMENTS][DIM / 16][4];
#pragma unroll
    for (u32 f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
        for (u32 d = 0; d < DIM / 16; ++d) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const u32 row = rows[f][i % 2], column = d * 16 + i / 2 * 8 + 2 * t;
                const u16* from = (const u16*)queries + (u64)row * p.ldq + (u64)head * DIM + column;
                query[f][d][i] = row < p.m ? (u32)from[0] | ((u32)from[1] << 16) : 0;
            }
        }
    }

    float sum[FRAGMENTS][DIM / 8][4], top[FRAGMENTS][2], total[FRAGMENTS][2];
#pragma unroll
    for (u32 f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
        for (u32 n = 0; n < DIM / 8; ++n) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) sum[f][n][i] = 0.0f;
        }
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            top[f][h] = -infinity();
            total[f][h] = 0.0f;
        }
    }

    if (longest > 0) {
        copy_tile<DIM, ROWS>(key_tiles, k, pitch, 0, longest, wide);
        copy_tile<DIM, ROWS>(value_tiles, v, pitch, 0, longest, wide);
    }
    end_group();
    u32 turn = 0;
    for (u32 base = 0; base < longest; base += ROWS, turn ^= 1) {
        if (longest - base > ROWS) {
            copy_tile<DIM, ROWS>(key_tiles + (turn ^ 1) * TILE, k, pitch, base + ROWS, longest, wide);
            copy_tile<DIM, ROWS>(value_tiles + (turn ^ 1) * TILE, v, pitch, base + ROWS, longest, wide);
        }
        end_group();
        wait_for_groups<1>();
        __syncthreads();
        if (base < last) {
            const u16 *key = key_tiles + turn * TILE, *value = value_tiles + turn * TILE;
            float score[FRAGMENTS][ROWS / 8][4];
#pragma unroll
            for (u32 f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
                for (u32 n = 0; n < ROWS / 8; ++n) {
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) score[f][n][i] = 0.0f;
                }
            }
#pragma unroll
            for (u32 d = 0; d < DIM / 16; d += 2) {
                // Two steps of the product at once, where there are two.
                const u32 column = smaller(d * 16 + lane / 8 * 8, DIM - 8);
#pragma unroll
                for (u32 n = 0; n < ROWS / 8; ++n) {
                    u32 b[4];
                    matrices(b, key + (n * 8 + lane % 8) * (DIM + GAP) + column);
#pragma unroll
                    for (u32 f = 0; f < FRAGMENTS; ++f) {
                        multiply(T(), score[f][n], query[f][d], b[0], b[1]);
                        if (d + 1 < DIM / 16) multiply(T(), score[f][n], query[f][d + 1], b[2], b[3]);
                    }
                }
            }
            if (base + ROWS > unmasked) {
#pragma unroll
                for (u32 f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
                    for (u32 n = 0; n < ROWS / 8; ++n) {
#pragma unroll
                        for (u32 i = 0; i < 4; ++i) {
                            if (base + n * 8 + 2 * t + i % 2 >= len[f][i / 2]) score[f][n][i] = -infinity();
                        }
                    }
                }
            }
            u32 weight[FRAGMENTS][ROWS / 8][2];
#pragma unroll
            for (u32 f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
                for (u32 h = 0; h < 2; ++h) {
                    float max = -infinity();
#pragma unroll
                    for (u32 n = 0; n < ROWS / 8; ++n) max = fmaxf(max, fmaxf(score[f][n][2 * h], score[f][n][2 * h + 1]));
                    max = fmaxf(top[f][h], row_max(max) * scale);
                    // While all scores so far are -infinity, the weights must be zero.
                    const float from = max == -infinity() ? 0.0f : max;
                    const float factor = power_of_two(top[f][h] - from);
                    top[f][h] = max;
                    total[f][h] *= factor;
#pragma unroll
                    for (u32 n = 0; n < ROWS / 8; ++n) {
                        const float a = power_of_two(fmaf(score[f][n][2 * h], scale, -from));
                        const float b = power_of_two(fmaf(score[f][n][2 * h + 1], scale, -from));
                        total[f][h] += a + b;
                        weight[f][n][h] = narrowed(T(), a, b);
                    }
#pragma unroll
                    for (u32 n = 0; n < DIM / 8; ++n) {
                        sum[f][n][2 * h] *= factor;
                        sum[f][n][2 * h + 1] *= factor;
                    }
                }
            }
#pragma unroll
            for (u32 j = 0; j < ROWS / 16; ++j) {
#pragma unroll
                for (u32 n = 0; n < DIM / 8; n += 2) {
                    u32 b[4];
                    transposed(b, value + (j * 16 + lane % 16) * (DIM + GAP) + n * 8 + lane / 16 * 8);
#pragma unroll
                    for (u32 f = 0; f < FRAGMENTS; ++f) {
                        const u32 a[4] = {weight[f][2 * j][0], weight[f][2 * j][1], weight[f][2 * j + 1][0],
                                          weight[f][2 * j + 1][1]};
                        multiply(T(), sum[f][n], a, b[0], b[1]);
                        multiply(T(), sum[f][n + 1], a, b[2], b[3]);
                    }
                }
            }
        }
        __syncthreads();
    }

#pragma unroll
    for (u32 f = 0; f < FRAGMENTS; ++f) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const float factor = 1.0f / row_sum(total[f][h]);
            if (rows[f][h] >= p.m) continue;
            typename T::raw* to = (typename T::raw*)output + (u64)rows[f][h] * p.ldo + (u64)head * DIM + 2 * t;
#pragma unroll
            for (u32 n = 0; n < DIM / 8; ++n) {
                to[n * 8] = T::narrow(sum[f][n][2 * h] * factor);
                to[n * 8 + 1] = T::narrow(sum[f][n][2 * h + 1] * factor);
            }
        }
    }
}

template <class T>
INLINE void attend_heads(const AttentionParams& p, const void* queries, const void* keys, const void* values,
                         const void* position, void* output, const void* limits, u16* shared) {
    switch (p.head_dim) {
        case 64: return attend<T, 64, 64>(p, queries, keys, values, position, output, limits, shared);
        case 80: return attend<T, 80, 32>(p, queries, keys, values, position, output, limits, shared);
        case 96: return attend<T, 96, 32>(p, queries, keys, values, position, output, limits, shared);
        default: return attend<T, 128, 32>(p, queries, keys, values, position, output, limits, shared);
    }
}

KERNEL(128) attention_tiles(const void* queries, const void* keys, const void* values, const void* position,
                            void* output, const void* limits, AttentionParams p) {
    begin();
    __shared__ __align__(16) u16 shared[SHARED];
    if (p.x == 1) attend_heads<Bf16>(p, queries, keys, values, position, output, limits, shared);
    else attend_heads<F16>(p, queries, keys, values, position, output, limits, shared);
}
