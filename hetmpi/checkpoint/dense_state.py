"""dense.pt of a checkpoint: state dicts of the dense layers and of their optimizer, and torch's generator of each rank.

torch.load(weights_only=True) runs no code of the file, but what it returns may be anything: kinds are checked before
they reach the model, and an optimizer's state by a step of a copy.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from pathlib import Path

import torch

from hetmpi.checkpoint.files import open_file
from hetmpi.errors import UserError


def state_of(model: torch.nn.Module | None, optimizer, rng: list[torch.Tensor]) -> dict:
    """A copy on the CPU: {"model": state dict, "optimizer": state dict, "rng": rng}, without those that are None."""
    parts = {"model": model, "optimizer": optimizer}
    return {name: on_cpu(part.state_dict()) for name, part in parts.items() if part is not None} | {"rng": rng}


def on_cpu(value):
    """A state dict with its tensors copied to the CPU."""
    if torch.is_tensor(value):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: on_cpu(part) for key, part in value.items()}
    return [on_cpu(part) for part in value] if isinstance(value, list) else value


def wrong_numbers(state: dict, parameters: set[str]) -> str | None:
    """What of state_of() is not finite, None if nothing. parameters: names of the model's; a buffer may hold
    anything."""
    model = state.get("model", {})
    for name in [name for name in model if name in parameters and not is_finite(model[name])]:
        return f"parameter {name} of the dense layers is not finite"
    if not all(map(is_finite, tensors_in(state.get("optimizer", {})))):
        return "the dense optimizer's state is not finite"
    return None


def is_finite(value) -> bool:
    """Whether all numbers of a tensor are; True for anything else."""
    return not torch.is_tensor(value) or value.layout != torch.strided or bool(torch.isfinite(value).all())


def tensors_in(value) -> list[torch.Tensor]:
    """All tensors in dicts, lists and tuples."""
    if torch.is_tensor(value):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def read_state(path: Path, size: int) -> dict:
    """What state_of() gave, from the file `path` of a checkpoint of `size` ranks. Raises UserError for anything
    else."""
    try:
        with open_file(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of what it then refuses
            state = torch.load(file, map_location="cpu", weights_only=True)
        problem = wrong_kind(state, size)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except Exception as error:  # an unpickler raises whatever a crafted file makes it raise
        raise UserError(f"{path} must hold tensors and plain values by torch.save: {in_line(error)}") from error
    if problem is not None:
        raise UserError(f"{path}: {problem}")
    return state


def wrong_kind(state, size: int) -> str | None:
    """What of a file is not as state_of() gives it, None if nothing."""
    if not isinstance(state, dict) or not set(state) <= {"model", "optimizer", "rng"}:
        return "must hold model, optimizer and rng by these names, it does not"
    for name in ("model", "optimizer"):
        if not isinstance(state.get(name, {}), dict):
            return f"{name} must be a state dict, got {type(state[name]).__name__}"
    if not all(isinstance(name, str) for name in state.get("model", {})):
        return "model must be a state dict, it has keys that are no names"
    rng = state.get("rng")
    if not isinstance(rng, list) or len(rng) != size or not all(is_rng(part) for part in rng):
        return f"rng must be a list of {size} states of torch's generator, it is not"
    for tensor in tensors_in(state):
        if (
            tensor.layout == torch.strided
            and tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()
        ):
            return f"a tensor of shape {tuple(tensor.shape)} has fewer numbers in the file"
    return None


def is_rng(value) -> bool:
    return torch.is_tensor(value) and value.dtype == torch.uint8 and value.dim() == 1


def load_state(path: Path, state: dict, model: torch.nn.Module | None, optimizer, rank: int | None):
    """Gives model and optimizer their state, and torch's generator that of `rank` if there is an optimizer and a rank.
    path: where it is from, for messages. Raises UserError for what does not fit them or is not finite."""
    for name in [name for name, part in (("model", model), ("optimizer", optimizer)) if part is not None]:
        if name not in state:
            raise UserError(f"{path.parent} has no {name}: it was saved without one, load it so")
    if model is not None:
        attempt(f"{path}: model", lambda: model.load_state_dict(state["model"]))
        for name in [name for name, parameter in model.named_parameters() if not is_finite(parameter)]:
            raise UserError(f"{path}: model: parameter {name} is not finite")
    if optimizer is not None:
        attempt(f"{path}: optimizer", lambda: try_step(optimizer, state["optimizer"]))
        attempt(f"{path}: optimizer", lambda: optimizer.load_state_dict(state["optimizer"]))
        if rank is not None:
            attempt(f"{path}: rng", lambda: torch.set_rng_state(state["rng"][rank]))


def attempt(place: str, load):
    """load(). Raises UserError for whatever it raises: state that was made for another program fails anywhere in
    torch."""
    try:
        load()
    except Exception as error:
        raise UserError(f"{place} does not fit: {in_line(error)}") from error


def try_step(optimizer, state: dict):
    """Makes a step of a copy of the optimizer that has this state, with gradients of 0, if it is one of torch.optim's.
    Raises whatever that raises, ValueError if afterwards something is not finite: load_state_dict alone takes state of
    another rule, and of parameters of another shape."""
    optimizer = torchs(optimizer)
    kind = type(optimizer).__bases__[0] if type(optimizer).__module__.startswith("horovod") else type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind in (torch.optim.SparseAdam, torch.optim.LBFGS):
        return
    groups = [{**group, "params": [like(p) for p in group["params"]]} for group in optimizer.param_groups]
    trial = kind(groups, lr=0.1)
    trial.load_state_dict(copy.deepcopy(state))
    settings = set(inspect.signature(kind).parameters) - {"params"}
    for group in trial.param_groups:
        kind(group["params"], **{name: group[name] for name in settings & set(group)})  # raises for a beta of 1
    trial.step()
    if not all(map(is_finite, tensors_in([[group["params"] for group in trial.param_groups], state]))):
        raise ValueError("it is not finite")


def torchs(optimizer):
    """torch's optimizer in one that wraps it as `optimizer`, or the one given."""
    while not isinstance(optimizer, torch.optim.Optimizer):
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "_optimizer", None)
        if inner is None:
            break
        optimizer = inner
    return optimizer


def like(parameter: torch.Tensor) -> torch.nn.Parameter:
    """A parameter of that shape, all 0, with a gradient of 0."""
    other = torch.nn.Parameter(torch.zeros_like(parameter))
    other.grad = torch.zeros_like(parameter)
    return other


def in_line(error: Exception) -> str:
    """What an error says, on one line that is not too long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"
