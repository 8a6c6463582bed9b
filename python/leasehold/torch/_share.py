"""CUDA tensors for other processes, by `torch.multiprocessing`.

PyTorch packs a handle of a tensor's memory, as bytes. Leasehold's memory goes by a descriptor of the
system, which bytes cannot carry. So a tensor is packed here as PyTorch does it, with the descriptor
beside: `multiprocessing` sends descriptors over its own sockets. PyTorch's counter keeps the memory
until the receiver is done, and its event lets the receiver's stream wait for the sender's.
"""

import os
import weakref
from multiprocessing import context, reduction
from typing import Any, Callable, Dict, Tuple

import torch
import torch.multiprocessing.reductions as reductions

from leasehold.torch import _build

_options: Dict[str, Any] = {}


def install(options: Dict[str, Any]) -> None:
    """Lets `torch.multiprocessing` pack CUDA tensors with their descriptors.

    Args:
        options: Those of `enable`, which a receiver that has not called it takes over.
    """
    _options.update(options)
    types = set(torch._tensor_classes) | {torch.Tensor, torch.nn.Parameter}
    for kind in types:
        reduction.register(kind, _reduce)


def _reduce(tensor: torch.Tensor) -> Tuple[Callable[..., Any], Tuple[Any, ...]]:
    """Packs a tensor, as `reduce_tensor` of PyTorch, with its descriptor."""
    if tensor.device.type != "cuda":
        return reductions.reduce_tensor(tensor)
    extension = _build.load()
    stale = extension.take_descriptor()
    if stale >= 0:
        os.close(stale)
    rebuild, arguments = reductions.reduce_tensor(tensor)
    descriptor = extension.take_descriptor()
    if descriptor < 0:
        # Its parts have their own, as those of a sparse tensor, or it has no bytes.
        return rebuild, arguments
    child = context.get_spawning_popen()
    if child is None:
        try:
            sent = reduction.DupFd(descriptor)
        finally:
            os.close(descriptor)
    else:
        # The child inherits it as it starts, and finds it by its number.
        sent = reduction.DupFd(descriptor)
        weakref.finalize(child, os.close, descriptor)
    return _rebuild, (sent, dict(_options), rebuild, arguments)


def _rebuild(
    sent: Any, options: Dict[str, Any], rebuild: Callable[..., Any], arguments: Tuple[Any, ...]
) -> Any:
    """Unpacks a tensor. A process that has not called `enable` does so with the sender's options."""
    import leasehold.torch

    descriptor = sent.detach()
    try:
        if not leasehold.torch.enabled():
            leasehold.torch.enable(**options)
        extension = _build.load()
        extension.offer_descriptor(descriptor)
        try:
            return rebuild(*arguments)
        finally:
            extension.offer_descriptor(-1)
    finally:
        os.close(descriptor)
