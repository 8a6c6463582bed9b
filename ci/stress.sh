#!/bin/sh
# Random programs over the safe API against a sequential model: on the CPU, on the simulated device
# and on CUDA and Metal over the simulated drivers. Programs of 4 ranks where there are collectives.
#
#   ci/stress.sh                      20 seeds of 2,000 steps by 8 threads; on CUDA and Metal 5, and
#   10 with failing calls; 20 of 300 steps of ranks, and 10 with late commands; 2 of 1,000 steps by
#   calls of the C ABI, on each
#   ci/stress.sh SEEDS OPS THREADS    for example 1000 10000 8: so many on each, and with failing
#   calls on all simulated ones; 300 by calls of the C ABI
#   SEED=N ci/stress.sh …             beginning with another seed
set -eu
cd "$(dirname "$0")/.."
command=${CARGO_TARGET_DIR:-target}/release/leasehold-workbench
# As ci/main-job.sh builds it.
cargo build --quiet --release -p leasehold-cli -p leasehold-workbench
status=0
ranks() { "$command" stress --seed "${SEED:-0}" --ranks 4 "$@" || status=1; }
try() { "$command" stress --seed "${SEED:-0}" --ops "$ops" --threads "$threads" "$@" || status=1; }
seeds=${1:-20} ops=${2:-2000} threads=${3:-8}
try --seeds "$seeds" --device cpu:0
try --seeds "$seeds" --device sim:0
if [ $# -eq 0 ]; then
    for device in cuda:0 mps:0; do
        try --seeds 5 --device "$device" --sim
        try --seeds 10 --device "$device" --sim --faults
    done
else
    try --seeds "$seeds" --device sim:0 --faults
    for device in cuda:0 mps:0; do
        try --seeds "$seeds" --device "$device" --sim
        try --seeds "$seeds" --device "$device" --sim --faults
    done
fi
through=2
if [ $# -gt 0 ]; then through=300; fi
for device in cpu:0 sim:0 'cuda:0 --sim' 'cuda:0 --sim --faults'; do
    # shellcheck disable=SC2086
    "$command" stress --seed "${SEED:-0}" --seeds "$through" --ops 1000 --threads 4 --through c --device $device || status=1
done
few=20 late=10
if [ $# -gt 0 ]; then few=$seeds late=$seeds; fi
ranks --seeds "$few" --device cpu:0
for device in sim:0 'cuda:0 --sim'; do
    # shellcheck disable=SC2086
    ranks --seeds "$few" --device $device
    # shellcheck disable=SC2086
    ranks --seeds "$late" --faults --device $device
done
exit "$status"
