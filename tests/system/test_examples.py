"""examples/: the same training with torch.nn.EmbeddingBag and with hetmpi's, with Horovod and with
DistributedDataParallel; typical scripts; and models of retrieval that find what is planted in generated logs."""

import difflib
import re
import sys

import pytest
from launch import ROOT, mpiexec, run, summary, train

pytestmark = pytest.mark.long

EXAMPLES = ROOT / "examples"
# For few cores and scripts without hetmpi: MPI yields while it waits.
YIELDING = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
SAME_ROWS = """
import runpy, sys, torch, hetmpi

class Same(hetmpi.EmbeddingBag):
    def __init__(self, num_rows, dim, **settings):
        super().__init__(num_rows, dim, **settings)
        self.fill(torch.nn.EmbeddingBag(num_rows, dim, padding_idx=settings["padding_idx"]).weight)

hetmpi.EmbeddingBag = Same
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def losses(ranks, *command):
    """Losses that a script prints, by epoch and step."""
    outcome = run([mpiexec(), "-n", str(ranks), sys.executable, *map(str, command)], timeout_s=300, **YIELDING)
    assert outcome.code == 0, outcome.text
    found = {
        where: float(loss) for where, loss in re.findall(r"(epoch \d+ (?:step \d+|held-out)) loss (\S+)", outcome.text)
    }
    assert found, outcome.text
    return found


@pytest.fixture(scope="module")
def after(tmp_path_factory):
    """Losses of two epochs with torch's initial rows."""
    return losses(
        2,
        "-c",
        SAME_ROWS,
        EXAMPLES / "bag_after.py",
        "--epochs",
        2,
        "--visits",
        3000,
        "--save",
        tmp_path_factory.mktemp("after"),
    )


@pytest.mark.long
def test_the_script_with_another_bag_prints_the_same_losses(after, tmp_path):
    before = losses(2, EXAMPLES / "bag_before.py", "--epochs", 2, "--visits", 3000, "--save", tmp_path / "clicks.pt")
    assert before == pytest.approx(after, abs=1e-4)
    assert before["epoch 1 held-out"] < before["epoch 0 step 0"] - 0.01


@pytest.mark.long
def test_the_script_goes_on_where_it_was_stopped(after, tmp_path):
    command = ["-c", SAME_ROWS, EXAMPLES / "bag_after.py", "--visits", 3000, "--save", tmp_path / "clicks", "--epochs"]
    assert losses(2, *command, 1) | losses(2, *command, 2) == after


def test_the_page_shows_the_change_as_it_is():
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("bag_before.py", "bag_after.py"))
    change = difflib.unified_diff(before, after, "examples/bag_before.py", "examples/bag_after.py", lineterm="", n=1)
    page = (ROOT / "docs/embedding_bag.md").read_text()
    assert "```diff\n" + "\n".join(change) + "\n```" in page


SCRIPT = """
import sys
import horovod.torch as hvd
import torch
{first}
import hetmpi
bag = hetmpi.EmbeddingBag(1000, 4, mode="sum")
{then}
for step in range(3):
    bag(torch.arange(8).view(2, 4) + step).sum().backward()
    bag.step()
"""


@pytest.mark.parametrize("first, then", [("hvd.init()", ""), ("", "hvd.init()"), ("", "")])
def test_horovod_may_be_started_before_a_bag_or_after_it(first, then):
    end = """
rows = bag.table.peek(torch.arange(1000)).sum().item()
print(f"rows {rows:.4f} of {bag.table.world.size}")
"""
    outcome = run([mpiexec(), "-n", "2", sys.executable, "-c", SCRIPT.format(first=first, then=then) + end])
    assert outcome.code == 0 and outcome.survivors == [], outcome.text
    found = re.findall(r"rows (\S+) of 2", outcome.text)
    assert len(found) == 2 and found[0] == found[1], outcome.text


def test_one_rank_may_look_at_rows_when_the_others_are_at_their_end():
    """Ranks of other nodes get rows by MPI, which Horovod started and would end."""
    program = SCRIPT.format(
        first="hvd.init(); from hetmpi.world.launch import default_world; from hetmpi.world.world import World", then=""
    ).replace('mode="sum"', 'mode="sum", world=World(default_world().comm, ranks_per_node=1)')
    end = """
import time
if hvd.rank() == 0:
    time.sleep(1)
    print("rows", bag.table.peek(torch.arange(1000)).shape)
"""
    outcome = run([mpiexec(), "-n", "2", sys.executable, "-c", program + end])
    assert outcome.code == 0 and "rows torch.Size([1000, 4])" in outcome.text, outcome.text


@pytest.mark.parametrize(
    "wrong, said",
    [("bag(torch.tensor([[1000]]))", "keys must lie in [0, 1,000), got 1000"), ("1 / 0", "division by zero")],
)
def test_an_error_of_one_rank_ends_all(wrong, said):
    end = f"""
if hvd.rank() == 1:
    {wrong}
bag.step()
"""
    outcome = run([mpiexec(), "-n", "2", sys.executable, "-c", SCRIPT.format(first="hvd.init()", then="") + end])
    assert outcome.code != 0 and outcome.survivors == [] and outcome.seconds_left < 10
    assert outcome.text.count("Traceback") == 1 and f"{said}" in outcome.text and "(rank 1 of 2 on " in outcome.text, (
        outcome.text
    )


UNCLOSED = """
import sys, torch
from hetmpi import EmbeddingTable, RowOptimizer, Staleness, World
from hetmpi.table.group import TableGroup

world, exchange, staleness = World().split(1), sys.argv[1], Staleness(int(sys.argv[2]))
group = TableGroup({
    name: EmbeddingTable(world, 100, 4, RowOptimizer(), name=name, exchange=exchange, staleness=staleness)
    for name in ("a", "b")
})
keys = {name: torch.arange(50) for name in group}
group.write(keys, group.read(keys))
"""


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("exchange", ["messages", "windows"])
def test_a_program_that_leaves_its_table_open_ends_well(exchange, staleness):
    command = [mpiexec(), "-n", "2", sys.executable, "-c", UNCLOSED, exchange, str(staleness)]
    outcome = run(command, **YIELDING)
    assert outcome.code == 0, outcome.text


SLEEPING = """
import time, torch
from hetmpi import CacheSettings, EmbeddingTable, MpiReductions, RowOptimizer, Staleness, World

world = World()
sums, nodes = MpiReductions(world), world.split(1)
table = EmbeddingTable(
    nodes, 1000, 4, RowOptimizer(), exchange="windows", staleness=Staleness(2), cache=CacheSettings(capacity_rows=100)
)
keys = torch.arange(1000)
table.read(keys)
time.sleep(0.3)  # until the thread has seen the window
world.meet("to begin")
began = time.monotonic()
if world.rank == 0:
    time.sleep(4)
else:
    table.read(keys + 0)
    print(f"read within {time.monotonic() - began:.1f} s")
world.meet("to end")
table.close()
"""


def test_the_thread_of_mpi_sums_lets_others_read_while_this_rank_computes():
    outcome = run([mpiexec(), "-n", "2", sys.executable, "-c", SLEEPING], **YIELDING)
    assert outcome.code == 0, outcome.text
    assert float(re.search(r"read within (\S+) s", outcome.text)[1]) < 2, outcome.text


ON_NODES = """
import functools, runpy, sys, hetmpi

launch, settings = hetmpi.launch, {"exchange": sys.argv[2], "staleness": hetmpi.Staleness(int(sys.argv[3]))}
hetmpi.launch = lambda main: launch(lambda world: main(world.split(1)))
hetmpi.EmbeddingTable = functools.partial(hetmpi.EmbeddingTable, **settings)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def last_loss(*command):
    """The loss that a loop of one's own prints after its steps on two ranks."""
    outcome = run([mpiexec(), "-n", "2", sys.executable, *map(str, command)], **YIELDING)
    assert outcome.code == 0 and outcome.survivors == [], outcome.text
    return float(re.search(r"loss (\S+) after 200 steps on 2 rank", outcome.text)[1])


def test_a_loop_with_distributed_data_parallel_learns_as_with_horovod():
    assert last_loss(EXAMPLES / "own_loop_ddp.py") == pytest.approx(last_loss(EXAMPLES / "own_loop.py"), abs=1e-3)


@pytest.mark.parametrize("exchange, staleness", [("messages", 0), ("messages", 4), ("windows", 0), ("windows", 4)])
def test_a_loop_with_distributed_data_parallel_runs_on_several_nodes(exchange, staleness):
    assert last_loss("-c", ON_NODES, EXAMPLES / "own_loop_ddp.py", exchange, staleness) < 0.02


OF_ITEMS = ["data=tabular", "data.label_kind=none", "task=retrieval", "optim.rows=adam", "optim.rows_lr=0.003"]
TWO_TOWER = ["model.item=[item,kind]", "epochs=2", "batch_size=256", "table.dim=32"]
SASREC = [
    "model=sasrec", "model.item=[item]", "model.history=[viewed]", "model.dropout=0.1", "epochs=8", "batch_size=128",
    "data.columns=[{name: viewed, share: item, pool: none}]", "table.dim=64", "task.negatives=128",
    "optim.dense_lr=0.002",
]  # fmt: skip


@pytest.mark.parametrize(
    "script, settings",
    [("make_pairs.py", TWO_TOWER), pytest.param("make_sequences.py", SASREC, marks=pytest.mark.rare)],
)
def test_retrieval_reaches_nine_tenths_of_the_best_recall(script, settings, tmp_path):
    outcome = run([sys.executable, str(EXAMPLES / script), str(tmp_path / "log.parquet")])
    best = float(re.search(r"@10 is (\S+)", outcome.text)[1])
    places = [f"data.path={tmp_path}/log.parquet", f"data.cache={tmp_path}/prepared", f"run.dir={tmp_path}/run"]
    outcome = train(2, *OF_ITEMS, *settings, *places, "log.every_steps=100", timeout_s=400)
    assert outcome.code == 0, outcome.text
    assert 0.9 * best < summary(tmp_path / "run")["recall_at_10"] < best + 0.02
