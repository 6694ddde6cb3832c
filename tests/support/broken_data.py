"""Faulty data sets for test_refusals.py and test_watchdog.py: data._target_=broken_data.KeysOutOfRange"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from hetmpi.data.batch import Samples
from hetmpi.world.mpi import MPI


class Broken:
    name, num_rows, num_fields, num_dense, num_train, num_valid = "broken", 100, 2, 3, 10_000, 100

    def __init__(self, seed, **_):
        self.rank = 0

    def prepare(self, rank, size, barrier):
        self.rank = rank

    def train(self, start, stop):
        generator = np.random.default_rng(start)
        count = stop - start
        ids = generator.integers(0, 100, (count, 2))
        return Samples(ids, np.zeros((count, 3), np.float32), np.zeros(count, np.float32))

    valid = train


class KeysOutOfRange(Broken):
    def train(self, start, stop):
        samples = super().train(start, stop)
        samples.ids[-1, -1] = 100
        return samples


class FailsOnRankOne(Broken):
    def train(self, start, stop):
        if self.rank == 1 and start > 100:
            raise RuntimeError("the disk of rank one is gone")
        return super().train(start, stop)


class ExitsOnRankOne(Broken):
    def train(self, start, stop):
        if self.rank == 1 and start > 100:
            sys.exit(3)
        return super().train(start, stop)


class StallsOnRankOne(Broken):
    def train(self, start, stop):
        if self.rank == 1 and not self.has_stalled and start > 1000:
            self.has_stalled = True
            time.sleep(5)
        return super().train(start, stop)

    has_stalled = False


class FailsFromRankTwo(Broken):
    def train(self, start, stop):
        if self.rank >= 2:
            raise RuntimeError("no disk here")
        return super().train(start, stop)


class DiesOnRankOne(Broken):
    def train(self, start, stop):
        if self.rank == 1 and start > 100:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(start, stop)


class LabelsThatAreNan(Broken):
    def train(self, start, stop):
        samples = super().train(start, stop)
        if self.rank == 1 and start >= 4 * len(samples):
            samples.label[[3, 8]] = np.nan
        return samples


class DenseThatIsInfinite(Broken):
    def train(self, start, stop):
        samples = super().train(start, stop)
        if self.rank == 1 and start >= 4 * len(samples):
            samples.dense[5, 1] = np.inf
        return samples


class AnEmptyBatch(Broken):
    def train(self, start, stop):
        samples = super().train(start, stop)
        return samples[:0] if self.rank == 1 and start >= 4 * len(samples) else samples


class Stops(Broken):
    """Rank `stops` stops in its set-up, as on a host that hangs."""

    def __init__(self, seed, stops):
        self.stops = stops

    def prepare(self, rank, size, barrier):
        if rank == self.stops:
            os.kill(os.getpid(), signal.SIGSTOP)


class FailsAt(Broken):
    """Raises in the given method, on rank 0."""

    def __init__(self, seed, at):
        self.at = at
        self._fail("making")

    def _fail(self, at):
        if self.at == at and MPI.COMM_WORLD.rank == 0:
            Path("/nowhere").read_text() if at == "prepare" else int("mine")

    def prepare(self, rank, size, barrier):
        super().prepare(rank, size, barrier)
        self._fail("prepare")

    def train(self, start, stop):
        self._fail("train")
        return super().train(start, stop)

    def valid(self, start, stop):
        self._fail("valid")
        return super().train(start, stop)


class IdsThatAreFloats(Broken):
    def train(self, start, stop):
        samples = super().train(start, stop)
        samples.ids = samples.ids.astype(np.float64)
        return samples


class Sized(Broken):
    def __init__(self, seed, num_train, num_valid):
        self.num_train, self.num_valid = num_train, num_valid
