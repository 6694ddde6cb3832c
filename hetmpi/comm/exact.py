"""Transport of BSP by requests that a thread answers, and on one node: rows of other nodes by a request and a reply
(cpp/wire/server.h), gradients by a request of pushes alone, without reply.

A server answers when all owners of its node have applied the steps that the request asks for, as they note in shared
memory. So do the ranks of a node read each other's rows, and no barrier is needed. A server passes gradients on to the
owners' rings, each client's to rings of their own, so the inbox treats all origins alike.
"""

from __future__ import annotations

import numpy as np

from hetmpi import _C
from hetmpi.comm.collective import arrays_of, opened_server
from hetmpi.comm.mailbox import LocalRing, Mailbox, Message
from hetmpi.comm.rounds import MakeWire, Round, Rounds, Section, Shared, share
from hetmpi.comm.route import Route
from hetmpi.comm.shards import ShardReader
from hetmpi.comm.transport import Endpoint
from hetmpi.comm.waiting import wait_for
from hetmpi.in_flight import InFlight, finish

READ = 0  # reason of a request


class Exact:
    """See hetmpi/comm/transport.py, ExactTransport; and rounds.py, Member."""

    is_collective = False

    def __init__(self, endpoint: Endpoint, name: str | None, make_wire: MakeWire):
        """name: of the wire, which has a thread; None on one node. Collective. Raises UserError where the wire does."""
        self.name, self.window, self.world = name, endpoint.window, endpoint.window.world
        self._record, self._steps = endpoint.record, endpoint.steps
        self._near, self._shards = Mailbox(endpoint.window, endpoint.record), ShardReader(endpoint.window)
        self._width, _ = self._shards.shape("weight")
        self.rounds = Rounds(self.world, make_wire)
        clients = self.rounds.rails.clients
        self._rings = [[[self._ring(owner, client) for owner in self.world.node_ranks]] for client in clients]
        owners = [list(range(self.world.node.size))] * len(clients)
        self.server = opened_server(
            endpoint.window, endpoint.record, ["weight"], owners, self._rings, None, False, is_exact=True
        )
        self.rounds.join(self)

    def _ring(self, owner: int, client: int) -> LocalRing:
        return LocalRing(self.window.local_ring(owner, client), self._record)

    @property
    def shared(self) -> tuple[Shared, ...]:
        return (self.rounds,)

    @property
    def origins(self) -> list[tuple[int, int]]:
        return [(rank, rank) for rank in range(self.world.size)]

    def reading(self, route: Route, out: np.ndarray) -> InFlight[None]:
        step, remote = self._steps(), route.remote(self.world.is_remote)
        reply = RowReply(self, remote, len(out), step) if len(remote.order) else None
        return self._receiving(route, out, step, reply)

    def _receiving(self, route: Route, out: np.ndarray, step: int, reply: RowReply | None) -> InFlight[None]:
        if not self.server.has_applied(step):
            wait_for(
                self.world, lambda: self.server.has_applied(step),
                f"in step {step} for the ranks of its node to apply the gradients",
            )  # fmt: skip
        self._shards.read_local("weight", route, out)
        if reply is not None:
            reply.serve()
            yield
            reply.receive()
            reply.place(out)

    def peek(self, route: Route, out: np.ndarray):
        finish(self.reading(route, out))

    def sending(self, message: Message, to_all: bool, while_waiting) -> InFlight[int]:
        if not self.world.is_one_node:
            self.rounds.send_alone(self, Pushes(self, message))
        yield
        return self._near.send(message, to_all, while_waiting)

    def publish(self):
        if not self.rounds.wire.publish():
            wait_for(self.world, self.rounds.wire.publish, "for other ranks to make room for its gradients")

    def progress(self):
        self.rounds.wire.publish()
        self.world.progress()

    def packed(self, route: Route, num: int, reason: int, step: int, pushes: list[_C.PushArrays]) -> _C.RoundRequest:
        return _C.RoundRequest(
            self.rounds.rails.owners, arrays_of(route), num, None, reason, 0, step, pushes, self._record, [self._width]
        )

    def serve(self, one: Round, requests: list[Section]) -> list[int]:
        """No effect: this rank has no clients that its wire does not answer."""
        return []

    def write_replies(self, one: Round, messages: list[np.ndarray], begins: list[int], words: list[int]):
        """No effect."""

    def close(self):
        self.rounds.leave(self)

    @staticmethod
    def share(transports: list[Exact]):
        share(transports, "rounds")


class RowReply:
    """The rows of other nodes that a read asks for. See rounds.py, Letter."""

    def __init__(self, transport: Exact, route: Route, num: int, step: int):
        self._rounds = transport.rounds
        self._packed = transport.packed(route, num, READ, step, [])
        self.words, self.write = self._packed.words, self._packed.write
        self._sections: list[Section] = []
        self._round = self._rounds.begin(transport, self)

    def read(self, replies: list[Section]):
        self._sections = replies

    def serve(self):
        self._rounds.serve(self._round)

    def receive(self):
        self._rounds.receive(self._round)

    def place(self, out: np.ndarray):
        self._packed.place(self._sections, [out])


class Pushes:
    """The gradients of a step. See rounds.py, Letter."""

    def __init__(self, transport: Exact, message: Message):
        push = _C.PushArrays(message.step, arrays_of(message.route), message.values, None, None, None, True)
        self._packed = transport.packed(Route.empty(transport.world.size), 0, _C.PUSHES, 0, [push])
        self.words, self.write = self._packed.words, self._packed.write

    def read(self, replies: list[Section]):
        raise RuntimeError("pushes get no reply")
