"""A stand-in for PyTorch with what the plug-in uses of it, for machines without PyTorch.

`libc10.so` beside it is compiled from `fake_torch.cpp` by the test.
"""

from types import SimpleNamespace

from torch import cuda

__version__ = "0.0"
version = SimpleNamespace(cuda="0.0")
