"""Retrieval: both models equal plain torch in one process, exact at s = 0, with candidates of all ranks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pairs import ITEMS, TRAINED, VIEWED, Pairs
from torch.nn.functional import layer_norm, normalize

from hetmpi.data.batch import concatenate
from hetmpi.errors import UserError
from hetmpi.run.config import compose
from hetmpi.spans import Spans
from hetmpi.train import Training
from hetmpi.world.world import World

pytestmark = pytest.mark.mpi
BATCH, STEPS, LR, DIM, TEMPERATURE, MAX_LEN = 8, 30, 0.05, 8, 0.5, 4
SETTINGS = [
    "task=retrieval", "data._target_=pairs.Pairs", "~data.scale", "~data.zipf", "~data.num_train", "~data.num_valid",
    f"table.dim={DIM}", "table.init_std=0.3", f"batch_size={BATCH}", f"steps={STEPS}", f"log.every_steps={STEPS}",
    "optim.rows=sgd", f"optim.rows_lr={LR}", "optim.dense=sgd", f"optim.dense_lr={LR}", "device=cpu", "seed=3",
    "checkpoint.at_end=false", "eval.batch_size=9",
]  # fmt: skip
TWO_TOWER = [
    "model=two_tower", "model.item=[item,kind,price]", "model.hidden=[16,8]", f"model.temperature={TEMPERATURE}",
]  # fmt: skip
SASREC = [
    "model=sasrec", "model.item=[item]", "model.history=[viewed]", f"model.max_len={MAX_LEN}", "model.dropout=0",
    "model.num_heads=2",
]  # fmt: skip
QUERY, ITEM = ["user", "tags", "age"], ["item", "kind", "price"]


def made(folder, *overrides):
    world = World()
    return Training(world, compose(world, [*SETTINGS, f"run.dir={folder}", *overrides]), torch.device("cpu"), Spans())


def closed(training):
    training.log and training.log.close()
    training.close()


@pytest.fixture
def folder(world, tmp_path):
    return world.comm.bcast(tmp_path)


def all_rows(training):
    return {name: table.peek(torch.arange(table.num_rows)).clone() for name, table in training.tables.items()}


class Plain:
    """Both models written out, a sample at a time, and the loss."""

    def __init__(self, rows, dense):
        self.source, self.rows, self.dense = Pairs(3), rows, dense
        self.singles = [feature.name for feature in self.source.features if feature.pool is None]
        self.several = [feature.name for feature in self.source.features if feature.pool is not None]
        self.features = {feature.name: feature for feature in self.source.features}
        self.is_sequence = "start" in {name.split(".")[-1] for name in dense}
        whole = self.source.train(0, self.source.num_train)
        keys = whole.ids[:, self.singles.index("item")].tolist()
        self.firsts = {key: whole[keys.index(key) : keys.index(key) + 1] for key in sorted(set(keys))}
        if self.is_sequence:
            viewed = set(whole.bags[self.several.index("viewed")].values.tolist())
            self.firsts |= {key: self.of_history(whole[:1], key) for key in sorted(viewed - set(self.firsts))}
            self.firsts = dict(sorted(self.firsts.items()))
        self.shares = {key: max(1, keys.count(key)) / len(keys) for key in self.firsts}

    def of_history(self, sample, key):
        """A sample with an item that stands in histories alone."""
        ids = sample.ids.copy()
        ids[0, self.singles.index("item")] = key
        return replace(sample, ids=ids)

    def found(self, name, values):
        table = self.features[name].table
        projection = self.dense.get(f"project.{table}.weight")
        rows = self.rows[table][torch.as_tensor(values)]
        return rows if projection is None else rows @ projection.T

    def column(self, sample, name):
        """What a sample (1) has in a column, as a vector."""
        if name in self.source.dense_names:
            return torch.from_numpy(sample.dense[0, [self.source.dense_names.index(name)]])
        if name in self.singles:
            return self.found(name, sample.ids[0, self.singles.index(name)])
        values = sample.bags[self.several.index(name)].values
        return self.found(name, values).mean(0) if len(values) else torch.zeros(DIM)

    def tower(self, name, sample, columns):
        ordered = sorted(columns, key=lambda one: one in self.source.dense_names)
        x = torch.cat([self.column(sample, one) for one in ordered])
        for number in (0, 2):
            x = x @ self.dense[f"model.{name}.{number}.weight"].T + self.dense[f"model.{name}.{number}.bias"]
            x = torch.relu(x) if number == 0 else x
        return normalize(x, dim=0)

    def key(self, sample):
        return int(sample.ids[0, self.singles.index("item")])

    def item(self, sample):
        return self.column(sample, "item") if self.is_sequence else self.tower("item_tower", sample, ITEM)

    def queries(self, sample):
        """Vectors and the keys that they ask for; the last asks for the sample's item."""
        if not self.is_sequence:
            return [self.tower("query_tower", sample, QUERY) / TEMPERATURE], [self.key(sample)]
        values = sample.bags[self.several.index("viewed")].values[-MAX_LEN:]
        return list(self.attended(values)), [*values.tolist(), self.key(sample)]

    def attended(self, values):
        part = {name.removeprefix("model."): found for name, found in self.dense.items()}
        start = [part["start"][None], *([math.sqrt(DIM) * self.found("viewed", values)] if len(values) else [])]
        x = torch.cat(start) + part["positions"][: len(values) + 1]
        for block in ("blocks.0.", "blocks.1."):
            one = {name.removeprefix(block): found for name, found in part.items() if name.startswith(block)}
            y = layer_norm(x, [DIM], one["norm.weight"], one["norm.bias"])
            q, k, v = (y @ one["inputs.weight"].T + one["inputs.bias"]).chunk(3, dim=1)
            heads = []
            for head in (slice(0, DIM // 2), slice(DIM // 2, DIM)):
                scores = q[:, head] @ k[:, head].T / math.sqrt(DIM // 2)
                later = torch.ones_like(scores).triu(1) > 0
                heads.append(torch.softmax(scores.masked_fill(later, -torch.inf), 1) @ v[:, head])
            x = x + torch.cat(heads, 1) @ one["outputs.weight"].T + one["outputs.bias"]
            y = layer_norm(x, [DIM], one["of_layers.weight"], one["of_layers.bias"])
            y = torch.relu(y @ one["layers.0.weight"].T + one["layers.0.bias"])
            x = x + y @ one["layers.3.weight"].T + one["layers.3.bias"]
        return layer_norm(x, [DIM], part["norm.weight"], part["norm.bias"])

    def loss(self, samples, drawn):
        """The mean over all queries of samples of all ranks. drawn: keys."""
        samples = [samples[i : i + 1] for i in range(len(samples))]
        own, num = [self.key(sample) for sample in samples], len(self.firsts)
        vectors = [self.item(sample) for sample in samples] + [self.item(self.firsts[key]) for key in drawn]
        keys, losses = torch.tensor([*own, *drawn]), []

        def expected(key):
            return math.log(len(own) * self.shares[key] + len(drawn) / num)

        shift = torch.tensor([expected(key) for key in keys.tolist()])
        for i, sample in enumerate(samples):
            for query, key in zip(*self.queries(sample)):
                if key not in self.firsts:
                    continue
                positive = self.item(self.firsts[key]) if self.is_sequence else vectors[i]
                logit = positive @ query - expected(key)
                others = (torch.stack(vectors) @ query - shift)[keys != key]
                losses.append(torch.cat([logit[None], others]).logsumexp(0) - logit)
        return torch.stack(losses).mean()

    def ranks(self, samples):
        """Of the samples' items, from 1."""
        items = torch.stack([self.item(sample) for sample in self.firsts.values()]).double()
        found, keys = [], list(self.firsts)
        for i in range(len(samples)):
            key = self.key(samples[i : i + 1])
            if key not in self.firsts:
                found.append(np.inf)
                continue
            scores = (items @ self.queries(samples[i : i + 1])[0][-1].double()).numpy()
            true = scores[keys.index(key)]
            near = abs(scores - true) < 1e-6 * abs(true)
            found.append(1 + (~near & (scores > true)).sum() + (near.sum() - 1) / 2)
        return np.array(found)


def drawn_of(training, samples):
    return training.task.catalogue.keys[training.task.drawn(samples)].tolist()


@pytest.mark.parametrize(
    "model, more",
    [
        (TWO_TOWER, []),
        (TWO_TOWER, ["task.negatives=13", "table.ranks_per_node=1", "optim.dense_exchange=mpi"]),
        (SASREC, ["task.negatives=5"]),
        (SASREC, ["table.ranks_per_node=1", "optim.dense_exchange=mpi"]),
    ],
)
def test_rows_and_dense_layers_are_those_of_torch_after_30_steps(world, folder, model, more):
    training = made(folder, *model, *more)
    rows = {name: found.requires_grad_() for name, found in all_rows(training).items()}
    dense = {name: value.detach().clone().requires_grad_() for name, value in training.model.named_parameters()}
    optimizer = torch.optim.SGD([*rows.values(), *dense.values()], LR)
    training.run()
    found, layers = all_rows(training), dict(training.model.named_parameters())
    source, plain = Pairs(3), Plain(rows, dense)
    for step in range(STEPS if world.rank == 0 else 0):
        begin = step * BATCH * world.size
        parts = [source.train(begin + r * BATCH, begin + (r + 1) * BATCH) for r in range(world.size)]
        optimizer.zero_grad()
        plain.loss(concatenate(parts), [key for part in parts for key in drawn_of(training, part)]).backward()
        optimizer.step()
    if world.rank == 0:
        assert all((found[name] - rows[name]).abs().max() < 1e-5 for name in found)
        assert all((layers[name] - dense[name]).abs().max() < 1e-5 for name in dense)
    closed(training)


@pytest.mark.parametrize("model", [TWO_TOWER, SASREC], ids=["two_tower", "sasrec"])
def test_metrics_are_those_of_all_scores(world, folder, model):
    training = made(folder, *model, "steps=2")
    training.run()
    found = training.evaluate(3)
    rows, dense = all_rows(training), {name: value.detach() for name, value in training.model.named_parameters()}
    closed(training)
    if world.rank > 0:
        return
    ranks = Plain(rows, dense).ranks(Pairs(3).valid(0, 70))
    expected = {"recall_at_10": (ranks <= 10).mean(), "recall_at_100": (ranks <= 100).mean(), "mrr": (1 / ranks).mean()}
    expected |= {"ndcg_at_10": np.where(ranks <= 10, 1 / np.log2(1 + ranks), 0).mean(), "unseen": np.isinf(ranks).sum()}
    assert expected["unseen"] > 0 and expected["recall_at_100"] < 1
    assert found["figures"] == pytest.approx(expected, abs=1e-9)


def test_ties_have_the_mean_rank(world, folder):
    training = made(folder, *SASREC, "steps=0", "table.init_std=0")
    found = training.evaluate(1)
    num = len(training.task.catalogue)
    closed(training)
    if world.rank == 0:
        unseen = found["figures"]["unseen"] / 70
        assert found["figures"]["mrr"] == pytest.approx((1 - unseen) * 2 / (num + 1))


@pytest.mark.parametrize("model", [TWO_TOWER, SASREC], ids=["two_tower", "sasrec"])
@pytest.mark.parametrize("sums", ["horovod", "mpi"])
def test_a_rank_without_samples_takes_part(world, folder, model, sums):
    training = made(folder, *model, "task.negatives=4", f"optim.dense_exchange={sums}")
    num = 0 if world.rank == world.size - 1 and world.size > 1 else 3 + world.rank
    parts = [Pairs(3).train(100 * rank, 100 * rank + n) for rank, n in enumerate(world.comm.allgather(num))]
    rows, dense = all_rows(training), {name: value.detach() for name, value in training.model.named_parameters()}
    batch = training.task.batches(torch.device("cpu"))(parts[world.rank])
    own = {name: rows[name][keys].requires_grad_() for name, keys in batch.keys.items()}
    loss = training.task.loss(training._forward, own, batch)
    loss.backward()
    mean = world.comm.allreduce(loss.item()) / world.size
    grads = {
        name: torch.zeros_like(rows[name]).index_add(0, batch.keys[name], found.grad) for name, found in own.items()
    }
    grads = {name: torch.from_numpy(world.comm.allreduce(found.numpy())) / world.size for name, found in grads.items()}
    plain = Plain({name: found.requires_grad_() for name, found in rows.items()}, dense)
    expected = plain.loss(concatenate(parts), [key for part in parts for key in drawn_of(training, part)])
    expected.backward()
    closed(training)
    assert mean == pytest.approx(expected.item(), abs=1e-5)
    assert all((grads[name] - rows[name].grad).abs().max() < 1e-6 for name in grads)


def test_negatives_do_not_depend_on_the_number_of_ranks(world, folder):
    training = made(folder, *TWO_TOWER, "task.negatives=5", "steps=0")
    task, source = training.task, Pairs(3)
    whole = task.drawn(source.train(0, 24))
    parts = [task.drawn(source.train(begin, begin + size)) for begin, size in ((0, 8), (8, 3), (11, 13))]
    closed(training)
    assert np.concatenate(parts).tolist() == whole.tolist() and len(whole) == 15 and len(set(whole)) > 5


def test_the_catalogue_has_each_item_as_in_its_first_row(world, folder):
    training = made(folder, *TWO_TOWER, "steps=0")
    plain, catalogue = Plain({}, {}), training.task.catalogue
    closed(training)
    assert catalogue.keys.tolist() == list(plain.firsts)
    assert (catalogue.counts / 500).tolist() == list(plain.shares.values())
    prices = [first.dense[0, 1] for first in plain.firsts.values()]
    assert catalogue.samples.dense[:, 0].tolist() == prices
    assert catalogue.places(np.array([catalogue.keys[2], ITEMS + 999, -5])).tolist() == [2, -1, -1]


def test_items_of_histories_are_in_the_catalogue_where_items_have_no_other_columns(world, folder):
    training = made(folder, *SASREC, "steps=0")
    catalogue, source, first = training.task.catalogue, training.source, training.task.columns.item.first
    closed(training)
    assert (catalogue.keys - first).tolist() == list(range(VIEWED))
    assert (catalogue.counts > 0).sum() == TRAINED and catalogue.counts.sum() == source.num_train
    assert catalogue.samples.ids[:, 0].tolist() == catalogue.keys.tolist() and len(catalogue.samples) == VIEWED


def test_a_cache_within_its_bound_trains_as_well(world, folder):
    training = made(folder, *TWO_TOWER, "table.staleness=10", "table.cache.capacity_fraction=0.5",
                    "table.ranks_per_node=1", "task.negatives=4")  # fmt: skip
    training.run()
    found = training.evaluated
    closed(training)
    assert world.rank > 0 or found["figures"]["recall_at_100"] > 0


WRONG = [
    ("settings: TwoTower: model.item must name the columns of items", ["model=two_tower"]),
    ("TwoTower: no column is named colour, the data have user, kind, item", ["model.item=[item,colour]"]),
    ("the first name of model.item must be a categorical column of one value", ["model.item=[price,item]"]),
    ("TwoTower does not read viewed, with pool: none", ["model.item=[item]", "model.query=[viewed]"]),
    ("item is in model.query and in model.item", ["model.item=[item]", "model.query=[item]"]),
    ("tags must be a column with pool: none; those of the data: viewed", [*SASREC, "model.history=[tags]"]),
    ("task=retrieval gives the loss the scores", [*TWO_TOWER, "loss=bce"]),
    ("task.negatives must be an integer", [*TWO_TOWER, "task.negatives=-1"]),
    ("model=dnn is not for hetmpi.tasks.retrieval.Retrieval", ["model=dnn"]),
    ("TwoTower: model.item must name each column once, got item, item", ["model.item=[item,item]"]),
    ("SASRec: table.dim=8 must be a multiple of model.num_heads=3", [*SASREC, "model.num_heads=3"]),
    ("eval.group is for a task that takes it, as task=ctr", [*TWO_TOWER, "eval.group=user"]),
    ("eval.metric=auc must be a metric of the task", [*TWO_TOWER, "eval.metric=auc"]),
    ("computes a batch as a whole", [*TWO_TOWER, "train.accumulate=2"]),
    ("eval.metric=recall_at_7", [*TWO_TOWER, "eval.metric=recall_at_7", "eval.patience=2", "eval.every_steps=5"]),
]  # fmt: skip


@pytest.mark.parametrize("said, overrides", WRONG)
def test_other_settings_are_refused_on_every_rank(world, folder, said, overrides):
    with pytest.raises(UserError, match=said.replace("[", r"\[")):
        made(folder, *overrides)


def test_data_without_items_are_refused_on_every_rank(world, folder, monkeypatch):
    monkeypatch.setattr(Pairs, "encoder", NoItems(), raising=False)
    with pytest.raises(UserError, match="no training row has an item in column item"):
        made(folder, *TWO_TOWER)


class NoItems:
    """An encoder by which no key is that of an item."""

    def keys_of_none(self, name):
        [feature] = [one for one in Pairs(3).features if one.name == name]
        return list(range(feature.first, feature.first + feature.rows))
