"""Memory by tag that sleeps and wakes, in the shapes that serving engines know.

This module must not know PyTorch. `leasehold.torch.sleep` gives it regions and graphs.
"""

import contextlib
import sys
import threading
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Protocol,
    Sequence,
    Tuple,
    Union,
)

from leasehold._errors import InvalidArgumentError, InvalidStateError

DEFAULT_TAG = "default"


class Regions(Protocol):
    """Memory with names that can be given back, and taken again at the same addresses."""

    def use(self, name: str) -> ContextManager[None]:
        """The calling thread's memory comes from the region within the context."""

    def suspend(self, name: str, keep: bool) -> int:
        """Gives the memory back, and returns its bytes. If it fails, the region is as before."""

    def resume(self, name: str) -> None:
        """Takes the memory again. If it fails, the region stays suspended, with its contents."""

    def bytes(self, name: str) -> int:
        """The bytes of the region's memory, also while it is suspended."""

    def capture(self, name: str, graph: Any, options: Dict[str, Any]) -> ContextManager[None]:
        """Captures a graph whose memory is the region's."""

    def outside(self) -> ContextManager[None]:
        """The calling thread's memory comes from no region within the context."""


class Tags:
    """Regions that sleep and wake together: all that was asked for, or nothing.

    A tag that sleeps already is not given back again, and one that is awake is not taken again. Any
    thread may call it; calls run one at a time.
    """

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self._lock = threading.RLock()
        # The tags in the order of their first use. None: it is awake. Otherwise whether its
        # contents are kept while it sleeps.
        self._kept: Dict[str, Optional[bool]] = {}

    @contextlib.contextmanager
    def use(self, tag: str) -> Iterator[None]:
        """The calling thread's memory has the tag within the context."""
        self._begin(tag)
        with self.regions.use(tag):
            yield

    @contextlib.contextmanager
    def capture(self, tag: str, graph: Any, options: Dict[str, Any]) -> Iterator[None]:
        """Captures a graph whose memory has the tag."""
        self._begin(tag)
        with self.regions.capture(tag, graph, options):
            yield

    def _begin(self, tag: str) -> None:
        if not isinstance(tag, str) or not tag:
            raise InvalidArgumentError("a tag is a text that is not empty; this is %r" % (tag,))
        with self._lock:
            if self._kept.setdefault(tag, None) is not None:
                raise InvalidStateError("tag %r sleeps: wake it before its memory is used" % tag)

    def known(self) -> List[str]:
        """All tags that were used, in the order of their first use."""
        with self._lock:
            return list(self._kept)

    def asleep(self) -> List[str]:
        """The tags that sleep."""
        with self._lock:
            return [tag for tag, kept in self._kept.items() if kept is not None]

    def usage(self) -> int:
        """The bytes of the memory of all tags."""
        with self._lock:
            return sum(self.regions.bytes(tag) for tag in self._kept)

    def sleep(self, keep: Dict[str, bool]) -> int:
        """Gives the memory of tags back, and keeps the contents of some. Returns the bytes.

        If one fails, those that this call gave back are taken again.

        Args:
            keep: The tags, and whether the contents of each are kept in host memory.
        """
        with self._lock:
            # Host memory may be short. So what keeps contents comes before what drops them.
            awake = [tag for tag in keep if tag in self._kept and self._kept[tag] is None]
            awake.sort(key=lambda tag: not keep[tag])
            return sum(self._each(awake, lambda tag: self._suspend(tag, keep[tag]), self._resume))

    def wake(self, tags: Optional[Iterable[str]] = None) -> None:
        """Takes the memory of tags again, at the same addresses. None wakes all.

        If memory is short, the tags that this call woke sleep again as before, and all of them may
        be woken later.
        """
        with self._lock:
            before = dict(self._kept)
            wanted = self._kept if tags is None else set(tags)
            sleeping = [tag for tag in self.asleep() if tag in wanted]
            self._each(sleeping, self._resume, lambda tag: self._suspend(tag, bool(before[tag])))

    def _suspend(self, tag: str, keep: bool) -> int:
        freed = self.regions.suspend(tag, keep)
        self._kept[tag] = keep
        return freed

    def _resume(self, tag: str) -> int:
        self.regions.resume(tag)
        self._kept[tag] = None
        return 0

    @staticmethod
    def _each(tags: Sequence[str], do: Callable[[str], int], undo: Callable[[str], int]) -> List[int]:
        """Does something with each tag; if one fails, what was done is undone."""
        done: List[int] = []
        try:
            for tag in tags:
                done.append(do(tag))
        except BaseException as error:
            for tag in reversed(tags[: len(done)]):
                try:
                    undo(tag)
                except Exception as second:
                    raise InvalidStateError("%s; tag %r stays as it is: %s" % (error, tag, second)) from error
            raise
        return done


class Allocator:
    """The interface of vLLM's allocator of memory that sleeps (`CuMemAllocator`)."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags

    def use_memory_pool(self, tag: Optional[str] = None) -> ContextManager[None]:
        """The calling thread's memory has a tag within the context."""
        return self._tags.use(DEFAULT_TAG if tag is None else tag)

    def sleep(self, offload_tags: Union[Tuple[str, ...], str, None] = None) -> None:
        """Gives all memory back. Contents of these tags are kept in host memory, others are dropped."""
        if offload_tags is None:
            offload_tags = (DEFAULT_TAG,)
        kept = (offload_tags,) if isinstance(offload_tags, str) else tuple(offload_tags)
        self._tags.sleep({tag: tag in kept for tag in self._tags.known()})

    def wake_up(self, tags: Optional[List[str]] = None) -> None:
        """Takes memory again, of all tags or of some. Tags that there are not are left out."""
        self._tags.wake(tags)

    def discard(self, tags: Tuple[str, ...]) -> None:
        """Gives the memory of some tags back, without their contents."""
        self._tags.sleep({tag: False for tag in tags})

    def get_current_usage(self) -> int:
        """The bytes of all memory with a tag."""
        return self._tags.usage()


class Backend:
    """The interface of vLLM's sleep-mode backends (`SleepModeBackend`)."""

    tags: Tags

    def __init__(self) -> None:
        self._waking = False
        self._allocator = Allocator(self.tags)

    def suspend(self, level: int = 1) -> None:
        """Gives all memory with a tag back. Level 1 keeps the contents of `weights`, level 2 none."""
        if level not in (1, 2):
            raise InvalidArgumentError("a level of sleep is 1 or 2; this is %r" % (level,))
        self._allocator.sleep(("weights",) if level == 1 else ())

    def resume(self, tags: Optional[List[str]] = None) -> None:
        """Takes the memory again, of all tags or of some. If memory is short, all stay suspended."""
        self._waking = True
        try:
            self._allocator.wake_up(tags)
        finally:
            self._waking = False

    def discard(self, tags: Tuple[str, ...]) -> None:
        """Gives the memory of some tags back, without their contents."""
        self._allocator.discard(tags)

    def state(self) -> str:
        """`RESUMING` within `resume`, `SUSPENDED` while any tag sleeps, otherwise `RUNNING`."""
        if self._waking:
            return "RESUMING"
        return "SUSPENDED" if self.tags.asleep() else "RUNNING"

    @classmethod
    def is_supported(cls) -> bool:
        """Whether there is a CUDA device."""
        return False

    @classmethod
    def preserves_communicators(cls) -> bool:
        """True: communicators have memory of their own, which no tag has."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """True: code is not touched, and addresses stay."""
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """False: a library may have registered memory, which comes back as other memory."""
        return False

    @classmethod
    def supports_durable_storage(cls) -> bool:
        """False: contents are kept in this process."""
        return False


class MemorySaver:
    """The interface of `torch_memory_saver`."""

    enabled = True
    hook_mode: Optional[str] = None
    """Accepted and not used: no hook is needed."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags

    @staticmethod
    def _name(tag: str, keep: bool) -> str:
        return ("kept/" if keep else "dropped/") + tag

    def region(self, tag: str = DEFAULT_TAG, enable_cpu_backup: bool = False) -> ContextManager[None]:
        """The calling thread's memory has a tag within the context. Contents are kept if asked for."""
        return self._tags.use(self._name(tag, enable_cpu_backup))

    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
    ) -> ContextManager[None]:
        """Captures a graph whose memory has a tag, as `torch.cuda.graph` does. The tag is its pool."""
        if pool is not None:
            raise InvalidArgumentError("a graph that sleeps takes its memory from its tag: leave pool out")
        options = {"stream": stream, "capture_error_mode": capture_error_mode}
        return self._tags.capture(self._name(tag, enable_cpu_backup), cuda_graph, options)

    def disable(self) -> ContextManager[None]:
        """The calling thread's memory has no tag within the context."""
        return self._tags.regions.outside()

    def _names(self, tag: Optional[str]) -> List[str]:
        wanted = None if tag is None else (self._name(tag, True), self._name(tag, False))
        names = [name for name in self._tags.known() if wanted is None or name in wanted]
        if wanted is not None and not names:
            raise InvalidArgumentError("no memory has the tag %r" % tag)
        return names

    def pause(self, tag: Optional[str] = None) -> None:
        """Gives the memory of a tag back, or of all tags."""
        self._tags.sleep({name: name.startswith("kept/") for name in self._names(tag)})

    def resume(self, tag: Optional[str] = None) -> None:
        """Takes the memory of a tag again, or of all tags. If memory is short, all stay paused."""
        self._tags.wake(self._names(tag))

    def configure_subprocess(self) -> ContextManager[None]:
        """Nothing: a process needs no preparation."""
        return contextlib.nullcontext()


def register(name: str, backend: str, allocator: Allocator) -> None:
    """Makes vLLM know a backend, and use an allocator for memory that sleeps.

    Args:
        name: The backend's name, for vLLM's option `sleep_mode_backend`.
        backend: The module with its class `Backend`.
        allocator: The allocator in place of vLLM's own.
    """
    from vllm import device_allocator  # type: ignore[import-not-found,unused-ignore]
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory  # type: ignore[import-not-found,unused-ignore]

    if name in getattr(SleepModeBackendFactory, "_registry", {}):
        return
    SleepModeBackendFactory.register_backend(name, backend, "Backend")
    # The worker may have taken the function's name already.
    for module in (device_allocator, sys.modules.get("vllm.v1.worker.gpu_worker")):
        if module is not None:
            setattr(module, "get_mem_allocator_instance", lambda: allocator)
