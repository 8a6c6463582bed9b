#!/bin/sh
# The programs that users run, and what they promise. They are the build of ci/test.sh; with
# --release those of the release profile, which README's first command makes.
#
#   ci/programs.sh [--release] PART [ARGUMENT…]
#
#   main-job     the examples in Rust; the bundled model's tokens and logits beside the golden
#                values, in both modes, with one to four threads; models of other shapes; the memory
#                of a run, with --release also that of a model of 200 million parameters; simulated
#                devices; the command alone, copied elsewhere, in an empty environment
#   serve        the server with the bundled model, and OpenAI's client: texts, streams, chats,
#                errors, clients that go, a full queue, weights that sleep, the end
#   valgrind     the command: no invalid access, nothing uninitialised read, nothing lost at its
#                end; the instructions of steps of batches
#   c-examples   programs in C, C++ and LLVM's IR over the installed libraries
#   stress       random programs over the safe API against a sequential model, on the CPU, the
#                simulated device, and CUDA and Metal over simulated drivers; programs of 4 ranks.
#                20 seeds of 2,000 steps by 8 threads; on CUDA and Metal 5, and 10 with failing
#                calls; 20 of 300 steps of ranks, and 10 with late commands; 2 of 1,000 steps by
#                calls of the C ABI
#   stress SEEDS OPS THREADS   so many on each, and with failing calls on all simulated ones; 300 by
#                calls of the C ABI. SEED=N begins with another seed
set -eu
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
examples=$target/debug/examples
programs=$target/debug
libraries=$target/debug/deps
if [ "${1:-}" = --release ]; then
    shift
    programs=$target/release
    libraries=$target/release
    # At once, so that all have one build of the libraries.
    cargo build --quiet --locked --release -p leasehold-cli -p leasehold-workbench -p leasehold-capi -p leasehold-memory
fi
# Builds nothing where ci/test.sh has run.
cargo test --quiet --locked --workspace --no-run
command=$programs/leasehold
workbench=$programs/leasehold-workbench
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

missing() {
    if [ -n "${LEASEHOLD_REQUIRE_TOOLS:-}" ]; then
        echo "$1 is required and missing" >&2
        exit 1
    fi
    echo "skipped: no $1"
}

have() { command -v "$1" >/dev/null 2>&1; }

main_job() {
    for example in quickstart foreign_framework multiply_by_maps; do
        said=$("$examples/$example" 2>&1) || { echo "$said" && exit 1; }
        echo "example $example: runs"
    done
    check() { "$examples/check_golden" "$command" "$@"; }
    simulated() { "$examples/check_golden" "$workbench" "$@"; }
    check models/llama/demo-model/golden.json threads="${THREADS:-1,2,3,4}"
    for model in models/llama/tests/models/*/; do
        model=${model%/}
        printf '%s: ' "${model##*/}"
        check "$model/golden.json" model="$model" threads=1,2
    done

    # Weights are mapped on the CPU and loaded into device memory on the simulated device. (A
    # segment of Metal has 32 MiB, more than the model.)
    memory() { "$examples/check_memory" "$workbench" "$@"; }
    for device in 'cpu:0' 'cuda:0 --sim' 'sim:0'; do
        for mode in eager graph; do
            printf 'memory on %s, %s: ' "$device" "$mode"
            # shellcheck disable=SC2086
            memory 100 --tokens 32 --mode "$mode" --device $device
        done
    done
    if [ "$programs" = "$target/release" ]; then
        "$examples/generate_model" "$work/model"
        for mode in eager graph; do
            printf 'memory of 200 million parameters, %s: ' "$mode"
            memory 1.05 --model "$work/model" --prompt-ids 316,221 --tokens 2 --mode "$mode" --device cuda:0 --sim
        done
    fi

    printf 'over the simulated CUDA driver, with the race detector on: '
    simulated models/llama/demo-model/golden.json device=cuda:0 sim="${SEED:-1}"
    printf 'over the simulated Metal driver, with the race detector on: '
    simulated models/llama/demo-model/golden.json device=mps:0 sim="${SEED:-1}"
    # Without a GPU: a reason and status 1, no panic.
    if [ "${LEASEHOLD_GPU:-0}" = 0 ]; then
        status=0
        why=$("$command" run --device cuda:0 2>&1 >/dev/null) || status=$?
        [ "$status" -eq 1 ] && case $why in *cuda*) true ;; *) false ;; esac
        echo "cuda:0 without a driver: $why"
    fi

    mkdir "$work/elsewhere"
    cp "$command" "$work/elsewhere/"
    (cd "$work/elsewhere" && env -i ./leasehold devices >devices.txt && env -i ./leasehold run --tokens 8 >text.txt 2>progress.txt)
    [ -s "$work/elsewhere/devices.txt" ] && [ -s "$work/elsewhere/text.txt" ]
    echo "the binary runs alone: $(wc -c <"$command") bytes"
}

serve() {
    "$(ci/venv.sh serve 'openai>=2,<3')/python" models/serve/test_openai.py "$target/debug/leasehold-serve" models/llama/demo-model
}

valgrind_clean() {
    clean() {
        if ! valgrind --quiet --error-exitcode=9 --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite \
            "$command" "$@" >"$work/out" 2>"$work/err"; then
            cat "$work/out" "$work/err"
            echo "leasehold $* is not clean" >&2
            exit 1
        fi
        echo "clean: leasehold $*"
    }

    clean devices --json
    clean run --json --prompt-ids 316,221 --tokens 3 --threads 1
    clean run --prompt-ids 316,221 --tokens 3 --threads 2
}

c_examples() {
    LEASEHOLD_LIBRARIES=$libraries crates/capi/install.sh "$work"
    for library in leasehold_memory leasehold_capi; do
        readelf -d "$work/lib/lib$library.so" | grep -q "SONAME.*\[lib$library.so.0\]" || { echo "$library has no name" >&2; exit 1; }
        [ -e "$work/lib/lib$library.so.0" ] || { echo "lib$library.so.0 is missing" >&2; exit 1; }
    done

    # Through pkg-config where it is installed, as a user would.
    if have pkg-config; then
        flags=$(PKG_CONFIG_PATH="$work/lib/pkgconfig" pkg-config --cflags --libs leasehold_memory)
        static=$(PKG_CONFIG_PATH="$work/lib/pkgconfig" pkg-config --static --libs-only-l leasehold_memory)
        allocator=$(PKG_CONFIG_PATH="$work/lib/pkgconfig" pkg-config --cflags --libs leasehold)
    else
        missing pkg-config
        flags="-I$work/include -L$work/lib -lleasehold_memory"
        static="-lleasehold_memory -lpthread -ldl -lm"
        allocator="-I$work/include -L$work/lib -lleasehold_capi"
    fi

    if have gcc; then
        # $flags is a list of words.
        # shellcheck disable=SC2086
        gcc -std=c11 -O2 -g -Wall -Wextra -Werror tl/examples/program.c -o "$work/program" $flags "-Wl,-rpath,$work/lib"
        "$work/program"
        # The same against the static library.
        # shellcheck disable=SC2086
        gcc -std=c11 -O2 -Wall -Wextra -Werror "-I$work/include" tl/examples/program.c -o "$work/static" \
            "$work/lib/libleasehold_memory.a" ${static#-lleasehold_memory}
        "$work/static"
        # shellcheck disable=SC2086
        gcc -std=c11 -O2 -g -Wall -Wextra -Werror examples/c/allocator.c -o "$work/allocator" $allocator "-Wl,-rpath,$work/lib"
        "$work/allocator"
        # shellcheck disable=SC2086
        gcc -std=c11 -O2 -g -Wall -Wextra -Werror examples/c/runtime.c -o "$work/runtime" $allocator "-Wl,-rpath,$work/lib"
        "$work/runtime"
        # shellcheck disable=SC2086
        gcc -std=c11 -O2 -g -Wall -Wextra -Werror -pthread examples/c/ranks.c -o "$work/ranks" $allocator "-Wl,-rpath,$work/lib"
        "$work/ranks"
        # The library that cargo built, beside which nothing has another name.
        gcc -std=c11 examples/c/allocator.c -o "$work/beside" -Icrates/capi/include "-L$libraries" -lleasehold_capi \
            "-Wl,-rpath,$(realpath "$libraries")"
        "$work/beside" >/dev/null
        if have valgrind; then
            for program in program allocator runtime ranks; do
                valgrind --quiet --error-exitcode=9 --leak-check=full --show-leak-kinds=definite \
                    --errors-for-leak-kinds=definite "$work/$program"
            done
        else
            missing valgrind
        fi
    else
        missing gcc
    fi

    if have g++; then
        for program in mlp saxpy; do
            # shellcheck disable=SC2086
            g++ -std=c++17 -O2 -g -Wall -Wextra -Wshadow -Werror "examples/c/$program.cpp" -o "$work/$program" $allocator "-Wl,-rpath,$work/lib"
            "$work/$program"
        done
    else
        missing g++
    fi

    # Found by CMake, as a user's project would.
    if have cmake && have g++; then
        mkdir "$work/project"
        cp examples/c/mlp.cpp "$work/project/"
        cat >"$work/project/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.16)
project(mlp CXX)
find_package(leasehold 0.1 REQUIRED)
add_executable(mlp mlp.cpp)
target_link_libraries(mlp PRIVATE leasehold::leasehold)
CMAKE
        cmake -S "$work/project" -B "$work/project/build" "-DCMAKE_PREFIX_PATH=$work" >"$work/cmake.log" ||
            { cat "$work/cmake.log" >&2; exit 1; }
        cmake --build "$work/project/build" >"$work/cmake.log" || { cat "$work/cmake.log" >&2; exit 1; }
        "$work/project/build/mlp"
    else
        echo "skipped: no cmake"
    fi

    if have llc && have gcc; then
        # LLVM 14 wants to be told about opaque pointers, later ones know nothing else.
        llc -filetype=obj -relocation-model=pic tl/examples/program.ll -o "$work/ir.o" 2>"$work/llc.log" ||
            llc -opaque-pointers -filetype=obj -relocation-model=pic tl/examples/program.ll -o "$work/ir.o"
        # shellcheck disable=SC2086
        gcc "$work/ir.o" -o "$work/ir" $flags "-Wl,-rpath,$work/lib"
        "$work/ir"
    elif have clang; then
        # shellcheck disable=SC2086
        clang -x ir tl/examples/program.ll -x none -o "$work/ir" $flags "-Wl,-rpath,$work/lib"
        "$work/ir"
    else
        missing "llc or clang"
    fi
}

stress() {
    status=0
    ranks() { "$workbench" stress --seed "${SEED:-0}" --ranks 4 "$@" || status=1; }
    try() { "$workbench" stress --seed "${SEED:-0}" --ops "$ops" --threads "$threads" "$@" || status=1; }
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
        "$workbench" stress --seed "${SEED:-0}" --seeds "$through" --ops 1000 --threads 4 --through c --device $device || status=1
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
    return "$status"
}

part=${1:-}
[ $# -eq 0 ] || shift
case $part in
    main-job) main_job ;;
    serve) serve ;;
    valgrind) valgrind_clean && ci/instructions.sh tests ;;
    c-examples) c_examples ;;
    stress) stress "$@" ;;
    *) sed -n 's/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
