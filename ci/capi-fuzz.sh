#!/bin/sh
# Random calls of the C ABI leasehold_*, under AddressSanitizer with leak detection: the library and
# the programs (crates/capi/tests/c/fuzz.c for the allocator, fuzz_runtime.c for the runtime) are
# both instrumented. Nine tenths of each program's calls use the CPU, from one thread and from
# eight, and the rest a simulated CUDA device.
#
#   ci/capi-fuzz.sh [CALLS]    default: 10000000
set -eu
cd "$(dirname "$0")/.."
calls=${1:-10000000}
seed=${SEED:-1}
host=$(rustc -vV | sed -n 's/^host: //p')
target="${CARGO_TARGET_DIR:-target}/asan"
# The stable compiler has the sanitizer behind RUSTC_BOOTSTRAP.
RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address cargo build --quiet --locked --profile quick -p leasehold-capi-sim \
    --target "$host" --target-dir "$target"
library=$(realpath "$target/$host/quick")
export ASAN_OPTIONS=detect_leaks=1
for name in fuzz fuzz_runtime; do
    program=$target/capi-$name
    ${CC:-gcc} -std=c11 -O1 -g -Wall -Wextra -Werror -fsanitize=address -pthread -DLEASEHOLD_SIM -Icrates/capi/include \
        "crates/capi/tests/c/$name.c" -o "$program" "-L$library" -lleasehold_capi_sim "-Wl,-rpath,$library"
    "$program" "$((calls * 3 / 10))" 1 "$seed" cpu:0
    "$program" "$((calls * 6 / 10))" 8 "$seed" cpu:0
    "$program" "$((calls / 10))" 4 "$seed" sim-cuda:0
done
