"""How many values of the columns an encoder knows: rows of other data, or with columns without values, give predictions
that say little."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hetmpi.data.batch import Samples
from hetmpi.data.tabular.convert import NO_INTEGER, no_value
from hetmpi.data.tabular.encoder import MISSING_KEY, UNSEEN_KEY, VOCABULARY, Encoder
from hetmpi.data.tabular.reading import INTEGER
from hetmpi.data.tabular.rules import NUMBER

MOST = 0.5  # share of unseen values beyond which a column has a remark


class Coverage:
    """Counts of rows and values.

    counts  (C + 1, 2) int64: values, and those of a vocabulary that were not seen in training, of each column; last the
            rows"""

    def __init__(self, encoder: Encoder):
        self._encoder = encoder
        self.counts = np.zeros((len(encoder.columns) + 1, 2), np.int64)

    def add(self, table: pa.Table, samples: Samples) -> None:
        """Counts rows of Reading.schema() and their samples."""
        for i, column in enumerate(self._encoder.reading.columns):
            array = table.column(f"c{i}").combine_chunks()
            if column.is_list:
                self.counts[i, 0] += pc.sum(pc.list_value_length(array)).as_py() or 0
            elif column.as_ == NUMBER:
                self.counts[i, 0] += np.count_nonzero(~np.isnan(array.to_numpy()))
            else:
                none = NO_INTEGER if column.as_ == INTEGER else no_value(column.seed)
                self.counts[i, 0] += np.count_nonzero(array.to_numpy() != none)
        unseen = unseen_of(self._encoder, samples)
        self.counts[:-1, 1] += [unseen.get(column.name, (0, 0))[0] for column in self._encoder.columns]
        self.counts[-1] += len(table)

    def remarks(self) -> list[str]:
        """A sentence for each column without values, or of mostly unseen ones."""
        *counts, (num_rows, _) = self.counts.tolist()
        found = []
        for column, (num, unseen) in zip(self._encoder.columns, counts):
            if num_rows and not num:
                found.append(f"column {column.name} has no value in any row")
            elif unseen > MOST * num:
                found.append(f"column {column.name}: {unseen_text(unseen, num, column.min_count, 'values')}")
        return found


def unseen_of(encoder: Encoder, samples: Samples) -> dict[str, tuple[int, int]]:
    """Column with a vocabulary -> how many of its values in samples were not seen in training, and how many it has."""
    found, keys = {}, keys_of(encoder, samples)
    for feature in encoder.features:
        if encoder.mode(feature.name) == VOCABULARY:
            of_feature = keys[feature.name] - feature.first
            num = np.count_nonzero(of_feature != MISSING_KEY)
            found[feature.name] = int(np.count_nonzero(of_feature == UNSEEN_KEY)), int(num)
    return found


def keys_of(encoder: Encoder, samples: Samples) -> Mapping[str, np.ndarray]:
    """Feature -> its keys in samples."""
    single = [feature.name for feature in encoder.features if feature.pool is None]
    pooled = [feature.name for feature in encoder.features if feature.pool is not None]
    return {
        **{name: samples.ids[:, j] for j, name in enumerate(single)},
        **{name: bag.values for name, bag in zip(pooled, samples.bags)},
    }


def unseen_text(unseen: int, num: int, min_count: int, of: str) -> str:
    """unseen of num values, as a remark. min_count: of the column's vocabulary."""
    times = f" {min_count} times" if min_count > 1 else ""
    return f"{100 * unseen / num:.0f} % of the {of} were not seen{times} in training"
