"""Run by test_train.py: do the rows that a slow rank evaluates stay as they are until it is done?"""

import sys
import time

import torch

from hetmpi.comm.launch import launch
from hetmpi.run.config import compose
from hetmpi.spans import Spans
from hetmpi.train import Training


def main(world):
    training = Training(world, compose(world, sys.argv[1:]), torch.device("cpu"), Spans())
    predict, peek = training._predict, training.table.peek

    def slowly(batch):
        before = peek(batch.keys)
        time.sleep(0.1)
        if not (peek(batch.keys) == before).all():
            raise RuntimeError("rows changed while they were evaluated")
        return predict(batch)

    if world.rank == 0:
        training._predict = slowly
    training.run()
    training.close()


launch(main)
