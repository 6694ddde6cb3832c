"""A user-defined wire: messages are pickled. Short, and slow.

table.exchange=toy_wire.Pickled
"""


class Pickled:
    """See hetmpi/wire/wire.py, Wire."""

    has_thread = False

    def __init__(self, lines):
        self._comm, self._sent = lines.world.comm.Dup(), []

    def send(self, partner, tag, message):
        self._sent.append(self._comm.isend(message, partner, tag))

    def expect(self, partner, tag):
        """No effect."""

    def arrived(self, partner, tag):
        return self._comm.recv(None, partner, tag) if self._comm.iprobe(partner, tag) else None

    def publish(self):
        return True

    @property
    def is_idle(self):
        self._sent = [request for request in self._sent if not request.Test()]
        return not self._sent

    def free(self):
        self._comm.Free()
