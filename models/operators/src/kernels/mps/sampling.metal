// Sampling kernels, from logits to the next token: softmax, argmax, and the step that draws a token
// and closes the loop on the device.
//
// The draw follows the CPU kernel: Philox4x32-10 with the seed as key and the position as counter,
// the same exponentials and cuts, candidates in the order of ids. The CPU adds weights in f64, which Metal
// does not have. Here a weight, at most 1, is a whole number of small units in 64 bits, and sums are
// exact. A unit is at most 2^-36, and 2^-45 for a vocabulary of 128 Ki. So a token differs from the
// CPU's only if the random number lies that close to the border between two candidates.

constant constexpr u32 NONE = 0xffffffffu;
constant constexpr u32 MAX_SIMDS = 32;
constant constexpr u32 MAX_LOGS = 20;

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
    threadgroup u32* above;
    // Four for each SIMD-group.
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

// A part of a sum, in units of 2^-32, rounded down.
inline u64 fraction_of(u64 sum, u64 fraction) {
    return (sum >> 32) * fraction + (((sum & 0xffffffffu) * fraction) >> 32);
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

// A SIMD-group's part of the logits, in the order of ids. All parts but the last end at a multiple of
// SIMD.
struct Part {
    u32 first;
    u32 last;
    // Before the part: the ties, and the candidates.
    u32 ties;
    u32 candidates;
};

// All threads of the threadgroup take part.
inline Part part_of(device const float* x, u32 n, Cut cut, Draw room, Place at) {
    const u32 size = ((n - 1) / at.count + 1) * SIMD;
    const u32 first = u32(min(u64(at.simd) * size, u64(n))), last = u32(min(u64(at.simd + 1) * size, u64(n)));
    Part part = {first, last, 0, 0};
    u32 equal = 0, larger = 0;
    for (u32 i = first + at.lane; i < last; i += SIMD) {
        const float v = x[i];
        equal += v == cut.least ? 1 : 0;
        larger += v > cut.least ? 1 : 0;
    }
    equal = simd_sum(equal);
    larger = simd_sum(larger);
    if (at.lane == 0) {
        room.ties[at.simd] = equal;
        room.above[at.simd] = larger;
    }
    group_barrier();
    for (u32 s = 0; s < at.simd; ++s) {
        part.ties += room.ties[s];
        part.candidates += room.above[s];
    }
    part.candidates += min(part.ties, cut.ties);
    return part;
}

// 1 for a lane whose logit is a candidate. All lanes of the SIMD-group take part; `seen` counts the
// ties before them.
inline u32 candidate(Cut cut, float v, thread u32& seen) {
    const u32 tied = v == cut.least ? 1 : 0;
    const u32 rank = seen + simd_prefix_exclusive_sum(tied);
    seen += simd_sum(tied);
    return v > cut.least || (tied != 0 && rank < cut.ties) ? 1 : 0;
}

// The logits of a row that a token is drawn from, and the rule of their weights.
struct Candidates {
    device const float* x;
    u32 n;
    // The largest logit, whose weight is 1.
    float largest;
    float inverse;
    Cut cut;
    // Lighter candidates have no weight.
    float lightest;
    // The sum of all weights is below 2^63 units of 2^-bits.
    u32 bits;
};

inline u64 units_of(thread const Candidates& c, float v) {
    const float weight = exponential((v - c.largest) * c.inverse);
    return weight < c.lightest ? 0 : units_of(weight, c.bits);
}

// The units of the logit at `at`, or none from `last` on. All lanes of the SIMD-group take part.
inline u64 units_at(thread const Candidates& c, u32 at, u32 last, thread u32& seen) {
    const float v = at < last ? c.x[at] : not_a_number();
    return candidate(c.cut, v, seen) != 0 ? units_of(c, v) : 0;
}

// Cuts the candidates to the smallest number of the largest ones whose weights reach `part` of the
// sum. The search takes two bits of the key at a time, the highest first.
inline void cut_to(thread Candidates& c, float part, Draw room, Place at) {
    const u32 simds = at.count / SIMD, least = key_of(c.cut.least);
    u64 need = 0;
    u32 prefix = 0;
    for (int shift = 30; shift >= 0; shift -= 2) {
        const u32 known = shift == 30 ? 0 : ~0u << (shift + 2);
        u64 mine[4] = {0, 0, 0, 0};
        for (u32 i = at.index; i < c.n; i += at.count) {
            const float v = c.x[i];
            const u32 key = key_of(v);
            // A NaN is not above.
            if (v > c.cut.least && (key & known) == prefix) {
                const u64 units = units_of(c, v);
                for (u32 d = 0; d < 4; ++d) mine[d] += ((key >> shift) & 3u) == d ? units : 0;
            }
        }
        if (at.index == 0 && (least & known) == prefix) {
            // The ties have equal weights.
            const u64 units = c.cut.ties * units_of(c, c.cut.least);
            for (u32 d = 0; d < 4; ++d) mine[d] += ((least >> shift) & 3u) == d ? units : 0;
        }
        for (u32 d = 0; d < 4; ++d) {
            const u64 sum = simd_total(mine[d]);
            if (at.lane == 0) room.sums[at.simd * 4 + d] = sum;
        }
        group_barrier();
        if (shift == 30) {
            u64 total = 0;
            for (u32 s = 0; s < 4 * simds; ++s) total += room.sums[s];
            need = fraction_of(total, u64(part * 4294967296.0f));
            need = need == 0 ? 1 : need;
        }
        u32 digit = 4;
        u64 here = 0;
        do {
            need -= here;
            here = 0;
            --digit;
            for (u32 s = 0; s < simds; ++s) here += room.sums[s * 4 + digit];
        } while (digit > 0 && here < need);
        group_barrier();
        prefix |= digit << shift;
    }
    c.cut.least = float_of(prefix);
    const u64 each = units_of(c, c.cut.least);
    c.cut.ties = each == 0 ? 1 : u32((need + each - 1) / each);
}

// Draws a token and returns it to every thread. Each SIMD-group processes a part of the logits, in
// the order of ids.
inline u32 draw(SamplingRecord r, device const float* x, u32 n, Best best, i32 position, Draw room, Place at) {
    const u32 simds = at.count / SIMD;
    const float inverse = 1.0f / r.temperature;
    if (!(best.value < infinity() && best.value > -infinity())) return best.index;
    if (!(inverse > 0.0f && inverse < infinity())) return best.index;
    Candidates c = {x, n, best.value, inverse, {-infinity(), n}, 0.0f, 31 + clz(n)};
    if (r.top_k != 0 && r.top_k < n) c.cut = threshold(x, n, r.top_k, room, at);
    if (r.top_p > 0.0f && r.top_p < 1.0f) cut_to(c, r.top_p, room, at);
    if (r.min_p > 0.0f && r.min_p <= 1.0f) c.lightest = r.min_p;
    const Part part = part_of(x, n, c.cut, room, at);
    // The weight of its candidates.
    u64 weight = 0;
    u32 seen = part.ties;
    for (u32 i = part.first; i < part.last; i += SIMD) weight += units_at(c, i + at.lane, part.last, seen);
    weight = simd_total(weight);
    if (at.lane == 0) room.sums[at.simd] = weight;
    if (at.index == 0) *room.chosen = best.index;
    group_barrier();
    u64 total = 0;
    for (u32 s = 0; s < simds; ++s) total += room.sums[s];
    // The random fraction of the total, rounded down. The first candidate whose sum exceeds it is
    // drawn.
    const u64 target = fraction_of(total, philox(r.seed[0], r.seed[1], u64(position)));
    u64 sum = 0;
    u32 owner = 0;
    while (owner + 1 < simds && sum + room.sums[owner] <= target) sum += room.sums[owner++];
    if (at.simd == owner) {
        seen = part.ties;
        for (u32 i = part.first; i < part.last; i += SIMD) {
            const u64 own = units_at(c, i + at.lane, part.last, seen);
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

// Writes the log-probabilities of a token and of the `wanted` largest logits.
inline void log_probabilities_of(device const float* x, u32 n, float largest, u32 token, u32 wanted,
                                 device LogProbabilities* to, Draw room, Place at) {
    const Bests found = room.bests;
    threadgroup u32* count = room.chosen;
    wanted = min(wanted, MAX_LOGS);
    Cut cut = {-infinity(), n};
    if (wanted < n) cut = threshold(x, n, wanted, room, at);
    const u32 bits = 31 + clz(n);
    u64 sum = 0;
    for (u32 i = at.index; i < n; i += at.count) sum += units_of(exponential(x[i] - largest), bits);
    sum = simd_total(sum);
    if (at.lane == 0) room.sums[at.simd] = sum;
    // The candidates are the wanted ones; `place` is the number of those before a lane's.
    const Part part = part_of(x, n, cut, room, at);
    u32 seen = part.ties, before = part.candidates;
    for (u32 i = part.first; i < part.last; i += SIMD) {
        const float v = i + at.lane < part.last ? x[i + at.lane] : not_a_number();
        const u32 one = candidate(cut, v, seen);
        const u32 place = before + simd_prefix_exclusive_sum(one);
        before += simd_sum(one);
        if (one != 0 && place < MAX_LOGS) {
            found.values[place] = v;
            found.indices[place] = i + at.lane;
        }
    }
    // The last SIMD-group has counted all.
    if (at.index == at.count - 1) *count = min(before, MAX_LOGS);
    group_barrier();
    u64 total = 0;
    for (u32 s = 0; s < at.count / SIMD; ++s) total += room.sums[s];
    const float log_sum = log(float(total) * as_type<float>((127 - bits) << 23));
    if (at.index < MAX_LOGS) {
        // Entries behind the ranks have no logit.
        u32 rank = at.index;
        i32 id = -1;
        float value = not_a_number();
        if (at.index < *count) {
            const Best own = {found.values[at.index], found.indices[at.index]};
            rank = 0;
            for (u32 i = 0; i < *count; ++i) {
                const float v = found.values[i];
                rank += v > own.value || (v == own.value && found.indices[i] < own.index) ? 1 : 0;
            }
            id = i32(own.index);
            value = (own.value - largest) - log_sum;
        }
        to->ids[rank] = id;
        to->values[rank] = value;
    }
    if (at.index == 0) to->chosen = token < n ? (x[token] - largest) - log_sum : not_a_number();
}

// Advances the position by `step` and appends the token to the ring.
inline void step_on(device u8* position, u32 step, device u8* ring, u32 size, device u8* count, i32 token) {
    device u32* at = (device u32*)position;
    *at = *at + step;
    const u32 n = *(device u32*)count;
    if (size != 0) ((device i32*)ring)[n % size] = token;
    *(device u32*)count = n + 1;
}

[[max_total_threads_per_threadgroup(32)]]
kernel void advance(device const u8* token [[buffer(0)]], device u8* position [[buffer(1)]],
                    device u8* ring [[buffer(2)]], device u8* count [[buffer(3)]],
                    constant AdvanceParams& p [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
                    uint index [[thread_index_in_threadgroup]]) {
    const u64 row = group.x;
    if (index != 0 || ((device const i32*)position)[row] < 0) return;
    step_on(position + 4 * row, p.step, ring + 4 * row * p.ring, p.ring, count + 4 * row,
            ((device const i32*)token)[row]);
}

// A thread has words of both sets, and the logits of their bits.
[[max_total_threads_per_threadgroup(256)]]
kernel void penalise(device u8* logits [[buffer(0)]], device const u8* penalties [[buffer(1)]],
                     device const u8* token [[buffer(2)]], device const u8* position [[buffer(3)]],
                     device u8* seen [[buffer(4)]], device const u8* banned [[buffer(5)]],
                     constant RowParams& p [[buffer(6)]], uint3 group [[threadgroup_position_in_grid]],
                     uint3 threads [[threads_per_threadgroup]], uint index [[thread_index_in_threadgroup]]) {
    const u64 row = group.x;
    if (((device const i32*)position)[row] < 0) return;
    const float penalty = ((device const float*)penalties)[row], most = as_type<float>(0x7f7fffffu);
    const bool penalised = penalty > 0.0f && penalty <= most;
    const i32 id = ((device const i32*)token)[row];
    const u32 words = (p.n - 1) / 32 + 1;
    device float* x = (device float*)logits + row * p.ldx;
    for (u32 w = index; w < words; w += threads.x) {
        device u32* own = (device u32*)seen + row * words + w;
        u32 bits = *own;
        if (id >= 0 && u32(id) / 32 == w) {
            bits |= 1u << (u32(id) % 32);
            *own = bits;
        }
        const u32 never = ((device const u32*)banned)[row * words + w], any = bits | never;
        if (any == 0) continue;
        for (u32 b = 0; b < 32 && 32 * w + b < p.n; ++b) {
            if (((any >> b) & 1) == 0) continue;
            float v = x[32 * w + b];
            if (penalised && ((bits >> b) & 1) != 0) v = v > 0.0f ? v / penalty : v * penalty;
            x[32 * w + b] = ((never >> b) & 1) != 0 ? -most : v;
        }
    }
}

[[max_total_threads_per_threadgroup(1024)]]
kernel void next_token(device const u8* logits [[buffer(0)]], device const u8* sampling [[buffer(1)]],
                       device u8* token [[buffer(2)]], device u8* position [[buffer(3)]],
                       device u8* ring [[buffer(4)]], device u8* count [[buffer(5)]],
                       device u8* log_probabilities [[buffer(6)]], constant NextTokenParams& p [[buffer(7)]],
                       uint3 group [[threadgroup_position_in_grid]], uint3 threads [[threads_per_threadgroup]],
                       uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                       uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float values[MAX_SIMDS];
    threadgroup u32 indices[MAX_SIMDS];
    threadgroup u32 counts[MAX_SIMDS * 16];
    threadgroup u32 ties[MAX_SIMDS];
    threadgroup u32 above[MAX_SIMDS];
    threadgroup u64 sums[MAX_SIMDS * 4];
    threadgroup u32 chosen[1];
    const Bests bests = {values, indices};
    const Draw room = {bests, counts, ties, above, sums, chosen};
    const Place at = {index, threads.x, lane, simd};
    const u64 row = group.x;
    const i32 place = ((device const i32*)position)[row];
    // An idle row.
    if (place < 0) return;
    device const SamplingRecord* own = (device const SamplingRecord*)sampling + row;
    const SamplingRecord r = {own->temperature, own->top_k, own->top_p, own->min_p, {own->seed[0], own->seed[1]},
                              own->log_probabilities, own->reserved};
    const u64 from = row * p.ld;
    device const float* x = (device const float*)logits + from;
    const Best best = group_best(0, logits, from, p.n, bests, at);
    const u32 id = draw(r, x, p.n, best, place, room, at);
    if (r.log_probabilities != 0 && p.log_ring != 0) {
        const u64 entry = row * p.log_ring + ((device const u32*)count)[row] % p.log_ring;
        device LogProbabilities* to = (device LogProbabilities*)log_probabilities + entry;
        // All threads have the token.
        group_barrier();
        log_probabilities_of(x, p.n, best.value, id, r.log_probabilities, to, room, at);
    }
    // All threads have read the words.
    group_barrier();
    if (index == 0) {
        ((device i32*)token)[row] = i32(id);
        step_on(position + 4 * row, 1, ring + 4 * row * p.ring, p.ring, count + 4 * row, i32(id));
    }
}
