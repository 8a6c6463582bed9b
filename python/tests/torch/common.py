"""The parts that the tests share."""

import ctypes
import importlib.util
import os
import unittest

from leasehold import library_path

CSRC = os.path.join(os.path.dirname(importlib.util.find_spec("leasehold").origin), "torch", "csrc")
HAS_TORCH = importlib.util.find_spec("torch") is not None


def simulated() -> str:
    """The library's path; the test is skipped if it has no simulated devices."""
    path = library_path()
    if not hasattr(ctypes.CDLL(path), "leasehold_sim_stream"):
        raise unittest.SkipTest("the library was built without simulated devices (feature sim)")
    return path
