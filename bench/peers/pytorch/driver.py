"""What a suspension needs of the driver: pinned memory, and device memory that goes while a copy runs.

    driver.py [--gib N]      default: 16 of pinned memory

The pages are taken, pinned and given back twice. A virtual machine may get a page of its host at the first touch only, which the first
turn shows. By parts: the pages are touched and registered in parts of 1 GiB, each registered while the next one is touched. Then 1 GiB of
granules is unmapped and released, alone and while 2 GiB are copied to the host.
"""

import ctypes
import mmap
import sys
import threading
import time

THREADS = 8
HUGE = 2 << 20
GIB = 1 << 30
ADVISE_HUGE_PAGES = 14
P, Z, U = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint

libc = ctypes.CDLL(None)
libc.mmap.restype = P
libc.mmap.argtypes = [P, Z, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.memset.argtypes = [P, ctypes.c_int, Z]
libc.madvise.argtypes = [P, Z, ctypes.c_int]
libc.munmap.argtypes = [P, Z]


def driver():
    """The driver, and a context that is current."""
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuMemHostAlloc.argtypes = [ctypes.POINTER(P), Z, U]
    cuda.cuMemHostRegister_v2.argtypes = [P, Z, U]
    cuda.cuMemHostUnregister.argtypes = [P]
    cuda.cuMemFreeHost.argtypes = [P]
    cuda.cuCtxSetCurrent.argtypes = [P]
    context, device = P(), ctypes.c_int()
    ok(cuda.cuInit(0), "cuInit")
    ok(cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    ok(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return cuda, context


def ok(status, call):
    if status != 0:
        raise SystemExit(f"{call}: error {status}")


def memory():
    """The system's memory that is available, and all of it."""
    with open("/proc/meminfo") as file:
        found = dict(line.split(":") for line in file)
    return [int(found[key].split()[0]) << 10 for key in ("MemAvailable", "MemTotal")]


def shown():
    return "{:.1f} of {:.1f} GiB available".format(*(bytes / GIB for bytes in memory()))


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def touch(at, size):
    """Writes to pages, in threads: memset lets other threads run."""
    part = size // THREADS
    threads = [threading.Thread(target=libc.memset, args=(at + i * part, 0, part)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Properties(ctypes.Structure):
    """CUmemAllocationProp and CUmemAccessDesc begin with these."""

    _fields_ = [(name, ctypes.c_int) for name in ("type", "handles", "place", "device")] + [("rest", ctypes.c_uint64 * 2)]


class Access(ctypes.Structure):
    _fields_ = [("place", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int)]


def granules(cuda, address, size):
    """Maps granules. Returns their handles."""
    place, handles = Properties(type=1, place=1, device=0), []
    for at in range(address, address + size, HUGE):
        handle = ctypes.c_uint64()
        ok(cuda.cuMemCreate(ctypes.byref(handle), Z(HUGE), ctypes.byref(place), ctypes.c_uint64(0)), "cuMemCreate")
        ok(cuda.cuMemMap(ctypes.c_uint64(at), Z(HUGE), Z(0), handle, ctypes.c_uint64(0)), "cuMemMap")
        handles.append(handle)
    access = Access(place=1, device=0, flags=3)
    ok(cuda.cuMemSetAccess(ctypes.c_uint64(address), Z(size), ctypes.byref(access), Z(1)), "cuMemSetAccess")
    return handles


def unmap(cuda, address, handles):
    for i, handle in enumerate(handles):
        ok(cuda.cuMemUnmap(ctypes.c_uint64(address + i * HUGE), Z(HUGE)), "cuMemUnmap")
        ok(cuda.cuMemRelease(handle), "cuMemRelease")


def unmapping(cuda):
    size, copied = GIB, 2 * GIB
    host, device, address, stream = P(), ctypes.c_uint64(), ctypes.c_uint64(), P()
    ok(cuda.cuMemHostAlloc(ctypes.byref(host), copied, 0), "cuMemHostAlloc")
    ok(cuda.cuMemAlloc_v2(ctypes.byref(device), Z(copied)), "cuMemAlloc")
    ok(cuda.cuMemAddressReserve(ctypes.byref(address), Z(size), Z(HUGE), ctypes.c_uint64(0), ctypes.c_uint64(0)), "cuMemAddressReserve")
    ok(cuda.cuStreamCreate(ctypes.byref(stream), 1), "cuStreamCreate")
    copy = lambda: ok(cuda.cuMemcpyDtoHAsync_v2(host, device, Z(copied), stream), "cuMemcpyDtoHAsync")
    wait = lambda: ok(cuda.cuStreamSynchronize(stream), "cuStreamSynchronize")
    for turn in ("first", "second"):
        alone = timed(lambda: (copy(), wait()))
        handles = granules(cuda, address.value, size)
        idle = timed(lambda: unmap(cuda, address.value, handles))
        handles = granules(cuda, address.value, size)
        start = time.perf_counter()
        copy()
        beside = timed(lambda: unmap(cuda, address.value, handles))
        wait()
        both = time.perf_counter() - start
        shown = [f"{1e3 * seconds:.1f} ms" for seconds in (alone, idle, both, beside)]
        print("{} turn: copy of 2 GiB {}, unmap and release 1 GiB {}, both {}, the unmapping within {}".format(turn, *shown), flush=True)


class Pages:
    def __init__(self, size):
        self.size, self.base = size, libc.mmap(None, size + HUGE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if self.base in (None, P(-1).value):
            raise SystemExit("mmap failed")
        self.at = (self.base + HUGE - 1) // HUGE * HUGE
        libc.madvise(self.at, size, ADVISE_HUGE_PAGES)

    def free(self):
        libc.munmap(self.base, self.size + HUGE)


def main():
    wanted = int(sys.argv[2]) if sys.argv[1:2] == ["--gib"] else 16
    # Touching more than there is would end the process.
    size = min(wanted, memory()[0] * 3 // 4 // GIB) * GIB
    cuda, context = driver()
    rate = lambda seconds: f"{size / GIB / seconds:.2f} GiB/s"
    print(f"{size // GIB} GiB; before: {shown()}", flush=True)
    for turn in ("first", "second"):
        pages = Pages(size)
        touched = timed(lambda: touch(pages.at, size))
        registered = timed(lambda: ok(cuda.cuMemHostRegister_v2(pages.at, size, 0), "cuMemHostRegister"))
        gone = timed(lambda: ok(cuda.cuMemHostUnregister(pages.at), "cuMemHostUnregister"))
        pages.free()
        print(f"{turn} turn: touch by {THREADS} {rate(touched)}, register {rate(registered)}, both {rate(touched + registered)}; unregister {rate(gone)}; {shown()}", flush=True)

    pages = Pages(size)
    parts = range(pages.at, pages.at + size, GIB)

    def register(part):
        cuda.cuCtxSetCurrent(context)
        ok(cuda.cuMemHostRegister_v2(part, GIB, 0), "cuMemHostRegister of a part")

    def overlapped():
        last = None
        for part in parts:
            touch(part, GIB)
            if last is not None:
                last.join()
            last = threading.Thread(target=register, args=(part,))
            last.start()
        last.join()

    both = timed(overlapped)
    gone = timed(lambda: [ok(cuda.cuMemHostUnregister(part), "cuMemHostUnregister") for part in parts])
    pages.free()
    print(f"by parts: both {rate(both)}; unregister {rate(gone)}", flush=True)
    block, size = P(), 2 * GIB
    alloc = timed(lambda: ok(cuda.cuMemHostAlloc(ctypes.byref(block), size, 0), "cuMemHostAlloc"))
    free = timed(lambda: ok(cuda.cuMemFreeHost(block), "cuMemFreeHost"))
    print(f"cuMemHostAlloc of 2 GiB: {rate(alloc)}; free {rate(free)}", flush=True)
    unmapping(cuda)


if __name__ == "__main__":
    main()
