"""The interfaces of serving engines that `leasehold.torch.sleep` has, as types: names, parameters, defaults.

Engines call these by name and by keyword. The bodies are not theirs.
"""

from abc import ABC, abstractmethod


class SleepModeBackend(ABC):
    """vLLM: `vllm.device_allocator.sleep_mode_backend`."""

    @abstractmethod
    def suspend(self, level=1): ...

    @abstractmethod
    def resume(self, tags=None): ...

    def state(self): ...

    def discard(self, tags): ...

    @classmethod
    def is_supported(cls): ...

    @classmethod
    def preserves_communicators(cls): ...

    @classmethod
    def preserves_compiled_artifacts(cls): ...

    @classmethod
    def preserves_graphs_with_communicators(cls): ...

    @classmethod
    def supports_durable_storage(cls): ...


class MemAllocator:
    """vLLM: what `vllm.device_allocator.get_mem_allocator_instance()` returns."""

    def use_memory_pool(self, tag=None): ...

    def sleep(self, offload_tags=None): ...

    def wake_up(self, tags=None): ...

    def discard(self, tags): ...

    def get_current_usage(self): ...


class TorchMemorySaver:
    """`torch_memory_saver`, as SGLang and trainers call it."""

    def region(self, tag="default", enable_cpu_backup=False): ...

    def cuda_graph(self, cuda_graph, pool=None, stream=None, capture_error_mode="global", tag="default",
                   enable_cpu_backup=False): ...

    def disable(self): ...

    def pause(self, tag=None): ...

    def resume(self, tag=None): ...


class Factory:
    """vLLM: `SleepModeBackendFactory`, with the registry and the errors that it has."""

    _registry: dict = {}

    @classmethod
    def register_backend(cls, name, module_path, class_name):
        if name in cls._registry:
            raise ValueError("registered already: %s" % name)
        cls._registry[name] = (module_path, class_name)
