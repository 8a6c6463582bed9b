#!/bin/sh
# Run before a release, and nightly in the workflow: the long forms of what `ci/all.sh` checks in
# short, and what it does not check. Some hours on two cores. All parts run even when one fails.
#
#   loom         every bound of the models; short: those of alloc and cpu with two preemptions
#   asan         AddressSanitizer over every crate; short: core, alloc and memory, without long
#                recorded programs
#   fuzz-memory, fuzz-alloc   a hundred million calls, steps; short: one, two million
#   fuzz-capi    a hundred million calls of leasehold_*; short: none
#   stress       a thousand seeds on each device; short: 20, 5 and 10
#   tests        all cases and seeds of kernels, of texts on emulated Metal and of the budgets of
#                graphs; short: a quarter, and few large shapes
#   ptx          the compiler gives the kernels' images; short: where a hash differs
#   instructions the counts of the profile `dist`; short: of `release`
#   planted      each of the planted mistakes is found; short: each patch still fits
#   model        a hundred thousand random programs of the Python package; short: some hundreds
#   python       the tests on each version of Python; short: the oldest, the newest and the system's
#   torch        the extension against the oldest and the newest PyTorch; short: none
#   tinygrad     tinygrad over simulated devices; short: none
#   main-job     the programs of the release profile; short: of the tests' build
#   first-steps  README's lines in a fresh clone with an empty environment; short: none
#
#   ci/long.sh              everything
#   ci/long.sh loom asan    only these parts
set -u
cd "$(dirname "$0")/.." || exit
export LEASEHOLD_REQUIRE_TOOLS=1

part() {
    case $1 in
        loom | asan | fuzz-memory | fuzz-alloc | fuzz-capi) ci/sanitize.sh "$1" ;;
        stress) ci/programs.sh stress 1000 10000 8 ;;
        tests) LEASEHOLD_LONG=1 ci/test.sh -p leasehold-operators -p leasehold-llama -p leasehold ;;
        ptx) ci/ptx.sh --compile ;;
        planted) ci/planted.sh ;;
        instructions) ci/instructions.sh dist ;;
        python) ci/python.sh versions ;;
        model | torch | tinygrad) ci/python.sh "$1" ;;
        main-job) ci/programs.sh --release main-job ;;
        first-steps) ci/release.sh first-steps ;;
        *)
            echo "no part $1" >&2
            return 2
            ;;
    esac
}

[ $# -gt 0 ] || set -- loom asan fuzz-memory fuzz-alloc fuzz-capi stress tests ptx instructions planted python model torch tinygrad main-job first-steps
failed=
for name in "$@"; do
    echo "== $name"
    began=$(date +%s)
    state=ok
    part "$name" || state=FAILED
    [ "$state" = ok ] || failed="$failed $name"
    echo "-- $name: $state after $(($(date +%s) - began)) s"
done
[ -z "$failed" ] || {
    echo "failed:$failed"
    exit 1
}
echo "every part is ok"
