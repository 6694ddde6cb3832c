"""Columns without a fixed vocabulary in training: as a vocabulary counted before; the same on any number of ranks;
resumed bit for bit."""

import numpy as np
import pytest
import torch
from open_runs import closed, columns, last_evaluation, made
from resumed import whole_and_resumed

from hetmpi.data.tabular.encoder import FIRST_KEY as FIRST_OF_VOCABULARY
from hetmpi.data.tabular.encoder import no_value

pytestmark = pytest.mark.mpi
FEW = columns("rows: open, max_rows: 40, min_count: 2, expire_steps: 8")
# AUC and ids of the run with few rows, the same at any number of ranks; recorded at one.
AUC_OF_FEW, IDS_OF_FEW = 0.7039, (66, 40, 747)


@pytest.fixture
def folder(world, tmp_path):
    """A folder for all ranks."""
    return world.comm.bcast(tmp_path)


def test_rows_are_those_of_a_vocabulary_counted_before(world, folder):
    start = ["table.init_std=0"]  # first values follow from the id in one and from the place in the other
    known = made(folder / "auto", columns("rows: auto", "{name: tags}"), *start)
    coders = known.source.encoder.coders
    known.run()
    by_place, _ = closed(known)
    grown = made(folder / "open", columns("rows: open, max_rows: 900"), *start)
    features = {feature.name: feature.first for feature in known.source.features}
    tables = {feature.name: feature.table for feature in grown.source.features}
    grown.run()
    rows, entries = closed(grown)
    if world.rank > 0:
        return
    assert abs(last_evaluation(folder / "auto")["auc"] - last_evaluation(folder / "open")["auc"]) < 1e-3
    for column in ("user", "tags"):
        place = {value: FIRST_OF_VOCABULARY + i for i, value in enumerate(coders[column].values.tolist())}
        missing = no_value(coders[column].seed)
        ids = [(one, key) for one, key, *_ in entries[tables[column]].tolist() if key > 0 and one != missing]
        assert len(ids) > 10 and {one for one, _ in ids} <= set(place)
        mine = rows[tables[column]][[key for _, key in ids]]
        theirs = by_place["table"][[features[column] + place[one] for one, _ in ids]]
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-5), column


def test_few_rows_give_the_same_on_any_number_of_ranks(world, folder):
    training = made(folder, FEW)
    training.run()
    numbers = training.vocabularies.of_tables["open1"].numbers
    _, entries = closed(training)
    assert numbers.expired > 0 and numbers.admitted <= 40
    if world.rank == 0:
        found = len(entries["open1"]), int(entries["open1"][:, 1].max()), int(entries["open1"][:, 2].sum())
        assert (round(last_evaluation(folder)["auc"], 4), found) == (AUC_OF_FEW, IDS_OF_FEW)


@pytest.mark.parametrize("bound", [0, 10])
def test_a_resumed_training_has_the_same_bits(world, folder, bound):
    cached = ["table.cache.capacity_rows=60", "table.cache.admit=all", "table.batches_per_pull=1"] if bound else []
    settings = [FEW, f"table.staleness={bound}", *cached]
    whole, resumed = whole_and_resumed(made, closed, folder, settings, 40)
    (rows, entries), (again, entries_again) = closed(whole), closed(resumed)
    if world.rank == 0:
        for name in entries:
            assert bound or np.array_equal(entries[name], entries_again[name]), name
    for name in rows if bound == 0 else ():
        assert torch.equal(rows[name], again[name]), name


def test_a_checkpoint_goes_on_with_the_ids_it_had(world, folder):
    first = made(folder, FEW, "steps=20")
    first.run()
    _, before = closed(first)
    second = made(folder, FEW, "steps=20", "resume=auto", "checkpoint.at_end=false")
    _, after = closed(second)
    assert world.rank > 0 or all(np.array_equal(before[name], after[name]) for name in before)
