"""The two distributions of the package: `leasehold-runtime`, and `leasehold-runtime-sim` with simulated devices."""

import os


def check(folder: str) -> None:
    """Refuses both in one folder of packages, for the files of one are then in the place of the other's.

    Raises `ImportError`, with what to do.
    """
    try:
        entries = os.listdir(folder)
    except OSError:
        # No folder: an archive.
        return
    found = {e.split("-")[0] for e in entries if e.startswith("leasehold_runtime") and e.endswith(".dist-info")}
    if len(found) > 1:
        raise ImportError(
            f"leasehold-runtime and leasehold-runtime-sim are both installed in {folder}, and their files have the same names: "
            "pip uninstall leasehold-runtime leasehold-runtime-sim, then install the one that this environment needs"
        )
