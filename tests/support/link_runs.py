"""Runs on small triples, the same training in one process of plain torch, and ranks by plain numpy."""

import json

import numpy as np
import torch

from hetmpi.data.triples.source import TripleData
from hetmpi.run.config import compose
from hetmpi.spans import Spans
from hetmpi.train import Training
from hetmpi.world.world import World

GLOBAL, STEPS, LR = 24, 30, 0.1
SETTINGS = [
    "data=kg_synthetic", "data.entities=90", "data.relations=4", "data.triples=600", "table.dim=8", "seed=3",
    "table.init_std=0.4", "task.negatives=16", "task.chunk=6", f"steps={STEPS}", "log.every_steps=10",
    "optim.rows=adagrad", f"optim.rows_lr={LR}", "device=cpu",
]  # fmt: skip


def made(folder, *overrides):
    """A training into a folder that all ranks share, with the same global batch at 1, 2 and 3 ranks."""
    world = World()
    config = compose(world, [*SETTINGS, f"batch_size={GLOBAL // world.size}", f"run.dir={folder}", *overrides])
    return Training(world, config, torch.device("cpu"), Spans())


def rows_of(training):
    return {name: table.peek(torch.arange(table.num_rows)).clone() for name, table in training.tables.items()}


def closed(training):
    """Ends a training; returns its rows."""
    rows = rows_of(training)
    if training.log is not None:
        training.log.close()
    training.close()
    return rows


def evaluations(folder):
    lines = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    return {line["step"]: line["mrr"] for line in lines if "mrr" in line}


def score(model, h, r, t):
    """The scores of triples of rows, written out from the papers."""
    if model == "rescal":
        return torch.einsum("...i,...ij,...j->...", h, r.view(-1, 8, 8), t)
    if model == "simple":
        (a, b), (forth, back), (c, d) = (x.chunk(2, -1) for x in (h, r, t))
        return (a * forth * d + c * back * b).sum(-1) / 2
    if model == "distmult":
        return (h * r * t).sum(-1)
    if model.startswith("transe"):
        return -(h + r - t).abs().sum(-1) if model == "transe1" else -((h + r - t) ** 2).sum(-1).sqrt()
    h, t = (torch.complex(*x.chunk(2, -1)) for x in (h, t))
    if model == "complex":
        return (h * torch.complex(*r.chunk(2, -1)) * t.conj()).sum(-1).real
    return 6 - (h * torch.polar(torch.ones_like(r), r) - t).abs().sum(-1)


def score_of_heads(model, rows, r, heads, tail):
    """The scores of heads (n, dim) for a tail (1, dim) and a relation. rows: table -> rows."""
    kind = model.removesuffix(" reciprocal")
    if kind != model:
        return score(kind, tail, rows["inverse"][r][None], heads)
    return score(kind, heads, rows["relation"][r][None], tail)


class Twin:
    """A torch.nn.Embedding for each table, trained on the global batch by negative sampling, written out triple by
    triple."""

    def __init__(self, training, model):
        rows = rows_of(training)
        self.tables = {name: torch.nn.Embedding.from_pretrained(found, freeze=False) for name, found in rows.items()}
        self.model, self.task, self.source = model, training.task, training.source
        self.optimizer = torch.optim.Adagrad([table.weight for table in self.tables.values()], LR)

    def check(self, rows, world):
        """Makes the steps, on rank 0, and asserts that the rows of a training are those of the tables."""
        if world.rank == 0:
            for step in range(STEPS):
                self.step(step)
            for name, found in rows.items():
                assert torch.allclose(found, self.tables[name].weight, rtol=0, atol=1e-5), name
        world.comm.Barrier()

    def step(self, step):
        samples = self.source.train(step * GLOBAL, (step + 1) * GLOBAL)
        self.optimizer.zero_grad()
        losses = [self._loss(position, *triple) for position, triple in enumerate(samples.triples, step * GLOBAL)]
        weights = 1 if samples.weights is None else torch.from_numpy(samples.weights)
        sizes = [self._size(*triple) for triple in samples.triples]
        ((torch.stack(losses) * weights).mean() + self.task.penalty * torch.stack(sizes).mean()).backward()
        self.optimizer.step()

    def _size(self, head, relation, tail):
        entity, relations = self.tables["entity"].weight, self.tables["relation"].weight
        rows = entity[head], relations[relation], entity[tail]
        return sum(row.abs().pow(self.task.penalty_norm).sum() for row in rows)

    def _loss(self, position, head, relation, tail):
        rows = {name: table.weight for name, table in self.tables.items()}
        entity, kind = rows["entity"], self.model.removesuffix(" reciprocal")
        drawn = self.task._drawn(position // self.task.chunk)
        heads, tails = ([true, *drawn[drawn != true]] for true in (head, tail))
        if self.task.filtered:
            known = set(map(tuple, self.source.parts["train"].tolist()))
            heads = [head, *(e for e in heads[1:] if (e, relation, tail) not in known)]
            tails = [tail, *(e for e in tails[1:] if (head, relation, e) not in known)]
        of_heads = score_of_heads(self.model, rows, relation, entity[heads], entity[tail][None])
        of_tails = score(kind, entity[head][None], rows["relation"][relation][None], entity[tails])
        return -(of_heads.log_softmax(0)[0] + of_tails.log_softmax(0)[0]) / 2


def all_scores(model, rows, side, h, r, t):
    """The scores (entities,) of all heads (side 0) or tails of a triple of numbers."""
    entity, kind = rows["entity"], model.removesuffix(" reciprocal")
    if side == 0:
        return score_of_heads(model, rows, r, entity, entity[t][None]).numpy()
    return score(kind, entity[h][None], rows["relation"][r][None], entity).numpy()


def numpy_ranks(model, rows, triples, known, among=None):
    """Filtered mean ranks of heads and tails, by all scores at once. known: triples (n, 3). among: entities, None for
    all."""
    entity = rows["entity"]
    takes_part = np.isin(np.arange(len(entity)), np.arange(len(entity)) if among is None else among)
    known, ranks = set(map(tuple, known.tolist())), np.empty((len(triples), 2))
    for i, (h, r, t) in enumerate(triples.tolist()):
        for side, true in ((0, h), (1, t)):
            scores = all_scores(model, rows, side, h, r, t)
            of = (lambda e: (e, r, t)) if side == 0 else (lambda e: (h, r, e))
            counts = np.array([e == true or (takes_part[e] and of(e) not in known) for e in range(len(entity))])
            close = np.isclose(scores, scores[true], rtol=1e-4, atol=1e-5)
            better = (scores > scores[true]) & ~close & counts
            ranks[i, side] = better.sum() + ((close & counts).sum() + 1) / 2
    return ranks


class FewTriples(TripleData):
    """Triples given as they are."""

    def __init__(self, triples):
        super().__init__(0)
        self._take(triples)
