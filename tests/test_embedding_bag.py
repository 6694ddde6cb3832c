"""hetmpi.EmbeddingBag against torch.nn.EmbeddingBag. Run at 1, 2 and 3 ranks."""

import pytest
import torch

from hetmpi.embedding_bag import MODES, EmbeddingBag
from hetmpi.optim import RowOptimizer

pytestmark = pytest.mark.mpi
NUM_ROWS, DIM = 50, 6


def both(world, mode, padding_idx=None):
    """A bag and torch's, with the same rows."""
    mine = EmbeddingBag(world, NUM_ROWS, DIM, RowOptimizer("sgd", 0.5), mode, padding_idx)
    theirs = torch.nn.EmbeddingBag(NUM_ROWS, DIM, mode=mode, padding_idx=padding_idx)
    with torch.no_grad():
        theirs.weight.copy_(mine.table.peek(torch.arange(NUM_ROWS)))
    return mine, theirs


def loss_of(bags):
    return (bags * torch.linspace(-1, 1, DIM)).sin().sum()


def calls_of(step, rank, mode):
    """The bags of one rank and step: one call of a matrix and one with offsets, where some bags are empty."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    weights = torch.rand(4, 5, generator=generator) if mode == "sum" else None
    ids = torch.randint(NUM_ROWS, (4, 5), generator=generator)
    return [(ids, None, weights), (torch.randint(NUM_ROWS, (9,), generator=generator), torch.tensor([0, 0, 4, 9]), None)]


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("mode", MODES)
def test_it_learns_what_torch_learns_from_all_ranks_bags(world, mode, padding_idx):
    mine, theirs = both(world, mode, padding_idx)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.5)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(world.size):
            expected = [theirs(*call[:2], per_sample_weights=call[2]) for call in calls_of(step, rank, mode)]
            (sum(map(loss_of, expected)) / world.size).backward()
            if rank == world.rank:
                found = [mine(*call) for call in calls_of(step, rank, mode)]
                assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected))
        sum(map(loss_of, found)).backward()
        mine.step()
        optimizer.step()
    mine.table.flush()
    with torch.no_grad():
        known = mine.table.peek(torch.arange(NUM_ROWS))
    assert torch.allclose(known, theirs.weight, atol=1e-5)
    mine.table.close()


def test_a_rank_without_bags_and_a_call_without_gradient_count_for_nothing(world):
    mine, _ = both(world, "sum")
    before = mine.table.peek(torch.arange(NUM_ROWS))
    if world.rank == 0:
        loss_of(mine(torch.tensor([[1, 2]]))).backward()
        mine(torch.tensor([[4]]))
    mine.step()
    mine.table.flush()
    with torch.no_grad():
        after = mine(torch.arange(NUM_ROWS).view(-1, 1))
    assert torch.nonzero((after != before).any(1)).flatten().tolist() == [1, 2]
    mine.table.close()


def test_bags_begin_as_torchs_and_differently(world):
    one, other = (EmbeddingBag(world, 2000, 8) for _ in range(2))
    rows = [bag.table.peek(torch.arange(2000)) for bag in (one, other)]
    assert all(abs(float(part.std()) - 1) < 0.05 for part in rows) and not torch.equal(*rows)
    one.table.close()
    other.table.close()


def test_what_it_cannot_be_is_refused(world):
    with pytest.raises(ValueError, match="mode must be one of sum, mean, max, got median"):
        EmbeddingBag(world, 10, 2, mode="median")
    with pytest.raises(ValueError, match=r"padding_idx must lie in \[0, 10\), got 10"):
        EmbeddingBag(world, 10, 2, padding_idx=10)
