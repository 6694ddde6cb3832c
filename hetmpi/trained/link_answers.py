"""The best answers of a checkpoint's model to questions about links, by the names of entities and relations, and the
scores of triples.

Each rank scores its share of the entities against all questions; rank 0 merges their best, and scores the relations of
questions for these, and triples. A block of entities has the same rows on any number of ranks, so its scores have the
same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from hetmpi.checkpoint.manifest import read_manifest, tables_of
from hetmpi.checkpoint.shard_files import shards_of
from hetmpi.data.files import DataError, absolute
from hetmpi.data.triples.lines import BLANKS, check_columns, lines_of, text_of
from hetmpi.data.triples.names import ENTITY, RELATION, TripleNames
from hetmpi.data.triples.source import HEAD, TAIL, KnownAnswers, TripleFiles
from hetmpi.errors import UserError
from hetmpi.run.output import cannot_write, part_of
from hetmpi.trained.saved_model import Saved, dense_state, encoder_of, link_model
from hetmpi.world.world import World

ASKED = b"?"
QUESTIONS, TOGETHER = 512, 1 << 16  # scored at a time; and for one pass over the entities
BLOCK_ROWS = 1 << 14
LARGEST_TOP = BLOCK_ROWS
MOST_ANSWERS = 1 << 24  # together
NOBODY = -1  # in place of an entity
BETWEEN, GIVEN = 2, 3  # sides of a question for a relation, and of a triple
ASKED_NAMES = ("head", "tail", "relation", "score")  # by side
PAIRS = 1 << 14  # triples scored at a time


class LinkAnswers:
    """The answers of one checkpoint. Collective: all ranks make the same calls."""

    def __init__(self, world: World, checkpoint: Path, without: str | None = None, allow: Sequence[str] = ()):
        """without: a folder of triples (data/triples/reading.py), whose answers are left out. allow: as for
        dense_layers. Raises UserError for an incomplete checkpoint or triples that cannot be read."""
        self.world, manifest = world, read_manifest(checkpoint)
        tables, shards = tables_of(manifest), shards_of(checkpoint, manifest)
        for shard in (shard for of_table in shards.values() for shard in of_table):
            shard.check()
        self.saved = {name: Saved(table, shards[name]) for name, table in tables.items()}
        self.model = link_model(checkpoint, manifest, allow)
        names = encoder_of(checkpoint, manifest, dense_state(checkpoint, manifest))
        if not isinstance(names, TripleNames) or len(names.entities) != self.saved[ENTITY].num_rows:
            raise UserError(f"{checkpoint} has no names of its entities: predict needs them")
        self.names, self.numbers = names, names.numbers
        config = manifest["data_config"] if isinstance(manifest.get("data_config"), dict) else {}
        how = config.get("columns"), config.get("delimiter")
        known = None if without is None else world.from_first(lambda: self._known(without, *how))
        self.known = self.known_relations = None
        if known is not None:
            self.known, self.known_relations = (
                KnownAnswers(known[:, columns], len(names.entities)) for columns in ([0, 1, 2], [0, 2, 1])
            )

    def _known(self, folder: str, columns, delimiter) -> np.ndarray:
        """The triples (n, 3) int64 in a folder. columns, delimiter: as of the training's data. Says how many triples
        have names that the model lacks. Raises UserError if all have."""
        try:
            found = TripleFiles(folder, 0, columns, delimiter).read()
        except DataError as error:
            raise UserError(str(error).replace("data.path", "without", 1)) from error
        triples = np.concatenate(list(found.parts.values()))
        entities, relations = (
            np.array([self.numbers[table].get(name, NOBODY) for name in names])
            for table, names in ((ENTITY, found.entities), (RELATION, found.relations))
        )
        numbers = np.stack([entities[triples[:, 0]], relations[triples[:, 1]], entities[triples[:, 2]]], axis=1)
        is_known = (numbers != NOBODY).all(1)
        if not is_known.any():
            raise UserError(f"without={folder}: the model has the names of none of its {len(numbers):,} triples")
        if not is_known.all():
            lacking = f"{int((~is_known).sum()):,} of {len(numbers):,} triples have names that the model lacks"
            print(f"hetmpi: warning: without={folder}: {lacking}", flush=True)
        return numbers[is_known]

    def write(self, questions: str, out: Path, top: int) -> int:
        """Writes the `top` best answers to each question in a file as Parquet: head, relation, tail, asked (head, tail
        or relation; score for a triple), rank from 1, score. Returns the number of questions on rank 0. Raises
        UserError for a question that cannot be read, with its line, and if the file cannot be written."""
        torch.set_num_threads(1)  # sums of more threads have other roundings
        asked = self.world.from_first(lambda: list(self._read(questions)))
        top = min(top, max(len(self.names.entities), len(self.names.relations)))
        num = max(QUESTIONS, min(TOGETHER, MOST_ANSWERS // top))
        tables = (self._answered(asked[i : i + num], top) for i in range(0, len(asked), num))
        if self.world.rank > 0:
            list(tables)
            return 0
        with part_of(out) as part, cannot_write(out):
            writer = None
            for table in tables:
                writer = writer or pq.ParquetWriter(part, table.schema, compression="zstd")
                writer.write_table(table)
            writer.close()
        return len(asked)

    def _read(self, path: str) -> Iterator[tuple[int, int, int, int]]:
        """(side, entity, relation, further entity) of each line: head, relation and tail with tabs between, ? for what
        is asked. Of questions for a relation, and of triples, both entities are known; NOBODY for what is not."""
        num = 0
        for place, line in lines_of(absolute(path)):
            values = [value.strip(BLANKS) for value in line.split(b"\t")]
            check_columns(values, 3, place, "head, relation and tail with tabs between")
            if values.count(ASKED) > 1:
                raise DataError(
                    f"{place}: put ? in the place of the head, the relation or the tail, and of nothing else"
                )
            side = (HEAD, BETWEEN, TAIL)[values.index(ASKED)] if ASKED in values else GIVEN
            num += 1
            head, relation, tail = (
                NOBODY if name == ASKED else self._number(table, name, place)
                for table, name in zip((ENTITY, RELATION, ENTITY), values)
            )
            yield (side, tail, relation, NOBODY) if side == HEAD else (side, head, relation, tail)
        if num == 0:
            raise DataError(f"data.path={path} has no questions")

    def _number(self, table: str, name: bytes, place: str) -> int:
        number = self.numbers[table].get(name.decode(errors="replace"))
        if number is None:
            raise DataError(f"{place}: the model has no {table} {text_of(name)}")
        return number

    def _answered(self, asked: list[tuple[int, int, int, int]], top: int) -> pa.Table | None:
        """The answers to questions, on rank 0. Collective."""
        asked = np.array(asked, np.int64)
        is_of_entities = asked[:, 0] < BETWEEN
        found = self._entities(asked[is_of_entities, :3], top) if is_of_entities.any() else None
        if self.world.rank > 0:
            return None
        answers, scores = np.full((len(asked), top), NOBODY), np.full((len(asked), top), -np.inf, np.float32)
        if found is not None:
            answers[is_of_entities], scores[is_of_entities] = found
        for place in np.flatnonzero(asked[:, 0] == BETWEEN).tolist():
            best = self._relations(*asked[place, [1, 3]].tolist(), top)
            answers[place, : len(best[0])], scores[place, : len(best[0])] = best
        is_given = asked[:, 0] == GIVEN
        answers[is_given, 0], scores[is_given, 0] = asked[is_given, 3], self._scores(*asked[is_given, 1:].T)
        return self._table(asked, answers, scores)

    @torch.no_grad()
    def _scores(self, heads: np.ndarray, relations: np.ndarray, tails: np.ndarray) -> np.ndarray:
        """The scores (n,) float32 of triples, as of their tails."""
        scores = np.empty(len(heads), np.float32)
        for part in (slice(i, i + PAIRS) for i in range(0, len(heads), PAIRS)):
            queries = self._queries(np.full(len(heads[part]), TAIL), heads[part], relations[part])
            scores[part] = self.model.pairs(queries, self._rows(ENTITY, tails[part])).numpy()
        return np.nan_to_num(scores, nan=-np.inf, posinf=np.inf, neginf=-np.inf)

    def _relations(self, head: int, tail: int, top: int) -> tuple[np.ndarray, np.ndarray]:
        """The best relations between two entities, and their scores."""
        relations = np.arange(len(self.names.relations))
        if self.known_relations is not None:
            of_both = self.known_relations.of(TAIL, np.array([head]), np.array([tail]))[1]
            relations = np.setdiff1d(relations, of_both)
        scores = self._scores(np.full(len(relations), head), relations, np.full(len(relations), tail))
        order = np.argsort(-scores, kind="stable")[:top]
        return relations[order], scores[order]

    def _entities(self, asked: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The best entities (q, top) for questions (q, 3): side, entity, relation; and their scores, on rank 0.
        Collective."""
        best = [Best(len(part), top) for part in self._parts(asked)]
        queries = [self._queries(*part.T) for part in self._parts(asked)]
        hidden = [self._hidden(*part.T) for part in self._parts(asked)]
        num, step = self.saved[ENTITY].num_rows, self.world.size * BLOCK_ROWS
        for begin in range(self.world.rank * BLOCK_ROWS, num, step):
            rows = self._rows(ENTITY, np.arange(begin, min(begin + BLOCK_ROWS, num)))
            for of_part, query, (rest, answers) in zip(best, queries, hidden):
                scores = self.model.scores(query, rows)
                scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
                within = (begin <= answers) & (answers < begin + len(rows))
                scores[rest[within], answers[within] - begin] = -torch.inf
                of_part.add(begin, scores)
        gathered = self.world.comm.gather([(of_part.entities, of_part.scores) for of_part in best])
        if gathered is None:
            return None
        merged = [merged_best(found, top) for found in zip(*gathered)]
        return tuple(map(np.concatenate, zip(*merged)))

    @staticmethod
    def _parts(asked: Sequence) -> list:
        return [asked[i : i + QUESTIONS] for i in range(0, len(asked), QUESTIONS)]

    def _queries(self, sides: np.ndarray, known: np.ndarray, relations: np.ndarray) -> Tensor:
        """(q, row_dim)"""
        entities = self._rows(ENTITY, known)
        rows = {name: self._rows(name, relations) for name in self.saved if name != ENTITY}
        of_side = [self.model.query(form, entities, found) for form, found in self.model.forms(rows)]
        return torch.where(torch.from_numpy(sides == HEAD)[:, None], *of_side)

    def _hidden(self, sides: np.ndarray, known: np.ndarray, relations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of questions, and for each an entity that is left out."""
        if self.known is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        found = []
        for side in (HEAD, TAIL):
            places = np.flatnonzero(sides == side)
            rest, answers = self.known.of(side, known[places], relations[places])
            found.append((places[rest], answers))
        return tuple(map(np.concatenate, zip(*found)))

    def _rows(self, table: str, keys: np.ndarray) -> Tensor:
        """The rows of keys that may repeat."""
        unique, places = np.unique(keys, return_inverse=True)
        rows = np.empty((len(unique), self.saved[table].dim), np.float32)
        self.saved[table].read(unique, rows)
        return torch.from_numpy(rows if len(unique) == len(keys) and (unique == keys).all() else rows[places])

    def _table(self, asked: np.ndarray, found: np.ndarray, scores: np.ndarray) -> pa.Table:
        """asked (q, 4) as of _read(). found (q, top): entities, of questions for a relation relations, NOBODY for a
        missing answer; scores (q, top)."""
        questions, places = np.nonzero(found != NOBODY)
        side, known, relation, further = asked[questions].T
        answers = found[questions, places]
        heads = np.where(side == HEAD, answers, known)
        tails = np.where(side == HEAD, known, np.where(side == TAIL, answers, further))
        entities, relations = np.array(self.names.entities, object), np.array(self.names.relations, object)
        return pa.table({
            "head": pa.array(entities[heads], pa.string()),
            "relation": pa.array(relations[np.where(side == BETWEEN, answers, relation)], pa.string()),
            "tail": pa.array(entities[tails], pa.string()),
            "asked": pa.array(np.array(ASKED_NAMES)[side]),
            "rank": pa.array(places + 1, pa.int32()),
            "score": pa.array(scores[questions, places], pa.float32()),
        })  # fmt: skip


class Best:
    """The best entities so far for each of num questions: entities (num, top) int64, NOBODY where there are fewer, and
    scores (num, top) float32, descending."""

    def __init__(self, num: int, top: int):
        self.entities = np.full((num, top), NOBODY)
        self.scores = np.full((num, top), -np.inf, np.float32)

    def add(self, begin: int, scores: Tensor):
        """scores (num, n) of entities begin, begin + 1, ...; -inf for those that do not count."""
        top = self.scores.shape[1]
        best, places = scores.topk(min(top, scores.shape[1]), 1)
        last = best[:, -1:]
        is_cut = (scores == last).sum(1) > (best == last).sum(1)  # topk takes any of equal scores
        if is_cut.any():
            order = scores[is_cut].sort(dim=1, descending=True, stable=True).indices
            places[is_cut] = order[:, : best.shape[1]]
        entities = np.where((best == -torch.inf).numpy(), NOBODY, places.numpy() + begin)
        both = [(self.entities, self.scores), (entities, best.numpy())]
        self.entities, self.scores = merged_best(both, top)


def merged_best(parts: Sequence[tuple[np.ndarray, np.ndarray]], top: int) -> tuple[np.ndarray, np.ndarray]:
    """The best of several (entities, scores), by score, then by number."""
    entities, scores = (np.concatenate(arrays, axis=1) for arrays in zip(*parts))
    order = np.lexsort((entities, -scores), axis=1)[:, :top]
    return np.take_along_axis(entities, order, 1), np.take_along_axis(scores, order, 1)
