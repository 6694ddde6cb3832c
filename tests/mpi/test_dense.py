"""Gradients of the dense layers: averaged over the ranks that have some, and never NaN. Run at 1, 2 and 3 ranks."""

import math
import time

import pytest
import torch

from hetmpi.dense import DenseOptimizer
from hetmpi.errors import NotFinite, UserError
from hetmpi.reductions import TorchReductions, open_reductions
from hetmpi.schedule import Schedule


@pytest.fixture(scope="module")
def by_torch(world):
    made = TorchReductions(world, torch.device("cpu"))
    yield made
    made.close()


@pytest.fixture(params=["horovod", "mpi", "torch"])
def hvd(world, by_mpi, by_torch, request):
    return {"mpi": by_mpi, "torch": by_torch}.get(request.param) or world.start_horovod()


class TwoHeads(torch.nn.Module):
    """A shared layer, and heads of which each call uses some."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.shared = torch.nn.Linear(3, 4)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(2))
        self.to(dtype)

    def forward(self, features, *heads):
        return sum(self.heads[head](torch.tanh(self.shared(features))).sum() for head in heads)


def features_of(rank, step, dtype=torch.float32):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def loss_of(model, rank, step, heads_of, dtype):
    """Rank `rank`'s loss in a step; None if it has none."""
    heads = heads_of(rank, step)
    return model(features_of(rank, step, dtype), *heads) if heads else None


HEADS = {  # heads that a rank uses in a step
    "all ranks take one head in turns": lambda rank, step: [step % 2],
    "each rank takes another head": lambda rank, step: [(rank + step) % 2],
    "rank 0 alone takes both heads": lambda rank, step: [0, 1] if rank == 0 else [0],
    "rank 0 alone has a loss": lambda rank, step: [0, 1] if rank == 0 else [],
    "rank 0 has no loss every other step": lambda rank, step: [0, 1] if rank or step % 2 else [],
    "nobody has a loss": lambda rank, step: [],
}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("rule", "dtype", "begins"),
    [("sgd", torch.float32, True), ("adagrad", torch.float32, False), ("adam", torch.float64, True)],
)
@pytest.mark.parametrize("who", HEADS)
def test_a_missing_gradient_counts_as_zeros_and_one_that_all_lack_is_left_alone(world, hvd, who, rule, dtype, begins):
    """As in one process that averages the ranks' losses."""
    heads_of = HEADS[who]
    model, alone = TwoHeads(dtype), TwoHeads(dtype)
    dense = DenseOptimizer(hvd, model, rule, 0.1, 0.01, Schedule())
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[rule]
    optimizer = kind(alone.parameters(), lr=0.1, weight_decay=0.01)
    for step in range(6):
        loss = loss_of(model, world.rank, step, heads_of, dtype)
        if loss is not None:
            loss.backward()
        if begins:
            dense.begin()
        dense.step(step)
        losses = [loss_of(alone, rank, step, heads_of, dtype) for rank in range(world.size)]
        if any(loss is not None for loss in losses):
            (sum(loss for loss in losses if loss is not None) / world.size).backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters()):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6), name


@pytest.mark.mpi
@pytest.mark.parametrize("clip_norm, clips", [(0.5, True), (1e6, False)])
@pytest.mark.parametrize("who", ["rank 0 alone takes both heads", "rank 0 has no loss every other step"])
def test_the_norm_of_the_averaged_gradients_is_limited_as_by_torch_in_one_process(world, hvd, who, clip_norm, clips):
    heads_of = HEADS[who]
    model, alone, free = TwoHeads(), TwoHeads(), TwoHeads()
    dense = DenseOptimizer(hvd, model, "sgd", 0.1, 0.01, Schedule(), clip_norm=clip_norm)
    unlimited = DenseOptimizer(hvd, free, "sgd", 0.1, 0.01, Schedule())
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, weight_decay=0.01)
    for step in range(6):
        for mine, trained in ((model, dense), (free, unlimited)):
            loss = loss_of(mine, world.rank, step, heads_of, torch.float32)
            if loss is not None:
                loss.backward()
            trained.begin()
            trained.step(step)
        losses = [loss_of(alone, rank, step, heads_of, torch.float32) for rank in range(world.size)]
        known = [loss for loss in losses if loss is not None]
        if known:
            (sum(known) / world.size).backward()
            torch.nn.utils.clip_grad_norm_(alone.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters()):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-6), name
    differ = any(not torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), free.parameters()))
    assert differ == clips
    bits = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy().tobytes()
    assert len(set(world.comm.allgather(bits))) == 1


@pytest.mark.mpi
def test_all_ranks_have_the_same_bits(world, hvd):
    model = TwoHeads()
    dense = DenseOptimizer(hvd, model, "adam", 0.1, 0.0, Schedule())
    for step in range(5):
        model(features_of(world.rank, step), (world.rank + step) % 2).backward()
        dense.step(step)
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy().tobytes()
    assert len(set(world.comm.allgather(mine))) == 1


@pytest.mark.mpi
def test_two_models_train_side_by_side(world, hvd):
    models = [TwoHeads(), TwoHeads()]
    both = [DenseOptimizer(hvd, model, "sgd", 0.1, 0.0, Schedule()) for model in models]
    for step in range(3):
        for model in models:
            model(features_of(world.rank, step), step % 2).backward()
        for dense in both:
            dense.begin()
        for dense in reversed(both):
            dense.step(step)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters()))


@pytest.mark.mpi
def test_a_second_backward_after_the_allreduce_began_is_refused(world, hvd):
    if world.size == 1:
        pytest.skip("one rank has no allreduce")
    model = torch.nn.Linear(3, 1)
    dense = DenseOptimizer(hvd, model, "sgd", 0.1, 0.0, Schedule())
    model(features_of(world.rank, 0)).sum().backward()
    dense.begin()
    with pytest.raises(RuntimeError, match="backward\\(\\) ran again after the allreduce"):
        model(features_of(world.rank, 0)).sum().backward()
    dense.step(0)


@pytest.mark.mpi
def test_gradients_of_several_passes_are_averaged_once(world, hvd):
    """The first parameter alone gets one in the last pass."""
    model = TwoHeads()
    dense = DenseOptimizer(hvd, model, "sgd", 1.0, 0.0, Schedule())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(2):
        with dense.held():
            (sum(parameter.sum() for parameter in model.parameters()) * (1 + world.rank)).backward()
    (next(model.parameters()).sum() * (1 + world.rank)).backward()
    dense.begin()
    dense.step(0)
    mean = (1 + world.size) / 2
    for number, (parameter, first) in enumerate(zip(model.parameters(), before)):
        assert torch.allclose(parameter, first - (3 if number == 0 else 2) * mean), number


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused_by_name(world, hvd, value):
    model = torch.nn.Linear(3, 1)
    dense = DenseOptimizer(hvd, model, "sgd", 0.1, 0.0, Schedule())
    before = model.weight.detach().clone()
    model.weight.grad, model.bias.grad = torch.tensor([[0.0, value, 0.0]]), torch.zeros(1)
    with pytest.raises(NotFinite, match="gradient of the dense parameter weight is not finite"):
        dense.step(0)
    assert torch.equal(model.weight, before)


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("num", [1, 1000, 137_984])
def test_mpi_sums_and_averages_to_the_bits_of_horovod(world, by_mpi, num, dtype):
    numbers = torch.randn(num, generator=torch.Generator().manual_seed(world.rank)).to(dtype)
    hvd = world.start_horovod()
    for op in ("Sum", "Average"):
        name = f"bits {num} {dtype} {op}"
        expected = hvd.allreduce(numbers, op=getattr(hvd, op), name=name)
        found = by_mpi.allreduce(numbers, op=getattr(by_mpi, op), name="bits")
        if dtype == torch.float16:  # summed in float32, so with fewer roundings
            assert torch.allclose(found, expected, rtol=0.02, atol=0.02)
        else:
            assert torch.equal(found, expected)


@pytest.mark.mpi
def test_sums_of_two_models_do_not_mix_where_a_rank_lacks_a_gradient(world, hvd):
    """backward() of all models, then begin() of all: rank 0 uses one head of the first model, others both."""
    models = [TwoHeads(), TwoHeads()]
    both = [DenseOptimizer(hvd, model, "sgd", 0.1, 0.0, Schedule()) for model in models]
    alone, optimizers = [TwoHeads(), TwoHeads()], []
    for number, model in enumerate(models):
        heads_of = (lambda rank: [0] if rank == 0 else [0, 1]) if number == 0 else (lambda rank: [0, 1])
        model(features_of(world.rank, number), *heads_of(world.rank)).backward()
        losses = [alone[number](features_of(rank, number), *heads_of(rank)) for rank in range(world.size)]
        (sum(losses) / world.size).backward()
        optimizers.append(torch.optim.SGD(alone[number].parameters(), lr=0.1))
    for dense in both:
        dense.begin()
    for dense, optimizer in zip(both, optimizers):
        dense.step(0)
        optimizer.step()
    for mine, theirs in zip(models, alone):
        for a, b in zip(mine.parameters(), theirs.parameters()):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.mpi
def test_ranks_of_a_model_of_rows_alone_stay_in_the_same_step(world, hvd):
    dense = DenseOptimizer(hvd, torch.nn.Identity(), "sgd", 0.1, 0.0, Schedule())
    for step in range(2):
        world.comm.Barrier()
        began = time.perf_counter()
        if world.rank == world.size - 1:
            time.sleep(0.3)
        dense.begin()
        dense.step(step)
        assert time.perf_counter() - began > 0.25


@pytest.mark.mpi
def test_torch_sums_beside_a_program_that_uses_it(world):
    with pytest.raises(UserError, match="nccl: it sums gradients on GPUs, the device of rank 0 is not one"):
        open_reductions(world, "nccl")
    first = TorchReductions(world, torch.device("cpu"))  # in place of a program
    second = TorchReductions(world, torch.device("cpu"))
    for reductions in (first, second):
        mine = torch.full((3,), 1.0 + world.rank)
        assert (
            reductions.allreduce(mine, op=reductions.Sum, name="").tolist() == [world.size * (world.size + 1) / 2] * 3
        )
        mean = reductions.synchronize(reductions.allreduce_async_(mine, op=reductions.Average, name=""))
        assert mean.tolist() == [(world.size + 1) / 2] * 3
    second.close()
    first.close()
