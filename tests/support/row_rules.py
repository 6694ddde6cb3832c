"""Row rules with the settings that tests use."""

import numpy as np

from hetmpi.table.optim import RowOptimizer

RULES = {"sgd": 0.5, "adagrad": 0.1, "rowwise_adagrad": 0.1, "adam": 0.01, "momentum": 0.1, "ftrl": 0.1}
WITH_SQUARES = sorted(set(RULES) - {"sgd", "momentum"})
FTRL = {"l1": 0.05, "l2": 0.1}
L1 = 0.5  # for gradients of about 1


def row_optimizer(rule, *arguments, l1=FTRL["l1"], **settings):
    """With L1 and L2 where the rule has them."""
    of_ftrl = {"l1": l1, "l2": FTRL["l2"]} if rule == "ftrl" else {}
    return RowOptimizer(rule, *arguments, **of_ftrl, **settings)


def second_moments(rule, state):
    """The part (n, dim or 1) of a state (n, state_dim) that the rule divides by the root of."""
    return np.split(state, 2, axis=1)[1] if rule in ("adam", "ftrl") else state
