"""How files are read: the reading rules, which with a file determine its prepared rows; and rows that are read."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import pyarrow as pa

from hetmpi.data.files import DataError
from hetmpi.data.tabular.dialect import POINT, Dialect
from hetmpi.data.tabular.rules import FIRST, MAP, NUMBER, SEQUENCE, Column, texts_of, vector_size
from hetmpi.errors import printable

CLICK, PROBABILITY, CLASSES, NO_LABEL = "click", "probability", "classes", "none"
LABEL_KINDS = (CLICK, NUMBER, PROBABILITY, CLASSES, NO_LABEL)
HASH, INTEGER = "hash", "integer"
MAX_EXAMPLES = 5
EXAMPLE_CHARS = 120
LABEL, WEIGHT = "label", "weight"  # in prepared files
MISSING = ("NA", "NaN", "nan", "null", "NULL", "None", "\\N")  # texts of missing values by default
BAD_LABEL, BAD_NUMBER, OTHER_SPELLING = "bad label", "bad number", "label of another spelling"
POSITIVE = ("yes", "y", "true", "t", "ja", "oui", "si", "sim")
COMMA_EXAMPLE = r"'[+-]?[0-9]*,[0-9]+' is no finite number$"
UNEQUAL_VECTOR = "vector of another length"
OTHER_PLACES = "missing values at different places of two lists"
CURES = {
    UNEQUAL_VECTOR: "write lists of ids as integers or texts, or drop the column by kind: drop",
    OTHER_PLACES: "give missing values of lists with pool: none a value, as 'none', or drop one of the columns",
    OTHER_SPELLING: "name all spellings of the labels that count as 1 in data.positive=[TEXT, ...]",
    BAD_NUMBER: "name texts of missing values in data.missing=[TEXT, ...], or take the column as text by kind: id",
}


@dataclass(frozen=True)
class StoredColumn:
    """A column of the prepared files. as_: NUMBER, HASH of the text, or INTEGER as it is. seed: of the hash. keep:
    the end of a list from which max_len keeps values. missing: its missing values, besides those of Reading. A weight
    for each value: weights: the separator before it; weight_column: its column; is_map: it is the value of a map.
    vector, place, size: the column of vectors of which it is a number, its place, and their length. in_order: a list
    whose positions matter, as with pool: none."""

    name: str
    as_: str
    seed: int = 0
    is_list: bool = False
    separator: str | None = None
    max_len: int | None = None
    keep: str = FIRST
    missing: tuple[str, ...] = ()
    weights: str | None = None
    weight_column: str | None = None
    is_map: bool = False
    vector: str | None = None
    place: int = 0
    size: int = 0
    in_order: bool = field(default=False, compare=False)  # checkpoints of older versions lack it

    @property
    def is_weighted(self) -> bool:
        """Whether each value has a weight."""
        return self.is_map or self.weights is not None or self.weight_column is not None

    @property
    def type(self) -> pa.DataType:
        one = pa.float32() if self.as_ == NUMBER else pa.int64()
        return pa.list_(one) if self.is_list else one


@dataclass(frozen=True)
class Reading:
    """names: of the columns of text without a header. labels: columns; one of several labels may be missing in a row.
    positive: label texts that count as 1. share: of the rows that are held out. split: the column and the texts of its
    values that are. after: microseconds since 1970, later times of that column are held out instead. unit: of times
    that are numbers (times.py). kept: columns that are passed on as they are. keys: columns of folders (folders.py).
    delimiter, quote, encoding, decimal: of text (dialect.py). sample_weight: the column of the samples' weights."""

    form: str
    names: tuple[str, ...] | None
    delimiter: str
    quote: str | None
    missing: tuple[str, ...]
    labels: tuple[str, ...]
    label_kind: str
    positive: tuple[str, ...] | None
    columns: tuple[StoredColumn, ...]
    share: float = 0.0
    split: tuple[str, tuple[str, ...]] | None = None
    after: int | None = None
    unit: str | None = None
    kept: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    label_missing: tuple[tuple[str, ...], ...] = ()
    encoding: str | None = None
    decimal: str = POINT
    sample_weight: str | None = None

    def missing_of(self, column: StoredColumn) -> tuple[str, ...]:
        """Texts of the missing values of a column."""
        return (*self.missing, *column.missing)

    @property
    def not_features(self) -> tuple[str, ...]:
        """The labels, and the column of weights."""
        return self.labels if self.sample_weight is None else (*self.labels, self.sample_weight)

    @property
    def dialect(self) -> Dialect:
        return Dialect(self.delimiter, self.quote, self.encoding, self.decimal)

    @property
    def wanted(self) -> list[str]:
        """Names of the columns that are read."""
        splitter = self.split and self.split[0]
        of_columns = [name for column in self.columns for name in (column.vector or column.name, column.weight_column)]
        names = [*self.not_features, *of_columns, splitter, *self.kept]
        return list(dict.fromkeys(name for name in names if name))

    def schema(self) -> pa.Schema:
        """Of the prepared files: label, label1, … for the labels, NaN where one of several is missing, and texts where
        they are classes, weight if there is one, then c0, c1, … for the columns, and w0, w1, … for the weights of the
        values of those that have them."""
        kind = pa.string() if self.label_kind == CLASSES else pa.float32()
        labels = [pa.field(name, kind) for name in label_fields(len(self.labels))]
        labels += [] if self.sample_weight is None else [pa.field(WEIGHT, pa.float32())]
        columns = [pa.field(f"c{i}", column.type) for i, column in enumerate(self.columns)]
        weighted = [i for i, column in enumerate(self.columns) if column.is_weighted]
        return pa.schema([*labels, *columns, *(pa.field(f"w{i}", pa.list_(pa.float32())) for i in weighted)])

    def to_predict(self, kept: tuple[str, ...] = ()) -> Reading:
        """For files to predict: without labels, weights and held-out rows."""
        read = replace(self, labels=(), label_missing=(), sample_weight=None)
        return replace(read, share=0.0, split=None, after=None, unit=None, kept=kept)

    def to_json(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_json(saved: dict) -> Reading:
        if "label" in saved:  # of versions with one label
            saved = {**saved, "labels": [saved["label"]] if saved["label"] else []}
            del saved["label"]
        lists = {
            key: tuple(saved[key]) if saved[key] is not None else None
            for key in ("names", "missing", "positive", "labels")
        }
        split = saved["split"] and (saved["split"][0], tuple(saved["split"][1]))
        return Reading(
            **{
                **saved,
                **lists,
                "split": split,
                **{key: tuple(saved.get(key, ())) for key in ("kept", "keys")},
                "columns": tuple(
                    StoredColumn(**{**one, "missing": tuple(one.get("missing", ()))}) for one in saved["columns"]
                ),
                "label_missing": tuple(map(tuple, saved.get("label_missing", [all_missing()] * len(lists["labels"])))),
            }
        )


def all_missing(missing: Sequence[str] | None = MISSING) -> tuple[str, ...]:
    """The texts of data.missing and the empty one. Raises UserError."""
    return tuple(dict.fromkeys(("", *(texts_of("data.missing", missing) or ()))))


def label_fields(num: int) -> list[str]:
    """Names of the labels in prepared files."""
    return [f"{LABEL}{i}" if i else LABEL for i in range(num)]


def stored_columns(columns: list[Column]) -> tuple[StoredColumn, ...]:
    """The columns of the prepared files."""
    numbers = {column.name: column.number for column in columns}
    integers = {column.name for column in columns if column.is_integer}
    return tuple(
        StoredColumn(
            column.name,
            NUMBER,
            missing=column.missing,
            vector=column.vector,
            place=column.place,
            size=vector_size(column.type) or 0,
        )
        if column.kind == NUMBER
        else StoredColumn(
            column.name,
            INTEGER if (column.share or column.name) in integers else HASH,
            numbers[column.share or column.name],
            column.pool is not None,
            column.separator,
            column.max_len,
            column.keep,
            column.missing,
            column.weights,
            column.weight_column,
            column.type == MAP,
            in_order=column.pool == SEQUENCE,
        )
        for column in columns
    )


@dataclass
class BadRows:
    """Dropped rows: their number, the number of faults of each kind, the first few as examples, and the first few
    different texts of bad labels."""

    rows: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def add(self, kind: str, count: int = 1) -> None:
        """Counts faults of a kind."""
        self.kinds[kind] = self.kinds.get(kind, 0) + count

    def show(self, place: str, fault: str) -> None:
        """Keeps a bad row as an example, if there is room."""
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{place}, {fault}")

    def show_labels(self, labels: Iterable[str]) -> None:
        """Keeps texts of bad labels, if there is room."""
        self.labels = list(dict.fromkeys([*self.labels, *labels]))[:MAX_EXAMPLES]

    def __add__(self, other: BadRows) -> BadRows:
        kinds = {kind: self.kinds.get(kind, 0) + other.kinds.get(kind, 0) for kind in {**self.kinds, **other.kinds}}
        labels = list(dict.fromkeys(self.labels + other.labels))[:MAX_EXAMPLES]
        return BadRows(self.rows + other.rows, kinds, (self.examples + other.examples)[:MAX_EXAMPLES], labels)

    def __str__(self) -> str:
        return self._counted("dropped")

    def _counted(self, how: str) -> str:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in self.kinds.items())
        return "\n  ".join([f"{self.rows:,} bad rows {how} ({kinds}), such as", *self.examples])

    def _cures(self, by_kind: Mapping[str, str]) -> list[str]:
        cures = [by_kind[kind] for kind in self.kinds if kind in by_kind]
        if BAD_NUMBER in self.kinds and any(re.search(COMMA_EXAMPLE, example) for example in self.examples):
            cures.insert(0, 'give data.decimal="," if the comma stands before decimals')
        if BAD_LABEL in self.kinds:
            cures.insert(0, f"give {positive_setting(self.labels)}, the labels that count as 1")
            are_shares = bool(self.labels) and all(is_number(one) and 0 <= float(one) <= 1 for one in self.labels)
            are_numbers = not self.labels or any(map(is_number, self.labels))
            kinds = [NUMBER] * are_numbers + [CLASSES] * (are_numbers or len(self.labels) > 1)
            kinds = [PROBABILITY] if are_shares else kinds
            cures[0] += f", or data.label_kind={' or '.join(kinds)}" if kinds else ""
        return [*cures, "correct the rows, raise data.max_bad_rows, or select the right files of a folder by a glob"]

    def check(self, source: str, limit: int, cures: Mapping[str, str] = CURES) -> None:
        """Raises DataError if there are more bad rows than `limit`. cures: settings to advise for kinds of faults."""
        if self.rows > limit:
            advice = "; or ".join(self._cures(cures))
            raise DataError(
                f"data.path={source}: more bad rows than data.max_bad_rows={limit}: {advice}.\n  "
                + self._counted("so far, where reading stopped")
            )


@dataclass
class Rows:
    """The good rows of a block. number(i): line or row of good row i, from the begin of its unit."""

    table: pa.Table  # of Reading.schema(), and "is_valid" bool where the reading has a split
    bad: BadRows
    number: Callable[[int], int]


def likely_positive(labels: Sequence[str]) -> str:
    """The label text that seems to count as 1."""
    return next((label for label in labels if label.lower() in POSITIVE), labels[0])


def positive_setting(labels: Sequence[str]) -> str:
    """data.positive=[...] for labels of these texts, for a shell."""
    texts = [label for label in labels if not is_number(label) and len(label) <= EXAMPLE_CHARS]
    if not texts:
        return "data.positive=[TEXT, ...]"
    chosen = likely_positive(texts)
    if re.fullmatch(r"\w+", chosen):
        return f"data.positive=[{chosen}]"
    return shlex.quote(f"data.positive=[{json.dumps(chosen, ensure_ascii=False)}]")


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def shown(text: bytes | str) -> str:
    """A value for a message, cut at EXAMPLE_CHARS."""
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    return repr(text[:EXAMPLE_CHARS] + ("..." if len(text) > EXAMPLE_CHARS else ""))


def check_wanted(wanted: list[str], path: str, names: list[str], delimiter: str | None = None):
    """Raises DataError unless a file with the columns `names` has those that are wanted. delimiter: of text."""
    known = set(names)
    column = next((name for name in wanted if name not in known), None)
    if column is not None:
        divided = "" if delimiter is None else f", divided by {delimiter!r}"
        raise DataError(
            f"data.path: {path} has no column {printable(column)}, which is needed; its columns{divided}: "
            f"{printable(', '.join(names))[:500]}"
        )
