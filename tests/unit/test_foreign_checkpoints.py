"""Checkpoints of somebody else: predict and export run no code that their files name, and open no path."""

import itertools
import json
import sys
import time
import zipfile

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from crafted import change_file, change_manifest
from foreign import MODEL, TABULAR, write_synthetic, write_tabular
from own_model import MODEL as OWN_MODEL

from hetmpi import export, predict
from hetmpi.checkpoint.files import open_array, write_json
from hetmpi.checkpoint.manifest import ARRAYS, check_same, digest_of, file_name, read_manifest
from hetmpi.data.tabular import Tabular
from hetmpi.errors import UserError
from hetmpi.trained.saved_model import check_samples
from hetmpi.world.world import World

HARMS = "from pathlib import Path\nPath('harmed').touch()\n"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The current folder, with a script and a model, and a checkpoint of synthetic data in step-00000002."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "cleanup.py").write_text(HARMS)
    (tmp_path / "mymodel.py").write_text(OWN_MODEL.format(name="LogReg"))
    write_synthetic(tmp_path / "step-00000002")
    return tmp_path


def says(path, **changes):
    change_manifest(path, lambda said: said.update(changes))


def refused(call):
    with pytest.raises((UserError, SystemExit)) as problem:
        call()
    text = str(problem.value)
    assert len(text.splitlines()) == 1 and len(text) < 600 and text.isprintable(), text
    return text


@pytest.mark.parametrize(
    "target, told",
    [
        (
            "cleanup.Model",
            "is of the model cleanup.Model, whose code would run here: if you trust it, add allow=cleanup",
        ),
        ("cleanup.__main__.X", "add allow=cleanup.__main__"),
        ("os.mkdir", "add allow=os"),
        ("hetmpi.models", "must be a torch.nn.Module, got hetmpi.models"),
        ("hetmpi.modelsx.X", "add allow=hetmpi.modelsx"),
        ("hetmpi.models.wdl.nn.Linear", "cannot be imported"),
        ("hetmpi.models.wdl.Tensor", "must be a torch.nn.Module, got hetmpi.models.wdl.Tensor"),
        ("hetmpi.models.cleanup.X", "cannot be imported"),
        ("hetmpi.models.wdl.concat", "must be a torch.nn.Module, got hetmpi.models.wdl.concat"),
        ("cleanup", "_target_ must be package.module.Class"),
        ("..cleanup.X", "_target_ must be package.module.Class"),
        (["cleanup.X"], "_target_ must be package.module.Class"),
    ],
)
def test_no_module_is_imported_that_a_manifest_names(own, target, told):
    path, configs = own / "step-00000002", [{"_target_": target}, {**MODEL, "hidden": [{"_target_": target}]}]
    for config in configs:
        says(path, model_config=config)
        for call in (
            lambda: export.main([str(path), "out"]),
            lambda: predict.main(World(), [str(path), "out=p.npy"]),
        ):
            assert told in refused(call)
    assert "cleanup" not in sys.modules
    assert not {"harmed", "out", "p.npy"} & {entry.name for entry in own.iterdir()}


def test_a_model_of_ones_own_is_used_once_the_caller_names_it(own, capsys):
    path = own / "step-00000002"
    says(path, model_config={"_target_": "mymodel.LogReg"})
    state = {"out.weight": torch.zeros(1, 26 * 3 + 13), "out.bias": torch.ones(1)}
    change_file(path, "dense.pt", {"rng": [torch.get_rng_state()] * 2, "model": state})
    for allow in ("mymodel", "mymodel.LogReg", "[torch.nn, mymodel]"):
        predict.main(World(), [str(path), "out=p.npy", f"allow={allow}"])
        assert np.allclose(np.load("p.npy"), torch.sigmoid(torch.ones(())), atol=1e-6)
    export.main([str(path), "out", "allow=mymodel"])
    assert "add allow=mymodel" in refused(lambda: export.main([str(path), "out", "allow=mymode"]))
    assert "allow must be names of modules" in refused(lambda: export.main([str(path), "out", "allow=../x"]))
    says(path, model_config=MODEL)
    assert "does not fit" in refused(lambda: export.main([str(path), "out", "allow=mymodel"]))


@pytest.mark.parametrize(
    "config, sizes, told",
    [
        ({"hidden": [1 << 40, 1 << 20]}, {}, "does not fit"),
        ({"hidden": [1] * 2000}, {}, "hidden must be at most 1,024"),
        ({"hidden": [[[[[]]]]]}, {}, "does not fit"),
        ({"hidden": ["x" * (1 << 20)]}, {}, "must have at most 1,048,576 characters"),
        ({"_target_": "hetmpi.models.dcn.DCN", "num_cross_layers": 1 << 40}, {}, "num_cross_layers must be at most"),
        ({"_target_": "hetmpi.models.lr.LR"}, {"num_fields": 1 << 20}, "does not fit"),
        ({}, {"dim": 1 << 20}, "does not fit"),
        ({}, {"num_dense": -1}, "num_dense must be an integer in"),
        ({"hidden": "${oc.env:HOME}"}, {}, "values must be plain"),
        ({"more": 1}, {}, "does not fit"),
    ],
)
def test_a_model_of_sizes_that_the_weights_do_not_have_is_refused_before_memory_is_taken(own, config, sizes, told):
    path = own / "step-00000002"
    said = {"num_fields": 26, "num_dense": 13, "dim": 3, **sizes}
    says(path, model_config={**MODEL, **config}, model_sizes=said)
    assert told in refused(lambda: export.main([str(path), "out"]))


def test_a_run_is_not_resumed_where_another_version_shuffled_its_data_otherwise(own):
    path = own / "tabular/step-00000002"
    write_tabular(path, own)
    source = Tabular(str(own / "clicks.csv"), 0, cache=str(own / "prepared"), **TABULAR)
    source.prepare(0, 1, lambda: None, lambda line: None)
    told = refused(lambda: check_samples(path, source))
    assert "was saved by a version that shuffles data=tabular in another way" in told
    for saved in ({}, {"train_samples": source.num_train}, {"train_samples": "1"}):
        says(path, order=source.order, **saved)
        check_samples(path, source)
    says(path, train_samples=source.num_train + 1)
    assert f"now there are {source.num_train}: " in refused(lambda: check_samples(path, source))


def test_a_setting_that_a_checkpoint_has_not_is_named(own):
    told = refused(lambda: check_same(own, {"data_config": {"a": 1}}, {"data_config": {"a": 1, "shuffle": False}}))
    assert "was saved without data.shuffle, now it is False: leave it out if it was added" in told


def test_paths_of_the_data_come_from_the_caller_alone(own):
    path = own / "step-00000002"
    write_tabular(own / "tabular/step-00000002", own)
    foreign = own / "tabular/step-00000002"
    secret, cache = own / "secret.csv", own / "precious"
    secret.write_text((own / "clicks.csv").read_text())
    cache.mkdir()
    says(foreign, data_config={"label": "click", "valid": 0.25, "path": str(secret), "cache": str(cache)})
    assert "give data.path=..." in refused(lambda: predict.main(World(), [str(foreign), "out=p.npy", "split=valid"]))
    says(foreign, data_config={"label": "click", "valid": str(secret)})
    given = [str(foreign), "out=p.npy", "split=valid", "data.path=clicks.csv", "data.cache=prepared"]
    told = refused(lambda: predict.main(World(), given))
    assert "secret.csv', which may be a path: give data.valid=..." in told
    says(foreign, data_config={"label": "click", "valid": 0.25, "path": str(secret), "cache": str(cache)})
    predict.main(World(), given)
    assert len(np.load("p.npy")) > 0 and not list(cache.iterdir())
    deep = []
    for _ in range(400):
        deep = [deep]
    says(path, data_config={"zipf": deep})
    assert "zipf must be a plain value" in refused(lambda: predict.main(World(), [str(path), "out=q.npy"]))


def test_text_for_a_source_of_ones_own_comes_from_the_caller(own):
    path, yaml = own / "step-00000002", own / "conf/data/mine.yaml"
    yaml.parent.mkdir(parents=True)
    yaml.write_text("_target_: hidden.Source\nfile: mine.npy\nnum: 3\n")
    says(path, data="mine", data_config={"file": "/etc/passwd", "num": 4})
    told = refused(lambda: predict.main(World(), [str(path), "out=p.npy"]))
    assert "data.file is '/etc/passwd', which may be a path: give data.file=..." in told
    says(path, data="mine", data_config={"file": "mine.npy", "num": 4})
    assert "cannot import hidden" in refused(lambda: predict.main(World(), [str(path), "out=p.npy"]))


ENCODERS = {
    "rows as text": lambda said: said["coders"]["user"].__setitem__(1, "9"),
    "no rows": lambda said: said["coders"]["user"].__setitem__(1, 0),
    "more rows than the table": lambda said: said["coders"]["item"].__setitem__(1, 1 << 50),
    "an unknown mode": lambda said: said["coders"]["user"].__setitem__(0, "x"),
    "a seed of 100 digits": lambda said: said["coders"]["user"].__setitem__(2, 10**100),
    "no coder": lambda said: said["coders"].pop("user"),
    "columns as text": lambda said: said.update(columns="abc"),
    "no columns": lambda said: said.update(columns=[]),
    "a million columns": lambda said: said.update(columns=[{}] * 1_000_000),
    "many tables": lambda said: said.update(columns=[{"dim": i} for i in range(20_000)]),
    "a column twice": lambda said: said["columns"].__setitem__(1, said["columns"][0]),
    "another kind": lambda said: said["columns"][0].update(kind="x"),
    "fewer moments": lambda said: said["moments"].pop(),
    "moments of text": lambda said: said["moments"].__setitem__(2, ["a", "b", "c"]),
    "buckets of text": lambda said: said["columns"][2].update(transform=["a"]),
    "delimiter as number": lambda said: said["reading"].update(delimiter=3),
    "delimiter of two lines": lambda said: said["reading"].update(delimiter="a\n"),
    "missing as numbers": lambda said: said["reading"].update(missing=[1, 2]),
    "names as a number": lambda said: said["reading"].update(names=[None, 3]),
    "another column is read": lambda said: said["reading"]["columns"][0].update(name="click"),
    "one column is read twice": lambda said: said["reading"]["columns"].append(said["reading"]["columns"][0]),
    "a share of nobody": lambda said: said["columns"][0].update(share="nobody"),
    "a share of itself": lambda said: said["columns"][0].update(share="user"),
    "not a number": lambda said: said["reading"].update(share=float("nan")),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_that_training_does_not_save_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "saved/step-00000002"
    write_tabular(path, tmp_path)
    given = [str(path), "out=p.parquet", "data.path=clicks.csv", "predict.keep=[user]"]
    predict.main(World(), given)
    assert pq.read_table("p.parquet").column_names == ["user", "probability"]
    (tmp_path / "p.parquet").unlink()
    dense = torch.load(path / "dense.pt", weights_only=True)
    said = json.loads(dense["data"]["encoder"].numpy().tobytes())
    ENCODERS[name](said)
    dense["data"]["encoder"] = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    change_file(path, "dense.pt", dense)
    told = refused(lambda: predict.main(World(), given))
    assert "dense.pt: data does not fit" in told or "was trained on data with" in told
    assert not (tmp_path / "p.parquet").exists()


def test_a_small_file_that_unpacks_to_gigabytes_is_refused_unread(own):
    path = own / "step-00000002"
    with zipfile.ZipFile(own / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        with zipfile.ZipFile(path / "dense.pt") as archive:
            for entry in archive.infolist():
                bomb.writestr(entry.filename, archive.read(entry))
        with bomb.open("dense/zeros", "w") as zeros:
            for _ in range(64):
                zeros.write(bytes(1 << 20))
    change_file(path, "dense.pt", (own / "bomb.pt").read_bytes())
    assert "its entries must not be compressed" in refused(lambda: export.main([str(path), "out"]))


def test_parts_that_name_each_other_many_times_are_read_once(own):
    path, parts = own / "step-00000002", [torch.ones(1)]
    for _ in range(60):
        parts = [parts] * 9
    dense = torch.load(path / "dense.pt", weights_only=True)
    change_file(path, "dense.pt", {**dense, "optimizer": {"state": parts}})
    export.main([str(path), "out"])


def test_a_manifest_of_600_mb_is_refused_unread(own):
    manifest = own / "step-00000002/manifest.json"
    with open(manifest, "r+b") as file:
        file.truncate(600_000_000)
    told = refused(lambda: export.main([str(manifest.parent), "out"]))
    assert "must have at most 536,870,912 bytes, it has 600,000,000" in told
    with open(manifest, "r+b") as file:
        file.truncate(500_000_000)
    begin = time.process_time()
    told = refused(lambda: export.main([str(manifest.parent), "out"]))
    assert "must have a value in 512 bytes, it has " in told and time.process_time() - begin < 0.2
    manifest.write_text('{"format": 1, "a": [' + "[]," * 5_000_000 + "1]}")
    assert "must have at most 8,388,608 values" in refused(lambda: export.main([str(manifest.parent), "out"]))


def test_an_array_that_is_none_is_named_by_its_path(tmp_path):
    path = tmp_path / "shard-00000.weight.npy"
    path.write_bytes(b"no array")
    told = refused(lambda: open_array(path, np.float32, (None, 3)))
    assert told.startswith(f"{path} is not an array in numpy.save's format")


@pytest.mark.rare
def test_the_manifest_of_100_tables_on_1024_ranks_is_read(tmp_path):
    path, names, size = tmp_path / "step-00000005", [f"table{i}" for i in range(100)], 1024
    table = {"num_rows": 9, "dim": 4, "partition": "hash", "rule": "sgd", "state_dim": 0, "step": 5}
    of_shards = itertools.starmap(file_name, itertools.product(names, range(size), ARRAYS))
    files = dict.fromkeys(["dense.pt", *of_shards], {"bytes": 1, "xxh3_128": "0" * 32})
    manifest = {"format": 3, "step": 5, "samples": 5, "size": size, "tables": dict.fromkeys(names, table)}
    manifest["files"] = files
    path.mkdir()
    write_json(path / "manifest.json", {**manifest, "xxh3_128": digest_of(manifest)})
    assert read_manifest(path) == manifest
    files["table7.shard-00003.clock.npy"] = {"bytes": True, "xxh3_128": "0" * 32}
    write_json(path / "manifest.json", {**manifest, "xxh3_128": digest_of(manifest)})
    assert "table7.shard-00003.clock.npy: bytes must be an integer" in refused(lambda: read_manifest(path))


def test_export_says_in_one_line_what_it_wrote_and_leaves_nothing_of_a_failure(own, capsys):
    path = own / "step-00000002"
    export.main([str(path), "out"])
    num, size = len(np.load("out/rows.npy")), (own / "out/rows.npy").stat().st_size
    told, rows = capsys.readouterr().out, f"{num:,} rows of 3 numbers, {size / 1000:.1f} kB"
    assert told.startswith(f"hetmpi: out: rows.npy ({rows}), dense.torchscript (")
    assert told.count("\n") == 1 and " parameters, " in told
    (own / "file").touch()
    assert "cannot write file/rows.npy: " in refused(lambda: export.main([str(path), "file"]))
    assert "choose one of them" in refused(lambda: export.main([str(path), "none", "rows=none", "dense=none"]))
    says(path, model_config={"_target_": "nobody.Model"})
    refused(lambda: export.main([str(path), "half"]))
    assert not (own / "half").exists() and not (own / "none").exists()
    assert not [entry for entry in own.rglob(".*") if entry.suffix == ".part"]


@pytest.mark.parametrize("text", ["allow", "~data.label"])
def test_a_word_of_predict_without_a_value_is_refused(text):
    with pytest.raises(UserError, match=f"hetmpi predict takes KEY=VALUE, got {text}"):
        predict.value_of(text)
