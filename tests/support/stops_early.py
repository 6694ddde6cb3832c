"""Run by test_watchdog.py: rank 1 stops before the watchdog has started."""

import os
import signal

from hetmpi import train
from hetmpi.world.launch import launch


def main(world):
    def stopping(*arguments):
        config = compose(*arguments)
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return config

    compose, train.compose = train.compose, stopping
    train.main(world)


launch(main)
