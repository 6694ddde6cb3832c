"""TripleData: what all sources of triples share: the training stream, and the answers that are known to a question."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from hetmpi.data.files import absolute
from hetmpi.data.source import check_slice
from hetmpi.data.triples.held_out import MOST_HELD_OUT, divided
from hetmpi.data.triples.names import TripleNames
from hetmpi.data.triples.reading import PARTS, SUFFIXES, Triples, read_triples
from hetmpi.errors import LARGEST, UserError, check_integer, check_number, one_line

SUFFIXES_READ = (*SUFFIXES, ".dict")
CACHED_EPOCHS = 2  # orders of the training triples
VALID_SEED = 2022  # of the order of held-out triples, the same in all runs
HEAD, TAIL = 0, 1  # side of a triple that a question asks for


@dataclass
class TripleSamples:
    """Triples of the training stream, at positions start, start + 1, ..."""

    triples: np.ndarray  # (B, 3) int64: head, relation, tail
    start: int
    weights: np.ndarray | None = None  # (B,) float32, of mean 1 over the training triples; None: all 1

    def __len__(self) -> int:
        return len(self.triples)


class KnownAnswers:
    """The entities that complete (?, relation, tail) or (head, relation, ?) in triples (n, 3)."""

    def __init__(self, triples: np.ndarray, num_entities: int):
        self._num_entities, self._codes, self._answers = num_entities, {}, {}
        for side in (HEAD, TAIL):
            known, answers = triples[:, 2 - 2 * side], triples[:, 2 * side]
            codes = triples[:, 1] * num_entities + known
            order = np.lexsort((answers, codes))
            self._codes[side], self._answers[side] = codes[order], answers[order]

    def of(self, side: int, known: np.ndarray, relations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """known, relations (Q,) int64 -> numbers of questions (n,) int64 and their answers (n,) int64."""
        codes = relations * self._num_entities + known
        begins, ends = (np.searchsorted(self._codes[side], codes, how) for how in ("left", "right"))
        sizes = ends - begins
        offsets = np.cumsum(sizes) - sizes
        places = np.arange(sizes.sum()) + np.repeat(begins - offsets, sizes)
        return np.repeat(np.arange(len(codes)), sizes), self._answers[side][places]


class TripleData:
    """Triples of a knowledge graph. Epoch e visits the training triples in an order drawn from (seed, e); duplicated
    triples count as often as they occur. Held-out triples are those of the valid part,
    in an order of their own, the same for every seed.

    Call `prepare` first: it sets what hetmpi/tasks/link.py, TripleSource, needs."""

    name = "triples"
    is_valid_random = True

    def __init__(self, seed: int):
        check_integer("data.seed", seed, -LARGEST - 1)
        self.seed = seed & 0xFFFFFFFFFFFFFFFF

    def read(self) -> Triples:
        """The triples, the same on every rank. Raises UserError."""
        raise NotImplementedError

    def files(self) -> list[str]:
        """Paths of the files that all ranks read. Raises UserError."""
        return []

    def prepare(self, rank: int, size: int, barrier: Callable[[], None], report: Callable[[str], None] = print) -> None:
        """Rank 0 reads the data first, so that one rank reports an error; then all others do. Collective."""
        if rank == 0:
            self._take(self.read())
            report(self.described())
            for line in self.remarks():
                report(f"hetmpi: {line}")
        barrier()
        if rank != 0:
            self._take(self.read())

    def _take(self, triples: Triples):
        self.parts, self.entities, self.relations = triples.parts, triples.entities, triples.relations
        self.contents = {f"{part} triples": xxhash.xxh3_128_hexdigest(found) for part, found in triples.parts.items()}
        self.num_entities, self.num_relations = len(self.entities), len(self.relations)
        self.num_train, self.num_valid = len(self.parts["train"]), len(self.parts["valid"])
        train, weights = self.parts["train"], triples.weights
        self._weight_range = None if weights is None else (weights.min(), weights.max())
        self._weights = None if weights is None else (weights / weights.mean(dtype=np.float64)).astype(np.float32)
        self.is_seen = np.zeros(self.num_entities, bool)
        self.is_seen[train[:, [0, 2]]] = True
        self.is_seen_relation = np.zeros(self.num_relations, bool)
        self.is_seen_relation[train[:, 1]] = True
        self.encoder = TripleNames(self.entities, self.relations)
        self._valid_order = np.random.default_rng(VALID_SEED).permutation(self.num_valid)
        self._order = functools.lru_cache(CACHED_EPOCHS)(self._draw_order)
        self.known = functools.lru_cache(3)(self._known)

    def train(self, start: int, stop: int) -> TripleSamples:
        """Positions [start, stop) of the endless training stream, epoch after epoch."""
        check_slice(start, stop, None)
        epochs, places = np.divmod(np.arange(start, stop), self.num_train)
        numbers = np.empty(stop - start, np.int64)
        for epoch in np.unique(epochs).tolist():
            numbers[epochs == epoch] = self._order(epoch)[places[epochs == epoch]]
        weights = None if self._weights is None else self._weights[numbers]
        return TripleSamples(self.parts["train"][numbers], start, weights)

    def valid(self, start: int, stop: int) -> TripleSamples:
        """Held-out triples [start, stop)."""
        check_slice(start, stop, self.num_valid)
        return TripleSamples(self.parts["valid"][self._valid_order[start:stop]], start)

    def _known(self, parts: tuple[str, ...]) -> KnownAnswers:
        return KnownAnswers(np.concatenate([self.parts[part] for part in parts]), self.num_entities)

    def _draw_order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_train)

    def remarks(self) -> list[str]:
        """Lines about weights, and about held-out triples that are trained on."""
        train, found = self.parts["train"], []
        if self._weight_range is not None:
            least, most = self._weight_range
            found.append(
                f"the fourth column, or weight, weights the training triples, from {least:g} to {most:g}: remove it if "
                "it holds anything else, as times"
            )
        for part, noun in (("valid", "held-out"), ("test", "test")):
            num = int(are_among(self.parts[part], train, self.num_entities).sum())
            if num:
                share = f"{num:,} of {len(self.parts[part]):,} {noun} triples"
                found.append(
                    f"{share} also stand in train, which makes their metrics too good: remove them from one of both"
                )
        return found

    def described(self) -> str:
        """The sizes in a line."""
        train, valid, test = (len(self.parts[part]) for part in PARTS)
        lacking = [
            f"{int((~seen).sum()):,} {kind}"
            for kind, seen in (("entities", self.is_seen), ("relations", self.is_seen_relation))
            if not seen.all()
        ]
        return (
            f"{self.name}: {self.num_entities:,} entities, {self.num_relations:,} relations; {train:,} triples to "
            f"train on, {valid:,} held out, {test:,} to test"
            + (f"; without a training triple: {' and '.join(lacking)}" if lacking else "")
        )


def are_among(triples: np.ndarray, others: np.ndarray, num_entities: int) -> np.ndarray:
    """(n,) bool: which triples (n, 3) are among others (m, 3)."""
    both = np.concatenate([triples, others])
    pairs = np.unique(both[:, 1] * num_entities + both[:, 0], return_inverse=True)[1]
    codes = pairs * num_entities + both[:, 2]
    return np.isin(codes[: len(triples)], codes[len(triples) :])


class TripleFiles(TripleData):
    """Triples from files; see TripleData and hetmpi/data/triples/reading.py."""

    def __init__(self, path: str, seed: int, columns=None, delimiter: str | None = None, held_out: float | None = None):
        """path: a folder, or a file. columns: order of h, r and t in a line, as [h,t,r], or names of the columns of
        head, relation and tail; None for those of the layout. delimiter: between values; None for that of the layout.
        held_out: share of valid, and of test, drawn by the seed where the data have neither; None for none."""
        super().__init__(seed)
        if not isinstance(path, str) or not path:
            raise UserError(f"data.path must be a path, got {path!r}")
        is_list = isinstance(columns, Sequence) and not isinstance(columns, str)
        names = tuple(map(str, columns)) if is_list else ()
        if columns is not None and len(set(names)) != 3:
            raise UserError(f"data.columns must be three names, as [h,r,t], got {one_line(columns)}")
        if delimiter is not None:
            delimiter = str(delimiter).replace("\\t", "\t")
            if len(delimiter) != 1 or not delimiter.isascii():
                raise UserError(f"data.delimiter must be one character, got {one_line(repr(delimiter))}")
        if held_out is not None:
            check_number("data.held_out", held_out, 0, MOST_HELD_OUT)
        self.path, self.columns, self.delimiter, self.held_out = path, names or None, delimiter, held_out

    def read(self) -> Triples:
        found = read_triples(absolute(self.path), self.columns, self.delimiter)
        if self.held_out is None:
            return found
        for part in ("valid", "test"):
            if len(found.parts[part]):
                raise UserError(f"data.held_out: {one_line(self.path)} has a part {part}: leave data.held_out out")
        return divided(found, self.held_out, self.seed)

    def files(self) -> list[str]:
        path = absolute(self.path)
        names = os.listdir(path) if os.path.isdir(path) else []
        return [os.path.join(path, name) for name in sorted(names) if name.endswith(SUFFIXES_READ)] or [path]
