"""Random tables, and random damage to files, for the fuzzers."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa

ODD = [
    "",
    " ",
    "NA",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "0x10",
    "1_000",
    "٣",
    "²",
    "true",
    "None",
    '"',
    "'",
    '""',
    ",",
    ";",
    "|",
    "\t",
]
ODD += [
    "\r",
    "\n",
    "\0",
    "\x1b[31m",
    "\u2028",
    "\u0085",
    "\ufeff",
    "😀",
    "${x}",
    "???",
    "#",
    ": ",
    "a" * 3_000,
    str(1 << 70),
]
BYTES = [
    b"",
    b"\xff",
    b"\xff\xfe",
    b"\xc3",
    b"\0",
    b'"',
    b'"a',
    b"\n",
    b"\r",
    b"\r\n",
    b",",
    b",,",
    b"\n\n",
    b"-",
    b"1e9",
    b"PAR1",
]


def odd_text(rng: random.Random) -> str:
    return "".join(rng.choice([*ODD, *"abc019.-"]) for _ in range(rng.randrange(3)))


def odd_column(rng: random.Random, num_rows: int) -> pa.Array:
    """Values of a random type, some of them null."""
    moment = datetime(2024, 1, 1)
    makers = [
        (pa.int64(), lambda: rng.choice([0, 1, -1, rng.getrandbits(63), rng.randrange(9)])),
        (pa.uint64(), lambda: rng.choice([0, 1, (1 << 64) - 1])),
        (pa.int8(), lambda: rng.randrange(-128, 128)),
        (pa.float64(), lambda: rng.choice([0.5, -1e300, float("nan"), float("inf"), rng.random()])),
        (pa.float32(), rng.random),
        (pa.bool_(), lambda: rng.random() < 0.5),
        (pa.string(), lambda: odd_text(rng)),
        (pa.string(), lambda: f"v{rng.randrange(9)}"),
        (pa.large_string(), lambda: odd_text(rng)),
        (pa.binary(), lambda: rng.choice(BYTES)),
        (pa.binary(2), lambda: rng.randbytes(2)),
        (pa.timestamp(rng.choice(["s", "us", "ns"])), lambda: moment + timedelta(seconds=rng.randrange(1 << 20))),
        (pa.timestamp("ms", "Europe/Paris"), lambda: moment + timedelta(hours=rng.randrange(99))),
        (pa.date32(), lambda: (moment + timedelta(days=rng.randrange(999))).date()),
        (pa.time64("us"), lambda: moment.time()),
        (pa.decimal128(9, 2), lambda: Decimal(rng.randrange(999)) / 4),
        (pa.list_(pa.string()), lambda: [rng.choice(["a", "b", None]) for _ in range(rng.randrange(4))]),
        (pa.list_(pa.int64()), lambda: [rng.randrange(9) for _ in range(rng.randrange(4))]),
        (pa.list_(pa.float64()), lambda: [0.5]),
        (pa.struct([("x", pa.int64())]), lambda: {"x": 1}),
        (pa.null(), lambda: None),
        (pa.duration("s"), lambda: timedelta(seconds=rng.randrange(99))),
    ]
    kind, make = rng.choice(makers if rng.random() < 0.1 else makers[:-4])  # the last four are refused or empty
    nulls = rng.choice([0, 0, 0.1, 1])
    return pa.array([None if rng.random() < nulls else make() for _ in range(num_rows)], kind)


def odd_table(rng: random.Random, odd_names: bool) -> pa.Table:
    """Columns of random types, and a label "click"."""
    num_rows = rng.choice([0, 1, 2, 20, 20, 200, 200, 200])
    names = [odd_text(rng) if odd_names else f"c{i}" for i in range(rng.randrange(6))]
    columns = [odd_column(rng, num_rows) for _ in names]
    label = odd_column(rng, num_rows) if rng.random() < 0.1 else pa.array([i % 2 for i in range(num_rows)], pa.int64())
    return pa.table([*columns, label], names=[*names, "click"])


def replace_by_no_file(rng: random.Random, path: Path):
    """Puts a pipe, a folder or a link in the place of a file."""
    path.unlink()
    make = rng.choice([os.mkfifo, os.mkdir, lambda path: path.symlink_to(rng.choice(["/dev/zero", "no", path.name]))])
    make(path)


def each_flipped_bit(file: Path, seed: int, num: int) -> Iterator[None]:
    """Flips `num` random bits of a file, one at a time: the file has one while the loop's body runs."""
    whole = file.read_bytes()
    for place in np.random.default_rng(seed).integers(0, 8 * len(whole), num).tolist():
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        yield
    file.write_bytes(whole)


def damage(rng: random.Random, path: Path, times: int = 1):
    """Changes a file at random."""
    for _ in range(times):
        text = bytearray(path.read_bytes())
        place = rng.randrange(len(text) + 1)
        kind = rng.choice(["flip", "flip", "flip", "cut", "insert", "remove", "double", "zeros"])
        if kind == "flip" and place < len(text):
            text[place] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del text[place:]
        elif kind == "insert":
            text[place:place] = rng.choice(BYTES)
        elif kind == "remove":
            del text[place : place + rng.randrange(1, 50)]
        elif kind == "double":
            text[place:place] = text[place : place + rng.randrange(1, 500)]
        elif kind == "zeros":
            text[place : place + 20] = bytes(len(text[place : place + 20]))
        path.write_bytes(text)
