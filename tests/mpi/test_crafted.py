"""Checkpoints with correct hashes and invalid content: each is refused by one message on every rank. Run at 1, 2 and 3
ranks."""

import io
import json
import os
import pickle
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from crafted import change_file, change_manifest, digest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetmpi import export
from hetmpi.checkpoint.checkpoints import Checkpoints, Position
from hetmpi.errors import UserError
from hetmpi.table.optim import RowOptimizer
from hetmpi.table.table import EmbeddingTable

NUM_ROWS, DIM = 20, 3
SHARD, ROWS = "shard-00000.weight.npy", "shard-00000.rows.npy"


NOT_EXPORTED = ("finite", "clocks", "dense.pt", "rng", "model", "tensor", "numbers", "names")


class Runs:
    """Unpickling it would run code."""

    def __reduce__(self):
        return subprocess.check_call, (["false"],)


def parts(world):
    """A table, dense layers and their optimizer, after a step."""
    torch.manual_seed(0)
    table = EmbeddingTable(world, NUM_ROWS, DIM, RowOptimizer("adagrad", 0.1))
    model = torch.nn.Linear(2, 2)
    return table, model, torch.optim.Adam(model.parameters(), 0.1)


def train(table, keys):
    keys = torch.tensor(keys)
    table.write(keys, torch.ones_like(table.read(keys)))


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """Full checkpoints of steps 1 and 2, and an incremental one of step 3."""
    folder = Path(world.comm.bcast(str(tmp_path_factory.mktemp("whole"))))
    table, model, optimizer = parts(world)
    checkpoints = Checkpoints(world, folder, keep=9)
    for step in (1, 2, 3):
        train(table, list(range(5)))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        checkpoints.full_every = 2 if step == 3 else 1
        checkpoints.save(Position(step, step), table, model, optimizer)
    checkpoints.wait()
    assert "base" in json.loads((folder / "step-00000003/manifest.json").read_text())
    table.close()
    return folder


@pytest.fixture
def crafted(world, whole, tmp_path_factory):
    """crafted(spoil, step): a folder whose newest checkpoint is that of `step`, changed by spoil(its path)."""
    folder = Path(world.comm.bcast(str(tmp_path_factory.mktemp("crafted")))) / "checkpoints"

    def make(spoil, step):
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            for name in [f"step-{number:08d}" for number in range(1, step + 1)]:
                shutil.copytree(whole / name, folder / name)
            spoil(folder / f"step-{step:08d}")
        world.comm.Barrier()
        return folder

    return make


def says(**changes):
    """Changes values of a manifest: name -> value, ... to remove it."""

    def change(manifest):
        for name, value in changes.items():
            manifest[name] = value
            if value is ...:
                del manifest[name]

    return lambda path: change_manifest(path, change)


def renames(name):
    """Renames the first shard's weight file, in the manifest and on disk."""

    def spoil(path):
        where = Path(name) if Path(name).is_absolute() else path / name
        if not where.is_absolute() or path.parent in where.parents:
            where.parent.mkdir(exist_ok=True)
            shutil.copy(path / SHARD, where)
        change_manifest(path, lambda said: said["files"].update({name: said["files"].pop(SHARD)}))

    return spoil


def holds(name, change):
    """Replaces the content of a file: change(content) -> array, value for torch.save, or bytes."""

    def spoil(path):
        load = np.load if name.endswith("npy") else lambda file: torch.load(file, weights_only=True)
        change_file(path, name, change(load(path / name)))

    return spoil


def pipes(file):
    """Replaces a file by a pipe: opening it would block for ever."""
    file.unlink()
    os.mkfifo(file)


def bytes_of(array, **saving):
    buffer = io.BytesIO()
    np.save(buffer, array, **saving)
    return buffer.getvalue()


def header(text):
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


MANIFESTS = {
    "parent folder": (renames("../" + SHARD), f"files lacks {SHARD}"),
    "absolute path": (renames("/etc/hostname"), f"files lacks {SHARD}"),
    "separator": (renames("sub/" + SHARD), f"files lacks {SHARD}"),
    "no files": (says(files={}), r"files must list \d+ files for size \d, got 0"),
    "files as a list": (says(files=[SHARD]), "files must be an object, got"),
    "a file too much": (lambda path: change_file(path, "more.npy", b""), r"files must list \d+ files"),
    "file without hash": (
        lambda path: change_manifest(path, lambda said: said["files"][SHARD].pop("xxh3_128")),
        f"files: {SHARD} lacks xxh3_128",
    ),
    "file of negative bytes": (
        lambda path: change_manifest(path, lambda said: said["files"][SHARD].update(bytes=-1)),
        "bytes must be an integer in",
    ),
    "step as text": (says(step="2"), "step must be an integer in .* got '2'"),
    "step below 0": (says(step=-2), "step must be an integer in .* got -2"),
    "step as truth": (says(step=True), "step must be an integer in .* got True"),
    "step of 2^80": (says(step=1 << 80), "step must be an integer in"),
    "another step": (says(step=7), "step must be that in the folder's name, got 7"),
    "no step": (says(step=...), "lacks step"),
    "samples as fraction": (says(samples=1.5), "samples must be an integer in .* got 1.5"),
    "no samples": (says(samples=...), "lacks samples"),
    "size 0": (says(size=0), "size must be an integer in"),
    "size of a billion": (says(size=10**9), "files must list 3,000,000,001 files"),
    "no size": (says(size=...), "lacks size"),
    "num_rows as list": (says(num_rows=[20]), r"num_rows must be an integer in .* got \[20\]"),
    "no num_rows": (says(num_rows=...), "lacks num_rows"),
    "dim 0": (says(dim=0), "dim must be an integer in"),
    "no dim": (says(dim=...), "lacks dim"),
    "unknown partition": (says(partition="x" * 9999), "partition must be one of round_robin, range, hash, got 'xxx"),
    "partition as object": (says(partition={}), "partition must be one of round_robin, range, hash, got {}"),
    "no partition": (says(partition=...), "lacks partition"),
    "unknown rule": (says(rule="../x"), "rule must be one of sgd,"),
    "no rule": (says(rule=...), "lacks rule"),
    "state_dim of another rule": (says(state_dim=0), r"state_dim must be an integer in \[3, 3\], got 0"),
    "no state_dim": (says(state_dim=...), "lacks state_dim"),
    "format as truth": (says(format=True), "has format True, this hetmpi reads 1, 2 and 3"),
    "no format": (says(format=...), "has format None, this hetmpi reads 1, 2 and 3"),
    "base in a full one": (says(base="step-00000001"), "base must be absent in format 1"),
    "format of several": (says(format=3), "lacks tables"),
    "tables without any": (says(format=3, tables={}), "must name at least one table"),
    "table with a path": (says(format=3, tables={"../x": {}}), "a table's name must be at most 100 letters"),
    "nested": (lambda path: (path / "manifest.json").write_text("[" * 100_000), "manifest.json"),
    "no text": (lambda path: (path / "manifest.json").write_bytes(b"\xff" * 9), "manifest.json"),
    "a pipe": (lambda path: pipes(path / "manifest.json"), "manifest.json: .*is not a regular file"),
    "a list": (lambda path: (path / "manifest.json").write_text("[]"), "has format None"),
}

BASES = {
    "base with a path": (says(base="../checkpoints/step-00000002"), "base must be another step-NNNNNNNN, got"),
    "base is itself": (says(base="step-00000003"), "base must be another step-NNNNNNNN"),
    "base as number": (says(base=2), "base must be another step-NNNNNNNN, got 2"),
    "no base": (says(base=...), "lacks base"),
    "no hash of the base": (says(base_xxh3_128=...), "lacks base_xxh3_128"),
    "base of another table": (
        lambda path: other_base(path, dim=2, state_dim=2),
        "must be of the same tables and ranks",
    ),
    "base that is incremental": (
        lambda path: other_base(path, format=2, base="step-00000001", base_xxh3_128="0" * 32),
        "files must list",
    ),
}

FILES = {
    "float64": (
        2,
        holds(SHARD, lambda rows: rows.astype(np.float64)),
        "must hold float32 of shape .* it holds float64",
    ),
    "big-endian": (2, holds(SHARD, lambda rows: rows.astype(">f4")), "must hold float32 of shape .* it holds >f4"),
    "short": (
        2,
        holds(SHARD, lambda rows: rows[:-1]),
        r"must hold float32 of shape \(\d+, 3\), it holds .* \(\d+, 3\)",
    ),
    "wide": (
        2,
        holds(SHARD, lambda rows: np.repeat(rows, 2, 1)),
        r"must hold float32 of shape \(\d+, 3\), .* \(\d+, 6\)",
    ),
    "flat": (2, holds(SHARD, lambda rows: rows.reshape(-1)), "must hold float32 of shape"),
    "in columns": (2, holds(SHARD, lambda rows: bytes_of(np.asfortranarray(rows))), "in columns"),
    "objects": (2, holds(SHARD, lambda rows: np.array([Runs()], dtype=object)), "it holds object of shape"),
    "more bytes": (2, holds(SHARD, lambda rows: bytes_of(rows) + b"more"), "must have [0-9,]+ bytes for shape"),
    "no array": (2, holds(SHARD, lambda rows: b"nothing"), "is not an array in numpy.save"),
    "empty": (2, holds(SHARD, lambda rows: b""), "is not an array in numpy.save"),
    "header": (2, holds(SHARD, lambda rows: header("(" * 5000)), "is not an array in numpy.save"),
    "header of code": (
        2,
        holds(SHARD, lambda rows: header("__import__('os').abort()")),
        "is not an array in numpy.save",
    ),
    "huge shape": (
        2,
        holds(SHARD, lambda rows: header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({1 << 70}, 3), }}\n")),
        "must hold float32 of shape",
    ),
    "numbers not finite": (2, holds(SHARD, lambda rows: rows + np.float32(np.nan)), "not finite"),
    "state not finite": (2, holds("shard-00000.state.npy", lambda state: state + np.float32(np.inf)), "not finite"),
    "clocks below 0": (2, holds("shard-00000.clock.npy", lambda clock: clock - 99), "clocks below 0"),
    "clocks of 64 bits": (2, holds("shard-00000.clock.npy", lambda clock: clock.astype(np.int64)), "must hold int32"),
    "rows out of range": (3, holds(ROWS, lambda rows: rows + 99), "must hold ascending rows in"),
    "rows below 0": (3, holds(ROWS, lambda rows: rows - 1), "must hold ascending rows in"),
    "rows descending": (3, holds(ROWS, lambda rows: rows[::-1].copy()), "must hold ascending rows in"),
    "rows twice": (3, holds(ROWS, lambda rows: np.repeat(rows[:1], len(rows))), "must hold ascending rows in"),
    "rows of 32 bits": (3, holds(ROWS, lambda rows: rows.astype(np.int32)), r"must hold int64 of shape \(any\)"),
    "fewer rows": (3, holds(ROWS, lambda rows: rows[:-1]), r"must hold float32 of shape \(\d+, 3\)"),
    "a pickle": (
        2,
        holds("dense.pt", lambda dense: pickle.dumps(Runs())),
        "dense.pt must hold tensors and plain values",
    ),
    "a pickle by torch": (
        2,
        holds("dense.pt", lambda dense: {**dense, "model": Runs()}),
        "must hold tensors and plain values by torch.save: UnpicklingError: Unsupported",
    ),
    "no archive": (
        2,
        holds("dense.pt", lambda dense: b"PK\3\4 nothing"),
        "dense.pt must hold tensors and plain values",
    ),
    "empty dense.pt": (2, holds("dense.pt", lambda dense: b""), "dense.pt must hold tensors and plain values"),
    "a tensor alone": (
        2,
        holds("dense.pt", lambda dense: torch.ones(3)),
        "must hold model, optimizer, rng and data by these names",
    ),
    "another name": (2, holds("dense.pt", lambda dense: {**dense, "code": 1}), "must hold model, optimizer, rng"),
    "model is a list": (
        2,
        holds("dense.pt", lambda dense: {**dense, "model": [1]}),
        "model must be a state dict, got list",
    ),
    "model by numbers": (2, holds("dense.pt", lambda dense: {**dense, "model": {1: torch.ones(1)}}), "no names"),
    "tensor of a trillion": (
        2,
        holds("dense.pt", lambda dense: {**dense, "model": {"weight": torch.ones(1).expand(10**6, 10**6)}}),
        "fewer numbers in the file",
    ),
    "dense.pt is a pipe": (2, lambda path: pipes(path / "dense.pt"), "dense.pt: is not a regular file"),
    "rows are a pipe": (2, lambda path: pipes(path / SHARD), "weight.npy: is not a regular file"),
    "no rng": (2, holds("dense.pt", lambda dense: {**dense, "rng": []}), r"rng must be a list of \d states"),
    "rng of floats": (
        2,
        holds("dense.pt", lambda dense: {**dense, "rng": [torch.ones(9)] * len(dense["rng"])}),
        "rng must be a list",
    ),
}

OTHERS = {
    "model of another shape": (
        lambda dense: dense["model"].update(weight=torch.ones(3, 2)),
        "model does not fit: .*size mismatch",
    ),
    "model without a bias": (lambda dense: dense["model"].pop("bias"), "model does not fit: .*Missing key"),
    "model not finite": (lambda dense: dense["model"]["bias"].fill_(torch.inf), "parameter bias is not finite"),
    "model of text": (lambda dense: dense["model"].update(bias="x"), "model does not fit"),
    "no model": (lambda dense: dense.pop("model"), "has no model: it was saved without one"),
    "optimizer of nothing": (lambda dense: dense.update(optimizer={}), "optimizer does not fit"),
    "of another rule": (
        lambda dense: dense["optimizer"]["state"].update({0: {"step": torch.ones(()), "sum": torch.ones(2, 2)}}),
        "optimizer does not fit",
    ),
    "state of another shape": (
        lambda dense: dense["optimizer"]["state"][0].update(exp_avg=torch.ones(5)),
        "optimizer does not fit",
    ),
    "state not finite": (lambda dense: dense["optimizer"]["state"][0]["exp_avg"].fill_(torch.nan), "it is not finite"),
    "state is a list": (lambda dense: dense["optimizer"].update(state=[1]), "optimizer does not fit"),
    "step -1": (lambda dense: dense["optimizer"]["state"][0].update(step=-torch.ones(())), "optimizer does not fit"),
    "rate is text": (lambda dense: dense["optimizer"]["param_groups"][0].update(lr="x"), "optimizer does not fit"),
    "beta of 1": (
        lambda dense: dense["optimizer"]["param_groups"][0].update(betas=(1.0, 0.9)),
        "optimizer does not fit",
    ),
    "no groups": (lambda dense: dense["optimizer"].update(param_groups=[]), "optimizer does not fit"),
    "parameters twice": (
        lambda dense: dense["optimizer"]["param_groups"][0].update(params=[[], {}]),
        "optimizer does not fit",
    ),
    "rng of 3 bytes": (lambda dense: dense.update(rng=[part[:3] for part in dense["rng"]]), "rng does not fit"),
}


def other_base(path, **changes):
    """Changes the base of an incremental checkpoint, and its hash in the incremental one."""
    base = path.parent / "step-00000002"
    says(**changes)(base)
    said = json.loads((base / "manifest.json").read_text())
    said.pop("xxh3_128")
    says(base_xxh3_128=digest(said))(path)


def assert_refused(world, path, told, exports=True):
    """By load on every rank, and by the export of rows, which does not check values."""
    table, model, optimizer = parts(world)
    with pytest.raises(UserError, match=told):
        Checkpoints(world, path.parent).load(path, table, model, optimizer)
    table.close()
    if world.rank == 0 and exports:
        with pytest.raises(UserError, match=told):
            export.export(path, path.parent / "out", dense="none")


@pytest.mark.mpi
@pytest.mark.parametrize("name", MANIFESTS | BASES)
def test_a_manifest_that_says_what_none_can_say_is_refused_and_the_one_before_is_used(world, crafted, capsys, name):
    (spoil, told), step = (MANIFESTS | BASES)[name], 2 if name in MANIFESTS else 3
    folder = crafted(spoil, step)
    assert_refused(world, folder / f"step-{step:08d}", told)
    is_base_spoilt = name.startswith("base of") or name.startswith("base that")
    found = Checkpoints(world, folder).newest()
    assert found.name == f"step-{1 if is_base_spoilt else step - 1:08d}"
    if world.rank == 0:
        assert capsys.readouterr().out.count("cannot be used: ") == 1 + is_base_spoilt


@pytest.mark.mpi
@pytest.mark.parametrize("name", FILES)
def test_files_that_hold_what_none_can_hold_are_refused_and_the_one_before_is_used(world, crafted, name):
    step, spoil, told = FILES[name]
    folder = crafted(spoil, step)
    is_structure = not any(word in told for word in NOT_EXPORTED)
    assert_refused(world, folder / f"step-{step:08d}", told, is_structure)
    found = Checkpoints(world, folder).newest()
    assert found.name == f"step-{step - 1:08d}"


@pytest.mark.mpi
@pytest.mark.parametrize("name", OTHERS)
def test_dense_layers_and_optimizers_of_another_program_are_refused(world, crafted, name):
    change, told = OTHERS[name]
    folder = crafted(holds("dense.pt", lambda dense: (change(dense), dense)[1]), 2)
    table, model, optimizer = parts(world)
    with pytest.raises(UserError, match=told):
        Checkpoints(world, folder).load(folder / "step-00000002", table, model, optimizer)
    table.close()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from(["step-00000001", "hash", "adam"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)


def tries(world, folder, step):
    """Loads and exports: UserError or success."""
    path = folder / f"step-{step:08d}"
    for call in (
        lambda: Checkpoints(world, folder).damage(path),
        lambda: Checkpoints(world, folder).load(path, *made),
        lambda: export.export(path, folder / "out", dense="none"),
    ):
        made = parts(world)
        try:
            call()
        except UserError as refusal:
            assert "\n" not in str(refusal) and len(str(refusal)) < 2000, refusal
        made[0].close()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_value_anywhere_in_a_manifest_is_taken_or_refused(world, crafted, data):
    step = data.draw(st.sampled_from([2, 3]))

    def change(said):
        keys = sorted(said)
        part, key = said, data.draw(st.sampled_from(keys))
        while isinstance(part[key], dict) and part[key] and data.draw(st.booleans()):
            part = part[key]
            key = data.draw(st.sampled_from(sorted(part)))
        part[key] = data.draw(JSON)

    tries(world, crafted(lambda path: change_manifest(path, change), step), step)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_byte_anywhere_in_a_file_is_taken_or_refused(world, crafted, data):
    step = data.draw(st.sampled_from([2, 3]))

    def spoil(path):
        name = data.draw(st.sampled_from([SHARD, "shard-00000.clock.npy", "dense.pt", *([ROWS] if step == 3 else [])]))
        held = bytearray((path / name).read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            most = min(len(held), data.draw(st.sampled_from([128, 2000, 10**9])))
            held[data.draw(st.integers(0, most - 1))] = data.draw(st.integers(0, 255))
        change_file(path, name, bytes(held[: data.draw(st.sampled_from([len(held), len(held) // 2]))]))

    tries(world, crafted(spoil, step), step)
