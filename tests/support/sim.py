"""Many ranks in one process: the real tables, clients and servers, on a world, memory and wires of this file. A seed
chooses the order of everything, and a case replays exactly.

    ./run.sh simulate [seed=0] [cases=1000] [ranks=1,2,3,4,5,7] [only=NUMBER] [fault=NAME] [jobs=2]
    ./run.sh simulate steps=20 ranks=1024 [nodes=128] [staleness=0]

The first form runs random cases (protocol_cases.py), case i at the (i modulo their number)-th rank count, and prints a
failing one made small. fault: one of FAULTS is planted; the exit code is then 0 if it is found. The second form counts
messages, bytes and operations of one table's steps.

Each rank is a thread of which one runs at a time. It hands over where it waits (World.wait), where it would wait in a
collective call of MPI, and at places where another rank's stores could matter: between the parts of a step, and around
reads of shared memory. Beside the ranks there are
    messages   in order from one partner to another with one tag; otherwise in any order, after any time
    threads    of the core, as functions that the seed calls: the push applier, and by windows the server
Checked are, beyond protocol_cases.py: the bound of every read, clocks that are not newer than their rows, and that
ranks which all wait for something that is not under way are found.

What it does not show: data races, MPI, rows on disk.
"""

import gc
import json
import multiprocessing
import os
import random
import sys
import threading
import time
import traceback
import weakref
import zlib
from collections import defaultdict, deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module

import numpy as np
import protocol_cases
import torch
from protocol_cases import Checked, Driver, draw_case

import hetmpi.table.bsp
import hetmpi.world.memory
from hetmpi import CacheSettings, EmbeddingTable, RowOptimizer, Staleness, World
from hetmpi.spans import Spans
from hetmpi.table.client import MOST_AHEAD
from hetmpi.wire import transport
from hetmpi.world import at_exit
from hetmpi.world.mpi import MPI

STACK_BYTES = 1 << 20
POISON = 0xA5  # of memory that nobody has written
ROOM = 3  # messages of a window's pipe
MOST_TRIES = 200  # of smaller cases


class Deadlock(Exception):
    """Every rank waits, and nothing that it could wait for is under way."""


class Ended(BaseException):
    """Ends a rank's thread because another rank has failed."""


@dataclass(eq=False)
class Pipe:
    """Messages with one tag from one rank to another, on one wire."""

    to: int
    under_way: deque = field(default_factory=deque)
    arrived: deque = field(default_factory=deque)


class Choices:
    """A set of things from which one is drawn.

    things    in any order, to be read alone"""

    def __init__(self):
        self.things, self._places = [], {}

    def add(self, thing):
        if thing not in self._places:
            self._places[thing] = len(self.things)
            self.things.append(thing)

    def discard(self, thing):
        place = self._places.pop(thing, None)
        if place is not None:
            last = self.things.pop()
            if place < len(self.things):
                self.things[place], self._places[last] = last, place


class Simulation:
    """The ranks, and what is under way between them.

    node_of    the node of each rank
    awake      ranks that may go on, or for which something has changed since they looked
    tables     name -> rank -> table
    counts     messages, bytes, waits (hand-overs at one), and what else is counted"""

    def __init__(self, seed, node_of: list[int], stalls: bool = True):
        self.draw, self.node_of, self.size = random.Random(f"sim {seed}"), node_of, len(node_of)
        self.on_node = defaultdict(list)
        for rank, node in enumerate(node_of):
            self.on_node[node].append(rank)
        self.awake, self.busy_pipes, self.pipes = Choices(), Choices(), {}
        self.threads, self.waits_for = [], {}
        self.tables, self.counts = defaultdict(dict), defaultdict(int)
        self._gates, self._left = [threading.Lock() for _ in node_of], self.size
        self._ended, self.error = threading.Lock(), None
        self._meetings: dict = {}
        self.memories, self._memory_was = [], 0  # that nodes share, and their checksum
        self._looks = 0  # of all ranks, since the last change
        speeds = (1.0, 1.0, 1.0, 0.1, 0.01) if stalls else (1.0,)
        self.speed = [self.draw.choice(speeds) for _ in node_of]
        self.pauses = self.draw.choice((0.0, 0.1, 0.5)) if stalls else 0.0
        # Of a message, and of a message or a rank rather than a thread of the core.
        kinds = ((0.5, 0.8), (0.8, 0.9), (0.3, 0.4), (0.3, 0.9), (0.05, 0.5))
        self.chances = self.draw.choice(kinds) if stalls else (0.98, 0.99)

    # Ranks.

    def run(self, main) -> list:
        """main(world) of every rank: what each returns. Raises the first error of one, or Deadlock."""
        results = [None] * self.size

        def rank_main(rank):
            self._gates[rank].acquire()
            try:
                if self.error is None:
                    results[rank] = main(SimWorld(self, rank))
            except Ended:
                pass
            except BaseException as error:
                self.error = self.error or error
            self.leave(rank)

        kept = threading.stack_size(STACK_BYTES)
        for gate in (*self._gates, self._ended):
            gate.acquire()
        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(self.size)]
        for rank, thread in enumerate(threads):
            self.awake.add(rank)
            thread.start()
        threading.stack_size(kept)
        self._gates[0].release()
        self._ended.acquire()
        for thread in threads:
            thread.join()
        self.tables.clear()
        self.threads.clear()
        if self.error is not None:
            raise self.error
        return results

    def leave(self, rank: int):
        """The end of a rank's thread."""
        self._left -= 1
        self.awake.discard(rank)
        self.waits_for.pop(rank, None)
        self.change(rank)
        if self._left == 0:
            self._ended.release()
        elif self.error is not None:
            self.end_all(rank)
        else:
            self.hand_over(rank, is_leaving=True)

    def end_all(self, rank: int):
        """After an error: lets one more rank end, which lets the next one."""
        for other in (*self.awake.things, *self.waits_for):
            if other != rank:
                self._gates[other].release()
                return

    def pause(self, rank: int):
        """A place where others may go on first."""
        if self.pauses and self.draw.random() < self.pauses:
            self.hand_over(rank)

    def wait(self, rank: int, look, what):
        """Hands over until look() returns a true value, which it returns."""
        while not (found := look()):
            self.waits_for[rank] = what
            self.awake.discard(rank)
            self.counts["waits"] += 1
            self.hand_over(rank)
        if self.waits_for.pop(rank, None) is not None:
            self.awake.add(rank)
            self.change(rank)
        return found

    def change(self, rank: int):
        """Ranks of the same node have a reason to look again."""
        self._looks = 0
        for other in self.on_node[self.node_of[rank]]:
            if other in self.waits_for:
                self.awake.add(other)

    def change_all(self):
        self._looks = 0
        for other in self.waits_for:
            self.awake.add(other)

    def hand_over(self, rank: int, is_leaving: bool = False):
        """Lets events happen until the seed chooses a rank, and that one run."""
        try:
            chosen = self.next_rank()
        except BaseException as error:
            self.error = self.error or error
            if is_leaving:
                self.end_all(rank)
                return
            raise Ended from None
        if chosen == rank:
            return
        self._gates[chosen].release()
        if is_leaving:
            return
        self._gates[rank].acquire()
        if self.error is not None:
            raise Ended

    def next_rank(self) -> int:
        random, threads, awake, pipes = self.draw.random, self.threads, self.awake.things, self.busy_pipes.things
        for_message, for_message_or_rank = self.chances
        while True:
            number = random()
            if pipes and (number < for_message or not awake):
                self.deliver(pipes[int(random() * len(pipes))])
            elif threads and number >= for_message_or_rank:
                self.run_thread(threads[int(random() * len(threads))])
            elif awake:
                rank = awake[int(random() * len(awake))]
                if random() < self.speed[rank] or len(awake) == 1:
                    if rank in self.waits_for:
                        self.awake.discard(rank)
                    return rank
            else:
                self.look_for_more()

    def look_for_more(self):
        """No rank may go on: runs all threads of the core, and lets all ranks look twice more."""
        if any([self.run_thread(thread) for thread in self.draw.sample(self.threads, len(self.threads))]):
            return
        memory = zlib.crc32(b"".join(self.memories))
        self._looks = self._looks + 1 if memory == self._memory_was else 0
        self._memory_was = memory
        if self._looks > 2:
            said = {rank: what() if callable(what) else what for rank, what in sorted(self.waits_for.items())}
            raise Deadlock("; ".join(f"rank {rank} waits {what}" for rank, what in list(said.items())[:16]))
        for other in self.waits_for:
            self.awake.add(other)

    def run_thread(self, thread) -> bool:
        rank, proceed = thread
        was_busy = bool(proceed())
        if was_busy:
            self.change(rank)
        return was_busy

    # Messages.

    def pipe(self, wire: int, sender: int, to: int, tag: int) -> Pipe:
        key = wire, sender, to, tag
        if key not in self.pipes:
            self.pipes[key] = Pipe(to)
        return self.pipes[key]

    def send(self, pipe: Pipe, message):
        pipe.under_way.append(message)
        self.busy_pipes.add(pipe)
        self.counts["messages"] += 1
        self.counts["bytes"] += message.nbytes

    def deliver(self, pipe: Pipe):
        pipe.arrived.append(pipe.under_way.popleft())
        if not pipe.under_way:
            self.busy_pipes.discard(pipe)
        self.change(pipe.to)

    # Collective calls.

    def join(self, comm, number: int, value) -> "Meeting":
        """The number-th collective call on a communicator, by one more of its ranks."""
        key = comm.key, number
        meeting = self._meetings.setdefault(key, Meeting(len(comm.ranks)))
        meeting.values[comm.rank] = value
        if meeting.is_whole:
            del self._meetings[key]
            self.change_all()
        return meeting


class Meeting:
    """What the ranks of a communicator have given to one of its collective calls."""

    def __init__(self, size: int):
        self._size, self.values = size, {}

    def wait(self, comm: "SimComm") -> list:
        """The values in the order of ranks, once all have come."""
        comm.sim.wait(comm.ranks[comm.rank], lambda: self.is_whole, "in a collective call of MPI")
        return [self.values[rank] for rank in range(self._size)]

    @property
    def is_whole(self) -> bool:
        return len(self.values) == self._size


class SimRequest:
    """A rank's end of a collective call that does not block."""

    def __init__(self, comm: "SimComm", meeting: Meeting):
        self._comm, self._meeting = comm, meeting

    def Test(self) -> bool:
        return self._meeting.is_whole

    def Wait(self):
        self._meeting.wait(self._comm)


class SimComm:
    """What hetmpi uses of a communicator. Its blocking calls receive nothing while they wait."""

    def __init__(self, sim: Simulation, key, ranks: list[int], world_rank: int):
        self.sim, self.key, self.ranks = sim, key, ranks
        self.rank, self.size, self._num = ranks.index(world_rank), len(ranks), 0

    def _join(self, value) -> Meeting:
        self._num += 1
        return self.sim.join(self, self._num, value)

    def allgather(self, value) -> list:
        return self._join(value).wait(self)

    def gather(self, value, root: int = 0):
        found = self.allgather(value)
        return found if self.rank == root else None

    def bcast(self, value, root: int = 0):
        return self.allgather(value)[root]

    def allreduce(self, value, op=None):
        found = self.allgather(value)
        return max(found) if op == MPI.MAX else sum(found[1:], found[0])

    def Barrier(self):
        self.allgather(None)

    def Ibarrier(self) -> SimRequest:
        return SimRequest(self, self._join(None))

    def Iprobe(self) -> bool:
        return False

    def Free(self):
        """No effect."""


class SimWorld(World):
    """hetmpi/world/world.py, World, of one rank of a simulation."""

    def __init__(self, sim: Simulation, rank: int):
        self.sim, self.rank, self.size, self.host = sim, rank, sim.size, f"host{sim.node_of[rank]}"
        self.node_ranks = sim.on_node[sim.node_of[rank]]
        self.comm = SimComm(sim, "world", list(range(sim.size)), rank)
        self.node = SimComm(sim, ("node", sim.node_of[rank]), self.node_ranks, rank)
        self.nodes = sorted(sim.on_node.values())
        self.is_one_node, self.num_cores = len(self.nodes) == 1, sim.size
        self.is_remote = ~np.isin(np.arange(sim.size), self.node_ranks)
        self.receivers, self.num_wires, self._threads = {}, 0, {}

    wires = weakref.WeakSet()

    def wait(self, look, what):
        def look_and_receive():
            if found := look():
                return found
            self.receive_pending()
            return look()

        return self.sim.wait(self.rank, look_and_receive, what)

    def start(self, applier):
        def proceed():
            try:
                return applier.drain()
            except Exception:  # kept, and raised in the rank's next call
                return 0

        self._threads[applier] = self.rank, proceed
        self.sim.threads.append(self._threads[applier])

    def stop(self, applier):
        thread = self._threads.pop(applier, None)
        if thread in self.sim.threads:  # empty once the simulation has ended
            self.sim.threads.remove(thread)

    def share_memory(self, nbytes: int):
        memory = np.full(nbytes + 64, POISON, np.uint8)
        begin = -memory.ctypes.data % 64
        self.sim.memories.append(memory)
        return SimWindow(self.node.allgather(memory[begin : begin + nbytes]))


class SimWindow:
    """Memory that a node shares, as MPI's window."""

    def __init__(self, memories: list[np.ndarray]):
        self._memories = memories

    def Shared_query(self, place: int):
        return self._memories[place], 1

    def Lock_all(self, _=0):
        """No effect, as the next ones."""

    Sync = Unlock_all = Free = Lock_all


class SimMessages:
    """hetmpi/wire/wire.py, Wire, without a thread."""

    has_thread = False

    def __init__(self, pipes):
        world = pipes.world
        self._sim, self._rank = getattr(world, "sim", None), world.rank
        self._number, world.num_wires = world.num_wires, world.num_wires + 1
        self._sent = [self._pipe_to(*one) for one in pipes.outgoing]

    def _pipe_to(self, partner: int, tag: int) -> Pipe:
        return self._sim.pipe(self._number, self._rank, partner, tag)

    def send(self, tag, messages):
        self._sim.pause(self._rank)
        for partner, message in messages.items():
            self._sim.send(self._pipe_to(partner, tag), message)
        self._sim.pause(self._rank)

    def expect(self, tag, partners):
        """No effect."""

    def arrived(self, tag, partners):
        pipes = {partner: self._sim.pipe(self._number, partner, self._rank, tag) for partner in partners}
        return {partner: pipe.arrived.popleft() for partner, pipe in pipes.items() if pipe.arrived}

    def publish(self):
        return True

    @property
    def is_idle(self):
        return not any(pipe.under_way for pipe in self._sent)

    def free(self):
        """No effect."""


class SimWindows(SimMessages):
    """A wire with a thread, whose pipes have room for few messages."""

    has_thread = True
    REQUESTS, REPLIES = 1, 2  # a pipe each way, whatever the tags

    def __init__(self, pipes):
        super().__init__(pipes)
        self._server, self._clients, self._unsent = pipes.server, pipes.rails.clients, deque()
        self._sent = [self._pipe_to(server, self.REQUESTS) for server in pipes.rails.servers]
        self._replies = [self._pipe_to(client, self.REPLIES) for client in self._clients]
        self._error = None
        pipes.world.receivers[self] = None
        self._world = pipes.world
        self._thread = self._rank, self._proceed
        self._sim.threads.append(self._thread)

    def _proceed(self) -> bool:
        was_busy = False
        try:
            if self._error is None:
                for i, client in enumerate(self._clients):
                    pipe = self._sim.pipe(self._number, client, self._rank, self.REQUESTS)
                    if pipe.arrived:
                        self._server.put(i, pipe.arrived.popleft())
                        was_busy = True
                for i, reply in self._server.proceed():
                    self._sim.send(self._replies[i], reply)
                    was_busy = True
        except Exception as error:
            self._error = error
            was_busy = True
        return was_busy

    def receive_pending(self):
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def send(self, tag, messages):
        self._sim.pause(self._rank)
        self._unsent += ((self._pipe_to(partner, self.REQUESTS), message) for partner, message in messages.items())
        self.publish()

    def arrived(self, tag, partners):
        self.publish()
        return super().arrived(self.REPLIES, partners)

    def publish(self):
        left = deque()
        for pipe, message in self._unsent:
            has_room = len(pipe.under_way) + len(pipe.arrived) < ROOM and all(pipe is not other for other, _ in left)
            if has_room:
                self._sim.send(pipe, message)
            else:
                left.append((pipe, message))
        self._unsent = left
        return not left

    @property
    def is_idle(self):
        return not self._unsent and super().is_idle

    def free(self):
        self._world.receivers.pop(self, None)
        self._sim.threads.remove(self._thread)


def pausing_spans(world: SimWorld) -> Spans:
    """Others may go on before each part of a step, and around reads of shared memory."""
    spans = Spans()
    spans.on_pause = lambda _: world.sim.pause(world.rank)
    return spans


def install(put=setattr):
    """Puts the simulation's parts in the place of what this process has none of. put(owner, name, value): sets an
    attribute."""
    put(transport, "WIRES", {"windows": SimWindows, "messages": SimMessages})
    put(hetmpi.table.bsp, "trial_ms", lambda *_: np.array([10.0]))
    put(hetmpi.world.memory, "free_memory", lambda shared: ("memory", 1e15))
    put(protocol_cases, "Checked", SimChecked)


# Cases.


def draw_sim_case(seed: int, number: int, size: int) -> dict:
    """As draw_case, with small rings and without wires of another class."""
    case = draw_case(seed, number, size)
    draw = random.Random(f"{seed} {number} {size} sim")
    case["num_steps"] = min(case["num_steps"], draw.choice([4, 8, 16]))
    for table in case["tables"]:
        table["inbox_bytes"] = draw.choice([1, 4096])
        table["num_rows"] = min(table["num_rows"], draw.choice([40, 200]))
        table["exchange"] = {"toy_wire.Pickled": "messages"}.get(table["exchange"], table["exchange"])
    return case


class SimChecked(Checked):
    """Checked, in a simulation.

    clocks    the owners' clocks (num_rows,) at the begin of each of this rank's last reads"""

    def __init__(self, world: SimWorld, case: dict, name: str, **settings):
        super().__init__(world, case, name, spans=pausing_spans(world), **settings)
        world.sim.tables[name][world.rank] = self.table
        self._tables, self.clocks = world.sim.tables[name], deque(maxlen=MOST_AHEAD + 1)
        partition = self.table.partition
        self._keys_of = [partition.keys_of(rank, 0, partition.num_local_rows(rank)) for rank in range(world.size)]
        self.counts_ones = case["grads"] == "ones"

    def owners_clocks(self) -> np.ndarray:
        clocks = np.zeros(self.table.num_rows, np.int64)
        for rank, keys in enumerate(self._keys_of):
            if len(keys) and rank in self._tables and self._tables[rank].shard is not None:
                clocks[keys] = self._tables[rank].shard.clock
        return clocks

    def check_bound(self, what: str, keys: np.ndarray):
        """Checks the clocks of the rows just read at s >= 1: a pull of k batches leaves after the k-th read before."""
        bound, client, (_, rows) = self.table.staleness.bound, self.table.client, self.seen[-1]
        slots, clocks = client.last_read
        clocks = np.where(slots >= 0, self.table.cache.clocks(slots), clocks)
        ago = client.context.batches_per_pull + 1
        if bound is not None and len(self.clocks) >= ago:
            self.check(f"{what}: clock", keys, clocks, self.clocks[-ago][keys] - bound, 1 << 30)
        if self.counts_ones and len(keys):
            updates = (self.first[keys] - rows).min(1)
            self.check(f"{what}: updates in a row", keys, updates, clocks, 1 << 30)


class SimDriver(Driver):
    """Driver, in a simulation."""

    def compute(self, step: int):
        self.world.sim.pause(self.world.rank)

    def read(self, number: int, step: int, done: int):
        bounded = {name: one for name, one in self.checked.items() if not one.table.staleness.is_exact}
        for checked in bounded.values():
            checked.clocks.append(checked.owners_clocks())
        super().read(number, step, done)
        for name, checked in bounded.items():
            checked.check_bound(f"step {step}: read", self.batches[number][0][name].numpy())


def drive(world: SimWorld, case: dict) -> dict[str, SimChecked]:
    driver = SimDriver(world, case)
    driver.run()
    return driver.checked


def runs_of(case: dict) -> list[tuple[list[int], str]]:
    """(node of each rank, what all have in common) of each run of a case: at s = 0 with Adagrad the bits of one node,
    by messages between nodes of one rank those of another order of events."""
    size, nodes = case["ranks"], case["nodes"]
    node_of = [rank // nodes for rank in range(size)] if isinstance(nodes, int) else nodes
    if case["grads"] == "adagrad":
        return [([0] * size, "one node"), (node_of, "one node")]
    are_messages = all(table["exchange"] == "messages" for table in case["tables"])
    if are_messages and len(set(node_of)) == size > 1:
        return [(node_of, "another order of events")] * 2
    return [(node_of, "itself")]


def simulate(case: dict, seed) -> list[str]:
    """What differs in a case, in the order of events that the seed chooses."""
    runs = []
    try:
        for number, (node_of, _) in enumerate(runs_of(case)):
            runs.append(Simulation(f"{seed} {number}", node_of).run(partial(drive, case=case)))
    except Deadlock as error:
        return [f"deadlock: {error}"]
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return [f"{type(error).__name__}: {error} ({place.filename.rpartition('/')[2]}:{place.lineno})"]
    finally:
        at_exit._open.clear()
    told, (_, kind) = [], runs_of(case)[-1]
    for rank, checked in enumerate(runs[-1]):
        told += [f"rank {rank}, {text}" for one in checked.values() for text in one.told]
    for rank, (one_node, here) in enumerate(zip(runs[0], runs[-1])):
        for name, checked in here.items():
            pairs = zip(one_node[name].seen, checked.seen)
            told += [f"rank {rank}, {what}: not the bits of {kind}" for (what, a), (_, b) in pairs if (a != b).any()]
    return told


def made_small(case: dict, seed) -> tuple[dict, object, list[str]]:
    """A smaller case that fails too, with its seed, and what differs there."""
    told, tries = simulate(case, seed), iter(range(MOST_TRIES))
    while True:
        seeds = seed, *(f"{seed} {i}" for i in range(3))
        smaller = ((case | change, other) for change in changes_of(case) for other in seeds)
        failing = ((*one, found) for one, _ in zip(smaller, tries) if (found := simulate(*one)))
        first = next(failing, None)
        if first is None:
            return case, seed, told
        case, seed, told = first


def changes_of(case: dict):
    """Smaller cases, the smallest first."""
    steps, tables = case["num_steps"], case["tables"]
    yield from ({"num_steps": num} for num in (1, steps // 2, steps - 1) if 0 < num < steps)
    yield from ({"tables": tables[:i] + tables[i + 1 :]} for i in range(len(tables)) if len(tables) > 1)
    yield from (
        {name: value} for name, value in (("depth", 0), ("dense", ""), ("calls", "no group")) if case[name] != value
    )
    for i, table in enumerate(tables):
        for name, value in (("dim", 1), ("batches_per_pull", 1), ("partition", "round_robin"), ("inbox_bytes", 4096)):
            if table[name] != value:
                yield {"tables": [*tables[:i], table | {name: value}, *tables[i + 1 :]]}


def count_steps(ranks: int, nodes: int, steps: int, staleness: int | None, exchange: str):
    """Prints what the steps of one table send, each rank with keys of its own and one that all share."""

    def steps_of(world: SimWorld):
        num_rows = 4 * world.size
        cache = CacheSettings(capacity_rows=0 if staleness == 0 else 64)
        table = EmbeddingTable(
            world, num_rows, 2, RowOptimizer("sgd", 1.0), init_std=0.0, inbox_bytes=1, exchange=exchange,
            staleness=Staleness(staleness, drift=0.0), cache=cache,
        )  # fmt: skip
        counts = world.sim.counts
        world.comm.Barrier()
        begun = dict(counts)
        for step in range(steps):
            keys = torch.unique(torch.tensor([0, *((7 * world.rank + 13 * step + i) % num_rows for i in range(5))]))
            table.read(keys)
            table.write(keys, torch.ones(len(keys), 2))
            world.comm.Ibarrier().Wait()
        world.comm.Barrier()
        made = {name: counts[name] - begun.get(name, 0) for name in ("messages", "bytes", "waits")}
        table.flush()
        first = table.peek(torch.tensor([0]))
        table.close()
        return made, float(-first[0, 0])

    began = time.monotonic()
    sim = Simulation(0, [rank * nodes // ranks for rank in range(ranks)], stalls=False)
    results = sim.run(steps_of)
    assert {updates for _, updates in results} == {float(ranks * steps)}, "row 0 lacks updates"
    shown = ", ".join(f"{num / steps / ranks:.1f} {name}" for name, num in results[0][0].items())
    took = time.monotonic() - began
    print(f"simulate: {steps} steps of {ranks} ranks on {nodes} nodes in {took:.0f} s; a rank and step: {shown}")
    print("simulate: the row that all ranks write has every update")


SAID_EVERY = 5000


def run_share(
    seed: int, numbers: list[tuple[int, int]], core: int | None, fault: str | None, until: float
) -> tuple[int, list]:
    """Runs cases (number, ranks). Returns the number that ran, and those that failed with what differs."""
    install()
    torch.set_num_threads(1)
    if core is not None:  # threads that run in turns hand over faster on one core
        os.sched_setaffinity(0, {core})
    if fault is not None:
        import_module("faults").FAULTS[fault](setattr)
    failed, num = [], 0
    for number, size in numbers:
        if time.monotonic() > until or (failed and fault is not None):
            break
        case, num = draw_sim_case(seed, number, size), num + 1
        told = simulate(case, f"{seed} {number}")
        if told:
            failed.append((number, size, case, told))
            if fault is None:
                gc.collect()
                small, small_seed, small_told = made_small(case, f"{seed} {number}")
                failed[-1] = number, size, small, [*told[:4], f"made small, seed {small_seed!r}:", *small_told[:4]]
        if num % SAID_EVERY == 0:  # for whoever ends this early
            print(f"simulate: a job's first {num:,} of {len(numbers):,} cases, {len(failed)} failures", flush=True)
    return num, failed


def main(
    seed="0", cases="1000", ranks="1,2,3,4,5,7", only=None, fault=None, jobs="2", limit_s="1e9", steps=None,
    nodes=None, staleness="0", exchange="messages",
):  # fmt: skip
    if steps is not None:
        install()
        bound = None if staleness == "null" else int(staleness)
        return count_steps(int(ranks), int(nodes or ranks), int(steps), bound, exchange)
    counts, num_jobs, began = [int(count) for count in ranks.split(",")], int(jobs), time.monotonic()
    numbers = range(int(cases)) if only is None else [int(only)]
    wanted, until = [(i, counts[i % len(counts)]) for i in numbers], began + float(limit_s)
    if num_jobs == 1 or only is not None:
        shares = [run_share(int(seed), wanted, None, fault, until)]
    else:
        with ProcessPoolExecutor(num_jobs, multiprocessing.get_context("spawn")) as pool:
            run, cores = partial(run_share, int(seed), fault=fault, until=until), sorted(os.sched_getaffinity(0))
            turn = len(counts)  # cases of each job have all numbers of ranks
            parts = [[one for one in wanted if one[0] // turn % num_jobs == i] for i in range(num_jobs)]
            shares = list(pool.map(run, parts, [cores[(os.getpid() + i) % len(cores)] for i in range(num_jobs)]))
    failed, num = [one for _, found in shares for one in found], sum(num for num, _ in shares)
    for number, size, case, told in failed:
        print(f"simulate: seed={seed} ranks={size} only={number} failed: {json.dumps(case)}", *told, sep="\n")
    took = time.monotonic() - began
    print(f"simulate: {num} cases in {took:.0f} s, {num / took:.1f} a second, {len(failed)} failures")
    sys.exit((not failed) if fault else bool(failed))


if __name__ == "__main__":
    import_module("sim").main(**dict(argument.split("=", 1) for argument in sys.argv[1:]))
