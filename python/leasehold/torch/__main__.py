"""Runs a program with Leasehold as PyTorch's allocator, or builds the extension.

    python -m leasehold.torch [--policy P] [--budget B] script.py [arguments]
    python -m leasehold.torch [--policy P] [--budget B] -m module [arguments]
    python -m leasehold.torch build
"""

import os
import runpy
import sys
from typing import List

from leasehold.torch import _build, enable

USAGE = (__doc__ or "").split("\n", 2)[2]


def main(arguments: List[str]) -> None:
    """Runs what the command line says."""
    policy, budget = "balanced", None
    while arguments and arguments[0].startswith("--"):
        name, _, value = arguments.pop(0).partition("=")
        if name not in ("--policy", "--budget") or not (value or arguments):
            sys.exit("usage:\n" + USAGE)
        value = value or arguments.pop(0)
        if name == "--policy":
            policy = value
        else:
            budget = value
    if not arguments or arguments == ["-m"] or arguments[0] == "-h":
        sys.exit("usage:\n" + USAGE)
    if arguments == ["build"]:
        print(_build.build(verbose=True))
        return
    enable(policy=policy, budget=budget)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
