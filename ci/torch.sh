#!/bin/sh
# The extension for PyTorch against real PyTorch, over simulated devices: the oldest version that is
# promised, and the newest by the package's extra `torch`. Each is built, imported and run. No GPU
# is needed; a version takes 3 to 6 GB of disk.
#
#   ci/torch.sh                 both
#   ci/torch.sh 2.11.0 newest   these
set -eu
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
export CARGO_TARGET_DIR="$target" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
work="$target/python"
tools="$work/tools/bin"
here=$PWD
mkdir -p "$work"
[ $# -gt 0 ] || set -- 2.8.0 newest

if [ ! -x "$tools/maturin" ]; then
    python3 -m venv "$work/tools"
    "$tools/pip" install 'maturin>=1.9,<2'
fi
rm -rf "$work/wheel-torch"
PATH="$tools:$PATH" "$tools/pip" wheel --no-build-isolation --no-deps --wheel-dir "$work/wheel-torch" \
    --config-settings=build-args="--profile quick --locked --compatibility linux --features sim" ./python
wheel=$(ls "$work/wheel-torch"/*.whl)

for version in "$@"; do
    environment="$work/torch-$version"
    rm -rf "$environment"
    python3 -m venv "$environment"
    if [ "$version" = newest ]; then
        "$environment/bin/pip" install numpy "${wheel}[torch]"
    else
        # Before CUDA 13 its headers come with the compiler's package.
        case $version in 2.8* | 2.9* | 2.10*) headers=nvidia-cuda-nvcc-cu12 ;; *) headers='cuda-toolkit[crt]' ;; esac
        "$environment/bin/pip" install numpy "$wheel" "torch==$version" "$headers"
    fi
    "$environment/bin/python" -c 'import torch; print("PyTorch", torch.__version__, "with CUDA", torch.version.cuda)'
    log="$work/torch-$version.log"
    # An extension of its own, so that each run builds one. A version that was not tried is an error
    # here.
    if ! (cd "$work" && LEASEHOLD_TORCH_CACHE="$environment/extension" "$environment/bin/python" -W error::RuntimeWarning \
        -m unittest discover -v -s "$here/python/tests/torch" -p 'test_[es]*.py' >"$log" 2>&1); then
        cat "$log" >&2
        exit 1
    fi
    if grep -E 'Extension.*skipped' "$log"; then
        echo "the extension was not tried with PyTorch $version" >&2
        exit 1
    fi
    tail -n 3 "$log" | head -n 1
done
