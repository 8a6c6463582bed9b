"""Settings of PyTorch's own allocator in the environment: which are kept, and which mean nothing here."""

import os
import re
import warnings

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
# The limit is kept. Memory is expandable anyhow, and pinned memory is not this allocator's.
KEPT = re.compile("per_process_memory_fraction|expandable_segments|backend:native|pinned_.*")


def read(extension: bool) -> float:
    """Returns the part of each device that the process may have. Names in a warning what is passed over.

    PyTorch has checked the values when it was imported.
    """
    text = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    # A list has pairs of its own.
    pairs = [part.partition(":") for part in re.sub(r"\[[^]]*\]", "", text).split(",")]
    settings = {name.strip(): value.strip() for name, _, value in pairs if name.strip()}
    fraction = float(settings.get("per_process_memory_fraction", 1))
    ignored = [name for name, value in settings.items()
               if not KEPT.fullmatch(name) and not KEPT.fullmatch(name + ":" + value)]
    if not extension:
        ignored += ["per_process_memory_fraction"] if fraction < 1 else []
        ignored += [UNCACHED] if os.environ.get(UNCACHED) == "1" else []
    if ignored:
        warnings.warn(
            "leasehold.torch passes over settings of PyTorch's allocator (%s): %s. A run that needs "
            "them leaves leasehold.torch.enable() out" % (VARIABLES[0], ", ".join(ignored)),
            RuntimeWarning,
            stacklevel=3,
        )
    return fraction
