"""Rows on disk (hetmpi/owner/row_files.py): the same as in memory. The tests of tables run on them too, with
HETMPI_TEST_STORE (tests/system/test_store.py)."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support.stores import HundredthStore

from hetmpi.checkpoint.checkpoints import Checkpoints, Position
from hetmpi.errors import UserError
from hetmpi.owner.row_files import FileStore
from hetmpi.table.bag import EmbeddingBag
from hetmpi.table.cache import CacheSettings
from hetmpi.table.optim import ROW_RULES, RowOptimizer
from hetmpi.table.staleness import Staleness
from hetmpi.table.table import EmbeddingTable

pytestmark = pytest.mark.mpi

NUM_ROWS, DIM = 20_000, 21  # rows of no power of two: some lie on two pages


@pytest.fixture
def folder(world, tmp_path_factory):
    return world.comm.bcast(str(tmp_path_factory.mktemp("store")))


def keys_of(step, rank, num_rows=NUM_ROWS):
    draw = np.random.default_rng((step, rank))
    return torch.from_numpy(np.unique((num_rows * draw.random(500) ** 3).astype(np.int64)))


def step(table, number):
    """Reads, announces, writes: gradients that depend on the rows."""
    rank = table.world.rank
    keys = keys_of(number, rank)
    rows = table.read(keys)
    table.prefetch(keys_of(number + 1, rank))
    table.write(keys, 0.1 * rows + 0.01)


@pytest.mark.parametrize("exchange", ["messages", "windows"])
@pytest.mark.parametrize("rule", ROW_RULES)
def test_rows_on_disk_have_the_bits_of_rows_in_memory(placed, folder, rule, exchange):
    found = []
    for store in (None, HundredthStore(folder, 0)):
        table = EmbeddingTable(placed, NUM_ROWS, DIM, RowOptimizer(rule, 0.1), exchange=exchange, store=store, name="t")
        for number in range(6):
            step(table, number)
        table.flush()
        found.append((table.peek(torch.arange(NUM_ROWS)).numpy(), table.shard.state.copy(), table.shard.clock.copy()))
        placed.meet("to close")
        table.close()
    for in_memory, on_disk in zip(*found):
        assert np.array_equal(in_memory, on_disk)


def test_a_row_takes_disk_from_its_first_update_on(world, folder):
    table = EmbeddingTable(world, 1 << 20, 64, RowOptimizer("sgd", 1.0), store=FileStore(folder, 1 << 24))
    assert disk_bytes(folder) == 0
    rows = table.read(torch.arange(100))
    assert disk_bytes(folder) == 0
    table.write(torch.arange(100), torch.ones_like(rows))
    table.flush()
    assert 0 < disk_bytes(folder) <= 100 * 4096
    world.meet("to close")
    table.close()
    assert os.listdir(folder) == []


def disk_bytes(folder):
    """Of this process's open files without a name in a folder, except the ballast, which is the largest."""
    sizes = {}
    for place in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(place).startswith(folder) and os.access(place, os.W_OK):
                found = os.stat(place)
                sizes[found.st_ino] = found.st_blocks * 512
        except OSError:
            continue
    return sum(sizes.values()) - max(sizes.values())


def test_pages_in_memory_stay_within_the_budget(world, folder):
    store = HundredthStore(folder, 0)
    table = EmbeddingTable(world, NUM_ROWS * 8, 64, RowOptimizer("adagrad", 0.1), store=store)
    for number in range(20):
        keys = keys_of(number, world.rank, NUM_ROWS * 8)
        table.write(keys, 0.01 + table.read(keys))
    table.flush()
    file, budget = table.shard.file, store.pages(table.memory.layouts[world.rank])
    assert file.pages_written > 0
    deadline = time.monotonic() + 30
    while file.resident_pages > budget and time.monotonic() < deadline:
        time.sleep(0.01)
    assert file.resident_pages <= budget
    world.meet("to close")
    table.close()


@pytest.mark.parametrize("is_incremental", [False, True])
def test_a_checkpoint_has_the_rows_of_its_step_while_training_goes_on(world, folder, is_incremental, monkeypatch):
    table = EmbeddingTable(world, NUM_ROWS, DIM, RowOptimizer("adagrad", 0.1), store=HundredthStore(folder, 0))
    saved = Path(folder, "saved")
    checkpoints = Checkpoints(world, saved, full_every=2 if is_incremental else 1)
    step(table, 0)
    number = 1
    if is_incremental:
        table.flush()
        checkpoints.save(Position(0, 0), table)
        checkpoints.wait()
        step(table, 1)
        number = 2
    table.flush()
    at_save = [table.shard.weight, table.shard.state, table.shard.clock.copy()]
    monkeypatch.setattr(type(table.shard), "_copy", copy_late)
    checkpoints.save(Position(number, 0), table)
    for later in range(number, number + 5):
        step(table, later)
    checkpoints.wait()
    monkeypatch.undo()
    table.flush()
    assert not np.array_equal(table.shard.weight, at_save[0])
    other = EmbeddingTable(world, NUM_ROWS, DIM, RowOptimizer("adagrad", 0.1), store=HundredthStore(folder, 0))
    checkpoints.load(checkpoints.path(number), other)
    for array, name in zip(at_save, ("weight", "state", "clock")):
        assert np.array_equal(other.shard.snapshot(name, slice(None)), array)
    other.close()
    table.close()


def test_a_checkpoint_reads_rows_in_parts_alone(world, folder, monkeypatch):
    table = EmbeddingTable(world, NUM_ROWS, DIM, RowOptimizer("adagrad", 0.1), store=HundredthStore(folder, 0))
    step(table, 0)
    for whole in ("weight", "state"):
        monkeypatch.setattr(type(table.shard), whole, property(lambda shard: 1 / 0))
    checkpoints = Checkpoints(world, Path(folder, "parts"))
    checkpoints.save(Position(1, 0), table)
    checkpoints.wait()
    assert checkpoints.newest() == checkpoints.path(1)
    table.close()


def test_a_table_may_be_closed_while_its_checkpoint_is_written(world, folder, monkeypatch):
    table = EmbeddingTable(world, NUM_ROWS, DIM, RowOptimizer("adagrad", 0.1), store=HundredthStore(folder, 0))
    step(table, 0)
    shard = table.shard
    monkeypatch.setattr(type(shard), "_copy", copy_late)
    checkpoints = Checkpoints(world, Path(folder, "closed"))
    checkpoints.save(Position(1, 0), table)
    table.close()
    with pytest.raises(Exception, match="closed"):
        checkpoints.wait()
    assert checkpoints.steps() == []
    with pytest.raises(RuntimeError, match="closed"):
        shard.snapshot("weight", slice(3))


def test_rows_that_have_their_first_values_take_no_disk_when_they_are_assigned(world, folder):
    table = EmbeddingTable(world, 1 << 16, 64, RowOptimizer("adagrad", 1.0), store=FileStore(folder, 1 << 24))
    shard = table.shard
    shard.assign(slice(None), weight=shard.weight, state=shard.state)
    assert disk_bytes(folder) == 0
    shard.assign(np.array([5]), weight=1)
    assert 0 < disk_bytes(folder) <= 2 * 4096
    world.meet("to close")
    table.close()


def copy_late(shard, array, places, is_frozen, out=None):
    """FileShard._copy, but of frozen rows after training has written."""
    if is_frozen:
        time.sleep(0.3)
    out = shard.empty(array, len(places)) if out is None else out
    shard.file.copy(places, array == "state", is_frozen, out)
    return out


@pytest.mark.parametrize("placing", ["lines", "none"])
def test_no_update_is_lost_at_a_staleness(placed, folder, placing):
    cache = CacheSettings(capacity_rows=50 if placing == "lines" else 0)
    table = EmbeddingTable(
        placed, 2000, 3, RowOptimizer("sgd", 1.0), init_std=0.0, staleness=Staleness(3), cache=cache,
        store=HundredthStore(folder, 0),
    )  # fmt: skip
    expected = np.zeros(2000, np.float32)
    for number in range(10):
        for rank in range(placed.size):
            np.subtract.at(expected, keys_of(number, rank, 2000).numpy(), 1)
        keys = keys_of(number, placed.rank, 2000)
        table.write(keys, torch.ones_like(table.read(keys)))
    table.flush()
    assert np.array_equal(table.peek(torch.arange(2000)).numpy(), np.repeat(expected[:, None], 3, 1))
    placed.meet("to close")
    table.close()


def test_ids_get_and_lose_rows_on_disk(world, folder):
    found = []
    for store in (None, HundredthStore(folder, 0)):
        bag = EmbeddingBag(
            40, 4, world=world, vocabulary="open", expire_steps=3, maintain_steps=2, name="ids", store=store,
            optimizer=RowOptimizer("adagrad", 0.1),
        )  # fmt: skip
        for number in range(12):
            ids = torch.arange(5 * number, 5 * number + 8) * 1_000_003
            bag(ids.view(-1, 1)).sum().backward()
            bag.step()
        with torch.no_grad():
            bag.flush()
            found.append(bag(ids.view(-1, 1)).numpy().copy())
        world.meet("to close")
        bag.table.close()
    assert np.array_equal(*found)


def test_what_cannot_be_a_store_is_refused_on_all_ranks(world, folder):
    for store, told in (
        (FileStore(f"{folder}/none", 1 << 24), "table.store_dir=.*none: No such file"),
        (FileStore("/dev/shm", 1 << 24), "table.store_dir=/dev/shm is in memory"),
        (FileStore(folder, 10_000), "table.store_memory_gb: a table of .* rows on each rank needs at least"),
    ):
        with pytest.raises(UserError, match=told):
            EmbeddingTable(world, NUM_ROWS, DIM, RowOptimizer(), store=store)
    assert os.listdir(folder) == []
