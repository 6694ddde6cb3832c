"""The lines that messages advise, which call hetmpi in the way that this program was started. Without MPI."""

from __future__ import annotations

import os
import shlex


def command(name: str, ranks: int | None = None) -> str:
    """The line that calls a command of hetmpi, on so many ranks if given."""
    if "HETMPI_RUN_SH" in os.environ:
        return f"{'' if ranks is None else f'NP={ranks} '}{shlex.quote(os.environ['HETMPI_RUN_SH'])} {name}"
    launcher = f"srun -n {ranks} " if "SLURM_JOB_ID" in os.environ else f"mpirun -np {ranks} "
    return f"{'' if ranks is None else launcher}hetmpi {name}"
