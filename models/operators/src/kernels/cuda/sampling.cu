// Sampling kernels, from logits to the next token: softmax, argmax, and the step that draws a token
// and closes the loop on the device.
//
// The draw follows the CPU kernel: Philox4x32-10 with the seed as key and the position as counter,
// the same exponentials and cuts, candidates in the order of ids, sums in f64. Only the order of
// the f64 sums differs. So a token differs from the CPU's only if the random number lies within
// rounding (one part in 10^13) of the border between two candidates.

static constexpr u32 NONE = 0xffffffffu;
static constexpr u32 MAX_WARPS = 32;
static constexpr u32 MAX_LOGS = 20;

#define OUTLINE static __device__ __noinline__

// The blocks that share a row. They share no memory with other blocks, so each of them writes its
// own shared memory and reads the others' behind `meet`.
struct Alone {
    static constexpr u32 BLOCKS = 1;
    // The number of exchanges so far.
    u32 turn = 0;
    __device__ __forceinline__ u32 rank() const { return 0; }
    __device__ __forceinline__ void meet() const { __syncthreads(); }
    template <class V> __device__ __forceinline__ V* of(V* own, u32) const { return own; }
};

#if defined(LEASEHOLD_EMULATED) || __CUDA_ARCH__ == 900
#define CLUSTERS
struct Cluster {
    static constexpr u32 BLOCKS = 8;
    u32 turn = 0;
    __device__ __forceinline__ u32 rank() const { return __clusterRelativeBlockRank(); }
    __device__ __forceinline__ void meet() const {
        __cluster_barrier_arrive();
        __cluster_barrier_wait();
    }
    // The variable of the block `rank` that has the place of an own one.
    template <class V> __device__ __forceinline__ V* of(V* own, u32 rank) const {
        return (V*)__cluster_map_shared_rank((void*)own, rank);
    }
};
#endif

// The parts of a row, in the order of ids. A sum over a part is a warp's. So the order of sums does
// not depend on the number of blocks and warps. All parts end at multiples of WARP or at the row's
// end.
static constexpr u32 PARTS = 128;

template <class T> struct Parts {
    static constexpr u32 OWN = PARTS / T::BLOCKS;
    // The block's parts are those from this one on.
    u32 begin;
    u32 size;
    u32 n;
    __device__ __forceinline__ Parts(const T& team, u32 n) : begin(team.rank() * OWN), n(n) {
        size = ((n - 1) / (PARTS * WARP) + 1) * WARP;
    }
    __device__ __forceinline__ u32 at(u32 part) const { return (u32)smaller((u64)part * size, (u64)n); }
    // The block's elements.
    __device__ __forceinline__ u32 first() const { return at(begin); }
    __device__ __forceinline__ u32 last() const { return at(begin + OWN); }
};

struct Sum {
    template <class V> static __device__ __forceinline__ V of(V a, V b) { return a + b; }
    template <class V> static __device__ __forceinline__ V warp(V v) { return warp_sum(v); }
#if __CUDA_ARCH__ >= 800
    static __device__ __forceinline__ u32 warp(u32 v) { return __reduce_add_sync(ALL, v); }
#endif
};

struct Largest {
    static __device__ __forceinline__ u64 of(u64 a, u64 b) { return b > a ? b : a; }
    static __device__ __forceinline__ u64 warp(u64 v) {
        for (int step = 16; step > 0; step /= 2) v = of(v, __shfl_xor_sync(ALL, v, step));
        return v;
    }
};

// Combines the values of all threads of the team, with a result that no order changes. All threads
// take part and get the result.
template <class F, class T, class V, u32 N> INLINE void combine(T& team, V (&v)[N]) {
    __shared__ V warps[N][MAX_WARPS];
    // A block writes the other place while those behind still read this one.
    __shared__ V block[2][N];
    __shared__ V all[N];
    const u32 t = threadIdx.x;
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
        const V one = F::warp(v[i]);
        if (t % WARP == 0) warps[i][t / WARP] = one;
    }
    __syncthreads();
    if (t < N) {
        V one = warps[t][0];
        for (u32 w = 1; w < blockDim.x / WARP; ++w) one = F::of(one, warps[t][w]);
        (T::BLOCKS == 1 ? all : block[team.turn % 2])[t] = one;
    }
    if constexpr (T::BLOCKS > 1) {
        team.meet();
        if (t < N) {
            V one = block[team.turn % 2][t];
            for (u32 b = 1; b < T::BLOCKS; ++b) {
                one = F::of(one, *team.of(&block[team.turn % 2][t], (team.rank() + b) % T::BLOCKS));
            }
            all[t] = one;
        }
        ++team.turn;
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < N; ++i) v[i] = all[i];
}

// The sums of the values of all parts up to each one, that one included. `f` gives a lane's value
// of a part, from its number, its first element and its end. All threads of the team take part.
template <class V, class T, class F> INLINE const V* scan(T& team, const Parts<T>& parts, F f) {
    __shared__ V block[2][Parts<T>::OWN];
    __shared__ V all[PARTS];
    const u32 t = threadIdx.x, lane = t % WARP;
    // The list of the call before has been read.
    __syncthreads();
    V* const own = T::BLOCKS == 1 ? all : block[team.turn % 2];
    for (u32 p = t / WARP; p < Parts<T>::OWN; p += blockDim.x / WARP) {
        const u32 part = parts.begin + p, first = parts.at(part);
        V v = 0;
        // Short rows have empty parts.
        if (first < parts.n) v = warp_sum(f(part, first, parts.at(part + 1)));
        if (lane == 0) own[p] = v;
    }
    if constexpr (T::BLOCKS > 1) {
        team.meet();
        for (u32 p = t; p < PARTS; p += blockDim.x) all[p] = *team.of(&own[p % Parts<T>::OWN], p / Parts<T>::OWN);
        ++team.turn;
    }
    __syncthreads();
    if (t < WARP) {
        constexpr u32 EACH = PARTS / WARP;
        V sums[EACH];
        V sum = 0;
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) sums[i] = sum += all[EACH * lane + i];
        for (u32 step = 1; step < WARP; step *= 2) {
            const V other = __shfl_up_sync(ALL, sum, step);
            if (lane >= step) sum += other;
        }
        V before = __shfl_up_sync(ALL, sum, 1);
        if (lane == 0) before = 0;
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) all[EACH * lane + i] = before + sums[i];
    }
    __syncthreads();
    return all;
}

template <class V> INLINE V before(const V* sums, u32 part) { return part == 0 ? 0 : sums[part - 1]; }

// The float as an unsigned integer with the same order; both zeros have one key.
INLINE u32 key_of(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

INLINE float float_of(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// The largest element without NaN, and its first index; (-infinity, NONE) if no element is left.
// NONE is the id -1.
struct Best {
    float value;
    u32 index;
};

INLINE Best better(Best a, Best b) { return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a; }

// All threads of the team take part and get the same result.
template <class T> INLINE Best best_of(T& team, u32 dtype, const void* x, u64 row, u32 n) {
    const Parts<T> parts(team, n);
    Best best = {-infinity(), NONE};
    // Several reads are under way at a time.
    constexpr u32 BATCH = T::BLOCKS == 1 ? 4 : 8;
    const u32 whole = address(x) % 16 == 0 && row % 4 == 0 ? parts.last() / 4 : 0;
    for (u32 i = parts.first() / 4 + threadIdx.x; i < whole; i += BATCH * blockDim.x) {
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
    for (u32 i = larger(parts.first(), 4 * whole) + threadIdx.x; i < parts.last(); i += blockDim.x) {
        const Best one = {load_one(dtype, x, row + i), i};
        best = better(best, one);
    }
    // The largest word is of the largest value, and of its smallest index.
    u64 word[1] = {(u64)key_of(best.value) << 32 | (u32)~best.index};
    combine<Largest>(team, word);
    best = {float_of((u32)(word[0] >> 32)), ~(u32)word[0]};
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

template <class T> INLINE void argmax_of(T team, const void* x, void* ids, const RowParams& p) {
    begin();
    const u32 row = blockIdx.x / T::BLOCKS;
    const Best best = best_of(team, p.x, x, (u64)row * p.ldx, p.n);
    // The other blocks have read this one's memory.
    team.meet();
    if (team.rank() == 0 && threadIdx.x == 0) ((i32*)ids)[row] = (i32)best.index;
}

KERNEL(256) argmax(const void* x, void* ids, RowParams p) { argmax_of(Alone(), x, ids, p); }

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

// The candidates: all elements above `least`, and the first `ties` of the elements equal to it.
struct Cut {
    float least;
    u32 ties;
};

// The `k`-th largest of `n` logits, and the number of logits equal to it among the `k` largest. The
// search takes four bits of the key at a time, the highest first. A thread counts sixteen digits in
// four words of four counters; it sees fewer than 2^16 logits.
template <class T> INLINE Cut threshold(T& team, const float* x, u32 n, u32 k) {
    const Parts<T> parts(team, n);
    u32 prefix = 0, need = k;
    for (int shift = 28; shift >= 0; shift -= 4) {
        const u32 known = shift == 28 ? 0 : ~0u << (shift + 4);
        u64 packed[4] = {0, 0, 0, 0};
        for (u32 i = parts.first() + threadIdx.x; i < parts.last(); i += blockDim.x) {
            const float v = x[i];
            const u32 key = key_of(v);
            if (v == v && (key & known) == prefix) {
                const u32 digit = (key >> shift) & 15u;
                const u64 one = 1ull << (16 * (digit & 3u));
#pragma unroll
                for (u32 w = 0; w < 4; ++w) packed[w] += digit >> 2 == w ? one : 0ull;
            }
        }
        u32 counts[16];
#pragma unroll
        for (u32 d = 0; d < 16; ++d) counts[d] = (u32)(packed[d / 4] >> (16 * (d % 4))) & 0xffffu;
        combine<Sum>(team, counts);
        u32 digit = 16, above = 0, here = 0;
#pragma unroll
        for (u32 d = 16; d-- > 0;) {
            if (above + here >= need) break;
            above += here;
            digit = d;
            here = counts[d];
        }
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

// The numbers of ties and of larger logits of the parts up to each one.
struct Counts {
    const u64* sums;
    __device__ __forceinline__ u32 ties(u32 part) const { return (u32)(before(sums, part) >> 32); }
    // The candidates before a part.
    __device__ __forceinline__ u32 candidates(Cut cut, u32 part) const {
        return (u32)before(sums, part) + smaller(ties(part), cut.ties);
    }
};

// All threads of the team take part.
template <class T> INLINE Counts counts_of(T& team, const Parts<T>& parts, const float* x, Cut cut) {
    const Counts counts = {scan<u64>(team, parts, [&](u32, u32 first, u32 end) {
        u32 ties = 0, above = 0;
        for (u32 at = first + threadIdx.x % WARP; at < end; at += WARP) {
            const float v = x[at];
            ties += v == cut.least;
            above += v > cut.least;
        }
        return (u64)ties << 32 | above;
    })};
    return counts;
}

INLINE float logit_of(const float* x, u32 at, u32 end) { return at < end ? x[at] : not_a_number(); }

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
template <class T> INLINE void cut_to(T& team, Candidates& c, float part) {
    const Parts<T> parts(team, c.n);
    // The sum of all weights is below 2^63 units.
    const u32 bits = 31 + (u32)__clz((int)c.n);
    const u32 least = key_of(c.cut.least);
    u64 need = 0;
    u32 prefix = 0;
    for (int shift = 30; shift >= 0; shift -= 2) {
        const u32 known = shift == 30 ? 0 : ~0u << (shift + 2);
        u64 sums[4] = {0, 0, 0, 0};
        for (u32 i = parts.first() + threadIdx.x; i < parts.last(); i += blockDim.x) {
            const float v = c.x[i];
            const u32 key = key_of(v);
            // A NaN is not above.
            if (v > c.cut.least && (key & known) == prefix) {
                const u64 units = units_of(weight_of(c, v), bits);
#pragma unroll
                for (u32 d = 0; d < 4; ++d) sums[d] += ((key >> shift) & 3u) == d ? units : 0ull;
            }
        }
        if (team.rank() == 0 && threadIdx.x == 0 && (least & known) == prefix) {
            // The ties have equal weights.
            const u64 units = c.cut.ties * units_of(weight_of(c, c.cut.least), bits);
#pragma unroll
            for (u32 d = 0; d < 4; ++d) sums[d] += ((least >> shift) & 3u) == d ? units : 0ull;
        }
        combine<Sum>(team, sums);
        if (shift == 30) {
            const u64 total = sums[0] + sums[1] + sums[2] + sums[3];
            const u64 fraction = (u64)(part * 4294967296.0f);
            need = (total >> 32) * fraction + (((total & 0xffffffffu) * fraction) >> 32);
            need = need == 0 ? 1 : need;
        }
        u32 digit = 3;
        u64 here = sums[3];
#pragma unroll
        for (u32 d = 3; d-- > 0;) {
            if (here >= need) break;
            need -= here;
            digit = d;
            here = sums[d];
        }
        prefix |= digit << shift;
    }
    c.cut.least = float_of(prefix);
    const u64 each = units_of(weight_of(c, c.cut.least), bits);
    c.cut.ties = each == 0 ? 1 : (u32)((need + each - 1) / each);
}

// Whether a token is drawn. Else the first of the largest is the token.
INLINE bool draws(const SamplingRecord& r, Best best) {
    const float inverse = 1.0f / r.temperature;
    return best.value < infinity() && best.value > -infinity() && inverse > 0.0f && inverse < infinity();
}

// Draws a token and returns it to every thread. No thread of the team is in an exchange before and
// behind it.
//
// This function and the next one are not inlined. Else a step that draws nothing would jump over
// their instructions, and wait for memory on the way.
template <class T>
OUTLINE u32 draw(T team, const SamplingRecord& r, const float* x, u32 n, Best best, i32 position) {
    __shared__ u32 chosen;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const float inverse = 1.0f / r.temperature;
    Candidates c = {x, n, best.value, inverse, {-infinity(), n}, 0.0f};
    if (r.top_k != 0 && r.top_k < n) c.cut = threshold(team, x, n, r.top_k);
    if (r.top_p > 0.0f && r.top_p < 1.0f) cut_to(team, c, r.top_p);
    if (r.min_p > 0.0f && r.min_p <= 1.0f) c.lightest = r.min_p;
    const Parts<T> parts(team, n);
    const Counts counts = counts_of(team, parts, x, c.cut);
    if (threadIdx.x == 0) chosen = best.index;
    // The weights of the candidates.
    const double* sums = scan<double>(team, parts, [&](u32 part, u32 first, u32 end) {
        double weight = 0.0;
        u32 seen = counts.ties(part);
        for (u32 at = first; at < end; at += WARP) {
            const float v = logit_of(x, at + lane, end);
            if (candidate(c.cut, v, seen)) weight += (double)weight_of(c, v);
        }
        return weight;
    });
    const double uniform = (double)philox(r.seed[0], r.seed[1], (u64)(long long)position) / 4294967296.0;
    const double target = uniform * sums[PARTS - 1];
    u32 owner = PARTS - 1;
    for (u32 first = 0; first < PARTS; first += WARP) {
        const u32 crossed = __ballot_sync(ALL, sums[first + lane] > target);
        if (crossed != 0) {
            owner = first + (u32)__ffs((int)crossed) - 1;
            break;
        }
    }
    const u32 rank = owner / Parts<T>::OWN;
    if (team.rank() == rank && warp == (owner - parts.begin) % (blockDim.x / WARP)) {
        const u32 end = parts.at(owner + 1);
        u32 seen = counts.ties(owner);
        double sum = before(sums, owner);
        u32 token = NONE;
        for (u32 at = parts.at(owner); at < end; at += WARP) {
            const float v = logit_of(x, at + lane, end);
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
    team.meet();
    return *team.of(&chosen, rank);
}

// Writes the log-probabilities of a token and of the `wanted` largest logits.
template <class T>
OUTLINE void log_probabilities_of(T team, const float* x, u32 n, float max, u32 token, u32 wanted, LogProbabilities* to) {
    __shared__ Best found[MAX_LOGS];
    const u32 lane = threadIdx.x % WARP;
    wanted = smaller(wanted, MAX_LOGS);
    const Cut everything = {-infinity(), n};
    const Cut cut = wanted < n ? threshold(team, x, n, wanted) : everything;
    const Parts<T> parts(team, n);
    const Counts counts = counts_of(team, parts, x, cut);
    // The candidates are the wanted ones; `place` is the number of those before a lane's.
    const double* sums = scan<double>(team, parts, [&](u32 part, u32 first, u32 end) {
        double sum = 0.0;
        u32 seen = counts.ties(part), place = counts.candidates(cut, part);
        for (u32 at = first; at < end; at += WARP) {
            const float v = logit_of(x, at + lane, end);
            if (v == v) sum += (double)exponential(v - max);
            const bool one = candidate(cut, v, seen);
            const u32 all = __ballot_sync(ALL, one);
            const u32 own = place + (u32)__popc(all & ((1u << lane) - 1u));
            place += (u32)__popc(all);
            if (one && own < MAX_LOGS) {
                const Best best = {v, at + lane};
                team.of(found, 0)[own] = best;
            }
        }
        return sum;
    });
    if (team.rank() != 0) return;
    const u32 count = smaller(counts.candidates(cut, PARTS), MAX_LOGS);
    const double total = sums[PARTS - 1];
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

// A thread has words of both sets, and the logits of their bits.
KERNEL(256) penalise(void* logits, const void* penalties, const void* token, const void* position, void* seen,
                     const void* banned, RowParams p) {
    begin();
    const u64 row = blockIdx.x;
    if (((const i32*)position)[row] < 0) return;
    const float penalty = ((const float*)penalties)[row], most = __uint_as_float(0x7f7fffffu);
    const bool penalised = penalty > 0.0f && penalty <= most;
    const i32 id = ((const i32*)token)[row];
    const u32 words = (p.n - 1) / 32 + 1;
    float* x = (float*)logits + row * p.ldx;
    for (u32 w = threadIdx.x; w < words; w += blockDim.x) {
        u32* own = (u32*)seen + row * words + w;
        u32 bits = *own;
        if (id >= 0 && (u32)id / 32 == w) *own = bits |= 1u << ((u32)id % 32);
        const u32 never = ((const u32*)banned)[row * words + w], any = bits | never;
        if (any == 0) continue;
        for (u32 b = 0; b < 32 && 32 * w + b < p.n; ++b) {
            if ((any >> b & 1) == 0) continue;
            float v = x[32 * w + b];
            if (penalised && (bits >> b & 1) != 0) v = v > 0.0f ? v / penalty : v * penalty;
            x[32 * w + b] = (never >> b & 1) != 0 ? -most : v;
        }
    }
}

template <class T>
INLINE void next_token_of(T team, const void* logits, const void* sampling, void* token, void* position, void* ring,
                          void* count, void* log_probabilities, const NextTokenParams& p) {
    begin();
    const u64 row = blockIdx.x / T::BLOCKS;
    const i32 at = ((const i32*)position)[row];
    // An idle row.
    if (at < 0) return;
    const SamplingRecord r = ((const SamplingRecord*)sampling)[row];
    const float* x = (const float*)logits + row * p.ld;
    const Best best = best_of(team, 0, logits, row * p.ld, p.n);
    const u32 id = draws(r, best) ? draw(team, r, x, p.n, best, at) : best.index;
    if (r.log_probabilities != 0 && p.log_ring != 0) {
        const u64 entry = row * p.log_ring + ((const u32*)count)[row] % p.log_ring;
        log_probabilities_of(team, x, p.n, best.value, id, r.log_probabilities,
                             (LogProbabilities*)log_probabilities + entry);
    }
    // All threads have read the words, and the other blocks' memory.
    team.meet();
    if (team.rank() == 0 && threadIdx.x == 0) {
        ((i32*)token)[row] = (i32)id;
        step_on((i32*)position + row, 1, (i32*)ring + row * p.ring, p.ring, (u32*)count + row, (i32)id);
    }
}

KERNEL(1024) next_token(const void* logits, const void* sampling, void* token, void* position, void* ring, void* count,
                        void* log_probabilities, NextTokenParams p) {
    next_token_of(Alone(), logits, sampling, token, position, ring, count, log_probabilities, p);
}

#ifdef CLUSTERS
CLUSTER_KERNEL(512, 8) next_token_cluster(const void* logits, const void* sampling, void* token, void* position,
                                           void* ring, void* count, void* log_probabilities, NextTokenParams p) {
    next_token_of(Cluster(), logits, sampling, token, position, ring, count, log_probabilities, p);
}

CLUSTER_KERNEL(512, 8) argmax_cluster(const void* x, void* ids, RowParams p) { argmax_of(Cluster(), x, ids, p); }
#endif
