"""Rows of tables without a fixed vocabulary: their settings, and the form in which their ids are saved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetmpi.errors import UserError, check_choice, check_integer

SHARED_KEY = 0  # of ids without a row of their own
FIRST_KEY = 1
WAITING = -1  # in place of a key
ID, KEY, COUNT, LAST = range(4)  # columns of entries, (n, 4) int64
NO_ENTRIES, NO_IDS = np.empty((0, 4), np.int64), np.empty(0, np.int64)
MOST_ROWS = (1 << 40) - 1  # of a table without a fixed vocabulary
NEVER, LFU, LRU = "never", "lfu", "lru"  # evict: which ids make room for new ones
EVICT = (LFU, LRU, NEVER)


@dataclass(frozen=True)
class OpenRows:
    """Rows of a table without a fixed vocabulary (hetmpi/table/vocabularies.py).

    max_rows      ids that have a row at the same time
    min_count     times an id must be seen before it gets one
    expire_steps  an id that has not been seen for so many steps loses its row, None: never
    evict         whose row an id gets where all are taken: LFU, of one seen less often; LRU, of the one seen longest
                  ago; NEVER: of none, which ends the training"""

    max_rows: int
    min_count: int = 1
    expire_steps: int | None = None
    evict: str = LFU

    @property
    def num_rows(self) -> int:
        """Rows of the table: key 0 is shared by all ids without a row of their own."""
        return self.max_rows + 1


def places_of(ids: np.ndarray, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places of ids (n,) among ascending others, and which are there: (n,) int64, (n,) bool."""
    if not len(among):
        return np.zeros(len(ids), np.int64), np.zeros(len(ids), bool)
    place = np.minimum(np.searchsorted(among, ids), len(among) - 1)
    return place, among[place] == ids


def check_open_rows(place: str, rows: OpenRows, maintain_steps: int):
    """Raises UserError for impossible values. place: for messages."""
    check_integer(f"{place}: num_rows", rows.max_rows, 1, MOST_ROWS)
    check_integer(f"{place}: min_count", rows.min_count, 1)
    if rows.expire_steps is not None:
        check_integer(f"{place}: expire_steps", rows.expire_steps, 1)
    check_choice(f"{place}: evict", rows.evict, EVICT)
    check_integer(f"{place}: maintain_steps", maintain_steps, 1)


def check_entries(place: str, entries, num_rows: int):
    """Raises UserError unless these are entries, as of Vocabulary.state(), of a table with rows of keys below num_rows.
    place: for messages."""
    is_array = isinstance(entries, np.ndarray) and entries.dtype == np.int64 and entries.ndim == 2
    if not is_array or entries.shape[1] != 4:
        raise UserError(f"{place} must be int64 of shape (n, 4)")
    if (entries[1:, ID] <= entries[:-1, ID]).any() or (entries[:, [COUNT, LAST]] < 0).any():
        raise UserError(f"{place} must have ascending ids, and counts and steps of at least 0")
    keys = entries[entries[:, KEY] != WAITING, KEY]
    if len(keys) and not (keys.min() >= FIRST_KEY and keys.max() < num_rows and len(np.unique(keys)) == len(keys)):
        raise UserError(f"{place}: keys must differ and lie in [{FIRST_KEY}, {num_rows:,})")


def keys_of_ids(entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids (n,) int64, ascending, and keys (n,) int64 of those that have a row."""
    admitted = entries[entries[:, KEY] >= 0]
    return np.ascontiguousarray(admitted[:, ID]), np.ascontiguousarray(admitted[:, KEY])
