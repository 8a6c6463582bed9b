// Sampling kernels, from logits to the next token: softmax, argmax, sampling, and the step that
// closes the loop on the device.
//
// The draw follows the CPU kernel: Philox4x32-10 with the seed as key and the position as counter,
// the same exponentials, candidates in the order of ids, sums in f64. Only the order of the f64
// sums differs. So a token differs from the CPU's only if the random number lies within rounding
// (one part in 10^13) of the border between two candidates.

static constexpr u32 NONE = 0xffffffffu;
static constexpr u32 MAX_WARPS = 32;

// The largest element without NaN, and its first index; (-infinity, NONE) if no element is left.
// NONE is the id -1.
struct Best {
    float value;
    u32 index;
};

INLINE Best better(Best a, Best b) { return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a; }

// All threads of the block take part and get the same result.
INLINE Best block_best(u32 dtype, const void* x, u64 row, u32 n) {
    __shared__ float values[MAX_WARPS];
    __shared__ u32 indices[MAX_WARPS];
    Best best = {-infinity(), NONE};
    // Several reads are under way at a time.
    constexpr u32 BATCH = 4;
    const u32 whole = address(x) % 16 == 0 && row % 4 == 0 ? n / 4 : 0;
    for (u32 i = threadIdx.x; i < whole; i += BATCH * blockDim.x) {
        float v[BATCH][4];
#pragma unroll
        for (u32 b = 0; b < BATCH; ++b) {
            if (i + b * blockDim.x < whole) load(dtype, x, row + 4 * (i + b * blockDim.x), v[b]);
        }
#pragma unroll
        for (u32 b = 0; b < BATCH; ++b) {
            if (i + b * blockDim.x >= whole) continue;
#pragma unroll
            for (u32 e = 0; e < 4; ++e) {
                // A NaN is neither larger nor equal.
                const Best one = {v[b][e], 4 * (i + b * blockDim.x) + e};
                best = better(best, one);
            }
        }
    }
    for (u32 i = 4 * whole + threadIdx.x; i < n; i += blockDim.x) {
        const Best one = {load_one(dtype, x, row + i), i};
        best = better(best, one);
    }
    for (int step = 16; step > 0; step /= 2) {
        const Best other = {__shfl_xor_sync(ALL, best.value, step), __shfl_xor_sync(ALL, best.index, step)};
        best = better(best, other);
    }
    const u32 warp = threadIdx.x / WARP;
    if (threadIdx.x % WARP == 0) {
        values[warp] = best.value;
        indices[warp] = best.index;
    }
    __syncthreads();
    for (u32 w = 0; w < blockDim.x / WARP; ++w) {
        const Best other = {values[w], indices[w]};
        best = better(best, other);
    }
    __syncthreads();
    return best;
}

KERNEL(256) softmax(const void* x, void* y, RowParams p) {
    begin();
    __shared__ float scratch[MAX_WARPS];
    const u64 from = (u64)blockIdx.x * p.ldx, to = (u64)blockIdx.x * p.ldy;
    float max = -infinity();
    for (u32 i = threadIdx.x; i < p.n; i += blockDim.x) max = fmaxf(max, load_one(p.x, x, from + i));
    max = block_max(max, scratch);
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < p.n; i += blockDim.x) sum += exponential(load_one(p.x, x, from + i) - max);
    const float factor = 1.0f / block_sum(sum, scratch);
    for (u32 i = threadIdx.x; i < p.n; i += blockDim.x) {
        store_one(p.y, y, to + i, exponential(load_one(p.x, x, from + i) - max) * factor);
    }
}

KERNEL(256) argmax(const void* x, void* ids, RowParams p) {
    begin();
    const Best best = block_best(p.x, x, (u64)blockIdx.x * p.ldx, p.n);
    if (threadIdx.x == 0) ((i32*)ids)[blockIdx.x] = (i32)best.index;
}

// The first of four words of Philox4x32-10.
INLINE u32 philox(u32 k0, u32 k1, u64 counter) {
    u32 c0 = (u32)counter, c1 = (u32)(counter >> 32), c2 = 0, c3 = 0;
    for (int round = 0; round < 10; ++round) {
        const u64 p0 = (u64)c0 * 0xD2511F53u, p1 = (u64)c2 * 0xCD9E8D57u;
        c0 = (u32)(p1 >> 32) ^ c1 ^ k0;
        c1 = (u32)p1;
        c2 = (u32)(p0 >> 32) ^ c3 ^ k1;
        c3 = (u32)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}

// The float as an unsigned integer with the same order; both zeros have one key.
INLINE u32 key_of(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

INLINE float float_of(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// The candidates: all elements above `least`, and the first `ties` of the elements equal to it.
struct Cut {
    float least;
    u32 ties;
};

// The `k`-th largest of `n` logits, and the number of logits equal to it among the `k` largest. The
// search takes four bits of the key at a time, the highest first. A thread counts sixteen digits in
// four words of four counters; it sees fewer than 2^16 logits.
INLINE Cut threshold(const float* x, u32 n, u32 k) {
    __shared__ u32 counts[MAX_WARPS][16];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    u32 prefix = 0, need = k;
    for (int shift = 28; shift >= 0; shift -= 4) {
        const u32 known = shift == 28 ? 0 : ~0u << (shift + 4);
        u64 packed[4] = {0, 0, 0, 0};
        for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
            const float v = x[i];
            const u32 key = key_of(v);
            if (v == v && (key & known) == prefix) {
                const u32 digit = (key >> shift) & 15u;
                const u64 one = 1ull << (16 * (digit & 3u));
#pragma unroll
                for (u32 w = 0; w < 4; ++w) packed[w] += digit >> 2 == w ? one : 0ull;
            }
        }
#pragma unroll
        for (u32 d = 0; d < 16; ++d) {
            const u32 sum = warp_sum((u32)(packed[d / 4] >> (16 * (d % 4))) & 0xffffu);
            if (lane == 0) counts[warp][d] = sum;
        }
        __syncthreads();
        u32 digit = 16, above = 0, here = 0;
        while (digit > 0 && above + here < need) {
            above += here;
            --digit;
            here = 0;
            for (u32 w = 0; w < warps; ++w) here += counts[w][digit];
        }
        __syncthreads();
        if (above + here < need) {
            // Fewer numbers than `k` exist: all are candidates.
            const Cut all = {-infinity(), n};
            return all;
        }
        need -= above;
        prefix |= digit << shift;
    }
    const Cut cut = {float_of(prefix), need};
    return cut;
}

// True if a lane's logit is a candidate. All lanes of the warp take part; `seen` counts the ties
// before them.
INLINE bool candidate(Cut cut, float v, u32& seen) {
    const u32 lane = threadIdx.x % WARP;
    const u32 tied = __ballot_sync(ALL, v == cut.least);
    const u32 rank = seen + (u32)__popc(tied & ((1u << lane) - 1u));
    seen += (u32)__popc(tied);
    return v > cut.least || (v == cut.least && rank < cut.ties);
}

// Draws a token and returns it to every thread. Each warp processes a part of the logits, in the
// order of ids.
INLINE u32 draw(const SampleParams& p, const float* x, i32 position) {
    __shared__ double sums[MAX_WARPS];
    __shared__ u32 ties[MAX_WARPS];
    __shared__ u32 chosen;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const Best best = block_best(0, x, 0, p.n);
    if (p.temperature == 0.0f || !(best.value < infinity() && best.value > -infinity())) return best.index;
    const Cut everything = {-infinity(), p.n};
    const Cut cut = p.top_k != 0 && p.top_k < p.n ? threshold(x, p.n, p.top_k) : everything;
    const float inverse = 1.0f / p.temperature;
    const u32 part = ((p.n - 1) / (warps * WARP) + 1) * WARP;
    const u64 begin = (u64)warp * part;
    const u32 first = (u32)smaller(begin, (u64)p.n), last = (u32)smaller(begin + part, (u64)p.n);
    // The number of ties before each warp's part.
    u32 mine = 0;
    for (u32 at = first; at < last; at += WARP) {
        const float v = at + lane < last ? x[at + lane] : not_a_number();
        mine += (u32)__popc(__ballot_sync(ALL, v == cut.least));
    }
    if (lane == 0) ties[warp] = mine;
    __syncthreads();
    u32 before = 0;
    for (u32 w = 0; w < warp; ++w) before += ties[w];
    // The weight of its candidates.
    double weight = 0.0;
    u32 seen = before;
    for (u32 at = first; at < last; at += WARP) {
        const float v = at + lane < last ? x[at + lane] : not_a_number();
        if (candidate(cut, v, seen)) weight += (double)exponential((v - best.value) * inverse);
    }
    weight = warp_sum(weight);
    if (lane == 0) sums[warp] = weight;
    if (threadIdx.x == 0) chosen = best.index;
    __syncthreads();
    double total = 0.0;
    for (u32 w = 0; w < warps; ++w) total += sums[w];
    const double uniform = (double)philox(p.seed[0], p.seed[1], (u64)(long long)position) / 4294967296.0;
    const double target = uniform * total;
    double sum = 0.0;
    u32 owner = 0;
    while (owner + 1 < warps && !(sum + sums[owner] > target)) sum += sums[owner++];
    if (warp == owner) {
        seen = before;
        u32 token = NONE;
        for (u32 at = first; at < last; at += WARP) {
            const float v = at + lane < last ? x[at + lane] : not_a_number();
            const float own = candidate(cut, v, seen) ? exponential((v - best.value) * inverse) : 0.0f;
            double inclusive = own;
            for (u32 step = 1; step < WARP; step *= 2) {
                const double other = __shfl_up_sync(ALL, inclusive, step);
                if (lane >= step) inclusive += other;
            }
            const u32 heavy = __ballot_sync(ALL, own > 0.0f);
            const u32 crossed = __ballot_sync(ALL, own > 0.0f && sum + inclusive > target);
            // If no candidate crosses the border because of rounding, the last one with a weight is
            // drawn.
            if (heavy != 0) token = at + (31 - (u32)__clz((int)heavy));
            if (crossed != 0) {
                token = at + (u32)__ffs((int)crossed) - 1;
                break;
            }
            sum += __shfl_sync(ALL, inclusive, 31);
        }
        if (lane == 0 && token != NONE) chosen = token;
    }
    __syncthreads();
    return chosen;
}

// Advances the position by `step` and appends the token to the ring.
INLINE void step_on(i32* position, u32 step, i32* ring, u32 size, u32* count, i32 token) {
    *position = (i32)((u32)*position + step);
    const u32 n = *count;
    if (size != 0) ring[n % size] = token;
    *count = n + 1;
}

KERNEL(1024) sample(const void* logits, const void* position, void* token, SampleParams p) {
    begin();
    const u32 id = draw(p, (const float*)logits, *(const i32*)position);
    if (threadIdx.x == 0) *(i32*)token = (i32)id;
}

KERNEL(32) advance(const void* token, void* position, void* ring, void* count, AdvanceParams p) {
    begin();
    if (threadIdx.x == 0) step_on((i32*)position, p.step, (i32*)ring, p.ring, (u32*)count, *(const i32*)token);
}

KERNEL(1024) next_token(const void* logits, void* token, void* position, void* ring, void* count, SampleParams p) {
    begin();
    const i32 id = (i32)draw(p, (const float*)logits, *(const i32*)position);
    if (threadIdx.x == 0) {
        *(i32*)token = id;
        step_on((i32*)position, 1, (i32*)ring, p.ring, (u32*)count, id);
    }
}
