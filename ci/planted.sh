#!/bin/sh
# Plants mistakes in the source, one at a time, and has what each patch in testing/defects names
# look for them. Each must be found, and without one nothing may be found. A copy of HEAD under
# target/ takes the patches, and each build there makes anew what a patch has changed.
#
#   ci/planted.sh                            all
#   ci/planted.sh PassedEarly MissingWait    these
#   ci/planted.sh collective                 those of collectives, by programs of ranks
#   ci/planted.sh --check                    plants nothing: whether each patch fits this tree
#
# A patch begins with what the mistake is, and a line `Found by: HUNT` for each of these hunts:
#   stress DEVICE [OPTION]      random programs, within 50 seeds
#   ranks DEVICE [OPTION]       random programs of ranks, within 50 seeds
#   conformance CASES           cases of the suite, on sim:0
#   cuda-sim TEST, mps-sim TEST random programs in tests of the simulated drivers
#   model NAME                  the allocator's models under loom
# A patch that no longer fits is written anew: make the mistake in the source, and `git diff` it.
set -eu
cd "$(dirname "$0")/.."

# The patches of upper crates first, so that a build seldom makes everything anew.
order() {
    for crate in capi collective leasehold mps cuda sim cpu hal alloc core; do
        grep -l "^diff --git a/[a-z]*/$crate/" testing/defects/*.patch || true
    done | awk '!seen[$0]++'
}

if [ "${1:-}" = --check ]; then
    failed=0
    ordered=$(order)
    for patch in testing/defects/*.patch; do
        git apply --check "$patch" || {
            echo "$patch: no longer fits" >&2
            failed=1
        }
        case "
$ordered
" in
            *"
$patch
"*) ;;
            *) echo "$patch: of a crate that ci/planted.sh does not list" >&2 && failed=1 ;;
        esac
    done
    unfound=$(grep -LE '^Found by: (stress|ranks|conformance|cuda-sim|mps-sim|model) ' testing/defects/*.patch || true)
    [ -z "$unfound" ] || {
        echo "no line says what finds it: $unfound" >&2
        failed=1
    }
    exit "$failed"
fi

for name in "$@"; do
    [ "$name" = collective ] || [ -e "testing/defects/$name.patch" ] || {
        echo "no patch testing/defects/$name.patch" >&2
        exit 2
    }
done

mkdir -p "${CARGO_TARGET_DIR:-target}/planted"
planted=$(cd "${CARGO_TARGET_DIR:-target}/planted" && pwd)
tree=$planted/tree
patches=$PWD/testing/defects
export CARGO_TARGET_DIR="$planted/target"
workbench="$CARGO_TARGET_DIR/debug/leasehold-workbench"
git worktree prune
[ -e "$tree/.git" ] || git worktree add --quiet --force --detach "$tree"
git -C "$tree" checkout --quiet --force --detach "$(git rev-parse HEAD)"
failed=0

# What is built and tested is noisy: a mistake brings warnings.
logged() { (cd "$tree" && "$@") >"$planted/log" 2>&1; }
# The dev profile: such a test shares its dependencies with the command.
test_of() { # TARGET [ARGUMENT]
    target=${1%-sim}
    shift
    logged timeout 1800 cargo test --quiet --profile dev -p leasehold-sim --test "$target" -- "$@"
}
model() {
    export RUSTFLAGS="--cfg loom -A warnings ${RUSTFLAGS:-}" CARGO_TARGET_DIR="$CARGO_TARGET_DIR/loom"
    logged timeout 1800 cargo test --quiet --release -p leasehold-alloc --lib -- "$@"
}

# Builds what a hunt needs.
ready() { # HUNT
    case $1 in
        stress | ranks | conformance) logged cargo build --quiet -p leasehold-workbench ;;
        cuda-sim | mps-sim) test_of "$1" --list ;;
        model) (model --list) ;;
    esac
}

# A crash is a finding too, and so is a run that never ends.
seeds() { # [OPTION]
    seed=0
    while [ "$seed" -lt 50 ]; do
        if ! RUST_BACKTRACE=0 timeout 120 "$workbench" stress "$@" --seed "$seed" --seeds 1 \
            --timeout 10 --shrink 0 --json >/dev/null 2>&1; then
            echo ": seed $seed"
            return
        fi
        seed=$((seed + 1))
    done
    return 1
}

# Whether a hunt finds something.
hunt() { # HUNT [ARGUMENT]
    kind=$1
    shift
    case $kind in
        stress) seeds --device "$@" --ops 1500 --threads 4 ;;
        # What finds them: a rank that waits for the call that was left out; the comparison of the
        # ranks' calls for the order, the root and the line; values for the count, which is wrong on
        # all ranks alike; a read that must fail for the poison.
        ranks) seeds --device "$@" --ops 200 --ranks 4 ;;
        conformance)
            timeout 120 "$workbench" conformance --device sim:0 --filter "$1" 2>&1 | grep -q FAILED
            ;;
        cuda-sim | mps-sim) ! test_of "$kind" "$1" ;;
        model) ! (model "models::$1") ;;
    esac
}

plant() { # NAME
    git -C "$tree" apply "$patches/$1.patch"
    sed -n 's/^Found by: //p' "$patches/$1.patch" >"$planted/hunts"
    while read -r line <&3; do
        # shellcheck disable=SC2086
        if ! ready $line; then
            cat "$planted/log" >&2
            echo "$1: does not build for $line" >&2
            failed=1
        elif seen=$(hunt $line); then
            echo "$1: $line$seen"
        else
            echo "$1: not found by $line" >&2
            failed=1
        fi
    done 3<"$planted/hunts"
    git -C "$tree" apply --reverse "$patches/$1.patch"
}

# Nothing is found where nothing is planted.
clean() { # KIND
    ready stress || {
        cat "$planted/log" >&2
        exit 1
    }
    for device in cpu:0 sim:0 'cuda:0 --sim'; do
        # shellcheck disable=SC2086
        case $1 in
            stress) "$workbench" stress --device $device --seeds 3 --ops 400 --threads 4 --timeout 60 --shrink 0 ;;
            ranks) "$workbench" stress --device $device --ranks 4 --seeds 3 --timeout 60 --shrink 0 ;;
        esac || failed=1
    done
}
if [ $# -eq 0 ]; then
    clean stress
    "$workbench" stress --device cpu:0 --through c --seeds 3 --ops 400 --threads 4 --timeout 60 --shrink 0 || failed=1
    "$workbench" conformance --device sim:0 --filter 212-216 >/dev/null || failed=1
    "$workbench" conformance --device sim:0 --filter 224-239 >/dev/null || failed=1
fi
case " $* " in
    "  " | *" collective "*) clean ranks ;;
esac

for patch in $(order); do
    name=$(basename "$patch" .patch)
    case " $* " in
        "  " | *" $name "*) plant "$name" ;;
        *" collective "*) ! grep -q '^Found by: ranks ' "$patch" || plant "$name" ;;
    esac
done
exit "$failed"
