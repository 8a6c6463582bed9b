#!/bin/sh
# Clients of the runtime that are written for packages of others, on simulated devices.
#
#   ci/clients.sh          compiles the client for CubeCL, and runs its own tests
#   ci/clients.sh suite    CubeCL's tests, each in a process of its own; prints what fails
set -eu
cd "$(dirname "$0")/.."
export CARGO_INCREMENTAL=0 LEASEHOLD_DEVICE=sim-cuda:0 CARGO_TARGET_DIR="$PWD/target/clients"
cd clients/cubecl
if [ "${1:-}" != suite ]; then
    cargo fmt --all --check -- --config-path ../../rustfmt.toml
    cargo test --quiet --locked
    exit
fi

# A kernel that fails loses the simulated device with its process, so each test has its own.
binary=$(cargo test --locked -p cubecl-suite --test suite --no-run 2>&1 | sed -n 's/.*(\(.*suite-[0-9a-f]*\)).*/\1/p')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$binary" --list --format terse 2>/dev/null | sed -n 's/: test$//p' >"$work/tests"
# shellcheck disable=SC2016
xargs -P "$(nproc)" -I{} sh -c 'timeout 60 "$0" --exact "{}" >/dev/null 2>&1 && echo "passed: {}" || echo "failed: {}"' "$binary" <"$work/tests" >"$work/told"
grep '^failed' "$work/told" | sort || true
echo "CubeCL's tests: $(grep -c '^passed' "$work/told") of $(wc -l <"$work/tests") passed"
