// The check of values: where an element is NaN or infinite.

typedef unsigned short u16;

static constexpr u64 NOWHERE = ~0ull;

// The first of a thread's elements whose bits have all of `mask`.
template <class T> INLINE u64 first_of(const void* x, u64 from, u64 to, T mask) {
    const T* elements = (const T*)x;
    u64 first = NOWHERE;
    // Without an early end, so that several reads are under way at a time.
#pragma unroll 4
    for (u64 i = from + threadIdx.x; i < to; i += blockDim.x) {
        if ((elements[i] & mask) == mask) first = smaller(first, i);
    }
    return first;
}

// A block has a part of the elements.
KERNEL(256) not_finite(const void* x, void* found, NotFiniteParams p) {
    begin();
    __shared__ u64 firsts[256];
    const u64 count = (u64)p.count[0] | ((u64)p.count[1] << 32), length = (count - 1) / gridDim.x + 1;
    const u64 from = smaller(blockIdx.x * length, count), to = smaller(from + length, count);
    u64 first;
    if (p.width == 2) first = first_of<u16>(x, from, to, (u16)p.exponent);
    else if (p.width == 4) first = first_of<u32>(x, from, to, p.exponent);
    else first = first_of<u64>(x, from, to, (u64)p.exponent << 32);
    firsts[threadIdx.x] = first;
    __syncthreads();
    for (u32 half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) firsts[threadIdx.x] = smaller(firsts[threadIdx.x], firsts[threadIdx.x + half]);
        __syncthreads();
    }
    if (threadIdx.x != 0) return;
    first = firsts[0];
    u64 bits = 0;
    if (first != NOWHERE) {
        if (p.width == 2) bits = ((const u16*)x)[first];
        else if (p.width == 4) bits = ((const u32*)x)[first];
        else bits = ((const u64*)x)[first];
    }
    u32* words = (u32*)found + 4 * (u64)blockIdx.x;
    words[0] = (u32)first;
    words[1] = (u32)(first >> 32);
    words[2] = (u32)bits;
    words[3] = (u32)(bits >> 32);
}
