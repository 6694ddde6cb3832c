#!/usr/bin/env bash
# Measures and checks the GPU's half on a machine with a GPU, which may have no network: with the python3 (torch, numpy,
# pybind11, mpi4py), nvcc and compute-sanitizer found there. Leaves logs and gpu_check.json in OUT_DIR. Exit code 0 if all
# checks pass. With WHEELS, a folder of wheels and source distributions of what requirements.txt names (torch apart), it
# trains too; with those of bench/peers/requirements-torchrec-gpu.txt also, it times TorchRec.
#
#   ./run.sh gpu-check OUT_DIR [WHEELS]
#
# The times of a training step come first, then equality and the sanitizers. HETMPI_GPU_CHECK_S (480) bounds the whole:
# a check that finds no time left is written down as not run, and does not count as passed.
set -uo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ ! ( $# -eq 1 || ( $# -eq 2 && -d $2 ) ) ]]; then
  echo "./run.sh gpu-check OUT_DIR [WHEELS]: name the folder for logs, and a folder of wheels that is there" >&2
  exit 2
fi
for tool in nvcc compute-sanitizer nvidia-smi; do
  command -v "$tool" >/dev/null && continue
  echo "./run.sh gpu-check: there is no $tool on PATH; it is for a machine with a GPU and CUDA" >&2
  exit 2
done
python3 -c "import mpi4py, numpy, pybind11, torch; assert torch.cuda.is_available(), 'torch sees no GPU'" || exit 2
mkdir -p "$1" && OUT=$(cd "$1" && pwd) || exit 2
WHEELS=${2:+$(cd "$2" && pwd)}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
LIMIT_S=${HETMPI_GPU_CHECK_S:-480} STATUS=0 RESULTS=
rm -f "$OUT"/*.log "$OUT/gpu_check.json"

note() { echo "$*" | tee -a "$OUT/gpu_check.log"; }

# check NAME COMMAND...: runs it into OUT/NAME.log; its result and seconds go into gpu_check.json at once, for whoever
# stops this later.
check() {
  local name=$1 began=$SECONDS code child watcher
  shift
  if ((SECONDS >= LIMIT_S)); then
    note "$name: not run, the $LIMIT_S s are over"
    STATUS=1
    add_result "$name" null 0
    return
  fi
  note "--- $name: $*"
  set -m  # a group of its own, so that all of it ends at the limit
  "$@" >"$OUT/$name.log" 2>&1 </dev/null &
  child=$!
  set +m
  (sleep $((LIMIT_S - SECONDS)) && kill -TERM -- "-$child") >/dev/null 2>&1 &
  watcher=$!
  wait "$child"
  code=$?
  pkill -P "$watcher"
  kill "$watcher" 2>/dev/null
  wait "$watcher" 2>/dev/null
  note "$name: exit code $code, $((SECONDS - began)) s"
  ((code == 0)) || { STATUS=1; tail -n 20 "$OUT/$name.log" >&2; }
  add_result "$name" $code $((SECONDS - began)) "$(last_json "$OUT/$name.log")"
}

add_result() {  # NAME EXIT_CODE SECONDS [JSON]
  RESULTS+="${RESULTS:+, }\"$1\": {\"exit_code\": $2, \"seconds\": $3${4:+, \"figures\": $4}}"
  echo "{\"commit\": \"$COMMIT\", \"card\": \"$CARD\", \"checks\": {$RESULTS}}" >"$OUT/gpu_check.json"
}

last_json() {
  local line
  line=$(tail -n 1 "$1")
  [[ $line != \{* ]] || echo "$line"
}

COMMIT=$(git -C "$ROOT" rev-parse --short HEAD 2>/dev/null || echo unknown)
CARD=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | head -n 1)
note "$COMMIT, $CARD; $(nvcc --version | tail -n 1)"
note "$(python3 --version), $(python3 -c 'import torch; print("torch", torch.__version__)')"

CACHED=table.cache.admit=all,table.cache.capacity_fraction=1
STEP=(net=het dim=128 batch=8192 distinct=10)

in_venv() { PATH=$HETMPI_VENV/bin:$PATH "$@"; }
bench() { in_venv python "$ROOT/bench/$1.py" "${@:2}"; }
bench_step() {  # PEERS
  bench step device=cuda ranks=1 "${STEP[@]}" steps=150 warmup=50 repeats=1 "peers=$1" bounds=100,0 \
    "settings=table.staleness=null,$CACHED"
}
bench_variant() {  # SETTINGS: another way of the same step
  bench step device=cuda ranks=1 "${STEP[@]}" steps=150 warmup=50 repeats=1 \
    "settings=table.staleness=null,$CACHED,$1"
}
bench_rows_on_gpu() {
  bench step device=cuda ranks=1 "${STEP[@]}" steps=150 warmup=50 repeats=1 settings=table.staleness=0,table.store=gpu
}
bench_two_ranks() {  # both on one GPU where there is one
  bench step device=cuda ranks=2 "${STEP[@]}" steps=100 warmup=50 repeats=1 bounds=100,0 \
    "settings=table.staleness=null,$CACHED"
}
switches() (  # the step with Python's threads changing places every .1 ms in place of 5 ms
  mkdir -p "$WORK/switches"
  echo 'import sys; sys.setswitchinterval(1e-4)' >"$WORK/switches/sitecustomize.py"
  export PYTHONPATH=$WORK/switches
  bench step device=cuda ranks=1 "${STEP[@]}" steps=150 warmup=50 repeats=1 "settings=table.staleness=null,$CACHED"
)
zero_copy() { nvcc -O3 -arch=native "$ROOT/bench/zero_copy.cu" -o "$WORK/zero_copy" && "$WORK/zero_copy"; }
build() {
  nvcc -std=c++17 -O2 -lineinfo -fmad=false --expt-relaxed-constexpr -Xcompiler -ffp-contract=off -arch=native \
    --threads=0 -I"$ROOT/cpp" "$ROOT"/cpp/cuda/*.cu "$ROOT/tests/cpp/cuda_cache_test.cpp" -o "$WORK/test"
}
streams() {  # SEEDS STREAMS
  local seed
  for seed in $(seq "$1"); do "$WORK/test" "$seed" "$2" || return 1; done
}
sanitized() {  # TOOL STREAMS
  compute-sanitizer --tool "$1" --error-exitcode 1 "$WORK/test" 1 "$2"
}
extension() (
  # -L: hetmpi/models and hetmpi/conf are links that lead out of hetmpi/
  cp -rL "$ROOT"/{cpp,hetmpi,bench,setup.py} "$WORK" &&
    cd "$WORK" && rm -f hetmpi/*.so && HETMPI_CUDA=1 python3 setup.py -q build_ext --inplace
)
bench_cache() (
  cd "$WORK" && PYTHONPATH=$WORK python3 bench/cache.py device=cuda
)
train() {  # RANKS
  local settings=(device=cuda table.dim=128 batch_size=8192 steps=300 data.scale=0.05 table.staleness=100)
  NP=$1 "$ROOT/run.sh" train "${settings[@]}" table.cache.capacity_fraction=0.5 "run.dir=$OUT/train_$1"
}
soak() {  # RANKS STEPS
  "$HETMPI_VENV/bin/mpiexec" -n "$1" "$HETMPI_VENV/bin/python" "$ROOT/tests/support/cache_soak.py" "$1" "$2" cuda
}

if [[ -n $WHEELS ]]; then
  export PIP_NO_INDEX=1 PIP_FIND_LINKS=$WHEELS HETMPI_MPI=mpich HETMPI_VENV=$WORK/venv HETMPI_CUDA=1 HETMPI_HOROVOD=0
  compgen -G "$WHEELS/torchrec-*" >/dev/null && PEERS=local,torchrec || PEERS=local
  TORCHREC=$ROOT/bench/peers/requirements-torchrec-gpu.txt
  check setup "$ROOT/run.sh" setup
  [[ $PEERS == local ]] || check torchrec in_venv python -m pip install --no-deps -r "$TORCHREC"
  check bench_step bench_step "$PEERS"
  check rows_on_gpu bench_rows_on_gpu
  check on_gpu in_venv python -m pytest -q -p no:cacheprovider "$ROOT"/tests/support/{batches,rows}_on_gpu.py
  check kernels bench kernels "${STEP[@]}"
  check loader_threads bench_variant loader.threads=2
  check no_requests_ahead bench_variant table.look_ahead=false
  check switches switches
  check two_ranks bench_two_ranks
fi
check zero_copy zero_copy
check build build
check equality streams 10 200
check memcheck sanitized memcheck 20
check racecheck sanitized racecheck 6  # of shared memory alone, which only CUB uses here; takes 6 s a stream
check synccheck sanitized synccheck 20
check initcheck sanitized initcheck 20
if [[ -z $WHEELS ]]; then
  check extension extension
  check bench_cache bench_cache
else
  check bench_cache bench cache device=cuda
  check pytest env HETMPI_TEST_RANKS=1 "$ROOT/run.sh" test all tests/cpp/test_cuda.py
  check train_1 train 1
  check train_2 train 2  # both on one GPU where there is one
  check soak soak 2 20000
fi

note "gpu_check: $( ((STATUS == 0)) && echo passed || echo FAILED); see $OUT"
exit $STATUS
