"""Filtered ranks of the true entities among all entities, or among some, without a copy of the table: each owner scores
its own rows and counts those that are better than the true one and those that are equal; the counts are summed over the
ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from hetmpi.data.triples.names import ENTITY
from hetmpi.data.triples.source import KnownAnswers
from hetmpi.table.table import EmbeddingTable
from hetmpi.tasks.evaluation import Evaluation
from hetmpi.world.mpi import MPI

ATOL, RTOL = 1e-5, 1e-4  # scores that differ by less are equal, as in LibKGE
QUESTIONS = 512  # at a time
BLOCK_ROWS = 1 << 14  # of a shard, scored at a time: 32 MB of scores
KEPT_BYTES = 256 << 20  # of scores between finding the true ones and counting


def ranks_of(
    evaluation: Evaluation, triples: np.ndarray, known: KnownAnswers, why: str, among: np.ndarray | None = None
) -> np.ndarray:
    """The rank of the true head and of the true tail of triples (n, 3) int64: (n, 2) float64, from 1, on every rank.

    Other known answers to a question do not count. Of several entities with equal scores the true one has the mean
    rank. A score that is NaN is the worst. why: for messages. among (N,) int64: the entities among which the true one
    is ranked, which it need not be one of; None for all. Collective. REQUIRES: a flush since the last write."""
    ranking, ranks = Ranking(evaluation, known, why, among), []
    with torch.no_grad():
        for side in (0, 1):
            counts = [ranking.counts(side, triples[i : i + QUESTIONS]) for i in range(0, len(triples), QUESTIONS)]
            mine = np.concatenate(counts) if counts else np.zeros((0, 2), np.int64)
            evaluation.world.meet(why)
            better, equal = evaluation.world.comm.allreduce(mine).T
            ranks.append(1 + better + (equal - 1) / 2)
    evaluation.world.comm.Barrier()  # at s >= 1 a rank that resumes training would change rows that others still read
    return np.stack(ranks, axis=1)


class Ranking:
    """Counts of this rank's entities."""

    def __init__(self, evaluation: Evaluation, known: KnownAnswers, why: str, among: np.ndarray | None):
        self.evaluation, self.known, self.why, self.among = evaluation, known, why, among
        table = evaluation.tables[ENTITY]
        self._own = Candidates(table, table.keys().numpy())

    def counts(self, side: int, triples: np.ndarray) -> np.ndarray:
        """For triples (q, 3) the numbers of this rank's entities with better scores and with equal ones, the true one
        included: (q, 2) int64. Collective."""
        self.evaluation.spans.now("evaluation")
        queries = self._queries(side, triples)
        questions, answers = self.known.of(side, triples[:, 2 - 2 * side], triples[:, 1])
        true, own = triples[:, 2 * side], self._own
        if self.among is not None:  # and the true entities, each for its own questions
            own, guests = own.only(np.union1d(self.among, true)), np.setdiff1d(true, self.among)
            questions = np.append(questions, np.repeat(np.arange(len(true)), len(guests)))
            answers = np.append(answers, np.tile(guests, len(true)))
        is_other = answers != true[questions]
        hidden = Cells(*own.find(questions[is_other], answers[is_other]))
        trues = Cells(*own.find(np.arange(len(true)), true))
        true_scores, kept = self._true_scores(queries, trues, own)
        tolerance = ATOL + RTOL * true_scores.abs()
        tolerance[~tolerance.isfinite()] = 0
        above, below = (true_scores + tolerance)[:, None], (true_scores - tolerance)[:, None]
        better, at_least = torch.zeros(2, len(true), dtype=torch.int64)
        for begin, rows in own.blocks():
            scores = kept.get(begin)
            scores = self._scores(queries, rows) if scores is None else scores
            scores[hidden.within(begin, len(rows))] = torch.nan  # neither better nor equal
            better += (scores > above).sum(1)
            at_least += (scores >= below).sum(1)
        return torch.stack([better, at_least - better], 1).numpy()

    def _queries(self, side: int, triples: np.ndarray) -> Tensor:
        """(q, row_dim): the same on all ranks."""
        evaluation, model = self.evaluation, self.evaluation.model
        tables, device = evaluation.tables, evaluation.device
        known = tables[ENTITY].peek(torch.from_numpy(np.ascontiguousarray(triples[:, 2 - 2 * side])))
        keys = torch.from_numpy(np.ascontiguousarray(triples[:, 1]))
        relations = {name: tables[name].peek(keys).to(device) for name in tables if name != ENTITY}
        form, of_form = model.forms(relations)[side]
        return model.query(form, known.to(device), of_form)

    def _true_scores(self, queries: Tensor, trues: Cells, own: Candidates) -> tuple[Tensor, dict[int, Tensor]]:
        """The scores (q,) of the true entities, from the same blocks of scores as those they are compared with; and
        blocks that are kept, by their first row. Collective."""
        mine, kept, num_bytes = torch.zeros(len(queries)), {}, 0
        for begin, rows in own.blocks():
            questions, places = trues.within(begin, len(rows))
            if not len(questions):
                continue
            scores = self._scores(queries, rows)
            mine[questions] = scores[questions, places]
            num_bytes += scores.nbytes
            if num_bytes <= KEPT_BYTES:
                kept[begin] = scores
        self.evaluation.world.meet(self.why)
        total = np.empty(len(queries), np.float32)
        self.evaluation.world.comm.Allreduce(mine.numpy(), total, MPI.SUM)
        return torch.from_numpy(total), kept

    def _scores(self, queries: Tensor, rows: Tensor) -> Tensor:
        """(q, n) float32 on the CPU, without NaN."""
        scores = self.evaluation.model.scores(queries, rows.to(queries.device)).cpu()
        return scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


class Candidates:
    """This rank's entities that are scored: all of its shard, or some; places count them in the order of their rows."""

    def __init__(self, table: EmbeddingTable, keys: np.ndarray, rows: np.ndarray | None = None):
        """keys: of the candidates. rows: theirs in the shard, ascending; None for all."""
        self._table, self._keys, self._rows = table, keys, rows
        self._order = np.argsort(keys)
        self._sorted = keys[self._order]

    def only(self, entities: np.ndarray) -> Candidates:
        """Those among entities (n,), each of which may occur once. REQUIRES: these are all of the shard."""
        rows = np.sort(self.find(entities, entities)[1])
        return Candidates(self._table, self._keys[rows], rows)

    def find(self, questions: np.ndarray, entities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The pairs whose entity is a candidate: questions, and places."""
        if not len(self._sorted):
            return questions[:0], entities[:0]
        places = np.minimum(np.searchsorted(self._sorted, entities), len(self._sorted) - 1)
        is_own = self._sorted[places] == entities
        return questions[is_own], self._order[places[is_own]]

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """The rows (n, dim), at most BLOCK_ROWS at a time, with the place of the first."""
        if self._rows is None:
            yield from self._table.scan(BLOCK_ROWS)
            return
        for begin in range(0, len(self._rows), BLOCK_ROWS):
            rows = self._rows[begin : begin + BLOCK_ROWS]
            yield begin, torch.from_numpy(self._table.shard.snapshot("weight", rows))


class Cells:
    """Pairs of a question and the place of a candidate, in the order of places."""

    def __init__(self, questions: np.ndarray, places: np.ndarray):
        order = np.argsort(places, kind="stable")
        self._questions, self._places = questions[order], places[order]

    def within(self, begin: int, num: int) -> tuple[Tensor, Tensor]:
        """Those of places [begin, begin + num): questions, and places counted from begin."""
        part = slice(*np.searchsorted(self._places, [begin, begin + num]))
        return torch.from_numpy(self._questions[part]), torch.from_numpy(self._places[part] - begin)
