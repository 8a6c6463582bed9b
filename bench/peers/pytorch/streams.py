"""What a real driver does with streams that are none, or are gone: one line for each case.

    streams.py [CASE ...]

Each case runs in a process of its own, with a time limit: a crash is an answer too. Needs a CUDA device and the package
`leasehold` on the path, and no PyTorch: the streams are made by the driver's own calls. A line says `ok`, `refused` with
the text, `died` with the signal, or `hangs`. The last lines are about captures: whether a synchronisation breaks one.
"""

import ctypes as C
import os
import signal
import subprocess
import sys
import threading

SIZE = 1 << 20
MIB = 1 << 20


class Driver:
    """The vendor's driver, with the primary context current."""

    def __init__(self):
        self.lib = C.CDLL("libcuda.so.1")
        self.context = C.c_void_p()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", C.byref(self.context), 0)
        self.enter()

    def enter(self):
        self("cuCtxSetCurrent", self.context)

    def code(self, name, *arguments):
        return getattr(self.lib, name)(*arguments)

    def __call__(self, name, *arguments):
        code = self.code(name, *arguments)
        if code != 0:
            raise RuntimeError(f"{name}: {code}")

    def stream(self):
        stream = C.c_void_p()
        self("cuStreamCreate", C.byref(stream), 1)
        return stream.value

    def destroy(self, stream):
        self("cuStreamDestroy_v2", C.c_void_p(stream))

    def fill(self, address, byte, size, stream):
        self("cuMemsetD8Async", C.c_uint64(address), C.c_ubyte(byte), C.c_size_t(size), C.c_void_p(stream))


class Library:
    """The C ABI."""

    def __init__(self, budget=64 * MIB):
        import leasehold

        self.lib = C.CDLL(leasehold.library_path())
        self.lib.leasehold_last_error.restype = C.c_char_p

        class Options(C.Structure):
            _fields_ = [("size", C.c_size_t), ("budget", C.c_uint64), ("policy", C.c_uint32), ("trace", C.c_uint32)]

        self.device = C.c_uint64()
        options = Options(C.sizeof(Options), budget, 0, 0)
        self("leasehold_device_open", b"cuda:0", C.byref(options), C.byref(self.device))

    def __call__(self, name, *arguments):
        if getattr(self.lib, name)(*arguments) != 0:
            raise RuntimeError(self.lib.leasehold_last_error().decode())

    def malloc(self, size, stream):
        block = C.c_void_p()
        self("leasehold_malloc", self.device, C.c_size_t(size), C.c_size_t(stream), C.byref(block))
        return block.value

    def free(self, block):
        self("leasehold_free", self.device, C.c_void_p(block))

    def synchronize(self):
        self("leasehold_device_synchronize", self.device)


def exported(number, pending):
    import leasehold

    b = leasehold.Device("cuda:0").zeros(SIZE)
    if not pending:
        b.synchronize()
    capsule = b.__dlpack__(stream=number)
    del capsule
    assert b.tobytes() == bytes(SIZE)
    b.free()


def number(value):
    return lambda: [exported(value, pending) for pending in (False, True)]


def mapped_idle():
    memory = C.create_string_buffer(4096)
    exported(C.addressof(memory) // 16 * 16 + 16, False)


def mapped_pending():
    memory = C.create_string_buffer(4096)
    exported(C.addressof(memory) // 16 * 16 + 16, True)


def export_to_destroyed(pending):
    driver = Driver()
    stream = driver.stream()
    driver.destroy(stream)
    exported(stream, pending)


def destroyed_before_the_tensor():
    import leasehold

    driver, device = Driver(), leasehold.Device("cuda:0")
    for _ in range(100):
        b, stream = device.zeros(SIZE), driver.stream()
        capsule = b.__dlpack__(stream=stream)
        driver.fill(b.address, 7, SIZE, stream)
        driver.destroy(stream)
        b.fill(3)
        del capsule
        assert b.tobytes() == bytes([3]) * SIZE
        b.free()
        device.empty(SIZE).fill(1)
    device.synchronize()
    assert device.allocator.statistics()["free_pending_bytes"] == 0


def released_by_another_thread():
    import leasehold

    b = leasehold.Device("cuda:0").zeros(SIZE)
    capsules = []
    thread = threading.Thread(target=lambda: capsules.append(b.__dlpack__(stream=2)))
    thread.start()
    thread.join()
    capsules.clear()
    assert b.tobytes() == bytes(SIZE)


def c_abi(synchronizes):
    driver, library = Driver(), Library()
    own = driver.stream()
    for _ in range(10):
        for _ in range(2):
            stream = driver.stream()
            block = library.malloc(32 * MIB, stream)
            driver.fill(block, 1, 32 * MIB, stream)
            library.free(block)
            driver.destroy(stream)
        if synchronizes:
            library.synchronize()
        block = library.malloc(60 * MIB, own)
        driver.fill(block, 2, 60 * MIB, own)
        library.free(block)


def capture(mode, synchronize):
    """Whether a synchronisation by another thread leaves a capture whole."""
    driver, library = Driver(), Library()
    stream = driver.stream()
    block = library.malloc(MIB, stream)
    driver("cuStreamBeginCapture_v2", C.c_void_p(stream), mode)
    driver.fill(block, 1, MIB, stream)
    said = []

    def go():
        driver.enter()
        try:
            synchronize(driver, library)
            said.append("synchronised")
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    more = driver.code("cuMemsetD8Async", C.c_uint64(block), C.c_ubyte(2), C.c_size_t(MIB), C.c_void_p(stream))
    graph = C.c_void_p()
    end = driver.code("cuStreamEndCapture", C.c_void_p(stream), C.byref(graph))
    print(f"{said[0][:100]}; the capture: more work {more}, end {end}", end=" ")


CASES = {
    **{f"number {value:#x}": number(value) for value in (3, 7, 0xDEAD0, 1 << 46, (1 << 63) - 8, (1 << 64) - 8)},
    "mapped memory, nothing pending": mapped_idle,
    "mapped memory, work pending": mapped_pending,
    "export to a destroyed stream, nothing pending": lambda: export_to_destroyed(False),
    "export to a destroyed stream, work pending": lambda: export_to_destroyed(True),
    "stream destroyed before its tensor": destroyed_before_the_tensor,
    "tensor of a thread's default stream, dropped elsewhere": released_by_another_thread,
    "C: streams gone without a word, synchronised": lambda: c_abi(True),
    "C: streams gone without a word": lambda: c_abi(False),
    **{
        f"capture ({name}), {what}": lambda mode=mode, call=call: capture(mode, call)
        for mode, name in enumerate(["global", "thread", "relaxed"])
        for what, call in {
            "cuCtxSynchronize": lambda driver, library: driver("cuCtxSynchronize"),
            "leasehold_device_synchronize": lambda driver, library: library.synchronize(),
        }.items()
    },
}


def main():
    if sys.argv[1:2] == ["--case"]:
        try:
            CASES[sys.argv[2]]()
        except Exception as error:
            print(f"refused: {type(error).__name__}: {error}")
        else:
            print("ok")
        sys.stdout.flush()
        os._exit(0)
    for name in sys.argv[1:] or CASES:
        try:
            done = subprocess.run([sys.executable, __file__, "--case", name], capture_output=True, text=True, timeout=60)
            said = done.stdout.strip()
            if done.returncode < 0:
                said = f"died: {signal.Signals(-done.returncode).name} {said}"
            elif done.returncode > 0:
                said = f"status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
        except subprocess.TimeoutExpired:
            said = "hangs"
        print(f"{name}: {said}", flush=True)


if __name__ == "__main__":
    main()
