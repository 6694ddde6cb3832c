"""Builds the parts of a run from the settings: source, task, model and its tables, dense optimizer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import hydra
import numpy as np
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from hetmpi import _C
from hetmpi.checkpoint.checkpoints import Position
from hetmpi.data.files import all_files
from hetmpi.data.source import Source
from hetmpi.data.tabular import Encoder, Tabular
from hetmpi.data.tabular.stream import Ranks, Stream
from hetmpi.dense import DenseOptimizer
from hetmpi.errors import UserError, doing, one_line
from hetmpi.gpu import gpu_of
from hetmpi.memory import check_fits
from hetmpi.open_rows import FIRST_KEY
from hetmpi.owner.gpu_rows import GpuStore
from hetmpi.owner.route import make_partition
from hetmpi.owner.row_files import FileStore, least_bytes
from hetmpi.owner.store import Layout, layouts_of
from hetmpi.run.config import cache_of, is_evaluated_at_end_only, own_settings, staleness_of
from hetmpi.run.device import PRECISIONS
from hetmpi.run.id_rows import IDS, folders_of
from hetmpi.run.model_keys import argument_kinds
from hetmpi.run.pretrained import fill_from, fill_ids
from hetmpi.schedule import Schedule
from hetmpi.spans import Spans
from hetmpi.table.client import MOST_AHEAD
from hetmpi.table.group import TableGroup
from hetmpi.table.optim import OF_RULES, ROW_RULES, RowOptimizer
from hetmpi.table.spec import TableSpec
from hetmpi.table.table import EmbeddingTable, ahead_at_0, check_on_gpu
from hetmpi.table.vocabularies import Vocabularies
from hetmpi.table.vocabulary import Vocabulary
from hetmpi.tasks.task import Task
from hetmpi.world.memory import free_memory, refuse_if_short, size_text
from hetmpi.world.mpi import MPI
from hetmpi.world.same_files import File, check_same_entries, check_same_files, times_of
from hetmpi.world.world import World

CLASS_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
STALENESS_PER_BATCH = 10  # of table.staleness, for each batch of a pull by default
LONGEST_REFUSAL = 900  # characters
MOST_LOG_STEPS, LEAST_LOG_LINES = 100, 20
MOST_EPOCHS_EVALUATED = 20  # at most, by default
# What a task gives to the constructor of a model.
SIZES = {
    "dim", "num_fields", "num_dense", "num_labels", "num_classes", "num_layers", "fields", "numbers", "sequences",
}  # fmt: skip
OF_CLASSES = ("wdl", "dnn", "dcn", "dcnv2", "dlrm", "din")  # models of clicks that have a logit per class
OWN_OPTIM = (  # settings that a table may have of its own
    "rows", "rows_lr", "rows_weight_decay", "rows_momentum", "rows_l1", "rows_l2",
)  # fmt: skip


def make(config: DictConfig, **arguments):
    """The object of class config._target_; Hydra passes the arguments themselves, not copies. Raises UserError if the
    class is missing, rejects these arguments, or does not fit in memory, and for a ValueError of hetmpi's models, which
    names a wrong size; passes on other errors of the class."""
    target = config.get("_target_")
    if not isinstance(target, str) or not CLASS_NAME.fullmatch(target):
        raise UserError(f"_target_ must name a class, as package.module.Class, got {one_line(repr(target), 100)}")
    with doing(f"making {target}"):
        try:
            return factory_of(config, target)(**arguments)
        except TypeError as error:
            if target.startswith("torch.nn.") and not is_of_the_call(error):  # it takes tensors
                raise UserError(f"{target}: {one_line(error)}: the keys must be numbers or words") from error
            if not is_of_the_call(error):
                raise
            cure = "the keys must be the arguments of its constructor"
            if any(f"'{name}'" in str(error) for name in arguments):
                cure = f"it must take {', '.join(arguments)} to be used here"
            if "'group'" in str(error):
                cure = "eval.group is for a task that takes it, as task=ctr"
            raise UserError(f"{target}: {error}: {cure}") from error
        except UserError as refusal:
            if len(str(refusal)) <= LONGEST_REFUSAL:
                raise
            raise UserError(one_line(refusal, LONGEST_REFUSAL)) from refusal  # it shows a long value
        except ValueError as error:
            if not target.startswith("hetmpi.models."):
                raise
            raise UserError(f"settings: {error}") from error
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            num_bytes = re.search(r"allocate (\d+) bytes", str(error))
            size = size_text(int(num_bytes[1])) if num_bytes else "its size"
            raise UserError(
                f"{target}: not enough memory for a tensor of {size}: lower table.dim or the widths of its layers"
            ) from error


def factory_of(config: DictConfig, target: str) -> Callable:
    """The function that makes the object from the other keys of config. Raises UserError if target names no class."""
    try:
        return instantiate(config, _partial_=True)
    except InstantiationException as error:
        cause = error.__cause__
        if cause is None:  # target names another kind of object
            raise UserError(f"_target_={target} names no class: {' '.join(str(error).split())}") from error
    if isinstance(cause, ImportError) and cause.__cause__ is not None:
        cause = cause.__cause__
        if isinstance(cause, AttributeError) or f"{target}.".startswith(f"{getattr(cause, 'name', None)}."):
            raise UserError(
                f"cannot import {target} ({cause}): start in the folder of its file, or add the folder to PYTHONPATH"
            ) from cause
    raise cause


def is_of_the_call(error: BaseException) -> bool:
    """Whether the error was raised by a call in this file or Hydra's, and not inside the called function."""
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    file = frame.tb_frame.f_code.co_filename
    return file == __file__ or Path(file).is_relative_to(Path(hydra.__file__).parent)


class Parts(NamedTuple):
    """A run before its memory is taken."""

    source: Source
    task: Task
    model: torch.nn.Module
    specs: dict[str, TableSpec]


def make_parts(
    world: World,
    config: DictConfig,
    device: torch.device,
    source: Source | None = None,
    model: torch.nn.Module | None = None,
    resumed: tuple | None = None,
    before: Encoder | None = None,
) -> Parts:
    """source (prepared), model: replace those that the settings name. resumed: of a stream, as its open(). before: the
    encoder with which the data begin. Collective. Raises UserError."""
    if config.table.store in ("gpu", "pinned"):  # before data are prepared
        check_on_gpu(world, staleness_of(config), device, config.table.store)
    if source is None:
        source = make(config.data)
        if before is not None and hasattr(source, "begin_with"):
            source.begin_with(before)
        if hasattr(source, "needed"):
            source.needed = {*texts_in(config.model), *texts_in(config.task), *texts_in(config.eval.group)}
        prepare(source, world, config, resumed)
    task = make_task(config, source, device)
    model = model or make_model(config, task)
    return Parts(source, task, model, task.tables(model))


def texts_in(value) -> Iterator[str]:
    """The texts among the values of settings, some of which are names of columns."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (DictConfig, ListConfig)):
        for part in value.values() if isinstance(value, DictConfig) else value:
            yield from texts_in(part)


def prepare(source: Source, world: World, config: DictConfig, resumed: tuple | None = None):
    """Prepares the data; of a stream the first file, or that of the checkpoint (`resumed`). Collective. Raises
    UserError for files that the sources of this package cannot read, and for impossible settings, before any file is
    read."""
    if stream_of(source) is not None:
        check_stream(config)
    optimizer_of(config, "settings", {}, Schedule())
    for rule in getattr(source, "rules", ()):  # of data.columns
        optimizer_of(config, str(rule), rule.settings.get("optim", {}), Schedule())
        cache_of(config, str(rule), rule.settings.get("cache", {}))
    try:
        with doing(f"prepare() of data={config.data_name}"):
            ranks = ranks_of(world)
            if stream_of(source) is not None:
                stream_of(source).open(ranks, resumed)
            else:
                prepare_files(source, world)
    except OSError as error:
        if type(source).__module__.startswith("hetmpi."):
            raise UserError(f"data={config.data_name}: {error}") from error
        raise


def prepare_files(source: Source, world: World):
    """Prepares a source, and compares over the ranks what it reads. Collective. Raises UserError."""
    if callable(getattr(source, "files", None)):
        check_same_files(world, source.files)
    if isinstance(source, Tabular):  # copies on the disks of nodes may have other times
        source.times = world.from_first(lambda: times_of(source.files))
    ranks = ranks_of(world)
    source.prepare(ranks.rank, ranks.size, ranks.barrier)
    contents = getattr(source, "contents", {})
    check_same_entries(world, [File(name, 0, digest) for name, digest in contents.items()])


def stream_of(source: Source) -> Stream | None:
    """The stream of a source with data.follow=true."""
    return getattr(source, "stream", None)


def ranks_of(world: World) -> Ranks:
    return Ranks(
        world.rank, world.size, lambda: world.meet("for all ranks to prepare the data"), world.from_first,
        partial(check_same_files, world),
    )  # fmt: skip


def make_task(config: DictConfig, source: Source, device: torch.device) -> Task:
    """The task, with its loss. Raises UserError for a loss with parameters, which would not be trained."""
    loss = make(loss_config(config.loss))
    if isinstance(loss, torch.nn.Module):
        loss = loss.to(device)
        if next(loss.parameters(), None) is not None:
            raise UserError(f"loss={config.loss_name}: it has parameters, which are not trained: put them in the model")
    group = {} if config.eval.group is None else {"group": config.eval.group}
    task = make(config.task, source=source, loss=loss, **group)
    if Task not in type(task).__mro__:
        raise UserError(f"{config.task._target_}: it must inherit hetmpi.tasks.task.Task")
    return task


def loss_config(config: DictConfig) -> DictConfig:
    """The settings of the loss. hetmpi's own files set pos_weight or class_weights to null; a loss of another class may
    lack that argument, so for it the null is left out."""
    unset = [key for key in ("pos_weight", "class_weights") if key in config and config[key] is None]
    if not unset or str(config.get("_target_")).startswith("hetmpi."):
        return config
    return OmegaConf.masked_copy(config, [key for key in config if key not in unset])


def make_model(config: DictConfig, task: Task) -> torch.nn.Module:
    """The model, whose initial parameters depend only on the seed. Raises UserError if it does not fit into memory."""
    arguments = task.model_arguments(config.table.dim)
    if str(config.model.get("_target_")).startswith("hetmpi.models."):
        check_takes(config, arguments)
        check_model_fits(config, arguments)
    torch.manual_seed(config.seed)
    model = make(config.model, **arguments)
    task.tables(model)  # raises an error for a model that does not specify its tables
    model = task.complete(model)
    if task.has_dense_layers and next(model.parameters(), None) is None:
        raise UserError(f"{config.model._target_}: it has no parameters, give it at least one dense layer")
    return model


def check_takes(config: DictConfig, arguments: Mapping):
    """Raises UserError for one of hetmpi's models that is of another task than the one that gives these arguments."""
    kinds = argument_kinds(config.model._target_)
    sizes, is_of_clicks = SIZES & set(kinds), "num_fields" in arguments
    if is_of_clicks and "num_classes" not in arguments:
        sizes -= {"num_classes"}  # an optional argument
    differing = sizes ^ set(arguments) if kinds else set()
    if is_of_clicks and "num_classes" in differing:
        raise UserError(
            f"model={config.model_name} has one logit per label, data.label_kind=classes needs one per class: choose "
            f"model={', '.join(OF_CLASSES)}"
        )
    if differing == {"num_labels"}:
        raise UserError(
            f"model={config.model_name}: sharedbottom, mmoe and ple are for several labels, data.label=[A, B], all "
            "other models for one"
        )
    if differing:
        raise UserError(
            f"model={config.model_name} is not for {config.task._target_}: docs/models.md has the models of each task"
        )


def check_model_fits(config: DictConfig, arguments: Mapping):
    """Raises UserError if the parameters and their gradients do not fit into memory, before it is taken."""
    with torch.device("meta"):
        model = make(config.model, **arguments)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    check_fits(2 * nbytes, f"settings: model={config.model_name}", "lower table.dim or the widths of its layers")


def generator_of_dropout(model: torch.nn.Module, device: torch.device) -> torch.Generator | None:
    """torch's generator on the device if the model has a layer of dropout that is in use, else None."""
    kinds = torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d, torch.nn.AlphaDropout
    if not any(isinstance(layer, kinds) and layer.p > 0 for layer in model.modules()):
        return None
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]


def seed_of(seed: int, step: int, rank: int) -> int:
    """Seed of that generator for a rank's forward pass in a step: each rank and step has its own, and a resumed run
    has those of a run without a stop."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0])


def make_tables(
    config: DictConfig, world: World, specs: dict[str, TableSpec], most_keys: dict[str, int], schedule: Schedule,
    device: torch.device, spans: Spans, stores: Mapping[str, FileStore | GpuStore] | None = None,
) -> TableGroup:  # fmt: skip
    """The tables of a model, with one transport. most_keys: as most_keys_of. stores: of rows not in host memory, None
    for those of the settings. Collective."""
    tables, exchange = {}, config.table.exchange
    per_pull = batches_per_pull(config, world, specs, most_keys, device)
    stores = stores_of(config, world, specs) if stores is None else stores
    for name, spec in specs.items():
        tables[name] = made = EmbeddingTable(
            world, spec.num_rows, spec.dim, optimizer_of(config, f"table {name}", spec.optim, schedule), name=name,
            partition=partition_of(config, spec), seed=config.seed, staleness=staleness_of(config),
            init_std=init_std_of(config, spec),
            first_rows=None if spec.open is None else FIRST_KEY,
            cache=cache_of(config, f"table {name}", spec.cache), spans=spans, exchange=exchange, device=device,
            batches_per_pull=per_pull, store=stores.get(name),
        )  # fmt: skip
        if exchange == "auto" and made.client.channel.name is not None:
            exchange = made.client.channel.name  # what the first table's trial has chosen
    return TableGroup(tables)


def stores_of(config: DictConfig, world: World, specs: dict[str, TableSpec]) -> dict[str, FileStore | GpuStore]:
    """Those of tables whose rows are not simply in host memory. On disk they share table.store_memory_gb by their
    sizes. Collective."""
    table = config.table
    if table.store == "memory":
        return {}
    if table.store in ("gpu", "pinned"):
        return dict.fromkeys(specs, GpuStore(table.store == "pinned"))
    total = None if table.store_memory_gb is None else table.store_memory_gb * 1e9
    if total is None:
        free = free_memory(False)[1] / 2 / world.node.size
        total = world.comm.allreduce(free, MPI.MIN)
    layouts = {name: layout_of(config, world, name, spec, "file")[1] for name, spec in specs.items()}
    least = {name: world.comm.allreduce(least_bytes(layout), MPI.MAX) for name, layout in layouts.items()}
    left = total - sum(least.values())
    if left < 0:
        raise UserError(
            f"table.store_memory_gb: {total / 1e9:.3g} on each rank, the tables need at least "
            f"{sum(least.values()) / 1e9:.3g}, most of it for clocks and marks"
        )
    sizes = {name: spec.num_rows * spec.dim for name, spec in specs.items()}
    whole = sum(sizes.values())
    return {name: FileStore(table.store_dir, least[name] + int(left * size / whole)) for name, size in sizes.items()}


def layout_of(config: DictConfig, world: World, name: str, spec: TableSpec, store: str) -> tuple[_C.Partition, Layout]:
    """A table's partition, and this rank's memory."""
    rule = optimizer_of(config, f"table {name}", spec.optim, Schedule()).core(spec.dim)
    partition = make_partition(partition_of(config, spec), spec.num_rows, world.size)
    is_exact = staleness_of(config).is_exact
    _, layouts = layouts_of(world, partition, rule, spec.dim, is_exact, store=store)
    return partition, layouts[world.rank]


def partition_of(config: DictConfig, spec: TableSpec) -> str:
    """That of a table. The rows in use of a table without a fixed vocabulary are the first ones of each shard."""
    return config.table.partition if spec.open is None else "round_robin"


def init_std_of(config: DictConfig, spec: TableSpec) -> float:
    return config.table.init_std if spec.init_std is None else spec.init_std


def make_vocabularies(
    config: DictConfig, world: World, source: Source, specs: dict[str, TableSpec], tables: Mapping[str, EmbeddingTable]
) -> Vocabularies:
    """Those of tables without a fixed one. Collective."""
    found, every = {}, config.table.maintain_steps
    for name, spec in specs.items():
        if spec.open is not None:
            columns = ", ".join(feature.name for feature in source.features if feature.table == name)
            label = f"the table of {one_line(columns, 300)}"
            found[name] = Vocabulary(tables[name], spec.open, config.seed, init_std_of(config, spec), every, label)
    return Vocabularies(world, found, every)


def batches_per_pull(
    config: DictConfig, world: World, specs: dict[str, TableSpec], most_keys: dict[str, int], device: torch.device
) -> int:
    """table.batches_per_pull, of all tables, which share messages, as far as the bound and the caches allow; or its
    default. most_keys: as most_keys_of."""
    table = config.table
    caches = {name: cache_of(config, f"table {name}", spec.cache) for name, spec in specs.items()}
    lines = sum(caches[name].rows(spec.num_rows, world, device) for name, spec in specs.items())
    if table.batches_per_pull is None:
        return default_per_pull(table.staleness, lines, sum(most_keys.values()))
    bound = MOST_AHEAD if table.staleness is None else table.staleness
    return max(1, min(table.batches_per_pull, bound)) if lines > 0 else 1  # without lines nothing is announced


def default_per_pull(staleness: int | None, lines: int, most_keys: int) -> int:
    """The default of table.batches_per_pull. lines: of all caches of a rank; most_keys: of a batch, repeated ids
    counted."""
    num = MOST_AHEAD if staleness is None else staleness // STALENESS_PER_BATCH
    return max(1, min(MOST_AHEAD, num, lines // max(1, most_keys)))


def batches_ahead(config: DictConfig, tables: Mapping[str, EmbeddingTable]) -> int:
    """Number of batches that are announced before they are read: most_ahead(), but at s = 0 none where a trial says
    that this does not pay, unless table.look_ahead is set."""
    table = next(iter(tables.values()))
    most = most_ahead(config, table.world, table.client.context.batches_per_pull)
    return most if config.table.look_ahead is not None else min(most, max(one.num_ahead for one in tables.values()))


def most_ahead(config: DictConfig, world: World, per_pull: int) -> int:
    """The most batches that are announced before they are read: at s = 0 as of ahead_at_0(), at s >= 1 those of one
    pull."""
    if config.table.look_ahead is False:
        return 0
    if not staleness_of(config).is_exact:
        return per_pull
    return ahead_at_0(config.table.store == "file", not world.is_one_node)


def optimizer_of(config: DictConfig, owner: str, own: Mapping, schedule: Schedule) -> RowOptimizer:
    """The optimizer of a table's rows. own: settings in place of those of `optim`, of this owner. Raises UserError."""
    values = own_settings(config, "optim", own, OWN_OPTIM, owner)
    if "rows" in own and "rows_lr" not in own:
        values["rows_lr"] = ROW_RULES.get(own["rows"])
    is_own = "rows" in own  # then settings of the run's rule do not hold
    of_rule = {name: own.get(f"rows_{name}") if is_own else values[f"rows_{name}"] for name in OF_RULES}
    of_rule = {name: value for name, value in of_rule.items() if value is not None}
    try:
        return RowOptimizer(
            values["rows"], values["rows_lr"], values["rows_weight_decay"], schedule=schedule, **of_rule
        )
    except UserError as error:
        raise UserError(f"{owner}: {error}") from error


def fill_tables(config: DictConfig, tables: TableGroup, source: Source) -> int:
    """Fills the rows in the files that table.init_from names, and returns their number. Collective. Raises UserError on
    every rank as fill_from does."""
    encoder, folders = getattr(source, "encoder", None), folders_of(config.table.init_from)
    world = next(iter(tables.values())).world
    check_same_files(world, lambda: [path for place in folders for path in all_files(str(place.absolute()))])
    if (folders[0] / IDS).exists() and hasattr(encoder, "open_columns"):
        seeds = {name: encoder.coders[name].seed for name in encoder.open_columns()}
        return fill_ids(tables, folders, encoder.open_columns(), seeds)
    columns = {} if encoder is None else encoder.by_value()
    known = {name: column for name, column in columns.items() if column.table in tables}
    return fill_from(tables, Path(config.table.init_from), known)


def make_dense(config: DictConfig, hvd, model: torch.nn.Module, schedule: Schedule, device) -> DenseOptimizer:
    optim = config.optim
    return DenseOptimizer(
        hvd, model, optim.dense, optim.dense_lr, optim.dense_weight_decay, schedule, device, optim.dense_clip_norm
    )


def total_steps(config: DictConfig, source: Source, world_size: int, start: Position) -> int | None:
    """Steps of a run that begins at `start`, those before it included; None for a stream, if `steps` does not limit
    it. Raises UserError for data without samples, and for endless data without `steps`."""
    num_train = source.num_train
    if stream_of(source) is not None:
        return None if config.steps is None else max(config.steps, start.step)
    if num_train is not None and num_train < 1 and config.steps != 0:
        raise UserError(
            f"data={config.data_name} has {num_train} training samples: give it at least one, or steps=0 to evaluate"
        )
    if config.steps is not None:
        return max(config.steps, start.step)
    if num_train is None:
        raise UserError(f"data={config.data_name} is infinite: give steps=N")
    left = max(0, config.epochs * num_train - start.samples)
    return start.step + math.ceil(left / (config.batch_size * world_size))


def log_steps(config: DictConfig, total_steps: int | None) -> int:
    """The number of steps between two log lines."""
    if config.log.every_steps is not None:
        return config.log.every_steps
    return MOST_LOG_STEPS if total_steps is None else min(MOST_LOG_STEPS, max(1, total_steps // LEAST_LOG_LINES))


def evaluations_due(config: DictConfig, source: Source, world_size: int, start: Position) -> Callable[[int], bool]:
    """Whether an evaluation is due after so many steps of a run that begins at `start`, besides the one at its end."""
    every = config.eval.every_steps
    if every is not None:
        return lambda step: every > 0 and step % every == 0
    if is_evaluated_at_end_only(config) or not source.num_train or source.num_valid < 1 or stream_of(source):
        return lambda step: False
    taken = config.batch_size * world_size
    span = math.ceil(config.epochs / MOST_EPOCHS_EVALUATED) * source.num_train

    def is_due(step: int) -> bool:
        samples = start.samples + (step - start.step) * taken
        return step > 0 and samples // span > (samples - taken) // span

    return is_due


def precision_of(config: DictConfig, device: torch.device) -> Callable[[], AbstractContextManager]:
    """Contexts in which the network is computed as train.precision says. Raises UserError for tf32 without a GPU."""
    is_tf32, dtype = config.train.precision == "tf32", PRECISIONS[config.train.precision]
    if gpu_of(device) is not None:
        torch.backends.cuda.matmul.allow_tf32 = is_tf32
    elif is_tf32:
        raise UserError("train.precision=tf32 is a format of GPUs, the device is cpu: set train.precision=float32")
    return nullcontext if dtype is None else partial(torch.autocast, device.type, dtype)


def check_accumulate(config: DictConfig, task: Task):
    """Raises UserError if train.accumulate asks for parts of a batch, and the task has none."""
    num = config.train.accumulate
    if num > 1 and getattr(type(task), "split", Task.split) is Task.split:
        raise UserError(
            f"train.accumulate={num}: {type(task).__name__} computes a batch as a whole: set train.accumulate=1 and a "
            "smaller batch_size"
        )


def check_stream(config: DictConfig):
    """Raises UserError for settings that data.follow=true excludes."""
    schedules = ("constant",) if config.steps is None else ("constant", "linear", "cosine")
    for name, is_wrong, cure in (
        (
            "eval.every_steps",
            (config.eval.every_steps or 0) > 0,
            "set it to 0, without eval.patience and checkpoint.best",
        ),
        ("optim.schedule", config.optim.schedule not in schedules, "set constant, or give steps=N for linear, cosine"),
        ("epochs", config.epochs not in (None, 1), "remove it"),
    ):
        if is_wrong:
            raise UserError(
                f"{name}={OmegaConf.select(config, name)} cannot be used with data.follow=true, whose files are read "
                f"once, in their order, each evaluated before it is trained on: {cure}"
            )


def check_final(config: DictConfig, world: World, task: Task, model: torch.nn.Module):
    """Raises UserError on every rank if a node lacks memory for the metrics at the end of the run. Collective."""

    def message(need, place, free):
        return (
            f"the metrics at the end of the run need {size_text(need)} on {world.host} for all nodes of the graph, "
            f"{size_text(free)} are free in {place}: set task.exact=false"
        )

    refuse_if_short(world, task.final_bytes(model) if world.node.rank == 0 else 0, world.node.size > 1, message)


def most_keys_of(
    config: DictConfig, task: Task, specs: dict[str, TableSpec], batch_size: int | None = None
) -> dict[str, int]:
    """Table -> largest number of keys of a batch, of training unless batch_size is given."""
    most = task.most_keys(config.batch_size if batch_size is None else batch_size)
    return {name: min(most[name], spec.num_rows) for name, spec in specs.items()}


def num_batches(
    config: DictConfig, world: World, task: Task, specs: dict[str, TableSpec], num_steps: int, device: torch.device
) -> int:
    """Largest number of batches that a rank holds at the same time: the current one, those announced, and those of the
    loader."""
    most_keys = most_keys_of(config, task, specs)
    ahead = most_ahead(config, world, batches_per_pull(config, world, specs, most_keys, device))
    return min(1 + ahead + config.loader.prefetch, max(1, num_steps))


def batch_bytes(config: DictConfig, task: Task, specs: dict[str, TableSpec], num: int) -> int:
    """Least memory of `num` batches, as of num_batches: samples, keys and rows."""
    num_keys = most_keys_of(config, task, specs)
    rows = sum(8 * spec.dim * num_keys[name] for name, spec in specs.items())  # and their gradients
    return num * config.batch_size * task.sample_bytes + rows


def check_batches(config: DictConfig, world: World, task: Task, specs: dict[str, TableSpec], num: int):
    """Raises UserError on every rank if a node lacks memory for the `num` batches that each of its ranks holds at the
    same time, counting only samples, keys and rows. Collective."""

    def message(need, place, free):
        return (
            f"batch_size={config.batch_size:,}: the {num:,} batches that loader.prefetch={config.loader.prefetch} and "
            f"table.batches_per_pull keep need at least {size_text(need)} for the {world.node.size} rank(s) on "
            f"{world.host}, {size_text(free)} are free in {place}: lower batch_size, loader.prefetch or "
            "table.batches_per_pull"
        )

    refuse_if_short(world, batch_bytes(config, task, specs, num), False, message)
