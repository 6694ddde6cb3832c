"""Plan: what a run needs, found before its memory is taken: bytes of tables, caches and mailboxes of each rank, and, by
a trial with narrow tables, bytes between ranks per step and the hit rate.

The trial reads and writes the rows of the run's first batches through the run's own tables, caches and transports, with
zero gradients and without a network. It is made with rows of 1 and of 2 numbers: bytes are linear in the width of rows,
so these two give the bytes at any width. The limit of drift (table.drift) never applies, as rows do not move; in a run
it adds fetches.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from omegaconf import DictConfig

from hetmpi.checkpoint.checkpoints import Position
from hetmpi.comm.memory import free_memory, size_text
from hetmpi.comm.mpi import MPI
from hetmpi.comm.route import make_partition
from hetmpi.comm.world import World
from hetmpi.counters import Counters
from hetmpi.data.loader import Ahead, Loader
from hetmpi.run import build
from hetmpi.run.config import cache_of, staleness_of
from hetmpi.run.progress import summed
from hetmpi.spans import Spans
from hetmpi.table.group import TableSpec
from hetmpi.table.optim import Schedule
from hetmpi.table.table import layouts_of

CHECK_STEPS = 10
TRIAL_STEPS, TRIAL_S = 500, 20.0  # of each width; the trial ends at the first of both
NARROW = (1, 2)  # widths of rows
NOT_TRIED = "bytes and hit rate: not tried, as here rows of 2 numbers do not fit either"
DENSE_COPIES = {"sgd": 2, "adagrad": 3, "adam": 4}  # parameters, gradients and the optimizer's state


@dataclass
class Memory:
    """Bytes of one rank. rows: with optimizer state and clocks; replicas: rows that every rank has whole; mailboxes:
    gradients in transit; dense: parameters, gradients and optimizer state; batches: samples, keys and rows; final: for
    the metrics at the end, this rank's share of what its node needs."""

    rows: int = 0
    mailboxes: int = 0
    cache: int = 0
    replicas: int = 0
    dense: int = 0
    batches: int = 0
    final: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    @property
    def tables(self) -> int:
        return self.total - self.dense - self.batches - self.final


@dataclass
class Traffic:
    """Means over the first `steps` steps, over all ranks. hit_rate: None without a cache."""

    steps: int
    pulled_bytes: float
    pushed_bytes: float
    reduced_bytes: float
    hit_rate: float | None


class Plan:
    """What a run with these settings needs. Prepares the data."""

    def __init__(self, world: World, config: DictConfig, device: torch.device):
        """Collective. Raises UserError as the run would."""
        self.world, self.config, self.device = world, config, device
        self.source = build.make(config.data)
        build.prepare(self.source, world, config)
        self.task = build.make_task(config, self.source, device)
        self.model = build.make_model(config, self.task)
        self.specs = self.task.tables(self.model)
        self.replicated = build.replicated_of(config, self.specs)
        self.total_steps = build.total_steps(config, self.source, world.size, Position())

    def memory(self, width: int | None = None) -> Memory:
        """The memory of this rank. width: numbers per row in place of the tables' own."""
        found = Memory(batches=build.batch_bytes(self.config, self.task, self.specs, self.total_steps))
        num = sum(parameter.numel() for parameter in self.model.parameters())
        found.dense = 4 * DENSE_COPIES[self.config.optim.dense] * num
        found.final = build.final_bytes(self.task, self.model) // self.world.node.size
        for name, spec in self.specs.items():
            self._add_table(found, name, spec if width is None else replace(spec, dim=width))
        return found

    def _add_table(self, found: Memory, name: str, spec: TableSpec):
        world, table, staleness = self.world, self.config.table, staleness_of(self.config)
        rule = build.optimizer_of(self.config, name, spec.optim, Schedule()).core(spec.dim)
        partition = make_partition(table.partition, spec.num_rows, world.size)
        _, layouts = layouts_of(world.size, partition, rule, spec.dim, staleness, int(table.inbox_mb * build.MB))
        mine = layouts[world.rank]
        found.rows += mine.rings
        found.mailboxes += mine.nbytes - mine.rings
        cache = cache_of(self.config, name, spec.cache)
        lines = cache.rows(spec.num_rows, world, self.device)
        if self.device.type == "cpu":  # a GPU's cache is in its own memory
            found.cache += cache.host_bytes(lines, rule, spec.dim)
        num_replicated = sum(map(len, self.replicated[name]))
        found.replicas += 4 * num_replicated * (spec.dim + rule.state_dim + 1 + spec.dim + 1)  # with clocks and sums

    def traffic(self, most_steps: int = TRIAL_STEPS) -> Traffic:
        """By the trial. Collective."""
        num_steps = min(most_steps, max(1, self.total_steps))
        thin, num_steps = self._trial(NARROW[0], num_steps, TRIAL_S)
        thick, num_steps = self._trial(NARROW[1], num_steps, math.inf)
        total = Counters.of_array(sum(counted.as_array() for counted in thin.values()))
        moved = np.zeros(3)
        for name, spec in self.specs.items():
            one, two = (np.array(bytes_of(counted[name])) for counted in (thin, thick))
            moved += (one + (two - one) * (spec.dim - NARROW[0])) / num_steps
        return Traffic(num_steps, *map(float, moved), total.hit_rate)

    def _trial(self, width: int, num_steps: int, limit_s: float) -> tuple[dict[str, Counters], int]:
        """Counters of each table over all ranks, and the number of steps made. Collective."""
        config, world, spans = self.config, self.world, Spans()
        specs = {name: replace(spec, dim=width) for name, spec in self.specs.items()}
        tables = build.make_tables(config, world, specs, self.replicated, Schedule(), self.device, spans)
        loader = Loader(
            self.source.train, world.rank, world.size, config.batch_size, 0, num_steps, config.loader.threads,
            config.loader.prefetch, self.task.batches(self.device),
        )  # fmt: skip
        batches, began, made = Ahead(loader, config.table.prefetch_batches, spans), time.perf_counter(), 0
        for batch in batches:
            keys = self.task.keys(batch)
            rows = tables.read(keys)
            for later in batches.announced():
                tables.prefetch(self.task.keys(later))
            tables.write(keys, {name: torch.zeros_like(found) for name, found in rows.items()})
            world.meet(f"after step {made + 1} of the trial for all ranks")  # as the allreduce of a run
            made += 1
            if made % CHECK_STEPS == 0 and world.comm.allreduce(time.perf_counter() - began, MPI.MAX) > limit_s:
                break
        if made == self.total_steps:
            tables.flush()  # as the run will at its end
        else:
            tables.settle()
        found = {name: summed(world, table.counters, table.lags)[0] for name, table in tables.items()}
        loader.close()
        tables.close()
        return found, made


def bytes_of(counted: Counters) -> tuple[int, int, int]:
    return counted.pulled_bytes, counted.push_bytes, counted.reduced_bytes


def dry_run(world: World, config: DictConfig, device: torch.device):
    """Prints on rank 0 what the run needs, and whether it fits. Collective. Raises UserError as the run would."""
    plan = Plan(world, config, device)
    memory, node = plan.memory(), world.node
    place, free = free_memory(node.size > 1)
    needs = world.comm.gather((world.host, memory, node.allreduce(memory.total), node.size, place, free))
    if world.rank == 0:
        print("\n".join(memory_lines(plan, needs)), flush=True)
    can_try = world.comm.allreduce(node.allreduce(plan.memory(NARROW[1]).total) < free, MPI.LAND)
    lines = traffic_lines(config, plan.traffic()) if can_try else [NOT_TRIED]
    if world.rank == 0:
        print("\n".join(lines), flush=True)


def memory_lines(plan: Plan, needs: list[tuple]) -> list[str]:
    """needs: of each rank its host and memory; of its node the need, ranks, scarcest memory and bytes free there."""
    config = plan.config
    tables = [f"{spec.num_rows:,} rows of {spec.dim} numbers" for spec in plan.specs.values()]
    lines = [
        f"hetmpi: dry run of {config.model_name} on {config.data_name}: {' and '.join(tables)}, {plan.world.size} "
        f"rank(s), {plan.total_steps:,} steps of {config.batch_size * plan.world.size:,} samples"
    ]
    largest = max((memory for _, memory, *_ in needs), key=lambda memory: memory.total)
    parts = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in vars(largest).items() if nbytes)
    lines.append(f"memory of a rank, at most: {size_text(largest.total)} ({parts})")
    for host, _, need, ranks, place, free in dict((need[0], need) for need in needs).values():
        fits = "fits" if need <= free else "DOES NOT FIT: use more nodes, a smaller table.dim or a smaller cache"
        lines.append(f"{host}, {ranks} rank(s): {size_text(need)} of {size_text(free)} free in {place}: {fits}")
    return lines


def traffic_lines(config: DictConfig, traffic: Traffic) -> list[str]:
    moved = traffic.pulled_bytes + traffic.pushed_bytes + traffic.reduced_bytes
    lines = [
        f"between ranks per step, mean of {traffic.steps:,} steps tried: {moved / 1e6:,.3f} MB (rows and clocks "
        f"{traffic.pulled_bytes / 1e6:,.3f}, gradients {(moved - traffic.pulled_bytes) / 1e6:,.3f})"
    ]
    if traffic.hit_rate is not None:
        lines.append(f"hit rate: {100 * traffic.hit_rate:.1f} %; later steps have a higher one")
    if traffic.hit_rate is not None:
        lines.append("not counted: pending gradients during a flush, at most as much memory as the cache")
    if traffic.hit_rate is not None and config.table.drift > 0:
        lines.append(f"not counted: what table.drift={config.table.drift:g} adds where rows move much")
    return lines
