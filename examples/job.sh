#!/bin/bash
#SBATCH --job-name=train-gpt
#SBATCH -N3 --ntasks-per-node=1
# What a protected job needs: requeue after a node failure, and one output file for all of its lives.
#SBATCH --requeue --open-mode=append
#SBATCH --output=train-gpt-%j.out
#
# Submit with the number of copies (the node's own one included):
#
#     sbatch --gemini-replicas=2 job.sh [options of train_gpt.py]
#
# When a rank fails, the launchers (`python -m gemini_hpc.launch`) start all ranks again in the same step. When a
# launcher itself is lost, --kill-on-bad-exit ends the step, and `gemini-hpc run` starts it again in the same allocation.
# The ranks find RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in their environment; without the option
# train_gpt.py's first call sets them (gemini_hpc.set_ranks), and the same script runs unprotected.

# The training's Python: $PYTHON, the environment that was active at sbatch, or the one of the installation, which
# has no torch at most sites. The first that has all the modules is taken; none of them is imported to find out.
needs="torch gemini_hpc"
has='import sys; from importlib.util import find_spec; sys.exit(any(find_spec(m) is None for m in sys.argv[1:]))'
for python in ${PYTHON:+"$PYTHON"} python3 /opt/gemini-hpc/venv/bin/python; do
	"$python" -P -c "$has" $needs 2>/dev/null && break
	python=
done
if [ -z "$python" ]; then
	echo "job.sh: no Python here has $needs: activate such an environment before sbatch, or PYTHON=/path/to/python sbatch ..." >&2
	exit 2
fi

# Slurm runs a copy of this script, so look for the training beside the original.
script=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p' | head -n 1)
here=$(dirname "${script:-$SLURM_SUBMIT_DIR/job.sh}")

exec gemini-hpc run -- srun --kill-on-bad-exit=1 "$python" -m gemini_hpc.launch \
	"$here/train_gpt.py" --log "train-gpt-$SLURM_JOB_ID.jsonl" "$@"
