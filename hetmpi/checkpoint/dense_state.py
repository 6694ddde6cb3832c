"""dense.pt of a checkpoint: state dicts of the dense layers and their optimizer, each rank's state of torch's
generator, and what encodes further data.

torch.load(weights_only=True) runs no code from the file, but may return any value. So types are checked before the
state reaches the model, and the optimizer's state is tried by a step of a copy.
"""

from __future__ import annotations

import copy
import inspect
import os
import warnings
import zipfile
from pathlib import Path

import torch

from hetmpi.bounded_file import open_file
from hetmpi.errors import UserError


def state_of(model: torch.nn.Module | None, optimizer, rng: list[torch.Tensor], data: dict | None = None) -> dict:
    """A copy on the CPU: {"model": state dict, "optimizer": state dict, "rng": rng, "data": data}, without those that
    are None. data: name -> tensor, what the source needs to encode further files."""
    parts = {"model": model, "optimizer": optimizer}
    state = {name: on_cpu(part.state_dict()) for name, part in parts.items() if part is not None} | {"rng": rng}
    return state if data is None else state | {"data": data}


def on_cpu(value):
    """A state dict with its tensors copied to the CPU."""
    if torch.is_tensor(value):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: on_cpu(part) for key, part in value.items()}
    return [on_cpu(part) for part in value] if isinstance(value, list) else value


def wrong_numbers(state: dict, parameters: set[str]) -> str | None:
    """The first part of a state_of() that is not finite, None if all are finite. parameters: names of the model's
    parameters; buffers are not checked."""
    model = state.get("model", {})
    for name in [name for name in model if name in parameters and not is_finite(model[name])]:
        return f"parameter {name} of the dense layers is not finite"
    if not all(map(is_finite, tensors_in(state.get("optimizer", {})))):
        return "the dense optimizer's state is not finite"
    return None


def is_finite(value) -> bool:
    """Whether all elements of a tensor are finite; True for any other value."""
    return not torch.is_tensor(value) or value.layout != torch.strided or bool(torch.isfinite(value).all())


def tensors_in(value) -> list[torch.Tensor]:
    """All tensors in nested dicts, lists and tuples, each part once: a file may name one part in many places."""
    found, parts, seen = [], [value], set()
    while parts:
        part = parts.pop()
        if torch.is_tensor(part):
            found.append(part)
        elif isinstance(part, (dict, list, tuple)) and id(part) not in seen:
            seen.add(id(part))
            parts += part.values() if isinstance(part, dict) else part
    return found


def read_state(path: Path, size: int) -> dict:
    """Reads the state_of() in the file `path` of a checkpoint of `size` ranks. Raises UserError for any other
    content."""
    try:
        with open_file(path) as file, warnings.catch_warnings():
            check_archive(file)
            warnings.simplefilter("ignore")  # of torch about content that is rejected below
            state = torch.load(file, map_location="cpu", weights_only=True)
        problem = wrong_kind(state, size)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except Exception as error:  # unpickling a crafted file may raise any exception
        raise UserError(f"{path} must hold tensors and plain values by torch.save: {in_line(error)}") from error
    if problem is not None:
        raise UserError(f"{path}: {problem}")
    return state


def check_archive(file):
    """Raises ValueError unless a file is an archive as torch.save writes it, whose entries are not compressed: a small
    file could contain gigabytes of zeros."""
    with zipfile.ZipFile(file) as archive:
        packed = [entry for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
        if packed or sum(entry.file_size for entry in archive.infolist()) > os.fstat(file.fileno()).st_size:
            raise ValueError("its entries must not be compressed")
    file.seek(0)


def wrong_kind(state, size: int) -> str | None:
    """The first difference between the content of a file and the structure of state_of(), None if there is none."""
    if not isinstance(state, dict) or not set(state) <= {"model", "optimizer", "rng", "data"}:
        return "must hold model, optimizer, rng and data by these names, it does not"
    for name in ("model", "optimizer"):
        if not isinstance(state.get(name, {}), dict):
            return f"{name} must be a state dict, got {type(state[name]).__name__}"
    if not all(isinstance(name, str) for name in state.get("model", {})):
        return "model must be a state dict, it has keys that are no names"
    data = state.get("data", {})
    if not isinstance(data, dict) or not all(isinstance(name, str) and torch.is_tensor(data[name]) for name in data):
        return "data must hold tensors by name, it does not"
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
    """Loads the state of model and optimizer, and sets torch's generator to that of `rank` if both optimizer and rank
    are given. path: source of the state, for messages. Raises UserError for state that does not fit or is not
    finite."""
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
    """Calls load(). Raises UserError for any exception: torch raises many kinds for the state of another program."""
    try:
        load()
    except Exception as error:
        raise UserError(f"{place} does not fit: {in_line(error)}") from error


def try_step(optimizer, state: dict):
    """Makes a step with zero gradients on a copy of an optimizer from torch.optim that has this state. Raises any
    exception of that step, ValueError if the result is not finite. Needed because load_state_dict alone accepts the
    state of another rule and of parameters of another shape."""
    optimizer = torchs(optimizer)
    kind = type(optimizer).__bases__[0] if type(optimizer).__module__.startswith("horovod") else type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind in (torch.optim.SparseAdam, torch.optim.LBFGS):
        return
    groups = [{**group, "params": [like(p) for p in group["params"]]} for group in optimizer.param_groups]
    trial = kind(groups, lr=0.1)
    trial.load_state_dict(copy.deepcopy(state))
    settings = set(inspect.signature(kind).parameters) - {"params"}
    for group in trial.param_groups:
        values = {name: group[name] for name in settings & set(group)}
        kind([{"params": group["params"]}], **values)  # raises for beta = 1
    trial.step()
    if not all(map(is_finite, tensors_in([[group["params"] for group in trial.param_groups], state]))):
        raise ValueError("it is not finite")


def torchs(optimizer):
    """The torch optimizer that a wrapper holds as `optimizer`, or the argument itself."""
    while not isinstance(optimizer, torch.optim.Optimizer):
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "_optimizer", None)
        if inner is None:
            break
        optimizer = inner
    return optimizer


def like(parameter: torch.Tensor) -> torch.nn.Parameter:
    """A parameter of the same shape, zero, with a zero gradient."""
    other = torch.nn.Parameter(torch.zeros_like(parameter))
    other.grad = torch.zeros_like(parameter)
    return other


def in_line(error: Exception) -> str:
    """The text of an error in one line of limited length, without torch's advice to load what may run code."""
    _, _, cause = str(error).rpartition("WeightsUnpickler error:")
    text = " ".join(cause.partition("Check the documentation")[0].split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    return f"{type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"
