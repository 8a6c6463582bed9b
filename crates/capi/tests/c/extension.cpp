// How a framework's extension in C++ uses the header: a failure becomes an exception with the report, and a lambda is a filter.
#include "leasehold.h"

#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>

namespace {

struct OutOfMemory : std::runtime_error {
    using std::runtime_error::runtime_error;
};

void check(int status) {
    if (status == LEASEHOLD_OUT_OF_MEMORY || status == LEASEHOLD_OVER_BUDGET) {
        throw OutOfMemory(leasehold_last_error());
    }
    if (status != LEASEHOLD_OK) {
        throw std::runtime_error(std::string("leasehold: ") + leasehold_last_error());
    }
}

int ask(void *context, uintptr_t stream) {
    return (*static_cast<std::function<bool(uintptr_t)> *>(context))(stream);
}

} // namespace

int main() {
    leasehold_device_options options = {sizeof options, 32 << 20, LEASEHOLD_POLICY_COMPACT, 0, 0};
    leasehold_device device = 0;
    check(leasehold_device_open("sim-cuda:0", &options, &device));
    uintptr_t stream = 0;
    check(leasehold_sim_stream(device, 0, &stream));
    leasehold_pool pool = 0;
    check(leasehold_pool_create(device, nullptr, &pool));
    std::function<bool(uintptr_t)> filter = [=](uintptr_t s) { return s == stream; };
    check(leasehold_pool_begin(pool, ask, &filter));
    void *block = nullptr;
    check(leasehold_malloc(device, 20 << 20, stream, &block));
    check(leasehold_pool_end(pool));
    leasehold_pool of = 0;
    check(leasehold_block_find(device, block, nullptr, nullptr, &of));
    bool thrown = false;
    try {
        void *more = nullptr;
        check(leasehold_malloc(device, 20 << 20, stream, &more));
    } catch (const OutOfMemory &e) {
        thrown = std::string(e.what()).find("budget") != std::string::npos;
    }
    check(leasehold_free(device, block));
    check(leasehold_pool_release(pool));
    check(leasehold_stream_end(device, stream));
    check(leasehold_device_close(device));
    std::puts(of == pool && thrown ? "ok" : "wrong");
    return of == pool && thrown ? 0 : 1;
}
