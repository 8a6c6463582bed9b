// Hopper's mbarriers and bulk copies, a part of the runtime.
//
// A copy runs at its issue in one order of threads, and as late as it may in the other. A late load runs when a thread waits at its
// mbarrier, a late store when its thread waits for the group. So a missing wait gives other results in one of the two.

#pragma once

#include "conversions.hpp"
#include "ptx.hpp"

namespace emulator {

// The code that issued what runs.
void* issued;
#define ISSUED issued = __builtin_return_address(0)

template <class... A> [[noreturn]] void broken(const char* what, A... all) {
    block.failed_at = (size_t)issued;
    fail(what, all...);
}

// ---- Addresses of shared memory

// A device keeps the first 1,024 bytes for itself. The bits above an offset are the block's rank and one more, or zero for the own block.
constexpr unsigned KEPT = 1024, RANK = 24, OFFSETS = (1u << RANK) - 1;

uintptr_t window() { return reach.tls.from / 1024 * 1024 - KEPT; }
unsigned rank_of(Register address) {
    const unsigned above = (unsigned)address >> RANK;
    return above ? above - 1 : block.rank;
}
// The place in the own block, whose copies the other blocks have.
uintptr_t place_of(Register address, size_t bytes) {
    const uintptr_t at = window() + (address & OFFSETS);
    if (!reach.shared(at, bytes)) broken("illegal address: %zu bytes at the shared address 0x%x", bytes, (unsigned)address);
    return at;
}
unsigned char* memory_of(uintptr_t at, unsigned rank) { return (unsigned char*)of_block((void*)at, rank); }

__attribute__((used)) Register shared_address(Register generic) {
    ISSUED;
    if (!reach.tls.has(generic, 1)) broken("the address 0x%llx is not in the block's shared memory", generic);
    return generic - window();
}
__attribute__((used)) Register generic_address(Register shared) { return ISSUED, place_of(shared, 1); }
__attribute__((used)) Register mapa(Register shared, Register rank) {
    ISSUED;
    if (rank >= block.cluster) broken("the shared memory of block %u of a cluster of %u", (unsigned)rank, block.cluster);
    return (shared & OFFSETS) | (rank + 1) << RANK;
}

// ---- Agents

Agent* agent_of(const volatile void* at, unsigned rank, bool make = true) {
    if (!knowledge) return nullptr;
    for (unsigned i = 0; i < agent_count; ++i) {
        Agent& agent = knowledge->agents[i];
        if (agent.at == at && agent.rank == rank) return &agent;
    }
    if (!make) return nullptr;
    if (agent_count == AGENTS) {
        flags_full = true;
        return nullptr;
    }
    Agent& agent = knowledge->agents[agent_count++];
    agent.at = at;
    agent.rank = rank;
    return &agent;
}

// The running thread has waited for what has a smaller number.
void learn_from(Agent* agent, unsigned number) {
    if (!agent) return;
    const unsigned warp = block.running->number / 32;
    Part& own = own_learner().own;
    known_of(warp);
    own.known.learn(agent->done);
    own.known.learn(THREADS + (unsigned)(agent - knowledge->agents), number);
    own.since = block.warps[warp].meetings + 1;
    if (agent->waited >= number) return;
    agent->common = agent->known();
    agent->waited = number;
    agent->waited_at = ++block.moment;
}

// The generic proxy's write is visible to the asynchronous proxy: a fence is behind it in its own thread, in the running one, or in
// another that the writer has met.
bool proxied(const Trace& write) {
    if (write.block == 0 || write.thread >= THREADS || cluster_of(write.block) != cluster_of(block_number)) return true;
    const unsigned writer = rank_of(write.block) * THREADS + write.thread;
    return knowledge->learners[writer].proxy > write.moment || learner(block.running->number).proxy > write.moment ||
           knowledge->warps[writer / 32].proxied > write.moment;
}

// An agent's access, behind what the running thread knows.
void trace_agent(uintptr_t at, size_t bytes, bool writes, const Agent* agent, unsigned number, unsigned rank) {
    if (!agent) return;
    const unsigned block_of = block_number - block.rank + rank;
    const Trace own = trace_of(*block.running, false), left = {block_of, number, THREADS + (unsigned)(agent - knowledge->agents), 0};
    for (unsigned i = 0; i < watch_count; ++i) {
        const Watch& watch = watches[i];
        if (at - watch.from >= watch.bytes || bytes > watch.bytes - (at - watch.from)) continue;
        for (size_t n = 0; n < bytes; ++n) {
            Byte& byte = watch.traces[at - watch.from + n];
            if (rank == block.rank) {
                const bool after_write = !ordered(byte.written, own, i == 0);
                if (after_write || (writes && !ordered(byte.read, own, i == 0))) {
                    race(writes ? "write" : "read", at + n, after_write ? byte.written : byte.read, after_write, issued);
                }
                if (!writes && !proxied(byte.written)) {
                    const char* name = agent->name ? agent->name : "a bulk copy";
                    broken("race: %s reads what the generic proxy wrote, without fence.proxy.async between the two", name);
                }
            }
            (writes ? byte.written : byte.read) = left;
        }
        return;
    }
}

__attribute__((used)) void fence_proxy() {
    settle();
    if (!knowledge) return;
    own_learner().proxy = ++block.moment;
    for (unsigned w = 0; w < WARPS; ++w) {
        unsigned& proxied = knowledge->warps[block.rank * WARPS + w].proxied;
        const unsigned met_at = w == block.running->number / 32 ? block.warps[w].met_at : 0;
        proxied = met_at > block.met_at ? met_at : block.met_at;
    }
}

// ---- mbarriers

// The object in shared memory. What is not `VALID` is no mbarrier.
struct Mbarrier {
    Register valid : 2, phase : 1, count : 20, pending : 20;
    long long bytes : 21;
};
static_assert(sizeof(Mbarrier) == 8, "the size that PTX tells");
constexpr unsigned VALID = 1, MOST = (1 << 20) - 1;

// An mbarrier of a block of the cluster.
struct Signal {
    uintptr_t at;
    unsigned rank;
    Mbarrier& mbarrier() const {
        Mbarrier& barrier = *(Mbarrier*)memory_of(at, rank);
        if (barrier.valid != VALID) broken("an mbarrier that is not initialised");
        return barrier;
    }
    Agent* agent() const { return agent_of((void*)at, rank); }
};

Signal signal_of(Register address, unsigned access, bool atomic = true) {
    if (address % 8 != 0) broken("an mbarrier at the shared address 0x%x, which is no multiple of 8", (unsigned)address);
    const Signal signal = {place_of(address, 8), rank_of(address)};
    if (signal.rank == block.rank) look((void*)signal.at, 8, access, issued, atomic, false);
    return signal;
}

// Ends the phase if nothing is pending.
void end_phase(Signal signal) {
    Mbarrier& barrier = signal.mbarrier();
    if (barrier.pending != 0 || barrier.bytes > 0) return;
    if (barrier.bytes < 0) broken("%lld bytes beyond those that the phase of the mbarrier expects", -(long long)barrier.bytes);
    barrier.phase ^= 1;
    barrier.pending = barrier.count;
    block.progress = true;
    ++block.moment;
    if (Agent* agent = signal.agent()) {
        agent->done.learn(agent->arrived);
        ++agent->number;
    }
}

void add_bytes(Mbarrier& barrier, long long bytes) {
    const long long sum = barrier.bytes + bytes;
    if (sum > (long long)MOST || sum < -(long long)MOST) broken("an mbarrier that expects %lld bytes, which are more than %u", sum, MOST);
    barrier.bytes = sum;
}

Register arrive_at(Register at, Register count, Register bytes) {
    const Signal signal = signal_of(at, 3);
    Mbarrier& barrier = signal.mbarrier();
    Register state;
    memcpy(&state, &barrier, 8);
    add_bytes(barrier, (long long)(unsigned)bytes);
    const unsigned pending = barrier.pending;
    if (count == 0 || count > pending) broken("%llu arrivals at an mbarrier whose phase waits for %u", count, pending);
    barrier.pending = pending - count;
    block.progress = true;
    ++block.moment;
    if (signal.rank != block.rank) {
        if (block_fence) block_fence[(block_number - 1) / 8] |= 1 << (block_number - 1) % 8;
    } else if (Agent* agent = signal.agent()) {
        tell(agent->arrived);
    }
    end_phase(signal);
    return state;
}

__attribute__((used)) void mbarrier_init(Register at, Register count) {
    ISSUED;
    const Signal signal = signal_of(at, 2, false);
    count = (unsigned)count;
    if (signal.rank != block.rank || count == 0 || count > MOST) broken("an mbarrier of %llu arrivals", count);
    Mbarrier barrier = {};
    barrier.valid = VALID;
    barrier.count = barrier.pending = count;
    memcpy((void*)signal.at, &barrier, 8);
}
__attribute__((used)) void mbarrier_inval(Register at) {
    ISSUED;
    const Signal signal = signal_of(at, 2, false);
    signal.mbarrier().valid = 0;
}
__attribute__((used)) Register mbarrier_arrive(Register at, Register count) { return ISSUED, arrive_at(at, (unsigned)count, 0); }
__attribute__((used)) Register mbarrier_arrive_expect(Register at, Register bytes) { return ISSUED, arrive_at(at, 1, bytes); }
__attribute__((used)) void mbarrier_expect(Register at, Register bytes) {
    ISSUED;
    add_bytes(signal_of(at, 3).mbarrier(), (long long)(unsigned)bytes);
}

// ---- Boxes

// The bytes of a tensor map, as the simulated driver fills them.
struct Encoded {
    unsigned sizes[5][2], strides[4][2], box[5], steps[5];
    unsigned char element, rank, interleave, swizzle, l2, nan;
    unsigned short magic;
    uint64_t device;
};
static_assert(sizeof(Encoded) == 128, "the size that the driver tells");
constexpr unsigned MAGIC = 0x544D;
// CUtensorMapDataType.
constexpr unsigned TF32 = 11;
constexpr unsigned char ELEMENT_BYTES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};

// A tensor and the box that a copy takes of it. A copy without a map has one dimension of bytes.
struct Tensor {
    uintptr_t at;
    // Bytes of an element or of a slice, the element's type, and bytes from row to row of the box.
    unsigned bytes, element, pitch, swizzle;
    bool nan;
    long long sizes[5], strides[5];
    unsigned counts[5], steps[5];
};

unsigned box_bytes(const Tensor& tensor) {
    unsigned all = tensor.bytes;
    for (unsigned count : tensor.counts) all *= count;
    return all;
}

// The tensor of a map, whose memory must be an operand's.
Tensor decode(Register address, unsigned dimensions, unsigned access) {
    const char* name = launched->kernel;
    const auto whole = [](const unsigned* halves) { return (unsigned long long)halves[1] << 32 | halves[0]; };
    if (address % 64 != 0) broken("kernel %s: a tensor map at the address 0x%llx, which is no multiple of 64", name, address);
    look((void*)address, sizeof(Encoded), 1, issued);
    Encoded map;
    memcpy(&map, (void*)address, sizeof(map));
    if (map.magic != MAGIC) broken("kernel %s: a tensor map that no driver has encoded", name);
    if (map.rank != dimensions) broken("kernel %s: a copy of %u dimensions by a tensor map of %u", name, dimensions, map.rank);
    if (map.interleave > 2 || (map.interleave && map.rank < 3)) broken("kernel %s: a tensor map whose interleaved layout no driver accepts", name);
    if (map.element >= sizeof(ELEMENT_BYTES)) broken("kernel %s: not emulated: a tensor map of the data type %u", name, map.element);
    if (map.swizzle > 3) broken("kernel %s: not emulated: a tensor map with the swizzle mode %u", name, map.swizzle);
    // An interleaved layout has slices of 16 or 32 bytes in the place of elements. A box has one of the last dimension but one.
    const unsigned unit = map.interleave ? 8u << map.interleave : ELEMENT_BYTES[map.element], align = map.interleave == 2 ? 32 : 16;
    if (map.device % align != 0) broken("kernel %s: a tensor map of an address that is no multiple of %u", name, align);
    Tensor tensor = {0, unit, map.element, 0, map.swizzle, map.nan == 1, {}, {}, {}, {}};
    uint64_t extent = tensor.bytes;
    for (unsigned d = 0; d < 5; ++d) {
        const bool used = d < dimensions;
        const uint64_t size = used ? whole(map.sizes[d]) : 1;
        const uint64_t stride = !used ? 0 : d == 0 ? tensor.bytes : whole(map.strides[d - 1]);
        const unsigned box = used && !(map.interleave && d + 2 == dimensions) ? map.box[d] : 1;
        // Without an interleaved layout the first step has no meaning.
        const unsigned step = used && (d > 0 || map.interleave) ? map.steps[d] : 1;
        const bool right = size - 1 <= ~0u && stride >> 40 == 0 && (d == 0 || stride % align == 0) && box - 1 < 256 && step - 1 < 8;
        if (!right) broken("kernel %s: a tensor map whose dimension %u no driver accepts", name, d);
        if (size > 1ull << 31) {
            broken("kernel %s: a tensor map of %llu elements in dimension %u; beyond 2^31 a device ends a copy by an illegal instruction", name,
                   (unsigned long long)size, d);
        }
        tensor.sizes[d] = (long long)size;
        tensor.strides[d] = (long long)stride;
        tensor.counts[d] = (box + step - 1) / step;
        tensor.steps[d] = step;
        extent += (size - 1) * stride;
    }
    // A swizzled row takes the whole width of the swizzle.
    const unsigned row = tensor.counts[0] * tensor.bytes, width = 16u << map.swizzle;
    tensor.pitch = map.swizzle && !map.interleave ? width : row;
    if (row % 16 != 0 || row > tensor.pitch) broken("kernel %s: a tensor map whose box has rows of %u bytes", name, row);
    const Operand* partly = nullptr;
    for (size_t i = 0; i < launched->operand_count; ++i) {
        const Operand& o = launched->operands[i];
        const uint64_t before = map.device - o.device;
        if (before >= o.bytes) continue;
        if (extent > o.bytes - before) {
            partly = &o;
            continue;
        }
        tensor.at = o.at + before;
        if (o.access & access) return tensor;
    }
    if (tensor.at) refuse(access & 2 ? "write" : "read", tensor.at, extent, issued);
    if (partly) {
        broken("kernel %s: a tensor map of %llu bytes from byte %llu of binding %zu on, which has %llu bytes", name, extent,
               map.device - partly->device, (size_t)(partly - launched->operands), partly->bytes);
    }
    broken("kernel %s: a tensor map with the address 0x%llx, which is no operand of this launch: it is of a former address, or not bound",
           name, map.device);
}

// The tensor of a copy without a map.
Tensor plain(Register at, Register bytes, unsigned access) {
    bytes = (unsigned)bytes;
    for (size_t i = 0; i < launched->operand_count; ++i) {
        const Operand& o = launched->operands[i];
        if (at - o.at >= o.bytes || bytes > o.bytes - (at - o.at) || !(o.access & access)) continue;
        const uint64_t device = o.device + (at - o.at);
        if (device % 16 != 0 || bytes % 16 != 0 || bytes > MOST) {
            broken("a bulk copy of %llu bytes at byte %llu of binding %zu; both are multiples of 16, up to %u", bytes, at - o.at, i, MOST);
        }
        const unsigned n = (unsigned)bytes;
        return {(uintptr_t)at, 1, 0, n, 0, false, {n, 1, 1, 1, 1}, {1}, {n, 1, 1, 1, 1}, {1, 1, 1, 1, 1}};
    }
    refuse(access & 2 ? "write" : "read", at, bytes, issued);
}

// ---- Copies

struct Copy {
    Tensor tensor;
    long long first[5];
    // The box in shared memory, and the blocks that have one.
    unsigned shared, blocks;
    bool stores;
    // The mbarrier of a load.
    uintptr_t barrier;
    // The thread and the group of a store.
    const Fiber* fiber;
    unsigned group;
    void* code;
    Copy* next;
};
// The copies that have not run yet.
Copy* waiting;

// Calls `f` for every 16 bytes of the box with their address in shared memory and that in the tensor. The last two numbers are the part
// of the 16 that is within the tensor.
template <class F> void pieces(const Copy& copy, F f) {
    const Tensor& tensor = copy.tensor;
    unsigned row_at = copy.shared, index[5] = {};
    const long long end = tensor.sizes[0] * tensor.bytes, row = (long long)tensor.counts[0] * tensor.bytes;
    const auto within = [](long long v) { return (unsigned)(v < 0 ? 0 : v > 16 ? 16 : v); };
    for (unsigned d = 0; d < 5;) {
        uintptr_t global = tensor.at;
        bool inside = true;
        for (unsigned i = 1; i < 5; ++i) {
            const long long k = copy.first[i] + (long long)index[i] * tensor.steps[i];
            inside &= k >= 0 && k < tensor.sizes[i];
            global += k * tensor.strides[i];
        }
        unsigned at = row_at;
        for (unsigned piece = 0; piece < row; piece += 16, at += 16) {
            const long long byte = (copy.first[0] + piece / tensor.bytes * tensor.steps[0]) * tensor.bytes + piece % tensor.bytes;
            const unsigned from = within(-byte), to = inside ? within(end - byte) : 0;
            // A swizzle moves pieces of 16 bytes by the number of their line of 128.
            const unsigned moved = at ^ (at >> 3 & ((1u << tensor.swizzle) - 1) << 4);
            f(window() + moved, global + byte, from, from < to ? to : from);
        }
        row_at += tensor.pitch;
        for (d = 1; d < 5 && ++index[d] == tensor.counts[d]; ++d) index[d] = 0;
    }
}

// The bytes that a device writes for elements outside of the tensor.
void fill(unsigned char* piece, const Tensor& tensor) {
    for (unsigned i = 0; i < 16; i += 2) {
        const unsigned short value = tensor.nan ? 0x7ff7 : 0;
        memcpy(piece + i, &value, 2);
    }
}
// A load rounds `f32` to the nearest `tf32`, and to even. Subnormal numbers stay, also in the types that have FTZ in their names.
void round(unsigned char* at, unsigned bytes, const Tensor& tensor) {
    for (unsigned i = 0; tensor.element >= TF32 && i < bytes; i += 4) {
        unsigned u;
        memcpy(&u, at + i, 4);
        u = (u & 0x7fffffffu) > 0x7f800000u ? 0x7fffe000u : (u + 0xfff + (u >> 13 & 1)) & ~0x1fffu;
        memcpy(at + i, &u, 4);
    }
}

void run(const Copy& copy) {
    settle();
    issued = copy.code;
    pieces(copy, [&](uintptr_t at, uintptr_t global, unsigned from, unsigned to) {
        if (copy.stores) {
            memcpy((void*)(global + from), (void*)(at + from), to - from);
            return;
        }
        unsigned char piece[16];
        fill(piece, copy.tensor);
        memcpy(piece + from, (void*)(global + from), to - from);
        round(piece + from, to - from, copy.tensor);
        for (unsigned rank = 0; rank < block.cluster; ++rank) {
            if (copy.blocks >> rank & 1) memcpy(memory_of(at, rank), piece, 16);
        }
    });
    for (unsigned rank = 0; !copy.stores && rank < block.cluster; ++rank) {
        if (!(copy.blocks >> rank & 1)) continue;
        const Signal signal = {copy.barrier, rank};
        add_bytes(signal.mbarrier(), -(long long)box_bytes(copy.tensor));
        end_phase(signal);
    }
}

// Runs the waiting copies for which `now` is true.
template <class F> void finish(F now) {
    for (Copy** link = &waiting; *link;) {
        Copy* copy = *link;
        if (!now(*copy)) {
            link = &copy->next;
            continue;
        }
        *link = copy->next;
        run(*copy);
        free(copy);
    }
}

void issue(Copy copy) {
    unsigned bytes = copy.tensor.pitch;
    for (unsigned d = 1; d < 5; ++d) bytes *= copy.tensor.counts[d];
    // Pieces change places within lines of 128 bytes.
    place_of(copy.shared, copy.tensor.swizzle ? (bytes + 127) / 128 * 128 : bytes);
    settle();
    // The own block comes last, so its traces are the ones that are found.
    for (unsigned i = 1; i <= block.cluster; ++i) {
        const unsigned rank = (block.rank + i) % block.cluster;
        if (!(copy.blocks >> rank & 1)) continue;
        const Agent* reads = copy.stores ? agent_of(copy.fiber, rank) : agent_of((void*)copy.barrier, rank);
        const Agent* writes = copy.stores ? agent_of((char*)copy.fiber + 1, rank) : reads;
        const unsigned number = copy.stores ? copy.group : reads ? reads->number : 0;
        pieces(copy, [&](uintptr_t at, uintptr_t global, unsigned from, unsigned to) {
            trace_agent(at, 16, !copy.stores, reads, number, rank);
            if (from < to) trace_agent(global + from, to - from, copy.stores, writes, number, block.rank);
        });
    }
    copy.code = issued;
    if (!launched->reverse) return run(copy);
    Copy* kept = (Copy*)malloc(sizeof(Copy));
    if (!kept) fail("no host memory is left");
    *kept = copy;
    Copy** link = &waiting;
    while (*link) link = &(*link)->next;
    *link = kept;
}

// The box's first element. A device fails a kernel with the other coordinates, by an illegal instruction.
void place(Copy& copy, const Place& first) {
    for (unsigned d = 0; d < first.dimensions; ++d) {
        copy.first[d] = first.at[d];
        if (copy.stores && first.at[d] < 0) broken("a bulk store at the coordinate %d in dimension %u", first.at[d], d);
    }
    const long long byte = copy.first[0] * copy.tensor.bytes;
    if (byte % 16 != 0) broken("a bulk copy at the coordinate %d in dimension 0: %lld bytes, no multiple of 16", first.at[0], byte);
}
void load(const Tensor& tensor, const Place& first, Register to, Register barrier, unsigned blocks) {
    const Signal signal = signal_of(barrier, 3);
    if (rank_of(to) != signal.rank) broken("a bulk copy to block %u that signals an mbarrier of block %u", rank_of(to), signal.rank);
    if (blocks >> block.cluster) broken("a bulk copy to the blocks 0x%x of a cluster of %u", blocks, block.cluster);
    Copy copy = {tensor, {}, (unsigned)to & OFFSETS, blocks ? blocks : 1u << signal.rank, false, signal.at, nullptr, 0, nullptr, nullptr};
    place(copy, first);
    for (unsigned rank = 0; rank < block.cluster; ++rank) {
        if (copy.blocks >> rank & 1) Signal{signal.at, rank}.mbarrier();
    }
    issue(copy);
}
void store(const Tensor& tensor, const Place& first, Register from) {
    Fiber& fiber = *block.running;
    if (rank_of(from) != block.rank) broken("a bulk store of another block's shared memory");
    Copy copy = {tensor, {}, (unsigned)from & OFFSETS, 1u << block.rank, true, 0, &fiber, fiber.groups, nullptr, nullptr};
    place(copy, first);
    fiber.stores = fiber.groups + 1;
    issue(copy);
}
void aligned(Register shared, unsigned bytes) {
    if (shared % bytes != 0) broken("a bulk copy at the shared address 0x%x, which is no multiple of %u", (unsigned)shared, bytes);
}

__attribute__((used)) void bulk_load(Register to, Register from, Register bytes, Register barrier, Register blocks) {
    ISSUED;
    aligned(to, 16);
    load(plain(from, bytes, 1), Place(), to, barrier, (unsigned short)blocks);
}
__attribute__((used)) void bulk_store(Register to, Register from, Register bytes) {
    ISSUED;
    aligned(from, 16);
    store(plain(to, bytes, 2), Place(), from);
}
__attribute__((used)) void tensor_load(Register to, Register map, const Place& first, Register barrier, Register blocks) {
    ISSUED;
    aligned(to, 128);
    load(decode(map, first.dimensions, 1), first, to, barrier, (unsigned short)blocks);
}
__attribute__((used)) void tensor_store(Register map, const Place& first, Register from) {
    ISSUED;
    aligned(from, 128);
    store(decode(map, first.dimensions, 2), first, from);
}

// ---- Waits

Register wait_at(Register at, unsigned phase) {
    void* const code = issued;
    const Signal signal = signal_of(at, 1);
    if (signal.rank != block.rank) broken("a wait at another block's mbarrier");
    Fiber& fiber = *block.running;
    const auto over = [&] {
        if (signal.mbarrier().phase != phase) return true;
        finish([&](const Copy& copy) { return !copy.stores && copy.barrier == signal.at && copy.blocks >> signal.rank & 1; });
        issued = code;
        return signal.mbarrier().phase != phase;
    };
    if (!over()) {
        // The look is new if something has happened since the last one.
        if (fiber.polled != block.moment + 1) block.progress = true;
        fiber.polled = block.moment + 1;
        fiber.waits = "mbarrier.try_wait";
        yield();
        fiber.waits = nullptr;
        issued = code;
        if (!over()) return 0;
    }
    if (block.cluster > 1) block_atomic = true;
    if (Agent* agent = signal.agent()) learn_from(agent, agent->number);
    return 1;
}
__attribute__((used)) Register mbarrier_wait(Register at, Register state, Register) { return ISSUED, wait_at(at, state >> 2 & 1); }
__attribute__((used)) Register mbarrier_wait_parity(Register at, Register parity, Register) {
    ISSUED;
    if ((unsigned)parity > 1) broken("a wait for the phase of the parity %u", (unsigned)parity);
    return wait_at(at, (unsigned)parity);
}

__attribute__((used)) void bulk_commit() { ++block.running->groups; }

void wait_for_groups(unsigned left, bool reads_only) {
    settle();
    Fiber& fiber = *block.running;
    const unsigned done = fiber.groups > left ? fiber.groups - left : 0;
    finish([&](const Copy& copy) { return copy.stores && copy.fiber == &fiber && copy.group < done; });
    if (done > fiber.stores_read) fiber.stores_read = done;
    learn_from(agent_of(&fiber, block.rank, false), done);
    if (!reads_only) learn_from(agent_of((char*)&fiber + 1, block.rank, false), done);
}
__attribute__((used)) void bulk_wait(Register groups) { wait_for_groups((unsigned)groups, false); }
__attribute__((used)) void bulk_wait_read(Register groups) { wait_for_groups((unsigned)groups, true); }

// A thread ends.
void end_thread() {
    const Fiber& fiber = *block.running;
    issued = nullptr;
    if (fiber.stores_read < fiber.stores) broken("a thread ends before its bulk stores have read shared memory (cp.async.bulk.wait_group)");
    if (waiting && block.cluster_ended + 1 == block.count * block.cluster) {
        issued = waiting->code;
        broken("the blocks end before a bulk copy, for which no thread waits");
    }
}

// A launch begins. The one before may have failed.
void begin_copies() {
    while (Copy* copy = waiting) {
        waiting = copy->next;
        free(copy);
    }
}

}  // namespace emulator
