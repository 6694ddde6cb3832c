"""Common parts of the models of knowledge graphs: scores of triples."""

import torch
from torch import Tensor, nn

from hetmpi.layers import look_up

HEAD, TAIL = 0, 1
NEVER = -1e30  # score of a negative that is left out


class LinkModel(nn.Module):
    """Scores a triple by comparing an entity with a query made of the other entity and the relation.

    A subclass defines `query`, `pairs` and `scores`. `forward(rows, batch)` takes the rows of the tables entity,
    relation and, if there is one, inverse, and a hetmpi.tasks.link.LinkBatch, and returns the scores of its triples
    (2B,), heads before tails, and of the negatives in their place (2B, N).

    Attributes: `row_dim`, `relation_dim` (int), widths of the rows of entities and relations; `relation_std`, standard
    deviation of the relations' initial rows, None for that of all tables.
    """

    relation_std = None

    def __init__(self, dim: int, relation_dim: int, dropout: float = 0.0, relation_dropout: float = 0.0):
        """dropout, relation_dropout: probability with which a number of a row of an entity or relation is set to zero
        in training."""
        super().__init__()
        self.row_dim, self.relation_dim = dim, relation_dim
        self.drop, self.drop_relation = nn.Dropout(dropout), nn.Dropout(relation_dropout)

    def forms(self, relations: dict[str, Tensor]) -> tuple[tuple[int, Tensor], tuple[int, Tensor]]:
        """How heads and tails are asked for: the side of query(), and rows of relations. relations: table -> rows
        (B, relation_dim). With a table `inverse` a head is asked for as the tail of the inverse relation."""
        head = (TAIL, relations["inverse"]) if "inverse" in relations else (HEAD, relations["relation"])
        return head, (TAIL, relations["relation"])

    def query(self, side: int, known: Tensor, relations: Tensor) -> Tensor:
        """The query (B, row_dim) for the head (side 0) or tail (side 1), given the other entity's rows (B, row_dim) and
        those of the relations (B, relation_dim)."""
        raise NotImplementedError

    def pairs(self, queries: Tensor, entities: Tensor) -> Tensor:
        """Scores (B,) of queries (B, row_dim) with an entity each (B, row_dim)."""
        raise NotImplementedError

    def scores(self, queries: Tensor, entities: Tensor) -> Tensor:
        """Scores (B, N) of queries (B, row_dim) with all of entities (N, row_dim)."""
        raise NotImplementedError

    def forward(self, rows: dict[str, Tensor], batch) -> tuple[Tensor, Tensor]:
        entities = rows["entity"]
        relations = {
            name: self.drop_relation(look_up(of_table, batch.relations))
            for name, of_table in rows.items()
            if name != "entity"
        }
        ends = [self.drop(look_up(entities, index)) for index in (batch.heads, batch.tails)]
        candidates = [self.drop(look_up(entities, chunk.negatives)) for chunk in batch.chunks]
        positive, negative = [], []
        forms, true_indices = self.forms(relations), (batch.heads, batch.tails)
        for side, (form, of_form), true_index in zip((HEAD, TAIL), forms, true_indices):
            queries = self.query(form, ends[1 - side], of_form)
            positive.append(self.pairs(queries, ends[side]))
            for chunk, of_chunk in zip(batch.chunks, candidates):
                part = slice(chunk.begin, chunk.end)
                left_out = true_index[part, None] == chunk.negatives
                if chunk.known is not None:
                    left_out[tuple(chunk.known[side])] = True
                negative.append(self.scores(queries[part], of_chunk).masked_fill(left_out, NEVER))
        return torch.cat(positive), torch.cat(negative)


class ProductModel(LinkModel):
    """The score is the dot product of query and entity."""

    def pairs(self, queries, entities):
        return (queries * entities).sum(1)

    def scores(self, queries, entities):
        return queries @ entities.T


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary parts."""
    return x.chunk(2, dim=1)


def even(dim: int, name: str) -> int:
    """Half of dim. Raises ValueError for an odd number."""
    if dim % 2:
        raise ValueError(f"{name}: table.dim must be even, for real and imaginary parts, got {dim}")
    return dim // 2
