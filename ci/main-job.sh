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

printf 'over the simulated CUDA driver, with the race detector on: '
check models/tiny-python/golden.json device=cuda:0 sim="${SEED:-1}"
# Without a GPU: a reason and status 1, no panic.
if [ "${LEASEHOLD_GPU:-0}" = 0 ]; then
    status=0
    why=$("$target/release/leasehold" run --device cuda:0 2>&1 >/dev/null) || status=$?
    [ "$status" -eq 1 ] && case $why in *cuda*) true ;; *) false ;; esac
    echo "cuda:0 without a driver: $why"
fi

elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT
cp "$target/release/leasehold" "$elsewhere/"
(cd "$elsewhere" && env -i ./leasehold devices >devices.txt && env -i ./leasehold run --tokens 8 >text.txt 2>progress.txt)
[ -s "$elsewhere/devices.txt" ] && [ -s "$elsewhere/text.txt" ]
echo "the binary runs alone: $(wc -c <"$target/release/leasehold") bytes"
