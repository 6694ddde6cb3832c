"""The manifest of a checkpoint, and the checks of everything that is read from it.

The hash in a manifest detects damage, but not a manifest written by hand. So types, ranges and names are checked one by
one, and no file name is taken from a manifest: file names follow from format, tables and ranks, and the manifest must
list exactly these. The only name taken from it, that of the base, must be a step-NNNNNNNN in the same folder.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import reprlib
from pathlib import Path

import xxhash

from hetmpi.bounded_file import open_file
from hetmpi.errors import UserError
from hetmpi.owner.route import PARTITIONS
from hetmpi.table.optim import ROW_RULES, RowOptimizer

FULL, INCREMENTAL, SEVERAL = 1, 2, 3  # formats: one table without a name, the same with a base, tables with names
ARRAYS = ("weight", "state", "clock")
DENSE = "dense.pt"
BEST = "best"  # link beside the checkpoints
DESCRIPTION = ("num_rows", "dim", "partition", "rule", "state_dim")  # of a table
RESERVED = {"format", "step", "samples", "size", "tables", "base", "base_xxh3_128", "files", "xxh3_128", *DESCRIPTION}
STEP_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,15})")
TABLE_NAME = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,100}")
HASH = re.compile(r"[0-9a-f]{32}")
LARGEST, LARGEST_DIM = (1 << 53) - 1, (1 << 31) - 1
LARGEST_BYTES = 1 << 29  # of manifest.json; 100 tables on 4,096 ranks need 200 MB, with the longest names 360 MB
CHUNK_BYTES, VALUE_BYTES = 1 << 24, 512  # read at a time; more than a value has on average in a manifest of this size
MOST_VALUES = 1 << 23  # in it, as its commas and brackets; these have 4.9 million and are read in 10 s


def read_manifest(path: Path) -> dict:
    """The manifest of the checkpoint `path`, without its own hash. Raises UserError if it is missing, damaged or
    invalid."""
    try:
        with open_file(path / "manifest.json") as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_BYTES:
                raise ValueError(f"it must have at most {LARGEST_BYTES:,} bytes, it has {size:,}")
            text = text_of(file)
        manifest = json.loads(text)
        kind = manifest.get("format") if isinstance(manifest, dict) else None
        if type(kind) is not int or kind not in (FULL, INCREMENTAL, SEVERAL):
            raise UserError(f"{path} has format {brief(kind)}, this hetmpi reads {FULL}, {INCREMENTAL} and {SEVERAL}")
        is_as_written = manifest.pop("xxh3_128", None) == digest_of(manifest)
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as problem:
        raise UserError(f"{path} is not a complete checkpoint: manifest.json: {problem}") from problem
    if not is_as_written:
        raise UserError(f"{path} is not a complete checkpoint: manifest.json does not match its hash")
    check_manifest(path, manifest)
    return manifest


def text_of(file) -> bytes:
    """The contents of an open manifest. Raises ValueError as soon as it has more values, or longer ones, than the
    largest."""
    chunks, num_values = [], 0
    while chunk := file.read(CHUNK_BYTES):
        found = sum(map(chunk.count, (b",", b"[", b"{")))
        if len(chunk) == CHUNK_BYTES and found * VALUE_BYTES < CHUNK_BYTES:
            raise ValueError(f"it must have a value in {VALUE_BYTES} bytes, it has {found:,} in {CHUNK_BYTES:,}")
        num_values += found
        if num_values > MOST_VALUES:
            raise ValueError(f"it must have at most {MOST_VALUES:,} values, it has more")
        chunks.append(chunk)
    return b"".join(chunks)


def read_base(path: Path, manifest: dict) -> dict | None:
    """The manifest of the base of the checkpoint `path`, None for a full checkpoint. Raises UserError as read_manifest,
    and if the base has changed, or has other tables or ranks."""
    if "base" not in manifest:
        return None
    name = manifest["base"]
    try:
        base = read_manifest(path.parent / name)
    except UserError as refusal:
        raise UserError(f"{path} builds on {name}, which must be in the same folder: {refusal}") from refusal
    if digest_of(base) != manifest["base_xxh3_128"]:
        raise UserError(f"{path} builds on {name}, which has changed since")
    if "base" in base:
        raise UserError(f"{path} builds on {name}, which must be a full checkpoint, but builds on {base['base']}")
    if (base["size"], kinds_of(base)) != (manifest["size"], kinds_of(manifest)):
        raise UserError(f"{path} builds on {name}, which must be of the same tables and ranks, but is of others")
    return base


def files_of(path: Path) -> list[tuple[Path, dict]]:
    """All files of a checkpoint and of its base, with their entries in the manifests: {"bytes": int, "xxh3_128": str}.
    Raises UserError as read_manifest and read_base."""
    manifest = read_manifest(path)
    found = [(path / name, known) for name, known in sorted(manifest["files"].items())]
    base = read_base(path, manifest)
    if base is None:
        return found
    folder = path.parent / manifest["base"]
    return found + [(folder / name, known) for name, known in sorted(base["files"].items()) if name != DENSE]


def tables_of(manifest: dict) -> dict[str, dict]:
    """The manifest's description of each table by name: num_rows, dim, partition, rule, state_dim, step. A table saved
    without a name is called ""."""
    if manifest["format"] == SEVERAL:
        return manifest["tables"]
    return {"": {name: manifest[name] for name in (*DESCRIPTION, "step")}}


def kinds_of(manifest: dict) -> dict[str, dict]:
    """As tables_of, without the steps."""
    return {name: {key: kept[key] for key in DESCRIPTION} for name, kept in tables_of(manifest).items()}


def file_name(table: str, rank: int, array: str) -> str:
    """Name of the file of one rank's array: one of ARRAYS, or rows."""
    return f"{table}{'.' if table else ''}shard-{rank:05d}.{array}.npy"


def digest_of(manifest: dict) -> str:
    """Hash of a manifest without its hash."""
    return xxhash.xxh3_128(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def check_same(path: Path, manifest: dict, wanted: dict):
    """Raises UserError unless the manifest has the values in `wanted`."""
    for name, value in wanted.items():
        saved = manifest.get(name)
        if saved == value:
            continue
        if isinstance(saved, dict) and isinstance(value, dict):  # settings of a group, null or absent
            differing = [key for key in [*value, *saved] if saved.get(key) != value.get(key)]
            if not differing:
                continue
            key = differing[0]
            if key not in saved:
                raise UserError(
                    f"{path} was saved without {name.removesuffix('_config')}.{key}, now it is {value[key]}: leave it "
                    "out if it was added, or start a new run"
                )
            name, saved, value = f"{name.removesuffix('_config')}.{key}", saved.get(key), value.get(key)
        raise UserError(
            f"{path} was saved with {name}={saved}, now it is {value}: continue with the same value, or start a new run"
        )


def check_table_name(place: str, name):
    """Raises UserError unless files can be named after a table of that name."""
    if not isinstance(name, str) or not TABLE_NAME.fullmatch(name):
        raise UserError(
            f"{place}: a table's name must be at most 100 letters, digits, _, - and ., which is not the first, got "
            f"{brief(name)}"
        )


class Entries:
    """A JSON object that is checked while it is read. place: its location, for messages."""

    def __init__(self, place: str, values):
        if not isinstance(values, dict):
            raise UserError(f"{place} must be an object, got {brief(values)}")
        self.place, self.values = place, values

    def get(self, name: str):
        if name not in self.values:
            raise UserError(f"{self.place} lacks {name}")
        return self.values[name]

    def part(self, name: str) -> Entries:
        return Entries(f"{self.place}: {name}", self.get(name))

    def integer(self, name: str, least: int, most: int = LARGEST) -> int:
        value = self.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(name, f"an integer in [{least:,}, {most:,}]")
        return value

    def text(self, name: str, is_right, expected: str) -> str:
        """is_right(value): whether the str is valid. expected: its description for messages."""
        value = self.get(name)
        if not isinstance(value, str) or not is_right(value):
            raise self.refusal(name, expected)
        return value

    def refusal(self, name: str, expected: str) -> UserError:
        return UserError(f"{self.place}: {name} must be {expected}, got {brief(self.values[name])}")


def check_manifest(path: Path, manifest: dict):
    """Raises UserError unless all values of a manifest in the folder `path` are valid. REQUIRES: a known format."""
    entries = Entries(f"{path}: manifest.json", manifest)
    step = entries.integer("step", 0)
    entries.integer("samples", 0)
    entries.integer("size", 1)
    if manifest["format"] == SEVERAL:
        check_tables(entries.part("tables"))
    else:
        check_table(entries)
    check_base_name(path, entries)
    check_files(entries)
    name = STEP_NAME.fullmatch(path.name)
    if name and int(name[1]) != step:
        raise UserError(f"{entries.place}: step must be that in the folder's name, got {step}")


def check_tables(tables: Entries):
    """Raises UserError unless these are valid descriptions of tables by name."""
    if not tables.values:
        raise UserError(f"{tables.place} must name at least one table, got none")
    for name in tables.values:
        check_table_name(tables.place, name)
        check_table(tables.part(name))
        tables.part(name).integer("step", 0)


def check_table(table: Entries):
    """Raises UserError unless this is a valid description of a table."""
    table.integer("num_rows", 1)
    dim = table.integer("dim", 1, LARGEST_DIM)
    table.text("partition", PARTITIONS.__contains__, f"one of {', '.join(PARTITIONS)}")
    rule = table.text("rule", ROW_RULES.__contains__, f"one of {', '.join(ROW_RULES)}")
    state_dim = RowOptimizer(rule).core(dim).state_dim
    table.integer("state_dim", state_dim, state_dim)


def check_base_name(path: Path, entries: Entries):
    """Raises UserError unless the manifest names a base exactly if its format has one."""
    kind, has_base = entries.values["format"], "base" in entries.values
    if kind == FULL and has_base:
        raise UserError(f"{entries.place}: base must be absent in format {FULL}, got {brief(entries.values['base'])}")
    if kind == INCREMENTAL or has_base:
        entries.text("base", lambda name: STEP_NAME.fullmatch(name) and name != path.name, "another step-NNNNNNNN")
        entries.text("base_xxh3_128", HASH.fullmatch, "32 hexadecimal digits")


def check_files(entries: Entries):
    """Raises UserError unless the manifest lists exactly the files of its tables and ranks."""
    files, manifest = entries.part("files"), entries.values
    arrays = (*ARRAYS, "rows") if "base" in manifest else ARRAYS
    tables, size = tables_of(manifest), manifest["size"]
    num = 1 + size * len(tables) * len(arrays)
    if len(files.values) != num:
        raise UserError(f"{files.place} must list {num:,} files for size {size:,}, got {len(files.values):,}")
    names = itertools.chain([DENSE], itertools.starmap(file_name, itertools.product(tables, range(size), arrays)))
    missing = next((name for name in names if name not in files.values), None)
    if missing is not None:  # the number of names is right, so another one is superfluous
        raise UserError(f"{files.place} lacks {missing}")
    for name, values in files.values.items():
        if not is_file_entry(values):
            files.part(name).integer("bytes", 0)
            files.part(name).text("xxh3_128", HASH.fullmatch, "32 hexadecimal digits")


def is_file_entry(values) -> bool:
    """Whether this is a valid entry of a file: a quick check, as there may be a million."""
    if not isinstance(values, dict):
        return False
    nbytes, digest = values.get("bytes"), values.get("xxh3_128")
    return type(nbytes) is int and 0 <= nbytes <= LARGEST and isinstance(digest, str) and bool(HASH.fullmatch(digest))


def brief(value) -> str:
    """repr(value), shortened."""
    return BRIEF.repr(value)


BRIEF = reprlib.Repr()
BRIEF.maxstring = BRIEF.maxother = 80
