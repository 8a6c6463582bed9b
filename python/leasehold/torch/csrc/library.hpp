// The functions of leasehold.h, found in a shared library at run time.
#pragma once

#include "leasehold.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace leasehold_torch {

#define LEASEHOLD_TORCH_FUNCTIONS(F)                                                             \
    F(abi_version)                                                                               \
    F(last_error)                                                                                \
    F(text_free)                                                                                 \
    F(device_open)                                                                               \
    F(device_describe)                                                                           \
    F(device_synchronize)                                                                        \
    F(device_enable_peer)                                                                        \
    F(malloc)                                                                                    \
    F(free)                                                                                      \
    F(record_stream)                                                                             \
    F(record_peer_stream)                                                                        \
    F(trim)                                                                                      \
    F(set_budget)                                                                                \
    F(stats_get)                                                                                 \
    F(largest_free)                                                                              \
    F(stats_reset_peaks)                                                                         \
    F(snapshot)                                                                                  \
    F(visit_blocks)                                                                              \
    F(pool_create)                                                                               \
    F(pool_release)                                                                              \
    F(pool_malloc)                                                                               \
    F(pool_trim)                                                                                 \
    F(pool_suspend)                                                                              \
    F(pool_resume)                                                                               \
    F(block_export)                                                                              \
    F(block_import)                                                                              \
    F(block_close)                                                                               \
    F(plugin_set_device)

/// The functions by name, without their prefix.
struct Library {
#define LEASEHOLD_TORCH_FIELD(name) decltype(&::leasehold_##name) name = nullptr;
    LEASEHOLD_TORCH_FUNCTIONS(LEASEHOLD_TORCH_FIELD)
#undef LEASEHOLD_TORCH_FIELD

    /// Opens the library and finds its functions. The library stays open for good.
    static Library load(const std::string &path) {
        void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) {
            throw std::runtime_error("Leasehold's library cannot be opened: " + std::string(dlerror()));
        }
        Library found;
#define LEASEHOLD_TORCH_FIND(name)                                                               \
    found.name = reinterpret_cast<decltype(found.name)>(dlsym(handle, "leasehold_" #name));      \
    if (found.name == nullptr) {                                                                 \
        throw std::runtime_error(path + " has no function leasehold_" #name);                    \
    }
        LEASEHOLD_TORCH_FUNCTIONS(LEASEHOLD_TORCH_FIND)
#undef LEASEHOLD_TORCH_FIND
        if (found.abi_version() < LEASEHOLD_ABI_VERSION) {
            throw std::runtime_error(path + " is older than this extension: build it again");
        }
        return found;
    }
};

} // namespace leasehold_torch
