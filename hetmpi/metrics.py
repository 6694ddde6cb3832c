"""AUC, log loss, calibration, RMSE, accuracy and F1 of held-out predictions, on numpy arrays of one process."""

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


def grouped_auc(label: np.ndarray, score: np.ndarray, group: np.ndarray) -> float:
    """The mean of auc() over groups of samples, each weighted by its size (Zhou et al., KDD 2018); groups of one class
    are left out. group (n,): equal for the samples of a group, such as a user's. nan if no group has both classes or if
    a score is NaN. Raises as auc()."""
    positive = _positive("grouped_auc", label, score)
    if not len(group) or np.isnan(score).any():
        return float("nan")
    order = np.lexsort((score, group))
    positive, score, group = positive[order].astype(np.int64), score[order], group[order]
    is_first = np.concatenate([[True], group[1:] != group[:-1]])
    ties = np.flatnonzero(is_first | np.concatenate([[True], score[1:] != score[:-1]]))
    groups = np.searchsorted(ties, np.flatnonzero(is_first))  # of ties, the first of each group
    positives = np.add.reduceat(positive, ties)
    negatives = np.diff(ties, append=len(score)) - positives
    of_group = [np.add.reduceat(counts, groups) for counts in (positives, negatives)]
    before = np.cumsum(negatives) - negatives  # in all groups
    below = before - np.repeat(before[groups], np.diff(groups, append=len(ties)))
    half_pairs = np.add.reduceat(positives * (2 * below + negatives), groups)
    num_pairs, sizes = of_group[0] * of_group[1], of_group[0] + of_group[1]
    counted = num_pairs > 0
    if not counted.any():
        return float("nan")
    return float(np.average(half_pairs[counted] / (2 * num_pairs[counted]), weights=sizes[counted]))


def without_auc(label: np.ndarray, score: np.ndarray) -> str | None:
    """Reason why auc(label, score) is nan, in a few words; None if it is a number."""
    if label.size == 0:
        return "there are no held-out samples"
    if np.isnan(score).any():
        return f"{int(np.isnan(score).sum()):,} of {score.size:,} predictions are NaN"
    if label.min() == label.max() and label[0] in (0, 1):
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


def normalised_entropy(label: np.ndarray, logit: np.ndarray) -> float:
    """log_loss over that of a prediction that is always the share of label 1 (He et al., ADKDD 2014): below 1 the model
    knows more. nan also if all labels are equal. Raises as log_loss()."""
    share = float(np.mean(label)) if label.size else 0.0
    if share in (0.0, 1.0):
        return float("nan")
    return log_loss(label, logit) / -(share * np.log(share) + (1 - share) * np.log1p(-share))


def calibration(label: np.ndarray, logit: np.ndarray) -> float:
    """The mean predicted probability over the share of label 1: 1 is right, above 1 too much is predicted. label (n,)
    in {0, 1}; logit (n,). nan without positive labels or if a logit is NaN. Raises as log_loss()."""
    positive = _positive("calibration", label, logit)
    if not positive.any() or np.isnan(logit).any():
        return float("nan")
    return float(np.exp(-np.logaddexp(0.0, -logit.astype(np.float64))).mean() / positive.mean())


def soft_auc(label: np.ndarray, score: np.ndarray, weight: np.ndarray) -> float:
    """auc() of samples that count as `label` positive and 1 - `label` negative ones, times `weight`. label (n,) in
    [0, 1]; score, weight (n,), weights at least 0. nan as auc()."""
    return soft_grouped_auc(label, score, weight, np.zeros(len(label), np.int64))


def soft_grouped_auc(label: np.ndarray, score: np.ndarray, weight: np.ndarray, group: np.ndarray) -> float:
    """grouped_auc() of samples that count as in soft_auc(); the size of a group is the sum of its weights."""
    if not len(label) or np.isnan(score).any():
        return float("nan")
    order = np.lexsort((score, group))
    score, group, weight = score[order], group[order], weight[order].astype(np.float64)
    is_first = np.concatenate([[True], group[1:] != group[:-1]])
    firsts = np.flatnonzero(is_first)
    ties = np.flatnonzero(is_first | np.concatenate([[True], score[1:] != score[:-1]]))
    groups = np.searchsorted(ties, firsts)  # of ties, the first of each group
    positives, negatives = (np.add.reduceat(weight * part, ties) for part in (label[order], 1.0 - label[order]))
    of_group = [np.add.reduceat(sums, groups) for sums in (positives, negatives)]
    before = np.cumsum(negatives) - negatives  # in all groups
    below = before - np.repeat(before[groups], np.diff(groups, append=len(ties)))
    pairs = np.add.reduceat(positives * (below + negatives / 2), groups)
    num_pairs, sizes = of_group[0] * of_group[1], np.add.reduceat(weight, firsts)
    counted = num_pairs > 0
    if not counted.any():
        return float("nan")
    return float(np.average(pairs[counted] / num_pairs[counted], weights=sizes[counted]))


def soft_log_loss(label: np.ndarray, logit: np.ndarray, weight: np.ndarray) -> float:
    """log_loss() of labels (n,) in [0, 1], a mean weighted by weight (n,). nan also if all weights are 0."""
    logit = logit.astype(np.float64)
    return weighted_mean(np.logaddexp(0.0, logit) - label * logit, weight)


def soft_normalised_entropy(label: np.ndarray, logit: np.ndarray, weight: np.ndarray) -> float:
    """normalised_entropy() of labels (n,) in [0, 1], weighted by weight (n,)."""
    share = weighted_mean(label, weight)
    if not 0.0 < share < 1.0:
        return float("nan")
    entropy = -(share * np.log(share) + (1 - share) * np.log1p(-share))
    return float(soft_log_loss(label, logit, weight) / entropy)


def soft_calibration(label: np.ndarray, logit: np.ndarray, weight: np.ndarray) -> float:
    """calibration() of labels (n,) in [0, 1], weighted by weight (n,)."""
    share = weighted_mean(label, weight)
    if not share > 0:
        return float("nan")
    return weighted_mean(np.exp(-np.logaddexp(0.0, -logit.astype(np.float64))), weight) / share


def weighted_mean(values: np.ndarray, weight: np.ndarray) -> float:
    """Of values (n,) with weights (n,), summed in float64; nan if all weights are 0."""
    total = weight.sum(dtype=np.float64)
    return float((values.astype(np.float64) * weight).sum() / total) if total > 0 else float("nan")


def class_log_loss(label: np.ndarray, logit: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Mean cross entropy in nats of classes label (n,) int64 by logits (n, C), summed in float64, weighted by weight
    (n,). nan without samples."""
    if not len(label):
        return float("nan")
    of_class = log_softmax(logit)[np.arange(len(label)), label]
    return weighted_mean(-of_class, np.ones(len(label)) if weight is None else weight)


def macro_auc(label: np.ndarray, logit: np.ndarray, weight: np.ndarray | None = None) -> float:
    """The mean of the AUC of each class against all others, by its probability, over the classes that some samples have
    and others have not. label (n,) int64, logit (n, C), weight (n,). nan if there is no such class."""
    probability, found = np.exp(log_softmax(logit)), []
    for number in range(logit.shape[1]):
        is_class = (label == number).astype(np.float32)
        own = probability[:, number]
        value = auc(is_class, own) if weight is None else soft_auc(is_class, own, weight)
        found += [] if np.isnan(value) else [value]
    return float(np.mean(found)) if found else float("nan")


def log_softmax(logit: np.ndarray) -> np.ndarray:
    """Logarithms of the probabilities of logits (n, C), (n, C) float64."""
    logit = logit.astype(np.float64)
    logit = logit - logit.max(1, keepdims=True, initial=-np.inf)
    return logit - np.log(np.exp(logit).sum(1, keepdims=True))


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


def rmse(label: np.ndarray, prediction: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Square root of the mean squared difference, summed in float64. label, prediction, weight (n,). nan without
    samples."""
    if label.shape != prediction.shape:
        raise ValueError(f"rmse: label and prediction must have one shape, got {label.shape} and {prediction.shape}")
    difference = label.astype(np.float64) - prediction
    if weight is not None:
        return float(np.sqrt(weighted_mean(np.square(difference), weight)))
    return float(np.sqrt(np.mean(np.square(difference)))) if len(label) else float("nan")


def mae(label: np.ndarray, prediction: np.ndarray, weight: np.ndarray | None = None) -> float:
    """Mean absolute difference, summed in float64. label, prediction, weight (n,). nan without samples."""
    if label.shape != prediction.shape:
        raise ValueError(f"mae: label and prediction must have one shape, got {label.shape} and {prediction.shape}")
    difference = np.abs(label.astype(np.float64) - prediction)
    if weight is not None:
        return weighted_mean(difference, weight)
    return float(np.mean(difference)) if len(label) else float("nan")


def accuracy(label: np.ndarray, predicted: np.ndarray, weight: np.ndarray | None = None) -> float | None:
    """The share of samples whose class is predicted. label, predicted (n,) int64; weight (n,). None without samples."""
    if weight is not None:
        return weighted_mean(label == predicted, weight)
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
