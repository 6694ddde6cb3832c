"""Encoder: prepared rows -> samples. It holds all that this needs, and how files are read, so that a saved encoder
encodes other files in the same way."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hetmpi.data.batch import NO_GROUP, Bag, Samples
from hetmpi.data.features import NO_KEY, Feature, FeatureRequest, ValueMap, arrange
from hetmpi.data.files import DataError
from hetmpi.data.tabular.convert import NO_INTEGER, hashes, integers, no_value
from hetmpi.data.tabular.reading import CLASSES, INTEGER, WEIGHT, Reading, label_fields
from hetmpi.data.tabular.rules import AUTO, ID, Column
from hetmpi.data.tabular.scaling import Scaling, standardized
from hetmpi.errors import UserError, one_line
from hetmpi.open_rows import SHARED_KEY, places_of

HASHED, VOCABULARY, INTEGERS, IDS = "hashed", "vocabulary", "integers", "ids"
MISSING_KEY, UNSEEN_KEY, FIRST_KEY = 0, 1, 2  # of a vocabulary


@dataclass(frozen=True)
class IdEncoder:
    """Values of an id column -> keys 0 <= key < rows.

    HASHED: value % rows. VOCABULARY: FIRST_KEY + position among `values`, sorted, or the key in `of_values` if it has
    grown (grown.py); MISSING_KEY, and UNSEEN_KEY for all others. INTEGERS: the value, and the last row for a missing
    one. IDS: the value, of a table without a fixed vocabulary; after training (Encoder.with_keys) the key of its row,
    the shared key 0 for ids without one."""

    mode: str
    rows: int
    seed: int = 0
    values: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    of_values: np.ndarray | None = None  # IDS after training, VOCABULARY that has grown: the keys of `values`

    def keys(self, values: np.ndarray, column: str) -> np.ndarray:
        """values (n,) int64 -> keys (n,) int64. Raises DataError for an integer without a row."""
        if self.mode == HASHED:
            return values % self.rows
        if self.mode == IDS:
            return values if self.of_values is None else self._of_ids(values)
        if self.mode == INTEGERS:
            if len(values) and values.max() >= self.rows - 1:
                place, rows = f"column {one_line(column)}", self.rows - 1
                raise DataError(f"{place}: {values.max()} has no row, data.columns has rows: {rows}")
            return np.where(values == NO_INTEGER, self.rows - 1, values)
        place, known = places_of(values, self.values)
        keys = np.where(values == no_value(self.seed), MISSING_KEY, UNSEEN_KEY)
        keys[known] = self.keys_of_values[place[known]]
        return keys

    @property
    def keys_of_values(self) -> np.ndarray:
        """Of a VOCABULARY: the keys of `values` (n,) int64."""
        return np.arange(FIRST_KEY, FIRST_KEY + len(self.values)) if self.of_values is None else self.of_values

    def has_values_of(self, other: IdEncoder) -> bool:
        """Whether the values are the same, with the same keys."""
        return np.array_equal(self.values, other.values) and np.array_equal(self.keys_of_values, other.keys_of_values)

    def _of_ids(self, ids: np.ndarray) -> np.ndarray:
        place, known = places_of(ids, self.values)
        keys = np.full(len(ids), SHARED_KEY)
        keys[known] = self.of_values[place[known]]
        return keys


class Encoder:
    """Prepared rows -> Samples.

    reading, columns   how files are read, and the columns in the file's order
    features, tables   as hetmpi.data.features.arrange
    dense_names        of the numbers
    classes            of the label, in the order of their numbers; () for other labels
    group              name of the feature of one value whose values are the groups of samples; None: they have none"""

    def __init__(
        self,
        reading: Reading,
        columns: list[Column],
        coders: Mapping[str, IdEncoder],
        moments: list[tuple[float, ...]],
        scalings: Mapping[str, Scaling],
        classes: Sequence[str] = (),
    ):
        """coders: of the id columns that share no other's rows. moments: number, mean and sum of squared differences of
        each column's training values, for the transform standardize. scalings: of the numbers with the transform
        auto."""
        self.reading, self.columns, self.moments = reading, columns, moments
        self.coders = dict(coders)
        self.scalings = {column.name: scalings[column.name] for column in columns if column.transform == AUTO}
        wanted = [self._wanted(column) for column in columns if column.kind == ID or column.is_buckets]
        self.features, self.tables = arrange(wanted)
        self.dense_names = [column.name for column in columns if column.kind != ID and not column.is_buckets]
        self._number = {column.name: i for i, column in enumerate(columns)}
        self.group: str | None = None
        self.classes = tuple(classes)

    def samples(self, table: pa.Table) -> Samples:
        """The samples of rows of Reading.schema(). Labels are (n,), zeros where the rows have none; of several
        labels (n, K), NaN where one is missing; numbers of classes, NaN for one that no training row has."""
        num = len(table)
        one = [feature for feature in self.features if feature.pool is None]
        ids = np.empty((num, len(one)), np.int64)
        for j, feature in enumerate(one):
            ids[:, j] = self._keys(self._values(table, feature.name), feature.name) + feature.first
        dense = np.empty((num, len(self.dense_names)), np.float32)
        for j, name in enumerate(self.dense_names):
            dense[:, j] = self._transformed(self._values(table, name), self._number[name])
        bags = tuple(self._bag(table, feature) for feature in self.features if feature.pool is not None)
        names = [name for name in label_fields(len(self.reading.labels)) if name in table.column_names]
        label = np.stack([self._label(table[name]) for name in names], 1) if names else np.zeros((num, 1), np.float32)
        label = label if len(names) > 1 else label[:, 0]
        weight = table[WEIGHT].to_numpy() if WEIGHT in table.column_names else None
        return Samples(ids, dense, np.ascontiguousarray(label), bags=bags, group=self._groups(table), weight=weight)

    def keyed(self, samples: Samples) -> Samples:
        """Samples with ids, made by this encoder before training, with the keys of these ids."""
        if all(coder.of_values is None for coder in self.coders.values()):
            return samples
        one = [feature for feature in self.features if feature.pool is None]
        several = [feature for feature in self.features if feature.pool is not None]
        ids = samples.ids.copy()
        for j, feature in enumerate(one):
            ids[:, j] = self._keyed(ids[:, j], feature.name)
        bags = tuple(replace(bag, values=self._keyed(bag.values, f.name)) for f, bag in zip(several, samples.bags))
        return replace(samples, ids=ids, bags=bags)

    @property
    def num_rows(self) -> int:
        """Of all tables."""
        return sum(table.num_rows for table in self.tables.values())

    def open_columns(self) -> dict[str, str]:
        """Column without a fixed vocabulary -> its table, of those that share no other's rows."""
        tables = {feature.name: feature.table for feature in self.features}
        return {name: tables[name] for name, coder in self.coders.items() if coder.mode == IDS}

    def ids_of(self, column: str, values: pa.Array) -> np.ndarray:
        """The ids (n,) int64 of values of a column without a fixed vocabulary."""
        stored = self.reading.columns[self._number[column]]
        return hashes(values, stored.seed, self.reading.missing_of(stored))

    def _keyed(self, ids: np.ndarray, name: str) -> np.ndarray:
        return self._keys(ids, name) if self.mode(name) == IDS else ids

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Everything, as arrays for np.savez."""
        state = {
            "reading": self.reading.to_json(),
            "columns": [asdict(column) for column in self.columns],
            "moments": self.moments,
            "scalings": self.scalings,
            "classes": self.classes,
            "coders": {name: [coder.mode, coder.rows, coder.seed] for name, coder in self.coders.items()},
        }
        names = list(self.coders)
        none = np.empty(0, np.int64)  # ids are saved with their table
        arrays = {f"values{i}": none if self.coders[n].mode == IDS else np.asarray(self.coders[n].values)
                  for i, n in enumerate(names)}  # fmt: skip
        grown = {i: self.coders[n].of_values for i, n in enumerate(names) if self.coders[n].mode == VOCABULARY}
        arrays |= {f"keys{i}": keys for i, keys in grown.items() if keys is not None}
        return {"encoder": np.frombuffer(json.dumps(state).encode(), np.uint8), **arrays}

    def with_keys(self, found: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Encoder:
        """After training of tables without a fixed vocabulary. found: table -> ids (n,) int64, ascending, and their
        keys (n,) int64."""
        table_of = {feature.name: feature.table for feature in self.features}
        coders = {
            name: replace(coder, values=found[table_of[name]][0], of_values=found[table_of[name]][1])
            if coder.mode == IDS
            else coder
            for name, coder in self.coders.items()
        }
        return Encoder(self.reading, self.columns, coders, self.moments, self.scalings, self.classes)

    @staticmethod
    def from_arrays(arrays: Mapping[str, np.ndarray]) -> Encoder:
        state = json.loads(np.asarray(arrays["encoder"]).tobytes())
        columns = [
            Column(**{**one, "transform": tuple_of(one["transform"]), "missing": tuple(one.get("missing", ()))})
            for one in state["columns"]
        ]
        coders = {
            name: IdEncoder(mode, rows, seed, np.asarray(arrays[f"values{i}"]), arrays.get(f"keys{i}"))
            for i, (name, (mode, rows, seed)) in enumerate(state["coders"].items())
        }
        scalings = {name: Scaling(*one) for name, one in state.get("scalings", {}).items()}
        reading, classes = Reading.from_json(state["reading"]), state.get("classes", [])
        return Encoder(reading, columns, coders, state["moments"], scalings, classes)

    def difference(self, other: Encoder) -> str | None:
        """The first difference that gives a value another key or number, in one sentence; None if there is none."""
        names, others = [[column.name for column in encoder.columns] for encoder in (self, other)]
        if names != others:
            return f"its columns were {', '.join(names)}, now they are {', '.join(others)}"
        if self.classes != other.classes:
            before, now = (one_line(", ".join(encoder.classes)) or "none" for encoder in (self, other))
            return f"its classes were {before}, now they are {now}"
        for column, theirs, moments, now in zip(self.columns, other.columns, self.moments, other.moments):
            coder, found = self.coders.get(column.name), other.coders.get(column.name)
            if column.transform == "standardize" and not np.allclose(moments, now):
                return f"the mean and deviation of column {one_line(column.name)} were others"
            if column.kind == theirs.kind != ID and column.transform != theirs.transform:
                return f"column {one_line(column.name)} had transform: {column.transform}, now {theirs.transform}"
            if replace(column, keep=theirs.keep) == theirs != column:
                return f"column {one_line(column.name)} had keep: {column.keep}, now {theirs.keep}"
            if column != theirs or (coder is None) != (found is None):
                return f"column {one_line(column.name)} had another rule"
            scaling, other_scaling = self.scalings.get(column.name), other.scalings.get(column.name)
            if scaling and not np.allclose(scaling, other_scaling):
                return f"column {one_line(column.name)} was {scaling}, now {other_scaling}"
            if coder is not None and (coder.mode, coder.rows, coder.seed) != (found.mode, found.rows, found.seed):
                return f"column {one_line(column.name)} had {coder.rows:,} rows, now {found.rows:,}"
            if coder is not None and coder.mode != IDS and not coder.has_values_of(found):
                return f"column {one_line(column.name)} had other values"
        return None

    def mode(self, name: str) -> str | None:
        """How values of a feature become keys: HASHED, VOCABULARY or INTEGERS, None for buckets."""
        return None if self.columns[self._number[name]].is_buckets else self._coder(name).mode

    def keys_of_none(self, name: str) -> list[int]:
        """Keys of a feature that stand for no value of its own: a missing one, and those not seen in training. Raises
        UserError for a column whose values may share a row, or have none yet."""
        if self.columns[self._number[name]].is_buckets:
            raise UserError(f"column {one_line(name)}: buckets of a number cannot identify what stands in a row")
        [feature], coder = [one for one in self.features if one.name == name], self._coder(name)
        if coder.mode == VOCABULARY:
            return [feature.first + MISSING_KEY, feature.first + UNSEEN_KEY]
        if coder.mode == INTEGERS:
            return [feature.first + coder.rows - 1]
        raise UserError(f"column {one_line(name)}: each of its values needs a row: rows: auto, or hash: false")

    def by_value(self) -> dict[str, ValueMap]:
        """Id column -> how table.init_from finds the rows of its values: none for values that were not seen in
        training. Ids of a column without a fixed vocabulary have no rows yet."""
        return {
            feature.name: ValueMap(
                feature.table, partial(self._places, feature), self._coder(feature.name).mode == HASHED
            )
            for feature in self.features
            if self.mode(feature.name) not in (None, IDS)
        }

    def _places(self, feature: Feature, values: pa.Array) -> np.ndarray:
        """Values (n,) of an id column -> keys (n,) int64, NO_KEY for values without a row. Raises DataError."""
        stored, coder = self.reading.columns[self._number[feature.name]], self._coder(feature.name)
        try:
            if coder.mode != INTEGERS:
                found = coder.keys(hashes(values, stored.seed, self.reading.missing_of(stored)), feature.name)
                return np.where((found == UNSEEN_KEY) & (coder.mode == VOCABULARY), NO_KEY, found + feature.first)
            found, bad = integers(values, self.reading.missing_of(stored))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(f"it holds {values.type}, texts or integers were expected") from error
        if bad is not None:
            raise DataError(f"integers of at least 0 were expected, got {values[int(np.flatnonzero(bad)[0])]}")
        return coder.keys(found, feature.name) + feature.first

    def _coder(self, name: str) -> IdEncoder:
        """That of an id column."""
        return self.coders[self.columns[self._number[name]].share or name]

    def _wanted(self, column: Column) -> FeatureRequest:
        own = {"dim": column.dim, "optim": dict(column.optim), "cache": dict(column.cache), "open": column.open}
        if column.is_buckets:
            return FeatureRequest(column.name, len(column.transform) + 2, **own)
        if column.share is not None:
            rows, share = self.coders[column.share].rows, column.share
            return FeatureRequest(column.name, rows, column.pool, share, is_weighted=column.is_weighted)
        rows = self.coders[column.name].rows
        return FeatureRequest(column.name, rows, column.pool, is_weighted=column.is_weighted, **own)

    def _label(self, column: pa.ChunkedArray) -> np.ndarray:
        """(n,) float32."""
        if self.reading.label_kind != CLASSES:
            return column.to_numpy()
        found = pc.index_in(column, value_set=pa.array(self.classes, pa.string()))
        return found.cast(pa.float32()).to_numpy()

    def _groups(self, table: pa.Table) -> np.ndarray | None:
        """Of each row the value of the column `group`, not its key, which others may share; of buckets the bucket."""
        if self.group is None:
            return None
        number, values = self._number[self.group], self._values(table, self.group)
        stored = self.reading.columns[number]
        if self.columns[number].is_buckets:
            return np.where(np.isnan(values), NO_GROUP, self._keys(values, self.group))
        return np.where(values == (NO_INTEGER if stored.as_ == INTEGER else no_value(stored.seed)), NO_GROUP, values)

    def _values(self, table: pa.Table, name: str) -> np.ndarray:
        return table[f"c{self._number[name]}"].to_numpy()

    def _keys(self, values: np.ndarray, name: str) -> np.ndarray:
        column = self.columns[self._number[name]]
        if column.is_buckets:
            edges = np.asarray(column.transform, np.float32)  # as the values, so that an equal one is not below
            return np.where(np.isnan(values), len(edges) + 1, np.searchsorted(edges, values, side="right"))
        return self._coder(name).keys(values, name)

    def _bag(self, table: pa.Table, feature) -> Bag:
        array = table[f"c{self._number[feature.name]}"].combine_chunks()
        offsets = array.offsets.to_numpy().astype(np.int64)
        values = array.values.to_numpy()[offsets[0] : offsets[-1]]
        weights = None
        if feature.is_weighted:
            found = table[f"w{self._number[feature.name]}"].combine_chunks()
            weights = found.values.to_numpy()[offsets[0] : offsets[-1]]
        return Bag(self._keys(values, feature.name) + feature.first, offsets - offsets[0], weights)

    def _transformed(self, values: np.ndarray, number: int) -> np.ndarray:
        transform = self.columns[number].transform
        if transform == AUTO:
            values = self.scalings[self.columns[number].name](values)
        elif transform == "log1p":
            values = np.log1p(np.maximum(values, 0, dtype=np.float64)).astype(np.float32)
        elif transform == "standardize":
            num, mean, squares = self.moments[number]
            deviation = np.sqrt(squares / num) if num else 0.0
            values = standardized(values.astype(np.float64), mean, deviation or 1.0)
        return np.nan_to_num(values, nan=0.0)


def tuple_of(transform):
    return tuple(transform) if isinstance(transform, list) else transform
