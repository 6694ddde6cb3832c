"""Invalid requests are refused by one message, printed once, and every rank ends soon after, with exit code not 0."""

import json
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch
from launch import ROOT, SMALL, launcher_of, mpiexec, run, train

from hetmpi.errors import UserError
from hetmpi.log.record import Run
from hetmpi.run.config import compose
from hetmpi.spans import Spans
from hetmpi.table.optim import ROW_RULES
from hetmpi.train import Training
from hetmpi.world.world import World

MESSAGES = ["table.exchange=messages", "table.ranks_per_node=1"]


def check_refused(outcome, *words):
    """The run failed, printed each of `words` exactly once and no messages of dying libraries, and every rank had ended
    within 10 s."""
    assert outcome.code != 0, outcome.text
    assert "terminate called" not in outcome.text
    for word in words:
        assert outcome.text.count(word) == 1, f"{word!r} told {outcome.text.count(word)} times in:\n{outcome.text}"
    assert outcome.survivors == [] and outcome.seconds_left < 10


def refusal(*overrides):
    """Error message of a run in this process; test_a_wrong_setting_is_told_once checks the output of the program."""
    world, training = World(), None
    with pytest.raises(UserError) as problem:
        training = Training(world, compose(world, ["device=cpu", *overrides]), torch.device("cpu"), Spans())
        training.run()
    if training is not None:
        training.close()
    return str(problem.value)


FAILS_IN_SET_UP = """
import time
from hetmpi.errors import UserError
from hetmpi.run.preemption import Preemption
from hetmpi.world.launch import launch

def main(world):
    preemption = Preemption(world)
    if world.rank == 1:
        raise UserError("rank 1 has no file")
    time.sleep(60)

launch(main)
"""


def test_ranks_that_are_ended_after_one_has_failed_say_nothing():
    """Open MPI's launcher sends them SIGTERM, which a scheduler sends as well."""
    outcome = run([*launcher_of(2), sys.executable, "-c", FAILS_IN_SET_UP])
    check_refused(outcome, "hetmpi:", "rank 1 has no file")


@pytest.mark.parametrize("override", ["optim.rows=lion", "model._target_=nowhere.Model"])
def test_a_wrong_setting_is_told_once(override):
    check_refused(train(2, *SMALL[1:], override), refusal(*SMALL[1:], override))


@pytest.mark.parametrize(
    "override, words",
    [
        ("no_such_key=1", ["Could not override 'no_such_key'", "`hetmpi train --help` lists all settings"]),
        ("model=no_such_model", ["Could not find 'model/no_such_model'", "deepfm"]),
        ("optim.rows=lion", [f"optim.rows must be one of {', '.join(ROW_RULES)}, got lion"]),
        ("table.partition=ring", ["table.partition must be one of round_robin, range, hash, got ring"]),
        ("table.exchange=mail", ["table.exchange must be one of messages, windows, auto, got mail"]),
        ("batchsize=4", ["did you mean batch_size?"]),
        ("table.store=gpu", ["table.store=gpu needs a GPU, the device is cpu: set device=cuda, or table.store=memory"]),
        ("model._target_=nowhere.Model", ["cannot import nowhere.Model"]),
        ("model._target_=torch.nn.Identity", ["Identity: set self.row_dim"]),
        ("model._target_=odd_models.HasNoParameters", ["odd_models.HasNoParameters: it has no parameters"]),
        ("data=criteo", ["settings: give data.path=..."]),
        ("batch_size=0", ["batch_size must be an integer of at least 1, got 0"]),
        ("batch_size=many", ["batch_size must be an integer of at least 1, got many"]),
        (
            "batch_size=1000000000",
            [
                "batch_size=1,000,000,000: the 3 batches that loader.prefetch=2 and table.batches_per_pull keep need",
                "lower",
            ],
        ),
        (
            "loader.prefetch=1000 batch_size=1000000 steps=10000000000",
            ["1,001 batches that loader.prefetch=1000"],
        ),
        (
            "model.hidden=[1000000,1000000]",
            ["model=wdl needs 8,000.1 GB of memory", "lower table.dim or the widths of its layers"],
        ),
        (
            "model=finalmlp model.num_heads=7",
            ["settings: FinalMLP: num_heads must divide the last widths of first and second, 256 and 256, got 7"],
        ),
        ("data.scale=x", ["data.scale must be a number of at least 1e-09, got x"]),
        ("data._target_=5", ["_target_ must name a class, as package.module.Class, got 5"]),
        ("data._target_=json", ["_target_=json names no class"]),
        (
            "+model.depth=3",
            [
                "hetmpi.models.wdl.WDL",
                "unexpected keyword argument 'depth'",
                "must be the arguments of its constructor",
            ],
        ),
    ],
)
def test_a_wrong_setting(override, words):
    text = refusal(*SMALL[1:], *override.split())
    assert all(text.count(word) == 1 for word in words), text


@pytest.mark.long
@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE"])
def test_a_launcher_that_started_lonely_ranks(name):
    check_refused(train(0, *SMALL, **{name: "2"}), "(hetmpi doctor shows it)")


@pytest.mark.parametrize("command", ["train", "predict"])
def test_ranks_of_different_arguments(command, tmp_path):
    first, other = (
        [sys.executable, "-m", f"hetmpi.{command}", *more] for more in (["steps=1"], ["steps=1", "modle=x"])
    )
    outcome = run([mpiexec(), "-n", "1", *first, ":", "-n", "1", *other], cwd=tmp_path)
    check_refused(outcome, "rank 0 on ", "has nothing of the kind, rank 1 on ", "has modle=x")


def test_processes_of_torchrun(tmp_path):
    env = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    check_refused(train(0, *SMALL, RANK="0", **env), "mpirun -np 2 hetmpi train")
    silent = train(0, *SMALL, RANK="1", **env)
    assert silent.code != 0 and "hetmpi" not in silent.text


@pytest.mark.parametrize("start", ["-m hetmpi.train", "-m hetmpi train", "bin/hetmpi train"])
def test_files_of_the_current_folder_that_are_named_as_modules_of_python_are_not_imported(tmp_path, start):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/hetmpi").write_text("from hetmpi.__main__ import main\n\nmain()\n")  # as pip writes it
    for name in ("random", "queue", "numbers", "statistics", "numpy", "yaml", "string", "pathlib", "importlib"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the current folder')\n")
    (tmp_path / "mine.py").write_text("from hetmpi.models.lr import LR\n\n\nclass Mine(LR):\n    pass\n")
    own = ["device=cpu", "model=lr", "model._target_=mine.Mine", "steps=1"]
    outcome = run([sys.executable, *start.split(), *SMALL[:-2], *own], cwd=tmp_path, may_fork=False)
    assert outcome.code == 0, outcome.text


def test_a_lonely_rank_that_is_not_the_first_is_silent():
    outcome = train(0, *SMALL, SLURM_NTASKS="2", SLURM_PROCID="1")
    assert outcome.code != 0 and "hetmpi" not in outcome.text


def test_mpi_below_thread_multiple():
    program = "import mpi4py; mpi4py.rc.thread_level = 'serialized'; from mpi4py import MPI; "
    program += "import runpy; runpy.run_module('hetmpi.train', run_name='__main__')"
    outcome = run([mpiexec(), "-n", "2", sys.executable, "-c", program])
    check_refused(outcome, "hetmpi needs an MPI started with MPI_THREAD_MULTIPLE")


def is_openmpi(launcher):
    """Whether a launcher is Open MPI's, rather than MPICH's or of a kin."""
    told = subprocess.run([launcher, "--version"], capture_output=True, text=True).stdout
    return "(Open MPI)" in told or "(OpenRTE)" in told


def test_the_launcher_of_another_mpi():
    other = shutil.which("mpiexec", path="/usr/bin:/usr/local/bin")
    if other is None or is_openmpi(other) == is_openmpi(mpiexec()):
        pytest.skip("takes MPICH and Open MPI on one machine; launchers of one kind start each other's ranks")
    outcome = run([other, "-n", "2", sys.executable, "-m", "hetmpi.train", *SMALL])
    assert outcome.code != 0 and outcome.survivors == []
    assert "launcher" in outcome.text and "hetmpi doctor" in outcome.text, outcome.text


@pytest.mark.parametrize("own, word", [("optim: {rows_lr: -1}", "optim.rows_lr must be"),
                                       ("optim: {rows_momentum: 1}", "optim.rows_momentum must be at most 0.9999"),
                                       ("cache: {size: 4}", "there is no table.cache.size of its own")])  # fmt: skip
def test_settings_of_a_column_are_checked_before_its_data_are_read(own, word):
    columns = f"data.columns=[{{name: user, {own}}}]"
    told = refusal("data=tabular", "data.path=gone.csv", "data.label=click", columns)
    assert told.startswith("data.columns, name: user: ") and word in told


def test_a_small_dev_shm():
    """In a mount namespace whose /dev/shm has 64 MB, as in containers."""
    mounted = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
    if run([*mounted, "true"]).code != 0:
        pytest.skip("cannot mount: needs root")
    outcome = run([*mounted, mpiexec(), "-n", "2", sys.executable, "-m", "hetmpi.train", "data.scale=0.1"])
    check_refused(outcome, "free in /dev/shm", "--shm-size")


def test_a_table_larger_than_memory():
    check_refused(train(2, *SMALL, "data.scale=500"), "GiB are free in")


def test_keys_out_of_range():
    outcome = train(2, *SMALL, "data._target_=broken_data.KeysOutOfRange", "~data.scale")
    check_refused(outcome, "keys must lie in [0, 100), got 100")


@pytest.mark.parametrize("how", [[], MESSAGES, [*MESSAGES, "table.staleness=10"]])
def test_an_exception_on_one_rank(how, tmp_path):
    outcome = train(2, *SMALL, *how, "data._target_=broken_data.FailsOnRankOne", f"run.dir={tmp_path}")
    check_refused(outcome, "hetmpi: RuntimeError: the disk of rank one is gone (rank 1 of 2")
    assert Run(tmp_path, "run", 0).state(time.time()).startswith("failed: RuntimeError: the disk of rank one is gone")


def test_a_call_of_exit_on_one_rank_ends_all_with_its_code_and_one_line():
    outcome = train(2, *SMALL, "data._target_=broken_data.ExitsOnRankOne")
    assert outcome.code == 3 and outcome.survivors == [], outcome.text
    assert outcome.text.count("the program called sys.exit(3) (rank 1 of 2") == 1 and "Traceback" not in outcome.text


@pytest.mark.long
def test_the_last_ranks_fail_together_and_one_speaks():
    outcome = train(4, *SMALL, "data._target_=broken_data.FailsFromRankTwo")
    check_refused(outcome, "hetmpi: RuntimeError: no disk here (rank 2 of 4")


@pytest.mark.parametrize("how", [[], MESSAGES])
def test_a_rank_killed(how):
    outcome = train(2, *SMALL, *how, "data._target_=broken_data.DiesOnRankOne")
    assert outcome.code != 0 and outcome.survivors == []


def test_a_missing_data_file(tmp_path):
    outcome = train(2, "data=criteo", f"data.path={tmp_path}/nothing.tsv", f"data.cache={tmp_path}/cache")
    check_refused(outcome, f"{tmp_path}/nothing.tsv")
    assert "Traceback" not in outcome.text


def test_an_empty_data_file(tmp_path):
    (tmp_path / "empty.tsv").touch()
    text = refusal("data=criteo", f"data.path={tmp_path}/empty.tsv", f"data.cache={tmp_path}/cache")
    assert text.count(f"{tmp_path}/empty.tsv") == 1, text


def test_a_loss_that_is_not_finite():
    rates = ["optim.rows=sgd", "optim.rows_lr=1e3", "optim.dense=sgd", "optim.dense_lr=1e3"]
    outcome = train(2, *SMALL, *rates, "steps=100")
    check_refused(outcome, "at step", "lower optim.rows_lr (now 1000")


@pytest.mark.long
@pytest.mark.parametrize(
    "how, data, words",
    [
        ([], "LabelsThatAreNan", ["loss is nan at step 3", "the data give label = nan in 2 of the 32 samples"]),
        (
            ["table.ranks_per_node=1"],
            "DenseThatIsInfinite",
            ["at step 3", "the data give dense feature 1 = inf in 1 of the 32 samples"],
        ),
        (["table.staleness=10"], "AnEmptyBatch", ["loss is nan at step 3", "the batch is empty"]),
    ],
)
def test_a_loss_that_the_data_spoil(how, data, words):
    outcome = train(2, *SMALL, *how, f"data._target_=broken_data.{data}", "~data.scale")
    check_refused(outcome, *words)
    assert "lower optim" not in outcome.text


@pytest.mark.long
@pytest.mark.parametrize(
    "what, how", [("rows", []), ("rows", ["table.staleness=10", "table.cache.admit=all"]), ("dense", [])]
)
def test_gradients_that_are_not_finite_under_a_finite_loss(tmp_path, what, how):
    """They reach neither the owners nor a checkpoint: the run can be resumed from the last one."""
    settings = [
        *SMALL,
        "steps=20",
        *how,
        f"run.dir={tmp_path}",
        "checkpoint.every_steps=2",
        "model._target_=odd_models.BadGradients",
        f"+model.what={what}",
    ]
    outcome = train(2, *settings, "+model.at=5", "model=lr")
    check_refused(outcome, "at step 6: lower optim.rows_lr")
    word = (
        "gradients must be finite, got"
        if what == "rows"
        else "the gradient of the dense parameter out.weight is not finite"
    )
    assert word in outcome.text, outcome.text
    outcome = train(2, *settings, "+model.at=null", "model=lr", "resume=auto")
    assert outcome.code == 0 and "resumed from" in outcome.text, outcome.text


OWN_DATA = [f"~data.{name}" for name in ("scale", "zipf", "num_train", "num_valid")]


FAILING_DATA = ["data._target_=broken_data.FailsAt", *OWN_DATA]
FAILING_MODEL = ["data._target_=broken_data.Broken", "model._target_=odd_models.FailsAt", *OWN_DATA]


@pytest.mark.long
@pytest.mark.parametrize(
    "settings, file, told",
    [
        ([*FAILING_DATA, "+data.at=making"], "broken_data", r"ValueError: .*in making broken_data.FailsAt\)"),
        (
            [*FAILING_DATA, "+data.at=prepare"],
            "broken_data",
            r"FileNotFoundError: .*in prepare\(\) of data=synthetic\)",
        ),
        ([*FAILING_DATA, "+data.at=train"], "broken_data", r"ValueError: .*in train\(0, 32\) of data=synthetic\)"),
        ([*FAILING_DATA, "+data.at=valid"], "broken_data", r"ValueError: .*in valid\(0, 50\) of data=synthetic\)"),
        ([*FAILING_MODEL, "+model.at=making"], "odd_models", r"ValueError: mine .*in making odd_models.FailsAt\)"),
        ([*FAILING_MODEL, "+model.at=forward"], "odd_models", r"OSError: mine .*in forward\(\) of model=wdl\)"),
    ],
)
def test_an_error_of_the_users_code_keeps_its_place(settings, file, told):
    outcome = train(2, *SMALL[1:], *settings)
    check_refused(outcome, "Traceback (most recent call last)", "hetmpi: ")
    assert f'{file}.py", line ' in outcome.text and re.search(rf"\nhetmpi: {told}\n", outcome.text), outcome.text


@pytest.mark.long
def test_samples_of_another_kind_are_told_in_one_line():
    outcome = train(2, *SMALL[1:], "data._target_=broken_data.IdsThatAreFloats", *OWN_DATA)
    check_refused(outcome, "hetmpi: Samples: ids must be int64 of shape (B, F), got float64 (32, 2) (rank")
    assert "Traceback" not in outcome.text


def test_data_without_samples_to_train_on():
    settings = ["data._target_=broken_data.Sized", "data.num_train=0", "~data.scale", "~data.zipf"]
    assert "data=synthetic has 0 training samples" in refusal(*SMALL[1:], *settings)


def test_a_run_folder_that_cannot_be_written():
    assert "cannot write /proc/hetmpi" in refusal(*SMALL, "run.dir=/proc/hetmpi")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_log_on_a_full_disk_does_not_end_the_run(tmp_path, ranks):
    """In a mount namespace whose run folder has 28 kB. Without a launcher standard output is written there too."""
    run_dir, kept, saved = tmp_path / "run", tmp_path / "kept", tmp_path / "saved"
    run_dir.mkdir()
    shown = "/dev/stdout" if ranks else run_dir / "out"
    script = (
        f'mount -t tmpfs -o size=28k tmpfs {run_dir} && "$@" > {shown}; code=$?; cp -r {run_dir} {kept}; exit $code'
    )
    mounted = ["unshare", "-m", "sh", "-c", script, "sh"]
    if run([*mounted, "true"]).code != 0:
        pytest.skip("cannot mount: needs root")
    shutil.rmtree(kept)
    mpi = [mpiexec(), "-n", str(ranks)] if ranks else []
    settings = ["device=cpu", "log.every_steps=1", "steps=40", "train.profile=true", f"run.dir={run_dir}"]
    saving = ["checkpoint.every_steps=40", f"checkpoint.dir={saved}"]
    outcome = run([*mounted, *mpi, sys.executable, "-m", "hetmpi.train", *SMALL, *settings, *saving])
    assert outcome.code == 0, outcome.text
    told = r"hetmpi: run folder: cannot write \S+: No space left on device: training continues"
    assert len(re.findall(told, outcome.text)) == 1, outcome.text
    assert re.search(rf"hetmpi: run folder {run_dir} lacks .*summary.json", outcome.text), outcome.text
    steps = [json.loads(line)["step"] for line in (kept / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and 0 < len(steps) < 40 and not list(kept.glob("*.part"))
    assert (saved / "step-00000040" / "manifest.json").exists()


def test_every_command_that_run_sh_tells_of_does_something():
    """Each has its own branch in run.sh, before or after the set-up."""
    text = (ROOT / "run.sh").read_text()
    told = re.findall(r"^  ([a-z-]+) .*\S", text[text.index("usage:") : text.index("environment\n")], re.MULTILINE)
    found = re.findall(r"^    ([a-z-]+(?: \| [a-z-]+)*)\) (?:exec|cd|launch|run_|echo)", text, re.MULTILINE)
    branches = [name for names in found for name in names.split(" | ")]
    assert len(branches) == 15 and set(told) == set(branches)


@pytest.mark.parametrize("kind", ["triples", "tabular"])
def test_ranks_that_read_copies_in_another_order(tmp_path, kind):
    for number in range(2):
        folder = tmp_path / f"{number}/data"
        folder.mkdir(parents=True)
        lines = [f"e{i % 9}\tr\te{i % 7}\n" for i in range(60)]
        lines = lines[::-1] if number else lines
        (folder / "train.txt").write_text("".join(["head\tclick\ttail\n"] * (kind == "tabular") + lines))
    more = ["data=triples"] if kind == "triples" else ["data=tabular", "data.label=click", "data.positive=[r]"]
    command = [sys.executable, "-m", "hetmpi.train", *more, "data.path=data", "device=cpu", f"data.cache={tmp_path}"]
    command = [text for text in command if kind == "tabular" or not text.startswith("data.cache")]
    ranks = [["-n", "1", "-wdir", str(tmp_path / str(number)), *command] for number in range(2)]
    outcome = run([mpiexec(), *ranks[0], ":", *ranks[1]])
    check_refused(outcome, "train.txt has another content on rank 1 on ")
