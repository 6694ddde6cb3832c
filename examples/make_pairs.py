"""Writes a log of items that users chose, for model=two_tower: python examples/make_pairs.py pairs.parquet [ROWS]

Columns: city, device and interest of the user; item and kind, which is the same in all rows of an item. The chance of
an item grows with its popularity, and with the product of its factors and the sum of those of city, device and
interest. So the best Recall@10 is known, and printed.
"""

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = {"city": 40, "device": 10, "interest": 60}
ITEMS, KINDS, FACTORS, SCALE, BEST, BLOCK = 1000, 20, 8, 1.0, 10, 10_000


def log(num: int, seed: int = 0) -> tuple[pa.Table, float]:
    """The log, and the mean chance that its rows' items were among the 10 likeliest ones."""
    rng = np.random.default_rng(seed)
    factors = {name: rng.normal(0, SCALE, (size, FACTORS)) for name, size in COLUMNS.items()}
    kinds = rng.integers(KINDS, size=ITEMS)
    of_items = rng.normal(0, 0.7, (KINDS, FACTORS))[kinds] + rng.normal(0, 0.7, (ITEMS, FACTORS))
    popularity = rng.normal(0, 1, ITEMS)
    drawn = {name: rng.integers(size, size=num) for name, size in COLUMNS.items()}
    items, best = np.empty(num, np.int64), np.empty(num)
    for begin in range(0, num, BLOCK):
        part = slice(begin, begin + BLOCK)
        logits = sum(factors[name][values[part]] for name, values in drawn.items()) @ of_items.T + popularity
        chances = np.exp(logits - logits.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        items[part] = (chances.cumsum(1) > rng.random((len(chances), 1))).argmax(1)
        best[part] = np.partition(chances, -BEST, 1)[:, -BEST:].sum(1)
    table = {name: [f"{name}{value}" for value in values] for name, values in drawn.items()}
    table |= {"item": [f"i{number}" for number in items], "kind": [f"k{kinds[number]}" for number in items]}
    return pa.table(table), float(best.mean())


if __name__ == "__main__":
    path, num = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100_000
    table, best = log(num)
    pq.write_table(table, path)
    print(f"{path}: {num:,} rows of {ITEMS:,} items; the best Recall@10 is {best:.4f}")
