#!/bin/sh
# The Metal backend, as far as this machine goes.
#
#   ci/apple.sh types     type-checks and lints it for Apple's systems, with the real `objc2-metal`:
#                         the calls have the types of Metal's headers. No Mac, SDK or linker is
#                         needed, but the target's standard library from rustup. Without it this is
#                         skipped; with LEASEHOLD_REQUIRE_TOOLS set that is a failure
#   ci/apple.sh messages  runs the real driver on Linux over stand-ins for Apple's classes: which
#                         messages it sends with which arguments, and that it gives back each
#                         reference once. Not that Metal does what the messages ask for
#   ci/apple.sh device    on macOS 14 or newer: every operator beside the CPU's, the golden ids in
#                         both modes, conformance plain and validated, random programs, examples, on
#                         mps:0 or DEVICE. A virtual machine's "Apple Paravirtual device" is enough
# `device` gives its functions to one that runs them.
# shellcheck disable=SC2317
set -eu
cd "$(dirname "$0")/.."

types() {
    target=aarch64-apple-darwin
    if ! rustup target list --installed 2>/dev/null | grep -qx "$target" && ! rustup target add "$target"; then
        if [ -n "${LEASEHOLD_REQUIRE_TOOLS:-}" ]; then
            echo "the standard library for $target is required and cannot be installed" >&2
            exit 1
        fi
        echo "skipped: no standard library for $target"
        exit 0
    fi
    cargo clippy --quiet --locked --target "$target" --package leasehold-mps -- -D warnings
    cargo clippy --quiet --locked --target "$target" --package leasehold-mps --package leasehold-sim --all-targets --all-features -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --quiet --locked --target "$target" --package leasehold-mps --no-deps
    # The programs that ci/apple.sh device builds there.
    cargo check --quiet --locked --target "$target" --no-default-features --bins --examples \
        --package leasehold-cli --package leasehold-workbench --package leasehold-operators --package leasehold \
        --features leasehold-cli/mps,leasehold-workbench/mps,leasehold-operators/mps,leasehold/cpu,leasehold/mps
    echo "apple: clippy and rustdoc have no warning for $target"
}

# `objc2-metal` builds on Apple's systems only, because it links the framework there is nowhere
# else. So the package in testing/messages uses a copy of it without that line, which takes
# macOS's way to the list of devices.
messages() {
    case "$(uname -s)-$(uname -m)" in
    Linux-x86_64) ;;
    *)
        echo "skipped: the stand-ins are for Linux on x86-64"
        exit 0
        ;;
    esac
    package=testing/messages
    work=target/messages
    mkdir -p "$work"
    cargo fetch --quiet --locked
    manifest=$(cargo metadata --format-version 1 --locked --offline |
        python3 -c 'import json, sys; print(next(p["manifest_path"] for p in json.load(sys.stdin)["packages"] if p["name"] == "objc2-metal"))')
    rm -rf "$work/objc2-metal"
    cp -R "$(dirname "$manifest")" "$work/objc2-metal"
    chmod -R u+w "$work/objc2-metal"
    link='#\[link(name = "Metal", kind = "framework")\]'
    grep -q "^$link\$" "$work/objc2-metal/src/generated/mod.rs"
    sed -i "/^$link\$/d" "$work/objc2-metal/src/generated/mod.rs"
    # The list of devices is macOS's own.
    macos='any(target_os = "macos", target_env = "macabi")'
    grep -q "cfg($macos)" "$work/objc2-metal/src/device.rs"
    sed -i "s/$macos/all()/" "$work/objc2-metal/src/device.rs"
    cp Cargo.lock "$package/Cargo.lock"
    RUSTFLAGS="--cfg metal_messages" CARGO_TARGET_DIR="$work" \
        cargo test --quiet --manifest-path "$package/Cargo.toml" -- --test-threads 1
    echo "messages: the real driver sends what it should to stand-ins, and keeps nothing"
}

# All sections run even when one fails; the last line says which did.
device() {
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
}

case ${1:-} in
    types | messages | device) "$1" ;;
    *) sed -n 's/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
