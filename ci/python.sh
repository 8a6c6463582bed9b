#!/bin/sh
# The Python package.
#
#   ci/python.sh                    makes a wheel with simulated devices of the build of ci/test.sh,
#                                   installs it into fresh environments, and runs the tests, the
#                                   examples of its documentation, mypy and pyright on the oldest
#                                   and the newest Python, and random programs against a model; the
#                                   tests also with the oldest and the newest Python that is found
#   ci/python.sh versions           the same, and the tests with each version that is found
#   ci/python.sh model [EXAMPLES]   the random programs alone: 100,000 if no number is given
#   ci/python.sh torch [VERSION…]   the extension against real PyTorch, the oldest version that is
#                                   promised and the newest, built, imported and run over simulated
#                                   devices; a version takes 3 to 6 GB of disk
#   ci/python.sh tinygrad [VERSION] the device of tinygrad: its tests, and tinygrad's own test of
#                                   everything in small, over simulated devices, under five seeds
#   ci/python.sh wheel [FOLDER]     the wheel for release, into target/wheels: manylinux 2.17, for
#                                   this machine's kind and CPython 3.9 and newer, by zig's linker,
#                                   and its symbols
#   ci/python.sh wheel-sim [FOLDER] the same of the distribution with simulated devices,
#                                   leasehold-runtime-sim
set -eu
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
export CARGO_TARGET_DIR="$target" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
work="$target/python"
here=$PWD
mkdir -p "$work"
# The version of tinygrad whose tests run.
TINYGRAD=0.14.0

# Later versions of mypy know no Python 3.9.
tools() { ci/venv.sh python 'maturin>=1.9,<2' wheel 'mypy>=1.15,<1.20' numpy 'pyright[nodejs]'; }

# Names the distribution of an unpacked wheel with simulated devices. All else is as in the other
# one: its name and the feature `sim` are the difference.
name_simulated() { # FOLDER
    info=$(echo "$1"/leasehold_runtime-*.dist-info)
    sed -i 's/^Name: leasehold-runtime$/Name: leasehold-runtime-sim/; s/^Summary: .*/&, with simulated CUDA devices/' "$info/METADATA"
    mv "$info" "$(echo "$info" | sed 's/leasehold_runtime-/leasehold_runtime_sim-/')"
}

# Makes a wheel with simulated devices, and prints its path. Maturin would compile all crates anew,
# since a package alone has other features than the workspace. So the module is a library more of
# the build of ci/test.sh, and maturin writes what describes the package.
wheel() {
    rm -rf "$work/wheel" "$work/packed"
    mkdir -p "$work/wheel" "$work/packed"
    PYO3_BUILD_EXTENSION_MODULE=1 cargo build --quiet --locked --workspace --all-targets --features leasehold-python/sim
    (cd python && "$tools/maturin" pep517 write-dist-info --metadata-directory "$work/packed" \
        --interpreter python3 --compatibility linux) >/dev/null 2>&1
    cp -RL python/leasehold "$work/packed/leasehold"
    find "$work/packed" -name __pycache__ -prune -exec rm -r {} +
    strip -o "$work/packed/leasehold/_native.abi3.so" "$target/debug/lib_native.so"
    name_simulated "$work/packed"
    "$tools/python" -m wheel pack --dest-dir "$work/wheel" "$work/packed" >&2
    ls "$work/wheel"/*.whl
}

# Makes a fresh environment with a wheel and more packages.
environment() { # NAME PYTHON PACKAGE…
    environment=$work/$1
    rm -rf "$environment"
    "$2" -m venv "$environment"
    shift 2
    "$environment/bin/pip" install "$@"
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

model() {
    environment model python3 "$(wheel)" numpy ml_dtypes hypothesis
    LEASEHOLD_EXAMPLES="${1:-100000}" tests model "$here/python/tests/model"
}

check() {
    wheel=$(wheel)
    # The module has the C ABI, and needs neither CUDA nor a Python library.
    rm -rf "$work/unpacked"
    python3 -m zipfile -e "$wheel" "$work/unpacked"
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
    environment bare python3 --no-deps "$wheel"
    "$work/bare/bin/pip" show leasehold-runtime-sim >/dev/null
    "$work/bare/bin/python" "$here/python/tests/typing/usage.py"
    tests bare "$here/python/tests/core"
    echo "without NumPy: ok"

    environment full python3 "$wheel" numpy ml_dtypes hypothesis
    "$work/full/bin/python" "$here/python/tests/typing/usage_numpy.py"
    tests full "$here/python/tests/core"
    "$work/full/bin/python" python/tests/examples.py python/README.md docs/how-to/python.md docs/how-to/pytorch.md docs/how-to/blocks-together.md
    "$work/full/bin/python" examples/python/saxpy.py cpu:0
    "$work/full/bin/python" examples/python/generate.py models/llama/demo-model
    echo "with NumPy: ok"

    found=$(others)
    [ "${1:-}" = versions ] || found=$(echo "$found" | sed -n '1p;$p' | uniq)
    # Beside the types, which keep one processor.
    for python in $found; do
        environment other "$python" "$wheel" numpy ml_dtypes
        "$work/other/bin/python" --version
        tests other "$here/python/tests/core"
    done >"$work/versions.log" 2>&1 &
    versions=$!

    # The types: the package as it is installed and files that use it, for each version of Python,
    # and the stubs beside the module itself.
    (
        cd "$work"
        for version in 3.9 3.13; do
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
        "$tools/pip" install --no-deps --force-reinstall "$wheel"
        # Before Python 3.12 the protocol has no name in Python.
        printf '%s\n' 'leasehold\._native\.Buffer\.__buffer__' 'leasehold\._native\.__all__' >allowed
        "$tools/python" -m mypy.stubtest --allowlist allowed --ignore-unused-allowlist leasehold._native
    )

    wait "$versions" || { cat "$work/versions.log" >&2; exit 1; }
    cat "$work/versions.log"

    tests full "$here/python/tests/model"
    # tinygrad is not there: the import says so.
    tests full "$here/python/tests/tinygrad"
    if python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        environment tiny python3 "$wheel" "tinygrad==$TINYGRAD"
        tiny tiny "$TINYGRAD" 1
    fi
    "$work/full/bin/python" examples/python/saxpy.py sim-cuda:0
    # The core of the extension for PyTorch also runs in a C++ program, which has no interpreter to
    # load the module with: there it uses the C ABI's library with simulated devices.
    LEASEHOLD_LIBRARY="$target/debug/deps/libleasehold_capi_sim.so" tests full "$here/python/tests/torch"
    (cd "$work" && "$work/full/bin/python" "$here/python/tests/torch/test_plugin.py")
    echo "with simulated devices: ok"
}

torch() {
    [ $# -gt 0 ] || set -- 2.8.0 newest
    wheel=$(wheel)
    for version in "$@"; do
        if [ "$version" = newest ]; then
            environment torch-newest python3 numpy "${wheel}[torch]"
        else
            # Before CUDA 13 its headers come with the compiler's package.
            case $version in 2.8* | 2.9* | 2.10*) headers=nvidia-cuda-nvcc-cu12 ;; *) headers='cuda-toolkit[crt]' ;; esac
            environment "torch-$version" python3 numpy "$wheel" "torch==$version" "$headers"
        fi
        "$environment/bin/python" -c 'import torch; print("PyTorch", torch.__version__, "with CUDA", torch.version.cuda)'
        log="$work/torch-$version.log"
        # An extension of its own, so that each run builds one. A version that was not tried is an
        # error here.
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
}

# tinygrad's own test of everything in small, which comes with its sources, under seeds. Some of its
# arrays have no device and need clang. It needs Python 3.11.
tiny() { # ENVIRONMENT VERSION SEED…
    python=$work/$1/bin/python version=$2
    shift 2
    if ! command -v "${CC:-clang}" >/dev/null; then
        [ -z "${LEASEHOLD_REQUIRE_TOOLS:-}" ] || { echo "tinygrad's own tests need clang" >&2; exit 1; }
        echo "tinygrad's own tests: skipped, there is no clang"
        return
    fi
    sources=$work/tinygrad-$version
    rm -rf "$sources"
    "$python" -m pip download --no-deps --no-binary tinygrad --dest "$sources" "tinygrad==$version"
    tar -xzf "$sources/tinygrad-$version.tar.gz" -C "$sources"
    for seed in "$@"; do
        (cd "$work" && DEV=LEASEHOLD LEASEHOLD_DEVICE=sim-cuda:0 LEASEHOLD_SEED=$seed CACHELEVEL=0 "$python" \
            -m leasehold.tinygrad "$sources/tinygrad-$version/test/test_tiny.py" 2>"$work/tiny.log") || { cat "$work/tiny.log" >&2; exit 1; }
    done
    echo "tinygrad's own tests: $(tail -n 1 "$work/tiny.log")"
}

tinygrad() {
    version=${1:-$TINYGRAD}
    wheel=$(wheel)
    environment tinygrad python3 "$wheel" "tinygrad==$version"
    log=$work/tinygrad.log
    if ! tests tinygrad "$here/python/tests/tinygrad" >"$log" 2>&1 || grep -q skipped "$log"; then
        cat "$log" >&2
        exit 1
    fi
    tail -n 3 "$log" | head -n 1
    tiny tinygrad "$version" 1 2 3 4 5
}

release() { # [sim] [FOLDER]
    distribution=leasehold_runtime features=
    if [ "${1:-}" = sim ]; then
        distribution=leasehold_runtime_sim features=--features=sim
        shift
    fi
    out=$(realpath -m "${1:-$target/wheels}")
    tools=$(ci/venv.sh wheel 'maturin>=1.9,<2' ziglang wheel)
    triple=$(uname -m)-unknown-linux-gnu
    # The variable that cargo reads, in which maturin puts zig.
    linker=CARGO_TARGET_$(echo "$triple" | tr a-z- A-Z_)_LINKER

    # zig takes an unwinder of its own for -lgcc_s and links it into the module. But the process's
    # libgcc_s unwinds frames, as an exception passes and as the interpreter ends a thread. So the
    # module needs it.
    cat >"$tools/zig-cc" <<END
#!/bin/sh
for argument do
    shift
    case \$argument in -lgcc_s) argument=\$(cc -print-file-name=libgcc_s.so.1) ;; esac
    set -- "\$@" "\$argument"
done
exec "\$$linker" "\$@"
END
    chmod +x "$tools/zig-cc"
    mkdir -p "$out"
    rm -f "$out/$distribution"-*.whl
    unpacked=$(mktemp -d)
    trap 'rm -rf "$unpacked"' EXIT
    # The compatibility is checked by maturin too, which refuses newer symbols.
    (cd python && PATH="$tools:$PATH" RUSTFLAGS="-C linker=$tools/zig-cc" "$tools/maturin" build --profile dist --locked --zig --target "$triple" \
        --compatibility manylinux2014 --out "$unpacked" $features)
    if [ -n "$features" ]; then
        "$tools/python" -m wheel unpack --dest "$unpacked" "$unpacked"/*.whl
        rm "$unpacked"/*.whl
        name_simulated "$unpacked"/leasehold_runtime-*
        "$tools/python" -m wheel pack --dest-dir "$unpacked" "$unpacked"/leasehold_runtime-*
    fi
    mv "$unpacked"/*.whl "$out"
    wheel=$(ls "$out/$distribution"-*.whl)

    python3 -m zipfile -e "$wheel" "$unpacked/wheel"
    module="$unpacked/wheel/leasehold/_native.abi3.so"
    objdump -p "$module" | grep -q 'NEEDED *libgcc_s.so.1' || { echo "the module has an unwinder of its own" >&2; exit 1; }
    newest=$(objdump -T "$module" | grep -oE 'GLIBC_[0-9.]+' | sort -uV | tail -n 1)
    [ "$(printf '%s\n' "$newest" GLIBC_2.17 | sort -V | tail -n 1)" = GLIBC_2.17 ] || { echo "needs $newest" >&2; exit 1; }
    python3 -m venv "$unpacked/environment"
    "$unpacked/environment/bin/pip" install --no-deps "$wheel"
    "$unpacked/environment/bin/python" python/tests/typing/usage.py
    # Threads that are inside the module as the interpreter ends.
    (cd "$unpacked" && "$unpacked/environment/bin/python" "$OLDPWD/python/tests/core/test_process.py")
    # An exception of PyTorch's passes the module, which zig linked.
    PYTHONDONTWRITEBYTECODE=1 "$unpacked/environment/bin/python" python/tests/torch/test_plugin.py Plugin.test_exception
    echo "$(basename "$wheel"): $(stat -c %s "$wheel") bytes, newest symbol $newest"
}

case ${1:-} in
    model) shift && tools=$(tools) && model "$@" ;;
    torch) shift && tools=$(tools) && torch "$@" ;;
    tinygrad) shift && tools=$(tools) && tinygrad "$@" ;;
    wheel) shift && release "$@" ;;
    wheel-sim) shift && release sim "$@" ;;
    '' | versions) tools=$(tools) && check "$@" ;;
    *) sed -n 's/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
