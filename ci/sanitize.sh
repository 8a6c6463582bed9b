#!/bin/sh
# What no test sees: memory errors, leaks and data races, by sanitizers, models and random calls.
# Without a number or a name a part has its long form; `short` is what a pull request runs.
#
#   ci/sanitize.sh asan [short | CARGO-OPTION…]
#       the tests under AddressSanitizer with leak detection. Short: core, alloc and memory without
#       long recorded programs, and a slice of the random calls of tl_*
#   ci/sanitize.sh loom [short | CRATE [MODEL]]
#       the lock-free protocols of core, alloc, cpu and memory through their interleavings. Short:
#       those of alloc and cpu with two preemptions
#   ci/sanitize.sh miri [CARGO-OPTION…]
#       core, alloc and memory under Miri, of the toolchain TOOLCHAIN (default `nightly`)
#   ci/sanitize.sh fuzz-alloc [short | STEPS]
#       the allocator against its model; every invariant after each thousand steps. Short: two
#       million, by the build of ci/test.sh
#   ci/sanitize.sh fuzz-memory [short | CALLS]
#       calls of tl_* on one thread, a tenth on four. Short: a million, likewise
#   ci/sanitize.sh fuzz-capi [CALLS]
#       calls of leasehold_*, library and program instrumented, on the CPU by one and eight threads,
#       a tenth on a simulated CUDA device
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
host=$(rustc -vV | sed -n 's/^host: //p')
part=${1:-}
[ $# -eq 0 ] || shift

# The stable compiler has the sanitizer behind RUSTC_BOOTSTRAP.
sanitized() {
    RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address ${RUSTFLAGS:-}" ASAN_OPTIONS=detect_leaks=1 CARGO_TARGET_DIR="$target/asan" "$@"
}

asan() {
    # What must not compile has nothing to run.
    export LEASEHOLD_NO_COMPILE_FAIL=1
    # The emulator of CUDA kernels changes stacks under the sanitizer's feet.
    export LEASEHOLD_NO_EMULATION=1
    # It maps memory of its own, which a test that watches the map must know.
    export LEASEHOLD_SANITIZED=1
    # Tools are asked for where the library is not instrumented: programs without the sanitizer
    # cannot load it.
    unset LEASEHOLD_REQUIRE_TOOLS
    short=
    if [ "${1:-}" = short ]; then
        short=1
        set -- -p leasehold-core -p leasehold-alloc -p leasehold-memory --features leasehold-memory/bench
    fi
    [ $# -gt 0 ] || set -- --workspace
    # The long recorded programs take four fifths of the time. The short ones make the same calls.
    [ -z "$short" ] || set -- "$@" -- --skip gpt2_train --skip llama_generate --skip traces::neighbours --skip traces::other_widths \
        --skip traces::progress --skip traces::every_player --skip traces_lie_densely --skip workloads::
    sanitized ci/test.sh --target "$host" --lib --bins --tests "$@"
    [ -n "$short" ] || return 0
    sanitized cargo build --quiet --locked --target "$host" -p leasehold-memory --features bench --example fuzz
    calls_sanitized "$target/asan/$host/debug" 200000
}

calls_sanitized() { # FOLDER CALLS
    for threads in 1 4; do
        ASAN_OPTIONS=detect_leaks=1 "$1/examples/fuzz" --calls "$2" --seed 3 --threads "$threads"
    done
}

loom() {
    export RUSTFLAGS="--cfg loom -A warnings ${RUSTFLAGS:-}" CARGO_TARGET_DIR="$target/loom"
    if [ "${1:-}" = short ]; then
        for crate in core memory; do models "$crate"; done
        # With three, model a of the allocator takes two minutes and those of cpu five.
        for crate in alloc cpu; do LOOM_MAX_PREEMPTIONS=2 models "$crate"; done
    elif [ $# -gt 0 ]; then
        models "$@"
    else
        for crate in core alloc cpu memory; do models "$crate"; done
    fi
}

models() {
    crate=$1
    shift
    case $crate in
        core) set -- --test loom -- --nocapture "$@" ;;
        alloc) set -- --lib -- --nocapture "${@:-models::}" ;;
        cpu) set -- --lib -- "${@:-jobs_model::}" ;;
        memory) set -- --lib -- "${@:-lock::}" ;;
        *) echo "no models in $crate" >&2 && exit 2 ;;
    esac
    cargo test --quiet --release -p "leasehold-$crate" "$@"
}

miri() {
    toolchain=${TOOLCHAIN:-nightly}
    if ! cargo "+$toolchain" miri --version >/dev/null 2>&1; then
        echo "skipped: toolchain $toolchain has no Miri (rustup toolchain install nightly --component miri)"
        [ -z "${LEASEHOLD_REQUIRE_MIRI:-}" ] || exit 1
        exit 0
    fi
    # Memory maps and files of the system are outside of what Miri knows.
    export MIRIFLAGS="-Zmiri-disable-isolation ${MIRIFLAGS:-}" CARGO_TARGET_DIR="$target/miri" LEASEHOLD_NO_COMPILE_FAIL=1
    [ $# -gt 0 ] || set -- -p leasehold-core -p leasehold-alloc -p leasehold-memory
    cargo "+$toolchain" miri test --lib "$@"
}

fuzz_alloc() {
    if [ "${1:-}" = short ]; then
        LEASEHOLD_FUZZ_STEPS=2000000 cargo test --quiet --locked --workspace --test main -- --exact model::long_fuzz
    else
        LEASEHOLD_FUZZ_STEPS=${1:-100000000} cargo test --quiet --release -p leasehold-alloc --test main -- --exact model::long_fuzz
    fi
}

fuzz_memory() {
    if [ "${1:-}" = short ]; then
        cargo test --quiet --locked --workspace --no-run
        set -- 1000000 "$target/debug"
    else
        set -- "${1:-100000000}" "$target/release"
        cargo build --quiet --release -p leasehold-memory --features bench --example fuzz
        sanitized cargo build --quiet --release -p leasehold-memory --features bench --example fuzz --target "$host"
        calls_sanitized "$target/asan/$host/release" 2000000
    fi
    "$2/examples/fuzz" --calls "$1" --seed "${SEED:-1}"
    "$2/examples/fuzz" --calls "$(($1 / 10))" --seed "${SEED:-1}" --threads 4
}

fuzz_capi() {
    calls=${1:-100000000}
    sanitized cargo build --quiet --locked --release -p leasehold-capi-sim --target "$host"
    library=$(realpath "$target/asan/$host/release")
    export ASAN_OPTIONS=detect_leaks=1
    for name in fuzz fuzz_runtime; do
        program=$target/asan/capi-$name
        ${CC:-gcc} -std=c11 -O1 -g -Wall -Wextra -Werror -fsanitize=address -pthread -DLEASEHOLD_SIM -Icrates/capi/include \
            "crates/capi/tests/c/$name.c" -o "$program" "-L$library" -lleasehold_capi_sim "-Wl,-rpath,$library"
        "$program" "$((calls * 3 / 10))" 1 "${SEED:-1}" cpu:0
        "$program" "$((calls * 6 / 10))" 8 "${SEED:-1}" cpu:0
        "$program" "$((calls / 10))" 4 "${SEED:-1}" sim-cuda:0
    done
}

case $part in
    asan | loom | miri) "$part" "$@" ;;
    fuzz-alloc) fuzz_alloc "$@" ;;
    fuzz-memory) fuzz_memory "$@" ;;
    fuzz-capi) fuzz_capi "$@" ;;
    *) sed -n 's/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
