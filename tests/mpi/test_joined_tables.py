"""Features of several values, tables of several widths and optimizers: equal to torch's embeddings, exact at s = 0."""

import pytest
import torch
from click_features import Clicks
from torch.nn.functional import binary_cross_entropy_with_logits, embedding, embedding_bag

from hetmpi.data.batch import Samples, concatenate
from hetmpi.run.config import compose
from hetmpi.spans import Spans
from hetmpi.train import Training
from hetmpi.world.world import World

pytestmark = pytest.mark.mpi
BATCH, STEPS, LR = 16, 50, 0.05
SETTINGS = [
    "model=wdl", "model.hidden=[16]", "data._target_=click_features.Clicks", "~data.scale", "~data.zipf",
    "~data.num_train", "~data.num_valid", "table.dim=8", "table.init_std=0.1", f"batch_size={BATCH}",
    f"steps={STEPS}", f"log.every_steps={STEPS}", "optim.rows=adagrad", f"optim.rows_lr={LR}", "optim.dense=sgd",
    f"optim.dense_lr={LR}", "checkpoint.at_end=false", "device=cpu", "seed=3",
]  # fmt: skip
OPTIMIZERS = {
    "table": lambda rows: torch.optim.Adagrad([rows], LR),
    "dim12": lambda rows: torch.optim.Adagrad([rows], LR),
    "dim4": lambda rows: torch.optim.SGD([rows], 0.5),
}


@pytest.fixture
def training(tmp_path, request):
    made = Training(
        World(), compose(World(), [*SETTINGS, f"run.dir={tmp_path}", *request.param]), torch.device("cpu"), Spans()
    )
    yield made
    made.log and made.log.close()
    made.close()


def all_rows(training):
    return {name: table.peek(torch.arange(table.num_rows)).clone() for name, table in training.tables.items()}


class Twin:
    """The same model over embeddings of torch, one per table, trained on the joined batches of all ranks."""

    def __init__(self, training):
        self.source, self.wrapped, self.size = training.source, training.model, training.world.size
        self.rows = {name: rows.requires_grad_() for name, rows in all_rows(training).items()}
        self.dense = {name: value.detach().clone() for name, value in training.model.named_parameters()}
        for value in self.dense.values():
            value.requires_grad_()
        self.optimizers = [OPTIMIZERS[name](rows) for name, rows in self.rows.items()]
        self.optimizers.append(torch.optim.SGD(self.dense.values(), LR))

    def step(self, samples: Samples) -> float:
        """Makes one step; returns the loss."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(self.logits(samples), torch.from_numpy(samples.label))
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.item()

    def logits(self, samples: Samples):
        """WDL written out: an MLP of one layer on the dense features, and a linear layer on it and all embeddings."""
        singles, bags = iter(samples.ids.T), iter(samples.bags)
        found = []
        for feature in self.source.features:
            rows = self.rows[feature.table]
            if feature.pool is None:
                one = embedding(torch.from_numpy(next(singles)), rows)
            else:
                bag = next(bags)
                values, offsets = torch.from_numpy(bag.values), torch.from_numpy(bag.offsets)
                one = embedding_bag(values, rows, offsets, mode=feature.pool, include_last_offset=True)
            projection = self.dense.get(f"project.{feature.table}.weight")
            found.append(one if projection is None else one @ projection.T)
        deep = torch.relu(torch.from_numpy(samples.dense) @ self.dense["model.deep.0.weight"].T)
        return (torch.cat([deep, *found], 1) @ self.dense["model.out.weight"].T).squeeze(1)


def joined_samples(world, step):
    begin = step * BATCH * world.size
    return concatenate([Clicks(3).train(begin + r * BATCH, begin + (r + 1) * BATCH) for r in range(world.size)])


@pytest.mark.parametrize(
    "training",
    [[], ["table.ranks_per_node=1"], ["table.ranks_per_node=1", "table.exchange=messages"], ["train.accumulate=5"]],
    indirect=True,
)
def test_rows_and_dense_layers_are_those_of_torchs_embedding_bags_after_50_steps(training):
    assert {name: (len(rows), rows.shape[1]) for name, rows in all_rows(training).items()} == {
        "dim4": (60, 4), "table": (124, 8), "dim12": (60, 12),
    }  # fmt: skip
    twin, before = Twin(training), all_rows(training)
    training.run()
    for step in range(STEPS):
        twin.step(joined_samples(training.world, step))
    for name, rows in all_rows(training).items():
        assert (rows - twin.rows[name]).abs().max() < 1e-5, name
        assert (rows - before[name]).abs().max() > 0.01, f"{name} has not moved"
    for name, value in training.model.named_parameters():
        assert (value - twin.dense[name]).abs().max() < 1e-5, name


STALE = ["table.staleness=5", "table.ranks_per_node=1", "table.cache.capacity_fraction=0.5", "table.cache.admit=all"]


@pytest.mark.parametrize("training", [["train.precision=bf16"]], indirect=True)
def test_in_16_bits_rows_move_alike_and_gradients_have_32(training):
    twin, before, dtypes = Twin(training), all_rows(training), set()
    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: dtypes.add(one.grad.dtype))
    training.run()
    for step in range(STEPS):
        twin.step(joined_samples(training.world, step))
    assert dtypes == {torch.float32}
    for name, rows in all_rows(training).items():
        moved, off = (twin.rows[name] - before[name]).norm(), (rows - twin.rows[name]).norm()
        assert rows.dtype == torch.float32 and 1e-5 < off < 0.1 * moved, (name, off, moved)


@pytest.mark.parametrize("training", [STALE], indirect=True)
def test_under_a_bound_no_gradient_is_lost_and_all_tables_stay_near_the_exact_ones(training):
    twin, before = Twin(training), all_rows(training)
    training.run()
    for step in range(STEPS):
        twin.step(joined_samples(training.world, step))
    for name, rows in all_rows(training).items():
        moved, off = (twin.rows[name] - before[name]).norm(), (rows - twin.rows[name]).norm()
        assert moved > 0 and off < 0.3 * moved, (name, off, moved)
    counted = training.tables.counters
    assert counted.pushed > 0 or training.world.size == 1
