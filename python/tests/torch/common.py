"""The parts that the tests share."""

import ctypes
import importlib.util
import os
import subprocess
import sys
import unittest

from leasehold import library_path

CSRC = os.path.join(os.path.dirname(importlib.util.find_spec("leasehold").origin), "torch", "csrc")
HAS_TORCH = importlib.util.find_spec("torch") is not None
HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20


def simulated() -> str:
    """The library's path; the test is skipped if it has no simulated devices."""
    path = library_path()
    if not hasattr(ctypes.CDLL(path), "leasehold_sim_stream"):
        raise unittest.SkipTest("the library was built without simulated devices (feature sim)")
    return path


def run_python(test: unittest.TestCase, *arguments: str, **environment: str) -> str:
    """The output of a process of Python, which must end with 0."""
    done = subprocess.run([sys.executable, *arguments], env={**os.environ, **environment}, timeout=300, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    test.assertEqual(done.returncode, 0, done.stdout)
    return done.stdout


class Simulated(unittest.TestCase):
    """Tests of the extension over a simulated device, with a limit of 64 MiB."""

    @classmethod
    def setUpClass(cls):
        if not HAS_TORCH:
            raise unittest.SkipTest("needs PyTorch with CUDA")
        library = simulated()
        import torch
        from leasehold.torch import _build

        if torch.version.cuda is None:
            raise unittest.SkipTest("this PyTorch has no CUDA")
        try:
            cls.extension = _build.load()
        except _build.BuildError as error:
            raise unittest.SkipTest(str(error))
        cls.t = cls.extension.testing
        cls.t.simulate(library, 64 * MIB)
        cls.lib = ctypes.CDLL(library)
        cls.device = ctypes.c_uint64(cls.t.device())

    @classmethod
    def stream(cls, kind=0):
        """A stream of the simulated driver; of kind 1 the legacy default stream."""
        found = ctypes.c_size_t()
        assert cls.lib.leasehold_sim_stream(cls.device, kind, ctypes.byref(found)) == 0
        return found.value

    def reserved(self):
        return self.t.statistics()["reserved_bytes"]["all"][0]
