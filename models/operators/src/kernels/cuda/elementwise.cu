// Element-wise kernels: sums, products, SiLU·mul, casts; also fills and strided copies of bytes.

static constexpr u32 THREADS = 256;
// Elements, or 16-byte units, of a row that a block processes at once.
static constexpr u32 PIECE = 4 * THREADS;

// Calls `f(row, first, length)` for this block's pieces of `rows` rows of `width`.
template <class F> INLINE void pieces(u32 rows, u32 width, u32 piece, F f) {
    u32 across = (width - 1) / piece + 1;
    u64 all = (u64)rows * across;
    for (u64 i = blockIdx.x; i < all; i += gridDim.x) {
        u32 row = (u32)(i / across), first = (u32)(i % across) * piece;
        f(row, first, smaller(piece, width - first));
    }
}

// y = f(a, b). y may be one of the inputs, because one thread reads and writes an element.
template <class F>
INLINE void binary(const ElementwiseParams& p, const void* a, const void* b, void* y, F f) {
    // Rows without gaps are one. A thread takes eight elements, so that more bytes are under way.
    const u64 all = (u64)p.rows * p.k;
    const bool dense = p.ld[0] == p.k && p.ld[1] == p.k && p.ld[2] == p.k;
    if (dense && p.x == p.y && all % 8 == 0 && (address(a) | address(b) | address(y)) % 16 == 0) {
        const u64 step = (u64)gridDim.x * THREADS * 8;
        for (u64 i = ((u64)blockIdx.x * THREADS + threadIdx.x) * 8; i < all; i += step) {
            float va[8], vb[8];
            load(p.x, a, i, va);
            load(p.x, b, i, vb);
#pragma unroll
            for (int e = 0; e < 8; ++e) va[e] = f(va[e], vb[e]);
            store(p.y, y, i, va);
        }
        return;
    }
    bool wide = by_four(p.x, a, p.ld[0]) && by_four(p.x, b, p.ld[1]) && by_four(p.y, y, p.ld[2]);
    pieces(p.rows, p.k, PIECE, [&](u32 row, u32 first, u32 length) {
        along(length, wide, [&](u32 i, auto step) {
            float va[step.n], vb[step.n];
            load(p.x, a, (u64)row * p.ld[0] + first + i, va);
            load(p.x, b, (u64)row * p.ld[1] + first + i, vb);
#pragma unroll
            for (int e = 0; e < step.n; ++e) va[e] = f(va[e], vb[e]);
            store(p.y, y, (u64)row * p.ld[2] + first + i, va);
        });
    });
}

KERNEL(256) add(const void* a, const void* b, void* y, ElementwiseParams p) {
    begin();
    binary(p, a, b, y, [](float a, float b) { return a + b; });
}

KERNEL(256) mul(const void* a, const void* b, void* y, ElementwiseParams p) {
    begin();
    binary(p, a, b, y, [](float a, float b) { return a * b; });
}

KERNEL(256) silu_mul(const void* a, const void* b, void* y, ElementwiseParams p) {
    begin();
    binary(p, a, b, y, [](float a, float b) { return silu(a) * b; });
}

KERNEL(256) cast(const void* x, void* y, ElementwiseParams p) {
    begin();
    bool wide = by_four(p.x, x, p.ld[0]) && by_four(p.y, y, p.ld[1]);
    pieces(p.rows, p.k, PIECE, [&](u32 row, u32 first, u32 length) {
        along(length, wide, [&](u32 i, auto step) {
            float v[step.n];
            load(p.x, x, (u64)row * p.ld[0] + first + i, v);
            store(p.y, y, (u64)row * p.ld[1] + first + i, v);
        });
    });
}

// The range may begin at any address: bytes before the first and after the last multiple of 16 are
// written one by one.
KERNEL(256) fill(void* y, FillParams p) {
    begin();
    u64 bytes = (u64)p.bytes[0] | ((u64)p.bytes[1] << 32);
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    u32 word = p.pattern;
    if (p.width == 1) word = (word & 0xffu) * 0x01010101u;
    if (p.width == 2) word = (word & 0xffffu) * 0x00010001u;
    u64 head = smaller((16 - address(y) % 16) % 16, bytes), whole = (bytes - head) / 16;
    // The pattern from the first multiple of 16 on.
    u32 turn = 8 * (u32)(head % 4);
    u32 turned = turn == 0 ? word : (word >> turn) | (word << (32 - turn));
    u8* to = (u8*)y;
    uint4* body = (uint4*)(to + head);
    for (u64 i = thread; i < whole; i += threads) body[i] = make_uint4(turned, turned, turned, turned);
    u64 tail = head + 16 * whole;
    for (u64 i = thread; i < head; i += threads) to[i] = (u8)(word >> (8 * (i % 4)));
    for (u64 i = tail + thread; i < bytes; i += threads) to[i] = (u8)(word >> (8 * (i % 4)));
}

// `unit` (16, 4 or 1 bytes) divides all addresses, pitches and sizes.
template <class T> INLINE void copy_units(const CopyParams& p, const void* from, void* to) {
    const u32 unit = (u32)sizeof(T);
    pieces(p.rows, p.bytes / unit, PIECE, [&](u32 row, u32 first, u32 length) {
        const T* f = (const T*)((const u8*)from + (u64)row * p.from_pitch) + first;
        T* t = (T*)((u8*)to + (u64)row * p.to_pitch) + first;
        for (u32 i = threadIdx.x; i < length; i += blockDim.x) t[i] = f[i];
    });
}

KERNEL(256) copy_2d(const void* from, void* to, CopyParams p) {
    begin();
    u64 all = address(from) | address(to) | p.from_pitch | p.to_pitch | p.bytes;
    if (all % 16 == 0) copy_units<uint4>(p, from, to);
    else if (all % 4 == 0) copy_units<u32>(p, from, to);
    else copy_units<u8>(p, from, to);
}
