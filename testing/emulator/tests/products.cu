// Products of a warpgroup (`wgmma`), by inline PTX. The emulator's tests run them beside what a device gave, and `ci/ptx.sh` compiles them with
// NVIDIA's compiler.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ u32 shared(const void* at) { return (u32)__cvta_generic_to_shared(at); }

extern __shared__ __align__(1024) u8 memory[];

#define FENCE asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define COMMIT asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define WAIT(N) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory")
#define PROXY asm volatile("fence.proxy.async.shared::cta;" ::: "memory")

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define SUMS_4 "{%0, %1, %2, %3}"
#define SUMS_16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"

// ---- One product, of what the host has put into shared memory

// Descriptors without their addresses, which are offsets in `memory`.
struct Of {
    u64 a, b;
    u32 offset_a, offset_b, adds, bytes;
};

// The word that describes a matrix.
static __device__ u64 described(u64 word, u32 offset) { return word | (shared(memory + offset) & 0x3ffff) >> 4; }

#define PRODUCT_32(NAME, KIND, SIGNS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(128) NAME(float* to, const u8* from, Of of) {                               \
        for (u32 i = threadIdx.x; i < of.bytes / 4; i += 128) ((u32*)memory)[i] = ((const u32*)from)[i];                     \
        PROXY;                                                                                                               \
        __syncthreads();                                                                                                     \
        float d[16];                                                                                                         \
        for (u32 i = 0; i < 16; ++i) d[i] = (float)(i + threadIdx.x);                                                        \
        FENCE;                                                                                                               \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32" KIND " " SUMS_16           \
                     ", %16, %17, p, " SIGNS "; }"                                                                           \
                     : SIXTEEN(0) : "l"(described(of.a, of.offset_a)), "l"(described(of.b, of.offset_b)), "r"(of.adds));     \
        COMMIT;                                                                                                              \
        WAIT(0);                                                                                                              \
        for (u32 i = 0; i < 16; ++i) to[threadIdx.x * 16 + i] = d[i];                                                        \
    }
PRODUCT_32(bf16_rows, "k16.f32.bf16.bf16", "1, 1, 0, 0")
PRODUCT_32(bf16_turned_a, "k16.f32.bf16.bf16", "1, 1, 1, 0")
PRODUCT_32(bf16_turned_b, "k16.f32.bf16.bf16", "1, -1, 0, 1")
PRODUCT_32(f16_turned, "k16.f32.f16.f16", "-1, 1, 1, 1")
PRODUCT_32(tf32_rows, "k8.f32.tf32.tf32", "-1, -1")

// The first matrix lies in registers, as `mma.sync` has it. It comes from the front of `from`: four words for each thread.
#define PRODUCT_8(NAME, KIND, SIGNS)                                                                                         \
    extern "C" __global__ void __launch_bounds__(128) NAME(float* to, const u8* from, Of of) {                               \
        for (u32 i = threadIdx.x; i < of.bytes / 4; i += 128) ((u32*)memory)[i] = ((const u32*)from)[i];                     \
        PROXY;                                                                                                               \
        __syncthreads();                                                                                                     \
        const u32* a = (const u32*)from + threadIdx.x * 4;                                                                   \
        float d[4] = {1.0f, 2.0f, 3.0f, 4.0f};                                                                               \
        FENCE;                                                                                                               \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8" KIND " " SUMS_4              \
                     ", {%4, %5, %6, %7}, %8, p, " SIGNS "; }"                                                               \
                     : FOUR(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(described(of.b, of.offset_b)), "r"(of.adds)); \
        COMMIT;                                                                                                              \
        WAIT(0);                                                                                                              \
        for (u32 i = 0; i < 4; ++i) to[threadIdx.x * 4 + i] = d[i];                                                          \
    }
PRODUCT_8(bf16_registers, "k16.f32.bf16.bf16", "1, 1, 0")
PRODUCT_8(f16_registers_turned, "k16.f32.f16.f16", "1, 1, 1")
PRODUCT_8(tf32_registers, "k8.f32.tf32.tf32", "1, 1")
