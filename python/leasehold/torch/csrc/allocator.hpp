// PyTorch's CUDAAllocator over the memories of the devices.
#pragma once

#include "core.hpp"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>
#include <torch/version.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define LEASEHOLD_TORCH(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))

namespace leasehold_torch {

using c10::cuda::CUDACachingAllocator::CUDAAllocator;
using Annotation = decltype(c10::cuda::CUDACachingAllocator::SnapshotInfo::external_annotations)::value_type;

/// The options of all devices' memory.
struct Options {
    uint64_t budget = 0; // of each device; 0: no limit
    uint32_t policy = LEASEHOLD_POLICY_BALANCED;
    std::string prefix = "cuda:"; // a device's name in leasehold.h begins with it
    bool shareable = false;       // other processes may map tensors
    bool simulated = false;       // no CUDA: device 0, streams of a simulation
};

/// The memories by ordinal, opened at their first use.
class Memories {
  public:
    static constexpr int MOST = 64;

    void configure(const std::string &library, Options options);
    const Options &options() const { return options_; }
    const Library &library() const { return library_; }

    /// The device's memory. Throws if it cannot be opened.
    Memory &of(int ordinal);
    /// The device's memory, or nullptr if it was not used yet.
    Memory *known(int ordinal) const;
    void set_fraction(int ordinal, double fraction);
    double fraction(int ordinal);

    int current_device() const;
    uintptr_t current_stream(int ordinal) const;
    static thread_local uintptr_t simulated_stream;
    static std::atomic<uintptr_t> simulated_capture; // a stream, or UINTPTR_MAX

    /// Reads the texts of the program for an event of the history.
    std::function<Notes()> notes = [] { return Notes{}; };

  private:
    uint64_t limit(Memory &memory, double fraction) const;

    std::mutex lock_;
    bool configured_ = false;
    std::string path_;
    Library library_;
    Options options_;
    std::array<std::atomic<Memory *>, MOST> memories_{};
    std::array<std::atomic<double>, MOST> fractions_{};
};

/// All memories of the process. They live until it ends.
Memories &memories();

/// Whether this process is a child of fork() that inherited the memories.
bool forked();

/// Throws a failure as PyTorch's error.
[[noreturn]] void throw_error(const Failure &failure);

/// A named region: an allocator for torch.cuda.MemPool whose memory can be suspended.
class Region : public torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator {
  public:
    Region(std::string name, uint32_t policy);

    /// The region's pool on a device.
    leasehold_pool pool(int ordinal);
    /// Gives the memory on all devices back; returns the bytes that went.
    uint64_t suspend(bool keep);
    void resume();
    bool suspended() const { return suspended_; }

  private:
    static void *take(Region *region, size_t bytes, int ordinal, cudaStream_t stream);
    static void give(void *block, int ordinal);
    void resume_pools();

    std::string region_;
    uint32_t policy_;
    std::mutex lock_;
    std::map<int, leasehold_pool> pools_;
    std::atomic<bool> suspended_{false};
};

/// PyTorch's allocator.
class Allocator : public CUDAAllocator {
  public:
    // ---- blocks
    c10::DataPtr allocate(size_t bytes) override;
    c10::DeleterFnPtr raw_deleter() const override;
    void copy_data(void *to, const void *from, std::size_t bytes) const final;
    void *raw_alloc(size_t bytes) override;
    void *raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override;
    void raw_delete(void *block) override;
    void recordStream(const c10::DataPtr &block, c10::cuda::CUDAStream stream) override;
    void record(void *block, uintptr_t stream, int ordinal);
    void *getBaseAllocation(void *block, size_t *bytes) override;

    // ---- the allocator as a whole
    void init(int devices) override;
    bool initialized() override { return devices_ > 0; }
    double getMemoryFraction(c10::DeviceIndex device) override;
    void setMemoryFraction(double fraction, c10::DeviceIndex device) override;
    void emptyCache(c10::cuda::MempoolId_t id = {0, 0}) override;
    void enable(bool on) override { cached_.store(on); }
    bool isEnabled() const override { return cached_.load(); }
    void cacheInfo(c10::DeviceIndex device, size_t *largest) override;
    std::string name() override { return "leasehold"; }

    // ---- statistics
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
    void resetAccumulatedStats(c10::DeviceIndex device) override;
    void resetPeakStats(c10::DeviceIndex device) override;

    // ---- private pools
    void beginAllocateToPool(c10::DeviceIndex device, c10::cuda::MempoolId_t id,
                             std::function<bool(cudaStream_t)> filter) override;
    void endAllocateToPool(c10::DeviceIndex device, c10::cuda::MempoolId_t id) override;
    void releasePool(c10::DeviceIndex device, c10::cuda::MempoolId_t id) override;
    int getPoolUseCount(c10::DeviceIndex device, c10::cuda::MempoolId_t id) override;
    bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::cuda::MempoolId_t id,
                                  const std::unordered_set<void *> &expected) override;
    std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState>
    getCheckpointState(c10::DeviceIndex device, c10::cuda::MempoolId_t id) override;
    c10::cuda::CUDACachingAllocator::CheckpointDelta setCheckpointPoolState(
        c10::DeviceIndex device,
        std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> state) override;

    // ---- history
    bool isHistoryEnabled() override;
    void recordAnnotation(const std::vector<std::pair<std::string, std::string>> &texts) override;
    void pushCompileContext(std::string &text) override;
    void popCompileContext() override;
    /// The texts that an event of the calling thread gets.
    Notes notes();
    void attachOutOfMemoryObserver(
        c10::cuda::CUDACachingAllocator::OutOfMemoryObserver observer) override;
    void attachAllocatorTraceTracker(
        c10::cuda::CUDACachingAllocator::AllocatorTraceTracker tracker) override;

    // ---- several devices and processes
    void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex owner) override;
    cudaError_t memcpyAsync(void *to, int to_device, const void *from, int from_device,
                            size_t bytes, cudaStream_t stream, bool peers) override;
    c10::cuda::CUDACachingAllocator::ShareableHandle shareIpcHandle(void *block) override;
    std::shared_ptr<void> getIpcDevPtr(std::string handle) override;
    /// The descriptor that belongs to this thread's last handle, which is the caller's; -1: none.
    static int take_descriptor();
    /// The descriptor of the handle that this thread opens next; -1: none.
    static void offer_descriptor(int descriptor);

    // ---- what differs between versions of PyTorch
#if LEASEHOLD_TORCH(10)
    std::vector<c10::cuda::CUDACachingAllocator::StreamSegmentSize>
    getExpandableSegmentSizes(c10::DeviceIndex) override {
        return {};
    }
    void setUserMetadata(const std::string &metadata) override;
    std::string getUserMetadata() override;
    void setNoSplit(c10::DeviceIndex device, c10::cuda::MempoolId_t id) override;
#endif
#if LEASEHOLD_TORCH(11)
    void createOrIncrefPool(c10::DeviceIndex device, c10::cuda::MempoolId_t id,
                            std::shared_ptr<CUDAAllocator> allocator = nullptr) override;
    void setUseOnOOM(c10::DeviceIndex device, c10::cuda::MempoolId_t id, bool on) override;
    c10::cuda::CUDACachingAllocator::SnapshotInfo snapshot(c10::cuda::MempoolId_t id = {0, 0},
                                                           bool traces = true) override;
    void recordHistory(bool enabled, c10::cuda::CUDACachingAllocator::CreateContextFn recorder,
                       size_t most, c10::cuda::CUDACachingAllocator::RecordContext when,
                       bool clear, const std::vector<std::string> &skip) override;
#else
    void createOrIncrefPool(c10::DeviceIndex device, c10::cuda::MempoolId_t id,
                            CUDAAllocator *allocator = nullptr) override;
    void setUseOnOOM(c10::DeviceIndex device, c10::cuda::MempoolId_t id) override;
    c10::cuda::CUDACachingAllocator::SnapshotInfo snapshot(c10::cuda::MempoolId_t id = {0, 0}) override;
    void recordHistory(bool enabled, c10::cuda::CUDACachingAllocator::CreateContextFn recorder,
                       size_t most, c10::cuda::CUDACachingAllocator::RecordContext when,
                       bool clear) override;
#endif
#if LEASEHOLD_TORCH(12)
    std::shared_ptr<c10::GatheredContext> getContextForPointer(const void *block) override;
    void attachOomRejectionObserver(
        c10::cuda::CUDACachingAllocator::OomRejectionObserver observer) override;
#endif

    void *allocate_on(int ordinal, size_t bytes, uintptr_t stream);

  private:
    void use_pool(c10::DeviceIndex device, c10::cuda::MempoolId_t id, CUDAAllocator *allocator,
                  std::shared_ptr<CUDAAllocator> keep);
    c10::cuda::CUDACachingAllocator::SnapshotInfo walk(c10::cuda::MempoolId_t id, bool traces);
    void history(HistorySettings settings, bool clear);
    bool is_uncached() const;
    [[noreturn]] void out_of_memory(Memory &memory, int ordinal, size_t bytes, uintptr_t stream,
                                    const Failure &why);

    std::atomic<int> devices_{0};
    std::atomic<bool> cached_{true};
    // Measures the clock of the events against the system's from now on.
    c10::ApproximateClockToUnixTimeConverter clock_;
    std::mutex lock_;
    HistorySettings history_;
    std::string metadata_;
    std::deque<Annotation> annotations_;
    std::vector<c10::cuda::CUDACachingAllocator::OutOfMemoryObserver> observers_;
    std::map<std::string, std::weak_ptr<void>> imports_; // by handle
};

} // namespace leasehold_torch
