"""Work that takes other ranks, as generators that yield while what they sent for is in flight.

A generator posts what it needs, yields, and waits for it when it is taken up again: so that the requests of several
tables are in flight together. Whoever has one alone runs it to its end.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import TypeVar

Result = TypeVar("Result")
InFlight = Generator[None, None, Result]


def finish(one: InFlight[Result]) -> Result:
    """Runs one to its end -> what it returns."""
    while True:
        try:
            next(one)
        except StopIteration as end:
            return end.value


def together(several: dict[str, InFlight[Result]]) -> dict[str, Result]:
    """Runs several in turns, in their order, each until it yields -> name to what each returns. All ranks that pass the
    same ones post their collective calls in the same order, if each yields equally often before it makes one."""
    results, running = {}, dict(several)
    while running:
        for name, one in list(running.items()):
            try:
                next(one)
            except StopIteration as end:
                results[name] = end.value
                del running[name]
    return {name: results[name] for name in several}


def timed(span: AbstractContextManager, one: InFlight[Result]) -> InFlight[Result]:
    """The same, with `span` entered while it works, not while it has yielded."""
    while True:
        with span:
            try:
                next(one)
            except StopIteration as end:
                return end.value
        yield
