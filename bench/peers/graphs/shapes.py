#!/usr/bin/env python3
"""What a shape of CUDA graphs takes of a device's memory, and whether it comes back: the raw driver, by ctypes.

shapes.py chains|layers WIDTH NODES COUNT PARAMETER_BYTES

`chains` are WIDTH chains beside each other. In `layers` of WIDTH nodes each node waits for all of the layer before.
A process for each line, because the driver keeps what it took. With more than 32 graphs it also says how much
cuMemAlloc gets before they are made and after they are gone. Needs a CUDA driver alone.
"""
import ctypes as C
import sys
import time

cuda = C.CDLL("libcuda.so.1")
shape, (width, nodes, count, parameters) = sys.argv[1], map(int, sys.argv[2:6])
PTX = f""".version 7.0
.target sm_70
.address_size 64
.visible .entry k(.param .u64 p, .param .align 8 .b8 q[{parameters}]) {{ ret; }}
""".encode()


class Params(C.Structure):
    _fields_ = [("function", C.c_void_p)] + [(n, C.c_uint) for n in ("gx", "gy", "gz", "bx", "by", "bz", "shared")]
    _fields_ += [("params", C.c_void_p), ("extra", C.c_void_p)]


def call(name, *args):
    code = getattr(cuda, name)(*args)
    if code:
        raise SystemExit(f"{name}: {code}")


call("cuInit", 0)
context, module, function, stream = C.c_void_p(), C.c_void_p(), C.c_void_p(), C.c_void_p()
call("cuDevicePrimaryCtxRetain", C.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuModuleLoadData", C.byref(module), PTX)
call("cuModuleGetFunction", C.byref(function), module, b"k")
call("cuStreamCreate", C.byref(stream), 1)
p, q = C.c_uint64(0), (C.c_char * parameters)()
ARGS = (C.c_void_p * 2)(C.addressof(p), C.addressof(q))
KERNEL = Params(function.value, 1, 1, 1, 32, 1, 1, 0, C.cast(ARGS, C.c_void_p), None)


def free():
    now, total = C.c_size_t(), C.c_size_t()
    call("cuMemGetInfo_v2", C.byref(now), C.byref(total))
    return now.value


def before(i):
    if shape == "chains":
        return range(i - width, i - width + 1) if i >= width else ()
    layer = i // width * width
    return range(layer - width, layer) if layer else ()


def make():
    graph, executable, ids = C.c_void_p(), C.c_void_p(), []
    call("cuGraphCreate", C.byref(graph), 0)
    for i in range(nodes):
        node, after = C.c_void_p(), [ids[j] for j in before(i)]
        array = (C.c_void_p * len(after))(*after) if after else None
        call("cuGraphAddKernelNode_v2", C.byref(node), graph, array, C.c_size_t(len(after)), C.byref(KERNEL))
        ids.append(node.value)
    call("cuGraphInstantiateWithFlags", C.byref(executable), graph, 0)
    call("cuGraphUpload", executable, stream)
    call("cuGraphLaunch", executable, stream)
    call("cuStreamSynchronize", stream)
    return graph, executable


def drop(made):
    for graph, executable in made:
        call("cuGraphExecDestroy", executable)
        call("cuGraphDestroy", graph)
    call("cuCtxSynchronize")
    time.sleep(0.2)


def room():
    """What cuMemAlloc gives, in MiB."""
    got, size = [], 1 << 30
    while size >= 16 << 20:
        address = C.c_void_p()
        if cuda.cuMemAlloc_v2(C.byref(address), C.c_size_t(size)):
            size >>= 1
        else:
            got.append((address, size))
    for address, _ in got:
        call("cuMemFree_v2", address)
    return sum(size for _, size in got) >> 20


pressure = count > 32
rooms = [room()] if pressure else []
start = free()
made = [make() for _ in range(count)]
peak = free()
drop(made)
end = free()
made = [make() for _ in range(count)]
again = free()
mib = 1 << 20
print(
    f"{shape} width {width:3} nodes {nodes:4} x{count:3} params {parameters:4}: {(start - peak) / mib:8.1f} MiB, "
    f"{(start - peak) / nodes / count:8.0f} a node; back {(end - peak) / mib:.1f} MiB; "
    f"made again takes {(end - again) / mib:.1f} more",
    end="",
)
if pressure:
    drop(made)
    print(f"; room for cuMemAlloc before {rooms[0]} MiB, after they are gone {room()} MiB, free {free() // mib}", end="")
print()
