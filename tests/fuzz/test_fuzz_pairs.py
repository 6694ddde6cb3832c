"""The same pairs of queries and items told in two ways give equal keys and an equal catalogue, or one is refused."""

from fuzz import fuzz
from told_otherwise import log_of, source_of, told

from hetmpi.models.sasrec import SASRec
from hetmpi.models.two_tower import TwoTower
from hetmpi.tasks.catalogue import Counting, histories_of
from hetmpi.tasks.pair_columns import PairColumns, names_of


def test_the_same_pairs_told_otherwise_have_the_same_keys_and_catalogue(tmp_path):
    fuzz(__file__, tmp_path)


def case(rng, folder):
    rows, has_history = log_of(rng, has_label=False), rng.random() < 0.6
    rule = {"share": "item", "pool": "none" if has_history else rng.choice(["sum", "mean"])}
    if rng.random() < 0.5:
        rule["max_len"] = rng.randrange(1, 5)
    max_len, found = rng.randrange(1, 6), []
    for name in "ab":
        own = told(rng, rows, folder / name, rule)
        source = source_of(rng, folder / name, own, label_kind="none")
        arguments = {"dim": 4, **names_of(source.features, source.dense_names)}
        if has_history:
            model = SASRec(**arguments, item=["item"], history=["viewed"], max_len=max_len, num_blocks=1)
        else:
            model = TwoTower(**arguments, item=["item"], query=["user", "viewed"], hidden=[4], temperature=0.1)
        columns = PairColumns(model, source.features, source.tables, source.dense_names)
        parts = [source.train(0, source.num_train), source.valid(0, source.num_valid)]
        found.append(([sides_of(columns, source, part) for part in parts], counted(columns, source, parts[0])))
    assert found[0] == found[1], f"{found[0]}\n{found[1]}"
    for item in {item for item, *_ in found[0][0][0].values()}:
        assert found[0][1][item][0] == sum(other == item for other, *_ in found[0][0][0].values()), item


def sides_of(columns, source, samples):
    """Row -> the keys of its item, and those of its query."""
    queries, items = columns.queries_of(samples), columns.items.take(samples)
    rows = samples.dense[:, source.dense_names.index("row")].astype(int).tolist()
    return {
        row: (int(items.ids[i, 0]), queries.ids[i].tolist(),
              [bag.values[bag.offsets[i] : bag.offsets[i + 1]].tolist() for bag in queries.bags])
        for i, row in enumerate(rows)
    }  # fmt: skip


def counted(columns, source, samples):
    """Key of an item -> its training rows, and whether it stands in a history of one."""
    counting = Counting(columns.items, histories_of(source.features, columns.items))
    counting.add(samples, 0)
    found = zip(counting.counts.tolist(), counting.in_history.tolist())
    return {columns.item.first + i: one for i, one in enumerate(found) if any(one)}
