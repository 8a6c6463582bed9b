#!/bin/sh
# The command under valgrind: no invalid access, no use of what was never written, nothing lost at
# the end.
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
# As ci/main-job.sh builds it.
cargo build --quiet --release -p leasehold-cli -p leasehold-workbench
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

check() {
    if ! valgrind --quiet --error-exitcode=9 --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite \
        "$target/release/leasehold" "$@" >"$work/out" 2>"$work/err"; then
        cat "$work/out" "$work/err"
        echo "leasehold $* is not clean" >&2
        exit 1
    fi
    echo "clean: leasehold $*"
}

check devices --json
check run --json --prompt-ids 316,221 --tokens 3 --threads 1
check run --prompt-ids 316,221 --tokens 3 --threads 2
