// The runtime under a compiled CUDA source: its threads' numbers, its shared memory, and a look at each access to memory.
//
// The source is compiled with calls before its accesses, which are answered here. An access must lie in the thread's own memory, in the
// block's shared memory, in a variable of the source, or in an operand that is declared for it. And it must be ordered with the last
// accesses of other threads to the same bytes of operands and shared memory, if one of the two writes another value.

#include <link.h>

#include "fibers.hpp"

#pragma GCC visibility push(hidden)

struct Three {
    unsigned x, y, z;
};
Three threadIdx, blockIdx, blockDim, gridDim;

// The most that a block can ask for, as on a device. A source's `extern __shared__` arrays are other names of it.
constexpr size_t DYNAMIC = 227 << 10;
extern "C" thread_local char emulator_dynamic[DYNAMIC];
// The names of a kernel's parameters, up to a null. The source's end defines it.
extern "C" const char* const* emulator_params(unsigned index);

namespace emulator {

struct Range {
    uintptr_t from, to;
    bool has(uintptr_t at, size_t bytes) const { return at >= from && bytes <= to - from && at - from <= to - from - bytes; }
};

// Memory that the threads of the launch may access beside their own stacks and the operands.
struct Reach {
    Range image[4], tls, dynamic;
    unsigned images;
    bool shared(uintptr_t at, size_t bytes) const {
        if (!tls.has(at, bytes)) return false;
        return at + bytes <= dynamic.from || at >= dynamic.from + DYNAMIC || dynamic.has(at, bytes);
    }
} reach;
Launch* launched;
unsigned long long now;

// ---- Races

// An access to a byte. Two accesses are ordered by a barrier of the block, or by a meeting of the warp, between them; those of two
// blocks of a cluster by its barrier; those of two threads of a block by what the second knows; those of two blocks by a fence behind the
// first and an atomic operation in front of the second. A meeting of some lanes counts as one of the whole warp. Accesses to another block's
// shared memory have no trace, except those of bulk copies.
struct Trace {
    // Counted from 1, so that zeros are no access.
    unsigned block;
    // The moment of the access, or an agent's number.
    unsigned moment;
    unsigned thread : 31, atomic : 1;

    bool operator!=(const Trace& o) const { return block != o.block || moment != o.moment || thread != o.thread || atomic != o.atomic; }
};
struct Byte {
    Trace written, read;
};
// The traces of a range. The bytes behind the limit are not looked at.
struct Watch {
    uintptr_t from, bytes;
    Byte* traces;
};
constexpr size_t WATCHED = 16 << 20;
constexpr unsigned WATCHES = 32;
Watch watches[WATCHES];
unsigned watch_count;
unsigned block_number;
bool block_atomic;
// Bits by block.
unsigned char* block_fence;
size_t block_fence_bytes;

// A write beside another access. It is a race if it changes the byte.
struct Suspect {
    volatile unsigned char* at;
    unsigned char value;
    Trace other;
    bool written;
    Fiber* fiber;
    void* code;
} suspect;

// Asynchronous copies that end together are the work of an agent: those of an mbarrier, or a thread's reads or writes by bulk stores. An
// agent's number is that of the phase or of the group.
constexpr unsigned AGENTS = 256;
unsigned agent_count;

// Knowledge of a block's threads and agents: their accesses before a moment, or before a number.
struct Known {
    unsigned before[THREADS + AGENTS];
    void learn(unsigned of, unsigned moment) {
        if (before[of] < moment) before[of] = moment;
    }
    void learn(const Known& other) {
        for (unsigned t = 0; t < block.count; ++t) learn(t, other.before[t]);
        for (unsigned a = THREADS; a < THREADS + agent_count; ++a) learn(a, other.before[a]);
    }
};
struct Agent {
    // The mbarrier, or the fiber, and its block.
    const volatile void* at;
    unsigned rank, number;
    // A name for messages. A bulk copy has none.
    const char* name;
    // The number before which any thread of the block has waited, since when, and the number for all threads.
    unsigned waited, waited_at, common;
    // The knowledge of the threads that arrived: in this phase, and before.
    Known arrived, done;
    // The moment before which other threads of the block share what one has waited for.
    unsigned shared() const { return rank == block.rank && block.met_at > block.cluster_met_at ? block.met_at : block.cluster_met_at; }
    unsigned known() const { return waited_at < shared() ? waited : common; }
};
// Knowledge of a lane. The others of its warp share it once they have met since.
struct Part {
    Known known;
    // The meetings before it, counted from 1, or 0 if the warp has all of it.
    unsigned since;
};
// A thread learns by an atomic operation what others had behind a fence when they changed the same word.
struct Learner {
    Part own, fenced;
    bool used, fences;
    // The moment of its last fence between the proxies.
    unsigned proxy;
};
struct Flag {
    const volatile void* at;
    unsigned rank;
    Known known;
};
constexpr unsigned FLAGS = 256, WARPS = THREADS / 32;
struct Knowledge {
    Learner learners[FIBERS];
    struct {
        Known own, fenced;
        // The moment before which a fence between the proxies is behind all writes of the warp.
        unsigned proxied;
    } warps[FIBERS / 32];
    Flag flags[FLAGS];
    Agent agents[AGENTS];
}* knowledge;
unsigned flag_count;
// The learners that are not zero.
unsigned short used[FIBERS];
unsigned used_count;
// More words than there is room for have become flags or agents, so everything counts as known.
bool flags_full;

Learner& learner(unsigned thread) { return knowledge->learners[block.rank * THREADS + thread]; }

// The running thread, which learns or fences.
Learner& own_learner() {
    Learner& self = learner(block.running->number);
    if (!self.used) used[used_count++] = (unsigned short)(&self - knowledge->learners);
    self.used = true;
    return self;
}

// Adds the lanes' knowledge of their last meeting to the knowledge that their warp has in common.
Known& in_common(Known& all, Part Learner::* part, unsigned warp) {
    for (unsigned t = warp * 32; t < warp * 32 + 32 && t < block.count; ++t) {
        Part& lane = learner(t).*part;
        if (lane.since == 0 || lane.since > block.warps[warp].meetings) continue;
        all.learn(lane.known);
        lane.since = 0;
    }
    return all;
}
Known& known_of(unsigned warp) { return in_common(knowledge->warps[block.rank * WARPS + warp].own, &Learner::own, warp); }
Known& fenced_of(unsigned warp) { return in_common(knowledge->warps[block.rank * WARPS + warp].fenced, &Learner::fenced, warp); }

// A block, or a cluster, begins.
void forget() {
    flags_full = false;
    if (!knowledge) return;
    for (; flag_count > 0; --flag_count) knowledge->flags[flag_count - 1] = {};
    for (; agent_count > 0; --agent_count) knowledge->agents[agent_count - 1] = {};
    for (; used_count > 0; --used_count) {
        const unsigned i = used[used_count - 1];
        knowledge->learners[i] = {};
        knowledge->warps[i / 32] = {};
    }
}

// An atomic operation: a thread that reads the word learns, and one that writes it tells.
void meet_at(const volatile void* at, unsigned access) {
    const unsigned number = block.running->number, warp = number / 32;
    unsigned i = 0;
    while (i < flag_count && (knowledge->flags[i].at != at || knowledge->flags[i].rank != block.rank)) ++i;
    const bool tells = access & 2 && learner(number).fences;
    if (i == flag_count) {
        if (!tells) return;
        if (i == FLAGS) {
            flags_full = true;
            return;
        }
        knowledge->flags[flag_count++] = {at, block.rank, {}};
    }
    Known& flag = knowledge->flags[i].known;
    if (access & 1) {
        Part& own = own_learner().own;
        known_of(warp);
        own.known.learn(flag);
        own.since = block.warps[warp].meetings + 1;
    }
    if (tells) {
        flag.learn(fenced_of(warp));
        flag.learn(learner(number).fenced.known);
    }
}

// Adds what the running thread has done and what it knows.
void tell(Known& to) {
    const unsigned number = block.running->number, warp = number / 32;
    to.learn(known_of(warp));
    to.learn(learner(number).own.known);
    for (unsigned t = warp * 32; t < warp * 32 + 32 && t < block.count; ++t) to.learn(t, block.warps[warp].met_at);
    to.learn(number, ++block.moment);
}

void fence_behind() {
    const unsigned warp = block.running->number / 32;
    Learner& self = own_learner();
    fenced_of(warp);
    tell(self.fenced.known);
    self.fenced.since = block.warps[warp].meetings + 1;
    self.fences = true;
}

bool knows(unsigned thread, const Trace& first) {
    return flags_full || learner(thread).own.known.before[first.thread] > first.moment ||
           known_of(thread / 32).before[first.thread] > first.moment ||
           (first.thread >= THREADS && knowledge->agents[first.thread - THREADS].known() > first.moment);
}

Trace trace_of(const Fiber& fiber, bool atomic) { return {block_number, block.moment, fiber.number, atomic}; }

// The cluster of a block, and its rank there.
Index place_of(unsigned number) {
    --number;
    return {number % grid_dim.x, number / grid_dim.x % grid_dim.y, number / grid_dim.x / grid_dim.y};
}
unsigned cluster_of(unsigned number) {
    if (block.cluster == 1 || block.together) return block.together ? 0 : number;
    const Index at = place_of(number), of = block.shape;
    return at.x / of.x + grid_dim.x / of.x * (at.y / of.y + grid_dim.y / of.y * (at.z / of.z));
}
unsigned rank_of(unsigned number) {
    const Index at = place_of(number), of = block.shape;
    return at.x % of.x + of.x * (at.y % of.y + of.y * (at.z % of.z));
}

bool ordered(const Trace& first, const Trace& then, bool shared) {
    if (first.block == 0 || (first.atomic && then.atomic)) return true;
    const bool agent = first.thread >= THREADS;
    // Most accesses are one of these.
    if (!agent && first.block == then.block && (first.thread == then.thread || first.moment < block.met_at)) return true;
    if (cluster_of(first.block) == cluster_of(then.block)) {
        if (agent ? knows(then.thread, first) : first.moment < block.cluster_met_at) return true;
    }
    if (first.block != then.block) {
        // Another block's shared memory was another one.
        return shared || (block_atomic && block_fence[(first.block - 1) / 8] >> (first.block - 1) % 8 & 1);
    }
    if (agent) return false;
    if (first.thread / 32 == then.thread / 32 && first.moment < block.warps[then.thread / 32].met_at) return true;
    return knows(then.thread, first);
}

// An earlier trace, and whether it is ordered before the access that is looked at.
struct Verdict {
    Trace first;
    bool ordered;
};

// The bytes of an access mostly have equal traces.
bool ordered(Verdict& last, const Trace& first, const Trace& then, bool shared) {
    if (first != last.first) last = {first, ordered(first, then, shared)};
    return last.ordered;
}

// The failure that follows is about a binding. Pointers are the first parameters.
void about(size_t binding) {
    const char* const* all = emulator_params(launched->index);
    size_t count = 0;
    while (all[count]) ++count;
    block.binding = binding;
    block.parameter = binding < count && *all[binding] ? all[binding] : nullptr;
}

[[noreturn]] __attribute__((noinline)) void race(const char* does, uintptr_t at, const Trace& other, bool wrote, void* code) {
    block.failed_at = (size_t)code;
    const unsigned b = other.block - 1, t = other.thread;
    char who[96], thread[40];
    snprintf(thread, sizeof(thread), "thread %u,%u,%u", t % block_dim.x, t / block_dim.x % block_dim.y, t / block_dim.x / block_dim.y);
    // Products access shared memory only, whose agents are this cluster's.
    const char* name = t < THREADS ? thread : at - watches[0].from < watches[0].bytes ? knowledge->agents[t - THREADS].name : nullptr;
    snprintf(who, sizeof(who), "%s of block %u,%u,%u %s", name ? name : "a bulk copy", b % grid_dim.x, b / grid_dim.x % grid_dim.y,
             b / grid_dim.x / grid_dim.y, wrote ? "wrote" : "read");
    for (size_t i = 0; i < launched->operand_count; ++i) {
        const Operand& o = launched->operands[i];
        if (at - o.at >= o.bytes) continue;
        about(i);
        fail("race: it %ss binding %zu at byte %llu, which %s, and nothing orders the two", does, i, (unsigned long long)(at - o.at), who);
    }
    fail("race: it %ss shared memory that %s, without a barrier between the two", does, who);
}

// The write that was suspect has happened.
inline void settle() {
    if (!suspect.at) return;
    volatile unsigned char* at = suspect.at;
    suspect.at = nullptr;
    if (*at == suspect.value) return;
    block.running = suspect.fiber;
    race("write", (uintptr_t)at, suspect.other, suspect.written, suspect.code);
}

inline void trace(uintptr_t at, size_t bytes, unsigned access, bool atomic, void* code) {
    for (unsigned i = 0; i < watch_count; ++i) {
        const Watch& watch = watches[i];
        if (at - watch.from >= watch.bytes || bytes > watch.bytes - (at - watch.from)) continue;
        const bool shared = i == 0;
        const Trace own = trace_of(*block.running, atomic);
        Verdict written = {{}, true}, read = {{}, true};
        for (size_t n = 0; n < bytes; ++n) {
            Byte& byte = watch.traces[at - watch.from + n];
            const bool after_write = !ordered(written, byte.written, own, shared);
            if (!(access & 2)) {
                if (after_write) race("read", at + n, byte.written, true, code);
                byte.read = own;
                continue;
            }
            if ((after_write || !ordered(read, byte.read, own, shared)) && !suspect.at) {
                volatile unsigned char* place = (volatile unsigned char*)(at + n);
                suspect = {place, *place, after_write ? byte.written : byte.read, after_write, block.running, code};
            }
            if (access & 1) byte.read = own;
            byte.written = own;
        }
        return;
    }
}

// Memory that takes room as it is touched.
void* zeros(size_t bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? nullptr : at;
}

void watch(uintptr_t from, size_t bytes) {
    if (bytes == 0 || watch_count == WATCHES) return;
    if (bytes > WATCHED) bytes = WATCHED;
    void* at = zeros(bytes * sizeof(Byte));
    if (at) watches[watch_count++] = {from, bytes, (Byte*)at};
}

void end_watching() {
    while (watch_count > 0) {
        --watch_count;
        munmap(watches[watch_count].traces, watches[watch_count].bytes * sizeof(Byte));
    }
    if (block_fence) munmap(block_fence, block_fence_bytes);
    if (knowledge) munmap(knowledge, sizeof(Knowledge));
    block_fence = nullptr;
    knowledge = nullptr;
}

void begin_watching() {
    suspect.at = nullptr;
    block_number = 0;
    watch(reach.tls.from, reach.tls.to - reach.tls.from);
    for (size_t i = 0; i < launched->operand_count; ++i) {
        // Operands may overlap; the first one has the traces.
        if (launched->operands[i].access & 3) watch(launched->operands[i].at, launched->operands[i].bytes);
    }
    const uint64_t blocks = (uint64_t)launched->grid[0] * launched->grid[1] * launched->grid[2];
    block_fence_bytes = blocks / 8 + 1;
    block_fence = (unsigned char*)zeros(block_fence_bytes);
    knowledge = (Knowledge*)zeros(sizeof(Knowledge));
    flag_count = used_count = agent_count = 0;
    // Without memory nothing is watched.
    if (!block_fence || !knowledge) end_watching();
}

// Finds the variables of this library, and this thread's shared memory.
int find(dl_phdr_info* info, size_t, void*) {
    const uintptr_t here = (uintptr_t)&launched;
    Reach found = {};
    bool own = false;
    for (unsigned i = 0; i < info->dlpi_phnum; ++i) {
        const auto& part = info->dlpi_phdr[i];
        const uintptr_t from = info->dlpi_addr + part.p_vaddr;
        if (part.p_type == PT_LOAD && found.images < 4) {
            found.image[found.images++] = {from, from + part.p_memsz};
            own |= here >= from && here < from + part.p_memsz;
        }
        if (part.p_type == PT_TLS && info->dlpi_tls_data) {
            found.tls = {(uintptr_t)info->dlpi_tls_data, (uintptr_t)info->dlpi_tls_data + part.p_memsz};
        }
    }
    if (own) reach = found;
    return own;
}

void switched(const Fiber& fiber) {
    settle();
    const unsigned number = 1 + block_index.x + grid_dim.x * (block_index.y + grid_dim.y * block_index.z);
    // Blocks of a cluster take turns.
    const bool begins = block_number == 0 || cluster_of(number) != cluster_of(block_number);
    block_number = number;
    if (begins) {
        forget();
        block_atomic = false;
    }
    threadIdx = {fiber.index.x, fiber.index.y, fiber.index.z};
    blockIdx = {block_index.x, block_index.y, block_index.z};
}

__attribute__((used)) const void* of_lane(const Group* group, unsigned lane, size_t size) { return group->slots + lane * size; }
__attribute__((used)) void of_lanes(const Group* group, void* to, size_t size) { memcpy(to, group->slots, 32 * size); }
__attribute__((used)) unsigned met(const Group* group) { return group->arrived; }
__attribute__((used)) unsigned lane() { return block.running->number % 32; }
__attribute__((used)) unsigned active() {
    const Warp& warp = block.warps[block.running->number / 32];
    return warp.lanes & ~warp.ended;
}
__attribute__((used)) void pause() {
    block.running->waits = "__nanosleep";
    yield();
    block.running->waits = nullptr;
}
__attribute__((used)) unsigned cluster_rank() { return block.together ? 0 : block.rank; }
__attribute__((used)) unsigned cluster_size() { return block.together ? 1 : block.cluster; }
__attribute__((used)) Index cluster_shape() { return block.together ? Index{1, 1, 1} : block.shape; }
__attribute__((used)) unsigned long long ticks() { return ++now; }
__attribute__((used)) void fence_of_block() {
    settle();
    if (knowledge) fence_behind();
}
__attribute__((used)) void fence() {
    fence_of_block();
    if (block_fence) block_fence[(block_number - 1) / 8] |= 1 << (block_number - 1) % 8;
}

// An access to memory that no thread of this launch may make.
[[noreturn]] __attribute__((noinline)) void refuse(const char* what, uintptr_t at, size_t bytes, void* code) {
    block.failed_at = (size_t)code;
    const Operand* all = launched->operands;
    size_t nearest = launched->operand_count;
    uint64_t least = ~0ull;
    for (size_t i = 0; i < launched->operand_count; ++i) {
        const Operand& o = all[i];
        if (at + bytes <= o.at || at >= o.at + o.bytes) {
            const uint64_t away = at >= o.at + o.bytes ? at - (o.at + o.bytes) : o.at - (at + bytes);
            if (away < least) least = away, nearest = i;
            continue;
        }
        about(i);
        if (at < o.at || at + bytes > o.at + o.bytes) {
            fail("illegal address: it %ss %zu bytes that are partly outside of binding %zu, which has %llu bytes", what, bytes, i,
                 (unsigned long long)o.bytes);
        }
        fail("it %ss binding %zu at byte %llu, which the launch binds to be %s only", what, i, (unsigned long long)(at - o.at),
             o.access == 1 ? "read" : "written");
    }
    const Range& dynamic = reach.dynamic;
    if (at >= dynamic.from && at < dynamic.from + DYNAMIC) {
        fail("illegal address: it %ss byte %zu of the dynamic shared memory, of which the launch has %u bytes", what, (size_t)(at - dynamic.from),
             launched->shared);
    }
    if (nearest < launched->operand_count && least < (1 << 20)) {
        const bool behind = at >= all[nearest].at;
        about(nearest);
        fail("illegal address: it %ss %zu bytes outside of its bindings, %llu bytes %s binding %zu, which has %llu bytes", what, bytes,
             (unsigned long long)least, behind ? "behind the end of" : "in front of", nearest, (unsigned long long)all[nearest].bytes);
    }
    fail("illegal address: it %ss %zu bytes at the address 0x%llx, which is in none of its bindings", what, bytes, (unsigned long long)at);
}

// A thread of a cooperative launch that looks at a word again, which is as it was, waits for others to change it.
void poll(const volatile void* p, size_t bytes, unsigned access) {
    const uintptr_t at = (uintptr_t)p;
    bool own = false;
    for (size_t i = 0; i < launched->operand_count && !own; ++i) {
        const Operand& o = launched->operands[i];
        own = at - o.at < o.bytes && bytes <= o.bytes - (at - o.at) && (o.access & access) == access;
    }
    for (unsigned i = 0; i < reach.images && !own; ++i) own = reach.image[i].has(at, bytes);
    if (!own) return;
    uint64_t word = 0;
    memcpy(&word, (const void*)p, bytes < sizeof(word) ? bytes : sizeof(word));
    Fiber& self = *block.running;
    auto& last = self.looks[at / 4 % 4];
    if (last.at == p && last.word == word) {
        self.waits = "a word that it looks at";
        yield();
        self.waits = nullptr;
    } else {
        block.progress = true;
    }
    last = {p, word};
}

void look_at_sums(uintptr_t at, size_t bytes, unsigned access, void* code);

inline void look(const volatile void* p, size_t bytes, unsigned access, void* code, bool atomic = false, bool flag = true) {
    settle();
    if (atomic && block.together) poll(p, bytes, access);
    if (atomic && flag && knowledge) meet_at(p, access);
    const uintptr_t at = (uintptr_t)p;
    const uintptr_t stack = (uintptr_t)block.running->stack;
    if (at - stack < STACK && bytes <= STACK - (at - stack)) {
        if (block.running->sum_lists) look_at_sums(at, bytes, access, code);
        return;
    }
    for (size_t i = 0; i < launched->operand_count; ++i) {
        const Operand& o = launched->operands[i];
        if (at - o.at < o.bytes && bytes <= o.bytes - (at - o.at) && (o.access & access) == access) {
            return trace(at, bytes, access, atomic, code);
        }
    }
    if (reach.shared(at, bytes)) return trace(at, bytes, access, atomic, code);
    const size_t copies = block.cluster > 1 ? block.cluster * block.copy_bytes : 0, copy = at - (uintptr_t)block.copies;
    if (copy < copies && bytes <= copies - copy) return;
    for (unsigned i = 0; i < reach.images; ++i) {
        if (reach.image[i].has(at, bytes)) return;
    }
    refuse(access & 2 ? "write" : "read", at, bytes, code);
}

__attribute__((used)) void atomic(const volatile void* at, size_t size) {
    if ((uintptr_t)at % size != 0) fail("an atomic operation of %zu bytes at an address that is no multiple", size);
    block_atomic = true;
    look(at, size, 3, __builtin_return_address(0), true);
}

}  // namespace emulator

#include "bulk.hpp"
#include "products.hpp"

// ---- The calls that the compiler makes before accesses

// Volatile accesses count as atomic ones.
#define LOOK(p, bytes, access, ...) emulator::look(p, bytes, access, __builtin_return_address(0), ##__VA_ARGS__)
#define ACCESSES(N)                                                    \
    void __tsan_read##N(void* p) { LOOK(p, N, 1); }                    \
    void __tsan_write##N(void* p) { LOOK(p, N, 2); }                   \
    void __tsan_unaligned_read##N(void* p) { LOOK(p, N, 1); }          \
    void __tsan_unaligned_write##N(void* p) { LOOK(p, N, 2); }         \
    void __tsan_volatile_read##N(void* p) { LOOK(p, N, 1, true); }     \
    void __tsan_volatile_write##N(void* p) { LOOK(p, N, 2, true); }
extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* p, size_t bytes) { LOOK(p, bytes, 1); }
void __tsan_write_range(void* p, size_t bytes) { LOOK(p, bytes, 2); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void** at, void*) { LOOK(at, 8, 2); }
void __tsan_vptr_read(void** at) { LOOK(at, 8, 1); }
}

// ---- Functions of the C library

#define LOOK_RANGE(p, bytes, access) \
    if (emulator::launched->watched && bytes > 0) LOOK(p, bytes, access)
extern "C" {
__attribute__((used)) void* emulator_memcpy(void* to, const void* from, size_t bytes) {
    LOOK_RANGE(from, bytes, 1);
    LOOK_RANGE(to, bytes, 2);
    return memcpy(to, from, bytes);
}
__attribute__((used)) void* emulator_memmove(void* to, const void* from, size_t bytes) {
    LOOK_RANGE(from, bytes, 1);
    LOOK_RANGE(to, bytes, 2);
    return memmove(to, from, bytes);
}
__attribute__((used)) void* emulator_memset(void* to, int value, size_t bytes) {
    LOOK_RANGE(to, bytes, 2);
    return memset(to, value, bytes);
}
__attribute__((used)) int emulator_memcmp(const void* a, const void* b, size_t bytes) {
    LOOK_RANGE(a, bytes, 1);
    LOOK_RANGE(b, bytes, 1);
    return memcmp(a, b, bytes);
}
}

// ---- What the compiler's other checks call

struct Place {
    const char* file;
    unsigned line, column;
};
#define FOUND(place, what)                                                                              \
    emulator::fail("%s:%u: %s", (place).file ? (place).file : "?", (place).line, what)
extern "C" {
struct Mismatch {
    Place place;
    void* type;
    unsigned char alignment, kind;
};
void __ubsan_handle_type_mismatch_v1_abort(Mismatch* m, uintptr_t at) {
    emulator::fail("%s:%u: an access at the address 0x%llx, which is no multiple of %u", m->place.file ? m->place.file : "?",
                   m->place.line, (unsigned long long)at, 1u << m->alignment);
}
void __ubsan_handle_out_of_bounds_abort(Place* p, uintptr_t index) {
    emulator::fail("%s:%u: the index %lld is outside of its array", p->file ? p->file : "?", p->line, (long long)index);
}
void __ubsan_handle_shift_out_of_bounds_abort(Place* p, uintptr_t, uintptr_t) { FOUND(*p, "a shift by as many bits as the number has, or more"); }
void __ubsan_handle_divrem_overflow_abort(Place* p, uintptr_t, uintptr_t) { FOUND(*p, "a division by zero, or one whose result does not fit"); }
}

// ---- The entry

extern "C" {
// The source's end defines it.
void emulator_call(unsigned index, const unsigned char* words);
const unsigned* emulator_cluster(unsigned index);

__attribute__((visibility("default"))) const char* emulate(emulator::Launch* launch) {
    using namespace emulator;
    launched = launch;
    block.parameter = nullptr;
    // The first touch gives this thread its memory.
    emulator_dynamic[0] = 0;
    reach = {};
    dl_iterate_phdr(find, nullptr);
    reach.dynamic = {(uintptr_t)emulator_dynamic, (uintptr_t)emulator_dynamic + (launch->shared < DYNAMIC ? launch->shared : DYNAMIC)};
    block.switched = switched;
    block.shared[0] = {(void*)reach.tls.from, reach.dynamic.from - reach.tls.from};
    block.shared[1] = {(void*)reach.dynamic.from, reach.dynamic.to - reach.dynamic.from};
    const uintptr_t behind = reach.dynamic.from + DYNAMIC;
    block.shared[2] = {(void*)behind, reach.tls.to - behind};
    blockDim = {launch->block[0], launch->block[1], launch->block[2]};
    gridDim = {launch->grid[0], launch->grid[1], launch->grid[2]};
    begin_copies();
    begin_products();
    if (launch->watched) begin_watching();
    auto body = [&] {
        emulator_call(launch->index, launch->words);
        settle();
        end_thread();
        end_products();
    };
    const char* failure = run_grid(*launch, body, emulator_cluster(launch->index));
    end_watching();
    fflush(stdout);
    return failure;
}

__attribute__((visibility("default"))) void emulated_end() { emulator::end(); }
}
#pragma GCC visibility pop
