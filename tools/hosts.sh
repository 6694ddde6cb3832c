#!/usr/bin/env bash
# Runs an MPI command on several hosts, all of them on this machine: tools/hosts.sh [-n RANKS] [-H HOSTS] [-r RATE]
# COMMAND…
#
#   tools/hosts.sh -n 2 -H 4 -r 1gbit python -m hetmpi.train steps=100
#
# Each host is a network namespace on one bridge with a name (h1, h2, …), a loopback and a /dev/shm of its own: ranks of
# two hosts reach each other by TCP alone. Each host has an equal share of this machine's cores, rounded down; where
# hosts outnumber cores they take them in turn. The bridge lies in a third namespace, where mpiexec runs: nothing is
# added to this machine's own network, and runs do not meet. All of it is removed at the end, however that comes.
#
# -n: ranks per host (1); -H: hosts (2); -r: what each host sends and receives at most, as tc says it (10gbit, 100mbit;
# default: as fast as memory). MASTER_ADDR and GLOO_SOCKET_IFNAME are set as well, for torch.distributed. Exit code: the
# command's; 77 where this cannot be done, with the reason.
# Needs root, iproute2, util-linux and MPICH's mpiexec (on PATH, else .venv's).
set -euo pipefail

usage() { sed -n '2,5s/^# \{0,1\}//p' "$0"; }
skip() { echo "skipped: $1"; exit 77; }

ranks=1 hosts=2 rate=
while getopts n:H:r:h option; do
    case $option in
        n) ranks=$OPTARG ;;
        H) hosts=$OPTARG ;;
        r) rate=$OPTARG ;;
        h) usage; exit 0 ;;
        *) usage >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
for count in "$ranks" "$hosts"; do
    [[ $count =~ ^[1-9][0-9]{0,1}$ ]] || { echo "hosts.sh: -n and -H take 1 to 99, got '$count'" >&2; exit 2; }
done
[ $# -gt 0 ] || { usage >&2; exit 2; }

PATH=$PATH:$(cd "$(dirname "$0")/.." && pwd)/.venv/bin
[ "$(id -u)" = 0 ] || skip "needs root, to make network namespaces"
for tool in ip unshare mount taskset; do
    command -v $tool >/dev/null || skip "needs $tool: apt-get install iproute2 util-linux"
done
[ -z "$rate" ] || command -v tc >/dev/null || skip "-r needs tc: apt-get install iproute2"
[[ $(mpiexec --version 2>&1) == *HYDRA* ]] || skip "needs MPICH's mpiexec on PATH: pip install mpich"

prefix=hetmpi-$$
launcher=$prefix-launcher
subnet=198.18.0 # kept for tests of networks (RFC 2544); lives in the namespaces only
folder=${TMPDIR:-/tmp}/$prefix

remove() {
    trap '' INT TERM HUP
    disown -a # else bash reports the end of what is killed here
    local name namespace
    for name in launcher $(seq -f 'h%g' "$hosts"); do # mpiexec first: it would complain of ranks that vanish
        namespace=$prefix-$name
        [ -e "/run/netns/$namespace" ] || continue
        ip netns pids "$namespace" | xargs -r kill -KILL 2>/dev/null || true
        ip netns delete "$namespace"
    done
    rm -rf "$folder" "/etc/netns/$launcher"
}
trap remove EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

add_host() { # NAME ADDRESS
    local namespace=$prefix-$1
    ip netns add "$namespace"
    ip -n "$launcher" link add "$1" type veth peer name net0 netns "$namespace"
    ip -n "$launcher" link set "$1" master net0 up
    ip -n "$namespace" address add "$2/24" dev net0
    ip -n "$namespace" link set lo up
    ip -n "$namespace" link set net0 up
    ip -n "$namespace" route add default via $subnet.254 # UCX prefers the interface that has it
    if [ -n "$rate" ]; then
        tc -n "$namespace" qdisc add dev net0 root tbf rate "$rate" burst 256kb latency 100ms
        tc -n "$launcher" qdisc add dev "$1" root tbf rate "$rate" burst 256kb latency 100ms
    fi
    echo "$2 $1" >>"/etc/netns/$launcher/hosts"
}

mkdir -m 700 "$folder"
reason=$(ip netns add "$launcher" 2>&1) || skip "cannot make a network namespace: $reason"
reason=$(ip -n "$launcher" link add net0 type bridge 2>&1) || skip "cannot make a bridge: $reason"
ip -n "$launcher" address add $subnet.254/24 dev net0
ip -n "$launcher" link set lo up
ip -n "$launcher" link set net0 up
mkdir -p "/etc/netns/$launcher" # `ip netns exec` puts what is here over /etc, and the hosts inherit it
echo "127.0.0.1 localhost" >"/etc/netns/$launcher/hosts"
allowed=$(taskset -cp $$ | sed 's/.*: //') # as 0-3,8
mapfile -t cores < <(for part in ${allowed//,/ }; do seq "${part%-*}" "${part#*-}"; done)
share=$((${#cores[@]} / hosts))
share=$((share > 0 ? share : 1))
names=()
for i in $(seq "$hosts"); do
    add_host "h$i" "$subnet.$i"
    names+=("h$i")
    own=("${cores[@]:(i - 1) * share % ${#cores[@]}:share}")
    (IFS=, && echo "${own[*]}") >"$folder/cores-h$i"
done

# mpiexec's ssh: AGENT -x HOST COMMAND…, the command quoted for a shell.
cat >"$folder/agent" <<AGENT
#!/bin/sh
[ "\$1" != -x ] || shift
host=\$1
shift
exec ip netns exec $prefix-\$host taskset -c "\$(cat $folder/cores-\$host)" unshare --uts --ipc sh -c '
    mount -t tmpfs tmpfs /dev/shm && echo "\$0" >/proc/sys/kernel/hostname && eval "\$1"' "\$host" "\$*"
AGENT
chmod +x "$folder/agent"

threads=$((${#cores[@]} / (ranks * hosts)))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
export MASTER_ADDR=$subnet.1 GLOO_SOCKET_IFNAME=net0
export MPIR_CVAR_POLLS_BEFORE_YIELD=${MPIR_CVAR_POLLS_BEFORE_YIELD:-1}
naps=("$(cd "$(dirname "$0")/.." && pwd)"/hetmpi/_naps.*.so)
if [ $((ranks * hosts)) -gt ${#cores[@]} ] && [ -e "${naps[0]}" ]; then
    export LD_PRELOAD=${LD_PRELOAD-${naps[0]}} # cpp/naps.c
fi
# Behind `wait`, so that a signal to this script is served at once and not when the command has ended.
ip netns exec "$launcher" mpiexec -launcher ssh -launcher-exec "$folder/agent" -iface net0 \
    -hosts "$(IFS=, && echo "${names[*]}")" -ppn "$ranks" -n $((ranks * hosts)) "$@" <&0 &
wait $!
