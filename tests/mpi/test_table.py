"""EmbeddingTable at s = 0: exact, deterministic, the same on any number of ranks. Run at 1, 2 and 3 ranks."""

import gc
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from row_rules import FTRL, RULES, row_optimizer

from hetmpi.errors import NotFinite, UserError
from hetmpi.owner.node_memory import NodeMemory
from hetmpi.owner.route import PARTITIONS
from hetmpi.schedule import Schedule
from hetmpi.table.cache import CacheSettings
from hetmpi.table.client import MOST_AHEAD
from hetmpi.table.group import TableGroup
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.staleness import Staleness
from hetmpi.table.table import EmbeddingTable
from hetmpi.world.world import World

pytestmark = pytest.mark.mpi
NUM_ROWS, DIM, BATCH, FIELDS, STEPS = 211, 5, 24, 3, 50
SCHEDULE = Schedule("cosine", warmup_steps=10, total_steps=STEPS)


def make_table(world, rule="sgd", weight_decay=0.0, lr=None, schedule=SCHEDULE, **settings):
    optimizer = row_optimizer(rule, RULES[rule] if lr is None else lr, weight_decay, schedule=schedule)
    return EmbeddingTable(world, NUM_ROWS, DIM, optimizer, **{"init_std": 0.1, "seed": 7, **settings})


def samples(step):
    """The global batch of a step: ids (6 * BATCH, FIELDS) int64, skewed, and targets (6 * BATCH,)."""
    generator = np.random.default_rng(step)
    ids = (NUM_ROWS * generator.random((6 * BATCH, FIELDS)) ** 3).astype(np.int64)
    return torch.from_numpy(ids), torch.from_numpy(generator.normal(size=6 * BATCH).astype(np.float32))


def loss_of(embedded, target):
    """A loss whose gradient depends on the rows: embedded (B, FIELDS, DIM)."""
    score = (embedded.sum(1) * torch.linspace(-1, 1, DIM)).sum(1) + embedded.prod(1).sum(1)
    return ((score - target) ** 2).mean()


def my_slice(world, tensor):
    """This rank's slice of the 1st axis: 6 * BATCH divides by 1, 2 and 3."""
    return tensor[world.rank * len(tensor) // world.size : (world.rank + 1) * len(tensor) // world.size]


def train(table, world, steps=STEPS, prefetch=0):
    """Trains like the trainer, with `prefetch` batches announced; returns this rank's losses."""
    batches, losses = [my_batch(world, step) for step in range(steps)], []
    for step, batch in enumerate(batches):
        announced = batches[step + prefetch : step + prefetch + 1] if step else batches[1 : prefetch + 1]
        losses.append(train_step(table, world, batch, [keys for keys, *_ in announced] if prefetch else []))
    table.flush()
    return losses


def my_batch(world, step):
    """This rank's part of a step: unique keys (U,), index (B, FIELDS) into them, target (B,)."""
    ids, target = (my_slice(world, part) for part in samples(step))
    return *torch.unique(ids, return_inverse=True), target


def train_step(table, world, batch, announced=()):
    """One step like the trainer's, with the keys of later batches that it announces; returns this rank's loss."""
    keys, index, target = batch
    rows = table.read(keys).requires_grad_()
    for later_keys in announced:
        table.prefetch(later_keys)
    loss = loss_of(rows[index], target)
    loss.backward()
    table.write(keys, rows.grad / world.size)
    return loss.item()


def all_rows(table, world):
    """The whole table by key, on every rank: (NUM_ROWS, DIM)."""
    parts = world.comm.allgather((table.keys().numpy(), table.shard.weight.copy()))
    rows = np.full((NUM_ROWS, DIM), np.nan, np.float32)
    for keys, weight in parts:
        rows[keys] = weight
    return rows


class RowwiseAdagrad(torch.optim.Optimizer):
    """Row-wise Adagrad: one sum of mean squared gradients per row; torch has no such optimizer."""

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                sums = self.state[p].setdefault("sum", torch.zeros(len(p), 1))
                grad = p.grad + group["weight_decay"] * p
                sums += (grad**2).mean(1, keepdim=True)
                p -= group["lr"] * grad / (sums.sqrt() + 1e-10)


class Ftrl(torch.optim.Optimizer):
    """Algorithm 1 of McMahan et al. (2013), in 64 bits, with beta 1e-10 and, of FTRL-Proximal in general, sigmas that
    add up to 1 / eta where the learning rate changes. First rows are the centre of the proximal term."""

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state:
                    zeros = torch.zeros_like(p, dtype=torch.float64)
                    self.state[p] = {"z": zeros, "n": zeros.clone(), "inverse_eta": zeros.clone()}
                z, n, before = self.state[p].values()
                row = p.double()
                grad = p.grad + group["weight_decay"] * row
                n += grad**2
                inverse_eta = (n.sqrt() + 1e-10) / group["lr"]
                z += grad - (inverse_eta - before) * row
                before.copy_(inverse_eta)
                to = -(z - z.sign() * FTRL["l1"]) / (inverse_eta + FTRL["l2"])
                p.copy_(torch.where(z.abs() <= FTRL["l1"], 0.0, to))


def reference_rows(first_rows, rule, weight_decay):
    """torch.nn.Embedding and torch's optimizer on the joined batches, restricted to the touched rows of each step."""
    kinds = {
        "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam, "ftrl": Ftrl,
        "rowwise_adagrad": RowwiseAdagrad, "momentum": partial(torch.optim.SGD, momentum=0.9),
    }  # fmt: skip
    embedding = torch.nn.Embedding.from_pretrained(torch.tensor(first_rows), freeze=False)
    optimizer = kinds[rule](embedding.parameters(), lr=RULES[rule], weight_decay=weight_decay)
    for step in range(STEPS):
        ids, target = samples(step)
        optimizer.param_groups[0]["lr"] = RULES[rule] * SCHEDULE.factor(step)
        optimizer.zero_grad()
        loss_of(embedding(ids), target).backward()
        untouched = torch.ones(NUM_ROWS, dtype=torch.bool)
        untouched[ids.flatten()] = False
        kept = [(t, t[untouched].clone()) for t in per_row_tensors(embedding.weight, optimizer)]
        optimizer.step()
        with torch.no_grad():
            for tensor, values in kept:
                tensor[untouched] = values
            if step == 0:  # state created by the first step, zero before it
                for tensor in per_row_tensors(embedding.weight, optimizer)[1:]:
                    tensor[untouched] = 0
    return embedding.weight.detach().numpy()


def per_row_tensors(weight, optimizer):
    state = optimizer.state.get(weight, {})
    return [weight.data] + [t for t in state.values() if torch.is_tensor(t) and t.dim() == 2]


@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
@pytest.mark.parametrize("partition", sorted(PARTITIONS))
@pytest.mark.parametrize("rule", sorted(RULES))
def test_rows_equal_torch_on_the_joined_batch(placed, rule, partition, weight_decay):
    table = make_table(placed, rule, weight_decay, partition=partition)
    expected = reference_rows(all_rows(table, placed), rule, weight_decay)
    train(table, placed)
    found = all_rows(table, placed)
    assert np.abs(found - expected).max() < 1e-5
    if rule == "ftrl":
        zeros, others = (expected == 0).mean(), ((found == 0) != (expected == 0)).mean()
        assert 0.3 < zeros < 0.7 and others < 0.005, (zeros, others)
    table.close()


@pytest.mark.parametrize("rule", sorted(RULES))
def test_two_runs_are_bitwise_equal(placed, rule):
    runs = []
    for _ in range(2):
        table = make_table(placed, rule)
        losses = train(table, placed)
        runs.append((losses, all_rows(table, placed), table.shard.state.copy(), table.shard.clock.copy()))
        table.close()
    assert runs[0][0] == runs[1][0]
    assert all(np.array_equal(a, b) for a, b in zip(runs[0][1:], runs[1][1:]))


@pytest.mark.parametrize("partition", sorted(PARTITIONS))
def test_near_and_far_and_rows_prefetched_at_any_depth_are_bitwise_equal(world, placed, partition):
    results = []
    for place, prefetch in [(world, 0), *((placed, depth) for depth in range(MOST_AHEAD + 1))]:
        table = make_table(place, "adagrad", partition=partition)
        results.append((train(table, place, prefetch=prefetch), all_rows(table, place)))
        table.close()
    check_same_bits(results)


def check_same_bits(results):
    """Checks that all runs, each (losses, rows), have the same result."""
    for losses, rows in results[1:]:
        assert losses == results[0][0]
        assert np.array_equal(rows, results[0][1])


@pytest.mark.parametrize("partition", sorted(PARTITIONS))
def test_first_rows_depend_on_seed_name_and_key_alone(world, partition, monkeypatch):
    threads = torch.get_num_threads()
    with monkeypatch.context() as small:
        small.setattr("hetmpi.owner.store.INIT_CHUNK_ROWS", 7)
        torch.set_num_threads(3)
        table = make_table(world, partition=partition)
    torch.set_num_threads(threads)
    alone = EmbeddingTable(alone_world(world), NUM_ROWS, DIM, RowOptimizer(), seed=7, init_std=0.1)
    assert np.array_equal(all_rows(table, world), alone.shard.weight)
    other = make_table(world, partition=partition, name="other")
    assert np.isclose(all_rows(other, world), alone.shard.weight).mean() < 0.05
    for each in (table, alone, other):
        each.close()


def alone_world(world):
    from mpi4py import MPI

    from hetmpi.world.world import World

    return World(MPI.COMM_SELF)


def test_first_rows_are_normal(world):
    table = EmbeddingTable(world, 30_000, 8, RowOptimizer(), init_std=0.5)
    values = np.concatenate(world.comm.allgather(table.shard.weight.ravel().copy()))
    assert abs(values.mean()) < 0.005 and abs(values.std() - 0.5) < 0.005
    assert abs((np.abs(values) < 0.5).mean() - 0.6827) < 0.005
    assert abs((np.abs(values) < 1.0).mean() - 0.9545) < 0.005
    table.close()


def test_no_update_is_lost_or_applied_twice_through_small_rings(placed):
    table = make_table(placed, lr=1.0, schedule=Schedule(), init_std=0.0, inbox_bytes=1)
    total = np.zeros((NUM_ROWS, DIM), np.int64)
    for step in range(6):
        for rank in range(placed.size):
            keys, grads = integer_message(step, rank)
            np.add.at(total, keys, grads)
        keys, grads = integer_message(step, placed.rank)
        table.read(torch.from_numpy(keys))
        table.write(torch.from_numpy(keys), torch.from_numpy(grads.astype(np.float32)))
    table.flush()
    assert np.array_equal(all_rows(table, placed), -total)
    table.close()


def integer_message(step, rank):
    """Keys and small integer gradients; rank 1 has none in every other step."""
    generator = np.random.default_rng([step, rank])
    count = 0 if rank == 1 and step % 2 else int(generator.integers(1, 60))
    return generator.permutation(NUM_ROWS)[:count], generator.integers(-3, 4, (count, DIM))


def test_clock_counts_the_steps_that_updated_a_row(placed):
    table = make_table(placed)
    expected = np.zeros(NUM_ROWS, np.int64)
    for step in range(5):
        touched = set()
        for rank in range(placed.size):
            touched |= set(integer_message(step, rank)[0].tolist())
        expected[list(touched)] += 1
        keys = torch.from_numpy(integer_message(step, placed.rank)[0])
        table.read(keys)
        table.write(keys, torch.zeros(len(keys), DIM))
    table.flush()
    assert np.array_equal(table.shard.clock, expected[table.keys().numpy()])
    table.close()


def test_bytes_count_only_what_crosses_between_ranks(placed):
    table = make_table(placed)
    keys = torch.arange(NUM_ROWS)
    table.read(keys)
    table.write(keys, torch.zeros(NUM_ROWS, DIM))
    table.flush()
    others = NUM_ROWS - len(table.keys())
    assert (table.counters.pulled_bytes, table.counters.push_bytes) == (others * DIM * 4, others * (8 + DIM * 4))
    table.close()


@pytest.mark.parametrize("wrong", [-1, NUM_ROWS, 1 << 40])
def test_keys_out_of_range_are_refused(world, wrong):
    table = make_table(world)
    with pytest.raises(UserError, match=rf"read: keys must lie in \[0, {NUM_ROWS}\), got {wrong}"):
        table.read(torch.tensor([0, wrong]))
    table.close()


def test_keys_and_grads_of_a_wrong_kind_are_refused(world):
    table = make_table(world)
    with pytest.raises(UserError, match=r"keys must be int64 of shape \(U,\) on the CPU, got torch.float32 \(8,\)"):
        table.read(torch.zeros(8))
    with pytest.raises(UserError, match=r"grads must be float32 of shape \(2, 5\) on cpu, got torch.float32 \(2, 4\)"):
        table.write(torch.tensor([0, 1]), torch.zeros(2, 4))
    table.close()


def test_a_second_write_in_one_step_is_refused(world):
    table = make_table(world)
    keys = torch.arange(3)
    table.write(keys, torch.zeros(3, DIM))
    with pytest.raises(RuntimeError, match="written already"):
        table.write(keys, torch.zeros(3, DIM))
    with pytest.raises(RuntimeError, match="not settled yet"):
        table.peek(keys)
    table.flush()
    table.close()


def test_two_worlds_of_one_job_train_side_by_side(world):
    from hetmpi.world.world import World

    half = world.comm.Split(world.rank % 2, key=world.rank)
    part = World(half)
    table = EmbeddingTable(part, 50, 2, RowOptimizer("sgd", 1.0), init_std=0.0)
    for _ in range(4):
        table.write(torch.arange(50), torch.ones(50, 2))
        table.read(torch.arange(50))
    table.flush()
    assert (table.shard.weight == -4 * part.size).all()
    table.close()


HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists() and tuple(
    map(int, re.findall(r"\d+", os.uname().release)[:2])
) >= (6, 1)  # that a program can ask for


def huge_bytes() -> int:
    """Bytes of this process on huge pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("ShmemPmdMapped", "AnonHugePages")))


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="takes Linux 6.1 or later with huge pages")
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.skipif("HETMPI_TEST_STORE" in os.environ, reason="rows are on disk")
def test_large_shards_lie_on_huge_pages_until_the_table_is_closed(world, staleness):
    settings = {"init_std": 0.1, "seed": 7, "staleness": Staleness(staleness)}
    small = EmbeddingTable(world, 1000, 64, RowOptimizer(lr=1.0), **settings)
    before, keys = huge_bytes(), torch.arange(1000)
    gc.disable()
    table = EmbeddingTable(world, 150_000 * world.size, 64, RowOptimizer(lr=1.0), **settings)
    num_bytes = table.shard.weight.nbytes
    world.comm.Barrier()
    assert huge_bytes() - before >= 0.5 * num_bytes
    assert torch.equal(table.read(keys), small.read(keys))
    world.comm.Barrier()  # at s = 1 others read what a faster rank has written
    table.write(keys, torch.ones(1000, 64))
    table.flush()
    world.comm.Barrier()
    assert torch.allclose(table.peek(keys), small.peek(keys) - world.size)
    table.close()
    assert huge_bytes() - before < 0.2 * num_bytes
    gc.enable()
    small.close()


def test_a_table_larger_than_memory_is_refused_before_it_is_made(world):
    with pytest.raises(UserError, match=r"4,000,000,000,000 rows of dim 128 .* need .* GiB .* are free in"):
        EmbeddingTable(world, 4 * 10**12, 128, RowOptimizer())


def test_keys_of_as_many_batches_as_a_loader_prefetches_are_checked_once(world):
    table = EmbeddingTable(world, 100, 2, RowOptimizer("sgd"))
    batches = [torch.arange(start, start + 3) for start in range(50)]

    def checked_again():
        first = [table.check(keys) for keys in batches]  # by the loader's threads
        return sum(table.check(keys) is not known for keys, known in zip(batches, first))

    assert checked_again() > 0
    table.remember(40)
    assert checked_again() == 0
    table.close()


def test_keys_that_change_are_checked_again_unless_they_were_said_to_be_fixed(world):
    table = EmbeddingTable(world, 100, 2, RowOptimizer("sgd"))
    for are_fixed in (False, True):
        keys = torch.arange(3)
        checked = table.check(keys, are_fixed)
        keys[0] = 50
        assert (table.check(keys) is checked) == are_fixed
    table.close()


def test_a_prefetch_that_is_not_used_changes_nothing(placed):
    table = make_table(placed)
    keys, others = torch.arange(0, NUM_ROWS, 2), torch.arange(1, NUM_ROWS, 2)
    table.prefetch(others)
    table.prefetch(others)
    expected = table.read(keys)
    table.prefetch(others)
    assert torch.equal(table.read(keys), expected)
    table.prefetch(keys)
    table.close()


def test_a_tensor_of_keys_may_be_refilled_in_place(placed):
    table = make_table(placed)
    keys = torch.arange(10)
    table.prefetch(keys)
    keys += 10
    assert torch.equal(table.read(keys), table.peek(torch.arange(10, 20)))
    keys += 10
    assert torch.equal(table.read(keys), table.peek(torch.arange(20, 30)))
    table.close()


def test_prefetch_after_write_is_refused(world):
    table = make_table(world)
    table.write(torch.arange(3), torch.zeros(3, DIM))
    with pytest.raises(RuntimeError, match="between a read and the write"):
        table.prefetch(torch.arange(3))
    table.flush()
    table.close()


def test_tables_with_fewer_rows_than_ranks_and_of_one_number_work(placed):
    table = EmbeddingTable(placed, 2, 1, RowOptimizer("sgd", 1.0), init_std=0.0)
    for _ in range(3):
        table.read(torch.tensor([1]))
        table.write(torch.tensor([1]), torch.ones(1, 1))
    table.flush()
    assert table.peek(torch.tensor([0, 1])).flatten().tolist() == [0, -3 * placed.size]
    table.close()


def test_two_tables_of_one_world_do_not_mix(placed):
    wide, narrow = (make_table(placed, "adagrad", name=name) for name in ("wide", "narrow"))
    expected = train(narrow, placed, steps=5)
    narrow.close()
    narrow = make_table(placed, "adagrad", name="narrow")
    keys = torch.arange(NUM_ROWS)
    losses = []
    for step in range(5):
        wide.read(keys)
        losses.append(train_step(narrow, placed, my_batch(placed, step)))
        wide.write(keys, torch.ones(NUM_ROWS, DIM))
    assert losses == expected
    for table in (wide, narrow):
        table.flush()
        table.close()


def test_gradients_may_be_overwritten_after_write(placed):
    table = make_table(placed, lr=1.0, schedule=Schedule(), init_std=0.0)
    grads = torch.ones(NUM_ROWS, DIM)
    table.write(torch.arange(NUM_ROWS), grads)
    grads.zero_()
    table.flush()
    assert (all_rows(table, placed) == -placed.size).all()
    table.close()


def test_a_closed_table_says_so(world):
    table = make_table(world)
    table.close()
    table.close()
    for call in (lambda: table.read(torch.arange(3)), lambda: table.peek(torch.arange(3)), table.flush):
        with pytest.raises(RuntimeError, match="the table is closed"):
            call()


# Input that must not reach an owner.


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"staleness": Staleness(10)},
        {"staleness": Staleness(10), "cache": CacheSettings(64, admit="all")},
    ],
)
def test_a_gradient_that_is_not_finite_changes_nothing(placed, settings, value):
    table = make_table(placed, **settings)
    before, keys = all_rows(table, placed), torch.arange(20)
    rows = table.read(keys)
    grads = torch.ones(20, DIM)
    grads[7, 2] = grads[9, 0] = value
    with pytest.raises(NotFinite, match=re.escape(f"gradients must be finite, got {value} for key 7 (2 of 20 keys)")):
        table.write(keys, grads)
    assert torch.equal(table.read(keys), rows)
    table.flush()
    assert np.array_equal(all_rows(table, placed), before)
    table.close()


@pytest.mark.parametrize(
    "settings",
    [{}, {"staleness": Staleness(10)}, {"staleness": Staleness(10), "cache": CacheSettings(64, admit="all")}],
)
def test_keys_given_twice_are_refused(placed, settings):
    table = make_table(placed, **settings)
    twice = torch.tensor([3, 5, 8, 5, 3])
    with pytest.raises(UserError, match="EmbeddingTable.read: keys must be unique, got 5 twice"):
        table.read(twice)
    keys = torch.tensor([3, 5, 8])
    table.read(keys)
    with pytest.raises(UserError, match="EmbeddingTable.prefetch: keys must be unique, got 5 twice"):
        table.prefetch(twice)
    with pytest.raises(UserError, match="EmbeddingTable.read: keys must be unique, got 5 twice"):
        table.check(twice)
    with pytest.raises(UserError, match="EmbeddingTable.write: keys must be unique, got 5 twice"):
        table.write(twice, torch.ones(5, DIM))
    table.write(keys, torch.ones(3, DIM))
    table.flush()
    assert torch.equal(table.peek(twice), table.peek(keys)[[0, 1, 2, 1, 0]])  # peek changes nothing and accepts repeats
    table.close()


class LazyWindow:
    """An MPI window over several nodes that delays all operations until a flush, as MPI allows."""

    def __init__(self, window):
        self._window, self._posted = window, []

    def Get(self, out, rank, target):
        self._post(self._window.Get, out, rank, target)

    def Put(self, origin, rank, target):
        self._post(self._window.Put, origin, rank, target)

    def Accumulate(self, origin, rank, target, op):
        self._post(self._window.Accumulate, origin, rank, target, op=op)

    def Get_accumulate(self, origin, out, rank, target, op):
        self._post(lambda *args, op: self._window.Get_accumulate(origin, *args, op=op), out, rank, target, op=op)

    def _post(self, call, origin, rank, target, **op):
        """The caller may free its datatypes at once."""
        (memory, num, source), (begin, num_there, there) = origin, target
        self._posted.append((call, [memory, num, source.Dup()], rank, (begin, num_there, there.Dup()), op))

    def Flush_all(self):
        for call, origin, rank, target, op in self._posted:
            call(origin, rank, target, **op)
            origin[2].Free()
            target[2].Free()
        self._posted.clear()
        self._window.Flush_all()

    def __getattr__(self, name):
        return getattr(self._window, name)


@pytest.mark.parametrize("inbox_bytes", [1, 100_000])
@pytest.mark.parametrize("staleness", [0, 10])
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_an_mpi_that_works_only_at_a_flush_is_enough(world, ranks_per_node, staleness, inbox_bytes):
    """MPI may delay the copy of a request: a rank flushes before it waits for others."""
    if world.size <= ranks_per_node:
        pytest.skip("takes two nodes")
    world.start_horovod()
    apart = World(world.comm, ranks_per_node=ranks_per_node)
    table = make_table(apart, schedule=Schedule(), staleness=Staleness(staleness), inbox_bytes=inbox_bytes)
    wire = table.client.channel.exchange.wire
    wire._window = lazy = LazyWindow(wire._window)
    for lines in wire._servers.values():
        lines._window = lazy
    keys = torch.arange(60)
    for _ in range(4):
        table.read(keys)
        table.write(keys, torch.ones(60, DIM))
    table.flush()
    expected = make_table(apart, schedule=Schedule())
    for _ in range(4):
        expected.read(keys)
        expected.write(keys, torch.ones(60, DIM))
    expected.flush()
    assert np.allclose(all_rows(table, apart), all_rows(expected, apart), atol=1e-5)
    wire._window = lazy._window
    table.close()
    expected.close()


@pytest.mark.parametrize(
    "name, of_rank, shown",
    [
        ("num_rows", lambda rank: 200 + 10 * rank, "num_rows is 200 on rank 0 and 210 on rank 1"),
        ("dim", lambda rank: 4 + rank, "dim is 4 on rank 0 and 5 on rank 1"),
        ("partition", lambda rank: ("range", "hash")[rank % 2], "partition is range on rank 0 and hash on rank 1"),
        ("inbox_bytes", lambda rank: (1 + rank) << 20, "inbox_bytes is 1048576 on rank 0 and 2097152 on rank 1"),
        (
            "exchange",
            lambda rank: ("windows", "messages")[rank % 2],
            "exchange is windows on rank 0 and messages on rank 1",
        ),
        ("staleness", lambda rank: Staleness(rank), "staleness is Staleness(bound=0"),
        ("optimizer", lambda rank: RowOptimizer(("sgd", "adam")[rank % 2]), "optimizer is RowOptimizer(rule='sgd'"),
    ],
)
def test_ranks_with_different_arguments_are_refused_together(placed, name, of_rank, shown):
    if placed.size == 1:
        pytest.skip("takes 2 ranks")
    arguments = {"num_rows": NUM_ROWS, "dim": DIM, "optimizer": RowOptimizer(), name: of_rank(placed.rank)}
    with pytest.raises(
        UserError, match=f"^EmbeddingTable: all ranks must give the same arguments, .*{re.escape(shown)}"
    ):
        EmbeddingTable(placed, **arguments)


def test_groups_with_tables_in_another_order_are_refused_together(world):
    if world.size == 1:
        pytest.skip("takes 2 ranks")
    tables = {name: make_table(world, name=name) for name in ("a", "b")}
    names = sorted(tables, reverse=world.rank == 1)
    with pytest.raises(UserError, match=r"^TableGroup: all ranks .* tables is \['a', 'b'\] on rank 0 and \['b', 'a'\]"):
        TableGroup({name: tables[name] for name in names})
    for table in tables.values():
        table.close()


@pytest.mark.parametrize("kind", [UserError, OSError])
def test_a_constructor_that_fails_on_all_ranks_frees_its_memory(placed, monkeypatch, kind):
    """Where other ranks may not know of the failure, freeing would wait for them."""
    freed = []
    free = NodeMemory.free
    monkeypatch.setattr(NodeMemory, "free", lambda memory: (freed.append(memory), free(memory)))
    monkeypatch.setattr("hetmpi.table.table.BspClient", lambda *_: refuse(kind))
    with pytest.raises(kind, match="no client"):
        make_table(placed)
    assert len(freed) == (kind is UserError or placed.size == 1)


def refuse(kind):
    raise kind("no client")


def test_an_exchange_that_is_no_class_is_refused_before_memory_is_taken(placed, monkeypatch):
    monkeypatch.setattr("hetmpi.table.table.NodeMemory", lambda *_: refuse(AssertionError))
    with pytest.raises(UserError, match="table.exchange=no.such.Class: there is no such class"):
        make_table(placed, exchange="no.such.Class")


def test_a_table_shows_its_arguments(world):
    table = make_table(world, staleness=Staleness(10))
    shown = f"EmbeddingTable('table': 211 rows of dim 5, round_robin over {world.size} rank(s), sgd, staleness=10"
    assert repr(table) == f"{shown})" and repr(TableGroup({"a": table})) == f"TableGroup({shown}))"
    table.close()
    assert repr(table) == f"{shown}, closed)"
