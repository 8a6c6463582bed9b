// The allocators of PyTorch and RMM, called from C++ on a real device: the pair, 1 to 8 threads with streams of their own, and the
// traces. Prints one JSON object per line, with the keys of `leasehold-workbench replay` where they exist.
//
//   peer torch|rmm|async pair [--threads N]
//   peer torch|rmm|async trace FILE.csv        (plain text; what is live at the end is freed between repetitions)
//
// A trace names streams; a free that names another stream than its allocation did is a use by that stream (torch: recordStream).
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#ifdef PEER_TORCH
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#endif
#ifdef PEER_RMM
#include <rmm/cuda_stream_view.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#endif

static void check(cudaError_t code, char const *what) {
    if (code != cudaSuccess) {
        std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
        std::exit(1);
    }
}

using Clock = std::chrono::steady_clock;
static double ns_since(Clock::time_point begin) {
    return std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
}

// One allocator. `used` is the stream that used the memory last.
struct Subject {
    virtual ~Subject() = default;
    virtual void *alloc(std::size_t bytes, cudaStream_t stream) = 0;
    virtual void free(void *at, std::size_t bytes, cudaStream_t stream, cudaStream_t used) = 0;
    virtual std::uint64_t reserved_peak() { return 0; }
    virtual std::uint64_t driver_calls() { return 0; }
};

#ifdef PEER_TORCH
namespace caching = c10::cuda::CUDACachingAllocator;
struct Torch : Subject {
    Torch() { caching::init(1); }
    void *alloc(std::size_t bytes, cudaStream_t stream) override { return caching::raw_alloc_with_stream(bytes, stream); }
    void free(void *at, std::size_t, cudaStream_t stream, cudaStream_t used) override {
        if (used != stream) {
            c10::DataPtr pointer(at, at, caching::get()->raw_deleter(), c10::Device(c10::kCUDA, 0));
            caching::recordStream(pointer, c10::cuda::getStreamFromExternal(used, 0));
            (void)pointer.release_context();
        }
        caching::raw_delete(at);
    }
    std::uint64_t reserved_peak() override { return caching::getDeviceStats(0).reserved_bytes[0].peak; }
    std::uint64_t driver_calls() override {
        auto const stats = caching::getDeviceStats(0);
        return stats.num_device_alloc + stats.num_device_free;
    }
};
#endif

#ifdef PEER_RMM
struct Rmm : Subject {
    rmm::mr::cuda_memory_resource below;
    rmm::mr::pool_memory_resource pool{below, 16u << 20};
    void *alloc(std::size_t bytes, cudaStream_t stream) override { return pool.allocate(cuda::stream_ref{stream}, bytes, 256); }
    void free(void *at, std::size_t bytes, cudaStream_t, cudaStream_t used) override {
        pool.deallocate(cuda::stream_ref{used}, at, bytes, 256);
    }
    std::uint64_t reserved_peak() override {
        return pool.pool_size();
    }
};
#endif

// The driver's own stream-ordered pool, which keeps what it has.
struct Async : Subject {
    cudaMemPool_t pool{};
    Async() {
        check(cudaDeviceGetDefaultMemPool(&pool, 0), "cudaDeviceGetDefaultMemPool");
        std::uint64_t keep = ~0ull;
        check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
    }
    void *alloc(std::size_t bytes, cudaStream_t stream) override {
        void *at = nullptr;
        check(cudaMallocAsync(&at, bytes, stream), "cudaMallocAsync");
        return at;
    }
    void free(void *at, std::size_t, cudaStream_t, cudaStream_t used) override { check(cudaFreeAsync(at, used), "cudaFreeAsync"); }
    std::uint64_t reserved_peak() override {
        std::uint64_t high = 0;
        check(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemHigh, &high), "cudaMemPoolGetAttribute");
        return high;
    }
};

static std::unique_ptr<Subject> subject(std::string const &name) {
#ifdef PEER_TORCH
    if (name == "torch") return std::make_unique<Torch>();
#endif
#ifdef PEER_RMM
    if (name == "rmm") return std::make_unique<Rmm>();
#endif
    if (name == "async") return std::make_unique<Async>();
    std::fprintf(stderr, "this build has no allocator %s\n", name.c_str());
    std::exit(2);
}

static cudaStream_t stream() {
    cudaStream_t made = nullptr;
    check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    return made;
}

// Nanoseconds per allocation and free, the median of 15 rounds; every thread on a stream of its own.
static double pairs(Subject &subject, std::size_t bytes, unsigned threads, unsigned rounds) {
    std::vector<double> medians(threads);
    std::atomic<unsigned> ready{0};
    std::vector<std::thread> crew;
    for (unsigned t = 0; t < threads; ++t) {
        crew.emplace_back([&, t] {
            check(cudaSetDevice(0), "cudaSetDevice");
            cudaStream_t const own = stream();
            subject.free(subject.alloc(bytes, own), bytes, own, own);
            ready.fetch_add(1);
            while (ready.load() < threads) std::this_thread::yield();
            std::vector<double> times;
            for (int i = 0; i < 15; ++i) {
                auto const begin = Clock::now();
                for (unsigned n = 0; n < rounds; ++n) subject.free(subject.alloc(bytes, own), bytes, own, own);
                times.push_back(ns_since(begin) / rounds);
            }
            std::nth_element(times.begin(), times.begin() + 7, times.end());
            medians[t] = times[7];
        });
    }
    for (auto &thread : crew) thread.join();
    std::nth_element(medians.begin(), medians.begin() + threads / 2, medians.end());
    return medians[threads / 2];
}

// `live` blocks of random sizes; each step replaces one.
static double replace(Subject &subject, unsigned live, std::size_t largest, unsigned steps) {
    std::mt19937_64 random(7);
    cudaStream_t const own = stream();
    auto size = [&] { return static_cast<std::size_t>(256 + random() % largest); };
    std::vector<std::pair<void *, std::size_t>> blocks(live);
    for (auto &block : blocks) block = {subject.alloc(block.second = size(), own), block.second};
    std::vector<double> times;
    for (int i = 0; i < 7; ++i) {
        auto const begin = Clock::now();
        for (unsigned n = 0; n < steps; ++n) {
            auto &block = blocks[random() % live];
            subject.free(block.first, block.second, own, own);
            block.second = size();
            block.first = subject.alloc(block.second, own);
        }
        times.push_back(ns_since(begin) / steps);
    }
    for (auto &block : blocks) subject.free(block.first, block.second, own, own);
    std::nth_element(times.begin(), times.begin() + 3, times.end());
    return times[3];
}

struct Event {
    bool alloc;
    std::uint32_t id;
    std::size_t size;
    unsigned stream;
};

static int trace(Subject &subject, std::string const &name, char const *path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    std::vector<Event> events;
    std::unordered_map<std::string, std::uint32_t> ids;
    std::unordered_map<std::string, unsigned> streams;
    std::uint64_t live = 0, peak = 0;
    std::vector<std::size_t> sizes;
    while (std::getline(file, line)) {
        std::stringstream fields(line);
        std::string t, op, id, size, at;
        std::getline(fields, t, ','), std::getline(fields, op, ','), std::getline(fields, id, ','), std::getline(fields, size, ','), std::getline(fields, at, ',');
        auto const number = streams.emplace(at, streams.size()).first->second;
        auto const known = ids.emplace(id, ids.size());
        std::size_t const bytes = std::stoull(size);
        if (known.second) sizes.push_back(bytes);
        live += op == "a" ? bytes : -sizes[known.first->second];
        peak = std::max(peak, live);
        events.push_back({op == "a", known.first->second, bytes, number});
    }
    std::vector<cudaStream_t> own;
    for (std::size_t i = 0; i < streams.size(); ++i) own.push_back(stream());
    struct Held { void *at = nullptr; unsigned stream = 0; };
    std::vector<Held> held(ids.size());
    std::uint64_t steady = 0;
    double mean = 0;
    std::uint64_t failed = 0;
    for (int repeat = 0; repeat < 3; ++repeat) {
        auto const calls = subject.driver_calls();
        auto const begin = Clock::now();
        for (auto const &event : events) {
            auto &block = held[event.id];
            if (event.alloc) {
                try {
                    block = {subject.alloc(event.size, own[event.stream]), event.stream};
                } catch (std::exception const &) { ++failed; }
            } else if (block.at) {
                subject.free(block.at, sizes[event.id], own[block.stream], own[event.stream]);
                block.at = nullptr;
            }
        }
        mean = ns_since(begin) / static_cast<double>(events.size());
        for (std::size_t i = 0; i < held.size(); ++i) {
            if (held[i].at) subject.free(held[i].at, sizes[i], own[held[i].stream], own[held[i].stream]);
            held[i].at = nullptr;
        }
        steady = subject.driver_calls() - calls;
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    std::printf("{\"peer\":\"%s\",\"trace\":\"%s\",\"events\":%zu,\"peak_requested\":%llu,\"peak_reserved\":%llu,\"ratio\":%.4f,\"ns_per_op\":{\"mean\":%.1f},"
                "\"driver_calls\":{\"total\":%llu,\"steady\":%llu},\"failed\":%llu}\n",
                name.c_str(), path, events.size(), (unsigned long long)peak, (unsigned long long)subject.reserved_peak(),
                (double)subject.reserved_peak() / (double)peak, mean, (unsigned long long)subject.driver_calls(), (unsigned long long)steady, (unsigned long long)failed);
    return 0;
}

int main(int count, char **arguments) {
    if (count < 3) {
        std::fprintf(stderr, "usage: peer torch|rmm|async pair | trace FILE.csv\n");
        return 2;
    }
    check(cudaSetDevice(0), "cudaSetDevice");
    check(cudaFree(nullptr), "cudaFree");
    std::string const name = arguments[1];
    auto const what = subject(name);
    if (std::strcmp(arguments[2], "trace") == 0 && count > 3) return trace(*what, name, arguments[3]);
    // The medians need no more, and a pool behind one lock takes long with eight threads.
    unsigned const rounds = 2000;
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    for (std::size_t bytes : {std::size_t{512}, std::size_t{64} << 10, std::size_t{1} << 20, std::size_t{16} << 20}) {
        for (unsigned threads : {1u, 2u, 4u, 8u}) {
            std::printf("{\"peer\":\"%s\",\"workload\":\"pair\",\"bytes\":%zu,\"threads\":%u,\"ns\":%.1f}\n", name.c_str(), bytes, threads,
                        pairs(*what, bytes, threads, rounds));
        }
    }
    for (unsigned live : {64u, 1000u, 10000u}) {
        std::printf("{\"peer\":\"%s\",\"workload\":\"random\",\"largest\":65536,\"live\":%u,\"ns\":%.1f}\n", name.c_str(), live,
                    replace(*what, live, 65536, rounds));
        std::printf("{\"peer\":\"%s\",\"workload\":\"random\",\"largest\":4194304,\"live\":%u,\"ns\":%.1f}\n", name.c_str(), live,
                    replace(*what, live, 4 << 20, rounds));
    }
    return 0;
}
