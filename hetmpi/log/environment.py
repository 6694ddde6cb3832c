"""The environment of a run: versions, commit, hosts, command. Rank 0 writes it to environment.json."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy
import torch

import hetmpi
from hetmpi.world.cores import usable_cores
from hetmpi.world.mpi import MPI, network

ROOT = Path(hetmpi.__file__).resolve().parents[1]
GIT_LIMIT_S = 1.0


def environment(hosts: list[str], device: torch.device) -> dict:
    """The contents of environment.json. hosts: host name of each rank."""
    library = MPI.Get_library_version().replace("\x00", "").splitlines()[0]
    is_gpu = device.type == "cuda"
    return {
        "hetmpi": hetmpi.__version__,
        **commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "mpi": re.sub(r"\s+", " ", library).strip(),
        "network": network(library),
        "horovod": version_of("horovod"),
        "ranks_by_host": dict(Counter(hosts)),
        "cores": usable_cores(),  # of rank 0
        "cores_of_host": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if is_gpu else f"CPU {platform.machine()}",
        "command": shlex.join(sys.orig_argv),
        "folder": os.getcwd(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def commit() -> dict:
    """The commit of the checkout that contains the package, and whether tracked files are modified. Both are None
    outside a checkout or if git fails."""
    unknown = {"commit": None, "is_modified": None}
    if not (ROOT / ".git").exists():
        return unknown
    command = ["git", "--no-optional-locks", "-C", str(ROOT), "status", "--porcelain=v2", "--branch", "-uno"]
    try:
        status = subprocess.run(command, capture_output=True, text=True, timeout=GIT_LIMIT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # git is missing, rejects another user's checkout, or is too slow
        return unknown
    found = re.search(r"(?m)^# branch\.oid ([0-9a-f]{40,})$", status)
    is_modified = any(not line.startswith("#") for line in status.splitlines())
    return {"commit": found[1], "is_modified": is_modified} if found else unknown


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
