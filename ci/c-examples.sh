#!/bin/sh
# Installs the C libraries into a folder of its own, and builds and runs examples/c against them as
# a user would: through pkg-config, against the shared and the static libraries. With
# LEASEHOLD_REQUIRE_TOOLS set, a missing tool is a failure.
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}

missing() {
    if [ -n "${LEASEHOLD_REQUIRE_TOOLS:-}" ]; then
        echo "$1 is required and missing" >&2
        exit 1
    fi
    echo "skipped: no $1"
}

have() { command -v "$1" >/dev/null 2>&1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
crates/capi/install.sh "$work"
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
    gcc -std=c11 examples/c/allocator.c -o "$work/beside" -Icrates/capi/include "-L$target/release" -lleasehold_capi \
        "-Wl,-rpath,$(realpath "$target/release")"
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
    # shellcheck disable=SC2086
    g++ -std=c++17 -O2 -g -Wall -Wextra -Werror examples/c/mlp.cpp -o "$work/mlp" $allocator "-Wl,-rpath,$work/lib"
    "$work/mlp"
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
