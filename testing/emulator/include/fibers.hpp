// Runs the blocks of a launch on the host, for tests. A CUDA block is a threadgroup of Metal, a warp a SIMD-group.
//
// The threads of a block are fibers of one thread; clusters of blocks follow each other. A warp runs as far as it can without the others, then the
// next one does, or the one before it in reverse order: what a missing barrier leaves open happens, in one of the two orders. A barrier
// or a shuffle that some threads never reach fails the launch with a message. Shared memory is filled with NaN before each block.
//
// The blocks of a cluster, and all blocks of a cooperative launch, take turns: each runs as far as it can without the others. All have one place for shared memory, so a block that
// waits has a copy, which the others access.
//
// A failed launch leaves its fibers where they are; the next launch begins them anew.

#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

namespace emulator {

// The library's entry gets this.
struct Operand {
    // Its memory, and the address by which a tensor map names it.
    uint64_t at, device, bytes;
    // Bit 0: it may be read. Bit 1: it may be written.
    uint64_t access;
};

struct Launch {
    const char* kernel;
    // The arguments in the layout of a launch: the operands' addresses, then the parameters.
    const unsigned char* words;
    size_t size;
    const Operand* operands;
    size_t operand_count;
    unsigned index, grid[3], block[3], shared, reverse, watched;
    // Blocks of a cluster in each direction, unless the source says so; whether all blocks run at the same time.
    unsigned cluster[3], cooperative;
    // The result: an address in the code that failed, or 0.
    size_t failed_at;
};

struct Index {
    unsigned x, y, z;
};

// Lanes of a warp that wait for each other, and the values that they exchange.
struct Group {
    unsigned mask, arrived, readers;
    bool over;
    Group *next, *all;
    unsigned char slots[32 * 8];
};

struct Fiber {
    Index index;
    unsigned number;
    jmp_buf at;
    ucontext_t first;
    char* stack;
    bool started, done;
    // What it waits for, if anything.
    const char* waits;
    // The group whose values it may still read.
    Group* held;
    // It has arrived at the cluster's barrier, and when.
    bool arrived;
    unsigned long arrived_at;
    // Words that it looked at by atomic operations, and what they were, in a cooperative launch.
    struct {
        const volatile void* at;
        uint64_t word;
    } looks[4];
    // The moment of its last look at an mbarrier.
    unsigned polled;
    // Its bulk groups: those so far, those up to the last store, and those whose reads it has waited for.
    unsigned groups, stores, stores_read;
    // Its groups of products: those so far, those up to the last product, and those that it has waited for. The lists of their sums.
    unsigned product_groups, products, products_over, sum_lists;
    bool products_fenced;
    void* sums;
};

struct Warp {
    // The lanes that exist, those that have ended, how often lanes have met, and the moment of the last meeting.
    unsigned lanes, ended, meetings, met_at;
    Group* pending;
};

constexpr size_t STACK = 256 << 10, GUARD = 64 << 10;
// The most blocks of a cluster, and of a cooperative launch.
constexpr unsigned THREADS = 1024, CLUSTER = 16, TOGETHER = 64, FIBERS = THREADS * TOGETHER;

// A block of a cluster.
struct Turn {
    Warp warps[THREADS / 32];
    unsigned ended, arrived;
    unsigned long times;
    // The moment of the barrier's last end.
    unsigned met_at;
};

// The block that runs, and what is the same for all.
struct Block : Turn {
    Fiber* fibers;
    unsigned made, count;
    // The blocks of a cluster in each direction; all of the grid's where they run together.
    Index shape;
    bool together;
    // The blocks of a cluster, the running one of them, and their barrier.
    unsigned cluster, rank, cluster_ended, cluster_arrived, cluster_met_at;
    // The clock of a launch: moments at which an order of accesses begins.
    unsigned moment;
    unsigned long cluster_times;
    Turn turns[TOGETHER];
    // The blocks' copies of shared memory, one after the other.
    unsigned char* copies;
    size_t copy_bytes;
    Group *free, *groups;
    // Threads that have ended still miss at barriers.
    bool strict;
    // Shared memory, in pieces.
    struct {
        void* at;
        size_t bytes;
    } shared[3];
    Fiber* running;
    jmp_buf back, escape;
    void (*body)(void*);
    void* argument;
    // Called before a fiber goes on.
    void (*switched)(const Fiber&);
    bool progress;
    char failure[512];
    size_t failed_at;
    // Of what the failure tells: the binding, and its name in the source.
    size_t binding;
    const char* parameter;
};

inline Block block;
inline Index block_index, block_dim, grid_dim;

// Ends the launch with a message, which says where it happened.
[[noreturn]] __attribute__((used)) inline void fail(const char* what, ...) {
    va_list all;
    va_start(all, what);
    size_t used = (size_t)vsnprintf(block.failure, sizeof(block.failure), what, all);
    va_end(all);
    if (block.running && used < sizeof(block.failure)) {
        const Index t = block.running->index, b = block_index;
        used += (size_t)snprintf(block.failure + used, sizeof(block.failure) - used, " (thread %u,%u,%u of block %u,%u,%u)", t.x, t.y, t.z,
                                 b.x, b.y, b.z);
        if (block.parameter && used < sizeof(block.failure)) {
            snprintf(block.failure + used, sizeof(block.failure) - used, "; binding %zu is %s", block.binding, block.parameter);
        }
    }
    _longjmp(block.escape, 1);
}

// Lets the others run; comes back when it is this fiber's turn again.
inline void yield() {
    if (_setjmp(block.running->at) == 0) _longjmp(block.back, 1);
}

inline void release(Fiber& fiber) {
    Group* group = fiber.held;
    fiber.held = nullptr;
    if (group && --group->readers == 0) {
        group->next = block.free;
        block.free = group;
    }
}

// A fiber serves block after block.
inline void entry() {
    for (;;) {
        block.body(block.argument);
        Fiber& fiber = *block.running;
        release(fiber);
        fiber.done = true;
        ++block.ended;
        ++block.cluster_ended;
        if (fiber.arrived && fiber.arrived_at == block.cluster_times) --block.cluster_arrived;
        block.warps[fiber.number / 32].ended |= 1u << fiber.number % 32;
        yield();
    }
}

inline void resume(Fiber& fiber) {
    block.running = &fiber;
    if (block.switched) block.switched(fiber);
    if (_setjmp(block.back) == 0) {
        if (fiber.started) _longjmp(fiber.at, 1);
        fiber.started = true;
        setcontext(&fiber.first);
    }
}

// The barrier of the block.
__attribute__((used)) inline void meet(const char* what) {
    const unsigned long time = block.times;
    block.progress = true;
    ++block.arrived;
    block.running->waits = what;
    for (;;) {
        if (block.times != time) break;
        if (block.arrived == block.count - (block.strict ? 0 : block.ended)) {
            block.arrived = 0;
            ++block.times;
            block.met_at = ++block.moment;
            block.progress = true;
            break;
        }
        yield();
    }
    block.running->waits = nullptr;
}

// The barrier of the cluster, in two halves.
__attribute__((used)) inline void arrive() {
    if (block.together) fail("not emulated: a cluster's barrier in a cooperative launch");
    Fiber& fiber = *block.running;
    if (fiber.arrived) fail("a second arrival at the cluster's barrier without a wait");
    fiber.arrived = true;
    fiber.arrived_at = block.cluster_times;
    ++block.cluster_arrived;
    block.progress = true;
}

__attribute__((used)) inline void await(const char* what) {
    Fiber& fiber = *block.running;
    if (!fiber.arrived) fail("a wait at the cluster's barrier without an arrival");
    fiber.waits = what;
    while (block.cluster_times == fiber.arrived_at) {
        if (block.cluster_arrived == block.count * block.cluster - block.cluster_ended) {
            block.cluster_arrived = 0;
            ++block.cluster_times;
            block.cluster_met_at = ++block.moment;
            break;
        }
        yield();
    }
    block.progress = true;
    fiber.waits = nullptr;
    fiber.arrived = false;
}

// The place in the shared memory of another block of the cluster.
__attribute__((used)) inline void* of_block(const void* at, unsigned rank) {
    const unsigned size = block.together ? 1 : block.cluster;
    if (rank >= size) fail("the shared memory of block %u of a cluster of %u", rank, size);
    if (block.together) return (void*)at;
    size_t before = rank * block.copy_bytes;
    for (const auto& piece : block.shared) {
        const size_t offset = (size_t)((const char*)at - (const char*)piece.at);
        if (offset < piece.bytes) return rank == block.rank ? (void*)at : block.copies + before + offset;
        before += piece.bytes;
    }
    fail("an address that is not in the block's shared memory, for that of another block");
}

// The lanes of a mask meet, each with a value. The result has all values until the lane's next call.
__attribute__((used)) inline Group* join(unsigned mask, const void* value, size_t size, const char* what) {
    Fiber& fiber = *block.running;
    Warp& warp = block.warps[fiber.number / 32];
    const unsigned bit = 1u << fiber.number % 32;
    if (!(mask & bit)) fail("%s with the mask 0x%08x, which does not name its lane %u", what, mask, fiber.number % 32);
    release(fiber);
    Group* group = warp.pending;
    while (group && group->mask != mask) group = group->next;
    if (!group) {
        if ((group = block.free)) {
            block.free = group->next;
        } else {
            group = (Group*)malloc(sizeof(Group));
            if (!group) fail("no host memory is left");
            group->all = block.groups;
            block.groups = group;
        }
        group->mask = mask;
        group->arrived = group->readers = 0;
        group->over = false;
        group->next = warp.pending;
        warp.pending = group;
    }
    memcpy(group->slots + fiber.number % 32 * size, value, size);
    group->arrived |= bit;
    ++group->readers;
    block.progress = true;
    fiber.waits = what;
    while (!group->over) {
        const unsigned missing = mask & warp.lanes & ~group->arrived & (block.strict ? ~0u : ~warp.ended);
        if (missing == 0) {
            group->over = true;
            Group** link = &warp.pending;
            while (*link != group) link = &(*link)->next;
            *link = group->next;
            ++warp.meetings;
            warp.met_at = ++block.moment;
            block.progress = true;
            break;
        }
        yield();
    }
    fiber.waits = nullptr;
    fiber.held = group;
    return group;
}

// Every lane gives a value and gets all of them.
template <class T> inline const T* exchange(T value, const char* what = "a shuffle") {
    static_assert(sizeof(T) <= 8, "a lane exchanges 8 bytes at most");
    return (const T*)join(~0u, &value, sizeof(T), what)->slots;
}

inline void make_fibers() {
    if (!block.fibers) block.fibers = (Fiber*)calloc(FIBERS, sizeof(Fiber));
    if (!block.fibers) fail("no host memory is left");
    for (; block.made < block.count * block.cluster; ++block.made) {
        Fiber& fiber = block.fibers[block.made];
        if (!fiber.stack) {
            // The first pages are a guard.
            void* at = mmap(nullptr, GUARD + STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (at == MAP_FAILED || mprotect(at, GUARD, PROT_NONE) != 0) fail("no host memory is left for the threads' stacks");
            fiber.stack = (char*)at + GUARD;
        }
        fiber.started = false;
        getcontext(&fiber.first);
        fiber.first.uc_stack.ss_sp = fiber.stack;
        fiber.first.uc_stack.ss_size = STACK;
        fiber.first.uc_link = nullptr;
        makecontext(&fiber.first, entry, 0);
    }
}

inline void make_copies() {
    size_t bytes = 0;
    for (const auto& piece : block.shared) bytes += piece.bytes;
    if (block.cluster == 1 || bytes <= block.copy_bytes && block.copies) return;
    free(block.copies);
    block.copy_bytes = bytes;
    block.copies = (unsigned char*)malloc(TOGETHER * bytes);
    if (!block.copies) fail("no host memory is left");
}

// Makes block `rank` of the cluster the running one, and back.
inline void enter(unsigned rank, Index index) {
    block.rank = rank;
    block_index = index;
    if (block.cluster == 1) return;
    (Turn&)block = block.turns[rank];
    const unsigned char* copy = block.copies + rank * block.copy_bytes;
    for (auto& piece : block.shared) {
        if (piece.bytes) memcpy(piece.at, copy, piece.bytes);
        copy += piece.bytes;
    }
}

inline void leave() {
    if (block.cluster == 1) return;
    block.turns[block.rank] = block;
    unsigned char* copy = block.copies + block.rank * block.copy_bytes;
    for (auto& piece : block.shared) {
        if (piece.bytes) memcpy(copy, piece.at, piece.bytes);
        copy += piece.bytes;
    }
}

inline Fiber* fibers_of_block() { return block.fibers + block.rank * block.count; }

inline void begin_block() {
    for (auto& piece : block.shared) {
        if (piece.bytes) memset(piece.at, 0xff, piece.bytes);
    }
    block.arrived = block.ended = block.met_at = 0;
    const unsigned warps = (block.count + 31) / 32;
    for (unsigned w = 0; w < warps; ++w) {
        const unsigned lanes = block.count - w * 32;
        block.warps[w] = {lanes < 32 ? (1u << lanes) - 1 : ~0u, 0, 0, 0, nullptr};
    }
    for (unsigned i = 0; i < block.count; ++i) {
        Fiber& fiber = fibers_of_block()[i];
        fiber.index = {i % block_dim.x, i / block_dim.x % block_dim.y, i / block_dim.x / block_dim.y};
        fiber.number = i;
        fiber.done = fiber.arrived = false;
        fiber.waits = nullptr;
        memset(fiber.looks, 0, sizeof(fiber.looks));
        fiber.polled = fiber.groups = fiber.stores = fiber.stores_read = 0;
        fiber.product_groups = fiber.products = fiber.products_over = fiber.sum_lists = 0;
        fiber.products_fenced = false;
    }
}

// Runs the block's threads as far as they can without other blocks. Returns whether any of them could.
inline bool run_block(bool reverse) {
    const unsigned warps = (block.count + 31) / 32;
    Fiber* const fibers = fibers_of_block();
    for (bool any = false;; any = true) {
        bool moved = false;
        for (unsigned w = 0; block.ended < block.count && w < warps; ++w) {
            const unsigned warp = reverse ? warps - 1 - w : w;
            do {
                block.progress = false;
                for (unsigned l = 0; l < 32; ++l) {
                    const unsigned number = warp * 32 + (reverse ? 31 - l : l);
                    if (number >= block.count || fibers[number].done) continue;
                    resume(fibers[number]);
                    if (fibers[number].done) block.progress = true;
                }
                moved |= block.progress;
            } while (block.progress);
        }
        if (!moved) return any;
    }
}

// Runs the blocks of a cluster.
inline void run_cluster(uint64_t number, bool reverse) {
    const Index of = block.shape;
    const auto index = [&](unsigned rank) -> Index {
        const unsigned across = grid_dim.x / of.x, down = grid_dim.y / of.y;
        return {(unsigned)(number % across) * of.x + rank % of.x, (unsigned)(number / across % down) * of.y + rank / of.x % of.y,
                (unsigned)(number / across / down) * of.z + rank / of.x / of.y};
    };
    block.cluster_ended = block.cluster_arrived = block.cluster_met_at = 0;
    for (unsigned rank = 0; rank < block.cluster; ++rank) {
        block.rank = rank;
        begin_block();
        leave();
    }
    while (block.cluster_ended < block.count * block.cluster) {
        bool moved = false;
        for (unsigned i = 0; i < block.cluster; ++i) {
            const unsigned rank = reverse ? block.cluster - 1 - i : i;
            enter(rank, index(rank));
            moved |= run_block(reverse);
            leave();
        }
        if (moved) continue;
        for (unsigned i = 0; i < block.count * block.cluster; ++i) {
            if (block.fibers[i].done) continue;
            block.running = &block.fibers[i];
            block_index = index(i / block.count);
            fail("a thread waits at %s for others that are elsewhere or have ended", block.fibers[i].waits);
        }
    }
}

// Runs all blocks of a launch, in the clusters of the source or of the launch. Returns a message if the launch failed.
inline const char* run_grid(Launch& launch, const unsigned* source, void (*body)(void*), void* argument) {
    block.running = nullptr;
    block.failed_at = block.moment = 0;
    block.body = body;
    block.argument = argument;
    if (_setjmp(block.escape) != 0) {
        // The fibers and the groups are in the middle of something.
        block.made = 0;
        block.free = block.groups;
        for (Group* group = block.groups; group; group = group->all) group->next = group->all;
        for (unsigned i = 0; block.fibers && i < FIBERS && block.fibers[i].stack; ++i) block.fibers[i].held = nullptr;
        launch.failed_at = block.failed_at;
        return block.failure;
    }
    grid_dim = {launch.grid[0], launch.grid[1], launch.grid[2]};
    block_dim = {launch.block[0], launch.block[1], launch.block[2]};
    const uint64_t count = (uint64_t)block_dim.x * block_dim.y * block_dim.z;
    if (count > THREADS) fail("a block of %llu threads, more than %u", (unsigned long long)count, THREADS);
    const unsigned *own = launch.cluster, *of = source && source[0] * source[1] * source[2] != 1 ? source : own;
    if (of == source && own[0] * own[1] * own[2] != 1 && memcmp(source, own, sizeof(launch.cluster)) != 0) {
        fail("clusters of %u,%u,%u blocks, and the source has %u,%u,%u", own[0], own[1], own[2], of[0], of[1], of[2]);
    }
    const uint64_t blocks = (uint64_t)grid_dim.x * grid_dim.y * grid_dim.z, cluster = (uint64_t)of[0] * of[1] * of[2];
    if (cluster > CLUSTER) fail("a cluster of %llu blocks, more than %u", (unsigned long long)cluster, CLUSTER);
    for (unsigned i = 0; i < 3; ++i) {
        if (launch.grid[i] % of[i] == 0) continue;
        fail("%u blocks in %c, which is no multiple of the %u of a cluster", launch.grid[i], "xyz"[i], of[i]);
    }
    block.together = launch.cooperative;
    if (block.together && cluster > 1) fail("not emulated: a cooperative launch in clusters");
    if (block.together && blocks > TOGETHER) {
        fail("not emulated: a cooperative launch of %llu blocks, more than %u", (unsigned long long)blocks, TOGETHER);
    }
    block.count = (unsigned)count;
    block.shape = block.together ? grid_dim : Index{of[0], of[1], of[2]};
    block.cluster = (unsigned)(block.together ? blocks : cluster);
    make_fibers();
    make_copies();
    const uint64_t clusters = blocks == 0 ? 0 : blocks / block.cluster;
    for (uint64_t i = 0; i < clusters; ++i) run_cluster(launch.reverse ? clusters - 1 - i : i, launch.reverse);
    return nullptr;
}

// Gives back what launches took.
inline void end() {
    for (unsigned i = 0; block.fibers && i < FIBERS && block.fibers[i].stack; ++i) {
        munmap(block.fibers[i].stack - GUARD, GUARD + STACK);
        free(block.fibers[i].sums);
    }
    free(block.fibers);
    free(block.copies);
    while (Group* group = block.groups) {
        block.groups = group->all;
        free(group);
    }
    block = {};
}

template <class F> const char* run_grid(Launch& launch, F& body, const unsigned* source = nullptr) {
    return run_grid(launch, source, [](void* f) { (*(F*)f)(); }, &body);
}

}  // namespace emulator
