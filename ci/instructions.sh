#!/bin/sh
# Limits of instruction counts: what an operation costs, counted by callgrind, so that the load of
# the machine does not matter.
#
#   ci/instructions.sh            compares with bench/instructions.txt; more above than the row
#   allows is a failure
#   ci/instructions.sh --update   writes the counts of this tree into it
#
# An operation's count is the difference of two runs of its program, with 1,000 and with 11,000
# repetitions, divided by 10,000: start-up and everything else that happens once cancels out. The
# table says which example of which package runs it.
set -eu
cd "$(dirname "$0")/.."
table=bench/instructions.txt
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
# At once, so that the programs share one build of the libraries.
set --
packages=$(awk '!/^#/ && NF { print $4 }' "$table" | sort -u)
programs=$(awk '!/^#/ && NF { print $5 }' "$table" | sort -u)
for name in $packages; do
    set -- "$@" -p "$name"
    folder=${name#leasehold-}
    ! grep -qs '^bench = ' "crates/$folder/Cargo.toml" "testing/$folder/Cargo.toml" || set -- "$@" --features "$name/bench"
done
for name in $programs; do set -- "$@" --example "$name"; done
cargo build --quiet --locked --profile dist "$@"

while read -r operation baseline tolerance package example; do
    case $operation in
        '' | '#'*)
            echo "$operation${baseline:+ $baseline${tolerance:+ $tolerance${package:+ $package${example:+ $example}}}}" >>"$new"
            continue
            ;;
    esac
    program=${CARGO_TARGET_DIR:-target}/dist/examples/$example
    few=$(collected "$program" "$operation" 1000)
    many=$(collected "$program" "$operation" 11000)
    if [ -z "$few" ] || [ -z "$many" ]; then
        echo "$operation: no count" >&2
        exit 1
    fi
    count=$(((many - few + 5000) / 10000))
    result=ok
    if [ "$((count * 100))" -gt "$((baseline * (100 + tolerance)))" ]; then
        result="MORE than $tolerance % above"
        status=1
    elif [ "$((count * 100))" -lt "$((baseline * (100 - tolerance)))" ]; then
        result="less; ci/instructions.sh --update keeps it so"
    fi
    printf '%-26s %5d instructions, baseline %5d: %s\n' "$operation" "$count" "$baseline" "$result"
    printf '%-26s %5d %d %s %s\n' "$operation" "$count" "$tolerance" "$package" "$example" >>"$new"
done <"$table"

if [ "$update" = --update ]; then
    cp "$new" "$table"
    exit 0
fi
exit "$status"
