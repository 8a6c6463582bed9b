#!/bin/sh
# What can be said about the tree without running it: format, clippy and rustdoc without a warning,
# and the rules that no tool knows.
#
#   ci/lint.sh          everything
#   ci/lint.sh rules    only the rules below, which build nothing
set -eu
cd "$(dirname "$0")/.."
failed=0

# Prints what was found, if anything, under the rule's name. Brackets in the patterns keep them from
# finding themselves.
rule() {
    if [ -n "$2" ]; then
        printf 'rule: %s\n%s\n' "$1" "$2" >&2
        failed=1
    fi
}

# Atomics come from `leasehold_core::sync`, so that loom can take their place. Models may name
# `loom::model`.
rule "atomics, locks and loom only through leasehold_core::sync" "$(
    git grep --untracked -nE '(std|core)::sync::(atomic|\{[^}]*atomic)|(^|[^_a-z])parking_lot::|(^|[^_a-z])loom::' -- 'crates/*.rs' 'testing/*.rs' 'examples/*.rs' 'python/*.rs' |
        grep -vE '^crates/core/src/sync\.rs:|leasehold_core::sync|leasehold::backend::sync|crate::core::sync|loom::model' || true
)"

rule "every source file opens with what it is" "$(
    git ls-files --cached --others --exclude-standard 'crates/*.rs' 'testing/*.rs' 'examples/*.rs' 'python/*.rs' | grep -v /compile_fail/ | sort -u |
        while read -r file; do
            [ ! -f "$file" ] || head -n 1 "$file" | grep -qE '^(//!|#!\[|// @generated)' || echo "$file"
        done
)"

# What a crate is: the first paragraph of its README.md, which is also the head of its lib.rs.
plain() { tr '\n' ' ' | sed 's/](\([^)]*\))//g; s/[]`[]//g; s/ *$//'; }
rule "a crate's README.md opens as its lib.rs does, and leads to the project's" "$(
    for readme in crates/*/README.md testing/*/README.md; do
        [ -f "$readme" ] || continue
        crate=$(dirname "$readme")
        [ -f "$crate/src/lib.rs" ] && root=$crate/src/lib.rs || root=$crate/src/main.rs
        grep -qF '[Leasehold](https://github.com/leasehold/leasehold#readme)' "$readme" || echo "$readme does not name the project's README"
        says=$(awk 'NR > 1 && NF { seen = 1; print } seen && !NF { exit }' "$readme" | plain)
        [ "$says" = "$(awk '!/^\/\/! ?[^ ]/ { exit } { print substr($0, 5) }' "$root" | plain)" ] || echo "$readme: other words than $root"
    done
)"

rule "every Python file of the package opens with what it is" "$(
    git ls-files --cached --others --exclude-standard 'python/*.py' 'python/*.pyi' | sort -u |
        while read -r file; do
            [ ! -f "$file" ] || head -n 1 "$file" | grep -qE '^r?"""' || echo "$file"
        done
)"

# rustfmt keeps code within the same width.
rule "no comment line above 100 columns (bytes)" "$(
    LC_ALL=C git grep --untracked -nP '^(?=.{101})\s*//' -- '*.rs' | cut -d: -f1,2 || true
    LC_ALL=C git grep --untracked -nP '^(?=.{101})\s*#' -- 'ci/*' .ci/run | cut -d: -f1,2 || true
)"

rule "no path of somebody's machine" "$(
    git grep --untracked -nIE '(^|[^[:alnum:]_.])/(wor[k]/|tm[p]/|hom[e]/|roo[t]/|User[s]/)' -- . ':!*.lock' ':!crates/tiny-python/model' ':!crates/llama/tests/models' || true
)"

# Everything comes from the public index, and links lead to public places.
rule "packages from crates.io only" "$(git grep --untracked -n '^source = ' -- '*.lock' | grep -v '"registry+https://github.com/rust-lang/crates.io-inde[x]"' || true)"
hosts='www\.w3\.org|(git-lfs\.)?github\.com|(doc|www)\.rust-lang\.org|docs\.rs|crates\.io|(www\.)?apache\.org|docs\.nvidia\.com|developer\.apple\.com|opensource\.org|keepachangelog\.com|semver\.org|arxiv\.org|(www\.)?kernel\.org|docs\.kernel\.org|en\.wikipedia\.org|llvm\.org|huggingface\.co|json-schema\.org|dmlc\.github\.io'
rule "links to known public hosts only (the list is in ci/lint.sh)" "$(
    git grep --untracked -nIoE 'https?://[A-Za-z0-9._:-]+' -- . ':!*.lock' ':!crates/tiny-python/model/*.json' ':!crates/llama/tests/models' ':!ci/lint.sh' |
        grep -vE "https?://($hosts)\$" || true
)"

# Floors: a crate uses only crates on floors below its own. The table is ARCHITECTURE.md's.
# Development dependencies may also name any crate of testing/. Otherwise a crate of crates/ needs
# none of testing/, but for the command and where a feature switches it on.
floors=$(awk -F'|' '/^\| *[0-9]+ *\|/ { n = $2 + 0; line = $3; while (match(line, /`[a-z-]+`/)) { print substr(line, RSTART + 1, RLENGTH - 2), n; line = substr(line, RSTART + RLENGTH) } }' ARCHITECTURE.md)
floor_of() { echo "$floors" | awk -v crate="$1" '$1 == crate { print $2 }'; }
# Names of the workspace's packages that PACKAGE uses directly, by kind of dependency.
uses() {
    cargo tree --quiet --package "$1" --depth 1 --edges "$2" --all-features --target all --prefix none --format '{p}' |
        awk -v self="$1" '/^leasehold(-[a-z]+)* v/ && $1 != self { print $1 }' | sort -u
}
check_floors() {
    for manifest in crates/*/Cargo.toml testing/*/Cargo.toml; do
        crate=$(basename "$(dirname "$manifest")")
        package=$(sed -n 's/^name = "\(leasehold[a-z-]*\)"/\1/p' "$manifest" | head -n 1)
        own=$(floor_of "$crate")
        [ -n "$own" ] || { echo "$crate is on no floor of ARCHITECTURE.md"; continue; }
        for kind in normal,build dev; do
            for used in $(uses "$package" "$kind"); do
                name=${used#leasehold-}
                if [ -d "testing/$name" ]; then
                    [ "$kind" != dev ] || continue
                    case $crate:$name in
                        cli:* | operators:sim | operators:emulator) ;;
                        *) [ -d "testing/$crate" ] || echo "$crate (crates/) needs $name (testing/)" ;;
                    esac
                fi
                floor=$(floor_of "$name")
                [ -n "$floor" ] && [ "$floor" -lt "$own" ] || echo "$crate (floor $own) uses $name (floor ${floor:-none}; $kind)"
            done
        done
    done
}
rule "imports run downwards" "$(check_floors)"

# Files that lead to each other, by what they import and by the methods that they call. A bound is
# the number of circles and of the files in them; it may only fall. (A table of children in a
# `mod.rs` counts too, and does no harm.)
if ! circles=$(ci/call_circles.py crates/core=1:2 crates/alloc=0 crates/hal=0 crates/engine=1:5 \
    crates/cpu=1:2 crates/cuda=1:7 crates/mps=1:4 crates/leasehold=1:2 crates/operators=1:4 \
    crates/llama=0 crates/collective=0 crates/memory=0 crates/capi=0 crates/cli=0 \
    crates/input=0 crates/report=0 \
    testing/alloc-bench=1:2 testing/collective-sim=0 testing/conformance=1:4 testing/cuda-sim=1:5 \
    testing/cuda-traces=1:11 testing/emulator=0 testing/mps-sim=1:6 testing/sim=3:10 \
    testing/stress=2:6 testing/testbench=0); then
    rule "no more circles of files (ci/call_circles.py CRATE shows one's arrows)" "$circles"
fi
printf '%s\n' "$circles" | grep 'lower the bound' || true

rule "ARCHITECTURE.md's list of the files that a launch passes is true" "$(ci/launch_path.py 2>&1 || true)"

# Public ways into unsafe code are named in docs/unsafe.md, under their crate's heading. (The
# kernels' own functions are in nobody's reach.)
unsafe_unnamed() {
    git grep --untracked -hoE '^ *pub (const )?unsafe (fn|trait) [A-Za-z_0-9]+' -- "$1/src" ':!crates/operators/src/kernels' |
        awk '{ print $NF }' | sort -u | while read -r name; do
            awk -v crate="$(basename "$1")" '/^## / { inside = index(", " substr($0, 4) ",", ", " crate ",") } inside' docs/unsafe.md |
                grep -qE "[\`:.]${name}[\`<(]" || echo "$1: $name"
        done
}
rule "public unsafe functions and traits are named in docs/unsafe.md" "$(for crate in crates/* testing/*; do unsafe_unnamed "$crate"; done)"

# A field's own documentation says its default.
no_default() {
    git ls-files --cached --others --exclude-standard 'crates/*/src/*.rs' 'testing/*/src/*.rs' | while read -r file; do
        [ -f "$file" ] && awk -v file="$file" '
            /^pub struct (AllocatorConfig|DebugAids|PoolConfig|CpuConfig|CudaConfig|SimDriverConfig|MachineConfig|PoolLimits|Config|Filter|StreamDesc) \{/ { inside = 1; doc = "" }
            /^}/ { inside = 0 }
            inside && /\/\/\// { doc = doc $0 }
            inside && /^    pub / { if (tolower(doc) !~ /default/) print file ": " $2; doc = "" }' "$file"
    done
}
rule "fields of configurations say their default" "$(no_default | grep -v '^crates/llama' || true)"

# Memory is made by `Runtime`, and moved and filled by `Stream`. What comes later goes on `Context`,
# `Stream` or a value. The four recording names of document 002 do not count.
runtime_methods() {
    git ls-files --cached --others --exclude-standard 'crates/leasehold/src/*.rs' | while read -r file; do
        [ ! -f "$file" ] || awk '
            /^impl Runtime \{/ { inside = 1 }
            /^}/ { inside = 0 }
            inside && match($0, /^    pub (const )?(unsafe )?fn [a-z_0-9]+/) { print substr($0, RSTART, RLENGTH) }' "$file"
    done | awk '{ print $NF }' | grep -vxE '(start|stop)_graph_recording|is_graph_recording|add_graph_operator'
}
methods=$(runtime_methods | wc -l)
[ "$methods" -ge 20 ] || rule "the methods of Runtime are found" "only $methods"
[ "$methods" -le 35 ] || rule "Runtime has at most 35 methods" "$methods: $(runtime_methods | tr '\n' ' ')"

# Words that one project alone would understand. Decision pages and the changelog tell what they
# were.
rule "the field's words" "$(
    git grep --untracked -nwiE '[a]nnex(es)?|[y]ards?|[e]states?|[q]uarrels?|[l]oot|[h]omeward|[s]ee_off|[l]adder|[c]limbs?|[s]crape|[p]ockets?|[b]ury|[b]uried|[g]raves?|[r]elend|[r]enew|[d]ress|[w]itness|[i]nvite|[r]ush|[t]end|[r]ecall|[b]irth|[s]eats?|[l]andings?|[d]oors?|[b]reathe?' -- crates testing ci .ci bench docs examples python README.md ARCHITECTURE.md ':!docs/decisions' ':!bench/runs' ':!*.json' ':!*.ptx' ':!*.xz' ':!*.lock' |
        cut -c1-160 || true
)"

for script in ci/*.sh bench/*.sh .ci/run; do
    case $(head -n 1 "$script") in
        *bash*) bash -n "$script" || failed=1 ;;
        *) sh -n "$script" || failed=1 ;;
    esac
done
if command -v shellcheck >/dev/null 2>&1; then
    shellcheck ci/*.sh .ci/run || failed=1
elif [ -n "${LEASEHOLD_REQUIRE_TOOLS:-}" ]; then
    echo "shellcheck is required and missing" >&2
    failed=1
fi

[ "$failed" -eq 0 ] || exit 1
echo "rules: kept"
[ "${1:-}" != rules ] || exit 0

cargo fmt --all --check
echo "format: kept"
cargo clippy --quiet --workspace --all-targets -- -D warnings
cargo clippy --quiet --workspace --all-targets --all-features -- -D warnings
echo "clippy: no warning"
RUSTDOCFLAGS="-D warnings" cargo doc --quiet --workspace --no-deps --all-features
echo "rustdoc: no warning"
