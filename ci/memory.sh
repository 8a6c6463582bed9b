#!/bin/sh
# What CI runs for crates/memory beyond `cargo test`: C programs under valgrind, LLVM IR compiled ahead of time and just in time, the
# lock's models, AddressSanitizer with leak detection, and a slice of the fuzzer. Every tool is mandatory here.
#
#   ci/memory.sh             all of it (some minutes)
#   ci/memory.sh fuzz [N]    N fuzzed calls (default 100000000) on one thread, then a tenth on four, with release speed
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}

fuzz() {
    cargo build --quiet --release -p leasehold-memory --features bench --example fuzz
    "$target/release/examples/fuzz" --calls "$1" --seed "${SEED:-1}"
    "$target/release/examples/fuzz" --calls "$(($1 / 10))" --seed "${SEED:-1}" --threads 4
}

if [ "${1:-}" = fuzz ]; then
    fuzz "${2:-100000000}"
    exit
fi

export LEASEHOLD_REQUIRE_TOOLS=1
venv="$target/llvmlite"
if ! "$venv/bin/python" -c 'import llvmlite' 2>/dev/null; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet 'llvmlite>=0.44'
fi
LEASEHOLD_LLVMLITE_PYTHON=$(realpath -s "$venv/bin/python")
export LEASEHOLD_LLVMLITE_PYTHON

echo "== tests, with every tool"
cargo test --quiet -p leasehold-memory
echo "== C and IR examples"
ci/c-examples.sh
echo "== models of the lock"
RUSTFLAGS="--cfg loom" cargo test --quiet --release -p leasehold-memory --lib --target-dir "$target/loom" lock::
echo "== AddressSanitizer and leak detection"
host=$(rustc -vV | sed -n 's/^host: //p')
RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address RUSTDOCFLAGS=-Zsanitizer=address ASAN_OPTIONS=detect_leaks=1 \
    cargo test --quiet -p leasehold-memory --target "$host" --target-dir "$target/asan"
RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address cargo build --quiet --release -p leasehold-memory --features bench \
    --example fuzz --target "$host" --target-dir "$target/asan"
ASAN_OPTIONS=detect_leaks=1 "$target/asan/$host/release/examples/fuzz" --calls "${FUZZ_CALLS:-2000000}" --seed 3
ASAN_OPTIONS=detect_leaks=1 "$target/asan/$host/release/examples/fuzz" --calls "${FUZZ_CALLS:-2000000}" --seed 4 --threads 4
echo "== fuzzer at release speed"
fuzz "${FUZZ_CALLS:-5000000}"
