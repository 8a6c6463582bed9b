"""The shared library that has the C ABI (`leasehold_*`), and the folder of its headers."""

import os

from leasehold import _native


def path() -> str:
    """Returns the file of the shared library: the native module itself, or `LEASEHOLD_LIBRARY`."""
    other = os.environ.get("LEASEHOLD_LIBRARY")
    if other:
        return os.path.abspath(other)
    file = _native.__file__
    if file is None:
        raise ImportError("leasehold._native was loaded from no file")
    return os.path.abspath(file)


def include() -> str:
    """Returns the folder that has `leasehold.h` and `leasehold_runtime.h`."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "include")
