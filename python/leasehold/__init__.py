"""Leasehold for Python: memory, streams, kernels and graphs of CPU and CUDA devices.

`Device` names a device, `Allocator` has memory of it under a policy and a budget, and `Buffer` is
the elements of an array there. `Buffer` and `from_dlpack` exchange memory with NumPy, PyTorch, CuPy
and JAX. `Stream`, `Event`, `Kernel` and `Graph` are the runtime, `leasehold.ops` has operators, and
`generate` continues texts with a model. `leasehold.torch` makes the allocator PyTorch's, and
`leasehold.tinygrad` is a device of tinygrad.

`import leasehold` needs neither CUDA nor NumPy nor PyTorch.
"""

import atexit as _atexit
import os as _os

from leasehold._distributions import check as _check

# Before anything of the native module, which may be the other distribution's.
_check(_os.path.dirname(_os.path.dirname(_os.path.abspath(__file__))))

from leasehold import ops
from leasehold._errors import (
    ArgumentTypeError,
    CompileError,
    DeviceLostError,
    DriverError,
    Error,
    ExportError,
    FailedError,
    FreedError,
    InvalidArgumentError,
    InvalidStateError,
    OutOfMemoryError,
    RaceError,
    TimeoutError,
    UnavailableError,
    UnsupportedError,
)
from leasehold._generate import generate, stream_text
from leasehold._library import include as include_path
from leasehold._library import path as library_path
from leasehold._native import (
    Allocator,
    Buffer,
    Device,
    Download,
    Event,
    Graph,
    Kernel,
    Model,
    Stream,
    TensorMap,
    __version__,
    close as _close,
    devices,
    from_dlpack,
)
from leasehold._races import races
from leasehold._report import report

# Host calls run on threads of the runtime, which must not meet an interpreter that ends.
_atexit.register(_close)

__all__ = [
    "Allocator",
    "ArgumentTypeError",
    "Buffer",
    "CompileError",
    "Device",
    "DeviceLostError",
    "DriverError",
    "Download",
    "Error",
    "Event",
    "ExportError",
    "FailedError",
    "FreedError",
    "Graph",
    "InvalidArgumentError",
    "InvalidStateError",
    "Kernel",
    "Model",
    "OutOfMemoryError",
    "RaceError",
    "Stream",
    "TensorMap",
    "TimeoutError",
    "UnavailableError",
    "UnsupportedError",
    "__version__",
    "devices",
    "from_dlpack",
    "generate",
    "include_path",
    "library_path",
    "ops",
    "races",
    "report",
    "stream_text",
]
