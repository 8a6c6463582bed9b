#!/bin/sh
# All tests of the workspace, in one build, which the other checks of programs use too. Says nothing
# but the sum, unless something fails; the last line is `N passed, N failed`.
#
#   ci/test.sh                    tests that need a tool which is not there say so and pass
#   LEASEHOLD_REQUIRE_TOOLS=1 …   a missing tool is a failure
#   ci/test.sh -p leasehold-core  one crate
set -eu
cd "$(dirname "$0")/.."
if [ -n "${LEASEHOLD_REQUIRE_TOOLS:-}" ] && [ -z "${LEASEHOLD_LLVMLITE_PYTHON:-}" ]; then
    LEASEHOLD_LLVMLITE_PYTHON=$(ci/venv.sh llvmlite 'llvmlite>=0.44')/python
    export LEASEHOLD_LLVMLITE_PYTHON
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
run() { cargo test --no-fail-fast "$@" >>"$log" 2>&1 || status=$?; }
[ $# -gt 0 ] || set -- --workspace
run "$@"

# A binary that does not build, or ends before it has reported, counts as one failure.
sum=$(awk -v status="$status" '
    /^test result: / { passed += $4; failed += $6; ignored += $8 }
    END {
        if (status != 0 && failed == 0) failed = 1
        if (ignored > 0) print ignored + 0 " ignored"
        print passed + 0 " passed, " failed + 0 " failed"
    }' "$log")
if [ "$status" -ne 0 ]; then
    # Without the lines that say that all is well.
    grep -vE '^(test .* \.\.\. (ok|ignored.*)|test result: ok.*|running [0-9]+ tests?| +(Compiling|Downloaded|Downloading) .*|)$' "$log" | tail -n 400
fi
echo "$sum"
exit "$status"
