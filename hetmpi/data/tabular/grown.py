"""The encoder of an earlier run for new data: known values keep their keys, new ones of a vocabulary get the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from hetmpi.data.features import NO_KEY
from hetmpi.data.files import DataError
from hetmpi.data.tabular import vocabulary
from hetmpi.data.tabular.encoder import INTEGERS, VOCABULARY, Encoder, IdEncoder
from hetmpi.data.tabular.encodings import check_integers
from hetmpi.data.tabular.reading import Reading
from hetmpi.data.tabular.rules import Column, Rule, plain, texts_of
from hetmpi.errors import one_line
from hetmpi.open_rows import places_of

# Reading rules that both runs share, and their settings.
SAME = {"labels": "label", "label_kind": "label_kind", "positive": "positive", "sample_weight": "sample_weight",
        "missing": "missing"}  # fmt: skip


class Growth:
    """The encoder of new data, from that of the run before.

    notes  column -> remark for its line at the start"""

    def __init__(self, before: Encoder, folder: str, manifest: dict):
        """folder, manifest: of the prepared new data."""
        self._before, self._folder, self._manifest = before, folder, manifest
        self.notes: dict[str, str] = {}
        for column in before.columns:
            if column.name in before.coders and before.coders[column.name].mode == INTEGERS:
                check_integers(folder, manifest, before.columns, column)

    def vocabularies(self) -> list[list[int]]:
        """The prepared columns of each vocabulary."""
        return [self._sharing(name) for name, coder in self._before.coders.items() if coder.mode == VOCABULARY]

    def encoder(self, reading: Reading, classes: Sequence[str] = ()) -> Encoder:
        """classes: of the new label. REQUIRES: the vocabularies are counted. Raises DataError for new classes."""
        before = self._before
        new = [name for name in classes if name not in before.classes]
        if new:
            raise DataError(
                f"init_from: the label has the classes {one_line(', '.join(new))}, which the run before had not: leave "
                "out their rows, or start a run of its own"
            )
        coders = {name: self._grown(name, coder) for name, coder in before.coders.items()}
        return Encoder(reading, before.columns, coders, before.moments, before.scalings, before.classes)

    def _sharing(self, name: str) -> list[int]:
        return [i for i, column in enumerate(self._before.columns) if name in (column.share, column.name)]

    def _grown(self, name: str, coder: IdEncoder) -> IdEncoder:
        if coder.mode != VOCABULARY:
            return coder
        [column] = [column for column in self._before.columns if column.name == name]
        found = vocabulary.load(self._folder, self._manifest, self._sharing(name), column.min_count)
        new = found[~places_of(found, coder.values)[1]]
        if not len(new):
            return coder
        self.notes[name] = f"{len(new):,} of {len(found):,} values are new, with rows of their own"
        values, keys = np.concatenate([coder.values, new]), np.concatenate([
            coder.keys_of_values, np.arange(coder.rows, coder.rows + len(new))
        ])  # fmt: skip
        order = np.argsort(values)
        return replace(coder, rows=coder.rows + len(new), values=values[order], of_values=keys[order])


def earlier_keys(before: Encoder, now: Encoder) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Table -> keys (n,) int64 of its rows now -> the keys of the same values in the run before, NO_KEY for new values.
    REQUIRES: `now` is `before` or has grown from it."""
    found = {}
    for name in (name for name, table in now.tables.items() if table.open is None):
        firsts = {feature.first: feature for feature in now.features if feature.table == name}
        earlier = {feature.name: feature for feature in before.features if feature.table == name}
        begins = np.array(sorted(firsts))
        old = [earlier[firsts[begin].name] for begin in begins.tolist()]
        found[name] = Moved(begins, np.array([one.first for one in old]), np.array([one.rows for one in old]))
    return found


class Moved:
    """The keys of rows before, of several columns. begins (F,), ascending: first keys now. firsts, rows (F,): first
    keys and numbers of rows before."""

    def __init__(self, begins: np.ndarray, firsts: np.ndarray, rows: np.ndarray):
        self._begins, self._firsts, self._rows = begins, firsts, rows

    def __call__(self, keys: np.ndarray) -> np.ndarray:
        place = np.searchsorted(self._begins, keys, side="right") - 1
        number = keys - self._begins[place]
        return np.where(number < self._rows[place], number + self._firsts[place], NO_KEY)


def check_rules(before: Encoder, reading: Reading, rules: Sequence[Rule]) -> None:
    """Raises DataError for labels and rules of the new run that are not those of the run before."""
    for key, setting in SAME.items():
        had, has = getattr(before.reading, key), getattr(reading, key)
        if had != has:
            had, has = (one_line(", ".join(one) if isinstance(one, tuple) else str(one)) for one in (had, has))
            raise DataError(f"init_from: data.{setting} was {had} in the run before, now it is {has}: give the same")
    for column in before.columns:
        rule = next((rule for rule in rules if rule.matches(column.vector or column.name)), None)
        for key, value in rule.settings.items() if rule else ():
            had = setting_of(column, key)
            if (texts_of(key, value) if key == "missing" else plain(value)) != had:
                raise DataError(
                    f"init_from: column {one_line(column.name)} had {key}: {one_line(had)} in the run before, "
                    f"data.columns has {one_line(value)}: give the same rules, or none"
                )


def setting_of(column: Column, key: str):
    """The value of a rule's key that makes such a column."""
    if key == "weights":
        return column.weights or column.weight_column
    had = getattr(column, key)
    return had if key == "missing" else plain(had)
