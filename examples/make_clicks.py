"""Writes a log of clicks, for docs/your_data.md: python examples/make_clicks.py clicks.csv [ROWS]

Columns: click (0 or 1); user, item, city, device and weekday, text; price, age and seconds, numbers; tags, several
words separated by spaces. The chance of a click depends on user, item, city, tags and price.
"""

import csv
import sys

import numpy as np

NAMES = ["click", "user", "item", "city", "device", "weekday", "price", "age", "seconds", "tags"]
CITIES = ["Oslo", "Lima", "Pune", "Bern", "Kyoto", "Accra"]
WEEKDAYS = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
TAGS = ["red", "blue", "new", "sale", "large", "small", "gift", "used", "local", "bio"]


def rows(num: int, seed: int = 0):
    """The lines of the log."""
    rng = np.random.default_rng(seed)
    of_user, of_item = rng.normal(0, 0.8, 2000), rng.normal(0, 0.8, 500)
    of_tag, of_city = rng.normal(0, 0.9, len(TAGS)), rng.normal(0, 0.3, len(CITIES))
    for _ in range(num):
        user, item = int(2000 * rng.random() ** 2), int(500 * rng.random() ** 2)
        city, tags = rng.integers(len(CITIES)), rng.choice(len(TAGS), rng.integers(4), replace=False)
        price, age = rng.lognormal(2, 0.7), int(rng.integers(18, 80))
        seconds = "" if rng.random() < 0.05 else f"{rng.exponential(30):.1f}"  # some are missing
        logit = -1 + of_user[user] + of_item[item] + of_city[city] + of_tag[tags].sum() - 0.05 * (price - 8)
        yield [
            int(rng.random() < 1 / (1 + np.exp(-logit))), f"u{user}", f"i{item}", CITIES[city],
            ["phone", "desktop"][rng.integers(2)], WEEKDAYS[rng.integers(7)], f"{price:.2f}", f"{age}.0", seconds,
            " ".join(TAGS[tag] for tag in tags),
        ]  # fmt: skip


if __name__ == "__main__":
    path, num = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 50_000
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(NAMES)
        writer.writerows(rows(num))
    print(f"{path}: {num:,} rows")
