#!/bin/sh
# A stranger's first steps: the shell blocks of README.md, line by line, in a fresh clone of the
# last commit, with an emptied environment and a cargo home of its own; then a crate with README's
# dependency line and program. Prints the minutes of each step. Needs Rust, gcc, git and Python.
#
#   ci/first-steps.sh          everything: half an hour on two cores
#   ci/first-steps.sh quick    without the tests and the wheel
set -eu
cd "$(dirname "$0")/.."
repository=$(pwd)
quick=${1:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git clone --quiet "$repository" "$work/clone"
mkdir "$work/home" "$work/bin"
# The dependency line names the public repository, and is tried with this one. Git calls itself with
# an empty environment too, so the rule is in a file.
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
        'cargo test --workspace' | ci/wheel.sh | *target/venv*)
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
