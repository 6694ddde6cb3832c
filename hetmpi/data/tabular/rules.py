"""The rules of data.columns, and what they make of the columns of a file."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hetmpi.data.features import POOLS, SEQUENCE
from hetmpi.data.files import DataError
from hetmpi.errors import UserError, check_integer, one_line
from hetmpi.open_rows import EVICT, LFU, MOST_ROWS, OpenRows

ID, NUMBER, DROP = "id", "number", "drop"
FIRST, LAST = "first", "last"  # values of a list that max_len keeps
AUTO, OPEN = "auto", "open"
LONGEST_NAMES = 400  # characters of names of columns in a message
TRANSFORMS = (AUTO, "none", "log1p", "standardize")
OF_OPEN = ("max_rows", "expire_steps", "evict")
OF_IDS = ("rows", "hash", "min_count", *OF_OPEN, "share", "pool", "max_len", "keep", "separator", "weights")
OF_NUMBERS = ("transform",)
OF_ROWS = ("dim", "optim", "cache")
NOT_SHARED = ("rows", "hash", "min_count", *OF_OPEN, *OF_ROWS)  # those of the feature whose rows are shared
INTEGER, FLOAT, STRING, NESTED = "integer", "float", "text", "nested"  # types of a file's columns
LIST, MAP = "list", "map"  # of ids; with a weight for each
VECTOR = "vector "  # before the length of lists of as many numbers


@dataclass(frozen=True)
class Column:
    """A column that is used. A field that is None was not given.

    name, number   in the file; position among the columns that are ids, None for numbers
    kind           ID or NUMBER
    type           of the file's values: INTEGER, FLOAT, STRING, LIST, MAP, or VECTOR and a length
    vector, place  name of the column of vectors of which it is a number, and its place therein
    weight_column  name of the column that has a weight for each value, where `weights` does not divide them in a text
    others         see docs/columns.md"""

    name: str
    kind: str
    type: str
    number: int | None = None
    rows: int | str = AUTO
    hash: bool | None = None
    min_count: int = 1
    max_rows: int | None = None
    expire_steps: int | None = None
    evict: str = LFU
    share: str | None = None
    pool: str | None = None
    max_len: int | None = None
    keep: str = FIRST
    missing: tuple[str, ...] = ()
    separator: str | None = None
    weights: str | None = None
    weight_column: str | None = None
    vector: str | None = None
    place: int = 0
    transform: str | tuple[float, ...] = "none"  # AUTO unless a rule of a number says otherwise
    dim: int | None = None
    optim: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_integer(self) -> bool:
        """Whether the integers are keys as they are."""
        return self.kind == ID and self.rows not in (AUTO, OPEN) and self.hash is False

    @property
    def is_weighted(self) -> bool:
        """Whether each of its values has a weight."""
        return self.type == MAP or self.weights is not None or self.weight_column is not None

    @property
    def open(self) -> OpenRows | None:
        """Of a column without a fixed vocabulary."""
        if self.rows != OPEN:
            return None
        return OpenRows(self.max_rows, self.min_count, self.expire_steps, self.evict)

    @property
    def is_buckets(self) -> bool:
        """Whether it is a number that becomes an id."""
        return isinstance(self.transform, tuple)


FOUND = ("name", "kind", "type", "number", "weight_column", "vector", "place")  # no keys of a rule, or the first ones
KEYS = ("name", "kind", *(one.name for one in fields(Column) if one.name not in FOUND))


@dataclass(frozen=True)
class Rule:
    names: tuple[str, ...]
    settings: Mapping[str, Any]

    def matches(self, column: str) -> bool:
        return any(column == name or fnmatch.fnmatchcase(column, name) for name in self.names)

    def __str__(self) -> str:
        return f"data.columns, name: {one_line(', '.join(self.names), LONGEST_NAMES)}"


def plain(value):
    """Mappings and sequences, such as Hydra's, as dict and list."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(one) for one in value]
    return value


def near(name: str, known: Sequence[str]) -> str:
    """Names similar to an unknown one, else the first few, as the end of a message."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {one_line(' or '.join(close), LONGEST_NAMES)}?"
    return f"there are {one_line(', '.join(known[:20]) + (', ...' if len(known) > 20 else ''), LONGEST_NAMES)}"


def read_rules(columns) -> list[Rule]:
    """The rules of data.columns. Raises UserError for unknown keys and impossible values."""
    columns = plain(columns) or []
    if not isinstance(columns, list) or not all(isinstance(one, dict) for one in columns):
        raise UserError("data.columns must be a list of rules, as in data.columns='[{name: age, kind: number}]'")
    return [read_rule(one) for one in columns]


def read_rule(settings: dict) -> Rule:
    names = settings.get("name")
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"data.columns: each rule needs a name, a list of names, or a glob, got {one_line(settings)}")
    rule = Rule(tuple(names), {key: value for key, value in settings.items() if key != "name" and value is not None})
    for key in rule.settings:
        if key not in KEYS:
            raise UserError(f"{rule}: there is no key {one_line(key, 100)}: {near(str(key), KEYS)}")
    check_values(rule)
    return rule


def check_values(rule: Rule):
    """Raises UserError for an impossible value of a key."""
    known = rule.settings
    if known.get("kind", ID) not in (ID, NUMBER, DROP):
        raise UserError(f"{rule}: kind must be id, number or drop, got {one_line(known['kind'])}")
    if known.get("rows", AUTO) not in (AUTO, OPEN):
        check_integer(f"{rule}: rows (a number, auto or open)", known["rows"], 1)
    if known.get("evict", LFU) not in EVICT:
        raise UserError(f"{rule}: evict must be one of {', '.join(EVICT)}, got {one_line(known['evict'])}")
    if "max_rows" in known:
        check_integer(f"{rule}: max_rows", known["max_rows"], 1, MOST_ROWS)
    for key in ("min_count", "expire_steps", "max_len", "dim"):
        if key in known:
            check_integer(f"{rule}: {key}", known[key], 1)
    if not isinstance(known.get("hash", True), bool):
        raise UserError(f"{rule}: hash must be true or false, got {one_line(known['hash'])}")
    for key in ("share", "separator", "weights"):
        if not isinstance(known.get(key, "x"), str) or not known.get(key, "x"):
            raise UserError(f"{rule}: {key} must be text, got {one_line(repr(known[key]))}")
    if known.get("pool", POOLS[0]) not in POOLS:
        raise UserError(f"{rule}: pool must be one of {', '.join(POOLS)}, got {one_line(known['pool'])}")
    if known.get("keep", FIRST) not in (FIRST, LAST):
        raise UserError(f"{rule}: keep must be {FIRST} or {LAST}, got {one_line(known['keep'])}")
    for key in ("optim", "cache"):
        if not isinstance(known.get(key, {}), dict):
            raise UserError(
                f"{rule}: {key} must be settings, as in {key}: {{rows_lr: 0.1}}, got {one_line(known[key])}"
            )
    check_transform(rule, known.get("transform", AUTO))
    texts_of(f"{rule}: missing", known.get("missing"))


def check_transform(rule: Rule, transform):
    if isinstance(transform, list):
        is_number = [isinstance(e, (int, float)) and not isinstance(e, bool) and math.isfinite(e) for e in transform]
        if not transform or not all(is_number) or any(a >= b for a, b in zip(transform, transform[1:])):
            raise UserError(f"{rule}: the edges of transform must be rising numbers, got {transform}")
    elif transform not in TRANSFORMS:
        raise UserError(f"{rule}: transform must be {', '.join(TRANSFORMS)} or a list of edges, got {transform}")


def resolve(
    rules: list[Rule],
    types: Mapping[str, str],
    labels: Sequence[str],
    splitter: str | None,
    choices: Mapping[str, Sequence[str]] | None = None,
    needed: Collection[str] = (),
) -> list[Column]:
    """The columns that are used, in the file's order. types: name -> type of each column of the file. splitter: the
    column of data.valid, which is no feature unless a rule names it. choices: name -> kind, and why, of columns without
    a rule (choices.py); by default by type, as those that other settings need. Raises DataError for rules that match
    nothing or do not suit their column."""
    check_matches(rules, types, labels)
    choices = {name: choice[0] for name, choice in (choices or {}).items()}
    needed = {*needed, *(rule.settings["share"] for rule in rules if "share" in rule.settings)}
    named = {name for rule in rules for name in rule.names}
    others = {splitter, *(rule.settings.get("weights") for rule in rules)} - named | {*labels}
    features = {name: kind for name, kind in types.items() if name not in others}
    without_numbers = {name: kind for name, kind in choices.items() if kind != NUMBER}
    nested = {name: DROP for name, kind in features.items() if kind == NESTED and name in choices}
    columns: list[Column] = []
    # Integers, and then what was dropped, are ids where no other column is.
    for kinds in (choices, without_numbers, nested):
        columns = [column for column in columns_by(features, rules, kinds, needed) if column is not None]
        if any(column.kind == ID or column.is_buckets for column in columns):
            break
    columns = [
        replace(column, weights=None, weight_column=column.weights) if column.weights in types else column
        for column in columns
    ]
    for column in columns:
        check_weights(column)
    columns = [one for column in columns for one in numbers_of(column)]
    twice = next((c.name for c in columns if c.vector is not None and c.name in types), None)
    if twice is not None:
        raise DataError(f"data.columns: a number of a vector would be named {one_line(twice)}, as another column is")
    numbers = iter(range(len(columns)))
    columns = [Column(**{**vars(c), "number": next(numbers) if c.kind == ID else None}) for c in columns]
    check_shares(columns)
    return columns


def check_matches(rules: list[Rule], types: Mapping[str, str], labels: Sequence[str]):
    names = [name for name in types if name not in labels]
    for rule in rules:
        for name in rule.names:
            if name in labels and set(rule.settings) != {"missing"}:
                raise DataError(f"{rule}: {name} is a label, whose rule can only have missing")
            if not fnmatch.filter(names, name) and name not in (*names, *labels):
                raise DataError(f"{rule}: no column is named {name}: {near(name, names)}")


def columns_by(
    types: Mapping[str, str], rules: list[Rule], kinds: Mapping[str, str], needed: Collection[str]
) -> Iterator[Column | None]:
    """The columns after their rules. kinds: of columns without a rule that says it."""
    for name, kind in types.items():
        rule = next((rule for rule in rules if rule.matches(name)), None)
        by_type = NUMBER if kind == FLOAT or vector_size(kind) is not None else ID
        chosen = kinds.get(name, by_type)
        is_named = rule is not None and name in rule.names
        yield column_of(name, kind, rule, by_type if name in needed or (is_named and chosen == DROP) else chosen)


def column_of(name: str, kind: str, rule: Rule | None, chosen: str) -> Column | None:
    """The column after its rule, None if it is dropped. chosen: its kind, unless the rule says another. Raises
    DataError for keys that do not suit it."""
    known = dict(rule.settings) if rule else {}
    known |= {"missing": missing_by([rule], name)} if "missing" in known else {}
    where = f"data.columns, column {one_line(name)}"
    is_dropped = known.get("kind") == DROP
    wanted = known.pop("kind", None) or kind_by(known, kind, chosen)
    if wanted == DROP:
        refuse_keys(where, "that is dropped", known, known if is_dropped else ())
        return None
    is_vector = vector_size(kind) is not None
    if kind == NESTED or (kind in (LIST, MAP) and wanted == NUMBER) or (is_vector and wanted != NUMBER):
        held = "nested values" if kind == NESTED else "vectors of numbers" if is_vector else f"{kind}s"
        raise DataError(
            f"column {one_line(name)} holds {held}, which cannot be used as {wanted}: drop it by "
            f"data.columns='[{{name: {name}, kind: drop}}]'"
        )
    if wanted == NUMBER:
        refuse_keys(where, "of kind number", known, OF_IDS)
        if isinstance(known.get("transform"), list):
            known["transform"] = tuple(map(float, known["transform"]))
        else:
            refuse_keys(where, "of kind number without edges", known, OF_ROWS)
            known.setdefault("transform", AUTO)
        return Column(name, NUMBER, kind, **known)
    refuse_keys(where, "of kind id", known, OF_NUMBERS)
    return id_column(where, name, kind, known)


def kind_by(known: dict, kind: str, chosen: str) -> str:
    """The kind of a column without the key kind."""
    if any(key in known for key in OF_IDS):
        return ID
    if "transform" in known:
        return NUMBER
    return ID if kind != FLOAT and any(key in known for key in OF_ROWS) else chosen


def id_column(where: str, name: str, kind: str, known: dict) -> Column:
    if "share" in known:
        refuse_keys(where, f"that shares the rows of {one_line(known['share'])}", known, NOT_SHARED)
    has_lists = kind in (LIST, MAP)
    if has_lists and "separator" in known:
        raise DataError(f"{where}: it holds {kind}s already, remove separator")
    if not has_lists and "pool" in known and "separator" not in known:
        raise DataError(f"{where}: pool needs several values per row: give the separator between them")
    if has_lists or "separator" in known:
        known.setdefault("pool", "mean")
    for key in ("max_len", "weights"):
        if key in known and "pool" not in known:
            raise DataError(f"{where}: {key} needs several values per row: give the separator between them")
    if "max_len" in known:
        known.setdefault("keep", LAST if known["pool"] == SEQUENCE else FIRST)
    elif "keep" in known:
        raise DataError(f"{where}: keep says which values max_len keeps: give max_len")
    rows, hashed = known.get("rows", AUTO), known.get("hash")
    if rows != OPEN:
        refuse_keys(where, "without rows: open", known, OF_OPEN)
    elif "max_rows" not in known:
        raise DataError(f"{where}: rows: open needs max_rows, the ids that have a row at the same time")
    elif hashed is not None:
        raise DataError(f"{where}: rows: open hashes all values, remove hash")
    if "min_count" in known and rows != OPEN and (rows != AUTO or hashed):
        raise DataError(f"{where}: min_count needs rows: auto without hash, where each value has a row of its own")
    return Column(name, ID, kind, **known)


def numbers_of(column: Column) -> list[Column]:
    """The column, or those of the numbers of a vector, as v[0]."""
    size = vector_size(column.type)
    if size is None:
        return [column]
    return [replace(column, name=f"{column.name}[{i}]", vector=column.name, place=i) for i in range(size)]


def vector_size(kind: str) -> int | None:
    """The length of the vectors of a column of this type, None for other types."""
    return int(kind.removeprefix(VECTOR)) if kind.startswith(VECTOR) else None


def check_weights(column: Column):
    """Raises DataError for weights that do not suit a column."""
    where = f"data.columns, column {one_line(column.name)}"
    if column.is_weighted and column.pool == SEQUENCE:
        raise DataError(f"{where}: values with weights are pooled: pool must be sum or mean")
    if column.type == MAP and (column.weights or column.weight_column):
        raise DataError(f"{where}: its maps have the weights, remove weights")
    if column.type == LIST and column.weights is not None:
        raise DataError(f"{where}: weights: no column is named {one_line(column.weights)}, which lists need")
    if column.name == column.weight_column:
        raise DataError(f"{where}: weights names the column itself")


def missing_by(rules: Sequence[Rule], name: str) -> tuple[str, ...]:
    """The texts of missing values that the first rule for a column gives it, labels included."""
    rule = next((rule for rule in rules if rule.matches(name)), None)
    return texts_of("missing", rule.settings.get("missing")) or () if rule else ()


def texts_of(key: str, values) -> tuple[str, ...] | None:
    """A list of texts as a tuple. Raises UserError for anything else; numbers count as their text."""
    values = plain(values)
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(v, (str, int, float)) for v in values):
        raise UserError(f"{key} must be a list of texts, got {one_line(values)}")
    texts = (str(value).lower() if isinstance(value, bool) else str(value) for value in values)  # as Arrow writes them
    return tuple(text.strip() for text in texts)


def refuse_keys(where: str, what: str, known: Mapping, wrong: Sequence[str]):
    found = [key for key in known if key in wrong]
    if found:
        raise DataError(f"{where}: a column {what} has no {', '.join(found)}")


def check_shares(columns: list[Column]):
    """Raises DataError for a share of an unknown column, or of one without rows of its own."""
    ids = {column.name: column for column in columns if column.kind == ID}
    for column in ids.values():
        if column.share is None:
            continue
        where, other = f"data.columns, column {one_line(column.name)}", ids.get(column.share)
        if column.share == column.name:
            raise DataError(f"{where}: share names the column itself")
        if other is None:
            raise DataError(f"{where}: share: no id column is named {column.share}: {near(column.share, list(ids))}")
        if other.share is not None:
            raise DataError(
                f"{where}: share: {one_line(other.name)} shares the rows of {one_line(other.share)} itself: name that "
                "column"
            )
