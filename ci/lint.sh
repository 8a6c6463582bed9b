#!/bin/sh
# What is wrong without running anything.
#
#   ci/lint.sh             all parts
#   ci/lint.sh PART…       these:
#     rules   rules of the tree that no tool knows, patches of defects, syntax of scripts: 3 s
#     deny    licences, sources and versions of dependencies, by deny.toml
#     typos   spelling of everything that a person reads; `typos --write` corrects it
#     format  rustfmt
#     clippy  clippy, all targets and all features
set -eu
cd "$(dirname "$0")/.."

rules() {
    failed=0
    ci/rules.py || failed=1
    ci/planted.sh --check || failed=1
    for script in ci/*.sh bench/*.sh .ci/run; do
        case $(head -n 1 "$script") in
            *bash*) bash -n "$script" || failed=1 ;;
            *) sh -n "$script" || failed=1 ;;
        esac
    done
    if command -v shellcheck >/dev/null 2>&1; then
        shellcheck ci/*.sh .ci/run || failed=1
    elif [ -n "${LEASEHOLD_REQUIRE_TOOLS:-}" ]; then
        echo "shellcheck is required and missing" >&2
        failed=1
    fi
    [ "$failed" -eq 0 ] || exit 1
    echo "rules: kept"
}

# The workflow `compatibility` gives the same lists to cargo-deny, which takes minutes to compile.
deny() {
    python=python3
    # The reader of TOML is part of Python from 3.11 on.
    "$python" -c 'import tomllib' 2>/dev/null || python=$(ci/venv.sh deny tomli)/python
    cargo metadata --format-version 1 --locked --all-features | "$python" ci/deny.py deny.toml
}

typos() {
    "$(ci/venv.sh typos typos==1.52.0)/typos" --format brief "$@"
    echo "typos: none"
}

if [ "${1:-} ${2:-}" = "typos --write" ]; then
    typos --write
    exit
fi
[ $# -gt 0 ] || set -- rules deny typos format clippy
for part; do
    case $part in
        rules | deny | typos) "$part" ;;
        format) cargo fmt --all --check && echo "format: kept" ;;
        clippy)
            cargo clippy --quiet --locked --workspace --all-targets --all-features -- -D warnings
            echo "clippy: no warning"
            ;;
        *) sed -n 's/^# \{0,1\}//p' "$0" | sed -n '/^  ci/p' >&2 && exit 2 ;;
    esac
done
