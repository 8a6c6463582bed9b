#!/bin/sh
# The Python package: builds its wheel, installs that into fresh virtual environments, and runs the
# tests, the examples of its documentation and mypy. A second build, with simulated devices, runs
# the tests that need those. No GPU is needed.
#
#   ci/python.sh              with python3
#   ci/python.sh PYTHON ...   the tests with other interpreters too
set -eu
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
export CARGO_TARGET_DIR="$target" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
work="$target/python"
tools="$work/tools/bin"
mkdir -p "$work"

if ! "$tools/python" -c 'import mypy, numpy' 2>/dev/null || [ ! -x "$tools/maturin" ]; then
    rm -rf "$work/tools"
    python3 -m venv "$work/tools"
    "$tools/pip" install 'maturin>=1.9,<2' 'mypy>=1.15' numpy
fi

# Builds a wheel as pip does, with these features, and prints its path.
wheel() {
    rm -rf "$work/wheel-$1"
    PATH="$tools:$PATH" "$tools/pip" wheel --no-build-isolation --no-deps --wheel-dir "$work/wheel-$1" \
        --config-settings=build-args="--profile quick --locked --compatibility linux $2" ./python >&2
    ls "$work/wheel-$1"/*.whl
}

# Makes a fresh environment with a wheel and more packages.
environment() {
    rm -rf "${work:?}/$1"
    "$2" -m venv "$work/$1"
    shift 2
    "$work/$name/bin/pip" install "$@"
}

# Runs the tests of a folder. They must not find the package's sources before what is installed.
tests() {
    (cd "$work" && "$work/$1/bin/python" -W error::DeprecationWarning -m unittest discover -s "$2" -t "$2")
}

here=$PWD
plain=$(wheel plain "")
# The module has the C ABI, and needs neither CUDA nor a Python library.
unzip -p "$plain" leasehold/_native.abi3.so >"$work/module.so"
functions=$(sed -n 's/^\(int\|void\|uint32_t\|size_t\|const char\|void \*\).*[ *]\(leasehold_[a-z_0-9]*\)(.*/\2/p' crates/capi/include/leasehold.h | grep -v '^leasehold_sim_' | sort -u)
exported=$(nm -D --defined-only "$work/module.so" | awk '$2 == "T" { print $3 }')
for function in $functions; do
    echo "$exported" | grep -qx "$function" || { echo "$function is not exported" >&2; exit 1; }
done
if objdump -p "$work/module.so" | grep NEEDED | grep -E 'cuda|python'; then
    echo "the module needs a library that not every machine has" >&2
    exit 1
fi

# Without NumPy, with nothing but the wheel.
name=bare
environment "$name" python3 --no-deps "$plain"
"$work/$name/bin/python" "$here/python/tests/typing/usage.py"
tests "$name" "$here/python/tests/core"
echo "without NumPy: ok"

name=full
environment "$name" python3 "$plain" numpy
tests "$name" "$here/python/tests/core"
"$work/$name/bin/python" python/tests/examples.py python/README.md docs/how-to/python.md
echo "with NumPy: ok"

for python in "$@"; do
    name=other
    environment "$name" "$python" "$plain"
    "$work/$name/bin/python" --version
    tests "$name" "$here/python/tests/core"
done

# The types: the package as it is installed and a file that uses it, and the stubs beside the module
# itself.
(
    cd "$work"
    "$tools/mypy" --strict --python-executable "$work/full/bin/python" "$here/python/tests/typing/usage.py"
    # PyTorch is not there.
    "$tools/mypy" --strict --disable-error-code import-not-found --python-executable "$work/full/bin/python" -p leasehold
    "$tools/pip" install --no-deps --force-reinstall "$plain"
    # Before Python 3.12 the protocol has no name in Python.
    printf '%s\n' 'leasehold\._native\.Buffer\.__buffer__' 'leasehold\._native\.__all__' >allowed
    "$tools/python" -m mypy.stubtest --allowlist allowed --ignore-unused-allowlist leasehold._native
)

name=simulated
environment "$name" python3 "$(wheel simulated "--features sim")" numpy
tests "$name" "$here/python/tests/core"
# The core of the extension for PyTorch also runs in a C++ program, which has no interpreter to load
# the module with: there it uses the C ABI's library with simulated devices.
cargo build --quiet --locked --profile quick -p leasehold-capi-sim
LEASEHOLD_LIBRARY="$target/quick/libleasehold_capi_sim.so" tests "$name" "$here/python/tests/torch"
(cd "$work" && "$work/$name/bin/python" "$here/python/tests/torch/test_plugin.py")
echo "with simulated devices: ok"
