# Shared by the scripts in this folder, which source it. Sets `root` and goes there.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
if ! command -v cargo >/dev/null && [[ -x ${HOME-}/.cargo/bin/cargo ]]; then
    PATH=$HOME/.cargo/bin:$PATH
fi

# Debian packages that building and testing everything needs.
packages=(cmake ninja-build pkg-config g++ libgtest-dev libbenchmark-dev nlohmann-json3-dev)

say() { echo "kvpages: $*"; }

die() {
    echo "kvpages: $*" >&2
    exit 1
}

# has_package NAME: is what the Debian package NAME provides here, wherever it came from?
has_package() {
    case $1 in
        ninja-build) command -v ninja ;;
        cmake | pkg-config | g++ | clang | valgrind | doxygen) command -v "$1" ;;
        libgtest-dev) has_header gtest/gtest.h ;;
        libbenchmark-dev) has_header benchmark/benchmark.h ;;
        nlohmann-json3-dev) has_header nlohmann/json.hpp ;;
        python3-pip) python3 -m pip --version ;;
        *) dpkg -s "$1" ;;
    esac >/dev/null 2>&1
}

has_header() { echo "#include <$1>" | g++ -std=c++17 -fsyntax-only -x c++ -; }

# ensure_packages NAME...: installs those that are missing, with apt-get and as root or through a
# sudo that asks nothing. Returns 1, after saying what to do, when it cannot.
ensure_packages() {
    local name missing=() as_root=()
    for name in "$@"; do
        has_package "$name" || missing+=("$name")
    done
    if ((${#missing[@]} == 0)); then
        return
    fi
    say "missing: ${missing[*]}"
    if ! command -v apt-get >/dev/null; then
        say "there is no apt-get here; install what these Debian packages hold: ${missing[*]}" >&2
        return 1
    fi
    if ((EUID != 0)); then
        as_root=(sudo -n)
        if ! sudo -n true 2>/dev/null; then
            say "not root; run: sudo apt-get install ${missing[*]}" >&2
            return 1
        fi
    fi
    as_root+=(env DEBIAN_FRONTEND=noninteractive)
    say "running apt-get update"
    "${as_root[@]}" apt-get -qq update || say "apt-get update failed; trying the lists at hand" >&2
    say "running apt-get install ${missing[*]}"
    if ! "${as_root[@]}" apt-get -qq install -y --no-install-recommends "${missing[@]}"; then
        say "apt-get failed, see above; not installed: ${missing[*]}" >&2
        return 1
    fi
    for name in "${missing[@]}"; do
        if ! has_package "$name"; then
            say "$name was installed, but what it should provide is not found" >&2
            return 1
        fi
    done
}

ensure_cargo() {
    command -v cargo >/dev/null || die "cargo was not found: install Rust, see https://rustup.rs"
}

# configure DIR CMAKE_ARGUMENT...: keeps the generator of a build directory that exists.
configure() {
    local dir=$1
    shift
    if [[ ! -e $dir/CMakeCache.txt ]] && command -v ninja >/dev/null; then
        set -- -G Ninja "$@"
    fi
    cmake -S . -B "$dir" "$@"
}

# Everything there is, in build/.
configure_release() {
    configure build -DCMAKE_BUILD_TYPE=Release -DKVPAGES_BUILD_TESTS=ON \
        -DKVPAGES_BUILD_BENCHMARKS=ON -DKVPAGES_BUILD_EXAMPLES=ON -DKVPAGES_INSTALL=ON
}

build() { cmake --build "$1" --parallel "${@:2}"; }
