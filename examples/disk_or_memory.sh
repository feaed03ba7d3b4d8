#!/bin/bash
#SBATCH --job-name=disk-or-memory
#SBATCH --ntasks-per-node=1
#SBATCH --requeue --open-mode=append
#SBATCH --output=disk-or-memory-%j.out
#
# The two tables of disk_or_memory.py, from a directory that all nodes share, with the number of copies:
#
#     sbatch -N4 --gemini-replicas=2 disk_or_memory.sh --model my_models:build
#     sbatch -N1 --gemini-replicas=1 disk_or_memory.sh

# The training's Python: $PYTHON, the environment that was active at sbatch, or the one of the installation, which
# has no torch at most sites. The first that has all the modules is taken; none of them is imported to find out.
needs="torch gemini_hpc"
has='import sys; from importlib.util import find_spec; sys.exit(any(find_spec(m) is None for m in sys.argv[1:]))'
for python in ${PYTHON:+"$PYTHON"} python3 /opt/gemini-hpc/venv/bin/python; do
	"$python" -P -c "$has" $needs 2>/dev/null && break
	python=
done
if [ -z "$python" ]; then
	echo "disk_or_memory.sh: no Python here has $needs: activate such an environment before sbatch, or PYTHON=/path/to/python sbatch ..." >&2
	exit 2
fi

# Slurm runs a copy of this script, so look for the training beside the original.
script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p' | head -n 1)
here=$(dirname "${script:-$SLURM_SUBMIT_DIR/disk_or_memory.sh}")

exec gemini-hpc run -- srun --kill-on-bad-exit=1 "$python" -m gemini_hpc.launch "$here/disk_or_memory.py" "$@"
