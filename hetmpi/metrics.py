"""AUC, log loss, RMSE, accuracy and F1 of held-out predictions, on numpy arrays of one process."""

from __future__ import annotations

import numpy as np


def auc(label: np.ndarray, score: np.ndarray) -> float:
    """Area under the ROC curve: the share of (positive, negative) pairs that score orders correctly; a tie counts half.

    Exact: pairs are counted in integers. label (n,) in {0, 1}; score (n,), any increasing function of the probability.
    Returns nan if there is no pair (no sample, or one class only) or if a score is NaN. Raises ValueError if the shapes
    differ or a label is neither 0 nor 1.
    """
    positive = _positive("auc", label, score)
    num_positive = int(positive.sum())
    num_pairs = num_positive * (positive.size - num_positive)
    if num_pairs == 0 or np.isnan(score).any():
        return float("nan")
    order = np.argsort(score)
    ordered = score[order]
    first_of_tie = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))  # (distinct scores,) int64
    positives = np.add.reduceat(positive[order].astype(np.int64), first_of_tie)
    negatives = np.diff(first_of_tie, append=positive.size) - positives
    negatives_below = np.cumsum(negatives) - negatives
    half_pairs = int((positives * (2 * negatives_below + negatives)).sum())
    return half_pairs / (2 * num_pairs)


def without_auc(label: np.ndarray, score: np.ndarray) -> str | None:
    """Reason why auc(label, score) is nan, in a few words; None if it is a number."""
    if label.size == 0:
        return "there are no held-out samples"
    if np.isnan(score).any():
        return f"{int(np.isnan(score).sum()):,} of {score.size:,} predictions are NaN"
    if label.min() == label.max():
        return f"all {label.size:,} held-out samples have the label {label[0]:g}, both labels are needed"
    return None


def log_loss(label: np.ndarray, logit: np.ndarray) -> float:
    """Mean binary cross-entropy in nats, from logits: finite for any finite logit, summed in float64.

    label (n,) in {0, 1}; logit (n,). Returns nan without samples or if a logit is NaN; a single class is valid. Raises
    ValueError if the shapes differ or a label is neither 0 nor 1.
    """
    positive = _positive("log_loss", label, logit)
    if positive.size == 0 or np.isnan(logit).any():
        return float("nan")
    logit = logit.astype(np.float64)
    return float(np.logaddexp(0.0, np.where(positive, -logit, logit)).mean())


def _positive(caller: str, label: np.ndarray, prediction: np.ndarray) -> np.ndarray:
    """Mask of positive samples, (n,) bool. Raises ValueError for invalid labels or shapes."""
    if label.ndim != 1 or label.shape != prediction.shape:
        raise ValueError(
            f"{caller}: labels and predictions must both be (n,), got {label.shape} and {prediction.shape}"
        )
    positive = label == 1
    is_label = positive | (label == 0)
    if not is_label.all():
        raise ValueError(f"{caller}: labels must be 0 or 1, got {label[~is_label][0]}")
    return positive


def rmse(label: np.ndarray, prediction: np.ndarray) -> float:
    """Square root of the mean squared difference, summed in float64. label, prediction (n,). nan without samples."""
    if label.shape != prediction.shape:
        raise ValueError(f"rmse: label and prediction must have one shape, got {label.shape} and {prediction.shape}")
    difference = label.astype(np.float64) - prediction
    return float(np.sqrt(np.mean(np.square(difference)))) if len(label) else float("nan")


def accuracy(label: np.ndarray, predicted: np.ndarray) -> float | None:
    """The share of samples whose class is predicted. label, predicted (n,) int64. None without samples."""
    return float(np.mean(label == predicted)) if len(label) else None


def micro_f1(label: np.ndarray, predicted: np.ndarray) -> float | None:
    """F1, 2 TP / (2 TP + FP + FN), of all classes together. label, predicted (n, C) bool. None if no class occurs."""
    hits, total = (counts.sum() for counts in _hits_and_total(label, predicted))
    return float(2 * hits / total) if total else None


def macro_f1(label: np.ndarray, predicted: np.ndarray) -> float | None:
    """The mean of F1 over the classes that occur as label or prediction. label, predicted (n,) int64, or (n, C) bool.
    None if none does."""
    hits, total = _hits_and_total(label, predicted)
    occurs = total > 0
    return float(np.mean(2 * hits[occurs] / total[occurs])) if occurs.any() else None


def _hits_and_total(label: np.ndarray, predicted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each class TP, and 2 TP + FP + FN, the number of labels and predictions together."""
    if label.ndim == 2:
        return (label & predicted).sum(0), label.sum(0) + predicted.sum(0)
    num = max(label.max(), predicted.max()) + 1 if len(label) else 0
    hits = np.bincount(label[label == predicted], minlength=num)
    return hits, np.bincount(label, minlength=num) + np.bincount(predicted, minlength=num)
