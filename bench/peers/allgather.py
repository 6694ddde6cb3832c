"""One rank of a peer: plain PyTorch over gloo, with the whole table on every rank.

    RANK=r WORLD_SIZE=n MASTER_ADDR=host MASTER_PORT=port python bench/peers/allgather.py FOLDER

DistributedDataParallel for the dense network. An all-gather of (unique keys, their summed gradients) exchanges the
gradients of rows, and each rank adds all of them to its copy. Keys are sent while the network computes.
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from race.problem import DENSE_LR, ROWS_LR, Laps, Problem
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Table:
    """All rows, the same on every rank: read() the rows of a batch, then share() its keys, then write() gradients.

    Ranks have different numbers of keys, but gloo gathers equal sizes: all send as many as the longest list has.
    """

    def __init__(self, problem: Problem):
        self.weight = torch.from_numpy(problem.first_rows(np.arange(problem.num_rows)))
        self.size, self.dim = dist.get_world_size(), problem.dim

    def read(self, keys: Tensor) -> Tensor:
        """keys (U,) int64, unique -> (U, dim), a leaf. Starts to exchange the numbers of keys. Collective."""
        self.keys, self.counts = keys, torch.empty(self.size, dtype=torch.int64)
        self.counting = dist.all_gather_into_tensor(self.counts, torch.tensor([len(keys)]), async_op=True)
        return self.weight.index_select(0, keys).requires_grad_()

    def share(self):
        """Starts to send the keys to all ranks. Collective."""
        self.counting.wait()
        self.counts = self.counts.tolist()
        self.all_keys, self.sharing = self._gather(self.keys.int())

    def write(self, grads: Tensor):
        """Adds the gradients of all ranks; grads (U, dim) are this rank's. Collective."""
        all_grads, sending = self._gather(grads.mul_(-ROWS_LR / self.size))
        self.sharing.wait()
        sending.wait()
        for count, keys, steps in zip(self.counts, self.all_keys.long(), all_grads):
            self.weight.scatter_add_(0, keys[:count, None].expand(-1, self.dim), steps[:count])

    def _gather(self, part: Tensor):
        """Starts to gather part (U, ...) of all ranks. Returns (ranks, longest U, ...), and the handle to wait for."""
        shape = (max(self.counts), *part.shape[1:])
        padded = part.new_empty(shape)
        padded[: len(part)] = part
        gathered = part.new_empty((self.size * shape[0], *shape[1:]))
        return gathered.view(self.size, *shape), dist.all_gather_into_tensor(gathered, padded, async_op=True)


def main():
    problem = Problem(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    table, criterion = Table(problem), nn.BCEWithLogitsLoss()
    network = DistributedDataParallel(problem.network(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=DENSE_LR)
    samples = [problem.samples(step, rank) for step in range(problem.steps)]
    dist.barrier()
    laps = Laps()
    for ids, dense, label in samples:
        keys, inverse = torch.unique(ids.view(-1), return_inverse=True)
        rows = table.read(keys)
        embeddings = rows.index_select(0, inverse).view(*ids.shape, problem.dim)
        loss = criterion(network(embeddings, dense), label)
        table.share()
        optimizer.zero_grad()
        loss.backward()
        table.write(rows.grad)
        optimizer.step()
        laps.step(loss)
    laps.report(rank, size, dist.all_reduce)
    dist.destroy_process_group()


main()
