"""Reads a trained model from a checkpoint, without MPI: rows by key, and the dense layers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from hetmpi.checkpoint.checkpoints import entries_of
from hetmpi.checkpoint.dense_state import attempt, in_line, read_state
from hetmpi.checkpoint.manifest import DENSE, LARGEST, Entries, brief, read_manifest, tables_of
from hetmpi.checkpoint.shard_files import ShardFiles, collect, shards_of
from hetmpi.data.batch import Batch
from hetmpi.data.features import TABLE
from hetmpi.data.graph.samples import Block
from hetmpi.data.tabular import Encoder
from hetmpi.data.tabular.saved import encoder_from
from hetmpi.data.tabular.stream import ENTRY
from hetmpi.data.triples.names import TripleNames
from hetmpi.errors import UserError
from hetmpi.layers import WEIGHTED, FeatureRows
from hetmpi.models.link import LinkModel
from hetmpi.open_rows import keys_of_ids
from hetmpi.owner.route import make_partition

CLICK_SIZES = ("num_fields", "num_dense", "dim")  # arguments of models, by task
LABELS, CLASSES = "num_labels", "num_classes"  # those of models of several labels, and of clicks in classes
NODE_SIZES = ("dim", "num_dense", "num_classes", "num_layers")
MOST_FIELDS = 1 << 20  # also the maximum for numbers in a row
MOST_LAYERS = 1024
POOLS = ("sum", "mean", f"{WEIGHTED}sum", f"{WEIGHTED}mean", None)  # of features of several values
MOST_INPUTS = 1 << 27  # numbers in the rows of an example
LARGEST_CONFIG = 1 << 20  # characters of a model's settings
OURS = "hetmpi.models"
WEIGHT = "weight"  # column of rows in Parquet
CLASS_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*){1,20}")
BLOCK_BYTES = 256 << 20  # rows in memory at a time; for each block the files of all shards are opened once


class Saved:
    """A table in a checkpoint. table: its entry in the manifest; shards: the files of each rank's shard."""

    def __init__(self, table: dict, shards: list[ShardFiles]):
        self.num_rows, self.dim, self.shards = table["num_rows"], table["dim"], shards
        self.partition = make_partition(table["partition"], table["num_rows"], len(shards))

    def blocks(self):
        """(first key, rows (n, dim) float32) in the order of keys."""
        num = max(1, BLOCK_BYTES // (4 * self.dim))
        for begin in range(0, self.num_rows, num):
            keys = np.arange(begin, min(begin + num, self.num_rows))
            rows = np.empty((len(keys), self.dim), np.float32)
            self.read(keys, rows)
            yield begin, rows

    def read(self, keys: np.ndarray, rows: np.ndarray):
        """Reads the rows of keys (n,) int64 into rows (n, dim) float32."""
        collect(self.shards, self.partition, self.partition.route(keys), "weight", rows)

    def are_trained(self, keys: np.ndarray) -> np.ndarray:
        """Whether the rows of keys (n,) int64 were ever updated, (n,) bool."""
        clocks = np.empty(len(keys), np.int32)
        collect(self.shards, self.partition, self.partition.route(keys), "clock", clocks)
        return clocks > 0


def saved_tables(checkpoint: Path, manifest: dict, only: str) -> dict[str, Saved]:
    """The tables of a checkpoint by name, a single one without a name as `only`. Raises UserError for a damaged
    shard."""
    tables, shards = tables_of(manifest), shards_of(checkpoint, manifest)
    for shard in (shard for of_table in shards.values() for shard in of_table):
        shard.check()
    return {name or only: Saved(table, shards[name]) for name, table in tables.items()}


def write_rows(path: Path, column: str, kind, dim: int, parts: Iterable[tuple]):
    """Writes Parquet with checksums: `column` of the Arrow type `kind`, and weight. parts: values (n,), rows (n, dim)
    float32."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(column, kind), (WEIGHT, pa.list_(pa.float32(), dim))])
    with pq.ParquetWriter(path, schema, write_page_checksum=True) as writer:
        for values, rows in parts:
            weights = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), dim)
            writer.write_table(pa.Table.from_arrays([values, weights], schema=schema))


class TensorModel(torch.nn.Module):
    """A model whose inputs are only tensors, without a Batch. With joined tables (hetmpi/layers.py, FeatureRows) these
    are the rows of each table, index, dense, and index and offsets of each feature with several values, and the weights
    of its values if they have them."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        self.table_dims = model.table_dims if isinstance(model, FeatureRows) else None

    def forward(self, rows, index, dense):
        return self.model(rows, Batch({}, index, dense, None))


class JoinedTensorModel(TensorModel):
    def forward(self, *inputs):
        num_tables = len(self.table_dims)
        rows, (index, dense, *rest) = dict(zip(self.table_dims, inputs)), inputs[num_tables:]
        bags, weights = [], []
        for pool in self.model.pools:
            bags.append((rest.pop(0), rest.pop(0)))
            weights.append(rest.pop(0) if is_weighted(pool) else None)
        return self.model(rows, Batch({}, index, dense, None, bags=tuple(bags), bag_weights=tuple(weights)))


def is_weighted(pool: str | None) -> bool:
    """Whether a pool of FeatureRows takes a weight for each value."""
    return pool is not None and pool.startswith(WEIGHTED)


class BlockModel(TensorModel):
    """A model of nodes, whose inputs are x, and offsets and index of each block, from the heads outwards."""

    def forward(self, x, *edges):
        return self.model(x, tuple(map(Block, edges[::2], edges[1::2])))


def of_tensors(model: torch.nn.Module) -> TensorModel:
    if hasattr(model, "layer"):
        return BlockModel(model)
    return JoinedTensorModel(model) if isinstance(model, FeatureRows) else TensorModel(model)


def dense_state(checkpoint: Path, manifest: dict) -> dict:
    """What dense.pt holds. Raises UserError as read_state."""
    return read_state(checkpoint / DENSE, manifest["size"])


def dense_layers(
    checkpoint: Path, manifest: dict, state: dict, allow: Sequence[str] = ()
) -> tuple[torch.nn.Module, tuple]:
    """The dense layers of a checkpoint that the trainer wrote, in eval mode, and example inputs of of_tensors(model):
    two samples. state: as dense_state. allow: modules and classes, besides those of hetmpi, that the manifest may name:
    their code runs. Raises UserError if the manifest does not describe the model, names another class, or describes one
    that does not fit the weights in dense.pt."""
    if "model_config" not in manifest:
        raise UserError(f"{checkpoint} does not describe its model: export only its rows with dense=none")
    said = Entries(f"{checkpoint}: manifest.json", manifest)
    config, sizes = said.part("model_config"), said.part("model_sizes")
    names = NODE_SIZES if "num_layers" in sizes.values else CLICK_SIZES
    most = {"num_layers": MOST_LAYERS, LABELS: MOST_LAYERS}
    names = (*names, *(name for name in (LABELS, CLASSES) if name in sizes.values and name not in names))
    arguments = {name: sizes.integer(name, 0, most.get(name, MOST_FIELDS)) for name in names}
    joined = joined_of(said, manifest) if "joined" in manifest else None
    if "model" not in state:
        raise UserError(f"{checkpoint / DENSE} has no model: export only the rows with dense=none")
    is_ours = check_config(checkpoint, config, allow)
    made = []

    def build():
        if is_ours:  # before memory is allocated: the weights must have the sizes that the manifest names
            with torch.device("meta"):
                instantiated(config.values, arguments, joined).load_state_dict(state["model"], assign=True)
        model = instantiated(config.values, arguments, joined)
        model.load_state_dict(state["model"])
        dims = [table["dim"] for table in tables_of(manifest).values()]
        inputs = example_blocks(arguments) if "num_layers" in arguments else example(arguments, joined, dims)
        with torch.no_grad():
            of_tensors(model.eval())(*inputs)
        made.append((model, inputs))

    attempt(f"{checkpoint}: the model in its manifest", build)
    return made[0]


def is_of_links(manifest: dict) -> bool:
    """Whether a checkpoint is of triples, and so of task=link."""
    return manifest.get("encoder") == TripleNames.__name__


def link_model(checkpoint: Path, manifest: dict, allow: Sequence[str] = ()) -> LinkModel:
    """The model of a checkpoint of task=link, in eval mode; it has no parameters. allow, errors: as dense_layers."""
    said = Entries(f"{checkpoint}: manifest.json", manifest)
    config, dim = said.part("model_config"), said.part("model_sizes").integer("dim", 1, MOST_FIELDS)
    check_config(checkpoint, config, allow)
    made = []
    attempt(
        f"{checkpoint}: the model in its manifest",
        lambda: made.append(instantiated(config.values, {"dim": dim}, None).eval()),
    )
    return made[0]


def tensors_of(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Arrays for dense.pt, without copies."""
    return {name: torch.from_numpy(array if array.flags.writeable else array.copy()) for name, array in arrays.items()}


def encoder_of(checkpoint: Path, manifest: dict, state: dict, has_ids: bool = True) -> Encoder | TripleNames | None:
    """What encodes further files like the data that the model was trained on; of triples their names; None for data
    that are no files. state: as dense_state. Raises UserError for an invalid one."""
    data = state.get("data")
    if data is None or not {"encoder", "entities"} & set(data):
        return None
    made, kind = [], TripleNames.from_arrays if "entities" in data else encoder_from
    attempt(
        f"{checkpoint / DENSE}: data",
        lambda: made.append(kind({name: tensor.numpy() for name, tensor in data.items()})),
    )
    [found] = made
    return with_keys(found, checkpoint, manifest, state) if has_ids and isinstance(found, Encoder) else found


def with_keys(encoder: Encoder, checkpoint: Path, manifest: dict, state: dict) -> Encoder:
    """The encoder with the keys of the ids that the tables without a fixed vocabulary have in a checkpoint."""
    found, tables = {}, tables_of(manifest)
    for name in (name for name, table in encoder.tables.items() if table.open is not None):
        saved = "" if len(tables) == 1 else name
        if saved not in tables:
            raise UserError(f"{checkpoint} has no table {name}, which its columns need")
        found[name] = keys_of_ids(entries_of(checkpoint, state, saved, tables[saved]["num_rows"]))
    return encoder.with_keys(found) if found else encoder


def resumed_stream(checkpoint: Path | None, samples: int) -> tuple[Encoder, dict, int] | None:
    """How a stream goes on after a checkpoint of `samples` samples (hetmpi/data/tabular/stream.py, open): its encoder,
    state and samples; None where there is none. Raises UserError for an invalid one."""
    manifest = {} if checkpoint is None else read_manifest(checkpoint)
    if ENTRY not in manifest:
        return None
    said = Entries(f"{checkpoint}: manifest.json", manifest).part(ENTRY)
    total, columns, files = said.integer("samples", samples), said.get("columns"), said.get("files")
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        raise said.refusal("columns", "a list of names")
    if not isinstance(files, list) or not files or not all(map(is_opened_file, files)):
        raise said.refusal("files", "a list of names of files, each with its bytes and samples")
    names, num = [file[0] for file in files], sum(file[2] for file in files)
    if names != sorted(set(names)) or not total - samples <= num <= total:
        raise said.refusal("files", f"ascending, with the samples from {samples:,} to {total:,}")
    encoder = encoder_of(checkpoint, manifest, dense_state(checkpoint, manifest), has_ids=False)
    if not isinstance(encoder, Encoder):
        raise UserError(f"{checkpoint} is of a stream, and lacks what its columns need")
    return encoder, {"columns": columns, "samples": total, "files": files}, samples


def is_opened_file(entry) -> bool:
    """Whether this is an entry of `files` in Stream.state()."""
    if not isinstance(entry, list) or len(entry) != 3 or not isinstance(entry[0], str):
        return False
    is_name = "\0" not in entry[0] and not {"", ".", ".."} & set(entry[0].split("/"))
    return is_name and all(type(number) is int and 0 <= number <= LARGEST for number in entry[1:])


def check_data(checkpoint: Path, source):
    """Raises UserError if a source gives values other keys than when the checkpoint was saved: rows would be those of
    other values."""
    manifest, now = read_manifest(checkpoint), getattr(source, "encoder", None)
    check_graph(checkpoint, manifest, source)
    if now is None:
        return
    saved = encoder_of(checkpoint, manifest, dense_state(checkpoint, manifest), has_ids=False)
    difference = saved and saved.difference(now)
    if difference:
        raise UserError(
            f"{checkpoint} was saved with other data: {difference}: give the same data and rules, or go on with new "
            f"data in a new run.dir by init_from={checkpoint}"
        )


def check_samples(checkpoint: Path, source):
    """Raises UserError if a source has other training samples than when the checkpoint was saved, or in another order:
    a resumed run would skip some and repeat others."""
    manifest = read_manifest(checkpoint)
    if not manifest["samples"]:
        return
    if hasattr(source, "order") and manifest.get("order") != source.order:
        raise UserError(
            f"{checkpoint} was saved by a version that shuffles data={source.name} in another way: a resumed run would "
            "skip some samples and repeat others: start anew"
        )
    saved, now = manifest.get("train_samples"), source.num_train  # earlier versions save none
    if isinstance(saved, int) and now is not None and saved != now:
        raise UserError(
            f"{checkpoint} was saved with {saved:,} training samples of data={source.name}, now there are {now:,}: "
            "a resumed run would skip some and repeat others: give the same data, or go on with new data in a new "
            f"run.dir by init_from={checkpoint}"
        )


def check_graph(checkpoint: Path, manifest: dict, source):
    """Raises UserError if a source's graph is not that of the checkpoint: rows would be those of other nodes."""
    saved, now = manifest.get("graph"), getattr(source, "digests", {})
    saved = saved if isinstance(saved, dict) else {}
    differ = [part for part in now if part in saved and saved[part] != now[part]]  # earlier versions save fewer parts
    if differ:
        raise UserError(
            f"{checkpoint} was saved with another graph, its {' and '.join(differ)} differ: give the data that it was "
            "trained on, or start anew; hetmpi predict takes other tables of nodes by new_nodes=true"
        )


def joined_of(said: Entries, manifest: dict) -> tuple[dict[str, int], list[str | None], list[str]]:
    """Table dims, pools and names of features, the arguments of FeatureRows."""
    joined = said.part("joined")
    names, pools, features = joined.get("tables"), joined.get("pools"), joined.values.get("names", [])
    tables = tables_of(manifest)
    dims = {name or TABLE: table["dim"] for name, table in tables.items()}
    if not isinstance(names, list) or sorted(map(str, names)) != sorted(dims):
        raise joined.refusal("tables", f"a list of {', '.join(sorted(dims))}")
    if not isinstance(pools, list) or len(pools) > MOST_FIELDS or not all(pool in POOLS for pool in pools):
        raise joined.refusal("pools", "a list of sum, mean, weighted sum, weighted mean and null")
    if not isinstance(features, list) or len(features) > MOST_FIELDS or not all(isinstance(n, str) for n in features):
        raise joined.refusal("names", "a list of names")
    if None in pools and len(features) < len(pools):
        raise joined.refusal("names", f"at least {len(pools)} names")
    return {name: dims[name] for name in names}, pools, features


def example(sizes: dict[str, int], joined: tuple | None, dims: list[int]) -> tuple[torch.Tensor, ...]:
    """Inputs of of_tensors(model) for two samples."""
    pools = joined[1] if joined else []
    num_pooled = sum(pool is not None for pool in pools)
    num_singles = max(0, sizes["num_fields"] - num_pooled)
    if (num_singles + 2) * max(dims) > MOST_INPUTS:
        raise UserError(f"{num_singles:,} fields of rows of {max(dims):,} numbers are more than a model can have")
    # at least 2 rows: ONNX would export a size of 1 as constant
    rows = [torch.zeros(num_singles + 2, dim) for dim in (joined[0].values() if joined else dims[:1])]
    index, dense = torch.arange(num_singles).repeat(2, 1), torch.zeros(2, sizes["num_dense"])
    bags = [
        one
        for pool in pools
        for one in (torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3]), *([torch.ones(3)] if is_weighted(pool) else []))
    ]
    return *rows, index, dense, *bags


def example_blocks(sizes: dict[str, int]) -> tuple[torch.Tensor, ...]:
    """Inputs of of_tensors(model) for two heads, each with an edge from itself in every block."""
    block = torch.tensor([0, 1, 2]), torch.tensor([0, 1])
    return torch.zeros(2, sizes["dim"] + sizes["num_dense"]), *(block * sizes["num_layers"])


def instantiated(config: dict, arguments: dict, joined: tuple | None) -> torch.nn.Module:
    """The model of a configuration. REQUIRES: check_config. Raises any exception of its class."""
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    model = instantiate(OmegaConf.create(config), **arguments)
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"it makes a {type(model).__name__}, which is not a torch.nn.Module")
    return model if joined is None else FeatureRows(model, *joined)


def check_config(checkpoint: Path, config: Entries, allow: Sequence[str]) -> bool:
    """Whether all classes in a manifest's model_config are hetmpi's. The manifest is not trusted: a `_target_` could
    name any function, and merely to look at it is to import its module. Raises UserError for a class that is neither
    hetmpi's nor of `allow`, and for values that a model cannot have."""
    size = len(json.dumps(config.values))
    if size > LARGEST_CONFIG:
        raise UserError(f"{config.place} must have at most {LARGEST_CONFIG:,} characters, got {size:,}")
    targets, parts = [], [config.values]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            targets += [part["_target_"]] if "_target_" in part else []
            parts += part.values()
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, str) and "${" in part:  # an interpolation could produce another _target_
            raise UserError(f"{config.place}: values must be plain, got {brief(part)}")
    for target in targets:
        check_target(checkpoint, config.place, target, allow)
    is_ours = all(is_within(target, [OURS]) for target in targets)
    for name, value in config.values.items() if is_ours else ():
        is_long = isinstance(value, list) and len(value) > MOST_LAYERS
        if is_long or name.startswith("num_") and not (type(value) is int and 0 <= value <= MOST_LAYERS):
            raise UserError(f"{config.place}: {name} must be at most {MOST_LAYERS:,}, or as many, got {brief(value)}")
    return is_ours


def check_target(checkpoint: Path, place: str, target, allow: Sequence[str]):
    """Raises UserError unless `target` names a subclass of torch.nn.Module that is hetmpi's or of `allow`."""
    if not isinstance(target, str) or not CLASS_NAME.fullmatch(target):
        raise UserError(f"{place}: _target_ must be package.module.Class, got {brief(target)}")
    if not is_within(target, [OURS, *allow]):
        raise UserError(
            f"{checkpoint} is of the model {target}, whose code would run here: if you trust it, add "
            f"allow={target.rpartition('.')[0]}"
        )
    module, _, name = target.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # of code of the caller's
        raise UserError(f"{place}: _target_={target} cannot be imported: {in_line(error)}") from error
    is_model = isinstance(found, type) and issubclass(found, torch.nn.Module)
    if not is_model or (is_within(target, [OURS]) and not is_within(found.__module__, [OURS])):
        raise UserError(f"{place}: _target_ must be a torch.nn.Module, got {target}")


def is_within(name: str, allow: Sequence[str]) -> bool:
    """Whether a dotted name is one of `allow`, or in one of these packages, modules or classes."""
    return any(f"{name}.".startswith(f"{allowed}.") for allowed in allow)


def allowed_of(text: str) -> list[str]:
    """The names in allow=NAME,NAME of a command line. Raises UserError."""
    names = [name.strip() for name in text.strip("[]").split(",")]
    for name in names:
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name):
            raise UserError(f"allow must be names of modules or classes, as allow=mymodel, got {name!r}")
    return names
