"""Predicts with a checkpoint of a model of clicks, of the nodes of a graph, of links, or of queries and items, on one
rank or several.

hetmpi predict CHECKPOINT data.path=FILES out=OUT [predict.keep=[NAME,...]] [data.delimiter=C] [data.max_bad_rows=N]
    [data.encoding=NAME] [data.decimal=C] [ids=EXPORT[,CHANGES]]
hetmpi predict CHECKPOINT out=OUT [split=valid|train] [start=N] [stop=N] [--config-dir DIR] [data=NAME] [data.KEY=VALUE]

The first form predicts every row of CSV or Parquet files, in their order, with the columns that the model was trained
on; it needs no label and prepares nothing. FILES: a file, a glob or a folder. predict.keep: columns of the files to
write beside the predictions. data.delimiter, encoding, decimal: where they are not those of the files of the run. ids:
an export by ids, and what changed later (hetmpi export), whose rows take the place of the checkpoint's, of columns with
rows: open.

The second form predicts positions [start, stop) of the held-out part of the data that the model was trained on, or of
the training stream with split=train. data=NAME and data.KEY=VALUE select other data with the same features.

hetmpi predict CHECKPOINT out=OUT.parquet [hidden=true] [new_nodes=true] [--config-dir DIR] [data=NAME] [data.KEY=VALUE]

The third form, for a model of nodes, predicts all nodes of its graph over all their neighbours, and needs the memory
that dry_run=true calls final. Columns: node, its id in the data; prediction, its class; probability of that class; of
several labels lists of both, of all labels with a probability above one half; hidden, the activations of the last
hidden layer, with hidden=true. new_nodes=true predicts the nodes of other tables, found by their names.

hetmpi predict CHECKPOINT data.path=QUESTIONS out=OUT.parquet [top=10] [without=FOLDER]

The fourth form, for a model of links, answers questions: a line each of head, relation and tail, with tabs between,
where ? stands for what is asked; a line without ? asks for the score of a triple. Columns: head, relation and tail;
asked: head, relation, tail or score; rank of the answer, from 1; score. without=FOLDER leaves out the answers that the
triples in FOLDER have (docs/knowledge_graphs.md).

hetmpi predict CHECKPOINT data.path=FILES items=ITEMS.parquet out=OUT.parquet [top=10] [predict.keep=[NAME,...]]
    [data.delimiter=C] [data.encoding=E] [data.decimal=C] [data.max_bad_rows=N]

The fifth form, for a model of task=retrieval, has the best items for each row of files, which need the columns of
queries alone. ITEMS: what hetmpi export items=parquet has written of this checkpoint. Columns: those kept; items, their
values, best first; scores; both are lists.

allow=NAME[,NAME] names modules or classes of your own, such as mymodel: hetmpi builds the model that the checkpoint
names, and runs no code but its own and that of these.

In the first two forms OUT is a .parquet file with the kept columns and `probability` (float32; `prediction` where
labels are numbers), or a .npy file with (rows,) float32. Of several labels there is a column for each, as
`probability_click`, in a .npy file (rows, labels); of classes `class`, the most probable one, and a column for each, as
`probability_red`. The result does not depend on the number of ranks.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from hetmpi.world.early_signals import exit_on_signals
    from hetmpi.world.oversubscription import restart_with_naps

    exit_on_signals()
    restart_with_naps()

import contextlib
import itertools
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from hetmpi.checkpoint.manifest import DENSE, read_manifest, tables_of
from hetmpi.checkpoint.shard_files import shards_of
from hetmpi.data.batch import FeatureBatches, Samples, to_batch
from hetmpi.data.features import TABLE, FeatureTable, num_fields_of
from hetmpi.data.source import Source
from hetmpi.data.tabular import DataError, Encoder, Reader
from hetmpi.data.tabular.convert import KEPT
from hetmpi.data.tabular.coverage import Coverage
from hetmpi.data.tabular.reading import BadRows
from hetmpi.data.tabular.rules import NUMBER
from hetmpi.errors import LARGEST, UserError, check_integer, check_paths, one_line
from hetmpi.layers import FeatureRows
from hetmpi.run.command_line import parse
from hetmpi.run.id_rows import folders_of
from hetmpi.run.output import RowsFile, cannot_write, part_of
from hetmpi.trained.earlier_run import encoder_before
from hetmpi.trained.id_rows import IdTable, replaced
from hetmpi.trained.item_files import BestItems
from hetmpi.trained.link_answers import LARGEST_TOP, LinkAnswers
from hetmpi.trained.node_outputs import NodeOutputs, is_of_nodes
from hetmpi.trained.saved_data import source_of
from hetmpi.trained.saved_model import (
    CLASSES,
    LABELS,
    Saved,
    allowed_of,
    dense_layers,
    dense_state,
    encoder_of,
    is_of_links,
)
from hetmpi.trained.saved_pairs import OF_FILES, find_kept_types, is_of_pairs, reader_of
from hetmpi.world.launch import launch
from hetmpi.world.same_files import check_same_files
from hetmpi.world.world import World

BATCH_SIZE = 4096
PART_SAMPLES = 1 << 16  # positions of a split that one rank predicts at a time
CLASS = "class"  # column of the most probable one
MOST_SENT = 8  # blocks on their way to rank 0
NAME_TEXT = r"""\s*'[^']*'\s*(?=,|$)|\s*"[^"]*"\s*(?=,|$)|[^,]+"""  # one of predict.keep
OF_LINKS = ("data.path", "top", "without")
# No settings of the run.
OWN = ("out", "split", "start", "stop", "predict.keep", "hidden", "new_nodes", "allow", "ids", "items", *OF_LINKS[1:])
Part = Callable[[], Iterator[tuple[pa.Table, Samples]]]  # kept columns and samples, in blocks


def main(world: World, arguments: list[str] | None = None):
    """Reads the command line, predicts, and prints the number of predictions. Collective."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments) or not arguments:
        if world.rank == 0:
            print(__doc__, flush=True)
        return
    if arguments[0].startswith("-") or "=" in arguments[0]:
        raise UserError(f"the first argument must be a checkpoint's folder, got {arguments[0]}")
    asked = parse(arguments[1:])
    if asked.multirun or asked.cfg is not None:
        raise UserError("hetmpi predict does not support -m and --cfg")
    own = dict(value_of(text) for text in asked.overrides if text.split("=")[0] in OWN)
    check_paths("CHECKPOINT", [arguments[0]], own)
    overrides = [text for text in asked.overrides if text.split("=")[0] not in OWN]
    out = Path(own.pop("out", ""))
    if out.suffix not in (".parquet", ".npy"):
        raise UserError(f"give out=FILE.parquet or out=FILE.npy, got out={out if out.name else ''}")
    checkpoint = Path(arguments[0])
    own["allow"] = allowed_of(own["allow"]) if "allow" in own else []
    manifest = read_manifest(checkpoint)
    if is_of_links(manifest):
        return predict_links(world, checkpoint, overrides, own, out)
    if is_of_pairs(manifest):
        return predict_items(world, checkpoint, overrides, own, out)
    for name in (*OF_LINKS[1:], "items"):
        if name in own:
            raise UserError(f"{name} is for models of links, or of task=retrieval")
    if is_of_nodes(manifest):
        return predict_nodes(world, checkpoint, overrides, asked.config_dir, own, out)
    for name in ("hidden", "new_nodes"):
        if name in own:
            raise UserError(f"{name}=true is for models of nodes")
    num, mean = Prediction(world, checkpoint, overrides, asked.config_dir, **checked(own)).write(out)
    if world.rank == 0:
        print(f"hetmpi: {out}: {num:,} predictions, mean {mean:.4f}", flush=True)


def value_of(text: str) -> tuple[str, str]:
    """KEY and VALUE. Raises UserError for a text without a value."""
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"hetmpi predict takes KEY=VALUE, got {one_line(text)}")
    return key, value


def predict_nodes(world: World, checkpoint: Path, overrides: list[str], config_dir: str | None, own: dict, out: Path):
    """Predicts all nodes of a graph. Collective."""
    wrong = sorted(set(own) - {"hidden", "new_nodes", "allow"})
    flags = {own.get(name, "true") for name in ("hidden", "new_nodes")}
    if wrong or out.suffix != ".parquet" or flags - {"true", "false"}:
        raise UserError(
            f"{checkpoint} is of a model of nodes: hetmpi predict takes out=FILE.parquet, hidden and new_nodes, "
            "true or false" + (f", not {wrong[0]}" if wrong else "")
        )
    outputs = NodeOutputs(world, checkpoint, overrides, config_dir, own["allow"], own.get("new_nodes") == "true")
    num = outputs.write(out, own.get("hidden") == "true")
    if world.rank == 0:
        print(f"hetmpi: {out}: {num:,} nodes", flush=True)


def predict_links(world: World, checkpoint: Path, overrides: list[str], own: dict, out: Path):
    """Answers questions about links. Collective."""
    given = dict(value_of(text) for text in overrides)
    wrong = sorted((set(own) | set(given)) - {*OF_LINKS, "allow"})
    if wrong or "data.path" not in given or out.suffix != ".parquet":
        raise UserError(
            f"{checkpoint} is of task=link: hetmpi predict takes data.path=QUESTIONS, out=FILE.parquet, top=K and "
            "without=FOLDER" + (f", not {wrong[0]}" if wrong else "")
        )
    top = top_of(own)
    without = own["without"].strip("'\"") if "without" in own else None
    answers = LinkAnswers(world, checkpoint, without, own["allow"])
    num = answers.write(given["data.path"].strip("'\""), out, top)
    if world.rank == 0:
        print(f"hetmpi: {out}: the best answers, at most {top} each, to {num:,} question(s)", flush=True)


def top_of(own: dict) -> int:
    """The number of answers to a question. Raises UserError."""
    top = own.get("top", "10")
    if not top.isdecimal() or not 1 <= int(top) <= LARGEST_TOP:
        raise UserError(f"top must be an integer from 1 to {LARGEST_TOP:,}, got {one_line(top)}")
    return int(top)


def predict_items(world: World, checkpoint: Path, overrides: list[str], own: dict, out: Path):
    """Finds the best items for the queries in files. Collective."""
    wrong = sorted(set(own) - {"items", "top", "predict.keep", "allow"})
    if wrong or "items" not in own or out.suffix != ".parquet":
        raise UserError(
            f"{checkpoint} is of task=retrieval: hetmpi predict takes data.path=QUERIES, items=ITEMS.parquet, "
            "out=FILE.parquet, top=K and predict.keep" + (f", not {wrong[0]}" if wrong else "")
        )
    top, keep = top_of(own), tuple(checked({"predict.keep": own.get("predict.keep", "")})["keep"])
    given = dict(value_of(text.lstrip("+")) for text in overrides)
    items = Path(own["items"].strip("'\""))
    num = BestItems(world, checkpoint, given, items, top, keep, own["allow"]).write(out)
    if world.rank == 0:
        print(f"hetmpi: {out}: the best items, at most {top} each, for {num:,} rows", flush=True)


def checked(own: dict[str, str]) -> dict:
    """split, start, stop and keep, checked. Raises UserError."""
    own["keep"] = names_of(own.pop("predict.keep", ""))
    if own.get("split", "valid") not in ("valid", "train"):
        raise UserError(f"split must be valid or train, got {own['split']}")
    for name in ("start", "stop"):
        if name in own:
            if not own[name].isdecimal():
                raise UserError(f"{name} must be an integer of at least 0, got {own[name]}")
            own[name] = int(own[name])
    return own


def names_of(text: str) -> list[str]:
    """The names in [NAME,...], with or without quotes, between which a comma is part of a name."""
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    return [name.strip().strip("'\"") for name in re.findall(NAME_TEXT, text)]


class Prediction:
    """The predictions of one checkpoint for files or for positions of a source.

    parts  what one rank predicts at a time, in order; rank r takes parts r, r + size, ..."""

    def __init__(
        self, world: World, checkpoint: Path, overrides: list[str], config_dir: str | None = None,
        split: str | None = None, start: int | None = None, stop: int | None = None, keep: list[str] | None = None,
        allow: Sequence[str] = (), ids: str | None = None,
    ):  # fmt: skip
        """overrides: Hydra overrides of data settings. keep: columns of files to write. allow: as for dense_layers.
        ids: as on the command line. Collective. Raises UserError for an incomplete checkpoint, an unsupported kind of
        model, and data with other features."""
        self.world, self.checkpoint, self.keep = world, checkpoint, keep or []
        self.manifest = read_manifest(checkpoint)
        tables, shards = tables_of(self.manifest), shards_of(checkpoint, self.manifest)
        for shard in (shard for of_table in shards.values() for shard in of_table):
            shard.check()
        if len(tables) > 1 and "joined" not in self.manifest:
            raise UserError(
                f"{checkpoint} has {len(tables)} tables, of a task of your own: hetmpi predict cannot use it"
            )
        self.saved = {name or TABLE: Saved(table, shards[name]) for name, table in tables.items()}
        state = dense_state(checkpoint, self.manifest)
        self.model, _ = dense_layers(checkpoint, self.manifest, state, allow)
        self.encoder = encoder_of(checkpoint, self.manifest, state)
        if ids is not None:
            self.encoder, tables_of_ids = replaced(self.encoder, folders_of(ids.strip("'\"")))
            check_widths(ids, self.saved, tables_of_ids)
            self.saved |= tables_of_ids
        given = {text.lstrip("+").split("=")[0] for text in overrides}
        of_positions = (split, start, stop) != (None, None, None) or "data" in given
        of_files = self.encoder is not None and "data.path" in given and not of_positions
        self.reader: Reader | None = None
        if of_files:
            self.parts = self._of_files(overrides)
        elif self.keep:
            raise UserError("predict.keep needs data.path=FILES, of which it keeps columns, without split, start, stop")
        else:
            self.parts = self._of_split(overrides, config_dir, split or "valid", start or 0, stop)

    def _of_files(self, overrides: list[str]) -> list[Part]:
        """A part for each unit of the files."""
        given = dict(value_of(text.lstrip("+")) for text in overrides)
        wrong = sorted(set(given) - set(OF_FILES))
        if wrong:
            raise UserError(
                f"hetmpi predict reads files as the run did: {wrong[0]} cannot be given, only {', '.join(OF_FILES)}"
            )
        own = [*self._names, *([CLASS] if self._classes else [])]
        repeated = {name for name in self.keep if self.keep.count(name) > 1 or name in own}
        if repeated:
            raise UserError(f"predict.keep: {repeated.pop()} would be in the result twice")
        self.coverage = Coverage(self.encoder)
        self.reader = reader_of(given, self.encoder.reading, tuple(self.keep))
        check_same_files(self.world, self.reader.files)
        find_kept_types(self.world, self.reader)

        def part(unit):
            for block in self.reader.blocks(unit):
                kept = block.select([KEPT + name for name in self.keep]).rename_columns(self.keep)
                try:
                    samples = self.encoder.samples(block)
                except DataError as error:
                    raise DataError(f"data.path: {unit}, {error}") from error
                self.coverage.add(block, samples)
                yield kept, samples

        self._check_features(f"{DENSE}: data", self.encoder, len(self.encoder.dense_names))
        self.make_batch = batches_of(self.encoder)
        return [lambda unit=unit: part(unit) for unit in self.reader.units]

    def _of_split(self, overrides: list[str], config_dir: str | None, split: str, start: int, stop) -> list[Part]:
        """A part for each PART_SAMPLES positions of a split."""
        before = encoder_before(self.checkpoint, None)
        source = source_of(self.world, self.manifest, overrides, config_dir, before, self.encoder)
        self._check_features(f"data={source.name}", source, getattr(source, "num_dense", None))
        encoder = getattr(source, "encoder", None)
        if self.encoder is not None and encoder is not None and self.encoder.difference(encoder):
            raise UserError(f"{self.checkpoint} was trained on other data: {self.encoder.difference(encoder)}")
        most = source.num_valid if split == "valid" else source.num_train
        if most is None and stop is None:
            raise UserError(f"data={source.name} is infinite: give stop=N")
        if most == 0:
            raise UserError(f"data={source.name} has no samples in its {split} split")
        if most is not None:
            check_integer("start", start, 0, most - 1)
        stop = most if stop is None else stop
        check_integer("stop", stop, start + 1, LARGEST if most is None else most)
        draw = getattr(source, split)

        def part(begin: int):
            samples = draw(begin, min(begin + PART_SAMPLES, stop))
            yield None, samples if self.encoder is None else self.encoder.keyed(samples)

        self.make_batch = batches_of(source)
        return [lambda begin=begin: part(begin) for begin in range(start, stop, PART_SAMPLES)]

    def write(self, out: Path) -> tuple[int, float]:
        """Writes the predictions of all parts to `out`, in order, after all ranks have read their rows. Returns their
        number and mean on rank 0, (0, 0.0) on others. Collective. Raises UserError if the file cannot be written, and
        on every rank if too many rows are bad."""
        if out.suffix == ".npy" and self.keep:
            raise UserError("predict.keep needs out=FILE.parquet: a .npy file has no columns")
        torch.set_num_threads(1)  # sums of more threads have other roundings
        with part_of(out) if self.world.rank == 0 else contextlib.nullcontext() as part:
            found = self._send() if part is None else self._write(out, part)
            self.world.meet("for rank 0 to write the predictions")
            self._report_bad()
        self._report_coverage()
        return found

    def _report_bad(self):
        """Checks the number of dropped rows of all ranks, and prints them. Collective."""
        if self.reader is None:
            return
        bad = sum(self.world.comm.allgather(self.reader.bad), BadRows())
        bad.check(self.reader.path, self.reader.max_bad_rows)
        if bad.rows and self.world.rank == 0:
            print(f"{self.reader.path}: {bad}", flush=True)

    def _report_coverage(self):
        """Warns of columns of the files without values, or of mostly unseen ones. Collective."""
        if self.reader is None:
            return
        self.coverage.counts = self.world.comm.allreduce(self.coverage.counts)
        doubt = self.reader.doubt if self.world.rank == 0 else None
        if doubt:
            print(f"hetmpi: warning: {doubt}", flush=True)
        for remark in self.coverage.remarks() if self.world.rank == 0 else ():
            print(f"hetmpi: warning: {self.reader.path}, {remark}", flush=True)

    @property
    def _names(self) -> list[str]:
        """Of the columns of predictions."""
        name = "prediction" if self._are_numbers else "probability"
        classes = self._classes
        if classes:
            return [f"{name}_{one}" for one in classes]
        num = self.manifest.get("model_sizes", {}).get(LABELS, 1)
        if num == 1:
            return [name]
        labels = range(num) if self.encoder is None else self.encoder.reading.labels
        return [f"{name}_{label}" for label in labels]

    @property
    def _classes(self) -> Sequence[str]:
        """Names of the classes, of which a model has probabilities; () of labels."""
        num = self.manifest.get("model_sizes", {}).get(CLASSES, 0)
        names = list(map(str, range(num))) if self.encoder is None else self.encoder.classes
        if len(names) != num:
            raise UserError(f"{self.checkpoint}: its model has {num:,} classes, its data {len(names):,}")
        return names

    def _write(self, out: Path, part: Path) -> tuple[int, float]:
        """On rank 0: computes and receives all parts and writes them to the file `part`. out: for messages."""
        write = write_parquet if out.suffix == ".parquet" else write_npy
        return write(out, part, self._in_order(), self._names)

    def _in_order(self) -> Iterator[pa.Table]:
        """On rank 0: the predictions of all parts, computed here or received."""
        for number, part in enumerate(self.parts):
            rank = number % self.world.size
            if rank == 0:
                yield from self._predicted(part)
                continue
            while (table := self.world.comm.recv(source=rank)) is not None:
                yield table

    def _send(self) -> tuple[int, float]:
        """On another rank: computes its parts and sends them."""
        sent, comm = deque(), self.world.comm
        for part in self.parts[self.world.rank :: self.world.size]:
            for table in itertools.chain(self._predicted(part), [None]):
                sent.append(comm.isend(table, dest=0))
                if len(sent) > MOST_SENT:
                    sent.popleft().wait()
        for request in sent:
            request.wait()
        return 0, 0.0

    @torch.no_grad()
    def _predicted(self, part: Part) -> Iterator[pa.Table]:
        """Kept columns and predictions of a part, in blocks."""
        for kept, samples in part():
            found = [self._logits(samples[i : i + BATCH_SIZE]) for i in range(0, len(samples), BATCH_SIZE)]
            names = self._names
            values = torch.cat(found).view(-1, len(names)) if found else torch.empty(0, len(names))
            columns = {} if kept is None else {key: kept[key] for key in kept.column_names}
            if self._classes:
                values = torch.softmax(values, 1)
                columns[CLASS] = pa.array(self._classes, pa.string()).take(pa.array(values.argmax(1).numpy()))
            elif not self._are_numbers:
                values = torch.sigmoid(values)
            yield pa.table({**columns, **dict(zip(names, values.T.contiguous().numpy()))})

    def _logits(self, samples: Samples) -> torch.Tensor:
        """(B,), or (B, K) of K labels or classes."""
        batch = self.make_batch(samples)
        rows = {}
        for name, keys in batch.keys.items():
            rows[name] = np.empty((len(keys), self.saved[name].dim), np.float32)
            self.saved[name].read(keys.numpy(), rows[name])
        rows = {name: torch.from_numpy(found) for name, found in rows.items()}
        return self.model(rows if isinstance(self.model, FeatureRows) else rows[TABLE], batch)

    def _rows_of(self, name: str, table: FeatureTable) -> int:
        """Rows that a table of the samples must have. One without a fixed vocabulary was saved with those it had."""
        if table.open is None or name not in self.saved:
            return table.num_rows
        has_room = isinstance(self.saved[name], IdTable) or self.saved[name].num_rows <= table.num_rows
        return self.saved[name].num_rows if has_room else table.num_rows

    @property
    def _are_numbers(self) -> bool:
        return self.encoder is not None and self.encoder.reading.label_kind == NUMBER

    def _check_features(self, name: str, source: Source | Encoder, num_dense: int):
        """Raises UserError if the samples have other features than those the model was trained on. name: of the source
        or of what encodes files, for messages. num_dense: its numbers per sample."""
        features = getattr(source, "features", None)
        num_rows = {name: self._rows_of(name, table) for name, table in getattr(source, "tables", {}).items()}
        found = {
            "num_fields": num_fields_of(features) if features is not None else getattr(source, "num_fields", None),
            "num_dense": num_dense,
            "num_rows": num_rows or {TABLE: getattr(source, "num_rows", None)},
        }
        sizes = self.manifest.get("model_sizes", {})
        trained = {name: sizes.get(name) for name in ("num_fields", "num_dense")}
        trained["num_rows"] = {name: saved.num_rows for name, saved in self.saved.items()}
        if found != trained:
            raise UserError(
                f"{self.checkpoint} was trained on data with {sizes_text(trained)}, {name} has {sizes_text(found)}"
            )


def check_widths(ids: str, saved: dict[str, Saved], tables: dict[str, IdTable]):
    """Raises UserError unless the tables of an export have the width of the checkpoint's."""
    for name in tables:
        if saved[name].dim != tables[name].dim:
            raise UserError(
                f"ids={one_line(ids)}: its rows have {tables[name].dim} numbers, the checkpoint's {saved[name].dim}"
            )


def write_parquet(out: Path, part: Path, tables: Iterator[pa.Table], names: list[str]) -> tuple[int, float]:
    """Writes tables with the columns `names` of predictions to the file `part`. out: for messages. Returns the number
    of rows, and the mean of all predictions. Raises UserError."""
    rows, num, total = RowsFile(out, part), 0, 0.0
    for table in (table for table in tables if len(table)):
        num, total = num + len(table), total + float(predictions(table, names).mean(1, dtype=np.float64).sum())
        rows.write(table)
    rows.close()
    return num, total / max(1, num)


def predictions(table: pa.Table, names: list[str]) -> np.ndarray:
    """(n, K) float32."""
    return np.stack([table[name].to_numpy() for name in names], 1)


def write_npy(out: Path, part: Path, tables: Iterator[pa.Table], names: list[str]) -> tuple[int, float]:
    """As write_parquet, without other columns."""
    parts = [predictions(table, names) for table in tables]
    if not sum(map(len, parts)):
        raise UserError("data.path has no rows to predict")
    whole = np.concatenate(parts)
    whole = whole[:, 0] if len(names) == 1 else whole
    with cannot_write(out), open(part, "wb") as file:
        np.save(file, whole)
    return len(whole), float(whole.mean(dtype=np.float64))


def batches_of(source) -> Callable:
    """The function that makes batches of a source's or an encoder's samples."""
    features = getattr(source, "features", None)
    return to_batch if features is None else FeatureBatches(features, list(source.tables))


def sizes_text(sizes: dict) -> str:
    return ", ".join(
        f"{name}={size.get(TABLE) if isinstance(size, dict) and list(size) == [TABLE] else size}"
        for name, size in sizes.items()
    )


if __name__ == "__main__":
    launch(main)
