"""GraphData: what all sources of graphs share: preparation by one rank, batches of sampled neighbourhoods, inputs and
neighbours of nodes."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from hetmpi import _C
from hetmpi.data.batch import Bag
from hetmpi.data.files import absolute
from hetmpi.data.graph.graph import TEST, TRAIN, VALID, Graph, check_graph
from hetmpi.data.graph.metis import renumbered
from hetmpi.data.graph.prepared import VERSION, is_complete, open_graph, write_graph
from hetmpi.data.graph.samples import Block, NodeSamples
from hetmpi.data.graph.trained_inputs import TrainedInputs
from hetmpi.data.graph.weighted_sampler import WeightedSampler
from hetmpi.data.source import check_slice
from hetmpi.errors import LARGEST, UserError, check_integer

MOST_HOPS, MOST_FANOUT = 16, 1 << 16
CACHED_EPOCHS = 4  # orders of the training nodes, 8 bytes a node
TRAIN_STREAM, VALID_STREAM = 0, 1  # of draws
VALID_SEED = 2022  # of the order of held-out nodes, the same in all runs


class GraphData:
    """Nodes of a graph with a label each, read with sampled neighbours.

    A sample is a head: a node whose label is predicted. Its neighbours, theirs, and so on are drawn anew at each
    position of the stream (cpp/graph/sampler.h). Epoch e visits the training nodes in an order drawn from (seed, e).
    Held-out heads are the valid nodes, or the test nodes if there are none, in an order of their own.

    Call `prepare` first: it sets num_nodes, num_classes, num_dense, is_multilabel, num_rows, field_rows, max_ids,
    labels, split, class_names, digests, num_train and num_valid as hetmpi/tasks/node.py, GraphSource, needs them."""

    name = "graph"
    is_valid_random = True

    def __init__(
        self,
        seed: int,
        fanout: Sequence[int],
        replace: bool,
        partition: str | None,
        batch_size: int,
        table_partition: str,
        cache: str | None,
    ):
        """fanout: neighbours drawn per node, of each hop from the heads outwards. replace: draws with replacement.
        partition: metis renumbers nodes and keys (hetmpi/data/graph/metis.py), and of a global batch each rank gets
        heads of its own part, if ranks take slices of batch_size; this needs the table's partition to be range. cache:
        folder for prepared graphs, default prepared/. Raises UserError for invalid values."""
        check_integer("data.seed", seed, -LARGEST - 1)
        if isinstance(fanout, str) or not isinstance(fanout, Sequence) or not 1 <= len(fanout) <= MOST_HOPS:
            raise UserError(
                f"data.fanout must be a list of 1 to {MOST_HOPS} integers, one per layer, as in [10,10], got {fanout}"
            )
        for number in fanout:
            check_integer("each of data.fanout", number, 1, MOST_FANOUT)
        check_flag("replace", replace)
        self.seed, self.fanout, self.replace = seed & 0xFFFFFFFFFFFFFFFF, [int(number) for number in fanout], replace
        if partition not in (None, "metis"):
            raise UserError(f"data.partition must be metis or null, got {partition}")
        if partition is not None and table_partition != "range":
            raise UserError(
                f"data.partition={partition} gives neighbouring nodes neighbouring keys, which needs "
                f"table.partition=range, got {table_partition}"
            )
        check_integer("batch_size", batch_size, 1)
        self.partition, self.batch_size, self.cache = partition, batch_size, cache
        self.remarks: list[str] = []  # lines about choices made while reading

    # A kind of data implements these two.

    def identity(self) -> tuple:
        """All that the prepared graph depends on; the first entry names it. Other identities have other folders."""
        raise NotImplementedError

    def read(self) -> Graph:
        """The graph. Raises UserError."""
        raise NotImplementedError

    # Source.

    def prepare(self, rank: int, size: int, barrier: Callable[[], None], report: Callable[[str], None] = print) -> None:
        """Rank 0 prepares the graph if it is not there yet; all ranks open it. Collective.

        barrier: waits for all ranks. report: prints a line, called on rank 0. Raises UserError, on the rank that
        detects it, for data that cannot be read."""
        folder = self._folder()
        if rank == 0 and not is_complete(folder):
            graph = self.read()
            check_graph(graph, self.name)
            graph = graph if self.partition is None else renumbered(graph)
            write_graph(graph, folder)
            report(f"{described(graph, str(self.identity()[0]))}; prepared in {folder}")
            for line in self.remarks:
                report(f"hetmpi: {line}")
        barrier()
        self._open(open_graph(folder, rank, size), 1 if self.partition is None else size)

    def train(self, start: int, stop: int) -> NodeSamples:
        """Positions [start, stop) of the endless training stream, epoch after epoch."""
        check_slice(start, stop, None)
        positions = np.arange(start, stop)
        drawn_at = positions
        if self.num_train < _C.SAMPLE_WINDOW:  # a node is drawn anew in each epoch
            drawn_at = positions // self.num_train * _C.SAMPLE_WINDOW
        return self._samples(self._heads(positions), drawn_at, TRAIN_STREAM)

    def valid(self, start: int, stop: int) -> NodeSamples:
        """Held-out heads [start, stop), with draws of their own that are the same at every call."""
        check_slice(start, stop, self.num_valid)
        return self._samples(self._valid_nodes[start:stop], np.arange(start, stop), VALID_STREAM)

    # Nodes.

    def inputs(self, nodes: np.ndarray) -> tuple[Bag, np.ndarray]:
        """The ids of nodes (n,) int64, as keys, and their numbers (n, num_dense) float32. Thread-safe."""
        offsets, values = _C.lists_of(self._graph.id_offsets, self._graph.ids, nodes)
        return Bag(values, offsets), self._graph.dense[nodes]

    def edge_weights(self, first: int, last: int) -> np.ndarray | None:
        """The weights (e,) float32 of neighbours(first, last); None if all are 1."""
        if self._graph.weights is None:
            return None
        return self._graph.weights[self._graph.indptr[first] : self._graph.indptr[last]]

    def neighbours(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """All neighbours of nodes [first, last): offsets (last - first + 1,) int64 from 0, nodes (e,) int64."""
        ends = self._graph.indptr[first : last + 1]
        return ends - ends[0], self._graph.indices[ends[0] : ends[-1]].astype(np.int64)

    @property
    def trained_inputs(self) -> TrainedInputs | None:
        """What the keys and numbers of a model of this graph stand for, for other graphs; None if that is unknown."""
        graph = self._graph
        if graph.key_hashes is None:
            return None
        return TrainedInputs(graph.key_hashes, graph.dense_names, graph.class_names, graph.labels.ndim == 2)

    def take_inputs(self, trained: TrainedInputs) -> tuple[int, int]:
        """Gives the nodes the keys and numbers of a model that was trained on another graph. Returns the numbers of
        nodes without a key, and of keys that the model lacks. Raises UserError for other numbers or labels."""
        self.field_rows_of_files = self._graph.field_rows
        graph, num_unknown = trained.of(self._graph)
        self._open(graph, 1)
        return int((np.diff(graph.id_offsets) == 0).sum()), num_unknown

    def names(self, nodes: np.ndarray) -> np.ndarray:
        """The user's ids of nodes (n,) int64: (n,) int64 or texts."""
        return self._graph.names[nodes]

    def _folder(self) -> str:
        identity = (*self.identity(), self.partition)
        name = re.sub(r"[^\w.-]", "_", os.path.basename(str(identity[0])))[:60]
        digest = xxhash.xxh3_64_hexdigest(repr((VERSION, type(self).__name__, identity)).encode())
        return absolute(os.path.join(self.cache or "prepared", f"{name}-{digest}"), "data.cache")

    def _open(self, graph: Graph, num_slices: int):
        """num_slices: of a global batch, with heads of their own."""
        self._graph, self.num_nodes = graph, graph.num_nodes
        self._weighted = None
        if graph.weights is not None:
            self._weighted = WeightedSampler(graph, self.fanout, self.replace, self.seed)
        self.num_rows, self.field_rows = graph.num_rows, graph.field_rows
        self.labels, self.split, self.class_names = graph.labels, graph.split, graph.class_names
        self.digests = self.contents = graph.digests
        self.num_classes, self.num_dense = graph.num_classes, graph.dense.shape[1]
        self.is_multilabel = graph.labels.ndim == 2
        self.max_ids = int(np.diff(graph.id_offsets).max())
        heads = np.flatnonzero(graph.split == TRAIN)
        held_out = np.flatnonzero(graph.split == VALID)
        if not len(held_out):
            held_out = np.flatnonzero(graph.split == TEST)
        self.num_train, self.num_valid = len(heads), len(held_out)
        if num_slices > self.num_train:
            raise UserError(
                f"data.partition={self.partition} needs a training node for each of the {num_slices:,} ranks, there "
                f"are {self.num_train:,}: use fewer ranks, or leave data.partition out"
            )
        self._train_nodes = np.array_split(heads, num_slices)
        self._valid_nodes = np.random.default_rng(VALID_SEED).permutation(held_out)
        self._order = functools.lru_cache(CACHED_EPOCHS)(self._draw_order)

    def _heads(self, positions: np.ndarray) -> np.ndarray:
        """The nodes at positions (B,) of the training stream. A slice of the global batch is a stream of its own, of an
        equal part of the training nodes."""
        batches, places = np.divmod(positions, len(self._train_nodes) * self.batch_size)
        slices, places = np.divmod(places, self.batch_size)
        sizes = np.array([len(nodes) for nodes in self._train_nodes])[slices]
        epochs, places = np.divmod(batches * self.batch_size + places, sizes)
        heads = np.empty(len(positions), np.int64)
        for number, epoch in set(zip(slices.tolist(), epochs.tolist())):
            chosen = (slices == number) & (epochs == epoch)
            heads[chosen] = self._order(number, epoch)[places[chosen]]
        return heads

    def _draw_order(self, number: int, epoch: int) -> np.ndarray:
        return np.random.default_rng((self.seed, epoch, number)).permutation(self._train_nodes[number])

    def _samples(self, heads: np.ndarray, positions: np.ndarray, stream: int) -> NodeSamples:
        if self._weighted is not None:
            nodes, blocks = self._weighted.sample(heads, positions, stream)
            return NodeSamples(nodes, blocks, *self.inputs(nodes), self.labels[heads])
        nodes, blocks = _C.sample_neighbours(
            self._graph.indptr, self._graph.indices, heads, positions, self.fanout, self.replace, self.seed, stream
        )
        return NodeSamples(nodes, tuple(Block(*block) for block in blocks), *self.inputs(nodes), self.labels[heads])


def described(graph: Graph, name: str) -> str:
    """The sizes of a graph in a line."""
    train, valid, test = (int((graph.split == part).sum()) for part in (TRAIN, VALID, TEST))
    kind = "labels" if graph.labels.ndim == 2 else "classes"
    return (
        f"{name}: {graph.num_nodes:,} nodes, {len(graph.indices):,} edges, {graph.num_classes} {kind}, "
        f"{graph.num_rows:,} table rows; {train:,} nodes to train on, {valid:,} held out, {test:,} to test"
    )


def check_path(path):
    """Raises UserError unless data.path is a text."""
    if not isinstance(path, str) or not path:
        raise UserError(f"data.path must be a path, got {path!r}")


def check_flag(name: str, value):
    """Raises UserError unless the setting data.NAME is true or false."""
    if not isinstance(value, bool):
        raise UserError(f"data.{name} must be true or false, got {value}")
