"""Tests of batches for a GPU with one, emulated or not: tests/cpp/test_emulated_gpu.py runs them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from click_features import Clicks

from hetmpi import _C, EmbeddingTable, RowOptimizer, UserError, World
from hetmpi.data import gpu_batch
from hetmpi.data.batch import Samples, to_batch
from hetmpi.data.gpu_batch import GpuBatches
from hetmpi.gpu import gpu_of
from hetmpi.layers import look_up
from hetmpi.tasks.ctr import ClickThroughRate

DEVICE = torch.device("cpu", 0) if gpu_of(torch.device("cuda", 0)).__name__ == "GpuOnCpu" else torch.device("cuda", 0)
NUM_ROWS = 1000


def samples(ids: np.ndarray) -> Samples:
    return Samples(ids, np.zeros((len(ids), 1), np.float32), np.zeros(len(ids), np.float32))


def drawn(seed: int, num: int = 50) -> Samples:
    return samples((NUM_ROWS * np.random.default_rng(seed).random((num, 4)) ** 3).astype(np.int64))


def test_batches_are_those_of_the_cpu():
    make = GpuBatches(DEVICE, NUM_ROWS)
    for seed in range(20):
        expected, found = to_batch(drawn(seed)), make(drawn(seed)).on(DEVICE)
        assert torch.equal(expected.keys["table"], found.keys["table"])
        assert torch.equal(expected.index, found.index.cpu())


@pytest.mark.parametrize("dim", [1, 6, 128])
@pytest.mark.parametrize("of", ["batch", "columns", "changed", "one row more", "parts"])
def test_gradients_have_the_bits_of_the_cpu(monkeypatch, dim, of):
    """of: what is looked up. Only the batch's index itself has an order, of as many rows; the sums are right without
    one, too. In parts: as where the network concatenates the rows with other numbers."""
    gpu, orders = gpu_of(DEVICE), []
    sum_by_row = gpu.sum_by_row
    monkeypatch.setattr(
        gpu, "sum_by_row", lambda *arguments: orders.append(arguments[3] is not None) or sum_by_row(*arguments)
    )
    batch = GpuBatches(DEVICE, NUM_ROWS)(drawn(3, 3000)).on(DEVICE)  # a row occurs more than 64 times
    index, num_rows = batch.index, len(batch.keys["table"])
    if of == "columns":
        index = index[:, 1:3]
    elif of == "changed":
        index[:, 1] = index[:, 0]
    elif of == "one row more":
        num_rows += 1
    generator = torch.Generator().manual_seed(0)
    rows, grads = (torch.randn(*shape, dim, generator=generator) for shape in ((num_rows,), index.shape))
    rows_on_gpu = gpu.torchs_memory(rows.shape, rows.dtype, DEVICE).copy_(rows).requires_grad_()
    found = look_up(rows_on_gpu, index)
    if of == "parts":
        more = torch.cat([found.flatten(1), torch.ones(len(found), 5, device=found.device)], 1)
        more[:, :-5].backward(grads.flatten(1).to(DEVICE))
    else:
        found.backward(grads.to(DEVICE))
    expected = np.empty((num_rows, dim), np.float32)
    _C.sum_by_row(grads.view(1, -1).numpy(), index.cpu().reshape(-1).numpy(), expected)
    assert np.array_equal(expected, rows_on_gpu.grad.cpu().numpy())
    assert orders == [of in ("batch", "parts")]


def test_threads_that_come_and_go_share_streams(monkeypatch):
    """Torch keeps memory for each stream, and loaders of a stream of files make new threads for each file."""
    made, of = [], gpu_batch.Workspace
    monkeypatch.setattr(gpu_batch, "Workspace", lambda device: made.append(device) or of(device))
    make = GpuBatches(DEVICE, NUM_ROWS)
    for _ in range(10):
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda seed: make(drawn(seed)), range(6)))
    assert 1 <= len(made) <= 2


def test_the_thread_that_makes_a_batch_of_several_tables_and_lists_sends_it():
    task, samples = ClickThroughRate(Clicks(), torch.nn.BCEWithLogitsLoss()), Clicks().train(0, 50)
    expected, made = (task.batches(device)(samples) for device in (torch.device("cpu"), DEVICE))
    found = made.on(DEVICE)
    assert all(torch.equal(expected.keys[name], keys) for name, keys in found.keys.items())
    parts = [(batch.index, batch.dense, batch.label, *sum(batch.bags, ())) for batch in (expected, made, found)]
    assert len(parts[0]) > 3
    for on_cpu, sent, used in zip(*parts, strict=True):
        assert torch.equal(on_cpu, used.cpu()) and sent.data_ptr() == used.data_ptr() != on_cpu.data_ptr()


def test_keys_made_on_the_gpu_are_not_searched_for_repeated_ones():
    keys = GpuBatches(DEVICE, NUM_ROWS)(drawn(0)).keys["table"].numpy()
    assert _C.first_repeated(keys) == -1
    keys[1] = keys[0]
    assert _C.first_repeated(keys) == 1
    _C.note_distinct(keys)
    assert _C.first_repeated(keys) == -1


@pytest.mark.parametrize("wrong", [-1, NUM_ROWS, NUM_ROWS + 7, 1 << 40, -(1 << 63)])
def test_an_id_out_of_range_is_told_as_such(wrong):
    """Only the bits of ids in range are sorted, so one that is not may be among the keys twice."""
    table = EmbeddingTable(World(), NUM_ROWS, 4, RowOptimizer())
    ids = drawn(1).ids
    ids[3::7, 1] = wrong
    keys = GpuBatches(DEVICE, NUM_ROWS)(samples(ids)).keys["table"]
    with pytest.raises(UserError, match=rf"keys must lie in \[0, 1,000\), got {wrong} "):
        table.check(keys)
    table.close()
