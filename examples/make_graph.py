"""Writes a graph of papers that cite each other, for docs/graphs.md: python examples/make_graph.py papers [NODES]

papers/edges.parquet   src, dst: dst cites src
papers/nodes.parquet   id, text; label, the paper's field; split: train, valid or test; words of its title; authors, a
                       list; age in decades. A tenth of the papers has no label.
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FIELDS = ["algebra", "biology", "chemistry", "economics", "geology", "physics"]
CITED, WORDS, AUTHORS = 4, 6, 3  # of a paper, on average or at most
OWN = 0.7  # share of citations, words and authors that are of the paper's own field


def near(rng, kind: np.ndarray, of_kind: list[np.ndarray], num: int) -> np.ndarray:
    """An item for each entry of kind (n,): of that kind with probability OWN, else any of `num`."""
    own = np.array([rng.choice(of_kind[one]) for one in kind])
    return np.where(rng.random(len(kind)) < OWN, own, rng.integers(num, size=len(kind)))


def tables(num: int, seed: int = 0) -> tuple[pa.Table, pa.Table]:
    """edges, nodes."""
    rng = np.random.default_rng(seed)
    field, ids = rng.integers(len(FIELDS), size=num), np.array([f"paper-{number}" for number in range(num)])
    words, authors = rng.integers(len(FIELDS), size=600), rng.integers(len(FIELDS), size=num)

    def some_of(kinds: np.ndarray, most: int) -> list[np.ndarray]:
        sizes = rng.integers(1, most + 1, size=num)
        of_kind = [np.flatnonzero(kinds == one) for one in range(len(FIELDS))]
        return np.split(near(rng, np.repeat(field, sizes), of_kind, len(kinds)), np.cumsum(sizes)[:-1])

    dst = np.repeat(np.arange(num), rng.poisson(CITED, size=num))
    src = near(rng, field[dst], [np.flatnonzero(field == one) for one in range(len(FIELDS))], num)
    label = [None if rng.random() < 0.1 else FIELDS[one] for one in field]
    nodes = {
        "id": ids,
        "label": label,
        "split": rng.choice(["train", "valid", "test"], size=num, p=[0.2, 0.2, 0.6]),
        "words": [" ".join(f"w{word}" for word in some) for some in some_of(words, WORDS)],
        "authors": [[f"a{author}" for author in some] for some in some_of(authors, AUTHORS)],
        "age": rng.exponential(1.0, size=num).astype(np.float32),
    }
    return pa.table({"src": ids[src], "dst": ids[dst]}), pa.table(nodes)


if __name__ == "__main__":
    folder, number = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5_000
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in zip(("edges", "nodes"), tables(number)):
        pq.write_table(table, folder / f"{name}.parquet")
        print(f"{folder / name}.parquet: {len(table):,} rows")
