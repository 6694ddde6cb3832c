"""Two-sided transport of BSP: rows in rounds and gradients in posts (rounds.py), by rails (rails.py).

A server writes received gradients into rings of the owners on its node, as if the origin had put them there, so the
inbox treats both transports alike. All ranks make the same calls in the same order; a rank without keys passes none. A
call may wait for another rank to make the same call, but never for room in that rank's rings: a rank that waits passes
on what it has received (progress).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetmpi import _C
from hetmpi.comm.mailbox import NO_KEYS, LocalRing, Mailbox, Message
from hetmpi.comm.rails import Rails
from hetmpi.comm.rounds import Posts, Round, Rounds, Section, Shared, share
from hetmpi.comm.route import Route
from hetmpi.comm.shards import ShardReader
from hetmpi.comm.transport import Endpoint, Immediate, Pull, Ticket
from hetmpi.comm.waiting import Patience, wait_for
from hetmpi.comm.window import RmaWindow
from hetmpi.in_flight import InFlight

ARRAYS = ("weight", "mean_square", "clock")


class Collective(Immediate):
    """See hetmpi/comm/transport.py, Transport. BSP pulls no rows in advance."""

    carries_pushes, is_collective = False, True

    def __init__(self, endpoint: Endpoint):
        self.name: str | None = "alltoall"
        self.reader = RailReader(endpoint.window)
        self.mailbox = RailMailbox(endpoint.window, endpoint.record)

    @property
    def shared(self) -> tuple[Shared, ...]:
        return self.reader.rounds, self.mailbox.posts

    def begin(self, pull: Pull) -> Ticket:
        raise NotImplementedError("BSP reads when it needs rows")

    def close(self):
        self.mailbox.close()
        self.reader.close()

    @staticmethod
    def share(transports: list[Collective]):
        """Lets tables that are used together share their messages. Collective."""
        share([transport.reader for transport in transports], "rounds")
        share([transport.mailbox for transport in transports], "posts")


class RailReader(ShardReader):
    """A ShardReader that gets the rows of other nodes by rounds."""

    is_collective = True

    def __init__(self, window: RmaWindow, applier: _C.PushApplier | None = None):
        """applier: as ShardReader. Collective."""
        super().__init__(window, applier)
        self.rounds = Rounds(window.world, meets=True)
        self.rounds.members.append(self)
        self._applier = applier
        self._servers: dict[str, _C.RoundServer] = {}  # by array

    def reading(self, array: str, route: Route, out: np.ndarray) -> InFlight[None]:
        """As ShardReader.reading. Collective."""
        self.window.sync()
        letter = ReadLetter(self, array, route.of_ranks(self.window.world.is_remote), out)
        one = self.rounds.begin(self, letter)
        yield
        self.rounds.serve(one)  # ranks of this node meet: at s = 0 all have applied the last step
        self.window.sync()
        self.read_local(array, route, out)
        yield
        self.rounds.receive(one)

    def serve(self, one: Round, requests: list[Section]) -> list[int]:
        mine, clients = one.letters[self].array, self.rounds.rails.clients
        server = self._server(mine)
        for client, reason in zip(clients, server.take(range(len(clients)), requests)):
            if ARRAYS[reason] != mine:
                self.rounds.refuse(client, f"reads each {ARRAYS[reason]}", f"reads each {mine}")
        return server.reply_words()

    def write_replies(self, one: Round, messages: list[np.ndarray], begins: list[int], words: list[int]):
        self._server(one.letters[self].array).write_replies(messages, begins, words)

    def _server(self, array: str) -> _C.RoundServer:
        if array not in self._servers:
            no_rings = [[None] * len(self.window.world.node_ranks)]
            record = _C.RecordFormat(1, False)  # of no pushes
            self._servers[array] = opened_server(self.window, record, [array], no_rings, self._applier, False)
        return self._servers[array]

    def close(self):
        """Collective."""
        self.rounds.leave(self)


class ReadLetter:
    """See rounds.py, Letter: the rows of other nodes that a rank reads of one array."""

    def __init__(self, reader: RailReader, array: str, route: Route, out: np.ndarray):
        self.array, self._out = array, as_numbers(out)
        self._request = _C.RoundRequest(
            reader.rounds.rails.owners, arrays_of(route), len(out), None, ARRAYS.index(array), 0, [],
            _C.RecordFormat(1, False), [self._out.shape[1]],
        )  # fmt: skip
        self.words, self.write = self._request.words, self._request.write

    def read(self, replies: list[Section]):
        self._request.place(replies, [self._out])


class RailMailbox:
    """A Mailbox that sends gradients to owners on other nodes by posts.

    A message is first in transfer, then its server passes it on to the rings of the owners as they have room, from
    which the owners' inboxes read. At most one message is under way: send() waits for the previous one."""

    def __init__(self, window: RmaWindow, record: _C.RecordFormat):
        """Collective."""
        self.window, self.world, self.record = window, window.world, record
        self._on_node = Mailbox(window, record, self.world.node_ranks)
        self.posts = Posts(self.world)
        self.posts.members.append(self)
        # The server of a client writes its rings, which no other rank writes.
        self._rings = [
            [LocalRing(window.on_node[owner].rings[client], record) for owner in self.world.node_ranks]
            for client in self.posts.rails.clients
        ]
        self._server = opened_server(window, record, ["weight"], self._rings, None, False)
        self._passed_on = True  # all that has arrived
        self._kept: list[Section] = []  # what the server reads from

    def send(self, message: Message, to_all: bool, while_waiting) -> int:
        """As Mailbox.send. Collective."""
        self._await_posts()
        with Patience(self.world, lambda: f"in step {message.step + 1} for its node to make room") as patience:
            while not self._passed_on:
                while_waiting()
                patience.check()
        self.posts.begin(self, PostLetter(self.posts.rails, message, to_all, self.record))
        return self._on_node.send(message, to_all, while_waiting)

    def publish(self):
        """Waits for the messages that all clients sent with this rank's last one, and passes them on as far as the
        rings have room."""
        self.posts.send()
        self._await_posts()

    def _await_posts(self):
        if not self.posts.poll():
            wait_for(self.world, self.posts.poll, "for the gradients of all ranks")
        self._pass_on()

    def progress(self):
        """As publish(), without waiting."""
        self.world.progress()
        self.posts.poll()
        self._pass_on()

    def take(self, client: int, section: Section):
        self._server.take([client], [section])
        self._kept.append(section)
        self._passed_on = False

    def _pass_on(self):
        if not self._passed_on and self._server.apply():
            self._server.clear()
            self._passed_on, self._kept = True, []

    def close(self):
        """Waits for transfers under way; their data is not used. Collective."""
        self.publish()
        self.posts.leave(self)


class PostLetter:
    """See rounds.py, Letter: the gradients of a step, which get no reply."""

    def __init__(self, rails: Rails, message: Message, to_all: bool, record: _C.RecordFormat):
        no_route = Route(NO_KEYS, NO_KEYS, np.zeros(len(message.route.first), np.int64))
        push = _C.PushArrays(message.step, arrays_of(message.route), message.values, None, None, None, to_all)
        self._request = _C.RoundRequest(rails.owners, arrays_of(no_route), 0, None, 0, 0, [push], record, [])
        self.words, self.write = self._request.words, self._request.write


def opened_server(
    window: RmaWindow, record: _C.RecordFormat, arrays: Sequence[str], rings: list[list[LocalRing | None]],
    applier: _C.PushApplier | None, judges: bool,
) -> _C.RoundServer:  # fmt: skip
    """The server of this node's shards. arrays: those of a row in its replies. rings: of the owners, for each client or
    in one list for all; they must live as long. Further arguments as in cpp/wire/round.h, RoundServer."""
    world = window.world
    shards = [window.on_node[rank] for rank in world.node_ranks]
    return _C.RoundServer(
        applier,
        world.node_ranks.index(world.rank),
        [_C.ShardArrays(shard.clock, [as_numbers(getattr(shard, array)) for array in arrays]) for shard in shards],
        [[ring and _C.RingArrays(ring.memory, ring.producer) for ring in of_client] for of_client in rings],
        record,
        judges,
    )


def as_numbers(array: np.ndarray) -> np.ndarray:
    """An array (n,) or (n, width) of numbers of 4 bytes as (n, width) float32."""
    return array.view(np.float32).reshape(len(array), array.shape[1] if array.ndim == 2 else 1)


def arrays_of(route: Route) -> _C.RouteArrays:
    return _C.RouteArrays(route.order, route.rows, route.first)
