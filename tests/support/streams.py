"""Files of a stream: clicks of users, of which each day has some new ones."""

import os
import time

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc

USERS = 300


def clicks(day, num):
    """The samples of a day."""
    random = np.random.default_rng((11, day))
    worth = np.random.default_rng(12).normal(size=2 * USERS)
    users = np.minimum(random.zipf(1.3, num), USERS) + 10 * day
    label = (random.random(num) < 1 / (1 + np.exp(-2 * worth[users]))).astype(int)
    return pa.table({
        "user": [f"user {user}" for user in users],
        "hour": random.integers(0, 24, num),
        "price": random.random(num),
        "click": label,
    })  # fmt: skip


def put(folder, name, table, age_s=90.0):
    """Writes a file under a name that is not read, then gives it its own. age_s: since it was last changed; a file that
    has not changed for a while is complete."""
    folder.mkdir(exist_ok=True)
    hidden, path = folder / f".{name}", folder / name
    if isinstance(table, str):
        hidden.write_text(table)
    else:
        pc.write_csv(table, hidden)
    os.utime(hidden, (time.time() - age_s,) * 2)
    os.rename(hidden, path)
    return path
