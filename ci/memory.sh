#!/bin/sh
# Everything about tl, for who works on it: C programs under valgrind, LLVM IR compiled
# ahead of time and just in time, the lock's models, AddressSanitizer with leak detection, and a
# slice of the fuzzer. Every tool is mandatory here.
#
#   ci/memory.sh             all of it (some minutes)
#   ci/memory.sh fuzz [N]    N fuzzed calls (default 100000000) on one thread, then a tenth on four,
#   optimized; and a slice of
#                            them with AddressSanitizer
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
export LEASEHOLD_REQUIRE_TOOLS=1

fuzz() {
    cargo build --quiet --profile quick -p leasehold-memory --features bench --example fuzz
    "$target/quick/examples/fuzz" --calls "$1" --seed "${SEED:-1}"
    "$target/quick/examples/fuzz" --calls "$(($1 / 10))" --seed "${SEED:-1}" --threads 4
}

fuzz_sanitized() {
    host=$(rustc -vV | sed -n 's/^host: //p')
    RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address cargo build --quiet --profile quick -p leasehold-memory --features bench \
        --example fuzz --target "$host" --target-dir "$target/asan"
    for threads in 1 4; do
        ASAN_OPTIONS=detect_leaks=1 "$target/asan/$host/quick/examples/fuzz" --calls "$1" --seed 3 --threads "$threads"
    done
}

if [ "${1:-}" = fuzz ]; then
    calls=${2:-100000000}
    fuzz "$calls"
    fuzz_sanitized "$((calls < 2000000 ? calls : 2000000))"
    exit
fi

echo "== tests, with every tool"
ci/test.sh -p leasehold-memory
echo "== C and IR examples"
ci/c-examples.sh
echo "== models of the lock"
ci/loom.sh memory
echo "== AddressSanitizer and leak detection"
ci/asan.sh -p leasehold-memory
echo "== fuzzer"
fuzz "${FUZZ_CALLS:-5000000}"
fuzz_sanitized "${FUZZ_CALLS:-2000000}"
