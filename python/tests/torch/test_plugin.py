"""The plug-in interface over a simulated device, called as PyTorch does: by ordinal, size and stream, from many threads."""

import ctypes
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest

from common import simulated
from leasehold import library_path

HERE = os.path.dirname(os.path.abspath(__file__))


def stand_in(folder):
    """Puts the stand-in for PyTorch into a folder. Returns its compiled part."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise unittest.SkipTest("no C++ compiler")
    shutil.copytree(os.path.join(HERE, "fake", "torch"), os.path.join(folder, "torch"))
    os.mkdir(os.path.join(folder, "torch", "lib"))
    made = os.path.join(folder, "torch", "lib", "libc10.so")
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, os.path.join(HERE, "fake_torch.cpp"), "-o", made], check=True)
    return made


class Plugin(unittest.TestCase):
    def test_exception(self):
        """A C++ exception passes the library as it was built, with whichever unwinder. No device is needed."""
        with tempfile.TemporaryDirectory() as folder:
            torch = ctypes.CDLL(stand_in(folder))
            library = ctypes.CDLL(library_path())
            thrower = ctypes.cast(torch._ZN3c106detail14torchCheckFailEPKcS2_jS2_, ctypes.c_void_p)
            self.assertEqual(library.leasehold_plugin_set_raise(thrower), 0)
            self.addCleanup(library.leasehold_plugin_set_raise, None)
            for _ in range(3):
                text = ctypes.create_string_buffer(1000)
                alloc = ctypes.cast(library.leasehold_plugin_alloc, ctypes.c_void_p)
                torch.fake_alloc(alloc, ctypes.c_ssize_t(-1), None, text)
                self.assertEqual(text.value, b"leasehold: invalid argument: a size of -1 bytes")

    def test_program(self):
        library = simulated()
        with tempfile.TemporaryDirectory() as folder:
            stand_in(folder)
            paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
            done = subprocess.run([sys.executable, os.path.join(HERE, "plugin_program.py"), library],
                                  env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, timeout=120,
                                  text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual((done.returncode, done.stdout), (0, "ok\n"))

    def test_threads(self):
        library = ctypes.CDLL(simulated())
        alloc, free = library.leasehold_plugin_alloc, library.leasehold_plugin_free
        alloc.restype = ctypes.c_void_p
        alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        device = ctypes.c_uint64()
        self.assertEqual(library.leasehold_device_open(b"sim-cuda:0", None, ctypes.byref(device)), 0)
        self.assertEqual(library.leasehold_plugin_set_device(0, device), 0)
        wrong = []
        # Other tests of this process read memory that lost its contents.
        text = ctypes.c_void_p()
        library.leasehold_sim_races(ctypes.byref(text))

        def play(seed):
            dice = random.Random(seed)
            stream = ctypes.c_size_t()
            if library.leasehold_sim_stream(device, 0, ctypes.byref(stream)) != 0:
                wrong.append("no stream")
            live = []
            for _ in range(300):
                if dice.random() < 0.6 or not live:
                    size, value = dice.choice([1, 700, 40_000, 2_000_000]), dice.randrange(256)
                    block = alloc(size, 0, stream.value)
                    if not block:
                        wrong.append("no memory")
                        return
                    library.leasehold_sim_fill(device, stream, ctypes.c_void_p(block),
                                               ctypes.c_uint8(value), ctypes.c_size_t(size))
                    live.append((block, size, value))
                else:
                    block, size, value = live.pop(dice.randrange(len(live)))
                    found = ctypes.create_string_buffer(size)
                    library.leasehold_sim_read(device, stream, found, ctypes.c_void_p(block),
                                               ctypes.c_size_t(size))
                    if found.raw != bytes([value]) * size:
                        wrong.append("contents")
                    free(block, size, 0, stream.value)
            for block, size, _ in live:
                free(block, size, 0, stream.value)
            library.leasehold_stream_end(device, stream)

        threads = [threading.Thread(target=play, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])
        self.assertEqual(library.leasehold_sim_races(ctypes.byref(text)), 0)
        self.assertEqual(ctypes.string_at(text.value), b"")
        self.assertIsNone(alloc(0, 0, None))
        self.assertIsNone(alloc(1 << 40, 0, None))
        self.assertEqual(library.leasehold_plugin_set_device(0, ctypes.c_uint64(0)), 0)
        self.assertEqual(library.leasehold_device_close(device), 0)


if __name__ == "__main__":
    unittest.main()
