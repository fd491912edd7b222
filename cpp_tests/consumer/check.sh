#!/usr/bin/env bash
# Builds and runs the project beside this file in every way a user has of getting kvpages.
set -euo pipefail

if [[ ${1-} == --help ]]; then
    cat <<'HELP'
usage: cpp_tests/consumer/check.sh

Installs kvpages to a temporary prefix, moves that prefix, and builds and runs a small project
against it: CMake's find_package() and pkg-config, C and C++, shared and static; from DESTDIR;
and from source with FetchContent. The installed examples are built, too. Everything happens in a
temporary directory.
HELP
    exit 0
fi

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source=$(cd "$here/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
generator=()
if command -v ninja >/dev/null; then
    generator=(-G Ninja)
fi
lib=lib/$(cc -print-multiarch) # Debian's own: lib/x86_64-linux-gnu

note() { echo "consumer: $*"; }

fail() {
    echo "consumer: $*" >&2
    exit 1
}

# Runs programs and requires each to greet with the version.
expect_greeting() {
    local program
    for program in "$@"; do
        "$program" | tee "$work/output"
        grep -q "^kvpages $version from C" "$work/output" || fail "$program does not greet"
    done
}

# use_project NAME CMAKE_ARGUMENT...: builds and runs all programs of the project.
use_project() {
    local build=$work/$1
    shift
    cmake -S "$here" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release "$@" >"$work/log" ||
        { cat "$work/log" && fail "cannot configure with $*"; }
    cmake --build "$build" >"$work/log" || { cat "$work/log" && fail "cannot build with $*"; }
    expect_greeting "$build"/c*_{shared,static,kvpages}
}

version=$(sed -n 's/^version = "\([0-9.]*\)".*/\1/p' "$source/Cargo.toml" | head -1)

note "install to a prefix"
cmake -S "$source" -B "$work/build" "${generator[@]}" -DCMAKE_INSTALL_LIBDIR="$lib" \
    -DKVPAGES_BUILD_TESTS=OFF -DKVPAGES_BUILD_EXAMPLES=OFF -DKVPAGES_BUILD_BENCHMARKS=OFF \
    >/dev/null
cmake --build "$work/build"
cmake --install "$work/build" --prefix "$work/first" >/dev/null
for file in include/kvpages/kvpages.h include/kvpages/kvpages.hpp "$lib/libkvpages.a" \
    "$lib/libkvpages.so" "$lib/cmake/kvpages/kvpagesConfig.cmake" "$lib/pkgconfig/kvpages.pc" \
    bin/kvpages; do
    [[ -e $work/first/$file ]] || fail "$file is not installed"
done
if grep -rIl -e "$work" -e "$source" "$work/first"; then
    fail "the files above name the directory they were built in or installed to"
fi
soname=$(readelf -d "$work/first/$lib/libkvpages.so" | sed -n 's/.*soname: \[\(.*\)\]/\1/p')
[[ -e $work/first/$lib/$soname ]] || fail "the SONAME $soname has no file"

note "find_package, after moving the prefix"
mv "$work/first" "$work/prefix"
use_project found -DCMAKE_PREFIX_PATH="$work/prefix"
note "the tool, after moving the prefix"
"$work/prefix/bin/kvpages" plan "$source/tests/cli/configs/llama.json" --memory 20GiB |
    tee "$work/output"
grep -q "131,072 bytes" "$work/output" || fail "the installed tool does not plan"
note "find_package, BUILD_SHARED_LIBS"
use_project dynamic -DCMAKE_PREFIX_PATH="$work/prefix" -DBUILD_SHARED_LIBS=ON
readelf -d "$work/dynamic/c_kvpages" | grep "$soname" >/dev/null ||
    fail "kvpages::kvpages ignores BUILD_SHARED_LIBS"
note "find_package, a project in C alone"
use_project found-c -DCMAKE_PREFIX_PATH="$work/prefix" -DCONSUMER_CXX=OFF

note "examples, as they are installed"
cp -r "$work/prefix/share/doc/kvpages/examples" "$work/examples"
cmake -S "$work/examples" -B "$work/examples/build" "${generator[@]}" \
    -DCMAKE_PREFIX_PATH="$work/prefix" >"$work/log" ||
    { cat "$work/log" && fail "cannot configure the examples"; }
cmake --build "$work/examples/build" --parallel >"$work/log" ||
    { cat "$work/log" && fail "cannot build the examples"; }
ctest --test-dir "$work/examples/build" -R '^example\.(plain_c|own_layout)$' --no-tests=error \
    --output-on-failure

note "find_package, versions"
mkdir "$work/versions"
cat >"$work/versions/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.22)
project(versions LANGUAGES C)
find_package(kvpages ${WANTED} CONFIG QUIET)
message(STATUS "found=${kvpages_FOUND}")
CMAKE
for wanted in 0.0.9=0 "${version%.*}=1" "$version=1" 0.99=0 1.0=0; do
    cmake -S "$work/versions" -B "$work/versions/build" -DCMAKE_PREFIX_PATH="$work/prefix" \
        -DWANTED="${wanted%=*}" >"$work/log"
    grep -q "found=${wanted#*=}" "$work/log" || fail "find_package(kvpages ${wanted%=*}) is wrong"
    rm -r "$work/versions/build"
done

note "DESTDIR"
DESTDIR=$work/dest cmake --install "$work/build" --prefix /opt/kvpages >/dev/null
use_project dest -DCMAKE_PREFIX_PATH="$work/dest/opt/kvpages"

note "pkg-config"
export PKG_CONFIG_PATH=$work/prefix/$lib/pkgconfig
read -ra flags <<<"$(pkg-config --cflags --libs kvpages)"
libdir=$(pkg-config --variable=libdir kvpages)
read -ra cflags <<<"$(pkg-config --cflags kvpages)"
read -ra private <<<"$(pkg-config --static --libs-only-l kvpages | sed 's/-lkvpages//')"
cc "$here/main.c" "${flags[@]}" -Wl,-rpath,"$libdir" -o "$work/pc_c_shared"
c++ -std=c++17 "$here/main.cc" "${flags[@]}" -Wl,-rpath,"$libdir" -o "$work/pc_cxx_shared"
cc "${cflags[@]}" "$here/main.c" "$libdir/libkvpages.a" "${private[@]}" -o "$work/pc_c_static"
c++ -std=c++17 "${cflags[@]}" "$here/main.cc" "$libdir/libkvpages.a" "${private[@]}" \
    -o "$work/pc_cxx_static"
expect_greeting "$work"/pc_{c,cxx}_{shared,static}

note "FetchContent"
use_project fetched -DCONSUMER_KVPAGES_SOURCE="$source"
if [[ -e $work/fetched/_deps/kvpages-build/cpp_tests ]]; then
    fail "a project that includes kvpages gets its tests"
fi
note "FetchContent, a project in C alone"
cmake -S "$here" -B "$work/fetched-c" "${generator[@]}" -DCONSUMER_CXX=OFF \
    -DCONSUMER_KVPAGES_SOURCE="$source" >/dev/null || fail "cannot configure for C alone"
note "all ways work"
