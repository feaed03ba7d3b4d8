#!/bin/bash
#SBATCH --job-name=heat-mpi
#SBATCH -N3 --ntasks-per-node=1
# What a protected job needs: requeue after a node failure, and one output file for all of its lives.
#SBATCH --requeue --open-mode=append
#SBATCH --output=heat-mpi-%j.out
#
#     sbatch --gemini-replicas=2 heat_mpi.sh [options of heat_mpi.py]
#
# LAUNCH: how the ranks are started; `srun --kill-on-bad-exit --mpi=pmix` for Open MPI, or its own `mpirun -n 3
# --map-by ppr:1:node`. With the option a rank that dies ends the others, which would wait for it in MPI for ever;
# `gemini-hpc run` then starts them again in the same allocation.

# The training's Python: $PYTHON, the environment that was active at sbatch, or the one of the installation, which
# has no mpi4py at most sites. The first that has all the modules is taken; none of them is imported to find out.
needs="numpy mpi4py gemini_hpc"
has='import sys; from importlib.util import find_spec; sys.exit(any(find_spec(m) is None for m in sys.argv[1:]))'
for python in ${PYTHON:+"$PYTHON"} python3 /opt/gemini-hpc/venv/bin/python; do
	"$python" -P -c "$has" $needs 2>/dev/null && break
	python=
done
if [ -z "$python" ]; then
	echo "heat_mpi.sh: no Python here has $needs: activate such an environment before sbatch, or PYTHON=/path/to/python sbatch ..." >&2
	exit 2
fi

script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p' | head -n 1)
here=$(dirname "${script:-$SLURM_SUBMIT_DIR/heat_mpi.sh}")

exec gemini-hpc run -- ${LAUNCH:-srun --kill-on-bad-exit --mpi=pmi2} "$python" "$here/heat_mpi.py" --log "heat-mpi-$SLURM_JOB_ID.jsonl" "$@"
