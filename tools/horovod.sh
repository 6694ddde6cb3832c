# shellcheck shell=bash
# Horovod's step of the set-up. A compiled wheel is kept in $CACHE under a hash of all that decides its binary, so that
# another venv or checkout of the same kind installs it in seconds.

CACHE=${HETMPI_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/hetmpi}
[[ $CACHE == /* ]] || CACHE=$ROOT/$CACHE

# For the step's stamp, from files alone. Another torch, the base Python's too, or another recipe means a new Horovod.
horovod_key() {
  local torch=
  [[ ! -e $STATE/torch ]] || torch=$(cat "$(<"$STATE/torch")" 2>/dev/null || true)
  echo "$(pin horovod) $HOROVOD_GPU $HOROVOD_GPU_OPERATIONS $torch $(declare -f compile_horovod)"
}

remove_horovod() { python -m pip uninstall -y horovod; }

install_horovod() {
  local version id
  version=$(pin horovod)
  describe_horovod >"$STATE/horovod.txt"
  id=0$(sha256sum <"$STATE/horovod.txt" | cut -c1-16)  # a wheel's build number, which starts with a digit
  if ! install_kept "$version-$id"; then
    compile_horovod "$version" "$STATE/horovod"
    keep_wheel "$version-$id"
  fi
  rm -rf "$STATE/horovod"
}

# Everything that decides the binary, but not where the venv is: MPICH from PyPI lies in it, and is found from there.
describe_horovod() {
  echo "Horovod $(pin horovod), HOROVOD_GPU=$HOROVOD_GPU, HOROVOD_GPU_OPERATIONS=$HOROVOD_GPU_OPERATIONS"
  python -c "
import platform, sysconfig, torch
print('Python', platform.python_version(), sysconfig.get_config_var('SOABI'), *platform.libc_ver())
print('torch', torch.__version__, torch.version.git_version, torch.version.cuda, torch.compiled_with_cxx11_abi())"
  echo "$MPI_NAME"
  [[ $HETMPI_MPI == mpich ]] || describe_system_mpi
  ${CXX:-c++} --version || g++ --version
  [[ -z $HOROVOD_GPU$HOROVOD_GPU_OPERATIONS ]] || nvcc --version || true
  env | grep -E '^(HOROVOD_\w+|CUDA_HOME|CC|CXX|(C|CPP|CXX|LD)FLAGS)=' | sort || true
  declare -f compile_horovod
}

describe_system_mpi() {
  local lib
  lib=$(realpath "$(mpicxx -print-file-name=libmpi.so)")
  echo "$lib $(stat -c '%s bytes of %Y' "$lib" || true)"
  mpicxx -show || true
}

# Installs the wheel kept under that name; fails if there is none, or it is damaged or cannot be imported.
install_kept() {  # VERSION-BUILD
  local kept
  kept=$(compgen -G "$CACHE/horovod-$1-*.whl") || return 1
  echo "$kept was compiled before"
  if is_whole "$kept" && install_wheel "$kept" && python -c "import horovod.torch"; then return; fi
  echo "$kept is of no use: compiling it anew"
  return 1
}

is_whole() { python -c "import sys, zipfile; sys.exit(zipfile.ZipFile(sys.argv[1]).testzip())" "$1"; }
install_wheel() { pip_install --no-index --no-deps --force-reinstall "$1"; }

# Keeps the wheel just compiled, if that can be: copied aside, then renamed, as other set-ups may do the same.
keep_wheel() {  # VERSION-BUILD
  local wheel aside kept
  wheel=$(echo "$STATE"/horovod/wheel/*.whl)
  aside=$CACHE/.${HOSTNAME:-}.$BASHPID
  kept=$CACHE/horovod-$1${wheel##*"horovod-${1%%-*}"}
  { mkdir -p "$CACHE" && cp "$wheel" "$aside" && mv -f "$aside" "$kept" && echo "kept as $kept"; } ||
    { rm -f "$aside"; echo "not kept in $CACHE"; }
}

# Makes and installs DIR/wheel/*.whl.
compile_horovod() {  # VERSION DIR
  rm -rf "$2"
  python -m pip download --no-input --disable-pip-version-check --no-deps --no-binary horovod --no-build-isolation \
    -d "$2" "horovod==$1"
  tar xzf "$2/horovod-$1.tar.gz" -C "$2"
  cd "$2/horovod-$1"
  sed -i -E 's/(set\(CMAKE_CXX_STANDARD) [0-9]+/\1 20/' CMakeLists.txt horovod/torch/CMakeLists.txt
  # the MPI of the venv that it is installed in comes first: $ORIGIN is .../lib/python3.*/site-packages/horovod/torch
  local rpath='set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\nset(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)\n'
  sed -i "/^project(/i ${rpath}set(CMAKE_INSTALL_RPATH \"\$ORIGIN/../../../..\")" CMakeLists.txt
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
  # MAKEFLAGS keeps Horovod from asking for eight jobs. No cache of pip's: it does not know which MPI a wheel is for.
  export CMAKE_GENERATOR=Ninja MAKEFLAGS=-s CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(build_jobs)}
  PYTHONUNBUFFERED=1 python -m pip wheel -v --no-input --disable-pip-version-check --no-cache-dir --no-deps \
    --no-build-isolation -w "$2/wheel" .
  install_wheel "$2"/wheel/*.whl
}

export_if_set() { if [[ -n ${!1} ]]; then export "${1?}"; else unset "$1"; fi; }

# As many compilers as there are cores and, at 2 GiB each, memory.
build_jobs() {
  awk -v cores="$CORES" '/^MemAvailable/ { jobs = int($2 / 2097152) } END {
    print jobs < 1 ? 1 : jobs < cores ? jobs : cores }' /proc/meminfo
}
