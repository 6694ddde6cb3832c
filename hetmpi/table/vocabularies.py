"""Tables without a fixed vocabulary: which ids have a row, and at which key.

An id is any int64, such as the hash of a text. Key 0 is a row of all ids without one of their own; it is trained like
any other. The directory of an id, one of the ranks by a hash, counts it and knows its key. A client keeps the keys of
the ids that it has read.

In each step, all ranks together (translate):

    ask     ids that a rank has no key for go to their directories, with how often they occur in its batch
    admit   ids that have now been seen min_count times get a row if there are rows for all of this step's: the next
            keys, in the order of ids. The owner of a row writes its first value, which depends on seed and id alone
    answer  directories send the keys of ids admitted earlier

At times (maintain), after a flush: ids not seen for long lose their rows, waiting ids get the rows of ids seen less
often or longer ago, and all counts are halved, so that what was frequent once does not stay for ever.

Admissions, keys and evictions depend on the batches alone, not on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hetmpi import _C
from hetmpi.errors import UserError
from hetmpi.open_rows import COUNT, ID, KEY, LAST, LFU, NEVER, NO_ENTRIES, NO_IDS, SHARED_KEY, places_of
from hetmpi.table.id_exchange import Exchange, of_all
from hetmpi.table.vocabulary import Vocabulary
from hetmpi.world.world import World


class Vocabularies:
    """The vocabularies of a model's tables. All methods are collective, in the same order on all ranks."""

    def __init__(self, world: World, of_tables: Mapping[str, Vocabulary], every_steps: int):
        """every_steps: of maintenance."""
        self.world, self.of_tables, self.every_steps = world, dict(of_tables), every_steps

    def __bool__(self) -> bool:
        return bool(self.of_tables)

    def is_due(self, step: int) -> bool:
        """Whether maintenance comes after `step` steps."""
        return bool(self) and step > 0 and step % self.every_steps == 0

    # A step.

    def of_batch(self, batch, step: int):
        """A batch (hetmpi.data.batch.Batch) with keys in place of ids, which are counted. step: from 0."""
        if not self:
            return batch
        ids = {name: batch.keys[name].numpy() for name in self.of_tables}
        return batch.translated(self.translate(ids, batch.counts, step))

    def of_held_out(self, batch):
        """As of_batch, without counting. batch: None on a rank that has none while others do."""
        if not self:
            return batch
        none = batch is None
        found = self.look_up({name: NO_IDS if none else batch.keys[name].numpy() for name in self.of_tables})
        return None if none else batch.translated(found)

    def translate(
        self, ids: Mapping[str, np.ndarray], counts: Mapping[str, np.ndarray], step: int
    ) -> dict[str, np.ndarray]:
        """The keys of a batch's ids: table -> (U,) int64. ids: table -> (U,) int64, unique; counts: how often they
        occur; step: from 0. Raises UserError on all ranks if a table is full and evicts nothing."""
        keys = self._translated({name: (ids[name], counts[name]) for name in self.of_tables}, step)
        return {name: np.where(found < 0, SHARED_KEY, found) for name, found in keys.items()}

    def look_up(self, ids: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As translate(), without counting. ids may repeat."""
        keys = self._translated({name: (ids[name], None) for name in self.of_tables}, 0)
        return {name: np.where(found < 0, SHARED_KEY, found) for name, found in keys.items()}

    def _translated(self, batch: dict[str, tuple[np.ndarray, np.ndarray | None]], step: int) -> dict[str, np.ndarray]:
        """table -> ids (U,) and their counts, None for not counting -> keys, WAITING for ids without one."""
        keys, places, asked, ready, answers = {}, {}, {}, {}, {}
        for name, (ids, counts) in batch.items():
            keys[name], ready[name] = self.of_tables[name].find(ids, counts, step)
            places[name] = self._to_ask(ids, keys[name])
            of_ids = ids[places[name]]
            asked[name] = np.stack([of_ids, of_ids * 0 if counts is None else counts[places[name]]], 1)
        exchange = Exchange(self.world, asked)
        for name, received in exchange.received().items():
            ids, counts = np.ascontiguousarray(received.T)
            is_counting = batch[name][1] is not None
            answers[name], more = self.of_tables[name].answer(ids, counts if is_counting else None, step)
            ready[name] = np.concatenate([ready[name], more])
        new = self._admit(ready, step) if any(counts is not None for _, counts in batch.values()) else {}
        for name, of_asked in exchange.answered(answers).items():
            mine, (ids, _) = self.of_tables[name], batch[name]
            keys[name][places[name]] = of_asked
            got = places[name][of_asked >= 0]
            mine.known.admit(ids[got], keys[name][got])
            self._add_new(mine, ids, keys[name], *new.get(name, (NO_IDS, NO_IDS)))
        return keys

    def _to_ask(self, ids: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Places of the ids that only another rank's directory may know."""
        unknown = np.flatnonzero(keys < 0)
        return unknown[_C.directories(ids[unknown], self.world.size) != self.world.rank]

    def _add_new(self, mine: Vocabulary, ids: np.ndarray, keys: np.ndarray, new_ids: np.ndarray, new_keys: np.ndarray):
        """Sets the keys of the batch's ids that were admitted in this step."""
        waits = np.flatnonzero(keys < 0)
        place, is_new = places_of(ids[waits], new_ids)
        waits, place = waits[is_new], place[is_new]
        keys[waits] = new_keys[place]
        others = waits[_C.directories(ids[waits], self.world.size) != self.world.rank]
        mine.known.admit(ids[others], keys[others])

    def _admit(self, ready: dict[str, np.ndarray], step: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Admits the ids that are ready in any directory, of a table all or none: table -> ids (n,), ascending, and
        their keys. ready: those of this rank."""
        admitted, free = {}, {name: self.of_tables[name].num_free for name in ready}
        for name, ids in of_all(self.world, ready, free).items():
            mine = self.of_tables[name]
            if ids is None and mine.rows.evict == NEVER:
                raise UserError(self._full_text(mine, step))
            if ids is None or not len(ids):
                continue
            admitted[name] = np.sort(ids), mine.take(len(ids))
            self._write(mine, *admitted[name])
        for name in admitted:  # no rank reads a row before its owner has written it
            self.of_tables[name].table.memory.fence(f"in step {step + 1} for new rows")
        return admitted

    def _write(self, mine: Vocabulary, ids: np.ndarray, keys: np.ndarray):
        """Enters admitted ids in this rank's directory and writes the rows of this rank."""
        is_own = _C.directories(ids, self.world.size) == self.world.rank
        mine.directory.admit(ids[is_own], keys[is_own])
        mine.write_first_values(ids, keys)

    def _full_text(self, mine: Vocabulary, step: int) -> str:
        return (
            f"{mine.label} is full: in step {step + 1} more ids need a row than {mine.num_free:,}, "
            f"which are free of max_rows: {mine.rows.max_rows:,}: give more, or evict: {LFU}"
        )

    # Maintenance.

    @property
    def figures(self) -> dict[str, int]:
        """Numbers of ids over all tables: with a row of their own and waiting for one; since the start those that lost
        their row to another, or were not seen for long; and the memory of ids, of all ranks. Without tables {}."""
        if not self:
            return {}
        ours = list(self.of_tables.values())
        waiting = sum(len(one.directory) - one.directory.num_admitted for one in ours)
        nbytes = sum(one.directory.nbytes + one.known.nbytes for one in ours)
        waiting, nbytes = (self.world.comm.allreduce(number) for number in (waiting, nbytes))
        sums = {name: sum(getattr(one.numbers, name) for one in ours) for name in ("admitted", "evicted", "expired")}
        return {
            "ids_admitted": sums["admitted"], "ids_waiting": waiting, "ids_evicted": sums["evicted"],
            "ids_expired": sums["expired"], "ids_bytes": nbytes,
        }  # fmt: skip

    def maintain(self, step: int):
        """Takes rows from some ids and gives them to others, after `step` steps. REQUIRES: a flush of the tables since
        the last write, and no batch is announced."""
        for name, mine in self.of_tables.items():
            mine.send_counts()
            entries = mine.directory.entries()
            is_expired = self._expired(mine, entries, step)
            expired = entries[is_expired & (entries[:, KEY] >= 0)]
            entries = entries[~is_expired]
            expired = of_all(self.world, {name: expired.reshape(-1)})[name].reshape(-1, 4)
            mine.numbers.expired += len(expired)
            wins, loses = self._chosen(mine, entries, mine.num_free + len(expired), step)
            mine.numbers.evicted += len(loses)
            entries = entries[~np.isin(entries[:, ID], loses[:, ID])]
            stays = (entries[:, KEY] >= 0) | (self.aged(entries, step) > 0) | np.isin(entries[:, ID], wins)
            entries = entries[stays]
            mine.directory.assign(np.ascontiguousarray(entries))
            mine.release(np.sort(np.concatenate([expired[:, KEY], loses[:, KEY]])))
            if len(wins):
                self._write(mine, wins, mine.take(len(wins)))
            mine.table.memory.fence(f"after step {step} for rows of new ids")

    def _expired(self, mine: Vocabulary, entries: np.ndarray, step: int) -> np.ndarray:
        """(n,) bool."""
        if mine.rows.expire_steps is None:
            return np.zeros(len(entries), bool)
        return entries[:, LAST] < step - mine.rows.expire_steps

    def aged(self, entries: np.ndarray, step: int) -> np.ndarray:
        """Counts as of a step (n,) int64, after halving."""
        return entries[:, COUNT] >> np.clip(step // self.every_steps - entries[:, LAST] // self.every_steps, 0, 63)

    def _chosen(self, mine: Vocabulary, entries: np.ndarray, num_free: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Which waiting ids get a row, and whose rows they get beyond num_free: ids (n,) int64, ascending; entries
        (m, 4). entries: of this directory."""
        entries = entries.copy()
        entries[:, COUNT] = self.aged(entries, step - 1)
        by = COUNT if mine.rows.evict == LFU else LAST
        is_ready = (entries[:, KEY] < 0) & (entries[:, COUNT] >= mine.rows.min_count)
        ready = first_of(entries[is_ready], by, -1, mine.rows.max_rows)  # no more can get a row
        [ready] = of_all(self.world, {"": ready.reshape(-1)}).values()
        ready = first_of(ready.reshape(-1, 4), by, -1, mine.rows.max_rows)
        num = max(0, len(ready) - num_free)
        if num == 0 or mine.rows.evict == NEVER:
            return np.sort(ready[:num_free, ID]), NO_ENTRIES
        worst = first_of(entries[entries[:, KEY] >= 0], by, 1, num)
        [worst] = of_all(self.world, {"": worst.reshape(-1)}).values()
        worst = first_of(worst.reshape(-1, 4), by, 1, num)
        best = ready[num_free : num_free + len(worst)]
        num_better = int(np.count_nonzero(best[:, by] > worst[:, by]))  # the first ones: best falls, worst rises
        return np.sort(ready[: num_free + num_better, ID]), worst[:num_better]


def first_of(entries: np.ndarray, by: int, sign: int, most: int) -> np.ndarray:
    """The first entries by sign times a column, then by id: at most `most`."""
    return entries[np.lexsort([entries[:, ID], sign * entries[:, by]])][:most]
