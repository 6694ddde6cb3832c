"""TrainedInputs: what the keys and numbers of a trained model stand for, so that it reads other graphs, as those
with nodes that came after its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from hetmpi.data.graph.graph import Graph, offsets_of, smallest_integers
from hetmpi.errors import UserError, one_line


@dataclass
class TrainedInputs:
    """key_hashes (num_rows,) int64, names of numbers and of classes, as in Graph; whether a node has several labels."""

    key_hashes: np.ndarray
    dense_names: list[str]
    class_names: list[str]
    is_multilabel: bool

    def to_arrays(self) -> dict[str, np.ndarray]:
        """For a checkpoint."""
        names = {"dense_names": self.dense_names, "class_names": self.class_names}
        texts = {name: np.frombuffer("\0".join(values).encode(), np.uint8) for name, values in names.items()}
        is_multilabel = np.array([self.is_multilabel], np.uint8)
        return {"key_hashes": np.ascontiguousarray(self.key_hashes), **texts, "is_multilabel": is_multilabel}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], num_rows: int) -> TrainedInputs:
        """Those of to_arrays(). Raises UserError, KeyError or ValueError for other arrays."""
        hashes = arrays["key_hashes"]
        if hashes.dtype != np.int64 or hashes.shape != (num_rows,):
            raise UserError(f"key_hashes must be int64 of shape ({num_rows},), got {hashes.dtype} {hashes.shape}")
        texts = [arrays[name].tobytes().decode() for name in ("dense_names", "class_names")]
        names = (text.split("\0") if text else [] for text in texts)
        return cls(hashes, *names, arrays["is_multilabel"].tolist() == [1])

    def of(self, graph: Graph) -> tuple[Graph, int]:
        """A graph with the keys and numbers of the model, and the number of keys that it lacks, which are left out.
        Raises UserError for other numbers or labels."""
        if graph.key_hashes is None:
            raise UserError("new_nodes=true needs tables of nodes and edges, whose ids and words have names")
        if sorted(graph.dense_names) != sorted(self.dense_names):
            there, needed = (one_line(", ".join(names)) or "none" for names in (graph.dense_names, self.dense_names))
            raise UserError(f"the model was trained with the numbers {needed}, the nodes have {there}")
        if (graph.labels.ndim == 2) != self.is_multilabel:
            kinds = {True: "several labels", False: "one class"}
            trained, given = kinds[self.is_multilabel], kinds[not self.is_multilabel]
            raise UserError(f"the model was trained with {trained} per node, the nodes have {given}: give the same")
        order = np.argsort(self.key_hashes, kind="stable")
        places = np.minimum(np.searchsorted(self.key_hashes, graph.key_hashes, sorter=order), len(order) - 1)
        is_trained = self.key_hashes[order[places]] == graph.key_hashes
        is_there = is_trained[graph.ids]
        owners = np.repeat(np.arange(graph.num_nodes), np.diff(graph.id_offsets))[is_there]
        keys = order[places][graph.ids[is_there]].astype(smallest_integers(len(order)))
        columns = [graph.dense_names.index(name) for name in self.dense_names]
        found = replace(
            graph,
            ids=keys,
            id_offsets=offsets_of(np.bincount(owners, minlength=graph.num_nodes)),
            field_rows=[len(order)],
            dense=np.ascontiguousarray(graph.dense[:, columns]),
            key_hashes=self.key_hashes,
        )
        return found, int((~is_trained).sum())
