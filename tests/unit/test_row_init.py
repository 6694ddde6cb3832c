"""New rows have the same bits whichever compiler built the core: logarithm, sine and cosine are those of libm."""

import ctypes

import numpy as np

from hetmpi import _C

GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
SEED, STD, DIM = 7, np.float32(0.1), 8


def mix64(value: int) -> int:
    """As in cpp/key_index.h."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def of_libm(name: str):
    function = getattr(ctypes.CDLL("libm.so.6"), name)
    function.argtypes, function.restype = [ctypes.c_float], ctypes.c_float
    return lambda value: np.float32(function(value))


def test_a_row_is_made_by_the_functions_of_libm():
    logf, cosf, sinf = map(of_libm, ("logf", "cosf", "sinf"))
    keys, expected = np.arange(2000), np.empty((2000, DIM), np.float32)
    for key, row in zip(keys.tolist(), expected):
        stream = mix64(SEED ^ mix64((key + GOLDEN) & MASK))
        for d in range(0, DIM, 2):
            draw = mix64((stream + d * GOLDEN) & MASK)
            u = (np.float32(draw >> 40) + np.float32(0.5)) * np.float32(2**-24)
            angle = np.float32(6.2831853) * (np.float32(draw & 0xFFFFFF) * np.float32(2**-24))
            radius = np.sqrt(np.float32(-2) * logf(u))
            row[d : d + 2] = STD * (radius * cosf(angle)), STD * (radius * sinf(angle))
    rows = np.empty_like(expected)
    _C.init_rows(rows, keys, SEED, float(STD))
    np.testing.assert_array_equal(rows, expected)
