# Sourced by scripts/demo and scripts/test: a virtual environment with this package in it.
# Reads KDTREE_VENV (default: .venv beside README.md), PYTHON (default: the first Python >= 3.11 that can build an
# extension) and KDTREE_CUDA (AUTO, ON or OFF; passed to the build). Needs bash 3.2 or later and no standard input.

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

# One sentence on why this interpreter will not do; nothing if it will.
python_objection() {
    "$1" - <<'PY' 2>/dev/null || echo "does not run"
import sys
if sys.version_info < (3, 11):
    print("is Python %d.%d; 3.11 or later is needed" % sys.version_info[:2])
else:
    import os, sysconfig
    try:
        import ensurepip, venv
        if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
            print("has no Python.h (Debian and Ubuntu: apt-get install python3-dev)")
    except ImportError:
        print("cannot make virtual environments (Debian and Ubuntu: apt-get install python3-venv)")
PY
}

# Sets PYTHON_FOUND.
find_python() {
    local candidate objection objections="" names="python3 python3.14 python3.13 python3.12 python3.11 python"
    if [ -n "${PYTHON:-}" ]; then names="$PYTHON"; fi
    for candidate in $names; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        objection=$(python_objection "$candidate")
        if [ -z "$objection" ]; then
            PYTHON_FOUND=$candidate
            return
        fi
        objections="$objections
  $candidate $objection"
    done
    [ -n "$objections" ] || die "no Python was found (looked for: $names); install Python 3.11 or later, or set PYTHON"
    die "no usable Python was found:$objections
Install Python 3.11 or later, or set PYTHON to one."
}

check_compiler() {
    local candidate names="c++ g++ clang++" found=""
    if [ -n "${CXX:-}" ]; then names=$CXX; fi
    for candidate in $names; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        found=$candidate
        if echo '#include <span>
static_assert(__cplusplus >= 202002L);
int main() { return std::span<int>().size(); }' | "$candidate" -std=c++20 -x c++ -fsyntax-only - >/dev/null 2>&1; then
            return
        fi
    done
    [ -z "$found" ] || die "$found cannot compile C++20 (needed: gcc 11 or later, or clang 14 or later); set CXX to one that can"
    die "no C++ compiler was found (looked for: $names); on Debian and Ubuntu: apt-get install g++; on Fedora: dnf install gcc-c++; or set CXX"
}

# A fingerprint of everything that the installed package is made from.
source_fingerprint() {
    {
        printf '%s\n' "$1" "$PYTHON_FOUND" "${KDTREE_CUDA:-}" "${CXX:-}" "${CMAKE_CUDA_ARCHITECTURES:-}" "${CMAKE_ARGS:-}"
        find CMakeLists.txt pyproject.toml README.md LICENSE cmake cpp python -type f \
            ! -name '*.pyc' ! -name '*.so' ! -name '_native.pyi' -print0 | LC_ALL=C sort -z | xargs -0 cksum
    } | cksum
}

# set_up EXTRAS: leaves the repository root as working directory, VENV set and $VENV/bin first on PATH.
set_up() {
    local extras=$1 fingerprint stamp started=$SECONDS log
    cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
    VENV=${KDTREE_VENV:-$PWD/.venv}
    stamp=$VENV/kdtree-installed
    find_python
    fingerprint=$(source_fingerprint "$extras")
    if [ ! -x "$VENV/bin/kdtree" ] || [ ! -f "$stamp" ] || ! grep -qxF "$fingerprint" "$stamp"; then
        check_compiler
        if [ ! -x "$VENV/bin/python" ] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
            say "making a virtual environment in $VENV ($("$PYTHON_FOUND" --version 2>&1))"
            rm -f "$stamp"
            "$PYTHON_FOUND" -m venv "$VENV" || die "$PYTHON_FOUND -m venv $VENV failed"
        fi
        say "building and installing kdtree-engine[$extras] (the first build takes a few minutes)"
        log=$VENV/install.log
        CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)} \
            "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input -v ".[$extras]" >"$log" 2>&1 || {
            tail -n 40 "$log" >&2
            die "the installation failed; the whole log is in $log"
        }
        printf '%s\n' "$fingerprint" >"$stamp"
        grep -o 'kdtree-engine [0-9.]*: CPU backend .*' "$log" | tail -n 1 >&2 || true
        say "installed in $((SECONDS - started)) s"
    fi
    PATH=$VENV/bin:$PATH
    export PATH
    unset PYTHONHOME PYTHONPATH
}
