"""Sums over all ranks for the dense layers: by Horovod, or by MPI alone.

MpiReductions has the calls of horovod.torch that hetmpi makes. Horovod's thread calls MPI_Allreduce every millisecond,
also when there is nothing to sum, and the training waits for a sum in a loop: on one core they change places hundreds
of times a step. The thread of MpiReductions sleeps until a sum is asked for, and the training until it is there; where
tables exchange messages between nodes the thread also calls MPI every millisecond, so that the messages move while this
rank computes. In float32 and float64 both give the same bits, as Horovod too adds by MPI_Allreduce."""

from __future__ import annotations

import queue
import sys
import threading
from dataclasses import dataclass, field

import torch

from hetmpi.batch_norm import BatchNorm
from hetmpi.errors import MissingLibrary
from hetmpi.world.at_exit import at_exit
from hetmpi.world.mpi import MPI, import_horovod
from hetmpi.world.world import World

DENSE_EXCHANGES = ("auto", "horovod", "mpi")
PROGRESS_EVERY_S = 1e-3  # between two calls of MPI where tables exchange messages: as often as Horovod's thread
LOOK_EVERY_S = 0.1  # between two looks whether tables do by now, or whether a wait has lasted long
HALVES = (torch.float16, torch.bfloat16)  # summed in float32
_made: list[MpiReductions] = []  # in this program


def open_reductions(world: World, kind: str = "auto", on_gpu: bool = False):
    """The module horovod.torch, started, or MpiReductions, for DenseOptimizer and BatchNorm. kind: horovod, mpi, or
    auto, which is Horovod where all ranks have it, unless gradients on CPUs come from ranks on several hosts with fewer
    than two processors each. on_gpu: whether the gradients are on GPUs. Collective. Raises MissingLibrary for kind
    horovod where it is missing or cannot be loaded, UserError as World.start_horovod."""
    if kind == "auto":
        why = missing_horovod(world)
        if why is None and shares_processors(world) and not on_gpu:
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
    of_world = [made for made in _made if made.world.comm == world.comm]  # the points of a sweep share one
    BatchNorm.reductions = of_world[0] if of_world else MpiReductions(world)
    return BatchNorm.reductions


def missing_horovod(world: World) -> str | None:
    """Why a rank cannot use Horovod; None if all can. Collective."""
    refusal = None
    try:
        import_horovod()
    except MissingLibrary as error:
        refusal = str(error)
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
    matches_names  False, see above"""

    matches_names = False
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
        if tensor.dtype not in (torch.float32, torch.float64, *HALVES):
            raise TypeError(f"MpiReductions sums float16, bfloat16, float32 and float64, got {tensor.dtype}")
        if not self._thread.is_alive():
            raise RuntimeError("MpiReductions: its thread has ended, by close() or an error of MPI")
        asked = Sum(tensor, 1.0 / self.size() if op == self.Average else 1.0)
        self._asked.put(asked)
        return asked

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
