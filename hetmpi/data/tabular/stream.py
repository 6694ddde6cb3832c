"""Stream: the files of a folder, which come one after the other, as one sequence of samples (data.follow=true).

Files are read in the order of their names. A file is complete when it has not changed for SETTLE_S seconds; a file
named END says that no more will come. Each file is prepared as any other data (prepare.py), in a folder of its own in
data.cache; this folder is removed when the file has been removed.

The first file decides about the columns: kinds, transforms, moments. A checkpoint keeps these decisions, the name of
the file whose samples come next, and the position of its first sample. A run that resumes it needs no earlier file.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from hetmpi.data.batch import Samples, concatenate
from hetmpi.data.files import DataError, absolute, first_line
from hetmpi.data.source import check_slice
from hetmpi.data.tabular.encoder import Encoder
from hetmpi.data.tabular.encodings import IdEncodings
from hetmpi.data.tabular.files import form_of, list_units, names_in
from hetmpi.data.tabular.prepare import (
    UNIT_BYTES,
    PrepareJob,
    enough_memory,
    prepare_together,
    read_manifest,
    reading_prepared,
)
from hetmpi.data.tabular.rules import AUTO, ID, Column, resolve
from hetmpi.data.tabular.split import Split
from hetmpi.errors import UserError, one_line

END = "_END"  # name of the file that ends a stream
ENTRY = "stream"  # in a checkpoint's manifest
SETTLE_S = 5.0
POLL_S = 1.0
DEFAULT_VALID = 0.1  # of Tabular


@dataclass(frozen=True)
class Ranks:
    """Those that read a stream together. barrier(): waits for all. from_first(call): what `call` returns on the first
    rank; its UserError is raised on all."""

    rank: int
    size: int
    barrier: Callable[[], None]
    from_first: Callable[[Callable[[], Any]], Any]


class StreamFile:
    """A file of a stream, whose samples have the positions [first, end). Thread-safe."""

    def __init__(self, name: str, first: int, split: Split, seed: int, cached_groups: int):
        self.name, self.first, self.end, self._split = name, first, first + split.num_samples, split
        self._seed = seed, xxhash.xxh3_64_intdigest(name.encode(errors="surrogateescape"))
        self._shuffled = split.order(np.random.default_rng(self._seed).permutation(split.num_groups))
        self._stored = split.order(np.arange(split.num_groups))
        self._permutation = functools.lru_cache(cached_groups)(self._draw)

    def __len__(self) -> int:
        return self.end - self.first

    def shuffled(self, start: int, stop: int) -> list[Samples]:
        """Samples at places [start, stop) of an order drawn from the seed and the file's name."""
        return self._split.read(self._shuffled, start, stop, self._permutation)

    def stored(self, start: int, stop: int) -> list[Samples]:
        """Samples at places [start, stop) in the order of the prepared file."""
        return self._split.read(self._stored, start, stop, lambda group: np.arange(self._split.rows[group]))

    def _draw(self, group: int) -> np.ndarray:
        return np.random.default_rng((*self._seed, group)).permutation(self._split.rows[group])


class Stream:
    """The stream of a Tabular (source.py), which has the settings.

    num_samples  of all files that were opened, those before a checkpoint included
    file         name of the last one that was opened
    evaluated    name of the last one that a checkpoint says was evaluated; empty for none"""

    def __init__(self, source):
        self._source, self._root = source, absolute(source.path)
        self.num_samples, self.file, self.evaluated = 0, "", ""
        self._files: list[StreamFile] = []  # of which not all samples are trained on, and the last one
        self._types: Mapping[str, Any] = {}
        self._first = self._parent = ""
        self._seen: dict[str, tuple[int, int, float]] = {}  # name -> size, time of change, and since when, of ours
        self._known: set[str] | None = None  # names up to `file` that need no more notice
        self._status: tuple[int, int] | None = None  # size and time of change of `file`

    def open(self, ranks: Ranks, resumed: tuple[Encoder, Mapping[str, Any], int] | None) -> None:
        """Opens the first file, or that in which a checkpoint was saved. resumed: its encoder, state() and the number
        of samples trained on. Collective. Raises DataError."""
        if resumed is not None:
            encoder, state, samples = resumed
            self._source.take(encoder)
            self._source.label_kind, self._parent = encoder.reading.label_kind, self._source.folder_of(encoder.reading)
            self._source.num_train, self._source.num_valid = None, 0
            self._types, self._first = dict.fromkeys(state["columns"]), "the first file"
            self.file, self.evaluated, self.num_samples = state["file"], state["evaluated"], state["first"]
            if samples == state["end"]:
                self.num_samples = samples
            else:
                self._reopen(state, ranks)
            return
        while not self._files:
            self.add(ranks.from_first(self._next_at_once), ranks)

    def look(self) -> str | None:
        """The name of the next file, END after the last one, None if neither is there yet. For the first rank. Raises
        DataError."""
        is_ended = os.path.exists(os.path.join(self._root, END))  # before the list: files come before it
        names = self._names()
        self._notice(names)
        later = [name for name in names if name > self.file]
        if later:
            return later[0] if self._is_complete(later[0]) else None
        return END if is_ended else None

    def add(self, name: str, ranks: Ranks) -> bool:
        """Opens the next file, and returns whether it has samples. Collective. Raises DataError."""
        path, source = os.path.join(self._root, name), self._source
        with enough_memory(path), reading(path):
            status = os.stat(path)
            units, self.file = list_units([path], [], UNIT_BYTES), name
            self._status = status.st_size, status.st_mtime_ns
            if self._known is not None:
                self._known.add(name)
            manifest = self._prepared(path, units, ranks) if units else None
        if manifest is None or not manifest["train"]:
            if ranks.rank == 0:
                say(f"{path} has no rows")
            return False
        split = Split(
            self._folder(name), manifest["train"], manifest["group_rows"], source.encoder, source.cached_groups
        )
        self._files.append(StreamFile(name, self.num_samples, split, source.seed, source.cached_groups))
        self.num_samples += split.num_samples
        source.num_train, source.num_valid = None, split.num_samples
        return True

    def forget(self, samples: int, ranks: Ranks) -> None:
        """Closes the files before the last one of which all samples are among the first `samples`, and removes
        prepared data whose file has been removed. Collective."""
        self._files = [file for file in self._files[:-1] if file.end > samples] + self._files[-1:]
        if ranks.rank == 0:
            kept = {os.path.basename(self._folder(name)) for name in [*self._names(), *(f.name for f in self._files)]}
            for name in set(os.listdir(self._parent)) - kept:
                shutil.rmtree(os.path.join(self._parent, name), ignore_errors=True)

    def train(self, start: int, stop: int) -> Samples:
        """Samples [start, stop) of the stream."""
        check_slice(start, stop, self.num_samples)
        parts = []
        for file in self._files:
            begin, end = max(start, file.first), min(stop, file.end)
            if begin < end:
                parts += file.shuffled(begin - file.first, end - file.first)
        return concatenate(parts or [self._source.nothing()])

    def valid(self, start: int, stop: int) -> Samples:
        """Samples [start, stop) of the last file."""
        check_slice(start, stop, len(self._files[-1]))
        return concatenate(self._files[-1].stored(start, stop) or [self._source.nothing()])

    def state(self, samples: int, evaluated: str) -> dict[str, Any]:
        """For a checkpoint after the first `samples` samples. evaluated: name of the last file that was."""
        columns = list(self._types)
        for file in self._files:
            if samples < file.end or file is self._files[-1]:
                place = {"file": file.name, "first": file.first, "end": file.end}
                return {**place, "evaluated": evaluated, "columns": columns}
        return {"file": self.file, "first": samples, "end": samples, "evaluated": evaluated, "columns": columns}

    def _reopen(self, state: Mapping[str, Any], ranks: Ranks):
        """Opens the file in which a checkpoint was saved."""
        path, num = os.path.join(self._root, state["file"]), state["end"] - state["first"]
        if not os.path.isfile(path):
            raise DataError(f"data.path: {path} is missing: the checkpoint was saved before all of it was trained on")
        self.add(state["file"], ranks)
        found = len(self._files[-1]) if self._files else 0
        if found != num:
            raise DataError(f"data.path: {path} had {num:,} rows when the checkpoint was saved, now it has {found:,}")

    def _next_at_once(self) -> str:
        """The next file, waiting only for one that is being written. Raises DataError if there is none."""
        told = False
        while (name := self.look()) is None:
            if not any(name > self.file for name in self._names()):
                break
            if not told:
                say(f"waiting until a file in {self._root} is complete")
            told = True
            time.sleep(POLL_S)
        if name in (None, END):
            raise DataError(
                f"data.path={self._source.path}: no file in the folder has rows: with data.follow the first one, which "
                "decides about the columns, must be there"
            )
        return name

    def _names(self) -> list[str]:
        """Names of the files, in order. Raises DataError."""
        return names_in(self._root, self._source.path)

    def _is_complete(self, name: str) -> bool:
        """Whether a file has not changed for SETTLE_S."""
        try:
            status = os.stat(os.path.join(self._root, name))
        except OSError:  # it was removed again, or renamed
            return False
        now, seen = time.monotonic(), self._seen.get(name)
        if seen is None or seen[:2] != (status.st_size, status.st_mtime_ns):
            seen = self._seen[name] = status.st_size, status.st_mtime_ns, now
        return now - seen[2] >= SETTLE_S or time.time() - status.st_mtime >= SETTLE_S

    def _notice(self, names: list[str]):
        """Says which files are left out because their names come before that of the last file read, and whether that
        file was changed after it was read."""
        passed = {name for name in names if name <= self.file}
        for name in sorted(passed - self._known) if self._known is not None else ():
            path = os.path.join(self._root, name)
            say(f"{path} is not read: its name comes before {self.file}, which was read already")
        self._known = passed | (self._known or set())
        if self._status is not None and self.file in passed:
            path = os.path.join(self._root, self.file)
            with reading(path):
                status = os.stat(path)
            if (status.st_size, status.st_mtime_ns) != self._status:
                self._status = None
                say(f"{path} was changed after it was read: write further samples to further files")

    def _prepared(self, path: str, units: list, ranks: Ranks) -> dict:
        """The manifest of a file's prepared data. The first file's columns become those of the stream."""
        source, columns = self._source, None
        if getattr(source, "encoder", None) is None:
            layout = source.layout_of(path)
            columns = resolve(source.rules, layout.types, source.label, None)
            source.check_has_ids(columns)
            check_rows(columns)
            rules, self._types, self._first = source.reading_of(layout, columns), layout.types, path
            self._parent = source.folder_of(rules)
        else:
            rules = source.encoder.reading
            if form_of(path) != rules.form:
                raise DataError(f"data.path: {path} is {form_of(path)}, the files before it were {rules.form}")
        folder = self._folder(os.path.basename(path))
        report = print if ranks.rank == 0 else lambda line: None
        job = PrepareJob(
            path, units, rules, folder, dict(self._types), source.rules, source.max_bad_rows, report, self._first
        )
        prepare_together(job, ranks.rank, ranks.size, ranks.barrier)
        with reading_prepared(folder):
            manifest = read_manifest(folder)
            if columns is not None and manifest["train"]:
                modes = IdEncodings(folder, manifest, columns, source.rules)
                source.take(modes.encoder(rules))
                if ranks.rank == 0:
                    source.report(manifest, modes.notes, report)
        return manifest

    def _folder(self, name: str) -> str:
        """The prepared data of a file."""
        digest = xxhash.xxh3_64_hexdigest(name.encode(errors="surrogateescape"))[:8]
        return os.path.join(self._parent, f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:60]}-{digest}")


def say(text: str):
    print(f"hetmpi: {text}", flush=True)


@contextlib.contextmanager
def reading(path: str):
    """A context that turns the error for a file that cannot be read, such as one that was removed, into a
    DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"data.path: {path} cannot be read: {error.strerror or first_line(error)}") from error


def check_follow(follow, path: str, valid) -> bool:
    """Whether data.follow is set. Raises UserError where it cannot be."""
    if follow not in (None, True, False):
        raise UserError(f"data.follow must be true or false, got {one_line(follow, 100)}")
    if not follow:
        return False
    if not os.path.isdir(absolute(path)) or os.path.isfile(os.path.join(absolute(path), "manifest.json")):
        raise UserError(f"data.follow=true needs data.path to be a folder, to which files are added, got {path}")
    if valid != DEFAULT_VALID:
        raise UserError(
            f"data.valid={valid} cannot be used with data.follow=true: each file is evaluated before it is trained on"
        )
    return True


def check_rows(columns: list[Column]) -> None:
    """Raises DataError for id columns whose rows depend on values that are yet to come."""
    wrong = [c.name for c in columns if c.kind == ID and c.share is None and not c.is_buckets and c.rows == AUTO]
    if wrong:
        raise DataError(
            f"data.columns: with data.follow=true the values of {one_line(', '.join(wrong), 300)} are not known in "
            "advance: give rows: open with max_rows, or rows: N, to which they are hashed"
        )
