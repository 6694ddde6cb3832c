-- Lmod: `module load hetmpi` for a checkout that ./run.sh setup has set up. Put it into a folder of MODULEPATH as hetmpi/VERSION.lua
-- (yours: mkdir -p ~/modules/hetmpi; module use ~/modules) and edit root. Lmod 8.6 loads it; not tried on a cluster.
help([[hetmpi: trains PyTorch models whose embedding table is partitioned over MPI ranks.
Start: sbatch -J NAME $HETMPI_ROOT/slurm/train.sbatch SETTINGS, or srun -K python -m hetmpi.train SETTINGS]])
whatis("Name: hetmpi")
whatis("Description: MPI + PyTorch trainer with partitioned embedding tables")

local root = pathJoin(os.getenv("HOME"), "hetmpi")
local venv = pathJoin(root, ".venv")

-- The MPI (and CUDA) that ./run.sh setup found, by the modules loaded then; none for an MPI from PyPI.
-- depends_on("openmpi/4.1.6")
-- depends_on("cuda/12.4")

conflict("python")  -- its PYTHONPATH or PATH could hide the venv's
setenv("HETMPI_ROOT", root)
setenv("HETMPI_VENV", venv)  -- train.sbatch's VENV
setenv("VIRTUAL_ENV", venv)
prepend_path("PATH", pathJoin(venv, "bin"))
setenv("SLURM_MPI_TYPE", "pmi2")  -- pmix with Open MPI
