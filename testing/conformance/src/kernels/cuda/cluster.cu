// The kernel of the conformance suite with clusters of blocks (`TestKernel::Cluster`).

typedef unsigned int u32;

#define BLOCK 64u

// A block's elements are the number of the next block of its cluster, which that block has in its shared memory.
extern "C" __global__ void conformance_cluster(u32* out) {
    __shared__ u32 number;
    u32 own = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    if (threadIdx.x == 0) number = own;
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
    u32 next = (__clusterRelativeBlockRank() + 1) % __clusterSizeInBlocks();
    u32 found = *(const u32*)__cluster_map_shared_rank(&number, next);
    for (u32 i = threadIdx.x; i < BLOCK; i += blockDim.x) out[(unsigned long long)own * BLOCK + i] = found;
    // No block ends while another one reads its memory.
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
}
