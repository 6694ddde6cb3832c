"""Features whose values a model reads in their order: din equals plain torch, sample by sample, exact at s = 0."""

import numpy as np
import pytest
import torch
from click_features import Histories
from torch.nn.functional import binary_cross_entropy_with_logits, embedding, embedding_bag

from hetmpi.checkpoint.manifest import read_manifest
from hetmpi.data.batch import concatenate
from hetmpi.errors import UserError
from hetmpi.export import write_torchscript
from hetmpi.layers import padded
from hetmpi.run.config import compose
from hetmpi.spans import Spans
from hetmpi.train import Training
from hetmpi.trained.saved_model import dense_layers, dense_state, of_tensors
from hetmpi.world.world import World

pytestmark = pytest.mark.mpi
BATCH, STEPS, LR = 16, 30, 0.05
SETTINGS = [
    "model=din", "model.hidden=[16]", "model.attention=[8]", "data._target_=click_features.Histories", "~data.scale",
    "~data.zipf", "~data.num_train", "~data.num_valid", "table.dim=8", "table.init_std=0.3", f"batch_size={BATCH}",
    f"steps={STEPS}", f"log.every_steps={STEPS}", "optim.rows=sgd", f"optim.rows_lr={LR}", "optim.dense=sgd",
    f"optim.dense_lr={LR}", "device=cpu", "seed=3",
]  # fmt: skip
ONE, TWO = (["item"], ["clicked"]), (["item", "city"], ["clicked", "cities"])


def settings_of(pair):
    return [f"model.{key}=[{','.join(names)}]" for key, names in zip(("target", "history"), pair)]


def made(folder, *overrides):
    world = World()
    config = compose(world, [*SETTINGS, f"run.dir={folder}", *overrides])
    return Training(world, config, torch.device("cpu"), Spans())


@pytest.fixture
def folder(world, tmp_path):
    return world.comm.bcast(tmp_path)


def all_rows(training):
    return {name: table.peek(torch.arange(table.num_rows)).clone() for name, table in training.tables.items()}


def logits_of(source, rows, dense, pair, samples):
    """DIN written out, a sample at a time."""
    singles, bags = iter(samples.ids.T), iter(samples.bags)
    fields, histories = {}, {}
    for feature in source.features:
        projection = dense.get(f"project.{feature.table}.weight")
        table = rows[feature.table] if projection is None else rows[feature.table] @ projection.T
        if feature.pool is None:
            fields[feature.name] = embedding(torch.from_numpy(next(singles)), table)
            continue
        bag = next(bags)
        values, offsets = torch.from_numpy(bag.values), torch.from_numpy(bag.offsets)
        if feature.pool == "none":
            histories[feature.name] = [table[values[i:j]] for i, j in zip(offsets, offsets[1:])]
        else:
            fields[feature.name] = embedding_bag(values, table, offsets, mode=feature.pool, include_last_offset=True)

    def layers(part, x):
        for number in (0, 2):
            x = x @ dense[f"model.{part}.{number}.weight"].T + dense[f"model.{part}.{number}.bias"]
            x = torch.relu(x) if number == 0 else x
        return x

    found = []
    for i in range(len(samples)):
        query = torch.cat([fields[name][i] for name in pair[0]])
        keys = torch.cat([histories[name][i] for name in pair[1]], 1)
        queries = query.repeat(len(keys), 1)
        weights = layers("attention", torch.cat([queries, keys, queries - keys, queries * keys], 1))
        interest = (weights * keys).sum(0)
        inputs = [*(one[i] for one in fields.values()), interest, torch.from_numpy(samples.dense[i])]
        found.append(layers("deep", torch.cat(inputs)))
    return torch.cat(found)


@pytest.mark.parametrize("pair", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("more", [[], ["table.ranks_per_node=1"], ["train.accumulate=3"]])
def test_rows_and_dense_layers_are_those_of_torch_after_30_steps(world, folder, pair, more):
    training = made(folder, *settings_of(pair), *more, "checkpoint.at_end=false")
    rows = {name: found.requires_grad_() for name, found in all_rows(training).items()}
    dense = {name: value.detach().clone().requires_grad_() for name, value in training.model.named_parameters()}
    own = [torch.optim.SGD([found], 0.5 if name == "dim4" else LR) for name, found in rows.items()]
    optimizers = [*own, torch.optim.SGD(dense.values(), LR)]
    training.run()
    found, layers = all_rows(training), dict(training.model.named_parameters())
    source = Histories(3)
    for step in range(STEPS if world.rank == 0 else 0):
        begin = step * BATCH * world.size
        samples = concatenate([source.train(begin + r * BATCH, begin + (r + 1) * BATCH) for r in range(world.size)])
        loss = binary_cross_entropy_with_logits(
            logits_of(source, rows, dense, pair, samples), torch.from_numpy(samples.label)
        )
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    if world.rank == 0:
        assert all((found[name] - rows[name]).abs().max() < 1e-5 for name in rows)
        assert all((layers[name] - dense[name]).abs().max() < 1e-5 for name in dense)
    world.comm.Barrier()
    training.log and training.log.close()
    training.close()


def test_a_checkpoint_gives_the_logits_of_the_run_also_of_tensors_alone(world, folder):
    training = made(folder, *settings_of(TWO))
    training.run()
    rows, batch = all_rows(training), training.task.batches(torch.device("cpu"))(Histories(3).valid(0, 40))
    training.model.eval()
    with torch.no_grad():
        expected = training.model({name: rows[name][keys] for name, keys in batch.keys.items()}, batch)
    training.log and training.log.close()
    training.close()
    if world.rank == 0:
        [path] = (folder / "checkpoints").glob("step-*")
        manifest = read_manifest(path)
        model, inputs = dense_layers(path, manifest, dense_state(path, manifest))  # inputs of two samples
        write_torchscript(folder / "dense", of_tensors(model), inputs)
        of_batch = (rows[name][keys] for name, keys in batch.keys.items())
        found = torch.jit.load(folder / "dense")(*of_batch, batch.index, batch.dense, *sum(batch.bags, ()))
        assert torch.allclose(found, expected, atol=1e-6)


WRONG = {
    "DIN: clicked must be a column of one value, and histories has user, item": "[clicked] [clicked]",
    "DIN: tags must be a column with pool: none, and histories has cities, clicked": "[item] [tags]",
    "model.target and model.history must name as many features": "[item,city] [clicked]",
}


def test_a_model_that_reads_no_sequences_is_refused(world, folder):
    base = [one for one in SETTINGS if not one.startswith("model")]
    config = compose(world, [*base, f"run.dir={folder}"])
    with pytest.raises(UserError, match="WDL does not read cities, clicked, of data.columns with pool: none"):
        Training(World(), config, torch.device("cpu"), Spans())


@pytest.mark.parametrize("said", WRONG)
def test_other_features_are_refused(world, folder, said):
    target, history = WRONG[said].split()
    with pytest.raises(UserError, match=said):
        made(folder, f"model.target={target}", f"model.history={history}")


@pytest.mark.parametrize("sizes", [[], [0], [0, 0], [3, 0, 1]])
def test_values_stand_side_by_side(sizes):
    offsets = torch.tensor([0, *np.cumsum(sizes, dtype=np.int64)])
    index, has_value = padded(torch.arange(10, 10 + sum(sizes)), offsets)
    assert index.shape == has_value.shape == (len(sizes), max(sizes, default=0))
    assert has_value.sum(1).tolist() == sizes and index[has_value].tolist() == list(range(10, 10 + sum(sizes)))
    assert not index[~has_value].any()
