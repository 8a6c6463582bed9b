#!/bin/sh
# Random programs over the safe API against a sequential model: on the CPU, on the simulated device and on CUDA over the simulated driver,
# on the last two also with faults.
#
#   ci/stress.sh                      20 seeds of 2,000 steps by 8 threads
#   ci/stress.sh SEEDS OPS THREADS    for example 1000 10000 8
#   SEED=N ci/stress.sh …             beginning with another seed
set -eu
cd "$(dirname "$0")/.."
[ $# -eq 3 ] || set -- 20 2000 8
command=${CARGO_TARGET_DIR:-target}/release/leasehold
cargo build --quiet --release
try() { "$command" stress --seed "${SEED:-0}" --seeds "$seeds" --ops "$ops" --threads "$threads" "$@"; }
seeds=$1 ops=$2 threads=$3
try --device cpu:0
try --device sim:0
try --device cuda:0 --sim
try --device sim:0 --faults
try --device cuda:0 --sim --faults
