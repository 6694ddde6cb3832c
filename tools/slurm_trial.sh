#!/usr/bin/env bash
# Tries slurm/ under a Slurm of its own, on this machine alone: tools/slurm_trial.sh [PART...]
#
#   tools/slurm_trial.sh signal preempt        # default: all parts, in PARTS below
#
# The machine becomes two nodes of two CPUs each, by two slurmds; a training on a rank of each is interrupted again and again:
# signal: by scancel --signal=USR1; preempt: by a job of a partition of higher priority; kill: a rank dies; node: a node
# is lost. At its end it must have the bits of one that nobody interrupted. limit: --signal before the time limit, which
# Slurm looks at twice a minute. sweep: two points by submitit. recipe: the lines of docs/recipes.md, on nodes
# that claim to have the cores that train.sbatch asks for. scale: scale.sbatch.
# Daemons, configuration, munge's key and ports are the trial's own and removed at the end, however that comes.
#
# Exit code: 0 if all claims hold, 1 if one does not, 77 where this cannot be tried, with the reason.
# Needs root; without slurmctld, slurmd and munged, also apt-get. Takes python and MPI from the venv that is active, as run.sh makes it.
set -euo pipefail

skip() { echo "skipped: $1"; exit 77; }

ROOT=$(cd "$(dirname "$0")/.." && pwd)
PATH=$PATH:$ROOT/.venv/bin
HETMPI_VENV=$(python -c 'import sys; print(sys.prefix)')  # for train.sbatch
export HETMPI_VENV PYTHONPATH=$ROOT:${PYTHONPATH:-}
export MPIR_CVAR_POLLS_BEFORE_YIELD=1 OMPI_MCA_mpi_yield_when_idle=1  # each rank takes its node's cores for its own
mpi=$(python -c 'from hetmpi.world.mpi import srun_mpi; print(srun_mpi())')
PARTS="signal preempt kill node limit sweep recipe scale"
parts=${*:-$PARTS}
folder=${TMPDIR:-/tmp}/hetmpi-slurm-$$
small="data.scale=0.002 batch_size=64 table.dim=16 log.every_steps=10 eval.max_samples=500 device=cpu"
failures=0

main() {
    for part in $parts; do
        [[ " $PARTS " == *" $part "* ]] || { echo "slurm_trial.sh: no part $part" >&2; exit 2; }
    done
    [ "$(id -u)" = 0 ] || skip "needs root, to start Slurm"
    [[ $PATH == */usr/sbin* ]] || PATH=$PATH:/usr/sbin
    [ -z "$(pgrep -x slurmctld; pgrep -x slurmd)" ] || skip "a Slurm runs on this machine already"
    install_slurm
    mkdir -m 755 "$folder"
    trap take_down EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    start_slurm
    cd "$folder"
    if [[ " $parts" =~ \ (signal|preempt|kill|node) ]]; then try_interruptions; fi
    if [[ " $parts " == *" limit "* ]]; then try_limit; fi
    if [[ " $parts " == *" sweep "* ]]; then try_sweep; fi
    if [[ " $parts " == *" recipe "* ]]; then try_recipe; fi
    if [[ " $parts " == *" scale "* ]]; then try_scale; fi
    echo "=== $failures failed, $SECONDS s, --mpi=$mpi ==="
    [ $failures = 0 ]
}

install_slurm() {
    if command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null; then return; fi
    command -v apt-get >/dev/null || skip "needs slurmctld, slurmd and munged, and there is no apt-get"
    say "installing slurm-wlm and munge"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y slurm-wlm munge; } >/dev/null 2>&1 ||
        skip "apt-get install slurm-wlm munge failed"
}

start_slurm() {
    local host ports naps
    host=$(hostname -s)
    read -ra ports < <(free_ports 5)
    head -c 128 /dev/urandom >"$folder/munge.key"
    chmod 400 "$folder/munge.key"
    munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
        --log-file="$folder/munged.log" --seed-file="$folder/munged.seed" >/dev/null 2>&1
    mkdir "$folder/state" "$folder"/tmp-{n1,n2,wide1,wide2}
    : >"$folder/plugstack.conf"
    # KillWait: seconds from SIGTERM to SIGKILL.
    cat >"$folder/slurm.conf" <<CONF
ClusterName=hetmpi-trial
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2
KillWait=5
SlurmdParameters=config_overrides
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
TmpFS=$folder/tmp-%n
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
PlugStackConfig=$folder/plugstack.conf
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=2
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=2
NodeName=wide1 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[3]} CPUs=32
NodeName=wide2 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[4]} CPUs=32
PartitionName=wide Nodes=wide1,wide2
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=n1,n2 PriorityTier=2
CONF
    export SLURM_CONF=$folder/slurm.conf
    slurmctld
    local node
    for node in n1 n2 wide1 wide2; do slurmd -N $node; done
    await 20 all_idle || { tail -n 20 "$folder"/slurm*.log; die "Slurm does not start"; }
    naps=("$ROOT"/hetmpi/_naps.*.so)
    [ ! -e "${naps[0]}" ] || export LD_PRELOAD=${naps[0]}  # cpp/naps.c: for ranks that share the cores with others
    [[ $(srun --mpi=list 2>&1) == *$mpi* ]] || skip "this Slurm has no --mpi=$mpi"
    say "$(slurmctld -V) with nodes n1 and n2, --mpi=$mpi"
}

free_ports() {  # HOW_MANY
    python -c "
import socket, sys
sockets = [socket.create_server(('127.0.0.1', 0)) for _ in range(int(sys.argv[1]))]
print(*(s.getsockname()[1] for s in sockets))" "$1"
}

all_idle() { [ "$(sinfo -h -t idle -p low,wide -o %D 2>/dev/null | awk '{ n += $1 } END { print n }')" = 4 ]; }

# One training, interrupted and cancelled at last; submitted again for some steps more; and as many steps in peace.
try_interruptions() {
    local job whole part restarts=0 steps
    job=$(submit interrupted steps=1000000)
    for part in $parts; do
        [[ $part =~ ^(signal|preempt|kill|node)$ ]] || continue
        await_steps interrupted
        "interrupt_by_$part" "$job"
        restarts=$((restarts + 1))
        claim "$part: the job is back and goes on from its checkpoint" await 240 comes_back "$job" $restarts
    done
    await_steps interrupted
    scancel "$job"
    claim "scancel: the job ends" await 240 has_ended "$job"
    claim "scancel: it does not come back" is_in_state "$job" CANCELLED
    steps=$(($(newest_checkpoint interrupted) + 20))
    job=$(submit interrupted "steps=$steps")
    whole=$(submit whole "steps=$steps")
    claim "submitted again: $steps steps, to their end" await 240 is_in_state "$job" COMPLETED
    claim "submitted again: from the step where it was cancelled" grep -q "^resumed from .*-0*$((steps - 20))$" "interrupted-$job.log"
    claim "the same in peace" await 240 is_in_state "$whole" COMPLETED
    claim "both have summary.json" test -e runs/interrupted/summary.json -a -e runs/whole/summary.json
    claim "both have the same bits at their end" same_bits "$steps"
}

interrupt_by_signal() {  # JOB
    scancel --signal=USR1 "$1"
    claim "signal: the ranks save and leave with 85" await 240 has_left "interrupted-$1.log" 1
}

interrupt_by_preempt() {  # JOB
    local left urgent
    left=$(count_left "interrupted-$1.log")
    urgent=$(sbatch --parsable -J urgent -p high -N2 --ntasks-per-node=2 -o urgent.log --wrap "sleep 2")
    claim "preempt: the ranks save and leave with 85" await 240 has_left "interrupted-$1.log" $((left + 1))
    claim "preempt: the urgent job runs" await 240 is_in_state "$urgent" COMPLETED
}

interrupt_by_kill() {  # JOB
    kill -KILL "$(ranks_of interrupted | head -n1)"
    claim "kill: the job ends by itself" await 240 is_in_state "$1" FAILED
    scontrol requeue "$1"
}

interrupt_by_node() {  # JOB
    scontrol update nodename=n2 state=down reason=trial
    claim "node: Slurm requeues the job" await 240 is_in_state "$1" PENDING
    scontrol update nodename=n2 state=resume
}

# The signal of --signal itself: the time left is made short.
try_limit() {
    local job
    job=$(submit limited steps=1000000)
    await_steps limited
    scontrol update jobid="$job" timelimit=6
    claim "limit: the ranks save and leave with 85, minutes before the limit" await 240 has_left "limited-$job.log" 1
    claim "limit: the job is back and goes on" await 240 comes_back "$job" 1
    scancel "$job"
}

try_sweep() {
    if ! python -c "import submitit, hydra_plugins.hydra_submitit_launcher" 2>/dev/null; then
        say "installing hydra-submitit-launcher"
        python -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps --target packages \
            hydra-submitit-launcher submitit >pip.log 2>&1 || { tail -n 5 pip.log; die "pip install hydra-submitit-launcher failed"; }
        PYTHONPATH=$folder/packages:$PYTHONPATH
    fi
    # shellcheck disable=SC2086
    timeout 300 python "$ROOT/slurm/sweep.py" --multirun table.staleness=0,10 table.cache.admit=all steps=100 $small hydra.sweep.dir=sweep \
        hydra/launcher=submitit_slurm hydra.launcher.nodes=2 hydra.launcher.array_parallelism=1 >sweep.log 2>&1 &
    wait $! || true  # so that a signal to this script is served at once
    grep -E '^ +[01] ' sweep.log || tail -n 20 sweep.log sweep/.submitit/*/*.err
    claim "sweep: a row per point" test "$(grep -cE '^ +[01] +0\.' sweep.log)" = 2
    claim "sweep: each point on two ranks, with its own setting" sweep_is_right
}

# The section "Slurm" of docs/recipes.md, line by line.
try_recipe() {
    local line job
    line=$(sed -n '/^## Slurm/,$p' "$ROOT/docs/recipes.md" | grep '^sbatch ')
    export SBATCH_PARTITION=wide
    ln -s "$ROOT/slurm" slurm
    job=$(eval "$line" | grep -o '[0-9]*$')
    await 240 has_lines runs/run7/metrics.jsonl 2 || { tail -n 20 run7-*.log; die "recipe: the training makes no steps"; }
    claim "recipe: the log is there" test -s run7-"$job".log
    scancel --signal=USR1 "$job"
    claim "recipe: scancel --signal=USR1: the ranks save and leave with 85" await 240 has_left "run7-$job.log" 1
    claim "recipe: the job is requeued" await 60 is_in_state "$job" PENDING
    scancel "$job"
    job=$(eval "${line/steps=100000/steps=200000}" | grep -o '[0-9]*$')
    claim "recipe: the same name goes on" await 240 grep -qs "^resumed from runs/run7/" "run7-$job.log"
    scancel "$job"
    unset SBATCH_PARTITION
}

# Both nodes are this machine: ranks_per_node=1 makes them two for the table.
try_scale() {
    local job
    job=$(cd "$ROOT" && sbatch --parsable -N2 --ntasks-per-node=1 -o "$folder/scale-%j.log" slurm/scale.sbatch \
        ranks_per_node=1 s=0,10 steps=10 warmup=2)
    claim "scale: the job ends well" await 240 is_in_state "$job" COMPLETED
    grep -vE '^bench scale:' "scale-$job.log"
    claim "scale: a line for each staleness on one node and on two" test "$(grep -cE '^ +(0|10) +[12] ' "scale-$job.log")" = 4
}

sweep_is_right() {
    python - <<PYTHON
import json
from pathlib import Path

for point, staleness in ("0", 0), ("1", 10):
    assert json.loads(Path("sweep", point, "summary.json").read_text())["world_size"] == 2
    assert f"\n  staleness: {staleness}\n" in Path("sweep", point, "config.yaml").read_text()
PYTHON
}

submit() {  # NAME SETTINGS...: prints the job's number
    # shellcheck disable=SC2086
    sbatch --parsable -J "$1" -N2 --ntasks-per-node=1 --cpus-per-task=1 --time=15 "$ROOT/slurm/train.sbatch" $small checkpoint.every_steps=50 "${@:2}"
}

# Waits until a training has a checkpoint and makes steps.
await_steps() {  # NAME
    local lines
    await 240 has_begun "$1" || { tail -n 20 "$1"-*.log; die "$1: the training does not begin"; }
    lines=$(wc -l <"runs/$1/metrics.jsonl")
    await 240 has_lines "runs/$1/metrics.jsonl" $((lines + 2)) || die "$1: the training makes no steps"
}

has_begun() { [ "$(ranks_of "$1" | wc -l)" = 2 ] && [ -s "runs/$1/metrics.jsonl" ] && [ -n "$(newest_checkpoint "$1")" ]; }  # NAME
has_lines() { [ -e "$1" ] && [ "$(wc -l <"$1")" -ge "$2" ]; }  # FILE HOW_MANY
newest_checkpoint() { find "runs/$1/checkpoints" -name 'step-*[0-9]' 2>/dev/null | sed 's/.*step-0*//' | sort -n | tail -n1; }  # NAME: its step
ranks_of() { pgrep -f "^[^ ]*python -m hetmpi.train run.dir=runs/$1 "; }  # NAME

# Slurm lets a requeued job wait two minutes. Some seconds are enough for the nodes to have done with what ran before, but are needed: it had the
# same step number, and its end removes the new step's socket.
comes_back() {  # JOB TIMES
    if [[ $(scontrol show job "$1") == *Reason=BeginTime* ]]; then
        sleep 5
        scontrol update jobid="$1" starttime=now 2>/dev/null || true
    fi
    [ "$(cat ./*-"$1".log | grep -c "^resumed from")" -ge "$2" ]
}

has_left() { [ "$(count_left "$1")" -ge "$2" ] && grep -q "Exited with exit code 85" "$1"; }  # LOG TIMES
count_left() { grep -c "stopped by a signal: saved" "$1" || true; }  # LOG
has_ended() { ! squeue -h -j "$1" -t all -o %T | grep -qvE 'CANCELLED|COMPLETED|FAILED'; }  # JOB
is_in_state() { [[ $(scontrol show job "$1") == *"JobState=$2 "* ]]; }  # JOB STATE

same_bits() {  # STEP
    PYTHONPATH=$ROOT/tests/support:$PYTHONPATH python - "$1" <<'PYTHON'
import sys
from pathlib import Path

from saved_files import assert_same_bits

assert_same_bits(*(Path(f"runs/{name}/checkpoints/step-{int(sys.argv[1]):08d}") for name in ("interrupted", "whole")))
PYTHON
}

await() {  # SECONDS CONDITION...
    local until=$((SECONDS + $1)) said=$SECONDS
    until "${@:2}"; do
        ((SECONDS < until)) || return 1
        ((SECONDS - said < 8)) || { said=$SECONDS; say "waiting for ${*:2}"; }
        sleep 0.2
    done
}

claim() {  # TEXT CONDITION...
    if "${@:2}"; then
        say "PASS $1"
    else
        say "FAIL $1"
        failures=$((failures + 1))
    fi
}

say() { printf '%4d s  %s\n' $SECONDS "$1"; }
die() { say "FAIL $1"; exit 1; }

take_down() {
    trap '' INT TERM HUP
    scancel --full --signal=KILL --state=running 2>/dev/null || true
    export -n SLURM_CONF
    local processes
    while processes=$(own_processes) && [ -n "$processes" ]; do
        xargs -r kill -KILL <<<"$processes" 2>/dev/null || true
        sleep 0.1
    done
    [ ! -e "$folder/munged.pid" ] || kill -KILL "$(<"$folder/munged.pid")"  # at a gentler end it would still write here
    rm -rf "$folder"
}

# Those that have this Slurm's configuration in their environment: the daemons and whatever they started.
own_processes() { { grep -lsz "^SLURM_CONF=$folder/" /proc/[0-9]*/environ || true; } | cut -d/ -f3; }

main
