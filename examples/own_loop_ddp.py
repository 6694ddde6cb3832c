"""A loop of your own whose dense layers are averaged by torch's DistributedDataParallel in place of Horovod. MPI starts
the ranks, torch's Gloo connects them:

mpirun -np 2 python examples/own_loop_ddp.py
"""

import socket

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hetmpi import EmbeddingTable, MpiReductions, RowOptimizer, launch, look_up

NUM_ROWS, DIM, FIELDS, BATCH, STEPS = 100_000, 8, 4, 256, 200


def join(world):
    """torch's process group of the ranks of MPI, by a store on rank 0."""
    host, port, store = socket.gethostname(), 0, None
    if world.rank == 0:
        store = dist.TCPStore(host, port, world.size, is_master=True, wait_for_workers=False)
        port = store.port
    host, port = world.comm.bcast((host, port))
    if world.rank != 0:
        store = dist.TCPStore(host, port, world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)


def main(world):
    """Every rank runs this; world.rank says which one it is."""
    join(world)
    MpiReductions(world)  # its thread lets MPI deliver rows while this rank waits in Gloo
    table = EmbeddingTable(world, NUM_ROWS, DIM, RowOptimizer("adagrad", lr=0.1))
    model = DistributedDataParallel(torch.nn.Linear(FIELDS * DIM, 1))
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(STEPS):
        ids = torch.randint(1000, (BATCH, FIELDS), generator=generator)  # your data: (B, F) int64 < NUM_ROWS
        label = (ids[:, 0] % 2).float()  # (B,)
        keys, index = torch.unique(ids, return_inverse=True)  # (U,), (B, F)
        rows = table.read(keys).requires_grad_()  # (U, DIM)
        logit = model(look_up(rows, index).flatten(1)).squeeze(1)  # (B,)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
        dense.zero_grad()
        loss.backward()  # averages the dense gradients over all ranks
        dense.step()
        table.write(keys, rows.grad / world.size)
    table.flush()  # before anyone looks at the table
    if world.rank == 0:
        print(f"loss {loss.item():.3f} after {STEPS} steps on {world.size} rank(s)")
    table.close()
    dist.destroy_process_group()


launch(main)  # an error on one rank ends all
