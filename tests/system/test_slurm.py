"""slurm/ with a Slurm started on this machine (tools/slurm_trial.sh); skipped if it is not installed or cannot be
started."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from launch import ROOT, environment, run

pytestmark = pytest.mark.long


def try_parts(*parts):
    """Runs these parts of the trial, whose claims must all hold."""
    programs = ("slurmctld", "slurmd", "munged", "srun")
    missing = [name for name in programs if not shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")]
    if missing or os.getuid() != 0:
        pytest.skip(f"needs root and Slurm: apt-get install slurm-wlm munge; missing: {', '.join(missing) or 'root'}")
    path = os.pathsep.join([str(Path(sys.executable).parent), environment()["PATH"]])
    outcome = run([str(ROOT / "tools/slurm_trial.sh"), *parts], timeout_s=600, PATH=path)
    if outcome.code == 77:
        pytest.skip(outcome.text.strip())
    assert outcome.code == 0 and outcome.survivors == [], outcome.text


@pytest.mark.rare
def test_the_recipe_of_the_documentation_and_the_measurement_of_scale():
    try_parts("recipe", "scale")


@pytest.mark.rare
def test_a_job_that_is_signalled_or_preempted_comes_back_and_learns_the_same():
    try_parts("signal", "preempt")
