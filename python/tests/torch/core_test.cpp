// Random programs over the core of the extension and a simulated device, from several threads.
//
// core_test LIBRARY PROGRAMS: prints "ok" and numbers, or what is wrong, with status 1.
// core_test LIBRARY wake BUDGET: a region sleeps and wakes under a budget in MiB; 0 for none.
#define LEASEHOLD_SIM
#include "core.hpp"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <thread>

using namespace leasehold_torch;

namespace {

struct Simulation {
    decltype(&leasehold_sim_stream) stream;
    decltype(&leasehold_sim_fill) fill;
    decltype(&leasehold_sim_read) read;
    decltype(&leasehold_sim_order) order;
    decltype(&leasehold_sim_capture) capture;
    decltype(&leasehold_sim_races) races;
    decltype(&leasehold_stream_end) end;
} sim;

Memory *memory;
leasehold_device device;
thread_local uintptr_t current = 0; // the thread's stream
std::mutex captured_lock;
std::set<uintptr_t> captured_streams;
std::atomic<uint64_t> taken{0}, checked{0}, captures{0}, restored{0}, refused{0};

[[noreturn]] void fail(const std::string &text) {
    std::printf("wrong: %s\n", text.c_str());
    std::fflush(stdout);
    std::_Exit(1);
}

void expect(bool right, const char *text) {
    if (!right) {
        fail(text);
    }
}

/// Tells a device's memory of the threads' streams and of the captures of all threads.
void connect(Memory &memory) {
    memory.current_stream = [] { return current; };
    memory.is_captured = [](uintptr_t stream) {
        std::lock_guard<std::mutex> guard(captured_lock);
        return captured_streams.count(stream) != 0;
    };
}

/// All live blocks, which must not overlap.
std::mutex ranges_lock;
std::map<uintptr_t, size_t> ranges;

void enter(void *block, size_t bytes) {
    std::lock_guard<std::mutex> guard(ranges_lock);
    auto at = reinterpret_cast<uintptr_t>(block);
    auto next = ranges.lower_bound(at);
    expect(next == ranges.end() || at + bytes <= next->first, "a block overlaps the next one");
    expect(next == ranges.begin() || std::prev(next)->first + std::prev(next)->second <= at,
           "a block overlaps the one before");
    ranges.emplace(at, bytes);
}

void leave(void *block) {
    std::lock_guard<std::mutex> guard(ranges_lock);
    expect(ranges.erase(reinterpret_cast<uintptr_t>(block)) == 1, "a range is unknown");
}

struct Live {
    void *block;
    size_t bytes;
    uint8_t value;
};

/// Allocates a block, or nothing if memory is short.
void *take(size_t bytes, uintptr_t stream) {
    try {
        void *block = memory->allocate(bytes, stream);
        enter(block, bytes);
        ++taken;
        return block;
    } catch (const Failure &failure) {
        if (failure.status != LEASEHOLD_OUT_OF_MEMORY && failure.status != LEASEHOLD_OVER_BUDGET) {
            fail(failure.what());
        }
        ++refused;
        return nullptr;
    }
}

void give(void *block) {
    leave(block);
    expect(memory->free(block), "a block is unknown");
}

void check(const Live &live, uintptr_t stream, uintptr_t side) {
    sim.order(device, side, stream);
    std::vector<uint8_t> found(live.bytes);
    expect(sim.read(device, stream, found.data(), live.block, live.bytes) == 0, "read");
    for (uint8_t byte : found) {
        expect(byte == live.value, "contents differ");
    }
    ++checked;
}

void captured(std::mt19937_64 &dice, uintptr_t stream, PoolId id) {
    {
        std::lock_guard<std::mutex> guard(captured_lock);
        captured_streams.insert(stream);
    }
    memory->begin_pool(id, [stream](uintptr_t s) { return s == stream; });
    expect(sim.capture(device, stream, 1) == 0, "capture");
    std::vector<void *> held;
    for (int i = 0; i < 6; ++i) {
        size_t bytes = 1 + dice() % 3000000;
        if (void *block = take(bytes, stream)) {
            sim.fill(device, stream, block, 9, bytes);
            held.push_back(block);
        }
        if (held.size() > 2) {
            give(held[0]);
            held.erase(held.begin());
        }
    }
    expect(sim.capture(device, stream, 0) == 0, "end of the capture");
    {
        std::lock_guard<std::mutex> guard(captured_lock);
        captured_streams.erase(stream);
    }
    memory->end_pool(id);
    expect(memory->live_blocks(id).size() == held.size(), "live blocks of a pool");
    // The state with these blocks comes back after they went.
    Checkpoint state = memory->checkpoint(id);
    for (void *block : held) {
        give(block);
    }
    Restored back = memory->restore(state);
    expect(back.freed.empty() && back.allocated.size() == held.size(), "restored blocks");
    for (const auto &[at, piece] : state.pieces) {
        if (piece.state == Piece::Live) {
            enter(reinterpret_cast<void *>(at), piece.requested);
        }
    }
    for (void *block : held) {
        give(block);
    }
    memory->release_pool(id);
    ++captures;
    restored += held.size();
}

void program(uint64_t seed, uintptr_t stream, uintptr_t side) {
    std::mt19937_64 dice(seed);
    std::vector<Live> live;
    current = stream;
    const size_t sizes[] = {1, 300, 9000, 70000, 1100000, 5000000};
    bool pooled = dice() % 4 == 0;
    PoolId id{0, seed * 2 + 1};
    if (pooled) {
        memory->begin_pool(id, [stream](uintptr_t s) { return s == stream; });
    }
    for (int step = 0; step < 40; ++step) {
        uint64_t what = dice() % 10;
        if (what < 5 || live.empty()) {
            size_t bytes = sizes[dice() % 6];
            auto value = static_cast<uint8_t>(dice());
            if (void *block = take(bytes, stream)) {
                expect(sim.fill(device, stream, block, value, bytes) == 0, "fill");
                live.push_back({block, bytes, value});
            }
        } else if (what < 7) {
            Live &used = live[dice() % live.size()];
            expect(sim.order(device, stream, side) == 0, "order");
            ++used.value;
            sim.fill(device, side, used.block, used.value, used.bytes);
            memory->record_stream(used.block, side);
            // Later work of the stream does not wait for it, but the block's next owner must.
            sim.fill(device, side, used.block, used.value, 1);
        } else {
            size_t at = dice() % live.size();
            if (dice() % 2 == 0) {
                check(live[at], stream, side);
            }
            give(live[at].block);
            live.erase(live.begin() + static_cast<long>(at));
        }
    }
    for (Live &one : live) {
        check(one, stream, side);
        give(one.block);
    }
    if (pooled) {
        memory->end_pool(id);
        memory->release_pool(id);
    }
    if (dice() % 4 == 0) {
        captured(dice, stream, {0, seed * 2 + 2});
    }
    if (dice() % 16 == 0) {
        memory->statistics();
        memory->walk();
    }
}

/// Plays a history that began without memory, and compares its end with the memory. `blocks`: also
/// that each block lay in memory.
size_t play(const std::vector<Event> &events, bool blocks) {
    std::map<uintptr_t, size_t> mapped, whole, live;
    auto overlaps = [](const std::map<uintptr_t, size_t> &ranges, uintptr_t at, size_t bytes) {
        auto next = ranges.lower_bound(at + bytes);
        return next != ranges.begin() && std::prev(next)->first + std::prev(next)->second > at;
    };
    auto inside = [](const std::map<uintptr_t, size_t> &ranges, uintptr_t at, size_t bytes) {
        auto next = ranges.upper_bound(at);
        return next != ranges.begin() && std::prev(next)->first + std::prev(next)->second >= at + bytes;
    };
    size_t segments = 0;
    for (const Event &event : events) {
        uintptr_t at = event.address, end = at + event.bytes;
        switch (event.kind) {
        case Event::SegmentMap: {
            expect(!overlaps(mapped, at, event.bytes), "mapped twice");
            expect(!overlaps(whole, at, event.bytes), "mapped over a segment");
            auto made = mapped.emplace(at, event.bytes).first;
            auto next = std::next(made);
            if (next != mapped.end() && next->first == end) {
                made->second += next->second;
                mapped.erase(next);
            }
            if (made != mapped.begin() && std::prev(made)->first + std::prev(made)->second == at) {
                std::prev(made)->second += made->second;
                mapped.erase(made);
            }
            break;
        }
        case Event::SegmentUnmap: {
            expect(inside(mapped, at, event.bytes), "unmapped where nothing was");
            auto from = std::prev(mapped.upper_bound(at));
            uintptr_t last = from->first + from->second;
            if (end < last) {
                mapped.emplace(end, last - end);
            }
            if (from->first < at) {
                from->second = at - from->first;
            } else {
                mapped.erase(from);
            }
            break;
        }
        case Event::SegmentAlloc:
            expect(!overlaps(mapped, at, event.bytes), "a segment over mapped memory");
            expect(!overlaps(whole, at, event.bytes), "a segment over another one");
            whole.emplace(at, event.bytes);
            break;
        case Event::SegmentFree: {
            auto found = whole.find(at);
            expect(found != whole.end() && found->second == event.bytes, "an unknown segment went");
            whole.erase(found);
            break;
        }
        case Event::Alloc:
            expect(!blocks || inside(mapped, at, event.bytes) || inside(whole, at, event.bytes),
                   "a block without memory");
            expect(live.emplace(at, event.bytes).second || !blocks, "a block began twice");
            continue;
        case Event::FreeCompleted:
            expect(live.erase(at) == 1 || !blocks, "an unknown block ended");
            continue;
        default:
            continue;
        }
        ++segments;
    }
    for (const Seen &seen : memory->walk()) {
        expect(!blocks || live.count(seen.address) == seen.live,
               "the history tells of other blocks");
        expect(inside(seen.expandable ? mapped : whole, seen.segment, seen.segment_bytes),
               "a segment that the history does not know");
    }
    size_t told = 0, there = 0;
    for (auto *ranges : {&mapped, &whole}) {
        for (auto &[at, bytes] : *ranges) {
            told += bytes;
        }
    }
    std::map<uintptr_t, size_t> seen_segments;
    for (const Seen &seen : memory->walk()) {
        seen_segments[seen.segment] = seen.segment_bytes;
    }
    for (auto &[at, bytes] : seen_segments) {
        there += bytes;
    }
    expect(told == there, "the history tells of other memory than there is");
    return segments;
}

/// A region sleeps and wakes while the rest of the memory is taken and freed in between, under a
/// budget and up to the device's own limit.
void sleep_and_wake(const Library &library, uint64_t budget) {
    constexpr size_t MIB = size_t(1) << 20;
    Memory own(library, "sim-cuda:0", budget, LEASEHOLD_POLICY_BALANCED);
    connect(own);
    uintptr_t stream = 0;
    expect(sim.stream(own.device(), 0, &stream) == 0, "stream");
    leasehold_pool region = own.make_region("weights", LEASEHOLD_POLICY_BALANCED);
    std::vector<void *> weights;
    for (int i = 0; i < 4; ++i) {
        weights.push_back(own.region_allocate(region, 15 * MIB, stream));
    }
    auto fill_up = [&](size_t bytes) {
        std::vector<void *> held;
        try {
            for (;;) {
                held.push_back(own.allocate(bytes, stream));
                expect(sim.fill(own.device(), stream, held.back(), 0xee, 100) == 0, "fill");
            }
        } catch (const Failure &failure) {
            expect(failure.status == LEASEHOLD_OUT_OF_MEMORY, failure.what());
        }
        expect(held.size() > 1, "there was no memory to take");
        return held;
    };
    auto free_all = [&](std::vector<void *> &held) {
        for (void *block : held) {
            expect(own.free(block), "a block is unknown");
        }
        held.clear();
    };
    for (uint8_t round = 1; round <= 9; ++round) {
        for (void *block : weights) {
            expect(sim.fill(own.device(), stream, block, round, 15 * MIB) == 0, "fill");
        }
        expect(own.suspend(region, true) >= 60 * MIB, "suspend");
        std::vector<void *> held = fill_up((7 + round) * MIB);
        if (round % 3 == 0) {
            try {
                own.resume(region);
                fail("a region woke up without memory");
            } catch (const Failure &failure) {
                expect(failure.status == LEASEHOLD_OUT_OF_MEMORY ||
                           failure.status == LEASEHOLD_OVER_BUDGET,
                       failure.what());
            }
        }
        free_all(held);
        // A private pool takes the rest, and its graph is destroyed. The arena keeps its segments.
        PoolId id{1, round};
        own.begin_pool(id, [](uintptr_t) { return true; });
        held = fill_up(11 * MIB);
        own.end_pool(id);
        own.release_pool(id);
        free_all(held);
        own.resume(region);
        for (void *block : weights) {
            for (size_t at : {size_t(0), 15 * MIB - 1}) {
                uint8_t found = 0;
                void *place = static_cast<char *>(block) + at;
                expect(sim.read(own.device(), stream, &found, place, 1) == 0, "read");
                expect(found == round, "the contents of a region differ");
            }
        }
    }
    for (void *block : weights) {
        expect(library.free(own.device(), block) == 0, "free");
    }
    expect(library.pool_release(region) == 0, "release");
    own.empty_cache();
    expect(own.statistics().reserved.current == 0, "memory of a region is left");
}

HistorySettings recorded(size_t most) { return {true, most, 0, false, false, false, {}}; }

} // namespace

int main(int count, char **arguments) {
    if (count != 3 && count != 4) {
        return 2;
    }
    static Library library = Library::load(arguments[1]);
    void *handle = dlopen(arguments[1], RTLD_NOW);
    auto find = [&](auto &to, const char *name) {
        to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(dlsym(handle, name));
        expect(to != nullptr, name);
    };
    find(sim.stream, "leasehold_sim_stream");
    find(sim.fill, "leasehold_sim_fill");
    find(sim.read, "leasehold_sim_read");
    find(sim.order, "leasehold_sim_order");
    find(sim.capture, "leasehold_sim_capture");
    find(sim.races, "leasehold_sim_races");
    find(sim.end, "leasehold_stream_end");
    if (count == 4) {
        sleep_and_wake(library, std::strtoull(arguments[3], nullptr, 10) << 20);
        std::printf("ok: regions\n");
        std::fflush(stdout);
        std::_Exit(0);
    }
    memory = new Memory(library, "sim-cuda:0", 300u << 20, LEASEHOLD_POLICY_BALANCED);
    connect(*memory);
    device = memory->device();
    memory->record_history(recorded(1u << 24), true);
    uint64_t programs = std::strtoull(arguments[2], nullptr, 10);
    constexpr uint64_t THREADS = 6;
    std::vector<std::thread> threads;
    for (uint64_t thread = 0; thread < THREADS; ++thread) {
        threads.emplace_back([=] {
            uintptr_t stream = 0, side = 0;
            expect(sim.stream(device, 0, &stream) == 0 && sim.stream(device, 0, &side) == 0, "stream");
            for (uint64_t seed = thread; seed < programs; seed += THREADS) {
                program(seed, stream, side);
            }
        });
    }
    for (auto &thread : threads) {
        thread.join();
    }
    char *races = nullptr;
    expect(sim.races(&races) == 0, library.last_error());
    expect(races[0] == 0, std::string(races).substr(0, 2000).c_str());
    Statistics end = memory->statistics();
    expect(end.blocks[0].current == 0 && end.bytes[0].current == 0, "blocks are left");
    expect(end.blocks[0].allocated == end.blocks[0].freed, "counts of blocks");
    expect(end.bytes[0].peak <= end.reserved.peak, "more was allocated than reserved");
    memory->note_segments();
    size_t segments = play(memory->events(), false);
    expect(segments > 20, "events of segments");
    memory->record_history(recorded(1000), false);
    memory->empty_cache();
    expect(memory->statistics().reserved.current == 0, "memory is left after empty_cache");
    expect(memory->events().size() == 1000, "events");
    // One thread: each block lies in memory that the history told of before.
    memory->record_history(recorded(1u << 24), true);
    uintptr_t stream = 0, side = 0;
    expect(sim.stream(device, 0, &stream) == 0 && sim.stream(device, 0, &side) == 0, "stream");
    for (uint64_t seed = programs; seed < programs + 60; ++seed) {
        program(seed, stream, side);
        if (seed % 20 == 0) {
            memory->empty_cache();
        }
        play(memory->events(), true);
    }
    memory->empty_cache();
    segments += play(memory->events(), true);
    try {
        memory->allocate(size_t(400) << 20, 0);
        fail("no limit");
    } catch (const Failure &failure) {
        expect(failure.what()[0] != 0, "a failure has no text");
    }
    std::printf("ok: %llu blocks, %llu checked, %llu captures, %llu blocks restored, %llu refused, "
                "%zu events of segments\n",
                (unsigned long long)taken, (unsigned long long)checked,
                (unsigned long long)captures, (unsigned long long)restored,
                (unsigned long long)refused, segments);
    std::fflush(stdout);
    std::_Exit(0);
}
