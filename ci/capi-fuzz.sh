#!/bin/sh
# Random calls of the C ABI leasehold_*, under AddressSanitizer with leak detection: the library and
# the program (crates/capi/tests/c/fuzz.c) are both instrumented. Nine tenths of the calls use the
# CPU's memory, from one thread and from eight, and the rest a simulated CUDA device.
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
program=$target/capi-fuzz
${CC:-gcc} -std=c11 -O1 -g -Wall -Wextra -Werror -fsanitize=address -pthread -DLEASEHOLD_SIM -Icrates/capi/include \
    crates/capi/tests/c/fuzz.c -o "$program" "-L$library" -lleasehold_capi_sim "-Wl,-rpath,$library"
export ASAN_OPTIONS=detect_leaks=1
"$program" "$((calls * 3 / 10))" 1 "$seed" cpu:0
"$program" "$((calls * 6 / 10))" 8 "$seed" cpu:0
"$program" "$((calls / 10))" 4 "$seed" sim-cuda:0
