"""`sbatch --no-kill`: Slurm lets the job run on without its lost node, and the controller requeues it; or the job
itself."""

from __future__ import annotations

from typing import Any

import pytest
from waiting import until

from gemini_hpc.devcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

Lite = Any
RUN = "gemini-hpc run -- srun --kill-on-bad-exit=1"
# The script goes on when its step has ended, or when it is told to, and ends with 0.
ENDS_WHEN_TOLD = (
    'ends() { srun "$@" & while kill -0 $! 2>&-; do [ -e ~/end-$SLURM_JOB_ID ] && exit 0; sleep 0.02; done; }; ends'
)
REQUEUED_WITHIN_S = (
    45.0  # a batch host's survivors look for it for 8 s; without us the job ends, or hangs, after 60 s
)


@pytest.mark.parametrize(("lost", "by"), [(0, "us"), (1, "slurm")], ids=["batch-host", "other"])
def test_a_lost_node_is_replaced_and_nothing_is_lost(lite: Lite, lost: int, by: str) -> None:
    job = lite(run=RUN, options=("--no-kill",))
    job.reach(10)
    victim = job.hosts()[lost]
    job.cluster.cut_power(victim)
    if by == "slurm":  # before the agents' reports can lead to anything
        job.cluster.run(["scontrol", "update", f"nodename={victim}", "state=down", "reason=test"])
    until(lambda: job.slurm().get("Restarts") == "1", REQUEUED_WITHIN_S, what=f"requeued\n{job.story()}")
    job.finish(120)
    assert victim not in job.hosts() and job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
    sent = [e for e in job.events() if e["name"] == "sent_back"]
    assert len(sent) == 1 and "--no-kill" in sent[0]["detail"], sent


@pytest.mark.parametrize("first", ["slurm", "script"])
def test_a_script_that_goes_on_to_its_end_does_not_end_the_job(lite: Lite, first: str) -> None:
    """Plain srun, and a script that ends with 0: of the step's end, or by itself, before an agent has noticed."""
    job = lite(run=ENDS_WHEN_TOLD, options=("--no-kill",))
    job.reach(10)
    victim, told = job.hosts()[-1], job.cluster.locate_home("alice") / f"end-{job.id}"
    job.cluster.cut_power(victim)
    if first == "script":
        told.touch()
    else:
        job.cluster.run(["scontrol", "update", f"nodename={victim}", "state=down", "reason=test"])
    until(lambda: job.slurm().get("Restarts") == "1", REQUEUED_WITHIN_S, what=f"requeued\n{job.story()}")
    told.unlink(missing_ok=True)
    job.finish(120)
    assert victim not in job.hosts() and job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
    sent = [e for e in job.events() if e["name"] == "sent_back"]
    assert len(sent) == 1 and "COMPLETED" in sent[0]["detail"] and job.slurm()["Restarts"] == "1", sent


def test_without_a_controller_the_job_sends_itself_back(lite: Lite, cluster: Cluster) -> None:
    cluster.stop_controller()
    try:
        job = lite(run=RUN, options=("--no-kill",))
        job.reach(10)
        victim = job.hosts()[1]
        cluster.cut_power(victim)
        cluster.run(["scontrol", "update", f"nodename={victim}", "state=down", "reason=test"])
        until(lambda: job.slurm().get("Restarts") == "1", REQUEUED_WITHIN_S, what=f"requeued\n{job.story()}")
        job.finish(120)
    finally:
        cluster.start_controller()
    assert victim not in job.hosts() and job.resumed(1) > 0 and job.repeated(1) in (0, 1), job.story()
    assert "run on without its lost node (--no-kill): requeuing it" in job.story()
