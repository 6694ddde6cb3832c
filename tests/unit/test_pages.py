"""./run.sh docs check: commands, links and lengths of README.md, CONTRIBUTING.md and docs/."""

import docs_check
import pytest


@pytest.mark.parametrize("check", docs_check.CHECKS)
def test_pages_have_no(check):
    assert check() == []


@pytest.mark.parametrize(
    "command, check, wrong",
    [
        ("mpirun -np 4 hetmpi train modle=dcn", "settings", "modle"),
        ("NP=4 ./run.sh train -m table.dim=8,16 optim.rows=adamm", "settings", "optim.rows must be one of"),
        ("srun -K python -X faulthandler -m hetmpi.train steps=-1", "settings", "steps must be"),
        ("hetmpi predict STEP oot=p.parquet", "options", "no oot="),
        ("mpirun -np 2 hetmpi export STEP out rows=csv", "options", "no rows=csv"),
        ("./run.sh prepare", "help", "does not list prepare"),
        ("mpirun -np 2 python examples/own_lop.py", "file", "there is no examples/own_lop.py"),
        ("timeout -s USR1 710m mpiexec -n 8 hetmpi train table.dmi=8", "settings", "table.dim"),
        ("sbach job.sh", "none", "sbach is not in UNCHECKED"),
        ("sbatch -N2 job.sh", "none: needs a cluster", ""),
    ],
)
def test_a_page_may_not_show(command, check, wrong):
    how, found = docs_check.checked(command)
    assert how == check and (wrong in found if wrong else not found)


def test_commands_of_a_block():
    block = docs_check.Block("bash", 'run="a=1 b"\nhetmpi train x="[1, # ]" \\\n  $run  # why\nls; cd y && pwd\n', 7)
    assert list(docs_check.commands_of(block)) == [
        (7, 'run="a=1 b"'), (8, 'hetmpi train x="[1, # ]" a=1 b'), (10, "ls"), (10, "cd y"), (10, "pwd"),
    ]  # fmt: skip
