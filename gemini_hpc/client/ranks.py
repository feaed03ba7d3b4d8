"""RANK and its companions, derived from Slurm's description of the step if nothing else has set them.

The plugin exports them in protected jobs (`slurm/ranks.c`), and torchrun to its own ranks. `set_ranks` serves all
other starts, so one script works with all of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from gemini_hpc.client.joining import ATTEMPT_ENV
from gemini_hpc.core import hostlist
from gemini_hpc.core.numbers import parse_number
from gemini_hpc.wire import ports

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RANKS_OF_ENV = "GEMINI_RANKS_OF"  # "job.restart.step" that they were set for, because a nested srun inherits them
# Set in ranks of mpirun, where Slurm's variables describe the daemon that started the rank.
MPIRUN_ENV = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")
_OTHERS_ENV = ("PMI_SIZE", "PMIX_RANK")  # outside of Slurm: some launcher has started several processes
_MOST_STEPS = 0xFFFFFFF0  # Slurm's step numbers for batch scripts and interactive shells are higher
# With port 0 the kernel chooses a port; no other process has to know it.
_ALONE = dict(zip(NAMES, ("0", "1", "0", "1", "127.0.0.1", "0"), strict=True))


def set_ranks() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT where they are unset.

    Call it before `torch.distributed.init_process_group`, or before any other reader of these variables. In a Slurm
    step the ranks are SLURM_PROCID, and the step's first host is the master. A process started alone becomes a world
    of one.

    Nothing changes if the plugin or a launcher has set the variables, or if RANK or WORLD_SIZE have other values.
    Nothing changes under mpirun either, because Slurm does not know its ranks.
    """
    environ, step = os.environ, _find_step(os.environ)
    if environ.get(RANKS_OF_ENV, step) != step:
        for name in (RANKS_OF_ENV, *NAMES):
            environ.pop(name, None)
    found = derive_ranks(environ)
    others = any(environ.get(name, found.get(name)) != found.get(name) for name in ("RANK", "WORLD_SIZE"))
    if others or any(name in environ for name in MPIRUN_ENV):
        return
    if step and "RANK" in found.keys() - environ.keys():
        environ[RANKS_OF_ENV] = step
    for name, value in found.items():
        environ.setdefault(name, value)


def derive_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `set_ranks` sets in this environment.

    The result is empty if Slurm's variables contradict each other, and in heterogeneous jobs. The master is missing
    in a step with an arbitrary distribution, where task 0 may be on any host.
    """
    if not _find_step(environ):
        return {} if any(name in environ for name in _OTHERS_ENV) else _ALONE
    rank, world = (parse_number(environ.get(name, ""), -1) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    node, local_rank = (parse_number(environ.get(name, ""), -1) for name in ("SLURM_NODEID", "SLURM_LOCALID"))
    local_world = hostlist.find_count(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), node)
    if not (0 <= rank < world and 0 <= local_rank < local_world <= world) or "SLURM_HET_SIZE" in environ:
        return {}
    if world == 1:
        return _ALONE
    base = ports.compute_master_port(
        parse_number(environ.get("SLURM_JOB_ID", "")), parse_number(environ.get("SLURM_RESTART_COUNT", ""))
    )
    port = ports.compute_attempt_port(
        ports.compute_step_port(base, parse_number(environ.get("SLURM_STEP_ID", ""))),
        parse_number(environ.get(ATTEMPT_ENV, "")),
    )
    found = (str(value) for value in (rank, world, local_rank, local_world, _find_first_host(environ), port))
    return {name: value for name, value in zip(NAMES, found, strict=True) if value}


def _find_step(environ: Mapping[str, str]) -> str:
    """Return "job.restart.step" of the srun that started this process, or "" if none did."""
    step = parse_number(environ.get("SLURM_STEP_ID", ""), -1)
    if not 0 <= step <= _MOST_STEPS or "SLURM_STEP_NUM_TASKS" not in environ:
        return ""
    return f"{environ.get('SLURM_JOB_ID', '')}.{parse_number(environ.get('SLURM_RESTART_COUNT', ''))}.{step}"


def _find_first_host(environ: Mapping[str, str]) -> str:
    if environ.get("SLURM_DISTRIBUTION") == "arbitrary":
        return ""
    try:
        return next(iter(hostlist.expand(environ.get("SLURM_STEP_NODELIST", ""))), "")
    except ValueError:
        return ""
