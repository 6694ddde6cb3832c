"""Curves of held-out predictions for the report of a run: calibration by bins, ROC, precision over recall."""

from __future__ import annotations

import numpy as np

NUM_BINS = 10
MOST_POINTS = 100  # of a curve


def curves(label: np.ndarray, logit: np.ndarray, weight: np.ndarray | None = None) -> dict[str, list]:
    """label (n,) in [0, 1], logit (n,), weight (n,), None for ones. calibration: of bins of equally many samples, in
    the order of predictions, mean prediction, mean label and number of samples; roc: false and true positive rates;
    precision: recall and precision. {} without samples of both labels, and for predictions that are not finite."""
    weight = np.ones(len(label)) if weight is None else weight.astype(float)
    if not len(label) or not np.isfinite(logit).all():
        return {}
    order = np.argsort(-logit, kind="stable")
    label, score, weight = label[order].astype(float), logit[order].astype(float), weight[order]
    positives, negatives = np.cumsum(weight * label), np.cumsum(weight * (1 - label))
    if positives[-1] <= 0 or negatives[-1] <= 0:
        return {}
    ends = np.flatnonzero(np.append(score[1:] != score[:-1], True))  # ties are one point
    ends = ends[positives[ends] + negatives[ends] > 0]  # the first samples may have weight 0
    ends = ends[np.unique(np.linspace(0, len(ends) - 1, MOST_POINTS).astype(int))]
    recall = positives[ends] / positives[-1]
    return {
        "calibration": calibration(label, 1 / (1 + np.exp(-score)), weight),
        "roc": [[0.0, 0.0], *np.stack([negatives[ends] / negatives[-1], recall], 1).tolist()],
        "precision": np.stack([recall, positives[ends] / (positives[ends] + negatives[ends])], 1).tolist(),
    }


def calibration(label: np.ndarray, prediction: np.ndarray, weight: np.ndarray) -> list[list[float]]:
    """Of bins of neighbours (n,), from the lowest predictions on: mean prediction, mean label, number of samples."""
    found = []
    for part in reversed(np.array_split(np.arange(len(label)), min(NUM_BINS, len(label)))):
        if weight[part].sum() > 0:
            means = [float(np.average(values[part], weights=weight[part])) for values in (prediction, label)]
            found.append([*means, len(part)])
    return found
