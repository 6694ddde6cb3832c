"""Transport of BSP between nodes: rows in rounds and gradients in posts (rounds.py), by rails (rails.py), on a wire.

The ranks of a node show each other what they read and write of other nodes (board.py). Each merges that of the ranks it
collects for, so that rows that several of them read cross the network once, and so do the sums of their gradients
(cpp/wire/node_merge.h).

    read     board: keys of each rank   round: distinct keys, rows   board: rows, and which of them each rank asked for
    write    board: gradients           post: sums by block of ranks

A server writes received sums into rings of the owners on its node, as if the first rank of the block had put them
there, so the inbox treats both transports alike. All ranks make the same calls in the same order; a rank without keys
passes none. A call may wait for another rank to make the same call, but never for room in that rank's rings: a rank
that waits passes on what it has received (progress).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetmpi import _C
from hetmpi.comm.board import WORD, Board
from hetmpi.comm.mailbox import NO_KEYS, LocalRing, Mailbox, Message
from hetmpi.comm.node_memory import NodeMemory
from hetmpi.comm.rails import Rails, blocks_of, origins_by_node
from hetmpi.comm.rounds import MakeWire, Posts, Round, Rounds, Section, Shared, share
from hetmpi.comm.route import Route
from hetmpi.comm.shards import ShardReader
from hetmpi.comm.transport import Endpoint
from hetmpi.comm.waiting import Patience, wait_for
from hetmpi.comm.world import World
from hetmpi.in_flight import InFlight, finish


class Collective:
    """See hetmpi/comm/transport.py, ExactTransport."""

    is_collective = True

    def __init__(self, endpoint: Endpoint, name: str, make_wire: MakeWire):
        """name: of the wire. Collective."""
        self.name: str | None = name
        self._reader = RailReader(endpoint.window, make_wire)
        self._mailbox = RailMailbox(endpoint.window, endpoint.record, make_wire)
        self.reading, self.sending = self._reader.reading, self._mailbox.sending
        self.publish, self.progress = self._mailbox.publish, self._mailbox.progress

    @property
    def shared(self) -> tuple[Shared, ...]:
        return self._reader.rounds, self._mailbox.posts

    @property
    def boards(self) -> tuple[Board, ...]:
        return self._reader.boards + self._mailbox.boards

    @property
    def origins(self) -> list[tuple[int, int]]:
        world = self._mailbox.world
        return origins_by_node(world.nodes)[world.nodes.index(world.node_ranks)]

    def peek(self, route: Route, out: np.ndarray):
        finish(self.reading(route, out))

    def close(self):
        self._mailbox.close()
        self._reader.close()

    @staticmethod
    def share(transports: list[Collective]):
        share([transport._reader for transport in transports], "rounds")
        share([transport._mailbox for transport in transports], "posts")


class RailReader(ShardReader):
    """A ShardReader that gets the rows of other nodes by rounds."""

    server = None

    def __init__(self, window: NodeMemory, make_wire: MakeWire):
        """Collective."""
        super().__init__(window)
        self.rounds = Rounds(window.world, make_wire)
        self.rounds.join(self)
        record, no_rings = _C.RecordFormat(1, False), [[[None] * window.world.node.size]]  # there are no pushes
        self._server = opened_server(window, record, ["weight"], self.rounds.rails.served, no_rings, None, False)
        self.boards = self._keys, self._rows = Board(window.world), Board(window.world)
        self._merge = merge_of(window.world, self.rounds.rails)

    def reading(self, route: Route, out: np.ndarray) -> InFlight[None]:
        """See ExactTransport. Collective."""
        remote = route.remote(self.window.world.is_remote)
        self.window.sync()
        pull = yield from self._pulling(remote)
        self.window.sync()  # at s = 0 all ranks of this node have applied the last step
        merged = Route(*pull.route()) if pull is not None else remote
        letter = ReadLetter(self, merged, len(merged.keys) if pull is not None else len(out))
        one = self.rounds.begin(self, letter)
        yield
        self.rounds.serve(one)
        self.read_local("weight", route, out)
        yield
        self.rounds.receive(one)
        if pull is None:
            letter.place(out)
            yield  # as often as on larger nodes
            return
        num_words = pull.head_words() + letter.num_words
        replies = yield from self._rows.posting(num_words, lambda message: letter.write_reply(pull, message))
        self._merge.place(replies, remote.order, remote.first, out)

    def _pulling(self, remote: Route) -> InFlight[_C.NodePull | None]:
        """What the ranks of this node pull from those that this rank collects for; None if it is alone on its
        node."""
        if self.window.world.node.size == 1:
            yield  # as often as on larger nodes
            return None
        num_words = _C.board_route_words(self.window.world.size, len(remote.keys), 0)
        pulls = yield from self._keys.posting(num_words, lambda message: write(message, remote, None))
        return self._merge.pull(pulls)

    def serve(self, one: Round, requests: list[Section]) -> list[int]:
        self._server.take(range(len(requests)), requests)
        return self._server.reply_words()

    def write_replies(self, one: Round, messages: list[np.ndarray], begins: list[int], words: list[int]):
        self._server.write_replies(messages, begins, words)

    def close(self):
        """Collective."""
        self.rounds.leave(self)
        self._keys.free()
        self._rows.free()


class ReadLetter:
    """See rounds.py, Letter: the rows of other nodes that a collector reads."""

    def __init__(self, reader: RailReader, route: Route, num_positions: int):
        self._num, self._width = len(route.keys), reader.shape("weight")[0]
        self._request = _C.RoundRequest(
            reader.rounds.rails.collected, arrays_of(route), num_positions, None, 0, 0, 0, [],
            _C.RecordFormat(1, False), [self._width],
        )  # fmt: skip
        self.words, self.write = self._request.words, self._request.write
        self._replies: list[Section] = []

    def read(self, replies: list[Section]):
        self._replies = replies

    @property
    def num_words(self) -> int:
        """Words of the rows."""
        return -(-4 * self._num * self._width // WORD)

    def write_reply(self, pull: _C.NodePull, message: np.ndarray):
        """Writes the reply to the ranks of this node."""
        head = pull.head_words()
        pull.write_head(message[:head])
        rows = message[head:].view(np.float32)[: self._num * self._width]
        self.place(rows.reshape(self._num, self._width))

    def place(self, out: np.ndarray):
        """Copies the rows to their positions in out (n, width)."""
        self._request.place(self._replies, [out])


class RailMailbox:
    """A Mailbox that sends gradients to owners on other nodes by posts.

    A message is first in transfer, then its server passes it on to the rings of the owners as they have room, from
    which the owners' inboxes read. At most one message is under way: sending() waits for the previous one."""

    server = None

    def __init__(self, window: NodeMemory, record: _C.RecordFormat, make_wire: MakeWire):
        """Collective."""
        self.window, self.world, self.record = window, window.world, record
        self._on_node = Mailbox(window, record)
        self.posts = Posts(self.world, make_wire)
        self.posts.join(self)
        self._grads, rails = Board(self.world), self.posts.rails
        self.boards = (self._grads,)
        self._merge = merge_of(self.world, rails)
        self._rings = [self._rings_of(*client) for client in zip(rails.clients, rails.served)]
        self._server = opened_server(window, record, ["weight"], rails.served, self._rings, None, False)
        self._passed_on = True  # all that has arrived
        self._kept: list[Section] = []  # what the server reads from

    def _rings_of(self, client: int, owners: list[int]) -> list[list[LocalRing | None]]:
        """The rings of each block of a client's node at the owners of this node that the client collects for. No other
        rank writes these rings."""
        (node,) = [node for node in self.world.nodes if client in node]
        here = self.world.node_ranks
        return [
            [
                LocalRing(self.window.local_ring(rank, first), self.record) if place in owners else None
                for place, rank in enumerate(here)
            ]
            for first, _ in blocks_of(node)
        ]

    def sending(self, message: Message, to_all: bool, while_waiting) -> InFlight[int]:
        """See ExactTransport. Collective."""
        world, remote = self.world, message.route.remote(self.world.is_remote)
        merged = [(*remote.arrays, message.values)]
        if world.node.size == 1:
            yield  # as often as on larger nodes
        else:
            dim = message.values.shape[1]
            pushes = yield from self._grads.posting(
                _C.board_route_words(world.size, len(remote.keys), dim),
                lambda words: write(words, remote, message.values),
            )
            merged = self._merge.push(pushes, dim)
        self._await_posts()
        with Patience(self.world, lambda: f"in step {message.step + 1} for its node to make room") as patience:
            while not self._passed_on:
                while_waiting()
                patience.check()
        self.posts.begin(self, PostLetter(self.posts.rails, message.step, merged, self.record))
        yield  # all tables that are written together join the post
        # It must be on its way before this rank waits for room in rings of its node: the post has other ranks'
        # gradients too, for which the owners may wait before they make room.
        self.posts.send()
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
        if not self.posts.is_broken:
            self.publish()
        self.posts.leave(self)
        self._grads.free()


class PostLetter:
    """See rounds.py, Letter: the gradients of a step, which get no reply."""

    def __init__(self, rails: Rails, step: int, merged: list[tuple], record: _C.RecordFormat):
        """merged: (order, keys, first, values) of each block."""
        pushes = [
            _C.PushArrays(step, _C.RouteArrays(*route), values, None, None, None, True) for *route, values in merged
        ]
        no_route = _C.RouteArrays(NO_KEYS, NO_KEYS, np.zeros_like(merged[0][2]))
        self._request = _C.RoundRequest(rails.collected, no_route, 0, None, 0, 0, 0, pushes, record, [])
        self.words, self.write = self._request.words, self._request.write


def opened_server(
    window: NodeMemory, record: _C.RecordFormat, arrays: Sequence[str], owners: list[list[int]],
    rings: list[list[list[LocalRing | None]]], applier: _C.PushApplier | None, judges: bool, is_exact: bool = False,
) -> _C.RoundServer:  # fmt: skip
    """The server of this node's shards. arrays: those of a row in its replies. rings: must live as long. is_exact:
    whether a request waits until the owners have applied its step. Further arguments as in cpp/wire/round.h,
    RoundServer."""
    world = window.world
    shards = [window.on_node[rank] for rank in world.node_ranks]
    return _C.RoundServer(
        applier,
        world.node_ranks.index(world.rank),
        [
            _C.ShardArrays(shard.clock, [as_numbers(getattr(shard, array)) for array in arrays], shard.directory)
            for shard in shards
        ],
        owners,
        [[[ring and ring.arrays for ring in of_record] for of_record in of_client] for of_client in rings],
        record,
        judges,
        [shard.applied for shard in shards] if is_exact else [],
    )


def merge_of(world: World, rails: Rails) -> _C.NodeMerge:
    return _C.NodeMerge(rails.collectors, world.node.rank, blocks_of(world.node_ranks), world.size)


def as_numbers(array: np.ndarray) -> np.ndarray:
    """An array (n,) or (n, width) of numbers of 4 bytes as (n, width) float32."""
    return array.view(np.float32).reshape(len(array), array.shape[1] if array.ndim == 2 else 1)


def arrays_of(route: Route) -> _C.RouteArrays:
    return _C.RouteArrays(*route.arrays)


def write(message: np.ndarray, route: Route, values: np.ndarray | None):
    """Writes a route for the ranks of this node, with the gradients if it is of a push."""
    _C.write_board_route(message, *route.arrays, values)
