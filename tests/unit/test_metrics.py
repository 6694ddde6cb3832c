"""AUC and log loss against obvious implementations of their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetmpi.metrics import (
    auc,
    calibration,
    grouped_auc,
    log_loss,
    mae,
    normalised_entropy,
    rmse,
    soft_auc,
    soft_calibration,
    soft_grouped_auc,
    soft_log_loss,
    soft_normalised_entropy,
    without_auc,
)
from hetmpi.tasks.curves import curves

SAMPLES = st.lists(st.tuples(st.booleans(), st.integers(-4, 4)), max_size=40)  # few scores: many ties


def pairwise_auc(label, score):
    """The definition, pair by pair: O(n^2)."""
    positives = [s for y, s in zip(label, score) if y == 1]
    negatives = [s for y, s in zip(label, score) if y == 0]
    points = [1.0 if p > n else 0.5 if p == n else 0.0 for p in positives for n in negatives]
    return sum(points) / len(points) if points else math.nan


def columns(samples, dtype=np.float32):
    """Label and score (n,) of [(label, score), …]."""
    return np.array([y for y, _ in samples], dtype), np.array([s for _, s in samples], dtype)


@given(SAMPLES)
def test_auc_is_the_share_of_pairs_ranked_rightly(samples):
    label, score = columns(samples)
    np.testing.assert_equal(auc(label, score), pairwise_auc(label, score))


@given(SAMPLES)
def test_auc_depends_on_the_order_of_scores_alone(samples):
    label, score = columns(samples, np.float64)
    np.testing.assert_equal(auc(label, np.exp(score)), auc(label, score))


@given(SAMPLES, st.randoms(use_true_random=False))
def test_grouped_auc_is_the_mean_over_groups_of_both_classes_by_their_sizes(samples, random):
    label, score = columns(samples)
    group = np.array([random.randint(-2, 2) for _ in samples], np.int64)
    total = weight = 0.0
    for one in np.unique(group):
        found = pairwise_auc(label[group == one], score[group == one])
        if not math.isnan(found):
            total, weight = total + found * (group == one).sum(), weight + (group == one).sum()
    expected = total / weight if weight else math.nan
    np.testing.assert_allclose(grouped_auc(label, score, group), expected, rtol=1e-12)


def test_grouped_auc_with_nan_is_nan():
    assert math.isnan(grouped_auc(np.array([0.0, 1.0, 1.0]), np.array([0.0, np.nan, 1.0]), np.array([1, 1, 2])))


def test_calibration_and_normalised_entropy_of_the_share_of_label_1_are_1():
    label = np.array([1, 0, 0, 0], np.float32)
    always = np.full(4, np.log(0.25 / 0.75), np.float32)
    assert calibration(label, always) == pytest.approx(1, abs=1e-7)
    assert normalised_entropy(label, always) == pytest.approx(1, abs=1e-7)
    assert calibration(label, np.zeros(4, np.float32)) == 2 and normalised_entropy(label, 9 * label - 4) < 0.1
    assert calibration(label, np.full(4, -1e6, np.float32)) == 0
    assert math.isnan(calibration(0 * label, always)) and math.isnan(normalised_entropy(0 * label, always))
    assert math.isnan(calibration(label, always * np.nan)) and math.isnan(normalised_entropy(label[:0], always[:0]))


def test_mae_is_the_mean_of_absolute_differences():
    assert mae(np.array([1.0, 2.0], np.float32), np.array([3.0, 1.0], np.float32)) == 1.5
    assert math.isnan(mae(np.empty(0), np.empty(0)))


def test_auc_of_a_large_sample_without_ties_equals_the_rank_formula():
    rng = np.random.default_rng(0)
    label, score = (rng.random(200_000) < 0.25).astype(np.float32), rng.permutation(200_000).astype(np.float64)
    positives = label.sum(dtype=np.int64)
    rank_sum = (score[label == 1] + 1).sum()
    expected = (rank_sum - positives * (positives + 1) / 2) / (positives * (label.size - positives))
    assert auc(label, score) == pytest.approx(expected, abs=1e-14)


def test_auc_ranks_infinite_scores():
    assert auc(np.array([0.0, 1.0, 1.0]), np.array([-np.inf, np.inf, np.inf])) == 1.0


@pytest.mark.parametrize("label, score", [([], []), ([1, 1], [0, 1]), ([0, 0], [0, 1]), ([0, 1, 1], [0, np.nan, 1])])
def test_auc_without_a_pair_or_with_nan_is_nan(label, score):
    assert math.isnan(auc(np.array(label), np.array(score, np.float32)))


@given(st.lists(st.tuples(st.booleans(), st.floats(-30, 30, width=32)), min_size=1, max_size=40))
def test_log_loss_is_the_mean_of_minus_log_probabilities(samples):
    label, logit = columns(samples)
    probability = [1 / (1 + math.exp(-float(z))) if y else 1 / (1 + math.exp(float(z))) for y, z in zip(label, logit)]
    expected = np.mean([-math.log(p) for p in probability])
    assert log_loss(label, logit) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_log_loss_of_a_confident_error_is_its_logit():
    assert log_loss(np.array([0.0, 1.0]), np.array([1e4, -1e4], np.float32)) == 1e4


def test_log_loss_of_certainty_is_zero_when_right_and_infinite_when_wrong():
    certain = np.array([np.inf, -np.inf])
    assert log_loss(np.array([1.0, 0.0]), certain) == 0.0
    assert log_loss(np.array([0.0, 1.0]), certain) == math.inf


def test_log_loss_of_one_class_is_defined():
    assert log_loss(np.ones(3), np.zeros(3)) == pytest.approx(math.log(2))


@pytest.mark.parametrize("label, logit", [([], []), ([0, 1], [0, np.nan])])
def test_log_loss_of_nothing_or_with_nan_is_nan(label, logit):
    assert math.isnan(log_loss(np.array(label), np.array(logit, np.float32)))


@pytest.mark.parametrize("metric", [auc, log_loss])
def test_what_is_no_label_is_refused(metric):
    with pytest.raises(ValueError, match=f"{metric.__name__}: labels must be 0 or 1, got 0.5"):
        metric(np.array([0.0, 0.5]), np.zeros(2))


@pytest.mark.parametrize("metric", [auc, log_loss])
def test_labels_and_predictions_of_different_length_are_refused(metric):
    with pytest.raises(ValueError, match=r"must both be \(n,\), got \(2,\) and \(3,\)"):
        metric(np.zeros(2), np.zeros(3))


@pytest.mark.parametrize(
    "label, score, reason",
    [
        ([], [], "there are no held-out samples"),
        ([1, 1], [0.1, 0.2], "all 2 held-out samples have the label 1, both labels are needed"),
        ([0, 1], [0.1, np.nan], "1 of 2 predictions are NaN"),
        ([0, 1], [0.1, 0.2], None),
    ],
)
def test_what_is_in_the_way_of_an_auc_is_said(label, score, reason):
    arrays = np.array(label, np.float32), np.array(score, np.float32)
    assert without_auc(*arrays) == reason and np.isnan(auc(*arrays)) == (reason is not None)


# Label in quarters, score, weight and group.
SOFT = st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 3), st.integers(0, 3), st.integers(0, 2)), max_size=30)
TWINS = [(soft_auc, auc), (soft_log_loss, log_loss), (soft_normalised_entropy, normalised_entropy),
         (soft_calibration, calibration)]  # fmt: skip


@given(SOFT)
def test_soft_labels_and_weights_are_as_copies_of_samples_with_labels_0_and_1(samples):
    quarters, score, weight, group = (np.array(column, np.float64) for column in list(zip(*samples)) or [[]] * 4)
    hard = [(y, s, g) for q, s, w, g in samples for y in [1] * q * w + [0] * (4 - q) * w]
    label, scores, groups = (np.array(column, np.float64) for column in list(zip(*hard)) or [[]] * 3)
    for soft, exact in TWINS:
        np.testing.assert_allclose(soft(quarters / 4, score, weight), exact(label, scores), rtol=1e-9)
    expected = grouped_auc(label, scores, groups)
    np.testing.assert_allclose(soft_grouped_auc(quarters / 4, score, weight, group), expected, rtol=1e-9)
    copies = np.repeat(np.arange(len(score)), weight.astype(int))
    for metric in (rmse, mae):
        expected = metric(quarters[copies], score[copies])
        np.testing.assert_allclose(metric(quarters, score, weight), expected, rtol=1e-9)


@pytest.mark.parametrize("num", [2, 40, 5000])
@pytest.mark.parametrize("ties", [False, True])
def test_the_curves_of_predictions_have_their_auc_and_calibration(num, ties):
    random = np.random.default_rng(num)
    logit = random.normal(size=num).astype(np.float32)
    logit = np.round(logit) if ties else logit
    label = (random.random(num) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    label[:2] = 0, 1
    found = curves(label, logit)
    false, true = np.array(found["roc"]).T
    assert abs(np.trapezoid(true, false) - auc(label, logit)) < 1e-3 * (num > 100) + 1e-9
    assert found["roc"][0] == [0, 0] and found["roc"][-1] == [1, 1] and len(found["roc"]) <= 101
    mean, share, count = np.array(found["calibration"]).T
    assert count.sum() == num and np.average(share, weights=count) == pytest.approx(label.mean())
    assert (np.diff(mean) >= 0).all() and np.average(mean, weights=count) == pytest.approx(
        (1 / (1 + np.exp(-logit))).mean()
    )
    assert found["precision"][-1] == pytest.approx([1, label.mean()])


def test_weights_count_in_curves_and_one_label_has_none():
    label, logit = np.array([0, 1, 1.0]), np.array([0.0, 1, 2])
    weighted = curves(label, logit, np.array([1, 2, 1.0]))
    assert weighted == {
        **curves(np.array([0, 1, 1, 1.0]), np.array([0.0, 1, 1, 2])),
        "calibration": weighted["calibration"],
    }
    assert curves(np.ones(3), logit) == curves(np.empty(0), np.empty(0)) == {}
    assert curves(label, np.array([0, np.nan, 1])) == {}


def test_curves_begin_at_the_first_sample_with_a_weight():
    label, logit, weight = np.array([0, 1, 0, 1.0]), np.array([3.0, 2, 1, 4]), np.array([0, 1, 2, 0.0])
    assert curves(label, logit, weight) == curves(label[1:3], logit[1:3], weight[1:3])
