# shellcheck shell=bash
# The set-up, read by run.sh: makes $VENV and installs everything in it. It is a walk over steps; each leaves a stamp
# with the key of what it did and is passed over while the key is the same, so a current set-up starts no Python and an
# interrupted one goes on where it was.

STATE=$VENV/hetmpi-setup  # choices, stamps, logs
CHOICES=(HETMPI_PYTHON HETMPI_MPI HETMPI_MARCH HETMPI_CUDA HOROVOD_GPU HOROVOD_GPU_OPERATIONS)

# Leaves PATH with the venv's programs first, and MPI_NAME for people to read.
set_up() {
  drop_venvs_from_path
  recall_choices
  choose_mpi
  lock
  local base="$ROOT $HETMPI_PYTHON $MPI_NAME"
  step venv "$base" "making $VENV with $HETMPI_PYTHON" make_venv has_venv
  remember_choices
  export PATH=$VENV/bin:$PATH
  step packages "$base $(<"$ROOT/requirements.txt")" "installing torch and the other pinned packages" install_packages
  step horovod "$base $(horovod_key)" "building Horovod on $MPI_NAME, some minutes" build_horovod
  step mpi "$base $(<"$STATE/packages.done") $(<"$STATE/horovod.done")" "checking that all use one MPI" check_mpi
  step core "$base $HETMPI_MARCH $HETMPI_CUDA ${NVCC:-$(command -v nvcc)}" "compiling hetmpi._C" build_core core_is_new
  unlock
}

say() { echo "hetmpi set-up: $*" >&2; }
die() { say "$*"; exit 1; }

# step NAME KEY SAYING FUNCTION [CHECK]: calls FUNCTION unless NAME's stamp holds KEY and CHECK, if given, succeeds.
step() {
  local name=$1 key=$2 saying=$3 function=$4 check=${5:-true} status=0
  if [[ -e $STATE/$name.done && $(<"$STATE/$name.done") == "$key" ]] && $check; then return; fi
  check_machine
  [[ $name != venv ]] || clear_venv
  rm -f "$STATE/$name.done"
  say "$saying"
  set +e  # bash has no other way to both stop the step at its first error and learn of it
  (set -e; $function) >"$STATE/$name.log" 2>&1 </dev/null 9>&-
  status=$?
  set -e
  ((status != 130)) || die "interrupted; the next call goes on from here"
  ((status == 0)) || explain "$STATE/$name.log"
  printf '%s\n' "$key" >"$STATE/$name.done"
}

# A failed step's first errors, the end of its log and, where the cause is a known one, its cure.
explain() {  # LOG
  local pattern cure
  { grep -m3 -A2 -E '(fatal|:[0-9]+:) error: |CMake Error' "$1" || true; tail -n 20 "$1"; } >&2
  while read -r pattern && read -r cure; do
    if grep -qiE "$pattern" "$1"; then say "cure: $cure"; break; fi
  done <<'END'
no space left|disk quota exceeded
the disk is full: free some space, or put HETMPI_VENV and TMPDIR on a larger one
killed signal|killed \(program|MemoryError
the memory is used up: close other programs, or set CMAKE_BUILD_PARALLEL_LEVEL=1
Python\.h: no such file
install the headers of this Python: apt-get install python3-dev
name resolution|ConnectionError|timed out|ProxyError|SSLError|from versions: none
no package index answers: look at the network, or set PIP_INDEX_URL or HTTPS_PROXY
no matching distribution
no such package for this Python: choose another with HETMPI_PYTHON, or set PIP_INDEX_URL
unrecognized command.*std=|requires C\+\+20
g++ 10 or later is needed: install it and set CC and CXX
nvcc (fatal|error|warning)|cudart_static|cub/cub\.cuh
CUDA's compiler does not work here: load a whole CUDA 12 or later, or leave the GPU's half out with HETMPI_CUDA=0
could not find MPI
MPI's compiler wrapper does not work: try mpicxx by hand, or set HETMPI_MPI=mpich
END
  die "failed; the whole log is $1"
}

# This checkout's venvs hold an mpicc and a python3 that must not be taken for the system's when one is active.
drop_venvs_from_path() {
  local entry path=
  while read -rd: entry; do
    [[ -d $entry/../hetmpi-setup && -e $entry/../pyvenv.cfg ]] || path+=${path:+:}$entry
  done <<<"$PATH:"
  PATH=$path
}

# The environment decides; what it leaves open is as in the last set-up.
recall_choices() {
  local name value
  if [[ -e $STATE/choices ]]; then
    while IFS='=' read -r name value; do [[ -v $name ]] || printf -v "$name" %s "$value"; done <"$STATE/choices"
  fi
  for name in "${CHOICES[@]}"; do printf -v "$name" %s "${!name:-}"; done
  HETMPI_PYTHON=${HETMPI_PYTHON:-python3}
}

remember_choices() {
  local name text=
  for name in "${CHOICES[@]}"; do text+="$name=${!name}"$'\n'; done
  [[ -e $STATE/choices && $(<"$STATE/choices")$'\n' == "$text" ]] || printf %s "$text" >"$STATE/choices"
}

GET_MPI="load the MPI module, apt-get install libopenmpi-dev openmpi-bin, or set HETMPI_MPI=mpich"

choose_mpi() {
  if [[ -z $HETMPI_MPI ]]; then
    if has mpicc && has mpiexec; then HETMPI_MPI=system; else HETMPI_MPI=mpich; fi
    if has mpicc && ! has mpiexec; then say "mpicc is on PATH but mpiexec is not: taking MPICH from PyPI"; fi
  fi
  case $HETMPI_MPI in
    mpich) MPI_NAME="MPICH $(pin mpich) from PyPI" ;;
    system)
      has mpiexec || die "HETMPI_MPI=system, but there is no mpiexec on PATH: $GET_MPI"
      MPI_NAME=$(mpiexec --version 2>&1 | grep -m1 -E '[0-9]\.[0-9]' | tr -s ' ')
      MPI_NAME+=" ($(readlink -f "$(command -v mpiexec)"))"
      ;;
    *) die "HETMPI_MPI must be system or mpich, got $HETMPI_MPI" ;;
  esac
}

has() { command -v "$1" >/dev/null; }
pin() { sed -n "s/^$1==\([^ ;]*\).*/\1/p" "$ROOT/requirements.txt"; }

# One set-up at a time in one checkout. One that cannot be written to, or a file system without locks, goes unlocked.
lock() {
  { exec 9>"$ROOT/.setup.lock"; } 2>/dev/null || return 0
  flock -n 9 || { say "waiting for another set-up of $ROOT"; flock 9 || true; }
}

unlock() { exec 9>&-; }

# Refuses before anything large is fetched what is known to fail later.
check_machine() {
  [[ "$ROOT$VENV" != *[[:space:]]* ]] ||
    die "there is a space in $ROOT or $VENV, which Horovod's build cannot take: choose another folder"
  has "$HETMPI_PYTHON" || die "no $HETMPI_PYTHON on PATH: apt-get install python3, or set HETMPI_PYTHON"
  has_python "import sys; sys.exit(sys.version_info < (3, 10))" ||
    die "$HETMPI_PYTHON is $("$HETMPI_PYTHON" --version 2>&1), 3.10 or later is needed: set HETMPI_PYTHON"
  has_python "import ensurepip, venv" ||
    die "$HETMPI_PYTHON cannot make a venv: apt-get install python3-venv"
  has_python "import os, sysconfig as s; os.stat(s.get_path('include') + '/Python.h')" ||
    die "$HETMPI_PYTHON has no Python.h: apt-get install python3-dev"
  local cxx=${CXX:-c++}
  has "${cxx%% *}" || { [[ ! -v CXX ]] && has g++; } ||
    die "no C++ compiler ($cxx): apt-get install g++, or load a compiler module and set CC and CXX"
  [[ $HETMPI_MPI == mpich ]] || { has mpicc && has mpicxx; } ||
    die "HETMPI_MPI=system, but mpicc and mpicxx are not both on PATH: $GET_MPI"
}

has_python() { "$HETMPI_PYTHON" -c "$1" 2>/dev/null; }

# Empties the place of the venv, which another Python or MPI needs, unless it holds something that is not ours.
clear_venv() {
  if [[ -e $STATE/core.done && $command != setup ]]; then
    die "$VENV was set up for another Python or MPI than $MPI_NAME: HETMPI_VENV=.venv-other keeps both," \
      "./run.sh setup replaces it"
  fi
  [[ -d $STATE || -z $(ls -A "$VENV" 2>/dev/null) ]] ||
    die "$VENV is there and was not made by run.sh: name another folder with HETMPI_VENV, or remove it"
  mkdir -p "$STATE"
  find "$VENV/" -mindepth 1 ! -path "$STATE*" -delete
  rm -rf "${STATE:?}"/*
}

has_venv() { [[ -x $VENV/bin/python ]]; }

# The venv sees the packages of its base Python, which may be a venv itself, only if those include a torch that fits.
make_venv() {
  "$HETMPI_PYTHON" -m venv "$VENV"
  see_base_packages true
  has_torch && return
  local base
  base=$(packages_of "$VENV/bin/python")/base.pth
  packages_of "$HETMPI_PYTHON" >"$base"
  has_torch || { rm "$base"; see_base_packages false; }
}

packages_of() { "$1" -c "import sysconfig; print(sysconfig.get_path('purelib'))"; }

has_torch() {
  "$VENV/bin/python" -c "
import torch
print('torch', torch.__version__, 'at', torch.__file__)
assert tuple(int(n) for n in torch.__version__.split('.')[:2]) >= (2, 4)"
}

see_base_packages() { sed -i "s/^\(include-system-site-packages\).*/\1 = $1/" "$VENV/pyvenv.cfg"; }

install_packages() {
  local apart=horovod
  ! grep -q '^include-system-site-packages = true' "$VENV/pyvenv.cfg" || apart+='|torch'
  [[ $HETMPI_MPI == mpich ]] || apart+='|mpich'
  grep -vE "^($apart)==" "$ROOT/requirements.txt" >"$STATE/requirements.txt"
  pip_install -r "$STATE/requirements.txt"
  python -c "import os, torch.version; print(os.path.realpath(torch.version.__file__))" >"$STATE/torch"
}

pip_install() { PIP_USER=0 python -m pip install --no-input --disable-pip-version-check "$@"; }

# Horovod is compiled against one torch, the base Python's too: another one there, or another recipe, means a new build.
horovod_key() {
  local torch=
  [[ ! -e $STATE/torch ]] || torch=$(cat "$(<"$STATE/torch")" 2>/dev/null || true)
  echo "$(pin horovod) $HOROVOD_GPU $HOROVOD_GPU_OPERATIONS $torch $(declare -f build_horovod)"
}

build_horovod() {
  local sources=$STATE/horovod version
  version=$(pin horovod)
  rm -rf "$sources"
  python -m pip download --no-input --disable-pip-version-check --no-deps --no-binary horovod --no-build-isolation \
    -d "$sources" "horovod==$version"
  tar xzf "$sources/horovod-$version.tar.gz" -C "$sources"
  cd "$sources/horovod-$version"
  sed -i -E 's/(set\(CMAKE_CXX_STANDARD) [0-9]+/\1 20/' CMakeLists.txt horovod/torch/CMakeLists.txt
  # ninja takes VERBOSE=1 for a target; debug information takes a third of the time
  sed -i "s/make_args.append('VERBOSE=1')/pass/; s/'RelWithDebInfo'/'Release'/" setup.py
  # horovodrun knows MPICH by a word that MPICH's launcher, Hydra, does not always print
  sed -i "s/elif 'MPICH' in output:/elif 'MPICH' in output or 'HYDRA' in output:/" horovod/runner/mpi_run.py
  export HOROVOD_WITH_MPI=1 HOROVOD_WITH_PYTORCH=1
  export HOROVOD_WITHOUT_GLOO=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
  if [[ -z $HOROVOD_GPU$HOROVOD_GPU_OPERATIONS ]]; then  # only on demand: half a CUDA toolkit on PATH breaks the build
    sed -i 's/torch.version.cuda is not None/False/' cmake/Modules/FindPytorch.cmake
  fi
  export_if_set HOROVOD_GPU
  export_if_set HOROVOD_GPU_OPERATIONS
  # MAKEFLAGS keeps Horovod from asking for eight jobs. No cache: pip's does not know which MPI a wheel is for.
  export CMAKE_GENERATOR=Ninja MAKEFLAGS=-s CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(build_jobs)}
  pip_install --no-cache-dir --no-deps --no-build-isolation --force-reinstall .
  rm -rf "$sources"
}

export_if_set() { if [[ -n ${!1} ]]; then export "${1?}"; else unset "$1"; fi; }

# As many compilers as there are cores and, at 2 GiB each, memory.
build_jobs() {
  awk -v cores="$CORES" '/^MemAvailable/ { jobs = int($2 / 2097152) } END {
    print jobs < 1 ? 1 : jobs < cores ? jobs : cores }' /proc/meminfo
}

# mpi4py's wheel looks for a libmpi by itself. Where it finds another than mpicxx gave Horovod, it is built with mpicc.
check_mpi() {
  if ! loads_one_mpi; then
    [[ $HETMPI_MPI == system ]]
    export MPICC=mpicc
    pip_install --no-cache-dir --no-deps --force-reinstall --no-binary mpi4py "mpi4py==$(pin mpi4py)"
    loads_one_mpi
  fi
}

loads_one_mpi() {
  python - <<'END'
import os, re
import mpi4py
mpi4py.rc.initialize = False  # a login node may forbid it
import horovod.torch
from mpi4py import MPI

is_mpi = re.compile(r"/libmpi(ch|_abi|_gnu\w*|_cray\w*)?\.so").search
paths = {os.path.realpath(line.split()[-1]) for line in open("/proc/self/maps") if is_mpi(line)}
print("MPI libraries loaded:", *sorted(paths))
assert len(paths) == 1, f"mpi4py and Horovod load different MPI libraries: {paths}"
END
}

# The compiled core is there, for this Python, and nothing it is made of is newer.
core_is_new() {
  local lib
  lib=$(echo "$VENV"/lib/python3.*)
  compgen -G "$ROOT/hetmpi/_C.cpython-3${lib##*python3.}-*.so" >/dev/null || return 1
  [[ -z $(find "$ROOT/cpp" "$ROOT/setup.py" "$ROOT/pyproject.toml" -type f -newer "$STATE/core.began" -print -quit) ]]
}

build_core() {
  touch "$STATE/core.began"  # what is edited while it compiles counts as newer
  export HETMPI_MARCH HETMPI_CUDA
  pip_install --no-deps --no-build-isolation -e "$ROOT"
}
