#!/bin/sh
# A release, step by step. Nothing is published but by the last step, which wants the version's tag.
#
#   ci/release.sh                     check, then pack
#   ci/release.sh check               versions, changelog, what a registry asks for
#   ci/release.sh pack                packs every crate, below the registry's limit
#   ci/release.sh verify              builds every crate from its package, in order
#   ci/release.sh notes               prints the changelog's section of the version
#   ci/release.sh libraries [FOLDER]  the command with its pages, and the C libraries, as an
#                                     archive for this machine's kind
#   ci/release.sh publish             publishes the crates, in order
set -eu
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
# crates.io takes 10 MiB.
limit=10485760
# The Python module is no crate of a registry, and its build asks for an interpreter.
export PYO3_NO_PYTHON=1 PYO3_BUILD_EXTENSION_MODULE=1

fail() { echo "release: $1" >&2; exit 1; }

notes() { awk -v head="## $version" 'index($0, head) == 1 { inside = 1; next } /^## / { inside = 0 } inside' CHANGELOG.md; }

# The crates that a registry gets.
published() { cargo metadata --format-version 1 --no-deps --locked | python3 ci/packages.py "$version"; }

check() {
    names=$(published)
    [ -n "$(notes)" ] || fail "CHANGELOG.md has no section '## $version'"
    for file in rust-toolchain.toml README.md SECURITY.md LICENSE-MIT LICENSE-APACHE; do
        [ -s "$file" ] || fail "no $file"
    done
    echo "check: $(echo "$names" | wc -l) crates of version $version, with all that a registry asks for"
}

pack() {
    rm -rf "$target/package"
    # A tree with changes is packed as it is; `publish` refuses one.
    names=$(published)
    # A word for each crate.
    # shellcheck disable=SC2046
    cargo package --no-verify --allow-dirty --locked --quiet $(echo "$names" | sed 's/^/-p /')
    count=0
    for package in "$target"/package/*.crate; do
        bytes=$(stat -c %s "$package")
        [ "$bytes" -lt "$limit" ] || fail "$(basename "$package") has $bytes bytes, and the registry takes $limit"
        tar tzf "$package" | grep -qE '/LICENSE-MIT$' || fail "$(basename "$package") has no licence"
        count=$((count + 1))
    done
    [ "$count" -eq "$(echo "$names" | wc -l)" ] || fail "$count packages of these crates: $names"
    echo "pack: $count packages, the largest of $(stat -c %s "$target"/package/*.crate | sort -n | tail -n 1) bytes"
}

verify() {
    began=$(date +%s)
    cargo publish --workspace --dry-run --allow-dirty --locked
    echo "verify: every crate builds from its package; $((($(date +%s) - began) / 60)) minutes"
}

libraries() {
    out=$(realpath -m "${1:-$target/release-files}")
    name="leasehold-$version-$(uname -m)-linux"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    crates/capi/install.sh "$work/$name" --sim
    # Whoever unpacks it puts it where he likes; the folder is the prefix.
    sed -i "s|^prefix=.*|prefix=\${pcfiledir}/../..|" "$work/$name"/lib/pkgconfig/*.pc
    cargo build --quiet --release --locked -p leasehold-cli
    mkdir -p "$work/$name/bin" "$work/$name/share/man/man1" "$work/$name/share/completions" "$out"
    cp "$target/release/leasehold" "$work/$name/bin/"
    "$work/$name/bin/leasehold" man "$work/$name/share/man/man1"
    for shell in bash elvish fish powershell zsh; do
        "$work/$name/bin/leasehold" completions "$shell" >"$work/$name/share/completions/leasehold.$shell"
    done
    cp LICENSE-MIT LICENSE-APACHE CHANGELOG.md "$work/$name/"
    tar czf "$out/$name.tar.gz" -C "$work" "$name"
    (cd "$out" && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
    echo "libraries: $out/$name.tar.gz, $(stat -c %s "$out/$name.tar.gz") bytes"
}

publish() {
    [ "$(git describe --tags --exact-match 2>/dev/null)" = "v$version" ] || fail "this commit is not tagged v$version"
    [ -z "$(git status --porcelain)" ] || fail "the tree has changes"
    check
    cargo publish --workspace --locked
}

case ${1:-} in
    '') check && pack ;;
    check | pack | verify | notes | publish) "$1" ;;
    libraries) libraries "${2:-}" ;;
    *) sed -n 's/^# \{0,1\}//p' "$0" | sed 1d | sed '/^A release/,$!d' >&2; exit 2 ;;
esac
