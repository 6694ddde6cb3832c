"""The command hetmpi: `hetmpi train ...` is `python -m hetmpi.train ...`, and so for the others."""

from __future__ import annotations

import os
import runpy
import sys

COMMANDS = {
    "train": "train a model; mpirun -np 4 hetmpi train on four ranks",
    "predict": "probabilities of samples, by a checkpoint",
    "export": "take rows and dense layers out of a checkpoint",
    "report": "one HTML page of runs side by side",
    "doctor": "examine MPI, memory and Horovod here, and say what to change",
}


def main():
    """Runs the module that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("usage: hetmpi COMMAND [ARGUMENTS]\n")
        print("\n".join(f"  {command:<9}{about}" for command, about in COMMANDS.items()))
        print("\nhetmpi COMMAND --help says more.")
    elif name not in COMMANDS:
        sys.exit(f"hetmpi: there is no command {name}: it is one of {', '.join(COMMANDS)}")
    else:
        sys.argv[:2] = [f"hetmpi {name}"]
        sys.path.insert(0, os.getcwd())  # as python -m: a model of one's own lies there
        runpy.run_module(f"hetmpi.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
