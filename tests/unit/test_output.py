"""Files that a command writes: whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from hetmpi.checkpoint.writer import refused
from hetmpi.errors import UserError, cure_of
from hetmpi.run.output import part_of
from hetmpi.trained.id_rows import remove_parts


def test_a_link_with_the_name_of_the_part_file_is_replaced_not_followed(tmp_path):
    out, other = tmp_path / "out.npy", tmp_path / "other"
    other.write_text("kept")
    with part_of(out) as part:
        name = part.name
    part.symlink_to(other)
    with part_of(out) as part:
        assert part.name == name and not part.is_symlink()
        part.write_text("new")
    assert other.read_text() == "kept" and out.read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out.npy"]


def test_two_jobs_with_one_out_write_to_files_of_their_own(tmp_path, monkeypatch):
    out = tmp_path / "new/out.npy"
    with part_of(out) as first:
        first.write_text("first")
        monkeypatch.setattr("socket.gethostname", lambda: "node7")
        with part_of(out) as second:
            second.write_text("second")
        assert out.read_text() == "second"
    assert out.read_text() == "first" and [path.name for path in out.parent.iterdir()] == ["out.npy"]


def test_a_failure_leaves_no_part_file(tmp_path):
    with pytest.raises(ZeroDivisionError), part_of(tmp_path / "out.npy") as part:
        assert part.is_file()
        raise ZeroDivisionError
    assert not [*tmp_path.iterdir()]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write "), part_of(tmp_path / "file/out.npy"):
        pass


@pytest.mark.parametrize("number, cure", [
    (errno.ENOSPC, "free space there or choose another run.dir"), (errno.EDQUOT, "free space there or"),
    (errno.EROFS, "make it writable or choose another run.dir"), (errno.EACCES, "make it writable or"),
    (errno.ENOTDIR, "choose another run.dir"),
])  # fmt: skip
def test_space_is_named_where_it_is_the_cause_alone(number, cure):
    assert cure_of(OSError(number, os.strerror(number)), "run.dir").startswith(cure)
    refusal = str(refused(Path("saved/step-00000002.part"), OSError(number, os.strerror(number))))
    assert ("free space" in refusal) == ("free space" in cure) and "earlier checkpoints are kept" in refusal


def test_parts_of_deltas_that_killed_processes_left_are_removed(tmp_path):
    for name in ("step-00000002/ids.parquet", "step-00000004/removed.parquet"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    for name in ("step-00000002/.ids.parquet.host.9.part", "step-00000004/.removed.parquet.a.b.77.part"):
        (tmp_path / name).touch()
    (tmp_path / "step-00000002/mine").touch()
    remove_parts(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "step-00000002", "step-00000002/ids.parquet", "step-00000002/mine",
    ]  # fmt: skip
