"""Checkpoints: shards of tables, dense layers and data position, in files that numpy and torch open without hetmpi.

    DIR/step-00002000/
        manifest.json              written last: description of the table, and size and xxh3_128 of each file
        shard-00003.weight.npy     rows of rank 3, (n, dim) float32; their keys: docs/design_owner.md
        shard-00003.state.npy      their optimizer state, (n, state_dim) float32
        shard-00003.clock.npy      their clocks, (n,) int32
        dense.pt                   by torch.save: "model" and "optimizer", state dicts; "rng": torch's generators;
                                   "data": what encodes further files of the same columns; ids of tables without a
                                   fixed vocabulary, with keys and counts
    DIR/best                       link to the checkpoint saved last as the best one, if any
    DIR/.lock                      names the process that saves here (lock.py)

An incremental checkpoint has "base": "step-00001000" in its manifest, and for each rank also
        shard-00003.rows.npy       (n,) int64, ascending: rows of the shard that changed since the base
Its other arrays contain only these rows. All other rows are those of the base, which is a full checkpoint.

Several tables are saved in one checkpoint, which is complete or absent. Each has its own files, for example
users.shard-00003.weight.npy, and an entry in "tables" of the manifest, whose format is 3.

Each rank copies its data while training waits, and writes the copy while training continues. It writes to a folder
step-00002000.part, which rank 0 renames when every rank has written: so an interrupted checkpoint is never taken for a
complete one. The ranks notify rank 0 by files, so all must see the same DIR.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hetmpi.checkpoint.dense_state import load_state, read_state, state_of
from hetmpi.checkpoint.files import damage_of, write_link
from hetmpi.checkpoint.lock import FolderLock
from hetmpi.checkpoint.manifest import (
    ARRAYS,
    BEST,
    DENSE,
    DESCRIPTION,
    FULL,
    INCREMENTAL,
    LARGEST,
    RESERVED,
    SEVERAL,
    STEP_NAME,
    brief,
    check_table_name,
    digest_of,
    files_of,
    kinds_of,
    read_manifest,
    tables_of,
)
from hetmpi.checkpoint.shard_files import EarlierKeys, ShardFiles, fill, shards_of
from hetmpi.checkpoint.writer import Piece, Writer, refused, remove
from hetmpi.errors import UserError
from hetmpi.memory import available_memory, cgroup_memory
from hetmpi.open_rows import LAST, check_entries
from hetmpi.table.table import EmbeddingTable, num_used_here
from hetmpi.world.mpi import MPI
from hetmpi.world.world import World

IDS_OF = "ids of "  # before the names of tables, in the data of dense.pt


@dataclass
class Position:
    """Position of a training run: steps made, and samples read from the stream."""

    step: int = 0
    samples: int = 0


class Checkpoints:
    """Writes and finds the checkpoints of one run in `folder`.

    after  called on rank 0 with the path of each checkpoint that is complete, before older ones are removed, beside the
           training; its errors are those of the checkpoint

    The argument `tables` of all methods is one EmbeddingTable, or a dict of several by name: {"users": table, "items":
    table}; an EmbeddingBag may be given instead of its table. Names consist of letters, digits, _, - and ., and do not
    begin with a dot."""

    def __init__(self, world: World, folder: str | os.PathLike, keep: int = 2, full_every: int = 1):
        """folder: the same on all ranks, created at the first save. keep: number of checkpoints to keep, in addition to
        the best one and their bases; two or more kept checkpoints never share a single base. full_every: every N-th
        checkpoint is full, the others hold changed rows, unless most rows changed."""
        self.world, self.folder, self.keep, self.full_every = world, Path(folder), keep, full_every
        self.after: Callable[[Path], None] | None = None
        self._lock = FolderLock("checkpoint.dir", self.folder)
        self._writer: Writer | None = None
        self._copies: dict[tuple[str, str], np.ndarray] | None = None  # by table and array
        self._reserved: dict | None = None  # descriptions of the tables that the copies are for
        self._base: str | None = None  # name of the last full checkpoint of this process
        self._num_built = 0  # incremental checkpoints with this base
        self._mark: object | None = None  # of the shards that note changes since this base

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.folder)!r}, keep={self.keep}, full_every={self.full_every})"

    def reserve(self, tables):
        """Allocates memory for copies of the shards, if there is enough on every node. save() then returns after the
        copy, otherwise when all files are written. The first save() of these tables reserves it too, but training waits
        for the allocation. Collective. Raises UserError as save() for invalid tables."""
        self._reserve(self._named(tables))

    def _reserve(self, tables: dict[str, EmbeddingTable]):
        """As reserve()."""
        self._reserved, self._copies = described(tables), None
        copies = {
            (name, array): table.shard.copy_of(array, num_used_here(table))
            for name, table in tables.items()
            for array in ARRAYS
        }
        copies = {name: copy for name, copy in copies.items() if copy is not None}
        need = self.world.node.allreduce(sum(copy.nbytes for copy in copies.values()))
        free = self.world.node.allreduce(min(available_memory(), cgroup_memory()), MPI.MIN)
        if self.world.comm.allreduce(need < 0.8 * free, MPI.LAND):
            self._copies = copies
            for copy in self._copies.values():
                copy.fill(0)  # makes the system allocate the pages now, which takes seconds per GB

    def save(
        self,
        position: Position,
        tables,
        model: torch.nn.Module | None = None,
        optimizer=None,
        about: dict | None = None,
        data: dict[str, torch.Tensor] | None = None,
        is_best: bool = False,
    ):
        """Flushes all updates, then starts to save the tables and rank 0's dense layers if given.

        position: its step names the checkpoint. load() resumes a single table at that step, several tables each at its
        own. about: further keys of the manifest, as JSON. data: further tensors of dense.pt, by name. is_best: keep
        this checkpoint besides the newest until another one is the best. Returns when training may continue.
        Collective.

        Raises UserError on every rank if the previous checkpoint could not be written or had rows or dense parameters
        that are not finite, if this step's checkpoint exists already, if another job saves into the folder, and for an
        invalid table, position or name."""
        tables = self._named(tables)
        for table in tables.values():
            table.flush()  # first: a rank that waits below could not receive what others still send
        self.wait()
        entries = {name: table.vocabulary.state() for name, table in tables.items() if table.vocabulary is not None}
        if entries and self.world.rank == 0:
            data = (data or {}) | {f"{IDS_OF}{name}": torch.from_numpy(found) for name, found in entries.items()}
        rng = self.world.comm.gather(torch.get_rng_state())
        dense = state_of(model, optimizer, rng, data) if self.world.rank == 0 else None
        if self._reserved != described(tables):
            self._reserve(tables)
        base = self._begin(position, tables, about or {})
        manifest = self._manifest(position, tables) | base | (about or {})
        parameters = {name for name, _ in model.named_parameters()} if model is not None else set()
        with frozen(tables.values()):
            pieces = [piece for name, table in tables.items() for piece in self._pieces(name, table, is_full=not base)]
            self._writer = Writer(self, self._part(position.step), pieces, dense, parameters, manifest, is_best)
            self._writer.start()  # it ends the freeze
        if self._copies is None:
            self._writer.has_written.wait()
        if not base:
            self._mark = object()
            for table in tables.values():
                table.shard.forget_changes(self._mark)
        # No rank may change rows of another before these are copied.
        self.world.meet("for all ranks to copy the rows they save")

    def wait(self):
        """Waits until the checkpoint in progress is complete. Collective. Raises UserError on every rank if it could
        not be written."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        writer.has_written.wait()
        try:
            self.world.agree(writer.error)
            writer.finished.wait()
            self.world.agree(writer.error)
        except Exception:
            writer.is_given_up, self._base = True, None
            writer.finished.wait()
            raise

    def check(self):
        """Raises UserError if this rank could not write its part of the checkpoint in progress."""
        if self._writer is not None and self._writer.error is not None:
            raise self._writer.error

    def _named(self, tables) -> dict[str, EmbeddingTable]:
        """Tables by name; a table without a name is called "". Raises UserError for other arguments."""
        several = isinstance(tables, Mapping)
        found = {
            name: getattr(table, "table", table) for name, table in (tables.items() if several else [("", tables)])
        }
        for name, table in found.items():
            if several:
                check_table_name("Checkpoints", name)
            if not isinstance(table, EmbeddingTable):
                raise UserError(
                    "Checkpoints: tables must be an EmbeddingTable, an EmbeddingBag or a dict of these by name, got "
                    f"{type(table).__name__}{f' by the name {name}' if several else ''}"
                )
            if (table.world.rank, table.world.size) != (self.world.rank, self.world.size):
                raise UserError("Checkpoints: tables must be of the same ranks as the checkpoints")
        names = {name.lower() for name in found}  # some file systems ignore case
        if not found or len(set(map(id, found.values()))) < len(found) or len(names) < len(found):
            raise UserError(f"Checkpoints: tables must be one or more, each once, got {list(found)}")
        return found

    def _manifest(self, position: Position, tables: dict[str, EmbeddingTable]) -> dict:
        """The manifest of a full checkpoint, without about and files."""
        is_one, kinds = "" in tables, described(tables)
        steps = {name: {**kind, "step": tables[name].step} for name, kind in kinds.items()}
        identity = kinds[""] if is_one else {"tables": steps}
        return {
            "format": FULL if is_one else SEVERAL,
            "step": operator.index(position.step),
            "samples": operator.index(position.samples),
            "size": self.world.size,
            **identity,
        }

    def _part(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.part"

    def _begin(self, position: Position, tables: dict[str, EmbeddingTable], about: dict) -> dict:
        """Creates the folder to write to. Returns the manifest's entries about the base, {} for a full checkpoint.
        Collective. Raises UserError on every rank if it cannot be created, and for a position or about that cannot be
        saved."""
        base, error, step = {}, None, position.step
        num_changed = self.world.comm.allreduce(sum(len(table.shard.changed()) for table in tables.values()))
        is_marked = all(table.shard.mark is self._mark for table in tables.values())
        is_small = num_changed <= sum(table.num_used for table in tables.values()) / 2
        may_build = self._num_built + 1 < self.full_every and is_marked and is_small
        try:
            if self.world.rank == 0:
                check_sayable(position, about)
                self._lock.take()
                if self.path(step).exists():
                    raise UserError(f"{self.path(step)} exists already")
                if self._base is not None and may_build:
                    base = self._base_entries(tables)
                for old in self.folder.glob("step-*.part"):  # of runs that were killed
                    remove(old)
                marked = self._marked()
                if marked is not None and not marked.is_dir():  # of an earlier run: a new checkpoint may get this name
                    (self.folder / BEST).unlink()
                self._part(step).mkdir(parents=True)
        except OSError as problem:
            error = refused(self._part(step), problem)
        except UserError as problem:
            error = problem
        self.world.agree(error)
        base = self.world.comm.bcast(base)
        self._base, self._num_built = (self._base, self._num_built + 1) if base else (self.path(step).name, 0)
        return base

    def _base_entries(self, tables: dict[str, EmbeddingTable]) -> dict:
        """The manifest's entries about the base of an incremental checkpoint; {} if the base is gone or has other
        tables."""
        with contextlib.suppress(UserError):
            base = read_manifest(self.folder / self._base)
            if kinds_of(base) == described(tables):
                entries = {"base": self._base, "base_xxh3_128": digest_of(base)}
                return entries if base["format"] == SEVERAL else {"format": INCREMENTAL, **entries}
        return {}

    def _pieces(self, name: str, table: EmbeddingTable, is_full: bool) -> list[Piece]:
        """The arrays that this rank writes of a table, copied if memory was reserved."""
        rows = None if is_full else table.shard.changed()
        used, pieces = num_used_here(table), []
        chosen, num = (slice(used), used) if is_full else (rows, len(rows))
        for array in ARRAYS:
            copy = None if self._copies is None else self._copies.get((name, array))
            values = table.shard.copied(array, chosen, None if copy is None else copy[:num])
            pieces.append(Piece(name, table, array, values, rows))
        return pieces if is_full else [*pieces, Piece(name, table, "rows", rows, None)]

    # Finding and loading.

    def steps(self) -> list[int]:
        """Steps of the checkpoints with a complete name, newest first."""
        found = (STEP_NAME.fullmatch(path.name) for path in self.folder.glob("step-*")) if self.folder.is_dir() else ()
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def best(self) -> Path | None:
        """The checkpoint that the link `best` leads to; None if there is no link, or no such checkpoint."""
        path = self._marked()
        return path if path is not None and path.is_dir() else None

    def _marked(self) -> Path | None:
        """The path that the link `best` leads to, if it has the name of a checkpoint."""
        try:
            name = os.readlink(self.folder / BEST)
        except OSError:
            return None
        return self.folder / name if STEP_NAME.fullmatch(name) else None

    def mark_best(self, step: int):
        """Makes the link `best` lead to the checkpoint after `step` steps, or removes it if there is no such
        checkpoint. REQUIRES: no checkpoint in progress. Collective. Raises UserError on every rank if it cannot be
        written."""
        path, place, error = self.path(step), self.folder / BEST, None
        try:
            if self.world.rank == 0 and not path.is_dir():
                if self._marked() is not None:
                    place.unlink()
            elif self.world.rank == 0 and self.best() != path:
                write_link(place, path.name)
        except OSError as problem:
            error = UserError(f"{place} cannot be written: {problem}: make {self.folder} writable")
        self.world.agree(error)

    def newest(self) -> Path | None:
        """The newest valid checkpoint: all bytes match their hashes and all values are possible. None if there is no
        checkpoint. Prints the defects of newer ones and renames them to .damaged-N. The same on every rank. Collective.
        Raises UserError if there are checkpoints, but all are damaged."""
        unfit = []
        for step in self.world.comm.bcast(self.steps() if self.world.rank == 0 else None):
            path = self.path(step)
            wrong = self.damage(path)
            if not wrong:
                if self.world.rank == 0:
                    for other in unfit:
                        put_aside(other)
                return path
            unfit.append(path)
            if self.world.rank == 0:
                print(f"hetmpi: {path} cannot be used: {wrong[0]}; trying the previous one", flush=True)
        if unfit:
            raise UserError(
                f"none of the {len(unfit)} checkpoint(s) in {self.folder} can be used: check that all ranks can read "
                "them, name another one by resume=PATH, or move them away to start a new run"
            )
        return None

    def damage(self, path: Path) -> list[str]:
        """Defects of a checkpoint, found by reading all of its files; each rank reads a share. The same on every rank.
        Collective."""
        try:
            files = files_of(path)
        except UserError as refusal:
            mine = [str(refusal).removeprefix(f"{path}: ")]
        else:
            mine = [
                problem
                for file, known in files[self.world.rank :: self.world.size]
                if (problem := damage_of(file, known, path))
            ]
        return self._all_of(mine) or self._all_of(self._misfits(path))

    def _all_of(self, mine: list[str]) -> list[str]:
        """The problems found by all ranks, without duplicates. Collective."""
        return sorted({problem for problems in self.world.comm.allgather(mine) for problem in problems})

    def _misfits(self, path: Path) -> list[str]:
        """Files in this rank's share of a checkpoint that differ from the manifest in dtype, shape or kind."""
        problems = []
        try:
            manifest = read_manifest(path)
            for shard in self._share(shards_of(path, manifest)):
                shard.check()
            if self.world.rank == 0:
                read_state(path / DENSE, manifest["size"])
        except UserError as refusal:
            problems.append(str(refusal))
        return problems

    def _share(self, shards: dict[str, list[ShardFiles]]) -> list[ShardFiles]:
        return list(itertools.chain(*shards.values()))[self.world.rank :: self.world.size]

    def load(
        self,
        path: Path,
        tables,
        model: torch.nn.Module | None = None,
        optimizer=None,
        earlier: Mapping[str, EarlierKeys] | None = None,
    ) -> Position:
        """Fills the tables' shards, and the dense layers if given, from a checkpoint of any number of ranks and any
        partition. Returns the saved position. tables: as they were saved, one or all by name. earlier: for a new run,
        whose steps begin at 0 and whose random numbers are its own: table -> the saved keys of its keys, as fill(), for
        tables that have new rows. REQUIRES: no read or write yet. Collective. Raises UserError on every rank if the
        checkpoint is of other tables or contains invalid values. Only newest() and damage() compare hashes."""
        tables, path = self._named(tables), Path(path)
        error = manifest = None
        try:
            manifest = read_manifest(path)
            check_fits(path, manifest, tables, earlier or {})
            shards = shards_of(path, manifest)
            for shard in self._share(shards):
                shard.check()
            dense = read_state(path / DENSE, manifest["size"])
        except UserError as refusal:
            error = refusal
        self.world.agree(error)  # before any table is filled
        try:
            for name, table in tables.items():
                place = f"{path}: table {name}" if name else f"{path}: its table"
                fill(table, place, tables_of(manifest)[name], shards[name], (earlier or {}).get(name))
                if table.vocabulary is not None:
                    entries = entries_of(path, dense, name, table.num_used)
                    entries[:, LAST] *= earlier is None
                    table.vocabulary.load(entries)
            is_same_run = earlier is None and manifest["size"] == self.world.size
            load_state(path / DENSE, dense, model, optimizer, self.world.rank if is_same_run else None)
        except UserError as refusal:
            error = refusal
        self.world.agree(error)
        for name, table in tables.items():
            table.resume_at(tables_of(manifest)[name]["step"] if earlier is None else 0)
        return Position(manifest["step"], manifest["samples"])


@contextlib.contextmanager
def frozen(tables: Collection[EmbeddingTable]):
    """A context that begins with freeze() of the tables' shards, and ends it if there is an error."""
    for table in tables:
        table.shard.freeze()
    try:
        yield
    except BaseException:
        for table in tables:
            table.shard.thaw()
        raise


def entries_of(path: Path, dense: dict, name: str, num_rows: int) -> np.ndarray:
    """The ids of a table without a fixed vocabulary in a checkpoint, as Vocabulary.state(). dense: what dense.pt holds.
    num_rows: of the table there. Raises UserError if they are missing or invalid."""
    place, data = f"{path / DENSE}: ids of {name or 'the table'}", dense.get("data")
    saved = data.get(f"{IDS_OF}{name}") if isinstance(data, dict) else None
    if saved is None:
        raise UserError(f"{place} are missing: the table had a fixed vocabulary")
    entries = saved.numpy().copy() if torch.is_tensor(saved) else None
    check_entries(place, entries, num_rows)
    return entries


def position_of(path: Path) -> Position:
    """The position saved in a checkpoint. Raises UserError as read_manifest does."""
    manifest = read_manifest(path)
    return Position(manifest["step"], manifest["samples"])


def put_aside(path: Path):
    """Renames a damaged checkpoint, so that it is ignored."""
    free = next(name for number in itertools.count(1) if not os.path.exists(name := f"{path}.damaged-{number}"))
    with contextlib.suppress(OSError):  # the folder may be read-only
        os.rename(path, free)


def check_sayable(position: Position, about: dict):
    """Raises UserError unless a manifest can represent these values."""
    for name, value in vars(position).items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= operator.index(value) <= LARGEST:
            raise UserError(f"Checkpoints.save: position: {name} must be an integer of at least 0, got {brief(value)}")
    try:
        json.dumps(about)
    except (TypeError, ValueError, RecursionError) as problem:
        raise UserError(f"Checkpoints.save: about must be a dict that JSON can hold: {problem}") from problem
    for name in sorted(RESERVED & set(about)):
        raise UserError(f"Checkpoints.save: about must not have the key {name}, which the manifest uses itself")


def described(tables: dict[str, EmbeddingTable]) -> dict[str, dict]:
    """Descriptions that loaded tables must match, in the form of kinds_of(manifest)."""
    found = {}
    for name, table in tables.items():
        values = table.num_used, table.dim, table.partition_kind, table.optimizer.rule, table.shard.state_dim
        found[name] = dict(zip(DESCRIPTION, values))
    return found


def check_fits(path: Path, manifest: dict, tables: dict[str, EmbeddingTable], grown: Collection[str] = ()):
    """Raises UserError unless the checkpoint has these tables; partition and number of ranks may differ, and the number
    of rows of those that have grown."""
    saved = tables_of(manifest)
    if set(saved) != set(tables):
        raise UserError(
            f"{path} has {names_text(saved)}, the program loads {names_text(tables)}: load the tables as they were "
            "saved, by the same names"
        )
    for name, mine in described(tables).items():
        for key in ("num_rows", "dim", "rule", "state_dim"):
            if key == "num_rows" and name in grown:
                continue
            is_open = key == "num_rows" and mine[key] < tables[name].num_rows  # rows are assigned as they are needed
            if saved[name][key] != mine[key] and not (is_open and saved[name][key] <= tables[name].num_rows):
                table = f"table {name}" if name else "a table"
                raise UserError(f"{path} has {table} with {key}={saved[name][key]}, the program's has {mine[key]}")


def names_text(names) -> str:
    """Names of tables for messages."""
    return "one table without a name" if "" in names else f"the tables {', '.join(names)}"
