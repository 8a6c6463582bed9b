// Sums of rows. A block of a multiple of 32 threads, up to 1,024, takes a row.

__device__ float warp_sum(float v) {
    for (int by = 16; by > 0; by /= 2) v += __shfl_down_sync(0xffffffff, v, by);
    return v;
}

extern "C" __global__ void __launch_bounds__(1024)
row_sums(float* __restrict__ sums, const float* __restrict__ x, unsigned columns) {
    __shared__ float warps[32];
    const float* row = x + (size_t)blockIdx.x * columns;
    float v = 0.0f;
    for (unsigned i = threadIdx.x; i < columns; i += blockDim.x) v += row[i];
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    v = warp_sum(threadIdx.x < blockDim.x / 32 ? warps[threadIdx.x] : 0.0f);
    if (threadIdx.x == 0) sums[blockIdx.x] = v;
}
