"""What losses take, and the refusal of one that takes something else than its task gives.

A loss of a user's own declares it as an attribute of its class, `takes = "click"` or a list; one that does not is
called with what its task gives."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from hetmpi.errors import UserError, check_number, one_line

CLICK, NUMBER, PROBABILITY = "click", "number", "probability"
CLASSES, LABELS, CANDIDATES = "classes", "labels", "candidates"
INPUTS = {
    CLICK: "logits (n,) and labels 0 or 1 (n,)",
    NUMBER: "predictions (n,) and numbers (n,)",
    PROBABILITY: "logits (n,) and labels between 0 and 1 (n,)",
    CLASSES: "logits (n, C) and classes (n,)",
    LABELS: "logits (n, C) and labels 0 or 1 (n, C)",
    CANDIDATES: "the scores of right answers (n,) and of wrong ones (n, N)",
}
FITTING = {  # files of conf/loss, the default first
    CLICK: ("bce",),
    NUMBER: ("mse",),
    PROBABILITY: ("bce",),
    CLASSES: ("classes",),
    LABELS: ("classes", "bce"),
    CANDIDATES: ("softmax", "logistic", "margin"),
}
OF_TORCH = {
    torch.nn.BCEWithLogitsLoss: (CLICK, PROBABILITY, LABELS),
    torch.nn.MSELoss: (NUMBER,),
    torch.nn.L1Loss: (NUMBER,),
    torch.nn.SmoothL1Loss: (NUMBER,),
    torch.nn.HuberLoss: (NUMBER,),
    torch.nn.CrossEntropyLoss: (CLASSES,),
}


class BinaryLoss(torch.nn.Module):
    """Binary cross entropy of logits, as torch.nn.BCEWithLogitsLoss."""

    takes = CLICK, PROBABILITY, LABELS

    def __init__(self, pos_weight: float | None = None):
        """pos_weight: factor of the losses of label 1; None: 1."""
        super().__init__()
        if pos_weight is not None:
            check_number("loss.pos_weight", pos_weight, 0)
        factor = None if pos_weight is None else torch.tensor(float(pos_weight))
        self.register_buffer("pos_weight", factor, persistent=False)

    def forward(self, logits: Tensor, label: Tensor, weights: Tensor | None = None) -> Tensor:
        """logits, label (n,) or (n, C); weights of the samples (n,) -> ()."""
        if weights is None:
            return functional.binary_cross_entropy_with_logits(logits, label, pos_weight=self.pos_weight)
        each = functional.binary_cross_entropy_with_logits(logits, label, pos_weight=self.pos_weight, reduction="none")
        return (each * weights).mean()


class ClassLoss(torch.nn.Module):
    """Cross entropy of classes; of several labels per sample the binary one, averaged over them."""

    takes = CLASSES, LABELS

    def __init__(self, class_weights=None):
        """class_weights: factors of the losses of the classes, a list in their order, or a mapping from their names,
        with 1 for others; None: 1 each."""
        super().__init__()
        self.class_weights, self.factors = class_weights, None

    def name_classes(self, names: Sequence[str]):
        """Reads class_weights. names: of the classes. Raises UserError for other classes, and for impossible
        values."""
        given = self.class_weights
        if given is None:
            return
        if isinstance(given, Mapping):
            unknown = [str(name) for name in given if str(name) not in names]
            if unknown:
                raise UserError(
                    f"loss.class_weights: {one_line(unknown[0])} is no class, there are {one_line(', '.join(names))}"
                )
            given = [{str(name): value for name, value in given.items()}.get(name, 1.0) for name in names]
        if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != len(names):
            raise UserError(
                f"loss.class_weights must have a number for each of the {len(names)} classes, "
                f"{one_line(', '.join(names))}, or be a mapping, got {one_line(self.class_weights)}"
            )
        for value in given:
            check_number("each of loss.class_weights", value, 0)
        self.factors = torch.tensor([float(value) for value in given])

    def forward(self, logits: Tensor, label: Tensor, weights: Tensor | None = None) -> Tensor:
        """logits (n, C); label (n,) int64, or (n, C) float32 of 0 and 1; weights of the samples (n,) -> ()."""
        factors = None if self.factors is None else self.factors.to(logits)
        if weights is None and factors is None:
            if label.is_floating_point():
                return functional.binary_cross_entropy_with_logits(logits, label)
            return functional.cross_entropy(logits, label)
        if label.is_floating_point():
            each = functional.binary_cross_entropy_with_logits(logits, label, weight=factors, reduction="none").mean(1)
        else:
            each = functional.cross_entropy(logits, label, weight=factors, reduction="none")
        return each.mean() if weights is None else (each * weights).mean()


class SquaredLoss(torch.nn.Module):
    """The mean squared difference, as torch.nn.MSELoss."""

    takes = NUMBER

    def forward(self, prediction: Tensor, label: Tensor, weights: Tensor | None = None) -> Tensor:
        """prediction, label, weights of the samples (n,) -> ()."""
        if weights is None:
            return functional.mse_loss(prediction, label)
        return ((prediction - label).square() * weights).mean()


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


def check_weighted(loss):
    """Raises UserError unless a loss takes weights of the samples behind logits and labels."""
    parameters = list(inspect.signature(getattr(loss, "forward", loss)).parameters.values())
    if len(parameters) < 3 and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        raise UserError(
            f"data.sample_weight needs a loss that takes weights, forward(logits, labels, weights), as loss=bce; "
            f"{type(loss).__name__} does not"
        )
