// The extension's functions for Python.
#include "allocator.hpp"

#include <c10/core/Allocator.h>

#include <torch/csrc/profiler/combined_traceback.h>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace leasehold_torch {
namespace {

/// The process's allocator. Tensors are freed until the process ends, so it is never destroyed.
std::shared_ptr<Allocator> &allocator() {
    static auto *one = new std::shared_ptr<Allocator>(std::make_shared<Allocator>());
    return *one;
}

bool installed() {
    return c10::cuda::CUDACachingAllocator::allocator.load() == allocator().get();
}

/// Makes the allocator PyTorch's. `devices`: how many there are if CUDA is initialized, or 0.
void install(const std::string &library, uint64_t budget, uint32_t policy, int devices,
             bool shareable) {
    Options options;
    options.budget = budget;
    options.policy = policy;
    options.shareable = shareable;
    memories().configure(library, options);
    memories().notes = [] { return allocator()->notes(); };
    if (installed()) {
        return;
    }
    if (c10::cuda::CUDACachingAllocator::allocator.load()->initialized()) {
        // The caller found it without memory, so nothing of it comes back here.
        allocator()->init(devices);
        c10::cuda::CUDACachingAllocator::allocator.store(allocator().get());
    } else {
        torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(allocator());
    }
    c10::SetAllocator(c10::DeviceType::CUDA, allocator().get(), 255);
}

/// Prepares regions under PyTorch's own allocator.
void prepare(const std::string &library) {
    if (!installed()) {
        memories().configure(library, Options{});
    }
}

/// Leasehold's own numbers of a device; empty if it was not used yet.
std::map<std::string, uint64_t> statistics(int device) {
    Memory *memory = memories().known(device);
    if (memory == nullptr) {
        return {};
    }
    leasehold_stats s = memory->raw_statistics();
    return {
        {"allocated_bytes", s.allocated_bytes},
        {"allocated_bytes_peak", s.allocated_bytes_peak},
        {"reserved_bytes", s.reserved_bytes},
        {"reserved_bytes_peak", s.reserved_bytes_peak},
        {"budget_bytes", memory->budget() == 0 ? s.budget_bytes : memory->budget()},
        {"free_ready_bytes", s.free_ready_bytes},
        {"free_pending_bytes", s.free_pending_bytes},
        {"free_cached_bytes", s.free_cached_bytes},
        {"unmapped_bytes", s.unmapped_bytes},
        {"blocks", s.blocks},
        {"allocations", s.allocations},
        {"frees", s.frees},
        {"retries", s.retries},
        {"failures", s.failures},
        {"growths", s.growths},
        {"remaps", s.remaps},
        {"host_waits", s.host_waits},
        {"stream_waits", s.stream_waits},
        {"driver_calls", s.driver_calls},
        {"pools", s.pools},
        {"metadata_bytes", s.metadata_bytes},
    };
}

std::string snapshot(int device) {
    char *text = nullptr;
    int status = memories().library().snapshot(memories().of(device).device(), &text);
    if (status != LEASEHOLD_OK) {
        throw_error({status, memories().library().last_error()});
    }
    std::string copy(text);
    memories().library().text_free(text);
    return copy;
}

// ---- for tests: the allocator over a simulated device, without CUDA

void simulate(const std::string &library, uint64_t budget, bool shareable) {
    Options options;
    options.budget = budget;
    options.shareable = shareable;
    options.prefix = "sim-cuda:";
    options.simulated = true;
    memories().configure(library, options);
    memories().notes = [] { return allocator()->notes(); };
    allocator()->init(1);
    c10::cuda::CUDACachingAllocator::allocator.store(allocator().get());
}

cudaStream_t stream_of(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }
void *block_of(uintptr_t block) { return reinterpret_cast<void *>(block); }

py::dict counts(const c10::CachingAllocator::StatArray &array) {
    py::dict made;
    const char *names[] = {"all", "small", "large"};
    for (size_t i = 0; i < array.size(); ++i) {
        made[names[i]] = py::make_tuple(array[i].current, array[i].peak, array[i].allocated,
                                        array[i].freed);
    }
    return made;
}

py::dict device_statistics(Allocator &self) {
    auto s = self.getDeviceStats(0);
    py::dict made;
    made["allocation"] = counts(s.allocation);
    made["segment"] = counts(s.segment);
    made["active"] = counts(s.active);
    made["allocated_bytes"] = counts(s.allocated_bytes);
    made["reserved_bytes"] = counts(s.reserved_bytes);
    made["requested_bytes"] = counts(s.requested_bytes);
    made["inactive_split_bytes"] = counts(s.inactive_split_bytes);
    made["num_ooms"] = s.num_ooms;
    made["num_alloc_retries"] = s.num_alloc_retries;
    made["num_device_alloc"] = s.num_device_alloc;
    return made;
}

py::list segments(Allocator &self, std::pair<uint64_t, uint64_t> id) {
    py::list made;
    auto snapshot = self.snapshot({id.first, id.second});
    for (const auto &segment : snapshot.segments) {
        py::list blocks;
        for (const auto &block : segment.blocks) {
            blocks.append(py::make_tuple(block.size, block.requested_size, block.allocated));
        }
        py::dict one;
        one["address"] = segment.address;
        one["total_size"] = segment.total_size;
        one["allocated_size"] = segment.allocated_size;
        one["pool"] = py::make_tuple(segment.owner_private_pool_id.first,
                                     segment.owner_private_pool_id.second);
        one["blocks"] = blocks;
        made.append(one);
    }
    return made;
}

std::vector<std::pair<int, uint64_t>> events(Allocator &self) {
    std::vector<std::pair<int, uint64_t>> made;
    auto snapshot = self.snapshot({0, 0});
    for (const auto &entry : snapshot.device_traces.at(0)) {
        made.emplace_back(static_cast<int>(entry.action_), entry.size_);
    }
    return made;
}

using Id = std::pair<uint64_t, uint64_t>;

/// A source of segments that are the host's, for a pool with an allocator of its own.
Source host_source() {
    Source source;
    source.take = [](size_t bytes, uintptr_t) { return std::aligned_alloc(4096, bytes); };
    source.give = [](void *segment, size_t) { std::free(segment); };
    return source;
}

void bind_tests(py::module_ &module) {
    auto m = module.def_submodule("testing", "The allocator over a simulated device.");
    m.def("simulate", &simulate, py::arg("library"), py::arg("budget"),
          py::arg("shareable") = false);
    m.def("set_stream", [](uintptr_t stream) { Memories::simulated_stream = stream; });
    m.def("set_captured", [](uintptr_t stream) { Memories::simulated_capture = stream; });
    m.def("device", [] { return memories().of(0).device(); });
    m.def("raw_alloc", [](size_t bytes, uintptr_t stream) {
        void *block = allocator()->raw_alloc_with_stream(bytes, stream_of(stream));
        return reinterpret_cast<uintptr_t>(block);
    });
    m.def("raw_delete", [](uintptr_t block) { allocator()->raw_delete(block_of(block)); });
    m.def("allocate", [](size_t bytes) {
        // The tensor's memory goes with the result.
        auto held = std::make_shared<c10::DataPtr>(allocator()->allocate(bytes));
        return py::make_tuple(reinterpret_cast<uintptr_t>(held->get()),
                              py::capsule(new std::shared_ptr<c10::DataPtr>(held), [](void *p) {
                                  delete static_cast<std::shared_ptr<c10::DataPtr> *>(p);
                              }));
    });
    m.def("record", [](uintptr_t block, uintptr_t stream) {
        allocator()->record(block_of(block), stream, 0);
    });
    m.def("statistics", [] { return device_statistics(*allocator()); });
    m.def("reset_peaks", [] { allocator()->resetPeakStats(0); });
    m.def("reset_accumulated", [] { allocator()->resetAccumulatedStats(0); });
    m.def("segments", [](Id id) { return segments(*allocator(), id); });
    m.def("events", [] { return events(*allocator()); });
    m.def("share", [](uintptr_t block) {
        return py::bytes(allocator()->shareIpcHandle(block_of(block)).handle);
    });
    m.def("open_shared", [](const std::string &handle) {
        auto opened = allocator()->getIpcDevPtr(handle);
        return py::make_tuple(reinterpret_cast<uintptr_t>(opened.get()),
                              py::capsule(new std::shared_ptr<void>(opened), [](void *p) {
                                  delete static_cast<std::shared_ptr<void> *>(p);
                              }));
    });
    m.def("empty_cache", [](Id id) { allocator()->emptyCache({id.first, id.second}); },
          py::arg("id") = Id{});
    m.def("set_fraction", [](double part) { allocator()->setMemoryFraction(part, 0); });
    m.def("total", [] { return memories().of(0).free_and_total().second; });
    m.def("cache_info", [] {
        size_t largest = 0;
        allocator()->cacheInfo(0, &largest);
        return largest;
    });
    m.def("base", [](uintptr_t block) {
        size_t bytes = 0;
        void *base = allocator()->getBaseAllocation(block_of(block), &bytes);
        return py::make_tuple(reinterpret_cast<uintptr_t>(base), bytes);
    });
    m.def("begin_pool", [](Id id, uintptr_t stream) {
        allocator()->beginAllocateToPool(
            0, {id.first, id.second}, [stream](cudaStream_t s) { return s == stream_of(stream); });
    });
    m.def("end_pool", [](Id id) { allocator()->endAllocateToPool(0, {id.first, id.second}); });
    m.def("release_pool", [](Id id) { allocator()->releasePool(0, {id.first, id.second}); });
    m.def("use_pool", [](Id id) { allocator()->createOrIncrefPool(0, {id.first, id.second}); });
    m.def("host_pool", [](Id id) { memories().of(0).use_pool(id, host_source()); });
    m.def("pool_uses",
          [](Id id) { return allocator()->getPoolUseCount(0, {id.first, id.second}); });
    m.def("live", [](Id id, const std::vector<uintptr_t> &blocks) {
        std::unordered_set<void *> expected;
        for (uintptr_t block : blocks) {
            expected.insert(block_of(block));
        }
        return allocator()->checkPoolLiveAllocations(0, {id.first, id.second}, expected);
    });
    m.def("checkpoint", [](Id id) {
        auto state = allocator()->getCheckpointState(0, {id.first, id.second});
        return py::capsule(
            new std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState>(state),
            [](void *p) {
                delete static_cast<
                    std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> *>(p);
            });
    });
    m.def("restore", [](const py::capsule &state) {
        auto *held = state.get_pointer<
            std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState>>();
        auto delta = allocator()->setCheckpointPoolState(0, *held);
        std::vector<uintptr_t> freed, allocated;
        for (void *block : delta.ptrs_freed) {
            freed.push_back(reinterpret_cast<uintptr_t>(block));
        }
        for (auto &block : delta.dataptrs_allocd) {
            allocated.push_back(reinterpret_cast<uintptr_t>(block.get()));
            block.release_context(); // PyTorch gives them to storages
        }
        return py::make_tuple(freed, allocated);
    });
    m.def(
        "record_history",
        [](bool on, size_t most, const std::string &context, bool clear) {
            using c10::cuda::CUDACachingAllocator::RecordContext;
            auto when = context == "all"     ? RecordContext::ALL
                        : context == "alloc" ? RecordContext::ALLOC
                        : context == "state" ? RecordContext::STATE
                                             : RecordContext::NEVER;
            c10::cuda::CUDACachingAllocator::CreateContextFn recorder = nullptr;
            if (when != RecordContext::NEVER) {
                recorder = []() -> std::shared_ptr<c10::GatheredContext> {
                    return torch::CapturedTraceback::gather(true, false, false);
                };
            }
#if LEASEHOLD_TORCH(11)
            allocator()->recordHistory(on, recorder, most, when, clear, {});
#else
            allocator()->recordHistory(on, recorder, most, when, clear);
#endif
        },
        py::arg("on"), py::arg("most"), py::arg("context") = "", py::arg("clear") = true);
    m.def("set_metadata", [](const std::string &text) {
#if LEASEHOLD_TORCH(10)
        allocator()->setUserMetadata(text);
#else
        (void)text;
#endif
    });
    m.def("annotate", [](const std::string &name) { allocator()->recordAnnotation({{"name", name}}); });
    m.def("push_region", [](std::string text) { allocator()->pushCompileContext(text); });
    m.def("pop_region", [] { allocator()->popCompileContext(); });
    m.def("enable", [](bool on) { allocator()->enable(on); });
    m.def("on_oom", [](py::function called) {
        allocator()->attachOutOfMemoryObserver(
            [called](int64_t device, size_t allocated, size_t total, size_t free) {
                py::gil_scoped_acquire lock;
                called(device, allocated, total, free);
            });
    });
    m.def("region_pool", [](Region &region, Id id) {
        allocator()->createOrIncrefPool(0, {id.first, id.second},
#if LEASEHOLD_TORCH(11)
                                        std::shared_ptr<CUDAAllocator>(&region, [](void *) {})
#else
                                        &region
#endif
        );
    });
    m.def("loop", [](size_t times, size_t bytes) {
        for (size_t i = 0; i < times; ++i) {
            allocator()->raw_delete(allocator()->raw_alloc_with_stream(bytes, nullptr));
        }
    });
    m.def("bare_loop", [](size_t times, size_t bytes) {
        leasehold_device device = memories().of(0).device();
        const Library &library = memories().library();
        for (size_t i = 0; i < times; ++i) {
            void *block = nullptr;
            library.malloc(device, bytes, 0, &block);
            library.free(device, block);
        }
    });
}

} // namespace
} // namespace leasehold_torch

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    using namespace leasehold_torch;
    module.doc() = "Leasehold as PyTorch's allocator of CUDA memory.";
    py::class_<Region, CUDAAllocator, std::shared_ptr<Region>>(module, "Region")
        .def(py::init<std::string, uint32_t>())
        .def("suspend", &Region::suspend, py::call_guard<py::gil_scoped_release>())
        .def("resume", &Region::resume, py::call_guard<py::gil_scoped_release>())
        .def("suspended", &Region::suspended);
    module.def("install", &install);
    module.def("installed", &installed);
    module.def("prepare", &prepare);
    module.def("take_descriptor", &Allocator::take_descriptor);
    module.def("offer_descriptor", &Allocator::offer_descriptor);
    module.def("statistics", &statistics);
    module.def("set_fraction", [](int device, double fraction) {
        memories().set_fraction(device, fraction);
    });
    module.def("snapshot", &snapshot);
    module.def("initialized",
               [] { return c10::cuda::CUDACachingAllocator::allocator.load()->initialized(); });
    bind_tests(module);
}
