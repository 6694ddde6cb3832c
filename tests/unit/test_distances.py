"""Distances of all pairs and their gradients: those of torch in double precision, the same bits with any number of
threads, none of equal rows."""

import numpy as np
import pytest
import torch

from hetmpi import _C
from hetmpi.layers import differing_moduli, distances


def reference(kind, queries, entities):
    if kind == "moduli":
        return differing_moduli(queries, entities)
    return torch.cdist(queries, entities, p=1.0 if kind == "absolute" else 2.0)


@pytest.mark.parametrize("kind", ["absolute", "euclidean", "moduli"])
@pytest.mark.parametrize("shape", [(3, 5, 14), (1, 40, 32), (40, 1, 2), (20, 33, 100), (0, 4, 8), (4, 0, 8)])
def test_distances_and_gradients_are_those_of_torch(kind, shape):
    num, others, dim = shape
    torch.manual_seed(0)
    rows = torch.randn(num, dim), torch.randn(others, dim)
    grads = torch.randn(num, others)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        mine = [tensor.clone().requires_grad_() for tensor in rows]
        result = distances(kind, *mine)
        result.backward(grads)
        found.append([result.detach(), *(tensor.grad for tensor in mine)])
    torch.set_num_threads(1)
    exact = [tensor.double().requires_grad_() for tensor in rows]
    result = reference(kind, *exact) if num and others else torch.zeros(num, others).double().requires_grad_()
    result.backward(grads.double())
    wanted = [result.detach(), *(torch.zeros(len(t), dim) if t.grad is None else t.grad for t in exact)]
    for mine, same, double in zip(*found, wanted):
        assert torch.equal(mine, same)
        assert torch.allclose(mine.double(), double.double(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", ["absolute", "euclidean", "moduli"])
def test_equal_rows_have_no_gradient_and_nan_stays(kind):
    rows = torch.ones(2, 6, requires_grad=True)
    distances(kind, rows, torch.ones(1, 6)).sum().backward()
    assert torch.equal(rows.grad, torch.zeros(2, 6))
    bad = torch.full((1, 6), torch.nan, requires_grad=True)
    found = distances(kind, bad, torch.ones(1, 6))
    found.sum().backward()
    assert found.isnan().all() and bad.grad.isnan().any()


def test_other_shapes_and_kinds_are_refused():
    rows = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match="real and imaginary"):
        _C.distances("moduli", rows, rows, 1)
    with pytest.raises(ValueError, match="absolute, euclidean or moduli"):
        _C.distances("cosine", rows, rows, 1)
    with pytest.raises(ValueError, match="others must have shape"):
        _C.distances("absolute", rows, np.ones((2, 4), np.float32), 1)
