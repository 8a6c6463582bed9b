#!/bin/sh
# What can be said about the tree without running it: format, clippy and rustdoc without a warning,
# the rules that no tool knows (ci/rules.py), and whether the patches of defects fit.
#
#   ci/lint.sh          everything
#   ci/lint.sh rules    only the rules, which build nothing
set -eu
cd "$(dirname "$0")/.."
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
[ "${1:-}" != rules ] || exit 0

cargo fmt --all --check
echo "format: kept"
cargo clippy --quiet --workspace --all-targets -- -D warnings
cargo clippy --quiet --workspace --all-targets --all-features -- -D warnings
echo "clippy: no warning"
RUSTDOCFLAGS="-D warnings" cargo doc --quiet --workspace --no-deps --all-features
echo "rustdoc: no warning"
