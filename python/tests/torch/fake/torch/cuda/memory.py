"""An allocator with the setters of PyTorch's, called as PyTorch does."""

import ctypes
import os

LIBRARY = os.path.join(os.path.dirname(os.path.dirname(__file__)), "lib", "libc10.so")
SETTERS = ("record_stream_fn", "begin_allocate_to_pool", "reset_fn", "memory_fraction_fn")


class Allocator:
    def __init__(self, alloc, free):
        self.alloc, self.free = alloc, free
        self.functions = {}
        for name in SETTERS:
            setattr(self, "set_" + name, lambda address, name=name: self.functions.update({name: address}))


class CUDAPluggableAllocator:
    def __init__(self, path, alloc, free):
        library = ctypes.CDLL(path)
        self.inner = Allocator(*(ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in (alloc, free)))

    def allocator(self):
        return self.inner


def change_current_allocator(allocator):
    global current
    current = allocator.allocator()


def called(function, *arguments):
    """Calls a function of `fake_torch.cpp`; what it catches is a RuntimeError."""
    text = ctypes.create_string_buffer(1000)
    library = ctypes.CDLL(LIBRARY)
    call = getattr(library, function)
    call.restype = ctypes.c_void_p
    result = call(*arguments, text)
    if text.value:
        raise RuntimeError(text.value.decode())
    return result


def malloc(size, stream):
    return called("fake_alloc", current.alloc, ctypes.c_ssize_t(size), ctypes.c_void_p(stream))


def free(block, size, stream):
    called("fake_free", current.free, ctypes.c_void_p(block), ctypes.c_ssize_t(size), ctypes.c_void_p(stream))


def begin_pool():
    called("fake_begin_pool", ctypes.c_void_p(current.functions["begin_allocate_to_pool"]))


def empty_cache():
    called("fake_reset", ctypes.c_void_p(current.functions["reset_fn"]))


def set_per_process_memory_fraction(fraction, device=0):
    address = ctypes.c_void_p(current.functions["memory_fraction_fn"])
    called("fake_set_fraction", address, ctypes.c_double(fraction), device)


def _unsupported(*_, **__):
    raise RuntimeError("not supported by this allocator")


memory_stats_as_nested_dict = reset_peak_memory_stats = reset_accumulated_memory_stats = _unsupported
memory_snapshot = _snapshot = _record_memory_history = _unsupported
