"""The native part of `leasehold`."""

__version__: str

SIMULATED: bool
