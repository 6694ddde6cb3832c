"""One rank of a peer: TorchRec, over gloo on CPUs, over NCCL on GPUs.

    RANK=r WORLD_SIZE=n LOCAL_RANK=l MASTER_ADDR=host MASTER_PORT=port
    python bench/peers/torchrec.py FOLDER [device=cuda]

On CPUs it needs its own environment: requirements-torchrec.txt. DistributedModelParallel, one table per field, each
whole on one rank (row-wise sharding needs a GPU), SGD fused into the backward pass, the input of the next step sent in
advance by TrainPipelineSparseDist. On CPUs each rank makes its ids unique and looks them up in an EmbeddingCollection;
TorchRec's own `use_index_dedup` has no CPU kernel. On GPUs an EmbeddingBagCollection takes all ids, which fbgemm's
kernels sort, from batches that lie ready in pinned memory. Tables are distributed by their numbers of distinct ids in a
batch.

Not faster on two ranks, on CPUs: an EmbeddingBagCollection of all ids, with the same CPU time but five times the bytes;
the same with small tables replicated, as TorchRec's planner does, or sharded column-wise; unique ids with its variable
batches, which takes far longer; an EmbeddingCollection of all ids; no pipeline.
"""

import logging
import os
import sys
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from race.problem import DENSE_LR, ROWS_LR, Laps, Problem
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

CPU = torch.device("cpu")


@dataclass
class Batch(Pipelineable):
    """Samples as inputs of the model."""

    ids: KeyedJaggedTensor  # of each field: the unique ones as one list or, on GPUs, those of all samples
    inverse: Tensor  # (B * F,) int64 into the concatenated ids of all fields; empty on GPUs
    dense: Tensor  # (B, NUM_DENSE) float32
    label: Tensor  # (B,) float32

    def _parts(self):
        return self.ids, self.inverse, self.dense, self.label

    def to(self, device: torch.device, non_blocking: bool = False):
        if device == CPU:
            return self
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in self._parts()))

    def record_stream(self, stream):
        for part in self._parts():
            if part is not self.inverse:
                part.record_stream(stream)

    def pinned(self):
        return Batch(*(part.pin_memory() for part in self._parts()))


class Task(nn.Module):
    """The problem's network behind its tables: batch -> (loss, loss without its graph)."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.names = [f"field{field}" for field in range(problem.num_fields)]
        self.shape = (-1, problem.num_fields, problem.dim)
        self.tables = EmbeddingCollection(device=torch.device("meta"), tables=[
            EmbeddingConfig(name=name, feature_names=[name], num_embeddings=rows, embedding_dim=problem.dim)
            for name, rows in zip(self.names, problem.field_rows)
        ])  # fmt: skip
        self.network, self.criterion = problem.network(), nn.BCEWithLogitsLoss()

    def embeddings(self, batch: Batch) -> Tensor:
        """(B, F, dim)"""
        found = self.tables(batch.ids)
        rows = torch.cat([found[name].values() for name in self.names])  # (U, dim)
        return rows.index_select(0, batch.inverse).view(self.shape)

    def forward(self, batch: Batch):
        embeddings = self.embeddings(batch)
        loss = self.criterion(self.network(embeddings, batch.dense), batch.label)
        return loss, loss.detach()


class OnGpu(Task):
    """Its tables are an EmbeddingBagCollection."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.tables = EmbeddingBagCollection(device=torch.device("meta"), tables=[
            EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=rows, embedding_dim=problem.dim)
            for name, rows in zip(self.names, problem.field_rows)
        ])  # fmt: skip

    def embeddings(self, batch: Batch) -> Tensor:
        found = self.tables(batch.ids).to_dict()  # in the order of the ranks that own the tables
        return torch.cat([found[name] for name in self.names], dim=1).view(self.shape)


def pinned_batches(problem: Problem, rank: int, names: list[str]):
    """The batches of one rank for OnGpu, which lie ready in pinned memory."""
    firsts, made = torch.tensor(first_keys(problem)), []
    for step in range(min(problem.steps, len(problem.ids))):
        ids, dense, label = problem.samples(step, rank)
        by_field = (ids - firsts).t().reshape(-1)
        lengths = torch.ones(by_field.shape, dtype=torch.int32)
        made.append(Batch(KeyedJaggedTensor(names, by_field, lengths=lengths), ids.new_empty(0), dense, label).pinned())
    return (made[step % len(made)] for step in range(problem.steps))


class Batches:
    """The batches of one rank, made on demand from samples in memory."""

    def __init__(self, problem: Problem, rank: int, names: list[str]):
        self.samples = [problem.samples(step, rank) for step in range(problem.steps)]
        self.names, self.first_keys = names, torch.tensor(first_keys(problem))

    def __iter__(self):
        for ids, dense, label in self.samples:
            keys, inverse = torch.unique(ids.view(-1), return_inverse=True)  # sorted, so field by field
            ends = torch.searchsorted(keys, self.first_keys[1:])
            lengths = torch.diff(ends, prepend=ends.new_zeros(1), append=ends.new_full((1,), len(keys)))
            unique = KeyedJaggedTensor(
                keys=self.names,
                values=keys - self.first_keys.repeat_interleave(lengths, output_size=len(keys)),
                lengths=lengths.int(),
                stride=1,
            )
            yield Batch(unique, inverse, dense, label)


def first_keys(problem: Problem) -> list[int]:
    """The first key of each field."""
    return (np.cumsum(problem.field_rows) - problem.field_rows).tolist()


def plan_of(problem: Problem, task: Task, sharder, size: int, device: torch.device) -> ShardingPlan:
    """Assigns tables, those with the most distinct ids in a batch first, each to the rank with the fewest so far."""
    ids, load, shardings = problem.samples(0, 0)[0], [0] * size, {}
    distinct = [len(column.unique()) for column in ids.t()]
    for field in sorted(range(problem.num_fields), key=lambda field: -distinct[field]):
        rank = load.index(min(load))
        load[rank] += distinct[field]
        shardings[task.names[field]] = table_wise(rank=rank)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return ShardingPlan({"tables": construct_module_sharding_plan(
        task.tables, shardings, sharder=sharder, local_size=local_size, world_size=size, device_type=device.type
    )})  # fmt: skip


def sharded(problem: Problem, size: int, device: torch.device) -> DistributedModelParallel:
    """The task, its tables spread over the ranks, with the problem's first rows. Collective."""
    if device == CPU:
        task, sharder = Task(problem), EmbeddingCollectionSharder()
    else:
        task, sharder = OnGpu(problem), EmbeddingBagCollectionSharder()
    apply_optimizer_in_backward(torch.optim.SGD, task.tables.parameters(), {"lr": ROWS_LR})
    plan = plan_of(problem, task, sharder, size, device)
    model = DistributedModelParallel(task, device=device, plan=plan, sharders=[sharder])
    weights = model.state_dict()
    for name, first, rows in zip(task.names, first_keys(problem), problem.field_rows):
        of_table = f"tables.{'embeddings' if device == CPU else 'embedding_bags'}.{name}.weight"
        for shard in weights[of_table].local_shards():
            shard.tensor.detach().copy_(torch.from_numpy(problem.first_rows(np.arange(first, first + rows))))
    return model


def main():
    problem, device = Problem(sys.argv[1]), CPU
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    if sys.argv[2:] == ["device=cuda"]:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == CPU else "nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = sharded(problem, size, device)
    dense_parameters = dict(in_backward_optimizer_filter(model.named_parameters())).values()
    optimizer = torch.optim.SGD(dense_parameters, lr=DENSE_LR)
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    batches_of = Batches if device == CPU else pinned_batches
    batches = iter(batches_of(problem, rank, model.module.names))
    dist.barrier()
    laps = Laps()
    for _ in range(problem.steps):
        loss = pipeline.progress(batches)
        laps.step(loss)
    laps.report(rank, size, dist.all_reduce)
    dist.destroy_process_group()
    os._exit(0)  # a thread of the pipeline may still run, and would make Python's exit abort


main()
