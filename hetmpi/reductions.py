"""Sums over all ranks for the dense layers: by Horovod, by MPI alone, or by NCCL of torch.distributed.

MpiReductions has the calls of horovod.torch that hetmpi makes. Horovod's thread calls MPI_Allreduce every millisecond,
also when there is nothing to sum, and the training waits for a sum in a loop: on one core they change places hundreds
of times a step. The thread of MpiReductions sleeps until a sum is asked for, and the training until it is there; where
tables exchange messages between nodes the thread also calls MPI every millisecond, so that the messages move while this
rank computes. In float32 and float64 both give the same bits, as Horovod too adds by MPI_Allreduce.

TorchReductions sums on GPUs, in torch's stream, so that the host need not wait."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
from torch import distributed

from hetmpi.batch_norm import BatchNorm
from hetmpi.errors import MissingLibrary, UserError
from hetmpi.gpu import gpu_of
from hetmpi.world.at_exit import at_exit
from hetmpi.world.mpi import MPI, import_horovod, in_one_line
from hetmpi.world.world import World

DENSE_EXCHANGES = ("auto", "horovod", "mpi", "nccl")
PROGRESS_EVERY_S = 1e-3  # between two calls of MPI where tables exchange messages: as often as Horovod's thread
NO_LIMIT, STORE_LIMIT = timedelta(days=365), timedelta(seconds=60)  # of waits of torch.distributed
MOST_TEXT = 300  # characters of its messages
LOOK_EVERY_S = 0.1  # between two looks whether tables do by now, or whether a wait has lasted long
HALVES = (torch.float16, torch.bfloat16)  # summed in float32
_made: list[MpiReductions] = []  # in this program


def open_reductions(world: World, kind: str = "auto", device: torch.device = torch.device("cpu")):
    """The module horovod.torch, started, MpiReductions or TorchReductions, for DenseOptimizer and BatchNorm. kind:
    horovod, mpi, nccl, or auto, which is Horovod where all ranks have it, unless gradients on CPUs come from ranks on
    several hosts with fewer than two processors each. device: of the gradients. Collective. Raises MissingLibrary for
    kind horovod where it is missing or cannot be loaded, UserError as World.start_horovod, and for kind nccl where it
    cannot be used."""
    if kind == "auto":
        why = missing_horovod(world)
        if why is None and shares_processors(world) and gpu_of(device) is None:
            why = (
                "its thread would take processor time from the ranks, which have fewer than two processors each "
                "(optim.dense_exchange=horovod for Horovod)"
            )
        kind = "horovod" if why is None else "mpi"
        if why is not None and world.rank == 0:
            print(f"hetmpi: MPI sums the dense gradients without Horovod: {why}", file=sys.stderr, flush=True)
    if kind == "horovod":
        BatchNorm.reductions = None
        return world.start_horovod()
    if kind == "nccl":
        why = missing_nccl(world, device)
        if why is not None:
            raise UserError(f"optim.dense_exchange=nccl: {why}: set optim.dense_exchange=auto")
    make = {"mpi": MpiReductions, "nccl": partial(TorchReductions, device=device)}[kind]
    of_world = [one for one in _made if one.world.comm == world.comm and one.kind == kind]  # a sweep's points share one
    BatchNorm.reductions = of_world[0] if of_world else make(world)
    return BatchNorm.reductions


def missing_nccl(world: World, device: torch.device) -> str | None:
    """Why NCCL cannot sum gradients on `device`; None if it can. Collective."""
    gpus = world.comm.allgather(None if gpu_of(device) is None else gpu_of(device).name(device))
    if None in gpus:
        return f"it sums gradients on GPUs, the device of rank {gpus.index(None)} is not one"
    if len(set(gpus)) < world.size:
        return f"it needs a GPU for each rank, {world.size} ranks share {len(set(gpus))}"
    if not world.comm.allreduce(distributed.is_available() and distributed.is_nccl_available(), MPI.LAND):
        return "a rank's torch was built without it"
    return None


def missing_horovod(world: World) -> str | None:
    """Why a rank cannot use Horovod; None if all can. Collective."""
    refusal = None
    try:
        import_horovod()
    except MissingLibrary as error:
        is_there = getattr(error.__cause__, "name", None) != "horovod"
        refusal = str(error) if is_there else "it is not installed (optim.dense_exchange=horovod says how it is)"
    return next(filter(None, world.comm.allgather(refusal)), None)


def shares_processors(world: World) -> bool:
    """Whether ranks on several hosts have fewer than two processors each. There MPI in place of Horovod gains 3 to
    26 % of a step of the dense layers, within a host 2 % (docs/results.md, "Across hosts"). Collective."""
    hosts = world.notices.hosts
    is_short = world.num_cores < 2 * hosts.count(world.host)
    return world.comm.allreduce(is_short, MPI.LOR) and len(set(hosts)) > 1


@dataclass
class Sum:
    """A sum under way: of `tensor`, multiplied by `factor`, in place."""

    tensor: torch.Tensor
    factor: float
    is_done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class MpiReductions:
    """In place of the module horovod.torch, for DenseOptimizer and, from then on, BatchNorm: MPI sums the gradients of
    the dense layers, on a thread. All ranks make the same calls in the same order. Horovod matches calls by their
    names; here the n-th call of each rank is one sum, whatever its name.

    world          the ranks that sum
    kind           what sums, as in DENSE_EXCHANGES
    matches_names  False, see above"""

    kind, matches_names = "mpi", False
    Sum, Average = "sum", "average"

    def __init__(self, world: World):
        """Collective."""
        self.world, self._comm = world, world.comm.Dup()
        self._asked: queue.SimpleQueue[Sum | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hetmpi sums", daemon=True)
        self._thread.start()
        self._end = at_exit(world, self._free, self._stop)
        _made.append(self)
        BatchNorm.reductions = self

    def rank(self) -> int:
        return self._comm.rank

    def size(self) -> int:
        return self._comm.size

    def is_initialized(self) -> bool:
        return True

    def nccl_built(self) -> bool:
        return False

    def allgather_object(self, value) -> list:
        """The values of all ranks. Collective."""
        return self._comm.allgather(value)

    def broadcast_parameters(self, state: dict[str, torch.Tensor], root_rank: int):
        """Replaces all tensors by those of a rank. Collective."""
        for tensor in state.values():
            sent = tensor.detach().cpu().contiguous()
            self._comm.Bcast(sent.view(-1).view(torch.uint8).numpy(), root_rank)
            with torch.no_grad():
                tensor.copy_(sent)

    def allreduce_async_(self, tensor: torch.Tensor, op: str, name: str) -> Sum:
        """Starts to sum a contiguous tensor on the CPU in place, or to average it. It is not to be used until
        synchronize(). Collective. Raises TypeError for another dtype than float of 16, 32 or 64 bits, RuntimeError
        after close()."""
        self._check(tensor)
        asked = Sum(tensor, 1.0 / self.size() if op == self.Average else 1.0)
        self._asked.put(asked)
        return asked

    def _check(self, tensor: torch.Tensor):
        name = type(self).__name__
        if tensor.dtype not in (torch.float32, torch.float64, *HALVES):
            raise TypeError(f"{name} sums float16, bfloat16, float32 and float64, got {tensor.dtype}")
        if not self._thread.is_alive():
            raise RuntimeError(f"{name}: its thread has ended, by close() or an error of MPI")

    def synchronize(self, asked: Sum) -> torch.Tensor:
        """Waits for the result. Raises the error of MPI."""

        def is_done() -> bool:
            if not asked.is_done.wait(LOOK_EVERY_S) and not self._thread.is_alive():
                raise RuntimeError("MpiReductions: its thread has ended with an error of MPI")
            return asked.is_done.is_set()

        self.world.wait(is_done, "for all ranks to sum the gradients of the dense layers")
        if asked.error is not None:
            raise asked.error
        return asked.tensor

    def allreduce(self, tensor: torch.Tensor, op: str, name: str) -> torch.Tensor:
        """The sum, or average, of a tensor on the CPU. Collective."""
        return self.synchronize(self.allreduce_async_(tensor.clone(), op, name))

    def _run(self):
        while (asked := self._next()) is not None:
            try:
                self._sum(asked)
            except Exception as error:
                asked.error = error
            asked.is_done.set()

    def _next(self) -> Sum | None:
        """Waits for the next sum, None for the end."""
        while True:
            try:
                return self._asked.get(timeout=PROGRESS_EVERY_S if World.wires else LOOK_EVERY_S)
            except queue.Empty:
                if World.wires:
                    self._comm.Iprobe()

    def _sum(self, asked: Sum):
        tensor = asked.tensor
        numbers = tensor.float() if tensor.dtype in HALVES else tensor
        self._comm.Allreduce(MPI.IN_PLACE, numbers.numpy())
        if asked.factor != 1.0:
            numbers *= asked.factor
        if numbers is not tensor:
            tensor.copy_(numbers)

    def close(self):
        """Ends the thread; the end of the program does it otherwise. Collective."""
        self._end()

    def _stop(self):
        self._asked.put(None)
        self._thread.join()

    def _free(self):
        self._comm.Free()
        _made.remove(self)
        if BatchNorm.reductions is self:
            BatchNorm.reductions = None


class TorchReductions(MpiReductions):
    """MpiReductions, with the sums of tensors on this rank's device by torch.distributed: on a GPU by NCCL, for which
    torch's stream waits and the host does not, on the CPU by Gloo. The ranks find each other by MPI; process groups of
    the program are left alone.

    A loop of its own on a GPU reads a loss of each step, or of the one before: else ranks drift apart."""

    def __init__(self, world: World, device: torch.device):
        """Collective. Raises UserError on every rank if one cannot take part."""
        super().__init__(world)
        self._device, self._group = device, None
        self.kind = "nccl" if self.nccl_built() else "gloo"
        try:
            self._store = open_store(world)
            self._agree(self._connect)
            self._agree(self._try)
        except UserError:
            self.close()
            raise

    def _agree(self, call: Callable[[], None]):
        error = None
        try:
            call()
        except RuntimeError as problem:
            error = UserError(
                f"torch.distributed cannot sum on {self._device} of rank {self.rank()} by {self.kind}: "
                f"{in_one_line(problem)[:MOST_TEXT]}: set optim.dense_exchange=mpi"
            )
        self.world.agree(error)

    def _connect(self):
        given = self._store, self.rank(), self.size()
        if self.kind == "gloo":
            self._group = distributed.ProcessGroupGloo(*given, NO_LIMIT)
        else:
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = NO_LIMIT  # else its watchdog ends a job in which a rank is slow for ten minutes
            self._group = distributed.ProcessGroupNCCL(*given, options)

    def _try(self):
        ones = torch.ones(1, device=self._device)
        self._group.allreduce([ones]).wait()
        if ones.item() != self.size():
            raise RuntimeError(f"a sum of ones over {self.size()} ranks is {ones.item()}")

    def nccl_built(self) -> bool:
        return gpu_of(self._device) is not None

    def allreduce_async_(self, tensor: torch.Tensor, op: str, name: str) -> Sum | TorchSum:
        if tensor.device.type != self._device.type:
            return super().allreduce_async_(tensor, op, name)
        self._check(tensor)
        work = self._group.allreduce([tensor])
        return TorchSum(tensor, self.size() if op == self.Average else 1, work)

    def synchronize(self, asked: Sum | TorchSum) -> torch.Tensor:
        if isinstance(asked, Sum):
            return super().synchronize(asked)
        if self.kind == "gloo":
            self.world.wait(asked.work.is_completed, "for all ranks to sum the gradients of the dense layers")
        asked.work.wait()
        return asked.tensor.div_(asked.divisor)

    def _stop(self):
        super()._stop()
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()


@dataclass
class TorchSum:
    """A sum under way: of `tensor`, divided by `divisor`, in place."""

    tensor: torch.Tensor
    divisor: int
    work: distributed.Work


def open_store(world: World) -> distributed.TCPStore:
    """Where the ranks of torch.distributed find each other: at a free port of the first one's host. Collective. Raises
    UserError on every rank if one cannot reach it."""
    error = store = None
    host = "localhost" if len(set(world.notices.hosts)) == 1 else world.host
    place = world.comm.bcast((host, 0))
    for is_first in (True, False):
        if (world.rank == 0) == is_first and place is not None:
            try:
                store = distributed.TCPStore(*place, is_master=is_first, wait_for_workers=False, timeout=STORE_LIMIT)
            except RuntimeError as problem:
                error = UserError(
                    f"torch.distributed: rank {world.rank} on {world.host} cannot reach {place[0]}: "
                    f"{in_one_line(problem)[:MOST_TEXT]}: set optim.dense_exchange=mpi"
                )
        place = world.comm.bcast((host, store.port) if store is not None else None)
    world.agree(error)
    return store
