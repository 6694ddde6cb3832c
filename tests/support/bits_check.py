"""Shows that a change keeps every bit: records what this checkout computes, or compares it with a record.

    python tests/support/bits_check.py record FILE [ONLY]     runs all cases, writes FILE (JSON)
    python tests/support/bits_check.py compare FILE [ONLY]    runs them again, prints "same" or the first difference

Exit code 1 if a case differs, or fails. ONLY: the cases whose names contain all words of this text, for example
"ranks=2 windows s=10". Record and compare on one machine: the dense layers' bits depend on the processor and on torch.

Two kinds of cases, at 1, 2 and 3 ranks:
    table    an EmbeddingTable driven through its public calls, with seeded keys and gradients. Recorded: all rows read
             and peeked at, step by step; counters; lags; after a flush weight, state and clock of all shards by key
    train    python -m hetmpi.train. Recorded: the loss of every step, AUC and log loss at the end

At s = 0 all ranks step together, as in a training. At s >= 1 the result depends on the order in which an owner applies
pushes. Two ways to step fix that order:
    in turns    one-sided, or on one node. One rank steps while the others wait. Its step ends when the owners have
                applied its pushes (await_owners) and its gets are complete (a peek at rows of all ranks flushes the
                window). Before the last flush, in which all ranks would push at once, each pushes in its turn
    together    messages, with each rank on a node of its own: a rank handles messages in rank order, on its main thread

Not recorded, because the result depends on timing:
    trainings at s >= 1 on several ranks, but for messages with each rank on a node of its own
    one-sided reads while pushes of the same rank are in flight
    messages at s >= 1 over nodes of several ranks
    exchange=auto
With the environment of tests/support/emulated.py the lines are on the emulated GPU: compared with a record of the CPU.
"""

import itertools
import json
import platform
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import xxhash
from caches import DEVICE, CacheSettings
from launch import ROOT, losses, mpiexec, run, summary

from hetmpi import EmbeddingTable, RowOptimizer, Schedule, Staleness, World, launch

RANKS = (1, 2, 3)
STALENESS = (0, 10, 100, None)
LR = {"sgd": 0.3, "adagrad": 0.05, "rowwise_adagrad": 0.05, "adam": 0.01}
NUM_ROWS, DIM, DRAWS, CAPACITY_ROWS, TRAIN_STEPS = 500, 6, 40, 64, 12
NAP_S = 50e-6
CASE_LIMIT_S, LIMIT_S = 180, 3600  # of one case; of all at one rank count
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
FAILED = "failed, or did not end"
MAX_FAILED = 10  # at one rank count

PLACES = {  # name -> ranks_per_node, exchange. On one node the exchange has no effect
    "near": (None, "windows"),
    "windows": (1, "windows"),
    "messages": (1, "messages"),
    "mixed": (2, "windows"),
}


@dataclass(frozen=True)
class Case:
    """One table or run. place: of PLACES. options: settings of the table beyond the constants above."""

    kind: str
    place: str
    staleness: int | None
    rule: str
    prefetch: int
    options: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        named = {"s": self.staleness, "prefetch": self.prefetch, **self.options}
        return " ".join([self.kind, self.place, self.rule, *(f"{key}={value}" for key, value in named.items())])

    @property
    def takes_turns(self) -> bool:
        return self.staleness != 0 and self.place != "messages"

    @property
    def num_steps(self) -> int:
        """50, or enough for lines of the most frequent rows to exceed the bound."""
        return max(50, 3 * (self.staleness or 0) // 2)


# The cases


def cases_of(ranks: int) -> list[Case]:
    places = ["near"] if ranks == 1 else ["near", "windows", "messages"]
    product = itertools.product(places, STALENESS, ("sgd", "adagrad", "adam"), (0, 1))
    cases = [Case("table", *choice) for choice in product if is_chosen(*choice)]
    if ranks < 3:
        cases += [Case("table", place, *choice) for place, choice in itertools.product(places[-2:], list(variants()))]
    else:
        cases += [Case("table", "mixed", s, "adagrad", prefetch) for s, prefetch in ((0, 0), (10, 0), (10, 1))]
    return cases + list(trainings(ranks, places))


def is_chosen(place: str, staleness: int | None, rule: str, prefetch: int) -> bool:
    """At s = 0, where nothing is fetched ahead, all rules; at s = 10 all, but on one node, where a prefetch has no
    effect, prefetches with SGD only. At s = 100 and null SGD with a prefetch and Adagrad without one."""
    if staleness == 0:
        return prefetch == 0
    if staleness == 10:
        return place != "near" or prefetch == 0 or rule == "sgd"
    return rule != "adam" and prefetch == (place != "near" and rule == "sgd")


def variants():
    """(staleness, rule, prefetch, options): settings that the other cases leave at their defaults."""
    yield from ((s, "sgd", 1, {"dtype": "float16"}) for s in (10, None))
    yield 10, "adam", 1, {"dtype": "bfloat16"}
    yield from ((10, "adagrad", 1, {"policy": policy}) for policy in ("lru", "lfuopt"))
    yield from (
        (s, "adagrad", int(s > 0), {"partition": partition})
        for s, partition in [(0, "hash"), (10, "hash"), (10, "range")]
    )
    yield 10, "adagrad", 1, {"capacity_rows": 0}
    yield 10, "rowwise_adagrad", 2, {}
    yield 10, "adagrad", 1, {"anticipate": 1.0}
    yield 1, "sgd", 1, {}


def trainings(ranks: int, places: list[str]):
    for place, rule in itertools.product(places, ("sgd", "adagrad", "adam")):
        yield Case("train", place, 0, rule, 0)
    yield Case("train", places[-1], 10, "adagrad", 1)
    yield Case("train", places[-1], 100, "sgd", 1, {"table.cache.dtype": "float16"})
    yield Case("train", places[-1], None, "adagrad", 0)


# On every rank


def run_cases(world: World):
    """Runs the cases selected on the command line except those in the file; rank 0 appends a line of JSON for each."""
    out, only = Path(sys.argv[2]), sys.argv[3]
    done = {json.loads(line)[0] for line in out.read_text().splitlines()} if out.exists() else set()
    world.comm.Barrier()
    worlds = {place: World(world.comm, PLACES[place][0]) for place in PLACES}
    for case in chosen(world.size, only):
        if case.name in done:
            continue
        note(world, out, [case.name, FAILED])  # until it is done
        signal.alarm(CASE_LIMIT_S)  # kills this rank, and thereby all
        result = train(world, case, out.parent) if case.kind == "train" else drive(worlds[case.place], case)
        note(world, out, [case.name, result])


def chosen(ranks: int, only: str) -> list[Case]:
    return [case for case in cases_of(ranks) if is_meant(full_name(ranks, case.name), only)]


def full_name(ranks: int, name: str) -> str:
    return f"ranks={ranks} {name}"


def is_meant(name: str, only: str) -> bool:
    return set(only.split()) <= set(name.split())


def note(world: World, out: Path, line: list):
    if world.rank == 0:
        with out.open("a") as lines:
            print(json.dumps(line), file=lines)


def train(world: World, case: Case, folder: Path) -> dict:
    """The loss curve of a run."""
    ranks_per_node, exchange = PLACES[case.place]
    settings = {
        "device": DEVICE,
        "data.scale": 0.0005,
        "table.dim": 4,
        "batch_size": 32,
        "steps": TRAIN_STEPS,
        "log.every_steps": 1,
        "eval.max_samples": 300,
        "seed": 3,
        "table.staleness": "null" if case.staleness is None else case.staleness,
        "optim.rows": case.rule,
        "table.look_ahead": case.prefetch > 0,
        "table.batches_per_pull": max(1, case.prefetch),
        "table.exchange": exchange,
        "table.cache.capacity_rows": 0 if case.staleness == 0 else 200,
        "table.cache.admit": "all",
        "watchdog.seconds": 0,
        "run.dir": folder / case.name.replace(" ", "-").replace("=", "-"),
        **case.options,
    }
    if ranks_per_node is not None:
        settings["table.ranks_per_node"] = ranks_per_node
    sys.argv[1:], kept = [f"{key}={value}" for key, value in settings.items()], sys.argv[1:]
    runpy.run_module("hetmpi.train", run_name="__main__")  # as python -m does
    sys.argv[1:] = kept
    if world.rank > 0:
        return {}
    told = summary(settings["run.dir"])
    curve = [loss.hex() for _, loss in sorted(losses(settings["run.dir"]).items())]
    return {"loss": curve, **{name: told[name].hex() for name in ("auc", "log_loss")}}


def drive(world: World, case: Case) -> dict:
    """All steps of a case on a table; on rank 0 the record of it."""
    table = make_table(world, case)
    driver = Driver(world, case, table)
    for step in range(case.num_steps):
        driver.in_turn(driver.step, step)
    if case.takes_turns:
        driver.in_turn(driver.push_all)  # in a flush all ranks push at once
        world.comm.Barrier()
    table.flush()
    driver.see(table.peek(torch.arange(world.rank, NUM_ROWS, 3)))
    mine = {
        "rows": driver.rows.hexdigest(),
        "trail": driver.trail,
        "counters": asdict(table.counters),
        "lags": table.cache.lags.tolist(),
    }
    by_rank, shards = world.comm.gather(mine), world.comm.gather(shard_of(table))
    world.comm.Barrier()
    table.close()
    return {} if world.rank > 0 else {"by_rank": by_rank, **by_key(shards)}


class Driver:
    """One rank's calls. rows: digest of all rows read and peeked at; trail: its first 8 digits after each step."""

    def __init__(self, world: World, case: Case, table: EmbeddingTable):
        self.world, self.case, self.table = world, case, table
        self.batches = [batch_of(world, step) for step in range(case.num_steps + case.prefetch + 1)]
        self.num_announced = 1  # the first batch is read without
        self.rows, self.trail = xxhash.xxh3_128(), ""

    def see(self, rows: torch.Tensor):
        self.rows.update(rows.numpy().tobytes())

    def in_turn(self, act, *arguments):
        """Runs a call on all ranks, one after the other if they take turns."""
        comm, rank, size = self.world.comm, self.world.rank, self.world.size
        passes_turns = self.case.takes_turns and size > 1
        if passes_turns and rank > 0:
            self.await_turn(rank - 1)
        act(*arguments)
        if passes_turns:
            comm.send(None, (rank + 1) % size)
            if rank == 0:
                self.await_turn(size - 1)

    def push_all(self):
        """Pushes this rank's pending gradients, without the other ranks."""
        self.table.client.send_all()

    def await_turn(self, before: int):
        """Waits for the message of rank `before`. Sleeps, since the rank whose turn it is may need this core; each
        probe lets MPI serve its gets."""
        while not self.world.comm.iprobe(before):
            time.sleep(NAP_S)
        self.world.comm.recv(source=before)

    def step(self, step: int):
        """One step. Some steps write fewer keys than they read. At s >= 1 some also read without a write, write a
        second time, write keys that were not read, or do not write."""
        table, case, (keys, noise) = self.table, self.case, self.batches[step]
        is_bounded = case.staleness != 0
        if is_bounded and step % 7 == 5:
            self.see(table.read(batch_of(self.world, step + 1000)[0]))
            self.num_announced = 0  # a read of another batch drops the announced ones
            self.await_quiet()
        rows = table.read(keys)
        self.see(rows)
        self.announce(step)
        grads, learns = (0.5 * rows + noise) / self.world.size, keys % 3 > 0
        if step % (4 if is_bounded else 2) == 1:
            table.write(keys[learns], grads[learns])
        elif not is_bounded or step % 9 != 7:
            table.write(keys, grads)
        if is_bounded and step % 5 == 4:
            self.await_quiet()
            table.write(keys.clone(), noise.flip(0) / self.world.size)
        if is_bounded and (case.takes_turns or step % 11 == 10):
            table.await_owners()
            self.see(table.peek(torch.arange(2 * self.world.size)))  # completes this rank's gets
            if not case.takes_turns:
                self.num_announced = 0  # with messages await_owners drops them
        self.trail += self.rows.hexdigest()[:8]

    def announce(self, step: int):
        """Announces the next batches that are not announced yet."""
        last = step + self.case.prefetch
        for later in range(max(step + 1, self.num_announced), last + 1):
            self.table.prefetch(self.batches[later][0])
        self.num_announced = last + 1

    def await_quiet(self):
        """If ranks take turns, waits until the owners have applied the pushes of this rank."""
        if self.case.takes_turns:
            self.table.await_owners()


def make_table(world: World, case: Case) -> EmbeddingTable:
    options = dict(case.options)
    optimizer = RowOptimizer(case.rule, LR[case.rule], 0.01, schedule=Schedule("cosine", 5, 2 * case.num_steps))
    staleness = Staleness(case.staleness, options.pop("anticipate", None), 0.0)
    cache = CacheSettings(
        0 if case.staleness == 0 else options.pop("capacity_rows", CAPACITY_ROWS),
        policy=options.pop("policy", "lfu"),
        dtype=options.pop("dtype", "float32"),
        admit="all" if world.is_one_node else "remote",
    )
    settings = {
        "init_std": 0.1,
        "seed": 7,
        "inbox_bytes": 1 << 14,
        "exchange": PLACES[case.place][1],
        "staleness": staleness,
        "cache": cache,
    }
    return EmbeddingTable(world, NUM_ROWS, DIM, optimizer, **settings, **options)


def batch_of(world: World, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's keys (U,) int64, skewed, unique, unordered, sometimes none, and noise for gradients (U, DIM)."""
    random = np.random.default_rng([step, world.rank])
    num_draws = 0 if step % 17 == 11 + world.rank else DRAWS
    keys = random.permutation(np.unique((NUM_ROWS * random.random(num_draws) ** 3).astype(np.int64)))
    return torch.from_numpy(keys), torch.from_numpy(random.normal(size=(len(keys), DIM)).astype(np.float32))


def shard_of(table: EmbeddingTable) -> dict:
    arrays = {name: getattr(table.shard, name).copy() for name in ("weight", "state", "clock")}
    return {"keys": table.keys().numpy(), **arrays}


def by_key(shards: list[dict]) -> dict:
    """Digests of weight, state and clock of all shards, in key order."""
    order = np.argsort(np.concatenate([shard["keys"] for shard in shards]))
    return {
        name: xxhash.xxh3_128_hexdigest(np.ascontiguousarray(np.concatenate([shard[name] for shard in shards])[order]))
        for name in ("weight", "state", "clock")
    }


# The driver


def run_all(only: str) -> dict:
    """Results of all cases: "ranks=2 NAME" -> result, or a text with the reason why there is none."""
    results = {}
    for ranks in RANKS:
        if chosen(ranks, only):
            began = time.monotonic()
            found = run_ranks(ranks, only)
            print(f"bits_check: {len(found)} cases at {ranks} rank(s) in {time.monotonic() - began:.0f} s", flush=True)
            results |= {full_name(ranks, name): result for name, result in found.items()}
    return results


def run_ranks(ranks: int, only: str) -> dict:
    """Name -> result of all cases at one rank count. After a failing one, the others run in new processes."""
    with tempfile.TemporaryDirectory(prefix="hetmpi-bits-") as folder:
        out = Path(folder, "results")
        command = [mpiexec(), "-n", str(ranks), sys.executable, __file__, "cases", str(out), only]
        for _ in range(MAX_FAILED):
            outcome = run(command, LIMIT_S, **ENVIRONMENT)
            if outcome.code == 0:
                break
            print(outcome.text[-3000:], file=sys.stderr)
        return dict(map(json.loads, out.read_text().splitlines())) if out.exists() else {}


def main():
    verb, path, only = sys.argv[1], Path(sys.argv[2]), " ".join(sys.argv[3:])
    results = run_all(only)
    if verb == "record":
        path.write_text(json.dumps({"about": about(), "cases": results}, indent=0))
        failed = [name for name, result in results.items() if isinstance(result, str)]
        print(f"bits_check: {len(results)} cases in {path}" + (f"; failed: {failed}" if failed else ""))
        sys.exit(bool(failed))
    record = json.loads(path.read_text())
    for name, value in about().items():
        if record["about"][name] != value and name != "commit":
            print(f"bits_check: {name} was {record['about'][name]}, is {value}: bits may differ for that reason")
    num = num_other = 0
    for name, expected in record["cases"].items():
        if is_meant(name, only):
            difference = first_difference(expected, results.get(name, "not run"))
            num, num_other = num + 1, num_other + (difference is not None)
            print(f"{name}: {difference or 'same'}")
    print(f"bits_check: {num_other} of {num} cases differ from {record['about']['commit']}")
    sys.exit(num_other > 0)


def about() -> dict:
    """Description of the recorded code and machine."""
    describe = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "commit": describe.stdout.strip(),
        "machine": f"{platform.machine()} {processor()}",
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def processor() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


def first_difference(expected, found) -> str | None:
    """The first difference of two results in words, None if they are equal."""
    if isinstance(expected, str) or isinstance(found, str):
        return f"{found}" if isinstance(found, str) else "the record has no result"
    if "loss" in expected:
        for step, (before, now) in enumerate(zip(expected["loss"], found["loss"]), 1):
            if before != now:
                return f"the loss of step {step} was {shown(before)}, is {shown(now)}"
        return values_that_differ(expected, found)
    pairs = list(enumerate(zip(expected["by_rank"], found["by_rank"])))
    steps = {rank: first_step(before["trail"], now["trail"]) for rank, (before, now) in pairs}
    first = min(steps, key=steps.get)
    if steps[first] < len(expected["by_rank"][0]["trail"]) // 8:
        return f"the rows that rank {first} reads, from step {steps[first] + 1} on"
    for rank, (before, now) in pairs:
        difference = values_that_differ(before["counters"], now["counters"]) or values_that_differ(before, now)
        if difference:
            return f"rank {rank}: {difference}"
    return values_that_differ(expected, found)


def shown(number: str) -> str:
    return f"{number} ({float.fromhex(number):.9g})"


def first_step(before: str, now: str) -> int:
    """The first step whose trail differs, or their number."""
    return next((i // 8 for i in range(0, len(before), 8) if before[i : i + 8] != now[i : i + 8]), len(before) // 8)


def values_that_differ(expected: dict, found: dict) -> str | None:
    """Entries of the record that have changed; entries missing from the record do not count."""
    other = [
        f"{name} was {value}, is {found.get(name)}" for name, value in expected.items() if found.get(name) != value
    ]
    return ", ".join(other) or None


if __name__ == "__main__":
    launch(run_cases) if sys.argv[1:2] == ["cases"] else main()
