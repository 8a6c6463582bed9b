// How PyTorch calls the functions of a plug-in, with exceptions as PyTorch has them.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <utility>

namespace c10::detail {

__attribute__((visibility("default"))) void torchCheckFail(const char *, const char *, uint32_t,
                                                           const char *text) {
    throw std::runtime_error(text);
}

} // namespace c10::detail

namespace {

template <typename F> void *caught(char *text, F f) {
    try {
        return f();
    } catch (const std::runtime_error &error) {
        std::snprintf(text, 1000, "%s", error.what());
        return nullptr;
    }
}

} // namespace

extern "C" {

void *fake_alloc(void *(*alloc)(size_t, int, void *), ptrdiff_t size, void *stream, char *text) {
    std::function<void *(size_t, int, void *)> function = alloc;
    return caught(text, [&] { return function(static_cast<size_t>(size), 0, stream); });
}

void *fake_free(void (*free)(void *, size_t, int, void *), void *block, ptrdiff_t size,
                void *stream, char *text) {
    return caught(text, [&] {
        free(block, static_cast<size_t>(size), 0, stream);
        return nullptr;
    });
}

void *fake_begin_pool(void (*begin)(int, std::pair<uint64_t, uint64_t>,
                                    std::function<bool(void *)>),
                      char *text) {
    return caught(text, [&] {
        begin(0, {0, 1}, [](void *) { return true; });
        return nullptr;
    });
}

void *fake_reset(void (*reset)(), char *text) {
    return caught(text, [&] {
        reset();
        return nullptr;
    });
}

void *fake_set_fraction(void (*set)(double, int), double fraction, int device, char *text) {
    return caught(text, [&] {
        set(fraction, device);
        return nullptr;
    });
}
}
