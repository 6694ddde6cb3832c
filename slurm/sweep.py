"""A sweep whose points are jobs of Slurm: Hydra's multirun with submitit, each point a training on several ranks.

    python slurm/sweep.py --multirun table.staleness=0,10,100 model=wdl,deepfm steps=20000 \\
        hydra/launcher=submitit_slurm hydra.launcher.nodes=2 hydra.launcher.tasks_per_node=4
        hydra.launcher.timeout_min=720

needs `pip install hydra-submitit-launcher` in hetmpi's venv; every rank is a task that submitit starts by srun. In an
allocation, or without Slurm, `hetmpi train -m` trains the points one after the other.

A point's run folder is hydra.sweep.dir/NUMBER (default multirun/DATE/TIME/NUMBER). The same line with the same
hydra.sweep.dir goes on with what was not finished. A point that a signal ends saves and is requeued.
"""

import importlib.util
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from hetmpi import train
from hetmpi.log.headline import comparison
from hetmpi.run.config import CONF, PRIMARY
from hetmpi.run.sweep import quoted
from hetmpi.world.launch import LEFT_EARLY, launch
from hetmpi.world.mpi import srun_mpi


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
    if Path("conf").is_dir() and not any(text.startswith(("--config-dir", "-cd")) for text in sys.argv):
        sys.argv += ["--config-dir", "conf"]  # as hetmpi train does
    try:
        train_point()
    finally:
        if any(Path(folder).glob("*/config.yaml")):
            print(comparison([Path(folder)]))


def given(key: str) -> str | None:
    """The value that the command line gives to a key."""
    return next((text.split("=", 1)[1] for text in sys.argv[1:] if text.startswith(f"{key}=")), None)


def tell_srun():
    """srun's options, by its variables, which sbatch takes along: submitit's own call of srun has none of them."""
    os.environ.setdefault("SLURM_MPI_TYPE", srun_mpi())
    os.environ.setdefault("SLURM_KILL_BAD_EXIT", "1")
    os.environ.setdefault("SRUN_CPUS_PER_TASK", given("hydra.launcher.cpus_per_task") or "1")


@hydra.main(version_base="1.3", config_path=str(CONF), config_name=PRIMARY)
def train_point(config: DictConfig):
    """Trains one point on the ranks that run this."""
    point = HydraConfig.get()
    overrides = [*point.overrides.task, f"run.dir={quoted(point.runtime.output_dir)}", "resume=auto"]
    GlobalHydra.instance().clear()  # hetmpi.train composes its settings anew
    sys.path.insert(0, os.getcwd())  # where a model of one's own lies
    try:
        launch(partial(train.main, arguments=overrides))
    except SystemExit as leaving:
        if leaving.code == LEFT_EARLY and os.environ.get("SLURM_PROCID") == "0":
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
        raise


if __name__ == "__main__":
    main()
