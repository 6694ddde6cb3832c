"""Tables without a fixed vocabulary: admissions, keys, evictions and first values are those of a plain program that
sees all batches, at any number of ranks."""

import numpy as np
import pytest
import torch
from caches import CacheSettings

from hetmpi import _C
from hetmpi.checkpoint.checkpoints import Checkpoints, Position
from hetmpi.errors import UserError
from hetmpi.open_rows import FIRST_KEY, SHARED_KEY, OpenRows
from hetmpi.owner.store import table_seed
from hetmpi.table.bag import EmbeddingBag
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.staleness import Staleness
from hetmpi.table.table import EmbeddingTable
from hetmpi.table.vocabularies import Vocabularies
from hetmpi.table.vocabulary import Vocabulary

pytestmark = pytest.mark.mpi
DIM, EVERY = 5, 4
RULES = {
    "lfu": OpenRows(12, 2), "lru": OpenRows(12, 1, evict="lru"), "expiring": OpenRows(40, 2, expire_steps=5),
    "few rows": OpenRows(1, 1), "many rows": OpenRows(1000, 3),
}  # fmt: skip


class Plain:
    """The ids of one table: id -> [key or -1, count, last step]."""

    def __init__(self, rules):
        self.rules, self.ids, self.free, self.next_key = rules, {}, [], FIRST_KEY

    def keys_of(self, ids):
        return [max(SHARED_KEY, self.ids.get(i, [-1])[0]) for i in ids]

    def see(self, counts, step):
        ready = []
        for one, count in counts.items():
            entry = self.ids.setdefault(one, [-1, 0, 0])
            was_ready, entry[1], entry[2] = entry[1] >= self.rules.min_count, entry[1] + count, step
            if entry[0] < 0 and not was_ready and entry[1] >= self.rules.min_count:
                ready.append(one)
        if len(ready) <= len(self.free) + self.rules.num_rows - self.next_key:
            self.admit(ready)

    def admit(self, ids):
        for one in sorted(ids):
            if self.free:
                self.ids[one][0] = self.free.pop(0)
            else:
                self.ids[one][0], self.next_key = self.next_key, self.next_key + 1

    def maintain(self, step):
        rules, by = self.rules, 2 if self.rules.evict == "lru" else 1
        old = [i for i, e in self.ids.items() if rules.expire_steps and e[2] < step - rules.expire_steps]
        released = [self.ids.pop(i)[0] for i in old]
        self.free = sorted(self.free + [key for key in released if key >= 0])
        ready = [i for i, e in self.ids.items() if e[0] < 0 and e[1] >= rules.min_count]
        ready.sort(key=lambda i: (-self.ids[i][by], i))
        room = len(self.free) + rules.num_rows - self.next_key
        wins, left = ready[:room], ready[room:]
        worst = sorted((i for i, e in self.ids.items() if e[0] >= 0), key=lambda i: (self.ids[i][by], i))
        for better, loser in zip(left, worst):
            if self.ids[better][by] <= self.ids[loser][by]:
                break
            wins.append(better)
            self.free.append(self.ids.pop(loser)[0])
        self.free.sort()
        for one in list(self.ids):
            self.ids[one][1] //= 2
            if self.ids[one][0] < 0 and self.ids[one][1] == 0 and one not in wins:
                del self.ids[one]
        self.admit(wins)

    def entries(self):
        found = [[i, *e] for i, e in sorted(self.ids.items())]
        return np.array(found, np.int64).reshape(-1, 4)


def batch_of(name, step):
    """Ids of all ranks together, few of them frequent; some far apart, and some negative."""
    random = np.random.default_rng((len(name), step))
    ids = np.minimum(random.zipf(1.3, 60), 10**6) + step // 6 * 5
    return np.where(ids % 7 == 0, -(ids << 40), ids).astype(np.int64)


def share_of(world, ids):
    part = ids[len(ids) * world.rank // world.size : len(ids) * (world.rank + 1) // world.size]
    found, places = _C.unique(np.ascontiguousarray(part))
    return found, np.bincount(places, minlength=len(found))


def opened(world, rules, bound, cache=0):
    staleness = Staleness(bound)
    settings = CacheSettings(capacity_rows=cache if bound != 0 else 0, admit="all")
    tables = {
        name: EmbeddingTable(
            world,
            rows.num_rows,
            DIM,
            RowOptimizer("adagrad", 0.1),
            name=name,
            staleness=staleness,
            cache=settings,
            init_std=0.5,
            first_rows=FIRST_KEY,
        )  # fmt: skip
        for name, rows in rules.items()
    }
    found = {name: Vocabulary(tables[name], rows, 0, 0.5, EVERY) for name, rows in rules.items()}
    return tables, Vocabularies(world, found, EVERY)


def closed(tables):
    for table in tables.values():
        table.close()


def first_value(name, number):
    out = np.empty((1, DIM), np.float32)
    _C.init_rows(out, np.array([number]), table_seed(0, name), 0.5)
    return out[0]


@pytest.mark.parametrize("bound", [0, 2, None])
def test_ids_have_the_rows_of_a_plain_program(placed, bound):
    world = placed
    tables, vocabularies = opened(world, RULES, bound, cache=30)
    plain = {name: Plain(rules) for name, rules in RULES.items()}
    pushed = {name: set() for name in RULES}  # keys that were written since their id got them
    for step in range(26):
        whole = {name: batch_of(name, step) for name in RULES}
        mine = {name: share_of(world, ids) for name, ids in whole.items()}
        for name, ids in whole.items():
            plain[name].see(dict(zip(*(a.tolist() for a in np.unique(ids, return_counts=True)))), step)
        keys = vocabularies.translate(*({name: pair[i] for name, pair in mine.items()} for i in (0, 1)), step)
        for name, found in keys.items():
            assert found.tolist() == plain[name].keys_of(mine[name][0].tolist()), (name, step)
            unique = torch.unique(torch.from_numpy(found))
            rows = tables[name].read(unique)
            of_id = {key: one for one, (key, *_) in plain[name].ids.items() if key >= 0}
            for key, row in zip(unique.tolist(), rows):
                if key != SHARED_KEY and key not in pushed[name]:
                    assert np.array_equal(row.numpy(), first_value(name, of_id[key])), (name, step, key)
            tables[name].write(unique, torch.full((len(unique), DIM), 0.1))
            pushed[name] |= set(plain[name].keys_of(set(whole[name].tolist()))) - {SHARED_KEY}
        if vocabularies.is_due(step + 1):
            had = {name: {i: e[0] for i, e in plain[name].ids.items()} for name in RULES}
            for table in tables.values():
                table.flush()
            vocabularies.maintain(step + 1)
            for name, one in plain.items():
                one.maintain(step + 1)
                pushed[name] &= {e[0] for i, e in one.ids.items() if had[name].get(i) == e[0]}
            for name, mine_of in vocabularies.of_tables.items():
                entries = mine_of.state()
                if entries is not None:
                    entries[:, 2] = vocabularies.aged(entries, step + 1)
                    assert np.array_equal(entries, plain[name].entries()), (name, step)
    assert vocabularies.of_tables["lfu"].numbers.evicted > 0
    assert vocabularies.of_tables["expiring"].numbers.expired > 0
    world.meet("for a test")
    closed(tables)


def test_look_up_counts_nothing_and_knows_what_others_have_admitted(world):
    tables, vocabularies = opened(world, {"t": OpenRows(100)}, 0)
    mine = np.array([world.rank, 50], np.int64)
    first = vocabularies.translate({"t": mine}, {"t": np.array([1, 1])}, 0)["t"]
    before = vocabularies.of_tables["t"].state()
    everyone = np.array([*range(world.size), 50, 7777], np.int64)
    found = vocabularies.look_up({"t": everyone})["t"].tolist()
    assert found == [*range(1, world.size + 1), world.size + 1, SHARED_KEY] and first[0] == world.rank + 1
    after = vocabularies.of_tables["t"].state()
    assert before is None or np.array_equal(before, after)
    closed(tables)


def test_a_full_table_that_evicts_nothing_ends_with_one_message_on_all_ranks(world):
    tables, vocabularies = opened(world, {"t": OpenRows(3, evict="never")}, 0)
    ids = np.arange(5, dtype=np.int64)
    with pytest.raises(UserError, match="table t is full: in step 3 more ids need a row than 3, which are free"):
        vocabularies.translate({"t": ids}, {"t": np.ones(5, np.int64)}, 2)
    closed(tables)


def test_a_state_goes_on_with_any_number_of_ranks(world):
    rules = {"t": OpenRows(6)}
    ends = []
    for resumes in (False, True):
        tables, vocabularies = opened(world, rules, 0)
        for step in range(12):
            if step == 6 and resumes:
                state = world.comm.bcast(vocabularies.of_tables["t"].state())
                closed(tables)
                tables, vocabularies = opened(world, rules, 0)
                vocabularies.of_tables["t"].load(state)
            ids, counts = share_of(world, batch_of("t", step))
            keys = vocabularies.translate({"t": ids}, {"t": counts}, step)["t"]
            if vocabularies.is_due(step + 1):
                vocabularies.maintain(step + 1)
        ends.append((keys.tolist(), vocabularies.of_tables["t"].state()))
        closed(tables)
    (keys, whole), (again, resumed) = ends
    assert keys == again and (whole is None or np.array_equal(whole, resumed))


class TorchOfIds(torch.nn.Module):
    """torch's EmbeddingBag of the ids seen so far, with the first rows of an open one."""

    def __init__(self, ids, name, seed=0):
        super().__init__()
        rows = np.empty((len(ids), DIM), np.float32)
        _C.init_rows(rows, np.array(ids, np.int64), table_seed(seed, name), 1.0)
        self.place = {one: i for i, one in enumerate(ids)}
        self.bag = torch.nn.EmbeddingBag(len(ids), DIM, mode="sum")
        self.bag.weight.data = torch.from_numpy(rows)

    def forward(self, ids, padding):
        index = torch.tensor([[self.place[one] for one in row if one != padding] for row in ids.tolist()])
        return self.bag(index)


@pytest.mark.parametrize("bound", [0, 5])
def test_a_bag_of_open_ids_is_as_torchs(world, bound, tmp_path):
    padding, every = -1, 10**15
    ids = [i * every - 7 for i in range(1, 31)]
    bag = EmbeddingBag(
        40, DIM, mode="sum", vocabulary="open", padding_idx=padding, world=world, name="open ids",
        optimizer=RowOptimizer("sgd", 0.1), staleness=Staleness(bound),
    )  # fmt: skip
    theirs = TorchOfIds(ids, "open ids")
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    for step in range(8):
        optimizer.zero_grad()
        whole = torch.tensor(np.random.default_rng(step).choice(ids, (6, 4)))
        batch = torch.cat([whole, torch.full((6, 1), padding)], 1)
        mine = batch[6 * world.rank // world.size : 6 * (world.rank + 1) // world.size]
        (theirs(whole, padding).sin().sum() / world.size).backward()
        bag(mine).sin().sum().backward()
        world.comm.Barrier()  # all have read before one writes
        bag.step()
        optimizer.step()
        bag.flush()
    with torch.no_grad():
        unknown = torch.tensor([[12345, padding]])
        shared = bag(unknown)
        assert torch.equal(shared, bag(torch.tensor([[999]])))
        found = bag(torch.tensor(ids)[:, None])
    known = [i for i, one in enumerate(ids) if bag.vocabularies.look_up({"open ids": np.array([one])})["open ids"][0]]
    assert len(known) == 30
    assert torch.allclose(found, theirs.bag.weight, rtol=0, atol=1e-5)
    folder = world.comm.bcast(tmp_path)
    checkpoints = Checkpoints(world, folder)
    checkpoints.save(Position(8, 0), bag)
    checkpoints.wait()
    again = EmbeddingBag(40, DIM, mode="sum", vocabulary="open", padding_idx=padding, world=world, name="open ids",
                         optimizer=RowOptimizer("sgd", 0.1), staleness=Staleness(bound))  # fmt: skip
    checkpoints.load(folder / "step-00000008", again)
    with torch.no_grad():
        assert torch.equal(again(torch.tensor(ids)[:, None]), found)
    world.meet("for a test")
    again.table.close()
    bag.table.close()
