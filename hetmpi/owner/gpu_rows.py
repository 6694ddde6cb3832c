"""The shard of a table of one rank whose rows a GPU reads and updates (cpp/cuda/gpu_rows.h): in its memory
(table.store=gpu), or in the host's (table.store=pinned)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hetmpi import _C
from hetmpi.errors import UserError
from hetmpi.gpu import gpu_of
from hetmpi.owner.store import INIT_CHUNK_ROWS, InParts, Layout, Shard, in_chunks
from hetmpi.world.memory import size_text

COPIED_BYTES = 64 << 20  # of rows that are gathered for a copy at a time
KINDS = {"weight": torch.float32, "state": torch.float32, "clock": torch.int32, "touched": torch.uint8}


@dataclass(frozen=True)
class GpuStore:
    """Where a table's rows are, if a GPU, the table's device, reads and updates them.

    in_host_memory  whether they stay in the host's memory, which is pinned: for tables larger than the GPU's"""

    in_host_memory: bool = False

    @property
    def name(self) -> str:
        return "pinned" if self.in_host_memory else "gpu"

    @property
    def shard(self) -> type[Shard]:
        return PinnedShard if self.in_host_memory else GpuShard


def gpu_bytes(layout: Layout) -> int:
    """Memory of a GPU for a shard: rows, their state, clocks and marks of changes."""
    return layout.num_rows * (4 * (layout.dim + layout.state_dim) + 5)


def parts_of(array: torch.Tensor, num: int) -> list[slice]:
    """Places of `num` rows of an array, in parts of about COPIED_BYTES."""
    at_a_time = max(1, COPIED_BYTES // max(1, array[:1].nbytes))
    return [slice(begin, begin + at_a_time) for begin in range(0, num, at_a_time)]


class GpuShard(Shard):
    """A shard whose rows are in a GPU's memory. To be opened by open_memory()."""

    def open_memory(self, layout: Layout, partition: _C.Partition, device: torch.device, name: str):
        """name: of the table. Raises UserError if the GPU lacks memory."""
        self._gpu, self._num_rows = gpu_of(device), layout.num_rows
        gpu = self._gpu(device)
        need, free = gpu_bytes(layout), gpu.free_bytes(gpu.device)
        error = UserError(
            f"table.store=gpu: {name} needs {size_text(need)} for {layout.num_rows:,} rows of dim {layout.dim} with "
            f"{layout.state_dim} floats of optimizer state, {size_text(free)} are free on {gpu.device}, "
            f"{size_text(need - free)} too few: set table.store=pinned, which keeps rows in host memory, a smaller "
            "table.dim, fewer rows, or optim.rows=rowwise_adagrad, which has one float of state"
        )
        if need > free:
            raise error
        shapes = {"weight": (self.dim,), "state": (self.state_dim,)}
        try:
            self._rows = {
                array: gpu.torchs_memory((len(self), *shapes.get(array, ())), kind, gpu.device)
                for array, kind in KINDS.items()
            }
        except torch.OutOfMemoryError as problem:  # free in pieces
            raise error from problem
        addresses = [values.data_ptr() for values in self._rows.values()]
        self.device_rows = _C.GpuRows(partition, addresses, self.dim, self.state_dim, gpu)

    def __len__(self) -> int:
        return self._num_rows

    def _initialise_rows(self, keys_of, num: int, seed: int, std: float, threads: int):
        for array in ("state", "clock", "touched"):
            self._rows[array].zero_()

        def initialise(begin: int):
            keys = keys_of(begin, min(begin + INIT_CHUNK_ROWS, num))
            values = self.empty("weight", len(keys))
            _C.init_rows(values, keys, seed, std)
            self._rows["weight"][begin : begin + len(keys)] = torch.from_numpy(values).to(self._device)

        in_chunks(initialise, num, threads)
        self._gpu.finish(self._device)  # these threads may have another stream than the model

    @property
    def _device(self) -> torch.device:
        return self._rows["weight"].device

    def _place(self, rows: np.ndarray | slice) -> torch.Tensor | slice:
        return rows if isinstance(rows, slice) else torch.from_numpy(np.asarray(rows, np.int64)).to(self._device)

    def assign(self, rows: np.ndarray | slice, weight=None, state=None, clock=None):
        self._gpu.finish(self._device)
        for array, values in (("weight", weight), ("state", state), ("clock", clock)):
            if values is not None:
                kind = np.int32 if array == "clock" else np.float32
                self._assign(self._rows[array], rows, np.asarray(values, kind))
        self._rows["touched"][self._place(rows)] = 1
        self._gpu.finish(self._device)  # in whichever stream that was

    def _assign(self, to: torch.Tensor, rows: np.ndarray | slice, values: np.ndarray):
        if isinstance(rows, slice):
            to[rows].copy_(torch.from_numpy(np.ascontiguousarray(values)))
            return
        values = np.broadcast_to(values, (len(rows), *to.shape[1:]))
        for part in parts_of(to, len(rows)):
            to[self._place(rows[part])] = torch.from_numpy(np.ascontiguousarray(values[part])).to(self._device)

    def snapshot(self, array: str, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        self._gpu.finish(self._device)
        values = self._rows[array]
        if isinstance(rows, slice):
            found = values[rows]
            to = torch.empty_like(found, device="cpu") if out is None else torch.from_numpy(out)
            to.copy_(found)
            return to.numpy() if out is None else out
        if out is None:
            out = self.empty(array, len(rows))
        for part in parts_of(values, len(rows)):
            torch.from_numpy(out[part]).copy_(values[self._place(rows[part])])
        return out

    def copied(self, array: str, rows: np.ndarray | slice, out: np.ndarray | None) -> np.ndarray | InParts:
        if out is not None:
            return self.snapshot(array, rows, out)
        every = range(*rows.indices(len(self))) if isinstance(rows, slice) else rows

        def part_of(part: slice) -> np.ndarray:
            some = every[part]
            return self.snapshot(array, slice(some.start, some.stop) if isinstance(some, range) else some)

        like = self.empty(array, 0)
        return InParts(part_of, like.dtype, (len(every), *like.shape[1:]))

    def changed(self) -> np.ndarray:
        return np.flatnonzero(self.snapshot("touched", slice(None)))

    def forget_changes(self, mark: object):
        self._gpu.finish(self._device)
        self._rows["touched"].zero_()
        self.mark = mark


class PinnedShard(Shard):
    """A shard in host memory that is pinned, so that a GPU reads and updates it in place. The host waits for the GPU
    before it reads or writes. To be opened by open_memory() before initialise()."""

    def __init__(self, memory: np.ndarray, layout: Layout, directory: _C.Directory):
        super().__init__(memory, layout, directory)
        self._memory, self._pinned = memory[: layout.places["applied"][0]], []  # of the rows and their clocks

    def open_memory(self, partition: _C.Partition, device: torch.device):
        self._gpu, self._partition = gpu_of(device)(device), partition

    def initialise(self, rule, keys_of, num: int, seed: int, std: float, threads: int):
        super().initialise(rule, keys_of, num, seed, std, threads)
        try:
            for array in (self._memory, self.touched):
                self._gpu.pin(array)
                self._pinned.append(array)
        except RuntimeError as problem:
            raise UserError(
                f"table.store=pinned: {size_text(self._memory.nbytes)} of host memory cannot be pinned for "
                f"{self._gpu.device} ({problem}): raise the limit of locked memory (ulimit -l), or set "
                "table.store=memory"
            ) from problem
        arrays = *(self.in_memory[name] for name in ("weight", "state", "clock")), self.touched
        addresses = [array.ctypes.data for array in arrays]
        self.device_rows = _C.GpuRows(self._partition, addresses, self.dim, self.state_dim, self._gpu)

    def close_memory(self):
        """To be called before the memory is freed."""
        self._finish()
        while self._pinned:
            self._gpu.unpin(self._pinned.pop())

    def _finish(self):
        self._gpu.finish(self._gpu.device)

    def freeze(self):
        self._finish()

    def snapshot(self, array: str, rows: np.ndarray | slice, out: np.ndarray | None = None) -> np.ndarray:
        self._finish()
        return super().snapshot(array, rows, out)

    def changed(self) -> np.ndarray:
        self._finish()
        return super().changed()

    def forget_changes(self, mark: object):
        self._finish()
        super().forget_changes(mark)
