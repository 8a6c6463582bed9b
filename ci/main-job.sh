#!/bin/sh
# The main job, built for release: the examples in Rust; the bundled model's tokens and logits
# beside the golden values, in both modes, with one to four threads; models of other shapes; the
# memory that a run takes; simulated devices, by the workbench; then the command alone, copied
# elsewhere, in an empty environment.
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
# At once, so that both have one build of the libraries.
cargo build --quiet --release -p leasehold-cli -p leasehold-workbench
# The programs that check it, with the libraries of the tests: to optimize them takes longer than to
# run them. At once, so that they share one build of the libraries.
cargo build --quiet --profile test -p leasehold-cli -p leasehold-llama -p leasehold --example check_golden --example check_memory \
    --example generate_model --example quickstart --example foreign_framework
examples=$target/debug/examples
for example in quickstart foreign_framework; do
    said=$("$examples/$example" 2>&1) || { echo "$said" && exit 1; }
    echo "example $example: runs"
done
command=$target/release/leasehold
workbench=$target/release/leasehold-workbench
check() { "$examples/check_golden" "$command" "$@"; }
simulated() { "$examples/check_golden" "$workbench" "$@"; }
check models/llama/demo-model/golden.json threads="${THREADS:-1,2,3,4}"
for model in models/llama/tests/models/*/; do
    model=${model%/}
    printf '%s: ' "${model##*/}"
    check "$model/golden.json" model="$model" threads=1,2
done

# Weights are mapped on the CPU and loaded into device memory on the simulated device. (A segment of
# Metal has 32 MiB, more than the model.)
memory() { "$examples/check_memory" "$workbench" "$@"; }
for device in 'cpu:0' 'cuda:0 --sim' 'sim:0'; do
    for mode in eager graph; do
        printf 'memory on %s, %s: ' "$device" "$mode"
        # shellcheck disable=SC2086
        memory 100 --tokens 32 --mode "$mode" --device $device
    done
done
large=$(mktemp -d)
trap 'rm -rf "$large"' EXIT
"$examples/generate_model" "$large/model"
for mode in eager graph; do
    printf 'memory of 200 million parameters, %s: ' "$mode"
    memory 1.05 --model "$large/model" --prompt-ids 316,221 --tokens 2 --mode "$mode" --device cuda:0 --sim
done

printf 'over the simulated CUDA driver, with the race detector on: '
simulated models/llama/demo-model/golden.json device=cuda:0 sim="${SEED:-1}"
printf 'over the simulated Metal driver, with the race detector on: '
simulated models/llama/demo-model/golden.json device=mps:0 sim="${SEED:-1}"
# Without a GPU: a reason and status 1, no panic.
if [ "${LEASEHOLD_GPU:-0}" = 0 ]; then
    status=0
    why=$("$command" run --device cuda:0 2>&1 >/dev/null) || status=$?
    [ "$status" -eq 1 ] && case $why in *cuda*) true ;; *) false ;; esac
    echo "cuda:0 without a driver: $why"
fi

elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere" "$large"' EXIT
cp "$command" "$elsewhere/"
(cd "$elsewhere" && env -i ./leasehold devices >devices.txt && env -i ./leasehold run --tokens 8 >text.txt 2>progress.txt)
[ -s "$elsewhere/devices.txt" ] && [ -s "$elsewhere/text.txt" ]
echo "the binary runs alone: $(wc -c <"$command") bytes"
