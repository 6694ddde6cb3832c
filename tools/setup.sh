# shellcheck shell=bash
# The set-up, read by run.sh: makes $VENV and installs everything in it. It is a walk over steps; each leaves a stamp
# with the key of what it did and is passed over while the key is the same, so a current set-up starts no Python and an
# interrupted one goes on where it was.

# shellcheck source=tools/progress.sh
source "$ROOT/tools/progress.sh"
# shellcheck source=tools/horovod.sh
source "$ROOT/tools/horovod.sh"

STATE=$VENV/hetmpi-setup  # choices, stamps, logs
CHOICES=(HETMPI_PYTHON HETMPI_MPI HETMPI_MARCH HETMPI_CUDA HETMPI_HOROVOD HETMPI_TORCH_INDEX NVCC)
CHOICES+=(HOROVOD_GPU HOROVOD_GPU_OPERATIONS)
# Measured: torch for CPUs, PyPI's with CUDA 13, all else. In TMPDIR pip has up to half of it at a time, compressed.
TORCH_MB=800
TORCH_CUDA_MB=4800
REST_MB=800
STEPS=6       # and one for each group of packages that the command needs besides
STEP=0        # the number of the current one
STEPS_DONE=0  # how many were not passed over

# Leaves PATH with the venv's programs first, and MPI_NAME for people to read. GROUPS: of packages in requirements.txt.
set_up() {  # GROUPS...
  drop_venvs_from_path
  recall_choices
  choose_mpi
  lock
  local base="$ROOT $HETMPI_PYTHON $MPI_NAME${HETMPI_TORCH_INDEX:+ torch of $HETMPI_TORCH_INDEX}"
  local began=$SECONDS cuda core_saying group
  STEPS=$((STEPS + $#))
  step venv "$base" "making $VENV with $HETMPI_PYTHON" make_venv has_venv
  remember_choices
  export PATH=$VENV/bin:$PATH
  step torch "$base $(pin torch)" "installing torch, the largest package" install_torch
  step packages "$base $(pins_of)" "installing the packages that training needs" install_packages
  if [[ $HETMPI_HOROVOD == 0 ]]; then
    step horovod "$base none" "leaving Horovod out: MPI sums the dense gradients" remove_horovod
  else
    step horovod "$base $(horovod_key)" "installing Horovod for $MPI_NAME, compiled unless $CACHE has it" \
      install_horovod
  fi
  step mpi "$base $(<"$STATE/packages.done") $(<"$STATE/horovod.done")" "checking that all use one MPI" check_mpi
  choose_cuda
  step core "$base $HETMPI_MARCH $NVCC cuda=$cuda" "$core_saying" build_core core_is_new
  for group; do
    step "$group" "$base $(pins_of "$group")" "installing the packages of this command" "install_group $group"
  done
  unlock
  ((STEPS_DONE == 0)) || say "done in $(minutes $((SECONDS - began)))"
}

say() { echo "hetmpi set-up: $*" >&2; }
die() { say "$*"; exit 1; }
minutes() { (($1 < 60)) || echo -n "$(($1 / 60)) min "; echo "$(($1 % 60)) s"; }

# step NAME KEY SAYING FUNCTION [CHECK]: calls FUNCTION unless NAME's stamp holds KEY and CHECK, if given, succeeds.
step() {
  local name=$1 key=$2 saying=$3 function=$4 check=${5:-true} status=0 began=$SECONDS title watcher
  title="[$((++STEP))/$STEPS] $name"
  if [[ -e $STATE/$name.done && $(<"$STATE/$name.done") == "$key" ]] && $check; then return; fi
  check_machine
  [[ $name != venv ]] || clear_venv
  [[ $name != torch || -e $STATE/torch ]] || announce
  rm -f "$STATE/$name.done"
  echo "$title: $saying; log: $STATE/$name.log" >&2
  touch "$STATE/$name.began"
  : >"$STATE/$name.log"
  show_progress "$title" "$STATE/$name.log" 9>&- &
  watcher=$!
  set +e  # bash has no other way to both stop the step at its first error and learn of it
  (set -e; $function) >"$STATE/$name.log" 2>&1 </dev/null 9>&-
  status=$?
  kill $watcher; wait $watcher 2>/dev/null
  set -e
  clear_line
  ((status != 130)) || die "interrupted; the next call goes on from here"
  ((status == 0)) || explain "$STATE/$name.log"
  printf '%s\n' "$key" >"$STATE/$name.done"
  echo "$title: done in $(minutes $((SECONDS - began)))" >&2
  STEPS_DONE=$((STEPS_DONE + 1))
}

# A failed step's first errors, the end of its log and, where the cause is a known one, its cure.
explain() {  # LOG
  local pattern cure
  { grep -m3 -A2 -E '(fatal|:[0-9]+:) error: |CMake Error' "$1" || true; tail -n 20 "$1"; } >&2
  while read -r pattern && read -r cure; do
    if grep -qiE "$pattern" "$1"; then say "cure: $cure"; break; fi
  done <<'END'
Operation cancelled by user|KeyboardInterrupt
call again: it goes on from this step
no space left|disk quota exceeded
the disk is full: free some space, or put HETMPI_VENV and TMPDIR on a larger one
killed signal|killed \(program|MemoryError
the memory is used up: close other programs, or set CMAKE_BUILD_PARALLEL_LEVEL=1
Python\.h: no such file
install the headers of this Python: apt-get install python3-dev
lacks torch==
it must be a URL as pip's --index-url takes, of an index with that torch for this Python and processor; or unset it
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
  [[ $1 != */horovod.log ]] || say "or go on without Horovod: HETMPI_HOROVOD=0, and MPI sums the dense gradients"
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
# The lines of one group in requirements.txt; without a name, of what training needs.
pins_of() {  # [GROUP]
  awk -v group="${1:-}" '/^# \[/ { now = substr($2, 2, length($2) - 2) } now == group' "$ROOT/requirements.txt"
}
pin() { sed -n "s/^$1==\([^ ;]*\).*/\1/p" "$ROOT/requirements.txt"; }

# One set-up at a time in one checkout. One that cannot be written to, or a file system without locks, goes unlocked.
lock() {
  local wait_s=0 status
  { exec 9>"$ROOT/.setup.lock"; } 2>/dev/null || return 0
  while status=0; flock -E 75 -w $wait_s 9 || status=$?; ((status == 75)); do
    say "waiting for another set-up of $ROOT, $SECONDS s"
    wait_s=$QUIET_S
  done
}

unlock() { exec 9>&-; }

# Refuses before anything large is fetched what is known to fail later.
check_machine() {
  [[ "$ROOT$VENV" != *[[:space:]]* ]] ||
    die "there is a space in $ROOT or $VENV, which Horovod's build cannot take: choose another folder"
  [[ $HETMPI_CUDA =~ ^[01]?$ ]] || die "HETMPI_CUDA must be 1, 0 or empty, got $HETMPI_CUDA"
  [[ $HETMPI_HOROVOD =~ ^[01]?$ ]] || die "HETMPI_HOROVOD must be 1, 0 or empty, got $HETMPI_HOROVOD"
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
  [[ $HETMPI_CUDA != 1 ]] || has_nvcc ||
    die "HETMPI_CUDA=1, but there is no nvcc: load CUDA, name it with NVCC or CUDA_HOME, or set HETMPI_CUDA=0"
}

has_python() { "$HETMPI_PYTHON" -c "$1" 2>/dev/null; }

# Empties the place of the venv, which another Python or MPI needs, unless it holds something that is not ours.
clear_venv() {
  if [[ -e $STATE/core.done && $command != setup ]]; then
    die "$VENV was set up for another Python, MPI or HETMPI_TORCH_INDEX than $HETMPI_PYTHON, $MPI_NAME" \
      "${HETMPI_TORCH_INDEX:+and $HETMPI_TORCH_INDEX}: HETMPI_VENV=.venv-other keeps both, ./run.sh setup replaces it"
  fi
  [[ -d $STATE || -z $(ls -A "$VENV" 2>/dev/null) ]] ||
    die "$VENV is there and was not made by run.sh: name another folder with HETMPI_VENV, or remove it"
  mkdir -p "$STATE"
  find "$VENV/" -mindepth 1 ! -path "$STATE*" -delete
  rm -rf "${STATE:?}"/*
}

# Says what the set-up takes, and refuses it where there is no room, before anything large is fetched.
announce() {
  local least_mb=$((REST_MB + TORCH_MB)) most_mb=$((REST_MB + TORCH_CUDA_MB)) takes
  [[ -z $HETMPI_TORCH_INDEX ]] || most_mb=$least_mb
  ! sees_base_packages || least_mb=$REST_MB most_mb=$REST_MB
  takes=$(gb $least_mb)
  ((most_mb == least_mb)) ||
    takes+=", or $(gb $most_mb) if pip chooses a torch with CUDA, as PyPI's is (HETMPI_TORCH_INDEX: another)"
  say "$VENV takes $takes; about 3 minutes on 2 cores, and the time of the downloads"
  need_room "$VENV" $least_mb $most_mb "another folder with HETMPI_VENV"
  need_room "${TMPDIR:-/tmp}" $((least_mb / 3)) $((most_mb / 2)) "another folder with TMPDIR"
}

gb() { awk -v mb="$1" 'BEGIN { printf "%.1f GB", mb / 1000 }'; }

# Ends the set-up where there is less than LEAST_MB, warns where there is less than MOST_MB.
need_room() {  # FOLDER LEAST_MB MOST_MB CURE
  local free_mb
  free_mb=$(df -Pk "$1" 2>/dev/null | awk 'NR == 2 { print int($4 * 1.024 / 1000) }') || return 0
  ((free_mb >= $2)) || die "$1 has room for $(gb "$free_mb"), $(gb "$2") are needed: free some, or name $4"
  ((free_mb >= $3)) || say "$1 has room for $(gb "$free_mb"): too little for a torch with CUDA: $(gb "$3")"
}

has_venv() { [[ -x $VENV/bin/python ]]; }

# The venv sees the packages of its base Python, which may be a venv itself, only if those include a torch that fits.
make_venv() {
  "$HETMPI_PYTHON" -m venv "$VENV"
  [[ -z $HETMPI_TORCH_INDEX ]] || return 0
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

sees_base_packages() { grep -q '^include-system-site-packages = true' "$VENV/pyvenv.cfg"; }

install_torch() {
  local torch
  torch=torch==$(pin torch)
  if sees_base_packages; then has_torch; return; fi
  if [[ -n $HETMPI_TORCH_INDEX ]]; then  # a blank hides what pip's settings name besides
    PIP_EXTRA_INDEX_URL=" " PIP_FIND_LINKS=" " PIP_NO_INDEX=0 \
      pip_install --index-url "$HETMPI_TORCH_INDEX" --no-deps "$torch" ||
      { echo "HETMPI_TORCH_INDEX=$HETMPI_TORCH_INDEX does not answer or lacks $torch"; return 1; }
  fi
  pip_install -c "$ROOT/requirements.txt" "$torch"  # and what it needs
}

install_packages() {
  local apart=horovod
  ! sees_base_packages || apart+='|torch'
  [[ $HETMPI_MPI == mpich ]] || apart+='|mpich'
  pins_of | grep -vE "^($apart)==" >"$STATE/requirements.txt"
  pip_install -r "$STATE/requirements.txt"
  install_programs "$STATE/requirements.txt"
  python -c "import os, torch.version; print(os.path.realpath(torch.version.__file__))" >"$STATE/torch"
}

install_group() {  # GROUP
  pins_of "$1" >"$STATE/$1.txt"
  pip_install -r "$STATE/$1.txt" -c "$ROOT/requirements.txt"
  install_programs "$STATE/$1.txt"
}

# Programs that run.sh and people call by name. Where the base Python has their packages pip installs none, but its bin
# is not on PATH.
install_programs() {  # FILE
  local pin name
  for pin in $(grep -oE '^(mpich|cmake|ninja|tensorboard|ruff|clang-format)==[^ ;]+' "$1" || true); do
    name=${pin%%==*}
    compgen -G "$VENV/lib/python3.*/site-packages/${name//-/_}-*.dist-info" ||
      pip_install --no-deps --ignore-installed "$pin"
  done
}

pip_install() {
  local bar=on version
  version=$(echo "$VENV"/lib/python3.*/site-packages/pip-*.dist-info)
  version=${version##*/pip-}
  [[ $(printf '%s\n' 24.1 "$version" | sort -V | head -n 1) != 24.1 ]] || bar=raw  # bytes so far, for tools/progress.sh
  PIP_USER=0 python -m pip install --no-input --disable-pip-version-check --progress-bar "$bar" "$@"
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
  HETMPI_HOROVOD=$HETMPI_HOROVOD python - <<'END'
import importlib.util, os, re
import mpi4py
mpi4py.rc.initialize = False  # a login node may forbid it
if os.environ.get("HETMPI_HOROVOD") != "0" or importlib.util.find_spec("horovod"):  # the base Python may have one
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

# Sets cuda to 1 if the core is compiled with the GPU's half, else to 0, and core_saying. By default it is where there
# are a GPU and nvcc; a core that has it keeps it where they are not seen, as on a cluster's login node.
choose_cuda() {
  local had= gpu=
  [[ ! -e $STATE/core.done || $(<"$STATE/core.done") != *" cuda=1" ]] || had=1
  cuda=$HETMPI_CUDA
  if [[ -z $cuda ]]; then
    ! has_gpu || gpu=1
    cuda=0
    if has_nvcc; then cuda=${gpu:-${had:-0}}; elif [[ $had ]] && core_is_new; then cuda=1; fi
  fi
  core_saying="compiling hetmpi._C"
  if ((cuda)); then
    core_saying+=" with the GPU's half"
  elif [[ $gpu ]]; then
    core_saying+=" for CPUs alone: there is a GPU but no nvcc; load CUDA and call ./run.sh setup for it"
  else
    core_saying+=" for CPUs alone (HETMPI_CUDA=1 adds the GPU's half)"
  fi
}

has_gpu() { compgen -G "/dev/nvidia[0-9]*" >/dev/null || { has nvidia-smi && nvidia-smi -L 2>&1 | grep -q '^GPU '; }; }

has_nvcc() {
  if [[ -n $NVCC ]]; then has "$NVCC"; return; fi
  has nvcc || has "${CUDA_HOME:-}/bin/nvcc" || has /usr/local/cuda/bin/nvcc
}

build_core() {  # what is edited after core.began counts as newer
  export HETMPI_MARCH HETMPI_CUDA=$cuda NVCC
  PYTHONUNBUFFERED=1 pip_install -v --no-deps --no-build-isolation -e "$ROOT"
}
