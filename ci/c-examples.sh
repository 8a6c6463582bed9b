#!/bin/sh
# Builds and runs examples/c against the shared library of crates/memory; `install PREFIX` installs
# header, libraries and pkg-config file instead. With LEASEHOLD_REQUIRE_TOOLS set, a missing tool is
# a failure.
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
cargo build --quiet --release -p leasehold-memory
crate=crates/memory

install_to() {
    mkdir -p "$1/include" "$1/lib/pkgconfig"
    cp "$crate/include/leasehold_memory.h" "$1/include/"
    cp "$target/release/libleasehold_memory.a" "$target"/release/libleasehold_memory.so "$1/lib/"
    sed "s|@PREFIX@|$1|" "$crate/include/leasehold_memory.pc.in" >"$1/lib/pkgconfig/leasehold_memory.pc"
}

missing() {
    if [ -n "${LEASEHOLD_REQUIRE_TOOLS:-}" ]; then
        echo "$1 is required and missing" >&2
        exit 1
    fi
    echo "skipped: no $1"
}

have() { command -v "$1" >/dev/null 2>&1; }

if [ "${1:-}" = install ]; then
    install_to "${2:?usage: c-examples.sh install PREFIX}"
    exit
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
install_to "$work"

# Through pkg-config where it is installed, as a user would.
if have pkg-config; then
    flags=$(PKG_CONFIG_PATH="$work/lib/pkgconfig" pkg-config --cflags --libs leasehold_memory)
    static=$(PKG_CONFIG_PATH="$work/lib/pkgconfig" pkg-config --static --libs-only-l leasehold_memory)
else
    missing pkg-config
    flags="-I$work/include -L$work/lib -lleasehold_memory"
    static="-lleasehold_memory -lpthread -ldl -lm"
fi

if have gcc; then
    # $flags is a list of words.
    # shellcheck disable=SC2086
    gcc -std=c11 -O2 -g -Wall -Wextra -Werror examples/c/program.c -o "$work/program" $flags "-Wl,-rpath,$work/lib"
    "$work/program"
    # The same against the static library.
    # shellcheck disable=SC2086
    gcc -std=c11 -O2 -Wall -Wextra -Werror "-I$work/include" examples/c/program.c -o "$work/static" \
        "$work/lib/libleasehold_memory.a" ${static#-lleasehold_memory}
    "$work/static"
    if have valgrind; then
        valgrind --quiet --error-exitcode=9 --leak-check=full --show-leak-kinds=definite \
            --errors-for-leak-kinds=definite "$work/program"
    else
        missing valgrind
    fi
else
    missing gcc
fi

if have llc && have gcc; then
    # LLVM 14 wants to be told about opaque pointers, later ones know nothing else.
    llc -filetype=obj -relocation-model=pic examples/c/program.ll -o "$work/ir.o" 2>"$work/llc.log" ||
        llc -opaque-pointers -filetype=obj -relocation-model=pic examples/c/program.ll -o "$work/ir.o"
    # shellcheck disable=SC2086
    gcc "$work/ir.o" -o "$work/ir" $flags "-Wl,-rpath,$work/lib"
    "$work/ir"
elif have clang; then
    # shellcheck disable=SC2086
    clang -x ir examples/c/program.ll -x none -o "$work/ir" $flags "-Wl,-rpath,$work/lib"
    "$work/ir"
else
    missing "llc or clang"
fi
