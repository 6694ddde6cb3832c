"""One rank of a peer: Horovod's support of sparse gradients.

    mpiexec -n RANKS python bench/peers/horovod.py FOLDER

Every rank has the whole table in an nn.Embedding(sparse=True), and Horovod's DistributedOptimizer all-gathers the
indices and values of its gradient. hetmpi only starts MPI and Horovod.
"""

import sys

import numpy as np
import torch
from race.problem import DENSE_LR, ROWS_LR, Laps, Problem
from torch import nn

from hetmpi.world.launch import launch
from hetmpi.world.mpi import MPI


class OverRows(nn.Module):
    """A problem's network behind an embedding of all rows."""

    def __init__(self, problem: Problem):
        super().__init__()
        rows = torch.from_numpy(problem.first_rows(np.arange(problem.num_rows)))
        self.table, self.network = nn.Embedding.from_pretrained(rows, freeze=False, sparse=True), problem.network()

    def forward(self, ids, dense):
        keys, inverse = ids.unique(return_inverse=True)
        rows = self.table(keys).index_select(0, inverse.view(-1))
        return self.network(rows.view(*ids.shape, -1), dense)


def main(world):
    problem = Problem(sys.argv[1])
    torch.set_num_threads(1)
    hvd = world.start_horovod()
    model, criterion = OverRows(problem), nn.BCEWithLogitsLoss()
    optimizer = torch.optim.SGD([
        {"params": model.table.parameters(), "lr": ROWS_LR}, {"params": model.network.parameters(), "lr": DENSE_LR},
    ])  # fmt: skip
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    samples = [problem.samples(step, world.rank) for step in range(problem.steps)]
    world.comm.Barrier()
    laps = Laps()
    for ids, dense, label in samples:
        optimizer.zero_grad()
        loss = criterion(model(ids, dense), label)
        loss.backward()
        optimizer.step()
        laps.step(loss)
    laps.report(world.rank, world.size, lambda losses: world.comm.Allreduce(MPI.IN_PLACE, losses.numpy()))


launch(main)
