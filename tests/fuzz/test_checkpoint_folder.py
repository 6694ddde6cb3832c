"""Changed checkpoints, read by predict and export: one line, or a whole result."""

import contextlib
import json
import os
import pickle
import shutil
import sys

import torch
from crafted import change_file, change_manifest, write_checkpoint
from foreign import write_open, write_synthetic, write_tabular
from fuzz import fuzz

from hetmpi import export
from hetmpi.errors import UserError
from hetmpi.predict import Prediction
from hetmpi.run.id_rows import write_rows
from hetmpi.trained.id_rows import rows_of
from hetmpi.world.world import World

if "pytest" not in sys.modules:  # torch.jit.trace imports it, which takes seconds
    import torch.distributed.tensor  # noqa: F401

NAME = "step-00000002"
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError, pickle.UnpicklingError)
INTEGERS = [0, 1, -1, 2, 3, 26, 255, 1 << 20, 1 << 31, (1 << 53) - 1, 1 << 63, 1 << 64, 10**40, -(10**20)]
FLOATS = [0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), -float("inf")]
TEXTS = [
    "", "x", "..", "../x", "/dev/zero", "${oc.env:HOME}", "${", "???", "a\nb", "\u2028", "\x00", "\ud800", "x" * 5000,
    "hashed", "vocabulary", "integers", "id", "number", "standardize", "log1p", "text", "parquet", "click", "user",
    "step-00000001", "hetmpi.models.lr.LR", "hetmpi.models.dcn.DCN", "hetmpi.models.gat.GAT", "os.mkdir",
    "torch.nn.Linear", "table", "mean", "round_robin", "range", "adam", "synthetic", "tabular", "graph",
]  # fmt: skip


def test_changed_checkpoints_are_refused_in_one_line_or_used(tmp_path):
    fuzz(__file__, tmp_path)


def case(rng, folder):
    kind = rng.choice(["synthetic", "tabular", "tabular", "incremental", "open", "open"])
    base = whole(folder.parent / "base") / kind
    shutil.copytree(base, folder / "saved")
    os.chdir(folder)
    path = folder / "saved" / NAME
    for _ in range(rng.choice([1, 1, 2, 3])):
        with contextlib.suppress(*UNREADABLE):  # an earlier change may have made a file unreadable
            rng.choice([change_values, change_values, change_encoder, change_bytes])(rng, path)
    if rng.random() < 0.1:
        change_kind_of_file(rng, path)
    out = folder / rng.choice(["out.parquet", "out.npy"])
    try:
        if kind == "open" and rng.random() < 0.5:
            assert write_rows(folder / "ids", *rows_of(path)).exists()
            return
        if kind == "incremental" or rng.random() < 0.4:
            how = {"rows": rng.choice(["npy", "parquet"]), "dense": "none" if kind == "incremental" else "torchscript"}
            assert all(file.exists() for file in export.export(path, folder / "out", **how))
            return
        files = [f"data.path={base}/clicks.csv"]
        if kind in ("tabular", "open") and rng.random() < 0.5:
            files, how = [*files, f"data.cache={folder}/prepared"], {"split": rng.choice(["valid", "train"])}
        else:
            files, how = (files, {}) if kind in ("tabular", "open") else ([], {"stop": 50})
        num, _ = Prediction(World(), path, files, **how).write(out)
        assert num > 0 and out.exists()
    except UserError:
        assert not out.exists() and not list(folder.rglob("*.part"))
        raise


def whole(folder):
    """A folder of good checkpoints, made by the first case."""
    if not folder.exists():
        part = folder.with_suffix(".tmp")
        shutil.rmtree(part, ignore_errors=True)
        (part / "tabular").mkdir(parents=True)
        write_synthetic(part / "synthetic" / NAME)
        write_tabular(part / "tabular" / NAME, part / "tabular")
        (part / "open").mkdir()
        write_open(part / "open" / NAME, part / "open")
        write_checkpoint(part / "incremental/step-00000001", 1, 2, num_rows=30)
        write_checkpoint(part / "incremental" / NAME, 2, 2, num_rows=30, base=part / "incremental/step-00000001")
        part.rename(folder)
    return folder


def value(rng, depth=0):
    """A random JSON value."""
    kind = rng.randrange(8 if depth < 3 else 4)
    if kind < 4:
        return rng.choice([rng.choice(INTEGERS), rng.choice(FLOATS), rng.choice(TEXTS), None, True, False])
    if kind == 4:
        return rng.choice([[], [value(rng, depth + 1)] * 2, [value(rng, 3)] * 3000])
    if kind == 5:
        nested = []
        for _ in range(rng.choice([30, 30, 900])):
            nested = [nested]
        return nested
    return {rng.choice(TEXTS): value(rng, depth + 1) for _ in range(rng.randrange(3))}


def change(rng, said):
    """Changes one value in nested dicts and lists: replaces, removes or repeats it."""
    part = said
    while True:
        keys = list(part) if isinstance(part, dict) else range(len(part))
        if not keys:
            return
        key = rng.choice(list(keys))
        if not isinstance(part[key], (dict, list)) or not part[key] or rng.random() < 0.2:
            break
        part = part[key]
    how = rng.randrange(6)
    if how == 0:
        del part[key]
    elif how == 1 and isinstance(part, list):
        part.extend([part[key]] * rng.choice([1, 2, 2 if isinstance(part[key], (dict, list)) else 2000]))
    elif how == 2 and isinstance(part, dict):
        part[rng.choice(TEXTS)] = part[key]
    else:
        part[key] = value(rng)


def change_values(rng, path):
    """Of the manifest."""

    def of(said):
        sections = [key for key in ("model_config", "model_sizes", "data_config") if isinstance(said.get(key), dict)]
        change(rng, said[rng.choice(sections)] if sections and rng.random() < 0.5 else said)

    change_manifest(path, of)


def change_encoder(rng, path):
    """Of the encoder in dense.pt, or of the rest of the file."""
    dense = torch.load(path / "dense.pt", weights_only=True)
    if "ids of " in dense.get("data", {}) and rng.random() < 0.5:
        entries = dense["data"]["ids of "]
        entries[rng.randrange(3), rng.randrange(4)] = rng.choice([-2, -1, 0, 1, 3, 4, 1 << 40, (1 << 63) - 1])
    elif "data" in dense and rng.random() < 0.8:
        said = json.loads(dense["data"]["encoder"].numpy().tobytes())
        change(rng, said)
        dense["data"]["encoder"] = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    else:
        part = dense[rng.choice([name for name in ("data", "model", "rng") if name in dense])]
        key = rng.choice(list(part) if isinstance(part, dict) else range(len(part)))
        part[key] = rng.choice([torch.ones(3), torch.ones(2, 2, dtype=torch.int64), torch.empty(0), None, [1], "x"])
    change_file(path, "dense.pt", dense)


def change_bytes(rng, path):
    """Of any file, with or without its new hash."""
    file = rng.choice(sorted(filter(is_regular, path.iterdir())))
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 3, 50])):
        if data:
            data[rng.randrange(min(len(data), rng.choice([128, 1 << 30])))] = rng.randrange(256)
    how = rng.randrange(4)
    data = bytes(data[: rng.randrange(len(data) + 1)] if how == 0 else data * 2 if how == 1 else data)
    if file.name == "manifest.json" or rng.random() < 0.3:
        file.write_bytes(data)
    else:
        change_file(path, file.name, data)


def change_kind_of_file(rng, path):
    """Replaces a file by nothing, a folder, a pipe or a link."""
    file = rng.choice(sorted(filter(is_regular, path.iterdir())))
    file.unlink()
    target = rng.choice(["/dev/zero", file.name])
    changes = [lambda: None, file.mkdir, file.touch, lambda: os.mkfifo(file), lambda: file.symlink_to(target)]
    rng.choice(changes)()


def is_regular(file):
    return file.is_file() and not file.is_symlink()
