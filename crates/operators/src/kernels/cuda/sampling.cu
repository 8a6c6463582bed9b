// Sampling kernels, from logits to the next token: softmax, argmax, and the step that draws a token
// and closes the loop on the device.
//
// The draw follows the CPU kernel: Philox4x32-10 with the seed as key and the position as counter,
// the same exponentials and cuts, candidates in the order of ids, sums in f64. Only the order of the
// f64 sums differs. So a token differs from the CPU's only if the random number lies within rounding
// (one part in 10^13) of the border between two candidates.

static constexpr u32 NONE = 0xffffffffu;
static constexpr u32 MAX_WARPS = 32;
static constexpr u32 MAX_LOGS = 20;

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

// A warp's part of the logits, in the order of ids. All parts but the last end at a multiple of WARP.
struct Part {
    u32 first;
    u32 last;
    // Before the part: the ties, and the candidates.
    u32 ties;
    u32 candidates;
};

INLINE float logit_of(const float* x, Part part, u32 at) {
    return at < part.last ? x[at] : not_a_number();
}

// All threads of the block take part.
INLINE Part part_of(const float* x, u32 n, Cut cut) {
    __shared__ u32 ties[MAX_WARPS];
    __shared__ u32 above[MAX_WARPS];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const u32 size = ((n - 1) / (warps * WARP) + 1) * WARP;
    const u64 begin = (u64)warp * size;
    Part part = {(u32)smaller(begin, (u64)n), (u32)smaller(begin + size, (u64)n), 0, 0};
    u32 equal = 0, larger = 0;
    for (u32 at = part.first + lane; at < part.last; at += WARP) {
        const float v = x[at];
        equal += v == cut.least;
        larger += v > cut.least;
    }
    equal = warp_sum(equal);
    larger = warp_sum(larger);
    if (lane == 0) {
        ties[warp] = equal;
        above[warp] = larger;
    }
    __syncthreads();
    for (u32 w = 0; w < warp; ++w) {
        part.ties += ties[w];
        part.candidates += above[w];
    }
    part.candidates += smaller(part.ties, cut.ties);
    return part;
}

// The logits of a row that a token is drawn from, and the rule of their weights.
struct Candidates {
    const float* x;
    u32 n;
    // The largest logit, whose weight is 1.
    float max;
    float inverse;
    Cut cut;
    // Lighter candidates have no weight.
    float lightest;
};

INLINE float weight_of(const Candidates& c, float v) {
    const float weight = exponential((v - c.max) * c.inverse);
    return weight < c.lightest ? 0.0f : weight;
}

// A weight as a number of units of 2^-bits, rounded down.
INLINE u64 units_of(float weight, u32 bits) { return (u64)(weight * __uint_as_float((127 + bits) << 23)); }

// Cuts the candidates to the smallest number of the largest ones whose weights reach `part` of the
// sum. The search takes two bits of the key at a time, the highest first. Sums of units are exact.
INLINE void cut_to(Candidates& c, float part) {
    __shared__ u64 sums[MAX_WARPS][4];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    // The sum of all weights is below 2^63 units.
    const u32 bits = 31 + (u32)__clz((int)c.n);
    const u32 least = key_of(c.cut.least);
    u64 need = 0;
    u32 prefix = 0;
    for (int shift = 30; shift >= 0; shift -= 2) {
        const u32 known = shift == 30 ? 0 : ~0u << (shift + 2);
        u64 mine[4] = {0, 0, 0, 0};
        for (u32 i = threadIdx.x; i < c.n; i += blockDim.x) {
            const float v = c.x[i];
            const u32 key = key_of(v);
            // A NaN is not above.
            if (v > c.cut.least && (key & known) == prefix) {
                const u64 units = units_of(weight_of(c, v), bits);
#pragma unroll
                for (u32 d = 0; d < 4; ++d) mine[d] += ((key >> shift) & 3u) == d ? units : 0ull;
            }
        }
        if (threadIdx.x == 0 && (least & known) == prefix) {
            // The ties have equal weights.
            const u64 units = c.cut.ties * units_of(weight_of(c, c.cut.least), bits);
#pragma unroll
            for (u32 d = 0; d < 4; ++d) mine[d] += ((least >> shift) & 3u) == d ? units : 0ull;
        }
#pragma unroll
        for (u32 d = 0; d < 4; ++d) {
            const u64 sum = warp_sum(mine[d]);
            if (lane == 0) sums[warp][d] = sum;
        }
        __syncthreads();
        if (shift == 30) {
            u64 total = 0;
            for (u32 w = 0; w < warps; ++w) total += sums[w][0] + sums[w][1] + sums[w][2] + sums[w][3];
            const u64 fraction = (u64)(part * 4294967296.0f);
            need = (total >> 32) * fraction + (((total & 0xffffffffu) * fraction) >> 32);
            need = need == 0 ? 1 : need;
        }
        u32 digit = 4;
        u64 here = 0;
        do {
            need -= here;
            here = 0;
            --digit;
            for (u32 w = 0; w < warps; ++w) here += sums[w][digit];
        } while (digit > 0 && here < need);
        __syncthreads();
        prefix |= digit << shift;
    }
    c.cut.least = float_of(prefix);
    const u64 each = units_of(weight_of(c, c.cut.least), bits);
    c.cut.ties = each == 0 ? 1 : (u32)((need + each - 1) / each);
}

// Draws a token and returns it to every thread. Each warp processes a part of the logits, in the
// order of ids.
INLINE u32 draw(const SamplingRecord& r, const float* x, u32 n, Best best, i32 position) {
    __shared__ double sums[MAX_WARPS];
    __shared__ u32 chosen;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    const float inverse = 1.0f / r.temperature;
    if (!(best.value < infinity() && best.value > -infinity())) return best.index;
    if (!(inverse > 0.0f && inverse < infinity())) return best.index;
    Candidates c = {x, n, best.value, inverse, {-infinity(), n}, 0.0f};
    if (r.top_k != 0 && r.top_k < n) c.cut = threshold(x, n, r.top_k);
    if (r.top_p > 0.0f && r.top_p < 1.0f) cut_to(c, r.top_p);
    if (r.min_p > 0.0f && r.min_p <= 1.0f) c.lightest = r.min_p;
    const Part part = part_of(x, n, c.cut);
    // The weight of its candidates.
    double weight = 0.0;
    u32 seen = part.ties;
    for (u32 at = part.first; at < part.last; at += WARP) {
        const float v = logit_of(x, part, at + lane);
        if (candidate(c.cut, v, seen)) weight += (double)weight_of(c, v);
    }
    weight = warp_sum(weight);
    if (lane == 0) sums[warp] = weight;
    if (threadIdx.x == 0) chosen = best.index;
    __syncthreads();
    double total = 0.0;
    for (u32 w = 0; w < warps; ++w) total += sums[w];
    const double uniform = (double)philox(r.seed[0], r.seed[1], (u64)(long long)position) / 4294967296.0;
    const double target = uniform * total;
    double sum = 0.0;
    u32 owner = 0;
    while (owner + 1 < warps && !(sum + sums[owner] > target)) sum += sums[owner++];
    if (warp == owner) {
        seen = part.ties;
        u32 token = NONE;
        for (u32 at = part.first; at < part.last; at += WARP) {
            const float v = logit_of(x, part, at + lane);
            const float own = candidate(c.cut, v, seen) ? weight_of(c, v) : 0.0f;
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

// Writes the log-probabilities of a token and of the `wanted` largest logits.
INLINE void log_probabilities_of(const float* x, u32 n, float max, u32 token, u32 wanted, LogProbabilities* to) {
    __shared__ double sums[MAX_WARPS];
    __shared__ Best found[MAX_LOGS];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    wanted = smaller(wanted, MAX_LOGS);
    const Cut everything = {-infinity(), n};
    const Cut cut = wanted < n ? threshold(x, n, wanted) : everything;
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        const float v = x[i];
        if (v == v) sum += (double)exponential(v - max);
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    // The candidates are the wanted ones; `place` is the number of those before a lane's.
    const Part part = part_of(x, n, cut);
    u32 seen = part.ties, before = part.candidates;
    for (u32 at = part.first; at < part.last; at += WARP) {
        const float v = logit_of(x, part, at + lane);
        const bool one = candidate(cut, v, seen);
        const u32 all = __ballot_sync(ALL, one);
        const u32 place = before + (u32)__popc(all & ((1u << lane) - 1u));
        before += (u32)__popc(all);
        if (one && place < MAX_LOGS) {
            const Best best = {v, at + lane};
            found[place] = best;
        }
    }
    // The last warp has counted all.
    __shared__ u32 count;
    if (threadIdx.x == blockDim.x - 1) count = smaller(before, MAX_LOGS);
    __syncthreads();
    double total = 0.0;
    for (u32 w = 0; w < warps; ++w) total += sums[w];
    const float log_sum = logf((float)total);
    if (threadIdx.x < MAX_LOGS) {
        // Entries behind the ranks have no logit.
        u32 rank = threadIdx.x;
        i32 id = -1;
        float value = not_a_number();
        if (threadIdx.x < count) {
            const Best own = found[threadIdx.x];
            rank = 0;
            for (u32 i = 0; i < count; ++i) {
                const Best other = found[i];
                rank += other.value > own.value || (other.value == own.value && other.index < own.index);
            }
            id = (i32)own.index;
            value = (own.value - max) - log_sum;
        }
        to->ids[rank] = id;
        to->values[rank] = value;
    }
    if (threadIdx.x == 0) to->chosen = token < n ? (x[token] - max) - log_sum : not_a_number();
}

// Advances the position by `step` and appends the token to the ring.
INLINE void step_on(i32* position, u32 step, i32* ring, u32 size, u32* count, i32 token) {
    *position = (i32)((u32)*position + step);
    const u32 n = *count;
    if (size != 0) ring[n % size] = token;
    *count = n + 1;
}

KERNEL(32) advance(const void* token, void* position, void* ring, void* count, AdvanceParams p) {
    begin();
    const u64 row = blockIdx.x;
    if (threadIdx.x != 0 || ((const i32*)position)[row] < 0) return;
    step_on((i32*)position + row, p.step, (i32*)ring + row * p.ring, p.ring, (u32*)count + row,
            ((const i32*)token)[row]);
}

KERNEL(1024) next_token(const void* logits, const void* sampling, void* token, void* position, void* ring, void* count,
                        void* log_probabilities, NextTokenParams p) {
    begin();
    const u64 row = blockIdx.x;
    const i32 at = ((const i32*)position)[row];
    // An idle row.
    if (at < 0) return;
    const SamplingRecord r = ((const SamplingRecord*)sampling)[row];
    const float* x = (const float*)logits + row * p.ld;
    const Best best = block_best(0, logits, row * p.ld, p.n);
    const u32 id = draw(r, x, p.n, best, at);
    if (r.log_probabilities != 0 && p.log_ring != 0) {
        const u64 entry = row * p.log_ring + ((const u32*)count)[row] % p.log_ring;
        log_probabilities_of(x, p.n, best.value, id, r.log_probabilities, (LogProbabilities*)log_probabilities + entry);
    }
    // All threads have read the words.
    __syncthreads();
    if (threadIdx.x == 0) {
        ((i32*)token)[row] = (i32)id;
        step_on((i32*)position + row, 1, (i32*)ring + row * p.ring, p.ring, (u32*)count + row, (i32)id);
    }
}
