#!/bin/sh
# Limits of instruction counts: what an operation costs, counted by callgrind, so that the load of
# the machine does not matter.
#
#   ci/instructions.sh [dist]            compares with bench/instructions.txt; more above than the
#                                        row allows is a failure
#   ci/instructions.sh [dist] --update   writes the counts of this tree into it
#
# A change's counts are those of the profile `release`. With `dist` they are those of what a release
# carries, where thin LTO makes small functions of other crates no calls; it takes minutes.
# An operation's count is the difference of two runs of its program, with 1,000 and with 11,000
# repetitions, divided by 10,000: start-up and everything else that happens once cancels out.
set -eu
cd "$(dirname "$0")/.."
table=bench/instructions.txt
profile=release
if [ "${1:-}" = dist ]; then
    profile=dist
    shift
fi
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
cargo build --quiet --locked --profile "$profile" -p leasehold-capi-sim --examples

while read -r operation released distributed tolerance program; do
    case $operation in
        '' | '#'*)
            echo "$operation${released:+ $released${distributed:+ $distributed${tolerance:+ $tolerance${program:+ $program}}}}" >>"$new"
            continue
            ;;
    esac
    baseline=$released
    [ "$profile" = release ] || baseline=$distributed
    file=${CARGO_TARGET_DIR:-target}/$profile/examples/${program}_instructions
    few=$(collected "$file" "$operation" 1000)
    many=$(collected "$file" "$operation" 11000)
    if [ -z "$few" ] || [ -z "$many" ]; then
        echo "$operation: no count" >&2
        exit 1
    fi
    count=$(((many - few + 5000) / 10000))
    result=ok
    # A row that nobody has counted by this profile fails, and --update writes it.
    [ "$baseline" != - ] || { baseline=0; status=1; }
    if [ "$((count * 100))" -gt "$((baseline * (100 + tolerance)))" ]; then
        result="MORE than $tolerance % above"
        status=1
    elif [ "$((count * 100))" -lt "$((baseline * (100 - tolerance)))" ]; then
        result="less; ci/instructions.sh --update keeps it so"
    fi
    printf '%-26s %5d instructions, baseline %5d: %s\n' "$operation" "$count" "$baseline" "$result"
    if [ "$profile" = release ]; then released=$count; else distributed=$count; fi
    printf '%-26s %5s %5s %d %s\n' "$operation" "$released" "$distributed" "$tolerance" "$program" >>"$new"
done <"$table"

if [ "$update" = --update ]; then
    cp "$new" "$table"
    exit 0
fi
exit "$status"
