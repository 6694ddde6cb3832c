"""Sections: messages of several tables between two ranks.

A message is the number of words of each table's section, then the sections; a word has 8 bytes.
"""

from __future__ import annotations

import numpy as np

from hetmpi import _C

Section = tuple[np.ndarray, int, int]  # words [begin, end) of a message (n,) int64


class Sections:
    """tables: in the order of their sections; None for one that has left, whose section stays empty. num_messages,
    num_bytes: made so far."""

    def __init__(self):
        self.tables: list = []
        self.num_messages = self.num_bytes = 0

    def new(self, lengths: list[list[int]], num: int) -> tuple[list[np.ndarray], list[list[int]]]:
        """Messages to `num` partners, to be filled, and for each table the begin of its section in each message.
        lengths[table][partner], [] for a table that takes no part."""
        messages, begins, num_words = _C.new_messages(lengths, num)
        self.num_messages += num
        self.num_bytes += 8 * num_words
        return messages, begins

    def count(self, message: np.ndarray):
        """Counts a message that was made elsewhere."""
        self.num_messages += 1
        self.num_bytes += message.nbytes

    def of(self, message: np.ndarray) -> list[Section]:
        """The section of each table."""
        begin, found = len(self.tables), []
        for length in message[:begin].tolist():
            found.append((message, begin, begin + length))
            begin += length
        return found

    def length(self, piece: np.ndarray) -> int | None:
        """Words of the message that begins with this piece; None if the piece does not say it."""
        num = len(self.tables)
        return num + sum(piece[:num].tolist()) if len(piece) >= num else None
