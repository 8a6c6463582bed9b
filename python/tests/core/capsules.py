"""A consumer and a producer of DLPack made by hand with ctypes, for both forms of capsules."""

from __future__ import annotations

import ctypes
from typing import Any, Optional, Sequence

_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]

CPU, CUDA, EXTENSION = 1, 2, 12
INT, UINT, FLOAT, BFLOAT = 0, 1, 2, 4
READ_ONLY, IS_COPIED = 1, 2


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    """DLManagedTensor."""


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Managed._fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


class Consumer:
    """Takes the tensor of a capsule, as a library does."""

    def __init__(self, capsule: Any) -> None:
        self.versioned = bool(_api.PyCapsule_IsValid(capsule, b"dltensor_versioned"))
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        self._used = b"used_" + name  # the capsule points to the name
        self._pointer = _api.PyCapsule_GetPointer(capsule, name)
        _api.PyCapsule_SetName(capsule, self._used)
        self._capsule = capsule
        self.managed: Any = (Versioned if self.versioned else Managed).from_address(self._pointer)
        self.tensor: Tensor = self.managed.tensor

    @property
    def shape(self) -> list[int]:
        return self.tensor.shape[: self.tensor.ndim]

    @property
    def strides(self) -> list[int]:
        return self.tensor.strides[: self.tensor.ndim]

    def bytes(self, count: int) -> bytes:
        """Reads host memory from the first element on."""
        return ctypes.string_at(self.tensor.data + self.tensor.byte_offset, count)

    def delete(self) -> None:
        self.managed.deleter(self._pointer)


class Producer:
    """An array of host memory whose deletion is seen."""

    def __init__(
        self,
        contents: bytes,
        shape: Sequence[int],
        strides: Optional[Sequence[int]] = None,
        *,
        kind: tuple[int, int] = (FLOAT, 32),
        lanes: int = 1,
        offset: int = 0,
        version: Optional[tuple[int, int]] = None,
        flags: int = 0,
        device: tuple[int, int] = (CPU, 0),
        data: Optional[int] = None,
        ndim: Optional[int] = None,
        old_signature: bool = False,
    ) -> None:
        self.memory = ctypes.create_string_buffer(contents, max(len(contents), 1))
        self.deleted = 0
        self.device = device
        self.version = version
        self.asked: list[dict[str, Any]] = []
        self._old_signature = old_signature
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))(*strides) if strides is not None else None
        self._deleter = _Deleter(self._delete)
        managed: Any = Versioned() if version else Managed()
        if version:
            managed.major, managed.minor, managed.flags = *version, flags
        managed.deleter = self._deleter
        tensor = managed.tensor
        tensor.data = ctypes.addressof(self.memory) if data is None else data
        tensor.device_type, tensor.device_id = device
        tensor.ndim = len(shape) if ndim is None else ndim
        tensor.code, tensor.bits, tensor.lanes = *kind, lanes
        tensor.shape = self._shape
        if self._strides is not None:
            tensor.strides = self._strides
        tensor.byte_offset = offset
        self._managed = managed

    def _delete(self, _: int) -> None:
        self.deleted += 1

    def capsule(self) -> Any:
        name = b"dltensor_versioned" if self.version else b"dltensor"
        return _api.PyCapsule_New(ctypes.addressof(self._managed), name, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **arguments: Any) -> Any:
        if self._old_signature and set(arguments) - {"stream"}:
            raise TypeError("unexpected keyword argument")
        self.asked.append(arguments)
        return self.capsule()
