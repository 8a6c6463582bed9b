// The memories of the devices, and regions over them.
#include "allocator.hpp"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <cuda_runtime_api.h>

#include <pthread.h>

namespace leasehold_torch {
namespace {

std::atomic<bool> child{false};

} // namespace

thread_local uintptr_t Memories::simulated_stream = 0;
std::atomic<uintptr_t> Memories::simulated_capture{UINTPTR_MAX};

Memories &memories() {
    // Tensors are freed until the process ends, so it is never destroyed.
    static Memories *all = new Memories();
    return *all;
}

bool forked() { return child.load(std::memory_order_relaxed); }

void throw_error(const Failure &failure) {
    if (failure.status == LEASEHOLD_OUT_OF_MEMORY || failure.status == LEASEHOLD_OVER_BUDGET) {
        TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. ", failure.what());
    }
    TORCH_CHECK(false, "leasehold: ", failure.what());
    std::abort(); // never reached
}

void Memories::configure(const std::string &library, Options options) {
    std::lock_guard<std::mutex> guard(lock_);
    if (configured_) {
        bool same = options.prefix == options_.prefix && library == path_;
        TORCH_CHECK(same, "leasehold: the library of this process is ", path_, " already");
        bool open = false;
        for (auto &memory : memories_) {
            open |= memory.load() != nullptr;
        }
        bool equal = options.budget == options_.budget && options.policy == options_.policy &&
                     options.shareable == options_.shareable;
        TORCH_CHECK(equal || !open, "leasehold: a device is in use with other options already");
        options_ = options;
        return;
    }
    library_ = Library::load(library);
    path_ = library;
    options_ = options;
    configured_ = true;
    for (auto &fraction : fractions_) {
        fraction.store(1.0);
    }
    pthread_atfork(nullptr, nullptr, [] { child.store(true); });
}

uint64_t Memories::limit(Memory &memory, double fraction) const {
    if (fraction >= 1.0) {
        return options_.budget;
    }
    auto total = static_cast<double>(memory.free_and_total().second);
    uint64_t part = std::max<uint64_t>(static_cast<uint64_t>(total * fraction), 1);
    return options_.budget == 0 ? part : std::min(part, options_.budget);
}

Memory &Memories::of(int ordinal) {
    TORCH_CHECK(ordinal >= 0 && ordinal < MOST, "leasehold: no device ", ordinal);
    Memory *found = memories_[ordinal].load(std::memory_order_acquire);
    if (found != nullptr) {
        return *found;
    }
    TORCH_CHECK(!forked(), "leasehold: a process that was made by fork() cannot use CUDA: use the "
                           "start method \"spawn\"");
    std::lock_guard<std::mutex> guard(lock_);
    found = memories_[ordinal].load(std::memory_order_acquire);
    if (found != nullptr) {
        return *found;
    }
    TORCH_CHECK(configured_, "leasehold: no library was loaded");
    try {
        std::string name = options_.prefix + std::to_string(ordinal);
        auto made = std::make_unique<Memory>(library_, name, options_.budget, options_.policy,
                                             options_.shareable);
        made->clock = [] { return static_cast<uint64_t>(c10::getApproximateTime()); };
        made->notes = notes;
        made->current_stream = [this, ordinal] { return current_stream(ordinal); };
        made->is_captured = [this](uintptr_t stream) {
            if (options_.simulated) {
                return stream == simulated_capture.load();
            }
            // The legacy stream answers with an error while another one is captured.
            auto found = cudaStreamCaptureStatusNone;
            auto asked = cudaStreamIsCapturing(reinterpret_cast<cudaStream_t>(stream), &found);
            if (asked != cudaSuccess) {
                (void)cudaGetLastError();
            }
            return asked != cudaSuccess || found != cudaStreamCaptureStatusNone;
        };
        double fraction = fractions_[ordinal].load();
        if (fraction < 1.0) {
            made->set_budget(limit(*made, fraction));
        }
        found = made.release();
    } catch (const Failure &failure) {
        throw_error(failure);
    }
    memories_[ordinal].store(found, std::memory_order_release);
    return *found;
}

Memory *Memories::known(int ordinal) const {
    return ordinal < 0 || ordinal >= MOST ? nullptr
                                          : memories_[ordinal].load(std::memory_order_acquire);
}

void Memories::set_fraction(int ordinal, double fraction) {
    TORCH_CHECK(ordinal >= 0 && ordinal < MOST, "leasehold: no device ", ordinal);
    TORCH_CHECK(fraction >= 0 && fraction <= 1, "leasehold: a fraction of ", fraction);
    fractions_[ordinal].store(fraction);
    if (Memory *memory = known(ordinal)) {
        try {
            memory->set_budget(limit(*memory, fraction));
        } catch (const Failure &failure) {
            throw_error(failure);
        }
    }
}

double Memories::fraction(int ordinal) {
    return ordinal < 0 || ordinal >= MOST ? 1.0 : fractions_[ordinal].load();
}

int Memories::current_device() const {
    if (options_.simulated) {
        return 0;
    }
    c10::DeviceIndex device = -1;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return device;
}

uintptr_t Memories::current_stream(int ordinal) const {
    if (options_.simulated) {
        return simulated_stream;
    }
    auto stream = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(ordinal));
    return reinterpret_cast<uintptr_t>(stream.stream());
}

// ---- regions

Region::Region(std::string name, uint32_t policy)
    : CUDAPluggableAllocator(
          [this](size_t bytes, int ordinal, cudaStream_t stream) {
              return take(this, bytes, ordinal, stream);
          },
          [](void *block, size_t, int ordinal, cudaStream_t) { give(block, ordinal); }),
      region_(std::move(name)), policy_(policy) {}

leasehold_pool Region::pool(int ordinal) {
    Memory &memory = memories().of(ordinal);
    std::lock_guard<std::mutex> guard(lock_);
    auto found = pools_.find(ordinal);
    if (found != pools_.end()) {
        return found->second;
    }
    try {
        return pools_[ordinal] = memory.make_region(region_, policy_);
    } catch (const Failure &failure) {
        pools_.erase(ordinal);
        throw_error(failure);
    }
}

/// Allocates a segment for PyTorch's own allocator, which tries again and reports after nullptr.
void *Region::take(Region *region, size_t bytes, int ordinal, cudaStream_t stream) {
    leasehold_pool pool = region->pool(ordinal);
    try {
        auto on = reinterpret_cast<uintptr_t>(stream);
        return memories().of(ordinal).region_allocate(pool, bytes, on);
    } catch (const Failure &failure) {
        if (failure.status == LEASEHOLD_OUT_OF_MEMORY || failure.status == LEASEHOLD_OVER_BUDGET) {
            return nullptr;
        }
        throw_error(failure);
    }
}

/// Frees a segment. As for cudaFree, all work of the device is over first.
void Region::give(void *block, int ordinal) {
    Memory *memory = forked() ? nullptr : memories().known(ordinal);
    if (memory != nullptr) {
        memory->synchronize();
        memories().library().free(memory->device(), block);
    }
}

/// Resumes the pools that are suspended. Throws a `Failure`.
void Region::resume_pools() {
    for (auto &[ordinal, pool] : pools_) {
        try {
            memories().of(ordinal).resume(pool);
        } catch (const Failure &failure) {
            // One that is not suspended: an earlier attempt resumed it, or its suspension failed.
            if (failure.status != LEASEHOLD_INVALID_STATE) {
                throw;
            }
        }
    }
}

uint64_t Region::suspend(bool keep) {
    std::lock_guard<std::mutex> guard(lock_);
    TORCH_CHECK(!suspended_, "leasehold: region ", region_, " is suspended already");
    try {
        uint64_t freed = 0;
        for (auto &[ordinal, pool] : pools_) {
            freed += memories().of(ordinal).suspend(pool, keep);
        }
        suspended_ = true;
        return freed;
    } catch (const Failure &failure) {
        try {
            resume_pools();
        } catch (const Failure &second) {
            // The contents are kept; a resumption may be tried again.
            suspended_ = true;
            throw_error({failure.status, std::string(failure.what()) +
                                             "; a part of the region stays suspended: " +
                                             second.what()});
        }
        throw_error(failure);
    }
}

void Region::resume() {
    std::lock_guard<std::mutex> guard(lock_);
    TORCH_CHECK(suspended_, "leasehold: region ", region_, " is not suspended");
    try {
        resume_pools();
    } catch (const Failure &failure) {
        throw_error(failure);
    }
    suspended_ = false;
}

} // namespace leasehold_torch
