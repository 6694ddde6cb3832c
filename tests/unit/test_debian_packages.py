"""data=debian_packages: a graph from an index of packages."""

import gzip
import lzma
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from hetmpi.data.graph.debian import LISTS, DebianPackages
from hetmpi.errors import UserError

INDEX = """\
Package: libtree-dev
Section: libdevel
Depends: libtree1 (= 1.0), libc6-dev | libc-dev
Description: Tree of things for C, development files of libtree
 A longer text: Section: games
Tag: devel::library, role::devel-lib

Package: libtree1
Section: non-free/libs
Pre-Depends: unknown-package
Description: Tree of things for C
Tag: role::shared-lib,
 implemented-in::c

Package: arbor
Section: games
Depends: libtree1 (>= 1.0) [amd64], python3:any
Recommends: libtree-dev
Suggests: libtree-dev, arbor
Description: Grow a tree

Package: libtree1
Section: otherwise
Description: an older version

Package: homeless
Description: no section
"""


def opened(folder, tmp_path, **settings):
    source = DebianPackages(1, str(folder), cache=str(tmp_path / "prepared"), train_share=0.7, **settings)
    source.prepare(0, 1, lambda: None, lambda line: None)
    return source


def index(folder, text=INDEX, end=""):
    folder.mkdir(exist_ok=True)
    path, data = folder / f"deb_main_binary-amd64_Packages{end}", text.encode()
    if end == ".lz4":
        with pa.CompressedOutputStream(str(path), "lz4") as file:
            file.write(data)
    else:
        path.write_bytes({"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[end](data))
    return folder


@pytest.mark.parametrize("end", ["", ".gz", ".xz", ".lz4"])
def test_packages_are_nodes_and_their_links_edges(end, tmp_path):
    source = opened(index(tmp_path / "lists", end=end), tmp_path)
    assert source.names(np.arange(4)).tolist() == ["libtree-dev", "libtree1", "arbor", "homeless"]
    offsets, near = source.neighbours(0, 4)
    assert [near[a:b].tolist() for a, b in zip(offsets, offsets[1:])] == [[1, 2], [0, 2], [0, 1, 2], []]
    assert source.class_names == ["games", "libdevel", "libs"]
    assert source.labels.tolist() == [1, 2, 0, -1] and source.split[3] == -1


def test_ids_are_words_and_tags_without_parts_of_the_own_name(tmp_path):
    source = opened(index(tmp_path / "lists"), tmp_path)
    words = ["tree", "of", "things", "for", "development", "files", "grow"]
    tags = ["devel::library", "role::devel-lib", "role::shared-lib", "implemented-in::c"]
    assert source.field_rows[0] == 4 and source.field_rows[2] == len(tags)
    bag = source.inputs(np.arange(4))[0]
    lists = [bag.values[a:b].tolist() for a, b in zip(bag.offsets, bag.offsets[1:])]
    assert lists[3][0] == 3 and all(own in one for own, one in enumerate(lists))
    assert source.field_rows[1] == len({*words, "no", "section"})  # libtree and dev are parts of a name
    assert len(lists[2]) == 1 + len(["grow", "tree"]) and len(lists[1]) == 1 + 4 + 2


def test_the_index_is_read_once(tmp_path):
    folder = index(tmp_path / "lists")
    first = opened(folder, tmp_path)
    index(folder, INDEX.replace("arbor", "forest"))
    assert opened(folder, tmp_path).names(np.arange(4)).tolist() == first.names(np.arange(4)).tolist()


def test_a_machine_without_an_index_is_refused_in_one_message(tmp_path, monkeypatch):
    (tmp_path / "lists").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="needs the package index of a Debian machine.*run apt-get update") as error:
        opened(tmp_path / "lists", tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / "lists/a_Packages.gz").write_bytes(b"no gzip")
    with pytest.raises(UserError, match="a_Packages.gz cannot be read"):
        opened(tmp_path / "lists", tmp_path)
    (tmp_path / "lists/a_Packages.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(UserError, match="the package index in .* is empty"):
        opened(tmp_path / "lists", tmp_path)


def test_apt_is_asked_where_there_are_no_files(tmp_path, monkeypatch):
    (tmp_path / "lists").mkdir()
    program = tmp_path / "apt-cache"
    (tmp_path / "index").write_text(INDEX)
    program.write_text(f"#!/bin/sh\n[ $1 = dumpavail ] && exec /bin/cat {tmp_path}/index\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert opened(tmp_path / "lists", tmp_path).num_nodes == 4


@pytest.mark.skipif(not any(Path(LISTS).glob("*_Packages*")), reason=f"no package index in {LISTS}")
def test_the_index_of_this_machine(tmp_path):
    source = opened(LISTS, tmp_path)
    assert source.num_nodes > 1_000 and source.num_classes > 10 and source.max_ids <= 1 + 16 + 10
    samples = source.train(0, 64)
    assert len(samples) == 64 and len(samples.ids.offsets) == len(samples.nodes) + 1
