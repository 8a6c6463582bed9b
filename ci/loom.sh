#!/bin/sh
# Model-checks the lock-free protocols: loom runs the code that ships through its interleavings.
# Some minutes on two cores.
#
#   ci/loom.sh                  core's pools, leases and lines; the allocator's models; the tile
#   pool's
#                               jobs; the memory manager's lock
#   ci/loom.sh core shutdown    core's models whose name contains `shutdown`; likewise alloc, cpu,
#   memory
#   ci/loom.sh short            all of them, the allocator's with at most two preemptions instead of
#   three: model a alone takes
#                               ten minutes otherwise
set -eu
cd "$(dirname "$0")/.."
# Warnings are the business of ci/lint.sh.
export RUSTFLAGS="--cfg loom -A warnings ${RUSTFLAGS:-}"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom"

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
    cargo test --quiet --profile quick -p "leasehold-$crate" "$@"
}

if [ "${1:-}" = short ]; then
    for crate in core cpu memory; do models "$crate"; done
    LOOM_MAX_PREEMPTIONS=2
    export LOOM_MAX_PREEMPTIONS
    models alloc
elif [ $# -gt 0 ]; then
    models "$@"
else
    for crate in core alloc cpu memory; do models "$crate"; done
fi
