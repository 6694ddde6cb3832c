"""hetmpi inspect of random files: a yaml with the file's names, or one line."""

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
from fuzz import fuzz
from mutations import damage, odd_table
from omegaconf import OmegaConf

from hetmpi.inspect import inspected

KEYS = {"_target_", "seed", "path", "label", "label_kind", "positive", "valid", "delimiter", "names", "columns"}


def test_inspect_of_any_file_is_a_yaml_or_one_line(tmp_path):
    fuzz(__file__, tmp_path)


def is_flat(kind):
    return not pa.types.is_nested(kind) and not pa.types.is_binary(kind) and not pa.types.is_fixed_size_binary(kind)


def case(rng, folder):
    table = odd_table(rng, odd_names=rng.random() < 0.8)
    path = folder / rng.choice(["a.parquet", "a.csv"])
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        flat = [i for i, column in enumerate(table.columns) if is_flat(column.type)]
        csv.write_csv(table.select(flat), path)
    is_damaged = rng.random() < 0.4
    if is_damaged:
        damage(rng, path, rng.randrange(1, 4))
    text = inspected(str(path))
    assert all(line.isprintable() for line in text.split("\n"))
    found = OmegaConf.to_container(OmegaConf.create(text.replace("${seed}\n", "0\n", 1)), resolve=True)
    assert set(found) <= KEYS and found["seed"] == 0 and found["path"] == str(path)
    if path.suffix == ".parquet" and not is_damaged:
        names = [rule["name"].replace("[?]", "?").replace("[*]", "*") for rule in found["columns"] or []]
        assert sorted([*names, found["label"]]) == sorted(table.column_names)
