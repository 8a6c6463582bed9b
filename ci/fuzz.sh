#!/bin/sh
# Random operations on the allocator against its model: cheap invariants after each, every invariant
# after each thousand. Kinds of backing, policy and stream use take turns; the seeds are fixed, so
# that a failure happens again.
#
#   ci/fuzz.sh               ten million operations, some ten seconds
#   ci/fuzz.sh 1000000000    a billion, the better part of an hour
set -eu
cd "$(dirname "$0")/.."
LEASEHOLD_FUZZ_STEPS=${1:-10000000} cargo test --quiet --profile quick -p leasehold-alloc --test main -- --exact model::long_fuzz
