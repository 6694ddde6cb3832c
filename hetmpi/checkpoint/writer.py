"""Writes one rank's part of a checkpoint while training continues (hetmpi/checkpoint/checkpoints.py)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hetmpi.checkpoint.dense_state import wrong_numbers
from hetmpi.checkpoint.files import rows_not_finite, sync_folder, write_array, write_bytes, write_json, write_link
from hetmpi.checkpoint.manifest import BEST, DENSE, digest_of, file_name, read_manifest
from hetmpi.errors import UserError, cure_of
from hetmpi.table.table import EmbeddingTable

POLL_S = 0.05


@dataclass(frozen=True)
class Piece:
    """One array of this rank's shard of a table, to be written.

    values   (n, ...): the rows to write, or a copy
    rows     indices of these rows in the shard (n,), None for the first n
    """

    name: str
    table: EmbeddingTable
    array: str
    values: np.ndarray
    rows: np.ndarray | None

    def write(self, folder: Path) -> tuple[str, dict]:
        """Writes the file. Returns its name and its entry in the manifest. Raises UserError if it contains rows that
        are not finite, which are searched part by part while the bytes are in the processor's cache for the hash."""
        num, first = 0, None

        def look(begin: int, part: np.ndarray):
            nonlocal num, first
            wrong = rows_not_finite(part)
            first = begin + wrong[0] if first is None and len(wrong) else first
            num += len(wrong)

        file = file_name(self.name, self.table.world.rank, self.array)
        entry = write_array(folder / file, self.values, look if self.values.dtype == np.float32 else None)
        if num:
            raise not_finite(folder, self._not_finite_text(num, first))
        return file, entry

    def _not_finite_text(self, num: int, first: int) -> str:
        """num: number of rows in the file that are not finite; first: index of one of them."""
        table, row = self.table, int(first if self.rows is None else self.rows[first])
        [key] = table.partition.keys_of(table.world.rank, row, row + 1)
        where = f"table {self.name or table.name!r}: {self.array} of {num:,} row(s) of rank {table.world.rank}"
        return f"{where} is not finite, for example of key {key}"


class Writer(threading.Thread):
    """Thread that writes one rank's part of a checkpoint; rank 0's thread completes the checkpoint when all parts are
    written.

    Values that are not finite are detected here, while they are written, and not before training continues: the
    manifest is written last, so the checkpoint never becomes complete, and check() and wait() report the error to the
    ranks, as for a full disk."""

    def __init__(
        self,
        checkpoints,
        part: Path,
        pieces: list[Piece],
        dense: dict | None,
        parameters: set[str],
        manifest: dict,
        is_best: bool,
    ):
        """checkpoints: the Checkpoints object that starts it. dense: on rank 0, state_of() the dense layers.
        parameters: names of their parameters. is_best: as for Checkpoints.save."""
        super().__init__(name="hetmpi-checkpoint", daemon=True)
        self.checkpoints, self.part, self.pieces, self.manifest = checkpoints, part, pieces, manifest
        self.dense, self.parameters, self.is_best = dense, parameters, is_best
        self.shards = [table.shard for table in {id(piece.table): piece.table for piece in pieces}.values()]
        self.error: Exception | None = None
        self.has_written, self.finished = threading.Event(), threading.Event()
        self.is_given_up = False  # another rank could not write

    def run(self):
        try:
            try:
                self._write()
            finally:
                for shard in self.shards:
                    shard.thaw()
            self.has_written.set()
            if self.checkpoints.world.rank == 0:
                self._finish()
        except OSError as problem:
            self.error = refused(self.part, problem)
        except Exception as problem:  # of any kind: nobody may wait for this thread
            self.error = problem
        finally:
            self.has_written.set()
            self.finished.set()

    def _write(self):
        files = {}
        if self.dense is not None:
            wrong = wrong_numbers(self.dense, self.parameters)
            if wrong is not None:
                raise not_finite(self.part, wrong)
        for piece in self.pieces:
            file, files[file] = piece.write(self.part)
        if self.dense is not None:
            buffer = io.BytesIO()
            torch.save(self.dense, buffer)
            files[DENSE] = write_bytes(self.part / DENSE, [buffer.getbuffer()])
        write_json(self.part / f"written-{self.checkpoints.world.rank:05d}.json", files)

    def _finish(self):
        """Waits for all ranks' parts, then completes the checkpoint and removes old ones."""
        files = {}
        for rank in range(self.checkpoints.world.size):
            part = self.part / f"written-{rank:05d}.json"
            while not (self.is_given_up or part.exists()):
                time.sleep(POLL_S)
            if self.is_given_up:
                return
            files |= json.loads(part.read_text())
        for file in self.part.glob("written-*.json"):
            file.unlink()
        manifest = json.loads(json.dumps({**self.manifest, "files": files}))  # as read: keys of `about` become text
        write_json(self.part / "manifest.json", {**manifest, "xxh3_128": digest_of(manifest)})
        sync_folder(self.part)
        step = self.manifest["step"]
        os.rename(self.part, self.checkpoints.path(step))
        sync_folder(self.part.parent)
        if self.is_best:  # before the earlier best one is removed
            write_link(self.part.parent / BEST, self.checkpoints.path(step).name)
        if self.checkpoints.after is not None:
            self.checkpoints.after(self.checkpoints.path(step))
        self._remove_old([self.checkpoints.path(other) for other in self.checkpoints.steps() if other <= step])

    def _remove_old(self, paths: list[Path]):
        """Removes all `paths`, sorted newest first, except the first `keep` ones, the best one, and their bases."""
        paths = [path for path in paths if (path / "manifest.json").exists()]
        try:
            bases = {path.name: read_manifest(path).get("base", path.name) for path in paths}
        except UserError:  # the base of an unreadable checkpoint is unknown
            return
        kept = [path.name for path in paths[: self.checkpoints.keep]]
        needed = {bases[name] for name in kept}
        if len(kept) > 1 and len(needed) == 1:  # damage to a single base would make all of them useless
            needed |= set([name for name, base in bases.items() if name == base and name not in needed][:1])
        best = self.checkpoints.best()
        if best is not None:
            needed |= {best.name, bases.get(best.name, best.name)}
        for path in paths[len(kept) :]:
            if path.name not in needed:
                part = path.with_suffix(".part")  # if a kill ends the removal, the next checkpoint completes it
                with contextlib.suppress(OSError):
                    os.rename(path, part)
                    remove(part, ignore_errors=True)  # NFS keeps files that are open until they are closed


def remove(path: Path, ignore_errors: bool = False):
    """Removes the folder of a checkpoint; of a link to one, as to another disk, the link alone. Raises OSError."""
    if not path.is_symlink():
        return shutil.rmtree(path, ignore_errors)
    target = os.readlink(path)
    path.unlink()
    print(f"hetmpi: {path.with_suffix('')} was a link to {target}: it is removed, its folder stays", flush=True)


def refused(path: Path, problem: OSError) -> UserError:
    return UserError(
        f"the checkpoint {path.name.removesuffix('.part')} cannot be written in {path.parent}: {problem}: "
        f"{cure_of(problem, 'checkpoint.dir')}; earlier checkpoints are kept"
    )


def not_finite(part: Path, what: str) -> UserError:
    return UserError(
        f"the checkpoint {part.name.removesuffix('.part')} is not written in {part.parent}: {what}: earlier "
        "checkpoints are kept, continue from one of them with a lower learning rate"
    )
