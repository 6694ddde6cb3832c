"""Predicts the probability of label 1 of each sample from a checkpoint of a click-through-rate model, without MPI.

hetmpi predict CHECKPOINT OUT.npy [split=valid|train] [start=N] [stop=N] [--config-dir DIR] [KEY=VALUE ...]

The samples are positions [start, stop) of the held-out part of the data that the model was trained on, or of the
training stream with split=train. data=NAME and data.KEY=VALUE select other data with the same features; data.path is
required if the manifest has none. OUT.npy is (stop - start,) float32, in the order of the samples.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from hetmpi.checkpoint.manifest import brief, read_manifest, tables_of
from hetmpi.checkpoint.shard_files import shards_of
from hetmpi.data.batch import Samples, to_batch
from hetmpi.data.features import TABLE
from hetmpi.data.source import Source
from hetmpi.errors import LARGEST, UserError, check_integer
from hetmpi.run import build
from hetmpi.run.command_line import parse
from hetmpi.run.config import advised, composed
from hetmpi.run.saved_model import OfTensors, Saved, dense_layers, of_tensors

BATCH_SIZE = 4096
OWN = ("split", "start", "stop")  # arguments that are not settings of the run


def main(arguments: list[str]):
    """Reads the command line, predicts, and prints the number of probabilities written."""
    if {"-h", "--help"} & set(arguments):
        return print(__doc__)
    if len(arguments) < 2 or any(argument.startswith("-") for argument in arguments[:2]):
        sys.exit(__doc__)
    try:
        asked = parse(arguments[2:])
        if asked.multirun or asked.cfg is not None:
            raise UserError("hetmpi predict does not support -m and --cfg")
        own = dict(text.split("=", 1) for text in asked.overrides if text.split("=")[0] in OWN)
        overrides = [text for text in asked.overrides if text.split("=")[0] not in OWN]
        written = predict(Path(arguments[0]), Path(arguments[1]), overrides, asked.config_dir, **checked(own))
    except UserError as refusal:
        sys.exit(f"hetmpi: {refusal}")
    print(f"hetmpi: {arguments[1]}: {len(written):,} probabilities, mean {written.mean():.4f}")


def checked(own: dict[str, str]) -> dict:
    """split, start and stop, checked. Raises UserError."""
    if own.get("split", "valid") not in ("valid", "train"):
        raise UserError(f"split must be valid or train, got {own['split']}")
    for name in OWN[1:]:
        if name in own:
            if not own[name].isdecimal():
                raise UserError(f"{name} must be an integer of at least 0, got {own[name]}")
            own[name] = int(own[name])
    return own


def predict(
    checkpoint: Path, out: Path, overrides: list[str], config_dir: str | None = None,
    split: str = "valid", start: int = 0, stop: int | None = None,
) -> np.ndarray:  # fmt: skip
    """Writes the probability of label 1 of samples [start, stop) of a split to `out` and returns it, (stop - start,)
    float32. overrides: Hydra overrides of data settings. stop: None for all. Raises UserError for an incomplete
    checkpoint, an unsupported kind of model, and data with other features."""
    manifest = read_manifest(checkpoint)
    name, table = the_table(checkpoint, manifest)
    shards = shards_of(checkpoint, manifest)[name]
    for shard in shards:
        shard.check()
    source = source_of(manifest, overrides, config_dir)
    check_features(checkpoint, manifest, table, source)
    most = source.num_valid if split == "valid" else source.num_train
    if most is None and stop is None:
        raise UserError(f"data={source.name} is infinite: give stop=N")
    if most == 0:
        raise UserError(f"data={source.name} has no samples in its {split} split")
    if most is not None:
        check_integer("start", start, 0, most - 1)
    stop = most if stop is None else stop
    check_integer("stop", stop, start + 1, LARGEST if most is None else most)
    dense = of_tensors(dense_layers(checkpoint, manifest)[0])
    draw = getattr(source, split)
    batches = (draw(begin, min(begin + BATCH_SIZE, stop)) for begin in range(start, stop, BATCH_SIZE))
    found = np.concatenate(
        [torch.sigmoid(logits).numpy() for logits in logits_of(batches, Saved(table, shards), dense)]
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "wb") as file:
            np.save(file, found)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    return found


def the_table(checkpoint: Path, manifest: dict) -> tuple[str, dict]:
    """Name and manifest entry of the only table. Raises UserError if there are several."""
    tables = tables_of(manifest)
    if len(tables) != 1:
        raise UserError(f"{checkpoint} has {len(tables)} tables: hetmpi predict supports models with one table only")
    return next(iter(tables.items()))


@torch.no_grad()
def logits_of(batches: Iterable[Samples], saved: Saved, dense: OfTensors) -> Iterator[Tensor]:
    """The logits (B,) of each batch of samples."""
    for samples in batches:
        batch = to_batch(samples)
        keys = batch.keys[TABLE].numpy()
        rows = np.empty((len(keys), saved.dim), np.float32)
        saved.read(keys, rows)
        yield dense(torch.from_numpy(rows), batch.index, batch.dense)


def source_of(manifest: dict, overrides: list[str], config_dir: str | None) -> Source:
    """The prepared data source of the checkpoint's training run, with `overrides`. The manifest is not trusted: the
    class comes from the settings, and only plain values of known keys are taken from the manifest. Raises UserError."""
    wrong = [text for text in overrides if not re.match(r"[+~]*data\b", text)]
    if wrong:
        raise UserError(f"hetmpi predict accepts only settings of data, got {wrong[0]}")
    named = any(text.startswith("data=") for text in overrides)
    name, saved = manifest.get("data"), manifest.get("data_config")
    if not named:
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w-]*", name) or not isinstance(saved, dict):
            raise UserError("the checkpoint does not name its data: give data=NAME")
        overrides = [f"data={name}", *overrides]
    with advised(overrides, config_dir):
        config = composed(overrides, config_dir)
        given = {text.lstrip("+~").split("=")[0] for text in overrides}
        for key in set(config.data) & set(saved or {}) - {"_target_"} if not named else ():
            if f"data.{key}" not in given:
                if not is_plain(saved[key]):
                    raise UserError(f"manifest.json: data_config: {key} must be a plain value, got {brief(saved[key])}")
                config.data[key] = saved[key]
        del config["hydra"]
        missing = [key for key in OmegaConf.missing_keys(config) if key.startswith("data.")]
        if missing:
            raise UserError(f"give {', '.join(f'{key}=...' for key in missing)}")
        data: DictConfig = OmegaConf.create(OmegaConf.to_container(config.data, resolve=True))
    source = build.make(data)
    source.prepare(0, 1, lambda: None)
    return source


def is_plain(value) -> bool:
    """Whether a value of a manifest is a number, a boolean, null, text without interpolation, or a list of these."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and "${" not in value)


def check_features(checkpoint: Path, manifest: dict, table: dict, source: Source):
    """Raises UserError if the samples have other features than those the model was trained on."""
    sizes = manifest.get("model_sizes", {})
    trained = {
        "num_fields": sizes.get("num_fields"),
        "num_dense": sizes.get("num_dense"),
        "num_rows": table["num_rows"],
    }
    found = {name: getattr(source, name, None) for name in trained}
    if found != trained:
        raise UserError(
            f"{checkpoint} was trained on data with {sizes_text(trained)}, data={source.name} has {sizes_text(found)}"
        )


def sizes_text(sizes: dict) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


if __name__ == "__main__":
    main(sys.argv[1:])
