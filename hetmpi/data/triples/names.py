"""TripleNames: the names of entities and relations, by number, as checkpoints hold them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial

import numpy as np

from hetmpi.data.features import NO_KEY, ValueMap
from hetmpi.errors import UserError

ENTITY, RELATION, INVERSE = "entity", "relation", "inverse"  # tables; INVERSE: relations, asked from their tails
MOST_BYTES = 1 << 34  # of the names of a checkpoint


class TripleNames:
    """Names in the order of their numbers; none holds a line's end."""

    def __init__(self, entities: list[str], relations: list[str]):
        self.entities, self.relations = entities, relations

    def of(self, table: str) -> list[str]:
        """The names of the rows of a table."""
        return self.entities if table == ENTITY else self.relations

    @cached_property
    def numbers(self) -> dict[str, dict[str, int]]:
        """Name -> number, of ENTITY and RELATION."""
        return {table: {name: number for number, name in enumerate(self.of(table))} for table in (ENTITY, RELATION)}

    def to_arrays(self) -> dict[str, np.ndarray]:
        """For a checkpoint: (n,) uint8 each, names in UTF-8 with line ends between."""
        return {
            name: np.frombuffer("\n".join(names).encode(), np.uint8)
            for name, names in (("entities", self.entities), ("relations", self.relations))
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> TripleNames:
        """What to_arrays gave. Raises UserError, KeyError or ValueError for other arrays."""
        found = []
        for name in ("entities", "relations"):
            array = arrays[name]
            if array.dtype != np.uint8 or array.ndim != 1 or array.nbytes > MOST_BYTES:
                raise UserError(f"{name} must be at most {MOST_BYTES:,} bytes, got {array.dtype} {array.shape}")
            found.append(array.tobytes().decode().split("\n"))
        return cls(*found)

    def difference(self, other: TripleNames) -> str | None:
        """What other names have in another order, or not at all, in one sentence; None if they are the same."""
        for kind, names, now in (
            ("entities", self.entities, other.entities),
            ("relations", self.relations, other.relations),
        ):
            if names != now:
                return f"it had {len(names):,} {kind}, now there are {len(now):,}, or others, or in another order"
        return None

    def by_value(self) -> dict[str, ValueMap]:
        """Table, which is also the name of the column in files -> how table.init_from finds the rows of names."""
        return {table: ValueMap(table, partial(self._keys, table)) for table in (ENTITY, RELATION, INVERSE)}

    def _keys(self, table: str, names) -> np.ndarray:
        """Arrow array (n,) of names -> keys (n,) int64. Raises UserError for values that are no texts."""
        known, found = self.numbers[ENTITY if table == ENTITY else RELATION], names.to_pylist()
        if not all(isinstance(name, str) for name in found):
            raise UserError(f"names were expected, got {names.type}")
        return np.array([known.get(name, NO_KEY) for name in found], np.int64)
