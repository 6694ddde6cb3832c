"""The manifest of a checkpoint: what it says, and the checks that everything read from it passes before it is used.

The hash in a manifest finds damage. It does not stop a manifest written by hand: types, ranges and names are therefore
checked one by one, and no name of a file is taken from a manifest. Names follow from format, tables and ranks, and the
manifest must list exactly these; the one name that is read, of the base, must be a step-NNNNNNNN beside the checkpoint.
"""

from __future__ import annotations

import itertools
import json
import re
import reprlib
from pathlib import Path

import xxhash

from hetmpi.checkpoint.files import open_file
from hetmpi.comm.route import PARTITIONS
from hetmpi.errors import UserError
from hetmpi.table.optim import ROW_RULES, RowOptimizer

FULL, INCREMENTAL, SEVERAL = 1, 2, 3  # formats: one table without a name, the same with a base, tables with names
ARRAYS = ("weight", "state", "clock")
DENSE = "dense.pt"
DESCRIPTION = ("num_rows", "dim", "partition", "rule", "state_dim")  # of a table
RESERVED = {"format", "step", "samples", "size", "tables", "base", "base_xxh3_128", "files", "xxh3_128", *DESCRIPTION}
STEP_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,15})")
TABLE_NAME = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,100}")
HASH = re.compile(r"[0-9a-f]{32}")
LARGEST, LARGEST_DIM = (1 << 53) - 1, (1 << 31) - 1
LARGEST_BYTES = 1 << 28  # of manifest.json: 1,024 ranks and ten tables make 4 MB


def read_manifest(path: Path) -> dict:
    """The manifest of the checkpoint `path`, without its own hash. Raises UserError if there is none, if it is damaged,
    or if it says anything that no checkpoint can say."""
    try:
        with open_file(path / "manifest.json") as file:
            text = file.read(LARGEST_BYTES)
        manifest = json.loads(text)
        kind = manifest.get("format") if isinstance(manifest, dict) else None
        if type(kind) is not int or kind not in (FULL, INCREMENTAL, SEVERAL):
            raise UserError(f"{path} has format {brief(kind)}, this hetmpi reads {FULL}, {INCREMENTAL} and {SEVERAL}")
        is_as_written = manifest.pop("xxh3_128", None) == digest_of(manifest)
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as problem:
        raise UserError(f"{path} is no whole checkpoint: manifest.json: {problem}") from problem
    if not is_as_written:
        raise UserError(f"{path} is no whole checkpoint: manifest.json has other bytes than were written")
    check_manifest(path, manifest)
    return manifest


def read_base(path: Path, manifest: dict) -> dict | None:
    """The manifest of the base of the checkpoint `path`, None if that is a full one. Raises UserError as read_manifest,
    and if the base is another than it was, or not of the same tables and ranks."""
    if "base" not in manifest:
        return None
    name = manifest["base"]
    try:
        base = read_manifest(path.parent / name)
    except UserError as refusal:
        raise UserError(f"{path} builds on {name}, which has to lie beside it: {refusal}") from refusal
    if digest_of(base) != manifest["base_xxh3_128"]:
        raise UserError(f"{path} builds on {name}, which is another now than it was then")
    if "base" in base:
        raise UserError(f"{path} builds on {name}, which must be a full checkpoint, and builds on {base['base']}")
    if (base["size"], kinds_of(base)) != (manifest["size"], kinds_of(manifest)):
        raise UserError(f"{path} builds on {name}, which must be of the same tables and ranks, and is of others")
    return base


def files_of(path: Path) -> list[tuple[Path, dict]]:
    """Every file of a checkpoint and of its base, with what was written of it: {"bytes": int, "xxh3_128": str}. Raises
    UserError as read_manifest and read_base."""
    manifest = read_manifest(path)
    found = [(path / name, known) for name, known in sorted(manifest["files"].items())]
    base = read_base(path, manifest)
    if base is None:
        return found
    folder = path.parent / manifest["base"]
    return found + [(folder / name, known) for name, known in sorted(base["files"].items()) if name != DENSE]


def tables_of(manifest: dict) -> dict[str, dict]:
    """What a manifest says of each table, by its name: num_rows, dim, partition, rule, state_dim, step. The name of one
    saved without a name is ""."""
    if manifest["format"] == SEVERAL:
        return manifest["tables"]
    return {"": {name: manifest[name] for name in (*DESCRIPTION, "step")}}


def kinds_of(manifest: dict) -> dict[str, dict]:
    """tables_of, without the steps."""
    return {name: {key: kept[key] for key in DESCRIPTION} for name, kept in tables_of(manifest).items()}


def file_name(table: str, rank: int, array: str) -> str:
    """array: one of ARRAYS, or rows."""
    return f"{table}{'.' if table else ''}shard-{rank:05d}.{array}.npy"


def digest_of(manifest: dict) -> str:
    """Hash of all that a manifest says."""
    return xxhash.xxh3_128(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def check_same(path: Path, manifest: dict, wanted: dict):
    """Raises UserError unless the manifest says of each name in `wanted` what that says."""
    for name, value in wanted.items():
        if manifest.get(name) != value:
            raise UserError(
                f"{path} was saved with {name}={manifest.get(name)}, now it is {value}: go on with the same, or begin "
                "a new run"
            )


def check_table_name(place: str, name):
    """Raises UserError unless a table of that name can have files."""
    if not isinstance(name, str) or not TABLE_NAME.fullmatch(name):
        raise UserError(
            f"{place}: a table's name must be at most 100 letters, digits, _, - and ., which is not the first, got "
            f"{brief(name)}"
        )


class Entries:
    """A JSON object that is checked as it is read. place: where it stands, for messages."""

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
        """is_right(value): whether a str is what is expected."""
        value = self.get(name)
        if not isinstance(value, str) or not is_right(value):
            raise self.refusal(name, expected)
        return value

    def refusal(self, name: str, expected: str) -> UserError:
        return UserError(f"{self.place}: {name} must be {expected}, got {brief(self.values[name])}")


def check_manifest(path: Path, manifest: dict):
    """Raises UserError unless a checkpoint in the folder `path` can say all this. REQUIRES: a format that is known."""
    said = Entries(f"{path}: manifest.json", manifest)
    step = said.integer("step", 0)
    said.integer("samples", 0)
    said.integer("size", 1)
    if manifest["format"] == SEVERAL:
        check_tables(said.part("tables"))
    else:
        check_table(said)
    check_base_name(path, said)
    check_files(said)
    name = STEP_NAME.fullmatch(path.name)
    if name and int(name[1]) != step:
        raise UserError(f"{said.place}: step must be that in the folder's name, got {step}")


def check_tables(tables: Entries):
    """Raises UserError unless these are descriptions of tables by name."""
    if not tables.values:
        raise UserError(f"{tables.place} must name at least one table, got none")
    for name in tables.values:
        check_table_name(tables.place, name)
        check_table(tables.part(name))
        tables.part(name).integer("step", 0)


def check_table(table: Entries):
    """Raises UserError unless this describes a table."""
    table.integer("num_rows", 1)
    dim = table.integer("dim", 1, LARGEST_DIM)
    table.text("partition", PARTITIONS.__contains__, f"one of {', '.join(PARTITIONS)}")
    rule = table.text("rule", ROW_RULES.__contains__, f"one of {', '.join(ROW_RULES)}")
    state_dim = RowOptimizer(rule).core(dim).state_dim
    table.integer("state_dim", state_dim, state_dim)


def check_base_name(path: Path, said: Entries):
    """Raises UserError unless a base is named where, and only where, the format has one."""
    kind, has_base = said.values["format"], "base" in said.values
    if kind == FULL and has_base:
        raise UserError(f"{said.place}: base must not be there in format {FULL}, got {brief(said.values['base'])}")
    if kind == INCREMENTAL or has_base:
        said.text("base", lambda name: STEP_NAME.fullmatch(name) and name != path.name, "another step-NNNNNNNN")
        said.text("base_xxh3_128", HASH.fullmatch, "32 hexadecimal digits")


def check_files(said: Entries):
    """Raises UserError unless exactly the files are listed that a checkpoint of these tables and ranks has."""
    files, manifest = said.part("files"), said.values
    arrays = (*ARRAYS, "rows") if "base" in manifest else ARRAYS
    tables, size = tables_of(manifest), manifest["size"]
    num = 1 + size * len(tables) * len(arrays)
    if len(files.values) != num:
        raise UserError(f"{files.place} must list {num:,} files for size {size:,}, got {len(files.values):,}")
    names = itertools.chain([DENSE], itertools.starmap(file_name, itertools.product(tables, range(size), arrays)))
    missing = next((name for name in names if name not in files.values), None)
    if missing is not None:
        raise UserError(f"{files.place} lacks {missing}")  # of as many names another one is too much
    for name in files.values:
        files.part(name).integer("bytes", 0)
        files.part(name).text("xxh3_128", HASH.fullmatch, "32 hexadecimal digits")


def brief(value) -> str:
    """repr(value), cut where it is long."""
    return BRIEF.repr(value)


BRIEF = reprlib.Repr()
BRIEF.maxstring = BRIEF.maxother = 80
