"""Clicks from what a user has seen lately: sums of embeddings and a small network.

    mpirun -np 2 python examples/bag_after.py --save clicks

With the same --save it goes on where it was stopped.
"""

import argparse

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from hetmpi import Checkpoints, EmbeddingBag, Position, RowOptimizer

NUM_ITEMS, UNKNOWN, DIM, NUM_DENSE = 100_000, 0, 16, 4
BATCH, LR = 128, 0.05


class Visits(Dataset):
    """Synthetic visits: up to 8 items seen, each with a weight, the larger the less time has passed; facts about the
    user; clicked or not."""

    def __init__(self, num, seed):
        generator = torch.Generator().manual_seed(seed)
        self.num_seen = torch.randint(9, (num,), generator=generator)
        total = int(self.num_seen.sum())
        self.items = (NUM_ITEMS * torch.rand(total, generator=generator) ** 4).long()  # few are popular
        self.weights = torch.rand(total, generator=generator)
        self.dense = torch.randn(num, NUM_DENSE, generator=generator)
        taste = torch.randn(NUM_ITEMS, generator=torch.Generator().manual_seed(0))
        visit = torch.arange(num).repeat_interleave(self.num_seen)
        score = self.dense[:, 0].clone().index_add_(0, visit, 2 * self.weights * taste[self.items])
        self.clicked = torch.bernoulli(torch.sigmoid(score), generator=generator)
        self.ends = self.num_seen.cumsum(0)

    def __len__(self):
        return len(self.clicked)

    def __getitem__(self, i):
        seen = slice(self.ends[i] - self.num_seen[i], self.ends[i])
        return self.items[seen], self.weights[seen], self.dense[i], self.clicked[i]


def collate(visits):
    """items (N,) of all visits, offsets (B,) where each one's begin, weights (N,), dense (B, NUM_DENSE), clicked
    (B,)."""
    items, weights, dense, clicked = zip(*visits)
    offsets = torch.tensor([0, *map(len, items[:-1])]).cumsum(0)
    return torch.cat(items), offsets, torch.cat(weights), torch.stack(dense), torch.stack(clicked)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = EmbeddingBag(NUM_ITEMS, DIM, mode="sum", padding_idx=UNKNOWN, optimizer=RowOptimizer("adagrad", LR))
        self.mlp = torch.nn.Sequential(torch.nn.Linear(DIM + NUM_DENSE, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def forward(self, items, offsets, weights, dense):
        seen = self.bag(items, offsets, per_sample_weights=weights)  # (B, DIM)
        return self.mlp(torch.cat([seen, dense], 1)).squeeze(1)  # (B,)


def evaluate(model, loader, criterion):
    """Mean loss over the held-out visits of all ranks."""
    model.eval()
    model.bag.flush()
    total = torch.zeros(2)  # loss, visits
    with torch.no_grad():
        for *inputs, clicked in loader:
            total += torch.tensor([criterion(model(*inputs), clicked).item() * len(clicked), len(clicked)])
    total = hvd.allreduce(total, op=hvd.Sum, name="evaluate")
    model.train()
    return (total[0] / total[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--visits", type=int, default=20_000)
    parser.add_argument("--save", required=True)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(1)
    train, held_out = Visits(args.visits, seed=1), Visits(args.visits // 5, seed=2)
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train, BATCH, sampler=sampler, collate_fn=collate)
    held_out = torch.utils.data.Subset(held_out, range(hvd.rank(), len(held_out), hvd.size()))
    held_out_loader = DataLoader(held_out, BATCH, collate_fn=collate)

    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    criterion = torch.nn.BCEWithLogitsLoss()
    start = 0
    checkpoints = Checkpoints(model.bag.table.world, args.save)
    if path := checkpoints.newest():
        start = checkpoints.load(path, model.bag.table, model, optimizer).samples // len(train)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for step, (*inputs, clicked) in enumerate(loader):
            optimizer.zero_grad()
            loss = criterion(model(*inputs), clicked)
            loss.backward()
            optimizer.step()
            model.bag.step()
            if step % 20 == 0:
                mean = hvd.allreduce(loss.detach(), name="loss").item()
                if hvd.rank() == 0:
                    print(f"epoch {epoch} step {step} loss {mean:.5f}")
        held_out_loss = evaluate(model, held_out_loader, criterion)
        if hvd.rank() == 0:
            print(f"epoch {epoch} held-out loss {held_out_loss:.5f}", flush=True)
        checkpoints.save(Position(model.bag.table.step, (epoch + 1) * len(train)), model.bag.table, model, optimizer)
    checkpoints.wait()


if __name__ == "__main__":
    main()
