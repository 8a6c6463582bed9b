#!/bin/sh
# Compiles every CUDA source of the operator library and of the conformance suite to PTX with one
# exact release of NVIDIA's run-time compiler (no GPU and no driver is needed), those of the library
# also to machine code, and compares the result with what is committed.
#
#   ci/ptx.sh          compare; exit status 1 on a difference
#   ci/ptx.sh --bless  write what the compiler gives
#
# Without the compiler, from the Python package index, this is skipped; with LEASEHOLD_REQUIRE_TOOLS
# set that is a failure.
set -eu
cd "$(dirname "$0")/.."
release=nvidia-cuda-nvrtc==13.0.88
if ! programs=$(ci/venv.sh nvrtc "$release"); then
    if [ -n "${LEASEHOLD_REQUIRE_TOOLS:-}" ]; then
        echo "$release is required and cannot be installed" >&2
        exit 1
    fi
    echo "skipped: no $release"
    exit 0
fi
exec "$programs/python" ci/ptx.py "$@"
