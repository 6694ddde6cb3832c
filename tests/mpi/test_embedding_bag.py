"""hetmpi.EmbeddingBag against torch.nn.EmbeddingBag. Run at 1, 2 and 3 ranks."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch

from hetmpi.errors import UserError
from hetmpi.table.bag import MODES, EmbeddingBag
from hetmpi.table.cache import CacheSettings
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.staleness import Staleness
from hetmpi.world.launch import default_world

pytestmark = pytest.mark.mpi
NUM_ROWS, DIM = 50, 6
RULES = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}


def both(world, rule="sgd", **same):
    """A bag and torch's bag with the same rows, and torch's optimizer."""
    torch.manual_seed(0)
    theirs = torch.nn.EmbeddingBag(NUM_ROWS, DIM, sparse=rule != "sgd", **same)
    mine = EmbeddingBag(NUM_ROWS, DIM, optimizer=RowOptimizer(rule, 0.1), world=world, **same)
    mine.fill(theirs.weight)
    return mine, theirs, RULES[rule](theirs.parameters(), 0.1)


def rows_of(bag):
    """All rows of the owners. Collective."""
    bag.flush()
    rows = bag.table.peek(torch.arange(bag.table.num_rows))
    bag.table.world.comm.Barrier()  # a rank that continues may push before another one has read
    return rows


def loss_of(bags):
    return (bags * torch.linspace(-1, 1, DIM)).sin().sum()


def calls_of(step, rank, mode):
    """The bags of one rank and step: one call with a matrix and one with offsets, including empty bags."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    weights = torch.rand(4, 5, generator=generator) if mode == "sum" else None
    ids = torch.randint(NUM_ROWS, (4, 5), generator=generator)
    return [
        (ids, None, weights),
        (torch.randint(NUM_ROWS, (9,), generator=generator), torch.tensor([0, 0, 4, 9]), None),
    ]


def learn(world, mine, theirs, optimizer, mode, atol=1e-5):
    """Some steps of both: torch's bag with the calls of all ranks, the other with this rank's."""
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(world.size):
            expected = [theirs(*call[:2], per_sample_weights=call[2]) for call in calls_of(step, rank, mode)]
            (sum(map(loss_of, expected)) / world.size).backward()
            if rank == world.rank:
                found = [mine(*call) for call in calls_of(step, rank, mode)]
                assert all(torch.allclose(a, b, atol=atol) for a, b in zip(found, expected))
        sum(map(loss_of, found)).backward()
        mine.step()
        optimizer.step()
    assert torch.allclose(rows_of(mine), theirs.weight, atol=atol)
    mine.table.close()


@pytest.mark.parametrize("padding_idx", [None, 3, -2])
@pytest.mark.parametrize("mode", MODES)
def test_it_learns_what_torch_learns_from_all_ranks_bags(world, mode, padding_idx):
    learn(world, *both(world, mode=mode, padding_idx=padding_idx), mode)


@pytest.mark.parametrize("rule", RULES)
def test_its_rules_are_those_of_torch_on_sparse_gradients(world, rule):
    learn(world, *both(world, rule, mode="sum"), "sum", atol=1e-4)  # SparseAdam adds eps elsewhere: test_optim.py


def test_ids_of_32_bits_and_the_end_among_the_offsets(world):
    mine, theirs, _ = both(world, mode="mean", include_last_offset=True)
    ids, offsets = torch.tensor([4, 9, 4, 1, 0], dtype=torch.int32), torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert torch.allclose(mine(ids, offsets), theirs(ids, offsets))
    assert torch.allclose(
        mine(torch.arange(20)[::2], torch.tensor([0, 10])), theirs(torch.arange(20)[::2], torch.tensor([0, 10]))
    )
    mine.table.close()


def test_weights_of_samples_have_gradients(world):
    mine, theirs, _ = both(world, mode="sum")
    (ids, _, weights), _ = calls_of(0, world.rank, "sum")
    both_weights = [weights.clone().requires_grad_() for _ in range(2)]
    for bag, given in zip((mine, theirs), both_weights):
        loss_of(bag(ids, per_sample_weights=given)).backward()
    assert torch.allclose(both_weights[0].grad, both_weights[1].grad, atol=1e-6)
    mine.table.close()


def test_a_rank_without_bags_and_a_call_without_gradient_count_for_nothing(world):
    mine, _, _ = both(world, "adam", mode="sum")
    before = rows_of(mine)
    for _ in range(2):
        if world.rank == 0:
            loss_of(mine(torch.tensor([[1, 2]]))).backward()
            mine(torch.tensor([[4]]))
        mine.step()
        with torch.no_grad():
            after = mine(torch.arange(NUM_ROWS).view(-1, 1))
    assert torch.nonzero((after != before).any(1)).flatten().tolist() == [1, 2]
    mine.table.close()


def test_bags_without_any_id(world):
    mine, theirs, _ = both(world, mode="sum")
    nothing = torch.empty(0, dtype=torch.int64), torch.tensor([0, 0])
    found = mine(*nothing)
    assert torch.equal(found, theirs(*nothing))
    found.sum().backward()
    mine.step()
    assert torch.equal(rows_of(mine), theirs.weight)
    mine.table.close()


@pytest.mark.parametrize("cache", [0, NUM_ROWS])
def test_what_is_late_arrives_with_a_flush(world, cache):
    """With plain SGD and a small learning rate a stale read changes little, so the rows are close to those of exact
    reads."""
    bound = {"staleness": Staleness(3), "cache": CacheSettings(capacity_rows=cache, admit="all")}
    bags = [
        EmbeddingBag(NUM_ROWS, DIM, optimizer=RowOptimizer("sgd", 1e-3), mode="sum", world=world, name="one", **how)
        for how in ({}, bound)
    ]
    first = rows_of(bags[0])
    for step in range(5):
        for bag in bags:
            sum(loss_of(bag(*call)) for call in calls_of(step, world.rank, "sum")).backward()
            bag.step()
    exact, late = map(rows_of, bags)
    assert (late - exact).abs().max() < 0.02 * (exact - first).abs().max()
    for bag in bags:
        bag.table.close()


def test_a_model_with_a_bag_is_handled_as_any_other(world):
    hvd = world.start_horovod()
    mine, _, _ = both(world, mode="sum")
    model = torch.nn.Sequential(mine, torch.nn.Linear(DIM, 1)).to("cpu").train()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert list(model.state_dict()) == ["1.weight", "1.bias"]
    assert [parameter.shape for parameter in mine.parameters()] == [(1,)]
    assert not model.load_state_dict(model.state_dict()).missing_keys
    with pytest.raises(RuntimeError, match='Unexpected key.* "0.weight"'):
        model.load_state_dict(model.state_dict() | {"0.weight": torch.zeros(1)})
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), named_parameters=model.named_parameters()
    )
    before = rows_of(mine)
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    mine.step()
    assert torch.nonzero((rows_of(mine) != before).any(1)).flatten().tolist() == [1, 2]
    assert "EmbeddingBag(50, 6, mode=sum" in repr(model.eval())
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="its rows are spread over the ranks"):
            copied(model if copied is not copy.copy else mine)
    mine.table.close()


def late(world, bound):
    """A bag with plain SGD and a staleness bound."""
    rule = RowOptimizer("sgd", 0.1)
    return EmbeddingBag(NUM_ROWS, DIM, optimizer=rule, mode="sum", world=world, staleness=Staleness(bound))


def zeroed(how, bag, model, optimizer):
    """Calls zero_grad() in one of the usual ways."""
    part = {"bag": bag, "model": model, "optimizer": optimizer}[how.split()[0]]
    part.zero_grad(set_to_none="zeros" not in how)


@pytest.mark.parametrize("how", ["bag", "bag zeros", "model", "model zeros", "optimizer", "optimizer zeros"])
@pytest.mark.parametrize("moved", [lambda model: model, torch.nn.Module.half])
def test_a_batch_that_all_ranks_leave_out_leaves_nothing_behind(world, how, moved):
    """As `optimizer.zero_grad(); loss.backward(); if not finite: continue` does, and with zero_grad of the model."""
    mine, theirs, dense = both(world, mode="sum")
    model = moved(torch.nn.Sequential(mine))
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    for step, is_bad in enumerate([False, True, False, True, True, False]):
        zeroed(how, mine, model, optimizer)
        dense.zero_grad()
        for rank in range(world.size):
            (loss_of(theirs(*calls_of(step, rank, "sum")[1][:2])) / world.size).backward()
        (loss_of(mine(*calls_of(step, world.rank, "sum")[1][:2])) * (float("nan") if is_bad else 1.0)).backward()
        if is_bad:
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        mine.step()
        dense.step()
    assert torch.allclose(rows_of(mine), theirs.weight, atol=1e-5) and abs(mine.anchor.item()) < 1
    mine.table.close()


@pytest.mark.parametrize("bound", [0, 3])
def test_a_rank_that_leaves_a_batch_out_steps_without_gradients(world, bound):
    mine, theirs, dense = both(world, mode="sum")
    if bound:
        mine.table.close()
        mine = late(world, bound)
        mine.fill(theirs.weight)
    model = torch.nn.Sequential(mine)
    for rank in range(world.size):
        if rank != world.size - 1:
            (loss_of(theirs(*calls_of(0, rank, "sum")[0][:2])) / world.size).backward()
    loss_of(mine(*calls_of(0, world.rank, "sum")[0][:2])).backward()
    world.comm.Barrier()  # all ranks have read
    if world.rank == world.size - 1:
        model.zero_grad()
        with pytest.warns(UserWarning, match=r"bag \d+ of 50 rows of dim 6: zero_grad\(\) came between backward"):
            mine.step()
    else:
        mine.step()
    if world.size > 1:
        dense.step()
    assert torch.allclose(rows_of(mine), theirs.weight, atol=1e-5)
    mine.table.close()


def test_gradients_that_are_not_finite_reach_no_owner(world):
    mine, _, _ = both(world, mode="sum")
    before = rows_of(mine)
    loss = loss_of(mine(torch.tensor([[1, 2], [3, 4]])))
    (loss * (float("inf") if world.rank == 0 else 1.0)).backward()
    if world.rank == 0:
        told = r"EmbeddingBag.step: bag \d+ of 50 rows of dim 6: gradients must be finite, those of 4 of 4 .*key [1-4]"
        for _ in range(2):
            with pytest.raises(UserError, match=told):
                mine.step()
        mine.zero_grad()
    mine.step()
    changed = torch.nonzero((rows_of(mine) != before).any(1)).flatten().tolist()
    assert changed == ([] if world.size == 1 else [1, 2, 3, 4]) and torch.isfinite(rows_of(mine)).all()
    mine.table.close()


@pytest.mark.parametrize("bound", [0, 3])
@pytest.mark.parametrize("freeze", ["bag", "model", "parameters"])
def test_a_frozen_bag_stays_as_it_is_and_steps_all_the_same(world, freeze, bound):
    mine = late(world, bound)
    model, ids = torch.nn.Sequential(mine, torch.nn.Linear(DIM, 1)), torch.tensor([[1, 2]])
    before = rows_of(mine)
    model(ids).sum().backward()  # before it was frozen
    if freeze == "parameters":
        for parameter in model.parameters():
            parameter.requires_grad = False
    else:
        {"bag": mine, "model": model}[freeze].requires_grad_(False)
    mine.step()
    for _ in range(3):
        found = mine(ids)
        assert not found.requires_grad and torch.allclose(found, before[1:3].sum(0, keepdim=True))
        weights = torch.ones(1, 2, requires_grad=True)
        mine(ids, per_sample_weights=weights).sum().backward()
        assert torch.allclose(weights.grad, before[1:3].sum(1)[None], atol=1e-5)
        mine.step()
    assert torch.equal(rows_of(mine), before)
    mine.requires_grad_(True)
    mine(ids).sum().backward()
    mine.step()
    assert torch.nonzero((rows_of(mine) != before).any(1)).flatten().tolist() == [1, 2]
    mine.table.close()


def test_batches_are_summed_as_they_come_and_a_forgotten_step_is_told_once(world):
    mine, theirs, dense = both(world, mode="sum")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(150):
            for rank in range(world.size):
                (1e-3 * loss_of(theirs(*calls_of(step, rank, "sum")[0][:2])) / world.size).backward()
            calls = calls_of(step, world.rank, "sum")[0][:2]
            (1e-3 * (loss_of(mine(*calls)) + loss_of(mine(calls[0][:2])) - loss_of(mine(calls[0][:2])))).backward()
            assert sum(len(keys) for keys, _ in mine._kept) <= 3 * NUM_ROWS
    text = [f"{warning.filename} {warning.message}" for warning in told if "wait for step()" in str(warning.message)]
    assert len(text) == 1 and __file__ in text[0] and "gradients of 100 batches wait" in text[0]
    mine.step()
    dense.step()
    assert torch.allclose(rows_of(mine), theirs.weight, atol=1e-5)
    mine.table.close()


def test_calls_without_a_backward_keep_nothing(world, monkeypatch):
    """As in an evaluation without no_grad."""
    mine, _, _ = both(world, mode="sum")
    read, given = mine.table.read, []
    monkeypatch.setattr(mine.table, "read", lambda keys: given.append(weakref.ref(rows := read(keys))) or rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(200):
            mine(torch.tensor([[1, 2]]))
    gc.collect()
    assert len(given) == 200 and not any(rows() is not None for rows in given) and not mine._kept
    mine.table.close()


def test_horovod_averages_beside_a_bag_that_some_ranks_do_not_call(world):
    """With gradients of 16 bits, in which the mark of the anchor is zero."""
    hvd = world.start_horovod()
    mine, theirs, dense = both(world, mode="sum")
    model = torch.nn.Sequential(mine, torch.nn.Linear(DIM, 1))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression=hvd.Compression.fp16
    )
    for step in range(3):
        optimizer.zero_grad()
        dense.zero_grad()
        if world.rank == 0:
            (loss_of(theirs(torch.tensor([[1, 2, step]]))) / world.size).backward()
            loss_of(mine(torch.tensor([[1, 2, step]]))).backward()
        model[1](torch.ones(1, DIM)).sum().backward()
        optimizer.step()
        mine.step()
        dense.step()
    expected = theirs.weight.detach().clone()
    assert torch.allclose(rows_of(mine), torch.from_numpy(world.comm.bcast(expected.numpy())), atol=1e-5)
    mine.table.close()


def test_a_program_without_a_world_gets_one(world):
    bag = EmbeddingBag(NUM_ROWS, DIM)
    assert bag.table.world is default_world() and (bag.table.world.rank, bag.table.world.size) == (
        world.rank,
        world.size,
    )
    bag.table.close()


def test_bags_begin_as_torchs_and_differently(world):
    one, other = (EmbeddingBag(2000, 8, world=world) for _ in range(2))
    rows = [rows_of(bag) for bag in (one, other)]
    assert all(abs(float(part.std()) - 1) < 0.05 for part in rows) and not torch.equal(*rows)
    one.table.close()
    other.table.close()


def test_what_it_cannot_be_is_refused(world):
    with pytest.raises(ValueError, match="mode must be one of sum, mean, max, got median"):
        EmbeddingBag(10, 2, mode="median")
    with pytest.raises(ValueError, match=r"padding_idx must lie in \[-10, 10\), got 10"):
        EmbeddingBag(10, 2, padding_idx=10)
    with pytest.raises(ValueError, match="leave out max_norm"):
        EmbeddingBag(10, 2, max_norm=1.0)
    bag = EmbeddingBag(10, 2, world=world)
    with pytest.raises(UserError, match=r"input must be int64 or int32, got torch.float32 \(1, 2\)"):
        bag(torch.ones(1, 2))
    with pytest.raises(UserError, match=r"keys must lie in \[0, 10\), got 10 \(1 of 2 are out of range\)"):
        bag(torch.tensor([[1, 10]]))
    with pytest.raises(UserError, match=r"rows must be of shape \(10, 2\), got \(2, 10\)"):
        bag.fill(torch.zeros(2, 10))
    bag.table.close()
