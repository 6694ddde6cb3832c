"""HyperLogLog: estimates the number of distinct values from a few registers, which are merged by maximum.

Flajolet, Fusy, Gandouet and Meunier, "HyperLogLog: the analysis of a near-optimal cardinality estimation algorithm",
AofA 2007; with linear counting for small numbers. The standard error is 0.8 %.
"""

from __future__ import annotations

import numpy as np

INDEX_BITS = 14
NUM_REGISTERS = 1 << INDEX_BITS


def observe(registers: np.ndarray, hashes: np.ndarray) -> None:
    """Adds the values with these hashes, (n,) uint64, to registers (NUM_REGISTERS,) uint8, in place."""
    index = hashes >> np.uint64(64 - INDEX_BITS)
    rest = (hashes << np.uint64(INDEX_BITS)) | np.uint64(1 << (INDEX_BITS - 1))  # the set bit ends the run of zeros
    _, bit_length = np.frexp(rest.astype(np.float64))
    np.maximum.at(registers, index, (65 - bit_length).astype(np.uint8))


def estimate(registers: np.ndarray) -> int:
    """Estimated number of distinct values added to registers (NUM_REGISTERS,) uint8."""
    m = NUM_REGISTERS
    num = 0.7213 / (1 + 1.079 / m) * m * m / np.ldexp(1.0, -registers.astype(np.int32)).sum()
    empty = np.count_nonzero(registers == 0)
    if num <= 2.5 * m and empty:
        num = m * np.log(m / empty)
    return round(float(num))
