"""The same histories told in two ways give equal keys in their order, or one of them is refused."""

from fuzz import fuzz
from told_otherwise import log_of, source_of, told

from hetmpi.data.tabular import Reader


def test_the_same_sequences_told_otherwise_have_the_same_keys(tmp_path):
    fuzz(__file__, tmp_path)


def case(rng, folder):
    rows, rule = log_of(rng, has_label=True), {"pool": rng.choice(["none", "none", "mean"]), "share": "item"}
    if rng.random() < 0.3:
        rule = {"pool": rule["pool"], **rng.choice([{"rows": 7}, {"min_count": 2}, {}])}
    if rng.random() < 0.7:
        rule |= {"max_len": rng.randrange(1, 5), **rng.choice([{}, {"keep": "first"}, {"keep": "last"}])}
    found = []
    for name in "ab":
        own = told(rng, rows, folder / name, rule)
        source = source_of(rng, folder / name, own, label="click")
        parts = [source.train(0, source.num_train), source.valid(0, source.num_valid)]
        found.append([keys_of(source, part) for part in parts])
        reader = Reader(str(folder / name), source.encoder.reading)
        read = {}
        for block in (block for unit in reader.units for block in reader.blocks(unit)):
            read |= keys_of(source, source.encoder.samples(block), has_label=False)
        whole = found[-1][0] | found[-1][1]
        assert {row: own[:-1] for row, own in whole.items()} == read, "files to predict have other keys"
    assert found[0] == found[1], f"{found[0]}\n{found[1]}"
    check(rows, rule, found[0], source)


def keys_of(source, samples, has_label=True):
    """Row -> the keys of item and user, those of the history, and the label."""
    [bag], names = samples.bags, [feature.name for feature in source.features if feature.pool is None]
    item, user = (samples.ids[:, names.index(name)].tolist() for name in ("item", "user"))
    rows = samples.dense[:, source.dense_names.index("row")].astype(int).tolist()
    viewed = [bag.values[begin:end].tolist() for begin, end in zip(bag.offsets, bag.offsets[1:])]
    labels = [[label] if has_label else [] for label in samples.label.tolist()]
    return {row: (item[i], user[i], viewed[i], *labels[i]) for i, row in enumerate(rows)}


def check(rows, rule, found, source):
    """The lengths of the histories, and which of their ends remains where the rows of the items are theirs."""
    most, is_last = rule.get("max_len"), rule.get("keep", "last" if rule["pool"] == "none" else "first") == "last"
    keys = {}
    for row, (item, _, viewed, label) in (found[0] | found[1]).items():
        told_row = rows[row]
        values = [value for value in told_row["viewed"] if value is not None]
        values = values if most is None else values[-most:] if is_last else values[:most]
        assert len(viewed) == len(values) and label == told_row["click"]
        for value, key in zip(values, viewed):
            keys.setdefault(value, set()).add(key)
        if rule.get("share"):
            keys.setdefault(told_row["item"], set()).add(item)
    assert all(len(of_value) == 1 for of_value in keys.values()), keys
