// Attention for a row of each of several sequences on tensor cores: the same function as `decode_attention`, for rows
// and caches of one of the types bf16 and f16, heads of 64 or 128 elements, and several rows.
//
// A fixed number of blocks takes the parts of all contexts in turns: each makes a list of them from the positions of
// the rows. So rows of any lengths keep all processors busy, and positions that no row has cost nothing. A block
// computes a part for some heads of a group, which are rows of one fragment. Its warps take positions in turns, and
// have a softmax each for every head.
//
// Keys and values go from the caches to the fragments without shared memory. A product adds over the elements of a
// head in any order, so a lane takes eight that follow each other. Queries and weights are two numbers of the type: the
// rounded one, and what rounding leaves. The second half of a fragment has the latter, so that both cost one product.

static constexpr u32 THREADS = 128;
static constexpr u32 WARPS = THREADS / WARP;
// Query heads of a block: half of the rows of a fragment.
static constexpr u32 HEADS = 8;
// Rows of a list.
static constexpr u32 ROWS = 512;
// Elements between a rotated query and the next one that keep them in different banks.
static constexpr u32 GAP = 16;

// Positions of a part. Such a part is two of the scratch memory, so that its end costs little.
INLINE u32 positions_of(const AttentionParams& p) { return 2 * part_of(p); }

// The parts of some rows, one behind the other.
struct List {
    // The position of each row.
    u32 at[ROWS];
    // The number of parts before each row, and of all.
    u32 before[ROWS + 1];
    u32 of_warp[WARPS];
};

// The list of the rows from `first` on. A row has a part for each that its position reaches, and one without a
// position.
INLINE void make_list(const AttentionParams& p, const i32* position, u32 first, List& list) {
    constexpr u32 EACH = ROWS / THREADS;
    const u32 t = threadIdx.x, lane = t % WARP, warp = t / WARP, part = positions_of(p);
    u32 counts[EACH], count = 0;
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        const u32 row = t * EACH + i;
        const bool is_row = first + row < p.m;
        const u32 at = is_row ? position_of(position + first + row, 0, p.positions) : p.positions;
        list.at[row] = at;
        counts[i] = !is_row ? 0 : at == p.positions ? 1 : at / part + 1;
        count += counts[i];
    }
    u32 end = count;
#pragma unroll
    for (u32 step = 1; step < WARP; step *= 2) {
        const u32 below = __shfl_up_sync(ALL, end, step);
        if (lane >= step) end += below;
    }
    if (lane == WARP - 1) list.of_warp[warp] = end;
    __syncthreads();
    for (u32 w = 0; w < warp; ++w) end += list.of_warp[w];
    u32 before = end - count;
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        list.before[t * EACH + i] = before;
        before += counts[i];
    }
    if (t == THREADS - 1) list.before[ROWS] = before;
    __syncthreads();
}

// The operands of a launch.
struct Operands {
    const u8* queries;
    const u8* keys;
    const u8* values;
    const float* table;
    u8* key_cache;
    u8* value_cache;
    const i32* position;
    void* output;
    void* scratch;
    const void* limits;
};

template <u32 DIM> struct Shared {
    DecodePlace<WARPS * HEADS * DIM, WARPS * HEADS, HEADS> place;
    List list;
    // The rotated queries, rounded, and what is left of them.
    __align__(16) u16 queries[2][HEADS][DIM + GAP];
    // The new key, and the new value.
    __align__(16) u16 fresh[2][DIM];
};

// A part of a row: where the row's keys and values are, and positions from `begin` on, of which those before `old` are in
// the caches. The newest one is `at`, if that is below `end`.
template <class T> struct Range {
    typename T::raw* keys;
    typename T::raw* values;
    u32 row;
    u32 index;
    u32 at;
    u32 begin;
    u32 old;
    u32 end;
};

// What rounding leaves of each of `STEP` numbers.
template <class T> INLINE Words<T> left_of(Lane from, const Words<T>& rounded) {
    float v[STEP];
    unpack(rounded, v);
#pragma unroll
    for (int e = 0; e < STEP; ++e) from.v[e] -= v[e];
    return words_of<T>(from);
}

// Rotates the queries of the block's heads, and in the newest part the new key, which goes to the cache with the new
// value: each as many elements at a time as a lane has.
template <class T, u32 DIM>
INLINE void rotate(const AttentionParams& p, const Operands& o, const Share& share, const Range<T>& r, bool newest,
                   Shared<DIM>& shared) {
    constexpr u32 LANES = DIM / STEP;
    const u32 at = r.at;
    const u32 group = p.heads / p.kv_heads, kv = blockIdx.y, count = smaller(HEADS, group - share.own);
    const u64 size = sizeof(typename T::raw), fresh = ((u64)share.row * p.kv_heads + kv) * DIM * size;
    const u8* query = o.queries + ((u64)share.row * p.ldq + (u64)(kv * group + share.own) * DIM) * size;
    const float* angles = o.table + (u64)at * p.rotary;
    const u64 bits = address(query) | p.ldq * size | address(o.keys) | address(o.values) | address(o.table) | address(angles);
    const bool whole = p.rotary / 2 % STEP == 0 && bits % 16 == 0;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < (HEADS + 2) * LANES; i += THREADS) {
        const u32 of = i / LANES, column = i % LANES * STEP;
        const u8* row = of < count ? query + of * DIM * size : of < HEADS || !newest ? nullptr : (of == HEADS ? o.keys : o.values) + fresh;
        // A head beyond the group is zero.
        if (of >= HEADS && row == nullptr) continue;
        const u32 rotary = of == HEADS + 1 ? 0 : p.rotary;
        Lane cosine = {}, sine = {};
        if (whole && column < rotary) {
            const u32 half = p.rotary / 2, j = column < half ? column : column - half;
#pragma unroll
            for (int e = 0; e < STEP; e += 4) {
                floats_of(read_now(angles + j + e), cosine.v + e);
                floats_of(read_now(angles + half + j + e), sine.v + e);
            }
        }
        const Lane turned = rotated(p, unit_of(p, row, column, whole, rotary), column, whole, rotary, angles, cosine, sine, 1.0f);
        const Words<T> words = words_of<T>(turned);
        if (of < HEADS) {
            *(uint4*)&shared.queries[0][of][column] = words.word[0];
            *(uint4*)&shared.queries[1][of][column] = left_of<T>(turned, words).word[0];
            continue;
        }
        *(uint4*)&shared.fresh[of - HEADS][column] = words.word[0];
        if (share.block != 0) continue;
        typename T::raw* to = (of == HEADS ? r.keys : r.values) + (u64)at * p.layout.position * DIM;
        put<T>(to, column, DIM, address(to) % 16 == 0, words);
    }
}

// Positions of a step of a warp: those of a product.
static constexpr u32 COUNT = 16;

// A lane's elements of the keys of a step: of each 32 elements of a key eight, in two steps of a product.
template <u32 DIM> struct Keys {
    uint4 of[COUNT / 8][DIM / 32];
    static __device__ __forceinline__ u32 position(u32 n) { return n * 8 + threadIdx.x % WARP / 4; }
    static __device__ __forceinline__ u32 column(u32 b) { return b * 32 + threadIdx.x % 4 * 8; }
};

// Of the values: of each 64 elements of a value eight, in as many products, and of four positions.
template <u32 DIM> struct Values {
    uint4 of[4][DIM / 64];
    static __device__ __forceinline__ u32 position(u32 n) { return n / 2 * 8 + threadIdx.x % 4 * 2 + n % 2; }
    static __device__ __forceinline__ u32 column(u32 c) { return c * 64 + threadIdx.x % WARP / 4 * 8; }
};

// Calls `f(to, position, column)` for each of a lane's elements.
template <class Of, u32 COUNTED, u32 WIDTH, class F> INLINE void each(uint4 (&to)[COUNTED][WIDTH], F f) {
#pragma unroll
    for (u32 n = 0; n < COUNTED; ++n) {
#pragma unroll
        for (u32 c = 0; c < WIDTH; ++c) f(to[n][c], Of::position(n), Of::column(c));
    }
}

// Of a cache that is not aligned to 16 bytes.
template <class T, u32 DIM, class Of>
static __device__ __noinline__ Of read_single(const typename T::raw* from, u32 pitch, u32 base, u32 end) {
    Of to;
    each<Of>(to.of, [&](uint4& to, u32 position, u32 column) {
        to = make_uint4(0, 0, 0, 0);
        if (base + position < end) to = single_words_of<T>(from + (u64)(base + position) * pitch, column, DIM).word[0];
    });
    return to;
}

// Reads the positions from `base` on, but those from `end` on are zero.
template <class T, u32 DIM, class Of> INLINE void read(Of& to, const typename T::raw* from, u32 pitch, u32 base, u32 end) {
    if (address(from) % 16 != 0) {
        to = read_single<T, DIM, Of>(from, pitch, base, end);
        return;
    }
    each<Of>(to.of, [&](uint4& to, u32 position, u32 column) {
        to = make_uint4(0, 0, 0, 0);
        if (base + position < end) to = read_now(from + (u64)(base + position) * pitch + column);
    });
}

// Part `i` of the list of the rows from `first` on. A row outside its memory has no positions.
template <class T> INLINE Range<T> range_of(const AttentionParams& p, const Operands& o, const List& list, u32 first, u32 i) {
    typedef typename T::raw raw;
    const CacheLayout& l = p.layout;
    Range<T> r;
    u32 row = 0;
#pragma unroll 1
    for (u32 step = ROWS / 2; step > 0; step /= 2) {
        if (list.before[row + step] <= i) row += step;
    }
    r.row = first + row;
    r.index = i - list.before[row];
    r.at = list.at[row];
    r.keys = (raw*)o.key_cache + head_at(l, l.keys, r.row, blockIdx.y, p.head_dim);
    r.values = (raw*)values_in(l, o.key_cache, o.value_cache) + head_at(l, l.values, r.row, blockIdx.y, p.head_dim);
    r.begin = r.index * positions_of(p);
    r.end = smaller(r.at + 1, r.begin + positions_of(p));
    const bool there = r.at != p.positions && (l.limits == 0 || memory_of(p, o.limits, r.row).has(end_of(p, r.at)));
    r.old = there ? smaller(r.at, r.end) : 0;
    return r;
}

// Attends to a part. The warp's first step is read, and in the end that of the next part is.
template <class T, u32 DIM>
INLINE void attend(const AttentionParams& p, const Range<T>& r, const Range<T>& next, Keys<DIM>& keys, Values<DIM>& values,
                   Shared<DIM>& shared) {
    constexpr u32 TILES = COUNT / 8;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const u32 pitch = p.layout.position * DIM;
    // 2^x in place of e^x.
    const float scale = p.scale * 1.44269504088896340736f;
    float sum[DIM / 64][8][4], top = -infinity(), total = 0.0f;
#pragma unroll
    for (u32 c = 0; c < DIM / 64; ++c) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) sum[c][i][0] = sum[c][i][1] = sum[c][i][2] = sum[c][i][3] = 0.0f;
    }
    u32 base = r.begin + warp * COUNT;
    bool more;
#pragma unroll 1
    do {
        if (r.at < r.end && r.at - base < COUNT) {
            auto of = [&](const u16* fresh) {
                return [=](uint4& to, u32 position, u32 column) {
                    if (base + position == r.at) to = *(const uint4*)(fresh + column);
                };
            };
            each<Keys<DIM>>(keys.of, of(shared.fresh[0]));
            each<Values<DIM>>(values.of, of(shared.fresh[1]));
        }
        // What is read when its place is free: the next step of this part or the first one of the next.
        const u32 now = base;
        base += WARPS * COUNT;
        more = base < r.end;
        const u32 begin = more ? base : next.begin + warp * COUNT, old = more ? r.old : next.old;
        float score[TILES][4];
#pragma unroll
        for (u32 n = 0; n < TILES; ++n) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.0f;
#pragma unroll
        for (u32 b = 0; b < DIM / 32; ++b) {
            const uint4 q = *(const uint4*)&shared.queries[0][g][b * 32 + t * 8], left = *(const uint4*)&shared.queries[1][g][b * 32 + t * 8];
            const u32 first[4] = {q.x, left.x, q.y, left.y}, second[4] = {q.z, left.z, q.w, left.w};
#pragma unroll
            for (u32 n = 0; n < TILES; ++n) {
                multiply(T(), score[n], first, keys.of[n][b].x, keys.of[n][b].y);
                multiply(T(), score[n], second, keys.of[n][b].z, keys.of[n][b].w);
            }
        }
        read<T, DIM>(keys, more ? r.keys : next.keys, pitch, begin, old);
        float max = top;
#pragma unroll
        for (u32 n = 0; n < TILES; ++n) {
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                score[n][i] = now + n * 8 + 2 * t + i < r.end ? (score[n][i] + score[n][2 + i]) * scale : -infinity();
                max = fmaxf(max, score[n][i]);
            }
        }
        max = row_max(max);
        // While all scores so far are -infinity, the weights must be zero.
        const float from = max == -infinity() ? 0.0f : max, factor = power_of_two(top - from);
        top = max;
        total *= factor;
#pragma unroll
        for (u32 c = 0; c < DIM / 64; ++c) {
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
#pragma unroll
                for (u32 e = 0; e < 4; ++e) sum[c][i][e] *= factor;
            }
        }
        u32 weight[TILES][2];
#pragma unroll
        for (u32 n = 0; n < TILES; ++n) {
            const float a = power_of_two(score[n][0] - from), b = power_of_two(score[n][1] - from);
            total += a + b;
            weight[n][0] = narrowed(T(), a, b);
            float v[2];
            T::unpack(weight[n][0], v);
            weight[n][1] = narrowed(T(), a - v[0], b - v[1]);
        }
        const u32 a[4] = {weight[0][0], weight[0][1], weight[1][0], weight[1][1]};
#pragma unroll
        for (u32 c = 0; c < DIM / 64; ++c) {
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                const u32 pick = i % 2 == 0 ? 0x5410 : 0x7632;
                auto word = [&](u32 n) {
                    const uint4& v = values.of[n][c];
                    return i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
                };
                multiply(T(), sum[c][i], a, __byte_perm(word(0), word(1), pick), __byte_perm(word(2), word(3), pick));
            }
        }
        read<T, DIM>(values, more ? r.values : next.values, pitch, begin, old);
    } while (more);
    // Both halves of a fragment are one head.
    total = row_sum(total);
    float* sums = shared.place.sums + (g * WARPS + warp) * DIM;
#pragma unroll
    for (u32 c = 0; c < DIM / 64; ++c) {
#pragma unroll
        for (u32 side = 0; side < 2; ++side) {
#pragma unroll
            for (u32 i = 0; i < 8; i += 4) {
                auto of = [&](u32 e) { return sum[c][i + e][side] + sum[c][i + e][2 + side]; };
                *(float4*)(sums + c * 64 + t * 16 + side * 8 + i) = make_float4(of(0), of(1), of(2), of(3));
            }
        }
    }
    if (t == 0) {
        shared.place.tops[g * WARPS + warp] = top;
        shared.place.totals[g * WARPS + warp] = total;
    }
}

// The blocks of some heads take equal shares of the list, each of parts that follow each other. So queries are rotated
// once for most of a row's parts.
template <class T, u32 DIM> INLINE void decode(const AttentionParams& p, const Operands& o, Shared<DIM>& shared) {
    const u32 group = p.heads / p.kv_heads, blocks = (group + HEADS - 1) / HEADS;
    const u32 chunk = blockIdx.z / blocks, first = chunk * ROWS, pitch = p.layout.position * DIM, warp = threadIdx.x / WARP;
    Share share;
    share.row = 0;
    share.heads = HEADS;
    share.block = blockIdx.z - chunk * blocks;
    share.own = share.block * HEADS;
    // The scratch memory is that of blocks of half as many heads.
    share.blocks = (group + HEADS / 2 - 1) / (HEADS / 2);
    const Split split = split_of(p, share, o.scratch);
    const u64 of_row = (u64)p.heads * split.parts * (DIM + 2) + (u64)p.kv_heads * share.blocks;
    wait_for_previous();
    make_list(p, o.position, first, shared.list);
    const u64 all = shared.list.before[ROWS];
    const u32 begin = (u32)(all * blockIdx.x / gridDim.x), end = (u32)(all * (blockIdx.x + 1) / gridDim.x);
    if (begin == end) return;
    Range<T> next = range_of<T>(p, o, shared.list, first, begin);
    Keys<DIM> keys;
    Values<DIM> values;
    read<T, DIM>(keys, next.keys, pitch, next.begin + warp * COUNT, next.old);
    read<T, DIM>(values, next.values, pitch, next.begin + warp * COUNT, next.old);
    u32 rotated_row = ~0u;
#pragma unroll 1
    for (u32 i = begin; i < end; ++i) {
        const Range<T> r = next;
        share.row = r.row;
        next.old = 0;
        if (i + 1 < end) next = range_of<T>(p, o, shared.list, first, i + 1);
        const bool newest = r.at < r.end;
        if (outside(p, share, memory_of(p, o.limits, r.row), r.at, r.index, o.output)) {
            read<T, DIM>(keys, next.keys, pitch, next.begin + warp * COUNT, next.old);
            read<T, DIM>(values, next.values, pitch, next.begin + warp * COUNT, next.old);
            continue;
        }
        if (threadIdx.x == 0) {
            shared.place.split = split;
            shared.place.split.row = r.row;
            shared.place.split.at = r.at;
            shared.place.split.counter += r.row * of_row;
            shared.place.split.partial += r.row * of_row;
        }
        if (r.row != rotated_row || newest) rotate(p, o, share, r, newest, shared);
        rotated_row = r.row;
        __syncthreads();
        attend(p, r, next, keys, values, shared);
        __syncthreads();
        finish<THREADS>(p, shared.place, WARPS, DIM == 64 ? 6 : 7, positions_of(p), o.output, r.index);
        // The next part takes the same place.
        __syncthreads();
    }
}

template <u32 DIM> INLINE void decode_heads(const AttentionParams& p, const Operands& o) {
    let_next_start();
    __shared__ Shared<DIM> shared;
    if (p.x == BF16) decode<Bf16>(p, o, shared);
    else decode<F16>(p, o, shared);
}

DENSE_KERNEL(128, 4) decode_attention_64(const void* queries, const void* keys, const void* values, const void* table, void* key_cache,
                                void* value_cache, const void* position, void* output, void* scratch, const void* limits,
                                AttentionParams p) {
    decode_heads<64>(p, {(const u8*)queries, (const u8*)keys, (const u8*)values, (const float*)table, (u8*)key_cache,
                         (u8*)value_cache, (const i32*)position, output, scratch, limits});
}

DENSE_KERNEL(128, 3) decode_attention_128(const void* queries, const void* keys, const void* values, const void* table, void* key_cache,
                                 void* value_cache, const void* position, void* output, void* scratch, const void* limits,
                                 AttentionParams p) {
    decode_heads<128>(p, {(const u8*)queries, (const u8*)keys, (const u8*)values, (const float*)table, (u8*)key_cache,
                          (u8*)value_cache, (const i32*)position, output, scratch, limits});
}
