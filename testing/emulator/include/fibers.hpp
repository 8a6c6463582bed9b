// Runs the blocks of a launch on the host, for tests. A CUDA block is a threadgroup of Metal, a warp a SIMD-group.
//
// The threads of a block are fibers of one thread; blocks follow each other. A warp runs as far as it can without the others, then the
// next one does, or the one before it in reverse order: what a missing barrier leaves open happens, in one of the two orders. A barrier
// that some threads never reach, or a shuffle that some lanes of a warp never reach, ends the process with a message.
// Shared memory is filled with NaN before each block.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

// One block at a time: its shared memory is static, in a section of its own, so that it can be filled.
#define EMULATED_SHARED __attribute__((section("emulated_shared")))
// The section exists even if no kernel has shared memory.
EMULATED_SHARED __attribute__((used)) static char emulated_nothing[16];

namespace emulator {

inline unsigned bits_of(float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    return u;
}
inline float float_of(unsigned u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

}  // namespace emulator

// Conversions with the results of the device's own.
inline float f16_to_f32(uint16_t h) {
    const unsigned sign = (unsigned)(h >> 15) << 31, exponent = (h >> 10) & 31u, fraction = h & 1023u;
    if (exponent == 31) return emulator::float_of(sign | 0x7f800000u | (fraction == 0 ? 0 : 0x400000u | (fraction << 13)));
    const float magnitude = exponent == 0 ? std::ldexp((float)fraction, -24)
                                          : std::ldexp((float)(1024u + fraction), (int)exponent - 25);
    return sign ? -magnitude : magnitude;
}

inline uint16_t f32_to_f16(float f) {
    const uint16_t sign = (uint16_t)((emulator::bits_of(f) >> 31) << 15);
    if (f != f) return 0x7fff;
    const float magnitude = std::fabs(f);
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    if (magnitude == 0.0f) return sign;
    int exponent;
    std::frexp(magnitude, &exponent);
    // The weight of the last bit; half of the smallest for what is below the normal ones.
    const int last = std::max(exponent - 11, -24);
    const unsigned units = (unsigned)std::nearbyint(std::ldexp(magnitude, -last));
    // A carry of the rounding goes into the exponent by itself.
    return last == -24 ? sign | (uint16_t)units : sign | (uint16_t)(((unsigned)(last + 24) << 10) + units);
}

namespace emulator {

struct Index {
    unsigned x, y, z;
};

struct Fiber {
    Index index;
    unsigned number;
    jmp_buf at;
    ucontext_t first;
    bool started, done;
};

// Some threads that wait for each other, time after time.
struct Meeting {
    unsigned expected, arrived;
    unsigned long times;
};

constexpr size_t STACK = 256 << 10;

struct Block {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<std::unique_ptr<char[]>> stacks;
    // The values that the lanes of each warp exchange: two sets, so that a quick lane does not
    // overwrite the values that a slow lane reads.
    std::vector<unsigned char> slots;
    unsigned count = 0;
    Meeting barrier;
    std::vector<Meeting> warps;
    Fiber* running = nullptr;
    jmp_buf back;
    ucontext_t home;
    void (*body)(void*) = nullptr;
    void* argument = nullptr;
    bool progress = false;
};

inline Block block;
inline Index block_index, block_dim, grid_dim;

[[noreturn]] inline void fail(const char* what) {
    fprintf(stderr, "emulated kernel: %s\n", what);
    abort();
}

// Lets the others run; comes back when it is this fiber's turn again.
inline void yield() {
    if (_setjmp(block.running->at) == 0) _longjmp(block.back, 1);
}

// A fiber serves block after block.
inline void entry() {
    for (;;) {
        block.body(block.argument);
        block.running->done = true;
        yield();
    }
}

inline void resume(Fiber& fiber) {
    block.running = &fiber;
    if (_setjmp(block.back) == 0) {
        if (fiber.started) _longjmp(fiber.at, 1);
        fiber.started = true;
        setcontext(&fiber.first);
    }
}

inline void meet(Meeting& meeting) {
    const unsigned long time = meeting.times;
    block.progress = true;
    if (++meeting.arrived == meeting.expected) {
        meeting.arrived = 0;
        ++meeting.times;
    }
    while (meeting.times == time) yield();
}

// Every lane gives a value and gets all of them.
template <class T> inline const T* exchange(T value) {
    static_assert(sizeof(T) <= 8);
    const unsigned warp = block.running->number / 32, lane = block.running->number % 32;
    Meeting& meeting = block.warps[warp];
    unsigned char* slots = block.slots.data() + (warp * 2 + meeting.times % 2) * 32 * 8;
    memcpy(slots + lane * sizeof(T), &value, sizeof(T));
    meet(meeting);
    return reinterpret_cast<const T*>(slots);
}

extern "C" char __start_emulated_shared[], __stop_emulated_shared[];

template <class F> void run_block(F& f, bool reverse) {
    memset(__start_emulated_shared, 0xff, (size_t)(__stop_emulated_shared - __start_emulated_shared));
    block.count = block_dim.x * block_dim.y * block_dim.z;
    if (block.count % 32 != 0) fail("a block that is no multiple of a warp");
    block.slots.resize((size_t)block.count * 2 * 8);
    block.barrier = {block.count, 0, 0};
    block.warps.assign(block.count / 32, {32, 0, 0});
    while (block.fibers.size() < block.count) {
        block.fibers.push_back(std::make_unique<Fiber>());
        block.stacks.push_back(std::unique_ptr<char[]>(new char[STACK]));
        Fiber& fiber = *block.fibers.back();
        fiber.started = false;
        getcontext(&fiber.first);
        fiber.first.uc_stack.ss_sp = block.stacks.back().get();
        fiber.first.uc_stack.ss_size = STACK;
        fiber.first.uc_link = nullptr;
        makecontext(&fiber.first, entry, 0);
    }
    block.body = [](void* a) { (*static_cast<F*>(a))(); };
    block.argument = &f;
    for (unsigned i = 0; i < block.count; ++i) {
        Fiber& fiber = *block.fibers[i];
        fiber.index = {i % block_dim.x, i / block_dim.x % block_dim.y, i / block_dim.x / block_dim.y};
        fiber.number = i;
        fiber.done = false;
    }
    const unsigned warps = block.count / 32;
    for (unsigned left = block.count; left > 0;) {
        bool moved = false;
        for (unsigned w = 0; w < warps; ++w) {
            const unsigned warp = reverse ? warps - 1 - w : w;
            do {
                block.progress = false;
                for (unsigned l = 0; l < 32; ++l) {
                    Fiber& fiber = *block.fibers[warp * 32 + (reverse ? 31 - l : l)];
                    if (fiber.done) continue;
                    resume(fiber);
                    if (fiber.done) {
                        --left;
                        block.progress = true;
                    }
                }
                moved |= block.progress;
            } while (block.progress);
        }
        if (!moved) fail("threads wait at a barrier or shuffle for others that are elsewhere or have ended");
    }
}

// Runs all blocks of a launch.
template <class F> void run_grid(F& body, const unsigned* grid, const unsigned* dim, bool reverse) {
    grid_dim = {grid[0], grid[1], grid[2]};
    block_dim = {dim[0], dim[1], dim[2]};
    const unsigned blocks = grid[0] * grid[1] * grid[2];
    for (unsigned i = 0; i < blocks; ++i) {
        const unsigned b = reverse ? blocks - 1 - i : i;
        block_index = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
        run_block(body, reverse);
    }
}

}  // namespace emulator
