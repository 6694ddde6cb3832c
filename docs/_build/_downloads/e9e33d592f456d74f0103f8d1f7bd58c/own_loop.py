"""A loop of your own around EmbeddingTable: logistic regression on random clicks. Run it with any number of ranks:

mpirun -np 2 python examples/own_loop.py
"""

import torch

from hetmpi import DenseOptimizer, EmbeddingTable, RowOptimizer, Schedule, launch, look_up

NUM_ROWS, DIM, FIELDS, BATCH, STEPS = 100_000, 8, 4, 256, 200


def main(world):
    """Every rank runs this; world.rank says which one it is."""
    hvd = world.start_horovod()
    table = EmbeddingTable(world, NUM_ROWS, DIM, RowOptimizer("adagrad", lr=0.1))
    model = torch.nn.Linear(FIELDS * DIM, 1)
    dense = DenseOptimizer(hvd, model, "adam", lr=0.01, weight_decay=0.0, schedule=Schedule())
    generator = torch.Generator().manual_seed(world.rank)
    for step in range(STEPS):
        ids = torch.randint(1000, (BATCH, FIELDS), generator=generator)  # your data: (B, F) int64 < NUM_ROWS
        label = (ids[:, 0] % 2).float()  # (B,)
        keys, index = torch.unique(ids, return_inverse=True)  # (U,), (B, F)
        rows = table.read(keys).requires_grad_()  # (U, DIM)
        logit = model(look_up(rows, index).flatten(1)).squeeze(1)  # (B,)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, label)
        loss.backward()
        dense.begin()  # starts the allreduce of the dense gradients
        table.write(keys, rows.grad / world.size)
        dense.step(step)
    table.flush()  # before anyone looks at the table
    if world.rank == 0:
        print(f"loss {loss.item():.3f} after {STEPS} steps on {world.size} rank(s)")
    table.close()


launch(main)  # an error on one rank ends all
