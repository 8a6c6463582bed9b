#!/bin/sh
# Runs everything that needs a Metal device, on macOS 14 or newer: the devices, every operator
# beside the CPU's, the golden ids in both modes, the conformance suite plain and validated, random
# programs, and the examples. A virtual machine's "Apple Paravirtual device" is enough.
#
#   ci/macos.sh             every device check, on mps:0
#   DEVICE=mps:1 ci/macos.sh
#
# All sections run even when one fails; the last line says which did.
set -u
cd "$(dirname "$0")/.." || exit
[ "$(uname -s)" = Darwin ] || { echo "this needs macOS" >&2 && exit 1; }
device=${DEVICE:-mps:0}
target=${CARGO_TARGET_DIR:-target}
failed=""

section() {
    name=$1
    shift
    echo "== $name"
    if "$@"; then
        echo "-- $name: ok"
    else
        echo "-- $name: FAILED"
        failed="$failed $name"
    fi
}

build() {
    cargo build --locked --release -p leasehold-cli --no-default-features --features mps &&
        cargo build --locked --release -p leasehold-workbench --no-default-features --features mps &&
        cargo build --locked -p leasehold-cli --no-default-features --features mps --example check_golden &&
        cargo build --locked -p leasehold-operators --features mps --example check_device &&
        cargo build --locked -p leasehold --features cpu,mps --example quickstart --example foreign_framework
}
leasehold=$target/release/leasehold
workbench=$target/release/leasehold-workbench
examples=$target/debug/examples

# The device is there, not only the backend.
devices() {
    "$leasehold" devices && "$leasehold" devices | grep -q "$device"
}
golden() {
    "$examples/check_golden" "$leasehold" models/llama/demo-model/golden.json device="$device" || return 1
    for model in models/llama/tests/models/*/; do
        "$examples/check_golden" "$leasehold" "$model/golden.json" model="${model%/}" device="$device" || return 1
    done
}
run() {
    "$leasehold" run --device "$device" --tokens 32 && "$leasehold" bench decode --device "$device" --repeat 3
}
rust_examples() {
    "$examples/quickstart" && "$examples/foreign_framework"
}
# Metal's own validation of arguments and of the kernels' accesses.
validated() {
    MTL_DEBUG_LAYER=1 MTL_SHADER_VALIDATION=1 "$examples/check_device" --device "$device" --quick
}

section build build
section devices devices
section operators "$examples/check_device" --device "$device"
section golden golden
section run run
section conformance "$workbench" conformance --device "$device" --validated
section stress "$workbench" stress --device "$device" --seeds 20
section examples rust_examples
section validated validated

if [ -n "$failed" ]; then
    echo "macos: failed:$failed"
    exit 1
fi
echo "macos: all sections are ok on $device"
