"""Checkpoints written by hand, as hetmpi/checkpoint/ documents them, and changed ones with correct hashes."""

import json
from pathlib import Path

import numpy as np
import torch
import xxhash

from hetmpi.owner.route import make_partition

ARRAYS = ("weight", "state", "clock")


def hash_of(data):
    return xxhash.xxh3_128(data).hexdigest()


def digest(manifest):
    return hash_of(json.dumps(manifest, sort_keys=True).encode())


def change_manifest(path, change):
    """change(manifest): of the checkpoint `path`, without its own hash, which is computed again."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("xxh3_128")
    change(manifest)
    (path / "manifest.json").write_text(json.dumps({**manifest, "xxh3_128": digest(manifest)}))


def change_file(path, name, data):
    """Replaces the bytes or the array of a file of the checkpoint `path`, and updates its entry in the manifest."""
    if isinstance(data, np.ndarray):
        np.save(path / name, data, allow_pickle=True)
        data = (path / name).read_bytes()
    elif not isinstance(data, bytes):
        torch.save(data, path / name)
        data = (path / name).read_bytes()
    (path / name).write_bytes(data)
    change_manifest(path, lambda said: said["files"].update({name: {"bytes": len(data), "xxh3_128": hash_of(data)}}))


def write_checkpoint(
    path, step, size, num_rows=3000, dim=3, partition="round_robin", base=None, dense=None, about=None
):
    """A checkpoint of one table under Adagrad with random rows; with a base, of every third row. dense, about: further
    entries of dense.pt and of the manifest."""
    random, names = np.random.default_rng(step), make_partition(partition, num_rows, size)
    path.mkdir(parents=True)
    files = {}

    def write(name, value):
        (np.save if name.endswith("npy") else lambda file, value: torch.save(value, file))(path / name, value)
        data = (path / name).read_bytes()
        files[name] = {"bytes": len(data), "xxh3_128": hash_of(data)}

    for rank in range(size):
        num = names.num_local_rows(rank)
        rows = np.arange(num) if base is None else np.arange(rank % 2, num, 3)
        write(f"shard-{rank:05d}.weight.npy", random.normal(size=(len(rows), dim)).astype(np.float32))
        write(f"shard-{rank:05d}.state.npy", random.random(size=(len(rows), dim)).astype(np.float32))
        write(f"shard-{rank:05d}.clock.npy", random.integers(1, 99, len(rows)).astype(np.int32))
        if base is not None:
            write(f"shard-{rank:05d}.rows.npy", rows)
    write("dense.pt", {"rng": [torch.get_rng_state()] * size, **(dense or {})})
    manifest = {
        "format": 1,
        "step": step,
        "samples": 10 * step,
        "size": size,
        "num_rows": num_rows,
        "dim": dim,
        "partition": partition,
        "rule": "adagrad",
        "state_dim": dim,
        "files": files,
        **(about or {}),
    }
    if base is not None:
        said = json.loads((Path(base) / "manifest.json").read_text())
        manifest |= {"format": 2, "base": Path(base).name, "base_xxh3_128": said["xxh3_128"]}
    (path / "manifest.json").write_text(json.dumps({**manifest, "xxh3_128": digest(manifest)}))
