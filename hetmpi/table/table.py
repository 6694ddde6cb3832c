"""EmbeddingTable: a table of rows partitioned over all ranks, read and written by key.

It checks arguments and delegates to its client: bsp.py for s = 0, where every read sees all writes of the step before;
ssp.py for s >= 1, HET's client, where reads may be s iterations behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from hetmpi import _C
from hetmpi._C import Keys
from hetmpi.counters import Counters
from hetmpi.errors import UserError, check_choice, check_integer
from hetmpi.gpu import gpu_of
from hetmpi.owner.gpu_rows import GpuStore
from hetmpi.owner.node_memory import NodeMemory
from hetmpi.owner.route import make_partition
from hetmpi.owner.row_files import FileStore
from hetmpi.owner.store import INBOX_BYTES, Shard, layouts_of, table_seed
from hetmpi.spans import Spans
from hetmpi.table.bsp import BspClient
from hetmpi.table.cache import CacheSettings
from hetmpi.table.client import MOST_AHEAD, Client, TableContext, checked_gradients, kind_of
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.ssp import SspClient
from hetmpi.table.staleness import Staleness
from hetmpi.wire.transport import EXCHANGES, current_name, imported
from hetmpi.world.world import World

OF_A_RANK = ("self", "world", "cache", "spans", "device")  # arguments that may differ between ranks
MOST_KNOWN = MOST_AHEAD + 12  # batches whose keys a table remembers: announced, read, and made by a loader


class EmbeddingTable:
    """`num_rows` rows of `dim` float32, keys 0 <= key < num_rows, partitioned over the ranks of `world`.

    device     of the rows read, of the gradients, and of the cache
    spans      times of their phases (hetmpi.spans.Spans)
    shard      this rank's rows (hetmpi.owner.store.RowStore)
    cache      this rank's cache, for inspection
    num_used   keys below it have rows: num_rows, but where rows are assigned later (first_rows)
    vocabulary  of a table without a fixed one (hetmpi.table.vocabulary.Vocabulary), else None
    client     the consistency model (hetmpi.table.client.Client)"""

    def __init__(
        self, world: World, num_rows: int, dim: int, optimizer: RowOptimizer, partition: str = "round_robin",
        seed: int = 0, name: str = "table", init_std: float = 0.01, inbox_bytes: int = INBOX_BYTES,
        staleness: Staleness = Staleness(0), cache: CacheSettings = CacheSettings(capacity_rows=0),
        spans: Spans | None = None, exchange: str = "windows", device: torch.device | str = "cpu",
        batches_per_pull: int = 1, first_rows: int | None = None, store: FileStore | GpuStore | None = None,
    ):  # fmt: skip
        """Allocates the shards and initialises every row from a normal distribution with standard deviation `init_std`,
        depending only on (seed, name, key).

        inbox_bytes: memory of each rank for gradients in transit. spans: collects the times, None for an object of the
        table's own. exchange: transport between nodes: messages, of all ranks; windows, one-sided MPI; auto, the one
        that fetches rows faster here; or the path of a class, "package.module.Class", a hetmpi.wire.wire.Wire. device:
        cpu, or this rank's GPU: it holds the cache, and rows and gradients are tensors on it, while keys stay on the
        CPU. batches_per_pull: at s >= 1, number of announced batches whose rows one message requests; it leaves when so
        many are announced, or with the next write. first_rows: initialise these keys alone; the other rows take
        memory when they are assigned, which comes first (hetmpi/table/vocabularies.py); None for all. store: FileStore,
        files in a folder for the rows, a part of which stays in memory; GpuStore, at staleness 0 on one rank, the
        memory of `device`, or the host's for it; None, host memory. Collective.

        Raises UserError if ranks give different arguments (cache, device and spans may differ), if memory is short, and
        for a cache at staleness 0; ValueError for an unknown partition or exchange or an invalid shape."""
        exchange = current_name(exchange, warns=world.rank == 0)
        given = dict(locals())
        world.check_same("EmbeddingTable", {key: value for key, value in given.items() if key not in OF_A_RANK})
        check_arguments(dim, exchange, batches_per_pull)
        cache.check_at(staleness)
        if isinstance(store, GpuStore):
            check_on_gpu(world, staleness, torch.device(device), store.name)
        if first_rows is not None and partition != "round_robin":
            raise UserError(f"{name}: ids without a vocabulary need partition=round_robin, got {partition}")
        self.world, self.name, self.num_rows, self.dim = world, name, num_rows, dim
        self.staleness, self.optimizer = staleness.among(world.size), optimizer
        self.partition, self.partition_kind = make_partition(partition, num_rows, world.size), partition
        self.num_used = num_rows if first_rows is None else first_rows
        self.vocabulary = None
        self.spans, self._counts = spans or Spans(), _C.Counters()
        self.key_space: _C.KeySpace | None = None
        rule = optimizer.core(dim)
        record, layouts = layouts_of(
            world, self.partition, rule, dim, staleness.is_exact, inbox_bytes, store.name if store else "memory"
        )
        self.shard: Shard | None = None
        self.client: Client | None = None
        self.memory: NodeMemory | None = NodeMemory(world, layouts, self.partition, self.num_used < num_rows, store)
        try:
            self._open(rule, record, seed, init_std, cache, torch.device(device), exchange, batches_per_pull)
        except Exception as error:
            if isinstance(error, (UserError, ValueError)) or world.size == 1:  # other errors may be of this rank alone
                self.close()
            raise

    def _open(
        self, rule, record, seed: int, init_std: float, cache: CacheSettings, device, exchange: str, per_pull: int
    ):
        """Initialises the shard, and makes cache and client. Collective."""
        world, memory, seed = self.world, self.memory, table_seed(seed, self.name)
        self.shard = memory.local
        memory.open_rows(seed, init_std, device, self.name)
        keys_of = partial(self.partition.keys_of, world.rank)
        self.shard.initialise(rule, keys_of, num_used_here(self), seed, init_std, torch.get_num_threads())
        self.cache: _C.Lines = cache.open(world, self.num_rows, self.dim, self.optimizer, device)
        if not self.staleness.is_exact:
            self.cache.set_drift(self.staleness.drift, world.size - 1)
        self.device = self.cache.device if self.cache.computes_beside else torch.device("cpu")
        admitted = cache.admitted(world, self.device) & (self.cache.capacity_rows > 0)
        self.key_space = _C.KeySpace(self.partition, world.rank, world.is_remote, admitted, self.cache)
        self.remember(batches=0)
        memory.fence()
        memory.start_reading()
        self._context = TableContext(
            world, memory, self.partition, self.num_rows, self.optimizer, rule, record, self.staleness, self.cache,
            self.key_space, self._counts, self.spans, batches_per_pull=per_pull,
        )  # fmt: skip
        self.client = (BspClient if self.staleness.is_exact else SspClient)(self._context, exchange)

    def read(self, keys: torch.Tensor) -> torch.Tensor:
        """keys (U,) int64 on the CPU, unique -> rows (U, dim) float32 on `device`: at s = 0 the owners' values after
        the last write, otherwise values at most `staleness` iterations behind the owners' clocks when these are
        compared, with all of this rank's own updates.

        Collective at s = 0 after a write; with exchange messages always. Raises UserError for keys of another dtype or
        shape, out of range, or given twice."""
        with self.spans("find"):
            checked = check_keys([self], [keys], "read")
        return self.client.read([self.client], checked)[0]

    def peek(self, keys: torch.Tensor) -> torch.Tensor:
        """The owners' rows, for evaluation: uses neither cache nor counters, and keys may repeat. Not collective,
        except with exchange messages. REQUIRES: flush() since a write, on every rank; at s >= 1 no rank writes again
        before all have made their last peek: let them meet then, as by world.meet("to evaluate")."""
        checked = check_keys([self], [keys], "peek", may_repeat=True)
        return torch.from_numpy(self.client.peek(checked[0])).to(self.device)

    def prefetch(self, keys: torch.Tensor):
        """Announces a batch that a later read will request by the same tensor `keys`, so that its rows on other nodes
        are fetched meanwhile. To be called between a read and the write after it. Batches are read in the order
        announced; keep the next `num_ahead` ones announced.

        At s >= 1 the bound holds for the owners' clocks at the read before those of the pull. At s = 0 every read is
        exact; by messages, where all ranks announce alike, rows of the batch after the next one come during the next
        step. Raises UserError as read does, and at s = 0 RuntimeError between write and read."""
        with self.spans("prefetch"):
            checked = check_keys([self], [keys], "prefetch")
            self.want(checked[0])
            self.client.announce([self.client], checked)

    def write(self, keys: torch.Tensor, grads: torch.Tensor):
        """Pushes the gradients of this step, now or later: keys (U,) int64, unique, grads (U, dim) float32 on `device`.
        Collective at s = 0; with exchange messages always.

        The owner sums over ranks: divide by world.size for the gradient of a loss averaged over the global batch.
        Raises UserError for a wrong dtype, shape or key, NotFinite for a gradient that is NaN or infinite (of a GPU at
        s >= 1 when their sum is sent; with rows on the GPU in the next write or flush, and nothing is applied), and at
        s = 0 RuntimeError if the step is already written."""
        with self.spans("push"):
            checked = check_keys([self], [keys], "write")
            grads = self.gradients(checked[0], grads)
        self.client.write([self.client], checked, [grads])

    def settle(self):
        """Completes the last write before this rank waits for others in another way, as in an allreduce: at s = 0 the
        owners have applied it on return. Collective."""
        self._check_open()
        self.client.settle([self.client])

    def flush(self):
        """Applies all updates at their owners, so that every rank's later reads of the owners see them; at s >= 1 also
        those that a faster rank has written by then. Collective."""
        self._check_open()
        self.client.flush()

    def await_owners(self):
        """Waits until the owners have applied the gradients that this rank has pushed. At s >= 1 not collective, except
        with exchange messages; at s = 0 as flush()."""
        self._check_open()
        self.client.await_owners()

    def close(self):
        """Frees the memory. Arrays taken from `shard` must not be used any more, and updates not flushed are lost. A
        second call has no effect. Collective."""
        client, self.client = self.client, None
        self.key_space = None
        if client is not None:
            client.close()
        self.shard = None
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.free()

    def __repr__(self) -> str:
        """The arguments that a reader of a log looks for."""
        bound, ranks = self.staleness.bound, self.world.size
        text = f"{self.num_rows:,} rows of dim {self.dim}, {self.partition_kind} over {ranks} rank(s)"
        state = "" if self.client is not None else ", closed"
        return f"EmbeddingTable({self.name!r}: {text}, {self.optimizer.rule}, staleness={bound}{state})"

    def resume_at(self, step: int):
        """Continues as after `step` steps, whose rows were assigned to each rank's `shard`. REQUIRES: no read or write
        yet. Collective."""
        self._check_open()
        self.shard.mark = None
        self.client.resume_at(step)
        self.memory.fence()

    def keys(self) -> torch.Tensor:
        """Keys of this rank's shard in the order of its rows: (n,) int64."""
        self._check_open()
        return torch.from_numpy(self.partition.keys_of(self.world.rank, 0, len(self.shard)))

    def scan(self, most_rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's rows in the order of keys(), at most `most_rows` at a time: place of the first, and rows (n, dim)
        float32 on the CPU, not to be changed. REQUIRES: as peek()."""
        self._check_open()
        for begin in range(0, len(self.shard), most_rows):
            yield begin, torch.from_numpy(self.shard.snapshot("weight", slice(begin, begin + most_rows)))

    @property
    def counters(self) -> Counters:
        """Of this rank's reads and writes so far: a copy, which does not count on."""
        return Counters.of_array(self._counts.as_array())

    @property
    def step(self) -> int:
        """Steps written so far (s = 0: and settled)."""
        self._check_open()
        return self.client.step

    @property
    def num_ahead(self) -> int:
        """Number of batches to announce ahead of their reads: those that one pull serves; at s = 0 as of ahead_at_0(),
        of other nodes none where a trial says that this would not pay."""
        if self.staleness.is_exact:
            return ahead_at_0(self.memory.reads_ahead, self.client.pays_ahead)
        return self._context.batches_per_pull

    @property
    def checks_late(self) -> bool:
        """Whether gradients that are not finite are found after the write of their step: those of a GPU, unless they
        are copied to the host in it."""
        return self.cache.computes_beside and (not self.staleness.is_exact or self.shard.device_rows is not None)

    # Checks of keys and gradients.

    def remember(self, batches: int):
        """For a loader that checks keys of so many batches before the first of them is announced."""
        self.key_space.remember(MOST_KNOWN + batches)

    def check(self, keys: torch.Tensor, are_fixed: bool = False) -> Keys:
        """Checks keys that read, prefetch and write will get as the same tensor, which then need not. are_fixed: their
        values stay as they are; otherwise these calls compare them with those checked. Thread-safe: for the thread that
        makes a batch. Returns them for the client. Raises as read()."""
        return check_keys([self], [keys], "read", are_fixed)[0]

    def want(self, keys: Keys):
        """Lets the rows of checked keys come from this rank's disk, if they are there, before they are read."""
        if self.memory.reads_ahead:
            self.memory.want(keys.route)

    def gradients(self, keys: Keys, grads: torch.Tensor) -> torch.Tensor:
        """Gradients for the client, which checks those in host memory itself; those of a GPU are checked here. Also
        counts the pages that the disk has read. Raises as write()."""
        if self.memory.reads_ahead:
            self.memory.count_pages(self._counts)
        return checked_gradients(grads, (len(keys), self.dim), self.device) if self.cache.computes_beside else grads

    def refuse(self, keys: torch.Tensor, verb: str):
        """Raises as read(), for keys that check_keys() does not take."""
        self._check_open()
        if not isinstance(keys, torch.Tensor) or keys.dtype != torch.int64 or keys.dim() != 1 or not keys.is_cpu:
            raise UserError(f"EmbeddingTable.{verb}: keys must be int64 of shape (U,) on the CPU, got {kind_of(keys)}")
        array = keys.contiguous().numpy()
        wrong = array[(array < 0) | (array >= self.num_rows)]
        if len(wrong) == 0:
            again = array[_C.first_repeated(array)]
            raise UserError(
                f"EmbeddingTable.{verb}: keys must be unique, got {again} twice: take torch.unique(ids, "
                "return_inverse=True) and look rows up by the inverse (hetmpi.look_up)"
            )
        raise UserError(
            f"EmbeddingTable.{verb}: keys must lie in [0, {self.num_rows:,}), got {wrong[0]} "
            f"({wrong.size:,} of {array.size:,} are out of range)"
        )

    def _check_open(self):
        if self.client is None:
            raise RuntimeError("EmbeddingTable: the table is closed")


def check_keys(
    tables: Sequence[EmbeddingTable], keys: Sequence[torch.Tensor], verb: str, are_fixed: bool = False,
    may_repeat: bool = False,
) -> list[Keys]:  # fmt: skip
    """Checked keys (U,) of each table, for its client. verb: the method that got them, for messages. are_fixed: as of
    EmbeddingTable.check. may_repeat: keys for one call, which may. Raises as EmbeddingTable.read."""
    found = _C.check_keys([table.key_space for table in tables], keys, are_fixed, may_repeat)
    for table, of_table, checked in zip(tables, keys, found) if None in found else ():
        if checked is None:
            table.refuse(of_table, verb)
    return found


def ahead_at_0(reads_disk: bool, asks_others: bool) -> int:
    """Number of batches to announce at s = 0: their rows come from a disk, or are asked of other nodes."""
    return 2 if reads_disk else int(asks_others)


def num_used_here(table: EmbeddingTable) -> int:
    """Rows of this rank's shard, its first ones, that num_used counts."""
    return make_partition(table.partition_kind, table.num_used, table.world.size).num_local_rows(table.world.rank)


def check_arguments(dim: int, exchange: str, batches_per_pull: int):
    """Raises UserError or ValueError for values that no table takes."""
    if dim < 1:
        raise UserError(f"table.dim must be at least 1, got {dim}")
    check_integer("table.batches_per_pull", batches_per_pull, 1, MOST_AHEAD)
    if "." in exchange:
        imported(exchange)
    else:
        check_choice("table.exchange", exchange, EXCHANGES)


def check_on_gpu(world: World, staleness: Staleness, device: torch.device, store: str):
    """Raises UserError where a GPU cannot read and update a table's rows. store: gpu or pinned."""
    cure = "table.store=memory, where the host does"
    if gpu_of(device) is None:
        raise UserError(f"table.store={store} needs a GPU, the device is {device}: set device=cuda, or {cure}")
    if not staleness.is_exact:
        raise UserError(f"table.store={store} needs table.staleness=0, where no rows are cached: set that, or {cure}")
    if world.size > 1:
        raise UserError(f"table.store={store} is for one rank, this run has {world.size}: set {cure}")
