"""The device of a rank, from the setting `device`, and the precision of the network there."""

from __future__ import annotations

import contextlib

import torch

from hetmpi import _C
from hetmpi.errors import UserError
from hetmpi.world.world import World

DEVICES = ("auto", "cpu", "cuda")
# Of matrix products, None: that of their factors. tf32: 32-bit factors are rounded to 10 bits of mantissa in products.
PRECISIONS = {"float32": None, "tf32": None, "bf16": torch.bfloat16}


def has_bf16(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Whether the processor multiplies matrices of 16-bit numbers. True if it does not say."""
    with contextlib.suppress(OSError), open(cpuinfo) as lines:
        flags = next((line.split() for line in lines if line.startswith("flags")), None)
        return flags is None or not {"amx_bf16", "avx512_bf16"}.isdisjoint(flags)
    return True


def choose_device(world: World, wanted: str) -> torch.device:
    """cpu, or this rank's GPU; ranks share GPUs if a node has fewer than ranks. auto selects GPUs if every rank has
    one. Collective. Raises UserError on every rank for cuda if some rank has no usable GPU."""
    if wanted == "cpu":
        return torch.device("cpu")
    problem = gpu_problem(world.node.rank)
    problems = world.comm.allgather(problem)
    if wanted == "auto" and any(problems):
        if world.rank == 0 and not all(problems):
            lacking = next(rank for rank, text in enumerate(problems) if text)
            print(f"device=auto: no GPUs, as rank {lacking} can use none: {problems[lacking]}", flush=True)
        return torch.device("cpu")
    world.agree(
        UserError(f"device=cuda: on {world.host} no GPU can be used: {problem}: set device=cpu or auto")
        if problem
        else None
    )
    device = torch.device("cuda", gpu_of_rank(world.node.rank))
    torch.cuda.set_device(device)
    return device


def gpu_problem(rank: int = 0) -> str:
    """Reason why this rank of its node cannot train on its GPU; empty if it can."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees none"
    return _C.gpu_problem(gpu_of_rank(rank))


def gpu_of_rank(rank: int) -> int:
    """Ranks of a node take the GPUs that this process sees in turn."""
    return rank % torch.cuda.device_count()
