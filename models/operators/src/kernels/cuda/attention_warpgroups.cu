// Causal grouped-query attention of many rows on the tensor cores of Hopper devices: the same function as
// `attention`, for queries and caches of one of the types bf16 and f16, and heads of 64 or 128 elements.
//
// A block computes one head. Its first warpgroup, of four warps, copies the queries, and tiles of keys
// and values, to shared memory. Each of the others computes GROUP_QUERIES rows. Flags in shared memory
// say which tiles are full, and which are free again.
//
// The products (`wgmma`) run while the warps go on. A turn starts the products of the queries with the
// next tile of keys, then those of the weights with the present tile of values. While the latter run,
// the warps make the next weights by the online softmax. The warpgroups start their products in turns,
// so that the products of one run beside the softmax of another. The blocks with the most positions,
// of all heads, run first: the last ones to start are short.
//
// A position that no row of a block sees is never multiplied. A position that a later row of the
// block sees has weight 0 for the earlier rows, so a NaN among its values reaches them too.
// Tiles begin at multiples of ROWS, so the bits of a row do not depend on its place in a block.

static constexpr u32 GROUP = 4 * WARP;
// Rows of queries of a warpgroup.
static constexpr u32 GROUP_QUERIES = 64;
// Positions of a tile.
static constexpr u32 ROWS = 128;
// Elements of a row of a plane.
static constexpr u32 PLANE = 64;
// Tiles of keys, and of values, in shared memory.
static constexpr u32 STAGES = 2;

// A tile in shared memory is planes of PLANE columns. Units of 16 bytes are permuted within a row, as
// `wgmma` reads them without conflicts of banks ("128-byte swizzle"). Returns an element's place in a
// tile of `rows` rows.
INLINE u32 place(u32 rows, u32 row, u32 column) {
    return (column / PLANE * rows + row) * PLANE + ((column / 8 ^ row) % 8) * 8 + column % 8;
}

#ifndef LEASEHOLD_EMULATED
#define FOUR(v, i) "+f"(v[i][0]), "+f"(v[i][1]), "+f"(v[i][2]), "+f"(v[i][3])
#define SIXTEEN(v, i) FOUR(v, i), FOUR(v, i + 1), FOUR(v, i + 2), FOUR(v, i + 3)
#define NAMES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Starts `sum = q k (+ sum)`, of 64 by 16 and 16 by 128 elements, both in shared memory with a row's
// columns together.
#define START_SCORES(TYPE) \
    asm volatile("{.reg .pred add; setp.ne.b32 add, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE \
                 " {" NAMES_64 "}, %64, %65, add, 1, 1, 0, 0;}" \
                 : SIXTEEN(sum, 0), SIXTEEN(sum, 4), SIXTEEN(sum, 8), SIXTEEN(sum, 12) \
                 : "l"(q), "l"(k), "r"(add))
INLINE void start_scores(Bf16, float (&sum)[16][4], u64 q, u64 k, u32 add) { START_SCORES("bf16"); }
INLINE void start_scores(F16, float (&sum)[16][4], u64 q, u64 k, u32 add) { START_SCORES("f16"); }

// Starts `sum += a v`, of 64 by 16 elements in registers, and 16 by 64 or by 128 in shared memory with
// a row's columns together.
#define START_VALUES_64(TYPE) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" NAMES_32 \
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;" \
                 : SIXTEEN(sum, 0), SIXTEEN(sum, 4) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(v))
#define START_VALUES_128(TYPE) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" NAMES_64 \
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;" \
                 : SIXTEEN(sum, 0), SIXTEEN(sum, 4), SIXTEEN(sum, 8), SIXTEEN(sum, 12) \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(v))
INLINE void start_values(Bf16, float (&sum)[8][4], const u32 (&a)[4], u64 v) { START_VALUES_64("bf16"); }
INLINE void start_values(F16, float (&sum)[8][4], const u32 (&a)[4], u64 v) { START_VALUES_64("f16"); }
INLINE void start_values(Bf16, float (&sum)[16][4], const u32 (&a)[4], u64 v) { START_VALUES_128("bf16"); }
INLINE void start_values(F16, float (&sum)[16][4], const u32 (&a)[4], u64 v) { START_VALUES_128("f16"); }

// The description of a matrix in shared memory: `lead` bytes between its planes, 1,024 between groups of
// eight rows, 128-byte swizzle.
INLINE u64 description(const u16* matrix, u32 lead) {
    const u64 at = (u64)__cvta_generic_to_shared(matrix);
    return (at & 0x3ffff) >> 4 | (u64)(lead >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// Keeps registers where they are around asynchronous products.
template <int N> INLINE void pin(float (&v)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(v[n][i])::"memory");
    }
}

// Orders the products that follow behind what was written to registers.
INLINE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `N` groups of products run.
template <int N> INLINE void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Starts the products of a warpgroup's queries with a tile of keys.
template <class T, u32 DIM, u32 QUERIES> INLINE void scores(float (&score)[ROWS / 8][4], const u16* queries, const u16* keys) {
    pin(score);
    begin_products();
#pragma unroll
    for (u32 d = 0; d < DIM; d += 16) {
        const u16 *q = queries + d / PLANE * QUERIES * PLANE + d % PLANE, *k = keys + d / PLANE * ROWS * PLANE + d % PLANE;
        start_scores(T(), score, description(q, 16), description(k, 16), d > 0);
    }
    end_products();
}

// Starts the products of weights with a tile of values.
template <class T, u32 DIM>
INLINE void add_values(float (&sum)[DIM / 8][4], const u32 (&weight)[ROWS / 8][2], const u16* values) {
    pin(sum);
    begin_products();
#pragma unroll
    for (u32 j = 0; j < ROWS / 16; ++j) {
        const u32 a[4] = {weight[2 * j][0], weight[2 * j][1], weight[2 * j + 1][0], weight[2 * j + 1][1]};
        start_values(T(), sum, a, description(values + j * 16 * PLANE, ROWS * PLANE * 2));
    }
    end_products();
}

// The compiler would compute the weights behind the wait for the products. So it gets a reason to compute
// the totals in front of it: a store that never happens. With three warpgroups this was no faster.
INLINE void keep_in_front(void* place, const float (&total)[2], u32 rows) {
    asm volatile("{.reg .pred never; setp.eq.u32 never, %0, 0; @never st.volatile.shared.f32 [%1], %2; "
                 "@never st.volatile.shared.f32 [%1], %3;}" ::"r"(rows),
                 "r"((u32)__cvta_generic_to_shared(place)), "f"(total[0]), "f"(total[1])
                 : "memory");
}
// Lets warpgroup `group` start its products, and waits until this one may.
INLINE void let_start(u32 group) { asm volatile("bar.arrive %0, 256;" ::"r"(group + 1) : "memory"); }
INLINE void wait_to_start(u32 group) { asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory"); }
// Changes the number of registers of a thread, in all warps of a warpgroup.
template <u32 COUNT> INLINE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <u32 COUNT> INLINE void leave_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
// Starts a copy of 16 bytes to shared memory, or of zeros.
INLINE void start_copy_or_zero(u16* to, const u16* from, bool copied) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(copied ? 16 : 0)
                 : "memory");
}
#else
template <int N> INLINE void pin(float (&)[N][4]) {}
template <int N> INLINE void wait_for_products() {}

template <class T, u32 DIM, u32 QUERIES> INLINE void scores(float (&score)[ROWS / 8][4], const u16* queries, const u16* keys) {
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x % GROUP / WARP;
    for (u32 n = 0; n < ROWS / 8; ++n) {
        for (u32 i = 0; i < 4; ++i) {
            const u32 row = warp * 16 + lane / 4 + i / 2 * 8, position = n * 8 + 2 * (lane % 4) + i % 2;
            score[n][i] = 0.0f;
            for (u32 d = 0; d < DIM; ++d) {
                const float q = T::widen(queries[place(QUERIES, row, d)]), k = T::widen(keys[place(ROWS, position, d)]);
                score[n][i] = fmaf(q, k, score[n][i]);
            }
        }
    }
}

template <class T, u32 DIM>
INLINE void add_values(float (&sum)[DIM / 8][4], const u32 (&weight)[ROWS / 8][2], const u16* values) {
    const u32 lane = threadIdx.x % WARP;
    for (u32 n = 0; n < ROWS / 8; ++n) {
        for (u32 h = 0; h < 2; ++h) {
            u32 words[WARP];
            emulator::exchange(weight[n][h], words);
            for (u32 k = 0; k < 8; ++k) {
                const float w = T::widen((u16)(words[lane / 4 * 4 + k / 2] >> (16 * (k % 2))));
                for (u32 d = 0; d < DIM / 8; ++d) {
                    for (u32 i = 0; i < 2; ++i) {
                        const float v = T::widen(values[place(ROWS, n * 8 + k, d * 8 + 2 * (lane % 4) + i)]);
                        sum[d][2 * h + i] = fmaf(w, v, sum[d][2 * h + i]);
                    }
                }
            }
        }
    }
}

INLINE void keep_in_front(void*, const float (&)[2], u32) {}
INLINE void let_start(u32) {}
INLINE void wait_to_start(u32) {}
template <u32 COUNT> INLINE void take_registers() {}
template <u32 COUNT> INLINE void leave_registers() {}
INLINE void start_copy_or_zero(u16* to, const u16* from, bool copied) {
    if (copied) memcpy(to, from, 16);
    else *(uint4*)to = make_uint4(0, 0, 0, 0);
}
#endif


// Copies rows `first` to `first + COUNT` of a matrix, `ld` elements apart, to a tile; rows from `end`
// on are zero. `wide`: the rows are aligned to 16 bytes. A warpgroup does this.
template <u32 DIM, u32 COUNT>
INLINE void copy_tile(u16* to, const u16* matrix, u64 ld, u32 first, u32 end, bool wide) {
    // A thread has one unit of each row, and the rows of its units have one permutation.
    constexpr u32 UNITS = DIM / 8, STEP = GROUP / UNITS;
    static_assert(STEP % 8 == 0 && COUNT % STEP == 0, "equal parts");
    const u32 thread = threadIdx.x % GROUP, row = thread / UNITS, column = thread % UNITS * 8;
    u16* out = to + place(COUNT, row, column);
    const u16* from = matrix + (first + row) * ld + column;
    if (wide && first + COUNT <= end) {
#pragma unroll
        for (u32 i = 0; i < COUNT / STEP; ++i, from += STEP * ld) start_copy(out + i * STEP * PLANE, from);
        return;
    }
#pragma unroll 1
    for (u32 i = 0; i < COUNT; i += STEP, out += STEP * PLANE, from += STEP * ld) {
        const bool there = first + row + i < end;
        if (wide) start_copy_or_zero(out, there ? from : matrix, there);
        else if (!there) *(uint4*)out = make_uint4(0, 0, 0, 0);
        else for (u32 e = 0; e < 8; ++e) out[e] = from[e];
    }
}

// The flags of a block: tiles that are full, and tiles that are free again.
struct Flags {
    u64 keys[STAGES];
    u64 values[STAGES];
    u64 free_keys[STAGES];
    u64 free_values[STAGES];
};

template <bool IS> struct Mask {
    static constexpr bool is = IS;
};

// One head and GROUPS * GROUP_QUERIES rows. A thread that copies has FEW registers, one that computes has
// MANY.
template <class T, u32 DIM, u32 GROUPS, u32 FEW, u32 MANY>
INLINE void attend(const AttentionParams& p, const void* queries, const void* keys, const void* values,
                   const void* position, void* output, const void* limits, u16* shared) {
    constexpr u32 TILE = ROWS * DIM, QUERIES = GROUPS * GROUP_QUERIES;
    u16 *query_tile = shared, *key_tiles = query_tile + QUERIES * DIM, *value_tiles = key_tiles + STAGES * TILE;
    Flags& flags = *(Flags*)(value_tiles + STAGES * TILE);
    // The blocks with the most positions, of all heads, come first.
    const u64 block = (u64)blockIdx.y * gridDim.x + blockIdx.x;
    const u32 head = (u32)(block % p.heads), block_row = (gridDim.x - 1 - (u32)(block / p.heads)) * QUERIES;
    const u32 lane = threadIdx.x % WARP, t = lane % 4;
    const u32 room = room_of(p, limits, 0);
    // The most positions that a row of the block sees: positions grow with the row.
    const i32 first = *(const i32*)position;
    u32 longest = 0;
    if (first >= 0 && (u64)first + block_row < room) {
        longest = (u32)smaller((u64)first + smaller(block_row + QUERIES, p.m), (u64)room);
    }
    const u32 tiles = (longest + ROWS - 1) / ROWS;
    if (threadIdx.x == 0) {
#pragma unroll
        for (u32 i = 0; i < STAGES; ++i) {
            make_flag(flags.keys + i, GROUP / WARP);
            make_flag(flags.values + i, GROUP / WARP);
            make_flag(flags.free_keys + i, GROUPS * GROUP / WARP);
            make_flag(flags.free_values + i, GROUPS * GROUP / WARP);
        }
        show_writes();
    }
    __syncthreads();
    if (threadIdx.x < GROUP) {
        leave_registers<FEW>();
        if (tiles == 0) return;
        const CacheLayout& l = p.layout;
        const u32 kv = head / (p.heads / p.kv_heads), pitch = l.position * DIM;
        const u16* k = (const u16*)keys + head_at(l, l.keys, 0, kv, DIM);
        const u16* v = (const u16*)values_in(l, keys, values) + head_at(l, l.values, 0, kv, DIM);
        const u16* q = (const u16*)queries + (u64)head * DIM;
        const bool wide = (address(k) | address(v)) % 16 == 0;
        const bool wide_rows = (address(q) | (u64)p.ldq * 2) % 16 == 0;
        // The copies behind `flag` are there.
        auto tell = [&](u64* flag) {
            show_writes();
            arrive(flag);
        };
        copy_tile<DIM, QUERIES>(query_tile, q, p.ldq, block_row, p.m, wide_rows);
        copy_tile<DIM, ROWS>(key_tiles, k, pitch, 0, longest, wide);
        end_group();
        u64* copied = flags.keys;
#pragma unroll 1
        for (u32 i = 1; i <= tiles; ++i) {
            const u32 at = i % STAGES, before = (i - 1) % STAGES;
            if (i < tiles) {
                wait_for(flags.free_keys + at, i / STAGES + 1);
                copy_tile<DIM, ROWS>(key_tiles + at * TILE, k, pitch, i * ROWS, longest, wide);
                end_group();
                wait_for_groups<1>();
                tell(copied);
                copied = flags.keys + at;
            }
            wait_for(flags.free_values + before, (i - 1) / STAGES + 1);
            copy_tile<DIM, ROWS>(value_tiles + before * TILE, v, pitch, (i - 1) * ROWS, longest, wide);
            end_group();
            wait_for_groups<1>();
            tell(copied);
            copied = flags.values + before;
        }
        wait_for_groups<0>();
        tell(copied);
        return;
    }
    take_registers<MANY>();
    const u32 group = threadIdx.x / GROUP - 1;
    // 2^x in place of e^x. The host takes another kernel for a scale that is not positive.
    const float scale = p.scale * 1.44269504088896340736f;

    // A lane holds parts of two rows. A row sees positions up to its own; rows behind the cache's end
    // see none.
    const u32 group_row = block_row + group * GROUP_QUERIES;
    u32 rows[2], len[2];
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        rows[h] = group_row + threadIdx.x % GROUP / WARP * 16 + h * 8 + lane / 4;
        const u32 at = rows[h] < p.m ? position_of(position, rows[h], room) : room;
        len[h] = at == room ? 0 : at + 1;
    }
    // Tiles up to here need no mask: every row of the warpgroup sees all of it.
    const bool full =
        first >= 0 && (u64)first + group_row + GROUP_QUERIES <= room && group_row + GROUP_QUERIES <= p.m;
    const u32 unmasked = full ? ((u32)first + group_row + 1) / ROWS : 0;

    float sum[DIM / 8][4], score[ROWS / 8][4], top[2] = {-infinity(), -infinity()}, total[2] = {0.0f, 0.0f}, factor[2];
    u32 weight[ROWS / 8][2];
#pragma unroll
    for (u32 n = 0; n < DIM / 8; ++n) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) sum[n][i] = 0.0f;
    }
    // The weights of the scores of tile `i`, and the factor of the sums so far.
    auto soften = [&](u32 i, auto mask) {
        if constexpr (decltype(mask)::is) {
#pragma unroll
            for (u32 n = 0; n < ROWS / 8; ++n) {
#pragma unroll
                for (u32 e = 0; e < 4; ++e) {
                    if (i * ROWS + n * 8 + 2 * t + e % 2 >= len[e / 2]) score[n][e] = -infinity();
                }
            }
        }
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            float max = -infinity();
#pragma unroll
            for (u32 n = 0; n < ROWS / 8; ++n) max = fmaxf(max, fmaxf(score[n][2 * h], score[n][2 * h + 1]));
            max = fmaxf(top[h], row_max(max) * scale);
            // While all scores so far are -infinity, the weights must be zero.
            const float from = max == -infinity() ? 0.0f : max;
            factor[h] = power_of_two(top[h] - from);
            top[h] = max;
            float added = 0.0f;
#pragma unroll
            for (u32 n = 0; n < ROWS / 8; ++n) {
                score[n][2 * h] = power_of_two(fmaf(score[n][2 * h], scale, -from));
                score[n][2 * h + 1] = power_of_two(fmaf(score[n][2 * h + 1], scale, -from));
                added += score[n][2 * h] + score[n][2 * h + 1];
            }
            total[h] = fmaf(total[h], factor[h], added);
        }
    };
    auto narrow = [&] {
#pragma unroll
        for (u32 n = 0; n < ROWS / 8; ++n) {
#pragma unroll
            for (u32 h = 0; h < 2; ++h) weight[n][h] = narrowed(T(), score[n][2 * h], score[n][2 * h + 1]);
        }
    };

    if (tiles > 0) {
        const u16* group_queries = query_tile + group * GROUP_QUERIES * PLANE;
        if (group == GROUPS - 1) let_start(0);
        wait_for(flags.keys, 0);
        scores<T, DIM, QUERIES>(score, group_queries, key_tiles);
        wait_for_products<0>();
        pin(score);
        arrive(flags.free_keys);
        soften(0, Mask<true>());
        narrow();
        auto turn = [&](u32 i, auto mask) {
            const u32 at = i % STAGES, before = (i - 1) % STAGES;
            wait_for(flags.keys + at, i / STAGES);
            wait_to_start(group);
            scores<T, DIM, QUERIES>(score, group_queries, key_tiles + at * TILE);
            wait_for(flags.values + before, (i - 1) / STAGES);
            add_values<T, DIM>(sum, weight, value_tiles + before * TILE);
            if (group < GROUPS - 1) let_start(group + 1);
            else if (i + 1 < tiles) let_start(0);
            wait_for_products<1>();
            pin(score);
            arrive(flags.free_keys + at);
            soften(i, mask);
            if (DIM > PLANE) keep_in_front(&flags, total, p.m);
            wait_for_products<0>();
            pin(sum);
            arrive(flags.free_values + before);
#pragma unroll
            for (u32 n = 0; n < DIM / 8; ++n) {
#pragma unroll
                for (u32 e = 0; e < 4; ++e) sum[n][e] *= factor[e / 2];
            }
            narrow();
        };
        u32 i = 1;
#pragma unroll 1
        for (; i < smaller(unmasked, tiles); ++i) turn(i, Mask<false>());
#pragma unroll 1
        for (; i < tiles; ++i) turn(i, Mask<true>());
        wait_for(flags.values + (tiles - 1) % STAGES, (tiles - 1) / STAGES);
        add_values<T, DIM>(sum, weight, value_tiles + (tiles - 1) % STAGES * TILE);
        wait_for_products<0>();
        pin(sum);
    }

#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        const float by = 1.0f / row_sum(total[h]);
        if (rows[h] >= p.m) continue;
        typename T::raw* to = (typename T::raw*)output + (u64)rows[h] * p.ldo + (u64)head * DIM + 2 * t;
        const bool pairs = (address(output) | (u64)p.ldo * 2) % 4 == 0;
#pragma unroll
        for (u32 n = 0; n < DIM / 8; ++n) {
            const float first = sum[n][2 * h] * by, second = sum[n][2 * h + 1] * by;
            if (pairs) {
                *(u32*)(to + n * 8) = narrowed(T(), first, second);
                continue;
            }
            to[n * 8] = T::narrow(first);
            to[n * 8 + 1] = T::narrow(second);
        }
    }
}

// The bytes of shared memory of a block come from the host: more than a source may declare.
DENSE_KERNEL(384, 1) attention_warpgroups(const void* queries, const void* keys, const void* values, const void* position,
                                          void* output, const void* limits, AttentionParams p) {
    begin();
    extern __shared__ __align__(1024) u16 shared[];
    if (p.x == 1) attend<Bf16, 128, 2, 40, 232>(p, queries, keys, values, position, output, limits, shared);
    else attend<F16, 128, 2, 40, 232>(p, queries, keys, values, position, output, limits, shared);
}

DENSE_KERNEL(512, 1) attention_warpgroups_64(const void* queries, const void* keys, const void* values, const void* position,
                                             void* output, const void* limits, AttentionParams p) {
    begin();
    extern __shared__ __align__(1024) u16 shared[];
    if (p.x == 1) attend<Bf16, 64, 3, 32, 160>(p, queries, keys, values, position, output, limits, shared);
    else attend<F16, 64, 3, 32, 160>(p, queries, keys, values, position, output, limits, shared);
}
