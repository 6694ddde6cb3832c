"""Writes one rank's part of a checkpoint while training goes on (hetmpi/checkpoint.py)."""

from __future__ import annotations

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
from hetmpi.checkpoint.files import rows_not_finite, sync_folder, write_array, write_bytes, write_json
from hetmpi.checkpoint.manifest import DENSE, digest_of, file_name, read_manifest
from hetmpi.errors import UserError
from hetmpi.table.table import EmbeddingTable

POLL_S = 0.05


@dataclass(frozen=True)
class Piece:
    """One array of this rank's shard of a table, as it is written.

    values   (n, ...): the array, or a copy of what is written of it
    chosen   rows of `values` to write (m,), None for all
    rows     rows of the shard that these are (m,), None for all
    """

    name: str
    table: EmbeddingTable
    array: str
    values: np.ndarray
    chosen: np.ndarray | None
    rows: np.ndarray | None

    def write(self, folder: Path) -> tuple[str, dict]:
        """Writes the file: its name, and what the manifest says of it. Raises UserError if it holds rows that are not
        finite: looked for part by part, while the bytes are at hand for the hash as well."""
        num, first = 0, None

        def look(begin: int, part: np.ndarray):
            nonlocal num, first
            wrong = rows_not_finite(part)
            first = begin + wrong[0] if first is None and len(wrong) else first
            num += len(wrong)

        file = file_name(self.name, self.table.world.rank, self.array)
        said = write_array(folder / file, self.values, self.chosen, look if self.values.dtype == np.float32 else None)
        if num:
            raise not_finite(folder, self._said(num, first))
        return file, said

    def _said(self, num: int, first: int) -> str:
        """num: rows of the file that are not finite; first: one of them."""
        table, row = self.table, int(first if self.rows is None else self.rows[first])
        [key] = table.partition.keys_of(table.world.rank, row, row + 1)
        where = f"table {self.name or table.name!r}: {self.array} of {num:,} row(s) of rank {table.world.rank}"
        return f"{where} is not finite, of key {key} for one"


class Writer(threading.Thread):
    """Writes one rank's part of a checkpoint; rank 0's makes it whole when all are there.

    What is not finite is found here, as it is written, and not before training goes on: the manifest is written last,
    so the checkpoint never becomes whole, and the ranks hear of it as of a full disk, by check() and wait()."""

    def __init__(
        self,
        checkpoints,
        part: Path,
        pieces: list[Piece],
        dense: dict | None,
        parameters: set[str],
        manifest: dict,
    ):
        """checkpoints: the Checkpoints it writes for. dense: on rank 0, state_of() the dense layers. parameters: the
        names of theirs."""
        super().__init__(name="hetmpi-checkpoint", daemon=True)
        self.checkpoints, self.part, self.pieces, self.manifest = checkpoints, part, pieces, manifest
        self.dense, self.parameters = dense, parameters
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
        manifest = json.loads(json.dumps({**self.manifest, "files": files}))  # keys of `about` are text when it is read
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
        except UserError:  # of one that cannot be read now it is not known on what it builds
            return
        kept = [path.name for path in paths[: self.checkpoints.keep]]
        needed = {bases[name] for name in kept}
        if len(kept) > 1 and len(needed) == 1:  # one flipped byte would spoil them all
            needed |= set([name for name, base in bases.items() if name == base and name not in needed][:1])
        for path in paths[len(kept) :]:
            if path.name not in needed:
                shutil.rmtree(path, ignore_errors=True)


def refused(path: Path, problem: Exception) -> UserError:
    return UserError(
        f"the checkpoint {path.name.removesuffix('.part')} cannot be written in {path.parent}: {problem}: make room "
        "there or choose another checkpoint.dir; earlier ones stay"
    )


def not_finite(part: Path, what: str) -> UserError:
    return UserError(
        f"the checkpoint {part.name.removesuffix('.part')} is not written in {part.parent}: {what}: earlier "
        "checkpoints stay, go on from one of them with a lower learning rate"
    )
