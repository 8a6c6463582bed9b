#!/bin/sh
# The long forms of what `ci/all.sh` checks in short: every bound of the models, the sanitizer over
# every crate, long fuzzing, the stress with a thousand seeds, the mistakes that it must find,
# random programs of the Python package, the extension against the oldest and the newest PyTorch,
# and a stranger's first steps. Nightly in the workflow; some hours on two cores. All parts run even
# when one fails.
#
#   ci/long.sh              everything
#   ci/long.sh loom fuzz    only these parts
set -u
cd "$(dirname "$0")/.." || exit
export LEASEHOLD_REQUIRE_TOOLS=1

part() {
    case $1 in
        loom) ci/loom.sh ;;
        asan) ci/asan.sh ;;
        fuzz) ci/memory.sh fuzz 100000000 ;;
        fuzz-alloc) ci/fuzz.sh 100000000 ;;
        fuzz-capi) ci/capi-fuzz.sh 100000000 ;;
        stress) ci/stress.sh 1000 10000 8 ;;
        planted) ci/planted.sh ;;
        python) ci/python.sh model 100000 ;;
        torch) ci/torch.sh ;;
        first-steps) ci/first-steps.sh ;;
        *)
            echo "no part $1" >&2
            return 2
            ;;
    esac
}

[ $# -gt 0 ] || set -- loom asan fuzz fuzz-alloc fuzz-capi stress planted python torch first-steps
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
