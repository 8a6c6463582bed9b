#!/bin/sh
# Runs the real driver of the Metal backend on Linux, over stand-ins for Apple's classes: which
# messages it sends with which arguments, and that it gives back each reference once. What this does
# not show: that Metal does what the messages ask for.
#
#   ci/messages.sh
#
# `objc2-metal` builds on Apple's systems only, because it links the framework there is nowhere
# else. So the package in testing/messages uses a copy of it without that line, which takes
# macOS's way to the list of devices.
set -eu
cd "$(dirname "$0")/.."
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
