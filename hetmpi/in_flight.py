"""Operations that depend on other ranks, as generators that yield while their requests are in flight.

A generator posts its requests, yields, and waits for them when it is resumed: so the requests of several tables
overlap. The caller of a single operation runs it to its end.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import TypeVar

Result = TypeVar("Result")
InFlight = Generator[None, None, Result]


def finish(one: InFlight[Result]) -> Result:
    """Runs an operation to its end and returns its result."""
    while True:
        try:
            next(one)
        except StopIteration as end:
            return end.value


def together(several: dict[str, InFlight[Result]]) -> dict[str, Result]:
    """Runs several operations in turns, in their order, each until it yields. Returns name -> result. All ranks that
    pass the same operations post collective calls in the same order, if each yields equally often before such a
    call."""
    if len(several) == 1:
        return {name: finish(one) for name, one in several.items()}
    results, running = {}, dict(several)
    while running:
        for name, one in list(running.items()):
            try:
                next(one)
            except StopIteration as end:
                results[name] = end.value
                del running[name]
    return {name: results[name] for name in several}


def in_span(span: AbstractContextManager, one: InFlight[Result]) -> InFlight[Result]:
    """The same operation, with `span` entered while it runs, but not while it is suspended."""
    while True:
        with span:
            try:
                next(one)
            except StopIteration as end:
                return end.value
        yield
