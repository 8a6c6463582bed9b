#!/bin/sh
# Builds the wheel of the Python package for release: manylinux 2.17 (glibc of 2014 and newer) for
# this machine's kind (x86-64, AArch64), for CPython 3.9 and newer. The linker is zig's, from PyPI:
# it links against that glibc on any machine. Checks the symbols that the module needs, and imports
# it.
#
#   ci/wheel.sh [FOLDER]      default: target/wheels
set -eu
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
out=$(realpath -m "${1:-$target/wheels}")
export CARGO_TARGET_DIR="$target" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
tools="$target/python/wheel-tools"
triple=$(uname -m)-unknown-linux-gnu
# The variable that cargo reads, in which maturin puts zig.
linker=CARGO_TARGET_$(echo "$triple" | tr a-z- A-Z_)_LINKER

if [ ! -x "$tools/bin/maturin" ] || ! "$tools/bin/python" -c 'import ziglang' 2>/dev/null; then
    rm -rf "$tools"
    python3 -m venv "$tools"
    "$tools/bin/pip" install 'maturin>=1.9,<2' ziglang
fi
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
rm -f "$out"/leasehold_runtime-*.whl
# The compatibility is checked by maturin too, which refuses newer symbols.
(cd python && PATH="$tools/bin:$PATH" RUSTFLAGS="-C linker=$tools/zig-cc" "$tools/bin/maturin" build --release --locked --zig --target "$triple" \
    --compatibility manylinux2014 --out "$out")
wheel=$(ls "$out"/leasehold_runtime-*.whl)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m zipfile -e "$wheel" "$work/wheel"
module="$work/wheel/leasehold/_native.abi3.so"
objdump -p "$module" | grep -q 'NEEDED *libgcc_s.so.1' || { echo "the module has an unwinder of its own" >&2; exit 1; }
newest=$(objdump -T "$module" | grep -oE 'GLIBC_[0-9.]+' | sort -uV | tail -n 1)
[ "$(printf '%s\n' "$newest" GLIBC_2.17 | sort -V | tail -n 1)" = GLIBC_2.17 ] || { echo "needs $newest" >&2; exit 1; }
python3 -m venv "$work/environment"
"$work/environment/bin/pip" install --no-deps "$wheel"
"$work/environment/bin/python" python/tests/typing/usage.py
# Threads that are inside the module as the interpreter ends.
(cd "$work" && "$work/environment/bin/python" "$OLDPWD/python/tests/core/test_process.py")
# An exception of PyTorch's passes the module, which zig linked.
PYTHONDONTWRITEBYTECODE=1 "$work/environment/bin/python" python/tests/torch/test_plugin.py Plugin.test_exception
echo "$(basename "$wheel"): $(stat -c %s "$wheel") bytes, newest symbol $newest"
