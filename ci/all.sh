#!/usr/bin/env bash
# Everything that a change must keep, checked on a clean checkout: two cores, no GPU, 30 minutes.
# Installs the tools that are missing, runs the scripts of ci/ one after the other, all of them even
# when one fails, and ends with the slowest sections and the sum of the tests. One build serves the
# tests and the programs. ci/long.sh has the long forms.
#
#   ci/all.sh              all sections
#   ci/all.sh lint test    only these
set -uo pipefail
cd "$(dirname "$0")/.." || exit

export CARGO_TERM_COLOR=never CARGO_TERM_PROGRESS_WHEN=never CARGO_INCREMENTAL=0 RUST_BACKTRACE=1
# A test that needs a tool skips itself where the tool is missing; here that is a failure.
export LEASEHOLD_REQUIRE_TOOLS=1

install_tools() {
    local need=()
    local tool
    for tool in gcc:gcc g++:g++ clang++:clang pkg-config:pkg-config valgrind:valgrind llc:llvm shellcheck:shellcheck python3:python3; do
        command -v "${tool%%:*}" >/dev/null 2>&1 || need+=("${tool##*:}")
    done
    python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || need+=(python3-venv)
    if [ "${#need[@]}" -gt 0 ]; then
        local root=()
        [ "$(id -u)" -eq 0 ] || root=(sudo)
        echo "installing: ${need[*]}"
        "${root[@]}" apt-get update -qq >/dev/null &&
            DEBIAN_FRONTEND=noninteractive "${root[@]}" apt-get install -y -qq --no-install-recommends "${need[@]}" >/dev/null ||
            return 1
    fi
    rustc --version && cargo --version && cargo fetch --quiet --locked
}

# From what fails fastest to what takes longest. From `test` to `python` they share its build. What
# is beside others in a line, behind `+`, runs while they do: in a target folder of its own, or
# (`python`) once the build of `test` is over. The tests of Python wait for one processor mostly.
sections=(
    "tools"
    "lint book messages apple ptx test serve main-job stress valgrind c-examples fuzz-memory fuzz-alloc + loom asan instructions python clients"
)
script_of() {
    case $1 in
        tools) echo install_tools ;;
        # The target's library comes from rustup's servers, which not every machine reaches.
        apple) echo "env -u LEASEHOLD_REQUIRE_TOOLS ci/apple.sh types" ;;
        messages) echo "ci/apple.sh messages" ;;
        main-job | serve | stress | valgrind | c-examples) echo "ci/programs.sh $1" ;;
        asan | loom | fuzz-memory | fuzz-alloc) echo "ci/sanitize.sh $1 short" ;;
        *) echo "ci/$1.sh" ;;
    esac
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tests="0 passed, 0 failed"
asked=" ${*:-${sections[*]}} "
for section; do
    [[ " ${sections[*]} " == *" $section "* ]] || { echo "no section $section" >&2 && exit 2; }
done

# Seconds by the clock, and of the processors by all that the section started.
TIMEFORMAT='%R %U %S'
run_script() {
    local command status=0
    read -ra command <<<"$(script_of "$1")"
    { time "${command[@]}" 2>&1 || status=$?; } 2>"$work/$1.seconds"
    return "$status"
}

run_sections() {
    local section state seconds processor
    for section in "$@"; do
        case $asked in *" $section "*) ;; *) continue ;; esac
        echo "== $section"
        state=ok
        run_script "$section" | tee "$work/$section.log" || state=FAILED
        read -r seconds processor <<<"$(awk '{ printf "%.0f %.0f", $1, $2 + $3 }' "$work/$section.seconds")"
        printf '%-13s %5d %5d %s\n' "$section" "$seconds" "$processor" "$state" >>"$work/times"
        echo "-- $section: $state after $seconds s, $processor s of the processors"
        echo
    done
}

for line in "${sections[@]}"; do
    read -ra own <<<"${line%+*}"
    read -ra beside <<<"${line#"${line%+*}"}"
    run_sections "${beside[@]:1}" >"$work/beside" 2>&1 &
    run_sections "${own[@]}"
    wait
    cat "$work/beside"
done
[ ! -f "$work/test.log" ] || tests=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$work/test.log" | tail -n 1)
# A section that has no line did not come to its end.
failures=()
for section in ${asked//+/}; do
    grep -q "^$section .* ok$" "$work/times" || failures+=("$section")
done

echo "== result after $SECONDS s; the slowest sections, seconds by the clock and of the processors:"
sort -k 2 -n -r "$work/times" | head -n 6 | cut -c 1-25
# Where time has grown: beside the committed figures, which `ci/all.sh` wrote on a quiet machine of
# two cores. No time makes a run fail.
cut -c 1-25 "$work/times" >"${CARGO_TARGET_DIR:-target}/ci-times.txt"
committed=ci/times.txt
[ -f "$committed" ] || committed=/dev/null
awk '
    FILENAME == "ci/times.txt" { was[$1] = $3; next }
    { now += $3; before += was[$1]; if (was[$1] && $3 > 1.1 * was[$1] && $3 > was[$1] + 10) more = more " " $1 " (" was[$1] " s before)" }
    END {
        print "processor seconds: " now (before ? ", committed: " before : "") (before && now > 1.1 * before ? "; GROWN by more than a tenth" : "")
        if (more) print "sections that grew by more than a tenth:" more
    }' "$committed" "$work/times"
if [ "${#failures[@]}" -gt 0 ]; then
    for section in "${failures[@]}"; do
        echo "== what $section said last"
        tail -n 40 "$work/$section.log" || true
    done
    echo "failed: ${failures[*]}"
else
    echo "every section is ok"
fi
echo "${tests:-0 passed, 1 failed}"
[ "${#failures[@]}" -eq 0 ]
