"""Prepares tabular data once: writes hashed, split and shuffled Parquet files, from which ranks read the rows they
need.

The source is divided into units (files.py); rank r reads units r, r + size, …, and deals their rows to buckets
(buckets.py); then it writes buckets r, r + size, …. So the rows are shuffled over all files, training and held-out
rows each: any row group is a random sample. With data.shuffle=false the rows of a unit are written in their order.

Each unit and each bucket is written to its own folder, which is renamed when it is complete: so a folder with such a
name is complete, and an interrupted preparation continues with what is missing. The name contains a hash of the file's
path, size and time and of the reading rules: a changed file has other units. No content depends on the number of ranks.

    <folder>/manifest.json                       written last: reading rules, counts over all units
    <folder>/<number>-<hash>/unit.json           counts of one unit
                            /registers.npy       (number of columns, NUM_REGISTERS) uint8, see distinct.py
    <folder>/pieces-<number>-<hash>/*.arrow      its rows, dealt to buckets; removed at the end
    <folder>/bucket-<number>-<hash>/files.json   rows of each file; with data.shuffle=false in unit.json
                                   /train-*.parquet   Reading.schema(), groups of GROUP_ROWS; with data.shuffle=false
                                                      in the unit's folder
                                   /valid-*.parquet   the held-out rows, in the same form
                                   /*.parquet.sums    checksums of each
    <folder>/registers.npy                       merged over all units
    <folder>/last-<number>-<hash>.json           last values of a column in one unit, see last.py
    <folder>/counts-<hash>.npy                   distinct training values of a column, see vocabulary.py

All files that remain have checksums (checked.py). A file that is not as it was written is refused, on the rank that
reads it. Only the manifest is written anew, as the other files have all that is in it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import pyarrow as pa
import xxhash

from hetmpi import _C
from hetmpi.bounded_file import open_file
from hetmpi.data.checked import Damaged, load_array, read_json, save_array, write_json
from hetmpi.data.distinct import NUM_REGISTERS, estimate, observe
from hetmpi.data.files import DataError, absolute, first_line
from hetmpi.data.tabular import buckets, writer
from hetmpi.data.tabular.buckets import PieceWriter, num_buckets_of, shuffled
from hetmpi.data.tabular.convert import NO_INTEGER, no_value
from hetmpi.data.tabular.files import PARQUET, Unit
from hetmpi.data.tabular.held_out import label_ranges
from hetmpi.data.tabular.parquet import ParquetRows
from hetmpi.data.tabular.reading import INTEGER, BadRows, Reading, Rows
from hetmpi.data.tabular.rules import DROP, NUMBER, Rule
from hetmpi.data.tabular.scaling import Moments, join, log_of
from hetmpi.data.tabular.text import TextRows
from hetmpi.data.tabular.writer import RowWriter
from hetmpi.errors import UserError, one_line, printable

VERSION = 5  # of the prepared format; data of another version is prepared again
UNIT_BYTES = 256 << 20
SPLIT_SEED = 2022  # fixed, so that all runs hold out the same rows
BUCKET_SEED = 2023
TRAIN, VALID = SPLITS = "train", "valid"
ABANDONED_S = 3600  # an unfinished unit unchanged for this time belongs to a process that died
REPORT_S = 5.0
PIECES, BUCKET = "pieces-", "bucket-"
UNIT_FOLDER = re.compile(rf"({PIECES}|{BUCKET})?\d{{5,}}-[0-9a-f]{{16}}(\.part-.*)?")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_MEMORY = "this process got no more memory: is there a limit (ulimit -v, a container's, Slurm's --mem)?"
DAMAGES = (
    errno.ENOENT,
    errno.EIO,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EINVAL,
)  # a file that was there, and could be read


@dataclass
class PrepareJob:
    """One preparation: the units of a source, read by the same rules, into a folder.

    source: for messages. types, choices: as Layout's. rules: those that may drop further columns of other files.
    report: prints lines of text. first: the first file, for messages, if it is not that of the first unit; the units
    are then a part of a stream, which may have no rows to hold out, no positive labels, or no rows at all. shuffle:
    whether the rows are shuffled over all units."""

    source: str
    units: list[Unit]
    reading: Reading
    folder: str
    types: dict[str, str]
    rules: Sequence[Rule] = ()
    max_bad_rows: int = 0
    report: Callable[[str], None] = print
    first: str | None = None
    shuffle: bool = True
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @functools.cached_property
    def names(self) -> list[str]:
        """Folder names of the units: the number, and a hash of everything that determines the content."""
        sizes = writer.GROUP_ROWS, writer.FILE_ROWS, buckets.BLOCK_BYTES, buckets.BATCH_BYTES, self.num_buckets
        rules = [VERSION, *sizes, self.reading.to_json()]
        return [numbered(i, [*rules, *asdict(unit).values()]) for i, unit in enumerate(self.units)]

    @functools.cached_property
    def num_buckets(self) -> int:
        """0 without shuffling."""
        divided = {column.name for column in self.reading.columns if column.separator is not None}
        return num_buckets_of(self.units, divided) if self.shuffle else 0

    @functools.cached_property
    def bucket_names(self) -> list[str]:
        """Folder names of the buckets."""
        return [BUCKET + numbered(i, self.names) for i in range(self.num_buckets)]

    @property
    def parts(self) -> list[str]:
        """Names of the folders that hold the rows."""
        return self.bucket_names if self.shuffle else self.names


def numbered(number: int, identity: list) -> str:
    """The name of a folder whose content `identity` determines."""
    return f"{number:05d}-{xxhash.xxh3_64_hexdigest(json.dumps(identity).encode())}"


def rows_of(unit: Unit, reading: Reading) -> TextRows | ParquetRows:
    """The rows of a unit, in order."""
    return (ParquetRows if unit.form == PARQUET else TextRows)(unit, reading)


def check_names(job: PrepareJob, unit: Unit, names: Sequence[str]) -> None:
    """Raises DataError for columns that the first file has not, unless a rule drops them."""
    rules = {
        name: next((rule for rule in job.rules if rule.matches(name)), None) for name in set(names) - set(job.types)
    }
    further = [
        name for name in names if name in rules and not (rules[name] and rules[name].settings.get("kind") == DROP)
    ]
    if further:
        first = job.first or job.units[0].path
        raise DataError(
            f"data.path: {unit.path} has {printable(', '.join(further))[:500]}, which {first} has not: all "
            "files need the same columns, in any order: select the files by a glob, or remove the column"
        )


def prepare(job: PrepareJob, rank: int = 0, size: int = 1) -> None:
    """Reads the units of rank `rank` that are missing in the folder.

    Raises DataError for a source that cannot be read, more than max_bad_rows bad rows, and a full disk."""
    done = list_folder(job.folder)
    known = find_manifest(job.folder)
    if rank == 0 and known and known["units"] != job.names:
        job.report(f"{job.source} has changed since it was prepared in {job.folder}: preparing it again")
    bad = BadRows()
    needs_pieces = not done.issuperset(job.parts)
    for unit, name in list(zip(job.units, job.names))[rank::size]:
        if name not in done or (needs_pieces and job.shuffle and PIECES + name not in done):
            start = time.perf_counter()
            count = write_unit(job, unit, name, bad)
            bad += BadRows(**count["bad"])
            rate = count["rows"] / (time.perf_counter() - start)
            job.report(
                f"prepared part {unit.number + 1} of {len(job.units)}: {unit}, {count['rows']:,} rows, {rate:,.0f} "
                "rows/s"
            )


def shuffle(job: PrepareJob, rank: int = 0, size: int = 1) -> None:
    """Writes the buckets of rank `rank` that are missing in the folder. To be called after all ranks have prepared.

    Raises DataError if a unit is missing, and for a full disk."""
    done = list_folder(job.folder)
    if not done.issuperset(job.bucket_names):
        check_complete(job, [PIECES + name for name in job.names])
    last = time.monotonic()
    for number, name in list(enumerate(job.bucket_names))[rank::size]:
        if name not in done:
            write_bucket(job, number, name)
        if time.monotonic() - last > REPORT_S:
            job.report(f"shuffled part {number + 1} of {job.num_buckets}")
            last = time.monotonic()


def check_complete(job: PrepareJob, names: list[str]) -> None:
    """Raises DataError unless the folder has all of these, or all parts, after which other jobs remove pieces."""
    done = list_folder(job.folder)
    lacking = set(names) - done
    if lacking and not done.issuperset(job.parts):
        raise DataError(
            f"data.cache={job.folder}: {len(lacking)} of {len(names)} prepared parts are missing; it must be a "
            "folder that all ranks share"
        )


def finish(job: PrepareJob) -> dict:
    """Merges the counts of all units into the manifest and returns it. To be called by one rank, after all have
    prepared and shuffled.

    Raises DataError if a part is missing, if there are too many bad rows, or no rows to train on or to hold out."""
    check_complete(job, [*job.names, *job.bucket_names])
    known = find_manifest(job.folder)
    manifest = known if known and known["units"] == job.names else join_counts(job)
    bad = BadRows(**manifest["bad"])
    bad.check(job.source, job.max_bad_rows)
    train, valid = (sum(manifest[split].values()) for split in SPLITS)
    is_part = job.first is not None
    if not is_part and (not train or not valid):
        raise DataError(
            f"data.path={job.source}: {train:,} good rows to train on and {valid:,} to hold out by data.valid, at "
            "least one of each is needed"
        )
    if not is_part and job.reading.positive is not None:
        check_positives(job, manifest)
    if bad.rows:
        job.report(f"{job.source}: {bad}")
    if manifest is not known:
        missing, values = sum(manifest["missing"]), (train + valid) * len(manifest["missing"])
        job.report(
            f"{job.source}: {train:,} rows{'' if is_part else f' to train on, {valid:,} held out'}, {missing:,} of "
            f"{values:,} values missing"
        )
        write_json(manifest, job.folder, "manifest.json")
        remove_leftovers(job.folder, {*job.names, *job.parts})
    for name in {PIECES + name for name in job.names} & list_folder(job.folder):  # written after another job's end
        shutil.rmtree(os.path.join(job.folder, name), ignore_errors=True)
    return manifest


def prepare_together(job: PrepareJob, rank: int, size: int, barrier: Callable[[], None]) -> None:
    """Prepares all units, rank `rank` of `size` its share, and writes the manifest. Collective: `barrier` waits for all
    ranks. Raises DataError, on the rank that detects it, as prepare and finish."""
    prepare(job, rank, size)
    barrier()
    if job.shuffle:
        shuffle(job, rank, size)
        barrier()
    if rank == 0:
        with reading_prepared(job.folder):
            finish(job)
    barrier()


def check_positives(job: PrepareJob, manifest: dict) -> None:
    """Raises DataError for a label that is 1 in no training row."""
    ranges = label_ranges(job.folder, manifest["train"], len(job.reading.labels))
    for name, found in zip(job.reading.labels, ranges):
        if found is None or found[1] <= 0:
            which = f" of {one_line(name)}" if len(ranges) > 1 else ""
            raise DataError(
                f"data.path={job.source}: no training label{which} is one of data.positive={list(job.reading.positive)}"
            )


def join_counts(job: PrepareJob) -> dict:
    """The manifest of the prepared units."""
    counts = [read_json(job.folder, name, "unit.json") for name in job.names]
    registers = (load_array(os.path.join(job.folder, name, "registers.npy")) for name in job.names)
    merged = functools.reduce(np.maximum, registers)
    save_array(os.path.join(job.folder, "registers.npy"), merged)
    sources = {unit.path: {"path": unit.path, "size": unit.size, "mtime_ns": unit.mtime_ns} for unit in job.units}
    return {
        "version": VERSION,
        "group_rows": writer.GROUP_ROWS,
        "shuffle": job.shuffle,
        "source": absolute(job.source),
        "reading": job.reading.to_json(),
        "types": job.types,
        "choices": job.choices,
        "files": list(sources.values()),
        "units": job.names,
        **{split: join_files(job.parts, [rows[split] for rows in files_of(job, counts)]) for split in SPLITS},
        "bad": vars(sum((BadRows(**count["bad"]) for count in counts), BadRows())),
        "missing": np.sum([count["missing"] for count in counts], axis=0, dtype=int).tolist(),
        "values": np.sum([count["values"] for count in counts], axis=0, dtype=int).tolist(),
        "distinct": [estimate(one) for one in merged],
        **{
            name: [functools.reduce(join, one) for one in zip(*(count[name] for count in counts))]
            for name in ("moments", "log_moments")
        },
        "largest": [largest_of(one) for one in zip(*(count["largest"] for count in counts))],
    }


def files_of(job: PrepareJob, counts: list[dict]) -> list[dict]:
    """For each part and split: name -> rows. counts: of the units."""
    return [read_json(job.folder, name, "files.json") for name in job.bucket_names] if job.shuffle else counts


def largest_of(units: Iterable[tuple[int, int]]) -> tuple[int, int, int]:
    """The largest value, the position of its unit, and its number therein. units: value and number."""
    return max(((value, i, number) for i, (value, number) in enumerate(units)), key=lambda one: one[0])


def place_of(folder: str, manifest: dict, unit: int, number: int) -> str:
    """File and line or row of a value, as far as the file is still there."""
    found = Unit(**read_json(folder, manifest["units"][unit], "unit.json")["unit"])
    try:
        return rows_of(found, Reading.from_json(manifest["reading"])).place(number)
    except (OSError, DataError):
        return str(found)


def join_files(names: list[str], files: list[dict[str, int]]) -> dict[str, int]:
    """Path in the folder -> rows, for the files of all parts. files: name -> rows, for each part."""
    return {f"{part}/{name}": rows for part, of_part in zip(names, files) for name, rows in of_part.items()}


def write_unit(job: PrepareJob, unit: Unit, name: str, bad: BadRows) -> dict:
    """Prepares one unit and returns its counts, "rows" among them; removes its files if it fails. bad: bad rows of
    earlier units."""
    with new_folder(job, name, str(unit)) as folder:
        tally = UnitStats(job.reading)
        if job.shuffle:
            with new_folder(job, PIECES + name, str(unit)) as pieces:
                write_rows(job, unit, piece_writers(job, unit, pieces), tally, bad)
            files = {}
        else:
            writers = [RowWriter(folder, split, job.reading.schema()) for split in SPLITS]
            write_rows(job, unit, writers, tally, bad)
            files = {split: to.files for split, to in zip(SPLITS, writers)}
        count = {"unit": asdict(unit), **files, **tally.to_json()}
        save_array(os.path.join(folder, "registers.npy"), tally.registers)
        write_json(count, folder, "unit.json")
    return count


@contextlib.contextmanager
def new_folder(job: PrepareJob, name: str, what: str) -> Iterator[str]:
    """A context that publishes the folder that it gives as `name`, or removes it if it fails. what: for messages.
    Raises DataError for what cannot be written."""
    part = os.path.join(job.folder, f"{name}.part-{socket.gethostname()}-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)  # a restarted container may have the same host name and process id
    try:
        os.makedirs(part)
        yield part
        publish(part, os.path.join(job.folder, name))
    except (OSError, pa.ArrowException, MemoryError) as error:
        raise DataError(explain(error, what, job.folder)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def piece_writers(job: PrepareJob, unit: Unit, folder: str) -> list[PieceWriter]:
    """Those of the two splits."""
    schema, rngs = job.reading.schema(), np.random.default_rng((BUCKET_SEED, unit.number)).spawn(len(SPLITS))
    paths = (piece_path(folder, split) for split in SPLITS)
    return [PieceWriter(path, schema, job.num_buckets, rng) for path, rng in zip(paths, rngs)]


def piece_path(folder: str, split: str) -> str:
    return os.path.join(folder, f"{split}.arrow")


def write_rows(
    job: PrepareJob, unit: Unit, writers: Sequence[PieceWriter | RowWriter], tally: UnitStats, bad: BadRows
) -> None:
    """Writes the unit's good rows to the writers of the two splits."""
    rng = np.random.default_rng((SPLIT_SEED, unit.number))
    progress = Progress(job, unit)
    with contextlib.ExitStack() as stack:
        train, valid = map(stack.enter_context, writers)
        source = rows_of(unit, job.reading)
        check_names(job, unit, source.names)
        for rows in source:
            for to, table in zip((train, valid), divide(rows.table, unit, job.reading, rng)):
                to.add(table)
                tally.add(table, is_train=to is train)
            tally.check(rows)
            (bad + tally.bad).check(job.source, job.max_bad_rows)
            progress.add(len(rows.table))


def write_bucket(job: PrepareJob, number: int, name: str) -> None:
    """Writes one bucket, of the pieces of all units, unless another job has written it, which removes the pieces."""
    try:
        with new_folder(job, name, f"part {number + 1} of {job.num_buckets}") as folder:
            rng = np.random.default_rng((BUCKET_SEED, number, job.num_buckets))
            files = {split: write_split(job, number, split, folder, rng) for split in SPLITS}
            write_json(files, folder, "files.json")
    except DataError as error:
        if not isinstance(error.__cause__, FileNotFoundError) or name not in list_folder(job.folder):
            raise


def write_split(job: PrepareJob, bucket: int, split: str, folder: str, rng: np.random.Generator) -> dict[str, int]:
    """Writes the rows of a bucket in one split. Returns rows by file name."""
    paths = [piece_path(os.path.join(job.folder, PIECES + name), split) for name in job.names]
    with RowWriter(folder, split, job.reading.schema()) as rows:
        for block in shuffled(paths, bucket, job.num_buckets, job.reading.schema(), rng):
            rows.add(block)
    return rows.files


def divide(table: pa.Table, unit: Unit, reading: Reading, rng: np.random.Generator) -> tuple[pa.Table, pa.Table]:
    """The rows to train on, and those held out."""
    if unit.is_valid:
        return table.slice(0, 0), table
    if reading.split:
        is_valid = table["is_valid"].combine_chunks()
        table = table.drop_columns(["is_valid"])
    elif reading.share:
        is_valid = pa.array(rng.random(len(table)) < reading.share)
    else:
        return table, table.slice(0, 0)
    return table.filter(pa.compute.invert(is_valid)), table.filter(is_valid)


class Progress:
    """Reports a long unit every REPORT_S seconds."""

    def __init__(self, job: PrepareJob, unit: Unit):
        self._job, self._unit, self._rows = job, unit, 0
        self._begin = self._last = time.monotonic()

    def add(self, rows: int):
        self._rows += rows
        now = time.monotonic()
        if now - self._last > REPORT_S:
            rate = self._rows / (now - self._begin)
            part = f"part {self._unit.number + 1} of {len(self._job.units)}"
            self._job.report(f"preparing {part}: {self._rows:,} rows, {rate:,.0f} rows/s")
            self._last = now


class UnitStats:
    """Counts over the rows of a unit.

    rows       their number
    missing    (C,) missing values, rows without values of lists
    values     (C,) values of lists, rows of others
    registers  (C, NUM_REGISTERS) uint8, for the number of distinct values of ids
    moments    (C,) of the training rows' numbers; log_moments: of their log_of()
    largest    (C,) the largest of the integers that are keys as they are, and its number in the unit"""

    def __init__(self, reading: Reading):
        num = len(reading.columns)
        self.reading, self.bad, self.rows = reading, BadRows(), 0
        self.missing, self.values = np.zeros(num, np.int64), np.zeros(num, np.int64)
        self.registers = np.zeros((num, NUM_REGISTERS), np.uint8)
        self.moments, self.log_moments = [Moments()] * num, [Moments()] * num
        self.largest = [(NO_INTEGER, 0)] * num
        self._none = [NO_INTEGER if c.as_ == INTEGER else no_value(c.seed) for c in reading.columns]

    def add(self, table: pa.Table, is_train: bool):
        """Counts good rows."""
        self.rows += len(table)
        for i, column in enumerate(self.reading.columns):
            array = table.column(f"c{i}").combine_chunks()
            if column.is_list:
                self.missing[i] += np.count_nonzero(np.asarray(pa.compute.list_value_length(array)) == 0)
                array = array.flatten()
            values = array.to_numpy()
            self.values[i] += len(values)
            if column.as_ == NUMBER:
                present = values[~np.isnan(values)]
                self.missing[i] += len(values) - len(present)
                if is_train and len(present):
                    self.moments[i] = join(self.moments[i], Moments.of(present))
                    self.log_moments[i] = join(self.log_moments[i], Moments.of(log_of(present)))
            else:
                if not column.is_list:
                    self.missing[i] += np.count_nonzero(values == self._none[i])
                observe(self.registers[i], values if column.as_ != INTEGER else _C.hash_integers(values, 0))

    def check(self, rows: Rows):
        """Counts bad rows, and finds the largest integers."""
        self.bad += rows.bad
        for i, column in enumerate(self.reading.columns):
            if column.as_ == INTEGER:
                array = rows.table.column(f"c{i}").combine_chunks()
                values = array.flatten().to_numpy() if column.is_list else array.to_numpy()
                if len(values) and values.max() > self.largest[i][0]:
                    at = int(values.argmax())
                    row = int(np.searchsorted(array.offsets.to_numpy(), at, "right")) - 1 if column.is_list else at
                    self.largest[i] = (int(values[at]), rows.number(row))

    def to_json(self) -> dict:
        counts = {name: getattr(self, name).tolist() for name in ("missing", "values")}
        moments = {"moments": self.moments, "log_moments": self.log_moments}
        return {"rows": self.rows, **counts, **moments, "bad": vars(self.bad), "largest": self.largest}


def list_folder(folder: str) -> set[str]:
    """Names in the folder, which is created if it is missing. Listing makes NFS refresh its cache.

    Raises DataError if it cannot be created."""
    try:
        os.makedirs(folder, exist_ok=True)
        return set(os.listdir(folder))
    except OSError as error:
        cure = "set data.cache to a folder that is writable"
        raise DataError(f"data.cache={folder}: {error.strerror}; {cure}") from error


def publish(part: str, final: str) -> None:
    """Renames a complete unit to its final name, unless another job has already written it."""
    try:
        os.rename(part, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def explain(error: Exception, what: str, folder: str) -> str:
    """The error message for a unit or a bucket that cannot be prepared."""
    if getattr(error, "errno", None) in NO_SPACE:
        free = shutil.disk_usage(folder).free
        return (
            f"data.cache={folder}: no space left while preparing {what}, {free >> 20:,} MiB are free; the prepared "
            "data can be as large as the text, and several times that while they are shuffled; set data.cache to a "
            "folder with room; finished parts are kept"
        )
    if isinstance(error, MemoryError):
        return f"data.path: {what} cannot be prepared: {NO_MEMORY}"
    return f"data.path: {what} cannot be prepared in {folder}: {first_line(error)}"


def remove_leftovers(folder: str, needed: set[str]) -> None:
    """Removes other units and buckets than `needed`, of an older source or unfinished, pieces, and counts of older
    units. Counts that are younger than all that is needed stay: another job has made them of the same units."""
    entries = list(os.scandir(folder))
    newest = max(entry.stat().st_mtime_ns for entry in entries if entry.name in needed)
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):  # another job has removed or renamed it
            if entry.name.startswith("counts-") and ".part-" not in entry.name and entry.stat().st_mtime_ns < newest:
                os.remove(entry.path)
            if not UNIT_FOLDER.fullmatch(entry.name) or entry.name in needed:
                continue
            if ".part-" not in entry.name or time.time() - entry.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(entry.path, ignore_errors=True)


@contextlib.contextmanager
def enough_memory(path: str):
    """A context that turns memory that is refused while a source is read into a DataError."""
    try:
        yield
    except MemoryError as error:
        raise DataError(f"data.path={path} cannot be read: {NO_MEMORY}") from error


@contextlib.contextmanager
def reading_prepared(folder: str):
    """A context that turns errors about prepared data that cannot be read into a DataError."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        if error.errno not in (None, *DAMAGES):
            raise DataError(f"data.cache: {error.filename or folder}: {first_line(error)}") from error
        raise damaged(folder, error) from error
    except MemoryError as error:
        raise DataError(f"data.cache: the prepared data in {folder} cannot be read: {NO_MEMORY}") from error
    except (ValueError, KeyError) as error:  # Arrow's are of these kinds
        raise damaged(folder, error) from error


def damaged(folder: str, error: Exception) -> DataError:
    return DataError(
        f"data.cache: the prepared data in {folder} are damaged: {first_line(error)}: remove the folder and give the "
        "raw files, which are prepared again"
    )


def find_manifest(folder: str) -> dict | None:
    """The manifest of a prepared folder; None if it is missing, damaged or of another version."""
    try:
        return read_manifest(folder)
    except (OSError, Damaged):
        return None


def read_manifest(folder: str) -> dict | None:
    """The manifest of a prepared folder; None if it is of another version. Raises Damaged, and OSError."""
    path = os.path.join(folder, "manifest.json")
    if version_of(path) not in (None, VERSION):
        return None
    return read_json(path)


def version_of(path: str):
    """The version in a manifest, which was without a checksum up to 3; None if it has none."""
    try:
        with open_file(path) as file:
            return json.load(file)["version"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
