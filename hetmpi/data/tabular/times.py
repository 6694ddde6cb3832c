"""Times that are numbers: since 1970 in a unit of seconds, or days as yyyymmdd."""

from __future__ import annotations

import numpy as np

PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
DAY = "yyyymmdd"
UNITS = (*PER_SECOND, DAY)
NAMES = {
    "s": "seconds since 1970",
    "ms": "milliseconds since 1970",
    "us": "microseconds since 1970",
    "ns": "nanoseconds since 1970",
    DAY: "days as yyyymmdd",
}
FIRST, LAST = 365 * 86_400, 130 * 365 * 86_400  # seconds since 1970 of the times that are recognized: 1971 to 2099
DAY_SECONDS = 86_400


def unit_of(least: float, most: float) -> str | None:
    """The unit in which both numbers are times from 1971 to 2099, None if there is none. The ranges of the units have
    no number in common."""
    if 19710101 <= least <= most <= 20991231 and not moments(np.array([least, most]), DAY)[1].any():
        return DAY
    return next((unit for unit, per in PER_SECOND.items() if FIRST * per <= least <= most < LAST * per), None)


def moments(numbers: np.ndarray, unit: str) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds since 1970 (n,) int64 of numbers (n,) int64 or float64, and which are no times in this unit, (n,)
    bool."""
    if unit == DAY:
        return days(numbers)
    per = PER_SECOND[unit]
    bad = ~(np.abs(numbers.astype(np.float64)) < 2**63 / 1e6 * min(per, 10**6))
    numbers = np.where(bad, 0, numbers)
    if numbers.dtype.kind == "f":
        return np.rint(numbers * (1e6 / per)).astype(np.int64), bad
    return (numbers * (10**6 // per) if per <= 10**6 else numbers // (per // 10**6)), bad


def days(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As moments(), of yyyymmdd."""
    bad = ~((numbers >= 101) & (numbers < 10**8)) | (numbers % 1 != 0)
    numbers = np.where(bad, 19700101, numbers).astype(np.int64)
    months, day = (numbers // 10_000 - 1970) * 12 + numbers // 100 % 100 - 1, numbers % 100
    begin, end = (one.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) for one in (months, months + 1))
    bad |= (numbers // 100 % 100 > 12) | (numbers // 100 % 100 < 1) | (day < 1) | (day > end - begin)
    return (begin + day - 1) * DAY_SECONDS * 10**6, bad


def date_of(micros: int) -> str:
    """The day of a time, as text."""
    return str(np.datetime64(int(micros), "us").astype("datetime64[D]"))
