#!/usr/bin/env bash
# Checks the GPU's half on a machine with a GPU, which may have no network: with the python3 (torch, numpy, pybind11,
# mpi4py), nvcc and compute-sanitizer found there. Leaves a log and gpu_check.json in OUT_DIR. Exit code 0 if all checks
# pass. With WHEELS, a folder of wheels and source distributions of what requirements.txt names (torch apart), it trains
# end to end too.
#
#   ./run.sh gpu-check OUT_DIR [WHEELS]
set -uo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ $# -eq 1 || ( $# -eq 2 && -d $2 ) ]] || { echo "./run.sh gpu-check OUT_DIR [WHEELS]: name the folder for the log and gpu_check.json, and a folder of wheels that is there" >&2; exit 2; }
for tool in nvcc compute-sanitizer nvidia-smi; do
  command -v "$tool" >/dev/null || { echo "./run.sh gpu-check: there is no $tool on PATH; it is for a machine with a GPU and CUDA" >&2; exit 2; }
done
python3 -c "import mpi4py, numpy, pybind11, torch; assert torch.cuda.is_available(), 'torch sees no GPU'" || exit 2
mkdir -p "$1" && OUT=$(cd "$1" && pwd) || exit 2
WHEELS=${2:+$(cd "$2" && pwd)}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
LOG=$OUT/gpu_check.log
STATUS=0
: >"$LOG"
rm -f "$OUT"/bench_*.log "$OUT/gpu_check.json"

note() { echo "$*" | tee -a "$LOG"; }

# check NAME COMMAND...: runs it into the log; its result and seconds go into gpu_check.json
check() {
  local name=$1 began=$SECONDS code
  shift
  note "--- $name: $*"
  "$@" >>"$LOG" 2>&1
  code=$?
  note "$name: exit code $code, $((SECONDS - began)) s"
  ((code == 0)) || { STATUS=1; tail -n 20 "$LOG" >&2; }
  RESULTS+="${RESULTS:+, }\"$name\": {\"exit_code\": $code, \"seconds\": $((SECONDS - began))}"
  write_json
}

# Of what is known so far: whoever stops this later finds it.
write_json() {
  echo "{\"checks\": {$RESULTS}, \"bench_cache\": $(last_json "$OUT/bench_cache.log"), \"bench_step\": $(last_json "$OUT/bench_step.log")}" >"$OUT/gpu_check.json"
}
last_json() { local line; line=$(tail -n 1 "$1" 2>/dev/null); [[ $line == \{* ]] && echo "$line" || echo null; }

RESULTS=
note "$(python3 --version), $(python3 -c 'import torch; print("torch", torch.__version__, torch.cuda.get_device_name())')"
note "$(nvcc --version | tail -n 1); $(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader)"

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

check build build
check equality streams 10 200
check memcheck sanitized memcheck 20
check racecheck sanitized racecheck 6  # of shared memory alone, which only CUB uses here; takes 6 s a stream
check synccheck sanitized synccheck 20
check initcheck sanitized initcheck 20
check extension extension
bench_cache() (
  cd "$WORK" && PYTHONPATH=$WORK python3 bench/cache.py device=cuda 2>&1 | tee "$OUT/bench_cache.log"
)
check bench_cache bench_cache

train() {  # RANKS
  local settings=(device=cuda table.dim=128 batch_size=8192 steps=300 data.scale=0.05 table.staleness=100 table.cache.capacity_fraction=0.5)
  NP=$1 "$ROOT/run.sh" train "${settings[@]}" "run.dir=$OUT/train_$1"
}
soak() {  # RANKS STEPS
  "$HETMPI_VENV/bin/mpiexec" -n "$1" "$HETMPI_VENV/bin/python" "$ROOT/tests/support/cache_soak.py" "$1" "$2" cuda
}
bench_step() {
  "$ROOT/run.sh" bench step device=cuda ranks=1 net=het dim=128 batch=8192 steps=150 warmup=50 distinct=10 repeats=3 \
    settings=table.staleness=null,table.cache.admit=all,table.cache.capacity_fraction=1 >"$OUT/bench_step.log" 2>&1
}
if [[ -n $WHEELS ]]; then
  export PIP_NO_INDEX=1 PIP_FIND_LINKS=$WHEELS HETMPI_MPI=mpich HETMPI_VENV=$WORK/venv
  check setup env HETMPI_CUDA=1 "$ROOT/run.sh" setup
  check pytest env HETMPI_TEST_RANKS=1 "$ROOT/run.sh" test all tests/cpp/test_cuda.py
  check train_1 train 1
  check train_2 train 2  # both on one GPU where there is one
  check soak soak 2 100000
  check bench_step bench_step
fi

note "gpu_check: $( ((STATUS == 0)) && echo passed || echo FAILED); see $OUT"
exit $STATUS
