#!/usr/bin/env python3
"""What CUDA's executable graphs take of a device's memory, and what comes back: the raw driver, by ctypes.

Prints the loss of free memory around instantiation, upload and the first launch, then what many graphs take, and
what is free again after they are gone. Needs a CUDA driver alone.
"""
import ctypes as C
import time

cuda = C.CDLL("libcuda.so.1")
PTX = b""".version 7.0
.target sm_70
.address_size 64
.visible .entry k(.param .u64 p, .param .align 8 .b8 q[256]) { ret; }
"""


class Params(C.Structure):
    _fields_ = [("function", C.c_void_p)] + [(n, C.c_uint) for n in ("gx", "gy", "gz", "bx", "by", "bz", "shared")]
    _fields_ += [("params", C.c_void_p), ("extra", C.c_void_p)]


def call(name, *args):
    code = getattr(cuda, name)(*args)
    if code:
        raise SystemExit(f"{name}: {code}")


call("cuInit", 0)
context, module, function, stream, version = C.c_void_p(), C.c_void_p(), C.c_void_p(), C.c_void_p(), C.c_int()
call("cuDriverGetVersion", C.byref(version))
call("cuDevicePrimaryCtxRetain", C.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuModuleLoadData", C.byref(module), PTX)
call("cuModuleGetFunction", C.byref(function), module, b"k")
call("cuStreamCreate", C.byref(stream), 1)
p, q = C.c_uint64(0), (C.c_char * 256)()
ARGS = (C.c_void_p * 2)(C.addressof(p), C.addressof(q))
KERNEL = Params(function.value, 1, 1, 1, 32, 1, 1, 0, C.cast(ARGS, C.c_void_p), None)


def free():
    now, total = C.c_size_t(), C.c_size_t()
    call("cuMemGetInfo_v2", C.byref(now), C.byref(total))
    return now.value


def make(nodes, chain=True):
    """A graph, its executable, the loss of free memory by steps, and seconds."""
    graph, executable, before = C.c_void_p(), C.c_void_p(), None
    call("cuGraphCreate", C.byref(graph), 0)
    for _ in range(nodes):
        node = C.c_void_p()
        after = (C.c_void_p * 1)(before) if before and chain else None
        call("cuGraphAddKernelNode_v2", C.byref(node), graph, after, C.c_size_t(1 if after else 0), C.byref(KERNEL))
        before = node.value
    begun, marks = time.perf_counter(), [free()]
    call("cuGraphInstantiateWithFlags", C.byref(executable), graph, 0)
    marks.append(free())
    call("cuGraphUpload", executable, stream)
    call("cuStreamSynchronize", stream)
    marks.append(free())
    seconds = time.perf_counter() - begun
    call("cuGraphLaunch", executable, stream)
    call("cuStreamSynchronize", stream)
    marks.append(free())
    return graph, executable, tuple(a - b for a, b in zip(marks, marks[1:])), seconds


def drop(made):
    call("cuGraphExecDestroy", made[1])
    call("cuGraphDestroy", made[0])


print("driver", version.value, "free", free())
begun = time.perf_counter()
for _ in range(100):
    free()
print(f"cuMemGetInfo {1e4 * (time.perf_counter() - begun):.1f} us")
for n in (1, 1, 500, 500, 500, 500, 2000, 2000, 10000):
    start = free()
    one = make(n)
    peak = free()
    drop(one)
    print(f"one of {n}: instantiate, upload, launch {one[2]}, {one[3] * 1e3:.1f} ms; gone: {free() - peak} back of {start - peak}")
for n, count, chain in ((50, 200, True), (500, 64, True), (500, 64, False), (2000, 16, True)):
    start = free()
    made = [make(n, chain) for _ in range(count)]
    peak = free()
    first = [sum(one[2]) for one in made[:12]]
    print(f"{count} of {n} chain={chain}: {start - peak} bytes, {(start - peak) / n / count:.0f} a node; first {first}")
    for one in made[::2]:
        drop(one)
    half = free()
    for one in made[1::2]:
        drop(one)
    end = free()
    call("cuDeviceGraphMemTrim", 0)
    print(f"   half gone: {half - peak} back; all gone: {end - peak} back; left {start - end}, after trim {start - free()}")
