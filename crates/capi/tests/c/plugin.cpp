// The plug-in interface as PyTorch uses it: a failed allocation becomes a C++ exception, which passes the library, in any thread.
#include "leasehold.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

namespace {

struct Raised : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// As c10::detail::torchCheckFail.
void raise(const char *function, const char *, uint32_t, const char *text) {
    throw Raised(std::string(function) + ": " + text);
}

std::atomic<int> returned{0};

/// One that returns.
void note(const char *, const char *, uint32_t, const char *) { ++returned; }

void check(bool right, const char *what) {
    if (!right) {
        std::fprintf(stderr, "wrong: %s (%s)\n", what, leasehold_last_error());
        std::exit(1);
    }
}

/// The text of a failure.
template <typename F> std::string raised(F f) {
    try {
        f();
    } catch (const Raised &error) {
        return error.what();
    }
    return "nothing";
}

bool has(const std::string &text, const char *part) { return text.find(part) != std::string::npos; }

} // namespace

int main() {
    constexpr ptrdiff_t MIB = 1 << 20;
    leasehold_device_options options = {sizeof options, 32 * MIB, LEASEHOLD_POLICY_BALANCED, 0, 0};
    leasehold_device device = 0;
    check(leasehold_device_open("sim-cuda:0", &options, &device) == LEASEHOLD_OK, "open");
    check(leasehold_plugin_set_device(0, device) == LEASEHOLD_OK, "set_device");
    check(leasehold_plugin_alloc(64 * MIB, 0, nullptr) == nullptr, "a failure without a function");

    check(leasehold_plugin_set_raise(raise) == LEASEHOLD_OK, "set_raise");
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&] {
            uintptr_t number = 0;
            check(leasehold_sim_stream(device, 0, &number) == LEASEHOLD_OK, "stream");
            void *stream = reinterpret_cast<void *>(number);
            for (int turn = 0; turn < 20; ++turn) {
                auto full = raised([&] { leasehold_plugin_alloc(33 * MIB, 0, stream); });
                check(has(full, "malloc: CUDA out of memory. "), full.c_str());
                auto size = raised([&] { leasehold_plugin_alloc(-1, 0, stream); });
                check(has(size, "malloc: leasehold: ") && has(size, "-1 bytes"), size.c_str());
                void *block = leasehold_plugin_alloc(2 * MIB, 0, stream);
                check(block != nullptr, "a block after a failure");
                leasehold_plugin_free(block, 2 * MIB, 0, stream);
                check(leasehold_plugin_alloc(0, 0, stream) == nullptr, "no bytes");
            }
            check(leasehold_stream_end(device, number) == LEASEHOLD_OK, "end");
        });
    }
    for (auto &thread : threads) {
        thread.join();
    }
    check(has(raised(leasehold_plugin_refuse_pool), "no private pools"), "refuse_pool");

    // A fork has no part in the memory of its parent, and may drop its tensors.
    void *held = leasehold_plugin_alloc(2 * MIB, 0, nullptr);
    pid_t child = fork();
    if (child == 0) {
        leasehold_plugin_free(held, 2 * MIB, 0, nullptr);
        auto text = raised([&] { leasehold_plugin_alloc(MIB, 0, nullptr); });
        _exit(has(text, "spawn") ? 0 : 1);
    }
    int status = 1;
    check(waitpid(child, &status, 0) == child && status == 0, "a fork");
    leasehold_plugin_free(held, 2 * MIB, 0, nullptr);

    check(leasehold_plugin_set_raise(note) == LEASEHOLD_OK, "set_raise");
    check(leasehold_plugin_alloc(33 * MIB, 0, nullptr) == nullptr && returned == 1, "one that returns");
    leasehold_plugin_refuse_pool();
    check(returned == 2, "refuse_pool, one that returns");
    check(leasehold_plugin_set_raise(nullptr) == LEASEHOLD_OK, "set_raise");
    check(leasehold_plugin_set_device(0, 0) == LEASEHOLD_OK, "set_device");
    check(leasehold_device_close(device) == LEASEHOLD_OK, leasehold_last_error());
    std::puts("ok");
    return 0;
}
