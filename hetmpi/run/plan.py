"""Plan: what a run needs, found before its memory is taken: bytes of tables, caches and mailboxes of each rank, and, by
a trial with narrow tables, bytes between ranks per step and the hit rate.

The trial reads and writes the rows of the run's batches through the run's own tables, caches and transports, with zero
gradients and without a network. It is made with rows of 1 and of 2 numbers: bytes are linear in the width of rows, so
these two give the bytes at any width. The limit of drift (table.drift) never applies, as rows do not move; in a run it
adds fetches.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from omegaconf import DictConfig

from hetmpi.checkpoint.checkpoints import Position
from hetmpi.counters import Counters
from hetmpi.data.loader import Loader, Lookahead
from hetmpi.data.tabular import Encoder
from hetmpi.errors import LARGEST, UserError
from hetmpi.gpu import gpu_of
from hetmpi.owner.gpu_rows import GpuStore, gpu_bytes
from hetmpi.owner.route import make_partition
from hetmpi.owner.row_files import FileStore
from hetmpi.run import build
from hetmpi.run.config import cache_of, staleness_of
from hetmpi.run.disk_plan import DiskPlan
from hetmpi.schedule import Schedule
from hetmpi.spans import Spans
from hetmpi.table.group import TableGroup
from hetmpi.table.spec import TableSpec
from hetmpi.wire.windows import MEMORY_BYTES as WINDOW_BYTES
from hetmpi.world.memory import free_memory, size_text
from hetmpi.world.mpi import MPI
from hetmpi.world.world import World

CHECK_STEPS = 10
TRIAL_S = 60.0  # after which the trial ends
NARROW = (1, 2)  # widths of rows
NOT_TRIED = "bytes and hit rate: not tried, as here rows of 1 and of 2 numbers do not fit either"
LEAST_HISTORIES, HISTORY_STEPS = 1024, 5  # as kLeast, and 1 + kGrace, in cpp/owner/push_history.h
ROUND_COPIES = 5  # of a round's rows: those read; in replies sent and received; gradients sent and received
DENSE_COPIES = {"sgd": 2, "adagrad": 3, "adam": 4}  # parameters, gradients and the optimizer's state


@dataclass
class Memory:
    """Bytes of one rank. rows: with optimizer state, clocks and marks; mailboxes: gradients in transit, and messages
    that the ranks of a node share; rounds: of requests at s >= 1, messages and the rows that they bring;
    dense: parameters, gradients and optimizer state; batches: samples, keys and rows; final: for the metrics at the
    end, this rank's share of what its node needs. gpu: of a GPU, for rows and cache; the others are of the host."""

    rows: int = 0
    mailboxes: int = 0
    rounds: int = 0
    cache: int = 0
    dense: int = 0
    batches: int = 0
    final: int = 0
    gpu: int = 0

    @property
    def of_host(self) -> dict[str, int]:
        return {name: nbytes for name, nbytes in vars(self).items() if name != "gpu"}

    @property
    def total(self) -> int:
        return sum(self.of_host.values())

    @property
    def tables(self) -> int:
        return self.rows + self.mailboxes + self.cache


@dataclass
class Traffic:
    """Means over the `steps` steps of a run, over all ranks, from a trial of the first `tried`. hit_rate: None without
    a cache. kept_bytes: memory of a rank for recent pushes (cpp/owner/push_history.h), the most in the trial;
    most_kept_bytes: the most in any run."""

    steps: int
    tried: int
    pulled_bytes: float
    pushed_bytes: float
    hit_rate: float | None
    kept_bytes: int = 0
    most_kept_bytes: int = 0


ID_BYTES = 85  # at most (cpp/owner/id_map.h)


class Plan:
    """What a run with these settings needs. Prepares the data."""

    def __init__(self, world: World, config: DictConfig, device: torch.device, before: Encoder | None = None):
        """before: as of make_parts. Collective. Raises UserError as the run would."""
        self.world, self.config, self.device = world, config, device
        self.source, self.task, self.model, self.specs = build.make_parts(world, config, device, before=before)
        self.total_steps = build.total_steps(config, self.source, world.size, Position())
        self.stores = build.stores_of(config, world, self.specs)
        self.disk = self._disk()
        if build.stream_of(self.source) is not None:
            self.total_steps = self._steps_of_first_file()

    def _steps_of_first_file(self) -> int:
        """Steps of a stream that are tried. Raises UserError if there is none."""
        num, taken = build.stream_of(self.source).num_samples, self.config.batch_size * self.world.size
        if num < taken:
            raise UserError(
                f"dry_run=true tries the first file of a stream, which has {num:,} samples, fewer than the {taken:,} "
                "of a step: lower batch_size"
            )
        return min(num // taken, self.total_steps or LARGEST)

    def memory(self, width: int | None = None) -> Memory:
        """The memory of this rank. width: numbers per row in place of the tables' own."""
        config, world, task, device = self.config, self.world, self.task, self.device
        specs = self.specs if width is None else {name: replace(spec, dim=width) for name, spec in self.specs.items()}
        num_batches = build.num_batches(config, world, task, specs, self.total_steps, device)
        found = Memory(batches=build.batch_bytes(config, task, specs, num_batches))
        if config.table.exchange in ("windows", "auto") and not world.is_one_node:
            found.mailboxes = 2 * WINDOW_BYTES  # its lines, and mirrors of lines
        num = sum(parameter.numel() for parameter in self.model.parameters())
        found.dense = 4 * DENSE_COPIES[config.optim.dense] * num
        found.final = task.final_bytes(self.model) // world.node.size
        most_keys = build.most_keys_of(config, task, specs)
        per_pull = build.batches_per_pull(config, world, specs, most_keys, device)
        for name, spec in specs.items():
            store = self.stores.get(name) if width is None else None  # narrow tables are in memory
            self._add_table(found, name, spec, most_keys[name], per_pull, store)
        return found

    def _disk(self) -> DiskPlan | None:
        """For tables whose rows are on disk. Raises UserError if their memory is too little."""
        if self.config.table.store != "file":
            return None
        found = {
            name: (*build.layout_of(self.config, self.world, name, spec, "file"), self.stores[name])
            for name, spec in self.specs.items()
        }
        for _, layout, store in found.values():
            store.check(layout)
        return DiskPlan(self.world, self.config.table.store_dir, found)

    def _add_table(
        self,
        found: Memory,
        name: str,
        spec: TableSpec,
        most_keys: int,
        per_pull: int,
        store: FileStore | GpuStore | None,
    ):
        """most_keys: of a batch."""
        world, staleness = self.world, staleness_of(self.config)
        rule = build.optimizer_of(self.config, f"table {name}", spec.optim, Schedule()).core(spec.dim)
        partition, mine = build.layout_of(self.config, world, name, spec, store.name if store else "memory")
        before_rings = mine.inbox_begin
        in_memory = before_rings + partition.num_local_rows(world.rank)  # with marks of changed rows
        if isinstance(store, GpuStore) and not store.in_host_memory:
            found.rows, found.gpu = found.rows + before_rings, found.gpu + gpu_bytes(mine)
        else:
            found.rows += store.memory_bytes if isinstance(store, FileStore) else in_memory
        if spec.open is not None:  # in a directory, and among the ids that this rank knows
            found.rows += round(ID_BYTES * spec.num_rows * (1 + 1 / world.size))
        found.mailboxes += mine.nbytes - before_rings
        if not world.is_one_node and not staleness.is_exact:
            num_keys = min(per_pull * most_keys, spec.num_rows)
            found.rounds += 4 * ROUND_COPIES * num_keys * (spec.dim + rule.preview_dim)
        cache = cache_of(self.config, f"table {name}", spec.cache)
        lines = cache.rows(spec.num_rows, world, self.device)
        nbytes = cache.memory_bytes(lines, rule, spec.dim)
        if gpu_of(self.device) is None:
            found.cache += nbytes
        else:
            found.gpu += nbytes

    def traffic(self, most_steps: int = LARGEST, limit_s: float = TRIAL_S) -> Traffic:
        """By a trial of the run's steps, at most so many and in about so much time. Steps after those tried count as
        the last half of them. Collective."""
        num_steps = max(1, self.total_steps)
        tried, middle, counted, since_middle, num_kept = self._trial(min(most_steps, num_steps), limit_s)
        later = (num_steps - tried) / max(1, tried - middle)  # times the steps since the middle
        counted = {name: counted[name] + later * since_middle[name] for name in counted}
        moved, total = np.zeros(2), 0
        for name, spec in self.specs.items():
            thin, thick = (counted[narrow(name, width)] for width in NARROW)
            one, two = (np.array(bytes_of(Counters.of_array(counts))) for counts in (thin, thick))
            moved += (one + (two - one) * (spec.dim - NARROW[0])) / num_steps
            total = total + thin
        kept, most = self._kept_bytes(num_kept)
        return Traffic(num_steps, tried, *map(float, moved), Counters.of_array(total).hit_rate, kept, most)

    def _kept_bytes(self, num_kept: dict[str, int]) -> tuple[int, int]:
        """Memory of a rank for what owners keep of pushes: in a trial in which `num_kept` rows had a history, and the
        most."""
        config, world, kept, most = self.config, self.world, 0, 0
        if staleness_of(config).is_exact:
            return 0, 0
        most_keys = build.most_keys_of(config, self.task, self.specs)
        for name, spec in self.specs.items():
            row = build.optimizer_of(config, f"table {name}", spec.optim, Schedule()).core(spec.dim).history_bytes
            lines = cache_of(config, f"table {name}", spec.cache).rows(spec.num_rows, world, self.device)
            partition = make_partition(build.partition_of(config, spec), spec.num_rows, world.size)
            num_rows = partition.num_local_rows(0)
            kept += row * num_kept[narrow(name, NARROW[0])]
            most += row * most_histories(num_rows, lines, most_keys[name])
        return kept, most

    def _trial(
        self, most_steps: int, limit_s: float
    ) -> tuple[int, int, dict[str, np.ndarray], dict[str, np.ndarray], dict[str, int]]:
        """Reads and writes the rows of the first steps, in tables of each width. Returns the number of steps, that at
        about half of them, and each table's counters over all ranks at the end, with a flush, and since then, without;
        and the most rows of a rank of which it kept pushes. Collective."""
        config, world, spans = self.config, self.world, Spans()
        of_narrow = {narrow(name, width): (name, width) for width in NARROW for name in self.specs}
        specs = {name: replace(self.specs[own], dim=width) for name, (own, width) in of_narrow.items()}
        most = build.most_keys_of(config, self.task, self.specs)
        most_keys = {name: most[own] for name, (own, _) in of_narrow.items()}
        tables = build.make_tables(config, world, specs, most_keys, Schedule(), self.device, spans, stores={})
        loader = Loader(
            self.source.train, world.rank, world.size, config.batch_size, 0, most_steps, config.loader.threads,
            config.loader.prefetch, self.task.batches(torch.device("cpu")),
        )  # fmt: skip

        def keys_of(batch):
            keys = self.task.keys(batch)
            return {name: keys[own] for name, (own, _) in of_narrow.items()}

        of_task = {own: tables[narrow(own, NARROW[0])] for own in self.specs}
        self.task.opened(of_task)
        vocabularies = build.make_vocabularies(config, world, self.source, self.specs, of_task)
        batches = Lookahead(
            loader, build.batches_ahead(config, tables), spans, complete=lambda *batch: vocabularies.of_batch(*batch)
        )
        began, counts, kept = time.perf_counter(), [(0, 0)], [np.zeros(len(tables), np.int64)]
        for made, batch in enumerate(batches, 1):
            keys = keys_of(batch)
            if self.disk is not None:
                self.disk.step({name: keys[narrow(name, NARROW[0])].numpy() for name in self.specs})
            rows = tables.read(keys)
            for later in batches.announced():
                tables.prefetch(keys_of(later))
            tables.write(keys, {name: torch.zeros_like(found) for name, found in rows.items()})
            world.meet(f"after step {made} of the trial for all ranks")  # as the allreduce of a run
            if made % CHECK_STEPS == 0:
                counts.append((made, counters_of(tables)))
                kept.append(np.array([table.client.num_histories for table in tables.values()]))
                if world.comm.allreduce(time.perf_counter() - began, MPI.MAX) > limit_s:
                    break
        kept.append(np.array([table.client.num_histories for table in tables.values()]))
        middle, at_middle = min(counts, key=lambda one: abs(one[0] - made / 2))
        since_middle = counters_of(tables) - at_middle
        tables.flush()  # as the run will at its end
        sums = (dict(zip(tables, world.comm.allreduce(counted))) for counted in (counters_of(tables), since_middle))
        most_kept = dict(zip(tables, np.max(world.comm.allgather(np.max(kept, axis=0)), axis=0).tolist()))
        loader.close()
        tables.close()
        return made, middle, *sums, most_kept


def most_histories(num_rows: int, lines: int, most_keys: int) -> int:
    """Most rows of a shard of `num_rows` of which an owner keeps pushes, about, if each of P ranks has `lines` lines of
    the table and writes `most_keys` keys in a step, a P-th of them here. A history is kept for as many steps as its
    push covers, in which its line collects the next push, and a few more. Those that have ended are dropped when the
    number has doubled."""
    return min(num_rows, max(LEAST_HISTORIES, 2 * (lines + HISTORY_STEPS * most_keys)))


def narrow(name: str, width: int) -> str:
    """The name of the trial's table of this width."""
    return f"{name} of width {width}"


def counters_of(tables: TableGroup) -> np.ndarray:
    """This rank's counters, (tables, counters) int64."""
    return np.stack([table.counters.as_array() for table in tables.values()])


def bytes_of(counted: Counters) -> tuple[int, int]:
    return counted.pulled_bytes, counted.push_bytes


def dry_run(world: World, config: DictConfig, device: torch.device, before: Encoder | None = None):
    """Prints on rank 0 what the run needs, and whether it fits. before: as of make_parts. Collective. Raises UserError
    as the run would."""
    plan = Plan(world, config, device, before)
    memory, node = plan.memory(), world.node
    place, free = free_memory(node.size > 1)
    needs = world.comm.gather((world.host, memory, node.allreduce(memory.total), node.size, place, free))
    if world.rank == 0:
        print("\n".join(memory_lines(plan, needs)), flush=True)
    narrow = node.allreduce(sum(plan.memory(width).total for width in NARROW))
    can_try = world.comm.allreduce(narrow < free, MPI.LAND)
    lines = traffic_lines(config, plan.traffic()) if can_try else [NOT_TRIED]
    lines += [] if plan.disk is None else plan.disk.lines()
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
    parts = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in largest.of_host.items() if nbytes)
    lines.append(f"memory of a rank, at most: {size_text(largest.total)} ({parts})")
    for host, _, need, ranks, place, free in dict((need[0], need) for need in needs).values():
        fits = "fits" if need <= free else "DOES NOT FIT: use more nodes, a smaller table.dim or a smaller cache"
        lines.append(f"{host}, {ranks} rank(s): {size_text(need)} of {size_text(free)} free in {place}: {fits}")
    if largest.gpu > 0:
        free = gpu_of(plan.device).free_bytes(plan.device)
        fits = "fits" if largest.gpu <= free else "DOES NOT FIT: use a smaller table.dim, fewer rows or a smaller cache"
        lines.append(
            f"memory of a GPU for a rank's rows and cache, at most: {size_text(largest.gpu)} of {size_text(free)} free "
            f"on {plan.device}, where model and batches come on top: {fits}"
        )
    return lines


def traffic_lines(config: DictConfig, traffic: Traffic) -> list[str]:
    moved = traffic.pulled_bytes + traffic.pushed_bytes
    lines = [
        f"between ranks per step: {moved / 1e6:,.3f} MB (rows and clocks {traffic.pulled_bytes / 1e6:,.3f}, gradients "
        f"{traffic.pushed_bytes / 1e6:,.3f}), mean of {traffic.steps:,} steps, of which the first "
        f"{traffic.tried:,} were tried"
    ]
    if traffic.hit_rate is not None:
        lines.append(f"hit rate: {100 * traffic.hit_rate:.1f} %")
    if traffic.hit_rate is not None:
        lines.append("not counted: pending gradients during a flush, at most as much memory as the cache")
    if traffic.hit_rate is not None and config.table.drift > 0:
        lines.append(f"not counted: what table.drift={config.table.drift:g} adds while rows move much, 10 % and more")
    if traffic.most_kept_bytes > 0:
        lines.append(
            f"not counted: what owners keep of pushes, {size_text(traffic.kept_bytes)} of a rank in the trial, at most "
            f"{size_text(traffic.most_kept_bytes)}"
        )
    return lines
