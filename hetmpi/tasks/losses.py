"""What losses take, and the refusal of one that takes something else than its task gives.

A loss of a user's own declares it as an attribute of its class, `takes = "click"` or a list; one that does not is
called with what its task gives."""

from __future__ import annotations

import torch

from hetmpi.errors import UserError

CLICK, NUMBER, CLASSES, LABELS, CANDIDATES = "click", "number", "classes", "labels", "candidates"
INPUTS = {
    CLICK: "logits (n,) and labels 0 or 1 (n,)",
    NUMBER: "predictions (n,) and numbers (n,)",
    CLASSES: "logits (n, C) and classes (n,)",
    LABELS: "logits (n, C) and labels 0 or 1 (n, C)",
    CANDIDATES: "the scores of right answers (n,) and of wrong ones (n, N)",
}
FITTING = {  # files of conf/loss, the default first
    CLICK: ("bce",),
    NUMBER: ("mse",),
    CLASSES: ("classes",),
    LABELS: ("classes", "bce"),
    CANDIDATES: ("softmax", "logistic", "margin"),
}
OF_TORCH = {
    torch.nn.BCEWithLogitsLoss: (CLICK, LABELS),
    torch.nn.MSELoss: (NUMBER,),
    torch.nn.L1Loss: (NUMBER,),
    torch.nn.SmoothL1Loss: (NUMBER,),
    torch.nn.HuberLoss: (NUMBER,),
    torch.nn.CrossEntropyLoss: (CLASSES,),
}


def taken_by(loss) -> tuple[str, ...] | None:
    """The kinds of inputs that a loss takes, of INPUTS; () for a loss of torch's of other inputs, None for a loss that
    does not declare it. Raises UserError for a declaration of other kinds."""
    declared = getattr(loss, "takes", None)
    if declared is not None:
        kinds = (declared,) if isinstance(declared, str) else tuple(declared)
        if not set(kinds) <= set(INPUTS):
            raise UserError(f"{type(loss).__name__}: takes must be of {', '.join(INPUTS)}, got {declared}")
        return kinds
    for kind in type(loss).__mro__:
        if kind in OF_TORCH:
            return OF_TORCH[kind]
        if "forward" in vars(kind):
            return () if kind.__module__ == "torch.nn.modules.loss" else None
    return None


def check_loss(loss, given: str, where: str):
    """Raises UserError unless a loss takes what a task gives, or does not declare what it takes. given: of INPUTS.
    where: the task and its data, for messages."""
    kinds = taken_by(loss)
    if kinds is None or given in kinds:
        return
    others = " or ".join(INPUTS[kind] for kind in kinds) or "other inputs"
    names = " or ".join(f"loss={name}" for name in FITTING[given])
    raise UserError(
        f"{where} gives the loss {INPUTS[given]}, {type(loss).__name__} takes {others}: choose {names}, or a loss of "
        "your own"
    )
