"""Tests of tables whose rows a GPU reads and updates (table.store=gpu, pinned), emulated or not: test_emulated_gpu.py
runs them."""

import numpy as np
import pytest
import torch
from batches_on_gpu import DEVICE

from hetmpi import Checkpoints, EmbeddingTable, GpuStore, NotFinite, Position, RowOptimizer, Staleness, UserError, World
from hetmpi.gpu import gpu_of
from hetmpi.table.group import TableGroup
from hetmpi.table.optim import ROW_RULES

WORLD, NUM_ROWS, DIM = World(), 200, 12


def opened(store, name="t", optimizer=RowOptimizer("adagrad", 0.1), **settings):
    return EmbeddingTable(
        WORLD, NUM_ROWS, DIM, optimizer, name=name, device="cpu" if store is None else DEVICE, store=store, **settings
    )


STORES = [GpuStore(), GpuStore(in_host_memory=True)]


@pytest.fixture(params=STORES, ids=lambda store: store.name)
def tables(request):
    """The host's, and the GPU's."""
    made = [opened(None), opened(request.param)]
    yield made
    for table in made:
        table.close()


def make_steps(table, first: int, num: int):
    for number in range(first, first + num):
        draw = np.random.default_rng(number)
        keys = torch.from_numpy(draw.permutation(NUM_ROWS)[:50])
        table.read(keys)
        grads = torch.from_numpy(draw.normal(size=(50, DIM)).astype(np.float32))
        table.write(keys, grads.to(table.device))
    table.flush()


def arrays_of(table) -> list[np.ndarray]:
    return [np.array(getattr(table.shard, name)) for name in ("weight", "state", "clock")]


def same(one, other) -> bool:
    return all(map(np.array_equal, arrays_of(one), arrays_of(other)))


@pytest.mark.parametrize("store", STORES, ids=lambda store: store.name)
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("partition", ["round_robin", "range", "hash"])
@pytest.mark.parametrize("rule", ROW_RULES)
def test_rows_have_the_bits_of_host_memory(rule, partition, decay, store):
    optimizer = RowOptimizer(rule, 0.1, decay)
    on_cpu, on_gpu = (opened(store, partition=partition, optimizer=optimizer) for store in (None, store))
    for table in (on_cpu, on_gpu):
        make_steps(table, 0, 5)
    every = torch.arange(NUM_ROWS)
    assert same(on_cpu, on_gpu) and torch.equal(on_cpu.peek(every), on_gpu.peek(every).cpu())
    assert on_cpu.shard.changed().tolist() == on_gpu.shard.changed().tolist()
    on_cpu.close()
    on_gpu.close()


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
@pytest.mark.parametrize("told_by", ["write", "flush"])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_told_in_the_next_call(tables, wrong, told_by):
    _, table = tables
    make_steps(table, 0, 2)
    before, keys = arrays_of(table), torch.arange(5)
    grads = torch.ones(5, DIM)
    grads[3, 7] = wrong
    table.read(keys)
    table.write(keys, grads.to(table.device))
    told = rf"gradients of the step before must be finite, got {wrong} for key 3 \(1 of 5 keys\)"
    with pytest.raises(NotFinite, match=told):
        if told_by == "flush":
            table.flush()
        else:
            table.read(keys)
            table.write(keys, torch.ones(5, DIM).to(table.device))
    assert all(map(np.array_equal, before, arrays_of(table)))


@pytest.mark.parametrize("store", STORES, ids=lambda store: store.name)
def test_no_table_of_a_group_is_written_after_gradients_that_were_not_finite(store):
    group = TableGroup({name: opened(store, name) for name in ("users", "items")})
    keys, ones = dict.fromkeys(group, torch.arange(5)), torch.ones(5, DIM).to(DEVICE)
    group.read(keys)
    group.write(keys, {"users": ones, "items": ones / 0 - ones / 0})
    group.read(keys)
    before = arrays_of(group["users"])
    with pytest.raises(NotFinite):
        group.write(keys, dict.fromkeys(group, ones))
    assert all(map(np.array_equal, before, arrays_of(group["users"])))
    assert group["items"].shard.clock.max() == 0
    group.close()


@pytest.mark.parametrize("has_memory", [True, False])
def test_checkpoints_go_from_one_memory_to_the_other(tables, tmp_path, monkeypatch, has_memory):
    """has_memory: for a copy of the rows; otherwise training waits for the files."""
    if not has_memory:
        monkeypatch.setattr("hetmpi.checkpoint.checkpoints.available_memory", lambda: 1000)
    on_cpu, on_gpu = tables
    checkpoints = Checkpoints(WORLD, tmp_path, keep=9, full_every=2)
    for number in range(2):
        make_steps(on_gpu, 3 * number, 3)
        checkpoints.save(Position(3 * number + 3, 0), on_gpu, torch.nn.Linear(1, 1))
        checkpoints.wait()
    for path in checkpoints.steps():
        for table in tables:
            checkpoints.load(checkpoints.path(path), table, torch.nn.Linear(1, 1))
    for table in tables:
        make_steps(table, 6, 2)
    assert same(on_cpu, on_gpu)


def test_rows_are_copied_in_parts_as_they_are(tables, monkeypatch):
    monkeypatch.setattr("hetmpi.owner.gpu_rows.COPIED_BYTES", 7 * 4 * DIM)
    on_cpu, on_gpu = tables
    for table in tables:
        make_steps(table, 0, 2)
    rows = np.random.default_rng(0).permutation(NUM_ROWS)[:50]
    for name in ("weight", "state", "clock"):
        for some in (rows, slice(10, 60)):
            expected = np.array(on_cpu.shard.snapshot(name, some))
            assert np.array_equal(on_gpu.shard.snapshot(name, some), expected)
            out = np.empty_like(expected)
            assert on_gpu.shard.snapshot(name, some, out) is out and np.array_equal(out, expected)
            in_parts = on_gpu.shard.copied(name, some, None)
            assert np.array_equal(in_parts[5:45], expected[5:45]) and len(in_parts) == 50


def refused(match: str, **settings):
    with pytest.raises(UserError, match=match):
        opened(GpuStore(), **settings)


def test_where_it_cannot_be_is_refused(monkeypatch):
    refused(r"table.store=gpu needs table.staleness=0", staleness=Staleness(10))
    with pytest.raises(UserError, match="table.store=gpu needs a GPU, the device is cpu: set device=cuda"):
        EmbeddingTable(WORLD, NUM_ROWS, DIM, RowOptimizer(), store=GpuStore())
    monkeypatch.setattr(gpu_of(DEVICE), "free_bytes", staticmethod(lambda device: 10_000))
    with pytest.raises(UserError, match="table.store=pinned needs table.staleness=0"):
        opened(GpuStore(in_host_memory=True), staleness=Staleness(10))
    refused(r"needs .* for 200 rows of dim 12 with 12 floats of optimizer state, .* free on .*, .* too few: set")
