"""What cannot be done is refused in one message, told once, and every rank is gone soon after, exit code not 0."""

import re
import shutil
import sys

import pytest
from launch import ROOT, SMALL, mpiexec, run, train

ALLTOALL = ["table.exchange=alltoall", "table.ranks_per_node=1"]
REPLICATED = ["table.replicate_below_rows=60"]


def check_refused(outcome, *words):
    """The run failed, told each of `words` exactly once and no library's last words, and every rank was gone in 10 s."""
    assert outcome.code != 0, outcome.text
    assert "terminate called" not in outcome.text
    for word in words:
        assert outcome.text.count(word) == 1, f"{word!r} told {outcome.text.count(word)} times in:\n{outcome.text}"
    assert outcome.survivors == [] and outcome.seconds_left < 10


@pytest.mark.parametrize(
    "override, words",
    [
        ("no_such_key=1", ["Could not override 'no_such_key'", "conf/config.yaml lists"]),
        ("model=no_such_model", ["Could not find 'model/no_such_model'", "deepfm"]),
        ("optim.rows=lion", ["optim.rows must be one of sgd, adagrad, rowwise_adagrad, adam, got lion"]),
        ("table.partition=ring", ["table.partition must be one of round_robin, range, hash, got ring"]),
        ("table.exchange=mail", ["table.exchange must be one of auto, rma, alltoall, got mail"]),
        ("batchsize=4", ["did you mean batch_size?"]),
        ("model._target_=nowhere.Model", ["cannot import nowhere.Model"]),
        ("model._target_=torch.nn.Identity", ["torch.nn.Identity: set self.row_dim"]),
        ("data=criteo", ["settings: give data.path=..."]),
        ("batch_size=0", ["batch_size must be an integer of at least 1, got 0"]),
        ("batch_size=many", ["batch_size must be an integer of at least 1, got many"]),
    ],
)
def test_a_wrong_setting(override, words):
    check_refused(train(2, *SMALL[1:], override), *words)


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "HOROVOD_SIZE"])
def test_a_launcher_that_started_lonely_ranks(name):
    check_refused(train(0, *SMALL, **{name: "2"}), "./run.sh doctor shows it")


def test_a_lonely_rank_that_is_not_the_first_is_silent():
    outcome = train(0, *SMALL, SLURM_NTASKS="2", SLURM_PROCID="1")
    assert outcome.code != 0 and "hetmpi" not in outcome.text


def test_mpi_below_thread_multiple():
    program = "import mpi4py; mpi4py.rc.thread_level = 'serialized'; from mpi4py import MPI; "
    program += "import runpy; runpy.run_module('hetmpi.train', run_name='__main__')"
    outcome = run([mpiexec(), "-n", "2", sys.executable, "-c", program])
    check_refused(outcome, "hetmpi needs an MPI started with MPI_THREAD_MULTIPLE")


def test_the_launcher_of_another_mpi():
    other = shutil.which("mpiexec", path="/usr/bin:/usr/local/bin")
    if other is None or other == mpiexec():
        pytest.skip("there is one MPI on this machine")
    outcome = run([other, "-n", "2", sys.executable, "-m", "hetmpi.train", *SMALL])
    assert outcome.code != 0 and outcome.survivors == []
    assert "launcher" in outcome.text and "./run.sh doctor" in outcome.text, outcome.text


def test_a_small_dev_shm():
    """In a mount namespace whose /dev/shm has 64 MB, as containers do."""
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


def test_fields_that_are_not_those_of_the_table():
    replicated = ["data._target_=broken_data.FieldsThatDoNotFit", "table.replicate_below_rows=50", "~data.scale"]
    check_refused(train(2, *SMALL[1:], *replicated), "field_rows must sum to num_rows, 100", "got 90")


@pytest.mark.parametrize("how", [[], REPLICATED, ALLTOALL, [*ALLTOALL, "table.staleness=10"]])
def test_an_exception_on_one_rank(how):
    outcome = train(2, *SMALL, *how, "data._target_=broken_data.FailsOnRankOne")
    check_refused(outcome, "hetmpi: RuntimeError: the disk of rank one is gone (rank 1 of 2")


def test_the_last_ranks_fail_together_and_one_speaks():
    outcome = train(4, *SMALL, "data._target_=broken_data.FailsFromRankTwo")
    check_refused(outcome, "hetmpi: RuntimeError: no disk here (rank 2 of 4")


@pytest.mark.parametrize("how", [[], REPLICATED, ALLTOALL])
def test_a_rank_killed(how):
    outcome = train(2, *SMALL, *how, "data._target_=broken_data.DiesOnRankOne")
    assert outcome.code != 0 and outcome.survivors == []


def test_a_missing_data_file(tmp_path):
    outcome = train(2, "data=criteo", f"data.path={tmp_path}/nothing.tsv", f"data.cache={tmp_path}/cache")
    check_refused(outcome, f"{tmp_path}/nothing.tsv")


def test_an_empty_data_file(tmp_path):
    (tmp_path / "empty.tsv").touch()
    outcome = train(2, "data=criteo", f"data.path={tmp_path}/empty.tsv", f"data.cache={tmp_path}/cache")
    check_refused(outcome, f"{tmp_path}/empty.tsv")


def test_a_loss_that_is_not_finite():
    outcome = train(2, *SMALL, "optim.rows=sgd", "optim.rows_lr=1e30", "optim.dense=sgd", "optim.dense_lr=1e30")
    check_refused(outcome, "at step", "lower optim.rows_lr (now 1e+30)")


def test_a_run_folder_that_cannot_be_written():
    check_refused(train(2, *SMALL, "run.dir=/proc/hetmpi"), "cannot write /proc/hetmpi")


def test_every_command_that_run_sh_tells_of_does_something():
    """Each has a branch of its own after the set-up, or before it."""
    text = (ROOT / "run.sh").read_text()
    told = re.findall(r"^  ([a-z-]+) .*\S", text[text.index("usage:") : text.index("environment\n")], re.MULTILINE)
    branches = re.findall(r"^    ([a-z-]+)\) (?:exec|launch|run_|echo)", text, re.MULTILINE)
    assert len(told) == 9 and sorted(told) == sorted(branches)
