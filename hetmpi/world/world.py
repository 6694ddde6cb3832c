"""World: the ranks that train together. Starts MPI, then Horovod on the same communicator, unless the program has
started them."""

from __future__ import annotations

import copy
import os
import socket
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from hetmpi import _C
from hetmpi.errors import ReportedElsewhere, UserError
from hetmpi.world.cores import usable_cores
from hetmpi.world.mpi import MPI, check_launcher, check_one_mpi, import_horovod, mpi_libraries, start_mpi
from hetmpi.world.same_build import check_same_build, own_build
from hetmpi.world.waiting import StallNotices, StallWarning


class World:
    """The ranks of one training run: a private communicator, their placement on nodes, and Horovod over them.

    comm            mpi4py communicator, private to hetmpi (a duplicate of the one given)
    node            communicator of the ranks that share this rank's node and memory
    node_ranks      world ranks of `node`, ascending
    nodes           node_ranks of every node, in the order of their lowest ranks
    is_remote       mask of the ranks on other nodes: (size,) bool
    rank, size      this rank and the number of ranks
    num_cores       processors that the ranks of this host may use together
    notices         notices about long waits
    receivers       keys: objects whose receive_pending() receives what others send to this rank, called by each wait
    wires           wires between nodes, of all worlds of this program: their data move only while ranks call MPI
    """

    wires = weakref.WeakSet()

    def __init__(self, comm=None, ranks_per_node: int | None = None):
        """comm: mpi4py communicator, default COMM_WORLD. ranks_per_node splits each real node into smaller ones, whose
        ranks communicate only through MPI: for tests, and to measure RMA on one machine. Collective.

        Raises UserError if launcher and MPI library do not match, if MPI lacks MPI_THREAD_MULTIPLE, or if ranks run
        different versions of hetmpi."""
        start_mpi()
        base = MPI.COMM_WORLD if comm is None else comm
        if comm is None:
            check_launcher(base.size)
        self.comm = base.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.host = socket.gethostname()
        hosts, builds, affinities = zip(*self.comm.allgather((self.host, own_build(), os.sched_getaffinity(0))))
        check_same_build(hosts, builds)
        here = [cores for host, cores in zip(hosts, affinities) if host == self.host]
        self.num_cores = usable_cores(set().union(*here))
        is_crowded = len(here) > self.num_cores or "_naps" in os.environ.get("LD_PRELOAD", "")
        self.notices = StallNotices(self.comm.Dup(), list(hosts), is_crowded)
        self.receivers = weakref.WeakKeyDictionary()  # in the order of their entries
        self._applier_thread = _C.ApplierThread()
        self._place(ranks_per_node)

    def _place(self, ranks_per_node: int | None):
        """Finds the nodes. Collective."""
        self.node = split_nodes(self.comm, ranks_per_node)
        # mpi4py's first allreduce duplicates the communicator while it holds the GIL. Done later, it would keep the
        # watchdog from ending a wait for a stopped rank.
        for known in (self.comm, self.node):
            known.allreduce(0)
        self.node_ranks = self.node.allgather(self.rank)
        self.nodes = grouped(self.comm.allgather(self.node_ranks[0]))
        self.is_one_node = self.node.size == self.size
        self.is_remote = ~np.isin(np.arange(self.size), self.node_ranks)

    def split(self, ranks_per_node: int) -> World:
        """The same ranks in smaller nodes, as of the constructor. All but the nodes is shared: a wait of either world
        receives messages for the tables of both. Of the new world only `node` is to be freed. Collective."""
        parts = copy.copy(self)
        parts._place(ranks_per_node)
        return parts

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size} on {self.host}, {len(self.nodes)} node(s))"

    def free(self):
        """Frees the communicators, for a program that makes many worlds: MPICH has 2,048, of which a world takes five.
        REQUIRES: its tables are closed. Collective."""
        self.notices.free()
        for comm in (self.node, self.comm):
            comm.Free()

    def start_horovod(self):
        """Starts Horovod on this world and returns the module horovod.torch. Raises UserError if Horovod uses another
        MPI, MissingLibrary as import_horovod() does."""
        os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")  # reproducible order of summation
        hvd = import_horovod()
        check_one_mpi(mpi_libraries())
        if not hvd.is_initialized():
            hvd.init(comm=self.comm)
        self.check_horovod(hvd)
        return hvd

    def check_horovod(self, hvd):
        """Raises UserError if Horovod runs on other ranks."""
        if (hvd.rank(), hvd.size()) != (self.rank, self.size):
            raise UserError(
                f"Horovod says rank {hvd.rank()} of {hvd.size()}, MPI says {self.rank} of {self.size}: it was started "
                "on another communicator, or without MPI; a process can train in one world at a time"
            )

    def meet(self, what: str):
        """Barrier over all ranks, with a warning if it lasts long. what: as for StallWarning. Collective."""
        self.wait(self.comm.Ibarrier().Test, what)

    def wait(self, look: Callable[[], Any], what: str | Callable[[], str]):
        """Polls look() until it returns a true value, and returns that: the loop of every wait for other ranks.
        Meanwhile this rank receives what others send, for all of its tables: the awaited rank may itself wait for room
        here, or for a reply. Warns if the wait lasts long. what: as for StallWarning, or its text."""
        found = look()
        if found:
            return found
        with StallWarning(self, what if callable(what) else lambda: what) as stall:
            while not (found := look()):
                self.receive_pending()
                stall.check()
                stall.nap()
        return found

    def receive_pending(self):
        """Receives what other ranks have sent to this one, without waiting."""
        if self.wires:
            self.comm.Iprobe()  # MPI moves data only in calls
        for receiver in list(self.receivers):
            receiver.receive_pending()

    def start(self, applier):
        """Applies what arrives at an _C.PushApplier while this rank computes, in one thread for all of its tables."""
        self._applier_thread.add(applier)

    def stop(self, applier):
        """Ends start(), whether it was called or not; may be called twice."""
        self._applier_thread.remove(applier)

    def share_memory(self, nbytes: int) -> MPI.Win:
        """Memory of this rank, of nbytes, in a window over the ranks of its node. Collective over the node."""
        return MPI.Win.Allocate_shared(nbytes, 1, comm=self.node)

    def compute_threads(self) -> int:
        """Compute threads per rank: OMP_NUM_THREADS if set, otherwise an equal share of the cores that this node's
        ranks may use. Collective over the node."""
        if os.environ.get("OMP_NUM_THREADS", "").isdigit():
            return max(1, int(os.environ["OMP_NUM_THREADS"]))
        mine = os.sched_getaffinity(0)
        return max(1, min(len(mine), usable_cores(set().union(*self.node.allgather(mine))) // self.node.size))

    def from_first(self, call: Callable[[], Any]) -> Any:
        """Calls `call` on rank 0 and returns its result on every rank. Collective. Raises the UserError of `call` on
        every rank."""
        result, error = None, None
        if self.rank == 0:
            try:
                result = call()
            except UserError as refused:
                error = refused
        self.agree(error)
        return self.comm.bcast(result)

    def check_same(self, name: str, arguments: dict[str, Any]):
        """Raises UserError on every rank unless all ranks give `name` the same arguments, whose texts are compared.
        Collective."""
        mine = {key: str(value) for key, value in arguments.items()}
        given = self.comm.allgather(mine)
        for key, text in given[0].items():
            for rank, other in enumerate(given):
                if other[key] != text:
                    raise UserError(
                        f"{name}: all ranks must give the same arguments, but {key} is {text[:100]} on rank 0 and "
                        f"{other[key][:100]} on rank {rank}"
                    )

    def agree(self, error: Exception | None):
        """Raises on every rank if any rank passes an error: the error of the lowest such rank. Collective."""
        self.meet("for all ranks to come as far")
        errors = self.comm.allgather(None if error is None else (type(error).__name__, str(error)))
        failed = [rank for rank, text in enumerate(errors) if text is not None]
        if not failed:
            return
        if failed[0] == self.rank:
            raise error
        raise ReportedElsewhere(f"rank {failed[0]}: {': '.join(errors[failed[0]])}")


def grouped(first_ranks: list[int]) -> list[list[int]]:
    """The ranks of each node, given the lowest rank of every rank's node."""
    nodes: dict[int, list[int]] = {}
    for rank, first in enumerate(first_ranks):
        nodes.setdefault(first, []).append(rank)
    return list(nodes.values())


def split_nodes(comm, ranks_per_node: int | None):
    """The communicator of the ranks that share memory with this one. Collective."""
    if ranks_per_node is not None and ranks_per_node < 1:
        raise UserError(f"ranks_per_node must be at least 1, got {ranks_per_node}")
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    if ranks_per_node is None:
        return node
    part = node.Split(node.rank // ranks_per_node, key=node.rank)
    node.Free()
    return part
