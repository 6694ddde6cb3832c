"""Prepares raw Criteo text once: writes hashed, split and shuffled Parquet files, from which ranks read the rows they
need.

The source is divided into units (raw.py); rank r prepares units r, r + size, …. Each unit is written to its own folder,
which is renamed when it is complete: so a folder with a unit's name is complete, and an interrupted preparation
continues with the missing units. The name contains a hash of the source file's path, size and time: a changed file has
other units. The content of a unit does not depend on the number of ranks.

    <cache>/manifest.json                    written last: counts over all units
    <cache>/<number>-<hash>/unit.json        counts of one unit
                           /train-*.parquet  label, d0 … d12 float32, c0 … c25 int64; shuffled, groups of GROUP_ROWS
                           /valid-*.parquet  the held-out rows, in the same form
                           /registers.npy    (26, NUM_REGISTERS) uint8, see distinct.py

`python -m hetmpi.data.prepare SOURCE [CACHE]` prepares in one process before training.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from hetmpi.data.distinct import estimate
from hetmpi.data.raw import EXPECTED, SCHEMA, BadRows, DataError, Parser, Unit, absolute, list_units

VERSION = 1  # of the prepared format; data of another version is prepared again
UNIT_BYTES = 256 << 20
GROUP_ROWS = 8192  # rows of a Parquet row group, the unit of reading
SHUFFLE_ROWS = 16 * GROUP_ROWS  # rows shuffled together
FILE_ROWS = 8 * SHUFFLE_ROWS  # rows of a Parquet file, whose footer is held in memory
VALID_SHARE = 0.1
SPLIT_SEED = 2022  # fixed, so that all runs hold out the same rows
MAX_BAD_ROWS = 100
ABANDONED_S = 3600  # an unfinished unit unchanged for this time belongs to a process that died
UNIT_FOLDER = re.compile(r"\d{5,}-[0-9a-f]{16}(\.part-.*)?")


def default_cache(source: str) -> str:
    """Default folder for the data prepared from `source`: in the current folder, as the source's may be read-only."""
    path = absolute(source)
    name = re.sub(r"[^\w.-]", "_", os.path.basename(path))
    return absolute(os.path.join("prepared", f"{name}-{xxhash.xxh3_64_hexdigest(os.fsencode(path))[:8]}"))


def prepare(
    source: str,
    cache: str,
    rank: int = 0,
    size: int = 1,
    max_bad_rows: int = MAX_BAD_ROWS,
    report: Callable[[str], None] = print,
) -> None:
    """Prepares the units of rank `rank` that are missing in the folder `cache`. report: prints lines of text.

    Raises DataError for a source that cannot be read, more than max_bad_rows bad rows, and a full disk."""
    units = list_units(source, UNIT_BYTES)
    done = list_cache(cache)
    known = find_manifest(cache)
    if rank == 0 and known and known["units"] != folders_of(units):
        report(f"{source} has changed since it was prepared in {cache}: preparing it again")
    bad = BadRows()
    for unit in units[rank::size]:
        if folder_of(unit) not in done:
            start = time.perf_counter()
            count = write_unit(unit, cache, source, max_bad_rows, bad)
            bad += BadRows(**count["bad"])
            rows = sum(count["train"].values()) + sum(count["valid"].values())
            rate = rows / (time.perf_counter() - start)
            report(f"prepared part {unit.number + 1} of {len(units)}: {unit}, {rows:,} rows, {rate:,.0f} rows/s")


def finish(source: str, cache: str, max_bad_rows: int = MAX_BAD_ROWS, report: Callable[[str], None] = print) -> dict:
    """Merges the counts of all units into the manifest and returns it. To be called by one rank, after all have
    prepared.

    Raises DataError if a unit is missing, if there are too many bad rows, or no rows to train on or to hold out."""
    units = list_units(source, UNIT_BYTES)
    lacking = set(folders_of(units)) - list_cache(cache)
    if lacking:
        raise DataError(
            f"data.cache={cache}: {len(lacking)} of {len(units)} prepared parts are missing; it must be a folder that "
            "all ranks share"
        )
    known = find_manifest(cache)
    manifest = known if known and known["units"] == folders_of(units) else join_counts(source, units, cache)
    bad = BadRows(**manifest["bad"])
    bad.check(source, max_bad_rows)
    train, valid = (sum(manifest[split].values()) for split in ("train", "valid"))
    if not train or not valid:
        raise DataError(
            f"data.path={source}: {train} good rows to train on and {valid} to hold out, at least one of each is "
            f"needed; expected {EXPECTED}"
        )
    if bad.rows:
        report(f"{source}: {bad}")
    if manifest is not known:
        missing, values = sum(manifest["missing"]), (train + valid) * len(manifest["missing"])
        report(f"{source}: {train:,} rows to train on, {valid:,} held out, {missing:,} of {values:,} values missing")
        write_json(manifest, cache, "manifest.json")
        remove_leftovers(cache, manifest["units"])
    return manifest


def join_counts(source: str, units: list[Unit], cache: str) -> dict:
    """The manifest of the prepared `units`."""
    counts = [read_json(cache, name, "unit.json") for name in folders_of(units)]
    registers = (np.load(os.path.join(cache, name, "registers.npy")) for name in folders_of(units))
    return {
        "version": VERSION,
        "group_rows": GROUP_ROWS,
        "source": absolute(source),
        "files": [{"path": u.path, "size": u.size, "mtime_ns": u.mtime_ns} for u in units if u.begin == 0],
        "units": folders_of(units),
        **{split: join_files(units, [count[split] for count in counts]) for split in ("train", "valid")},
        "bad": vars(sum((BadRows(**count["bad"]) for count in counts), BadRows())),
        "missing": np.sum([count["missing"] for count in counts], axis=0).tolist(),
        "distinct": [estimate(field) for field in functools.reduce(np.maximum, registers)],
    }


def join_files(units: list[Unit], files: list[dict[str, int]]) -> dict[str, int]:
    """Path in the cache -> rows, for the files of all units. files: name -> rows, for each unit."""
    return {f"{folder_of(unit)}/{name}": rows for unit, part in zip(units, files) for name, rows in part.items()}


def write_unit(unit: Unit, cache: str, source: str, max_bad_rows: int, bad: BadRows) -> dict:
    """Prepares one unit and returns its counts; removes its files if it fails. bad: bad rows of earlier units."""
    part = os.path.join(cache, f"{folder_of(unit)}.part-{socket.gethostname()}-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)  # a restarted container may have the same host name and process id
    try:
        os.makedirs(part)
        parser = Parser(unit)
        rows = write_rows(parser, part, lambda: (bad + parser.bad).check(source, max_bad_rows))
        count = {"unit": asdict(unit), **rows, "bad": vars(parser.bad), "missing": parser.missing.tolist()}
        np.save(os.path.join(part, "registers.npy"), parser.registers)
        write_json(count, part, "unit.json")
        publish(part, os.path.join(cache, folder_of(unit)))
        return count
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(explain(error, unit, cache)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_rows(parser: Parser, part: str, check: Callable[[], None]) -> dict:
    """Writes the unit's good rows. Returns rows by file name for each split. check: called after each block."""
    rng = np.random.default_rng((SPLIT_SEED, parser.unit.number))
    with RowWriter(part, "train", rng.spawn(1)[0]) as train, RowWriter(part, "valid", rng.spawn(1)[0]) as valid:
        for block in parser:
            is_valid = rng.random(len(block)) < VALID_SHARE
            train.add(block.filter(pa.array(~is_valid)))
            valid.add(block.filter(pa.array(is_valid)))
            check()
        check()
    return {"train": train.files, "valid": valid.files}


class RowWriter:
    """Writes rows to Parquet files of FILE_ROWS rows in groups of GROUP_ROWS, shuffled within blocks of SHUFFLE_ROWS;
    the last file, block and group may be smaller.

    files  name -> number of rows written to the file so far
    """

    def __init__(self, folder: str, name: str, rng: np.random.Generator):
        self._folder, self._name, self._rng = folder, name, rng
        self._file = None
        self._waiting = SCHEMA.empty_table()
        self.files = {}

    def add(self, block: pa.Table) -> None:
        """Adds a block with schema SCHEMA."""
        self._waiting = pa.concat_tables([self._waiting, block])
        while len(self._waiting) >= SHUFFLE_ROWS:
            self._write(SHUFFLE_ROWS)

    def _write(self, rows: int) -> None:
        if self._file is None:
            self._open()
        shuffled = self._waiting.combine_chunks().take(pa.array(self._rng.permutation(len(self._waiting))))
        self._file.write_table(shuffled.slice(0, rows), row_group_size=GROUP_ROWS)
        self._waiting = shuffled.slice(rows)
        name = next(reversed(self.files))
        self.files[name] += rows
        if self.files[name] == FILE_ROWS:
            self._close()

    def _open(self) -> None:
        name = f"{self._name}-{len(self.files):03d}.parquet"
        self._file = pq.ParquetWriter(os.path.join(self._folder, name), SCHEMA, compression="zstd")
        self.files[name] = 0

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, error, *_) -> None:
        try:
            if error is None and len(self._waiting):
                self._write(len(self._waiting))
        finally:
            self._close()


def folder_of(unit: Unit) -> str:
    """Folder name of a unit: its number, and a hash of everything that determines its content."""
    identity = json.dumps([VERSION, GROUP_ROWS, SHUFFLE_ROWS, FILE_ROWS, *asdict(unit).values()])
    return f"{unit.number:05d}-{xxhash.xxh3_64_hexdigest(identity.encode())}"


def folders_of(units: list[Unit]) -> list[str]:
    """Folder names of the units."""
    return [folder_of(unit) for unit in units]


def list_cache(cache: str) -> set[str]:
    """Names in the folder `cache`, which is created if it is missing. Listing makes NFS refresh its cache.

    Raises DataError if it cannot be created."""
    try:
        os.makedirs(cache, exist_ok=True)
        return set(os.listdir(cache))
    except OSError as error:
        cure = "set data.cache to a folder that is writable"
        raise DataError(f"data.cache={cache}: {error.strerror}; {cure}") from error


def publish(part: str, final: str) -> None:
    """Renames a complete unit to its final name, unless another job has already written it."""
    try:
        os.rename(part, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def explain(error: Exception, unit: Unit, cache: str) -> str:
    """The error message for a unit that cannot be prepared."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(cache).free
        return (
            f"data.cache={cache}: no space left while preparing {unit}, {free >> 20:,} MiB are free and the prepared "
            "data can be as large as the text; set data.cache to a folder with room; finished parts are kept"
        )
    return f"data.path: {unit} cannot be prepared in {cache}: {error}; expected {EXPECTED}"


def remove_leftovers(cache: str, units: list[str]) -> None:
    """Removes units that the manifest does not list: of an older source, or unfinished."""
    for entry in os.scandir(cache):
        if not UNIT_FOLDER.fullmatch(entry.name) or entry.name in units:
            continue
        if ".part-" not in entry.name or time.time() - entry.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(entry.path, ignore_errors=True)


def find_manifest(cache: str) -> dict | None:
    """The manifest of a prepared folder; None if it is missing or of another version."""
    if not os.path.isfile(os.path.join(cache, "manifest.json")):
        return None
    manifest = read_json(cache, "manifest.json")
    return manifest if manifest["version"] == VERSION else None


def read_json(*path: str) -> dict:
    """The content of the file at the joined path."""
    with open(os.path.join(*path)) as file:
        return json.load(file)


def write_json(content: dict, *path: str) -> None:
    """Writes `content` to the joined path atomically."""
    final = os.path.join(*path)
    part = f"{final}.part-{socket.gethostname()}-{os.getpid()}"
    with open(part, "w") as file:
        json.dump(content, file, indent=1)
    os.replace(part, final)


def main(arguments: list[str]) -> None:
    """SOURCE [CACHE]: prepares the source in this process."""
    if len(arguments) not in (1, 2):
        sys.exit("usage: python -m hetmpi.data.prepare SOURCE [CACHE]")
    source = arguments[0]
    cache = arguments[1] if len(arguments) == 2 else default_cache(source)
    try:
        prepare(source, cache)
        manifest = finish(source, cache)
    except DataError as error:
        sys.exit(f"hetmpi: {error}")
    train, valid = (sum(manifest[split].values()) for split in ("train", "valid"))
    distinct = sum(manifest["distinct"])
    print(f"{cache}: {train:,} rows to train on, {valid:,} held out; about {distinct:,} distinct values")


if __name__ == "__main__":
    main(sys.argv[1:])
