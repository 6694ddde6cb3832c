"""Runs on a small graph, and the same training in one process of plain torch."""

import json

import numpy as np
import torch
from small_graph import SmallGraph

from hetmpi.run.config import compose
from hetmpi.spans import Spans
from hetmpi.train import Training
from hetmpi.world.world import World

BATCH, STEPS, LR = 8, 30, 0.05
SETTINGS = [
    "task=node", "data._target_=small_graph.SmallGraph", "~data.scale", "~data.zipf", "~data.num_train",
    "~data.num_valid", "model.hidden=16", "table.dim=8", "table.init_std=0.5", f"batch_size={BATCH}",
    f"steps={STEPS}", "log.every_steps=1", "optim.rows=adagrad", f"optim.rows_lr={LR}", "optim.dense=adam",
    f"optim.dense_lr={LR}", "device=cpu", "seed=3",
]  # fmt: skip


def made(folder, *overrides):
    """A training into a folder that all ranks share."""
    config = compose(World(), [*SETTINGS, f"run.dir={folder}", *overrides])
    return Training(World(), config, torch.device("cpu"), Spans())


def closed(training):
    """Ends a training; returns its rows and dense parameters."""
    [table] = training.tables.values()
    rows = table.peek(torch.arange(table.num_rows)).clone()
    dense = {name: value.detach().clone() for name, value in training.model.named_parameters()}
    if training.log is not None:
        training.log.close()
    training.close()
    return rows, dense


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def mean_of(x, offsets, index):
    """Means of rows of x, written out; zeros for an empty list."""
    lists = [index[begin:end] for begin, end in zip(offsets, offsets[1:])]
    return torch.stack([x[list_].mean(0) if len(list_) else torch.zeros_like(x[0]) for list_ in lists])


def sage(dense, x, blocks):
    """GraphSAGE with weights by name, written out: blocks of arrays, from the heads outwards."""
    for number, block in enumerate(reversed(blocks)):
        own = x[: len(block.offsets) - 1] @ dense[f"own.{number}.weight"].T + dense[f"own.{number}.bias"]
        x = own + mean_of(x, block.offsets, block.index) @ dense[f"neighbours.{number}.weight"].T
        x = torch.relu(x) if number < len(blocks) - 1 else x
    return x


class Twin:
    """The same network over an EmbeddingBag of torch, trained on the global batch."""

    def __init__(self, training):
        [table] = training.tables.values()
        rows = table.peek(torch.arange(table.num_rows)).clone()
        self.bag = torch.nn.EmbeddingBag.from_pretrained(rows, freeze=False, mode="mean", include_last_offset=True)
        self.dense = {name: value.detach().clone() for name, value in training.model.named_parameters()}
        for value in self.dense.values():
            value.requires_grad_()
        self.source: SmallGraph = training.source
        self.num = BATCH * training.world.size
        self.optimizers = [
            torch.optim.Adagrad(self.bag.parameters(), LR), torch.optim.Adam(self.dense.values(), LR)
        ]  # fmt: skip

    def step(self, step):
        """Makes one step; returns the loss."""
        samples = self.source.train(step * self.num, (step + 1) * self.num)
        x = torch.cat([self.bag(*map(torch.from_numpy, (samples.ids.values, samples.ids.offsets))), tensor(samples)], 1)
        logits, label = sage(self.dense, x, samples.blocks), torch.from_numpy(samples.label)
        if self.source.is_multilabel:
            known = ~label.isnan().any(1)
            each = torch.nn.functional.binary_cross_entropy_with_logits(logits[known], label[known], reduction="none")
            loss = each.mean(1).sum() / len(label)
        else:
            each = torch.nn.functional.cross_entropy(logits, label, ignore_index=-1, reduction="none")
            loss = each.sum() / len(label)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.item()


def tensor(samples):
    return torch.from_numpy(samples.dense)


def all_logits(source, rows, dense):
    """GraphSAGE over all neighbours of all nodes, written out: (num_nodes, C)."""
    ids, numbers = source.inputs(np.arange(source.num_nodes))
    x = torch.cat([mean_of(rows, ids.offsets, ids.values), torch.from_numpy(numbers)], 1)
    offsets, index = source.neighbours(0, source.num_nodes)
    num_layers = len(source.fanout)
    for number in range(num_layers):
        own = x @ dense[f"own.{number}.weight"].T + dense[f"own.{number}.bias"]
        x = own + mean_of(x, offsets, index) @ dense[f"neighbours.{number}.weight"].T
        x = torch.relu(x) if number < num_layers - 1 else x
    return x
