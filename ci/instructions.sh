#!/bin/sh
# Limits of instruction counts: what an operation costs, counted by callgrind, so that the load of
# the machine does not matter.
#
#   ci/instructions.sh [dist | tests]            compares with bench/instructions.txt; more above
#                                                than the row allows is a failure
#   ci/instructions.sh [dist | tests] --update   writes the counts of this tree into it
#
# A change's counts are those of the profile `release`. With `dist` they are those of what a release
# carries, where thin LTO makes small functions of other crates no calls; it takes minutes. With
# `tests` they are those of the programs whose rows have no count by `dist`: they need a model,
# which takes minutes to build for a release, and ci/test.sh has built it.
# An operation's count is the difference of two runs of its program, with 1,000 and with 11,000
# repetitions, divided by 10,000: start-up and everything else that happens once cancels out. A
# program of the tests' build says itself where the counting begins and ends.
set -eu
cd "$(dirname "$0")/.."
table=bench/instructions.txt
profile=release
case ${1:-} in
    dist | tests)
        profile=$1
        shift
        ;;
esac
update=${1:-}

command -v valgrind >/dev/null || {
    [ -z "${LEASEHOLD_REQUIRE_TOOLS:-}" ] || { echo "valgrind is missing" >&2; exit 1; }
    echo "skipped: no valgrind"
    exit 0
}

collected() {
    valgrind --tool=callgrind --callgrind-out-file=/dev/null "$@" 2>&1 >/dev/null | awk '/Collected :/ { print $4 }'
}

new=$(mktemp)
trap 'rm -f "$new"' EXIT
status=0
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
case $profile in
    # Builds nothing where ci/test.sh has run.
    tests)
        examples=$target/debug/examples
        cargo test --quiet --locked --workspace --no-run
        ;;
    *)
        examples=$target/$profile/examples
        cargo build --quiet --locked --profile "$profile" -p leasehold-capi-sim --examples
        ;;
esac

while read -r operation released distributed tolerance program; do
    case $operation in
        '' | '#'*)
            echo "$operation${released:+ $released${distributed:+ $distributed${tolerance:+ $tolerance${program:+ $program}}}}" >>"$new"
            continue
            ;;
    esac
    baseline=$released
    [ "$profile" != dist ] || baseline=$distributed
    case $profile:$distributed in
        tests:- | release:[0-9]* | dist:[0-9]*) ;;
        *)
            printf '%-26s %5s %5s %d %s\n' "$operation" "$released" "$distributed" "$tolerance" "$program" >>"$new"
            continue
            ;;
    esac
    if [ "$profile" = tests ]; then
        few=0 times=1 many=$(collected --instr-atstart=no "$examples/${program}_instructions" "$operation" 10)
    else
        few=$(collected "$examples/${program}_instructions" "$operation" 1000)
        times=1000 many=$(collected "$examples/${program}_instructions" "$operation" 11000)
    fi
    if [ -z "$few" ] || [ -z "$many" ]; then
        echo "$operation: no count" >&2
        exit 1
    fi
    count=$(((many - few + 5 * times) / (10 * times)))
    result=ok
    if [ "$((count * 100))" -gt "$((baseline * (100 + tolerance)))" ]; then
        result="MORE than $tolerance % above"
        status=1
    elif [ "$((count * 100))" -lt "$((baseline * (100 - tolerance)))" ]; then
        result="less; ci/instructions.sh --update keeps it so"
    fi
    printf '%-26s %5d instructions, baseline %5d: %s\n' "$operation" "$count" "$baseline" "$result"
    if [ "$profile" = dist ]; then distributed=$count; else released=$count; fi
    printf '%-26s %5s %5s %d %s\n' "$operation" "$released" "$distributed" "$tolerance" "$program" >>"$new"
done <"$table"

if [ "$update" = --update ]; then
    cp "$new" "$table"
    exit 0
fi
exit "$status"
