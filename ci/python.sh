#!/bin/sh
# The Python package: builds its wheel, installs that into fresh virtual environments, and runs the
# tests, the examples of its documentation, mypy and pyright. A second build, with simulated
# devices, runs the tests that need those, and random programs against a model. No GPU is needed.
#
#   ci/python.sh                    with python3; the tests also with each other version found
#   ci/python.sh PYTHON ...         the tests with these other interpreters
#   ci/python.sh model [EXAMPLES]   the random programs alone: 100,000 if no number is given
set -eu
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
export CARGO_TARGET_DIR="$target" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
work="$target/python"
tools="$work/tools/bin"
mkdir -p "$work"

# Later versions of mypy know no Python 3.9.
printf '%s\n' 'maturin>=1.9,<2' 'mypy>=1.15,<1.20' numpy 'pyright[nodejs]' >"$work/needed"
if ! cmp -s "$work/needed" "$work/tools/needed"; then
    rm -rf "$work/tools"
    python3 -m venv "$work/tools"
    "$tools/pip" install -r "$work/needed"
    cp "$work/needed" "$work/tools"
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

# The other versions of Python that are found, one interpreter of each.
others() {
    own=$(python3 -c 'import sys; print(sys.version_info.minor)')
    for minor in 9 10 11 12 13; do
        [ "$minor" = "$own" ] && continue
        for python in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin/python3; do
            if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
                echo "$python"
                break
            fi
        done
    done
}

here=$PWD
if [ "${1:-}" = model ]; then
    name=model
    environment "$name" python3 "$(wheel simulated "--features sim")" numpy ml_dtypes hypothesis
    LEASEHOLD_EXAMPLES="${2:-100000}" tests "$name" "$here/python/tests/model"
    exit
fi

plain=$(wheel plain "")
# The module has the C ABI, and needs neither CUDA nor a Python library.
rm -rf "$work/unpacked"
python3 -m zipfile -e "$plain" "$work/unpacked"
module="$work/unpacked/leasehold/_native.abi3.so"
functions=$(sed -n 's/^\(int\|void\|uint32_t\|size_t\|const char\|void \*\).*[ *]\(leasehold_[a-z_0-9]*\)(.*/\2/p' crates/capi/include/leasehold.h crates/capi/include/leasehold_runtime.h | grep -v '^leasehold_sim_' | sort -u)
exported=$(nm -D --defined-only "$module" | awk '$2 == "T" { print $3 }')
for function in $functions; do
    echo "$exported" | grep -qx "$function" || { echo "$function is not exported" >&2; exit 1; }
done
if objdump -p "$module" | grep NEEDED | grep -E 'cuda|python'; then
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
environment "$name" python3 "$plain" numpy ml_dtypes
"$work/$name/bin/python" "$here/python/tests/typing/usage_numpy.py"
tests "$name" "$here/python/tests/core"
"$work/$name/bin/python" python/tests/examples.py python/README.md docs/how-to/python.md docs/how-to/pytorch.md
"$work/$name/bin/python" examples/python/saxpy.py cpu:0
"$work/$name/bin/python" examples/python/generate.py models/llama/demo-model
echo "with NumPy: ok"

# shellcheck disable=SC2046
[ $# -gt 0 ] || set -- $(others)
for python in "$@"; do
    name=other
    environment "$name" "$python" "$plain" numpy ml_dtypes
    "$work/$name/bin/python" --version
    tests "$name" "$here/python/tests/core"
done

# The types: the package as it is installed and files that use it, for each version of Python, and
# the stubs beside the module itself.
(
    cd "$work"
    for version in 3.9 3.10 3.11 3.12 3.13; do
        for file in usage usage_numpy; do
            "$tools/mypy" --strict --python-version "$version" --python-executable "$work/full/bin/python" \
                "$here/python/tests/typing/$file.py"
        done
        # Its program comes from a registry of another kind, which not every machine reaches.
        if "$tools/pyright" --version >/dev/null 2>&1; then
            "$tools/pyright" --pythonversion "$version" --pythonpath "$work/full/bin/python" "$here/python/tests/typing"
        fi
    done
    # PyTorch is not there.
    "$tools/mypy" --strict --disable-error-code import-not-found --python-executable "$work/full/bin/python" -p leasehold
    "$tools/pip" install --no-deps --force-reinstall "$plain"
    # Before Python 3.12 the protocol has no name in Python.
    printf '%s\n' 'leasehold\._native\.Buffer\.__buffer__' 'leasehold\._native\.__all__' >allowed
    "$tools/python" -m mypy.stubtest --allowlist allowed --ignore-unused-allowlist leasehold._native
)

name=simulated
environment "$name" python3 "$(wheel simulated "--features sim")" numpy ml_dtypes hypothesis
tests "$name" "$here/python/tests/core"
tests "$name" "$here/python/tests/model"
"$work/$name/bin/python" examples/python/saxpy.py sim-cuda:0
# The core of the extension for PyTorch also runs in a C++ program, which has no interpreter to load
# the module with: there it uses the C ABI's library with simulated devices.
cargo build --quiet --locked --profile quick -p leasehold-capi-sim
LEASEHOLD_LIBRARY="$target/quick/libleasehold_capi_sim.so" tests "$name" "$here/python/tests/torch"
(cd "$work" && "$work/$name/bin/python" "$here/python/tests/torch/test_plugin.py")
echo "with simulated devices: ok"
