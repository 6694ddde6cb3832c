"""Several tables that are read and written together, compared with single tables. Run at 1, 2 and 3 ranks."""

import math

import numpy as np
import pytest
import torch

from hetmpi import CacheSettings, NotFinite, RowOptimizer, Staleness, UserError, World
from hetmpi.table.group import TableGroup
from hetmpi.table.table import EmbeddingTable

pytestmark = pytest.mark.mpi
SHAPES = {"users": (400, 6, "adagrad"), "items": (90, 2, "sgd"), "words": (50, 3, "adam")}
CACHED = {"cache": CacheSettings(40, admit="all")}


def make(world, name, **settings):
    num_rows, dim, rule = SHAPES[name]
    return EmbeddingTable(world, num_rows, dim, RowOptimizer(rule, 0.1), name=name, **settings)


def batches(rank, steps):
    """Unique keys and gradients of each table; some tables have no keys in a step."""
    rng = np.random.default_rng(rank)
    for step in range(steps):
        keys = {name: rng.permutation(shape[0])[: rng.integers(0, 40) * (step % 3 != i)] for i, (name, shape) in
                enumerate(SHAPES.items())}  # fmt: skip
        grads = {name: rng.normal(size=(len(keys[name]), shape[1])) for name, shape in SHAPES.items()}
        yield (
            {name: torch.from_numpy(values) for name, values in keys.items()},
            {name: torch.from_numpy(values.astype(np.float32)) for name, values in grads.items()},
        )


@pytest.mark.parametrize("exchange", ["windows", "messages"])
def test_tables_in_a_group_are_as_tables_alone_at_s_0(placed, exchange):
    group, alone = ({name: make(placed, name, exchange=exchange) for name in SHAPES} for _ in range(2))
    together = TableGroup(group)
    for keys, grads in batches(placed.rank, 12):
        rows = together.read(keys)
        for name, table in alone.items():
            assert torch.equal(rows[name], table.read(keys[name]))
        together.write(keys, grads)
        for name, table in alone.items():
            table.write(keys[name], grads[name])
    together.flush()
    for name, table in alone.items():
        table.flush()
        for array in ("weight", "state", "clock"):
            assert np.array_equal(getattr(table.shard, array), getattr(group[name].shard, array))
        assert table.counters == group[name].counters
        table.close()
    together.close()


@pytest.mark.parametrize("exchange", ["windows", "messages"])
def test_tables_of_a_group_may_be_written_one_by_one(world, monkeypatch, exchange):
    """Rank 2 waits for rank 0, whose gradients come by rank 1, which waits for room at rank 2 and has not sent those of
    the tables that follow."""
    monkeypatch.setattr("hetmpi.world.world.split_nodes", lambda comm, _: comm.Split(min(comm.rank, 1), comm.rank))
    nodes = World(world.comm)
    group = TableGroup({name: make(nodes, name, exchange=exchange, inbox_bytes=1) for name in SHAPES})
    keys = {name: torch.arange(table.num_rows) for name, table in group.items()}
    first = group["items"].read(keys["items"])[group["items"].keys()].numpy()
    for step in range(4):
        for name, table in group.items():
            grads = torch.ones_like(table.read(keys[name]))
            table.write(keys[name], grads)
            grads.zero_()  # they are the caller's again
        group.read(keys) if step == 2 else None
    group["items"].write(keys["items"], torch.ones_like(group["items"].read(keys["items"])))
    group.read(keys)  # of which one table was written
    group.flush()
    assert all((table.shard.clock == 4 + (name == "items")).all() for name, table in group.items())
    assert np.allclose(group["items"].shard.weight, first - 0.1 * 5 * world.size, atol=1e-5)
    group.close()


@pytest.mark.parametrize("staleness", [1, 10])
@pytest.mark.parametrize("exchange", ["windows", "messages"])
@pytest.mark.parametrize("announces", [False, True])
def test_a_group_under_staleness_loses_no_gradient(placed, exchange, staleness, announces):
    """All gradients are one and the rule is SGD: a row is its initial value minus the number of its writes."""
    tables = {
        name: EmbeddingTable(
            placed, rows, dim, RowOptimizer("sgd", 1.0), name=name, init_std=0.0, exchange=exchange,
            staleness=Staleness(staleness), **CACHED,
        )
        for name, (rows, dim, _) in SHAPES.items()
    }  # fmt: skip
    group, written = TableGroup(tables), {name: np.zeros(shape[0]) for name, shape in SHAPES.items()}
    todo = [keys for keys, _ in batches(placed.rank, 15)]
    for i, keys in enumerate(todo):
        group.read(keys)
        if announces and i + 1 < len(todo):
            group.prefetch(todo[i + 1])
        group.write(keys, {name: torch.ones(len(keys[name]), shape[1]) for name, shape in SHAPES.items()})
        for name in SHAPES:
            written[name][keys[name].numpy()] += 1
    group.flush()
    for name, table in tables.items():
        of_all = placed.comm.allreduce(written[name])
        assert np.allclose(table.shard.weight, -of_all[table.keys().numpy()][:, None])
    assert group.counters.pushed == sum(table.counters.pushed for table in tables.values())
    group.close()


@pytest.mark.parametrize("exchange", ["windows", "messages"])
def test_ranks_whose_rings_are_full_take_in_gradients_of_all_tables(placed, exchange):
    """One rank's first table waits for room at a rank that is busy with its second."""
    check_full_rings(placed, exchange)


def test_full_rings_of_ranks_that_are_not_consecutive_on_their_nodes_empty(interleaved):
    """An owner awaits gradients that another rank posts for the nodes' ranks: it must post before it waits for room."""
    check_full_rings(interleaved, "messages")


def check_full_rings(world, exchange):
    tables = {
        name: EmbeddingTable(
            world, 300, 8, RowOptimizer("sgd", 1.0), name=name, init_std=0.0, exchange=exchange, inbox_bytes=1
        )
        for name in ("first", "second")
    }
    group = TableGroup(tables)
    large = torch.arange(300)
    for step in range(3):
        chosen = (world.rank + step) % 2
        keys = {"first": large if chosen else large[:2], "second": large[:2] if chosen else large}
        group.read(keys)
        group.write(keys, {name: torch.ones(len(keys[name]), 8) for name in keys})
    group.flush()
    expected = {
        name: sum(((rank + step) % 2 == (name == "first")) for rank in range(world.size) for step in range(3))
        for name in tables
    }
    for name, table in tables.items():
        keys = table.keys().numpy()
        assert np.array_equal(table.shard.weight[:, 0], np.where(keys < 2, -3 * world.size, -expected[name]))
    group.close()


def test_a_gradient_that_is_not_finite_is_refused_before_any_table_sends(placed):
    group = TableGroup({name: make(placed, name) for name in ("users", "items")})
    keys = {name: torch.arange(5) for name in group}
    good = {name: torch.ones(5, table.dim) for name, table in group.items()}
    group.read(keys)
    with pytest.raises(NotFinite):
        group.write(keys, good | {"items": good["items"] * math.nan})
    group.write(keys, good)
    group.flush()
    for table in group.values():
        assert np.array_equal(table.shard.clock, table.keys().numpy() < 5)
    group.close()


@pytest.mark.parametrize("announces", [False, True])
def test_tables_share_the_messages_of_a_step(placed, announces):
    if placed.is_one_node:
        pytest.skip("takes two nodes")
    settings = {"exchange": "messages", "staleness": Staleness(3), **CACHED}
    group = TableGroup({name: make(placed, name, **settings) for name in SHAPES})
    (rounds,) = {table.client.channel.exchange for table in group.values()}
    steps = list(batches(placed.rank, 10))
    for i, ((keys, grads), (following, _)) in enumerate(zip(steps, steps[1:])):
        before = rounds.num_messages
        group.read(keys)
        if announces:
            group.prefetch(following)
        group.write(keys, grads)
        is_first = announces and i == 0  # was not announced
        num = (1 + is_first) * (len(rounds.rails.servers) + len(rounds.rails.clients))
        assert rounds.num_messages == before + num
    group.close()


@pytest.mark.parametrize(
    "verb, settings",
    [
        ("read", {"staleness": Staleness(0)}),
        ("read", {"staleness": Staleness(3)}),
        ("prefetch", {"staleness": Staleness(3), **CACHED}),
    ],
)
def test_a_group_whose_table_is_in_another_one_since_is_refused_and_the_other_goes_on(placed, verb, settings):
    """Also with the keys that were refused."""
    if placed.is_one_node:
        pytest.skip("takes two nodes")
    tables = {name: make(placed, name, exchange="messages", **settings) for name in SHAPES}
    before = TableGroup({name: tables[name] for name in ("users", "items")})
    since = TableGroup({name: tables[name] for name in ("words", "items")})
    keys = {name: torch.arange(3) for name in SHAPES}
    with pytest.raises(RuntimeError, match="was put into another group since"):
        getattr(before, verb)(keys)
    for _ in range(2):
        rows = since.read(keys)
        since.write(keys, rows)
    since.flush()
    for table in tables.values():
        table.close()


@pytest.mark.parametrize("exchange", ["windows", "messages"])
def test_exact_and_stale_tables_take_in_each_others_gradients(placed, exchange):
    """One rank waits for room at another, which waits for its reply about the other table."""
    settings = {"init_std": 0.0, "inbox_bytes": 1}
    exact = EmbeddingTable(placed, 200, 8, RowOptimizer("sgd", 1.0), name="exact", **settings)
    stale = EmbeddingTable(
        placed, 200, 8, RowOptimizer("sgd", 1.0), name="stale", staleness=Staleness(1), exchange=exchange, **settings
    )
    group = TableGroup({"stale": stale, "exact": exact})
    for step in range(4):
        num = 200 if (placed.rank + step) % 2 else 2
        keys = {"stale": torch.arange(202 - num), "exact": torch.arange(num)}
        group.read(keys)
        group.write(keys, {name: torch.ones(len(keys[name]), 8) for name in keys})
    group.flush()
    for table in group.values():
        assert np.all(table.shard.weight[table.keys().numpy() < 2] == -4 * placed.size)
    group.close()


@pytest.mark.parametrize("exchange", ["windows", "messages"])
def test_tables_may_be_closed_with_a_write_that_is_not_settled(placed, exchange):
    tables = [make(placed, name, exchange=exchange, inbox_bytes=1) for name in ("users", "items")]
    for table in tables:
        keys = torch.arange(table.num_rows if placed.rank % 2 else 2)
        table.read(keys)
        table.write(keys, torch.ones(len(keys), table.dim))
    for table in tables:
        table.close()


@pytest.mark.parametrize("exchange", ["windows", "messages"])
def test_a_table_of_a_group_may_be_closed_before_the_others(placed, exchange):
    """Also with a write that is not settled: what carries the messages of both lets the first one's memory go."""
    tables = {name: make(placed, name, exchange=exchange, inbox_bytes=1) for name in ("users", "items")}
    group = TableGroup(tables)
    keys = {name: torch.arange(table.num_rows if placed.rank % 2 else 2) for name, table in tables.items()}
    rows = group.read(keys)
    group.write(keys, {name: torch.ones_like(found) for name, found in rows.items()})
    tables.pop("users").close()
    (rest,) = tables.values()
    before = rest.read(keys["items"])
    rest.write(keys["items"], torch.ones_like(before))
    rest.flush()
    assert not torch.equal(rest.peek(keys["items"]), before)
    rest.close()


def test_tables_of_two_worlds_make_no_group(world):
    tables = [make(one, "items") for one in (world, World(world.comm))]
    with pytest.raises(UserError, match="made with one World"):
        TableGroup(dict(enumerate(tables)))
    for table in tables:
        table.close()
