"""Checkpoints: a table's shards, the dense layers and where the data stood, in files that numpy and torch open without hetmpi.

    DIR/step-00002000/
        manifest.json              written last: what the table was, and of each file its bytes and xxh3_128
        shard-00003.weight.npy     rows of rank 3, (n, dim) float32, row i of the key that its partition says (docs/design.md)
        shard-00003.state.npy      their optimizer state, (n, state_dim) float32
        shard-00003.clock.npy      their clocks, (n,) int32
        dense.pt                   by torch.save: "model", "optimizer", both state dicts; "rng": torch's generator of each rank

One that is incremental says in its manifest "base": "step-00001000", has of each rank also
        shard-00003.rows.npy       (n,) int64, ascending: rows of the shard that were updated since that one
and in the other arrays these rows alone. All others are those of the base, which holds all rows and is as old as that.

Each rank copies what it will write, which training waits for, and writes the copy while training goes on. It works in a folder called
step-00002000.part, which rank 0 renames when every rank has written: one that was cut short is never taken for whole. The ranks tell
rank 0 by files, so all must see the same DIR.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash

from hetmpi.partition import make_partition
from hetmpi.table import EmbeddingTable
from hetmpi.window import available_memory, cgroup_memory
from hetmpi.world import MPI, Refused, World

FORMAT, INCREMENTAL = 1, 2
ARRAYS = ("weight", "state", "clock")
CHUNK_BYTES = 16 << 20
CHUNK_ROWS = 1 << 18
POLL_S = 0.05
NAME = re.compile(r"step-(\d{8,})")


@dataclass
class Position:
    """Where a training stood: steps made, and samples of the stream that went into them."""

    step: int = 0
    samples: int = 0


class Checkpoints:
    """Writes and finds the checkpoints of one training in `folder`."""

    def __init__(self, world: World, folder: str | os.PathLike, keep: int = 2, full_every: int = 1):
        """folder: the same one on all ranks, made when it is first written to. keep: how many stay, and besides what they build on; of two or more
        they never all build on one. full_every: each so-manieth holds all rows, those between them are incremental, unless most rows were updated."""
        self.world, self.folder, self.keep, self.full_every = world, Path(folder), keep, full_every
        self._writer: Writer | None = None
        self._copies: dict[str, np.ndarray] | None = None
        self._is_reserved = False
        self._base: str | None = None  # the last one of this process with all rows, how many were built on it, and
        self._num_built = 0
        self._mark: object | None = None  # what table.touched says since then, while table.touched_since is this

    def reserve(self, table: EmbeddingTable):
        """Takes memory for a copy of the shard, if there is enough on every node: save() then returns as soon as it is made, else when all is
        on the disk. The first save() does this itself, but then training waits for it. Collective."""
        self._is_reserved = True
        arrays = {name: getattr(table.shard, name) for name in ARRAYS}
        need = self.world.node.allreduce(sum(array.nbytes for array in arrays.values()))
        free = self.world.node.allreduce(min(available_memory(), cgroup_memory()), MPI.MIN)
        if self.world.comm.allreduce(need < 0.8 * free, MPI.LAND):
            self._copies = {name: np.empty_like(array) for name, array in arrays.items()}
            for copy in self._copies.values():
                copy.fill(0)  # the system gives the memory now: seconds per GB

    def save(self, position: Position, table: EmbeddingTable, model: torch.nn.Module | None = None, optimizer=None, about: dict | None = None):
        """Brings all updates to their owners and starts to write what they come to, and rank 0's dense layers if given. position: its step is what
        table.step is when this is loaded. about: what else the manifest is to say, as JSON. Returns when training may go
        on. Collective. Raises Refused if the one before could not be written, or this step's is there already."""
        table.flush()  # first: a rank that waits below could not take in what others still send
        self.wait()
        rng = self.world.comm.gather(torch.get_rng_state())
        dense = None
        if self.world.rank == 0:
            dense = {name: on_cpu(part.state_dict()) for name, part in (("model", model), ("optimizer", optimizer)) if part is not None}
            dense["rng"] = rng
        if not self._is_reserved:
            self.reserve(table)
        base = self._begin(position.step, table)
        manifest = {
            "format": INCREMENTAL if base else FORMAT, "step": position.step, "samples": position.samples, "size": self.world.size, **described(table), **base, **(about or {}),
        }  # fmt: skip
        self._writer = Writer(self, self._part(position.step), self._taken(table, is_full=not base), dense, manifest)
        self._writer.start()
        if self._copies is None:
            self._writer.has_written.wait()
        if not base:
            table.touched[:] = 0
            table.touched_since = self._mark = object()
        self.world.comm.Barrier()  # no rank changes rows of another before these are copied

    def wait(self):
        """Waits until the checkpoint under way is whole. Collective. Raises Refused on every rank if it could not be written."""
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
        """Raises Refused if this rank could not write its part of the one under way."""
        if self._writer is not None and self._writer.error is not None:
            raise self._writer.error

    def _part(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.part"

    def _begin(self, step: int, table: EmbeddingTable) -> dict:
        """Makes the folder to write in. Returns what the manifest says of the one to build on, {} if all rows are to be written. Collective."""
        base, error = {}, None
        num_touched = self.world.comm.allreduce(np.count_nonzero(table.touched))
        may_build = self._num_built + 1 < self.full_every and table.touched_since is self._mark and num_touched <= table.num_rows / 2
        try:
            if self.world.rank == 0:
                if self.path(step).exists():
                    raise Refused(f"{self.path(step)} is there already")
                if self._base is not None and may_build:
                    with contextlib.suppress(Refused):  # it is gone
                        base = {"base": self._base, "base_xxh3_128": digest_of(read_manifest(self.folder / self._base))}
                for old in self.folder.glob("step-*.part"):  # of runs that were killed
                    shutil.rmtree(old)
                self._part(step).mkdir(parents=True)
        except OSError as problem:
            error = refused(self._part(step), problem)
        except Refused as problem:
            error = problem
        self.world.agree(error)
        base = self.world.comm.bcast(base)
        self._base, self._num_built = (self._base, self._num_built + 1) if base else (self.path(step).name, 0)
        return base

    def _taken(self, table: EmbeddingTable, is_full: bool) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
        """What is to be written: name -> an array and which of its rows, None for all. Copies, if memory was reserved."""
        arrays = {name: getattr(table.shard, name) for name in ARRAYS}
        rows = None if is_full else np.flatnonzero(table.touched)
        if self._copies is not None:
            num = len(table.touched) if is_full else len(rows)
            for name, array in arrays.items():
                copy = self._copies[name][:num]
                np.copyto(copy, array) if is_full else np.take(array, rows, axis=0, out=copy, mode="clip")  # "raise" makes one more copy
                arrays[name] = copy
        chosen = rows if self._copies is None else None
        return {name: (array, chosen) for name, array in arrays.items()} | ({} if is_full else {"rows": (rows, None)})

    # Finding and loading.

    def steps(self) -> list[int]:
        """Steps of the checkpoints that look whole, the newest first."""
        found = (NAME.fullmatch(path.name) for path in self.folder.glob("step-*")) if self.folder.is_dir() else ()
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def newest(self) -> Path | None:
        """The newest checkpoint of which every byte is as it was written, None if there is none at all; says what is wrong with newer ones, which
        are called .damaged from then on. The same on every rank. Collective. Raises Refused if there are some, but all are damaged."""
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
                print(f"hetmpi: {path} cannot be used: {wrong[0]}; trying the one before", flush=True)
        if unfit:
            raise Refused(
                f"none of the {len(unfit)} checkpoint(s) in {self.folder} can be used: see that all ranks can read them, or name another by resume=PATH, or "
                "move them away to begin anew"
            )
        return None

    def damage(self, path: Path) -> list[str]:
        """What is wrong with a checkpoint, found by reading all of it, each rank its share. The same on every rank. Collective."""
        try:
            files = files_of(path)
        except Refused as refusal:
            mine = [str(refusal)]
        else:
            mine = [problem for file, known in files[self.world.rank :: self.world.size] if (problem := damage_of(file, known, path))]
        return sorted({problem for problems in self.world.comm.allgather(mine) for problem in problems})

    def load(self, path: Path, table: EmbeddingTable, model: torch.nn.Module | None = None, optimizer=None) -> Position:
        """Fills the table's shards, and the dense layers if given, from a checkpoint of any number of ranks and partition -> where the training
        stood. REQUIRES: nothing read or written yet. Collective. Raises Refused on every rank if it is of another table."""
        error = manifest = None
        try:
            files_of(path)  # raises for what it builds on
            manifest = read_manifest(path)
            check_fits(path, manifest, table)
            fill(table, path, manifest)
            dense = torch.load(path / "dense.pt", map_location="cpu", weights_only=True)
            for name in [name for name, part in (("model", model), ("optimizer", optimizer)) if part is not None and name not in dense]:
                raise Refused(f"{path} has no {name}: it was saved without one, load it so")
            if model is not None:
                model.load_state_dict(dense["model"])
            if optimizer is not None:
                optimizer.load_state_dict(dense["optimizer"])
                if manifest["size"] == self.world.size:
                    torch.set_rng_state(dense["rng"][self.world.rank])
        except (OSError, ValueError, RuntimeError, KeyError) as problem:
            error = problem if isinstance(problem, Refused) else Refused(f"{path} cannot be loaded: {problem}")
        self.world.agree(error)
        table.resume_at(manifest["step"])
        return Position(manifest["step"], manifest["samples"])


class Writer(threading.Thread):
    """Writes one rank's part of a checkpoint; rank 0's makes it whole when all are there."""

    def __init__(self, checkpoints: Checkpoints, part: Path, arrays: dict[str, tuple], dense: dict | None, manifest: dict):
        super().__init__(name="hetmpi-checkpoint", daemon=True)
        self.checkpoints, self.part, self.arrays, self.dense, self.manifest = checkpoints, part, arrays, dense, manifest
        self.error: Exception | None = None
        self.has_written, self.finished = threading.Event(), threading.Event()
        self.is_given_up = False  # another rank could not write

    def run(self):
        try:
            self._write()
            self.has_written.set()
            if self.checkpoints.world.rank == 0:
                self._finish()
        except OSError as problem:
            self.error = refused(self.part, problem)
        except Exception as problem:  # whatever it is, nobody may wait for this thread
            self.error = problem
        finally:
            self.has_written.set()
            self.finished.set()

    def _write(self):
        rank = self.checkpoints.world.rank
        files = {}
        for name, (array, rows) in self.arrays.items():
            file = file_name(rank, name)
            files[file] = write_array(self.part / file, array, rows)
        if self.dense is not None:
            buffer = io.BytesIO()
            torch.save(self.dense, buffer)
            files["dense.pt"] = write_bytes(self.part / "dense.pt", [buffer.getbuffer()])
        write_json(self.part / f"written-{rank:05d}.json", files)

    def _finish(self):
        """Waits for all ranks' parts, then makes the checkpoint whole and removes what is no longer kept."""
        files = {}
        for rank in range(self.checkpoints.world.size):
            told = self.part / f"written-{rank:05d}.json"
            while not (self.is_given_up or told.exists()):
                time.sleep(POLL_S)
            if self.is_given_up:
                return
            files |= json.loads(told.read_text())
        for file in self.part.glob("written-*.json"):
            file.unlink()
        manifest = {**self.manifest, "files": files}
        write_json(self.part / "manifest.json", {**manifest, "xxh3_128": digest_of(manifest)})
        sync_folder(self.part)
        step = self.manifest["step"]
        os.rename(self.part, self.checkpoints.path(step))
        sync_folder(self.part.parent)
        self._remove_old([self.checkpoints.path(other) for other in self.checkpoints.steps() if other <= step])

    def _remove_old(self, paths: list[Path]):
        """Removes all but the first ones of `paths`, the newest, and what they build on."""
        try:
            bases = {path.name: read_manifest(path).get("base", path.name) for path in paths}
        except Refused:  # of one that cannot be read now it is not known on what it builds
            return
        kept = [path.name for path in paths[: self.checkpoints.keep]]
        needed = {bases[name] for name in kept}
        if len(kept) > 1 and len(needed) == 1:  # one flipped byte would spoil them all
            needed |= set([name for name, base in bases.items() if name == base and name not in needed][:1])
        for path in paths[len(kept) :]:
            if path.name not in needed:
                shutil.rmtree(path, ignore_errors=True)


# One file.


def write_array(path: Path, array: np.ndarray, rows: np.ndarray | None = None) -> dict:
    """Writes an array, or those of its rows, as numpy.save does; what the manifest says of the file."""
    num, row_bytes = len(array if rows is None else rows), max(1, array.nbytes // max(1, len(array)))
    header, step = io.BytesIO(), max(1, CHUNK_BYTES // row_bytes)
    of_all = np.lib.format.header_data_from_array_1_0(np.ascontiguousarray(array))
    np.lib.format.write_array_header_1_0(header, {**of_all, "shape": (num, *array.shape[1:])})
    parts = (array[i : i + step] if rows is None else array[rows[i : i + step]] for i in range(0, num, step))
    return write_bytes(path, itertools.chain([header.getbuffer()], (np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts)))


def write_bytes(path: Path, chunks) -> dict:
    """Writes a file to the disk; what the manifest says of it."""
    total, hasher = 0, xxhash.xxh3_128()
    with open(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
            hasher.update(chunk)
            total += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": total, "xxh3_128": hasher.hexdigest()}


def write_json(path: Path, value):
    """Writes a file that is whole when it is there."""
    part = path.with_suffix(".tmp")
    write_bytes(part, [json.dumps(value, indent=1).encode()])
    os.rename(part, path)


def sync_folder(path: Path):
    """Brings the names in a folder to the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def file_name(rank: int, array: str) -> str:
    return f"shard-{rank:05d}.{array}.npy"


def damage_of(path: Path, known: dict, checkpoint: Path) -> str | None:
    """What is wrong with a file of a checkpoint or of the one it builds on, None if nothing."""
    name = path.name if path.parent == checkpoint else f"{path.parent.name}/{path.name}, which it builds on,"
    try:
        size, hasher = path.stat().st_size, xxhash.xxh3_128()
        if size != known["bytes"]:
            return f"{name} has {size:,} bytes, {known['bytes']:,} were written"
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                hasher.update(chunk)
    except OSError as problem:
        return f"{name}: {problem.strerror}"
    return None if hasher.hexdigest() == known["xxh3_128"] else f"{name} has other bytes than were written"


def files_of(path: Path) -> list[tuple[Path, dict]]:
    """Every file of a checkpoint and of the one it builds on, with what was written of it. Raises Refused as read_manifest does, and if that one
    is another than it was."""
    manifest = read_manifest(path)
    found = [(path / name, known) for name, known in sorted(manifest["files"].items())]
    if "base" not in manifest:
        return found
    try:
        base = read_manifest(path.parent / manifest["base"])
    except Refused as refusal:
        raise Refused(f"{path} builds on {manifest['base']}, which has to lie beside it: {refusal}") from refusal
    if digest_of(base) != manifest["base_xxh3_128"]:
        raise Refused(f"{path} builds on {manifest['base']}, which is another now than it was then")
    return found + [(path.parent / manifest["base"] / name, known) for name, known in sorted(base["files"].items()) if name != "dense.pt"]


def put_aside(path: Path):
    """Gives a damaged checkpoint a name by which it is none."""
    free = next(name for number in itertools.count(1) if not os.path.exists(name := f"{path}.damaged-{number}"))
    with contextlib.suppress(OSError):  # of a folder that may only be read
        os.rename(path, free)


def read_manifest(path: Path) -> dict:
    """Raises Refused if there is none, or one that this version cannot read."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError) as problem:
        raise Refused(f"{path} is no whole checkpoint: manifest.json: {problem}") from problem
    if not isinstance(manifest, dict) or manifest.get("format") not in (FORMAT, INCREMENTAL):
        raise Refused(f"{path} has format {manifest.get('format') if isinstance(manifest, dict) else None}, this hetmpi reads {FORMAT} and {INCREMENTAL}")
    if manifest.pop("xxh3_128", None) != digest_of(manifest):
        raise Refused(f"{path} is no whole checkpoint: manifest.json has other bytes than were written")
    return manifest


def digest_of(manifest: dict) -> str:
    """Of all that a manifest says."""
    return xxhash.xxh3_128(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def position_of(path: Path) -> Position:
    """Where the training stood. Raises Refused as read_manifest does."""
    manifest = read_manifest(path)
    return Position(manifest["step"], manifest["samples"])


def refused(path: Path, problem: Exception) -> Refused:
    return Refused(
        f"the checkpoint {path.name.removesuffix('.part')} cannot be written in {path.parent}: {problem}: make room there or choose another "
        "checkpoint.dir; earlier ones stay"
    )


# A table's shards.


def described(table: EmbeddingTable) -> dict:
    """What of a table has to fit."""
    return {
        "num_rows": table.num_rows, "dim": table.dim, "partition": table.partition_kind, "rule": table.optimizer.rule,
        "state_dim": table.shard.state.shape[1],
    }  # fmt: skip


def check_fits(path: Path, manifest: dict, table: EmbeddingTable):
    """Raises Refused unless the rows of the checkpoint are those of the table; partition and ranks may be others."""
    mine = described(table)
    for name in ("num_rows", "dim", "rule", "state_dim"):
        if manifest[name] != mine[name]:
            raise Refused(f"{path} is of a table with {name}={manifest[name]}, this one has {mine[name]}")


def check_same(path: Path, manifest: dict, wanted: dict):
    """Raises Refused unless the manifest says of each name in `wanted` what that says."""
    for name, value in wanted.items():
        if manifest.get(name) != value:
            raise Refused(f"{path} was saved with {name}={manifest.get(name)}, now it is {value}: go on with the same, or begin a new run")


def fill(table: EmbeddingTable, path: Path, manifest: dict):
    """Fills this rank's shard."""
    partition, rank = make_partition(manifest["partition"], manifest["num_rows"], manifest["size"]), table.world.rank
    for name in ARRAYS:  # one after the other: each has as many files open as there were ranks
        shards, out = open_shards(path, manifest, name), getattr(table.shard, name)
        for begin in range(0, len(out), CHUNK_ROWS):
            keys = table.partition.keys_of(rank, begin, min(begin + CHUNK_ROWS, len(out)))
            out[begin : begin + len(keys)] = gathered(shards, *partition.locate(keys))


class Saved:
    """One array of one rank's shard, in its files."""

    def __init__(self, path: Path, manifest: dict, name: str, owner: int):
        base, file = manifest.get("base"), file_name(owner, name)
        self.whole = np.load((path.parent / base if base else path) / file, mmap_mode="r")
        self.newer = np.load(path / file, mmap_mode="r") if base else self.whole[:0]
        self.newer_rows = np.load(path / file_name(owner, "rows"), mmap_mode="r") if base else np.empty(0, np.int64)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Those rows, (n, ...)."""
        out = self.whole[rows]
        if len(self.newer_rows):
            place = np.minimum(np.searchsorted(self.newer_rows, rows), len(self.newer_rows) - 1)
            is_newer = self.newer_rows[place] == rows
            out[is_newer] = self.newer[place[is_newer]]
        return out


def open_shards(path: Path, manifest: dict, name: str) -> list[Saved]:
    """One array of each rank's shard."""
    return [Saved(path, manifest, name, owner) for owner in range(manifest["size"])]


def gathered(shards: list[Saved], owners: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Row rows[i] of the shard of owners[i]: (n, ...), for owners and rows (n,)."""
    out = np.empty((len(rows), *shards[0].whole.shape[1:]), shards[0].whole.dtype)
    for owner in np.unique(owners):
        mine = owners == owner
        out[mine] = shards[owner].take(rows[mine])
    return out


def on_cpu(value):
    """A state dict with its tensors copied to the CPU."""
    if torch.is_tensor(value):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: on_cpu(part) for key, part in value.items()}
    return [on_cpu(part) for part in value] if isinstance(value, list) else value
