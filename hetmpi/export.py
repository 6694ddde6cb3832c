"""Extracts a checkpoint: rows by key for numpy or Parquet, the dense layers as TorchScript or ONNX.

hetmpi export CHECKPOINT OUT [rows=npy|parquet|none] [dense=torchscript|onnx|none] [table=NAME]
                             [nodes=none|parquet] [data.KEY=VALUE] [allow=NAME[,NAME]]
hetmpi export CHECKPOINT OUT items=npy|parquet data.path=FILES [data.delimiter=C] [data.max_bad_rows=N]
hetmpi export CHECKPOINT OUT values=parquet data.path=FILES [data.delimiter=C] [data.max_bad_rows=N]
hetmpi export CHECKPOINT OUT ids=parquet [since=CHECKPOINT]
hetmpi export FOLDER OUT deltas=FOLDER[,FOLDER]

OUT/rows.npy         (num_rows, dim) float32, row k for key k; numpy.load(..., mmap_mode="r") opens files larger than
                     memory
OUT/rows.parquet     columns key (int64) and weight (fixed-size list of float32), in the order of keys
OUT/dense.torchscript  forward(rows (U, dim), index (B, F) int64 into them, dense (B, num_dense)) -> logits (B,); with
                     several tables or values forward(rows of each table in turn, index, dense, and for each feature of
                     several values index (n,) and offsets (B + 1,)), where indices count the rows of all tables;
                     of several labels or classes logits (B, K)
                     of a model of nodes forward(x (N, dim + num_dense), and offsets and index of each block, from the
                     heads outwards) -> logits (B, num_classes), where x holds the means of rows beside the numbers
OUT/dense.onnx       the same for any B and U, inputs rows, index, dense, output logits; needs pip install onnx
                     onnxscript
OUT/TABLE.parquet    of a model of links, for the tables entity, relation and, with reciprocal relations, inverse:
                     columns named like the table, with names, and weight; or with rows=npy TABLE.npy, and
                     TABLE.names.txt with a name per line
OUT/nodes.parquet    of a model of nodes: node, its id in the data; hidden, the activations of the last hidden layer,
                     over all neighbours (fixed-size list of float32). `hetmpi predict ... hidden=true` writes the same
                     on several ranks. data.KEY changes settings of the training's data, such as data.path

OUT/items.parquet    of a model of task=retrieval: the items in FILES, which need the columns of items alone; their
                     values, in a column named as that of the data, and vector (fixed-size list of float32). With
                     items=npy items.npy (n, W) float32, and items.names.txt with a value per line

OUT/COLUMN.parquet   of id columns of files, with values=parquet: each value in FILES that has a trained row, once, in
                     a column named as that of the data, and weight (fixed-size list of float32), as table.init_from
                     reads them; of columns that share rows one file. FILES need all id columns

OUT/ids.parquet      of columns with rows: open, with ids=parquet: column, id, weight (list of float32), count, step, in
                     the order of columns and ids; docs/growing.md. With since=CHECKPOINT, an earlier one, only the rows
                     that have changed, and OUT/removed.parquet, ids that have lost their rows
                     deltas: FOLDER has an export by ids; with the changes of these folders in turn it becomes a later
                     one, byte for byte

allow names modules or classes of your own, such as mymodel: hetmpi builds the model that the checkpoint names, and runs
no code but its own and that of these. Each file is written whole or not at all.
"""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from hetmpi import put_current_folder_before_packages
from hetmpi.checkpoint.manifest import brief, read_manifest, tables_of
from hetmpi.checkpoint.shard_files import shards_of
from hetmpi.data.triples.names import TripleNames
from hetmpi.errors import UserError, check_paths
from hetmpi.log.figures import bytes_text
from hetmpi.run import id_rows
from hetmpi.run.output import cannot_write, part_of
from hetmpi.trained.id_rows import rows_of
from hetmpi.trained.item_files import export_items
from hetmpi.trained.node_outputs import NodeOutputs, is_of_nodes
from hetmpi.trained.saved_model import (
    BlockModel,
    Saved,
    TensorModel,
    allowed_of,
    dense_layers,
    dense_state,
    encoder_of,
    is_of_links,
    of_tensors,
    write_rows,
)
from hetmpi.trained.saved_pairs import is_of_pairs
from hetmpi.trained.value_files import export_values
from hetmpi.world.world import World

CHOICES = {
    "rows": ("npy", "parquet", "none"),
    "dense": ("torchscript", "onnx", "none"),
    "nodes": ("none", "parquet"),
    "items": ("npy", "parquet"),
    "values": ("parquet",),
}
OF_IDS = ("ids", "since", "deltas")


def main(arguments: list[str]):
    """Reads the command line, exports, and prints what was written."""
    if {"-h", "--help"} & set(arguments):
        return print(__doc__)
    if len(arguments) < 2:
        sys.exit(__doc__)
    try:
        check_paths("CHECKPOINT or OUT", arguments[:2], settings_of(arguments[2:]))
    except UserError as refusal:
        sys.exit(f"hetmpi: {refusal}")
    put_current_folder_before_packages()
    checkpoint, out = map(Path, arguments[:2])
    if any(argument.partition("=")[0] in OF_IDS for argument in arguments[2:]):
        return export_ids(checkpoint, out, arguments[2:])
    chosen, of_data = {}, re.compile(r"[+~]*data\b")
    for argument in filter(lambda text: not of_data.match(text), arguments[2:]):
        name, _, value = argument.partition("=")
        if value not in CHOICES.get(name, ()) and (name not in ("table", "allow") or not value):
            choices = ", ".join(f"{k}={'|'.join(v)}" for k, v in CHOICES.items())
            sys.exit(f"hetmpi.export: unknown argument {argument}; known are {choices}, table=NAME, allow=NAME")
        chosen[name] = value
    try:
        allow = allowed_of(chosen.pop("allow")) if "allow" in chosen else []
        data = list(filter(of_data.match, arguments[2:]))
        for alone, of_files in (("items", export_vectors), ("values", export_by_value)):
            if alone in chosen:
                return of_files(checkpoint, out, chosen, settings_of(data), allow)
        written = export(checkpoint, out, **chosen, data=data, allow=allow)
    except UserError as refusal:
        sys.exit(f"hetmpi: {refusal}")
    say_written(out, written)


def say_written(out: Path, written: dict[Path, str]):
    parts = [f"{path.name} ({about}, {bytes_text(path.stat().st_size)})" for path, about in written.items()]
    print(f"hetmpi: {out}: {', '.join(parts)}")


def settings_of(data: list[str]) -> dict[str, str]:
    """Settings of files on the command line."""
    return {key.lstrip("+"): value for key, _, value in (text.partition("=") for text in data)}


def check_alone(chosen: dict[str, str], name: str):
    others = [other for other in chosen if other != name]
    if others:
        raise UserError(f"{name}={chosen[name]} is exported alone, without {others[0]}")


def export_vectors(checkpoint: Path, out: Path, chosen: dict[str, str], given: dict[str, str], allow: Sequence[str]):
    """Exports the vectors of items. chosen: of the command line, given: its settings of files. Raises UserError."""
    check_alone(chosen, "items")
    if not is_of_pairs(read_manifest(checkpoint)):
        raise UserError(f"items={chosen['items']}: {checkpoint} is not of task=retrieval")
    say_written(out, export_items(checkpoint, out, chosen["items"], given, allow))


def export_by_value(checkpoint: Path, out: Path, chosen: dict[str, str], given: dict[str, str], allow: Sequence[str]):
    """Exports rows by the values of id columns; as export_vectors."""
    check_alone(chosen, "values")
    if allow:
        raise UserError("values=parquet builds no model: leave out allow")
    say_written(out, export_values(checkpoint, out, given))


def export_ids(source: Path, out: Path, arguments: list[str]):
    """Exports rows by id: the first argument and what follows the second one on the command line."""
    chosen = dict(argument.partition("=")[::2] for argument in arguments)
    try:
        if set(chosen) - set(OF_IDS) or not all(chosen.values()) or chosen.get("ids", "parquet") != "parquet":
            raise UserError("an export by ids takes ids=parquet, since=CHECKPOINT or deltas=FOLDER[,FOLDER] alone")
        if "deltas" in chosen and len(chosen) > 1:
            raise UserError("deltas are applied to an export, without ids and since")
        removed = []
        if "deltas" in chosen:
            rows, about = id_rows.read_changed([source, *map(Path, chosen["deltas"].split(","))])
        else:
            rows, about = rows_of(source)
        if "since" in chosen:
            before, earlier = rows_of(Path(chosen["since"]))
            rows, removed = id_rows.changes(before, rows)
            about = id_rows.About(about.step, earlier.step)
            id_rows.write_removed(out, removed, about)  # first: without it the changes are not read
        path = id_rows.write_rows(out, rows, about)
    except UserError as refusal:
        sys.exit(f"hetmpi: {refusal}")
    num, gone = sum(len(one.ids) for one in rows), sum(len(ids) for _, ids in removed)
    lost = f", {gone:,} ids that have lost theirs" if "since" in chosen else ""
    print(f"hetmpi: {out}: {path.name} ({num:,} rows of ids{lost}, {bytes_text(path.stat().st_size)})")


def export(
    checkpoint: Path, out: Path, rows: str = "npy", dense: str | None = None, table: str | None = None,
    nodes: str = "none", data: Sequence[str] = (), allow: Sequence[str] = (),
) -> dict[Path, str]:  # fmt: skip
    """Writes the selected parts of a checkpoint to `out`. Returns their paths, each with a description. table: None for
    the only one, of a model of links for all. dense: None for torchscript, of a model of links, which has no dense
    layers, and of task=retrieval for none. data: Hydra overrides of data settings, for nodes. allow: as for
    dense_layers. Raises UserError for an incomplete or invalid checkpoint, an unknown table, a model that cannot be
    built, a missing package, and a folder that cannot be written."""
    missing = [name for name in ("onnx", "onnxscript") if dense == "onnx" and find_spec(name) is None]
    if missing:
        raise UserError(f"dense=onnx needs packages that are not installed: pip install {' '.join(missing)}")
    manifest = read_manifest(checkpoint)
    if is_of_pairs(manifest) and dense is not None and dense != "none":
        raise UserError(f"dense={dense}: {checkpoint} is of task=retrieval: export items=parquet data.path=FILES")
    dense = dense or ("none" if is_of_links(manifest) or is_of_pairs(manifest) else "torchscript")
    if (rows, dense, nodes) == ("none",) * 3:
        raise UserError("rows, dense and nodes are none: choose one of them to export")
    shards = shards_of(checkpoint, manifest)
    for shard in [shard for of_table in shards.values() for shard in of_table]:
        shard.check()
    if nodes != "none" and not is_of_nodes(manifest):
        raise UserError(f"nodes={nodes}: {checkpoint} is not of a model of nodes")
    if data and nodes == "none":
        raise UserError(f"{data[0]} is read with nodes=parquet only")
    if is_of_links(manifest):
        return export_links(checkpoint, manifest, shards, out, rows, dense, table)
    name = chosen_table(checkpoint, manifest, table) if rows != "none" else ""
    layers = dense_layers(checkpoint, manifest, dense_state(checkpoint, manifest), allow) if dense != "none" else None
    outputs = NodeOutputs(World(), checkpoint, list(data), allow=allow) if nodes != "none" else None
    written = {}
    if rows != "none":
        saved, path = Saved(tables_of(manifest)[name], shards[name]), out / f"rows.{rows}"
        with part_of(path) as part, cannot_write(path):
            {"npy": write_npy, "parquet": write_parquet}[rows](part, saved)
        written[path] = f"{saved.num_rows:,} rows of {saved.dim} numbers"
    if layers is not None:
        model, inputs = layers
        path = out / f"dense.{dense}"
        with part_of(path) as part, cannot_write(path):
            {"torchscript": write_torchscript, "onnx": write_onnx}[dense](part, of_tensors(model), inputs)
        written[path] = f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"
    if outputs is not None:
        path = out / "nodes.parquet"
        written[path] = f"{outputs.write(path, with_hidden=True, with_classes=False):,} nodes"
    return written


def export_links(
    checkpoint: Path, manifest: dict, shards: dict, out: Path, rows: str, dense: str, table: str | None
) -> dict[Path, str]:
    """As export, of a model of links."""
    if dense != "none" or rows == "none":
        raise UserError(f"{checkpoint} is of task=link, without dense layers: leave out dense, and export its rows")
    tables = tables_of(manifest)
    if table is not None:
        tables = {table: tables[chosen_table(checkpoint, manifest, table)]}
    names, written = encoder_of(checkpoint, manifest, dense_state(checkpoint, manifest)), {}
    if not isinstance(names, TripleNames):
        raise UserError(f"{checkpoint} has no names of its entities and relations")
    for name, kept in tables.items():
        saved, path, of_rows = Saved(kept, shards[name]), out / f"{name}.{rows}", names.of(name)
        if len(of_rows) != saved.num_rows:
            raise UserError(f"{checkpoint} has {len(of_rows):,} names of the {saved.num_rows:,} rows of table {name}")
        with part_of(path) as part, cannot_write(path):
            write_npy(part, saved) if rows == "npy" else write_parquet(part, saved, name, of_rows)
        written[path] = f"{saved.num_rows:,} rows of {saved.dim} numbers"
        if rows == "npy":
            path = out / f"{name}.names.txt"
            with part_of(path) as part, cannot_write(path):
                part.write_text("".join(f"{of_row}\n" for of_row in of_rows), encoding="utf-8")
            written[path] = "their names"
    return written


def chosen_table(checkpoint: Path, manifest: dict, table: str | None) -> str:
    """The name of the table in the manifest. Raises UserError if it is missing, or if there are several and none is
    selected."""
    names = list(tables_of(manifest))
    if table is None and len(names) == 1:
        return names[0]
    if names == [""]:
        raise UserError(f"{checkpoint} has one table without a name: leave out table={table}")
    if table not in names:
        raise UserError(f"{checkpoint} has the tables {', '.join(names)}: choose one by table=NAME, got {brief(table)}")
    return table


def write_npy(path: Path, saved: Saved):
    header = {"descr": "<f4", "fortran_order": False, "shape": (saved.num_rows, saved.dim)}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for _, rows in saved.blocks():
            file.write(rows)


def write_parquet(path: Path, saved: Saved, column: str = "key", names: Sequence[str] | None = None):
    """column: for the keys, or the names of the rows."""
    import pyarrow as pa

    parts = (
        (pa.array(np.arange(begin, begin + len(rows)) if names is None else names[begin : begin + len(rows)]), rows)
        for begin, rows in saved.blocks()
    )
    write_rows(path, column, pa.int64() if names is None else pa.string(), saved.dim, parts)


def write_torchscript(path: Path, model: TensorModel, inputs: tuple):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.(trace|save)", DeprecationWarning)  # TorchScript is requested
        # The models' checks of shapes are traced as constants; they hold for any B and U.
        warnings.filterwarnings(
            "ignore", category=torch.jit.TracerWarning, module=r"hetmpi\.(layers|models\.(ctr|din|graph))"
        )
        traced = io.BytesIO()
        torch.jit.save(torch.jit.trace(model, inputs), traced)
    path.write_bytes(traced.getbuffer())


def write_onnx(path: Path, model: TensorModel, inputs: tuple):
    num_samples = torch.export.Dim("B")
    shapes = {"rows": {0: torch.export.Dim("U")}, "index": {0: num_samples}, "dense": {0: num_samples}}
    if model.table_dims is not None or isinstance(model, BlockModel):
        raise UserError("dense=onnx supports models of one table and features of one value: use dense=torchscript")
    # it warns that torchvision, which is not needed, is missing
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about its own code
        torch.onnx.export(
            model,
            inputs,
            path,
            input_names=list(shapes),
            output_names=["logits"],
            dynamic_shapes=shapes,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
