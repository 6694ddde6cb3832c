"""A user-defined transport for SSP: messages are pickled and sent by a collective call. Short, and slow.

table.exchange=toy_transport.Pickled
"""

from hetmpi.comm.rounds import Rounds
from hetmpi.comm.two_sided import TwoSided


class Pickled(TwoSided):
    """TwoSided with other communication below its rounds."""

    def open_rounds(self):
        return PickledRounds(self.world)


class PickledRounds(Rounds):
    def send_to(self, partners, messages, tag):
        letters = [None] * self.world.size
        for partner, message in zip(partners, messages):
            letters[partner] = message
        self._received = self.comm.alltoall(letters)

    def expect_from(self, partners, tag):
        """No effect: the collective call receives."""

    def receive_from(self, partners, tag):
        return [self._received[partner] for partner in partners]
