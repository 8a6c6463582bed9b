#!/bin/sh
# Installs the C libraries for programs: headers, shared and static libraries, pkg-config files, and a
# CMake package (find_package(leasehold), target leasehold::leasehold; leasehold_DIR or
# CMAKE_PREFIX_PATH is PREFIX).
#
#   crates/capi/install.sh PREFIX          libleasehold_capi and libleasehold_memory
#   crates/capi/install.sh PREFIX --sim    libleasehold_capi_sim too, for tests without a GPU
#
# A shared library is libNAME.so.VERSION, with the name libNAME.so.0 for programs at run time
# (SONAME) and libNAME.so for the linker. Cargo gives no such names, so the static library is linked
# again, with the functions of the header alone. DESTDIR is put before PREFIX, as packagers need it.
# LEASEHOLD_LIBRARIES is a folder of static libraries that are built already. Needs Linux, cargo and cc.
set -eu
prefix=${1:?usage: install.sh PREFIX [--sim]}
case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac
cd "$(dirname "$0")/../.."
target=${CARGO_TARGET_DIR:-target}
root=${DESTDIR:-}$prefix
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
soversion=${version%%.*}

set -- leasehold_memory leasehold_capi ${2:+leasehold_capi_sim}
for library; do packages="${packages:-} -p $(echo "$library" | tr _ -)"; done
libraries=${LEASEHOLD_LIBRARIES:-$target/release}
# $packages is a list of words.
# shellcheck disable=SC2086
[ -n "${LEASEHOLD_LIBRARIES:-}" ] || {
    echo "compiling $* for some minutes"
    cargo build --quiet --release --locked $packages
}

mkdir -p "$root/include" "$root/lib/pkgconfig"
cp tl/include/*.h crates/capi/include/*.h crates/capi/include/*.hpp "$root/include/"
for library; do
    cp "$libraries/lib$library.a" "$root/lib/"
    case $library in leasehold_memory) functions='tl_*' ;; *) functions='leasehold_*' ;; esac
    exports=$(mktemp)
    echo "{ global: $functions; local: *; };" >"$exports"
    # As cargo links: not unloadable, since its threads end after a program closes it.
    ${CC:-cc} -shared -o "$root/lib/lib$library.so.$version" "-Wl,-soname,lib$library.so.$soversion" \
        "-Wl,--version-script,$exports" -Wl,--gc-sections,--strip-debug,-z,nodelete,-z,relro,-z,now,-z,defs \
        -Wl,--whole-archive "$libraries/lib$library.a" -Wl,--no-whole-archive -lpthread -ldl -lm
    rm "$exports"
    ln -sf "lib$library.so.$version" "$root/lib/lib$library.so.$soversion"
    ln -sf "lib$library.so.$soversion" "$root/lib/lib$library.so"
done
for config in tl/include/leasehold_memory crates/capi/include/leasehold; do
    sed -e "s|@PREFIX@|$prefix|" -e "s|@VERSION@|$version|" "$config.pc.in" >"$root/lib/pkgconfig/$(basename "$config").pc"
done
mkdir -p "$root/lib/cmake/leasehold"
for config in leaseholdConfig leaseholdConfigVersion; do
    sed -e "s|@VERSION@|$version|" "crates/capi/cmake/$config.cmake.in" >"$root/lib/cmake/leasehold/$config.cmake"
done
echo "installed headers, libraries, pkg-config files and a CMake package under $root"
