"""Categorical features of a source, and the tables that hold their rows.

A source has one table with F features of one value each, or it describes its features (arrange): features of several
values, several tables, and tables with their own width, optimizer or cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hetmpi.layers import WEIGHTED
from hetmpi.open_rows import OpenRows

TABLE = "table"  # name of the table with the model's width and the run's settings
SEQUENCE = "none"  # values that are not pooled
POOLS = ("sum", "mean", SEQUENCE)
NO_KEY = -1  # of a value without a row


@dataclass(frozen=True)
class Feature:
    """A categorical feature. Its keys are first <= key < first + rows of `table`; of a table without a fixed
    vocabulary samples have ids, any int64.

    pool  None: one value per sample; "sum" or "mean" of the rows of its values, zeros for a sample without values;
          SEQUENCE: the model reads the rows of its values in their order
    is_weighted  whether each value has a weight, by which its row is multiplied before it is pooled"""

    name: str
    table: str
    first: int
    rows: int
    pool: str | None = None
    is_weighted: bool = False


@dataclass(frozen=True)
class FeatureTable:
    """A table of a source.

    field_rows    rows of each range of keys that one feature, or several that share rows, use
    dim           numbers per row; None: the width that the model reads
    optim, cache  settings that replace those of `optim` and `table.cache` for this table
    open          of a table without a fixed vocabulary"""

    field_rows: tuple[int, ...]
    dim: int | None = None
    optim: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    open: OpenRows | None = None

    @property
    def num_rows(self) -> int:
        return sum(self.field_rows)


@dataclass(frozen=True)
class FeatureRequest:
    """A categorical feature before its rows have a place.

    share  name of the feature whose rows it uses; rows, dim, optim and cache are then those of that feature"""

    name: str
    rows: int
    pool: str | None = None
    share: str | None = None
    dim: int | None = None
    optim: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    open: OpenRows | None = None
    is_weighted: bool = False


class ValueMap(NamedTuple):
    """How the values of a column become keys of a table.

    keys     Arrow array (n,) of values -> (n,) int64, NO_KEY for values without a row; raises UserError for values that
             the column cannot have
    shares   whether several values may have one row: then the first value in the files gives it"""

    table: str
    keys: Callable
    shares: bool = False


def num_fields_of(features: Sequence[Feature]) -> int:
    """Number of the features of which a model reads one row per sample: those of one value, and the pooled ones."""
    return sum(feature.pool != SEQUENCE for feature in features)


def pools_of(features: Sequence[Feature]) -> list[str | None]:
    """Of the features of several values, as for hetmpi.layers.FeatureRows."""
    several = [feature for feature in features if feature.pool is not None]
    return [
        None if one.pool == SEQUENCE else f"{WEIGHTED}{one.pool}" if one.is_weighted else one.pool for one in several
    ]


def arrange(wanted: Sequence[FeatureRequest]) -> tuple[list[Feature], dict[str, FeatureTable]]:
    """Features with a place in a table, those of one value first, otherwise in the order given; and the tables by name.
    Features of equal dim, optim and cache share a table; one without a fixed vocabulary has its own.

    REQUIRES: names are unique, and `share` names a feature that shares no other's rows."""
    kinds: list[tuple] = []
    rows: dict[str, list[int]] = {}
    place: dict[str, tuple[str, int, int]] = {}
    own = [(one, (one.dim, dict(one.optim), dict(one.cache))) for one in wanted if one.share is None and not one.open]
    for _, kind in own:
        if kind not in kinds:
            kinds.append(kind)
    for one, kind in own:
        table = table_name(kinds, kind)
        of_table = rows.setdefault(table, [])
        place[one.name] = table, sum(of_table), one.rows
        of_table.append(one.rows)
    tables = {table_name(kinds, kind): FeatureTable(tuple(rows[table_name(kinds, kind)]), *kind) for kind in kinds}
    for number, one in enumerate((one for one in wanted if one.open), 1):
        table = TABLE if sum(other.share is None for other in wanted) == 1 else f"open{number}"
        place[one.name] = table, 0, one.rows
        tables[table] = FeatureTable((one.rows,), one.dim, one.optim, one.cache, one.open)
    ordered = sorted(wanted, key=lambda one: one.pool is not None)
    features = [Feature(one.name, *place[one.share or one.name], one.pool, one.is_weighted) for one in ordered]
    return features, tables


def table_name(kinds: list[tuple], kind: tuple) -> str:
    """TABLE for a single table, and for features without settings of their own; otherwise the width, and a number if
    others have it too. REQUIRES: all kinds are known."""
    dim, optim, cache = kind
    if len(kinds) == 1 or dim is None and not optim and not cache:
        return TABLE
    name = TABLE if dim is None else f"dim{dim}"
    number = sum(other[0] == dim for other in kinds[: kinds.index(kind)])
    return f"{name}-{number + 1}" if number or dim is None else name
