"""A sweep: Hydra's multirun, each point of which is a training on several ranks, and with submitit a job of Slurm.

    python slurm/sweep.py --multirun table.staleness=0,10,100 model=wdl,deepfm steps=20000 \\
        hydra/launcher=submitit_slurm hydra.launcher.nodes=2 hydra.launcher.tasks_per_node=4
        hydra.launcher.timeout_min=720

needs `pip install hydra-submitit-launcher` in hetmpi's venv; every rank is a task that submitit starts by srun. Without
hydra/launcher=… the ranks of mpiexec train one point after the other:

    mpiexec -n 2 python slurm/sweep.py --multirun table.staleness=0,10,100 steps=20000 hydra.sweep.dir=runs/sweep1

A point's run folder is hydra.sweep.dir/NUMBER (default multirun/DATE/TIME/NUMBER). The same line with the same
hydra.sweep.dir goes on with what was not finished, if checkpoint.every_steps is given. A point that is told to leave
saves and is requeued.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from hetmpi import train
from hetmpi.comm.launch import LEFT_EARLY, launch
from hetmpi.comm.mpi import srun_mpi


def main():
    """Runs the sweep, then prints a row per point."""
    folder = given("hydra.sweep.dir")
    if folder is None:
        folder = time.strftime("multirun/%Y-%m-%d/%H-%M-%S")
        sys.argv.append(f"hydra.sweep.dir={folder}")
    if (given("hydra/launcher") or "").startswith("submitit"):
        if importlib.util.find_spec("submitit") is None:
            sys.exit("sweep.py: hydra/launcher=submitit_slurm needs a package: pip install hydra-submitit-launcher")
        tell_srun()
    try:
        train_point()
    finally:
        if int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))) == 0:
            print_rows(Path(folder))


def given(key: str) -> str | None:
    """The value that the command line gives to a key."""
    return next((text.split("=", 1)[1] for text in sys.argv[1:] if text.startswith(f"{key}=")), None)


def tell_srun():
    """srun's options, by its variables, which sbatch takes along: submitit's own call of srun has none of them."""
    os.environ.setdefault("SLURM_MPI_TYPE", srun_mpi())
    os.environ.setdefault("SLURM_KILL_BAD_EXIT", "1")
    os.environ.setdefault("SRUN_CPUS_PER_TASK", given("hydra.launcher.cpus_per_task") or "1")


@hydra.main(version_base="1.3", config_path=str(train.CONF), config_name="config")
def train_point(config: DictConfig):
    """Trains one point on the ranks that run this."""
    point = HydraConfig.get()
    overrides = [*point.overrides.task, f"run.dir={point.runtime.output_dir}", "resume=auto"]
    GlobalHydra.instance().clear()  # hetmpi.train composes its settings anew
    try:
        launch(partial(train.main, overrides=overrides))
    except SystemExit as leaving:
        if leaving.code == LEFT_EARLY and os.environ.get("SLURM_PROCID") == "0":
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
        raise


def print_rows(folder: Path):
    """Samples/s and AUC of each point that has ended, beside its settings."""
    for path in sorted(folder.glob("*/summary.json"), key=lambda path: (len(path.parent.name), path)):
        figures = json.loads(path.read_text())
        overrides = OmegaConf.load(path.parent / ".hydra/overrides.yaml")
        print(
            f"{path.parent} | {figures['samples_per_s'] or 0:,.0f} samples/s | auc {figures['auc'] or math.nan:.4f} | "
            f"{' '.join(overrides)}"
        )


if __name__ == "__main__":
    main()
