#!/bin/sh
# Compiles every CUDA source of the operator library and of the conformance suite to PTX with one
# exact release of NVIDIA's run-time compiler (no GPU and no driver is needed), those of the library
# also to machine code, and compares the result with what is committed.
#
#   ci/ptx.sh            compile and compare, unless a hash says that sources, images and compiler
#                        are those of the last --bless; exit status 1 on a difference
#   ci/ptx.sh --compile  compile and compare, whatever the hash says
#   ci/ptx.sh --bless    write what the compiler gives, and the hash
#
# Without the compiler, from the Python package index, this is skipped; with LEASEHOLD_REQUIRE_TOOLS
# set that is a failure.
set -eu
cd "$(dirname "$0")/.."
release=nvidia-cuda-nvrtc==13.0.88
# What is compiled, what it is compared with, and by what.
hashed=models/operators/kernels.sha256
hash() {
    git ls-files --cached --others --exclude-standard 'models/operators/src/kernels/cuda/*' models/operators/images/ models/operators/kernels.lock \
        'testing/conformance/src/kernels/cuda/*' 'testing/stress/src/kernels/cuda/*' 'examples/*.cu' 'testing/emulator/tests/*.cu' ci/ptx.py ci/ptx.sh |
        sort | while read -r file; do [ ! -f "$file" ] || sha256sum "$file"; done | sha256sum | cut -d ' ' -f 1
}
if [ $# -eq 0 ] && [ "$(hash)" = "$(cat "$hashed" 2>/dev/null)" ]; then
    echo "ptx: sources, images and compiler are those that were compiled"
    exit 0
fi
[ "${1:-}" != --compile ] || shift
if ! programs=$(ci/venv.sh nvrtc "$release"); then
    if [ -n "${LEASEHOLD_REQUIRE_TOOLS:-}" ]; then
        echo "$release is required and cannot be installed" >&2
        exit 1
    fi
    echo "skipped: no $release"
    exit 0
fi
"$programs/python" ci/ptx.py "$@"
[ "${1:-}" != --bless ] || hash >"$hashed"
