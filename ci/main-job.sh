#!/bin/sh
# The main job, built for release: the bundled model's tokens and logits beside the golden values, in both modes, with one to four
# threads; models of other shapes; then the binary alone, copied elsewhere, in an empty environment.
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
cargo build --quiet --release
cargo build --quiet --release -p leasehold-cli --example check_golden
check() { "$target/release/examples/check_golden" "$target/release/leasehold" "$@"; }
check models/tiny-python/golden.json threads="${THREADS:-1,2,3,4}"
for model in crates/llama/tests/models/*/; do
    model=${model%/}
    printf '%s: ' "${model##*/}"
    check "$model/golden.json" model="$model" threads=1,2
done

elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT
cp "$target/release/leasehold" "$elsewhere/"
(cd "$elsewhere" && env -i ./leasehold devices >devices.txt && env -i ./leasehold run --tokens 8 >text.txt 2>progress.txt)
[ -s "$elsewhere/devices.txt" ] && [ -s "$elsewhere/text.txt" ]
echo "the binary runs alone: $(wc -c <"$target/release/leasehold") bytes"
