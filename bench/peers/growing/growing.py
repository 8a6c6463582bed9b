#!/usr/bin/env python3
"""What the driver's virtual memory costs a cache that grows: the raw driver's calls, by ctypes.

1. An attention-like read of one layer at a time, with the bytes of a token at several strides.
2. The cost of mapping granules beside a running kernel, and what the kernel notices.
3. A storm of maps and unmaps beside a kernel that reads other granules.

Needs a CUDA driver and NVRTC (for example PyTorch's). Exits with 1 if a read gave a wrong result.
"""
import ctypes as C
import glob
import random
import statistics
import sys
import threading
import time

GRANULE = 2 << 20
LAYERS, HEADS, ROW = 32, 8, 256  # the 8 B shape in bf16: 256 bytes a head, 4 KiB a token and layer
TOKEN = 2 * HEADS * ROW

SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;
// A warp reads two tokens a step, of K and of V: the attention's memory, and little arithmetic.
extern "C" __global__ void __launch_bounds__(256) attend(const char* base, u64 seq, u64 head, u64 token,
    u64 v, u32 tokens, u32 part, float* out) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const char* p = base + blockIdx.z * seq + blockIdx.y * head + (lane % 16) * 16;
    u32 begin = blockIdx.x * part, end = min(begin + part, tokens);
    float sum = 0;
    for (u32 t = begin + warp * 8 + lane / 16; t < end; t += 64) {
        uint4 k[4], w[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            u64 at = (u64)min(t + 2 * i, end - 1) * token;
            k[i] = __ldcs((const uint4*)(p + at));
            w[i] = __ldcs((const uint4*)(p + at + v));
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            float s = __int_as_float(k[i].x) + __int_as_float(k[i].y) + __int_as_float(k[i].z) + __int_as_float(k[i].w);
            sum += s * (__int_as_float(w[i].x) + __int_as_float(w[i].y) + __int_as_float(w[i].z) + __int_as_float(w[i].w));
        }
    }
    if (sum == 12345.678f) *out = sum;
}
// Reads `bytes` again and again, adds up words, and notes each block's longest turn in nanoseconds.
extern "C" __global__ void __launch_bounds__(256) reads(const uint4* base, u64 count, u32 turns, u64* sums, u64* longest) {
    u64 most = 0, sum = 0;
    for (u32 turn = 0; turn < turns; turn++) {
        u64 begin, end;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
        for (u64 i = blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) {
            uint4 w = __ldcg(base + i);
            sum += (u64)w.x + w.y + w.z + w.w;
        }
        __syncthreads();
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(end));
        most = max(most, end - begin);
    }
    atomicAdd(sums, sum);
    if (threadIdx.x == 0) atomicMax(longest, most);
}
extern "C" __global__ void number(u32* base, u64 count) {
    for (u64 i = blockIdx.x * 256ull + threadIdx.x; i < count; i += gridDim.x * 256ull) base[i] = (u32)(i * 2654435761u) >> 8;
}
"""


class Location(C.Structure):
    _fields_ = [("type", C.c_int), ("id", C.c_int)]


class Prop(C.Structure):
    _fields_ = [("type", C.c_int), ("handles", C.c_int), ("location", Location), ("win32", C.c_void_p),
                ("flags", C.c_ubyte * 8)]


class Access(C.Structure):
    _fields_ = [("location", Location), ("flags", C.c_int)]


cuda = C.CDLL("libcuda.so.1")


def call(name, *args):
    code = getattr(cuda, name)(*args)
    if code:
        raise SystemExit(f"{name}: {code}")


def nvrtc():
    import torch
    root = torch.__path__[0].rsplit("/", 1)[0]
    for path in sorted(glob.glob(root + "/nvidia/**/libnvrtc.so*", recursive=True) + glob.glob("/usr/local/cuda*/lib64/libnvrtc.so*")):
        if "alt" not in path:
            return C.CDLL(path)
    raise SystemExit("no NVRTC")


def compile_source():
    lib, program = nvrtc(), C.c_void_p()
    assert lib.nvrtcCreateProgram(C.byref(program), SOURCE.encode(), b"growing.cu", 0, None, None) == 0
    options = (C.c_char_p * 1)(b"--gpu-architecture=compute_80")
    code, size = lib.nvrtcCompileProgram(program, 1, options), C.c_size_t()
    if code:
        lib.nvrtcGetProgramLogSize(program, C.byref(size))
        log = C.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, log)
        raise SystemExit(log.value.decode())
    lib.nvrtcGetPTXSize(program, C.byref(size))
    ptx = C.create_string_buffer(size.value)
    lib.nvrtcGetPTX(program, ptx)
    return ptx


device, context, module, stream = C.c_int(), C.c_void_p(), C.c_void_p(), C.c_void_p()
call("cuInit", 0)
call("cuDeviceGet", C.byref(device), 0)
call("cuDevicePrimaryCtxRetain", C.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuModuleLoadData", C.byref(module), compile_source())
call("cuStreamCreate", C.byref(stream), 1)
PROP = Prop(type=1, location=Location(1, 0))
ACCESS = Access(Location(1, 0), 3)


def function(name):
    f = C.c_void_p()
    call("cuModuleGetFunction", C.byref(f), module, name.encode())
    return f


def launch(f, grid, *args, block=256):
    array = (C.c_void_p * len(args))(*[C.cast(C.byref(a), C.c_void_p) for a in args])
    call("cuLaunchKernel", f, *[C.c_uint(g) for g in grid], C.c_uint(block), 1, 1, 0, stream, array, None)


def reserve(size):
    at = C.c_ulonglong()
    call("cuMemAddressReserve", C.byref(at), C.c_size_t(size), C.c_size_t(0), C.c_ulonglong(0), C.c_ulonglong(0))
    return at.value


def create(size=GRANULE):
    handle = C.c_ulonglong()
    call("cuMemCreate", C.byref(handle), C.c_size_t(size), C.byref(PROP), C.c_ulonglong(0))
    return handle


def map_at(at, handle, size=GRANULE):
    call("cuMemMap", C.c_ulonglong(at), C.c_size_t(size), C.c_size_t(0), handle, C.c_ulonglong(0))


def enable(at, size):
    call("cuMemSetAccess", C.c_ulonglong(at), C.c_size_t(size), C.byref(ACCESS), C.c_size_t(1))


def unmap(at, size=GRANULE):
    call("cuMemUnmap", C.c_ulonglong(at), C.c_size_t(size))


def wait():
    call("cuStreamSynchronize", stream)


def event():
    e = C.c_void_p()
    call("cuEventCreate", C.byref(e), 0)
    return e


def timed(work):
    begin, end, ms = event(), event(), C.c_float()
    call("cuEventRecord", begin, stream)
    work()
    call("cuEventRecord", end, stream)
    call("cuEventSynchronize", end)
    call("cuEventElapsedTime", C.byref(ms), begin, end)
    call("cuEventDestroy_v2", begin)
    call("cuEventDestroy_v2", end)
    return ms.value * 1000


def graph(work):
    g, exe = C.c_void_p(), C.c_void_p()
    call("cuStreamBeginCapture_v2", stream, 2)
    work()
    call("cuStreamEndCapture", stream, C.byref(g))
    call("cuGraphInstantiateWithFlags", C.byref(exe), g, C.c_ulonglong(0))
    call("cuGraphDestroy", g)
    return exe


def quantiles(us):
    us = sorted(us)
    return us[len(us) // 2], us[int(len(us) * 0.99)], us[-1]


attend, reads, number = function("attend"), function("reads"), function("number")
table = []


def say(line):
    print(line, flush=True)


# The pool: granules of their own, mapped in a random order, as those of a heap that has lived.
free, total = C.c_size_t(), C.c_size_t()
call("cuMemGetInfo_v2", C.byref(free), C.byref(total))
pool = min(64 << 30, (free.value - (4 << 30)) // GRANULE * GRANULE)
base = reserve(pool)
start = time.perf_counter()
handles = [create() for _ in range(pool // GRANULE)]
created = time.perf_counter()
random.seed(1)
random.shuffle(handles)
for i, h in enumerate(handles):
    map_at(base + i * GRANULE, h)
for i in range(0, len(handles), 512):
    n = min(512, len(handles) - i)
    enable(base + i * GRANULE, n * GRANULE)
mapped = time.perf_counter()
n = len(handles)
say(f"pool of {n} granules of 2 MiB: create {(created - start) / n * 1e6:.1f} us each, map and enable by 512 {(mapped - created) / n * 1e6:.1f} us each")
launch(number, (1056, 1, 1), C.c_ulonglong(base), C.c_ulonglong(pool // 4))
wait()
out = reserve(GRANULE)
map_at(out, create())
enable(out, GRANULE)

# Correctness first: the sums of a read beside a storm must be those of a quiet one.
SPAN = 256 << 20
sums, longest = out + 64, out + 128


def read(turns, at=base, span=SPAN):
    launch(reads, (264, 1, 1), C.c_ulonglong(at), C.c_ulonglong(span // 16), C.c_uint(turns), C.c_ulonglong(sums), C.c_ulonglong(longest))


def clear():
    call("cuMemsetD8_v2", C.c_ulonglong(out), C.c_ubyte(0), C.c_size_t(4096))
    call("cuCtxSynchronize")


def word(at):
    value = C.c_ulonglong()
    call("cuMemcpyDtoH_v2", C.byref(value), C.c_ulonglong(at), C.c_size_t(8))
    return value.value


spare = [create() for _ in range(64)]
vacant = reserve(2048 * GRANULE)
clear()
us = timed(lambda: read(10))
turns = max(10, int(2e6 / (us / 10)))
failed = False


def beside(name, host):
    """A reading kernel of about two seconds, with `host` beside it."""
    global failed
    clear()
    box = []
    ready = threading.Event()

    def run():
        call("cuCtxSetCurrent", context)
        ready.set()
        box.append(timed(lambda: read(turns)))

    t = threading.Thread(target=run)
    t.start()
    ready.wait()
    time.sleep(0.05)
    notes = host(t) if host else None
    t.join()
    result = word(sums), word(longest), box[0]
    say(f"{name}: kernel {result[2] / 1000:.1f} ms, longest turn of a block {result[1] / 1000:.1f} us of {result[2] / turns:.1f}")
    return result, notes


quiet, _ = beside("quiet", None)
quiet2, _ = beside("quiet again", None)
if quiet[0] != quiet2[0]:
    failed = True
    say("WRONG: two quiet reads differ")
for running in (False, True):
    def maps(thread, running=running):
        found = {}
        for count in (1, 8, 32):
            up, down, rounds = [], [], 0
            while rounds < 200 and (not running or thread.is_alive()):
                at = vacant + (rounds % 32) * 64 * GRANULE
                t0 = time.perf_counter_ns()
                for i in range(count):
                    map_at(at + i * GRANULE, spare[i])
                t1 = time.perf_counter_ns()
                enable(at, count * GRANULE)
                t2 = time.perf_counter_ns()
                for i in range(count):
                    unmap(at + i * GRANULE)
                t3 = time.perf_counter_ns()
                up.append((t1 - t0, t2 - t1))
                down.append(t3 - t2)
                rounds += 1
            found[count] = (up, down)
        return found

    if running:
        result, found = beside("maps of 1, 8, 32", maps)
        if result[0] != quiet[0]:
            failed = True
            say("WRONG: the kernel beside maps read other words")
        table.append(f"kernel beside maps: {result[2] / quiet[2]:.4f} x the quiet one; longest turn {result[1] / 1000:.1f} us (quiet {quiet[1] / 1000:.1f})")
    else:
        found = maps(None)
    for count, (up, down) in found.items():
        if not up:
            continue
        m = quantiles([u[0] / 1000 for u in up])
        e = quantiles([u[1] / 1000 for u in up])
        s = quantiles([(u[0] + u[1]) / 1000 for u in up])
        d = quantiles([x / 1000 for x in down])
        table.append(f"{'beside a kernel' if running else 'idle':16} {count:3} granules, {len(up)} rounds: map {m[0]:.1f} + enable {e[0]:.1f} = {s[0]:.1f} us (p99 {s[1]:.1f}, most {s[2]:.1f}); unmap {d[0]:.1f} (p99 {d[1]:.1f})")


def storm(thread):
    count = 0
    held = []
    while thread.is_alive():
        at = vacant + count % 2048 * GRANULE
        if len(held) == len(spare):
            old, h = held.pop(0)
            unmap(old)
            spare.append(h)
        h = spare.pop(0)
        map_at(at, h)
        enable(at, GRANULE)
        held.append((at, h))
        count += 1
    for old, h in held:
        unmap(old)
        spare.append(h)
    return count


result, count = beside("storm", storm)
if result[0] != quiet[0]:
    failed = True
    say("WRONG: the kernel beside the storm read other words")
table.append(f"storm of {count} maps and unmaps: kernel {result[2] / quiet[2]:.4f} x the quiet one; longest turn {result[1] / 1000:.1f} us; sums {'equal' if result[0] == quiet[0] else 'WRONG'}")

# A graph recorded before its memory grew reads the new granules without an update.
grown = reserve(64 * GRANULE)
map_at(grown, spare[0])
enable(grown, GRANULE)
exes = [graph(lambda n=n: launch(number, (64, 1, 1), C.c_ulonglong(grown), C.c_ulonglong(n * GRANULE // 4))) for n in (1, 32)]
sum_exe = graph(lambda: read(1, grown, 32 * GRANULE))
call("cuGraphLaunch", exes[0], stream)
for i in range(1, 32):
    map_at(grown + i * GRANULE, spare[i])
enable(grown + GRANULE, 31 * GRANULE)
clear()
call("cuGraphLaunch", exes[1], stream)
call("cuGraphLaunch", sum_exe, stream)
wait()
host = (C.c_uint * (32 * GRANULE // 4))()
call("cuMemcpyDtoH_v2", host, C.c_ulonglong(grown), C.c_size_t(32 * GRANULE))
same = word(sums) == sum(host)
failed |= not same
table.append(f"a graph recorded before the growth, launched after it: {'equal' if same else 'WRONG'}")


def read_step(layout, tokens, sequences):
    """One step's reads: each layer once, as a graph. Microseconds a layer."""
    blocks = max(1, min(tokens // 64, -(-132 * 8 // (HEADS * sequences))))
    part = -(-(-(-tokens // blocks)) // 64) * 64
    blocks = -(-tokens // part)
    if layout == "today":
        seq, head, token, v = tokens * HEADS * ROW, tokens * ROW, ROW, sequences * tokens * HEADS * ROW
        first = lambda layer: base + layer * sequences * tokens * TOKEN
    else:
        seq, head, token, v = tokens * LAYERS * TOKEN, ROW, layout * TOKEN, HEADS * ROW
        first = lambda layer: base + layer // layout * tokens * layout * TOKEN + layer % layout * TOKEN

    def work():
        for layer in range(LAYERS):
            launch(attend, (blocks, HEADS, sequences), C.c_ulonglong(first(layer)), *[C.c_ulonglong(x) for x in (seq, head, token, v)],
                   C.c_uint(tokens), C.c_uint(part), C.c_ulonglong(out))

    exe = graph(work)
    call("cuGraphLaunch", exe, stream)
    wait()
    us = statistics.median(timed(lambda: call("cuGraphLaunch", exe, stream)) for _ in range(9)) / LAYERS
    call("cuGraphExecDestroy", exe)
    return us


say("attention-like read, us a layer (x today's layout)")
table.append(f"{'tokens':>7} {'seqs':>5} {'GB/s':>6} {'today':>9} {'g=1':>16} {'g=2':>16} {'g=4':>16} {'g=8':>16} {'g=16':>16} {'g=32':>16}")
for tokens in (1024, 4096, 8192, 32768):
    for sequences in (1, 4, 16, 32, 64):
        if tokens * sequences * LAYERS * TOKEN > pool:
            continue
        us = {layout: read_step(layout, tokens, sequences) for layout in ("today", 1, 2, 4, 8, 16, 32)}
        rate = tokens * sequences * TOKEN / us["today"] / 1000
        cells = "".join(f" {us[g]:8.2f} ({us[g] / us['today']:.3f})" for g in (1, 2, 4, 8, 16, 32))
        line = f"{tokens:7} {sequences:5} {rate:6.0f} {us['today']:9.2f}{cells}"
        say(line)
        table.append(line)
print("---- table")
print("\n".join(table))
print("all sums right" if not failed else "FAILED")
sys.exit(failed)
