"""The command hetmpi: `hetmpi train ...` is `python -m hetmpi.train ...`, and so for the others."""

from __future__ import annotations

import os
import runpy
import signal
import sys

import hetmpi
from hetmpi.world.early_signals import exit_on_signals, leave_interrupts_to_python

COMMANDS = {
    "train": "train a model; mpirun -np 4 hetmpi train on four ranks",
    "predict": "predict probabilities of samples from a checkpoint",
    "export": "extract rows and dense layers from a checkpoint",
    "inspect": "what data=tabular would make of files, as a yaml to start from",
    "report": "one HTML page that compares runs",
    "doctor": "examine MPI, memory and Horovod on this machine, and suggest changes",
}
LAUNCHED = ("train", "predict", "doctor")  # by hetmpi.launch
# What pip calls the packages that the commands import; hetmpi/world/mpi.py looks after mpi4py and Horovod.
PACKAGES = {name: name for name in ("numpy", "omegaconf", "plotly", "pyarrow", "rich", "torch", "xxhash")}
PACKAGES["hydra"] = "hydra-core"


def main():
    """Runs the module that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("usage: hetmpi COMMAND [ARGUMENTS]\n")
        print("\n".join(f"  {command:<9}{about}" for command, about in COMMANDS.items()))
        print("\nhetmpi COMMAND --help shows more, hetmpi --version the version.")
    elif name == "--version":
        print(f"hetmpi {hetmpi.__version__}")
    elif name not in COMMANDS:
        sys.exit(f"hetmpi: there is no command {name}: it is one of {', '.join(COMMANDS)}")
    else:
        exit_on_signals()
        if name not in LAUNCHED:  # these remove the part of a file that they write
            leave_interrupts_to_python()
        sys.argv[:2] = [f"hetmpi {name}"]
        if os.getcwd() not in sys.path:
            sys.path.append(
                os.getcwd()
            )  # user-defined models are imported from there; last, as it may have a random.py
        try:
            runpy.run_module(f"hetmpi.{name}", run_name="__main__", alter_sys=True)
        except KeyboardInterrupt:
            print("hetmpi: interrupted", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
        except ModuleNotFoundError as error:
            if error.name not in PACKAGES:
                raise
            sys.exit(
                f"hetmpi: {sys.executable} has no {error.name}: activate the environment of ./run.sh setup "
                f"(. .venv/bin/activate), or pip install {PACKAGES[error.name]}"
            )


if __name__ == "__main__":
    main()
