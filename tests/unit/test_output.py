"""Files that a command writes: whole or not at all."""

import pytest

from hetmpi.errors import UserError
from hetmpi.run.output import part_of


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
