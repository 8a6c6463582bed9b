// The common part of kernels for Hopper devices: flags in shared memory, and copies by which a thread fills
// shared memory while it goes on. The compiling code prepends it, behind `tensor.cuh`, to the files for compute
// capability 9.0 alone.

// Shows this thread's writes of shared memory to the products and copies behind the next barrier.
INLINE void show_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A phase of a flag in shared memory is over when `count` warps have arrived.
INLINE void make_flag(u64* flag, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(flag)), "r"(count) : "memory");
}
INLINE void arrive(u64* flag) {
    __syncwarp();
    if (threadIdx.x % WARP == 0) {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"((u32)__cvta_generic_to_shared(flag)) : "memory");
    }
}
// Waits until phase `phase` of the flag is over, which is the present one or the one before.
INLINE void wait_for(u64* flag, u32 phase) {
    u32 over;
    do {
        asm volatile("{.reg .pred over; mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2; selp.u32 %0, 1, 0, over;}"
                     : "=r"(over)
                     : "r"((u32)__cvta_generic_to_shared(flag)), "r"(phase & 1)
                     : "memory");
    } while (!over);
}

// The next phase of a flag whose count is one: it is over when `bytes` are copied. One thread calls this, then
// copies all the bytes.
INLINE void begin_copies(u64* flag, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(flag)), "r"(bytes)
                 : "memory");
}
// Starts a copy of `bytes` of global memory to shared memory. Places and sizes are multiples of 16 bytes.
INLINE void copy_bulk(void* to, const void* from, u32 bytes, u64* flag) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     (u32)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(bytes), "r"((u32)__cvta_generic_to_shared(flag))
                 : "memory");
}
