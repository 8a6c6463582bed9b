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
#
# What the version promises to others, by tools that cargo compiles first (minutes), or by another
# toolchain from rustup. Each of these needs the network:
#
#   ci/release.sh oldest              the oldest compiler that `rust-version` names
#   ci/release.sh semver              the crates for users break no promise of versions
#   ci/release.sh public-api          prints what changed in `leasehold` since the last tag
#   ci/release.sh cargo-deny          licences, sources and versions by cargo-deny
#   ci/release.sh first-steps [quick] a stranger's: the shell blocks of README.md, line by line, in
#                                     a fresh clone of the last commit, with an emptied environment
#                                     and a cargo home of its own; then a crate with README's
#                                     dependency line and program. Prints the minutes of each step.
#                                     Quick: without the tests and the wheel
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
    cargo build --quiet --profile dist --locked -p leasehold-cli
    mkdir -p "$work/$name/bin" "$work/$name/share/man/man1" "$work/$name/share/completions" "$out"
    cp "$target/dist/leasehold" "$work/$name/bin/"
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

# Compiles a tool if it is not there.
tool() { command -v "$1" >/dev/null 2>&1 || cargo install --quiet --locked "$1"; }

last() { git describe --tags --abbrev=0 --match 'v*' 'HEAD^' 2>/dev/null || true; }

oldest() {
    oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    rustup toolchain install "$oldest" --profile minimal
    cargo "+$oldest" check --locked --workspace --exclude leasehold-python --exclude leasehold-book
}

semver() {
    [ -n "$(last)" ] || { echo "semver: there is no version before this one"; return; }
    tool cargo-semver-checks
    for crate in leasehold leasehold-operators leasehold-llama leasehold-collective leasehold-hal leasehold-conformance; do
        cargo semver-checks --package "$crate" --baseline-rev "$(last)"
    done
}

public_api() {
    [ -n "$(last)" ] || { echo "public-api: there is no version before this one"; return; }
    tool cargo-public-api
    rustup toolchain install nightly --profile minimal
    cargo public-api --package leasehold diff "$(last)..HEAD"
}

cargo_deny() {
    tool cargo-deny
    cargo deny check licenses bans sources
}

first_steps() {
    repository=$(pwd)
    quick=${1:-}
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    git clone --quiet "$repository" "$work/clone"
    mkdir "$work/home" "$work/bin"
    # The dependency line names the public repository, and is tried with this one. Git calls itself
    # with an empty environment too, so the rule is in a file.
    printf '[url "%s"]\n\tinsteadOf = https://github.com/leasehold/leasehold\n' "file://$work/clone" >"$work/home/.gitconfig"

    # The blocks of README.md in a language, without their fences.
    blocks() { awk -v fence="\`\`\`$1" '$0 == fence { inside = 1; next } /^```/ { inside = 0 } inside' "$work/clone/README.md"; }

    # Where Rust is, without the rest of the environment.
    rustup=${RUSTUP_HOME:-$HOME/.rustup}
    path=$work/bin:$(dirname "$(command -v cargo)"):/usr/local/bin:/usr/bin:/bin
    began=$(date +%s)
    step() {
        from=$(date +%s)
        status=0
        (cd "$1" && env -i HOME="$work/home" CARGO_HOME="$work/home/.cargo" CARGO_NET_GIT_FETCH_WITH_CLI=true RUSTUP_HOME="$rustup" \
            PATH="$path" sh -euc "$2") >"$work/log" 2>&1 || status=$?
        awk -v s="$(($(date +%s) - from))" -v what="$2" 'BEGIN { split(what, line, "\n"); printf "%5.1f min  %s\n", s / 60, line[1] }'
        if [ "$status" -ne 0 ]; then
            tail -n 40 "$work/log"
            echo "failed with status $status" >&2
            exit 1
        fi
    }

    blocks sh >"$work/lines"
    while IFS= read -r line; do
        command=$(printf '%s' "${line%%  # *}" | sed 's/ *$//')
        case $command in
            '') continue ;;
            'cargo test --workspace' | 'ci/python.sh wheel' | *target/venv*)
                if [ "$quick" = quick ]; then
                    echo "  left out  $command"
                    continue
                fi
                ;;
        esac
        step "$work/clone" "$command" </dev/null
        # What `cargo install` would make, without a second build.
        for program in leasehold leasehold-workbench; do
            [ ! -x "$work/clone/target/release/$program" ] || ln -sf "$work/clone/target/release/$program" "$work/bin/$program"
        done
    done <"$work/lines"

    mkdir -p "$work/mine/src"
    {
        printf '[package]\nname = "mine"\nversion = "0.1.0"\nedition = "2024"\n\n'
        blocks toml
    } >"$work/mine/Cargo.toml"
    blocks rust >"$work/mine/src/main.rs"
    step "$work/mine" "cargo run # a crate with the dependency line"
    awk -v s="$(($(date +%s) - began))" 'BEGIN { printf "%5.1f min  in all\n", s / 60 }'
}

case ${1:-} in
    '') check && pack ;;
    check | pack | verify | notes | publish | oldest | semver) "$1" ;;
    public-api) public_api ;;
    cargo-deny) cargo_deny ;;
    libraries) libraries "${2:-}" ;;
    first-steps) first_steps "${2:-}" ;;
    *) sed -n 's/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
