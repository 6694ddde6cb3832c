"""Batch normalisation over ranks is that of torch on the joined batch. Run at 1, 2 and 3 ranks."""

import pytest
import torch

from hetmpi.batch_norm import BatchNorm, moments
from hetmpi.dense import DenseOptimizer
from hetmpi.schedule import Schedule

WIDTH = 4


@pytest.fixture(autouse=True, params=["horovod", "mpi"])
def hvd(world, by_mpi, request):
    """What sums."""
    BatchNorm.reductions = by_mpi if request.param == "mpi" else None
    return by_mpi if request.param == "mpi" else world.start_horovod()


class Counting(BatchNorm):
    """Lists the allreduces that it makes."""

    def __init__(self, width):
        super().__init__(width)
        self.made = []

    def _summed(self, numbers, direction):
        self.made.append(direction)
        return super()._summed(numbers, direction)


def features_of(rank, step, dtype=torch.float32, num=None):
    """The samples of a rank, whose number depends on the rank: (B, WIDTH). The columns differ in mean and spread."""
    num = 5 + 3 * rank + step if num is None else num
    generator = torch.Generator().manual_seed(100 * step + rank)
    scale, shift = torch.tensor([1.0, 0.01, 5.0, 1.0]), torch.tensor([0.0, 0.0, -1.0, 5.0])
    return (torch.randn(num, WIDTH, generator=generator) * scale + shift).to(dtype)


def loss_of(found, rank, step):
    """A loss with a slope of its own for each number."""
    generator = torch.Generator().manual_seed(1000 + 100 * step + rank)
    return (found * torch.randn(found.shape, generator=generator).to(found)).sum() + found.square().sum() * 0.1


def with_weights(norm, dtype):
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
        norm.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 2.0]))
    return norm.to(dtype)


@pytest.mark.mpi
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_outputs_gradients_and_statistics_are_those_of_the_joined_batch(world, dtype, tolerance):
    """Compared with torch in float64, as in float32 it rounds more."""
    mine, whole = with_weights(BatchNorm(WIDTH), dtype), with_weights(torch.nn.BatchNorm1d(WIDTH), torch.float64)
    pairs = []  # compared at the end: a rank that fails makes no collective calls
    for step in range(3):
        parts = [features_of(rank, step, dtype) for rank in range(world.size)]
        bounds = torch.tensor([0, *map(len, parts)]).cumsum(0).tolist()
        own = slice(bounds[world.rank], bounds[world.rank + 1])
        features, joined = parts[world.rank].requires_grad_(), torch.cat(parts).detach().double().requires_grad_()
        mine.zero_grad(), whole.zero_grad()
        found, expected = mine(features), whole(joined)
        loss_of(found, world.rank, step).backward()
        of_ranks = [expected[begin:end] for begin, end in zip(bounds, bounds[1:])]
        sum(loss_of(part, rank, step) for rank, part in enumerate(of_ranks)).backward()
        pairs += [(found, expected[own]), (features.grad, joined.grad[own])]
        for ours, theirs in zip(mine.parameters(), whole.parameters()):
            pairs.append((torch.from_numpy(world.comm.allreduce(ours.grad.numpy())), theirs.grad.clone()))
        pairs += [(ours.clone(), theirs.clone()) for ours, theirs in zip(mine.buffers(), whole.buffers())]
    samples = features_of(0, 9, dtype)
    pairs.append((mine.eval()(samples), whole.eval()(samples.double())))
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.mpi
def test_statistics_have_the_same_bits_on_all_ranks(world):
    norm = BatchNorm(WIDTH)
    for step in range(4):
        norm(features_of(world.rank, step))
    bits = b"".join(buffer.numpy().tobytes() for buffer in norm.buffers())
    assert len(set(world.comm.allgather(bits))) == 1 and norm.num_batches_tracked == 4


@pytest.mark.mpi
def test_training_makes_one_allreduce_each_way_and_evaluation_none(world):
    norm = Counting(WIDTH)
    norm(features_of(world.rank, 0)).sum().backward()
    assert norm.made == (["forward", "backward"] if world.size > 1 else [])
    norm.eval(), norm.made.clear()
    for step in range(world.rank + 1):  # ranks may evaluate different numbers of batches
        norm(features_of(world.rank, step).requires_grad_()).sum().backward()
    assert norm.made == []


@pytest.mark.mpi
def test_a_rank_without_samples_takes_part(world):
    if world.size == 1:
        pytest.skip("one rank has all samples")
    mine, alone = BatchNorm(WIDTH), torch.nn.BatchNorm1d(WIDTH)
    features = features_of(0, 0, num=6 if world.rank == 0 else 0).requires_grad_()
    found, expected = mine(features), alone(features_of(0, 0, num=6))
    loss_of(found, world.rank, 0).backward()
    assert features.grad.isfinite().all()
    if world.rank == 0:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.running_var, alone.running_var, rtol=1e-5, atol=1e-5)


@pytest.mark.mpi
def test_without_samples_on_any_rank_nothing_changes(world):
    norm = BatchNorm(WIDTH)
    features = torch.empty(0, WIDTH, requires_grad=True)
    norm(features).sum().backward()
    assert features.grad.shape == (0, WIDTH)
    assert norm.num_batches_tracked == 0 and torch.equal(norm.running_mean, torch.zeros(WIDTH))


@pytest.mark.mpi
def test_one_sample_over_all_ranks_is_refused_on_all_ranks(world):
    with pytest.raises(ValueError, match="at least 2 samples over all ranks, got 1|more than 1 value per channel"):
        BatchNorm(WIDTH)(features_of(0, 0, num=1 if world.rank == 0 else 0))


def test_the_variance_of_numbers_with_a_large_mean_keeps_its_digits():
    features = 1e4 + torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    num, mean, variance = moments(features, lambda numbers, direction: numbers)
    expected = features.double()
    assert num == 1000
    torch.testing.assert_close(mean, expected.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(variance, expected.var(0, correction=0), rtol=1e-3, atol=0)


class Network(torch.nn.Module):
    """Two hidden layers, each normalised."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, 6), kind(6), torch.nn.ReLU(), torch.nn.Linear(6, 5), kind(5), torch.nn.ReLU()]
        self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(5, 1))

    def forward(self, features):
        return self.layers(features).squeeze(1)


@pytest.mark.mpi
def test_a_network_trains_as_one_process_on_the_joined_batch(world, hvd):
    """Beside the allreduce of the gradients, which backward() starts."""
    mine, whole = Network(BatchNorm), Network(torch.nn.BatchNorm1d)
    dense = DenseOptimizer(hvd, mine, "sgd", 0.05, 0.0, Schedule())
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05)
    for step in range(5):
        parts = [features_of(rank, step, num=8) for rank in range(world.size)]
        mine(parts[world.rank]).sigmoid().square().mean().backward()
        dense.begin()
        dense.step(step)
        whole(torch.cat(parts)).sigmoid().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, value), expected in zip(mine.state_dict().items(), whole.state_dict().values()):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5, msg=name)
    bits = b"".join(value.numpy().tobytes() for value in mine.state_dict().values())
    assert len(set(world.comm.allgather(bits))) == 1
