"""Whole programs with rows on disk (table.store=file); the store itself: tests/mpi/test_row_files.py."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from support.launch import launcher_of, run, train

SMALL = ["data.scale=0.001", "steps=60", "log.every_steps=20", "checkpoint.every_steps=20"]


def trained(folder, *overrides, ranks=2):
    outcome = train(ranks, *SMALL, f"run.dir={folder}", *overrides)
    assert outcome.code == 0, outcome.text
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def on_disk(folder, memory_gb=0.002):
    return ["table.store=file", f"table.store_dir={folder}", f"table.store_memory_gb={memory_gb}"]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.rare), 3])
def test_a_training_has_the_losses_of_one_in_memory_and_says_what_the_disk_did(tmp_path, ranks):
    losses = trained(tmp_path / "memory", ranks=ranks)
    assert trained(tmp_path / "disk", *on_disk(tmp_path), ranks=ranks) == losses
    summary = json.loads((tmp_path / "disk/summary.json").read_text())
    assert 0 <= summary["disk_wait_rate"] <= 1 and summary["pages_written"] >= 0 <= summary["pages_read"]
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".hetmpi-")]


def test_a_dry_run_says_disk_pages_and_hits(tmp_path):
    outcome = train(2, *SMALL, "dry_run=true", *on_disk(tmp_path))
    assert outcome.code == 0, outcome.text
    assert f"free in {tmp_path}: fits" in outcome.text
    assert "pages of 4 KB per step: " in outcome.text and "expected hits in memory" in outcome.text


@pytest.fixture
def small_disk(tmp_path):
    """A disk with room for the ballast (64 MB) and few rows."""
    place, image = tmp_path / "small", tmp_path / "image"
    place.mkdir()
    image.write_bytes(bytes(96 << 20))
    for command in (["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("a small disk takes root, mkfs.ext4 and a loop device")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.rare
def test_a_full_disk_ends_the_run_with_a_checkpoint_that_goes_on_elsewhere(tmp_path, small_disk):
    larger = "data.scale=0.01", "table.dim=32", "batch_size=128", "steps=60", "log.every_steps=20"
    losses = {folder: tmp_path / folder for folder in ("memory", "run")}
    assert train(1, *larger, f"run.dir={losses['memory']}").code == 0
    full = train(1, *larger, f"run.dir={losses['run']}", *on_disk(small_disk, 0.1))
    assert full.code == 1
    assert "stopped by a full disk: saved " in full.text and "the disk of rank 0 is full" in full.text
    done = train(1, *larger, f"run.dir={losses['run']}", *on_disk(tmp_path, 0.1), "resume=auto")
    assert done.code == 0, done.text
    ends = [json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]) for folder in losses.values()]
    assert ends[0]["step"] == ends[1]["step"] == 60 and ends[0]["loss"] == ends[1]["loss"]


@pytest.mark.rare
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_tests_of_tables_pass_with_a_hundredth_of_the_rows_in_memory(tmp_path, ranks):
    files = [f"tests/mpi/test_{name}.py" for name in ("table", "look_ahead", "checkpoint", "vocabulary", "windows")]
    python = [sys.executable, "-m", "mpi4py", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command = [*launcher_of(ranks), *python, "-m", "mpi and not long", *files]
    outcome = run(command, timeout_s=600, HETMPI_TEST_STORE=str(tmp_path))
    assert outcome.code == 0, outcome.text[-3000:]
