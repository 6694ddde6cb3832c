"""A rank's place by the variables of its launcher, before MPI starts: Open MPI's, Hydra, PALS, mpirun_rsh (MVAPICH),
jsrun, Flux, and Slurm last, as a shell in its allocation has these variables too. Imports nothing heavy."""

from __future__ import annotations

import os
import re

RANKS = (
    *("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID", "MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK"),
    *("FLUX_TASK_RANK", "SLURM_PROCID", "RANK"),
)
LOCAL_RANKS = (
    *("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "MV2_COMM_WORLD_LOCAL_RANK"),
    *("MVP_COMM_WORLD_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_RANK", "FLUX_TASK_LOCAL_ID", "SLURM_LOCALID"),
)
LOCAL_SIZES = (
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    *("MV2_COMM_WORLD_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_SIZE"),
)
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE", "HOROVOD_SIZE")
JOB_SIZES = ("SLURM_NTASKS", "FLUX_JOB_SIZE")  # which a shell in the allocation has too


def is_first_rank() -> bool:
    """Whether this is the launcher's rank 0; true without a launcher."""
    return not first_number(*RANKS)


def local_rank() -> int | None:
    """This rank's index on its node; None if no variable tells it."""
    return first_number(*LOCAL_RANKS)


def local_size() -> int:
    """Number of ranks on this node, under Flux the largest on any; 1 if no variable tells it."""
    tasks, nodes = first_number("FLUX_JOB_SIZE"), first_number("FLUX_JOB_NNODES")
    of_flux = -(-tasks // nodes) if tasks and nodes else None
    return first_number(*LOCAL_SIZES) or of_flux or first_number("SLURM_TASKS_PER_NODE") or 1


def first_number(*names: str) -> int | None:
    """The number at the beginning of the first of these variables that has one, such as 4(x2); None if none has."""
    found = (re.match(r"\d+", os.environ.get(name, "")) for name in names)
    return next((int(match.group()) for match in found if match), None)
