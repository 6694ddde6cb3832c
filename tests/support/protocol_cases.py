"""Random tables driven by random calls, and what they must read: for protocol_soak.py, in real processes, and sim.py.

Rows and gradients are integers and the rule is SGD with learning rate 1, so sums are exact. A row that a rank reads has
all own updates, and of those of the others
    s = 0                       all of the steps before
    s >= 1, row never cached    all before the last flush, and any of those before the next one
    s >= 1                      any of those before the next flush, where ranks meet
Adagrad at s = 0 has the same bits on one node and on several.
"""

import functools
import json
import random
import time
from dataclasses import fields
from itertools import product

import numpy as np
import torch

from hetmpi import CacheSettings, EmbeddingTable, RowOptimizer, Staleness, World
from hetmpi.owner.route import PARTITIONS
from hetmpi.table.cache import POLICIES
from hetmpi.table.client import MOST_AHEAD
from hetmpi.table.group import TableGroup

OTHER = 1000  # OTHER + t: a batch beside that of step t
TOGETHER = ("flush", "peek", "flush one", "settle")  # events that all ranks have together
EVENTS = (*[""] * 3, "again", "reread", "other", "vain", "part", "none", "await_owners")
STALE_EVENTS = (*EVENTS, "twice", "unread", "late")  # at s >= 1
WRITES = {"twice": ((0, 1), (0, 1)), "none": (), "part": ((0, 2),), "unread": ((0, 1), (OTHER, 1))}

cache_of_one_case = functools.lru_cache(maxsize=8)  # of its tables: for ranks of one process


def draw_case(seed: int, number: int, size: int) -> dict:
    """nodes: ranks of each node, or the node of each rank. free: each rank has events of its own. slow: a rank. dense:
    what all ranks sum in each step, and receive nothing while they wait for it: between read and write, as BatchNorm,
    or from before the write on, as the dense gradients."""
    draw = random.Random(f"{seed} {number} {size}")
    grads = draw.choice(["ones", "own", "any"] * 3 + ["adagrad"])
    bound = 0 if grads == "adagrad" else draw.choice([0, 0, 1, 2, 10, 100, None])
    exchange = draw.choice(["messages"] * 4 + ["windows"] * 5 + ["toy_wire.Pickled"])
    kinds = [(bound, exchange)] * draw.choice([1, 1, 2, 3])
    if grads != "adagrad" and draw.random() < 0.1:
        kinds[-1] = draw.choice([0, 1, 10]), draw.choice(["messages", "windows"])
    tables = [
        {
            "staleness": (bound, 1.0, draw.choice([0.0, 0.5])), "exchange": exchange, "dim": draw.randint(1, 5),
            "num_rows": draw.randint(1, draw.choice([40, 400])), "inbox_bytes": draw.choice([1, 8 << 20]),
            "partition": draw.choice(PARTITIONS), "batches_per_pull": draw.randint(1, 4),
            "cache": {"capacity_rows": 0 if bound == 0 else draw.choice([0, 5, 32, 64, 1000]),
                      "policy": draw.choice(POLICIES), "admit": draw.choice(["all", "remote", "offnode"])},
        }
        for bound, exchange in kinds
    ]  # fmt: skip
    is_exact, is_apart = any(bound == 0 for bound, _ in kinds), all(wire == "windows" for _, wire in kinds)
    return {
        "seed": seed, "number": number, "ranks": size, "grads": grads, "is_exact": is_exact, "tables": tables,
        "nodes": draw.choice([draw.randint(1, size), [draw.randrange(size) for _ in range(size)]]),
        "calls": draw.choice(["group", "group", "one by one", "no group"]), "depth": draw.randint(0, MOST_AHEAD),
        "num_steps": draw.randint(3, 24), "slow": draw.randrange(2 * size),
        "free": is_apart and not is_exact and draw.random() < 0.5, "dense": draw.choice(["", "norm", "gradients"]),
    }  # fmt: skip


def plan_of(case: dict, step: int, rank: int) -> tuple[str, list[tuple[int, int]]]:
    """A rank's event, and (batch, k) of each of its writes: every k-th of its keys."""
    own, name = EVENTS if case["is_exact"] else STALE_EVENTS, f"{case['seed']} {case['number']} {step}"
    event = random.Random(name).choice(own + TOGETHER)
    if case["free"] and event not in TOGETHER:
        event = random.Random(f"{name} {rank}").choice(own)
    return event, [(step + ahead, part) for ahead, part in WRITES.get(event, ((0, 1),))]


def batch_of(case: dict, index: int, number: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A rank's keys (U,), skewed, often none, and gradients (U, dim) for one table."""
    table = case["tables"][index]
    seed = case["seed"], case["number"], index, number, rank
    return drawn_batch(seed, table["num_rows"], table["dim"], case["grads"], case["ranks"])


@functools.lru_cache(maxsize=4096)  # the sums and the ranks draw the same ones
def drawn_batch(seed: tuple[int, ...], num_rows: int, dim: int, kind: str, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    keys = np.unique((num_rows * draw.random(draw.choice([0, 1, 7, 20, 60, 200])) ** 3).astype(np.int64))
    keys = draw.permutation(keys)
    shape = len(keys), dim
    grads = draw.normal(size=shape) if kind == "adagrad" else draw.integers(1 if kind == "ones" else -3, 2, shape)
    return keys, grads * (keys // 2 % ranks == seed[-1])[:, None] if kind == "own" else grads  # 0 for others' rows


@cache_of_one_case
def sums_of(case: str, index: int) -> tuple[np.ndarray, ...]:
    """Of a table's writes before each step t: sums of the negative and positive gradients of each rank (2, ranks, t,
    num_rows, dim), and of all (2, t, num_rows, dim); writes of each rank (ranks, t, num_rows); steps with a write (t,
    num_rows)."""
    case = json.loads(case)
    size, num_steps, table = case["ranks"], case["num_steps"], case["tables"][index]
    sums = np.zeros((2, size, num_steps + 1, table["num_rows"], table["dim"]))
    num = np.zeros(sums.shape[1:-1], int)
    for step, rank in product(range(num_steps), range(size)):
        for number, part in plan_of(case, step, rank)[1]:
            keys, grads = (array[::part] for array in batch_of(case, index, number, rank))
            sums[:, rank, step + 1, keys] += np.minimum(grads, 0), np.maximum(grads, 0)
            num[rank, step + 1, keys] += 1
    sums = sums.cumsum(2)
    return sums, sums.sum(1), num.cumsum(1), (num.sum(0) > 0).cumsum(0)


class Checked:
    """A table on one rank, and its twin in numpy: entry t of an array is of the writes before step t.

    first         (num_rows, dim): the rows without writes
    own, others   sum of this rank's gradients (t, num_rows, dim); of the others' negative and positive ones (2, t, ...)
    num, touched  writes of each rank (ranks, t, num_rows); steps with a write (t, num_rows)
    seen, told    all rows read; differences"""

    def __init__(self, world: World, case: dict, name: str, staleness: tuple, cache: dict, **settings):
        rule, parts = (
            "adagrad" if case["grads"] == "adagrad" else "sgd",
            (Staleness(*staleness), CacheSettings(**cache)),
        )
        settings |= {"optimizer": RowOptimizer(rule, 1.0), "staleness": parts[0], "cache": parts[1]}
        self.table, self.name, self.seen, self.told = EmbeddingTable(world, name=name, **settings), name, [], []
        self.first = np.arange(self.table.num_rows)[:, None] + 1000.0 * np.arange(self.table.dim)
        self.table.shard.assign(slice(None), weight=self.first[self.table.keys()])
        self.table.resume_at(0)
        never = {"all": [], "remote": [world.rank], "offnode": world.node_ranks}[cache["admit"]]
        owners, _ = self.table.partition.locate(np.arange(self.table.num_rows))
        self.never_cached = np.isin(owners, never) | (cache["capacity_rows"] == 0)
        sums, whole, self.num, self.touched = sums_of(json.dumps(case), int(name))
        self.own, self.others = sums[:, world.rank].sum(0), whole - sums[:, world.rank]

    def check_rows(self, what: str, keys: torch.Tensor, rows, done: int, since: int, until: int):
        """Checks rows of keys (n,) that have this rank's writes before step `done` and any of the others' before
        `until`; if they are never cached, all before `since`."""
        self.seen.append((what, np.asarray(rows).copy()))
        begin = self.never_cached[keys, None] * self.others[:, since][:, keys]
        bounds = self.own[done, keys] + begin.sum(0) + self.others[:, until][:, keys] - begin
        if self.table.optimizer.rule == "sgd":
            self.check(f"{what} lost", keys, self.first[keys] - self.seen[-1][1], *bounds)

    def check(self, what: str, keys, found, *bounds):
        """Notes which of found (n, ...), of keys (n,), are not within the bounds, arrays or numbers."""
        low, high = (np.broadcast_to(bound, np.shape(found)) for bound in bounds)
        wrong = np.argwhere((found < low) | (found > high))
        for i in map(tuple, wrong[:1]):
            text = f"{found[i]}, not {low[i]} to {high[i]}, at key {keys[i[0]]}, as {len(wrong)} of {low.size} numbers"
            self.told.append(f"table {self.name}, {what} {text}")

    def check_owner(self, step: int, rank: int):
        """Checks this rank's rows, clocks and counters after the writes before `step` and a flush."""
        keys, num, touched, counters = self.table.keys(), self.num[:, step], self.touched[step], self.table.counters
        self.check_rows(f"step {step}: shard", keys, self.table.shard.weight, step, step, step)
        is_exact = self.table.staleness.is_exact
        clocks = (touched, touched) if is_exact else (np.minimum(touched, 1), num.sum(0))
        self.check(f"step {step}: clock", keys, self.table.shard.clock, *(bound[keys] for bound in clocks))
        least = num[rank].sum() if is_exact else np.count_nonzero(num[rank])
        self.check(f"step {step}: pushed", "-", np.array([counters.pushed]), least, num[rank].sum())
        self.check(f"step {step}: counter", range(len(fields(counters))), counters.as_array(), 0, 1 << 40)


class Driver:
    """One rank's calls in a case. meetings: steps at whose begin all ranks have flushed. ahead: numbers of the batches
    announced and not read."""

    def __init__(self, world: World, case: dict):
        self.world, self.case, self.steps, self.ahead, self.batches = world, case, range(case["num_steps"]), [], {}
        self.checked = {str(i): Checked(world, case, str(i), **table) for i, table in enumerate(case["tables"])}
        self.tables = {name: checked.table for name, checked in self.checked.items()}
        self.group = None if case["calls"] == "no group" else TableGroup(self.tables)
        self.plan = [plan_of(case, step, world.rank) for step in self.steps]
        flushed = [step + 1 for step, (event, _) in enumerate(self.plan) if event in ("flush", "peek")]
        self.meetings = [0, *flushed, case["num_steps"]]
        for number in [*self.steps, *(OTHER + step for step in self.steps)]:
            arrays = [batch_of(case, i, number, world.rank) for i in range(len(self.tables))]
            keys, grads = zip(*((torch.from_numpy(keys), torch.from_numpy(grads).float()) for keys, grads in arrays))
            self.batches[number] = dict(zip(self.tables, keys)), dict(zip(self.tables, grads))

    def call(self, verb: str, *arguments: dict) -> dict:
        """A method of all tables, of their group or of one after the other. arguments: table -> value."""
        if self.case["calls"] == "group" and verb != "await_owners":
            return getattr(self.group, verb)(*arguments)
        return {name: getattr(table, verb)(*(one[name] for one in arguments)) for name, table in self.tables.items()}

    def run(self):
        for step, (event, writes) in enumerate(self.plan):
            for number in {"again": [step, step], "other": [step, OTHER + step]}.get(event, [step]):
                self.read(number, step, step)
            if event != "late":
                self.announce(step, event)
            self.compute(step)
            summing = self.case["dense"] and self.world.comm.Ibarrier()
            if self.case["dense"] == "norm":
                summing.Wait()
            for number, part in writes:
                batch = self.batches[number]  # the tensors that were read, unless only a part of them
                batch = batch if part == 1 else [{name: one[::part] for name, one in of.items()} for of in batch]
                self.call("write", *batch)
            if self.case["dense"] == "gradients":
                summing.Wait()
            self.happen(step, event)
        self.call("flush")
        self.look(self.case["num_steps"])
        self.call("close")

    def compute(self, step: int):
        """What a rank does between read and write."""
        time.sleep(0.002 * (self.world.rank == self.case["slow"]))

    def happen(self, step: int, event: str):
        if event == "late":
            self.announce(step, event)
        elif event == "reread":
            self.read(step, step, step + 1)
        elif event == "flush one":
            self.tables["0"].flush()
        elif event in ("settle", "await_owners", "flush"):
            self.call(event)
        elif event == "peek":
            self.call("flush")
            self.look(step + 1)

    def announce(self, step: int, event: str):
        depth = (self.case["depth"] + self.world.rank * self.case["free"]) % (MOST_AHEAD + 1)
        for number in [OTHER + step] * (event == "vain") + [*self.steps[step + 1 : step + depth + 1]]:
            if number not in self.ahead and len(self.ahead) < MOST_AHEAD:
                self.ahead.append(number)
                self.call("prefetch", self.batches[number][0])

    def read(self, number: int, step: int, done: int):
        """Reads a batch in a step, after this rank's writes before step `done`."""
        while self.ahead and self.ahead.pop(0) != number:
            pass
        flushed = max(i for i in self.meetings if i <= step), min(i for i in self.meetings if i > step)
        keys, _ = self.batches[number]
        for name, rows in self.call("read", keys).items():
            steps = (done, done) if self.tables[name].staleness.is_exact else flushed
            self.checked[name].check_rows(f"step {step}: read", keys[name], rows, done, *steps)

    def look(self, step: int):
        """Checks the owners' rows after the writes before this step. REQUIRES: flush."""
        draw, num, keys = torch.Generator().manual_seed(self.world.rank), (step + self.world.rank) % 3 * 50, {}
        for name, checked in self.checked.items():
            checked.check_owner(step, self.world.rank)
            keys[name] = torch.randint(checked.table.num_rows, (num,), generator=draw)
        for name, rows in self.call("peek", keys).items():
            self.checked[name].check_rows(f"step {step}: peek", keys[name], rows, step, step, step)
        self.world.meet("to look")
