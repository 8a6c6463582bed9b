"""Memory that sleeps, for serving engines: vLLM's sleep mode and `torch_memory_saver`'s interface.

An engine gives weights and caches a tag. While a tag sleeps, its memory is the device's again, and
its addresses stay, so tensors and captured graphs are valid once it wakes::

    from leasehold.torch.sleep import memory_saver

    with memory_saver.region("weights", enable_cpu_backup=True):
        model = Model().cuda()
    with memory_saver.cuda_graph(graph, tag="graphs"):
        model(x)
    memory_saver.pause()        # the device's memory is free for others
    memory_saver.resume()       # all of it, or none and an error

vLLM takes it as a backend. The package has the plug-in, which acts only where the environment says
so::

    LEASEHOLD_VLLM=1 vllm serve MODEL --enable-sleep-mode --sleep-mode-backend leasehold
"""

import contextlib
import os
from typing import Any, ContextManager, Dict, Iterator

import torch

import leasehold.torch as _torch
from leasehold import _sleep
from leasehold._sleep import Allocator, MemorySaver, Tags

__all__ = ["Allocator", "Backend", "MemorySaver", "allocator", "memory_saver", "register"]


class _Regions:
    """Regions of `leasehold.torch`, with a name of their own each."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def use(self, name: str) -> ContextManager[None]:
        return _torch.region(self._prefix + name)

    def suspend(self, name: str, keep: bool) -> int:
        # A tag that never had memory has no region.
        return _torch.suspend(self._prefix + name, keep=keep) if self._there(name) else 0

    def resume(self, name: str) -> None:
        if self._there(name):
            _torch.resume(self._prefix + name)

    def bytes(self, name: str) -> int:
        pools = [pool for (region, _), pool in _torch._pools.items() if region == self._prefix + name]
        return sum(segment["total_size"] for pool in pools for segment in pool.snapshot())

    @contextlib.contextmanager
    def capture(self, name: str, graph: Any, options: Dict[str, Any]) -> Iterator[None]:
        pool = _torch.region_pool(self._prefix + name)
        with torch.cuda.graph(graph, pool=pool.id, **options):
            yield

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            yield

    def _there(self, name: str) -> bool:
        return self._prefix + name in _torch._regions


memory_saver = MemorySaver(Tags(_Regions("memory_saver/")))
"""The object that `torch_memory_saver` has under this name."""

_tags = Tags(_Regions("vllm/"))

allocator = Allocator(_tags)
"""The allocator for vLLM."""


class Backend(_sleep.Backend):
    """The sleep-mode backend for vLLM."""

    tags = _tags

    @classmethod
    def is_supported(cls) -> bool:
        """Whether there is a CUDA device."""
        return torch.version.cuda is not None and torch.cuda.is_available()


def register() -> None:
    """Makes vLLM know the backend `leasehold`, and take memory that sleeps from here.

    A second call does nothing. It comes before the engine loads a model, in each of its processes.
    """
    _sleep.register("leasehold", __name__, allocator)


def _plugin() -> None:
    """The entry point that vLLM loads (`vllm.general_plugins`)."""
    if os.environ.get("LEASEHOLD_VLLM", "0") not in ("", "0"):
        register()
