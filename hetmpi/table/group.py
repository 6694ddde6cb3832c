"""TableGroup: reads and writes the tables of a model together, so that their transfers overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from hetmpi._C import Keys
from hetmpi.counters import Counters
from hetmpi.errors import UserError
from hetmpi.spans import Spans
from hetmpi.table.table import EmbeddingTable, check_keys
from hetmpi.wire.channel import Channel


class TableGroup(Mapping[str, EmbeddingTable]):
    """Mapping of names to tables. All tables are read and written in every step, each with its own keys; a batch
    without keys of a table passes none. Methods are those of EmbeddingTable, and collective where those are: all ranks
    use the tables in the same order."""

    def __init__(self, tables: dict[str, EmbeddingTable]):
        """Collective. Raises UserError for tables of different worlds, which could not receive each other's gradients
        while they wait, and for other names or another order on another rank."""
        if len({id(table.world) for table in tables.values()}) > 1:
            raise UserError("TableGroup: tables must be made with one World, the same object")
        for table in list(tables.values())[:1]:
            table.world.check_same("TableGroup", {"tables": list(tables)})
        self._tables = tables
        self._spans = next((table.spans for table in tables.values()), None) or Spans()
        kinds: dict[tuple, dict[str, EmbeddingTable]] = {}
        for name, table in tables.items():
            channel = table.client.channel
            kinds.setdefault((channel.is_exact, channel.name), {})[name] = table
        self._alike = list(kinds.values())  # each of one consistency and wire
        for alike in self._alike:
            share([table.client.channel for table in alike.values()])

    def __getitem__(self, name: str) -> EmbeddingTable:
        return self._tables[name]

    def __iter__(self):
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __repr__(self) -> str:
        return f"TableGroup({', '.join(map(repr, self.values()))})"

    def items(self):
        return self._tables.items()  # faster than Mapping's, which calls __getitem__ in Python

    def read(self, keys: dict[str, Tensor]) -> dict[str, Tensor]:
        """table -> keys (U,) to table -> rows (U, dim)."""
        given = self._checked(keys, "read")  # all, before the first request
        rows = {}
        for alike in self._alike:
            clients = [table.client for table in alike.values()]
            rows |= zip(alike, clients[0].read(clients, [given[name] for name in alike]))
        return {name: rows[name] for name in self._tables}

    def peek(self, keys: dict[str, Tensor]) -> dict[str, Tensor]:
        """As read(), but the owners' rows, for evaluation."""
        return {name: table.peek(keys[name]) for name, table in self.items()}

    def prefetch(self, keys: dict[str, Tensor]):
        """Announces a batch that a later read() will request by the same tensors."""
        with self._spans("prefetch"):
            given = self._checked(keys, "prefetch")
            for name, table in self.items():
                table.want(given[name])
            for alike in self._alike:
                clients = [table.client for table in alike.values()]
                clients[0].announce(clients, [given[name] for name in alike])

    def write(self, keys: dict[str, Tensor], grads: dict[str, Tensor]):
        """keys: table -> (U,); grads: table -> (U, dim)."""
        with self._spans("push"):  # checks all, then sends
            given = self._checked(keys, "write")
            grads = {name: table.gradients(given[name], grads[name]) for name, table in self.items()}
        for alike in self._alike:
            clients = [table.client for table in alike.values()]
            clients[0].write(clients, [given[name] for name in alike], [grads[name] for name in alike])

    def check(self, keys: dict[str, Tensor], are_fixed: bool = False):
        """As EmbeddingTable.check, of these tables."""
        check_keys([self._tables[name] for name in keys], list(keys.values()), "read", are_fixed)

    def _checked(self, keys: dict[str, Tensor], verb: str) -> dict[str, Keys]:
        checked = check_keys(list(self._tables.values()), [keys[name] for name in self._tables], verb)
        return dict(zip(self._tables, checked))

    def settle(self):
        for alike in self._alike:
            clients = [table.client for table in alike.values()]
            clients[0].settle(clients)

    def flush(self):
        for table in self.values():
            table.flush()

    def close(self):
        for table in self.values():
            table.close()

    @property
    def counters(self) -> Counters:
        """Counters of this rank, summed over all tables."""
        return Counters.of_array(sum(table.counters.as_array() for table in self.values()))

    @property
    def lags(self) -> np.ndarray:
        """Histogram of lags, summed over all tables: owner's clock, as this rank knew it, minus the clock of each line
        when the two were compared, once per pull: (32,) int64, bin 0 for no lag, bin i for lags in [2^(i-1), 2^i)."""
        return sum(table.cache.lags for table in self.values())

    @property
    def to_save(self) -> EmbeddingTable | dict[str, EmbeddingTable]:
        """The argument of Checkpoints: a single table is saved without its name."""
        return next(iter(self.values())) if len(self) == 1 else dict(self)


def share(channels: Sequence[Channel]):
    """Lets tables that are used together share the exchange of the first one. Collective. Raises UserError if batches
    of one are announced."""
    first, *others = channels
    if others and any(one.exchange.awaits(one) for one in channels):
        raise UserError("TableGroup: group the tables before a batch is announced")
    for other in others:
        other.exchange.leave(other)
        other.exchange = first.exchange
        first.exchange.join(other)
    if others:
        first.world.meet("for all tables to share their messages")
