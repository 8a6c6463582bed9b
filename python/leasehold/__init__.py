"""Leasehold for Python: device memory for CPU and CUDA, without a copy between libraries.

`import leasehold` needs neither CUDA nor NumPy nor PyTorch.
"""

from leasehold._library import path as library_path
from leasehold._native import __version__

__all__ = ["__version__", "library_path"]
