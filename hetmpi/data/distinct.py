"""HyperLogLog: estimates the number of distinct values from a few registers, which are merged by maximum.

Flajolet, Fusy, Gandouet and Meunier, "HyperLogLog: the analysis of a near-optimal cardinality estimation algorithm",
AofA 2007; with linear counting for small numbers. The standard error is 0.8 %.
"""

from __future__ import annotations

import numpy as np

from hetmpi import _C

INDEX_BITS = 14
NUM_REGISTERS = 1 << INDEX_BITS


def observe(registers: np.ndarray, hashes: np.ndarray) -> None:
    """Adds the values with these hashes, (n,) int64 of 63 bits, to registers (NUM_REGISTERS,) uint8, in place."""
    _C.observe(registers, hashes)


def estimate(registers: np.ndarray) -> int:
    """Estimated number of distinct values added to registers (NUM_REGISTERS,) uint8."""
    m = NUM_REGISTERS
    num = 0.7213 / (1 + 1.079 / m) * m * m / np.ldexp(1.0, -registers.astype(np.int32)).sum()
    empty = np.count_nonzero(registers == 0)
    if num <= 2.5 * m and empty:
        num = m * np.log(m / empty)
    return round(float(num))
