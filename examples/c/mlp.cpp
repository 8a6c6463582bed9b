// The runtime from C++17: a step of training a small network, launch by launch and as a replayed graph, with the same bits.
//
//     mlp [cpu:0 | cuda:0 | cuda:1 …]
#include "leasehold.hpp"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

constexpr std::uint32_t BATCH = 32, INPUTS = 16, HIDDEN = 64;

// c = f(a b + bias), and what the backward pass needs. One kernel for all products: an operand may be read transposed. Each element of c
// has a tile of its own, which adds up in a fixed order: the bits are those of each run.
struct product {
    std::uint32_t rows, columns, inner;
    std::uint32_t a_row, a_column, b_row, b_column; // steps in elements
    std::uint32_t bias, relu;                       // whether
};

// c -= rate * a, element by element.
struct step {
    std::uint32_t count;
    float rate;
};

extern "C" {
void matmul(const leasehold_tile *tile) {
    product p;
    std::memcpy(&p, tile->params, sizeof p);
    const auto at = [&](int i) { return reinterpret_cast<float *>(static_cast<std::uintptr_t>(tile->bindings[i].address)); };
    const float *a = at(0), *b = at(1), *bias = at(2);
    const std::uint32_t row = tile->tile[1], column = tile->tile[0];
    float sum = p.bias ? bias[column] : 0.0f;
    for (std::uint32_t i = 0; i < p.inner; i++) {
        sum = std::fmaf(a[row * p.a_row + i * p.a_column], b[i * p.b_row + column * p.b_column], sum);
    }
    at(3)[row * p.columns + column] = p.relu && sum < 0 ? 0 : sum;
}

// The gradient of the squared error, or of the hidden layer behind its activation.
void difference(const leasehold_tile *tile) {
    std::uint32_t masked;
    std::memcpy(&masked, tile->params, sizeof masked);
    const auto at = [&](int i) { return reinterpret_cast<float *>(static_cast<std::uintptr_t>(tile->bindings[i].address)) + tile->tile[0]; };
    const float a = *at(0), b = *at(1);
    *at(2) = masked ? (b > 0 ? a : 0) : a - b;
}

void descend(const leasehold_tile *tile) {
    step p;
    std::memcpy(&p, tile->params, sizeof p);
    const auto at = [&](int i) { return reinterpret_cast<float *>(static_cast<std::uintptr_t>(tile->bindings[i].address)) + tile->tile[0]; };
    *at(1) = std::fmaf(-p.rate, *at(0), *at(1));
}
}

const char *const cuda = R"(
struct Product { unsigned rows, columns, inner, a_row, a_column, b_row, b_column, bias, relu; };
struct Step { unsigned count; float rate; };
extern "C" __global__ void matmul(const float *a, const float *b, const float *bias, float *c, Product p) {
    unsigned row = blockIdx.y, column = blockIdx.x;
    float sum = p.bias ? bias[column] : 0.0f;
    for (unsigned i = 0; i < p.inner; i++) sum = fmaf(a[row * p.a_row + i * p.a_column], b[i * p.b_row + column * p.b_column], sum);
    c[row * p.columns + column] = p.relu && sum < 0.0f ? 0.0f : sum;
}
extern "C" __global__ void difference(const float *a, const float *b, float *c, unsigned masked) {
    unsigned i = blockIdx.x;
    c[i] = masked ? (b[i] > 0.0f ? a[i] : 0.0f) : a[i] - b[i];
}
extern "C" __global__ void descend(const float *a, float *c, Step p) {
    unsigned i = blockIdx.x;
    c[i] = fmaf(-p.rate, a[i], c[i]);
}
)";

template <class P> P params_of(const leasehold_launch_info &launch) {
    P p;
    std::memcpy(&p, launch.params, sizeof p);
    return p;
}

std::uint64_t elements(const leasehold_launch_info &launch, int binding) { return launch.binding_bytes[binding] / sizeof(float); }

// Whether the last element that a product reads of an operand exists.
bool reaches(std::uint64_t rows, std::uint64_t row, std::uint64_t columns, std::uint64_t column, std::uint64_t elements) {
    return (rows - 1) * row + (columns - 1) * column < elements;
}

bool one_thread(const leasehold_launch_info &launch) { return launch.threads[0] == 1 && launch.threads[1] == 1 && launch.threads[2] == 1; }

// The checks decide which launches are right; what they accept, the code does without further tests.
bool fits_product(const leasehold_launch_info &launch) {
    const auto p = params_of<product>(launch);
    return one_thread(launch) && launch.blocks[0] == p.columns && launch.blocks[1] == p.rows && launch.blocks[2] == 1 && p.inner > 0 &&
           reaches(p.rows, p.a_row, p.inner, p.a_column, elements(launch, 0)) && reaches(p.inner, p.b_row, p.columns, p.b_column, elements(launch, 1)) &&
           (!p.bias || elements(launch, 2) >= p.columns) && elements(launch, 3) >= std::uint64_t{p.rows} * p.columns;
}

bool fits_elements(const leasehold_launch_info &launch) {
    bool fits = one_thread(launch) && launch.blocks[1] == 1 && launch.blocks[2] == 1;
    for (std::uint32_t i = 0; i < launch.binding_count; i++) {
        fits = fits && elements(launch, static_cast<int>(i)) >= launch.blocks[0];
    }
    return fits;
}

class network {
  public:
    explicit network(const leasehold::stream &stream)
        : matmul_(leasehold::kernel::builder("matmul").c_function(matmul).cuda_c(cuda).reads(3).writes().params<product>().aligned(4).check(fits_product).define()),
          difference_(leasehold::kernel::builder("difference").c_function(difference).cuda_c(cuda).reads(2).writes().params<std::uint32_t>().aligned(4).check(fits_elements).define()),
          descend_(leasehold::kernel::builder("descend").c_function(descend).cuda_c(cuda).reads().read_writes().params<step>().aligned(4).check(fits_elements).define()),
          x(stream.upload(numbers(BATCH * INPUTS, 1))), wanted(stream.upload(numbers(BATCH, 2))), w1(stream.upload(numbers(INPUTS * HIDDEN, 3))),
          b1(stream.upload(numbers(HIDDEN, 4))), w2(stream.upload(numbers(HIDDEN, 5))) {}

    // One step of training. On a stream of a recording it is noted: the same code, the same order.
    void train(const leasehold::stream &stream) const {
        const auto floats = [&](std::uint32_t count) { return stream.alloc(count * sizeof(float)); };
        const leasehold::buffer h = floats(BATCH * HIDDEN), y = floats(BATCH), dy = floats(BATCH), dh = floats(BATCH * HIDDEN), dz = floats(BATCH * HIDDEN);
        const leasehold::buffer dw1 = floats(INPUTS * HIDDEN), dw2 = floats(HIDDEN);
        multiply(stream, x, w1, b1, h, {BATCH, HIDDEN, INPUTS, INPUTS, 1, HIDDEN, 1, 1, 1});
        multiply(stream, h, w2, w2, y, {BATCH, 1, HIDDEN, HIDDEN, 1, 1, 1, 0, 0});
        stream.launch(difference_, BATCH, {y.read(), wanted.read(), dy.write()}, std::uint32_t{0});
        multiply(stream, h, dy, dy, dw2, {HIDDEN, 1, BATCH, 1, HIDDEN, 1, 1, 0, 0});   // h transposed
        multiply(stream, dy, w2, w2, dh, {BATCH, HIDDEN, 1, 1, 1, 1, 1, 0, 0});        // w2 transposed
        stream.launch(difference_, BATCH * HIDDEN, {dh.read(), h.read(), dz.write()}, std::uint32_t{1});
        multiply(stream, x, dz, dz, dw1, {INPUTS, HIDDEN, BATCH, 1, INPUTS, HIDDEN, 1, 0, 0}); // x transposed
        stream.launch(descend_, HIDDEN, {dw2.read(), w2.read_write()}, step{HIDDEN, 0.001f});
        stream.launch(descend_, INPUTS * HIDDEN, {dw1.read(), w1.read_write()}, step{INPUTS * HIDDEN, 0.001f});
    }

    std::vector<float> weights(const leasehold::stream &stream) const {
        std::vector<float> all = stream.download<float>(w1), more = stream.download<float>(w2);
        all.insert(all.end(), more.begin(), more.end());
        return all;
    }

    // The mean squared error before the next step.
    double loss(const leasehold::stream &stream) const {
        const leasehold::buffer h = stream.alloc(BATCH * HIDDEN * sizeof(float)), y = stream.alloc(BATCH * sizeof(float));
        multiply(stream, x, w1, b1, h, {BATCH, HIDDEN, INPUTS, INPUTS, 1, HIDDEN, 1, 1, 1});
        multiply(stream, h, w2, w2, y, {BATCH, 1, HIDDEN, HIDDEN, 1, 1, 1, 0, 0});
        const std::vector<float> got = stream.download<float>(y), want = stream.download<float>(wanted);
        double sum = 0;
        for (std::uint32_t i = 0; i < BATCH; i++) {
            sum += (got[i] - want[i]) * (got[i] - want[i]);
        }
        return sum / BATCH;
    }

  private:
    void multiply(const leasehold::stream &stream, const leasehold::buffer &a, const leasehold::buffer &b, const leasehold::buffer &bias, const leasehold::buffer &c,
                  const product &p) const {
        stream.launch(matmul_, leasehold::grid({p.columns, p.rows, 1}, {1, 1, 1}), {a.read(), b.read(), bias.read(), c.write()}, p);
    }

    // Numbers between -0.5 and 0.5, the same in each run.
    static std::vector<float> numbers(std::uint32_t count, std::uint32_t seed) {
        std::vector<float> all(count);
        std::uint32_t state = seed * 2654435761u + 1;
        for (float &x : all) {
            state = state * 1664525u + 1013904223u;
            x = static_cast<float>(state >> 8) / 16777216.0f - 0.5f;
        }
        return all;
    }

    leasehold::kernel matmul_, difference_, descend_;
    leasehold::buffer x, wanted, w1, b1, w2;
};

} // namespace

int main(int argc, char **argv) try {
    const leasehold::device device(argc > 1 ? argv[1] : "cpu:0");
    leasehold::runtime runtime(device);
    constexpr int STEPS = 20;
    std::vector<float> eager, replayed;
    {
        const leasehold::stream stream = runtime.create_stream("training");
        const network one(stream), other(stream);
        const double before = one.loss(stream);
        for (int i = 0; i < STEPS; i++) {
            one.train(stream);
        }
        const double after = one.loss(stream);
        eager = one.weights(stream);

        const leasehold::graph graph = runtime.record([&](const leasehold::stream &recorded) { other.train(recorded); });
        for (int i = 0; i < STEPS; i++) {
            graph.launch(stream);
        }
        replayed = other.weights(stream);
        std::printf("error %.4f before, %.4f after %d steps; a graph of %llu launches with %llu bytes of temporaries\n", before, after, STEPS,
                    static_cast<unsigned long long>(graph.describe().nodes), static_cast<unsigned long long>(graph.describe().arena_bytes));
        if (!(after < before)) {
            std::fprintf(stderr, "the network learns nothing\n");
            return 1;
        }
    }
    runtime.close();
    if (eager.size() != replayed.size() || std::memcmp(eager.data(), replayed.data(), eager.size() * sizeof(float)) != 0) {
        std::fprintf(stderr, "eager and replayed steps give different weights\n");
        return 1;
    }
    std::printf("eager and replayed: the same bits\nok\n");
    return 0;
} catch (const leasehold::error &error) {
    std::fprintf(stderr, "%s (%d)\n", error.what(), error.status());
    return 1;
}
