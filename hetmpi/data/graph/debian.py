"""DebianPackages: the packages of a Debian machine, a real graph that every such machine has.

A package reads from those that it depends on, recommends or suggests, and they from it. Its class is its section. Its
ids are its own, words of its short description and its tags. Parts of its own name are no words: names begin with lib,
python3 or r in whole sections, so they would give the class away.
"""

from __future__ import annotations

import glob
import gzip
import io
import lzma
import os
import re
import subprocess
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from hetmpi.bounded_file import open_file
from hetmpi.data.files import DataError, first_line
from hetmpi.data.graph.graph import (
    Graph,
    check_shares,
    classes_of,
    from_edges,
    joined_ids,
    lists_by,
    smallest_integers,
    split_by_shares,
)
from hetmpi.data.graph.source import GraphData, check_path

LISTS = "/var/lib/apt/lists"
FIELD = re.compile(r"^([A-Z][\w-]*): *(.*(?:\n[ \t].*)*)", re.MULTILINE)
LINKS = ("Depends", "Pre-Depends", "Recommends", "Suggests")
NAME = re.compile(r"(?:^|[,|])\s*([a-z0-9][a-z0-9+.-]+)")  # of a package in a list of links, without its version
WORD = re.compile(r"[a-z][a-z0-9+]+")
MOST_WORDS, MOST_TAGS = 16, 10
MOST_BYTES = 1 << 30  # of an index, unpacked


class DebianPackages(GraphData):
    """See GraphData. The index is read once; later runs use the prepared graph, also after
    the machine's index has changed."""

    name = "debian_packages"

    def __init__(
        self,
        seed: int,
        path: str = LISTS,
        train_share: float = 0.6,
        valid_share: float = 0.2,
        fanout: Sequence[int] = (10, 10),
        replace: bool = True,
        partition: str | None = None,
        batch_size: int = 1,
        table_partition: str = "range",
        cache: str | None = None,
    ):
        """path: folder with files *_Packages, plain, .gz, .xz, .lz4 or .zst; without any, `apt-cache dumpavail` is
        asked. Others as GraphData."""
        super().__init__(seed, fanout, replace, partition, batch_size, table_partition, cache)
        check_path(path)
        check_shares(train_share, valid_share)
        self.path, self.shares = path, (train_share, valid_share)

    def identity(self) -> tuple:
        return self.name, self.path, self.shares, self.seed

    def read(self) -> Graph:
        packages = {}
        for text in texts_in(self.path):
            for fields in map(dict, map(FIELD.findall, text.split("\n\n"))):
                if "Package" in fields:
                    packages.setdefault(fields["Package"], fields)
        if not packages:
            raise DataError(f"data=debian_packages: the package index in {self.path} is empty: run apt-get update")
        return self._graph_of(packages)

    def _graph_of(self, packages: dict[str, dict[str, str]]) -> Graph:
        number = {name: i for i, name in enumerate(packages)}
        num_nodes = len(number)
        links = [
            (number[other], i)
            for i, fields in enumerate(packages.values())
            for kind in LINKS
            for other in NAME.findall(fields.get(kind, ""))
            if other in number
        ]
        sources, targets = np.array(links or np.empty((0, 2)), np.int64).T
        indptr, indices = from_edges(sources, targets, num_nodes, undirected=True)
        lists = [coded([kind(fields) for fields in packages.values()]) for kind in (words_of, tags_of)]
        id_offsets, ids, field_rows = joined_ids(num_nodes, True, lists)
        labels, class_names = classes_of([section_of(fields) for fields in packages.values()])
        return Graph(
            indptr, indices.astype(smallest_integers(num_nodes)), id_offsets, ids, field_rows, labels,
            len(class_names), split_by_shares(labels, *self.shares, self.seed), np.empty((num_nodes, 0), np.float32),
            np.array(list(packages), np.str_), class_names,
        )  # fmt: skip


def texts_in(folder: str) -> Iterator[str]:
    """The indexes of packages. Raises DataError if there is none, or one cannot be read."""
    paths = sorted(path for path in glob.glob(os.path.join(folder, "*_Packages*")) if os.path.isfile(path))
    for path in paths:
        try:
            with opened(path) as file:
                text = file.read(MOST_BYTES + 1)
                if len(text) > MOST_BYTES:
                    raise DataError(f"data=debian_packages: {path} has more than {MOST_BYTES:,} bytes")
                yield text.decode(errors="replace")
        except (OSError, EOFError, lzma.LZMAError, pa.ArrowException) as error:
            raise DataError(f"data=debian_packages: {path} cannot be read: {first_line(error)}") from error
    if not paths:
        try:
            yield subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True).stdout.decode(
                errors="replace"
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise DataError(
                f"data=debian_packages needs the package index of a Debian machine: there is no *_Packages in {folder} "
                "and no apt-cache: run apt-get update, or give data.path=FOLDER"
            ) from error


def opened(path: str) -> io.IOBase | pa.NativeFile:
    """A file of bytes, decompressed by its ending."""
    end = os.path.splitext(path)[1]
    if end in (".gz", ".xz"):
        return gzip.open(open_file(path)) if end == ".gz" else lzma.open(open_file(path))
    compression = {".lz4": "lz4", ".zst": "zstd"}.get(end)
    return open_file(path) if compression is None else pa.CompressedInputStream(open_file(path), compression)


def section_of(fields: dict[str, str]) -> str | None:
    """The section without the archive's area, as libs of non-free/libs."""
    return fields.get("Section", "").rpartition("/")[2] or None


def words_of(fields: dict[str, str]) -> list[str]:
    """The first distinct words of the description."""
    own = set(WORD.findall(fields["Package"]))
    words = dict.fromkeys(WORD.findall(fields.get("Description", "").partition("\n")[0].lower()))
    return [word for word in words if word not in own][:MOST_WORDS]


def tags_of(fields: dict[str, str]) -> list[str]:
    return re.findall(r"[^\s,]+::[^\s,]+", fields.get("Tag", ""))[:MOST_TAGS]


def coded(lists: list[list[str]]):
    """Lists of texts -> a bag of numbers by first appearance, and how many texts differ."""
    number = {}
    values = [number.setdefault(text, len(number)) for texts in lists for text in texts]
    owners = np.repeat(np.arange(len(lists)), [len(texts) for texts in lists])
    return lists_by(owners, np.array(values, np.int64), len(lists)), len(number)
