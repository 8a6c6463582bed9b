"""Rates of cuMemHostAlloc beside pages that threads touch and cuMemHostRegister pins, 4 GiB each."""
import ctypes, mmap, threading, time
cu = ctypes.CDLL("libcuda.so.1"); libc = ctypes.CDLL("libc.so.6")
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
P, Z, V = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
cu.cuMemHostAlloc.argtypes = [ctypes.POINTER(P), Z, V]
cu.cuMemHostRegister_v2.argtypes = [P, Z, V]; cu.cuMemHostUnregister.argtypes = [P]; cu.cuMemFreeHost.argtypes = [P]
cu.cuCtxSetCurrent.argtypes = [P]
def ok(r, w):
    if r: raise SystemExit(f"{w}: {r}")
ok(cu.cuInit(0), "init"); ctx = P(); dev = ctypes.c_int()
ok(cu.cuDeviceGet(ctypes.byref(dev), 0), "dev"); ok(cu.cuDevicePrimaryCtxRetain(ctypes.byref(ctx), dev), "ctx"); cu.cuCtxSetCurrent(ctx)
G = 1 << 30; N = 4 * G
print(open("/sys/kernel/mm/transparent_hugepage/enabled").read().strip(), open("/sys/kernel/mm/transparent_hugepage/defrag").read().strip())
def par(n, f):
    ts = [threading.Thread(target=f, args=(i,)) for i in range(n)]
    t = time.perf_counter(); [x.start() for x in ts]; [x.join() for x in ts]; return time.perf_counter() - t
def host(n):
    got = [None] * n
    def one(i):
        cu.cuCtxSetCurrent(ctx); p = P(); ok(cu.cuMemHostAlloc(ctypes.byref(p), N // n, 0), "host"); got[i] = p
    t = par(n, one); t2 = par(n, lambda i: (cu.cuCtxSetCurrent(ctx), cu.cuMemFreeHost(got[i])))
    print(f"cuMemHostAlloc, {n} threads: {N/G/t:.2f} GiB/s, free {N/G/t2:.2f}")
def reg(n, advice, m):
    base = libc.mmap(None, N + (2 << 20), 3, 0x22, -1, 0); at = (base + (2 << 20) - 1) & ~((2 << 20) - 1)
    if advice: libc.madvise(at, N, advice)
    t1 = par(n, lambda i: libc.memset(at + i * (N // n), 0, N // n))
    def one(i):
        cu.cuCtxSetCurrent(ctx); ok(cu.cuMemHostRegister_v2(at + i * (N // m), N // m, 0), "register")
    t2 = par(m, one)
    t3 = par(m, lambda i: (cu.cuCtxSetCurrent(ctx), cu.cuMemHostUnregister(at + i * (N // m))))
    libc.munmap(base, N + (2 << 20))
    print(f"mmap advice {advice}: touch by {n} {N/G/t1:.2f} GiB/s, register by {m} {N/G/t2:.2f}, both {N/G/(t1+t2):.2f}; unregister {N/G/t3:.2f}")
for n in (1, 2, 4, 8): host(n)
for n, a, m in ((8, 0, 1), (8, 14, 1), (8, 14, 4), (16, 14, 8), (8, 0, 8), (4, 14, 1)): reg(n, a, m)
host(1)
