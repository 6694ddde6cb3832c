"""Expected values of `bench model` for a batch, compared with drawn batches (bench/model.py)."""

import sys

import numpy as np
import pytest
from launch import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import model  # noqa: E402

from hetmpi.data.synthetic import Synthetic  # noqa: E402

SETTINGS = {"scale": 0.002, "zipf": 1.05, "cache": 10.0, "s": 3}


@pytest.mark.parametrize("batch", [16, 500])
def test_expected_keys_of_a_batch_are_those_drawn(batch):
    data, law = Synthetic(0, SETTINGS["scale"], SETTINGS["zipf"], num_valid=1), model.Law(SETTINGS)
    drawn = [len(np.unique(data.train(i * batch, (i + 1) * batch).ids)) for i in range(40)]
    assert law.used(batch).sum() == pytest.approx(np.mean(drawn), rel=0.03)


def test_a_set_that_is_asked_for_more_lines_than_it_has_is_full():
    mean = np.array([2.0, 8.0, 16.0, 60.0])
    drawn = np.random.default_rng(0).poisson(mean, (200_000, 4))
    assert [model.over(8, m) for m in mean] == pytest.approx((drawn >= 8).mean(0), abs=0.005)


def test_without_a_bound_lines_are_not_renewed():
    bounded, unbounded = model.Law(SETTINGS), model.Law({**SETTINGS, "s": None})
    assert unbounded.cached(500, 1000)[0] < bounded.cached(500, 1000)[0]


@pytest.mark.parametrize("wrong", [{"batches": [128]}, {"rate": "fast"}, {"s": 0}, {"cache": 0.0}, {"hosts": [1, 2]}])
def test_settings_by_which_nothing_can_be_measured_are_refused(wrong):
    with pytest.raises(SystemExit, match="bench model: "):
        model.checked_settings({**model.SETTINGS, **wrong})
