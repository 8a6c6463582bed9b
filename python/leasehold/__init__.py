"""Leasehold for Python: memory of CPU and CUDA devices, shared between libraries without copies.

`Device` names a device, `Allocator` has memory of it under a policy and a budget, and `Buffer` is
the elements of an array there. `Buffer` and `from_dlpack` exchange memory with NumPy, PyTorch, CuPy
and JAX. `leasehold.torch` makes the allocator PyTorch's.

`import leasehold` needs neither CUDA nor NumPy nor PyTorch.
"""

from leasehold._errors import (
    ArgumentTypeError,
    DeviceLostError,
    DriverError,
    Error,
    ExportError,
    FreedError,
    InvalidArgumentError,
    InvalidStateError,
    OutOfMemoryError,
    TimeoutError,
    UnavailableError,
    UnsupportedError,
)
from leasehold._library import path as library_path
from leasehold._native import Allocator, Buffer, Device, __version__, devices, from_dlpack
from leasehold._report import report

__all__ = [
    "Allocator",
    "ArgumentTypeError",
    "Buffer",
    "Device",
    "DeviceLostError",
    "DriverError",
    "Error",
    "ExportError",
    "FreedError",
    "InvalidArgumentError",
    "InvalidStateError",
    "OutOfMemoryError",
    "TimeoutError",
    "UnavailableError",
    "UnsupportedError",
    "__version__",
    "devices",
    "from_dlpack",
    "library_path",
    "report",
]
