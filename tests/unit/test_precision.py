"""train.precision, as far as it shows without a GPU."""

import pytest
import torch
from omegaconf import OmegaConf

from hetmpi.errors import UserError
from hetmpi.run.build import precision_of


@pytest.fixture(autouse=True)
def restored():
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def chosen(precision: str, device: str):
    return precision_of(OmegaConf.create({"train": {"precision": precision}}), torch.device(device))


@pytest.mark.parametrize("precision, is_allowed", [("tf32", True), ("float32", False), ("bf16", False)])
def test_products_on_a_gpu_use_tf32_where_it_is_chosen(precision, is_allowed):
    torch.backends.cuda.matmul.allow_tf32 = not is_allowed
    chosen(precision, "cuda")
    assert torch.backends.cuda.matmul.allow_tf32 is is_allowed


def test_tf32_without_a_gpu_is_refused():
    with pytest.raises(UserError, match="train.precision=tf32 is a format of GPUs, the device is cpu"):
        chosen("tf32", "cpu")
