"""Whole runs on triples: damaged files end all ranks with one message; questions are answered by name; rows are
exported, and read by another run."""

import re
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from launch import launcher_of, run, summary, train

from hetmpi.errors import UserError
from hetmpi.predict import main as predict
from hetmpi.world.world import World

SETTINGS = ["batch_size=8", "table.dim=4", "task.negatives=8", "log.every_steps=5"]


def written(folder, train_lines, valid="a\tr\tb\n"):
    folder.mkdir(exist_ok=True)
    (folder / "train.txt").write_text(train_lines)
    (folder / "valid.txt").write_text(valid)
    return f"data.path={folder}"


def test_a_damaged_file_ends_all_ranks_with_one_message(tmp_path):
    path = written(tmp_path / "kg", "a\tr\tb\nb\tr\n")
    outcome = train(3, "data=triples", path, *SETTINGS, f"run.dir={tmp_path}/run")
    assert outcome.code == 1 and outcome.text.count("hetmpi:") == 1, outcome.text
    assert "train.txt, line 2: expected 3 columns, separated by tabs, got 2" in outcome.text, outcome.text
    assert "Traceback" not in outcome.text and not outcome.survivors


def test_few_triples_are_trained_answered_exported_and_start_another_run(tmp_path):
    path = written(tmp_path / "kg", "a\tr\tb\nb\tr\tc\nc\tr\ta\n", "c\tr\tnew\n")
    outcome = train(2, "data=triples", path, *SETTINGS, "model=rotate", "steps=5", f"run.dir={tmp_path}/run")
    assert outcome.code == 0 and "without a training triple: 1 entities" in outcome.text, outcome.text
    assert summary(tmp_path / "run")["mrr"] > 0
    checkpoint = f"{tmp_path}/run/checkpoints/step-00000005"
    questions, answers = tmp_path / "questions.txt", tmp_path / "answers.parquet"
    questions.write_text("a\tr\t?\n")
    predict = [*launcher_of(2), sys.executable, "-m", "hetmpi.predict", checkpoint, f"out={answers}"]
    predicted = run([*predict, f"data.path={questions}", "top=2", f"without={tmp_path}/kg"])
    assert predicted.code == 0 and "the best answers, at most 2 each, to 1 question(s)" in predicted.text, (
        predicted.text
    )
    found = pq.read_table(answers).to_pylist()
    assert [one["rank"] for one in found] == [1, 2] and {one["tail"] for one in found} <= {"a", "c", "new"}
    exported = run([sys.executable, "-m", "hetmpi", "export", checkpoint, f"{tmp_path}/out", "rows=parquet"])
    assert exported.code == 0 and "4 rows of 4 numbers" in exported.text, exported.text
    assert pq.read_table(tmp_path / "out/entity.parquet")["entity"].to_pylist() == ["a", "b", "c", "new"]
    start = ["model=rotate", "steps=1", "optim.rows_lr=1e-9", f"table.init_from={tmp_path}/out"]
    started = train(2, "data=triples", path, *SETTINGS, *start, f"run.dir={tmp_path}/second")
    assert started.code == 0, started.text
    checkpoint = f"{tmp_path}/second/checkpoints/step-00000001"
    again = run([sys.executable, "-m", "hetmpi", "export", checkpoint, f"{tmp_path}/o2"])
    assert again.code == 0 and (tmp_path / "o2/entity.names.txt").read_text() == "a\nb\nc\nnew\n", again.text
    weights = pq.read_table(tmp_path / "out/entity.parquet")["weight"].to_pylist()
    assert np.allclose(np.load(tmp_path / "o2/entity.npy"), weights, atol=1e-7)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["data.path={}/q1"], "q1, line 1: the model has no entity 'x'"),
        (
            ["data.path={}/q2"],
            "q2, line 2: put ? in the place of the head, the relation or the tail, and of nothing else",
        ),
        (["data.path={}/q3"], "q3, line 1: expected 3 columns, head, relation and tail with tabs between, got 2"),
        (["data.path={}/q4"], "has no questions"),
        (["data.path={}/none"], "none cannot be read: No such file"),
        ([], "hetmpi predict takes data.path=QUESTIONS"),
        (["data.path={}/q1", "split=train"], "not split"),
        (["data.path={}/q1", "top=0"], "top must be an integer from 1 to 16,384, got 0"),
        (["data.path={}/q1", "without={}/q1"], "q1: the name of a file of triples ends in .txt, .tsv"),
        (["data.path={}/q1", "without={}/others"], "the model has the names of none of its 2 triples"),
    ],
)
def test_questions_that_cannot_be_answered_are_refused(saved_links, arguments, said):
    """In this process; the next test has the output of the program."""
    given = [argument.format(saved_links) for argument in arguments]
    checkpoint = f"{saved_links}/run/checkpoints/step-00000001"
    with pytest.raises(UserError, match=re.escape(said)):
        predict(World(), [checkpoint, f"out={saved_links}/p.parquet", *given])
    assert not (saved_links / "p.parquet").exists()


def test_a_refused_question_is_told_once(saved_links):
    checkpoint = f"{saved_links}/run/checkpoints/step-00000001"
    command = [*launcher_of(2), sys.executable, "-m", "hetmpi.predict", checkpoint, f"out={saved_links}/p.parquet"]
    outcome = run([*command, f"data.path={saved_links}/q1"])
    assert outcome.code == 1 and "the model has no entity 'x'" in outcome.text, outcome.text
    assert outcome.text.count("hetmpi: ") == 1 and "Traceback" not in outcome.text, outcome.text


@pytest.fixture(scope="module")
def saved_links(tmp_path_factory):
    """A folder with a checkpoint of few triples in `run`, and files of questions."""
    folder = tmp_path_factory.mktemp("links")
    path = written(folder / "kg", "a\tr\tb\nb\tr\tc\n")
    outcome = train(1, "data=triples", path, *SETTINGS, "steps=1", f"run.dir={folder}/run")
    assert outcome.code == 0, outcome.text
    written(folder / "others", "x\ty\tz\n", "x\ty\tz\n")
    for name, text in {"q1": "x\tr\t?\n", "q2": "a\tr\t?\n?\tr\t?\n", "q3": "a\t?\n", "q4": "\n"}.items():
        (folder / name).write_text(text)
    return folder


def test_other_data_are_refused(tmp_path):
    outcome = train(1, "task=link", f"run.dir={tmp_path}/run")
    assert outcome.code == 1 and "task=link needs triples" in outcome.text, outcome.text
