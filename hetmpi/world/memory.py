"""Free memory of a node, and the check that the job's arrays fit."""

from __future__ import annotations

import os

from hetmpi.errors import UserError
from hetmpi.memory import limits
from hetmpi.world.world import World

MIB = 1 << 20


def refuse_if_short(world: World, nbytes: int, shared: bool, message):
    """Raises UserError on every rank if the ranks of some node need more memory than is free; `nbytes` is the need of
    this rank. shared: as for free_memory. message(bytes needed on the node, name of the scarcest resource, bytes free
    there) -> text of the error. Collective."""
    need = world.node.allreduce(nbytes)
    place, free = free_memory(shared)
    world.agree(UserError(message(need, place, free)) if need > free else None)


def size_text(nbytes: float) -> str:
    """Bytes with a unit: 1.5 GiB, 64 MiB."""
    return f"{nbytes / MIB / 1024:,.1f} GiB" if nbytes >= 1024 * MIB else f"{nbytes / MIB:,.0f} MiB"


def free_memory(shared: bool) -> tuple[str, float]:
    """The scarcest resource that limits this node's shards, including /dev/shm if `shared`: (name, free bytes)."""
    places = limits()
    if shared and os.path.isdir("/dev/shm"):
        status = os.statvfs("/dev/shm")
        places["/dev/shm"] = status.f_bavail * status.f_frsize
    return min(places.items(), key=lambda item: item[1])
