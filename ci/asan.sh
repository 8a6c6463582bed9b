#!/bin/sh
# The workspace's tests with AddressSanitizer and leak detection. The stable compiler has both
# behind RUSTC_BOOTSTRAP.
#
#   ci/asan.sh                     everything
#   ci/asan.sh -p leasehold-core   one crate
#   ci/asan.sh short               the crates that handle raw memory themselves, and a slice of the
#                                  stress through all of them
set -eu
cd "$(dirname "$0")/.."
host=$(rustc -vV | sed -n 's/^host: //p')
export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address ${RUSTFLAGS:-}" ASAN_OPTIONS=detect_leaks=1
# What must not compile has nothing to run.
export LEASEHOLD_NO_COMPILE_FAIL=1
# The emulator of CUDA kernels changes stacks under the sanitizer's feet.
export LEASEHOLD_NO_EMULATION=1
# It maps memory of its own, which a test that watches the map must know.
export LEASEHOLD_SANITIZED=1
# Tools are asked for where the library is not instrumented: programs without the sanitizer cannot
# load it.
unset LEASEHOLD_REQUIRE_TOOLS
CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/asan"
export CARGO_TARGET_DIR
if [ "${1:-}" = short ]; then
    set --
    for crate in -core -alloc -hal -cpu -cuda -sim '' -memory -stress; do set -- "$@" -p "leasehold$crate"; done
fi
[ $# -gt 0 ] || set -- --workspace
ci/test.sh --target "$host" --lib --bins --tests "$@"
