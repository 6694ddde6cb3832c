"""Stream: the files of a folder, which come one after the other, as one sequence of samples (data.follow=true).

Files are read in the order of their names. A file is complete when it has not changed for SETTLE_S seconds; a file
named END says that no more will come. Each file is prepared as any other data (prepare.py), in a folder of its own in
data.cache; this folder is removed when the file has been removed.

The first file decides about the columns: kinds, transforms, moments. A checkpoint keeps these decisions, and the name,
size and number of samples of each file that was opened. A run that resumes it needs only the files whose samples were
not all trained on.
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
from typing import Any, NamedTuple

import numpy as np
import xxhash

from hetmpi.data.batch import Samples, concatenate
from hetmpi.data.files import DataError, absolute, first_line
from hetmpi.data.source import check_slice
from hetmpi.data.tabular.encoder import Encoder
from hetmpi.data.tabular.files import form_of, list_units, names_below
from hetmpi.data.tabular.layout import NoRows
from hetmpi.data.tabular.prepare import (
    UNIT_BYTES,
    PrepareJob,
    enough_memory,
    prepare_together,
    read_manifest,
    reading_prepared,
)
from hetmpi.data.tabular.rules import AUTO, ID, Column
from hetmpi.data.tabular.split import Split
from hetmpi.errors import UserError, one_line, printable

END = "_END"  # name of the file that ends a stream
ENTRY = "stream"  # in a checkpoint's manifest
SETTLE_S = 5.0  # as observed here
OLD_S = 60.0  # since a file's time of change, which the clock of another machine may have set
POLL_S = 1.0
FIRST_S = 60.0  # for the first file
DEFAULT_VALID = 0.1  # of Tabular


@dataclass(frozen=True)
class Ranks:
    """Those that read a stream together. barrier(): waits for all. from_first(call): what `call` returns on the first
    rank; its UserError is raised on all. check_files(files): raises one on all unless all see the same files(), paths.
    """

    rank: int
    size: int
    barrier: Callable[[], None]
    from_first: Callable[[Callable[[], Any]], Any]
    check_files: Callable[[Callable[[], list[str]]], None] = lambda files: None


class StreamFile:
    """A file of a stream, whose samples have the positions [first, end). Thread-safe."""

    def __init__(self, name: str, first: int, split: Split, source):
        self.name, self.first, self.end, self._split = name, first, first + split.num_samples, split
        self._seed = source.seed, xxhash.xxh3_64_intdigest(name.encode(errors="surrogateescape"))
        self._stored = split.order(np.arange(split.num_groups))
        self._shuffled = self._stored
        self._permutation = self._in_order
        if source.shuffle:
            self._shuffled = split.order(np.random.default_rng(self._seed).permutation(split.num_groups))
            self._permutation = functools.lru_cache(source.cached_groups)(self._draw)

    def __len__(self) -> int:
        return self.end - self.first

    def shuffled(self, start: int, stop: int) -> list[Samples]:
        """Samples at places [start, stop) of an order drawn from the seed and the file's name, or, with shuffle=False,
        of the file's order."""
        return self._split.read(self._shuffled, start, stop, self._permutation)

    def stored(self, start: int, stop: int) -> list[Samples]:
        """Samples at places [start, stop) in the order of the prepared file."""
        return self._split.read(self._stored, start, stop, self._in_order)

    def _in_order(self, group: int) -> np.ndarray:
        return np.arange(self._split.rows[group])

    def _draw(self, group: int) -> np.ndarray:
        return np.random.default_rng((*self._seed, group)).permutation(self._split.rows[group])


class Opened(NamedTuple):
    """What a stream remembers of a file that it opened: its bytes and its samples."""

    size: int
    num: int


class Stream:
    """The stream of a Tabular (source.py), which has the settings.

    num_samples  of all files that were opened, those before a checkpoint included"""

    def __init__(self, source):
        self._source, self._root = source, absolute(source.path)
        self.num_samples = 0
        self._files: list[StreamFile] = []  # of which not all samples are trained on, and the last one
        self._opened: dict[str, Opened] = {}  # ascending; without those that were removed and are not needed
        self._types: Mapping[str, Any] = {}
        self._first = self._parent = self._awaited = self._compared = ""
        self._seen: dict[str, tuple[int, int, float]] = {}  # name -> size, time of change, and since when, of ours
        self._told: set[str] = set()  # names of files of which _notice() spoke

    @property
    def file(self) -> str:
        """Name of the last file that was opened; empty for none."""
        return next(reversed(self._opened), "")

    def open(self, ranks: Ranks, resumed: tuple[Encoder, Mapping[str, Any], int] | None) -> None:
        """Opens the first file, or those in which a checkpoint was saved. resumed: its encoder, state() and the number
        of samples trained on. Collective. Raises DataError."""
        if resumed is not None:
            self._reopen(*resumed, ranks)
            return
        while not self._files:
            self.add(ranks.from_first(self._next_at_once), ranks)

    def look(self) -> str | None:
        """The name of the next file, END after the last one, None if neither is there yet. For the first rank. Raises
        DataError."""
        is_ended = os.path.exists(self._path(END))  # before the list: files come before it
        names = self._names()
        self._awaited = next((name for name in names if name > self.file), "")
        self._notice(names, is_end=is_ended and not self._awaited)
        if self._awaited:
            may_be_empty = is_ended or self._awaited != names[-1]
            return self._awaited if self._is_complete(self._awaited, may_be_empty) else None
        return END if is_ended else None

    def waiting(self) -> str:
        """What is awaited after look() has found nothing, as text."""
        if self._awaited:
            return f"waiting until {self._path(self._awaited)} is complete: not empty, and unchanged for {SETTLE_S:g} s"
        return f"waiting for the next file; a file {END} ends the run"

    def add(self, name: str, ranks: Ranks) -> bool:
        """Opens the next file, and returns whether it has samples. Collective. Raises DataError."""
        path, source, num, manifest = self._path(name), self._source, 0, {}
        ranks.check_files(lambda: [path])
        with enough_memory(path), reading(path), contextlib.suppress(NoRows):
            size, units = os.path.getsize(path), list_units([path], [], UNIT_BYTES, source.dialect.encoding)
            manifest = self._prepared(path, units, ranks) if units else {}
        if manifest.get("train"):
            split = Split(
                self._folder(name), manifest["train"], manifest["group_rows"], source.encoder, source.cached_groups
            )
            self._files.append(StreamFile(name, self.num_samples, split, source))
            source.num_train, source.num_valid = None, split.num_samples
            num = split.num_samples
            self.num_samples += num
        elif ranks.rank == 0:
            say(f"{path} has no rows")
        self._opened[name] = Opened(size, num)
        return num > 0

    def forget(self, samples: int, ranks: Ranks) -> None:
        """Closes the files before the last one of which all samples are among the first `samples`, and removes
        prepared data whose file has been removed. Collective."""
        self._files = [file for file in self._files[:-1] if file.end > samples] + self._files[-1:]
        if ranks.rank != 0:
            return
        prepared = os.listdir(self._parent)  # before the names: another run may prepare what comes meanwhile
        needed = {*self._names(), *(file.name for file in self._files)}
        for folder in set(prepared) - {os.path.basename(self._folder(name)) for name in needed}:
            shutil.rmtree(os.path.join(self._parent, folder), ignore_errors=True)
        needed.add(self.file)
        self._opened = {name: opened for name, opened in self._opened.items() if name in needed}

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

    def begun(self, samples: int) -> list[str]:
        """Names of the open files of which not all samples are among the first `samples`."""
        return [file.name for file in self._files if file.end > samples]

    @property
    def opened(self) -> list[str]:
        """Names of the files that were opened, without those that were removed and are not needed."""
        return list(self._opened)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        files = [[name, *opened] for name, opened in self._opened.items()]
        return {"columns": list(self._types), "samples": self.num_samples, "files": files}

    def _reopen(self, encoder: Encoder, state: Mapping[str, Any], samples: int, ranks: Ranks):
        """Opens the files of a checkpoint of which not all samples are among the first `samples`."""
        source = self._source
        source.take(encoder)
        source.read_by(encoder.reading)
        self._parent = source.folder_of(encoder.reading)
        source.num_train, source.num_valid = None, 0
        self._types, self._first = dict.fromkeys(state["columns"]), "the first file"
        opened = {name: Opened(size, num) for name, size, num in state["files"]}
        first, begun = state["samples"], []
        for name in reversed(opened):
            if first > samples and opened[name].num > 0:
                first -= opened[name].num
                begun.append(name)
        self.num_samples = first
        for name in reversed(begun):
            path, before = self._path(name), self.num_samples
            if not os.path.isfile(path):
                raise DataError(
                    f"data.path: {path} is missing: the checkpoint was saved before all of it was trained on"
                )
            check_same(path, "bytes", opened[name].size, os.path.getsize(path))
            self.add(name, ranks)
            check_same(path, "rows", opened[name].num, self.num_samples - before)
        self._opened = opened

    def _next_at_once(self) -> str:
        """The next file, waiting only for one that is being written, at most FIRST_S. Raises DataError if there is
        none."""
        begin, told = time.monotonic(), False
        while (name := self.look()) is None and self._awaited:
            if time.monotonic() - begin > FIRST_S:
                raise DataError(
                    f"data.path: {self._path(self._awaited)} is empty or still being written after {FIRST_S:g} s, and "
                    "the first file decides about the columns: start when it is complete"
                )
            if not told:
                say(self.waiting())
            told = True
            time.sleep(POLL_S)
        if name in (None, END):
            raise DataError(
                f"data.path={self._source.path}: no file in the folder has rows: with data.follow the first one, which "
                "decides about the columns, must be there"
            )
        return name

    def _names(self) -> list[str]:
        """Names of the files, those in folders KEY=VALUE with their folder, in order. Raises DataError."""
        return names_below(self._root, self._source.path)

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name)

    def _is_complete(self, name: str, may_be_empty: bool) -> bool:
        """Whether a file has not changed for SETTLE_S, or by its own time for OLD_S."""
        try:
            status = os.stat(self._path(name))
        except OSError:  # it was removed again, or renamed
            return False
        now, seen = time.monotonic(), self._seen.get(name)
        if seen is None or seen[:2] != (status.st_size, status.st_mtime_ns):
            self._seen = {name: (status.st_size, status.st_mtime_ns, now)}
        is_settled = now - self._seen[name][2] >= SETTLE_S or time.time() - status.st_mtime >= OLD_S
        return is_settled and (status.st_size > 0 or may_be_empty)

    def _notice(self, names: list[str], is_end: bool):
        """Says which files are left out because their names come before that of the last file opened, and which have
        changed since they were opened. Compares the last one each time, all when another was opened and at the end."""
        fresh = [name for name in names if name <= self.file and name not in self._told]
        late = [name for name in fresh if name not in self._opened]
        if late:
            say(
                f"{one_line(', '.join(late), 300)} in {self._root}: not read, as {self.file}, which comes later by "
                "name, was read already"
            )
        compares_all = is_end or self._compared != self.file
        compared = [name for name in fresh if compares_all or name == self.file]
        self._compared = self.file
        changed = [name for name in compared if name in self._opened and self._size(name) != self._opened[name].size]
        if changed:
            say(
                f"{one_line(', '.join(changed), 300)} in {self._root}: changed after it was read: write further "
                "samples to further files"
            )
        self._told.update(late, changed)

    def _size(self, name: str) -> int | None:
        """Bytes of a file that was opened; those that it had then if it cannot be read any more."""
        try:
            return os.path.getsize(self._path(name))
        except OSError:
            return self._opened[name].size

    def _prepared(self, path: str, units: list, ranks: Ranks) -> dict:
        """The manifest of a file's prepared data. The first file's columns become those of the stream."""
        source, columns = self._source, None
        if getattr(source, "encoder", None) is None:
            layout = ranks.from_first(lambda: source.layout_of([path]))
            columns = source.columns_of(layout.types, layout.choices, None)
            layout.check(column.vector or column.name for column in columns)
            source.not_used(layout.choices, columns)
            source.check_has_ids(columns)
            check_rows(columns)
            rules, self._types, self._first = source.reading_of(layout, columns), layout.types, path
            self._parent = source.folder_of(rules)
        else:
            rules = source.encoder.reading
            if form_of(path) != rules.form:
                raise DataError(f"data.path: {path} is {form_of(path)}, the files before it were {rules.form}")
        folder = self._folder(os.path.relpath(path, self._root))
        report = print if ranks.rank == 0 else lambda line: None
        job = PrepareJob(
            path, units, rules, folder, dict(self._types), source.rules, source.max_bad_rows, report, self._first,
            source.shuffle,
        )  # fmt: skip
        prepare_together(job, ranks.rank, ranks.size, ranks.barrier)
        with reading_prepared(folder):
            manifest = read_manifest(folder)
            if columns is not None and manifest["train"]:
                modes = source.encodings_of(folder, manifest, columns)
                source.take(modes.encoder(rules))
                if ranks.rank == 0:
                    source.report(manifest, modes.notes, report)
        return manifest

    def _folder(self, name: str) -> str:
        """The prepared data of a file."""
        digest = xxhash.xxh3_64_hexdigest(name.encode(errors="surrogateescape"))[:8]
        return os.path.join(self._parent, f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:60]}-{digest}")


def check_same(path: str, what: str, saved: int, now: int):
    """Raises DataError unless a file has as many bytes or rows as when a checkpoint was saved."""
    if now != saved:
        raise DataError(
            f"data.path: {path} had {saved:,} {what} when the checkpoint was saved, before all of it was trained on, "
            f"and now has {now:,}: give the file as it was; further samples belong in further files"
        )


def say(text: str):
    print(f"hetmpi: {printable(text)}", flush=True)


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
