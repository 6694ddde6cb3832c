"""A URL in the place of a path is refused in one line that says what to do."""

import pytest

from hetmpi import export, predict, report
from hetmpi.data.graph.files import GraphFiles
from hetmpi.data.tabular import Tabular
from hetmpi.data.triples.source import TripleFiles
from hetmpi.data.triples.wordnet import WordNet
from hetmpi.errors import UserError, check_path
from hetmpi.inspect import files_with_rows
from hetmpi.run.config import compose
from hetmpi.world.world import World

URLS = ["s3://bucket/log.parquet", "gs://b/x", "hdfs://host:9000/log", "https://example.org/a.csv?x=1", "abfss://a@b/c"]
SAID = "is a URL, hetmpi reads and writes files: copy its files to a folder of this machine, or mount the storage"


def refused(call):
    with pytest.raises((UserError, SystemExit)) as problem:
        call()
    text = str(problem.value)
    assert len(text.splitlines()) == 1 and "Traceback" not in text
    return text


def prepared(source):
    source.prepare(0, 1, lambda: None, lambda line: None)


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("source", [
    lambda url: Tabular(url, 0, label="click"), lambda url: TripleFiles(url, 0), lambda url: WordNet(url, 0),
    lambda url: GraphFiles(url, 0),
], ids=["tabular", "triples", "wordnet", "graph"])  # fmt: skip
def test_a_url_is_refused_by_every_source(source, url):
    assert f"data.path={url} {SAID}" in refused(lambda: prepared(source(url)))


@pytest.mark.parametrize("url", URLS)
def test_a_url_of_held_out_rows_is_refused(tmp_path, url):
    (tmp_path / "a.csv").write_text("click,user\n" + "1,a\n0,b\n" * 50)
    source = Tabular(str(tmp_path / "a.csv"), 0, label="click", valid=url, cache=str(tmp_path))
    assert f"data.valid={url} {SAID}" in refused(lambda: prepared(source))


@pytest.mark.parametrize("key", ["run.dir", "checkpoint.dir", "resume", "table.init_from", "table.store_dir"])
def test_a_url_in_a_setting_of_a_path_is_refused(key):
    text = refused(lambda: compose(World(), ["data=synthetic", f"{key}=s3://bucket/a"]))
    assert f"{key}=s3://bucket/a {SAID}" in text


def predict_main(arguments):
    predict.main(World(), arguments)


@pytest.mark.parametrize("main, arguments, named", [
    (predict_main, ["s3://b/step-00000002", "out=a.npy"], "CHECKPOINT=s3://b"),
    (predict_main, ["here", "out=s3://b/a.npy"], "out=s3://b/a.npy"),
    (predict_main, ["here", "out=a.parquet", "items=gs://b/i"], "items=gs://b/i"),
    (predict_main, ["here", "out=a.parquet", "ids=gs://b/i"], "ids=gs://b/i"),
    (export.main, ["here", "s3://b/out"], "CHECKPOINT or OUT=s3://b/out"),
    (export.main, ["here", "out", "deltas=s3://b/1"], "deltas=s3://b/1"),
    (export.main, ["here", "out", "since=s3://b/1"], "since=s3://b/1"),
    (report.main, ["s3://b/run"], "RUN=s3://b/run"), (report.main, ["run", "out=s3://b/x"], "out=s3://b/x"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_commands_refuse_a_url(main, arguments, named):
    assert f"{named}" in (text := refused(lambda: main(arguments))) and SAID in text


def test_inspect_refuses_a_url():
    assert SAID in refused(lambda: files_with_rows("s3://bucket/a.csv"))


def test_a_file_url_is_answered_by_its_path():
    text = refused(lambda: check_path("data.path", "file:///data/a.csv"))
    assert text.endswith("write data.path=/data/a.csv")


@pytest.mark.parametrize("path", ["a.csv", "/a//b", "a:b", "./x:/y", "C:/a", "~/a", "a b://c", "1://x"])
def test_other_paths_are_no_urls(path):
    check_path("data.path", path)
