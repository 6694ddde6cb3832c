"""Whole runs on triples: damaged files end all ranks with one message; commands that do not know links refuse them."""

import sys

from launch import launcher_of, run, summary, train

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


def test_few_triples_are_trained_and_predict_and_export_say_what_they_cannot(tmp_path):
    path = written(tmp_path / "kg", "a\tr\tb\nb\tr\tc\nc\tr\ta\n", "c\tr\tnew\n")
    outcome = train(2, "data=triples", path, *SETTINGS, "model=rotate", "steps=5", f"run.dir={tmp_path}/run")
    assert outcome.code == 0 and "without a training triple: 1 entities" in outcome.text, outcome.text
    assert summary(tmp_path / "run")["mrr"] > 0
    checkpoint = f"{tmp_path}/run/checkpoints/step-00000005"
    predicted = run([*launcher_of(1), sys.executable, "-m", "hetmpi.predict", checkpoint, f"out={tmp_path}/p.parquet"])
    assert predicted.code == 1 and "of task=link" in predicted.text and "Traceback" not in predicted.text
    exported = run([sys.executable, "-m", "hetmpi", "export", checkpoint, f"{tmp_path}/out", "table=entity"])
    assert exported.code == 1 and "is of task=link, without dense layers" in exported.text, exported.text
    exported = run(
        [sys.executable, "-m", "hetmpi", "export", checkpoint, f"{tmp_path}/out", "table=entity", "dense=none"]
    )
    assert exported.code == 0 and "4 rows of 4 numbers" in exported.text, exported.text


def test_other_data_are_refused(tmp_path):
    outcome = train(1, "task=link", f"run.dir={tmp_path}/run")
    assert outcome.code == 1 and "task=link needs triples" in outcome.text, outcome.text
