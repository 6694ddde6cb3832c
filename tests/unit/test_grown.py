"""A run that begins with another on new data (init_from): what the rules of both must share."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_tabular import quiet, source_of

from hetmpi.data.files import DataError
from hetmpi.data.tabular import Tabular

NUM = 60
ROWS = {
    "user": [f"u{i % 7}" if i % 5 else "?" for i in range(NUM)],
    "tags": [f"t{i % 3}|t{i % 4}" for i in range(NUM)],
    "w": [f"{i % 3}|{i % 2}" for i in range(NUM)],
    "v": [[i / 8, i / 16] for i in range(NUM)],
    "click": [i % 2 for i in range(NUM)],
}
RULES = [
    {"name": "user", "missing": ["?", "-"]}, {"name": "tags", "separator": "|", "weights": "w", "max_len": 4},
    {"name": "v", "transform": [1, 2.5]},
]  # fmt: skip


@pytest.fixture
def first(tmp_path):
    pq.write_table(pa.table(ROWS), tmp_path / "a.parquet")
    return source_of(tmp_path / "a.parquet", tmp_path / "cache", columns=RULES)


def begun_with(first, columns):
    """The same data in a run that begins with the first."""
    source = Tabular(first.path, 0, label="click", cache=first.cache, columns=columns)
    source.begin_with(first.encoder)
    source.prepare(0, 1, lambda: None, quiet)
    return source


@pytest.mark.parametrize("columns", [RULES, None], ids=["the same", "none"])
def test_the_same_rules_or_none_go_on_with_all_columns(first, columns):
    assert begun_with(first, columns).encoder.difference(first.encoder) is None


@pytest.mark.parametrize("number, key, value", [
    (0, "missing", ["?"]), (1, "weights", ":"), (1, "max_len", 3), (1, "kind", "drop"), (2, "transform", "log1p"),
])  # fmt: skip
def test_other_rules_are_refused(first, number, key, value):
    columns = [{**rule, key: value} if i == number else rule for i, rule in enumerate(RULES)]
    with pytest.raises(DataError, match=f"{key}: .* in the run before, data.columns has"):
        begun_with(first, columns)
