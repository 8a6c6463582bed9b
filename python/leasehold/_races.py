"""Reports of the race detector of simulated devices."""

import warnings
from typing import List

from leasehold._native import reports as _reports


def races() -> List[str]:
    """The races that simulated devices found since the last call: each with its operations, their
    streams, the buffer, and the seed that gives the same order again.

    A read of memory that nobody wrote is a `RuntimeWarning`, for its values may have no meaning.
    """
    found = []
    for is_race, text in _reports():
        if is_race:
            found.append(text)
        else:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
    return found
