"""A user-defined wire: messages are pickled. Short, and slow.

table.exchange=toy_wire.Pickled
"""


class Pickled:
    """See hetmpi/wire/wire.py, Wire."""

    has_thread = False

    def __init__(self, pipes):
        self._comm, self._sent = pipes.world.comm.Dup(), []

    def send(self, tag, messages):
        self._sent += [self._comm.isend(message, partner, tag) for partner, message in messages.items()]

    def expect(self, tag, partners):
        """No effect."""

    def arrived(self, tag, partners):
        here = [partner for partner in partners if self._comm.iprobe(partner, tag)]
        return {partner: self._comm.recv(None, partner, tag) for partner in here}

    def publish(self):
        return True

    @property
    def is_idle(self):
        self._sent = [request for request in self._sent if not request.Test()]
        return not self._sent

    def free(self):
        self._comm.Free()
