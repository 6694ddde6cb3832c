"""Lists with a weight for each id: read alike as texts, maps and two lists, and pooled as torch's EmbeddingBag does."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hetmpi.data.batch import FeatureBatches, concatenate
from hetmpi.data.features import Feature, pools_of
from hetmpi.data.pairs import Side, batches_of
from hetmpi.data.tabular import DataError, Encoder, Reader, Tabular
from hetmpi.inspect import inspected
from hetmpi.layers import FeatureRows, look_up
from hetmpi.trained.coded_values import coded
from hetmpi.trained.saved_model import example, of_tensors

NUM = 60
RNG = np.random.default_rng(0)
LISTS = [[(f"t{i}", round(float(RNG.normal()), 2)) for i in RNG.integers(0, 9, RNG.integers(0, 6))] for _ in range(NUM)]
RULES = {
    "text": {"separator": "|", "weights": ":"}, "map": {}, "lists": {"weights": "w"},
    "texts": {"separator": "|", "weights": "w"},
}  # fmt: skip


def columns_of(form, lists):
    ids, weights = ([[pair[i] for pair in one] for one in lists] for i in (0, 1))
    if form == "text":
        return {"tags": ["|".join(f"{name}:{weight}" for name, weight in one) for one in lists]}
    if form == "map":
        return {"tags": pa.array(lists, pa.map_(pa.string(), pa.float32()))}
    if form == "lists":
        return {"tags": pa.array(ids, pa.list_(pa.string())), "w": pa.array(weights, pa.large_list(pa.float64()))}
    return {"tags": ["|".join(one) for one in ids], "w": ["|".join(map(str, one)) for one in weights]}


def written(folder, form, lists=LISTS):
    rows = np.arange(len(lists))
    columns = {**columns_of(form, lists), "row": rows / 1.0, "click": rows % 2}
    if form in ("text", "texts"):
        lines = [",".join(map(str, row)) for row in zip(*columns.values())]
        (folder / "log.csv").write_text("\n".join([",".join(columns), *lines]) + "\n")
        return folder / "log.csv"
    pq.write_table(pa.table(columns), folder / "log.parquet")
    return folder / "log.parquet"


def source_of(path, form, report=lambda line: None, **rule):
    rules = [{"name": "tags", **RULES[form], **rule}, {"name": "row", "transform": "none"}]
    source = Tabular(str(path), 0, "click", 0.3, rules, cache=str(path.parent / "cache"))
    source.prepare(0, 1, lambda: None, report)
    return source


def lists_in(encoder, samples):
    """Row -> its ids and weights; an id that training rows lack as None."""
    texts = [f"t{i}" for i in range(9)]
    hashes = dict(zip(encoder.ids_of("tags", pa.array(texts)).tolist(), texts))
    names = {key + 2: hashes[value] for key, value in enumerate(encoder.coders["tags"].values.tolist())}
    [bag], found = samples.bags, {}
    for row, a, b in zip(samples.dense[:, 0].astype(int), bag.offsets, bag.offsets[1:]):
        found[int(row)] = list(zip([names.get(key) for key in bag.values[a:b]], bag.weights[a:b].tolist()))
    return found


def expected(lists):
    return {row: [(name, float(np.float32(weight))) for name, weight in one] for row, one in enumerate(lists)}


@pytest.mark.parametrize("form", RULES)
def test_ids_and_weights_are_those_of_the_file(tmp_path, form):
    told = []
    source = source_of(written(tmp_path, form), form, told.append)
    samples = concatenate([source.train(0, source.num_train), source.valid(0, source.num_valid)])
    assert lists_in(source.encoder, samples) == expected(LISTS)
    assert any(line.startswith("tags") and "weighted mean of several" in line for line in told)
    assert [column.name for column in source.encoder.columns] == ["tags", "row"]
    encoder = Encoder.from_arrays(source.encoder.to_arrays())
    reader = Reader(source.path, encoder.reading)
    blocks = [block for unit in reader.units for block in reader.blocks(unit)]
    assert lists_in(encoder, concatenate([encoder.samples(block) for block in blocks])) == expected(LISTS)


@pytest.mark.parametrize("form", RULES)
def test_the_weights_of_the_values_that_max_len_keeps_remain(tmp_path, form):
    source = source_of(written(tmp_path, form), form, max_len=2, keep="last", pool="sum")
    samples = concatenate([source.train(0, source.num_train), source.valid(0, source.num_valid)])
    assert lists_in(source.encoder, samples) == expected([one[-2:] for one in LISTS])


class Pooled(torch.nn.Module):
    """The row of the only feature."""

    row_dim = 4

    def forward(self, rows, batch):
        return look_up(rows, batch.index)[:, 0]


@pytest.mark.parametrize("pool", ["sum", "mean"])
def test_pooled_rows_and_their_gradients_are_those_of_an_embedding_bag_of_torch(tmp_path, pool):
    source = source_of(written(tmp_path, "map"), "map", pool=pool)
    samples = source.train(0, 32)[np.arange(3, 30)]
    make = FeatureBatches(source.features, list(source.tables))
    batch = make(samples)
    [(index, offsets)], [weights] = batch.bags, batch.bag_weights
    bag = torch.nn.EmbeddingBag(len(batch.keys["table"]), 4, mode="sum", include_last_offset=True)
    rows = bag.weight.detach().clone().requires_grad_()
    model = FeatureRows(Pooled(), {"table": 4}, pools_of(source.features), ["tags"])
    found = model({"table": rows}, batch)
    wanted = bag(index, offsets, per_sample_weights=weights)
    wanted = wanted if pool == "sum" else wanted / offsets.diff().clamp(min=1)[:, None]
    assert torch.allclose(found, wanted)
    (found**2).sum().backward()
    (wanted**2).sum().backward()
    assert torch.allclose(rows.grad, bag.weight.grad, atol=1e-6)
    part = batch[slice(5, 9)]
    assert torch.allclose(model({"table": rows}, part), wanted[5:9])
    joined = (dict(model.table_dims), model.pools, model.names)
    inputs = example({"num_fields": 1, "num_dense": 0}, joined, [4])
    assert len(inputs) == 6 and of_tensors(model)(*inputs).shape == (2, 4)
    traced = torch.jit.trace(of_tensors(model), inputs, check_trace=False)
    assert torch.allclose(traced(rows, batch.index, batch.dense, index, offsets, weights), wanted)


def test_queries_with_weighted_lists_keep_their_weights(tmp_path):
    source = source_of(written(tmp_path, "map"), "map")
    side = Side.of(["tags"], source.features, source.dense_names)
    assert side.layout == (["weighted mean"], ["tags"])
    samples = side.take(source.train(0, 8))
    _, [batch] = batches_of([(side, samples)], ["table"])
    assert torch.equal(batch.bag_weights[0], torch.from_numpy(samples.bags[0].weights))


@pytest.mark.parametrize("form, rule, words", [
    ("map", {"pool": "none"}, "values with weights are pooled: pool must be sum or mean"),
    ("map", {"weights": "row"}, "its maps have the weights, remove weights"),
    ("lists", {"weights": "weight"}, "weights: no column is named weight"),
    ("lists", {"weights": "tags"}, "weights names the column itself"),
    ("text", {"separator": None}, "weights needs several values per row: give the separator"),
])  # fmt: skip
def test_rules_of_weights_that_do_not_suit_the_column_are_refused(tmp_path, form, rule, words):
    with pytest.raises(DataError, match=words):
        source_of(written(tmp_path, form), form, **rule)


@pytest.mark.parametrize("form, words", [("lists", "has another number of values than w has weights"),
                                         ("texts", "has another number of values than w has weights"),
                                         ("text", "has a value whose weight is no finite number"),
                                         ("map", "has a value whose weight is no finite number")])  # fmt: skip
def test_lists_that_lack_a_weight_are_refused_with_their_row(tmp_path, form, words):
    path = written(tmp_path, form)
    if form == "lists":
        table = pq.read_table(path)
        weights = table["w"].to_pylist()
        weights[4] = weights[4] + [1.0]
        pq.write_table(table.set_column(1, "w", pa.array(weights)), path)
    elif form == "map":
        pq.write_table(pa.table({**columns_of("map", [*LISTS[:4], [("t1", np.inf)], *LISTS[5:]]),
                                 "row": np.arange(NUM) / 1.0, "click": np.arange(NUM) % 2}), path)  # fmt: skip
    else:
        lines = path.read_text().splitlines()
        lines[5] = "t1:2|t2," + lines[5].split(",", 1)[1] if form == "text" else "t1|t2,5,4.0,0"
        path.write_text("\n".join(lines) + "\n")
    place = "row 5" if form in ("lists", "map") else "line 6"
    with pytest.raises(DataError, match=f"(?s){place}, column tags: .*{words}"):
        source_of(path, form)


def test_values_of_an_export_have_no_weights(tmp_path):
    for form in ("text", "map"):
        column = source_of(written(tmp_path, form), form).encoder.reading.columns[0]
        array = pa.table(columns_of(form, [[("t1", 2.0), ("t2", 1.0)]]))["tags"].combine_chunks()
        values, _, _ = coded(array.cast(pa.binary()) if form == "text" else array, column, ("",))
        assert [str(value, "utf-8") if isinstance(value, bytes) else value for value in values.to_pylist()] == [
            "t1", "t2"]  # fmt: skip


def test_inspect_shows_weights(tmp_path):
    assert 'separator: "|", weights: ":"' in inspected(str(written(tmp_path, "text", LISTS[:40])), "click")
    assert "pool: mean, max_len: 50}  # values with weights" in inspected(str(written(tmp_path, "map")), "click")
    assert Feature("a", "t", 0, 1).is_weighted is False
