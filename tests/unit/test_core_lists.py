"""Lists that Python and the core have in the same order."""

from dataclasses import fields

from hetmpi import _C
from hetmpi.counters import Counters
from hetmpi.spans import PARTS


def test_parts_of_a_step_are_those_that_the_core_times():
    assert tuple(PARTS) == _C.PARTS


def test_counters_are_those_of_the_core():
    counts = _C.Counters()
    counts.pages_read, counts.pages_written, counts.disk_steps = 1, 2, 3
    array = counts.as_array()
    assert len(array) == len(fields(Counters)) and not array[:-3].any()
    found = Counters.of_array(array)
    assert (found.pages_read, found.pages_written, found.disk_steps) == (1, 2, 3)
