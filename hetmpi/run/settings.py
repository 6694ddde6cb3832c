"""The settings of a training, each declared once: its type, default, range and a line of help.

Hydra composes them (hetmpi/run/config.py). The checks of values, `hetmpi train --help` and docs/settings.md are derived
from these declarations. The keys of a model, a data set, a task or a loss are the arguments of its class; their
defaults are in conf/.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from itertools import groupby
from typing import Any, NamedTuple, get_args, get_type_hints

from hetmpi.dense import DENSE_RULES
from hetmpi.errors import LARGEST
from hetmpi.owner.route import PARTITIONS
from hetmpi.owner.row_files import STORES
from hetmpi.reductions import DENSE_EXCHANGES
from hetmpi.run.device import DEVICES, PRECISIONS
from hetmpi.schedule import SCHEDULES
from hetmpi.table.batch import MOST_AHEAD
from hetmpi.table.cache import ADMIT, POLICIES, ROW_BYTES, CacheSettings
from hetmpi.table.optim import DEFAULT_MOMENTUM, LARGEST_MOMENTUM, ROW_RULES
from hetmpi.table.staleness import LARGEST_BOUND, Staleness
from hetmpi.wire.transport import EXCHANGES

MANY = 1 << 40  # most steps, samples and rows: about a million million
LARGEST_BATCH = 1 << 30
LARGEST_LR = 1000  # also of weight decay, L1 and L2
LONGEST_S = 10_000_000  # 115 days
PathText = Any  # checked to be text; with type str Hydra would convert a number, as in resume=5


def setting(
    default, help: str, least: float = 0, most: float = LARGEST, choices=None, takes_class: bool = False,
    noun: str = "path",
):  # fmt: skip
    """Declares a setting. least, most: range of a number. choices: allowed words. takes_class: also allow the dotted
    name of a class. noun: meaning of a text without choices."""
    about = {"help": help, "least": least, "most": most, "choices": choices, "takes_class": takes_class, "noun": noun}
    return field(default=default, metadata=about)


def group(kind: type):
    return field(default_factory=kind)


@dataclass
class Cache:
    capacity_rows: int | None = setting(
        CacheSettings.capacity_rows,
        "rows that each rank caches, at a staleness of at least 1; give this or capacity_fraction",
        most=MANY,
    )
    capacity_fraction: float | None = setting(
        CacheSettings.capacity_fraction,
        "share of the table's rows that each rank caches; both null: 0.1, at staleness 0 none",
        most=1,
    )
    policy: str = setting(
        CacheSettings.policy,
        "row to evict; lru: least recently used; lfu: least frequently used; lfuopt: lfu with counts of at most 10",
        choices=POLICIES,
    )
    dtype: str = setting(
        CacheSettings.dtype,
        "type of cached rows; 16-bit types cost at most .0003 of AUC in docs/results.md; rows travel in 32 bits",
        choices=tuple(ROW_BYTES),
    )
    admit: str = setting(
        CacheSettings.admit,
        "rows to cache; offnode: those of other nodes; remote: those of other ranks; all; auto: offnode, on a GPU all",
        choices=ADMIT,
    )


@dataclass
class Table:
    dim: int = setting(16, "numbers per row", least=1, most=1 << 20)
    partition: str = setting("round_robin", "rule that assigns each row to an owner", choices=PARTITIONS)
    init_std: float = setting(0.01, "standard deviation of the initial rows", most=1000)
    init_from: PathText = setting(
        None,
        "Parquet file, or folder of Parquet files, with initial rows: weight (dim float32) and either key (int64), as "
        "`hetmpi export rows=parquet` writes, or an id column of the data with its values (docs/columns.md); other "
        "rows start at random; not read by a resumed run",
    )
    staleness: int | None = setting(
        0,
        "iterations by which a cached row may lag; 0: exact, without a cache; null: no bound but table.drift",
        most=LARGEST_BOUND - 1,
    )
    anticipate: float | None = setting(
        None,
        "factor of a rank's own updates of cached rows, to anticipate those of other ranks; null: the number of ranks; "
        "1: as in HET",
        most=1_000_000,
    )
    drift: float = setting(
        Staleness.drift,
        "with staleness above 0: a cached row is fetched again when the estimated errors of its uses, as other ranks "
        "move it, add up to more than this, relative to the size of a row; 0: no limit, as in HET",
        most=1_000_000,
    )
    round_steps: int | None = setting(
        None,
        "across nodes at a staleness above 0: coming steps whose rows one message requests ahead, and whose gradients "
        "it takes along; lowered to table.staleness; null: a tenth of table.staleness, 1 to 4, as far as the cache has "
        "lines for the keys of so many; 0: rows are requested at their read. At staleness 0, with messages, any "
        "other number turns look-ahead on, and null leaves it to a trial of the network",
        most=MOST_AHEAD,
    )
    exchange: str = setting(
        "auto",
        "transport between nodes; messages: of all ranks; windows: one-sided MPI; auto: the faster in a trial at the "
        "start",
        choices=EXCHANGES,
        takes_class=True,
    )
    maintain_steps: int = setting(
        1000,
        "with columns that have rows: open: steps between maintenances, at which ids may lose their rows and counts "
        "are halved",
        least=1,
        most=1 << 40,
    )
    store: str = setting(
        "memory",
        "where owners keep rows; file: in files in table.store_dir, for tables larger than the memory of all nodes",
        choices=STORES,
    )
    store_dir: PathText = setting(None, "with store=file: a folder on a local disk of each node; its files are scratch")
    store_memory_gb: float | None = setting(
        None,
        "with store=file: GB of memory of each rank for rows; null: its share of half of the node's free memory",
        most=1_000_000,
    )
    ranks_per_node: int | None = setting(
        None,
        "for tests: splits each node into nodes of this many ranks that communicate by MPI only",
        least=1,
        most=1 << 20,
    )
    cache: Cache = group(Cache)


@dataclass
class Optim:
    rows: str = setting("adagrad", "optimizer of the rows, applied by their owners", choices=tuple(ROW_RULES))
    dense: str = setting("adam", "optimizer of the dense layers", choices=tuple(DENSE_RULES))
    rows_lr: float | None = setting(
        None,
        "learning rate of the rows; null: " + ", ".join(f"{lr:g} for {rule}" for rule, lr in ROW_RULES.items()),
        most=LARGEST_LR,
    )
    dense_lr: float | None = setting(
        None,
        "learning rate of the dense layers; null: "
        + ", ".join(f"{lr:g} for {rule}" for rule, lr in DENSE_RULES.items()),
        most=LARGEST_LR,
    )
    rows_weight_decay: float = setting(0.0, "weight decay of the rows in the batch", most=LARGEST_LR)
    rows_momentum: float | None = setting(
        None, f"with rows=momentum: the momentum; null: {DEFAULT_MOMENTUM:g}", most=LARGEST_MOMENTUM
    )
    rows_l1: float = setting(
        0.0,
        "with rows=ftrl: L1 regularization; numbers of a row whose gradients do not outweigh it are exactly 0",
        most=LARGEST_LR,
    )
    rows_l2: float = setting(0.0, "with rows=ftrl: L2 regularization", most=LARGEST_LR)
    dense_weight_decay: float = setting(0.0, "weight decay of the dense layers", most=LARGEST_LR)
    dense_clip_norm: float | None = setting(
        None,
        "maximum of the global L2 norm of the dense layers' gradients, averaged over all ranks; larger ones are scaled "
        "down to it; null: no limit",
        least=1e-9,
        most=1_000_000_000,
    )
    dense_exchange: str = setting(
        "auto",
        "what averages the dense layers' gradients; horovod: its thread; mpi: a thread of hetmpi's own; auto: Horovod "
        "where all ranks have it",
        choices=DENSE_EXCHANGES,
    )
    schedule: str = setting(
        "constant",
        "decay of both learning rates over the run; plateau: after evaluations without an improvement of eval.metric",
        choices=SCHEDULES,
    )
    plateau_evals: int = setting(
        3, "with schedule=plateau: evaluations in a row without an improvement before a decay", least=1, most=MANY
    )
    plateau_decay: float = setting(0.5, "with schedule=plateau: factor of a decay", most=1)
    warmup_steps: int = setting(0, "steps over which both learning rates rise from 0", most=MANY)


@dataclass
class Eval:
    every_steps: int | None = setting(
        None,
        "steps between evaluations on held-out samples; 0: at the end only; null: after each epoch, or "
        "every few epochs if there are more than 20, and at the end",
        most=MANY,
    )
    metric: str | None = setting(
        None,
        "metric of the task that eval.patience and schedule=plateau watch; null: the task's first, as auc or accuracy",
        noun="name of a metric",
    )
    group: str | None = setting(
        None,
        "column of one id, such as a user's, over whose values the metric gauc is the mean of AUC; null: no gauc",
        noun="name of a column",
    )
    patience: int | None = setting(
        None,
        "training ends after this many evaluations in a row without an improvement of eval.metric; null: never",
        least=1,
        most=MANY,
    )
    max_samples: int | None = setting(None, "held-out samples to use; null: all", least=1, most=MANY)
    batch_size: int = setting(4096, "samples per rank and forward pass", least=1, most=LARGEST_BATCH)


@dataclass
class LoaderSettings:
    threads: int = setting(1, "threads per rank that prepare batches", least=1, most=1024)
    prefetch: int = setting(2, "batches prepared ahead", least=1, most=1024)


@dataclass
class Checkpoint:
    at_end: bool = setting(True, "save the model after the last step; with data.follow after each file")
    every_steps: int = setting(
        0, "steps between checkpoints; 0: only at the end or when a signal ends the run", most=MANY
    )
    keep: int = setting(2, "number of newest checkpoints to keep", least=1, most=MANY)
    best: str | None = setting(
        None,
        "metric of the task, such as auc: saves a checkpoint at each evaluation that improved it, and keeps the best "
        "one besides the newest; the link `best` in checkpoint.dir leads to it",
        noun="name of a metric",
    )
    full_every: int = setting(1, "every N-th checkpoint is full, the others hold only changed rows", least=1, most=MANY)
    dir: PathText = setting("${run.dir}/checkpoints", "folder of the checkpoints, accessible to all ranks")
    export_deltas: bool = setting(
        False,
        "with columns that have rows: open: write after each checkpoint to run.dir/deltas what has changed since the "
        "one before, by id; the first time all rows",
    )


@dataclass
class WatchdogSettings:
    seconds: float = setting(
        300,
        "time after which a rank that delays the others is reported, and one that does not respond aborts the job; "
        "doubled before a rank's first step; 0: never",
        most=LONGEST_S,
    )


@dataclass
class Log:
    every_steps: int = setting(100, "steps between log lines", least=1, most=MANY)


@dataclass
class Train:
    precision: str = setting(
        "float32",
        "numbers of the network's matrix products; bf16: 16 bits (torch.autocast), while rows, parameters and all "
        "gradients stay in 32",
        choices=tuple(PRECISIONS),
    )
    accumulate: int = setting(
        1,
        "forward and backward passes in which the batch of a step is computed, each with a share of its samples, so "
        "that a larger batch fits in memory; rows are read and written once",
        least=1,
        most=LARGEST_BATCH,
    )
    profile: bool = setting(False, "write trace.json, a timeline of every rank's last steps for ui.perfetto.dev")


@dataclass
class Run:
    dir: PathText = setting(
        "runs/${now:%Y%m%d-%H%M%S-%f}-${hydra:runtime.choices.model}-${hydra:runtime.choices.data}",
        "folder of settings, metrics, summary and checkpoints",
    )


@dataclass
class Settings:
    defaults: list[Any] = field(
        default_factory=lambda: [
            {"loss": "bce"}, {"model": "wdl"}, {"task": "ctr"}, {"data": "synthetic"}, "_self_", {"experiment": None},
        ]
    )  # fmt: skip
    steps: int | None = setting(None, "training steps; null: as many as `epochs` requires", most=MANY)
    epochs: float | None = setting(1, "passes over the training data", most=1_000_000)
    seed: int = setting(0, "seed of the initial rows, the initial dense layers and the order of the samples")
    batch_size: int = setting(64, "samples per rank and step", least=1, most=LARGEST_BATCH)
    device: str = setting("auto", "cuda: one GPU per rank; auto: cuda if every rank can use one", choices=DEVICES)
    resume: PathText = setting(
        None,
        "auto: the newest complete checkpoint in checkpoint.dir, if any; or a checkpoint's folder; null: a new run",
    )
    dry_run: bool = setting(
        False, "print memory, bytes per step and hit rate that the run would have, and end: nothing is trained"
    )
    table: Table = group(Table)
    optim: Optim = group(Optim)
    eval: Eval = group(Eval)
    loader: LoaderSettings = group(LoaderSettings)
    checkpoint: Checkpoint = group(Checkpoint)
    watchdog: WatchdogSettings = group(WatchdogSettings)
    log: Log = group(Log)
    train: Train = group(Train)
    run: Run = group(Run)
    model: Any = field(default_factory=dict)
    data: Any = field(default_factory=dict)
    task: Any = field(default_factory=dict)
    loss: Any = field(default_factory=dict)


PARTS = ("model", "data", "task", "loss")  # groups with a file per choice, in conf/
GROUPS = tuple(f.name for f in fields(Settings) if is_dataclass(f.default_factory)) + ("table.cache",)


class Removed(NamedTuple):
    """A setting of earlier versions. default: the value that run folders have if it was not set; why: the reason."""

    default: Any
    why: str


REMOVED = {
    "table.staleness_growth": Removed(None, "table.drift loses less accuracy for fewer bytes"),
    "table.replicate_below_rows": Removed(0, "training with small fields whole on every rank was slower"),
    "table.inbox_mb": Removed(8, "inboxes have 8 MB: smaller ones made writes slower"),
    "table.prefetch_batches": Removed(None, "table.round_steps says how many batches are requested ahead, 0 for none"),
}


class Declared(NamedTuple):
    """The declaration of a setting. kind: int, float, bool or str."""

    key: str
    kind: type
    is_optional: bool
    default: Any
    help: str
    least: float
    most: float
    choices: tuple[str, ...] | None
    takes_class: bool
    noun: str

    @property
    def default_text(self) -> str:
        """The default as written on the command line."""
        if self.default is None:
            return "null"
        return str(self.default).lower() if self.kind is bool else str(self.default)

    @property
    def values(self) -> str:
        """The allowed values, as text."""
        if self.choices is not None:
            words = " | ".join(self.choices) + (" | package.module.Class" if self.takes_class else "")
        elif self.kind is bool:
            words = "true | false"
        elif self.kind is str:
            words = self.noun
        else:
            words = "integer" if self.kind is int else "number"
            words += f" from {self.least:g}" + (f" to {self.most:,}" if self.most < LARGEST else "")
        return words + (" | null" if self.is_optional else "")


def declared(settings: type = Settings, above: str = "") -> Iterator[Declared]:
    """The declarations of all settings. The key of a setting in a group begins with the group's name."""
    hints = get_type_hints(settings)
    for f in fields(settings):
        if is_dataclass(f.default_factory):
            yield from declared(f.default_factory, f"{above}{f.name}.")
        elif f.metadata:
            yield declaration(f, hints[f.name], above)


def declaration(f: Field, hint: Any, above: str) -> Declared:
    [kind] = [kind for kind in get_args(hint) or [hint] if kind is not type(None)]
    is_optional = len(get_args(hint)) > 1 or f.default is None
    return Declared(f"{above}{f.name}", str if kind is PathText else kind, is_optional, f.default, **f.metadata)


def by_group() -> Iterator[tuple[str, Iterator[Declared]]]:
    """(name of a group, its settings) for each group; the name is "" for settings outside groups."""
    return groupby(declared(), lambda setting: setting.key.rpartition(".")[0])
