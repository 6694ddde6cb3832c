"""A user-defined transport for SSP: requests and replies are pickled and sent by one collective call each. Short, and
slow.

table.exchange=toy_transport.Pickled
"""

from hetmpi.comm.two_sided import OwnerRequest, TwoSided, joined


class Pickled(TwoSided):
    """TwoSided with other communication below its rounds."""

    def send_requests(self, pull):
        held, known, size = self.mailbox.take_held(), pull.known(), self.world.size
        requests = {rank: OwnerRequest(pull.route.of(rank)[1], known[pull.route.of(rank)[1]]) for rank in self._remote}
        letters = [None] * size
        for rank in self._remote:
            parts = [message.route.of(rank) for message in held]
            pushes = joined(held, parts, self._record)
            letters[rank] = pushes, (pull.route.of(rank)[0], requests[rank].known, pull.bound)
        self._letters = self._comm.alltoall(letters)
        return requests

    def serve(self):
        for rank in self._remote:
            self.owner.apply(*self._letters[rank][0])
        replies = [None] * self.world.size
        for rank in self._remote:
            replies[rank] = self.owner.reply(*self._letters[rank][1])
        self._replies = self._comm.alltoall(replies)

    def reply_of(self, owner, request, bound):
        clocks, values = self._replies[owner]
        return clocks, request.order[self.owner.wants(request.known, clocks, bound)], values
