"""Start-up without torch._dynamo, which only torch.compile needs and whose import takes as long as that of torch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import torch

MARK = "__dynamo_disable"  # where torch._compile keeps what it calls in place of a function


def update_of(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], None]:
    """The update of an optimizer of this kind, to be called without autograd in place of step(), which imports
    torch._dynamo. Lets the other methods of optimizers run as they are while it is not imported: torch hides them from
    torch._dynamo, and imports it for that."""
    hiding = torch._disable_dynamo(lambda: None).__code__
    for method in vars(torch.optim.Optimizer).values():
        if getattr(method, "__code__", None) is hiding and not hasattr(method.__wrapped__, MARK):
            setattr(method.__wrapped__, MARK, direct(method))
    return inspect.unwrap(kind.step)


def direct(method):
    """The call of a hidden method until torch._dynamo is imported, when torch hides it after all."""
    function = method.__wrapped__

    def call(*args, **kwargs):
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        delattr(function, MARK)
        return method(*args, **kwargs)

    return call
