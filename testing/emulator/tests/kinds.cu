// Kernels as users of CUDA C++ write them. The emulator's tests run them, and `ci/ptx.sh` compiles them with NVIDIA's compiler.

extern "C" __global__ void __launch_bounds__(128)
add(float* __restrict__ z, const float* __restrict__ x, const float* __restrict__ y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) z[i] = x[i] + __ldg(&y[i]);
}

// ---- A reduction: a template, with shared memory and shuffles

#ifndef BARRIER
#define BARRIER __syncthreads()
#endif

template <class T, int THREADS> __device__ T block_sum(T v) {
    __shared__ T warps[THREADS / 32];
    for (int by = warpSize / 2; by > 0; by /= 2) v += __shfl_down_sync(0xffffffff, v, by);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    BARRIER;
    v = threadIdx.x < THREADS / 32 ? warps[threadIdx.x] : T(0);
    if (threadIdx.x < 32) {
        for (int by = 16; by > 0; by /= 2) v += __shfl_xor_sync(~0u, v, by);
    }
    return v;
}

template <class T, int THREADS> __global__ void reduce(T* out, const T* in, unsigned n) {
    T v = 0;
    for (unsigned i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS) v += in[i];
    v = block_sum<T, THREADS>(v);
    if (threadIdx.x == 0) atomicAdd(out, v);
}
template __global__ void reduce<int, 256>(int*, const int*, unsigned);
template __global__ void reduce<double, 128>(double*, const double*, unsigned);

// ---- Blocks of two dimensions, a structure as the parameters

struct Shape {
    int rows, cols;
    float by;
};

namespace tiles {
constexpr int TILE = 16;

static __device__ __forceinline__ int2 place(int2 block, int x, int y) {
    return make_int2(block.x * TILE + x, block.y * TILE + y);
}

extern "C" __global__ void transpose(float* out, const float* in, Shape s) {
    __shared__ float tile[TILE][TILE + 1];
    int2 at = place(make_int2(blockIdx.x, blockIdx.y), threadIdx.x, threadIdx.y);
    if (at.x < s.cols && at.y < s.rows) tile[threadIdx.y][threadIdx.x] = in[at.y * s.cols + at.x];
    __syncthreads();
    at = place(make_int2(blockIdx.y, blockIdx.x), threadIdx.x, threadIdx.y);
    if (at.x < s.rows && at.y < s.cols) out[at.y * s.rows + at.x] = s.by * tile[threadIdx.x][threadIdx.y];
}
}  // namespace tiles

// ---- Dynamic shared memory, under two names

extern __shared__ unsigned bins[];

extern "C" __global__ void histogram(unsigned* out, const unsigned char* in, int n, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) bins[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        atomicAdd(&bins[in[i] % count], 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) atomicAdd(out + i, bins[i]);
}

extern "C" __global__ void turn(int* x) {
    extern __shared__ __align__(16) int own[];
    own[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = own[blockDim.x - 1 - threadIdx.x];
}

// ---- Votes, shuffles and reductions of a warp

extern "C" __global__ void warp(unsigned* out) {
    const unsigned lane = threadIdx.x % 32;
    unsigned* own = out + threadIdx.x * 12;
    own[0] = __ballot_sync(~0u, lane % 3 == 0);
    own[1] = __any_sync(~0u, lane == 7) + 2 * __all_sync(~0u, lane < 32) + 4 * __all_sync(~0u, lane < 31);
    own[2] = __shfl_sync(~0u, lane * 10, 5);
    own[3] = __shfl_sync(~0u, lane, 1, 8);
    own[4] = __shfl_up_sync(~0u, lane, 3);
    own[5] = __shfl_down_sync(~0u, lane, 3, 16);
#if __CUDA_ARCH__ >= 800
    own[6] = __reduce_add_sync(~0u, lane);
#else
    own[6] = 496;
#endif
    own[7] = __match_any_sync(~0u, lane / 16);
    // The halves of a warp diverge.
    if (lane < 16) own[8] = __shfl_xor_sync(0x0000ffffu, lane, 1);
    else own[8] = (unsigned)__popc(__ballot_sync(0xffff0000u, lane & 1));
    __syncwarp();
    own[9] = (unsigned)__syncthreads_count(threadIdx.x < 20);
    own[10] = (unsigned)(__syncthreads_or(threadIdx.x == 40) + 2 * __syncthreads_and(threadIdx.x < 40));
    own[11] = (unsigned)__float2int_rn(__shfl_xor_sync(~0u, (float)lane + 0.25f, 31) * 4.0f);
}

// ---- Mathematics, vectors, constants, variables, atomic operations

__constant__ float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};
__device__ int counter;

extern "C" __global__ void all(float4* v, float* f, int* i, unsigned long long* wide) {
    float4 x = *v;
    *v = make_float4(x.x + table[0], x.y * table[1], fmaf(x.z, table[2], 1.0f), rsqrtf(x.w));
    f[0] = expf(0.0f) + sqrtf(16.0f) + fmaxf(1.0f, 2.0f) + powf(2.0f, 3.0f) + min(1.5f, 0.5f);
    f[1] = __int_as_float(__float_as_int(1.25f)) + floorf(1.9f) + fabsf(-2.0f) + __saturatef(3.0f);
    atomicExch(&f[2], 7.0f);
    i[0] = max(3, 5) + abs(-4) + __popc(255) + __clz(1) + __ffs(8) + (int)isnan(nanf(""));
    atomicMax(i + 1, 9);
    atomicMin(i + 2, -9);
    atomicSub(i + 3, 4);
    const int first = atomicCAS(i + 4, 0, 6), second = atomicCAS(i + 4, 6, 8);
    i[4] += first + second;
    atomicAdd(wide, 1ull << 40);
    wide[1] = __umul64hi(~0ull, 2);
    i[5] = ++counter;
    dim3 d(2, 3);
    i[6] = (int)(d.x * d.y * d.z) + __float2int_rz(-1.9f) + (int)__brev(1u << 31);
}

// ---- A cluster of blocks, which read and write each other's shared memory

#ifndef CLUSTER_BARRIER
#define CLUSTER_BARRIER __cluster_barrier_arrive(), __cluster_barrier_wait()
#endif

extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(64) cluster(int* out, int* sums, const int* in) {
    __shared__ int own[64];
    __shared__ int sum;
    const unsigned t = threadIdx.x, rank = __clusterRelativeBlockRank(), size = __clusterSizeInBlocks();
    own[t] = in[blockIdx.x * 64 + t];
    if (t == 0) sum = 0;
    CLUSTER_BARRIER;
    out[blockIdx.x * 64 + t] = ((int*)__cluster_map_shared_rank(own, (rank + 1) % size))[63 - t];
    atomicAdd((int*)__cluster_map_shared_rank(&sum, 0), own[t]);
    CLUSTER_BARRIER;
    if (rank == 0 && t == 0) sums[blockIdx.x / size] = sum;
}

// The last block writes what all have read.
extern "C" __global__ void __cluster_dims__(2) turns(int* x) {
    const int before = x[0];
    CLUSTER_BARRIER;
    if (__clusterRelativeBlockRank() == 1 && threadIdx.x == 0) x[0] = before + 1;
}
