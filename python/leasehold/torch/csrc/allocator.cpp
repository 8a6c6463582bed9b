// PyTorch's CUDAAllocator over the memories of the devices.
#include "allocator.hpp"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/env.h>

#include <cuda_runtime_api.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>

namespace leasehold_torch {
namespace {

using c10::cuda::CUDACachingAllocator::AllocatorState;
using c10::cuda::CUDACachingAllocator::BlockInfo;
using c10::cuda::CUDACachingAllocator::CheckpointDelta;
using c10::cuda::CUDACachingAllocator::RecordContext;
using c10::cuda::CUDACachingAllocator::SegmentInfo;
using c10::cuda::CUDACachingAllocator::ShareableHandle;
using c10::cuda::CUDACachingAllocator::SnapshotInfo;
using c10::cuda::CUDACachingAllocator::TraceEntry;

/// Runs something, with its failures as PyTorch's errors.
template <typename F> auto guarded(F f) {
    try {
        return f();
    } catch (const Failure &failure) {
        throw_error(failure);
    }
}

cudaStream_t handle(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

c10::Device device_of(int ordinal) {
    return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(ordinal)};
}

/// Tells PyTorch's profiler of bytes that came, or went if they are negative.
void tell_profiler(Memory &memory, int ordinal, void *block, int64_t bytes) {
    if (c10::memoryProfilingEnabled()) {
        Statistics now = memory.statistics();
        c10::reportMemoryUsageToProfiler(block, bytes, static_cast<size_t>(now.bytes[0].current),
                                         static_cast<size_t>(now.reserved.current),
                                         device_of(ordinal));
    }
}

/// PyTorch's check for races between streams, if it is on.
const c10::impl::PyInterpreter *watcher() { return c10::impl::GPUTrace::get_trace(); }

void tell_of_end(const c10::impl::PyInterpreter *watcher, void *block) {
    (*watcher)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(block));
}

/// Frees a block of any device. Returns false if no device knows it.
bool free_block(void *block) {
    for (int ordinal = 0; ordinal < Memories::MOST; ++ordinal) {
        Memory *memory = memories().known(ordinal);
        if (memory == nullptr) {
            continue;
        }
        // Before another thread may have the memory.
        if (const auto *told = watcher(); told != nullptr && memory->find(block).address != 0) {
            tell_of_end(told, block);
        }
        if (size_t bytes = memory->free(block)) {
            tell_profiler(*memory, ordinal, block, -static_cast<int64_t>(bytes));
            return true;
        }
    }
    return false;
}

/// Allocates memory of the driver for a program that wants no cache, so that tools know its bounds.
void *take_uncached(size_t bytes) {
    void *block = nullptr;
    C10_CUDA_CHECK(cudaMalloc(&block, bytes));
    if (const auto *told = watcher()) {
        (*told)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(block));
    }
    return block;
}

void delete_uncached(void *block) {
    if (const auto *told = watcher()) {
        tell_of_end(told, block);
    }
    C10_CUDA_CHECK(cudaFree(block));
}

/// The deleter of tensors' memory, which must not throw.
void delete_block(void *block) noexcept {
    // A child of fork() has no part in its parent's memory.
    if (block == nullptr || forked()) {
        return;
    }
    try {
        if (!free_block(block)) {
            std::fprintf(stderr, "leasehold: %p was freed twice or is not of this allocator\n",
                         block);
        }
    } catch (const std::exception &error) {
        std::fprintf(stderr, "leasehold: a block could not be freed: %s\n", error.what());
    }
}

c10::CachingAllocator::Stat stat(const Count &count) {
    c10::CachingAllocator::Stat made;
    made.current = count.current;
    made.peak = count.peak;
    made.allocated = count.allocated;
    made.freed = count.freed;
    return made;
}

void fill(c10::CachingAllocator::StatArray &to, const Counts &from) {
    for (size_t i = 0; i < to.size() && i < from.size(); ++i) {
        to[i] = stat(from[i]);
    }
}

/// Numbers that are not kept by size count as large.
void fill(c10::CachingAllocator::StatArray &to, const Count &from) {
    to[0] = to[2] = stat(from);
}

TraceEntry::Action action(Event::Kind kind) {
    switch (kind) {
    case Event::Alloc:
        return TraceEntry::ALLOC;
    case Event::FreeRequested:
        return TraceEntry::FREE_REQUESTED;
    case Event::FreeCompleted:
        return TraceEntry::FREE_COMPLETED;
    case Event::SegmentAlloc:
        return TraceEntry::SEGMENT_ALLOC;
    case Event::SegmentFree:
        return TraceEntry::SEGMENT_FREE;
    case Event::SegmentMap:
        return TraceEntry::SEGMENT_MAP;
    case Event::SegmentUnmap:
        return TraceEntry::SEGMENT_UNMAP;
    case Event::Snapshot:
        return TraceEntry::SNAPSHOT;
    default:
        return TraceEntry::OOM;
    }
}

std::shared_ptr<c10::GatheredContext> context_of(const Context &context) {
    return std::static_pointer_cast<c10::GatheredContext>(context);
}

TraceEntry entry(int ordinal, const Event &event) {
    return TraceEntry(action(event.kind), static_cast<c10::DeviceIndex>(ordinal), event.address,
                      event.bytes, handle(event.stream),
                      c10::cuda::MempoolId_t(event.pool.first, event.pool.second), event.time,
                      context_of(event.context), event.notes.region
#if LEASEHOLD_TORCH(10)
                      ,
                      event.notes.metadata
#endif
    );
}

/// A size as PyTorch writes it.
std::string readable(uint64_t bytes) {
    const char *units[] = {"KiB", "MiB", "GiB"};
    if (bytes <= 1024) {
        return std::to_string(bytes) + " bytes";
    }
    double number = static_cast<double>(bytes) / 1024;
    size_t unit = 0;
    for (; unit < 2 && number > 1024; ++unit) {
        number /= 1024;
    }
    char text[64];
    std::snprintf(text, sizeof text, "%.2f %s", number, units[unit]);
    return text;
}

/// What NVIDIA's management library says of the processes on a device, as PyTorch writes it; an
/// empty text without that library.
std::string memory_of_processes(int ordinal) {
    struct Process { // nvmlProcessInfo_v1_t
        unsigned int pid;
        unsigned long long bytes;
    };
    static void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    auto find = [](const char *name) { return library == nullptr ? nullptr : dlsym(library, name); };
    static auto *init = reinterpret_cast<int (*)()>(find("nvmlInit_v2"));
    static auto *by_bus =
        reinterpret_cast<int (*)(const char *, void **)>(find("nvmlDeviceGetHandleByPciBusId_v2"));
    static auto *list = reinterpret_cast<int (*)(void *, unsigned int *, Process *)>(
        find("nvmlDeviceGetComputeRunningProcesses"));
    char bus[32];
    void *device = nullptr;
    std::vector<Process> found(256);
    auto count = static_cast<unsigned int>(found.size());
    if (init == nullptr || by_bus == nullptr || list == nullptr ||
        cudaDeviceGetPCIBusId(bus, sizeof bus, ordinal) != cudaSuccess || init() != 0 ||
        by_bus(bus, &device) != 0 || list(device, &count, found.data()) != 0) {
        return "";
    }
    std::string text;
    for (unsigned int i = 0; i < count; ++i) {
        if (found[i].bytes == ~0ull) { // not known
            continue;
        }
        bool own = found[i].pid == static_cast<unsigned int>(getpid());
        text += own ? "Including non-PyTorch memory, this process"
                    : "Process " + std::to_string(found[i].pid);
        text += " has " + readable(found[i].bytes) + " memory in use. ";
    }
    return text;
}

/// The state of a private pool, as PyTorch carries it.
struct State : AllocatorState {
    explicit State(Checkpoint checkpoint) : checkpoint(std::move(checkpoint)) {}
    Checkpoint checkpoint;
};

PoolId key(c10::cuda::MempoolId_t id) { return {id.first, id.second}; }

} // namespace

// ---- blocks

void *Allocator::allocate_on(int ordinal, size_t bytes, uintptr_t stream) {
    if (bytes == 0) {
        return nullptr;
    }
    TORCH_CHECK(!forked(), "leasehold: a process that was made by fork() cannot use CUDA: use the "
                           "start method \"spawn\"");
    Memory &memory = memories().of(ordinal);
    for (bool again = true;; again = false) {
        try {
            void *block = memory.allocate(bytes, stream);
            tell_profiler(memory, ordinal, block, static_cast<int64_t>(bytes));
            if (const auto *told = watcher()) {
                (*told)->trace_gpu_memory_allocation(c10::kCUDA,
                                                     reinterpret_cast<uintptr_t>(block));
            }
            return block;
        } catch (const Failure &failure) {
            bool full = failure.status == LEASEHOLD_OUT_OF_MEMORY ||
                        failure.status == LEASEHOLD_OVER_BUDGET;
            if (!full) {
                throw_error(failure);
            }
            // Others may hold memory that they can do without.
            bool freed = false;
            if (again) {
                for (const auto &name : c10::FreeCudaMemoryCallbacksRegistry()->Keys()) {
                    freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
                }
            }
            if (!freed) {
                out_of_memory(memory, ordinal, bytes, stream, failure);
            }
        }
    }
}

void Allocator::out_of_memory(Memory &memory, int ordinal, size_t bytes, uintptr_t stream,
                              const Failure &why) {
    auto [free, total] = guarded([&] { return memory.free_and_total(); });
    Statistics now = guarded([&] { return memory.statistics(); });
    auto allocated = static_cast<uint64_t>(now.bytes[0].current);
    auto reserved = static_cast<uint64_t>(now.reserved.current);
    uint64_t allowed = memory.budget();
    memory.note({Event::Oom, static_cast<uintptr_t>(free), bytes, stream, {}, memory.clock(),
                 memory.gather(true)});
    c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(bytes), allocated, reserved,
                                     device_of(ordinal));
    auto observers = [&] {
        std::lock_guard<std::mutex> guard(lock_);
        return observers_;
    }();
    for (auto &observer : observers) {
        observer(ordinal, bytes, static_cast<size_t>(allowed != 0 ? allowed : total),
                 static_cast<size_t>(free));
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ",
                     readable(bytes), ". GPU ", ordinal, " has a total capacity of ",
                     readable(total), " of which ", readable(free), " is free. ",
                     memories().options().simulated ? "" : memory_of_processes(ordinal),
                     allowed != 0 ? readable(allowed) + " allowed; " : "",
                     "Of the allocated memory ", readable(allocated),
                     " is allocated by PyTorch, and ",
                     readable(reserved > allocated ? reserved - allocated : 0),
                     " is reserved by PyTorch but unallocated.\n", why.what());
}

/// Whether each block is the driver's own.
bool Allocator::is_uncached() const {
    static const bool always = c10::utils::check_env("PYTORCH_NO_CUDA_MEMORY_CACHING") == true;
    return always || !isEnabled();
}

c10::DataPtr Allocator::allocate(size_t bytes) {
    TORCH_CHECK_WITH(OutOfMemoryError, bytes < uint64_t(1) << 60,
                     "CUDA out of memory. Tried to allocate more than 1EB memory.");
    int ordinal = memories().current_device();
    if (is_uncached()) {
        void *block = take_uncached(bytes);
        return {block, block, &delete_uncached, device_of(ordinal)};
    }
    void *block = allocate_on(ordinal, bytes, memories().current_stream(ordinal));
    return {block, block, &delete_block, device_of(ordinal)};
}

c10::DeleterFnPtr Allocator::raw_deleter() const {
    return is_uncached() ? &delete_uncached : &delete_block;
}

void Allocator::copy_data(void *to, const void *from, std::size_t bytes) const {
    C10_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice));
}

void *Allocator::raw_alloc(size_t bytes) {
    int ordinal = memories().current_device();
    return raw_alloc_with_stream(bytes, handle(memories().current_stream(ordinal)));
}

void *Allocator::raw_alloc_with_stream(size_t bytes, cudaStream_t stream) {
    if (is_uncached()) {
        return bytes == 0 ? nullptr : take_uncached(bytes);
    }
    return allocate_on(memories().current_device(), bytes, reinterpret_cast<uintptr_t>(stream));
}

void Allocator::raw_delete(void *block) {
    if (block != nullptr && !forked()) {
        bool known = guarded([&] { return free_block(block); });
        if (!known && is_uncached()) {
            return delete_uncached(block);
        }
        TORCH_CHECK(known, "leasehold: ", block, " was freed twice or is not of this allocator");
    }
}

void Allocator::record(void *block, uintptr_t stream, int ordinal) {
    for (int owner = 0; owner < Memories::MOST; ++owner) {
        Memory *memory = memories().known(owner);
        if (memory != nullptr && memory->find(block).address != 0) {
            leasehold_device peer = owner == ordinal ? 0 : memories().of(ordinal).device();
            return guarded([&] { memory->record_stream(block, stream, peer); });
        }
    }
}

void Allocator::recordStream(const c10::DataPtr &block, c10::cuda::CUDAStream stream) {
    // Memory of others, as of views from other libraries, is not ours to keep.
    if (block.get() != nullptr && block.get_deleter() == &delete_block && !forked()) {
        record(block.get(), reinterpret_cast<uintptr_t>(stream.stream()), stream.device_index());
    }
}

void *Allocator::getBaseAllocation(void *block, size_t *bytes) {
    for (int ordinal = 0; ordinal < Memories::MOST; ++ordinal) {
        Memory *memory = memories().known(ordinal);
        Block found = memory == nullptr ? Block{} : memory->find(block);
        if (found.address != 0) {
            if (bytes != nullptr) {
                *bytes = found.bytes;
            }
            return block;
        }
    }
    TORCH_CHECK(false, "leasehold: ", block, " is not the start of a block of this allocator");
}

// ---- the allocator as a whole

void Allocator::init(int devices) {
    if (devices > devices_.load()) {
        devices_.store(devices);
    }
}

double Allocator::getMemoryFraction(c10::DeviceIndex device) {
    return memories().fraction(device);
}

void Allocator::setMemoryFraction(double fraction, c10::DeviceIndex device) {
    memories().set_fraction(device, fraction);
}

void Allocator::emptyCache(c10::cuda::MempoolId_t id) {
    for (int ordinal = 0; ordinal < Memories::MOST && !forked(); ++ordinal) {
        if (Memory *memory = memories().known(ordinal)) {
            guarded([&] { memory->empty_cache(key(id)); });
        }
    }
}

void Allocator::cacheInfo(c10::DeviceIndex device, size_t *largest) {
    guarded([&] {
        Memory &memory = memories().of(device);
        leasehold_stats now = memory.raw_statistics();
        uint64_t left = now.budget_bytes > now.reserved_bytes
                            ? now.budget_bytes - now.reserved_bytes
                            : 0;
        uint64_t fresh = std::min<uint64_t>(memory.free_and_total().first, left);
        uint64_t found = std::max(fresh, memory.largest_free());
        *largest = std::max(*largest, static_cast<size_t>(found));
    });
}

// ---- statistics

c10::CachingDeviceAllocator::DeviceStats Allocator::getDeviceStats(c10::DeviceIndex device) {
    c10::CachingDeviceAllocator::DeviceStats made;
    Memory *memory = memories().known(device);
    if (memory == nullptr) {
        return made;
    }
    Statistics found = guarded([&] { return memory->statistics(); });
    fill(made.allocation, found.blocks);
    fill(made.active, found.blocks);
    fill(made.allocated_bytes, found.bytes);
    fill(made.active_bytes, found.bytes);
    fill(made.requested_bytes, found.bytes);
    fill(made.reserved_bytes, found.reserved);
    fill(made.segment, found.segments);
    fill(made.inactive_split_bytes, found.unused);
    made.num_alloc_retries = found.retries;
    made.num_ooms = found.failures;
    made.num_sync_all_streams = found.host_waits;
    made.num_device_alloc = found.growths;
    made.num_device_free = found.trims;
    return made;
}

void Allocator::resetAccumulatedStats(c10::DeviceIndex device) {
    if (Memory *memory = memories().known(device)) {
        guarded([&] { memory->reset_accumulated(); });
    }
}

void Allocator::resetPeakStats(c10::DeviceIndex device) {
    if (Memory *memory = memories().known(device)) {
        guarded([&] { memory->reset_peaks(); });
    }
}

// ---- private pools

void Allocator::use_pool(c10::DeviceIndex device, c10::cuda::MempoolId_t id, CUDAAllocator *allocator,
                         std::shared_ptr<CUDAAllocator> keep) {
    guarded([&] {
        Memory &memory = memories().of(device);
        if (allocator == nullptr || allocator == this) {
            memory.use_pool(key(id));
        } else if (auto *region = dynamic_cast<Region *>(allocator)) {
            memory.use_pool(key(id), {}, region->pool(device));
        } else {
            Source source;
            source.take = [allocator, keep](size_t bytes, uintptr_t stream) {
                return allocator->raw_alloc_with_stream(bytes, handle(stream));
            };
            source.give = [allocator, keep](void *segment, size_t) {
                allocator->raw_delete(segment);
            };
            memory.use_pool(key(id), std::move(source));
        }
    });
}

void Allocator::beginAllocateToPool(c10::DeviceIndex device, c10::cuda::MempoolId_t id,
                                    std::function<bool(cudaStream_t)> filter) {
    guarded([&] {
        memories().of(device).begin_pool(
            key(id), [filter = std::move(filter)](uintptr_t s) { return filter(handle(s)); });
    });
}

void Allocator::endAllocateToPool(c10::DeviceIndex device, c10::cuda::MempoolId_t id) {
    guarded([&] { memories().of(device).end_pool(key(id)); });
}

void Allocator::releasePool(c10::DeviceIndex device, c10::cuda::MempoolId_t id) {
    Memory *memory = forked() ? nullptr : memories().known(device);
    // A pool of PyTorch's own allocator may outlive it.
    if (memory != nullptr && memory->pool_uses(key(id)) > 0) {
        guarded([&] { memory->release_pool(key(id)); });
    }
}

int Allocator::getPoolUseCount(c10::DeviceIndex device, c10::cuda::MempoolId_t id) {
    Memory *memory = memories().known(device);
    return memory == nullptr ? 0 : memory->pool_uses(key(id));
}

bool Allocator::checkPoolLiveAllocations(c10::DeviceIndex device, c10::cuda::MempoolId_t id,
                                         const std::unordered_set<void *> &expected) {
    auto live = guarded([&] { return memories().of(device).live_blocks(key(id)); });
    size_t found = 0;
    for (uintptr_t block : live) {
        found += expected.count(reinterpret_cast<void *>(block));
    }
    return found == live.size() && found == expected.size();
}

std::shared_ptr<AllocatorState> Allocator::getCheckpointState(c10::DeviceIndex device,
                                                              c10::cuda::MempoolId_t id) {
    return guarded(
        [&] { return std::make_shared<State>(memories().of(device).checkpoint(key(id))); });
}

CheckpointDelta Allocator::setCheckpointPoolState(c10::DeviceIndex device,
                                                  std::shared_ptr<AllocatorState> state) {
    auto own = std::dynamic_pointer_cast<State>(state);
    TORCH_CHECK(own, "leasehold: the pool's state is another allocator's");
    CheckpointDelta delta;
    auto restored = guarded([&] { return memories().of(device).restore(own->checkpoint); });
    for (uintptr_t block : restored.freed) {
        delta.ptrs_freed.push_back(reinterpret_cast<void *>(block));
    }
    for (uintptr_t block : restored.allocated) {
        auto *at = reinterpret_cast<void *>(block);
        delta.dataptrs_allocd.emplace_back(at, at, &delete_block, device_of(device));
    }
    return delta;
}

#if LEASEHOLD_TORCH(11)
void Allocator::createOrIncrefPool(c10::DeviceIndex device, c10::cuda::MempoolId_t id,
                                   std::shared_ptr<CUDAAllocator> allocator) {
    use_pool(device, id, allocator.get(), allocator);
}

void Allocator::setUseOnOOM(c10::DeviceIndex device, c10::cuda::MempoolId_t id, bool on) {
    guarded([&] { memories().of(device).set_last_resort(key(id), on); });
}
#else
void Allocator::createOrIncrefPool(c10::DeviceIndex device, c10::cuda::MempoolId_t id,
                                   CUDAAllocator *allocator) {
    use_pool(device, id, allocator, nullptr);
}

void Allocator::setUseOnOOM(c10::DeviceIndex device, c10::cuda::MempoolId_t id) {
    guarded([&] { memories().of(device).set_last_resort(key(id), true); });
}
#endif

#if LEASEHOLD_TORCH(10)
void Allocator::setNoSplit(c10::DeviceIndex device, c10::cuda::MempoolId_t id) {
    guarded([&] { memories().of(device).set_no_split(key(id)); });
}

void Allocator::setUserMetadata(const std::string &metadata) {
    std::lock_guard<std::mutex> guard(lock_);
    metadata_ = metadata;
}

std::string Allocator::getUserMetadata() {
    std::lock_guard<std::mutex> guard(lock_);
    return metadata_;
}
#endif

// ---- history

SnapshotInfo Allocator::walk(c10::cuda::MempoolId_t id, bool traces) {
    auto to_nanoseconds = clock_.makeConverter();
    auto to_microseconds = [&](auto &time) { time.t_ = to_nanoseconds(time.approx_t_) / 1000; };
    SnapshotInfo made{};
    int devices = std::max(devices_.load(), 1);
    for (int ordinal = 0; ordinal < Memories::MOST; ++ordinal) {
        Memory *memory = memories().known(ordinal);
        if (memory == nullptr) {
            continue;
        }
        devices = std::max(devices, ordinal + 1);
        guarded([&] { memory->note_segments(); });
        made.device_traces.resize(static_cast<size_t>(devices));
        for (const Event &event : traces ? memory->events() : std::vector<Event>{}) {
            if (id == c10::cuda::MempoolId_t(0, 0) || key(id) == event.pool) {
                TraceEntry made_entry = entry(ordinal, event);
                to_microseconds(made_entry.time_);
                made.device_traces[static_cast<size_t>(ordinal)].push_back(std::move(made_entry));
            }
        }
        size_t active = 0;
        SegmentInfo *segment = nullptr;
        for (const Seen &seen : guarded([&] { return memory->walk(); })) {
            c10::cuda::MempoolId_t pool(seen.pool.first, seen.pool.second);
            if (id != c10::cuda::MempoolId_t(0, 0) && id != pool) {
                continue;
            }
            if (segment == nullptr || segment->address != seen.segment ||
                segment->owner_private_pool_id != pool || segment->device != ordinal) {
                made.segments.emplace_back();
                segment = &made.segments.back();
                segment->device = static_cast<c10::DeviceIndex>(ordinal);
                segment->address = seen.segment;
                segment->total_size = seen.segment_bytes;
                segment->is_large = true;
                segment->is_expandable = seen.expandable;
                segment->owner_private_pool_id = pool;
                segment->context_when_allocated = context_of(seen.segment_context);
            }
            if (segment->stream == nullptr && (seen.live || seen.pending)) {
                segment->stream = handle(seen.stream);
            }
            BlockInfo block;
            block.size = seen.bytes;
            block.requested_size = seen.live ? seen.requested : seen.bytes;
            block.allocated = seen.live;
            // Memory that a stream may still use is free here: the same stream may have it at once.
            block.active = seen.live;
            block.context_when_allocated = context_of(seen.context);
            if (block.allocated) {
                segment->allocated_size += block.size;
                segment->requested_size += block.requested_size;
            }
            segment->active_size += block.active ? block.size : 0;
            active += block.active ? block.size : 0;
            segment->blocks.push_back(std::move(block));
        }
        // A snapshot is an event of the next one.
        memory->note({Event::Snapshot, 0, active, 0, key(id), memory->clock(), nullptr});
    }
    made.device_traces.resize(static_cast<size_t>(devices));
    {
        std::lock_guard<std::mutex> guard(lock_);
        made.external_annotations.assign(annotations_.begin(), annotations_.end());
    }
    for (Annotation &annotation : made.external_annotations) {
        to_microseconds(annotation.time_);
    }
    made.config_metadata.expandable_segments = true;
    made.config_metadata.last_allocator_settings = "leasehold";
    return made;
}

void Allocator::history(HistorySettings settings, bool clear) {
    {
        std::lock_guard<std::mutex> guard(lock_);
        history_ = settings;
        annotations_.clear();
    }
    // Without the lock, which the texts of events need.
    int devices = std::max(devices_.load(), 1);
    for (int ordinal = 0; ordinal < devices; ++ordinal) {
        memories().of(ordinal).record_history(settings, clear);
    }
}

bool Allocator::isHistoryEnabled() {
    std::lock_guard<std::mutex> guard(lock_);
    return history_.enabled;
}

void Allocator::recordAnnotation(
    const std::vector<std::pair<std::string, std::string>> &texts) {
    std::lock_guard<std::mutex> guard(lock_);
    if (!history_.enabled) {
        return;
    }
    auto device = static_cast<c10::DeviceIndex>(memories().current_device());
    Annotation made(device, c10::getApproximateTime());
    for (const auto &[name, text] : texts) {
        made.recordUserMetadata(name, text);
    }
    annotations_.push_back(std::move(made));
    while (annotations_.size() > std::max<size_t>(history_.most, 1)) {
        annotations_.pop_front();
    }
}

namespace {

/// The regions of compiled code that the thread is in.
thread_local std::vector<std::string> regions;

} // namespace

void Allocator::pushCompileContext(std::string &text) {
    if (isHistoryEnabled()) {
        regions.push_back(text);
    }
}

void Allocator::popCompileContext() {
    if (!regions.empty()) {
        regions.pop_back();
    }
}

Notes Allocator::notes() {
    std::lock_guard<std::mutex> guard(lock_);
    return {regions.empty() ? "N/A" : regions.back(), metadata_};
}

namespace {

HistorySettings settings_of(bool enabled,
                            c10::cuda::CUDACachingAllocator::CreateContextFn recorder,
                            size_t most, RecordContext when) {
    HistorySettings made;
    made.enabled = enabled;
    made.most = most;
    made.of_live = enabled && when >= RecordContext::STATE;
    made.of_allocations = enabled && when >= RecordContext::ALLOC;
    made.of_frees = enabled && when >= RecordContext::ALL;
    if (enabled && recorder != nullptr) {
        made.recorder = [recorder] { return std::static_pointer_cast<void>(recorder()); };
    }
    return made;
}

} // namespace

#if LEASEHOLD_TORCH(11)
SnapshotInfo Allocator::snapshot(c10::cuda::MempoolId_t id, bool traces) { return walk(id, traces); }

void Allocator::recordHistory(bool enabled,
                              c10::cuda::CUDACachingAllocator::CreateContextFn recorder,
                              size_t most, RecordContext when, bool clear,
                              const std::vector<std::string> &skip) {
    static const std::pair<const char *, Event::Kind> kinds[] = {
        {"alloc", Event::Alloc},
        {"free_requested", Event::FreeRequested},
        {"free_completed", Event::FreeCompleted},
        {"segment_alloc", Event::SegmentAlloc},
        {"segment_free", Event::SegmentFree},
        {"segment_map", Event::SegmentMap},
        {"segment_unmap", Event::SegmentUnmap},
        {"snapshot", Event::Snapshot},
        {"oom", Event::Oom},
    };
    HistorySettings settings = settings_of(enabled, recorder, most, when);
    for (const std::string &name : skip) {
        for (auto &[text, kind] : kinds) {
            settings.skip |= name == text ? 1u << kind : 0u;
        }
    }
    history(std::move(settings), clear);
}
#else
SnapshotInfo Allocator::snapshot(c10::cuda::MempoolId_t id) { return walk(id, true); }

void Allocator::recordHistory(bool enabled,
                              c10::cuda::CUDACachingAllocator::CreateContextFn recorder,
                              size_t most, RecordContext when, bool clear) {
    history(settings_of(enabled, recorder, most, when), clear);
}
#endif

#if LEASEHOLD_TORCH(12)
std::shared_ptr<c10::GatheredContext> Allocator::getContextForPointer(const void *block) {
    for (int ordinal = 0; ordinal < Memories::MOST; ++ordinal) {
        Memory *memory = memories().known(ordinal);
        Context found = memory == nullptr
                            ? nullptr
                            : memory->context_of(reinterpret_cast<uintptr_t>(block));
        if (found) {
            return context_of(found);
        }
    }
    return nullptr;
}

// PyTorch asks these observers before it refuses memory for a limit of its own. This allocator has
// no such limit.
void Allocator::attachOomRejectionObserver(c10::cuda::CUDACachingAllocator::OomRejectionObserver) {}
#endif

void Allocator::attachOutOfMemoryObserver(
    c10::cuda::CUDACachingAllocator::OutOfMemoryObserver observer) {
    std::lock_guard<std::mutex> guard(lock_);
    observers_.push_back(std::move(observer));
}

void Allocator::attachAllocatorTraceTracker(
    c10::cuda::CUDACachingAllocator::AllocatorTraceTracker tracker) {
    std::lock_guard<std::mutex> guard(lock_);
    int devices = std::max(devices_.load(), 1);
    for (int ordinal = 0; ordinal < devices; ++ordinal) {
        memories().of(ordinal).add_tracker(
            [tracker, ordinal](const Event &event) { tracker(entry(ordinal, event)); });
    }
}

// ---- several devices and processes

void Allocator::enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex owner) {
    int allowed = 0;
    guarded([&] {
        int status = memories().library().device_enable_peer(
            memories().of(device).device(), memories().of(owner).device(), &allowed);
        if (status != LEASEHOLD_OK) {
            throw Failure(status, memories().library().last_error());
        }
    });
    if (allowed != 0 && !memories().options().simulated) {
        c10::cuda::CUDAGuard current(device);
        cudaError_t error = cudaDeviceEnablePeerAccess(owner, 0);
        if (error == cudaErrorPeerAccessAlreadyEnabled) {
            (void)cudaGetLastError();
        } else {
            C10_CUDA_CHECK(error);
        }
    }
}

cudaError_t Allocator::memcpyAsync(void *to, int to_device, const void *from, int from_device,
                                   size_t bytes, cudaStream_t stream, bool peers) {
    if (peers || to_device == from_device) {
        return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
    }
    return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);
}

namespace {

/// A descriptor of this thread, which the next one takes the place of.
class Descriptor {
  public:
    ~Descriptor() { put(-1); }
    void put(int descriptor) {
        if (descriptor_ >= 0) {
            close(descriptor_);
        }
        descriptor_ = descriptor;
    }
    int take() { return std::exchange(descriptor_, -1); }
    int get() const { return descriptor_; }

  private:
    int descriptor_ = -1;
};

// A handle goes to another process as bytes, and a descriptor cannot. So it goes beside the handle:
// leasehold.torch takes it after the one call and offers it before the other, on the same thread.
thread_local Descriptor shared, offered;

} // namespace

int Allocator::take_descriptor() { return shared.take(); }

void Allocator::offer_descriptor(int descriptor) {
    int own = descriptor < 0 ? -1 : fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    TORCH_CHECK(descriptor < 0 || own >= 0, "leasehold: ", descriptor, " is no open descriptor");
    offered.put(own);
}

ShareableHandle Allocator::shareIpcHandle(void *block) {
    TORCH_CHECK(memories().options().shareable,
                "leasehold: a CUDA tensor cannot be shared with another process, since its "
                "memory is made of granules without handles for other processes: call "
                "leasehold.torch.enable(shareable=True), share a copy in host memory "
                "(tensor.cpu().share_memory_()), or send it by torch.distributed");
    for (int ordinal = 0; ordinal < Memories::MOST; ++ordinal) {
        Memory *memory = memories().known(ordinal);
        if (memory == nullptr || memory->find(block).address == 0) {
            continue;
        }
        ShareableHandle made;
        made.offset = 0;
        guarded([&] { shared.put(memory->export_block(block, made.handle)); });
        // The same bytes of two processes are two blocks.
        made.handle += std::to_string(getpid());
        return made;
    }
    TORCH_CHECK(false, "leasehold: ", block, " is not the start of a block of this allocator");
}

std::shared_ptr<void> Allocator::getIpcDevPtr(std::string handle) {
    std::lock_guard<std::mutex> guard(lock_);
    for (auto at = imports_.begin(); at != imports_.end();) {
        at = at->second.expired() ? imports_.erase(at) : std::next(at);
    }
    auto known = imports_.find(handle);
    if (known != imports_.end()) {
        if (auto found = known->second.lock()) {
            return found;
        }
    }
    TORCH_CHECK(offered.get() >= 0 && handle.size() > LEASEHOLD_SHARED_BYTES,
                "leasehold: a CUDA tensor of another process cannot be opened, since it came "
                "without its descriptor: send it by torch.multiprocessing from a process with "
                "leasehold.torch.enable(shareable=True), share a copy in host memory "
                "(tensor.cpu().share_memory_()), or send it by torch.distributed");
    Memory &memory = memories().of(memories().current_device());
    void *block = nullptr;
    guarded([&] {
        block = memory.import_block(offered.get(), handle.substr(0, LEASEHOLD_SHARED_BYTES));
    });
    std::shared_ptr<void> made(block, [&memory](void *block) {
        if (!forked()) {
            try {
                memory.close_block(block);
            } catch (const Failure &failure) {
                TORCH_WARN("leasehold: a tensor of another process stays mapped: ",
                           failure.what());
            }
        }
    });
    imports_[handle] = made;
    return made;
}

} // namespace leasehold_torch
