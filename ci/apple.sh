#!/bin/sh
# Type-checks and lints the Metal backend for Apple's systems, with the real `objc2-metal`, on any
# machine. No Mac, SDK or linker is needed, because nothing is linked. What this shows: the calls
# have the types of Metal's headers. What it does not show: that they run.
#
#   ci/apple.sh
#
# The target's standard library comes from rustup. Without it this is skipped; with
# LEASEHOLD_REQUIRE_TOOLS set that is a failure.
set -eu
cd "$(dirname "$0")/.."
target=aarch64-apple-darwin
if ! rustup target list --installed 2>/dev/null | grep -qx "$target" && ! rustup target add "$target"; then
    if [ -n "${LEASEHOLD_REQUIRE_TOOLS:-}" ]; then
        echo "the standard library for $target is required and cannot be installed" >&2
        exit 1
    fi
    echo "skipped: no standard library for $target"
    exit 0
fi
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/apple"
cargo clippy --quiet --locked --target "$target" --package leasehold-mps -- -D warnings
cargo clippy --quiet --locked --target "$target" --package leasehold-mps --package leasehold-sim --all-targets --all-features -- -D warnings
RUSTDOCFLAGS="-D warnings" cargo doc --quiet --locked --target "$target" --package leasehold-mps --no-deps
# The programs that ci/macos.sh builds there.
cargo check --quiet --locked --target "$target" --package leasehold-cli --no-default-features --features mps --example check_golden --bins
cargo check --quiet --locked --target "$target" --package leasehold-workbench --no-default-features --features mps --bins
cargo check --quiet --locked --target "$target" --package leasehold-operators --features mps --example check_device
cargo check --quiet --locked --target "$target" --package leasehold --features cpu,mps --examples
echo "apple: clippy and rustdoc have no warning for $target"
