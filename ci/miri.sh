#!/bin/sh
# Tests of core, alloc and memory under Miri, which finds undefined behaviour that no test sees.
# Miri comes with nightly toolchains only: TOOLCHAIN names one that has it (default `nightly`).
#
#   ci/miri.sh              the three crates
#   ci/miri.sh -p CRATE …   what follows goes to `cargo miri test`
set -eu
cd "$(dirname "$0")/.."
toolchain=${TOOLCHAIN:-nightly}
if ! cargo "+$toolchain" miri --version >/dev/null 2>&1; then
    echo "skipped: toolchain $toolchain has no Miri (rustup toolchain install nightly --component miri)"
    [ -z "${LEASEHOLD_REQUIRE_MIRI:-}" ] || exit 1
    exit 0
fi
# Memory maps and files of the system are outside of what Miri knows.
export MIRIFLAGS="-Zmiri-disable-isolation ${MIRIFLAGS:-}" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/miri" LEASEHOLD_NO_COMPILE_FAIL=1
[ $# -gt 0 ] || set -- -p leasehold-core -p leasehold-alloc -p leasehold-memory
cargo "+$toolchain" miri test --lib "$@"
