#!/bin/sh
# Random programs over the safe API against a sequential model: on the CPU, on the simulated device
# and on CUDA over the simulated driver.
#
#   ci/stress.sh                      20 seeds of 2,000 steps by 8 threads; on CUDA 5, and 10 with
#   failing calls
#   ci/stress.sh SEEDS OPS THREADS    for example 1000 10000 8: so many on each, and with failing
#   calls on both simulated ones
#   SEED=N ci/stress.sh …             beginning with another seed
set -eu
cd "$(dirname "$0")/.."
command=${CARGO_TARGET_DIR:-target}/release/leasehold
cargo build --quiet --release
status=0
try() { "$command" stress --seed "${SEED:-0}" --ops "$ops" --threads "$threads" "$@" || status=1; }
seeds=${1:-20} ops=${2:-2000} threads=${3:-8}
try --seeds "$seeds" --device cpu:0
try --seeds "$seeds" --device sim:0
if [ $# -eq 0 ]; then
    try --seeds 5 --device cuda:0 --sim
    try --seeds 10 --device cuda:0 --sim --faults
else
    try --seeds "$seeds" --device cuda:0 --sim
    try --seeds "$seeds" --device sim:0 --faults
    try --seeds "$seeds" --device cuda:0 --sim --faults
fi
exit "$status"
