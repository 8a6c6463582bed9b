// What kernels on tensor cores share: the instructions, which compute capability 8.0 and later have, and
// what these kernels do with rows of fragments and with matrices of weights. The compiling code prepends
// it, behind the common part, to the files that need that capability.

// ---- Matrix fragments of a warp. Lane l holds, of each 8 by 8 matrix, the elements 2 (l % 4) and
// 2 (l % 4) + 1 of row l / 4.

#ifndef LEASEHOLD_EMULATED
// Four 8 by 8 matrices of shared memory; lane l names row l % 8 of matrix l / 8.
INLINE void matrices(u32 (&to)[4], const u16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(__cvta_generic_to_shared(row))
                 : "memory");
}

// The same, transposed.
INLINE void transposed(u32 (&to)[4], const u16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(__cvta_generic_to_shared(row))
                 : "memory");
}

// sum += a b, of 16 by 16 and 16 by 8 elements.
INLINE void multiply(Bf16, float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
INLINE void multiply(F16, float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two numbers of the type in a word, the first in the low half.
INLINE u32 narrowed(Bf16, float first, float second) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}
INLINE u32 narrowed(F16, float first, float second) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

// Starts a copy of 16 bytes to shared memory.
INLINE void start_copy(u16* to, const u16* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"l"(__cvta_generic_to_shared(to)), "l"(from) : "memory");
}

// Ends a group of copies.
INLINE void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `N` groups of this thread's copies are under way.
template <int N> INLINE void wait_for_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
#else
INLINE void fragments(u32 (&to)[4], const u16* row, bool turned) {
    const u32 lane = thread_index() % WARP, of = lane / 4, first = 2 * (lane % 4);
    const u16* rows[WARP];
    emulator::exchange(row, rows);
    for (u32 i = 0; i < 4; ++i) {
        const u16* const* m = rows + 8 * i;
        const u16 low = turned ? m[first][of] : m[of][first], high = turned ? m[first + 1][of] : m[of][first + 1];
        to[i] = (u32)low | ((u32)high << 16);
    }
}
INLINE void matrices(u32 (&to)[4], const u16* row) { fragments(to, row, false); }
INLINE void transposed(u32 (&to)[4], const u16* row) { fragments(to, row, true); }

// These two access values of the lane alone.
template <class T> EMULATOR_UNSEEN INLINE float element(u32 word, u32 i) { return T::widen((u16)(word >> (16 * i))); }

template <class T> EMULATOR_UNSEEN INLINE void multiply(T, float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    u64 left[2][WARP], right[WARP];
    emulator::exchange((u64)a[0] | ((u64)a[1] << 32), left[0]);
    emulator::exchange((u64)a[2] | ((u64)a[3] << 32), left[1]);
    emulator::exchange((u64)b0 | ((u64)b1 << 32), right);
    const u32 lane = thread_index() % WARP;
    // Two rows and two columns.
    float x[2][16], y[2][16];
    for (u32 i = 0; i < 2; ++i) {
        for (u32 k = 0; k < 16; ++k) {
            const u32 part = k / 8, at = k % 8 / 2, odd = k % 2;
            x[i][k] = element<T>((u32)(left[part][lane / 4 * 4 + at] >> (32 * i)), odd);
            y[i][k] = element<T>((u32)(right[(2 * (lane % 4) + i) * 4 + at] >> (32 * part)), odd);
        }
    }
    // A product of two elements is exact.
    for (u32 i = 0; i < 4; ++i) {
        for (u32 k = 0; k < 16; ++k) sum[i] += x[i / 2][k] * y[i % 2][k];
    }
}

template <class T> INLINE u32 narrowed(T, float first, float second) {
    return (u32)T::narrow(first) | ((u32)T::narrow(second) << 16);
}
INLINE void start_copy(u16* to, const u16* from) { memcpy(to, from, 16); }
INLINE void end_group() {}
template <int N> INLINE void wait_for_groups() {}
#endif

// The largest value and the sum over the four lanes that hold one row.
INLINE float row_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(ALL, v, 1));
    return fmaxf(v, __shfl_xor_sync(ALL, v, 2));
}
INLINE float row_sum(float v) {
    v += __shfl_xor_sync(ALL, v, 1);
    return v + __shfl_xor_sync(ALL, v, 2);
}

// ---- Matrix products

// Flag: a bias is added to each product.
static constexpr u32 BIAS = 2;

// The matrix of block `index` of those of all matrices, and the block's number in it. A block has
// `OUTPUTS` outputs.
template <u32 OUTPUTS, int G, int MATRICES> INLINE Output<G> find(const Output<G> (&outputs)[MATRICES], u32& index) {
    Output<G> o = outputs[0];
    u32 behind = (o.n - 1) / OUTPUTS + 1;
#pragma unroll
    for (int i = 1; i < MATRICES; ++i) {
        if (index >= behind) {
            o = outputs[i];
            index -= behind;
            behind = (o.n - 1) / OUTPUTS + 1;
        } else {
            behind = ~0u;
        }
    }
    return o;
}

// Whether the launch's word, bit i for operand i, lets the kernel read all matrices of weights before
// `wait_for_previous`. `WEIGHTS` are their bits.
template <u32 WEIGHTS> INLINE bool has(u32 early) { return (early & WEIGHTS) == WEIGHTS; }

// Adds the sets of sums in `sums`, `set` elements apart, and finishes outputs from row `first_m` and
// output `first_n` on: `rows` rows, `pitch` elements apart, of `wide` outputs each. The second sums of a
// gated product are `up` elements behind the first ones. A block has `THREADS` threads.
template <class T, u32 THREADS, u32 SETS, int G, Finish HOW>
INLINE void finish(const LinearParams& p, const Output<G>& o, const float* sums, u32 set, u32 pitch, u32 up, u32 first_m,
                   u32 rows, u32 first_n, u32 wide) {
    const bool pairs = p.y != 0 && address(o.y) % 4 == 0 && o.ldy % 2 == 0;
#pragma unroll 1
    for (u32 i = 2 * thread_index(); i < rows * wide; i += 2 * THREADS) {
        const u32 m = first_m + i / wide, n = first_n + i % wide;
        if (m >= p.m || n >= o.n) continue;
        const float* from = sums + i / wide * pitch + i % wide;
        const u32 count = smaller(o.n - n, 2u);
        const u64 at = (u64)m * o.ldy + n;
        float y[2] = {0.0f, 0.0f}, old[2];
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
            if (e >= count) break;
            float sum[G];
#pragma unroll
            for (int g = 0; g < G; ++g) {
                sum[g] = 0.0f;
#pragma unroll
                for (u32 k = 0; k < SETS; ++k) sum[g] += from[k * set + g * up + e];
                if (p.flags & BIAS) sum[g] += load_one(p.vector, o.bias[g], n + e);
            }
            y[e] = HOW == GATE ? silu(sum[0]) * sum[G - 1] : sum[0];
        }
        if (pairs && count == 2) {
            u32* const to = (u32*)((u16*)o.y + at);
            if (HOW == ADD_TO) {
                T::unpack(*to, old);
                y[0] += old[0];
                y[1] += old[1];
            }
            *to = narrowed(T(), y[0], y[1]);
            continue;
        }
#pragma unroll
        for (u32 e = 0; e < 2; ++e) {
            if (e >= count) break;
            if (HOW == ADD_TO) y[e] += load_one(p.y, o.y, at + e);
            store_one(p.y, o.y, at + e, y[e]);
        }
    }
}
