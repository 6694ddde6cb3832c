"""Writes a log of visits with two labels, for docs/models.md: python examples/make_shop.py visits.parquet [ROWS]

Columns: user, item, city; price, a number; click; buy, which only a click can lead to, and which is not known of a
tenth of the visits. What decides over a click decides over a purchase too, beside the price.
"""

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

USERS, ITEMS, CITIES = 2000, 500, 30


def table(num: int, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    of_user, of_item, of_city = (rng.normal(0, scale, size) for size, scale in ((USERS, 1), (ITEMS, 1), (CITIES, 0.5)))
    user, item = (USERS * rng.random(num) ** 2).astype(int), (ITEMS * rng.random(num) ** 2).astype(int)
    city, price = rng.integers(CITIES, size=num), rng.lognormal(2, 0.7, num)
    liked = of_user[user] + of_item[item] + of_city[city]
    click = rng.random(num) < 1 / (1 + np.exp(1 - liked))
    buy = click & (rng.random(num) < 1 / (1 + np.exp(-liked + 0.15 * (price - 8))))
    known = rng.random(num) >= 0.1
    return pa.table(
        {
            "user": [f"u{number}" for number in user],
            "item": [f"i{number}" for number in item],
            "city": [f"c{number}" for number in city],
            "price": price,
            "click": click.astype(np.int8),
            "buy": pa.array(buy.astype(np.int8), mask=~known),
        }
    )


if __name__ == "__main__":
    path, num = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200_000
    pq.write_table(table(num), path)
    print(f"{path}: {num:,} rows")
