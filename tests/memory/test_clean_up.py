"""A site's epilog that ends all processes of a job's owner, and spares the agents as docs/admin.md has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from waiting import until

from gemini_hpc.devcluster import cgroups

from .conftest import Site

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not cgroups.are_possible(), reason="no writable memory cgroup (v1) on this machine"),
]
PAGE = Path(__file__).parents[2] / "docs" / "admin.md"
LEFT = "^sleep 977"


@pytest.mark.parametrize("spares_agents", [True, False])
def test_a_requeued_job_finds_what_the_clean_up_spares(site: Site, spares_agents: bool) -> None:
    (loop,) = re.findall(r"```bash\n(for pid in .*?)```", PAGE.read_text(), re.DOTALL)
    # A node's top of the hierarchy lies deeper here than on a host.
    clean_up = loop.replace("memory):/", "memory):/.*/") if spares_agents else 'pkill -KILL -U "$SLURM_JOB_UID"\n'
    epilog = site.cluster.directory / "site/prolog_epilog/epilog"
    ours = epilog.read_text()
    first, rest = ours.split("\n", 1)
    job = site.job(nodes=2)
    job.reach(5)
    node = job.hosts()[1]
    site.sh(node, "setsid sleep 977 >/dev/null 2>&1 </dev/null &", user="alice")
    until(lambda: site.sh(node, f"pgrep -U alice -f '{LEFT}'"), what="a process that the job's owner has left")
    epilog.write_text(f"{first}\n{clean_up}{rest}")
    try:
        at = max(line["version"] for line in job.lines("step"))
        assert site.cluster.run(["scontrol", "requeue", str(job.id)]).returncode == 0
        until(lambda: job.lines("resumed", 1), 60, what="the next incarnation")
        assert not site.sh(node, f"pgrep -U alice -f '{LEFT}'")
    finally:
        epilog.write_text(ours)
    job.finish()
    assert job.resumed(1) >= at - 1 if spares_agents else job.resumed(1) == 0, job.story()
    told = [e["detail"] for e in job.events() if "no agent of an earlier start is left" in e["detail"]]
    assert bool(told) is not spares_agents, job.story()
