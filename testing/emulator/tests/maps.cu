// Kernels for Hopper with tensor maps and bulk copies, by inline PTX. The emulator's tests run them, and `ci/ptx.sh` compiles them with
// NVIDIA's compiler.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef LEASEHOLD_EMULATED
struct __align__(64) CUtensorMap {
    u64 opaque[16];
};
#else
#include <cuda.h>
#include <cudaTypedefs.h>
#endif

static __device__ u32 shared(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// ---- mbarriers

static __device__ void init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(barrier)), "r"(count) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
static __device__ void expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared(barrier)), "r"(bytes) : "memory");
}
static __device__ u64 arrive(u64* barrier) {
    u64 state;
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];\n" : "=l"(state) : "r"(shared(barrier)) : "memory");
    return state;
}
// The usual loop of PTX.
static __device__ void wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n\t"
        ".reg .pred P1;\n\t"
        "LAB_WAIT:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1;  // a limit of time\n\t"
        "@P1 bra DONE;\n\t"
        "bra LAB_WAIT;\n\t"
        "DONE:\n\t"
        "}" ::"r"(shared(barrier)), "r"(parity) : "memory");
}
static __device__ bool test(u64* barrier, u64 state) {
    u32 over;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                 : "=r"(over) : "r"(shared(barrier)), "l"(state) : "memory");
    return over;
}

// ---- Boxes of one to five dimensions, to and from shared memory

extern __shared__ __align__(1024) u8 memory[];

#define LOAD(N, PLACE)                                                                                                           \
    asm volatile("cp.async.bulk.tensor." #N "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {" PLACE "}], [%2];" \
                 ::"r"(shared(memory + offset)), "l"(&map), "r"(shared(&full)), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4]) : "memory")
#define STORE(N, PLACE)                                                                                    \
    asm volatile("cp.async.bulk.tensor." #N "d.global.shared::cta.bulk_group [%0, {" PLACE "}], [%1];"      \
                 ::"l"(&map), "r"(shared(memory + offset)), "r"(0), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4]) : "memory")
#define RANKS(DO)                                                \
    switch (rank) {                                              \
        case 1: DO(1, "%3"); break;                              \
        case 2: DO(2, "%3, %4"); break;                          \
        case 3: DO(3, "%3, %4, %5"); break;                      \
        case 4: DO(4, "%3, %4, %5, %6"); break;                  \
        default: DO(5, "%3, %4, %5, %6, %7");                    \
    }

struct Where {
    int c[5];
    u32 rank, offset, bytes, total;
};

// Copies a box to shared memory, and all of the shared memory to `out`.
extern "C" __global__ void load_box(u8* out, const u8*, const __grid_constant__ CUtensorMap map, Where where) {
    __shared__ u64 full;
    const u32 rank = where.rank, offset = where.offset;
    const int* c = where.c;
    for (u32 i = threadIdx.x; i < where.total; i += blockDim.x) memory[i] = 0xee;
    if (threadIdx.x == 0) {
        init(&full, 1);
        asm volatile("prefetch.tensormap [%0];" ::"l"(&map));
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        expect(&full, where.bytes);
        RANKS(LOAD)
    }
#ifndef NO_WAIT
    wait(&full, 0);
#endif
    for (u32 i = threadIdx.x; i < where.total; i += blockDim.x) out[i] = memory[i];
}

// Copies all of `in` to shared memory, and a box of that to the tensor.
extern "C" __global__ void store_box(u8*, const u8* in, const __grid_constant__ CUtensorMap map, Where where) {
    const u32 rank = where.rank, offset = where.offset;
    const int* c = where.c;
    for (u32 i = threadIdx.x; i < where.total; i += blockDim.x) memory[i] = in[i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        RANKS(STORE)
        asm volatile("cp.async.bulk.commit_group;");
        asm volatile("cp.async.bulk.wait_group %0;" ::"n"(0) : "memory");
    }
}

// ---- A transpose by boxes of 32 rows of 128 bytes

struct Maps {
    CUtensorMap from, to;
    float by;
};

extern "C" __global__ void transpose_boxes(float*, const float*, const __grid_constant__ Maps maps) {
    __shared__ __align__(1024) float in[32 * 32];
    __shared__ __align__(128) float out[32 * 32];
    __shared__ u64 full;
    const int column = blockIdx.x * 32, row = blockIdx.y * 32;
    if (threadIdx.x == 0) init(&full, 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        expect(&full, sizeof(in));
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
                     ::"r"(shared(in)), "l"(&maps.from), "r"(column), "r"(row), "r"(shared(&full)), "l"(0x12F0000000000000ull) : "memory");
    }
    wait(&full, 0);
    for (u32 i = threadIdx.x; i < 32 * 32; i += blockDim.x) {
        // The box is swizzled by pieces of four numbers.
        const u32 r = i % 32, c = i / 32;
        out[i] = maps.by * in[r * 32 + ((c / 4 ^ r % 8) * 4 + c % 4)];
    }
#ifndef NO_PROXY_FENCE
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                     ::"l"(&maps.to), "r"(row), "r"(column), "r"(shared(out)) : "memory");
        asm volatile("cp.async.bulk.commit_group;");
#ifndef NO_READ_WAIT
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
    }
#ifdef OVERWRITTEN
    __syncthreads();
    out[threadIdx.x] = 0.1f;
#endif
}

// ---- A pipeline of copies without maps

// A warp fills two stages, the others add up. Each of `parts` has 1,024 bytes.
extern "C" __global__ void pipeline(u32* sums, const u32* in, u32 parts) {
    __shared__ __align__(16) u32 stages[2][256];
    __shared__ u64 full[2], empty[2];
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < 2; ++s) init(&full[s], 1), init(&empty[s], 2);
    }
    __syncthreads();
    const u32 warp = threadIdx.x / 32;
    if (warp == 2) {
        u32 leads;
        asm volatile("{ .reg .pred %%px; .reg .b32 %%rx; elect.sync %%rx|%%px, %1; selp.u32 %0, 1, 0, %%px; }" : "=r"(leads) : "r"(0xffffffff));
        if (!leads) return;
        for (u32 i = 0; i < parts; ++i) {
            const u32 s = i % 2, round = i / 2;
#ifndef NO_EMPTY
            wait(&empty[s], round & 1 ^ 1);
#endif
            expect(&full[s], 1024);
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         ::"r"(shared(stages[s])), "l"(in + i * 256), "r"(1024), "r"(shared(&full[s])) : "memory");
        }
        return;
    }
    u32 sum = 0;
    for (u32 i = 0; i < parts; ++i) {
        const u32 s = i % 2;
#ifndef NO_FULL
        wait(&full[s], i / 2 & 1);
#endif
        for (u32 n = 0; n < 4; ++n) sum += stages[s][threadIdx.x + n * 64];
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&empty[s]);
    }
    sums[threadIdx.x] = sum;
}

// Copies by way of shared memory, without a map.
extern "C" __global__ void through(u32* to, const u32* from, u32 bytes) {
    __shared__ u64 full;
    if (threadIdx.x == 0) init(&full, blockDim.x);
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared(&full)), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(shared(memory)), "l"(from), "r"(bytes), "r"(shared(&full)) : "memory");
    }
    const u64 state = arrive(&full);
    while (!test(&full, state)) {
    }
    if (threadIdx.x == blockDim.x - 1) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared(memory)), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group 0;" ::: "memory");
        to[0] += 1;
    }
}

// ---- A box for all blocks of a cluster

// Every block copies one row of 128 bytes to all of them.
extern "C" __global__ void __cluster_dims__(4, 1, 1) multicast(u32* out, const u32*, const __grid_constant__ CUtensorMap map) {
    __shared__ __align__(128) u32 rows[4][32];
    __shared__ u64 full, read;
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) {
        init(&full, 1);
        init(&read, 4);
        expect(&full, sizeof(rows));
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                     ::"r"(shared(rows[rank])), "l"(&map), "r"(0), "r"(blockIdx.x), "r"(shared(&full)), "h"((unsigned short)0xf) : "memory");
    }
    wait(&full, 0);
    for (u32 r = 0; r < 4; ++r) out[(blockIdx.x * 4 + r) * 32 + threadIdx.x] = rows[r][threadIdx.x];
    __syncwarp();
    // No block ends before all have read.
    if (threadIdx.x < 4) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            ".reg .b32 remote;\n"
            "setp.eq.u32 p, %2, 1;\n"
            "@p mapa.shared::cluster.u32 remote, %0, %1;\n"
            "@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
            "}" ::"r"(shared(&read)), "r"(threadIdx.x), "r"(1) : "memory");
    }
    wait(&read, 0);
}
