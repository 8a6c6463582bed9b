// Sampling kernels, from logits to the next token: softmax, argmax, sampling, and the step that
// closes the loop on the device.
//
// The draw follows the CPU kernel: Philox4x32-10 with the seed as key and the position as counter,
// the same exponentials, candidates in the order of ids. The CPU adds weights in f64, which Metal
// does not have. Here a weight, at most 1, is a whole number of small units in 64 bits, and sums are
// exact. A unit is at most 2^-36, and 2^-45 for a vocabulary of 128 Ki. So a token differs from the
// CPU's only if the random number lies that close to the border between two candidates.

constant constexpr u32 NONE = 0xffffffffu;
constant constexpr u32 MAX_SIMDS = 32;

// The largest element without NaN, and its first index; (-infinity, NONE) if no element is left.
// NONE is the id -1.
struct Best {
    float value;
    u32 index;
};

inline Best better(Best a, Best b) {
    const bool second = b.value > a.value || (b.value == a.value && b.index < a.index);
    return second ? b : a;
}

// Threadgroup memory of a search for the best element.
struct Bests {
    threadgroup float* values;
    threadgroup u32* indices;
};

// All threads of the threadgroup take part and get the same result.
inline Best group_best(u32 dtype, device const u8* x, u64 row, u32 n, Bests room, Place at) {
    Best best = {-infinity(), NONE};
    for (u32 i = at.index; i < n; i += at.count) {
        // A NaN is neither larger nor equal.
        const Best one = {load(dtype, x, row + i), i};
        best = better(best, one);
    }
    for (u16 step = 16; step > 0; step /= 2) {
        const Best other = {simd_shuffle_xor(best.value, step), simd_shuffle_xor(best.index, step)};
        best = better(best, other);
    }
    if (at.lane == 0) {
        room.values[at.simd] = best.value;
        room.indices[at.simd] = best.index;
    }
    group_barrier();
    for (u32 s = 0; s < at.count / SIMD; ++s) {
        const Best other = {room.values[s], room.indices[s]};
        best = better(best, other);
    }
    group_barrier();
    return best;
}

[[max_total_threads_per_threadgroup(256)]]
kernel void softmax(device const u8* x [[buffer(0)]], device u8* y [[buffer(1)]], constant RowParams& p [[buffer(2)]],
                    uint3 group [[threadgroup_position_in_grid]], uint3 threads [[threads_per_threadgroup]],
                    uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                    uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float scratch[MAX_SIMDS];
    const Place at = {index, threads.x, lane, simd};
    const u64 from = u64(group.x) * p.ldx, to = u64(group.x) * p.ldy;
    float largest = -infinity();
    for (u32 i = index; i < p.n; i += at.count) largest = fmax(largest, load(p.x, x, from + i));
    largest = group_largest(largest, scratch, at);
    float sum = 0.0f;
    for (u32 i = index; i < p.n; i += at.count) sum += exponential(load(p.x, x, from + i) - largest);
    const float factor = 1.0f / group_sum(sum, scratch, at);
    for (u32 i = index; i < p.n; i += at.count) {
        store(p.y, y, to + i, exponential(load(p.x, x, from + i) - largest) * factor);
    }
}

[[max_total_threads_per_threadgroup(256)]]
kernel void argmax(device const u8* x [[buffer(0)]], device u8* ids [[buffer(1)]], constant RowParams& p [[buffer(2)]],
                   uint3 group [[threadgroup_position_in_grid]], uint3 threads [[threads_per_threadgroup]],
                   uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                   uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float values[MAX_SIMDS];
    threadgroup u32 indices[MAX_SIMDS];
    const Bests bests = {values, indices};
    const Place at = {index, threads.x, lane, simd};
    const Best best = group_best(p.x, x, u64(group.x) * p.ldx, p.n, bests, at);
    if (index == 0) ((device i32*)ids)[group.x] = i32(best.index);
}

// The first of four words of Philox4x32-10.
inline u32 philox(u32 k0, u32 k1, u64 counter) {
    u32 c0 = u32(counter), c1 = u32(counter >> 32), c2 = 0, c3 = 0;
    for (int round = 0; round < 10; ++round) {
        const u64 p0 = u64(c0) * 0xD2511F53u, p1 = u64(c2) * 0xCD9E8D57u;
        c0 = u32(p1 >> 32) ^ c1 ^ k0;
        c1 = u32(p1);
        c2 = u32(p0 >> 32) ^ c3 ^ k1;
        c3 = u32(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}

// The float as an unsigned integer with the same order; both zeros have one key.
inline u32 key_of(float x) {
    const u32 bits = as_type<u32>(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

inline float float_of(u32 key) { return as_type<float>(key >> 31 ? key & 0x7fffffffu : ~key); }

// The candidates: all elements above `least`, and the first `ties` of the elements equal to it.
struct Cut {
    float least;
    u32 ties;
};

// Threadgroup memory of a draw.
struct Draw {
    Bests bests;
    // Sixteen for each SIMD-group.
    threadgroup u32* counts;
    threadgroup u32* ties;
    threadgroup u64* sums;
    threadgroup u32* chosen;
};

// The `k`-th largest of `n` logits, and the number of logits equal to it among the `k` largest. The
// search takes four bits of the key at a time, the highest first. A thread counts sixteen digits in
// four words of four counters; it sees fewer than 2^16 logits.
inline Cut threshold(device const float* x, u32 n, u32 k, Draw room, Place at) {
    u32 prefix = 0, need = k;
    for (int shift = 28; shift >= 0; shift -= 4) {
        const u32 known = shift == 28 ? 0 : ~0u << (shift + 4);
        u64 packed[4] = {0, 0, 0, 0};
        for (u32 i = at.index; i < n; i += at.count) {
            const float v = x[i];
            const u32 key = key_of(v);
            if (v == v && (key & known) == prefix) {
                const u32 digit = (key >> shift) & 15u;
                const u64 one = u64(1) << (16 * (digit & 3u));
                for (u32 w = 0; w < 4; ++w) packed[w] += digit >> 2 == w ? one : 0;
            }
        }
        for (u32 d = 0; d < 16; ++d) {
            const u32 sum = simd_sum(u32(packed[d / 4] >> (16 * (d % 4))) & 0xffffu);
            if (at.lane == 0) room.counts[at.simd * 16 + d] = sum;
        }
        group_barrier();
        u32 digit = 16, above = 0, here = 0;
        while (digit > 0 && above + here < need) {
            above += here;
            --digit;
            here = 0;
            for (u32 s = 0; s < at.count / SIMD; ++s) here += room.counts[s * 16 + digit];
        }
        group_barrier();
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

// A weight as a number of units of 2^-bits. A NaN and a weight below a unit are zero.
inline u64 units_of(float weight, u32 bits) {
    return weight > 0.0f ? u64(weight * as_type<float>((127 + bits) << 23)) : 0;
}

inline u64 simd_total(u64 v) {
    for (u16 step = 16; step > 0; step /= 2) {
        const u32 low = simd_shuffle_xor(u32(v), step), high = simd_shuffle_xor(u32(v >> 32), step);
        v += u64(low) | (u64(high) << 32);
    }
    return v;
}

// The sum of the lanes up to this one.
inline u64 simd_inclusive(u64 v, u32 lane) {
    for (u16 step = 1; step < SIMD; step *= 2) {
        const u32 low = simd_shuffle_up(u32(v), step), high = simd_shuffle_up(u32(v >> 32), step);
        if (lane >= step) v += u64(low) | (u64(high) << 32);
    }
    return v;
}

// The logits of a draw, and the rule of their weights.
struct Weights {
    device const float* x;
    Cut cut;
    float largest;
    float inverse;
    u32 bits;
};

// The units of the logit at `at`, or none from `last` on. All lanes of the SIMD-group take part;
// `seen` counts the ties before them.
inline u64 units_at(thread const Weights& w, u32 at, u32 last, thread u32& seen) {
    const float v = at < last ? w.x[at] : not_a_number();
    const u32 tied = v == w.cut.least ? 1 : 0;
    const u32 rank = seen + simd_prefix_exclusive_sum(tied);
    seen += simd_sum(tied);
    const bool candidate = v > w.cut.least || (tied != 0 && rank < w.cut.ties);
    return candidate ? units_of(exponential((v - w.largest) * w.inverse), w.bits) : 0;
}

// Draws a token and returns it to every thread. Each SIMD-group processes a part of the logits, in
// the order of ids.
inline u32 draw(constant SampleParams& p, device const u8* logits, i32 position, Draw room, Place at) {
    device const float* x = (device const float*)logits;
    const u32 simds = at.count / SIMD;
    const Best best = group_best(0, logits, 0, p.n, room.bests, at);
    if (p.temperature == 0.0f || !(best.value < infinity() && best.value > -infinity())) return best.index;
    Weights w = {x, {-infinity(), p.n}, best.value, 1.0f / p.temperature, 0};
    if (p.top_k != 0 && p.top_k < p.n) w.cut = threshold(x, p.n, p.top_k, room, at);
    // The sum of all weights is below 2^63 units.
    w.bits = 31 + clz(p.n);
    const u32 part = ((p.n - 1) / at.count + 1) * SIMD;
    const u32 first = u32(min(u64(at.simd) * part, u64(p.n))), last = u32(min(u64(at.simd + 1) * part, u64(p.n)));
    // The number of ties before each SIMD-group's part.
    u32 mine = 0;
    for (u32 i = first + at.lane; i < last; i += SIMD) mine += x[i] == w.cut.least ? 1 : 0;
    mine = simd_sum(mine);
    if (at.lane == 0) room.ties[at.simd] = mine;
    group_barrier();
    u32 before = 0;
    for (u32 s = 0; s < at.simd; ++s) before += room.ties[s];
    // The weight of its candidates.
    u64 weight = 0;
    u32 seen = before;
    for (u32 i = first; i < last; i += SIMD) weight += units_at(w, i + at.lane, last, seen);
    weight = simd_total(weight);
    if (at.lane == 0) room.sums[at.simd] = weight;
    if (at.index == 0) *room.chosen = best.index;
    group_barrier();
    u64 total = 0;
    for (u32 s = 0; s < simds; ++s) total += room.sums[s];
    // The random fraction of the total, rounded down. The first candidate whose sum exceeds it is
    // drawn.
    const u64 random = philox(p.seed[0], p.seed[1], u64(long(position)));
    const u64 target = (total >> 32) * random + (((total & 0xffffffffu) * random) >> 32);
    u64 sum = 0;
    u32 owner = 0;
    while (owner + 1 < simds && sum + room.sums[owner] <= target) sum += room.sums[owner++];
    if (at.simd == owner) {
        seen = before;
        for (u32 i = first; i < last; i += SIMD) {
            const u64 own = units_at(w, i + at.lane, last, seen);
            const u64 inclusive = simd_inclusive(own, at.lane);
            const u32 crossed = simd_min(own > 0 && sum + inclusive > target ? at.lane : SIMD);
            if (crossed < SIMD) {
                if (at.lane == 0) *room.chosen = i + crossed;
                break;
            }
            sum += simd_total(own);
        }
    }
    group_barrier();
    return *room.chosen;
}

// Advances the position by `step` and appends the token to the ring.
inline void step_on(device u8* position, u32 step, device u8* ring, u32 size, device u8* count, i32 token) {
    device u32* at = (device u32*)position;
    *at = *at + step;
    const u32 n = *(device u32*)count;
    if (size != 0) ((device i32*)ring)[n % size] = token;
    *(device u32*)count = n + 1;
}

[[max_total_threads_per_threadgroup(1024)]]
kernel void sample(device const u8* logits [[buffer(0)]], device const u8* position [[buffer(1)]],
                   device u8* token [[buffer(2)]], constant SampleParams& p [[buffer(3)]],
                   uint3 threads [[threads_per_threadgroup]], uint index [[thread_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float values[MAX_SIMDS];
    threadgroup u32 indices[MAX_SIMDS];
    threadgroup u32 counts[MAX_SIMDS * 16];
    threadgroup u32 ties[MAX_SIMDS];
    threadgroup u64 sums[MAX_SIMDS];
    threadgroup u32 chosen[1];
    const Draw room = {{values, indices}, counts, ties, sums, chosen};
    const Place at = {index, threads.x, lane, simd};
    const u32 id = draw(p, logits, *(device const i32*)position, room, at);
    if (index == 0) *(device i32*)token = i32(id);
}

[[max_total_threads_per_threadgroup(32)]]
kernel void advance(device const u8* token [[buffer(0)]], device u8* position [[buffer(1)]],
                    device u8* ring [[buffer(2)]], device u8* count [[buffer(3)]],
                    constant AdvanceParams& p [[buffer(4)]], uint index [[thread_index_in_threadgroup]]) {
    if (index == 0) step_on(position, p.step, ring, p.ring, count, *(device const i32*)token);
}

[[max_total_threads_per_threadgroup(1024)]]
kernel void next_token(device const u8* logits [[buffer(0)]], device u8* token [[buffer(1)]],
                       device u8* position [[buffer(2)]], device u8* ring [[buffer(3)]],
                       device u8* count [[buffer(4)]], constant SampleParams& p [[buffer(5)]],
                       uint3 threads [[threads_per_threadgroup]], uint index [[thread_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float values[MAX_SIMDS];
    threadgroup u32 indices[MAX_SIMDS];
    threadgroup u32 counts[MAX_SIMDS * 16];
    threadgroup u32 ties[MAX_SIMDS];
    threadgroup u64 sums[MAX_SIMDS];
    threadgroup u32 chosen[1];
    const Draw room = {{values, indices}, counts, ties, sums, chosen};
    const Place at = {index, threads.x, lane, simd};
    const i32 id = i32(draw(p, logits, *(device const i32*)position, room, at));
    if (index == 0) {
        *(device i32*)token = id;
        step_on(position, 1, ring, p.ring, count, id);
    }
}
