"""Triples of one part divided into three, so that all names of the held-out ones are trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetmpi.data.triples.reading import Triples
from hetmpi.errors import UserError

MOST_HELD_OUT = 0.4


def divided(triples: Triples, share: float, seed: int) -> Triples:
    """A share of the distinct training triples as valid, and as many as test, drawn by the seed from those whose
    entities and relation all occur in triples that are trained. Raises UserError if there are too few."""
    distinct, number = np.unique(triples.parts["train"], axis=0, return_inverse=True)
    order = np.random.default_rng((seed, len(distinct))).permutation(len(distinct))
    is_needed = np.zeros(len(distinct), bool)  # the first triples of an entity or a relation, in this order
    ends = np.concatenate([distinct[order, 0], distinct[order, 2]])
    for names in (ends, distinct[order, 1]):
        is_needed[np.unique(names, return_index=True)[1] % len(distinct)] = True
    free, num = order[~is_needed], int(share * len(distinct))
    if len(free) < 2 * num:
        most = len(free) / 2 / len(distinct)
        raise UserError(
            f"data.held_out={share}: at most {most:.3f} can be held out, all names of the others being trained"
        )
    part_of = np.zeros(len(distinct), np.int8)
    part_of[free[:num]], part_of[free[num : 2 * num]] = 1, 2
    part_of = part_of[number.reshape(-1)]
    parts = {
        "train": triples.parts["train"][part_of == 0],
        "valid": distinct[np.sort(free[:num])],
        "test": distinct[np.sort(free[num : 2 * num])],
    }
    weights = None if triples.weights is None else triples.weights[part_of == 0]
    return replace(triples, parts=parts, weights=weights)
