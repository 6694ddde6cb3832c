"""Random tables, driven by random calls on real ranks, compared with sums in numpy (protocol_cases.py).

    python tests/support/protocol_soak.py [cases=1000] [seed=0] [ranks=1,2,3,4,5,7] [only=NUMBER]

Case i runs at the (i modulo their number)-th rank count. A failure prints the case and what differs, and a case that
takes CASE_LIMIT_S the stacks of its ranks; then the exit code is 1.
"""

import faulthandler
import json
import re
import sys
import time

import numpy as np
from bits_check import ENVIRONMENT
from launch import ROOT, mpiexec, run
from protocol_cases import Driver, draw_case

import hetmpi.world.world
from hetmpi import World

CASE_LIMIT_S = 60
NAPS = ":".join(map(str, ROOT.glob("hetmpi/_naps.*.so")))


def run_share(seed: int, numbers: list[int]):
    """Runs cases on every rank; rank 0 prints "told", the number, and the differences."""
    base, kept = World(), hetmpi.world.world.split_nodes
    tell = print if base.rank == 0 else str
    for number in numbers:
        tell(f'\ntold {number} ["did not end"]')
        faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
        case, runs = draw_case(seed, number, base.size), []
        for nodes in [base.size] * (case["grads"] == "adagrad") + [case["nodes"]]:
            hetmpi.world.world.split_nodes = lambda comm, k: kept(comm, k) if k else comm.Split(nodes[comm.rank])
            world = World(base.comm, nodes if isinstance(nodes, int) else None)
            runs.append(Driver(world, case))
            runs[-1].run()
            world.free()
        told = [text for driver in runs for checked in driver.checked.values() for text in checked.told]
        for one, other in zip(runs[0].checked.values(), runs[-1].checked.values()):
            pairs = zip(one.seen, other.seen)
            told += [f"{what}: not the bits of one node" for (what, a), (_, b) in pairs if not np.array_equal(a, b)]
        told = base.comm.gather([f"rank {base.rank}, {text}" for text in told])
        tell(f"\ntold {number} {json.dumps(sum(told or [], [])[:8])}")


def run_ranks(size: int, seed: str, numbers: list[int]) -> int:
    """Runs cases at one rank count, after one that does not end in new processes. Returns the number of failures."""
    began, told, environment = time.monotonic(), {}, {**ENVIRONMENT, "LD_PRELOAD": NAPS}
    command = [mpiexec(), "-n", str(size), sys.executable, "-um", "mpi4py", __file__, "--rank", seed]
    while left := [number for number in numbers if number not in told]:
        outcome = run([*command, json.dumps(left)], 1 << 20, **environment)
        found = re.findall(r"^told (\d+) (\[.*\])$", outcome.text, re.M) or [(left[0], '["did not begin"]')]
        told |= {int(number): json.loads(text) for number, text in found}
        if outcome.code:
            print(
                *[line for line in outcome.text.splitlines() if not re.search("^$|^told|runpy|mpi4py", line)], sep="\n"
            )
    for number in [number for number in numbers if told[number]]:
        print(f"protocol_soak: seed={seed} ranks={size} only={number} failed: {draw_case(int(seed), number, size)}")
        print(*told[number], sep="\n")
    print(f"protocol_soak: {len(numbers)} cases at {size} rank(s) in {time.monotonic() - began:.0f} s", flush=True)
    return sum(map(bool, told.values()))


def main(cases="1000", seed="0", ranks="1,2,3,4,5,7", only=None):
    counts, numbers = [int(count) for count in ranks.split(",")], range(int(cases)) if only is None else [int(only)]
    shares = {size: [i for i in numbers if counts[i % len(counts)] == size] for size in counts}
    num_failed = sum(run_ranks(size, seed, share) for size, share in shares.items())
    print(f"protocol_soak: {len(numbers)} cases, {num_failed} failures")
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_share(int(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main(**dict(argument.split("=") for argument in sys.argv[1:]))
