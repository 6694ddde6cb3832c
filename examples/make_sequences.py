"""Writes a log of what users viewed, for model=sasrec: python examples/make_sequences.py views.parquet [ROWS]

Columns: item, the one viewed next; viewed, a list of those before it, which may be empty. What is viewed next depends
on the last item alone: each item has 10 successors, of which the n-th is 1 / n as likely as the first; in one of ten
cases any item follows. So the best HR@10 is known, and printed.
"""

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ITEMS, SUCCESSORS, ANY, LONGEST, BEST = 300, 10, 0.1, 20, 10


def log(num: int, seed: int = 0) -> tuple[pa.Table, float]:
    """The log, and the share of its rows with a history whose item is among the 10 likeliest after the last one."""
    rng = np.random.default_rng(seed)
    successors = np.array([rng.permutation(ITEMS)[:SUCCESSORS] for _ in range(ITEMS)])
    chances = 1 / np.arange(1, SUCCESSORS + 1)
    sizes = rng.integers(LONGEST + 1, size=num)
    views = np.empty((num, LONGEST + 1), np.int64)
    views[:, 0] = rng.integers(ITEMS, size=num)
    for place in range(1, LONGEST + 1):
        likely = successors[views[:, place - 1], rng.choice(SUCCESSORS, num, p=chances / chances.sum())]
        views[:, place] = np.where(rng.random(num) < ANY, rng.integers(ITEMS, size=num), likely)
    items, some = views[np.arange(num), sizes], sizes > 0
    last = views[np.arange(num), np.maximum(sizes, 1) - 1]
    hits = (successors[last, :BEST] == items[:, None]).any(1)
    names = np.array([f"i{number}" for number in range(ITEMS)], object)
    viewed = [names[row[:size]] for row, size in zip(views, sizes)]
    return pa.table({"item": names[items], "viewed": viewed}), float(np.where(some, hits, BEST / ITEMS).mean())


if __name__ == "__main__":
    path, num = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20_000
    table, best = log(num)
    pq.write_table(table, path)
    print(f"{path}: {num:,} rows of {ITEMS:,} items; the best HR@10 is {best:.4f}")
