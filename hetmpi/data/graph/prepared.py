"""Prepared graphs: a folder of arrays, written once by one rank, then mapped read-only by all. So a node of the cluster
holds one copy, in the kernel's page cache, whatever its number of ranks and whatever kills them.

    <folder>/graph.json     version, field_rows, num_classes, class_names, dense_names, digests, files
            /<array>.npy    the arrays of Graph; texts as UTF-8 bytes and their offsets

All files have checksums (data/checked.py), which the ranks verify at every start, each a part of the blocks.
A folder is written under another name and renamed when it is complete.
"""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import time

import numpy as np
import xxhash

from hetmpi.data.checked import Damaged, check_array, read_json, save_array, write_json
from hetmpi.data.files import DataError, first_line
from hetmpi.data.graph.graph import Graph, offsets_of

VERSION = 4  # of the format
ABANDONED_S = 3600  # an unfinished folder unchanged for this time belongs to a process that died
ARRAYS = ("indptr", "indices", "id_offsets", "ids", "labels", "split", "dense")
OPTIONAL = ("weights", "key_hashes")
COUNTS = ("field_rows", "num_classes", "class_names", "dense_names")


def is_complete(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, "graph.json"))


def write_graph(graph: Graph, folder: str):
    """Writes the graph as `folder`. Raises DataError if the folder cannot be written."""
    part = f"{folder}.part-{socket.gethostname()}-{os.getpid()}"
    try:
        remove_abandoned(folder)
        shutil.rmtree(part, ignore_errors=True)  # a restarted container may have the same host name and process id
        os.makedirs(part)
        for name in ARRAYS:
            save_array(os.path.join(part, f"{name}.npy"), getattr(graph, name))
        for name in OPTIONAL:
            if getattr(graph, name) is not None:
                save_array(os.path.join(part, f"{name}.npy"), getattr(graph, name))
        if graph.names is not None:
            write_names(graph.names, part)
        counts = {name: getattr(graph, name) for name in COUNTS}
        files = {"digests": digests_of(graph), "files": sorted(os.listdir(part))}
        write_json({"version": VERSION, **counts, **files}, part, "graph.json")
        if not is_complete(folder):  # it has lost a file, as folders appear with all of them
            shutil.rmtree(folder, ignore_errors=True)
        os.rename(part, folder)
    except OSError as error:
        if not is_complete(folder):  # another job may have written it
            cure = "set data.cache to a folder that is writable and has room"
            raise DataError(f"data.cache: {folder} cannot be written: {error.strerror}: {cure}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def digests_of(graph: Graph) -> dict[str, str]:
    """What the rows and outputs of a model belong to -> its hash."""
    names = () if graph.names is None else (graph.names,)
    parts = {
        "edges": (graph.indptr, graph.indices, *(() if graph.weights is None else (graph.weights,))),
        "ids": (graph.id_offsets, graph.ids),
        "names of nodes": names,
        "names of classes": (np.array(graph.class_names, np.str_),),
        "names of numbers": (np.array(graph.dense_names, np.str_),),
    }
    digests = {}
    for part, arrays in parts.items():
        digest = xxhash.xxh3_128()
        for array in arrays:
            digest.update(np.ascontiguousarray(array).view(np.uint8))
        digests[part] = digest.hexdigest()
    return digests


def remove_abandoned(folder: str):
    """Removes unfinished folders of processes that died."""
    parent, name = os.path.split(folder)
    os.makedirs(parent, exist_ok=True)
    for entry in os.scandir(parent):
        if entry.name.startswith(f"{name}.part-") and time.time() - entry.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(entry.path, ignore_errors=True)


def write_names(names: np.ndarray, folder: str):
    if names.dtype == np.int64:
        return save_array(os.path.join(folder, "names.npy"), names)
    texts = [name.encode() for name in names.tolist()]
    save_array(os.path.join(folder, "name_offsets.npy"), offsets_of([len(text) for text in texts]))
    save_array(os.path.join(folder, "name_bytes.npy"), np.frombuffer(b"".join(texts), np.uint8))


def open_graph(folder: str, rank: int = 0, size: int = 1) -> Graph:
    """The graph in a folder, its arrays mapped read-only; names are a Names. Rank `rank` of `size` verifies its part of
    the files. Raises DataError if the folder is not there, or damaged."""
    try:
        counts = read_json(folder, "graph.json")
        for name in counts["files"]:
            check_array(os.path.join(folder, name), rank, size)
    except Damaged as error:
        raise DataError(
            f"data.cache: the prepared graph {folder} is damaged: {error}: remove the folder, and it is prepared again"
        ) from error
    except OSError as error:
        raise DataError(
            f"data.cache: the prepared graph {folder} cannot be read: {first_line(error)}; data.cache must be a folder "
            "that all ranks share; remove the folder if a file of it is lost, and it is prepared again"
        ) from error
    arrays = {name: mapped(folder, name) for name in ARRAYS}
    arrays |= {name: mapped(folder, name) for name in OPTIONAL if f"{name}.npy" in counts["files"]}
    return Graph(
        **arrays, **{name: counts[name] for name in (*COUNTS, "digests")}, names=Names(folder, counts["files"])
    )


def mapped(folder: str, name: str) -> np.ndarray:
    """The array of a file, mapped, and requested from the disk at once: it would be read in the order of the samples
    otherwise."""
    path = os.path.join(folder, f"{name}.npy")
    try:
        found = np.load(path, mmap_mode="r")
    except ValueError:  # an empty array cannot be mapped
        return np.load(path)
    if hasattr(mmap, "MADV_WILLNEED"):
        found._mmap.madvise(mmap.MADV_WILLNEED)
    return np.asarray(found)


class Names:
    """The user's ids of nodes."""

    def __init__(self, folder: str, files: list[str]):
        def found(name: str):
            return mapped(folder, name) if f"{name}.npy" in files else None

        self._numbers, self._offsets, self._bytes = map(found, ("names", "name_offsets", "name_bytes"))

    def __getitem__(self, nodes: np.ndarray) -> np.ndarray:
        """nodes (n,) int64 -> (n,) int64 or texts."""
        if self._offsets is not None:
            ends = zip(self._offsets[nodes].tolist(), self._offsets[nodes + 1].tolist())
            return np.array([self._bytes[begin:end].tobytes().decode() for begin, end in ends], np.str_)
        return nodes.copy() if self._numbers is None else self._numbers[nodes]
