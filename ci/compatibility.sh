#!/bin/sh
# What this version promises to others, by tools that cargo compiles first (minutes), or by another
# toolchain from rustup. Each part needs the network; `ci/all.sh` runs none.
#
#   ci/compatibility.sh oldest      the oldest compiler that `rust-version` names
#   ci/compatibility.sh semver      the crates for users break no promise of versions
#   ci/compatibility.sh public-api  prints what changed in `leasehold` since the last tag
#   ci/compatibility.sh deny        licences, sources and versions by cargo-deny
set -eu
cd "$(dirname "$0")/.."

# Compiles a tool if it is not there.
tool() { command -v "$1" >/dev/null 2>&1 || cargo install --quiet --locked "$1"; }

last() {
    git describe --tags --abbrev=0 --match 'v*' 'HEAD^' 2>/dev/null || true
}

case ${1:-} in
    oldest)
        oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
        rustup toolchain install "$oldest" --profile minimal
        cargo "+$oldest" check --locked --workspace --exclude leasehold-python --exclude leasehold-book
        ;;
    semver)
        [ -n "$(last)" ] || { echo "semver: there is no version before this one"; exit 0; }
        tool cargo-semver-checks
        for crate in leasehold leasehold-operators leasehold-llama leasehold-hal leasehold-conformance; do
            cargo semver-checks --package "$crate" --baseline-rev "$(last)"
        done
        ;;
    public-api)
        [ -n "$(last)" ] || { echo "public-api: there is no version before this one"; exit 0; }
        tool cargo-public-api
        rustup toolchain install nightly --profile minimal
        cargo public-api --package leasehold diff "$(last)..HEAD"
        ;;
    deny)
        tool cargo-deny
        cargo deny check licenses bans sources
        ;;
    *)
        echo "usage: ci/compatibility.sh oldest | semver | public-api | deny" >&2
        exit 2
        ;;
esac
