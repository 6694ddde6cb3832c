"""Run by test_train.py: do the rows that a slow rank evaluates stay unchanged until it has finished?"""

import sys
import time

import torch

from hetmpi.models.wdl import WDL
from hetmpi.run.config import compose
from hetmpi.spans import Spans
from hetmpi.train import Training
from hetmpi.world.launch import launch


class SlowToEvaluate(WDL):
    """Is slow on held-out batches, and checks that its rows still equal the owners'."""

    table = None

    def forward(self, rows, batch):
        if not self.training and self.table is not None:
            time.sleep(0.1)
            if not (self.table.peek(batch.keys["table"]) == rows).all():
                raise RuntimeError("rows changed while they were evaluated")
        return super().forward(rows, batch)


def main(world):
    config = compose(world, sys.argv[1:])
    model = SlowToEvaluate(26, 13, config.table.dim, [16])
    training = Training(world, config, torch.device("cpu"), Spans(), model=model)
    if world.rank == 0:
        (model.table,) = training.tables.values()
    training.run()
    training.close()


launch(main)
