"""Exact ranks of held-out items among all of the catalogue: each rank has the vectors of a share of the items, scores
them for all queries, and counts those that are better than the true one and those that are equal; the counts are summed
over the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from hetmpi.data.pairs import PairBatch
from hetmpi.tasks.catalogue import NO_PLACE
from hetmpi.tasks.evaluation import Evaluation
from hetmpi.world.mpi import MPI

TOLERANCE = 1e-6  # scores that differ by less of their size are equal: vectors of equal items are, but for roundings
QUESTIONS = 1024  # at a time
BLOCK = 1 << 13  # items that are looked up, or scored, at a time


def ranks_of(task, evaluation: Evaluation, why: str) -> np.ndarray:
    """The rank of the item of each held-out row that has one, from 1, on every rank: (n,) float64; infinity if the
    catalogue lacks it. Of items with equal scores the true one has the mean rank; NaN is the worst. task: a
    hetmpi.tasks.retrieval.Retrieval. why: for messages. Collective. REQUIRES: a flush since the last write."""
    ranking = Ranking(task, evaluation, why)
    with torch.no_grad():
        ranking.embed_items()
        num, found = evaluation.num_samples, []
        for begin in range(0, num, QUESTIONS):
            found.append(ranking.counted(begin, min(begin + QUESTIONS, num)))
    places, mine = np.concatenate([one[0] for one in found]), np.concatenate([one[1] for one in found])
    evaluation.world.meet(why)
    better, equal = evaluation.world.comm.allreduce(mine).T
    evaluation.world.comm.Barrier()  # at s >= 1 a rank that resumes training would change rows that others still read
    return np.where(places == NO_PLACE, np.inf, 1 + better + (equal - 1) / 2)


class Ranking:
    """Counts of this rank's share of the items."""

    def __init__(self, task, evaluation: Evaluation, why: str):
        self.task, self.evaluation, self.why = task, evaluation, why
        world, num = evaluation.world, len(task.catalogue)
        self.bounds = [num * rank // world.size for rank in range(world.size + 1)]
        self.begin, self.end = self.bounds[world.rank : world.rank + 2]
        self.vectors: list[Tensor] = []  # of the share, in blocks

    def embed_items(self):
        """Computes the vectors of the share. Collective."""
        task, ends = self.task, [*range(self.begin, self.end, BLOCK), self.end]
        blocks = [task.columns.item_batch(task.catalogue.samples[i:j]) for i, j in zip(ends, ends[1:])]
        most = -(-max(np.diff(self.bounds)) // BLOCK)
        self.vectors = [found[1] for found in self._found(blocks, most)]

    def _found(self, batches: list[PairBatch], most: int) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """The model's vectors of batches. most: number of batches of the rank with the most. Collective."""
        evaluation = self.evaluation
        for batch in batches:
            evaluation.spans.now("evaluation")
            rows = evaluation.tables.peek(batch.keys)
            yield self.task.columns.vectors(evaluation.forward, rows, batch.on(evaluation.device))
        for _ in range(len(batches), most):  # others may need this rank's replies
            evaluation.tables.peek(dict.fromkeys(evaluation.tables, torch.empty(0, dtype=torch.int64)))

    def counted(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """For the held-out rows [begin, end) that have an item, its place in the catalogue (q,) int64, NO_PLACE if that
        lacks it, and the numbers of this rank's items with better scores, and with equal ones, the true one included:
        (q, 2) int64. Collective."""
        queries, places = self._queries(begin, end)
        own = torch.from_numpy((self.begin <= places) & (places < self.end))
        true = self._summed(self._own_scores(queries, places, own))
        tolerance = (TOLERANCE * true.abs()).nan_to_num_(posinf=0)
        above, below = (true + tolerance)[:, None], (true - tolerance)[:, None]
        better, at_least = torch.zeros(2, len(true), dtype=torch.int64, device=true.device)
        for block in self.vectors:
            scores = without_nan(queries @ block.double().T)
            better += (scores > above).sum(1)
            at_least += (scores >= below).sum(1)
        return places, torch.stack([better, at_least - better], 1).cpu().numpy()

    def _queries(self, begin: int, end: int) -> tuple[Tensor, np.ndarray]:
        """The vectors (q, W) float64 of held-out rows that have an item, and its place, of which each rank computes a
        part. Collective."""
        world, task = self.evaluation.world, self.task
        first, last = (begin + (end - begin) * rank // world.size for rank in (world.rank, world.rank + 1))
        samples = self.evaluation.draw(first, last)
        keys = task.columns.items.take(samples).ids[:, 0]
        [(vectors, _)] = self._found([task.columns.query_batch(samples)], 1)
        has_item = ~np.isin(keys, task.missing)
        part = vectors.cpu().numpy()[has_item], task.catalogue.places(keys[has_item])
        world.meet(self.why)
        parts = world.comm.allgather(part)
        whole = torch.from_numpy(np.concatenate([one[0] for one in parts])).to(self.evaluation.device)
        return whole.double(), np.concatenate([one[1] for one in parts])

    def _own_scores(self, queries: Tensor, places: np.ndarray, own: Tensor) -> Tensor:
        """The scores (q,) of the true items of this rank, from the same products as those they are compared with; 0 for
        those of others."""
        scores = queries.new_zeros(len(queries))
        mine = torch.from_numpy(places[own.numpy()] - self.begin).to(queries.device)
        rows = own.nonzero()[:, 0].to(queries.device)
        for number, block in enumerate(self.vectors):
            within = mine // BLOCK == number
            products = queries[rows[within]] * block[mine[within] % BLOCK].double()
            scores[rows[within]] = without_nan(products.sum(1))
        return scores

    def _summed(self, scores: Tensor) -> Tensor:
        """The sums over all ranks. Collective."""
        total = np.empty(len(scores))
        self.evaluation.world.comm.Allreduce(scores.cpu().numpy(), total, MPI.SUM)
        return torch.from_numpy(total).to(scores.device)


def without_nan(scores: Tensor) -> Tensor:
    """Scores of which a NaN is the worst."""
    return scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
