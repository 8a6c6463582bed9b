"""The errors of the package."""

import builtins


class Error(Exception):
    """The base of all errors of the package."""


class InvalidArgumentError(Error, ValueError):
    """An argument is never valid."""


class ArgumentTypeError(InvalidArgumentError, TypeError):
    """An argument has a type, or elements of a type, that is never valid."""


class InvalidStateError(Error, RuntimeError):
    """The call is valid at another time."""


class FreedError(InvalidStateError):
    """The buffer was freed."""


class ExportError(Error, BufferError):
    """The memory cannot be exported or imported so, or cannot be freed while an export lives."""


class OutOfMemoryError(Error, MemoryError):
    """No memory, or the budget is reached. The text is the allocator's report."""


class UnavailableError(Error, RuntimeError):
    """The device, its driver or its backend is not there."""


class UnsupportedError(Error, NotImplementedError):
    """The device cannot do this."""


class TimeoutError(Error, builtins.TimeoutError):
    """The time was over first."""


class DeviceLostError(Error, RuntimeError):
    """The device failed. Everything on it is lost."""


class DriverError(Error, RuntimeError):
    """The vendor's driver refused a call."""


class CompileError(Error, RuntimeError):
    """A kernel's source does not compile. The text is the compiler's."""


class FailedError(Error, RuntimeError):
    """Work of a stream failed: a kernel, a function of the caller's. The stream takes no more work."""


class RaceError(Error, RuntimeError):
    """A simulated device found accesses without an order, or of memory that is not there yet or no more."""


# Tracebacks and pickles name the classes as programs do.
for _class in [value for value in globals().values() if isinstance(value, type)]:
    if issubclass(_class, Error):
        _class.__module__ = "leasehold"
