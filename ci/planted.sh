#!/bin/sh
# Plants mistakes in the crates, one at a time, and has `leasehold stress` look for them: each must
# be found within 50 seeds, and without one nothing may be found. Those of growing memory and of the
# graph budget are for `leasehold conformance`. The feature `planted-defects` is built here alone,
# and LEASEHOLD_DEFECT names the mistake.
#
#   ci/planted.sh                            all
#   ci/planted.sh PassedEarly MissingWait    these
#   ci/planted.sh collective                 those of collectives, by programs of ranks
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
cargo build --quiet -p leasehold-cli --features planted-defects
# Under a name of its own: nobody takes it for the command.
leasehold="$target/debug/leasehold-planted"
cp "$target/debug/leasehold" "$leasehold"
failed=0
threads="--ops 1500 --threads 4"
# A crash is a finding too, and so is a run that never ends.
hunt() { # DEFECT DEVICE [--sim]
    defect=$1
    shift
    seed=0
    while [ "$seed" -lt 50 ]; do
        # shellcheck disable=SC2086
        if ! LEASEHOLD_DEFECT=$defect RUST_BACKTRACE=0 timeout 120 "$leasehold" stress --device "$@" --seed "$seed" --seeds 1 $threads \
            --patience 10 --shrink 0 --json >/dev/null 2>&1; then
            echo "$defect: seed $seed on $*"
            return
        fi
        seed=$((seed + 1))
    done
    echo "$defect: not found by 50 seeds on $*" >&2
    failed=1
}
wanted=$*
plant() { # DEFECT DEVICE [--sim]
    case " $wanted " in
        "  " | *" $1 "*) hunt "$@" ;;
    esac
}
if [ -z "$wanted" ]; then
    for device in cpu:0 sim:0 'cuda:0 --sim'; do
        # shellcheck disable=SC2086
        "$leasehold" stress --device $device --seeds 3 --ops 400 --threads 4 --patience 60 --shrink 0 || failed=1
    done
    "$leasehold" stress --device cpu:0 --through c --seeds 3 --ops 400 --threads 4 --patience 60 --shrink 0 || failed=1
    "$leasehold" conformance --device sim:0 --filter 212-216 >/dev/null || failed=1
    "$leasehold" conformance --device sim:0 --filter 224-239 >/dev/null || failed=1
fi
case " $wanted " in
    "  " | *" collective "*)
        for device in cpu:0 sim:0 'cuda:0 --sim'; do
            # shellcheck disable=SC2086
            "$leasehold" stress --device $device --ranks 4 --seeds 3 --patience 60 --shrink 0 || failed=1
        done
        ;;
esac
plant KnowsTooMuch sim:0
plant LeaseForgotten cpu:0
plant PassedEarly sim:0
plant ReadUnmarked sim:0
plant ReadBeforeWrite sim:0
plant WriteBeforeRead sim:0
plant WriteUnrecorded sim:0
plant OldBuffers cpu:0
plant SmallerPitch cpu:0
plant RecordUnlocked sim:0
plant OldGrid cpu:0
plant TurnRefused cpu:0
plant CompletionLost cpu:0
plant HandoverSkipped cpu:0
plant OpenedTwice sim:0
plant RetainLost cpu:0 --through c
plant OperandAsRead cpu:0 --through c
plant RecordingLeaked cpu:0 --through c
plant WaitSkipped cpu:0
plant FlagReadEarly cpu:0
plant RowLeftOut sim:0
plant WrittenReadEarly cuda:0 --sim
plant BodyUnseen sim:0
plant PieceUnordered sim:0
plant PartLimitStays sim:0
plant SourceReadEarly cuda:0 --sim
plant CheckedEarly sim:0
plant PartEndsEarly sim:0
# Not KeepDroppedEarly: the driver takes pageable bytes along at the call, so no safe program sees
# it. The tests of leasehold-cuda-sim do.
for defect in MissingWait StaleMark ReuseBeforeCompletion StaleGraphAddress EarlyPublication DeferredOutOfOrder \
    EventRecycledEarly MissingEdge WordBeforeWork; do
    plant "$defect" cuda:0 --sim
done
# The cases of conformance find these: of growing memory, and of the graph budget.
conform() { # DEFECT CASES
    case " $wanted " in
        "  " | *" $1 "*)
            if LEASEHOLD_DEFECT=$1 timeout 120 "$leasehold" conformance --device sim:0 --filter "$2" 2>&1 | grep -q FAILED; then
                echo "$1: conformance on sim:0"
            else
                echo "$1: not found by conformance on sim:0" >&2
                failed=1
            fi
            ;;
    esac
}
for defect in UnmappedEarly CountedTwice LimitMissed; do
    conform "$defect" 212-216
done
conform CheckedEarly 236-239
conform SharedGivenBack 230-231
conform PartLimitStays 232-235
for defect in TakenInFlight ExecutableTwice; do
    conform "$defect" 224-229
done
plant ExecutableTwice sim:0
# What finds them: a rank that waits for the call that was left out; the comparison of the ranks'
# calls for the order, the root and the line; values for the count, which is wrong on all ranks
# alike; a read that must fail for the poison.
threads="--ops 200 --ranks 4"
for defect in CallSkipped OrderSwapped WrongCount WrongRoot LineMissing LatePoison; do
    case " $wanted " in
        *" collective "*) hunt "$defect" cuda:0 --sim ;;
        *) plant "$defect" cuda:0 --sim ;;
    esac
done
exit "$failed"
