"""The models: published sizes and formulas, gradients of every row summed per key, decreasing losses, export."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from launch import CLICK_MODELS, ROOT
from omegaconf import OmegaConf
from torch.nn.functional import binary_cross_entropy_with_logits

from hetmpi import _C, export
from hetmpi.layers import in_stretches, look_up
from hetmpi.models.ctr import MLP, CTRModel
from hetmpi.models.dcn import CrossLayer
from hetmpi.models.deepfm import second_order
from hetmpi.models.din import DIN
from hetmpi.run.build import generator_of_dropout, seed_of
from hetmpi.trained.saved_model import TensorModel

NAMES = CLICK_MODELS
WITH_MLP = tuple(name for name in NAMES if name not in ("lr", "fm"))
FIELDS, DENSE, DIM = 5, 3, 4


@pytest.fixture(autouse=True)
def one_thread():
    """One thread: these models are small, and several ranks may share the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name, num_fields=FIELDS, num_dense=DENSE, dim=DIM, **sizes):
    """A model built from conf/model/<name>.yaml."""
    torch.manual_seed(0)
    config = OmegaConf.merge(OmegaConf.load(ROOT / f"conf/model/{name}.yaml"), sizes)
    return instantiate(config, num_fields=num_fields, num_dense=num_dense, dim=dim)


def random_input(model, batch_size=64, num_rows=40, std=0.5):
    """Rows (num_rows, row_dim) and a batch whose label is a function of its first key."""
    generator = torch.Generator().manual_seed(1)
    index = torch.randint(num_rows, (batch_size, model.num_fields), generator=generator)
    dense = torch.rand(batch_size, model.num_dense, generator=generator)
    rows = std * torch.randn(num_rows, model.row_dim, generator=generator)
    return rows.requires_grad_(), SimpleNamespace(index=index, dense=dense, label=(index[:, 0] % 2).float())


@pytest.mark.parametrize("name, expected", [("wdl", 137_984), ("deepfm", 917_773), ("dcn", 1_010_011)])
def test_dense_parameters_at_the_criteo_shape_are_those_of_the_paper(name, expected):
    model = build(name, num_fields=26, num_dense=13, dim=128)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


WIDTH = 26 * 128 + 13  # embeddings and numbers at the Criteo shape
DEEP = WIDTH * 256 + 256 + 2 * (256 * 256 + 256)  # an MLP of three layers of 256 with biases
SIZES = {  # weights, then biases
    "lr": 13 + 1,
    "fm": 13 * (1 + 128) + 1,  # a weight and a vector per number
    "dnn": DEEP + 256 + 1,
    "widedeep": DEEP + 256 + 1,  # the wide weights are in the rows
    "dcnv2": 3 * (WIDTH * WIDTH + WIDTH) + DEEP + (WIDTH + 256),
    "finalmlp": 2 * (128 + (128 * 64 + 64) + (64 * WIDTH + WIDTH))  # gates, each with its learned vector
    + 2 * DEEP
    + (256 + 256 + 1 + 8 * 32 * 32),  # 8 heads of 256 / 8
}


@pytest.mark.parametrize("name", SIZES)
def test_dense_parameters_at_the_criteo_shape_are_those_of_the_formula(name):
    assert num_parameters(build(name, num_fields=26, num_dense=13, dim=128)) == SIZES[name]


SIZES_WITHOUT_NUMBERS = {  # 4 fields of dim 3, so 12 columns; every hidden layer has 8 units
    "lr": 1,
    "fm": 1,
    "dnn": (12 * 8 + 8) + (8 + 1),
    "widedeep": (12 * 8 + 8) + (8 + 1),
    "dcnv2": 3 * (12 * 12 + 12) + (12 * 8 + 8) + (12 + 8),
    "finalmlp": 2 * (3 + (3 * 8 + 8) + (8 * 12 + 12)) + 2 * (12 * 8 + 8) + (8 + 8 + 1 + 8),
    "wdl": 12,  # the linear layer on the embeddings
    "deepfm": 12 * 8 + 8,  # the MLP
    "dcn": 3 * (12 + 12) + 12 * 8 + (12 + 8),
    "dlrm": (6 * 8 + 8) + (8 + 1),  # the top MLP on 6 pairs
}


@pytest.mark.parametrize("name", NAMES)
def test_without_numbers_the_dense_part_is_left_out(name):
    model = build(name, num_fields=4, num_dense=0, dim=3, **small(name))
    assert num_parameters(model) == SIZES_WITHOUT_NUMBERS[name]
    rows, batch = random_input(model)
    learner = torch.optim.SGD([rows, *model.parameters()], lr=0.05)
    losses = []
    for _ in range(30):
        learner.zero_grad()
        losses.append(binary_cross_entropy_with_logits(model(rows, batch), batch.label))
        losses[-1].backward()
        learner.step()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    assert losses[-1] < losses[0]


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def small(name):
    """Settings of a model with one hidden layer of 8 units everywhere."""
    return {
        "lr": {},
        "fm": {},
        "dlrm": {"bottom": [8], "top": [8]},
        "finalmlp": {"first": [8], "second": [8], "gate": [8]},
    }.get(name, {"hidden": [8]})


def test_some_rows_hold_a_weight_beside_the_embedding_and_those_of_lr_nothing_else():
    expected = {"deepfm": 1, "fm": 1, "widedeep": 1, "lr": 1 - DIM}
    assert {name: build(name).row_dim - DIM for name in NAMES} == dict.fromkeys(NAMES, 0) | expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_there_is_one_logit_per_sample(name, batch_size):
    model = build(name)
    assert model(*random_input(model, batch_size)).shape == (batch_size,)


@pytest.mark.parametrize("name", NAMES)
def test_a_logit_depends_on_its_own_sample_alone(name):
    model = build(name)
    rows, batch = random_input(model)
    last = SimpleNamespace(index=batch.index[-1:], dense=batch.dense[-1:])
    torch.testing.assert_close(model(rows, batch)[-1:], model(rows, last))


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_a_row_is_the_sum_over_its_occurrences(name):
    model = build(name)
    rows, batch = random_input(model, batch_size=8, num_rows=3)
    model(rows, batch).sum().backward()
    single = rows.detach()[batch.index.flatten()].requires_grad_()  # a separate row for each occurrence
    model(single, SimpleNamespace(index=torch.arange(len(single)).view(8, FIELDS), dense=batch.dense)).sum().backward()
    expected = torch.zeros_like(rows).index_add(0, batch.index.flatten(), single.grad)
    torch.testing.assert_close(rows.grad, expected)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_bitwise_equal_on_every_run_with_two_threads(name):
    model = build(name, num_fields=26)
    torch.set_num_threads(2)
    grads = []
    for _ in range(4):
        rows, batch = random_input(model, batch_size=512, num_rows=100)
        model(rows, batch).sum().backward()
        grads.append(rows.grad)
    assert all(torch.equal(grads[0], grad) for grad in grads)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_and_every_column_of_a_row_learns(name):
    model = build(name)
    rows, batch = random_input(model)
    binary_cross_entropy_with_logits(model(rows, batch), batch.label).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    assert (rows.grad.abs().sum(0) > 0).all()


# Adagrad first moves every weight by lr, for any gradient: at 0.01 DLRM's loss rises to 16 before it falls.
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, 0.01),
    "adagrad": (torch.optim.Adagrad, 0.003),
    "adam": (torch.optim.Adam, 0.001),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_the_loss_falls_and_does_not_jump_on_features_as_large_as_criteos(name, rule):
    model = build(name, num_fields=26, num_dense=13, dim=32)
    rows, batch = random_input(model, std=0.01)
    batch.dense = 8 * batch.dense  # log(x + 1) of its counts reaches 8
    optimizer, lr = OPTIMIZERS[rule]
    learner = optimizer([rows, *model.parameters()], lr=lr)
    losses = []
    for _ in range(10):
        learner.zero_grad()
        losses.append(binary_cross_entropy_with_logits(model(rows, batch), batch.label))
        losses[-1].backward()
        learner.step()
    assert losses[-1] < losses[0]
    assert max(losses) < 1.5


def test_fm_second_order_is_the_sum_of_dot_products_of_all_pairs():
    embeddings = torch.randint(-3, 4, (6, FIELDS, DIM), generator=torch.Generator().manual_seed(0)).float()
    pairs = [(i, j) for i in range(FIELDS) for j in range(i)]
    expected = sum((embeddings[:, i] * embeddings[:, j]).sum(1) for i, j in pairs)
    assert torch.equal(second_order(embeddings), expected)


def test_deepfm_adds_the_last_column_of_each_row():
    model = build("deepfm")
    rows, batch = random_input(model)
    raised = rows.detach().clone()
    raised[:, -1] += 1
    torch.testing.assert_close(model(raised, batch), model(rows, batch) + FIELDS)


def test_a_cross_layer_is_x0_times_a_scalar_plus_bias_plus_x():
    layer = CrossLayer(3)
    layer.weight.data = torch.tensor([1.0, 0.0, 2.0])
    layer.bias.data = torch.tensor([0.0, 1.0, 0.0])
    first, below = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[2.0, 5.0, 1.0]])
    assert layer(first, below).tolist() == [[4 * 1 + 2, 4 * 2 + 1 + 5, 4 * 3 + 1]]


def test_dlrm_shows_its_top_mlp_each_pair_of_vectors_once():
    model = build("dlrm")
    rows, batch = random_input(model, batch_size=2)
    seen = []
    model.top.register_forward_hook(lambda module, arguments, result: seen.append(arguments[0]))
    model(rows, batch)
    vectors = [model.bottom(batch.dense), *rows[batch.index].unbind(1)]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]
    torch.testing.assert_close(seen[0], torch.cat([vectors[0], torch.stack(pairs, dim=1)], dim=1))


# The formulas of the papers, sample by sample.


def test_lr_is_the_sum_of_weights_numbers_times_weights_and_the_bias():
    model = build("lr")
    with torch.no_grad():
        model.linear.weight.copy_(torch.tensor([1.0, -2.0, 0.5]))
        model.linear.bias.fill_(3.0)
    rows, batch = random_input(model)
    for logit, index, numbers in zip(model(rows, batch), batch.index, batch.dense):
        expected = 3.0 + sum(rows[key, 0] for key in index) + numbers[0] - 2 * numbers[1] + 0.5 * numbers[2]
        torch.testing.assert_close(logit, expected)


@pytest.mark.parametrize("num_dense", [0, DENSE])
def test_fm_sums_over_all_pairs_of_features(num_dense):
    """Rendle's equation 1: an id has the value 1, a number its own."""
    model = build("fm", num_dense=num_dense)
    randomize(model)
    rows, batch = random_input(model, batch_size=8)
    for logit, index, numbers in zip(model(rows, batch), batch.index, batch.dense):
        values = [1.0] * FIELDS + numbers.tolist()
        weights = [*rows[index, -1], *(model.linear.weight if num_dense else [])]
        vectors = [*rows[index, :-1], *(model.vectors if num_dense else [])]
        expected = model.linear.bias[0] + sum(weight * value for weight, value in zip(weights, values))
        for i in range(len(values)):
            for j in range(i):
                expected = expected + (vectors[i] * vectors[j]).sum() * values[i] * values[j]
        torch.testing.assert_close(logit, expected)


def test_dnn_reads_embeddings_then_numbers_and_widedeep_adds_the_last_columns():
    for name, num_wide in (("dnn", 0), ("widedeep", 1)):
        model = build(name, hidden=[7, 6])
        rows, batch = random_input(model, batch_size=8)
        layers = [layer for layer in model.deep if isinstance(layer, torch.nn.Linear)]
        for logit, index, numbers in zip(model(rows, batch), batch.index, batch.dense):
            found = torch.cat([*rows[index, :DIM], numbers])
            for layer in layers[:-1]:
                found = (layer.weight @ found + layer.bias).clamp(min=0)
            expected = (layers[-1].weight @ found + layers[-1].bias)[0] + num_wide * rows[index, -1].sum()
            torch.testing.assert_close(logit, expected)


@pytest.mark.parametrize("stacked", [False, True])
def test_dcnv2_crosses_by_full_matrices_beside_the_mlp_or_below_it(stacked):
    model = build("dcnv2", hidden=[7], num_cross_layers=2, stacked=stacked)
    rows, batch = random_input(model, batch_size=8)
    linear = model.deep[0]
    for logit, index, numbers in zip(model(rows, batch), batch.index, batch.dense):
        first = torch.cat([*rows[index], numbers])
        crossed = first
        for layer in model.cross:
            scaled = [
                sum(layer.linear.weight[i, j] * crossed[j] for j in range(len(first))) + layer.linear.bias[i]
                for i in range(len(first))
            ]
            crossed = torch.stack([first[i] * scaled[i] + crossed[i] for i in range(len(first))])
        deep = (linear.weight @ (crossed if stacked else first) + linear.bias).clamp(min=0)
        last = deep if stacked else torch.cat([crossed, deep])
        torch.testing.assert_close(logit, (model.out.weight[0] * last).sum())


@pytest.mark.parametrize("contexts", [([], []), ([1], [4, 0])])
def test_finalmlp_gates_two_streams_and_fuses_them_by_a_bilinear_form_per_head(contexts):
    model = build(
        "finalmlp", first=[6], second=[4], gate=[3], num_heads=2, first_context=contexts[0], second_context=contexts[1]
    )
    rows, batch = random_input(model, batch_size=8)
    fusion = model.fusion
    for logit, index, numbers in zip(model(rows, batch), batch.index, batch.dense):
        features, outputs = torch.cat([*rows[index], numbers]), []
        for gate, stream, fields in zip(model.gates, model.streams, contexts):
            context = torch.cat([rows[index[field]] for field in fields]) if fields else gate.context[0]
            hidden = (gate.mlp[0].weight @ context + gate.mlp[0].bias).clamp(min=0)
            factors = 2 / (1 + torch.exp(-(gate.mlp[2].weight @ hidden + gate.mlp[2].bias)))
            outputs.append((stream[0].weight @ (factors * features) + stream[0].bias).clamp(min=0))
        x, y = outputs
        expected = fusion.first.bias[0] + (fusion.first.weight[0] * x).sum() + (fusion.second.weight[0] * y).sum()
        for head in range(2):
            for i in range(3):
                for j in range(2):
                    expected = expected + x[3 * head + i] * fusion.weight[head, i, j] * y[2 * head + j]
        torch.testing.assert_close(logit, expected)


def test_gates_are_near_one_at_the_start():
    """So that the streams see the features as they are."""
    model = build("finalmlp")
    factors = model.gates[0](torch.zeros(1, FIELDS, DIM))
    assert (factors - 1).abs().max() < 0.2


def randomize(model):
    """Gives every parameter other values than zero."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


# Dropout and batch normalisation.


def kinds(model):
    """Names of the kinds of layers in an MLP, in order."""
    return [type(layer).__name__ for layer in model.modules() if not isinstance(layer, torch.nn.Sequential)]


def test_an_mlp_normalises_before_each_relu_and_drops_after_it():
    assert kinds(MLP([4, 3, 1], True, relu_at_end=False)) == ["Linear", "ReLU", "Linear"]
    both = MLP([4, 3, 1], True, relu_at_end=False, dropout=0.5, batch_norm=True)
    assert kinds(both) == ["Linear", "BatchNorm", "ReLU", "Dropout", "Linear"]
    assert kinds(MLP([4, 3], True, dropout=0.5)) == ["Linear", "ReLU", "Dropout"]
    assert kinds(MLP([4, 3], True, batch_norm=True)) == ["Linear", "BatchNorm", "ReLU"]


@pytest.mark.parametrize("name", WITH_MLP)
def test_dropout_and_batch_normalisation_change_the_training_and_not_the_evaluation(name):
    plain, model = build(name), build(name, dropout=0.5)
    assert model.state_dict().keys() == plain.state_dict().keys()
    rows, batch = random_input(model)
    assert not torch.equal(model(rows, batch), model(rows, batch))
    assert torch.equal(model.eval()(rows, batch), plain(rows, batch))

    model = build(name, batch_norm=True)
    norms = [layer for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm1d)]
    before = model.eval()(rows, batch)
    trained = model.train()(rows, batch)
    assert norms and all(norm.num_batches_tracked == 1 for norm in norms)
    assert not torch.allclose(before, trained) and not torch.allclose(before, model.eval()(rows, batch))


@pytest.mark.parametrize("name", WITH_MLP)
def test_every_model_learns_with_dropout_and_batch_normalisation(name):
    model = build(name, dropout=0.1, batch_norm=True)
    rows, batch = random_input(model)
    learner = torch.optim.Adam([rows, *model.parameters()], lr=0.005)
    losses = []
    for _ in range(40):
        learner.zero_grad()
        losses.append(binary_cross_entropy_with_logits(model(rows, batch), batch.label))
        losses[-1].backward()
        learner.step()
    assert losses[-1] < 0.5 < losses[0]
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_ranks_and_steps_draw_other_masks_and_a_step_always_the_same():
    model, cpu = build("dnn", dropout=0.5), torch.device("cpu")
    generator = generator_of_dropout(model, cpu)

    def mask(seed, step, rank):
        generator.manual_seed(seed_of(seed, step, rank))
        return tuple(torch.nn.functional.dropout(torch.ones(64), 0.5).tolist())

    places = [(seed, step, rank) for seed in range(2) for step in range(10) for rank in range(4)]
    masks = {place: mask(*place) for place in places}
    assert len(set(masks.values())) == len(places)
    assert all(mask(*place) == masks[place] for place in reversed(places))


def test_the_generator_of_a_model_without_dropout_is_left_alone():
    cpu = torch.device("cpu")
    assert generator_of_dropout(build("dnn"), cpu) is None
    assert generator_of_dropout(torch.nn.Dropout(0.0), cpu) is None
    assert generator_of_dropout(torch.nn.Sequential(torch.nn.Dropout(0.1)), cpu) is torch.default_generator


# Export.


def exported(name, **sizes):
    """A trained model of TensorModel for export, example inputs as in saved_model.dense_layers, and other inputs."""
    model = build(name, **sizes)
    randomize_norms(model)
    rows, batch = random_input(model, batch_size=9)
    example = torch.zeros(FIELDS + 1, model.row_dim), torch.arange(FIELDS).repeat(2, 1), torch.zeros(2, model.num_dense)
    return TensorModel(model).eval(), example, (rows.detach(), batch.index, batch.dense)


def randomize_norms(model):
    """Running statistics as after some training."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm1d):
            layer.running_mean.uniform_(-1, 1)
            layer.running_var.uniform_(0.5, 2)


def variants():
    """(name, sizes): every model, without numbers, and with dropout and batch normalisation."""
    both = {"dropout": 0.5, "batch_norm": True}
    more = [("dcnv2", {"stacked": True}), ("finalmlp", {"first_context": [0], "second_context": [1, 3]})]
    plain = [(name, sizes) for name in NAMES for sizes in ({}, {"num_dense": 0})]
    return plain + [(name, both) for name in WITH_MLP] + more


@pytest.mark.filterwarnings("ignore:.torch.jit.load:DeprecationWarning")
@pytest.mark.parametrize("name, sizes", variants())
def test_torchscript_gives_the_same_logits_for_any_number_of_samples(name, sizes, tmp_path):
    model, example, other = exported(name, **sizes)
    export.write_torchscript(tmp_path / "dense.torchscript", model, example)
    found = torch.jit.load(str(tmp_path / "dense.torchscript"))(*other)
    assert found.shape == (9,) and torch.equal(found, model(*other).detach())


@pytest.mark.long
@pytest.mark.parametrize("name, sizes", variants())
def test_onnx_gives_the_same_logits_for_any_number_of_samples(name, sizes, tmp_path):
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    model, example, other = exported(name, **sizes)
    export.write_onnx(tmp_path / "dense.onnx", model, example)
    inputs = {key: value.numpy() for key, value in zip(("rows", "index", "dense"), other)}
    (found,) = reference.ReferenceEvaluator(str(tmp_path / "dense.onnx")).run(None, inputs)
    assert found.shape == (9,)
    torch.testing.assert_close(torch.from_numpy(found), model(*other).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_come_from_the_settings(name):
    model = build(name, **small(name))
    assert model(*random_input(model)).isfinite().all()
    assert num_parameters(model) < (3000 if name in WITH_MLP else 30)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_of_another_shape_are_refused_by_name(name):
    model = build(name)
    rows, batch = random_input(model)
    wrong = [
        ("rows must be", rows[:, :-1], batch.index, batch.dense),
        ("batch.index must be", rows, batch.index[:, :-1], batch.dense),
        ("batch.dense must be", rows, batch.index, batch.dense[:, :-1]),
        ("batch.dense must be", rows, batch.index, batch.dense[:-1]),
    ]
    for message, rows_given, index, dense in wrong:
        with pytest.raises(ValueError, match=f"{type(model).__name__}: {message}"):
            model(rows_given, SimpleNamespace(index=index, dense=dense))


def test_a_size_that_is_too_small_is_refused_by_name():
    with pytest.raises(ValueError, match="CTRModel: num_fields must be at least 1, got 0"):
        CTRModel(num_fields=0, num_dense=0, dim=4, row_dim=4)
    with pytest.raises(ValueError, match="CTRModel: num_dense must be at least 0, got -1"):
        CTRModel(num_fields=2, num_dense=-1, dim=4, row_dim=4)
    with pytest.raises(InstantiationException, match="DLRM: needs two features or more to multiply, got one field and"):
        build("dlrm", num_fields=1, num_dense=0)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"num_heads": 0}, "num_heads must divide the last widths of first and second, 256 and 256, got 0"),
        ({"second": [64, 60]}, "num_heads must divide the last widths of first and second, 256 and 60, got 8"),
        ({"first_context": [0, 5]}, r"first_context must hold fields from 0 to 4, got \[0, 5\]"),
    ],
)
def test_finalmlp_refuses_heads_and_fields_that_do_not_fit(sizes, message):
    with pytest.raises(InstantiationException, match=message):
        build("finalmlp", **sizes)


@pytest.mark.parametrize(
    "num_rows, shape, dim", [(1, (5, 3), 4), (50, (200, 7), 33), (400, (1000,), 128), (3, (0, 2), 4)]
)
def test_looked_up_rows_and_their_gradients_are_those_of_index_select(num_rows, shape, dim):
    generator = torch.Generator().manual_seed(num_rows)
    index = torch.randint(num_rows, shape, generator=generator)
    ways = [torch.randn(num_rows, dim, generator=generator).requires_grad_()]
    ways.append(ways[0].detach().clone().requires_grad_())
    slope = torch.randn(dim, *shape, generator=generator).movedim(0, -1)  # not contiguous
    for part in (slice(None), slice(None, None, 2), slice(0, 1)):
        taken = index[..., part]
        found = [look_up(ways[0], taken), ways[1].index_select(0, taken.flatten()).view(*taken.shape, dim)]
        assert torch.equal(*found)
        for out in found:
            out.backward(slope[..., part, :])
        assert torch.equal(ways[0].grad, ways[1].grad)


@pytest.mark.parametrize("before", [0, 3])
def test_the_gradient_of_a_concatenation_is_that_of_its_parts(before):
    generator = torch.Generator().manual_seed(before)
    index = torch.randint(0, 7, (40, 5), generator=generator)
    slope = torch.randn(40, before + 5 * 16 + 2, generator=generator)
    rows, of_copy = (torch.ones(7, 16, requires_grad=True) for _ in range(2))
    torch.cat([torch.zeros(40, before), look_up(rows, index).flatten(1), torch.zeros(40, 2)], dim=1).backward(slope)
    look_up(of_copy, index).backward(slope[:, before:-2].reshape(40, 5, 16))
    assert torch.equal(rows.grad, of_copy.grad)
    part = slope[:, before:-2].unflatten(1, (5, 16))
    assert in_stretches(part).data_ptr() == part.data_ptr()


@pytest.mark.parametrize("shape", [(4, 0), (0, 3), (0,), (1, 3), (4, 1), (4,), ()])
@pytest.mark.parametrize("spread", [False, True])
def test_gradients_of_any_layout_are_summed(shape, spread):
    index = torch.arange(math.prod(shape)).view(shape) % 3
    slope = torch.randn(()).expand(*shape, 8) if spread else torch.randn(*shape, 9)[..., 1:]
    rows = torch.ones(3, 8, requires_grad=True)
    look_up(rows, index).backward(slope)
    assert torch.equal(rows.grad, torch.zeros(3, 8).index_add_(0, index.flatten(), slope.reshape(-1, 8)))


def test_the_sum_of_a_negative_zero_is_zero():
    rows = torch.ones(1, 8, requires_grad=True)
    look_up(rows, torch.tensor([0])).backward(torch.full((1, 8), -0.0))
    assert not torch.signbit(rows.grad).any()


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_the_same_with_any_number_of_threads(threads):
    torch.set_num_threads(threads)
    rows = torch.randn(9, 8, requires_grad=True)
    index = torch.tensor([[8, 0], [3, 3]])
    assert torch.equal(look_up(rows, index), rows[index])
    with pytest.raises(IndexError):
        look_up(rows, torch.tensor([9]))


def test_repeated_keys_are_found_after_others_were_seen():
    keys, _ = _C.unique(np.array([5, 7, 5, 9]))
    assert _C.first_repeated(keys) == -1
    assert _C.first_repeated(np.array([5, 7, 7])) == 2
    assert _C.first_repeated(np.array([5, 7])) == -1
    assert _C.first_repeated(np.array([5, 5])) == 1
    assert _C.first_repeated(keys) == -1
    assert _C.first_repeated(np.array([], np.int64)) == -1


@pytest.mark.parametrize("shape, numbers", [((2, 7), 4), ((2, 8), 3), ((4,), 4)])
def test_values_of_another_shape_than_the_rows_are_not_added(shape, numbers):
    with pytest.raises(ValueError, match="values must"):
        _C.sum_by_row(np.zeros(shape, np.float32), np.zeros(numbers, np.int64), np.zeros((1, 4), np.float32))
    with pytest.raises(ValueError, match="values must"):
        apart = np.zeros((4, 8), np.float32)[:, ::2]
        _C.sum_by_row(apart, np.zeros(4, np.int64), np.zeros((1, 4), np.float32))


def test_a_gradient_spread_out_and_a_single_index_are_fine():
    rows = torch.zeros(3, 4, requires_grad=True)
    (look_up(rows, torch.tensor(2)).sum() + look_up(rows, torch.tensor([[0]]).expand(5, 2)).sum()).backward()
    assert rows.grad[:, 0].tolist() == [10, 0, 1]


@pytest.mark.parametrize(
    "rows, index", [(torch.zeros(3), torch.tensor([0])), (torch.zeros(3, 2), torch.tensor([0], dtype=torch.int32))]
)
def test_rows_and_indices_of_another_kind_are_refused(rows, index):
    with pytest.raises(ValueError, match="look_up: rows must be"):
        look_up(rows, index)


def test_rows_and_indices_on_two_devices_are_refused():
    with pytest.raises(ValueError, match="look_up: rows on cpu, index on meta: they must be on one device"):
        look_up(torch.zeros(2, 3), torch.zeros(1, dtype=torch.int64, device="meta"))


def test_rows_of_double_precision_are_looked_up_too():
    rows = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    look_up(rows, torch.tensor([[4, 4], [0, 4]])).sum().backward()
    assert rows.grad[:, 0].tolist() == [1, 0, 0, 0, 3]


def test_an_index_beyond_the_rows_is_refused():
    with pytest.raises(IndexError):
        look_up(torch.zeros(2, 3, requires_grad=True), torch.tensor([0, 2]))


def test_histories_of_other_lengths_are_refused_with_a_cure():
    model = DIN(2, 0, 2, ["item", "kind"], ["viewed", "kinds"], hidden=[2], attention=[2])
    places, fields = torch.zeros(1, 2, dtype=torch.int64), {"item": 0, "kind": 1}
    sequences = {"viewed": (places, torch.tensor([[True, True]])), "kinds": (places, torch.tensor([[True, False]]))}
    batch = SimpleNamespace(index=places, dense=torch.zeros(1, 0), fields=fields, sequences=sequences, bags=())
    with pytest.raises(ValueError, match="viewed, kinds have other lengths in a sample: .* as 'none'"):
        model(torch.zeros(1, 2), batch)
