"""The settings of a training, each declared once: its type, default, range, and when to change it.

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
from hetmpi.table.cache import ADMIT, POLICIES, ROW_BYTES, CacheSettings
from hetmpi.table.client import MOST_AHEAD
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
    noun: str = "path", for_experts: bool = False,
):  # fmt: skip
    """Declares a setting. help: when to change it. least, most: range of a number. choices: allowed words.
    takes_class: also allow the dotted name of a class. noun: meaning of a text without choices. for_experts: whether
    only a measurement justifies a change."""
    about = {
        "help": help, "least": least, "most": most, "choices": choices, "takes_class": takes_class, "noun": noun,
        "for_experts": for_experts,
    }  # fmt: skip
    return field(default=default, metadata=about)


def group(kind: type):
    return field(default_factory=kind)


def rates(rules: dict[str, float]) -> str:
    """The default learning rate of each rule, as text."""
    return ", ".join(f"{rule} {lr:g}" for rule, lr in rules.items())


@dataclass
class Cache:
    capacity_rows: int | None = setting(
        CacheSettings.capacity_rows,
        "rows in the cache of each rank, with staleness above 0",
        most=MANY,
    )
    capacity_fraction: float | None = setting(
        CacheSettings.capacity_fraction,
        "the same as a share of the table; both null: 0.1",
        most=1,
    )
    policy: str = setting(
        CacheSettings.policy, "if another eviction rule hits more often", choices=POLICIES, for_experts=True
    )
    dtype: str = setting(
        CacheSettings.dtype,
        "if the cache takes too much memory",
        choices=tuple(ROW_BYTES),
        for_experts=True,
    )
    admit: str = setting(
        CacheSettings.admit,
        "to cache rows of all ranks, other ranks (remote) or other nodes (offnode); auto: all on a GPU, else offnode",
        choices=ADMIT,
        for_experts=True,
    )


@dataclass
class Table:
    dim: int = setting(
        16, "numbers per row: raise it if the model underfits, lower it to save memory", least=1, most=1 << 20
    )
    partition: str = setting("round_robin", "range for data.partition=metis", choices=PARTITIONS)
    init_std: float = setting(
        0.01, "standard deviation of initial rows: if training starts slowly or diverges", most=1000
    )
    init_from: PathText = setting(None, "to start from pretrained rows in Parquet files (docs/columns.md)")
    staleness: int | None = setting(
        0,
        "raise it, as to 100, between nodes on a slow network; null: no bound",
        most=LARGEST_BOUND - 1,
    )
    anticipate: float | None = setting(
        None,
        "to scale own updates of cached rows; null: by the number of ranks; 1: as in HET",
        most=1_000_000,
        for_experts=True,
    )
    drift: float = setting(
        Staleness.drift,
        "raise it for fewer bytes, lower it for accuracy; 0: no limit, as in HET",
        most=1_000_000,
        for_experts=True,
    )
    look_ahead: bool | None = setting(
        None,
        "to request rows before their step, or not; null: if a trial at the start says that it pays",
        for_experts=True,
    )
    batches_per_pull: int | None = setting(
        None,
        "to request rows of more or fewer batches by one message, at s >= 1; null: by the bound and the cache",
        least=1,
        most=MOST_AHEAD,
        for_experts=True,
    )
    exchange: str = setting(
        "auto",
        "messages or windows (one-sided MPI), to skip the trial at the start",
        choices=EXCHANGES,
        takes_class=True,
        for_experts=True,
    )
    maintain_steps: int = setting(
        1000,
        "to reassign rows of open columns more or less often (docs/growing.md)",
        least=1,
        most=1 << 40,
        for_experts=True,
    )
    store: str = setting(
        "memory",
        "file for tables larger than the memory of all nodes (docs/growing.md); gpu for one that fits a GPU, pinned "
        "for one in host memory that a GPU updates (docs/gpus.md)",
        choices=STORES,
    )
    store_dir: PathText = setting(None, "with store=file: folder on a local disk of each node")
    store_memory_gb: float | None = setting(
        None,
        "with store=file: GB of memory per rank for rows; null: half of the node's free memory, divided by its ranks",
        most=1_000_000,
    )
    ranks_per_node: int | None = setting(
        None, "to test several nodes on one host", least=1, most=1 << 20, for_experts=True
    )
    cache: Cache = group(Cache)


@dataclass
class Optim:
    rows: str = setting(
        "adagrad", "rowwise_adagrad to save memory and bytes, ftrl for rows with zeros", choices=tuple(ROW_RULES)
    )
    dense: str = setting("adam", "optimizer of the dense layers", choices=tuple(DENSE_RULES))
    rows_lr: float | None = setting(None, f"tune it first; null: {rates(ROW_RULES)}", most=LARGEST_LR)
    dense_lr: float | None = setting(None, f"tune it with rows_lr; null: {rates(DENSE_RULES)}", most=LARGEST_LR)
    rows_weight_decay: float = setting(0.0, "raise it if rows overfit", most=LARGEST_LR)
    rows_momentum: float | None = setting(
        None, f"with rows=momentum; null: {DEFAULT_MOMENTUM:g}", most=LARGEST_MOMENTUM
    )
    rows_l1: float = setting(0.0, "with rows=ftrl, raise it for more exact zeros", most=LARGEST_LR)
    rows_l2: float = setting(0.0, "with rows=ftrl, raise it if rows overfit", most=LARGEST_LR)
    dense_weight_decay: float = setting(0.0, "raise it if dense layers overfit", most=LARGEST_LR)
    dense_clip_norm: float | None = setting(
        None, "limit of the norm of dense gradients, if the loss jumps", least=1e-9, most=1_000_000_000
    )
    dense_exchange: str = setting(
        "auto",
        "allreduce of the dense gradients; auto: horovod, or mpi where ranks lack it or, on CPUs of several hosts, "
        "have fewer than two processors each; nccl: that of torch, on GPUs (docs/gpus.md)",
        choices=DENSE_EXCHANGES,
        for_experts=True,
    )
    schedule: str = setting(
        "constant",
        "to lower both learning rates over the run; plateau: when eval.metric stops improving",
        choices=SCHEDULES,
    )
    plateau_evals: int = setting(
        3, "with schedule=plateau: evaluations without improvement until the rates fall", least=1, most=MANY
    )
    plateau_decay: float = setting(0.5, "with schedule=plateau: factor by which the rates fall", most=1)
    warmup_steps: int = setting(0, "raise it if the first steps diverge: both rates then start at 0", most=MANY)


@dataclass
class Eval:
    every_steps: int | None = setting(
        None,
        "to evaluate more or less often; 0: only at the end; null: after epochs, at s = 0 also ten times on a sample",
        most=MANY,
    )
    metric: str | None = setting(
        None,
        "metric of patience and schedule=plateau; null: the first of the task",
        noun="name of a metric",
    )
    group: str | None = setting(None, "to report gauc, the mean AUC over this column's values", noun="name of a column")
    patience: int | None = setting(
        None, "to stop after this many evaluations in a row without improvement", least=1, most=MANY
    )
    max_samples: int | None = setting(
        None,
        "to evaluate on a random sample of so many held-out samples, if evaluations take long; null: all",
        least=1,
        most=MANY,
    )
    batch_size: int = setting(4096, "lower it if evaluations run out of memory", least=1, most=LARGEST_BATCH)


@dataclass
class LoaderSettings:
    threads: int = setting(
        1, "raise it if load takes a large part of a step and cores are free", least=1, most=1024, for_experts=True
    )
    prefetch: int = setting(
        2, "raise it if load varies from step to step, lower it to save memory", least=1, most=1024, for_experts=True
    )


@dataclass
class Checkpoint:
    at_end: bool = setting(True, "to save no checkpoint at the end")
    every_steps: int = setting(0, "to save during training too, at this interval", most=MANY)
    keep: int = setting(2, "to keep more or fewer checkpoints", least=1, most=MANY)
    best: str | None = setting(
        None,
        "to keep the best checkpoint by a metric, such as auc",
        noun="name of a metric",
    )
    full_every: int = setting(
        1, "raise it to write less: all but every N-th checkpoint have changed rows only", least=1, most=MANY
    )
    dir: PathText = setting("${run.dir}/checkpoints", "to save on another disk that all ranks see")
    export_deltas: bool = setting(False, "to write changed rows by id after each checkpoint (docs/growing.md)")


@dataclass
class WatchdogSettings:
    seconds: float = setting(300, "raise it if a rank may be silent for longer; 0: no watchdog", most=LONGEST_S)


@dataclass
class Log:
    every_steps: int | None = setting(
        None, "to print log lines more or less often; null: 100, less in a run of under 2,000", least=1, most=MANY
    )


@dataclass
class Train:
    precision: str = setting(
        "float32",
        "bf16 if the processor or GPU multiplies 16-bit numbers faster, tf32 on GPUs",
        choices=tuple(PRECISIONS),
    )
    accumulate: int = setting(
        1,
        "passes per step: raise it if a batch does not fit in memory",
        least=1,
        most=LARGEST_BATCH,
    )
    profile: bool = setting(False, "to see a timeline of the last steps: trace.json, for ui.perfetto.dev")


@dataclass
class Run:
    dir: PathText = setting(
        "runs/${now:%Y%m%d-%H%M%S-%f}-${hydra:runtime.choices.model}-${hydra:runtime.choices.data}",
        "to name the run folder",
    )


@dataclass
class Settings:
    defaults: list[Any] = field(
        default_factory=lambda: [
            {"loss": "bce"}, {"model": "wdl"}, {"task": "ctr"}, {"data": "synthetic"}, "_self_", {"experiment": None},
        ]
    )  # fmt: skip
    steps: int | None = setting(None, "to end after this many steps; epochs then has no effect", most=MANY)
    epochs: float | None = setting(1, "raise it while held-out metrics improve", most=1_000_000)
    seed: int = setting(0, "to repeat a run with other random numbers")
    batch_size: int = setting(
        64,
        "samples per rank and step: raise it if exchanges take long, lower it to save memory",
        least=1,
        most=LARGEST_BATCH,
    )
    device: str = setting("auto", "cpu to leave GPUs unused, cuda to refuse to run without them", choices=DEVICES)
    init_from: PathText = setting(
        None,
        "to go on with new data: a checkpoint, with whose rows, dense layers and columns the run begins "
        "(docs/growing.md)",
    )
    resume: PathText = setting(None, "auto: continue from the newest checkpoint; or a checkpoint's folder")
    dry_run: bool = setting(False, "to see memory, bytes per step and hit rate without training")
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
    "table.prefetch_batches": Removed(None, "table.look_ahead=false requests none ahead"),
    "table.round_steps": Removed(
        None, "table.look_ahead=false requests nothing ahead, and table.batches_per_pull=N rows of N batches at once"
    ),
}


class Declared(NamedTuple):
    """The declaration of a setting; fields as in setting(). kind: int, float, bool or str."""

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
    for_experts: bool

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
