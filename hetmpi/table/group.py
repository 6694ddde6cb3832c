"""TableGroup: the tables of one model, read and written together: what they send is in flight together, and waited for
once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hetmpi.counters import Counters
from hetmpi.errors import UserError
from hetmpi.in_flight import together
from hetmpi.table.table import EmbeddingTable


@dataclass(frozen=True)
class TableSpec:
    """A table as a model wants it.

    num_rows, dim  its shape
    field_rows     rows of its fields, which follow each other, (F,); of those with few, every rank may keep all. Empty
                   if it has none"""

    num_rows: int
    dim: int
    field_rows: Sequence[int] = ()


class TableGroup(Mapping[str, EmbeddingTable]):
    """name -> table. All tables are read and written in every step, each with its own keys, none if a batch has none of
    it. As EmbeddingTable's methods, collective where those are: the tables are gone over in one order on all ranks."""

    def __init__(self, tables: dict[str, EmbeddingTable]):
        """Raises UserError for tables of several worlds, which could not take in each other's gradients while they
        wait."""
        if len({id(table.world) for table in tables.values()}) > 1:
            raise UserError("TableGroup: tables must be made with one World, the same object")
        self._tables = tables

    def __getitem__(self, name: str) -> EmbeddingTable:
        return self._tables[name]

    def __iter__(self):
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def read(self, keys: dict[str, Tensor]) -> dict[str, Tensor]:
        """table -> keys (U,) to table -> rows (U, dim)."""
        given = {name: table.to_read(keys[name]) for name, table in self.items()}  # before any is asked for
        return together({name: self[name].client.reading(checked) for name, checked in given.items()})

    def peek(self, keys: dict[str, Tensor]) -> dict[str, Tensor]:
        """As read(), the owners' rows, for evaluation."""
        return {name: table.peek(keys[name]) for name, table in self.items()}

    def prefetch(self, keys: dict[str, Tensor]):
        """Announces a batch that a later read() will ask for by the same tensors."""
        for name, table in self.items():
            table.prefetch(keys[name])

    def write(self, keys: dict[str, Tensor], grads: dict[str, Tensor]):
        """table -> keys (U,), table -> gradients (U, dim)."""
        given = {name: table.to_write(keys[name], grads[name]) for name, table in self.items()}  # before any is sent
        together({name: self[name].client.writing(*checked) for name, checked in given.items()})

    def settle(self):
        together({name: table.client.settling() for name, table in self.items()})

    def flush(self):
        for table in self.values():
            table.flush()

    def push_pending(self, timeout_s: float):
        """As EmbeddingTable.push_pending, of all tables within timeout_s; raises what the first of them raised."""
        deadline, errors = time.monotonic() + timeout_s, []
        for table in self.values():
            try:
                table.push_pending(max(0.0, deadline - time.monotonic()))
            except (RuntimeError, TimeoutError) as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self):
        for table in self.values():
            table.close()

    @property
    def counters(self) -> Counters:
        """What all tables of this rank did."""
        return Counters.of_array(sum(table.counters.as_array() for table in self.values()))

    @property
    def lags(self) -> np.ndarray:
        """As EmbeddingTable.lags, of all tables: (32,) int64."""
        return sum(table.lags for table in self.values())

    @property
    def to_save(self) -> EmbeddingTable | dict[str, EmbeddingTable]:
        """What Checkpoints takes: one table is saved without its name."""
        return next(iter(self.values())) if len(self) == 1 else dict(self)
