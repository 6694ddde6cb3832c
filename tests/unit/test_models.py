"""The models: published sizes, gradients of every row summed per key, decreasing losses."""

from types import SimpleNamespace

import pytest
import torch
from hydra.utils import instantiate
from launch import ROOT
from omegaconf import OmegaConf
from torch.nn.functional import binary_cross_entropy_with_logits

from hetmpi.layers import look_up
from hetmpi.models.ctr import CTRModel
from hetmpi.models.dcn import CrossLayer
from hetmpi.models.deepfm import second_order

NAMES = ("wdl", "deepfm", "dcn", "dlrm")
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


def test_deepfm_rows_hold_one_more_column_and_the_others_none():
    assert {name: build(name).row_dim - DIM for name in NAMES} == {"wdl": 0, "deepfm": 1, "dcn": 0, "dlrm": 0}


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
    for _ in range(2):  # DeepFM's linear layer starts at zero; layers behind a zero learn from the second step on
        model.zero_grad()
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


@pytest.mark.parametrize("name", NAMES)
def test_sizes_come_from_the_settings(name):
    sizes = {"bottom": [8], "top": []} if name == "dlrm" else {"hidden": [8]}
    model = build(name, **sizes)
    assert model(*random_input(model)).isfinite().all()
    assert sum(parameter.numel() for parameter in model.parameters()) < 500


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


def test_a_size_of_zero_is_refused_by_name():
    with pytest.raises(ValueError, match="CTRModel: num_dense must be at least 1, got 0"):
        CTRModel(num_fields=2, num_dense=0, dim=4, row_dim=4)


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


def test_rows_of_double_precision_are_looked_up_too():
    rows = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    look_up(rows, torch.tensor([[4, 4], [0, 4]])).sum().backward()
    assert rows.grad[:, 0].tolist() == [1, 0, 0, 0, 3]


def test_an_index_beyond_the_rows_is_refused():
    with pytest.raises(IndexError):
        look_up(torch.zeros(2, 3, requires_grad=True), torch.tensor([0, 2]))
