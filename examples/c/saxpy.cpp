// A kernel of one's own from C++17: y = a x + y on the CPU.
//
//     saxpy [cpu:0]
#include "leasehold.hpp"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

constexpr std::uint32_t TILE = 1024, COUNT = 65536;

struct params {
    float a;
    std::uint32_t count;
};

template <class T> T *at(const leasehold_tile *tile, int binding) { return reinterpret_cast<T *>(static_cast<std::uintptr_t>(tile->bindings[binding].address)); }

extern "C" void saxpy(const leasehold_tile *tile) {
    params p;
    std::memcpy(&p, tile->params, sizeof p);
    const float *x = at<const float>(tile, 0);
    float *y = at<float>(tile, 1);
    for (std::uint32_t i = tile->tile[0] * TILE, end = i + TILE; i < end && i < p.count; i++) {
        y[i] += p.a * x[i];
    }
}

// Decides which launches are right: the kernel itself tests nothing.
bool fits(const leasehold_launch_info &launch) {
    params p;
    std::memcpy(&p, launch.params, sizeof p);
    const std::uint64_t bytes = std::uint64_t{p.count} * sizeof(float);
    return launch.blocks[1] == 1 && launch.blocks[2] == 1 && launch.binding_bytes[0] >= bytes && launch.binding_bytes[1] >= bytes;
}

} // namespace

int main(int argc, char **argv) try {
    const leasehold::device device(argc > 1 ? argv[1] : "cpu:0");
    leasehold::runtime runtime(device);
    bool right = true;
    {
        const leasehold::stream stream = runtime.create_stream();
        const leasehold::kernel kernel = leasehold::kernel::builder("saxpy")
                                             .c_function(saxpy)
                                             .reads()
                                             .read_writes()
                                             .params<params>()
                                             .aligned(sizeof(float))
                                             .check(fits)
                                             .define();
        const leasehold::buffer x = stream.upload(std::vector<float>(COUNT, 3));
        const leasehold::buffer y = stream.upload(std::vector<float>(COUNT, 1));
        const auto step = [&](const leasehold::stream &on) {
            on.launch(kernel, COUNT / TILE, {x.read(), y.read_write()}, params{2, COUNT});
        };
        step(stream); // y is 7
        const leasehold::graph graph = runtime.record(step);
        graph.launch(stream); // y is 13
        for (const float value : stream.download<float>(y)) {
            right = right && value == 13;
        }
    }
    runtime.close();
    std::puts(right ? "ok" : "wrong");
    return right ? 0 : 1;
} catch (const leasehold::error &error) {
    std::fprintf(stderr, "%s (%d)\n", error.what(), error.status());
    return 1;
}
