"""A block of one process in another one, over simulated devices: a program of test_extension.py.

The memory of simulated devices is real memory of the host, which other processes may map.
"""

import ctypes
import multiprocessing
import multiprocessing.reduction
import os
import sys

MIB = 1 << 20


class Packed:
    """A stand-in for a CUDA tensor, of which there is none without CUDA."""

    class device:
        type = "cuda"

    def __init__(self, block: int) -> None:
        self.block = block


def rebuild(handle: bytes):
    from leasehold.torch import _build

    return _build.load().testing.open_shared(handle)


class Side:
    """A process's allocator, with the simulated device's fills and reads."""

    def __init__(self, library: str) -> None:
        from leasehold.torch import _build

        self.extension = _build.load()
        self.t = self.extension.testing
        self.t.simulate(library, 256 * MIB, shareable=True)
        self.library = ctypes.CDLL(library)
        self.device = ctypes.c_uint64(self.t.device())

    def check(self, status: int) -> None:
        assert status == 0, status

    def fill(self, block: int, byte: int, size: int) -> None:
        self.check(self.library.leasehold_sim_fill(
            self.device, ctypes.c_size_t(0), ctypes.c_void_p(block), ctypes.c_uint8(byte),
            ctypes.c_size_t(size)))
        self.check(self.library.leasehold_device_synchronize(self.device))

    def read(self, block: int, size: int) -> bytes:
        host = ctypes.create_string_buffer(size)
        self.check(self.library.leasehold_sim_read(
            self.device, ctypes.c_size_t(0), host, ctypes.c_void_p(block), ctypes.c_size_t(size)))
        return host.raw


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def receiver(library: str, connection) -> None:
    side = Side(library)
    handle = connection.recv()
    try:
        side.t.open_shared(handle)
        raise AssertionError("a handle without its descriptor")
    except RuntimeError as error:
        assert "without its descriptor" in str(error), error
    import leasehold.torch

    leasehold.torch._options = {}  # enabled, as far as a simulation can be
    before = open_files()
    address, held = connection.recv()
    again, second = side.t.open_shared(handle)
    assert again == address, "one mapping for one block"
    assert side.read(address, MIB) == b"\x05" * MIB
    side.fill(address, 6, MIB)
    connection.send("filled")
    assert connection.recv() == "freed"
    assert side.read(address, MIB) == b"\x07" * MIB
    del held, second
    # The mapping's own descriptors went with it.
    assert open_files() <= before, (open_files(), before)
    connection.send("done")


def main(library: str) -> None:
    side = Side(library)
    block = side.t.raw_alloc(MIB, 0)
    side.fill(block, 5, MIB)
    before = open_files()
    for _ in range(1000):
        side.t.share(block)
    assert open_files() <= before + 1, "one descriptor of the last handle"
    handle = side.t.share(block)
    os.close(side.extension.take_descriptor())
    assert side.extension.take_descriptor() == -1
    from leasehold.torch import _share

    _share.reductions.reduce_tensor = lambda packed: (rebuild, (side.t.share(packed.block),))
    multiprocessing.reduction.register(Packed, _share._reduce)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=receiver, args=(library, there))
    child.start()
    there.close()
    here.send(handle)
    here.send(Packed(block))
    assert here.recv() == "filled"
    assert side.read(block, MIB) == b"\x06" * MIB
    side.fill(block, 7, MIB)
    side.t.raw_delete(block)
    here.send("freed")
    assert here.recv() == "done"
    child.join(60)
    assert child.exitcode == 0, child.exitcode
    print("ok: shared")


if __name__ == "__main__":
    main(sys.argv[1])
