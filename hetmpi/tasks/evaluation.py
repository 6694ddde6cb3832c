"""Evaluation: what a task evaluates its model with; by columns of held-out samples, each rank takes a share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hetmpi.spans import Spans
from hetmpi.table.group import TableGroup
from hetmpi.world.world import World


@dataclass
class Evaluation:
    """A model, its tables and held-out data.

    forward(rows, batch)  the model, with its name in errors
    draw(start, stop)     held-out samples [start, stop) of `num_samples`
    batch_size            samples per rank and look-up
    keyed(batch)          the batch with keys in place of the ids of tables without a fixed vocabulary; collective, with
                          None on a rank that has fewer batches"""

    world: World
    tables: TableGroup
    model: torch.nn.Module
    forward: Callable
    draw: Callable
    num_samples: int
    batch_size: int
    device: torch.device
    spans: Spans
    keyed: Callable = lambda batch: batch

    def columns(self, task, step: int) -> list[np.ndarray] | None:
        """The columns of a task (hetmpi/tasks/task.py, Task) of all held-out samples after `step` steps, with rows read
        from the owners; [] without samples. On rank 0, None on other ranks. Collective."""
        self.tables.flush()
        with torch.no_grad():
            parts = [self._predict(task, batch) for batch in self._batches(task)]
            for _ in range(len(parts), self._num_peeks()):  # others may need this rank's replies
                self.keyed(None)
                self.tables.peek(dict.fromkeys(self.tables, torch.empty(0, dtype=torch.int64)))
        mine = [np.concatenate(column) for column in zip(*parts)]
        self.world.meet(f"after step {step} for all ranks to evaluate")
        gathered = self.world.comm.gather(mine)
        self.world.comm.Barrier()  # at s >= 1 a rank that resumes training would change rows that others still read
        if self.world.rank != 0:
            return None
        return [np.concatenate(parts) for parts in zip(*(of_rank for of_rank in gathered if of_rank))]

    def _shares(self) -> list[int]:
        """Boundaries of the ranks' shares: (size + 1,)."""
        return [self.num_samples * rank // self.world.size for rank in range(self.world.size + 1)]

    def _num_peeks(self) -> int:
        """Number of batches of the rank with the largest share."""
        return math.ceil(max(np.diff(self._shares())) / self.batch_size)

    def _batches(self, task):
        """The batches of this rank's share."""
        make = task.batches(torch.device("cpu"))
        begin, end = self._shares()[self.world.rank : self.world.rank + 2]
        for start in range(begin, end, self.batch_size):
            yield make(self.draw(start, min(start + self.batch_size, end)))

    def _predict(self, task, batch) -> tuple[np.ndarray, ...]:
        self.spans.now("evaluation")
        batch = self.keyed(batch)
        rows = self.tables.peek(task.keys(batch))
        return task.predict(self.forward, rows, batch.on(self.device))
