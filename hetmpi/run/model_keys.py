"""The keys of hetmpi's models, checked before a model is made."""

from __future__ import annotations

from importlib import import_module
from typing import get_args, get_origin

from omegaconf import DictConfig, ListConfig

from hetmpi.errors import UserError, check_integer, check_number, one_line

MOST_UNITS = 1 << 20  # per layer
MOST_LAYERS = 1000
LARGEST_NUMBER = 1_000_000  # of keys that may be fractions


def check_model(model: DictConfig):
    """Raises UserError for impossible values of the keys of hetmpi's models. Other models check their own."""
    if not str(model._target_).startswith("hetmpi.models."):
        return
    kinds = argument_kinds(model._target_)
    for key, value in model.items():
        name, is_list = f"settings: model.{one_line(key, 100)}", isinstance(value, ListConfig)
        if kinds.get(key) is bool:
            if not isinstance(value, bool):
                raise UserError(f"{name} must be true or false, got {one_line(value, 100)}")
        elif key.endswith("dropout"):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise UserError(f"{name} must be a number from 0 to below 1, got {one_line(value, 100)}")
        elif kinds.get(key) is float:
            check_number(name, value, -LARGEST_NUMBER, LARGEST_NUMBER)
        elif key in kinds and is_list != (get_origin(kinds[key]) is list):
            kind = "a number" if is_list else "a list"
            raise UserError(f"{name} must be {kind}, got {one_line(value, 100)}")
        elif get_args(kinds.get(key)) == (str,):
            for one in value:
                if not isinstance(one, str):
                    raise UserError(f"settings: each of model.{key} must be a name, got {one_line(one, 100)}")
        elif is_list:
            check_integer(f"{name}: the number of its entries", len(value), 0, MOST_LAYERS)
            for size in value:  # of a layer; or the number of a field
                check_integer(f"settings: each of model.{key}", size, 0 if key.endswith("_context") else 1, MOST_UNITS)
        elif key != "_target_":
            check_integer(name, value, 0, MOST_LAYERS if key.startswith("num_") else MOST_UNITS)


def argument_kinds(target: str) -> dict[str, type]:
    """Argument of the constructor of one of hetmpi's models, or of a class it inherits from -> its annotated type; {}
    for a class that cannot be imported, which `make` refuses."""
    module, _, name = target.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return {}
    kinds: dict[str, type] = {}
    for base in reversed(getattr(found, "__mro__", ())):
        if base.__module__.startswith("hetmpi.models."):
            kinds |= getattr(vars(base).get("__init__"), "__annotations__", {})
    return kinds
