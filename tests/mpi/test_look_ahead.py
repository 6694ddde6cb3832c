"""Batches announced at s = 0: rows are those of a run that announces nothing, bit for bit. Run at 1, 2, 3 and 4
ranks."""

import numpy as np
import pytest
import torch

from hetmpi.errors import UserError
from hetmpi.table.client import MOST_AHEAD
from hetmpi.table.group import TableGroup
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.table import EmbeddingTable

pytestmark = pytest.mark.mpi

NUM_ROWS, DIM, STEPS = 200, 5, 24
WIRES = ("messages", "windows")


def opened(world, exchange="auto", name="table"):
    return EmbeddingTable(world, NUM_ROWS, DIM, RowOptimizer("adagrad", 0.1), name=name, exchange=exchange)


def batches(rank, num, seed=0):
    """Unique keys of each step: none at times, and often the same ones as in the step before."""
    random, made = np.random.default_rng((seed, rank)), []
    for _ in range(num):
        kept = made[-1][random.random(len(made[-1])) < 0.4] if made else np.empty(0, np.int64)
        fresh = random.choice(NUM_ROWS, random.integers(0, 40) * (random.random() > 0.15), replace=False)
        made.append(random.permutation(np.union1d(kept, fresh)))
    return [torch.from_numpy(keys) for keys in made]


def gradients(keys, step):
    return torch.sin(torch.arange(len(keys) * DIM).view(-1, DIM) + step) * 0.1


def follow(table, steps, announcing=lambda step: 2):
    """Reads and writes all batches, with announcing(step) of the later ones announced. Returns all rows read."""
    rows, known = [], set()
    for step, keys in enumerate(steps):
        rows.append(table.read(keys).clone())
        for later in range(step + 1, min(len(steps), step + 1 + announcing(step))):
            if later not in known:
                table.prefetch(steps[later])
                known.add(later)
        table.write(keys, gradients(keys, step))
    return [*rows, flushed(table)]


def flushed(table):
    """All rows of a table, after a flush."""
    table.flush()
    return table.peek(torch.arange(NUM_ROWS))


def check_equal(found, expected):
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"step {step}"


def of_plain(world, steps, name="table"):
    """The rows without announcements, of one node."""
    table = opened(world, name=name)
    rows = follow(table, steps, lambda step: 0)
    table.close()
    return rows


@pytest.mark.parametrize("exchange", WIRES)
def test_the_next_batch_is_requested_with_the_gradients(world, apart, exchange):
    steps = batches(world.rank, STEPS)
    table = opened(apart, exchange)
    rounds = table.client.channel.exchange
    for step, keys in enumerate(steps[:-1]):
        table.read(keys)
        table.prefetch(steps[step + 1])
        before = rounds.num_messages
        table.write(keys, gradients(keys, step))
        has_answered = not apart.is_one_node and exchange == "messages"
        assert rounds.awaits(table.client.channel) == has_answered
        if has_answered:  # gradients and request are one message, and all clients are answered before write returns
            assert rounds.num_messages == before + len(rounds.rails.servers) + len(rounds.rails.clients)
    table.close()


@pytest.mark.parametrize("exchange", WIRES)
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_any_number_of_batches_may_be_announced(world, apart, exchange, num):
    steps = batches(world.rank, STEPS, seed=num)
    table = opened(apart, exchange)
    check_equal(follow(table, steps, lambda step: num), of_plain(world, steps))
    table.close()


@pytest.mark.parametrize("exchange", WIRES)
def test_the_number_announced_may_change(world, apart, exchange):
    steps = batches(world.rank, STEPS, seed=5)
    table = opened(apart, exchange)
    check_equal(follow(table, steps, lambda step: (2, 0, 1, 2, 2, 3, 0, 0)[step % 8]), of_plain(world, steps))
    table.close()


def test_by_windows_each_rank_may_announce_as_it_likes(world, apart):
    steps = batches(world.rank, STEPS, seed=6)
    table, random = opened(apart, "windows"), np.random.default_rng(world.rank)
    check_equal(follow(table, steps, lambda step: random.integers(0, 4)), of_plain(world, steps))
    table.close()


@pytest.mark.parametrize("exchange", WIRES)
def test_batches_announced_and_not_read_read_again_or_flushed(world, apart, exchange):
    """Also with gradients of keys that are not read in their step, of which no announcement knows."""
    steps, others = batches(world.rank, STEPS, seed=7), batches(world.rank, STEPS, seed=8)
    runs = []
    for table, announces in ((opened(world), False), (opened(apart, exchange), True)):
        rows = []
        for step in range(STEPS - 3):
            chances = np.random.default_rng((9, step)).random(6)  # all ranks alike
            is_other, is_again, is_unread, is_flushed, *is_late = chances < 0.25
            keys = (others if is_other else steps)[step]  # not what was announced
            rows.append(table.read(keys).clone())
            if announces and table.client.num_ahead < MOST_AHEAD - 1:
                for later in [step + 1] * int(is_late[0]) + [step + 2] * int(not is_late[1]):
                    table.prefetch(steps[later])
            if is_again:
                rows.append(table.read(keys).clone())
            written = others[step + 1] if is_unread else keys
            table.write(written, gradients(written, step))
            if is_flushed:
                rows.append(flushed(table))
        runs.append([*rows, flushed(table)])
        table.close()
    check_equal(*runs)


@pytest.mark.parametrize("exchange", WIRES)
def test_rows_assigned_after_a_flush_are_read(world, apart, exchange):
    steps = batches(world.rank, 6, seed=11)
    runs = []
    for table in (opened(world), opened(apart, exchange)):
        rows = []
        for step, keys in enumerate(steps):
            rows.append(table.read(keys).clone())
            for later in steps[1:3] if step == 0 else steps[step + 2 : step + 3]:
                table.prefetch(later)
            table.write(keys, gradients(keys, step))
            if step == 2:
                table.flush()
                table.shard.assign(slice(None), weight=table.keys()[:, None].numpy() * np.ones((1, DIM), np.float32))
                table.memory.fence()
        runs.append([*rows, flushed(table)])
        table.close()
    check_equal(*runs)


@pytest.mark.parametrize("exchange", WIRES)
def test_tables_of_a_group_share_the_messages(world, apart, exchange):
    steps = {name: batches(world.rank, STEPS, seed) for name, seed in (("a", 12), ("b", 13))}
    group = TableGroup({name: opened(apart, exchange, name) for name in steps})
    rows = {name: [] for name in steps}
    for step in range(STEPS):
        keys = {name: of_table[step] for name, of_table in steps.items()}
        grads = {name: gradients(of_table, step) for name, of_table in keys.items()}
        reads_alone, writes_alone, leaves_out = np.random.default_rng((16, step)).random(3) < 0.3  # all ranks alike
        found = {name: group[name].read(keys[name]) for name in keys} if reads_alone else group.read(keys)
        for name in keys:
            rows[name].append(found[name].clone())
        for later in (1, 2) if step == 0 else (step + 2,):
            for name in ("a",) if leaves_out else keys:
                if later < STEPS:
                    group[name].prefetch(steps[name][later])
        if writes_alone:
            for name in keys:
                group[name].write(keys[name], grads[name])
        else:
            group.write(keys, grads)
    group.flush()
    for name in steps:
        check_equal([*rows[name], group[name].peek(torch.arange(NUM_ROWS))], of_plain(world, steps[name], name))
    group.close()


@pytest.mark.parametrize("exchange", WIRES)
@pytest.mark.parametrize("num_tables", [1, 2])
def test_tables_may_be_closed_while_rows_are_on_their_way(world, apart, exchange, num_tables):
    group = TableGroup({str(name): opened(apart, exchange, str(name)) for name in range(num_tables)})
    steps = batches(world.rank, 5, seed=14)
    for step in range(3):
        group.read({name: steps[step] for name in group})
        for later in (1, 2) if step == 0 else (step + 2,):
            group.prefetch({name: steps[later] for name in group})
        group.write({name: steps[step] for name in group}, {name: gradients(steps[step], step) for name in group})
    group.close()


@pytest.mark.parametrize("apart", ["far"], indirect=True)
@pytest.mark.parametrize("of_first, of_others", [(1, 0), (2, 0), (0, 1)])
def test_by_messages_batches_that_ranks_announce_differently_are_refused_on_all(world, apart, of_first, of_others):
    table = opened(apart, "messages")
    steps, error = batches(world.rank, 6, seed=15), "announces (a batch|none) while rank . ann"
    with pytest.raises(RuntimeError, match=error):
        follow(table, steps, lambda step: of_others if world.rank else of_first)
    with pytest.raises(RuntimeError, match="an error has ended the messages between nodes: close the table"):
        table.read(steps[-1])
    table.close()


def test_a_table_that_has_announced_a_batch_joins_no_group(world, apart):
    tables = {name: opened(apart, "messages", name) for name in ("a", "b")}
    steps = batches(world.rank, 3, seed=16)
    tables["a"].read(steps[0])
    for later in steps[1:]:
        tables["a"].prefetch(later)
    tables["a"].write(steps[0], gradients(steps[0], 0))
    with pytest.raises(UserError, match="group the tables before a batch is announced"):
        TableGroup(tables)
    for table in tables.values():
        table.close()
